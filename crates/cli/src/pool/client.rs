//! How commands reach the processes that own pools: a socket per pool in the directory for sockets of whoever owns it.
//!
//! Root sees everybody's pools, others their own. What comes over a socket is made printable before it is shown. Another user's socket is believed where
//! it, its directory and whoever answers are that user's, and only for as long as it goes on answering: nobody can hinder root by pretending to be a pool.

use super::wire::{self, ANSWER_MAX};
use crate::{
    control,
    failure::{Exit, Failure},
    report::printable,
    runtime,
};
use nacre_admin::{Kind, Order, Refusal, Told, Verb, fs, pool};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{AtFlags, CWD, FileType, statat},
    process::{PidfdFlags, pidfd_open},
};
use std::{
    io::{self, BufReader, IsTerminal},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

/// How long to wait for a process that does not accept.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for the end of a process that has let its pool go, seconds.
const END_PATIENCE: i64 = 60;
/// How long another user's process may be silent.
const FOREIGN_PATIENCE: Duration = Duration::from_secs(30);
/// The longest answer that is taken from another user's process, bytes.
const FOREIGN_ANSWER_MAX: u64 = 64 << 20;
/// How the names of sockets end.
const END: &str = "pool";
/// Names longer than this are cut, and told apart by a number: addresses of sockets have room for 107 bytes.
const NAME_MOST: usize = 48;

/// The file in the directory for sockets that stands for the pool of a name. Pure.
pub fn file(name: &str) -> String {
    // Names of pools are ASCII, so they may be cut anywhere.
    match name.get(..NAME_MOST) {
        Some(start) if name.len() > NAME_MOST => {
            let [a, b, c, d, ..] = nacre_pool::checksum::structure(name.as_bytes());
            format!("{start}-{:08x}.{END}", u32::from_le_bytes([a, b, c, d]))
        }
        _ => format!("{name}.{END}"),
    }
}

/// A pool that somebody owns.
#[derive(Debug)]
pub struct Owned {
    socket: PathBuf,
    /// The user whose it is, where that is another one.
    foreign: Option<u32>,
}

/// The exit code for a kind of refusal.
fn exit(kind: Kind) -> Exit {
    match kind {
        Kind::NotFound => Exit::NotFound,
        Kind::Busy => Exit::Busy,
        Kind::Permission => Exit::Denied,
        Kind::Exists | Kind::Invalid | Kind::NoSpace | Kind::Quota | Kind::Io => Exit::Failure,
    }
}

/// A refusal as the program says it.
pub fn failure(refusal: &Refusal) -> Failure {
    let next: Vec<String> = refusal.next.lines().map(|line| printable(line.as_bytes())).collect();
    Failure::new(printable(refusal.what.as_bytes())).next(next.join("\n")).exit(exit(refusal.kind))
}

impl Owned {
    /// Asks, and shows notes meanwhile.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    fn ask(&self, command: &str, verb: Verb, note: &mut dyn FnMut(&str)) -> Result<Told, Failure> {
        let failed = |error: &io::Error| {
            Failure::io("cannot reach the process that owns the pool at", self.socket.display(), error).next("see whether it is stuck")
        };
        let stream = connect(&self.socket, self.foreign).map_err(|error| failed(&error))?;
        let most = if self.foreign.is_some() { FOREIGN_ANSWER_MAX } else { ANSWER_MAX };
        wire::send(&stream, &Order { command: command.to_owned(), verb }).map_err(|error| failed(&error))?;
        let mut reader = BufReader::new(&stream);
        // What others have named is shown as text, and so is what users of the pool have, to whoever looks at it himself.
        let receive =
            if self.foreign.is_some() || io::stdout().is_terminal() { wire::receive_harmless::<Told> } else { wire::receive::<Told> };
        loop {
            match receive(&mut reader, most).map_err(|error| failed(&error))? {
                None => {
                    return Err(Failure::new("the process that owns the pool ended before it answered")
                        .next("`nacre pool import` imports the pool again"));
                }
                Some(Told::Note(line)) => note(&printable(line.as_bytes())),
                Some(Told::Refused(refusal)) => return Err(failure(&refusal)),
                Some(told) => return Ok(told),
            }
        }
    }

    /// Asks something about the pool.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    pub fn pool(&self, command: &str, request: pool::Request, note: &mut dyn FnMut(&str)) -> Result<pool::Answer, Failure> {
        match self.ask(command, Verb::Pool(request), note)? {
            Told::Pool(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Asks something about its datasets.
    ///
    /// # Errors
    /// What it refuses, or that it does not answer.
    pub fn fs(&self, command: &str, request: fs::Request, note: &mut dyn FnMut(&str)) -> Result<fs::Answer, Failure> {
        match self.ask(command, Verb::Fs(request), note)? {
            Told::Fs(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    /// Whether the process still owns it: one that is just ending takes a connection, and closes it without an answer.
    pub fn lives(&self) -> bool {
        let ask = || {
            let stream = connect(&self.socket, self.foreign)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            wire::send(&stream, &Order { command: String::new(), verb: Verb::Pool(pool::Request::List) })?;
            wire::receive::<Told>(&mut BufReader::new(&stream), ANSWER_MAX)
        };
        match ask() {
            Ok(told) => told.is_some(),
            // Whoever takes so long is there.
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::InvalidData),
        }
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
        let stream = connect(&self.socket, self.foreign)?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        Ok(pidfd_open(peer.pid, PidfdFlags::empty())?)
    }
}

/// Waits for the end of a process: only then are its locks on devices gone, whatever it has answered before.
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
    Failure::new("the process that owns the pool answers something else than was asked").next("is it of another version of nacre?")
}

/// Connects to a socket; to that of another user only where that user answers.
fn connect(socket: &Path, foreign: Option<u32>) -> io::Result<UnixStream> {
    let stream = control::connect(socket, PATIENCE)?;
    if let Some(uid) = foreign {
        if rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw() != uid {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(Some(FOREIGN_PATIENCE))?;
    }
    Ok(stream)
}

/// The pool whose socket this is, where somebody listens there.
fn answering(directory: &Path, socket: PathBuf) -> Option<Owned> {
    let foreign = if directory == runtime::ours() { None } else { Some(owner(directory, FileType::Directory)?) };
    if foreign.is_some_and(|uid| owner(&socket, FileType::Socket) != Some(uid)) {
        return None;
    }
    match connect(&socket, foreign) {
        // Of ours, who does not accept in time is there all the same.
        Err(error)
            if foreign.is_none()
                && !matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied
                ) => {}
        Err(_) => return None,
        Ok(_) => {}
    }
    Some(Owned { socket, foreign })
}

/// Whose a file of this type is; `None` for another type.
fn owner(path: &Path, wanted: FileType) -> Option<u32> {
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == wanted).then_some(stat.st_uid)
}

/// The pool of this name, ours before others'; `None` where nobody owns it.
pub fn find(name: &str) -> Option<Owned> {
    let file = file(name);
    runtime::all().into_iter().find_map(|directory| {
        let socket = directory.join(&file);
        answering(&directory, socket)
    })
}

/// Whether we own a pool of this name and will go on doing so. Others' names are no hindrance.
pub fn lives(name: &str) -> bool {
    let ours = runtime::ours();
    let socket = ours.join(file(name));
    answering(&ours, socket).is_some_and(|owned| owned.lives())
}

/// The pool of this name.
///
/// # Errors
/// In ZFS' words: there is none.
pub fn owned(name: &str) -> Result<Owned, Failure> {
    find(name).ok_or_else(|| {
        let name = printable(name.as_bytes());
        Failure::new(format!("cannot open '{name}': no such pool"))
            .exit(Exit::NotFound)
            .next("`nacre pool list` shows those that are imported, `nacre pool import` those that can be")
    })
}

/// All pools that somebody owns.
pub fn all() -> Vec<Owned> {
    runtime::all().iter().flat_map(|directory| within(directory)).collect()
}

/// All pools that are ours: what is done to all is done to these.
pub fn ours() -> Vec<Owned> {
    within(&runtime::ours())
}

fn within(directory: &Path) -> Vec<Owned> {
    let sockets = runtime::children(directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == END));
    sockets.filter_map(|socket| answering(directory, socket)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_names_that_fit() {
        assert_eq!(file("tank"), "tank.pool");
        let (long, other) = ("a".repeat(255), format!("{}b", "a".repeat(254)));
        assert_ne!(file(&long), file(&other));
        for name in [long, other, "x".repeat(NAME_MOST)] {
            assert!(Path::new("/run/user/4294967294/nacre").join(file(&name)).as_os_str().len() < 108, "{name}");
        }
    }
}
