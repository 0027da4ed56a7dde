//! `pool check`: checks all metadata for consistency, and reads and verifies every live frame.
//!
//! Invariant: no line waits for its reader while the engine's administration lock is held.

use std::collections::BTreeMap;

use nacre_pool::engine::CheckCounts;
use nacre_pool::store::Store;
use nacre_pool::{Damage, Owner};
use serde::{Deserialize, Serialize};

use crate::progress::ResultLines;
use crate::{Imported, Progress, Refusal};

/// Result of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Checked file systems.
    pub datasets: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Inodes.
    pub inodes: u64,
    /// Frames.
    pub frames: u64,
    /// Bytes that were read and verified.
    pub bytes: u64,
    /// Number of inconsistencies and damaged frames.
    pub problems: u64,
}

/// Returns a line about a damaged frame: its name, the segment that it has moved to, and its owner.
fn sentence(store: &Store, name: (u32, u32), owner: Option<Owner>, damage: &Damage) -> String {
    let whose = owner.map_or_else(String::new, |owner| {
        format!(" (dataset {}, object {}, offset {})", owner.dataset, owner.object, owner.offset)
    });
    let moved = match store.segments_of([&name]).pop_first() {
        Some(holder) if holder != name.0 => format!(", moved to segment {holder}"),
        _ => String::new(),
    };
    format!("frame {}:{}{moved}{whose}: {damage}", name.0, name.1)
}

/// Checks a pool; problems are sent as notes.
///
/// # Errors
/// A catalog or a device that cannot be read at all.
pub fn run(pool: &Imported, progress: &mut dyn Progress) -> Result<CheckReport, Refusal> {
    let doing = || format!("cannot check '{}'", pool.name());
    let mut lines = ResultLines::to(progress);
    let mut found = Vec::new();
    let seen = pool.pool.check(&pool.store, pool.read_only, &mut |line| found.push(line.to_owned()));
    for line in &found {
        lines.send(line);
    }
    lines.end(&doing())?;
    let CheckCounts { datasets, snapshots, inodes, frames, problems, .. } =
        seen.map_err(|error| Refusal::pool(doing(), &error))?;
    let mut found = CheckReport { datasets, snapshots, inodes, frames, bytes: 0, problems };
    let mut headless: BTreeMap<(u32, u32), Damage> = BTreeMap::new();
    let scrubbed = pool.store.scrub(&mut |checked| {
        found.bytes += checked.bytes;
        if let Some(damage) = &checked.damage {
            found.problems += 1;
            if let Some(owner) = checked.owner {
                return lines.send(&sentence(&pool.store, checked.name, Some(owner), damage));
            }
            headless.insert(checked.name, damage.clone());
        }
        true
    });
    let scrubbed = scrubbed.map_err(|error| Refusal::pool(doing(), &error));
    let owners = pool.pool.owners_of(&headless.keys().copied().collect());
    let owners = owners.map_err(|error| Refusal::pool(doing(), &error))?;
    for (name, damage) in &headless {
        lines.send(&sentence(&pool.store, *name, owners.get(name).copied(), damage));
    }
    lines.end(&doing())?;
    scrubbed.map(|()| found)
}
