//! Parity of calls about names.

use super::{Case, Log};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

pub(super) const CASES: &[Case] = &[
    ("create and open flags", create_and_open),
    ("directories", directories),
    ("unlink and rmdir", removal),
    ("hard links", hard_links),
    ("symbolic links", symbolic_links),
    ("rename", renames),
    ("rename with flags", renames_with_flags),
    ("special files", special_files),
    ("names of all kinds", names_of_all_kinds),
    ("names that are too long", too_long),
    ("paths with dots and slashes", dots),
    ("listing", listing),
    ("directory times", directory_times),
    ("umask", umask),
];

fn create_and_open(log: &mut Log) {
    for (flags, mode) in [
        (OFlags::RDONLY, 0),
        (OFlags::CREATE | OFlags::WRONLY, 0o640),
        (OFlags::CREATE | OFlags::EXCL | OFlags::RDWR, 0o600),
        (OFlags::CREATE | OFlags::RDONLY, 0o777),
        (OFlags::DIRECTORY, 0),
        (OFlags::NOFOLLOW, 0),
        (OFlags::WRONLY | OFlags::TRUNC, 0),
        (OFlags::RDWR | OFlags::APPEND, 0),
        (OFlags::PATH, 0),
        (OFlags::RDWR | OFlags::SYNC, 0),
        (OFlags::RDWR | OFlags::DSYNC, 0),
        (OFlags::RDONLY | OFlags::NOATIME, 0),
        (OFlags::RDONLY | OFlags::NONBLOCK, 0),
    ] {
        log.open("file", flags, mode);
        log.stat("file");
    }
    log.open("sticky", OFlags::CREATE | OFlags::RDWR, 0o7777);
    log.stat("sticky");
    log.mkdir("d");
    for flags in [
        OFlags::RDWR,
        OFlags::WRONLY,
        OFlags::CREATE,
        OFlags::CREATE | OFlags::EXCL,
        OFlags::RDONLY,
        OFlags::TRUNC | OFlags::WRONLY,
    ] {
        log.open("d", flags, 0o644);
    }
    log.open("missing/file", OFlags::CREATE | OFlags::RDWR, 0o644);
    log.open("file/file", OFlags::CREATE | OFlags::RDWR, 0o644);
    log.open("d/", OFlags::CREATE | OFlags::RDWR, 0o644);
    log.open("file/", OFlags::RDONLY, 0);
}

fn directories(log: &mut Log) {
    for (name, mode) in [("a", 0o755), ("b", 0o1777), ("c", 0o2750), ("d", 0o700), ("e", 0o000)] {
        let made = rustix::fs::mkdir(log.at(name), Mode::from_raw_mode(mode));
        log.did(&format!("mkdir {name}"), made);
        log.stat(name);
    }
    let again = rustix::fs::mkdir(log.at("a"), Mode::from_raw_mode(0o755));
    log.did("mkdir again", again);
    log.file("file", b"");
    for name in ["file", "file/x", "missing/x", "a/x/"] {
        let made = rustix::fs::mkdir(log.at(name), Mode::from_raw_mode(0o755));
        log.did(&format!("mkdir {name}"), made);
    }
    log.stat("a");
    log.stat("");
}

fn removal(log: &mut Log) {
    log.mkdir("d");
    log.mkdir("full");
    log.file("full/inside", b"");
    log.file("file", b"");
    for name in ["d", "missing", "file/x", "file/", "full", ".", ".."] {
        let answer = rustix::fs::unlink(log.at(name));
        log.did(&format!("unlink {name}"), answer);
        if name != "d" {
            let answer = rustix::fs::rmdir(log.at(name));
            log.did(&format!("rmdir {name}"), answer);
        }
    }
    let answer = rustix::fs::rmdir(log.at("d/."));
    log.did("rmdir d/.", answer);
    let answer = rustix::fs::rmdir(log.at("d"));
    log.did("rmdir d", answer);
    let answer = rustix::fs::unlink(log.at("file"));
    log.did("unlink file", answer);
    log.list("");
}

fn hard_links(log: &mut Log) {
    let file = log.file("one", b"content");
    let link = |log: &mut Log, from: &str, to: &str, flags| {
        let answer = rustix::fs::linkat(CWD, log.at(from), CWD, log.at(to), flags);
        log.did(&format!("link {from} {to}"), answer);
    };
    link(log, "one", "two", AtFlags::empty());
    log.stat("one");
    log.stat("two");
    rustix::io::pwrite(&file, b"longer content", 0).expect("write");
    log.stat("one");
    log.stat("two");
    link(log, "one", "two", AtFlags::empty());
    link(log, "missing", "three", AtFlags::empty());
    log.mkdir("d");
    link(log, "d", "e", AtFlags::empty());
    link(log, "one", "d/three", AtFlags::empty());
    link(log, "one", "missing/three", AtFlags::empty());
    rustix::fs::symlink("one", log.at("s")).expect("symlink");
    link(log, "s", "t", AtFlags::empty());
    log.stat("t");
    link(log, "s", "u", AtFlags::SYMLINK_FOLLOW);
    log.stat("u");
    rustix::fs::unlink(log.at("one")).expect("unlink");
    log.stat("two");
    log.stat("d/three");
    log.content("d/three");
}

fn symbolic_links(log: &mut Log) {
    let link = |log: &mut Log, target: &[u8], name: &str| {
        let answer = rustix::fs::symlink(OsStr::from_bytes(target), log.at(name));
        log.did(&format!("symlink {} {name}", target.len()), answer);
        log.stat(name);
        let read = rustix::fs::readlink(log.at(name), Vec::new());
        log.saw(&format!("readlink {name}"), read);
    };
    log.file("file", b"content");
    log.mkdir("d");
    link(log, b"file", "to-file");
    link(log, b"d", "to-d");
    link(log, b"missing", "dangling");
    link(log, b"loop", "loop");
    link(log, &[b'x'; 4095], "long");
    link(log, &[b'x'; 4096], "longer");
    link(log, b"", "empty");
    link(log, b"\xff\xfe", "bytes");
    link(log, b"file", "to-file");
    for name in ["to-file", "to-d", "dangling", "loop"] {
        log.open(name, OFlags::RDONLY, 0);
        log.open(name, OFlags::RDONLY | OFlags::NOFOLLOW, 0);
        log.open(name, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR, 0o644);
    }
    log.content("to-file");
    log.open("dangling", OFlags::CREATE | OFlags::RDWR, 0o644);
    log.stat("missing");
    let read = rustix::fs::readlink(log.at("file"), Vec::new());
    log.saw("readlink file", read);
    log.mkdir("to-d/inner");
    log.list("d");
    let answer = rustix::fs::rmdir(log.at("to-d"));
    log.did("rmdir to-d", answer);
    let answer = rustix::fs::unlink(log.at("to-d"));
    log.did("unlink to-d", answer);
}

fn rename(log: &mut Log, from: &str, to: &str, flags: RenameFlags) {
    let answer = rustix::fs::renameat_with(CWD, log.at(from), CWD, log.at(to), flags);
    log.did(&format!("rename {from} {to} {}", flags.bits()), answer);
}

fn renames(log: &mut Log) {
    log.file("a", b"a");
    log.file("b", b"b");
    log.mkdir("empty");
    log.mkdir("full");
    log.file("full/inside", b"inside");
    let none = RenameFlags::empty();
    for (from, to) in [
        ("a", "c"),
        ("c", "b"),
        ("missing", "b"),
        ("b", "empty"),
        ("empty", "b"),
        ("empty", "full"),
        ("full", "full/inner"),
        ("full", "empty"),
        ("b", "b"),
        ("b", "missing/b"),
        ("b/x", "y"),
        ("empty/inside", "b/x"),
        ("empty/.", "z"),
        ("empty/..", "z"),
        ("b", "z/"),
        ("empty", "z/"),
    ] {
        rename(log, from, to, none);
        log.list("");
    }
    log.content("b");
    log.content("z/inside");
    rustix::fs::linkat(CWD, log.at("b"), CWD, log.at("b2"), AtFlags::empty()).expect("link");
    rename(log, "b", "b2", none);
    log.list("");
}

fn renames_with_flags(log: &mut Log) {
    log.file("a", b"a");
    log.file("b", b"b");
    log.mkdir("d");
    log.file("d/inside", b"");
    rename(log, "a", "b", RenameFlags::NOREPLACE);
    rename(log, "a", "c", RenameFlags::NOREPLACE);
    rename(log, "c", "b", RenameFlags::EXCHANGE);
    log.content("b");
    log.content("c");
    rename(log, "b", "d", RenameFlags::EXCHANGE);
    log.stat("b");
    log.stat("d");
    log.list("b");
    rename(log, "b", "missing", RenameFlags::EXCHANGE);
    rename(log, "b", "b/inside", RenameFlags::EXCHANGE);
    rename(log, "b", "c", RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
    rename(log, "b", "c", RenameFlags::from_bits_retain(64));
    log.list("");
}

fn special_files(log: &mut Log) {
    for (name, kind, mode, device) in [
        ("fifo", FileType::Fifo, 0o640, 0),
        ("socket", FileType::Socket, 0o600, 0),
        ("file", FileType::RegularFile, 0o604, 0),
        ("null", FileType::CharacterDevice, 0o666, rustix::fs::makedev(1, 3)),
        ("disk", FileType::BlockDevice, 0o660, rustix::fs::makedev(250, 70_000)),
        ("fifo", FileType::Fifo, 0o640, 0),
        ("missing/fifo", FileType::Fifo, 0o640, 0),
    ] {
        let made = rustix::fs::mknodat(CWD, log.at(name), kind, Mode::from_raw_mode(mode), device);
        log.did(&format!("mknod {name}"), made);
        log.stat(name);
    }
    log.open("fifo", OFlags::WRONLY | OFlags::NONBLOCK, 0);
    log.open("socket", OFlags::RDONLY, 0);
    let reader = log.open("fifo", OFlags::RDONLY | OFlags::NONBLOCK, 0);
    let writer = log.open("fifo", OFlags::WRONLY | OFlags::NONBLOCK, 0);
    if let (Some(reader), Some(writer)) = (reader, writer) {
        let written = rustix::io::write(&writer, b"through");
        log.saw("write to fifo", written);
        let mut buffer = [0; 20];
        let read = rustix::io::read(&reader, &mut buffer);
        log.saw("read from fifo", read);
        log.say(format!("{:?}", &buffer[..7]));
    }
    let listener = std::os::unix::net::UnixListener::bind(log.at("bound"));
    log.say(format!("bind: {:?}", listener.as_ref().map(|_| ()).map_err(std::io::Error::raw_os_error)));
    let stream = std::os::unix::net::UnixStream::connect(log.at("bound"));
    log.say(format!("connect: {:?}", stream.map(|_| ()).map_err(|e| e.raw_os_error())));
    log.stat("bound");
    log.list("");
}

fn names_of_all_kinds(log: &mut Log) {
    for byte in (1..=255u8).filter(|byte| *byte != b'/') {
        let path = log.at("").join(OsStr::from_bytes(&[b'n', byte]));
        let made = rustix::fs::open(&path, OFlags::CREATE | OFlags::RDWR | OFlags::EXCL, Mode::from_raw_mode(0o600));
        log.did(&format!("create n{byte:02x}"), made);
    }
    log.list("");
    let long = "x".repeat(255);
    log.file(&long, b"long");
    log.stat(&long);
    log.content(&long);
}

fn too_long(log: &mut Log) {
    let name = "x".repeat(256);
    log.stat(&name);
    log.open(&name, OFlags::RDONLY, 0);
    log.open(&name, OFlags::CREATE | OFlags::RDWR, 0o644);
    let answer = rustix::fs::mkdir(log.at(&name), Mode::from_raw_mode(0o755));
    log.did("mkdir", answer);
    let answer = rustix::fs::unlink(log.at(&name));
    log.did("unlink", answer);
    log.file("file", b"");
    rename(log, "file", &name, RenameFlags::empty());
    rename(log, &name, "file", RenameFlags::empty());
    let answer = rustix::fs::symlink("x", log.at(&name));
    log.did("symlink", answer);
    let answer = rustix::fs::linkat(CWD, log.at("file"), CWD, log.at(&name), AtFlags::empty());
    log.did("link", answer);
    let longer = "y".repeat(1500);
    log.stat(&longer);
    log.open(&longer, OFlags::CREATE | OFlags::RDWR, 0o644);
}

fn dots(log: &mut Log) {
    log.mkdir("d");
    log.file("d/file", b"content");
    for name in ["d/.", "d/..", "d/../d/file", "d//file", "./d/./file", "d/file/..", "d/file/."] {
        log.stat(name);
    }
    let answer = rustix::fs::mkdir(log.at("d/."), Mode::from_raw_mode(0o755));
    log.did("mkdir d/.", answer);
    let answer = rustix::fs::mkdir(log.at("d/.."), Mode::from_raw_mode(0o755));
    log.did("mkdir d/..", answer);
}

fn listing(log: &mut Log) {
    log.list("");
    for index in 0..400 {
        log.file(&format!("name-{index:03}"), b"");
    }
    log.mkdir("d");
    rustix::fs::symlink("x", log.at("s")).expect("symlink");
    log.list("");
    for index in (0..400).step_by(3) {
        rustix::fs::unlink(log.at(&format!("name-{index:03}"))).expect("unlink");
    }
    log.list("");
    log.list("d");
    log.list("name-001");
    log.list("missing");
    let directory = rustix::fs::open(log.at(""), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("open");
    let mut dir = rustix::fs::Dir::read_from(&directory).expect("opendir");
    let first = (&mut dir).count();
    dir.rewind();
    log.say(format!("again after rewind: {}", first == (&mut dir).count()));
}

fn directory_times(log: &mut Log) {
    log.mkdir("d");
    let mark = log.mark("d");
    log.file("d/a", b"");
    log.moved("create", "d", mark);
    let mark = log.mark("d");
    rename(log, "d/a", "d/b", RenameFlags::empty());
    log.moved("rename", "d", mark);
    let mark = log.mark("d");
    rustix::fs::linkat(CWD, log.at("d/b"), CWD, log.at("d/c"), AtFlags::empty()).expect("link");
    log.moved("link", "d", mark);
    let (of_file, mark) = (log.mark("d/c"), log.mark("d"));
    rustix::fs::unlink(log.at("d/b")).expect("unlink");
    log.moved("unlink", "d", mark);
    log.moved("unlink, other name", "d/c", of_file);
    let mark = log.mark("d");
    log.mkdir("d/inner");
    log.moved("mkdir", "d", mark);
    let mark = log.mark("d");
    rustix::fs::rmdir(log.at("d/inner")).expect("rmdir");
    log.moved("rmdir", "d", mark);
    let mark = log.mark("d");
    log.list("d");
    log.stat("d/c");
    log.moved("looking", "d", mark);
}

fn umask(log: &mut Log) {
    // The umask belongs to the process, and tests run as threads: a child has its own.
    let script = "umask 027; : > file; mkdir directory; mkfifo fifo; umask 777; : > closed; stat -c '%n %a' file directory fifo closed";
    let output = std::process::Command::new("sh").arg("-c").arg(script).current_dir(log.at("")).output().expect("sh");
    log.say(String::from_utf8_lossy(&output.stdout).into_owned());
}
