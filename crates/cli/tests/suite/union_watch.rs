//! Branches on one file system share a watch: writes through the union are reported for no branch,
//! and all other changes that could make the union stale are.

use crate::mounting::status::Status;
use crate::mounting::unions::{branches, told};
use crate::mounting::{Bind, Fixture, as_root, eventually, needs, sh};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Two writable branches over the source, and a third branch.
fn three() -> (Fixture, [PathBuf; 2]) {
    let mut fixture = Fixture::bare();
    fs::create_dir_all(fixture.below("lower/below")).unwrap();
    fs::write(fixture.below("lower/below/original"), "old").unwrap();
    let (upper, second) = (fixture.directory("upper"), fixture.directory("second"));
    let list = branches(&[(&upper, "rw"), (&second, "rw"), (&fixture.below("lower"), "ro")]);
    let mountpoint = fixture.mountpoint.clone();
    fixture.start(&["union", "-o", "udba=notify"], &list, &mountpoint);
    (fixture, [upper, second])
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// Opened for writing through the mount, with something written.
fn written(path: &Path, length: usize) -> File {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&vec![b'w'; length], 0).unwrap();
    file
}

/// How many threads of the mount's process have that name.
fn threads(mountpoint: &Path, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", Status::of(mountpoint).number("pid"))).unwrap();
    tasks
        .flatten()
        .filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name))
        .count()
}

#[test]
fn one_watch_hears_for_all_branches_and_goes_with_the_last() {
    needs!(as_root());
    let (fixture, [upper, second]) = three();
    assert_eq!(threads(&fixture.mountpoint, "nacre-watch"), 1);
    let late = fixture.directory("late");
    told([OsString::from("add"), fixture.mountpoint.clone().into(), late.clone().into()]);
    assert_eq!(threads(&fixture.mountpoint, "nacre-watch"), 1);
    // The first branch is removed, the others still receive events.
    told([OsString::from("del"), fixture.mountpoint.clone().into(), upper.into()]);
    for branch in [&second, &late, &fixture.below("lower")] {
        assert!(!fixture.at("new").exists());
        fs::write(branch.join("new"), "1").unwrap();
        eventually("the new file is seen", || fixture.at("new").exists());
        fs::write(branch.join("new"), "22").unwrap();
        eventually("the new size is seen", || size(&fixture.at("new")) == 2);
        fs::remove_file(branch.join("new")).unwrap();
        eventually("the end is seen", || !fixture.at("new").exists());
    }
}

#[test]
fn others_are_heard_while_the_file_is_written_through_the_union() {
    needs!(as_root());
    let (fixture, branches) = three();
    for (branch, name) in branches.iter().zip(["first", "second"]) {
        fs::write(branch.join(name), "1").unwrap();
        eventually("the file is seen", || fixture.at(name).exists());
        let file = written(&fixture.at(name), 100);
        assert_eq!(size(&fixture.at(name)), 100);
        sh(branch, &format!("printf theirs >> {name}"));
        eventually("what others append is seen", || size(&fixture.at(name)) == 106);
        file.write_all_at(b"more", 106).unwrap();
        assert_eq!(size(&fixture.at(name)), 110);
        drop(file);
        assert_eq!(fs::read(fixture.at(name)).unwrap().len(), 110);
    }
}

#[test]
fn a_file_with_a_name_on_each_of_two_branches_is_never_shown_old() {
    needs!(as_root());
    let (fixture, [upper, second]) = three();
    // It goes to the next branch above. A copy carries the number of its origin, while a link of it
    // on another branch has a number of its own: two files to the kernel.
    fs::write(fixture.at("below/original"), "copied").unwrap();
    assert_eq!(fs::read(second.join("below/original")).unwrap(), b"copied");
    fs::hard_link(second.join("below/original"), upper.join("linked")).unwrap();
    eventually("the link is seen", || fixture.at("linked").exists());
    assert_eq!(size(&fixture.at("linked")), 6);
    for (one, other, length) in [("below/original", "linked", 1000), ("linked", "below/original", 2000)] {
        let file = written(&fixture.at(one), length);
        eventually("what is written by one name is seen by the other", || size(&fixture.at(other)) == length as u64);
        drop(file);
        sh(&upper, "printf theirs >> linked");
        eventually("what others write is seen by both", || {
            size(&fixture.at(one)) == length as u64 + 6 && size(&fixture.at(other)) == length as u64 + 6
        });
    }
}

#[test]
fn what_is_bound_into_another_branch_is_never_shown_old() {
    needs!(as_root());
    let (mut fixture, [_, second]) = three();
    fs::write(fixture.at("below/original"), "copied").unwrap();
    // Marks do not count on the third branch, so that the copy has a number of its own there.
    let bound = fixture.below("lower/bound");
    fs::create_dir(&bound).unwrap();
    let early = written(&fixture.at("below/original"), 10);
    let bind = Bind::new(&second.join("below"), &bound);
    eventually("the bound directory is seen", || fixture.at("bound/original").exists());
    assert_eq!(size(&fixture.at("bound/original")), 10);
    early.write_all_at(&[b'e'; 20], 0).unwrap();
    eventually("the file that has been open since before is heard", || size(&fixture.at("bound/original")) == 20);
    let late = written(&fixture.at("below/original"), 30);
    eventually("and one that is opened now", || size(&fixture.at("bound/original")) == 30);
    drop((early, late));
    fixture.unmount();
    drop(bind);
}
