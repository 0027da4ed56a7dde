//! Checks: creating, finding and removing names.

use super::Check;
use crate::world::name;
use crate::{World, conformance::lacks};
use nacre_vfs::{Caller, Errno, Kind, Node, OpenFlags, WriteOrigin};
use std::sync::Arc;

pub(super) const CHECKS: &[Check] = &[
    ("the root is a directory", root_is_a_directory),
    ("a missing name is ENOENT", missing_is_enoent),
    ("a look-up in a file is ENOTDIR", lookup_in_file),
    ("a new file is found", new_file_is_found),
    ("an exclusive creation of an existing name is EEXIST", exclusive_creation),
    ("a creation opens what exists", creation_opens_existing),
    ("the umask applies to what is made", umask_applies),
    ("a directory is made and removed", directories),
    ("only empty directories are removed", only_empty_directories),
    ("unlink and rmdir keep to their kinds", removal_by_kind),
    ("names are bytes", names_are_bytes),
    ("a symbolic link keeps its target", symlinks),
    ("a hard link is the same file", hard_links),
    ("two names of one file have the same attributes at once", two_names_alike),
    ("special files are made", special_files),
    ("a tree is deeper than a path can say", deep_tree),
    ("a node of another layer is EIO", foreign_node),
    ("a name can be made again after removal", name_made_again),
];

fn root_is_a_directory(world: &World) {
    let root = world.layer.root().expect("root");
    assert_eq!(root.attr.kind, Kind::Directory);
    assert_eq!(world.attr(&root.node).id, root.attr.id);
    assert!(!world.layer.describe().layer.is_empty());
}

fn missing_is_enoent(world: &World) {
    assert_eq!(world.find(b"missing").map(|_| ()), Err(Errno::ENOENT));
    assert_eq!(world.layer.unlink(&world.caller, &world.root, name(b"missing")), Err(Errno::ENOENT));
    assert_eq!(world.layer.rmdir(&world.caller, &world.root, name(b"missing")), Err(Errno::ENOENT));
}

fn lookup_in_file(world: &World) {
    let (file, _) = world.file(b"file", b"");
    assert_eq!(world.find_in(&file.node, b"x").map(|_| ()), Err(Errno::ENOTDIR));
    assert_eq!(world.layer.mkdir(&world.caller, &file.node, name(b"x"), 0o755).map(|_| ()), Err(Errno::ENOTDIR));
    assert_eq!(world.page(&file.node, 0, false, 10).map(|_| ()), Err(Errno::ENOTDIR));
}

fn new_file_is_found(world: &World) {
    let (made, _open) = world.file(b"file", b"");
    let found = world.find(b"file").expect("lookup");
    assert_eq!(found.attr.id, made.attr.id);
    assert_eq!((found.attr.kind, found.attr.size, found.attr.nlink), (Kind::File, 0, 1));
    assert_ne!(found.attr.id, world.attr(&world.root).id);
}

fn exclusive_creation(world: &World) {
    world.file(b"file", b"content");
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let again = world.layer.create(&world.caller, &world.root, name(b"file"), 0o644, flags);
    assert_eq!(again.map(|_| ()), Err(Errno::EEXIST));
    world.directory(b"directory");
    let over = world.layer.create(&world.caller, &world.root, name(b"directory"), 0o644, flags);
    assert_eq!(over.map(|_| ()), Err(Errno::EEXIST));
    assert_eq!(world.content(&world.find(b"file").unwrap().node), b"content");
}

fn creation_opens_existing(world: &World) {
    let (made, _) = world.file(b"file", b"content");
    let (entry, _) =
        world.layer.create(&world.caller, &world.root, name(b"file"), 0o600, OpenFlags::READ_WRITE).expect("create");
    assert_eq!(entry.attr.id, made.attr.id);
    assert_eq!(world.content(&entry.node), b"content");
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNC);
    let (entry, _) = world.layer.create(&world.caller, &world.root, name(b"file"), 0o600, flags).expect("create");
    assert_eq!((entry.attr.id, entry.attr.size), (made.attr.id, 0));
    assert_eq!(world.content(&entry.node), b"");
}

fn umask_applies(world: &World) {
    let caller = Caller { umask: 0o027, ..world.caller };
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let modes = [
        world.layer.create(&caller, &world.root, name(b"file"), 0o666, flags).expect("create").0.attr.mode,
        world.layer.mkdir(&caller, &world.root, name(b"directory"), 0o777).expect("mkdir").attr.mode,
        world.layer.mknod(&caller, &world.root, name(b"fifo"), Kind::Fifo, 0o666, (0, 0)).expect("mknod").attr.mode,
    ];
    assert_eq!(modes.map(|mode| mode & 0o027), [0, 0, 0], "{modes:?}");
}

fn directories(world: &World) {
    let made = world.layer.mkdir(&world.caller, &world.root, name(b"directory"), 0o1755).expect("mkdir");
    assert_eq!(made.attr.kind, Kind::Directory);
    assert_eq!(made.attr.mode & 0o1000, 0o1000, "mkdir keeps the sticky bit");
    assert_eq!(
        world.layer.mkdir(&world.caller, &world.root, name(b"directory"), 0o755).map(|_| ()),
        Err(Errno::EEXIST)
    );
    world.file_in(&made.node, b"inside", b"x");
    assert_eq!(world.names(&made.node), [b"inside".to_vec()]);
    world.layer.unlink(&world.caller, &made.node, name(b"inside")).expect("unlink");
    world.layer.rmdir(&world.caller, &world.root, name(b"directory")).expect("rmdir");
    assert!(!world.exists(b"directory"));
}

fn only_empty_directories(world: &World) {
    let directory = world.directory(b"directory");
    world.file_in(&directory, b"inside", b"");
    assert_eq!(world.layer.rmdir(&world.caller, &world.root, name(b"directory")), Err(Errno::ENOTEMPTY));
    assert!(world.find_in(&directory, b"inside").is_ok());
}

fn removal_by_kind(world: &World) {
    world.directory(b"directory");
    world.file(b"file", b"");
    assert_eq!(world.layer.unlink(&world.caller, &world.root, name(b"directory")), Err(Errno::EISDIR));
    assert_eq!(world.layer.rmdir(&world.caller, &world.root, name(b"file")), Err(Errno::ENOTDIR));
    assert!(world.exists(b"directory") && world.exists(b"file"));
}

fn names_are_bytes(world: &World) {
    let mut wanted: Vec<Vec<u8>> =
        (1..=255u8).filter(|byte| *byte != b'/' && *byte != b'.').map(|byte| vec![byte]).collect();
    wanted.extend([
        b"...".to_vec(),
        b".hidden".to_vec(),
        b" ".repeat(3),
        vec![b'x'; 255],
        vec![0xff; 255],
        b"a\nb".to_vec(),
    ]);
    for bytes in &wanted {
        world.file(bytes, bytes);
    }
    wanted.sort();
    assert_eq!(world.names(&world.root), wanted);
    for bytes in &wanted {
        let found = world.find(bytes).unwrap_or_else(|e| panic!("lookup {}: {e:?}", bytes.escape_ascii()));
        assert_eq!(&world.content(&found.node), bytes);
        world.layer.unlink(&world.caller, &world.root, name(bytes)).expect("unlink");
    }
    assert!(world.names(&world.root).is_empty());
}

fn symlinks(world: &World) {
    for (bytes, target) in
        [(&b"short"[..], b"../a/b".to_vec()), (b"long", vec![b'y'; 4000]), (b"bytes", b"\xff\x01 \n".to_vec())]
    {
        let made = world.layer.symlink(&world.caller, &world.root, name(bytes), &target).expect("symlink");
        assert_eq!((made.attr.kind, made.attr.size), (Kind::Symlink, target.len() as u64));
        assert_eq!(world.layer.readlink(&world.caller, &world.find(bytes).unwrap().node), Ok(target));
    }
    assert_eq!(world.layer.symlink(&world.caller, &world.root, name(b"short"), b"x").map(|_| ()), Err(Errno::EEXIST));
    let (file, _) = world.file(b"file", b"");
    assert_eq!(world.layer.readlink(&world.caller, &file.node), Err(Errno::EINVAL));
    world.layer.unlink(&world.caller, &world.root, name(b"short")).expect("unlink of a link");
}

fn hard_links(world: &World) {
    let (made, file) = world.file(b"one", b"content");
    let linked = world.layer.link(&world.caller, &made.node, None, &world.root, name(b"two"));
    if lacks("hard links", &linked) {
        return;
    }
    let linked = linked.expect("link");
    assert_eq!(linked.attr.id, made.attr.id);
    assert_eq!((linked.attr.nlink, world.attr(&made.node).nlink), (2, 2));
    file.write(b"C", 0, WriteOrigin::Caller).expect("write");
    assert_eq!(world.content(&world.find(b"two").unwrap().node), b"Content");
    assert_eq!(
        world.layer.link(&world.caller, &made.node, None, &world.root, name(b"two")).map(|_| ()),
        Err(Errno::EEXIST)
    );
    world.layer.unlink(&world.caller, &world.root, name(b"one")).expect("unlink");
    let left = world.find(b"two").expect("the other name stays");
    assert_eq!((left.attr.id, left.attr.nlink), (made.attr.id, 1));
    assert_eq!(world.content(&left.node), b"Content");
    let directory = world.directory(b"directory");
    let of_directory = world.layer.link(&world.caller, &directory, None, &world.root, name(b"three"));
    assert_eq!(of_directory.map(|_| ()), Err(Errno::EPERM));
}

fn two_names_alike(world: &World) {
    let (made, file) = world.file(b"one", b"");
    let linked = world.layer.link(&world.caller, &made.node, None, &world.root, name(b"two"));
    if lacks("hard links", &linked) {
        return;
    }
    file.write(b"0123456789", 0, WriteOrigin::Caller).expect("write");
    let one = world.find(b"one").expect("lookup");
    let two = world.find(b"two").expect("lookup");
    assert_eq!(one.attr, two.attr);
    assert_eq!(one.attr.size, 10);
    assert_eq!(world.attr(&one.node), world.attr(&two.node));
}

fn special_files(world: &World) {
    for (bytes, kind) in [(&b"fifo"[..], Kind::Fifo), (b"socket", Kind::Socket), (b"file", Kind::File)] {
        let made = world.layer.mknod(&world.caller, &world.root, name(bytes), kind, 0o640, (0, 0));
        let made = made.unwrap_or_else(|e| panic!("mknod {kind:?}: {e:?}"));
        assert_eq!(made.attr.kind, kind);
        assert_eq!(world.find(bytes).unwrap().attr.kind, kind);
        assert_eq!(
            world.layer.mknod(&world.caller, &world.root, name(bytes), kind, 0o640, (0, 0)).map(|_| ()),
            Err(Errno::EEXIST)
        );
    }
    if world.is_root() {
        let made = world.layer.mknod(&world.caller, &world.root, name(b"device"), Kind::Character, 0o640, (1, 3));
        if matches!(made, Err(Errno::EPERM)) {
            println!("note: this root may not make devices");
            return;
        }
        let made = made.expect("mknod");
        assert_eq!((made.attr.kind, made.attr.rdev_major, made.attr.rdev_minor), (Kind::Character, 1, 3));
    }
}

fn deep_tree(world: &World) {
    // 30 levels of 200 bytes: 6,000 bytes, where PATH_MAX is 4,096.
    let level = vec![b'd'; 200];
    let mut parents = vec![world.root.clone()];
    for _ in 0..30 {
        let parent = parents.last().unwrap().clone();
        parents.push(world.directory_in(&parent, &level));
    }
    let deepest = parents.last().unwrap().clone();
    let (made, _) = world.file_in(&deepest, b"file", b"deep");
    assert_eq!(world.content(&made.node), b"deep");
    let mut walked = world.root.clone();
    for _ in 0..30 {
        walked = world.find_in(&walked, &level).expect("lookup on the way down").node;
    }
    assert_eq!(world.find_in(&walked, b"file").expect("lookup").attr.id, made.attr.id);
    world.layer.unlink(&world.caller, &walked, name(b"file")).expect("unlink");
    for parent in parents.iter().take(30).rev() {
        world.layer.rmdir(&world.caller, parent, name(&level)).expect("rmdir on the way up");
    }
}

fn foreign_node(world: &World) {
    let foreign = Node::new(Arc::new("another layer's"));
    assert_eq!(world.layer.getattr(&world.caller, &foreign, None).map(|_| ()), Err(Errno::EIO));
    assert_eq!(world.find_in(&foreign, b"x").map(|_| ()), Err(Errno::EIO));
    assert_eq!(world.layer.open(&world.caller, &foreign, OpenFlags::READ).map(|_| ()), Err(Errno::EIO));
}

fn name_made_again(world: &World) {
    let (first, _) = world.file(b"name", b"first");
    world.layer.unlink(&world.caller, &world.root, name(b"name")).expect("unlink");
    drop(first);
    let directory = world.directory(b"name");
    world.file_in(&directory, b"inside", b"");
    assert_eq!(world.find(b"name").unwrap().attr.kind, Kind::Directory);
}
