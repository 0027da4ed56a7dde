//! Policies, routes and minimum free space as unions obey them, and what `explain` says of them.

use crate::unions::mem;
use nacre_testkit::World;
use nacre_union::{BranchMode, Presence, Union, UnionOptions, Words};
use nacre_vfs::{Errno, Layer, Name, OpenFlags, RenameFlags};
use std::{ffi::OsStr, path::PathBuf, sync::Arc};

/// Branches in memory under these names, all of them `rw` unless the list says otherwise.
struct Pool {
    branches: Vec<World>,
    names: Vec<String>,
    union: Arc<Union>,
    world: World,
}

impl Pool {
    fn new(words: &str) -> Pool {
        let words = Words::parse(OsStr::new(words)).unwrap();
        let layers: Vec<(Arc<dyn Layer>, BranchMode)> =
            words.branches.iter().map(|(_, mode)| (mem(), mode.clone())).collect();
        let branches = layers.iter().map(|(layer, _)| World::new(Arc::clone(layer))).collect();
        let names = words.branches.iter().map(|(path, _): &(PathBuf, _)| path.display().to_string()).collect();
        let options = UnionOptions { sync: false, ..words.options };
        let union = Arc::new(Union::new(layers, options).unwrap());
        let world = World::new(Arc::clone(&union) as Arc<dyn Layer>);
        Pool { branches, names, union, world }
    }

    /// The branches that have a name at their top.
    fn on(&self, name: &str) -> Vec<usize> {
        (0..self.branches.len()).filter(|index| self.branches[*index].exists(name.as_bytes())).collect()
    }

    fn explain(&self, path: &str) -> String {
        self.union.explain(path.as_bytes(), false).unwrap().text(&self.names)
    }
}

#[test]
fn files_take_turns_with_their_directories() {
    let pool = Pool::new("br:/a=rw:/b=rw:/c=ro:/d=rw,create=rr");
    for (name, branch) in [("one", 3), ("two", 1), ("three", 0), ("four", 3)] {
        assert!(pool.explain(name).contains("not its turn"));
        pool.world.file(name.as_bytes(), b"");
        assert_eq!(pool.on(name), [branch], "{name}");
    }
    // A directory is made on one branch, and on others when files come to be there; a file takes
    // one turn whatever has to be made first.
    let directory = pool.world.directory(b"dir");
    assert_eq!(pool.on("dir"), [1]);
    for number in 0..3 {
        let name = format!("file{number}");
        pool.world.file_in(&directory, name.as_bytes(), b"");
    }
    assert_eq!(pool.on("dir"), [0, 1, 3]);
}

#[test]
fn the_default_keeps_files_with_their_directory() {
    let pool = Pool::new("br:/a=rw:/b=rw:/c=ro");
    let (b, c) = (pool.branches[1].directory(b"mine"), pool.branches[2].directory(b"deep"));
    let _ = (b, c);
    pool.world.file_in(&pool.world.find(b"mine").unwrap().node, b"f", b"");
    assert!(pool.branches[1].find_in(&pool.branches[1].find(b"mine").unwrap().node, b"f").is_ok());
    pool.world.file_in(&pool.world.find(b"deep").unwrap().node, b"f", b"");
    assert_eq!(pool.on("deep"), [1, 2], "the next writable branch above the one that has the directory");
    assert_eq!(
        pool.explain("mine/new"),
        "create=tdp: /b: the highest that has the directory\n  not /a: it does not have the directory\n  not /c: read-only\n"
    );
}

#[test]
fn nothing_is_put_where_it_would_not_be_seen() {
    let pool = Pool::new("br:/a=rw:/b=rw:/c=rw,create=rr");
    pool.branches[2].file(b"gone", b"");
    pool.branches[1].file(b".wh.gone", b"");
    assert!(!pool.world.exists(b"gone"));
    assert!(pool.explain("gone").contains("/b: the lowest on which it would be seen"), "{}", pool.explain("gone"));
    // The turn is that of the lowest branch.
    pool.world.file(b"gone", b"new");
    let found = pool.world.find(b"gone").unwrap();
    assert_eq!(pool.world.content(&found.node), b"new");
    assert_eq!(pool.on("gone"), [1, 2]);
    assert_eq!(pool.on(".wh.gone"), [] as [usize; 0]);
}

#[test]
fn routes_lead_to_branches_and_policies() {
    let pool = Pool::new("br:/a=rw:/b=rw:/c=rw,create=ff,route=*.iso=/c,route=movies/**=/b,route=*.tmp=rr");
    let movies = pool.world.directory(b"movies");
    pool.world.file(b"x.iso", b"");
    pool.world.file(b"x", b"");
    pool.world.file(b"x.tmp", b"");
    pool.world.file_in(&movies, b"film", b"");
    assert_eq!(
        (pool.on("x.iso"), pool.on("x"), pool.on("x.tmp"), pool.on("movies")),
        (vec![2], vec![0], vec![2], vec![0, 1])
    );
    assert_eq!(
        pool.explain("movies/other"),
        "route=movies/**: /b: the route leads there\n  not /a: the route leads elsewhere\n  not /c: the route leads elsewhere\n"
    );
    assert!(pool.explain("y.tmp").starts_with("route=*.tmp: /b: its turn"));
}

#[test]
fn full_branches_are_passed_over() {
    // Trees in memory show a fixed size, far below this minimum.
    let pool = Pool::new("br:/a=rw+minfree=1000P:/b=rw:/c=rw+minfree=1000P,create=ff,route=*.iso=/c");
    pool.world.file(b"x", b"");
    pool.world.file(b"x.iso", b"");
    assert_eq!((pool.on("x"), pool.on("x.iso")), (vec![1], vec![1]));
    assert!(pool.explain("y").contains("less than its minimum of 1000.0P"), "{}", pool.explain("y"));
    let full = Pool::new("br:/a=rw,minfreespace=1000P");
    let (layer, caller) = (&full.world.layer, &full.world.caller);
    let made = layer.create(caller, &full.world.root, Name::new(b"x").unwrap(), 0o644, OpenFlags::READ_WRITE);
    assert_eq!(made.map(drop), Err(Errno::ENOSPC));
    assert!(full.explain("x").starts_with("create=tdp: nowhere (no space left on device)"), "{}", full.explain("x"));
}

#[test]
fn files_that_exist_are_explained() {
    let pool = Pool::new("br:/a=rw:/b=rw:/c=ro:/d=ro,cpup=bu");
    pool.branches[2].file(b"f", b"");
    pool.branches[3].file(b"f", b"");
    for index in [1, 3] {
        pool.branches[index].directory(b"dir");
    }
    pool.branches[0].file(b".wh.x", b"");
    pool.branches[1].file(b"x", b"");
    assert_eq!(
        pool.explain("f"),
        "/c: shown\n/d: hidden by a branch above\ncpup=bu: /b: the next writable one above\n  not /a: the policy takes another one\n  not /c: read-only\n  not /d: below the file\n"
    );
    let report = pool.union.explain(b"dir", false).unwrap();
    assert_eq!(report.here, [(1, Presence::Shown), (3, Presence::Merged)]);
    let report = pool.union.explain(b"/x", false).unwrap();
    assert_eq!(report.here, [(0, Presence::Whiteout), (1, Presence::Hidden)]);
    assert_eq!(report.next.chosen, Ok(0));
    assert_eq!(pool.union.explain(b"", false).map(drop), Err(Errno::EINVAL));
    assert_eq!(pool.union.explain(b"none/x", false).map(drop), Err(Errno::ENOENT));
    assert_eq!(pool.union.explain(b"f/x", false).map(drop), Err(Errno::ENOTDIR));
}

/// A directory that is in part on a branch that takes nothing new: it is brought together above if
/// it can be, else programs copy it by themselves.
#[test]
fn directories_of_branches_that_take_nothing_new_are_renamed() {
    for (modes, has, wanted) in [
        (["rw", "nc", "ro"], [true, true, true], Ok(())),
        (["rw", "nc", "ro"], [false, true, true], Ok(())),
        (["rw", "nc", "ro"], [false, true, false], Ok(())),
        (["nc", "rw", "ro"], [true, false, false], Ok(())),
        (["nc", "rw", "ro"], [true, true, true], Err(Errno::EXDEV)),
        (["nc", "ro", "rw"], [true, true, false], Err(Errno::EXDEV)),
        (["nc", "nc", "ro"], [true, true, true], Err(Errno::EROFS)),
    ] {
        let layers: Vec<_> = (0..3).map(|_| mem()).collect();
        let mut names = Vec::new();
        for (place, (layer, _)) in layers.iter().zip(has).enumerate().filter(|(_, (_, has))| *has) {
            let world = World::new(Arc::clone(layer));
            let name = format!("file{place}").into_bytes();
            world.file_in(&world.directory(b"old"), &name, b"content");
            names.push(name);
        }
        let branches =
            layers.into_iter().zip(modes).map(|(layer, mode)| (layer, BranchMode::parse(mode).unwrap())).collect();
        let world = World::new(Arc::new(
            Union::new(branches, UnionOptions { sync: false, ..UnionOptions::default() }).unwrap(),
        ));
        let (old, new) = (Name::new(b"old").unwrap(), Name::new(b"new").unwrap());
        let done = world.layer.rename(&world.caller, &world.root, old, &world.root, new, RenameFlags(0));
        assert_eq!(done, wanted, "{modes:?} {has:?}");
        let (there, gone) = if wanted.is_ok() { (&b"new"[..], &b"old"[..]) } else { (&b"old"[..], &b"new"[..]) };
        assert_eq!(world.names(&world.find(there).unwrap().node), names, "{modes:?} {has:?}");
        assert!(!world.exists(gone), "{modes:?} {has:?}");
    }
}

/// The modes of the branches, read as a number of three digits.
fn layout(number: usize) -> [&'static str; 3] {
    let mode = |digit: usize| ["rw", "nc", "ro"][digit % 3];
    [mode(number), mode(number / 3), mode(number / 9)]
}

const POLICIES: [&str; 19] = [
    "tdp", "tdmfs:1", "rr", "mfs", "mfsrr:1", "pmfs", "pmfsrr:1", "ff", "lfs", "lus", "lup", "rand", "pfrd", "newest",
    "epff", "epmfs", "eplus", "mspff", "mspmfs",
];

/// What `explain` says happens: for each policy, on each layout of three branches of which some have the directory.
#[test]
fn explanations_say_where_files_and_directories_then_are_made() {
    let mut refused = 0;
    for policy in POLICIES {
        for (number, has) in (0..27).flat_map(|number| (1..8).map(move |has| (number, has))) {
            let [a, b, c] = layout(number);
            let pool = Pool::new(&format!("br:/a={a}:/b={b}:/c={c},create={policy}"));
            for index in (0..3).filter(|index| has & (1 << index) != 0) {
                pool.branches[index].directory(b"d");
            }
            for (name, directory) in [("file", false), ("directory", true)] {
                let said = pool.union.explain(format!("d/{name}").as_bytes(), directory).unwrap().next.chosen;
                let parent = pool.world.find(b"d").unwrap().node;
                let (layer, caller) = (&pool.world.layer, &pool.world.caller);
                let made = if directory {
                    layer.mkdir(caller, &parent, Name::new(name.as_bytes()).unwrap(), 0o755).map(drop)
                } else {
                    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
                    layer.create(caller, &parent, Name::new(name.as_bytes()).unwrap(), 0o644, flags).map(drop)
                };
                let is_on = |world: &World| {
                    world.find(b"d").is_ok_and(|entry| world.find_in(&entry.node, name.as_bytes()).is_ok())
                };
                let place = made.map(|()| pool.branches.iter().position(is_on).unwrap());
                refused += usize::from(place.is_err());
                assert_eq!(said, place, "{policy} on {a}, {b}, {c} of which {has:b} have the directory: {name}");
            }
        }
    }
    assert!(refused > 0, "some layouts take nothing");
}

/// The same for copies: each policy, each layout above a file on a branch that is only read.
#[test]
fn explanations_say_where_files_then_are_copied() {
    for policy in ["tdp", "bup", "bu"] {
        for (number, has) in (0..27).flat_map(|number| (0..8).map(move |has| (number, has))) {
            let [a, b, c] = layout(number);
            let pool = Pool::new(&format!("br:/a={a}:/b={b}:/c={c}:/d=ro,cpup={policy}"));
            for index in (0..3).filter(|index| has & (1 << index) != 0) {
                pool.branches[index].directory(b"d");
            }
            pool.branches[3].file_in(&pool.branches[3].directory(b"d"), b"f", b"content");
            let said = pool.union.explain(b"d/f", false).unwrap().next.chosen;
            let file = pool.world.find_in(&pool.world.find(b"d").unwrap().node, b"f").unwrap();
            let change = nacre_vfs::SetAttr { mode: Some(0o600), ..Default::default() };
            let changed = pool.world.layer.setattr(&pool.world.caller, &file.node, None, &change);
            let is_on = |world: &World| world.find(b"d").is_ok_and(|entry| world.find_in(&entry.node, b"f").is_ok());
            let place = changed.map(|_| pool.branches.iter().position(is_on).unwrap());
            assert_eq!(said, place, "{policy} on {a}, {b}, {c} of which {has:b} have the directory");
        }
    }
}
