//! The socket: one thread per connection, bounded in number, and the threads that keep house.
//!
//! Clients that send slowly harm nobody: at most [`READING_MAX`] connections are being read, and the
//! oldest of them is cut for a new one. Calls that work are bounded apart from these.

use crate::{
    failure::Failure,
    http::{self, Refusal},
    log,
    plugin::{self, Answer},
    volumes::Volumes,
};
use std::{
    collections::BTreeMap,
    fs, io,
    net::Shutdown,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// Maximum number of connections whose request is being read.
const READING_MAX: usize = 64;
/// Maximum number of calls at one time.
const WORKING_MAX: usize = 64;
/// Maximum number of threads: calls, and connections that are being read or answered.
const THREADS_MAX: usize = 256;
/// Stack size of a connection's thread, bytes.
const STACK: usize = 512 << 10;
/// Interval of the housekeeping.
const TEND_EVERY: Duration = Duration::from_secs(60);

/// A socket that is listened on.
pub struct Listening(UnixListener);

impl Listening {
    /// Makes the socket, in place of one that an earlier process has left or still serves: clients
    /// find one socket or the other at every moment.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(path: &Path) -> Result<Listening, Failure> {
        let failed = |error: io::Error| Failure::io("listen on", path, &error);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(failed)?;
        }
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&new).map_err(failed)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        fs::rename(&new, path).map_err(failed)?;
        Ok(Listening(listener))
    }

    /// Takes the socket of a socket unit. `None` where systemd has given none.
    ///
    /// # Errors
    /// What was given is no socket.
    pub fn given() -> Result<Option<Listening>, Failure> {
        let failed = |error: io::Error| Failure::io("use", Path::new("the socket of systemd"), &error);
        let Ok(mut given) = sd_notify::listen_fds() else { return Ok(None) };
        let Some(number) = given.next() else { return Ok(None) };
        let listener = UnixListener::from(nacre_sys::descriptors::take_over(number).map_err(failed)?);
        listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(false).map_err(failed)?;
        Ok(Some(Listening(listener)))
    }
}

/// State that all connections share.
struct Server {
    volumes: Arc<Volumes>,
    /// Connections whose request is being read, by their number.
    reading: Mutex<BTreeMap<u64, UnixStream>>,
    working: AtomicUsize,
    threads: AtomicUsize,
    next: AtomicU64,
}

/// Counts a call or thread while it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize, most: usize) -> Option<Counted<'a>> {
        let counted = Counted(count);
        if count.fetch_add(1, Ordering::Relaxed) < most { Some(counted) } else { None }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves until the process ends.
///
/// # Errors
/// A thread cannot be started, or nothing can be accepted any more.
pub fn serve(listening: &Listening, volumes: Volumes) -> Result<(), Failure> {
    let volumes = Arc::new(volumes);
    start("nacre-tend", Arc::clone(&volumes), Volumes::tend)?;
    start("nacre-backup", Arc::clone(&volumes), Volumes::back_up)?;
    let server = Arc::new(Server {
        volumes,
        reading: Mutex::default(),
        working: AtomicUsize::new(0),
        threads: AtomicUsize::new(0),
        next: AtomicU64::new(1),
    });
    // Where no service manager waits for it, nothing is sent.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    for stream in listening.0.incoming() {
        match stream {
            Ok(stream) => server.accepted(stream),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // No descriptor or memory is left: connections that end give some back.
            Err(error) => {
                log::line(&format!("cannot accept a connection: {error}"));
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
    Ok(())
}

/// Starts a thread that does this now and every minute.
fn start(name: &str, volumes: Arc<Volumes>, act: fn(&Volumes) -> Result<(), Failure>) -> Result<(), Failure> {
    let rounds = move || {
        loop {
            if let Err(failure) = act(&volumes) {
                log::line(&failure.message);
            }
            thread::sleep(TEND_EVERY);
        }
    };
    let started = thread::Builder::new().name(name.to_owned()).spawn(rounds);
    started.map(|_| ()).map_err(|error| Failure::io("start", Path::new("a thread"), &error))
}

impl Server {
    fn accepted(self: &Arc<Self>, stream: UnixStream) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match stream.try_clone() {
            Ok(clone) => self.begin_reading(number, clone),
            Err(error) => return log::line(&format!("connection {number}: {error}")),
        }
        let server = Arc::clone(self);
        let serving = move || {
            if let Some(_counted) = Counted::new(&server.threads, THREADS_MAX) {
                server.connection(number, &stream);
            }
            server.end_reading(number);
        };
        if let Err(error) = thread::Builder::new().name("nacre-call".into()).stack_size(STACK).spawn(serving) {
            self.end_reading(number);
            log::line(&format!("connection {number}: {error}"));
        }
    }

    /// Notes a connection; the oldest one goes where there are too many.
    fn begin_reading(&self, number: u64, stream: UnixStream) {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        reading.insert(number, stream);
        if reading.len() > READING_MAX
            && let Some((oldest, stream)) = reading.pop_first()
        {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
            log::line(&format!("connection {oldest}: cut, it was the slowest of {READING_MAX}"));
        }
    }

    fn end_reading(&self, number: u64) {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }

    fn connection(&self, number: u64, stream: &UnixStream) {
        let request = http::read(stream);
        self.end_reading(number);
        let mut sweep = false;
        let answer = match request {
            Ok(request) => match Counted::new(&self.working, WORKING_MAX) {
                Some(_counted) => {
                    sweep = plugin::leaves_files(&request.path);
                    plugin::answer(&self.volumes, number, &request)
                }
                None => Answer::error(503, "too many calls at one time"),
            },
            Err(Refusal::Status(status, message)) => Answer::error(status, message),
            Err(Refusal::Gone(_)) => return,
        };
        // The call was carried out; its client repeats it where it needs the answer.
        if let Err(Refusal::Gone(error)) = http::answer(stream, answer.status, answer.kind, &answer.body) {
            log::line(&format!("request {number}: the client did not take the answer: {error}"));
        }
        // The client has its answer: deleting many files takes longer than it would wait.
        if sweep && let Err(failure) = self.volumes.sweep() {
            log::line(&failure.message);
        }
    }
}
