//! Mounting and unmounting.
//!
//! Called before a session starts and at its end. As root by `mount(2)`, otherwise by the set-user-id program `fusermount3`. Invariant: an
//! unmount takes away only the mount that this process made; if that is gone already, it succeeds and does nothing.

mod fusermount;
mod table;

use std::ffi::{CString, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

/// How to mount.
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

/// What is mounted, and how.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What is shown as the mount's source. Any bytes but NUL.
    pub fsname: OsString,
    /// What is shown as the file system's type, after `fuse.`; empty for plain `fuse`.
    pub subtype: String,
    /// `MS_*` flags of `mount(2)` (`libc::MS_RDONLY`, `MS_NOSUID`, `MS_NODEV`, `MS_NOATIME` and so on). For an unprivileged user
    /// `fusermount3` adds nosuid and nodev in any case; nodiratime, strictatime and the like are left out there, other flags without a word
    /// are refused.
    pub flags: u64,
    /// Other users may use the mount (unprivileged: only if `/etc/fuse.conf` says `user_allow_other`).
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and ACL.
    pub default_permissions: bool,
    /// Greatest READ, bytes; 0 leaves it to INIT.
    pub max_read: u32,
    /// Further words for the kernel's option string (`context=...`), as they are.
    pub extra: Vec<OsString>,
    /// How to mount.
    pub method: Method,
    /// The program to use instead of `fusermount3` from the search path.
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

/// An open fuse device with its mount, ready for [`crate::Session::start`]. Dropped without that, it unmounts.
#[derive(Debug)]
pub struct Device {
    fd: Option<OwnedFd>,
    mount: Option<Mounted>,
}

impl Device {
    /// A connection that somebody else mounted (and will unmount).
    pub fn from_fd(fd: OwnedFd) -> Device {
        Device { fd: Some(fd), mount: None }
    }

    /// Where it is mounted, absolute; `None` for [`Device::from_fd`].
    pub fn mountpoint(&self) -> Option<&Path> {
        self.mount.as_ref().map(|mount| mount.path.as_path())
    }

    /// Takes it apart; the caller unmounts from now on.
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
    /// Mount id of `/proc/self/mountinfo`; `None` if it could not be found there (other mount namespace).
    id: Option<u64>,
}

/// Mounts a new FUSE connection on a directory or regular file. The file system answers nothing before [`crate::Session::start`]: until
/// then every access to it waits.
pub fn mount(mountpoint: &Path, options: &MountOptions) -> io::Result<Device> {
    let path = std::fs::canonicalize(mountpoint).map_err(|error| about(mountpoint, "cannot use mountpoint", error))?;
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
    let id = table::top_mount(&path).ok().flatten();
    Device { fd: Some(fd), mount: Some(Mounted { path, options: options.clone(), by_fusermount, id }) }
}

/// Opens the device and calls `mount(2)`.
fn mount_direct(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let device = Path::new("/dev/fuse");
    let file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device)
        .map_err(|error| about(device, "cannot open (is the fuse module loaded?)", error))?;
    let metadata = std::fs::metadata(path).map_err(|error| about(path, "cannot use mountpoint", error))?;
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

/// The words that both ways of mounting pass on.
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

    pub(crate) fn options(&self) -> &MountOptions {
        &self.options
    }

    /// Takes the mount away; fine if it is gone. Not lazy: EBUSY while in use. Lazy: it vanishes from the tree at once and ends with its last user.
    pub(crate) fn unmount(&self, lazy: bool) -> io::Result<()> {
        if let Some(id) = self.id
            && let Ok(ids) = table::mounts_at(&self.path)
        {
            match ids.last() {
                _ if !ids.contains(&id) => return Ok(()),
                Some(top) if *top != id => {
                    let busy = io::Error::from_raw_os_error(libc::EBUSY);
                    return Err(about(&self.path, "cannot unmount: something else is mounted on top of it", busy));
                }
                _ => {}
            }
        }
        let result = patiently(|| {
            if self.by_fusermount {
                fusermount::unmount(&self.path, self.options.fusermount.as_deref(), lazy)
            } else {
                unmount_direct(&self.path, lazy)
            }
        });
        match result {
            // Somebody else was faster.
            Err(_) if self.id.is_some() && !self.present() => Ok(()),
            other => other,
        }
    }

    /// Cuts the connection off even while it is in use: every waiting caller gets an error. Privileged mounts only; EPERM otherwise. EBUSY,
    /// and nothing is done, where something else is mounted on top: that would be hit instead.
    pub(crate) fn abort(&self) -> io::Result<()> {
        if let (Some(id), Ok(ids)) = (self.id, table::mounts_at(&self.path))
            && ids.last() != Some(&id)
        {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        rustix::mount::unmount(&self.path, flags).map_err(io::Error::from)
    }

    /// Takes what is mounted topmost at another path for this mount: its owner has just put a mount of the same connection there.
    pub(crate) fn relocate(&mut self, path: PathBuf) -> io::Result<()> {
        self.path = path;
        self.id = table::mounts_at(&self.path)?.last().copied();
        Ok(())
    }

    /// Whether the mount is still there; true where the table cannot be read.
    pub(crate) fn present(&self) -> bool {
        match (self.id, table::mounts_at(&self.path)) {
            (Some(id), Ok(ids)) => ids.contains(&id),
            _ => true,
        }
    }
}

/// Unmounts whatever is mounted topmost at a path, for commands that have no session. Tries
/// `umount2(2)`, then `fusermount3`. Fails with EINVAL if nothing is mounted there.
pub fn unmount_path(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    patiently(|| match unmount_direct(mountpoint, lazy) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => fusermount::unmount(mountpoint, None, lazy),
        other => other,
    })
}

/// The pauses between attempts to unmount what is busy: 310 ms in all.
const PAUSES: [u64; 5] = [10, 20, 40, 80, 160];

/// Tries again for a moment while the mount is busy. A mount that nobody uses is busy for microseconds whenever somebody walks over it, reads the
/// table of mounts or copies the mount namespace, as each fusermount3 does that unmounts something else.
fn patiently(mut unmount: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for pause in PAUSES {
        match unmount() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(std::time::Duration::from_millis(pause)),
            other => return other,
        }
    }
    unmount()
}

fn unmount_direct(path: &Path, lazy: bool) -> io::Result<()> {
    let flags = UnmountFlags::NOFOLLOW | if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(path, flags).map_err(|error| about(path, "cannot unmount", error.into()))
}

fn c_string(bytes: Vec<u8>) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| invalid("a mount option holds a NUL byte"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.to_owned())
}

/// An error with what failed and on what; keeps the error number in the text and the kind, and as source.
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
