//! One mount: made of a layer and options, asked for its figures, ended.
//!
//! Called by the command line and by tests. Invariants: the layer's watch is on before the first
//! request; the invalidation thread is the only one that sends notifications, and ends with the
//! mount.

use crate::{
    door::Door,
    invalidate::{self, CacheControl, InvalidationCounts},
    negotiate,
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
    time::Duration,
};

/// Most files kept open after their last close, whatever the limit of descriptors.
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
    /// The kernel and the daemon did not come to terms.
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

/// A mount that is being served. Dropped, it ends, and is cut off where it is in use.
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
    /// See [`MountError`]; nothing is left mounted then, or what was to be gone on with has no session any
    /// more.
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
        // While it is at no place, if root made it: the way to its mount point may lead through
        // other mounts of ours. It may be another than before.
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
        let caches = KernelCaches {
            notifier: session.notifier(),
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
            mount.start_inotify_replay()?;
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

    /// The threads that tell the kernel what it does not notice where it holds writes back.
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
            // What they could not do they have told.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        })
    }

    fn start_inotify_replay(&mut self) -> Result<(), MountError> {
        let device = self.device().map_err(MountError::Session)?;
        let events = self.door.self_io.inotify_replay.open();
        let door = Arc::clone(&self.door);
        let notifier = self.session.notifier();
        self.thread("nacre-inotify", move || {
            // An answer of "not known" is as good.
            let forget =
                |parent, name: &[u8]| drop(notifier.inval_entry(parent, name, door.leads_somewhere(parent, name)));
            inotify_replay::run(&events, &door, device, &forget);
        })
    }

    /// Its figures at this moment.
    pub fn status(&self) -> Status {
        status::read(&self.door, self.device, &self.session, &self.counts)
    }

    /// Makes the kernel ask for everything again: after a change of rules, or where something
    /// changed unnoticed.
    pub fn invalidate_everything(&self) {
        self.door.change(Invalidation::Everything);
    }

    /// A name in a directory appeared, vanished, or means another file: the kernel asks for it, and
    /// for the directory's listing, anew.
    pub fn forget_name(&self, directory: FileId, name: &[u8]) {
        self.door.change(Invalidation::Entry { parent: directory, name: name.into() });
    }

    /// The same for a name that still leads somewhere: what nobody uses of it is forgotten, and what
    /// others have mounted on it is detached.
    pub fn give_up_name(&self, directory: FileId, name: &[u8]) {
        self.door.change(Invalidation::Forget { parent: directory, name: name.into() });
    }

    /// Waits until the kernel has been told of every change that the layer or
    /// [`Mount::invalidate_everything`] told of before: from then on nobody is answered from what
    /// was cached. False where that took longer than `patience`.
    pub fn delivered(&self, patience: Duration) -> bool {
        let (told, waiting) = mpsc::sync_channel(1);
        {
            // Marks are answered in the order in which they are sent.
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

    /// Waits for the end no longer than this; whether it has ended.
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
    /// EBUSY where it is in use and not `lazy`; what umount(2) or fusermount3 say.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        self.session.unmount(lazy)
    }

    /// Makes the kernel pass on what it has collected: what write(2) had taken before the call has
    /// reached the layer when this returns. Nothing is made durable by it. Not for threads that
    /// serve requests, but inside [`fusewire::blocking`].
    ///
    /// # Errors
    /// Where the kernel could not pass it on.
    pub fn flush(&self) -> io::Result<()> {
        if !self.door.writeback.on() || self.ended() {
            return Ok(());
        }
        let names = self.door.names(self.door.writeback.nodes());
        self.door.writeback.flush_once(names).map_err(|error| io::Error::from_raw_os_error(error.raw()))
    }

    /// For who has passed on what the kernel holds, at any time, and must not keep the mount or its
    /// layer meanwhile.
    pub fn held(&self) -> HeldWrites {
        HeldWrites(Arc::downgrade(&self.door))
    }

    /// Waits until `closed` says so, at most so long; answers what it said last. It is asked again
    /// whenever the kernel has closed a file, or forgotten one: both come some time after close(2)
    /// has returned.
    pub fn wait_closed(&self, most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        self.door.wait_closed(&[], most, closed)
    }

    /// Whether its files are opened without a request.
    pub fn opens_unasked(&self) -> bool {
        self.door.agreement().opens_files_itself
    }

    /// Gives it other flags of mount(2): read-only, no set-id bits, no devices, no programs, no
    /// access times. All others are off then.
    ///
    /// # Errors
    /// ESTALE where something else is mounted over it; what mount(2) says (only root may).
    pub fn remount(&self, flags: MountFlags) -> io::Result<()> {
        let device = self.device()?;
        let place = self.door.options.mountpoint.clone();
        // The kernel passes on what it holds first, and so waits for this process.
        let remounting = self.door.self_io.start("nacre-remount", Role::Flush, move || {
            // What is seen at the place must be this mount. And stays it, whatever becomes of the
            // path.
            let _mount = Entered::new(&place, device)?;
            // Among those who write may be a thread of ours that sets a file's times.
            let remount = || fusewire::patiently(|| Ok(rustix::mount::mount_remount(c".", flags, c"")?));
            during("remount", crate::inodes::ROOT, remount).map_err(own_mount::number)
        })?;
        Ok(remounting.join().map_err(|_| io::Error::from(SysErrno::IO))??)
    }

    /// Whether somebody uses it, or something is mounted on it, so that it could not be unmounted
    /// now. False where that cannot be asked without trying (an ordinary user's mount).
    ///
    /// # Errors
    /// Where the mount cannot be reached.
    pub fn in_use(&self) -> io::Result<bool> {
        self.session.in_use()
    }

    /// Which it is in the table of mounts, where that is known.
    pub fn identity(&self) -> Option<Identity> {
        self.session.identity()
    }

    /// Whether it is still in the tree of this process, in use or not.
    pub fn attached(&self) -> bool {
        self.session.is_mounted()
    }

    /// Ends it although others use it: what the kernel has collected of their writes and stores is
    /// written back, and from then on they get errors.
    pub fn cut_off(&self) {
        self.write_back(&[(0, u64::MAX)]);
        self.session.abort();
    }

    /// Has the kernel write back the dirty pages (collected writes, and stores to shared mappings) of the
    /// files with these inode numbers (from, to); returns when the layer has them, or after
    /// [`WRITING_BACK`] where it does not take them. Pages that get dirty meanwhile may be missing. By a
    /// notice, which waits for the WRITEs on all kernels; syncfs(2) does not
    /// (docs/decisions/own-mount-locks.md). A process that is killed meanwhile leaves users who hang, unless
    /// another one takes over: so only for mounts and file systems that are being cut off.
    pub fn write_back(&self, numbers: &[(u64, u64)]) {
        let (door, numbers) = (Arc::clone(&self.door), numbers.to_vec());
        let (tell, told) = mpsc::channel();
        let builder = std::thread::Builder::new().name("nacre-write-back".to_owned()).stack_size(256 << 10);
        let started = builder.spawn(move || {
            write_back(&door, &numbers);
            // Who asked may have gone on.
            let _ = tell.send(());
        });
        if started.is_err() || told.recv_timeout(WRITING_BACK).is_err() {
            tracing::warn!("dirty pages of files could not be written back before they are cut off");
        }
    }

    /// Cuts it off even while it is in use: callers that wait get an error.
    pub fn abort(&self) {
        self.session.abort();
    }

    /// For what is done to it elsewhere in this crate.
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// The device number of the file system, as stat(2) shows it; `None` where it could not be
    /// asked for.
    pub fn device_number(&self) -> Option<u64> {
        self.device
    }

    /// Whether anybody still has it mounted, in whatever mount namespace; true where that is not
    /// known.
    pub fn is_mounted_anywhere(&self) -> bool {
        let number = |device| (rustix::fs::major(device), rustix::fs::minor(device));
        self.device.is_none_or(|device| fusewire::mounted_anywhere(number(device)))
    }

    /// Whether the kernel knows a file with an inode number from `from` to `to`, of a layer whose
    /// files are found by their numbers. What it does not use it forgets soon after it was told to
    /// forget the name.
    pub fn knows_any(&self, from: u64, to: u64) -> bool {
        self.door.inodes.knows_any(from, to)
    }

    fn device(&self) -> io::Result<u64> {
        self.device.ok_or_else(|| io::Error::from(rustix::io::Errno::STALE))
    }

    /// Where the daemon serves content, larger read-ahead means fewer requests; only root may raise
    /// it.
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

/// What the kernel holds back of a mount.
#[derive(Clone)]
pub struct HeldWrites(Weak<Door>);

impl HeldWrites {
    /// Makes the kernel pass on what it holds of all files that are open for writing; returns when
    /// it has reached the layer. Nothing where the mount has ended, before which the kernel did so.
    /// Not for threads that serve requests.
    ///
    /// # Errors
    /// Where the kernel could not pass it on.
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

/// How long dirty pages may take to be written back when a mount is cut off: what it lies on may be dead.
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

/// The files that are open for writing, with or without a request.
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

/// Gives the door what it can know only when the session runs. Requests that come before are served
/// without it. Answers what [`crate::passthrough::Passthrough::start`] does.
fn connect(door: &Door, session: &Session) -> Option<i32> {
    let goes_on = door.survives.as_ref().is_some_and(|survives| survives.memory.resumes());
    door.kernel.connect(session, goes_on);
    let backing: Box<dyn BackingFiles> = Box::new(session.backing());
    door.open.passthrough.start(backing)
}

/// The device number of a mount that goes on, of a layer whose files are found by their numbers: the way
/// to it may lead through another mount of this process, which does not go on yet.
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

/// The name by which the root is found below [`crate::inodes::ROOT`] while it is promoted; shown as
/// the root in the table of mounts.
pub(crate) const PROMOTED: &str = "root";

/// Root's mount is at no place until it answers; anybody else's, and one of an old kernel, is where
/// it belongs at once.
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

/// Whether an inode of its own is to be the root that users see. The kernel would ask for the
/// root's ACL at every step: it makes the first inode of a connection before it knows that there
/// are ACLs, and for that one it never keeps the answer that there is none. Users other than the
/// root's owner would pay a request for every path. The mounts of a pool use the first inode for
/// passing on what the kernel holds (`self_io/flush_timer.rs`).
fn is_promoted(door: &Door) -> bool {
    // Our thread that raises events reaches directories by handle, from the first inode on.
    let by_number = door.layer.capabilities().numbered.is_some();
    (by_number || door.options.without_links || negotiate::wants_acls(&door.options, &*door.layer))
        && !door.options.notify_watchers
}

/// Shows a mount that is at no place where it belongs.
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
        // With the rings of a process, what it has read goes as well.
        TransportChoice::Auto if options.survival.is_some() => fusewire::TransportChoice::Device,
        TransportChoice::Auto => fusewire::TransportChoice::Auto,
        TransportChoice::Uring => fusewire::TransportChoice::Uring,
        TransportChoice::Device => fusewire::TransportChoice::Device,
    };
    let resident = options.survival.is_some();
    let one_device = options.survival.as_ref().is_some_and(Survival::is_stored);
    SessionOptions { transport, threads: options.threads, resident, one_device, ..SessionOptions::default() }
}

/// The kernel's caches of one mount.
struct KernelCaches {
    notifier: Notifier,
    session: Observer,
    door: Arc<Door>,
    /// The kernel was told of names one by one when all were stale.
    one_by_one: AtomicBool,
}

/// Takes the names of a listing.
#[derive(Default)]
struct Names {
    names: Vec<Box<[u8]>>,
    next: u64,
}

/// Names taken in one call.
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
    /// Has the kernel ask for every name again that it may have: the last ones of files that it
    /// knows, and those that it may believe not to be there.
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
                self.told("entry", |notifier| notifier.inval_entry(*parent, name, true));
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
            page.names.iter().for_each(|name| self.told("entry", |notifier| notifier.inval_entry(nodeid, name, true)));
        }
    }

    /// Tells the kernel, which may wait for somebody who waits for an answer of ours.
    fn told(&self, what: &'static str, tell: impl FnOnce(&Notifier) -> io::Result<()>) {
        let tell = || tell(&self.notifier);
        match if self.door.survives.is_some() { worker::waiting(tell) } else { tell() } {
            Ok(()) => {}
            // Not cached, which is normal; or the mount has just ended.
            Err(error)
                if error
                    .raw_os_error()
                    .is_some_and(|number| number == Errno::ENOENT.raw() || number == Errno::ENOTCONN.raw()) => {}
            Err(error) => tracing::debug!(%error, what, "a notification was refused"),
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
            // Nothing of it is kept.
            return;
        }
        // Regular files alone have pages, and may be opened for that: a fifo would not let go of
        // whoever opens it.
        let writeback = self.door.writeback.on() && self.door.inodes.is_file(nodeid);
        // For pages that are being written back the notification would wait, with the device open:
        // a daemon that is killed then would hang.
        self.told("inode", |notifier| notifier.inval_inode(nodeid, if pages && !writeback { 0 } else { -1 }, 0));
        if writeback {
            // Pages that hold collected writes go with the last close.
            if !self.door.writeback.miss(nodeid)
                && pages
                && let Some(inode) = self.door.key_of(nodeid)
            {
                self.door.self_io.page_dropper.soon(self.door.writeback.place(), inode);
            }
            // It believes no answer about the size of a regular file.
            self.door.self_io.attr_refresh.soon(nodeid);
        }
    }

    fn entry(&self, parent: u64, name: &[u8]) -> bool {
        let there = self.door.leads_somewhere(parent, name);
        self.told("entry", |notifier| notifier.inval_entry(parent, name, there));
        there
    }

    fn forget(&self, parent: u64, name: &[u8]) {
        self.told("entry", |notifier| notifier.inval_entry(parent, name, false));
    }

    fn all_entries(&self) {
        let one_by_one = self.door.kernel.carries_mounts();
        self.one_by_one.store(one_by_one, Ordering::Relaxed);
        if one_by_one {
            self.expire_all();
        } else {
            self.told("epoch", Notifier::inc_epoch);
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
                // Told late as it is, once is enough.
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

/// Whether FUSE can be used here at all; tests say why they skip.
///
/// # Errors
/// What opening the device says.
pub fn usable() -> io::Result<()> {
    let device = Path::new("/dev/fuse");
    std::fs::OpenOptions::new().read(true).write(true).open(device).map(drop)
}
