//! Watches a source for changes by other processes, and decides how long the kernel may cache
//! answers.
//!
//! Used by every look-up and listing before it reads ([`Watch::before_names`], [`Watch::cover`])
//! and by the FUSE front end ([`HostShared::coherence`]); a thread sleeps in the kernel until
//! something happens and sends [`Invalidation`]s. Each file system below is watched in one of these
//! ways:
//! * one fanotify mark for all of it, where permitted: its events name the process that made the
//!   change, so that our own changes cause no invalidations (`watch/marks.rs`); in an idle mount,
//!   marks on the files that the front end knows instead (`watch/resting.rs`);
//! * else inotify on each directory that was looked into; without a free watch, the directory
//!   counts as shared and is not cached;
//! * not at all where changes are made elsewhere without an event (network and pseudo file
//!   systems).
//!
//! File systems that are mounted inside the source by others are watched by directories at most: a
//! fanotify mark needs an open file of each file system, with which it could not be unmounted. The
//! mount table shows when they come and go (`watch/mount_table.rs`).
//!
//! Writes of programs through our mount are made by the kernel in their name (passthrough), under
//! their process id; so files are opened for writing through a detached mount of our own, which the
//! mark ignores (`watch/own_mounts.rs`): a write then causes no event, and writes of other programs
//! to the same file are still reported.
//!
//! Invariants: a watch is in place before the names or attributes that it covers are read. Lost
//! events, or a file that leaves the watched part, invalidate everything. Stores to a shared
//! mapping are noticed when the file is closed, as the kernel reports nothing earlier.

mod event_loop;
mod inotify;
mod marks;
mod mount_table;
mod own_mounts;
mod resting;

use super::{
    HostShared, hosted,
    locate::FoundFile,
    node::{HostNode, NodePlace},
    stat,
};
use crate::{rest_state::RestState, settings::HostCoherence};
use inotify::DirectoryWatches;
use marks::Marks;
use nacre_vfs::{Coherence, FileId, Invalidation, Kind, Scope};
use own_mounts::OwnMounts;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{Mode, OFlags, Statx};
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread::JoinHandle,
};

pub(super) use inotify::Lease;
pub use marks::{Tree, WatchGroup};
pub(super) use mount_table::has_inner_mounts;

/// File systems whose every change passes through this kernel (magic numbers from statfs(2),
/// linux/magic.h and the file systems' own headers).
const LOCAL: [u32; 22] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0xf2f5_2010, // f2fs
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // zfs
    0x794c_7630, // overlayfs
    0x4d44,      // fat
    0x2011_bab0, // exfat
    0x7366_746e, // ntfs3
    0x5346_544e, // ntfs
    0x3153_464a, // jfs
    0x3434,      // nilfs
    0x5265_4973, // reiserfs
    0x9660,      // iso9660
    0x1501_3346, // udf
    0x7371_7368, // squashfs
    0xe0f5_e1e2, // erofs
    0x4244,      // hfs
    0x482b,      // hfsplus
];

/// File systems that check the ids of every call: network file systems and FUSE.
const REMOTE: [u32; 9] = [
    0x6969,      // nfs
    0xff53_4d42, // cifs
    0xfe53_4d42, // smb2
    0x6573_5546, // fuse
    0x0102_1997, // 9p
    0x00c3_6400, // ceph
    0x5346_414f, // afs
    0x7375_7245, // coda
    0x0bd0_0bd0, // lustre
];

fn magic(file: BorrowedFd<'_>) -> Option<u32> {
    // Only the low 32 bits are the magic number, on every architecture.
    rustix::fs::fstatfs(file).ok().and_then(|figures| u32::try_from(figures.f_type as u64 & 0xffff_ffff).ok())
}

/// Whether a file lies on a file system that checks the ids of every call.
pub(super) fn is_remote(file: BorrowedFd<'_>) -> bool {
    magic(file).is_some_and(|magic| REMOTE.contains(&magic))
}

/// Whether a file lies on overlayfs, where its birth time changes when it is copied up.
pub(super) fn is_overlay(file: BorrowedFd<'_>) -> bool {
    magic(file) == Some(0x794c_7630)
}

/// Watch method of one file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Method {
    /// One fanotify mark for the whole file system.
    Marked,
    /// inotify on each directory.
    Directories,
    /// Not watched.
    Unseen,
}

/// State of the watch of one source.
pub(super) struct Watch {
    root_device: u32,
    rest: RestState,
    running: OnceLock<Running>,
}

/// The watch after its start.
struct Running {
    /// The fanotify group, where whole file systems can be marked.
    marks: Option<Arc<Marks>>,
    /// The inotify instance, made when the first directory needs a watch of its own; `None` inside
    /// if it cannot be made.
    directories: OnceLock<Option<Singly>>,
    /// Arguments of the inotify thread; taken when it starts, or at the end.
    unstarted: Mutex<Option<(Weak<HostShared>, Sender<Invalidation>)>>,
    root_method: Method,
    /// Methods of the other file systems met so far, by device; those on foreign mounts only since
    /// the last change of the mount table, as device numbers are reused.
    others: RwLock<HashMap<u32, Method>>,
    /// An open file of each marked file system, by the file system id in its events.
    mounts: Mutex<HashMap<[i32; 2], Arc<OwnedFd>>>,
    /// The detached mounts through which files are opened for writing.
    own_mounts: OwnMounts,
    /// Number of open files for writing by file, where directories are watched by inotify: writes
    /// through our mount must not invalidate our own caches.
    writers: Mutex<HashMap<FileId, usize>>,
    /// Set when a thread has failed: nothing may be cached any more.
    failed: AtomicBool,
}

/// The inotify watches of one source, with their thread.
struct Singly {
    watches: Arc<DirectoryWatches>,
    /// Eventfd that ends the thread.
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Singly {
    fn start(shared: Weak<HostShared>, channel: Sender<Invalidation>) -> io::Result<Singly> {
        let (watches, stop) = (Arc::new(DirectoryWatches::new()?), eventfd()?);
        let (theirs, told) = (Arc::clone(&watches), stop.try_clone()?);
        let thread = std::thread::Builder::new()
            .name("nacre-watch-dir".into())
            .spawn(move || event_loop::hear_directories(&theirs, &told, &shared, &channel))?;
        Ok(Singly { watches, stop, thread: Mutex::new(Some(thread)) })
    }
}

fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?)
}

/// Ends a thread through its eventfd, and joins it.
fn end(stop: &OwnedFd, thread: JoinHandle<()>) {
    if rustix::io::write(stop, &1_u64.to_ne_bytes()).is_ok() && thread.join().is_err() {
        tracing::error!("the watcher of a source had failed");
    }
}

impl Running {
    fn method(&self, watch: &Watch, device: u32) -> Option<Method> {
        if device == watch.root_device { Some(self.root_method) } else { self.others.read().get(&device).copied() }
    }

    /// The inotify watches, started at the first use.
    fn directories(&self) -> Option<&Arc<DirectoryWatches>> {
        let start = || {
            let (shared, channel) = self.unstarted.lock().take()?;
            Singly::start(shared, channel)
                .inspect_err(|error| tracing::debug!(%error, "directories cannot be watched one by one"))
                .ok()
        };
        self.directories.get_or_init(start).as_ref().map(|singly| &singly.watches)
    }

    /// Watches the file system `device` of `file` (not an `O_PATH` descriptor) by the best
    /// available method; a file system on a `foreign` mount by none that keeps it in use.
    fn watch_file_system(&self, device: u32, file: OwnedFd, foreign: bool) -> Method {
        if !magic(file.as_fd()).is_some_and(|magic| LOCAL.contains(&magic)) {
            return Method::Unseen;
        }
        if let Some(marks) = self.marks.as_ref().filter(|_| !foreign) {
            match event_loop::mark(marks.group(), file.as_fd()) {
                Ok(id) => {
                    self.own_mounts.add(marks.group(), device, file.as_fd());
                    self.mounts.lock().insert(id, Arc::new(file));
                    return Method::Marked;
                }
                Err(error) => tracing::debug!(%error, "a file system cannot be marked as a whole"),
            }
        }
        if self.directories().is_some() { Method::Directories } else { Method::Unseen }
    }
}

impl Running {
    /// Whether changes are noticed, so that answers may be cached.
    fn promises(&self) -> bool {
        !self.failed.load(Ordering::Relaxed) && !self.marks.as_ref().is_some_and(|marks| marks.failed())
    }

    fn stop(&self, shared: &Arc<HostShared>) {
        mount_table::leave(shared);
        drop(self.unstarted.lock().take());
        if let Some(marks) = &self.marks {
            marks.leave(shared);
        }
        if let Some(Some(singly)) = self.directories.get()
            && let Some(thread) = singly.thread.lock().take()
        {
            end(&singly.stop, thread);
        }
    }
}

/// Whether a file has more than one name.
fn has_other_names(file: BorrowedFd<'_>) -> bool {
    // Assume so if it cannot be examined.
    stat::of_file_timeless(file).map_or(true, |statx| statx.stx_nlink > 1)
}

/// Whether a file on the source's file system was found through another mount, where other hosts of
/// the watch group may have written to it without an event.
fn elsewhere(marks: &Marks, shared: &HostShared, statx: &Statx) -> bool {
    if !marks.may_be_shared() || stat::mount(statx) == shared.directories.mounts().root().0 {
        return false;
    }
    marks.meet_elsewhere();
    // The content of a directory is examined later.
    !stat::is_directory(statx)
}

impl Watch {
    pub(super) fn new(root_device: u32) -> Watch {
        Watch { root_device, rest: RestState::default(), running: OnceLock::new() }
    }

    /// The watch method of the source itself, for status.
    pub(super) fn method(&self) -> &'static str {
        match self.running.get().map(|running| running.root_method) {
            Some(Method::Marked) => "fanotify",
            Some(Method::Directories) => "inotify",
            Some(Method::Unseen) | None => "none",
        }
    }

    /// Ensures the watch of a directory. Called before names in it are read.
    pub(super) fn before_names(&self, directory: &Arc<HostNode>, descriptor: BorrowedFd<'_>) {
        let Some(running) = self.running.get() else { return };
        if running.method(self, directory.device()) == Some(Method::Directories)
            && !directory.is_watched()
            && let Some(directories) = running.directories()
        {
            directories.add(directory, descriptor);
        }
    }

    /// Ensures the watch of a found file. Returns true if its file system was not, or not
    /// completely, watched when it was examined, so that it has to be examined again.
    pub(super) fn cover(&self, shared: &HostShared, directory: BorrowedFd<'_>, name: &[u8], found: &FoundFile) -> bool {
        let Some(running) = self.running.get() else { return false };
        if found.device == self.root_device {
            return running.marks.as_ref().is_some_and(|marks| elsewhere(marks, shared, &found.statx));
        }
        if running.method(self, found.device).is_some() {
            return false;
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        if !matches!(stat::kind(&found.statx), Ok(Kind::Directory | Kind::File)) {
            // A single device or link mounted here cannot represent its file system; the next
            // directory of it will.
            return false;
        }
        let opened = rustix::fs::openat(directory, name, flags, Mode::empty()).ok();
        let mut method = Method::Unseen;
        // Only a file that is still on the same file system may represent it.
        if let Some(file) = opened
            && let Ok(statx) = stat::of_file(file.as_fd())
            && stat::device(&statx) == found.device
        {
            method = running.watch_file_system(found.device, file, shared.directories.is_foreign(&statx));
        }
        if let Some(marks) = running.marks.as_ref().filter(|_| method == Method::Marked) {
            marks.meet(shared, found.device);
            marks.settle(shared, running, found.device);
        }
        running.others.write().insert(found.device, method);
        method == Method::Marked
    }

    /// Forgets the methods of file systems inside the source, after a mount or unmount there.
    fn mounts_changed(&self) {
        if let Some(running) = self.running.get() {
            // A marked file system is on the source's own mount.
            running.others.write().retain(|_, method| *method == Method::Marked);
        }
    }

    /// Returns the descriptor for a file opened for writing: reopened through a detached mount of
    /// our own, so that our writes cause no events.
    pub(super) fn unreported(&self, node: &HostNode, descriptor: OwnedFd, flags: OFlags) -> OwnedFd {
        let Some(running) = self.running.get() else { return descriptor };
        // A resolved link is a separate file in the front end; only an event invalidates the
        // target's cache.
        if node.is_resolved() || node.kind() != Kind::File {
            return descriptor;
        }
        if running.marks.as_ref().is_some_and(|marks| marks.may_be_shared()) && has_other_names(descriptor.as_fd()) {
            return descriptor;
        }
        running.own_mounts.open(node.device(), descriptor, flags)
    }

    /// Counts a file opened for writing. Returns whether [`Watch::written`] has to be called when
    /// it is closed.
    pub(super) fn writing(&self, node: &HostNode) -> bool {
        let Some(running) = self.running.get() else { return false };
        if running.method(self, node.device()) != Some(Method::Directories) {
            return false;
        }
        *running.writers.lock().entry(node.id()).or_insert(0) += 1;
        true
    }

    /// Ends what [`Watch::writing`] began.
    pub(super) fn written(&self, id: FileId) {
        let Some(running) = self.running.get() else { return };
        let mut writers = running.writers.lock();
        if let Some(count) = writers.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                writers.remove(&id);
            }
        }
    }

    /// The fanotify group.
    #[cfg(test)]
    pub(super) fn group(&self) -> Option<BorrowedFd<'_>> {
        self.running.get()?.marks.as_ref().map(|marks| marks.group())
    }

    /// Number of directories watched by inotify.
    #[cfg(test)]
    pub(super) fn directory_count(&self) -> usize {
        self.running
            .get()
            .and_then(|running| running.directories.get()?.as_ref())
            .map_or(0, |singly| singly.watches.len())
    }

    /// Number of hosts that share the fanotify group.
    #[cfg(test)]
    pub(super) fn hosts(&self) -> usize {
        self.running.get().and_then(|running| running.marks.as_ref()).map_or(0, |marks| marks.members())
    }

    fn is_written(&self, id: FileId) -> bool {
        self.running.get().is_some_and(|running| running.writers.lock().contains_key(&id))
    }

    /// Stops the watch of this source and waits for its threads. `shared` is the host that this
    /// belongs to.
    pub(super) fn stop(&self, shared: &Arc<HostShared>) {
        let Some(running) = self.running.get() else { return };
        running.stop(shared);
    }

    fn names(&self, running: &Running, directory: &HostNode) -> bool {
        match running.method(self, directory.device()) {
            // Events are about the target of a resolved link, not the link.
            Some(Method::Marked) => !directory.is_resolved(),
            Some(Method::Directories) => directory.is_watched(),
            Some(Method::Unseen) | None => false,
        }
    }

    fn attributes(&self, running: &Running, node: &HostNode, links: u32) -> bool {
        if node.is_resolved() {
            return false;
        }
        match running.method(self, node.device()) {
            Some(Method::Marked) => true,
            Some(Method::Directories) => {
                let by_parent = match node.place() {
                    Some(NodePlace { parent, .. }) => parent.is_watched(),
                    None => node.is_root(),
                };
                match node.kind() {
                    Kind::Directory => by_parent && node.is_watched(),
                    // A change through another name causes an event for that name only.
                    _ => by_parent && links == 1 && !self.is_written(node.id()),
                }
            }
            Some(Method::Unseen) | None => false,
        }
    }
}

impl HostShared {
    /// Whether the scope is a directory that may have another identity, through which it may
    /// change.
    fn has_other_identities(&self, scope: &Scope<'_>) -> bool {
        let mounts = self.directories.mounts();
        let (Scope::Names(node) | Scope::Attributes(node, _)) = scope;
        mounts.are_shared()
            && hosted(node).is_ok_and(|node| node.kind() == Kind::Directory && mounts.shares(node.device()))
    }

    pub(super) fn coherence(&self, scope: Scope<'_>) -> Coherence {
        let running = match self.options.coherence {
            HostCoherence::Exclusive if self.has_other_identities(&scope) => return Coherence::Shared,
            HostCoherence::Exclusive => return Coherence::Exclusive,
            HostCoherence::Revalidate => return Coherence::Shared,
            HostCoherence::Watch => self.watch.running.get(),
        };
        let Some(running) = running.filter(|running| running.promises()) else { return Coherence::Shared };
        let watched = match scope {
            Scope::Names(node) => hosted(node).is_ok_and(|node| self.watch.names(running, &node)),
            Scope::Attributes(node, attr) => {
                hosted(node).is_ok_and(|node| self.watch.attributes(running, &node, attr.nlink))
            }
        };
        if watched { Coherence::Watched } else { Coherence::Shared }
    }
}

/// Starts watching, if the options ask for it. If that fails, every answer is
/// [`Coherence::Shared`].
pub(super) fn start(shared: &Arc<HostShared>, channel: Sender<Invalidation>) {
    if shared.options.coherence != HostCoherence::Watch {
        return;
    }
    let join = || {
        Marks::join(shared, &channel)
            .inspect_err(|error| tracing::debug!(%error, "no fanotify, directories are watched one by one"))
    };
    let marks = join().ok();
    if let Err(error) = try_start(shared, marks, channel) {
        tracing::warn!(%error, source = %shared.options.source.display(), "cannot watch for changes; answers are asked for anew each time");
    }
}

/// Starts watching like an unprivileged process: by inotify.
#[cfg(test)]
pub(super) fn start_by_directories(shared: &Arc<HostShared>, channel: Sender<Invalidation>) {
    try_start(shared, None, channel).unwrap();
}

fn try_start(shared: &Arc<HostShared>, marks: Option<Arc<Marks>>, channel: Sender<Invalidation>) -> io::Result<()> {
    mount_table::join(shared, &channel);
    let mut running = Running {
        marks,
        directories: OnceLock::new(),
        unstarted: Mutex::new(Some((Arc::downgrade(shared), channel))),
        root_method: Method::Unseen,
        others: RwLock::default(),
        mounts: Mutex::default(),
        own_mounts: OwnMounts::new(shared.options.noatime),
        writers: Mutex::default(),
        failed: AtomicBool::new(false),
    };
    let root = match shared.open_directory(&shared.root) {
        Ok(root) => root,
        Err(error) => {
            running.stop(shared);
            return Err(io::Error::from_raw_os_error(error.raw()));
        }
    };
    running.root_method = running.watch_file_system(shared.watch.root_device, root, false);
    if let Err(running) = shared.watch.running.set(running) {
        running.stop(shared);
        return Err(io::Error::other("already watching"));
    }
    let Some(running) = shared.watch.running.get() else { return Ok(()) };
    if let Some(marks) = &running.marks {
        // Other hosts may have met a file system meanwhile.
        marks.settle(Arc::as_ptr(shared), running, shared.watch.root_device);
    }
    // Front ends judge coherence by the root before any look-up.
    shared.watch.before_names(&shared.root, shared.directories.root());
    Ok(())
}
