//! What long verbs tell while they run.

/// Somebody who is told.
pub trait Progress: Send {
    /// A line for people; `false`: nobody listens any more (the verb may go on or end in order).
    fn note(&mut self, line: &str) -> bool;
}

/// Nobody listens, and nothing ends for that.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn note(&mut self, _: &str) -> bool {
        true
    }
}
