//! How the kernel does I/O on an inode, as the inode's record keeps it.
//!
//! Part of `OpenState` (`open_files.rs`). Only `passthrough.rs` changes it, by the kernel's rules.

use nacre_vfs::{OpenFlags, Opened};

/// How the kernel does I/O on an inode.
#[derive(Default)]
pub(crate) struct InodeIo(pub(super) Mode);

#[derive(Default)]
pub(super) enum Mode {
    #[default]
    Idle,
    /// Open through the page cache of the mount, or past it.
    Cached { opens: u32 },
    /// Open with this backing id.
    Passthrough { id: i32, opens: u32 },
    /// Not open; the id and the file wait for the next open. `stamp` tells entries of the queue
    /// apart.
    Kept { id: i32, file: Opened, flags: OpenFlags, uid: u32, stamp: u64 },
}

impl InodeIo {
    /// Nothing is open and nothing is kept.
    pub fn is_idle(&self) -> bool {
        matches!(self.0, Mode::Idle)
    }

    /// Where it is open and the kernel does the I/O: from which file.
    pub fn backing_id(&self) -> Option<i32> {
        if let Mode::Passthrough { id, .. } = self.0 { Some(id) } else { None }
    }

    /// Open, and the kernel does the I/O.
    pub fn passes_through(&self) -> bool {
        matches!(self.0, Mode::Passthrough { .. })
    }
}
