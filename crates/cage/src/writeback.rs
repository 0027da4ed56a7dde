//! Writes that a door collects: when they may be, and what has to stay free meanwhile.
//!
//! Owned by the cage once a door has offered to collect. The phases:
//! * free: a door may hold back up to [`WritebackPermit::bound`] bytes, and at least that much
//!   stays free;
//! * recalled: less would have stayed free, so every write that begins is announced; what was held
//!   back is still arriving, and the bound still stays free for it;
//! * settled: all has arrived; every announced write is booked before it happens, and the last
//!   block can be used;
//! * stuck: the door could not make its kernel pass everything on; the bound stays free, and it is
//!   tried again.
//!
//! Invariant: the phase changes, and bytes are taken while a door collects, under
//! [`WritebackPermit::gate`] only; the recall is made under it as well, so that nobody's write is
//! answered between the decision and the recall. The gate comes after a file's lock and before the
//! ledger's.

use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};
use nacre_vfs::WritebackHost;
use std::{sync::Arc, time::Duration};

/// See the file's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    Free,
    Recalled,
    Settled,
    Stuck,
}

/// The most that calls on collected files may take during one settling of what has to stay free,
/// bytes; and at most this part of that. A door counts single writes that are under way among what
/// it can hold back: these are such.
const BESIDE: u64 = 16 << 20;
const BESIDE_PART: u64 = 8;

/// How long one who waits for a settling sleeps at once, before he looks whether the cage is being
/// shut down.
const LOOK: Duration = Duration::from_millis(100);

/// See the file's head.
pub(super) struct WritebackPermit {
    pub(super) door: Arc<dyn WritebackHost>,
    phase: AtomicU8,
    gate: Mutex<()>,
    files: AtomicUsize,
    bound: AtomicU64,
    /// How much of it [`WritebackPermit::spend`] may still give away during this settling.
    beside: AtomicU64,
    /// A limit was lowered while something was held back: that was granted before, and is let in
    /// above it.
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

    /// Files that are open for collected writes.
    pub(super) fn files(&self) -> usize {
        self.files.load(Ordering::Relaxed)
    }

    /// Whether the door is not asked when a file is opened: it may hold something back at any time.
    pub(super) fn opens_unasked(&self) -> bool {
        self.door.opens_unasked()
    }

    /// What a door may hold back while writes are not announced, bytes.
    pub(super) fn bound(&self) -> u64 {
        match self.bound.load(Ordering::Acquire) {
            // Nothing is written to now.
            0 if self.opens_unasked() => self.door.dirty_limit(1),
            bound => bound,
        }
    }

    /// What has to stay free at present, bytes.
    pub(super) fn held(&self) -> u64 {
        if self.phase() == Phase::Settled { 0 } else { self.bound() }
    }

    /// The same where something may be held back, bytes: not where no file has been written to
    /// lately.
    pub(super) fn holding(&self) -> u64 {
        if self.files() == 0 { 0 } else { self.held() }
    }

    fn set(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
        // Whoever has looked and not yet fallen asleep holds this lock.
        drop(self.asleep.lock());
        self.changed.notify_all();
    }

    /// Recalls the permission, under the gate.
    pub(super) fn recall(&self, _gate: &MutexGuard<'_, ()>) {
        if self.phase() == Phase::Free {
            self.beside.store((self.bound() / BESIDE_PART).min(BESIDE), Ordering::Relaxed);
            // Before the door is told: from here on, [`WritebackPermit::unannounced`] has to answer
            // no.
            self.set(Phase::Recalled);
            self.door.recall();
        }
    }

    /// Takes a little of what has to stay free for a call whose caller holds what the settling
    /// waits for; whether there was enough left.
    pub(super) fn spend(&self, _gate: &MutexGuard<'_, ()>, bytes: u64) -> bool {
        let left = self.beside.load(Ordering::Relaxed).checked_sub(bytes);
        if let Some(left) = left {
            self.beside.store(left, Ordering::Relaxed);
        }
        left.is_some()
    }

    /// Takes one more file in, where `room` is enough; answers whether.
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

    /// Takes one more file in, where the door is not asked and collects in any case. The caller then
    /// looks whether there is room for that.
    pub(super) fn admit_unopened(&self) {
        let _gate = self.gate();
        let files = self.files() + 1;
        self.files.store(files, Ordering::Relaxed);
        self.bound.store(self.door.dirty_limit(files), Ordering::Release);
    }

    /// One of them was closed, and what was held back of it has arrived.
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

    /// Whether writes need not be announced; with `room` well above the bound again, they need not
    /// be from now on.
    pub(super) fn unannounced(&self, room: u64) -> bool {
        match self.phase() {
            // Room may have gone in ways that nobody was asked about.
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

    /// Asks for another settling, to find out what announced writes never happened.
    pub(super) fn unsettle(&self) {
        let _gate = self.gate();
        if self.phase() == Phase::Settled {
            self.set(Phase::Recalled);
        }
    }

    /// The end of a settling.
    pub(super) fn settled(&self, done: bool) {
        let _gate = self.gate();
        if matches!(self.phase(), Phase::Recalled | Phase::Stuck) {
            if done {
                self.forgiving.store(false, Ordering::Relaxed);
            }
            self.set(if done { Phase::Settled } else { Phase::Stuck });
        }
    }

    /// Lets what is held back in above a limit that was lowered, until all of it has arrived.
    pub(super) fn forgive(&self) {
        self.forgiving.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_forgiving(&self) -> bool {
        self.forgiving.load(Ordering::Relaxed)
    }

    /// Waits until nothing is arriving any more, or it is known that this cannot be had, or the
    /// cage is shut down; at most so long.
    pub(super) fn wait_settled(&self, most: Duration) {
        let mut asleep = self.asleep.lock();
        let mut waited = Duration::ZERO;
        while self.phase() == Phase::Recalled && !self.is_stopped() && waited < most {
            if self.changed.wait_for(&mut asleep, LOOK).timed_out() {
                waited += LOOK;
            }
        }
    }

    /// Waits for something to settle; false when the cage is shut down. What is stuck is tried
    /// again after `again`.
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

/// Every order of threads, tried by loom: `RUSTFLAGS="--cfg nacre_model" cargo test -p nacre-layers
/// --lib model`.
#[cfg(all(test, nacre_model))]
mod model {
    use super::*;
    use loom::{sync::Arc as Shared, thread};

    /// A door that holds back what is written unannounced, until it is made to pass it on.
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

    /// Nobody waits for ever: neither who settles for something to settle, nor a writer for what
    /// settles, nor anybody at the end.
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

    /// One who finds room again and one who finds too little of it, at the same time: a write that
    /// need not be announced is never so after a recall that nothing has ended.
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
                // Under the gate nothing gives it back, whoever asks.
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
