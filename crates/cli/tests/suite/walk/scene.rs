//! The scene of a verb: directories, mounts over them and a pool in a scratch directory, and all of
//! its visible state.

use crate::mounting::{
    Reaped, can_mount, eventually, finish, is_gone, kill, mount_table, mounts_below, nacre, pools::Yard, text,
};
use rustix::process::Signal;
use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Visible state, one fact a line, without values that differ in each run.
pub type Look = BTreeSet<String>;

/// Describes the facts that are in only one of two states.
pub fn difference(a: &Look, b: &Look) -> String {
    let only = |sign: &str, one: &Look, other: &Look| {
        one.difference(other).map(|line| format!("    {sign} {line}\n")).collect::<String>()
    };
    only("-", a, b) + &only("+", b, a)
}

/// Preparation that every scene has before its own.
const GROUND: &str =
    "mkdir source source/d upper lower other work at state && echo content >source/a && head -c 300000 /dev/zero >source/d/b
    echo upper >upper/u && echo lower >lower/l && echo other >other/o && mkdir lower/d && echo deep >lower/d/deep";

/// The optional pool of a scene: file systems, snapshots, a clone, holds and bookmarks.
const POOL: &str =
    "nacre pool create --size 128M -m $PWD/pool $P image && nacre fs create $P/a && echo one >pool/a/one && nacre fs snapshot $P/a@s
    echo two >pool/a/two && nacre pool sync $P";

/// A place where a verb is walked.
pub struct Scene {
    yard: Yard,
    pool: Option<String>,
    /// A unique name: of the pool, or of a process for several mounts.
    unique: String,
    /// Processes that were seen: their runtime files next to sockets are identified by their
    /// process ids.
    seen: RefCell<BTreeSet<u32>>,
}

impl Scene {
    /// Prepared by a shell script.
    pub fn new(prepare: &str, pool: bool) -> Scene {
        assert!(can_mount());
        let yard = Yard::new();
        fs::create_dir(yard.path(".programs")).unwrap();
        std::os::unix::fs::symlink(nacre(), yard.path(".programs/nacre")).unwrap();
        let name = yard.name("walk");
        let other = yard.called(format!("{name}x"));
        let scene = Scene { yard, pool: pool.then_some(name.clone()), unique: name.clone(), seen: RefCell::default() };
        let script = [GROUND, if pool { POOL } else { "true" }, if prepare.is_empty() { "true" } else { prepare }];
        // Nothing of the preparation is lost with a process that is killed.
        let sync = if pool { "nacre pool sync $P 2>/dev/null || true" } else { "true" };
        let script = format!("{}\n{sync}", script.join("\n"));
        let output = finish(scene.shell(&script).env("P", name).env("X", other));
        assert!(output.status.success(), "{prepare}: {}{}", text(&output.stdout), text(&output.stderr));
        if scene.mounts().is_empty() {
            // The process of mounts that the preparation ended ends a moment after them.
            eventually("the end of the serving processes", || pool || scene.note().is_empty());
        }
        scene
    }

    fn shell(&self, script: &str) -> Command {
        let mut command = self.yard.command("sh");
        let (place, path) = (self.yard.place.path(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell
            .args(["-ec", script])
            .current_dir(place)
            .envs(command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))));
        shell
            .env("PATH", format!("{}:{path}", self.yard.path(".programs").display()))
            .env("P", self.name())
            .env("X", format!("{}x", self.name()))
            .env("D", &self.unique);
        command = shell;
        command
    }

    fn name(&self) -> String {
        self.pool.clone().unwrap_or_default()
    }

    /// Runs a command of the program; returns its exit code and its output.
    pub fn run(&self, words: &str) -> (Option<i32>, String) {
        let output = finish(&mut self.shell(&format!("exec nacre {words}")));
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }

    /// Runs the command as an ordinary user who has access to the scene.
    pub fn run_as_user(&self, words: &str) -> (Option<i32>, String) {
        let script = format!("exec setpriv --reuid=65534 --regid=65534 --clear-groups -- nacre {words}");
        let output = finish(self.shell(&script).env("HOME", "/nonexistent").env("XDG_RUNTIME_DIR", "/nonexistent"));
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }

    /// Carries a command out and kills it after so many milliseconds.
    pub fn killed(&self, words: &str, after: u64) {
        let mut command = self.shell(&format!("exec nacre {words}"));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_millis(after);
        // The moment is what the walk is about: nothing is waited for.
        while Instant::now() < until && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.note();
        let _ = child.kill();
        child.wait().unwrap();
    }

    fn note(&self) -> Vec<(u32, String)> {
        let processes = self.yard.processes();
        self.seen.borrow_mut().extend(processes.iter().map(|(pid, _)| *pid));
        processes
    }

    /// Kills all processes that run behind the scene.
    pub fn kill_all(&self) {
        for (pid, _) in self.note() {
            kill(pid, Signal::KILL);
            eventually("the end of the process", || is_gone(pid) && !Path::new(&format!("/proc/{pid}")).exists());
        }
    }

    /// Mounts in the scene that are the program's, the last first.
    fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(self.yard.place.path())
            .into_iter()
            .filter(|place| !place.ends_with("state") && !place.ends_with("small"))
            .collect()
    }

    /// Recovers as a user does after a crash: removes dead mounts, and imports the pool again.
    pub fn recover(&self) {
        self.run("status");
        self.run("cage list");
        if self.pool.is_some() {
            let (_, said) = self.run("pool list $P");
            if said.contains("UNAVAIL") {
                let (code, said) = self.run("pool import -d $PWD $P");
                if code == Some(3) {
                    // It was destroyed already, without an answer to the command.
                    self.run("pool export -f $P");
                } else {
                    assert_eq!(code, Some(0), "{said}");
                }
            }
        }
        for place in self.mounts() {
            if rustix::fs::statfs(&place).is_err() {
                self.run(&format!("umount {}", place.display()));
            }
        }
    }

    /// Mounts the union of the preparation again, as its user will: the partial results of a killed
    /// process are removed then.
    pub fn mount_union_again(&self, prepare: &str) {
        if let Some((_, words)) = prepare.rsplit_once("nacre union ") {
            self.run(&format!("union {words}"));
        }
    }

    /// Ends all mounts that are none of the pool's.
    pub fn unmount_all(&self) {
        for place in self.mounts().into_iter().filter(|place| !place.starts_with(self.yard.path("pool"))) {
            self.run(&format!("umount {}", place.display()));
        }
    }

    /// Processes that sit in all that is mounted.
    pub fn sit(&self) -> Vec<Reaped> {
        self.mounts()
            .iter()
            .filter_map(|place| {
                Command::new("sleep").arg("600").current_dir(place).stdin(Stdio::null()).spawn().ok().map(Reaped)
            })
            .collect()
    }

    /// Uses up all space: of the pool, or of the directory of persistent state.
    pub fn fill(&self) {
        let script = if self.pool.is_some() {
            "head -c 200M /dev/urandom >pool/.filler 2>/dev/null || true; nacre pool sync $P"
        } else {
            "mv state state.old; mkdir state; mount -t tmpfs -o size=64k,mode=755 tmpfs state; cp -a state.old/. state; rm -r state.old; head -c 1M /dev/zero >state/.filler 2>/dev/null || true"
        };
        finish(&mut self.shell(script));
    }

    /// Returns a text without values that differ in each run.
    fn plain(&self, text: &str) -> String {
        let text = text.replace(&self.yard.place.path().display().to_string(), "@");
        let text = text.replace(&self.unique, "%");
        // The names of accounts have the path in them, and generations of a log are what they are.
        let scratch = self.yard.place.path().display().to_string().trim_start_matches('/').replace('/', "-");
        let text = text.replace(&scratch, "@");
        let unnumbered = |text: String, mark: &str| match text.split_once(mark) {
            Some((start, rest)) => format!("{start}{mark}{}", rest.trim_start_matches(|c: char| c.is_ascii_digit())),
            None => text,
        };
        let text = unnumbered(text, "/log.");
        let mut plain = String::new();
        for word in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
            let (end, tail) = word
                .char_indices()
                .last()
                .filter(|(_, c)| !c.is_ascii_alphanumeric())
                .map_or((word, ""), |(at, _)| word.split_at(at));
            let number = end.len() >= 8 && end.chars().all(|c| c.is_ascii_hexdigit());
            // Of the names of snapshots that have the time in them, as of now.
            let digits = |text: &str| text.bytes().filter(u8::is_ascii_digit).count();
            let time = plain.contains("@replicate-") && digits(end) > 0 && digits(end) + 2 > end.len();
            plain += if number || time { "#" } else { end };
            plain += tail;
        }
        plain
    }

    /// Everything that can be seen.
    pub fn look(&self) -> Look {
        let mut look = Look::new();
        let place = self.yard.place.path();
        for line in mount_table().lines() {
            let (left, right) = line.split_once(" - ").unwrap();
            let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
            let at = Path::new(left[4]);
            let of_pool = self.pool.as_ref().is_some_and(|name| right[1].split(['/', '@']).next() == Some(name));
            if (at.starts_with(place) || of_pool) && !at.ends_with("state") {
                let dead = if rustix::fs::statfs(at).is_err() { " dead" } else { "" };
                // The number of a loop device is another one each time.
                let source = if right[1].starts_with("/dev/loop") { "/dev/loop" } else { right[1] };
                look.insert(self.plain(&format!("mount {} {} {source} {}{dead}", left[4], right[0], left[5])));
            }
        }
        for (_, command) in self.note() {
            look.insert(self.plain(&format!("process {}", command.trim())));
        }
        for path in fs::read_dir(self.yard.runtime()).into_iter().flatten().map(|entry| entry.unwrap().path()) {
            let (name, stem) = (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                path.file_stem().unwrap().to_string_lossy().into_owned(),
            );
            let ours = self.seen.borrow().iter().any(|pid| stem.split('-').next() == Some(pid.to_string().as_str()));
            if ours {
                look.insert(format!("run PID.{}", path.extension().unwrap_or_default().to_string_lossy()));
            } else if stem.starts_with(&self.unique) && !name.ends_with(".log") {
                look.insert(self.plain(&format!("run {name}")));
            }
        }
        self.look_below(place, &mut look);
        if self.pool.is_some() {
            self.look_at_pool(&mut look);
        }
        look
    }

    fn look_below(&self, directory: &Path, look: &mut Look) {
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => {
                look.insert(self.plain(&format!("file {}: {}", directory.display(), error.kind())));
                return;
            }
        };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let name = path.file_name().unwrap().to_string_lossy();
            if matches!(&*name, ".filler" | ".programs" | "lost+found") {
                continue;
            }
            let kept = path.starts_with(self.yard.state());
            let there = match fs::symlink_metadata(&path) {
                Ok(there) => there,
                // A log whose cage has just begun the next one, as any cage does now and then.
                Err(error) if kept && error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    look.insert(self.plain(&format!("file {}: {}", path.display(), error.kind())));
                    continue;
                }
            };
            // A checkpoint that is just being written, as any cage does now and then.
            if kept && name == "checkpoint.new" {
                continue;
            }
            let content = if there.is_file() && there.len() < 1 << 20 && !kept {
                let mut hasher = DefaultHasher::new();
                fs::read(&path).unwrap_or_default().hash(&mut hasher);
                format!("{:x}", hasher.finish() & 0xffff)
            } else {
                String::new()
            };
            // Where what is kept for later is, is always the same.
            if kept && there.is_dir() && matches!(&*name, "cage" | "kernel" | "pools") {
                self.look_below(&path, look);
                continue;
            }
            // The size of a directory has no meaning, and persistent state is described by its
            // name.
            let size = if there.is_file() && !kept { there.len() } else { 0 };
            look.insert(self.plain(&format!(
                "file {} {:o} {}:{} {size} {content}",
                path.display(),
                there.mode(),
                there.uid(),
                there.gid()
            )));
            if there.is_dir() {
                self.look_below(&path, look);
            }
        }
    }

    fn look_at_pool(&self, look: &mut Look) {
        let (code, said) = self.run("pool get -H -o property,value size,health,comment,readonly $P");
        look.extend(said.lines().map(|line| self.plain(&format!("pool {line}"))));
        if code == Some(0) && !said.contains("UNAVAIL") {
            let properties = "type,mounted,mountpoint,origin,userrefs,quota,compression";
            let (_, said) = self.run(&format!("fs get -H -r -t all -o name,property,value,source {properties} $P"));
            look.extend(said.lines().map(|line| self.plain(&format!("has {line}"))));
            return;
        }
        let (_, said) = self.run("pool import -d $PWD");
        let told = said.lines().map(str::trim).filter(|line| line.starts_with("pool:") || line.starts_with("state:"));
        look.extend(told.map(|line| self.plain(&format!("found {line}"))));
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // What was left has been judged. Mounts first: what serves them ends with them.
        self.unmount_all();
        if self.pool.is_none() {
            self.kill_all();
        }
    }
}
