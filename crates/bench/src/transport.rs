//! Transport of requests while the bench runs: the kernel's switch for FUSE over io_uring.
//!
//! Set by `measure.rs` before anything is mounted, and reset by `undo.rs`. It is off by default, so that is
//! measured unless requested otherwise. The switch applies to the whole machine: other users' new mounts follow it
//! too; existing mounts do not change.

use std::fs;
use std::path::Path;

use crate::failure::{Doing, Failure};
use crate::undo::{Effect, Undo};

/// The kernel's switch (Documentation/filesystems/fuse/fuse-io-uring.rst). Missing where the kernel
/// has no FUSE over io_uring.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Setting of the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Requests are read from /dev/fuse only.
    Device,
    /// Requests are exchanged by io_uring.
    Uring,
    /// Leaves the machine's setting.
    AsSet,
}

/// Whether new mounts use io_uring; `None` where the kernel has no switch.
pub fn uring_is_on() -> Option<bool> {
    match fs::read_to_string(SWITCH).unwrap_or_default().trim() {
        "Y" => Some(true),
        "N" => Some(false),
        _ => None,
    }
}

/// Sets the switch, and enters its previous state in `undo`.
pub fn choose(transport: Transport, undo: &Undo) -> Result<(), Failure> {
    let wanted = match transport {
        Transport::Device => false,
        Transport::Uring => true,
        Transport::AsSet => return Ok(()),
    };
    match uring_is_on() {
        Some(on) if on == wanted => Ok(()),
        None if !wanted => Ok(()),
        None => Err(Failure::new("--transport=uring: this kernel has no FUSE over io_uring (Linux 6.14)")),
        Some(on) => {
            undo.enter(Effect::Switch(on))?;
            switch(wanted)
        }
    }
}

/// Sets the switch.
pub fn switch(on: bool) -> Result<(), Failure> {
    let path = Path::new(SWITCH);
    fs::write(path, if on { "1" } else { "0" })
        .doing("switching FUSE over io_uring by writing (--transport=auto leaves it)", path)
}
