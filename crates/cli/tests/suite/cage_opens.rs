//! Cages whose files the kernel opens without a request: the saved requests, the other means for
//! the purposes of opens, and that the limit, deleted files and changes by others behave as with
//! requests.

use crate::mounting::{
    Fixture, as_root,
    cages::{Cage, data, fill, zeros},
    errno, eventually,
    images::on_each,
    kill, needs, sh,
    status::{Status, least_requests_of, requests_of},
    text,
};
use rustix::{
    fs::{FallocateFlags, Mode, OFlags, fallocate},
    process::Signal,
};
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
};

const ENOSPC: i32 = 28;
const EPERM: i32 = 1;
const MIB: u64 = 1 << 20;

/// A limit that leaves room for whatever a kernel may hold back.
const ROOMY: &str = "--size=4T";

fn opens(fixture: &Fixture) -> Option<String> {
    Status::of(&fixture.mountpoint).asks_at_open().map(str::to_owned)
}

fn roomy() -> Fixture {
    let fixture = Fixture::cage(&[ROOMY]);
    assert_eq!(opens(&fixture), None);
    fixture
}

fn used(fixture: &Fixture) -> u64 {
    Cage::of(fixture, &fixture.mountpoint).number("used")
}

/// From now on every write is announced: there is less room than the kernel may hold back.
fn resize(fixture: &Fixture, size: &str) {
    let words = [OsStr::new("cage"), OsStr::new("resize"), fixture.mountpoint.as_os_str(), OsStr::new(size)];
    let output = fixture.nacre(words);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn append(path: &Path, line: &[u8]) {
    OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(line).unwrap();
}

#[test]
fn opening_a_known_file_reaches_nobody() {
    needs!(as_root());
    let fixture = roomy();
    let log = fixture.at("log");
    append(&log, b"first\n");
    let read = least_requests_of(&fixture.mountpoint, || {
        for _ in 0..10 {
            assert_eq!(fs::read(&log).unwrap(), b"first\n");
        }
    });
    assert!(read.keys().all(|kind| kind == "getattr" || kind == "statx"), "{read:?}");
    let lines = requests_of(&fixture.mountpoint, || (0..500).for_each(|_| append(&log, b"line\n")));
    assert!(!lines.contains_key("open") && !lines.contains_key("release"), "{lines:?}");
    assert_eq!(lines["write"], 500);
    // The time of the file is passed on when it changes, every few milliseconds: not for each line.
    assert!(lines.get("setattr").is_none_or(|times| *times < 400), "{lines:?}");
    // Whatever was done to the file before, a descriptor that is held costs nothing.
    let mut held = OpenOptions::new().append(true).open(&log).unwrap();
    let wrote = least_requests_of(&fixture.mountpoint, || {
        (0..50).for_each(|_| (&held).write_all(b"held\n").unwrap());
    });
    assert!(wrote.get("write").is_none_or(|writes| *writes < 10), "{wrote:?}");
    held.flush().unwrap();
    drop(held);
    assert_eq!(fs::read(fixture.below("log")).unwrap(), fs::read(&log).unwrap());
    // Truncation is a change like any other.
    File::create(&log).unwrap();
    assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), 0);
}

#[test]
fn what_needs_opens_has_them_and_says_why() {
    needs!(as_root());
    for (options, why) in [
        (&["--size=8M", "--writes=collected"][..], "the kernel may hold back too much for this limit"),
        (&[ROOMY, "--when-full=drop-oldest"], "open files stay when room is made"),
        (&[ROOMY, "--limit=user:1234=1G"], "users or directories have limits of their own"),
        (&[ROOMY, "--writes=through"], "files can be written through this mount"),
    ] {
        let mut fixture = Fixture::cage(options);
        assert_eq!(opens(&fixture).as_deref(), Some(why), "{options:?}");
        fixture.unmount();
    }
}

#[test]
fn the_limit_holds_for_every_call() {
    needs!(as_root());
    let fixture = roomy();
    fs::write(fixture.at("before"), zeros(MIB)).unwrap();
    resize(&fixture, "32M");
    let mut file = OpenOptions::new().append(true).create(true).open(fixture.at("log")).unwrap();
    let (accepted, error) = fill(&mut file, 4096);
    assert_eq!((accepted, error), (31 * MIB, ENOSPC));
    assert_eq!((used(&fixture), data(&fixture.source)), (32 * MIB, 32 * MIB));
    // What is there can be written to, wherever.
    let there = OpenOptions::new().read(true).write(true).open(fixture.at("log")).unwrap();
    for at in [0, 5000, 7 * MIB, 31 * MIB - 10] {
        there.write_all_at(b"overwrite!", at).unwrap();
    }
    (&there).rewind().unwrap();
    (&there).write_all(&zeros(2 * MIB)).unwrap();
    there.sync_all().unwrap();
    assert_eq!(errno(there.write_all_at(b"x", 31 * MIB)), ENOSPC);
    assert_eq!(errno(fs::write(fixture.at("new"), "x")), ENOSPC);
    // A hole costs nothing, what is written into it does.
    there.set_len(64 * MIB).unwrap();
    assert_eq!(errno(there.write_all_at(b"x", 40 * MIB)), ENOSPC);
    there.set_len(31 * MIB).unwrap();
    // What is removed can be used at once.
    fs::remove_file(fixture.at("before")).unwrap();
    there.write_all_at(&zeros(MIB / 2), 31 * MIB).unwrap();
    let other = File::create(fixture.at("other")).unwrap();
    fallocate(&other, FallocateFlags::empty(), 0, MIB / 2).unwrap();
    assert!(fallocate(&other, FallocateFlags::empty(), 0, MIB).is_err());
    drop((there, other, file));
    assert_eq!(data(&fixture.source), 32 * MIB);
    // With free space again, opens are no requests any more.
    resize(&fixture, "4T");
    fs::write(fixture.at("large"), zeros(40 * MIB)).unwrap();
    assert_eq!(fs::metadata(fixture.below("large")).unwrap().len(), 40 * MIB);
}

/// A writer that waits for space while it holds a file's lock waits for the write-back of that very
/// file.
#[test]
fn who_holds_a_files_lock_gets_the_room_that_there_is() {
    needs!(as_root());
    let fixture = roomy();
    for round in 0..5 {
        resize(&fixture, "4T");
        let file = File::create(fixture.at("file")).unwrap();
        file.write_all_at(&zeros(3 * MIB), 0).unwrap();
        // Too little for what the kernel may hold back besides, enough for this.
        resize(&fixture, "64M");
        match round % 3 {
            0 => fallocate(&file, FallocateFlags::empty(), 0, 60 * MIB).unwrap(),
            1 => fallocate(&file, FallocateFlags::KEEP_SIZE, 3 * MIB, 60 * MIB).unwrap(),
            _ => {
                let from = File::open(fixture.at("file")).unwrap();
                let to = File::create(fixture.at("copy")).unwrap();
                assert_eq!(rustix::fs::copy_file_range(&from, None, &to, None, 3 << 20).unwrap(), 3 << 20);
                fs::rename(fixture.at("copy"), fixture.at("file")).unwrap();
            }
        }
        fs::remove_file(fixture.at("file")).unwrap();
    }
    drop(fixture);
}

#[test]
fn a_file_without_a_name_lives_until_its_last_close() {
    needs!(as_root());
    let fixture = roomy();
    let open = |name: &str| {
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(fixture.at(name)).unwrap()
    };
    let content = |file: &File| {
        let mut content = Vec::new();
        let mut file = file;
        file.rewind().unwrap();
        file.read_to_end(&mut content).unwrap();
        content
    };
    // Removed, and replaced by a rename.
    let (removed, replaced, read) = (open("removed"), open("replaced"), open("read"));
    for file in [&removed, &replaced, &read] {
        file.write_all_at(&zeros(MIB), 0).unwrap();
        file.sync_all().unwrap();
    }
    drop(read);
    let read = File::open(fixture.at("read")).unwrap();
    fs::write(fixture.at("new"), "new").unwrap();
    fs::remove_file(fixture.at("removed")).unwrap();
    fs::remove_file(fixture.at("read")).unwrap();
    fs::rename(fixture.at("new"), fixture.at("replaced")).unwrap();
    assert_eq!(fs::read(fixture.at("replaced")).unwrap(), b"new");
    for file in [&removed, &replaced] {
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        file.write_all_at(b"more", MIB).unwrap();
        file.sync_all().unwrap();
        assert_eq!(content(file).len() as u64, MIB + 4);
        file.set_len(2 * MIB).unwrap();
    }
    assert_eq!(content(&read).len() as u64, MIB);
    // It counts for as long, and no longer.
    let small = 4096;
    eventually("all of it is counted", || used(&fixture) == 3 * MIB + 2 * 4096 + small);
    drop((removed, replaced, read));
    eventually("it is counted no more", || used(&fixture) == small);
    // Made without one, and given one.
    let nameless = rustix::fs::open(&fixture.mountpoint, OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o644));
    let nameless = File::from(nameless.unwrap());
    nameless.write_all_at(&zeros(5000), 0).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&nameless));
    let follow = rustix::fs::AtFlags::SYMLINK_FOLLOW;
    rustix::fs::linkat(rustix::fs::CWD, path, rustix::fs::CWD, fixture.at("named"), follow).unwrap();
    drop(nameless);
    assert_eq!(fs::read(fixture.below("named")).unwrap(), zeros(5000));
}

#[test]
fn what_is_removed_is_free_at_once() {
    needs!(as_root());
    let fixture = roomy();
    resize(&fixture, "16M");
    for round in 0..50 {
        let path = fixture.at(format!("file{round}"));
        let file = File::create(&path).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 15 * MIB).unwrap_or_else(|error| panic!("{round}: {error}"));
        drop(file);
        fs::remove_file(path).unwrap();
    }
}

/// The kernel reads the beginning of a short program past its end, for which it asks as for a write.
#[test]
fn programs_are_executed_where_nothing_can_be_written() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    for name in ["known", "protected"] {
        fs::write(fixture.below(name), "#!/bin/sh\nexit 7\n").unwrap();
        fs::set_permissions(fixture.below(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    sh(&fixture.source, "chattr +i protected");
    fixture.start_cage(&[ROOMY]);
    assert_eq!(opens(&fixture), None);
    let executed = |name: &str| Command::new(fixture.at(name)).status().unwrap().code();
    assert_eq!([executed("known"), executed("protected")], [Some(7); 2]);
    // Now every write is announced.
    resize(&fixture, "16M");
    let mut file = File::create(fixture.at("large")).unwrap();
    assert_eq!(fill(&mut file, 4096).1, ENOSPC);
    assert_eq!([executed("known"), executed("protected")], [Some(7); 2]);
    drop(file);
    sh(&fixture.source, "chattr -i protected");
}

#[test]
fn changes_by_others_are_seen() {
    needs!(as_root());
    let fixture = roomy();
    let (at, below) = (fixture.at("file"), fixture.below("file"));
    for round in 0..3 {
        fs::write(&at, "ours").unwrap();
        let mut other = OpenOptions::new().append(true).open(&below).unwrap();
        other.write_all(b", theirs").unwrap();
        eventually("what others appended", || fs::read(&at).unwrap() == b"ours, theirs");
        append(&at, b", ours");
        assert_eq!(fs::read(&below).unwrap(), b"ours, theirs, ours", "{round}");
        fs::write(&below, "short").unwrap();
        eventually("what others wrote", || fs::read(&at).unwrap() == b"short");
    }
    fs::remove_file(&below).unwrap();
    eventually("it is gone", || !at.exists());
}

#[test]
fn what_was_closed_survives_a_kill() {
    needs!(as_root());
    let fixture = roomy();
    for number in 0..20_u32 {
        append(&fixture.at("log"), format!("line {number}\n").as_bytes());
    }
    let pid = Status::of(&fixture.mountpoint).number("pid");
    kill(u32::try_from(pid).unwrap(), Signal::KILL);
    let log = fs::read_to_string(fixture.below("log")).unwrap();
    assert_eq!(log.lines().count(), 20);
}

#[test]
fn a_protected_file_is_not_written_to() {
    needs!(as_root());
    let fixture = roomy();
    fs::write(fixture.below("file"), "content").unwrap();
    for flag in ["i", "a"] {
        crate::mounting::sh(&fixture.source, &format!("chattr +{flag} file"));
        let write =
            || OpenOptions::new().write(true).open(fixture.at("file")).and_then(|mut file| file.write_all(b"x"));
        eventually("the file is protected", || write().is_err());
        assert_eq!(errno(write()), EPERM, "{flag}");
        assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
        crate::mounting::sh(&fixture.source, &format!("chattr -{flag} file"));
    }
    eventually("it is protected no more", || fs::write(fixture.at("file"), "other").is_ok());
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"other");
}

/// A protected log accepts every append, in whatever order the kernel writes back, and with any
/// number of writers.
#[test]
fn a_protected_log_is_appended_to() {
    needs!(as_root());
    let fixture = roomy();
    let begin = b"begin\n".to_vec();
    fs::write(fixture.below("log"), &begin).unwrap();
    crate::mounting::sh(&fixture.source, "chattr +a log");
    // Lines of different lengths, over many pages; synced, read and closed in between.
    let mut expected = begin;
    for round in 0..4_usize {
        let mut log = OpenOptions::new().append(true).open(fixture.at("log")).unwrap();
        for number in 0..3000_usize {
            let line = format!("{round} {number} {}\n", "x".repeat(number % 1500));
            log.write_all(line.as_bytes()).unwrap();
            expected.extend_from_slice(line.as_bytes());
            if number == 1500 && round % 2 == 0 {
                log.sync_all().unwrap();
                let found = fs::read(fixture.below("log")).unwrap();
                let at = (0..expected.len()).find(|at| found.get(*at) != expected.get(*at));
                assert_eq!((at, found.len()), (None, expected.len()));
            }
        }
        assert_eq!(fs::metadata(fixture.at("log")).unwrap().len(), expected.len() as u64);
    }
    assert!(fs::read(fixture.at("log")).unwrap() == expected, "what is read is something else");
    assert!(fs::read(fixture.below("log")).unwrap() == expected, "what is there is something else");
    let writers: Vec<_> = (0..4_u8)
        .map(|writer| {
            let path = fixture.at("log");
            std::thread::spawn(move || (0..200).for_each(|_| append(&path, &[b'a' + writer; 100])))
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let whole = fs::read(fixture.below("log")).unwrap();
    let added = &whole[expected.len()..];
    assert_eq!(added.len(), 4 * 200 * 100);
    assert!(added.chunks(100).all(|line| line.iter().all(|byte| *byte == line[0])), "lines are mixed");
    crate::mounting::sh(&fixture.source, "chattr -a log");
    eventually("it is protected no more", || fs::write(fixture.at("log"), "other").is_ok());
    assert_eq!(fs::read(fixture.below("log")).unwrap(), b"other");
}

/// Space that others use as well: the disk below has less free space than the cage.
#[test]
fn a_full_disk_refuses_the_write_itself() {
    needs!(as_root());
    on_each(|kind, fixture| {
        // It does not count as used what it has taken and not yet written.
        if kind == "btrfs" {
            return;
        }
        fixture.start_cage(&[ROOMY]);
        assert_eq!(opens(fixture), None);
        fs::write(fixture.at("first"), zeros(MIB)).unwrap();
        let mut file = File::create(fixture.at("large")).unwrap();
        let (accepted, error) = fill(&mut file, 1 << 16);
        assert_eq!(error, ENOSPC, "{kind}");
        file.sync_all().unwrap_or_else(|error| panic!("{kind}: {error} after {accepted} bytes"));
        drop(file);
        assert_eq!(fs::metadata(fixture.below("large")).unwrap().len(), accepted, "{kind}");
        fs::remove_file(fixture.at("large")).unwrap();
        fs::write(fixture.at("again"), zeros(MIB)).unwrap_or_else(|error| panic!("{kind}: {error}"));
        fixture.unmount();
    });
}

/// Programs take a file without a sector for a hole, and store zeros.
#[test]
fn what_was_just_written_has_a_sector() {
    needs!(as_root());
    let fixture = roomy();
    let mut held = File::create(fixture.at("held")).unwrap();
    held.write_all(b"x").unwrap();
    assert!(held.metadata().unwrap().blocks() > 0);
    let tar = "tar cSf $1.tar $1 && mkdir $1.d && tar xf $1.tar -C $1.d && cmp $1 $1.d/$1";
    sh(
        &fixture.mountpoint,
        &format!("set -e; t() {{ {tar}; }}; echo x > new; truncate -s 1M new; t new; truncate -s 1M held; t held"),
    );
    drop(held);
}
