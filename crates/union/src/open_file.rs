//! An open file of the union, which switches to the copy when its file is copied up.
//!
//! A file opened for writing on a read-only branch is opened there for reading only, and copied up by the first
//! write. A copy-up switches all open files of the file ([`UnionFile::follow`]), so that readers see what
//! writers write. Invariant: every file on a branch that was once in use stays open until this one is closed.

use crate::{
    OWN, Union, UnionShared,
    branches::Branch,
    node::{Known, Part, UnionNode},
};
use nacre_sys::descriptors::{self, Counted};
use nacre_vfs::{
    AllocateMode, Caller, Errno, FileLock, FoundOpen, Ioctl, LeftFile, LeftOpen, LockKind, LockOwner, Node, OpenFile,
    OpenFlags, Opened, Result, Whence, WriteOrigin,
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Flags that are dropped when a file is opened again, because they would create or empty it; `O_NOATIME`,
/// `O_DIRECT` and the like are kept.
const ONCE: u32 = 0o100 | OpenFlags::EXCL | OpenFlags::TRUNC;
/// The mask of the access mode.
const ACCESS: u32 = 3;

/// The open file on one branch.
struct Stage {
    file: Opened,
    branch: Arc<Branch>,
    /// Whether it was opened on a writable branch, with the access mode of its user.
    writable: bool,
    next: OnceLock<Box<Stage>>,
}

impl Stage {
    fn is_changeable(&self) -> bool {
        self.writable && self.branch.is_writable()
    }
}

/// An open file of the union.
pub(crate) struct UnionFile {
    shared: Arc<UnionShared>,
    node: Arc<UnionNode>,
    flags: OpenFlags,
    first: Stage,
    /// The copy could not be opened: every use tries again.
    behind: AtomicBool,
    /// Whether the file on the branch may be under passthrough.
    lent: AtomicBool,
    /// A descriptor reserved for the copy that it may have to open in addition.
    _follows: Option<Counted>,
}

impl UnionShared {
    pub(crate) fn open(self: &Arc<UnionShared>, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let node = self.node(node)?;
        self.rise_on_open(&node);
        self.note_open(&node);
        self.open_node(caller, &node, flags)
    }

    pub(crate) fn open_node(
        self: &Arc<UnionShared>,
        caller: &Caller,
        node: &Arc<UnionNode>,
        flags: OpenFlags,
    ) -> Result<Opened> {
        if node.kind == nacre_vfs::Kind::Directory {
            return Err(Errno::EISDIR);
        }
        if flags.truncates() {
            self.copy_up(node, usize::MAX, 0)?;
        }
        // While this is held, no copy-up can be missed.
        let _still = node.copying.lock();
        let top = node.top()?;
        if flags.writes() && !top.branch.is_writable() && !self.can_rise(top.branch.index()) {
            return Err(Errno::EROFS);
        }
        let file = top.branch.layer.open(caller, &top.node, on(&top.branch, flags))?;
        Ok(self.wrap(node, &top.branch, file, flags))
    }

    /// Creates the union's file for a file that has just been opened on a branch.
    pub(crate) fn wrap(
        self: &Arc<UnionShared>,
        node: &Arc<UnionNode>,
        branch: &Arc<Branch>,
        file: Opened,
        flags: OpenFlags,
    ) -> Opened {
        self.wrapped(node, branch, file, flags)
    }

    fn wrapped(
        self: &Arc<UnionShared>,
        node: &Arc<UnionNode>,
        branch: &Arc<Branch>,
        file: Opened,
        flags: OpenFlags,
    ) -> Arc<UnionFile> {
        let first = Stage { file, branch: Arc::clone(branch), writable: branch.is_writable(), next: OnceLock::new() };
        let file = UnionFile {
            shared: Arc::clone(self),
            node: Arc::clone(node),
            flags,
            first,
            behind: AtomicBool::new(false),
            lent: AtomicBool::new(false),
            _follows: (!branch.is_writable()).then(|| descriptors::FILES.one()),
        };
        let file = Arc::new(file);
        if flags.writes() {
            node.changes.fetch_add(1, Ordering::AcqRel);
        }
        node.opened(&file);
        file
    }
}

/// Adapts the flags to a branch.
fn on(branch: &Branch, flags: OpenFlags) -> OpenFlags {
    if branch.is_writable() { flags } else { OpenFlags(flags.0 & !ACCESS & !ONCE & !OpenFlags::APPEND) }
}

/// Open files of the previous process. If that process had copied a file up and not yet notified the FUSE front end,
/// the open file is switched to the copy here, provided that the file has a name.
impl LeftOpen for Union {
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Opened)> {
        let shared = self.shared();
        let _branches = shared.gate.read();
        let branches = shared.branches();
        let branch = branches.iter().find(|branch| branch.left_place() == left.place).ok_or(Errno::ESTALE)?;
        let below = branch.layer.capabilities().left_open.ok_or(Errno::ESTALE)?;
        let left = FoundOpen { place: 0, ..left };
        let Some(node) = node else {
            let (lower, file) = below.take_up(None, left, on(branch, flags))?;
            let node = shared.nameless(branch, lower)?;
            let file = shared.wrap(&node, branch, file, flags);
            return Ok((Node::new(node), file));
        };
        let node = shared.node(node)?;
        let _still = node.copying.lock();
        let top = node.top()?;
        if top.branch.slot == branch.slot {
            let (_, file) = below.take_up(Some(&top.node), left, on(branch, flags))?;
            return Ok((Node::new(Arc::clone(&node)), shared.wrap(&node, branch, file, flags)));
        }
        let (_, file) = below.take_up(None, left, on(branch, flags))?;
        let file = shared.wrapped(&node, branch, file, flags);
        file.follow(&top);
        Ok((Node::new(Arc::clone(&node)), file))
    }
}

impl UnionShared {
    /// The node of a file without a name, of which a branch has taken over an open file.
    fn nameless(&self, branch: &Arc<Branch>, lower: Node) -> Result<Arc<UnionNode>> {
        let attr = branch.layer.getattr(&OWN, &lower, None)?;
        // The file may be a copy.
        let part = Part { in_impure: true, ..Part::new(branch, lower, attr.id) };
        let known = self.nodes.by_part(branch.slot, attr.id);
        let id = known.map_or_else(|| self.id_of(&part), |node| Ok(node.id))?;
        let node = self.nodes.get(Known { id, kind: attr.kind, parts: vec![part], floor: branch.index() });
        // A file on a writable branch with no link may never have had a name, and may get one.
        if node.place().is_none() && (attr.nlink > 0 || !branch.is_writable()) {
            node.has_no_name();
        }
        Ok(node)
    }
}

impl UnionFile {
    fn stage(&self) -> &Stage {
        let mut at = &self.first;
        while let Some(next) = at.next.get() {
            at = next;
        }
        at
    }

    /// The present open file on a branch.
    pub(crate) fn present(&self) -> &Opened {
        &self.stage().file
    }

    /// Whether it is open on that branch.
    pub(crate) fn is_on(&self, branch: &Branch) -> bool {
        self.stage().branch.slot == branch.slot
    }

    pub(crate) fn branch(&self) -> &Arc<Branch> {
        &self.stage().branch
    }

    /// Whether the file on the branch may be under passthrough.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent.load(Ordering::Acquire)
    }

    pub(crate) fn writes(&self) -> bool {
        self.flags.writes()
    }

    pub(crate) fn is_of(&self, node: &Arc<UnionNode>) -> bool {
        Arc::ptr_eq(&self.node, node)
    }

    pub(crate) fn reads(&self) -> bool {
        let stage = self.stage();
        self.flags.reads() || !stage.writable
    }

    /// Switches to the copy. If that cannot be opened now, the next use tries again and reports the error.
    pub(crate) fn follow(&self, part: &Part) {
        if self.is_on(&part.branch) && (self.stage().writable || !part.branch.is_writable()) {
            return;
        }
        let flags = OpenFlags(on(&part.branch, self.flags).0 & !ONCE);
        match part.branch.layer.open(&OWN, &part.node, flags) {
            Ok(file) => {
                let stage = Stage {
                    file,
                    branch: Arc::clone(&part.branch),
                    writable: part.branch.is_writable(),
                    next: OnceLock::new(),
                };
                // One copy-up at a time: no other thread appends to the chain.
                let _ = self.stage().next.set(Box::new(stage));
                self.behind.store(false, Ordering::Release);
                self.shared.door.left_changed(self.node.id);
            }
            Err(error) => {
                tracing::warn!(?error, "an open file cannot follow its copy yet");
                self.behind.store(true, Ordering::Release);
            }
        }
    }

    /// The file to read from.
    fn current(&self) -> Result<&Opened> {
        if self.behind.load(Ordering::Acquire) {
            let _still = self.node.copying.lock();
            if self.behind.load(Ordering::Acquire) {
                self.follow(&self.node.top()?);
            }
            if self.behind.load(Ordering::Acquire) {
                return Err(Errno::EIO);
            }
        }
        Ok(self.present())
    }

    /// The file to write to.
    fn changing(&self) -> Result<&Opened> {
        if !self.flags.writes() {
            return Err(Errno::EBADF);
        }
        self.raised()
    }

    /// Runs a writing call; if the branch is full, moves the file and runs the call once more.
    fn change<T>(&self, act: impl Fn(&Opened) -> Result<T>) -> Result<T> {
        let file = self.changing()?;
        if self.shared.rules().move_when_full.is_none() {
            return act(file);
        }
        let full = {
            let _still = self.node.moving.read();
            match act(self.present()) {
                Err(error @ (Errno::ENOSPC | Errno::EDQUOT)) => error,
                other => return other,
            }
        };
        let moved = {
            let _branches = self.shared.gate.read();
            self.shared.move_elsewhere(&self.node)
        };
        if let Err(error) = moved {
            tracing::debug!(?error, "a file on a full branch stays where it is");
            return Err(full);
        }
        self.current()?;
        let _still = self.node.moving.read();
        act(self.present())
    }

    /// The file on a writable branch, copied up if necessary.
    fn raised(&self) -> Result<&Opened> {
        let file = self.current()?;
        if self.stage().is_changeable() {
            return Ok(file);
        }
        {
            let _branches = self.shared.gate.read();
            self.shared.copy_up(&self.node, usize::MAX, u64::MAX)?;
            let _still = self.node.copying.lock();
            // The branch may have become writable: the same file, opened again.
            self.follow(&self.node.top()?);
        }
        let file = self.current()?;
        if self.stage().is_changeable() { Ok(file) } else { Err(Errno::EIO) }
    }
}

impl OpenFile for UnionFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn inner(&self) -> &dyn OpenFile {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        if !self.flags.reads() && !self.stage().writable {
            return Err(Errno::EBADF);
        }
        self.current()?.read(buffer, offset)
    }

    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        self.change(|file| file.write(data, offset, origin))
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.change(|file| file.append(data))
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        self.current()?.flush(owner)
    }

    fn fsync(&self, data_only: bool) -> Result<()> {
        let file = self.current()?;
        // Files on a read-only branch have no unsynced writes.
        if self.shared.options.sync && self.stage().branch.is_writable() { file.fsync(data_only) } else { Ok(()) }
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.change(|file| file.allocate(mode, offset, length))
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        self.current()?.seek(offset, whence)
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        let Some(target) = target.inner().as_any().downcast_ref::<UnionFile>() else { return Err(Errno::EXDEV) };
        target.changing()?;
        // The source after the target: both may be the same file.
        let source = self.current()?;
        target.change(|target| source.copy_to(offset, target.inner(), target_offset, length, flags))
    }

    fn test_lock(&self, _: LockOwner, _: FileLock) -> Result<FileLock> {
        // A lock on one branch's file would be lost with a copy-up: the kernel keeps the mount's locks itself.
        Err(Errno::EOPNOTSUPP)
    }

    fn set_lock(&self, _: LockOwner, _: FileLock, _: bool) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn flock(&self, _: LockOwner, _: LockKind, _: bool) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let file = if request.may_change() { self.raised()? } else { self.current()? };
        file.ioctl(request, output)
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        if self.shared.rules().move_when_full.is_some() {
            return None;
        }
        // A move checks for passthrough with this lock held for writing.
        let _still = self.node.moving.read();
        let stage = self.stage();
        // A file under passthrough that can still be copied up would continue to show its old content.
        if !stage.branch.is_writable() && self.shared.can_rise(stage.branch.index()) {
            return None;
        }
        let descriptor = stage.file.backing();
        if descriptor.is_some() {
            self.lent.store(true, Ordering::Release);
        }
        descriptor
    }

    fn is_on_inner_mount(&self) -> bool {
        let mut at = Some(&self.first);
        while let Some(stage) = at {
            if stage.file.is_on_inner_mount() {
                return true;
            }
            at = stage.next.get().map(|next| &**next);
        }
        false
    }

    fn left(&self) -> Option<LeftFile<'_>> {
        let stage = self.stage();
        // The branch's own value of `place` is replaced: see `take_up`.
        stage.file.left().map(|left| LeftFile { place: stage.branch.left_place(), ..left })
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }
}
