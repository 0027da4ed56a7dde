//! Where the pools of this user lay when they were last imported: so that `nacre pool import` finds pools on files without being told.
//!
//! One file per pool in the directory for what survives a reboot. A hint only: what counts is on the devices.

use crate::{cage, failure::Failure};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
};

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    name: String,
    devices: Vec<PathBuf>,
}

fn directory() -> Option<PathBuf> {
    Some(cage::state::base()?.join("pools"))
}

fn file(guid: u64) -> Option<PathBuf> {
    Some(directory()?.join(format!("{guid:016x}.json")))
}

/// Keeps where a pool lies.
///
/// # Errors
/// It cannot be written; the pool is imported all the same.
pub fn keep(guid: u64, name: &str, devices: Vec<PathBuf>) -> Result<(), Failure> {
    let (Some(directory), Some(path)) = (directory(), file(guid)) else { return Ok(()) };
    let failed = |error: io::Error| Failure::io("cannot keep where the pool lies in", path.display(), &error);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let text = serde_json::to_vec(&Record { name: name.to_owned(), devices }).map_err(|error| failed(error.into()))?;
    // A reader sees the old or the new one.
    let unready = path.with_extension("new");
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unready).map_err(failed)?;
    file.write_all(&text).and_then(|()| fs::rename(&unready, &path)).map_err(failed)
}

/// Forgets a pool that is gone.
pub fn forget(guid: u64) {
    if let Some(path) = file(guid) {
        // One that stays leads to a device without a label, or to none.
        let _ = fs::remove_file(path);
    }
}

/// The devices of all pools that are known.
pub fn devices() -> Vec<PathBuf> {
    let files = directory().map(|directory| crate::runtime::children(&directory)).unwrap_or_default();
    let records = files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "json")).filter_map(|path| fs::read(path).ok());
    records.filter_map(|text| serde_json::from_slice::<Record>(&text).ok()).flat_map(|record| record.devices).collect()
}
