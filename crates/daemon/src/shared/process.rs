//! The process that serves all mounts of one name.
//!
//! Started by [`super::client`], whose lock makes sure that there is one. It ends with the last of its mounts.
//! Invariants: a request that was accepted ([`Progress::Accepted`]) is carried out and answered; one that was not
//! accepted has changed nothing, so that its sender may start another process. The socket is removed before the
//! process stops listening, and never later.

use super::{
    company::Company,
    identity, socket,
    wire::{MountRequest, Progress},
};
use crate::{
    background,
    failure::Failure,
    log::{self, Log},
    plan::Resolved,
    rpc::endpoint::{Caller, Endpoint, Listener},
    runtime, serve,
    serving::{self, Live, Surroundings},
};
use nacre_sys::signals::{Signal, Signals};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::UCred,
};
use std::{
    ffi::{OsStr, OsString},
    io::{self},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// Environment variable with the name whose mounts this process is to serve.
const NAME: &str = "NACRE_SHARES";
/// How long a process waits for its first request, which the command that started it sends at once.
const FIRST: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Returns the name whose mounts this process was started for, if it was.
pub fn name() -> Option<String> {
    std::env::var(NAME).ok().filter(|_| background::is_background())
}

/// Starts the process for a name; returns when it listens.
///
/// # Errors
/// It cannot be started.
pub fn start(name: &str) -> Result<background::Started, Failure> {
    // Shown in lists of processes.
    let arguments = [OsString::from(format!("--daemon={name}"))];
    background::spawn(OsStr::new("nacre"), arguments.into_iter(), &[(NAME, name)])
}

/// Server of the mounts: the state that all threads of the process share.
struct Office {
    identity: String,
    company: Arc<Company>,
    listener: Arc<Listener>,
    /// Number of requests and mounts.
    busy: Mutex<usize>,
    /// Event descriptor, written to when that number changes, or when the end is requested.
    changed: OwnedFd,
    /// A request has arrived.
    asked: AtomicBool,
    ending: AtomicBool,
}

/// Guard of a request, and then of the mount made for it.
struct Busy(Arc<Office>);

impl Busy {
    fn new(office: &Arc<Office>) -> Busy {
        *office.busy.lock() += 1;
        office.asked.store(true, Ordering::SeqCst);
        office.tell();
        Busy(Arc::clone(office))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.busy.lock() -= 1;
        self.0.tell();
    }
}

impl Office {
    fn tell(&self) {
        // It cannot fail before 2^64 writes were not read.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }

    fn ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }
}

/// Serves mounts until the last of them is gone.
///
/// # Errors
/// The process cannot serve.
pub fn run(name: &str) -> Result<(), Failure> {
    background::leave_session()?;
    log::start_shared()?;
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    background::settle();
    let identity = identity::own().map_err(|error| {
        Failure::io("cannot read", "/proc/self", &error).next("mount the proc file system at /proc")
    })?;
    let path = socket(&runtime::own()?, name, &identity);
    let failed = |error: io::Error| Failure::io("cannot listen on", path.display(), &error);
    let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
    let office = Arc::new(Office {
        identity,
        company: Arc::default(),
        listener: Listener::start()?,
        busy: Mutex::new(0),
        changed,
        asked: AtomicBool::new(false),
        ending: AtomicBool::new(false),
    });
    let watched = Arc::clone(&office);
    serving::obey(signals, None, move |signal| {
        if matches!(signal, Signal::Interrupt | Signal::Terminate) {
            watched.ending.store(true, Ordering::SeqCst);
            watched.tell();
        }
        watched.company.mounts()
    })?;
    // The command that started this process has found no listener there, and holds the lock.
    let answering = Arc::clone(&office);
    let endpoint = Endpoint::bind(&office.listener, &path, Arc::new(move |caller| answer(caller, &answering)))?;
    background::report_ready()?;
    background::leave_directory()?;
    endpoint.open()?;
    let done = wait_for_the_last(&office);
    // The name goes first: a command that finds no socket starts another process; one whose request is not read any
    // more tries again.
    endpoint.close();
    while *office.busy.lock() > 0 {
        wait(&office, None)?;
    }
    done
}

/// Waits for an event; `false` after the time given.
fn wait(office: &Office, most: Option<&Timespec>) -> Result<bool, Failure> {
    let ready = match poll(&mut [PollFd::new(&office.changed, PollFlags::IN)], most) {
        Ok(ready) => ready > 0,
        Err(Errno::INTR) => true,
        Err(error) => return Err(Failure::io("cannot wait for", "requests", &error.into())),
    };
    // The caller checks the state; there may be nothing to read.
    let _ = rustix::io::read(&office.changed, &mut [0; 8]);
    Ok(ready)
}

/// Waits until there is nothing to serve any more. Requests counted before that are served, later ones find the
/// process ending.
fn wait_for_the_last(office: &Office) -> Result<(), Failure> {
    loop {
        let asked = office.asked.load(Ordering::SeqCst);
        let waited = asked || wait(office, Some(&FIRST))?;
        {
            let busy = office.busy.lock();
            if office.ending() || (*busy == 0 && (office.asked.load(Ordering::SeqCst) || !waited)) {
                office.ending.store(true, Ordering::SeqCst);
                return Ok(());
            }
        }
        if asked {
            wait(office, None)?;
        }
    }
}

/// Answers a request, and serves the mount made for it in a thread of its own.
fn answer(caller: &Caller, office: &Arc<Office>) {
    let busy = Busy::new(office);
    let answered = |progress| caller.send(&Ok(progress));
    if let Err(why) = alike(&caller.credentials, &office.identity) {
        // A caller that is gone does not need the answer.
        let _ = answered(Progress::Apart { why });
        return;
    }
    let Some(request) = caller.requests::<MountRequest>().next() else { return };
    if office.ending() || answered(Progress::Accepted).is_err() {
        return;
    }
    let said = |log: &Log| log.said().lines().all(|line| caller.note(line));
    let refused = match mount(office, &request) {
        Ok((live, log)) => match said(&log) && answered(Progress::Mounted).is_ok() {
            true => return serve(live, busy),
            // The requester is gone.
            false => return drop(live),
        },
        Err((refused, log)) => {
            if log.is_some_and(|log| !said(&log)) {
                return;
            }
            refused
        }
    };
    let _ = caller.send(&match refused {
        NotMounted::Apart(why) => Ok(Progress::Apart { why }),
        NotMounted::Failed(failure) => Err(failure),
    });
}

/// Why nothing was mounted, and the log lines before that.
type Refused = (NotMounted, Option<Arc<Log>>);

/// Why nothing was mounted here.
enum NotMounted {
    Apart(String),
    Failed(Failure),
}

/// Checks that the caller has the identity of this process.
fn alike(caller: &UCred, own: &str) -> Result<(), String> {
    if caller.uid != rustix::process::geteuid() {
        return Err("it belongs to another user".to_owned());
    }
    match identity::of_process(caller.pid.as_raw_pid()) {
        Ok(theirs) if theirs == own => Ok(()),
        _ => Err("it has other rights or other surroundings".to_owned()),
    }
}

fn mount(office: &Office, request: &MountRequest) -> Result<(Live, Arc<Log>), Refused> {
    let unlogged = |failure| (NotMounted::Failed(failure), None);
    let plan = request.plan().map_err(unlogged)?;
    let log = Log::open(&plan).map(Arc::new).map_err(unlogged)?;
    log.enter();
    let failed = |failure| (NotMounted::Failed(failure), Some(Arc::clone(&log)));
    let Resolved { spec, mountpoint, .. } = serve::resolve(&plan).map_err(failed)?;
    let seat = office.company.join(&spec, mountpoint, plan.door.read_only);
    let seat = seat.map_err(|why| (NotMounted::Apart(why), None))?;
    let surroundings = Surroundings::shared(Arc::clone(&office.listener), Arc::clone(&log), seat);
    let live = Live::start(&plan, request.reason.clone(), surroundings).map_err(failed)?;
    if office.ending() {
        return Err(failed(Failure::new("the process that was to serve the mount has been told to end")));
    }
    Ok((live, log))
}

/// Serves a mount to its end.
fn serve(live: Live, busy: Busy) {
    // The thread that made the mount has a larger stack.
    let serve = move || {
        live.enter_log();
        live.wait();
        drop(busy);
    };
    let thread = thread::Builder::new().name("nacre-mount".to_owned()).stack_size(128 << 10).spawn(serve);
    if let Err(error) = thread {
        tracing::error!(%error, "the mount ends again: there is no thread to wait for its end");
    }
}
