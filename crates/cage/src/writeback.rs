//! Write-back by a FUSE front end: when it is allowed, and how much room it needs.
//!
//! Owned by the cage once a front end has offered write-back. A front end may hold dirty data
//! (written by applications, not yet passed to the cage) of at most [`WritebackPermit::bound`]
//! bytes. The phases:
//! * free: write-back is allowed, and at least the bound stays free;
//! * recalled: less would have stayed free, so every new write has to be reserved; dirty data is
//!   still arriving, and the bound stays free for it;
//! * settled: all dirty data has arrived; every reserved write is booked before it happens, and the
//!   last block can be used;
//! * stuck: the front end could not make its kernel write everything back; the bound stays free,
//!   and the flush is retried.
//!
//! Invariant: the phase changes, and bytes are charged while write-back is in use, under the
//! write-back lock [`WritebackPermit::gate`] only; the recall is sent under it as well, so that no
//! write is answered between the decision and the recall. The lock comes after a file's lock and
//! before the ledger's.

use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};
use nacre_vfs::WritebackHost;
use std::{sync::Arc, time::Duration};

/// Phase of write-back; see the file's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    Free,
    Recalled,
    Settled,
    Stuck,
}

/// Maximum bytes of the bound that other calls on files with write-back may take while dirty data
/// arrives; at most this part of the bound. The front end's dirty limit includes single writes in
/// flight, like these.
const BESIDE: u64 = 16 << 20;
const BESIDE_PART: u64 = 8;

/// Interval at which a waiting call looks whether the cage is being shut down.
const LOOK: Duration = Duration::from_millis(100);

/// Write-back state of a cage; see the file's head.
pub(super) struct WritebackPermit {
    pub(super) door: Arc<dyn WritebackHost>,
    phase: AtomicU8,
    gate: Mutex<()>,
    files: AtomicUsize,
    bound: AtomicU64,
    /// Bytes of the bound that [`WritebackPermit::spend`] may still give away before the next
    /// phase.
    beside: AtomicU64,
    /// A limit was lowered while dirty data existed: that data was accepted before, and may exceed
    /// the new limit.
    forgiving: AtomicBool,
    asleep: Mutex<()>,
    changed: Condvar,
    stopped: AtomicBool,
}

impl WritebackPermit {
    pub(super) fn new(door: Arc<dyn WritebackHost>) -> WritebackPermit {
        WritebackPermit {
            door,
            phase: AtomicU8::new(Phase::Free as u8),
            gate: Mutex::new(()),
            files: AtomicUsize::new(0),
            bound: AtomicU64::new(0),
            beside: AtomicU64::new(0),
            forgiving: AtomicBool::new(false),
            asleep: Mutex::new(()),
            changed: Condvar::new(),
            stopped: AtomicBool::new(false),
        }
    }

    pub(super) fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock()
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Free,
            1 => Phase::Recalled,
            2 => Phase::Settled,
            _ => Phase::Stuck,
        }
    }

    /// Number of files that are open with write-back.
    pub(super) fn files(&self) -> usize {
        self.files.load(Ordering::Relaxed)
    }

    /// Whether the front end opens files without requests: it may hold dirty data at any time.
    pub(super) fn opens_unasked(&self) -> bool {
        self.door.opens_unasked()
    }

    /// Maximum dirty data of the front end while writes need no reservation, bytes.
    pub(super) fn bound(&self) -> u64 {
        match self.bound.load(Ordering::Acquire) {
            // No file is being written to now.
            0 if self.opens_unasked() => self.door.dirty_limit(1),
            bound => bound,
        }
    }

    /// Bytes that have to stay free at present.
    pub(super) fn held(&self) -> u64 {
        if self.phase() == Phase::Settled { 0 } else { self.bound() }
    }

    /// Bytes that have to stay free, for reports: 0 where no file has been written to lately.
    pub(super) fn holding(&self) -> u64 {
        if self.files() == 0 { 0 } else { self.held() }
    }

    fn set(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
        // A thread that has looked and not yet fallen asleep holds this lock.
        drop(self.asleep.lock());
        self.changed.notify_all();
    }

    /// Recalls write-back, under the write-back lock.
    pub(super) fn recall(&self, _gate: &MutexGuard<'_, ()>) {
        if self.phase() == Phase::Free {
            self.beside.store((self.bound() / BESIDE_PART).min(BESIDE), Ordering::Relaxed);
            // Before the front end is notified: from here on, [`WritebackPermit::unannounced`] has
            // to return false.
            self.set(Phase::Recalled);
            self.door.recall();
        }
    }

    /// Takes a little of the bound for a call whose caller may hold a lock that the write-back
    /// needs; returns whether enough of it remained.
    pub(super) fn spend(&self, _gate: &MutexGuard<'_, ()>, bytes: u64) -> bool {
        let left = self.beside.load(Ordering::Relaxed).checked_sub(bytes);
        if let Some(left) = left {
            self.beside.store(left, Ordering::Relaxed);
        }
        left.is_some()
    }

    /// Allows write-back for one more file, if `room` is enough; returns whether it did.
    pub(super) fn admit(&self, room: u64) -> bool {
        let _gate = self.gate();
        let files = self.files() + 1;
        let bound = self.door.dirty_limit(files);
        if self.phase() != Phase::Free || room < bound {
            return false;
        }
        self.files.store(files, Ordering::Relaxed);
        self.bound.store(bound, Ordering::Release);
        true
    }

    /// Counts one more file where the front end uses write-back without asking. The caller then
    /// checks whether there is room for it.
    pub(super) fn admit_unopened(&self) {
        let _gate = self.gate();
        let files = self.files() + 1;
        self.files.store(files, Ordering::Relaxed);
        self.bound.store(self.door.dirty_limit(files), Ordering::Release);
    }

    /// Counts a closed file whose dirty data has arrived.
    pub(super) fn dismiss(&self) {
        let _gate = self.gate();
        let files = self.files().saturating_sub(1);
        self.files.store(files, Ordering::Relaxed);
        self.bound.store(if files == 0 { 0 } else { self.door.dirty_limit(files) }, Ordering::Release);
        if files == 0 && !self.opens_unasked() {
            self.forgiving.store(false, Ordering::Relaxed);
            self.set(Phase::Free);
        }
    }

    /// Whether writes need no reservation; with `room` well above the bound again, write-back is
    /// allowed again.
    pub(super) fn unannounced(&self, room: u64) -> bool {
        match self.phase() {
            // Room may have been taken by bookings that could not be refused.
            Phase::Free => !self.opens_unasked() || room >= self.bound(),
            Phase::Settled if room >= self.bound().saturating_add(self.bound() / 2) => {
                let Some(_gate) = self.gate.try_lock() else { return false };
                if self.phase() == Phase::Settled {
                    self.set(Phase::Free);
                }
                self.phase() == Phase::Free
            }
            _ => false,
        }
    }

    /// Requests another flush, to find out which reserved writes never happened.
    pub(super) fn unsettle(&self) {
        let _gate = self.gate();
        if self.phase() == Phase::Settled {
            self.set(Phase::Recalled);
        }
    }

    /// Ends a flush: settled if all dirty data has arrived, else stuck.
    pub(super) fn settled(&self, done: bool) {
        let _gate = self.gate();
        if matches!(self.phase(), Phase::Recalled | Phase::Stuck) {
            if done {
                self.forgiving.store(false, Ordering::Relaxed);
            }
            self.set(if done { Phase::Settled } else { Phase::Stuck });
        }
    }

    /// Accepts the present dirty data above a lowered limit, until all of it has arrived.
    pub(super) fn forgive(&self) {
        self.forgiving.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_forgiving(&self) -> bool {
        self.forgiving.load(Ordering::Relaxed)
    }

    /// Waits at most `most` until all dirty data has arrived, the front end is stuck, or the cage
    /// is shut down.
    pub(super) fn wait_settled(&self, most: Duration) {
        let mut asleep = self.asleep.lock();
        let mut waited = Duration::ZERO;
        while self.phase() == Phase::Recalled && !self.is_stopped() && waited < most {
            if self.changed.wait_for(&mut asleep, LOOK).timed_out() {
                waited += LOOK;
            }
        }
    }

    /// Waits until a flush is needed; returns false when the cage is shut down. A stuck front end
    /// is retried after `again`.
    pub(super) fn wait_unsettled(&self, again: Duration) -> bool {
        let mut asleep = self.asleep.lock();
        let mut tired = false;
        loop {
            if self.is_stopped() {
                return false;
            }
            match self.phase() {
                Phase::Recalled => return true,
                Phase::Stuck if tired => return true,
                Phase::Stuck => tired = self.changed.wait_for(&mut asleep, again).timed_out(),
                _ => self.changed.wait(&mut asleep),
            }
        }
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        drop(self.asleep.lock());
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Models of all thread interleavings, run by loom: `RUSTFLAGS="--cfg nacre_model" cargo test -p
/// nacre-layers --lib model`.
#[cfg(all(test, nacre_model))]
mod model {
    use super::*;
    use loom::{sync::Arc as Shared, thread};

    /// A front end that holds unreserved writes until it is made to write them back.
    #[derive(Default)]
    struct Door {
        recalled: AtomicBool,
    }

    impl WritebackHost for Door {
        fn dirty_limit(&self, files: usize) -> u64 {
            files as u64 * 100
        }

        fn lets_in(&self) {}

        fn recall(&self) {
            self.recalled.store(true, Ordering::Release);
        }

        fn flush(&self) -> nacre_vfs::Result<()> {
            Ok(())
        }
    }

    fn writeback() -> (Shared<WritebackPermit>, Arc<Door>) {
        let door = Arc::new(Door::default());
        let writeback = WritebackPermit::new(Arc::clone(&door) as Arc<dyn WritebackHost>);
        assert!(writeback.admit(1000), "there is room");
        (Shared::new(writeback), door)
    }

    /// No thread waits forever: neither the flushing thread for work, nor a writer for the flush,
    /// nor any of them at the end.
    #[test]
    fn whoever_waits_is_woken() {
        loom::model(|| {
            let (writeback, door) = writeback();
            let settling = Shared::clone(&writeback);
            let settler = thread::spawn(move || {
                while settling.wait_unsettled(LOOK) {
                    settling.settled(true);
                }
            });
            writeback.recall(&writeback.gate());
            assert!(door.recalled.load(Ordering::Acquire));
            writeback.wait_settled(LOOK);
            assert_eq!((writeback.phase(), writeback.held()), (Phase::Settled, 0));
            writeback.stop();
            settler.join().unwrap();
        });
    }

    /// Concurrently, one thread finds room again and another too little: no write goes unreserved
    /// after a recall that has not ended.
    #[test]
    fn what_is_recalled_is_not_given_away_by_another() {
        loom::model(|| {
            let (writeback, _) = writeback();
            writeback.recall(&writeback.gate());
            writeback.settled(true);
            let roomy = Shared::clone(&writeback);
            let writer = thread::spawn(move || roomy.unannounced(1000));
            let unsettled = Shared::clone(&writeback);
            let doubter = thread::spawn(move || unsettled.unsettle());
            {
                let gate = writeback.gate();
                writeback.recall(&gate);
                // Under the lock, no thread allows write-back again.
                let phase = writeback.phase();
                assert_ne!(phase, Phase::Free);
                assert!(!writeback.unannounced(1000));
                assert_eq!(writeback.phase(), phase);
            }
            writer.join().unwrap();
            doubter.join().unwrap();
        });
    }
}
