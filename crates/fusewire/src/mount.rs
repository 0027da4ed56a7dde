//! Mounting and unmounting.
//!
//! Called before a session starts and at its end. As root by `mount(2)`, otherwise by the set-user-id program
//! `fusermount3`. Invariants: an unmount only removes the intended mount, whatever has happened to the path of its
//! mount point (others may move directories above it and replace them by links); if it is gone already, it succeeds
//! and does nothing. No path is used by a thread that holds the process's descriptors (`apart.rs`), except the one of
//! mount(2) itself: to mount below another mount of this process, make a detached mount ([`mount_detached`]) and
//! attach it there.

mod detached;
mod fusermount;
mod table;

pub use detached::mount_on_device;
pub use fusermount::FusermountRefusal;

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::apart::apart;
pub use table::Identity;
use table::{Seen, Table};

/// Parses a mount table, for the fuzzer.
pub(crate) fn see_all(table: &[u8]) {
    Table::see_all(table);
}

/// Method of mounting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// `mount(2)`, and `fusermount3` where that is not permitted.
    #[default]
    Auto,
    /// `mount(2)` only.
    Direct,
    /// `fusermount3` only.
    Fusermount,
}

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The mount's source, as shown in the mount table. Any bytes but NUL.
    pub fsname: OsString,
    /// The file system's type after `fuse.`, as shown in the mount table; empty for plain `fuse`.
    pub subtype: String,
    /// `MS_*` flags of `mount(2)` (`libc::MS_RDONLY`, `MS_NOSUID`, `MS_NODEV`, `MS_NOATIME` and so on). For an
    /// unprivileged user `fusermount3` adds nosuid and nodev in any case; nodiratime, strictatime and similar flags
    /// are omitted there, other flags without a name are refused.
    pub flags: u64,
    /// Other users may use the mount (unprivileged: only if `/etc/fuse.conf` has `user_allow_other`).
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and ACL.
    pub default_permissions: bool,
    /// Maximum READ, bytes; 0 leaves it to INIT.
    pub max_read: u32,
    /// Further words for the kernel's option string (`context=...`), unchanged.
    pub extra: Vec<OsString>,
    /// Method of mounting.
    pub method: Method,
    /// Program to use instead of `fusermount3` from the search path.
    pub fusermount: Option<PathBuf>,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            fsname: OsString::from("fuse"),
            subtype: String::new(),
            flags: libc::MS_NOSUID | libc::MS_NODEV,
            allow_other: false,
            default_permissions: false,
            max_read: 0,
            extra: Vec::new(),
            method: Method::Auto,
            fusermount: None,
        }
    }
}

/// An open fuse device with its mount, ready for [`crate::Session::start`]. Dropping it before that unmounts it.
#[derive(Debug)]
pub struct Device {
    fd: Option<OwnedFd>,
    mount: Option<Mounted>,
}

impl Device {
    /// A connection that another process mounted (and will unmount).
    pub fn from_fd(fd: OwnedFd) -> Device {
        Device { fd: Some(fd), mount: None }
    }

    /// The number of the connection's descriptor.
    pub fn descriptor(&self) -> Option<i32> {
        self.fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// A connection that another process mounted at `mountpoint`, and that this process will unmount.
    pub fn resumed(
        fd: OwnedFd,
        mountpoint: PathBuf,
        identity: Option<Identity>,
        by_fusermount: bool,
        options: &MountOptions,
    ) -> Device {
        let options = options.clone();
        Device {
            fd: Some(fd),
            mount: Some(Mounted { path: mountpoint, options, by_fusermount, identity, detached: None }),
        }
    }

    /// The mount point, absolute; `None` for [`Device::from_fd`]. For a detached mount, a path to it in /proc, valid
    /// for threads with the process's descriptors.
    pub fn mountpoint(&self) -> Option<&Path> {
        self.mount.as_ref().map(|mount| mount.path.as_path())
    }

    /// Whether it is a detached mount.
    pub fn is_detached(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.detached.is_some())
    }

    /// Splits it into its parts; the caller unmounts from now on.
    pub(crate) fn into_parts(mut self) -> io::Result<(OwnedFd, Option<Mounted>)> {
        let fd = self.fd.take().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        Ok((fd, self.mount.take()))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(mount) = self.mount.take()
            && let Err(error) = mount.unmount(true)
        {
            tracing::warn!(mountpoint = %mount.path.display(), %error, "cannot unmount");
        }
    }
}

/// A mount that this process made.
#[derive(Debug)]
pub(crate) struct Mounted {
    path: PathBuf,
    options: MountOptions,
    by_fusermount: bool,
    /// `None` if it could not be found in the mount table (other mount namespace).
    identity: Option<Identity>,
    /// The mount, as long as it is detached; dropping this ends it.
    detached: Option<OwnedFd>,
}

/// Mounts a new FUSE connection on a directory or regular file. The file system answers nothing before
/// [`crate::Session::start`]: until then every access to it waits.
pub fn mount(mountpoint: &Path, options: &MountOptions) -> io::Result<Device> {
    let path = apart(|| std::fs::canonicalize(mountpoint))
        .map_err(|error| about(mountpoint, "cannot use mountpoint", error))?;
    let direct = match options.method {
        Method::Direct => true,
        Method::Fusermount => false,
        Method::Auto => rustix::process::geteuid().is_root(),
    };
    if direct {
        match mount_direct(&path, options) {
            Ok(fd) => return Ok(mounted(fd, path, options, false)),
            Err(error) if options.method == Method::Auto && error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    let fd = fusermount::mount(&path, options)?;
    Ok(mounted(fd, path, options, true))
}

fn mounted(fd: OwnedFd, path: PathBuf, options: &MountOptions, by_fusermount: bool) -> Device {
    let identity = Table::read().ok().and_then(|table| Some(table.top(&path)?.identity));
    Device {
        fd: Some(fd),
        mount: Some(Mounted { path, options: options.clone(), by_fusermount, identity, detached: None }),
    }
}

/// Makes a detached mount of a new FUSE connection, whose root is a directory: it is invisible until its owner
/// attaches it ([`crate::Session::detached`]) to a mount point, and calls [`crate::Session::relocated`].
///
/// # Errors
/// Where [`mount`] may still work: without privilege, before Linux 5.2, and for names of more than
/// 255 bytes.
pub fn mount_detached(options: &MountOptions) -> io::Result<Device> {
    let (fd, mount) = detached::connection(options)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
    let mount = Mounted { path, options: options.clone(), by_fusermount: false, identity: None, detached: Some(mount) };
    Ok(Device { fd: Some(fd), mount: Some(mount) })
}

/// Opens the device and calls `mount(2)`.
fn mount_direct(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let device = Path::new("/dev/fuse");
    let file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .map_err(|error| about(device, "cannot open (is the fuse module loaded?)", error))?;
    let metadata = apart(|| std::fs::metadata(path)).map_err(|error| about(path, "cannot use mountpoint", error))?;
    let ids = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let data = kernel_options(options, file.as_raw_fd(), metadata.mode() & libc::S_IFMT, ids);
    let kind = if options.subtype.is_empty() { "fuse".to_owned() } else { format!("fuse.{}", options.subtype) };
    let flags = MountFlags::from_bits_retain(u32::try_from(options.flags).map_err(|_| invalid("mount flags"))?);
    rustix::mount::mount(
        c_string(options.fsname.as_bytes().to_vec())?.as_c_str(),
        path,
        c_string(kind.into_bytes())?.as_c_str(),
        flags,
        c_string(data)?.as_c_str(),
    )
    .map_err(|error| about(path, "cannot mount FUSE", error.into()))?;
    Ok(file.into())
}

/// The option string of `mount(2)`.
fn kernel_options(options: &MountOptions, fd: i32, kind: u32, (uid, gid): (u32, u32)) -> Vec<u8> {
    let mut data = format!("fd={fd},rootmode={kind:o},user_id={uid},group_id={gid}").into_bytes();
    for word in words(options) {
        data.push(b',');
        data.extend_from_slice(word.as_bytes());
    }
    data
}

/// Options that both methods of mounting use.
fn words(options: &MountOptions) -> Vec<OsString> {
    let mut words = Vec::new();
    if options.allow_other {
        words.push(OsString::from("allow_other"));
    }
    if options.default_permissions {
        words.push(OsString::from("default_permissions"));
    }
    if options.max_read > 0 {
        words.push(OsString::from(format!("max_read={}", options.max_read)));
    }
    words.extend(options.extra.iter().cloned());
    words
}

impl Mounted {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts, wherever its mount point is now; succeeds if it is gone. Not lazy: EBUSY while in use. Lazy: it is
    /// detached from the mount tree at once and ends with its last user.
    pub(crate) fn unmount(&self, lazy: bool) -> io::Result<()> {
        if self.detached.is_some() {
            // It ends when this value is dropped.
            return Ok(());
        }
        let how = if self.by_fusermount { How::Fusermount(self.options.fusermount.as_deref()) } else { How::Direct };
        match self.identity {
            Some(identity) => patiently(|| end(identity, how, detaching(lazy))),
            None => topmost(&self.path).and_then(|identity| patiently(|| end(identity, how, detaching(lazy)))),
        }
    }

    /// Whether the mount is in use, or something is mounted on it, so that it could not be unmounted. Only the
    /// kernel's privileged interface can check that: false for other mounts. Has no effect.
    pub(crate) fn in_use(&self) -> io::Result<bool> {
        let (Some(identity), false) = (self.identity, self.by_fusermount) else { return Ok(false) };
        // The first call marks the mount as expired (umount(2)), unless it is in use; the next access clears the
        // mark.
        match patiently(|| end(identity, How::Direct, UnmountFlags::EXPIRE)) {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Aborts the connection even while it is in use: every waiting caller gets an error. Privileged mounts only;
    /// EPERM otherwise. EBUSY, and nothing is done, where something else is mounted on top: that would be hit
    /// instead.
    pub(crate) fn abort(&self) -> io::Result<()> {
        if self.detached.is_some() {
            return Ok(());
        }
        let identity = self.identity.map_or_else(|| topmost(&self.path), Ok)?;
        end(identity, How::Direct, UnmountFlags::FORCE | UnmountFlags::DETACH)
    }

    /// Unmounts, and mounts a new connection at the same mount point, or detached.
    pub(crate) fn again(&self) -> io::Result<Device> {
        self.unmount(true)?;
        if self.detached.is_some() { mount_detached(&self.options) } else { mount(&self.path, &self.options) }
    }

    /// The mount, if it is detached.
    pub(crate) fn detached(&self) -> Option<BorrowedFd<'_>> {
        self.detached.as_ref().map(AsFd::as_fd)
    }

    /// Sets the mount point and identity, after the owner has attached this mount of the same connection there.
    pub(crate) fn relocate(&mut self, path: PathBuf, identity: Identity) {
        self.path = path;
        self.identity = Some(identity);
        self.detached = None;
    }

    /// Whether the mount still exists; true where the table cannot be read.
    pub(crate) fn present(&self) -> bool {
        match (self.identity, Table::read()) {
            (Some(identity), Ok(table)) => table.find(identity).is_some(),
            _ => true,
        }
    }

    /// Whether fusermount3 has to unmount it.
    pub(crate) fn is_by_fusermount(&self) -> bool {
        self.by_fusermount
    }

    /// Its identity in the mount table, where it is known.
    pub(crate) fn identity(&self) -> Option<Identity> {
        self.identity
    }
}

/// Returns the mounts among these to which no path leads: something was mounted over a directory above them, or they
/// are gone from this mount namespace, and only exist in others or by open files.
pub fn hidden(mounts: &[Identity]) -> io::Result<Vec<Identity>> {
    let table = Table::read()?;
    let is_hidden = |mount: &Identity| table.find(*mount).is_none_or(|row| matches!(table.seen(row), Seen::Hidden(_)));
    Ok(mounts.iter().copied().filter(is_hidden).collect())
}

/// Whether anything is mounted on a file of the file system with this device number, in the mount namespace of any
/// visible process.
#[must_use]
pub fn carries_mounts(device: (u32, u32)) -> bool {
    in_any_namespace(|table| table.carries(device))
}

/// Whether the file system with this device number is mounted in the mount namespace of any visible process.
#[must_use]
pub fn mounted_anywhere(device: (u32, u32)) -> bool {
    in_any_namespace(|table| table.has(device))
}

/// Returns processes, one for each other mount namespace in which a mount's file system stays mounted when it is
/// unmounted here, as far as they are visible.
#[must_use]
pub fn kept_by(mount: Identity) -> Vec<u32> {
    let group = Table::read().ok().and_then(|table| table.group_above(mount));
    let own = std::fs::read_link("/proc/self/ns/mnt").ok();
    let mut seen: HashSet<PathBuf> = own.into_iter().collect();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = entry.file_name();
        let Some(pid) = process.to_str().and_then(|name| name.parse().ok()) else { continue };
        // Nothing can be read of a process that has ended, or belongs to another user.
        let Ok(namespace) = std::fs::read_link(entry.path().join("ns/mnt")) else { continue };
        if seen.insert(namespace) && Table::of(&process).is_ok_and(|table| table.keeps(mount.device, group)) {
            found.push(pid);
        }
    }
    found
}

fn in_any_namespace(is_so: impl Fn(&Table) -> bool) -> bool {
    let mut seen = HashSet::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.file_name());
    let processes = processes.filter(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit));
    std::iter::once(OsString::from("self")).chain(processes).any(|process| {
        // Nothing can be read of a process that has ended, or belongs to another user.
        let namespace = std::fs::read_link(Path::new("/proc").join(&process).join("ns/mnt"));
        namespace.is_ok_and(|namespace| seen.insert(namespace)) && Table::of(&process).is_ok_and(|table| is_so(&table))
    })
}

/// Unmounts the topmost mount at a path without links, for commands that have no session. Tries `umount2(2)`, then
/// `fusermount3`. Fails with EINVAL if nothing is mounted there.
pub fn unmount_path(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    unmount(topmost(mountpoint)?, lazy)
}

/// Unmounts this mount, wherever it is now; succeeds if it is gone. Tries `umount2(2)`, then `fusermount3`.
pub fn unmount(mount: Identity, lazy: bool) -> io::Result<()> {
    patiently(|| match end(mount, How::Direct, detaching(lazy)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            end(mount, How::Fusermount(None), detaching(lazy))
        }
        other => other,
    })
}

fn topmost(path: &Path) -> io::Result<Identity> {
    let found = Table::read()?.top(path).map(|row| row.identity);
    found.ok_or_else(|| about(path, "cannot unmount", io::Error::from_raw_os_error(libc::EINVAL)))
}

fn detaching(lazy: bool) -> UnmountFlags {
    if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() }
}

/// Method of unmounting.
#[derive(Clone, Copy, Debug)]
enum How<'a> {
    /// `umount2(2)`.
    Direct,
    /// This program, or `fusermount3` from the search path. It follows no link, either, and unmounts only FUSE mounts
    /// of its caller.
    Fusermount(Option<&'a Path>),
}

/// Number of attempts for a mount whose path leads elsewhere as soon as it has been read: directories above it are
/// moved all the time.
const LOOKED_FOR: u32 = 2000;
/// Number of times that a mount must be found hidden below another before it counts, for the same reason: reading the
/// table is not atomic.
const BELIEVED: u32 = 10;

/// Unmounts a mount by its identity: its path is read again each time, and only a mount found there with this
/// identity is unmounted.
fn end(mount: Identity, how: How<'_>, flags: UnmountFlags) -> io::Result<()> {
    let (mut hidden, mut last) = (0, None);
    for _ in 0..LOOKED_FOR {
        let table = Table::read()?;
        let Some(row) = table.find(mount) else { return Ok(()) };
        let busy = |why: String| about(&row.path, &why, io::Error::from_raw_os_error(libc::EBUSY));
        match table.seen(row) {
            Seen::Yes => {}
            Seen::Covered => return Err(busy("cannot unmount: something else is mounted on top of it:".to_owned())),
            Seen::Hidden(_) if hidden < BELIEVED => {
                hidden += 1;
                continue;
            }
            Seen::Hidden(by) => {
                return Err(busy(format!("cannot unmount: it is hidden below what is mounted at {}:", by.display())));
            }
        }
        let ended = match how {
            How::Direct => end_at(&row.path, mount.id, flags),
            How::Fusermount(program) => {
                match fusermount::unmount(&row.path, program, flags.contains(UnmountFlags::DETACH)) {
                    // Another process was faster, or it was moved meanwhile.
                    Err(_) if Table::read()?.find(mount).is_none_or(|now| now.path != row.path) => Ok(false),
                    other => other.map(|()| true),
                }
            }
        };
        match ended {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // Not there any more, or a link by now.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => {
                last = Some(error)
            }
            // Another process was faster.
            Err(_) if Table::read()?.find(mount).is_none() => return Ok(()),
            Err(error) => return Err(about(&row.path, "cannot unmount", error)),
        }
    }
    let why = last.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EBUSY));
    Err(about(Path::new("a mount"), "cannot reach, because directories above it are moved all the time,", why))
}

/// Unmounts this mount if the path leads to it without following links; false, and nothing is done, if something else
/// is there. The path may lead through mounts of this process, to which the kernel writes its last dirty pages: so it
/// is done in a thread without descriptors.
fn end_at(path: &Path, id: u64, flags: UnmountFlags) -> io::Result<bool> {
    apart(|| {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        };
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut here = rustix::fs::open("/", directory, Mode::empty())?;
        for part in above.components().skip(1) {
            here = rustix::fs::openat(&here, part.as_os_str(), directory, Mode::empty())?;
        }
        // From here on the name means the mount as long as that exists: the kernel does not allow the directory of a
        // mount to be moved or replaced.
        let is_there = || {
            let stat = rustix::fs::statx(
                &here,
                name,
                AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC,
                StatxFlags::empty(),
            )?;
            Ok::<bool, io::Error>(stat.stx_mnt_id == id)
        };
        if !is_there()? {
            return Ok(false);
        }
        rustix::process::fchdir(&here)?;
        let ended = rustix::mount::unmount(name, flags | UnmountFlags::NOFOLLOW);
        if flags.contains(UnmountFlags::EXPIRE) && ended == Err(Errno::AGAIN) {
            // This access clears the mark.
            return is_there();
        }
        Ok(ended.map(|()| true)?)
    })
}

/// Pauses between attempts at a busy mount, milliseconds: 310 ms in total.
const PAUSES: [u64; 5] = [10, 20, 40, 80, 160];

/// Unmounts, or makes read-only, with retries for a moment while the mount is busy. An unused mount is busy for
/// microseconds whenever a process walks over it, reads the mount table or copies the mount namespace, as each
/// fusermount3 does that unmounts something else; and a mount without files open for writing is being written to
/// while a process sets a file's times.
///
/// # Errors
/// The error of the last attempt.
#[expect(clippy::disallowed_methods, reason = "the kernel tells nobody when a mount is not busy any more")]
pub fn patiently(mut change: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for pause in PAUSES {
        match change() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(std::time::Duration::from_millis(pause))
            }
            other => return other,
        }
    }
    change()
}

fn c_string(bytes: Vec<u8>) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| invalid("a mount option holds a NUL byte"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.to_owned())
}

/// Adds the failed operation and its path to an error; keeps the error number in the text, the kind, and as source.
fn about(path: &Path, what: &str, error: io::Error) -> io::Error {
    crate::sys::with_context(format!("{what} {}", path.display()), error)
}

/// Joins bytes as a path-like string.
fn os_string(bytes: Vec<u8>) -> OsString {
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_gets_numbers_and_words() {
        let options = MountOptions {
            allow_other: true,
            default_permissions: true,
            max_read: 4096,
            extra: vec![OsString::from("context=\"a,b\"")],
            ..MountOptions::default()
        };
        assert_eq!(
            String::from_utf8(kernel_options(&options, 5, libc::S_IFDIR, (1, 2))).unwrap(),
            "fd=5,rootmode=40000,user_id=1,group_id=2,allow_other,default_permissions,max_read=4096,context=\"a,b\""
        );
    }

    #[test]
    fn a_mountpoint_that_is_not_there_is_named() {
        let error = mount(Path::new("/nonexistent/x"), &MountOptions::default()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x"), "{error}");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
