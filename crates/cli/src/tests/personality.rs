//! bindfs' command line as a whole, mount(8)'s, and which of them is read when.

use super::{line, mount, os};
use crate::{
    personality::{self, Personality},
    plan::Plan,
};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, StackSource},
};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
};

fn bindfs(arguments: &[&str]) -> Result<Plan, Failure> {
    personality::bindfs("bindfs", os(arguments))
}

fn mount_program(arguments: &[&str]) -> Result<Plan, Failure> {
    personality::mount_program("mount.fuse.nacre", os(arguments))
}

#[test]
fn the_name_decides() {
    for (argv0, first, expected) in [
        ("/usr/bin/bindfs", Some("/src"), Personality::Bindfs),
        ("bindfs", Some("mirror"), Personality::Bindfs),
        ("/sbin/mount.fuse.nacre", Some("/src"), Personality::MountProgram),
        ("mount.nacre", None, Personality::MountProgram),
        ("nacre", Some("mirror"), Personality::Nacre),
        ("nacre", None, Personality::Nacre),
        ("nacre", Some("/src"), Personality::Bindfs),
        ("nacre", Some("./src"), Personality::Bindfs),
        ("anything", Some("--help"), Personality::Nacre),
    ] {
        let program = personality::program(OsStr::new(argv0));
        assert_eq!(personality::of(&program, first.map(OsStr::new)), expected, "{argv0} {first:?}");
    }
}

#[test]
fn paths_and_options_mix() {
    for arguments in [
        &["-u5", "-p0400", "SRC", "MNT"][..],
        &["SRC", "-u5", "MNT", "-p0400"],
        &["SRC", "MNT", "-u", "5", "-p", "0400"],
        &["-o", "force-user=5", "SRC", "-o", "perms=0400", "MNT"],
        &["SRC", "MNT", "-o", "rw,force-user=5,perms=0400,dev,suid,nodev,nosuid"],
        &["-u5", "-p0400", "--", "SRC", "MNT"],
        &["bindfs#SRC", "MNT", "-o", "force-user=5,perms=0400"],
    ] {
        let plan = mount(bindfs(arguments).unwrap());
        assert_eq!(line(&plan), "host:SRC | remap:force-user=5,perms=0400", "{arguments:?}");
        assert_eq!(plan.mountpoint, Path::new("MNT"));
        assert!(!plan.door.suid && !plan.door.dev && !plan.foreground);
        assert_eq!(plan.program, "bindfs");
    }
}

#[test]
fn a_long_option_takes_its_value_only_after_an_equals_sign() {
    let error = bindfs(&["--force-user", "5", "SRC", "MNT"]).unwrap_err();
    assert_eq!(error.what, "option --force-user needs a value: --force-user=USER");
    assert_eq!(error.code("bindfs"), 1);
    assert_eq!(error.code("nacre"), 2);
    assert_eq!(error.code("mount.fuse.nacre"), 1);
}

#[test]
fn two_paths_no_more_no_less() {
    for (arguments, says) in [
        (&[][..], "SOURCE and MOUNTPOINT are needed"),
        (&["SRC"], "SOURCE and MOUNTPOINT are needed"),
        (&["SRC", ""], "SOURCE and MOUNTPOINT are needed"),
        (&["SRC", "MNT", "MORE"], "too many arguments: \"MORE\""),
        (&["-n", "5", "SRC", "MNT"], "too many arguments: \"MNT\""),
    ] {
        let error = bindfs(arguments).unwrap_err();
        assert_eq!(error.what, says, "{arguments:?}");
    }
    assert_eq!(bindfs(&["-h"]), Ok(Plan::Help));
    assert_eq!(bindfs(&["-V", "SRC"]), Ok(Plan::Version));
    assert_eq!(bindfs(&["--fuse-version"]), Ok(Plan::FuseVersion));
}

#[test]
fn paths_are_bytes() {
    let name = OsStr::from_bytes(b"/s\xff\n");
    let plan = mount(personality::bindfs("bindfs", vec![name.to_owned(), OsString::from("MNT")]).unwrap());
    let StackSource::Spec(spec) = plan.stack else { panic!("a stack") };
    let Some(nacre_stack::spec::LayerSpec::Host(host)) = spec.layers.first() else { panic!("a host layer") };
    assert_eq!(host.source.as_os_str(), name);
}

#[test]
fn a_plain_mirror_is_the_directory_under_rules_yet_to_come() {
    assert_eq!(line(&mount(bindfs(&["/a", "/b"]).unwrap())), "host:/a | remap");
    assert_eq!(
        line(&mount(bindfs(&["/a", "/b", "--read-rate=1M"]).unwrap())),
        "host:/a | remap | throttle:read-rate=1M"
    );
    assert_eq!(line(&mount(bindfs(&["/a", "/b", "-d"]).unwrap())), "host:/a | remap | trace:level=all");
}

#[test]
fn mount_calls_its_helper() {
    let plan = mount(mount_program(&["/src", "/mnt", "-o", "rw,force-user=5,x-systemd.requires=a,noatime"]).unwrap());
    assert_eq!(line(&plan), "host:/src,noatime | remap:force-user=5");
    assert_eq!(plan.door.atime, Some(Atime::No));
    // Set-user-id programs and devices only when they are asked for.
    assert!(!plan.door.suid && !plan.door.dev);
    let plan = mount(mount_program(&["/src", "/mnt", "-n", "-v", "-t", "fuse.nacre", "-o", "dev,suid,ro"]).unwrap());
    assert!(plan.door.suid && plan.door.dev && plan.door.read_only);
    assert!(mount_program(&["/src", "/mnt", "-o", "bogus"]).is_err());
    assert!(mount(mount_program(&["/src", "/mnt", "-sn", "-o", "bogus,ro"]).unwrap()).door.read_only);
    assert!(mount(mount_program(&["/src", "/mnt", "-r"]).unwrap()).door.read_only);
    assert_eq!(mount_program(&["/src", "/mnt", "-f", "-o", "ro"]), Ok(Plan::Nothing));
    assert!(mount_program(&["/src", "/mnt", "-x"]).is_err());
    assert!(mount_program(&["/src", "/mnt", "-o"]).is_err());
}

#[test]
fn column_one_of_fstab_may_be_a_stack() {
    let plan = mount(mount_program(&["/etc/nacre/data.toml", "/mnt", "-o", "ro"]).unwrap());
    assert_eq!(line(&plan), "file /etc/nacre/data.toml");
    assert!(mount_program(&["/etc/nacre/data.toml", "/mnt", "-o", "force-user=5"]).is_err());
}

#[test]
fn a_remount_never_mounts_again() {
    for arguments in [
        &["/src", "/mnt", "-o", "remount,ro,force-user=5"][..],
        &["/src", "/mnt", "-o", "rw,remount,ro,relatime,user_id=0,group_id=0,default_permissions,allow_other"],
    ] {
        match mount_program(arguments).unwrap() {
            Plan::Remount(remount) => {
                assert_eq!(remount.mountpoint, Path::new("/mnt"));
                assert_eq!(remount.flags.iter().filter(|flag| **flag == "ro").count(), 1);
            }
            other => panic!("{other:?}"),
        }
    }
}
