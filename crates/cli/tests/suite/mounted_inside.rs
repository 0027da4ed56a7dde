//! File systems that are mounted inside the source of a mirror, a union or a cage come, go and are
//! replaced as they do natively.

use crate::mounting::unions::over;
use crate::mounting::{Fixture, as_root, eventually, is_mounted, needs, run, sh, text};
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
