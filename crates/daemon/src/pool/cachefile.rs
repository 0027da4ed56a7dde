//! Cache files with the devices of pools: the property `cachefile`, `import -c FILE`. Only files that a command
//! line names are written, never those that a pool's properties name: the author of a pool must not choose files on
//! the machine that imports it.
//!
//! A hint, like [`super::known`]: the devices are authoritative.

use super::client;
use crate::{
    failure::{Exit, Failure},
    whole_file,
};
use nacre_admin::pool::{PoolAnswer, PoolRequest};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Content of a cache file: pools by GUID.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    nacre_pools: BTreeMap<u64, Pool>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Pool {
    name: String,
    devices: Vec<PathBuf>,
}

fn read(path: &Path) -> Result<Content, Failure> {
    let text = fs::read(path).map_err(|error| Failure::io("cannot open", path.display(), &error))?;
    if text.is_empty() {
        return Ok(Content::default());
    }
    serde_json::from_slice(&text).map_err(|_| {
        Failure::new(format!("cannot read '{}': it is no cache file of pools of nacre", path.display()))
            .next("`nacre pool set cachefile=FILE POOL` makes one")
    })
}

/// Returns the devices in a cache file, each with its pool's GUID.
///
/// # Errors
/// The file cannot be read, or is no cache file.
pub fn devices(path: &Path) -> Result<Vec<(PathBuf, u64)>, Failure> {
    let pools = read(path)?.nacre_pools.into_iter();
    Ok(pools.flat_map(|(guid, pool)| pool.devices.into_iter().map(move |device| (device, guid))).collect())
}

/// Returns the file named by `cachefile` among the properties of a command line.
pub fn of(properties: &[(String, String)]) -> Option<PathBuf> {
    let named = properties.iter().rev().find(|(name, _)| name == "cachefile").map(|(_, value)| value);
    named.filter(|value| value.starts_with('/')).map(PathBuf::from)
}

/// Records the devices of an imported pool in the file.
///
/// # Errors
/// It cannot be written, or is no cache file; the pool is imported all the same.
pub fn keep(path: &Path, pool: &str) -> Result<(), Failure> {
    let PoolAnswer::Listed(figures) = client::owned(pool)?.pool("", PoolRequest::List, &mut |_| {})? else {
        return Ok(());
    };
    let mut content = match read(path) {
        Err(failure) if failure.exit == Exit::NotFound => Content::default(),
        read => read?,
    };
    let devices = figures.devices.iter().map(|device| PathBuf::from(&device.path)).collect();
    content.nacre_pools.insert(figures.guid, Pool { name: figures.name.clone(), devices });
    let failed = |error: io::Error| Failure::io("cannot write down where the pool lies in", path.display(), &error);
    let text = serde_json::to_vec(&content).map_err(|error| failed(error.into()))?;
    let mut unready = path.as_os_str().to_owned();
    unready.push(format!(".{}", std::process::id()));
    let options = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).clone();
    whole_file::replace(path, Path::new(&unready), &options, &text).map_err(failed)
}
