//! Detects which files of the mount are being executed, for the one open that the kernel checks too late.
//!
//! A file that is executed cannot be written to (ETXTBSY). For an open with `O_TRUNC` that is not for writing, the
//! kernel checks this after the open, but the open truncates the file: the program would lose its code. So
//! `ops/opens.rs` checks here first. The check sends no request to the mount, whatever it finds.

use nacre_sys::proc_looks::ProcLooks;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Maximum time for scanning the processes for one open.
const LIMIT: Duration = Duration::from_millis(500);

/// Knows the mount by its device number; 0 before it is mounted.
#[derive(Debug, Default)]
pub(crate) struct Running {
    device: AtomicU64,
    looks: ProcLooks,
}

impl Running {
    /// Sets the device number, once the file system is mounted.
    pub fn start(&self, device: u64) {
        self.device.store(device, Ordering::Release);
    }

    /// Whether a process executes the file with this inode number (proc(5), `/proc/PID/exe`); also true where a
    /// process could not be inspected in time.
    pub fn runs(&self, ino: u64) -> bool {
        let device = self.device.load(Ordering::Acquire);
        if device == 0 {
            return false;
        }
        match self.looks.within(LIMIT, move || is_run(device, ino)) {
            Ok(found) => found.unwrap_or(true),
            Err(error) => {
                tracing::debug!(%error, "no thread can look which files are being run");
                true
            }
        }
    }
}

fn is_run(device: u64, ino: u64) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    processes.filter_map(Result::ok).any(|process| {
        let name = process.file_name();
        let program = Path::new("/proc").join(&name).join("exe");
        // Processes end meanwhile, and an ordinary user cannot inspect those of others.
        name.as_encoded_bytes().first().is_some_and(u8::is_ascii_digit)
            && statx(CWD, &program, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)
                .is_ok_and(|stat| makedev(stat.stx_dev_major, stat.stx_dev_minor) == device && stat.stx_ino == ino)
    })
}
