//! File systems that are mounted inside the source of a mirror, a union or a cage come, go and are
//! replaced as they do natively.

use crate::mounting::status::Status;
use crate::mounting::unions::{branches, over};
use crate::mounting::{Fixture, as_root, eventually, images, is_mounted, needs, run, sh, skip, text};
use rustix::process::Signal;
use std::fs;
use std::path::Path;

/// A file system of its own at `in`, with a tree and this name in it.
fn mount_inside(source: &Path, name: &str) {
    sh(
        source,
        &format!("mkdir -p in && mount -t tmpfs inside in && mkdir -p in/a/b/c && touch in/a/b/c/file in/{name}"),
    );
}

fn unmount(place: &Path) -> Result<(), String> {
    let output = run("umount", [place]);
    if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
}

fn comes_and_goes(fixture: &Fixture) {
    let (inside, shown) = (fixture.below("in"), fixture.at("in"));
    for round in ["one", "two", "three"] {
        mount_inside(&fixture.source, round);
        eventually("what is mounted is shown", || shown.join(round).exists());
        sh(&fixture.mountpoint, "ls -lR in > ../listed && grep -q file ../listed");
        unmount(&inside).unwrap();
        eventually("what was below is shown", || fs::read_dir(&shown).is_ok_and(|names| names.count() == 0));
    }
    // Replaced before anybody has looked.
    mount_inside(&fixture.source, "four");
    eventually("what is mounted is shown", || shown.join("four").exists());
    unmount(&inside).unwrap();
    mount_inside(&fixture.source, "five");
    eventually("the other one is shown", || shown.join("five").exists() && !shown.join("four").exists());
    assert!(fs::remove_dir(&shown).is_err(), "something is mounted on it");
    unmount(&inside).unwrap();
}

/// Reads and writes files there through the mount, and unmounts; another one is shown then.
fn is_read_and_written(fixture: &Fixture) {
    let (inside, shown) = (fixture.below("in"), fixture.at("in"));
    for round in ["one", "two"] {
        mount_inside(&fixture.source, round);
        ["content", "untouched"].iter().for_each(|name| fs::write(inside.join(name), round).unwrap());
        eventually("what is mounted is shown", || shown.join(round).exists());
        assert_eq!(fs::read_to_string(shown.join("content")).unwrap(), round);
        fs::write(shown.join("a/b/written"), round).unwrap();
        let file = fs::File::options().append(true).open(shown.join("content")).unwrap();
        std::io::Write::write_all(&mut &file, b" and more").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(shown.join("content")).unwrap(), format!("{round} and more"));
        assert_eq!(fs::read_to_string(shown.join("untouched")).unwrap(), round);
        // The kernel says later that a file was closed.
        eventually("the mount is not in use", || unmount(&inside).is_ok());
        eventually("what was below is shown", || fs::read_dir(&shown).is_ok_and(|names| names.count() == 0));
    }
}

#[test]
fn files_that_were_used_keep_no_file_system_in_the_source_of_a_mirror_busy() {
    needs!(as_root());
    for options in [&[][..], &["--passthrough=off"]] {
        let mut fixture = Fixture::mirror_of(options, |source| fs::create_dir(source.join("in")).unwrap());
        is_read_and_written(&fixture);
        fixture.unmount();
    }
}

#[test]
fn files_that_were_used_keep_no_file_system_in_a_branch_of_a_union_busy() {
    needs!(as_root());
    for (mode, other) in [("rw", "ro"), ("ro", "rw")] {
        let mut fixture = Fixture::bare();
        fs::create_dir(fixture.below("in")).unwrap();
        let beside = fixture.directory("beside");
        let list = branches(&[(&beside, other), (&fixture.source, mode)]);
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&["union"], &list, &mountpoint);
        if mode == "rw" {
            is_read_and_written(&fixture);
        } else {
            // Written files are copied to the other branch, where they stay.
            mount_inside(&fixture.source, "name");
            fs::write(fixture.below("in/content"), "content").unwrap();
            eventually("what is mounted is shown", || fixture.at("in/name").exists());
            assert_eq!(fs::read_to_string(fixture.at("in/content")).unwrap(), "content");
            fs::write(fixture.at("in/name"), "written").unwrap();
            eventually("the mount is not in use", || unmount(&fixture.below("in")).is_ok());
        }
        fixture.unmount();
    }
}

#[test]
fn files_that_were_used_keep_no_file_system_in_a_cage_busy() {
    needs!(as_root());
    for options in [&["--size=1G"][..], &["--size=4T"], &["--size=1G", "--writes=through"]] {
        let mut fixture = Fixture::cage_of(options, |source| fs::create_dir(source.join("in")).unwrap());
        is_read_and_written(&fixture);
        fixture.unmount();
    }
}

/// Where something is mounted before the cage is, files are closed with their last user.
#[test]
fn a_cage_over_other_file_systems_is_asked_when_files_are_opened() {
    needs!(as_root());
    let mut fixture = Fixture::cage_of(&["--size=4T"], |source| mount_inside(source, "name"));
    let why = Status::of(&fixture.mountpoint).asks_at_open().map(str::to_owned);
    assert_eq!(why.as_deref(), Some("file systems are mounted inside the source"));
    fs::write(fixture.at("in/name"), "written").unwrap();
    assert_eq!(fs::read_to_string(fixture.at("in/name")).unwrap(), "written");
    eventually("the mount is not in use", || unmount(&fixture.below("in")).is_ok());
    fixture.unmount();
}

#[test]
fn a_file_system_in_the_source_of_a_mirror_comes_and_goes() {
    needs!(as_root());
    for options in [&[][..], &["--coherence=revalidate"]] {
        let mut fixture = Fixture::mirror_of(options, |source| fs::create_dir(source.join("in")).unwrap());
        comes_and_goes(&fixture);
        fixture.unmount();
    }
}

#[test]
fn an_open_file_keeps_a_file_system_in_the_source_busy_and_no_closed_one_does() {
    needs!(as_root());
    let mut fixture = Fixture::mirror_of(&["--passthrough=off"], |source| fs::create_dir(source.join("in")).unwrap());
    comes_and_goes(&fixture);
    mount_inside(&fixture.source, "name");
    let inside = fixture.below("in");
    fs::write(inside.join("a/content"), "content").unwrap();
    let file = fs::File::open(fixture.at("in/a/content")).unwrap();
    assert!(unmount(&inside).unwrap_err().contains("busy"));
    assert_eq!(std::io::read_to_string(&file).unwrap(), "content");
    drop(file);
    // The kernel says later that it was closed.
    eventually("the mount is not in use", || unmount(&inside).is_ok());
    fixture.unmount();
}

#[test]
fn a_file_system_in_a_branch_of_a_union_comes_and_goes() {
    needs!(as_root());
    let (mut fixture, _upper) = over(&[], |source| fs::create_dir(source.join("in")).unwrap());
    comes_and_goes(&fixture);
    fixture.unmount();
}

#[test]
fn a_file_system_in_a_cage_comes_and_goes() {
    needs!(as_root());
    let mut fixture = Fixture::cage_of(&["--size=1G"], |source| fs::create_dir(source.join("in")).unwrap());
    comes_and_goes(&fixture);
    fixture.unmount();
}

#[test]
fn a_fuse_mount_in_the_source_that_died_is_shown_again_when_it_is_back() {
    needs!(as_root());
    for options in [&[][..], &["--coherence=revalidate"]] {
        let mut fixture = Fixture::mirror_of(options, |source| fs::create_dir(source.join("in")).unwrap());
        let other = fixture.directory("other");
        fs::create_dir_all(other.join("deep/below")).unwrap();
        fs::write(other.join("deep/below/file"), "content").unwrap();
        let (inside, shown) = (fixture.below("in"), fixture.at("in/deep/below/file"));
        let mut inner = Fixture::bare();
        inner.mountpoint = inside.clone();
        for _ in 0..2 {
            inner.start(&["mirror"], other.as_ref(), &inside);
            eventually("it is shown", || fs::read(&shown).is_ok_and(|content| content == b"content"));
            sh(&fixture.mountpoint, "ls -lR in > /dev/null");
            inner.signal(Signal::KILL);
            inner.ended();
            assert!(fs::read(&shown).is_err());
            unmount(&inside).unwrap();
            assert!(!is_mounted(&inside));
        }
        fixture.unmount();
    }
}

/// Btrfs gives a new snapshot the device number of a deleted one, and its files have the inode numbers
/// and birth times of the same files.
#[test]
fn a_snapshot_that_replaces_a_deleted_one_is_shown_and_written() {
    needs!(as_root());
    if nacre_sys::kernel_version::kernel_version() < (6, 10) {
        skip("mounted_inside", "statx(2) does not name subvolumes before Linux 6.10");
        return;
    }
    let outer = Fixture::bare();
    let (image, host) = (outer.scratch.path().join("image"), outer.directory("host"));
    if !images::mounted("btrfs", &image, &host) {
        return;
    }
    sh(&host, "btrfs subvolume create vol; echo old > vol/file; echo old > vol/other; mkdir vol/d lower");
    let replaced = |fixture: &Fixture| {
        let snapshot = "btrfs subvolume snapshot ../../vol latest";
        sh(&fixture.source, &format!("echo old > ../../vol/file; {snapshot}"));
        let shown = |name: &str| fs::read_to_string(fixture.at("latest").join(name)).unwrap_or_default();
        eventually("the snapshot is shown", || shown("file") == "old\n" && shown("other") == "old\n");
        let held = fs::File::open(fixture.at("latest/file")).unwrap();
        sh(&fixture.source, &format!("btrfs subvolume delete latest; echo new > ../../vol/file; {snapshot}"));
        eventually("the new snapshot is shown", || shown("file") == "new\n");
        sh(&fixture.mountpoint, "echo more >> latest/file; echo more >> latest/other; echo made > latest/d/made; sync");
        let below = sh(&fixture.source, "cat latest/file latest/other latest/d/made");
        assert_eq!(below, "new\nmore\nold\nmore\nmade\n");
        drop(held);
        sh(&fixture.source, "btrfs subvolume delete latest");
    };
    let lower = host.join("lower");
    for words in [&["mirror"][..], &["mirror", "--passthrough=off"], &["union"]] {
        let mut fixture = Fixture::bare_in(tempfile::tempdir_in(&host).unwrap());
        let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
        let list = branches(&[(&source, "rw"), (&lower, "ro")]);
        let what = if words[0] == "union" { list.as_os_str() } else { source.as_os_str() };
        fixture.start(words, what, &mountpoint);
        replaced(&fixture);
    }
    unmount(&host).unwrap();
}
