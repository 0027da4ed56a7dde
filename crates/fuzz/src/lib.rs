//! Fuzz targets: each takes any bytes to one decoder, and panics where that answers nonsense. A
//! decoder that panics by itself is found as well.
//!
//! Callers: `tests/corpus.rs` (every run of the tests: kept inputs, then inputs made of them), and
//! the programs of `fuzz/`, by which libFuzzer looks for new ones. The kept inputs of a target are
//! in `fuzz/corpus/NAME/`.
//!
//! Invariants:
//! - A target depends on nothing but its input: the same bytes, the same way.
//! - Checksums are put right before bytes are decoded: what random bytes never get past would hide
//!   everything behind it.
//! - A target needs no file, no device and no privilege.

#![forbid(unsafe_code)]

mod cage;
mod feed;
mod messages;
mod pool;
mod tree;
mod union;
mod words;

pub use cage::{cage_checkpoint, cage_log};
pub use feed::{Generator, feed};
pub use messages::messages;
pub use pool::{
    pool_deadlist, pool_frame, pool_label, pool_log, pool_log_area, pool_names, pool_properties, pool_root, pool_rows,
    pool_segments, pool_unpack, send_stream,
};
pub use tree::pool_tree;
pub use union::union_marks;
pub use words::{acl, map_words, perms, sizes, stack_line, stack_toml, tier_words, union_words};

/// A target.
pub type Target = fn(&[u8]);

/// All targets by the names of their corpus folders and of the programs for libFuzzer.
pub const TARGETS: &[(&str, Target)] = &[
    ("acl", acl),
    ("cage_checkpoint", cage_checkpoint),
    ("cage_log", cage_log),
    ("fuse_mount_table", fuse_mount_table),
    ("fuse_request", fuse_request),
    ("map_words", map_words),
    ("messages", messages),
    ("perms", perms),
    ("pool_deadlist", pool_deadlist),
    ("pool_frame", pool_frame),
    ("pool_label", pool_label),
    ("pool_log", pool_log),
    ("pool_log_area", pool_log_area),
    ("pool_names", pool_names),
    ("pool_properties", pool_properties),
    ("pool_root", pool_root),
    ("pool_rows", pool_rows),
    ("pool_segments", pool_segments),
    ("pool_tree", pool_tree),
    ("pool_unpack", pool_unpack),
    ("send_stream", send_stream),
    ("sizes", sizes),
    ("stack_line", stack_line),
    ("stack_toml", stack_toml),
    ("tier_words", tier_words),
    ("union_marks", union_marks),
    ("union_words", union_words),
];

/// A request of the kernel, as the fuse device delivers it.
pub fn fuse_request(data: &[u8]) {
    fusewire::fuzz::request(data);
}

/// A table of mounts, as `/proc/self/mountinfo` shows it.
pub fn fuse_mount_table(data: &[u8]) {
    fusewire::fuzz::mount_table(data);
}
