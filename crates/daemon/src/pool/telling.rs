//! Control sockets of a pool's mounts, for `nacre status`, `top`, `metrics` and `nacre umount`, as every other
//! mount has one.
//!
//! Used by `mounts.rs`. Invariants: a socket exists before the verb that mounts returns, and is removed before its
//! mount ends; a mount without a socket serves files all the same.

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

/// Deadline for a commit before another program takes over (it replays everything uncommitted). The requester waits
/// no longer than [`control`] does.
const SHORTENING: Duration = Duration::from_secs(3);

/// The control sockets of a pool's mounts.
pub(super) struct Telling {
    /// Handoff state of all mounts, where they survive this process.
    notes: Option<Arc<PoolNotes>>,
    pool: Weak<Pool>,
    /// `None` where no listening thread could be started.
    listener: Option<Arc<Listener>>,
    next: AtomicU64,
}

impl Telling {
    /// Starts to listen; there are no sockets yet.
    pub fn start(pool: &Arc<Pool>, notes: Option<Arc<PoolNotes>>) -> Telling {
        let listener = Listener::start()
            .inspect_err(|failure| tracing::warn!("`nacre status` will not find the mounts of this pool: {failure}"));
        Telling { notes, pool: Arc::downgrade(pool), listener: listener.ok(), next: AtomicU64::new(0) }
    }

    /// Opens the socket of a mount; `ended` is called, by a thread of its own, when the mount was ended through it.
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
        // The socket must not keep the mount alive.
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
                // The thread that removes the mount closes this socket, and so waits for this answer.
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

/// Has the pool commit, so that users wait only shortly for the program that takes over. It takes over even if the
/// commit fails or is late.
fn shorten_kept(pool: Arc<Pool>) {
    let (done, committed) = mpsc::channel();
    // The receiver may have stopped waiting.
    let commit = move || drop(done.send(pool.shorten_kept()));
    let started = thread::Builder::new().name("nacre-shortens".to_owned()).spawn(commit);
    let shortened = started.map(|_| committed.recv_timeout(SHORTENING));
    if !matches!(shortened, Ok(Ok(Ok(())))) {
        tracing::info!(?shortened, "the program that goes on will have more to replay");
    }
}

/// Unmounts; dirty pages are written back first, since an unmount reports errors of that.
fn unmount(carrier: &Carrier, lazy: bool) -> Result<(), Failure> {
    let ended = carrier.mount.flush().and_then(|()| carrier.mount.unmount(lazy));
    ended.map_err(|error| unmount::refused(&path_text(&carrier.mount.status().mountpoint), &error))
}
