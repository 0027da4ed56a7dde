//! Fanotify marks on whole file systems: the group that receives their events, and the hosts that
//! share it.
//!
//! Made or joined when a host begins to watch. A host has a group of its own, unless it belongs to
//! a [`WatchGroup`] (the branches of one union, or all mounts of one process): hosts of a watch
//! group whose sources are on one mount share a group. A change then causes one event however many
//! hosts there are, one thread reads it, and writes through the detached mount of one of them cause
//! no event.
//!
//! This could hide content that one host of a watch group writes to a file that another host shows,
//! too. In one tree, the front end takes both for one file, as the identities are the same, and
//! knows of the write; but there may be a second identity that hosts do not know (a copy that has
//! the inode number of its origin, in a union), and another tree does not know of the write. So
//! writes to everything that two hosts could show cause events for all:
//! * a file with several names is written through the ordinary mount (`Watch::unreported`); where
//!   there are several trees, our own changes of it are reported, too;
//! * hosts whose sources overlap have no detached mounts (`Marks::admit`, [`Marks::settle`]);
//! * if a file of the source's file system is found through another mount (a bind mount, perhaps
//!   from another host's source), or if two hosts find the same other file system, no host has a
//!   detached mount for it any more ([`Marks::meet_elsewhere`], [`Marks::meet`]); nor does a host
//!   that joins such a watch group later.
//!
//! Changes of names and attributes by this process itself are never reported: two trees of one
//! process of which one changes what the other shows must not share a watch group.
//!
//! Invariants: a host is a member before it gives any caching guarantee; the last member that
//! leaves ends the thread.

use super::{super::HostShared, event_loop};
use crate::settings::Symlinks;
use nacre_sys::{fanotify, inode::proc_path};
use nacre_vfs::Invalidation;
use parking_lot::{Mutex, RwLock};
use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    ptr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::Sender,
    },
    thread::JoinHandle,
};

/// Hosts of one process that may share fanotify groups.
#[derive(Debug, Default)]
pub struct WatchGroup {
    groups: Mutex<Vec<Weak<Marks>>>,
    trees: AtomicU64,
}

impl WatchGroup {
    /// Creates a tree for hosts in which a file of the storage is one file, whichever host shows
    /// it: these hosts need no events about each other's writes.
    pub fn tree(self: &Arc<WatchGroup>) -> Tree {
        Tree { watch_group: Arc::clone(self), number: self.trees.fetch_add(1, Ordering::Relaxed) }
    }
}

/// A tree of a [`WatchGroup`]; passed to each of its hosts at their creation.
#[derive(Clone, Debug)]
pub struct Tree {
    watch_group: Arc<WatchGroup>,
    number: u64,
}

/// Location of a source.
struct Site {
    mount: u64,
    device: u32,
    path: PathBuf,
    tree: u64,
}

impl Site {
    /// Determines the location; `None` if it may overlap with others unnoticed.
    fn of(shared: &HostShared, tree: &Tree) -> Option<Site> {
        // A link that is shown as its target may lead anywhere.
        if shared.options.symlinks == Symlinks::Resolve {
            return None;
        }
        let (mount, device) = shared.directories.mounts().root();
        let path = std::fs::read_link(proc_path(shared.directories.root())).ok()?;
        let removed = path.as_os_str().as_bytes().ends_with(b" (deleted)");
        (path.is_absolute() && !removed).then_some(Site { mount, device, path, tree: tree.number })
    }
}

fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// A host that is a member of a group.
struct Member {
    shared: Weak<HostShared>,
    /// Path of its source, where the group may be shared.
    source: PathBuf,
    tree: u64,
    /// Its source overlaps with another member's.
    overlaps: bool,
    channel: Sender<Invalidation>,
    /// Devices of the other file systems that it has met.
    devices: Vec<u32>,
}

#[derive(Default)]
struct MarksState {
    members: Vec<Member>,
    /// No host may join any more.
    closed: bool,
    /// Devices without detached mounts: all writes cause events.
    heard: Vec<u32>,
}

/// A strong reference to a member, while a batch of events is processed.
pub(super) struct Hearer {
    pub(super) shared: Arc<HostShared>,
    pub(super) channel: Sender<Invalidation>,
}

/// A fanotify group with its member hosts; see the file's head.
pub(in super::super) struct Marks {
    group: OwnedFd,
    /// Mount and device of all sources, if the group may be shared.
    site: Option<(u64, u32)>,
    state: RwLock<MarksState>,
    /// Held while marks on file systems are replaced by marks on single files, or back
    /// (`resting.rs`), and while a host joins. Taken before `state`.
    pub(super) changing: Mutex<()>,
    /// Set after a failure: nothing may be cached any more.
    failed: AtomicBool,
    /// Eventfd that ends the thread.
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Marks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Marks").field("site", &self.site).finish_non_exhaustive()
    }
}

impl Marks {
    /// Returns the group for a host: a shared one of its watch group, if possible, or a new one.
    ///
    /// # Errors
    /// EPERM without `CAP_SYS_ADMIN`; EMFILE.
    pub(super) fn join(shared: &Arc<HostShared>, channel: &Sender<Invalidation>) -> io::Result<Arc<Marks>> {
        let Some((tree, site)) = shared.options.tree.as_ref().and_then(|tree| Some((tree, Site::of(shared, tree)?)))
        else {
            return Marks::start(shared, None, channel);
        };
        let mut known = tree.watch_group.groups.lock();
        known.retain(|marks| marks.strong_count() > 0);
        if let Some(marks) = known.iter().filter_map(Weak::upgrade).find(|marks| marks.admit(shared, &site, channel)) {
            return Ok(marks);
        }
        let marks = Marks::start(shared, Some(site), channel)?;
        known.push(Arc::downgrade(&marks));
        Ok(marks)
    }

    fn start(shared: &Arc<HostShared>, site: Option<Site>, channel: &Sender<Invalidation>) -> io::Result<Arc<Marks>> {
        let place = site.as_ref().map(|site| (site.mount, site.device));
        let (source, tree) = site.map(|site| (site.path, site.tree)).unwrap_or_default();
        let shared = Arc::downgrade(shared);
        let member = Member { shared, source, tree, overlaps: false, channel: channel.clone(), devices: Vec::new() };
        let marks = Arc::new(Marks {
            group: fanotify::open()?,
            site: place,
            state: RwLock::new(MarksState { members: vec![member], ..MarksState::default() }),
            changing: Mutex::default(),
            failed: AtomicBool::new(false),
            stop: super::eventfd()?,
            thread: Mutex::default(),
        });
        let (group, stop, weak) = (marks.group.try_clone()?, marks.stop.try_clone()?, Arc::downgrade(&marks));
        let thread = std::thread::Builder::new()
            .name("nacre-watch".into())
            .spawn(move || event_loop::hear(&group, &stop, &weak))?;
        *marks.thread.lock() = Some(thread);
        Ok(marks)
    }

    fn admit(&self, shared: &Arc<HostShared>, site: &Site, channel: &Sender<Invalidation>) -> bool {
        if self.failed() || self.site != Some((site.mount, site.device)) {
            return false;
        }
        // A thread that removes the marks on file systems because all members are idle does so
        // before this host sets its own marks, or sees that it is awake.
        let _one_at_a_time = self.changing.lock();
        let mut state = self.state.write();
        if state.closed {
            return false;
        }
        let (mut overlaps, mut done) = (false, Ok(()));
        for member in state.members.iter_mut().filter(|member| overlap(&member.source, &site.path)) {
            (overlaps, member.overlaps) = (true, true);
            done = done.and(give_up(member, self.group(), site.device));
        }
        let (shared, source) = (Arc::downgrade(shared), site.path.clone());
        state.members.push(Member {
            shared,
            source,
            tree: site.tree,
            overlaps,
            channel: channel.clone(),
            devices: Vec::new(),
        });
        drop(state);
        self.judge(done);
        true
    }

    /// Removes a host. Waits for the end of the thread if it was the last member.
    pub(super) fn leave(&self, shared: &Arc<HostShared>) {
        if !self.dismiss(shared) {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        super::end(&self.stop, thread);
    }

    /// Removes a host; returns whether no member remains.
    pub(super) fn dismiss(&self, shared: &Arc<HostShared>) -> bool {
        let mut state = self.state.write();
        let left = state.members.iter().position(|member| ptr::eq(member.shared.as_ptr(), Arc::as_ptr(shared)));
        // Dropped after the lock: the receiver of the channel may be waited for.
        let left = left.map(|at| state.members.remove(at));
        let nobody = state.members.is_empty();
        state.closed |= nobody;
        drop(state);
        drop(left);
        nobody
    }

    /// Whether hosts of a watch group may share this group: the rules about writes in the file's
    /// head apply then.
    pub(super) fn may_be_shared(&self) -> bool {
        self.site.is_some()
    }

    pub(super) fn group(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Withdraws all caching guarantees, as the thread has failed or a mark could not be set.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        for member in &self.state.read().members {
            let _nobody_may_listen = member.channel.send(Invalidation::Everything);
        }
    }

    /// Strong references to all members.
    pub(super) fn hearers(&self) -> Vec<Hearer> {
        let state = self.state.read();
        let hearer =
            |member: &Member| Some(Hearer { shared: member.shared.upgrade()?, channel: member.channel.clone() });
        state.members.iter().filter_map(hearer).collect()
    }

    /// Records that a member has found a file of the sources' file system through another mount
    /// than that of its source.
    pub(super) fn meet_elsewhere(&self) {
        let Some((_, device)) = self.site else { return };
        {
            let state = self.state.read();
            if state.closed && (state.members.len() < 2 || state.heard.contains(&device)) {
                return;
            }
        }
        let mut state = self.state.write();
        state.closed = true;
        let done = if state.members.len() > 1 { state.hear(self.group(), device) } else { Ok(()) };
        drop(state);
        self.judge(done);
    }

    /// Records that a member watches another file system now.
    pub(super) fn meet(&self, shared: *const HostShared, device: u32) {
        let is_it = |member: &Member| ptr::eq(member.shared.as_ptr(), shared);
        let mut state = self.state.write();
        let others = state.members.iter().any(|member| !is_it(member) && member.devices.contains(&device));
        if let Some(member) = state.members.iter_mut().find(|member| is_it(member)) {
            member.devices.push(device);
        }
        let done = if others { state.hear(self.group(), device) } else { Ok(()) };
        drop(state);
        self.judge(done);
    }

    /// Removes a member's new detached mount for that device, if all writes there must cause
    /// events.
    pub(super) fn settle(&self, shared: *const HostShared, running: &super::Running, device: u32) {
        let state = self.state.read();
        let overlaps = state.members.iter().any(|member| ptr::eq(member.shared.as_ptr(), shared) && member.overlaps);
        let at_home = self.site.is_some_and(|(_, home)| home == device);
        let heard = state.heard.contains(&device) || overlaps && at_home;
        let done = if heard { running.own_mounts.give_up(self.group(), device) } else { Ok(()) };
        drop(state);
        self.judge(done);
    }

    /// Whether the members belong to more than one tree.
    pub(super) fn has_several_trees(&self) -> bool {
        let state = self.state.read();
        state.members.first().is_some_and(|first| state.members.iter().any(|member| member.tree != first.tree))
    }

    fn judge(&self, done: io::Result<()>) {
        if let Err(error) = done {
            tracing::error!(%error, "writes through a mount of our own cannot be heard");
            self.fail();
        }
    }

    /// Number of members.
    #[cfg(test)]
    pub(in super::super) fn members(&self) -> usize {
        self.state.read().members.len()
    }
}

impl MarksState {
    /// Removes all detached mounts for that device. Under the lock: a thread that finds the device
    /// in `heard` may rely on it.
    fn hear(&mut self, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
        if !self.heard.contains(&device) {
            self.heard.push(device);
        }
        // All of them, even if one fails.
        let done = self.members.iter().map(|member| give_up(member, group, device));
        done.fold(Ok(()), Result::and)
    }
}

/// Removes a member's detached mount for that device.
fn give_up(member: &Member, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
    let Some(shared) = member.shared.upgrade() else { return Ok(()) };
    shared.watch.running.get().map_or(Ok(()), |running| running.own_mounts.give_up(group, device))
}
