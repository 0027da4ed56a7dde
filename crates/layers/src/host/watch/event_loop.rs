//! The watchers' threads: one for each group of marks, one for each host that watches directories
//! one by one. They wait for events, turn them into invalidations, and send them.
//!
//! Invariants: they sleep in the kernel while nothing happens; the first event is taken at once,
//! and after a batch they rest a moment, so that a storm comes in batches and costs those who cause
//! it no wake-up per event; they never keep a source alive (weak references, upgraded per batch);
//! whom events concern is asked after they have been read, never before.

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

/// Bytes of events read at once.
const BUFFER: usize = 64 << 10;

/// The pause after a batch: bounds how late a notice can be in a storm, and gives equal events time
/// to become one in the kernel's queue.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 6_000_000 };

/// Identities of handles that are remembered.
const HANDLES_MAX: usize = 8192;

/// What is asked for of a whole file system.
pub(super) const EVENTS: Mask = fanotify::CREATE
    | fanotify::DELETE
    | fanotify::MOVED_FROM
    | fanotify::MOVED_TO
    | fanotify::ATTRIB
    | fanotify::MODIFY
    | fanotify::CLOSE_WRITE
    | fanotify::ON_DIRECTORY;

/// What is asked for of a single file that is not a directory.
pub(super) const OF_FILES: Mask = fanotify::ATTRIB | fanotify::MODIFY | fanotify::CLOSE_WRITE;

const NAMES: Mask = fanotify::CREATE | fanotify::DELETE | fanotify::MOVED_FROM | fanotify::MOVED_TO;

/// Marks the file system of `file`; answers the id that its events carry.
pub(super) fn mark(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<[i32; 2]> {
    let id = fanotify::file_system_id(file)?;
    // Handles must be openable again, else the events say nothing.
    fanotify::mark_file_system(group, file, EVENTS)?;
    Ok(id)
}

/// A batch of notices without immediate repetitions.
#[derive(Default)]
struct Batch(Vec<Invalidation>);

impl Batch {
    fn push(&mut self, notice: Invalidation) {
        if !self.0.iter().rev().take(16).any(|earlier| *earlier == notice) {
            self.0.push(notice);
        }
    }
}

/// Takes every promise back when a thread ends without having been told to.
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

/// What a handle leads to.
#[derive(Clone, Copy)]
struct Known {
    /// Whatever mount it is reached through.
    plain: FileId,
    device: u32,
    directory: bool,
    /// It had several names when it was last asked.
    linked: bool,
}

impl Known {
    /// Every identity by which it may be known in front of us.
    fn ids(&self, shared: &HostShared) -> Vec<FileId> {
        if self.directory { shared.directories.mounts().identities(self.plain, self.device) } else { vec![self.plain] }
    }
}

/// A handle as a key.
type Key = ([i32; 2], i32, Box<[u8]>);

fn key(object: Object<'_>) -> Key {
    (object.fsid, object.handle.kind, Box::from(object.handle.bytes))
}

/// Hears what marks report, until told to stop, or until nobody listens.
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

/// Tells all members of what has just been read; answers whether nobody listens any more.
///
/// Who they are is asked only now: a host joins while others' events are being read, and what has
/// happened since it first promised something may be among these.
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

/// Nothing is promised any more of one source.
pub(super) fn promise_nothing(shared: &HostShared) {
    if let Some(running) = shared.watch.running.get() {
        running.failed.store(true, Ordering::Relaxed);
    }
}

/// Hears what watches on directories report, until told to stop, or until nobody listens.
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

/// Rests, if so told, then waits for events; false when told to stop.
fn wait(stop: &OwnedFd, source: BorrowedFd<'_>, rest: Option<Timespec>) -> io::Result<bool> {
    let stop = PollFd::new(stop, PollFlags::IN);
    if rest.is_some() && !poll(&mut [stop.clone()], rest.as_ref())? {
        return Ok(false);
    }
    poll(&mut [stop, PollFd::from_borrowed_fd(source, PollFlags::IN)], None)
}

/// Polls; false when the first descriptor tells to stop.
fn poll(waited: &mut [PollFd<'_>], most: Option<&Timespec>) -> io::Result<bool> {
    match rustix::event::poll(waited, most) {
        Ok(_) => Ok(waited.first().is_some_and(|stop| stop.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Reads all that is there, at most some batches, so that a storm cannot keep us from sending.
fn drain(source: BorrowedFd<'_>, buffer: &mut [u8], mut take: impl FnMut(&[u8])) {
    for _ in 0..16 {
        match rustix::io::read(source, &mut *buffer) {
            Ok(length) if length > 0 => take(buffer.get(..length).unwrap_or_default()),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// A host and what it is to be told.
struct Hearing {
    by: Hearer,
    /// It knows directories by more than one identity.
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
            // Our own: whoever asked for it knows, but not those who know the directory by another
            // mount.
            let about = About::of(&event, hearings, known);
            hearings
                .iter_mut()
                .filter(|it| it.shares && about.concerns_shared(&it.by.shared))
                .for_each(|it| about.tell(it));
        } else if several_trees && event.mask & (NAMES | fanotify::ON_DIRECTORY) == 0 {
            // The same for a file that may have a name in another tree; perhaps only since it was
            // last looked at, which may not have been heard.
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

/// An event and what it is about.
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
        // An event of a directory about itself names it as the parent, with "." below.
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

    /// Whether it is of a directory that may be known by more than one identity.
    fn concerns_shared(&self, shared: &HostShared) -> bool {
        let is_shared = |it: &Known| it.directory && shared.directories.mounts().shares(it.device);
        self.parent.iter().map(|(directory, _)| directory).chain(&self.object).any(is_shared)
    }
}

/// What an object is; `None` where it is gone, and with it whatever could be wrong about it.
///
/// # Errors
/// Where memory or descriptors are wanting: nothing is known of it then.
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
            // Gone, or of another file system of the source.
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

/// Whether an error says nothing about the file, but that we lack something.
fn is_want(error: &io::Error) -> bool {
    let wants = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE, rustix::io::Errno::NOMEM];
    error.raw_os_error().is_some_and(|number| wants.iter().any(|want| want.raw_os_error() == number))
}

fn directory_events(shared: &HostShared, directories: &DirectoryWatches, bytes: &[u8], batch: &mut Batch) {
    let mut rest = bytes;
    // A file that was moved away and has not yet turned up in a watched directory.
    let mut moving: Option<u32> = None;
    while let Some((event, after)) = inotify::first(rest) {
        rest = after;
        let mask = ReadFlags::from_bits_retain(event.mask);
        if moving.is_some_and(|cookie| !mask.contains(ReadFlags::MOVED_TO) || event.cookie != cookie) {
            // It is out of sight, while somebody may still have it open.
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
        // It says by itself that the directory has changed, too.
        batch.push(Invalidation::Entry { parent: node.id(), name: name.into() });
    }
    if mask.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
        return;
    }
    let found = shared.directories.get(node).and_then(|held| shared.examine(held.fd(), name, true));
    let found = match found {
        Ok(found) => found,
        Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => return batch.push(Invalidation::Everything),
        // It is gone, which is told by an event of its own.
        Err(_) => return,
    };
    let content = mask.intersects(ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE) && !shared.watch.is_written(found.id);
    batch.push(if content {
        Invalidation::Content { id: found.id }
    } else {
        Invalidation::Attributes { id: found.id }
    });
}
