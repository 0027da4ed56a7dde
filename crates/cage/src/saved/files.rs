//! The files of a state directory: `lock`, `checkpoint`, `checkpoint.new`, `log.N`.

use super::{
    BootId, SavedError,
    format::{HEADER, Header},
};
use rustix::fs::{FlockOperation, OFlags};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long a start waits for the accounts of a cage that is shutting down.
const ENDING: Duration = Duration::from_secs(3);
const CHECKPOINT: &str = "checkpoint";
const ASIDE: &str = "checkpoint.new";
const LOG: &str = "log.";

/// File with the id of the current boot (proc(5)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SavedError {
    let path = path.to_path_buf();
    move |error| SavedError::Io { doing, path, error }
}

/// Reads the id of the current boot.
pub(super) fn boot_id() -> Result<BootId, SavedError> {
    let path = Path::new(BOOT_ID);
    let text = fs::read_to_string(path).map_err(failed("read", path))?;
    parse_boot_id(&text).ok_or_else(|| failed("understand", path)(io::Error::from(io::ErrorKind::InvalidData)))
}

/// Reads the form `8-4-4-4-12` of hexadecimal digits.
pub(super) fn parse_boot_id(text: &str) -> Option<BootId> {
    let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
    let plain = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u128::from_str_radix(&digits, 16).ok()).flatten().map(|number| BootId(number.to_be_bytes()))
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    // A symbolic link under this name is not ours.
    options.mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

/// Takes a lock by polling, as no blocking call has a time limit. A cage that was shut down keeps
/// its lock until its last thread has returned from its last disk operation.
#[expect(clippy::disallowed_methods, reason = "no call waits for a lock with an end")]
fn locked(lock: &File) -> rustix::io::Result<()> {
    let start = Instant::now();
    loop {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() < ENDING => thread::sleep(Duration::from_millis(10)),
            done => return done,
        }
    }
}

/// A state directory, locked for this process.
pub(super) struct StateDir {
    path: PathBuf,
    lock: File,
}

impl Drop for StateDir {
    /// Unlocks explicitly: closing alone would leave the lock with a process that is just being
    /// started, until that has closed its copy of the descriptor.
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&self.lock, FlockOperation::Unlock) {
            tracing::debug!(%error, "the lock of a state directory goes with its descriptor");
        }
    }
}

impl StateDir {
    pub(super) fn open(path: &Path) -> Result<StateDir, SavedError> {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("create", path))?;
        let status = fs::metadata(path).map_err(failed("examine", path))?;
        let (owner, own) = (status.uid(), rustix::process::geteuid().as_raw());
        if owner != own && owner != 0 || status.mode() & 0o002 != 0 {
            let error =
                io::Error::new(io::ErrorKind::PermissionDenied, "it is somebody else's, or everybody may write in it");
            return Err(failed("keep accounts in", path)(error));
        }
        let lock_path = path.join("lock");
        let mut lock = private()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(failed("open", &lock_path))?;
        match locked(&lock) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let pid = lock.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(SavedError::Busy { directory: path.to_path_buf(), pid });
            }
            Err(error) => return Err(failed("lock", &lock_path)(error.into())),
        }
        // For messages and people only, so a full disk does not matter.
        let _ = lock.set_len(0).and_then(|()| lock.write_all(format!("{}\n", std::process::id()).as_bytes()));
        Ok(StateDir { path: path.to_path_buf(), lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the checkpoint; `None` where there is none.
    pub(super) fn read_checkpoint(&self) -> Result<Option<Vec<u8>>, SavedError> {
        let path = self.path.join(CHECKPOINT);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path)(error)),
        }
    }

    /// Writes a checkpoint under a temporary name, durably.
    pub(super) fn write_checkpoint_aside(&self, bytes: &[u8]) -> Result<(), SavedError> {
        let path = self.path.join(ASIDE);
        let mut file =
            private().write(true).create(true).truncate(true).open(&path).map_err(failed("create", &path))?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed("write", &path))
    }

    /// Renames it to the valid checkpoint.
    pub(super) fn put_checkpoint_in_place(&self) -> Result<(), SavedError> {
        let path = self.path.join(CHECKPOINT);
        fs::rename(self.path.join(ASIDE), &path).map_err(failed("replace", &path))
    }

    /// Makes renames and removals durable.
    pub(super) fn sync(&self) -> Result<(), SavedError> {
        File::open(&self.path).and_then(|directory| directory.sync_all()).map_err(failed("sync", &self.path))
    }

    fn log_path(&self, generation: u64) -> PathBuf {
        self.path.join(format!("{LOG}{generation}"))
    }

    /// The numbers of all logs, sorted.
    pub(super) fn logs(&self) -> Result<Vec<u64>, SavedError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed("list", &self.path))? {
            let name = entry.map_err(failed("list", &self.path))?.file_name();
            found.extend(
                name.to_str().and_then(|name| name.strip_prefix(LOG)).and_then(|number| number.parse::<u64>().ok()),
            );
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Removes the logs whose number is `doomed`, the lowest first: as long as one exists, all
    /// later ones exist, too.
    pub(super) fn remove_logs(&self, doomed: impl Fn(u64) -> bool) -> Result<(), SavedError> {
        for generation in self.logs()?.into_iter().filter(|&generation| doomed(generation)) {
            let path = self.log_path(generation);
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        Ok(())
    }

    /// Creates a log with its header only.
    pub(super) fn create_log(&self, header: &Header) -> Result<Log, SavedError> {
        let path = self.log_path(header.generation);
        // Remains of an earlier attempt.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", &path)(error)),
            _ => {}
        }
        let file = private().append(true).create_new(true).open(&path).map_err(failed("create", &path))?;
        let log = Log { generation: header.generation, file, length: AtomicU64::new(HEADER as u64) };
        if let Err(error) = log.write_whole(&header.encode()) {
            // A log without a header would count as damaged.
            fs::remove_file(&path).map_err(failed("remove", &path))?;
            return Err(failed("write", &path)(error));
        }
        Ok(log)
    }

    /// Returns the length of a log, bytes.
    pub(super) fn log_length(&self, generation: u64) -> Result<u64, SavedError> {
        let path = self.log_path(generation);
        fs::metadata(&path).map(|log| log.len()).map_err(failed("examine", &path))
    }

    /// Opens a log for reading.
    pub(super) fn read_log(&self, generation: u64) -> Result<File, SavedError> {
        let path = self.log_path(generation);
        File::open(&path).map_err(failed("open", &path))
    }

    /// Makes the error of a failed read.
    pub(super) fn log_failed(&self, generation: u64, error: io::Error) -> SavedError {
        failed("read", &self.log_path(generation))(error)
    }

    /// Opens a log for appending after its first `length` bytes, which are valid; the remainder is
    /// cut off.
    pub(super) fn continue_log(&self, generation: u64, length: u64) -> Result<Log, SavedError> {
        let path = self.log_path(generation);
        let file = private().append(true).open(&path).map_err(failed("open", &path))?;
        file.set_len(length).map_err(failed("shorten", &path))?;
        Ok(Log { generation, file, length: AtomicU64::new(length) })
    }
}

/// A log open for appending.
#[derive(Debug)]
pub(super) struct Log {
    generation: u64,
    file: File,
    length: AtomicU64,
}

impl Log {
    /// Appends by one system call, which the kernel does not interleave with those of other
    /// threads.
    pub(super) fn append(&self, record: &[u8]) -> io::Result<()> {
        self.write_whole(record)?;
        self.length.fetch_add(record.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Writes once: the remainder after a short write must not follow the record of another thread.
    fn write_whole(&self, bytes: &[u8]) -> io::Result<()> {
        let written = (&self.file).write(bytes)?;
        if written == bytes.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
    }

    pub(super) fn length(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    pub(super) fn sync(&self, directory: &StateDir) -> Result<(), SavedError> {
        self.file.sync_all().map_err(failed("sync", &directory.log_path(self.generation)))
    }

    /// Overwrites the magic number.
    pub(super) fn invalidate(&self, directory: &StateDir) -> Result<(), SavedError> {
        let path = directory.log_path(self.generation);
        // Opened again: an appending descriptor cannot write anywhere else.
        let file = OpenOptions::new().write(true).open(&path).map_err(failed("open", &path))?;
        file.write_all_at(&[0; 8], 0).map_err(failed("write", &path))
    }

    #[cfg(test)]
    pub(super) fn fill_the_disk(&mut self) {
        self.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
    }
}
