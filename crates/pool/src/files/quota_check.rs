//! Checks whether an operation may take the space that it needs: the rules of the dataset, quotas
//! of owners, and the engine, which knows all limits of the pool (`engine/reservation.rs`).
//!
//! An operation is admitted before it changes anything. The reservation of content in memory lasts
//! until the content is a frame; table nodes that a commit will write are counted as they become
//! dirty. So accepted writes find room, and no limit is exceeded between commits.
//!
//! Invariant: a refused operation has changed nothing; before a shortage that a commit may end is
//! reported, a commit is tried.

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

/// Assumed need of an operation on rows, bytes; the nodes that it has dirtied are counted
/// afterwards.
const ROWS: u64 = 1;
/// Space reserved for an operation in addition to content, bytes: its rows, and tree nodes that are
/// split.
const BESIDE: u64 = 8192;
/// Time for which a removed file may count although it is closed: its last RELEASE arrives later.
const CLOSING: Duration = Duration::from_millis(100);
/// A row with its share of the nodes above, bytes.
const ROW: u64 = 128;
/// Largest share (1/n) of headers and rows in content stored as blocks: no quota refuses them.
const BLOCKS_SHARE: u64 = 25;
/// Leaves of extents that are read before the table's lock is taken.
const WARMED_LEAVES: usize = 8;
/// Number of commits that are tried to make room.
const RELIEFS: usize = 2;

/// Admission against all limits and reservations of a pool: the engine (`engine/reservation.rs`).
pub trait Admission: Send + Sync {
    /// Reserves bytes for a dataset, if all limits allow it; without a purpose as long as the pool
    /// has any room.
    ///
    /// # Errors
    /// [`FileError::Quota`], [`PoolError::NoSpace`].
    fn admit(&self, dataset: u64, bytes: u64, purpose: Option<Purpose>) -> Result<()>;

    /// Reserves bytes for content that replaces other content, which the next commit frees: as long
    /// as the pool has room for both until then.
    ///
    /// # Errors
    /// As [`Self::admit`].
    fn admit_replacing(&self, dataset: u64, overwrite: &Overwrite) -> Result<()>;

    /// Checks whether so much would be admitted; reserves nothing.
    ///
    /// # Errors
    /// As [`Self::admit`].
    fn check(&self, dataset: u64, bytes: u64, purpose: Purpose) -> Result<()>;

    /// Turns a reservation into the charge of a frame of this txg; 0 if no frame was needed.
    fn charge(&self, dataset: u64, txg: Txg, promised: u64, charged: u64);

    /// Notes that the commit of this txg will write so much more of the table.
    fn dirtied(&self, dataset: u64, txg: Txg, bytes: u64);

    /// Makes room by a commit, if one may help: if the next one will free something (`freed`), or
    /// there were changes since the last; with a dataset, whose quota is exceeded, changes there.
    /// Returns whether a commit was made. Not to be called under any lock.
    ///
    /// # Errors
    /// Errors of the engine.
    fn relieve(&self, dataset: Option<u64>, freed: bool) -> std::result::Result<bool, PoolError>;

    /// Bytes that may be written to a dataset now.
    fn room(&self, dataset: u64) -> u64;

    /// Bytes of content that can be stored before a writer has to wait for the cleaner.
    fn room_before_cleaning(&self) -> u64;

    /// Whether space is so short that files must not grow by being overwritten: less than a tenth
    /// of the pool, or of what the dataset's quota allows.
    fn is_short(&self, dataset: u64) -> bool;
}

/// When reads update the access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTimes {
    /// Never.
    Off,
    /// If it is not newer than the last change, or a day old (`relatime` of mount(8)).
    #[default]
    Relative,
    /// Always.
    Strict,
}

/// Rules for the files of a dataset, apart from how they are stored.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Nothing may be changed.
    pub read_only: bool,
    /// When reads update the access time.
    pub access: AccessTimes,
    /// New names have to be UTF-8.
    pub utf8_only: bool,
    /// Quotas of owners.
    pub quotas: OwnerQuotas,
}

/// A request to reserve writes to a file.
#[derive(Clone, Debug)]
pub struct ExpectedWrites {
    /// Number of the file's inode.
    pub inode: u64,
    /// Range that they write, if it is known: they may replace content.
    pub part: Option<Range<u64>>,
    /// The file's user.
    pub uid: u32,
    /// The file's group.
    pub gid: u32,
    /// Bytes that they need.
    pub bytes: u64,
    /// Bytes expected for all other writes.
    pub beside: u64,
    /// Bytes that count against quotas of owners in addition.
    pub beside_of_owner: u64,
}

/// Space that a write over stored content needs, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Overwrite {
    /// Until the next commit.
    pub bytes: u64,
    /// Largest growth in the end, compared with the stored content. It counts against quotas.
    pub growth: u64,
    /// Growth of the content. It is admitted like new content.
    pub longer: u64,
}

/// Space that content needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Largest space with its rows, bytes.
    pub(super) bytes: u64,
    /// Its length, bytes.
    pub(super) content: u64,
    /// Largest charge of its owners, bytes.
    pub(super) owned: u64,
}

impl Needs {
    /// The need of content of this length that takes so many bytes, all of which its owners may be
    /// charged.
    pub(super) fn new(bytes: u64, content: u64) -> Self {
        Self { bytes, content, owned: bytes }
    }
}

/// Space that the next commit frees when content is replaced, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Replaced {
    /// Charged space, including the rows that reference it.
    pub(super) charged: u64,
    /// Space that owners are not charged any more although a snapshot may hold it: content in rows,
    /// whose birth is unknown.
    pub(super) held: u64,
    /// Length of the content.
    pub(super) logical: u64,
}

/// How a write is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admit {
    /// If all limits allow it.
    Asked,
    /// It was accepted before by the kernel's write-back: it is refused only by a pool that has
    /// nothing left but the space for removals.
    Held,
    /// It makes room in the end: no quota refuses it.
    Freeing,
}

/// Largest space that a record with so much content needs, including its row. Bytes.
pub(super) fn worst(content: usize) -> u64 {
    let unit = u64::from(Pointer::UNIT);
    (content as u64 + u64::from(Pointer::HEADER)).next_multiple_of(unit) + ROW
}

/// Whether the error is a lack of space or quota only.
fn is_shortage(error: &FileError) -> bool {
    matches!(error, FileError::OwnerQuota | FileError::Pool(PoolError::NoSpace | PoolError::Quota { .. }))
}

impl<T: Table> Files<T> {
    /// Sets the rules.
    pub fn set_rules(&self, rules: Rules) {
        *self.rules.write() = rules;
    }

    /// Makes the files read only: they are a snapshot.
    pub fn make_read_only(&self) {
        self.rules.write().read_only = true;
    }

    /// Bytes that may be written now: within all limits, without what is reserved.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.admission.room(self.dataset)
    }

    /// Bytes of content that fit into [`Self::room`], without the overhead of records and of the
    /// rows of an operation. As much can be allocated.
    #[must_use]
    pub fn content_room(&self) -> u64 {
        let record = 1u64 << self.storing.read().record_shift;
        let room = self.room().saturating_sub(BESIDE);
        let whole = room / (record + worst(0));
        let rest = (room % (record + worst(0))).saturating_sub(worst(0));
        whole * record + rest
    }

    /// Whether any owner has a quota: then owners differ in how much they may still write.
    #[must_use]
    pub fn has_owner_quotas(&self) -> bool {
        !self.rules.read().quotas.is_empty()
    }

    /// Checks whether an owner's write of so many bytes would be admitted; reserves nothing.
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

    /// Reserves space for an owner's future writes, if all limits allow them in addition to other
    /// expected writes. [`Self::withdraw`] ends the reservation.
    ///
    /// # Errors
    /// As [`Self::would_admit`].
    pub fn promise(&self, writes: &ExpectedWrites) -> Result<()> {
        self.with_relief(|| {
            self.check_writable()?;
            let Err(shortage) = self.promise_new(writes) else { return Ok(()) };
            let Some(part) = &writes.part else { return Err(shortage) };
            // Other expected writes must find room meanwhile; nothing is reserved for them.
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

    /// Ends so many bytes of a reservation: they are not needed, or the writes they were reserved
    /// for are admitted now.
    pub fn withdraw(&self, bytes: u64) {
        if bytes > 0 {
            // None of it is a frame, of whatever txg.
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

    /// Runs an operation; if it lacks space, runs it again after a commit that may have made some.
    /// Not to be called under any lock.
    pub(super) fn with_relief<R>(&self, operation: impl Fn() -> Result<R>) -> Result<R> {
        self.with_relief_for(Admit::Asked, operation)
    }

    /// As [`Self::with_relief`]; kernel write-back does not wait for other operations that lack
    /// space, since commits of snapshots wait for it.
    pub(super) fn with_relief_for<R>(&self, admit: Admit, operation: impl Fn() -> Result<R>) -> Result<R> {
        let outcome = self.relieved(admit, &operation);
        // A program that has just removed a file may write at once: the RELEASE of the file arrives
        // a little later.
        let short = matches!(outcome, Err(FileError::Quota | FileError::Pool(PoolError::NoSpace)));
        if !short || !self.lost_name.lock().is_some_and(|since| since.elapsed() < CLOSING) {
            return outcome;
        }
        self.known.wait_released(patience::now() + CLOSING);
        // Once: other processes may continue to remove files that do not help here.
        self.relieved(admit, &operation)
    }

    /// Notes that a file has lost its last name.
    pub(super) fn note_last_name(&self) {
        *self.lost_name.lock() = Some(patience::now());
    }

    /// Whether orphans may be held by nothing but entries that the next flush removes.
    fn holds_nameless(&self) -> bool {
        if self.lost_name.lock().is_none() {
            return false;
        }
        // A change of a file locks the file before the list.
        let dirty: Vec<_> = self.dirty.lock().values().map(Arc::clone).collect();
        dirty.iter().any(|inode| inode.is_nameless())
    }

    fn relieved<R>(&self, admit: Admit, operation: &impl Fn() -> Result<R>) -> Result<R> {
        let mut outcome = operation();
        if !outcome.as_ref().is_err_and(is_shortage) {
            return outcome;
        }
        // One after the other: space from a commit of one waiting operation would be taken by later
        // ones.
        let _line = (admit == Admit::Asked).then(|| self.short.lock());
        outcome = operation();
        for _ in 0..RELIEFS {
            let freed = self.known.has_released();
            let relieved = match &outcome {
                Err(FileError::Pool(PoolError::NoSpace)) => self.admission.relieve(None, freed)?,
                Err(FileError::Pool(PoolError::Quota { dataset })) => self.admission.relieve(Some(*dataset), freed)?,
                // Content in memory counts with its largest possible charge, and orphans still
                // count that only the next flush may hold.
                Err(FileError::OwnerQuota) if freed || self.holds_nameless() || self.owners.has_waiting() => {
                    self.admission.relieve(Some(self.dataset), freed || self.holds_nameless())?
                }
                _ => break,
            };
            // If nothing is left to commit, another commit may have made room since the operation
            // was refused.
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

    /// Admits new content of a file.
    pub(super) fn admit_content(&self, row: &InodeRow, bytes: u64, admit: Admit) -> Result<()> {
        self.admit_over(row, Needs::new(bytes, bytes), admit, || Ok(Replaced::default()))
    }

    /// As [`Self::admit_content`], for content that may replace other content: `replaced` is called
    /// if space is short.
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

    /// Admits content that replaces as much as it needs, or nearly, after this shortage.
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

    /// Computes what the next commit frees if these bytes of a file are written, including rows:
    /// frames that no snapshot holds and no other record shares, and content in a row. A record
    /// that is written in part counts for that part only.
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
        // A frame with content from `from` on counts for the written part of the content.
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
                    let is_split = is_split(pointer.owner_charge(), pointer.logical as usize);
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
            // The birth of rows is unknown.
            match held {
                0 => sum.charged += stored,
                _ => sum.held += stored,
            }
        }
        Ok(sum)
    }

    /// Sets the txg of the newest snapshot of the dataset, or of its origin: frames born later are
    /// freed when they are replaced. Until it is set, snapshots are assumed to hold all frames.
    pub fn set_held_by_snapshots(&self, txg: Txg) {
        self.held_by_snapshots.store(txg.0, Ordering::Relaxed);
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.replaying.load(Ordering::Relaxed)
    }

    /// Admits an operation on rows.
    pub(super) fn admit_rows(&self, purpose: Purpose) -> Result<()> {
        self.check_writable()?;
        if self.is_replaying() {
            return Ok(());
        }
        match self.admission.check(self.dataset, ROWS, purpose) {
            // Removals may use more of the slop space: they make room.
            Err(_) if purpose == Purpose::Free => self.admission.check(self.dataset, ROWS, Purpose::Destroy),
            outcome => outcome,
        }
    }

    /// Checks the quotas of owners for so many more bytes and inodes.
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

    /// Returns an owner's usage, including content in memory.
    pub(super) fn owner_use(&self, (kind, id): (OwnerKind, u32)) -> Result<OwnerUse> {
        // Accounts in memory are read before the table: changes that the flush moves in between are
        // counted twice rather than not at all.
        let (changed, waiting) = self.owners.of((kind, id));
        let row = self.table.read().get(&keys::owner_use(kind, id))?;
        let stored = row.map_or(Ok(OwnerUse::default()), |row| OwnerUse::decode(&row))?;
        Ok(OwnerUse {
            bytes: stored.bytes.saturating_add_signed(changed.0).saturating_add(waiting),
            objects: stored.objects.saturating_add_signed(changed.1),
        })
    }
}
