//! Crash points for tests: a test can kill the process between any two stores.
//!
//! Called with each store; does nothing except in tests, whose threads unwind for themselves.

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// After this many stores, this thread dies at the next one.
#[cfg(test)]
pub(super) fn after(stores: Option<u32>) {
    LEFT.set(stores);
}

/// Crash point before a store.
pub(super) fn store() {
    #[cfg(test)]
    match LEFT.get() {
        Some(0) => std::panic::resume_unwind(Box::new("killed")),
        left => LEFT.set(left.map(|left| left - 1)),
    }
}
