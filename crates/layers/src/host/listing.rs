//! Directory listings.
//!
//! A listing comes in pieces: each call says where to go on. The descriptor and what is left in its
//! buffer are kept between the calls, so that a sequential listing reads every record once; a call
//! for any other position opens the directory anew and seeks. Positions are the host's own
//! (`d_off`), which survive a restart; those of ext4, of 63 bits, are shortened to the 31 bits that
//! 32-bit programs can take (`positions.rs`). A file system whose positions cannot be told to others (0,
//! or negative as a signed number) is served by counting records instead, from the beginning each
//! time. Where the kernel has to load the inodes first, a thread goes ahead (`ahead.rs`).
//! Invariants: a kept stream is used by one call at a time (it is taken out of the table
//! meanwhile); one on a foreign mount is closed by a thread when its time is over, as it keeps the
//! mount from being unmounted; no listing goes on with a buffer of another listing that was read
//! before its own start: it may hold names that were removed since.

use super::{
    HostShared,
    ahead::{Ahead, Reached},
    errno,
    locate::is_gone,
    node::HostNode,
    positions::{self, Continued, Positions},
};
use nacre_sys::{
    descriptors,
    directory::{self, DirRecord},
};
use nacre_vfs::{DirEntry, DirSink, Entry, Errno, Kind, Name, Result};
use parking_lot::Mutex;
use rustix::fs::SeekFrom;
use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Bytes read from a directory at once.
const BUFFER: usize = 64 << 10;

/// Maximum number of listings kept between calls; fewer where the process may hold few descriptors.
const KEPT_MAX: usize = 16;

/// Time per entry above which the kernel is loading inodes: on ext4, an entry takes 5 us then, and
/// 1.6 us where the inode is cached.
const COLD: Duration = Duration::from_nanos(2_500);

/// Maximum age of a kept buffer: a native listing returns buffered names for about as long.
const KEPT_FOR: Duration = Duration::from_secs(2);

/// Number of start counters shared by all directories. A collision costs one more opening.
const BEGINNINGS: usize = 64;

/// A listing in progress.
struct Stream {
    directory: Arc<OwnedFd>,
    /// The directory is on another mount than the source's root.
    foreign: bool,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The position of the next record, as in `readdir`.
    position: u64,
    /// Number of records before it, where that is known.
    index: Option<u64>,
    /// Its positions are hashes of ext4, and shortened.
    shortened: bool,
    /// It repeats names, under other positions than they had.
    repeats: bool,
    at_end: bool,
    /// Examining entries is slow in this directory.
    cold: bool,
    /// Progress for the thread that reads ahead in this buffer.
    reached: Option<Reached>,
}

/// A stream kept between two calls.
struct Kept {
    node: Arc<HostNode>,
    since: Instant,
    stream: Stream,
}

/// All streams kept between two calls.
#[derive(Default)]
struct KeptStreams {
    streams: Vec<Kept>,
    /// A thread is running that closes streams on foreign mounts after their time.
    closing: bool,
}

impl KeptStreams {
    fn take_stale(&mut self) -> Vec<Kept> {
        self.streams.extract_if(.., |kept| kept.since.elapsed() > KEPT_FOR).collect()
    }
}

/// The streams of one source.
pub(super) struct Listings {
    most: usize,
    kept: Arc<Mutex<KeptStreams>>,
    /// Number of listings begun, by directory.
    begun: [AtomicU64; BEGINNINGS],
    /// What positions are on each device.
    positions: Mutex<HashMap<u32, Positions>>,
    ahead: Ahead,
    /// Treats every listing with attributes as slow.
    #[cfg(test)]
    pub(super) always_ahead: std::sync::atomic::AtomicBool,
}

impl Listings {
    pub(super) fn new() -> Listings {
        Listings {
            most: (descriptors::room() / 32).clamp(1, KEPT_MAX),
            kept: Arc::default(),
            begun: std::array::from_fn(|_| AtomicU64::default()),
            positions: Mutex::default(),
            ahead: Ahead::default(),
            #[cfg(test)]
            always_ahead: std::sync::atomic::AtomicBool::default(),
        }
    }

    /// The counter of listings begun for this directory (and some others).
    fn begun(&self, node: &Arc<HostNode>) -> Option<&AtomicU64> {
        self.begun.get(Arc::as_ptr(node).addr() / align_of::<HostNode>() % BEGINNINGS)
    }

    /// Begins a listing: kept streams of this directory are older, and dropped.
    fn begin(&self, node: &Arc<HostNode>) {
        // Counted first: a stream in use now is either dropped below, or found to be older when it
        // comes back.
        if let Some(begun) = self.begun(node) {
            begun.fetch_add(1, Ordering::Relaxed);
        }
        let _older: Vec<Kept> = self.kept.lock().streams.extract_if(.., |kept| Arc::ptr_eq(&kept.node, node)).collect();
    }

    /// Returns the stream kept at a position, and the counter value for `keep`.
    fn take(&self, node: &Arc<HostNode>, position: u64) -> (Option<Stream>, u64) {
        let (found, begun, _stale) = {
            let mut kept = self.kept.lock();
            let stale = kept.take_stale();
            let is_it = |kept: &Kept| kept.stream.position == position && Arc::ptr_eq(&kept.node, node);
            let at = kept.streams.iter().position(is_it);
            let begun = self.begun(node).map_or(0, |begun| begun.load(Ordering::Relaxed));
            (at.map(|at| kept.streams.remove(at)), begun, stale)
        };
        (found.map(|kept| kept.stream), begun)
    }

    /// Keeps a stream for the next call, unless another listing has begun since `take` returned
    /// `begun`.
    #[expect(clippy::disallowed_methods, reason = "how long a listing is kept")]
    fn keep(&self, node: &Arc<HostNode>, begun: u64, stream: Stream) {
        let foreign = stream.foreign;
        let kept = Kept { node: Arc::clone(node), since: Instant::now(), stream };
        let _oldest = {
            let mut all = self.kept.lock();
            if self.begun(node).is_some_and(|now| now.load(Ordering::Relaxed) != begun) {
                return;
            }
            if foreign && !all.closing {
                match self.close_in_time() {
                    Ok(()) => all.closing = true,
                    Err(error) => return tracing::debug!(%error, "a listing on a foreign mount is not kept"),
                }
            }
            all.streams.push(kept);
            (all.streams.len() > self.most).then(|| all.streams.remove(0))
        };
    }

    /// Starts the thread that closes streams after their time, until none remains on a foreign
    /// mount: an open directory keeps a mount from being unmounted.
    fn close_in_time(&self) -> std::io::Result<()> {
        let kept = Arc::downgrade(&self.kept);
        let thread = std::thread::Builder::new().name("nacre-listings".to_owned()).stack_size(128 << 10);
        thread.spawn(move || while close_stale(&kept) {}).map(drop)
    }

    /// What positions are on the device of a directory.
    fn positions(&self, device: u32, directory: BorrowedFd<'_>) -> Result<Positions> {
        if let Some(known) = self.positions.lock().get(&device) {
            return Ok(*known);
        }
        let found = Positions::of(directory)?;
        // Another thread may have found out meanwhile that they have to be counted.
        Ok(*self.positions.lock().entry(device).or_insert(found))
    }

    /// Number of kept listings.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.kept.lock().streams.len()
    }

    /// Number of names examined ahead.
    #[cfg(test)]
    pub(super) fn examined_ahead(&self) -> usize {
        self.ahead.examined()
    }

    fn is_cold(&self, elapsed: Duration, entries: u32) -> bool {
        #[cfg(test)]
        if self.always_ahead.load(Ordering::Relaxed) {
            return true;
        }
        entries > 0 && elapsed > COLD * entries
    }

    /// Treats a device's positions as not usable.
    #[cfg(test)]
    pub(super) fn count_positions(&self, device: u32) {
        self.positions.lock().insert(device, Positions::Counted);
    }
}

/// Waits, then closes streams that are old by now; returns whether others remain to be closed.
#[expect(clippy::disallowed_methods, reason = "how long a listing is kept")]
fn close_stale(kept: &Weak<Mutex<KeptStreams>>) -> bool {
    std::thread::sleep(KEPT_FOR);
    let Some(kept) = kept.upgrade() else { return false };
    let mut all = kept.lock();
    let stale = all.take_stale();
    all.closing = all.streams.iter().any(|kept| kept.stream.foreign);
    let more = all.closing;
    drop(all);
    drop(stale);
    more
}

/// Whether a position of the file system can be passed on.
fn is_tellable(position: i64) -> bool {
    position > 0
}

impl Stream {
    fn new(directory: OwnedFd, foreign: bool, from: u64, positions: Positions) -> Result<Stream> {
        let counted = positions == Positions::Counted;
        let mut buffer = vec![0; BUFFER].into_boxed_slice();
        let continued = match positions {
            Positions::Hashed if from != 0 => positions::seek(directory.as_fd(), from, &mut buffer)?,
            Positions::Own | Positions::Hashed | Positions::Counted => None,
        };
        if from != 0 && !counted && continued.is_none() {
            rustix::fs::seek(&directory, SeekFrom::Start(from)).map_err(errno)?;
        }
        let index = (from == 0 || counted).then_some(0);
        let mut stream = Stream {
            directory: Arc::new(directory),
            foreign,
            buffer,
            start: 0,
            end: 0,
            position: if counted { 0 } else { from },
            index,
            shortened: continued.is_some(),
            repeats: continued.as_ref().is_some_and(|continued| !continued.is_exact),
            at_end: false,
            cold: false,
            reached: None,
        };
        if counted {
            while stream.index.is_some_and(|index| index < from) && stream.fill()? {
                let Some(record) = stream.peek() else { break };
                let length = record.length;
                stream.advance(length, 0);
            }
            stream.position = from;
        }
        if let Some(Continued { end, start, position, .. }) = continued {
            (stream.start, stream.end, stream.position) = (start, end, position);
            stream.at_end = end == 0;
        }
        Ok(stream)
    }

    /// Fills an empty buffer; returns false at the end.
    fn fill(&mut self) -> Result<bool> {
        if self.start == self.end && !self.at_end {
            self.start = 0;
            self.reached = None;
            self.end = directory::read(self.directory.as_fd(), &mut self.buffer)?;
            self.at_end = self.end == 0;
        }
        Ok(!self.at_end)
    }

    fn peek(&self) -> Option<DirRecord<'_>> {
        directory::first(self.buffer.get(self.start..self.end)?)
    }

    /// Starts the examination of the remaining buffer ahead of the listing.
    fn go_ahead(&mut self, ahead: &Ahead) {
        if let (None, Some(rest)) = (&self.reached, self.buffer.get(self.start..self.end)) {
            let reached = self.reached.insert(Arc::new(AtomicUsize::new(self.start)));
            ahead.examine(&self.directory, rest, self.start, reached);
        }
    }

    fn advance(&mut self, length: usize, position: u64) {
        self.start += length;
        if let Some(reached) = &self.reached {
            reached.store(self.start, Ordering::Relaxed);
        }
        self.position = position;
        self.index = self.index.map(|index| index + 1);
    }
}

/// The file type in a record.
fn kind(record: &DirRecord<'_>) -> Option<Kind> {
    Kind::from_mode(u32::from(record.kind) << 12)
}

impl HostShared {
    pub(super) fn readdir(
        &self,
        node: &Arc<HostNode>,
        from: u64,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        if from == 0 {
            self.listings.begin(node);
        }
        let (kept, begun) = self.listings.take(node, from);
        let mut stream = match kept.filter(|_| from != 0) {
            Some(stream) => stream,
            None => {
                let held = self.directories.get(node)?;
                let directory = self.open_held(&held)?;
                self.watch.before_names(node, directory.as_fd());
                let positions = self.listings.positions(node.device(), directory.as_fd())?;
                Stream::new(directory, held.is_foreign(), from, positions)?
            }
        };
        let more = self.list(node, &mut stream, attributes, sink)?;
        // At the end, one more call will find the end again; a listing that was empty from the
        // start is not asked again. On a foreign mount, that call opens the directory anew.
        if (more || stream.position != from && !stream.foreign) && !stream.repeats {
            self.listings.keep(node, begun, stream);
        }
        Ok(())
    }

    /// Passes records to the sink until it is full (true) or the directory ends (false).
    #[expect(clippy::disallowed_methods, reason = "measures how long entries take")]
    fn list(
        &self,
        node: &Arc<HostNode>,
        stream: &mut Stream,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<bool> {
        let positions = self.listings.positions(node.device(), stream.directory.as_fd())?;
        let mut counted = positions == Positions::Counted;
        let (since, mut entries) = (Instant::now(), 0);
        while stream.fill()? {
            stream.shortened |= positions == Positions::Hashed
                && !positions::is_unshortened(stream.position)
                && stream.peek().is_some_and(|record| positions::is_long(&record));
            let Some(record) = stream.peek() else { return Err(Errno::EIO) };
            if !counted && !is_tellable(record.next) {
                self.listings.positions.lock().insert(node.device(), Positions::Counted);
                counted = true;
            }
            let next = match (counted, stream.index) {
                (false, _) if stream.shortened => positions::shortened(record.next.cast_unsigned(), stream.position),
                (false, _) => record.next.cast_unsigned(),
                (true, Some(index)) => index + 1,
                // Positions were usable until now, in the middle of a directory that was entered by
                // one of them.
                (true, None) => return Err(Errno::EOVERFLOW),
            };
            let length = record.length;
            if let Some(full) = self.hand_out(node, stream, &record, next, attributes, sink)?
                && full
            {
                if attributes && !self.remote {
                    stream.cold |= stream.reached.is_none() && self.listings.is_cold(since.elapsed(), entries);
                    if stream.cold {
                        stream.go_ahead(&self.listings.ahead);
                    }
                }
                return Ok(true);
            }
            entries += 1;
            stream.advance(length, next);
        }
        Ok(false)
    }

    /// Passes one record to the sink. `None` if it is skipped, else whether the sink was full.
    fn hand_out(
        &self,
        node: &Arc<HostNode>,
        stream: &Stream,
        record: &DirRecord<'_>,
        next: u64,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<Option<bool>> {
        // The front end makes `.` and `..`; names that Linux cannot have are a host's fault.
        let Ok(name) = Name::new(record.name) else { return Ok(None) };
        let mut entry = None;
        // With links resolved, the type is only known after following the link.
        if attributes && sink.wants_file(name)
            || self.resolves_links() && kind(record).is_none_or(|kind| kind == Kind::Symlink)
        {
            entry = match self.listed(node, stream, name) {
                Ok(found) => Some(found),
                Err(error) if is_gone(error) => return Ok(None),
                // An entry that cannot be examined (our own mount point, for example) must not hide
                // the others.
                Err(_) => None,
            };
        }
        let kind =
            entry.as_ref().map(|found: &Entry| found.attr.kind).or_else(|| kind(record)).map(|kind| match kind {
                Kind::Block if self.options.block_devices => Kind::File,
                kind => kind,
            });
        let ino = entry.as_ref().map_or(record.ino, |found| found.attr.id.ino);
        let entry = entry.filter(|_| attributes);
        Ok(Some(!sink.push(DirEntry { name, ino, kind, next, entry })))
    }

    fn listed(&self, node: &Arc<HostNode>, stream: &Stream, name: Name<'_>) -> Result<Entry> {
        let directory = stream.directory.as_fd();
        let mut found = self.examine(directory, name.bytes(), true)?;
        if self.watch.cover(self, directory, name.bytes(), &found) {
            found = self.examine(directory, name.bytes(), true)?;
        }
        self.entry(node, directory, name.bytes(), &found)
    }
}
