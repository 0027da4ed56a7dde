//! The speed of the engine alone, without FUSE: `cargo run --release -p nacre-pool --example
//! engine_speed -- DIRECTORY [WHAT...]`.
//!
//! Makes a pool on a file in the directory and prints, for each measurement, the time, the rate,
//! and the same done on plain files there. WHAT: create, list, read, unlink, write, overwrite,
//! append; everything without any. In the environment: FILES; NAMES=any, names that do not follow
//! each other; THREADS and MORE, how many make how many files at once; GIB, MIB, CACHE_MIB,
//! BEGIN_MIB, MOST_MIB; KEPT_MIB, the length of a kept log, where there is to be one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    missing_docs,
    reason = "a program for developers"
)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nacre_pool::Store;
use nacre_pool::device::{Device, FileDevice, Random};
use nacre_pool::engine::{Committer, Dataset, Pace, Pool, PoolConfig};
use nacre_pool::files::{Inode, NewInode, ParentView};
use nacre_pool::log::KeptLog;
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_pool::store::NewPool;

const MIB: u64 = 1 << 20;

struct Bench {
    directory: PathBuf,
    pool: Arc<Pool>,
    dataset: Arc<Dataset>,
    committer: Committer,
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

fn is_far() -> bool {
    std::env::var("NAMES").is_ok_and(|names| names == "any")
}

/// Bytes that do not compress.
fn noise(random: &mut Random, buffer: &mut [u8]) {
    buffer.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]));
}

/// The name of a file by its number; `far` where neighbours shall have nothing in common.
fn name(at: u64, far: bool) -> String {
    if far { format!("file-{:016x}", Random(at).next()) } else { format!("file-{at:010}") }
}

/// A moment, in the world's time and in the processors' time of this process.
#[derive(Clone, Copy)]
struct Moment(Instant, f64);

impl Moment {
    fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Self(Instant::now(), ticks as f64 / 100.0)
    }
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096 / MIB
}

fn say(what: &str, start: Moment, operations: u64, bytes: u64) {
    let (seconds, processor) = (start.0.elapsed().as_secs_f64(), Moment::now().1 - start.1);
    print!(
        "{what:46} {seconds:7.3} s {processor:6.2} cpu-s {:4} MiB {:10.0} /s",
        resident(),
        operations as f64 / seconds
    );
    if bytes > 0 {
        print!(" {:8.1} MB/s", bytes as f64 / seconds / 1e6);
    }
    println!();
}

impl Bench {
    fn new(directory: &Path) -> Self {
        let path = directory.join("pool.img");
        let _ = std::fs::remove_file(&path);
        let device: Arc<dyn Device> = Arc::new(FileDevice::create(&path, number("GIB", 20) << 30).unwrap());
        let new = NewPool {
            name: "bench".to_owned(),
            guid: 7,
            host: (1, "here".to_owned()),
            time: 1,
            redundant_metadata: true,
        };
        let (store, _) = Store::create(vec![device], &new).unwrap();
        let store = Arc::new(store);
        let clock = || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
        };
        let cache = number("CACHE_MIB", 192) * MIB;
        let log = Some(store.log().expect("a log"));
        let kept = (number("KEPT_MIB", 0) > 0).then(|| KeptLog::new((number("KEPT_MIB", 0) * MIB) as usize).unwrap());
        let (clock, entropy) = (Arc::new(clock), Arc::new(|| 42));
        let config = PoolConfig { log, storage: store, clock, entropy, cache, kept };
        let pool = Arc::new(Pool::create(config, "bench").unwrap());
        let begin = number("BEGIN_MIB", 64) * MIB;
        let pace = Pace { begin, most: number("MOST_MIB", 96) * MIB, ..Pace::default() };
        let committer = pool.start_committer(pace).unwrap();
        let dataset = pool.dataset(pool.find("bench").unwrap().unwrap()).unwrap();
        Self { directory: directory.to_owned(), pool, dataset, committer }
    }

    fn make(&self, directory: &Inode, name: &str, file_type: FileType) -> Arc<Inode> {
        let new = |parent: &ParentView| {
            Ok(NewInode { row: InodeRow::new(file_type, 0o644, parent.now), target: None, attributes: Vec::new() })
        };
        self.dataset.files().make(directory, name.as_bytes(), b"", &new).unwrap().0
    }

    fn create(&self, threads: u64, files: u64, length: usize) {
        let root = self.dataset.files().root();
        let place = self.make(&root, &format!("d{threads}"), FileType::Directory);
        let (start, far) = (Moment::now(), is_far());
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let place = &place;
                scope.spawn(move || {
                    let mut content = vec![0; length];
                    let mut random = Random(thread + 1);
                    let each = files / threads;
                    let mut before = Instant::now();
                    for at in 0..each {
                        noise(&mut random, &mut content);
                        let file = self.make(place, &name(thread * each + at, far), FileType::Regular);
                        self.dataset.files().write(&file, Some(0), &content).unwrap();
                        if threads == 1 && (at + 1) % (each / 5) == 0 {
                            println!(
                                "    {:9} created, {:9.0} /s in the last fifth",
                                at + 1,
                                each as f64 / 5.0 / before.elapsed().as_secs_f64()
                            );
                            before = Instant::now();
                        }
                    }
                });
            }
        });
        say(&format!("create {files} files of {length} bytes, {threads} threads"), start, files, 0);
        let start = Moment::now();
        self.pool.commit().unwrap();
        say("  the commit behind it", start, 1, 0);
    }

    fn list(&self, directory: &str) {
        let files = self.dataset.files();
        let (place, _) = files.look_up(&files.root(), directory.as_bytes()).unwrap();
        for attributes in [false, true] {
            let start = Moment::now();
            let (mut behind, mut count) = (0, 0);
            loop {
                let some = files.list(&place, behind, attributes, 4000).unwrap();
                let Some(last) = some.last() else { break };
                behind = last.sequence;
                count += some.len() as u64;
            }
            say(&format!("list {count} files, attributes: {attributes}"), start, count, 0);
        }
    }

    fn read(&self, directory: &str, count: u64) {
        let files = self.dataset.files();
        let (place, _) = files.look_up(&files.root(), directory.as_bytes()).unwrap();
        let mut random = Random(3);
        let mut buffer = vec![0; 4096];
        let start = Moment::now();
        for _ in 0..count {
            let (file, _) = files.look_up(&place, name(random.next() % count, is_far()).as_bytes()).unwrap();
            files.read(&file, 0, &mut buffer).unwrap();
        }
        say("look up and read, at random", start, count, 0);
    }

    fn unlink(&self, directory: &str, count: u64) {
        let files = self.dataset.files();
        let (place, _) = files.look_up(&files.root(), directory.as_bytes()).unwrap();
        let start = Moment::now();
        for at in 0..count {
            files.unlink(&place, name(at, is_far()).as_bytes()).unwrap();
        }
        say("unlink", start, count, 0);
        let start = Moment::now();
        self.pool.commit().unwrap();
        say("  the commit behind it", start, 1, 0);
    }

    fn write(&self, name: &str, mebibytes: u64, text: bool) -> Arc<Inode> {
        let file = self.make(&self.dataset.files().root(), name, FileType::Regular);
        let mut block = vec![0; MIB as usize];
        fill(&mut block, text, 9);
        let start = Moment::now();
        for at in 0..mebibytes {
            block[..8].copy_from_slice(&at.to_le_bytes());
            self.dataset.files().write(&file, Some(at * MIB), &block).unwrap();
        }
        self.pool.sync_file(&self.dataset, &file).unwrap();
        say(&format!("write {mebibytes} MiB, text: {text}, fsync"), start, mebibytes, mebibytes * MIB);
        let plain = self.plain("plain");
        let start = Moment::now();
        for at in 0..mebibytes {
            block[..8].copy_from_slice(&at.to_le_bytes());
            plain.write_all_at(&block, at * MIB).unwrap();
        }
        plain.sync_all().unwrap();
        say("  a plain file", start, mebibytes, mebibytes * MIB);
        let start = Moment::now();
        for at in 0..mebibytes {
            assert_eq!(self.dataset.files().read(&file, at * MIB, &mut block).unwrap(), block.len());
        }
        say("  reading it again", start, mebibytes, mebibytes * MIB);
        file
    }

    fn plain(&self, name: &str) -> File {
        let path = self.directory.join(name);
        let _ = std::fs::remove_file(&path);
        OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap()
    }

    fn overwrite(&self, mebibytes: u64) {
        let file = self.write("random", mebibytes, false);
        let places = mebibytes * 256;
        let count = number("OVERWRITES", places);
        let mut block = vec![0; 4096];
        let mut random = Random(5);
        let start = Moment::now();
        for _ in 0..count {
            let at = random.next() % places;
            noise(&mut random, &mut block);
            self.dataset.files().write(&file, Some(at * 4096), &block).unwrap();
        }
        self.pool.sync_file(&self.dataset, &file).unwrap();
        say(&format!("{count} random overwrites of 4 KiB, fsync"), start, count, count * 4096);
        let plain = OpenOptions::new().write(true).open(self.directory.join("plain")).unwrap();
        let mut random = Random(5);
        let start = Moment::now();
        for _ in 0..count {
            let at = random.next() % places;
            noise(&mut random, &mut block);
            plain.write_all_at(&block, at * 4096).unwrap();
        }
        plain.sync_all().unwrap();
        say("  a plain file", start, count, count * 4096);
    }

    fn append(&self, count: u64) {
        let file = self.make(&self.dataset.files().root(), "log", FileType::Regular);
        let block = vec![7; 4096];
        let start = Moment::now();
        for _ in 0..count {
            self.dataset.files().write(&file, None, &block).unwrap();
            self.pool.sync_file(&self.dataset, &file).unwrap();
        }
        say("append 4 KiB and fsync", start, count, count * 4096);
        let plain = self.plain("plain-log");
        let start = Moment::now();
        for at in 0..count {
            plain.write_all_at(&block, at * 4096).unwrap();
            plain.sync_all().unwrap();
        }
        say("  a plain file", start, count, count * 4096);
    }
}

/// Words, or what does not compress.
fn fill(block: &mut [u8], text: bool, seed: u64) {
    let mut random = Random(seed);
    if !text {
        noise(&mut random, block);
        return;
    }
    let words = [
        "the ",
        "pool ",
        "of ",
        "segments ",
        "and ",
        "frames ",
        "is ",
        "written ",
        "once, ",
        "then ",
        "read\n",
        "again ",
    ];
    let mut at = 0;
    while at < block.len() {
        let word = words[random.next() as usize % words.len()].as_bytes();
        let length = word.len().min(block.len() - at);
        block[at..at + length].copy_from_slice(&word[..length]);
        at += length;
    }
}

fn main() {
    nacre_sys::memory::keep_large_blocks_apart();
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().expect("a directory"));
    let wanted: Vec<String> = arguments.collect();
    let does = |what: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == what);
    let bench = Bench::new(&directory);
    let files = number("FILES", 500_000);
    if ["create", "list", "read", "unlink"].iter().any(|what| does(what)) {
        bench.create(1, files, 100);
        if does("create") {
            bench.create(number("THREADS", 16), number("MORE", files), 100);
        }
        if does("list") {
            bench.list("d1");
        }
        if does("read") {
            bench.read("d1", files);
        }
        if does("unlink") {
            bench.unlink("d1", files);
        }
    }
    if does("write") {
        bench.write("noise", number("MIB", 2048), false);
        bench.write("text", number("MIB", 2048), true);
    }
    if does("overwrite") {
        bench.overwrite(512);
    }
    if does("append") {
        bench.append(number("APPENDS", 5000));
    }
    let start = Moment::now();
    bench.committer.stop().unwrap();
    say("the last commit", start, 1, 0);
    let peak = std::fs::read_to_string("/proc/self/status").unwrap();
    peak.lines().filter(|line| line.starts_with("VmHWM")).for_each(|line| println!("{line}"));
}
