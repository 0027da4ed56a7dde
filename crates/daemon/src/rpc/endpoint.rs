//! The serving side of sockets: one thread listens for all endpoints of the process, each caller is served in a
//! thread of its own.
//!
//! Used by processes that serve mounts or own a pool. Invariants: a socket has its name only while the process
//! listens on it; only root and the owner of the process are served, except at a public socket
//! ([`Admission::All`]), where a caller has a short time and few are admitted at once; after a message that was not
//! written whole, a caller gets no other, and so never a result with a gap; when an [`Endpoint`] is dropped, it
//! answers nobody any more, and its connections are closed.

use super::{
    Message, Source,
    deadline::DeadlineReader,
    line,
    stream::{self, Channel},
};
use crate::{clock, failure::Failure};
use nacre_sys::descriptors;
use parking_lot::{Mutex, RwLock};
use rustix::{event::epoll, net::UCred};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::HashMap,
    fs,
    io::{self, BufReader},
    net::Shutdown,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a caller may be silent, and how long the end waits for an answer in progress.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the other side may take to read a message: it may show notes to a user who reads them.
const READING: Duration = Duration::from_secs(30);

/// How long a caller may stay connected to a public socket.
const GUEST_PATIENCE: Duration = Duration::from_secs(2);
/// How many callers are admitted there at one time.
const GUESTS_MOST: usize = 16;
/// Longest request there, in bytes.
const GUEST_REQUEST: Source = Source { most: 4096, harmless: false };

/// Length of the listen backlog, as far as the system allows.
const WAITING: i32 = 4096;

/// Who is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Root and the owner of the process.
    Owner,
    /// All users: the service decides what they may know.
    All,
}

/// Serves one caller until it disconnects.
pub type Service = Arc<dyn Fn(&Caller) + Send + Sync>;

/// A connected caller.
pub struct Caller {
    stream: UnixStream,
    /// Credentials of the caller, from the kernel.
    pub credentials: UCred,
    /// Held for reading while a request is answered; false: no request is answered any more.
    open: Arc<RwLock<bool>>,
    /// Deadline for the caller to disconnect.
    until: Option<Instant>,
    /// How long the caller may take to read a message.
    reading: Duration,
    /// A message was not written whole: nothing more is written.
    cut: AtomicBool,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Caller").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Caller {
    /// Answers each request of the caller until it disconnects, or the endpoint closes.
    pub fn serve<Q: DeserializeOwned, A: Serialize>(&self, answer: impl Fn(Q, &Caller) -> Result<A, Failure>) {
        for request in self.requests() {
            let open = self.open.read();
            if !*open || self.send(&answer(request, self)).is_err() {
                return;
            }
        }
    }

    /// Returns the requests of the caller, until it disconnects or sends nonsense, which gets no answer. The user
    /// of this iterator has to handle the end of the endpoint.
    pub fn requests<Q: DeserializeOwned>(&self) -> impl Iterator<Item = Q> {
        let mut reader = BufReader::new(DeadlineReader { stream: &self.stream, until: self.until });
        let source = if self.until.is_some() { GUEST_REQUEST } else { Source::COMMAND };
        std::iter::from_fn(move || line::receive(&mut reader, source).ok().flatten())
    }

    /// Sends an answer.
    ///
    /// # Errors
    /// The caller is gone, or does not read it in time.
    pub fn send<A: Serialize>(&self, answer: &Result<A, Failure>) -> io::Result<()> {
        self.send_until(answer, &self.deadline())
    }

    /// Sends an answer, however slowly it is read, until `ends` returns true.
    ///
    /// # Errors
    /// The caller is gone, or has not read it.
    pub fn send_until<A: Serialize>(&self, answer: &Result<A, Failure>, ends: &dyn Fn() -> bool) -> io::Result<()> {
        match answer {
            Ok(answer) => self.write(&line::encode(&Message::Answer(answer))?, ends),
            Err(failure) => self.write(&line::encode(&Message::<()>::Failed(failure.clone()))?, ends),
        }
    }

    /// Sends bytes of a stream, until `ends` returns true.
    ///
    /// # Errors
    /// The caller does not read them.
    pub fn give(&self, bytes: &[u8], ends: &dyn Fn() -> bool) -> io::Result<()> {
        if ends() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.write(&line::encode(&Message::<()>::Bytes(bytes.len() as u64))?, ends)?;
        self.write(bytes, ends)
    }

    /// Receives bytes of a stream; none at its end.
    ///
    /// # Errors
    /// The caller is gone, or `ends` returns true.
    pub fn take(&self, channel: &mut Channel, buffer: &mut [u8], ends: &dyn Fn() -> bool) -> io::Result<usize> {
        if !channel.begun() {
            self.write(&line::encode(&Message::<()>::Bytes(0))?, ends)?;
        }
        channel.take(&self.stream, buffer, ends)
    }

    /// Sends a note; returns false if the caller is gone, or does not read it in time.
    pub fn note(&self, text: &str) -> bool {
        self.note_until(text, &self.deadline())
    }

    /// Sends a note, however slowly it is read, until `ends` returns true; returns whether it was sent.
    pub fn note_until(&self, text: &str, ends: &dyn Fn() -> bool) -> bool {
        let line = line::encode(&Message::<()>::Note(text.to_owned()));
        line.and_then(|line| self.write(&line, ends)).is_ok()
    }

    /// Returns whether the time to read a message that is sent now has passed.
    fn deadline(&self) -> impl Fn() -> bool + use<> {
        let until = clock::now() + self.reading;
        move || clock::now() >= until
    }

    fn write(&self, bytes: &[u8], ends: &dyn Fn() -> bool) -> io::Result<()> {
        if self.cut.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        stream::write(&self.stream, bytes, ends).inspect_err(|_| self.cut.store(true, Ordering::Relaxed))
    }
}

/// State shared by the callers of one socket.
struct Served {
    listener: UnixListener,
    admission: Admission,
    serving: Service,
    open: Arc<RwLock<bool>>,
    /// Connected callers, by a number each.
    callers: Mutex<HashMap<u64, UnixStream>>,
}

/// Thread that listens on all sockets of this process.
pub struct Listener {
    waiting: OwnedFd,
    endpoints: Mutex<HashMap<u64, Arc<Served>>>,
    next: AtomicU64,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("endpoints", &self.endpoints.lock().len()).finish_non_exhaustive()
    }
}

impl Listener {
    /// Starts the listening thread; it ends with the process.
    ///
    /// # Errors
    /// No descriptor or no thread is available.
    pub fn start() -> Result<Arc<Listener>, Failure> {
        let failed = |error: io::Error| Failure::io("cannot start", "the thread that listens to commands", &error);
        let waiting = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let listener = Arc::new(Listener { waiting, endpoints: Mutex::default(), next: AtomicU64::new(0) });
        let listening = Arc::clone(&listener);
        let thread = thread::Builder::new()
            .name("nacre-listen".to_owned())
            .stack_size(128 << 10)
            .spawn(move || listening.listen());
        thread.map(|_| listener).map_err(failed)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn listen(&self) {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        loop {
            let ready = match epoll::wait(&self.waiting, &mut events, None) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => 0,
                Err(error) => return tracing::error!(%error, "commands are not answered any more"),
            };
            for event in events.iter().take(ready) {
                let endpoint = self.endpoints.lock().get(&event.data.u64()).cloned();
                if let Some(error) = endpoint.and_then(|endpoint| self.accept(&endpoint).err()) {
                    tracing::warn!(%error, "a command could not be answered");
                    // Out of descriptors or threads: pause instead of spinning.
                    clock::pause(Duration::from_millis(100));
                }
            }
        }
    }

    fn accept(&self, endpoint: &Arc<Served>) -> io::Result<()> {
        let stream = match endpoint.listener.accept() {
            Ok((stream, _)) => stream,
            // The caller has given up.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        if endpoint.admission == Admission::All && endpoint.callers.lock().len() >= GUESTS_MOST {
            return Ok(());
        }
        let number = self.number();
        endpoint.callers.lock().insert(number, stream.try_clone()?);
        let work = Arc::clone(endpoint);
        let serve = move || {
            if let Some(caller) = admit(stream, &work.open, work.admission) {
                (work.serving)(&caller);
            }
            work.callers.lock().remove(&number);
        };
        let thread = thread::Builder::new().name("nacre-control".to_owned()).spawn(serve);
        thread.map(drop).inspect_err(|_| drop(endpoint.callers.lock().remove(&number)))
    }
}

/// Returns the caller, if it is served.
fn admit(stream: UnixStream, open: &Arc<RwLock<bool>>, admission: Admission) -> Option<Caller> {
    let credentials = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    let is_owner = credentials.uid.is_root() || credentials.uid == rustix::process::geteuid();
    let (patience, reading, until) = match admission {
        Admission::Owner if is_owner => (PATIENCE, READING, None),
        Admission::Owner => return None,
        Admission::All => (GUEST_PATIENCE, GUEST_PATIENCE, Some(clock::now() + GUEST_PATIENCE)),
    };
    stream.set_read_timeout(Some(patience)).ok()?;
    Some(Caller { stream, credentials, open: Arc::clone(open), until, reading, cut: AtomicBool::new(false) })
}

/// A listening socket; closed when it is dropped.
pub struct Endpoint {
    /// Path of the socket.
    pub path: PathBuf,
    listener: Arc<Listener>,
    number: u64,
    served: Arc<Served>,
}

impl Endpoint {
    /// Makes the socket in a directory that is ours alone, and serves callers.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(listener: &Arc<Listener>, path: &Path, serving: Service) -> Result<Endpoint, Failure> {
        let endpoint = Endpoint::bind(listener, path, serving)?;
        endpoint.open()?;
        Ok(endpoint)
    }

    /// Makes a public socket that everybody can connect to, and serves callers.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn for_all(listener: &Arc<Listener>, path: &Path, serving: Service) -> Result<Endpoint, Failure> {
        let endpoint = Endpoint::bind_for(Admission::All, listener, path, serving)?;
        endpoint.open()?;
        Ok(endpoint)
    }

    /// Makes the socket. Callers can connect from now on, and wait until it is opened.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(listener: &Arc<Listener>, path: &Path, serving: Service) -> Result<Endpoint, Failure> {
        Endpoint::bind_for(Admission::Owner, listener, path, serving)
    }

    fn bind_for(
        admission: Admission,
        listener: &Arc<Listener>,
        path: &Path,
        serving: Service,
    ) -> Result<Endpoint, Failure> {
        let unready = path.with_extension("new");
        // A socket of this name belongs to a dead process.
        let _ = fs::remove_file(&unready);
        path.parent().into_iter().for_each(crate::runtime::sweep);
        let failed = |error: io::Error| Failure::io("cannot make the control socket", path.display(), &error);
        // Between bind(2) and listen(2) it looks like a stale one, which others remove: it gets its name only when
        // it answers.
        let socket = UnixListener::bind(&unready).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        if admission == Admission::All {
            fs::set_permissions(&unready, fs::Permissions::from_mode(0o666)).map_err(failed)?;
        }
        let endpoint = Endpoint::of(admission, listener, (socket, path), serving);
        fs::rename(&unready, path).map_err(failed)?;
        Ok(endpoint)
    }

    /// Takes over the listening socket of the previous process, by its descriptor number. Callers that connected
    /// meanwhile wait until it is opened.
    ///
    /// # Errors
    /// It is not open any more.
    pub fn left(listener: &Arc<Listener>, path: &Path, number: i32, serving: Service) -> Result<Endpoint, Failure> {
        let failed = |error: io::Error| Failure::io("cannot go on with the control socket", path.display(), &error);
        let socket = UnixListener::from(descriptors::take_over(number).map_err(failed)?);
        // Calls listen(2) again, so that callers see the credentials of this process.
        rustix::net::listen(&socket, WAITING).map_err(|error| failed(error.into()))?;
        Ok(Endpoint::of(Admission::Owner, listener, (socket, path), serving))
    }

    /// Returns the number of the socket's descriptor.
    pub fn descriptor(&self) -> i32 {
        self.served.listener.as_raw_fd()
    }

    fn of(
        admission: Admission,
        listener: &Arc<Listener>,
        (socket, path): (UnixListener, &Path),
        serving: Service,
    ) -> Endpoint {
        let open = Arc::new(RwLock::new(true));
        let served = Arc::new(Served { listener: socket, admission, serving, open, callers: Mutex::default() });
        let number = listener.number();
        listener.endpoints.lock().insert(number, Arc::clone(&served));
        Endpoint { path: path.to_owned(), listener: Arc::clone(listener), number, served }
    }

    /// Serves waiting callers, and all new ones.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub fn open(&self) -> Result<(), Failure> {
        let number = epoll::EventData::new_u64(self.number);
        epoll::add(&self.listener.waiting, &self.served.listener, number, epoll::EventFlags::IN)
            .map_err(|error| Failure::io("cannot listen on", self.path.display(), &error.into()))
    }

    /// Waits until the requests in progress are answered, and answers none from then on. A caller that does not
    /// read is not waited for. Connections stay open until the endpoint is dropped.
    pub fn close(&self) {
        if self.listener.endpoints.lock().remove(&self.number).is_none() {
            return;
        }
        // A socket that cannot be removed is recognised as stale by the next command.
        let _ = fs::remove_file(&self.path);
        if let Err(error) = epoll::delete(&self.listener.waiting, &self.served.listener) {
            tracing::debug!(%error, "a socket was not listened to");
        }
        if let Some(mut open) = self.served.open.try_write_for(PATIENCE) {
            *open = false;
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
        // The requester of the end waits for the end of its connection.
        for caller in self.served.callers.lock().values() {
            // An error means that it has disconnected already.
            let _ = caller.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        cell::Cell,
        io::{BufRead, Read},
        sync::mpsc,
    };

    /// A caller, and its end of the connection.
    fn connected() -> (Caller, UnixStream) {
        let (ours, its) = UnixStream::pair().unwrap();
        (admit(ours, &Arc::new(RwLock::new(true)), Admission::Owner).unwrap(), its)
    }

    /// Enough messages to fill the buffers of a connection.
    const MANY: usize = 20_000;

    #[test]
    fn a_stream_and_its_answer_wait_for_a_slow_reader() {
        let (caller, its) = connected();
        let (waits, waited) = mpsc::channel();
        let sends = thread::spawn(move || {
            let calls = Cell::new(0);
            let ends = || {
                calls.set(calls.get() + 1);
                // The first call of each message is before it.
                if calls.get() == 2 {
                    waits.send(()).unwrap();
                }
                false
            };
            for _ in 0..MANY {
                calls.set(0);
                caller.give(&[], &ends).unwrap();
            }
            calls.set(1);
            caller.send_until(&Ok("whole"), &ends).unwrap();
        });
        let mut lines = BufReader::new(its).lines();
        waited.recv().unwrap();
        for _ in 0..MANY {
            assert_eq!(lines.next().unwrap().unwrap(), "{\"bytes\":0}");
        }
        assert_eq!(lines.next().unwrap().unwrap(), "{\"answer\":\"whole\"}");
        sends.join().unwrap();
    }

    #[test]
    fn nothing_follows_a_message_that_was_not_read() {
        let (caller, mut its) = connected();
        let sent = (0..MANY).take_while(|_| caller.note_until("line", &|| true)).count();
        assert!(sent < MANY);
        let mut text = vec![0; sent * "{\"note\":\"line\"}\n".len()];
        its.read_exact(&mut text).unwrap();
        // There is room again, but one line is missing.
        assert!(!caller.note("another"));
        assert!(caller.send(&Ok("whole")).is_err());
        drop(caller);
        text.clear();
        its.read_to_end(&mut text).unwrap();
        assert!(!text.contains(&b'\n'), "{}", text.escape_ascii());
    }
}
