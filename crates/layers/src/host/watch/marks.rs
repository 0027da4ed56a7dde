//! Marks on whole file systems: the group that they report to, and the hosts that hear by it.
//!
//! Made and joined when a host begins to watch. A host has marks of its own, unless it belongs to a
//! [`WatchGroup`] (the branches of one union, or all mounts of one process): hosts of a watch group
//! that lie on one mount share them. A change then makes one event however many hosts there are,
//! one thread hears it, and what is written through the own mount of one of them makes no event.
//!
//! What may so go unheard: content that one host of a watch group writes to a file that another
//! host of it shows, too. In one tree whoever stands in front takes that for one file, as the
//! identities are the same, and knows of the write; but there may be a second identity that hosts
//! do not know (a copy that carries the number of its origin, in a union), and another tree knows
//! nothing. So all that could be shown by two hosts is heard by all:
//! * a file with several names is written through the ordinary mount (`Watch::unreported`); where
//!   there are several trees, our own changes of it are told, too;
//! * hosts whose sources overlap have no mounts of their own (`Marks::admit`, [`Marks::settle`]);
//! * where anything of the source's file system is met through another mount (a directory bound
//!   from elsewhere, perhaps from another host's source), or where two hosts meet the same other
//!   file system, nobody has a mount of his own for it any more ([`Marks::meet_elsewhere`],
//!   [`Marks::meet`]); nor does a host join that finds such a watch group.
//!
//! Names and attributes that this process itself changes are told to nobody, as ever: two trees of
//! one process of which one changes what the other shows are not for one watch group.
//!
//! Invariants: a host is a member before it promises anything; the last one who leaves ends the
//! thread.

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

/// Hosts that may hear by one group of marks: those of one process.
#[derive(Debug, Default)]
pub struct WatchGroup {
    groups: Mutex<Vec<Weak<Marks>>>,
    trees: AtomicU64,
}

impl WatchGroup {
    /// For the hosts of one more tree, in which one file of the storage is one file whichever of
    /// them shows it: they need not be told of each other's writes.
    pub fn tree(self: &Arc<WatchGroup>) -> Tree {
        Tree { watch_group: Arc::clone(self), number: self.trees.fetch_add(1, Ordering::Relaxed) }
    }
}

/// A tree of a [`WatchGroup`]; given to each of its hosts when that is opened.
#[derive(Clone, Debug)]
pub struct Tree {
    watch_group: Arc<WatchGroup>,
    number: u64,
}

/// Where a source lies.
struct Site {
    mount: u64,
    device: u32,
    path: PathBuf,
    tree: u64,
}

impl Site {
    /// `None` where it cannot be told apart from others.
    fn of(shared: &HostShared, tree: &Tree) -> Option<Site> {
        // A link that is shown as its target leads anywhere.
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

/// A host that hears.
struct Member {
    shared: Weak<HostShared>,
    /// Where its source lies, where the group may be shared.
    source: PathBuf,
    tree: u64,
    /// Its source overlaps with that of another member.
    overlaps: bool,
    channel: Sender<Invalidation>,
    /// The other file systems that it has met.
    devices: Vec<u32>,
}

#[derive(Default)]
struct MarksState {
    members: Vec<Member>,
    /// Nobody may join any more.
    closed: bool,
    /// Devices of which all writes are heard.
    heard: Vec<u32>,
}

/// A member at work on a batch of events.
pub(super) struct Hearer {
    pub(super) shared: Arc<HostShared>,
    pub(super) channel: Sender<Invalidation>,
}

/// See the file's head.
pub(in super::super) struct Marks {
    group: OwnedFd,
    /// The mount and the device of all sources, where there may be several.
    site: Option<(u64, u32)>,
    state: RwLock<MarksState>,
    /// Held while marks on file systems give way to marks on single files, and back
    /// (`resting.rs`), and while a host joins. Taken before `state`.
    pub(super) changing: Mutex<()>,
    /// Nothing is promised any more.
    failed: AtomicBool,
    /// Ends the thread when written to.
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Marks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Marks").field("site", &self.site).finish_non_exhaustive()
    }
}

impl Marks {
    /// The group for a host: one of its watch group's, where that is possible, or a new one.
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
        // Whoever is about to remove the marks on file systems, as all members rest, does so before
        // this one sets its own, or finds it awake.
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

    /// A host hears nothing any more. Waits for the end of the thread where it was the last one.
    pub(super) fn leave(&self, shared: &Arc<HostShared>) {
        if !self.dismiss(shared) {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        super::end(&self.stop, thread);
    }

    /// Takes a host out; answers whether nobody is left.
    pub(super) fn dismiss(&self, shared: &Arc<HostShared>) -> bool {
        let mut state = self.state.write();
        let left = state.members.iter().position(|member| ptr::eq(member.shared.as_ptr(), Arc::as_ptr(shared)));
        // Dropped with the lock given back: the channel's other end may be waited for.
        let left = left.map(|at| state.members.remove(at));
        let nobody = state.members.is_empty();
        state.closed |= nobody;
        drop(state);
        drop(left);
        nobody
    }

    /// Whether hosts of a watch group may share it: what any of them writes is then to be heard as
    /// the file's head says.
    pub(super) fn may_be_shared(&self) -> bool {
        self.site.is_some()
    }

    pub(super) fn group(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The thread has failed, or something could not be heard: takes all promises back.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        for member in &self.state.read().members {
            let _nobody_may_listen = member.channel.send(Invalidation::Everything);
        }
    }

    /// All members.
    pub(super) fn hearers(&self) -> Vec<Hearer> {
        let state = self.state.read();
        let hearer =
            |member: &Member| Some(Hearer { shared: member.shared.upgrade()?, channel: member.channel.clone() });
        state.members.iter().filter_map(hearer).collect()
    }

    /// A member has found something of the sources' file system through another mount than that of
    /// its source.
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

    /// A member watches another file system now.
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

    /// A member has a mount of its own for that device: not for long where all writes there are to
    /// be heard.
    pub(super) fn settle(&self, shared: *const HostShared, running: &super::Running, device: u32) {
        let state = self.state.read();
        let overlaps = state.members.iter().any(|member| ptr::eq(member.shared.as_ptr(), shared) && member.overlaps);
        let at_home = self.site.is_some_and(|(_, home)| home == device);
        let heard = state.heard.contains(&device) || overlaps && at_home;
        let done = if heard { running.own_mounts.give_up(self.group(), device) } else { Ok(()) };
        drop(state);
        self.judge(done);
    }

    /// Whether there is more than one tree.
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

    /// How many hosts share it.
    #[cfg(test)]
    pub(in super::super) fn members(&self) -> usize {
        self.state.read().members.len()
    }
}

impl MarksState {
    /// Nobody writes to that device through a mount of his own any more. Under the lock: whoever
    /// finds it so may rely on it.
    fn hear(&mut self, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
        if !self.heard.contains(&device) {
            self.heard.push(device);
        }
        // All of them, whatever becomes of one.
        let done = self.members.iter().map(|member| give_up(member, group, device));
        done.fold(Ok(()), Result::and)
    }
}

/// A member has no mount of its own for that device any more.
fn give_up(member: &Member, group: BorrowedFd<'_>, device: u32) -> io::Result<()> {
    let Some(shared) = member.shared.upgrade() else { return Ok(()) };
    shared.watch.running.get().map_or(Ok(()), |running| running.own_mounts.give_up(group, device))
}
