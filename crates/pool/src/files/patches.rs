//! Small writes into large records: a part of a stored record waits in memory without the record,
//! and becomes a small frame of its own, a *patch*, where rewriting the whole record would cost
//! many times what was written.
//!
//! What a record holds is its extent's frame, overlaid by its patches in their order, overlaid by
//! what waits in memory.
//!
//! Invariants:
//! - Patches and waiting pieces lie within the content of the extent's frame; whatever changes the
//!   length of that makes the record whole first.
//! - What was accepted is stored whatever the old content is: a record that cannot be read any more
//!   gets patches where it would be stored anew, so that damage of one file never stops a commit.
//! - A record that is stored anew, or goes, takes its patches with it ([`Files::replace`] is the
//!   one place).

use super::buffered::{Buffered, overlap};
use super::content::{RecordPart, graver};
use super::inodes::Editing;
use super::quota_check::{Admit, worst};
use super::{Batch, Files, Result, Table};
use crate::deadlist::Dead;
use crate::frames::NewFrame;
use crate::pointer::Txg;
use crate::rows::inode::flags::HAS_PATCHES;
use crate::rows::patch::PIECES_MOST;
use crate::rows::{Extent, InodeRow, Patch, keys};

/// A record has at most so many patches; the next small write stores it anew.
const PATCHES_MOST: usize = 8;
/// A patch is worth it up to this part of the record.
const PATCH_SHARE: usize = 4;

impl<T: Table> Files<T> {
    /// Takes a part of a stored record into memory, without the record; `false` where the record
    /// itself must be there.
    pub(super) fn buffer_fragment(
        &self,
        edited: &mut Editing<'_>,
        piece: RecordPart,
        part: &[u8],
        admit: Admit,
    ) -> Result<bool> {
        let end = piece.from + piece.length;
        if let Some(buffered) = edited.activate().records.get_mut(&piece.record) {
            if !buffered.is_sparse() || end > buffered.base {
                return Ok(false);
            }
            self.grow_fragments(buffered, piece.from, part);
            return Ok(true);
        }
        self.warm(&keys::extent(edited.number, piece.record))?;
        let stored = self.table.read().get(&keys::extent(edited.number, piece.record))?;
        let Some(pointer) =
            stored.as_deref().map(Extent::decode).transpose()?.and_then(|extent| extent.pointer().copied())
        else {
            return Ok(false);
        };
        let base = pointer.logical as usize;
        let inside = (piece.record << edited.row.record_shift) + base as u64 <= edited.row.size;
        if end > base || !inside || part.len() * PATCH_SHARE > base {
            return Ok(false);
        }
        // The flush looks at them, and must not fail by what is damaged: whoever writes here is
        // told now.
        self.stored_patches(&edited.row, edited.number, piece.record, piece.record)?;
        let promised = worst(base);
        self.admit_content(&edited.row, promised, admit)?;
        self.owners.count_waiting(&edited.row, promised as i64);
        let buffered =
            edited.activate().records.entry(piece.record).or_insert(Buffered { promised, base, ..Buffered::default() });
        self.grow_fragments(buffered, piece.from, part);
        Ok(true)
    }

    fn grow_fragments(&self, buffered: &mut Buffered, from: usize, part: &[u8]) {
        let before = buffered.fragments.bytes();
        buffered.fragments.put(from, part);
        self.buffered.grow((buffered.fragments.bytes() - before) as u64);
    }

    /// Makes a record whole in memory of which only parts are there.
    pub(super) fn fill(&self, row: &InodeRow, number: u64, record: u64, buffered: &mut Buffered) -> Result<()> {
        if !buffered.take_whole() {
            let content = self.load(row, number, record)?;
            let parts = buffered.fragments.bytes();
            buffered.lay_over(content);
            self.buffered.grow(buffered.content.len() as u64);
            self.buffered.shrink(parts as u64);
        }
        Ok(())
    }

    /// The patches of some records, in their order; with their numbers.
    pub(super) fn stored_patches(
        &self,
        row: &InodeRow,
        number: u64,
        first: u64,
        last: u64,
    ) -> Result<Vec<(u64, u64, Patch)>> {
        let mut found = Vec::new();
        if row.flags & HAS_PATCHES == 0 {
            return Ok(found);
        }
        self.warm(&keys::patches(number, first, last).start)?;
        self.table.read().try_scan(keys::patches(number, first, last), &mut |key, value| {
            let patch = Patch::decode(value)?;
            if let keys::Key::Patch { record, number, .. } = keys::Key::decode(key)? {
                found.push((record, number, patch));
            }
            Ok(true)
        })?;
        Ok(found)
    }

    /// Overlays a part of a record (at `at` of it) with a patch.
    pub(super) fn apply_patch(&self, target: &mut [u8], at: usize, patch: &Patch) -> Result<()> {
        let wanted = |(from, length): &(u32, u32)| {
            (*from as usize) < at + target.len() && at < *from as usize + *length as usize
        };
        if !patch.pieces.iter().any(wanted) {
            return Ok(());
        }
        let content = self.frames.read(&patch.pointer)?;
        let mut rest = &*content;
        for (from, length) in &patch.pieces {
            let Some((part, behind)) = rest.split_at_checked(*length as usize) else { break };
            rest = behind;
            overlap(target, at, *from as usize, part);
        }
        Ok(())
    }

    /// A record's patches go; answers what they were charged.
    pub(super) fn drop_patches(&self, patches: Vec<(u64, u64, Patch)>, inode: u64, batch: &mut Batch) -> u64 {
        let mut charged = 0;
        for (record, number, patch) in patches {
            charged += patch.pointer.charged();
            batch.dead.push(Dead::of(&patch.pointer, false));
            batch.remove(&keys::patch(inode, record, number));
        }
        charged
    }

    /// A record's patches, and whether there can be another one.
    fn patches_to_add_to(&self, edited: &Editing<'_>, record: u64) -> Result<Vec<(u64, u64, Patch)>> {
        let there = self.stored_patches(&edited.row, edited.number, record, record)?;
        if there.is_empty() {
            // The first one's row goes where nobody has looked yet.
            let key = keys::patch(edited.number, record, 0);
            self.warm(&key)?;
            self.table.read().get(&key)?;
        }
        Ok(there)
    }

    /// The number of the next patch of a record, where what waits is worth one.
    fn next_patch(&self, edited: &Editing<'_>, record: u64, buffered: &Buffered) -> Result<Option<u64>> {
        let small =
            buffered.fragments.bytes() * PATCH_SHARE <= buffered.base && buffered.fragments.len() <= PIECES_MOST;
        if !small {
            return Ok(None);
        }
        let there = self.patches_to_add_to(edited, record)?;
        let next = there.last().map_or(0, |(_, number, _)| number + 1);
        Ok((there.len() < PATCHES_MOST).then_some(next))
    }

    /// Stores as patches what is worth it; answers the rest, whole in memory, and what could not be
    /// done, which is in memory still.
    pub(super) fn flush_patches(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        some: Vec<(u64, Buffered)>,
        batch: &mut Batch,
    ) -> (Vec<(u64, Buffered)>, Result<()>) {
        let (mut whole, mut patches, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
        for (record, mut buffered) in some {
            if !buffered.is_sparse() {
                whole.push((record, buffered));
                continue;
            }
            let next = self.next_patch(edited, record, &buffered);
            let filled = match next {
                Ok(Some(number)) => {
                    patches.push((record, buffered, number));
                    continue;
                }
                Ok(None) => self.fill(&edited.row, edited.number, record, &mut buffered),
                Err(error) => Err(error),
            };
            let error = match filled {
                Ok(()) => {
                    whole.push((record, buffered));
                    continue;
                }
                Err(error) => error,
            };
            // Nothing that was accepted may depend on what lies there already.
            match self.patches_to_add_to(edited, record) {
                Ok(there) if error.is_unreadable() => {
                    tracing::warn!(inode = edited.number, record, %error, "what was written to a record that cannot be read is stored beside it");
                    let next = there.last().map_or(0, |(_, number, _)| number + 1);
                    patches.extend(apart(buffered).zip(next..).map(|(part, number)| (record, part, number)));
                }
                _ => {
                    put_back(edited, record, buffered);
                    outcome = graver(outcome, Err(error));
                }
            }
        }
        let stored = self.store_patches(txg, edited, patches, batch);
        (whole, graver(outcome, stored))
    }

    fn store_patches(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        patches: Vec<(u64, Buffered, u64)>,
        batch: &mut Batch,
    ) -> Result<()> {
        if patches.is_empty() {
            return Ok(());
        }
        let storing = *self.storing.read();
        let (number, shift) = (edited.number, edited.row.record_shift);
        let contents: Vec<Vec<u8>> = patches
            .iter()
            .map(|(_, buffered, _)| buffered.fragments.parts().flat_map(|(_, part)| part).copied().collect())
            .collect();
        let frames: Vec<NewFrame<'_>> = patches
            .iter()
            .zip(&contents)
            .map(|((record, ..), content)| self.new_frame(&storing, txg, (number, record << shift), content))
            .collect();
        let mut written = Vec::with_capacity(frames.len());
        let outcome = self.frames.write_all(&frames, &mut written);
        written.iter().for_each(|pointer| self.count_written(pointer));
        if !written.is_empty() {
            edited.activate().frames_in = txg;
            edited.row.flags |= HAS_PATCHES;
        }
        let mut written = written.into_iter();
        for (record, buffered, next) in patches {
            let Some(pointer) = written.next() else {
                put_back(edited, record, buffered);
                continue;
            };
            let charged = pointer.charged();
            let pieces = buffered.fragments.parts().map(|(from, part)| (from as u32, part.len() as u32)).collect();
            batch.put(&keys::patch(number, record, next), Patch { pointer, pieces }.encode());
            batch.written.push(Dead::of(&pointer, false));
            self.charge(edited, charged as i64, batch);
            self.became(txg, &edited.row, &buffered, charged);
        }
        Ok(outcome?)
    }
}

/// A record's parts in as many as there must be patches; the first has the promise of all.
fn apart(buffered: Buffered) -> impl Iterator<Item = Buffered> {
    let mut rest = Some(buffered);
    std::iter::from_fn(move || {
        let mut now = rest.take()?;
        rest = now.fragments.split(PIECES_MOST).map(|fragments| Buffered {
            fragments,
            base: now.base,
            ..Buffered::default()
        });
        Some(now)
    })
}

/// Parts that could not be stored are in memory again.
fn put_back(edited: &mut Editing<'_>, record: u64, buffered: Buffered) {
    let records = &mut edited.activate().records;
    match records.get_mut(&record) {
        Some(there) => {
            buffered.fragments.parts().for_each(|(from, part)| there.fragments.put(from, part));
            there.promised += buffered.promised;
        }
        None => {
            records.insert(record, buffered);
        }
    }
}
