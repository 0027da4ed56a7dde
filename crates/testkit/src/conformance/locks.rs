//! Checks: byte-range locks and `flock`.

use super::Check;
use crate::{World, conformance::lacks};
use nacre_vfs::{Errno, FileLock, LockKind, LockOwner, OpenFlags};

pub(super) const CHECKS: &[Check] = &[
    ("byte ranges are locked between owners", byte_ranges),
    ("a lock in the way is told", lock_in_the_way),
    ("flock excludes between open files", flock_excludes),
];

fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
    FileLock { start, end, kind, pid: std::process::id() }
}

const FIRST: LockOwner = LockOwner(1);
const SECOND: LockOwner = LockOwner(2);

fn byte_ranges(world: &World) {
    let (made, one) = world.file(b"file", b"0123456789");
    let two = world.open(&made.node, OpenFlags::READ_WRITE);
    let taken = one.set_lock(FIRST, lock(LockKind::Write, 0, 4), false);
    if lacks("locks", &taken) {
        return;
    }
    taken.expect("lock");
    assert_eq!(two.set_lock(SECOND, lock(LockKind::Write, 4, 9), false), Err(Errno::EAGAIN));
    two.set_lock(SECOND, lock(LockKind::Write, 5, 9), false).expect("the rest is free");
    assert_eq!(one.set_lock(FIRST, lock(LockKind::Read, 5, 5), false), Err(Errno::EAGAIN));
    one.set_lock(FIRST, lock(LockKind::Unlock, 0, 4), false).expect("unlock");
    two.set_lock(SECOND, lock(LockKind::Read, 0, 4), false).expect("freed");
    one.set_lock(FIRST, lock(LockKind::Read, 0, 4), false).expect("readers share");
}

fn lock_in_the_way(world: &World) {
    let (made, one) = world.file(b"file", b"0123456789");
    let two = world.open(&made.node, OpenFlags::READ_WRITE);
    let free = one.test_lock(FIRST, lock(LockKind::Write, 0, 9));
    if lacks("locks", &free) {
        return;
    }
    assert_eq!(free.map(|lock| lock.kind), Ok(LockKind::Unlock));
    one.set_lock(FIRST, lock(LockKind::Write, 2, 5), false).expect("lock");
    let found = two.test_lock(SECOND, lock(LockKind::Read, 0, 9)).expect("test");
    assert_eq!((found.kind, found.start, found.end), (LockKind::Write, 2, 5));
    let own = one.test_lock(FIRST, lock(LockKind::Write, 0, 9)).expect("test");
    assert_eq!(own.kind, LockKind::Unlock, "one's own lock is not in the way");
}

fn flock_excludes(world: &World) {
    let (made, one) = world.file(b"file", b"");
    let two = world.open(&made.node, OpenFlags::READ_WRITE);
    let taken = one.flock(FIRST, LockKind::Write, false);
    if lacks("flock", &taken) {
        return;
    }
    taken.expect("flock");
    assert_eq!(two.flock(SECOND, LockKind::Read, false), Err(Errno::EAGAIN));
    one.flock(FIRST, LockKind::Unlock, false).expect("unlock");
    two.flock(SECOND, LockKind::Read, false).expect("freed");
    one.flock(FIRST, LockKind::Read, false).expect("readers share");
}
