//! The accounts of a cage on stable storage, so that a start needs no count of all files.
//!
//! Called by the cage. A state directory (never inside the cage) holds a checkpoint (the sums of
//! all accounts) and a log of the files that were changed since, each with its cost at the
//! checkpoint; `docs/cage-state.md` has the format. After a crash of the daemon, the sums are the
//! checkpoint's, minus the recorded costs of the changed files, plus their current costs. A log has
//! the number of the checkpoint that it follows. Invariants:
//! * a record is in the log before the first change to a file after a checkpoint; it is written
//!   once and never synced: it must survive this process, not the machine;
//! * whenever the process is killed, the checkpoint on disk and all logs of its number and above
//!   belong together: a new log is created before the checkpoint that it follows is written, and
//!   older logs are removed after that;
//! * a log that lacks a record is removed, so that it cannot mislead: a checkpoint without its log
//!   means that the usage is unknown;
//! * after a power loss (another boot) only the state of a clean shutdown is used.

mod files;
mod format;
#[doc(hidden)]
pub mod fuzz;
mod replay;
#[cfg(test)]
mod tests;

use super::ledger::{Owner, Sums};
use files::StateDir;
use format::{Checkpoint, Header};
use nacre_vfs::FileId;
use parking_lot::{Mutex, RwLock};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

/// Size of the log from which on a checkpoint is due, bytes (about 80,000 files).
const LOG_LARGE: u64 = 8 << 20;

/// Recorded path of a file whose current name is unknown: no real path looks like this.
pub(super) const SOMEWHERE: &[u8] = b"/";

/// Identity of the cage that a state belongs to. The state of another cage is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cage's root directory. Its `fs` is not compared: device numbers change from boot to
    /// boot.
    pub root: FileId,
    /// Paths of the directories with a limit, in the order of their index. Where these differ from
    /// the saved ones, the sums of the directories are not used, and the other sums do not count as
    /// exact.
    pub groups: Vec<Vec<u8>>,
}

/// A file that was changed since the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The file.
    pub id: FileId,
    /// Cost of the file in the checkpoint's sums (from its first record): bytes, with the lowest
    /// bit set if it was counted as a file (costs are multiples of a block, so that bit is free; an
    /// empty file and a nonexistent one must differ).
    pub charge: u64,
    /// The accounts that held it (from its first record).
    pub owner: Owner,
    /// Path of the file (from its last record).
    pub place: Vec<u8>,
}

/// State found in a state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// No state, or none of this cage.
    New,
    /// The cage was shut down cleanly.
    Clean {
        /// Usage at the shutdown.
        sums: Sums,
        /// Whether the sums are based on a count (else: on an earlier value that was never
        /// verified).
        exact: bool,
    },
    /// The daemon crashed, the machine kept running: the current usage is `sums`, minus the charges
    /// of `touched`, plus the current costs of these files.
    Crashed {
        /// Usage at the checkpoint.
        sums: Sums,
        /// As above.
        exact: bool,
        /// Files that may have changed since, in the order of their first change.
        touched: Vec<Touched>,
    },
    /// The machine crashed, or a part of the state is missing or damaged.
    Lost {
        /// Usage at some earlier time.
        last: Option<Sums>,
    },
}

/// Reason why there are no saved accounts.
#[derive(Debug)]
pub enum SavedError {
    /// Another process holds the lock of the state directory.
    Busy {
        /// The state directory.
        directory: PathBuf,
        /// The process id, where it could be read.
        pid: Option<u32>,
    },
    /// A call failed.
    Io {
        /// Operation that failed ("write", "open" ...).
        doing: &'static str,
        /// File that it was done to.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
}

impl fmt::Display for SavedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SavedError::Busy { directory, pid: Some(pid) } => {
                write!(
                    f,
                    "{} is in use by process {pid}: the same directory cannot be caged twice",
                    directory.display()
                )
            }
            SavedError::Busy { directory, pid: None } => {
                write!(
                    f,
                    "{} is in use by another process: the same directory cannot be caged twice",
                    directory.display()
                )
            }
            SavedError::Io { doing, path, error } => write!(f, "cannot {doing} {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for SavedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SavedError::Busy { .. } => None,
            SavedError::Io { error, .. } => Some(error),
        }
    }
}

/// One boot of a machine, as `/proc/sys/kernel/random/boot_id` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId(pub [u8; 16]);

impl BootId {
    /// Id of the current boot.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn present() -> Result<BootId, SavedError> {
        files::boot_id()
    }
}

/// The saved accounts of one cage. The state directory is locked until this is dropped.
pub struct Saved {
    directory: StateDir,
    identity: Identity,
    boot: BootId,
    /// Number of the current log, or of the last one.
    generation: AtomicU64,
    /// Current log; `None` where the checkpoint on disk cannot be followed up: usage is unknown, or
    /// the log lacks a record.
    log: RwLock<Option<files::Log>>,
    /// The number of the checkpoint on disk; held while it is replaced.
    committed: Mutex<u64>,
    #[cfg(test)]
    observer: Mutex<Option<tests::Observer>>,
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saved")
            .field("directory", &self.directory.path())
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

/// A checkpoint whose log is in use and which is not on disk yet. Dropping it equals a crash at
/// this point: the older checkpoint and both logs stay valid.
#[must_use = "without `commit` the checkpoint is not written"]
#[derive(Debug)]
pub struct Pending<'a> {
    saved: &'a Saved,
    checkpoint: Checkpoint,
}

impl Saved {
    /// Opens and locks a state directory, creates a missing one (mode 700), and returns the state
    /// found.
    ///
    /// After a clean shutdown, the state on disk is "not clean" when this returns. After a crash,
    /// further records are appended to the existing ones, so that another crash loses nothing. Else
    /// changes are not recorded before the first checkpoint: a crash then leads to a start like
    /// this one.
    ///
    /// # Errors
    /// Busy; or the directory cannot be created, read or written. Damaged or foreign content is no
    /// error but a [`Start`].
    pub fn open(directory: &Path, identity: &Identity) -> Result<(Saved, Start), SavedError> {
        Saved::open_in(directory, identity, BootId::present()?)
    }

    /// Opens and locks a state directory like [`Saved::open`], with a given boot id.
    ///
    /// # Errors
    /// As [`Saved::open`].
    pub fn open_in(directory: &Path, identity: &Identity, boot: BootId) -> Result<(Saved, Start), SavedError> {
        let directory = StateDir::open(directory)?;
        let found = replay::read(&directory, identity, boot)?;
        let saved = Saved {
            directory,
            identity: identity.clone(),
            boot,
            generation: AtomicU64::new(found.newest),
            log: RwLock::new(found.log),
            committed: Mutex::new(found.committed),
            #[cfg(test)]
            observer: Mutex::new(None),
        };
        if let Start::Clean { sums, exact } = &found.start {
            saved.end_cleanness(sums, *exact)?;
        }
        Ok((saved, found.start))
    }

    /// Marks a cleanly closed state as in use.
    fn end_cleanness(&self, sums: &Sums, exact: bool) -> Result<(), SavedError> {
        let Err(error) = self.checkpoint(sums, exact) else { return Ok(()) };
        tracing::warn!(%error, "a cage's accounting cannot be saved; after a crash, all files will be counted");
        *self.log.write() = None;
        // Needs no disk space. A clean checkpoint without its log is not used.
        self.directory.remove_logs(|_| true)?;
        self.directory.sync()
    }

    /// Number of the checkpoint that the current log follows: changes in
    /// [`Saved::begin_checkpoint`].
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Records that a file is about to change: needed before the first change to it after a
    /// checkpoint has begun (see [`Saved::generation`]); further calls may give it another `place`.
    /// `charge` is the file's cost in the ledger before the change (see [`Touched::charge`]; 0 for
    /// a file that is about to be created), and `owner` the accounts that hold it.
    ///
    /// One small write to the page cache. Never fails: a log that cannot take the record (a full
    /// disk) is removed, and a crash before the next checkpoint then requires a count of all files.
    pub fn touch(&self, id: FileId, place: &[u8], charge: u64, owner: Owner) {
        let log = self.log.read();
        let Some(present) = &*log else { return };
        let Err(error) = format::record(id, place, charge, owner).and_then(|record| present.append(&record)) else {
            return;
        };
        drop(log);
        self.give_up(&error);
    }

    fn give_up(&self, error: &io::Error) {
        let mut log = self.log.write();
        let Some(present) = log.take() else { return };
        tracing::warn!(%error, "a cage cannot note changes in its state directory; a crash before the next checkpoint means counting all files");
        if let Err(error) = self.directory.remove_logs(|_| true) {
            // Overwriting needs no new space on a host that writes in place.
            tracing::warn!(%error, "the log that lacks a change cannot be removed; it is made invalid instead");
            if let Err(error) = present.invalidate(&self.directory) {
                tracing::error!(%error, "a crash before the next checkpoint will leave wrong accounts until the next count of all files");
            }
        }
    }

    /// Whether the log has grown so much that an early checkpoint is due.
    pub fn wants_checkpoint(&self) -> bool {
        self.log.read().as_ref().is_some_and(|log| log.length() >= LOG_LARGE)
    }

    /// Whether changes are being recorded; if not (usage unknown, or a full disk), a crash requires
    /// a count of all files.
    pub fn follows(&self) -> bool {
        self.log.read().is_some()
    }

    /// Begins a checkpoint: from now on, changes are recorded in a new log. Quick; the caller holds
    /// off all changes of the accounts from before it takes `sums` until this returns. `exact`
    /// states whether the sums are based on a count.
    ///
    /// Before [`Pending::commit`], the caller records every file whose charge in `sums` may differ
    /// from its cost on the host although no further change follows: those that are open for
    /// writing, or being written. Else that difference would stay in the sums after a crash.
    ///
    /// # Errors
    /// No new log can be created; the old one stays in use.
    pub fn begin_checkpoint(&self, sums: &Sums, exact: bool) -> Result<Pending<'_>, SavedError> {
        self.begin(sums, exact, false)
    }

    #[expect(clippy::disallowed_methods, reason = "for people who read the checkpoint; nothing depends on it")]
    fn begin(&self, sums: &Sums, exact: bool, clean: bool) -> Result<Pending<'_>, SavedError> {
        let mut log = self.log.write();
        let generation = self.generation() + 1;
        let fresh = self.directory.create_log(&Header { generation, boot: self.boot })?;
        *log = Some(fresh);
        self.generation.store(generation, Ordering::Release);
        drop(log);
        self.observe("log begun");
        let written = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let checkpoint = Checkpoint {
            generation,
            boot: self.boot,
            clean,
            exact,
            written,
            root: (self.identity.root.ino, self.identity.root.generation),
            groups: self.identity.groups.clone(),
            sums: sums.clone(),
        };
        Ok(Pending { saved: self, checkpoint })
    }

    /// Begins a checkpoint and commits it: for moments when no file is open for writing.
    ///
    /// # Errors
    /// As [`Saved::begin_checkpoint`] and [`Pending::commit`].
    pub fn checkpoint(&self, sums: &Sums, exact: bool) -> Result<(), SavedError> {
        self.begin(sums, exact, false)?.commit()
    }

    /// Writes the checkpoint of a clean shutdown: no file is open, nothing changes any more. A
    /// record after this makes the state one of a crash again (but a power loss would not be
    /// detected).
    ///
    /// # Errors
    /// As [`Saved::checkpoint`]; the next start then finds the state of a crash.
    pub fn close(&self, sums: &Sums, exact: bool) -> Result<(), SavedError> {
        let pending = self.begin(sums, exact, true)?;
        if let Some(log) = &*self.log.read() {
            log.sync(&self.directory)?;
        }
        pending.commit()
    }

    #[cfg(test)]
    fn observe(&self, step: &'static str) {
        if let Some(observer) = &mut *self.observer.lock() {
            observer(step);
        }
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    fn observe(&self, _step: &'static str) {}
}

impl Pending<'_> {
    /// Writes the checkpoint durably, then removes the logs that it makes superfluous. Takes as
    /// long as the disk does; changes continue meanwhile. A checkpoint that is older than the one
    /// on disk is skipped.
    ///
    /// # Errors
    /// The checkpoint could not be written; the older one and the logs since stay valid. Retry
    /// later with new sums.
    pub fn commit(self) -> Result<(), SavedError> {
        let Pending { saved, checkpoint } = self;
        let mut committed = saved.committed.lock();
        if checkpoint.generation <= *committed {
            return Ok(());
        }
        saved.directory.write_checkpoint_aside(&checkpoint.encode())?;
        saved.observe("checkpoint written aside");
        saved.directory.put_checkpoint_in_place()?;
        *committed = checkpoint.generation;
        saved.observe("checkpoint in place");
        saved.directory.sync()?;
        saved.directory.remove_logs(|generation| generation < checkpoint.generation)?;
        saved.observe("old logs removed");
        Ok(())
    }
}
