//! How changes of files get into the ledger.
//!
//! Called by the operations of the layer and of open files. Every change of what is booked for a
//! file goes through here, under the file's lock: noted for the saved accounts first, then booked,
//! both while checkpoints are held off ([`CageLocks::changing`]).

use super::{
    CageShared,
    allocated::{Span, bytes_in},
    charge_rule::Storage,
    inodes::{Account, Inode, InodeState},
    ledger::{Full, Owner},
    saved::{SOMEWHERE, Saved},
    settings::WhenFull,
    writeback::Phase,
};
use nacre_layers::context::wait_for;
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, Node, OpenFile, OpenFlags, Result};
use std::{ops::Range, os::fd::BorrowedFd, sync::atomic::Ordering, time::Duration};

/// How often an operation tries again after room was made or a settling was waited for.
pub(super) const ROUNDS: usize = 8;

/// How long a call waits that may hold up what it waits for.
const HELD_UP: Duration = Duration::from_secs(1);
/// How long any other call waits: far longer than a disk takes to write what a door can hold back.
/// Whatever keeps it from arriving, calls are refused then, and nobody hangs.
pub(super) const ARRIVAL: Duration = Duration::from_secs(30);

/// `FS_XFLAG_PREALLOC` (linux/fs.h): `fallocate(2)` was used on the file, and the file system gives
/// nothing back by itself.
const PREALLOCATED: u32 = 2;

/// Whether the file system keeps what lies behind a file's end because somebody asked for it.
///
/// # Errors
/// What `FS_IOC_FSGETXATTR` says.
fn is_preallocated(file: BorrowedFd<'_>) -> std::io::Result<bool> {
    let flags = nacre_sys::ioctls::extended(file)?.first_chunk().copied().map_or(0, u32::from_ne_bytes);
    Ok(flags & PREALLOCATED != 0)
}

/// Whether blocks are allocated for a file from `end` on, behind its last block. A file system without a map
/// of extents (tmpfs) counts only data blocks in `st_blocks`: all blocks beyond the size lie there.
fn has_tail(file: BorrowedFd<'_>, end: u64) -> bool {
    nacre_sys::ioctls::has_extents_from(file, end).unwrap_or(true)
}

/// Why something was not booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// A limit is in the way.
    Full(Full),
    /// What a door holds back has to arrive first.
    Unsettled,
    /// The disk below has no room for what is announced.
    Disk,
}

/// Whose bytes are to be booked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Somebody's call, which can wait and fail.
    Call,
    /// The same, by a caller who may hold the lock of a file that what a door holds back has to
    /// wait for.
    Beside,
    /// What was granted when a door took it, so that it fits.
    Held,
}

impl CageShared {
    /// The group that what is found at a path below the root lies in. A limited directory lies in
    /// its own; something else in its place does not.
    pub(super) fn group_of_path(&self, path: &[u8], kind: Kind) -> Option<usize> {
        let own = kind == Kind::Directory;
        let inside = |rest: &[u8]| own && rest.is_empty() || rest.starts_with(b"/");
        self.dirs.paths.iter().position(|dir| path.strip_prefix(dir.as_slice()).is_some_and(inside))
    }

    /// The group that a directory, and what is made in it, lies in.
    pub(super) fn group(&self, directory: &Node) -> Option<usize> {
        self.group_of(directory, Kind::Directory)
    }

    /// The group that a file of this kind lies in.
    pub(super) fn group_of(&self, node: &Node, kind: Kind) -> Option<usize> {
        if self.dirs.paths.is_empty() {
            return None;
        }
        self.group_of_path(&self.below.path(node)?, kind)
    }

    /// Notes that what is booked for a file is about to change.
    pub(super) fn touch(&self, inode: &Inode, state: &mut InodeState) {
        if inode.id == self.root {
            // It is there whatever happens, and not counted.
            return;
        }
        if state.loaded {
            self.settle_account(inode, state);
        }
        let Some(saved) = &self.saved else { return };
        let generation = saved.generation();
        if state.generation != Some(generation) {
            // Without a name it is gone when we are.
            let path = || state.node.as_ref().and_then(|node| self.below.path(node));
            let place = if state.gone { None } else { Some(path()) };
            self.note(saved, inode.id, place.as_ref().map_or(b"", |path| path.as_deref().unwrap_or(SOMEWHERE)), state);
            state.generation = Some(generation);
        }
    }

    /// Writes a record. Costs are multiples of 512, so the lowest bit can say whether there was a
    /// file at all.
    pub(super) fn note(&self, saved: &Saved, id: FileId, place: &[u8], state: &InodeState) {
        saved.touch(id, place, state.booked() | u64::from(state.counted), state.owner);
        self.background.note_change();
    }

    /// Learns of a file that was there before us: it is in the ledger already.
    pub(super) fn load(&self, state: &mut InodeState, node: &Node, attr: &Attr) {
        let group = self.group_of(node, attr.kind);
        state.loaded = true;
        state.counted = true;
        state.gone = attr.nlink == 0;
        state.node = Some(node.clone());
        state.kind = Some(attr.kind);
        state.owner = Owner { uid: attr.uid, group };
        state.kept = self.keeps(node, attr);
        state.cost = self.rule.cost(attr, state.kept);
        state.pool = 0;
        self.look(state, attr);
    }

    /// Learns of an open file without a name that a process before this one had in its books: these
    /// were saved without it.
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

    /// Whether a file that nothing is known of keeps what is allocated behind its end. Where the
    /// attributes do not tell, the file system is asked.
    pub(super) fn keeps(&self, node: &Node, attr: &Attr) -> bool {
        if self.rule.seems_kept(attr) {
            return true;
        }
        if !self.rule.may_keep(attr) {
            return false;
        }
        let end = self.rule.whole(attr.size);
        let ahead = self.rule.storage == Storage::Ahead;
        let asked = self.below.open(&Caller::ROOT, node, OpenFlags::READ).and_then(|file| match file.backing() {
            Some(file) if ahead => Ok(is_preallocated(file)?),
            Some(file) => Ok(has_tail(file, end)),
            // What is below does not say. Then it was allocated ahead, or is bookkeeping, which is far more
            // common.
            None => Ok(false),
        });
        asked.unwrap_or_else(|error| {
            tracing::debug!(%error, id = ?attr.id, "why a file has space behind its end cannot be asked");
            false
        })
    }

    /// What a count is told of the file: to be called before a file is changed, and with each
    /// change of what is booked.
    pub(super) fn settle_account(&self, inode: &Inode, state: &InodeState) {
        let count = self.background.counts();
        *inode.account.lock() = Account { owner: state.owner, bytes: state.booked(), counted: state.counted, count };
    }

    /// Takes length and known blocks from fresh attributes.
    fn look(&self, state: &mut InodeState, attr: &Attr) {
        state.size = attr.size;
        if self.rule.storage == Storage::Ahead {
            state.ahead = attr.blocks.saturating_mul(512).saturating_sub(state.cost);
        }
        if attr.kind == Kind::File && !state.kept && state.cost >= self.rule.whole(attr.size) {
            state.solid = 0..self.rule.whole(attr.size);
        }
    }

    /// Books what a file is now, with attributes taken under its lock.
    pub(super) fn learn(&self, inode: &Inode, state: &mut InodeState, node: &Node, attr: &Attr) {
        let booked = state.cost;
        if !state.loaded {
            self.load(state, node, attr);
            return;
        }
        // Removed from outside: what is open still occupies its space.
        state.gone |= attr.nlink == 0;
        if state.owner.uid != attr.uid {
            self.give(inode, state, Owner { uid: attr.uid, ..state.owner });
        }
        let cost = self.rule.cost(attr, state.kept);
        // Where storage allocates ahead, a file with holes seems to cost what lies behind its end:
        // what was asked for is the most it can be.
        let ahead = self.rule.storage == Storage::Ahead && attr.kind == Kind::File && attr.size == state.size;
        self.correct(inode, state, if ahead { cost.min(booked) } else { cost });
        self.look(state, attr);
    }

    /// Asks below what a file is now, and books it.
    pub(super) fn refresh(&self, inode: &Inode, state: &mut InodeState, node: &Node, file: Option<&dyn OpenFile>) {
        match self.below.getattr(&Caller::ROOT, node, file) {
            Ok(attr) => self.learn(inode, state, node, &attr),
            // What was booked stays: it is the worst case. The next recount knows better.
            Err(error) => {
                tracing::debug!(%error, id = ?inode.id, "a changed file cannot be examined");
                self.background.doubt();
            }
        }
    }

    /// Books another cost that is a fact.
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

    /// A range of a file was made a hole, or taken out of it: what was known to be there is free.
    /// Where storage allocates ahead, the count of blocks alone would not show that.
    pub(super) fn emptied(&self, inode: &Inode, state: &mut InodeState, start: u64, end: u64) {
        let blocks = self.rule.whole(start)..self.rule.floor(end);
        let freed = if blocks.is_empty() { 0 } else { state.take_solid(&blocks) };
        if self.rule.storage == Storage::Ahead && !state.kept {
            self.correct(inode, state, state.cost.saturating_sub(freed));
        }
    }

    /// Moves a file to another owner, as a fact.
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

    /// A file is no more. What is known of it goes with it; the entry stays for a recount that may
    /// have seen the file.
    pub(super) fn free(&self, inode: &Inode, state: &mut InodeState) {
        let _changing = self.locks.changing.read();
        if state.loaded {
            self.touch(inode, state);
            self.ledger.release(state.owner, state.booked(), u64::from(state.counted));
            self.disk.announced(state.pool, 0);
        }
        let (handles, writers, appenders, writeback) = (state.handles, state.writers, state.appenders, state.writeback);
        // The generation stays: its record of this file is the one that counts.
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

    /// What was booked for announced writes that did not happen is given back.
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

    /// Books `bytes` and `inodes` without a file, or says why not. The caller holds off
    /// checkpoints, or has booked nothing for a file yet.
    pub(super) fn take(&self, owner: Owner, bytes: u64, inodes: u64, source: Source) -> Result<(), Short> {
        let Some(writeback) = self.doors.writeback.get() else {
            return self.ledger.charge(owner, bytes, inodes).map_err(Short::Full);
        };
        let gate = writeback.gate();
        if source == Source::Held {
            self.ledger.charge(owner, bytes, inodes).or_else(|full| match full {
                // It was let in before the limit was lowered, or before the file came under one.
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
                // Until he has gone on, nothing of that file can arrive.
                if source == Source::Beside && writeback.spend(&gate, bytes) {
                    return self.ledger.charge(owner, bytes, inodes).map_err(Short::Full);
                }
                Err(Short::Unsettled)
            }
            Phase::Settled => self.ledger.charge(owner, bytes, inodes).map_err(Short::Full),
            Phase::Stuck => Err(Short::Full(Full::Whole)),
        }
    }

    /// Room was taken in a way that nobody could be asked about: where too little is left for what
    /// may be held back, that is recalled.
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

    /// Does what helps against a lack: waits for what is arriving, or makes room. Called without
    /// any file's lock.
    ///
    /// # Errors
    /// Nothing helps (counted as refused), or the caller gave up.
    pub(super) fn relieve(&self, short: Short, owner: Owner, bytes: u64, round: usize) -> Result<()> {
        match short {
            Short::Full(_) | Short::Disk if round == 0 && self.doors.await_forgotten(self.clock.now(), false) => Ok(()),
            Short::Unsettled if round < ROUNDS => {
                // What is arriving needs requests, too: not all of them may be waiting for it.
                let _place = self.doors.waiters.try_acquire().ok_or_else(|| self.refuse(Full::Whole))?;
                self.wait_settled(ARRIVAL)?;
                self.still_arriving()
            }
            Short::Disk if round <= 1 => wait_for(&self.doors.waiting, || self.settle_disk()),
            Short::Unsettled | Short::Disk => Err(self.refuse(Full::Whole)),
            Short::Full(full) if self.policy.when_full == WhenFull::DropOldest && round < ROUNDS => {
                // A whole tree may have to be looked through.
                if wait_for(&self.doors.waiting, || self.make_room(full, owner, bytes))? {
                    Ok(())
                } else {
                    Err(self.refuse(full))
                }
            }
            Short::Full(full) => Err(self.refuse(full)),
        }
    }

    /// The same for a call whose caller may hold the lock of a file that what is arriving has to
    /// wait for: not for long then.
    ///
    /// # Errors
    /// As for [`CageShared::relieve`], or it has not arrived.
    pub(super) fn relieve_holding(
        &self,
        holds: bool,
        short: Short,
        owner: Owner,
        bytes: u64,
        round: usize,
    ) -> Result<()> {
        let unasked = || self.doors.writeback.get().is_some_and(|writeback| writeback.opens_unasked());
        // Such a door passes on without the lock that he may hold.
        if !holds || short != Short::Unsettled || unasked() {
            return self.relieve(short, owner, bytes, round);
        }
        self.wait_settled(HELD_UP)?;
        if round >= ROUNDS { Err(self.refuse(Full::Whole)) } else { self.still_arriving() }
    }

    /// Refuses where a wait has ended before all had arrived.
    fn still_arriving(&self) -> Result<()> {
        let recalled = self.doors.writeback.get().is_some_and(|writeback| writeback.phase() == Phase::Recalled);
        if recalled { Err(self.refuse(Full::Whole)) } else { Ok(()) }
    }

    /// Waits for what is arriving, at most so long.
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

    /// Counts a refusal and answers its error.
    pub(super) fn refuse(&self, full: Full) -> Errno {
        self.ledger.refused(full);
        self.tell_full(full);
        full.errno()
    }

    /// Tells others, at most once a minute, that something did not fit.
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

    /// Books something that is about to be made.
    ///
    /// # Errors
    /// It does not fit.
    pub(super) fn obtain(&self, owner: Owner, bytes: u64, inodes: u64) -> Result<()> {
        // Who makes, links or renames a file may hold its lock, and such a door has all files open.
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

    /// What a write can newly cost at most, bytes: the blocks that it touches and that are not
    /// known to be booked; never more than the file's cost can be at its new length.
    pub(super) fn worst(&self, state: &InodeState, offset: u64, length: u64) -> u64 {
        self.missing(state, &[], offset, length)
    }

    /// The same where blocks are known that the file has ([`CageShared::allocated`]).
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

    /// What it can cost to fill the block that a length ends in with zeros, which some file systems
    /// do when the length changes though it is a hole (Btrfs).
    pub(super) fn tail(&self, state: &InodeState, size: u64) -> u64 {
        let start = self.rule.floor(size);
        let known = start == size || state.solid.contains(&start) || self.rule.storage == Storage::Lagging;
        if known || state.cost >= self.rule.whole(state.size) { 0 } else { self.rule.unit }
    }

    /// What it can cost that the end of a file jumps from where it is to beyond `to`, besides what
    /// is written there.
    pub(super) fn gap(&self, state: &InodeState, to: u64) -> u64 {
        let tail = if self.rule.floor(state.size) < to { self.tail(state, state.size) } else { 0 };
        tail.saturating_add(state.ahead)
    }

    /// Has a look at what lies behind the end of a file that is about to jump to `to`, where
    /// storage allocates ahead.
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

    /// Books a write before it happens; with `partly`, as much of it as fits. Answers the bytes that may be
    /// written, at least one (unless the span is empty).
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
        // What a write costs grows with its length, so the longest that fits can be searched for.
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

    /// Books the blocks of a span that the file may not have. Where these do not fit, the file system below is asked
    /// which ones are missing.
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

    /// Books new blocks of a file: first from what was announced.
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

    /// Whether no write needs to be announced, where a door is not asked when a file is opened.
    pub(super) fn unannounced(&self) -> bool {
        let Some(writeback) = self.doors.writeback.get() else { return false };
        writeback.unannounced(self.writeback_room()) && !self.ledger.has_limits_within()
    }

    /// Whether writes are collected at all.
    pub(super) fn writes_back(&self) -> bool {
        self.doors.writeback.get().is_some()
    }

    /// Marks the sums as resting on a count, or not.
    pub(super) fn set_exact(&self, exact: bool) {
        self.exact.store(exact, Ordering::Relaxed);
    }
}
