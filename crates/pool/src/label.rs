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

/// Reads all copies of a device's identity, and writes those anew that are not what they should be; answers how many. Durable when it returns.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written; what cannot be read is written.
pub fn mend_identity(device: &dyn Device, identity: &Identity) -> Result<u64, PoolError> {
    let right = identity.encode()?;
    mend(device, IDENTITY_AT, &right, |block| Identity::decode(block).is_ok_and(|found| found == *identity))
}

/// The same for the root record of a generation, on the devices that have roots: the first whole copy tells how it should be. Where there is none, there is
/// nothing to be done; the next commit writes another root. Answers how many for each device.
///
/// # Errors
/// As [`mend_identity`].
pub fn mend_root(devices: &[std::sync::Arc<dyn Device>], pool: u64, generation: u64) -> Result<Vec<u64>, PoolError> {
    let at = ring_at(generation);
    let copies = devices.iter().flat_map(|device| places(device.length()).into_iter().map(move |place| (device, place)));
    let whole = copies.into_iter().find_map(|(device, place)| {
        let mut record = vec![0; root::LENGTH];
        device.read_at(&mut record, place + at).ok()?;
        Root::decode(&record).ok().filter(|root| root.pool == pool && root.generation == generation)?;
        Some(record)
    });
    let Some(right) = whole else { return Ok(vec![0; devices.len()]) };
    devices.iter().map(|device| mend(&**device, at, &right, |record| record == right)).collect()
}

/// Writes what is right to this place of each label where it is not. One after the other, so that a crash between them leaves the others.
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
