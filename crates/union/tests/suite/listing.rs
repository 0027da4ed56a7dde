//! Listings while the directory changes: a file that is there all the time is shown once in every
//! listing, whatever happens to it and round it.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_union::{BranchMode, Member, Style, Union, UnionOptions};
use nacre_vfs::{Caller, Layer, OpenFlags, RenameFlags, SetAttr};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Files that are there all the time.
const STABLE: usize = 600;

fn stable(number: usize) -> Vec<u8> {
    format!("stable{number}").into_bytes()
}

/// Fills the branches: a third on the upper one, a third on the lower one, a third on both; and
/// whiteouts.
fn filled(upper: &Arc<dyn Layer>, lower: &Arc<dyn Layer>, whiteout: Style) -> World {
    let (above, below) = (World::new(Arc::clone(upper)), World::new(Arc::clone(lower)));
    let directories = (above.directory(b"d"), below.directory(b"d"));
    for number in 0..STABLE {
        if number % 3 != 0 {
            above.file_in(&directories.0, &stable(number), b"above");
        }
        if number % 3 != 1 {
            below.file_in(&directories.1, &stable(number), b"below");
        }
    }
    for number in 0..100 {
        below.file_in(&directories.1, format!("gone{number}").as_bytes(), b"");
    }
    let options = UnionOptions { whiteout, sync: false, ..UnionOptions::default() };
    let world = World::new(union(vec![(Arc::clone(upper), "rw"), (Arc::clone(lower), "ro")], options));
    let d = world.find(b"d").unwrap().node;
    for number in 0..100 {
        world.layer.unlink(&world.caller, &d, name(format!("gone{number}").as_bytes())).unwrap();
    }
    world
}

/// One more change: files come and go, are renamed among each other, and stable ones are copied up.
fn change(world: &World, step: usize) {
    let d = world.find(b"d").unwrap().node;
    let (layer, caller) = (&world.layer, &world.caller);
    let fresh = format!("fresh{}", step % 50);
    match step % 5 {
        0 => drop(layer.create(caller, &d, name(fresh.as_bytes()), 0o644, OpenFlags::READ_WRITE)),
        1 => drop(layer.unlink(caller, &d, name(format!("fresh{}", (step + 20) % 50).as_bytes()))),
        2 => drop(layer.rename(caller, &d, name(fresh.as_bytes()), &d, name(b"gone1"), RenameFlags(0))),
        3 => drop(layer.unlink(caller, &d, name(b"gone1"))),
        _ => {
            let file = world.find_in(&d, &stable(step * 7 % STABLE)).expect("a stable file is always found").node;
            layer
                .setattr(
                    caller,
                    &file,
                    None,
                    &SetAttr { mode: Some(0o600 | u32::try_from(step % 64).unwrap()), ..SetAttr::default() },
                )
                .unwrap();
        }
    }
}

fn check(world: &World, attributes: bool, room: usize) {
    let d = world.find(b"d").unwrap().node;
    let mut counts: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
    for listed in world.list(&d, attributes, room) {
        assert!(!listed.name.starts_with(b".wh."), "{}", listed.name.escape_ascii());
        *counts.entry(listed.name).or_default() += 1;
    }
    for number in 0..STABLE {
        assert_eq!(
            counts.get(&stable(number)),
            Some(&1),
            "stable{number} in a listing with room for {room}, attributes: {attributes}"
        );
    }
    for number in 2..100 {
        assert!(!counts.contains_key(format!("gone{number}").as_bytes()), "gone{number}");
    }
}

fn while_it_changes(upper: &Arc<dyn Layer>, lower: &Arc<dyn Layer>, whiteout: Style, listings: usize) {
    let world = filled(upper, lower, whiteout);
    let (over, next) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let changers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    nacre_layers::host::prepare_worker().unwrap();
                    while !over.load(Ordering::Relaxed) {
                        change(&world, next.fetch_add(1, Ordering::Relaxed));
                    }
                })
            })
            .collect();
        let readers: Vec<_> = [(false, 7), (false, 100), (true, 40)]
            .into_iter()
            .map(|(attributes, room)| {
                let world = &world;
                scope.spawn(move || {
                    nacre_layers::host::prepare_worker().unwrap();
                    // Readers are told apart by their threads.
                    let caller = Caller { pid: u32::try_from(room).unwrap(), ..world.caller };
                    let own = World { layer: Arc::clone(&world.layer), root: world.root.clone(), caller };
                    for _ in 0..listings {
                        check(&own, attributes, room);
                    }
                })
            })
            .collect();
        let outcomes: Vec<_> = readers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        for outcome in outcomes {
            outcome.unwrap();
        }
        for changer in changers {
            changer.join().unwrap();
        }
    });
    assert!(next.into_inner() > 0);
    check(&world, true, 1000);
}

#[test]
fn in_memory() {
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        while_it_changes(&mem(), &mem(), style, 30);
    }
}

#[test]
fn in_real_directories() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    while_it_changes(&host(&directories.fresh()), &host(&directories.fresh()), Style::Wh, 30);
}

/// Three branches that have ten names of their own each, and ten on all of them.
fn three() -> (Arc<Union>, World) {
    let member = |index: usize| {
        let world = World::new(mem());
        let d = world.directory(b"d");
        for number in 0..10 {
            world.file_in(&d, format!("own{index}-{number}").as_bytes(), b"");
            world.file_in(&d, format!("all{number}").as_bytes(), b"");
        }
        let mode = BranchMode::parse(if index == 0 { "rw" } else { "ro" }).unwrap();
        Member { name: format!("/{index}").into(), layer: world.layer, mode, work: None, lock: None }
    };
    let members = (0..3).map(member).collect();
    let union = Arc::new(Union::named(members, UnionOptions { sync: false, ..UnionOptions::default() }).unwrap());
    let world = World::new(Arc::clone(&union) as Arc<dyn Layer>);
    (union, world)
}

/// Whoever reads a merge or a whole listing that is kept, and has read so many names, goes on when
/// a branch is removed.
#[test]
fn while_a_branch_is_removed() {
    for (gone, attributes, room, whole) in (0..3)
        .flat_map(|gone| [(gone, false, 7), (gone, true, 4), (gone, false, 13)])
        .flat_map(|(a, b, c)| [(a, b, c, false), (a, b, c, true)])
    {
        let (union, world) = three();
        let d = world.find(b"d").unwrap().node;
        if whole {
            assert_eq!(world.list(&d, false, 100).len(), 40);
        }
        let mut page = world.page(&d, 0, attributes, room).unwrap();
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut calls = 0;
        while let Some(last) = page.last() {
            let next = last.next;
            names.extend(page.into_iter().map(|listed| listed.name));
            calls += 1;
            if calls == 2 {
                let control = union.control();
                let slot = control.slot_of(std::path::Path::new(&format!("/{gone}"))).unwrap();
                control.remove(slot, true).unwrap();
            }
            page = world.page(&d, next, attributes, room).unwrap();
        }
        let case =
            format!("without branch {gone}, attributes: {attributes}, room for {room}, whole: {whole}: {names:?}");
        let count = |name: String| names.iter().filter(|listed| **listed == *name.as_bytes()).count();
        for number in 0..10 {
            assert_eq!(count(format!("all{number}")), 1, "all{number} {case}");
            for index in 0..3 {
                let name = format!("own{index}-{number}");
                // What was on the branch alone may have been shown before.
                assert!(if index == gone { count(name) <= 1 } else { count(name) == 1 }, "own{index}-{number} {case}");
            }
        }
    }
}
