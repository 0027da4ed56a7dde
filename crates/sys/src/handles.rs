//! File handles: identifiers of files in notifications, opened as descriptors; also reopens a file
//! through another mount of its file system.

use crate::{check, owned};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

/// Maximum length of the kernel's handles, bytes (`MAX_HANDLE_SZ`).
pub const HANDLE_MAX: usize = 128;

/// `AT_HANDLE_FID` (linux/fcntl.h): a handle that is only good for comparisons.
const AT_HANDLE_FID: libc::c_int = 0x200;

/// struct file_handle: handle_bytes u32, handle_type i32, then the bytes.
type Raw = [u32; 2 + HANDLE_MAX / 4];

/// Pauses between retries while a new file is being created, microseconds: 2 s in total. Creating
/// one waits for the journal, which takes long on a busy disk.
const PAUSES: [u64; 12] =
    [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 1_024_000];

/// A file handle as the kernel encodes it: type and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle<'a> {
    /// Encoding, specific to the file system.
    pub kind: i32,
    /// The bytes, at most [`HANDLE_MAX`].
    pub bytes: &'a [u8],
}

/// Opens the file of a handle with `flags` (`O_PATH`, for example). `mount` is any open file (not
/// `O_PATH`) of the file system.
///
/// # Errors
/// ESTALE if the file is deleted; EPERM without `CAP_DAC_READ_SEARCH`; ENOMEM.
pub fn open(mount: BorrowedFd<'_>, handle: Handle<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    open_raw(mount, &raw(handle)?, flags)
}

/// Whether a descriptor (`O_PATH` suffices) and a handle refer to the same file.
///
/// # Errors
/// EOPNOTSUPP or EOVERFLOW if the file system has no handles that can be opened.
pub fn leads_to(file: BorrowedFd<'_>, handle: Handle<'_>) -> io::Result<bool> {
    is_same(&of_file(file)?, handle)
}

/// Whether a handle refers to the file of a descriptor (`O_PATH` suffices), also if the file system
/// has no handles that can be opened (`AT_HANDLE_FID`, Linux 6.5).
///
/// # Errors
/// EINVAL before Linux 6.5.
pub fn names(file: BorrowedFd<'_>, handle: Handle<'_>) -> io::Result<bool> {
    is_same(&handle_of(file, libc::AT_EMPTY_PATH | AT_HANDLE_FID)?, handle)
}

fn is_same(raw_handle: &Raw, handle: Handle<'_>) -> io::Result<bool> {
    let used = 2 + handle.bytes.len().div_ceil(4);
    Ok(raw_handle.get(..used) == raw(handle)?.get(..used))
}

/// A stored handle: valid as long as the file system guarantees, also after the file was closed and
/// the file system unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept(Raw);

impl Kept {
    /// Returns the handle of an open file (`O_PATH` suffices).
    ///
    /// # Errors
    /// EOPNOTSUPP or EOVERFLOW if the file system has no handles that can be opened.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Kept> {
        of_file(file).map(Kept)
    }

    /// Opens the file with `flags`. `mount` is any open file (not `O_PATH`) of the file system.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(&self, mount: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
        open_raw(mount, &self.0, flags)
    }
}

fn raw(handle: Handle<'_>) -> io::Result<Raw> {
    let mut raw: Raw = [0; 2 + HANDLE_MAX / 4];
    let length = handle.bytes.len();
    if length > HANDLE_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    raw[0] = u32::try_from(length).unwrap_or_default();
    raw[1] = handle.kind.cast_unsigned();
    for (word, chunk) in raw.iter_mut().skip(2).zip(handle.bytes.chunks(4)) {
        let mut bytes = [0_u8; 4];
        for (to, from) in bytes.iter_mut().zip(chunk) {
            *to = *from;
        }
        *word = u32::from_ne_bytes(bytes);
    }
    Ok(raw)
}

/// Opens a raw handle. ext4 returns ENOMEM instead of ESTALE for a deleted file while its inode
/// number is being reused for a new one: without a retry, a caller would take that for a lack of
/// memory and not know that the file is gone. So the call is retried for as long as creating a file
/// takes.
#[expect(clippy::disallowed_methods, reason = "nobody tells when a file has been made")]
fn open_raw(mount: BorrowedFd<'_>, raw: &Raw, flags: libc::c_int) -> io::Result<OwnedFd> {
    let attempt = || {
        // SAFETY: the structure is complete, aligned to 4 as file_handle is, and lives during the
        // call.
        check(unsafe {
            libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), raw.as_ptr(), flags | libc::O_CLOEXEC)
        })
    };
    let mut opened = attempt();
    for pause in PAUSES {
        if !opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOMEM)) {
            break;
        }
        std::thread::sleep(Duration::from_micros(pause));
        opened = attempt();
    }
    let fd = opened?;
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { owned(fd) }
}

/// Reopens the file behind a descriptor with `flags`, through the mount of `mount` (any open file
/// of it, not `O_PATH`). Both must be on one file system.
///
/// # Errors
/// As `open(2)`; EOPNOTSUPP or EOVERFLOW if the file system has no handles that can be opened;
/// ESTALE; EPERM without `CAP_DAC_READ_SEARCH`.
pub fn open_through(mount: BorrowedFd<'_>, file: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    open_raw(mount, &of_file(file)?, flags)
}

/// The handle of an open file.
fn of_file(file: BorrowedFd<'_>) -> io::Result<Raw> {
    handle_of(file, libc::AT_EMPTY_PATH)
}

fn handle_of(file: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<Raw> {
    let mut raw: Raw = [0; 2 + HANDLE_MAX / 4];
    raw[0] = u32::try_from(HANDLE_MAX).unwrap_or_default();
    let mut mount_id: libc::c_int = 0;
    // SAFETY: the structure has room for the bytes that its header states, is aligned to 4 as
    // file_handle is, and lives during the call; so does the number. The empty path is a C string
    // and means the file of the descriptor itself.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            raw.as_mut_ptr(),
            &raw mut mount_id,
            flags,
        )
    })?;
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::{
        fs::File,
        io::{ErrorKind, Read, Write},
        os::fd::AsFd,
        sync::{
            Mutex,
            atomic::{AtomicBool, AtomicU64, Ordering},
        },
        time::Instant,
    };

    #[test]
    fn a_file_without_a_name_is_opened_again() {
        let mount = File::open(std::env::temp_dir()).unwrap();
        let mut file = File::from(rustix::fs::openat(&mount, ".", OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).unwrap());
        file.write_all(b"content").unwrap();
        match open_through(mount.as_fd(), file.as_fd(), libc::O_RDONLY) {
            Ok(again) => {
                let mut content = Vec::new();
                File::from(again).read_to_end(&mut content).unwrap();
                assert_eq!(content, b"content");
            }
            // Not as an ordinary user, and not on every file system.
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported), "{error}")
            }
        }
    }
    /// Inode numbers of deleted files are reused all the time: ENOMEM is only returned if creating
    /// a file takes longer than all retries.
    #[test]
    fn a_file_that_is_gone_is_no_lack_of_memory() {
        let place = std::env::temp_dir();
        let mount = File::open(&place).unwrap();
        let make = |name: &str| {
            let path = place.join(format!("nacre-handles.{}.{name}", std::process::id()));
            let raw = of_file(File::create(&path).unwrap().as_fd());
            std::fs::remove_file(path).unwrap();
            raw
        };
        if let Err(error) = make("probe").and_then(|raw| open_raw(mount.as_fd(), &raw, libc::O_PATH)).map(drop)
            && error.raw_os_error() != Some(libc::ESTALE)
        {
            // Not as an ordinary user, and not on every file system.
            assert!(matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported), "{error}");
            return;
        }
        let done = AtomicBool::new(false);
        let (gone, longest) = (Mutex::new(make("first").unwrap()), AtomicU64::new(0));
        let patience = PAUSES.iter().sum::<u64>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    let raw = make("next").unwrap();
                    longest.fetch_max(start.elapsed().as_micros().try_into().unwrap(), Ordering::Relaxed);
                    *gone.lock().unwrap() = raw;
                }
            });
            let mut ask = || {
                let mut lacking = 0;
                for _ in 0..100_000 {
                    let raw = *gone.lock().unwrap();
                    match open_raw(mount.as_fd(), &raw, libc::O_PATH).map_err(|error| error.raw_os_error()) {
                        Ok(_) | Err(Some(libc::ESTALE)) => {}
                        Err(error) => {
                            assert_eq!(error, Some(libc::ENOMEM));
                            lacking += 1;
                        }
                    }
                }
                // A creation still in progress is measured as soon as it ends.
                let start = Instant::now();
                while lacking > 0 && longest.load(Ordering::Relaxed) < patience {
                    assert!(
                        start.elapsed() < Duration::from_secs(60),
                        "{lacking} times a lack of memory, with {longest:?} us to make a file"
                    );
                    std::thread::sleep(Duration::from_millis(10));
                }
            };
            let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut ask));
            done.store(true, Ordering::Relaxed);
            asked.unwrap();
        });
    }
}
