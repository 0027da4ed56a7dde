//! Files of which several writable branches have a copy, in a pool as mergerfs has them (`duplicates=change`).

use crate::unions::mem;
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
};
use nacre_union::{BranchMode, HeldWork, Member, Union, UnionOptions, Words, WorkLock};
use nacre_vfs::{
    Caller, Entry, Errno, InterruptedRename, Layer, Name, Node, RenameFlags, Result, SetAttr, Time, XattrFlags,
};
use std::{
    ffi::OsStr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Three branches with copies of `f` and of `d/g`; the middle one also has `one`. All contents differ.
struct Copies {
    branches: Vec<World>,
    layers: Vec<Arc<dyn Layer>>,
    words: String,
}

impl Copies {
    fn new(words: &str) -> Copies {
        let layers: Vec<Arc<dyn Layer>> = (0..3).map(|_| mem()).collect();
        let branches: Vec<World> = layers.iter().map(|layer| World::new(Arc::clone(layer))).collect();
        for (index, branch) in branches.iter().enumerate() {
            let content = format!("f{index}");
            branch.file(b"f", content.as_bytes());
            branch.file_in(&branch.directory(b"d"), b"g", format!("g{index}").as_bytes());
        }
        branches[1].file(b"one", b"one");
        Copies { branches, layers, words: words.to_owned() }
    }

    fn over(&self, layers: Vec<Arc<dyn Layer>>, modes: [&str; 3]) -> World {
        let words = Words::parse(OsStr::new(&format!("category.create=ff,duplicates=change,{}", self.words))).unwrap();
        let options = UnionOptions { sync: false, ..words.options };
        let branches = layers.into_iter().zip(modes.map(|mode| BranchMode::parse(mode).unwrap())).collect();
        World::new(Arc::new(Union::new(branches, options).unwrap()))
    }

    fn world(&self, modes: [&str; 3]) -> World {
        self.over(self.layers.clone(), modes)
    }

    /// What each branch has, with contents: `a`, `b`, `c` are the branches.
    fn shown(&self) -> String {
        let mut all = Vec::new();
        for (branch, letter) in self.branches.iter().zip(["a", "b", "c"]) {
            list(branch, &branch.root, letter, &mut all);
        }
        all.sort();
        all.join(" ")
    }
}

fn list(world: &World, directory: &Node, path: &str, all: &mut Vec<String>) {
    for name in world.names(directory) {
        let found = world.find_in(directory, &name).unwrap();
        let path = format!("{path}/{}", String::from_utf8_lossy(&name));
        if found.attr.kind == nacre_vfs::Kind::Directory {
            list(world, &found.node, &path, all);
        } else {
            all.push(format!("{path}={}", String::from_utf8_lossy(&world.content(&found.node))));
        }
    }
}

fn name(bytes: &str) -> Name<'_> {
    Name::new(bytes.as_bytes()).unwrap()
}

fn unlink(world: &World, of: &str) -> Result<()> {
    world.layer.unlink(&world.caller, &world.root, name(of))
}

fn rename(world: &World, from: (&Node, &str), to: (&Node, &str)) -> Result<()> {
    world.layer.rename(&world.caller, from.0, name(from.1), to.0, name(to.1), RenameFlags(0))
}

/// Makes a directory as the union makes its own.
fn private(world: &World, of: &[u8]) -> Node {
    world.layer.mkdir(&world.caller, &world.root, Name::new(of).unwrap(), 0o700).unwrap().node
}

const ALL_RW: [&str; 3] = ["rw", "rw", "rw"];

#[test]
fn a_removed_file_is_gone_from_all_branches() {
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    unlink(&world, "f").unwrap();
    assert!(!world.exists(b"f"));
    assert_eq!(copies.shown(), "a/d/g=g0 b/d/g=g1 b/one=one c/d/g=g2");
    // And their directory goes with its last file.
    let directory = world.find(b"d").unwrap().node;
    world.layer.unlink(&world.caller, &directory, name("g")).unwrap();
    world.layer.rmdir(&world.caller, &world.root, name("d")).unwrap();
    assert_eq!(copies.shown(), "b/one=one");
    for branch in &copies.branches {
        assert!(!branch.exists(b"d"));
    }
}

#[test]
fn a_renamed_file_takes_its_copies_along() {
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    rename(&world, (&world.root, "f"), (&world.root, "h")).unwrap();
    assert_eq!(copies.shown(), "a/d/g=g0 a/h=f0 b/d/g=g1 b/h=f1 b/one=one c/d/g=g2 c/h=f2");
    // Over a file with copies.
    let directory = world.find(b"d").unwrap().node;
    rename(&world, (&world.root, "h"), (&directory, "g")).unwrap();
    assert_eq!(copies.shown(), "a/d/g=f0 b/d/g=f1 b/one=one c/d/g=f2");
    // A file without copies over one with them: what is left of these goes.
    rename(&world, (&world.root, "one"), (&directory, "g")).unwrap();
    assert_eq!(world.content(&world.find_in(&directory, b"g").unwrap().node), b"one");
    assert_eq!(copies.shown(), "b/d/g=one");
    // And the other way round.
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    rename(&world, (&world.root, "f"), (&world.root, "one")).unwrap();
    assert_eq!(copies.shown(), "a/d/g=g0 a/one=f0 b/d/g=g1 b/one=f1 c/d/g=g2 c/one=f2");
}

#[test]
fn changes_of_a_file_are_made_on_its_copies() {
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    let file = world.find(b"f").unwrap().node;
    world.change(&file, SetAttr { mode: Some(0o600), ..SetAttr::default() });
    world.layer.setxattr(&world.caller, &file, b"user.new", b"v", XattrFlags::default()).unwrap();
    world.change(&file, SetAttr { size: Some(1), ..SetAttr::default() });
    world.layer.link(&world.caller, &file, None, &world.root, name("other")).unwrap();
    for branch in &copies.branches {
        let copy = branch.find(b"f").unwrap();
        assert_eq!((copy.attr.mode, copy.attr.size, copy.attr.nlink), (0o600, 1, 2));
        assert_eq!(branch.layer.getxattr(&branch.caller, &copy.node, b"user.new", &mut [0; 8]), Ok(1));
        assert_eq!(branch.find(b"other").unwrap().attr.id, copy.attr.id);
    }
    world.layer.removexattr(&world.caller, &file, b"user.new").unwrap();
    for branch in &copies.branches {
        let copy = branch.find(b"f").unwrap().node;
        assert_eq!(branch.layer.getxattr(&branch.caller, &copy, b"user.new", &mut [0; 8]), Err(Errno::ENODATA));
    }
}

/// The kernel judges the file that is shown, and branches are changed as root: what others own on a lower branch is left.
#[test]
fn copies_of_others_are_left_alone() {
    const USER: u32 = 1000;
    let give = |world: &World, node: &Node, mode: u32, uid: u32| {
        world.change(node, SetAttr { uid: Some(uid), ..SetAttr::default() });
        world.change(node, SetAttr { mode: Some(mode), ..SetAttr::default() });
    };
    let copies = Copies::new("");
    if !copies.branches[0].is_root() {
        return;
    }
    let all = || copies.branches.iter().enumerate();
    // Everybody may make files in the tops of the branches; the user has made the first copy and the last.
    for (index, branch) in all() {
        give(branch, &branch.root, 0o1777, 0);
        give(branch, &branch.find(b"f").unwrap().node, 0o644, if index == 1 { 0 } else { USER });
        give(branch, &branch.find(b"d").unwrap().node, 0o755, if index == 1 { 0 } else { USER });
    }
    let mut world = copies.world(ALL_RW);
    world.caller = Caller { uid: USER, gid: USER, ..world.caller };
    for name in [&b"f"[..], b"d"] {
        let node = world.find(name).unwrap().node;
        world.change(&node, SetAttr { mode: Some(0o700), ..SetAttr::default() });
        let modes: Vec<u32> = all().map(|(_, branch)| branch.find(name).unwrap().attr.mode & 0o777).collect();
        assert_eq!(modes, [0o700, if name == b"f" { 0o644 } else { 0o755 }, 0o700]);
    }
    unlink(&world, "f").unwrap();
    assert!(!world.exists(b"f"), "hidden");
    assert!(copies.shown().contains("b/f=f1"), "{}", copies.shown());
    // Without the sticky bit, the directory alone counts.
    let copies = Copies::new("");
    for branch in &copies.branches {
        give(branch, &branch.root, 0o777, 0);
    }
    let mut world = copies.world(ALL_RW);
    world.caller = Caller { uid: USER, gid: USER, ..world.caller };
    unlink(&world, "f").unwrap();
    assert!(!copies.shown().contains("/f="), "{}", copies.shown());
    // No copy is moved over a file in a directory of somebody else.
    let copies = Copies::new("");
    for (index, branch) in copies.branches.iter().enumerate() {
        give(branch, &branch.root, 0o1777, 0);
        give(branch, &branch.find(b"f").unwrap().node, 0o644, USER);
        give(branch, &branch.find(b"d").unwrap().node, 0o755, if index == 0 { USER } else { 0 });
    }
    let mut world = copies.world(ALL_RW);
    world.caller = Caller { uid: USER, gid: USER, ..world.caller };
    let directory = world.find(b"d").unwrap().node;
    rename(&world, (&world.root, "f"), (&directory, "g")).unwrap();
    let shown = copies.shown();
    assert!(shown.contains("a/d/g=f0") && shown.contains("b/d/g=g1") && shown.contains("c/d/g=g2"), "{shown}");
}

#[test]
fn policies_of_the_highest_branch_leave_copies_and_uncover_them() {
    let copies = Copies::new("func.unlink=ff,func.chmod=epff,func.rename=ff");
    let world = copies.world(ALL_RW);
    let file = world.find(b"f").unwrap().node;
    world.change(&file, SetAttr { mode: Some(0o600), ..SetAttr::default() });
    assert_ne!(copies.branches[1].find(b"f").unwrap().attr.mode, 0o600);
    unlink(&world, "f").unwrap();
    assert_eq!(world.content(&world.find(b"f").unwrap().node), b"f1");
    rename(&world, (&world.root, "f"), (&world.root, "h")).unwrap();
    assert_eq!(copies.shown(), "a/d/g=g0 b/d/g=g1 b/h=f1 b/one=one c/d/g=g2 c/f=f2");
    assert_eq!(world.content(&world.find(b"f").unwrap().node), b"f2");
}

#[test]
fn a_copy_on_a_branch_that_is_only_read_is_hidden() {
    let copies = Copies::new("");
    let world = copies.world(["rw", "ro", "rw"]);
    unlink(&world, "f").unwrap();
    assert!(!world.exists(b"f"));
    assert!(copies.branches[0].exists(b".wh.f"));
    assert!(copies.branches[1].exists(b"f"));
    assert!(!copies.branches[2].exists(b"f"));
}

#[test]
fn without_the_word_copies_are_hidden() {
    let copies = Copies::new("duplicates=hide");
    let world = copies.world(ALL_RW);
    unlink(&world, "f").unwrap();
    assert!(!world.exists(b"f"));
    assert!(copies.branches[0].exists(b".wh.f"));
    assert!(copies.branches[2].exists(b"f"));
}

/// Whatever fails, or ends all, in between: the file that was shown is there, under its old or its new name.
#[test]
fn the_file_that_is_shown_is_never_lost() {
    for lasting in [false, true] {
        for failing in 0..3 {
            for over in ["new", "one"] {
                for step in 0.. {
                    let copies = Copies::new("");
                    let fault = Fault::new(Errno::EIO, lasting);
                    let mut layers = copies.layers.clone();
                    layers[failing] =
                        Arc::new(Faulty { below: Arc::clone(&layers[failing]), fault: Arc::clone(&fault) });
                    let world = copies.over(layers, ALL_RW);
                    fault.after(step);
                    let done = rename(&world, (&world.root, "f"), (&world.root, over));
                    let has_struck = fault.has_struck();
                    fault.end();
                    let fresh = copies.world(ALL_RW);
                    let content = |of: &str| fresh.find(of.as_bytes()).map(|entry| fresh.content(&entry.node));
                    let is_there = [content("f"), content(over)].contains(&Ok(b"f0".to_vec()));
                    assert!(is_there, "step {step} on branch {failing}: {}", copies.shown());
                    if done.is_err() && over == "one" {
                        let kept = content("one").is_ok_and(|content| content == b"one" || content == b"f0");
                        assert!(kept, "step {step} on branch {failing}: {}", copies.shown());
                    }
                    if !has_struck {
                        done.unwrap();
                        break;
                    }
                }
            }
        }
    }
}

/// Whatever fails in a rename over a file with copies, these are there as long as the file is.
#[test]
fn copies_of_a_file_that_is_not_replaced_stay() {
    for failing in 0..3 {
        for step in 0.. {
            let copies = Copies::new("");
            copies.branches[2].file(b"last", b"last");
            let fault = Fault::new(Errno::EIO, false);
            let mut layers = copies.layers.clone();
            layers[failing] = Arc::new(Faulty { below: Arc::clone(&layers[failing]), fault: Arc::clone(&fault) });
            let world = copies.over(layers, ALL_RW);
            fault.after(step);
            let done = rename(&world, (&world.root, "last"), (&world.root, "f"));
            let has_struck = fault.has_struck();
            fault.end();
            let (shown, fresh) = (copies.shown(), copies.world(ALL_RW));
            let file = fresh.find(b"f").unwrap();
            if fresh.content(&file.node) != b"last" {
                let there = ["a/f=f0", "b/f=f1", "c/last=last"].iter().all(|copy| shown.contains(copy));
                assert!(done.is_err() && there, "step {step} on branch {failing}: {shown}");
            }
            if !has_struck {
                done.unwrap();
                assert_eq!(shown, "a/d/g=g0 b/d/g=g1 b/one=one c/d/g=g2 c/f=last");
                break;
            }
        }
    }
}

#[test]
fn exchanged_files_take_their_copies_along() {
    let exchange = |world: &World, from: &str, to: (&Node, &str)| {
        let flags = RenameFlags(RenameFlags::EXCHANGE);
        world.layer.rename(&world.caller, &world.root, name(from), to.0, name(to.1), flags).unwrap();
    };
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    exchange(&world, "f", (&world.find(b"d").unwrap().node, "g"));
    assert_eq!(copies.shown(), "a/d/g=f0 a/f=g0 b/d/g=f1 b/f=g1 b/one=one c/d/g=f2 c/f=g2");
    // Where a branch has a copy of one of them only; its directory may be missing there.
    let copies = Copies::new("");
    unlink(&copies.branches[1], "f").unwrap();
    let below = &copies.branches[2];
    below.layer.unlink(&below.caller, &below.find(b"d").unwrap().node, name("g")).unwrap();
    below.layer.rmdir(&below.caller, &below.root, name("d")).unwrap();
    let world = copies.world(ALL_RW);
    exchange(&world, "f", (&world.find(b"d").unwrap().node, "g"));
    assert_eq!(copies.shown(), "a/d/g=f0 a/f=g0 b/f=g1 b/one=one c/d/g=f2");
    // Copies that do not follow renames are left.
    let copies = Copies::new("func.rename=ff");
    let world = copies.world(ALL_RW);
    exchange(&world, "f", (&world.find(b"d").unwrap().node, "g"));
    assert_eq!(copies.shown(), "a/d/g=f0 a/f=g0 b/d/g=g1 b/f=f1 b/one=one c/d/g=g2 c/f=f2");
}

/// A file that was made where another one is hidden has no copies, under its other name neither.
#[test]
fn an_exchange_beside_a_whiteout_takes_no_hidden_file_for_a_copy() {
    for is_reversed in [false, true] {
        for is_hidden_there in [true, false] {
            let copies = Copies::new("");
            copies.branches[0].file(b"x", b"x0");
            copies.branches[1].file(b"x", b"x1");
            let world = copies.world(["rw", "ro", "ro"]);
            unlink(&world, "f").unwrap();
            world.file(b"f", b"new");
            drop(world);
            if !is_hidden_there {
                [1, 2].into_iter().for_each(|branch| unlink(&copies.branches[branch], "f").unwrap());
            }
            let world = copies.world(ALL_RW);
            assert!(copies.branches[0].exists(b".wh.f"), "{}", copies.shown());
            let [from, to] = if is_reversed { ["x", "f"] } else { ["f", "x"] }.map(name);
            let flags = RenameFlags(RenameFlags::EXCHANGE);
            world.layer.rename(&world.caller, &world.root, from, &world.root, to, flags).unwrap();
            let shown = copies.shown();
            let has = |there: &[&str]| there.iter().all(|there| shown.contains(there));
            assert!(has(&["a/f=x0", "a/x=new"]), "{shown}");
            if is_hidden_there {
                // The copy of the other file cannot follow on its branch.
                assert!(has(&["b/f=f1", "c/f=f2", "b/x=x1"]), "{shown}");
                assert!(copies.branches[0].exists(b".wh.f") && copies.branches[0].exists(b".wh.x"), "{shown}");
                ["f", "x"].into_iter().for_each(|file| unlink(&world, file).unwrap());
                assert!(
                    ["f=f1", "f=f2", "x=x1"].iter().all(|left| copies.shown().contains(left)),
                    "{}",
                    copies.shown()
                );
                assert!(["f", "x"].iter().all(|file| world.find(file.as_bytes()).is_err()));
            } else {
                assert!(has(&["b/f=x1"]) && !copies.branches[0].exists(b".wh.f"), "{shown}");
                unlink(&world, "f").unwrap();
                assert!(!copies.branches[1].exists(b"f"), "{}", copies.shown());
            }
        }
    }
}

/// Whatever fails in between, a branch's copies have the names of their files, or both their own.
#[test]
fn copies_on_a_branch_are_exchanged_together() {
    for step in 0.. {
        let copies = Copies::new("");
        copies.branches[0].file(b"x", b"x0");
        copies.branches[1].file(b"x", b"x1");
        let fault = Fault::new(Errno::EIO, false);
        let mut layers = copies.layers.clone();
        layers[1] = Arc::new(Faulty { below: Arc::clone(&layers[1]), fault: Arc::clone(&fault) });
        let world = copies.over(layers, ALL_RW);
        fault.after(step);
        let flags = RenameFlags(RenameFlags::EXCHANGE);
        let done = world.layer.rename(&world.caller, &world.root, name("f"), &world.root, name("x"), flags);
        let has_struck = fault.has_struck();
        fault.end();
        let shown = copies.shown();
        let has = |copies: [&str; 2]| copies.iter().all(|copy| shown.contains(copy));
        assert!(has(["b/f=f1", "b/x=x1"]) || has(["b/f=x1", "b/x=f1"]), "step {step}: {shown}");
        assert!(!shown.contains(".wh."), "step {step}: {shown}");
        if !has_struck {
            done.unwrap();
            assert!(has(["b/f=x1", "b/x=f1"]), "{shown}");
            break;
        }
    }
}

/// A file under a hidden name may have no other name.
#[test]
fn a_file_that_an_earlier_rename_has_left_is_not_replaced() {
    let hidden = b"f"
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let hidden = format!(".wh..wh.old.{hidden:016x}");
    let copies = Copies::new("");
    for left in ["first", "second"] {
        copies.branches[1].file(hidden.as_bytes(), left.as_bytes());
        for branch in &copies.branches {
            if !branch.exists(b"f") {
                branch.file(b"f", b"f");
            }
        }
        copies.branches[2].file(b"last", b"last");
        let world = copies.world(ALL_RW);
        rename(&world, (&world.root, "last"), (&world.root, "f")).unwrap();
        assert_eq!(world.content(&world.find(b"f").unwrap().node), b"last");
    }
    let shown = copies.shown();
    for (number, left) in ["first", "second"].iter().enumerate() {
        assert!(shown.contains(&format!("b/{hidden}.{number}={left}")), "{shown}");
    }
    assert!(!copies.branches[1].exists(hidden.as_bytes()), "{shown}");
}

/// It was removed when its branch could not be written.
#[test]
fn a_hidden_file_is_no_copy_of_one_that_gets_its_name() {
    for made in ["moved", "created"] {
        let copies = Copies::new("");
        let world = copies.world(["rw", "ro", "rw"]);
        unlink(&world, "f").unwrap();
        drop(world);
        let world = copies.world(ALL_RW);
        match made {
            "moved" => {
                world.file(b"new", b"new");
                rename(&world, (&world.root, "new"), (&world.root, "f")).unwrap();
            }
            _ => drop(world.file(b"f", b"new")),
        }
        world.change(&world.find(b"f").unwrap().node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
        assert_ne!(copies.branches[1].find(b"f").unwrap().attr.mode, 0o600, "{made}");
        rename(&world, (&world.root, "f"), (&world.root, "h")).unwrap();
        assert!(!world.exists(b"f"), "{made}: {}", copies.shown());
        assert!(copies.shown().contains("a/h=new") && copies.shown().contains("b/f=f1"), "{made}: {}", copies.shown());
        rename(&world, (&world.root, "h"), (&world.root, "f")).unwrap();
        unlink(&world, "f").unwrap();
        assert!(!world.exists(b"f") && copies.shown().contains("b/f=f1"), "{made}: {}", copies.shown());
    }
    // Copies that follow take the place of what is hidden.
    let copies = Copies::new("");
    let world = copies.world(["rw", "ro", "rw"]);
    unlink(&world, "f").unwrap();
    drop(world);
    copies.branches[0].file(b"x", b"x0");
    copies.branches[1].file(b"x", b"x1");
    let world = copies.world(ALL_RW);
    rename(&world, (&world.root, "x"), (&world.root, "f")).unwrap();
    assert_eq!(copies.shown(), "a/d/g=g0 a/f=x0 b/d/g=g1 b/f=x1 b/one=one c/d/g=g2");
}

/// While a branch is only read, another union may lock its work directory.
#[test]
fn a_branch_that_is_not_written_any_more_is_not_locked() {
    /// Counts the locks that are held.
    struct Held(Arc<AtomicUsize>);
    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let held = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&held);
    let lock: WorkLock = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Box::new(Held(Arc::clone(&counted))) as HeldWork))
    });
    let (above, below) = (mem(), mem());
    let (upper, lower) = (World::new(Arc::clone(&above)), World::new(Arc::clone(&below)));
    lower.file(b"one", b"");
    lower.file(b"two", b"");
    let branch = |name: &str, layer, mode, lock| Member { name: name.into(), layer, mode, work: None, lock };
    let members = vec![branch("/a", above, BranchMode::rw(), Some(lock)), branch("/b", below, BranchMode::ro(), None)];
    let words = Words::parse(OsStr::new("category.create=ff")).unwrap();
    let union = Arc::new(Union::named(members, UnionOptions { sync: false, ..words.options }).unwrap());
    let (control, world) = (union.control(), World::new(union));
    // It cannot be removed.
    upper.file_in(&private(&upper, b".wh..wh.work"), b"stays", b"");
    let copy = |name: &[u8]| {
        world.change(&world.find(name).unwrap().node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
        assert!(upper.exists(name));
    };
    copy(b"one");
    assert_eq!(held.load(Ordering::Relaxed), 1);
    let slot = control.list()[0].slot;
    control.modify(slot, BranchMode::ro()).unwrap();
    assert_eq!(held.load(Ordering::Relaxed), 0);
    control.modify(slot, BranchMode::rw()).unwrap();
    copy(b"two");
    drop((world, control));
    assert_eq!(held.load(Ordering::Relaxed), 0);
}

/// A process that finishes a rename moves the copies that the caller could move.
#[test]
fn an_interrupted_rename_moves_copies_by_the_callers_rights() {
    const USER: u32 = 1000;
    for (uid, expected) in [(USER, "b/f=f1"), (0, "b/h=f1")] {
        let copies = Copies::new("");
        if !copies.branches[0].is_root() {
            return;
        }
        let world = copies.world(ALL_RW);
        let above = &copies.branches[0];
        above.change(&above.root, SetAttr { uid: Some(USER), ..SetAttr::default() });
        let moving = world.find(b"f").unwrap().attr.id;
        // The step after which the previous process was killed.
        rename(above, (&above.root, "f"), (&above.root, "h")).unwrap();
        let caller = Caller { uid, gid: uid, ..world.caller };
        let interrupted = InterruptedRename {
            caller: &caller,
            begun: Time::default(),
            parent: &world.root,
            name: name("f"),
            new_parent: &world.root,
            new_name: name("h"),
            moving,
            replaced: None,
            exchange: false,
            whiteout: false,
        };
        let finish = world.layer.capabilities().interrupted.unwrap();
        assert_eq!(finish.finish_rename(&interrupted), Ok(true));
        assert!(copies.shown().contains(expected), "{uid}: {}", copies.shown());
    }
}

/// The previous process was killed when the file had both names.
#[test]
fn an_interrupted_rename_over_a_file_above_takes_the_copies_along() {
    let copies = Copies::new("");
    let (above, middle, below) = (&copies.branches[0], &copies.branches[1], &copies.branches[2]);
    let (file, _) = middle.file(b"x", b"x1");
    below.file(b"x", b"x2");
    let world = copies.world(ALL_RW);
    let [moving, replaced] = [&b"x"[..], b"f"].map(|name| world.find(name).unwrap().attr.id);
    unlink(above, "f").unwrap();
    unlink(middle, "f").unwrap();
    middle.layer.link(&middle.caller, &file.node, None, &middle.root, name("f")).unwrap();
    let interrupted = InterruptedRename {
        caller: &world.caller,
        begun: Time::default(),
        parent: &world.root,
        name: name("x"),
        new_parent: &world.root,
        new_name: name("f"),
        moving,
        replaced: Some(replaced),
        exchange: false,
        whiteout: false,
    };
    let finish = world.layer.capabilities().interrupted.unwrap();
    assert_eq!(finish.finish_rename(&interrupted), Ok(true));
    assert_eq!(copies.shown(), "a/d/g=g0 b/d/g=g1 b/f=x1 b/one=one c/d/g=g2 c/f=x2");
}

/// A file that another process has put under the replaced one's number since is not removed.
#[test]
fn an_interrupted_rename_removes_no_younger_file() {
    for (begun, is_removed) in [(i64::MAX, true), (0, false)] {
        let copies = Copies::new("");
        unlink(&copies.branches[0], "f").unwrap();
        unlink(&copies.branches[2], "f").unwrap();
        copies.branches[0].file(b"new", b"new");
        let options = UnionOptions { sync: false, ..UnionOptions::default() };
        let branches = copies.layers.iter().map(|layer| (Arc::clone(layer), BranchMode::rw())).collect();
        let world = World::new(Arc::new(Union::new(branches, options).unwrap()));
        let [moving, replaced] = [&b"new"[..], b"f"].map(|name| world.find(name).unwrap().attr.id);
        let above = &copies.branches[0];
        rename(above, (&above.root, "new"), (&above.root, "f")).unwrap();
        let interrupted = InterruptedRename {
            caller: &world.caller,
            begun: Time { sec: begun, nsec: 0 },
            parent: &world.root,
            name: name("new"),
            new_parent: &world.root,
            new_name: name("f"),
            moving,
            replaced: Some(replaced),
            exchange: false,
            whiteout: false,
        };
        let finish = world.layer.capabilities().interrupted.unwrap();
        assert_eq!(finish.finish_rename(&interrupted), Ok(true));
        assert_eq!(copies.branches[1].exists(b"f"), !is_removed, "{begun}: {}", copies.shown());
    }
}

/// A branch that counts look-ups.
struct Counting {
    below: Arc<dyn Layer>,
    lookups: AtomicUsize,
}

impl Layer for Counting {
    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.below.lookup(caller, parent, name)
    }

    nacre_vfs::forward_layer! { root id path adopt hold getattr access readlink readdir statfs syncfs getxattr listxattr ioctl coherence watch capabilities describe tmpfile setattr create mkdir mknod symlink link unlink rmdir rename fsyncdir setxattr removexattr open }
}

/// A change of a file without copies looks at lower branches that have its directory, once at each.
#[test]
fn few_looks_find_that_a_file_has_no_copies() {
    let copies = Copies::new("");
    copies.branches[0].file(b"alone", b"");
    let only = copies.branches[0].directory(b"only");
    copies.branches[0].file_in(&only, b"there", b"");
    let counting: Vec<_> = copies
        .layers
        .iter()
        .map(|below| Arc::new(Counting { below: Arc::clone(below), lookups: AtomicUsize::new(0) }))
        .collect();
    let world = copies.over(counting.iter().map(|layer| Arc::clone(layer) as Arc<dyn Layer>).collect(), ALL_RW);
    let directory = world.find(b"only").unwrap().node;
    let looks = |file: &Node| {
        counting.iter().for_each(|layer| layer.lookups.store(0, Ordering::Relaxed));
        world.change(file, SetAttr { mode: Some(0o600), ..SetAttr::default() });
        counting.iter().map(|layer| layer.lookups.load(Ordering::Relaxed)).collect::<Vec<_>>()
    };
    assert_eq!(looks(&world.find(b"alone").unwrap().node), [0, 1, 1]);
    assert_eq!(looks(&world.find_in(&directory, b"there").unwrap().node), [0, 0, 0]);
}

/// Where all users may write to a branch, one of them can make a directory under a name of the union's own.
#[test]
fn a_planted_work_directory_is_not_used() {
    const USER: u32 = 1000;
    for (mode, uid, is_used) in [(0o700, 0, true), (0o700, USER, false), (0o755, 0, false), (0o777, USER, false)] {
        let copies = Copies::new("");
        let below = &copies.branches[1];
        if !below.is_root() {
            return;
        }
        let planted = private(below, b".wh..wh.work");
        below.file_in(&planted, b"bait", b"");
        below.change(&planted, SetAttr { uid: Some(uid), ..SetAttr::default() });
        below.change(&planted, SetAttr { mode: Some(mode), ..SetAttr::default() });
        // Its content goes only if it is the union's own.
        let world = copies.world(ALL_RW);
        assert_eq!(below.exists(b".wh..wh.work"), !is_used, "{mode:o} {uid}");
        // Copies of a replaced file wait beside their names.
        copies.branches[2].file(b"last", b"last");
        assert_eq!(rename(&world, (&world.root, "last"), (&world.root, "f")), Ok(()), "{mode:o} {uid}");
        let shown = copies.shown();
        assert!(!shown.contains("b/f=f1") && !shown.contains("a/f=f0"), "{shown}");
        assert_eq!(below.exists(b".wh..wh.work"), !is_used, "{mode:o} {uid}");
        // A union that needs the directory all the time is refused.
        drop(world);
        let branches = copies.layers.iter().map(|layer| (Arc::clone(layer), BranchMode::rw())).collect();
        let refused = Union::new(branches, UnionOptions { sync: false, ..UnionOptions::default() });
        match refused {
            Ok(_) => assert!(is_used, "{mode:o} {uid}"),
            Err(error) => assert!(!is_used && error.to_string().contains(".wh..wh.work"), "{error}"),
        }
    }
}

/// Directories of the union's own are on branches only while they are needed.
#[test]
fn branches_have_nothing_but_the_files_of_users() {
    let copies = Copies::new("");
    let world = copies.world(ALL_RW);
    world.file(b"new", b"");
    let directory = world.directory(b"fresh");
    rename(&world, (&world.root, "one"), (&directory, "moved")).unwrap();
    unlink(&world, "f").unwrap();
    drop(world);
    for branch in &copies.branches {
        assert!(branch.names(&branch.root).iter().all(|name| !name.starts_with(b".wh.")), "{}", copies.shown());
    }
}

/// While a branch is only read, other unions may write it, and remove directories of a union's own that are empty.
#[test]
fn a_branch_that_is_written_again_finds_its_directories_anew() {
    const OWN: [&[u8]; 2] = [b".wh..wh.work", b".wh..wh.links"];
    let options = |words: &str| UnionOptions { sync: false, ..Words::parse(OsStr::new(words)).unwrap().options };
    for words in ["category.create=ff", ""] {
        let (above, below) = (mem(), mem());
        let (upper, lower) = (World::new(Arc::clone(&above)), World::new(Arc::clone(&below)));
        for (one, other, directory) in [("a", "b", "first"), ("c", "d", "second")] {
            let (file, _) = lower.file(one.as_bytes(), b"");
            lower.layer.link(&lower.caller, &file.node, None, &lower.root, name(other)).unwrap();
            lower.directory(directory.as_bytes());
        }
        let branches = vec![(Arc::clone(&above), BranchMode::rw()), (below, BranchMode::ro())];
        let union = Arc::new(Union::new(branches, options(words)).unwrap());
        let (control, world) = (union.control(), World::new(union));
        let work = upper.find(OWN[0]).map_or_else(|_| private(&upper, OWN[0]), |found| found.node);
        upper.file_in(&work, b"stays", b"");
        let change = |file: &[u8], directory: &[u8]| {
            let made = world.find(directory).unwrap().node;
            world.file_in(&made, b"new", b"");
            world.change(&world.find(file).unwrap().node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
        };
        change(b"a", b"first");
        unlink(&world, "a").unwrap();
        unlink(&world, "b").unwrap();
        assert!(OWN.iter().all(|own| upper.exists(own)), "{words}");
        let slot = control.list()[0].slot;
        control.modify(slot, BranchMode::ro()).unwrap();
        drop(Union::new(vec![(above, BranchMode::rw())], options("category.create=ff")).unwrap());
        assert!(!OWN.iter().any(|own| upper.exists(own)), "{words}");
        control.modify(slot, BranchMode::rw()).unwrap();
        change(b"c", b"second");
        assert_eq!(world.find(b"d").unwrap().attr.mode, 0o600);
        assert!(upper.exists(b"c"));
    }
}

/// `d` of all branches over directories without anything in them.
#[test]
fn a_directory_is_renamed_on_its_branches_over_an_empty_one() {
    for empty_on in [&[2][..], &[0], &[0, 1, 2], &[1, 2]] {
        for d_on in [&[0, 1, 2][..], &[1, 2], &[1]] {
            let copies = Copies::new("");
            for index in (0..3).filter(|index| !d_on.contains(index)) {
                let branch = &copies.branches[index];
                unlink_in(branch, "d", "g");
                branch.layer.rmdir(&branch.caller, &branch.root, name("d")).unwrap();
            }
            for index in empty_on {
                copies.branches[*index].directory(b"empty");
            }
            let before = copies.shown();
            let world = copies.world(ALL_RW);
            let (moved, replaced) = (world.id(b"d"), world.find(b"empty").unwrap().node);
            rename(&world, (&world.root, "d"), (&world.root, "empty")).unwrap();
            assert_eq!(copies.shown(), before.replace("/d/", "/empty/"));
            assert_eq!(world.id(b"empty"), moved);
            assert!(!world.exists(b"d"));
            assert_eq!(world.layer.lookup(&world.caller, &replaced, name("g")).err(), Some(Errno::ENOENT));
            for (index, branch) in copies.branches.iter().enumerate() {
                assert_eq!(branch.exists(b"empty"), d_on.contains(&index), "{empty_on:?} {d_on:?}");
                assert!(branch.names(&branch.root).iter().all(|name| !name.starts_with(b".wh.")), "{empty_on:?}");
            }
        }
    }
}

fn unlink_in(world: &World, directory: &str, of: &str) {
    let directory = world.find(directory.as_bytes()).unwrap().node;
    world.layer.unlink(&world.caller, &directory, name(of)).unwrap();
}

#[test]
fn a_directory_with_files_on_any_branch_is_not_replaced() {
    let copies = Copies::new("");
    copies.branches[0].directory(b"full");
    copies.branches[2].file_in(&copies.branches[2].directory(b"full"), b"last", b"");
    let before = copies.shown();
    let world = copies.world(ALL_RW);
    assert_eq!(rename(&world, (&world.root, "d"), (&world.root, "full")), Err(Errno::ENOTEMPTY));
    assert_eq!(copies.shown(), before);
}

/// Whatever fails in between: no file is lost, and the empty directory is back unless its storage cannot be written.
#[test]
fn no_file_of_a_directory_is_lost_where_it_replaces_an_empty_one() {
    for lasting in [false, true] {
        for failing in 0..3 {
            for step in 0.. {
                let copies = Copies::new("");
                for index in [0, 2] {
                    copies.branches[index].directory(b"empty");
                }
                let fault = Fault::new(Errno::EIO, lasting);
                let mut layers = copies.layers.clone();
                layers[failing] = Arc::new(Faulty { below: Arc::clone(&layers[failing]), fault: Arc::clone(&fault) });
                let world = copies.over(layers, ALL_RW);
                fault.after(step);
                let done = rename(&world, (&world.root, "d"), (&world.root, "empty"));
                let has_struck = fault.has_struck();
                fault.end();
                let shown = copies.shown();
                for (letter, content) in [("a", "g0"), ("b", "g1"), ("c", "g2")] {
                    let places = ["d", "empty"].map(|home| format!("{letter}/{home}/g={content}"));
                    assert!(places.iter().any(|place| shown.contains(place)), "step {step} on {failing}: {shown}");
                }
                if done.is_err() && !lasting {
                    assert!(copies.world(ALL_RW).exists(b"empty"), "step {step} on {failing}: {shown}");
                }
                if !has_struck {
                    done.unwrap();
                    break;
                }
            }
        }
    }
}
