//! Pools on files in a scratch directory, for tests: created, killed, and removed again whatever
//! has become of them.
//!
//! Callers: the other modules of the suite, which add their own methods to [`Pool`]. Invariant:
//! after a [`Yard`] is dropped, none of its pools is imported or expected to be, none of their
//! processes runs and nothing of them is mounted; a test that leaves more than the program removed
//! itself fails. With `NACRE_POOL_KEEP` in the environment the file of a [`Pool`] whose test failed
//! is kept.

use super::{clear, eventually, finish, is_gone, kill, nacre, scratch, text};
use rustix::process::Signal;
use std::{
    fs,
    ops::Deref,
    os::unix::{fs::PermissionsExt, fs::chown, process::CommandExt},
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

/// Time limit for the end of a pool, in seconds: one that is stuck is killed then.
const END: &str = "60";

/// A scratch directory with the pools of one test.
pub struct Yard {
    /// The directory.
    pub place: tempfile::TempDir,
    /// Owner of the pools if not root: then they are in `home`.
    user: Option<u32>,
    names: Mutex<Vec<String>>,
}

impl Yard {
    /// Creates an empty yard.
    pub fn new() -> Yard {
        Yard::of(None)
    }

    /// Creates an empty yard for an ordinary user.
    pub fn of(user: Option<u32>) -> Yard {
        let yard = Yard { place: scratch(), user, names: Mutex::default() };
        if user.is_some() {
            for directory in ["home", "home/run"] {
                fs::create_dir(yard.path(directory)).unwrap();
                chown(yard.path(directory), user, user).unwrap();
            }
            fs::set_permissions(yard.path("home/run"), fs::Permissions::from_mode(0o700)).unwrap();
        }
        yard
    }

    /// Returns a path in the yard.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Returns a name for a pool that no other test uses.
    pub fn name(&self, short: &str) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        self.called(format!("{short}{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Registers a pool name, so that the pool of this name is removed with the others.
    pub fn called(&self, name: String) -> String {
        self.names.lock().unwrap().push(name.clone());
        name
    }

    /// Returns a command of the program, called by this name. Its state is kept in this directory.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(nacre());
        self.equip(command.arg0(program));
        command
    }

    fn equip(&self, command: &mut Command) {
        command.current_dir(self.place.path()).env("LC_ALL", "C").env("TZ", "UTC").env("NO_COLOR", "1");
        command.env("NACRE_STATE_DIR", self.state());
        if let Some(uid) = self.user {
            command.uid(uid).gid(uid).env("HOME", self.path("home")).env("XDG_RUNTIME_DIR", self.path("home/run"));
        }
    }

    /// Directory in which the locations of pools are remembered.
    pub fn state(&self) -> PathBuf {
        self.path(if self.user.is_some() { "home/state" } else { "state" })
    }

    /// Directory of the pools' sockets.
    pub fn runtime(&self) -> PathBuf {
        if self.user.is_some() { self.path("home/run/nacre") } else { PathBuf::from("/run/nacre") }
    }

    /// Runs `nacre` with these arguments, in which `%` stands for the name of the first pool.
    pub fn run(&self, words: &[&str]) -> Output {
        let first = self.names.lock().unwrap().first().cloned();
        let named =
            words.iter().map(|word| first.as_ref().map_or_else(|| (*word).to_owned(), |name| word.replace('%', name)));
        finish(self.command("nacre").args(named))
    }

    /// Runs a command that has to succeed; returns its standard output.
    pub fn nacre(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a command that has to succeed; returns its standard output and error.
    pub fn told(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
        said
    }

    /// Runs a command that has to be refused; returns the exit code and the message.
    pub fn refused(&self, words: &[&str]) -> (i32, String) {
        let output = self.run(words);
        assert!(!output.status.success(), "{words:?} succeeded: {}", text(&output.stdout));
        (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
    }

    /// Creates a pool on a new file of 64 MiB and mounts it here; returns its name, its file, its
    /// mount point.
    pub fn create(&self, short: &str, more: &[&str]) -> (String, PathBuf, PathBuf) {
        let (name, device, at) =
            (self.name(short), self.path(&format!("{short}.img")), self.path(&format!("{short}.at")));
        let words = ["pool", "create", "--size", "64M", "-m", at.to_str().unwrap()];
        self.nacre(&[&words[..], more, &[&name, device.to_str().unwrap()]].concat());
        (name, device, at)
    }

    /// Returns the process that owns a pool.
    pub fn process(&self, name: &str) -> u32 {
        let status: serde_json::Value = serde_json::from_str(&self.nacre(&["pool", "status", "--json", name])).unwrap();
        u32::try_from(status["pools"][name]["process"].as_u64().unwrap()).unwrap()
    }

    /// Sends a fatal signal to the process of a pool, and waits for its end.
    pub fn end(&self, name: &str, signal: Signal) {
        Yard::end_process(self.process(name), signal);
    }

    /// Sends a fatal signal to a known process, and waits for its end.
    pub fn end_process(process: u32, signal: Signal) {
        kill(process, signal);
        // While one of its threads is ending, the process still has its devices open, although it
        // counts as ended.
        let there = PathBuf::from(format!("/proc/{process}"));
        eventually("the end of the process", || !there.exists());
    }

    /// Returns the processes that run for pools of this directory, with their command lines.
    pub fn processes(&self) -> Vec<(u32, String)> {
        let mark = format!("NACRE_STATE_DIR={}", self.state().display()).into_bytes();
        let numbers =
            fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let ours = numbers.filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| *one == mark))
                && !is_gone(*pid)
        });
        ours.map(|pid| (pid, text(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")))
            .collect()
    }

    /// Returns what remains of its pools although none is imported: mounts by their source, files
    /// next to sockets, unfinished files.
    fn left(&self, names: &[String]) -> Vec<String> {
        let is_of = |source: &str| {
            names.iter().any(|name| {
                source.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '@']))
            })
        };
        let table = super::mount_table();
        let shown = table.lines().filter(|line| {
            line.split_once(" - ").is_some_and(|(_, right)| is_of(right.split(' ').nth(1).unwrap_or("")))
        });
        let mut left: Vec<String> = shown.map(str::to_owned).collect();
        for path in fs::read_dir(self.runtime()).into_iter().flatten().map(|entry| entry.unwrap().path()) {
            let of_one = path.file_stem().is_some_and(|stem| names.iter().any(|name| stem == name.as_str()));
            let numbered = path.extension().is_some_and(|last| last == "guid")
                && fs::read_to_string(&path).is_ok_and(|name| names.contains(&name));
            if of_one || numbered {
                left.push(path.display().to_string());
            }
        }
        for path in fs::read_dir(self.state().join("pools")).into_iter().flatten().map(|entry| entry.unwrap().path()) {
            if path.extension().is_none_or(|last| last != "json" && last != "seen") {
                left.push(path.display().to_string());
            }
        }
        left
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        let names = std::mem::take(&mut *self.names.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for name in &names {
            // Most are gone already. A pool whose process was killed is forgotten.
            for verb in ["destroy", "export"] {
                let mut command = Command::new("timeout");
                self.equip(command.args(["-s", "KILL", END]).arg(nacre()).args(["pool", verb, "-f", name]));
                let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
            }
            // The log of the pool's process: its failures were caused by the test.
            let _ = fs::remove_file(self.runtime().join(format!("{name}.log")));
        }
        let running = self.processes();
        let mut left: Vec<String> = running.iter().map(|(pid, command)| format!("process {pid}: {command}")).collect();
        for (pid, _) in running {
            kill(pid, Signal::KILL);
        }
        left.extend(self.left(&names));
        clear(self.place.path());
        if !left.is_empty() && !std::thread::panicking() {
            panic!("left over:\n{}", left.join("\n"));
        }
    }
}

/// A mounted pool on one file.
pub struct Pool {
    /// Its name.
    pub name: String,
    /// The file.
    pub device: PathBuf,
    /// Where it is mounted.
    root: PathBuf,
    yard: Yard,
}

impl Pool {
    /// Creates a pool with these arguments.
    pub fn made(short: &str, size: &str, more: &[&str]) -> Pool {
        Pool::within(Yard::new(), short, size, more)
    }

    /// Creates a pool in an existing yard.
    pub fn within(yard: Yard, short: &str, size: &str, more: &[&str]) -> Pool {
        let device = yard.path(if yard.user.is_some() { "home/image" } else { "image" });
        Pool::on(yard, device, short, size, more)
    }

    /// Creates a pool on a file elsewhere.
    pub fn on(yard: Yard, device: PathBuf, short: &str, size: &str, more: &[&str]) -> Pool {
        let root = yard.path(if yard.user.is_some() { "home/at" } else { "at" });
        let pool = Pool { name: yard.name(short), device, root, yard };
        let words = ["pool", "create", "--size", size, "-m", pool.root.to_str().unwrap()];
        pool.yard.nacre(&[&words[..], more, &[&pool.name, pool.device.to_str().unwrap()]].concat());
        pool
    }

    /// Returns a path in its root file system; for an empty name the root itself.
    pub fn at(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    /// Returns the full name of one of its file systems.
    pub fn of(&self, name: &str) -> String {
        format!("{}/{name}", self.name)
    }

    /// Imports it from its file.
    pub fn import(&self) {
        self.nacre(&["pool", "import", "-d", self.device.to_str().unwrap(), &self.name]);
    }

    /// Kills its process, as a crash would.
    pub fn die(&self) {
        self.end(&self.name, Signal::KILL);
    }

    /// Detaches its mounts.
    pub fn leave(&self) {
        clear(&self.root);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("NACRE_POOL_KEEP").is_some() {
            let kept = std::env::temp_dir().join(format!("kept-{}", self.name));
            let _ = fs::copy(&self.device, &kept);
            eprintln!("the device is kept as {}", kept.display());
        }
    }
}

impl Deref for Pool {
    type Target = Yard;

    fn deref(&self) -> &Yard {
        &self.yard
    }
}
