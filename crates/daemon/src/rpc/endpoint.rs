//! The serving side of sockets: one thread listens for all endpoints of the process, each caller is
//! served in a thread of its own.
//!
//! Used by whatever serves mounts or owns a pool. Invariants: a socket has its name only while it
//! is listened to; only root and the owner of the process are served, except at a socket that is
//! for all ([`Admission::All`]), where a caller has a short time and few at once are let in; when an
//! [`Endpoint`] is gone, it answers nobody any more, and whoever was connected hears of the end.

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
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a caller may be silent, and how long an answer in the making is waited for at the end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the other side may take to read what is sent: it may show notes to somebody who reads.
const READING: Duration = Duration::from_secs(30);

/// So long a caller may keep a connection to a socket that is for all.
const GUEST_PATIENCE: Duration = Duration::from_secs(2);
/// So many are let in at one time there.
const GUESTS_MOST: usize = 16;
/// The longest request there, bytes.
const GUEST_REQUEST: Source = Source { most: 4096, harmless: false };

/// So many callers may wait until they are let in, as far as the system allows.
const WAITING: i32 = 4096;

/// Who is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Root and the owner of the process.
    Owner,
    /// Whoever comes: what he may know is for the service to say.
    All,
}

/// Serves one caller until it is gone.
pub type Service = Arc<dyn Fn(&Caller) + Send + Sync>;

/// Somebody who is connected, and may ask.
pub struct Caller {
    stream: UnixStream,
    /// Who, as the kernel says.
    pub credentials: UCred,
    /// Held for reading while a request is answered; whether any is answered still.
    open: Arc<RwLock<bool>>,
    /// When it has to be gone.
    until: Option<Instant>,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Caller").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Caller {
    /// Answers each request of the caller until it goes, or the endpoint closes.
    pub fn serve<Q: DeserializeOwned, A: Serialize>(&self, answer: impl Fn(Q, &Caller) -> Result<A, Failure>) {
        for request in self.requests() {
            let open = self.open.read();
            if !*open || self.send(&answer(request, self)).is_err() {
                return;
            }
        }
    }

    /// What the caller asks, until it goes or talks nonsense: nothing is owed to it then. Whoever
    /// takes requests by this minds the end of the endpoint himself.
    pub fn requests<Q: DeserializeOwned>(&self) -> impl Iterator<Item = Q> {
        let mut reader = BufReader::new(DeadlineReader { stream: &self.stream, until: self.until });
        let source = if self.until.is_some() { GUEST_REQUEST } else { Source::COMMAND };
        std::iter::from_fn(move || line::receive(&mut reader, source).ok().flatten())
    }

    /// Answers.
    ///
    /// # Errors
    /// Nobody listens any more.
    pub fn send<A: Serialize>(&self, answer: &Result<A, Failure>) -> io::Result<()> {
        match answer {
            Ok(answer) => line::send(&self.stream, &Message::Answer(answer)),
            Err(failure) => line::send(&self.stream, &Message::<()>::Failed(failure.clone())),
        }
    }

    /// Gives bytes of a stream, as long as that is not to end.
    ///
    /// # Errors
    /// Nobody takes them.
    pub fn give(&self, bytes: &[u8], ends: &dyn Fn() -> bool) -> io::Result<()> {
        if ends() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        line::send(&self.stream, &Message::<()>::Bytes(bytes.len() as u64))?;
        stream::write(&self.stream, bytes, ends)
    }

    /// Takes bytes of a stream; none at its end.
    ///
    /// # Errors
    /// The caller is gone, or this is to end.
    pub fn take(&self, channel: &mut Channel, buffer: &mut [u8], ends: &dyn Fn() -> bool) -> io::Result<usize> {
        if !channel.begun() {
            line::send(&self.stream, &Message::<()>::Bytes(0))?;
        }
        channel.take(&self.stream, buffer, ends)
    }

    /// Says something meanwhile; answers whether anybody listens.
    pub fn note(&self, text: &str) -> bool {
        line::send(&self.stream, &Message::<()>::Note(text.to_owned())).is_ok()
    }
}

/// What callers of one socket share.
struct Served {
    listener: UnixListener,
    admission: Admission,
    serving: Service,
    open: Arc<RwLock<bool>>,
    /// Who is connected, by a number each.
    callers: Mutex<HashMap<u64, UnixStream>>,
}

/// Listens on all sockets of this process.
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
    /// Starts the thread that listens; it ends with the process.
    ///
    /// # Errors
    /// No descriptor or no thread can be had.
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
                    // Out of descriptors or threads: do not turn in circles until there are some
                    // again.
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

/// The caller, where it is served.
fn admit(stream: UnixStream, open: &Arc<RwLock<bool>>, admission: Admission) -> Option<Caller> {
    let credentials = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    let is_owner = credentials.uid.is_root() || credentials.uid == rustix::process::geteuid();
    let (patience, reading, until) = match admission {
        Admission::Owner if is_owner => (PATIENCE, READING, None),
        Admission::Owner => return None,
        Admission::All => (GUEST_PATIENCE, GUEST_PATIENCE, Some(clock::now() + GUEST_PATIENCE)),
    };
    stream.set_read_timeout(Some(patience)).and_then(|()| stream.set_write_timeout(Some(reading))).ok()?;
    Some(Caller { stream, credentials, open: Arc::clone(open), until })
}

/// A socket that is listened to, for as long as it lives.
pub struct Endpoint {
    /// Where it is.
    pub path: PathBuf,
    listener: Arc<Listener>,
    number: u64,
    served: Arc<Served>,
}

impl Endpoint {
    /// Makes the socket in a directory that is ours alone, and serves callers.
    ///
    /// # Errors
    /// A socket that cannot be made.
    pub fn start(listener: &Arc<Listener>, path: &Path, serving: Service) -> Result<Endpoint, Failure> {
        let endpoint = Endpoint::bind(listener, path, serving)?;
        endpoint.open()?;
        Ok(endpoint)
    }

    /// Makes a socket that everybody can connect to, and serves callers.
    ///
    /// # Errors
    /// A socket that cannot be made.
    pub fn for_all(listener: &Arc<Listener>, path: &Path, serving: Service) -> Result<Endpoint, Failure> {
        let endpoint = Endpoint::bind_for(Admission::All, listener, path, serving)?;
        endpoint.open()?;
        Ok(endpoint)
    }

    /// Makes the socket. Callers can connect from now on, and wait until it is opened.
    ///
    /// # Errors
    /// A socket that cannot be made.
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
        // A socket of our own name is left from a process that is gone.
        let _ = fs::remove_file(&unready);
        path.parent().into_iter().for_each(crate::runtime::sweep);
        let failed = |error: io::Error| Failure::io("cannot make the control socket", path.display(), &error);
        // Between bind(2) and listen(2) it looks like a stale one, which others remove: it gets its
        // name only when it answers.
        let socket = UnixListener::bind(&unready).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        if admission == Admission::All {
            fs::set_permissions(&unready, fs::Permissions::from_mode(0o666)).map_err(failed)?;
        }
        let endpoint = Endpoint::of(admission, listener, (socket, path), serving);
        fs::rename(&unready, path).map_err(failed)?;
        Ok(endpoint)
    }

    /// Goes on with the socket that a process before this one listened to, and has left under this
    /// number. Callers have waited at it meanwhile, and wait until it is opened.
    ///
    /// # Errors
    /// It is not open any more.
    pub fn left(listener: &Arc<Listener>, path: &Path, number: i32, serving: Service) -> Result<Endpoint, Failure> {
        let failed = |error: io::Error| Failure::io("cannot go on with the control socket", path.display(), &error);
        let socket = UnixListener::from(descriptors::take_over(number).map_err(failed)?);
        // Callers see from now on that it is this process.
        rustix::net::listen(&socket, WAITING).map_err(|error| failed(error.into()))?;
        Ok(Endpoint::of(Admission::Owner, listener, (socket, path), serving))
    }

    /// The number of the socket's descriptor.
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

    /// Serves those who wait, and all who come.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(&self) -> Result<(), Failure> {
        let number = epoll::EventData::new_u64(self.number);
        epoll::add(&self.listener.waiting, &self.served.listener, number, epoll::EventFlags::IN)
            .map_err(|error| Failure::io("cannot listen on", self.path.display(), &error.into()))
    }

    /// Waits until what was asked is answered, and answers nothing from then on. Somebody who does
    /// not listen is not waited for. Who is connected stays so until the endpoint is dropped.
    pub fn close(&self) {
        if self.listener.endpoints.lock().remove(&self.number).is_none() {
            return;
        }
        // A socket that stays behind is recognised as stale by the next command.
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
        // Whoever asked for the end waits for this.
        for caller in self.served.callers.lock().values() {
            // One that has gone already needs no word.
            let _ = caller.shutdown(Shutdown::Both);
        }
    }
}
