//! Random operations on unions against the reference tree: over branches that have been filled
//! before, through remounts, and with what was once the upper branch below a new one.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::{
    World,
    model::{Operation, Reference, go_on, operations, tree},
};
use nacre_union::{Style, UnionOptions};
use nacre_vfs::{Kind, Layer};
use proptest::test_runner::{Config, FileFailurePersistence};
use std::{collections::BTreeMap, sync::Arc};

fn with(whiteout: Style) -> UnionOptions {
    UnionOptions { whiteout, sync: false, ..UnionOptions::default() }
}

/// Three pieces of history.
type History = (Vec<Operation>, Vec<Operation>, Vec<Operation>);

fn check(everyday: u32, run: impl Fn(&History)) {
    let cases = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(everyday);
    println!("campaign: {cases} histories (NACRE_MODEL_CASES)");
    let config = Config {
        cases,
        max_shrink_iters: 3_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    let mut runner = crate::unions::runner(config);
    let histories = (operations(30), operations(40), operations(30));
    let outcome = runner.run(&histories, |history| {
        run(&history);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// The number of each path, which a remount must not change.
fn numbers(world: &World) -> BTreeMap<Vec<u8>, u64> {
    let mut numbers = BTreeMap::new();
    let mut next = vec![(Vec::new(), world.root.clone())];
    while let Some((path, node)) = next.pop() {
        let without: BTreeMap<_, _> =
            world.list(&node, false, 16).into_iter().map(|listed| (listed.name, listed.ino)).collect();
        for listed in world.list(&node, true, 16) {
            let path = [&path[..], b"/", &listed.name[..]].concat();
            let entry = listed.entry.expect("attributes");
            assert_eq!(without[&listed.name], entry.attr.id.ino, "d_ino of {}", path.escape_ascii());
            if entry.attr.kind == Kind::Directory {
                next.push((path.clone(), entry.node.clone()));
            }
            numbers.insert(path, entry.attr.id.ino);
        }
    }
    numbers
}

/// The same tree and the same numbers after a remount.
fn remount(old: &World, reference: &Reference, make: &dyn Fn() -> Arc<dyn Layer>) -> World {
    let before = numbers(old);
    let new = World::new(make());
    assert_eq!(tree(&new), reference.tree(), "the tree has changed with the remount");
    assert_eq!(numbers(&new), before, "numbers have changed with the remount");
    new
}

/// A lower branch filled by itself, an upper branch over it, a remount, and a new upper branch over
/// both.
fn live(history: &History, fresh: &dyn Fn() -> Arc<dyn Layer>, style: Style) {
    live_with(history, fresh, &|| with(style));
}

fn live_with(history: &History, fresh: &dyn Fn() -> Arc<dyn Layer>, options: &dyn Fn() -> UnionOptions) {
    let (lower, upper, top) = (fresh(), fresh(), fresh());
    let mut reference = Reference::new();
    go_on(&World::new(Arc::clone(&lower)), &mut reference, &history.0);
    let untouched = tree(&World::new(Arc::clone(&lower)));
    let two = || union(vec![(Arc::clone(&upper), "rw"), (Arc::clone(&lower), "ro")], options());
    let world = World::new(two());
    assert_eq!(tree(&world), reference.tree(), "the union differs from its only full branch");
    go_on(&world, &mut reference, &history.1);
    let world = remount(&world, &reference, &two);
    drop(world);
    let three =
        || union(vec![(Arc::clone(&top), "rw"), (Arc::clone(&upper), "ro+wh"), (Arc::clone(&lower), "ro")], options());
    let world = World::new(three());
    assert_eq!(tree(&world), reference.tree(), "a new branch on top changes the tree");
    go_on(&world, &mut reference, &history.2);
    drop(remount(&world, &reference, &three));
    assert_eq!(tree(&World::new(lower)), untouched, "the read-only branch has been changed");
}

#[test]
fn whiteouts_beside_names_in_memory() {
    check(400, |history| live(history, &mem, Style::Wh));
}

#[test]
fn whiteout_devices_in_memory() {
    check(200, |history| live(history, &mem, Style::Chardev));
}

#[test]
fn whiteouts_by_attribute_in_memory() {
    check(200, |history| live(history, &mem, Style::Xattr));
}

#[test]
fn real_directories() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    for style in [Style::Wh, Style::Chardev] {
        check(25, |history| live(history, &|| host(&directories.fresh()), style));
    }
}

#[test]
fn directories_renamed_by_redirect() {
    let redirecting = |whiteout| UnionOptions { directory_copy_limit: 0, directory_redirect: true, ..with(whiteout) };
    for style in [Style::Wh, Style::Chardev] {
        check(200, |history| live_with(history, &mem, &|| redirecting(style)));
    }
}

/// Two writable branches round a read-only one with whiteouts: what is on the lower one is changed
/// in place where that can be seen.
#[test]
fn two_writable_branches() {
    check(300, |history| {
        let (top, middle, bottom) = (mem(), mem(), mem());
        let mut reference = Reference::new();
        go_on(&World::new(Arc::clone(&bottom)), &mut reference, &history.0);
        let two = union(vec![(Arc::clone(&middle), "rw"), (Arc::clone(&bottom), "ro")], with(Style::Wh));
        go_on(&World::new(two), &mut reference, &history.1);
        let make = || {
            union(
                vec![(Arc::clone(&top), "rw"), (Arc::clone(&middle), "ro+wh"), (Arc::clone(&bottom), "rw")],
                with(Style::Wh),
            )
        };
        let world = World::new(make());
        go_on(&world, &mut reference, &history.2);
        drop(remount(&world, &reference, &make));
    });
}

/// Three writable branches, filled through each other: a pool that has become a union.
#[test]
fn only_writable_branches() {
    check(300, |history| {
        let (top, middle, bottom) = (mem(), mem(), mem());
        let mut reference = Reference::new();
        go_on(&World::new(Arc::clone(&bottom)), &mut reference, &history.0);
        let two = || union(vec![(Arc::clone(&middle), "rw"), (Arc::clone(&bottom), "rw")], with(Style::Wh));
        let world = World::new(two());
        go_on(&world, &mut reference, &history.1);
        drop(remount(&world, &reference, &two));
        let make = || {
            union(
                vec![(Arc::clone(&top), "rw"), (Arc::clone(&middle), "rw"), (Arc::clone(&bottom), "rw")],
                with(Style::Wh),
            )
        };
        let world = World::new(make());
        go_on(&world, &mut reference, &history.2);
        drop(remount(&world, &reference, &make));
    });
}
