//! The identity block of a label: the pool, this device, and the other devices of the pool.

use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::PoolError;
use crate::names::Name;

use super::change::ShapeChange;
use super::group::{Group, GroupKind, MemberRole, MemberState};
use super::structure;

/// Length of the block, bytes.
pub(super) const LENGTH: usize = 32 << 10;
const MAGIC: [u8; 8] = *b"nacrePOO";
/// The format version that this program writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// State of a pool: whether it was exported cleanly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PoolState {
    /// In use, or its user crashed.
    Active = 1,
    /// Exported: may be imported anywhere.
    Exported = 2,
    /// Destroyed: imported only on explicit request.
    Destroyed = 3,
}

/// A device of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The device's GUID, which never changes.
    pub guid: u64,
    /// The device's length as used by the pool, bytes.
    pub length: u64,
    /// The device's last known path, in bytes; only a hint.
    pub path: Vec<u8>,
    /// The device's group and state; not stored in pools without groups.
    pub state: MemberState,
}

impl Member {
    /// Whether it is a device of its group: not a spare, not removed, and not joining.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.state.role == MemberRole::Own && self.state.status.belongs()
    }
}

/// The identity block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Grows with every label write; the newest one is valid.
    pub revision: u64,
    /// Features that every user of the pool must support.
    pub incompatible: u64,
    /// Features that a writer must support.
    pub read_only_compatible: u64,
    /// Features that no program has to support.
    pub compatible: u64,
    /// The pool's GUID.
    pub pool: u64,
    /// The pool's name.
    pub name: String,
    /// The pool's state.
    pub state: PoolState,
    /// The machine that has or had the pool: its number and name.
    pub host: (u64, String),
    /// Time of this label, seconds since 1970.
    pub time: u64,
    /// Length of slots, bytes.
    pub slot: u64,
    /// Number of this device among the members.
    pub index: u16,
    /// All devices of the pool.
    pub members: Vec<Member>,
    /// The groups; empty in pools without groups ([`Identity::GROUPS`]).
    pub groups: Vec<Group>,
    /// The topology change in progress; `None` in pools that never had one ([`Identity::SHAPES`]).
    pub change: Option<ShapeChange>,
}

impl Identity {
    /// Incompatible feature: metadata is written twice.
    pub const REDUNDANT_METADATA: u64 = 1;
    /// Incompatible feature: file systems may use the ordered name hash, by which names with neighbouring numbers are
    /// adjacent ([`crate::rows::keys::ordered_hash`]).
    pub const ORDERED_NAMES: u64 = 2;
    /// Incompatible feature: file systems may treat different spellings of a name as equal (case, normalization;
    /// [`crate::rows::Folding`]).
    pub const FOLDED: u64 = 4;
    /// Incompatible feature: devices are in groups with copies or parity.
    pub const GROUPS: u64 = 8;
    /// Incompatible feature: groups may hold metadata only ([`GroupClass::Special`](super::GroupClass::Special)).
    pub const CLASSES: u64 = 16;

    /// Incompatible feature: groups may change their topology.
    pub const SHAPES: u64 = 32;

    /// Incompatible feature: the segment table is stored in pages.
    pub const PAGED_TABLE: u64 = 64;

    /// Incompatible feature: inodes record the charged size of their rows
    /// ([`crate::rows::InodeRow::encode_charged`]).
    pub const ROW_CHARGES: u64 = 128;

    /// Length of an encoded identity, bytes.
    pub(crate) const LENGTH: usize = LENGTH;

    /// Incompatible feature: frames may be sealed (encrypted), in the unfinished form of this version; for tests.
    pub const UNFINISHED_ENCRYPTION: u64 = 1 << 62;

    const KNOWN: u64 = Self::REDUNDANT_METADATA
        | Self::ORDERED_NAMES
        | Self::FOLDED
        | Self::GROUPS
        | Self::CLASSES
        | Self::SHAPES
        | Self::PAGED_TABLE
        | Self::ROW_CHARGES
        | Self::UNFINISHED_ENCRYPTION;

    /// Checks that the identity fits the labels.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where there are too many devices, or names are too long.
    pub fn check(&self) -> Result<(), PoolError> {
        self.encode().map(drop)
    }

    /// Number of devices of a group that may be missing.
    #[must_use]
    pub fn parity(&self, group: u8) -> usize {
        let members = self.members.iter().filter(|member| member.state.group == group && member.is_own());
        let changing = self.change.as_ref().filter(|change| change.group == group);
        let most = changing.map_or(usize::MAX, |change| usize::from(change.tolerance));
        let parity = match self.groups.get(usize::from(group)).map(|group| group.kind) {
            Some(GroupKind::Mirror) => members.count().saturating_sub(1),
            Some(GroupKind::RaidZ(parity)) => usize::from(parity),
            Some(GroupKind::Plain) | None => 0,
        };
        parity.min(most)
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, PoolError> {
        let mut body = Writer::default();
        body.u32(VERSION);
        for number in [self.revision, self.incompatible, self.read_only_compatible, self.compatible, self.pool] {
            body.u64(number);
        }
        body.string(self.name.as_bytes());
        body.u8(self.state as u8);
        body.u64(self.host.0);
        body.string(self.host.1.as_bytes());
        body.u64(self.time);
        body.u64(self.slot);
        body.u16(self.index);
        let count = u16::try_from(self.members.len()).map_err(|_| PoolError::Refused("too many devices".to_owned()))?;
        body.u16(count);
        for member in &self.members {
            body.u64(member.guid);
            body.u64(member.length);
            body.string(&member.path);
        }
        if self.incompatible & Self::GROUPS != 0 {
            let groups = u8::try_from(self.groups.len());
            body.u8(groups.map_err(|_| PoolError::Refused("too many groups of devices".to_owned()))?);
            self.groups.iter().for_each(|group| group.encode(&mut body));
            self.members.iter().for_each(|member| member.state.encode(&mut body));
        }
        if self.incompatible & Self::SHAPES != 0 {
            ShapeChange::encode(self.change.as_ref(), &mut body);
        }
        let mut body = body.finish();
        if body.len() > LENGTH - 24 {
            return Err(PoolError::Refused("the names of the pool's devices do not fit its labels".to_owned()));
        }
        body.resize(LENGTH - 24, 0);
        let mut block = Writer::default();
        block.bytes(&MAGIC);
        block.bytes(&checksum::structure(&body));
        block.bytes(&body);
        Ok(block.finish())
    }

    pub(crate) fn decode(block: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(block);
        if from.array()? != MAGIC {
            return structure("no label");
        }
        let sum: [u8; 16] = from.array()?;
        let body = from.take(LENGTH - 24)?;
        if checksum::structure(body) != sum {
            return structure("the label's checksum does not fit");
        }
        Self::decode_body(&mut Reader::new(body))
    }

    fn decode_body(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let version = from.u32()?;
        if version != VERSION {
            return Err(PoolError::Refused(format!(
                "the pool has format {version}; this program knows format {VERSION}"
            )));
        }
        let (revision, incompatible) = (from.u64()?, from.u64()?);
        let unknown = incompatible & !Self::KNOWN;
        if unknown != 0 {
            return Err(PoolError::Refused(format!(
                "the pool uses features that this program does not know: {unknown:#x}"
            )));
        }
        let (read_only_compatible, compatible, pool) = (from.u64()?, from.u64()?, from.u64()?);
        let name = text(from)?;
        // The name becomes part of paths.
        if Name::filesystem(&name).is_err() || name.contains('/') {
            return structure("the name of a pool");
        }
        let state = match from.u8()? {
            1 => PoolState::Active,
            2 => PoolState::Exported,
            3 => PoolState::Destroyed,
            _ => return structure("unknown state of a pool"),
        };
        let host = (from.u64()?, text(from)?);
        let (time, slot, index, count) = (from.u64()?, from.u64()?, from.u16()?, from.u16()?);
        if !slot.is_power_of_two() || !(1 << 20..=1 << 26).contains(&slot) {
            return structure("impossible length of slots");
        }
        if index >= count {
            return structure("impossible number of a device");
        }
        let mut members = Vec::new();
        for _ in 0..count {
            let (guid, length, path) = (from.u64()?, from.u64()?, from.string()?.to_vec());
            members.push(Member { guid, length, path, state: MemberState::default() });
        }
        let mut groups = Vec::new();
        if incompatible & Self::GROUPS != 0 {
            for _ in 0..from.u8()? {
                groups.push(Group::decode(from)?);
            }
            for member in &mut members {
                member.state = MemberState::decode(from, groups.len())?;
            }
            let is_own = |number: u16| {
                members.get(usize::from(number)).is_some_and(|member| member.state.role == MemberRole::Own)
            };
            if members.iter().filter_map(|member| member.state.role.beside()).any(|number| !is_own(number)) {
                return structure("a device that stands beside none");
            }
        }
        let change = match incompatible & Self::SHAPES {
            0 => None,
            _ => ShapeChange::decode(from, groups.len(), members.len())?,
        };
        Ok(Self {
            revision,
            incompatible,
            read_only_compatible,
            compatible,
            pool,
            name,
            state,
            host,
            time,
            slot,
            index,
            members,
            groups,
            change,
        })
    }
}

fn text(from: &mut Reader<'_>) -> Result<String, PoolError> {
    match std::str::from_utf8(from.string()?) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => structure("a name that is not UTF-8"),
    }
}
