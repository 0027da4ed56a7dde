//! POSIX ACLs of the source: enforced by the kernel in the mount, inherited, and translated with
//! the owners.

use crate::mounting::{Fixture, as_root, needs, sh, sh_as};
use std::fs;
use std::path::Path;

fn has_tools() -> bool {
    std::process::Command::new("setfacl").arg("--version").output().is_ok()
        || crate::mounting::skip("acl", "setfacl is not installed")
}

fn private(source: &Path) {
    fs::write(source.join("file"), "content").unwrap();
    sh(source, "chmod 600 file && setfacl -m u:2000:r,g:3000:rw file");
}

#[test]
fn they_are_enforced() {
    needs!(as_root() && has_tools());
    for options in [&[][..], crate::mounting::without_passthrough(), &["--coherence=revalidate"]] {
        let fixture = Fixture::mirror_of(options, private);
        for (uid, gid, groups, script, wanted) in [
            (2000, 2000, "", "cat file >/dev/null", true),
            (2000, 2000, "", "echo x >> file", false),
            (2001, 2001, "", "cat file >/dev/null", false),
            (2001, 2001, "3000", "echo x >> file", true),
            (2001, 3000, "", "cat file >/dev/null", true),
        ] {
            let (above, said) = sh_as(&fixture.mountpoint, uid, gid, groups, script);
            let (below, _) = sh_as(&fixture.source, uid, gid, groups, script);
            assert_eq!(below == 0, wanted, "the source itself: {uid} {script}");
            assert_eq!(above == 0, wanted, "{options:?}: {uid}:{gid} +{groups} {script}: {said}");
        }
    }
}

#[test]
fn they_are_shown_set_and_removed() {
    needs!(as_root() && has_tools());
    let fixture = Fixture::mirror_of(&[], private);
    let show = |directory: &Path| sh(directory, "getfacl -n -c -p file");
    assert_eq!(show(&fixture.mountpoint), show(&fixture.source));
    sh(&fixture.mountpoint, "setfacl -m u:2001:rwx,m::rwx file");
    assert_eq!(show(&fixture.mountpoint), show(&fixture.source));
    assert!(show(&fixture.source).contains("user:2001:rwx"));
    assert_eq!(sh_as(&fixture.mountpoint, 2001, 2001, "", "cat file").0, 0);
    sh(&fixture.mountpoint, "chmod 640 file");
    assert_eq!(show(&fixture.mountpoint), show(&fixture.source));
    sh(&fixture.mountpoint, "setfacl -b file");
    assert_eq!(show(&fixture.mountpoint), show(&fixture.source));
    assert!(!show(&fixture.source).contains("2001"));
    assert_ne!(sh_as(&fixture.mountpoint, 2001, 2001, "", "cat file && false").0, 0);
}

#[test]
fn they_are_inherited() {
    needs!(as_root() && has_tools());
    let fixture = Fixture::mirror(&[]);
    let native = fixture.directory("native");
    let script = "chmod 777 . && setfacl -d -m u:2000:rwx,g:3000:rx,o::- . && umask 022 && touch f && mkdir d && touch d/f && mkfifo d/p \
                  && sh -c 'umask 0; touch open' && getfacl -n -p -R . | grep -v '^# file'";
    assert_eq!(sh(&fixture.mountpoint, script), sh(&native, script));
    let (code, said) = sh_as(&fixture.mountpoint, 2001, 2001, "", "touch mine && getfacl -n -c mine");
    let (native_code, wanted) = sh_as(&native, 2001, 2001, "", "touch mine && getfacl -n -c mine");
    assert_eq!((code, said), (native_code, wanted));
}

#[test]
fn they_are_translated_with_the_owners() {
    needs!(as_root() && has_tools());
    let fixture = Fixture::mirror_of(&["--map=2000/5000:@3000/@6000"], private);
    let shown = sh(&fixture.mountpoint, "getfacl -n -c file");
    assert!(shown.contains("user:5000:r--") && shown.contains("group:6000:rw-"), "{shown}");
    assert_eq!(sh_as(&fixture.mountpoint, 5000, 5000, "", "cat file").0, 0);
    assert_ne!(sh_as(&fixture.mountpoint, 2000, 2000, "", "cat file").0, 0);
    assert_eq!(sh_as(&fixture.mountpoint, 2001, 2001, "6000", "echo x >> file").0, 0);
    sh(&fixture.mountpoint, "setfacl -m u:5000:rw file");
    let below = sh(&fixture.source, "getfacl -n -c file");
    assert!(below.contains("user:2000:rw-") && !below.contains("5000"), "{below}");
}

#[test]
fn they_can_be_left_alone() {
    needs!(as_root() && has_tools());
    let fixture = Fixture::mirror_of(&["--acl=off"], private);
    assert_ne!(sh_as(&fixture.mountpoint, 2000, 2000, "", "cat file").0, 0);
}
