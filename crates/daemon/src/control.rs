//! How commands talk to the process that serves a mount: what can be asked of it, and how mounts are
//! found.
//!
//! The sockets ([`crate::control_sockets`]) are of [`crate::serving`] and of the mounts of pools; the rest is used by the
//! commands.
//! The other side is not trusted: what is shown on a terminal is made printable first.

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

/// What is taken from a process that serves a mount, whoever owns it.
const REPORT: Source = Source { most: 4 << 20, harmless: false };
/// As many links after one another as the kernel follows.
const LINKS_MOST: usize = 40;
/// How long to wait for the other side. Of another user's process, for all of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for the end of a mount that is unmounted already.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// The same for the figures of all mounts of ours together, which are at hand at any time.
pub const STATUS_PATIENCE: Duration = Duration::from_secs(2);
/// The same for those of all other users together.
pub const FOREIGN_PATIENCE: Duration = Duration::from_secs(1);
/// How long a mount is waited for that another process is taking over: with a hundred thousand open files, that takes
/// some seconds.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(20);
/// How often it is asked.
const LOOK: Duration = Duration::from_millis(50);

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
    /// What another program has to know that goes on with it.
    HandOver,
    /// Another program is to go on with it, when its guardian is called.
    Upgrade {
        /// Its path.
        program: PathBuf,
    },
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
    /// See [`Request::HandOver`].
    HandOver(Box<HandedOver>),
    /// A process is taking over the mount of a crashed one, and cannot answer yet.
    TakingOver {
        /// Where the mount is.
        mountpoint: String,
        /// The process.
        pid: u32,
    },
    /// It is done.
    Done,
}

/// Where the own socket of a mount is, named by the process that makes it.
///
/// # Errors
/// As [`runtime::own`].
pub fn place(name: &str) -> Result<PathBuf, Failure> {
    Ok(runtime::own()?.join(format!("{name}.sock")))
}

/// Serves the owner of a mount, and root: they may ask for anything.
pub fn owners(answer: impl Fn(Request) -> Result<Answer, Failure> + Send + Sync + 'static) -> Service {
    Arc::new(move |caller| caller.serve(|request, _| answer(request)))
}

/// Makes the socket at which a mount that is not its owner's alone answers what all may know ([`Report::for_all`])
/// to each user who has `device`, its number, in his table of mounts. It has the name of the own one; none where it cannot
/// be made, or this is not root.
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

/// What somebody is answered who is neither root nor the owner.
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
    /// What it said last.
    pub report: Report,
}

impl Peer {
    /// Asks a mount.
    ///
    /// # Errors
    /// What it answers, or that it does not.
    pub fn ask(&self, request: &Request) -> Result<Answer, Failure> {
        converse(&self.socket, request).map_err(|error| match error {
            CallError::Failed(failure) => failure.printable(),
            other => other
                .failure("serves", &self.report.mountpoint)
                .next(format!("it is process {}; see whether it is stuck", self.report.pid)),
        })
    }
}

/// What [`find`] found.
#[derive(Debug, Default)]
pub struct FoundMounts {
    /// The mounts that answer, by where they are mounted.
    pub peers: Vec<Peer>,
    /// The numbers of processes of ours that serve a mount and do not answer.
    pub silent: Vec<String>,
    /// Other users who keep sockets at which nobody answers in time.
    pub unheard: BTreeSet<u32>,
    /// Mounts that are still being taken over, with the processes that do so.
    pub taken_over: Vec<(String, u32)>,
    /// Everybody was waited for.
    pub is_whole: bool,
}

impl FoundMounts {
    /// Says who does not answer.
    pub fn tell_silent(&self) {
        // Warnings that nobody can read are not worth failing for.
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

/// A mount that another process is still taking over.
#[must_use]
pub fn taken_over(mountpoint: &str) -> Failure {
    let what = format!("the mount at {mountpoint} is still being taken over: the process that served it died");
    Failure::new(what).next("ask again in a while")
}

/// Asks all mounts that are looked for, side by side. Who answers is what the kernel says of the
/// other side, whatever it says itself.
pub fn find(whose: &Whose) -> FoundMounts {
    when_taken_over(|| find_until(whose, STATUS_PATIENCE, &mut |_| false))
}

/// Looks again as long as another process is taking a mount over, for a while.
fn when_taken_over(mut find: impl FnMut() -> FoundMounts) -> FoundMounts {
    let mut found = FoundMounts::default();
    // The end of a takeover is not announced.
    clock::look_until(TAKEOVER_PATIENCE, LOOK, || {
        found = find();
        found.taken_over.is_empty() || !found.is_whole
    });
    found
}

/// The same of those who can tell of these places. Where the table of mounts says which mounts these are,
/// nobody else is waited for.
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

/// The same until those who were heard are `enough`, or somebody keeps silent for so long.
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
                    // Whose is another user's is for him to wait for.
                    if socket.foreign().is_none() {
                        found.taken_over.push((crate::report::printable(mountpoint.as_bytes()), pid));
                    }
                    continue;
                }
                // Nobody listens: the process died without cleaning up. Others' directories are
                // theirs to clean.
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
    // Of several at one place our own come first, since others may claim any place; of these the
    // topmost, which is the youngest: within one second, the higher process number.
    let order = |peer: &Peer| {
        (peer.report.mountpoint.clone(), peer.report.uid != uid, peer.report.uptime, Reverse(peer.report.pid))
    };
    found.peers.sort_by_cached_key(order);
    found.silent.dedup();
    found
}

/// The number of the process that listens at a socket: what the kernel says, since the name may be that of one before it.
fn listener(socket: &Socket) -> Option<String> {
    let stream = socket.connect(LOOK).ok();
    let peer = stream.and_then(|stream| rustix::net::sockopt::socket_peercred(&stream).ok());
    if let Some(peer) = peer {
        return Some(peer.pid.as_raw_nonzero().to_string());
    }
    let name = socket.path.file_stem()?.as_encoded_bytes();
    name.split(|byte| *byte == b'-').next().map(crate::report::printable)
}

/// Whom to ask about these paths: us, and other users who have mounted what is there, as the kernel
/// says. Who names a place wants to hear of it.
pub fn whose(paths: &[PathBuf]) -> Whose {
    let uid = rustix::process::geteuid().as_raw();
    // Without a table of mounts there are ours, or none.
    let table = mountinfo::read().unwrap_or_default();
    let owner = |path: &PathBuf| {
        let path = lexical(path).ok()?;
        let around = table.iter().filter(|entry| entry.is_served() && path.starts_with(&entry.mountpoint));
        // The last one of the deepest.
        let nearest = around.max_by_key(|entry| entry.mountpoint.components().count())?;
        nearest.user().filter(|user| *user != uid)
    };
    let mut users: Vec<u32> = paths.iter().filter_map(owner).collect();
    users.sort_unstable();
    users.dedup();
    if users.is_empty() { Whose::Ours } else { Whose::These(users) }
}

/// Asks something that may take its time. After an unmount that was not lazy, also waits for the
/// end of whatever served it, so that what lies below is free when the command returns.
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
        // The end of the stream or the end of our patience: the mount is gone either way.
        let _ = reader.read(&mut [0]);
    }
    Ok(answer)
}

/// Asks a mount for its figures; once more where the process that was asked has died, since another one may go on.
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

/// The peers at these mount points. The path is not touched: a mount that hangs would hang us.
///
/// # Errors
/// A mount point where no mount of ours answers.
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

/// An absolute path without `.`, `..` and symbolic links. What is mounted there is not asked: it
/// may hang.
///
/// # Errors
/// A parent that does not exist, links that lead in a circle.
pub fn lexical(path: &Path) -> Result<PathBuf, Failure> {
    if path.as_os_str().is_empty() {
        return Err(Failure::usage("an empty word is no path"));
    }
    let mut place = without_links_above(path)?;
    for _ in 0..LINKS_MOST {
        // The root of a mount is a directory, and the kernel answers that it is no link without
        // asking whoever serves it.
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
        // Nobody accepts any more: at some number of callers the queue is full.
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
