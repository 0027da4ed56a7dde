//! Inodes: attributes of the active ones in memory, and changes of attributes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use parking_lot::{Mutex, RwLockWriteGuard};

use super::buffered::Buffered;
use super::keeping::ROWS;
use super::known::Known;
use super::spin_lock::SpinRwLock;
use super::{AccessTimes, Batch, FileError, Files, Result, Table};
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::rows::inode::flags::{CUT, HAS_PATCHES, NOATIME};
use crate::rows::{FileType, InodeRow, OwnerKind, OwnerUse, Timestamp, keys};
use crate::space::Purpose;

/// Memory of an active inode in addition to its content, bytes: measured roughly.
pub(super) const ACTIVE: u64 = 768;

/// One inode, shared by its holders.
#[derive(Debug)]
pub struct Inode {
    number: u64,
    known: Arc<Known>,
    pub(super) active: SpinRwLock<Option<Box<Active>>>,
    /// Its record size as a power of two when it was last read, 0 before: a hint.
    pub(super) shift: AtomicU8,
    /// Reason why written content cannot be stored; kept for the next sync of the file.
    pub(super) apart: Mutex<Option<Apart>>,
}

impl Inode {
    pub(super) fn new(number: u64, known: &Arc<Known>) -> Inode {
        let (active, shift, apart) = (SpinRwLock::new(None), AtomicU8::new(0), Mutex::new(None));
        Inode { number, known: Arc::clone(known), active, shift, apart }
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether it is freed when its last holder drops it.
    pub(super) fn is_nameless(&self) -> bool {
        self.active.read().as_ref().is_some_and(|active| active.nameless)
    }

    /// Bytes of its content in memory.
    pub(super) fn buffered(&self) -> u64 {
        let active = self.active.read();
        let records = active.iter().flat_map(|active| active.records.values());
        records.map(Buffered::held).sum()
    }

    /// Checks that no written content waits for rows that cannot be read.
    ///
    /// # Errors
    /// The reason why content waits.
    pub(crate) fn check_stored(&self) -> Result<()> {
        match &*self.apart.lock() {
            Some(Apart { error, lost: false, .. }) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// As [`Self::check_stored`] for a sync, which also gets the error of given-up content, once.
    pub(crate) fn check_synced(&self) -> Result<()> {
        self.check_stored()?;
        self.apart.lock().take().map_or(Ok(()), |apart| Err(apart.error))
    }
}

/// State of a file whose written content cannot be stored.
#[derive(Clone, Debug)]
pub(super) struct Apart {
    /// The txg that found it.
    pub(super) since: Txg,
    /// The time at which it was found.
    pub(super) began: std::time::Instant,
    /// The reason.
    pub(super) error: FileError,
    /// The content was given up.
    pub(super) lost: bool,
}

impl Drop for Inode {
    fn drop(&mut self) {
        let nameless = self.active.get_mut().as_ref().is_some_and(|active| active.nameless);
        self.known.ended(self.number, nameless);
    }
}

/// State of an inode that the table does not have yet, or that has no name.
#[derive(Debug)]
pub(super) struct Active {
    /// The attributes that users see.
    pub(super) row: InodeRow,
    /// The size for which the table, or the log, has the content; rows for the table, and so for
    /// the log, get this size.
    pub(super) stored_size: u64,
    /// Whether the row differs from the table's.
    pub(super) changed: bool,
    /// Content that is not in the table, by record.
    pub(super) records: BTreeMap<u64, Buffered>,
    /// The last txg in which frames of this file were written that only a commit makes durable.
    pub(super) frames_in: Txg,
    /// It has no name: it lives until its last holder drops it.
    pub(super) nameless: bool,
    /// It never had a name and may get one (`O_TMPFILE` without `O_EXCL`).
    pub(super) linkable: bool,
}

impl Active {
    /// The attributes that users see: content in memory is included with its uncompressed length.
    pub(super) fn shown(&self) -> InodeRow {
        let waiting: u64 = self.records.values().map(|record| record.content.len() as u64).sum();
        InodeRow { charged: self.row.charged.saturating_add(waiting), ..self.row }
    }

    /// Whether the table lacks any of it.
    fn differs(&self) -> bool {
        self.changed
            || !self.records.is_empty()
            || (self.stored_size != self.row.size && self.row.file_type() == Some(FileType::Regular))
    }
}

/// Change of a timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeChange {
    /// To the time of the operation.
    Now,
    /// To this.
    To(Timestamp),
}

/// Change of the ctime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangedTime {
    /// Set to the time of the operation.
    #[default]
    Now,
    /// Set to this time.
    To(Timestamp),
    /// Unchanged.
    Stays,
}

/// A change of attributes; `None` leaves an attribute unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeChange {
    /// Permission bits, 12 of them.
    pub permissions: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size, bytes; for regular files.
    pub size: Option<u64>,
    /// The size is only increased: a file that is longer by then keeps its size.
    pub only_longer: bool,
    /// Access time.
    pub accessed: Option<TimeChange>,
    /// Modification time.
    pub modified: Option<TimeChange>,
    /// ctime; if it is unchanged, a new size does not change the modification time either.
    pub changed: ChangedTime,
    /// Removes set-user-id, and set-group-id if the group may execute, as a write by another user
    /// does.
    pub kill_privileges: bool,
    /// With `kill_privileges`: set-group-id is removed also if the group may not execute, as the
    /// writer is not in the file's group.
    pub outside_group: bool,
    /// File flags.
    pub flags: Option<FlagChange>,
    /// Flags of a file ([`InodeRow::flags`]) that refuse the change.
    pub refused_by: u32,
}

/// A change of [`InodeRow::flags`]: the bits of `mask` get the values in `bits`, all others are
/// unchanged. The engine's own bits for patches and truncated content never change by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagChange {
    /// The bits that change.
    pub mask: u32,
    /// Their values.
    pub bits: u32,
}

/// An inode whose attributes are being changed: locked until it was put into a batch and is
/// dropped.
pub(super) struct Editing<'a> {
    pub(super) number: u64,
    pub(super) active: RwLockWriteGuard<'a, Option<Box<Active>>>,
    pub(super) row: InodeRow,
    /// Changes of records in memory, made once the table has the changed rows.
    pub(super) pending: Vec<Pending>,
    /// There is a replay journal.
    pub(super) is_kept: bool,
}

/// Change of a record in memory; `fresh` if it was read for this change.
#[derive(Debug)]
pub(super) enum Pending {
    /// It is dropped: the table has the content.
    Gone(u64),
    /// It is truncated.
    Cut { record: u64, keep: usize, fresh: bool },
    /// A part of it is zeroed.
    Zeroed { record: u64, part: Range<usize>, fresh: bool },
}

impl Editing<'_> {
    pub(super) fn file_type(&self) -> FileType {
        // A row with an invalid mode is refused when it is read.
        self.row.file_type().unwrap_or(FileType::Regular)
    }

    /// Puts the row into the batch and into the active inode.
    pub(super) fn put(&mut self, batch: &mut Batch) {
        self.put_row(batch);
        self.take_over_row();
    }

    /// Puts the row into the batch only: an operation that may fail before the table has the batch calls
    /// [`Self::take_over_row`] afterwards.
    pub(super) fn put_row(&self, batch: &mut Batch) {
        let mut stored = self.row;
        if let Some(active) = self.active.as_ref().filter(|_| self.row.file_type() == Some(FileType::Regular)) {
            stored.size = active.stored_size;
        }
        let key = keys::inode(self.number);
        if self.is_kept && stored.size != self.row.size {
            batch.kept_as.push((key.to_vec(), self.row.encode()));
        }
        batch.put(&key, stored.encode());
    }

    /// Puts the row into the active inode.
    pub(super) fn take_over_row(&mut self) {
        if let Some(active) = self.active.as_mut() {
            active.row = self.row;
        }
    }

    /// Notes that the last name was removed.
    pub(super) fn lose_last_name(&mut self) {
        let row = self.row;
        self.activate().nameless = true;
        if let Some(active) = self.active.as_mut() {
            active.row = row;
        }
    }

    /// The active inode, created if necessary.
    pub(super) fn activate(&mut self) -> &mut Active {
        let row = self.row;
        self.active.get_or_insert_with(|| {
            let (stored_size, frames_in) = (row.size, Txg(0));
            Box::new(Active {
                row,
                stored_size,
                changed: false,
                records: BTreeMap::new(),
                frames_in,
                nameless: row.links == 0,
                linkable: false,
            })
        })
    }
}

impl<T: Table> Files<T> {
    /// Returns the inode of a number, for a caller that has only the number (an exported handle).
    ///
    /// # Errors
    /// [`FileError::NotFound`] if no inode has the number.
    pub fn by_number(&self, number: u64) -> Result<Arc<Inode>> {
        let inode = self.known.get(number);
        // An inode without a name may be freed at any moment.
        if self.attributes(&inode)?.links == 0 { Err(FileError::NotFound) } else { Ok(inode) }
    }

    /// As [`Self::by_number`] without a check that it exists: the next operation on it reports
    /// that.
    #[must_use]
    pub fn inode(&self, number: u64) -> Arc<Inode> {
        self.known.get(number)
    }

    /// Returns the attributes.
    ///
    /// # Errors
    /// [`FileError::NotFound`] if the inode is gone, and errors of the engine.
    pub fn attributes(&self, inode: &Inode) -> Result<InodeRow> {
        let active = inode.active.read();
        match active.as_ref() {
            Some(active) => Ok(active.shown()),
            None => self.kept_or_stored(inode.number),
        }
    }

    /// The attributes but for the room that records in memory will take, which costs a look at each of them.
    ///
    /// # Errors
    /// As [`Self::attributes`].
    pub fn attributes_without_room(&self, inode: &Inode) -> Result<InodeRow> {
        match inode.active.read().as_ref() {
            Some(active) => Ok(active.row),
            None => self.kept_or_stored(inode.number),
        }
    }

    /// Attributes as the table has them, from what was looked at last where they are there.
    pub(super) fn kept_or_stored(&self, number: u64) -> Result<InodeRow> {
        if let Some(row) = self.recent.get(number) {
            return Ok(row);
        }
        self.warm(&keys::inode(number))?;
        self.keep_stored(&self.table.read(), number)
    }

    /// The attributes in the table; adds them to the cache of recent ones.
    pub(super) fn keep_stored(&self, table: &T, number: u64) -> Result<InodeRow> {
        let stored = table.get(&keys::inode(number))?.ok_or(FileError::NotFound)?;
        let charged = InodeRow::decode_charged(&stored)?;
        self.recent.note(number, &charged);
        Ok(charged.0)
    }

    /// The attributes in the table.
    pub(super) fn stored(&self, number: u64) -> Result<InodeRow> {
        self.warm(&keys::inode(number))?;
        Self::stored_in(&self.table.read(), number)
    }

    pub(super) fn stored_in(table: &T, number: u64) -> Result<InodeRow> {
        let row = table.get(&keys::inode(number))?.ok_or(FileError::NotFound)?;
        Ok(InodeRow::decode(&row)?)
    }

    /// Locks an inode for a change.
    pub(super) fn edit<'a>(&self, inode: &'a Inode) -> Result<Editing<'a>> {
        let active = inode.active.write();
        let row = match active.as_ref() {
            Some(active) => active.row,
            None => self.kept_or_stored(inode.number)?,
        };
        Ok(self.editing(inode.number, active, row))
    }

    /// As [`Self::edit`], if the inode is active.
    pub(super) fn edit_active<'a>(&self, inode: &'a Inode) -> Option<Editing<'a>> {
        let active = inode.active.write();
        let row = active.as_ref()?.row;
        Some(self.editing(inode.number, active, row))
    }

    fn editing<'a>(
        &self,
        number: u64,
        active: RwLockWriteGuard<'a, Option<Box<Active>>>,
        row: InodeRow,
    ) -> Editing<'a> {
        Editing { number, active, row, pending: Vec::new(), is_kept: self.keeper.get().is_some() }
    }

    /// Notes that an inode has changes to flush.
    pub(super) fn note_dirty(&self, inode: &Arc<Inode>) {
        self.dirty.lock().entry(inode.number).or_insert_with(|| {
            self.buffered.grow(ACTIVE);
            Arc::clone(inode)
        });
    }

    /// Ends an edit: an inode that differs from the table is noted for the next flush, any other is
    /// not active any more.
    pub(super) fn finish(&self, inode: &Arc<Inode>, mut edited: Editing<'_>) {
        if edited.row.flags & CUT != 0 {
            // The truncating operation continues with it; if it cannot, or has ended, a chore does.
            self.known.put_cut([inode.number]);
        }
        let Some(active) = edited.active.as_ref() else { return };
        if active.differs() {
            self.note_dirty(inode);
        } else if !active.nameless {
            *edited.active = None;
        }
    }

    /// Changes attributes; returns the new ones.
    ///
    /// # Errors
    /// [`FileError::IsDirectory`] or [`FileError::Invalid`] for the size of what has none,
    /// [`FileError::TooLarge`], [`FileError::NotPermitted`] where a flag refuses it.
    pub fn set_attributes(&self, inode: &Arc<Inode>, change: &AttributeChange) -> Result<InodeRow> {
        self.with_relief(|| {
            self.admit_rows(Purpose::Free)?;
            self.change_attributes(inode, change)
        })
        .and_then(|row| {
            if change.size.is_some() && !self.is_replaying() { self.finish_cut(inode, row) } else { Ok(row) }
        })
    }

    fn change_attributes(&self, inode: &Arc<Inode>, change: &AttributeChange) -> Result<InodeRow> {
        let (entered, mut edited) = self.enter_growing(inode, ROWS, |row| change.size.unwrap_or(row.size))?;
        self.check_without(&edited.row, change.refused_by)?;
        if !edited.is_kept
            && let Some(row) = change_nameless(&mut edited, change, (self.clock)())
        {
            return Ok(row);
        }
        let txg = entered.txg();
        let before = edited.row;
        let stored_size = edited.active.as_ref().map(|active| active.stored_size);
        let mut batch = Batch::default();
        let changed = self.change_edited(txg, &mut edited, change, &mut batch);
        let changed = match changed {
            Ok(()) => self.apply_recorded(txg, &batch),
            Err(refused) => {
                self.abandon(&batch);
                Err(refused)
            }
        };
        let row = edited.row;
        if changed.is_ok() {
            self.settle(txg, &before, &mut edited);
            if (before.uid, before.gid) != (row.uid, row.gid) {
                // The charge before is the old owner's; changes by a new size are in the batch.
                let charged = i64::try_from(row.charged).unwrap_or(i64::MAX);
                self.count_owner(&before, charged.saturating_neg(), -1);
                self.count_owner(&row, charged, 1);
                let waiting: u64 =
                    edited.active.iter().flat_map(|active| active.records.values()).map(|record| record.promised).sum();
                self.owners.count_waiting(&before, -(waiting as i64));
                self.owners.count_waiting(&row, waiting as i64);
            }
        } else {
            self.take_back(txg, &before, &mut edited);
            if let Some(active) = edited.active.as_mut() {
                (active.row, active.stored_size) = (before, stored_size.unwrap_or(before.size));
            }
        }
        self.finish(inode, edited);
        changed.map(|()| row)
    }

    fn change_edited(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        change: &AttributeChange,
        batch: &mut Batch,
    ) -> Result<()> {
        let now = (self.clock)();
        self.judge_new_owner(edited.number, &edited.row, change)?;
        if let Some(size) = change.size.filter(|size| !change.only_longer || *size > edited.row.size) {
            match edited.file_type() {
                FileType::Regular => self.resize(txg, edited, size, batch)?,
                FileType::Directory => return Err(FileError::IsDirectory),
                _ => return Err(FileError::Invalid),
            }
            if change.changed != ChangedTime::Stays {
                edited.row.modified = now;
            }
        }
        apply_change(&mut edited.row, change, now);
        edited.put(batch);
        Ok(())
    }

    /// Checks the quotas of the new owner of a file.
    fn judge_new_owner(&self, number: u64, row: &InodeRow, change: &AttributeChange) -> Result<()> {
        let owners = [(OwnerKind::User, change.uid, row.uid), (OwnerKind::Group, change.gid, row.gid)];
        for (kind, new, old) in owners {
            if let Some(new) = new.filter(|new| *new != old) {
                let rows = if self.has_owner_quotas() { self.row_charge(number)? } else { 0 };
                self.judge_owners(&[(kind, new)], row.charged.saturating_add(rows), 1)?;
            }
        }
        Ok(())
    }

    /// Updates the access time after a read, if access times are kept; with `relatime`, as mount(8)
    /// describes it: if it is not newer than the last change, or a day old. A read never fails
    /// because of it.
    pub fn touch(&self, inode: &Arc<Inode>) {
        // An error of the inode is reported by the next request for its attributes.
        if let Err(error) = self.note_access(inode) {
            tracing::debug!(inode = inode.number(), %error, "an access time is not noted");
        }
    }

    fn note_access(&self, inode: &Arc<Inode>) -> Result<()> {
        const DAY: i64 = 24 * 60 * 60;
        let now = (self.clock)();
        let due = |row: &InodeRow| {
            row.accessed <= row.modified
                || row.accessed <= row.changed
                || now.seconds.saturating_sub(row.accessed.seconds) >= DAY
        };
        let access = self.rules.read().access;
        let off = access == AccessTimes::Off || self.check_writable().is_err();
        let row = self.attributes(inode)?;
        if off || row.flags & NOATIME != 0 || (access == AccessTimes::Relative && !due(&row)) {
            return Ok(());
        }
        self.throttle.check()?;
        // A read must not wait for this; if there is no room, the time is not updated.
        let Some(room) = self.room_now(ROWS) else { return Ok(()) };
        let entered = self.gate.enter().with_room(room);
        if self.stop.is_on() {
            return Ok(());
        }
        let mut edited = self.edit(inode)?;
        edited.row.accessed = now;
        let row = edited.row;
        let active = edited.activate();
        (active.row, active.changed) = (row, true);
        self.keep_row(entered.txg(), &edited, None);
        self.finish(inode, edited);
        Ok(())
    }

    /// Puts the usage of each owner and the dataset header, for a flush.
    pub(super) fn put_counters(&self, table: &T, batch: &mut Batch) -> std::result::Result<(), PoolError> {
        let mut outcome = Ok(());
        self.owners.flush(|owner, change| match Self::count_use(table, owner, change, batch) {
            Ok(()) => true,
            Err(error) => {
                let error = FileError::from(error);
                if error.is_unreadable() {
                    // The change waits in memory: no commit fails because of it.
                    tracing::error!(dataset = self.dataset, ?owner, %error, "what an owner uses cannot be counted");
                } else if let FileError::Pool(error) = error {
                    outcome = Err(error);
                }
                false
            }
        });
        outcome?;
        let put = self.put_head(table, batch).map_err(FileError::from);
        if let Err(error) = &put
            && error.is_rotten()
        {
            // Numbers assigned now could be assigned again: the dataset is read-only until the
            // header can be written; other datasets keep working.
            if !self.headless.swap(true, std::sync::atomic::Ordering::Relaxed) {
                tracing::error!(dataset = self.dataset, %error, "the head of a file system cannot be read: it is read-only");
            }
            return Ok(());
        }
        self.headless.store(false, std::sync::atomic::Ordering::Relaxed);
        put.or_else(|error| if let FileError::Pool(error) = error { Err(error) } else { Ok(()) })
    }

    fn put_head(&self, table: &T, batch: &mut Batch) -> std::result::Result<(), PoolError> {
        use crate::rows::DatasetHead;
        use std::sync::atomic::Ordering::Relaxed;
        let numbers = &self.numbers;
        let head = DatasetHead {
            next: numbers.next.load(Relaxed),
            root: numbers.root,
            seed: numbers.seed,
            hashing: numbers.hashing,
            folding: numbers.folding,
            objects: numbers.objects.load(Relaxed),
        };
        let (key, head) = (keys::head(), head.encode());
        // The header of an unchanged dataset is not written by each commit.
        if self.receiving.load(Relaxed) {
            return Ok(());
        }
        if table.get(&key)?.is_none_or(|stored| stored != head) {
            batch.put(&key, head);
        }
        Ok(())
    }
}

impl<T: Table> Files<T> {
    /// Puts the new usage of an owner.
    fn count_use(
        table: &T,
        (kind, id): (OwnerKind, u32),
        (bytes, objects): (i64, i64),
        batch: &mut Batch,
    ) -> std::result::Result<(), PoolError> {
        let key = keys::owner_use(kind, id);
        let mut used = table.get(&key)?.map_or(Ok(OwnerUse::default()), |row| OwnerUse::decode(&row))?;
        if used.bytes.checked_add_signed(bytes).is_none() || used.objects.checked_add_signed(objects).is_none() {
            tracing::error!(
                ?kind,
                id,
                ?used,
                bytes,
                objects,
                "the use of an owner was counted wrong: it begins anew at nothing"
            );
        }
        (used.bytes, used.objects) =
            (used.bytes.saturating_add_signed(bytes), used.objects.saturating_add_signed(objects));
        if used == OwnerUse::default() {
            batch.remove(&key);
        } else {
            batch.put(&key, used.encode());
        }
        Ok(())
    }
}

/// Changes of timestamps of a file that has lost its last name for good: they live as long as it is
/// held, so they are changed in memory only. The kernel sends one with each removal if it keeps the
/// times itself.
fn change_nameless(edited: &mut Editing<'_>, change: &AttributeChange, now: Timestamp) -> Option<InodeRow> {
    let AttributeChange { accessed, modified, changed, refused_by, .. } = *change;
    let only_times = AttributeChange { accessed, modified, changed, refused_by, ..AttributeChange::default() };
    let row = &mut edited.row;
    let active =
        edited.active.as_mut().filter(|active| active.nameless && !active.linkable && *change == only_times)?;
    apply_change(row, change, now);
    active.row = *row;
    Some(active.shown())
}

fn apply_change(row: &mut InodeRow, change: &AttributeChange, now: Timestamp) {
    const SET_USER_ID: u16 = 0o4000;
    const SET_GROUP_ID: u16 = 0o2000;
    const GROUP_EXECUTES: u16 = 0o010;
    if let Some(permissions) = change.permissions {
        row.mode = row.mode & !0o7777 | permissions & 0o7777;
    }
    if change.kill_privileges && row.file_type() != Some(FileType::Directory) {
        row.mode &= !SET_USER_ID;
        if row.mode & GROUP_EXECUTES != 0 || change.outside_group {
            row.mode &= !SET_GROUP_ID;
        }
    }
    row.uid = change.uid.unwrap_or(row.uid);
    row.gid = change.gid.unwrap_or(row.gid);
    // Only the engine knows whether there are patches, or rows after the end.
    if let Some(flags) = change.flags {
        let mask = flags.mask & !(HAS_PATCHES | CUT);
        row.flags = row.flags & !mask | flags.bits & mask;
    }
    let time = |change: Option<TimeChange>, old| match change {
        None => old,
        Some(TimeChange::Now) => now,
        Some(TimeChange::To(time)) => time,
    };
    row.accessed = time(change.accessed, row.accessed);
    row.modified = time(change.modified, row.modified);
    row.changed = match change.changed {
        ChangedTime::Now => now,
        ChangedTime::To(time) => time,
        ChangedTime::Stays => row.changed,
    };
}
