//! Random operations on layers and stacks against the reference tree.

use crate::stacks::{Directories, over_mem, prepare_thread};
use nacre_testkit::model::{compare, operations};
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};

/// Cases per stack: `NACRE_MODEL_CASES` asks for more than the everyday number.
fn runner(everyday: u32) -> TestRunner {
    let cases = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(everyday);
    println!("campaign: {cases} cases (NACRE_MODEL_CASES)");
    TestRunner::new(Config {
        cases,
        max_shrink_iters: 2_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    })
}

fn check(everyday: u32, most: usize, make: impl Fn() -> std::sync::Arc<dyn nacre_vfs::Layer>) {
    let outcome = runner(everyday).run(&operations(most), |operations| {
        compare(make(), &operations);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn the_kernel_agrees_with_the_reference() {
    // The host layer makes each call on a real file system: this test judges the reference as much
    // as the layer.
    prepare_thread();
    let directories = Directories::new();
    check(200, 40, || directories.over_host("", ""));
    check(100, 40, || directories.over_host(",coherence=exclusive", ""));
}

#[test]
fn mem() {
    check(1_000, 60, || over_mem(""));
}

#[test]
fn cages_with_room_change_nothing() {
    prepare_thread();
    let directories = Directories::new();
    check(300, 60, || over_mem("cage:size=100G | trace | cage:inodes=100000"));
    check(100, 40, || directories.over_host("", "cage:size=100G,inodes=100000"));
}

#[test]
fn filters_change_nothing_unasked() {
    prepare_thread();
    let directories = Directories::new();
    check(200, 60, || over_mem("remap | trace | throttle:write-rate=1000G | remap:map=70000/70001"));
    check(100, 40, || {
        directories.over_host("", "remap:uid-offset=7,gid-offset=7 | trace | remap:uid-offset=-7,gid-offset=-7")
    });
}
