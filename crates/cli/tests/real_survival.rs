//! Mounts that outlive the process that serves them: killed while programs use them, which notice
//! nothing.
//!
//! Each mount is killed twice at most: the third time within a minute it stays down, which is a test of
//! its own. `NACRE_SURVIVAL_ROUNDS` makes a campaign of the random one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod mounting;

use mounting::{
    Fixture, as_root,
    cages::{Cage, cost, zeros},
    eventually, is_gone, is_mounted, kill,
    status::Status,
};
use rustix::process::Signal;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

/// A mount that outlives its process. The guardian is the fixture's daemon.
struct Guarded {
    fixture: Fixture,
    guardian: u32,
    /// Killed at the end: they do not end with their guardian.
    workers: Vec<u32>,
}

impl Guarded {
    /// A mirror.
    fn new(options: &[&str]) -> Guarded {
        Guarded::of(Fixture::mirror(&[&["--survive", "--transport=device"], options].concat()))
    }

    /// A cage.
    fn cage(options: &[&str]) -> Guarded {
        Guarded::of(Fixture::cage(&[&["--survive", "--transport=device"], options].concat()))
    }

    /// A union of the source over a directory that is filled first.
    fn union(options: &[&str], fill: impl FnOnce(&Path)) -> Guarded {
        let mut fixture = Fixture::bare();
        let lower = fixture.scratch.path().join("lower");
        fs::create_dir(&lower).unwrap();
        fill(&lower);
        let branches = format!("{}=rw:{}=ro", fixture.source.display(), lower.display());
        let mountpoint = fixture.mountpoint.clone();
        let words = [&["union", "--survive", "--transport=device"], options].concat();
        fixture.start(&words, branches.as_ref(), &mountpoint);
        Guarded::of(fixture)
    }

    fn of(fixture: Fixture) -> Guarded {
        let workers = vec![worker(&fixture.mountpoint)];
        Guarded { guardian: fixture.pid(), fixture, workers }
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.fixture.at(name)
    }

    /// Kills the process that serves, and waits until another one does.
    fn kill(&mut self) {
        let killed = *self.workers.last().unwrap();
        kill(killed, Signal::KILL);
        eventually("another process serves the mount", || worker(&self.fixture.mountpoint) != killed);
        self.workers.push(worker(&self.fixture.mountpoint));
    }

    fn restarts(&self) -> u64 {
        restarts(&self.fixture.mountpoint)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // The guardian first: it would make another one.
        let all = std::iter::once(self.guardian).chain(self.workers.iter().copied());
        all.filter(|process| !is_gone(*process)).for_each(|process| kill(process, Signal::KILL));
    }
}

fn worker(mountpoint: &Path) -> u32 {
    u32::try_from(Status::of(mountpoint).number("pid")).unwrap()
}

fn restarts(mountpoint: &Path) -> u64 {
    Status::of(mountpoint).survives()["restarts"].as_u64().unwrap()
}

fn opened_files_go_on(mut guarded: Guarded) {
    let at = |name: &str| guarded.fixture.at(name);
    fs::create_dir_all(at("a/b")).unwrap();
    let open =
        |name: &str| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at(name)).unwrap();
    let (named, nameless, mut moved) = (open("a/b/named"), open("a/nameless"), open("a/before"));
    let mut appended = OpenOptions::new().append(true).create(true).open(at("a/log")).unwrap();
    let unnamed = OpenOptions::new().read(true).write(true).custom_flags(libc_tmpfile()).open(at("a"));
    named.write_all_at(b"one", 0).unwrap();
    nameless.write_all_at(b"gone", 0).unwrap();
    moved.write_all(b"moved").unwrap();
    appended.write_all(b"1\n").unwrap();
    fs::remove_file(at("a/nameless")).unwrap();
    fs::rename(at("a/before"), at("a/b/after")).unwrap();
    fs::hard_link(at("a/b/named"), at("a/linked")).unwrap();
    let (ino, directory) = (named.metadata().unwrap().ino(), File::open(at("a/b")).unwrap());
    let mut shell =
        Command::new("sh").current_dir(at("a/b")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
    for round in 1..=2 {
        guarded.kill();
        assert_eq!(guarded.restarts(), round);
        assert_eq!(named.metadata().unwrap().ino(), ino);
        named.write_all_at(b"two", 3 * round).unwrap();
        nameless.write_all_at(b"!", 3 + round).unwrap();
        appended.write_all(b"2\n").unwrap();
        appended.sync_all().unwrap();
        directory.sync_all().unwrap();
    }
    let text = |mut file: &File| {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    };
    assert_eq!(text(&named), "onetwotwo");
    assert_eq!(text(&nameless), "gone!!");
    assert_eq!(nameless.metadata().unwrap().nlink(), 0);
    assert_eq!(text(&moved), "moved");
    nameless.set_len(2).unwrap();
    assert_eq!(text(&nameless), "go");
    if let Ok(unnamed) = unnamed {
        unnamed.write_all_at(b"unnamed", 0).unwrap();
        assert_eq!(text(&unnamed), "unnamed");
    }
    shell.stdin.take().unwrap().write_all(b"cat named && echo new >made && cat ../b/after\n").unwrap();
    assert_eq!(mounting::text(&shell.wait_with_output().unwrap().stdout), "onetwotwomoved");
    let below = |name: &str| fs::read_to_string(guarded.fixture.below(name)).unwrap();
    assert_eq!(below("a/log"), "1\n2\n2\n");
    assert_eq!((below("a/linked"), below("a/b/made")), ("onetwotwo".to_owned(), "new\n".to_owned()));
    drop((named, nameless, moved, appended, directory));
    eventually("all files are closed", || Status::of(&guarded.fixture.mountpoint).number("open_files") == 0);
    guarded.fixture.unmount();
    assert!(guarded.workers.iter().all(|worker| is_gone(*worker)));
}

/// `O_TMPFILE`.
fn libc_tmpfile() -> i32 {
    rustix::fs::OFlags::TMPFILE.bits().cast_signed()
}

#[test]
fn opened_files_go_on_in_passthrough() {
    if as_root() {
        opened_files_go_on(Guarded::new(&[]));
    }
}

#[test]
fn opened_files_go_on_through_the_process() {
    if as_root() {
        opened_files_go_on(Guarded::new(mounting::without_passthrough()));
    }
}

#[test]
fn opened_files_go_on_in_a_cage() {
    if as_root() {
        opened_files_go_on(Guarded::cage(&["--size=8M"]));
    }
}

#[test]
fn opened_files_go_on_in_a_union() {
    if as_root() {
        opened_files_go_on(Guarded::union(&[], |_| ()));
    }
}

/// Files of the branch below: read, copied up, removed and moved around the death of the process, and
/// branches that come and change while mounted.
#[test]
fn a_union_that_goes_on_has_its_branches() {
    if !as_root() {
        return;
    }
    let names = ["read", "gone", "risen", "later", "moved", "linked"];
    let mut guarded = Guarded::union(&[], |lower| {
        fs::create_dir_all(lower.join("tree/sub")).unwrap();
        names.iter().for_each(|name| fs::write(lower.join("tree").join(name), "below").unwrap());
        fs::hard_link(lower.join("tree/linked"), lower.join("tree/sub/linked")).unwrap();
    });
    let place = guarded.fixture.mountpoint.clone();
    let at = |name: &str| place.join("tree").join(name);
    let writable = |name: &str| OpenOptions::new().read(true).write(true).open(at(name)).unwrap();
    let content = |file: &File| {
        let mut text = vec![0; 32];
        let read = file.read_at(&mut text, 0).unwrap();
        String::from_utf8(text[..read].to_vec()).unwrap()
    };
    let union = |words: &[&str]| {
        let output = guarded.fixture.nacre([&["union"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", mounting::text(&output.stderr));
        mounting::text(&output.stdout)
    };
    let mount = place.to_str().unwrap().to_owned();
    let third = guarded.fixture.scratch.path().join("third");
    fs::create_dir_all(third.join("own")).unwrap();
    fs::write(third.join("own/file"), "third").unwrap();
    union(&["add", &mount, &format!("{}=rw", third.display())]);
    union(&["mod", &mount, &format!("{}=ro", third.display())]);
    // By descriptor alone: what is there now is another directory.
    fs::rename(&third, guarded.fixture.scratch.path().join("renamed")).unwrap();
    fs::create_dir(&third).unwrap();
    let branches = || -> Vec<String> {
        let list = union(&["list", &mount]);
        let words = |line: &str| line.split_whitespace().skip(1).take(3).collect::<Vec<_>>().join(" ");
        list.lines().map(words).collect()
    };
    let before = branches();
    let (read, gone, risen, later) =
        (File::open(at("read")).unwrap(), writable("gone"), writable("risen"), writable("later"));
    let risen_reader = File::open(at("risen")).unwrap();
    risen.write_all_at(b"above", 0).unwrap();
    fs::remove_file(at("risen")).unwrap();
    fs::remove_file(at("gone")).unwrap();
    let moved = writable("moved");
    fs::rename(at("moved"), at("sub/moved")).unwrap();
    let linked = writable("linked");
    linked.write_all_at(b"L", 0).unwrap();
    let third_file = File::open(place.join("own/file")).unwrap();
    let inodes = |files: &[&File]| files.iter().map(|file| file.metadata().unwrap().ino()).collect::<Vec<_>>();
    let all = [&read, &gone, &risen, &risen_reader, &later, &moved, &linked, &third_file];
    let numbers = inodes(&all);
    let mut shell =
        Command::new("sh").current_dir(at("sub")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
    let killed = *guarded.workers.last().unwrap();
    kill(killed, Signal::KILL);
    eventually("another process serves the mount", || worker(&place) != killed);
    assert_eq!(inodes(&all), numbers);
    assert_eq!(branches(), before);
    guarded.workers.push(worker(&place));
    assert_eq!(
        (content(&gone), content(&risen), content(&risen_reader)),
        ("below".into(), "above".into(), "above".into())
    );
    assert_eq!((gone.metadata().unwrap().nlink(), risen.metadata().unwrap().nlink()), (0, 0));
    assert!(!at("gone").exists() && !at("risen").exists() && !at("moved").exists());
    assert_eq!(
        (content(&third_file), fs::read_to_string(place.join("own/file")).unwrap()),
        ("third".into(), "third".into())
    );
    gone.write_all_at(b"G", 0).unwrap();
    risen.write_all_at(b"R", 0).unwrap();
    later.write_all_at(b"l", 0).unwrap();
    moved.write_all_at(b"m", 0).unwrap();
    // Somebody else copies it up: who reads it sees that.
    writable("read").write_all_at(b"r", 0).unwrap();
    guarded.kill();
    assert_eq!(inodes(&all), numbers);
    let texts: Vec<String> = all.iter().map(|file| content(file)).collect();
    assert_eq!(texts, ["relow", "Gelow", "Rbove", "Rbove", "lelow", "melow", "Lelow", "third"]);
    assert_eq!(fs::read_to_string(at("sub/linked")).unwrap(), "Lelow");
    shell.stdin.take().unwrap().write_all(b"cat moved && echo new >made && ls | wc -l\n").unwrap();
    assert_eq!(mounting::text(&shell.wait_with_output().unwrap().stdout).trim(), "melow3");
    assert_eq!(fs::read_to_string(guarded.fixture.below("tree/sub/made")).unwrap(), "new\n");
    let lower = guarded.fixture.scratch.path().join("lower/tree");
    assert!(names.iter().all(|name| fs::read_to_string(lower.join(name)).unwrap() == "below"), "it is only read");
    drop((read, gone, risen, risen_reader, later, moved, linked, third_file));
    guarded.fixture.unmount();
}

/// Copies up, removes, and moves files of the branch below as long as it may and there are any.
fn change_below(place: &Path, number: u64, over: &AtomicBool, done: &AtomicU64) {
    for round in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        done.fetch_add(1, Ordering::Relaxed);
        if round >= BELOW {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let name = |what: &str| place.join(format!("low{number}/{round}-{what}"));
        let mut file = OpenOptions::new().append(true).read(true).open(name("file")).expect("open");
        file.write_all(b"+more").expect("append");
        assert_eq!(fs::read_to_string(name("file")).expect("read"), "below+more");
        fs::rename(name("file"), name("moved")).expect("rename");
        file.write_all(b"+last").expect("append");
        assert!(!name("file").exists(), "what was moved is there no more");
        fs::remove_file(name("old")).expect("unlink");
        assert!(!name("old").exists(), "what was removed is there no more");
        fs::remove_dir_all(name("directory")).expect("rmdir");
        fs::create_dir(name("directory")).expect("mkdir");
        assert_eq!(fs::read_dir(name("directory")).expect("readdir").count(), 0);
        fs::rename(name("one"), name("other")).expect("rename over");
        assert_eq!(fs::read_to_string(name("other")).expect("read"), "one");
    }
}

/// How many files of each kind a thread has.
const BELOW: u64 = 300;

#[test]
fn nobody_notices_that_the_process_of_a_union_dies() {
    if !as_root() {
        return;
    }
    let rounds = std::env::var("NACRE_SURVIVAL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1_u64);
    println!("campaign: NACRE_SURVIVAL_ROUNDS={rounds}");
    for round in 0..rounds {
        let options = if round % 2 == 0 { &[][..] } else { mounting::without_passthrough() };
        let mut guarded = Guarded::union(options, |lower| {
            for number in 0..2 {
                for round in 0..BELOW {
                    let name = |what: &str| lower.join(format!("low{number}/{round}-{what}"));
                    fs::create_dir_all(name("directory/sub")).unwrap();
                    [("file", "below"), ("old", "old"), ("one", "one"), ("other", "other"), ("directory/x", "x")]
                        .iter()
                        .for_each(|(what, content)| fs::write(name(what), content).unwrap());
                }
            }
        });
        let place = guarded.fixture.mountpoint.clone();
        let (over, done, below) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let (over, done, below, place) = (&over, &done, &below, &place);
            let end = Raised(over);
            let mut threads = vec![scope.spawn(move || change(place, 9, over, done))];
            threads.extend((0..2).map(|number| scope.spawn(move || change_below(place, number, over, below))));
            for _ in 0..2 {
                let before = (done.load(Ordering::Relaxed), below.load(Ordering::Relaxed));
                eventually("they go on", || {
                    done.load(Ordering::Relaxed) > before.0 + 5 && below.load(Ordering::Relaxed) > before.1 + 20
                });
                std::thread::sleep(Duration::from_micros(round * 911 % 5000));
                guarded.kill();
            }
            eventually("they come to the end", || below.load(Ordering::Relaxed) > 2 * BELOW + 2);
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        for number in 0..2 {
            let mut finished = 0;
            for round in 0..BELOW {
                let name = |what: &str| place.join(format!("low{number}/{round}-{what}"));
                if name("moved").exists() && !name("one").exists() {
                    assert_eq!(fs::read_to_string(name("moved")).unwrap(), "below+more+last");
                    assert!(!name("file").exists() && !name("old").exists());
                    finished += 1;
                }
            }
            assert!(finished > 40, "{finished}");
        }
        guarded.fixture.unmount();
    }
}

/// What a cage says of itself.
fn cage(guarded: &Guarded) -> Cage {
    Cage::of(&guarded.fixture, &guarded.fixture.source)
}

/// Over its own directory, with files that have no name, limits within the limit and another size.
#[test]
fn a_cage_that_goes_on_has_its_books() {
    if !as_root() {
        return;
    }
    let mut fixture = Fixture::bare();
    let place = fixture.source.clone();
    fixture.mountpoint.clone_from(&place);
    let options = ["--survive", "--transport=device", "--size=4M", "--limit=dir:part=1M", "--limit=user:1234=2M"];
    fixture.start(&[&["cage"], &options[..]].concat(), place.as_ref(), &place);
    let mut guarded = Guarded::of(fixture);
    let at = |name: &str| place.join(name);
    let used = |guarded: &Guarded| (cage(guarded).number("used"), cage(guarded).number("inodes"));
    fs::create_dir(at("part")).unwrap();
    let mut log = OpenOptions::new().append(true).create(true).open(at("log")).unwrap();
    log.write_all(&zeros(100 << 10)).unwrap();
    let mut gone = File::create(at("gone")).unwrap();
    gone.write_all(&zeros(1 << 20)).unwrap();
    let read_only = File::open(at("gone")).unwrap();
    fs::remove_file(at("gone")).unwrap();
    drop(gone);
    fs::write(at("part/file"), zeros(500 << 10)).unwrap();
    std::os::unix::fs::chown(at("part/file"), Some(1234), None).unwrap();
    let before = used(&guarded);
    assert_eq!(before, ((100 << 10) + (1 << 20) + (500 << 10) + 4096, 4), "three files and a directory");
    guarded.kill();
    assert_eq!(used(&guarded), before);
    assert_eq!(cage(&guarded).text("mode"), "through");
    let (written, error) = mounting::cages::fill(&mut File::create(at("part/more")).unwrap(), 4096);
    assert_eq!((written, error), ((1 << 20) - (500 << 10) - 4096, 28), "the directory's limit");
    let resized = guarded.fixture.nacre(["cage", "resize", place.to_str().unwrap(), "3M"]);
    assert!(resized.status.success(), "{}", mounting::text(&resized.stderr));
    guarded.kill();
    assert_eq!(cage(&guarded).number("limit"), 3 << 20);
    let (written, error) = mounting::cages::fill(&mut log, 4096);
    assert_eq!((written, error), ((1 << 20) - (100 << 10), 28), "the whole's limit");
    drop(read_only);
    eventually("what had no name is free", || cage(&guarded).number("used") == 2 << 20);
    log.write_all(&zeros(4096)).unwrap();
    let counted = || cage(&guarded).text("accounting") == "exact" && cage(&guarded).number("recounts") > 0;
    eventually("all of it is counted", counted);
    assert_eq!(used(&guarded), cost(&place));
    drop(log);
    guarded.fixture.unmount();
}

/// The descriptors of a process that programs started by it would have, but for the standard ones.
fn kept_for_children(process: u32) -> Vec<String> {
    let is_kept = |number: &String| {
        let told = fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).unwrap_or_default();
        let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).map(str::trim).unwrap_or("0");
        !told.is_empty()
            && i32::from_str_radix(flags, 8).unwrap() & rustix::fs::OFlags::CLOEXEC.bits().cast_signed() == 0
    };
    let all = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let numbers = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    numbers.filter(|number| !["0", "1", "2"].contains(&number.as_str())).filter(is_kept).collect()
}

/// Another copy of the program takes over from the one that serves, while all of it is used.
#[test]
fn another_program_goes_on() {
    if !as_root() {
        return;
    }
    let mut mirror = Guarded::new(&["--perms=a+r"]);
    let mut cage = Guarded::cage(&["--size=64M"]);
    let newer = mirror.fixture.scratch.path().join("newer");
    fs::copy(mounting::nacre(), &newer).unwrap();
    let runs_newer = |process: u32| fs::read_link(format!("/proc/{process}/exe")).is_ok_and(|program| program == newer);
    let upgrade = |guarded: &Guarded| {
        let mut command = Command::new(&newer);
        let output = mounting::finish(command.arg("upgrade").arg(&guarded.fixture.mountpoint));
        assert!(output.status.success(), "{}", mounting::text(&output.stderr));
    };
    let mut union = Guarded::union(&[], |_| ());
    for guarded in [&mut mirror, &mut cage, &mut union] {
        let mountpoint = guarded.fixture.mountpoint.clone();
        let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut nameless =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(mountpoint.join("x")).unwrap();
        nameless.write_all(b"content").unwrap();
        fs::remove_file(mountpoint.join("x")).unwrap();
        std::thread::scope(|scope| {
            let (over, done, place) = (&over, &done, &mountpoint);
            let end = Raised(over);
            let threads: Vec<_> = (0..3).map(|number| scope.spawn(move || change(place, number, over, done))).collect();
            let goes_on = || {
                let before = done.load(Ordering::Relaxed);
                eventually("they go on", || done.load(Ordering::Relaxed) > before + 20);
            };
            goes_on();
            upgrade(guarded);
            let now = worker(place);
            assert!(runs_newer(now) && runs_newer(guarded.guardian), "worker and guardian");
            guarded.workers.push(now);
            assert!(kept_for_children(guarded.guardian).is_empty(), "programs that it starts have nothing of it");
            // Whom the program is already is left alone.
            upgrade(guarded);
            assert_eq!((worker(place), restarts(place)), (now, 1));
            goes_on();
            // It goes on after deaths as the one before did.
            guarded.kill();
            assert!(runs_newer(worker(place)));
            goes_on();
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let mut text = String::new();
        nameless.seek(SeekFrom::Start(0)).unwrap();
        nameless.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        drop(nameless);
        let gone = guarded.fixture.nacre(["upgrade", guarded.fixture.at("no/mount").to_str().unwrap()]);
        assert_eq!(gone.status.code(), Some(3));
        guarded.fixture.unmount();
    }
}

#[test]
fn what_cannot_be_gone_on_with_is_not_touched() {
    if !as_root() {
        return;
    }
    let plain = Fixture::mirror(&[]);
    let newer = plain.scratch.path().join("newer");
    fs::copy(mounting::nacre(), &newer).unwrap();
    let before = worker(&plain.mountpoint);
    let output = mounting::finish(Command::new(&newer).arg("upgrade").arg(&plain.mountpoint));
    assert_eq!(output.status.code(), Some(1));
    assert!(mounting::text(&output.stderr).contains("without --survive"), "{}", mounting::text(&output.stderr));
    assert_eq!(worker(&plain.mountpoint), before);
    // A guardian that is called for nothing does nothing.
    let guarded = Guarded::new(&[]);
    guarded.fixture.signal(Signal::USR2);
    fs::write(guarded.at("file"), "content").unwrap();
    assert_eq!((worker(&guarded.fixture.mountpoint), guarded.restarts()), (guarded.workers[0], 0));
}

/// Makes, moves and removes things as long as it may; every call has to do what it says.
fn change(place: &Path, number: u64, over: &AtomicBool, done: &AtomicU64) {
    for round in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let name = |what: &str| place.join(format!("{number}-{round}-{what}"));
        let content = vec![round as u8; 3000];
        let mut file = OpenOptions::new().write(true).read(true).create_new(true).open(name("file")).expect("create");
        file.write_all(&content).expect("write");
        fs::create_dir(name("directory")).expect("mkdir");
        fs::rename(name("file"), name("directory").join("moved")).expect("rename");
        fs::hard_link(name("directory").join("moved"), name("linked")).expect("link");
        std::os::unix::fs::symlink("target", name("link")).expect("symlink");
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, name("fifo"), fifo, rustix::fs::Mode::RWXU, 0).expect("mknod");
        rustix::fs::setxattr(name("linked"), c"user.x", b"1", rustix::fs::XattrFlags::CREATE).expect("setxattr");
        let mut log = OpenOptions::new().append(true).create(true).open(place.join(format!("log-{number}"))).unwrap();
        writeln!(log, "{round}").expect("append");
        assert_eq!(fs::read(name("linked")).expect("read"), content);
        assert_eq!(fs::read_link(name("link")).expect("readlink"), Path::new("target"));
        assert_eq!(fs::read_dir(name("directory")).expect("readdir").count(), 1);
        assert_eq!(file.metadata().expect("stat").nlink(), 2);
        rustix::fs::removexattr(name("linked"), c"user.x").expect("removexattr");
        for gone in [name("directory").join("moved"), name("linked"), name("link"), name("fifo")] {
            fs::remove_file(gone).expect("unlink");
        }
        fs::remove_dir(name("directory")).expect("rmdir");
        file.write_all_at(b"still", 0).expect("write without a name");
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Raises a flag at its end, also that of a test that failed.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nobody_notices_that_the_process_dies() {
    if !as_root() {
        return;
    }
    let rounds = std::env::var("NACRE_SURVIVAL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3_u64);
    println!("campaign: NACRE_SURVIVAL_ROUNDS={rounds}");
    for round in 0..rounds {
        let mut guarded = match round % 3 {
            0 => Guarded::new(&[]),
            1 => Guarded::new(mounting::without_passthrough()),
            _ => Guarded::cage(&["--size=1G"]),
        };
        let mountpoint = guarded.fixture.mountpoint.clone();
        let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let database = "import sqlite3, sys\n\
            c = sqlite3.connect(sys.argv[1] + '/db'); c.execute('create table t(i integer primary key, v)'); n = 0\n\
            import os\n\
            while not os.path.exists(sys.argv[1] + '/over'):\n\
            \x20   with c: c.execute('insert into t(v) values(?)', ('x' * 500,)); n += 1\n\
            assert c.execute('select count(*) from t').fetchone() == (n,)\n\
            assert c.execute('pragma integrity_check').fetchone() == ('ok',)";
        let database = Command::new("python3").arg("-c").arg(database).arg(&mountpoint).spawn();
        std::thread::scope(|scope| {
            let (over, done, place) = (&over, &done, &mountpoint);
            let end = Raised(over);
            let threads: Vec<_> = (0..3).map(|number| scope.spawn(move || change(place, number, over, done))).collect();
            for _ in 0..2 {
                let before = done.load(Ordering::Relaxed);
                eventually("they go on", || done.load(Ordering::Relaxed) > before + 20 + round % 7);
                // At no particular moment.
                std::thread::sleep(Duration::from_micros(round * 911 % 5000));
                guarded.kill();
            }
            let before = done.load(Ordering::Relaxed);
            eventually("they go on", || done.load(Ordering::Relaxed) > before + 20);
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        fs::write(guarded.at("over"), "").unwrap();
        if let Ok(mut database) = database {
            assert!(database.wait().unwrap().success(), "the database");
        }
        for number in 0..3 {
            let log = fs::read_to_string(guarded.fixture.below(format!("log-{number}"))).unwrap();
            let expected: String = (0..log.lines().count()).map(|round| format!("{round}\n")).collect();
            assert!(log == expected, "what was appended is there once, in its order");
        }
        let left = fs::read_dir(&guarded.fixture.source).unwrap().filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(|first: char| first.is_ascii_digit())
        });
        assert_eq!(left.count(), 0);
        if round % 3 == 2 {
            let (used, inodes) = cost(&guarded.fixture.source);
            eventually("the books of the cage are right", || {
                (cage(&guarded).number("used"), cage(&guarded).number("inodes")) == (used, inodes)
            });
        }
        guarded.fixture.unmount();
    }
}

#[test]
fn a_process_that_dies_before_it_has_gone_on_is_followed_by_another_one() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    let mut file = File::create(guarded.at("file")).unwrap();
    file.write_all(b"one").unwrap();
    let (guardian, first) = (guarded.guardian, guarded.workers[0]);
    let next = || {
        let children = fs::read_to_string(format!("/proc/{guardian}/task/{guardian}/children")).expect("children");
        children.split_whitespace().filter_map(|child| child.parse().ok()).find(|child| *child != first)
    };
    kill(first, Signal::KILL);
    eventually("the next process is there", || next().is_some());
    let second = next().unwrap();
    guarded.workers.push(second);
    kill(second, Signal::KILL);
    file.write_all(b"two").unwrap();
    file.sync_all().unwrap();
    assert_eq!(guarded.restarts(), 2);
    guarded.workers.push(worker(&guarded.fixture.mountpoint));
    assert_eq!(fs::read_to_string(guarded.fixture.below("file")).unwrap(), "onetwo");
}

/// How threads of a process with this name are: the letters of proc(5).
fn states(process: u32, name: &str) -> String {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    stats.filter_map(|stat| stat.split_once(&format!("({name}) "))?.1.chars().next()).collect()
}

/// A mount whose process cannot die: it tells the kernel of a name that is gone from a directory, in
/// which somebody makes a file, for which he waits until the process that is answered is let go.
fn telling_in_vain() -> (Guarded, std::process::Child, std::thread::JoinHandle<std::io::Result<()>>) {
    const PROGRAM: &str = "import ctypes, os, sys\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        group = libc.fanotify_init(4, os.O_RDONLY)\n\
        mask = ctypes.c_uint64(0x10000 | 0x08000000)\n\
        assert libc.fanotify_mark(group, 1, mask, -100, sys.argv[1].encode()) == 0, ctypes.get_errno()\n\
        print('held', flush=True)\n\
        sys.stdin.read()";
    let guarded = Guarded::new(mounting::without_passthrough());
    let below = guarded.fixture.below("d");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("other"), "").unwrap();
    assert!(guarded.at("d/other").exists());
    // Whoever opens a file there waits for the answer of this program, which gives none.
    let mut holder = Command::new("python3");
    let holder = holder.arg("-c").arg(PROGRAM).arg(&below).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().expect("python3");
    let mut said = [0; 5];
    holder.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"held\n");
    let place = guarded.at("d/new");
    let making = std::thread::spawn(move || fs::write(place, "new"));
    eventually("the file is being made", || below.join("new").exists());
    fs::remove_file(below.join("other")).unwrap();
    eventually("the kernel is being told", || states(guarded.workers[0], "nacre-waits") == "D");
    (guarded, holder, making)
}

fn is_there(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

#[test]
fn a_process_that_waits_for_its_own_mount_is_followed_by_another_one() {
    if !as_root() {
        return;
    }
    let (mut guarded, mut holder, making) = telling_in_vain();
    let first = guarded.workers[0];
    guarded.kill();
    assert_eq!(states(first, "nacre-waits"), "D", "it waits for what the other process answers");
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    making.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(guarded.at("d/new")).unwrap(), "new");
    assert!(!guarded.at("d/other").exists());
    eventually("it is dead", || !is_there(first));
    guarded.kill();
    assert_eq!(guarded.restarts(), 2);
}

#[test]
fn a_mount_stays_down_whoever_waits_for_it() {
    if !as_root() {
        return;
    }
    let (mut guarded, mut holder, making) = telling_in_vain();
    let first = guarded.workers[0];
    for _ in 0..2 {
        guarded.kill();
        let serving = *guarded.workers.last().unwrap();
        eventually("the file is being made", || states(serving, "fuse device").contains('D'));
    }
    kill(*guarded.workers.last().unwrap(), Signal::KILL);
    assert_eq!(guarded.fixture.ended(), Some(1));
    assert!(making.join().unwrap().is_err());
    eventually("it is dead", || !is_there(first));
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
}

#[test]
fn the_third_death_within_a_minute_is_the_last() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    guarded.kill();
    guarded.kill();
    kill(*guarded.workers.last().unwrap(), Signal::KILL);
    assert_eq!(guarded.fixture.ended(), Some(1));
    assert_eq!(mounting::errno(fs::metadata(guarded.at("x"))), rustix::io::Errno::NOTCONN.raw_os_error());
}

#[test]
fn a_mount_goes_on_without_its_guardian_until_its_process_dies() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    fs::write(guarded.at("file"), "content").unwrap();
    let why = Status::of(&guarded.fixture.mountpoint).text("transport_reason").to_owned();
    assert!(why.contains("end with the process"), "no io_uring: {why}");
    guarded.fixture.signal(Signal::KILL);
    assert_eq!(guarded.fixture.ended(), None);
    assert_eq!(fs::read_to_string(guarded.at("file")).unwrap(), "content");
    let mountpoint = guarded.fixture.mountpoint.clone();
    assert!(Status::of(&mountpoint).survives().get("guardian").is_none(), "nobody goes on with it");
    kill(guarded.workers[0], Signal::KILL);
    eventually("the mount is dead", || {
        fs::metadata(mountpoint.join("file")).is_err_and(|error| error.raw_os_error() == Some(107))
    });
}

#[test]
fn a_signal_to_the_guardian_ends_the_mount() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    guarded.kill();
    guarded.fixture.signal(Signal::TERM);
    assert_eq!(guarded.fixture.ended(), Some(0));
    assert!(!is_mounted(&guarded.fixture.mountpoint));
    assert!(guarded.workers.iter().all(|worker| is_gone(*worker)));
}

#[test]
fn what_cannot_outlive_its_process_is_refused() {
    if !as_root() {
        return;
    }
    let fixture = Fixture::bare();
    let (source, mountpoint) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    for (options, why) in [
        (&["--transport=uring"][..], "io_uring"),
        (&["--enable-lock-forwarding"], "locks"),
        (&["--immutable"], "without a request"),
        (&["--notify-watchers"], "raise events"),
    ] {
        let words = [&["mirror", "--survive"], options, &[source, mountpoint]].concat();
        let output = fixture.nacre(&words);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(mounting::text(&output.stderr).contains(why), "{}", mounting::text(&output.stderr));
    }
    let output = fixture.nacre(["cage", "--survive", "--size=1M", "--writes=collected", source]);
    assert!(mounting::text(&output.stderr).contains("--writes=through"), "{}", mounting::text(&output.stderr));
    let below = fixture.scratch.path().join("below");
    fs::create_dir(&below).unwrap();
    let (branches, below) = (format!("{source}=rw:{}=ro", below.display()), below.display());
    for (words, why) in [
        (["union", "-o", "link-cow=true", &branches], "numbers of this process"),
        (["mount", "-o", "rw", &format!("union:{branches} | cage:size=1M")], "a cage lies over a union"),
        (["mount", "-o", "rw", &format!("union:{source}=rw:{{union:{below}=ro}}=ro")], "a union itself"),
        (["mount", "-o", "rw", &format!("union:{source}=rw:{{mem}}=ro")], "\"mem\""),
    ] {
        let output = fixture.nacre([&words[..], &["--survive", "--transport=device", mountpoint]].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", mounting::text(&output.stderr));
        assert!(mounting::text(&output.stderr).contains(why), "{}", mounting::text(&output.stderr));
    }
    let output = fixture.nacre(["mount", "--survive", "mem", mountpoint]);
    assert!(mounting::text(&output.stderr).contains("\"mem\""), "{}", mounting::text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
}
