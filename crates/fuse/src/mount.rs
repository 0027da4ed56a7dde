//! A mount: created from a layer and options, queried for its status, ended.
//!
//! Called by the command line and by tests. Invariants: the layer's watch is on before the first request; the
//! invalidation thread ends with the mount; notifications that wait for locks are sent by the threads of `notices.rs`
//! alone.

use crate::{
    door::Door,
    invalidate::{self, CacheControl, InvalidationCounts},
    negotiate,
    notices::{Notice, NoticeQueue, NoticeSink},
    options::{FuseOptions, TransportChoice},
    passthrough::BackingFiles,
    self_io::{
        Role, attr_refresh,
        gate::within,
        inotify_replay::{self, Event},
        own_mount::{self, Entered, InodeKey},
        waits::during,
    },
    status::{self, Status},
    survival::{Survival, doubts},
};
use fusewire::{Device, Identity, MountOptions, Notifier, Observer, Session, SessionOptions};
use nacre_sys::{descriptors, mounts::MountAttributes, worker};
use nacre_vfs::{Caller, DirEntry, DirSink, Errno, FileId, Invalidation, Layer, Node, OpenFileHost};
use rustix::{io::Errno as SysErrno, mount::MountFlags};
use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Maximum number of files kept open after their last close, whatever the limit of descriptors.
const KEPT_MAX: usize = 4096;
/// Read-ahead of a mount whose content the daemon serves, KiB.
const READ_AHEAD_KIB: &str = "1024";

/// Why a mount could not be made.
#[derive(Debug)]
pub enum MountError {
    /// The layers have no root to show.
    Root(Errno),
    /// Mounting failed; the text names the mount point.
    Mount(io::Error),
    /// The negotiation with the kernel failed.
    Session(io::Error),
    /// A thread could not be started.
    Thread(io::Error),
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MountError::Root(error) => write!(f, "cannot open the root of what is to be mounted: {error}"),
            MountError::Mount(error) => write!(f, "{error}"),
            MountError::Session(error) => write!(f, "cannot serve the mount: {error}"),
            MountError::Thread(error) => write!(f, "cannot start a thread: {error}"),
        }
    }
}

impl std::error::Error for MountError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            MountError::Root(error) => Some(error),
            MountError::Mount(error) | MountError::Session(error) | MountError::Thread(error) => Some(error),
        }
    }
}

/// A mount that is being served. Dropping it unmounts it, or aborts the connection where it is in use.
pub struct Mount {
    pub(crate) session: Session,
    door: Arc<Door>,
    counts: Arc<InvalidationCounts>,
    stop: Arc<AtomicBool>,
    marks: invalidate::Marks,
    threads: Vec<JoinHandle<()>>,
    /// The device number of the file system.
    device: Option<u64>,
}

impl Mount {
    /// Mounts `layer` and serves it; returns when the mount can be used.
    ///
    /// # Errors
    /// See [`MountError`]; then nothing stays mounted, and a mount to be taken over from another process has no
    /// session any more.
    pub fn start(layer: Arc<dyn Layer>, options: FuseOptions) -> Result<Mount, MountError> {
        let memory = options.survival.clone().filter(Survival::resumes);
        Mount::make(layer, options).inspect_err(|_| memory.iter().for_each(Survival::let_go))
    }

    fn make(layer: Arc<dyn Layer>, options: FuseOptions) -> Result<Mount, MountError> {
        let (sender, receiver) = mpsc::channel();
        layer.watch(sender.clone());
        let door = Door::new(layer, options, sender, kept_limit()).map_err(MountError::Root)?;
        let door = Arc::new(door);
        if let Some(client) = door.layer.capabilities().open_files {
            client.attach(Arc::downgrade(&door) as Weak<dyn OpenFileHost>);
        }
        let (doubts, doubted) = mpsc::channel();
        let resumed = door.survives.as_ref().map(|survives| &survives.memory).filter(|memory| memory.resumes());
        let goes_on = resumed.is_some();
        if goes_on {
            door.inodes.doubt_with(Some(doubts));
        }
        let mut session = match resumed {
            Some(memory) => memory.resume(&door)?,
            None => begin(&door)?,
        };
        let last_backing = connect(&door, &session);
        // While it is detached, if root made it: the path of its mount point may lead through other mounts of ours.
        // The mount point may have changed since a previous process.
        let place = session.mountpoint().unwrap_or(&door.options.mountpoint).to_owned();
        let before = resumed_device(&door);
        let device = before.or_else(|| {
            let found = own_mount::device(&place);
            found.inspect_err(|error| tracing::debug!(%error, "the mount cannot be asked for its device")).ok()
        });
        if let Some(device) = device {
            door.kernel.found(device);
            door.open.running.start(device);
        }
        door.writeback.start(device, session.notifier());
        show(&door, &mut session).map_err(MountError::Mount)?;
        let sink = KernelSink { notifier: session.notifier(), front_end: SinkFrontEnd::of(&door) };
        let notices = NoticeQueue::start(Box::new(sink.clone())).map_err(MountError::Thread)?;
        let notices = Arc::new(notices);
        let caches = KernelCaches {
            sink,
            notices: Arc::clone(&notices),
            session: session.observer(),
            door: Arc::clone(&door),
            one_by_one: AtomicBool::new(false),
        };
        let state = door.invalidations.state(&door.inodes);
        let (counts, stop, marks) = (Arc::clone(&state.counts), Arc::clone(&state.stop), Arc::clone(&state.marks));
        let mut mount = Mount { session, door, counts, stop, marks, threads: Vec::new(), device };
        mount.thread("nacre-notify", move || invalidate::run(&receiver, &caches, &state))?;
        if mount.door.writeback.on() {
            mount.start_writeback()?;
        }
        if goes_on && mount.door.inodes.by_number() {
            let (door, session, notifier) =
                (Arc::clone(&mount.door), mount.session.observer(), mount.session.notifier());
            mount.thread("nacre-doubts", move || doubts::run(&doubted, &door, &session, &notifier))?;
        }
        if mount.door.options.notify_watchers {
            mount.start_inotify_replay(notices)?;
        }
        mount.raise_read_ahead();
        mount.survive(last_backing)?;
        Ok(mount)
    }

    pub(crate) fn thread(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), MountError> {
        let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
        self.threads.push(builder.spawn(body).map_err(MountError::Thread)?);
        Ok(())
    }

    /// Starts the threads that update the kernel's attributes and pages with write-back caching.
    fn start_writeback(&mut self) -> Result<(), MountError> {
        let door = Arc::clone(&self.door);
        let own = &door.self_io;
        let threads = [
            own.attr_refresh.setter.start(own, "nacre-setter"),
            own.attr_refresh.asker.start(own, "nacre-asker"),
            own.page_dropper.start(own),
            door.writeback.start_flush_timer(door.inodes.root_is_promoted()),
        ];
        let threads = threads.into_iter().collect::<io::Result<Vec<_>>>().map_err(MountError::Thread)?;
        let (jobs, served) = (own.attr_refresh.open(), Arc::clone(&door));
        self.thread("nacre-attrs", move || {
            attr_refresh::run(&jobs, &served);
            // The threads have reported their errors.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        })
    }

    fn start_inotify_replay(&mut self, notices: Arc<NoticeQueue>) -> Result<(), MountError> {
        let device = self.device().map_err(MountError::Session)?;
        let events = self.door.self_io.inotify_replay.open();
        let door = Arc::clone(&self.door);
        self.thread("nacre-inotify", move || {
            let forget = |parent, name: &[u8]| {
                notices.push(Notice::Entry { parent, name: name.into(), expire: door.leads_somewhere(parent, name) });
                // Names that are due come with the next change at the latest.
                let _ = notices.finish();
            };
            inotify_replay::run(&events, &door, device, &forget);
        })
    }

    /// Returns the current status and counters.
    pub fn status(&self) -> Status {
        status::read(&self.door, self.device, &self.session, &self.counts)
    }

    /// Invalidates all of the kernel's caches: after a change of rules, or after unnoticed changes.
    pub fn invalidate_everything(&self) {
        self.door.change(Invalidation::Everything);
    }

    /// Invalidates a name that appeared, vanished, or refers to another file, and the directory's listing.
    pub fn forget_name(&self, directory: FileId, name: &[u8]) {
        self.door.change(Invalidation::Entry { parent: directory, name: name.into() });
    }

    /// Drops the dentries of an existing file's name as far as they are unused, and the directory's listing; file
    /// systems that others have mounted on it are detached.
    pub fn give_up_name(&self, directory: FileId, name: &[u8]) {
        self.door.change(Invalidation::Forget { parent: directory, name: name.into() });
    }

    /// Waits until all changes sent so far, by the layer or by [`Mount::invalidate_everything`], have been delivered
    /// to the kernel: from then on no caller gets old cached state. False where that took longer than `patience`.
    pub fn delivered(&self, patience: Duration) -> bool {
        let (told, waiting) = mpsc::sync_channel(1);
        {
            // Waiters are notified in the order in which the marks are sent.
            let mut marks = self.marks.lock();
            marks.push_back(told);
            self.door.change(invalidate::mark());
        }
        waiting.recv_timeout(patience).is_ok()
    }

    /// Waits until the mount has ended: unmounted by anybody, or aborted.
    pub fn wait(&self) {
        self.session.wait();
    }

    /// Waits for the end for `patience` at most; returns whether it has ended.
    pub fn ends_within(&self, patience: Duration) -> bool {
        self.session.ends_within(patience)
    }

    /// Whether it has ended.
    pub fn ended(&self) -> bool {
        self.session.ended()
    }

    /// Unmounts. Lazily: it vanishes from the tree at once and ends when its last user is gone.
    ///
    /// # Errors
    /// EBUSY where it is in use and not `lazy`; errors of umount(2) or fusermount3.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        self.session.unmount(lazy)
    }

    /// Writes back the kernel's dirty pages: the data of all write(2) calls that returned before has reached the
    /// layer when this returns. It is not made durable. Not for threads that serve requests, except inside
    /// [`fusewire::blocking`].
    ///
    /// # Errors
    /// The error of the write-back.
    pub fn flush(&self) -> io::Result<()> {
        if !self.door.writeback.on() || self.ended() {
            return Ok(());
        }
        let names = self.door.names(self.door.writeback.nodes());
        self.door.writeback.flush_once(names).map_err(|error| io::Error::from_raw_os_error(error.raw()))
    }

    /// Returns a weak handle for writing back the kernel's dirty pages, which keeps neither the mount nor its layer
    /// alive.
    pub fn held(&self) -> HeldWrites {
        HeldWrites(Arc::downgrade(&self.door))
    }

    /// Waits until `closed` returns true, for `most` at most; returns its last result. It is called again each time
    /// the kernel has closed or forgotten a file: both happen some time after close(2) has returned.
    pub fn wait_closed(&self, most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        self.door.wait_closed(&[], most, closed)
    }

    /// Whether its files are opened without a request.
    pub fn opens_unasked(&self) -> bool {
        self.door.agreement().opens_files_itself
    }

    /// Changes the flags of mount(2): read-only, nosuid, nodev, noexec, noatime. All other flags are off then.
    ///
    /// # Errors
    /// ESTALE where something else is mounted over it; errors of mount(2) (only root may).
    pub fn remount(&self, flags: MountFlags) -> io::Result<()> {
        let device = self.device()?;
        let place = self.door.options.mountpoint.clone();
        // The kernel writes dirty pages back first, and so waits for this process.
        let remounting = self.door.self_io.start("nacre-remount", Role::Flush, move || {
            // The path must lead to this mount, which is then held whatever happens to the path.
            let _mount = Entered::new(&place, device)?;
            // Among the writers may be a thread of ours that sets a file's times.
            let remount = || fusewire::patiently(|| Ok(rustix::mount::mount_remount(c".", flags, c"")?));
            during("remount", crate::inodes::ROOT, remount).map_err(own_mount::number)
        })?;
        Ok(remounting.join().map_err(|_| io::Error::from(SysErrno::IO))??)
    }

    /// Whether the mount is in use, or something is mounted on it, so that it could not be unmounted now. False where
    /// that cannot be checked without trying (an ordinary user's mount).
    ///
    /// # Errors
    /// Where the mount cannot be reached.
    pub fn in_use(&self) -> io::Result<bool> {
        self.session.in_use()
    }

    /// Identity in the mount table, where it is known.
    pub fn identity(&self) -> Option<Identity> {
        self.session.identity()
    }

    /// Whether it is still in the mount tree of this process, in use or not.
    pub fn attached(&self) -> bool {
        self.session.is_mounted()
    }

    /// Ends the mount even while it is in use: dirty pages are written back, and from then on its users get errors.
    pub fn cut_off(&self) {
        self.write_back(&[(0, u64::MAX)]);
        self.session.abort();
    }

    /// Writes back the dirty pages (cached writes, and stores to shared mappings) of the files with inode numbers in
    /// these ranges (from, to); returns when the layer has them, or after [`WRITING_BACK`] where it does not accept
    /// them. Pages that get dirty meanwhile may be missing. Uses an invalidation, which waits for the WRITEs on all
    /// kernels; syncfs(2) does not (docs/decisions/own-mount-locks.md). If the process is killed meanwhile, users
    /// hang until another process takes over: so only for mounts and file systems that are being aborted.
    pub fn write_back(&self, numbers: &[(u64, u64)]) {
        let (door, numbers) = (Arc::clone(&self.door), numbers.to_vec());
        let (tell, told) = mpsc::channel();
        let builder = std::thread::Builder::new().name("nacre-write-back".to_owned()).stack_size(256 << 10);
        let started = builder.spawn(move || {
            write_back(&door, &numbers);
            // The caller may have timed out.
            let _ = tell.send(());
        });
        if started.is_err() || told.recv_timeout(WRITING_BACK).is_err() {
            tracing::warn!("dirty pages of files could not be written back before they are cut off");
        }
    }

    /// Aborts the connection even while it is in use: waiting callers get an error.
    pub fn abort(&self) {
        self.session.abort();
    }

    /// Returns the front end, for other modules of this crate.
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// Device number of the file system, as in stat(2); `None` where it is not known.
    pub fn device_number(&self) -> Option<u64> {
        self.device
    }

    /// Whether it is still mounted in any mount namespace; true where that is not known.
    pub fn is_mounted_anywhere(&self) -> bool {
        let number = |device| (rustix::fs::major(device), rustix::fs::minor(device));
        self.device.is_none_or(|device| fusewire::mounted_anywhere(number(device)))
    }

    /// Whether the kernel knows a file with an inode number from `from` to `to`, for layers whose files are found by
    /// inode number. The kernel forgets unused files soon after their names were invalidated.
    pub fn knows_any(&self, from: u64, to: u64) -> bool {
        self.door.inodes.knows_any(from, to)
    }

    fn device(&self) -> io::Result<u64> {
        self.device.ok_or_else(|| io::Error::from(rustix::io::Errno::STALE))
    }

    /// Raises read-ahead where the daemon serves content: it means fewer requests. Only root may raise it.
    fn raise_read_ahead(&self) {
        if self.door.open.passthrough.refusal().is_none() {
            return;
        }
        let Ok(device) = self.device() else { return };
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        if let Err(error) = std::fs::write(&path, READ_AHEAD_KIB) {
            tracing::debug!(%error, path, "read-ahead stays as it is");
        }
    }
}

/// Weak handle for writing back a mount's dirty pages.
#[derive(Clone)]
pub struct HeldWrites(Weak<Door>);

impl HeldWrites {
    /// Writes back the dirty pages of all files that are open for writing; returns when the data has reached the
    /// layer. Does nothing where the mount has ended: the kernel has written everything back before. Not for threads
    /// that serve requests.
    ///
    /// # Errors
    /// The error of the write-back.
    pub fn pass_on(&self) -> io::Result<()> {
        let open = || self.0.upgrade().map_or_else(BTreeSet::new, |door| open_for_writing(&door));
        let held = self.0.upgrade().filter(|door| door.writeback.on());
        let Some((writeback, names)) = held.map(|door| {
            (Arc::clone(&door.writeback), door.names(open_for_writing(&door).iter().map(|inode| inode.nodeid)))
        }) else {
            return Ok(());
        };
        writeback.flush_open(&open, names).map_err(|error| io::Error::from_raw_os_error(error.raw()))
    }
}

/// Maximum time for write-back when a mount is aborted: the storage below it may be dead.
const WRITING_BACK: Duration = Duration::from_secs(10);

/// See [`Mount::write_back`].
fn write_back(door: &Door, numbers: &[(u64, u64)]) {
    let mut notifier = None;
    door.kernel.tell(|own| {
        notifier = Some(own.clone());
        true
    });
    let Some(notifier) = notifier else { return };
    let within = within(numbers);
    let mut files = open_for_writing(door);
    files.extend(door.writeback.keys());
    for InodeKey { nodeid, .. } in files {
        if !within(door.inodes.number(nodeid)) {
            continue;
        }
        let write = || door.writeback.tell(|| notifier.inval_inode(nodeid, 0, 0));
        if let Err(error) = during("write back", nodeid, write) {
            tracing::warn!(%error, nodeid, "the kernel may not have written back the dirty pages of a file");
        }
    }
}

/// Returns the files that are open for writing, with or without a request.
fn open_for_writing(door: &Door) -> BTreeSet<InodeKey> {
    door.open.files.written_to().into_iter().chain(door.writeback.written.keys()).collect()
}

impl fmt::Debug for HeldWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldWrites").finish_non_exhaustive()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.session.ended()
            && let Err(error) = self.session.unmount(false)
        {
            tracing::debug!(%error, "still in use: it is cut off");
            self.session.abort();
        }
        self.stop.store(true, Ordering::Release);
        self.door.change(invalidate::wake());
        self.door.inodes.doubt_with(None);
        self.door.self_io.inotify_replay.close();
        self.door.self_io.attr_refresh.close();
        self.door.self_io.page_dropper.close();
        self.door.self_io.flush_timer.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the mount had panicked");
            }
        }
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").field("mountpoint", &self.door.options.mountpoint).finish_non_exhaustive()
    }
}

/// Sets in the front end what is known only when the session runs. Earlier requests are served without it. Returns
/// the result of [`crate::passthrough::Passthrough::start`].
fn connect(door: &Door, session: &Session) -> Option<i32> {
    let goes_on = door.survives.as_ref().is_some_and(|survives| survives.memory.resumes());
    door.kernel.connect(session, goes_on);
    let backing: Box<dyn BackingFiles> = Box::new(session.backing());
    door.open.passthrough.start(backing)
}

/// Device number of a mount taken over from another process, for layers whose files are found by inode number: the
/// path to it may lead through another mount of this process, which has not been taken over yet.
fn resumed_device(door: &Door) -> Option<u64> {
    door.survives.as_ref().filter(|_| door.inodes.by_number())?.memory.mounted_before()
}

/// Mounts, and negotiates with the kernel.
fn begin(door: &Arc<Door>) -> Result<Session, MountError> {
    let device = open(&door.options)?;
    door.inodes.promote_root(device.is_detached() && is_promoted(door));
    let place = device.mountpoint().unwrap_or(&door.options.mountpoint).to_owned();
    door.writeback.decide(&place, &door.options, &*door.layer);
    let handler = Arc::clone(door) as Arc<dyn fusewire::Handler>;
    Session::start(device, handler, session_options(&door.options)).map_err(MountError::Session)
}

/// Name by which the root is found below [`crate::inodes::ROOT`] while it is promoted; shown as the root in the mount
/// table.
pub(crate) const PROMOTED: &str = "root";

/// Opens the device and mounts. Root's mount is detached until it answers; an ordinary user's, and one of an old
/// kernel, is attached at once.
fn open(options: &FuseOptions) -> Result<Device, MountError> {
    let wanted = mount_options(options);
    if rustix::process::geteuid().is_root() {
        match fusewire::mount_detached(&wanted) {
            Err(error) if options.without_links => return Err(MountError::Mount(error)),
            Err(error) => tracing::debug!(%error, "mounted where it is seen at once"),
            device => return device.map_err(MountError::Mount),
        }
    }
    fusewire::mount(&options.mountpoint, &wanted).map_err(MountError::Mount)
}

/// Whether users see an inode other than the first as the root. Otherwise the kernel would ask for the root's ACL at
/// every path lookup: it creates the first inode of a connection before it knows that there are ACLs, and never
/// caches for it that there is none. Users other than the root's owner would pay a request for every path. The mounts
/// of a pool use the first inode for writing dirty pages back (`self_io/flush_timer.rs`).
fn is_promoted(door: &Door) -> bool {
    // The thread that replays inotify events opens directories by handle, starting at the first inode.
    let by_number = door.layer.capabilities().numbered.is_some();
    (by_number || door.options.without_links || negotiate::wants_acls(&door.options, &*door.layer))
        && !door.options.notify_watchers
}

/// Attaches a detached mount to its mount point.
fn show(door: &Door, session: &mut Session) -> io::Result<()> {
    let Some(mount) = session.detached() else { return Ok(()) };
    let (options, cannot) =
        (&door.options, |what| move |error: io::Error| about(&door.options.mountpoint, what, &error));
    let mountpoint = if options.without_links {
        options.mountpoint.clone()
    } else {
        fusewire::apart(|| std::fs::canonicalize(&options.mountpoint)).map_err(cannot("cannot use mountpoint"))?
    };
    let attributes = if options.nosymfollow { MountAttributes::NO_SYMLINK_FOLLOW } else { MountAttributes::empty() };
    let name = door.inodes.root_is_promoted().then_some(PROMOTED);
    let device = own_mount::device_of(mount)?;
    let shown = nacre_sys::mounts::show(mount, name, &mountpoint, attributes);
    let (is_directory, id) = shown.map_err(cannot("cannot mount on"))?;
    door.inodes.promote_root(is_directory);
    session.relocated(mountpoint, Identity { id, device: (rustix::fs::major(device), rustix::fs::minor(device)) });
    Ok(())
}

pub(crate) fn about(path: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

fn kept_limit() -> usize {
    (descriptors::room() / 4).min(KEPT_MAX)
}

pub(crate) fn mount_options(options: &FuseOptions) -> MountOptions {
    let choices = [
        (options.read_only || options.immutable, MountFlags::RDONLY),
        (options.nosuid, MountFlags::NOSUID),
        (options.nodev, MountFlags::NODEV),
        (options.noexec, MountFlags::NOEXEC),
        (options.noatime, MountFlags::NOATIME),
        (options.sync, MountFlags::SYNCHRONOUS),
        (options.dirsync, MountFlags::DIRSYNC),
    ];
    let flags =
        choices.into_iter().filter(|(wanted, _)| *wanted).fold(MountFlags::empty(), |all, (_, flag)| all | flag);
    MountOptions {
        fsname: (&options.fsname).into(),
        subtype: options.subtype.clone(),
        flags: u64::from(flags.bits()),
        allow_other: options.allow_other,
        default_permissions: options.default_permissions,
        extra: options.extra.iter().map(Into::into).collect(),
        ..MountOptions::default()
    }
}

pub(crate) fn session_options(options: &FuseOptions) -> SessionOptions {
    let transport = match options.transport {
        // With the rings of a process, the requests that it has read are lost as well.
        TransportChoice::Auto if options.survival.is_some() => fusewire::TransportChoice::Device,
        TransportChoice::Auto => fusewire::TransportChoice::Auto,
        TransportChoice::Uring => fusewire::TransportChoice::Uring,
        TransportChoice::Device => fusewire::TransportChoice::Device,
    };
    let resident = options.survival.is_some();
    let one_device = options.survival.as_ref().is_some_and(Survival::is_stored);
    SessionOptions { transport, threads: options.threads, resident, one_device, ..SessionOptions::default() }
}

/// The front end as far as notifications need it. A notification that waits for a lock that a user keeps does not keep
/// the front end.
#[derive(Clone)]
pub(crate) struct SinkFrontEnd {
    survives: bool,
    door: Weak<Door>,
}

impl SinkFrontEnd {
    pub(crate) fn of(door: &Arc<Door>) -> SinkFrontEnd {
        SinkFrontEnd { survives: door.survives.is_some(), door: Arc::downgrade(door) }
    }

    /// Whether the kernel can invalidate all names at once.
    pub(crate) fn has_epoch(&self) -> bool {
        self.door.upgrade().is_some_and(|door| door.kernel.times().epoch && !door.kernel.carries_mounts())
    }
}

/// Channel for notifications to the kernel, with its errors handled.
#[derive(Clone)]
struct KernelSink {
    notifier: Notifier,
    front_end: SinkFrontEnd,
}

impl KernelSink {
    /// Sends a notification, during which the kernel may wait for a process that waits for a reply of ours.
    fn told(&self, what: &'static str, tell: impl FnOnce(&Notifier) -> io::Result<()>) {
        let tell = || tell(&self.notifier);
        match if self.front_end.survives { worker::waiting(tell) } else { tell() } {
            Ok(()) => {}
            // ENOENT: not cached, which is normal. ENOTCONN: the mount has just ended.
            Err(error)
                if error
                    .raw_os_error()
                    .is_some_and(|number| number == Errno::ENOENT.raw() || number == Errno::ENOTCONN.raw()) => {}
            Err(error) => tracing::debug!(%error, what, "a notification was refused"),
        }
    }
}

impl NoticeSink for KernelSink {
    fn send(&self, notice: &Notice) {
        match notice {
            Notice::Content { nodeid } => self.told("inode", |notifier| notifier.inval_inode(*nodeid, 0, 0)),
            Notice::Entry { parent, name, expire } => {
                self.told("entry", |notifier| notifier.inval_entry(*parent, name, *expire));
            }
        }
    }

    fn attributes(&self, nodeid: u64) {
        self.told("inode", |notifier| notifier.inval_inode(nodeid, -1, 0));
    }

    fn all_names(&self) -> bool {
        let possible = self.front_end.has_epoch();
        if possible {
            self.told("epoch", Notifier::inc_epoch);
        }
        possible
    }
}

/// The kernel's caches of one mount.
struct KernelCaches {
    sink: KernelSink,
    notices: Arc<NoticeQueue>,
    session: Observer,
    door: Arc<Door>,
    /// All names were last invalidated one by one.
    one_by_one: AtomicBool,
}

/// Collects the names of a listing.
#[derive(Default)]
struct Names {
    names: Vec<Box<[u8]>>,
    next: u64,
}

/// Maximum number of names per call.
const PAGE: usize = 4096;

impl DirSink for Names {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.names.len() == PAGE {
            return false;
        }
        self.next = entry.next;
        self.names.push(entry.name.bytes().into());
        true
    }
}

impl KernelCaches {
    /// Expires every dentry that the kernel may have: the last known names of files that it knows, and names in their
    /// directories that it may have as missing.
    fn expire_all(&self) {
        let Door { inodes, layer, .. } = &*self.door;
        let (mut directories, mut paths) = (HashMap::new(), Vec::new());
        inodes.for_each(|nodeid| {
            let Some(node) = inodes.node(nodeid) else { return };
            let path = layer.path(&node);
            if inodes.is_directory(nodeid) {
                self.expire_listed(nodeid, &node);
                if let Some(path) = &path {
                    directories.insert(path.clone(), nodeid);
                }
            }
            paths.extend(path);
        });
        for path in paths {
            let mut parts = path.rsplitn(2, |byte| *byte == b'/');
            let (name, above) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            if let Some(parent) = directories.get(above).filter(|_| !name.is_empty()) {
                self.notices.push(Notice::Entry { parent: *parent, name: name.into(), expire: true });
            }
        }
    }

    fn expire_listed(&self, nodeid: u64, directory: &Node) {
        let mut page = Names::default();
        loop {
            page.names.clear();
            if let Err(error) = self.door.layer.readdir(&Caller::ROOT, directory, page.next, false, &mut page) {
                return tracing::debug!(%error, "a directory cannot be listed: names in it may count as missing for a while");
            }
            if page.names.is_empty() {
                return;
            }
            for name in page.names.drain(..) {
                self.notices.push(Notice::Entry { parent: nodeid, name, expire: true });
            }
        }
    }
}

impl CacheControl for KernelCaches {
    type Moment = fusewire::Moment;

    fn now(&self) -> Self::Moment {
        self.session.quiescent_after()
    }

    fn passed(&self, moment: &mut Self::Moment) -> bool {
        moment.reached()
    }

    fn inode(&self, nodeid: u64, pages: bool) {
        if !self.door.root_is_taken(nodeid) {
            // Its attributes are not cached.
            return;
        }
        // Only regular files have pages, and may be opened for that: opening a fifo would block.
        let writeback = self.door.writeback.on() && self.door.inodes.is_file(nodeid);
        // For pages in write-back the notification would wait, with the device open: a daemon that is killed then
        // would hang.
        if pages && !writeback {
            self.notices.push(Notice::Content { nodeid });
        } else {
            self.sink.attributes(nodeid);
        }
        if writeback {
            // Pages with cached writes go with the last close.
            if !self.door.writeback.miss(nodeid)
                && pages
                && let Some(inode) = self.door.key_of(nodeid)
            {
                self.door.self_io.page_dropper.soon(self.door.writeback.place(), inode);
            }
            // The kernel ignores the size of a regular file in replies.
            self.door.self_io.attr_refresh.soon(nodeid);
        }
    }

    fn entry(&self, parent: u64, name: &[u8]) -> bool {
        let there = self.door.leads_somewhere(parent, name);
        self.notices.push(Notice::Entry { parent, name: name.into(), expire: there });
        there
    }

    fn forget(&self, parent: u64, name: &[u8]) {
        self.notices.push(Notice::Entry { parent, name: name.into(), expire: false });
    }

    fn finish(&self) -> Option<Instant> {
        self.notices.finish()
    }

    fn all_entries(&self) {
        let one_by_one = self.door.kernel.carries_mounts();
        self.one_by_one.store(one_by_one, Ordering::Relaxed);
        if one_by_one {
            self.expire_all();
        } else {
            self.sink.told("epoch", Notifier::inc_epoch);
        }
    }

    fn all_entries_again(&self) {
        if self.one_by_one.load(Ordering::Relaxed) {
            self.expire_all();
        }
    }

    fn layer_checks(&self) -> bool {
        !self.door.options.default_permissions
    }

    fn release_kept(&self, nodeid: u64) {
        self.door.open.passthrough.drop_kept(nodeid, &self.door.inodes);
        self.door.open.closes.heard();
    }

    fn release_all_kept(&self) {
        self.door.open.passthrough.drop_all_kept(&self.door.inodes);
        self.door.open.closes.heard();
    }

    fn tell(&self, files: &[(u64, bool)], names: &[(u64, &[u8])]) -> bool {
        if !self.door.options.notify_watchers {
            return false;
        }
        for &(nodeid, content) in files {
            self.door.self_io.inotify_replay.raise(if content {
                Event::Content(nodeid)
            } else {
                Event::Attributes(nodeid)
            });
        }
        for &(parent, name) in names {
            if !self.door.self_io.inotify_replay.raise(Event::Name(parent, name.into())) {
                // It is late already; one notification is enough.
                let _ = self.entry(parent, name);
            }
        }
        true
    }

    fn trim(&self) {
        nacre_sys::memory::trim();
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        self.door.layer.rest(known)
    }
}

/// Checks whether FUSE can be used here at all; tests report why they skip.
///
/// # Errors
/// The error of opening the device.
pub fn usable() -> io::Result<()> {
    let device = Path::new("/dev/fuse");
    std::fs::OpenOptions::new().read(true).write(true).open(device).map(drop)
}
