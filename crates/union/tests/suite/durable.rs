//! What goes from one branch because something on another stands for it goes when that is on stable
//! storage: branches may be different file systems, and a power cut may keep the changes of one and
//! lose those of the other.

use crate::unions::{
    mem,
    recorded::{Event, EventLog, Recorded, What, assert_durable_before, last},
    union_itself,
};
use nacre_testkit::name;
use nacre_testkit::{World, model::tree};
use nacre_union::{Control, UnionOptions};
use nacre_vfs::{Errno, FileId, Layer, OpenFlags, RenameFlags, Result, SetAttr};
use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

/// What makes a directory opaque.
const OPAQUE: &[u8] = b".wh..wh..opq";

struct Scene {
    below: Vec<World>,
    record: Arc<EventLog>,
    world: World,
    control: Control,
}

fn came(branch: usize, directory: FileId, name: &[u8]) -> Event {
    (branch, directory, What::Came(name.to_vec()))
}

fn went(branch: usize, directory: FileId, name: &[u8]) -> Event {
    (branch, directory, What::Went(name.to_vec()))
}

impl Scene {
    /// Branches with these files, each with its directories: its path is its content.
    fn new(branches: &[(&str, &[&str])], options: UnionOptions) -> Scene {
        let record = EventLog::new();
        let below: Vec<World> = branches.iter().map(|_| World::new(mem())).collect();
        let mut members: Vec<(Arc<dyn Layer>, &str)> = Vec::new();
        for (branch, (world, (mode, paths))) in below.iter().zip(branches).enumerate() {
            for path in *paths {
                let mut at = world.root.clone();
                let (parents, last) = path.rsplit_once('/').unwrap_or(("", path));
                for part in parents.split('/').filter(|part| !part.is_empty()) {
                    at = match world.find_in(&at, part.as_bytes()) {
                        Ok(found) => found.node,
                        Err(_) => world.directory_in(&at, part.as_bytes()),
                    };
                }
                world.file_in(&at, last.as_bytes(), path.as_bytes());
            }
            members.push((
                Arc::new(Recorded { below: Arc::clone(&world.layer), branch, record: Arc::clone(&record) }),
                mode,
            ));
        }
        let union = union_itself(members, options);
        let control = union.control();
        record.take();
        Scene { below, record, world: World::new(union), control }
    }

    /// The identity of a directory on a branch.
    fn directory(&self, branch: usize, path: &str) -> FileId {
        let world = &self.below[branch];
        let mut at = world.root.clone();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at = world.find_in(&at, part.as_bytes()).unwrap().node;
        }
        world.attr(&at).id
    }

    fn rename(&self, from: &[u8], to: &[u8]) -> Result<()> {
        let (world, root) = (&self.world, &self.world.root);
        world.layer.rename(&world.caller, root, name(from), root, name(to), RenameFlags(0))
    }

    fn drain(&self, branch: usize) -> u64 {
        self.control.drain(self.control.list()[branch].slot, &mut |_| true).unwrap().left
    }

    fn content(&self, bytes: &[u8]) -> Vec<u8> {
        self.world.content(&self.world.find(bytes).unwrap().node)
    }
}

#[test]
fn a_file_that_comes_up_leaves_the_lower_branch_when_its_name_above_lasts() {
    let branches: [(&str, &[&str]); 2] = [("rw", &[]), ("rw+moo", &["directory/file"])];
    let open = |scene: &Scene| {
        let directory = scene.world.find(b"directory").unwrap().node;
        scene.world.content(&scene.world.find_in(&directory, b"file").unwrap().node)
    };
    let scene = Scene::new(&branches, UnionOptions::default());
    assert_eq!(open(&scene), b"directory/file");
    let (above, below) = (scene.directory(0, "directory"), scene.directory(1, "directory"));
    assert_durable_before(&scene.record.take(), &came(0, above, b"file"), &went(1, below, b"file"));

    let scene = Scene::new(&branches, UnionOptions::default());
    scene.record.fail(0, true);
    assert_eq!(open(&scene), b"directory/file");
    let events = scene.record.take();
    assert!(!events.contains(&went(1, scene.directory(1, "directory"), b"file")), "{events:#?}");

    let scene = Scene::new(&branches, UnionOptions { sync: false, ..UnionOptions::default() });
    assert_eq!(open(&scene), b"directory/file");
    let events = scene.record.take();
    assert!(events.contains(&went(1, scene.directory(1, "directory"), b"file")), "{events:#?}");
    assert!(!events.iter().any(|(_, _, what)| *what == What::Synced), "nobody wants it: {events:#?}");
}

#[test]
fn a_linked_file_leaves_the_lower_branch_when_the_index_lasts() {
    // The name that a branch below shows as well cannot be given up where the file is.
    let scene = Scene::new(&[("rw", &["above"]), ("rw", &["one"]), ("ro", &["one"])], UnionOptions::default());
    let low = &scene.below[1];
    low.layer.link(&low.caller, &low.find(b"one").unwrap().node, None, &low.root, name(b"two")).unwrap();
    scene.rename(b"one", b"above").unwrap();
    let events = scene.record.take();
    let [above, below] = [0, 1].map(|branch| scene.directory(branch, ""));
    let index = scene.directory(0, ".wh..wh.links");
    let entered = events
        .iter()
        .find(|(branch, directory, what)| (*branch, *directory) == (0, index) && matches!(what, What::Came(_)));
    assert_durable_before(&events, entered.expect("an entry"), &went(1, below, b"one"));
    assert_durable_before(
        &events[..=last(&events, &went(1, below, b"one"))],
        &came(0, above, b"one"),
        &went(1, below, b"one"),
    );
    assert_eq!((scene.content(b"above"), scene.content(b"two")), (b"one".to_vec(), b"one".to_vec()));
    assert_eq!(scene.world.id(b"above"), scene.world.id(b"two"));
}

#[test]
fn a_file_below_that_a_rename_replaces_goes_when_the_new_name_lasts() {
    let branches: [(&str, &[&str]); 2] = [("rw", &["new"]), ("rw", &["old"])];
    for fails in [false, true] {
        let scene = Scene::new(&branches, UnionOptions::default());
        scene.record.fail(0, fails);
        scene.rename(b"new", b"old").unwrap();
        assert_eq!((scene.content(b"old"), scene.world.exists(b"new")), (b"new".to_vec(), false));
        let events = scene.record.take();
        let [above, below] = [0, 1].map(|branch| scene.directory(branch, ""));
        match fails {
            false => assert_durable_before(&events, &came(0, above, b"old"), &went(1, below, b"old")),
            true => assert!(!events.contains(&went(1, below, b"old")), "{events:#?}"),
        }
    }
}

#[test]
fn a_file_above_that_a_rename_replaces_goes_when_the_new_name_lasts() {
    let branches: [(&str, &[&str]); 2] = [("rw", &["old"]), ("rw", &["new"])];
    let scene = Scene::new(&branches, UnionOptions::default());
    scene.rename(b"new", b"old").unwrap();
    let events = scene.record.take();
    let [above, below] = [0, 1].map(|branch| scene.directory(branch, ""));
    assert_durable_before(&events, &came(1, below, b"old"), &went(0, above, b"old"));
    assert_durable_before(&events, &went(0, above, b"old"), &went(1, below, b"new"));
    assert_eq!((scene.content(b"old"), scene.world.exists(b"new")), (b"new".to_vec(), false));

    // Nothing has changed where the new name does not last.
    let scene = Scene::new(&branches, UnionOptions::default());
    let before = tree(&scene.world);
    scene.record.fail(1, true);
    assert_eq!(scene.rename(b"new", b"old"), Err(Errno::EIO));
    assert_eq!(tree(&scene.world), before);

    // The new file has both names where the removal of the old one does not last.
    let scene = Scene::new(&branches, UnionOptions::default());
    let new = scene.world.id(b"new");
    scene.record.fail(0, true);
    assert_eq!(scene.rename(b"new", b"old"), Err(Errno::EIO));
    assert_eq!((scene.content(b"old"), scene.content(b"new")), (b"new".to_vec(), b"new".to_vec()));
    assert_eq!((scene.world.id(b"old"), scene.world.id(b"new")), (new, new));
}

/// Somebody changes the mode of a file while it goes to another branch: either the copy has it, or
/// he is told.
#[test]
fn no_change_is_lost_while_a_file_goes_up() {
    let scene = Scene::new(&[("rw", &["above"]), ("rw", &["file"]), ("ro", &["file"])], UnionOptions::default());
    let node = scene.world.find(b"file").unwrap().node;
    let (say, done) = mpsc::channel();
    let (world, changed) = (scene.world.clone(), node.clone());
    scene.record.at_open(1, move || {
        std::thread::spawn(move || {
            let mode = SetAttr { mode: Some(0o600), size: Some(2), ..SetAttr::default() };
            say.send(world.layer.setattr(&world.caller, &changed, None, &mode).map(|attr| attr.mode)).unwrap();
        });
        // Whoever is not held up would be through by then; whoever is, is seen to be through below.
        std::thread::sleep(Duration::from_millis(50));
    });
    scene.rename(b"file", b"above").unwrap();
    assert_eq!(done.recv().unwrap(), Ok(0o600));
    let found = scene.world.find(b"above").unwrap();
    assert_eq!((found.attr.mode, found.attr.size), (0o600, 2));
    assert_eq!(scene.below[0].find(b"above").unwrap().attr.mode, 0o600);
    assert!(!scene.below[1].exists(b"file"));
    assert_eq!(scene.world.open(&node, OpenFlags::READ).read(&mut [0; 9], 0), Ok(2));
}

#[test]
fn a_drained_directory_is_opaque_no_more_when_another_one_is_for_good() {
    let branches: [(&str, &[&str]); 3] = [("rw", &["d/.wh..wh..opq", "d/mine"]), ("rw", &[]), ("ro", &["d/hidden"])];
    let scene = Scene::new(&branches, UnionOptions::default());
    let (before, old) = (tree(&scene.world), scene.directory(0, "d"));
    assert_eq!(scene.drain(0), 0);
    assert_durable_before(&scene.record.take(), &came(1, scene.directory(1, "d"), OPAQUE), &went(0, old, OPAQUE));
    assert_eq!(tree(&scene.world), before);

    let scene = Scene::new(&branches, UnionOptions::default());
    scene.record.fail(1, true);
    assert_ne!(scene.drain(0), 0);
    let events = scene.record.take();
    assert!(!events.contains(&went(0, scene.directory(0, "d"), OPAQUE)), "{events:#?}");
    assert_eq!(tree(&scene.world), before);
    scene.record.fail(1, false);
    assert_eq!(scene.drain(0), 0);
    assert_eq!(tree(&scene.world), before);
}

#[test]
fn a_drained_directory_goes_when_its_whiteouts_are_elsewhere_for_good() {
    let branches: [(&str, &[&str]); 3] = [("rw", &["d/.wh.hidden"]), ("rw", &[]), ("ro", &["d/hidden", "d/shown"])];
    let scene = Scene::new(&branches, UnionOptions::default());
    let (before, root) = (tree(&scene.world), scene.directory(0, ""));
    assert_eq!(scene.drain(0), 0);
    assert_durable_before(&scene.record.take(), &came(1, scene.directory(1, "d"), b".wh.hidden"), &went(0, root, b"d"));
    assert_eq!(tree(&scene.world), before);

    // What an attempt has hidden that could not make it durable is made so by the next one.
    let branches: [(&str, &[&str]); 3] = [branches[0], ("rw", &["d/own"]), branches[2]];
    let scene = Scene::new(&branches, UnionOptions::default());
    let before = tree(&scene.world);
    scene.record.fail(1, true);
    assert_ne!(scene.drain(0), 0);
    let first = scene.record.take();
    let whiteout = came(1, scene.directory(1, "d"), b".wh.hidden");
    assert!(first.contains(&whiteout) && !first.contains(&went(0, root, b"d")), "{first:#?}");
    scene.record.fail(1, false);
    assert_eq!(scene.drain(0), 0);
    assert_durable_before(&[first, scene.record.take()].concat(), &whiteout, &went(0, scene.directory(0, ""), b"d"));
    assert_eq!(tree(&scene.world), before);

    // Those of the root stay, and are elsewhere for good all the same.
    let scene = Scene::new(&[("rw", &[".wh.hidden"]), ("rw", &[]), ("ro", &["hidden"])], UnionOptions::default());
    assert_eq!(scene.drain(0), 0);
    let events = scene.record.take();
    let root = scene.directory(1, "");
    assert!(last(&events, &came(1, root, b".wh.hidden")) < last(&events, &(1, root, What::Synced)), "{events:#?}");
}

#[test]
fn a_drained_whiteout_goes_when_the_directory_above_ends_by_itself_for_good() {
    let branches: [(&str, &[&str]); 3] = [("rw", &["p/d/mine"]), ("rw", &["p/.wh.d"]), ("ro", &["p/d/hidden"])];
    let scene = Scene::new(&branches, UnionOptions::default());
    let (before, root) = (tree(&scene.world), scene.directory(1, ""));
    assert_eq!(scene.drain(1), 0);
    assert_durable_before(&scene.record.take(), &came(0, scene.directory(0, "p/d"), OPAQUE), &went(1, root, b"p"));
    assert_eq!(tree(&scene.world), before);
}

#[test]
fn the_index_lets_a_file_go_when_nothing_shows_what_lies_below() {
    let scene = Scene::new(&[("rw", &[]), ("ro", &["one"])], UnionOptions::default());
    let low = &scene.below[1];
    low.layer.link(&low.caller, &low.find(b"one").unwrap().node, None, &low.root, name(b"two")).unwrap();
    let world = &scene.world;
    let unlink = |bytes: &[u8]| world.layer.unlink(&world.caller, &world.root, name(bytes));
    // From now on both names show a copy: one above, the other in the index.
    let file = world.find(b"one").unwrap().node;
    world.layer.setattr(&world.caller, &file, None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    unlink(b"one").unwrap();
    let (root, index) = (scene.directory(0, ""), scene.directory(0, ".wh..wh.links"));
    scene.record.take();
    scene.record.fail(0, true);
    unlink(b"two").unwrap();
    let events = scene.record.take();
    let left = |events: &[Event]| {
        events.iter().any(|(branch, at, what)| (*branch, *at) == (0, index) && matches!(what, What::Went(_)))
    };
    assert!(!left(&events), "what would be seen after a crash is the original: {events:#?}");
    assert_eq!(world.find(b"two").err(), Some(Errno::ENOENT));

    let scene = Scene::new(&[("rw", &[]), ("ro", &["one"])], UnionOptions::default());
    let low = &scene.below[1];
    low.layer.link(&low.caller, &low.find(b"one").unwrap().node, None, &low.root, name(b"two")).unwrap();
    let world = &scene.world;
    let file = world.find(b"one").unwrap().node;
    world.layer.setattr(&world.caller, &file, None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    for bytes in [b"one", b"two"] {
        scene.record.take();
        world.layer.unlink(&world.caller, &world.root, name(bytes)).unwrap();
    }
    let events = scene.record.take();
    let index = scene.directory(0, ".wh..wh.links");
    let entry = events.iter().find(|(branch, at, what)| (*branch, *at) == (0, index) && matches!(what, What::Went(_)));
    assert_durable_before(
        &events,
        &came(0, scene.directory(0, ""), b".wh.two"),
        entry.expect("nothing leads to the copy"),
    );
    assert_ne!(root, index);
}

#[test]
fn directories_that_come_to_a_branch_last_before_anything_is_in_them() {
    let branches: [(&str, &[&str]); 2] = [("rw", &[]), ("ro", &["a/b/file"])];
    let make = |scene: &Scene| {
        let world = &scene.world;
        let a = world.find(b"a").unwrap().node;
        let b = world.find_in(&a, b"b").unwrap().node;
        world.layer.create(&world.caller, &b, name(b"new"), 0o644, OpenFlags(OpenFlags::READ_WRITE.0)).map(drop)
    };
    let scene = Scene::new(&branches, UnionOptions::default());
    make(&scene).unwrap();
    let events = scene.record.take();
    let [root, a, b] = ["", "a", "a/b"].map(|path| scene.directory(0, path));
    assert_durable_before(&events, &came(0, root, b"a"), &came(0, a, b"b"));
    assert_durable_before(&events, &came(0, a, b"b"), &came(0, b, b"new"));

    let scene = Scene::new(&branches, UnionOptions::default());
    scene.record.fail(0, true);
    assert_eq!(make(&scene), Err(Errno::EIO));
    // It is there by now, and makes nobody believe that it lasts.
    assert_eq!(make(&scene), Err(Errno::EIO));
    scene.record.fail(0, false);
    make(&scene).unwrap();
}
