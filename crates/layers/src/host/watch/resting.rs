//! Hearing less while nobody asks: marks on file systems give way to marks on the files and
//! directories that the door knows.
//!
//! A mark on a file system hears of everything on it, and every change there waits for that to be
//! written down. For a mount that nobody uses this is all in vain. The door says when
//! (`Layer::rest`): many changes have come that were about nothing it knows. What the kernel holds
//! of a host is attributes and pages of files that the door knows, and names in directories that it
//! knows; a mark on each of these hears all changes of that, by whatever name or mount they are
//! made. So nothing that is kept need be dropped, and changes of it are heard as soon as ever.
//!
//! What a mark on single files does not hear is what nobody knows yet. So whoever may find
//! something new (a name, a listing, a creation) calls [`HostShared::attend`] before he reads,
//! which puts the marks on file systems back first. Questions about files that are known already
//! need none of this.
//!
//! A host is *awake*, *drowsy* (the door wants it to rest, and it is noticed whether somebody asks
//! for names), or *resting*:
//! * awake -> drowsy -> resting: `rest(None)`; then the door waits until all requests that came
//!   before have been answered, so that each either has made known what it found, or came later and
//!   has attended; then `rest(known)` marks what is known, piece by piece, and only then, if it is
//!   still drowsy, it rests;
//! * drowsy -> awake, resting -> awake: [`HostShared::attend`].
//!
//! Hosts of a watch group share marks. Those on file systems go when all of its hosts rest; as
//! soon as one is wanted they come back, the marks on single files go, and all hosts are awake.
//!
//! Invariants: new marks are in place before old ones go, in both directions; whoever removes the
//! marks on single files makes all hosts of the group awake, so that none rests without its own.
//! `Marks::changing` is held while marks on file systems or all single marks are removed, and while
//! a host begins or ends its rest, or joins; it is taken before the members' lock, and no request
//! waits for more than system calls under it.

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
    /// An open file of each marked file system.
    fn marked(&self) -> Vec<Arc<OwnedFd>> {
        self.mounts.lock().values().cloned().collect()
    }
}

impl HostShared {
    /// Called before anything is looked for that nobody may know yet.
    pub(in super::super) fn attend(&self) {
        let rest = &self.watch.rest;
        if rest.is(AWAKE) || rest.turns(DROWSY, AWAKE) {
            return;
        }
        if let Some(marks) = self.watch.running.get().and_then(|running| running.marks.as_ref()) {
            marks.wake(self);
        }
    }

    /// See `Layer::rest`.
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

    /// Hears a file by itself. Answers whether nothing about it can be missed.
    fn mark(&self, running: &Running, marks: &Marks, node: &Node) -> bool {
        let Ok(node) = hosted(node) else { return false };
        if running.method(&self.watch, node.device()) != Some(Method::Marked) {
            // Nothing is promised of it, or it is heard otherwise.
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
    /// The host begins to rest, unless it is wanted or `marked` is false; answers whether it does.
    fn settle_down(&self, shared: &HostShared, marked: bool) -> bool {
        let _one_at_a_time = self.changing.lock();
        let rest = &shared.watch.rest;
        let rests = marked && (rest.is(RESTING) || rest.turns(DROWSY, RESTING));
        let members = self.hearers();
        let done = if members.iter().all(|member| member.shared.watch.rest.is(RESTING)) {
            fanotify::unmark_file_systems(self.group())
        } else if !members.iter().any(|member| member.shared.watch.rest.is(RESTING)) {
            // Also what others have marked for a rest that they have not begun yet.
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

    /// A host is wanted: all hear everything again.
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
            // Whatever becomes of these: what they hear besides is heard twice as one.
            fanotify::unmark_inodes(self.group())
        });
        if let Err(error) = done.and_then(|done| done) {
            tracing::error!(%error, "file systems cannot be watched as a whole any more");
            self.fail();
        }
        members.iter().for_each(|member| member.shared.watch.rest.set(AWAKE));
    }
}
