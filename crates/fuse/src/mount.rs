//! One mount: made of a layer and options, asked for its figures, ended.
//!
//! Called by the command line and by tests. Invariants: the layer's watch is on before the first request; the invalidation thread is the
//! only one that sends notifications, and ends with the mount.

use crate::{
    door::Door,
    hidden_place::HiddenPlace,
    invalidate::{self, CacheControl, InvalidationCounts, Shared},
    negotiate,
    options::{FuseOptions, TransportChoice},
    own_mount,
    passthrough::BackingFiles,
    resync,
    shadow::{self, Event},
    status::{self, Status},
};
use fusewire::{MountOptions, Notifier, Observer, Session, SessionOptions};
use nacre_sys::mounts::MountAttributes;
use nacre_vfs::{Errno, FileId, Invalidation, Layer};
use rustix::{
    mount::MountFlags,
    process::{Resource, getrlimit},
};
use std::{
    fmt, io,
    os::fd::AsRawFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

/// Most files kept open after their last close, whatever the limit of descriptors.
const KEPT_MAX: u64 = 4096;
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
    session: Session,
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
    /// See [`MountError`]; nothing is left mounted then.
    pub fn start(layer: Arc<dyn Layer>, options: FuseOptions) -> Result<Mount, MountError> {
        let (sender, receiver) = mpsc::channel();
        layer.watch(sender.clone());
        let door = Door::new(layer, options, sender, kept_limit()).map_err(MountError::Root)?;
        let door = Arc::new(door);
        let hidden = if door.options.without_links || is_shown_late(&door.options) || root_goes_uncached(&door) {
            Some(HiddenPlace::new(&door.options.mountpoint, door.options.without_links).map_err(MountError::Mount)?)
        } else {
            None
        };
        door.inodes.promote_root(hidden.is_some());
        let place = hidden.as_ref().map_or(&*door.options.mountpoint, |hidden| &hidden.path);
        let device = fusewire::mount(place, &mount_options(&door.options)).map_err(MountError::Mount)?;
        door.collecting.decide(place, &door.options, &*door.layer);
        let session = Session::start(device, Arc::clone(&door) as Arc<dyn fusewire::Handler>, session_options(&door.options));
        let mut session = session.map_err(MountError::Session)?;
        connect(&door, &session);
        door.running.start(place);
        door.collecting.start(place, session.notifier());
        if let Some(hidden) = &hidden {
            show(&door, &mut session, hidden).map_err(MountError::Mount)?;
        }
        let counts = Arc::new(InvalidationCounts::default());
        let stop = Arc::new(AtomicBool::new(false));
        let marks = invalidate::Marks::default();
        let caches = KernelCaches { notifier: session.notifier(), session: session.observer(), door: Arc::clone(&door) };
        let shared = Shared {
            inodes: Arc::clone(&door.inodes),
            counts: Arc::clone(&counts),
            stop: Arc::clone(&stop),
            trim: Arc::clone(&door.trim),
            written: Arc::clone(&door.written),
            marks: Arc::clone(&marks),
        };
        let device = own_mount::device(&door.options.mountpoint).ok();
        let mut mount = Mount { session, door, counts, stop, marks, threads: Vec::new(), device };
        mount.thread("nacre-notify", move || invalidate::run(&receiver, &caches, &shared))?;
        if mount.door.collecting.on() {
            let setter = mount.door.resync.setter.start(&mount.door.collecting.errands).map_err(MountError::Thread)?;
            let dropper = mount.door.collecting.dropper.start(&mount.door.collecting.errands).map_err(MountError::Thread)?;
            let beat = mount.door.collecting.start_beat().map_err(MountError::Thread)?;
            let (jobs, door) = (mount.door.resync.open(), Arc::clone(&mount.door));
            mount.thread("nacre-resync", move || {
                resync::run(&jobs, &door);
                drop(setter.join());
                drop(dropper.join());
                drop(beat.join());
            })?;
        }
        if mount.door.options.notify_watchers {
            mount.start_shadow()?;
        }
        mount.raise_read_ahead();
        Ok(mount)
    }

    fn thread(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), MountError> {
        let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
        self.threads.push(builder.spawn(body).map_err(MountError::Thread)?);
        Ok(())
    }

    fn start_shadow(&mut self) -> Result<(), MountError> {
        let device = self.device().map_err(MountError::Session)?;
        let events = self.door.shadow.open();
        let door = Arc::clone(&self.door);
        let notifier = self.session.notifier();
        self.thread("nacre-shadow", move || {
            // An answer of "not known" is as good.
            let forget = |parent, name: &[u8]| drop(notifier.inval_entry(parent, name, false));
            shadow::run(&events, &door, device, &forget);
        })
    }

    /// Its figures at this moment.
    pub fn status(&self) -> Status {
        status::read(&self.door, &self.session, &self.counts)
    }

    /// Makes the kernel ask for everything again: after a change of rules, or where something changed unnoticed.
    pub fn invalidate_everything(&self) {
        self.door.change(Invalidation::Everything);
    }

    /// A name in a directory appeared, vanished, or means another file: the kernel asks for it, and for the directory's listing, anew.
    pub fn forget_name(&self, directory: FileId, name: &[u8]) {
        self.door.change(Invalidation::Entry { parent: directory, name: name.into() });
    }

    /// Waits until the kernel has been told of every change that the layer or [`Mount::invalidate_everything`] told of before: from then on nobody is
    /// answered from what was cached. False where that took longer than `patience`.
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

    /// Makes the kernel pass on what it has collected: what write(2) had taken before the call has reached the layer when this returns. Nothing is made
    /// durable by it. Not for threads that serve requests, but inside [`fusewire::blocking`].
    ///
    /// # Errors
    /// Where the kernel could not pass it on.
    pub fn settle(&self) -> io::Result<()> {
        if !self.door.collecting.on() || self.ended() {
            return Ok(());
        }
        self.door.collecting.pass_on_all().map_err(|error| io::Error::from_raw_os_error(error.raw()))
    }

    /// Gives it other flags of mount(2): read-only, no set-id bits, no devices, no programs, no access times. All others are off then.
    ///
    /// # Errors
    /// ESTALE where something else is mounted over it; what mount(2) says (only root may).
    pub fn remount(&self, flags: MountFlags) -> io::Result<()> {
        // What is seen at the place must be this mount.
        let device = self.device.ok_or_else(|| io::Error::from(rustix::io::Errno::STALE))?;
        let root = own_mount::root(&self.door.options.mountpoint, device).map_err(io::Error::from)?;
        // And stays it, whatever becomes of the path.
        Ok(rustix::mount::mount_remount(format!("/proc/self/fd/{}", root.as_raw_fd()), flags, c"")?)
    }

    /// Cuts it off even while it is in use: callers that wait get an error.
    pub fn abort(&self) {
        self.session.abort();
    }

    /// For what is done to it elsewhere in this crate.
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// The device number of the file system, as stat(2) shows it; `None` where it could not be asked for.
    pub fn device_number(&self) -> Option<u64> {
        self.device
    }

    /// Whether the kernel knows a file with an inode number from `from` to `to`, of a layer whose files are found by their numbers. What it does not use it
    /// forgets soon after it was told to forget the name.
    pub fn knows_any(&self, from: u64, to: u64) -> bool {
        self.door.inodes.knows_any(from, to)
    }

    fn device(&self) -> io::Result<u64> {
        own_mount::device(&self.door.options.mountpoint)
    }

    /// Where the daemon serves content, larger read-ahead means fewer requests; only root may raise it.
    fn raise_read_ahead(&self) {
        if self.door.passthrough.refusal().is_none() {
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
        self.door.shadow.close();
        self.door.resync.close();
        self.door.collecting.dropper.close();
        self.door.collecting.beat.close();
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

/// Gives the door what it can know only when the session runs. Requests that come before are served without it.
fn connect(door: &Door, session: &Session) {
    *door.session.write() = Some(session.observer());
    *door.notifier.write() = Some(session.notifier());
    let backing: Box<dyn BackingFiles> = Box::new(session.backing());
    door.passthrough.start(backing);
    // Harmless on a fresh mount, and shows whether the kernel knows it.
    door.epoch.store(session.notifier().inc_epoch().is_ok(), Ordering::Relaxed);
}

/// The name by which the root is found below [`crate::inodes::ROOT`] while it is promoted; shown as the root in the table of mounts.
pub(crate) const PROMOTED: &str = "root";

/// Whether the mount is to have what mount(2) cannot give it.
fn is_shown_late(options: &FuseOptions) -> bool {
    options.nosymfollow && !options.notify_watchers && rustix::process::geteuid().is_root()
}

/// Whether the kernel would ask for the root's ACL at every step: it makes the first inode of a connection before it knows that there are
/// ACLs, and for that one it never keeps the answer that there is none. Users other than the root's owner then pay a request for every path.
/// So an inode of its own becomes the root that users see.
fn root_goes_uncached(door: &Door) -> bool {
    // Our thread that raises events reaches directories by handle, from the first inode on.
    negotiate::wants_acls(&door.options, &*door.layer) && !door.options.notify_watchers && rustix::process::geteuid().is_root()
}

/// Shows a mount that was made at a hidden place where it belongs.
fn show(door: &Door, session: &mut Session, hidden: &HiddenPlace) -> io::Result<()> {
    let attributes = if door.options.nosymfollow { MountAttributes::NO_SYMLINK_FOLLOW } else { MountAttributes::empty() };
    let shown = nacre_sys::mounts::show_directory(&hidden.path, PROMOTED, &hidden.mountpoint, attributes);
    door.inodes.promote_root(shown.map_err(|error| about(&hidden.mountpoint, "cannot mount on", &error))?);
    session.relocated(hidden.mountpoint.clone())
}

pub(crate) fn about(path: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

fn kept_limit() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(KEPT_MAX * 4);
    (descriptors / 4).min(KEPT_MAX) as usize
}

fn mount_options(options: &FuseOptions) -> MountOptions {
    let choices = [
        (options.read_only || options.immutable, MountFlags::RDONLY),
        (options.nosuid, MountFlags::NOSUID),
        (options.nodev, MountFlags::NODEV),
        (options.noexec, MountFlags::NOEXEC),
        (options.noatime, MountFlags::NOATIME),
        (options.sync, MountFlags::SYNCHRONOUS),
        (options.dirsync, MountFlags::DIRSYNC),
    ];
    let flags = choices.into_iter().filter(|(wanted, _)| *wanted).fold(MountFlags::empty(), |all, (_, flag)| all | flag);
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

fn session_options(options: &FuseOptions) -> SessionOptions {
    let transport = match options.transport {
        TransportChoice::Auto => fusewire::TransportChoice::Auto,
        TransportChoice::Uring => fusewire::TransportChoice::Uring,
        TransportChoice::Device => fusewire::TransportChoice::Device,
    };
    SessionOptions { transport, threads: options.threads, ..SessionOptions::default() }
}

/// The kernel's caches of one mount.
struct KernelCaches {
    notifier: Notifier,
    session: Observer,
    door: Arc<Door>,
}

impl KernelCaches {
    fn sent(&self, what: &'static str, result: io::Result<()>) {
        match result {
            Ok(()) => {}
            // Not cached, which is normal; or the mount has just ended.
            Err(error) if error.raw_os_error().is_some_and(|number| number == Errno::ENOENT.raw() || number == Errno::ENOTCONN.raw()) => {}
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
        let collecting = self.door.collecting.on() && !self.door.inodes.is_directory(nodeid);
        // For pages that are being written back the notification would wait, with the device open: a daemon that is killed then would hang.
        self.sent("inode", self.notifier.inval_inode(nodeid, if pages && !collecting { 0 } else { -1 }, 0));
        if collecting {
            // Pages that hold collected writes go with the last close.
            if !self.door.collecting.miss(nodeid) && pages {
                self.door.collecting.dropper.soon(self.door.collecting.place(), nodeid);
            }
            // It believes no answer about the size of a regular file.
            self.door.resync.soon(nodeid);
        }
    }

    fn entry(&self, parent: u64, name: &[u8]) {
        self.sent("entry", self.notifier.inval_entry(parent, name, false));
    }

    fn all_entries(&self) -> bool {
        self.notifier.inc_epoch().is_ok()
    }

    fn layer_checks(&self) -> bool {
        !self.door.options.default_permissions
    }

    fn release_kept(&self, nodeid: u64) {
        self.door.passthrough.drop_kept(nodeid, &self.door.inodes);
    }

    fn release_all_kept(&self) {
        self.door.passthrough.drop_all_kept(&self.door.inodes);
    }

    fn tell(&self, files: &[(u64, bool)], names: &[(u64, &[u8])]) -> bool {
        if !self.door.options.notify_watchers {
            return false;
        }
        for &(nodeid, content) in files {
            self.door.shadow.raise(if content { Event::Content(nodeid) } else { Event::Attributes(nodeid) });
        }
        for &(parent, name) in names {
            if !self.door.shadow.raise(Event::Name(parent, name.into())) {
                self.entry(parent, name);
            }
        }
        true
    }

    fn trim(&self) {
        nacre_sys::memory::trim();
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
