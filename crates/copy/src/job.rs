//! What all workers of one copy know, made by `run.rs`.

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

/// What all workers of a copy know.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) figures: &'a Figures,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) told: &'a (dyn Fn(CopyEvent) + Sync),
    pub(crate) source_device: u64,
    pub(crate) dest: OwnedFd,
    pub(crate) dest_identity: Identity,
    /// Whether this copy goes on with an earlier one.
    pub(crate) resumed: bool,
    /// The user and group that new files belong to.
    pub(crate) own: (u32, u32),
    pub(crate) id: String,
    /// Of what was there already on the file system of DEST, what was changed in this time may have
    /// been lost in part.
    pub(crate) doubtful: Option<(state::Time, state::Time)>,
    pub(crate) dest_device: u64,
    pub(crate) complete: AtomicBool,
    /// The file systems that were written to.
    pub(crate) devices: Mutex<BTreeMap<u64, OwnedFd>>,
    pub(crate) fatal: Mutex<Option<Fatal>>,
    pub(crate) over: AtomicBool,
}

impl Job<'_> {
    /// Whether everybody shall end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed)
    }

    /// For loops over much data.
    pub(crate) fn go_on(&self) -> Result<(), Trouble> {
        if self.is_stopped() { Err(Trouble::Stopped) } else { Ok(()) }
    }

    /// Tells what went wrong with an entry, and ends the copy where nothing else will go better.
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

    /// Tells something.
    pub(crate) fn notice(&self, what: String) {
        (self.told)(CopyEvent::Notice(what));
    }

    /// Whether DEST has no room left: what an attribute was refused for, where it may be about the
    /// attribute alone.
    pub(crate) fn is_full(&self) -> bool {
        fs::fstatvfs(&self.dest).is_ok_and(|room| {
            room.f_bavail.saturating_mul(room.f_frsize) < 1 << 20 || (room.f_files > 0 && room.f_favail == 0)
        })
    }

    /// Whether something that was in DEST before is whole, if it looks whole.
    pub(crate) fn is_trusted(&self, there: &Meta) -> bool {
        let Some((from, until)) = self.doubtful else { return true };
        there.device == self.dest_device && !(from..=until).contains(&there.changed)
    }

    /// Whether an entry of SOURCE is none that is copied: the notes of a copy.
    pub(crate) fn is_ours(&self, pair: &Pair, name: &[u8]) -> bool {
        pair.is_root() && state::is_own_name(name)
    }

    /// Whether an entry of the root is none that is copied.
    pub(crate) fn is_own_name(&self, name: &[u8]) -> bool {
        state::is_own_name(name)
    }

    /// How all temporary names begin.
    pub(crate) fn temporary_prefix(&self) -> String {
        format!(".nacre-copy.{}.", self.id)
    }

    /// The temporary name of one worker.
    pub(crate) fn temporary(&self, worker: usize) -> String {
        format!(".nacre-copy.{}.{worker}", self.id)
    }

    /// Remembers a file system that has to be written out in the end.
    pub(crate) fn writes_to(&self, device: u64, directory: BorrowedFd<'_>) -> io::Result<()> {
        let mut devices = self.devices.lock();
        if let std::collections::btree_map::Entry::Vacant(room) = devices.entry(device) {
            room.insert(duplicate(directory)?);
        }
        Ok(())
    }

    /// Whether owners may differ: this user could not give them.
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

    /// Whether further names may be files of their own.
    pub(crate) fn may_lack_links(&self) -> bool {
        self.figures.lost_links.load(Ordering::Relaxed) > 0
    }

    /// Writes out everything that was written.
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
