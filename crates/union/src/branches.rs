//! A branch at work: its layer, what may be done with it, and its own directories.
//!
//! Made by [`crate::Union::named`] and when a branch is added. What may be done with it and its
//! place in the order change only while no operation is under way (`control.rs`); its slot never
//! changes. Whoever uses a file of a branch holds the branch, so that one that has been removed
//! from the union goes on serving what is open on it.

use crate::{
    branch::{BRANCHES_MAX, BranchMode, CopyOnOpen},
    marks::{Marks, Namespace, Style},
    options::UnionOptions,
    splitmix::mix,
    work::{Work, WorkDirectory, WorkHome},
};
use nacre_vfs::{Errno, FileId, Layer, Node, Result};
use parking_lot::RwLock;
use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
};

/// A branch to be.
pub struct Member {
    /// As the user calls it: the path of a directory, mostly.
    pub name: PathBuf,
    /// The branch.
    pub layer: Arc<dyn Layer>,
    /// What may be done with it.
    pub mode: BranchMode,
    /// A directory of the same layer outside of the branch's tree, where the union's own
    /// directories go (overlayfs: `workdir`); `None` for the branch's top.
    pub work: Option<Node>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("name", &self.name).field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// The place of a branch that is no longer one: below all others.
const NOWHERE: usize = usize::MAX;

const CREATES: u8 = 1;
const WRITABLE: u8 = 2;
const READS_MARKS: u8 = 4;
/// Nothing new is put there although its mode would allow it.
const DRAINING: u8 = 8;
const COPIES_ON_OPEN: u8 = 16;

/// Which slots are taken: also those of branches that have been removed, as long as anybody has
/// something open there.
#[derive(Default)]
pub(crate) struct Slots(Vec<Weak<Branch>>);

impl Slots {
    /// A free slot, one that was never used before another.
    pub(crate) fn free(&self) -> Option<u8> {
        let next = if self.0.len() < BRANCHES_MAX {
            Some(self.0.len())
        } else {
            self.0.iter().position(|slot| slot.strong_count() == 0)
        };
        next.and_then(|slot| u8::try_from(slot).ok())
    }

    /// The slot of this branch is taken.
    pub(crate) fn take(&mut self, branch: &Arc<Branch>) {
        let slot = usize::from(branch.slot);
        if self.0.len() <= slot {
            self.0.resize(slot + 1, Weak::new());
        }
        if let Some(place) = self.0.get_mut(slot) {
            *place = Arc::downgrade(branch);
        }
    }
}

/// A branch.
pub(crate) struct Branch {
    /// What listings and tables know it by, for as long as anybody holds it.
    pub(crate) slot: u8,
    /// As the user calls it.
    pub(crate) name: PathBuf,
    pub(crate) layer: Arc<dyn Layer>,
    pub(crate) root: Node,
    pub(crate) root_id: FileId,
    style: Style,
    /// Its own directories are made when they are needed.
    work_on_demand: bool,
    place: AtomicUsize,
    flags: AtomicU8,
    /// Marks are in `user.` attributes.
    user_marks: AtomicBool,
    mode: RwLock<Arc<BranchMode>>,
    /// Where its own directories are instead of at its top.
    apart: Option<Node>,
    hardlink_index: RwLock<Option<Node>>,
    work: OnceLock<Work>,
}

impl Branch {
    /// Opens a branch. Its own directories are made where it is to be written, unless they are to be made on demand.
    ///
    /// # Errors
    /// ENOTDIR where it is no directory, EROFS where it should be written and cannot be, and what
    /// the storage says.
    pub(crate) fn open(slot: u8, member: Member, options: &UnionOptions) -> Result<Branch> {
        let Member { name, layer, mode, work } = member;
        let root = layer.root()?;
        if root.attr.kind != nacre_vfs::Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let branch = Branch {
            slot,
            name,
            layer,
            root: root.node,
            root_id: root.attr.id,
            style: options.whiteout,
            work_on_demand: options.work_on_demand && work.is_none(),
            place: AtomicUsize::new(NOWHERE),
            flags: AtomicU8::new(0),
            user_marks: AtomicBool::new(false),
            mode: RwLock::new(Arc::new(BranchMode::ro())),
            apart: work,
            hardlink_index: RwLock::new(None),
            work: OnceLock::new(),
        };
        branch.prepare(&mode)?;
        branch.set_mode(mode);
        Ok(branch)
    }

    /// Opens or makes the directories that a mode needs; nothing else changes yet. While a branch is not written, other
    /// unions may remove and make its directories: each time it is to be written, they are looked for anew.
    ///
    /// # Errors
    /// As [`Branch::open`].
    pub(crate) fn prepare(&self, mode: &BranchMode) -> Result<()> {
        // Nobody but this union changes the directories of a branch that it writes.
        if self.is_writable() {
            return Ok(());
        }
        if mode.writable() {
            self.prepare_work()?;
        }
        if mode.reads_marks() {
            let on_demand = self.work_on_demand && mode.writable();
            let index = if mode.writable() && !on_demand {
                Some(Work::make_hardlink_index(&*self.layer, self.home())?)
            } else {
                Work::hardlink_index(&*self.layer, self.home(), on_demand)?
            };
            *self.hardlink_index.write() = index;
        }
        Ok(())
    }

    /// Opens the work directory, or looks for it anew. Only one thread changes branches at a time.
    fn prepare_work(&self) -> Result<()> {
        if let Some(work) = self.work.get() {
            return work.reopen(&*self.layer, self.home());
        }
        let work = Work::open(&*self.layer, self.home(), self.work_on_demand)?;
        let namespace = if self.work_on_demand {
            Marks::probe(&*self.layer, &self.root)?
        } else {
            Marks::probe(&*self.layer, &*work.directory(&*self.layer, self.home())?)?
        };
        self.user_marks.store(namespace == Namespace::User, Ordering::Relaxed);
        let _ = self.work.set(work);
        Ok(())
    }

    /// Where its own directories are.
    fn home(&self) -> WorkHome<'_> {
        self.apart.as_ref().map_or(WorkHome::Top(&self.root), WorkHome::Apart)
    }

    /// From now on, this is what may be done. [`Branch::prepare`] has been called with it.
    pub(crate) fn set_mode(&self, mode: BranchMode) {
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        let flags = flag(mode.creates(), CREATES)
            | flag(mode.writable(), WRITABLE)
            | flag(mode.reads_marks(), READS_MARKS)
            | flag(mode.copy_on_open != CopyOnOpen::No, COPIES_ON_OPEN);
        *self.mode.write() = Arc::new(mode);
        self.flags.store(flags, Ordering::Relaxed);
    }

    /// Whether anything new may be put there, from now on, if its mode allows it.
    pub(crate) fn set_draining(&self, draining: bool) {
        if draining {
            self.flags.fetch_or(DRAINING, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!DRAINING, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.has(DRAINING)
    }

    fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    /// What may be done with it, as the user wrote it.
    pub(crate) fn mode(&self) -> Arc<BranchMode> {
        Arc::clone(&self.mode.read())
    }

    /// Its place, counted from the top; below all others once it is no longer a branch.
    pub(crate) fn index(&self) -> usize {
        self.place.load(Ordering::Relaxed)
    }

    pub(crate) fn set_index(&self, index: usize) {
        self.place.store(index, Ordering::Relaxed);
    }

    /// It is no longer part of the union.
    pub(crate) fn retire(&self) {
        self.set_index(NOWHERE);
    }

    /// Whether it is part of the union.
    pub(crate) fn is_member(&self) -> bool {
        self.index() != NOWHERE
    }

    /// What a process after this one knows it by: its top directory.
    pub(crate) fn left_place(&self) -> u64 {
        let FileId { fs, ino, generation } = self.root_id;
        [ino, generation].into_iter().fold(mix(fs), |digest, number| mix(digest ^ number))
    }

    /// Whether this is its top directory.
    pub(crate) fn is_root(&self, id: FileId) -> bool {
        id == self.root_id
    }

    /// Whether files on it may be changed.
    pub(crate) fn is_writable(&self) -> bool {
        self.has(WRITABLE)
    }

    /// Whether new files may be put there.
    pub(crate) fn creates(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & (CREATES | DRAINING) == CREATES
    }

    /// Whether whiteouts and opaque directories on it count.
    pub(crate) fn reads_marks(&self) -> bool {
        self.has(READS_MARKS)
    }

    /// Whether opening a file may copy or move it up.
    pub(crate) fn copies_on_open(&self) -> bool {
        self.has(COPIES_ON_OPEN)
    }

    /// How marks are written and read.
    pub(crate) fn marks(&self) -> Marks {
        let namespace = if self.user_marks.load(Ordering::Relaxed) { Namespace::User } else { Namespace::Trusted };
        Marks { style: self.style, namespace }
    }

    /// Marks there have been written by a union whose other branches are like this.
    pub(crate) fn believe_marks_in(&self, namespace: Namespace) {
        self.user_marks.store(namespace == Namespace::User, Ordering::Relaxed);
    }

    /// The hard-link index, where marks are read.
    pub(crate) fn hardlink_index(&self) -> Option<Node> {
        self.hardlink_index.read().clone().filter(|_| self.reads_marks())
    }

    /// Gives temporary names in its own directories.
    ///
    /// # Errors
    /// EROFS where it is not writable.
    pub(crate) fn work(&self) -> Result<&Work> {
        self.work.get().filter(|_| self.is_writable()).ok_or(Errno::EROFS)
    }

    /// Its work directory, which is there as long as the answer lives.
    ///
    /// # Errors
    /// EROFS where it is not writable; what the storage says where it has to be made.
    pub(crate) fn work_directory(&self) -> Result<WorkDirectory<'_>> {
        self.work()?.directory(&*self.layer, self.home())
    }

    /// Whether temporary files of it may be there.
    pub(crate) fn has_work(&self) -> bool {
        self.work.get().is_some()
    }
}

/// Marks on branches that are only read have been written by a union like this one.
pub(crate) fn believe(branches: &[Arc<Branch>]) {
    let namespace = branches.iter().find(|branch| branch.is_writable()).map(|branch| branch.marks().namespace);
    if let Some(namespace) = namespace {
        branches
            .iter()
            .filter(|branch| !branch.is_writable() && !branch.has_work())
            .for_each(|branch| branch.believe_marks_in(namespace));
    }
}

/// The index of a branch, made where it is missing.
///
/// # Errors
/// EROFS where it has none and cannot be written; what the storage says.
pub(crate) fn index_directory(branch: &Branch) -> Result<Node> {
    if let Some(index) = branch.hardlink_index() {
        return Ok(index);
    }
    if !branch.is_writable() {
        return Err(Errno::EROFS);
    }
    // Another thread may have been faster: both found the same directory.
    let index = Work::make_hardlink_index(&*branch.layer, branch.home())?;
    Ok(branch.hardlink_index.write().get_or_insert(index).clone())
}
