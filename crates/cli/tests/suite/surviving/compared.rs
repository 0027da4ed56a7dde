//! Files that are changed at random, and read after each change by all means: the content has to be
//! that of a copy in memory.
//!
//! One of the loads of `campaign.rs`. Stores to mappings are left out: the kernel itself loses some
//! ([docs/kernels.md](../../../../../docs/kernels.md)).

use super::loads::{Shared, until_dead};
use crate::crashing::{Dead, Load, Random};
use rustix::fs::{FallocateFlags, fallocate};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum length of a file.
const LONGEST: u64 = 300_000;

/// A change of a file.
enum Change {
    Write { at: u64, data: Vec<u8> },
    Append { data: Vec<u8> },
    Length(u64),
    Hole { at: u64, length: u64 },
}

impl Change {
    fn any(random: &mut Random, length: u64) -> Change {
        let at = random.below((length + 5000).min(LONGEST));
        let most = if random.below(3) == 0 { 100_000 } else { 6000 };
        let size = random.below(most) + 1;
        match random.below(8) {
            0 => Change::Length(random.below(LONGEST)),
            1 => Change::Hole { at, length: size },
            2 | 3 if length + size <= LONGEST => Change::Append { data: random.bytes(size as usize) },
            _ => Change::Write { at, data: random.bytes(size.min(LONGEST - at) as usize) },
        }
    }

    /// Describes the change for the report of a failure.
    fn text(&self) -> String {
        match self {
            Change::Write { at, data } => format!("{} bytes were written at {at}", data.len()),
            Change::Append { data } => format!("{} bytes were appended", data.len()),
            Change::Length(length) => format!("its length was set to {length}"),
            Change::Hole { at, length } => format!("a hole of {length} bytes was made at {at}"),
        }
    }

    /// Returns the content of a file after the change.
    fn applied(&self, content: &[u8]) -> Vec<u8> {
        let mut content = content.to_vec();
        match self {
            Change::Write { at, data } => {
                let (at, end) = (*at as usize, *at as usize + data.len());
                content.resize(content.len().max(end), 0);
                content[at..end].copy_from_slice(data);
            }
            Change::Append { data } => content.extend_from_slice(data),
            Change::Length(length) => content.resize(*length as usize, 0),
            Change::Hole { at, length } => {
                let (at, end) = (*at as usize, (*at + *length) as usize);
                let inside = content.len().min(at)..content.len().min(end);
                content[inside].fill(0);
            }
        }
        content
    }

    fn apply(&self, file: &File, path: &Path) -> io::Result<()> {
        match self {
            Change::Write { at, data } => file.write_all_at(data, *at),
            Change::Append { data } => OpenOptions::new().append(true).open(path)?.write_all(data),
            Change::Length(length) => file.set_len(*length),
            Change::Hole { at, length } => {
                Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, *at, *length)?)
            }
        }
    }
}

/// The load that changes and compares one file after the other.
#[derive(Default)]
pub struct Compared {
    pub shared: Arc<Shared>,
    files: [Content; 3],
}

/// The expected content of a file.
#[derive(Default)]
struct Content {
    now: Vec<u8>,
    /// The content after the newest change, which may be incomplete.
    next: Vec<u8>,
}

impl Compared {
    /// Creates the load with shared figures.
    pub fn new(shared: Arc<Shared>) -> Compared {
        Compared { shared, ..Compared::default() }
    }

    fn path(at: &Path, number: usize) -> PathBuf {
        at.join(format!("compared{number}"))
    }

    fn once(&mut self, at: &Path, kept: &mut [Option<File>; 3], random: &mut Random) -> io::Result<()> {
        let number = random.below(3) as usize;
        let (content, path) = (&mut self.files[number], Compared::path(at, number));
        if kept[number].is_none() || random.below(20) == 0 {
            kept[number] = Some(OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?);
        }
        let Some(file) = &kept[number] else { return Ok(()) };
        let change = Change::any(random, content.now.len() as u64);
        content.next = change.applied(&content.now);
        change.apply(file, &path)?;
        content.now.clone_from(&content.next);
        if random.below(10) == 0 {
            file.sync_all()?;
        }
        let mut read = Vec::new();
        let mut reader = file;
        reader.seek(SeekFrom::Start(0))?;
        reader.read_to_end(&mut read)?;
        for (how, read) in [("that is open", read), ("that is opened", fs::read(&path)?)] {
            let first = read.iter().zip(&content.now).position(|(one, other)| one != other);
            assert!(
                read == content.now,
                "file {number} {how}, after {}: {} bytes of {}, the first that is wrong: {first:?}",
                change.text(),
                read.len(),
                content.now.len()
            );
        }
        Ok(())
    }
}

impl Load for Compared {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        let (shared, mut random, mut kept) = (Arc::clone(&self.shared), Random(seed), [None, None, None]);
        until_dead(dead, &shared, |_| self.once(at, &mut kept, &mut random));
    }

    fn judge(&mut self, at: &Path, what: &str) {
        for (number, content) in self.files.iter().enumerate() {
            let there = fs::read(Compared::path(at, number)).unwrap_or_default();
            let (now, next) = (&content.now, &content.next);
            let lengths = now.len().min(next.len())..=now.len().max(next.len());
            assert!(lengths.contains(&there.len()), "{what}: file {number} has {} bytes", there.len());
            // Any part of the interrupted change may be there.
            let is_known = |at: usize, byte: u8| now.get(at) == Some(&byte) || next.get(at) == Some(&byte);
            let wrong = there.iter().enumerate().position(|(at, byte)| !is_known(at, *byte));
            assert_eq!(wrong, None, "{what}: file {number}");
        }
    }

    fn promises(&self) -> String {
        format!("{} changes of files that are compared", self.shared.done.load(std::sync::atomic::Ordering::Relaxed))
    }
}
