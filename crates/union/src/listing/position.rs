//! Positions in a union's listing: the branch, and the position in its directory. They have 31 bits where that is possible,
//! as 32-bit programs take no more, and the kernel shares a listing among all programs.
//!
//! ```text
//!  0     A  29 bits            slot 0
//!  10    A  28 bits            slot 1
//!  110   A  27 bits            slot 2
//!  1110  A  26 bits            slot 3
//!  1111  slot (7 bits)  0  19 bits     the other slots
//!
//!  63 bits:  1  slot (7 bits)  A  54 bits
//! ```
//! A is 0 before the branch's own position, and 1 before its upper bits. In 31 bits, the last two bits of abridged positions
//! tell neighbours apart whose other bits agree: ext4's hashes of 31 bits, which lie far apart, are abridged so. Where that is
//! not enough, and for longer positions (NFS'), the position has 63 bits.
//!
//! The full position of an abridged one is remembered by the listing under way, and otherwise found again by reading the
//! branch's directory from its start. So positions stay valid over restarts and while a directory gains branches, and no memory
//! is held for those that nobody comes back to.

/// Bits of a position that 32-bit programs take.
const BITS: u32 = 31;

/// Slots with a prefix of their own.
const SHORT: u8 = 4;

/// Bits for the slot after the longest prefix.
const SLOT_BITS: u32 = 7;

/// The number of slots.
pub(crate) const SLOTS: usize = 1 << SLOT_BITS;

/// Bits that tell neighbours apart.
const ORDINAL_BITS: u32 = 2;
const ORDINALS: u64 = 1 << ORDINAL_BITS;

/// A position of 63 bits.
const LONG: u64 = 1 << 62;
/// Bits behind the slot there, without A.
const LONG_BITS: u32 = 54;

/// A decoded position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) slot: u8,
    pub(super) own: Own,
}

/// The part that belongs to the branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// The branch's own position.
    Whole(u64),
    /// The upper bits of one; its lower bits are missing.
    Abridged { upper: u64, missing: u32 },
}

impl Own {
    /// Whether a branch's own position is the one that is looked for, or lies behind it, where positions ascend.
    pub(super) fn is_reached_by(self, own: u64) -> bool {
        match self {
            Own::Whole(whole) => own >= whole,
            Own::Abridged { upper, missing } => own >> missing >= upper,
        }
    }

    /// Whether a branch's own position lies behind the one that is looked for, where positions ascend.
    pub(super) fn is_passed_by(self, own: u64) -> bool {
        match self {
            Own::Whole(whole) => own > whole,
            Own::Abridged { upper, missing } => own >> missing > upper,
        }
    }
}

/// The bits of a short position behind prefix and slot: what is before them, their number.
fn room(slot: u8) -> (u64, u32) {
    if slot < SHORT {
        let bits = BITS - 1 - u32::from(slot);
        return (((1 << slot) - 1) << (bits + 1), bits);
    }
    let bits = BITS - u32::from(SHORT) - SLOT_BITS;
    ((((1 << SHORT) - 1) << SLOT_BITS | u64::from(slot)) << bits, bits)
}

/// Encodes a branch's own position; `before` is the position handed out before it.
pub(super) fn pack(slot: u8, own: u64, before: u64) -> u64 {
    let slot = slot % SLOTS as u8;
    let (head, bits) = room(slot);
    let abridged = 1 << (bits - 1);
    if own < abridged {
        return head | own;
    }
    let width = bits - 1 - ORDINAL_BITS;
    if slot < SHORT && own >> BITS == 0 {
        let upper = own >> (BITS - width);
        let packed = head | abridged | upper << ORDINAL_BITS;
        if before >> ORDINAL_BITS == packed >> ORDINAL_BITS {
            if before % ORDINALS + 1 < ORDINALS {
                return before + 1;
            }
        } else if !is_long_neighbour(before, slot, upper, BITS - width) {
            return packed;
        }
    }
    let slot = u64::from(slot) << (LONG_BITS + 1);
    let own = own & i64::MAX.cast_unsigned();
    LONG | slot | if own >> LONG_BITS == 0 { own } else { 1 << LONG_BITS | own >> (63 - LONG_BITS) }
}

/// Whether a position has 63 bits because the short ones with these upper bits were used up.
fn is_long_neighbour(before: u64, slot: u8, upper: u64, missing: u32) -> bool {
    let Position { slot: other, own } = unpack(before);
    before >> BITS != 0 && other == slot && matches!(own, Own::Whole(whole) if whole >> missing == upper)
}

/// Decodes a position from the kernel.
pub(super) fn unpack(position: u64) -> Position {
    if position >> BITS != 0 {
        let slot = (position >> (LONG_BITS + 1)) as u8 % SLOTS as u8;
        let rest = position & ((1 << LONG_BITS) - 1);
        let is_whole = position >> LONG_BITS & 1 == 0;
        let own = if is_whole { Own::Whole(rest) } else { Own::Abridged { upper: rest, missing: 63 - LONG_BITS } };
        return Position { slot, own };
    }
    let ones = (position << (u64::BITS - BITS)).leading_ones();
    let slot = match u8::try_from(ones) {
        Ok(slot) if slot < SHORT => slot,
        _ => (position >> (BITS - u32::from(SHORT) - SLOT_BITS)) as u8 % SLOTS as u8,
    };
    let (_, bits) = room(slot);
    let abridged = 1 << (bits - 1);
    let rest = position & (abridged - 1);
    let own = match position & abridged {
        0 => Own::Whole(rest),
        _ => Own::Abridged { upper: rest >> ORDINAL_BITS, missing: BITS - (bits - 1 - ORDINAL_BITS) },
    };
    Position { slot, own }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_come_back() {
        for slot in [0, 1, 3, 4, 63, 126] {
            for own in [1, 77, (1 << 19) - 1, 1 << 19, 1 << 29, 0x7fff_ffff, 1 << 40, 0x7fff_ffff_ffff_fffe] {
                let packed = pack(slot, own, 0);
                assert!(
                    packed < (1 << 31) - 16 || packed >> 31 != 0,
                    "the front end has the last ones for `.` and `..`"
                );
                assert!(i64::try_from(packed).is_ok(), "negative");
                assert_eq!(packed >> 31 == 0, own < 1 << 19 || slot < SHORT && own < 1 << 31, "{slot} {own:x}");
                let position = unpack(packed);
                assert_eq!(position.slot, slot);
                assert!(position.own.is_reached_by(own), "{slot} {own:x}");
                match position.own {
                    Own::Whole(whole) => assert_eq!(whole, own),
                    Own::Abridged { missing, .. } => assert!(!position.own.is_reached_by(own - (1 << missing))),
                }
            }
        }
    }

    #[test]
    fn neighbours_have_positions_of_their_own() {
        let mut last = 0;
        let all: std::collections::BTreeSet<u64> = (0x7123_4560..0x7123_4568)
            .map(|own| {
                last = pack(1, own, last);
                assert!(unpack(last).own.is_reached_by(own) && unpack(last).slot == 1);
                last
            })
            .collect();
        assert_eq!(all.len(), 8);
        assert_eq!(pack(0, 4, pack(0, 5, 0)), 4, "whole positions are the branch's own");
    }
}
