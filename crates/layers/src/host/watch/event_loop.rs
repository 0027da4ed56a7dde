//! The watch threads: one for each fanotify group, one for each host that watches directories by
//! inotify. They wait for events, turn them into invalidations, and send them.
//!
//! Invariants: they sleep in the kernel while nothing happens; the first event is read at once, and
//! after a batch they pause a moment, so that an event storm comes in batches and costs the
//! processes that cause it no wake-up per event; they never keep a source alive (weak references,
//! upgraded per batch); the members of a group are determined after events have been read, never
//! before.

use super::{
    super::{HostShared, stat},
    inotify::{self, DirectoryWatches},
    marks::{Hearer, Marks},
};
use nacre_sys::{
    fanotify::{self, Mask, Object},
    handles,
};
use nacre_vfs::{Errno, FileId, Invalidation};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::inotify::ReadFlags,
};
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak, atomic::Ordering, mpsc::Sender},
};

/// Size of the event buffer.
const BUFFER: usize = 64 << 10;

/// The pause after a batch: bounds the delay of an invalidation in a storm, and gives equal events
/// time to merge in the kernel's queue.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 6_000_000 };

/// Maximum number of cached identities of file handles.
const HANDLES_MAX: usize = 8192;

/// Events requested for a whole file system.
pub(super) const EVENTS: Mask = fanotify::CREATE
    | fanotify::DELETE
    | fanotify::MOVED_FROM
    | fanotify::MOVED_TO
    | fanotify::ATTRIB
    | fanotify::MODIFY
    | fanotify::CLOSE_WRITE
    | fanotify::ON_DIRECTORY;

/// Events requested for a single file that is not a directory.
pub(super) const OF_FILES: Mask = fanotify::ATTRIB | fanotify::MODIFY | fanotify::CLOSE_WRITE;

const NAMES: Mask = fanotify::CREATE | fanotify::DELETE | fanotify::MOVED_FROM | fanotify::MOVED_TO;

/// Marks the file system of `file`; returns the id in its events.
pub(super) fn mark(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<[i32; 2]> {
    let id = fanotify::file_system_id(file)?;
    // File handles must be openable, else the events cannot be attributed.
    fanotify::mark_file_system(group, file, EVENTS)?;
    Ok(id)
}

/// A batch of invalidations without immediate repetitions.
#[derive(Default)]
struct Batch(Vec<Invalidation>);

impl Batch {
    fn push(&mut self, notice: Invalidation) {
        if !self.0.iter().rev().take(16).any(|earlier| *earlier == notice) {
            self.0.push(notice);
        }
    }
}

/// Withdraws all caching guarantees when a thread ends unexpectedly.
struct Alarm<F: Fn()> {
    ring: F,
    armed: bool,
}

impl<F: Fn()> Drop for Alarm<F> {
    fn drop(&mut self) {
        if self.armed {
            (self.ring)();
        }
    }
}

/// Identity of the file behind a handle.
#[derive(Clone, Copy)]
struct Known {
    /// Identity without regard to the mount.
    plain: FileId,
    device: u32,
    directory: bool,
    /// It had several names when it was last examined.
    linked: bool,
}

impl Known {
    /// All identities that it may have in the front end.
    fn ids(&self, shared: &HostShared) -> Vec<FileId> {
        if self.directory { shared.directories.mounts().identities(self.plain, self.device) } else { vec![self.plain] }
    }
}

/// A file handle as a key.
type Key = ([i32; 2], i32, Box<[u8]>);

fn key(object: Object<'_>) -> Key {
    (object.fsid, object.handle.kind, Box::from(object.handle.bytes))
}

/// Processes fanotify events until stopped, or until no receiver is left.
pub(super) fn hear(group: &OwnedFd, stop: &OwnedFd, marks: &Weak<Marks>) {
    let ring = || {
        if let Some(marks) = marks.upgrade() {
            marks.fail();
        }
    };
    let mut alarm = Alarm { ring, armed: true };
    let mut buffer = vec![0_u8; BUFFER];
    let mut known: HashMap<Key, Known> = HashMap::new();
    let mut rest = None;
    loop {
        match wait(stop, group.as_fd(), rest) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                tracing::error!(%error, "watching for changes has failed");
                return;
            }
        }
        let Some(marks) = marks.upgrade() else { break };
        let mut nobody = false;
        drain(group.as_fd(), &mut buffer, |bytes| nobody |= tell_members(&marks, bytes, &mut known));
        if nobody {
            break;
        }
        rest = Some(REST);
    }
    alarm.armed = false;
}

/// Sends the events that have just been read to all members; returns whether no receiver is left.
///
/// The members are determined only now: a host may join while events are being read, and changes
/// since its first guarantee may be among them.
fn tell_members(marks: &Marks, bytes: &[u8], known: &mut HashMap<Key, Known>) -> bool {
    let mut hearings: Vec<Hearing> = marks.hearers().into_iter().map(Hearing::new).collect();
    marked_events(&mut hearings, marks.has_several_trees(), bytes, known);
    let mut nobody = false;
    for Hearing { by, batch, .. } in hearings {
        if batch.0.into_iter().any(|notice| by.channel.send(notice).is_err()) {
            promise_nothing(&by.shared);
            nobody |= marks.dismiss(&by.shared);
        }
    }
    nobody
}

/// Withdraws the caching guarantees of one source.
pub(super) fn promise_nothing(shared: &HostShared) {
    if let Some(running) = shared.watch.running.get() {
        running.failed.store(true, Ordering::Relaxed);
    }
}

/// Processes inotify events until stopped, or until no receiver is left.
pub(super) fn hear_directories(
    directories: &DirectoryWatches,
    stop: &OwnedFd,
    shared: &Weak<HostShared>,
    channel: &Sender<Invalidation>,
) {
    let ring = || {
        let Some(shared) = shared.upgrade() else { return };
        promise_nothing(&shared);
        let _nobody_may_listen = channel.send(Invalidation::Everything);
    };
    let mut alarm = Alarm { ring, armed: true };
    let mut buffer = vec![0_u8; BUFFER];
    let mut rest = None;
    loop {
        match wait(stop, directories.fd(), rest) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                tracing::error!(%error, "watching for changes has failed");
                return;
            }
        }
        let Some(shared) = shared.upgrade() else { break };
        let mut batch = Batch::default();
        drain(directories.fd(), &mut buffer, |bytes| directory_events(&shared, directories, bytes, &mut batch));
        drop(shared);
        if batch.0.into_iter().any(|notice| channel.send(notice).is_err()) {
            return;
        }
        rest = Some(REST);
    }
    alarm.armed = false;
}

/// Pauses for `rest`, then waits for events; returns false when stopped.
fn wait(stop: &OwnedFd, source: BorrowedFd<'_>, rest: Option<Timespec>) -> io::Result<bool> {
    let stop = PollFd::new(stop, PollFlags::IN);
    if rest.is_some() && !poll(&mut [stop.clone()], rest.as_ref())? {
        return Ok(false);
    }
    poll(&mut [stop, PollFd::from_borrowed_fd(source, PollFlags::IN)], None)
}

/// Polls; returns false when the first descriptor, the stop eventfd, is readable.
fn poll(waited: &mut [PollFd<'_>], most: Option<&Timespec>) -> io::Result<bool> {
    match rustix::event::poll(waited, most) {
        Ok(_) => Ok(waited.first().is_some_and(|stop| stop.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Reads all pending events, up to a number of batches, so that a storm cannot delay the sending.
fn drain(source: BorrowedFd<'_>, buffer: &mut [u8], mut take: impl FnMut(&[u8])) {
    for _ in 0..16 {
        match rustix::io::read(source, &mut *buffer) {
            Ok(length) if length > 0 => take(buffer.get(..length).unwrap_or_default()),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// A member with the invalidations for it.
struct Hearing {
    by: Hearer,
    /// It has directories with more than one identity.
    shares: bool,
    batch: Batch,
}

impl Hearing {
    fn new(by: Hearer) -> Hearing {
        let shares = by.shared.directories.mounts().are_shared();
        Hearing { by, shares, batch: Batch::default() }
    }
}

fn marked_events(hearings: &mut [Hearing], several_trees: bool, bytes: &[u8], known: &mut HashMap<Key, Known>) {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let everything =
        |hearings: &mut [Hearing]| hearings.iter_mut().for_each(|it| it.batch.push(Invalidation::Everything));
    let mut rest = bytes;
    while !rest.is_empty() {
        let Some((event, after)) = fanotify::first(rest) else {
            tracing::warn!("an event of an unknown form");
            everything(hearings);
            return;
        };
        rest = after;
        if event.mask & fanotify::OVERFLOW != 0 {
            tracing::warn!("more has changed than the kernel could tell: everything counts as changed");
            everything(hearings);
        } else if event.pid != own {
            let about = About::of(&event, hearings, known);
            hearings.iter_mut().for_each(|it| about.tell(it));
        } else if event.mask & (NAMES | fanotify::ON_DIRECTORY) != 0 && hearings.iter().any(|it| it.shares) {
            // Our own change: the front end that requested it knows, but not under the directory's
            // other identities.
            let about = About::of(&event, hearings, known);
            hearings
                .iter_mut()
                .filter(|it| it.shares && about.concerns_shared(&it.by.shared))
                .for_each(|it| about.tell(it));
        } else if several_trees && event.mask & (NAMES | fanotify::ON_DIRECTORY) == 0 {
            // The same for a file that may have a name in another tree; perhaps only since it was
            // last examined, which may have caused no event.
            if let Some(object) = event.object {
                known.remove(&key(object));
            }
            let about = About::of(&event, hearings, known);
            if about.object.is_some_and(|file| file.linked) {
                hearings.iter_mut().for_each(|it| about.tell(it));
            }
        }
    }
}

/// An event with the files that it is about.
struct About<'a> {
    mask: Mask,
    object: Option<Known>,
    parent: Option<(Known, &'a [u8])>,
}

impl<'a> About<'a> {
    fn of(event: &fanotify::Event<'a>, hearings: &mut [Hearing], known: &mut HashMap<Key, Known>) -> About<'a> {
        let mut which = |object| {
            identify(hearings, object, known).unwrap_or_else(|error| {
                tracing::warn!(%error, "a changed file cannot be looked at: everything counts as changed");
                hearings.iter_mut().for_each(|it| it.batch.push(Invalidation::Everything));
                None
            })
        };
        let object = event.object.and_then(&mut which);
        let parent = event.entry.and_then(|(directory, name)| Some((which(directory)?, name)));
        About { mask: event.mask, object, parent }
    }

    fn tell(&self, Hearing { by, batch, .. }: &mut Hearing) {
        let shared = &by.shared;
        if self.mask & NAMES != 0
            && let Some((parent, name)) = &self.parent
        {
            for parent in parent.ids(shared) {
                batch.push(Invalidation::Entry { parent, name: (*name).into() });
                batch.push(Invalidation::Attributes { id: parent });
            }
        }
        // An event of a directory about itself has the directory as parent, with the name ".".
        let itself =
            self.object.or_else(|| self.parent.filter(|(_, name)| *name == b".").map(|(directory, _)| directory));
        for id in itself.iter().flat_map(|itself| itself.ids(shared)) {
            if self.mask & (fanotify::MODIFY | fanotify::CLOSE_WRITE) != 0 {
                batch.push(Invalidation::Content { id });
                if self.mask & fanotify::ATTRIB == 0 {
                    continue;
                }
            }
            // Alone, or merged with the end of a write.
            batch.push(Invalidation::Attributes { id });
        }
    }

    /// Whether the event is about a directory that may have more than one identity.
    fn concerns_shared(&self, shared: &HostShared) -> bool {
        let is_shared = |it: &Known| it.directory && shared.directories.mounts().shares(it.device);
        self.parent.iter().map(|(directory, _)| directory).chain(&self.object).any(is_shared)
    }
}

/// Identifies the file behind a handle; `None` if it no longer exists, so that nothing cached about
/// it matters.
///
/// # Errors
/// Memory or descriptors are short: the file is unknown then.
fn identify(hearings: &[Hearing], object: Object<'_>, known: &mut HashMap<Key, Known>) -> io::Result<Option<Known>> {
    let key = key(object);
    if let Some(found) = known.get(&key) {
        return Ok(Some(*found));
    }
    let running = || hearings.iter().filter_map(|it| it.by.shared.watch.running.get());
    let mut mounts: Vec<Arc<OwnedFd>> =
        running().filter_map(|running| running.mounts.lock().get(&object.fsid).cloned()).collect();
    if mounts.is_empty() {
        mounts = running().flat_map(|running| running.mounts.lock().values().cloned().collect::<Vec<_>>()).collect();
    }
    let mut file = None;
    for mount in &mounts {
        match handles::open(mount.as_fd(), object.handle, rustix::fs::OFlags::PATH.bits().cast_signed()) {
            Ok(opened) => {
                file = Some(opened);
                break;
            }
            Err(error) if is_want(&error) => return Err(error),
            // Deleted, or on another file system of the source.
            Err(_) => {}
        }
    }
    let Some(file) = file else { return Ok(None) };
    let Ok(statx) = stat::of_file(file.as_fd()) else { return Ok(None) };
    let found = Known {
        plain: stat::id(&statx),
        device: stat::device(&statx),
        directory: stat::is_directory(&statx),
        linked: statx.stx_nlink > 1,
    };
    if known.len() >= HANDLES_MAX {
        known.clear();
    }
    known.insert(key, found);
    Ok(Some(found))
}

/// Whether an error means a lack of resources and not a property of the file.
fn is_want(error: &io::Error) -> bool {
    let wants = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE, rustix::io::Errno::NOMEM];
    error.raw_os_error().is_some_and(|number| wants.iter().any(|want| want.raw_os_error() == number))
}

fn directory_events(shared: &HostShared, directories: &DirectoryWatches, bytes: &[u8], batch: &mut Batch) {
    let mut rest = bytes;
    // Cookie of a file that was moved away and has not yet appeared in a watched directory.
    let mut moving: Option<u32> = None;
    while let Some((event, after)) = inotify::first(rest) {
        rest = after;
        let mask = ReadFlags::from_bits_retain(event.mask);
        if moving.is_some_and(|cookie| !mask.contains(ReadFlags::MOVED_TO) || event.cookie != cookie) {
            // It has left the watched directories, while it may still be open.
            batch.push(Invalidation::Everything);
        }
        moving = mask.contains(ReadFlags::MOVED_FROM).then_some(event.cookie);
        if mask.contains(ReadFlags::QUEUE_OVERFLOW) {
            tracing::warn!("more has changed than the kernel could tell: everything counts as changed");
        }
        if mask.contains(ReadFlags::IGNORED) {
            directories.ended(event.watch);
            continue;
        }
        if mask.intersects(ReadFlags::QUEUE_OVERFLOW | ReadFlags::UNMOUNT) {
            batch.push(Invalidation::Everything);
            continue;
        }
        for node in directories.nodes(event.watch) {
            directory_event(shared, &node, mask, event.name, batch);
        }
    }
    if moving.is_some() {
        batch.push(Invalidation::Everything);
    }
}

fn directory_event(
    shared: &HostShared,
    node: &Arc<super::super::node::HostNode>,
    mask: ReadFlags,
    name: &[u8],
    batch: &mut Batch,
) {
    if name.is_empty() {
        if mask.contains(ReadFlags::ATTRIB) {
            batch.push(Invalidation::Attributes { id: node.id() });
        }
        return;
    }
    if mask.intersects(ReadFlags::CREATE | ReadFlags::DELETE | ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO) {
        // This implies that the directory has changed, too.
        batch.push(Invalidation::Entry { parent: node.id(), name: name.into() });
    }
    if mask.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
        return;
    }
    let found = shared.directories.get(node).and_then(|held| shared.examine(held.fd(), name, true));
    let found = match found {
        Ok(found) => found,
        Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => return batch.push(Invalidation::Everything),
        // Deleted; another event reports that.
        Err(_) => return,
    };
    let content = mask.intersects(ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE) && !shared.watch.is_written(found.id);
    batch.push(if content {
        Invalidation::Content { id: found.id }
    } else {
        Invalidation::Attributes { id: found.id }
    });
}
