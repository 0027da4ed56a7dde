//! Booking: how changes of files get into the ledger.
//!
//! Called by the operations of the layer and of open files. Every change of a file's booked cost
//! goes through here, under the file's lock: recorded in the saved accounts first, then booked,
//! both while checkpoints are held off ([`CageLocks::changing`]).

use super::{
    CageShared,
    allocated::{Span, bytes_in},
    charge_rule::Storage,
    file::hints_at_extents,
    inodes::{Account, Inode, InodeState},
    ledger::{Full, Owner},
    saved::{SOMEWHERE, Saved},
    settings::WhenFull,
    writeback::Phase,
};
use nacre_layers::context::wait_for;
use nacre_vfs::{Attr, Caller, Errno, FileId, Ioctl, Kind, Node, OpenFile, OpenFlags, Opened, Result};
use std::{ops::Range, os::fd::BorrowedFd, sync::atomic::Ordering, time::Duration};

/// Maximum number of retries of an operation after room was made or write-back was waited for.
pub(super) const ROUNDS: usize = 8;

/// Time limit of a wait for write-back by a call that may hold a lock which the write-back needs.
const HELD_UP: Duration = Duration::from_secs(1);
/// Time limit of a wait for write-back by any other call: far longer than a disk takes to write all
/// dirty data of a front end. Where write-back does not end, calls are refused then, and none
/// hangs.
pub(super) const ARRIVAL: Duration = Duration::from_secs(30);

/// `FS_XFLAG_PREALLOC` (linux/fs.h): `fallocate(2)` was used on the file, and the file system does
/// not free the blocks by itself.
const PREALLOCATED: u32 = 2;

/// Whether the file system keeps blocks beyond a file's end because of fallocate(2).
///
/// # Errors
/// As `FS_IOC_FSGETXATTR`.
fn is_preallocated(file: BorrowedFd<'_>) -> std::io::Result<bool> {
    let flags = nacre_sys::ioctls::extended(file)?.first_chunk().copied().map_or(0, u32::from_ne_bytes);
    Ok(flags & PREALLOCATED != 0)
}

/// Whether blocks are allocated for a file from `end` on, beyond its last block. A file system
/// without a map of extents (tmpfs) counts only data blocks in `st_blocks`: all blocks beyond the
/// size lie there.
fn has_tail(file: BorrowedFd<'_>, end: u64) -> bool {
    nacre_sys::ioctls::has_extents_from(file, end).unwrap_or(true)
}

/// Reason why a booking did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// A limit was exceeded.
    Full(Full),
    /// Dirty data of a front end has to arrive first.
    Unsettled,
    /// The disk below has no room for a reserved write.
    Disk,
}

/// Origin of the bytes to be booked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A call that can wait and fail.
    Call,
    /// A call whose caller may hold the lock of a file whose write-back is waited for.
    Beside,
    /// Dirty data that was accepted earlier, so that it fits.
    Held,
}

impl CageShared {
    /// Index of the directory limit that a path below the root lies under. A limited directory lies
    /// under its own limit; another kind of file with its name does not.
    pub(super) fn group_of_path(&self, path: &[u8], kind: Kind) -> Option<usize> {
        let own = kind == Kind::Directory;
        let inside = |rest: &[u8]| own && rest.is_empty() || rest.starts_with(b"/");
        self.dirs.paths.iter().position(|dir| path.strip_prefix(dir.as_slice()).is_some_and(inside))
    }

    /// Index of the directory limit for a directory, and for new files in it.
    pub(super) fn group(&self, directory: &Node) -> Option<usize> {
        self.group_of(directory, Kind::Directory)
    }

    /// Index of the directory limit for a file of this kind.
    pub(super) fn group_of(&self, node: &Node, kind: Kind) -> Option<usize> {
        if self.dirs.paths.is_empty() {
            return None;
        }
        self.group_of_path(&self.below.path(node)?, kind)
    }

    /// Records that the booked cost of a file is about to change.
    pub(super) fn touch(&self, inode: &Inode, state: &mut InodeState) {
        if inode.id == self.root {
            // The root always exists, and is not counted.
            return;
        }
        if state.loaded {
            self.settle_account(inode, state);
        }
        let Some(saved) = &self.saved else { return };
        let generation = saved.generation();
        if state.generation != Some(generation) {
            // A file without a name is gone when this process ends.
            let path = || state.node.as_ref().and_then(|node| self.below.path(node));
            let place = if state.gone { None } else { Some(path()) };
            self.note(saved, inode.id, place.as_ref().map_or(b"", |path| path.as_deref().unwrap_or(SOMEWHERE)), state);
            state.generation = Some(generation);
        }
    }

    /// Writes a record of the saved accounts. Costs are multiples of 512, so the lowest bit can
    /// state whether the file was counted.
    pub(super) fn note(&self, saved: &Saved, id: FileId, place: &[u8], state: &InodeState) {
        saved.touch(id, place, state.booked() | u64::from(state.counted), state.owner);
        self.background.note_change();
    }

    /// Loads the state of a file that existed before the start: the ledger counts it already.
    pub(super) fn load(&self, state: &mut InodeState, node: &Node, attr: &Attr) {
        let group = self.group_of(node, attr.kind);
        state.loaded = true;
        state.counted = true;
        state.has_extent_size = None;
        state.gone = attr.nlink == 0;
        state.node = Some(node.clone());
        state.kind = Some(attr.kind);
        state.owner = Owner { uid: attr.uid, group };
        state.kept = self.keeps(node, attr);
        state.cost = self.rule.cost(attr, state.kept);
        state.pool = 0;
        self.look(state, attr);
    }

    /// Books an open file without a name that was taken over from an earlier process: the saved
    /// accounts do not contain it.
    pub(super) fn take_up_nameless(&self, inode: &Inode, state: &mut InodeState, node: &Node, attr: &Attr) {
        {
            let _changing = self.locks.changing.read();
            (state.gone, state.owner) = (true, Owner { uid: attr.uid, group: self.group_of(node, attr.kind) });
            self.touch(inode, state);
            self.load(state, node, attr);
            self.ledger.force(state.owner, state.booked(), 1);
            self.settle_account(inode, state);
        }
        self.look_at_room();
    }

    /// Whether an unknown file keeps allocated blocks beyond its end. Where the attributes do not
    /// show it, the file system is asked.
    pub(super) fn keeps(&self, node: &Node, attr: &Attr) -> bool {
        if self.rule.seems_kept(attr) {
            return true;
        }
        if !self.rule.may_keep(attr) {
            return false;
        }
        let end = self.rule.whole(attr.size);
        let ahead = self.rule.storage == Storage::Ahead;
        let asked = self.open_to_ask(node).and_then(|file| match file.backing() {
            Some(file) if ahead => Ok(is_preallocated(file)?),
            Some(file) => Ok(has_tail(file, end)),
            // The layer below has no descriptor to ask. Assume preallocation or metadata, which is
            // far more common.
            None => Ok(false),
        });
        asked.unwrap_or_else(|error| {
            tracing::debug!(%error, id = ?attr.id, "why a file has space behind its end cannot be asked");
            false
        })
    }

    /// Opens a file to ask the file system about it. EAGAIN where a program outside has a lease on it, as others wait for
    /// the lock under which this is called.
    fn open_to_ask(&self, node: &Node) -> Result<Opened> {
        self.below.open(&Caller::ROOT, node, OpenFlags(OpenFlags::READ.raw() | OpenFlags::NONBLOCK))
    }

    /// Updates the file's account for a running recount: to be called before a file is changed, with
    /// each change of its booked cost, and after the file was changed: a recount that began meanwhile
    /// may have seen a part of the change.
    pub(super) fn settle_account(&self, inode: &Inode, state: &InodeState) {
        let count = self.background.counts();
        *inode.account.lock() = Account { owner: state.owner, bytes: state.booked(), counted: state.counted, count };
    }

    /// Takes the length and the known blocks from fresh attributes.
    fn look(&self, state: &mut InodeState, attr: &Attr) {
        state.size = attr.size;
        if self.rule.storage == Storage::Ahead {
            state.ahead = attr.blocks.saturating_mul(512).saturating_sub(state.cost);
        }
        if attr.kind == Kind::File && !state.kept && state.cost >= self.rule.whole(attr.size) {
            state.solid = 0..self.rule.whole(attr.size);
        }
    }

    /// Books a file's current cost, by attributes taken under its lock.
    pub(super) fn learn(&self, inode: &Inode, state: &mut InodeState, node: &Node, attr: &Attr) {
        let booked = state.cost;
        if !state.loaded {
            self.load(state, node, attr);
            return;
        }
        // Removed from outside: an open file still occupies its space.
        state.gone |= attr.nlink == 0;
        if state.owner.uid != attr.uid {
            self.give(inode, state, Owner { uid: attr.uid, ..state.owner });
        }
        let cost = self.rule.cost(attr, state.kept);
        // Where storage preallocates, the blocks beyond the end of a file with holes count as if
        // they were data: the booked worst case is the upper bound.
        let ahead = self.rule.storage == Storage::Ahead && attr.kind == Kind::File && attr.size == state.size;
        // With a size of extents, they are: whole extents were allocated for single blocks.
        let is_bounded = ahead && (cost <= booked || !self.has_extent_size(state, node));
        self.correct(inode, state, if is_bounded { cost.min(booked) } else { cost });
        self.look(state, attr);
    }

    /// Whether a file has a size of extents, which it may have from its directory. It cannot be set in the cage.
    fn has_extent_size(&self, state: &mut InodeState, node: &Node) -> bool {
        if let Some(known) = state.has_extent_size {
            return known;
        }
        let request = Ioctl { command: Ioctl::GET_EXTENDED, argument: 0, input: &[] };
        let mut extended = [0; nacre_sys::ioctls::EXTENDED_LEN];
        let asked = self.open_to_ask(node).and_then(|file| file.ioctl(request, &mut extended));
        let known = match asked {
            Ok(_) => hints_at_extents(&extended),
            // A file system without the command has no such sizes.
            Err(Errno::ENOTTY | Errno::EOPNOTSUPP) => false,
            // What is allocated is charged; the next change asks again.
            Err(_) => return true,
        };
        state.has_extent_size = Some(known);
        known
    }

    /// Reads a file's attributes from the layer below and books its current cost.
    pub(super) fn refresh(&self, inode: &Inode, state: &mut InodeState, node: &Node, file: Option<&dyn OpenFile>) {
        match self.below.getattr(&Caller::ROOT, node, file) {
            Ok(attr) => self.learn(inode, state, node, &attr),
            // The booked worst case stays. The next recount corrects it.
            Err(error) => {
                tracing::debug!(%error, id = ?inode.id, "a changed file cannot be examined");
                self.background.doubt();
            }
        }
    }

    /// Books another cost that has happened already.
    pub(super) fn correct(&self, inode: &Inode, state: &mut InodeState, cost: u64) {
        if cost == state.cost || inode.id == self.root {
            return;
        }
        let grew = cost > state.cost;
        {
            let _changing = self.locks.changing.read();
            self.touch(inode, state);
            self.ledger.correct(state.owner, state.cost, cost);
            state.cost = cost;
            self.settle_account(inode, state);
        }
        if grew {
            self.look_at_room();
        }
    }

    /// Releases a range of a file that became a hole or was removed: its known blocks are free.
    /// Where storage preallocates, the block count alone would not show that.
    pub(super) fn emptied(&self, inode: &Inode, state: &mut InodeState, start: u64, end: u64) {
        let blocks = self.rule.whole(start)..self.rule.floor(end);
        let freed = if blocks.is_empty() { 0 } else { state.take_solid(&blocks) };
        if self.rule.storage == Storage::Ahead && !state.kept {
            self.correct(inode, state, state.cost.saturating_sub(freed));
        }
    }

    /// Moves a file to another owner, above any limit: the change has happened already.
    pub(super) fn give(&self, inode: &Inode, state: &mut InodeState, owner: Owner) {
        if owner == state.owner || inode.id == self.root {
            state.owner = owner;
            return;
        }
        let _changing = self.locks.changing.read();
        self.touch(inode, state);
        self.ledger.force_transfer(state.owner, owner, state.booked(), u64::from(state.counted));
        state.owner = owner;
        self.settle_account(inode, state);
    }

    /// Moves a file to another owner, if it fits there.
    pub(super) fn try_give(&self, inode: &Inode, state: &mut InodeState, owner: Owner) -> Result<(), Full> {
        if owner != state.owner && inode.id != self.root {
            let _changing = self.locks.changing.read();
            self.touch(inode, state);
            self.ledger.transfer(state.owner, owner, state.booked(), u64::from(state.counted))?;
            state.owner = owner;
            self.settle_account(inode, state);
        }
        Ok(())
    }

    /// Releases the cost of a removed file. Its state is reset; the entry stays for a recount that
    /// may have seen the file.
    pub(super) fn free(&self, inode: &Inode, state: &mut InodeState) {
        let _changing = self.locks.changing.read();
        if state.loaded {
            self.touch(inode, state);
            self.ledger.release(state.owner, state.booked(), u64::from(state.counted));
            self.disk.announced(state.pool, 0);
        }
        let (handles, writers, appenders, writeback) = (state.handles, state.writers, state.appenders, state.writeback);
        // The generation stays: its record of this file is valid.
        *state = InodeState {
            handles,
            writers,
            appenders,
            writeback,
            generation: state.generation,
            owner: state.owner,
            gone: true,
            ..InodeState::default()
        };
        self.settle_account(inode, state);
        self.background.ended(&inode.id);
    }

    /// Releases what was booked for reserved writes that did not happen.
    pub(super) fn drain_pool(&self, inode: &Inode, state: &mut InodeState) {
        state.announced = None;
        if state.pool > 0 {
            let _changing = self.locks.changing.read();
            self.touch(inode, state);
            self.ledger.release(state.owner, state.pool, 0);
            self.disk.announced(state.pool, 0);
            state.pool = 0;
            self.settle_account(inode, state);
        }
    }

    /// Charges `bytes` and `inodes` without a file, or returns the reason why not. The caller holds
    /// off checkpoints, or has booked nothing for a file yet.
    pub(super) fn take(&self, owner: Owner, bytes: u64, inodes: u64, source: Source) -> Result<(), Short> {
        let Some(writeback) = self.doors.writeback.get() else {
            return self.ledger.charge(owner, bytes, inodes).map_err(Short::Full);
        };
        let gate = writeback.gate();
        if source == Source::Held {
            self.ledger.charge(owner, bytes, inodes).or_else(|full| match full {
                // It was accepted before the limit was lowered, or before the file came under a
                // limit.
                Full::Whole if !writeback.is_forgiving() => Err(Short::Full(full)),
                Full::User | Full::Dir if self.ledger.room() < bytes && !writeback.is_forgiving() => {
                    Err(Short::Full(full))
                }
                _ => {
                    self.ledger.force(owner, bytes, inodes);
                    Ok(())
                }
            })?;
            if self.writeback_room() < writeback.held() {
                writeback.recall(&gate);
            }
            return Ok(());
        }
        let room = self.ledger.room();
        if bytes == 0 || room >= bytes.saturating_add(writeback.held()) {
            return self.ledger.charge(owner, bytes, inodes).map_err(Short::Full);
        }
        match writeback.phase() {
            // It will not fit, whatever arrives.
            _ if room < bytes => Err(Short::Full(Full::Whole)),
            phase @ (Phase::Free | Phase::Recalled) => {
                if phase == Phase::Free {
                    writeback.recall(&gate);
                }
                // Until this caller has continued, no dirty data of that file can arrive.
                if source == Source::Beside && writeback.spend(&gate, bytes) {
                    return self.ledger.charge(owner, bytes, inodes).map_err(Short::Full);
                }
                Err(Short::Unsettled)
            }
            Phase::Settled => self.ledger.charge(owner, bytes, inodes).map_err(Short::Full),
            Phase::Stuck => Err(Short::Full(Full::Whole)),
        }
    }

    /// Recalls write-back where too little room remains for the dirty data. Called after bookings
    /// that could not be refused.
    pub(super) fn look_at_room(&self) {
        if let Some(writeback) = self.doors.writeback.get()
            && writeback.phase() == Phase::Free
            && self.writeback_room() < writeback.bound()
        {
            let gate = writeback.gate();
            if self.writeback_room() < writeback.bound() {
                writeback.recall(&gate);
            }
        }
    }

    /// Remedies a lack of room: waits for dirty data to arrive, or makes room. Called without any
    /// file's lock.
    ///
    /// # Errors
    /// No remedy worked (counted as refused), or the caller gave up.
    pub(super) fn relieve(&self, short: Short, owner: Owner, bytes: u64, round: usize) -> Result<()> {
        match short {
            Short::Full(_) | Short::Disk if round == 0 && self.doors.await_forgotten(self.clock.now(), false) => Ok(()),
            Short::Unsettled if round < ROUNDS => {
                // The arriving dirty data needs requests, too: not all of them may be waiting for
                // it.
                let _place = self.doors.waiters.try_acquire().ok_or_else(|| self.refuse(Full::Whole))?;
                self.wait_settled(ARRIVAL)?;
                self.still_arriving()
            }
            Short::Disk if round <= 1 => wait_for(&self.doors.waiting, || self.settle_disk()),
            Short::Unsettled => Err(self.refuse(Full::Whole)),
            Short::Disk => {
                self.refuse(Full::Whole);
                Err(Errno::ENOSPC)
            }
            Short::Full(full) if self.policy.when_full == WhenFull::DropOldest && round < ROUNDS => {
                // The search may walk the whole tree.
                if wait_for(&self.doors.waiting, || self.make_room(full, owner, bytes))? {
                    Ok(())
                } else {
                    Err(self.refuse(full))
                }
            }
            Short::Full(full) => Err(self.refuse(full)),
        }
    }

    /// Remedies a lack of room like [`CageShared::relieve`], for a call whose caller may hold the lock
    /// of a file that the write-back needs: waits with a short time limit.
    ///
    /// # Errors
    /// As for [`CageShared::relieve`], or the dirty data has not arrived.
    pub(super) fn relieve_holding(
        &self,
        holds: bool,
        short: Short,
        owner: Owner,
        bytes: u64,
        round: usize,
    ) -> Result<()> {
        let unasked = || self.doors.writeback.get().is_some_and(|writeback| writeback.opens_unasked());
        // A front end without open requests writes back without that lock.
        if !holds || short != Short::Unsettled || unasked() {
            return self.relieve(short, owner, bytes, round);
        }
        self.wait_settled(HELD_UP)?;
        if round >= ROUNDS { Err(self.refuse(Full::Whole)) } else { self.still_arriving() }
    }

    /// Refuses if the wait has ended before all dirty data had arrived.
    fn still_arriving(&self) -> Result<()> {
        let recalled = self.doors.writeback.get().is_some_and(|writeback| writeback.phase() == Phase::Recalled);
        if recalled { Err(self.refuse(Full::Whole)) } else { Ok(()) }
    }

    /// Waits at most `most` for all dirty data to arrive.
    ///
    /// # Errors
    /// The caller gave up.
    pub(super) fn wait_settled(&self, most: Duration) -> Result<()> {
        wait_for(&self.doors.waiting, || {
            if let Some(writeback) = self.doors.writeback.get() {
                writeback.wait_settled(most);
            }
        })
    }

    /// Counts a refusal and returns its error.
    pub(super) fn refuse(&self, full: Full) -> Errno {
        self.ledger.refused(full);
        self.tell_full(full);
        full.errno(self.policy.error.errno())
    }

    /// Reports the event "cage full", at most once a minute.
    fn tell_full(&self, full: Full) {
        const AGAIN: Duration = Duration::from_secs(60);
        let now = self.clock.now();
        {
            let mut at = self.told_full.at.lock();
            if at.is_some_and(|at| now.saturating_sub(at) < AGAIN) {
                return;
            }
            *at = Some(now);
        }
        let limit = format!("{full:?}").to_lowercase();
        tracing::warn!(cage = self.name, limit, "something did not fit: the cage, or a part of it, is full");
        let details = [("cage", self.name.clone()), ("state", "full".to_owned()), ("which", limit)];
        (self.told_full.tell)("cage-full", details.map(|(name, value)| (name.to_owned(), value)).to_vec());
    }

    /// Charges a file that is about to be created.
    ///
    /// # Errors
    /// The limit does not allow it.
    pub(super) fn obtain(&self, owner: Owner, bytes: u64, inodes: u64) -> Result<()> {
        // The caller of a creation, link or rename may hold the file's lock, and a front end
        // without open requests treats all files as open.
        let unasked = self.doors.writeback.get().is_some_and(|writeback| writeback.opens_unasked());
        let source = if unasked { Source::Beside } else { Source::Call };
        let mut round = 0;
        loop {
            match self.take(owner, bytes, inodes, source) {
                Ok(()) => return Ok(()),
                Err(short) => self.relieve(short, owner, bytes, round)?,
            }
            round += 1;
        }
    }

    /// Maximum new cost of a write, bytes: the blocks that it touches and that are not known to be
    /// booked; never more than the maximum cost of the file at its new length.
    pub(super) fn worst(&self, state: &InodeState, offset: u64, length: u64) -> u64 {
        self.missing(state, &[], offset, length)
    }

    /// Maximum new cost of a write, like [`CageShared::worst`], minus known allocated blocks
    /// ([`CageShared::allocated`]).
    fn missing(&self, state: &InodeState, allocated: &[Range<u64>], offset: u64, length: u64) -> u64 {
        if length == 0 {
            return 0;
        }
        let whole = self.rule.whole(state.size.max(offset.saturating_add(length)));
        let most = whole.saturating_sub(state.cost);
        if self.rule.storage == Storage::Lagging {
            return most;
        }
        let touched = self.rule.blocks(offset, length);
        let solid = touched.end.min(state.solid.end).saturating_sub(touched.start.max(state.solid.start));
        let known = solid.max(bytes_in(allocated, &touched));
        let tail = if offset > state.size { self.gap(state, touched.start) } else { 0 };
        let new = (touched.end - touched.start).saturating_sub(known) + tail;
        if state.kept { new } else { new.min(most) }
    }

    /// Cost of zeroing the rest of the block that a length ends in, which some file systems do when
    /// the length changes although the block is a hole (Btrfs).
    pub(super) fn tail(&self, state: &InodeState, size: u64) -> u64 {
        let start = self.rule.floor(size);
        let known = start == size || state.solid.contains(&start) || self.rule.storage == Storage::Lagging;
        if known || state.cost >= self.rule.whole(state.size) { 0 } else { self.rule.unit }
    }

    /// Cost of moving a file's end beyond `to` by a write there, in addition to the written blocks.
    pub(super) fn gap(&self, state: &InodeState, to: u64) -> u64 {
        let tail = if self.rule.floor(state.size) < to { self.tail(state, state.size) } else { 0 };
        tail.saturating_add(state.ahead)
    }

    /// Refreshes the attributes of a file whose end is about to jump to `to`, where storage
    /// preallocates.
    pub(super) fn before_jump(
        &self,
        inode: &Inode,
        state: &mut InodeState,
        node: &Node,
        file: Option<&dyn OpenFile>,
        to: u64,
    ) {
        if self.rule.storage == Storage::Ahead && to > state.size {
            self.refresh(inode, state, node, file);
        }
    }

    /// Books a write before it happens; with `partly`, as much of it as fits. Returns the bytes
    /// that may be written, at least one (unless the span is empty).
    pub(super) fn admit_write(
        &self,
        inode: &Inode,
        state: &mut InodeState,
        span: &Span<'_>,
        source: Source,
        partly: bool,
    ) -> Result<u64, Short> {
        let short = match self.book_span(inode, state, span, source) {
            Ok(()) => return Ok(span.length),
            Err(short @ Short::Full(Full::Whole | Full::User | Full::Dir)) if partly && source != Source::Held => short,
            Err(short) => return Err(short),
        };
        let held = self.doors.writeback.get().map_or(0, |writeback| writeback.held());
        let room =
            self.ledger.room_of(state.owner).min(self.ledger.room().saturating_sub(held)).saturating_add(state.pool);
        let allocated = self.allocated(span);
        let (mut fits, mut over) = (0, span.length);
        // The cost of a write grows with its length, so a binary search finds the longest that fits.
        while over - fits > 1 {
            let middle = fits + (over - fits) / 2;
            if self.missing(state, &allocated, span.offset, middle) <= room { fits = middle } else { over = middle }
        }
        if fits == 0 {
            return Err(short);
        }
        let new = self.missing(state, &allocated, span.offset, fits);
        self.book_new(inode, state, new, source)?;
        Ok(fits)
    }

    /// Books the blocks of a span that the file may lack. Where these do not fit, the file system
    /// below is asked for the blocks that are really missing.
    pub(super) fn book_span(
        &self,
        inode: &Inode,
        state: &mut InodeState,
        span: &Span<'_>,
        source: Source,
    ) -> Result<(), Short> {
        let worst = self.worst(state, span.offset, span.length);
        let Err(short) = self.book_new(inode, state, worst, source) else { return Ok(()) };
        let allocated = self.allocated(span);
        let missing = self.missing(state, &allocated, span.offset, span.length);
        if missing < worst { self.book_new(inode, state, missing, source) } else { Err(short) }
    }

    /// Books new blocks of a file: first from its reservation.
    pub(super) fn book_new(
        &self,
        inode: &Inode,
        state: &mut InodeState,
        new: u64,
        source: Source,
    ) -> Result<(), Short> {
        let _changing = self.locks.changing.read();
        self.touch(inode, state);
        if new == 0 {
            return Ok(());
        }
        let announced = new.min(state.pool);
        self.take(state.owner, new - announced, 0, source)?;
        state.pool -= announced;
        self.disk.announced(announced, 0);
        state.cost += new;
        self.settle_account(inode, state);
        Ok(())
    }

    /// Whether no write needs a reservation, where a front end opens files without requests.
    pub(super) fn unannounced(&self) -> bool {
        let Some(writeback) = self.doors.writeback.get() else { return false };
        writeback.unannounced(self.writeback_room()) && !self.ledger.has_limits_within()
    }

    /// Whether write-back is in use.
    pub(super) fn writes_back(&self) -> bool {
        self.doors.writeback.get().is_some()
    }

    /// Records whether the sums are based on a complete count.
    pub(super) fn set_exact(&self, exact: bool) {
        self.exact.store(exact, Ordering::Relaxed);
    }
}
