//! Write-back caching: a front end's kernel takes write(2) into its page cache without a request, and writes the
//! pages back later.
//!
//! A layer that counts written data (a size limit) cannot see these writes when they happen. So it decides file by
//! file whether the front end gets a lease for them ([`crate::OpenFile::writeback_lease`]), and while there is space
//! it allows all of them. The dirty data of the front end is bounded ([`WritebackHost::dirty_limit`]); when less
//! space than that remains, the layer recalls its leases ([`WritebackHost::recall`]), and from then on the front end
//! reserves every write. Accepted data then always fits.

use crate::Result;
use std::{sync::Arc, time::Duration};

/// A layer that may let a front end cache writes to some of its files.
pub trait WritebackLayer: Send + Sync {
    /// Offers write-back caching; returns whether the layer accepts. Called once at most, before the first lookup, by
    /// front ends that can cache writes.
    fn accept(&self, door: &Arc<dyn WritebackHost>) -> bool;

    /// Whether writes to all files need no reservation at this moment, for front ends whose kernel opens files
    /// without a request. Cheap, as [`WritebackLease::unannounced`].
    fn unannounced(&self) -> bool {
        false
    }

    /// Notes a failover: the front end may have dirty data of the previous process, up to its limit, and it is
    /// unknown which of it was reserved. Called after it has entered the files that may have some
    /// ([`WritebackLease::begin_unopened`]).
    fn goes_on(&self) {}
}

/// The layer's side: the lease for caching writes to one open file.
pub trait WritebackLease: Send + Sync {
    /// Asks whether writes to this file may be cached until it is closed. Before this call, and where it returns
    /// false, each write is sent at once. Called at most once for an open file.
    fn begin(&self) -> bool;

    /// Begins write-back caching where the front end has no choice: its kernel opens files without a request, and
    /// caches all writes to them. Where [`WritebackLease::begin`] would return false, each write is reserved.
    fn begin_unopened(&self) {}

    /// Whether writes need no reservation at this moment. Cheap: called with every reply that the kernel caches.
    fn unannounced(&self) -> bool;

    /// Whether writes have to wait before they begin ([`WritebackLease::wait`]), during a write barrier over all
    /// files. Writes are reserved then.
    fn stopped(&self) -> bool {
        false
    }

    /// Waits for the end of the write barrier, for `most` at most: the waiting caller may hold locks that the owner
    /// of the barrier needs.
    fn wait(&self, most: Duration) {
        let _ = most;
    }

    /// Reserves a write that is about to be cached. May wait until dirty data of the front end has arrived.
    ///
    /// # Errors
    /// ENOSPC or EDQUOT: the write must not happen.
    fn announce(&self, write: WriteAhead) -> Result<()>;
}

/// Location and length of a write(2) that is about to begin, as far as a front end knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteAhead {
    /// Offset from the beginning of the file, bytes; `None` for its end, and where it is not known.
    pub offset: Option<u64>,
    /// Length, bytes; `None` where it is not known.
    pub length: Option<u64>,
}

impl WriteAhead {
    /// A write at the end.
    pub fn append(length: Option<u64>) -> WriteAhead {
        WriteAhead { offset: None, length }
    }
}

/// The front end's side, for a layer that has accepted write-back caching.
pub trait WritebackHost: Send + Sync {
    /// Maximum dirty bytes of the front end while `files` files are open for cached writes; including the data that
    /// single writes in progress may still add after a recall.
    fn dirty_limit(&self, files: usize) -> u64;

    /// Whether files are opened without a request: any of them may be written to at any time, and the limit counts
    /// even while no file is known to be written to.
    fn opens_unasked(&self) -> bool {
        false
    }

    /// Notes that the layer accepts all data that arrives, even without a reservation: then a reply that crosses a
    /// recall may stay valid until the next write arrives. Called once, when the layer accepts write-back caching.
    fn lets_in(&self);

    /// Requires reservations: when this returns, every write that begins is reserved. Does not wait for anything; may
    /// be called inside a write. The first write to a file without recent writes may begin without
    /// ([`WritebackHost::recall_unopened`]).
    fn recall(&self);

    /// Requires reservations for files without recent writes, where files are opened without a request. Takes longer
    /// than [`WritebackHost::recall`], as it concerns every known file.
    fn recall_unopened(&self) {}

    /// Writes all dirty data of the front end back; returns when all of it has been written. Never called inside an
    /// operation of the layer: it waits for those.
    ///
    /// # Errors
    /// Where the front end cannot; the dirty data must then still be counted as dirty.
    fn flush(&self) -> Result<()>;
}
