//! Client of the processes that own pools: one socket per pool in its owner's directory of sockets.
//!
//! Root sees the pools of all users where it asks for them or names one, others their own. Texts received over a
//! socket are made printable before they are shown. Another user's socket is trusted only where the socket, its
//! directory and the answering process are that user's, and only until a deadline: nobody can block root by
//! pretending to be a pool. A pool of ours is waited for as long as it is not stuck.

use super::{expected, runtime_files};
use crate::{
    clock, control,
    failure::{Exit, Failure},
    report::printable,
    rpc::{
        self, CallError, Source,
        deadline::{DeadlineReader, ask_all, left},
        line,
    },
    runtime::{self, Socket, Whose},
};
use nacre_admin::{
    Command, Kind, Refusal, Reply, Verb,
    fs::{FsAnswer, FsRequest},
    pool::{PoolAnswer, PoolRequest},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{PidfdFlags, pidfd_open},
};
use std::{
    cell::OnceCell,
    collections::BTreeSet,
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Deadline for a process to accept a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Deadline for the end of a process that has exported its pool, in seconds.
const END_PATIENCE: i64 = 60;
/// How long a pool of ours may be silent before it is asked whether it is stuck.
const SILENCE: Duration = Duration::from_millis(500);
/// Deadline for the answer to that question.
const STUCK_PATIENCE: Duration = Duration::from_secs(2);
/// Deadline for all pools of ours that are not stuck: lists can be long.
const OURS_PATIENCE: Duration = Duration::from_secs(600);
/// Deadline for the whole answer of another user's process to a request of root that names its pool.
const FOREIGN_PATIENCE: Duration = Duration::from_secs(30);

/// Handler of the bytes of a stream, or of the request for them.
type BytesOfStream<'a> = dyn FnMut(&UnixStream, &mut dyn BufRead, u64) -> io::Result<()> + 'a;

/// An imported pool, by the socket of the process that owns it.
#[derive(Clone, Debug)]
pub struct Owned {
    socket: Socket,
    /// Deadline of the answer; `None`: it takes the time that it needs.
    until: Option<Instant>,
}

/// Returns the exit code for a kind of refusal.
fn exit(kind: Kind) -> Exit {
    match kind {
        Kind::NotFound => Exit::NotFound,
        Kind::Busy => Exit::Busy,
        Kind::Permission => Exit::Denied,
        Kind::Exists | Kind::Invalid | Kind::NoSpace | Kind::Quota | Kind::Io | Kind::Unreachable => Exit::Failure,
    }
}

/// Converts a refusal to a failure, made printable.
pub fn failure(refusal: &Refusal) -> Failure {
    told(refusal).printable()
}

/// Converts a refusal to a failure that the caller makes printable.
pub(super) fn told(refusal: &Refusal) -> Failure {
    Failure::new(&refusal.what).next(&refusal.next).exit(exit(refusal.kind))
}

impl Owned {
    /// Sends a request and shows notes until the answer.
    ///
    /// # Errors
    /// The refusal, or that there is no answer.
    fn ask(&self, command: &str, verb: Verb, note: &mut dyn FnMut(&str)) -> Result<Reply, Failure> {
        self.ask_with(command, verb, note, &mut |_, _, _| Err(io::ErrorKind::InvalidData.into()))
    }

    /// Sends a request and shows notes until the answer; `bytes` reads a stream from the reader, or writes one to
    /// the connection.
    fn ask_with(
        &self,
        command: &str,
        verb: Verb,
        note: &mut dyn FnMut(&str),
        bytes: &mut BytesOfStream<'_>,
    ) -> Result<Reply, Failure> {
        let failed = |error: CallError| match error {
            CallError::Failed(failure) => failure.printable(),
            CallError::Ended => {
                let ended = Failure::new("the process that owns the pool ended before it answered");
                // A pool that survives its process always has a listener.
                let goes_on = self.socket.connect(left(clock::now() + STUCK_PATIENCE)).is_ok();
                ended.next(match goes_on {
                    true => "another process goes on with it: see whether it was done, and try again if not",
                    false => "`nacre pool import` imports the pool again",
                })
            }
            unreachable => {
                unreachable.failure("owns the pool at", self.socket.path.display()).next("see whether it is stuck")
            }
        };
        let foreign = self.socket.foreign().is_some();
        let (watched, awaits) = (is_question(&verb) && !foreign, awaits(&verb));
        let until = self.until.or_else(|| (foreign && !awaits).then(|| clock::now() + FOREIGN_PATIENCE));
        let stream =
            self.socket.connect(until.map_or(PATIENCE, left).min(PATIENCE)).map_err(|error| failed(error.into()))?;
        stay_here(&stream, &verb, note)?;
        line::send(&stream, &Command { command: command.to_owned(), verb }).map_err(|error| failed(error.into()))?;
        let stuck = OnceCell::new();
        let mut reader =
            BufReader::new(Patient { stream: &stream, until, watched: watched.then_some(self), stuck: &stuck });
        // Texts named by others are made printable, and so are those of the pool's users on a terminal.
        let source = Source { harmless: foreign || io::stdout().is_terminal(), ..Source::process(foreign) };
        let told = &mut |line: &str| note(&printable(line.as_bytes()));
        let passed = &mut |reader: &mut dyn BufRead, count: u64| bytes(&stream, reader, count);
        rpc::answer_with(&mut reader, source, told, passed).map_err(|error| match (error, stuck.into_inner()) {
            (CallError::Unreachable(_), Some(stuck)) => stuck,
            (error, _) => failed(error),
        })
    }

    /// Sends a request about the pool.
    ///
    /// # Errors
    /// The refusal, or that there is no answer.
    pub fn pool(&self, command: &str, request: PoolRequest, note: &mut dyn FnMut(&str)) -> Result<PoolAnswer, Failure> {
        match self.ask(command, Verb::Pool(request), note)? {
            Reply::Pool(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Sends a request about its datasets.
    ///
    /// # Errors
    /// The refusal, or that there is no answer.
    pub fn fs(&self, command: &str, request: FsRequest, note: &mut dyn FnMut(&str)) -> Result<FsAnswer, Failure> {
        match self.ask(command, Verb::Fs(request), note)? {
            Reply::Fs(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Has a stream of snapshots written to `sink`.
    ///
    /// # Errors
    /// The refusal, or that `sink` fails.
    pub fn send(
        &self,
        command: &str,
        request: FsRequest,
        note: &mut dyn FnMut(&str),
        sink: &mut dyn Write,
    ) -> Result<FsAnswer, Failure> {
        let broken = OnceCell::new();
        let mut bytes = |_: &UnixStream, mut reader: &mut dyn BufRead, count: u64| {
            let copied = io::copy(&mut (&mut reader).take(count), sink)
                .inspect_err(|error| drop(broken.set(Failure::io("cannot write", "the stream", error))))?;
            if copied == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        };
        let answer = self.ask_with(command, Verb::Fs(request), note, &mut bytes);
        match (answer, broken.into_inner()) {
            (Ok(Reply::Fs(answer)), _) => Ok(answer),
            (Ok(_), _) => Err(nonsense()),
            (Err(_), Some(failure)) => Err(failure),
            (Err(failure), None) => Err(failure),
        }
    }

    /// Has it receive the stream of snapshots that `from` yields. After the return, a thread may still read from
    /// `from`.
    ///
    /// # Errors
    /// The refusal.
    pub fn receive(
        &self,
        command: &str,
        request: FsRequest,
        note: &mut dyn FnMut(&str),
        from: impl Read + Send + 'static,
    ) -> Result<FsAnswer, Failure> {
        let mut from = Some(from);
        let mut bytes = |stream: &UnixStream, _: &mut dyn BufRead, _: u64| {
            let Some(from) = from.take() else { return Ok(()) };
            let to = stream.try_clone()?;
            let pass = move || {
                // A receiver that takes no more has answered why, or will report that the stream ended early.
                if rpc::stream::pass_on(from, &to).is_err() {
                    let _ = to.shutdown(std::net::Shutdown::Write);
                }
            };
            std::thread::Builder::new().name("nacre-stream".to_owned()).spawn(pass).map(drop)
        };
        match self.ask_with(command, Verb::Fs(request), note, &mut bytes)? {
            Reply::Fs(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Whether the process still owns the pool: one that is just ending accepts a connection, and closes it without
    /// an answer.
    pub fn lives(&self) -> bool {
        match self.figures(PATIENCE) {
            Ok(_) | Err(CallError::Failed(_)) => true,
            Err(CallError::Ended) => false,
            // A process that takes this long still exists.
            Err(CallError::Unreachable(error)) => {
                matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::InvalidData)
            }
        }
    }

    /// Returns the pool's figures, which the process answers at any time, even while the pool is suspended.
    fn figures(&self, patience: Duration) -> Result<Reply, CallError> {
        let until = clock::now() + patience;
        let stream = self.socket.connect(patience)?;
        line::send(&stream, &Command { command: String::new(), verb: Verb::Pool(PoolRequest::List) })?;
        let mut reader = BufReader::new(DeadlineReader { stream: &stream, until: Some(until) });
        let source = Source { harmless: false, ..Source::process(self.socket.foreign().is_some()) };
        rpc::answer(&mut reader, source, &mut |_| {})
    }

    /// Returns why a request is not answered, unless the process is still working on it.
    fn stuck(&self) -> Option<Failure> {
        match self.figures(STUCK_PATIENCE) {
            Ok(Reply::Pool(PoolAnswer::Listed(figures))) if figures.waits && figures.suspended.is_some() => {
                let why = figures.suspended.unwrap_or_default();
                Some(
                    Failure::new(format!(
                        "pool '{}' does not answer: it is suspended ({})",
                        figures.name,
                        printable(why.as_bytes())
                    ))
                    .next(format!("`nacre pool status {}` says what to do", figures.name)),
                )
            }
            // The process works, even if it takes no writes any more, or it is ending: the request will be
            // answered, or the connection closed.
            Ok(_) | Err(CallError::Ended | CallError::Failed(_)) => None,
            Err(CallError::Unreachable(error))
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                None
            }
            Err(CallError::Unreachable(_)) => Some(self.silent()),
        }
    }

    fn silent(&self) -> Failure {
        let name = self.socket.path.file_stem().map(|name| printable(name.as_encoded_bytes())).unwrap_or_default();
        Failure::new(format!("pool '{name}' does not answer: its process is stuck"))
            .next("see what it waits for; its log lies beside its socket")
    }

    /// Whether the pool has just been exported.
    pub fn gone(&self) -> bool {
        !self.lives()
    }

    /// Returns a pidfd of the process that owns the pool, to wait for its end.
    ///
    /// # Errors
    /// It does not answer, or is gone.
    pub fn process(&self) -> io::Result<OwnedFd> {
        let stream = self.socket.connect(PATIENCE)?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        Ok(pidfd_open(peer.pid, PidfdFlags::empty())?)
    }
}

/// Waits for the end of a process: only then are its locks on devices released, whatever it has answered before.
pub fn wait_for_end(process: &OwnedFd) {
    let most = Timespec { tv_sec: END_PATIENCE, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&most)) {
            Err(rustix::io::Errno::INTR) => {}
            // The end of the process, or the deadline: the request is carried out either way.
            Ok(_) | Err(_) => return,
        }
    }
}

fn nonsense() -> Failure {
    Failure::new("the process that owns the pool answers something else than was asked")
        .next("is it of another version of nacre?")
}

/// Reads an answer: until a deadline, or as long as the pool is not known to be stuck.
struct Patient<'a> {
    stream: &'a UnixStream,
    until: Option<Instant>,
    /// Pool that is asked whether it is stuck.
    watched: Option<&'a Owned>,
    stuck: &'a OnceCell<Failure>,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (Some(owned), None) = (self.watched, self.until) else {
            return DeadlineReader { stream: self.stream, until: self.until }.read(buffer);
        };
        let mut patience = SILENCE;
        loop {
            match (DeadlineReader { stream: self.stream, until: Some(clock::now() + patience) }).read(buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if let Some(failure) = owned.stuck() {
                        // The cell is empty: the first failure ends the reading.
                        let _ = self.stuck.set(failure);
                        return Err(error);
                    }
                    patience = STUCK_PATIENCE;
                }
                read => return read,
            }
        }
    }
}

/// Whether a request only reads, which a pool answers unless it is stuck.
fn is_question(verb: &Verb) -> bool {
    match verb {
        Verb::Fs(request) => !request.changes() && !request.alone(),
        Verb::Pool(request) => {
            matches!(request, PoolRequest::List | PoolRequest::Status { .. } | PoolRequest::History)
        }
    }
}

/// Checks the mount namespace: the process of a pool mounts and unmounts in its own. A caller in another namespace
/// could not see the mount: a request that only mounts is refused, and a note is shown where mounting is only a
/// part of it.
fn stay_here(stream: &UnixStream, verb: &Verb, note: &mut dyn FnMut(&str)) -> Result<(), Failure> {
    let (what, alone) = match verb {
        Verb::Fs(FsRequest::Mount(_)) => ("mount", true),
        Verb::Fs(FsRequest::Unmount { .. }) => ("unmount", true),
        Verb::Fs(FsRequest::Create(new)) if !new.dry => ("mount", false),
        _ => return Ok(()),
    };
    let Some(there) = namespace_elsewhere(stream) else { return Ok(()) };
    let why = format!("the pool's process ({there}) is in another mount namespace");
    if alone {
        let next = format!(
            "nsenter -m -t {there} nacre fs {what} ... does it there; a pool that is exported, and imported here, is mounted here"
        );
        return Err(Failure::new(format!("cannot {what}: {why}, and would {what} there")).next(next));
    }
    note(&format!("{why}: what is mounted is seen there, not here"));
    Ok(())
}

/// Returns the process that answers, if it is known to be in another mount namespace than this one.
fn namespace_elsewhere(stream: &UnixStream) -> Option<rustix::process::RawPid> {
    let pid = rustix::net::sockopt::socket_peercred(stream).ok()?.pid.as_raw_nonzero().get();
    let [there, here] =
        [pid.to_string(), "self".to_owned()].map(|process| std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok());
    (there? != here?).then_some(pid)
}

/// Whether a request may take any time.
fn awaits(verb: &Verb) -> bool {
    let Verb::Pool(request) = verb else { return false };
    matches!(
        request,
        PoolRequest::AwaitScrub
            | PoolRequest::AwaitTrim
            | PoolRequest::AwaitFree
            | PoolRequest::Events { follow: true }
    )
}

/// Returns our pool with this socket, where a process listens.
fn answering(path: PathBuf) -> Option<Owned> {
    let socket = Socket::ours(path);
    let there = match socket.connect(PATIENCE) {
        // A process that does not accept in time exists all the same.
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied
        ),
        Ok(_) => true,
    };
    there.then_some(Owned { socket, until: None })
}

/// Returns the pool of this name, ours before other users'; `None` where it is not imported. Other users' pools
/// have a second to answer.
pub fn find(name: &str) -> Option<Owned> {
    let file = runtime_files::file(name);
    if let Some(owned) = answering(runtime::ours().join(&file)) {
        return Some(owned);
    }
    // A lost pool of ours is still meant by its name, even if another user has a pool of the same name.
    if !expected::lost(&[name.to_owned()]).is_empty() {
        return None;
    }
    let answers = |socket: &Socket| {
        let owned = Owned { socket: socket.clone(), until: None };
        matches!(owned.figures(control::FOREIGN_PATIENCE), Ok(Reply::Pool(_)))
    };
    let all = ask_all(runtime::named(&Whose::Everybody, &file), clock::now() + control::FOREIGN_PATIENCE, answers);
    all.into_iter().find_map(|(socket, answer)| (answer == Some(true)).then_some(Owned { socket, until: None }))
}

/// Whether we own a pool of this name and will continue to own it. Other users' pools of the same name do not
/// count.
pub fn lives(name: &str) -> bool {
    answering(runtime::ours().join(runtime_files::file(name))).is_some_and(|owned| owned.lives())
}

/// Returns the pool of this name. A process that is just ending is waited for: afterwards it is known whether it
/// has exported the pool.
///
/// # Errors
/// There is no such pool, in ZFS' words.
pub fn owned(name: &str) -> Result<Owned, Failure> {
    let until = clock::now() + PATIENCE;
    loop {
        if let Some(owned) = find(name) {
            return Ok(owned);
        }
        if let Some(lost) = expected::lost(&[name.to_owned()]).pop() {
            return Err(lost.failure());
        }
        if clock::now() >= until || !expected::all().iter().any(|expected| expected.name == name) {
            let name = printable(name.as_bytes());
            return Err(Failure::new(format!("cannot open '{name}': no such pool"))
                .exit(Exit::NotFound)
                .next("`nacre pool list` shows those that are imported, `nacre pool import` those that can be"));
        }
        clock::pause(Duration::from_millis(10));
    }
}

/// Returns the pools of these users. Other users' pools are not checked: whether they exist shows when they are
/// asked.
pub fn all(whose: &Whose) -> Vec<Owned> {
    let foreign =
        runtime::sockets(whose, runtime_files::SOCKET).into_iter().filter(|socket| socket.foreign().is_some());
    ours().into_iter().chain(foreign.map(|socket| Owned { socket, until: None })).collect()
}

/// Returns all pools that are ours: commands for all pools apply to these.
pub fn ours() -> Vec<Owned> {
    runtime::sockets(&Whose::Ours, runtime_files::SOCKET)
        .into_iter()
        .filter_map(|socket| answering(socket.path))
        .collect()
}

/// Asks several pools concurrently; returns answers and failures in the order of the pools. A pool exported
/// meanwhile is skipped, and other users' pools have a second together.
pub fn ask_each<R: Send + 'static>(
    pools: Vec<Owned>,
    ask: impl Fn(&Owned) -> Result<R, Failure> + Send + Sync + Clone + 'static,
) -> (Vec<R>, Vec<Failure>) {
    let (ours, foreign): (Vec<Owned>, Vec<Owned>) =
        pools.into_iter().partition(|owned| owned.socket.foreign().is_none());
    let (mut answers, mut failures, mut unheard) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (pools, patience, until) in [(ours, OURS_PATIENCE, false), (foreign, control::FOREIGN_PATIENCE, true)] {
        let sockets = pools.into_iter().map(|owned| owned.socket).collect();
        let end = clock::now() + patience;
        let ask = ask.clone();
        let asked = ask_all(sockets, end, move |socket| {
            let owned = Owned { socket: socket.clone(), until: until.then_some(end) };
            ask(&owned).map_err(|failure| {
                // A pool that does not answer is not asked once more.
                (owned.socket.foreign().is_none() && failure != owned.silent() && owned.gone(), failure)
            })
        });
        for (socket, answer) in asked {
            match (answer, socket.foreign()) {
                (Some(Ok(answer)), _) => answers.push(answer),
                (_, Some(uid)) => drop(unheard.insert(uid)),
                (Some(Err((true, _))), None) => {}
                (Some(Err((false, failure))), None) => failures.push(failure),
                (None, None) => failures.push(Owned { socket, until: None }.silent()),
            }
        }
    }
    for uid in unheard {
        crate::report::tell(&format!("user {uid} keeps sockets at which no pool answers"));
    }
    (answers, failures)
}
