//! Collected writes, with a kernel made of a few locks in place of the real one: it takes writes
//! into a cache without asking while its attributes are valid, asks before each write once they are
//! not, and passes everything on when it likes.
//!
//! What was taken is never lost, and what is stored never exceeds the limit.

use nacre_cage::{Cage, ledger::Limits};
use nacre_layers::context::Context;
use nacre_stack::{self as stack, spec::StackSpec};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_vfs::{Errno, LockOwner, OpenFlags, Opened, RenameFlags, Result, WriteAhead, WriteOrigin, WritebackHost};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

const APPEND: OpenFlags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);

/// The most that this kernel holds back, without what single writes under way may add.
const CACHE: u64 = 256 << 10;
/// The greatest single write.
const LARGEST: usize = 32 << 10;

/// A file as the kernel has it: its length with what is held back, and that.
struct Cached {
    file: Opened,
    size: u64,
    held: VecDeque<(u64, Vec<u8>)>,
    /// What was taken, for the end of the test.
    taken: Vec<u8>,
}

/// One inode of the kernel.
struct Page {
    /// Held by each write, and by whoever waits for all of them.
    inode: Mutex<()>,
    cached: Mutex<Cached>,
    /// Attributes are valid, and how often they have been made invalid.
    valid: AtomicBool,
    version: AtomicU64,
}

/// The kernel and the door.
#[derive(Default)]
struct Kernel {
    pages: Mutex<Vec<Arc<Page>>>,
    held: Mutex<u64>,
    passed_on: Condvar,
    recalls: AtomicUsize,
    settles: AtomicUsize,
    asked: AtomicUsize,
    broken: AtomicBool,
}

impl Kernel {
    fn page(&self, file: &Opened, size: u64) -> Arc<Page> {
        let cached = Mutex::new(Cached { file: Arc::clone(file), size, held: VecDeque::new(), taken: Vec::new() });
        let page =
            Arc::new(Page { inode: Mutex::new(()), cached, valid: AtomicBool::new(false), version: AtomicU64::new(0) });
        self.pages.lock().unwrap().push(Arc::clone(&page));
        page
    }

    /// write(2) at the end of a file.
    fn write(&self, page: &Page, file: &Opened, data: &[u8], tell: bool) -> Result<()> {
        let permission = file.writeback_lease().unwrap();
        let _inode = loop {
            if !page.valid.load(SeqCst) {
                let version = page.version.load(SeqCst);
                if !permission.unannounced() {
                    self.asked.fetch_add(1, SeqCst);
                    permission.announce(WriteAhead::append(tell.then_some(data.len() as u64)))?;
                    break page.inode.lock().unwrap();
                }
                page.valid.store(true, SeqCst);
                // An answer that a notice has overtaken is dropped.
                if page.version.load(SeqCst) != version {
                    page.valid.store(false, SeqCst);
                }
                continue;
            }
            let inode = page.inode.lock().unwrap();
            if page.valid.load(SeqCst) {
                break inode;
            }
        };
        // Dirty pages are limited before a write goes on, not after it.
        {
            let mut held = self.held.lock().unwrap();
            while *held >= CACHE {
                drop(held);
                self.pass_on_some();
                held = self.held.lock().unwrap();
            }
            *held += data.len() as u64;
        }
        let mut cached = page.cached.lock().unwrap();
        let at = cached.size;
        cached.size += data.len() as u64;
        cached.taken.extend_from_slice(data);
        cached.held.push_back((at, data.to_vec()));
        Ok(())
    }

    fn pass_on(&self, page: &Page) {
        let mut cached = page.cached.lock().unwrap();
        let file = Arc::clone(&cached.file);
        while let Some((at, data)) = cached.held.pop_front() {
            let written = file.write(&data, at, WriteOrigin::Writeback { timed: false });
            assert_eq!(written, Ok(data.len()), "what was taken does not fit");
            *self.held.lock().unwrap() -= data.len() as u64;
            self.passed_on.notify_all();
        }
    }

    fn pass_on_some(&self) {
        let pages = self.pages.lock().unwrap().clone();
        for page in pages {
            self.pass_on(&page);
        }
    }
}

impl WritebackHost for Kernel {
    fn lets_in(&self) {
        panic!("a cage lets in only what was granted");
    }

    fn dirty_limit(&self, files: usize) -> u64 {
        // Each thread of the tests may be in the middle of one write more.
        CACHE + (files as u64 + 8) * LARGEST as u64
    }

    fn recall(&self) {
        self.recalls.fetch_add(1, SeqCst);
        for page in self.pages.lock().unwrap().iter() {
            page.version.fetch_add(1, SeqCst);
            page.valid.store(false, SeqCst);
        }
    }

    fn flush(&self) -> Result<()> {
        self.settles.fetch_add(1, SeqCst);
        if self.broken.load(SeqCst) {
            return Err(Errno::EIO);
        }
        let pages = self.pages.lock().unwrap().clone();
        for page in pages {
            let _inode = page.inode.lock().unwrap();
            self.pass_on(&page);
        }
        Ok(())
    }
}

fn collecting(directory: &std::path::Path, settings: &str) -> (World, Arc<Cage>, Arc<Kernel>) {
    crate::stacks::prepare_thread();
    let line = format!("host:{} | cage:{settings}", directory.to_str().unwrap());
    let built = stack::build(&StackSpec::from_line(line.as_bytes()).unwrap(), &Context::system().unwrap()).unwrap();
    let cage = built.cages().remove(0);
    let kernel = Arc::new(Kernel::default());
    let door: Arc<dyn WritebackHost> = Arc::clone(&kernel) as Arc<dyn WritebackHost>;
    assert!(built.layer.capabilities().writeback.unwrap().accept(&door));
    (World::new(built.layer), cage, kernel)
}

fn opened(world: &World, bytes: &[u8]) -> Opened {
    world.layer.create(&world.caller, &world.root, name(bytes), 0o644, APPEND).unwrap().1
}

#[test]
fn far_from_the_limit_nobody_asks_and_near_it_everybody_does() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, kernel) = collecting(place.path(), "size=4M,writes=collected");
    let file = opened(&world, b"log");
    assert!(file.writeback_lease().unwrap().begin());
    let page = kernel.page(&file, 0);
    let mut written = 0_u64;
    while written < 2 << 20 {
        kernel.write(&page, &file, &[1; 1000], true).unwrap();
        written += 1000;
    }
    assert_eq!((kernel.asked.load(SeqCst), kernel.recalls.load(SeqCst)), (0, 0));
    let end = loop {
        match kernel.write(&page, &file, &[1; 1000], true) {
            Ok(()) => written += 1000,
            Err(error) => break error,
        }
    };
    assert_eq!(end, Errno::ENOSPC);
    assert!(kernel.asked.load(SeqCst) > 0 && kernel.recalls.load(SeqCst) == 1);
    kernel.pass_on_some();
    file.flush(LockOwner(1)).unwrap();
    assert_eq!(written, (4 << 20) / 1000 * 1000, "up to the last thousand that fits");
    assert_eq!(world.content(&world.find(b"log").unwrap().node).len() as u64, written);
    let report = cage.report();
    assert_eq!((report.used, report.free, report.unannounced, report.settled), (4 << 20, Some(0), false, true));
    // Room again: nobody is asked any more.
    cage.resize(Limits { bytes: Some(16 << 20), ..cage.limits() }).unwrap();
    let asked = kernel.asked.load(SeqCst);
    for _ in 0..100 {
        kernel.write(&page, &file, &[2; 1000], true).unwrap();
    }
    assert_eq!(kernel.asked.load(SeqCst), asked);
    assert!(cage.report().unannounced);
    kernel.pass_on_some();
}

#[test]
fn direct_writes_to_a_collected_file_leave_what_others_hold_back_its_room() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, kernel) = collecting(place.path(), "size=4M,writes=collected");
    let (log, other) = (opened(&world, b"log"), opened(&world, b"other"));
    assert!(log.writeback_lease().unwrap().begin() && other.writeback_lease().unwrap().begin());
    let (log_page, other_page) = (kernel.page(&log, 0), kernel.page(&other, 0));
    // As much is held back as can be, by both.
    for page in [(&log_page, &log), (&other_page, &other)] {
        (0..CACHE / 2 / 4096).for_each(|_| kernel.write(page.0, page.1, &[1; 4096], true).unwrap());
    }
    // It cannot arrive: somebody who writes to the log at this moment, past the cache, holds its
    // lock.
    let lock = log_page.inode.lock().unwrap();
    let direct = world.open(&world.find(b"log").unwrap().node, OpenFlags::READ_WRITE);
    let (mut end, bound) = (8 << 20, kernel.dirty_limit(2));
    while direct.write(&[2; 4096], end, WriteOrigin::Caller) == Ok(4096) {
        end += 8192;
    }
    assert!(
        kernel.recalls.load(SeqCst) == 1 && cage.report().free.unwrap() >= bound - bound / 8,
        "{:?}",
        cage.report()
    );
    assert!(cage.report().free.unwrap() <= bound, "some of it helps the writer on");
    drop(lock);
    kernel.pass_on_some();
    // Where the disk has written some of it, the file's own map of its many pieces takes blocks,
    // too (340 pieces each on ext4).
    let (used, content) = (cage.report().used, (end - (8 << 20)) / 2 + CACHE);
    assert!((content..=content + (64 << 10)).contains(&used), "{used} bytes, {content} of content");
}

#[test]
fn small_announced_writes_reserve_no_more_than_they_need() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, kernel) = collecting(place.path(), "size=1M,writes=collected");
    let file = opened(&world, b"log");
    assert!(file.writeback_lease().unwrap().begin());
    let page = kernel.page(&file, 0);
    let others = world.file(b"others", &[7; 900 << 10]).1;
    assert_eq!(kernel.recalls.load(SeqCst), 1, "it left less than may be held back");
    let mut written = 0;
    while kernel.write(&page, &file, b"x", true).is_ok() {
        written += 1;
        assert!(written <= 124 << 10);
    }
    assert_eq!(written, 124 << 10, "byte by byte, to the last one");
    assert_eq!(others.append(b"x"), Err(Errno::ENOSPC));
    kernel.pass_on_some();
    assert_eq!(cage.report().used, 1 << 20);
}

#[test]
fn what_was_announced_and_not_written_is_given_back_with_the_last_close() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, kernel) = collecting(place.path(), "size=4M,writes=collected");
    let file = opened(&world, b"log");
    assert!(file.writeback_lease().unwrap().begin());
    let _page = kernel.page(&file, 0);
    let (_, others) = world.file(b"others", &[7; 3 << 20]);
    assert_eq!(others.append(&[7; 512 << 10]), Ok(512 << 10));
    let permission = file.writeback_lease().unwrap();
    assert!(!permission.unannounced());
    permission.announce(WriteAhead::append(Some(300_000))).unwrap();
    assert!(permission.announce(WriteAhead::default()).is_err(), "counts as a megabyte");
    assert_eq!(cage.report().used, (3 << 20) + (512 << 10) + 300_000_u64.next_multiple_of(4096));
    kernel.pages.lock().unwrap().clear();
    drop(_page);
    drop(file);
    assert_eq!(cage.report().used, (3 << 20) + (512 << 10));
    assert!(cage.report().unannounced && cage.report().collected_files == 0);
}

#[test]
fn only_plain_appends_are_collected() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, _kernel) =
        collecting(place.path(), "size=16M,writes=collected,limit=user:4711=1M,limit=dir:sub=1M");
    let (entry, _) = world.file(b"a", b"");
    let sync = rustix::fs::OFlags::SYNC.bits();
    for flags in [
        OpenFlags::READ,
        OpenFlags::READ_WRITE,
        OpenFlags::WRITE,
        OpenFlags(APPEND.0 | sync),
        OpenFlags(2 | OpenFlags::APPEND),
    ] {
        assert!(world.open(&entry.node, flags).writeback_lease().is_none(), "{flags:?}");
    }
    let collected = world.open(&entry.node, APPEND);
    assert!(collected.writeback_lease().unwrap().begin() && cage.report().collected_files == 1);
    assert!(!collected.writeback_lease().unwrap().begin(), "once");
    let mut byte = [0];
    assert_eq!(collected.read(&mut byte, 0), Ok(0), "it can be read");
    // Not where a part of the limit is somebody's own.
    let sub = world.directory(b"sub");
    let (inside, _) = world.file_in(&sub, b"b", b"");
    assert!(!world.open(&inside.node, APPEND).writeback_lease().unwrap().begin());
    // Nor does a file come there whose appends may be on their way.
    let moved = world.layer.rename(&world.caller, &world.root, name(b"a"), &sub, name(b"a"), RenameFlags::default());
    assert_eq!(moved, Err(Errno::EXDEV));
    if world.is_root() {
        let given = nacre_vfs::SetAttr { uid: Some(4711), ..nacre_vfs::SetAttr::default() };
        assert_eq!(world.layer.setattr(&world.caller, &entry.node, None, &given).err(), Some(Errno::EBUSY));
        let (theirs, _) = world.file(b"theirs", b"");
        world.change(&theirs.node, given);
        assert!(!world.open(&theirs.node, APPEND).writeback_lease().unwrap().begin());
    }
    drop(collected);
    assert_eq!(cage.report().collected_files, 0);
    let moved = world.layer.rename(&world.caller, &world.root, name(b"a"), &sub, name(b"a"), RenameFlags::default());
    assert_eq!(moved, Ok(()));
}

#[test]
fn a_small_cage_is_not_worth_collecting() {
    let place = tempfile::tempdir().unwrap();
    let line = format!("host:{} | cage:size=1M", place.path().to_str().unwrap());
    let built = stack::build(&StackSpec::from_line(line.as_bytes()).unwrap(), &Context::system().unwrap()).unwrap();
    let door: Arc<dyn WritebackHost> = Arc::new(Kernel::default());
    assert!(!built.layer.capabilities().writeback.unwrap().accept(&door));
    assert_eq!(built.cages()[0].report().writes, "through");
}

#[test]
fn a_kernel_that_cannot_settle_keeps_its_room() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage, kernel) = collecting(place.path(), "size=2M,writes=collected");
    let file = opened(&world, b"log");
    assert!(file.writeback_lease().unwrap().begin());
    let page = kernel.page(&file, 0);
    for _ in 0..100 {
        kernel.write(&page, &file, &[1; 1000], true).unwrap();
    }
    kernel.broken.store(true, SeqCst);
    let (_, others) = world.file(b"others", b"");
    while others.append(&[2; 10_000]).is_ok() {}
    let report = cage.report();
    assert!(report.free.unwrap() >= kernel.dirty_limit(1) && !report.settled, "{report:?}");
    assert_eq!(kernel.write(&page, &file, &[1; 30_000], true), Err(Errno::ENOSPC));
    kernel.pass_on_some();
    assert_eq!(world.content(&world.find(b"log").unwrap().node), [1; 100_000]);
    kernel.broken.store(false, SeqCst);
}

#[test]
fn writers_of_all_kinds_at_a_limit_that_moves() {
    for round in 0..6_u64 {
        let place = tempfile::tempdir().unwrap();
        let (world, cage, kernel) = collecting(place.path(), "size=3M,writes=collected");
        let finished = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // The kernel's own flusher.
            scope.spawn(|| {
                while !finished.load(SeqCst) {
                    kernel.pass_on_some();
                    std::thread::yield_now();
                }
            });
            let writers: Vec<_> = (0..5_u64)
                .map(|thread| {
                    let (world, kernel) = (&world, &kernel);
                    scope.spawn(move || {
                        if thread < 3 {
                            append_some(world, kernel, round, thread)
                        } else {
                            write_some(world, round, thread)
                        }
                    })
                })
                .collect();
            let (cage, finished) = (&cage, &finished);
            let resizer = scope.spawn(move || {
                let mut step = 0;
                while !finished.load(SeqCst) {
                    step += 1;
                    let bytes = if round % 2 == 0 { 3 << 20 } else { (2 << 20) + (step * 37) % 25 * (100 << 10) };
                    cage.resize(Limits { bytes: Some(bytes), ..cage.limits() }).unwrap();
                    assert!(cage.report().used <= (2 << 20) + 24 * (100 << 10) + CACHE * 3);
                    std::thread::yield_now();
                }
            });
            let results: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            finished.store(true, SeqCst);
            resizer.join().unwrap();
            for result in results {
                result.unwrap();
            }
        });
        kernel.pass_on_some();
        for page in kernel.pages.lock().unwrap().iter() {
            let cached = page.cached.lock().unwrap();
            // Each log holds its own number only.
            let Some(thread) = cached.taken.first() else { continue };
            let stored = std::fs::read(place.path().join(format!("log{thread}"))).unwrap();
            let differs = stored.iter().zip(&cached.taken).position(|(stored, taken)| stored != taken);
            let lengths = (stored.len(), cached.taken.len());
            assert!(
                stored == cached.taken,
                "round {round}: log {thread} differs from what was taken at {differs:?}, lengths {lengths:?}"
            );
        }
        kernel.pages.lock().unwrap().clear();
        let report = cage.report();
        let stored: u64 = std::fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len().next_multiple_of(4096))
            .sum();
        assert_eq!((report.used, report.clamped), (stored, 0), "round {round}");
        if round % 2 == 0 {
            assert!(stored <= 3 << 20);
        }
    }
}

fn random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    }
}

/// A logger with a held descriptor.
fn append_some(world: &World, kernel: &Kernel, round: u64, thread: u64) {
    crate::stacks::prepare_thread();
    let mut next = random(round * 10 + thread + 1);
    let file = opened(world, format!("log{thread}").as_bytes());
    let joined = file.writeback_lease().unwrap().begin();
    let page = kernel.page(&file, 0);
    for _ in 0..400 {
        let data = vec![thread as u8; 1 + next(LARGEST as u64) as usize];
        if joined {
            match kernel.write(&page, &file, &data, next(20) > 0) {
                Ok(()) | Err(Errno::ENOSPC) => {}
                Err(other) => panic!("{other:?}"),
            }
        } else if let Ok(written) = file.append(&data) {
            let mut cached = page.cached.lock().unwrap();
            cached.taken.extend_from_slice(&data[..written]);
            cached.size += written as u64;
        }
    }
}

/// Somebody who writes at once, and shortens his file now and then.
fn write_some(world: &World, round: u64, thread: u64) {
    crate::stacks::prepare_thread();
    let mut next = random(round * 10 + thread + 1);
    let (entry, file) = world.file(format!("direct{thread}").as_bytes(), b"");
    let mut end = 0;
    for _ in 0..600 {
        match file.write(&vec![9; 1 + next(60_000) as usize], end, WriteOrigin::Caller) {
            Ok(written) => end += written as u64,
            Err(Errno::ENOSPC) => {
                let size = next(end + 1);
                world.change(&entry.node, nacre_vfs::SetAttr { size: Some(size), ..nacre_vfs::SetAttr::default() });
                end = size;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
}
