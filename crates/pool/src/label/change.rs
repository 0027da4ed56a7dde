//! A topology change in progress: segments written before it stay in the old layout until they are moved.
//!
//! Callers: identity blocks, and the backend of devices. Invariant: one at a time.

use crate::codec::{Reader, Writer};
use crate::error::PoolError;

use super::structure;

/// Kind of a topology change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    /// Devices are removed.
    Removal = 1,
    /// A raidz group becomes wider.
    Expansion = 2,
    /// A group becomes one of another kind.
    Conversion = 3,
}

/// A topology change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeChange {
    /// Kind of the change.
    pub kind: ChangeKind,
    /// The group that changes, or that the devices leave.
    pub group: u8,
    /// Segments with lower numbers may be in the old layout.
    pub before: u32,
    /// Maximum number of devices that the group can lose meanwhile.
    pub tolerance: u8,
    /// Devices that take no new segments, and leave at the end.
    pub leaving: Vec<u16>,
}

impl ShapeChange {
    pub(super) fn encode(change: Option<&Self>, to: &mut Writer) {
        let Some(change) = change else { return to.u8(0) };
        to.u8(change.kind as u8);
        to.u8(change.group);
        to.u32(change.before);
        to.u8(change.tolerance);
        to.u16(change.leaving.len() as u16);
        change.leaving.iter().for_each(|device| to.u16(*device));
    }

    /// Decodes a change in a pool with this many groups and devices.
    pub(super) fn decode(from: &mut Reader<'_>, groups: usize, devices: usize) -> Result<Option<Self>, PoolError> {
        let kind = match from.u8()? {
            0 => return Ok(None),
            1 => ChangeKind::Removal,
            2 => ChangeKind::Expansion,
            3 => ChangeKind::Conversion,
            _ => return structure("an unknown change of shape"),
        };
        let (group, before, tolerance, count) = (from.u8()?, from.u32()?, from.u8()?, from.u16()?);
        let leaving = (0..count).map(|_| from.u16()).collect::<Result<Vec<u16>, PoolError>>()?;
        if usize::from(group) >= groups || leaving.iter().any(|device| usize::from(*device) >= devices) {
            return structure("a change of shape of what there is not");
        }
        Ok(Some(Self { kind, group, before, tolerance, leaving }))
    }
}
