//! The journal of a commit: its steps, and how far it got. By it a commit is continued or undone after a crash.
//!
//! `steps` is written beside and renamed before anything is changed; a journal without it has changed nothing. `phase`
//! gets a line at each turning point, on stable storage before the next step:
//!
//! | phase | the base | what is possible |
//! |---|---|---|
//! | planned | has only staging directories more | both |
//! | prepared | any number of steps has been made | both |
//! | published | has all changes | continuing: removal of the old files, and of the changes from the upper |
//! | undoing | any number of steps has been taken back | undoing |
//! | taken back | has only staging directories more | undoing |

use crate::{
    Result, WorkspaceError,
    steps::{Slot, Steps, VERSION},
    trouble::{During, fact},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

const STEPS: &str = "steps";
const STEPS_NEW: &str = "steps.new";
const PHASE: &str = "phase";

/// How far a commit got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Planned,
    Prepared,
    Published,
    Undoing,
    TakenBack,
}

/// A line of `phase`.
#[derive(Debug, Serialize, Deserialize)]
enum Line {
    /// Inode numbers of the staged entries.
    Prepared(Vec<(Slot, u64)>),
    Published,
    Undoing,
    TakenBack,
}

/// The record of a commit in `commit/`, by which it is continued or undone after a crash.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    pub(crate) steps: Steps,
    pub(crate) phase: Phase,
    /// Inode numbers of the staged entries.
    pub(crate) staged: HashMap<Slot, u64>,
    /// The commit was interrupted.
    pub(crate) is_resumed: bool,
}

impl Journal {
    /// Writes the journal of a new commit.
    pub(crate) fn create(directory: &Path, steps: Steps) -> Result<Journal> {
        fs::DirBuilder::new().mode(0o700).create(directory).during("create", directory)?;
        let new = directory.join(STEPS_NEW);
        let written = || -> std::io::Result<()> {
            let mut file = File::create_new(&new)?;
            file.write_all(&serde_json::to_vec(&steps)?)?;
            file.sync_all()?;
            fs::rename(&new, directory.join(STEPS))?;
            sync(directory)?;
            sync(directory.parent().unwrap_or(Path::new(".")))
        };
        if let Err(error) = written() {
            // Nothing has been changed; a journal that stays says so by its missing steps.
            let _ = fs::remove_dir_all(directory);
            return Err(error).during("write", directory);
        }
        Ok(Journal {
            directory: directory.to_path_buf(),
            steps,
            phase: Phase::Planned,
            staged: HashMap::new(),
            is_resumed: false,
        })
    }

    /// Opens the journal of an interrupted commit; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(journal: &Path) -> Result<Option<Journal>> {
        let steps = match fs::read(journal.join(STEPS)) {
            Ok(steps) => steps,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // A commit that was interrupted while it wrote its journal has changed nothing.
                return match fs::remove_dir_all(journal) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).during("remove", journal),
                    _ => Ok(None),
                };
            }
            Err(error) => return Err(error).during("read", journal),
        };
        let broken = |error: serde_json::Error| WorkspaceError {
            what: format!("the journal {} is broken: {error}", crate::trouble::shown(journal)),
            errno: None,
        };
        let steps: Steps = serde_json::from_slice(&steps).map_err(broken)?;
        if steps.version != VERSION {
            return Err(fact(journal, &format!("has the format {}, which this version does not know", steps.version)));
        }
        let mut read = Journal {
            directory: journal.to_path_buf(),
            steps,
            phase: Phase::Planned,
            staged: HashMap::new(),
            is_resumed: true,
        };
        let phases = match fs::read(journal.join(PHASE)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            phases => phases.during("read", journal)?,
        };
        // A last line without newline was interrupted: the next step had not begun.
        let whole = phases.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in phases.get(..whole).unwrap_or_default().split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
        {
            match serde_json::from_slice(line).map_err(broken)? {
                Line::Prepared(staged) => {
                    read.phase = Phase::Prepared;
                    read.staged = staged.into_iter().collect();
                }
                Line::Published => read.phase = Phase::Published,
                Line::Undoing => read.phase = Phase::Undoing,
                Line::TakenBack => read.phase = Phase::TakenBack,
            }
        }
        if phases.len() > whole {
            let file = OpenOptions::new().write(true).open(journal.join(PHASE)).during("open", journal)?;
            file.set_len(whole as u64).during("write", journal)?;
        }
        Ok(Some(read))
    }

    pub(crate) fn prepared(&mut self, staged: HashMap<Slot, u64>) -> Result<()> {
        let mut numbers: Vec<(Slot, u64)> = staged.iter().map(|(slot, ino)| (*slot, *ino)).collect();
        numbers.sort_by_key(|(slot, _)| (slot.stage, slot.number));
        self.append(&Line::Prepared(numbers))?;
        (self.phase, self.staged) = (Phase::Prepared, staged);
        Ok(())
    }

    pub(crate) fn published(&mut self) -> Result<()> {
        self.append(&Line::Published)?;
        self.phase = Phase::Published;
        Ok(())
    }

    pub(crate) fn undoing(&mut self) -> Result<()> {
        if self.phase != Phase::Undoing {
            self.append(&Line::Undoing)?;
            self.phase = Phase::Undoing;
        }
        Ok(())
    }

    pub(crate) fn taken_back(&mut self) -> Result<()> {
        self.append(&Line::TakenBack)?;
        self.phase = Phase::TakenBack;
        Ok(())
    }

    fn append(&self, line: &Line) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            let mut file = OpenOptions::new().append(true).create(true).open(self.directory.join(PHASE))?;
            let before = file.metadata()?.len();
            if let Err(error) = file.write_all(&text).and_then(|()| file.sync_all()) {
                file.set_len(before)?;
                return Err(error);
            }
            sync(&self.directory)
        };
        write().during("write", &self.directory)
    }

    /// Removes the journal of a commit that has ended, its steps first.
    pub(crate) fn remove(self) -> Result<()> {
        let removed = fs::remove_file(self.directory.join(STEPS))
            .and_then(|()| sync(&self.directory))
            .and_then(|()| fs::remove_dir_all(&self.directory))
            .and_then(|()| sync(self.directory.parent().unwrap_or(Path::new("."))));
        removed.during("remove", &self.directory)
    }
}

/// Makes the names in a directory durable.
pub(crate) fn sync(directory: &Path) -> std::io::Result<()> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    File::open(directory)?.sync_all()
}
