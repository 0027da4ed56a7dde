//! Devices of this user's pools at their last import, so that `nacre pool import` finds pools on files without
//! `-d`.
//!
//! One file per pool in the directory for state that survives a reboot. It is only a hint about the devices, which
//! are authoritative. For a pool in a bucket, the record also states whether root of this machine trusts its
//! content, which others may have written: because it was created here, or was imported with `--trust`. Invariant:
//! nothing in the bucket makes a pool trusted, and the record applies to one address alone.

use crate::cage;
use crate::{failure::Failure, whole_file};
use nacre_remote::Address;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    name: String,
    devices: Vec<PathBuf>,
    /// For a pool in a bucket: trusted, mounted with the options of its properties.
    #[serde(default)]
    trusted: bool,
}

fn directory() -> Option<PathBuf> {
    Some(cage::state::base()?.join("pools"))
}

fn file(guid: u64) -> Option<PathBuf> {
    Some(directory()?.join(format!("{guid:016x}.json")))
}

/// Records the devices of a pool, and for one in a bucket whether it is trusted.
///
/// # Errors
/// It cannot be written; the pool is imported all the same.
pub fn keep(guid: u64, name: &str, devices: Vec<PathBuf>, trusted: bool) -> Result<(), Failure> {
    let (Some(directory), Some(path)) = (directory(), file(guid)) else { return Ok(()) };
    let failed = |error: io::Error| Failure::io("cannot keep where the pool lies in", path.display(), &error);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let record = Record { name: name.to_owned(), devices, trusted };
    let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
    let options = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
    whole_file::replace(&path, &path.with_extension("new"), &options, &text).map_err(failed)
}

/// Whether the pool with this GUID in the bucket at this address is trusted on this machine.
pub fn is_trusted(guid: u64, address: &str) -> bool {
    let Some(Record { devices, trusted: true, .. }) = file(guid).and_then(|path| read(&path)) else { return false };
    let [there] = devices.as_slice() else { return false };
    is_same_bucket(Path::new(address), there)
}

/// Removes the record of a pool that is gone from these devices, or from the bucket at this address. A copy of the pool
/// elsewhere stays recorded.
pub fn forget(guid: u64, places: &[PathBuf]) {
    if let Some(path) = file(guid) {
        forget_in(&path, places);
    }
}

fn forget_in(path: &Path, places: &[PathBuf]) {
    let is_gone = |place: &PathBuf| places.iter().any(|gone| gone == place || is_same_bucket(gone, place));
    if read(path).is_none_or(|record| record.devices.iter().any(is_gone)) {
        // A record that stays names a device without a label, or none.
        let _ = fs::remove_file(path);
    }
}

/// Whether these are addresses of one bucket.
fn is_same_bucket(one: &Path, other: &Path) -> bool {
    let place = |at: &Path| Address::parse(&at.to_string_lossy()).ok().map(|at| (at.name(), at.endpoint()));
    place(one).is_some_and(|one| place(other) == Some(one))
}

fn read(path: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Returns the recorded devices of the pools with this name or GUID.
pub fn places_of(wanted: &str) -> Vec<PathBuf> {
    numbered_places_of(wanted).into_iter().map(|(place, _)| place).collect()
}

/// Returns the same devices, each with its pool's GUID: another pool may be at the path by now.
pub fn numbered_places_of(wanted: &str) -> Vec<(PathBuf, u64)> {
    let files = directory().map(|directory| crate::runtime::children(&directory)).unwrap_or_default();
    let mut places = Vec::new();
    for path in files {
        let Some(record) = fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Record>(&text).ok()) else {
            continue;
        };
        let number = path.file_stem().and_then(|stem| u64::from_str_radix(stem.to_str()?, 16).ok());
        let Some(number) = number else { continue };
        if record.name == wanted || number.to_string() == wanted {
            places.extend(record.devices.into_iter().map(|place| (place, number)));
        }
    }
    places
}

/// Returns the devices of all recorded pools, each with its pool's GUID: something else may be at the path by now.
pub fn devices() -> Vec<(PathBuf, u64)> {
    let files = directory().map(|directory| crate::runtime::children(&directory)).unwrap_or_default();
    let record = |path: PathBuf| {
        let guid = path.file_name()?.to_str()?.strip_suffix(".json")?;
        let record = serde_json::from_slice::<Record>(&fs::read(&path).ok()?).ok()?;
        Some((u64::from_str_radix(guid, 16).ok()?, record.devices))
    };
    let records = files.into_iter().filter_map(record);
    records.flat_map(|(guid, devices)| devices.into_iter().map(move |device| (device, guid))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_removal_of_a_copy_leaves_the_record_of_the_original() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record.json");
        for (recorded, copy, original) in [
            (
                "s3://bucket/tank?endpoint=http://a:9",
                "s3://bucket/copy?endpoint=http://a:9",
                "s3://bucket/tank?endpoint=http://a:9",
            ),
            (
                "s3://bucket/tank?endpoint=http://a:9",
                "s3://bucket/tank?endpoint=http://b:9",
                "s3://bucket/tank?endpoint=http://a:9&profile=x",
            ),
            ("/srv/image", "/srv/copy", "/srv/image"),
        ] {
            let record = Record { name: "tank".to_owned(), devices: vec![PathBuf::from(recorded)], trusted: false };
            fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
            forget_in(&path, &[PathBuf::from(copy)]);
            assert!(path.exists(), "{recorded}, {copy}");
            forget_in(&path, &[PathBuf::from(original)]);
            assert!(!path.exists(), "{recorded}");
        }
    }
}
