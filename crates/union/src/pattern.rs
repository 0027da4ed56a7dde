//! Patterns for branches (`/mnt/disk*`), as mergerfs has them.
//!
//! Called when a union is mounted, and for edits of its branches by the control file.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Whether a path is a pattern. The path of an existing file is never one.
pub(crate) fn is_pattern(path: &Path) -> bool {
    has_wildcard(path) && fs::symlink_metadata(path).is_err()
}

fn has_wildcard(path: &Path) -> bool {
    path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b'*' | b'?' | b'['))
}

/// Whether a path matches a pattern.
pub(crate) fn matches(pattern: &Path, path: &Path) -> bool {
    fast_glob::glob_match(pattern.as_os_str().as_bytes(), path.as_os_str().as_bytes())
}

/// All directories that match, sorted by name; the path itself if it is no pattern, or if nothing matches.
pub fn matching_directories(path: &Path) -> Vec<PathBuf> {
    if !is_pattern(path) {
        return vec![path.to_owned()];
    }
    let mut found = vec![PathBuf::new()];
    for part in path.components() {
        let part = Path::new(part.as_os_str());
        found = match has_wildcard(part) {
            false => found.into_iter().map(|place| place.join(part)).collect(),
            true => found.iter().flat_map(|place| named(place, part.as_os_str().as_bytes())).collect(),
        };
    }
    found.retain(|place| place.is_dir());
    if found.is_empty() { vec![path.to_owned()] } else { found }
}

/// The matching entries of a directory, sorted; names with a leading dot only if the pattern has one.
fn named(directory: &Path, pattern: &[u8]) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let fits = |name: &OsString| {
        let name = name.as_bytes();
        (pattern.starts_with(b".") || !name.starts_with(b".")) && fast_glob::glob_match(pattern, name)
    };
    let mut names: Vec<_> = entries.filter(fits).collect();
    names.sort();
    names.into_iter().map(|name| directory.join(name)).collect()
}
