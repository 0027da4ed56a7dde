//! Unions for tests: over trees in memory and over real directories.

// Each test binary uses what it needs.
pub mod recorded;

use nacre_layers::{
    host::{Host, HostOptions},
    mem::Mem,
};
use nacre_union::{BranchMode, Union, UnionOptions};
use nacre_vfs::Layer;
use proptest::test_runner::{Config, TestRng, TestRunner};
use std::{
    cell::Cell,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

/// Runs random cases: the same ones each time, others with `NACRE_MODEL_SEEDS=random`.
pub fn runner(config: Config) -> TestRunner {
    if std::env::var_os("NACRE_MODEL_SEEDS").is_some() {
        return TestRunner::new(config);
    }
    let algorithm = config.rng_algorithm;
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(algorithm))
}

/// Branches by their modes: `rw` or `ro`.
pub fn union(branches: Vec<(Arc<dyn Layer>, &str)>, options: UnionOptions) -> Arc<dyn Layer> {
    union_itself(branches, options)
}

/// The same, for what is not part of the contract of layers.
pub fn union_itself(branches: Vec<(Arc<dyn Layer>, &str)>, options: UnionOptions) -> Arc<Union> {
    let branches = branches.into_iter().map(|(layer, mode)| (layer, mode_of(mode))).collect();
    Arc::new(Union::new(branches, options).expect("the union is built"))
}

fn mode_of(word: &str) -> BranchMode {
    BranchMode::parse(word).expect("a branch mode")
}

/// An empty tree in memory.
pub fn mem() -> Arc<dyn Layer> {
    Arc::new(Mem::new())
}

/// A real directory as a layer.
pub fn host(path: &Path) -> Arc<dyn Layer> {
    Arc::new(Host::open(HostOptions::new(path)).expect("the directory is opened"))
}

/// Real directories that go with this value.
pub struct Directories {
    base: TempDir,
    count: Cell<usize>,
}

impl Directories {
    pub fn new() -> Directories {
        Directories { base: tempfile::tempdir().unwrap(), count: Cell::new(0) }
    }

    /// A new empty directory.
    pub fn fresh(&self) -> PathBuf {
        let path = self.base.path().join(self.count.get().to_string());
        self.count.set(self.count.get() + 1);
        std::fs::create_dir(&path).unwrap();
        path
    }
}
