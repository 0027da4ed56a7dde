//! `pool check`: everything against everything, and every frame that lives read and verified.

use nacre_pool::engine::CheckCounts;
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
    let scrubbed = pool.store.scrub(&mut |checked| {
        found.bytes += checked.bytes;
        if let Some(damage) = &checked.damage {
            found.problems += 1;
            let whose = checked.owner.map_or_else(String::new, |owner| {
                format!(" (dataset {}, object {}, offset {})", owner.dataset, owner.object, owner.offset)
            });
            progress.note(&format!("frame {}:{}{whose}: {damage}", checked.name.0, checked.name.1));
        }
        true
    });
    scrubbed.map_err(|error| Refusal::pool(doing(), &error))?;
    Ok(found)
}
