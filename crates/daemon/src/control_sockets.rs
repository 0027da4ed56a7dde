//! The control sockets of a mount, open from before it answers to its end.
//!
//! Used by [`crate::serving`] and by the mounts of pools. The own socket of a mount that survives its process is
//! recorded ([`LeftSocket`]): the next process listens on it at once, so that commands find the mount during the
//! failover, and no space in the runtime directory is needed. If a socket cannot be made, the mount is served
//! without it, and the attempt is repeated until it succeeds.

use crate::{
    clock,
    control::{self, Answer, Request},
    failure::Failure,
    rpc::endpoint::{Endpoint, Listener},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

/// Interval of attempts to make a socket.
pub const RETRY: Duration = Duration::from_secs(2);

/// Function that answers the requests to a mount.
pub type Answering = Arc<dyn Fn(Request) -> Result<Answer, Failure> + Send + Sync>;

/// The own socket of a mount, as part of the handoff state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftSocket {
    /// Number of the listening descriptor.
    pub descriptor: i32,
    path: PathBuf,
}

impl LeftSocket {
    /// Listens on it from now on; until `answering` is set, it answers that `mountpoint` is being taken over.
    /// `None` where the socket's file is gone.
    pub fn take_over(
        &self,
        listener: &Arc<Listener>,
        mountpoint: String,
        answering: Arc<OnceLock<Answering>>,
    ) -> Option<Endpoint> {
        let is_there = fs::symlink_metadata(&self.path).is_ok_and(|there| there.file_type().is_socket());
        if !is_there {
            return None;
        }
        let pid = std::process::id();
        let answer = move |request| match answering.get() {
            Some(answering) => answering(request),
            None => Ok(Answer::TakingOver { mountpoint: mountpoint.clone(), pid }),
        };
        let taken = Endpoint::left(listener, &self.path, self.descriptor, control::owners(answer));
        taken
            .and_then(|endpoint| endpoint.open().map(|()| endpoint))
            .inspect_err(|failure| tracing::warn!("the control socket is made anew: {failure}"))
            .ok()
    }
}

/// Parameters of the control sockets of a mount.
pub struct Maker {
    /// Thread that listens.
    pub listener: Arc<Listener>,
    /// Name of the own socket.
    pub name: String,
    /// The mount's device number; `Some` if other users than the owner may see the mount.
    pub device: Option<u64>,
    /// Function that answers requests.
    pub answering: Answering,
    /// Called with each own socket that is made, to record it.
    pub note: Box<dyn Fn(LeftSocket) + Send + Sync>,
}

impl Maker {
    fn own(&self) -> Result<Endpoint, Failure> {
        let answering = Arc::clone(&self.answering);
        let service = control::owners(move |request| answering(request));
        let made = Endpoint::start(&self.listener, &control::place(&self.name)?, service)?;
        (self.note)(LeftSocket { descriptor: made.descriptor(), path: made.path.clone() });
        Ok(made)
    }

    fn with_one_for_all(&self, own: Endpoint) -> Sockets {
        let answering = Arc::clone(&self.answering);
        let for_all = self
            .device
            .and_then(|device| control::for_all(&self.listener, &own.path, device, move |request| answering(request)));
        Sockets { own, for_all }
    }
}

/// Open sockets: the owner's, and a public one where other users may see the mount.
struct Sockets {
    own: Endpoint,
    for_all: Option<Endpoint>,
}

enum State {
    Open(Sockets),
    /// They could not be made yet.
    Missing,
    Closed,
}

/// The control sockets of a mount. Dropped, they close.
pub struct ControlSockets(Mutex<State>);

impl ControlSockets {
    /// Makes the sockets, or takes over the own one of a crashed process.
    pub fn open(maker: Maker, left: Option<Endpoint>) -> Arc<ControlSockets> {
        let state = match left.map_or_else(|| maker.own(), Ok) {
            Ok(own) => return Arc::new(ControlSockets(Mutex::new(State::Open(maker.with_one_for_all(own))))),
            Err(failure) => {
                tracing::warn!("`nacre status` does not find this mount, until its socket can be made: {failure}");
                State::Missing
            }
        };
        let sockets = Arc::new(ControlSockets(Mutex::new(state)));
        let missing = Arc::downgrade(&sockets);
        let retry = move || loop {
            clock::pause(RETRY);
            let Some(sockets) = missing.upgrade() else { return };
            if sockets.retry(&maker) {
                return;
            }
        };
        let thread = thread::Builder::new().name("nacre-socket".to_owned()).stack_size(256 << 10).spawn(retry);
        if let Err(error) = thread {
            tracing::warn!(%error, "the control socket is not tried again");
        }
        sockets
    }

    /// Tries to make the sockets; returns whether no further attempt is needed.
    fn retry(&self, maker: &Maker) -> bool {
        let mut state = self.0.lock();
        if let State::Missing = *state
            && let Ok(own) = maker.own()
        {
            *state = State::Open(maker.with_one_for_all(own));
            tracing::info!("`nacre status` finds this mount from now on");
        }
        !matches!(*state, State::Missing)
    }

    /// Closes the sockets, as [`Endpoint::close`].
    pub fn close(&self) {
        let mut state = self.0.lock();
        match &*state {
            State::Open(sockets) => {
                sockets.for_all.iter().for_each(Endpoint::close);
                sockets.own.close();
            }
            State::Missing => *state = State::Closed,
            State::Closed => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead, BufReader, Write},
        os::{
            fd::IntoRawFd,
            unix::net::{UnixListener, UnixStream},
        },
        path::Path,
    };

    /// The line that a socket answers to a question for figures.
    fn ask(path: &Path) -> String {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(b"\"status\"\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn who_asks_during_a_takeover_hears_of_it() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("1.sock");
        let descriptor = UnixListener::bind(&path).unwrap().into_raw_fd();
        let left = LeftSocket { descriptor, path: path.clone() };
        let answering = Arc::new(OnceLock::<Answering>::new());
        let listener = Listener::start().unwrap();
        let endpoint = left.take_over(&listener, "/m".to_owned(), Arc::clone(&answering)).unwrap();
        assert!(ask(&path).contains("{\"taking-over\":{\"mountpoint\":\"/m\",\"pid\":"), "{}", ask(&path));
        let _ = answering.set(Arc::new(|_| Ok(Answer::Done)));
        assert!(ask(&path).contains("\"done\""));
        drop(endpoint);
        assert!(!path.exists());
        assert!(left.take_over(&listener, "/m".to_owned(), answering).is_none(), "it is lost");
    }
}
