//! Reads a state directory at the start and determines its state.

use super::{
    BootId, Identity, SavedError, Start, Touched,
    files::{Log, StateDir},
    format::{self, Checkpoint, HEADER, Header, RECORD_HEAD, Unreadable},
};
use hashbrown::{HashMap, hash_map::Entry};
use nacre_vfs::FileId;
use std::io::{self, BufReader, Read};

/// Result of reading a state directory.
pub(super) struct Replayed {
    pub(super) start: Start,
    /// The number of the checkpoint on disk; 0 without one.
    pub(super) committed: u64,
    /// The greatest log or checkpoint number in use.
    pub(super) newest: u64,
    /// The log to append to.
    pub(super) log: Option<Log>,
}

/// Reads the state of the cage `identity`.
pub(super) fn read(directory: &StateDir, identity: &Identity, boot: BootId) -> Result<Replayed, SavedError> {
    let mut logs = directory.logs()?;
    // A log that was being created when the process died: it contains no record, and the log before
    // it was still in use.
    if let Some(&last) = logs.last()
        && logs.len() > 1
        && directory.log_length(last)? < HEADER as u64
    {
        directory.remove_logs(|generation| generation == last)?;
        logs.pop();
    }
    let newest = logs.last().copied().unwrap_or(0);
    let nothing = |start, committed: u64| Replayed { start, committed, newest: newest.max(committed), log: None };
    let Some(bytes) = directory.read_checkpoint()? else { return Ok(nothing(Start::New, 0)) };
    let mut checkpoint = match Checkpoint::decode(&bytes) {
        Ok(checkpoint) => checkpoint,
        Err(unreadable) => {
            warn_unreadable(directory, unreadable);
            return Ok(nothing(Start::Lost { last: None }, 0));
        }
    };
    let committed = checkpoint.generation;
    if checkpoint.root != (identity.root.ino, identity.root.generation) {
        tracing::info!(
            state = %directory.path().display(),
            "another directory is at this path than before (made anew, or its file system is not mounted): its content is counted"
        );
        return Ok(nothing(Start::New, committed));
    }
    let regrouped = checkpoint.groups != identity.groups;
    if regrouped {
        checkpoint.sums.dirs.clear();
        checkpoint.exact = false;
    }
    let lost = |last| Ok(nothing(Start::Lost { last: Some(last) }, committed));
    if checkpoint.boot != boot && !checkpoint.clean {
        return lost(checkpoint.sums);
    }
    let Some(mut records) = read_logs(directory, &logs, &checkpoint)? else { return lost(checkpoint.sums) };
    let Checkpoint { sums, exact, .. } = checkpoint;
    if checkpoint.clean && records.touched.is_empty() && !records.torn {
        return Ok(nothing(Start::Clean { sums, exact }, committed));
    }
    if checkpoint.boot != boot {
        return lost(sums);
    }
    if regrouped {
        for touched in &mut records.touched {
            touched.owner.group = None;
        }
    }
    let log = Some(directory.continue_log(newest, records.length)?);
    Ok(Replayed { start: Start::Crashed { sums, exact, touched: records.touched }, committed, newest, log })
}

fn warn_unreadable(directory: &StateDir, unreadable: Unreadable) {
    let state = directory.path().display();
    match unreadable {
        Unreadable::Version(version) => {
            tracing::warn!(%state, version, "another version saved the accounting; all files are counted")
        }
        Unreadable::Damaged => tracing::warn!(%state, "the saved accounting is damaged; all files are counted"),
    }
}

/// Records of all logs together.
struct Records {
    touched: Vec<Touched>,
    /// Valid bytes of the newest log.
    length: u64,
    /// Whether the newest log ends in the middle of a record.
    torn: bool,
}

/// Reads the logs from the checkpoint's number on. `None` where one is missing, damaged or not of
/// this sequence.
fn read_logs(directory: &StateDir, logs: &[u64], checkpoint: &Checkpoint) -> Result<Option<Records>, SavedError> {
    let numbers: Vec<u64> = logs.iter().copied().filter(|&number| number >= checkpoint.generation).collect();
    let Some(&newest) = numbers.last() else {
        tracing::warn!(state = %directory.path().display(), "the log of the saved accounting was given up; all files are counted");
        return Ok(None);
    };
    let mut merged = Merged::default();
    for (expected, &number) in (checkpoint.generation..).zip(&numbers) {
        let length = directory.log_length(number)?;
        let file = directory.read_log(number)?;
        let of_file = |error| directory.log_failed(number, error);
        let header = Header { generation: expected, boot: checkpoint.boot };
        let Some(end) = read_log(BufReader::new(file), length, header, &mut merged).map_err(of_file)? else {
            tracing::warn!(state = %directory.path().display(), number, "a log of the saved accounting is missing or damaged; all files are counted");
            return Ok(None);
        };
        if number == newest {
            return Ok(Some(Records { touched: merged.touched, length: end, torn: end != length }));
        }
        if end != length {
            // A next log is never started after a record that was cut short.
            tracing::warn!(state = %directory.path().display(), number, "a log of the saved accounting is cut short; all files are counted");
            return Ok(None);
        }
    }
    Ok(None)
}

/// Reads one log of `length` bytes; returns the number of valid bytes, `None` if it is damaged. A
/// record that the end of the file cuts short was being written when the process was killed: its
/// file had not changed yet.
pub(super) fn read_log(
    mut log: impl Read,
    length: u64,
    header: Header,
    merged: &mut Merged,
) -> io::Result<Option<u64>> {
    let mut bytes = [0; HEADER];
    if length < HEADER as u64 {
        return Ok(None);
    }
    log.read_exact(&mut bytes)?;
    if Header::decode(&bytes) != Some(header) {
        return Ok(None);
    }
    let mut good = HEADER as u64;
    let mut payload = Vec::new();
    loop {
        let left = length - good;
        let mut head = [0; RECORD_HEAD];
        if left < RECORD_HEAD as u64 {
            return Ok(Some(good));
        }
        log.read_exact(&mut head)?;
        let Some((size, sum)) = format::record_head(&head) else { return Ok(None) };
        let whole = (RECORD_HEAD + size) as u64;
        if left < whole {
            return Ok(Some(good));
        }
        payload.resize(size, 0);
        log.read_exact(&mut payload)?;
        let Some(touched) = format::record_payload(&payload, sum) else { return Ok(None) };
        merged.add(touched);
        good += whole;
    }
}

/// Merged records, one per file: charge and owner of the first record, path of the last.
#[derive(Default)]
pub(super) struct Merged {
    touched: Vec<Touched>,
    index: HashMap<FileId, usize>,
}

impl Merged {
    fn add(&mut self, touched: Touched) {
        match self.index.entry(touched.id) {
            Entry::Vacant(vacant) => {
                vacant.insert(self.touched.len());
                self.touched.push(touched);
            }
            Entry::Occupied(occupied) => {
                if let Some(first) = self.touched.get_mut(*occupied.get()) {
                    first.place = touched.place;
                }
            }
        }
    }
}
