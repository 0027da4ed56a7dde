//! Open files: bytes, holes, copies, locks, flags.

use super::*;
use nacre_testkit::needs;
use nacre_vfs::{AllocateMode, ChangeTime, FileLock, Ioctl, LockKind, OpenFile, SetTime, Time, Whence, WriteOrigin};
use std::{
    fs,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
};

fn read_all(file: &dyn OpenFile) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 20];
    let length = file.read(&mut buffer, 0).unwrap();
    buffer.truncate(length);
    buffer
}

#[test]
fn two_appenders_never_overwrite_each_other() {
    let door = Door::new();
    door.create(&Caller::ROOT, "log", 0o644, 0o2).unwrap();
    let files: Vec<_> = (0..2).map(|_| door.open("log", 1 | OpenFlags::APPEND).unwrap()).collect();
    std::thread::scope(|scope| {
        for (file, line) in files.iter().zip([b"aaaaaaa\n", b"bbbbbbb\n"]) {
            scope.spawn(move || {
                for _ in 0..500 {
                    // The offset is the kernel's assumption; the file's end is used.
                    assert_eq!(file.append(line).unwrap(), 8);
                }
            });
        }
    });
    let content = native(door.path("log"));
    assert_eq!(content.len(), 8000);
    assert_eq!(content.chunks(8).filter(|line| line == b"aaaaaaa\n").count(), 500);
    assert_eq!(content.chunks(8).filter(|line| line == b"bbbbbbb\n").count(), 500);
}

#[test]
fn opening_truncates_only_when_asked_and_in_every_mode() {
    let door = Door::new();
    for (flags, left) in
        [(0, 4), (1, 4), (2, 4), (1 | OpenFlags::TRUNC, 0), (2 | OpenFlags::TRUNC, 0), (OpenFlags::TRUNC, 0)]
    {
        fs::write(door.path("file"), b"four").unwrap();
        let file = door.open("file", flags | 0o100 | 0o400 | 0o40000).unwrap();
        assert_eq!(fs::metadata(door.path("file")).unwrap().len(), left, "{flags:o}");
        assert!(file.backing().is_some());
    }
    let reader = door.open("file", 0).unwrap();
    assert_eq!(reader.write(b"x", 0, WriteOrigin::Caller), Err(Errno::EBADF));
    let writer = door.open("file", 1).unwrap();
    assert_eq!(writer.read(&mut [0], 0), Err(Errno::EBADF));
}

#[test]
fn holes_are_made_found_and_copied_around() {
    let door = Door::new();
    let (_, file) = door.create(&Caller::ROOT, "sparse", 0o644, 0o2).unwrap();
    file.write(&[7; 4096], 1 << 20, WriteOrigin::Caller).unwrap();
    let native_file = fs::File::open(door.path("sparse")).unwrap();
    for offset in [0, 100, 1 << 20, (1 << 20) + 10] {
        for (whence, from) in
            [(Whence::Data, rustix::fs::SeekFrom::Data(offset)), (Whence::Hole, rustix::fs::SeekFrom::Hole(offset))]
        {
            let expected = rustix::fs::seek(&native_file, from).map_err(|error| Errno::from_raw(error.raw_os_error()));
            assert_eq!(file.seek(offset, whence), expected);
        }
    }
    assert_eq!(file.seek(2 << 20, Whence::Data), Err(Errno::ENXIO));
    assert_eq!(file.seek(u64::MAX, Whence::Data), Err(Errno::ENXIO));
    // FALLOC_FL_PUNCH_HOLE needs FALLOC_FL_KEEP_SIZE.
    match file.allocate(AllocateMode(3), 1 << 20, 4096) {
        Err(Errno::EOPNOTSUPP) => {}
        other => {
            other.unwrap();
            assert_eq!(file.seek(0, Whence::Data), Err(Errno::ENXIO));
        }
    }
    file.allocate(AllocateMode(0), 0, 3 << 20).unwrap();
    assert_eq!(fs::metadata(door.path("sparse")).unwrap().len(), 3 << 20);
    assert_eq!(file.allocate(AllocateMode(0), 0, 0), Err(Errno::EINVAL));
    let (_, copy) = door.create(&Caller::ROOT, "copy", 0o644, 0o2).unwrap();
    file.write(b"copied", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(file.copy_to(0, &*copy, 10, 6, 0).unwrap(), 6);
    assert_eq!(read_all(&*copy), b"\0\0\0\0\0\0\0\0\0\0copied");
    assert_eq!(file.copy_to(0, &*copy, 0, 6, 1), Err(Errno::EINVAL));
    file.fsync(true).unwrap();
    file.fsync(false).unwrap();
    door.host.fsyncdir(&Caller::ROOT, &door.root(), false).unwrap();
    door.host.fsyncdir(&Caller::ROOT, &door.root(), true).unwrap();
    door.host.syncfs().unwrap();
}

#[test]
fn writes_at_impossible_offsets_fail_as_natively() {
    let door = Door::new();
    let (_, file) = door.create(&Caller::ROOT, "limited", 0o644, 0o2).unwrap();
    let native_file = fs::File::options().write(true).open(door.path("limited")).unwrap();
    for offset in [i64::MAX as u64, 1 << 63, u64::MAX] {
        let expected =
            rustix::io::pwrite(&native_file, b"x", offset).map_err(|error| Errno::from_raw(error.raw_os_error()));
        assert!(expected.is_err());
        assert_eq!(file.write(b"x", offset, WriteOrigin::Caller), expected);
    }
    assert_eq!(file.write(&[], 5, WriteOrigin::Caller), Ok(0));
}

#[test]
fn byte_range_locks_belong_to_owners() {
    let door = Door::new();
    door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    let (one, two) = (door.open("file", 2).unwrap(), door.open("file", 2).unwrap());
    let (alice, bob) = (LockOwner(1), LockOwner(2));
    let lock = |start, end, kind| FileLock { start, end, kind, pid: 0 };
    one.set_lock(alice, lock(0, 9, LockKind::Write), false).unwrap();
    // The same owner, through whichever open file.
    two.set_lock(alice, lock(5, 20, LockKind::Write), false).unwrap();
    assert_eq!(one.set_lock(bob, lock(20, 30, LockKind::Read), false), Err(Errno::EAGAIN));
    let found = two.test_lock(bob, lock(0, i64::MAX as u64, LockKind::Read)).unwrap();
    assert_eq!((found.start, found.end, found.kind), (0, 20, LockKind::Write));
    assert_eq!(two.test_lock(alice, lock(0, 9, LockKind::Write)).unwrap().kind, LockKind::Unlock);
    // A lock on the source itself conflicts, too.
    let outside = fs::File::options().read(true).write(true).open(door.path("file")).unwrap();
    let range = nacre_sys::locks::Range { kind: nacre_sys::locks::Kind::Write, start: 3, length: 1, pid: 0 };
    assert_eq!(
        nacre_sys::locks::set(outside.as_fd(), range, false).unwrap_err().raw_os_error(),
        Some(Errno::EAGAIN.raw())
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.set_lock(bob, lock(0, i64::MAX as u64, LockKind::Write), true));
        one.set_lock(alice, lock(0, i64::MAX as u64, LockKind::Unlock), false).unwrap();
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(one.set_lock(alice, lock(0, 0, LockKind::Read), false), Err(Errno::EAGAIN));
    // Closing any descriptor releases the owner's locks.
    two.flush(bob).unwrap();
    one.set_lock(alice, lock(0, 0, LockKind::Read), false).unwrap();
    nacre_sys::locks::test(outside.as_fd(), range).unwrap();
}

#[test]
fn whole_file_locks_conflict_between_owners_and_with_the_source() {
    let door = Door::new();
    door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    let (one, two) = (door.open("file", 0).unwrap(), door.open("file", 2).unwrap());
    let (alice, bob) = (LockOwner(1), LockOwner(2));
    one.flock(alice, LockKind::Read, false).unwrap();
    two.flock(bob, LockKind::Read, false).unwrap();
    assert_eq!(two.flock(bob, LockKind::Write, false), Err(Errno::EAGAIN));
    one.flock(alice, LockKind::Unlock, false).unwrap();
    two.flock(bob, LockKind::Write, true).unwrap();
    assert_eq!(one.flock(alice, LockKind::Read, false), Err(Errno::EAGAIN));
    let outside = fs::File::open(door.path("file")).unwrap();
    assert_eq!(
        rustix::fs::flock(&outside, rustix::fs::FlockOperation::NonBlockingLockShared),
        Err(rustix::io::Errno::WOULDBLOCK)
    );
    drop(two);
    rustix::fs::flock(&outside, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
}

/// The file system takes the next time of a file from a finer clock if the last one was queried:
/// none of the calls between two writes queries it here. The coarse clock advances every few
/// milliseconds, so most tries can distinguish the two cases.
#[test]
fn what_is_opened_and_changed_is_not_asked_for_its_times() {
    let door = Door::new();
    door.create(&Caller::ROOT, "log", 0o644, 0o2).unwrap();
    let node = door.find("log").unwrap().node;
    let stays = |try_: usize| {
        let beside = door.path("beside");
        let _ = fs::remove_file(&beside);
        door.host.open(&Caller::ROOT, &node, OpenFlags(1)).unwrap().write(b"1", 0, WriteOrigin::Caller).unwrap();
        fs::write(&beside, "x").unwrap();
        let file = door.host.open(&Caller::ROOT, &node, OpenFlags(2)).unwrap();
        if try_.is_multiple_of(2) {
            let long_ago = Time { sec: 1, nsec: 2 };
            let times = SetAttr {
                mtime: Some(SetTime::To(long_ago)),
                ctime: ChangeTime::To(Time { sec: 3, nsec: 4 }),
                ..SetAttr::default()
            };
            let attr = door.host.setattr(&Caller::ROOT, &node, Some(&*file), &times).unwrap();
            assert_eq!((attr.mtime, attr.ctime), (long_ago, Time { sec: 3, nsec: 4 }));
        }
        file.write(b"2", 0, WriteOrigin::Caller).unwrap();
        let modified = |path| fs::metadata(path).unwrap().modified().unwrap();
        modified(door.path("log")) == modified(beside)
    };
    let mostly = (0..40).any(|_| (0..50).filter(|try_| stays(*try_)).count() > 25);
    assert!(mostly, "each write has a time of its own");
}

#[test]
fn set_id_bits_fall_as_the_kernel_asks() {
    needs!(is_root());
    std::thread::spawn(|| {
        crate::host::prepare_worker().unwrap();
        let door = Door::new();
        door.create(&Caller::ROOT, "tool", 0o644, 0o2).unwrap();
        let tool = door.path("tool");
        let mode = || fs::metadata(&tool).unwrap().mode() & 0o7777;
        let set = |kill| {
            fs::set_permissions(&tool, fs::Permissions::from_mode(0o6755)).unwrap();
            door.setattr("tool", SetAttr { size: Some(9), kill_privileges: kill, ..SetAttr::default() }).unwrap().mode
        };
        assert_eq!((set(false), mode()), (0o6755, 0o6755));
        assert_eq!((set(true), mode()), (0o755, 0o755));
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o6755)).unwrap();
        door.setattr("tool", SetAttr { kill_privileges: true, ..SetAttr::default() }).unwrap();
        assert_eq!(mode(), 0o755);
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o6755)).unwrap();
        door.setattr("tool", SetAttr { uid: Some(5), ..SetAttr::default() }).unwrap();
        assert_eq!(mode(), 0o755);
        // A mode given in the same change comes after the owner, as with two calls.
        assert_eq!(
            door.setattr("tool", SetAttr { uid: Some(6), mode: Some(0o4711), ..SetAttr::default() }).unwrap().mode,
            0o4711
        );
        // The kernel in front decides for the writer, not our own capabilities.
        door.open("tool", 1).unwrap().write(b"x", 0, WriteOrigin::Caller).unwrap();
        assert_eq!(mode(), 0o4711);
        door.setattr("tool", SetAttr { kill_privileges: true, ..SetAttr::default() }).unwrap();
        assert_eq!(mode(), 0o711);
        assert_eq!(door.setattr("tool", SetAttr { mode: Some(0o2755), ..SetAttr::default() }).unwrap().mode, 0o2755);
    })
    .join()
    .unwrap();
}

#[test]
fn file_flags_are_forwarded() {
    let request = Ioctl { command: Ioctl::GET_FLAGS, argument: 0, input: &[] };
    let mut output = [0; 32];
    let door = Door::new();
    let (entry, file) = door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    let native_file = fs::File::open(door.path("file")).unwrap();
    let Ok(flags) = nacre_sys::ioctls::flags(native_file.as_fd()) else { return };
    assert_eq!(file.ioctl(request, &mut output), Ok((0, 4)));
    assert_eq!(output[..4], flags.to_ne_bytes());
    assert_eq!(door.host.ioctl(&Caller::ROOT, &entry.node, request, &mut output), Ok((0, 4)));
    assert_eq!(door.host.ioctl(&Caller::ROOT, &door.root(), request, &mut output), Ok((0, 4)));
    // FS_NODUMP_FL.
    let input = (flags | 0x40).to_ne_bytes();
    let set = Ioctl { command: Ioctl::SET_FLAGS, argument: 0, input: &input };
    file.ioctl(set, &mut []).unwrap();
    assert_eq!(nacre_sys::ioctls::flags(native_file.as_fd()).unwrap(), flags | 0x40);
    let unknown = Ioctl { command: 0x1234, argument: 0, input: &[] };
    assert_eq!(file.ioctl(unknown, &mut output), Err(Errno::ENOTTY));
    assert_eq!(file.ioctl(Ioctl { input: &[], ..set }, &mut []), Err(Errno::EINVAL));
}

#[test]
fn extended_attributes_of_every_kind_of_file() {
    let door = Door::new();
    let root = door.root();
    door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    door.mkdir(&Caller::ROOT, "directory", 0o755).unwrap();
    door.host.symlink(&Caller::ROOT, &root, name(b"link"), b"file").unwrap();
    door.host.mknod(&Caller::ROOT, &root, name(b"fifo"), Kind::Fifo, 0o600, (0, 0)).unwrap();
    let mut buffer = [0; 64];
    for path in ["file", "directory"] {
        let node = door.find(path).unwrap().node;
        let caller = &Caller::ROOT;
        door.host
            .setxattr(caller, &node, b"user.key", b"value", XattrFlags { create: true, ..XattrFlags::default() })
            .unwrap();
        let again =
            door.host.setxattr(caller, &node, b"user.key", b"", XattrFlags { create: true, ..XattrFlags::default() });
        assert_eq!(again, Err(Errno::EEXIST));
        assert_eq!(door.host.getxattr(caller, &node, b"user.key", &mut []), Ok(5));
        assert_eq!(door.host.getxattr(caller, &node, b"user.key", &mut buffer[..2]), Err(Errno::ERANGE));
        assert_eq!(door.host.getxattr(caller, &node, b"user.key", &mut buffer), Ok(5));
        assert_eq!(&buffer[..5], b"value");
        let length = door.host.listxattr(caller, &node, &mut buffer).unwrap();
        assert!(buffer[..length].windows(9).any(|part| part == b"user.key\0"));
        assert_eq!(door.host.listxattr(caller, &node, &mut []), Ok(length));
        door.host.removexattr(caller, &node, b"user.key").unwrap();
        assert_eq!(door.host.removexattr(caller, &node, b"user.key"), Err(Errno::ENODATA));
        assert_eq!(door.host.getxattr(caller, &node, b"user.key", &mut buffer), Err(Errno::ENODATA));
        let replace = XattrFlags { replace: true, ..XattrFlags::default() };
        assert_eq!(door.host.setxattr(caller, &node, b"user.key", b"", replace), Err(Errno::ENODATA));
    }
    for path in ["link", "fifo"] {
        let node = door.find(path).unwrap().node;
        // user.* exists for files and directories only; trusted.* for all, and never reaches a
        // link's target.
        assert_eq!(
            door.host.setxattr(&Caller::ROOT, &node, b"user.key", b"v", XattrFlags::default()),
            Err(Errno::EPERM)
        );
        if is_root() {
            door.host.setxattr(&Caller::ROOT, &node, b"trusted.key", b"v", XattrFlags::default()).unwrap();
            assert_eq!(door.host.getxattr(&Caller::ROOT, &node, b"trusted.key", &mut buffer), Ok(1));
        }
    }
    let file = door.find("file").unwrap().node;
    assert_eq!(door.host.getxattr(&Caller::ROOT, &file, b"trusted.key", &mut buffer), Err(Errno::ENODATA));
    assert_eq!(door.host.getxattr(&Caller::ROOT, &file, &[b'x'; 300], &mut buffer), Err(Errno::ERANGE));
}

#[test]
fn direct_access_is_aligned_for_the_caller() {
    let door = Door::with(|options| options.forward_odirect = Some(4096), 16);
    let o_direct = rustix::fs::OFlags::DIRECT.bits();
    fs::write(door.path("file"), vec![3; 10_000]).unwrap();
    let file = match door.open("file", 2 | o_direct) {
        Err(Errno::EINVAL) => return,
        other => other.unwrap(),
    };
    let mut buffer = vec![0; 10_001];
    assert_eq!(file.read(&mut buffer[1..], 0).unwrap(), 10_000);
    assert!(buffer[1..].iter().all(|&byte| byte == 3));
    let data = vec![9; 4097];
    assert_eq!(file.write(&data[1..], 4096, WriteOrigin::Caller).unwrap(), 4096);
    assert_eq!(native(door.path("file"))[4096..8192], data[1..]);
}

#[test]
fn the_figures_are_the_hosts_own() {
    let door = Door::new();
    let ours = door.host.statfs(&Caller::ROOT, &door.root()).unwrap();
    let theirs = rustix::fs::statvfs(door.source.path()).unwrap();
    assert_eq!((u64::from(ours.block), ours.blocks, ours.files), (theirs.f_bsize, theirs.f_blocks, theirs.f_files));
    assert_eq!(u64::from(ours.name_max), theirs.f_namemax);
}

/// A loop device over a file, taken down again.
struct LoopDevice(String);

impl LoopDevice {
    fn new(image: &Path) -> Option<LoopDevice> {
        let _nobody_opens = STARTING.write().unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
        output.status.success().then(|| LoopDevice(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        succeeds(Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

#[test]
fn block_devices_are_files_where_asked_for() {
    let image = tempfile::NamedTempFile::new().unwrap();
    fs::write(image.path(), vec![5; 1 << 20]).unwrap();
    // Only on machines with usable loop devices.
    let Some(device) = LoopDevice::new(image.path()) else { return };
    let number = fs::metadata(&device.0).unwrap().rdev();
    for shown in [true, false] {
        let door = Door::with(|options| options.block_devices = shown, 16);
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        door.host.mknod(&Caller::ROOT, &door.root(), name(b"disk"), Kind::Block, 0o600, (major, minor)).unwrap();
        let entry = door.find("disk").unwrap();
        if !shown {
            assert_eq!((entry.attr.kind, entry.attr.rdev_major, entry.attr.rdev_minor), (Kind::Block, major, minor));
            assert_eq!(door.open("disk", 0).err(), Some(Errno::ENXIO));
            continue;
        }
        assert_eq!((entry.attr.kind, entry.attr.size, entry.attr.rdev_major), (Kind::File, 1 << 20, 0));
        assert_eq!(door.getattr(&entry.node).unwrap().size, 1 << 20);
        let file = match door.open("disk", 2) {
            // A temporary directory without devices.
            Err(Errno::EACCES) => return,
            other => other.unwrap(),
        };
        assert!(file.backing().is_none());
        assert_eq!(read_all(&*file), vec![5; 1 << 20]);
        file.write(b"written", 4096, WriteOrigin::Caller).unwrap();
        file.fsync(false).unwrap();
        assert_eq!(native(image.path())[4096..4103], *b"written");
    }
}

#[test]
fn access_is_what_the_storage_says() {
    let door = Door::new();
    fs::write(door.path("file"), b"text").unwrap();
    fs::set_permissions(door.path("file"), fs::Permissions::from_mode(0o644)).unwrap();
    let node = door.find("file").unwrap().node;
    assert_eq!(door.host.access(&Caller::ROOT, &node, 4), Ok(()));
    // A file without x bits cannot be executed, not even by root.
    assert_eq!(door.host.access(&Caller::ROOT, &node, 1), Err(Errno::EACCES));
    fs::set_permissions(door.path("file"), fs::Permissions::from_mode(0o744)).unwrap();
    assert_eq!(door.host.access(&Caller::ROOT, &node, 5), Ok(()));
    fs::remove_file(door.path("file")).unwrap();
    assert_eq!(door.host.access(&Caller::ROOT, &node, 4), Err(Errno::ESTALE));
}

#[test]
fn what_is_built_beside_the_source_is_renamed_into_it() {
    let door = Door::new();
    let beside = TempDir::new().unwrap();
    let work = door.host.beside(beside.path()).unwrap();
    let made = door.host.mkdir(&Caller::ROOT, &work, name(b"d"), 0o755).unwrap();
    let (_, file) = door.host.create(&Caller::ROOT, &made.node, name(b"f"), 0o644, OpenFlags::WRITE).unwrap();
    assert_eq!(file.write(b"content", 0, WriteOrigin::Caller), Ok(7));
    assert_eq!(door.host.path(&made.node), None, "no name of the source leads there");
    door.host.rename(&Caller::ROOT, &work, name(b"d"), &door.root(), name(b"here"), RenameFlags(0)).unwrap();
    assert_eq!(std::fs::read(door.path("here/f")).unwrap(), b"content");
    let found = door.find("here").unwrap();
    door.host.adopt(&made.node, &found.node);
    assert_eq!(door.host.path(&made.node).as_deref(), Some(&b"here"[..]));
    assert_eq!(door.host.beside(&beside.path().join("missing")).unwrap_err().raw_os_error(), Some(2));
    // Nothing can be renamed from another file system.
    assert_eq!(door.host.beside(Path::new("/proc/self")).unwrap_err().raw_os_error(), Some(18));
}
