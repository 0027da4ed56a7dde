//! Writes that a door collects before it passes them on: a kernel's write-back cache takes write(2)
//! without asking anybody.
//!
//! A layer that counts what is written (a size limit) cannot see such writes when they happen. So
//! it decides file by file whether writes may be collected ([`crate::OpenFile::collected`]), and
//! while there is room it lets them. The door can hold back a bounded number of bytes
//! ([`Collector::most_held`]); when less room than that is left, the layer recalls its permission
//! ([`Collector::recall`]), and the door announces every write from then on. What was accepted then
//! always fits.

use crate::Result;
use std::{cell::Cell, time::Duration};

thread_local! {
    /// See [`arriving`].
    static ARRIVING: Cell<bool> = const { Cell::new(false) };
    /// See [`arriving_timed`].
    static TIMED: Cell<bool> = const { Cell::new(false) };
}

/// Puts a value back when it is dropped.
struct Before(&'static std::thread::LocalKey<Cell<bool>>, bool);

impl Drop for Before {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Does a write of what a door may have held back, in the thread that calls: so a layer that knows
/// the file to be collected can tell it from one that somebody is making at this moment, whatever
/// lies between the door and the layer.
pub fn arriving<T>(write: impl FnOnce() -> T) -> T {
    let _before = Before(&ARRIVING, ARRIVING.replace(true));
    write()
}

/// The same of a write whose time whoever held it back keeps and tells by itself, before or after:
/// the file's times stay, where a layer can leave them.
pub fn arriving_timed<T>(write: impl FnOnce() -> T) -> T {
    let _before = Before(&TIMED, TIMED.replace(true));
    arriving(write)
}

/// Whether the calling thread is in [`arriving_timed`].
pub fn is_timed() -> bool {
    TIMED.get()
}

/// Whether the calling thread is in [`arriving`].
pub fn is_arriving() -> bool {
    ARRIVING.get()
}

/// The layer's side: the permission to collect writes to one open file.
pub trait Collected: Send + Sync {
    /// A door is about to collect the writes to this file, until it closes it; answers whether it
    /// may. Before this, and where the answer is no, each write is passed on when it happens.
    /// Called at most once for an open file.
    fn begin(&self) -> bool;

    /// Whether writes need not be announced at this moment. Cheap: asked with every answer that the
    /// door's caches live on.
    fn unannounced(&self) -> bool;

    /// Whether writes have to wait for a moment before they begin ([`Collected::wait`]): something
    /// needs to be true of all files at once. They are announced then.
    fn stopped(&self) -> bool {
        false
    }

    /// Waits until writes are stopped no more, at most so long: whoever waits may hold what those
    /// need who have stopped them.
    fn wait(&self, most: Duration) {
        let _ = most;
    }

    /// A write at the end of the file is about to be collected, of `length` bytes (`None` where the
    /// door cannot tell). May wait until what the door held back has arrived.
    ///
    /// # Errors
    /// ENOSPC or EDQUOT: the write must not happen.
    fn announce(&self, length: Option<u64>) -> Result<()>;
}

/// The door's side.
pub trait Collector: Send + Sync {
    /// The most that the door can hold back while `files` files are open for collected writes,
    /// bytes; including what single writes that are under way may still add after a recall.
    fn most_held(&self, files: usize) -> u64;

    /// The layer lets in whatever arrives, also what no permission covers: an answer of the door
    /// that crosses a recall may be taken for true until the next write arrives. Called once, when
    /// the layer takes the offer.
    fn lets_in(&self);

    /// From when this returns, every write that begins is announced. Does not wait for anything;
    /// may be called inside a write.
    fn recall(&self);

    /// Makes the door pass on everything that it holds back; returns when all of it has been
    /// written. Never called inside an operation of the layer: it waits for such.
    ///
    /// # Errors
    /// Where the door cannot; what is held back must then be counted as held back on.
    fn settle(&self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::{arriving, arriving_timed, is_arriving, is_timed};

    #[test]
    fn only_what_is_done_inside_arrives() {
        assert!(!is_arriving());
        assert!(arriving(|| arriving(is_arriving) && is_arriving()));
        assert!(std::panic::catch_unwind(|| arriving(|| panic!("as asked for"))).is_err());
        assert!(!arriving(is_timed) && arriving_timed(|| is_arriving() && is_timed()) && !is_timed());
        assert!(!is_arriving() && !arriving(|| std::thread::spawn(is_arriving).join().unwrap_or(true)));
    }
}
