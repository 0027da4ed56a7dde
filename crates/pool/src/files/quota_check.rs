//! Whether an operation may take what it needs: the rules of the dataset, quotas of owners, and the
//! engine, which knows all limits of the pool (`engine/reservation.rs`).
//!
//! An operation asks before it changes anything. What waits in memory stays promised until it is a
//! frame; what a commit will write of the table is counted as it becomes dirty. So what was
//! accepted finds room, and no figure is overrun between commits.
//!
//! Invariant: whoever is refused has changed nothing; a shortage that a commit may end is met with
//! one before it is told.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::owner_accounts::owners_of;
use super::stored_patches::{self, StoredPatch, is_split};
use super::{FileError, Files, Result, Table};
use crate::error::{Damage, PoolError};
use crate::patience;
use crate::pointer::{Pointer, Txg};
use crate::rows::{Extent, InodeRow, OwnerKind, OwnerUse, keys};
use crate::space::{OwnerQuota, OwnerQuotas, Purpose};

/// What an operation on rows is taken to need, bytes; what it has dirtied is counted when it is
/// done.
const ROWS: u64 = 1;
/// What an operation asks for beside content, bytes: its rows, and nodes of the tree that are divided.
const BESIDE: u64 = 8192;
/// After the removal of a file it may count for so long although it is closed: its last user is
/// heard of later.
const CLOSING: Duration = Duration::from_millis(100);
/// A row with its share of the nodes above, bytes.
const ROW: u64 = 128;
/// This part of what is stored in blocks are their headers and rows, at most: no quota refuses them.
const BLOCKS_SHARE: u64 = 25;
/// So many leaves of extents are read before the table's lock is taken.
const WARMED_LEAVES: usize = 8;
/// How often a commit is tried to make room.
const RELIEFS: usize = 2;

/// Who knows all limits of a pool and what was promised: the engine (`engine/reservation.rs`).
pub trait Admission: Send + Sync {
    /// Promises a dataset so many bytes, if all limits allow it; without a purpose as long as the
    /// pool has any room.
    ///
    /// # Errors
    /// [`FileError::Quota`], [`PoolError::NoSpace`].
    fn admit(&self, dataset: u64, bytes: u64, purpose: Option<Purpose>) -> Result<()>;

    /// Promises a dataset bytes that replace others, which the next commit frees: as long as the pool has room for both until then.
    ///
    /// # Errors
    /// As [`Self::admit`].
    fn admit_replacing(&self, dataset: u64, overwrite: &Overwrite) -> Result<()>;

    /// Whether so much would be admitted; nothing is promised.
    ///
    /// # Errors
    /// As [`Self::admit`].
    fn check(&self, dataset: u64, bytes: u64, purpose: Purpose) -> Result<()>;

    /// What was promised has become a frame of this txg that is charged so much; 0 where none was
    /// needed.
    fn charge(&self, dataset: u64, txg: Txg, promised: u64, charged: u64);

    /// The commit of this txg will write so much more of the table.
    fn dirtied(&self, dataset: u64, txg: Txg, bytes: u64);

    /// Makes room by a commit, if one may help: where something is known to be `freed` by the next,
    /// or was done since the last; with a dataset, whose quota was in the way, was done there.
    /// Whether there was one. Not under any lock.
    ///
    /// # Errors
    /// Those of the engine.
    fn relieve(&self, dataset: Option<u64>, freed: bool) -> std::result::Result<bool, PoolError>;

    /// What may be written to a dataset now, bytes.
    fn room(&self, dataset: u64) -> u64;

    /// Whether so little may be written that files must not grow by being overwritten: less than a tenth of the pool, or of what
    /// the dataset's quota allows.
    fn is_short(&self, dataset: u64) -> bool;
}

/// When reading is noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTimes {
    /// Never.
    Off,
    /// When the noted time is not newer than the last change, or a day old (`relatime` of
    /// mount(8)).
    #[default]
    Relative,
    /// Always.
    Strict,
}

/// What holds for the files of a dataset beside how they are stored.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Nothing may be changed.
    pub read_only: bool,
    /// When reading is noted.
    pub access: AccessTimes,
    /// New names have to be UTF-8.
    pub utf8_only: bool,
    /// Quotas of owners.
    pub quotas: OwnerQuotas,
}

/// Writes to a file that are announced.
#[derive(Clone, Debug)]
pub struct ExpectedWrites {
    /// The file.
    pub inode: u64,
    /// Where they are made, where that is known: they may replace content.
    pub part: Option<Range<u64>>,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// What they need, bytes.
    pub bytes: u64,
    /// What else is expected of anybody, bytes.
    pub beside: u64,
    /// What counts against quotas of owners besides, bytes.
    pub beside_of_owner: u64,
}

/// What a write over stored content needs, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Overwrite {
    /// Until the next commit.
    pub bytes: u64,
    /// At most, in the end, beside what is stored now. It counts against quotas.
    pub growth: u64,
    /// By so much more content there is. It is asked for like any new content.
    pub longer: u64,
}

/// What content needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// At most, with its rows. Bytes.
    pub(super) bytes: u64,
    /// Its length, bytes.
    pub(super) content: u64,
    /// What its owners are charged, at most. Bytes.
    pub(super) owned: u64,
}

impl Needs {
    /// Content of this length that needs so many bytes, all of which its owners may be charged.
    pub(super) fn new(bytes: u64, content: u64) -> Self {
        Self { bytes, content, owned: bytes }
    }
}

/// What the next commit frees where content is replaced, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replaced {
    /// As it is charged, with the rows that name it.
    pub(super) charged: u64,
    /// What owners are no longer charged although a snapshot may hold it: content in rows, of which nobody knows since when it is
    /// there.
    pub(super) held: u64,
    /// Content.
    pub(super) logical: u64,
}

/// How a write is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admit {
    /// If all limits allow it.
    Asked,
    /// It was accepted before, by whoever collects writes: only a pool that has nothing left but
    /// what removals need refuses it.
    Held,
    /// It makes room in the end: no quota refuses it.
    Freeing,
}

/// What a record with so much content needs at most, its row included. Bytes.
pub(super) fn worst(content: usize) -> u64 {
    let unit = u64::from(Pointer::UNIT);
    (content as u64 + u64::from(Pointer::HEADER)).next_multiple_of(unit) + ROW
}

/// Whether room is all that was missing.
fn is_shortage(error: &FileError) -> bool {
    matches!(error, FileError::OwnerQuota | FileError::Pool(PoolError::NoSpace | PoolError::Quota { .. }))
}

impl<T: Table> Files<T> {
    /// Changes what holds.
    pub fn set_rules(&self, rules: Rules) {
        *self.rules.write() = rules;
    }

    /// Nothing can be changed any more: it is a snapshot.
    pub fn make_read_only(&self) {
        self.rules.write().read_only = true;
    }

    /// What may be written here now: within all limits, beside what is promised. Bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.admission.room(self.dataset)
    }

    /// How much content fits there: what records take beside their content left out, and what the rows of
    /// an operation may need. As much can be allocated. Bytes.
    #[must_use]
    pub fn content_room(&self) -> u64 {
        let record = 1u64 << self.storing.read().record_shift;
        let room = self.room().saturating_sub(BESIDE);
        let whole = room / (record + worst(0));
        let rest = (room % (record + worst(0))).saturating_sub(worst(0));
        whole * record + rest
    }

    /// Whether any owner has a quota: how much each may still write differs then.
    #[must_use]
    pub fn has_owner_quotas(&self) -> bool {
        !self.rules.read().quotas.is_empty()
    }

    /// Whether an owner's write of so many bytes would be admitted; nothing is promised.
    ///
    /// # Errors
    /// As a write's: [`FileError::Quota`], [`PoolError::NoSpace`], [`FileError::ReadOnly`].
    pub fn would_admit(&self, uid: u32, gid: u32, bytes: u64) -> Result<()> {
        self.with_relief(|| {
            self.check_writable()?;
            self.judge_owners(&[(OwnerKind::User, uid), (OwnerKind::Group, gid)], bytes, 0)?;
            self.admission.check(self.dataset, bytes, Purpose::Write)
        })
    }

    /// Promises an owner's writes to come their bytes, if all limits allow them beside what is
    /// expected otherwise. [`Self::withdraw`] ends the promise.
    ///
    /// # Errors
    /// As [`Self::would_admit`].
    pub fn promise(&self, writes: &ExpectedWrites) -> Result<()> {
        self.with_relief(|| {
            self.check_writable()?;
            let Err(shortage) = self.promise_new(writes) else { return Ok(()) };
            let Some(part) = &writes.part else { return Err(shortage) };
            // What else is expected has to find room meanwhile, and is promised nothing.
            let needs = Needs::new(writes.bytes.saturating_add(writes.beside), part.end - part.start);
            let row = self.attributes(&self.known.get(writes.inode))?;
            self.admit_replacing(&owners_of(&row), needs, shortage, || self.replaced(&row, writes.inode, part))?;
            self.withdraw(writes.beside);
            Ok(())
        })
    }

    fn promise_new(&self, writes: &ExpectedWrites) -> Result<()> {
        let ExpectedWrites { uid, gid, bytes, beside, beside_of_owner, .. } = *writes;
        self.judge_owners(
            &[(OwnerKind::User, uid), (OwnerKind::Group, gid)],
            bytes.saturating_add(beside).saturating_add(beside_of_owner),
            0,
        )?;
        self.admission.check(self.dataset, bytes.saturating_add(beside), Purpose::Write)?;
        self.admission.admit(self.dataset, bytes, Some(Purpose::Write))
    }

    /// So much of what was promised is not wanted any more, or is asked for now by what it was
    /// promised to.
    pub fn withdraw(&self, bytes: u64) {
        if bytes > 0 {
            // Nothing of it is a frame, of whatever txg.
            self.admission.charge(self.dataset, Txg(0), bytes, 0);
        }
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        if self.headless.load(Ordering::Relaxed) {
            return Err(PoolError::Format(Damage::Structure(
                "the head of the file system cannot be read: it is read-only",
            ))
            .into());
        }
        if self.rules.read().read_only && !self.is_replaying() { Err(FileError::ReadOnly) } else { Ok(()) }
    }

    /// Runs an operation; where it is short of room, again after a commit that may have made some.
    /// Not under any lock.
    pub(super) fn with_relief<R>(&self, operation: impl Fn() -> Result<R>) -> Result<R> {
        self.with_relief_for(Admit::Asked, operation)
    }

    /// The same; nothing that was held back waits for others who are short, since commits of
    /// snapshots wait for it.
    pub(super) fn with_relief_for<R>(&self, admit: Admit, operation: impl Fn() -> Result<R>) -> Result<R> {
        let outcome = self.relieved(admit, &operation);
        // Who has just removed a file may write at once: whoever had it open for him tells a little
        // later that he has not any more.
        let short = matches!(outcome, Err(FileError::Quota | FileError::Pool(PoolError::NoSpace)));
        if !short || !self.lost_name.lock().is_some_and(|since| since.elapsed() < CLOSING) {
            return outcome;
        }
        self.known.wait_released(patience::now() + CLOSING);
        // Once: others may go on removing what helps nobody here.
        self.relieved(admit, &operation)
    }

    /// A file has lost its last name.
    pub(super) fn note_last_name(&self) {
        *self.lost_name.lock() = Some(patience::now());
    }

    /// Whether files without a name may be held by nothing but what the next flush takes.
    fn holds_nameless(&self) -> bool {
        if self.lost_name.lock().is_none() {
            return false;
        }
        // A change of a file takes its lock before that of the list.
        let dirty: Vec<_> = self.dirty.lock().values().map(Arc::clone).collect();
        dirty.iter().any(|inode| inode.is_nameless())
    }

    fn relieved<R>(&self, admit: Admit, operation: &impl Fn() -> Result<R>) -> Result<R> {
        let mut outcome = operation();
        if !outcome.as_ref().is_err_and(is_shortage) {
            return outcome;
        }
        // One after the other: what a commit gave to one who waited would be taken by those who
        // came later.
        let _line = (admit == Admit::Asked).then(|| self.short.lock());
        outcome = operation();
        for _ in 0..RELIEFS {
            let freed = self.known.has_released();
            let relieved = match &outcome {
                Err(FileError::Pool(PoolError::NoSpace)) => self.admission.relieve(None, freed)?,
                Err(FileError::Pool(PoolError::Quota { dataset })) => self.admission.relieve(Some(*dataset), freed)?,
                // What waits counts as it may become at worst, and what lost its last name still
                // counts, which the next flush may be the last to hold.
                Err(FileError::OwnerQuota) if freed || self.holds_nameless() || self.owners.has_waiting() => {
                    self.admission.relieve(Some(self.dataset), freed || self.holds_nameless())?
                }
                _ => break,
            };
            // Where nothing is left to commit, another's commit may have made room since the
            // operation was refused.
            outcome = operation();
            if !relieved {
                break;
            }
        }
        match outcome {
            Err(FileError::OwnerQuota | FileError::Pool(PoolError::Quota { .. })) => Err(FileError::Quota),
            outcome => outcome,
        }
    }

    /// Asks for room for new content of a file.
    pub(super) fn admit_content(&self, row: &InodeRow, bytes: u64, admit: Admit) -> Result<()> {
        self.admit_over(row, Needs::new(bytes, bytes), admit, || Ok(Replaced::default()))
    }

    /// The same for so much content that may replace some: `replaced` is asked where room is short.
    pub(super) fn admit_over(
        &self,
        row: &InodeRow,
        needs: Needs,
        admit: Admit,
        replaced: impl FnOnce() -> Result<Replaced>,
    ) -> Result<()> {
        let Needs { bytes, owned, .. } = needs;
        match admit {
            Admit::Asked if self.is_replaying() => self.admission.admit(self.dataset, bytes, None),
            Admit::Asked => {
                let judged = self.judge_owners(&owners_of(row), owned, 0);
                let admitted = judged.and_then(|()| self.admission.admit(self.dataset, bytes, Some(Purpose::Write)));
                let Err(shortage) = admitted else { return Ok(()) };
                self.admit_replacing(&owners_of(row), needs, shortage, replaced)
            }
            Admit::Held => self.admission.admit(self.dataset, bytes, Some(Purpose::Free)),
            Admit::Freeing => {
                let outcome = self.admission.admit(self.dataset, bytes, Some(Purpose::Free));
                outcome.or_else(|_| self.admission.admit(self.dataset, bytes, Some(Purpose::Destroy)))
            }
        }
    }

    /// Admits what replaces as much as it needs, or nearly, after this shortage.
    fn admit_replacing(
        &self,
        owners: &[(OwnerKind, u32)],
        needs: Needs,
        shortage: FileError,
        replaced: impl FnOnce() -> Result<Replaced>,
    ) -> Result<()> {
        if !is_shortage(&shortage) {
            return Err(shortage);
        }
        let replaced = replaced()?;
        if replaced.charged == 0 && replaced.held == 0 {
            return Err(shortage);
        }
        let Needs { bytes, content, owned } = needs;
        let longer = content.saturating_sub(replaced.logical);
        // A quota that holds the file holds its blocks as well.
        let blocks = if longer == 0 { bytes / BLOCKS_SHARE } else { 0 };
        let growth = bytes.saturating_sub(replaced.charged.saturating_add(blocks));
        let growth_of_owners =
            owned.saturating_sub(replaced.charged.saturating_add(replaced.held).saturating_add(blocks));
        if growth_of_owners > 0 {
            self.judge_owners(owners, growth_of_owners, 0)?;
        }
        if replaced.charged == 0 {
            return self.admission.admit(self.dataset, bytes, Some(Purpose::Write));
        }
        self.admission.admit_replacing(self.dataset, &Overwrite { bytes, growth, longer })
    }

    /// What the next commit frees where these bytes of a file are written, with what names it: frames that no snapshot holds and no other
    /// record shares, and content in a row. Of a record that is written in part, no more than is written of it.
    pub(super) fn replaced(&self, row: &InodeRow, inode: u64, part: &Range<u64>) -> Result<Replaced> {
        let shift = self.shift_of(row);
        let mut sum = Replaced::default();
        if part.is_empty() || row.record_shift == 0 {
            return Ok(sum);
        }
        let (first, last) = (part.start >> shift, (part.end - 1) >> shift);
        let held = self.held_by_snapshots.load(Ordering::Relaxed);
        let written_of = |from: u64, length: u64| part.end.min(from + length).saturating_sub(part.start.max(from));
        let mut in_row = 0;
        // Of a frame that holds content from `from` on, as much as is written of the content.
        let mut free = |pointer: &Pointer, from: u64, length: u64| {
            let written = written_of(from, length);
            if written > 0 && pointer.birth.0 > held {
                sum.charged += ROW + pointer.charged() * written / length;
                sum.logical += written;
            }
        };
        let range = keys::extents(inode, first, last);
        self.warm_range(&range, WARMED_LEAVES)?;
        let patches = self.stored_patches(row, inode, first, last)?;
        self.table.read().try_scan(range, &mut |key, value| {
            let keys::Key::Extent { record, .. } = keys::Key::decode(key)? else { return Ok(true) };
            match Extent::decode(value)? {
                Extent::Frame(pointer) => {
                    let is_split = is_split(pointer.charged(), pointer.logical as usize);
                    if !is_split || stored_patches::of_record(&patches, record).next().is_none() {
                        free(&pointer, record << shift, pointer.logical.into());
                    }
                }
                Extent::Inline(content) => in_row = content.len(),
                _ => {}
            }
            Ok(true)
        })?;
        for StoredPatch { record, patch, .. } in patches {
            if let [(from, length)] = *patch.pieces {
                free(&patch.pointer, (record << shift) + u64::from(from), length.into());
            }
        }
        let written = written_of(0, in_row as u64);
        if written > 0 {
            let stored = worst(in_row) * written / in_row as u64;
            sum.logical += written;
            // Of rows it is not known since when they are there.
            match held {
                0 => sum.charged += stored,
                _ => sum.held += stored,
            }
        }
        Ok(sum)
    }

    /// The txg of the newest snapshot of the dataset, or of its origin: frames that were born later are freed when they are replaced. Until it
    /// is known, all are held.
    pub fn set_held_by_snapshots(&self, txg: Txg) {
        self.held_by_snapshots.store(txg.0, Ordering::Relaxed);
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.replaying.load(Ordering::Relaxed)
    }

    /// Asks for what an operation on rows needs.
    pub(super) fn admit_rows(&self, purpose: Purpose) -> Result<()> {
        self.check_writable()?;
        if self.is_replaying() {
            return Ok(());
        }
        match self.admission.check(self.dataset, ROWS, purpose) {
            // Who deletes may go further: it is what makes room again.
            Err(_) if purpose == Purpose::Free => self.admission.check(self.dataset, ROWS, Purpose::Destroy),
            outcome => outcome,
        }
    }

    /// Whether owners may use so many bytes and inodes more.
    pub(super) fn judge_owners(&self, owners: &[(OwnerKind, u32)], bytes: u64, objects: u64) -> Result<()> {
        if self.is_replaying() || self.rules.read().quotas.is_empty() {
            return Ok(());
        }
        for owner in owners {
            let quota = self.rules.read().quotas.of(*owner);
            if quota != OwnerQuota::default() {
                quota.admits(&self.owner_use(*owner)?, bytes, objects).map_err(|_| FileError::OwnerQuota)?;
            }
        }
        Ok(())
    }

    /// What an owner uses now, what waits in memory included.
    pub(super) fn owner_use(&self, (kind, id): (OwnerKind, u32)) -> Result<OwnerUse> {
        // The table first: what the flush moves there in between is counted twice rather than not
        // at all.
        let (changed, waiting) = self.owners.of((kind, id));
        let row = self.table.read().get(&keys::owner_use(kind, id))?;
        let stored = row.map_or(Ok(OwnerUse::default()), |row| OwnerUse::decode(&row))?;
        Ok(OwnerUse {
            bytes: stored.bytes.saturating_add_signed(changed.0).saturating_add(waiting),
            objects: stored.objects.saturating_add_signed(changed.1),
        })
    }
}
