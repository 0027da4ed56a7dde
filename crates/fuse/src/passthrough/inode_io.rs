//! The kernel's I/O mode of an inode, kept in the inode's record.
//!
//! Part of `OpenState` (`open_files.rs`). Only `passthrough.rs` changes it, by the kernel's rules.

use nacre_vfs::{OpenFlags, Opened};

/// The kernel's I/O mode of an inode.
#[derive(Default)]
pub(crate) struct InodeIo(pub(super) Mode);

#[derive(Default)]
pub(super) enum Mode {
    #[default]
    Idle,
    /// Open through the page cache of the mount, or with direct I/O to the daemon.
    Cached { opens: u32 },
    /// Open in passthrough with this backing id.
    Passthrough { id: i32, opens: u32 },
    /// Not open; the id and the file are kept for the next open. `stamp` distinguishes entries of the queue.
    Kept { id: i32, file: Opened, flags: OpenFlags, uid: u32, stamp: u64 },
}

impl InodeIo {
    /// Whether nothing is open and nothing is kept.
    pub fn is_idle(&self) -> bool {
        matches!(self.0, Mode::Idle)
    }

    /// The backing id, if it is open in passthrough.
    pub fn backing_id(&self) -> Option<i32> {
        if let Mode::Passthrough { id, .. } = self.0 { Some(id) } else { None }
    }

    /// Whether it is open in passthrough.
    pub fn passes_through(&self) -> bool {
        matches!(self.0, Mode::Passthrough { .. })
    }
}
