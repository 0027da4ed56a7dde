//! Idle watch: marks on file systems are replaced by marks on the files and directories that the
//! front end knows.
//!
//! A mark on a file system gets an event for every change on it, and every change there waits until
//! its event is queued. For an unused mount, all these events are useless. The front end decides
//! when to become idle (`Layer::rest`): after many changes to files that it does not know. The
//! kernel's caches of a mount contain attributes and pages of files that the front end knows, and
//! names in directories that it knows; a mark on each of these gets events for all their changes,
//! by whatever name or mount they are made. So no cache need be dropped, and changes of cached
//! files are noticed as soon as before.
//!
//! Marks on single files miss changes of files that are not known yet. So an operation that may
//! find something new (a name, a listing, a creation) calls [`HostShared::attend`] before it reads,
//! which restores the marks on file systems first. Operations on known files do not need this.
//!
//! A host is *awake*, *drowsy* (the front end wants it to become idle, and look-ups are noticed),
//! or *resting* (idle):
//! * awake -> drowsy -> resting: `rest(None)`; then the front end waits until all earlier requests
//!   have been answered, so that each either has made its result known, or came later and has
//!   called `attend`; then `rest(known)` marks the known files, piece by piece, and only then, if
//!   it is still drowsy, the host is idle;
//! * drowsy -> awake, resting -> awake: [`HostShared::attend`].
//!
//! Hosts of a watch group share marks. Those on file systems are removed when all of its hosts are
//! idle; as soon as one is used they are restored, the marks on single files are removed, and all
//! hosts are awake.
//!
//! Invariants: new marks are set before old ones are removed, in both directions; a thread that
//! removes the marks on single files makes all hosts of the group awake, so that no host is idle
//! without its own marks. `Marks::changing` is held while marks on file systems or all single marks
//! are removed, and while a host becomes idle, ends that, or joins; it is taken before the members'
//! lock, and no request waits for more than system calls under it.

use super::{super::HostShared, Method, Running, event_loop, marks::Marks};
use crate::{
    host::{hosted, node::HostNode},
    rest_state::{AWAKE, DROWSY, RESTING},
};
use nacre_sys::{credentials, fanotify, inode::proc_path};
use nacre_vfs::{Kind, Node};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

impl Running {
    /// Open files of all marked file systems.
    fn marked(&self) -> Vec<Arc<OwnedFd>> {
        self.mounts.lock().values().cloned().collect()
    }
}

impl HostShared {
    /// Ends idleness. Called before an operation reads anything that may be unknown.
    pub(in super::super) fn attend(&self) {
        let rest = &self.watch.rest;
        if rest.is(AWAKE) || rest.turns(DROWSY, AWAKE) {
            return;
        }
        if let Some(marks) = self.watch.running.get().and_then(|running| running.marks.as_ref()) {
            marks.wake(self);
        }
    }

    /// Implements `Layer::rest`.
    pub(in super::super) fn rest(&self, known: Option<&[Node]>) -> bool {
        let Some((running, marks)) =
            self.watch.running.get().and_then(|running| Some((running, running.marks.as_ref()?)))
        else {
            return known.is_some();
        };
        let rest = &self.watch.rest;
        let Some(known) = known else {
            rest.turns(AWAKE, DROWSY);
            return !running.mounts.lock().is_empty();
        };
        let marked = !rest.is(AWAKE) && (rest.is(RESTING) || known.iter().all(|node| self.mark(running, marks, node)));
        if marked && !known.is_empty() {
            return true;
        }
        marks.settle_down(self, marked)
    }

    /// Marks a known file. Returns whether no change of it can be missed.
    fn mark(&self, running: &Running, marks: &Marks, node: &Node) -> bool {
        let Ok(node) = hosted(node) else { return false };
        if running.method(&self.watch, node.device()) != Some(Method::Marked) {
            // It is not cached, or watched by another method.
            return true;
        }
        self.try_mark(marks, &node)
            .inspect_err(|error| tracing::debug!(%error, "a file cannot be heard by itself: no rest"))
            .is_ok()
    }

    fn try_mark(&self, marks: &Marks, node: &Arc<HostNode>) -> io::Result<()> {
        let pin = self.pin(node).map_err(|error| io::Error::from_raw_os_error(error.raw()))?;
        let mask = if node.kind() == Kind::Directory { event_loop::EVENTS } else { event_loop::OF_FILES };
        fanotify::mark_inode(marks.group(), &proc_path(pin.fd()), mask)
    }
}

impl Marks {
    /// Makes the host idle, unless it is awake or `marked` is false; returns whether it is idle.
    fn settle_down(&self, shared: &HostShared, marked: bool) -> bool {
        let _one_at_a_time = self.changing.lock();
        let rest = &shared.watch.rest;
        let rests = marked && (rest.is(RESTING) || rest.turns(DROWSY, RESTING));
        let members = self.hearers();
        let done = if members.iter().all(|member| member.shared.watch.rest.is(RESTING)) {
            fanotify::unmark_file_systems(self.group())
        } else if !members.iter().any(|member| member.shared.watch.rest.is(RESTING)) {
            // Also marks of other hosts that are drowsy and not idle yet.
            members.iter().for_each(|member| {
                member.shared.watch.rest.turns(DROWSY, AWAKE);
            });
            fanotify::unmark_inodes(self.group())
        } else {
            Ok(())
        };
        if let Err(error) = done {
            tracing::debug!(%error, "marks that are not needed stay");
        }
        rests
    }

    /// Makes all hosts awake, as one is used.
    fn wake(&self, shared: &HostShared) {
        let _one_at_a_time = self.changing.lock();
        if shared.watch.rest.is(AWAKE) {
            return;
        }
        let members = self.hearers();
        let done = credentials::with_own_identity(|| {
            for member in &members {
                for file in member.shared.watch.running.get().map(Running::marked).unwrap_or_default() {
                    event_loop::mark(self.group(), file.as_fd())?;
                }
            }
            // Single marks that remain are harmless: the events of both marks are merged into one.
            fanotify::unmark_inodes(self.group())
        });
        if let Err(error) = done.and_then(|done| done) {
            tracing::error!(%error, "file systems cannot be watched as a whole any more");
            self.fail();
        }
        members.iter().for_each(|member| member.shared.watch.rest.set(AWAKE));
    }
}
