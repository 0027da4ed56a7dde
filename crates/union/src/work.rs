//! The union's own directories on a branch: the work directory, where files are built before they get their
//! names, and the hard-link index.
//!
//! Both are in the root of each writable branch under reserved names, mode 0700, or in a separate directory
//! next to the branch (overlayfs' `workdir`), so that the branch has users' files only. Files that a crash
//! leaves in the work directory are useless: it is emptied when the branch is opened. *On demand*
//! ([`crate::UnionOptions::work_on_demand`]) both are created when they are first needed; the work directory is
//! removed after its last user and its last file, the index at the next start. As long as it exists, it is locked
//! ([`WorkLock`]): two processes whose claims do not know each other never build in it at the same time.
//!
//! Invariants: a directory that is found under one of these names is used only if it is the union's own
//! ([`is_own`]): where all users may write to the branch's root, any of them can make it, and would change files before
//! they get their names. The lock of a work directory on demand is held while the directory is created and removed, and is
//! the last in the lock order of the union.

use crate::{ATTEMPTS, OWN, listing};
use nacre_vfs::{Attr, Errno, Kind, Layer, Name, Node, Result, SetAttr, SetTime};
use parking_lot::{Mutex, RwLock};
use std::{
    any::Any,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

const WORK: &[u8] = b".wh..wh.work";
pub(crate) const LINKS: &[u8] = b".wh..wh.links";
/// Names of the union's own directories in a separate directory; the kernel's overlay file system has the first one,
/// too.
const WORK_APART: &[u8] = b"work";
const LINKS_APART: &[u8] = b"links";
/// Prefix of temporary names outside the work directory.
const HIDDEN: &str = ".wh..wh.tmp.";
/// Prefix of names under which files wait for the end of a rename.
const ASIDE: &str = ".wh..wh.old.";
const MODE: u32 = 0o700;
/// Why a directory under one of these names is not used.
pub(crate) const NOT_OWN: &str = "another user's file has a name of the union's own (.wh..wh.work, .wh..wh.links), or others may enter it: remove it";

/// The directory that has the union's own directories of a branch.
#[derive(Clone, Copy)]
pub(crate) enum WorkHome<'a> {
    /// The branch's root directory.
    Top(&'a Node),
    /// A separate directory on the same layer.
    Apart(&'a Node),
}

impl<'a> WorkHome<'a> {
    pub(crate) fn directory(self) -> &'a Node {
        match self {
            WorkHome::Top(directory) | WorkHome::Apart(directory) => directory,
        }
    }

    fn name(self, top: &'static [u8], apart: &'static [u8]) -> &'static [u8] {
        match self {
            WorkHome::Top(_) => top,
            WorkHome::Apart(_) => apart,
        }
    }
}

/// A unique temporary name.
#[derive(Clone)]
pub(crate) struct Temporary(Vec<u8>);

impl Temporary {
    /// Returns the name.
    ///
    /// # Errors
    /// Never: it consists of letters.
    pub(crate) fn name(&self) -> Result<Name<'_>> {
        Name::new(&self.0)
    }
}

/// A hidden name beside a name, under which its file waits for the end of a rename: the same in each process.
pub(crate) fn name_aside(name: &[u8]) -> Temporary {
    // FNV-1a; a name with a prefix could be too long.
    let digest = name
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    Temporary(format!("{ASIDE}{digest:016x}").into_bytes())
}

/// Another hidden name, for a file of an earlier rename that keeps its hidden name.
pub(crate) fn name_kept(aside: &Temporary, number: usize) -> Temporary {
    Temporary([&aside.0, format!(".{number}").as_bytes()].concat())
}

/// Whether a temporary name is of an earlier run: every one without a present work directory.
pub(crate) fn is_left_over(present: Option<&Work>, name: &[u8]) -> bool {
    let number = name.strip_prefix(HIDDEN.as_bytes()).and_then(|digits| std::str::from_utf8(digits).ok());
    let number = number.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.is_some_and(|number| present.is_none_or(|work| number < work.start))
}

/// The lock of a work directory on demand, until it is dropped.
pub type HeldWork = Box<dyn Any + Send + Sync>;
/// Locks a work directory on demand against unions of other processes; `None` where the directory is not there.
///
/// # Errors
/// EBUSY where another process has the lock.
pub type WorkLock = Arc<dyn Fn() -> Result<Option<HeldWork>> + Send + Sync>;

/// The state of a work directory on demand.
struct OnDemand {
    lock: Option<WorkLock>,
    /// The directory, if it exists, and its lock.
    directory: Option<(Node, Option<HeldWork>)>,
    users: usize,
    /// The branch is not written any more: the last user unlocks the directory, whether or not that can be removed.
    is_closed: bool,
}

impl OnDemand {
    /// Locks the directory, which exists; false where it was removed meanwhile.
    fn locked(&self) -> Result<(bool, Option<HeldWork>)> {
        let Some(lock) = &self.lock else { return Ok((true, None)) };
        let held = lock()?;
        Ok((held.is_some(), held))
    }

    /// Removes the directory, which nobody uses, if nothing is in it. It is unlocked then, or if the branch is not written
    /// any more.
    fn remove_unused(&mut self, layer: &dyn Layer, home: WorkHome<'_>) {
        match remove_if_empty(layer, home, home.name(WORK, WORK_APART)) {
            Ok(true) => self.directory = None,
            // Another operation is building a file in it.
            Ok(false) => {}
            Err(error) => tracing::debug!(?error, "an empty work directory stays until it is used again"),
        }
        if self.is_closed {
            self.directory = None;
        }
    }
}

enum WorkPlace {
    Kept(RwLock<Node>),
    OnDemand(Mutex<OnDemand>),
}

/// A reference to the work directory; it exists as long as this lives.
pub(crate) struct WorkDirectory<'a> {
    layer: &'a dyn Layer,
    home: WorkHome<'a>,
    work: &'a Work,
    node: Node,
}

impl Deref for WorkDirectory<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Drop for WorkDirectory<'_> {
    fn drop(&mut self) {
        let WorkPlace::OnDemand(state) = &self.work.place else { return };
        let mut state = state.lock();
        state.users = state.users.saturating_sub(1);
        if state.users > 0 {
            return;
        }
        state.remove_unused(self.layer, self.home);
    }
}

/// The work directory of one branch.
pub(crate) struct Work {
    place: WorkPlace,
    /// Lower numbers were used by earlier runs.
    start: u64,
    next: AtomicU64,
}

impl Work {
    /// Empties the work directory and creates it if missing; with `on_demand` it is removed instead.
    ///
    /// # Errors
    /// EROFS where the branch cannot be written, EEXIST where another user's file has the name, and errors of the
    /// storage.
    #[expect(clippy::disallowed_methods, reason = "names that no earlier run has given")]
    pub(crate) fn open(layer: &dyn Layer, home: WorkHome<'_>, on_demand: bool, lock: Option<WorkLock>) -> Result<Work> {
        let place = if on_demand {
            let mut state = OnDemand { lock, directory: None, users: 0, is_closed: false };
            state.directory = emptied_if_there(layer, home, &state)?;
            WorkPlace::OnDemand(Mutex::new(state))
        } else {
            WorkPlace::Kept(RwLock::new(made_and_emptied(layer, home)?))
        };
        // Temporary names are also used outside the work directory, where names of an earlier run may still
        // exist.
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let start = u64::try_from(start).unwrap_or_default();
        Ok(Work { place, start, next: AtomicU64::new(start) })
    }

    /// Looks for the work directory anew, as [`Work::open`] does: while the branch was only read, another union may have
    /// removed it. Nobody uses it now.
    ///
    /// # Errors
    /// As [`Work::open`].
    pub(crate) fn reopen(&self, layer: &dyn Layer, home: WorkHome<'_>) -> Result<()> {
        match &self.place {
            WorkPlace::Kept(node) => *node.write() = made_and_emptied(layer, home)?,
            WorkPlace::OnDemand(state) => {
                let mut state = state.lock();
                (state.directory, state.is_closed) = (None, false);
                state.directory = emptied_if_there(layer, home, &state)?;
            }
        }
        Ok(())
    }

    /// Unlocks the work directory, once nobody uses it: the branch is not written any more, and another union may write
    /// to it.
    pub(crate) fn close(&self, layer: &dyn Layer, home: WorkHome<'_>) {
        let WorkPlace::OnDemand(state) = &self.place else { return };
        let mut state = state.lock();
        state.is_closed = true;
        if state.users == 0 && state.directory.is_some() {
            state.remove_unused(layer, home);
        }
    }

    /// The work directory for as long as it is needed.
    ///
    /// # Errors
    /// Errors of the storage in creating it.
    pub(crate) fn directory<'a>(&'a self, layer: &'a dyn Layer, home: WorkHome<'a>) -> Result<WorkDirectory<'a>> {
        let node = match &self.place {
            WorkPlace::Kept(node) => node.read().clone(),
            WorkPlace::OnDemand(state) => {
                let mut state = state.lock();
                if state.directory.is_none() {
                    state.directory = Some(made_and_locked(layer, home, &state)?);
                }
                let node = state.directory.as_ref().map(|(node, _)| node.clone()).ok_or(Errno::EIO)?;
                state.users += 1;
                node
            }
        };
        Ok(WorkDirectory { layer, home, work: self, node })
    }

    /// The hard-link index of a branch, if there is one. An empty one is removed if it is created on demand.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn hardlink_index(layer: &dyn Layer, home: WorkHome<'_>, removes_empty: bool) -> Result<Option<Node>> {
        let name = home.name(LINKS, LINKS_APART);
        let found = find(layer, home, name)?;
        if found.is_some() && removes_empty && remove_if_empty(layer, home, name)? { Ok(None) } else { Ok(found) }
    }

    /// The hard-link index of a branch, created if missing.
    ///
    /// # Errors
    /// As [`Work::open`].
    pub(crate) fn make_hardlink_index(layer: &dyn Layer, home: WorkHome<'_>) -> Result<Node> {
        let name = home.name(LINKS, LINKS_APART);
        unnoticed(layer, home.directory(), || make(layer, home, name))
    }

    /// Returns a free name in the work directory.
    pub(crate) fn temporary(&self) -> Temporary {
        Temporary(format!("{:x}", self.next.fetch_add(1, Ordering::Relaxed)).into_bytes())
    }

    /// Returns a hidden name for any directory of the branch.
    pub(crate) fn hidden_temporary(&self) -> Temporary {
        Temporary(format!("{HIDDEN}{:x}", self.next.fetch_add(1, Ordering::Relaxed)).into_bytes())
    }
}

/// The work directory without anything in it, made where it is missing.
fn made_and_emptied(layer: &dyn Layer, home: WorkHome<'_>) -> Result<Node> {
    let directory = make(layer, home, home.name(WORK, WORK_APART))?;
    listing::purge(layer, &directory)?;
    Ok(directory)
}

/// Empties and removes the work directory; answers it where it stays all the same.
fn emptied_if_there(
    layer: &dyn Layer,
    home: WorkHome<'_>,
    state: &OnDemand,
) -> Result<Option<(Node, Option<HeldWork>)>> {
    let name = home.name(WORK, WORK_APART);
    let Some(directory) = find(layer, home, name)? else { return Ok(None) };
    let (is_there, held) = state.locked()?;
    if !is_there {
        return Ok(None);
    }
    listing::purge(layer, &directory)?;
    if remove_if_empty(layer, home, name)? { Ok(None) } else { Ok(Some((directory, held))) }
}

/// The work directory, made where it is missing, and locked. Another process may remove it before it is locked.
fn made_and_locked(layer: &dyn Layer, home: WorkHome<'_>, state: &OnDemand) -> Result<(Node, Option<HeldWork>)> {
    let name = home.name(WORK, WORK_APART);
    for _ in 0..ATTEMPTS {
        unnoticed(layer, home.directory(), || make(layer, home, name))?;
        let (is_there, held) = state.locked()?;
        if is_there && let Some(node) = find(layer, home, name)? {
            return Ok((node, held));
        }
    }
    Err(Errno::EBUSY)
}

fn make(layer: &dyn Layer, home: WorkHome<'_>, name: &[u8]) -> Result<Node> {
    let (root, name) = (home.directory(), Name::new(name)?);
    let found = match layer.lookup(&OWN, root, name) {
        Err(Errno::ENOENT) => match layer.mkdir(&OWN, root, name, MODE) {
            Err(Errno::EEXIST) => layer.lookup(&OWN, root, name)?,
            made => return made.map(|made| made.node),
        },
        found => found?,
    };
    if is_own(layer, home, &found.attr)? { Ok(found.node) } else { Err(Errno::EEXIST) }
}

/// Looks up one of the union's own directories; `None` where it is missing, or where another file has the name.
fn find(layer: &dyn Layer, home: WorkHome<'_>, name: &[u8]) -> Result<Option<Node>> {
    let name = Name::new(name)?;
    let found = match layer.lookup(&OWN, home.directory(), name) {
        Ok(found) => found,
        Err(Errno::ENOENT) => return Ok(None),
        Err(error) => return Err(error),
    };
    if is_own(layer, home, &found.attr)? {
        return Ok(Some(found.node));
    }
    let (uid, mode) = (found.attr.uid, format!("{:04o}", found.attr.mode));
    tracing::warn!(%name, uid, mode, "{NOT_OWN}");
    Ok(None)
}

/// Whether a directory belongs to the union: its owner is root, the owner of the branch's root directory (who can replace
/// everything in it), or the owner that a new directory gets; and others have no access, where the storage has modes at
/// all. In a separate directory, only the owner counts: other programs choose other modes there.
fn is_own(layer: &dyn Layer, home: WorkHome<'_>, attr: &Attr) -> Result<bool> {
    if attr.kind != Kind::Directory {
        return Ok(false);
    }
    let open_to_others = match home {
        WorkHome::Top(_) => attr.mode & !MODE & 0o777,
        WorkHome::Apart(_) => 0,
    };
    let is_trusted = attr.uid == OWN.uid || attr.uid == layer.getattr(&OWN, home.directory(), None)?.uid;
    if is_trusted && open_to_others == 0 {
        return Ok(true);
    }
    match made_and_removed(layer, home) {
        Ok(fresh) => Ok((is_trusted || attr.uid == fresh.uid) && open_to_others & !fresh.mode == 0),
        Err(Errno::EROFS | Errno::EACCES | Errno::EPERM) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The attributes of a directory that the union makes.
#[expect(clippy::disallowed_methods, reason = "a name that no other file has")]
fn made_and_removed(layer: &dyn Layer, home: WorkHome<'_>) -> Result<Attr> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let temporary = format!("{HIDDEN}{now:x}").into_bytes();
    let (root, name) = (home.directory(), Name::new(&temporary)?);
    unnoticed(layer, root, || {
        let fresh = layer.mkdir(&OWN, root, name, MODE)?;
        layer.rmdir(&OWN, root, name)?;
        Ok(fresh.attr)
    })
}

/// Removes one of the union's own directories if it is empty; returns whether it is gone.
fn remove_if_empty(layer: &dyn Layer, home: WorkHome<'_>, name: &[u8]) -> Result<bool> {
    let name = Name::new(name)?;
    match unnoticed(layer, home.directory(), || layer.rmdir(&OWN, home.directory(), name)) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes a change in a directory that users see, and restores the directory's times.
fn unnoticed<T>(layer: &dyn Layer, directory: &Node, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = layer.getattr(&OWN, directory, None);
    let done = act()?;
    if let Ok(before) = before {
        let times = SetAttr {
            atime: Some(SetTime::To(before.atime)),
            mtime: Some(SetTime::To(before.mtime)),
            ..SetAttr::default()
        };
        if let Err(error) = layer.setattr(&OWN, directory, None, &times) {
            tracing::debug!(?error, "the top of a branch keeps the times of a change by the union itself");
        }
    }
    Ok(done)
}
