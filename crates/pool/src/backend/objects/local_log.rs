//! Local intent log of a pool in an object store (`log=local`): a file for each import, `EPOCH.log`, in a directory
//! of the pool's own on this machine. A copy of the bucket has the same pool and the same numbers of imports: so the
//! directory is that of the pool at one address, and so is each file by its header.
//!
//! ```text
//!  0     a header: where a replay begins, with a checksum
//!  4096  a second header; the one with the higher number is valid
//!  8192  a ring of blocks, as on devices
//! ```
//!
//! Callers: [`Objects`](super::Objects), which records in each root whose log belongs to it, and
//! [`Logs`](super::log::Logs), which appends.
//!
//! Invariants:
//! - Nothing is appended before a root names this file; and as long as appends are possible, every root names
//!   it. So a file that the newest root does not name has nothing that belongs to that state: it is never
//!   replayed, and kept aside where it may hold synced writes.
//! - Blocks are overwritten only after a durable header begins behind them.
//! - One process owns a file (an exclusive `flock`) as long as it may append.
//! - After a failed write or sync nothing is appended: an fsync waits for a commit from then on.
//! - Logs of older versions are in a directory of the pool alone, with headers that name no address. One is replayed
//!   where the newest root names it, and the record of the last import names this address; the others may belong to a
//!   copy, and are left alone. Moved into the directory of an address, a log belongs to it.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::PoolError;
use crate::log::{Area, Blocks, Replayed, Ring, Start, Visit};
use crate::pointer::Txg;

/// Length of the ring, bytes.
const LENGTH: u64 = 64 << 20;
/// Length of a header of the log file, bytes.
const HEAD: u64 = 4096;
const MAGIC: &[u8; 8] = b"nacreLog";
const VERSION: u32 = 2;
/// The version whose headers name no address.
const UNADDRESSED: u32 = 1;
/// File name extensions of a log, and of one that is kept aside.
const LOG: &str = "log";
const ASIDE: &str = "aside";

/// The local logs of a pool.
pub struct LocalLog {
    directory: PathBuf,
    /// The directory of logs of older versions.
    older: Option<PathBuf>,
    /// The logs of older versions are of the pool at this address.
    owns_older: bool,
    pool: u64,
    /// Number of the bucket's address ([`LocalLog::number_of`]).
    address: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Fsyncs go to the local log.
    wanted: bool,
    /// The newest root names this import's file.
    named: bool,
    own: Option<LogFile>,
    /// The replayed log, until a root contains its entries.
    before: Option<LogFile>,
    aside: Vec<PathBuf>,
}

struct LogFile {
    area: Arc<LocalArea>,
    ring: Ring<OfFile>,
    head: Head,
}

/// The file of a ring.
struct LocalArea {
    file: File,
    path: PathBuf,
    is_open: AtomicBool,
    /// The error that ended its use.
    trouble: Mutex<Option<String>>,
}

struct OfFile(Arc<LocalArea>);

/// A header of the log file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Head {
    pool: u64,
    /// Number of the bucket's address; 0 in headers of older versions.
    address: u64,
    epoch: u32,
    number: u64,
    /// The last txg that was known to be committed.
    committed: u64,
    start: Start,
}

impl Head {
    fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.bytes(MAGIC);
        to.u32(if self.address == 0 { UNADDRESSED } else { VERSION });
        to.u32(self.epoch);
        to.u64(self.pool);
        if self.address != 0 {
            to.u64(self.address);
        }
        to.u64(self.number);
        to.u64(self.committed);
        self.start.encode(&mut to);
        let mut head = to.finish();
        let sum = checksum::structure(&head);
        head.extend(sum);
        head.resize(HEAD as usize, 0);
        head
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader::new(bytes);
        let is_log = from.take(MAGIC.len()).ok()? == MAGIC;
        let version = from.u32().ok()?;
        let known = is_log && matches!(version, UNADDRESSED | VERSION);
        let (epoch, pool) = (from.u32().ok()?, from.u64().ok()?);
        let address = if version == VERSION { from.u64().ok()? } else { 0 };
        let (number, committed) = (from.u64().ok()?, from.u64().ok()?);
        let start = Start::decode(&mut from).ok()?;
        let body = bytes.get(..bytes.len() - from.rest().len())?;
        let fits = known && from.take(16).ok()? == checksum::structure(body);
        fits.then_some(Self { pool, address, epoch, number, committed, start })
    }
}

impl LocalArea {
    fn failed(&self, doing: &'static str, source: io::Error) -> PoolError {
        PoolError::Device { device: self.path.display().to_string(), doing, source: Arc::new(source) }
    }

    /// Ends the use of the file after a failed write or sync.
    fn ends<T>(&self, doing: &'static str, done: io::Result<T>) -> Result<T, PoolError> {
        done.map_err(|error| {
            *self.trouble.lock() = Some(format!("'{}': {error}", self.path.display()));
            if self.is_open.swap(false, Ordering::AcqRel) {
                tracing::error!(log = %self.path.display(), %error, "the log on this machine failed: each fsync is a commit from now on");
            }
            self.failed(doing, error)
        })
    }
}

impl Area for OfFile {
    fn length(&self) -> u64 {
        LENGTH
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        self.0.file.read_exact_at(into, 2 * HEAD + offset).map_err(|error| self.0.failed("reading", error))
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError> {
        self.0.ends("writing", self.0.file.write_all_at(from, 2 * HEAD + offset))
    }

    fn sync(&self) -> Result<(), PoolError> {
        self.0.ends("syncing", self.0.file.sync_data())
    }

    fn is_open(&self) -> bool {
        self.0.is_open.load(Ordering::Acquire)
    }
}

impl LogFile {
    fn over(file: File, path: PathBuf, head: Head) -> Result<Self, PoolError> {
        let area = Arc::new(LocalArea { file, path, is_open: AtomicBool::new(true), trouble: Mutex::default() });
        let ring = Ring::new(OfFile(Arc::clone(&area)), head.pool, head.start)?;
        Ok(Self { area, ring, head })
    }

    /// Writes the next header durably.
    fn put_head(&mut self, committed: u64, start: Start) -> Result<(), PoolError> {
        let head = Head { number: self.head.number + 1, committed, start, ..self.head };
        let at = head.number % 2 * HEAD;
        self.area.ends("writing", self.area.file.write_all_at(&head.encode(), at))?;
        self.area.ends("syncing", self.area.file.sync_data())?;
        self.head = head;
        Ok(())
    }

    /// Frees blocks whose records are in a committed root.
    fn forget(&mut self, txg: Txg) {
        let start = self.ring.start_after(txg);
        // Without the header the blocks stay, and the ring fills: then each fsync waits for a commit.
        if start == self.head.start || self.put_head(txg.0, start).is_ok() {
            self.ring.forget(txg, start);
        }
    }

    fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.area.path) {
            tracing::warn!(log = %self.area.path.display(), %error, "a log that nobody needs stays");
        }
    }
}

fn open_file(path: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | more;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

impl LocalLog {
    /// Number of the address of a bucket; not 0.
    #[must_use]
    pub fn number_of(address: &str) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = checksum::structure(address.as_bytes());
        u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1)
    }

    /// Opens the logs of this pool at the address of this number in a directory, which is created if necessary.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn open(directory: &Path, pool: u64, address: u64) -> io::Result<Self> {
        let new: Vec<&Path> = directory.ancestors().take_while(|place| !place.exists()).collect();
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        // A file is only as durable as the directory entries that lead to it.
        new.iter().filter_map(|place| place.parent()).try_for_each(|above| File::open(above)?.sync_all())?;
        Ok(Self {
            directory: directory.to_owned(),
            older: None,
            owns_older: false,
            pool,
            address,
            state: Mutex::default(),
        })
    }

    /// Adds the directory of logs of older versions, which are replayed only where they are known to be of this address.
    #[must_use]
    pub fn with_older(self, older: Option<PathBuf>, owns_older: bool) -> Self {
        Self { older, owns_older, ..self }
    }

    /// Logs of earlier imports that were not replayed, because another machine has had the pool since, or because
    /// they were given up.
    pub(super) fn aside(&self) -> Vec<PathBuf> {
        self.state.lock().aside.clone()
    }

    /// Why this import's file is no longer used.
    pub(super) fn trouble(&self) -> Option<String> {
        let state = self.state.lock();
        state.own.as_ref().and_then(|own| own.area.trouble.lock().clone())
    }

    /// Path of the log of an import.
    pub(super) fn path(&self, epoch: u32) -> PathBuf {
        self.directory.join(format!("{epoch}.{LOG}"))
    }

    fn failed(path: &Path, doing: &'static str, source: io::Error) -> PoolError {
        PoolError::Device { device: path.display().to_string(), doing, source: Arc::new(source) }
    }

    /// Opens the log of an earlier import, also one of an older version; `None` where it is missing or damaged.
    fn find(&self, epoch: u32) -> Result<Option<LogFile>, PoolError> {
        let own = self.open_log(self.path(epoch), epoch)?;
        match &self.older {
            Some(older) if own.is_none() && self.owns_older => {
                self.open_log(older.join(format!("{epoch}.{LOG}")), epoch)
            }
            _ => Ok(own),
        }
    }

    /// Logs of this import of the pool that belong to other addresses, or may do so: of a copy, or of this bucket before
    /// it was moved.
    pub(super) fn elsewhere(&self, epoch: u32) -> Vec<PathBuf> {
        let place = self.directory.parent().map(std::fs::read_dir);
        let Some(Ok(entries)) = place else { return Vec::new() };
        let prefix = format!("{:016x}-", self.pool);
        let is_other = |name: &std::ffi::OsStr| name.to_str().is_some_and(|name| name.starts_with(&prefix));
        let others = entries.flatten().filter(|entry| is_other(&entry.file_name()) && entry.path() != self.directory);
        let older = self.older.iter().filter(|_| !self.owns_older).cloned();
        let all = older.chain(others.map(|entry| entry.path()));
        all.map(|directory| directory.join(format!("{epoch}.{LOG}"))).filter(|log| log.exists()).collect()
    }

    fn open_log(&self, path: PathBuf, epoch: u32) -> Result<Option<LogFile>, PoolError> {
        let file = match open_file(&path, OFlags::empty()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| Self::failed(&path, "opening", error))?,
        };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| PoolError::Refused(format!("another process on this machine has '{}'", path.display())))?;
        let mut heads = vec![0; 2 * HEAD as usize];
        match file.read_exact_at(&mut heads, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read.map_err(|error| Self::failed(&path, "reading", error))?,
        }
        // An older version's log in the directory of this address was moved there by its owner.
        let is_here = |head: &Head| head.address == self.address || head.address == 0;
        let fits = |head: &Head| head.pool == self.pool && is_here(head) && head.epoch == epoch;
        let heads = heads.chunks(HEAD as usize).filter_map(Head::decode).filter(fits);
        let Some(head) = heads.max_by_key(|head| head.number) else { return Ok(None) };
        LogFile::over(file, path, head).map(Some)
    }

    /// Whether the log of an earlier import can be replayed.
    ///
    /// # Errors
    /// The log cannot be read, or another process owns it.
    pub(super) fn has(&self, epoch: u32) -> Result<bool, PoolError> {
        Ok(self.find(epoch)?.is_some())
    }

    /// Replays the log of an earlier import, which is retained until [`Self::root_is_there`].
    pub(super) fn replay(&self, epoch: u32, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError> {
        let Some(mut before) = self.find(epoch)? else { return Ok(Replayed::default()) };
        if before.head.committed > committed.0 {
            // The log builds on a root that no longer exists: the next import keeps the file aside.
            return Ok(Replayed { lost: Some(before.head.start.sequence), ..Replayed::default() });
        }
        let replayed = Blocks::replay(&mut before.ring, before.head.start, committed, visit)?;
        self.state.lock().before = Some(before);
        Ok(replayed)
    }

    /// Creates this import's file if there is none yet.
    pub(super) fn make(&self, epoch: u32) -> Result<(), PoolError> {
        let mut state = self.state.lock();
        if state.own.is_none() {
            let path = self.path(epoch);
            let made = self.make_file(&path, epoch).map_err(|error| Self::failed(&path, "making", error))?;
            state.own = Some(LogFile::over(made, path, self.first_head(epoch))?);
        }
        Ok(())
    }

    /// Directs fsyncs to the local file, once a root names it, or elsewhere.
    pub(super) fn set_wanted(&self, wanted: bool) {
        self.state.lock().wanted = wanted;
    }

    fn first_head(&self, epoch: u32) -> Head {
        Head { pool: self.pool, address: self.address, epoch, ..Head::default() }
    }

    fn make_file(&self, path: &Path, epoch: u32) -> io::Result<File> {
        let file = open_file(path, OFlags::CREATE | OFlags::EXCL)?;
        match self.fill_file(&file, epoch) {
            Ok(()) => Ok(file),
            // A file without a whole header takes room, and its name.
            Err(error) => {
                if let Err(error) = std::fs::remove_file(path) {
                    tracing::warn!(log = %path.display(), %error, "an empty log stays");
                }
                Err(error)
            }
        }
    }

    fn fill_file(&self, file: &File, epoch: u32) -> io::Result<()> {
        rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?;
        let all = 2 * HEAD + LENGTH;
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, all) {
            // A file system without fallocate allocates space on write.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(all)?,
            allocated => allocated?,
        }
        file.write_all_at(&self.first_head(epoch).encode(), 0)?;
        file.sync_all()?;
        File::open(&self.directory)?.sync_all()
    }

    /// Whether fsyncs go to the local log.
    pub(super) fn is_wanted(&self) -> bool {
        self.state.lock().wanted
    }

    /// Notes a durable root: whether it names this import's file, and whether it contains the entries of the previous
    /// log.
    pub(super) fn root_is_there(&self, names_own: bool, holds_before: bool) {
        let mut state = self.state.lock();
        state.named = names_own;
        if holds_before && let Some(before) = state.before.take() {
            before.remove();
        }
    }

    /// Fences the log: the pool belongs to another writer, nothing is appended any more.
    pub(super) fn fence(&self) {
        self.state.lock().named = false;
    }

    /// Deletes the logs on export, when everything is in the object store.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        (state.wanted, state.named) = (false, false);
        for log in [state.own.take(), state.before.take()].into_iter().flatten() {
            log.remove();
        }
    }

    /// Keeps logs aside that no root names, where they may hold synced writes, and deletes the empty ones.
    pub(super) fn set_aside(&self, but: u32) -> Result<(), PoolError> {
        let failed = |error| Self::failed(&self.directory, "reading", error);
        let mut aside = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|end| end == ASIDE) {
                continue;
            }
            let epoch =
                path.file_name().and_then(|name| name.to_str()?.strip_suffix(LOG)?.strip_suffix('.')?.parse().ok());
            let Some(epoch) = epoch.filter(|epoch| *epoch != but) else { continue };
            // A file that another process has locked is left alone.
            let Ok(found) = self.open_log(path.clone(), epoch) else { continue };
            let records = match found {
                Some(mut log) => {
                    let committed = Txg(log.head.committed);
                    Blocks::replay(&mut log.ring, log.head.start, committed, &mut |_| Ok(()))
                        .map_or(1, |replayed| replayed.records)
                }
                None => 1,
            };
            if records == 0 {
                std::fs::remove_file(&path).map_err(failed)?;
                continue;
            }
            let kept = path.with_extension(ASIDE);
            std::fs::rename(&path, &kept).map_err(failed)?;
            tracing::error!(log = %kept.display(), "this log was not replayed: another machine has had the pool since, or it was given up");
            aside.push(kept);
        }
        self.state.lock().aside.extend(aside);
        Ok(())
    }

    /// Appends a block; returns `false` where no root names the file yet, or it is full or has failed.
    pub(super) fn append(&self, txg: Txg, records: &[u8]) -> Result<bool, PoolError> {
        let mut state = self.state.lock();
        match (state.named, &mut state.own) {
            (true, Some(own)) => own.ring.append(txg, records),
            _ => Ok(false),
        }
    }

    /// Frees blocks after a durable root that contains this txg.
    pub(super) fn forget(&self, txg: Txg) {
        if let Some(own) = &mut self.state.lock().own {
            own.forget(txg);
        }
    }

    /// Number of bytes in use.
    pub(super) fn used(&self) -> u64 {
        self.state.lock().own.as_ref().map_or(0, |own| own.ring.used())
    }

    /// Maximum number of bytes.
    pub(super) fn length() -> u64 {
        LENGTH
    }
}
