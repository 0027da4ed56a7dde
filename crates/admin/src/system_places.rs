//! Directories of the system, which no untrusted mount point may cover: a mount point from a stream,
//! or of a pool that other users or machines can write to. A new name in these directories can be
//! configuration, or a program.
//!
//! Called where a stream brings a mount point, and by the daemon before it mounts. Users read the
//! list in `docs/pool.md`.

use std::path::{Path, PathBuf};

/// Directories that are refused with everything below them.
const TREES: [&str; 20] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/cache/nacre",
    "/var/lib/dpkg",
    "/var/lib/nacre",
    "/var/lib/rpm",
    "/var/lib/systemd",
    "/var/run",
    "/var/spool",
];
/// Directories that are refused without their subdirectories.
const DIRECTORIES: [&str; 13] = [
    "/",
    "/home",
    "/media",
    "/mnt",
    "/opt",
    "/root",
    "/srv",
    "/tmp",
    "/var",
    "/var/cache",
    "/var/lib",
    "/var/log",
    "/var/tmp",
];
/// Hidden names below these directories hold keys, and files that a login executes.
const HOMES: [&str; 2] = ["/home", "/root"];

/// Whether nothing is mounted there whose mount point others may have chosen.
#[must_use]
pub fn is_of_the_system(path: &Path) -> bool {
    let is_hidden = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b".");
    DIRECTORIES.iter().any(|directory| path == Path::new(directory))
        || TREES.iter().any(|tree| path.starts_with(tree))
        || HOMES.iter().any(|home| path.starts_with(home)) && path.iter().any(is_hidden)
}

/// State of a directory that an untrusted mount point names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceState {
    /// Its path without symbolic links.
    pub real: PathBuf,
    /// Whether it exists and has entries.
    pub is_full: bool,
}

/// Examines an untrusted mount point; blocks for as long as a file system on its path does not answer.
#[must_use]
pub fn examine(path: &Path) -> PlaceState {
    let is_full = std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
    PlaceState { real: resolved(path), is_full }
}

/// Resolves the symbolic links of a path as far as it exists and can be searched.
#[must_use]
pub fn resolved(path: &Path) -> PathBuf {
    let real = path.ancestors().find_map(|above| {
        let (real, missing) = (above.canonicalize().ok()?, path.strip_prefix(above).ok()?);
        Some(real.join(missing))
    });
    real.unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_the_list() {
        let documentation = include_str!("../../../docs/pool.md");
        let listed = |path: &&&str| !documentation.contains(&format!("`{path}`"));
        assert_eq!(TREES.iter().chain(&DIRECTORIES).chain(&HOMES).find(listed), None);
    }

    #[test]
    fn what_lies_below_counts_where_that_is_said() {
        let refused = |path: &str| is_of_the_system(Path::new(path));
        assert!(["/", "/etc", "/usr/local/x", "/lib32/x", "/var/run/x", "/home/a/.b/c"].into_iter().all(refused));
        assert!(!["/tank", "/etcetera", "/srv/x", "/var/lib/x", "/home/a/b", "/x/.y"].into_iter().any(refused));
    }
}
