//! State that all workers of one copy share, made by `run.rs`.

use crate::{
    CopyEvent, Fatal, Lack, Options, Verify,
    figures::{Figures, add},
    metadata::{Identity, Meta},
    pair::{Pair, duplicate},
    state,
    trouble::Trouble,
};
use parking_lot::Mutex;
use rustix::fs;
use std::{
    collections::BTreeMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// State that all workers of a copy share.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) figures: &'a Figures,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) told: &'a (dyn Fn(CopyEvent) + Sync),
    pub(crate) source_device: u64,
    pub(crate) dest: OwnedFd,
    pub(crate) dest_identity: Identity,
    /// Whether this copy continues an earlier one.
    pub(crate) resumed: bool,
    /// User and group of new files.
    pub(crate) own: (u32, u32),
    pub(crate) id: String,
    /// Interval of ctime in which changes on the file system of DEST may be incomplete (after a crash of the
    /// machine).
    pub(crate) doubtful: Option<(state::Time, state::Time)>,
    pub(crate) dest_device: u64,
    pub(crate) complete: AtomicBool,
    /// File systems that were written to.
    pub(crate) devices: Mutex<BTreeMap<u64, OwnedFd>>,
    pub(crate) fatal: Mutex<Option<Fatal>>,
    pub(crate) over: AtomicBool,
    /// Stack size of threads, bytes.
    pub(crate) stack: usize,
}

impl Job<'_> {
    /// Whether all workers shall end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed)
    }

    /// Returns an error once the copy is to stop; called in loops over much data.
    pub(crate) fn go_on(&self) -> Result<(), Trouble> {
        if self.is_stopped() { Err(Trouble::Stopped) } else { Ok(()) }
    }

    /// Reports a failure with an entry, and ends the copy where all other entries would fail, too.
    pub(crate) fn failed(&self, trouble: &Trouble, path: &Path) {
        if matches!(trouble, Trouble::Stopped) {
            return;
        }
        if trouble.is_gone() {
            add(&self.figures.vanished, 1);
            return;
        }
        let sentence = trouble.sentence(&self.options.source, &self.options.destination, path);
        add(&self.figures.failures, 1);
        if !trouble.is_fatal() {
            (self.told)(CopyEvent::Failed(sentence));
            return;
        }
        self.fail_wholly(sentence, trouble.lack());
    }

    /// Reports a notice.
    pub(crate) fn notice(&self, what: String) {
        (self.told)(CopyEvent::Notice(what));
    }

    /// Whether DEST is full, as the reason for a refused attribute; otherwise only the space for attributes is.
    pub(crate) fn is_full(&self) -> bool {
        fs::fstatvfs(&self.dest).is_ok_and(|room| {
            room.f_bavail.saturating_mul(room.f_frsize) < 1 << 20 || (room.f_files > 0 && room.f_favail == 0)
        })
    }

    /// Whether an entry that was in DEST before is complete, if it looks complete.
    pub(crate) fn is_trusted(&self, there: &Meta) -> bool {
        let Some((from, until)) = self.doubtful else { return true };
        there.device == self.dest_device && !(from..=until).contains(&there.changed)
    }

    /// Whether an entry of SOURCE is the state of a copy, which is not copied.
    pub(crate) fn is_ours(&self, pair: &Pair, name: &[u8]) -> bool {
        pair.is_root() && state::is_own_name(name)
    }

    /// Whether a name in the root is that of a copy's state.
    pub(crate) fn is_own_name(&self, name: &[u8]) -> bool {
        state::is_own_name(name)
    }

    /// Returns the prefix of all temporary names.
    pub(crate) fn temporary_prefix(&self) -> String {
        format!(".nacre-copy.{}.", self.id)
    }

    /// Returns the temporary name of one worker.
    pub(crate) fn temporary(&self, worker: usize) -> String {
        format!(".nacre-copy.{}.{worker}", self.id)
    }

    /// Records a file system that has to be synced in the end.
    pub(crate) fn writes_to(&self, device: u64, directory: BorrowedFd<'_>) -> io::Result<()> {
        let mut devices = self.devices.lock();
        if let std::collections::btree_map::Entry::Vacant(room) = devices.entry(device) {
            room.insert(duplicate(directory)?);
        }
        Ok(())
    }

    /// Whether owners may differ, because this user could not set them.
    pub(crate) fn may_lack_owners(&self) -> bool {
        self.figures.lost_owners.load(Ordering::Relaxed) > 0
            || (self.options.verify == Verify::Only && self.own.0 != 0 && !self.options.strict)
    }

    /// Whether attributes may be missing.
    pub(crate) fn may_lack_attributes(&self) -> bool {
        self.figures.lost_attributes.load(Ordering::Relaxed) > 0 || self.may_lack_lists()
    }

    /// Whether access control lists may be missing, and modes narrower for that.
    pub(crate) fn may_lack_lists(&self) -> bool {
        self.figures.lost_lists.load(Ordering::Relaxed) > 0
    }

    /// Whether further hard links may be files of their own.
    pub(crate) fn may_lack_links(&self) -> bool {
        self.figures.lost_links.load(Ordering::Relaxed) > 0
    }

    /// Syncs all file systems that were written to.
    pub(crate) fn sync(&self) -> io::Result<()> {
        for directory in self.devices.lock().values() {
            fs::syncfs(directory)?;
        }
        Ok(())
    }

    pub(crate) fn fail_wholly(&self, what: String, lack: Option<Lack>) {
        self.fatal.lock().get_or_insert(Fatal { what, lack });
        self.over.store(true, Ordering::Relaxed);
    }
}
