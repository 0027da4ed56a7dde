//! What is damaged, by name: `pool/fs:/path` of files, as `zpool status -v` shows it.

use std::path::Path;

use nacre_pool::PoolError;
use nacre_pool::engine::FilePath;

use crate::mounts::Mounted;
use crate::watch::{Found, Spot};
use crate::{Imported, Mounts};

/// A line for each damaged file or tree.
#[must_use]
pub fn names(pool: &Imported, mounts: &dyn Mounts, found: &Found) -> Vec<String> {
    let mounted = mounts.mounted();
    let mut lines: Vec<String> = found.spots.iter().map(|(spot, _)| name(pool, &mounted, *spot)).collect();
    lines.extend(found.lost.iter().map(|(segment, index)| format!("<frame {segment}:{index}, whose header is damaged as well>")));
    if found.more > 0 {
        lines.push(format!("<{} more frames>", found.more));
    }
    lines
}

fn name(pool: &Imported, mounted: &[Mounted], spot: Spot) -> String {
    if spot.dataset == 0 {
        return "<metadata>:<catalog>".to_owned();
    }
    let Ok(dataset) = pool.pool.look().name(spot.dataset) else { return format!("<{:#x}>:<{:#x}>", spot.dataset, spot.object) };
    if spot.object == 0 {
        return format!("{dataset}:<metadata>");
    }
    match pool.pool.path_of(spot.dataset, spot.object) {
        Ok(Some(FilePath { snapshot: None, path })) => {
            let path = String::from_utf8_lossy(&path).into_owned();
            let at = mounted.iter().find(|mounted| mounted.what == crate::What::head(spot.dataset)).map(|mounted| mounted.at.as_path());
            at.map_or_else(|| format!("{dataset}:/{path}"), |at| Path::new(at).join(&path).display().to_string())
        }
        Ok(Some(FilePath { snapshot: Some(snapshot), path })) => format!("{dataset}@{snapshot}:/{}", String::from_utf8_lossy(&path)),
        Ok(None) | Err(PoolError::Frame { .. }) => format!("{dataset}:<{:#x}>", spot.object),
        Err(error) => format!("{dataset}:<{:#x}> ({error})", spot.object),
    }
}
