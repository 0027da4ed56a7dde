//! Control protocol of mounts: requests to the process that serves a mount, and how commands find mounts.
//!
//! [`crate::serving`] and the mounts of pools make the sockets ([`crate::control_sockets`]); commands use
//! everything else. The other side is not trusted: its texts are made printable before they reach a terminal.

use crate::{
    cage::{
        change::{InodeChange, SizeChange},
        report::CageReport,
    },
    clock,
    failure::{Exit, Failure},
    handed_over::HandedOver,
    mountinfo,
    report::Report,
    rpc::{
        self, CallError, Source,
        deadline::{DeadlineReader, ask_until, left},
        endpoint::{Caller, Endpoint, Listener, Service},
        line,
    },
    runtime::{self, Socket, Whose},
    union::requests::{UnionAnswer, UnionRequest},
};
use nacre_stack::spec::RemapSpec;
use serde::{Deserialize, Serialize};
use std::{
    cmp::Reverse,
    collections::BTreeSet,
    fs,
    io::{self, BufReader, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Limits on answers of a process that serves a mount, of any user.
const REPORT: Source = Source { most: 4 << 20, harmless: false };
/// Longest chain of symbolic links, as in the kernel.
const LINKS_MOST: usize = 40;
/// Deadline for the other side. For another user's process it covers the whole answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Deadline for the end of the process after an unmount.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Deadline for the reports of all of our mounts together; they need no work to make.
pub const STATUS_PATIENCE: Duration = Duration::from_secs(2);
/// Deadline for the reports of all other users' mounts together.
pub const FOREIGN_PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait for a mount that another process is taking over: with a hundred thousand open files, that takes
/// some seconds.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(20);
/// Interval of polling.
const LOOK: Duration = Duration::from_millis(50);

/// Request to a mount.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Asks for its report.
    Status,
    /// Replaces the rules, or (without) reads users and groups again.
    Reload {
        /// The new rules.
        rules: Option<Box<RemapSpec>>,
    },
    /// Changes the limits of a cage.
    ResizeCage {
        /// Index of the cage among those of the mount, from the bottom up.
        cage: usize,
        /// The new size.
        size: Option<SizeChange>,
        /// The new number of inodes.
        inodes: Option<InodeChange>,
    },
    /// Request to its union.
    Union(UnionRequest),
    /// Asks for the handoff state that another program needs to take the mount over.
    HandOver,
    /// Has the supervisor replace itself by another program that takes over the mount.
    Upgrade {
        /// Path of that program.
        program: PathBuf,
    },
    /// Unmounts the mount.
    Unmount {
        /// Detach the mount even while it is in use (lazily).
        lazy: bool,
    },
}

/// Answer of a mount.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// Report of the mount.
    Status(Box<Report>),
    /// The limits are changed; report of the cage after it.
    Cage(Box<CageReport>),
    /// Answer of its union.
    Union(UnionAnswer),
    /// Handoff state, for [`Request::HandOver`].
    HandOver(Box<HandedOver>),
    /// A process is taking over the mount of a crashed one, and cannot answer yet.
    TakingOver {
        /// Mount point of that mount.
        mountpoint: String,
        /// Process id of that process.
        pid: u32,
    },
    /// The request is carried out.
    Done,
}

/// Path of a mount's own control socket, named by the process that makes it.
///
/// # Errors
/// As [`runtime::own`].
pub fn place(name: &str) -> Result<PathBuf, Failure> {
    Ok(runtime::own()?.join(format!("{name}.sock")))
}

/// Makes the service for the owner of a mount and root: they may make all requests.
pub fn owners(answer: impl Fn(Request) -> Result<Answer, Failure> + Send + Sync + 'static) -> Service {
    Arc::new(move |caller| caller.serve(|request, _| answer(request)))
}

/// Makes the public socket of a mount that other users can see: it answers [`Report::for_all`] to each user who has
/// `device`, the mount's device number, in his mount table. It has the file name of the own socket; `None` where it
/// cannot be made, or this process is not root's.
pub fn for_all(
    listener: &Arc<Listener>,
    own: &Path,
    device: u64,
    answer: impl Fn(Request) -> Result<Answer, Failure> + Send + Sync + 'static,
) -> Option<Endpoint> {
    let service = move |caller: &Caller| caller.serve(|request, caller| to_all(&answer, device, request, caller));
    let made = runtime::for_all().and_then(|directory| {
        let Some((directory, name)) = directory.zip(own.file_name()) else { return Ok(None) };
        Endpoint::for_all(listener, &directory.join(name), Arc::new(service)).map(Some)
    });
    made.unwrap_or_else(|failure| {
        tracing::warn!("ordinary users are not told of this mount: {failure}");
        None
    })
}

/// Answers a user who is neither root nor the owner.
fn to_all(
    answer: &dyn Fn(Request) -> Result<Answer, Failure>,
    device: u64,
    request: Request,
    caller: &Caller,
) -> Result<Answer, Failure> {
    if !mountinfo::shows_to_others(caller.credentials.pid, device) {
        return Err(Failure::new("no such mount is to be seen").exit(Exit::NotFound));
    }
    match request {
        Request::Status => match answer(Request::Status)? {
            Answer::Status(report) => Ok(Answer::Status(Box::new(report.for_all()))),
            _ => Err(Failure::new("the mount does not tell its figures")),
        },
        _ => Err(Failure::new("only root may do this to a mount of root's").exit(Exit::Denied)),
    }
}

/// A mount that answers.
#[derive(Debug)]
pub struct Peer {
    socket: Socket,
    /// Last report of the mount.
    pub report: Report,
}

impl Peer {
    /// Sends a request to the mount.
    ///
    /// # Errors
    /// The failure that it answers, or that it does not answer.
    pub fn ask(&self, request: &Request) -> Result<Answer, Failure> {
        converse(&self.socket, request).map_err(|error| match error {
            CallError::Failed(failure) => failure.printable(),
            other => other
                .failure("serves", &self.report.mountpoint)
                .next(format!("it is process {}; see whether it is stuck", self.report.pid)),
        })
    }
}

/// Result of [`find`].
#[derive(Debug, Default)]
pub struct FoundMounts {
    /// Mounts that answer, by mount point.
    pub peers: Vec<Peer>,
    /// Process ids of ours that serve a mount and do not answer.
    pub silent: Vec<String>,
    /// Other users with sockets that do not answer in time.
    pub unheard: BTreeSet<u32>,
    /// Mounts that are still being taken over, with the processes that do so.
    pub taken_over: Vec<(String, u32)>,
    /// No socket was skipped: all answers were waited for.
    pub is_whole: bool,
}

impl FoundMounts {
    /// Prints which processes do not answer.
    pub fn tell_silent(&self) {
        // A failure to print a warning is ignored.
        for pid in &self.silent {
            let _ = writeln!(io::stderr(), "nacre: process {pid} serves a mount and does not answer");
        }
        for (place, pid) in &self.taken_over {
            let _ = writeln!(io::stderr(), "nacre: process {pid} is still taking over the mount at {place}");
        }
        for uid in &self.unheard {
            let _ = writeln!(io::stderr(), "nacre: user {uid} keeps sockets at which no mount answers in time");
        }
    }
}

/// Makes the failure for a mount that another process is still taking over.
#[must_use]
pub fn taken_over(mountpoint: &str) -> Failure {
    let what = format!("the mount at {mountpoint} is still being taken over: the process that served it died");
    Failure::new(what).next("ask again in a while")
}

/// Asks all mounts of these users concurrently. A peer's user and process id are taken from the kernel
/// (`SO_PEERCRED`), not from its answer.
pub fn find(whose: &Whose) -> FoundMounts {
    when_taken_over(|| find_until(whose, STATUS_PATIENCE, &mut |_| false))
}

/// Repeats `find` while another process is taking a mount over, until a deadline.
fn when_taken_over(mut find: impl FnMut() -> FoundMounts) -> FoundMounts {
    let mut found = FoundMounts::default();
    // The end of a takeover is not notified.
    clock::look_until(TAKEOVER_PATIENCE, LOOK, || {
        found = find();
        found.taken_over.is_empty() || !found.is_whole
    });
    found
}

/// Finds the mounts at these mount points. Where the mount table names their devices and users, the search ends
/// when all of them have answered.
pub fn find_at(mountpoints: &[PathBuf]) -> FoundMounts {
    let table = mountinfo::read().unwrap_or_default();
    let shown = |mountpoint: &PathBuf| {
        let path = lexical(mountpoint).ok()?;
        let entry = table.iter().rfind(|entry| entry.mountpoint == path).filter(|entry| entry.is_served())?;
        Some((mountinfo::device_text(entry.device.0, entry.device.1), entry.user()?))
    };
    let sought: Option<Vec<(String, u32)>> = mountpoints.iter().map(shown).collect();
    let whose = whose(mountpoints);
    when_taken_over(|| {
        let mut missing = sought.clone();
        find_until(&whose, STATUS_PATIENCE, &mut |report| {
            let Some(missing) = &mut missing else { return false };
            missing.retain(|(device, user)| report.device.as_ref() != Some(device) || report.uid != *user);
            missing.is_empty()
        })
    })
}

/// Asks mounts until `enough` returns true, or until the deadline.
pub fn find_until(whose: &Whose, patience: Duration, enough: &mut dyn FnMut(&Report) -> bool) -> FoundMounts {
    let uid = rustix::process::geteuid().as_raw();
    let mut found = FoundMounts::default();
    let (ours, foreign): (Vec<Socket>, Vec<Socket>) =
        runtime::sockets(whose, "sock").into_iter().partition(|socket| socket.foreign().is_none());
    let mut is_enough = false;
    for (sockets, patience) in [(ours, patience), (foreign, patience.min(FOREIGN_PATIENCE))] {
        if is_enough {
            break;
        }
        let until = clock::now() + patience;
        let answers = ask_until(sockets, until, move |socket| status(socket, until), &mut |_, answer| {
            is_enough = matches!(answer, Ok(Answer::Status(report)) if enough(report));
            is_enough
        });
        for (socket, answer) in answers {
            let late = match answer {
                Some(Ok(Answer::Status(report))) => {
                    found.peers.push(Peer { socket, report: *report });
                    continue;
                }
                Some(Ok(Answer::TakingOver { mountpoint, pid })) => {
                    // A takeover of another user's mount is not waited for.
                    if socket.foreign().is_none() {
                        found.taken_over.push((crate::report::printable(mountpoint.as_bytes()), pid));
                    }
                    continue;
                }
                // Nobody listens: the process died without cleaning up. Other users' directories are cleaned by
                // them.
                Some(Err(CallError::Unreachable(error)))
                    if error.kind() == io::ErrorKind::ConnectionRefused && socket.foreign().is_none() =>
                {
                    let _ = fs::remove_file(&socket.path);
                    runtime::forget_for_all(&socket.path);
                    continue;
                }
                Some(Err(CallError::Unreachable(error))) => {
                    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
                }
                Some(Ok(_) | Err(CallError::Ended | CallError::Failed(_))) => false,
                None => !is_enough,
            };
            if late {
                match socket.foreign() {
                    Some(uid) => drop(found.unheard.insert(uid)),
                    None => found.silent.extend(listener(&socket)),
                }
            }
        }
    }
    found.is_whole = !is_enough;
    // Of several peers at one mount point our own come first, since other users may claim any path; of these the
    // topmost, which is the youngest: within one second, the higher process id.
    let order = |peer: &Peer| {
        (peer.report.mountpoint.clone(), peer.report.uid != uid, peer.report.uptime, Reverse(peer.report.pid))
    };
    found.peers.sort_by_cached_key(order);
    found.silent.dedup();
    found
}

/// Returns the process id of the listener at a socket: from the kernel, since the file name may be of an earlier
/// process.
fn listener(socket: &Socket) -> Option<String> {
    let stream = socket.connect(LOOK).ok();
    let peer = stream.and_then(|stream| rustix::net::sockopt::socket_peercred(&stream).ok());
    if let Some(peer) = peer {
        return Some(peer.pid.as_raw_nonzero().to_string());
    }
    let name = socket.path.file_stem()?.as_encoded_bytes();
    name.split(|byte| *byte == b'-').next().map(crate::report::printable)
}

/// Returns whose mounts to ask about these paths: ours, and those of other users who mounted a file system there
/// according to the mount table.
pub fn whose(paths: &[PathBuf]) -> Whose {
    let uid = rustix::process::geteuid().as_raw();
    // Without a mount table only our own mounts are asked.
    let table = mountinfo::read().unwrap_or_default();
    let owner = |path: &PathBuf| {
        let path = lexical(path).ok()?;
        let around = table.iter().filter(|entry| entry.is_served() && path.starts_with(&entry.mountpoint));
        // The last mount of the deepest ones.
        let nearest = around.max_by_key(|entry| entry.mountpoint.components().count())?;
        nearest.user().filter(|user| *user != uid)
    };
    let mut users: Vec<u32> = paths.iter().filter_map(owner).collect();
    users.sort_unstable();
    users.dedup();
    if users.is_empty() { Whose::Ours } else { Whose::These(users) }
}

/// Sends a request that may take long. After an unmount that was not lazy, also waits for the end of the process
/// that served the mount, so that the directory below is free when the command returns.
fn converse(socket: &Socket, request: &Request) -> Result<Answer, CallError> {
    let stream = socket.connect(PATIENCE)?;
    let until = socket.foreign().map(|_| clock::now() + PATIENCE);
    if until.is_none() {
        stream.set_read_timeout(Some(PATIENCE))?;
    }
    line::send(&stream, request)?;
    let mut reader = BufReader::new(DeadlineReader { stream: &stream, until });
    let answer = rpc::answer(&mut reader, REPORT, &mut |_| {})?;
    if matches!((request, &answer), (Request::Unmount { lazy: false }, Answer::Done)) {
        if until.is_none() {
            stream.set_read_timeout(Some(END_PATIENCE))?;
        }
        // The end of the stream or the deadline: the mount is gone either way.
        let _ = reader.read(&mut [0]);
    }
    Ok(answer)
}

/// Asks a mount for its report; once more if the process died meanwhile, since its successor may answer.
fn status(socket: &Socket, until: Instant) -> Result<Answer, CallError> {
    match ask_status(socket, until) {
        Err(CallError::Ended) => ask_status(socket, until),
        answer => answer,
    }
}

fn ask_status(socket: &Socket, until: Instant) -> Result<Answer, CallError> {
    let stream = socket.connect(left(until))?;
    line::send(&stream, &Request::Status)?;
    let mut reader = BufReader::new(DeadlineReader { stream: &stream, until: Some(until) });
    let mut answer = rpc::answer(&mut reader, REPORT, &mut |_| {})?;
    if let Answer::Status(report) = &mut answer {
        report.uid = rustix::net::sockopt::socket_peercred(&stream).map_err(io::Error::from)?.uid.as_raw();
    }
    Ok(answer)
}

/// Returns the peers at these mount points. The paths are not accessed: an access to a hanging mount would hang the
/// caller.
///
/// # Errors
/// No mount of ours answers at a mount point.
pub fn at(mountpoints: &[PathBuf]) -> Result<Vec<Peer>, Failure> {
    let mut found = find_at(mountpoints);
    let mut peers = std::mem::take(&mut found.peers);
    let mut chosen = Vec::new();
    for mountpoint in mountpoints {
        let absolute = lexical(mountpoint)?;
        let text = crate::report::path_text(&absolute);
        match peers.iter().position(|peer| peer.report.mountpoint == text) {
            Some(place) => chosen.push(peers.remove(place)),
            None if found.taken_over.iter().any(|(place, _)| *place == text) => return Err(taken_over(&text)),
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

/// Returns an absolute path without `.`, `..` and symbolic links. The last component is not accessed beyond
/// readlink(2): its mount may hang.
///
/// # Errors
/// A parent that does not exist, or a loop of links.
pub fn lexical(path: &Path) -> Result<PathBuf, Failure> {
    if path.as_os_str().is_empty() {
        return Err(Failure::usage("an empty word is no path"));
    }
    let mut place = without_links_above(path)?;
    for _ in 0..LINKS_MOST {
        // The root of a mount is a directory, and the kernel answers that it is no link without a request to its
        // server.
        let Ok(target) = fs::read_link(&place) else { return Ok(place) };
        place = without_links_above(&place.parent().unwrap_or(Path::new("/")).join(target))?;
    }
    Err(Failure::io("cannot resolve", path.display(), &rustix::io::Errno::LOOP.into()))
}

fn without_links_above(path: &Path) -> Result<PathBuf, Failure> {
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
        os::unix::net::{UnixListener, UnixStream},
        sync::mpsc,
        thread,
    };

    fn server(
        directory: &Path,
        answer: impl Fn(Request) -> Result<Answer, Failure> + Send + Sync + 'static,
    ) -> Endpoint {
        let serve = move |caller: &rpc::endpoint::Caller| caller.serve(|request, _| answer(request));
        Endpoint::start(&Listener::start().unwrap(), &directory.join("1.sock"), Arc::new(serve)).unwrap()
    }

    fn ask(socket: &Path) -> Result<Answer, CallError> {
        status(&Socket::ours(socket.to_owned()), Instant::now() + STATUS_PATIENCE)
    }

    fn figures(request: Request) -> Result<Answer, Failure> {
        match request {
            Request::Status => {
                Ok(Answer::Status(Box::new(Report { mountpoint: "/m".to_owned(), ..Report::default() })))
            }
            Request::Reload { rules: Some(rules) } if rules.force_user.as_deref() == Some("5") => Ok(Answer::Done),
            _ => Err(Failure::new("no\x1b[31m").next("try").exit(Exit::Busy)),
        }
    }

    #[test]
    fn questions_get_answers() {
        let scratch = tempfile::tempdir().unwrap();
        let server = server(scratch.path(), figures);
        let Answer::Status(report) = ask(&server.path).unwrap() else { panic!("figures") };
        let peer = Peer { socket: Socket::ours(server.path.clone()), report: *report };
        assert_eq!(peer.report.mountpoint, "/m");
        let rules = RemapSpec { force_user: Some("5".to_owned()), ..RemapSpec::default() };
        assert!(matches!(peer.ask(&Request::Reload { rules: Some(Box::new(rules)) }), Ok(Answer::Done)));
        let failure = peer.ask(&Request::Reload { rules: None }).unwrap_err();
        assert_eq!((failure.what.as_str(), failure.next.as_str(), failure.exit), ("no\\x1b[31m", "try", Exit::Busy));
    }

    #[test]
    fn nobody_passes_for_somebody_else() {
        let scratch = tempfile::tempdir().unwrap();
        let claims = |_| Ok(Answer::Status(Box::new(Report { uid: 4_000_000, ..Report::default() })));
        let server = server(scratch.path(), claims);
        let Answer::Status(report) = ask(&server.path).unwrap() else { panic!("figures") };
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
        assert!(ask(&path).is_err());
        let listener = dribble.join().unwrap();
        // Connections are not accepted: after some callers the backlog is full.
        rustix::net::listen(&listener, 0).unwrap();
        let waiting: Vec<UnixStream> =
            (0..3).map_while(|_| runtime::connect(&path, Duration::from_millis(50)).ok()).collect();
        assert!(waiting.len() < 3);
        assert!(
            matches!(runtime::connect(&path, Duration::from_millis(50)), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
        );
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
        assert!(ask(&server.path).is_ok());
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
            Ok(Answer::Done)
        });
        let path = server.path.clone();
        let client = thread::spawn(move || ask(&path));
        question.recv().unwrap();
        let path = server.path.clone();
        let end = thread::spawn(move || drop(server));
        go.send(()).unwrap();
        end.join().unwrap();
        assert!(matches!(client.join().unwrap(), Ok(Answer::Done)));
        assert!(!path.exists());
    }
}
