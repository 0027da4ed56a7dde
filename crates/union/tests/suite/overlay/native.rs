//! The operations of the model as plain system calls on a directory: what a real file system
//! answers, with nothing of ours in between. Links are not followed on the way, as layers do not.

use nacre_testkit::model::{Answer, Leaf, Operation, Tree};
use nacre_vfs::{Errno, Kind};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt},
        },
    },
    path::Path,
};

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

fn io(error: std::io::Error) -> Errno {
    Errno::from(error)
}

/// The file at the end of a way, not opened but named.
fn walk(base: &Path, way: &[&[u8]]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut at = rustix::fs::open(base, flags, Mode::empty()).map_err(errno)?;
    for name in way {
        at = rustix::fs::openat(&at, OsStr::from_bytes(name), flags, Mode::empty()).map_err(errno)?;
    }
    Ok(at)
}

fn kind(file: &OwnedFd) -> Result<FileType, Errno> {
    rustix::fs::fstat(file).map(|stat| FileType::from_raw_mode(stat.st_mode)).map_err(errno)
}

fn directory(base: &Path, way: &[&[u8]]) -> Result<OwnedFd, Errno> {
    let found = walk(base, way)?;
    if kind(&found)? == FileType::Directory { Ok(found) } else { Err(Errno::ENOTDIR) }
}

/// A regular file, opened.
fn regular(base: &Path, way: &[&[u8]], flags: OFlags) -> Result<std::fs::File, Errno> {
    match kind(&walk(base, way)?)? {
        FileType::RegularFile => {}
        FileType::Directory => return Err(Errno::EISDIR),
        _ => return Err(Errno::ELOOP),
    }
    let (last, parents) = way.split_last().unwrap();
    let parent = walk(base, parents)?;
    rustix::fs::openat(parent, OsStr::from_bytes(last), flags | OFlags::NOFOLLOW, Mode::empty())
        .map(Into::into)
        .map_err(errno)
}

/// Runs one operation below a directory. The process must have the umask 0.
pub fn apply(base: &Path, operation: &Operation) -> Answer {
    match operation {
        Operation::Read(at) => {
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut regular(base, &at.whole(), OFlags::RDONLY)?, &mut content).map_err(io)?;
            return Ok(content);
        }
        Operation::List(at) => return list(base, &at.whole()),
        Operation::Write(at, offset, data) => {
            regular(base, &at.whole(), OFlags::RDWR)?.write_all_at(data, *offset).map_err(io)?
        }
        Operation::Truncate(at, size) => regular(base, &at.whole(), OFlags::WRONLY)?.set_len(*size).map_err(io)?,
        Operation::Setxattr(at, key, value) => {
            let file = regular(base, &at.whole(), OFlags::RDONLY)?;
            rustix::fs::fsetxattr(file, OsStr::from_bytes(key), value, XattrFlags::empty()).map_err(errno)?;
        }
        Operation::Removexattr(at, key) => {
            rustix::fs::fremovexattr(regular(base, &at.whole(), OFlags::RDONLY)?, OsStr::from_bytes(key))
                .map_err(errno)?;
        }
        names => change_names(base, names)?,
    }
    Ok(Vec::new())
}

fn change_names(base: &Path, operation: &Operation) -> Result<(), Errno> {
    let os = OsStr::from_bytes;
    match operation {
        Operation::Create(at, mode) => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
            rustix::fs::openat(walk(base, &at.parents())?, os(at.last()), flags, Mode::from_raw_mode(*mode)).map(drop)
        }
        Operation::Mkdir(at, mode) => {
            rustix::fs::mkdirat(walk(base, &at.parents())?, os(at.last()), Mode::from_raw_mode(*mode))
        }
        Operation::Symlink(at, target) => rustix::fs::symlinkat(os(target), walk(base, &at.parents())?, os(at.last())),
        Operation::Link(from, to) => {
            let source = kind(&walk(base, &from.whole())?)?;
            let home = directory(base, &to.parents())?;
            if source == FileType::Directory && walk(base, &to.whole()).is_ok() {
                return Err(Errno::EEXIST);
            }
            rustix::fs::linkat(walk(base, &from.parents())?, os(from.last()), home, os(to.last()), AtFlags::empty())
        }
        Operation::Unlink(at) => rustix::fs::unlinkat(walk(base, &at.parents())?, os(at.last()), AtFlags::empty()),
        Operation::Rmdir(at) => rustix::fs::unlinkat(walk(base, &at.parents())?, os(at.last()), AtFlags::REMOVEDIR),
        Operation::Rename(from, to, flags) => {
            let (a, b) = (walk(base, &from.parents())?, walk(base, &to.parents())?);
            if kind(&a)? != FileType::Directory || kind(&b)? != FileType::Directory {
                return Err(Errno::ENOTDIR);
            }
            rustix::fs::renameat_with(a, os(from.last()), b, os(to.last()), RenameFlags::from_bits_retain(*flags))
        }
        Operation::Chmod(at, mode) => {
            if kind(&walk(base, &at.whole())?)? == FileType::Symlink {
                return Err(Errno::EOPNOTSUPP);
            }
            rustix::fs::chmodat(walk(base, &at.parents())?, os(at.last()), Mode::from_raw_mode(*mode), AtFlags::empty())
        }
        _ => return Err(Errno::ENOSYS),
    }
    .map_err(errno)
}

fn list(base: &Path, way: &[&[u8]]) -> Answer {
    directory(base, way)?;
    let (last, parents) = way.split_last().unwrap();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let opened =
        rustix::fs::openat(walk(base, parents)?, OsStr::from_bytes(last), flags, Mode::empty()).map_err(errno)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(opened.as_fd()).map_err(errno)? {
        let name = entry.map_err(errno)?.file_name().to_bytes().to_vec();
        if !matches!(name.as_slice(), b"." | b"..") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names.join(&b'/'))
}

/// The whole tree below a directory.
pub fn tree(base: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut first_names: BTreeMap<(u64, u64), Vec<u8>> = BTreeMap::new();
    let mut numbers = BTreeMap::new();
    let mut next = vec![(Vec::new(), base.to_owned())];
    while let Some((prefix, directory)) = next.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let path = [&prefix[..], b"/", entry.file_name().as_bytes()].concat();
            let metadata = std::fs::symlink_metadata(entry.path()).unwrap();
            if metadata.is_dir() {
                next.push((path.clone(), entry.path()));
            } else {
                let number = (metadata.dev(), metadata.ino());
                numbers.insert(path.clone(), number);
                let first = first_names.entry(number).or_insert_with(|| path.clone());
                *first = path.clone().min(first.clone());
            }
            tree.insert(path, leaf(&entry.path(), &metadata));
        }
    }
    for (path, leaf) in &mut tree {
        if let Some(number) = numbers.get(path) {
            leaf.first_name.clone_from(&first_names[number]);
        }
    }
    tree
}

fn leaf(path: &Path, metadata: &std::fs::Metadata) -> Leaf {
    let kind = Kind::from_mode(metadata.mode()).unwrap();
    let content = match kind {
        Kind::File => std::fs::read(path).unwrap(),
        Kind::Symlink => std::fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec(),
        _ => Vec::new(),
    };
    let mut xattrs = BTreeMap::new();
    if kind == Kind::File {
        let mut names = vec![0; 4096];
        let size = rustix::fs::listxattr(path, &mut names).unwrap();
        for key in names[..size].split(|byte| *byte == 0).filter(|key| key.starts_with(b"user.")) {
            let mut value = vec![0; 4096];
            let size = rustix::fs::getxattr(path, OsStr::from_bytes(key), &mut value).unwrap();
            value.truncate(size);
            xattrs.insert(key.to_vec(), value);
        }
    }
    let links = if kind == Kind::Directory { 0 } else { u32::try_from(metadata.nlink()).unwrap() };
    let mode = if kind == Kind::Symlink { 0o777 } else { metadata.mode() & 0o7777 };
    Leaf { kind, mode, content, xattrs, first_name: Vec::new(), links }
}
