//! State of a copy, in DEST: identifies the copy, and records the time before which everything is known to be on
//! the device.
//!
//! The file exists from the first change in DEST until the copy is complete. A file under its own name was complete
//! when it was renamed; after a crash of the machine that holds only for files renamed before the last sync
//! (`synced`, a time of the clock of DEST's file system). All others are copied again.

use rustix::{
    fs::{self, AtFlags, Mode, OFlags, StatxFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

/// Name of the state in DEST.
pub(crate) const NAME: &str = ".nacre-copy-state";
/// Temporary name of the state while it is written.
const NEW: &str = ".nacre-copy-state.new";
/// Version of the format that this program writes and reads.
const VERSION: u32 = 1;
/// Longest file that is read: a longer one is not ours.
const LONGEST: u64 = 64 * 1024;

/// Seconds and nanoseconds of the clock of DEST's file system.
pub(crate) type Time = (i64, u32);

/// State of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyState {
    /// Version of its format.
    pub(crate) version: u32,
    /// Part of all temporary names of this copy.
    pub(crate) id: String,
    /// The path of SOURCE, as bytes.
    #[serde(with = "path_text")]
    pub(crate) source: PathBuf,
    /// Boot id of the machine when this was written.
    pub(crate) boot: String,
    /// All changes in DEST before this time (seconds, nanoseconds) are on the device.
    pub(crate) synced: Option<Time>,
    /// Changes in DEST within this interval may be incomplete, because the machine crashed.
    pub(crate) doubtful: Option<(Time, Time)>,
}

impl CopyState {
    /// Makes the state of a new copy, with a unique id.
    #[expect(clippy::disallowed_methods, reason = "the one place of this crate that asks for chance")]
    pub(crate) fn new(source: &Path) -> CopyState {
        // Each `RandomState` begins with other random numbers.
        let id = format!("{:016x}", RandomState::new().build_hasher().finish());
        CopyState { version: VERSION, id, source: source.to_path_buf(), boot: boot(), synced: None, doubtful: None }
    }

    /// Reads the state in a directory.
    ///
    /// # Errors
    /// InvalidData: not written by this program, or by a newer one.
    pub(crate) fn read(directory: BorrowedFd<'_>) -> io::Result<Option<CopyState>> {
        let file = match fs::openat(
            directory,
            NAME,
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            Err(Errno::NOENT) => return Ok(None),
            opened => File::from(opened?),
        };
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text)?;
        let state: CopyState = serde_json::from_slice(&text)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        if state.version != VERSION {
            let told = format!("it has form {}, and this program knows form {VERSION}", state.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, told));
        }
        Ok(Some(state))
    }

    /// Writes the state into a directory, durably and atomically.
    pub(crate) fn write(&self, directory: BorrowedFd<'_>) -> io::Result<()> {
        let mut text = serde_json::to_vec(self)?;
        text.push(b'\n');
        remove(directory, NEW)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(fs::openat(directory, NEW, flags, Mode::RUSR | Mode::WUSR)?);
        let named = file
            .write_all(&text)
            .and_then(|()| file.sync_all())
            .and_then(|()| Ok(fs::renameat(directory, NEW, directory, NAME)?));
        if named.is_err() {
            // There was no room: the error is returned, and no file stays behind.
            let _ = remove(directory, NEW);
        }
        named?;
        Ok(fs::fsync(directory)?)
    }

    /// Removes the state: the copy is complete.
    pub(crate) fn remove(directory: BorrowedFd<'_>) -> io::Result<()> {
        remove(directory, NEW)?;
        remove(directory, NAME)
    }

    /// Returns the present time of the clock of DEST's file system.
    pub(crate) fn time_of(directory: BorrowedFd<'_>) -> io::Result<Time> {
        remove(directory, NEW)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::openat(directory, NEW, flags, Mode::RUSR | Mode::WUSR)?;
        let stat = fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::CTIME)?;
        remove(directory, NEW)?;
        Ok((stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec))
    }

    /// Continues the copy at the time `now`: if the machine was rebooted since, changes that had not been synced
    /// are doubtful.
    pub(crate) fn take_up(&mut self, now: Time) {
        let boot = boot();
        if !self.boot.is_empty() && self.boot == boot {
            return;
        }
        // Changes that were doubtful then may still be unrepaired.
        let from = self.doubtful.map(|(from, _)| from).or(self.synced).unwrap_or((i64::MIN, 0));
        // A clock that was set back gives no upper bound.
        let until = if now > from { now } else { (i64::MAX, 0) };
        self.doubtful = Some((from, until));
        self.boot = boot;
    }
}

/// Whether a name in the root of DEST belongs to a copy's state and not to its content.
pub(crate) fn is_own_name(name: &[u8]) -> bool {
    name == NAME.as_bytes() || name == NEW.as_bytes()
}

fn remove(directory: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        done => Ok(done?),
    }
}

/// Returns the kernel's boot id; empty where it is not available.
pub(crate) fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// Serializes paths as lists of bytes where they are not valid UTF-8.
mod path_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::{
        ffi::OsString,
        os::unix::ffi::{OsStrExt, OsStringExt},
        path::{Path, PathBuf},
    };

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Form {
        Text(String),
        Bytes(Vec<u8>),
    }

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        match path.to_str() {
            Some(text) => Form::Text(text.to_owned()),
            None => Form::Bytes(path.as_os_str().as_bytes().to_vec()),
        }
        .serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(match Form::deserialize(from)? {
            Form::Text(text) => PathBuf::from(text),
            Form::Bytes(bytes) => PathBuf::from(OsString::from_vec(bytes)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    #[test]
    fn a_note_comes_back_as_it_was_written() {
        let place = tempfile::tempdir().unwrap();
        let directory = File::open(place.path()).unwrap();
        assert_eq!(CopyState::read(directory.as_fd()).unwrap(), None);
        for path in [Path::new("/a b/c"), Path::new(OsStr::from_bytes(b"/\xff\n"))] {
            let mut state = CopyState::new(path);
            state.synced = Some((5, 7));
            state.write(directory.as_fd()).unwrap();
            assert_eq!(CopyState::read(directory.as_fd()).unwrap(), Some(state.clone()));
            assert_ne!(CopyState::new(path).id, state.id);
        }
        CopyState::time_of(directory.as_fd()).unwrap();
        CopyState::remove(directory.as_fd()).unwrap();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_a_new_start_of_the_machine_makes_files_doubtful() {
        let mut state = CopyState::new(Path::new("/a"));
        state.take_up((10, 0));
        assert_eq!(state.doubtful, None);
        let new_start = |state: &mut CopyState, now| {
            state.boot = "another".to_owned();
            state.take_up(now);
            assert_eq!(state.boot, boot());
        };
        let mut synced = CopyState { synced: Some((5, 0)), ..state.clone() };
        new_start(&mut synced, (10, 0));
        assert_eq!(synced.doubtful, Some(((5, 0), (10, 0))));
        synced.synced = Some((12, 0));
        new_start(&mut synced, (20, 0));
        assert_eq!(synced.doubtful, Some(((5, 0), (20, 0))), "what was not copied again by then still is");
        new_start(&mut synced, (1, 0));
        assert_eq!(synced.doubtful, Some(((5, 0), (i64::MAX, 0))), "a clock set back");
        new_start(&mut state, (10, 0));
        assert_eq!(state.doubtful, Some(((i64::MIN, 0), (10, 0))), "never written out");
    }

    #[test]
    fn a_note_that_is_not_understood_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let directory = File::open(place.path()).unwrap();
        for text in ["", "{}", "[1]", r#"{"version":2,"id":"x","source":"/","boot":"","synced":null,"doubtful":null}"#]
        {
            std::fs::write(place.path().join(NAME), text).unwrap();
            let error = CopyState::read(directory.as_fd()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{text}");
        }
    }
}
