//! Tests of passthrough without a kernel: one mode per inode, kept files, bounds.

use super::*;
use crate::inodes::Found;
use nacre_vfs::{Attr, FileId, Kind, Node, Protection, Time};
use std::{
    collections::BTreeSet,
    io,
    os::fd::AsFd,
    sync::atomic::{AtomicI32, AtomicI64},
};

/// Counts ids and refuses calls that the kernel would refuse.
#[derive(Default)]
struct Fake {
    next: AtomicI32,
    open: Mutex<BTreeSet<i32>>,
    error: AtomicI32,
    calls: AtomicI64,
}

impl BackingFiles for Arc<Fake> {
    fn open(&self, _: BorrowedFd<'_>) -> io::Result<i32> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.error.load(Ordering::Relaxed) {
            0 => {}
            number => return Err(io::Error::from_raw_os_error(number)),
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.lock().insert(id);
        Ok(id)
    }

    fn close(&self, id: i32) -> io::Result<()> {
        assert!(self.open.lock().remove(&id), "{id} is not open");
        Ok(())
    }
}

fn started(fake: &Arc<Fake>, limit: usize) -> Passthrough {
    let passthrough = Passthrough::new(limit);
    passthrough.start(Box::new(Arc::clone(fake)));
    passthrough
}

#[test]
fn an_open_in_the_first_instant_waits_for_the_start() {
    let fake = Arc::new(Fake::default());
    let passthrough = Passthrough::new(0);
    let file = some_file();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let early = scope.spawn(|| {
            sender.send(()).unwrap();
            passthrough.wait_for_start();
            passthrough.begin(&mut OpenState::default(), Some(file.as_fd())).0
        });
        receiver.recv().unwrap();
        passthrough.start(Box::new(Arc::clone(&fake)));
        assert!(matches!(early.join().unwrap(), IoMode::Passthrough(_)));
    });
    let refused = Passthrough::new(0);
    refused.refuse("never");
    refused.wait_for_start();
    assert_eq!(refused.begin(&mut OpenState::default(), Some(file.as_fd())).0, IoMode::Daemon);
}

fn some_file() -> std::fs::File {
    std::fs::File::open("/proc/self/exe").unwrap()
}

#[test]
fn all_opens_of_an_inode_share_one_id_that_is_closed_with_the_last() {
    let fake = Arc::new(Fake::default());
    let passthrough = started(&fake, 0);
    assert_eq!(passthrough.refusal(), None);
    let file = some_file();
    let mut state = OpenState::default();
    let (first, _) = passthrough.begin(&mut state, Some(file.as_fd()));
    let (second, _) = passthrough.begin(&mut state, None);
    assert_eq!(first, second);
    assert!(matches!(first, IoMode::Passthrough(_)));
    passthrough.finish_close(passthrough.end(&mut state, None));
    assert_eq!(fake.open.lock().len(), 1);
    passthrough.finish_close(passthrough.end(&mut state, None));
    assert!(fake.open.lock().is_empty());
    assert!(state.io.is_idle());
}

#[test]
fn an_inode_open_through_the_daemon_stays_so_until_its_last_close() {
    let fake = Arc::new(Fake::default());
    let passthrough = started(&fake, 0);
    let file = some_file();
    let mut state = OpenState::default();
    assert_eq!(passthrough.begin(&mut state, None).0, IoMode::Daemon);
    assert_eq!(passthrough.begin(&mut state, Some(file.as_fd())).0, IoMode::Daemon);
    passthrough.finish_close(passthrough.end(&mut state, None));
    assert_eq!(passthrough.begin(&mut state, Some(file.as_fd())).0, IoMode::Daemon);
    passthrough.finish_close(passthrough.end(&mut state, None));
    passthrough.finish_close(passthrough.end(&mut state, None));
    assert!(matches!(passthrough.begin(&mut state, Some(file.as_fd())).0, IoMode::Passthrough(_)));
}

#[test]
fn a_refused_file_is_served_by_the_daemon_and_a_missing_privilege_refuses_all() {
    let fake = Arc::new(Fake::default());
    let passthrough = started(&fake, 0);
    let file = some_file();
    fake.error.store(Errno::ELOOP.raw(), Ordering::Relaxed);
    let mut state = OpenState::default();
    assert_eq!(passthrough.begin(&mut state, Some(file.as_fd())).0, IoMode::Daemon);
    assert_eq!(passthrough.figures().2, 1);

    let unprivileged = Arc::new(Fake { error: AtomicI32::new(Errno::EPERM.raw()), ..Fake::default() });
    let passthrough = started(&unprivileged, 0);
    assert!(passthrough.refusal().is_some_and(|why| why.contains("CAP_SYS_ADMIN")));
    let mut state = OpenState::default();
    assert_eq!(passthrough.begin(&mut state, Some(file.as_fd())).0, IoMode::Daemon);
    assert_eq!(unprivileged.calls.load(Ordering::Relaxed), 1, "only the probe asked");
}

struct Plain;

impl nacre_vfs::OpenFile for Plain {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
    fn inner(&self) -> &dyn nacre_vfs::OpenFile {
        self
    }
    fn read(&self, _: &mut [u8], _: u64) -> nacre_vfs::Result<usize> {
        Ok(0)
    }
    fn write(&self, _: &[u8], _: u64, _: nacre_vfs::WriteOrigin) -> nacre_vfs::Result<usize> {
        Err(Errno::EROFS)
    }
    fn append(&self, _: &[u8]) -> nacre_vfs::Result<usize> {
        Err(Errno::EROFS)
    }
    fn flush(&self, _: nacre_vfs::LockOwner) -> nacre_vfs::Result<()> {
        Ok(())
    }
    fn fsync(&self, _: bool) -> nacre_vfs::Result<()> {
        Ok(())
    }
    fn allocate(&self, _: nacre_vfs::AllocateMode, _: u64, _: u64) -> nacre_vfs::Result<()> {
        Err(Errno::EROFS)
    }
    fn seek(&self, _: u64, _: nacre_vfs::Whence) -> nacre_vfs::Result<u64> {
        Err(Errno::ENXIO)
    }
    fn copy_to(&self, _: u64, _: &dyn nacre_vfs::OpenFile, _: u64, _: u64, _: u32) -> nacre_vfs::Result<u64> {
        Err(Errno::EXDEV)
    }
    fn test_lock(&self, _: nacre_vfs::LockOwner, lock: nacre_vfs::FileLock) -> nacre_vfs::Result<nacre_vfs::FileLock> {
        Ok(lock)
    }
    fn set_lock(&self, _: nacre_vfs::LockOwner, _: nacre_vfs::FileLock, _: bool) -> nacre_vfs::Result<()> {
        Ok(())
    }
    fn flock(&self, _: nacre_vfs::LockOwner, _: nacre_vfs::LockKind, _: bool) -> nacre_vfs::Result<()> {
        Ok(())
    }
    fn is_on_inner_mount(&self) -> bool {
        false
    }
    fn ioctl(&self, _: nacre_vfs::Ioctl<'_>, _: &mut [u8]) -> nacre_vfs::Result<(i32, usize)> {
        Err(Errno::ENOTTY)
    }
    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }
}

fn attr(ino: u64) -> Attr {
    let zero = Time::default();
    Attr {
        id: FileId { fs: 1, ino, generation: 0 },
        kind: Kind::File,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: zero,
        mtime: zero,
        ctime: zero,
        btime: None,
        protection: Protection::None,
    }
}

#[test]
fn kept_files_serve_the_same_kind_of_open_and_stay_within_the_limit() {
    let fake = Arc::new(Fake::default());
    let passthrough = started(&fake, 2);
    let inodes = Inodes::new(Node::new(Arc::new(())), &Attr { kind: Kind::Directory, ..attr(1) });
    let file = some_file();
    let mut ids = Vec::new();
    for ino in 10..15 {
        let nodeid = inodes.register(&Node::new(Arc::new(())), &attr(ino), Found::below(1)).nodeid;
        let keep = Some((Arc::new(Plain) as Opened, OpenFlags::READ, 7));
        let left = inodes.with(nodeid, |record| {
            let state = record.open_state();
            let _ = passthrough.begin(state, Some(file.as_fd()));
            passthrough.end(state, keep)
        });
        passthrough.finish(left.unwrap(), nodeid, &inodes);
        ids.push(nodeid);
    }
    assert_eq!(passthrough.figures().3, 2);
    assert_eq!(fake.open.lock().len(), 2);
    let reusable =
        |nodeid, flags, uid| inodes.with(nodeid, |record| passthrough.reusable(record, flags, uid)).flatten().is_some();
    assert!(!reusable(ids[0], OpenFlags::READ, None), "the oldest went");
    assert!(reusable(ids[4], OpenFlags::READ, None));
    assert!(reusable(ids[4], OpenFlags::READ, Some(7)));
    assert!(
        !reusable(ids[4], OpenFlags::READ, Some(8)),
        "another user's open is not reused where the layer checks permissions"
    );
    assert!(!reusable(ids[4], OpenFlags::READ_WRITE, None));
    passthrough.drop_kept(ids[4], &inodes);
    passthrough.drop_all_kept(&inodes);
    assert_eq!(passthrough.figures().3, 0);
    assert!(fake.open.lock().is_empty());
}

#[test]
fn what_the_kernel_forgets_is_closed() {
    let fake = Arc::new(Fake::default());
    let passthrough = started(&fake, 2);
    let file = some_file();
    let mut state = Box::new(OpenState::default());
    let _ = passthrough.begin(&mut state, Some(file.as_fd()));
    passthrough.abandon(state);
    assert!(fake.open.lock().is_empty());
}
