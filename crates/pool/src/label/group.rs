//! Groups of devices (like ZFS' top-level vdevs): mirrors and raidz, and the state of each device.
//!
//! Callers: identity blocks, and the backend of devices. Invariant: a pool without groups is as pools were before
//! groups existed: all devices are independent.

use crate::codec::{Reader, Writer};
use crate::error::PoolError;

use super::structure;

/// Redundancy of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// None: the content of a device is lost with it.
    Plain,
    /// Each device holds everything.
    Mirror,
    /// Rows with this many parity columns, 1 to 3.
    RaidZ(u8),
}

/// Allocation class of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum GroupClass {
    /// Segments of all kinds.
    #[default]
    Data = 0,
    /// Copies of the intent log only (like ZFS' SLOG).
    Log = 1,
    /// Segments of metadata only, preferred over other groups (like ZFS' special vdev).
    Special = 2,
}

/// A group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The group's kind.
    pub kind: GroupKind,
    /// The group's allocation class.
    pub class: GroupClass,
    /// Stripe unit: bytes on one device before a row continues on the next, as a power of two.
    pub unit: u8,
}

/// Role of a device in the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberRole {
    /// A device of its group: locations name its number.
    #[default]
    Own,
    /// An inactive spare.
    Spare,
    /// An active spare, paired with the device of this number, with the same bytes in the same slots.
    SpareFor(u16),
    /// A replacement of the device of this number: paired with it until it has all data, then it takes over its
    /// number.
    Successor(u16),
}

impl MemberRole {
    /// The number of the device that it is paired with.
    #[must_use]
    pub fn beside(self) -> Option<u16> {
        match self {
            Self::Own | Self::Spare => None,
            Self::SpareFor(number) | Self::Successor(number) => Some(number),
        }
    }
}

/// State of a device in the labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberState {
    /// The device's group.
    pub group: u8,
    /// The device's role.
    pub role: MemberRole,
    /// The device's status.
    pub status: MemberStatus,
    /// Whether the device may lack data that it should hold: it was missing when that was written.
    pub stale: bool,
}

/// Status of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum MemberStatus {
    /// In use.
    #[default]
    Online = 0,
    /// Taken offline by the administrator.
    Offline = 1,
    /// Failed; not used any more.
    Faulted = 2,
    /// Removed from the pool; its number stays.
    Removed = 3,
    /// Not part of the pool yet: unless a later label says otherwise, it never becomes one.
    Joining = 4,
}

impl MemberStatus {
    /// Whether the device is part of the pool.
    #[must_use]
    pub fn belongs(self) -> bool {
        !matches!(self, Self::Removed | Self::Joining)
    }
}

/// Minimum stripe unit, as a power of two.
pub const LEAST_UNIT: u8 = 12;
/// Stripe unit of new groups, as a power of two.
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
