//! Positions of a union's listing: which branch, and where in its directory, in 63 bits (`lseek(2)`
//! takes no negative ones).
//!
//! ```text
//! bit 63: 0 | 62..56: slot of the branch | 55: 1 = abridged | 54..0: the branch's own position, or its upper bits
//! ```
//! A position that needs more than 55 bits (ext4 has 63, a hash) is abridged; the full one is
//! remembered by the listing under way, and found again by reading the branch's directory from its
//! start else. So positions stay good over restarts and while a directory gains branches, and no
//! memory is held for those that nobody comes back to.

/// Bits for the branch's own position.
const OWN: u32 = 55;

const ABRIDGED: u64 = 1 << OWN;

/// The most slots.
pub(crate) const SLOTS: usize = 1 << (62 - OWN);

/// A position taken apart.
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
    /// What is left of a long one.
    Abridged(u64),
}

/// What is left of a long position. A position that counts up or a hash alike keep their most
/// significant bits of 63.
fn abridge(own: u64) -> u64 {
    (own >> 8) & (ABRIDGED - 1)
}

/// Puts together what users get.
pub(super) fn pack(slot: u8, own: u64) -> u64 {
    let slot = u64::from(slot) % SLOTS as u64;
    slot << (OWN + 1) | if own < ABRIDGED { own } else { ABRIDGED | abridge(own) }
}

/// Whether a branch's own position is abridged in a packed one.
fn is_abridged(own: u64) -> bool {
    own >= ABRIDGED
}

/// Takes apart what users bring back.
pub(super) fn unpack(position: u64) -> Position {
    let rest = position & (ABRIDGED - 1);
    let own = if position & ABRIDGED == 0 { Own::Whole(rest) } else { Own::Abridged(rest) };
    Position { slot: u8::try_from(position >> (OWN + 1) & (SLOTS as u64 - 1)).unwrap_or(0), own }
}

impl Own {
    /// Whether this stands for a branch's own position.
    pub(super) fn stands_for(self, own: u64) -> bool {
        match self {
            Own::Whole(whole) => whole == own,
            Own::Abridged(rest) => is_abridged(own) && rest == abridge(own),
        }
    }

    /// Whether a branch's own position lies behind this one, where positions ascend.
    pub(super) fn is_before(self, own: u64) -> bool {
        match self {
            Own::Whole(whole) => whole < own,
            Own::Abridged(rest) => rest < abridge(own),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_come_back() {
        for slot in [0, 1, 63, 126, 127] {
            for own in [0, 1, 77, ABRIDGED - 1, ABRIDGED, ABRIDGED + 256, 0x7fff_ffff_ffff_fffe, 1 << 62] {
                let packed = pack(slot, own);
                assert!(i64::try_from(packed).is_ok(), "negative");
                assert!(packed != 0 || (slot, own) == (0, 0));
                let position = unpack(packed);
                assert_eq!(position.slot, slot);
                assert!(position.own.stands_for(own));
                assert!(!position.own.stands_for(own ^ 256));
                assert_eq!(matches!(position.own, Own::Abridged(_)), is_abridged(own));
            }
        }
    }
}
