//! Checks: modes, owners, times, and the operations that clear set-id bits.

use super::Check;
use crate::World;
use crate::world::name;
use nacre_vfs::{Caller, Kind, OpenFlags, SetAttr, SetTime, Time, WriteOrigin};

/// The checks that do not apply to a stack that changes owners or modes on purpose.
pub(super) const ABOUT_OWNERS: &[&str] = &[
    "a mode is set",
    "an owner is set",
    "what is made belongs to its caller",
    "set-user-id goes when privileges are dropped",
    "a set-group-id directory hands its group down",
];

pub(super) const CHECKS: &[Check] = &[
    ("a mode is set", mode_is_set),
    ("an owner is set", owner_is_set),
    ("what is made belongs to its caller", made_by_caller),
    ("times are set to the nanosecond", times_are_set),
    ("one time is set and the other kept", one_time),
    ("now is the clock of the storage", now_is_now),
    ("a write moves the modification time", write_moves_mtime),
    ("a change of names moves the directory's times", names_move_directory_times),
    ("set-user-id goes when privileges are dropped", privileges_dropped),
    ("a set-group-id directory hands its group down", group_inherited),
    ("an empty change changes nothing", empty_change),
    ("blocks follow the size", blocks_follow_size),
];

fn mode(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

fn mode_is_set(world: &World) {
    let (made, _) = world.file(b"file", b"");
    let directory = world.directory(b"directory");
    for bits in [0o000, 0o644, 0o777, 0o4711, 0o1755] {
        assert_eq!(world.change(&made.node, mode(bits)).mode, bits, "{bits:o}");
        assert_eq!(world.attr(&made.node).mode, bits);
        assert_eq!(world.find(b"file").unwrap().attr.mode, bits);
        assert_eq!(world.change(&directory, mode(bits)).mode, bits, "directory {bits:o}");
    }
    let (other, file) = world.file(b"other", b"");
    let changed = world.layer.setattr(&world.caller, &other.node, Some(file.inner()), &mode(0o400)).expect("fchmod");
    assert_eq!(changed.mode, 0o400);
}

fn owner_is_set(world: &World) {
    if !world.is_root() {
        println!("note: only root gives files away");
        return;
    }
    let (made, _) = world.file(b"file", b"");
    let link = world.layer.symlink(&world.caller, &world.root, name(b"link"), b"file").expect("symlink");
    for (uid, gid) in [(1000, 1001), (0, 0), (3_000_000_000, 4_294_967_294)] {
        let changed = world.change(&made.node, SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() });
        assert_eq!((changed.uid, changed.gid), (uid, gid));
    }
    let changed = world.change(&made.node, SetAttr { gid: Some(7), ..SetAttr::default() });
    assert_eq!((changed.uid, changed.gid), (3_000_000_000, 7));
    let changed = world.change(&link.node, SetAttr { uid: Some(5), ..SetAttr::default() });
    assert_eq!((changed.kind, changed.uid), (Kind::Symlink, 5));
    assert_eq!(world.attr(&made.node).uid, 3_000_000_000, "a change of a link is not one of its target");
}

fn made_by_caller(world: &World) {
    if !world.is_root() {
        println!("note: only root acts as others");
        return;
    }
    let open_to_all = world.directory(b"open");
    world.change(&open_to_all, mode(0o777));
    let caller = Caller { uid: 4_000, gid: 5_000, ..world.caller };
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let made = [
        world.layer.create(&caller, &open_to_all, name(b"file"), 0o644, flags).expect("create").0,
        world.layer.mkdir(&caller, &open_to_all, name(b"directory"), 0o755).expect("mkdir"),
        world.layer.symlink(&caller, &open_to_all, name(b"link"), b"x").expect("symlink"),
        world.layer.mknod(&caller, &open_to_all, name(b"fifo"), Kind::Fifo, 0o644, (0, 0)).expect("mknod"),
    ];
    for entry in made {
        assert_eq!((entry.attr.uid, entry.attr.gid), (4_000, 5_000), "{:?}", entry.attr.kind);
    }
    let (own, _) = world.file_in(&open_to_all, b"own", b"");
    assert_eq!(
        (own.attr.uid, own.attr.gid),
        (world.caller.uid, world.caller.gid),
        "the next caller is not the last one"
    );
}

const LONG_AGO: Time = Time { sec: 1_000_000_000, nsec: 123_456_789 };
const LATER: Time = Time { sec: 4_000_000_000, nsec: 999_999_999 };

fn times_are_set(world: &World) {
    let (made, _) = world.file(b"file", b"");
    let link = world.layer.symlink(&world.caller, &world.root, name(b"link"), b"file").expect("symlink");
    for node in [&made.node, &link.node, &world.directory(b"directory")] {
        let change =
            SetAttr { atime: Some(SetTime::To(LONG_AGO)), mtime: Some(SetTime::To(LATER)), ..SetAttr::default() };
        let changed = world.change(node, change);
        assert_eq!((changed.atime, changed.mtime), (LONG_AGO, LATER));
        assert_eq!((world.attr(node).atime, world.attr(node).mtime), (LONG_AGO, LATER));
    }
}

fn one_time(world: &World) {
    let (made, _) = world.file(b"file", b"");
    world.change(
        &made.node,
        SetAttr { atime: Some(SetTime::To(LONG_AGO)), mtime: Some(SetTime::To(LONG_AGO)), ..SetAttr::default() },
    );
    let changed = world.change(&made.node, SetAttr { mtime: Some(SetTime::To(LATER)), ..SetAttr::default() });
    assert_eq!((changed.atime, changed.mtime), (LONG_AGO, LATER));
    let changed = world.change(&made.node, SetAttr { atime: Some(SetTime::To(LATER)), ..SetAttr::default() });
    assert_eq!((changed.atime, changed.mtime), (LATER, LATER));
}

fn now_is_now(world: &World) {
    let (made, _) = world.file(b"file", b"");
    let born = made.attr.mtime;
    world.change(&made.node, SetAttr { mtime: Some(SetTime::To(LONG_AGO)), ..SetAttr::default() });
    let changed = world.change(&made.node, SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() });
    assert!(changed.mtime >= born, "{:?} is before {born:?}", changed.mtime);
}

fn past(world: &World, node: &nacre_vfs::Node) {
    world.change(
        node,
        SetAttr { atime: Some(SetTime::To(LONG_AGO)), mtime: Some(SetTime::To(LONG_AGO)), ..SetAttr::default() },
    );
}

fn write_moves_mtime(world: &World) {
    let (made, file) = world.file(b"file", b"content");
    past(world, &made.node);
    file.write(b"x", 0, WriteOrigin::Caller).expect("write");
    file.fsync(false).expect("fsync");
    assert!(world.attr(&made.node).mtime > LONG_AGO);
    past(world, &made.node);
    world.change(&made.node, SetAttr { size: Some(2), ..SetAttr::default() });
    assert!(world.attr(&made.node).mtime > LONG_AGO, "truncation is a change of content");
}

fn names_move_directory_times(world: &World) {
    let directory = world.directory(b"directory");
    let moved = |what: &str| {
        assert!(world.attr(&directory).mtime > LONG_AGO, "{what} must move the directory's modification time");
        past(world, &directory);
    };
    past(world, &directory);
    let (made, _) = world.file_in(&directory, b"file", b"");
    moved("create");
    let flags = nacre_vfs::RenameFlags(0);
    world.layer.rename(&world.caller, &directory, name(b"file"), &directory, name(b"other"), flags).expect("rename");
    moved("rename");
    world.layer.unlink(&world.caller, &directory, name(b"other")).expect("unlink");
    moved("unlink");
    drop(made);
    world.directory_in(&directory, b"inner");
    moved("mkdir");
    world.layer.rmdir(&world.caller, &directory, name(b"inner")).expect("rmdir");
    moved("rmdir");
}

fn privileges_dropped(world: &World) {
    let (made, file) = world.file(b"file", b"content");
    world.change(&made.node, mode(0o6755));
    let cut = SetAttr { size: Some(3), kill_privileges: true, ..SetAttr::default() };
    let changed = world.layer.setattr(&world.caller, &made.node, Some(file.inner()), &cut).expect("truncate");
    assert_eq!(changed.mode & 0o4000, 0, "truncation by an ordinary user drops set-user-id: {:o}", changed.mode);
    assert_eq!(changed.mode & 0o777, 0o755);
}

fn group_inherited(world: &World) {
    if !world.is_root() {
        println!("note: only root acts as others");
        return;
    }
    let parent = world.directory(b"parent");
    world.change(&parent, SetAttr { gid: Some(6_000), ..SetAttr::default() });
    world.change(&parent, mode(0o2777));
    let caller = Caller { uid: 4_000, gid: 5_000, ..world.caller };
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let (file, _) = world.layer.create(&caller, &parent, name(b"file"), 0o644, flags).expect("create");
    assert_eq!((file.attr.uid, file.attr.gid), (4_000, 6_000));
    let directory = world.layer.mkdir(&caller, &parent, name(b"directory"), 0o755).expect("mkdir");
    assert_eq!((directory.attr.gid, directory.attr.mode & 0o2000), (6_000, 0o2000));
}

fn empty_change(world: &World) {
    let (made, _) = world.file(b"file", b"content");
    let before = world.attr(&made.node);
    let after = world.change(&made.node, SetAttr::default());
    assert_eq!(
        (before.mode, before.uid, before.gid, before.size, before.mtime),
        (after.mode, after.uid, after.gid, after.size, after.mtime)
    );
}

fn blocks_follow_size(world: &World) {
    // Incompressible: a layer that compresses its content counts the compressed size.
    let content: Vec<u8> =
        (0..100_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 16) as u8 ^ (at >> 7) as u8).collect();
    let (made, file) = world.file(b"file", &content);
    file.fsync(false).expect("fsync");
    let attr = world.attr(&made.node);
    assert!(attr.blocks * 512 >= 100_000, "{} blocks for 100,000 bytes", attr.blocks);
    assert!(attr.blksize > 0);
}
