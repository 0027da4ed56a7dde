//! Owners, modes and kinds of created files.

use super::*;
use nacre_testkit::needs;
use nacre_vfs::WriteOrigin;
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
};

const O_RDWR: u32 = 0o2;
const O_EXCL: u32 = 0o200;

#[test]
fn everything_belongs_to_the_caller_at_once() {
    needs!(is_root());
    for prepared in [false, true] {
        std::thread::spawn(move || {
            if prepared {
                crate::host::prepare_worker().unwrap();
            }
            let door = Door::new();
            let root = door.root();
            door.create(&USER, "file", 0o666, O_RDWR | O_EXCL).unwrap();
            door.mkdir(&USER, "directory", 0o777).unwrap();
            door.host.mknod(&USER, &root, name(b"fifo"), Kind::Fifo, 0o666, (0, 0)).unwrap();
            door.host.mknod(&USER, &root, name(b"device"), Kind::Character, 0o600, (1, 3)).unwrap();
            door.host.mknod(&USER, &root, name(b"block"), Kind::Block, 0o600, (7, 200)).unwrap();
            door.host.mknod(&USER, &root, name(b"socket"), Kind::Socket, 0o777, (0, 0)).unwrap();
            door.host.mknod(&USER, &root, name(b"plain"), Kind::File, 0o604, (0, 0)).unwrap();
            door.host.symlink(&USER, &root, name(b"link"), b"no/where").unwrap();
            for (path, mode) in [
                ("file", 0o100_644),
                ("directory", 0o040_755),
                ("fifo", 0o010_644),
                ("device", 0o020_600),
                ("block", 0o060_600),
                ("socket", 0o140_755),
                ("plain", 0o100_604),
                ("link", 0o120_777),
            ] {
                let meta = std::fs::symlink_metadata(door.path(path)).unwrap();
                assert_eq!((meta.uid(), meta.gid(), meta.mode()), (USER.uid, USER.gid, mode), "{path}");
                let attr = door.find(path).unwrap().attr;
                assert_eq!(
                    (attr.uid, attr.gid, attr.kind.mode() | attr.mode, attr.id.ino),
                    (meta.uid(), meta.gid(), meta.mode(), meta.ino())
                );
            }
            let device = door.find("device").unwrap().attr;
            assert_eq!((device.rdev_major, device.rdev_minor), (1, 3));
            // Other operations work under the ids that remain set after it.
            fs::write(door.path("private"), b"").unwrap();
            fs::set_permissions(door.path("private"), fs::Permissions::from_mode(0o600)).unwrap();
            let change = SetAttr { uid: Some(9), mode: Some(0o400), size: Some(3), ..SetAttr::default() };
            assert_eq!(door.setattr("private", change).unwrap().size, 3);
            door.host
                .setxattr(&Caller::ROOT, &door.find("private").unwrap().node, b"trusted.k", b"", XattrFlags::default())
                .unwrap();
            door.open("private", 2).unwrap().write(b"x", 0, WriteOrigin::Caller).unwrap();
            assert_eq!(door.link("private", "private-too").unwrap().attr.nlink, 2);
            // The next caller has other ids.
            door.create(&Caller::ROOT, "of-root", 0o640, O_RDWR).unwrap();
            assert_eq!(std::fs::metadata(door.path("of-root")).unwrap().uid(), 0);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn sticky_and_set_group_id_directories_keep_their_bits() {
    needs!(is_root());
    let door = Door::new();
    door.mkdir(&USER, "sticky", 0o1777).unwrap();
    assert_eq!(std::fs::metadata(door.path("sticky")).unwrap().mode() & 0o7777, 0o1755);
    let entry = door.mkdir(&USER, "group", 0o2770).unwrap();
    assert_eq!(entry.attr.mode, 0o2750);
    // Below it, the group is inherited, and directories inherit the bit.
    rustix::fs::chown(door.path("group"), None, Some(rustix::fs::Gid::from_raw(77))).unwrap();
    std::fs::set_permissions(door.path("group"), std::fs::Permissions::from_mode(0o2770)).unwrap();
    door.mkdir(&USER, "group/below", 0o700).unwrap();
    door.create(&USER, "group/file", 0o2770, O_RDWR).unwrap();
    let below = std::fs::metadata(door.path("group/below")).unwrap();
    assert_eq!((below.mode() & 0o7777, below.gid()), (0o2700, 77));
    let file = std::fs::metadata(door.path("group/file")).unwrap();
    assert_eq!((file.mode() & 0o7777, file.gid()), (0o2750, 77));
}

#[test]
fn a_default_acl_replaces_the_umask() {
    let door = Door::new();
    door.mkdir(&Caller::ROOT, "d", 0o755).unwrap();
    // Version 2; user::rwx, user:4001:rwx, group::r-x, mask::rwx, other::---
    // (linux/posix_acl_xattr.h).
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, perm, id) in
        [(1_u16, 7_u16, u32::MAX), (2, 7, 4001), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 0, u32::MAX)]
    {
        acl.extend(tag.to_le_bytes());
        acl.extend(perm.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let node = door.find("d").unwrap().node;
    match door.host.setxattr(&Caller::ROOT, &node, b"system.posix_acl_default", &acl, XattrFlags::default()) {
        Err(Errno::EOPNOTSUPP) => {
            assert!(!door.host.capabilities().acls);
            return;
        }
        other => other.unwrap(),
    }
    assert!(door.host.capabilities().acls);
    let strict = Caller { umask: 0o077, ..Caller::ROOT };
    door.create(&strict, "d/file", 0o666, O_RDWR).unwrap();
    assert_eq!(std::fs::metadata(door.path("d/file")).unwrap().mode() & 0o777, 0o660);
    let file = door.find("d/file").unwrap().node;
    let mut buffer = [0; 256];
    let length = door.host.getxattr(&Caller::ROOT, &file, b"system.posix_acl_access", &mut buffer).unwrap();
    assert_eq!(length, acl.len());
}

#[test]
fn creating_opens_what_is_there_unless_exclusive() {
    let door = Door::new();
    std::fs::write(door.path("there"), b"old content").unwrap();
    assert_eq!(door.create(&USER, "there", 0o600, O_RDWR | O_EXCL).err(), Some(Errno::EEXIST));
    let (entry, file) = door.create(&USER, "there", 0o600, O_RDWR).unwrap();
    let mut buffer = [0; 32];
    assert_eq!(file.read(&mut buffer, 4).unwrap(), 7);
    assert_eq!(&buffer[..7], b"content");
    assert_eq!(entry.attr.size, 11);
    let (entry, _) = door.create(&USER, "there", 0o600, O_RDWR | OpenFlags::TRUNC).unwrap();
    assert_eq!(entry.attr.size, 0);
    std::os::unix::fs::symlink("elsewhere", door.path("link")).unwrap();
    // A link that has appeared meanwhile is for the kernel to follow, not for us.
    assert_eq!(door.create(&USER, "link", 0o600, O_RDWR).err(), Some(Errno::ESTALE));
    assert_eq!(door.create(&USER, "link", 0o600, O_RDWR | O_EXCL).err(), Some(Errno::EEXIST));
    assert!(!door.path("elsewhere").exists());
    rustix::fs::mkfifoat(rustix::fs::CWD, door.path("fifo"), 0o600.into()).unwrap();
    assert_eq!(door.create(&USER, "fifo", 0o600, 0o1).err(), Some(Errno::ESTALE));
    door.mkdir(&USER, "directory", 0o755).unwrap();
    assert_eq!(door.create(&USER, "directory", 0o600, O_RDWR).err(), Some(Errno::EISDIR));
}

#[test]
fn names_of_any_bytes_and_255_of_them() {
    let door = Door::new();
    let long = [b'n'; 255];
    let odd: Vec<u8> = (1..=255_u8).filter(|&byte| byte != b'/').collect();
    for bytes in [&long[..], b"\xff\xfe\x80", &odd] {
        let root = door.root();
        let (made, _) = door.host.create(&Caller::ROOT, &root, name(bytes), 0o600, OpenFlags(O_RDWR)).unwrap();
        let found = door.host.lookup(&Caller::ROOT, &root, name(bytes)).unwrap();
        assert_eq!(made.attr.id, found.attr.id);
        assert_eq!(door.getattr(&found.node).unwrap().id, found.attr.id);
        door.host.unlink(&Caller::ROOT, &root, name(bytes)).unwrap();
    }
}

#[test]
fn a_nameless_file_can_be_used_and_given_a_name() {
    let door = Door::new();
    let root = door.root();
    let (entry, file) = match door.host.tmpfile(&USER, &root, 0o666, OpenFlags(O_RDWR)) {
        Err(Errno::EOPNOTSUPP) => return,
        other => other.unwrap(),
    };
    assert_eq!((entry.attr.nlink, entry.attr.kind), (0, Kind::File));
    file.write(b"nameless", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(door.getattr(&entry.node).unwrap().size, 8);
    let attr = door
        .host
        .setattr(&USER, &entry.node, Some(&*file), &SetAttr { mode: Some(0o640), ..SetAttr::default() })
        .unwrap();
    assert_eq!(attr.mode, 0o640);
    let linked = door.host.link(&USER, &entry.node, Some(&*file), &root, name(b"named")).unwrap();
    assert_eq!((linked.attr.nlink, linked.attr.id), (1, entry.attr.id));
    assert_eq!(native(door.path("named")), b"nameless");
    let (entry, file) = door.host.tmpfile(&USER, &root, 0o666, OpenFlags(O_RDWR | O_EXCL)).unwrap();
    assert_eq!(door.host.link(&USER, &entry.node, Some(&*file), &root, name(b"never")).err(), Some(Errno::ENOENT));
}

#[test]
fn what_is_open_for_writing_gets_more_names() {
    for coherence in [HostCoherence::Watch, HostCoherence::Revalidate] {
        let door = Door::with(|options| options.coherence = coherence, 64);
        let (sender, _receiver) = std::sync::mpsc::channel();
        if coherence == HostCoherence::Watch {
            door.host.watch(sender);
        }
        let (root, caller) = (door.root(), Caller::ROOT);
        let (entry, file) = door.create(&caller, "one", 0o644, O_RDWR).unwrap();
        for (new, file) in [(b"two", Some(&*file)), (b"six", None)] {
            door.host.link(&caller, &entry.node, file, &root, name(new)).unwrap();
        }
        assert_eq!(door.find("two").unwrap().attr.nlink, 3, "{coherence:?}");
        let (nameless, file) = match door.host.tmpfile(&caller, &root, 0o644, OpenFlags(O_RDWR)) {
            Ok(made) => made,
            // The file system of the temporary directory cannot do it.
            Err(error) => return assert_eq!(error, Errno::EOPNOTSUPP),
        };
        file.write(b"late", 0, WriteOrigin::Caller).unwrap();
        door.host.link(&caller, &nameless.node, Some(&*file), &root, name(b"late")).unwrap();
        assert_eq!(native(door.path("late")), b"late", "{coherence:?}");
    }
}
