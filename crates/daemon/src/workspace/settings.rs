//! The settings of a workspace, as the file `workspace.toml` in its state directory. Paths are escaped as in the log of
//! hidden entries, so that any bytes fit.

use crate::{failure::Failure, report::path_text, whole_file};
use nacre_union::base_log::{escaped, unescaped};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

/// Version of the file that this program writes; newer ones are refused.
const VERSION: u32 = 1;

/// A path in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPath(pub PathBuf);

impl Serialize for StoredPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&escaped(self.0.as_os_str().as_bytes()))
    }
}

impl<'de> Deserialize<'de> for StoredPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<StoredPath, D::Error> {
        let text = String::deserialize(deserializer)?;
        let path = unescaped(&text).ok_or_else(|| D::Error::custom(format!("\"{text}\" is not a path")))?;
        Ok(StoredPath(PathBuf::from(OsString::from_vec(path))))
    }
}

/// Settings of a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkspaceSettings {
    version: u32,
    /// Seconds from 1970 to its creation.
    pub created: u64,
    /// The directories that it shows, the topmost first.
    pub base: Vec<StoredPath>,
    /// The directory over which it lies for commands that run in it.
    pub over: StoredPath,
    /// Mount point, where it is not `view` in the state directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<StoredPath>,
    /// Limit of the bytes of its changes, as written by the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Limit of the number of changed files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    /// Paths in it that cannot be changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub read_only: Vec<StoredPath>,
    /// Patterns of names that it does not show.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hide: Vec<String>,
    /// Commands that run in it can change nothing else.
    #[serde(default)]
    pub read_only_below: bool,
    /// Its mount survives the process that serves it.
    #[serde(default)]
    pub survive: bool,
    /// The file system of a pool whose snapshot it shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clone: Option<CloneSettings>,
}

/// The snapshot of a pool's file system that a workspace shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CloneSettings {
    /// The snapshot, as POOL/FS@SNAPSHOT.
    pub snapshot: String,
    /// Whether the snapshot was made for the workspace, and goes with it.
    pub own_snapshot: bool,
    /// The file system, into which a commit goes.
    pub dataset: String,
}

impl WorkspaceSettings {
    /// Settings of a new workspace over these directories.
    pub fn new(base: Vec<PathBuf>, over: PathBuf, created: u64) -> WorkspaceSettings {
        WorkspaceSettings {
            version: VERSION,
            created,
            base: base.into_iter().map(StoredPath).collect(),
            over: StoredPath(over),
            at: None,
            size: None,
            files: None,
            read_only: Vec::new(),
            hide: Vec::new(),
            read_only_below: false,
            survive: false,
            clone: None,
        }
    }

    /// The directories that it shows, the topmost first.
    pub fn directories(&self) -> Vec<&Path> {
        self.base.iter().map(|path| path.0.as_path()).collect()
    }

    /// Reads the settings of the workspace with this state directory.
    ///
    /// # Errors
    /// They are missing, malformed, or of a newer version.
    pub fn read(directory: &Path) -> Result<WorkspaceSettings, Failure> {
        let path = directory.join(FILE);
        let text = fs::read_to_string(&path)
            .map_err(|error| Failure::io("cannot read the workspace's settings", path_text(&path), &error))?;
        let settings: WorkspaceSettings = toml::from_str(&text).map_err(|error| {
            Failure::new(format!("the settings in {} are not understood: {error}", path_text(&path)))
        })?;
        if settings.version > VERSION {
            return Err(Failure::new(format!("{} was written by a newer version of nacre", path_text(&path)))
                .next("use that version"));
        }
        Ok(settings)
    }

    /// Writes the settings into a state directory, whole or not at all.
    ///
    /// # Errors
    /// Errors of the storage.
    pub fn write(&self, directory: &Path) -> Result<(), Failure> {
        let path = directory.join(FILE);
        let text = toml::to_string(self)
            .map_err(|error| Failure::new(format!("the settings of the workspace cannot be written: {error}")))?;
        let unready = directory.join(".workspace.toml.new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        whole_file::replace(&path, &unready, &options, text.as_bytes())
            .map_err(|error| Failure::io("cannot write", path_text(&path), &error))
    }
}

/// Name of the file.
pub const FILE: &str = "workspace.toml";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_written() {
        let scratch = tempfile::tempdir().unwrap();
        let odd = PathBuf::from(OsString::from_vec(b"/b\xff\n \"%".to_vec()));
        let plain = WorkspaceSettings::new(vec![PathBuf::from("/a")], PathBuf::from("/a"), 5);
        let full = WorkspaceSettings {
            at: Some(StoredPath(odd.clone())),
            size: Some("2G".to_owned()),
            files: Some(7),
            read_only: vec![StoredPath(PathBuf::from("etc"))],
            hide: vec!["*.key".to_owned()],
            read_only_below: true,
            survive: true,
            ..WorkspaceSettings::new(vec![odd, PathBuf::from("/")], PathBuf::from("/"), u64::MAX >> 1)
        };
        for settings in [plain, full] {
            settings.write(scratch.path()).unwrap();
            assert_eq!(WorkspaceSettings::read(scratch.path()).unwrap(), settings);
        }
        let newer = fs::read_to_string(scratch.path().join(FILE)).unwrap().replace("version = 1", "version = 2");
        fs::write(scratch.path().join(FILE), newer).unwrap();
        assert!(WorkspaceSettings::read(scratch.path()).unwrap_err().what.contains("newer version"));
    }
}
