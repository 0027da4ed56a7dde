//! Snapshots right after unsynced writes: a completed snapshot survives a crash, and contains the
//! writes before it.

use super::{Dead, Load, Random, expected};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum number of kept snapshots: they hold all blocks that were overwritten since.
const MOST: usize = 3;

/// Expectations of a snapshot.
#[derive(Clone, Debug)]
struct Taken {
    /// The content of the file when the snapshot was requested.
    content: Vec<u8>,
    /// Whether it was acknowledged; else the mount died meanwhile.
    certain: bool,
}

/// The load; see the module.
#[derive(Default)]
pub struct Snapshots {
    number: u64,
    content: Vec<u8>,
    taken: BTreeMap<String, Taken>,
    /// Snapshots whose destruction was acknowledged.
    gone: Vec<String>,
    promised: u64,
}

fn place(at: &Path) -> PathBuf {
    at.join("snapped")
}

fn directory(at: &Path) -> PathBuf {
    at.join(".zfs/snapshot")
}

impl Snapshots {
    /// Writes without a sync, takes a snapshot, writes again.
    fn step(&mut self, at: &Path, random: &mut Random) -> io::Result<()> {
        for _ in 0..=random.below(4) {
            self.write(at, random)?;
        }
        self.number += 1;
        let name = format!("s{}", self.number);
        self.taken.insert(name.clone(), Taken { content: self.content.clone(), certain: false });
        fs::create_dir(directory(at).join(&name))?;
        self.taken.get_mut(&name).expect("it was put there").certain = true;
        self.promised += 1;
        self.write(at, random)?;
        while self.taken.len() > MOST {
            let oldest = self
                .taken
                .keys()
                .min_by_key(|name| name[1..].parse::<u64>().expect("a number"))
                .expect("one of them")
                .clone();
            self.taken.get_mut(&oldest).expect("it is there").certain = false;
            fs::remove_dir(directory(at).join(&oldest))?;
            self.taken.remove(&oldest);
            self.gone.push(oldest);
        }
        Ok(())
    }

    fn write(&mut self, at: &Path, random: &mut Random) -> io::Result<()> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(place(at))?;
        let from = usize::try_from(random.below(600_000)).expect("small");
        let length = [100, 5000, 300_000][random.below(3) as usize];
        let length = 1 + random.below(length) as usize;
        let bytes = random.bytes(length);
        self.content.resize(self.content.len().max(from + length), 0);
        self.content[from..from + length].copy_from_slice(&bytes);
        file.write_all_at(&bytes, from as u64)?;
        if random.below(5) == 0 {
            let length = random.below(self.content.len() as u64 + 1);
            file.set_len(length)?;
            self.content.truncate(length as usize);
        }
        Ok(())
    }
}

impl Load for Snapshots {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        let mut random = Random(seed);
        loop {
            if let Err(error) = self.step(at, &mut random) {
                return expected(&error, dead);
            }
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        for (name, taken) in &self.taken {
            match fs::read(directory(at).join(name).join("snapped")) {
                Ok(found) => assert!(found == taken.content, "{what}: the snapshot {name} holds something else"),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    assert!(!taken.certain, "{what}: the snapshot {name} is gone, or its file is");
                }
                Err(error) => panic!("{what}: the snapshot {name}: {error}"),
            }
        }
        for name in self.gone.drain(..) {
            assert!(!directory(at).join(&name).exists(), "{what}: the snapshot {name} is there again");
        }
        self.taken.retain(|name, _| directory(at).join(name).exists());
        self.taken.values_mut().for_each(|taken| taken.certain = true);
        // Unsynced writes may or may not be there.
        self.content = fs::read(place(at)).unwrap_or_default();
    }

    fn promises(&self) -> String {
        format!("{} snapshots", self.promised)
    }
}
