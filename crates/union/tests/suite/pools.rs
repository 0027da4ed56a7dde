//! Random operations on pools of several writable branches, under each kind of policy: wherever
//! things are put, users see the same tree.

use crate::unions::{mem, union};
use nacre_testkit::{
    World,
    model::{Operation, Reference, go_on, operations, tree},
};
use nacre_union::{UnionOptions, Words};
use nacre_vfs::Layer;
use proptest::{
    prelude::*,
    test_runner::{Config, FileFailurePersistence},
};
use std::{ffi::OsStr, sync::Arc};

/// The modes of four branches, and two pieces of history.
type Case = ([&'static str; 4], Vec<Operation>, Vec<Operation>);

fn cases() -> impl Strategy<Value = Case> {
    // Not `nc`: directories that lie there cannot always be renamed (EXDEV), which the reference
    // tree does not know.
    let mode = prop_oneof![3 => Just("rw"), 1 => Just("ro+wh")];
    // Something can be put on the topmost, or there would be nothing to test.
    let modes = [mode.clone(), mode.clone(), mode].prop_map(|[a, b, c]| ["rw", a, b, c]);
    (modes, operations(40), operations(40))
}

fn options(words: &str) -> UnionOptions {
    let branches = "br:/0=rw:/1=rw:/2=rw:/3=rw";
    UnionOptions { sync: false, ..Words::parse(OsStr::new(&format!("{branches},{words}"))).unwrap().options }
}

fn check(words: &str, everyday: u32) {
    let count = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(everyday);
    println!("campaign: {count} cases of {words} (NACRE_MODEL_CASES)");
    let config = Config {
        cases: count,
        max_shrink_iters: 3_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    let mut runner = crate::unions::runner(config);
    let outcome = runner.run(&cases(), |(modes, first, then)| {
        let layers: Vec<Arc<dyn Layer>> = (0..4).map(|_| mem()).collect();
        let make = |modes: [&'static str; 4]| union(layers.iter().cloned().zip(modes).collect(), options(words));
        let mut reference = Reference::new();
        go_on(&World::new(make(["rw"; 4])), &mut reference, &first);
        let world = World::new(make(modes));
        assert_eq!(tree(&world), reference.tree(), "other modes show another tree: {modes:?}");
        go_on(&world, &mut reference, &then);
        drop(world);
        assert_eq!(tree(&World::new(make(modes))), reference.tree(), "a remount shows another tree: {modes:?}");
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{words}: {error}");
    }
}

#[test]
fn in_turn() {
    check("create=rr,cpup=bu", 150);
}

#[test]
fn at_random() {
    check("create=rand,cpup=bup", 150);
}

#[test]
fn by_space_and_depth() {
    check("create=mfs:0", 80);
    check("create=mspff,cpup=bu", 80);
}

#[test]
fn by_routes() {
    check("create=rr,route={a\\,b}=/3,route=*/c=/1,route=long*=mfs", 150);
}
