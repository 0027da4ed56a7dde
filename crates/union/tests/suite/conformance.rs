//! Unions pass the conformance suite of the contract, in memory and over real directories, with
//! every form of whiteout.

use crate::unions::{Directories, host, mem, union};
use nacre_testkit::conformance;
use nacre_union::{Style, UnionOptions};

fn with(whiteout: Style) -> UnionOptions {
    UnionOptions { whiteout, sync: false, ..UnionOptions::default() }
}

#[test]
fn memory_over_memory() {
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        println!("whiteouts {style}");
        conformance::run(|| union(vec![(mem(), "rw"), (mem(), "ro")], with(style)));
    }
}

#[test]
fn one_branch_and_many() {
    conformance::run(|| union(vec![(mem(), "rw")], with(Style::Wh)));
    conformance::run(|| union(vec![(mem(), "rw"), (mem(), "ro"), (mem(), "rw"), (mem(), "ro")], with(Style::Wh)));
    conformance::run(|| union(vec![(mem(), "ro"), (mem(), "rw"), (mem(), "ro")], with(Style::Wh)));
}

/// As in a pool: what is new is on either branch, and directories change on both.
#[test]
fn branches_side_by_side() {
    let pool = || UnionOptions {
        create: "rr".parse().unwrap(),
        create_directories: Some("rand".parse().unwrap()),
        newest_times: true,
        actions: nacre_union::ActionPolicies::all_by(nacre_union::ActionPolicy::ExistingAll),
        ..with(Style::Wh)
    };
    conformance::run(|| union(vec![(mem(), "rw"), (mem(), "rw"), (mem(), "rw")], pool()));
}

#[test]
fn directory_over_directory() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        println!("whiteouts {style}");
        conformance::run(|| {
            union(vec![(host(&directories.fresh()), "rw"), (host(&directories.fresh()), "ro")], with(style))
        });
    }
}

#[test]
fn unions_of_unions() {
    conformance::run(|| {
        let below = union(vec![(mem(), "rw"), (mem(), "ro")], with(Style::Wh));
        union(vec![(mem(), "rw"), (below, "ro")], with(Style::Wh))
    });
}
