//! System calls that the safe crates lack, each behind a safe function; one topic per file.
//!
//! This and `fusewire` are the only crates with `unsafe`. Invariants: every function checks the
//! conditions of its own safety, returns [`std::io::Error`] with the kernel's number, and keeps no
//! state except where its file's head says so.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod accounts;
pub mod btrfs_quota;
pub mod clocks;
pub mod cpus;
pub mod credentials;
pub mod descriptors;
pub mod directory;
pub mod discard;
pub mod fanotify;
pub mod handles;
pub mod inode;
pub mod ioctls;
pub mod kernel_version;
pub mod lease;
pub mod length;
pub mod local_time;
pub mod locks;
pub mod loop_devices;
pub mod mapping;
pub mod memory;
pub mod memory_limit;
pub mod mounts;
pub mod namespaces;
pub mod proc_looks;
pub mod processes;
pub mod project_quota;
pub mod remote;
pub mod secret_memory;
pub mod shared_words;
pub mod signals;
pub mod worker;
pub mod writeback;
pub mod xattrat;

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

/// Turns the result of a raw call into a value or the error number.
fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Takes ownership of a descriptor number that a system call has just returned.
///
/// # Safety
/// No other owner of `fd` exists.
unsafe fn owned(fd: usize) -> io::Result<OwnedFd> {
    let fd = libc::c_int::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: as the caller vouches.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A name as a C string on the stack.
struct CName([u8; 256]);

impl CName {
    /// `None` for more than 255 bytes or a NUL inside.
    fn new(name: &[u8]) -> Option<CName> {
        let mut bytes = [0; 256];
        if name.len() > 255 || name.contains(&0) {
            return None;
        }
        bytes.get_mut(..name.len())?.copy_from_slice(name);
        Some(CName(bytes))
    }

    fn as_ptr(&self) -> *const libc::c_char {
        self.0.as_ptr().cast()
    }
}
