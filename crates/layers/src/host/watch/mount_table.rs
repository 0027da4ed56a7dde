//! Follows the mount table: mounts and unmounts inside the sources by other processes.
//!
//! Joined by each host that watches, before it gives any caching guarantee, and left when it stops
//! (`watch.rs`). One thread for the process waits for changes of `/proc/self/mountinfo` (proc(5))
//! and compares the mounts inside of each source with the previous ones; hosts for which these are
//! the same get no invalidation, however often containers change other parts of the table.
//!
//! A mount or unmount changes what its mount point shows. If the mount point is on the source's own
//! mount, only that name is invalidated; else everything is, since examining a directory on a
//! foreign mount could block forever.
//!
//! Invariants: the thread keeps no source alive (weak references, upgraded per change); it examines
//! directories and sends with its lock released; the last host that leaves ends it.

use super::{
    super::{HostShared, stat},
    event_loop,
};
use nacre_sys::inode::proc_path;
use nacre_vfs::{FileId, Invalidation};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags},
    fs::{Mode, OFlags, ResolveFlags},
};
use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsString,
    fs,
    io::{self, Read, Seek},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Weak, mpsc::Sender},
    thread::JoinHandle,
};

const TABLE: &str = "/proc/self/mountinfo";

/// The thread with the hosts that it works for.
static FOLLOWER: Mutex<Option<Follower>> = Mutex::new(None);

struct Follower {
    members: Vec<Member>,
    /// Eventfd that ends the thread.
    stop: OwnedFd,
    thread: JoinHandle<()>,
}

struct Member {
    shared: Weak<HostShared>,
    channel: Sender<Invalidation>,
    /// The mounts inside its source at the last reading of the table.
    inner: BTreeSet<InnerMount>,
}

/// A mount inside a source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct InnerMount {
    id: u64,
    parent: u64,
    device: Vec<u8>,
    path: PathBuf,
}

/// A host whose inner mounts have changed.
struct Concerned {
    shared: Arc<HostShared>,
    channel: Sender<Invalidation>,
    source: PathBuf,
    changed: Vec<InnerMount>,
}

/// Follows the mounts inside a source from now on. If that fails, a new mount is shown when the
/// kernel next looks the name up.
pub(super) fn join(shared: &Arc<HostShared>, channel: &Sender<Invalidation>) {
    if let Err(error) = try_join(shared, channel) {
        tracing::warn!(%error, source = %shared.options.source.display(), "the mount table cannot be followed: mounts inside the source may be shown late");
    }
}

fn try_join(shared: &Arc<HostShared>, channel: &Sender<Invalidation>) -> io::Result<()> {
    let mut running = FOLLOWER.lock();
    let follower = match running.as_mut() {
        Some(follower) => follower,
        None => running.insert(Follower::start()?),
    };
    // Read with the thread's own table open: a later change wakes it.
    let inner = Inside::of(shared)?.mounts(&parsed(&fs::read(TABLE)?));
    follower.members.push(Member { shared: Arc::downgrade(shared), channel: channel.clone(), inner });
    Ok(())
}

/// Whether file systems are mounted inside a source now.
pub(in super::super) fn has_inner_mounts(shared: &HostShared) -> bool {
    let inner = fs::read(TABLE).and_then(|table| Ok(Inside::of(shared)?.mounts(&parsed(&table))));
    match inner {
        Ok(inner) => !inner.is_empty(),
        Err(error) => {
            tracing::debug!(%error, "the mount table cannot be read");
            false
        }
    }
}

/// Stops following them. Waits for the end of the thread if this was the last host.
pub(super) fn leave(shared: &Arc<HostShared>) {
    let mut running = FOLLOWER.lock();
    let Some(follower) = running.as_mut() else { return };
    let is_it = |member: &Member| ptr::eq(member.shared.as_ptr(), Arc::as_ptr(shared));
    // Dropped after the lock: the receiver of the channel may be waited for.
    let left: Vec<Member> = follower.members.extract_if(.., |member| is_it(member)).collect();
    let last = if follower.members.is_empty() { running.take() } else { None };
    drop(running);
    drop(left);
    if let Some(Follower { stop, thread, .. }) = last {
        super::end(&stop, thread);
    }
}

impl Follower {
    fn start() -> io::Result<Follower> {
        let table = fs::File::open(TABLE)?;
        let stop = super::eventfd()?;
        let stopped = stop.try_clone()?;
        let thread = std::thread::Builder::new().name("nacre-mounts".into()).spawn(move || follow(&table, &stopped))?;
        Ok(Follower { members: Vec::new(), stop, thread })
    }
}

/// Body of the thread.
fn follow(table: &fs::File, stop: &OwnedFd) {
    loop {
        let mut waited = [PollFd::new(stop, PollFlags::IN), PollFd::new(table, PollFlags::PRI)];
        match rustix::event::poll(&mut waited, None) {
            Ok(_) if waited.first().is_some_and(|stop| !stop.revents().is_empty()) => return,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                tracing::error!(%error, "the mount table cannot be followed any more");
                return members().iter().for_each(promise_nothing);
            }
        }
        match concerned(table) {
            Ok(concerned) => concerned.iter().for_each(notify),
            Err(error) => {
                tracing::error!(%error, "the mount table cannot be read");
                members().iter().for_each(promise_nothing);
            }
        }
    }
}

/// All hosts, as if all mounts had changed.
fn members() -> Vec<Concerned> {
    let running = FOLLOWER.lock();
    let members = running.iter().flat_map(|follower| &follower.members);
    members.filter_map(|member| member.concerned(PathBuf::new(), Vec::new())).collect()
}

/// The hosts in whose sources something was mounted or unmounted.
fn concerned(table: &fs::File) -> io::Result<Vec<Concerned>> {
    let mut running = FOLLOWER.lock();
    let Some(follower) = running.as_mut() else { return Ok(Vec::new()) };
    // With the lock held: a host that joins has then read an older table than this one.
    let mut bytes = Vec::new();
    let mut reader = table;
    reader.rewind()?;
    reader.read_to_end(&mut bytes)?;
    // Once for all members: a process of a thousand mounts reads a table of as many lines after each of them.
    let table = parsed(&bytes);
    let mut concerned = Vec::new();
    for member in &mut follower.members {
        let Some(shared) = member.shared.upgrade() else { continue };
        let inside = Inside::of(&shared)?;
        let inner = inside.mounts(&table);
        let changed: Vec<InnerMount> = inner.symmetric_difference(&member.inner).cloned().collect();
        member.inner = inner;
        if !changed.is_empty() {
            concerned.extend(member.concerned(inside.source, changed));
        }
    }
    Ok(concerned)
}

impl Member {
    fn concerned(&self, source: PathBuf, changed: Vec<InnerMount>) -> Option<Concerned> {
        Some(Concerned { shared: self.shared.upgrade()?, channel: self.channel.clone(), source, changed })
    }
}

/// Withdraws the caching guarantees of a source.
fn promise_nothing(host: &Concerned) {
    event_loop::promise_nothing(&host.shared);
    let _nobody_may_listen = host.channel.send(Invalidation::Everything);
}

fn notify(host: &Concerned) {
    host.shared.watch.mounts_changed();
    let names: Option<BTreeSet<_>> =
        host.changed.iter().map(|mount| place(&host.shared, &host.source, mount)).collect();
    let notices = match names {
        Some(names) => names.into_iter().map(|(parent, name)| Invalidation::Entry { parent, name }).collect(),
        None => vec![Invalidation::Everything],
    };
    if notices.into_iter().any(|notice| host.channel.send(notice).is_err()) {
        event_loop::promise_nothing(&host.shared);
    }
}

/// Directory and name of a mount point; `None` if it is not in a directory on the source's own
/// mount, or cannot be examined.
fn place(shared: &HostShared, source: &Path, mount: &InnerMount) -> Option<(FileId, Box<[u8]>)> {
    if mount.parent != shared.directories.mounts().root().0 {
        return None;
    }
    let below = mount.path.strip_prefix(source).ok()?;
    let name = Box::from(below.file_name()?.as_bytes());
    let root = shared.directories.root();
    let parent = below.parent().filter(|parent| !parent.as_os_str().is_empty());
    let statx = match parent {
        None => stat::of_file_timeless(root).ok()?,
        Some(parent) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
            let opened = rustix::fs::openat2(root, parent, flags, Mode::empty(), resolve).ok()?;
            stat::of_file_timeless(opened.as_fd()).ok()?
        }
    };
    Some((shared.directories.mounts().id(&statx), name))
}

/// Location of a source.
struct Inside {
    mount: u64,
    source: PathBuf,
}

impl Inside {
    fn of(shared: &HostShared) -> io::Result<Inside> {
        let source = fs::read_link(proc_path(shared.directories.root()))?;
        Ok(Inside { mount: shared.directories.mounts().root().0, source })
    }

    /// Returns the mounts inside the source that are on its own mount, or on one of these. The table is in the order of
    /// the mount points.
    fn mounts(&self, table: &[InnerMount]) -> BTreeSet<InnerMount> {
        // Paths are ordered by their names: those below the source follow it.
        let first = table.partition_point(|mount| mount.path <= self.source);
        let after = table.get(first..).unwrap_or_default();
        let mut rest: Vec<&InnerMount> =
            after.iter().take_while(|mount| mount.path.starts_with(&self.source)).collect();
        let (mut known, mut inner) = (HashSet::from([self.mount]), BTreeSet::new());
        loop {
            // Mounts over the source's root or over another mount point there hide it, and are
            // skipped.
            let (found, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|mount| known.contains(&mount.parent));
            if found.is_empty() {
                return inner;
            }
            known.extend(found.iter().map(|mount| mount.id));
            inner.extend(found.into_iter().cloned());
            rest = others;
        }
    }
}

/// The lines of a table, in the order of their mount points.
fn parsed(table: &[u8]) -> Vec<InnerMount> {
    let mut mounts: Vec<InnerMount> = table.split(|&byte| byte == b'\n').filter_map(inner_mount).collect();
    mounts.sort_by(|one, other| one.path.cmp(&other.path));
    mounts
}

/// Parses a line of the table: id, parent, device, root and mount point come first.
fn inner_mount(line: &[u8]) -> Option<InnerMount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = fields.next()?.to_vec();
    let path = unescaped(fields.nth(1)?);
    Some(InnerMount { id, parent, device, path })
}

/// Decodes blank, tab, newline and backslash, which are written as a backslash and three octal
/// digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        match (byte, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            (byte, _) => bytes.push(*byte),
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_that_the_source_shows_count() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/a rw\n\
            2 1 8:2 / /srv/a rw - xfs /dev/b rw\n\
            3 2 0:9 / /srv/a/with\\040blank\\134 rw shared:1 - tmpfs \xff rw\n\
            4 1 0:7 / /srv rw - tmpfs over rw\n\
            5 4 0:8 / /srv/over rw - tmpfs inner rw\n\
            6 1 0:6 / /srvs rw - tmpfs beside rw\n\
            7 1 0:5 / /srv.d rw - tmpfs beside rw\n\
            8 1 0:4 / /srv-more/a rw - tmpfs beside rw\n\
            not a line\n";
        let table = &parsed(table);
        let inside = Inside { mount: 1, source: PathBuf::from("/srv") };
        let paths: Vec<PathBuf> = inside.mounts(table).into_iter().map(|mount| mount.path).collect();
        assert_eq!(paths, [PathBuf::from("/srv/a"), PathBuf::from("/srv/a/with blank\\")]);
        let other = Inside { mount: 4, source: PathBuf::from("/srv") };
        assert_eq!(other.mounts(table).into_iter().map(|mount| mount.id).collect::<Vec<_>>(), [5]);
        let all = Inside { mount: 1, source: PathBuf::from("/") };
        assert_eq!(all.mounts(table).len(), 7);
    }
}
