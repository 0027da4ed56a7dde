//! The filter `readonly`: every change fails with EROFS, like on a read-only mount.
//!
//! Made by the stack builder; the template for small filters. It refuses everything that a native
//! read-only mount refuses: changes of names, content, attributes (times included), extended
//! attributes and file flags, and opening for writing. Reading leaves access times alone: files are
//! opened with `O_NOATIME` where the mounter is root, who may do so.

use nacre_vfs::{
    AllocateMode, Before, Caller, Description, Errno, Filter, Ioctl, Op, OpenFile, OpenFlags, Opened, Result,
    WriteOrigin,
};
use std::{any::Any, sync::Arc};

/// The filter.
#[derive(Clone, Copy, Debug)]
pub struct Readonly {
    /// Whether files are opened with `O_NOATIME`; only an owner or root may.
    pub keep_atime: bool,
}

/// `ioctl(2)` commands that only read: file flags, project attributes, version, extents, block
/// size, label, UUID (linux/fs.h, linux/fiemap.h).
const READING: [u32; 11] = [
    0x8008_6601,
    0x8004_6601,
    0x801c_581f,
    0x8008_7601,
    0x8004_7601,
    0xc020_660b,
    0x0000_0001,
    0x0000_0002,
    0x0000_541b,
    0x8100_9431,
    0x8011_1500,
];

/// Commands that change a file through any descriptor (`FS_IOC_SETFLAGS` and its kin, `FITRIM`,
/// `FICLONE`, `FICLONERANGE`, `FIDEDUPERANGE`).
const CHANGING: [u32; 10] = [
    0x4008_6602,
    0x4004_6602,
    0x401c_5820,
    0x4008_7602,
    0x4004_7602,
    0xc018_5879,
    0x4004_9409,
    0x4020_940d,
    0xc018_9436,
    0x4100_9432,
];

/// Decides about an `ioctl(2)`: unknown commands might change something, and fail as if the file
/// system did not have them.
fn allow_ioctl(command: u32) -> Result<()> {
    if READING.contains(&command) {
        Ok(())
    } else if CHANGING.contains(&command) {
        Err(Errno::EROFS)
    } else {
        Err(Errno::ENOTTY)
    }
}

impl Filter for Readonly {
    fn name(&self) -> &'static str {
        "readonly"
    }

    fn describe(&self) -> Description {
        Description::new("readonly")
    }

    fn allow(&self, _caller: &Caller, op: &Op<'_>) -> Result<()> {
        match op {
            Op::Setattr(_)
            | Op::Create(..)
            | Op::Link(_)
            | Op::Unlink(_)
            | Op::Rmdir(_)
            | Op::Rename(..)
            | Op::Setxattr(..)
            | Op::Removexattr(_) => Err(Errno::EROFS),
            Op::Open(flags) if flags.writes() || flags.truncates() => Err(Errno::EROFS),
            Op::Ioctl(command) => allow_ioctl(*command),
            Op::Lookup(_)
            | Op::Getattr
            | Op::Readlink
            | Op::Open(_)
            | Op::Readdir
            | Op::Getxattr(_)
            | Op::Listxattr
            | Op::Statfs
            | Op::Sync => Ok(()),
        }
    }

    fn open_down(&self, _caller: &Caller, flags: &mut OpenFlags, _before: Option<Before<'_>>) -> Result<()> {
        if self.keep_atime {
            flags.0 |= rustix::fs::OFlags::NOATIME.bits();
        }
        Ok(())
    }

    fn file_up(&self, file: Opened, _flags: OpenFlags) -> Opened {
        Arc::new(ReadOnlyFile { below: file })
    }
}

/// An open file without its remaining means of change (file flags by ioctl). Its bytes are the
/// lower file's.
struct ReadOnlyFile {
    below: Opened,
}

impl OpenFile for ReadOnlyFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn write(&self, _data: &[u8], _offset: u64, _origin: WriteOrigin) -> Result<usize> {
        Err(Errno::EROFS)
    }

    fn append(&self, _data: &[u8]) -> Result<usize> {
        Err(Errno::EROFS)
    }

    fn allocate(&self, _mode: AllocateMode, _offset: u64, _length: u64) -> Result<()> {
        Err(Errno::EROFS)
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        if target.as_any().is::<ReadOnlyFile>() {
            return Err(Errno::EROFS);
        }
        self.below.copy_to(offset, target, target_offset, length, flags)
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        allow_ioctl(request.command)?;
        self.below.ioctl(request, output)
    }

    nacre_vfs::forward_file! { inner read flush fsync seek test_lock set_lock flock backing left is_on_inner_mount writeback_lease }
}

#[cfg(test)]
mod tests;
