//! Reaching files of our own mount from a thread of the daemon: by node id.
//!
//! Called by the threads of this folder. Needs root. What is found by handle the kernel asks for
//! anew when its name is used next (`fuse_get_dentry()`, Linux 6.18), so files whose names are known
//! are found by these, as far as the kernel needs no request for it ([`Entered::reach`]).
//! Invariants: the mount is not held for longer than one act, so that it can be unmounted; nothing
//! of it that a user can watch is opened, but for `O_PATH`, of which nobody is told; on the way by
//! name no lock of a directory is taken.

use nacre_sys::handles::{self, Handle};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags},
    io::Errno as SysErrno,
};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

/// How the kernel encodes a FUSE inode in a handle: `FILEID_INO64_GEN`, two words of node id and
/// one of generation.
const HANDLE_KIND: i32 = 0x81;

/// The device number of what is mounted at a place, without a request: a daemon that is killed
/// while it waits for itself could not end.
pub(crate) fn device(mountpoint: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statx(CWD, mountpoint, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// The same of a descriptor of the mount.
pub(crate) fn device_of(mount: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::statx(mount, c"", AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// Where files were found below the root, by node id.
pub(crate) type Names = HashMap<u64, Vec<u8>>;

/// An inode of the mount, as the kernel's handles name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InodeKey {
    /// Its node id.
    pub nodeid: u64,
    /// What [`nacre_vfs::Numbered::generation`] says; 0 of layers without numbers.
    pub generation: u32,
}

impl InodeKey {
    /// Whether a descriptor (`O_PATH` will do) of the mount is one for this inode.
    pub fn is_of(self, file: BorrowedFd<'_>) -> bool {
        let handle = Handle { kind: HANDLE_KIND, bytes: &handle(self) };
        handles::leads_to(file, handle).or_else(|_| handles::names(file, handle)).unwrap_or(false)
    }
}

/// Where the mount is.
#[derive(Clone, Debug)]
pub(crate) struct MountPlace {
    /// The path.
    pub mountpoint: PathBuf,
    /// The device number, so that nothing else is taken for it.
    pub device: u64,
    /// The names of files that are to be reached, as far as they are known.
    pub names: Arc<Names>,
}

/// The mount as the working directory of the calling thread: what opens files by handle takes it
/// for the mount, and no watcher hears of it, as it would of an open. The thread must have a
/// working directory of its own ([`nacre_sys::descriptors::leave_all_to_others`]), and leaves the
/// mount with this.
pub(crate) struct Entered(());

impl Entered {
    /// Enters the mount with this device number.
    ///
    /// # Errors
    /// ESTALE where something else is seen at its place.
    pub fn new(mountpoint: &Path, expected: u64) -> Result<Entered, SysErrno> {
        let root = rustix::fs::open(mountpoint, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if device_of(root.as_fd()).map_err(number)? != expected {
            return Err(SysErrno::STALE);
        }
        rustix::process::fchdir(root)?;
        Ok(Entered(()))
    }

    /// A descriptor (`O_PATH`) for a regular file that the kernel has in memory: by its name, where
    /// that leads to it by what the kernel has in its cache, else by handle.
    ///
    /// # Errors
    /// As [`Entered::by_handle`].
    pub fn reach(&self, place: &MountPlace, inode: InodeKey) -> Result<OwnedFd, SysErrno> {
        let named = place.names.get(&inode.nodeid).and_then(|path| cached(CWD, path, OFlags::empty()).ok());
        match named.filter(|file| inode.is_of(file.as_fd())) {
            Some(file) => Ok(file),
            None => self.by_handle(inode, OFlags::PATH),
        }
    }

    /// Has the kernel ask for attributes and ACLs of the directories that these names lead through,
    /// where it has given them up, which it does when names in them change: [`Entered::reach`] would
    /// go no further there. Waits for the answers.
    #[expect(clippy::unused_self, reason = "who has it is in the mount")]
    pub fn freshen(&self, names: &Names) {
        let directories: BTreeSet<&[u8]> = names.values().map(|path| directory_of(path)).collect();
        for directory in directories {
            if let Err(error) = freshen(directory) {
                tracing::trace!(%error, "files of a directory are reached by handle");
            }
        }
    }

    /// A descriptor for an inode that the kernel has in memory. ESTALE where it has not, but for
    /// layers whose files have numbers: of such a file the kernel asks.
    ///
    /// # Errors
    /// As `open_by_handle_at(2)`.
    #[expect(clippy::unused_self, reason = "who has it is in the mount")]
    pub fn by_handle(&self, inode: InodeKey, flags: OFlags) -> Result<OwnedFd, SysErrno> {
        let handle = Handle { kind: HANDLE_KIND, bytes: &handle(inode) };
        handles::open(CWD, handle, flags.bits().cast_signed()).map_err(number)
    }
}

/// The bytes of a handle of [`HANDLE_KIND`].
fn handle(InodeKey { nodeid, generation }: InodeKey) -> [u8; 12] {
    let mut bytes = [0_u8; 12];
    let words = [(nodeid >> 32) as u32, nodeid as u32, generation];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// The path of the directory that a path leads through last.
fn directory_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').and_then(|end| path.get(..end)).unwrap_or_default()
}

/// A descriptor for what a path leads to within the mount, if the kernel finds it without asking
/// anybody and without a lock.
fn cached(from: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, SysErrno> {
    let within = ResolveFlags::CACHED | ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(from, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | flags, Mode::empty(), within)
}

/// Has the kernel look, in a directory and in those above it, whether we may pass.
fn freshen(directory: &[u8]) -> Result<(), SysErrno> {
    let ask = |directory: BorrowedFd<'_>| {
        rustix::fs::openat(directory, c".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    ask(CWD)?;
    let mut above = None;
    for name in directory.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        let from = above.as_ref().map_or(CWD, OwnedFd::as_fd);
        let next = cached(from, name, OFlags::DIRECTORY)?;
        ask(next.as_fd())?;
        above = Some(next);
    }
    Ok(())
}

impl Drop for Entered {
    fn drop(&mut self) {
        // Nothing keeps anybody from entering the root; a thread that stayed in the mount would
        // keep it from being unmounted.
        if let Err(error) = rustix::process::chdir(c"/") {
            tracing::warn!(%error, "a thread stays in the mount");
        }
    }
}

/// Opens the file of a descriptor (`O_PATH` will do) once more.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, SysErrno> {
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// The number of a system call's error.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
pub(crate) fn number(error: io::Error) -> SysErrno {
    SysErrno::from_io_error(&error).unwrap_or(SysErrno::IO)
}
