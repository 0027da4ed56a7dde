//! How commands talk to the process that serves a mount: one Unix socket per mount, one JSON value per line in each direction.
//!
//! [`Server`] is used by [`crate::serving`], the rest by the commands. Only root and the mount's owner are answered (`SO_PEERCRED`). The
//! other side is not trusted: lines are limited, waiting is limited, and what is shown on a terminal is made printable first.

mod server;

pub use server::{Desk, Server};

use crate::{
    cage::{
        report::CageReport,
        resize::{InodeChange, SizeChange},
    },
    failure::{Exit, Failure},
    report::Report,
    runtime,
    union::run::{UnionAnswer, UnionRequest},
};
use nacre_layers::spec::RemapSpec;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    cmp::Reverse,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The longest line in either direction, bytes.
const LINE_MAX: u64 = 4 << 20;
/// How long to wait for the other side.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for the end of a mount that is unmounted already.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// The same for figures, which are at hand at any time.
const STATUS_PATIENCE: Duration = Duration::from_secs(2);

/// What can be asked of a mount.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Its figures.
    Status,
    /// New rules, or (without) users and groups read again.
    Reload {
        /// The new rules.
        rules: Option<Box<RemapSpec>>,
    },
    /// Another limit for a cage.
    ResizeCage {
        /// Which of the mount's cages, from the bottom up.
        cage: usize,
        /// The new size.
        size: Option<SizeChange>,
        /// The new number of inodes.
        inodes: Option<InodeChange>,
    },
    /// Something about its union.
    Union(UnionRequest),
    /// The end.
    Unmount {
        /// Even while it is in use.
        lazy: bool,
    },
}

/// What a mount answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// Its figures.
    Status(Box<Report>),
    /// It is done, and this is what the cage is like now.
    Cage(Box<CageReport>),
    /// What its union says.
    Union(UnionAnswer),
    /// It is done.
    Done,
    /// It is not, and why.
    Failed {
        /// What failed.
        what: String,
        /// What to do next.
        next: String,
        /// It is in use.
        busy: bool,
        /// The exit code of the command, as a number.
        #[serde(default)]
        exit: u8,
    },
}

impl Answer {
    /// Turns a failure of ours into an answer.
    pub fn failed(failure: &Failure) -> Answer {
        Answer::Failed {
            what: failure.what.clone(),
            next: failure.next.clone(),
            busy: failure.exit == Exit::Busy,
            exit: failure.exit as u8,
        }
    }
}

/// Sends a line.
///
/// # Errors
/// Nobody reads it.
pub fn send(mut stream: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Receives a line.
///
/// # Errors
/// The end of the connection, or something that is not understood.
pub fn receive<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<T> {
    let mut line = Vec::new();
    reader.take(LINE_MAX).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    Ok(serde_json::from_slice(&line)?)
}

/// A mount that answers.
#[derive(Debug)]
pub struct Peer {
    socket: PathBuf,
    /// What it said last.
    pub report: Report,
}

impl Peer {
    /// Asks a mount.
    ///
    /// # Errors
    /// What it answers, or that it does not.
    pub fn ask(&self, request: &Request) -> Result<Answer, Failure> {
        let failed = |error: io::Error| {
            Failure::io("cannot reach the process that serves", &self.report.mountpoint, &error)
                .next(format!("it is process {}; see whether it is stuck", self.report.pid))
        };
        match converse(&self.socket, request).map_err(failed)? {
            Answer::Failed { what, next, busy, exit } => {
                let exit = if busy { Exit::Busy } else { Exit::of(exit) };
                let (what, next) = (crate::report::printable(what.as_bytes()), crate::report::printable(next.as_bytes()));
                Err(Failure::new(what).next(next).exit(exit))
            }
            answer => Ok(answer),
        }
    }
}

/// What [`find`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The mounts that answer, by where they are mounted.
    pub peers: Vec<Peer>,
    /// The numbers of processes that serve a mount and do not answer.
    pub silent: Vec<String>,
}

/// All mounts that answer, by where they are mounted.
pub fn peers() -> Vec<Peer> {
    find().peers
}

/// Asks everybody. Who answers is what the kernel says of the other side, whatever it says itself.
pub fn find() -> Found {
    let uid = rustix::process::geteuid().as_raw();
    let own = runtime::ours();
    let Found { mut peers, mut silent } = Found::default();
    for directory in runtime::all() {
        for socket in runtime::children(&directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == "sock")) {
            match status(&socket) {
                Ok(Answer::Status(report)) => peers.push(Peer { socket, report: *report }),
                // Nobody listens: the process died without cleaning up. Others' directories are theirs to clean.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && directory == own => {
                    let _ = fs::remove_file(&socket);
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    let pid = socket.file_stem().and_then(|name| name.as_encoded_bytes().split(|byte| *byte == b'-').next());
                    silent.extend(pid.map(crate::report::printable));
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    // Of several at one place our own come first, since others may claim any place; of these the topmost, which is the youngest: within
    // one second, the higher process number.
    let order = |peer: &Peer| (peer.report.mountpoint.clone(), peer.report.uid != uid, peer.report.uptime, Reverse(peer.report.pid));
    peers.sort_by_cached_key(order);
    silent.dedup();
    Found { peers, silent }
}

/// Asks something that may take its time. After an unmount that was not lazy, also waits for the end of whatever served it, so that what lies below
/// is free when the command returns.
fn converse(socket: &Path, request: &Request) -> io::Result<Answer> {
    let stream = connect(socket, PATIENCE)?;
    send(&stream, request)?;
    let mut reader = BufReader::new(&stream);
    let answer = receive(&mut reader)?;
    if matches!((request, &answer), (Request::Unmount { lazy: false }, Answer::Done)) {
        stream.set_read_timeout(Some(END_PATIENCE))?;
        // The end of the stream or the end of our patience: the mount is gone either way.
        let _ = reader.read(&mut [0]);
    }
    Ok(answer)
}

fn status(socket: &Path) -> io::Result<Answer> {
    let until = Instant::now() + STATUS_PATIENCE;
    let stream = connect(socket, STATUS_PATIENCE)?;
    send(&stream, &Request::Status)?;
    let mut answer = receive(&mut BufReader::new(Hasty { stream: &stream, until }))?;
    if let Answer::Status(report) = &mut answer {
        report.uid = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
    }
    Ok(answer)
}

/// Connects without waiting longer than `patience` for somebody who does not accept, and limits each write as well.
///
/// # Errors
/// As `connect(2)`.
pub fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let address = SocketAddrUnix::new(socket)?;
    let stream = UnixStream::from(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    // It holds for connect(2) as well (unix(7)): a queue that nobody empties is waited for no longer.
    stream.set_write_timeout(Some(patience))?;
    connect(&stream, &address)?;
    Ok(stream)
}

/// Reads until a point in time, however the bytes dribble in.
struct Hasty<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Hasty<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(buffer)
    }
}

/// The peers at these mount points, all where none is named. The path is not touched: a mount that hangs would hang us.
///
/// # Errors
/// A mount point where no mount of ours answers.
pub fn at(mountpoints: &[PathBuf]) -> Result<Vec<Peer>, Failure> {
    let mut peers = peers();
    if mountpoints.is_empty() {
        return Ok(peers);
    }
    let mut chosen = Vec::new();
    for mountpoint in mountpoints {
        let absolute = lexical(mountpoint)?;
        let text = crate::report::path_text(&absolute);
        match peers.iter().position(|peer| peer.report.mountpoint == text) {
            Some(place) => chosen.push(peers.remove(place)),
            None if crate::kernel_engine::records()?.iter().any(|report| report.mountpoint == text) => {
                return Err(Failure::new(format!("the kernel alone serves {text} (--engine=kernel): there is no process to ask")).next(
                    "what it shows cannot be changed while it is mounted; unmount it and mount it again, with --engine=fuse for rules \
                     that can be reloaded",
                ));
            }
            None => {
                return Err(Failure::new(format!("no mount of nacre answers at {text}"))
                    .exit(Exit::NotFound)
                    .next("`nacre status` lists those that do"));
            }
        }
    }
    Ok(chosen)
}

/// An absolute path without `.`, `..` and (above the last component) symbolic links.
///
/// # Errors
/// A parent that does not exist.
pub fn lexical(path: &Path) -> Result<PathBuf, Failure> {
    let failed = |error: io::Error| Failure::io("cannot resolve", path.display(), &error);
    let absolute = std::path::absolute(path).map_err(failed)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) if !path.as_os_str().as_encoded_bytes().ends_with(b"..") => {
            Ok(fs::canonicalize(parent).map_err(failed)?.join(name))
        }
        _ => fs::canonicalize(&absolute).map_err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::net::UnixListener,
        sync::{Arc, mpsc},
        thread,
    };

    fn server(directory: &Path, answer: impl Fn(Request) -> Answer + Send + Sync + 'static) -> Server {
        Server::start(&Desk::start().unwrap(), directory, "1", Arc::new(answer)).unwrap()
    }

    fn figures(request: Request) -> Answer {
        match request {
            Request::Status => Answer::Status(Box::new(Report { mountpoint: "/m".to_owned(), ..Report::default() })),
            Request::Reload { rules: Some(rules) } if rules.force_user.as_deref() == Some("5") => Answer::Done,
            _ => Answer::failed(&Failure::new("no\x1b[31m").next("try").exit(Exit::Busy)),
        }
    }

    #[test]
    fn questions_get_answers() {
        let scratch = tempfile::tempdir().unwrap();
        let server = server(scratch.path(), figures);
        let Answer::Status(report) = status(&server.path).unwrap() else { panic!("figures") };
        let peer = Peer { socket: server.path.clone(), report: *report };
        assert_eq!(peer.report.mountpoint, "/m");
        let rules = RemapSpec { force_user: Some("5".to_owned()), ..RemapSpec::default() };
        assert!(matches!(peer.ask(&Request::Reload { rules: Some(Box::new(rules)) }), Ok(Answer::Done)));
        let failure = peer.ask(&Request::Reload { rules: None }).unwrap_err();
        assert_eq!((failure.what.as_str(), failure.next.as_str(), failure.exit), ("no\\x1b[31m", "try", Exit::Busy));
    }

    #[test]
    fn nobody_passes_for_somebody_else() {
        let scratch = tempfile::tempdir().unwrap();
        let claims = |_| Answer::Status(Box::new(Report { uid: 4_000_000, ..Report::default() }));
        let server = server(scratch.path(), claims);
        let Answer::Status(report) = status(&server.path).unwrap() else { panic!("figures") };
        assert_eq!(report.uid, rustix::process::geteuid().as_raw());
    }

    #[test]
    fn whoever_dribbles_or_does_not_accept_is_not_waited_for() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("slow.sock");
        let listener = UnixListener::bind(&path).unwrap();
        // The server's side is served by hand, one byte at a time and without an end.
        let dribble = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
            listener
        });
        assert!(status(&path).is_err());
        let listener = dribble.join().unwrap();
        // Nobody accepts any more: at some number of callers the queue is full.
        rustix::net::listen(&listener, 0).unwrap();
        let waiting: Vec<UnixStream> = (0..3).map_while(|_| connect(&path, Duration::from_millis(50)).ok()).collect();
        assert!(waiting.len() < 3);
        assert!(matches!(connect(&path, Duration::from_millis(50)), Err(error) if error.kind() == io::ErrorKind::WouldBlock));
    }

    #[test]
    fn nonsense_ends_the_conversation_and_nothing_else() {
        let scratch = tempfile::tempdir().unwrap();
        let server = server(scratch.path(), figures);
        for nonsense in [&b"\n"[..], b"{}\n", b"\"bogus\"\n", b"\xff\n", b"\"status\" x\n"] {
            let mut stream = UnixStream::connect(&server.path).unwrap();
            stream.write_all(nonsense).unwrap();
            let mut rest = Vec::new();
            assert_eq!(stream.read_to_end(&mut rest).unwrap(), 0, "{}", nonsense.escape_ascii());
        }
        assert!(status(&server.path).is_ok());
    }

    #[test]
    fn an_answer_in_the_making_is_still_given() {
        let scratch = tempfile::tempdir().unwrap();
        let (asked, question) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let wait = parking_lot::Mutex::new(wait);
        let server = server(scratch.path(), move |_| {
            asked.send(()).unwrap();
            wait.lock().recv().unwrap();
            Answer::Done
        });
        let path = server.path.clone();
        let client = thread::spawn(move || status(&path));
        question.recv().unwrap();
        let path = server.path.clone();
        let end = thread::spawn(move || drop(server));
        go.send(()).unwrap();
        end.join().unwrap();
        assert!(matches!(client.join().unwrap(), Ok(Answer::Done)));
        assert!(!path.exists());
    }
}
