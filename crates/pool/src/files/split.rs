//! Split records: a record that small writes keep changing is stored in blocks, so that a write
//! replaces the blocks that it covers, and the record takes no more space than its content.
//!
//! Called by the flush of patches (`patches`), if one more patch would make a record take too much
//! space. In the format, a split record is one whose extent's frame holds zeros, compressed into
//! some hundred bytes, and which has a patch of one piece for each of its blocks.
//!
//! Invariants:
//! - A block is a part of the record between multiples of [`grid`]; the end of the record ends one.
//! - A record is split as a whole or not at all: no batch has a part of its blocks.

use super::buffered::{Buffered, overlap};
use super::inodes::Editing;
use super::stored_patches::{BLOCK_LEAST, BLOCKS_MOST, StoredPatch};
use super::{Batch, Files, Result, Table};
use crate::deadlist::Dead;
use crate::frames::{CompressionSetting, NewFrame};
use crate::pointer::{Pointer, Txg};
use crate::rows::inode::flags::HAS_PATCHES;
use crate::rows::{Extent, Patch, keys};

/// Blocks of a record of this length begin at multiples of this many bytes.
fn grid(base: usize) -> usize {
    (base.next_power_of_two() / BLOCKS_MOST).max(BLOCK_LEAST)
}

/// A part of a record, bytes.
type Part = std::ops::Range<usize>;

/// The blocks to rewrite when these parts of a record are written.
///
/// `victims` are the patches to replace, by their position in `there`; all of them if the record
/// was not split before (`whole`).
fn blocks(base: usize, written: &[Part], there: &[StoredPatch], whole: bool) -> Blocks {
    let grid = grid(base);
    let outward = |part: &Part| part.start / grid * grid..part.end.next_multiple_of(grid).min(base);
    let mut taken: Vec<bool> = vec![false; base.div_ceil(grid)];
    let take = |part: &Part, taken: &mut Vec<bool>| {
        let part = outward(part);
        let blocks = part.start / grid..part.end.div_ceil(grid);
        taken.get_mut(blocks).into_iter().flatten().for_each(|block| *block = true);
    };
    written.iter().for_each(|part| take(part, &mut taken));
    let shortest = written.iter().map(|part| outward(part).len()).min().unwrap_or(grid);
    let step = (shortest / grid).max(1).next_power_of_two() * grid;
    let step = if step > shortest { step / 2 } else { step };
    let mut victims = vec![whole; there.len()];
    if whole {
        take(&(0..base), &mut taken);
    }
    // A patch that is replaced in part is replaced as a whole, and so is each one that it touches.
    while let Some(next) = (0..there.len()).find(|at| {
        !victims.get(*at).copied().unwrap_or(true)
            && there.get(*at).is_some_and(|patch| {
                patch.parts().any(|part| {
                    let part = outward(&part);
                    taken.get(part.start / grid..part.end.div_ceil(grid)).is_some_and(|part| part.contains(&true))
                })
            })
    }) {
        if let (Some(victim), Some(patch)) = (victims.get_mut(next), there.get(next)) {
            *victim = true;
            patch.parts().for_each(|part| take(&part, &mut taken));
        }
    }
    let mut parts: Vec<Part> = Vec::new();
    for (at, _) in taken.iter().enumerate().filter(|(_, taken)| **taken) {
        let (from, to) = (at * grid, ((at + 1) * grid).min(base));
        match parts.last_mut() {
            Some(last) if last.end == from && from % step != 0 => last.end = to,
            _ => parts.push(from..to),
        }
    }
    Blocks { parts, victims }
}

/// The blocks to write for a record, and the patches that they replace.
struct Blocks {
    /// The new blocks, in their order.
    parts: Vec<Part>,
    /// Whether each of the patches is replaced.
    victims: Vec<bool>,
}

/// A record to split, or a split one with blocks to replace.
pub(super) struct Splitting {
    pub(super) record: u64,
    pub(super) buffered: Buffered,
    /// Its patches, in the order of their numbers.
    pub(super) there: Vec<StoredPatch>,
    /// Its extent's frame holds content.
    pub(super) whole: bool,
}

impl<T: Table> Files<T> {
    /// Stores the parts of a record in memory as blocks. On an error they return to memory.
    pub(super) fn store_blocks(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        splitting: Splitting,
        batch: &mut Batch,
    ) -> Result<()> {
        let mut written = Vec::new();
        match self.write_blocks(txg, edited, &splitting, &mut written) {
            Ok(new) => self.name_blocks(txg, edited, splitting, new, batch),
            Err(error) => {
                // No row references them.
                self.freed.lock().extend(written.iter().map(|pointer| Dead::of(pointer, false)));
                put_back(edited, splitting.record, splitting.buffered);
                Err(error)
            }
        }
    }

    /// Writes the frames of the new blocks; `written` has the written ones, also after an error.
    fn write_blocks(
        &self,
        txg: Txg,
        edited: &Editing<'_>,
        splitting: &Splitting,
        written: &mut Vec<Pointer>,
    ) -> Result<NewBlocks> {
        let Splitting { record, buffered, there, whole } = splitting;
        let (record, base) = (*record, buffered.base);
        let fragments: Vec<Part> = buffered.fragments.parts().map(|(from, part)| from..from + part.len()).collect();
        let Blocks { parts, victims } = blocks(base, &fragments, there, *whole);
        let covered = |part: &Part| fragments.iter().any(|of| of.start <= part.start && part.end <= of.end);
        let mut content =
            if parts.iter().all(covered) { vec![0; base] } else { self.load(&edited.row, edited.number, record)? };
        content.resize(base, 0);
        buffered.fragments.parts().for_each(|(from, part)| overlap(&mut content, 0, from, part));
        let storing = *self.storing.read();
        let owner = (edited.number, record << edited.row.record_shift);
        let zeros = vec![0; if *whole { base } else { 0 }];
        let base_frame = (*whole).then(|| NewFrame {
            compression: CompressionSetting::Zstd(1),
            ..self.new_frame(&storing, txg, owner, &zeros)
        });
        let blocks = parts.iter().filter_map(|part| content.get(part.clone()));
        let frames: Vec<NewFrame<'_>> =
            base_frame.into_iter().chain(blocks.map(|block| self.new_frame(&storing, txg, owner, block))).collect();
        let outcome = self.frames.write_all(&frames, written);
        written.iter().for_each(|pointer| self.count_written(pointer));
        outcome?;
        let mut frames = written.iter().copied();
        let base = if *whole { frames.next() } else { None };
        Ok(NewBlocks { base, blocks: parts.into_iter().zip(frames).collect(), victims })
    }

    /// Makes the record's rows reference the new frames.
    fn name_blocks(
        &self,
        txg: Txg,
        edited: &mut Editing<'_>,
        splitting: Splitting,
        new: NewBlocks,
        batch: &mut Batch,
    ) -> Result<()> {
        let Splitting { record, buffered, there, .. } = splitting;
        let number = edited.number;
        let next = there.last().map_or(0, |patch| patch.number + 1);
        let mut charged = 0;
        match new.base {
            Some(zeros) => {
                let frames = new.blocks.iter().map(|(_, pointer)| Dead::of(pointer, false));
                if let Err(error) = self.replace(edited, record, Some(Extent::Frame(zeros)), batch) {
                    self.freed.lock().extend(frames);
                    put_back(edited, record, buffered);
                    return Err(error);
                }
                charged += zeros.charged();
            }
            None => {
                let gone = there.into_iter().zip(new.victims).filter(|(_, gone)| *gone).map(|(patch, _)| patch);
                let freed = self.drop_patches(gone.collect(), number, batch);
                self.charge(edited, -(freed as i64), batch);
            }
        }
        for (next, (part, pointer)) in (next..).zip(new.blocks) {
            let pieces = vec![(part.start as u32, part.len() as u32)];
            batch.put(&keys::patch(number, record, next), Patch { pointer, pieces }.encode());
            batch.written.push(Dead::of(&pointer, false));
            self.charge(edited, pointer.owner_charge() as i64, batch);
            charged += pointer.charged();
        }
        edited.activate().frames_in = txg;
        edited.row.flags |= HAS_PATCHES;
        self.became(txg, &edited.row, &buffered, charged);
        Ok(())
    }
}

/// The new frames of a record that was split, or of replaced blocks.
struct NewBlocks {
    /// The frame of zeros, if the record's extent had content.
    base: Option<Pointer>,
    /// The blocks.
    blocks: Vec<(Part, Pointer)>,
    /// Whether each of the patches is replaced.
    victims: Vec<bool>,
}

/// Returns parts to memory that could not be stored.
pub(super) fn put_back(edited: &mut Editing<'_>, record: u64, buffered: Buffered) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pointer::{ChecksumKind, Compression, FrameKind};

    fn patch(number: u64, pieces: &[(u32, u32)]) -> StoredPatch {
        let logical = pieces.iter().map(|(_, length)| length).sum();
        let pointer = Pointer {
            segment: 1,
            index: number as u32,
            offset: 0,
            stored: logical,
            logical,
            kind: FrameKind::Data,
            compression: Compression::Off,
            checksum_kind: ChecksumKind::Xxh3,
            pin: 0,
            birth: Txg(1),
            checksum: [0; 16],
        };
        StoredPatch { record: 0, number, patch: Patch { pointer, pieces: pieces.to_vec() } }
    }

    const K: usize = 1024;

    fn only(part: Part) -> Vec<Part> {
        std::iter::once(part).collect()
    }

    #[test]
    fn a_record_is_split_at_the_length_of_what_is_written() {
        let new = blocks(128 * K, &only(16 * K..32 * K), &[], true);
        assert_eq!(new.parts.len(), 8);
        assert!(new.parts.iter().all(|part| part.len() == 16 * K));
        let new = blocks(100 * K + 5, &only(4 * K + 7..5 * K), &[patch(3, &[(0, 10)])], true);
        assert_eq!(new.parts.iter().map(ExactSizeIterator::len).sum::<usize>(), 100 * K + 5);
        assert_eq!((new.parts.len(), new.victims), (26, vec![true]));
        // Of the longest records, blocks are longer.
        let new = blocks(16 << 20, &only(0..4096), &[], true);
        assert_eq!((new.parts.len(), new.parts[0].len()), (BLOCKS_MOST, 64 * K));
    }

    #[test]
    fn blocks_are_replaced_one_by_one() {
        let there: Vec<StoredPatch> = (0..8).map(|at| patch(at, &[(at as u32 * 16384, 16384)])).collect();
        let new = blocks(128 * K, &only(32 * K..48 * K), &there, false);
        assert_eq!(new.parts, only(32 * K..48 * K));
        assert_eq!(new.victims.iter().position(|gone| *gone), Some(2));
        assert_eq!(new.victims.iter().filter(|gone| **gone).count(), 1);
        // A shorter write cuts its block.
        let new = blocks(128 * K, &only(36 * K..40 * K), &there, false);
        assert_eq!(new.parts, [32 * K..36 * K, 36 * K..40 * K, 40 * K..44 * K, 44 * K..48 * K]);
        // Patches that lie over others go with these.
        let over = [there, vec![patch(9, &[(14 * K as u32, 4096), (40 * K as u32, 4096)])]].concat();
        let new = blocks(128 * K, &only(0..16 * K), &over, false);
        assert_eq!(new.victims, [true, true, true, false, false, false, false, false, true]);
        assert_eq!(new.parts, [0..16 * K, 16 * K..32 * K, 32 * K..48 * K]);
    }
}
