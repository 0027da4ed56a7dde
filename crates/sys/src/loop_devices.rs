//! Loop devices: an image file as a block device (loop(4), include/uapi/linux/loop.h).
//!
//! Called by the loop engine of cages. Devices are attached with autoclear: they detach themselves
//! when they are no longer open or mounted, so a process that dies leaves none behind.

use crate::check;
use rustix::fs::{Mode, OFlags, fstat, open};
use std::{
    fs, io, mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

const SET_CAPACITY: u32 = 0x4C07;
const GET_STATUS: u32 = 0x4C05;
const CONFIGURE: u32 = 0x4C0A;
const GET_FREE: u32 = 0x4C82;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;

/// Maximum number of attempts, as another process may take a free device first.
const ATTEMPTS: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const _: () = assert!(mem::size_of::<Info>() == 232 && mem::size_of::<Config>() == 304);

const EMPTY: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// An attached loop device, open in this process.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    /// Whether it reads and writes the image without the page cache of the host.
    pub direct_io: bool,
    file: OwnedFd,
}

impl LoopDevice {
    /// Updates the device to the image's current length.
    ///
    /// # Errors
    /// ENXIO for a device that is not attached.
    pub fn follow_length(&self) -> io::Result<()> {
        // SAFETY: the command takes no argument.
        unsafe { ioctl(self.file.as_fd(), SET_CAPACITY, 0) }.map(drop)
    }
}

/// # Safety
/// `argument` is what `command` takes: a number, or a pointer to what it reads and writes.
unsafe fn ioctl(file: BorrowedFd<'_>, command: u32, argument: usize) -> io::Result<usize> {
    // SAFETY: as the caller vouches. The type of the number differs between C libraries, its bits
    // do not.
    check(unsafe { libc::ioctl(file.as_raw_fd(), command as _, argument) }.into())
}

fn status(device: BorrowedFd<'_>) -> io::Result<Info> {
    let mut info = EMPTY;
    // SAFETY: the command writes a struct loop_info64.
    unsafe { ioctl(device, GET_STATUS, (&raw mut info) as usize) }?;
    Ok(info)
}

fn open_device(path: &Path, access: OFlags) -> io::Result<OwnedFd> {
    Ok(open(path, access | OFlags::CLOEXEC, Mode::empty())?)
}

/// Attaches an image, which is open for reading and writing, to a free device; `image` is the name
/// to show for it. Direct I/O is on if the image was opened with `O_DIRECT`. The device detaches
/// itself when its last user closes it.
///
/// # Errors
/// EACCES, EPERM without privilege; ENOENT if there is no `/dev/loop-control` or no device file;
/// EINVAL if the image's file system does not support direct I/O.
pub fn attach(file: BorrowedFd<'_>, image: &Path) -> io::Result<LoopDevice> {
    let control = open("/dev/loop-control", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let direct = rustix::fs::fcntl_getfl(file)?.contains(OFlags::DIRECT);
    let mut info = Info { flags: FLAG_AUTOCLEAR | if direct { FLAG_DIRECT_IO } else { 0 }, ..EMPTY };
    // The kernel shows the whole path in sysfs; this field has room for its beginning.
    let name = image.as_os_str().as_bytes();
    for (to, from) in info.file_name.iter_mut().take(63).zip(name) {
        *to = *from;
    }
    let fd = file.as_raw_fd().unsigned_abs();
    let config = Config { fd, block_size: 0, info, reserved: [0; 8] };
    for _ in 0..ATTEMPTS {
        // SAFETY: the command takes no argument.
        let number = unsafe { ioctl(control.as_fd(), GET_FREE, 0) }?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = open_device(&path, OFlags::RDWR)?;
        // SAFETY: the command reads a struct loop_config, which lives during the call.
        match unsafe { ioctl(device.as_fd(), CONFIGURE, (&raw const config) as usize) } {
            Ok(_) => {
                let direct_io = status(device.as_fd())?.flags & FLAG_DIRECT_IO != 0;
                return Ok(LoopDevice { path, direct_io, file: device });
            }
            // Another process took the device first.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

/// Returns the device that an image is attached to, if any, found by the image's identity and not
/// by its name.
///
/// # Errors
/// The image cannot be examined, or sysfs is not mounted.
pub fn attached(image: impl AsFd) -> io::Result<Option<LoopDevice>> {
    let stat = fstat(image)?;
    let (device, inode) = (stat.st_dev, stat.st_ino);
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        let name = entry.file_name();
        // The directory exists while the device is attached.
        if !name.as_bytes().starts_with(b"loop") || !entry.path().join("loop").exists() {
            continue;
        }
        let path = Path::new("/dev").join(&name);
        // Detached meanwhile, or not accessible: then it does not matter. Opened for reading only:
        // closing after a write makes udev probe the device.
        let Ok(file) = open_device(&path, OFlags::RDONLY) else { continue };
        let Ok(info) = status(file.as_fd()) else { continue };
        // The kernel encodes device numbers for this call (huge_encode_dev) like user space does.
        if info.inode == inode && info.device == device {
            return Ok(Some(LoopDevice { path, direct_io: info.flags & FLAG_DIRECT_IO != 0, file }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn an_image_is_a_device_until_its_last_user_is_gone() {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            return;
        }
        let path = std::env::temp_dir().join(format!("nacre-sys-loop-{}", std::process::id()));
        let create = |flags| {
            fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(&path)
        };
        let image = create(libc::O_DIRECT).or_else(|_| create(0)).unwrap();
        image.set_len(1 << 20).unwrap();
        assert!(attached(&image).unwrap().is_none());
        let device = attach(image.as_fd(), &path).unwrap();
        assert_eq!(crate::ioctls::block_device_size(device.file.as_fd()).unwrap(), 1 << 20);
        assert_eq!(attached(&image).unwrap().unwrap().path, device.path);
        image.set_len(2 << 20).unwrap();
        device.follow_length().unwrap();
        assert_eq!(crate::ioctls::block_device_size(device.file.as_fd()).unwrap(), 2 << 20);
        drop(device);
        // Detaching may lag behind the last close.
        for _ in 0..1000 {
            if attached(&image).unwrap().is_none() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert!(attached(&image).unwrap().is_none());
        fs::remove_file(&path).unwrap();
    }
}
