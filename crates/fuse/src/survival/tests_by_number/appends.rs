//! Tests of append-only files whose data the kernel writes back in any order, where it opens files without a request.

use super::{Lives, create, dataset, door, node, pool};
use crate::survival::Survival;
use fusewire::{Handler, Op, abi};
use nacre_vfs::{
    Caller, Errno, Ioctl, Layer, Name, Node, OpenFile, OpenFlags, Opened, Protection, Result, WriteOrigin,
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::channel,
    },
};

const PAGE: usize = 4096;
/// `FS_APPEND_FL`.
const APPEND: u32 = 0x20;

/// A file system whose next write can be made to fail, and that refuses to open append-only files for writing anywhere,
/// as that below a cage does.
struct Failing {
    below: Arc<dyn Layer>,
    fails: Arc<AtomicBool>,
}

struct FailingFile {
    below: Opened,
    fails: Arc<AtomicBool>,
}

impl Layer for Failing {
    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let is_protected = self.below.getattr(caller, node, None)?.protection != Protection::None;
        if is_protected && flags.writes() && !flags.appends() {
            return Err(Errno::EPERM);
        }
        let below = self.below.open(caller, node, flags)?;
        Ok(Arc::new(FailingFile { below, fails: Arc::clone(&self.fails) }))
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold create tmpfile getattr access setattr readlink mkdir mknod symlink link unlink rmdir rename readdir fsyncdir statfs syncfs getxattr listxattr setxattr removexattr ioctl coherence watch describe capabilities }
}

impl OpenFile for FailingFile {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        if self.fails.swap(false, SeqCst) { Err(Errno::ENOSPC) } else { self.below.write(data, offset, origin) }
    }
    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    nacre_vfs::forward_file! { inner read append flush fsync allocate seek copy_to test_lock set_lock flock ioctl is_on_inner_mount writeback_lease }
}

fn over_failing(fails: &Arc<AtomicBool>) -> Lives {
    let (pool, memory) = (pool(), Survival::small().unwrap());
    let layer = dataset(&pool, true);
    let below = Arc::clone(&layer) as Arc<dyn Layer>;
    let door = door(Arc::new(Failing { below, fails: Arc::clone(fails) }), &memory);
    Lives { pool, layer, memory, door, doubted: channel().1, unasked: true }
}

/// A log with `chattr +a` that has this content.
fn log(lives: &Lives, content: &[u8]) -> u64 {
    let log = node(&lives.ask(2, 1, create(b"log")).unwrap());
    let root = lives.layer.root().unwrap().node;
    let found = lives.layer.lookup(&Caller::ROOT, &root, Name::new(b"log").unwrap()).unwrap();
    let flags = Ioctl { command: Ioctl::SET_FLAGS, argument: 0, input: &APPEND.to_ne_bytes() };
    lives.layer.ioctl(&Caller::ROOT, &found.node, flags, &mut []).unwrap();
    write(lives, log, 0, content).unwrap();
    log
}

fn write(lives: &Lives, log: u64, offset: usize, data: &[u8]) -> std::result::Result<(), i32> {
    let write_flags = abi::flag::WRITE_CACHE;
    let op = Op::Write { fh: 0, offset: offset as u64, data, flags: 2, write_flags, lock_owner: None };
    let body = lives.ask(4, log, op)?;
    assert_eq!(body.first_chunk().map(|size| u32::from_ne_bytes(*size)), Some(data.len() as u32));
    Ok(())
}

fn fsync(lives: &Lives, log: u64) -> std::result::Result<(), i32> {
    lives.ask(6, log, Op::Fsync { fh: 0, datasync: false }).map(drop)
}

fn stored(lives: &Lives, log: u64) -> Vec<u8> {
    let op = Op::Read { fh: 0, offset: 0, size: 1 << 15, flags: 0, lock_owner: None, read_flags: 0 };
    lives.ask(8, log, op).unwrap()
}

/// As the kernel has it.
fn pages(count: usize) -> Vec<u8> {
    (0..count * PAGE).map(|at| b'a' + (at / 1000 % 26) as u8).collect()
}

#[test]
fn what_arrives_too_early_is_stored_behind_the_gap() {
    let lives = over_failing(&Arc::default());
    let whole = pages(3);
    let log = log(&lives, &whole[..100]);
    write(&lives, log, 2 * PAGE, &whole[2 * PAGE..]).unwrap();
    assert_eq!(stored(&lives, log), whole[..100]);
    write(&lives, log, 0, &whole[..2 * PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole));
}

#[test]
fn a_shorter_run_at_the_same_offset_loses_nothing_of_a_kept_one() {
    let lives = over_failing(&Arc::default());
    let whole = pages(3);
    let log = log(&lives, &whole[..100]);
    write(&lives, log, PAGE, &whole[PAGE..]).unwrap();
    write(&lives, log, PAGE, &whole[PAGE..2 * PAGE]).unwrap();
    write(&lives, log, 0, &whole[..PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole));
}

#[test]
fn no_fsync_succeeds_without_what_was_acknowledged() {
    let lives = over_failing(&Arc::default());
    let whole = pages(3);
    let log = log(&lives, &whole[..100]);
    // The kernel has still to send the data before, or never will.
    write(&lives, log, PAGE, &whole[PAGE..2 * PAGE]).unwrap();
    write(&lives, log, 2 * PAGE, &whole[2 * PAGE..]).unwrap();
    for _ in 0..2 {
        assert_eq!(fsync(&lives, log), Err(Errno::EIO.raw()));
    }
    write(&lives, log, 0, &whole[..PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole));
    assert!(lives.door.writeback.early.lock().is_empty());
}

#[test]
fn a_write_that_fails_takes_what_is_behind_it_along() {
    let fails = Arc::<AtomicBool>::default();
    let lives = over_failing(&fails);
    let whole = pages(4);
    let log = log(&lives, &whole[..100]);
    write(&lives, log, 2 * PAGE, &whole[2 * PAGE..3 * PAGE]).unwrap();
    fails.store(true, SeqCst);
    assert_eq!(write(&lives, log, 0, &whole[..2 * PAGE]), Err(Errno::ENOSPC.raw()));
    for _ in 0..3 {
        assert_eq!(write(&lives, log, 2 * PAGE, &whole[2 * PAGE..3 * PAGE]), Err(Errno::EIO.raw()));
    }
    assert!(lives.door.writeback.early.lock()[&log].lock().runs.is_empty(), "nothing is kept for a gap that stays");
    assert_eq!(stored(&lives, log), whole[..100]);
    // The kernel writes those pages back once more: writes in any order are accepted again.
    write(&lives, log, 0, &whole[..2 * PAGE]).unwrap();
    write(&lives, log, 3 * PAGE, &whole[3 * PAGE..]).unwrap();
    write(&lives, log, 2 * PAGE, &whole[2 * PAGE..3 * PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole));
    assert!(lives.door.writeback.early.lock().is_empty());
}

#[test]
fn a_store_over_what_is_there_is_refused_and_the_append_behind_it_kept() {
    let lives = over_failing(&Arc::default());
    let whole = pages(1);
    let log = log(&lives, &whole[..100]);
    let mut overwritten = whole[..200].to_vec();
    overwritten[10] = b'!';
    assert_eq!(write(&lives, log, 0, &overwritten), Err(Errno::EPERM.raw()));
    assert_eq!(stored(&lives, log), whole[..200]);
    // Also in a run that was kept.
    overwritten = whole.clone();
    overwritten[310] = b'!';
    write(&lives, log, 300, &overwritten[300..500]).unwrap();
    assert_eq!(write(&lives, log, 0, &whole[..400]), Err(Errno::EPERM.raw()));
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole[..500].to_vec()));
    // A request that is sent again.
    write(&lives, log, 0, &whole[..500]).unwrap();
    assert_eq!(stored(&lives, log).len(), 500);
}

#[test]
fn data_kept_of_a_file_reaches_no_later_content() {
    let lives = over_failing(&Arc::default());
    let whole = pages(3);
    let log = log(&lives, &whole[..100]);
    write(&lives, log, PAGE, b"of before").unwrap();
    lives.door.forget(log, 1);
    assert_eq!(node(&lives.ask(10, 1, Op::Lookup { name: b"log" }).unwrap()), log);
    write(&lives, log, 0, &whole[..PAGE]).unwrap();
    assert_eq!(stored(&lives, log), whole[..PAGE]);
    assert!(lives.door.writeback.early.lock().is_empty());
}

#[test]
fn without_the_flag_everything_is_stored_at_its_place() {
    let lives = over_failing(&Arc::default());
    let whole = pages(3);
    let log = log(&lives, &whole[..100]);
    write(&lives, log, 2 * PAGE, &whole[2 * PAGE..]).unwrap();
    let none = 0_u32.to_ne_bytes();
    let unflag = Op::Ioctl { fh: 0, flags: 0, cmd: Ioctl::SET_FLAGS, arg: 0, input: &none, out_size: 0 };
    lives.ask(10, log, unflag).unwrap();
    write(&lives, log, 0, &whole[..2 * PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), whole.clone()));
    let mut changed = whole;
    changed[PAGE] = b'!';
    write(&lives, log, PAGE, &changed[PAGE..2 * PAGE]).unwrap();
    assert_eq!((fsync(&lives, log), stored(&lives, log)), (Ok(()), changed));
}
