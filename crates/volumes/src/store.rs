//! The state directory: one directory for each volume, with its record and its lock.
//!
//! ```text
//! ROOT/volumes/NAME/record.json   the record: written beside, synced, renamed
//!                  /lock          locked by flock(2) while a call changes the volume
//!                  /data          the files of a volume without a pool
//!                  /accounts      the accounts of its cage
//!                  /below         mount point of a file system under a view
//!                  /at            mount point that containers see
//! ROOT/volumes/.new-ID            a directory that is being made; renamed when it is complete
//! ROOT/volumes/.gone-ID           the directory of a removed volume, until its files are deleted
//! ```
//!
//! Invariants: a directory with a volume's name has a whole record; only the holder of its lock
//! writes it. Names of volumes cannot begin with a dot.

use crate::{
    failure::{Failure, Kind},
    mount_table::MountTable,
    options::{Options, Spec, check_name},
};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Version of the records.
const VERSION: u32 = 1;
/// Deadline for the lock of a volume.
const LOCK_WAIT: Duration = Duration::from_secs(60);
/// First and longest interval between two tries for a lock: flock(2) has no deadline of its own.
const LOCK_POLL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// Maximum length of a record, bytes.
const RECORD_MAX: u64 = 1 << 20;

/// How far the making of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Nobody has been answered yet: without a lock it is undone.
    Making,
    /// It is there.
    Ready,
    /// It is being removed.
    Removing,
}

/// What is known of a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this form.
    pub version: u32,
    /// A random number, which the volume's file system in a pool carries as a property.
    pub id: String,
    /// The volume's name.
    pub name: String,
    /// The options of the client.
    pub options: Options,
    /// Seconds since 1970.
    pub created: u64,
    /// How far its making is.
    pub phase: Phase,
    /// The boot of the machine that `holders` are of.
    pub boot: String,
    /// Ids of the callers that have it mounted.
    pub holders: Vec<String>,
    /// The last backups.
    #[serde(default)]
    pub backup: BackupState,
}

/// Results of the backups of a volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupState {
    /// The last attempt, in seconds since 1970.
    pub tried: u64,
    /// The last one that succeeded.
    pub done: u64,
    /// Why the last attempt failed.
    pub failure: Option<String>,
}

impl Record {
    /// The record of a volume that is about to be made.
    ///
    /// # Errors
    /// The machine gives no random number.
    pub fn new(name: &str, options: Options, created: u64, boot: &str) -> Result<Record, Failure> {
        let path = Path::new("/proc/sys/kernel/random/uuid");
        let id = fs::read_to_string(path).map_err(|error| Failure::io("read", path, &error))?;
        Ok(Record {
            version: VERSION,
            id: id.trim().to_owned(),
            name: name.to_owned(),
            options,
            created,
            phase: Phase::Making,
            boot: boot.to_owned(),
            holders: Vec::new(),
            backup: BackupState::default(),
        })
    }

    /// The volume as its options describe it.
    ///
    /// # Errors
    /// The record was edited.
    pub fn spec(&self) -> Result<Spec, Failure> {
        Spec::new(&self.options)
    }
}

/// The state directory.
pub struct Store {
    volumes: PathBuf,
}

/// A volume whose lock is held: nobody else changes it until this is dropped.
pub struct Locked {
    /// Its lock; a command that gets it as an input holds it as well.
    pub lock: File,
    /// Its directory.
    pub directory: PathBuf,
    /// Its record as it is stored.
    pub record: Record,
}

impl Store {
    /// Opens the state directory, and makes it where it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(root: &Path) -> Result<Store, Failure> {
        let root = std::path::absolute(root).map_err(|error| Failure::io("use", root, &error))?;
        let failed = |error: io::Error| Failure::io("make", &root, &error);
        let volumes = root.join("volumes");
        DirBuilder::new().recursive(true).mode(0o700).create(&volumes).map_err(failed)?;
        // Where a link leads to the place: mount points are compared with the table of mounts.
        let volumes = volumes.canonicalize().map_err(failed)?;
        Ok(Store { volumes })
    }

    /// The directory of a volume. The name has to be checked.
    pub fn directory(&self, name: &str) -> PathBuf {
        self.volumes.join(name)
    }

    /// Names of all volumes, sorted, also of those that are being made.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let mut names: Vec<String> = self.entries()?.into_iter().filter(|name| check_name(name).is_ok()).collect();
        names.sort();
        Ok(names)
    }

    fn entries(&self) -> Result<Vec<String>, Failure> {
        let failed = |error: io::Error| Failure::io("read", &self.volumes, &error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.volumes).map_err(failed)? {
            if let Ok(name) = entry.map_err(failed)?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Reads a record without its lock. `None` where there is no such volume.
    ///
    /// # Errors
    /// A name that is none; a record that cannot be read.
    pub fn read(&self, name: &str) -> Result<Option<Record>, Failure> {
        check_name(name)?;
        read(&self.directory(name))
    }

    /// Locks a volume, waiting for other calls. `None` where there is no such volume.
    ///
    /// # Errors
    /// [`Kind::Busy`] after a minute; a name that is none; a record that cannot be read.
    pub fn lock(&self, name: &str) -> Result<Option<Locked>, Failure> {
        check_name(name)?;
        let deadline = Instant::now() + LOCK_WAIT;
        let mut interval = LOCK_POLL.0;
        loop {
            match self.try_lock(name)? {
                Attempt::Locked(locked) => return Ok(Some(*locked)),
                Attempt::Missing => return Ok(None),
                Attempt::Busy if Instant::now() >= deadline => {
                    return Err(Failure::new(Kind::Busy, format!("volume {name} is busy with another call")));
                }
                Attempt::Busy => thread::sleep(interval),
            }
            interval = LOCK_POLL.1.min(interval * 2);
        }
    }

    /// Locks a volume unless another call holds it.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn try_lock(&self, name: &str) -> Result<Attempt, Failure> {
        let directory = self.directory(name);
        let path = directory.join("lock");
        let failed = |error: io::Error| Failure::io("lock", &path, &error);
        let lock = match OpenOptions::new().write(true).open(&path) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Attempt::Missing),
            Err(error) => return Err(failed(error)),
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Attempt::Busy),
            Err(error) => return Err(failed(error.into())),
        }
        // The volume may have been removed, and another one made, since the file was opened.
        let held = lock.metadata().map_err(failed)?;
        match fs::metadata(&path) {
            Ok(named) if named.ino() == held.ino() && named.dev() == held.dev() => {}
            Ok(_) => return Ok(Attempt::Busy),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Attempt::Missing),
            Err(error) => return Err(failed(error)),
        }
        match read(&directory)? {
            Some(record) => Ok(Attempt::Locked(Box::new(Locked { lock, directory, record }))),
            None => Ok(Attempt::Missing),
        }
    }

    /// Makes the directory of a volume, whole and locked. `None` where the name exists.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn begin(&self, record: Record) -> Result<Option<Locked>, Failure> {
        let new = self.volumes.join(format!(".new-{}", record.id));
        let failed = |error: io::Error| Failure::io("make", &new, &error);
        let lock = loop {
            DirBuilder::new().mode(0o700).create(&new).map_err(failed)?;
            let path = new.join("lock");
            let lock = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
            flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
            // Before it was locked, the sweep of another process may have taken it for a dead one's.
            if path.exists() {
                break lock;
            }
        };
        for part in ["data", "accounts", "below", "at"] {
            DirBuilder::new()
                .mode(if part == "accounts" { 0o700 } else { 0o755 })
                .create(new.join(part))
                .map_err(failed)?;
        }
        let mut locked = Locked { lock, directory: new.clone(), record };
        locked.save()?;
        let directory = self.directory(&locked.record.name);
        match renameat_with(CWD, &new, CWD, &directory, RenameFlags::NOREPLACE) {
            Ok(()) => {
                sync(&self.volumes)?;
                locked.directory = directory;
                Ok(Some(locked))
            }
            Err(rustix::io::Errno::EXIST) => {
                fs::remove_dir_all(&new).map_err(failed)?;
                Ok(None)
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Takes a volume's name away, in one step. Its files are deleted by [`Store::sweep`].
    ///
    /// # Errors
    /// Something is mounted in it; the rename failed.
    pub fn discard(&self, locked: Locked) -> Result<(), Failure> {
        if MountTable::read()?.has_below(&locked.directory) {
            let message = format!("something is mounted below {}", locked.directory.display());
            return Err(Failure::new(Kind::InUse, message));
        }
        let gone = self.volumes.join(format!(".gone-{}", locked.record.id));
        fs::rename(&locked.directory, &gone).map_err(|error| Failure::io("remove", &locked.directory, &error))?;
        sync(&self.volumes)
    }

    /// Deletes the files of removed volumes, and directories that a kill left half made.
    ///
    /// # Errors
    /// The first deletion that failed; the others are done.
    pub fn sweep(&self) -> Result<(), Failure> {
        let mounts = MountTable::read()?;
        let mut result = Ok(());
        for name in self.entries()? {
            let path = self.volumes.join(&name);
            let half_made = name.starts_with(".new-");
            if !half_made && !name.starts_with(".gone-") || mounts.has_below(&path) {
                continue;
            }
            // Another process is making it.
            let lock = OpenOptions::new().write(true).open(path.join("lock"));
            if half_made
                && let Ok(lock) = &lock
                && flock(lock, FlockOperation::NonBlockingLockExclusive).is_err()
            {
                continue;
            }
            if half_made && lock.is_err() && is_young(&path) {
                continue;
            }
            match fs::remove_dir_all(&path) {
                Ok(()) => {}
                // Another process sweeps as well.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => result = Err(Failure::io("delete", &path, &error)),
            }
        }
        result
    }
}

/// Outcome of [`Store::try_lock`].
pub enum Attempt {
    /// The lock is held now.
    Locked(Box<Locked>),
    /// Another call holds it.
    Busy,
    /// There is no such volume.
    Missing,
}

impl Locked {
    /// Stores the record.
    ///
    /// # Errors
    /// It cannot be written; the stored one is still whole.
    pub fn save(&mut self) -> Result<(), Failure> {
        let path = self.directory.join("record.json");
        let new = self.directory.join("record.new");
        let failed = |error: io::Error| Failure::io("write", &path, &error);
        let mut text = serde_json::to_vec_pretty(&self.record).map_err(|error| failed(error.into()))?;
        text.push(b'\n');
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)?;
        sync(&self.directory)
    }

    /// The mount point that containers see.
    pub fn at(&self) -> PathBuf {
        self.directory.join("at")
    }
}

/// Whether a directory was made within the last minute: the lock in it may be about to be made.
fn is_young(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else { return true };
    let Ok(modified) = metadata.modified() else { return true };
    modified.elapsed().is_ok_and(|age| age < Duration::from_secs(60))
}

fn read(directory: &Path) -> Result<Option<Record>, Failure> {
    let path = directory.join("record.json");
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() > RECORD_MAX => {
            return Err(Failure::new(Kind::Failed, format!("{} is too long for a record", path.display())));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::io("read", &path, &error)),
    }
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::io("read", &path, &error)),
    };
    let record: Record = serde_json::from_slice(&text)
        .map_err(|error| Failure::new(Kind::Failed, format!("{} is no record: {error}", path.display())))?;
    let named = directory.file_name().is_some_and(|name| name == record.name.as_str());
    let id = record.id.len() == 36 && record.id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if record.version != VERSION || !named || !id {
        return Err(Failure::new(Kind::Failed, format!("{} is a record of another volume or version", path.display())));
    }
    Ok(Some(record))
}

fn sync(directory: &Path) -> Result<(), Failure> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| Failure::io("sync", directory, &error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record(name: &str) -> Record {
        Record::new(name, Options::new(), 1, "boot").unwrap()
    }

    #[test]
    fn a_name_is_made_once_and_locked() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let locked = store.begin(record("a")).unwrap().unwrap();
        assert!(store.begin(record("a")).unwrap().is_none());
        assert!(matches!(store.try_lock("a").unwrap(), Attempt::Busy));
        drop(locked);
        let locked = store.lock("a").unwrap().unwrap();
        assert_eq!(store.names().unwrap(), ["a"]);
        store.discard(locked).unwrap();
        assert!(store.lock("a").unwrap().is_none() && store.read("a").unwrap().is_none());
        assert_eq!(store.entries().unwrap().len(), 1);
        store.sweep().unwrap();
        assert!(store.entries().unwrap().is_empty());
    }

    #[test]
    fn a_lock_of_a_removed_volume_does_not_count_for_the_next_one() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let first = store.begin(record("a")).unwrap().unwrap();
        let lock = first.lock.try_clone().unwrap();
        store.discard(first).unwrap();
        drop(store.begin(record("a")).unwrap().unwrap());
        assert!(store.lock("a").unwrap().is_some());
        drop(lock);
    }

    #[test]
    fn a_half_made_directory_goes_unless_its_maker_lives() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let new = store.volumes.join(".new-x");
        fs::create_dir(&new).unwrap();
        store.sweep().unwrap();
        assert!(new.exists(), "its lock may be about to be made");
        let lock = File::create(new.join("lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        store.sweep().unwrap();
        assert!(new.exists(), "its maker lives");
        drop(lock);
        store.sweep().unwrap();
        assert!(!new.exists());
    }

    #[test]
    fn an_edited_record_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let locked = store.begin(record("a")).unwrap().unwrap();
        let path = locked.directory.join("record.json");
        drop(locked);
        let text = fs::read_to_string(&path).unwrap();
        for (from, to) in [("\"version\": 1", "\"version\": 2"), ("\"name\": \"a\"", "\"name\": \"b\""), ("{", "[")] {
            fs::write(&path, text.replacen(from, to, 1)).unwrap();
            assert_eq!(store.read("a").unwrap_err().kind, Kind::Failed, "{to}");
        }
        fs::write(&path, text).unwrap();
        assert!(store.read("a").unwrap().is_some());
    }
}
