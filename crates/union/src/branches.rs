//! A branch of a mounted union: its layer, its permissions, and the union's own directories on it.
//!
//! Made by [`crate::Union::named`] and when a branch is added. Its mode and its position in the order change
//! only while no operation is running (`control.rs`); its slot never changes. Each user of a file of a branch
//! holds a reference to the branch, so that a removed branch continues to serve its open files.

use crate::{
    branch::{BRANCHES_MAX, BranchMode, CopyOnOpen},
    marks::{Marks, Namespace, Style},
    options::UnionOptions,
    splitmix::mix,
    work::{NOT_OWN, Work, WorkDirectory, WorkHome, WorkLock},
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

/// A branch before it is opened.
pub struct Member {
    /// Name for the user: the path of a directory, mostly.
    pub name: PathBuf,
    /// The layer that serves the branch.
    pub layer: Arc<dyn Layer>,
    /// Permission and options.
    pub mode: BranchMode,
    /// A directory of the same layer outside of the branch's tree, where the union's own
    /// directories go (overlayfs: `workdir`); `None` for the branch's top.
    pub work: Option<Node>,
    /// Locks the branch's work directory on demand, as long as it exists.
    pub lock: Option<WorkLock>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("name", &self.name).field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// Position of a branch that is no longer part of the union: below all others.
const NOWHERE: usize = usize::MAX;

const CREATES: u8 = 1;
const WRITABLE: u8 = 2;
const READS_MARKS: u8 = 4;
/// No new files are created on the branch although its mode would allow it.
const DRAINING: u8 = 8;
const COPIES_ON_OPEN: u8 = 16;

/// Slots in use: also the slots of removed branches, as long as a reference to the branch exists.
#[derive(Default)]
pub(crate) struct Slots(Vec<Weak<Branch>>);

impl Slots {
    /// Returns a free slot; slots that were never used come first.
    pub(crate) fn free(&self) -> Option<u8> {
        let next = if self.0.len() < BRANCHES_MAX {
            Some(self.0.len())
        } else {
            self.0.iter().position(|slot| slot.strong_count() == 0)
        };
        next.and_then(|slot| u8::try_from(slot).ok())
    }

    /// Marks the slot of this branch as used.
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

/// An opened branch.
pub(crate) struct Branch {
    /// Number of the branch in listings and tables, for as long as a reference to the branch exists.
    pub(crate) slot: u8,
    /// Name for the user.
    pub(crate) name: PathBuf,
    pub(crate) layer: Arc<dyn Layer>,
    pub(crate) root: Node,
    pub(crate) root_id: FileId,
    style: Style,
    /// Whether the union's own directories on the branch are made only when they are needed.
    work_on_demand: bool,
    /// Locks the work directory on demand.
    lock: Option<WorkLock>,
    place: AtomicUsize,
    flags: AtomicU8,
    /// Whether whiteouts and other marks are in `user.` attributes instead of `trusted.` ones.
    user_marks: AtomicBool,
    mode: RwLock<Arc<BranchMode>>,
    /// Directory for the union's own directories; `None` for the branch's root.
    apart: Option<Node>,
    hardlink_index: RwLock<Option<Node>>,
    work: OnceLock<Work>,
}

impl Branch {
    /// Opens a branch. The union's own directories are made if the branch is writable, unless they are to be
    /// made on demand.
    ///
    /// # Errors
    /// ENOTDIR where it is no directory, EROFS where the branch should be writable but is not, EEXIST where another
    /// user's file has the name of one of the union's own directories, and errors of the storage.
    pub(crate) fn open(slot: u8, member: Member, options: &UnionOptions) -> Result<Branch> {
        let Member { name, layer, mode, work, lock } = member;
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
            lock,
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
        let work = Work::open(&*self.layer, self.home(), self.work_on_demand, self.lock.clone())?;
        let namespace = if self.work_on_demand {
            Marks::probe(&*self.layer, &self.root)?
        } else {
            Marks::probe(&*self.layer, &*work.directory(&*self.layer, self.home())?)?
        };
        self.user_marks.store(namespace == Namespace::User, Ordering::Relaxed);
        let _ = self.work.set(work);
        Ok(())
    }

    /// The branch is not written any more: other unions may write to it.
    pub(crate) fn close_work(&self) {
        if let Some(work) = self.work.get() {
            work.close(&*self.layer, self.home());
        }
    }

    /// Where its own directories are.
    fn home(&self) -> WorkHome<'_> {
        self.apart.as_ref().map_or(WorkHome::Top(&self.root), WorkHome::Apart)
    }

    /// Sets the mode. [`Branch::prepare`] has been called with it.
    pub(crate) fn set_mode(&self, mode: BranchMode) {
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        let flags = flag(mode.creates(), CREATES)
            | flag(mode.writable(), WRITABLE)
            | flag(mode.reads_marks(), READS_MARKS)
            | flag(mode.copy_on_open != CopyOnOpen::No, COPIES_ON_OPEN);
        *self.mode.write() = Arc::new(mode);
        self.flags.store(flags, Ordering::Relaxed);
    }

    /// Stops or allows the creation of new files on the branch, within its mode.
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

    /// The mode, as the user wrote it.
    pub(crate) fn mode(&self) -> Arc<BranchMode> {
        Arc::clone(&self.mode.read())
    }

    /// Position from the top, starting at 0; `usize::MAX` once the branch is no longer part of the union.
    pub(crate) fn index(&self) -> usize {
        self.place.load(Ordering::Relaxed)
    }

    pub(crate) fn set_index(&self, index: usize) {
        self.place.store(index, Ordering::Relaxed);
    }

    /// Takes the branch out of the order: it is no longer part of the union.
    pub(crate) fn retire(&self) {
        self.set_index(NOWHERE);
    }

    /// Whether it is part of the union.
    pub(crate) fn is_member(&self) -> bool {
        self.index() != NOWHERE
    }

    /// Digest of the root directory's identity, by which the next process recognizes the branch.
    pub(crate) fn left_place(&self) -> u64 {
        let FileId { fs, ino, generation } = self.root_id;
        [ino, generation].into_iter().fold(mix(fs), |digest, number| mix(digest ^ number))
    }

    /// Whether this is the branch's root directory.
    pub(crate) fn is_root(&self, id: FileId) -> bool {
        id == self.root_id
    }

    /// Whether files on the branch may be changed.
    pub(crate) fn is_writable(&self) -> bool {
        self.has(WRITABLE)
    }

    /// Whether new files may be created on the branch.
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

    /// Format of whiteouts and other marks on the branch.
    pub(crate) fn marks(&self) -> Marks {
        let namespace = if self.user_marks.load(Ordering::Relaxed) { Namespace::User } else { Namespace::Trusted };
        Marks { style: self.style, namespace }
    }

    /// Sets the namespace in which the branch's marks are read.
    pub(crate) fn believe_marks_in(&self, namespace: Namespace) {
        self.user_marks.store(namespace == Namespace::User, Ordering::Relaxed);
    }

    /// The hard-link index, where marks are read.
    pub(crate) fn hardlink_index(&self) -> Option<Node> {
        self.hardlink_index.read().clone().filter(|_| self.reads_marks())
    }

    /// The allocator of temporary names in the union's own directories.
    ///
    /// # Errors
    /// EROFS where the branch is not writable.
    pub(crate) fn work(&self) -> Result<&Work> {
        self.work.get().filter(|_| self.is_writable()).ok_or(Errno::EROFS)
    }

    /// The work directory, which exists as long as the returned guard lives.
    ///
    /// # Errors
    /// EROFS where the branch is not writable; where the directory has to be made, EEXIST if another user's file has its
    /// name, and errors of the storage.
    pub(crate) fn work_directory(&self) -> Result<WorkDirectory<'_>> {
        self.work()?.directory(&*self.layer, self.home()).inspect_err(|error| {
            if *error == Errno::EEXIST {
                tracing::warn!(branch = %self.name.display(), "{NOT_OWN}");
            }
        })
    }

    /// Whether the branch may have temporary files of the union.
    pub(crate) fn has_work(&self) -> bool {
        self.work.get().is_some()
    }
}

/// Reads marks on read-only branches in the namespace of the first writable branch: a union with the same
/// options is assumed to have written them.
pub(crate) fn believe(branches: &[Arc<Branch>]) {
    let namespace = branches.iter().find(|branch| branch.is_writable()).map(|branch| branch.marks().namespace);
    if let Some(namespace) = namespace {
        branches
            .iter()
            .filter(|branch| !branch.is_writable() && !branch.has_work())
            .for_each(|branch| branch.believe_marks_in(namespace));
    }
}

/// The hard-link index directory of a branch, made if missing.
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
