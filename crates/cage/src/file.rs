//! An open file in a cage.
//!
//! Made by the layer at open and creation. A write is booked before it happens, under the file's
//! lock, and corrected afterwards if it may have cost less than the worst case. No descriptor is
//! offered for passthrough, neither for writing nor for reading: a kernel that uses passthrough for
//! one open file of an inode has to use it for all of them.

use super::{
    CageShared, Storage,
    allocated::Span,
    books::{ROUNDS, Short, Source},
    inodes::{Announced, Inode, InodeState},
    ledger::Full,
    writeback::Phase,
};
use nacre_vfs::{
    AllocateMode, Caller, Errno, Ioctl, LockOwner, Node, OpenFile, OpenFlags, Opened, Result, WriteAhead, WriteOrigin,
    WritebackLease,
};
use parking_lot::MutexGuard;
use rustix::fs::OFlags;
use std::{
    any::Any,
    ops::Range,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Assumed length of a reserved write of unknown length, bytes.
const UNKNOWN: u64 = 1 << 20;

/// Age from which on a reserved write will not happen any more: a call takes almost no time between
/// its request and copying its data into the page cache.
const STALE: Duration = Duration::from_secs(10);

/// How long a write of unknown length waits for dirty data to arrive: its caller may hold locks
/// that the write-back needs.
const PATIENCE: Duration = Duration::from_secs(1);

/// An open file's share in its inode's state; released when the file is closed.
pub(super) struct Lease {
    shared: Arc<CageShared>,
    inode: Arc<Inode>,
    flags: OpenFlags,
    /// A FUSE front end may use write-back for this open file.
    writeback_allowed: bool,
    /// The front end does use write-back.
    writeback: AtomicBool,
    /// It is being closed in the layer below, which frees a file without a name.
    frees: bool,
}

impl Lease {
    /// Counts an open file. Made before the file is opened, so that a file unlinked meanwhile is
    /// not taken for freed.
    pub(super) fn new(
        shared: &Arc<CageShared>,
        inode: &Arc<Inode>,
        flags: OpenFlags,
        writeback_allowed: bool,
    ) -> Lease {
        inode.open.fetch_add(1, Ordering::AcqRel);
        let mut state = inode.lock();
        state.handles += 1;
        if flags.writes() {
            state.writers += 1;
        }
        if flags.writes() && flags.appends() {
            state.appenders += 1;
        }
        drop(state);
        Lease {
            shared: Arc::clone(shared),
            inode: Arc::clone(inode),
            flags,
            writeback_allowed,
            writeback: AtomicBool::new(false),
            frees: false,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.inode.lock();
        state.handles -= 1;
        if self.flags.writes() {
            state.writers -= 1;
        }
        if self.flags.writes() && self.flags.appends() {
            state.appenders -= 1;
        }
        let had_writeback = *self.writeback.get_mut();
        if had_writeback {
            state.writeback -= 1;
            if state.writeback == 0 {
                // All dirty data arrived before the last open file could be closed.
                self.shared.drain_pool(&self.inode, &mut state);
            }
        }
        let closed = state.gone && state.handles == 0;
        if closed && state.loaded {
            self.shared.free(&self.inode, &mut state);
        }
        drop(state);
        if closed {
            self.shared.doors.not_nameless(&self.inode.id);
        }
        if self.frees {
            self.shared.doors.freeing.fetch_sub(1, Ordering::AcqRel);
        }
        self.inode.open.fetch_sub(1, Ordering::AcqRel);
        if had_writeback && let Some(writeback) = self.shared.doors.writeback.get() {
            writeback.dismiss();
        }
    }
}

/// An open file of the cage, over the lower layer's.
pub(super) struct CageFile {
    // Dropped before `lease`: the file is closed first.
    below: Opened,
    node: Node,
    lease: Lease,
}

impl CageFile {
    pub(super) fn new(below: Opened, node: Node, lease: Lease) -> CageFile {
        if lease.flags.writes() {
            lease.shared.written.lock().insert(address(&*below), Arc::clone(&lease.inode));
        }
        CageFile { below, node, lease }
    }

    fn shared(&self) -> &CageShared {
        &self.lease.shared
    }

    fn inode(&self) -> &Inode {
        &self.lease.inode
    }

    fn refresh(&self, state: &mut InodeState) {
        self.shared().refresh(self.inode(), state, &self.node, Some(&*self.below));
    }

    /// Runs `work` under the file's lock, and again after making room, until it succeeds or no room
    /// can be made.
    fn with_room<T>(&self, mut work: impl FnMut(&mut InodeState, bool) -> Result<T, Lack>) -> Result<T> {
        let mut round = 0;
        // The kernel turns a short answer to an O_DIRECT write into EIO if other requests of that
        // write may be in flight.
        let whole = OFlags::from_bits_retain(self.lease.flags.raw()).contains(OFlags::DIRECT);
        loop {
            let mut state = self.inode().lock();
            if !state.loaded {
                self.refresh(&mut state);
            }
            let owner = state.owner;
            // Making room comes before cutting a write short, where the policy allows it.
            let partly =
                !whole && (round >= ROUNDS || self.shared().policy.when_full == crate::settings::WhenFull::Deny);
            let (short, bytes) = match work(&mut state, partly) {
                Ok(done) => return Ok(done),
                Err(Lack::Other(error)) => return Err(error),
                Err(Lack::Room(short, bytes)) => (short, bytes),
            };
            let holds = state.writeback > 0;
            drop(state);
            match self.shared().relieve_holding(holds, short, owner, bytes, round) {
                Ok(()) => round += 1,
                // Nothing could be freed, but a part may fit.
                Err(_) if !partly && !whole && matches!(short, Short::Full(_)) => round = ROUNDS,
                Err(error) => return Err(error),
            }
        }
    }

    /// Source of a write: dirty data of a front end cannot be refused, as its write(2) has already
    /// returned.
    fn source(state: &InodeState, origin: WriteOrigin) -> Source {
        match state.writeback {
            0 => Source::Call,
            _ if origin.is_writeback() => Source::Held,
            _ => Source::Beside,
        }
    }

    fn write_under(
        &self,
        state: &mut InodeState,
        data: &[u8],
        target: WriteTarget,
        partly: bool,
    ) -> Result<usize, Lack> {
        let (shared, inode) = (self.shared(), self.inode());
        let (at, source) = match target {
            WriteTarget::At(offset, origin) => (offset, CageFile::source(state, origin)),
            WriteTarget::End => {
                // Another writer may have appended, also from outside.
                let attr = shared.below.getattr(&Caller::ROOT, &self.node, Some(&*self.below)).map_err(Lack::Other)?;
                shared.learn(inode, state, &self.node, &attr);
                (attr.size, CageFile::source(state, WriteOrigin::Caller))
            }
        };
        let length = data.len() as u64;
        shared.before_jump(inode, state, &self.node, Some(&*self.below), at);
        let full_before = state.cost == shared.rule.whole(state.size);
        let span = Span { file: &*self.below, offset: at, length, booked_end: shared.booked_end(state) };
        let admitted = shared
            .admit_write(inode, state, &span, source, partly)
            .map_err(|short| Lack::Room(short, shared.worst(state, at, length)))?;
        let part = data.get(..usize::try_from(admitted).unwrap_or(usize::MAX)).unwrap_or(data);
        let result = self.write_below(part, target);
        match result {
            Ok(written) => {
                if at >= state.size && written > 0 {
                    state.grown = true;
                }
                state.size = state.size.max(at.saturating_add(written as u64));
                state.add_solid(shared.rule.blocks(at, written as u64));
                // Without holes, the booked cost is exact.
                if written < part.len() || state.kept || !full_before || state.cost != shared.rule.whole(state.size) {
                    self.refresh(state);
                }
                shared.settle_account(inode, state);
                Ok(written)
            }
            Err(error) => {
                self.refresh(state);
                Err(Lack::Other(error))
            }
        }
    }

    fn write_to(&self, data: &[u8], target: WriteTarget) -> Result<usize> {
        if data.is_empty() || !self.lease.flags.writes() {
            return self.write_below(data, target);
        }
        self.with_room(|state, partly| self.write_under(state, data, target, partly))
    }

    fn write_below(&self, data: &[u8], target: WriteTarget) -> Result<usize> {
        match target {
            WriteTarget::At(offset, origin) => self.below.write(data, offset, origin),
            WriteTarget::End => self.below.append(data),
        }
    }

    fn allocate_under(&self, state: &mut InodeState, mode: AllocateMode, offset: u64, length: u64) -> Result<(), Lack> {
        let (shared, inode) = (self.shared(), self.inode());
        let makes_holes =
            mode.any(AllocateMode::PUNCH_HOLE | AllocateMode::COLLAPSE_RANGE | AllocateMode::INSERT_RANGE);
        let end = offset.saturating_add(length);
        let booked_end = shared.booked_end(state);
        if mode.any(AllocateMode::KEEP_SIZE) && !makes_holes && end > state.size {
            // From here on, blocks beyond its end are kept and count.
            state.kept = true;
        }
        shared.before_jump(inode, state, &self.node, Some(&*self.below), offset);
        if makes_holes {
            // Moving a file's end costs something where cost follows the length.
            let longer = mode.any(AllocateMode::INSERT_RANGE) && shared.rule.storage == Storage::Lagging;
            let whole = if longer { shared.rule.whole(state.size.saturating_add(length)) } else { 0 };
            let new = whole.saturating_sub(state.cost);
            shared.book_new(inode, state, new, Source::Call).map_err(|short| Lack::Room(short, new))?;
        } else {
            let span = Span { file: &*self.below, offset, length, booked_end };
            shared
                .book_span(inode, state, &span, Source::Call)
                .map_err(|short| Lack::Room(short, shared.worst(state, offset, length)))?;
        }
        let worst = state.cost;
        let result = self.below.allocate(mode, offset, length);
        if result.is_ok() && mode.any(AllocateMode::PUNCH_HOLE | AllocateMode::COLLAPSE_RANGE) {
            shared.emptied(inode, state, offset, end);
        }
        if mode.any(AllocateMode::COLLAPSE_RANGE | AllocateMode::INSERT_RANGE | AllocateMode::ZERO_RANGE)
            || result.is_err()
        {
            state.unsure();
        }
        self.refresh(state);
        if result.is_ok() && !makes_holes && state.cost >= worst {
            state.add_solid(shared.rule.blocks(offset, length));
        }
        shared.settle_account(inode, state);
        result.map_err(Lack::Other)
    }

    fn copy_under(&self, state: &mut InodeState, inode: &Inode, copy: &Copy<'_>, partly: bool) -> Result<u64, Lack> {
        let shared = self.shared();
        if let Some(node) = state.node.clone() {
            if !state.loaded {
                shared.refresh(inode, state, &node, Some(copy.target));
            }
            shared.before_jump(inode, state, &node, Some(copy.target), copy.target_offset);
        }
        let booked_end = shared.booked_end(state);
        let span = Span { file: copy.target, offset: copy.target_offset, length: copy.length, booked_end };
        let source = CageFile::source(state, WriteOrigin::Caller);
        let admitted = shared
            .admit_write(inode, state, &span, source, partly)
            .map_err(|short| Lack::Room(short, shared.worst(state, copy.target_offset, copy.length)))?;
        let result = self.below.copy_to(copy.offset, copy.target, copy.target_offset, admitted, copy.flags);
        if let Ok(copied) = result {
            state.add_solid(shared.rule.blocks(copy.target_offset, copied));
        }
        // The target's attributes: asked by its node, since its open file belongs to another layer
        // object.
        if let Some(node) = state.node.clone() {
            shared.refresh(inode, state, &node, Some(copy.target));
        }
        shared.settle_account(inode, state);
        result.map_err(Lack::Other)
    }

    /// Books the blocks that a reserved write will add.
    fn announce_under(&self, state: &mut InodeState, offset: Option<u64>, length: u64) -> Result<(), Lack> {
        let (shared, inode) = (self.shared(), self.inode());
        if state.announced.is_none() || !state.loaded {
            // All earlier reserved writes have arrived, so the host knows the end.
            self.refresh(state);
        }
        let before = state.announced.as_ref();
        let end = before.map_or(state.size, |before| before.end.max(state.size));
        let from = offset.unwrap_or(end);
        let to = from.saturating_add(length);
        let (new, blocks) = if from == end {
            let reserved = before.map_or(0, |before| shared.rule.whole(before.end));
            let start = shared.rule.floor(from);
            let known = if state.solid.contains(&start) || state.solid.end == start { state.solid.end } else { start };
            (shared.rule.whole(to).saturating_sub(known.max(reserved)), start..shared.rule.whole(to))
        } else {
            self.announced_inside(state, before.map_or(0..0, |before| before.blocks.clone()), from, length)
        };
        {
            let _changing = shared.locks.changing.read();
            shared.touch(inode, state);
            if !shared.fits_on_disk(new) {
                return Err(Lack::Room(Short::Disk, new));
            }
            shared.take(state.owner, new, 0, Source::Call).map_err(|short| Lack::Room(short, new))?;
            shared.disk.announced(0, new);
            state.pool += new;
        }
        state.announced = Some(Announced { end: end.max(to), blocks, at: shared.clock.now() });
        Ok(())
    }

    /// New bytes that a reserved write inside the file can add, and the blocks that it touches,
    /// merged with the previously reserved blocks if these overlap or adjoin. A random writer is
    /// booked each block each time; unneeded reservations are released when all dirty data has
    /// arrived.
    fn announced_inside(&self, state: &InodeState, before: Range<u64>, from: u64, length: u64) -> (u64, Range<u64>) {
        let shared = self.shared();
        let touched = shared.rule.blocks(from, length);
        let worst = shared.worst(state, from, length);
        if touched.start < before.start || touched.start > before.end {
            return (worst, touched);
        }
        let new = touched.end.saturating_sub(before.end.max(touched.start));
        (worst.min(new), before.start..before.end.max(touched.end))
    }
}

/// Why an operation under a file's lock did not happen.
enum Lack {
    /// This many bytes do not fit.
    Room(Short, u64),
    Other(Errno),
}

struct Copy<'a> {
    offset: u64,
    target: &'a dyn OpenFile,
    target_offset: u64,
    length: u64,
    flags: u32,
}

/// Identity of an open file across wrappers: the address of the lowest layer's open file.
fn address(file: &dyn OpenFile) -> usize {
    std::ptr::from_ref(file.inner()).cast::<()>().addr()
}

/// Judges an ioctl: flags, extended flags (with the project) and versions cannot make a file larger. EPERM for hints
/// by which XFS allocates whole extents for single blocks (ioctl_xfs_fsgetxattr(2)), which nothing books; ENOTTY for
/// other commands, which may clone or allocate.
pub(super) fn judge_ioctl(request: &Ioctl<'_>) -> Result<()> {
    match request.command {
        Ioctl::GET_FLAGS | Ioctl::SET_FLAGS | Ioctl::GET_VERSION | Ioctl::GET_EXTENDED => Ok(()),
        Ioctl::SET_EXTENDED if hints_at_extents(request.input) => Err(Errno::EPERM),
        Ioctl::SET_EXTENDED => Ok(()),
        _ => Err(Errno::ENOTTY),
    }
}

/// Whether a `struct fsxattr` (linux/fs.h) sets a size of extents, or has one inherited.
pub(super) fn hints_at_extents(extended: &[u8]) -> bool {
    /// `FS_XFLAG_EXTSIZE`, `FS_XFLAG_EXTSZINHERIT`, `FS_XFLAG_COWEXTSIZE`.
    const HINTS: u32 = 0x800 | 0x1000 | 0x1_0000;
    let word =
        |at: usize| extended.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |&word| u32::from_ne_bytes(word));
    let (flags, extent, copied_extent) = (word(0), word(4), word(16));
    flags & HINTS != 0 || extent != 0 || copied_extent != 0
}

impl CageShared {
    /// Releases reservations that are too old to arrive, after all dirty data has been written
    /// back.
    pub(super) fn drain_stale(&self) {
        let now = self.clock.now();
        for inode in self.inodes.all() {
            let mut state = inode.lock();
            if state.announced.as_ref().is_some_and(|announced| now.saturating_sub(announced.at) > STALE) {
                self.drain_pool(&inode, &mut state);
            }
        }
    }

    /// Whether a file has a reservation that is too old to arrive.
    fn has_stale(&self) -> bool {
        let now = self.clock.now();
        let stale = |inode: &Arc<Inode>| {
            let state: MutexGuard<'_, InodeState> = inode.lock();
            state.pool > 0 && state.announced.as_ref().is_some_and(|announced| now.saturating_sub(announced.at) > STALE)
        };
        self.inodes.all().iter().any(stale)
    }
}

impl Drop for CageFile {
    fn drop(&mut self) {
        // Closing the file below frees its blocks there, which may take as long as unlink(2) takes
        // otherwise: waiters for room can see that it is under way.
        if self.lease.inode.lock().gone {
            self.lease.frees = true;
            self.lease.shared.doors.freeing.fetch_add(1, Ordering::AcqRel);
        }
        if self.lease.flags.writes() {
            // Before the file itself is dropped: another one may get its address.
            self.shared().written.lock().remove(&address(&*self.below));
        }
    }
}

impl WritebackLease for CageFile {
    fn begin(&self) -> bool {
        let shared = self.shared();
        let Some(writeback) = shared.doors.writeback.get() else { return false };
        let mut state = self.inode().lock();
        // Where a user or a directory has a limit of its own, each write is booked when it happens:
        // room for write-back is reserved in the whole cage only.
        let limited = state.owner.group.is_some() || shared.ledger.limits().users.contains_key(&state.owner.uid);
        if limited || self.lease.writeback.load(Ordering::Relaxed) || !writeback.admit(shared.writeback_room()) {
            return false;
        }
        self.lease.writeback.store(true, Ordering::Relaxed);
        state.writeback += 1;
        // Write-back arrives at offsets that only the kernel knows: the known blocks must be exact.
        self.refresh(&mut state);
        true
    }

    fn begin_unopened(&self) {
        let shared = self.shared();
        let Some(writeback) = shared.doors.writeback.get() else { return };
        let mut state = self.inode().lock();
        if !self.lease.writeback.swap(true, Ordering::Relaxed) {
            writeback.admit_unopened();
            state.writeback += 1;
            self.refresh(&mut state);
            shared.look_at_room();
        }
    }

    fn unannounced(&self) -> bool {
        let shared = self.shared();
        let Some(writeback) = shared.doors.writeback.get() else { return false };
        // Where files are opened by requests, files under a limit of their own never use
        // write-back.
        writeback.unannounced(shared.writeback_room())
            && !(writeback.opens_unasked() && shared.ledger.has_limits_within())
    }

    fn announce(&self, write: WriteAhead) -> Result<()> {
        let shared = self.shared();
        let Some(writeback) = shared.doors.writeback.get() else { return Err(Errno::EIO) };
        let most = if write.length.is_some() { super::books::ARRIVAL } else { PATIENCE };
        let length = write.length.unwrap_or(UNKNOWN);
        let (mut round, mut looked, mut waited) = (0, false, false);
        while !self.unannounced() {
            // Dirty data that is still arriving has precedence.
            if writeback.phase() == Phase::Recalled && !waited {
                shared.wait_settled(most)?;
                waited = true;
                continue;
            }
            let (short, owner, bytes) = {
                let mut state = self.inode().lock();
                match self.announce_under(&mut state, write.offset, length) {
                    Ok(()) => return Ok(()),
                    Err(Lack::Other(error)) => return Err(error),
                    Err(Lack::Room(short, bytes)) => (short, state.owner, bytes),
                }
            };
            if short == Short::Full(Full::Whole) && !looked && shared.has_stale() {
                looked = true;
                writeback.unsettle();
                continue;
            }
            if short == Short::Unsettled && waited {
                return Err(shared.refuse(Full::Whole));
            }
            shared.relieve(short, owner, bytes, round)?;
            round += 1;
        }
        Ok(())
    }
}

/// Target position of a write.
#[derive(Clone, Copy)]
enum WriteTarget {
    At(u64, WriteOrigin),
    End,
}

impl OpenFile for CageFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        self.write_to(data, WriteTarget::At(offset, origin))
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.write_to(data, WriteTarget::End)
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        let result = self.below.flush(owner);
        if self.lease.flags.writes() {
            let mut state = self.inode().lock();
            if state.kept || state.cost != self.shared().rule.whole(state.size) {
                self.refresh(&mut state);
            }
        }
        result
    }

    fn fsync(&self, data_only: bool) -> Result<()> {
        let result = self.below.fsync(data_only);
        if self.lease.flags.writes() {
            self.refresh(&mut self.inode().lock());
        }
        result
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        if !self.lease.flags.writes() || length == 0 {
            return self.below.allocate(mode, offset, length);
        }
        self.with_room(|state, _| self.allocate_under(state, mode, offset, length))
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        let Some(inode) = self.shared().written.lock().get(&address(target)).cloned() else {
            // Not open for writing, which the layer below refuses; or not a file of this cage.
            self.below.copy_to(offset, target, target_offset, 0, flags)?;
            return Err(Errno::EXDEV);
        };
        let size = self.shared().below.getattr(&Caller::ROOT, &self.node, Some(&*self.below))?.size;
        let length = length.min(size.saturating_sub(offset));
        let copy = Copy { offset, target, target_offset, length, flags };
        let mut round = 0;
        loop {
            let mut state = inode.lock();
            let owner = state.owner;
            let partly = round >= ROUNDS || self.shared().policy.when_full == crate::settings::WhenFull::Deny;
            let (short, bytes) = match self.copy_under(&mut state, &inode, &copy, partly) {
                Ok(copied) => return Ok(copied),
                Err(Lack::Other(error)) => return Err(error),
                Err(Lack::Room(short, bytes)) => (short, bytes),
            };
            drop(state);
            match self.shared().relieve(short, owner, bytes, round) {
                Ok(()) => round += 1,
                Err(_) if !partly && matches!(short, Short::Full(_)) => round = ROUNDS,
                Err(error) => return Err(error),
            }
        }
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        judge_ioctl(&request)?;
        self.below.ioctl(request, output)
    }

    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writeback_lease(&self) -> Option<&dyn WritebackLease> {
        if self.lease.writeback_allowed { Some(self) } else { None }
    }

    nacre_vfs::forward_file! { inner read seek test_lock set_lock flock left is_on_inner_mount }
}
