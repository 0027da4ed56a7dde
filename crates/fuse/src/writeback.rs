//! Write-back caching by the kernel: whether it is on, for which files, and how the layer recalls it.
//!
//! Decided by `mount.rs` between mount(2) and INIT; used by the handlers with every open file and every reply with
//! attributes; called by the layer as its [`WritebackHost`]. The kernel's side (write-back cache, Linux 6.18):
//! * a write to a cached file costs no request while the attributes of the inode are valid; once they are not, every
//!   write(2) first asks for them by the open file (GETATTR), and an error in the reply is returned by write(2):
//!   there the write is reserved;
//! * an invalidation expires attributes, and replies in flight at that time are dropped: the kernel compares versions
//!   for LOOKUP, READDIRPLUS, GETATTR and STATX. It does not for CREATE, LINK and SETATTR, whose replies therefore
//!   never carry valid attributes of a regular file under write-back caching. Layers that accept all data that
//!   arrives are an exception: for them the invalidation is repeated when a write arrives that should have been
//!   reserved.
//!
//! Invariants: a file is entered in the table before the layer is asked for the last time whether its writes need no
//! reservation, and the layer denies that before it recalls; so each file is either found by the recall or opened
//! without write-back caching. No lock is held while the layer or the kernel is called, except that of a single file in
//! [`Writeback::early`] while data is appended to it: FORGET does not take it.

pub(crate) mod caller;
pub(crate) mod dirty_limit;
pub(crate) mod early_appends;
pub(crate) mod locked_files;
pub(crate) mod protected_files;
pub(crate) mod written_files;

use crate::survival::Survival;
use crate::{
    inodes::Inodes,
    negotiate,
    options::FuseOptions,
    self_io::{
        SelfIo,
        flush_threads::FlushThreads,
        own_mount::{self, InodeKey, MountPlace},
    },
};
use early_appends::EarlyAppends;
use fusewire::Notifier;
use locked_files::{Locked, LockedFiles};
use nacre_sys::worker;
use nacre_vfs::{Caller, Coherence, Layer, Opened, Result, WritebackHost};
use parking_lot::{Mutex, RwLock};
use protected_files::ProtectedFiles;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};
use written_files::{Uses, WrittenFiles};

/// Open files of one inode whose writes are cached.
struct Files {
    /// Any of them.
    file: Opened,
    /// Number of open files.
    open: usize,
    /// Others may have changed the file meanwhile.
    missed: bool,
}

/// State of write-back caching of one mount.
pub(crate) struct Writeback {
    mountpoint: PathBuf,
    /// [`FuseOptions::flush_for_seek`].
    pub flush_for_seek: bool,
    /// The decision after mount(2) and INIT: the reason where it is off.
    decided: OnceLock<std::result::Result<(), String>>,
    /// Off again, for good: the kernel does not offer it.
    dropped: AtomicBool,
    /// The layer accepts all data that arrives, reserved or not.
    lets_in: AtomicBool,
    /// The mount survives its process.
    outlives: AtomicBool,
    /// Channel for notifications; none before the session runs.
    notifier: RwLock<Option<Notifier>>,
    device: AtomicU64,
    /// Limit of dirty bytes that is set in the kernel.
    wanted: AtomicU64,
    /// All files that the kernel knows, where it opens them without a request. Weak: the table has the layer, which
    /// has this.
    unopened: OnceLock<Weak<Inodes>>,
    /// Files that may have been written to in that case.
    pub written: WrittenFiles,
    /// Up to which offset pages of immutable and append-only files are refused.
    pub protected: ProtectedFiles,
    /// Whose inodes are locked by callers that are served.
    pub locked: LockedFiles,
    /// Files with cached writes, by node id.
    files: Mutex<HashMap<u64, Files>>,
    count: AtomicUsize,
    dirty_limit: dirty_limit::KnownLimit,
    /// Our own threads that use the mount.
    pub self_io: Arc<SelfIo>,
    /// Held while all dirty data is written back.
    pub flushing: Mutex<()>,
    /// Threads that write single files back.
    pub flush_threads: Arc<FlushThreads>,
    /// Data that arrived too early for files that can only be appended to, by node id. A file's own lock is held while
    /// data is appended to it, the table's lock never.
    pub early: Mutex<HashMap<u64, Arc<Mutex<EarlyAppends>>>>,
    arrivals: AtomicU64,
    announced: AtomicU64,
    refused: AtomicU64,
    recalls: AtomicU64,
}

/// Figures of write-back caching, for `status.rs`.
pub(crate) struct WritebackFigures {
    pub refusal: Option<String>,
    pub files: usize,
    pub announced: u64,
    pub refused: u64,
    pub recalls: u64,
    pub dirty_limit: u64,
}

impl Writeback {
    /// State before the decision.
    pub fn new(mountpoint: &Path, flush_for_seek: bool, self_io: &Arc<SelfIo>) -> Writeback {
        Writeback {
            mountpoint: mountpoint.to_owned(),
            flush_for_seek,
            decided: OnceLock::new(),
            dropped: AtomicBool::new(false),
            lets_in: AtomicBool::new(false),
            outlives: AtomicBool::new(false),
            notifier: RwLock::new(None),
            device: AtomicU64::new(0),
            wanted: AtomicU64::new(dirty_limit::WANTED),
            unopened: OnceLock::new(),
            written: WrittenFiles::default(),
            protected: ProtectedFiles::default(),
            locked: LockedFiles::default(),
            files: Mutex::default(),
            count: AtomicUsize::new(0),
            dirty_limit: dirty_limit::KnownLimit::default(),
            self_io: Arc::clone(self_io),
            flushing: Mutex::new(()),
            flush_threads: Arc::default(),
            early: Mutex::default(),
            arrivals: AtomicU64::new(0),
            announced: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            recalls: AtomicU64::new(0),
        }
    }

    /// Decides, with the file system mounted at `place` and not yet in use, whether writes are cached; the layer is
    /// asked only where that is possible.
    pub fn decide(self: &Arc<Self>, place: &Path, options: &FuseOptions, layer: &dyn Layer) {
        self.decide_by(layer, self.possible(place, options, layer));
    }

    /// Repeats the decision of a previous process for a mount with this device number.
    pub fn decide_again(self: &Arc<Self>, device: Option<u64>, collected: bool, layer: &dyn Layer) {
        let possible = match device.filter(|_| collected) {
            _ if !collected => Err("it was not agreed on when it was mounted".to_owned()),
            None => Err("the mount's device is not known".to_owned()),
            Some(device) => {
                self.device.store(device, Ordering::Release);
                dirty_limit::limit(device, dirty_limit::WANTED)
            }
        };
        self.decide_by(layer, possible);
    }

    /// Turns caching on as far as the layer accepts it, without a mount.
    #[cfg(test)]
    pub fn decide_for_tests(self: &Arc<Self>, layer: &dyn Layer) {
        self.decide_by(layer, Ok(()));
    }

    fn decide_by(self: &Arc<Self>, layer: &dyn Layer, possible: std::result::Result<(), String>) {
        let decision = possible.and_then(|()| {
            let door: Arc<dyn WritebackHost> = Arc::clone(self) as Arc<dyn WritebackHost>;
            let taken = layer.capabilities().writeback.is_some_and(|writeback| writeback.accept(&door));
            if taken { Ok(()) } else { Err("the layers do not ask for it".to_owned()) }
        });
        if decision.is_ok() && self.is_patient() {
            self.hold_more(layer);
        }
        // Set once.
        let _ = self.decided.set(decision);
    }

    /// Sets that the mount survives its process, and records files that may have cached writes. A notification to the
    /// kernel may wait for a reply of ours, which another process sends if this one is killed meanwhile.
    pub fn outlives(&self, memory: &Survival) {
        self.outlives.store(true, Ordering::Release);
        // Files of a previous process are entered at the failover.
        let _ = self.written.note_in(memory);
    }

    /// Raises the limit of dirty bytes, in proportion to its free space, for a layer that accepts all data that
    /// arrives.
    fn hold_more(&self, layer: &dyn Layer) {
        let Ok(figures) = layer.root().and_then(|root| layer.statfs(&Caller::ROOT, &root.node)) else { return };
        let wanted = dirty_limit::wanted(figures.available.saturating_mul(u64::from(figures.fragment)));
        self.wanted.store(wanted, Ordering::Release);
        if let Err(why) = dirty_limit::limit(self.device(), wanted) {
            tracing::debug!(why, "no more is held back");
        }
    }

    fn possible(&self, place: &Path, options: &FuseOptions, layer: &dyn Layer) -> std::result::Result<(), String> {
        if options.read_only || options.immutable {
            return Err("nothing is written through this mount".to_owned());
        }
        if options.direct_io {
            return Err("the kernel caches no content of this mount".to_owned());
        }
        if negotiate::root_coherence(layer) > Coherence::Watched {
            // The kernel uses its own sizes then.
            return Err("others may change files unnoticed".to_owned());
        }
        if !rustix::process::geteuid().is_root() {
            // Times and sizes that the kernel misses are set by file handle.
            return Err("only for root".to_owned());
        }
        let device =
            own_mount::device(place).map_err(|error| format!("the mount cannot be asked for its device: {error}"))?;
        self.device.store(device, Ordering::Release);
        dirty_limit::limit(device, dirty_limit::WANTED)
    }

    /// Sets that the kernel opens files without a request.
    pub fn unopened(&self, inodes: &Arc<Inodes>) {
        // Set once.
        let _ = self.unopened.set(Arc::downgrade(inodes));
    }

    /// Turns caching off: the kernel does not offer it.
    pub fn drop_it(&self) {
        self.dropped.store(true, Ordering::Release);
    }

    /// Starts caching once the session runs, on the mount with this device number.
    pub fn start(&self, device: Option<u64>, notifier: Notifier) {
        if !self.on() {
            device.iter().for_each(|device| self.device.store(*device, Ordering::Release));
            return;
        }
        match device {
            Some(device) if device == self.device.load(Ordering::Acquire) => {}
            // Mounted once more, for the other transport: the limits have to be set again.
            Some(device) => {
                self.device.store(device, Ordering::Release);
                if let Err(why) = dirty_limit::limit(device, self.wanted.load(Ordering::Acquire)) {
                    tracing::warn!(why, "writes are not collected");
                    return;
                }
            }
            None => return tracing::warn!("writes are not collected: the mount cannot be asked for its device"),
        }
        *self.notifier.write() = Some(notifier);
    }

    /// Ends caching with the session.
    pub fn end(&self) {
        *self.notifier.write() = None;
        let all = std::mem::take(&mut *self.files.lock());
        self.count.store(0, Ordering::Release);
        drop((all, self.written.take(|_| true)));
    }

    /// Whether the kernel opens files without a request, and caches writes to them.
    pub fn is_unopened(&self) -> bool {
        self.unopened.get().is_some()
    }

    /// Whether the kernel keeps sizes and times of regular files itself: writes are cached.
    pub fn on(&self) -> bool {
        matches!(self.decided.get(), Some(Ok(()))) && !self.dropped.load(Ordering::Acquire)
    }

    /// Whether writes to a file are cached now.
    pub fn caches_writes(&self, nodeid: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.files.lock().contains_key(&nodeid)
    }

    /// Whether writes to a file have to be reserved: its attributes must not be cached then.
    pub fn announces(&self, nodeid: u64) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let file = self.files.lock().get(&nodeid).map(|files| Arc::clone(&files.file));
        file.is_some_and(|file| file.writeback_lease().is_some_and(|permission| !permission.unannounced()))
    }

    /// Whether the layer accepts all data that arrives, so that stale replies during a recall do no harm.
    pub fn is_patient(&self) -> bool {
        self.lets_in.load(Ordering::Acquire)
    }

    /// Notes the arrival of a file's cached data: where it should have been reserved, the kernel's attributes are
    /// invalidated once more.
    pub fn arrived(&self, nodeid: u64) {
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        if self.is_patient() && self.announces(nodeid) {
            self.ask_before_writes(nodeid);
        }
    }

    /// Number of cached writes that have arrived, of all files.
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// Expires a file's attributes, so that the kernel asks for them before the next write.
    pub fn ask_before_writes(&self, nodeid: u64) {
        let Some(notifier) = self.notifier.read().clone() else { return };
        // Without pages, this takes no lock that a request could hold. But it waits for the end of an inode that is
        // being evicted.
        if let Err(error) = self.tell(|| notifier.inval_inode(nodeid, -1, 0)) {
            // Not known any more: about to be closed. Or the mount has just ended.
            tracing::trace!(%error, nodeid, "a file could not be recalled");
        }
    }

    /// Sends a notification to the kernel, which may wait for a reply of ours.
    pub fn tell<T>(&self, tell: impl FnOnce() -> T) -> T {
        if self.outlives.load(Ordering::Acquire) { worker::waiting(tell) } else { tell() }
    }

    /// Decides for a file that is being opened whether its writes are cached. If so, it is in the table until
    /// [`Writeback::leave`].
    pub fn join(&self, nodeid: u64, file: &Opened) -> bool {
        let Some(permission) = file.writeback_lease() else { return false };
        if !self.on() || self.notifier.read().is_none() || !permission.begin() {
            return false;
        }
        self.enter(nodeid, file);
        // A recall that did not find the file has made the layer require reservations before.
        if !permission.unannounced() {
            self.leave(nodeid);
            return false;
        }
        true
    }

    /// Enters a file that the kernel opens without a request in the table: its writes are cached in any case.
    pub fn join_unopened(&self, nodeid: u64, file: &Opened) {
        if let Some(permission) = file.writeback_lease() {
            permission.begin_unopened();
        }
        self.enter(nodeid, file);
    }

    /// Removes a file without dirty data, unless it was used since; returns whether others may have changed it
    /// meanwhile.
    pub fn leave_unused(&self, nodeid: u64, since: Uses) -> bool {
        self.written.remove_unused(nodeid, since).is_some_and(|handle| self.leave(handle.nodeid))
    }

    fn enter(&self, nodeid: u64, file: &Opened) {
        let mut files = self.files.lock();
        files.entry(nodeid).or_insert_with(|| Files { file: Arc::clone(file), open: 0, missed: false }).open += 1;
        self.count.store(files.len(), Ordering::Release);
    }

    /// Notes that others may have changed a file. If writes to it are cached, that is remembered until its last
    /// close; returns whether they are.
    pub fn miss(&self, nodeid: u64) -> bool {
        let held = self.files.lock().get_mut(&nodeid).map(|files| files.missed = true).is_some();
        if held && self.is_unopened() {
            // No request comes for its last close.
            self.self_io.flush_timer.part_with(nodeid);
        }
        held
    }

    /// Removes an open file with cached writes; returns whether others may have changed the file while it was open,
    /// and this was the last one.
    pub fn leave(&self, nodeid: u64) -> bool {
        let gone = {
            let mut files = self.files.lock();
            let last = files.get_mut(&nodeid).is_some_and(|files| {
                files.open = files.open.saturating_sub(1);
                files.open == 0
            });
            let gone = if last { files.remove(&nodeid) } else { None };
            self.count.store(files.len(), Ordering::Release);
            gone
        };
        // Closed outside of the lock.
        gone.is_some_and(|files| files.missed)
    }

    /// Counts a reservation, which the layer accepted or refused.
    pub fn announced(&self, refused: bool) {
        self.announced.fetch_add(1, Ordering::Relaxed);
        self.refused.fetch_add(u64::from(refused), Ordering::Relaxed);
    }

    /// The device number of the mount.
    pub fn device(&self) -> u64 {
        self.device.load(Ordering::Acquire)
    }

    /// Returns the figures for the status.
    pub fn figures(&self) -> WritebackFigures {
        let refusal = match self.decided.get() {
            None => Some("not decided yet".to_owned()),
            Some(Err(why)) => Some(why.clone()),
            Some(Ok(())) if self.dropped.load(Ordering::Acquire) => Some("not offered by this kernel".to_owned()),
            Some(Ok(())) if self.notifier.read().is_none() => Some("not started".to_owned()),
            Some(Ok(())) => None,
        };
        let files = self.files.lock().len();
        let dirty_limit = if refusal.is_none() { self.dirty_limit(files) } else { 0 };
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WritebackFigures {
            refusal,
            files,
            announced: get(&self.announced),
            refused: get(&self.refused),
            recalls: get(&self.recalls),
            dirty_limit,
        }
    }

    /// Returns the location of the mount.
    pub fn place(&self) -> MountPlace {
        MountPlace { mountpoint: self.mountpoint.clone(), device: self.device(), names: Arc::default() }
    }

    /// Notes, until this is dropped, that a request is being served whose caller has the inode's lock. Noted only
    /// where files are opened without requests.
    pub fn lock(&self, nodeid: u64) -> Option<Locked<'_>> {
        self.is_unopened().then(|| self.locked.enter(nodeid))
    }

    /// Whether there are no files with cached writes.
    pub fn is_idle(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Returns the channel for notifications, while the session runs.
    pub fn notifier(&self) -> Option<Notifier> {
        self.notifier.read().clone()
    }

    /// Returns the kernel's file handle of a file with cached writes; none for other files.
    pub fn key(&self, nodeid: u64) -> Option<InodeKey> {
        self.files.lock().get(&nodeid).map(|files| InodeKey { nodeid, generation: files.file.generation() })
    }

    /// Returns the kernel's file handles of all files with cached writes.
    pub fn keys(&self) -> Vec<InodeKey> {
        let files = self.files.lock();
        files.iter().map(|(nodeid, files)| InodeKey { nodeid: *nodeid, generation: files.file.generation() }).collect()
    }

    /// Returns the node ids of all files with cached writes.
    pub fn nodes(&self) -> Vec<u64> {
        self.files.lock().keys().copied().collect()
    }
}

impl WritebackHost for Writeback {
    fn dirty_limit(&self, files: usize) -> u64 {
        let files = if self.is_unopened() { files.min(dirty_limit::UNOPENED_MOST) } else { files };
        self.dirty_limit.dirty_limit(self.device(), files)
    }

    fn opens_unasked(&self) -> bool {
        self.is_unopened()
    }

    fn lets_in(&self) {
        self.lets_in.store(true, Ordering::Release);
    }

    fn recall(&self) {
        let recalls = self.recalls.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(recalls, "writes that the kernel collects are recalled: little room is left");
        self.nodes().into_iter().for_each(|nodeid| self.ask_before_writes(nodeid));
    }

    fn recall_unopened(&self) {
        if let Some(inodes) = self.unopened.get().and_then(Weak::upgrade) {
            inodes.for_each(|nodeid| self.ask_before_writes(nodeid));
        }
    }

    fn flush(&self) -> Result<()> {
        self.flush_all()
    }
}
