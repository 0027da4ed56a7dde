//! sync(2) interception: notices calls of sync(2) by any process.
//!
//! The kernel sends no request for it to an ordinary FUSE mount; to a mount on a block device it sends SYNCFS (Linux
//! 6.18), and waits for the reply. So there is one such mount, attached nowhere, on a small loop device over memory,
//! for this purpose only. Used by the process of a pool. syncfs(2) on its ordinary mounts is not intercepted.
//!
//! Invariants:
//! * no caller waits forever: the reply comes once everything is durable, once it is known that this cannot be done
//!   now ([`Duty::stuck`]), or after [`PATIENCE`]; a process that is stopped is given up by the kernel
//!   ([`REQUEST_TIMEOUT`]);
//! * the threads that reply touch no mount of ours, and another thread makes the data durable;
//! * the connection ends before its mount does, also where the process is killed: the kernel sends DESTROY to a live
//!   connection, and would wait for us.

use fusewire::{
    Errno, Handler, Offer, Op, Reply, Request, Session, SessionOptions, Settings, TransportChoice, abi::init,
};
use nacre_sys::{descriptors, kernel_version::kernel_version, loop_devices};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum time for which a caller of sync(2) waits, while there is progress.
const PATIENCE: Duration = Duration::from_secs(100);
/// Seconds after which the kernel aborts the connection of a stopped process; longer than any reply of ours takes. It
/// checks every 15 s.
const REQUEST_TIMEOUT: u16 = 120;
/// Interval of the checks for progress.
const LOOK: Duration = Duration::from_millis(100);
/// Pause before a new mount after the kernel has aborted the connection.
const PAUSE: Duration = Duration::from_secs(1);
/// Length of the block device, to which nothing is written.
const LENGTH: u64 = 4096;
/// Its name in the list of loop devices, followed by the process id.
const NAME: &str = "nacre-sync-";

/// Callbacks for calls of sync(2).
pub struct Duty {
    /// Makes everything durable that was written before the call. One call at a time.
    pub make_durable: Box<dyn Fn() + Send + Sync>,
    /// Whether that waits for something that may never come.
    pub stuck: Box<dyn Fn() -> bool + Send + Sync>,
    /// Gets the descriptor numbers of the device and of the mount, before the first request: a process that shares
    /// the table of descriptors can close them, in this order ([`let_go_of_sync_calls`]).
    pub opened: Box<dyn Fn(i32, i32) + Send + Sync>,
}

impl fmt::Debug for Duty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Duty").finish_non_exhaustive()
    }
}

/// Intercepts sync(2) until it is dropped.
#[derive(Debug)]
pub struct SyncCalls(Arc<SyncDuty>);

impl SyncCalls {
    /// Starts the interception.
    ///
    /// # Errors
    /// Where it is not possible: without privilege, without loop devices, with an older kernel.
    pub fn hear(duty: Duty) -> io::Result<SyncCalls> {
        if !is_told() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel tells of it from Linux 6.18 on"));
        }
        let shared = Arc::new(SyncDuty { duty, state: Mutex::default(), changed: Condvar::new() });
        let ear = Ear::open(&shared)?;
        shared.state.lock().ear = Some(ear);
        let worker = Arc::clone(&shared);
        // It is not joined at the end: it may wait for a device.
        std::thread::Builder::new().name("nacre-sync".to_owned()).spawn(move || worker.work())?;
        Ok(SyncCalls(shared))
    }
}

impl Drop for SyncCalls {
    fn drop(&mut self) {
        let ear = {
            let mut state = self.0.state.lock();
            state.stop = true;
            state.ear.take()
        };
        self.0.changed.notify_all();
        // Its threads take the lock.
        drop(ear);
    }
}

/// Ends the interception of a previous process, which has left these descriptors of the device and of the mount:
/// waiting callers get an error. All its other descriptors are closed.
pub fn let_go_of_sync_calls(device: i32, mount: i32) {
    let [device, mount] = [device, mount].map(descriptors::take_over);
    // The kernel would wait for us if the connection were alive.
    drop(device);
    drop(mount);
}

/// The intercepting mount; the connection is dropped first.
#[derive(Debug)]
struct Ear {
    _session: Session,
    _mount: OwnedFd,
}

impl Ear {
    fn open(shared: &Arc<SyncDuty>) -> io::Result<Ear> {
        let name = format!("{NAME}{}", std::process::id());
        let memory = memfd_create(&name, MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, LENGTH)?;
        // It goes with its last user, which is the mount.
        let device = loop_devices::attach(memory.as_fd(), Path::new(&name))?;
        let (connection, mount) = fusewire::mount_on_device(&device.path)?;
        connection.descriptor().into_iter().for_each(|device| (shared.duty.opened)(device, mount.as_raw_fd()));
        let options = SessionOptions { transport: TransportChoice::Device, threads: 2, ..SessionOptions::default() };
        let session = Session::start(connection, Arc::new(Answering(Arc::clone(shared))), options)?;
        Ok(Ear { _session: session, _mount: mount })
    }
}

#[derive(Debug, Default)]
struct SyncRounds {
    ear: Option<Ear>,
    /// The run that is wanted: callers that come while one is in progress want the next.
    wanted: u64,
    begun: u64,
    done: u64,
    /// The kernel has aborted the connection.
    given_up: bool,
    stop: bool,
}

#[derive(Debug)]
struct SyncDuty {
    duty: Duty,
    state: Mutex<SyncRounds>,
    changed: Condvar,
}

impl SyncDuty {
    /// Waits until everything written before a call of sync(2) is durable.
    #[expect(clippy::disallowed_methods, reason = "the end of a wait for a condition")]
    fn heard(&self) -> Result<(), Errno> {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        let wanted = state.begun + 1;
        state.wanted = state.wanted.max(wanted);
        self.changed.notify_all();
        while state.done < wanted && !state.stop {
            let overdue = self.changed.wait_for(&mut state, LOOK).timed_out();
            if !overdue || state.done >= wanted {
                continue;
            }
            if Instant::now() >= until {
                tracing::warn!(
                    "sync(2) is answered before everything is durable: that takes longer than {} s",
                    PATIENCE.as_secs()
                );
                return Err(Errno::EIO);
            }
            if (self.duty.stuck)() {
                // The reason has been logged.
                return Err(Errno::EIO);
            }
        }
        Ok(())
    }

    /// Body of the thread that makes data durable.
    fn work(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while !state.stop {
            if state.given_up {
                state.given_up = false;
                let old = state.ear.take();
                drop(state);
                drop(old);
                let again = Ear::open(self);
                state = self.state.lock();
                match again {
                    Ok(ear) if !state.stop => state.ear = Some(ear),
                    // Its threads take the lock.
                    Ok(ear) => return parking_lot::MutexGuard::unlocked(&mut state, || drop(ear)),
                    Err(error) => return tracing::warn!(%error, "sync(2) is not heard any more"),
                }
                let _ended = self.changed.wait_for(&mut state, PAUSE);
            } else if state.wanted > state.begun {
                state.begun += 1;
                parking_lot::MutexGuard::unlocked(&mut state, || (self.duty.make_durable)());
                state.done = state.begun;
                self.changed.notify_all();
            } else {
                self.changed.wait(&mut state);
            }
        }
    }
}

/// Handler of the mount's requests.
#[derive(Debug)]
struct Answering(Arc<SyncDuty>);

impl Handler for Answering {
    fn init(&self, offer: &Offer) -> Settings {
        let wanted = Settings::default();
        let flags = (wanted.flags | init::REQUEST_TIMEOUT) & offer.flags;
        Settings { flags, max_io: 8 << 10, request_timeout: REQUEST_TIMEOUT, ..wanted }
    }

    fn handle(&self, request: &Request<'_>, _reply: &mut Reply<'_>) -> Result<(), Errno> {
        match request.op {
            Op::Syncfs => self.0.heard(),
            Op::Destroy => Ok(()),
            // No user can reach the mount.
            _ => Err(Errno::ENOSYS),
        }
    }

    fn forget(&self, _nodeid: u64, _lookups: u64) {}

    fn destroy(&self) {
        self.0.state.lock().given_up = true;
        self.0.changed.notify_all();
    }
}

/// Whether this kernel sends SYNCFS to FUSE mounts on block devices.
fn is_told() -> bool {
    kernel_version() >= (6, 18)
}
