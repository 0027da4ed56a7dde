//! Which plans the kernel can serve alone, and with which maps.

use super::{mount, os};
use crate::personality;
use nacre_daemon::kernel_engine::{self, KernelMount};
use nacre_layers::accounts::{Accounts, User};
use nacre_sys::mounts::{IdRange, MountAttributes};
use std::{io, path::Path};

struct Known;

impl Accounts for Known {
    fn user(&self, name: &str) -> io::Result<Option<User>> {
        Ok((name == "alice").then_some(User { uid: 1000, gid: 1000 }))
    }
    fn group(&self, name: &str) -> io::Result<Option<u32>> {
        Ok((name == "staff").then_some(50))
    }
    fn groups_of(&self, _uid: u32) -> io::Result<Vec<u32>> {
        Ok(Vec::new())
    }
}

fn reduce(options: &[&str]) -> Result<KernelMount, String> {
    let plan = mount(personality::bindfs("bindfs", os(&[options, &["/s", "/m"]].concat())).unwrap());
    kernel_engine::reduce(&plan, &Known)
}

fn range(inside: u32, outside: u32, count: u32) -> IdRange {
    IdRange { inside, outside, count }
}

/// All ids as they are.
fn whole() -> Vec<IdRange> {
    vec![range(0, 0, u32::MAX)]
}

#[test]
fn flags_are_attributes() {
    let safe = MountAttributes::NO_SUID.with(MountAttributes::NO_DEVICES);
    for (options, attributes) in [
        (&[][..], safe),
        (&["-r"], safe.with(MountAttributes::READ_ONLY)),
        (&["-o", "suid,dev,noexec"], MountAttributes::NO_EXEC),
        (&["-o", "noatime,nodiratime"], safe.with(MountAttributes::NO_ATIME).with(MountAttributes::NO_DIRECTORY_ATIME)),
        (&["-o", "nosymfollow"], safe.with(MountAttributes::NO_SYMLINK_FOLLOW)),
        (&["--multithreaded", "--enable-lock-forwarding", "--create-as-user", "--coherence=exclusive"], safe),
    ] {
        let mount = reduce(options).unwrap();
        assert_eq!((mount.attributes, mount.source.as_path()), (attributes, Path::new("/s")), "{options:?}");
        assert!(mount.users.is_empty() && mount.groups.is_empty() && mount.differences.is_empty());
    }
}

#[test]
fn one_to_one_maps_cover_every_other_id_as_itself() {
    let swap = reduce(&["--map=alice/2000:2000/alice"]).unwrap();
    let expected = [
        range(0, 0, 1000),
        range(1000, 2000, 1),
        range(1001, 1001, 999),
        range(2000, 1000, 1),
        range(2001, 2001, u32::MAX - 2001),
    ];
    assert_eq!(swap.users, expected);
    assert_eq!((swap.groups, swap.differences), (whole(), vec![]));

    let one = reduce(&["--map=@staff/@60"]).unwrap();
    assert_eq!(one.groups, [range(0, 0, 50), range(50, 60, 1), range(51, 51, 9), range(61, 61, u32::MAX - 61)]);
    assert_eq!(one.users, whole());
    assert_eq!(one.differences, ["groups 60 of the source appear as 65534, because others are shown by these numbers"]);

    let moved = reduce(&["--map=0-9/100-109"]).unwrap();
    assert_eq!(moved.users, [range(0, 100, 10), range(10, 10, 90), range(110, 110, u32::MAX - 110)]);
    assert_eq!(
        moved.differences,
        ["users 100-109 of the source appear as 65534, because others are shown by these numbers"]
    );

    let edge = reduce(&["--map=4294967294/0:0/4294967294"]).unwrap();
    assert_eq!(edge.users, [range(0, u32::MAX - 1, 1), range(1, 1, u32::MAX - 2), range(u32::MAX - 1, 0, 1)]);
    assert!(edge.differences.is_empty());
}

#[test]
fn offsets_move_everything() {
    let up = reduce(&["--uid-offset=100000"]).unwrap();
    assert_eq!((up.users, up.groups), (vec![range(0, 100_000, u32::MAX - 100_000)], whole()));
    let down = reduce(&["--gid-offset=-100000"]).unwrap();
    assert_eq!(down.groups, [range(100_000, 0, u32::MAX - 100_000)]);
    assert!(reduce(&["--uid-offset=0"]).unwrap().users.is_empty());
}

#[test]
fn the_rest_has_a_reason() {
    for (options, reason) in [
        (&["-u5"][..], "the rule force-user works only through FUSE"),
        (&["-p", "a-w"], "the rule perms works only through FUSE"),
        (&["-m", "alice"], "the rule mirror works only"),
        (&["--hide=*.tmp"], "the rule hide works only"),
        (&["--delete-deny"], "the rule delete-deny works only"),
        (&["--create-as-mounter"], "the rule create-as works only"),
        (&["--map=1-5/7"], "many ids to one"),
        (&["--map=*/7"], "many ids to one"),
        (&["--map=bogus/7"], "bogus"),
        (&["--map=1/2", "--uid-offset=5"], "a map and an offset together"),
        (&["--read-rate=1M"], "the layer throttle works only"),
        (&["-d"], "the layer trace works only"),
        (&["--resolve-symlinks"], "--resolve-symlinks works only"),
        (&["--forward-odirect=512"], "--forward-odirect works only"),
        (&["--no-allow-other"], "--no-allow-other works only"),
        (&["--direct-io"], "--direct-io works only"),
        (&["--immutable"], "--immutable works only"),
        (&["--xattr-none"], "--xattr-none works only"),
        (&["--xattr-ro"], "the rule xattr works only"),
        (&["--acl=off"], "--acl=off works only"),
        (&["-o", "sync"], "-o sync works only"),
        (&["-o", "fsname=x"], "-o fsname works only"),
        (&["-o", "context=x"], "-o context works only"),
    ] {
        let found = reduce(options).unwrap_err();
        assert!(found.contains(reason), "{options:?}: {found}");
    }
}

#[test]
fn a_map_of_too_many_ranges_is_refused() {
    let pairs: Vec<String> = (0..200).map(|n| format!("{}/{}", 10 + n * 10, 5 + n * 10)).collect();
    let found = reduce(&[&format!("--map={}", pairs.join(":"))]).unwrap_err();
    assert!(found.contains("the kernel takes 340 ranges"), "{found}");
}

#[test]
fn mounts_below_the_source_are_told() {
    let table = nacre_daemon::mountinfo::parse(
        b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /srv/data rw - ext4 /dev/b rw\n3 1 8:2 / /srvx rw - ext4 /dev/b rw\n",
    );
    for (source, told) in [("/srv", true), ("/srv/data", false), ("/srv/data/x", false), ("/home", false), ("/", true)]
    {
        assert_eq!(kernel_engine::hidden(Path::new(source), &table).is_some(), told, "{source}");
    }
}
