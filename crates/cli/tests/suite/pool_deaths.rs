//! Pools that survive their process, where more than that process fails: the supervisor as well, a
//! device, or the command that was running.
//!
//! Deaths of the process alone are in `pool_survival.rs`.

use crate::mounting::{
    as_root, eventually, is_gone, kill, needs,
    pools::{Pool, Yard},
    text,
};
use crate::surviving::pools::{Surviving, is_dead, survives};
use rustix::process::Signal;
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// Exports it, and looks through all of it.
fn is_sound(pool: &Pool) {
    pool.nacre(&["pool", "export", "%"]);
    let said = pool.told(&["pool", "check", "-d", pool.device.to_str().unwrap()]);
    assert!(said.starts_with("no problems: "), "{said}");
}

#[test]
fn the_death_of_guardian_and_process_is_a_crash() {
    needs!(as_root());
    let surviving = Surviving::made("both", "256M", &[]);
    let pool = &surviving.pool;
    pool.nacre(&["fs", "create", &pool.of("below")]);
    let mut first = true;
    // With what a process before it has replayed, and without.
    for dies_before in [false, true] {
        let guardian = if first {
            surviving.guardian
        } else {
            pool.nacre(&["pool", "import", "--survive", "-d", pool.device.to_str().unwrap(), "%"]);
            survives(pool)["guardian"].as_u64().unwrap() as u32
        };
        first = false;
        let synced = File::create(pool.at("below/synced")).unwrap();
        synced.write_all_at(&vec![3; 1 << 20], 0).unwrap();
        if dies_before {
            kill(pool.process(&pool.name), Signal::KILL);
        }
        synced.write_all_at(b"last", 100).unwrap();
        synced.sync_all().unwrap();
        let process = pool.process(&pool.name);
        for number in 0..200 {
            fs::write(pool.at(&format!("below/lost{number}")), [7; 5000]).unwrap();
        }
        kill(guardian, Signal::KILL);
        kill(process, Signal::KILL);
        eventually("the mounts are dead", || is_dead(&pool.at("")) && is_dead(&pool.at("below")));
        eventually("no process is left", || pool.processes().is_empty());
        drop(synced);
        // What is left of the mounts is taken away.
        pool.import();
        let shown = crate::mounting::mounts_below(&pool.at(""));
        assert_eq!(shown, [pool.at("below"), pool.at("")], "each once");
        let mut content = fs::read(pool.at("below/synced")).unwrap();
        assert_eq!(&content[100..104], b"last");
        content[100..104].fill(3);
        assert!(content == vec![3; 1 << 20]);
        for lost in fs::read_dir(pool.at("below")).unwrap().map(|entry| entry.unwrap().path()) {
            let content = fs::read(&lost).unwrap();
            // As much of it as a commit had.
            let is_its = content.len() <= 5000 && content.iter().all(|byte| *byte == 7);
            assert!(lost.ends_with("synced") || is_its, "{}: {} bytes", lost.display(), content.len());
        }
        is_sound(pool);
    }
    pool.import();
}

/// Resizes a disk to this much more than its content, MiB.
fn room(disk: &Path, more: u64) {
    let held = fs::metadata(disk.join("img")).map_or(0, |image| image.blocks() / 2048);
    let size = format!("remount,size={}m", held + more);
    assert!(crate::mounting::run("mount", ["-o", &size, disk.to_str().unwrap()]).status.success());
}

/// More than there is room for on the disk, MiB, and less than a replay has to write before it is done.
const FILL: usize = 30;

/// A pool on a disk that gets full.
struct Short {
    yard: Yard,
    name: String,
}

impl Short {
    fn new(failmode: &str) -> Short {
        let yard = Yard::new();
        let disk = yard.path("disk");
        fs::create_dir(&disk).unwrap();
        let tmpfs = ["-t", "tmpfs", "-o", "size=24m", "tmpfs", disk.to_str().unwrap()];
        assert!(crate::mounting::run("mount", tmpfs).status.success());
        let (name, mode) = (yard.name("short"), format!("failmode={failmode}"));
        let at = yard.path("at");
        let words = ["pool", "create", "--survive", "-o", &mode, "-O", "compression=off", "--size", "256M", "-m"];
        yard.nacre(&[&words[..], &[at.to_str().unwrap(), &name, "disk/img"]].concat());
        Short { yard, name }
    }

    fn room(&self, more: u64) {
        room(&self.yard.path("disk"), more);
    }

    /// More than there is room for.
    fn fill(&self, file: &str) -> Child {
        let target = format!("of={}", self.yard.path("at").join(file).display());
        let count = format!("count={FILL}");
        let words = ["if=/dev/urandom", &target, "bs=1M", &count, "conv=fsync", "status=none"];
        Command::new("dd").args(words).stderr(Stdio::null()).spawn().unwrap()
    }

    fn health(&self) -> String {
        text(&self.yard.run(&["pool", "list", "-H", "-o", "health", "%"]).stdout).trim().to_owned()
    }

    fn survives(&self) -> serde_json::Value {
        let said: serde_json::Value =
            serde_json::from_str(&self.yard.nacre(&["pool", "status", "--json", "%"])).unwrap();
        said["pools"][&self.name]["survives"].clone()
    }

    /// Waits for the process that owns the pool after this number of deaths. During a failover no
    /// process answers, and one that cannot write may answer late.
    fn answering(&self, restarts: u64) -> u32 {
        let mut process = None;
        eventually("the process answers", || {
            let said = text(&self.yard.run(&["pool", "status", "--json", "%"]).stdout);
            let said: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
            let pool = &said["pools"][&self.name];
            let is_it = pool["survives"]["restarts"].as_u64() == Some(restarts);
            process = pool["process"].as_u64().filter(|_| is_it);
            process.is_some()
        });
        u32::try_from(process.unwrap()).unwrap()
    }

    fn synced(&self) {
        fs::write(self.yard.path("at/synced"), "synced").unwrap();
        self.yard.nacre(&["pool", "sync", "%"]);
    }

    /// Kills the process while it waits for the disk, after these files were written all the same, so
    /// that the next process has to wait for the disk as well. Returns the supervisor.
    fn dies_while_suspended(&self, answered: &[&str]) -> u32 {
        eventually("the pool waits", || self.health() == "SUSPENDED");
        for name in answered {
            fs::write(self.yard.path("at").join(name), "answered").unwrap();
        }
        let (killed, guardian) = (self.yard.process(&self.name), self.survives()["guardian"].as_u64().unwrap());
        let log = self.yard.runtime().join(format!("{}.log", self.name));
        let waits = || fs::read_to_string(&log).unwrap().matches("everybody waits until it can be done").count();
        let before = waits();
        kill(killed, Signal::KILL);
        eventually("the next process waits", || waits() > before);
        u32::try_from(guardian).unwrap()
    }

    /// Checks that no failover happens, for this reason, until the pool is imported.
    fn is_down(&self, why: &str) {
        let at = self.yard.path("at");
        assert_eq!(self.health(), "UNAVAIL");
        let said = text(&self.yard.run(&["pool", "status", "%"]).stdout);
        assert!(said.contains(why), "{said}");
        assert!(is_dead(&at) || crate::mounting::mounts_below(&at).is_empty());
        self.room(200);
        self.yard.nacre(&["pool", "import", "-d", self.yard.path("disk").to_str().unwrap(), "%"]);
        assert!(self.yard.nacre(&["pool", "check", "%"]).contains("no problems"));
    }
}

#[test]
fn a_suspended_pool_that_waits_goes_on_waiting_after_a_death() {
    needs!(as_root());
    let short = Short::new("wait");
    let at = short.yard.path("at");
    fs::write(at.join("answered"), "answered").unwrap();
    let mut filling = short.fill("kept");
    short.dies_while_suspended(&["while-it-waits"]);
    assert!(filling.try_wait().unwrap().is_none());
    short.room(100);
    assert!(filling.wait().unwrap().success(), "it was only kept waiting");
    eventually("the pool goes on", || short.health() == "ONLINE");
    assert_eq!(fs::read(at.join("kept")).unwrap().len(), FILL << 20);
    for name in ["answered", "while-it-waits"] {
        assert_eq!(fs::read_to_string(at.join(name)).unwrap(), "answered");
    }
    assert_eq!(short.survives()["restarts"], 1);
    assert!(short.yard.nacre(&["pool", "check", "%"]).contains("no problems"));
    // For users who do not want to wait any longer.
    short.room(8);
    let mut filling = short.fill("more");
    let guardian = short.dies_while_suspended(&[]);
    kill(guardian, Signal::TERM);
    eventually("the guardian ends", || is_gone(guardian));
    assert!(!filling.wait().unwrap().success());
    short.is_down("has ended without");
    assert_eq!(fs::read(at.join("kept")).unwrap().len(), FILL << 20, "it was synced");
}

#[test]
fn a_pool_that_panics_stays_down_and_says_so() {
    needs!(as_root());
    let short = Short::new("panic");
    let guardian = short.survives()["guardian"].as_u64().unwrap() as u32;
    short.synced();
    assert!(!short.fill("more").wait().unwrap().success());
    eventually("the guardian ends", || is_gone(guardian));
    short.is_down("failmode is 'panic'");
    assert_eq!(fs::read_to_string(short.yard.path("at/synced")).unwrap(), "synced");
}

#[test]
fn a_pool_that_fails_and_continues_is_as_it_was_after_a_death() {
    needs!(as_root());
    let short = Short::new("continue");
    let at = short.yard.path("at");
    short.synced();
    assert!(!short.fill("more").wait().unwrap().success());
    eventually("nothing is written any more", || short.health() == "SUSPENDED");
    kill(short.answering(0), Signal::KILL);
    let second = short.answering(1);
    assert_eq!(fs::read_to_string(at.join("synced")).unwrap(), "synced");
    let accepted = fs::metadata(at.join("more")).unwrap().len();
    eventually("it cannot write, either", || short.health() == "SUSPENDED");
    // Once the device is cured, the next one makes durable what was accepted.
    short.room(200);
    kill(second, Signal::KILL);
    short.answering(2);
    eventually("the pool is written to again", || short.health() == "ONLINE");
    assert_eq!(fs::metadata(at.join("more")).unwrap().len(), accepted);
    short.yard.nacre(&["pool", "sync", "%"]);
    assert!(short.yard.nacre(&["pool", "check", "%"]).contains("no problems"));
}

/// A slow answer of a suspended pool is waited for where nothing waits for its device.
#[test]
fn a_suspended_pool_that_continues_is_given_time_to_answer() {
    needs!(as_root());
    let short = Short::new("continue");
    assert!(!short.fill("more").wait().unwrap().success());
    eventually("nothing is written any more", || short.health() == "SUSPENDED");
    let process = short.yard.process(&short.name);
    kill(process, Signal::STOP);
    let mut command = short.yard.command("nacre");
    command.args(["pool", "status", &short.name]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let asking = command.spawn().unwrap();
    let connections = || {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", asking.id())).unwrap();
        let leads_to = |entry: std::io::Result<fs::DirEntry>| fs::read_link(entry.unwrap().path()).unwrap_or_default();
        descriptors
            .filter(|to| to.is_ok())
            .map(leads_to)
            .filter(|to| to.to_string_lossy().starts_with("socket:"))
            .count()
    };
    eventually("the command asks once more whether the pool is stuck", || connections() > 1);
    kill(process, Signal::CONT);
    let output = asking.wait_with_output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && said.contains("state: SUSPENDED"), "{said}");
}

#[test]
fn other_signals_than_that_of_a_kill_are_deaths_as_well() {
    needs!(as_root());
    for signal in [Signal::ABORT, Signal::SEGV, Signal::BUS, Signal::SYS] {
        let surviving = Surviving::made("signal", "64M", &[]);
        let pool = &surviving.pool;
        let file = File::create(pool.at("file")).unwrap();
        file.write_all_at(b"before", 0).unwrap();
        let child = surviving.child().unwrap();
        kill(child, signal);
        file.write_all_at(b" after", 6).unwrap();
        assert_eq!(fs::read_to_string(pool.at("file")).unwrap(), "before after");
        assert_eq!(surviving.restarts(), 1, "{signal:?}");
        assert_ne!(pool.process(&pool.name), child);
        drop(file);
        is_sound(pool);
        surviving.has_ended();
    }
}

#[test]
fn a_mirror_loses_a_device_between_deaths() {
    needs!(as_root());
    let yard = Yard::new();
    let files: Vec<String> =
        ["one", "other", "log", "new"].map(|name| yard.path(name).to_str().unwrap().to_owned()).into();
    for file in &files {
        File::create(file).unwrap().set_len(128 << 20).unwrap();
    }
    let (name, at) = (yard.name("lossy"), yard.path("at"));
    let words = ["pool", "create", "--survive", "-m", at.to_str().unwrap(), &name, "mirror", &files[0], &files[1]];
    yard.nacre(&words);
    yard.nacre(&["pool", "add", "-f", "%", "log", &files[2]]);
    let dies = || {
        let before = yard.process(&name);
        kill(before, Signal::KILL);
        yard.nacre(&["pool", "sync", "%"]);
        assert_ne!(yard.process(&name), before);
    };
    let file = File::create(at.join("file")).unwrap();
    file.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    file.sync_all().unwrap();
    // What is on it is gone.
    let lost = File::options().write(true).open(&files[1]).unwrap();
    lost.write_all_at(&vec![0; 64 << 20], 8 << 20).unwrap();
    file.write_all_at(&vec![2; 1 << 20], 0).unwrap();
    dies();
    yard.told(&["pool", "scrub", "-w", "%"]);
    // It is cut off: the next process cannot use it.
    lost.set_len(4 << 20).unwrap();
    file.write_all_at(&vec![3; 1 << 20], 1 << 20).unwrap();
    file.sync_all().unwrap();
    dies();
    let content = fs::read(at.join("file")).unwrap();
    assert!(content[..1 << 20] == vec![2; 1 << 20] && content[1 << 20..2 << 20] == vec![3; 1 << 20]);
    assert!(content[2 << 20..] == vec![1; 2 << 20]);
    let said = yard.nacre(&["pool", "status", "%"]);
    assert!(said.contains(" DEGRADED ") && said.contains(" (restarted 2 times)"), "{said}");
    assert!(yard.nacre(&["pool", "check", "%"]).contains("no problems"));
    drop((file, lost));
    yard.nacre(&["pool", "replace", "-w", "%", &files[1], &files[3]]);
    yard.nacre(&["pool", "scrub", "-w", "%"]);
    assert_eq!(yard.nacre(&["pool", "status", "-x", "%"]), format!("pool '{name}' is healthy\n"));
    assert!(fs::read(at.join("file")).unwrap() == content);
}

/// Runs a command, and kills the process of the pool after so many milliseconds; whether it was answered that the
/// command was done. If not, it may have been done.
fn struck(pool: &Pool, after: u64, command: &mut Command) -> bool {
    let process = pool.process(&pool.name);
    let running = command.stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(after));
    kill(process, Signal::KILL);
    let output = running.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() || said.contains("ended before it answered"), "{command:?}: {said}");
    output.status.success()
}

#[test]
fn commands_under_way_at_a_death_are_done_or_not() {
    needs!(as_root());
    for after in [2, 20, 70] {
        let made = |short: &str| {
            let surviving = Surviving::made(short, "512M", &[]);
            let pool = &surviving.pool;
            pool.nacre(&["fs", "create", &pool.of("a")]);
            (0..100).for_each(|number| fs::write(pool.at(&format!("a/f{number}")), "then").unwrap());
            fs::write(pool.at("a/large"), crate::crashing::Random(after).bytes(16 << 20)).unwrap();
            pool.nacre(&["fs", "snapshot", &pool.of("a@one")]);
            fs::write(pool.at("a/f0"), "now").unwrap();
            surviving
        };
        let ended = |surviving: &Surviving| {
            surviving.pool.told(&["pool", "scrub", "-w", "%"]);
            is_sound(&surviving.pool);
            surviving.has_ended();
            assert_eq!(crate::mounting::mounts_below(surviving.pool.place.path()), Vec::<std::path::PathBuf>::new());
        };
        let names = |pool: &Pool| {
            let said = pool.nacre(&["fs", "list", "-H", "-o", "name", "-t", "all", "-r", "%"]);
            said.lines().map(|name| name.trim_start_matches(&pool.name).to_owned()).collect::<Vec<_>>()
        };
        let read = |pool: &Pool, name: &str| fs::read_to_string(pool.at(name)).unwrap();

        // Streams.
        let surviving = made("streams");
        let pool = &surviving.pool;
        let stream = pool.path("stream");
        let send = || {
            let mut command = pool.command("nacre");
            command.args(["fs", "send", &pool.of("a@one")]).stdout(File::create(&stream).unwrap());
            command
        };
        struck(pool, after, &mut send());
        assert!(send().status().unwrap().success());
        let receive = |more: &[&str]| {
            let mut command = pool.command("nacre");
            command.args(["fs", "receive"]).args(more).arg(pool.of("b")).stdin(File::open(&stream).unwrap());
            command
        };
        let received = struck(pool, after, &mut receive(&[]));
        if !names(pool).contains(&"/b@one".to_owned()) {
            assert!(!received, "it was answered that it is there");
            assert!(receive(&["-F"]).status().unwrap().success());
        }
        pool.run(&["fs", "mount", &pool.of("b")]);
        assert_eq!(read(pool, "b/f0"), "then");
        assert!(fs::read(pool.at("b/large")).unwrap() == fs::read(pool.at("a/large")).unwrap());
        ended(&surviving);

        // Names, and clones.
        let surviving = made("names");
        let pool = &surviving.pool;
        let renamed = struck(pool, after, pool.command("nacre").args(["fs", "rename", &pool.of("a"), &pool.of("c")]));
        let name = if names(pool).contains(&"/c".to_owned()) { "c" } else { "a" };
        assert!(!renamed || name == "c");
        assert_eq!(names(pool), ["".to_owned(), format!("/{name}"), format!("/{name}@one")]);
        // A command that was cut off may have left it without its mount.
        pool.run(&["fs", "mount", &pool.of(name)]);
        assert_eq!(read(pool, &format!("{name}/f0")), "now");
        let clone = [&pool.of(&format!("{name}@one")), &pool.of("d")];
        let cloned = struck(pool, after, pool.command("nacre").args(["fs", "clone"]).args(clone));
        if !names(pool).contains(&"/d".to_owned()) {
            assert!(!cloned);
            pool.nacre(&["fs", "clone", clone[0], clone[1]]);
        }
        pool.run(&["fs", "mount", &pool.of("d")]);
        assert_eq!(read(pool, "d/f0"), "then");
        ended(&surviving);

        // A snapshot by its directory is asked for by a request, which comes again.
        let surviving = made("back");
        let pool = &surviving.pool;
        assert!(struck(pool, after, Command::new("mkdir").arg(pool.at("a/.zfs/snapshot/two"))));
        assert_eq!(read(pool, "a/.zfs/snapshot/two/f0"), "now");
        let back = struck(pool, after, pool.command("nacre").args(["fs", "rollback", "-r", &pool.of("a@one")]));
        pool.run(&["fs", "mount", &pool.of("a")]);
        let now = read(pool, "a/f0");
        assert!(now == "then" || !back && now == "now", "{now}");
        ended(&surviving);
    }
}
