//! The watcher's thread: waits for events, turns them into invalidations, sends them.
//!
//! Invariants: it sleeps in the kernel while nothing happens; the first event is taken at once, and after a batch it rests a moment, so
//! that a storm comes in batches and costs those who cause it no wake-up per event; it never keeps the source alive (a weak reference,
//! upgraded per batch).

use super::{
    super::{Shared, stat},
    Running,
    inotify::{self, DirectoryWatches},
};
use nacre_sys::{
    fanotify::{self, Mask, Object},
    handles,
};
use nacre_vfs::{FileId, Invalidation};
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

/// The pause after a batch: bounds how late a notice can be in a storm, and gives equal events time to become one in the kernel's queue.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 6_000_000 };

/// Identities of handles that are remembered.
const HANDLES_MAX: usize = 8192;

/// What is asked for of a whole file system.
const EVENTS: Mask = fanotify::CREATE
    | fanotify::DELETE
    | fanotify::MOVED_FROM
    | fanotify::MOVED_TO
    | fanotify::ATTRIB
    | fanotify::MODIFY
    | fanotify::CLOSE_WRITE
    | fanotify::ON_DIRECTORY;

const NAMES: Mask = fanotify::CREATE | fanotify::DELETE | fanotify::MOVED_FROM | fanotify::MOVED_TO;

/// Marks the file system of `file`; answers the id that its events carry.
pub(super) fn mark(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<[i32; 2]> {
    let id = fanotify::file_system_id(file)?;
    // Handles must be openable again, else the events say nothing.
    fanotify::mark_file_system(group, file, EVENTS)?;
    Ok(id)
}

/// The descriptors that the thread waits for.
pub(super) struct Sources {
    group: Option<OwnedFd>,
    directories: Option<Arc<DirectoryWatches>>,
    stop: OwnedFd,
}

impl Sources {
    pub(super) fn of(running: &Running) -> io::Result<Sources> {
        Ok(Sources {
            group: running.group.as_ref().map(OwnedFd::try_clone).transpose()?,
            directories: running.directories.clone(),
            stop: running.stop.try_clone()?,
        })
    }
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

/// Takes every promise back when the thread ends without having been told to.
struct Alarm<'a> {
    shared: &'a Weak<Shared>,
    channel: &'a Sender<Invalidation>,
    armed: bool,
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade().filter(|_| self.armed) else { return };
        if let Some(running) = shared.watch.running.get() {
            running.failed.store(true, Ordering::Relaxed);
        }
        let _nobody_may_listen = self.channel.send(Invalidation::Everything);
    }
}

/// What a handle leads to.
#[derive(Clone, Copy)]
struct Known {
    /// Whatever mount it is reached through.
    plain: FileId,
    device: u32,
    directory: bool,
}

impl Known {
    /// Every identity by which it may be known in front of us.
    fn ids(&self, shared: &Shared) -> Vec<FileId> {
        if self.directory { shared.directories.mounts().identities(self.plain, self.device) } else { vec![self.plain] }
    }
}

/// A handle as a key.
type Key = ([i32; 2], i32, Box<[u8]>);

/// Runs until told to stop, or until nobody listens.
pub(super) fn run(sources: &Sources, shared: &Weak<Shared>, channel: &Sender<Invalidation>) {
    let mut buffer = vec![0_u8; BUFFER];
    let mut known: HashMap<Key, Known> = HashMap::new();
    let mut alarm = Alarm { shared, channel, armed: true };
    let mut rest = None;
    loop {
        match wait(sources, rest) {
            Ok(true) => {}
            Ok(false) => {
                alarm.armed = false;
                return;
            }
            Err(error) => {
                tracing::error!(%error, "watching for changes has failed");
                return;
            }
        }
        let Some(shared) = shared.upgrade() else { return };
        let mut batch = Batch::default();
        if let Some(group) = &sources.group {
            drain(group.as_fd(), &mut buffer, |bytes| marked_events(&shared, bytes, &mut known, &mut batch));
        }
        if let Some(directories) = &sources.directories {
            drain(directories.fd(), &mut buffer, |bytes| directory_events(&shared, directories, bytes, &mut batch));
        }
        drop(shared);
        for notice in batch.0 {
            if channel.send(notice).is_err() {
                return;
            }
        }
        rest = Some(REST);
    }
}

/// Rests, if so told, then waits for events; false when told to stop.
fn wait(sources: &Sources, rest: Option<Timespec>) -> io::Result<bool> {
    let stop = PollFd::new(&sources.stop, PollFlags::IN);
    if rest.is_some() && !poll(&mut [stop.clone()], rest.as_ref())? {
        return Ok(false);
    }
    let mut waited = vec![stop];
    waited.extend(sources.group.as_ref().map(|group| PollFd::new(group, PollFlags::IN)));
    waited.extend(sources.directories.as_ref().map(|directories| PollFd::from_borrowed_fd(directories.fd(), PollFlags::IN)));
    poll(&mut waited, None)
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

fn marked_events(shared: &Shared, bytes: &[u8], known: &mut HashMap<Key, Known>, batch: &mut Batch) {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let mut rest = bytes;
    while !rest.is_empty() {
        let Some((event, after)) = fanotify::first(rest) else {
            tracing::warn!("an event of an unknown form");
            batch.push(Invalidation::Everything);
            return;
        };
        rest = after;
        if event.mask & fanotify::OVERFLOW != 0 {
            batch.push(Invalidation::Everything);
        } else if event.pid != own {
            marked_event(shared, &event, known, batch);
        } else if shared.directories.mounts().are_shared() && event.mask & (NAMES | fanotify::ON_DIRECTORY) != 0 {
            // Our own: whoever asked for it knows, but not those who know the directory by another mount.
            own_event(shared, &event, known, batch);
        }
    }
}

fn marked_event(shared: &Shared, event: &fanotify::Event<'_>, known: &mut HashMap<Key, Known>, batch: &mut Batch) {
    let object = event.object.and_then(|object| identify(shared, object, known));
    let parent = event.entry.and_then(|(directory, name)| Some((identify(shared, directory, known)?, name)));
    if event.mask & NAMES != 0
        && let Some((parent, name)) = parent
    {
        for parent in parent.ids(shared) {
            batch.push(Invalidation::Entry { parent, name: name.into() });
            batch.push(Invalidation::Attributes { id: parent });
        }
    }
    // An event of a directory about itself names it as the parent, with "." below.
    let itself = object.or_else(|| parent.filter(|(_, name)| *name == b".").map(|(directory, _)| directory));
    for id in itself.iter().flat_map(|itself| itself.ids(shared)) {
        if event.mask & (fanotify::MODIFY | fanotify::CLOSE_WRITE) != 0 {
            batch.push(Invalidation::Content { id });
            if event.mask & fanotify::ATTRIB == 0 {
                continue;
            }
        }
        // Alone, or merged with the end of a write.
        batch.push(Invalidation::Attributes { id });
    }
}

/// A change made by ourselves: passed on where it is of a directory that is known by more than one identity.
fn own_event(shared: &Shared, event: &fanotify::Event<'_>, known: &mut HashMap<Key, Known>, batch: &mut Batch) {
    let of = |object: Option<Object<'_>>, known: &mut HashMap<Key, Known>| {
        object.and_then(|object| identify(shared, object, known)).filter(|it| it.directory && shared.directories.mounts().shares(it.device))
    };
    let directory = event.entry.map(|(directory, _)| directory);
    if of(directory, known).is_some() || of(event.object, known).is_some() {
        marked_event(shared, event, known, batch);
    }
}

/// What an object is; `None` where it is gone, and with it whatever could be wrong about it.
fn identify(shared: &Shared, object: Object<'_>, known: &mut HashMap<Key, Known>) -> Option<Known> {
    let key = (object.fsid, object.handle.kind, Box::from(object.handle.bytes));
    if let Some(found) = known.get(&key) {
        return Some(*found);
    }
    let running = shared.watch.running.get()?;
    let mounts: Vec<Arc<OwnedFd>> = {
        let mounts = running.mounts.lock();
        match mounts.get(&object.fsid) {
            Some(mount) => vec![Arc::clone(mount)],
            None => mounts.values().cloned().collect(),
        }
    };
    let file =
        mounts.iter().find_map(|mount| handles::open(mount.as_fd(), object.handle, rustix::fs::OFlags::PATH.bits().cast_signed()).ok())?;
    let statx = stat::of_file(file.as_fd()).ok()?;
    let found = Known { plain: stat::id(&statx), device: stat::device(&statx), directory: stat::is_directory(&statx) };
    if known.len() >= HANDLES_MAX {
        known.clear();
    }
    known.insert(key, found);
    Some(found)
}

fn directory_events(shared: &Shared, directories: &DirectoryWatches, bytes: &[u8], batch: &mut Batch) {
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

fn directory_event(shared: &Shared, node: &Arc<super::super::node::HostNode>, mask: ReadFlags, name: &[u8], batch: &mut Batch) {
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
    let Ok(found) = found else { return };
    let content = mask.intersects(ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE) && !shared.watch.is_written(found.id);
    batch.push(if content { Invalidation::Content { id: found.id } } else { Invalidation::Attributes { id: found.id } });
}
