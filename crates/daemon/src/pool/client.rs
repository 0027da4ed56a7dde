//! How commands reach the processes that own pools: a socket per pool in the directory for sockets
//! of whoever owns it.
//!
//! Root sees everybody's pools where it asks for them or names one, others their own. What comes
//! over a socket is made printable before it is shown. Another user's socket is believed where it,
//! its directory and whoever answers are that user's, and waited for until a point in time: nobody
//! can hinder root by pretending to be a pool. A pool of ours is waited for as long as it is not
//! stuck.

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

/// How long to wait for a process that does not accept.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for the end of a process that has let its pool go, seconds.
const END_PATIENCE: i64 = 60;
/// How long a pool of ours may be silent before it is asked whether it is stuck.
const SILENCE: Duration = Duration::from_millis(500);
/// How long it may take to answer that.
const STUCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long all pools of ours may take that are not stuck: lists can be long.
const OURS_PATIENCE: Duration = Duration::from_secs(600);
/// How long another user's process may take for all that it answers to what root tells its pool by
/// name.
const FOREIGN_PATIENCE: Duration = Duration::from_secs(30);

/// What is done with bytes of a stream, or with the announcement that they are awaited.
type BytesOfStream<'a> = dyn FnMut(&UnixStream, &mut dyn BufRead, u64) -> io::Result<()> + 'a;

/// A pool that somebody owns.
#[derive(Clone, Debug)]
pub struct Owned {
    socket: Socket,
    /// When it must have answered; `None`: it takes the time that it needs.
    until: Option<Instant>,
}

/// The exit code for a kind of refusal.
fn exit(kind: Kind) -> Exit {
    match kind {
        Kind::NotFound => Exit::NotFound,
        Kind::Busy => Exit::Busy,
        Kind::Permission => Exit::Denied,
        Kind::Exists | Kind::Invalid | Kind::NoSpace | Kind::Quota | Kind::Io | Kind::Unreachable => Exit::Failure,
    }
}

/// A refusal as the program says it.
pub fn failure(refusal: &Refusal) -> Failure {
    told(refusal).printable()
}

/// A refusal as it is told to whoever makes it printable.
pub(super) fn told(refusal: &Refusal) -> Failure {
    Failure::new(&refusal.what).next(&refusal.next).exit(exit(refusal.kind))
}

impl Owned {
    /// Asks, and shows notes meanwhile.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    fn ask(&self, command: &str, verb: Verb, note: &mut dyn FnMut(&str)) -> Result<Reply, Failure> {
        self.ask_with(command, verb, note, &mut |_, _, _| Err(io::ErrorKind::InvalidData.into()))
    }

    /// The same; `bytes` takes those of a stream from the reader, or passes some on to the
    /// connection.
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
                // One that survives is listened to all the time.
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
        // What others have named is shown as text, and so is what users of the pool have, to
        // whoever looks at it himself.
        let source = Source { harmless: foreign || io::stdout().is_terminal(), ..Source::process(foreign) };
        let told = &mut |line: &str| note(&printable(line.as_bytes()));
        let passed = &mut |reader: &mut dyn BufRead, count: u64| bytes(&stream, reader, count);
        rpc::answer_with(&mut reader, source, told, passed).map_err(|error| match (error, stuck.into_inner()) {
            (CallError::Unreachable(_), Some(stuck)) => stuck,
            (error, _) => failed(error),
        })
    }

    /// Asks something about the pool.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    pub fn pool(&self, command: &str, request: PoolRequest, note: &mut dyn FnMut(&str)) -> Result<PoolAnswer, Failure> {
        match self.ask(command, Verb::Pool(request), note)? {
            Reply::Pool(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Asks something about its datasets.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    pub fn fs(&self, command: &str, request: FsRequest, note: &mut dyn FnMut(&str)) -> Result<FsAnswer, Failure> {
        match self.ask(command, Verb::Fs(request), note)? {
            Reply::Fs(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Has a stream of snapshots written to `sink`.
    ///
    /// # Errors
    /// What it refuses, or that nobody takes it.
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

    /// Has it receive the stream of snapshots that `from` gives. When this returns, something may
    /// still be read from there by a thread of its own.
    ///
    /// # Errors
    /// What it refuses.
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
                // Whoever takes no more has said why, or says that the stream was cut.
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

    /// Whether the process still owns it: one that is just ending takes a connection, and closes it
    /// without an answer.
    pub fn lives(&self) -> bool {
        match self.figures(PATIENCE) {
            Ok(_) | Err(CallError::Failed(_)) => true,
            Err(CallError::Ended) => false,
            // Whoever takes so long is there.
            Err(CallError::Unreachable(error)) => {
                matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::InvalidData)
            }
        }
    }

    /// What everybody can be told at any time, whatever the pool waits for.
    fn figures(&self, patience: Duration) -> Result<Reply, CallError> {
        let until = clock::now() + patience;
        let stream = self.socket.connect(patience)?;
        line::send(&stream, &Command { command: String::new(), verb: Verb::Pool(PoolRequest::List) })?;
        let mut reader = BufReader::new(DeadlineReader { stream: &stream, until: Some(until) });
        let source = Source { harmless: false, ..Source::process(self.socket.foreign().is_some()) };
        rpc::answer(&mut reader, source, &mut |_| {})
    }

    /// Why a question is not answered, where that is not because the answer takes its time.
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
            // The process works, also where it takes no writes any more, or ends: the question is answered, or
            // the connection closed.
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

    /// Whether it has just been let go.
    pub fn gone(&self) -> bool {
        !self.lives()
    }

    /// The process that owns the pool, by a descriptor that tells of its end.
    ///
    /// # Errors
    /// It does not answer, or is gone.
    pub fn process(&self) -> io::Result<OwnedFd> {
        let stream = self.socket.connect(PATIENCE)?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        Ok(pidfd_open(peer.pid, PidfdFlags::empty())?)
    }
}

/// Waits for the end of a process: only then are its locks on devices gone, whatever it has
/// answered before.
pub fn wait_for_end(process: &OwnedFd) {
    let most = Timespec { tv_sec: END_PATIENCE, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&most)) {
            Err(rustix::io::Errno::INTR) => {}
            // The end, or that of our patience: what was asked for is done either way.
            Ok(_) | Err(_) => return,
        }
    }
}

fn nonsense() -> Failure {
    Failure::new("the process that owns the pool answers something else than was asked")
        .next("is it of another version of nacre?")
}

/// Waits for an answer: until a point in time, or as long as the pool is not known to be stuck.
struct Patient<'a> {
    stream: &'a UnixStream,
    until: Option<Instant>,
    /// The pool that is asked whether it is stuck.
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
                        // The first one is the only one.
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

/// Whether something is only asked, which a pool answers unless it is stuck.
fn is_question(verb: &Verb) -> bool {
    match verb {
        Verb::Fs(request) => !request.changes() && !request.alone(),
        Verb::Pool(request) => {
            matches!(request, PoolRequest::List | PoolRequest::Status { .. } | PoolRequest::History)
        }
    }
}

/// The process of a pool mounts and unmounts in its own mount namespace. Who is in another one
/// would be told of a mount that he cannot see: so he is refused what does nothing else, and told
/// so where mounting is only a part of it.
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

/// The process that answers, where it is known to be in another mount namespace than we are.
fn namespace_elsewhere(stream: &UnixStream) -> Option<rustix::process::RawPid> {
    let pid = rustix::net::sockopt::socket_peercred(stream).ok()?.pid.as_raw_nonzero().get();
    let [there, here] =
        [pid.to_string(), "self".to_owned()].map(|process| std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok());
    (there? != here?).then_some(pid)
}

/// Whether what is asked for may take any time.
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

/// The pool of this name that is ours, where somebody listens at its socket.
fn answering(path: PathBuf) -> Option<Owned> {
    let socket = Socket::ours(path);
    let there = match socket.connect(PATIENCE) {
        // Who does not accept in time is there all the same.
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied
        ),
        Ok(_) => true,
    };
    there.then_some(Owned { socket, until: None })
}

/// The pool of this name, ours before others'; `None` where nobody owns it. Who names a pool wants
/// to hear of it, whosever it is: other users have a second to answer.
pub fn find(name: &str) -> Option<Owned> {
    let file = runtime_files::file(name);
    if let Some(owned) = answering(runtime::ours().join(&file)) {
        return Some(owned);
    }
    // One of ours that was lost is meant still, whoever has taken its name since.
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

/// Whether we own a pool of this name and will go on doing so. Others' names are no hindrance.
pub fn lives(name: &str) -> bool {
    answering(runtime::ours().join(runtime_files::file(name))).is_some_and(|owned| owned.lives())
}

/// The pool of this name. A process that is just ending is waited for: it is known then whether it has
/// exported the pool.
///
/// # Errors
/// In ZFS' words: there is none.
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

/// The pools of these users. Whether others' are there shows when they are asked.
pub fn all(whose: &Whose) -> Vec<Owned> {
    let foreign =
        runtime::sockets(whose, runtime_files::SOCKET).into_iter().filter(|socket| socket.foreign().is_some());
    ours().into_iter().chain(foreign.map(|socket| Owned { socket, until: None })).collect()
}

/// All pools that are ours: what is done to all is done to these.
pub fn ours() -> Vec<Owned> {
    runtime::sockets(&Whose::Ours, runtime_files::SOCKET)
        .into_iter()
        .filter_map(|socket| answering(socket.path))
        .collect()
}

/// What several pools answer to a question, asked side by side; and why not, in the order of the
/// pools. One that was let go meanwhile says nothing, and other users' have a second together.
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
                // Who does not answer is not asked once more.
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
