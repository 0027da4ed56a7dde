//! The stacks that every suite runs over: each layer alone, each filter over each leaf, and many
//! filters at once.
//!
//! Callers: `conformance.rs` and `model.rs`. A new layer is added here, and both suites cover it.
use nacre_layers::context::Context;
use nacre_stack as stack;
use nacre_stack::spec::StackSpec;
use nacre_vfs::Layer;
use std::path::Path;
use std::sync::Arc;

/// Filters that change nothing that a user could see, as they are written after a leaf.
pub const INVISIBLE: &[&str] = &[
    "remap",
    "trace",
    "throttle:read-rate=1000G,write-rate=1000G",
    "remap:map=70000/70001:@70000/@70001",
    "remap:hide=never-used-name-*",
    "remap:uid-offset=10 | remap:uid-offset=-10",
    "remap:gid-offset=-0 | trace | remap | trace",
    "shift:uid=0:1000:4294966295:4294966295:0:1000 | shift:uid=1000:0:4294966295:0:4294966295:1000",
    "override-stat:attribute=privileged | trace",
    "cage:size=1000G",
    "cage:size=1000G,inodes=1000000,when-full=drop-oldest | trace | cage:inodes=1000000",
];

/// Builds a stack from its one-line form.
pub fn build(line: &str) -> Arc<dyn Layer> {
    let spec = StackSpec::from_line(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"));
    let context = Context::system().expect("the surroundings");
    stack::build(&spec, &context).unwrap_or_else(|error| panic!("{line}: {error}")).layer
}

/// A stack over a new tree in memory.
pub fn over_mem(filters: &str) -> Arc<dyn Layer> {
    build(&if filters.is_empty() { "mem".to_owned() } else { format!("mem | {filters}") })
}

/// Directories that the host layer shows, one for each layer that is built, removed at the end.
pub struct Directories(tempfile::TempDir);

impl Directories {
    /// A place for directories.
    pub fn new() -> Directories {
        Directories(tempfile::tempdir().expect("scratch directory"))
    }

    /// A stack over a new empty directory.
    pub fn over_host(&self, settings: &str, filters: &str) -> Arc<dyn Layer> {
        let directory = tempfile::tempdir_in(self.0.path()).expect("directory").keep();
        let filters = if filters.is_empty() { String::new() } else { format!(" | {filters}") };
        build(&format!("host:{}{settings}{filters}", shown(&directory)))
    }
}

fn shown(directory: &Path) -> &str {
    directory.to_str().expect("a path in UTF-8")
}

/// What a thread that acts for others has to do once: see the head of the host layer.
pub fn prepare_thread() {
    if rustix::process::geteuid().is_root() {
        nacre_layers::host::prepare_worker().expect("prepare the thread");
    }
}
