//! Hearing sync(2), whoever calls it.
//!
//! The kernel tells an ordinary FUSE mount nothing of it; a mount on a block device it tells, and
//! waits for the answer (SYNCFS, Linux 6.18). So there is one, at no place, on a small loop device
//! over memory, for nothing else. Used by the process of a pool. syncfs(2) on its ordinary mounts
//! stays unheard.
//!
//! Invariants:
//! * nobody waits here for good: an answer comes once what was asked for is done, once it can be
//!   seen that it cannot be done now ([`Duty::stuck`]), or after [`PATIENCE`]; a process that is
//!   stopped is given up by the kernel ([`REQUEST_TIMEOUT`]);
//! * the threads that answer touch no mount of ours, and what is done for them is done by another
//!   one;
//! * the connection ends before its mount does, also where the process is killed: the kernel says
//!   goodbye to a connection that lives, and would wait for us.

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

/// How long somebody who calls sync(2) waits at most, while things go on.
const PATIENCE: Duration = Duration::from_secs(100);
/// Seconds after which the kernel gives up a process that is stopped; longer than it takes us to
/// answer in any case. It looks every 15 s.
const REQUEST_TIMEOUT: u16 = 120;
/// How often is looked whether nothing goes on any more.
const LOOK: Duration = Duration::from_millis(100);
/// Before the kernel is listened to again after it gave up.
const PAUSE: Duration = Duration::from_secs(1);
/// The length of the block device, which nothing is written to.
const LENGTH: u64 = 4096;
/// What it is called where loop devices are listed, before the id of the process.
const NAME: &str = "nacre-sync-";

/// What is done when somebody calls sync(2).
pub struct Duty {
    /// Makes everything durable that was done before the call. One at a time.
    pub make_durable: Box<dyn Fn() + Send + Sync>,
    /// Whether that waits for something that may never come.
    pub stuck: Box<dyn Fn() -> bool + Send + Sync>,
    /// Is told the numbers of the descriptors of the device and of the mount, before it is listened to:
    /// a process that shares the table of descriptors lets go of them, in this order ([`let_go_of_sync_calls`]).
    pub opened: Box<dyn Fn(i32, i32) + Send + Sync>,
}

impl fmt::Debug for Duty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Duty").finish_non_exhaustive()
    }
}

/// Hears sync(2) until it is dropped.
#[derive(Debug)]
pub struct SyncCalls(Arc<SyncDuty>);

impl SyncCalls {
    /// Listens from now on.
    ///
    /// # Errors
    /// Where it cannot be heard: without privilege, without loop devices, by an older kernel.
    pub fn hear(duty: Duty) -> io::Result<SyncCalls> {
        if !is_told() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel tells of it from Linux 6.18 on"));
        }
        let shared = Arc::new(SyncDuty { duty, state: Mutex::default(), changed: Condvar::new() });
        let ear = Ear::open(&shared)?;
        shared.state.lock().ear = Some(ear);
        let worker = Arc::clone(&shared);
        // It is not waited for at the end: it may wait for a device.
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

/// Ends what a process before this one heard by, which has left these descriptors of the device and of
/// the mount: whoever waits there is told that it was in vain. All other descriptors of it are closed.
pub fn let_go_of_sync_calls(device: i32, mount: i32) {
    let [device, mount] = [device, mount].map(descriptors::take_over);
    // The kernel would wait for us, if the connection lived.
    drop(device);
    drop(mount);
}

/// The mount that hears; the connection goes first.
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
    /// The run that is wanted: those who ask while one is under way want the next.
    wanted: u64,
    begun: u64,
    done: u64,
    /// The kernel has given the connection up.
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
    /// Somebody has called sync(2) and waits.
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
                // What is the matter has been told.
                return Err(Errno::EIO);
            }
        }
        Ok(())
    }

    /// The body of the thread that does what was asked for.
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

/// Answers the kernel.
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
            // Nobody can reach it.
            _ => Err(Errno::ENOSYS),
        }
    }

    fn forget(&self, _nodeid: u64, _lookups: u64) {}

    fn destroy(&self) {
        self.0.state.lock().given_up = true;
        self.0.changed.notify_all();
    }
}

/// Whether this kernel tells file systems on block devices.
fn is_told() -> bool {
    kernel_version() >= (6, 18)
}
