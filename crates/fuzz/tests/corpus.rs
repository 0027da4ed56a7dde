//! Every target gets its kept inputs and then inputs made of them: the same in each run. How many
//! is a number, never a time; `NACRE_FUZZ_INPUTS` says another.
//!
//! Callers: `cargo test`. An input on which a target fails is written to `fuzz/artifacts/NAME` and
//! named; put it into the target's corpus with the mend.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use nacre_fuzz::{TARGETS, Target, feed};

/// A few seconds for each target.
const INPUTS: u64 = 20_000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("fuzz")
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = folder().join("corpus").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} holds no inputs", folder.display());
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn run(name: &str, target: Target) {
    let inputs =
        std::env::var("NACRE_FUZZ_INPUTS").map_or(INPUTS, |text| text.parse().expect("NACRE_FUZZ_INPUTS is a number"));
    // A label is 32 KiB, of which four copies are summed up: that takes its time in a debug build.
    let inputs = if name == "pool_label" { inputs / 100 } else { inputs };
    let mut last = Vec::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        feed(target, &corpus(name), inputs, &mut |input| input.clone_into(&mut last))
    }));
    if outcome.is_err() {
        let kept = folder().join("artifacts");
        std::fs::create_dir_all(&kept).unwrap();
        std::fs::write(kept.join(name), &last).unwrap();
        panic!("{name} fails on fuzz/artifacts/{name}: {}", last.escape_ascii());
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name), nacre_fuzz::$name); })*

        #[test]
        fn every_target_is_fed() {
            let named: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!([$(stringify!($name)),*].as_slice(), named);
        }
    };
}

targets! {
    acl cage_checkpoint cage_log fuse_mount_table fuse_request key_rows map_words messages perms pool_deadlist pool_frame pool_label pool_log pool_log_area pool_names
    pool_properties pool_root pool_rows pool_segments pool_tree pool_unpack sealed_node send_stream sizes stack_line stack_toml tier_words union_marks union_words
}

#[test]
fn every_target_has_a_corpus_and_a_program_and_none_is_left_over() {
    let named: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let listed = |folder: PathBuf| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
    };
    assert_eq!(listed(folder().join("corpus")), named);
    assert_eq!(listed(folder().join("programs")), named);
    let manifest = std::fs::read_to_string(folder().join("Cargo.toml")).unwrap();
    for name in named {
        assert!(
            manifest.contains(&format!("name = \"{name}\"\npath = \"programs/{name}.rs\"\n")),
            "fuzz/Cargo.toml lacks {name}"
        );
    }
}

#[test]
fn the_same_seed_makes_the_same_inputs() {
    let corpus = vec![b"one".to_vec(), b"another".to_vec()];
    let inputs = |seed| {
        let mut generator = nacre_fuzz::Generator::new(seed);
        (0..100).map(|_| generator.input(&corpus)).collect::<Vec<_>>()
    };
    assert_eq!(inputs(7), inputs(7));
    assert_ne!(inputs(7), inputs(9));
    assert!(inputs(7).iter().collect::<BTreeSet<_>>().len() > 50, "inputs differ");
}
