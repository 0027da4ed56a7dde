//! Character devices 0/0, which are whiteouts to others: those that users make are devices,
//! wherever they go.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_union::{Style, UnionOptions};
use nacre_vfs::{Caller, Dev, Entry, Errno, Kind, Layer, Name, Node, RenameFlags, Result, SetAttr};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

fn is_device(world: &World, bytes: &[u8]) -> bool {
    let attr = world.find(bytes).unwrap().attr;
    let listed = world.list(&world.root, true, 3).into_iter().find(|listed| listed.name == bytes).expect("listed");
    listed.entry.expect("attributes").attr.id == attr.id
        && (attr.kind, attr.rdev_major, attr.rdev_minor) == (Kind::Character, 0, 0)
}

fn live(fresh: &dyn Fn() -> Arc<dyn Layer>, whiteout: Style) {
    let (upper, lower) = (fresh(), fresh());
    let below = World::new(Arc::clone(&lower));
    for file in [&b"below"[..], b"hidden"] {
        lower.mknod(&below.caller, &below.root, name(file), Kind::Character, 0o600, (0, 0)).unwrap();
    }
    let options = || UnionOptions { whiteout, sync: false, ..UnionOptions::default() };
    let make = || World::new(union(vec![(Arc::clone(&upper), "rw"), (Arc::clone(&lower), "ro")], options()));
    let world = make();
    let (layer, caller, root) = (&world.layer, &world.caller, &world.root);
    // Marks do not count on the lower branch: what is there is a device, and so is its copy.
    assert!(is_device(&world, b"below"));
    let node = world.find(b"below").unwrap().node;
    layer.setattr(caller, &node, None, &SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    assert!(is_device(&world, b"below"));
    layer.unlink(caller, root, name(b"hidden")).unwrap();
    assert!(!world.exists(b"hidden"));
    let made = layer.mknod(caller, root, name(b"made"), Kind::Character, 0o644, (0, 0)).unwrap();
    assert_eq!((made.attr.kind, made.attr.mode), (Kind::Character, 0o644));
    // In the place of a whiteout, too.
    layer.mknod(caller, root, name(b"hidden"), Kind::Character, 0o644, (0, 0)).unwrap();
    layer.link(caller, &made.node, None, root, name(b"linked")).unwrap();
    layer.rename(caller, root, name(b"made"), root, name(b"moved"), RenameFlags(0)).unwrap();
    for world in [&world, &make()] {
        for file in [&b"below"[..], b"hidden", b"linked", b"moved"] {
            assert!(is_device(world, file), "{}", file.escape_ascii());
        }
        assert_eq!(world.names(&world.root).len(), 4);
    }
    let world = make();
    for file in [&b"below"[..], b"hidden", b"linked", b"moved"] {
        world.layer.unlink(&world.caller, &world.root, name(file)).unwrap();
    }
    for world in [world, make()] {
        assert!(world.names(&world.root).is_empty());
    }
}

#[test]
fn in_memory() {
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        live(&mem, style);
    }
}

#[test]
fn in_real_directories() {
    if World::new(mem()).is_root() {
        nacre_layers::host::prepare_worker().unwrap();
        let directories = Directories::new();
        for style in [Style::Wh, Style::Chardev, Style::Xattr] {
            live(&|| host(&directories.fresh()), style);
        }
    }
}

#[test]
fn the_device_that_a_rename_leaves_belongs_to_its_caller() {
    let world = World::new(union(vec![(mem(), "rw"), (mem(), "ro")], UnionOptions::default()));
    let (layer, root) = (&world.layer, &world.root);
    let caller = Caller { uid: 1000, gid: 100, ..world.caller };
    layer.mknod(&caller, root, name(b"file"), Kind::File, 0o644, (0, 0)).unwrap();
    layer.rename(&caller, root, name(b"file"), root, name(b"moved"), RenameFlags(RenameFlags::WHITEOUT)).unwrap();
    assert!(is_device(&world, b"file"));
    let attr = world.find(b"file").unwrap().attr;
    assert_eq!((attr.uid, attr.gid), (1000, 100));
}

/// Storage with a quota that has no room for another device.
struct Full {
    below: Arc<dyn Layer>,
}

impl Layer for Full {
    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        if kind == Kind::Character {
            Err(Errno::EDQUOT)
        } else {
            self.below.mknod(caller, parent, name, kind, mode, dev)
        }
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold getattr access readlink readdir statfs syncfs getxattr listxattr ioctl coherence watch capabilities describe tmpfile setattr create mkdir symlink link unlink rmdir rename fsyncdir setxattr removexattr open }
}

#[test]
fn a_device_that_a_quota_refuses_leaves_both_files() {
    let world =
        World::new(union(vec![(Arc::new(Full { below: mem() }), "rw"), (mem(), "ro")], UnionOptions::default()));
    let (layer, root) = (&world.layer, &world.root);
    for file in [&b"file"[..], b"other"] {
        layer.mknod(&world.caller, root, name(file), Kind::File, 0o644, (0, 0)).unwrap();
    }
    let ids = || [&b"file"[..], b"other"].map(|name| world.find(name).map(|found| found.attr.id));
    let before = ids();
    let flags = RenameFlags(RenameFlags::WHITEOUT);
    let refused = layer.rename(&world.caller, root, name(b"file"), root, name(b"other"), flags);
    assert_eq!(refused, Err(Errno::EDQUOT));
    assert_eq!(ids(), before);
    assert_eq!(world.names(root).len(), 2);
}

/// Storage of a process that is killed in the middle of a rename.
struct Killed {
    below: Arc<dyn Layer>,
    is_dead: AtomicBool,
}

impl Layer for Killed {
    fn rename(
        &self,
        caller: &Caller,
        from: &Node,
        name: Name<'_>,
        to: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        if new_name.bytes() == b"moved" {
            self.is_dead.store(true, SeqCst);
        }
        if self.is_dead.load(SeqCst) {
            return Err(Errno::EIO);
        }
        self.below.rename(caller, from, name, to, new_name, flags)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        if self.is_dead.load(SeqCst) { Err(Errno::EIO) } else { self.below.unlink(caller, parent, name) }
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold getattr access readlink readdir statfs syncfs getxattr listxattr ioctl coherence watch capabilities describe tmpfile setattr create mkdir mknod symlink link rmdir fsyncdir setxattr removexattr open }
}

#[test]
fn nothing_of_a_device_stays_where_the_process_is_killed() {
    let upper = mem();
    let killed = Arc::new(Killed { below: Arc::clone(&upper), is_dead: AtomicBool::new(false) });
    let world = World::new(union(vec![(killed, "rw"), (mem(), "ro")], UnionOptions::default()));
    let directory = world.directory(b"d");
    world.file_in(&directory, b"file", b"content");
    let flags = RenameFlags(RenameFlags::WHITEOUT);
    let done = world.layer.rename(&world.caller, &directory, name(b"file"), &world.root, name(b"moved"), flags);
    assert_eq!(done, Err(Errno::EIO));
    drop(world);
    let next = World::new(union(vec![(Arc::clone(&upper), "rw"), (mem(), "ro")], UnionOptions::default()));
    assert_eq!(next.content(&next.find_in(&next.find(b"d").unwrap().node, b"file").unwrap().node), b"content");
    let branch = World::new(upper);
    assert_eq!(branch.names(&branch.find(b"d").unwrap().node), [b"file"]);
    let work = branch.find(b".wh..wh.work").unwrap().node;
    assert!(branch.names(&work).is_empty(), "{:?}", branch.names(&work));
}
