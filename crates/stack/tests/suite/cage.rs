//! What a cage promises, one promise at a time: over a directory, through the builder of stacks.

use nacre_cage::{Cage, CageReport, ChargeRule, Storage, ledger::Limits};
use nacre_layers::context::Context;
use nacre_stack::{self as stack, spec::StackSpec};
use nacre_testkit::World;
use nacre_testkit::{eventually, name};
use nacre_vfs::{
    AllocateMode, Caller, Errno, FileId, Invalidation, Ioctl, Kind, Node, OpenFileHost, OpenFlags, Opened, RenameFlags,
    SetAttr, WriteOrigin,
};
use std::{
    collections::HashSet,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak, mpsc},
    time::Duration,
};

const BLOCK: u64 = 4096;
const APPEND: OpenFlags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);

/// A cage over a directory of the host.
struct Caged {
    world: World,
    cage: Arc<Cage>,
    directory: PathBuf,
    _place: Option<tempfile::TempDir>,
}

fn try_over(directory: &Path, settings: &str) -> Result<(World, Arc<Cage>), String> {
    crate::stacks::prepare_thread();
    let line = format!("host:{} | cage:{settings}", directory.to_str().unwrap());
    let spec = StackSpec::from_line(line.as_bytes()).map_err(|error| error.to_string())?;
    let built = stack::build(&spec, &Context::system().unwrap()).map_err(|error| error.to_string())?;
    let cage = built.cages().remove(0);
    Ok((World::new(built.layer), cage))
}

fn over(directory: &Path, settings: &str) -> Caged {
    let (world, cage) = try_over(directory, settings).unwrap();
    Caged { world, cage, directory: directory.to_owned(), _place: None }
}

fn caged(settings: &str) -> Caged {
    let place = tempfile::tempdir().unwrap();
    Caged { _place: None, ..over(place.path(), settings) }.keeping(place)
}

impl Caged {
    fn keeping(mut self, place: tempfile::TempDir) -> Caged {
        self._place = Some(place);
        self
    }

    fn used(&self) -> u64 {
        self.cage.report().used
    }

    fn resize(&self, bytes: u64) {
        self.cage.resize(Limits { bytes: Some(bytes), ..self.cage.limits() }).unwrap();
    }

    /// What is stored below, by the rule.
    fn stored(&self) -> (u64, u64) {
        stored(&self.directory)
    }

    /// A file of whole blocks, closed again.
    fn fill(&self, parent: &Node, bytes: &[u8], blocks: u64) {
        self.world.file_in(parent, bytes, &vec![7; (blocks * BLOCK) as usize]);
    }

    fn report(&self) -> CageReport {
        self.cage.report()
    }

    /// The books hold what is there. Where storage allocates ahead, files with holes seem to hold
    /// more than was asked for.
    fn check_books(&self) {
        let ((bytes, inodes), report) = (self.stored(), self.report());
        assert_eq!((report.inodes, report.clamped), (inodes, 0));
        let magic = rustix::fs::statfs(&self.directory).unwrap().f_type as u64 & 0xffff_ffff;
        if Storage::of_magic(magic) == Storage::Plain {
            assert_eq!(report.used, bytes);
        }
    }
}

/// Bytes and files below a directory, by the rule.
fn stored(directory: &Path) -> (u64, u64) {
    fn walk(directory: &Path, seen: &mut HashSet<u64>) -> u64 {
        let mut sum = 0;
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let data = std::fs::symlink_metadata(entry.path()).unwrap();
            if seen.insert(data.ino()) {
                let cost = data.blocks() * 512;
                sum += if data.is_file() { cost.min(data.len().next_multiple_of(BLOCK)) } else { cost };
            }
            if data.is_dir() {
                sum += walk(&entry.path(), seen);
            }
        }
        sum
    }
    let mut seen = HashSet::new();
    (walk(directory, &mut seen), seen.len() as u64)
}

#[test]
fn the_last_block_can_be_used_and_no_more() {
    let caged = caged("size=40K,inodes=3");
    let (entry, file) = caged.world.file(b"log", b"");
    assert_eq!(file.append(&[1; 30_000]), Ok(30_000));
    assert_eq!(file.append(&[2; 20_000]), Ok(10_960), "as much as fits");
    assert_eq!(file.append(&[3; 1]), Err(Errno::ENOSPC));
    assert_eq!(file.write(&[4; 40_960], 0, WriteOrigin::Caller), Ok(40_960), "what is there can be overwritten");
    assert_eq!(file.write(&[4; 10], 40_955, WriteOrigin::Caller), Ok(5));
    assert_eq!((caged.used(), caged.stored().0), (40_960, 40_960));
    let figures = caged.world.layer.statfs(&caged.world.caller, &caged.world.root).unwrap();
    assert_eq!((figures.blocks, figures.free, figures.available), (10, 0, 0));
    assert_eq!((figures.files, figures.files_free), (3, 2));
    assert_eq!(caged.report().refused.bytes, 1);
    let held = caged.world.open(&entry.node, OpenFlags::READ);
    caged.world.layer.unlink(&caged.world.caller, &caged.world.root, name(b"log")).unwrap();
    drop(file);
    assert_eq!((caged.used(), caged.report().inodes), (40_960, 1), "open for reading");
    drop(held);
    assert_eq!((caged.used(), caged.report().inodes), (0, 0));
}

#[test]
fn files_of_any_kind_are_counted_once() {
    let caged = caged("inodes=5");
    let (world, root) = (&caged.world, &caged.world.root);
    let (entry, _file) = world.file(b"a", b"");
    world.layer.link(&world.caller, &entry.node, None, root, name(b"b")).unwrap();
    world.directory(b"d");
    world.layer.symlink(&world.caller, root, name(b"s"), b"target").unwrap();
    world.layer.mknod(&world.caller, root, name(b"p"), Kind::Fifo, 0o600, (0, 0)).unwrap();
    let (_, nameless) = world.layer.tmpfile(&world.caller, root, 0o600, OpenFlags::READ_WRITE).unwrap();
    assert_eq!(caged.report().inodes, 5);
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    assert_eq!(world.layer.create(&world.caller, root, name(b"x"), 0o600, flags).err(), Some(Errno::ENOSPC));
    assert_eq!(world.layer.mkdir(&world.caller, root, name(b"x"), 0o700).err(), Some(Errno::ENOSPC));
    assert_eq!(caged.report().refused.inodes, 2);
    assert!(
        world.layer.create(&world.caller, root, name(b"a"), 0o600, OpenFlags::READ_WRITE).is_ok(),
        "what is there can be opened"
    );
    drop(nameless);
    assert_eq!(caged.report().inodes, 4);
    world.layer.unlink(&world.caller, root, name(b"a")).unwrap();
    assert_eq!(caged.report().inodes, 4, "it has another name");
    world.layer.rename(&world.caller, root, name(b"s"), root, name(b"b"), RenameFlags(0)).unwrap();
    world.layer.rmdir(&world.caller, root, name(b"d")).unwrap();
    drop(_file);
    assert_eq!(caged.report().inodes, 2);
    assert_eq!(caged.stored().1, 2);
}

#[test]
fn directories_that_grow_are_booked() {
    let caged = caged("size=10M");
    let directory = caged.world.directory(b"many");
    for number in 0..2_000 {
        caged.world.file_in(&directory, format!("a-rather-long-name-{number:06}").as_bytes(), b"");
    }
    assert_eq!((caged.used(), caged.report().inodes), (caged.stored().0, 2_001));
    for number in 0..2_000 {
        caged
            .world
            .layer
            .unlink(&caged.world.caller, &directory, name(format!("a-rather-long-name-{number:06}").as_bytes()))
            .unwrap();
    }
    caged.world.layer.rmdir(&caged.world.caller, &caged.world.root, name(b"many")).unwrap();
    assert_eq!((caged.used(), caged.report().inodes), (0, 0));
}

#[test]
fn a_limit_can_be_lowered_below_what_is_used() {
    let caged = caged("size=100K,soft=80%");
    caged.fill(&caged.world.root, b"a", 20);
    assert!(caged.report().soft_exceeded);
    caged.resize(40 * 1024);
    let (_, file) = caged.world.file(b"b", b"");
    assert_eq!(file.write(b"x", 0, WriteOrigin::Caller), Err(Errno::ENOSPC));
    assert_eq!(caged.report().free, Some(0));
    caged.world.change(&caged.world.find(b"a").unwrap().node, SetAttr { size: Some(0), ..SetAttr::default() });
    assert_eq!(file.write(&[1; 50_000], 0, WriteOrigin::Caller), Ok(40_960));
    caged.resize(1 << 20);
    assert_eq!(file.write(&[1; 50_000], 0, WriteOrigin::Caller), Ok(50_000));
    assert_eq!(caged.used(), caged.stored().0);
}

#[test]
fn users_have_their_own_limits() {
    let caged = caged("size=1M,limit=user:1000=20K,limit=user:1001=8K");
    if !caged.world.is_root() {
        return;
    }
    let (world, root) = (&caged.world, &caged.world.root);
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
    let (entry, file) =
        world.layer.create(&Caller { uid: 1000, ..world.caller }, root, name(b"a"), 0o600, flags).unwrap();
    assert_eq!(file.write(&[1; 30_000], 0, WriteOrigin::Caller), Ok(20_480));
    assert_eq!(file.append(&[1; 1]), Err(Errno::EDQUOT));
    let to = |uid| SetAttr { uid: Some(uid), ..SetAttr::default() };
    assert_eq!(world.layer.setattr(&world.caller, &entry.node, None, &to(1001)).err(), Some(Errno::EDQUOT));
    assert_eq!(world.attr(&entry.node).uid, 1000);
    world.change(&entry.node, to(0));
    assert_eq!(file.append(&[1; 5_000]), Ok(5_000));
    let report = caged.report();
    let of = |uid| report.users.iter().find(|user| user.uid == uid).map(|user| (user.used, user.inodes, user.limit));
    assert_eq!(of(1000), Some((0, 0, Some(20_480))));
    assert_eq!(of(0), Some((28_672, 1, None)));
    assert_eq!(report.refused.user, 2);
}

#[test]
fn directories_have_their_own_limits() {
    let caged = caged("size=1M,limit=dir:nginx=40K,limit=dir:a/b=100K");
    let (world, root) = (&caged.world, &caged.world.root);
    let nginx = world.directory(b"nginx");
    let own = world.attr(&nginx).blocks * 512;
    let (_, file) = world.file_in(&nginx, b"log", b"");
    assert_eq!(file.append(&[1; 60_000]), Ok((40_960 - own) as usize));
    assert_eq!(file.append(&[1; 1]), Err(Errno::ENOSPC));
    assert_eq!(caged.report().refused.dir, 1);
    let figures = world.layer.statfs(&world.caller, &nginx).unwrap();
    assert_eq!((figures.blocks, figures.free), (10, 0));
    assert!(world.layer.statfs(&world.caller, root).unwrap().free > 200);
    // Files move with what they cost, directories and names of one file do not.
    world.file(b"big", &[1; 8_192]);
    let moved = |from: (&Node, &[u8]), to: (&Node, &[u8])| {
        world.layer.rename(&world.caller, from.0, name(from.1), to.0, name(to.1), RenameFlags(0))
    };
    assert_eq!(moved((root, b"big"), (&nginx, b"big")), Err(Errno::ENOSPC));
    moved((&nginx, b"log"), (root, b"log")).unwrap();
    moved((root, b"big"), (&nginx, b"big")).unwrap();
    assert_eq!(caged.report().dirs[0].used, 8_192 + own);
    // Nor does a big file come in by an exchange with a small one, from either side.
    world.file(b"huge", &[1; 60_000]);
    let exchanged = |from: (&Node, &[u8]), to: (&Node, &[u8])| {
        world.layer.rename(&world.caller, from.0, name(from.1), to.0, name(to.1), RenameFlags(RenameFlags::EXCHANGE))
    };
    assert_eq!(exchanged((&nginx, b"big"), (root, b"huge")), Err(Errno::ENOSPC));
    assert_eq!(exchanged((root, b"huge"), (&nginx, b"big")), Err(Errno::ENOSPC));
    assert_eq!((caged.report().dirs[0].used, caged.used()), (8_192 + own, caged.stored().0));
    world.directory(b"sub");
    assert_eq!(moved((root, b"sub"), (&nginx, b"sub")), Err(Errno::EXDEV));
    assert_eq!(moved((root, b"nginx"), (root, b"other")), Err(Errno::EBUSY));
    let log = world.find(b"log").unwrap().node;
    assert_eq!(world.layer.link(&world.caller, &log, None, &nginx, name(b"twice")).err(), Some(Errno::EXDEV));
    // One that did not exist when the cage was made.
    let a = world.directory(b"a");
    let b = world.directory_in(&a, b"b");
    world.file_in(&b, b"file", &[1; 4096]);
    assert_eq!(caged.report().dirs[1].used, 4096 + own);
    assert_eq!(caged.used(), caged.stored().0);
}

#[test]
fn contradictions_are_refused() {
    let place = tempfile::tempdir().unwrap();
    for (settings, word) in [
        ("writes=auto", "size"),
        ("size=10X", "10X"),
        ("size=1000", "block"),
        ("size=10G,soft=101%", "percentage"),
        ("inodes=5,soft=80%", "percentage"),
        ("size=1G,inodes=0", "inodes"),
        ("size=1G,on-soft=true", "soft"),
        ("size=1G,limit=user:nobody-of-this-name=1G", "nobody-of-this-name"),
        ("size=1G,limit=dir:/abs=1G", "relative"),
        ("size=1G,limit=dir:a=1G,limit=dir:a/b=1G", "overlap"),
        ("size=1G,limit=dir:a=1G,limit=dir:a=2G", "twice"),
        ("size=1G,limit=user:5=1G,limit=user:5=2G", "twice"),
        ("size=1G,keep=[", "pattern"),
        ("size=1G,when-full=maybe", "drop-oldest"),
    ] {
        let error = try_over(place.path(), settings).err().unwrap_or_else(|| panic!("{settings} is taken"));
        assert!(error.contains(word), "{settings}: {error}");
    }
    let resolved = format!("host:{},symlinks=resolve | cage:size=1G", place.path().to_str().unwrap());
    let spec = StackSpec::from_line(resolved.as_bytes()).unwrap();
    assert!(stack::build(&spec, &Context::system().unwrap()).is_err());
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "nothing was changed");
}

#[test]
fn limits_can_be_reloaded() {
    let place = tempfile::tempdir().unwrap();
    let spec = |settings: &str| {
        StackSpec::from_line(format!("host:{} | cage:{settings}", place.path().to_str().unwrap()).as_bytes()).unwrap()
    };
    let context = Context::system().unwrap();
    let built = stack::build(&spec("size=1M"), &context).unwrap();
    built.reload(&spec("size=2M,inodes=100,limit=user:5=1M"), &context).unwrap();
    let limits = built.cages()[0].limits();
    assert_eq!((limits.bytes, limits.inodes, limits.users.get(&5)), (Some(2 << 20), Some(100), Some(&(1 << 20))));
    for settings in ["size=2M,writes=through", "size=2M,limit=dir:a=1M", "size=2M,when-full=drop-oldest"] {
        assert!(built.reload(&spec(settings), &context).is_err(), "{settings}");
    }
}

#[test]
fn files_that_were_there_are_counted() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("sub")).unwrap();
    std::fs::write(place.path().join("sub/a"), [1; 10_000]).unwrap();
    std::fs::hard_link(place.path().join("sub/a"), place.path().join("b")).unwrap();
    let caged = over(place.path(), "size=100K");
    assert_eq!((caged.used(), caged.report().inodes), stored(place.path()));
    assert_eq!(caged.report().start, "counted");
}

#[test]
fn ioctls_that_could_allocate_are_not_passed_on() {
    let place = tempfile::tempdir().unwrap();
    let line = format!("host:{},ioctl | cage:size=1M", place.path().to_str().unwrap());
    let spec = StackSpec::from_line(line.as_bytes()).unwrap();
    let world = World::new(stack::build(&spec, &Context::system().unwrap()).unwrap().layer);
    let (_, file) = world.file(b"a", b"");
    for command in [0x4004_9409_u32, 0x4020_940d, 0xc018_9436, 0x4030_582a] {
        assert_eq!(file.ioctl(Ioctl { command, argument: 0, input: &[0; 64] }, &mut []).err(), Some(Errno::ENOTTY));
    }
    // Size of extents in a struct fsxattr: XFS allocates as much for a single block.
    for (at, value) in [(0, 0x800_u32), (0, 0x1000), (4, 1 << 30), (0, 0x1_0000), (16, 1 << 30)] {
        let mut input = [0; 28];
        input[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        let set = Ioctl { command: Ioctl::SET_EXTENDED, argument: 0, input: &input };
        assert_eq!(file.ioctl(set, &mut []).err(), Some(Errno::EPERM), "{value:#x} at {at}");
    }
    let flags = file.ioctl(Ioctl { command: Ioctl::GET_FLAGS, argument: 0, input: &[] }, &mut [0; 8]);
    assert!(flags.is_ok(), "{flags:?}");
    assert!(file.backing().is_none() && file.writeback_lease().is_none());
}

#[test]
fn space_behind_the_end_counts() {
    let caged = caged("size=1M");
    let (_, file) = caged.world.file(b"a", b"");
    match file.allocate(AllocateMode(1), 0, 2 << 20) {
        Err(Errno::EOPNOTSUPP) => return,
        other => assert_eq!(other, Err(Errno::ENOSPC)),
    }
    file.allocate(AllocateMode(1), 0, 512 << 10).unwrap();
    assert_eq!(caged.used(), 512 << 10);
    assert_eq!(file.write(&[1; 4096], 0, WriteOrigin::Caller), Ok(4096));
    assert_eq!(caged.used(), 512 << 10, "it was booked before");
    file.allocate(AllocateMode(0), 0, 1 << 20).unwrap();
    assert_eq!(caged.used(), 1 << 20);
}

#[test]
fn rotated_files_go_first_and_the_oldest_before_the_others() {
    let caged = caged("size=100K,when-full=drop-oldest,keep=kept*");
    let (world, root) = (&caged.world, &caged.world.root);
    let logs = world.directory(b"logs");
    for (index, log) in [&b"a.log.2"[..], b"a.log.1", b"a.log.3.gz", b"kept.1", b"open.1"].iter().enumerate() {
        caged.fill(&logs, log, 3);
        let time = nacre_vfs::Time { sec: 1_000_000 - index as i64, nsec: 0 };
        world.change(
            &world.find_in(&logs, log).unwrap().node,
            SetAttr { mtime: Some(nacre_vfs::SetTime::To(time)), ..SetAttr::default() },
        );
    }
    let _reader = world.open(&world.find_in(&logs, b"open.1").unwrap().node, OpenFlags::READ);
    let (_, file) = world.file(b"plain", b"");
    let mut written = 0;
    while world.find_in(&logs, b"a.log.3.gz").is_ok() {
        written += file.append(&[1; 4096]).unwrap() as u64;
    }
    assert!(world.find_in(&logs, b"a.log.1").is_ok() && world.find_in(&logs, b"a.log.2").is_ok());
    while world.find_in(&logs, b"a.log.2").is_ok() {
        written += file.append(&[1; 4096]).unwrap() as u64;
    }
    assert!(world.find_in(&logs, b"a.log.1").is_err(), "the older one went first");
    assert_eq!(world.attr(&world.find(b"plain").unwrap().node).size, written);
    assert_eq!((caged.report().dropped.files, caged.report().dropped.heads), (3, 0));
    assert!(world.find_in(&logs, b"kept.1").is_ok() && world.find_in(&logs, b"open.1").is_ok());
    // Nothing rotated is left: the growing file loses its beginning, and what is written last
    // stays.
    for byte in 0..200_u8 {
        assert_eq!(file.append(&[byte; 4096]), Ok(4096));
        assert!(caged.used() <= 102_400);
    }
    assert!(caged.report().dropped.heads > 0);
    let content = world.content(&world.find(b"plain").unwrap().node);
    assert!(content.ends_with(&[199; 4096]) && content[..content.len() - 4096].ends_with(&[198; 4096]));
    assert!(world.find_in(&logs, b"kept.1").is_ok() && root.same(&world.root));
    caged.check_books();
    assert_eq!(caged.report().refused.bytes, 0);
}

/// A full cage with a file of which only the blocks 1 to 4 and 9 to 12 are there, and one of data.
fn full_with_holes(directory: &Path) -> (Caged, Opened, Opened) {
    let caged = over(directory, "size=400K");
    let (_, holes) = caged.world.file(b"holes", b"");
    for block in [1, 2, 3, 4, 9, 10, 11, 12, 39] {
        assert_eq!(holes.write(&[1; 4096], block * BLOCK, WriteOrigin::Caller), Ok(4096));
    }
    let (_, data) = caged.world.file(b"data", b"");
    while data.append(&[2; 4096]) == Ok(4096) {}
    assert_eq!(caged.used(), 400 << 10);
    (caged, holes, data)
}

#[test]
fn blocks_that_a_file_with_holes_has_can_be_written_again_in_a_full_cage() {
    for place in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let (caged, holes, data) = full_with_holes(place.path());
        for (block, blocks) in [(1, 4), (9, 4)] {
            let length = (blocks * BLOCK) as usize;
            assert_eq!(holes.write(&vec![3; length], block * BLOCK, WriteOrigin::Caller), Ok(length));
            assert_eq!(data.copy_to(0, &*holes, block * BLOCK, length as u64, 0), Ok(length as u64));
        }
        assert_eq!(holes.write(&[3; 32768], 2 * BLOCK, WriteOrigin::Caller), Ok(12288), "up to the hole");
        assert_eq!(data.copy_to(0, &*holes, 11 * BLOCK, 32768, 0), Ok(8192), "up to the hole");
        assert_eq!(holes.write(&[3; 4096], 5 * BLOCK, WriteOrigin::Caller), Err(Errno::ENOSPC));
        assert_eq!(holes.allocate(AllocateMode(0), 4 * BLOCK, 2 * BLOCK), Err(Errno::ENOSPC));
        assert_eq!(caged.used(), 400 << 10);
        caged.check_books();
    }
}

#[test]
fn what_is_allocated_can_be_allocated_again_in_a_full_cage() {
    let place = tempfile::tempdir().unwrap();
    let (caged, holes, _data) = full_with_holes(place.path());
    let keep = AllocateMode(AllocateMode::KEEP_SIZE);
    caged.resize(420 << 10);
    assert_eq!(holes.allocate(AllocateMode(0), 20 * BLOCK, 2 * BLOCK), Ok(()));
    assert_eq!(holes.allocate(keep, 50 * BLOCK, 2 * BLOCK), Ok(()));
    assert_eq!(caged.report().used, 416 << 10);
    caged.resize(416 << 10);
    for (mode, block) in [(AllocateMode(0), 20), (keep, 50), (keep, 20), (AllocateMode(AllocateMode::ZERO_RANGE), 20)] {
        assert_eq!(holes.allocate(mode, block * BLOCK, 2 * BLOCK), Ok(()), "{mode:?} {block}");
        assert_eq!(holes.allocate(mode, block * BLOCK, 3 * BLOCK), Err(Errno::ENOSPC), "{mode:?} {block}");
    }
    assert_eq!(holes.write(&[3; 12288], 20 * BLOCK, WriteOrigin::Caller), Ok(8192));
    assert_eq!(caged.report().used, 416 << 10);
}

/// A door that hears of a close while somebody waits for it.
struct LateDoor {
    held: Mutex<Option<Opened>>,
    asked: Mutex<Vec<FileId>>,
}

impl OpenFileHost for LateDoor {
    fn wait_closed(&self, files: &[FileId], _most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        self.asked.lock().unwrap().extend_from_slice(files);
        assert!(!closed());
        let held = self.held.lock().unwrap().take();
        drop(held);
        closed()
    }
}

#[test]
fn a_rotated_file_goes_when_the_door_hears_that_it_is_closed() {
    let caged = caged("size=100K,when-full=drop-oldest");
    let (world, logs) = (&caged.world, caged.world.directory(b"logs"));
    caged.fill(&logs, b"a.log.1", 20);
    let entry = world.find_in(&logs, b"a.log.1").unwrap();
    let held = Mutex::new(Some(world.open(&entry.node, OpenFlags::READ)));
    let door = Arc::new(LateDoor { held, asked: Mutex::default() });
    let weak: Weak<LateDoor> = Arc::downgrade(&door);
    world.layer.capabilities().open_files.unwrap().attach(weak);
    let (_, file) = world.file(b"plain", b"");
    assert_eq!(file.append(&[1; 40_960]), Ok(40_960));
    assert_eq!(*door.asked.lock().unwrap(), [entry.attr.id]);
    assert!(world.find_in(&logs, b"a.log.1").is_err());
    assert_eq!(caged.report().dropped.files, 1);
    caged.check_books();
}

#[test]
fn what_is_kept_is_never_cut() {
    let caged = caged("size=40K,when-full=drop-oldest,keep=db/**,keep=*.keep");
    let (world, root) = (&caged.world, &caged.world.root);
    let db = world.directory(b"db");
    caged.fill(&db, b"table.1", 2);
    let (_, kept) = world.file(b"log.keep", b"");
    while let Ok(written) = kept.append(&[1; 4096]) {
        assert!(written > 0);
    }
    assert_eq!(kept.append(&[1; 4096]), Err(Errno::ENOSPC));
    assert_eq!(caged.report().dropped, nacre_cage::Dropped::default());
    assert!(world.find_in(&db, b"table.1").is_ok() && root.same(&world.root));
}

#[test]
fn holes_are_made_where_somebody_writes_at_places_of_his_own() {
    let caged = caged("size=80K,when-full=drop-oldest");
    let (entry, file) = caged.world.file(b"grown", b"");
    for block in 0..100_u64 {
        assert_eq!(file.write(&[block as u8; 4096], block * BLOCK, WriteOrigin::Caller), Ok(4096), "block {block}");
    }
    assert_eq!(caged.world.attr(&entry.node).size, 100 * BLOCK, "it keeps its length");
    assert!(caged.used() <= 80 * 1024);
    caged.check_books();
    let content = caged.world.content(&entry.node);
    assert!(content.ends_with(&[99; 4096]) && content.starts_with(&[0; 4096]));
}

#[test]
fn doors_are_told_what_was_removed() {
    let caged = caged("size=40K,when-full=drop-oldest");
    let (tell, told) = mpsc::channel();
    caged.world.layer.watch(tell);
    caged.fill(&caged.world.root, b"log.1", 4);
    let root = caged.world.attr(&caged.world.root).id;
    let (entry, file) = caged.world.file(b"log", b"");
    for _ in 0..20 {
        assert_eq!(file.append(&[1; 4096]), Ok(4096));
    }
    let notices: Vec<Invalidation> = told.try_iter().collect();
    assert!(notices.contains(&Invalidation::Entry { parent: root, name: (*b"log.1").into() }), "{notices:?}");
    assert!(notices.contains(&Invalidation::Content { id: entry.attr.id }), "{notices:?}");
}

#[test]
fn the_soft_limit_runs_a_command() {
    let place = tempfile::tempdir().unwrap();
    let told = place.path().join("told");
    let directory = place.path().join("caged");
    std::fs::create_dir(&directory).unwrap();
    let command = format!("echo $NACRE_CAGE_EVENT $NACRE_CAGE_USED $NACRE_CAGE_LIMIT >> {}", told.to_str().unwrap());
    let caged = over(&directory, &format!("size=100K,soft=50%,on-soft={command}"));
    let read = || std::fs::read_to_string(&told).unwrap_or_default();
    let (entry, file) = caged.world.file(b"a", &[1; 4096]);
    assert_eq!(read(), "");
    file.append(&[1; 60_000]).unwrap();
    eventually("the command", || read().lines().count() == 1);
    assert_eq!(read(), "soft 65536 102400\n");
    caged.world.change(&entry.node, SetAttr { size: Some(0), ..SetAttr::default() });
    eventually("the command for the way down", || read().lines().count() == 2);
    assert!(read().ends_with("below 0 102400\n"), "{}", read());
}

#[test]
fn changes_behind_the_cage_are_booked() {
    for settings in ["", ",coherence=watch"] {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("known"), [1; 5000]).unwrap();
        let line = format!("host:{}{settings} | cage:size=10M", place.path().to_str().unwrap());
        let built = stack::build(&StackSpec::from_line(line.as_bytes()).unwrap(), &Context::system().unwrap()).unwrap();
        let cage = built.cages().remove(0);
        let (tell, told) = mpsc::channel();
        built.layer.watch(tell);
        let world = World::new(built.layer);
        assert_eq!(cage.report().used, 8192);
        // By another process, since our own changes are not reported.
        let run = |script: &str| {
            let status =
                std::process::Command::new("/bin/sh").args(["-c", script]).current_dir(place.path()).status().unwrap();
            assert!(status.success(), "{script}");
        };
        // Directories are watched from when somebody looks into them.
        assert_eq!(world.names(&world.root), [b"known".to_vec()]);
        let _open = world.open(&world.find(b"known").unwrap().node, OpenFlags::READ_WRITE);
        run("head -c 20000 /dev/zero >> known");
        eventually("a file that is open here and grew", || cage.report().used == 28_672);
        run("mkdir new && head -c 9000 /dev/zero > new/file");
        eventually("a new file", || (cage.report().used, cage.report().inodes) == stored(place.path()));
        world.file(b"ours", &[1; 5000]);
        let ours = world.find(b"ours").unwrap().node;
        run("rm ours");
        eventually("the removal of a file of ours", || {
            (cage.report().used, cage.report().inodes) == stored(place.path())
        });
        drop(ours);
        let (_, open) = world.file(b"open", &[1; 5000]);
        run("rm open");
        eventually("a count", || cage.report().recount.done > 2 && !cage.report().recount.due);
        assert_eq!(cage.report().used, stored(place.path()).0 + 8192, "it is open");
        drop(open);
        eventually("its end", || (cage.report().used, cage.report().inodes) == stored(place.path()));
        run("rm -r new");
        eventually("its removal", || (cage.report().used, cage.report().inodes) == stored(place.path()));
        eventually("the end of all doubts", || !cage.report().recount.due);
        drop(told);
    }
}

#[test]
fn own_changes_need_no_count() {
    let caged = caged("size=10M");
    let (tell, _told) = mpsc::channel();
    caged.world.layer.watch(tell);
    let (world, root) = (&caged.world, &caged.world.root);
    let directory = world.directory(b"d");
    for number in 0..50 {
        let (entry, file) = world.file_in(&directory, format!("{number}").as_bytes(), &[1; 5000]);
        drop(file);
        world.change(&entry.node, SetAttr { mode: Some(0o600), ..SetAttr::default() });
    }
    world.layer.rename(&world.caller, &directory, name(b"1"), root, name(b"moved"), RenameFlags(0)).unwrap();
    world.layer.unlink(&world.caller, &directory, name(b"2")).unwrap();
    let done = caged.report().recount.done;
    std::thread::sleep(Duration::from_millis(300));
    let report = caged.report();
    assert_eq!((report.recount.due, report.recount.done), (false, done));
    assert_eq!((report.used, report.inodes), caged.stored());
}

/// A copy of a state directory as a crash at this moment leaves it. A crash has no duration: where
/// files come or go meanwhile, it is made anew.
fn crash(state: &Path, copy: &Path) {
    let files = || {
        let entries = std::fs::read_dir(state)
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        let mut files: Vec<(PathBuf, u64)> =
            entries.map(|entry| (entry.path(), entry.metadata().map_or(0, |data| data.ino()))).collect();
        files.sort();
        files
    };
    loop {
        let _ = std::fs::remove_dir_all(copy);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(copy).unwrap();
        let before = files();
        let copied = before.iter().all(|(file, _)| std::fs::copy(file, copy.join(file.file_name().unwrap())).is_ok());
        if copied && before == files() {
            return;
        }
    }
}

#[test]
fn accounts_survive_an_orderly_end_and_a_crash() {
    let place = tempfile::tempdir().unwrap();
    let (directory, state, copy) = (place.path().join("caged"), place.path().join("state"), place.path().join("copy"));
    std::fs::create_dir(&directory).unwrap();
    let settings = |state: &Path| format!("size=10M,state={}", state.to_str().unwrap());
    let first = over(&directory, &settings(&state));
    assert_eq!(first.report().start, "new");
    let sub = first.world.directory(b"sub");
    for number in 0..20 {
        first.world.file_in(&sub, format!("f{number}").as_bytes(), &vec![1; number * 1000]);
    }
    first.cage.shut_down();
    drop(first);
    let second = over(&directory, &settings(&state));
    assert_eq!(second.report().start, "clean");
    assert_eq!((second.used(), second.report().inodes), second.stored());
    eventually("the count after a start", || second.report().recount.done > 0);
    // Now every kind of change, and no end.
    let (world, root) = (&second.world, &second.world.root);
    let sub = world.find(b"sub").unwrap().node;
    let of = |bytes: &[u8]| world.find_in(&sub, bytes).unwrap().node;
    let held = world.open(&of(b"f1"), OpenFlags::READ_WRITE);
    held.write(&[1; 100_000], 5, WriteOrigin::Caller).unwrap();
    world.layer.unlink(&world.caller, &sub, name(b"f2")).unwrap();
    world.change(&of(b"f3"), SetAttr { size: Some(0), ..SetAttr::default() });
    world.open(&of(b"f4"), APPEND).append(&[2; 50_000]).unwrap();
    world.layer.rename(&world.caller, &sub, name(b"f4"), root, name(b"moved"), RenameFlags(0)).unwrap();
    world.layer.rename(&world.caller, &sub, name(b"f5"), &sub, name(b"f6"), RenameFlags(0)).unwrap();
    world.file(b"fresh", &[1; 30_000]);
    let (_, nameless) = world.layer.tmpfile(&world.caller, root, 0o600, OpenFlags::READ_WRITE).unwrap();
    nameless.write(&[1; 70_000], 0, WriteOrigin::Caller).unwrap();
    let open = world.open(&of(b"f7"), OpenFlags::READ);
    world.layer.unlink(&world.caller, &sub, name(b"f7")).unwrap();
    assert!(second.used() > stored(&directory).0, "open files without names");
    crash(&state, &copy);
    drop((held, nameless, open));
    let third = over(&directory, &settings(&copy));
    assert_eq!(third.report().start, "crashed");
    assert_eq!((third.used(), third.report().inodes), stored(&directory));
    assert_eq!((second.used(), second.report().inodes), stored(&directory));
    // A directory that moves takes the noted places of its files with it.
    second.world.layer.rename(&world.caller, root, name(b"sub"), root, name(b"other"), RenameFlags(0)).unwrap();
    let fourth_copy = place.path().join("fourth");
    crash(&state, &fourth_copy);
    let fourth = over(&directory, &settings(&fourth_copy));
    eventually("a count", || (fourth.used(), fourth.report().inodes) == stored(&directory));
}

#[test]
fn one_state_serves_one_cage() {
    let place = tempfile::tempdir().unwrap();
    let (directory, state) = (place.path().join("caged"), place.path().join("state"));
    std::fs::create_dir(&directory).unwrap();
    let settings = format!("size=10M,state={}", state.to_str().unwrap());
    let _first = over(&directory, &settings);
    assert!(try_over(&directory, &settings).is_err());
}

#[test]
fn many_threads_at_the_edge() {
    let place = tempfile::tempdir().unwrap();
    let (directory, state) = (place.path().join("caged"), place.path().join("state"));
    std::fs::create_dir(&directory).unwrap();
    let caged = over(&directory, &format!("size=400K,inodes=60,state={}", state.to_str().unwrap()));
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let caged = &caged;
            scope.spawn(move || edge_worker(caged, thread));
        }
        let caged = &caged;
        scope.spawn(move || {
            for round in 0..200_u64 {
                assert!(stored_while_changing(&caged.directory) <= 400 * 1024);
                caged.resize((300 + round % 100) * 1024);
            }
        });
    });
    caged.check_books();
}

/// As [`stored`], while others make and remove files. What moves while it is looked for may count
/// twice, so names do not move here.
fn stored_while_changing(directory: &Path) -> u64 {
    let mut sum = 0;
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if let Ok(data) = entry.metadata()
            && data.is_file()
            && data.ino() % 2 == 0
        {
            sum += data.blocks().min(data.len().div_ceil(512)) * 512;
        }
    }
    sum
}

fn edge_worker(caged: &Caged, thread: u64) {
    crate::stacks::prepare_thread();
    let (world, mut random) = (&caged.world, 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(thread + 1));
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut held = Vec::new();
    for _ in 0..600 {
        let bytes = format!("f{}", next(12)).into_bytes();
        let found = world.find(&bytes);
        match (next(8), found) {
            (0 | 1, Err(_)) => {
                let flags = OpenFlags(OpenFlags::READ_WRITE.0);
                drop(world.layer.create(&world.caller, &world.root, name(&bytes), 0o600, flags));
            }
            (2 | 3, Ok(entry)) => {
                if let Ok(file) = world.layer.open(&world.caller, &entry.node, OpenFlags::READ_WRITE) {
                    let _ = file.write(&vec![1; next(60_000) as usize], next(100_000), WriteOrigin::Caller);
                    if held.len() < 3 {
                        held.push(file);
                    } else {
                        held.clear();
                    }
                }
            }
            (4, Ok(entry)) => {
                if let Ok(file) = world.layer.open(&world.caller, &entry.node, APPEND) {
                    let _ = file.append(&vec![1; next(9_000) as usize]);
                }
            }
            (5, Ok(_)) => {
                let _ = world.layer.unlink(&world.caller, &world.root, name(&bytes));
            }
            (6, Ok(entry)) => {
                let change = SetAttr { size: Some(next(50_000)), ..SetAttr::default() };
                let _ = world.layer.setattr(&world.caller, &entry.node, None, &change);
            }
            (7, Ok(_)) => {
                let to = format!("f{}", next(12)).into_bytes();
                let _ = world.layer.rename(
                    &world.caller,
                    &world.root,
                    name(&bytes),
                    &world.root,
                    name(&to),
                    RenameFlags(0),
                );
            }
            _ => {}
        }
    }
}

#[test]
fn a_count_while_everything_changes_is_right_in_the_end() {
    let place = tempfile::tempdir().unwrap();
    let (directory, state) = (place.path().join("caged"), place.path().join("state"));
    std::fs::create_dir(&directory).unwrap();
    for number in 0..3_000 {
        std::fs::write(directory.join(format!("old{number}")), [1; 100]).unwrap();
    }
    let settings = format!("size=100M,state={}", state.to_str().unwrap());
    drop(over(&directory, &settings));
    // Starts clean, and counts in the background while files are made, moved and removed.
    let caged = over(&directory, &settings);
    let (world, root) = (&caged.world, &caged.world.root);
    let mut number = 0_u64;
    while caged.report().recount.done == 0 {
        let own = format!("new{}", number % 50).into_bytes();
        let sub = world.find(b"sub").map_or_else(|_| world.directory(b"sub"), |entry| entry.node);
        if let Ok((_, file)) = world.layer.create(&world.caller, &sub, name(&own), 0o600, OpenFlags::READ_WRITE) {
            assert_eq!(file.write(&[1; 9000], 0, WriteOrigin::Caller), Ok(9000));
        }
        let _ = world.layer.unlink(&world.caller, root, name(format!("old{}", number % 3_000).as_bytes()));
        let _ = world.layer.rename(&world.caller, &sub, name(&own), root, name(&own), RenameFlags(0));
        if number.is_multiple_of(40) {
            let to = if number.is_multiple_of(80) { &b"there"[..] } else { b"sub" };
            let from = if number.is_multiple_of(80) { &b"sub"[..] } else { b"there" };
            let _ = world.layer.rename(&world.caller, root, name(from), root, name(to), RenameFlags(0));
        }
        number += 1;
    }
    assert!(number > 0);
    assert_eq!((caged.used(), caged.report().inodes, caged.report().clamped), (caged.stored().0, caged.stored().1, 0));
}

#[test]
fn the_rule_of_lagging_storage_is_the_length() {
    let rule = ChargeRule::new(BLOCK, Storage::Lagging);
    let place = tempfile::tempdir().unwrap();
    let caged = over(place.path(), "size=1M");
    let (entry, _) = caged.world.file(b"a", &[1; 5000]);
    assert_eq!(rule.found(&caged.world.attr(&entry.node)), 8192);
}
