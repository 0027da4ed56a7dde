//! A running connection: negotiation, worker threads, and its end.
//!
//! Created and kept by programs. The parts: `negotiate` (INIT), `device` and `ring` (transports), `dispatch` (one
//! request), `workers` (state of each thread), `stuck` (requests that take long), `state` (shared state, and
//! [`blocking`]). Invariant: when [`Session::wait`] or `drop` return, no thread of the session runs, `destroy` has
//! been called, and the kernel's connection is closed.

mod device;
mod dispatch;
mod leader;
mod negotiate;
mod pace;
mod ring;
mod state;
mod stuck;
mod threads;
mod uring;
mod whereabouts;
mod workers;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{OutHeader, Pod, init, notify};
use crate::backing::Backing;
use crate::connection::Connection;
use crate::counters::Counters;
use crate::handler::{Handler, Offer, Settings};
use crate::mount::{Device, Identity, Mounted};
use crate::notify::Notifier;
use crate::request::Form;
use negotiate::Agreement;
use state::{Parts, SessionState};
use workers::{QueueId, Worker};

pub use negotiate::Agreed;
pub use state::blocking;

/// Choice of the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// io_uring where the kernel offers and permits it, the device otherwise.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// The device.
    Device,
}

/// Transport in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// io_uring (FORGET and INTERRUPT come over the device all the same).
    Uring,
    /// The device.
    Device,
}

/// Options of a session.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Choice of the transport.
    pub transport: TransportChoice,
    /// Number of threads at the start: total on the device (at least 2), per CPU on io_uring. 0 selects a default:
    /// one per CPU plus one; 3 (2 with more than 8 CPUs).
    pub threads: u32,
    /// Maximum number of threads that are not inside [`blocking`]: total on the device, per CPU on io_uring. More
    /// threads are started when all are busy. 0 selects a default: 32; 16. Threads that have handled one request for
    /// long while all were busy do not count either.
    pub max_threads: u32,
    /// Stack size of a worker, bytes; only touched pages cost memory.
    pub stack_size: usize,
    /// Over the device: request buffers are resident from the start. A process that is killed while it reads cannot
    /// allocate pages any more, and the request that it reads would fail (EIO) instead of staying available for
    /// [`resend`].
    pub resident: bool,
    /// Over the device: all threads use the session's descriptor, and none has a clone of its own. Requests read
    /// through a clone fail when it is closed; for a process whose descriptors are all closed at its death, except
    /// the session's.
    pub one_device: bool,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            transport: TransportChoice::Auto,
            threads: 0,
            max_threads: 0,
            stack_size: 512 << 10,
            resident: false,
            one_device: false,
        }
    }
}

/// A connection being served. Dropping it unmounts and ends the connection, even if it is in use.
#[derive(Debug)]
pub struct Session {
    shared: Arc<SessionState>,
    mounted: Option<Mounted>,
    agreement: Agreement,
    transport: Transport,
    fallback: Option<String>,
}

/// Why a session did not start.
enum StartError {
    /// The kernel accepted rings and then refused them: this connection can never be used.
    Register(io::Error),
    Other(io::Error),
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> StartError {
        StartError::Other(error)
    }
}

impl Session {
    /// Negotiates and starts the workers; returns when the file system can be used. On error it is unmounted.
    pub fn start(device: Device, handler: Arc<dyn Handler>, options: SessionOptions) -> io::Result<Session> {
        let (fd, mounted) = device.into_parts()?;
        let error = match serve(fd, &handler, &options) {
            Ok((shared, agreement, transport, fallback)) => {
                return Ok(Session { shared, mounted, agreement, transport, fallback });
            }
            Err(error) => error,
        };
        match (error, mounted) {
            (StartError::Register(error), Some(mounted)) if options.transport == TransportChoice::Auto => {
                tracing::warn!(%error, "io_uring failed after it was agreed upon; mounting again without it");
                Session::start_again(&mounted, &handler, options, &error)
            }
            (StartError::Register(error) | StartError::Other(error), mounted) => {
                if let Some(mounted) = mounted
                    && let Err(error) = mounted.unmount(true)
                {
                    tracing::warn!(mountpoint = %mounted.path().display(), %error, "cannot unmount");
                }
                Err(error)
            }
        }
    }

    /// Mounts again at the same mount point, or detached, and uses the device.
    fn start_again(
        mounted: &Mounted,
        handler: &Arc<dyn Handler>,
        options: SessionOptions,
        reason: &io::Error,
    ) -> io::Result<Session> {
        let device = mounted.again()?;
        let options = SessionOptions { transport: TransportChoice::Device, ..options };
        let mut session = Session::start(device, Arc::clone(handler), options)?;
        session.fallback = Some(reason.to_string());
        Ok(session)
    }

    /// Takes over a connection that another process served over the device, with the features agreed on by that
    /// process. That process is dead, and [`resend`] has been called. `ready` is called before any request is read.
    /// On error the mount stays unchanged.
    ///
    /// # Errors
    /// EINVAL where the handler would agree on other features now.
    pub fn resume(
        device: Device,
        handler: Arc<dyn Handler>,
        options: SessionOptions,
        agreed: &Agreed,
        ready: impl FnOnce(Notifier),
    ) -> io::Result<Session> {
        let (fd, mounted) = device.into_parts()?;
        let resumed = Agreement::resumed(agreed, handler.as_ref()).and_then(|agreement| {
            let connection = Connection::new(fd);
            ready(Notifier::new(Arc::clone(&connection)));
            let shared = SessionState::new(parts(&agreement, &handler, &options, Vec::new(), connection));
            start_device_threads(&shared)?;
            Ok((shared, agreement))
        });
        match resumed {
            Ok((shared, agreement)) => {
                Ok(Session { shared, mounted, agreement, transport: Transport::Device, fallback: None })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the state that the next process needs to take this connection over, and the number of its descriptor.
    ///
    /// # Errors
    /// ENOTCONN after the end.
    pub fn agreed(&self) -> io::Result<(Agreed, i32)> {
        Ok((self.agreement.agreed(), self.shared.connection.device()?.as_raw_fd()))
    }

    /// Whether the mount was made, and will be unmounted, by fusermount3.
    pub fn is_by_fusermount(&self) -> bool {
        self.mounted.as_ref().is_some_and(Mounted::is_by_fusermount)
    }

    /// The transport in use.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Why io_uring is not in use though it was wanted; `None` if it is in use or was not wanted.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// The kernel's offer.
    pub fn offer(&self) -> &Offer {
        &self.agreement.offer
    }

    /// The handler's settings as far as they are in force.
    pub fn settings(&self) -> &Settings {
        &self.agreement.settings
    }

    /// Returns a handle for notifications.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.shared.connection))
    }

    /// Returns a handle for passthrough.
    pub fn backing(&self) -> Backing {
        let negotiated = self.agreement.settings.flags & init::PASSTHROUGH != 0;
        Backing::new(Arc::clone(&self.shared.connection), negotiated)
    }

    /// Counts and times of requests.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.shared.counters)
    }

    /// Number of requests that a thread has taken and whose reply the kernel does not have yet.
    pub fn in_flight(&self) -> usize {
        self.shared.workers().iter().filter(|worker| worker.in_flight()).count()
    }

    /// Number of worker threads running now.
    pub fn threads(&self) -> usize {
        self.shared.threads()
    }

    /// Whether a thread id (`Header::pid`) is one of our workers. A request by one of them on its own mount may have
    /// to wait for a thread that it occupies itself, so a handler should refuse it. Cheap.
    pub fn is_own_thread(&self, tid: u32) -> bool {
        self.shared.is_own_thread(tid)
    }

    /// Returns a handle for handlers, independent of the session's owner.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(&self.shared))
    }

    /// Marks all requests that are being handled now; see [`Moment`].
    pub fn quiescent_after(&self) -> Moment {
        Moment::of(&self.shared)
    }

    /// Waits until the connection has ended: unmounted and no longer in use, or aborted.
    pub fn wait(&self) {
        self.shared.wait();
    }

    /// Waits for the end of the connection, for `patience` at most; returns whether it has ended.
    pub fn ends_within(&self, patience: Duration) -> bool {
        self.shared.ends_within(patience)
    }

    /// Whether the connection has ended.
    pub fn ended(&self) -> bool {
        self.shared.over()
    }

    /// Whether our mount still exists (as far as can be seen): false after another process unmounted it. True for a
    /// device that another process mounted.
    pub fn is_mounted(&self) -> bool {
        self.mounted.as_ref().is_none_or(Mounted::present)
    }

    /// The mount point, as in [`Device::mountpoint`].
    pub fn mountpoint(&self) -> Option<&std::path::Path> {
        self.mounted.as_ref().map(Mounted::path)
    }

    /// The mount, while it is detached ([`crate::mount_detached`]).
    pub fn detached(&self) -> Option<BorrowedFd<'_>> {
        self.mounted.as_ref().and_then(Mounted::detached)
    }

    /// Sets the session's mount to this one at `mountpoint`, a path without links. For owners that have attached a
    /// detached mount there, or another one of the same connection (a subdirectory, a clone with other attributes);
    /// the first mount is dropped.
    pub fn relocated(&mut self, mountpoint: std::path::PathBuf, identity: Identity) {
        if let Some(mounted) = &mut self.mounted {
            mounted.relocate(mountpoint, identity);
        }
    }

    /// Whether our mount is in use, or something is mounted on it, so that it could not be unmounted now. False where
    /// that cannot be checked without trying (an ordinary user's mount).
    ///
    /// # Errors
    /// Where the mount cannot be reached.
    pub fn in_use(&self) -> io::Result<bool> {
        self.mounted.as_ref().map_or(Ok(false), Mounted::in_use)
    }

    /// Identity of our mount in the mount table, where it is known.
    pub fn identity(&self) -> Option<Identity> {
        self.mounted.as_ref().and_then(Mounted::identity)
    }

    /// Unmounts; succeeds if that has been done already. Not lazy: EBUSY while in use. Lazy: detached from the mount
    /// tree at once, served until its last user is gone. Does not wait; see [`Session::wait`].
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        self.mounted.as_ref().map_or(Ok(()), |mounted| mounted.unmount(lazy))
    }

    /// Aborts the connection even while it is in use (a process that uses its own mount needs this before it exits:
    /// it could wait for itself): callers get errors, threads that wait inside [`blocking`] are interrupted. Does not
    /// wait for running handlers; see [`Session::wait`]. Over io_uring, callers get errors while a handler runs only
    /// if the mount is in the mount tree and the process may force the unmount: to be called before a lazy unmount.
    pub fn abort(&self) {
        if let Some(mounted) = &self.mounted
            && mounted.present()
            && let Err(error) = mounted.abort()
        {
            // Without privilege, closing all descriptors (below) has the same effect, but the mount stays in the
            // tree.
            tracing::debug!(%error, "no forced unmount");
            if let Err(error) = mounted.unmount(true) {
                tracing::warn!(mountpoint = %mounted.path().display(), %error, "cannot unmount");
            }
        }
        self.shared.stop();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.shared.over() {
            return;
        }
        // No thread serves the remaining users. They would wait forever if one of them had inherited the device.
        if let Err(error) = self.unmount(false) {
            tracing::debug!(%error, "still in use: it is cut off");
            self.abort();
        }
        self.shared.stop();
        self.shared.wait();
    }
}

type Started = (Arc<SessionState>, Agreement, Transport, Option<String>);

fn serve(fd: OwnedFd, handler: &Arc<dyn Handler>, options: &SessionOptions) -> Result<Started, StartError> {
    let agreement = negotiate::read_init(&fd, handler.as_ref())?;
    let parts = |rings, connection| parts(&agreement, handler, options, rings, connection);
    let connection = Connection::new(fd);
    let device = connection.device()?;
    let (rings, fallback) = match options.transport {
        TransportChoice::Device => (None, None),
        choice => match prepare_rings(&agreement, |rings| SessionState::new(parts(rings, Arc::clone(&connection)))) {
            Ok(rings) => (Some(rings), None),
            Err(error) if choice == TransportChoice::Auto => (None, Some(error.to_string())),
            Err(error) => return Err(error.into()),
        },
    };
    if let Some((shared, prepared)) = rings {
        let started = match agreement.answer(&device, true) {
            Ok(()) => prepared
                .go()
                .map_err(StartError::Register)
                .and_then(|()| device::spawn(&shared).map_err(StartError::Other)),
            Err(error) => {
                prepared.cancel();
                Err(error.into())
            }
        };
        return match started {
            Ok(()) => {
                shared.serving();
                pace::spawn(&shared);
                Ok((shared, agreement, Transport::Uring, None))
            }
            Err(error) => {
                drop(device);
                shared.stop();
                shared.wait();
                Err(error)
            }
        };
    }
    let shared = SessionState::new(parts(Vec::new(), connection));
    agreement.answer(&device, false)?;
    drop(device);
    start_device_threads(&shared)?;
    Ok((shared, agreement, Transport::Device, fallback))
}

fn parts(
    agreement: &Agreement,
    handler: &Arc<dyn Handler>,
    options: &SessionOptions,
    rings: Vec<workers::Queue>,
    connection: Arc<Connection>,
) -> Parts {
    Parts {
        handler: Arc::clone(handler),
        connection,
        counters: Arc::default(),
        form: Form { setxattr_ext: agreement.settings.flags & init::SETXATTR_EXT != 0 },
        max_io: agreement.max_io,
        options: options.clone(),
        add_thread: |shared, place| match place {
            QueueId::Device => device::spawn(shared),
            QueueId::Ring(queue) => ring::grow(shared, queue),
        },
        rings,
    }
}

/// Makes the kernel resend all requests that the last process serving a connection has not answered. To be called
/// when that process is dead, and before any of its descriptors of the connection is closed: that would abort the
/// requests read through it.
///
/// # Errors
/// EINVAL before Linux 6.9; ENOTCONN after the end of the connection.
pub fn resend(device: BorrowedFd<'_>) -> io::Result<()> {
    let header = OutHeader { len: size_of::<OutHeader>() as u32, error: notify::RESEND, unique: 0 };
    rustix::io::retry_on_intr(|| rustix::io::write(device, header.bytes()))?;
    Ok(())
}

/// The kernel's module parameter for FUSE over io_uring, if the kernel supports it at all.
const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Minor version of the protocol that brought FUSE over io_uring (Linux 6.14, `include/uapi/linux/fuse.h`).
const RING_MINOR: u32 = 42;

/// Why a kernel with this version of the protocol, and with or without this parameter, does not offer rings.
fn why_no_rings(minor: u32, switch: &Path) -> &'static str {
    if switch.exists() {
        "FUSE over io_uring is switched off: root can `echo 1 > /sys/module/fuse/parameters/enable_uring`"
    } else if minor < RING_MINOR {
        "this kernel is too old for FUSE over io_uring (Linux 6.14)"
    } else {
        "this kernel was built without FUSE over io_uring"
    }
}

/// Creates the rings, if the kernel offers to use them.
fn prepare_rings(
    agreement: &Agreement,
    shared: impl FnOnce(Vec<workers::Queue>) -> Arc<SessionState>,
) -> io::Result<(Arc<SessionState>, ring::Prepared)> {
    if !agreement.offer.has(init::OVER_IO_URING) {
        let why = why_no_rings(agreement.offer.minor, Path::new(RING_SWITCH));
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let cpus = ring::Cpus::read()?;
    let shared = shared(cpus.queues()?);
    let prepared = ring::prepare(&shared, &cpus)?;
    Ok((shared, prepared))
}

/// Starts the device threads. Never only one: a request that waits for another would wait forever.
fn start_device_threads(shared: &Arc<SessionState>) -> io::Result<()> {
    let threads = match shared.options.threads {
        0 => shared.few(std::thread::available_parallelism().map_or(2, |cpus| cpus.get().min(8) as i32) + 1),
        chosen => chosen.min(1 << 16) as i32,
    }
    .max(2);
    for _ in 0..threads {
        if let Err(error) = device::spawn(shared) {
            shared.stop();
            shared.wait();
            return Err(error);
        }
    }
    shared.serving();
    Ok(())
}

/// A handle to a session for its handler, usable from any thread; cheap to clone.
#[derive(Clone, Debug)]
pub struct Observer(Arc<SessionState>);

impl Observer {
    /// See [`Session::is_own_thread`].
    pub fn is_own_thread(&self, tid: u32) -> bool {
        self.0.is_own_thread(tid)
    }

    /// See [`Session::quiescent_after`].
    pub fn quiescent_after(&self) -> Moment {
        Moment::of(&self.0)
    }

    /// See [`Session::in_flight`].
    pub fn in_flight(&self) -> usize {
        self.0.workers().iter().filter(|worker| worker.in_flight()).count()
    }
}

/// A point in the life of a session, created by [`Session::quiescent_after`]: reached when all requests that were
/// being handled then have been answered, that is, when the kernel has their replies.
///
/// Closes the race between a reply that was computed before a change and the invalidation for that change: make the
/// change visible, take a `Moment`, wait for it, then notify. Requests inside [`blocking`] are not waited for; their
/// reply must not depend on state read before that call. Do not wait in a worker thread: it would wait for itself.
#[derive(Debug)]
pub struct Moment {
    unanswered: Vec<(Arc<Worker>, u32)>,
}

impl Moment {
    fn of(shared: &SessionState) -> Moment {
        let workers = shared.workers().into_iter();
        Moment { unanswered: workers.filter_map(|worker| worker.mark().map(|mark| (worker, mark))).collect() }
    }

    /// Whether the point is reached.
    pub fn reached(&mut self) -> bool {
        self.unanswered.retain(|(worker, mark)| !worker.passed(*mark));
        self.unanswered.is_empty()
    }

    /// Waits until it is reached, polling after 20 microseconds at first, and after 1 millisecond at last.
    #[expect(clippy::disallowed_methods, reason = "threads pass on without a word, so that requests cost nothing")]
    pub fn wait(mut self) {
        let mut pause = Duration::from_micros(20);
        while !self.reached() {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switched_off_too_old_and_built_without_are_three_reasons() {
        let (there, nowhere) = (std::env::current_exe().unwrap(), Path::new("/nowhere/enable_uring"));
        assert!(why_no_rings(RING_MINOR, &there).contains("switched off"));
        assert!(why_no_rings(RING_MINOR, nowhere).contains("built without"));
        assert!(why_no_rings(RING_MINOR - 1, nowhere).contains("too old"));
    }
}
