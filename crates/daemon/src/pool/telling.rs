//! What the mounts of a pool tell `nacre status`, `top` and `metrics`, and how `nacre umount` ends
//! them: as every other mount, each has a control socket.
//!
//! Used by `mounts.rs`. Invariants: a socket is there before the verb that mounts returns, and goes
//! before its mount does; a mount without one serves files all the same.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering},
    mpsc,
};
use std::{thread, time::Duration};

use super::{carrier::Carrier, left::PoolNotes};
use crate::{
    clock,
    control::{Answer, Request},
    control_sockets::{ControlSockets, Maker},
    failure::{Exit, Failure},
    figures, handover,
    report::path_text,
    rpc::endpoint::Listener,
    unmount,
};
use nacre_pool::engine::Pool;

/// So long a pool may take to commit before another program goes on with it, which replays what is not.
/// Whoever asked for that waits no longer than [`control`] does.
const SHORTENING: Duration = Duration::from_secs(3);

/// The sockets of a pool's mounts.
pub(super) struct Telling {
    /// Who goes on with all of them.
    notes: Option<Arc<PoolNotes>>,
    pool: Weak<Pool>,
    /// None where no thread could be had to listen.
    listener: Option<Arc<Listener>>,
    next: AtomicU64,
}

impl Telling {
    /// Starts to listen; no mount is told of yet.
    pub fn start(pool: &Arc<Pool>, notes: Option<Arc<PoolNotes>>) -> Telling {
        let listener = Listener::start()
            .inspect_err(|failure| tracing::warn!("`nacre status` will not find the mounts of this pool: {failure}"));
        Telling { notes, pool: Arc::downgrade(pool), listener: listener.ok(), next: AtomicU64::new(0) }
    }

    /// Opens the socket of a mount; `ended` is called, by a thread of its own, when the mount was
    /// ended through it.
    pub fn of(
        &self,
        carrier: &Arc<Carrier>,
        source: &str,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Option<Arc<ControlSockets>> {
        let about = figures::About {
            source: source.to_owned(),
            engine_reason: "it is a file system of a pool".to_owned(),
            guarded: self.notes.as_ref().map(|notes| notes.guarded.clone()),
            started: clock::now(),
        };
        let device = carrier.mount.device_number();
        // The socket must not keep the mount.
        let (carrier, ended): (Weak<Carrier>, _) = (Arc::downgrade(carrier), Arc::new(ended));
        let (notes, pool) = (self.notes.clone(), self.pool.clone());
        let answer = move |request| match carrier.upgrade() {
            Some(carrier) => answer(&carrier, (&about, notes.as_deref(), &pool), request, &ended),
            None => Err(Failure::new("the mount has ended").exit(Exit::NotFound)),
        };
        let name = format!("{}-{}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed));
        let listener = Arc::clone(self.listener.as_ref()?);
        let maker = Maker { listener, name, device, answering: Arc::new(answer), note: Box::new(|_| ()) };
        Some(ControlSockets::open(maker, None))
    }
}

fn answer<E: Fn() + Send + Sync + 'static>(
    carrier: &Arc<Carrier>,
    (about, notes, pool): (&figures::About, Option<&PoolNotes>, &Weak<Pool>),
    request: Request,
    ended: &Arc<E>,
) -> Result<Answer, Failure> {
    let refused = match request {
        Request::Status => {
            let stack = format!("{}{}", figures::OF_POOL, about.source);
            return Ok(Answer::Status(Box::new(figures::report(about, stack, carrier.mount.status()))));
        }
        Request::Unmount { lazy } => match unmount(carrier, lazy) {
            Ok(()) => {
                let (ended, carrier) = (Arc::clone(ended), Arc::clone(carrier));
                let clear = move || {
                    carrier.mount.wait();
                    drop(carrier);
                    ended();
                };
                // Whoever clears the mount away closes this socket, and waits for this answer.
                let clearing = std::thread::Builder::new().name("nacre-unmounted".to_owned()).spawn(clear);
                if let Err(error) = clearing {
                    tracing::warn!(%error, "an ended mount stays on the list until somebody looks");
                }
                return Ok(Answer::Done);
            }
            Err(failure) => failure,
        },
        Request::Reload { .. } => Failure::new("this mount has no rules that could be changed")
            .next("`nacre fs set` changes what a file system does"),
        Request::ResizeCage { .. } => {
            Failure::new("this mount has no cage").next("`nacre fs set quota=SIZE` limits a file system")
        }
        Request::Union(_) => Failure::new("this mount is no union"),
        Request::HandOver | Request::Upgrade { .. } => match (notes, request) {
            (Some(notes), Request::Upgrade { program }) => {
                handover::note(&notes.guarded, notes.text(), &program)?;
                pool.upgrade().into_iter().for_each(shorten_kept);
                return Ok(Answer::Done);
            }
            (Some(notes), _) => {
                return Ok(Answer::HandOver(Box::new(handover::hand_over(&notes.guarded, notes.text()))));
            }
            (None, _) => Failure::new("mounts of a pool end with the process that owns it")
                .next("export the pool, and import it with --survive"),
        },
    };
    Err(refused)
}

/// Has the pool commit, so that users wait shortly for the program that goes on. One that cannot, or not
/// soon, is gone on with all the same.
fn shorten_kept(pool: Arc<Pool>) {
    let (done, committed) = mpsc::channel();
    // Nobody may wait for it any more.
    let commit = move || drop(done.send(pool.shorten_kept()));
    let started = thread::Builder::new().name("nacre-shortens".to_owned()).spawn(commit);
    let shortened = started.map(|_| committed.recv_timeout(SHORTENING));
    if !matches!(shortened, Ok(Ok(Ok(())))) {
        tracing::info!(?shortened, "the program that goes on will have more to replay");
    }
}

/// What the kernel holds of files is passed on first: unmounting says so where that fails.
fn unmount(carrier: &Carrier, lazy: bool) -> Result<(), Failure> {
    let ended = carrier.mount.flush().and_then(|()| carrier.mount.unmount(lazy));
    ended.map_err(|error| unmount::refused(&path_text(&carrier.mount.status().mountpoint), &error))
}
