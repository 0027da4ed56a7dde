//! What limits a large pool, measured as far as this machine goes and computed from there on:
//! `cargo run --release -p nacre-pool --example scale -- DIRECTORY [docs/scale.md]`.
//!
//! Makes a pool on a sparse file in the directory and fills it with NAMES empty files (in the
//! environment; 10,000,000 otherwise), and tables of up to SEGMENTS segments in memory (1,000,000)
//! without a pool; commits of a pool in memory. Prints tables in Markdown; with a document, they also replace what stands there
//! between its two marks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    missing_docs,
    reason = "a program for developers"
)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nacre_pool::Store;
use nacre_pool::backend::{MemoryBucket, Objects, WriterId, slots};
use nacre_pool::device::{Device, FileDevice, Random};
use nacre_pool::engine::{Committer, Dataset, Durable, Pace, Pool, PoolConfig};
use nacre_pool::files::{Inode, NewInode, ParentView};
use nacre_pool::frames::{CompressionSetting, Frames, NewFrame, Owner, WriteStream};
use nacre_pool::label::{LogStart, Root, SlotAddress, TableSegment};
use nacre_pool::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_pool::segment::cleaner::{self, Pressure};
use nacre_pool::segment::pages::{self, TableReader};
use nacre_pool::segment::table::{LONGEST, Op, PAGE, SegmentTable};
use nacre_pool::store::{Access, Commit, DELTAS, Import, NewPool, Space};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const BEGIN: &str = "<!-- scale: begin -->";
const END: &str = "<!-- scale: end -->";

/// The pool of the question.
const FILES: u64 = 1_000_000_000;
const BYTES: u64 = 10_000_000_000_000_000;
const CORES: u64 = 64;
const READERS: u64 = 1000;

/// Content of a frame: the record size of new file systems.
const RECORD: u64 = 128 << 10;
/// Segments of a pool in a bucket (`SEGMENT` of crates/admin/src/pool/in_bucket.rs).
const OBJECT: u64 = 8 * MIB;
/// Most bytes of one request (`MAX_IO` of crates/fuse/src/negotiate.rs); each thread of a ring has a
/// buffer of this length.
const REQUEST: u64 = MIB;
/// Seconds between two looks of a reader.
const EVERY: u64 = 1;
/// Seconds between two commits of a busy pool (`Pace::every`).
const COMMIT: u64 = 5;
/// Files of a directory.
const FAN: u64 = 10_000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.replace('_', "").parse().unwrap())
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

/// A number with three digits that mean something.
fn short(number: f64) -> String {
    match number {
        n if n >= 100.0 || n == 0.0 => format!("{n:.0}"),
        n if n >= 10.0 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

fn bytes(bytes: f64) -> String {
    let mut unit = 0;
    let mut rest = bytes;
    while rest >= 1024.0 && unit < 5 {
        rest /= 1024.0;
        unit += 1;
    }
    format!("{} {}", short(rest), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit])
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{} us", short(s * 1e6)),
        s if s < 1.0 => format!("{} ms", short(s * 1e3)),
        s if s < 7200.0 => format!("{} s", short(s)),
        s => format!("{} h", short(s / 3600.0)),
    }
}

fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}

/// What tables of segments cost.
#[derive(Clone, Copy)]
struct TableFigures {
    segments: u64,
    /// The length of a segment.
    length: u64,
    /// Each of them, for one segment.
    memory: f64,
    stored: f64,
    write: f64,
    read: f64,
    choose: f64,
}

/// A table of segments as long as can be, full of records, of which a tenth are dead here and there.
fn table(segments: u64, length: u64) -> TableFigures {
    let mut random = Random(7);
    // What the one before it had would be used again.
    nacre_sys::memory::trim();
    let before = resident();
    let mut table = SegmentTable::default();
    let frames = u32::try_from(length / (RECORD + 80)).unwrap();
    let length32 = u32::try_from(length).unwrap();
    let units = (RECORD + 80) / 16;
    for id in 1..=u32::try_from(segments).unwrap() {
        let place = vec![SlotAddress { device: u16::try_from(id % 1000).unwrap(), slot: id / 1000 }].into();
        let newest = Txg(u64::from(id) / 100 + 1);
        table.replay(&Op::Open { id, stream: WriteStream::Data, place }).unwrap();
        let all = frames * u32::try_from(units).unwrap();
        table.replay(&Op::Grow { id, frames, bytes: length32, units: all, newest }).unwrap();
        table.replay(&Op::Seal { id }).unwrap();
        let dead: BTreeSet<u32> = (0..frames / 10).map(|_| (random.next() % u64::from(frames)) as u32).collect();
        for index in dead {
            table.replay(&Op::Free { segment: id, index, count: 1, units: u32::try_from(units).unwrap() }).unwrap();
        }
    }
    let memory = resident().saturating_sub(before);
    let (write, stored) = timed(|| -> Vec<(u32, Vec<u8>)> {
        table.pages().into_iter().map(|page| (page, pages::write_page(&table, page))).collect()
    });
    let delta = pages::write_delta(9, table.next(), &[], &[]);
    let (read, again) = timed(|| {
        let mut reader = TableReader::default();
        stored.iter().for_each(|(page, bytes)| reader.page(bytes, *page).unwrap());
        reader.delta(&delta).unwrap();
        reader.finish().unwrap().table
    });
    assert_eq!(again.segments().len() as u64, segments);
    let full: usize = stored.iter().map(|(_, bytes)| bytes.len() + 80).sum();
    let (choose, chosen) = timed(|| {
        let capacity = |_: &_| length;
        cleaner::choose(&table, &capacity, 1 << 40, Pressure::Some, &|_, _| false)
    });
    assert!(chosen.is_some());
    let each = |all: f64| all / segments as f64;
    TableFigures {
        segments,
        length,
        memory: each(memory as f64),
        stored: each(full as f64),
        write: each(write),
        read: each(read),
        choose: each(choose),
    }
}

/// So many frames of the list of the table's segments fit into a root record beside everything else.
fn most_list_frames() -> u64 {
    let pointer = Pointer {
        segment: u32::MAX,
        index: 1,
        offset: 1,
        stored: 1,
        logical: 1,
        kind: FrameKind::Table,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(1 << 40),
        checksum: [1; 16],
    };
    let fits = |frames: u32| {
        let root = Root {
            pool: u64::MAX,
            generation: 1 << 40,
            kept: 1 << 40,
            txg: Txg(1 << 40),
            time: 1 << 40,
            clean: false,
            next_segment: u32::MAX,
            catalog: Some(pointer),
            upper: Vec::new(),
            log_start: LogStart::default(),
            log: vec![(SlotAddress { device: 0, slot: 0 }, 1)],
            // What holds the list is named by the record itself.
            table_segments: (0..frames).map(|at| listed(u32::MAX - at)).collect(),
            table: None,
            deltas: vec![pointer; DELTAS],
            table_top: vec![pointer],
            table_list: vec![pointer; frames as usize],
            listed: [].into(),
            guarded: true,
        };
        root.encode().is_ok()
    };
    u64::from((1..100).take_while(|frames| fits(*frames)).last().unwrap())
}

/// A segment of the table.
fn listed(id: u32) -> TableSegment {
    let place = vec![SlotAddress { device: 999, slot: 1 << 20 }, SlotAddress { device: 998, slot: 1 << 20 }];
    TableSegment { id, place: place.into(), frames: 8, bytes: LONGEST, dead_since: Some(1 << 40) }
}

/// What commits take in a pool of so many segments, which is in memory.
struct CommitFigures {
    segments: u64,
    mean: f64,
    longest: f64,
    /// Of the table, for each.
    written: f64,
    /// All of the table.
    stored: u64,
}

/// Commits of one frame and of one that is freed.
fn commits(most: u64) -> Vec<CommitFigures> {
    const SEGMENT: u64 = 16 << 10;
    const COMMITS: u32 = 200;
    let writer = WriterId { nonce: 1, host: "here".to_owned(), clock: Box::new(|| 1), uptime: Box::new(|| 1) };
    let objects = Objects::new(Arc::new(MemoryBucket::new(1, 0)), 7, SEGMENT, 1 << 50, writer);
    let new =
        NewPool { name: "scale".to_owned(), guid: 7, host: (1, "here".to_owned()), time: 1, redundant_metadata: false };
    let (store, _) = Store::create_in(Arc::new(objects), &new, 1 << 50).unwrap();
    let (mut random, mut live, mut txg) = (Random(3), Vec::new(), 1);
    let mut content = vec![0; 9 << 10];
    let mut write = |live: &mut Vec<Pointer>, txg: u64| {
        content[..8].copy_from_slice(&random.next().to_le_bytes());
        let frame = NewFrame {
            stream: WriteStream::Data,
            kind: FrameKind::Data,
            owner: Owner { dataset: 1, object: 1, offset: 0 },
            birth: Txg(txg),
            content: &content,
            compression: CompressionSetting::Off,
            checksum: ChecksumKind::Xxh3,
        };
        live.push(store.write(&frame).unwrap());
        random.next() as usize
    };
    let commit = |txg: u64| {
        let log_start = LogStart::default();
        store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: 1 }).unwrap();
    };
    let (mut at, mut figures) = (1000, Vec::new());
    while at <= most {
        while (live.len() as u64) < at {
            for _ in 0..2000 {
                write(&mut live, txg);
            }
            commit(txg);
            txg += 1;
        }
        let before = store.traffic().table;
        let (mut all, mut longest) = (0.0, 0.0f64);
        for _ in 0..COMMITS {
            let random = write(&mut live, txg);
            let freed = live.swap_remove(random % live.len());
            store.free(&freed, Txg(txg));
            let (seconds, ()) = timed(|| commit(txg));
            (all, longest, txg) = (all + seconds, longest.max(seconds), txg + 1);
        }
        let written = (store.traffic().table - before) as f64 / f64::from(COMMITS);
        let (segments, stored) = (live.len() as u64, store.space().table);
        figures.push(CommitFigures { segments, mean: all / f64::from(COMMITS), longest, written, stored });
        at *= 10;
    }
    figures
}

/// A pool of names.
struct Names {
    device: Arc<dyn Device>,
    store: Arc<Store>,
    pool: Arc<Pool>,
    dataset: Arc<Dataset>,
    committer: Committer,
}

#[derive(Clone, Copy)]
struct NamesFigures {
    names: u64,
    /// A second.
    created: f64,
    stored: f64,
    /// A commit behind a thousand more, in directories all over the pool.
    commit: f64,
    table: u64,
    slots: u64,
    /// Opened again, with an empty cache.
    import: f64,
    cold: f64,
    warm: f64,
    memory: u64,
}

fn config(store: &Arc<Store>) -> PoolConfig {
    let clock = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
    };
    let log = Some(store.log().expect("a log"));
    PoolConfig {
        log,
        storage: Arc::clone(store) as _,
        clock: Arc::new(clock),
        entropy: Arc::new(|| 42),
        cache: 512 * MIB,
        kept: None,
    }
}

fn running(pool: Pool) -> (Arc<Pool>, Arc<Dataset>, Committer) {
    let pool = Arc::new(pool);
    let committer = pool.start_committer(Pace::for_memory(512 * MIB)).unwrap();
    let dataset = pool.dataset(pool.find("scale").unwrap().unwrap()).unwrap();
    (pool, dataset, committer)
}

impl Names {
    fn new(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        let device: Arc<dyn Device> = Arc::new(FileDevice::create(path, 64 * GIB).unwrap());
        let new = NewPool {
            name: "scale".to_owned(),
            guid: 7,
            host: (1, "here".to_owned()),
            time: 1,
            redundant_metadata: true,
        };
        let (store, _) = Store::create(vec![Arc::clone(&device)], &new).unwrap();
        let store = Arc::new(store);
        let (pool, dataset, committer) = running(Pool::create(config(&store), "scale").unwrap());
        Self { device, store, pool, dataset, committer }
    }

    fn make(&self, directory: &Inode, name: &str, file_type: FileType) -> Arc<Inode> {
        let new = |parent: &ParentView| {
            Ok(NewInode { row: InodeRow::new(file_type, 0o644, parent.now), target: None, attributes: Vec::new() })
        };
        self.dataset.files().make(directory, name.as_bytes(), b"", &new).unwrap().0
    }

    fn directory(&self, at: u64) -> Arc<Inode> {
        let files = self.dataset.files();
        files.look_up(&files.root(), format!("d{at:06}").as_bytes()).unwrap().0
    }

    /// Looks names up all over the pool; a second's.
    fn look_up(&self, names: u64, times: u64) -> f64 {
        let mut random = Random(names);
        let (seconds, ()) = timed(|| {
            for _ in 0..times {
                let at = random.next() % names;
                let directory = self.directory(at / FAN);
                self.dataset.files().look_up(&directory, format!("f{at:010}").as_bytes()).unwrap();
            }
        });
        times as f64 / seconds
    }

    /// From `from` to `to` names.
    fn grow(self, from: u64, to: u64) -> (Self, NamesFigures) {
        let root = self.dataset.files().root();
        let (seconds, ()) = timed(|| {
            let mut directory = None;
            for at in from..to {
                if at % FAN == 0 || directory.is_none() {
                    let name = format!("d{:06}", at / FAN);
                    let made = (at % FAN == 0).then(|| self.make(&root, &name, FileType::Directory));
                    directory = Some(made.unwrap_or_else(|| self.directory(at / FAN)));
                }
                self.make(directory.as_ref().unwrap(), &format!("f{at:010}"), FileType::Regular);
            }
        });
        self.pool.commit().unwrap();
        let memory = resident();
        let mut random = Random(to);
        for at in 0..1000 {
            self.make(&self.directory(random.next() % (to / FAN)), &format!("x{to}-{at}"), FileType::Regular);
        }
        let (commit, _) = timed(|| self.pool.commit().unwrap());
        let Space { allocated, copies, table, slots, free_slots, .. } = self.store.space();
        let warm = self.look_up(to, 20_000);
        // Away and back.
        let Self { device, store, pool, dataset, committer } = self;
        committer.stop().unwrap();
        drop((dataset, pool));
        store.close(true, 2).unwrap();
        drop(store);
        let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".to_owned()), time: 3 };
        let (import, (store, root)) = timed(|| Store::open(vec![Arc::clone(&device)], &import).unwrap());
        let store = Arc::new(store);
        let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
        let (engine, pool) = timed(|| Pool::open(config(&store), &durable).unwrap());
        let (pool, dataset, committer) = running(pool);
        let again = Self { device, store, pool, dataset, committer };
        let cold = again.look_up(to, 2000);
        let figures = NamesFigures {
            names: to,
            created: (to - from) as f64 / seconds,
            stored: (allocated + copies) as f64 / to as f64,
            commit,
            table,
            slots: slots - free_slots,
            import: import + engine,
            cold,
            warm,
            memory,
        };
        (again, figures)
    }
}

fn measured_tables(text: &mut String, all: &[TableFigures]) {
    writeln!(text, "\n### Measured: the table of segments alone\n").unwrap();
    writeln!(text, "Segments full of records of {}, a tenth of them dead here and there.\n", bytes(RECORD as f64))
        .unwrap();
    writeln!(text, "| segments | each of | what they can hold | in memory, each | stored, each | made in | read in | the cleaner's choice |").unwrap();
    writeln!(text, "|---:|---:|---:|---:|---:|---:|---:|---:|").unwrap();
    for one in all {
        let whole = one.segments as f64;
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            count(one.segments),
            bytes(one.length as f64),
            bytes(whole * one.length as f64),
            bytes(one.memory),
            bytes(one.stored),
            time(one.write * whole),
            time(one.read * whole),
            time(one.choose * whole),
        )
        .unwrap();
    }
}

fn measured_commits(text: &mut String, all: &[CommitFigures]) {
    writeln!(text, "\n### Measured: commits, by how many segments there are\n").unwrap();
    writeln!(
        text,
        "Of one frame written and one freed, in a bucket in memory with segments of 16 KiB: what is measured is the\n\
         table, not the store.\n"
    )
    .unwrap();
    writeln!(text, "| segments | commit | the longest of 200 | written of the table, each | all of the table |")
        .unwrap();
    writeln!(text, "|---:|---:|---:|---:|---:|").unwrap();
    for one in all {
        writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            count(one.segments),
            time(one.mean),
            time(one.longest),
            bytes(one.written),
            bytes(one.stored as f64),
        )
        .unwrap();
    }
}

fn measured_names(text: &mut String, all: &[NamesFigures]) {
    writeln!(text, "\n### Measured: names, on the engine alone\n").unwrap();
    writeln!(
        text,
        "Empty files, {} in each directory, made by one thread; a cache of 512 MiB. \"Commit\" is that of 1,000 more\n\
         files in directories all over the pool; \"import\" begins with nothing in the pool's memory, and so do the\n\
         cold look-ups (what the system has of the file is not dropped).\n",
        count(FAN)
    )
    .unwrap();
    writeln!(
        text,
        "| names | created | on the device, each | slots | table | commit | import | looked up cold | warm | memory |"
    )
    .unwrap();
    writeln!(text, "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|").unwrap();
    for one in all {
        writeln!(
            text,
            "| {} | {} /s | {} | {} | {} | {} | {} | {} /s | {} /s | {} |",
            count(one.names),
            count(one.created as u64),
            bytes(one.stored),
            count(one.slots),
            bytes(one.table as f64),
            time(one.commit),
            time(one.import),
            count(one.cold as u64),
            count(one.warm as u64),
            bytes(one.memory as f64),
        )
        .unwrap();
    }
}

/// One row of what is computed.
struct Row {
    what: &'static str,
    devices: String,
    bucket: String,
    from: String,
}

fn computed(text: &mut String, slots: TableFigures, objects: TableFigures, names: NamesFigures) {
    let segments = |of: TableFigures| BYTES.div_ceil(of.length);
    let both = |each: fn(TableFigures) -> f64, say: &dyn Fn(f64) -> String| {
        let all = |of: TableFigures| say(segments(of) as f64 * each(of));
        (all(slots), all(objects))
    };
    let mut rows = Vec::new();
    let mut row = |what, (devices, bucket): (String, String), from: String| {
        rows.push(Row { what, devices, bucket, from });
    };
    row(
        "segments",
        (count(segments(slots)), count(segments(objects))),
        format!(
            "bytes / length: `slots::length` {}, objects {}",
            bytes(slots.length as f64),
            bytes(objects.length as f64)
        ),
    );
    row("table in memory", both(|of| of.memory, &bytes), "`SegmentTable`, measured each".to_owned());
    row(
        "the table as it is stored",
        both(|of| of.stored, &bytes),
        "`pages::write_page`, before it is packed".to_owned(),
    );
    let node = f64::from(pages::FAN) * 52.0;
    let page = |of: TableFigures| of.stored * f64::from(PAGE) + node;
    row(
        "written for a segment that changes, at most",
        (bytes(page(slots)), bytes(page(objects))),
        format!("a page of {PAGE} segments and the node above it, once in {DELTAS} commits (8 in a bucket)"),
    );
    row(
        "10,000 such segments in each commit, all over the pool",
        (bytes(page(slots) * 10_000.0), bytes(page(objects) * 10_000.0)),
        "what content was freed to change them was a gigabyte at the least".to_owned(),
    );
    row("import: reading the table", both(|of| of.read, &time), "`TableReader`, by one thread".to_owned());
    row("one choice of the cleaner", both(|of| of.choose, &time), "`cleaner::choose` looks at all segments".to_owned());
    let own = |of: TableFigures| (segments(of) as f64 * of.stored * 2.0 / of.length as f64).ceil();
    row(
        "segments that the table lies in, at most",
        (count(own(slots) as u64), count(own(objects) as u64)),
        "twice what it needs, and a few".to_owned(),
    );
    let entry = pages::write_list(1, &[listed(u32::MAX), listed(u32::MAX)]).len() as f64 / 2.0;
    row(
        "the list of these",
        (bytes(own(slots) * entry), bytes(own(objects) * entry)),
        "`pages::write_list`; it is written when a root record has no room for what has changed in it".to_owned(),
    );
    let frames = most_list_frames() as f64;
    let reach = |of: TableFigures| {
        let listed = frames * (of.length as f64 / 4.0).min(8.0 * MIB as f64) / entry;
        let stored = listed * of.length as f64 / 2.0;
        stored / of.stored
    };
    let most = |of: TableFigures| format!("{} x all numbers of segments", short(reach(of) / f64::from(u32::MAX)));
    row(
        "beyond this, no commit is possible",
        (most(slots), most(objects)),
        format!("a root record names {frames} frames of the list (`Root::encode`)"),
    );
    let numbers = f64::from(u32::MAX);
    row(
        "written until numbers of segments are used up",
        (bytes(numbers * slots.length as f64), bytes(numbers * objects.length as f64)),
        "32 bits, never used again".to_owned(),
    );
    let metadata = FILES as f64 * names.stored;
    row(
        "metadata of the names",
        (bytes(metadata), bytes(metadata)),
        format!("{} each, as measured with {} names", bytes(names.stored), count(names.names)),
    );
    let make = FILES as f64 / names.created;
    row(
        "making them, one thread",
        (time(make), time(make)),
        format!("{} a second, as measured", count(names.created as u64)),
    );
    let rings = CORES * REQUEST;
    let ring = format!("{} to {}", bytes((rings * 2) as f64), bytes((rings * 16) as f64));
    row(
        "buffers of rings",
        (ring.clone(), ring),
        format!(
            "{CORES} CPUs, 2 to 16 threads each (`prepare` in crates/fusewire/src/session/ring.rs), {} a thread; for each mount",
            bytes(REQUEST as f64)
        ),
    );
    let polls = READERS / EVERY;
    row(
        "requests of readers, nothing changed",
        ("-".to_owned(), format!("{} /s", count(polls))),
        format!("{READERS} readers look for the next root each {EVERY} s: one GET"),
    );
    let busy = READERS * 3 / COMMIT;
    row(
        "requests of readers, each commit",
        ("-".to_owned(), format!("{} /s and more", count(busy))),
        format!("root, table and one node of the tree at least, each {COMMIT} s"),
    );
    writeln!(
        text,
        "\n### Computed: {} files, {} PB, {CORES} cores, {} readers\n",
        count(FILES),
        BYTES / 1_000_000_000_000_000,
        count(READERS)
    )
    .unwrap();
    writeln!(text, "| what | on devices | in a bucket | from |").unwrap();
    writeln!(text, "|---|---:|---:|---|").unwrap();
    for Row { what, devices, bucket, from } in rows {
        writeln!(text, "| {what} | {devices} | {bucket} | {from} |").unwrap();
    }
}

fn main() {
    nacre_sys::memory::keep_large_blocks_apart();
    let mut arguments = std::env::args().skip(1).map(PathBuf::from);
    let directory = arguments.next().expect("a directory");
    let document = arguments.next();
    let (most, segments) = (number("NAMES", 10_000_000), number("SEGMENTS", 1_000_000));
    let mut tables = Vec::new();
    let mut at = 10_000;
    while at <= segments {
        tables.extend([slots::length(BYTES), OBJECT].map(|length| table(at, length)));
        eprintln!("{} segments", count(at));
        at *= 10;
    }
    let commits = commits(segments.min(100_000));
    eprintln!("commits");
    let path = directory.join("scale.img");
    let mut pool = Names::new(&path);
    let (mut from, mut at, mut all) = (0, 100_000.min(most), Vec::new());
    while from < most {
        let (again, figures) = pool.grow(from, at);
        eprintln!("{} names", count(at));
        all.push(figures);
        pool = again;
        (from, at) = (at, (at * 10).min(most));
    }
    pool.committer.stop().unwrap();
    drop((pool.dataset, pool.pool, pool.store));
    std::fs::remove_file(&path).unwrap();
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let mut text = format!("{BEGIN}\n\nMeasured on {cpus} CPUs of {}.\n", processor());
    measured_tables(&mut text, &tables);
    measured_commits(&mut text, &commits);
    measured_names(&mut text, &all);
    let longest = tables.split_off(tables.len() - 2);
    computed(&mut text, longest[0], longest[1], *all.last().unwrap());
    writeln!(text, "\n{END}").unwrap();
    print!("{text}");
    if let Some(document) = document {
        let old = std::fs::read_to_string(&document).unwrap();
        let (head, rest) = old.split_once(BEGIN).expect("the first mark");
        let (_, tail) = rest.split_once(END).expect("the second mark");
        std::fs::write(&document, format!("{head}{}{tail}", text.trim_end())).unwrap();
    }
}

fn processor() -> String {
    let all = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = all.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "an unknown kind".to_owned(), |(_, name)| name.to_owned())
}
