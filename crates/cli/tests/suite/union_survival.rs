//! Unions after a failover or an upgrade: directories that others rename in the branches meanwhile.

use crate::{mounting::as_root, surviving::Guarded};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use std::{
    fs::{self, File},
    path::Path,
};

/// A directory with a file that identifies it, and a process in it.
struct Used {
    expected: &'static str,
    directory: File,
}

impl Used {
    /// Opens a directory of the mount, which has its file already.
    fn open(guarded: &Guarded, expected: &'static str) -> Used {
        let directory = File::open(guarded.at(expected)).unwrap();
        let used = Used { expected, directory };
        used.is_found("before");
        used
    }

    /// Its user finds its file, and makes a directory in it.
    fn is_found(&self, when: &str) {
        let file = rustix::fs::openat(&self.directory, "content", OFlags::RDONLY, Mode::empty());
        let content = file.map(|file| std::io::read_to_string(File::from(file)).unwrap());
        assert_eq!(content.as_deref(), Ok(self.expected), "{when}");
        let made = rustix::fs::mkdirat(&self.directory, format!("made {when}"), Mode::RWXU);
        assert_eq!(made, Ok(()), "{}, {when}", self.expected);
    }
}

/// Makes directories, each with a file that has the directory's name in it.
fn make_all(branch: &Path, names: &[&str]) {
    for name in names {
        fs::create_dir_all(branch.join(name)).unwrap();
        fs::write(branch.join(name).join("content"), name).unwrap();
    }
}

fn exchange(branch: &Path, one: &str, other: &str) {
    rustix::fs::renameat_with(CWD, branch.join(one), CWD, branch.join(other), RenameFlags::EXCHANGE).unwrap();
}

/// Renames and exchanges directories in both branches three times; each time another process takes over before they are used.
fn directories_that_others_rename_are_found(options: &[&str]) {
    let own = ["top/busy/inner", "one", "two"];
    let lower = ["below/busy/inner", "three", "four"];
    let mut guarded = Guarded::union(options, |branch| {
        make_all(branch, &lower);
        fs::create_dir(branch.join("elsewhere")).unwrap();
    });
    make_all(&guarded.fixture.mountpoint, &own);
    let branches = [guarded.fixture.source.clone(), guarded.fixture.scratch.path().join("lower")];
    fs::create_dir_all(branches[0].join("elsewhere")).unwrap();
    let used = own.map(|name| Used::open(&guarded, name));
    // Of the branch below, they are only read: what is made in them would make them directories of both.
    let read = lower.map(|name| File::open(guarded.at(name)).unwrap());
    let content = |directory: &File| {
        let file = rustix::fs::openat(directory, "content", OFlags::RDONLY, Mode::empty());
        file.map(|file| std::io::read_to_string(File::from(file)).unwrap())
    };
    let moves = [
        [("top/busy", "elsewhere/own"), ("below/busy", "elsewhere/lower")],
        [("elsewhere/own", "top/again"), ("elsewhere/lower", "below/again")],
        [("top/again", "elsewhere/last"), ("below/again", "below/last")],
    ];
    for (round, moved) in moves.iter().enumerate() {
        for (branch, (from, to)) in branches.iter().zip(moved) {
            fs::rename(branch.join(from), branch.join(to)).unwrap();
        }
        exchange(&branches[0], "one", "two");
        exchange(&branches[1], "three", "four");
        let upgraded = round == 1;
        if upgraded {
            guarded.upgrade()
        } else {
            guarded.kill()
        }
        let when = format!("round {round}");
        used.iter().for_each(|used| used.is_found(&when));
        for (directory, expected) in read.iter().zip(lower) {
            assert_eq!(content(directory).as_deref(), Ok(expected), "{when}");
        }
        assert!(branches[0].join(moved[0].1).join("inner").join(format!("made {when}")).is_dir(), "{when}");
    }
    drop((used, read));
    guarded.fixture.unmount();
}

#[test]
fn directories_that_others_rename_are_found_in_passthrough() {
    if as_root() {
        directories_that_others_rename_are_found(&[]);
    }
}

#[test]
fn directories_that_others_rename_are_found_through_the_process() {
    if as_root() {
        directories_that_others_rename_are_found(crate::mounting::without_passthrough());
    }
}
