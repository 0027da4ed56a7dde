//! The same random operations on a native directory and through the layer: same results, same
//! trees.

use super::*;
use nacre_testkit::needs;
use nacre_vfs::{SetTime, Time, WriteOrigin};
use rustix::fs::{self as native_fs, AtFlags, CWD, Mode, OFlags};
use std::{
    collections::BTreeMap,
    os::unix::fs::{FileTypeExt, MetadataExt},
};

/// The native calls use the same umask as the callers of the layer.
const OWN: nacre_sys::credentials::Identity = nacre_sys::credentials::Identity { uid: 0, gid: 0, umask: 0 };

/// A small generator, so that a failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn path(&mut self) -> String {
        let depth = 1 + self.below(3);
        (0..depth).map(|_| ["a", "b", "c"][self.below(3) as usize]).collect::<Vec<_>>().join("/")
    }
}

#[derive(Debug)]
enum Step {
    Create(String, u32, u32),
    Mkdir(String, u32),
    Symlink(String, String),
    Fifo(String, u32),
    Unlink(String),
    Rmdir(String),
    Rename(String, String, u32),
    Link(String, String),
    Chmod(String, u32),
    Chown(String, u32, u32),
    Truncate(String, u64),
    Times(String, i64),
    Write(String, u64, u8),
    Setxattr(String, bool),
    Removexattr(String),
    Readlink(String),
}

fn step(random: &mut Random) -> Step {
    let path = random.path();
    match random.below(20) {
        0..=2 => {
            let exclusive = [0, OpenFlags::EXCL][random.below(2) as usize];
            let truncating = [0, OpenFlags::TRUNC][random.below(2) as usize];
            Step::Create(path, [0o644, 0o600, 0o4755, 0o666][random.below(4) as usize], 2 | exclusive | truncating)
        }
        3..=5 => Step::Mkdir(path, [0o755, 0o1777, 0o700][random.below(3) as usize]),
        6 => Step::Symlink(path, random.path()),
        7 => Step::Fifo(path, 0o640),
        8 => Step::Unlink(path),
        9 => Step::Rmdir(path),
        10..=11 => Step::Rename(path, random.path(), random.below(3) as u32),
        12 => Step::Link(path, random.path()),
        13 => Step::Chmod(path, [0o600, 0o2711, 0o4755, 0][random.below(4) as usize]),
        14 => Step::Chown(path, random.below(3) as u32, random.below(3) as u32),
        15 => Step::Truncate(path, random.below(10_000)),
        16 => Step::Times(path, random.below(1 << 32) as i64 - (1 << 31)),
        17 => Step::Write(path, random.below(5000), random.below(256) as u8),
        18 if random.below(2) == 0 => Step::Setxattr(path, random.below(2) == 0),
        18 => Step::Removexattr(path),
        _ => Step::Readlink(path),
    }
}

/// Whether a path has a link in the middle. The kernel in front of a layer resolves these; here
/// they are skipped on both sides.
fn passes_link(root: &Path, path: &str) -> bool {
    let parents = Path::new(path).ancestors().skip(1).filter(|part| !part.as_os_str().is_empty());
    parents.into_iter().any(|part| root.join(part).symlink_metadata().is_ok_and(|meta| meta.is_symlink()))
}

fn natively(root: &Path, step: &Step) -> rustix::io::Result<Vec<u8>> {
    let at = |path: &String| root.join(path);
    let mode = Mode::from_raw_mode;
    match step {
        Step::Create(path, bits, flags) => {
            let flags = OFlags::from_bits_retain(*flags) | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            native_fs::open(at(path), flags, mode(*bits)).map(drop)?;
        }
        Step::Mkdir(path, bits) => native_fs::mkdir(at(path), mode(*bits))?,
        Step::Symlink(path, target) => native_fs::symlink(target, at(path))?,
        Step::Fifo(path, bits) => native_fs::mkfifoat(CWD, at(path), mode(*bits))?,
        Step::Unlink(path) => native_fs::unlink(at(path))?,
        Step::Rmdir(path) => native_fs::rmdir(at(path))?,
        Step::Rename(from, to, flags) => {
            native_fs::renameat_with(CWD, at(from), CWD, at(to), native_fs::RenameFlags::from_bits_retain(*flags))?;
        }
        Step::Link(from, to) => native_fs::linkat(CWD, at(from), CWD, at(to), AtFlags::empty())?,
        Step::Chmod(path, bits) => {
            let file = native_fs::open(at(path), OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())?;
            nacre_sys::inode::change_mode(std::os::fd::AsFd::as_fd(&file), *bits)
                .map_err(|error| rustix::io::Errno::from_raw_os_error(error.raw_os_error().unwrap()))?;
        }
        Step::Chown(path, uid, gid) => {
            let (uid, gid) = (native_fs::Uid::from_raw(*uid), native_fs::Gid::from_raw(*gid));
            native_fs::chownat(CWD, at(path), Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Step::Truncate(path, size) => {
            let file = native_fs::open(at(path), OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, Mode::empty())?;
            native_fs::ftruncate(file, *size)?;
        }
        Step::Times(path, seconds) => {
            let stamp = native_fs::Timespec { tv_sec: *seconds, tv_nsec: 5 };
            let omit = native_fs::Timespec { tv_sec: 0, tv_nsec: native_fs::UTIME_OMIT };
            let times = native_fs::Timestamps { last_access: omit, last_modification: stamp };
            native_fs::utimensat(CWD, at(path), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Step::Write(path, offset, byte) => {
            let file = native_fs::open(at(path), OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK, Mode::empty())?;
            rustix::io::pwrite(&file, &[*byte; 100], *offset)?;
        }
        Step::Setxattr(path, create) => {
            let flags = if *create { native_fs::XattrFlags::CREATE } else { native_fs::XattrFlags::empty() };
            native_fs::lsetxattr(at(path), "user.key", b"value", flags)?;
        }
        Step::Removexattr(path) => native_fs::lremovexattr(at(path), "user.key")?,
        Step::Readlink(path) => return Ok(native_fs::readlink(at(path), Vec::new())?.into_bytes()),
    }
    Ok(Vec::new())
}

fn through(door: &Door, step: &Step) -> Result<Vec<u8>> {
    let root = Caller::ROOT;
    match step {
        Step::Create(path, bits, flags) => {
            door.create(&root, path, *bits, *flags)?;
        }
        Step::Mkdir(path, bits) => {
            door.mkdir(&root, path, *bits)?;
        }
        Step::Symlink(path, target) => {
            let (parent, name) = door.split(path)?;
            door.host.symlink(&root, &parent, name, target.as_bytes())?;
        }
        Step::Fifo(path, bits) => {
            let (parent, name) = door.split(path)?;
            door.host.mknod(&root, &parent, name, Kind::Fifo, *bits, (0, 0))?;
        }
        Step::Unlink(path) => door.unlink(path)?,
        Step::Rmdir(path) => door.rmdir(path)?,
        Step::Rename(from, to, flags) => door.rename(from, to, *flags)?,
        Step::Link(from, to) => {
            door.link(from, to)?;
        }
        Step::Chmod(path, bits) => {
            door.setattr(path, SetAttr { mode: Some(*bits), ..SetAttr::default() })?;
        }
        Step::Chown(path, uid, gid) => {
            door.setattr(path, SetAttr { uid: Some(*uid), gid: Some(*gid), ..SetAttr::default() })?;
        }
        Step::Truncate(path, size) => {
            door.setattr(path, SetAttr { size: Some(*size), ..SetAttr::default() })?;
        }
        Step::Times(path, seconds) => {
            let time = SetTime::To(Time { sec: *seconds, nsec: 5 });
            door.setattr(path, SetAttr { mtime: Some(time), ..SetAttr::default() })?;
        }
        Step::Write(path, offset, byte) => {
            door.open(path, 2)?.write(&[*byte; 100], *offset, WriteOrigin::Caller)?;
        }
        Step::Setxattr(path, create) => {
            let flags = XattrFlags { create: *create, ..XattrFlags::default() };
            door.host.setxattr(&root, &door.find(path)?.node, b"user.key", b"value", flags)?;
        }
        Step::Removexattr(path) => door.host.removexattr(&root, &door.find(path)?.node, b"user.key")?,
        Step::Readlink(path) => return door.host.readlink(&root, &door.find(path)?.node),
    }
    Ok(Vec::new())
}

/// The tree's content, without attributes that differ between any two trees (inode numbers, current
/// times).
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let content = if meta.is_file() { native(&path) } else { Vec::new() };
            let target = if meta.is_symlink() { std::fs::read_link(&path).unwrap() } else { PathBuf::new() };
            let size = if meta.is_dir() { 0 } else { meta.len() };
            let old = meta.mtime() < 1_700_000_000;
            let xattr = native_fs::lgetxattr(&path, "user.key", &mut [0_u8; 16]).is_ok();
            let text = format!(
                "{:o} {} {} {} {size} {:?} {target:?} {:?} {xattr} {:?}",
                meta.mode(),
                meta.nlink(),
                meta.uid(),
                meta.gid(),
                old.then_some((meta.mtime(), meta.mtime_nsec())),
                meta.file_type().is_fifo(),
                content.iter().map(|&byte| u64::from(byte)).sum::<u64>(),
            );
            if meta.is_dir() {
                pending.push(path.clone());
            }
            found.insert(path.strip_prefix(root).unwrap().to_path_buf(), text);
        }
    }
    found
}

/// Whether a difference in errors is expected: the kernel in front of a layer turns these into the
/// native ones.
fn excused(step: &Step, native: Errno, ours: Errno) -> bool {
    match step {
        // Another type of file has the name: the kernel looks it up again and opens it by itself.
        Step::Create(..) => ours == Errno::ESTALE && matches!(native, Errno::ELOOP | Errno::ENXIO),
        // Opening a special file never reaches a layer.
        Step::Write(..) | Step::Truncate(..) => {
            matches!(native, Errno::ELOOP | Errno::ENXIO | Errno::ESPIPE | Errno::EINVAL | Errno::EISDIR)
                && matches!(ours, Errno::ELOOP | Errno::ENXIO | Errno::EINVAL | Errno::EISDIR)
        }
        _ => false,
    }
}

#[test]
fn random_operations_have_the_same_results_and_effects() {
    needs!(is_root());
    for seed in 1..=12 {
        let twin = TempDir::new().unwrap();
        let door = Door::with(|_| {}, 4);
        let mut random = Random(seed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..700 {
                    let step = step(&mut random);
                    let paths = match &step {
                        Step::Rename(one, two, _) | Step::Link(one, two) => vec![one, two],
                        Step::Create(path, ..)
                        | Step::Mkdir(path, _)
                        | Step::Symlink(path, _)
                        | Step::Fifo(path, _) => vec![path],
                        Step::Unlink(path) | Step::Rmdir(path) | Step::Chmod(path, _) | Step::Chown(path, ..) => {
                            vec![path]
                        }
                        Step::Truncate(path, _) | Step::Times(path, _) | Step::Write(path, ..) => vec![path],
                        Step::Setxattr(path, _) | Step::Removexattr(path) | Step::Readlink(path) => vec![path],
                    };
                    if paths.iter().any(|path| passes_link(twin.path(), path)) {
                        continue;
                    }
                    let expected = nacre_sys::credentials::with_identity(OWN, || natively(twin.path(), &step))
                        .unwrap()
                        .map_err(|error| Errno::from_raw(error.raw_os_error()));
                    let ours = through(&door, &step);
                    match (&expected, &ours) {
                        (Err(native), Err(ours)) if native == ours || excused(&step, *native, *ours) => {}
                        // The native call opens it as its type; a layer leaves that to the kernel.
                        (Ok(_), Err(Errno::ESTALE | Errno::ENXIO | Errno::EINVAL))
                            if matches!(step, Step::Create(..) | Step::Write(..) | Step::Truncate(..))
                                && is_special(twin.path(), paths[0]) => {}
                        _ => {
                            assert_eq!(expected, ours, "seed {seed}, step {number}: {step:?} {:#?}", tree(twin.path()))
                        }
                    }
                    if number % 50 == 0 {
                        assert_eq!(tree(twin.path()), tree(door.source.path()), "seed {seed}, step {number}: {step:?}");
                    }
                }
            });
        });
        assert_eq!(tree(twin.path()), tree(door.source.path()), "seed {seed}");
    }
}

fn is_special(root: &Path, path: &str) -> bool {
    root.join(path).symlink_metadata().is_ok_and(|meta| meta.file_type().is_fifo())
}
