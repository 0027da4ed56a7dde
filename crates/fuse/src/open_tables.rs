//! All that the door knows of open files: those that the kernel holds, those that it reads and
//! writes itself, those that the door keeps or opened by itself, and who waits for their end.
//!
//! Used by the handlers of `ops/`.

use crate::{
    closes::Closes, implicit_opens::ImplicitOpens, inodes::Inodes, negotiate, open_files::OpenFiles,
    options::FuseOptions, passthrough::Passthrough, running::Running, survival::Survival,
};
use nacre_sys::descriptors;
use nacre_vfs::{Coherence, Layer};
use std::sync::atomic::AtomicU64;

/// See the file's head.
pub(crate) struct OpenTables {
    /// The file handles that the kernel holds.
    pub files: OpenFiles,
    /// Backing ids.
    pub passthrough: Passthrough,
    /// Files opened by node where the kernel opens without us.
    pub implicit: ImplicitOpens,
    /// Who waits for files to be closed.
    pub closes: Closes,
    /// Which files are being run.
    pub running: Running,
    /// Whether files are kept open after their last close.
    pub keeps: bool,
    /// Counts set-id bits and capabilities given to files, from 1: a file stripped since the last
    /// one has none.
    pub privileges: AtomicU64,
    /// How many descriptors the process may hold for long.
    room: usize,
}

impl OpenTables {
    /// Empty ones; at most `kept_limit` files are kept after their last close.
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

    /// Whether the descriptors that are left are needed by calls that hold one only for their own
    /// time. What is kept for the next open is closed first.
    pub fn are_full(&self, inodes: &Inodes) -> bool {
        let full = || descriptors::held() >= self.room;
        if full() {
            self.passthrough.drop_all_kept(inodes);
        }
        full()
    }

    /// How many files may be held open of those that nobody may have open any more.
    pub fn spare(&self) -> usize {
        self.room / 4
    }

    /// The mount is gone.
    pub fn clear(&self) {
        self.files.clear();
        self.implicit.clear();
    }
}
