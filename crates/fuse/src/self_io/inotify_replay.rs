//! Replays changes made behind the mount as inotify events inside it. The kernel reports only operations through a
//! mount; so a thread of ours (the actor) performs an equivalent of each change on the mount itself, and the front
//! end, which knows the thread by its id, answers "done" without touching the layer: the change has been made
//! already.
//!
//! Fed by `invalidate.rs`, used by `door.rs`, on only with `FuseOptions::notify_watchers`. Events: creation of a name
//! that appeared, deletion of one that vanished (both for a file moved or replaced), modification, change of
//! attributes. Needs root: directories are opened by handle. Invariants: events that do not fit in the queue, or
//! that come while the actor waits for a lock that a user keeps, are dropped, but the caches are invalidated all the same; no descriptor of the mount is held between events, so that
//! it can be unmounted.

use super::{
    Role, SelfIo,
    own_mount::{Entered, InodeKey, number},
    waits::during,
};
use crate::{
    door::{Door, caller},
    failure::Outcome,
    inodes::Found,
    wire,
};
use fusewire::{Op, Reply, Request, abi};
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, Name, Protection, Time};
use parking_lot::Mutex;
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags},
    io::Errno as SysErrno,
};
use std::{
    ffi::OsStr,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel},
    },
    time::Duration,
};

/// Maximum number of queued events; further events of a burst are dropped.
const QUEUE: usize = 4096;
/// Time after which the actor is taken to wait for a lock that a user keeps.
const PATIENCE: Duration = Duration::from_secs(1);
/// Node id of files that are gone, during their simulated deletion; the inode table returns greater ones.
const PHANTOM: u64 = 2;

/// A change behind the mount.
#[derive(Debug)]
pub(crate) enum Event {
    /// A name in the directory with this node id.
    Name(u64, Box<[u8]>),
    /// Attributes of the file with this node id.
    Attributes(u64),
    /// Content of the file with this node id.
    Content(u64),
}

/// The operation that the actor is simulating.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Appear,
    Vanish,
    Touch,
}

/// State shared by the thread and the front end.
#[derive(Default)]
pub(crate) struct InotifyReplay {
    act: Mutex<Option<Act>>,
    queue: Mutex<Option<SyncSender<Event>>>,
}

impl InotifyReplay {
    /// Opens the queue; returns its end for the thread.
    pub fn open(&self) -> Receiver<Event> {
        let (sender, receiver) = sync_channel(QUEUE);
        *self.queue.lock() = Some(sender);
        receiver
    }

    /// Closes the queue: the thread ends when it is empty.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Queues an event. False where there is no thread, or its queue is full.
    pub fn raise(&self, event: Event) -> bool {
        self.queue.lock().as_ref().is_some_and(|queue| queue.try_send(event).is_ok())
    }

    fn during<T>(&self, act: Act, call: impl FnOnce() -> T) -> T {
        *self.act.lock() = Some(act);
        let result = call();
        *self.act.lock() = None;
        result
    }
}

impl Door {
    /// Answers a request of the actor: simulated operations as done, all others as for any caller.
    pub(crate) fn replay_request(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let act = *self.self_io.inotify_replay.act.lock();
        match (act, request.op) {
            (Some(Act::Appear), Op::Lookup { .. }) => Err(Errno::ENOENT.into()),
            (Some(Act::Appear), Op::Mknod { name, .. } | Op::Mkdir { name, .. } | Op::Symlink { name, .. }) => {
                self.lookup_existing(request, name, reply)
            }
            (Some(Act::Vanish), Op::Lookup { .. }) => Ok(reply.entry(&phantom())?),
            (Some(Act::Vanish), Op::Unlink { .. } | Op::Rmdir { .. }) => Ok(()),
            // The kernel would take over the size of a file whose appended data is still dirty.
            (Some(Act::Touch), Op::Setattr(_)) if self.writeback.caches_writes(request.header.nodeid) => {
                Err(Errno::EBUSY.into())
            }
            (Some(Act::Touch), Op::Setattr(_)) => self.getattr(&request.header, None, reply),
            _ => self.operate(request, reply),
        }
    }

    fn lookup_existing(&self, request: &Request<'_>, name: &[u8], reply: &mut Reply<'_>) -> Outcome {
        let (parent, id) = self.parent(request.header.nodeid)?;
        let entry = self.layer.lookup(&caller(&request.header), &parent, Name::new(name)?)?;
        Ok(reply.entry(&self.found(&entry, Found::at(request.header.nodeid, id, name), self.new_name_time(&parent)))?)
    }
}

/// A regular file that nobody can use.
fn phantom() -> abi::EntryOut {
    let zero = Time::default();
    let attr = Attr {
        id: FileId { fs: 0, ino: PHANTOM, generation: 0 },
        kind: Kind::File,
        mode: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: zero,
        mtime: zero,
        ctime: zero,
        btime: None,
        protection: Protection::None,
    };
    wire::entry(PHANTOM, &attr, std::time::Duration::ZERO, std::time::Duration::ZERO)
}

/// Task of the actor.
enum Task {
    /// A name in the directory with this node id now refers to a file with these attributes.
    Appeared(u64, Box<[u8]>, Box<Attr>),
    /// A name does not exist any more.
    Vanished(u64, Box<[u8]>),
    /// A file has other attributes, or other content (true).
    Touched(u64, bool),
}

impl Task {
    /// The inode whose watchers are notified.
    fn nodeid(&self) -> u64 {
        match self {
            Task::Appeared(nodeid, ..) | Task::Vanished(nodeid, _) | Task::Touched(nodeid, _) => *nodeid,
        }
    }
}

type Acted = Result<(), SysErrno>;

/// Body of the thread; `forget_name` invalidates a name in the kernel when its event has been raised. This thread
/// looks names up in the layer, and leaves all calls that wait for the mount to a second thread, the actor, which
/// holds none of our descriptors: a daemon that is killed while it waits for itself could not end if the waiting
/// thread held the fuse device.
pub(crate) fn run(events: &Receiver<Event>, door: &Arc<Door>, device: u64, forget_name: &impl Fn(u64, &[u8])) {
    let (tasks, to_do) = sync_channel(0);
    let (tell, told) = sync_channel(0);
    let stage = Stage::of(door, device);
    let actor = door.self_io.start("nacre-actor", Role::Replay, move || {
        act(&to_do, &tell, &stage);
        Ok(())
    });
    let actor = match actor {
        Ok(actor) => actor,
        Err(error) => return tracing::error!(%error, "watchers are told nothing: there can be no thread for it"),
    };
    let mut actor_waits = false;
    for event in events {
        let task = match &event {
            Event::Name(parent, name) => name_changed(door, *parent, name),
            Event::Attributes(nodeid) => Ok(Some(Task::Touched(*nodeid, false))),
            Event::Content(nodeid) => Ok(Some(Task::Touched(*nodeid, true))),
        };
        let raised = match task {
            Ok(Some(task)) => raise(task, &tasks, &told, &mut actor_waits),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = raised {
            tracing::debug!(%error, ?event, "an event for watchers could not be raised");
        }
        if let Event::Name(parent, name) = &event {
            forget_name(*parent, name);
        }
    }
    drop((tasks, told));
    if actor_waits {
        // It ends when the lock is released.
        return;
    }
    match actor.join() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::error!(%error, "watchers were told nothing: the descriptors cannot be left to others")
        }
        Err(_) => tracing::error!("the thread that raises events had panicked"),
    }
}

/// Has the actor raise an event. EBUSY, and the event is dropped, while it waits for a lock that a user keeps.
fn raise(task: Task, tasks: &SyncSender<Task>, told: &Receiver<Acted>, actor_waits: &mut bool) -> Acted {
    if *actor_waits {
        match told.try_recv() {
            Ok(late) => tracing::debug!(?late, "an event for watchers was raised late"),
            Err(TryRecvError::Empty) => return Err(SysErrno::BUSY),
            Err(TryRecvError::Disconnected) => return Err(SysErrno::IO),
        }
        *actor_waits = false;
    }
    // Without an actor there is no result either.
    if tasks.send(task).is_err() {
        return Err(SysErrno::IO);
    }
    match told.recv_timeout(PATIENCE) {
        Ok(acted) => acted,
        Err(RecvTimeoutError::Timeout) => {
            *actor_waits = true;
            Err(SysErrno::BUSY)
        }
        Err(RecvTimeoutError::Disconnected) => Err(SysErrno::IO),
    }
}

/// Finds out whether a name appeared or vanished.
fn name_changed(door: &Door, parent: u64, bytes: &[u8]) -> Result<Option<Task>, SysErrno> {
    let (Some(node), Ok(name)) = (door.inodes.node(parent), Name::new(bytes)) else { return Ok(None) };
    match door.layer.lookup(&Caller::ROOT, &node, name) {
        Ok(entry) => Ok(Some(Task::Appeared(parent, bytes.into(), Box::new(entry.attr)))),
        Err(Errno::ENOENT) => Ok(Some(Task::Vanished(parent, bytes.into()))),
        Err(error) => Err(SysErrno::from_raw_os_error(error.raw())),
    }
}

/// What the actor needs: no part of the front end. One that waits for a lock that a user keeps may end last, and what it
/// dropped then would be closed in its own table of descriptors.
pub(crate) struct Stage {
    self_io: Arc<SelfIo>,
    mountpoint: PathBuf,
    device: u64,
}

impl Stage {
    pub(crate) fn of(door: &Door, device: u64) -> Stage {
        Stage { self_io: Arc::clone(&door.self_io), mountpoint: door.options.mountpoint.clone(), device }
    }
}

/// Body of the actor.
fn act(tasks: &Receiver<Task>, tell: &SyncSender<Acted>, stage: &Stage) {
    for task in tasks {
        let raised = || match &task {
            Task::Appeared(parent, name, attr) => by_handle(stage, *parent)
                .and_then(|directory| appeared(stage, directory.as_fd(), OsStr::from_bytes(name), attr)),
            Task::Vanished(parent, name) => by_handle(stage, *parent)
                .and_then(|directory| vanished(stage, directory.as_fd(), OsStr::from_bytes(name))),
            Task::Touched(nodeid, content) => touched(stage, *nodeid, *content),
        };
        let acted = during("event for watchers", task.nodeid(), raised);
        if tell.send(acted).is_err() {
            break;
        }
    }
}

fn appeared(stage: &Stage, directory: BorrowedFd<'_>, name: &OsStr, attr: &Attr) -> Result<(), SysErrno> {
    match make(stage, directory, name, attr) {
        Err(SysErrno::EXIST) => {
            // The kernel knows the name already: it was created through the mount, looked up since, or belonged to
            // another file that was replaced.
            let known = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if known.st_ino == attr.id.ino {
                return Ok(());
            }
            vanished(stage, directory, name)?;
            make(stage, directory, name, attr)
        }
        other => other,
    }
}

fn make(stage: &Stage, directory: BorrowedFd<'_>, name: &OsStr, attr: &Attr) -> Result<(), SysErrno> {
    let mode = Mode::from_raw_mode(attr.mode & 0o777);
    let device = rustix::fs::makedev(attr.rdev_major, attr.rdev_minor);
    stage.self_io.inotify_replay.during(Act::Appear, || match attr.kind {
        Kind::Directory => rustix::fs::mkdirat(directory, name, mode),
        Kind::Symlink => rustix::fs::symlinkat("-", directory, name),
        Kind::File => rustix::fs::mknodat(directory, name, FileType::RegularFile, mode, 0),
        Kind::Block => rustix::fs::mknodat(directory, name, FileType::BlockDevice, mode, device),
        Kind::Character => rustix::fs::mknodat(directory, name, FileType::CharacterDevice, mode, device),
        Kind::Fifo => rustix::fs::mknodat(directory, name, FileType::Fifo, mode, 0),
        Kind::Socket => rustix::fs::mknodat(directory, name, FileType::Socket, mode, 0),
    })
}

fn vanished(stage: &Stage, directory: BorrowedFd<'_>, name: &OsStr) -> Result<(), SysErrno> {
    let remove = |flags| rustix::fs::unlinkat(directory, name, flags);
    stage.self_io.inotify_replay.during(Act::Vanish, || match remove(AtFlags::empty()) {
        Err(SysErrno::ISDIR) => remove(AtFlags::REMOVEDIR),
        // The kernel knows that there is no such name.
        Err(SysErrno::NOENT) => Ok(()),
        other => other,
    })
}

/// Sets a file's mode or size to the current value.
fn touched(stage: &Stage, nodeid: u64, content: bool) -> Result<(), SysErrno> {
    let file = by_handle(stage, nodeid)?;
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let stat = rustix::fs::fstat(&file)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    stage.self_io.inotify_replay.during(Act::Touch, || {
        if content && kind == FileType::RegularFile {
            let length = u64::try_from(stat.st_size).unwrap_or_default();
            nacre_sys::length::truncate(Path::new(&path), length).map_err(number)
        } else if kind == FileType::Symlink || content {
            // Links have no mode to set; a directory's content is its names, which have events of their own.
            Ok(())
        } else {
            rustix::fs::chmodat(CWD, path.as_str(), Mode::from_raw_mode(stat.st_mode & 0o7777), AtFlags::empty())
        }
    })
}

/// Opens an inode of the mount that the kernel has in memory; ESTALE where it has not, and then there are no watchers
/// of it either.
fn by_handle(stage: &Stage, nodeid: u64) -> Result<OwnedFd, SysErrno> {
    Entered::new(&stage.mountpoint, stage.device)?.by_handle(InodeKey { nodeid, generation: 0 }, OFlags::PATH)
}
