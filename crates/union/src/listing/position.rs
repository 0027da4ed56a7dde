//! Positions in a union's listing: the branch, and the position in its directory, in 31 bits. 32-bit
//! programs take no more, and the kernel shares a listing among all programs.
//!
//! ```text
//!  0           A  30 - 1 bits      slot 0
//!  10          A  29 - 1 bits      slot 1
//!  110         A  28 - 1 bits      slot 2
//!  1110        A  27 - 1 bits      slot 3
//!  1111  slot (7 bits)  A  20 - 1 bits      the other slots
//! ```
//! A is 0 before the branch's own position, and 1 before its upper bits where it needs more bits (ext4's are hashes of 31
//! bits, NFS' may have 63). The full one is remembered by the listing under way, and otherwise found again by reading the
//! branch's directory from its start. So positions stay valid over restarts and while a directory gains branches, and no
//! memory is held for those that nobody comes back to.
//!
//! Invariant: positions of one branch ascend in a listing where the branch's own do: where the upper bits of two agree, the
//! later one gets the next number ([`pack`]).

/// Bits of a position.
const BITS: u32 = 31;

/// Slots with a prefix of their own.
const SHORT: u8 = 4;

/// Bits for the slot after the longest prefix.
const SLOT_BITS: u32 = 7;

/// The number of slots.
pub(crate) const SLOTS: usize = 1 << SLOT_BITS;

/// How far below an abridged position the upper bits of names may lie that got the next numbers.
pub(super) const NEAR: u64 = 8;

/// The room for a branch's own positions.
#[derive(Clone, Copy)]
struct Room {
    /// The prefix and the slot, in their bits.
    head: u64,
    /// The bits behind them, with A.
    bits: u32,
}

impl Room {
    fn of(slot: u8) -> Room {
        let slot = slot % SLOTS as u8;
        if slot < SHORT {
            let bits = BITS - 1 - u32::from(slot);
            let ones = (1 << slot) - 1;
            return Room { head: ones << (bits + 1), bits };
        }
        let bits = BITS - u32::from(SHORT) - SLOT_BITS;
        let ones = (1 << SHORT) - 1;
        Room { head: (ones << SLOT_BITS | u64::from(slot)) << bits, bits }
    }

    /// The bit A.
    fn abridged(self) -> u64 {
        1 << (self.bits - 1)
    }

    /// A branch's own position, or its upper bits with A.
    fn own(self, own: u64) -> u64 {
        let width = self.bits - 1;
        match own {
            _ if own < self.abridged() => own,
            _ if own >> BITS == 0 => self.abridged() | own >> (BITS - width),
            _ => self.abridged() | (own & i64::MAX as u64) >> (63 - width),
        }
    }
}

/// A position taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) slot: u8,
    /// The branch's own position; `None` where it is abridged.
    pub(super) own: Option<u64>,
}

/// The position that is handed out for a branch's own one, behind the position handed out before it.
pub(super) fn pack(slot: u8, own: u64, before: u64) -> u64 {
    let room = Room::of(slot);
    let packed = room.head | room.own(own);
    let is_abridged = |position: u64| unpack(position).slot == slot && position & room.abridged() != 0;
    // Numbers end with the slot's room: where even these run out, names come twice to a reader who comes back.
    let next = before + 1;
    if is_abridged(packed) && is_abridged(before) && is_abridged(next) { packed.max(next) } else { packed }
}

/// Takes apart what users bring back.
pub(super) fn unpack(position: u64) -> Position {
    let position = position & ((1 << BITS) - 1);
    // Leading ones of the 31 bits.
    let ones = (position << (u64::BITS - BITS)).leading_ones();
    let slot = match u8::try_from(ones) {
        Ok(slot) if slot < SHORT => slot,
        _ => (position >> (BITS - u32::from(SHORT) - SLOT_BITS)) as u8 % SLOTS as u8,
    };
    let room = Room::of(slot);
    let is_whole = position & room.abridged() == 0;
    Position { slot, own: is_whole.then_some(position & (room.abridged() - 1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_come_back() {
        for slot in [0, 1, 3, 4, 63, 126] {
            let room = Room::of(slot);
            for own in [0, 1, 77, room.abridged() - 1, room.abridged(), 0x7fff_ffff, 1 << 40, 0x7fff_ffff_ffff_fffe] {
                let packed = pack(slot, own, 0);
                assert!(packed < (1 << 31) - 16, "{packed:x}: the front end has the last ones for `.` and `..`");
                assert!(packed != 0 || (slot, own) == (0, 0));
                let position = unpack(packed);
                assert_eq!(position.slot, slot);
                assert_eq!(position.own, Some(own).filter(|own| *own < room.abridged()), "{slot} {own:x}");
            }
        }
    }

    #[test]
    fn abridged_positions_ascend() {
        for slot in [0, 1, 3, 4] {
            let (first, second) = (pack(slot, 0x7123_4560, 0), 0x7123_4561);
            assert_eq!(pack(slot, second, first), first + 1);
            assert_eq!(unpack(pack(slot, second, first)).slot, slot);
            assert!(pack(slot, 0x7fff_ffff, pack(slot, second, first)) > first + 1);
        }
        let small = pack(0, 5, 0);
        assert_eq!(pack(0, 4, small), 4, "whole positions are the branch's own");
        let last = pack(0, 0x7fff_ffff, 0);
        assert_eq!(pack(0, 0x7fff_ffff, last), last, "the next number would be another slot's");
    }
}
