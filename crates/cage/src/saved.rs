//! The accounting of a cage on stable storage, so that a start needs no count of all files.
//!
//! Called by the cage. A state directory (never inside the cage) holds a checkpoint (the sums of
//! all accounts) and a log of the files that were touched since, each with what it cost at the
//! checkpoint; `docs/cage-state.md` has the format. After a crash of the daemon the sums are the
//! checkpoint's, less what the touched files cost then, plus what they cost now. Logs are numbered
//! like the checkpoint that they follow. Invariants:
//! * a record is in the log before the first change to a file after a checkpoint; it is written
//!   once and never synced: it must outlive this process, not the machine;
//! * whatever instant the process is killed at, the checkpoint on disk and all logs of its number
//!   and above belong together: a new log begins before the checkpoint that it follows is written,
//!   and older ones are removed after;
//! * a log that lacks a record is removed rather than left to mislead: a checkpoint without its log
//!   says that nobody knows;
//! * after a power loss (another boot) only a clean end is believed.

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

/// From this size of the log on, bytes, a checkpoint is due (about 80,000 files).
const LOG_LARGE: u64 = 8 << 20;

/// The place of a file of which no present name is known: no path is noted like this.
pub(super) const SOMEWHERE: &[u8] = b"/";

/// What the state belongs to. State of anything else is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cage's root directory. Its `fs` is not compared: device numbers change from boot to
    /// boot.
    pub root: FileId,
    /// What the per-directory limits are about, in the order of their index. Where these are others
    /// than before, the sums of the directories are not used, and what is left does not count as
    /// exact.
    pub groups: Vec<Vec<u8>>,
}

/// A file that was touched since the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The file.
    pub id: FileId,
    /// What the checkpoint's sums hold for it, as given first: bytes, in the lowest bit whether it
    /// was counted as a file at all (costs are multiples of a block, so that bit is free; an empty
    /// file and one that did not exist must not look alike).
    pub charge: u64,
    /// Whose accounts held that (of the first record).
    pub owner: Owner,
    /// Where to find it, as given last.
    pub place: Vec<u8>,
}

/// What a state directory knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nothing, or nothing about this cage.
    New,
    /// The cage was ended in order.
    Clean {
        /// What was used.
        sums: Sums,
        /// Whether that rests on a count (else: on a last known value that was never verified).
        exact: bool,
    },
    /// The daemon ended without a word, the machine went on: what the files cost now is `sums`,
    /// less the charges of `touched`, plus what these cost now.
    Crashed {
        /// What was used at the checkpoint.
        sums: Sums,
        /// As above.
        exact: bool,
        /// The files that may have changed since, in the order in which they were touched.
        touched: Vec<Touched>,
    },
    /// The machine ended without a word, or part of the state is missing or damaged.
    Lost {
        /// What was used at some time before.
        last: Option<Sums>,
    },
}

/// Why there is no saved accounting.
#[derive(Debug)]
pub enum SavedError {
    /// Another process keeps the accounts of this cage.
    Busy {
        /// The state directory.
        directory: PathBuf,
        /// The process, where it could be read.
        pid: Option<u32>,
    },
    /// A call failed.
    Io {
        /// What was to be done ("write", "open" ...).
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
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
    /// The present one.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn present() -> Result<BootId, SavedError> {
        files::boot_id()
    }
}

/// The saved accounting of one cage. The state directory is this process's own until it is dropped.
pub struct Saved {
    directory: StateDir,
    identity: Identity,
    boot: BootId,
    /// The number of the log that is written now, or was last.
    generation: AtomicU64,
    /// `None` where the checkpoint on disk cannot be followed up: nothing is known, or a record is
    /// lacking.
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

/// A checkpoint whose log is in use already and which is not on disk yet. Dropping it is as good as
/// a crash at this point: the older checkpoint and both logs stay valid.
#[must_use = "without `commit` the checkpoint is not written"]
#[derive(Debug)]
pub struct Pending<'a> {
    saved: &'a Saved,
    checkpoint: Checkpoint,
}

impl Saved {
    /// Takes hold of a state directory, which is made if need be (mode 700), and tells what is
    /// known.
    ///
    /// After a clean end, the state on disk says "not clean" when this returns. After a crash,
    /// further touches add to what is there, so that another crash loses nothing. Else touches are
    /// not kept before the first checkpoint: a crash then is a start like this one.
    ///
    /// # Errors
    /// Busy; or where the directory cannot be made, read or written. Damaged or foreign content is
    /// no error but a [`Start`].
    pub fn open(directory: &Path, identity: &Identity) -> Result<(Saved, Start), SavedError> {
        Saved::open_in(directory, identity, BootId::present()?)
    }

    /// The same, with the boot passed in.
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

    /// Makes sure that a state which was ended in order does not look like that any more.
    fn end_cleanness(&self, sums: &Sums, exact: bool) -> Result<(), SavedError> {
        let Err(error) = self.checkpoint(sums, exact) else { return Ok(()) };
        tracing::warn!(%error, "a cage's accounting cannot be saved; after a crash, all files will be counted");
        *self.log.write() = None;
        // Takes no space. A clean checkpoint without its log is not believed.
        self.directory.remove_logs(|_| true)?;
        self.directory.sync()
    }

    /// The number of the checkpoint that the present log follows: changes in
    /// [`Saved::begin_checkpoint`].
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Notes that a file is about to change: needed before the first change to it after a
    /// checkpoint has begun (see [`Saved::generation`]); further calls may give it another `place`.
    /// `charge` is what the ledger holds for it before the change (see [`Touched::charge`]; 0 for a
    /// file that is about to be made), and `owner` whose accounts hold that.
    ///
    /// One small write to the page cache. Never fails: a log that cannot take the record (a full
    /// disk) is given up, and a crash before the next checkpoint means counting all files.
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
            // Overwriting needs no new space where the host writes in place.
            tracing::warn!(%error, "the log that lacks a change cannot be removed; it is made invalid instead");
            if let Err(error) = present.invalidate(&self.directory) {
                tracing::error!(%error, "a crash before the next checkpoint will leave wrong accounts until the next count of all files");
            }
        }
    }

    /// Whether the log has grown so much that a checkpoint is due before its time.
    pub fn wants_checkpoint(&self) -> bool {
        self.log.read().as_ref().is_some_and(|log| log.length() >= LOG_LARGE)
    }

    /// Whether changes are being noted; if not (nothing known yet, or a full disk), a crash means
    /// counting all files.
    pub fn follows(&self) -> bool {
        self.log.read().is_some()
    }

    /// Begins a checkpoint: from now on, changes are noted in a new log. Quick; the caller holds
    /// off all changes of the books from before it takes `sums` until this returns. `exact` says
    /// whether the sums rest on a count.
    ///
    /// Before [`Pending::commit`], the caller touches every file whose charge in `sums` may differ
    /// from what the host will say of it if no further change follows: those that are open for
    /// writing, or being written. Else that difference would stay in the sums after a crash.
    ///
    /// # Errors
    /// Where no new log can be made; the old one goes on.
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

    /// Begins a checkpoint and commits it: for when nothing is open for writing.
    ///
    /// # Errors
    /// As [`Saved::begin_checkpoint`] and [`Pending::commit`].
    pub fn checkpoint(&self, sums: &Sums, exact: bool) -> Result<(), SavedError> {
        self.begin(sums, exact, false)?.commit()
    }

    /// Writes the checkpoint of an orderly end: nothing is open, nothing changes any more. Should a
    /// file be touched all the same, the state is one of a crash again (but a power loss would go
    /// unnoticed).
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
    /// long as the disk does; changes go on meanwhile. A checkpoint that a later one has overtaken
    /// is left out.
    ///
    /// # Errors
    /// Where it could not be written; the older checkpoint and the logs since stay valid. Try again
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
