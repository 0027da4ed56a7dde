//! Checks: files whose names are removed while they are open, files that never had one, many open
//! files.

use super::Check;
use crate::world::{name, read_all};
use crate::{World, conformance::lacks};
use nacre_vfs::{Errno, OpenFlags, RenameFlags, SetAttr, WriteOrigin};

pub(super) const CHECKS: &[Check] = &[
    ("an unlinked open file lives on", unlinked_lives_on),
    ("a replaced open file lives on", replaced_lives_on),
    ("a file without a name gets one", nameless_files),
    ("an open file gets one more name", open_file_linked),
    ("a renamed open file is the same", renamed_open_file),
    ("many files are open at once", many_open),
    ("a removed directory is gone but harmless", removed_directory),
];

fn unlinked_lives_on(world: &World) {
    let (made, file) = world.file(b"file", b"content");
    world.layer.unlink(&world.caller, &world.root, name(b"file")).expect("unlink");
    assert!(!world.exists(b"file"));
    let attr =
        world.layer.getattr(&world.caller, &made.node, Some(file.inner())).expect("getattr through the open file");
    assert_eq!((attr.nlink, attr.size, attr.id), (0, 7, made.attr.id));
    assert_eq!(file.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    assert_eq!(read_all(&file), b"Content");
    let cut = SetAttr { size: Some(3), mode: Some(0o600), ..SetAttr::default() };
    let attr = world
        .layer
        .setattr(&world.caller, &made.node, Some(file.inner()), &cut)
        .expect("setattr through the open file");
    assert_eq!((attr.size, attr.mode), (3, 0o600));
    // A new file by the same name is another file.
    let (second, _) = world.file(b"file", b"second");
    assert_ne!(second.attr.id, made.attr.id);
    assert_eq!(read_all(&file), b"Con");
    assert_eq!(world.content(&second.node), b"second");
}

fn replaced_lives_on(world: &World) {
    let (_, old) = world.file(b"target", b"old");
    let (new, _) = world.file(b"source", b"new");
    world
        .layer
        .rename(&world.caller, &world.root, name(b"source"), &world.root, name(b"target"), RenameFlags(0))
        .expect("rename");
    assert_eq!(read_all(&old), b"old");
    assert_eq!(world.id(b"target"), new.attr.id);
    assert!(!world.exists(b"source"));
}

fn nameless_files(world: &World) {
    let directory = world.directory(b"directory");
    let made = world.layer.tmpfile(&world.caller, &directory, 0o600, OpenFlags::READ_WRITE);
    if lacks("files without names", &made) {
        return;
    }
    let (entry, file) = made.expect("tmpfile");
    assert_eq!((entry.attr.nlink, entry.attr.mode, entry.attr.size), (0, 0o600, 0));
    file.write(b"content", 0, WriteOrigin::Caller).expect("write");
    assert!(world.names(&directory).is_empty(), "it must not appear in its directory");
    let linked =
        world.layer.link(&world.caller, &entry.node, Some(file.inner()), &world.root, name(b"named")).expect("link");
    assert_eq!((linked.attr.id, linked.attr.nlink), (entry.attr.id, 1));
    assert_eq!(world.content(&world.find(b"named").unwrap().node), b"content");
}

fn open_file_linked(world: &World) {
    let (made, file) = world.file(b"one", b"content");
    let linked = world.layer.link(&world.caller, &made.node, Some(file.inner()), &world.root, name(b"two"));
    if lacks("hard links", &linked) {
        return;
    }
    assert_eq!(linked.map(|linked| (linked.attr.id, linked.attr.nlink)), Ok((made.attr.id, 2)));
    assert_eq!(read_all(&file), b"content");
}

fn renamed_open_file(world: &World) {
    let directory = world.directory(b"directory");
    let (made, file) = world.file(b"file", b"content");
    world
        .layer
        .rename(&world.caller, &world.root, name(b"file"), &directory, name(b"moved"), RenameFlags(0))
        .expect("rename");
    let fresh = world.find_in(&directory, b"moved").expect("lookup");
    world.layer.adopt(&made.node, &fresh.node);
    assert_eq!(fresh.attr.id, made.attr.id);
    file.write(b"C", 0, WriteOrigin::Caller).expect("write");
    assert_eq!(world.content(&made.node), b"Content");
    assert_eq!(world.attr(&made.node).nlink, 1);
}

fn many_open(world: &World) {
    let names: Vec<Vec<u8>> = (0..300).map(|index| format!("file{index}").into_bytes()).collect();
    let files: Vec<_> = names.iter().map(|bytes| world.file(bytes, bytes).1).collect();
    for (bytes, file) in names.iter().zip(&files) {
        assert_eq!(&read_all(file), bytes);
    }
    let again: Vec<_> = (0..300).map(|_| world.open(&world.find(b"file7").unwrap().node, OpenFlags::READ)).collect();
    assert!(again.iter().all(|file| read_all(file) == b"file7"));
}

fn removed_directory(world: &World) {
    let directory = world.directory(b"directory");
    world.layer.rmdir(&world.caller, &world.root, name(b"directory")).expect("rmdir");
    let made = world.layer.mkdir(&world.caller, &directory, name(b"x"), 0o755).map(|_| ());
    assert!(matches!(made, Err(Errno::ENOENT | Errno::ESTALE)), "mkdir in a removed directory: {made:?}");
    let found = world.find_in(&directory, b"x").map(|_| ());
    assert!(matches!(found, Err(Errno::ENOENT | Errno::ESTALE)), "look-up in a removed directory: {found:?}");
}
