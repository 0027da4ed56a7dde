//! fanotify with whole-file-system marks: events with process, directory, name and file handles.
//!
//! Called by the host leaf's watcher. Parsing is a pure function of the bytes read.

use crate::{check, handles::Handle, owned};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

/// A set of event bits (`FAN_*`).
pub type Mask = u64;

/// A name was created.
pub const CREATE: Mask = libc::FAN_CREATE;
/// A name was removed.
pub const DELETE: Mask = libc::FAN_DELETE;
/// A name was moved away.
pub const MOVED_FROM: Mask = libc::FAN_MOVED_FROM;
/// A name was moved here.
pub const MOVED_TO: Mask = libc::FAN_MOVED_TO;
/// Attributes changed.
pub const ATTRIB: Mask = libc::FAN_ATTRIB;
/// Content changed.
pub const MODIFY: Mask = libc::FAN_MODIFY;
/// A file that was open for writing was closed (the only event for stores to a shared mapping).
pub const CLOSE_WRITE: Mask = libc::FAN_CLOSE_WRITE;
/// The object is a directory; in a mask, also requests events about directories.
pub const ON_DIRECTORY: Mask = libc::FAN_ONDIR;
/// Events were lost.
pub const OVERFLOW: Mask = libc::FAN_Q_OVERFLOW;

/// A file named in an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    /// The file system's id, as in `statfs(2)`.
    pub fsid: [i32; 2],
    /// The file's handle.
    pub handle: Handle<'a>,
}

/// One fanotify event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// Event bits.
    pub mask: Mask,
    /// The process that caused it; 0 if it is not visible from our pid namespace.
    pub pid: i32,
    /// The directory and the name in it.
    pub entry: Option<(Object<'a>, &'a [u8])>,
    /// The file itself.
    pub object: Option<Object<'a>>,
}

/// Creates a notification group that reports directory, name and object of each event. Events that
/// exceed its queue (`fs.fanotify.max_queued_events`) are lost, which is reported by [`OVERFLOW`].
///
/// # Errors
/// EPERM without `CAP_SYS_ADMIN`; EINVAL before Linux 5.17; EMFILE.
pub fn open() -> io::Result<OwnedFd> {
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_REPORT_DFID_NAME_TARGET;
    // SAFETY: takes numbers only.
    let fd = check(
        unsafe { libc::fanotify_init(flags, (libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC).cast_unsigned()) }
            .into(),
    )?;
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { owned(fd) }
}

/// Marks the whole file system that contains `file` (not an `O_PATH` descriptor) for the events in
/// `mask`.
///
/// # Errors
/// EXDEV, ENODEV, EOPNOTSUPP if the file system has no file handles or no id; EPERM.
pub fn mark_file_system(group: BorrowedFd<'_>, file: BorrowedFd<'_>, mask: Mask) -> io::Result<()> {
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: a null path means the file of the descriptor itself.
    check(unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, file.as_raw_fd(), std::ptr::null()) }.into())
        .map(drop)
}

/// Marks one file or directory for the events in `mask`: for a directory including events of its
/// entries, if `mask` contains these. `path` is followed (`/proc/self/fd/N`). The mark keeps the
/// inode in memory.
///
/// # Errors
/// ENOTDIR if `mask` contains entry events and the file is no directory; ENOSPC at the user's limit
/// of marks; EXDEV, ENODEV, EOPNOTSUPP, EPERM.
pub fn mark_inode(group: BorrowedFd<'_>, path: &str, mask: Mask) -> io::Result<()> {
    let path = std::ffi::CString::new(path)?;
    // SAFETY: the path lives during the call.
    check(
        unsafe { libc::fanotify_mark(group.as_raw_fd(), libc::FAN_MARK_ADD, mask, libc::AT_FDCWD, path.as_ptr()) }
            .into(),
    )
    .map(drop)
}

/// Removes all marks on file systems. Queued events can still be read.
///
/// # Errors
/// None that a group could cause.
pub fn unmark_file_systems(group: BorrowedFd<'_>) -> io::Result<()> {
    flush(group, libc::FAN_MARK_FILESYSTEM)
}

/// Removes all marks on single files and directories.
///
/// # Errors
/// None that a group could cause.
pub fn unmark_inodes(group: BorrowedFd<'_>) -> io::Result<()> {
    flush(group, libc::FAN_MARK_INODE)
}

fn flush(group: BorrowedFd<'_>, kind: libc::c_uint) -> io::Result<()> {
    // SAFETY: nothing is looked at but the flags.
    check(
        unsafe {
            libc::fanotify_mark(group.as_raw_fd(), libc::FAN_MARK_FLUSH | kind, 0, libc::AT_FDCWD, std::ptr::null())
        }
        .into(),
    )
    .map(drop)
}

/// Ignores events caused through one mount: `mask` is no longer reported for files that were opened
/// through the mount of `file` (not an `O_PATH` descriptor), while the same events through any
/// other mount still are. Ends with the mount. Only content events (`MODIFY`, `CLOSE_WRITE`) have
/// information about the mount.
///
/// # Errors
/// EINVAL before Linux 6.0; EPERM.
pub fn ignore_mount(group: BorrowedFd<'_>, file: BorrowedFd<'_>, mask: Mask) -> io::Result<()> {
    // Must survive a modification, else the first one would remove the mark.
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_MOUNT | libc::FAN_MARK_IGNORE_SURV;
    // SAFETY: a null path means the file of the descriptor itself.
    check(unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, file.as_raw_fd(), std::ptr::null()) }.into())
        .map(drop)
}

/// Undoes [`ignore_mount`]: events through files that are already open are reported again as well.
///
/// # Errors
/// ENOENT if the mount was not ignored.
pub fn hear_mount(group: BorrowedFd<'_>, file: BorrowedFd<'_>, mask: Mask) -> io::Result<()> {
    let flags = libc::FAN_MARK_REMOVE | libc::FAN_MARK_MOUNT | libc::FAN_MARK_IGNORE_SURV;
    // SAFETY: a null path means the file of the descriptor itself.
    check(unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, file.as_raw_fd(), std::ptr::null()) }.into())
        .map(drop)
}

/// The id in events of the file system of `file` (`f_fsid` of statfs(2), whose fields the C library
/// hides).
///
/// # Errors
/// As `fstatfs(2)`.
pub fn file_system_id(file: BorrowedFd<'_>) -> io::Result<[i32; 2]> {
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut figures: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives during the call.
    check(unsafe { libc::fstatfs64(file.as_raw_fd(), &raw mut figures) }.into())?;
    // SAFETY: fsid_t is a pair of ints (statfs(2)); reading needs no more alignment than it has.
    Ok(unsafe { (&raw const figures.f_fsid).cast::<[i32; 2]>().read_unaligned() })
}

/// Parses the first event in `bytes`; also returns the remaining bytes. `None` at the end or if
/// malformed.
pub fn first(bytes: &[u8]) -> Option<(Event<'_>, &[u8])> {
    // struct fanotify_event_metadata: event_len u32, vers u8, reserved u8, metadata_len u16, mask
    // u64, fd i32, pid i32.
    let length = usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok()?;
    if bytes.get(4) != Some(&libc::FANOTIFY_METADATA_VERSION) {
        return None;
    }
    let header = usize::from(u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?));
    let mask = u64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?);
    let pid = i32::from_ne_bytes(bytes.get(20..24)?.try_into().ok()?);
    let mut event = Event { mask, pid, entry: None, object: None };
    let mut infos = bytes.get(header..length)?;
    while let Some((kind, object, tail, rest)) = info(infos) {
        match kind {
            libc::FAN_EVENT_INFO_TYPE_DFID_NAME => {
                let end = tail.iter().position(|&byte| byte == 0).unwrap_or(tail.len());
                event.entry = Some((object, tail.get(..end)?));
            }
            libc::FAN_EVENT_INFO_TYPE_FID => event.object = Some(object),
            libc::FAN_EVENT_INFO_TYPE_DFID => event.entry = Some((object, b".")),
            _ => {}
        }
        infos = rest;
    }
    Some((event, bytes.get(length..)?))
}

/// Parses one information record: type, object, the bytes after the handle, and the bytes after the
/// record.
fn info(bytes: &[u8]) -> Option<(u8, Object<'_>, &[u8], &[u8])> {
    // struct fanotify_event_info_header: info_type u8, pad u8, len u16; then fsid [i32; 2],
    // handle_bytes u32, handle_type i32, bytes.
    let kind = *bytes.first()?;
    let length = usize::from(u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?));
    let body = bytes.get(4..length)?;
    let number = |at: usize| Some(i32::from_ne_bytes(body.get(at..at + 4)?.try_into().ok()?));
    let handle_end = 16 + usize::try_from(number(8)?).ok()?;
    let handle = Handle { kind: number(12)?, bytes: body.get(16..handle_end)? };
    Some((kind, Object { fsid: [number(0)?, number(4)?], handle }, body.get(handle_end..)?, bytes.get(length..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u8, fsid: [i32; 2], handle: &[u8], tail: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + 16 + handle.len() + tail.len()).unwrap();
        let mut bytes = vec![kind, 0];
        bytes.extend(length.to_ne_bytes());
        bytes.extend(fsid[0].to_ne_bytes());
        bytes.extend(fsid[1].to_ne_bytes());
        bytes.extend(u32::try_from(handle.len()).unwrap().to_ne_bytes());
        bytes.extend(7_i32.to_ne_bytes());
        bytes.extend(handle);
        bytes.extend(tail);
        bytes
    }

    #[test]
    fn an_event_is_parsed_and_cut_short_ones_are_not() {
        let mut infos = record(libc::FAN_EVENT_INFO_TYPE_DFID_NAME, [1, 2], b"12345678", b"name\0\0\0\0");
        infos.extend(record(libc::FAN_EVENT_INFO_TYPE_FID, [1, 2], b"abcd", b""));
        let mut bytes = u32::try_from(24 + infos.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend([libc::FANOTIFY_METADATA_VERSION, 0]);
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend(CREATE.to_ne_bytes());
        bytes.extend((-1_i32).to_ne_bytes());
        bytes.extend(99_i32.to_ne_bytes());
        bytes.extend(infos);
        let whole = bytes.clone();
        bytes.extend(b"next");
        let (event, rest) = first(&bytes).unwrap();
        assert_eq!((event.mask, event.pid, rest), (CREATE, 99, &b"next"[..]));
        let (directory, name) = event.entry.unwrap();
        assert_eq!(
            (directory.fsid, directory.handle.kind, directory.handle.bytes, name),
            ([1, 2], 7, &b"12345678"[..], &b"name"[..])
        );
        assert_eq!(event.object.unwrap().handle.bytes, b"abcd");
        for cut in 0..whole.len() {
            assert!(first(&whole[..cut]).is_none(), "{cut}");
        }
    }
}
