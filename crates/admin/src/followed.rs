//! How far a pool is that follows a writer elsewhere: noted by `fs/newer_state.rs`, shown among the figures.

/// See the file's head.
#[derive(Debug)]
pub(crate) struct Followed {
    /// The generation that its file systems are of.
    pub(crate) generation: u64,
    /// Why it could not go on the last time.
    pub(crate) error: Option<String>,
}
