//! The process that serves all mounts of one name.
//!
//! Started by [`super::client`], whose lock makes sure that there is one. It ends with the last of
//! its mounts. Invariants: a request that was accepted ([`Told::Accepted`]) is carried out and
//! answered; one that was not has changed nothing, so that whoever sent it may start another
//! process. The socket is gone before the process stops listening, and is never removed later.

use super::{
    company::Company,
    identity, socket,
    wire::{Order, Told},
};
use crate::{
    background,
    control::{self, Desk},
    failure::Failure,
    log::{self, Log},
    runtime,
    serve::{self, Resolved},
    serving::{self, Live, Surroundings},
};
use nacre_sys::signals::{Signal, Signals};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, BufReader},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Names the mounts that this process is to serve.
const NAME: &str = "NACRE_SHARES";
/// How long a process waits for its first request: whoever started it sends one at once.
const FIRST: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);

/// The name whose mounts this process was started for, if it was.
pub fn name() -> Option<String> {
    std::env::var(NAME).ok().filter(|_| background::is_background())
}

/// Starts the process for a name; answers when it listens.
///
/// # Errors
/// It cannot be started.
pub fn start(name: &str) -> Result<background::Start, Failure> {
    // For whoever looks at the list of processes.
    let arguments = [OsString::from(format!("--daemon={name}"))];
    background::spawn(OsStr::new("nacre"), arguments.into_iter(), &[(NAME, name)])
}

/// What all threads of the process know.
struct Office {
    identity: String,
    company: Arc<Company>,
    desk: Arc<Desk>,
    /// Requests and mounts.
    busy: Mutex<usize>,
    /// Written to when there are fewer of these, or when the end is asked for.
    changed: OwnedFd,
    ending: AtomicBool,
}

/// A request, and then the mount that came of it.
struct Busy(Arc<Office>);

impl Busy {
    fn new(office: &Arc<Office>) -> Busy {
        *office.busy.lock() += 1;
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
        // It cannot fail before 2^64 of them were not read.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }

    fn ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }
}

/// Serves mounts until the last of them is gone.
///
/// # Errors
/// Why it does not.
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
    // Whoever started us has seen that nobody answers there, and holds the lock.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
    let office = Arc::new(Office {
        identity,
        company: Arc::default(),
        desk: Desk::start()?,
        busy: Mutex::new(0),
        changed,
        ending: AtomicBool::new(false),
    });
    let watched = Arc::clone(&office);
    serving::obey(signals, move |signal| {
        if matches!(signal, Signal::Interrupt | Signal::Terminate) {
            watched.ending.store(true, Ordering::SeqCst);
            watched.tell();
        }
        watched.company.mounts()
    })?;
    background::report_ready()?;
    background::leave_directory()?;
    let done = listen(&office, &listener);
    // The name first: a command that finds none starts another process, one that is not heard any
    // more tries again.
    let removed = fs::remove_file(&path);
    drop(listener);
    while *office.busy.lock() > 0 {
        wait(&office, None, None)?;
    }
    done.and(removed.map_err(failed))
}

/// Waits for something to happen; `false` after the time given.
fn wait(office: &Office, listener: Option<&UnixListener>, most: Option<&Timespec>) -> Result<bool, Failure> {
    let mut waited = vec![PollFd::new(&office.changed, PollFlags::IN)];
    waited.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    let ready = match poll(&mut waited, most) {
        Ok(ready) => ready > 0,
        Err(Errno::INTR) => true,
        Err(error) => return Err(Failure::io("cannot wait for", "requests", &error.into())),
    };
    // What was told is looked up by whoever waits; there may be nothing to read.
    let _ = rustix::io::read(&office.changed, &mut [0; 8]);
    Ok(ready)
}

/// Takes requests until there is nothing left to serve.
#[expect(clippy::disallowed_methods, reason = "nobody tells when there are descriptors and threads again")]
fn listen(office: &Arc<Office>, listener: &UnixListener) -> Result<(), Failure> {
    let mut first = Some(&FIRST);
    loop {
        if office.ending() || (first.is_none() && *office.busy.lock() == 0) || !wait(office, Some(listener), first)? {
            return Ok(());
        }
        match listener.accept() {
            Ok((stream, _)) => {
                first = None;
                let busy = Busy::new(office);
                let thread =
                    thread::Builder::new().name("nacre-request".to_owned()).spawn(move || answer(&stream, busy));
                if let Err(error) = thread {
                    tracing::warn!(%error, "a request could not be answered");
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                tracing::warn!(%error, "a request could not be taken");
                // Out of descriptors: do not turn in circles until there are some again.
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Answers a request, and serves the mount that comes of it in a thread of its own.
fn answer(stream: &UnixStream, busy: Busy) {
    let office = Arc::clone(&busy.0);
    let timed = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(PATIENCE)));
    if timed.and_then(|()| stream.set_write_timeout(Some(PATIENCE))).is_err() {
        return;
    }
    if let Err(why) = alike(stream, &office.identity) {
        // Whoever does not listen does not need the answer.
        let _ = control::send(stream, &Told::Apart { why });
        return;
    }
    let Ok(order) = control::receive::<Order>(&mut BufReader::new(stream)) else { return };
    if office.ending() || control::send(stream, &Told::Accepted).is_err() {
        return;
    }
    let told = match mount(&office, &order) {
        Ok((live, said)) => match control::send(stream, &Told::Mounted { said }) {
            Ok(()) => return serve(live, busy),
            // Nobody wants it any more.
            Err(_) => return drop(live),
        },
        Err(told) => told,
    };
    let _ = control::send(stream, &told);
}

/// Whether the other side is somebody like us.
fn alike(stream: &UnixStream, own: &str) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|error| error.to_string())?;
    if peer.uid != rustix::process::geteuid() {
        return Err("it belongs to another user".to_owned());
    }
    match identity::of_process(peer.pid.as_raw_pid()) {
        Ok(theirs) if theirs == own => Ok(()),
        _ => Err("it has other rights or other surroundings".to_owned()),
    }
}

fn mount(office: &Arc<Office>, order: &Order) -> Result<(Live, String), Told> {
    let nothing_said = |failure| Told::failed(failure, String::new());
    let plan = order.plan().map_err(nothing_said)?;
    let log = Log::open(plan.verbosity, plan.log_file.as_deref()).map(Arc::new).map_err(nothing_said)?;
    log.enter();
    let failed = |failure| Told::failed(failure, log.said());
    let Resolved { spec, mountpoint, .. } = serve::resolve(&plan).map_err(failed)?;
    let seat = office.company.join(&spec, mountpoint, plan.door.read_only).map_err(|why| Told::Apart { why })?;
    let surroundings = Surroundings::shared(Arc::clone(&office.desk), Arc::clone(&log), seat);
    let live = Live::start(&plan, order.reason.clone(), surroundings).map_err(failed)?;
    if office.ending() {
        return Err(failed(Failure::new("the process that was to serve the mount has been told to end")));
    }
    Ok((live, log.said()))
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
