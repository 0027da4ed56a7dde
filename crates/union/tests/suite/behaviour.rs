//! What the union promises beyond the contract of layers: when files are copied, what copies keep,
//! who sees them, and what users never see.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::name;
use nacre_testkit::{World, conformance};
use nacre_union::{BranchMode, Style, Union, UnionOptions};
use nacre_vfs::{
    Coherence, Errno, Invalidation, Kind, Layer, Node, OpenFlags, RenameFlags, Scope, SetAttr, SetTime, Time,
    WriteOrigin, XattrFlags,
};
use std::{
    process::Command,
    sync::{Arc, mpsc::channel},
};

/// A lower branch that can be filled, and the union over it.
struct Two {
    lower: World,
    upper: World,
    world: World,
}

impl Two {
    fn new(fill: impl Fn(&World)) -> Two {
        Two::over(mem(), mem(), UnionOptions::default(), fill)
    }

    fn over(upper: Arc<dyn Layer>, lower: Arc<dyn Layer>, options: UnionOptions, fill: impl Fn(&World)) -> Two {
        let lower_world = World::new(Arc::clone(&lower));
        fill(&lower_world);
        let world = World::new(union(vec![(Arc::clone(&upper), "rw"), (lower, "ro")], options));
        Two { lower: lower_world, upper: World::new(upper), world }
    }

    /// The names at the top of the upper branch, without the union's own directories.
    fn above(&self) -> Vec<Vec<u8>> {
        let own = |name: &Vec<u8>| name.starts_with(b".wh..wh.work") || name.starts_with(b".wh..wh.links");
        self.upper.names(&self.upper.root).into_iter().filter(|name| !own(name)).collect()
    }

    /// What is left in the work directory.
    fn work(&self) -> usize {
        self.upper.names(&self.upper.find(b".wh..wh.work").unwrap().node).len()
    }

    fn remount(&self) -> World {
        World::new(union(
            vec![(Arc::clone(&self.upper.layer), "rw"), (Arc::clone(&self.lower.layer), "ro")],
            UnionOptions::default(),
        ))
    }
}

fn unlink(world: &World, parent: &Node, bytes: &[u8]) {
    world.layer.unlink(&world.caller, parent, name(bytes)).unwrap();
}

#[test]
fn files_are_copied_at_the_first_write() {
    let two = Two::new(|lower| drop(lower.file(b"file", b"content")));
    let node = two.world.find(b"file").unwrap().node;
    let file = two.world.open(&node, OpenFlags::READ_WRITE);
    let mut buffer = [0; 16];
    assert_eq!(file.read(&mut buffer, 0), Ok(7));
    file.fsync(false).unwrap();
    assert!(two.above().is_empty(), "opening for writing copies nothing");
    two.world.change(&node, SetAttr::default());
    assert!(two.above().is_empty(), "a change of nothing copies nothing");
    let gone = two.world.layer.removexattr(&two.world.caller, &node, b"user.none");
    assert_eq!(gone, Err(Errno::ENODATA));
    assert!(two.above().is_empty(), "a change that fails copies nothing");
    assert_eq!(file.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    assert_eq!(two.above(), [b"file".to_vec()]);
    assert_eq!(two.lower.content(&two.lower.find(b"file").unwrap().node), b"content");
    assert_eq!(two.work(), 0);
}

#[test]
fn open_files_follow_the_copy() {
    let two = Two::new(|lower| drop(lower.file(b"file", b"content")));
    let entry = two.world.find(b"file").unwrap();
    let (reader, writer) =
        (two.world.open(&entry.node, OpenFlags::READ), two.world.open(&entry.node, OpenFlags::WRITE));
    assert!(writer.append(b" and more") == Ok(9));
    let mut buffer = [0; 32];
    assert_eq!(reader.read(&mut buffer, 0), Ok(16));
    assert_eq!(&buffer[..16], b"content and more");
    assert_eq!(reader.write(b"x", 0, WriteOrigin::Caller), Err(Errno::EBADF));
    let attr = two.world.layer.getattr(&two.world.caller, &entry.node, Some(reader.inner())).unwrap();
    assert_eq!((attr.id, attr.size), (entry.attr.id, 16));
    // The name goes, both go on.
    unlink(&two.world, &two.world.root, b"file");
    assert_eq!(writer.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    assert_eq!(reader.read(&mut buffer, 0), Ok(16));
    assert_eq!(&buffer[..7], b"Content");
}

#[test]
fn removed_files_below_live_while_open() {
    let two = Two::new(|lower| drop(lower.file(b"file", b"content")));
    let entry = two.world.find(b"file").unwrap();
    let (reader, writer) =
        (two.world.open(&entry.node, OpenFlags::READ), two.world.open(&entry.node, OpenFlags::READ_WRITE));
    unlink(&two.world, &two.world.root, b"file");
    let nlink = |file: &nacre_vfs::Opened| {
        two.world.layer.getattr(&two.world.caller, &entry.node, Some(file.inner())).unwrap().nlink
    };
    assert_eq!(nlink(&reader), 0);
    assert_eq!(writer.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    let mut buffer = [0; 16];
    assert_eq!(reader.read(&mut buffer, 0), Ok(7));
    assert_eq!((&buffer[..7], nlink(&writer)), (&b"Content"[..], 0));
    assert!(!two.world.exists(b"file"));
    assert_eq!(two.work(), 0, "a copy without a name leaves nothing behind");
    assert_eq!(two.lower.content(&two.lower.find(b"file").unwrap().node), b"content");
}

const LONG_AGO: Time = Time { sec: 1_000_000_000, nsec: 5 };

#[test]
fn copies_keep_everything() {
    let two = Two::new(|lower| {
        let directory = lower.directory(b"directory");
        let (file, _) = lower.file_in(&directory, b"file", b"content");
        for (key, value) in
            [(&b"user.a"[..], &b"1"[..]), (b"security.capability", b"\x01\0\0\x02"), (b"trusted.b", b"2")]
        {
            lower.layer.setxattr(&lower.caller, &file.node, key, value, XattrFlags::default()).unwrap();
        }
        lower.layer.setxattr(&lower.caller, &directory, b"user.d", b"3", XattrFlags::default()).unwrap();
        lower.change(&file.node, SetAttr { uid: Some(7), gid: Some(8), ..SetAttr::default() });
        lower.change(&file.node, SetAttr { mode: Some(0o6751), ..SetAttr::default() });
        let times =
            SetAttr { atime: Some(SetTime::To(LONG_AGO)), mtime: Some(SetTime::To(LONG_AGO)), ..SetAttr::default() };
        lower.change(&file.node, times);
        lower.change(&directory, SetAttr { mode: Some(0o2770), gid: Some(9), ..SetAttr::default() });
        lower.change(&directory, times);
        lower.change(&lower.root.clone(), times);
    });
    let world = &two.world;
    let directory = world.find(b"directory").unwrap();
    let before = world.find_in(&directory.node, b"file").unwrap();
    world.layer.setxattr(&world.caller, &before.node, b"user.new", b"", XattrFlags::default()).unwrap();
    let after = world.find_in(&directory.node, b"file").unwrap().attr;
    assert_eq!(nacre_vfs::Attr { ctime: after.ctime, btime: after.btime, ..before.attr }, after);
    let parent = world.find(b"directory").unwrap().attr;
    assert_eq!((parent.id, parent.mode, parent.gid, parent.mtime), (directory.attr.id, 0o2770, 9, LONG_AGO));
    let above = two.upper.find(b"directory").unwrap();
    assert_eq!((above.attr.mode, above.attr.mtime), (0o2770, LONG_AGO));
    let mut buffer = [0; 64];
    let get = |node: &Node, key: &[u8], buffer: &mut [u8]| world.layer.getxattr(&world.caller, node, key, buffer);
    assert_eq!(get(&before.node, b"security.capability", &mut buffer), Ok(4));
    assert_eq!(get(&before.node, b"trusted.b", &mut buffer), Ok(1));
    assert_eq!(get(&directory.node, b"user.d", &mut buffer), Ok(1));
    let size = world.layer.listxattr(&world.caller, &before.node, &mut buffer).unwrap();
    let listed = String::from_utf8_lossy(&buffer[..size]).into_owned();
    assert!(!listed.contains("nacre") && listed.contains("user.new") && listed.contains("user.a"), "{listed}");
}

#[test]
fn holes_stay_holes_on_real_storage() {
    let directories = Directories::new();
    let (upper, lower) = (directories.fresh(), directories.fresh());
    let two = Two::over(host(&upper), host(&lower), UnionOptions::default(), |lower| {
        let (_, file) = lower.file(b"sparse", b"");
        file.write(b"middle", 64 << 20, WriteOrigin::Caller).unwrap();
        file.write(b"end", 128 << 20, WriteOrigin::Caller).unwrap();
        let (tail, file) = lower.file(b"tail", b"start");
        drop(file);
        lower.change(&tail.node, SetAttr { size: Some(32 << 20), ..SetAttr::default() });
    });
    for (bytes, size) in [(&b"sparse"[..], (128 << 20) + 3), (b"tail", 32 << 20)] {
        let node = two.world.find(bytes).unwrap().node;
        let changed = two.world.change(&node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
        assert_eq!(changed.size, size);
        assert!(changed.blocks * 512 < 1 << 20, "{} blocks of a sparse file", changed.blocks);
        assert!(two.world.content(&node) == two.lower.content(&two.lower.find(bytes).unwrap().node));
    }
}

#[test]
fn hard_links_stay_together() {
    let two = Two::new(|lower| {
        let directory = lower.directory(b"directory");
        let (one, _) = lower.file(b"one", b"content");
        for (parent, other) in [(&lower.root, &b"two"[..]), (&directory, b"three")] {
            lower.layer.link(&lower.caller, &one.node, None, parent, name(other)).unwrap();
        }
    });
    let check = |world: &World, content: &[u8], links: u32| {
        let directory = world.find(b"directory").unwrap().node;
        let names = [world.find(b"one"), world.find(b"two"), world.find_in(&directory, b"three")];
        let found: Vec<_> = names.into_iter().filter_map(Result::ok).collect();
        assert_eq!(found.len(), links as usize);
        for entry in &found {
            assert_eq!((entry.attr.id, entry.attr.nlink), (found[0].attr.id, links));
            assert_eq!(world.content(&entry.node), content);
        }
        found[0].attr.id
    };
    let id = check(&two.world, b"content", 3);
    two.world
        .open(&two.world.find(b"two").unwrap().node, OpenFlags::WRITE)
        .write(b"C", 0, WriteOrigin::Caller)
        .unwrap();
    assert_eq!(check(&two.world, b"Content", 3), id);
    assert_eq!(two.above(), [b"two".to_vec()], "the other names are not there yet");
    assert_eq!(check(&two.remount(), b"Content", 3), id);
    let world = two.remount();
    unlink(&world, &world.root, b"one");
    assert_eq!(check(&world, b"Content", 2), id);
    unlink(&world, &world.root, b"two");
    assert_eq!(check(&world, b"Content", 1), id, "the name that is only below still shows the copy");
    let world = two.remount();
    assert_eq!(check(&world, b"Content", 1), id);
    unlink(&world, &world.find(b"directory").unwrap().node, b"three");
    let index = two.upper.find(b".wh..wh.links").unwrap().node;
    assert!(two.upper.names(&index).is_empty(), "the index keeps nothing that has no name");
}

#[test]
fn names_of_full_length_are_hidden() {
    let long: Vec<u8> = vec![b'n'; 255];
    let two = Two::new(|lower| drop(lower.file(&vec![b'n'; 255], b"below")));
    unlink(&two.world, &two.world.root, &long);
    assert!(!two.world.exists(&long));
    let world = two.remount();
    assert!(!world.exists(&long) && world.names(&world.root).is_empty());
    world.file(&long, b"new");
    let world = two.remount();
    assert_eq!(world.names(&world.root), std::slice::from_ref(&long));
    assert_eq!(world.attr(&world.find(&long).unwrap().node).size, 3);
}

#[test]
fn the_unions_own_names_are_nobodys() {
    let two = Two::new(|lower| drop(lower.file(b"file", b"")));
    unlink(&two.world, &two.world.root, b"file");
    let (layer, caller, root) = (&two.world.layer, &two.world.caller, &two.world.root);
    for own in [&b".wh.file"[..], b".wh..wh.work", b".wh..wh.links", b".wh.new"] {
        assert_eq!(layer.lookup(caller, root, name(own)).map(drop), Err(Errno::ENOENT));
        assert_eq!(layer.mkdir(caller, root, name(own), 0o755).map(drop), Err(Errno::EPERM));
        assert_eq!(layer.unlink(caller, root, name(own)), Err(Errno::ENOENT));
        assert_eq!(layer.rmdir(caller, root, name(own)), Err(Errno::ENOENT));
    }
    two.world.file(b"plain", b"");
    assert_eq!(layer.rename(caller, root, name(b"plain"), root, name(b".wh.plain"), RenameFlags(0)), Err(Errno::EPERM));
    assert_eq!(two.world.names(root), [b"plain".to_vec()]);
    let node = two.world.find(b"plain").unwrap().node;
    let own = b"trusted.nacre.origin";
    assert_eq!(layer.setxattr(caller, &node, own, b"y", XattrFlags::default()), Err(Errno::EPERM));
    assert_eq!(layer.getxattr(caller, &node, own, &mut []), Err(Errno::ENODATA));
    // Those of an overlay file system over the union are none of its own.
    let directory = two.world.directory(b"directory");
    two.world.file_in(&directory, b"inside", b"");
    for key in [&b"trusted.overlay.opaque"[..], b"user.overlay.opaque"] {
        assert_eq!(layer.getxattr(caller, &directory, key, &mut []), Err(Errno::ENODATA));
        assert_eq!(layer.setxattr(caller, &directory, key, b"x", XattrFlags::default()), Ok(()));
        let mut names = [0; 100];
        let length = layer.listxattr(caller, &directory, &mut names).unwrap();
        assert!(names[..length].split(|byte| *byte == 0).any(|name| name == key));
        assert_eq!(layer.getxattr(caller, &directory, key, &mut []), Ok(1));
        assert_eq!(layer.removexattr(caller, &directory, key), Ok(()));
        assert_eq!(layer.getxattr(caller, &directory, key, &mut []), Err(Errno::ENODATA));
    }
}

#[test]
fn a_union_of_read_only_branches_is_read_only() {
    let (one, two) = (mem(), mem());
    conformance::populate(Arc::clone(&one));
    World::new(Arc::clone(&two)).file(b"below", b"");
    let world = World::new(union(vec![(one, "ro"), (two, "ro")], UnionOptions::default()));
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    assert_eq!(world.layer.create(&world.caller, &world.root, name(b"new"), 0o644, flags).map(drop), Err(Errno::EROFS));
    assert_eq!(world.layer.unlink(&world.caller, &world.root, name(b"below")), Err(Errno::EROFS));
    let node = world.find(b"below").unwrap().node;
    assert_eq!(world.layer.open(&world.caller, &node, OpenFlags::WRITE).map(drop), Err(Errno::EROFS));
    let change = SetAttr { mode: Some(0), ..SetAttr::default() };
    assert_eq!(world.layer.setattr(&world.caller, &node, None, &change).map(drop), Err(Errno::EROFS));
}

#[test]
fn the_kernel_gets_only_files_that_stay() {
    let directories = Directories::new();
    let (upper, lower) = (directories.fresh(), directories.fresh());
    let two =
        Two::over(host(&upper), host(&lower), UnionOptions::default(), |lower| drop(lower.file(b"below", b"content")));
    let node = two.world.find(b"below").unwrap().node;
    let file = two.world.open(&node, OpenFlags::READ);
    assert!(file.backing().is_none(), "a file that may still be copied up");
    two.world.change(&node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
    assert!(file.backing().is_some());
    let (_, above) = two.world.file(b"above", b"");
    assert!(above.backing().is_some());
    let fixed = World::new(union(vec![(host(&lower), "ro")], UnionOptions::default()));
    assert!(fixed.open(&fixed.find(b"below").unwrap().node, OpenFlags::READ).backing().is_some());
}

#[test]
fn too_much_below_is_not_copied_for_a_rename() {
    let fill = |lower: &World| {
        let directory = lower.directory(b"directory");
        for index in 0..20 {
            lower.file_in(&directory, format!("{index}").as_bytes(), b"");
        }
    };
    for (limit, wanted) in [(19, Err(Errno::EXDEV)), (20, Ok(()))] {
        let options = UnionOptions { directory_copy_limit: limit, ..UnionOptions::default() };
        let two = Two::over(mem(), mem(), options, fill);
        let (layer, root) = (&two.world.layer, &two.world.root);
        assert_eq!(
            layer.rename(&two.world.caller, root, name(b"directory"), root, name(b"moved"), RenameFlags(0)),
            wanted
        );
        assert_eq!(two.world.exists(b"directory"), wanted.is_err());
    }
}

#[test]
fn layers_of_others_are_read() {
    let two = Two::over(mem(), mem(), UnionOptions { whiteout: Style::Chardev, ..UnionOptions::default() }, |lower| {
        for file in [&b"a"[..], b"b", b"c", b"keep"] {
            lower.file(file, b"");
        }
        lower.file_in(&lower.directory(b"opaque"), b"hidden", b"");
        lower.file_in(&lower.directory(b"oci"), b"hidden", b"");
        lower.file_in(&lower.directory(b"replaced"), b"hidden", b"");
    });
    let (layer, caller, root) = (&two.upper.layer, &two.upper.caller, &two.upper.root);
    layer.mknod(caller, root, name(b"a"), Kind::Character, 0, (0, 0)).unwrap();
    two.upper.file(b".wh.b", b"");
    let opaque = two.upper.directory(b"opaque");
    layer.setxattr(caller, &opaque, b"trusted.overlay.opaque", b"y", XattrFlags::default()).unwrap();
    two.upper.file_in(&two.upper.directory(b"oci"), b".wh..wh..opq", b"");
    two.upper.directory(b"replaced");
    two.upper.file(b".wh.replaced", b"");
    let world = two.remount();
    assert_eq!(
        world.names(&world.root),
        [b"c".to_vec(), b"keep".to_vec(), b"oci".to_vec(), b"opaque".to_vec(), b"replaced".to_vec()]
    );
    for directory in [&b"opaque"[..], b"oci", b"replaced"] {
        assert!(world.names(&world.find(directory).unwrap().node).is_empty());
    }
}

#[test]
fn directories_that_overlay_has_renamed_are_found_below() {
    let two = Two::new(|lower| {
        for directory in [&b"first"[..], b"second"] {
            let inner = lower.directory_in(&lower.directory(directory), b"inner");
            lower.file_in(&inner, directory, b"");
        }
    });
    // As the kernel's overlay file system leaves it: `first` renamed to `moved`, `second/inner` to
    // `taken` at the top.
    let (layer, caller) = (&two.upper.layer, &two.upper.caller);
    for (directory, redirect) in
        [(&b"moved"[..], &b"first"[..]), (b"taken", b"/second/inner"), (b"lost", b"/second/../first")]
    {
        let node = two.upper.directory(directory);
        layer.setxattr(caller, &node, b"trusted.overlay.redirect", redirect, XattrFlags::default()).unwrap();
    }
    two.upper.file(b".wh.first", b"");
    two.upper.file_in(&two.upper.directory(b"second"), b".wh.inner", b"");
    let world = two.remount();
    assert_eq!(world.names(&world.root), [b"lost".to_vec(), b"moved".to_vec(), b"second".to_vec(), b"taken".to_vec()]);
    let inner = world.find_in(&world.find(b"moved").unwrap().node, b"inner").unwrap().node;
    assert_eq!(world.names(&inner), [b"first".to_vec()]);
    let taken = world.find(b"taken").unwrap().node;
    assert_eq!(world.names(&taken), [b"second".to_vec()]);
    assert!(world.names(&world.find(b"lost").unwrap().node).is_empty());
    assert!(world.names(&world.find(b"second").unwrap().node).is_empty());
    // They can be changed and renamed like others.
    world
        .open(&world.find_in(&inner, b"first").unwrap().node, OpenFlags::WRITE)
        .write(b"x", 0, WriteOrigin::Caller)
        .unwrap();
    let rename = |from: &[u8], to: &[u8]| {
        world.layer.rename(&world.caller, &world.root, name(from), &world.root, name(to), RenameFlags(0)).unwrap();
    };
    rename(b"moved", b"again");
    rename(b"taken", b"first");
    let world = two.remount();
    let inner = world.find_in(&world.find(b"again").unwrap().node, b"inner").unwrap().node;
    assert_eq!(world.content(&world.find_in(&inner, b"first").unwrap().node), b"x");
    assert_eq!(world.names(&world.find(b"first").unwrap().node), [b"second".to_vec()]);
}

#[test]
fn what_cannot_stand_is_refused() {
    let refused = |branches: Vec<(Arc<dyn Layer>, BranchMode)>, options| {
        Union::new(branches, options).map(drop).unwrap_err().to_string()
    };
    assert!(refused(Vec::new(), UnionOptions::default()).contains("needs a branch"));
    let one = mem();
    let twice = vec![(Arc::clone(&one), BranchMode::rw()), (one, BranchMode::ro())];
    assert!(refused(twice, UnionOptions::default()).contains("same directory"));
    let shown = UnionOptions { show_whiteouts: true, ..UnionOptions::default() };
    assert!(refused(vec![(mem(), BranchMode::rw())], shown).contains("read-only"));
}

#[test]
fn the_weakest_branch_rules_and_changes_are_told() {
    let directories = Directories::new();
    let (upper, lower) = (directories.fresh(), directories.fresh());
    std::fs::write(lower.join("file"), b"content").unwrap();
    let two = Two::over(host(&upper), host(&lower), UnionOptions::default(), |_| {});
    let (sender, receiver) = channel();
    two.world.layer.watch(sender);
    let entry = two.world.find(b"file").unwrap();
    let weakest = [&two.upper, &two.lower]
        .map(|world| world.layer.coherence(Scope::Names(&world.root)))
        .into_iter()
        .max()
        .unwrap();
    assert!(two.world.layer.coherence(Scope::Names(&two.world.root)) >= weakest.min(Coherence::Watched));
    // Somebody else: what this process does itself is no news.
    let script = "printf 'changed content' > file && : > new";
    assert!(Command::new("sh").args(["-c", script]).current_dir(&lower).status().unwrap().success());
    let root = two.world.attr(&two.world.root).id;
    let (mut content, mut names) = (false, false);
    while !(content && names) {
        match receiver.recv().expect("the branches stop telling") {
            Invalidation::Content { id } | Invalidation::Attributes { id } => content |= id == entry.attr.id,
            Invalidation::Entry { parent, name } | Invalidation::Forget { parent, name } => {
                names |= parent == root && *name == *b"new"
            }
            Invalidation::Names => names = true,
            Invalidation::Everything => (content, names) = (true, true),
        }
    }
    assert_eq!(two.world.content(&two.world.find(b"file").unwrap().node), b"changed content");
}

#[test]
fn many_threads_copy_up_at_once() {
    let two = Two::new(|lower| {
        let directory = lower.directory(b"directory");
        for index in 0..40 {
            lower.file_in(&directory, format!("{index}").as_bytes(), &[b'.'; 64]);
        }
    });
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let world = &two.world;
            scope.spawn(move || {
                let directory = world.find(b"directory").unwrap().node;
                for index in 0..40 {
                    let node = world.find_in(&directory, format!("{index}").as_bytes()).unwrap().node;
                    let file = world.open(&node, OpenFlags::READ_WRITE);
                    assert_eq!(file.write(&[b'0' + thread], u64::from(thread), WriteOrigin::Caller), Ok(1));
                    assert_eq!(world.names(&directory).len(), 40);
                }
            });
        }
    });
    let check = |world: &World| {
        let directory = world.find(b"directory").unwrap().node;
        for index in 0..40 {
            let content = world.content(&world.find_in(&directory, format!("{index}").as_bytes()).unwrap().node);
            assert_eq!((content.len(), &content[..5]), (64, &b"0123."[..]));
        }
    };
    check(&two.world);
    check(&two.remount());
    assert_eq!(two.work(), 0);
}

#[test]
fn hidden_files_on_writable_branches_are_not_destroyed() {
    let (top, bottom) = (mem(), mem());
    for layer in [&top, &bottom] {
        let world = World::new(Arc::clone(layer));
        world.file_in(&world.directory(b"directory"), b"both", b"kept");
    }
    let world = World::new(union(vec![(top, "rw"), (Arc::clone(&bottom), "rw")], UnionOptions::default()));
    let directory = world.find(b"directory").unwrap().node;
    unlink(&world, &directory, b"both");
    assert!(world.names(&directory).is_empty());
    world.layer.rmdir(&world.caller, &world.root, name(b"directory")).unwrap();
    assert!(!world.exists(b"directory"));
    let below = World::new(bottom);
    let kept = below.find_in(&below.find(b"directory").unwrap().node, b"both").unwrap();
    assert_eq!(below.content(&kept.node), b"kept");
}

#[test]
fn a_large_directory_is_renamed_without_copying() {
    let options = || UnionOptions { directory_copy_limit: 5, directory_redirect: true, ..UnionOptions::default() };
    let two = Two::over(mem(), mem(), options(), |lower| {
        let inner = lower.directory_in(&lower.directory(b"directory"), b"inner");
        for index in 0..20 {
            lower.file_in(&inner, format!("{index}").as_bytes(), b"below");
        }
        lower.directory(b"elsewhere");
    });
    let world = &two.world;
    let rename = |world: &World, from: (&Node, &[u8]), to: (&Node, &[u8])| {
        world.layer.rename(&world.caller, from.0, name(from.1), to.0, name(to.1), RenameFlags(0)).unwrap();
    };
    let before = world.find(b"directory").unwrap().attr.id;
    rename(world, (&world.root, b"directory"), (&world.root, b"moved"));
    let moved = world.find(b"moved").unwrap();
    assert_eq!(moved.attr.id, before);
    rename(world, (&moved.node, b"inner"), (&world.find(b"elsewhere").unwrap().node, b"again"));
    let mut path = [0; 64];
    let above = two.upper.find_in(&two.upper.find(b"elsewhere").unwrap().node, b"again").unwrap().node;
    let size = two.upper.layer.getxattr(&two.upper.caller, &above, b"trusted.overlay.redirect", &mut path).unwrap();
    assert_eq!(&path[..size], b"/directory/inner");
    assert!(two.upper.names(&above).is_empty(), "nothing has been copied");
    let branches = || vec![(Arc::clone(&two.upper.layer), "rw"), (Arc::clone(&two.lower.layer), "ro")];
    for world in [World::new(union(branches(), options())), two.remount()] {
        assert!(!world.exists(b"directory") && world.names(&world.find(b"moved").unwrap().node).is_empty());
        let again = world.find_in(&world.find(b"elsewhere").unwrap().node, b"again").unwrap().node;
        assert_eq!(world.names(&again).len(), 20);
        let file = world.find_in(&again, b"7").unwrap().node;
        world.open(&file, OpenFlags::WRITE).write(b"B", 0, WriteOrigin::Caller).unwrap();
        assert_eq!(world.content(&file), b"Below");
    }
}
