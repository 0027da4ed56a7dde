//! Groups of devices: which devices hold each other's parity or copies, and in what state each is.
//!
//! Callers: identity blocks, and the backend of devices. Invariant: a pool without groups is what
//! pools were before there were any: all devices for themselves.

use crate::codec::{Reader, Writer};
use crate::error::PoolError;

use super::structure;

/// How the devices of a group stand in for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Each for itself: what one held is lost with it.
    Plain,
    /// Each holds everything.
    Mirror,
    /// Rows with so many columns of parity, 1 to 3.
    RaidZ(u8),
}

/// What lies on a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum GroupClass {
    /// Segments.
    #[default]
    Data = 0,
    /// Copies of the intent log alone.
    Log = 1,
    /// Segments of metadata alone, before they lie on other groups.
    Special = 2,
}

/// A group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its kind.
    pub kind: GroupKind,
    /// What lies on it.
    pub class: GroupClass,
    /// What lies on one device before a row goes on to the next, as a power of two: bytes.
    pub unit: u8,
}

/// What a device is to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberRole {
    /// One of its group's: segments lie on it by its number.
    #[default]
    Own,
    /// A spare that nobody needs now.
    Spare,
    /// A spare that stands beside the device of this number, with the same in the same slots.
    SpareFor(u16),
    /// It stands beside the device of this number until it has everything, and takes its place then.
    Successor(u16),
}

impl MemberRole {
    /// The device that it stands beside.
    #[must_use]
    pub fn beside(self) -> Option<u16> {
        match self {
            Self::Own | Self::Spare => None,
            Self::SpareFor(number) | Self::Successor(number) => Some(number),
        }
    }
}

/// What is known of a device beyond its path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberState {
    /// Its group.
    pub group: u8,
    /// What it is to the others.
    pub role: MemberRole,
    /// How it was left.
    pub status: MemberStatus,
    /// It may lack something that it should hold: it was not there when that was written.
    pub stale: bool,
}

/// How a device was left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberStatus {
    /// In use.
    #[default]
    Online = 0,
    /// Taken offline by somebody.
    Offline = 1,
    /// Not used any more since it failed.
    Faulted = 2,
    /// No part of the pool any more; its number stays.
    Removed = 3,
    /// No part of the pool yet: where a later label does not say otherwise, it never becomes one.
    Joining = 4,
}

impl MemberStatus {
    /// Whether it is part of the pool.
    #[must_use]
    pub fn belongs(self) -> bool {
        !matches!(self, Self::Removed | Self::Joining)
    }
}

/// The least unit, as a power of two.
pub const LEAST_UNIT: u8 = 12;
/// The unit of new groups.
pub const UNIT: u8 = 14;
const MOST_UNIT: u8 = 20;

impl Group {
    /// A group of this kind.
    #[must_use]
    pub fn new(kind: GroupKind) -> Self {
        Self { kind, class: GroupClass::Data, unit: UNIT }
    }

    pub(super) fn encode(self, to: &mut Writer) {
        let (kind, parity) = match self.kind {
            GroupKind::Plain => (0, 0),
            GroupKind::Mirror => (1, 0),
            GroupKind::RaidZ(parity) => (2, parity),
        };
        to.u8(kind);
        to.u8(parity);
        to.u8(self.unit);
        to.u8(self.class as u8);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let kind = match (from.u8()?, from.u8()?) {
            (0, 0) => GroupKind::Plain,
            (1, 0) => GroupKind::Mirror,
            (2, parity @ 1..=3) => GroupKind::RaidZ(parity),
            _ => return structure("an unknown kind of group"),
        };
        let unit = from.u8()?;
        let class = match from.u8()? {
            0 => GroupClass::Data,
            1 => GroupClass::Log,
            2 => GroupClass::Special,
            _ => return structure("an unknown class of group"),
        };
        if (LEAST_UNIT..=MOST_UNIT).contains(&unit) {
            Ok(Self { kind, class, unit })
        } else {
            structure("an impossible unit of rows")
        }
    }
}

impl MemberState {
    pub(super) fn encode(self, to: &mut Writer) {
        to.u8(self.group);
        to.u8(self.status as u8);
        to.u8(u8::from(self.stale));
        let role = match self.role {
            MemberRole::Own => 0,
            MemberRole::Spare => 1,
            MemberRole::SpareFor(_) => 2,
            MemberRole::Successor(_) => 3,
        };
        to.u8(role);
        if let Some(beside) = self.role.beside() {
            to.u16(beside);
        }
    }

    pub(super) fn decode(from: &mut Reader<'_>, groups: usize) -> Result<Self, PoolError> {
        let group = from.u8()?;
        let status = match from.u8()? {
            0 => MemberStatus::Online,
            1 => MemberStatus::Offline,
            2 => MemberStatus::Faulted,
            3 => MemberStatus::Removed,
            4 => MemberStatus::Joining,
            _ => return structure("an unknown state of a device"),
        };
        let stale = match from.u8()? {
            0 => false,
            1 => true,
            _ => return structure("an unknown state of a device"),
        };
        let role = match from.u8()? {
            0 => MemberRole::Own,
            1 => MemberRole::Spare,
            2 => MemberRole::SpareFor(from.u16()?),
            3 => MemberRole::Successor(from.u16()?),
            _ => return structure("an unknown role of a device"),
        };
        if usize::from(group) < groups {
            Ok(Self { group, role, status, stale })
        } else {
            structure("a device of a group that there is not")
        }
    }
}
