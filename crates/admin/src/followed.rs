//! Position of a pool that follows a writer on another machine: set by `fs/newer_state.rs`, shown among the figures.

/// Position of a following pool; see the file's head.
#[derive(Debug)]
pub(crate) struct Followed {
    /// The generation of its file systems' state.
    pub(crate) generation: u64,
    /// Error of the last attempt to move to a newer state.
    pub(crate) error: Option<String>,
}
