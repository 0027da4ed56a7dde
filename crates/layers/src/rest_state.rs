//! Whether a layer hears everything, or rests: see `Layer::rest`. Used by `host/watch/resting.rs`
//! and by cages, which say what it means there.

use std::sync::atomic::{AtomicU8, Ordering};

/// It hears everything.
pub const AWAKE: u8 = 0;
/// It is to rest soon: whoever is wanted meanwhile makes it awake again.
pub const DROWSY: u8 = 1;
/// It rests.
pub const RESTING: u8 = 2;

/// It rested, and what it has missed is being looked at: it hears everything, but who wants it has
/// to wait.
pub const WAKING: u8 = 3;

/// One of these.
#[derive(Default)]
pub struct RestState(AtomicU8);

impl RestState {
    /// Whether it is in this state.
    pub fn is(&self, state: u8) -> bool {
        self.0.load(Ordering::Acquire) == state
    }

    /// Answers whether it was `from`, and is `to` now.
    pub fn turns(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// It is in this state from now on.
    pub fn set(&self, state: u8) {
        self.0.store(state, Ordering::Release);
    }
}
