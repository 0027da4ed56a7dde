//! `pool check`: everything against everything, and every frame that lives read and verified.

use std::collections::BTreeMap;

use nacre_pool::engine::CheckCounts;
use nacre_pool::store::Store;
use nacre_pool::{Damage, Owner};
use serde::{Deserialize, Serialize};

use crate::{Imported, Progress, Refusal};

/// What a check has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// File systems that were looked at.
    pub datasets: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Inodes.
    pub inodes: u64,
    /// Frames.
    pub frames: u64,
    /// Bytes that were read and verified.
    pub bytes: u64,
    /// What is wrong.
    pub problems: u64,
}

/// A line about a damaged frame: its name, the segment that it has moved to, and whose it is.
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

/// Checks a pool; what is wrong is told as notes.
///
/// # Errors
/// A catalog or a device that cannot be read at all.
pub fn run(pool: &Imported, progress: &mut dyn Progress) -> Result<CheckReport, Refusal> {
    let doing = || format!("cannot check '{}'", pool.name());
    // Whoever does not listen does not keep the check from its end: its count is what is answered.
    let seen = pool.pool.check(&pool.store, pool.read_only, &mut |line| {
        progress.note(line);
    });
    let CheckCounts { datasets, snapshots, inodes, frames, problems, .. } =
        seen.map_err(|error| Refusal::pool(doing(), &error))?;
    let mut found = CheckReport { datasets, snapshots, inodes, frames, bytes: 0, problems };
    let mut headless: BTreeMap<(u32, u32), Damage> = BTreeMap::new();
    let scrubbed = pool.store.scrub(&mut |checked| {
        found.bytes += checked.bytes;
        if let Some(damage) = &checked.damage {
            found.problems += 1;
            if let Some(owner) = checked.owner {
                progress.note(&sentence(&pool.store, checked.name, Some(owner), damage));
            } else {
                headless.insert(checked.name, damage.clone());
            }
        }
        true
    });
    let scrubbed = scrubbed.map_err(|error| Refusal::pool(doing(), &error));
    let owners = pool.pool.owners_of(&headless.keys().copied().collect());
    let owners = owners.map_err(|error| Refusal::pool(doing(), &error))?;
    for (name, damage) in &headless {
        progress.note(&sentence(&pool.store, *name, owners.get(name).copied(), damage));
    }
    scrubbed.map(|()| found)
}
