//! Where a test has the process die: between any two stores.
//!
//! Called with each store; does nothing but in tests, whose threads die for themselves.

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// This thread dies instead of storing any more after so many stores.
#[cfg(test)]
pub(super) fn after(stores: Option<u32>) {
    LEFT.set(stores);
}

/// Something is about to be stored.
pub(super) fn store() {
    #[cfg(test)]
    match LEFT.get() {
        Some(0) => std::panic::resume_unwind(Box::new("killed")),
        left => LEFT.set(left.map(|left| left - 1)),
    }
}
