//! Small writes into large records: a part of a stored record waits in memory without the record,
//! and becomes a small frame of its own, a *patch*, if rewriting the whole record would cost many
//! times the written bytes.
//!
//! The content of a record is its extent's frame, overlaid by its patches in their order, overlaid
//! by the parts in memory. A patch that newer ones cover is dropped. If patches would take too much
//! space, the record is [split](super::split) into blocks.
//!
//! Invariants:
//! - Patches and parts in memory lie within the content of the extent's frame; an operation that
//!   changes its length loads the whole record first.
//! - Accepted writes are stored whatever the state of the old content: a record that cannot be read
//!   gets patches even where it would be rewritten, so that damage of one file never stops a
//!   commit.
//! - A record that is rewritten or removed takes its patches with it ([`Files::replace`] is the one
//!   function).

use super::buffered::Buffered;
use super::content::{RecordPart, graver};
use super::inodes::Editing;
use super::quota_check::{Admit, Needs, Replaced, worst};
use super::split::{Splitting, put_back};
use super::stored_patches::{BLOCK_LEAST, BLOCKS_MOST, StoredPatch, Visible, is_split, visible};
use super::{Batch, FileError, Files, Result, Table};
use crate::deadlist::Dead;
use crate::frames::{NewFrame, Wanted};
use crate::pointer::{Pointer, Txg};
use crate::rows::inode::flags::HAS_PATCHES;
use crate::rows::patch::PIECES_MOST;
use crate::rows::{Extent, InodeRow, Patch, keys};

/// Most patches of a record that is not split; the next small write splits it.
const PATCHES_MOST: usize = 8;
/// A patch is worth it up to this fraction (1/n) of the record.
const PATCH_SHARE: usize = 4;
/// By this fraction (1/n) of the space of the whole record, a record with patches may use more.
const SPARE_SHARE: u64 = 2;
/// The same if space is short.
const SPARE_SHARE_SHORT: u64 = 64;

/// Space that so many written bytes of a record of this length may need, as blocks with their rows.
fn promise(written: usize, base: usize) -> u64 {
    /// Blocks are rarely longer: a larger need is reserved once it is known.
    const BLOCK: usize = 16 << 10;
    let blocks = written.div_ceil(BLOCK) + 1;
    worst(written.next_multiple_of(BLOCK).min(base)) + (blocks as u64) * worst(0)
}

/// How the parts of a record in memory are stored.
enum Form {
    /// As a patch, or one per part (`apart`), with numbers from `next` on. `superseded` are the
    /// patches that it covers.
    Patch { next: u64, superseded: Vec<StoredPatch>, apart: bool },
    /// As blocks of a split record.
    Blocks { there: Vec<StoredPatch>, whole: bool },
    /// By rewriting the whole record.
    Record,
}

/// A patch that is to be stored.
struct NewPatch {
    record: u64,
    buffered: Buffered,
    next: u64,
    superseded: Vec<StoredPatch>,
    /// Each part becomes a patch.
    apart: bool,
}

impl NewPatch {
    /// Returns the contents of its frames.
    fn contents(&self) -> Vec<Vec<u8>> {
        let parts: Vec<&[u8]> = self.buffered.fragments.parts().map(|(_, part)| part).collect();
        if self.apart { parts.into_iter().map(<[u8]>::to_vec).collect() } else { vec![parts.concat()] }
    }

    /// Returns the pieces of its frames: offset in the record and length, bytes.
    fn pieces(&self) -> Vec<Vec<(u32, u32)>> {
        let parts = self.buffered.fragments.parts().map(|(from, part)| (from as u32, part.len() as u32));
        if self.apart { parts.map(|piece| vec![piece]).collect() } else { vec![parts.collect()] }
    }
}

impl<T: Table> Files<T> {
    /// Takes a part of a stored record into memory, without the record; `false` if the whole record
    /// is needed in memory.
    pub(super) fn buffer_fragment(
        &self,
        edited: &mut Editing<'_>,
        piece: RecordPart,
        part: &[u8],
        admit: Admit,
    ) -> Result<bool> {
        let (end, number) = (piece.from + piece.length, edited.number);
        let row = edited.row;
        let range = piece.record << row.record_shift..(piece.record + 1) << row.record_shift;
        if let Some(buffered) = edited.activate().records.get_mut(&piece.record) {
            if !buffered.is_sparse() || end > buffered.base {
                return Ok(false);
            }
            let most = promise(buffered.base, buffered.base);
            let need = promise(piece.length, buffered.base).min(most.saturating_sub(buffered.promised));
            if need > 0 {
                let replaced = || {
                    let all = self.replaced(&row, number, &range)?;
                    Ok(Replaced { charged: all.charged.saturating_sub(buffered.promised), ..all })
                };
                let needs = Needs::new(need, piece.length as u64);
                self.admit_over(&row, needs, admit, replaced)?;
                self.owners.count_waiting(&row, need as i64);
                buffered.promised += need;
                self.needed.grow(need);
            }
            self.grow_fragments(buffered, piece.from, part);
            return Ok(true);
        }
        self.warm(&keys::extent(number, piece.record))?;
        let stored = self.table.read().get(&keys::extent(number, piece.record))?;
        let Some(pointer) =
            stored.as_deref().map(Extent::decode).transpose()?.and_then(|extent| extent.pointer().copied())
        else {
            return Ok(false);
        };
        let base = pointer.logical as usize;
        let inside = range.start + base as u64 <= row.size;
        if end > base || !inside || part.len() * PATCH_SHARE > base {
            return Ok(false);
        }
        // The flush reads them and must not fail on damage: the write fails now instead.
        self.stored_patches(&row, number, piece.record, piece.record)?;
        // Blocks are replaced by blocks; a record that is not split may have to be rewritten.
        let written = if is_split(pointer.owner_charge(), base) { piece.length } else { base };
        let promised = promise(written, base);
        let needs = Needs::new(promised, piece.length as u64);
        self.admit_over(&row, needs, admit, || self.replaced(&row, number, &range))?;
        self.owners.count_waiting(&row, promised as i64);
        self.needed.grow(promised);
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

    /// Loads the remainder of a record of which only parts are in memory.
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

    /// Returns the patches of some records, in their order.
    pub(super) fn stored_patches(&self, row: &InodeRow, inode: u64, first: u64, last: u64) -> Result<Vec<StoredPatch>> {
        let mut found = Vec::new();
        if row.flags & HAS_PATCHES == 0 {
            return Ok(found);
        }
        self.warm(&keys::patches(inode, first, last).start)?;
        self.table.read().try_scan(keys::patches(inode, first, last), &mut |key, value| {
            let patch = Patch::decode(value)?;
            if let keys::Key::Patch { record, number, .. } = keys::Key::decode(key)? {
                found.push(StoredPatch { record, number, patch });
            }
            Ok(true)
        })?;
        Ok(found)
    }

    /// Overlays a part of a record with its patches. Frames that are needed as a whole are added to
    /// `direct`, to be read together.
    pub(super) fn lay_patches<'b>(
        &self,
        target: &'b mut [u8],
        piece: &RecordPart,
        patches: &[StoredPatch],
        direct: &mut Vec<Wanted<'b>>,
    ) -> Result<()> {
        let (mut rest, mut at) = (target, piece.from);
        for (start, Visible { end, pointer, from }) in
            visible(patches, piece.record, &(piece.from..piece.from + piece.length))
        {
            let (part, behind) = rest.split_at_mut(end - at);
            let (_, part) = part.split_at_mut(start - at);
            (rest, at) = (behind, end);
            if from == 0 && part.len() == pointer.logical as usize {
                direct.push(Wanted { pointer, target: part });
                continue;
            }
            let content = self.frames.read(&pointer)?;
            // A frame that is shorter than its row states leaves the remaining bytes unchanged: its
            // checksum was valid.
            if let Some(content) = content.get(from..from + part.len()) {
                part.copy_from_slice(content);
            }
        }
        Ok(())
    }

    /// Removes a record's patches; returns the space that the inode was charged for them.
    pub(super) fn drop_patches(&self, patches: Vec<StoredPatch>, inode: u64, batch: &mut Batch) -> u64 {
        let mut charged = 0;
        for StoredPatch { record, number, patch } in patches {
            charged += patch.pointer.owner_charge();
            batch.dead.push(Dead::of(&patch.pointer, false));
            batch.remove(&keys::patch(inode, record, number));
        }
        charged
    }

    /// Returns a record's patches, and makes sure that a new one's row can be put.
    fn patches_to_add_to(&self, edited: &Editing<'_>, record: u64) -> Result<Vec<StoredPatch>> {
        let there = self.stored_patches(&edited.row, edited.number, record, record)?;
        if there.is_empty() {
            // The row of the first patch goes to a leaf that nothing has read yet.
            let key = keys::patch(edited.number, record, 0);
            self.warm(&key)?;
            self.table.read().get(&key)?;
        }
        Ok(there)
    }

    /// Space that the inode is charged for the frame of a record's extent.
    fn charged_for_extent(&self, inode: u64, record: u64) -> Result<u64> {
        let row = self.table.read().get(&keys::extent(inode, record))?;
        let extent = row.as_deref().map(Extent::decode).transpose()?;
        Ok(extent.and_then(|extent| extent.dead()).map_or(0, |dead| dead.owner_charge))
    }

    /// Chooses how the parts of a record are stored, so that it uses no more than `1 / spare_share`
    /// beyond its content.
    fn form_of_parts(&self, edited: &Editing<'_>, record: u64, buffered: &Buffered, spare_share: u64) -> Result<Form> {
        let (base, bytes) = (buffered.base, buffered.fragments.bytes());
        if bytes * PATCH_SHARE > base * 2 || buffered.fragments.len() > PIECES_MOST {
            return Ok(Form::Record);
        }
        let charged = self.charged_for_extent(edited.number, record)?;
        let apart = is_split(charged, base);
        let there = self.patches_to_add_to(edited, record)?;
        let next = there.last().map_or(0, |patch| patch.number + 1);
        let (superseded, stay): (Vec<StoredPatch>, Vec<StoredPatch>) =
            there.iter().cloned().partition(|patch| patch.parts().all(|part| buffered.fragments.cover(&part)));
        let frames = if apart { buffered.fragments.len() } else { 1 };
        let takes = stay.iter().map(|patch| patch.patch.pointer.owner_charge()).sum::<u64>()
            + charged
            + bytes as u64
            + frames as u64 * u64::from(Pointer::HEADER);
        let whole = worst(base) + if apart { (stay.len() + frames) as u64 * u64::from(Pointer::HEADER) } else { 0 };
        let most = if apart { BLOCKS_MOST } else { PATCHES_MOST };
        let is_small = apart || bytes * PATCH_SHARE <= base;
        if is_small && stay.len() + frames <= most && takes <= whole + whole / spare_share {
            return Ok(Form::Patch { next, superseded, apart });
        }
        if base <= BLOCK_LEAST { Ok(Form::Record) } else { Ok(Form::Blocks { there, whole: !apart }) }
    }

    /// Stores parts as patches or blocks where that is worth it; returns the records to rewrite,
    /// with their whole content, and the result for those that failed, which are in memory again.
    pub(super) fn flush_patches(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        some: Vec<(u64, Buffered)>,
        batch: &mut Batch,
    ) -> (Vec<(u64, Buffered)>, Result<()>) {
        let (mut whole, mut patches, mut split, mut outcome) = (Vec::new(), Vec::new(), Vec::new(), Ok(()));
        // Queried only if needed: most flushed records are complete.
        let is_short = some.iter().any(|(_, buffered)| buffered.is_sparse()) && self.admission.is_short(self.dataset);
        let spare_share = if is_short { SPARE_SHARE_SHORT } else { SPARE_SHARE };
        for (record, mut buffered) in some {
            if !buffered.is_sparse() {
                whole.push((record, buffered));
                continue;
            }
            let filled = match self.form_of_parts(edited, record, &buffered, spare_share) {
                Ok(Form::Patch { next, superseded, apart }) => {
                    patches.push(NewPatch { record, buffered, next, superseded, apart });
                    continue;
                }
                Ok(Form::Blocks { there, whole }) => {
                    split.push(Splitting { record, buffered, there, whole });
                    continue;
                }
                Ok(Form::Record) => {
                    let parts = buffered.held();
                    let filled = self.fill(&edited.row, edited.number, record, &mut buffered);
                    self.throttle.filled_content(buffered.held().saturating_sub(parts));
                    filled
                }
                Err(error) => Err(error),
            };
            match filled {
                Ok(()) => whole.push((record, buffered)),
                Err(error) => match self.beside(edited, record, buffered, error) {
                    Ok(beside) => patches.extend(beside),
                    Err(error) => outcome = graver(outcome, Err(error)),
                },
            }
        }
        for splitting in split {
            let (record, outcome_of_one) = (splitting.record, self.store_blocks(txg, edited, splitting, batch));
            let Err(error) = outcome_of_one else { continue };
            let Some(buffered) = edited.activate().records.remove(&record) else { continue };
            match self.beside(edited, record, buffered, error) {
                Ok(beside) => patches.extend(beside),
                Err(error) => outcome = graver(outcome, Err(error)),
            }
        }
        let stored = self.store_patches(txg, edited, patches, batch);
        (whole, graver(outcome, stored))
    }

    /// Stores the parts of a record that cannot be read as patches, whatever space they take:
    /// accepted writes must not depend on the old content. After other errors the parts return to
    /// memory.
    fn beside(
        &self,
        edited: &mut Editing<'_>,
        record: u64,
        buffered: Buffered,
        error: FileError,
    ) -> Result<Vec<NewPatch>> {
        match self.patches_to_add_to(edited, record) {
            Ok(there) if error.is_unreadable() => {
                tracing::warn!(inode = edited.number, record, %error, "what was written to a record that cannot be read is stored beside it");
                let next = there.last().map_or(0, |patch| patch.number + 1);
                let patch =
                    |(buffered, next)| NewPatch { record, buffered, next, superseded: Vec::new(), apart: false };
                Ok(apart(buffered).zip(next..).map(patch).collect())
            }
            _ => {
                put_back(edited, record, buffered);
                Err(error)
            }
        }
    }

    fn store_patches(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        patches: Vec<NewPatch>,
        batch: &mut Batch,
    ) -> Result<()> {
        if patches.is_empty() {
            return Ok(());
        }
        let storing = *self.storing.read();
        let (number, shift) = (edited.number, edited.row.record_shift);
        let contents: Vec<Vec<Vec<u8>>> = patches.iter().map(NewPatch::contents).collect();
        let frames: Vec<NewFrame<'_>> = patches
            .iter()
            .zip(&contents)
            .flat_map(|(patch, contents)| contents.iter().map(|content| (patch.record, content)))
            .map(|(record, content)| self.new_frame(&storing, txg, (number, record << shift), content))
            .collect();
        let mut written = Vec::with_capacity(frames.len());
        let outcome = self.frames.write_all(&frames, &mut written);
        written.iter().for_each(|pointer| self.count_written(pointer));
        if !written.is_empty() {
            edited.activate().frames_in = txg;
            edited.row.flags |= HAS_PATCHES;
        }
        let mut written = written.into_iter();
        for (patch, contents) in patches.into_iter().zip(&contents) {
            let pointers: Vec<Pointer> = written.by_ref().take(contents.len()).collect();
            if pointers.len() < contents.len() {
                self.freed.lock().extend(pointers.iter().map(|pointer| Dead::of(pointer, false)));
                put_back(edited, patch.record, patch.buffered);
                continue;
            }
            let (mut charged, mut of_owner, mut next, pieces) = (0, 0, patch.next, patch.pieces());
            let freed = self.drop_patches(patch.superseded, number, batch);
            for (pointer, pieces) in pointers.into_iter().zip(pieces) {
                charged += pointer.charged();
                of_owner += pointer.owner_charge();
                batch.put(&keys::patch(number, patch.record, next), Patch { pointer, pieces }.encode());
                batch.written.push(Dead::of(&pointer, false));
                next += 1;
            }
            self.charge(edited, of_owner as i64 - freed as i64, batch);
            self.became(txg, &edited.row, &patch.buffered, charged);
        }
        Ok(outcome?)
    }
}

/// Divides a record's parts into as many as patches are needed; the first has the whole
/// reservation.
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
