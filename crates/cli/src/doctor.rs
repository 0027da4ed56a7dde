//! `nacre doctor`: checks which features this machine supports, and names the commands that provide the
//! missing ones.
//!
//! Invariants: it only looks: nothing is mounted, changed or started. Only what every mount needs is
//! [`State::Missing`] and makes the exit code 1; what makes mounts faster or gives them to more people
//! is [`State::Could`].

use crate::output::print;
use nacre_daemon::{
    failure::{Exit, Failure},
    fuse_conf,
};
use nacre_sys::kernel_version::kernel_version;
use rustix::{
    fs::{Access, AtFlags, CWD, accessat},
    process::{Resource, geteuid, getrlimit},
    thread::{CapabilitySet, capabilities},
};
use serde::Serialize;
use std::{
    env, fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Status of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Nothing is missing.
    Ok,
    /// Mounts work without it; more would be possible with it.
    Could,
    /// Nothing can be mounted without it.
    Missing,
}

/// Result of one check.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    /// Stable name of the check.
    name: &'static str,
    state: State,
    /// Description of the state.
    found: String,
    /// The command that provides the missing part; root has to run it where it begins with `#`.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, found: found.into(), command: None }
    }

    fn could(name: &'static str, found: impl Into<String>, command: impl Into<Option<String>>) -> Finding {
        Finding { name, state: State::Could, found: found.into(), command: command.into() }
    }
}

/// Returns a command that root has to run.
fn root(command: &str) -> Option<String> {
    Some(format!("# {command}"))
}

/// Checks the machine and prints the findings.
///
/// # Errors
/// Output that cannot be written.
pub fn run(json: bool) -> Result<ExitCode, Failure> {
    let findings = findings();
    let fails = findings.iter().any(|finding| finding.state == State::Missing);
    if json {
        let object = serde_json::json!({ "works": !fails, "findings": findings });
        print(&(serde_json::to_string_pretty(&object).map_err(|error| Failure::new(error.to_string()))? + "\n"))?;
    } else {
        print(&text(&findings))?;
    }
    Ok(if fails { ExitCode::from(Exit::Failure as u8) } else { ExitCode::SUCCESS })
}

fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let word = match finding.state {
            State::Ok => "ok",
            State::Could => "could",
            State::Missing => "MISSING",
        };
        text.push_str(&format!("{word:<8}{:<16}{}\n", finding.name, finding.found));
        if let Some(command) = &finding.command {
            text.push_str(&format!("{:<24}{command}\n", ""));
        }
    }
    text
}

fn findings() -> Vec<Finding> {
    let root = geteuid().is_root();
    let admin = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    let kernel = kernel_version();
    let mut found = vec![
        Finding::ok("kernel", format!("Linux {}.{}", kernel.0, kernel.1)),
        device(),
        fusermount(admin),
        others(admin),
        uring(kernel),
        passthrough(kernel, admin),
        descriptors(),
        watching(admin),
        sync(kernel, root),
        mount_helper(),
    ];
    found.extend(RIVALS.iter().map(|name| rival(name)));
    found
}

/// Checks for the FUSE device.
fn device() -> Finding {
    const DEVICE: &str = "/dev/fuse";
    let missing = |found: &str, command: &str| Finding {
        name: "fuse",
        state: State::Missing,
        found: found.to_owned(),
        command: root(command),
    };
    if !Path::new(DEVICE).exists() {
        let in_container = Path::new("/run/.containerenv").exists() || Path::new("/.dockerenv").exists();
        return if in_container {
            let found = "/dev/fuse is not in this container: start it with --device /dev/fuse";
            Finding { name: "fuse", state: State::Missing, found: found.to_owned(), command: None }
        } else {
            missing("/dev/fuse is not there: the module is not loaded", "modprobe fuse")
        };
    }
    match fs::File::options().read(true).write(true).open(DEVICE) {
        Ok(_) => Finding::ok("fuse", DEVICE),
        Err(error) => missing(&format!("{DEVICE} cannot be opened: {error}"), "chmod 666 /dev/fuse"),
    }
}

/// Returns the first program with this name on the search path.
fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    places
        .map(|place| place.join(name))
        .find(|file| file.is_file() && accessat(CWD, file, Access::EXEC_OK, AtFlags::empty()).is_ok())
}

/// Checks for the program that mounts for ordinary users.
fn fusermount(admin: bool) -> Finding {
    const NAME: &str = "fusermount3";
    let state = if admin { State::Could } else { State::Missing };
    let install = root("apt-get install fuse3");
    let Some(file) = program(NAME) else {
        let found = "not installed: ordinary users cannot mount";
        return Finding { name: NAME, state, found: found.to_owned(), command: install };
    };
    match fs::metadata(&file) {
        Ok(data) if data.uid() == 0 && data.permissions().mode() & 0o4000 != 0 => {
            Finding::ok(NAME, file.display().to_string())
        }
        _ => Finding {
            name: NAME,
            state,
            found: format!("{} is not set-user-id root: ordinary users cannot mount", file.display()),
            command: root(&format!("chown root:root {0} && chmod 4755 {0}", file.display())),
        },
    }
}

/// Checks whether mounts of ordinary users can be shown to other users.
fn others(admin: bool) -> Finding {
    if fuse_conf::may_show_others() {
        return Finding::ok("fuse.conf", "ordinary users may show their mounts to others");
    }
    let who = if admin { "mounts of ordinary users are" } else { "your mounts are" };
    let found = format!("{who} their owners' alone: user_allow_other is not in {}", fuse_conf::PATH);
    Finding::could("fuse.conf", found, root(&format!("echo user_allow_other >> {}", fuse_conf::PATH)))
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Checks for the io_uring transport.
fn uring(kernel: (u32, u32)) -> Finding {
    const NAME: &str = "io_uring";
    const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
    if read("/proc/sys/kernel/io_uring_disabled").is_some_and(|value| value == "2") {
        let command = root("sysctl kernel.io_uring_disabled=0");
        return Finding::could(NAME, "io_uring is switched off on this machine: slower transport", command);
    }
    match read(SWITCH).as_deref() {
        Some("Y" | "1") => Finding::ok(NAME, "new mounts talk to the kernel over io_uring"),
        Some(_) => Finding::could(NAME, "switched off for FUSE: slower transport", root(&format!("echo 1 > {SWITCH}"))),
        None if kernel < (6, 14) => {
            Finding::could(NAME, "this kernel is too old for FUSE over io_uring (Linux 6.14): slower transport", None)
        }
        None => Finding::could(NAME, "this kernel was built without FUSE over io_uring: slower transport", None),
    }
}

/// Checks for FUSE passthrough.
fn passthrough(kernel: (u32, u32), admin: bool) -> Finding {
    const NAME: &str = "passthrough";
    if kernel < (6, 9) {
        return Finding::could(NAME, "this kernel is too old (Linux 6.9): data goes through the daemon", None);
    }
    if admin {
        Finding::ok(NAME, "the kernel reads and writes the files of the source itself")
    } else {
        Finding::could(NAME, "only for mounts of root (CAP_SYS_ADMIN): data goes through the daemon", None)
    }
}

/// Checks how many files a process can have open.
fn descriptors() -> Finding {
    const WANTED: u64 = 65_536;
    let most = getrlimit(Resource::Nofile).maximum;
    match most {
        Some(most) if most < WANTED => {
            let found = format!("at most {most} open files per process: directories are opened again and again");
            let lines = format!("'* hard nofile {WANTED}\\nroot hard nofile {WANTED}\\n'");
            let command = format!("printf {lines} > /etc/security/limits.d/nacre.conf   (then log in again)");
            Finding::could("open-files", found, root(&command))
        }
        most => Finding::ok(
            "open-files",
            most.map_or_else(|| "no limit".to_owned(), |most| format!("up to {most} per process")),
        ),
    }
}

/// Checks by which means changes by others are noticed.
fn watching(admin: bool) -> Finding {
    const NAME: &str = "watching";
    let kind = if admin { "fanotify" } else { "inotify" };
    let (path, least) = match admin {
        true => ("/proc/sys/fs/fanotify/max_user_marks", 8192),
        false => ("/proc/sys/fs/inotify/max_user_watches", 65_536),
    };
    let Some(most) = read(path).and_then(|text| text.parse::<u64>().ok()) else {
        return Finding::could(NAME, format!("this kernel has no {kind}: changes by others are asked for"), None);
    };
    if most >= least {
        return Finding::ok(NAME, format!("up to {most} marks of {kind}"));
    }
    let sysctl = path.trim_start_matches("/proc/sys/").replace('/', ".");
    let found = format!("only {most} marks of {kind}: large trees are asked for changes instead");
    Finding::could(NAME, found, root(&format!("sysctl {sysctl}={least}")))
}

/// Checks whether pools are notified of sync(2).
fn sync(kernel: (u32, u32), is_root: bool) -> Finding {
    const NAME: &str = "sync";
    if !is_root {
        return Finding::could(
            NAME,
            "pools hear of sync(2) only where root imported them: wait with 'nacre pool sync'",
            None,
        );
    }
    if kernel < (6, 18) {
        return Finding::could(NAME, "pools hear of sync(2) from Linux 6.18 on: wait with 'nacre pool sync'", None);
    }
    if Path::new("/dev/loop-control").exists() {
        return Finding::ok(NAME, "pools hear of sync(2)");
    }
    Finding::could(NAME, "pools do not hear of sync(2): there are no loop devices", root("modprobe loop"))
}

/// Returns the file of a path, links resolved.
fn end(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_| file.to_owned())
}

fn own() -> PathBuf {
    env::current_exe().map_or_else(|_| PathBuf::from("nacre"), |file| end(&file))
}

/// Checks whether mount(8) and fstab know the type `fuse.nacre`.
fn mount_helper() -> Finding {
    const NAME: &str = "mount-helper";
    // mount(8) looks in no other directories.
    let Some(helper) = ["/sbin", "/usr/sbin"]
        .map(|place| Path::new(place).join("mount.fuse.nacre"))
        .into_iter()
        .find(|file| file.exists())
    else {
        let command = root(&format!("ln -s {} /usr/sbin/mount.fuse.nacre", own().display()));
        return Finding::could(NAME, "lines of fstab with the type fuse.nacre do not work", command);
    };
    let target = end(&helper);
    if target == own() {
        return Finding::ok(NAME, format!("{} is this program", helper.display()));
    }
    let command = root(&format!("ln -sfn {} {}", own().display(), helper.display()));
    Finding::could(NAME, format!("{} is another program: {}", helper.display(), target.display()), command)
}

/// Other programs' names under which this program accepts their command lines.
const RIVALS: [&str; 5] = ["bindfs", "fuse-overlayfs", "mergerfs", "zfs", "zpool"];

/// Checks which program has the name of another one.
fn rival(name: &'static str) -> Finding {
    match program(name) {
        Some(file) if end(&file) == own() => Finding::ok(name, format!("{} is this program", file.display())),
        Some(file) => Finding::ok(name, format!("{} is another program, and stays", file.display())),
        None => Finding::could(
            name,
            "not installed; this program takes its command lines under that name",
            root(&format!("ln -s {} /usr/local/bin/{name}", own().display())),
        ),
    }
}
