//! Writes that doors collect before they pass them on: whether they may, and what has to stay free
//! meanwhile.
//!
//! One for all mounted datasets of a pool, since they share its room. As long as there is more room
//! for each of them than all doors together can hold back, writes are taken without a word. With
//! less, every write is announced before it happens: it is refused there if it would not fit, or
//! promised its room.
//!
//! What arrives is what such writes have left in pages, or stores to a shared mapping, of which
//! nobody hears before; nothing tells one from the other. So what was accepted is counted by file,
//! and what arrives is let in up to that ([`Tree::write_held`]); all the rest is asked for like any
//! write:
//! * of a file that is open for collected writes nowhere, only stores can arrive: closing passes on
//!   what was collected ([`Standing::Stores`]);
//! * while writes are taken without a word, all that arrives of the others fits, whatever it is
//!   ([`Standing::Free`]);
//! * from a recall until a settling, as much as could be held back at the recall
//!   ([`WritebackGroup::recalled`]);
//! * from then on, as much as was promised to announced writes ([`Standing::Promised`]).
//!
//! So stores take room from nobody but from writes to the same file, and that only where all other
//! room is taken.
//!
//! A snapshot is one moment: while one is taken, whoever writes waits before his next write
//! ([`StoppedWrites`]), and what he wrote before is passed on. Whoever sees his own write done
//! before he begins the next finds no snapshot that holds only the second.
//!
//! Invariants: the room that others may take is counted whole for each dataset, so none can be
//! short by another's writes; room is looked at again after every [`STEP`] bytes that anybody has
//! written; what was promised is reserved in the engine, so that nobody else gets it; it is
//! an upper bound, ended by a settling, which comes by itself soon after a recall and where much is
//! promised.

use super::mounted_tree::{FileNode, Tree};
use super::promises::{GRACE, Promises};
use super::translate::errno;
use nacre_pool::PoolError;
use nacre_pool::engine::Dataset as Files;
use nacre_pool::files::{ExpectedWrites, FileError, WriteOutcome};
use nacre_pool::properties::effective::SyncMode;
use nacre_vfs::{Errno, Result, WriteAhead, WritebackHost, WritebackLease};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Bytes written by anybody after which room is looked at again.
const STEP: u64 = 4 << 20;
/// What stays free beside what doors hold back: writes of a step that go on meanwhile, and the
/// trees that name them.
const BESIDE: u64 = 32 << 20;
/// What an announced write of unknown length counts as.
const UNKNOWN: u64 = 1 << 20;
/// What is written to name content: at most this part of it, and so much for the smallest, which
/// arrives as the two pages that it may lie in.
const NAMING_PART: u64 = 64;
const NAMING_LEAST: u64 = 8 << 10;
/// Where more than this part of the room is promised, and more than so much, it is looked what has
/// arrived already.
const PROMISED_PART: u64 = 2;
const PROMISED_MUCH: u64 = 4 << 20;

/// What is written, with what names it.
fn need(bytes: u64) -> u64 {
    bytes.saturating_add((bytes / NAMING_PART).max(NAMING_LEAST))
}

/// The mounted datasets of a pool whose writes may be collected.
#[derive(Default)]
pub struct WritebackGroup {
    members: Mutex<Vec<Weak<Member>>>,
    /// Written since room was looked at.
    since: AtomicU64,
    /// Every write is announced.
    tight: AtomicBool,
    /// What may have been held back at the recall and not have arrived yet, bytes; 0 from the next
    /// settling on.
    recalled: AtomicU64,
    /// Of files that nobody was known to write to at the recall, doors are told to ask as well.
    called_in: AtomicBool,
    /// Held by whoever announces or settles.
    announcing: Mutex<()>,
    /// Held by the one whose stores are looked at once more.
    storing: Mutex<()>,
    /// A thread that settles is on its way.
    settling: AtomicBool,
    arriving: Arriving,
    /// How often a door went on after another process, of which it may hold writes back.
    went_on: AtomicU64,
}

/// What was promised, has arrived, and is being written: no promise any more and not yet charged.
/// An announcement that did not count it would be given its room once more.
#[derive(Debug, Default)]
struct Arriving {
    /// Bytes.
    bytes: AtomicU64,
    /// How often something began to arrive.
    begun: AtomicU64,
}

impl Arriving {
    fn begin(&self, bytes: u64) {
        if bytes > 0 {
            self.bytes.fetch_add(bytes, Ordering::AcqRel);
            self.begun.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn end(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for WritebackGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WritebackGroup").field("tight", &self.tight).finish_non_exhaustive()
    }
}

/// One mounted dataset.
pub(super) struct Member {
    all: Arc<WritebackGroup>,
    files: Arc<Files>,
    door: OnceLock<Arc<dyn WritebackHost>>,
    /// How many times files are open for collected writes.
    open: AtomicUsize,
    /// Those files, by inode number.
    promised: Mutex<HashMap<u64, Promised>>,
    /// What all of them were promised, bytes; never less than what the table says.
    promises: AtomicU64,
    arriving: Arriving,
    /// How many want writes to be stopped, and the same where it is asked with each write.
    stops: Mutex<usize>,
    stopped: AtomicBool,
    going: Condvar,
}

/// A file that is open for collected writes.
#[derive(Debug, Default)]
struct Promised {
    /// How many times.
    open: usize,
    /// What its announced writes were promised and nothing has arrived for yet.
    bytes: Promises,
}

/// What may arrive of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Stores to a mapping only.
    Stores,
    /// Whatever was taken without a word.
    Free,
    /// So many bytes that were accepted, and stores.
    Promised(u64),
}

/// Writes that are about to be collected are stopped until this is dropped. Those that are written
/// to directly go on.
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

impl WritebackGroup {
    /// Takes a dataset in.
    pub(super) fn join(self: &Arc<Self>, files: &Arc<Files>) -> Arc<Member> {
        let member = Arc::new(Member {
            all: Arc::clone(self),
            files: Arc::clone(files),
            door: OnceLock::new(),
            open: AtomicUsize::new(0),
            promised: Mutex::default(),
            promises: AtomicU64::new(0),
            arriving: Arriving::default(),
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
        let written_to = members.iter().filter(|member| member.is_written_to());
        written_to.map(|member| member.files.files().room()).min().unwrap_or(u64::MAX)
    }

    /// So much was written: looks at the room now and then.
    fn written(self: &Arc<Self>, bytes: u64) {
        if !self.is_tight() && self.since.fetch_add(bytes, Ordering::AcqRel) + bytes >= STEP {
            self.since.store(0, Ordering::Release);
            self.look();
        }
    }

    fn is_tight(&self) -> bool {
        self.tight.load(Ordering::Acquire)
    }

    /// Calls for announcements where there is too little room, or an owner's room has to be looked
    /// at. Takes no lock that a write could hold.
    fn look(self: &Arc<Self>) -> bool {
        let members = self.members();
        let held = Self::held(&members);
        let of_owners = members.iter().any(|member| member.is_written_to() && member.tree().has_owner_quotas());
        if self.is_tight() || !of_owners && Self::room(&members) >= held.saturating_add(BESIDE) {
            return !self.is_tight();
        }
        self.recalled.store(held, Ordering::Release);
        // From here on nobody is told any more that writes need no announcement.
        self.tight.store(true, Ordering::Release);
        self.called_in.store(false, Ordering::Release);
        for member in &members {
            member.recall();
        }
        self.settle_soon(Duration::ZERO);
        false
    }

    /// There may be less room than before: calls for announcements where it is too little. Not for
    /// threads that serve requests.
    pub fn look_again(self: &Arc<Self>) {
        if !self.is_tight() && !self.look() {
            let _one = self.announcing.lock();
            if let Err(error) = self.settle() {
                tracing::debug!(%error, "what is held back is not passed on now");
            }
        }
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
        self.recalled.store(0, Ordering::Release);
        members.iter().for_each(|member| member.end_promises(Promises::end));
        true
    }

    /// Has everything passed on that any door holds back. By whom the lock of announcements is
    /// held.
    #[expect(clippy::disallowed_methods, reason = "tells promises from before the settling from later ones")]
    fn settle(&self) -> Result<()> {
        if !self.called_in.swap(true, Ordering::AcqRel) {
            self.members().iter().filter_map(|member| member.door.get()).for_each(|door| door.recall_unopened());
        }
        let (begun, went_on) = (Instant::now(), self.went_on.load(Ordering::Acquire));
        for member in self.members() {
            if let Some(door) = member.door.get().filter(|_| member.open.load(Ordering::Acquire) > 0) {
                // Answers that crossed the recall may have been taken for true after it.
                door.recall();
                door.flush()?;
            }
        }
        self.end_recalled(went_on);
        self.members().iter().for_each(|member| member.end_promises(|promises| promises.end_old(begun)));
        Ok(())
    }

    /// What was held back at a recall has arrived, unless a door went on meanwhile, which may hold back
    /// more.
    fn end_recalled(&self, went_on: u64) {
        let mut before = self.recalled.load(Ordering::Acquire);
        while self.went_on.load(Ordering::Acquire) == went_on {
            match self.recalled.compare_exchange(before, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// A door goes on: it may hold back as much as it ever may. As at a recall, and where others have been
    /// recalled already, beside what they hold back.
    fn go_on(self: &Arc<Self>, member: &Member) {
        let was_tight = self.is_tight();
        if self.look() || !was_tight {
            return;
        }
        self.went_on.fetch_add(1, Ordering::AcqRel);
        self.recalled.fetch_add(member.held(), Ordering::AcqRel);
        self.called_in.store(false, Ordering::Release);
        member.recall();
        self.settle_soon(Duration::ZERO);
    }

    /// The same in a thread of its own after a while, for whom a settling would have to wait.
    #[expect(clippy::disallowed_methods, reason = "a thread of its own that has to wait, and for nothing")]
    fn settle_soon(self: &Arc<Self>, after: Duration) {
        if self.settling.swap(true, Ordering::AcqRel) {
            return;
        }
        let all = Arc::downgrade(self);
        let settle = move || {
            std::thread::sleep(after);
            let Some(all) = all.upgrade() else { return };
            let _one = all.announcing.lock();
            all.settling.store(false, Ordering::Release);
            if let Err(error) = all.settle() {
                tracing::debug!(%error, "what is held back is not passed on now");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("nacre-settle".to_owned()).spawn(settle) {
            // An announcement that finds no room settles as well.
            self.settling.store(false, Ordering::Release);
            tracing::debug!(%error, "no thread to have passed on what is held back");
        }
    }

    /// Whether anything that was accepted may be on its way.
    fn expects_any(&self) -> bool {
        let promises = || self.members().iter().any(|member| member.promises.load(Ordering::Acquire) > 0);
        let arriving = || self.arriving.bytes.load(Ordering::Acquire) > 0;
        self.recalled.load(Ordering::Acquire) > 0 || promises() || arriving()
    }

    /// Takes of what may have been held back at the recall, at most so much.
    fn take_recalled(&self, most: u64) -> u64 {
        let less = |recalled: u64| (recalled > 0).then(|| recalled.saturating_sub(most));
        self.recalled.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).map_or(0, |before| before.min(most))
    }
}

impl Member {
    /// A door offers to collect.
    pub(super) fn collect(&self, door: &Arc<dyn WritebackHost>) -> bool {
        let taken = self.door.set(Arc::clone(door)).is_ok();
        if taken {
            door.lets_in();
        }
        taken
    }

    /// Its door goes on after another process.
    pub(super) fn go_on(&self) {
        self.all.go_on(self);
    }

    /// So much was written to the dataset, by whatever way.
    pub(super) fn written(&self, bytes: usize) {
        self.all.written(bytes as u64);
    }

    fn held(&self) -> u64 {
        match self.door.get() {
            Some(door) if self.is_written_to() => door.dirty_limit(self.open.load(Ordering::Acquire)),
            _ => 0,
        }
    }

    /// Whether files of it are open for collected writes, or can be at any time.
    fn is_written_to(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0 || self.opens_unasked()
    }

    /// Whether files are opened without a request.
    pub(super) fn opens_unasked(&self) -> bool {
        self.door.get().is_some_and(|door| door.opens_unasked())
    }

    fn tree(&self) -> &Tree {
        self.files.files()
    }

    fn recall(&self) {
        if let Some(door) = self.door.get() {
            door.recall();
        }
    }

    /// What may arrive of a file, and how much of it was promised: of what was accepted, at most
    /// `length` bytes are taken to arrive now, until [`Self::arrived`].
    fn stand(&self, number: u64, length: u64) -> (Standing, u64) {
        let bytes = match self.promised.lock().get_mut(&number) {
            None => return (Standing::Stores, 0),
            Some(_) if !self.all.is_tight() => return (Standing::Free, 0),
            Some(file) => file.bytes.take(length),
        };
        for arriving in [&self.arriving, &self.all.arriving] {
            arriving.begin(bytes);
        }
        self.withdraw(bytes);
        let rest = length - bytes;
        // What there is room for is not taken out of what cannot be asked for.
        let short = rest > 0 && self.tree().room() < need(rest).saturating_add(BESIDE);
        (Standing::Promised(bytes + if short { self.all.take_recalled(rest) } else { 0 }), bytes)
    }

    /// So much of what was promised has been charged.
    fn arrived(&self, bytes: u64) {
        for arriving in [&self.arriving, &self.all.arriving] {
            arriving.end(bytes);
        }
    }

    /// So much of what was promised is over, and was taken out of the table.
    fn withdraw(&self, bytes: u64) {
        self.promises.fetch_sub(bytes, Ordering::AcqRel);
        self.tree().withdraw(bytes);
    }

    /// Ends promises: those that `end` takes out.
    fn end_promises(&self, mut end: impl FnMut(&mut Promises) -> u64) {
        let bytes = self.promised.lock().values_mut().map(|file| end(&mut file.bytes)).fold(0, u64::saturating_add);
        self.withdraw(bytes);
    }

    /// Pages of a file arrive; `timed`: their times are told apart from them.
    pub(super) fn arrive(
        &self,
        file_node: &FileNode,
        offset: u64,
        data: &[u8],
        timed: bool,
    ) -> std::result::Result<WriteOutcome, FileError> {
        let (tree, inode) = (file_node.tree.files.files(), &file_node.inode);
        let (standing, promised) = self.stand(inode.number(), data.len() as u64);
        let outcome = match standing {
            Standing::Free => tree.write_held(inode, Some(offset), data, timed),
            Standing::Stores | Standing::Promised(0) => match tree.write_stored(inode, offset, data, timed) {
                // Many pages come at once, each promised what its record needs at worst: a commit
                // shows what they really need, to one after the other.
                Err(FileError::Quota | FileError::Pool(PoolError::NoSpace)) => {
                    let _one = self.all.storing.lock();
                    tree.write_stored(inode, offset, data, timed)
                }
                other => other,
            },
            // What comes behind is another one's turn.
            Standing::Promised(bytes) => {
                let accepted = usize::try_from(bytes).ok().and_then(|bytes| data.get(..bytes)).unwrap_or(data);
                tree.write_held(inode, Some(offset), accepted, timed)
            }
        };
        self.arrived(promised);
        outcome
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

    #[expect(clippy::disallowed_methods, reason = "the end of a wait for a condition")]
    fn wait(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut stops = self.stops.lock();
        while *stops > 0 && !self.going.wait_until(&mut stops, until).timed_out() {}
    }

    pub(super) fn unannounced(&self) -> bool {
        !self.is_stopped()
            && !self.tree().has_owner_quotas()
            && (!self.all.tight.load(Ordering::Acquire) || self.all.relax())
    }

    /// See [`WritebackLease::announce`].
    #[expect(
        clippy::disallowed_methods,
        reason = "the age of a promise; and writes under way get time to arrive, which nothing tells"
    )]
    fn announce(&self, file_node: &FileNode, write: WriteAhead) -> Result<()> {
        let bytes = write.length.unwrap_or(UNKNOWN);
        if bytes == 0 {
            return Ok(());
        }
        let need = need(bytes);
        let row = file_node.files()?.attributes(&file_node.inode).map_err(errno)?;
        let (recalled, promises) = (&self.all.recalled, &self.promises);
        let promise = |arriving: &Arriving| loop {
            let begun = arriving.begun.load(Ordering::Acquire);
            let writes = ExpectedWrites {
                inode: file_node.inode.number(),
                part: write.offset.map(|from| from..from.saturating_add(bytes)),
                uid: row.uid,
                gid: row.gid,
                bytes: need,
                beside: recalled.load(Ordering::Acquire).saturating_add(arriving.bytes.load(Ordering::Acquire)),
                beside_of_owner: promises.load(Ordering::Acquire),
            };
            let outcome = self.tree().promise(&writes).map_err(errno);
            if outcome.is_err() || arriving.begun.load(Ordering::Acquire) == begun {
                break outcome;
            }
            // What began to arrive meanwhile may have been counted nowhere.
            self.tree().withdraw(need);
        };
        let _one = self.all.announcing.lock();
        let mut outcome = promise(&self.all.arriving);
        // In the end what arrives of other datasets does not count: it never ceases, and most of
        // what limits this one does not limit them.
        for (grace, arriving) in [(Duration::ZERO, &self.all.arriving), (GRACE, &self.arriving)] {
            if !matches!(outcome, Err(Errno::ENOSPC | Errno::EDQUOT)) || !self.all.expects_any() {
                break;
            }
            // Nobody is let in meanwhile: in the end all that was accepted has arrived.
            std::thread::sleep(grace);
            match self.all.settle() {
                // A file stays locked by a call that is being served: what it may hold is not settled.
                Err(Errno::EBUSY) => break,
                settled => settled?,
            }
            outcome = promise(arriving);
        }
        outcome?;
        promises.fetch_add(need, Ordering::AcqRel);
        let noted =
            self.promised.lock().get_mut(&file_node.inode.number()).map(|file| file.bytes.add(Instant::now(), need));
        if noted.is_none() {
            self.withdraw(need);
        }
        if promises.load(Ordering::Acquire) > PROMISED_MUCH.max(self.tree().room() / PROMISED_PART) {
            self.all.settle_soon(GRACE);
        }
        Ok(())
    }
}

/// The permission of one open file.
pub(super) struct Lease {
    member: Arc<Member>,
    file_node: FileNode,
    collected: AtomicBool,
}

impl Lease {
    pub(super) fn new(member: &Arc<Member>, file_node: &FileNode) -> Lease {
        Lease { member: Arc::clone(member), file_node: file_node.clone(), collected: AtomicBool::new(false) }
    }

    fn note(&self) {
        self.member.promised.lock().entry(self.file_node.inode.number()).or_default().open += 1;
        self.collected.store(true, Ordering::Release);
    }

    /// Whether writes through this file are collected: it is read for the rest of pages, too.
    pub(super) fn is_collected(&self) -> bool {
        self.collected.load(Ordering::Acquire)
    }
}

impl WritebackLease for Lease {
    fn begin(&self) -> bool {
        let synchronous = self.member.files.behaviour().sync == SyncMode::Always;
        if synchronous || self.member.all.tight.load(Ordering::Acquire) || self.member.tree().has_owner_quotas() {
            return false;
        }
        self.member.open.fetch_add(1, Ordering::AcqRel);
        let allowed = self.member.all.look();
        if allowed {
            self.note();
        } else {
            self.member.open.fetch_sub(1, Ordering::AcqRel);
        }
        allowed
    }

    fn begin_unopened(&self) {
        self.member.open.fetch_add(1, Ordering::AcqRel);
        self.note();
        self.member.all.look();
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

    fn announce(&self, write: WriteAhead) -> Result<()> {
        self.member.announce(&self.file_node, write)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !*self.collected.get_mut() {
            return;
        }
        self.member.open.fetch_sub(1, Ordering::AcqRel);
        // What it held back has arrived.
        let number = self.file_node.inode.number();
        let gone = {
            let mut promised = self.member.promised.lock();
            let last = promised.get_mut(&number).is_some_and(|file| {
                file.open = file.open.saturating_sub(1);
                file.open == 0
            });
            if last { promised.remove(&number) } else { None }
        };
        if let Some(mut file) = gone {
            self.member.withdraw(file.bytes.end());
        }
    }
}
