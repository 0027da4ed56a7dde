//! Labels: four copies on each device of who the pool is, and of the ring of root records.
//!
//! Callers: the store (create, open, commit, add) and whoever looks for pools to import. The places: 0 and 512 KiB, and the two halves of the
//! last whole MiB. In each: 64 KiB kept free (boot blocks, partition tables), the identity, and from 128 KiB on 96 root records of 4 KiB.
//!
//! Invariants:
//! - A label is written in two rounds with a sync between them, so one good copy is always there.
//! - A root record is written to a place of the ring that the 95 roots before it do not use, and only after all it names is durable.

mod identity;
mod root;
#[cfg(test)]
mod tests;

pub use identity::{Identity, Member, PoolState, VERSION};
pub use root::{LogStart, Place, Root, TableSegment, UPPER_LIMIT};
pub(crate) use root::{read_places, small, write_places};

use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};

/// Length of one label, bytes.
pub const LENGTH: u64 = 512 << 10;
/// What the labels take at each end of a device, bytes.
pub const ENDS: u64 = 1 << 20;
/// Where the identity is in a label, bytes.
pub const IDENTITY_AT: u64 = 64 << 10;
/// Where the ring of root records is in a label, bytes.
pub const RING_AT: u64 = 128 << 10;
/// Places in the ring.
pub const RING: u64 = 96;

/// Where a device's labels begin. A device too short for four labels has none.
#[must_use]
pub fn places(length: u64) -> Vec<u64> {
    let whole = length / ENDS * ENDS;
    if whole < 2 * ENDS { Vec::new() } else { vec![0, LENGTH, whole - ENDS, whole - LENGTH] }
}

/// Reads who a device belongs to: the newest valid identity of its four. `None` where there is none.
///
/// # Errors
/// [`PoolError::Device`] if no label could be read at all; [`PoolError::Refused`] for a format that this program is too old for.
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

/// Writes a device's identity to its four labels, two and two.
///
/// # Errors
/// [`PoolError::Device`]; [`PoolError::Refused`] for an identity that does not fit.
pub fn write_identity(device: &dyn Device, identity: &Identity) -> Result<(), PoolError> {
    let block = identity.encode()?;
    let places = places(device.length());
    for half in 0..2 {
        for place in places.iter().skip(half).step_by(2) {
            device.write_at(&block, place + IDENTITY_AT).map_err(|error| failed(device, "writing the label of", error))?;
        }
        device.sync().map_err(|error| failed(device, "syncing", error))?;
    }
    Ok(())
}

/// Writes a root record to a device's four labels; not synced.
///
/// # Errors
/// [`PoolError::Device`].
pub fn write_root(device: &dyn Device, generation: u64, record: &[u8]) -> Result<(), PoolError> {
    for place in places(device.length()) {
        device.write_at(record, place + ring_at(generation)).map_err(|error| failed(device, "writing the label of", error))?;
    }
    Ok(())
}

fn ring_at(generation: u64) -> u64 {
    RING_AT + generation % RING * root::LENGTH as u64
}

/// All valid roots of this pool on a device, each once, oldest first.
///
/// # Errors
/// [`PoolError::Device`] if no label could be read.
pub fn roots(device: &dyn Device, pool: u64) -> Result<Vec<Root>, PoolError> {
    let mut found = std::collections::BTreeMap::new();
    let (mut failure, mut read) = (None, false);
    for place in places(device.length()) {
        let mut ring = vec![0; root::LENGTH * RING as usize];
        if let Err(error) = device.read_at(&mut ring, place + RING_AT) {
            failure = Some(failed(device, "reading the label of", error));
            continue;
        }
        read = true;
        for record in ring.chunks(root::LENGTH) {
            if let Ok(root) = Root::decode(record)
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

/// Makes a device one that belongs to no pool, durably: identities and root records of all four labels are zeroed.
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

fn structure<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}
