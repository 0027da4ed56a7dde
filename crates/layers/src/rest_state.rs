//! State of a layer's idle watch: see `Layer::rest`. Used by `host/watch/resting.rs` and by cages,
//! which define what it means there.

use std::sync::atomic::{AtomicU8, Ordering};

/// The layer watches everything.
pub const AWAKE: u8 = 0;
/// The layer is about to become idle; a use meanwhile makes it awake again.
pub const DROWSY: u8 = 1;
/// The layer is idle: it watches known files only.
pub const RESTING: u8 = 2;

/// The layer was idle, and missed changes are being found: it watches everything again, but uses
/// have to wait.
pub const WAKING: u8 = 3;

/// One of these states, changed atomically.
#[derive(Default)]
pub struct RestState(AtomicU8);

impl RestState {
    /// Whether it is in this state.
    pub fn is(&self, state: u8) -> bool {
        self.0.load(Ordering::Acquire) == state
    }

    /// Changes the state from `from` to `to`; returns whether it was `from`.
    pub fn turns(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Sets the state.
    pub fn set(&self, state: u8) {
        self.0.store(state, Ordering::Release);
    }
}
