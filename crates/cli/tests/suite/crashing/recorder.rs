//! A writer that records to the byte which writes are promised to be durable.

use super::{Dead, Load, Random, expected};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a slot: a block that is written as a whole.
const SLOT: usize = 4096;

/// Sizes of its files and writes.
#[derive(Clone, Copy, Debug)]
struct Extent {
    /// Slots of a file.
    slots: u64,
    /// Maximum slots of one write.
    most: u64,
}

/// Files of 2 MiB, written in pieces.
const SMALL: Extent = Extent { slots: 512, most: 20 };

/// Files of 16 MiB, written as streams are.
const STREAMS: Extent = Extent { slots: 4096, most: 2048 };

/// A file that is overwritten in place: for each slot the promised version, and the last one
/// written.
type Slots = Vec<(u64, u64)>;

/// The load; see the module.
pub struct Recorder {
    name: String,
    number: u64,
    extent: Extent,
    version: u64,
    promised: u64,
    rewritten: BTreeMap<String, Slots>,
    /// For each name the versions that may be there, the newest last; 0: no file.
    replaced: BTreeMap<String, Vec<u64>>,
    /// Number of bytes that were promised, and that were written.
    log: (u64, u64),
}

fn slot(key: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; SLOT];
    }
    let mut random = Random(key.wrapping_mul(0x1_0001).wrapping_add(version));
    // Half of them compress well.
    let mut bytes = if version.is_multiple_of(2) { random.bytes(SLOT) } else { random.bytes(8).repeat(SLOT / 8) };
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Returns whether each word of a slot belongs to one of these versions. The kernel splits a long
/// `write` where it finds a page of the writer's memory not present. And since Linux 6.16,
/// writeback sends the page itself, which the next `write` changes meanwhile: unsynced data may
/// arrive with some parts of one version and some of the other.
fn is_torn(found: &[u8], key: u64, versions: RangeInclusive<u64>) -> bool {
    const WORD: usize = size_of::<u64>();
    let possible: Vec<Vec<u8>> = versions.map(|version| slot(key, version)).collect();
    let is_possible = |(at, word): (usize, &[u8])| possible.iter().any(|slot| slot[at * WORD..][..WORD] == *word);
    found.chunks(WORD).enumerate().all(is_possible)
}

fn whole(key: u64, version: u64) -> Vec<u8> {
    let mut random = Random(key.wrapping_mul(0x2_0001).wrapping_add(version));
    let length = [100, 5000, 300_000][random.below(3) as usize];
    let length = random.below(length) as usize;
    let mut bytes = version.to_le_bytes().to_vec();
    bytes.extend(random.bytes(length));
    bytes
}

/// Returns byte `at` of a log.
fn of_log(number: u64, at: u64) -> u8 {
    let word = Random(number << 40 | at >> 3).next();
    // Never 0: a hole would read as 0.
    word.to_le_bytes()[(at & 7) as usize] | 1
}

impl Recorder {
    /// Creates the recorder of this number; each has a directory of its own.
    pub fn new(number: u64) -> Recorder {
        Recorder::with(number, SMALL)
    }

    /// Creates one that writes and overwrites whole parts of large files.
    pub fn of_streams(number: u64) -> Recorder {
        Recorder::with(number, STREAMS)
    }

    fn with(number: u64, extent: Extent) -> Recorder {
        let name = format!("recorder{number}");
        Recorder {
            name,
            number,
            extent,
            version: 0,
            promised: 0,
            rewritten: BTreeMap::new(),
            replaced: BTreeMap::new(),
            log: (0, 0),
        }
    }

    fn key(&self, name: &str, slot: u64) -> u64 {
        let of_name = name.bytes().fold(self.number, |sum, byte| sum.wrapping_mul(131).wrapping_add(u64::from(byte)));
        of_name.wrapping_mul(0x1000).wrapping_add(slot) << 20
    }

    fn step(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        match random.below(10) {
            0..4 => self.rewrite(directory, random),
            4..6 => self.append(directory, random),
            6..9 => self.replace(directory, random),
            _ => self.remove(directory, random),
        }
    }

    /// Writes some slots of a file in place, and often syncs them.
    fn rewrite(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        let name = format!("slots{}", random.below(3));
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(directory.join(&name))?;
        for _ in 0..=random.below(6) {
            self.version += 1;
            let Extent { slots: all, most } = self.extent;
            let first = random.below(all);
            let count = (1 + random.below(most)).min(all - first);
            let mut bytes = Vec::new();
            for at in first..first + count {
                bytes.extend(slot(self.key(&name, at), self.version));
                let slots = self.rewritten.entry(name.clone()).or_insert_with(|| vec![(0, 0); all as usize]);
                slots[at as usize].1 = self.version;
            }
            file.write_all_at(&bytes, first * SLOT as u64)?;
        }
        if random.below(3) > 0 {
            if random.below(4) == 0 {
                file.sync_all()?
            } else {
                file.sync_data()?
            }
            for slot in self.rewritten.get_mut(&name).into_iter().flatten() {
                slot.0 = slot.1;
            }
            self.promised += 1;
        }
        Ok(())
    }

    fn append(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(directory.join("log"))?;
        for _ in 0..=random.below(8) {
            let length = 1 + random.below(9000);
            let from = self.log.1;
            let bytes: Vec<u8> = (from..from + length).map(|at| of_log(self.number, at)).collect();
            self.log.1 += length;
            file.write_all(&bytes)?;
            if random.below(2) == 0 {
                file.sync_data()?;
                self.log.0 = self.log.1;
                self.promised += 1;
            }
        }
        Ok(())
    }

    /// Replaces a file as careful programs do.
    fn replace(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        let name = format!("whole{}", random.below(6));
        self.version += 1;
        let temporary = directory.join("temporary");
        let mut file = File::create(&temporary)?;
        file.write_all(&whole(self.key(&name, 0), self.version))?;
        file.sync_data()?;
        self.replaced.entry(name.clone()).or_insert_with(|| vec![0]).push(self.version);
        fs::rename(&temporary, directory.join(&name))?;
        self.promise_names(directory, random)
    }

    fn remove(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        let name = format!("whole{}", random.below(6));
        let possible = self.replaced.entry(name.clone()).or_insert_with(|| vec![0]);
        if possible.last() == Some(&0) {
            return Ok(());
        }
        possible.push(0);
        fs::remove_file(directory.join(&name))?;
        self.promise_names(directory, random)
    }

    fn promise_names(&mut self, directory: &Path, random: &mut Random) -> io::Result<()> {
        if random.below(2) == 0 {
            return Ok(());
        }
        File::open(directory)?.sync_all()?;
        for possible in self.replaced.values_mut() {
            possible.drain(..possible.len() - 1);
        }
        self.promised += 1;
        Ok(())
    }

    fn judge_rewritten(&mut self, directory: &Path, what: &str) {
        let (number, all) = (self.number, self.extent.slots);
        for (name, slots) in &mut self.rewritten {
            let mut whole = Vec::new();
            let content = read(&directory.join(name));
            let promised = slots.iter().any(|slot| slot.0 > 0);
            assert!(content.is_some() || !promised, "{what}: {name} of recorder {number} is gone");
            let mut content = content.unwrap_or_default();
            content.resize(SLOT * all as usize, 0);
            for (at, slot_of) in slots.iter_mut().enumerate() {
                let found = &content[at * SLOT..][..SLOT];
                let version = u64::from_le_bytes(found[..8].try_into().unwrap());
                let of_name =
                    name.bytes().fold(number, |sum, byte| sum.wrapping_mul(131).wrapping_add(u64::from(byte)));
                let key = of_name.wrapping_mul(0x1000).wrapping_add(at as u64) << 20;
                let place = format!("{what}: slot {at} of {name} of recorder {number}");
                assert!(
                    (slot_of.0..=slot_of.1).contains(&version),
                    "{place} has version {version}, expected {slot_of:?}"
                );
                if found != slot(key, version) {
                    let torn = is_torn(found, key, slot_of.0..=slot_of.1);
                    assert!(torn, "{place} never was so (version {version}, expected {slot_of:?})");
                    whole.push((at, slot(key, version)));
                }
                *slot_of = (version, version);
            }
            for (at, bytes) in whole {
                let file = OpenOptions::new()
                    .write(true)
                    .open(directory.join(name))
                    .unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
                file.write_all_at(&bytes, at as u64 * SLOT as u64)
                    .and_then(|()| file.sync_all())
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
            }
        }
    }

    fn judge_replaced(&mut self, directory: &Path, what: &str) {
        let names: Vec<String> = self.replaced.keys().cloned().collect();
        for name in names {
            let found = read(&directory.join(&name));
            let version =
                found.as_ref().map_or(0, |found| u64::from_le_bytes(found[..8].try_into().expect("a version")));
            let place = format!("{what}: {name} of recorder {}", self.number);
            if let Some(found) = &found {
                assert!(*found == whole(self.key(&name, 0), version), "{place} is not whole (version {version})");
            }
            let possible = self.replaced.get_mut(&name).unwrap();
            assert!(possible.contains(&version), "{place} has version {version}, possible were {possible:?}");
            *possible = vec![version];
        }
    }

    fn judge_log(&mut self, directory: &Path, what: &str) -> io::Result<()> {
        let place = directory.join("log");
        let found = read(&place).unwrap_or_default();
        let (promised, written) = self.log;
        let length = found.len() as u64;
        assert!(
            (promised..=written).contains(&length),
            "{what}: the log of recorder {} has {length} bytes of {:?}",
            self.number,
            self.log
        );
        for (at, byte) in (0..).zip(&found) {
            let right = *byte == of_log(self.number, at) || (*byte == 0 && at >= promised);
            assert!(right, "{what}: byte {at} of the log of recorder {} is {byte} (of {:?})", self.number, self.log);
        }
        if length > promised {
            // Beyond the promised length there may be holes.
            let file = OpenOptions::new().write(true).open(&place)?;
            file.set_len(promised)?;
            file.sync_all()?;
        }
        self.log = (promised, promised);
        Ok(())
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    match File::open(path) {
        Ok(mut file) => file.read_to_end(&mut content).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    Some(content)
}

impl Load for Recorder {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        let mut random = Random(seed);
        let directory: PathBuf = at.join(&self.name);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return expected(&error, dead),
            Ok(()) | Err(_) => {}
        }
        // The directory itself is durable only after a sync of its parent.
        if let Err(error) = File::open(at).and_then(|parent| parent.sync_all()) {
            return expected(&error, dead);
        }
        loop {
            if let Err(error) = self.step(&directory, &mut random) {
                return expected(&error, dead);
            }
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let directory = at.join(&self.name);
        self.judge_rewritten(&directory, what);
        self.judge_replaced(&directory, what);
        self.judge_log(&directory, what).unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    fn promises(&self) -> String {
        format!("{} {} promises", self.name, self.promised)
    }
}
