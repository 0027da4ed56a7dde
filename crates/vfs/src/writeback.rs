//! Write-back: a door's kernel takes write(2) into its page cache without asking anybody, and
//! passes the pages on later.
//!
//! A layer that counts what is written (a size limit) cannot see such writes when they happen. So
//! it decides file by file whether the door gets a lease on them
//! ([`crate::OpenFile::writeback_lease`]), and while there is room it lets them be. What the door
//! holds back is bounded ([`WritebackHost::dirty_limit`]); when less room than that is left, the
//! layer recalls its leases ([`WritebackHost::recall`]), and the door announces every write from
//! then on. What was accepted then always fits.

use crate::Result;
use std::{sync::Arc, time::Duration};

/// A layer that may let a door hold back writes to some of its files.
pub trait WritebackLayer: Send + Sync {
    /// A door offers it; answers whether the layer takes the offer. Called once at most, before the
    /// first look-up, by doors that can.
    fn accept(&self, door: &Arc<dyn WritebackHost>) -> bool;

    /// Whether writes to any file need not be announced at this moment, for doors that are not asked
    /// when a file is opened. Cheap, as [`WritebackLease::unannounced`].
    fn unannounced(&self) -> bool {
        false
    }

    /// The door goes on after another process, of which it may hold writes back: all that it may, and
    /// nobody knows which of them were announced. It has begun with the files that they may be of
    /// ([`WritebackLease::begin_unopened`]).
    fn goes_on(&self) {}
}

/// The layer's side: the permission to hold back writes to one open file.
pub trait WritebackLease: Send + Sync {
    /// A door is about to collect the writes to this file, until it closes it; answers whether it
    /// may. Before this, and where the answer is no, each write is passed on when it happens.
    /// Called at most once for an open file.
    fn begin(&self) -> bool;

    /// The same where the door has no choice: its kernel opens files without a request, and collects
    /// whatever is written to them. Where [`WritebackLease::begin`] would say no, each write is
    /// announced.
    fn begin_unopened(&self) {}

    /// Whether writes need not be announced at this moment. Cheap: asked with every answer that the
    /// door's caches live on.
    fn unannounced(&self) -> bool;

    /// Whether writes have to wait for a moment before they begin ([`WritebackLease::wait`]):
    /// something needs to be true of all files at once. They are announced then.
    fn stopped(&self) -> bool {
        false
    }

    /// Waits until writes are stopped no more, at most so long: whoever waits may hold what those
    /// need who have stopped them.
    fn wait(&self, most: Duration) {
        let _ = most;
    }

    /// A write is about to be collected. May wait until what the door held back has arrived.
    ///
    /// # Errors
    /// ENOSPC or EDQUOT: the write must not happen.
    fn announce(&self, write: WriteAhead) -> Result<()>;
}

/// What a door can tell of a write(2) that is about to begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteAhead {
    /// Where, bytes from the beginning of the file; `None` for its end, and where the door cannot
    /// tell.
    pub offset: Option<u64>,
    /// How many bytes; `None` where the door cannot tell.
    pub length: Option<u64>,
}

impl WriteAhead {
    /// A write at the end.
    pub fn append(length: Option<u64>) -> WriteAhead {
        WriteAhead { offset: None, length }
    }
}

/// The door's side: what a layer that has taken the offer may ask of it.
pub trait WritebackHost: Send + Sync {
    /// The most that the door can hold back while `files` files are open for collected writes,
    /// bytes; including what single writes that are under way may still add after a recall.
    fn dirty_limit(&self, files: usize) -> u64;

    /// Whether files are opened without the door: any of them may be written to at any time, and what
    /// is held back counts also while none is known to be.
    fn opens_unasked(&self) -> bool {
        false
    }

    /// The layer lets in whatever arrives, also what no permission covers: an answer of the door
    /// that crosses a recall may be taken for true until the next write arrives. Called once, when
    /// the layer takes the offer.
    fn lets_in(&self);

    /// From when this returns, every write that begins is announced. Does not wait for anything;
    /// may be called inside a write. Of a file that nobody has written to lately, the first write
    /// may begin without ([`WritebackHost::recall_unopened`]).
    fn recall(&self);

    /// The same for files that nobody has written to lately, where a door is not asked when they are
    /// opened. Takes longer than [`WritebackHost::recall`], as it concerns every file that is known.
    fn recall_unopened(&self) {}

    /// Makes the door pass on everything that it holds back; returns when all of it has been
    /// written. Never called inside an operation of the layer: it waits for such.
    ///
    /// # Errors
    /// Where the door cannot; what is held back must then be counted as held back on.
    fn flush(&self) -> Result<()>;
}
