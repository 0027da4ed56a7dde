//! Writes that doors collect before they pass them on: whether they may, and what has to stay free meanwhile.
//!
//! One for all mounted datasets of a pool, since they share its room. As long as there is more room for each of them than all doors together can hold back,
//! writes are taken without a word. With less, every write is announced before it happens: it is refused there if it would not fit, or noted as
//! on its way. What arrives was accepted before and is never refused ([`Tree::write_held`]).
//!
//! A snapshot is one moment: while one is taken, whoever writes waits before his next write ([`StoppedWrites`]), and what he wrote before is passed on. Whoever
//! sees his own write done before he begins the next finds no snapshot that holds only the second.
//!
//! Invariants: the room that others may take is counted whole for each dataset, so none can be short by another's writes; room is looked at again after every
//! [`STEP`] bytes that anybody has written; what is on its way is an upper bound, made exact by a settling.

use super::translate::errno;
use super::volume::{Placed, Tree};
use nacre_pool::engine::Dataset as Files;
use nacre_pool::properties::effective::SyncMode;
use nacre_vfs::{Collected, Collector, Errno, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Bytes written by anybody after which room is looked at again.
const STEP: u64 = 4 << 20;
/// What stays free beside what doors hold back: writes of a step that go on meanwhile, and the trees that name them.
const BESIDE: u64 = 32 << 20;
/// What an announced write of unknown length counts as.
const UNKNOWN: u64 = 1 << 20;
/// What is written to name content: at most this part of it, and so much for the smallest.
const NAMING_PART: u64 = 64;
const NAMING_LEAST: u64 = 16 << 10;

/// The mounted datasets of a pool whose writes may be collected.
#[derive(Default)]
pub struct Gathering {
    members: Mutex<Vec<Weak<Member>>>,
    /// Written since room was looked at.
    since: AtomicU64,
    /// Every write is announced.
    tight: AtomicBool,
    /// What may be on its way while it is tight, bytes; changed under the lock of whoever announces, and by what arrives.
    coming: AtomicU64,
    announcing: Mutex<()>,
}

impl std::fmt::Debug for Gathering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gathering").field("tight", &self.tight).finish_non_exhaustive()
    }
}

/// One mounted dataset.
pub(super) struct Member {
    all: Arc<Gathering>,
    files: Arc<Files>,
    door: OnceLock<Arc<dyn Collector>>,
    /// Files that are open for collected writes.
    open: AtomicUsize,
    /// How many want writes to be stopped, and the same where it is asked with each write.
    stops: Mutex<usize>,
    stopped: AtomicBool,
    going: Condvar,
}

/// Writes that are about to be collected are stopped until this is dropped. Those that are written to directly go on.
pub struct StoppedWrites(Arc<Member>);

impl std::fmt::Debug for StoppedWrites {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoppedWrites").finish_non_exhaustive()
    }
}

impl StoppedWrites {
    /// Calls once more for announcements: for files whose opening crossed the first call.
    pub fn insist(&self) {
        if let Some(door) = self.0.door.get() {
            door.recall();
        }
    }

    /// Whether anything can have been collected.
    #[must_use]
    pub fn any(&self) -> bool {
        self.0.door.get().is_some() && self.0.open.load(Ordering::Acquire) > 0
    }
}

impl Drop for StoppedWrites {
    fn drop(&mut self) {
        let mut stops = self.0.stops.lock();
        *stops -= 1;
        if *stops == 0 {
            self.0.stopped.store(false, Ordering::Release);
            self.0.going.notify_all();
        }
    }
}

impl Gathering {
    /// Takes a dataset in.
    pub(super) fn join(self: &Arc<Self>, files: &Arc<Files>) -> Arc<Member> {
        let member = Arc::new(Member {
            all: Arc::clone(self),
            files: Arc::clone(files),
            door: OnceLock::new(),
            open: AtomicUsize::new(0),
            stops: Mutex::new(0),
            stopped: AtomicBool::new(false),
            going: Condvar::new(),
        });
        let mut members = self.members.lock();
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&member));
        member
    }

    fn members(&self) -> Vec<Arc<Member>> {
        self.members.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// What all doors may hold back, bytes.
    fn held(members: &[Arc<Member>]) -> u64 {
        members.iter().map(|member| member.held()).fold(0, u64::saturating_add)
    }

    /// The least room of a dataset that is being written to.
    fn room(members: &[Arc<Member>]) -> u64 {
        let written_to = members.iter().filter(|member| member.open.load(Ordering::Acquire) > 0);
        written_to.map(|member| member.files.files().room()).min().unwrap_or(u64::MAX)
    }

    /// So much was written, out of what doors held back where it is `arriving`: looks at the room now and then.
    fn written(&self, bytes: u64, arriving: bool) {
        if self.tight.load(Ordering::Acquire) {
            // What is written directly was never on its way.
            if !arriving {
                return;
            }
            let less = |coming: u64| Some(coming.saturating_sub(bytes));
            let _ = self.coming.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        } else if self.since.fetch_add(bytes, Ordering::AcqRel) + bytes >= STEP {
            self.since.store(0, Ordering::Release);
            self.look();
        }
    }

    /// Calls for announcements where there is too little room. Takes no lock that a write could hold.
    fn look(&self) -> bool {
        let members = self.members();
        let held = Self::held(&members);
        if self.tight.load(Ordering::Acquire) || Self::room(&members) >= held.saturating_add(BESIDE) {
            return !self.tight.load(Ordering::Acquire);
        }
        self.coming.store(held, Ordering::Release);
        // From here on nobody is told any more that writes need no announcement.
        self.tight.store(true, Ordering::Release);
        for member in &members {
            if let Some(door) = member.door.get() {
                door.recall();
            }
        }
        false
    }

    /// Whether there is room again for all that doors may hold back.
    fn relax(&self) -> bool {
        let members = self.members();
        let held = Self::held(&members);
        let enough = held.saturating_add(held / 2).saturating_add(BESIDE * 2);
        if Self::room(&members) < enough {
            return false;
        }
        let Some(_one) = self.announcing.try_lock() else { return false };
        self.tight.store(false, Ordering::Release);
        true
    }

    /// Has everything passed on that any door holds back.
    fn settle(&self) -> Result<()> {
        for member in self.members() {
            if let Some(door) = member.door.get().filter(|_| member.open.load(Ordering::Acquire) > 0) {
                door.settle()?;
            }
        }
        self.coming.store(0, Ordering::Release);
        Ok(())
    }
}

impl Member {
    /// A door offers to collect.
    pub(super) fn collect(&self, door: &Arc<dyn Collector>) -> bool {
        let taken = self.door.set(Arc::clone(door)).is_ok();
        if taken {
            door.lets_in();
        }
        taken
    }

    /// So much was written to the dataset, by whatever way.
    pub(super) fn written(&self, bytes: usize) {
        self.all.written(bytes as u64, nacre_vfs::is_arriving());
    }

    fn held(&self) -> u64 {
        match (self.door.get(), self.open.load(Ordering::Acquire)) {
            (None, _) | (_, 0) => 0,
            (Some(door), files) => door.most_held(files),
        }
    }

    fn tree(&self) -> &Tree {
        self.files.files()
    }

    /// Stops writes that are not collected yet.
    pub(super) fn stop(self: &Arc<Self>) -> StoppedWrites {
        {
            let mut stops = self.stops.lock();
            *stops += 1;
            // From here on nobody is told any more that writes need no announcement.
            self.stopped.store(true, Ordering::Release);
        }
        let stopped = StoppedWrites(Arc::clone(self));
        stopped.insist();
        stopped
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn wait(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut stops = self.stops.lock();
        while *stops > 0 && !self.going.wait_until(&mut stops, until).timed_out() {}
    }

    fn unannounced(&self) -> bool {
        !self.is_stopped() && !self.tree().has_owner_quotas() && (!self.all.tight.load(Ordering::Acquire) || self.all.relax())
    }

    /// See [`Collected::announce`].
    fn announce(&self, placed: &Placed, length: Option<u64>) -> Result<()> {
        let bytes = length.unwrap_or(UNKNOWN);
        if bytes == 0 {
            return Ok(());
        }
        let need = bytes.saturating_add((bytes / NAMING_PART).max(NAMING_LEAST));
        let row = placed.files()?.attributes(&placed.inode).map_err(errno)?;
        let admitted = || {
            let coming = self.all.coming.load(Ordering::Acquire);
            self.tree().would_admit(row.uid, row.gid, need.saturating_add(coming)).map_err(errno)
        };
        let _one = self.all.announcing.lock();
        let mut outcome = admitted();
        if matches!(outcome, Err(Errno::ENOSPC | Errno::EDQUOT)) && self.all.coming.load(Ordering::Acquire) > 0 {
            self.all.settle()?;
            outcome = admitted();
        }
        outcome?;
        self.all.coming.fetch_add(need, Ordering::AcqRel);
        Ok(())
    }
}

/// The permission of one open file.
pub(super) struct Lease {
    member: Arc<Member>,
    placed: Placed,
    collected: AtomicBool,
}

impl Lease {
    pub(super) fn new(member: &Arc<Member>, placed: &Placed) -> Lease {
        Lease { member: Arc::clone(member), placed: placed.clone(), collected: AtomicBool::new(false) }
    }

    /// Whether writes through this file are collected: it is read for the rest of pages, too.
    pub(super) fn is_collected(&self) -> bool {
        self.collected.load(Ordering::Acquire)
    }
}

impl Collected for Lease {
    fn begin(&self) -> bool {
        let synchronous = self.member.files.behaviour().sync == SyncMode::Always;
        if synchronous || self.member.all.tight.load(Ordering::Acquire) || self.member.tree().has_owner_quotas() {
            return false;
        }
        self.member.open.fetch_add(1, Ordering::AcqRel);
        let allowed = self.member.all.look();
        if allowed {
            self.collected.store(true, Ordering::Release);
        } else {
            self.member.open.fetch_sub(1, Ordering::AcqRel);
        }
        allowed
    }

    fn unannounced(&self) -> bool {
        self.member.unannounced()
    }

    fn stopped(&self) -> bool {
        self.member.is_stopped()
    }

    fn wait(&self, most: Duration) {
        self.member.wait(most);
    }

    fn announce(&self, length: Option<u64>) -> Result<()> {
        self.member.announce(&self.placed, length)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if *self.collected.get_mut() {
            self.member.open.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
