//! Parity of open files whose names are moved or removed.

use super::{Case, Log};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};

pub(super) const CASES: &[Case] = &[
    ("unlinked open files", unlinked),
    ("replaced open files", replaced),
    ("files without names", nameless),
    ("open directories", open_directories),
    ("reopening through proc", reopening),
    ("execution", execution),
];

fn through(file: &OwnedFd, log: &mut Log, what: &str) {
    match rustix::fs::fstat(file) {
        Ok(stat) => log.say(format!(
            "{what}: mode {:o} nlink {} size {} owner {}",
            stat.st_mode, stat.st_nlink, stat.st_size, stat.st_uid
        )),
        Err(error) => log.say(format!("{what}: {error}")),
    }
}

fn unlinked(log: &mut Log) {
    let file = log.file("file", b"content");
    let answer = rustix::fs::unlink(log.at("file"));
    log.did("unlink", answer);
    through(&file, log, "fstat");
    rustix::io::pwrite(&file, b"more content", 0).expect("write");
    through(&file, log, "fstat after a write");
    let answer = rustix::fs::fchmod(&file, Mode::from_raw_mode(0o600));
    log.did("fchmod", answer);
    let answer = rustix::fs::ftruncate(&file, 4);
    log.did("ftruncate", answer);
    let answer = rustix::fs::fsetxattr(&file, "user.one", b"x", rustix::fs::XattrFlags::empty());
    log.did("fsetxattr", answer);
    let answer = rustix::fs::fsync(&file);
    log.did("fsync", answer);
    through(&file, log, "fstat at last");
    let mut buffer = [0; 20];
    let read = rustix::io::pread(&file, &mut buffer, 0);
    log.saw("read", read);
    log.file("file", b"another");
    through(&file, log, "the old one beside a new one");
    log.content("file");
    log.list("");
}

fn replaced(log: &mut Log) {
    let old = log.file("target", b"old");
    log.file("source", b"new");
    let answer = rustix::fs::rename(log.at("source"), log.at("target"));
    log.did("rename", answer);
    through(&old, log, "the replaced one");
    let mut buffer = [0; 3];
    rustix::io::pread(&old, &mut buffer, 0).expect("read");
    log.say(format!("{buffer:?}"));
    log.content("target");
    log.stat("target");
}

fn nameless(log: &mut Log) {
    log.mkdir("d");
    let Some(file) = log.open("d", OFlags::TMPFILE | OFlags::RDWR, 0o640) else { return };
    through(&file, log, "fstat");
    rustix::io::pwrite(&file, b"content", 0).expect("write");
    log.list("d");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let answer = rustix::fs::linkat(CWD, path, CWD, log.at("named"), AtFlags::SYMLINK_FOLLOW);
    log.did("link", answer);
    log.stat("named");
    log.content("named");
    through(&file, log, "fstat with a name");
    let Some(exclusive) = log.open("d", OFlags::TMPFILE | OFlags::EXCL | OFlags::WRONLY, 0o600) else { return };
    let path = format!("/proc/self/fd/{}", exclusive.as_raw_fd());
    let answer = rustix::fs::linkat(CWD, path, CWD, log.at("never"), AtFlags::SYMLINK_FOLLOW);
    log.did("link of an exclusive one", answer);
    log.open("d", OFlags::TMPFILE | OFlags::RDONLY, 0o600);
    log.open("named", OFlags::TMPFILE | OFlags::RDWR, 0o600);
    log.list("");
}

fn open_directories(log: &mut Log) {
    log.mkdir("d");
    log.file("d/file", b"content");
    let Some(directory) = log.open("d", OFlags::RDONLY | OFlags::DIRECTORY, 0) else { return };
    let answer = rustix::fs::rename(log.at("d"), log.at("moved"));
    log.did("rename", answer);
    let file = rustix::fs::openat(&directory, "file", OFlags::RDONLY, Mode::empty());
    log.did("openat in the moved directory", file);
    let made = rustix::fs::mkdirat(&directory, "inner", Mode::from_raw_mode(0o700));
    log.did("mkdirat in the moved directory", made);
    log.list("moved");
    rustix::fs::rmdir(log.at("moved/inner")).expect("rmdir");
    rustix::fs::unlink(log.at("moved/file")).expect("unlink");
    rustix::fs::rmdir(log.at("moved")).expect("rmdir");
    let made = rustix::fs::mkdirat(&directory, "late", Mode::from_raw_mode(0o700));
    log.did("mkdirat in the removed directory", made);
    let file = rustix::fs::openat(&directory, "file", OFlags::RDONLY, Mode::empty());
    log.did("openat in the removed directory", file);
    match rustix::fs::fstat(&directory) {
        Ok(stat) => log.say(format!("the removed directory: mode {:o} nlink {}", stat.st_mode, stat.st_nlink)),
        Err(error) => log.say(format!("the removed directory: {error}")),
    }
}

fn reopening(log: &mut Log) {
    let file = log.file("file", b"content");
    rustix::fs::unlink(log.at("file")).expect("unlink");
    let again = rustix::fs::open(format!("/proc/self/fd/{}", file.as_raw_fd()), OFlags::RDWR, Mode::empty());
    if let Some(again) = log.did("open of an unlinked file through proc", again) {
        rustix::io::pwrite(&again, b"C", 0).expect("write");
        let mut buffer = [0; 7];
        rustix::io::pread(&file, &mut buffer, 0).expect("read");
        log.say(buffer.escape_ascii().to_string());
    }
}

fn execution(log: &mut Log) {
    // Created by a process of its own: a descriptor for writing in this process could be inherited
    // by a child of another test, and a program that is open for writing cannot be executed.
    let make = "cp /bin/true true; chmod 755 true; printf '#!/bin/sh\\nexit 7\\n' > script; chmod 755 script";
    let made = std::process::Command::new("sh").args(["-c", make]).current_dir(log.at("")).status();
    log.say(format!("made: {:?}", made.map(|status| status.code()).map_err(|error| error.raw_os_error())));
    let run = |log: &mut Log, what: &str| {
        let status = std::process::Command::new(log.at("true")).status();
        log.say(format!("{what}: {:?}", status.map(|status| status.code()).map_err(|error| error.raw_os_error())));
    };
    run(log, "a program");
    let writer = log.open("true", OFlags::WRONLY, 0);
    run(log, "a program that is open for writing");
    drop(writer);
    rustix::fs::chmod(log.at("true"), Mode::from_raw_mode(0o644)).expect("chmod");
    run(log, "a program without permission");
    let status = std::process::Command::new(log.at("script")).status();
    log.say(format!("a script: {:?}", status.map(|status| status.code()).map_err(|error| error.raw_os_error())));
}
