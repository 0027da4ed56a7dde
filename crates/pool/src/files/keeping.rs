//! Records for the replay journal ([`crate::log::kept`]), and the orphan inodes of a crashed
//! process.
//!
//! Every visible change of files is appended here, with the rows as users see them:
//!
//! | change | record |
//! |---|---|
//! | a file is created, also without a name; gets, changes, loses a name (`names.rs`) | the rows of the batch |
//! | attributes, sizes, flags (`inodes.rs`), xattrs (`xattrs.rs`) | the rows of the batch, long values in full |
//! | a write, also a kernel write-back or a store to a mapping (`content.rs`) | the content, the inode |
//! | a range that is zeroed or punched (`content/sizes.rs`) | the range, the inode |
//! | a range that is shared with another file (`sharing.rs`) | both ranges, the inode |
//! | an access time (`inodes.rs`) | the inode |
//! | administration replaces the tree (`stopping.rs`) | the assigned inode numbers |
//!
//! Invisible changes are not recorded: flushes, rows that remain after a truncation, the freeing of
//! orphans (they are orphans after a replay, too), usage of owners. Administration is a commit
//! before it is answered, and a received file system becomes visible with its last commit.
//!
//! Invariants:
//! - The order of the journal is the order in which changes were applied: rows are appended under
//!   the table's lock, content under the inode's. A change that depends on another one comes after
//!   it.
//! - Room is reserved before anything is held ([`KeptRoom`]), and operations that make room append
//!   nothing.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::inodes::Editing;
use super::{Batch, Files, Result, Table, Throttle};
use crate::log::{KeptLog, LogChange, LogRecord};
use crate::pointer::Txg;
use crate::rows::{DatasetHead, keys};

/// Most bytes that an operation on rows appends: names, a link target, a few inodes.
pub(super) const ROWS: u64 = 16 << 10;
/// The same for the creation of a file: two access control lists and a label may come with it.
pub(super) const NEW: u64 = 256 << 10;

/// Room reserved in the replay journal for the records of an operation.
#[derive(Debug)]
pub(super) struct KeptRoom<'f> {
    keeper: &'f Keeper,
    throttle: &'f Throttle,
    bytes: u64,
}

impl Drop for KeptRoom<'_> {
    fn drop(&mut self) {
        self.keeper.log.give_back(self.bytes);
        if self.keeper.waiting.load(Ordering::SeqCst) > 0 {
            self.throttle.made_room();
        }
    }
}

/// The replay journal, and the number of operations that wait for room in it.
#[derive(Debug)]
pub struct Keeper {
    pub(crate) log: Arc<KeptLog>,
    waiting: AtomicUsize,
}

impl Keeper {
    /// The keeper of a pool's journal.
    pub(crate) fn new(log: Arc<KeptLog>) -> Self {
        Self { log, waiting: AtomicUsize::new(0) }
    }
}

impl<T: Table> Files<T> {
    /// Starts recording changes in the journal. Before, during a log replay, they are not recorded.
    pub(crate) fn keep_with(&self, keeper: Arc<Keeper>) {
        // A second one would split the log: the first stays.
        let _ = self.keeper.set(keeper);
    }

    /// Most bytes of content in one write.
    pub(super) fn written_at_once(&self) -> usize {
        self.keeper.get().map_or(usize::MAX, |keeper| keeper.log.most())
    }

    /// Waits until there is room for the records of an operation. Not to be called under any lock.
    pub(super) fn room_to_keep(&self, bytes: u64) -> Result<Option<KeptRoom<'_>>> {
        let Some(keeper) = self.keeper.get().filter(|_| bytes > 0) else { return Ok(None) };
        if !keeper.log.make_room(bytes) {
            let has_room = std::cell::Cell::new(false);
            keeper.waiting.fetch_add(1, Ordering::SeqCst);
            let admitted = self.throttle.admit_when(|| {
                has_room.set(keeper.log.make_room(bytes));
                has_room.get()
            });
            keeper.waiting.fetch_sub(1, Ordering::SeqCst);
            if !has_room.get() {
                // No commits are made: the log reports a record that finds no room.
                return admitted.map(|()| None).map_err(Into::into);
            }
        }
        Ok(Some(KeptRoom { keeper, throttle: &self.throttle, bytes }))
    }

    /// As [`Self::room_to_keep`] without waiting; the outer `None` if there is no room.
    pub(super) fn room_now(&self, bytes: u64) -> Option<Option<KeptRoom<'_>>> {
        match self.keeper.get() {
            None => Some(None),
            Some(keeper) => {
                keeper.log.make_room(bytes).then(|| Some(KeptRoom { keeper, throttle: &self.throttle, bytes }))
            }
        }
    }

    /// Appends the rows of a batch, as users see them. If the table has the same rows, as for most
    /// batches, returns the encoded record, which is also that of the intent log.
    pub(super) fn keep_rows(&self, txg: Txg, batch: &Batch) -> Option<Vec<u8>> {
        self.keeper.get()?;
        let differs = |kind| matches!(kind, Some(keys::EXTENT | keys::PATCH | keys::CUT | keys::XATTR));
        if batch.kept_as.is_empty() && !batch.changes().iter().any(|change| differs(change.key.first().copied())) {
            let encoded = self.record_of(txg, batch);
            self.keep_encoded(txg, &encoded, &[]);
            return Some(encoded);
        }
        let mut inodes = Vec::new();
        let mut changes = Vec::new();
        let mut has_attributes = false;
        for change in batch.changes() {
            let kept = batch.kept_as.iter().chain(&batch.logged_as).find(|(key, _)| *key == change.key);
            let row = kept.map(|(_, row)| row).or(change.row.as_ref());
            let change = match row {
                Some(value) => LogChange::Put { key: &change.key, value },
                None => LogChange::Delete { key: &change.key },
            };
            match (change.kind(), row) {
                // They follow from the size.
                (Some(keys::EXTENT), None) | (Some(keys::PATCH | keys::CUT), _) => continue,
                (Some(keys::INODE), _) => inodes.push(change),
                (Some(keys::XATTR), _) => has_attributes = true,
                _ => {}
            }
            changes.push(change);
        }
        if has_attributes {
            // They need their inode, and change it.
            changes.splice(0..0, inodes);
        }
        self.keep(txg, changes, &[]);
        None
    }

    /// Appends a change of content, if there is one, and the inode's row as users see it.
    pub(super) fn keep_row(&self, txg: Txg, edited: &Editing<'_>, content: Option<LogChange<'_>>) {
        if self.keeper.get().is_none() {
            return;
        }
        let (key, value) = (keys::inode(edited.number), edited.row.encode());
        let row = LogChange::Put { key: &key, value: &value };
        match content {
            Some(LogChange::Write { inode, offset, data }) => {
                self.keep(txg, vec![LogChange::Write { inode, offset, data: &[] }, row], data);
            }
            Some(change) => self.keep(txg, vec![change, row], &[]),
            None => self.keep(txg, vec![row], &[]),
        }
    }

    /// Appends the counter of inode numbers, so that no number is assigned twice, whatever the tree
    /// contains that replaces this one. Called while operations are [stopped](Self::stop) and the
    /// txg is closed, before any of it is durable.
    pub(crate) fn keep_numbers(&self) {
        let numbers = &self.numbers;
        let head = DatasetHead {
            next: numbers.next.load(Ordering::Relaxed),
            root: numbers.root,
            seed: numbers.seed,
            hashing: numbers.hashing,
            folding: numbers.folding,
            objects: numbers.objects.load(Ordering::Relaxed),
        };
        let entered = self.gate.enter();
        self.keep(entered.txg(), vec![LogChange::Put { key: &keys::head(), value: &head.encode() }], &[]);
    }

    fn keep(&self, txg: Txg, changes: Vec<LogChange<'_>>, content: &[u8]) {
        self.keep_encoded(txg, &LogRecord { txg, dataset: self.dataset, changes }.encoded(), content);
    }

    fn keep_encoded(&self, txg: Txg, record: &[u8], content: &[u8]) {
        if let Some(keeper) = self.keeper.get()
            && keeper.log.append(txg, record, content)
        {
            self.throttle.ask();
        }
    }

    /// Holds the orphan inodes in the table from now on, whether or not they have other holders:
    /// the kernel got them from a crashed process and may still have them open.
    ///
    /// # Errors
    /// Errors of reading the table.
    pub(crate) fn hold_left(&self) -> Result<()> {
        let numbers = self.orphans()?;
        self.left.lock().get_or_insert_default().extend(numbers);
        Ok(())
    }

    /// The inodes that are held this way.
    #[must_use]
    pub fn left(&self) -> Vec<u64> {
        self.left.lock().iter().flatten().copied().collect()
    }

    /// Ends the hold on one of the inodes of [`Self::left`], which the kernel does not have open:
    /// from now on it lives as long as a holder in this process.
    ///
    /// # Errors
    /// Errors of reading its row: it is freed by the next import then.
    pub fn let_left_go(&self, number: u64) -> Result<()> {
        let was_left = self.left.lock().as_mut().is_some_and(|left| left.remove(&number));
        if was_left { self.release_left([number]) } else { Ok(()) }
    }

    /// Ends the hold on all of them.
    ///
    /// # Errors
    /// As [`Self::let_left_go`].
    pub fn let_all_left_go(&self) -> Result<()> {
        let left: HashSet<u64> = self.left.lock().take().unwrap_or_default();
        self.release_left(left)
    }

    fn release_left(&self, numbers: impl IntoIterator<Item = u64>) -> Result<()> {
        let mut free = Vec::new();
        for number in numbers {
            if !self.known.is_held(number) {
                free.push(number);
                continue;
            }
            let inode = self.known.get(number);
            if self.table.read().get(&keys::orphan(number))?.is_some() {
                let mut edited = self.edit(&inode)?;
                let linkable = edited.row.hint.is_none();
                edited.lose_last_name();
                edited.activate().linkable = linkable;
            }
        }
        self.known.put_released(free);
        Ok(())
    }

    /// Whether this orphan may be open in the kernel since before the crash of a process.
    pub(super) fn is_left(&self, number: u64) -> bool {
        self.left.lock().as_ref().is_some_and(|left| left.contains(&number))
    }

    /// Adds an inode that became an orphan in a replay.
    pub(super) fn note_left(&self, number: u64) {
        self.left.lock().iter_mut().for_each(|left| {
            left.insert(number);
        });
    }
}
