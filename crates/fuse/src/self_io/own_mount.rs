//! Opens files of our own mount by node id, in a thread of the daemon.
//!
//! Called by the threads of this folder. Needs root. After a file was opened by handle, the kernel revalidates its
//! name at the next use (`fuse_get_dentry()`, Linux 6.18), so files whose names are known are opened by name, as far
//! as the kernel needs no request for it ([`Entered::reach`]). Invariants: the mount is not held for longer than one
//! operation, so that it can be unmounted; nothing of it that a user can watch is opened, except with `O_PATH`, which
//! causes no event; the lookup by name takes no lock of a directory.

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

/// The kernel's encoding of a FUSE inode in a handle: `FILEID_INO64_GEN`, two words of node id and one of generation.
const HANDLE_KIND: i32 = 0x81;

/// Returns the device number of the mount at a path, without a request: a daemon that is killed while it waits for
/// itself could not end.
pub(crate) fn device(mountpoint: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statx(CWD, mountpoint, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// Returns the device number of the mount of a descriptor, without a request.
pub(crate) fn device_of(mount: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::statx(mount, c"", AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// Paths of files below the root, by node id.
pub(crate) type Names = HashMap<u64, Vec<u8>>;

/// The kernel's file handle of an inode of the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InodeKey {
    /// Its node id.
    pub nodeid: u64,
    /// Its generation ([`nacre_vfs::Numbered::generation`]); 0 for layers without inode numbers.
    pub generation: u32,
}

impl InodeKey {
    /// Whether a descriptor of the mount (`O_PATH` suffices) is open on this inode.
    pub fn is_of(self, file: BorrowedFd<'_>) -> bool {
        let handle = Handle { kind: HANDLE_KIND, bytes: &handle(self) };
        handles::leads_to(file, handle).or_else(|_| handles::names(file, handle)).unwrap_or(false)
    }
}

/// Location of the mount.
#[derive(Clone, Debug)]
pub(crate) struct MountPlace {
    /// The mount point.
    pub mountpoint: PathBuf,
    /// The device number, to recognize the mount.
    pub device: u64,
    /// Paths of the files that are to be opened, as far as they are known.
    pub names: Arc<Names>,
}

/// The mount as the working directory of the calling thread: open_by_handle_at(2) takes that as the mount, and it
/// causes no inotify event, as an open would. The thread must have a working directory of its own
/// ([`nacre_sys::descriptors::leave_all_to_others`]). Dropping this leaves the mount.
pub(crate) struct Entered(());

impl Entered {
    /// Enters the mount with this device number.
    ///
    /// # Errors
    /// ESTALE where something else is mounted at the mount point.
    pub fn new(mountpoint: &Path, expected: u64) -> Result<Entered, SysErrno> {
        let root = rustix::fs::open(mountpoint, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if device_of(root.as_fd()).map_err(number)? != expected {
            return Err(SysErrno::STALE);
        }
        rustix::process::fchdir(root)?;
        Ok(Entered(()))
    }

    /// Opens a regular file that the kernel has in memory (`O_PATH`): by name, where the kernel's dentry cache
    /// resolves that to the file, else by handle.
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

    /// Makes the kernel request attributes and ACLs of the directories in these paths where it has expired them,
    /// which it does when names in them change: [`Entered::reach`] would stop there. Waits for the replies.
    #[expect(clippy::unused_self, reason = "who has it is in the mount")]
    pub fn freshen(&self, names: &Names) {
        let directories: BTreeSet<&[u8]> = names.values().map(|path| directory_of(path)).collect();
        for directory in directories {
            if let Err(error) = freshen(directory) {
                tracing::trace!(%error, "files of a directory are reached by handle");
            }
        }
    }

    /// Opens an inode that the kernel has in memory. ESTALE where it has not, except for layers with inode numbers:
    /// for their files the kernel sends a LOOKUP.
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

/// Path of the parent directory.
fn directory_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').and_then(|end| path.get(..end)).unwrap_or_default()
}

/// Opens a path within the mount, if the kernel can resolve it without a request and without a lock.
fn cached(from: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, SysErrno> {
    let within = ResolveFlags::CACHED | ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(from, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | flags, Mode::empty(), within)
}

/// Makes the kernel check search permission in a directory and in those above it.
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
        // Entering the root always works; a thread that stayed in the mount would keep it from being unmounted.
        if let Err(error) = rustix::process::chdir(c"/") {
            tracing::warn!(%error, "a thread stays in the mount");
        }
    }
}

/// Opens the file of a descriptor (`O_PATH` suffices) once more.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, SysErrno> {
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// The error number of a system call.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
pub(crate) fn number(error: io::Error) -> SysErrno {
    SysErrno::from_io_error(&error).unwrap_or(SysErrno::IO)
}
