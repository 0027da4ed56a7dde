//! Fuzz targets: each passes arbitrary bytes to one decoder, and panics where the result is
//! inconsistent. A decoder that panics itself is found as well.
//!
//! Callers: `tests/corpus.rs` (every run of the tests: the corpus, then mutations of it), and the
//! programs of `fuzz/`, with which libFuzzer searches for new inputs. The corpus of a target is in
//! `fuzz/corpus/NAME/`.
//!
//! Invariants:
//! - A target depends on nothing but its input: the same bytes give the same run.
//! - Checksums are corrected before bytes are decoded: otherwise random bytes would never reach the code behind them.
//! - A target needs no file, no device and no privilege.

#![forbid(unsafe_code)]

mod cage;
mod feed;
mod messages;
mod pool;
mod sealed;
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
pub use sealed::{key_rows, sealed_node};
pub use tree::pool_tree;
pub use union::union_marks;
pub use words::{acl, map_words, perms, sizes, stack_line, stack_toml, tier_words, union_words};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets by the names of their corpus folders and of the programs for libFuzzer.
pub const TARGETS: &[(&str, Target)] = &[
    ("acl", acl),
    ("cage_checkpoint", cage_checkpoint),
    ("cage_log", cage_log),
    ("fuse_mount_table", fuse_mount_table),
    ("fuse_request", fuse_request),
    ("key_rows", key_rows),
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
    ("sealed_node", sealed_node),
    ("send_stream", send_stream),
    ("sizes", sizes),
    ("stack_line", stack_line),
    ("stack_toml", stack_toml),
    ("tier_words", tier_words),
    ("union_marks", union_marks),
    ("union_words", union_words),
];

/// Decodes a request of the kernel, as the fuse device delivers it.
pub fn fuse_request(data: &[u8]) {
    fusewire::fuzz::request(data);
}

/// Parses a mount table in the form of `/proc/self/mountinfo`.
pub fn fuse_mount_table(data: &[u8]) {
    fusewire::fuzz::mount_table(data);
}
