//! A change of a pool's shape that is under way: what was written before it lies as it did until it is
//! moved.
//!
//! Callers: identity blocks, and the backend of devices. Invariant: one at a time.

use crate::codec::{Reader, Writer};
use crate::error::PoolError;

use super::structure;

/// What a change of shape makes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    /// Devices leave.
    Removal = 1,
    /// A group of rows has become wider.
    Expansion = 2,
    /// A group has become one of another kind.
    Conversion = 3,
}

/// A change of shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeChange {
    /// What it makes of the pool.
    pub kind: ChangeKind,
    /// The group that becomes another, or that the devices leave.
    pub group: u8,
    /// Segments of lower numbers may lie as they did before.
    pub before: u32,
    /// So many devices of the group may be lost meanwhile, at most.
    pub tolerance: u8,
    /// Devices that take nothing new, and leave at the end.
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

    /// Of a pool with so many groups and devices.
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
