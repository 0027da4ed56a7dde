//! Resent requests after they were begun, carried out or answered, on layers of every kind that can survive its
//! process; nodes and open files that are found again.

use super::lives::{Death, Lives, number};
use fusewire::{Handler, Op, abi};
use nacre_vfs::Errno;
use std::os::unix::{fs::PermissionsExt, process::CommandExt};

/// The layers of each test.
const LAYERS: [&str; 5] = [
    "host:SOURCE",
    "host:SOURCE | remap:perms=a+r | trace",
    "host:SOURCE | cage:size=1G,writes=through",
    "union:SOURCE=rw:LOWER=ro",
    "union:SOURCE=rw:LOWER=ro | remap:perms=a+r",
];

fn over_all(test: impl Fn(Lives)) {
    for line in LAYERS {
        println!("over {line}");
        test(Lives::over(line, |_| ()));
    }
}

const CREATE: u32 = 0o102;
const EXCL: u32 = 0o200;

fn makers() -> Vec<(u64, Op<'static>)> {
    vec![
        (10, Op::Mkdir { name: b"directory", mode: 0o755, umask: 0 }),
        (12, Op::Mknod { name: b"fifo", mode: 0o010_644, rdev: 0, umask: 0 }),
        (14, Op::Symlink { name: b"link", target: b"target" }),
        (16, Op::Create { name: b"file", flags: CREATE | EXCL, mode: 0o644, umask: 0, open_flags: 0 }),
    ]
}

#[test]
fn what_was_answered_is_answered_so_again() {
    over_all(|mut lives| {
        for (unique, op) in makers() {
            lives.again(unique, 1, op).unwrap();
        }
        let rename = Op::Rename { name: b"file", new_dir: 1, new_name: b"moved", flags: 0 };
        lives.again(20, 1, rename).unwrap();
        lives.again(22, 1, Op::Rename { name: b"moved", new_dir: 1, new_name: b"fifo", flags: 2 }).unwrap();
        lives.again(24, 1, Op::Unlink { name: b"link" }).unwrap();
        lives.again(26, 1, Op::Rmdir { name: b"directory" }).unwrap();
        // A refusal is the same refusal, whatever has changed.
        assert_eq!(lives.ask(30, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
        lives.die();
        std::fs::write(lives.source.join("missing"), "").unwrap();
        assert_eq!(lives.ask(30 | abi::UNIQUE_RESEND, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
        assert!(lives.source.join("missing").exists());
    });
}

/// A request that was only begun is refused where it would have been refused at first.
#[test]
fn attributes_that_were_there_before_are_not_the_requests_own() {
    over_all(|mut lives| {
        let set = Op::Setxattr { name: b"user.a", value: b"1", flags: 1, setxattr_flags: 0 };
        let remove = Op::Removexattr { name: b"user.a" };
        assert_eq!(lives.carry_out(Death::Begun, 1, remove), Err(Errno::ENODATA.raw()));
        lives.carry_out(Death::CarriedOut, 1, set).unwrap();
        assert_eq!(lives.carry_out(Death::Begun, 1, set), Err(Errno::EEXIST.raw()));
        lives.carry_out(Death::CarriedOut, 1, remove).unwrap();
        lives.carry_out(Death::Begun, 1, set).unwrap();
    });
}

#[test]
fn what_was_carried_out_but_not_answered_is_not_done_twice() {
    over_all(|mut lives| {
        let source = lives.source.clone();
        for (unique, op) in makers() {
            let body = lives.finish(unique, 1, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
            assert!(body.len() >= 128, "{op:?}");
        }
        for (unique, op) in makers() {
            assert_eq!(lives.ask(unique + 100, 1, op), Err(Errno::EEXIST.raw()), "{op:?}: it was there before");
        }
        let id =
            |name: &str| std::os::unix::fs::MetadataExt::ino(&std::fs::symlink_metadata(source.join(name)).unwrap());
        let (file, fifo) = (id("file"), id("fifo"));
        lives.finish(40, 1, Op::Rename { name: b"file", new_dir: 1, new_name: b"moved", flags: 0 }).unwrap();
        assert_eq!(id("moved"), file);
        lives.finish(42, 1, Op::Rename { name: b"moved", new_dir: 1, new_name: b"fifo", flags: 2 }).unwrap();
        assert_eq!((id("fifo"), id("moved")), (file, fifo), "an exchange is not taken back");
        lives.finish(44, 1, Op::Unlink { name: b"link" }).unwrap();
        lives.finish(46, 1, Op::Rmdir { name: b"directory" }).unwrap();
        assert!(!source.join("link").exists() && !source.join("directory").exists());
        // It does not remove a file that others created there since.
        let unlink = Op::Unlink { name: b"moved" };
        lives.finish(48, 1, unlink).unwrap();
        std::fs::write(source.join("moved"), "new").unwrap();
        lives.die();
        assert_eq!(lives.ask(48 | abi::UNIQUE_RESEND, 1, unlink), Ok(Vec::new()));
        assert!(source.join("moved").exists());
    });
}

#[test]
fn what_was_only_begun_is_carried_out() {
    over_all(|mut lives| {
        let source = lives.source.clone();
        std::fs::write(source.join("old"), "").unwrap();
        for (unique, op) in makers() {
            lives.begin(unique, 1, op);
            lives.die();
            lives.ask(unique | abi::UNIQUE_RESEND, 1, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
        }
        let rename = Op::Rename { name: b"old", new_dir: 1, new_name: b"new", flags: 0 };
        lives.begin(50, 1, rename);
        lives.die();
        lives.ask(50 | abi::UNIQUE_RESEND, 1, rename).unwrap();
        assert!(source.join("new").exists() && !source.join("old").exists());
    });
}

#[test]
fn nodes_and_open_files_are_found_again() {
    over_all(|mut lives| {
        let directory = number(&lives.ask(2, 1, Op::Mkdir { name: b"d", mode: 0o755, umask: 0 }).unwrap(), 0);
        let create = Op::Create { name: b"f", flags: CREATE, mode: 0o644, umask: 0, open_flags: 0 };
        let made = lives.ask(4, directory, create).unwrap();
        let (file, fh) = (number(&made, 0), number(&made, 128));
        let write =
            |data: &'static [u8], offset| Op::Write { fh, offset, data, flags: 2, write_flags: 0, lock_owner: None };
        lives.ask(6, file, write(b"before", 0)).unwrap();
        lives.die();
        assert_eq!(lives.ask(8, directory, Op::Lookup { name: b"f" }).map(|body| number(&body, 0)), Ok(file));
        lives.ask(10, file, write(b" after", 6)).unwrap();
        assert_eq!(std::fs::read(lives.source.join("d/f")).unwrap(), b"before after");
        // Nothing but the open file leads to it.
        lives.ask(12, directory, Op::Unlink { name: b"f" }).unwrap();
        lives.die();
        lives.ask(14, file, write(b"nowhere", 0)).unwrap();
        let read = Op::Read { fh, offset: 0, size: 100, flags: 2, lock_owner: None, read_flags: 0 };
        assert_eq!(lives.ask(16, file, read), Ok(b"nowhereafter".to_vec()));
        lives.ask(18, file, Op::Getattr { fh: Some(fh) }).unwrap();
        // Two lookups were counted, and with the last one it is forgotten.
        lives.ask(20, file, Op::Release { fh, flags: 2, release_flags: 0, lock_owner: None }).unwrap();
        lives.die();
        assert!(lives.ask(22, file, read).is_err());
        lives.door.forget(file, 2);
        assert!(!lives.door.inodes.is_known(file));
        assert!(lives.door.inodes.is_known(directory));
    });
}

#[test]
fn an_append_that_was_cut_short_is_completed() {
    over_all(|mut lives| {
        let create = Op::Create { name: b"log", flags: CREATE | 0o2000, mode: 0o644, umask: 0, open_flags: 0 };
        let made = lives.ask(2, 1, create).unwrap();
        let (file, fh) = (number(&made, 0), number(&made, 128));
        let append =
            |data: &'static [u8]| Op::Write { fh, offset: 0, data, flags: 0o2002, write_flags: 0, lock_owner: None };
        lives.ask(4, file, append(b"first\n")).unwrap();
        let path = lives.source.join("log");
        for (unique, written) in [(6, 0), (8, 3), (10, 7)] {
            let before = std::fs::read(&path).unwrap();
            let op = append(b"second\n");
            lives.begin(unique, file, op);
            std::fs::write(&path, [before.as_slice(), &b"second\n"[..written]].concat()).unwrap();
            lives.die();
            let answer = lives.ask(unique | abi::UNIQUE_RESEND, file, op).unwrap();
            assert_eq!(answer.first(), Some(&7), "all of it is said to be written");
            assert_eq!(std::fs::read(&path).unwrap(), [before.as_slice(), b"second\n"].concat());
        }
    });
}

/// A log of mode 0200, in a mount of an ordinary user, whose process may not read it either.
#[test]
fn an_append_to_what_may_not_be_read_is_completed() {
    const USER: u32 = 12_345;
    let name = "survival::tests::repeated::an_append_to_what_may_not_be_read_is_completed";
    if rustix::process::geteuid().is_root() {
        let itself = std::fs::read("/proc/self/exe").unwrap();
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("test");
        std::fs::write(&program, itself).unwrap();
        for path in [place.path(), &program] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut command = std::process::Command::new(&program);
        let status = command.args(["--exact", name]).current_dir("/").uid(USER).gid(USER).status().unwrap();
        assert!(status.success());
        return;
    }
    let mut lives = Lives::over("host:SOURCE", |_| ());
    let create = Op::Create { name: b"log", flags: 0o2101, mode: 0o200, umask: 0, open_flags: 0 };
    let made = lives.ask(2, 1, create).unwrap();
    let (file, fh) = (number(&made, 0), number(&made, 128));
    let path = lives.source.join("log");
    let changed = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    let op = Op::Write { fh, offset: 0, data: b"second\n", flags: 0o2001, write_flags: 0, lock_owner: None };
    for (unique, written) in [(6, 0), (8, 3), (10, 7)] {
        lives.begin(unique, file, op);
        changed(0o600);
        let before = std::fs::read(&path).unwrap();
        std::fs::write(&path, [before.as_slice(), &b"second\n"[..written]].concat()).unwrap();
        changed(0o200);
        lives.die();
        let answer = lives.ask(unique | abi::UNIQUE_RESEND, file, op).unwrap();
        assert_eq!(answer.first(), Some(&7), "all of it is said to be written");
        changed(0o600);
        assert_eq!(std::fs::read(&path).unwrap(), [before.as_slice(), b"second\n"].concat());
        changed(0o200);
    }
}

#[test]
fn a_file_without_a_name_gets_one() {
    over_all(|mut lives| {
        let tmpfile = Op::Tmpfile { name: b"#1", flags: 2, mode: 0o600, umask: 0, open_flags: 0 };
        let made = lives.again(2, 1, tmpfile).unwrap();
        let (nodeid, fh) = (number(&made, 0), number(&made, 128));
        let write = Op::Write { fh, offset: 0, data: b"nameless", flags: 2, write_flags: 0, lock_owner: None };
        lives.again(4, nodeid, write).unwrap();
        lives.finish(6, 1, Op::Link { nodeid, name: b"named" }).unwrap();
        assert_eq!(std::fs::read(lives.source.join("named")).unwrap(), b"nameless");
        lives.again(8, 1, Op::Unlink { name: b"named" }).unwrap();
        assert_eq!(lives.ask(10, 1, Op::Link { nodeid, name: b"again" }), Err(Errno::ENOENT.raw()));
    });
}
