//! Symbolic links shown as their targets, and what deleting and replacing them does.

use super::*;
use crate::settings::{SymlinkDeletion, Symlinks};
use nacre_testkit::needs;
use nacre_vfs::{DirEntry, DirSink, WriteOrigin};
use std::{fs, os::unix::fs::symlink};

fn resolving(deletion: SymlinkDeletion) -> (Door, TempDir) {
    let door = Door::with(
        |options| {
            options.symlinks = Symlinks::Resolve;
            options.symlink_deletion = deletion;
        },
        64,
    );
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("target"), b"target").unwrap();
    fs::create_dir(outside.path().join("directory")).unwrap();
    fs::write(outside.path().join("directory/below"), b"below").unwrap();
    symlink(outside.path().join("target"), door.path("file")).unwrap();
    symlink(outside.path().join("directory"), door.path("directory")).unwrap();
    symlink("no/where", door.path("broken")).unwrap();
    symlink(".", door.path("loop")).unwrap();
    (door, outside)
}

#[test]
fn links_look_like_their_targets() {
    let (door, outside) = resolving(SymlinkDeletion::SymlinkOnly);
    let file = door.find("file").unwrap();
    assert_eq!((file.attr.kind, file.attr.size), (Kind::File, 6));
    assert_ne!(file.attr.id, door.find("directory").unwrap().attr.id);
    assert_eq!(door.find("directory/below").unwrap().attr.size, 5);
    assert_eq!(door.find("broken").unwrap().attr.kind, Kind::Symlink);
    assert_eq!(door.host.readlink(&Caller::ROOT, &door.find("broken").unwrap().node).unwrap(), b"no/where");
    // A link to its own directory is a directory of its own, however deep.
    let inner = door.find("loop/loop/loop").unwrap();
    assert_eq!(inner.attr.kind, Kind::Directory);
    assert_ne!(inner.attr.id, door.host.root().unwrap().attr.id);
    assert_eq!(inner.attr.id.ino, door.host.root().unwrap().attr.id.ino);
    let open = door.open("file", 2).unwrap();
    open.write(b"T", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(native(outside.path().join("target")), b"Target");
    let attr = door.setattr("file", SetAttr { size: Some(2), mode: Some(0o640), ..SetAttr::default() }).unwrap();
    assert_eq!((attr.size, attr.mode, attr.id), (2, 0o640, file.attr.id));
    door.host.setxattr(&Caller::ROOT, &file.node, b"user.k", b"v", XattrFlags::default()).unwrap();
    assert_eq!(rustix::fs::getxattr(outside.path().join("target"), "user.k", &mut [0_u8; 4]), Ok(1));
    assert_eq!(door.host.getxattr(&Caller::ROOT, &file.node, b"user.k", &mut [0; 4]), Ok(1));
    assert_eq!(door.host.symlink(&Caller::ROOT, &door.root(), name(b"new"), b"x").err(), Some(Errno::EPERM));
    door.create(&Caller::ROOT, "directory/made", 0o644, 0o2).unwrap();
    assert!(outside.path().join("directory/made").exists());
    struct Kinds(Vec<(Vec<u8>, Option<Kind>)>);
    impl DirSink for Kinds {
        fn push(&mut self, entry: DirEntry<'_>) -> bool {
            self.0.push((entry.name.bytes().to_vec(), entry.kind));
            true
        }
    }
    let mut kinds = Kinds(Vec::new());
    door.host.readdir(&Caller::ROOT, &door.root(), 0, false, &mut kinds).unwrap();
    kinds.0.sort_by(|a, b| a.0.cmp(&b.0));
    let expected =
        [("broken", Kind::Symlink), ("directory", Kind::Directory), ("file", Kind::File), ("loop", Kind::Directory)];
    assert_eq!(kinds.0, expected.map(|(name, kind)| (name.as_bytes().to_vec(), Some(kind))));
}

#[test]
fn a_link_that_was_pointed_elsewhere_is_another_file() {
    let (door, outside) = resolving(SymlinkDeletion::SymlinkOnly);
    fs::write(outside.path().join("other"), b"other").unwrap();
    let node = door.find("file").unwrap().node;
    fs::remove_file(door.path("file")).unwrap();
    symlink(outside.path().join("other"), door.path("file")).unwrap();
    assert_eq!(door.getattr(&node), Err(Errno::ESTALE));
    assert_eq!(door.host.open(&Caller::ROOT, &node, OpenFlags(1 | OpenFlags::TRUNC)).err(), Some(Errno::ESTALE));
    assert_eq!(native(outside.path().join("other")), b"other");
}

#[test]
fn deleting_follows_the_policy() {
    use SymlinkDeletion::{Deny, SymlinkFirst, SymlinkOnly, TargetFirst};
    for (policy, answer, link_left, target_left) in [
        (SymlinkOnly, Ok(()), false, true),
        (Deny, Err(Errno::EPERM), true, true),
        (SymlinkFirst, Ok(()), false, false),
        (TargetFirst, Ok(()), false, false),
    ] {
        let (door, outside) = resolving(policy);
        assert_eq!(door.unlink("file"), answer);
        assert_eq!(door.path("file").symlink_metadata().is_ok(), link_left);
        assert_eq!(outside.path().join("target").exists(), target_left);
        // A directory that is not empty stays, and with it, when it must go first, the link.
        let answer = match policy {
            TargetFirst => Err(Errno::ENOTEMPTY),
            _ => answer,
        };
        assert_eq!(door.rmdir("directory"), answer);
        assert_eq!(door.path("directory").symlink_metadata().is_ok(), answer.is_err());
        assert!(outside.path().join("directory/below").exists());
        let broken = door.unlink("broken");
        assert_eq!(broken, if policy == Deny { Err(Errno::EPERM) } else { Ok(()) });
        // Ordinary files are not concerned.
        fs::write(door.path("plain"), b"").unwrap();
        door.unlink("plain").unwrap();
    }
}

#[test]
fn renaming_moves_links_and_replaces_targets() {
    let (door, outside) = resolving(SymlinkDeletion::SymlinkOnly);
    door.rename("file", "moved", 0).unwrap();
    assert!(door.path("moved").symlink_metadata().unwrap().is_symlink());
    // The temporary directories may lie on one file system or, in theory, on two.
    fs::write(door.path("fresh"), b"fresh").unwrap();
    door.rename("fresh", "moved", 0).unwrap();
    assert!(door.path("moved").symlink_metadata().unwrap().is_symlink());
    assert_eq!(native(outside.path().join("target")), b"fresh");
    assert!(!door.path("fresh").exists());
    fs::write(door.path("fresh"), b"again").unwrap();
    door.rename("fresh", "broken", 0).unwrap();
    assert!(door.path("broken").symlink_metadata().unwrap().is_file());
}

#[test]
fn a_target_is_removed_or_replaced_only_by_whom_its_own_directory_admits() {
    use std::os::unix::fs::{PermissionsExt, chown};
    needs!(is_root());
    let user = Caller { uid: 4001, gid: 4002, pid: 0, umask: 0 };
    for (mode, owner, reachable, admitted) in [
        (0o755, 0, true, false),
        (0o757, 0, true, true),
        (0o757, 0, false, false),
        (0o700, 4001, true, true),
        (0o1777, 0, true, false),
    ] {
        let (door, outside) = resolving(SymlinkDeletion::TargetFirst);
        assert!(door.host.capabilities().judges_callers);
        let inner = outside.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("victim"), b"victim").unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(mode)).unwrap();
        chown(&inner, Some(owner), Some(owner)).unwrap();
        fs::set_permissions(outside.path(), fs::Permissions::from_mode(if reachable { 0o755 } else { 0o700 })).unwrap();
        fs::set_permissions(door.source.path(), fs::Permissions::from_mode(0o755)).unwrap();
        symlink(inner.join("victim"), door.path("link")).unwrap();
        fs::write(door.path("fresh"), b"fresh").unwrap();
        let root = door.root();
        let replaced = door.host.rename(&user, &root, name(b"fresh"), &root, name(b"link"), RenameFlags(0));
        let what = format!("{mode:o} of {owner}, reachable: {reachable}");
        assert_eq!(replaced.is_ok(), admitted, "{what}: {replaced:?}");
        assert_eq!(native(inner.join("victim")), if admitted { &b"fresh"[..] } else { b"victim" }, "{what}");
        let removed = door.host.unlink(&user, &root, name(b"link"));
        assert_eq!(removed.is_ok(), admitted, "{what}: {removed:?}");
        assert_eq!(inner.join("victim").exists(), !admitted, "{what}");
        assert_eq!(door.path("link").symlink_metadata().is_ok(), !admitted, "{what}");
    }
}

#[test]
fn kept_links_are_links() {
    let door = Door::new();
    symlink("target", door.path("link")).unwrap();
    fs::write(door.path("target"), b"").unwrap();
    let link = door.find("link").unwrap();
    assert_eq!(link.attr.kind, Kind::Symlink);
    assert_eq!(door.host.open(&Caller::ROOT, &link.node, OpenFlags::READ).err(), Some(Errno::ELOOP));
    let change = SetAttr { uid: Some(77), ..SetAttr::default() };
    if is_root() {
        assert_eq!(door.setattr("link", change).unwrap().uid, 77);
        assert_eq!(door.find("target").unwrap().attr.uid, 0);
    }
    assert_eq!(door.setattr("link", SetAttr { mode: Some(0o600), ..SetAttr::default() }), Err(Errno::EOPNOTSUPP));
    // The maximum length that every file system accepts.
    let long = [b'l'; 1023];
    door.host.symlink(&Caller::ROOT, &door.root(), name(b"long"), &long).unwrap();
    assert_eq!(door.host.readlink(&Caller::ROOT, &door.find("long").unwrap().node).unwrap(), long);
}
