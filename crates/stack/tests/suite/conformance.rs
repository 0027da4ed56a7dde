//! Every layer and stack passes the conformance suite of the contract.

use crate::stacks::{Directories, INVISIBLE, build, over_mem, prepare_thread};
use nacre_testkit::conformance::{self, Changes};

#[test]
fn mem() {
    conformance::run(|| over_mem(""));
}

#[test]
fn host() {
    prepare_thread();
    let directories = Directories::new();
    for coherence in ["exclusive", "watch", "revalidate"] {
        println!("coherence {coherence}");
        conformance::run(|| directories.over_host(&format!(",coherence={coherence}"), ""));
    }
}

#[test]
fn invisible_filters_over_mem() {
    for filters in INVISIBLE {
        println!("over mem: {filters}");
        conformance::run(|| over_mem(filters));
    }
}

#[test]
fn invisible_filters_over_host() {
    prepare_thread();
    let directories = Directories::new();
    for filters in INVISIBLE {
        println!("over host: {filters}");
        conformance::run(|| directories.over_host("", filters));
    }
}

#[test]
fn a_hundred_filters() {
    prepare_thread();
    let filters = ["remap", "trace", "remap:map=70000/70001", "throttle:read-rate=1000G"].repeat(25).join(" | ");
    conformance::run(|| over_mem(&filters));
    let directories = Directories::new();
    conformance::run(|| directories.over_host("", &filters));
}

#[test]
fn filters_that_change_owners_and_modes() {
    prepare_thread();
    let directories = Directories::new();
    for filters in [
        "remap:force-user=1000,force-group=1001",
        "remap:perms=u+rw",
        "remap:map=*/4000:@*/@4000",
        "remap:create-for-user=0,create-for-group=0",
    ] {
        println!("over mem and host: {filters}");
        conformance::run_with(Changes::Owners, || over_mem(filters));
        conformance::run_with(Changes::Owners, || directories.over_host("", filters));
    }
}

#[test]
fn read_only_stacks() {
    let directories = tempfile::tempdir().unwrap();
    conformance::populate(build(&format!("host:{}", directories.path().to_str().unwrap())));
    for filters in ["readonly", "readonly | trace", "trace | readonly | remap:force-user=5", "readonly | readonly"] {
        println!("over host: {filters}");
        conformance::read_only(build(&format!("host:{} | {filters}", directories.path().to_str().unwrap())));
    }
}
