//! Checks for stacks that refuse every change: each changing call fails with EROFS, each reading
//! call works.

use crate::World;
use crate::world::name;
use nacre_vfs::{Errno, Kind, Layer, Node, OpenFlags, RenameFlags, SetAttr, SetTime, XattrFlags};
use std::sync::Arc;

/// Creates the files that [`read_only`] expects: to be called on the layer below, before a
/// read-only layer is put over it.
///
/// # Panics
/// If the layer refuses.
pub fn populate(below: Arc<dyn Layer>) {
    let world = World::new(below);
    world.file(b"file", b"content");
    let directory = world.directory(b"directory");
    world.file_in(&directory, b"inside", b"");
    world.directory(b"empty");
    world.layer.symlink(&world.caller, &world.root, name(b"link"), b"file").expect("symlink");
}

/// Checks a read-only stack over a layer that was [`populate`]d.
///
/// # Panics
/// At the first call with a wrong result.
pub fn read_only(layer: Arc<dyn Layer>) {
    let world = World::new(layer);
    let file = world.find(b"file").expect("lookup");
    assert_eq!(world.content(&file.node), b"content");
    assert_eq!(world.layer.readlink(&world.caller, &world.find(b"link").unwrap().node), Ok(b"file".to_vec()));
    let before = world.list(&world.root, true, 100);
    assert_eq!(before.len(), 4);
    refuses_names(&world, &file.node);
    refuses_changes(&world, &file.node);
    assert_eq!(world.content(&file.node), b"content");
    let names =
        |listed: Vec<crate::Listed>| listed.into_iter().map(|l| (l.name, l.entry.map(|e| e.attr))).collect::<Vec<_>>();
    assert_eq!(names(world.list(&world.root, true, 100)), names(before), "nothing changed");
}

fn refuses_names(world: &World, file: &Node) {
    let (layer, caller, root) = (&world.layer, &world.caller, &world.root);
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let answers = [
        ("create", layer.create(caller, root, name(b"new"), 0o644, flags).map(|_| ())),
        ("tmpfile", layer.tmpfile(caller, root, 0o644, OpenFlags::READ_WRITE).map(|_| ())),
        ("mkdir", layer.mkdir(caller, root, name(b"new"), 0o755).map(|_| ())),
        ("mknod", layer.mknod(caller, root, name(b"new"), Kind::Fifo, 0o644, (0, 0)).map(|_| ())),
        ("symlink", layer.symlink(caller, root, name(b"new"), b"x").map(|_| ())),
        ("link", layer.link(caller, file, None, root, name(b"new")).map(|_| ())),
        ("unlink", layer.unlink(caller, root, name(b"file"))),
        ("rmdir", layer.rmdir(caller, root, name(b"empty"))),
        ("rename", layer.rename(caller, root, name(b"file"), root, name(b"new"), RenameFlags(0))),
    ];
    for (what, answer) in answers {
        assert_eq!(answer, Err(Errno::EROFS), "{what}");
    }
}

fn refuses_changes(world: &World, file: &Node) {
    let (layer, caller) = (&world.layer, &world.caller);
    for change in [
        SetAttr { mode: Some(0o600), ..SetAttr::default() },
        SetAttr { uid: Some(1), ..SetAttr::default() },
        SetAttr { size: Some(0), ..SetAttr::default() },
        SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() },
    ] {
        assert_eq!(layer.setattr(caller, file, None, &change).map(|_| ()), Err(Errno::EROFS), "{change:?}");
    }
    for flags in [OpenFlags::WRITE, OpenFlags::READ_WRITE, OpenFlags(OpenFlags::TRUNC)] {
        assert_eq!(layer.open(caller, file, flags).map(|_| ()), Err(Errno::EROFS), "{flags:?}");
    }
    let set = layer.setxattr(caller, file, b"user.x", b"y", XattrFlags::default());
    assert_eq!(set, Err(Errno::EROFS));
    assert_eq!(layer.removexattr(caller, file, b"user.x"), Err(Errno::EROFS));
}
