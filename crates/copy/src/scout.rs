//! Counts entries and bytes ahead while the copy is running, to estimate the remaining time. It also reads ahead
//! for the workers: the inodes that it has read are in the kernel's cache when they come.

use crate::{
    figures::add,
    job::Job,
    metadata::Meta,
    pair::{DIR, REG, UNKNOWN, open_directory},
};
use nacre_sys::directory;
use rustix::fs::FileType;
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::Ordering,
};

/// Size of the buffer for names of one directory.
const READING: usize = 32 << 10;

/// A directory that is being counted.
struct Level {
    directory: OwnedFd,
    buffer: Vec<u8>,
    at: usize,
    filled: usize,
}

impl Level {
    fn new(directory: OwnedFd) -> Level {
        Level { directory, buffer: vec![0; READING], at: 0, filled: 0 }
    }
}

/// Counts everything below `root`. Unreadable directories are left out: the workers report them.
pub(crate) fn count(job: &Job<'_>, root: BorrowedFd<'_>) {
    let Ok(again) = open_directory(root, b".") else { return };
    let mut levels = vec![Level::new(again)];
    while !job.is_stopped() {
        let top = levels.len() == 1;
        let Some(level) = levels.last_mut() else { break };
        match step(job, level, top) {
            Step::More => {}
            Step::Down(directory) => levels.push(Level::new(directory)),
            Step::Up => drop(levels.pop()),
        }
    }
    if levels.is_empty() {
        job.figures.counted.store(true, Ordering::Relaxed);
    }
}

enum Step {
    More,
    Down(OwnedFd),
    Up,
}

/// Counts one entry.
fn step(job: &Job<'_>, level: &mut Level, top: bool) -> Step {
    let Some(record) = level.buffer.get(level.at..level.filled).and_then(directory::first) else {
        let filled = directory::read(level.directory.as_fd(), &mut level.buffer).unwrap_or_default();
        (level.at, level.filled) = (0, filled);
        return if filled == 0 { Step::Up } else { Step::More };
    };
    let (name, kind) = (record.name, record.kind);
    level.at += record.length;
    if name == b"." || name == b".." || (top && job.is_own_name(name)) {
        return Step::More;
    }
    add(&job.figures.expected_entries, 1);
    if kind != DIR && kind != REG && kind != UNKNOWN {
        return Step::More;
    }
    let Ok(meta) = Meta::of_entry(level.directory.as_fd(), name) else { return Step::More };
    match meta.kind {
        FileType::RegularFile => {
            // Of a file with several hard links, each counts for its share.
            add(&job.figures.expected_bytes, meta.size.min(meta.allocated) / u64::from(meta.links.max(1)));
            Step::More
        }
        FileType::Directory
            if !(job.options.one_file_system && meta.device != job.source_device)
                && meta.identity() != job.dest_identity =>
        {
            open_directory(&level.directory, name).map_or(Step::More, Step::Down)
        }
        _ => Step::More,
    }
}
