//! All of the front end's state of open files: the kernel's file handles, backing files, files that the front end
//! keeps or opened by itself, and waiters for closes.
//!
//! Used by the handlers of `ops/`.

use crate::{
    closes::Closes, implicit_opens::ImplicitOpens, inodes::Inodes, negotiate, open_files::OpenFiles,
    options::FuseOptions, passthrough::Passthrough, running::Running, survival::Survival,
};
use nacre_sys::descriptors;
use nacre_vfs::{Coherence, Layer};
use std::sync::atomic::AtomicU64;

/// The tables of open files.
pub(crate) struct OpenTables {
    /// The file handles that the kernel holds.
    pub files: OpenFiles,
    /// Files in passthrough.
    pub passthrough: Passthrough,
    /// Files opened by node id where the kernel opens files without a request.
    pub implicit: ImplicitOpens,
    /// Waiters for closes of files.
    pub closes: Closes,
    /// Which files are being executed.
    pub running: Running,
    /// Whether files are kept open after their last close.
    pub keeps: bool,
    /// Counter of set-id bits and capabilities given to files, from 1: a file stripped since its last increment has
    /// none.
    pub privileges: AtomicU64,
    /// Maximum number of descriptors that the process may hold for long.
    room: usize,
}

impl OpenTables {
    /// Empty tables; at most `kept_limit` files are kept after their last close.
    pub fn new(layer: &dyn Layer, options: &FuseOptions, kept_limit: usize) -> OpenTables {
        let passthrough = Passthrough::new(kept_limit);
        if !negotiate::wants_passthrough(options) {
            passthrough.refuse("switched off by the options of the mount");
        }
        let room = descriptors::room();
        OpenTables {
            files: OpenFiles::after(options.survival.as_ref().map_or(0, Survival::restarts)),
            passthrough,
            implicit: ImplicitOpens::new(room / 4),
            closes: Closes::default(),
            running: Running::default(),
            keeps: negotiate::root_coherence(layer) <= Coherence::Watched,
            privileges: AtomicU64::new(1),
            room,
        }
    }

    /// Whether the remaining descriptors are needed for calls that hold one only briefly. Files kept for the next
    /// open are closed first.
    pub fn are_full(&self, inodes: &Inodes) -> bool {
        let full = || descriptors::held() >= self.room;
        if full() {
            self.passthrough.drop_all_kept(inodes);
        }
        full()
    }

    /// Maximum number of files held open that may have no user any more.
    pub fn spare(&self) -> usize {
        self.room / 4
    }

    /// The mount is gone.
    pub fn clear(&self) {
        self.files.clear();
        self.implicit.clear();
    }
}
