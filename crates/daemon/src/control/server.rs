//! The serving side of control sockets: one thread listens for all mounts of the process, each
//! caller is answered in a thread of its own.
//!
//! Used by [`crate::serving`]. Invariants: a socket has its name only while it is listened to; when
//! a [`Server`] is gone, nobody is answered by it any more, and whoever was connected hears of the
//! end.

use super::{PATIENCE, Request, receive, send};
use crate::{control::Answer, failure::Failure};
use parking_lot::{Mutex, RwLock};
use rustix::event::epoll;
use std::{
    collections::HashMap,
    fs,
    io::{self, BufReader},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Answers one request.
pub type Answering = Arc<dyn Fn(Request) -> Answer + Send + Sync>;

/// What callers of one socket share.
struct Counter {
    listener: UnixListener,
    answer: Answering,
    /// Whether requests are answered. Held for reading while one is.
    open: RwLock<bool>,
    /// Who is connected, by a number each.
    callers: Mutex<HashMap<u64, UnixStream>>,
}

/// Listens on the sockets of all mounts of this process.
pub struct Desk {
    waiting: OwnedFd,
    counters: Mutex<HashMap<u64, Arc<Counter>>>,
    next: AtomicU64,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("sockets", &self.counters.lock().len()).finish_non_exhaustive()
    }
}

impl Desk {
    /// Starts the thread that listens; it ends with the process.
    ///
    /// # Errors
    /// No descriptor or no thread can be had.
    pub fn start() -> Result<Arc<Desk>, Failure> {
        let failed = |error: io::Error| Failure::io("cannot start", "the thread that listens to commands", &error);
        let waiting = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let desk = Arc::new(Desk { waiting, counters: Mutex::default(), next: AtomicU64::new(0) });
        let listening = Arc::clone(&desk);
        let thread = thread::Builder::new()
            .name("nacre-listen".to_owned())
            .stack_size(128 << 10)
            .spawn(move || listening.listen());
        thread.map(|_| desk).map_err(failed)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    #[expect(clippy::disallowed_methods, reason = "nobody tells when there are descriptors and threads again")]
    fn listen(&self) {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        loop {
            let ready = match epoll::wait(&self.waiting, &mut events, None) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => 0,
                Err(error) => return tracing::error!(%error, "commands are not answered any more"),
            };
            for event in events.iter().take(ready) {
                let counter = self.counters.lock().get(&event.data.u64()).cloned();
                if let Some(error) = counter.and_then(|counter| self.accept(&counter).err()) {
                    tracing::warn!(%error, "a command could not be answered");
                    // Out of descriptors or threads: do not turn in circles until there are some
                    // again.
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn accept(&self, counter: &Arc<Counter>) -> io::Result<()> {
        let stream = match counter.listener.accept() {
            Ok((stream, _)) => stream,
            // The caller has given up.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        let number = self.number();
        counter.callers.lock().insert(number, stream.try_clone()?);
        let work = Arc::clone(counter);
        let serve = move || {
            serve(&stream, &work);
            work.callers.lock().remove(&number);
        };
        let thread = thread::Builder::new().name("nacre-control".to_owned()).spawn(serve);
        thread.map(drop).inspect_err(|_| drop(counter.callers.lock().remove(&number)))
    }
}

/// The socket of a mount, for as long as it lives.
pub struct Server {
    /// Where it is.
    pub path: PathBuf,
    desk: Arc<Desk>,
    number: u64,
    counter: Arc<Counter>,
}

impl Server {
    /// Makes the socket `NAME.sock` in a directory that is ours alone, and answers requests.
    ///
    /// # Errors
    /// A socket that cannot be made.
    pub fn start(desk: &Arc<Desk>, directory: &Path, name: &str, answer: Answering) -> Result<Server, Failure> {
        let path = directory.join(format!("{name}.sock"));
        let unready = path.with_extension("new");
        // A socket of our own number is left from a process that is gone.
        let _ = fs::remove_file(&unready);
        crate::runtime::sweep(directory);
        let failed = |error: io::Error| Failure::io("cannot make the control socket", path.display(), &error);
        // Between bind(2) and listen(2) it looks like a stale one, which others remove: it gets its
        // name only when it answers.
        let listener = UnixListener::bind(&unready).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        fs::rename(&unready, &path).map_err(failed)?;
        let counter = Arc::new(Counter { listener, answer, open: RwLock::new(true), callers: Mutex::default() });
        let server = Server { path, desk: Arc::clone(desk), number: desk.number(), counter: Arc::clone(&counter) };
        let data = epoll::EventData::new_u64(server.number);
        desk.counters.lock().insert(server.number, Arc::clone(&counter));
        epoll::add(&desk.waiting, &counter.listener, data, epoll::EventFlags::IN)
            .map_err(|error| Failure::io("cannot listen on", server.path.display(), &error.into()))?;
        Ok(server)
    }

    /// Waits until what was asked is answered, and answers nothing from then on. Somebody who does
    /// not listen is not waited for. Who is connected stays so until the server is dropped.
    pub fn close(&self) {
        if self.desk.counters.lock().remove(&self.number).is_none() {
            return;
        }
        // A socket that stays behind is recognised as stale by the next command.
        let _ = fs::remove_file(&self.path);
        if let Err(error) = epoll::delete(&self.desk.waiting, &self.counter.listener) {
            tracing::debug!(%error, "a socket was not listened to");
        }
        if let Some(mut open) = self.counter.open.try_write_for(PATIENCE) {
            *open = false;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
        // Whoever asked for the end waits for this.
        for caller in self.counter.callers.lock().values() {
            // One that has gone already needs no word.
            let _ = caller.shutdown(Shutdown::Both);
        }
    }
}

fn serve(stream: &UnixStream, counter: &Counter) {
    let ours = rustix::process::geteuid().as_raw();
    let peer = rustix::net::sockopt::socket_peercred(stream).map(|peer| peer.uid.as_raw());
    if !peer.is_ok_and(|peer| peer == 0 || peer == ours) {
        return;
    }
    let timed = stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
    if timed.is_err() {
        return;
    }
    let mut reader = BufReader::new(stream);
    // The other side is gone, or talks nonsense: nothing is owed to it.
    while let Ok(request) = receive(&mut reader) {
        let open = counter.open.read();
        if !*open || send(stream, &(counter.answer)(request)).is_err() {
            return;
        }
    }
}
