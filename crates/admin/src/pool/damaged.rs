//! Damaged files by name: `pool/fs:/path`, as `zpool status -v` shows them.

use std::path::Path;

use nacre_pool::PoolError;
use nacre_pool::engine::FilePath;

use crate::mounts::Mounted;
use crate::watch::{DamageFound, Spot};
use crate::{Imported, Mounts};

/// Returns a line for each damaged file or tree.
#[must_use]
pub fn names(pool: &Imported, mounts: &dyn Mounts, found: &DamageFound) -> Vec<String> {
    let mounted = mounts.mounted();
    let mut lines = Vec::new();
    // They are in the order of their datasets.
    for spots in found.spots.chunk_by(|(a, _), (b, _)| a.dataset == b.dataset) {
        let spots: Vec<Spot> = spots.iter().map(|(spot, _)| *spot).collect();
        lines.extend(names_in(pool, &mounted, &spots));
    }
    lines.extend(
        found.lost.iter().map(|(segment, index)| format!("<frame {segment}:{index}, whose header is damaged as well>")),
    );
    if found.more > 0 {
        lines.push(format!("<{} more frames>", found.more));
    }
    lines
}

/// Searches the owners of frames whose headers do not name them.
pub fn seek(pool: &Imported) {
    let wanted = pool.watch.to_seek();
    if wanted.is_empty() {
        return;
    }
    match pool.pool.owners_of(&wanted) {
        Ok(owners) => pool.watch.found(&owners),
        Err(error) => tracing::warn!(%error, "damaged frames cannot be looked for"),
    }
}

/// Returns the lines for damage in one dataset.
fn names_in(pool: &Imported, mounted: &[Mounted], spots: &[Spot]) -> Vec<String> {
    let Some(Spot { dataset: number, .. }) = spots.first() else { return Vec::new() };
    if *number == 0 {
        return spots.iter().map(|_| "<metadata>:<catalog>".to_owned()).collect();
    }
    let Ok(dataset) = pool.pool.catalog_view().name(*number) else {
        return spots.iter().map(|spot| format!("<{:#x}>:<{:#x}>", spot.dataset, spot.object)).collect();
    };
    let objects: Vec<u64> = spots.iter().map(|spot| spot.object).filter(|object| *object != 0).collect();
    let mut paths = match pool.pool.paths_of(*number, &objects) {
        Ok(paths) => paths.into_iter(),
        Err(error) => vec![Err(error); objects.len()].into_iter(),
    };
    let line = |spot: &Spot| match spot.object {
        0 => format!("{dataset}:<metadata>"),
        _ => name(mounted, &dataset, *spot, paths.next().unwrap_or(Ok(None))),
    };
    spots.iter().map(line).collect()
}

fn name(mounted: &[Mounted], dataset: &str, spot: Spot, path: Result<Option<FilePath>, PoolError>) -> String {
    match path {
        Ok(Some(FilePath { snapshot: None, path })) => {
            let path = String::from_utf8_lossy(&path).into_owned();
            let at = mounted
                .iter()
                .find(|mounted| mounted.what == crate::What::head(spot.dataset))
                .map(|mounted| mounted.at.as_path());
            at.map_or_else(|| format!("{dataset}:/{path}"), |at| Path::new(at).join(&path).display().to_string())
        }
        Ok(Some(FilePath { snapshot: Some(snapshot), path })) => {
            format!("{dataset}@{snapshot}:/{}", String::from_utf8_lossy(&path))
        }
        Ok(None) | Err(PoolError::Frame { .. }) => format!("{dataset}:<{:#x}>", spot.object),
        Err(error) => format!("{dataset}:<{:#x}> ({error})", spot.object),
    }
}
