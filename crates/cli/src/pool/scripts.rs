//! `nacre pool status -c SCRIPT,...`: programs that report more about each device, in one column or
//! several, as `zpool` runs them.
//!
//! A program is named without a directory and lies in one of `ZPOOL_SCRIPTS_PATH` (else
//! `~/.zpool.d` and `/etc/zfs/zpool.d`). It finds the device in `VDEV_PATH` and `VDEV_UPATH`, and
//! prints lines `NAME=VALUE`, or a value alone, whose column has the program's name. Root has to
//! allow it: `ZPOOL_SCRIPTS_AS_ROOT=1`.

use nacre_daemon::{failure::Failure, report::printable};
use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Results of the programs: the columns in their order, and the values by device and column.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    names: Vec<String>,
    values: BTreeMap<String, BTreeMap<String, String>>,
}

fn is_on(variable: &str) -> Option<bool> {
    let value = env::var(variable).ok()?.to_lowercase();
    Some(matches!(value.as_str(), "yes" | "on") || value.parse::<i64>().is_ok_and(|number| number != 0))
}

fn places() -> Vec<PathBuf> {
    if let Some(all) = env::var_os("ZPOOL_SCRIPTS_PATH") {
        return env::split_paths(&all).collect();
    }
    let own = env::var_os("HOME").map(|home| Path::new(&home).join(".zpool.d"));
    own.into_iter().chain([PathBuf::from("/etc/zfs/zpool.d")]).collect()
}

/// Finds the programs of a comma-separated list, with their names.
///
/// # Errors
/// A program that does not exist; root without `ZPOOL_SCRIPTS_AS_ROOT`.
pub fn find(names: &str) -> Result<Vec<(String, PathBuf)>, Failure> {
    if is_on("ZPOOL_SCRIPTS_ENABLED") == Some(false) {
        return Err(Failure::new("Can't run -c, disabled by ZPOOL_SCRIPTS_ENABLED."));
    }
    if rustix::process::geteuid().is_root() && is_on("ZPOOL_SCRIPTS_AS_ROOT") != Some(true) {
        return Err(Failure::new("Can't run -c with root privileges unless ZPOOL_SCRIPTS_AS_ROOT is set."));
    }
    let find = |name: &str| {
        let bad = |why: &str| Failure::new(format!("Can't run script '{name}': {why}"));
        if name.is_empty() || name.contains('/') {
            return Err(bad("a script is named without its directory"));
        }
        let found = places().into_iter().map(|place| place.join(name)).find(|path| path.is_file());
        found
            .map(|path| (name.to_owned(), path))
            .ok_or_else(|| bad("it is not in ~/.zpool.d, /etc/zfs/zpool.d or ZPOOL_SCRIPTS_PATH"))
    };
    names.split(',').map(find).collect()
}

impl Columns {
    /// Runs all programs for all devices.
    pub fn told<'a>(programs: &[(String, PathBuf)], devices: impl Iterator<Item = &'a str>) -> Columns {
        let mut columns = Columns::default();
        for device in devices {
            for (name, program) in programs {
                columns.run(name, program, device);
            }
        }
        columns
    }

    fn run(&mut self, name: &str, program: &Path, device: &str) {
        // The path with links resolved.
        let real = std::fs::canonicalize(device).map_or_else(|_| OsString::from(device), PathBuf::into_os_string);
        let mut command = Command::new(program);
        command.env("VDEV_PATH", device).env("VDEV_UPATH", real).env_remove("VDEV_ENC_SYSFS_PATH").stdin(Stdio::null());
        let output = match command.output() {
            Ok(output) => output,
            Err(error) => {
                nacre_daemon::report::tell(&Failure::io("cannot run", program.display(), &error).what);
                return;
            }
        };
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let (column, value) = line
                .split_once('=')
                .filter(|(column, _)| !column.contains(char::is_whitespace))
                .unwrap_or((name, line));
            self.add(device, column, &printable(value.trim().as_bytes()));
        }
        if output.stdout.is_empty() {
            self.add(device, name, "");
        }
    }

    fn add(&mut self, device: &str, column: &str, value: &str) {
        let column = printable(column.as_bytes());
        if !self.names.contains(&column) {
            self.names.push(column.clone());
        }
        self.values.entry(device.to_owned()).or_default().insert(column, value.to_owned());
    }

    fn width(&self, column: &str) -> usize {
        let values = self.values.values().filter_map(|values| values.get(column)).map(|value| value.chars().count());
        values.chain([column.chars().count()]).max().unwrap_or(0)
    }

    fn line<'a>(&'a self, cell: impl Fn(&'a str) -> &'a str) -> String {
        self.names.iter().map(|name| format!("  {:>width$}", cell(name), width = self.width(name))).collect()
    }

    /// Returns the headings of the columns.
    pub fn heading(&self) -> String {
        self.line(|name| name)
    }

    /// Returns empty columns, for a row that is no device.
    pub fn nothing(&self) -> String {
        self.line(|_| "")
    }

    /// Returns the columns of a device.
    pub fn of(&self, device: &str) -> String {
        let own = self.values.get(device);
        self.line(|name| {
            own.and_then(|own| own.get(name)).filter(|value| !value.is_empty()).map_or("-", String::as_str)
        })
    }
}
