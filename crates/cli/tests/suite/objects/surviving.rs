//! Pools in object stores that survive the process that owns them: killed under writers, with each
//! kind of log, while the store is unreachable, and while another machine takes the pool over.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rustix::process::Signal;

use super::{InBucket, Machine, SECRET};
use super::{Moto, Weather};
use crate::mounting::{as_root, child_of, errno, eventually, finish, is_gone, is_mounted, kill, nacre, needs, text};

impl InBucket {
    fn survives(&self) -> serde_json::Value {
        let said = self.yard.nacre(&["pool", "status", "--json", "%"]);
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said["pools"][&self.name]["survives"].clone()
    }

    fn guardian(&self) -> u32 {
        u32::try_from(self.survives()["guardian"].as_u64().expect("a guardian")).unwrap()
    }

    /// Returns the errors in the log of its processes.
    fn log(&self) -> String {
        fs::read_to_string(self.yard.runtime().join(format!("{}.log", self.name))).unwrap_or_default()
    }

    fn export_and_import(&self) {
        self.yard.nacre(&["pool", "export", "%"]);
        self.import();
    }
}

/// Kills the process that owns the pool, once it is another one than `before`; its number.
fn strike(guardian: u32, before: u32) -> u32 {
    let mut found = None;
    eventually("a process", || {
        found = child_of(guardian).filter(|child| *child != before);
        found.is_some()
    });
    kill(found.unwrap(), Signal::KILL);
    found.unwrap()
}

/// Creates files until `ends` is set; each is written in two parts, and some are synced. Returns
/// the number of acknowledged files.
fn work(at: &Path, synced: bool, ends: &AtomicBool) -> u64 {
    for number in 0.. {
        if ends.load(Ordering::SeqCst) {
            return number;
        }
        let file = OpenOptions::new().write(true).create_new(true).open(at.join(number.to_string())).unwrap();
        file.write_all_at(&content(number), 0).unwrap();
        file.write_all_at(b"end", 20_000).unwrap();
        if synced && number % 3 == 0 {
            file.sync_all().unwrap();
        }
        if number % 5 == 4 {
            fs::remove_file(at.join((number - 2).to_string())).unwrap();
        }
    }
    unreachable!()
}

fn content(number: u64) -> Vec<u8> {
    (0..10_000_u64).map(|at| (at * 7 + number * 131) as u8).collect()
}

fn judge(at: &Path, answered: u64, what: &str) {
    for number in 0..answered {
        let found = fs::read(at.join(number.to_string()));
        if number % 5 == 2 && number + 2 < answered {
            assert!(found.is_err(), "{what}: {number} is back");
            continue;
        }
        let found = found.unwrap_or_else(|error| panic!("{what}: {number} of {answered}: {error}"));
        assert!(found[..10_000] == content(number)[..] && found[20_000..] == *b"end", "{what}: {number}");
    }
}

#[test]
fn what_was_answered_is_there_after_deaths_with_each_log() {
    needs!(as_root());
    for log in ["local", "remote", "none"] {
        let pool = InBucket::made(&["--survive", "--log-dir", "log", "-o", &format!("log={log}")]);
        let (guardian, ends) = (pool.guardian(), AtomicBool::new(false));
        for name in ["synced", "unsynced"] {
            fs::create_dir(pool.at.join(name)).unwrap();
        }
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(true).clone();
        let held = open.open(pool.at.join("held")).unwrap();
        held.write_all_at(b"nameless", 0).unwrap();
        fs::remove_file(pool.at.join("held")).unwrap();
        let answered = thread::scope(|scope| {
            let works = ["synced", "unsynced"].map(|name| {
                let (at, ends) = (pool.at.join(name), &ends);
                scope.spawn(move || work(&at, name == "synced", ends))
            });
            let mut before = 0;
            for round in 1..=2 {
                let there = pool.at.join("unsynced");
                let count = || fs::read_dir(&there).unwrap().count();
                let then = count();
                eventually("work", || count() > then + 30);
                before = strike(guardian, before);
                fs::write(pool.at.join(format!("after{round}")), log).unwrap();
                assert_eq!(pool.survives()["restarts"], round, "{}", pool.log());
            }
            let then = fs::read_dir(pool.at.join("synced")).unwrap().count();
            eventually("more work", || fs::read_dir(pool.at.join("synced")).unwrap().count() > then + 10);
            ends.store(true, Ordering::SeqCst);
            works.map(|work| work.join().unwrap())
        });
        let mut read = [0; 8];
        held.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"nameless");
        drop(held);
        assert_eq!(pool.guardian(), guardian);
        pool.yard.nacre(&["pool", "export", "%"]);
        eventually("the guardian ends", || is_gone(guardian));
        pool.import();
        for (name, answered) in ["synced", "unsynced"].iter().zip(answered) {
            judge(&pool.at.join(name), answered, &format!("log={log}, {name}"));
        }
        assert!((1..=2).all(|round| fs::read_to_string(pool.at.join(format!("after{round}"))).unwrap() == log));
        assert!(pool.yard.nacre(&["pool", "check", "%"]).starts_with("no problems: "));
        println!("log={log}: {answered:?} files were answered");
        pool.yard.nacre(&["pool", "destroy", "%"]);
        assert_eq!(pool.moto.keys("one/"), Vec::<String>::new());
    }
}

#[test]
fn the_next_process_waits_for_a_store_that_is_away() {
    needs!(as_root());
    let pool = InBucket::made(&["--survive", "--log-dir", "log"]);
    let guardian = pool.guardian();
    pool.sh("echo first > at/a; sync at/a; echo second > at/b; sync at/b");
    let mut killed = 0;
    for weather in [Weather::Closed, Weather::Forbidden] {
        pool.moto.weather(weather);
        pool.sh(&format!("echo {weather:?} > at/{weather:?}; echo more >> at/a"));
        killed = strike(guardian, killed);
        let at = pool.at.clone();
        let waits = thread::spawn(move || fs::read_to_string(at.join(format!("{weather:?}"))).unwrap());
        eventually("a process that waits", || pool.log().contains("everybody waits until it can be done"));
        assert!(!waits.is_finished());
        fs::write(pool.yard.runtime().join(format!("{}.log", pool.name)), "").unwrap();
        pool.moto.weather(Weather::Fair);
        assert_eq!(waits.join().unwrap(), format!("{weather:?}\n"));
    }
    assert_eq!(pool.survives()["restarts"], 2);
    pool.export_and_import();
    assert_eq!(pool.sh("cat at/a at/b at/Closed"), "first\nmore\nmore\nsecond\nClosed\n");
    // Terminated while it waits: everything synced is there.
    pool.yard.nacre(&["pool", "export", "%"]);
    pool.yard.nacre(&["pool", "import", "--survive", "%"]);
    let guardian = pool.guardian();
    pool.sh("echo third > at/c; sync at/c");
    pool.moto.weather(Weather::Closed);
    pool.sh("echo fourth > at/d; sync at/d");
    strike(guardian, 0);
    eventually("a process that waits", || pool.log().contains("everybody waits until it can be done"));
    kill(guardian, Signal::TERM);
    eventually("its end", || is_gone(guardian));
    assert_eq!(errno(fs::symlink_metadata(pool.at.join("nothing"))), rustix::io::Errno::NOTCONN.raw_os_error());
    pool.moto.weather(Weather::Fair);
    pool.import();
    assert_eq!(pool.sh("cat at/c at/d"), "third\nfourth\n");
    pool.yard.nacre(&["pool", "destroy", "%"]);
}

/// The same server for another machine, whatever the weather here.
fn of_another(moto: &Moto) -> Moto {
    let gate = moto.gate_of_readers();
    gate.weather(Weather::Fair);
    gate
}

#[test]
fn a_pool_that_another_machine_has_taken_is_not_gone_on_with() {
    needs!(as_root());
    for (log, dead) in [("remote", false), ("remote", true), ("local", true), ("local", false)] {
        let what = format!("log={log}, {}", if dead { "dead" } else { "alive" });
        let pool = InBucket::made(&["--survive", "--log-dir", "log", "-o", &format!("log={log}")]);
        let guardian = pool.guardian();
        pool.sh("echo first > at/a; sync at/a; echo synced > at/b; sync at/b");
        if log == "local" {
            pool.yard.nacre(&["pool", "sync", "%"]);
        }
        let machine = Machine::begun("elsewhere", &pool.yard);
        let other = of_another(&pool.moto);
        let keys = pool.yard.path("keys").display().to_string();
        let way = ["--endpoint", &other.endpoint, "--profile", "test", "--credentials-file", &keys];
        if dead {
            pool.moto.weather(Weather::Closed);
            pool.sh("echo answered > at/c");
            strike(guardian, 0);
            eventually("a process that waits", || pool.log().contains("everybody waits until it can be done"));
        }
        let takes = ["pool", "import", "-N", "-f", "-m"];
        let (done, said) = machine.nacre(&pool.yard, &[&takes[..], &way, &[&pool.address]].concat());
        assert!(done, "{what}: {said}");
        let before = pool.moto.heads().len();
        if dead {
            pool.moto.weather(Weather::Fair);
        } else {
            strike(guardian, 0);
        }
        eventually("its end", || is_gone(guardian));
        assert_eq!(errno(fs::symlink_metadata(pool.at.join("a"))), rustix::io::Errno::NOTCONN.raw_os_error());
        let (_, said) = pool.yard.refused(&["pool", "sync", "%"]);
        assert!(said.contains("taken over by 'elsewhere'"), "{what}: {said}{}", pool.log());
        let asked = &pool.moto.heads()[before..];
        assert!(!dead || !asked.is_empty() && asked.iter().all(|head| head.starts_with("GET")), "{what}: {asked:?}");
        let (done, said) = machine.nacre(&pool.yard, &["pool", "check", &pool.name]);
        assert!(done && said.starts_with("no problems: "), "{what}: {said}");
        let (done, said) = machine.nacre(&pool.yard, &["pool", "export", &pool.name]);
        assert!(done, "{what}: {said}");
        pool.import();
        assert_eq!(pool.sh("cat at/a at/b"), "first\nsynced\n", "{what}");
        pool.yard.nacre(&["pool", "destroy", "%"]);
    }
}

#[test]
fn credentials_of_the_environment_and_another_program_go_on() {
    needs!(as_root());
    let pool = InBucket::empty();
    let mut command = pool.yard.command("nacre");
    command.args(["pool", "create", "--survive", "-m"]).arg(&pool.at).args(["--endpoint", &pool.moto.endpoint]);
    command.args([&pool.name, &pool.address]).env("AWS_ACCESS_KEY_ID", "surrounding");
    let output = finish(command.env("AWS_SECRET_ACCESS_KEY", SECRET));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let guardian = pool.guardian();
    let mut file = File::create(pool.at.join("file")).unwrap();
    file.write_all(b"one").unwrap();
    let asked = pool.moto.heads().len();
    let killed = strike(guardian, 0);
    file.write_all(b", two").unwrap();
    assert_eq!(pool.survives()["restarts"], 1);
    let heads = pool.moto.heads();
    assert!(heads.len() > asked && heads[asked..].iter().all(|head| head.contains("Credential=surrounding/")));
    // Another program.
    let copy = pool.yard.path("newer");
    fs::copy(nacre(), &copy).unwrap();
    let output = finish(Command::new(&copy).arg("upgrade").arg(&pool.at).env("NACRE_STATE_DIR", pool.yard.state()));
    assert!(output.status.success(), "{}{}", text(&output.stderr), pool.log());
    let process = pool.yard.process(&pool.name);
    assert_ne!(process, killed);
    assert_eq!(fs::read_link(format!("/proc/{process}/exe")).unwrap(), copy);
    file.write_all(b", three").unwrap();
    drop(file);
    assert_eq!(pool.guardian(), guardian);
    strike(guardian, 0);
    assert_eq!(pool.sh("cat at/file"), "one, two, three");
    assert!(!pool.log().contains(SECRET) && !pool.yard.nacre(&["pool", "status", "--json", "%"]).contains(SECRET));
    // A path below a file system of the pool cannot be opened by the process that is to serve the
    // pool.
    pool.yard.nacre(&["pool", "export", "%"]);
    assert!(!is_mounted(&pool.at));
    let way = ["--endpoint", &pool.moto.endpoint, "--profile", "test", "--credentials-file", "keys"];
    let within = ["-N", "--survive", "--log-dir"];
    let log = pool.at.join("log").display().to_string();
    let words = [&["pool", "import"][..], &within, &[&log], &way, &[&pool.address]].concat();
    pool.yard.nacre(&words);
    assert!(pool.survives()["guardian"].is_number());
    fs::remove_dir_all(&pool.at).unwrap();
    pool.yard.nacre(&["fs", "mount", "%"]);
    let why = pool.survives()["why_not"].clone();
    assert!(why.as_str().is_some_and(|why| why.contains("which the next process needs, is below")), "{why}");
    pool.yard.nacre(&["pool", "destroy", "%"]);
}
