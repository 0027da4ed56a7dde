//! Records of cages of the kernel's engines: one JSON file per cage, which survives reboots.
//!
//! Written by the engines only, one command at a time ([`hold`]); read by everybody. A record is removed with its
//! cage: by `nacre cage remove`, and for images also when the image was deleted by other means.

use super::{
    engine::{EngineKind, FileSystem},
    state,
};
use crate::{
    clock,
    failure::{Exit, Failure},
    report::path_text,
    whole_file,
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

/// Record of one cage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CageRecord {
    /// Unique name of the record.
    pub id: String,
    /// The engine that enforces the limit.
    pub engine: EngineKind,
    /// The directory that is limited.
    #[serde(serialize_with = "write_path", deserialize_with = "read_path")]
    pub directory: PathBuf,
    /// Mount point; often the directory itself.
    #[serde(serialize_with = "write_path", deserialize_with = "read_path")]
    pub mountpoint: PathBuf,
    /// The limit, bytes.
    pub bytes: u64,
    /// The limit of inodes that was requested.
    pub inodes: Option<u64>,
    /// When the cage was made, seconds since 1970.
    pub made: u64,
    /// Data of the engine.
    pub detail: Detail,
    /// The cage is unmounted only for the duration of a resize.
    #[serde(default)]
    pub resizing: bool,
}

/// Data of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Detail {
    /// Data of the engine `loop`: an image.
    Loop {
        /// Path of the image file.
        #[serde(serialize_with = "write_path", deserialize_with = "read_path")]
        image: PathBuf,
        /// File system of the image.
        fstype: FileSystem,
        /// The image is sparse: it takes space only as it fills.
        sparse: bool,
    },
    /// A project quota.
    Project {
        /// `ext4` or `xfs`.
        fstype: FileSystem,
        /// The project's number.
        project: u32,
        /// Mount point of the file system.
        #[serde(serialize_with = "write_path", deserialize_with = "read_path")]
        filesystem: PathBuf,
        /// Every file belongs to the project.
        complete: bool,
    },
    /// A Btrfs qgroup.
    Qgroup {
        /// The number of the subvolume.
        subvolume: u64,
    },
}

impl CageRecord {
    /// Makes the record of a new cage.
    pub fn new(
        engine: EngineKind,
        directory: &Path,
        mountpoint: &Path,
        bytes: u64,
        inodes: Option<u64>,
        detail: Detail,
    ) -> CageRecord {
        let id = state::identifier(mountpoint, 0);
        CageRecord {
            id,
            engine,
            directory: directory.to_owned(),
            mountpoint: mountpoint.to_owned(),
            bytes,
            inodes,
            made: clock::date(),
            detail,
            resizing: false,
        }
    }

    /// Returns all records, sorted by mount point.
    ///
    /// # Errors
    /// A directory or record that cannot be read.
    pub fn all() -> Result<Vec<CageRecord>, Failure> {
        let Some(directory) = directory() else { return Ok(Vec::new()) };
        let names = match fs::read_dir(&directory) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
                return Ok(Vec::new());
            }
            names => names.map_err(|error| Failure::io("cannot read", path_text(&directory), &error))?,
        };
        let mut records = Vec::new();
        for entry in names {
            let path = entry.map_err(|error| Failure::io("cannot read", path_text(&directory), &error))?.path();
            if path.extension().is_some_and(|end| end == "json")
                && let Some(record) = read(&path)?
            {
                records.push(record);
            }
        }
        records.sort_by(|a, b| a.mountpoint.cmp(&b.mountpoint));
        Ok(records)
    }

    /// Returns the record with this directory, mount point or image.
    ///
    /// # Errors
    /// As [`CageRecord::all`].
    pub fn find(path: &Path) -> Result<Option<CageRecord>, Failure> {
        let mut records = CageRecord::all()?;
        let place = records.iter().position(|record| record.mountpoint == path);
        let place = place.or_else(|| records.iter().position(|record| record.directory == path));
        Ok(place
            .or_else(|| records.iter().position(|record| record.image() == Some(path)))
            .map(|place| records.swap_remove(place)))
    }

    /// Returns the path of the image; `None` for other engines.
    pub fn image(&self) -> Option<&Path> {
        match &self.detail {
            Detail::Loop { image, .. } => Some(image),
            _ => None,
        }
    }

    /// Writes the record atomically.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn save(&self) -> Result<(), Failure> {
        let path = own()?.join(format!("{}.json", self.id));
        let unready = path.with_extension("new");
        let failed = |error: io::Error| Failure::io("cannot write", path_text(&path), &error);
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        text.push(b'\n');
        let options = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
        whole_file::replace(&path, &unready, &options, &text).map_err(failed)
    }

    /// Removes the record.
    ///
    /// # Errors
    /// Errors of the system; a record that is gone already is none.
    pub fn remove(&self) -> Result<(), Failure> {
        let path = own()?.join(format!("{}.json", self.id));
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::io("cannot remove", path_text(&path), &error))
            }
            _ => Ok(()),
        }
    }
}

fn directory() -> Option<PathBuf> {
    state::base().map(|base| base.join("cage/kernel"))
}

/// Returns the directory of records, made if need be.
fn own() -> Result<PathBuf, Failure> {
    let directory = directory()
        .ok_or_else(|| Failure::new("there is no place for records: neither XDG_STATE_HOME nor HOME is set"))?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    made.map_err(|error| Failure::io("cannot make the directory of records", path_text(&directory), &error))?;
    Ok(directory)
}

/// Reads one record; `None` where it was removed meanwhile.
fn read(path: &Path) -> Result<Option<CageRecord>, Failure> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| Failure::io("cannot read", path_text(path), &error))?,
    };
    let record = serde_json::from_slice(&text);
    record.map(Some).map_err(|error| {
        Failure::new(format!("{} is no record of a cage: {error}", path_text(path))).next("move it away")
    })
}

/// Locks out other commands while an id is chosen that no other cage may choose, too: held for a short time.
///
/// # Errors
/// Errors of the system.
pub fn choosing() -> Result<File, Failure> {
    let path = own()?.join("lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(|error| Failure::io("cannot open", path_text(&path), &error))?;
    flock(&file, FlockOperation::LockExclusive)
        .map_err(|error| Failure::io("cannot lock", path_text(&path), &error.into()))?;
    Ok(file)
}

/// The lock of a directory or image, until it is dropped.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    _file: File,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Removed while it is locked: the next command sees that the file is another one. One that stays is used again.
        let _ = fs::remove_file(&self.path);
    }
}

/// Locks an open directory or image while its cage is made, changed or ended. The lock is on a file among the records:
/// everybody who can open the directory could lock that, for as long as he likes.
///
/// # Errors
/// Another command holds the lock.
pub fn hold(file: &File, name: &Path) -> Result<Held, Failure> {
    hold_in(&own()?, file, name)
}

fn hold_in(directory: &Path, file: &File, name: &Path) -> Result<Held, Failure> {
    let failed = |error: io::Error| Failure::io("cannot lock", path_text(name), &error);
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (device, number) = file.metadata().map(identity).map_err(failed)?;
    let path = directory.join(format!("{device:x}-{number:x}.held"));
    loop {
        let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).clone();
        let lock = options.open(&path).map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let what = format!("another command is changing the cage of {} right now", path_text(name));
                return Err(Failure::new(what).exit(Exit::Busy).next("try again when it has ended"));
            }
            Err(error) => return Err(failed(error.into())),
        }
        // The previous holder may have removed it since it was opened here.
        let own = lock.metadata().map(identity).map_err(failed)?;
        if fs::metadata(&path).is_ok_and(|there| identity(there) == own) {
            return Ok(Held { path, _file: lock });
        }
    }
}

/// Serialized form of a path: text if it is valid UTF-8, else a list of bytes.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum PathForm {
    Text(String),
    Bytes(Vec<u8>),
}

fn write_path<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => PathForm::Text(text.to_owned()),
        None => PathForm::Bytes(path.as_os_str().as_bytes().to_vec()),
    }
    .serialize(to)
}

fn read_path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    Ok(match PathForm::deserialize(from)? {
        PathForm::Text(text) => PathBuf::from(text),
        PathForm::Bytes(bytes) => PathBuf::from(OsString::from_vec(bytes)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let odd = PathBuf::from(OsString::from_vec(b"/a\xff b".to_vec()));
        for detail in [
            Detail::Loop { image: odd.clone(), fstype: FileSystem::Xfs, sparse: true },
            Detail::Project {
                fstype: FileSystem::Ext4,
                project: 7,
                filesystem: PathBuf::from("/srv"),
                complete: false,
            },
            Detail::Qgroup { subvolume: 257 },
        ] {
            let record = CageRecord::new(EngineKind::Loop, &odd, Path::new("/m"), 5, Some(6), detail);
            let text = serde_json::to_vec(&record).unwrap();
            assert_eq!(serde_json::from_slice::<CageRecord>(&text).unwrap(), record);
        }
    }

    #[test]
    fn a_lock_of_somebody_else_on_the_directory_refuses_no_command() {
        let (records, caged) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let other = File::open(&caged).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        let directory = File::open(&caged).unwrap();
        let hold = || hold_in(records.path(), &directory, caged.path());
        let held = hold().unwrap();
        assert_eq!(hold().unwrap_err().exit, Exit::Busy);
        drop(held);
        drop(hold().unwrap());
        assert_eq!(fs::read_dir(&records).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_record_is_named() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("x.json");
        assert!(read(&path).unwrap().is_none());
        fs::write(&path, "{}").unwrap();
        assert!(read(&path).unwrap_err().what.contains("x.json"));
    }
}
