//! Labels: four copies on each device of the pool's identity, and of the ring of root records (like ZFS' uberblocks).
//!
//! The single write that commits a pool is [`write_root`]: everything that the root names is durable before, and
//! valid from then on.
//!
//! Callers: the store (create, open, commit, add) and the search for pools to import. Offsets: 0 and 512 KiB, and the
//! two halves of the last whole MiB. In each: 64 KiB kept free (boot blocks, partition tables), the identity, from 96 KiB
//! on the erasable keys of pools with encrypted file systems, and from 128 KiB on 96 root records of 4 KiB.
//!
//! Invariants:
//! - A label is written in two rounds with a sync between them, so one valid copy always exists.
//! - A root record is written to a position of the ring that the 95 roots before it do not use, and only
//!   after everything that it names is durable.
//! - Where the newest record is guarded, every position of the rings is readable in one copy at least,
//!   even after a power failure: an unreadable position is damage.

mod change;
mod erasable;
mod group;
mod identity;
mod root;
#[cfg(test)]
mod tests;

pub use change::{ChangeKind, ShapeChange};
pub use erasable::{ErasableBlock, clear_former_end, mend_erasable, read_erasable, write_erasable};
pub use group::{Group, GroupClass, GroupKind, MemberRole, MemberState, MemberStatus, UNIT};
pub use identity::{Identity, Member, PoolState, VERSION};
pub use root::{LogStart, MOST_COLUMNS, Place, Root, SlotAddress, TableSegment, UPPER_LIMIT};
pub(crate) use root::{read_places, small, write_places};

use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};

/// Length of one label, bytes.
pub const LENGTH: u64 = 512 << 10;
/// Space of the labels at each end of a device, bytes.
pub const ENDS: u64 = 1 << 20;
/// Offset of the identity in a label, bytes.
pub const IDENTITY_AT: u64 = 64 << 10;
/// Offset of the ring of root records in a label, bytes.
pub const RING_AT: u64 = 128 << 10;
/// Number of positions in the ring.
pub const RING: u64 = 96;

/// Offsets of a device's labels. A device too short for four labels has none.
#[must_use]
pub fn places(length: u64) -> Vec<u64> {
    let whole = length / ENDS * ENDS;
    if whole < 2 * ENDS { Vec::new() } else { vec![0, LENGTH, whole - ENDS, whole - LENGTH] }
}

/// Reads the identity of a device: the newest valid one of its four labels. `None` where there is none.
///
/// # Errors
/// [`PoolError::Device`] if no label could be read at all; [`PoolError::Refused`] for a format that this program does
/// not support.
pub fn probe(device: &dyn Device) -> Result<Option<Identity>, PoolError> {
    let (mut best, mut failure, mut read) = (None::<Identity>, None, false);
    for place in places(device.length()) {
        let mut block = vec![0; identity::LENGTH];
        match device.read_at(&mut block, place + IDENTITY_AT) {
            Ok(()) => read = true,
            Err(error) => {
                failure = Some(failed(device, "reading the label of", error));
                continue;
            }
        }
        match Identity::decode(&block) {
            Ok(found) if best.as_ref().is_none_or(|best| best.revision < found.revision) => best = Some(found),
            Err(PoolError::Refused(why)) => failure = Some(PoolError::Refused(format!("{}: {why}", device.name()))),
            Ok(_) | Err(_) => {}
        }
    }
    match (best, failure) {
        (Some(best), _) => Ok(Some(best)),
        (None, Some(failure @ PoolError::Refused(_))) => Err(failure),
        (None, Some(failure)) if !read => Err(failure),
        (None, _) => Ok(None),
    }
}

/// Whether one of the two labels at the beginning of a device belongs to this pool. If none does, labels at its end
/// may be part of a file that is stored at the end of the device, in a file system.
#[must_use]
pub fn begins(device: &dyn Device, pool: u64) -> bool {
    let mut block = vec![0; identity::LENGTH];
    for place in places(device.length()).into_iter().take(2) {
        let read = device.read_at(&mut block, place + IDENTITY_AT);
        if read.is_ok() && Identity::decode(&block).is_ok_and(|found| found.pool == pool) {
            return true;
        }
    }
    false
}

/// Writes a device's identity to its four labels, in two rounds.
///
/// # Errors
/// [`PoolError::Device`]; [`PoolError::Refused`] for an identity that does not fit.
pub fn write_identity(device: &dyn Device, identity: &Identity) -> Result<(), PoolError> {
    let block = identity.encode()?;
    let places = places(device.length());
    for half in 0..2 {
        for place in places.iter().skip(half).step_by(2) {
            device
                .write_at(&block, place + IDENTITY_AT)
                .map_err(|error| failed(device, "writing the label of", error))?;
        }
        device.sync().map_err(|error| failed(device, "syncing", error))?;
    }
    Ok(())
}

/// Offsets and magic numbers of what other programs look for behind the first MiB: the second headers of LUKS2,
/// VMFS and its volumes.
const FOREIGN: [(u64, &[u8]); 5] = [
    (0x10_0000, b"SKUL\xba\xbe"),
    (0x20_0000, b"SKUL\xba\xbe"),
    (0x40_0000, b"SKUL\xba\xbe"),
    (0x10_0000, &[0x0d, 0xd0, 0x01, 0xc0]),
    (0x20_0000, &[0x5e, 0xf1, 0xab, 0x2f]),
];
/// What is zeroed of such a header, bytes.
const HEADER: u64 = 4 << 10;

/// Writes to the labels' places what lies there: shows whether a device can be written, and changes nothing.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written.
pub fn try_writing(device: &dyn Device) -> Result<(), PoolError> {
    for place in places(device.length()) {
        let mut block = vec![0; identity::LENGTH];
        // What cannot be read has no content that could stay.
        if device.read_at(&mut block, place + IDENTITY_AT).is_ok() {
            device
                .write_at(&block, place + IDENTITY_AT)
                .map_err(|error| failed(device, "writing the label of", error))?;
        }
    }
    device.sync().map_err(|error| failed(device, "syncing", error))
}

/// Zeroes both ends of a device that becomes part of a pool, and the headers of other programs behind them. A
/// superblock or partition table there would still be found, and a mount of it would overwrite the pool. Durable
/// when it returns.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written.
pub fn clear_foreign(device: &dyn Device) -> Result<(), PoolError> {
    let length = device.length();
    let Some(end) = end_of_data(length) else { return Ok(()) };
    let mut ranges = vec![(0, ENDS), (end, length)];
    for (offset, magic) in FOREIGN.into_iter().filter(|(offset, _)| offset + HEADER <= end) {
        let mut there = vec![0; magic.len()];
        if device.read_at(&mut there, offset).is_ok() && there == magic {
            ranges.push((offset, offset + HEADER));
        }
    }
    zero(device, &ranges)
}

/// Zeroes the end of a device of this pool that has become longer, from the first label there on: the copy of a
/// partition table or another program's header may lie there. Labels of this device (its number is `index`) stay: they
/// are in use where the device was longer already when the pool was imported. Durable when it returns.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written.
pub fn clear_new_end(device: &dyn Device, pool: u64, index: u16) -> Result<(), PoolError> {
    let length = device.length();
    let Some(end) = end_of_data(length) else { return Ok(()) };
    let mut ranges = vec![(end + ENDS, length)];
    for place in [end, end + LENGTH] {
        let mut block = vec![0; identity::LENGTH];
        let read = device.read_at(&mut block, place + IDENTITY_AT);
        let is_own = |found: Identity| found.pool == pool && found.index == index;
        if read.is_ok() && Identity::decode(&block).is_ok_and(is_own) {
            ranges.push((place, place + IDENTITY_AT));
            ranges.push((place + IDENTITY_AT + identity::LENGTH as u64, place + RING_AT));
        } else {
            ranges.push((place, place + LENGTH));
        }
    }
    zero(device, &ranges)
}

/// Where the labels at the end of a device begin.
fn end_of_data(length: u64) -> Option<u64> {
    places(length).into_iter().max().map(|last| last + LENGTH - ENDS)
}

/// Zeroes ranges that are not zero.
fn zero(device: &dyn Device, ranges: &[(u64, u64)]) -> Result<(), PoolError> {
    let mut written = false;
    for (from, to) in ranges.iter().copied() {
        let zeros = vec![0; (to - from) as usize];
        let mut there = zeros.clone();
        if device.read_at(&mut there, from).is_ok() && there == zeros {
            continue;
        }
        device.write_at(&zeros, from).map_err(|error| failed(device, "writing the label of", error))?;
        written = true;
    }
    if written {
        device.sync().map_err(|error| failed(device, "syncing", error))?;
    }
    Ok(())
}

/// Writes the first labels of a device that becomes part of a pool; erases signatures of other file systems
/// ([`clear_foreign`]).
///
/// # Errors
/// As [`write_identity`].
pub fn write_first_identity(device: &dyn Device, identity: &Identity) -> Result<(), PoolError> {
    identity.check()?;
    clear_foreign(device)?;
    write_identity(device, identity)
}

/// Records by position in a ring.
type Ring = Vec<Option<Vec<u8>>>;

/// Round of a label write: a sync separates the first round from the second, and the second from the first one of the
/// next record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Labels 0 and 2.
    First,
    /// Labels 1 and 3.
    Second,
}

/// Writes a root record to two of a device's four labels; not synced.
///
/// # Errors
/// [`PoolError::Device`].
pub fn write_root(device: &dyn Device, generation: u64, record: &[u8], round: Round) -> Result<(), PoolError> {
    for place in places(device.length()).into_iter().skip(usize::from(round == Round::Second)).step_by(2) {
        device
            .write_at(record, place + ring_at(generation))
            .map_err(|error| failed(device, "writing the label of", error))?;
    }
    Ok(())
}

/// Verifies all copies of a device's identity, and rewrites those that differ; returns their number. Durable when it
/// returns.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written; unreadable copies are rewritten.
pub fn mend_identity(device: &dyn Device, identity: &Identity) -> Result<u64, PoolError> {
    let right = identity.encode()?;
    mend(device, IDENTITY_AT, &right, |block| Identity::decode(block).is_ok_and(|found| found == *identity))
}

/// Completes the rings of the devices that hold roots: writes the newest record to its own position wherever it is
/// missing, and to every other position without a record of this pool. Durable when it returns. Without any record
/// there is nothing to do. Returns the number of written records for each device, or the error.
pub fn mend_rings(devices: &[std::sync::Arc<dyn Device>], pool: u64) -> Vec<Result<u64, PoolError>> {
    let none = || vec![None; RING as usize];
    let rings = |device: &dyn Device| {
        let rings =
            places(device.length()).into_iter().map(|place| (place, ring(device, place).unwrap_or_else(|_| none())));
        rings.collect::<Vec<_>>()
    };
    let found: Vec<_> = devices.iter().map(|device| rings(&**device)).collect();
    let generation =
        |record: &[u8]| Root::decode(record).ok().filter(|root| root.pool == pool).map(|root| root.generation);
    let records = found.iter().flatten().flat_map(|(_, records)| records.iter().flatten());
    let newest =
        records.filter_map(|record| Some((generation(record)?, record))).max_by_key(|(generation, _)| *generation);
    let Some((newest, right)) = newest else { return devices.iter().map(|_| Ok(0)).collect() };
    let is_right = |at: usize, record: &Option<Vec<u8>>| match record {
        Some(record) if at as u64 == newest % RING => record == right,
        Some(record) => generation(record).is_some(),
        None => false,
    };
    let mend = |(device, rings): (&std::sync::Arc<dyn Device>, &Vec<(u64, Ring)>)| {
        let mut mended = 0;
        // One label after the other, so that a crash in between leaves the others intact.
        for (place, records) in rings {
            let wrong: Vec<usize> =
                records.iter().enumerate().filter(|(at, record)| !is_right(*at, record)).map(|(at, _)| at).collect();
            for run in wrong.chunk_by(|at, next| at + 1 == *next) {
                let offset = place + ring_at(run.first().map_or(0, |at| *at as u64));
                device
                    .write_at(&right.repeat(run.len()), offset)
                    .map_err(|error| failed(&**device, "writing the label of", error))?;
            }
            if !wrong.is_empty() {
                device.sync().map_err(|error| failed(&**device, "syncing", error))?;
                mended += wrong.len() as u64;
            }
        }
        Ok(mended)
    };
    devices.iter().zip(&found).map(mend).collect()
}

/// Number of states after this root that are lost: their records are unreadable in all copies, which a power failure
/// does not do to guarded rings.
#[must_use]
pub fn lost(devices: &[std::sync::Arc<dyn Device>], newest: &Root) -> u64 {
    let is_there = |generation: u64| {
        let mut copies =
            devices.iter().flat_map(|device| places(device.length()).into_iter().map(move |place| (device, place)));
        copies.any(|(device, place)| {
            let mut record = vec![0; root::LENGTH];
            let read = device.read_at(&mut record, place + ring_at(generation));
            read.is_ok() && Root::decode(&record).is_ok_and(|root| root.pool == newest.pool)
        })
    };
    if newest.guarded { (1..RING).take_while(|after| !is_there(newest.generation + after)).count() as u64 } else { 0 }
}

/// Reads the records of a label's ring, as far as the device returns them.
fn ring(device: &dyn Device, place: u64) -> std::io::Result<Ring> {
    let mut ring = vec![0; root::LENGTH * RING as usize];
    let Err(error) = device.read_at(&mut ring, place + RING_AT) else {
        return Ok(ring.chunks(root::LENGTH).map(|record| Some(record.to_vec())).collect());
    };
    // An unreadable sector must not cost the other records.
    let one = |at| {
        let mut record = vec![0; root::LENGTH];
        device.read_at(&mut record, place + ring_at(at)).is_ok().then_some(record)
    };
    let records: Ring = (0..RING).map(one).collect();
    if records.iter().all(Option::is_none) { Err(error) } else { Ok(records) }
}

/// Writes the right bytes to this offset of each label where they differ, one label after the other, so that a crash
/// in between leaves the others intact.
fn mend(device: &dyn Device, at: u64, right: &[u8], is_right: impl Fn(&[u8]) -> bool) -> Result<u64, PoolError> {
    let mut mended = 0;
    for place in places(device.length()) {
        let mut found = vec![0; right.len()];
        if device.read_at(&mut found, place + at).is_err() || !is_right(&found) {
            device.write_at(right, place + at).map_err(|error| failed(device, "writing the label of", error))?;
            device.sync().map_err(|error| failed(device, "syncing", error))?;
            mended += 1;
        }
    }
    Ok(mended)
}

fn ring_at(generation: u64) -> u64 {
    RING_AT + generation % RING * root::LENGTH as u64
}

/// Reads all valid roots of this pool from a device, each once, oldest first.
///
/// # Errors
/// [`PoolError::Device`] if no label could be read.
pub fn roots(device: &dyn Device, pool: u64) -> Result<Vec<Root>, PoolError> {
    let mut found = std::collections::BTreeMap::new();
    let (mut failure, mut read) = (None, false);
    for place in places(device.length()) {
        let records = match ring(device, place) {
            Ok(records) => records,
            Err(error) => {
                failure = Some(failed(device, "reading the label of", error));
                continue;
            }
        };
        read = true;
        for record in records.into_iter().flatten() {
            if let Ok(root) = Root::decode(&record)
                && root.pool == pool
            {
                found.entry(root.generation).or_insert(root);
            }
        }
    }
    match failure {
        Some(failure) if !read => Err(failure),
        _ => Ok(found.into_values().collect()),
    }
}

/// Removes a device from any pool, durably: zeroes the identities and root records of all four labels.
///
/// # Errors
/// [`PoolError::Device`].
pub fn clear(device: &dyn Device) -> Result<(), PoolError> {
    let zeros = vec![0; (LENGTH - IDENTITY_AT) as usize];
    for place in places(device.length()) {
        device.write_at(&zeros, place + IDENTITY_AT).map_err(|error| failed(device, "writing the label of", error))?;
    }
    device.sync().map_err(|error| failed(device, "syncing", error))
}

/// Zeroes the root records of a device, durably.
///
/// # Errors
/// [`PoolError::Device`].
pub fn clear_roots(device: &dyn Device) -> Result<(), PoolError> {
    let zeros = vec![0; (RING * root::LENGTH as u64) as usize];
    for place in places(device.length()) {
        device.write_at(&zeros, place + RING_AT).map_err(|error| failed(device, "writing the label of", error))?;
    }
    device.sync().map_err(|error| failed(device, "syncing", error))
}

fn structure<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}
