//! Admission of the kernel's write-back caching: whether FUSE front ends may enable it, and the
//! room that must stay free for cached writes.
//!
//! One group for all mounted datasets of a pool, since they share its room. As long as there is
//! more room for each of them than all kernels' caches together can hold back, writes are cached
//! without a request. With less room every write is reserved before it happens: it is refused if it
//! would not fit, or gets a reservation.
//!
//! A page that arrives contains such writes, or stores to a shared mapping, which are not announced
//! by the kernel; they cannot be distinguished. So accepted bytes are counted by file, and arriving
//! pages are admitted up to that number ([`Tree::write_held`]); all others are checked like any
//! write:
//! * for a file that is nowhere open for cached writes, only stores can arrive: closing a file
//!   flushes its cached writes ([`Standing::Stores`]);
//! * while writes are cached without a request, all pages of the other files are admitted
//!   ([`Standing::Free`]);
//! * from a recall until the next settling, as much as could be held back at the recall
//!   ([`WritebackGroup::recalled`]);
//! * after that, as much as was reserved for writes ([`Standing::Promised`]).
//!
//! So stores can take room only from writes to the same file, and only if all other room is used.
//!
//! A snapshot is one moment: while it is taken, writers wait before their next write
//! ([`StoppedWrites`]), and earlier writes are flushed. No snapshot contains a program's later
//! write without its earlier one.
//!
//! Invariants: the room that other datasets may take is counted fully for each dataset, so none can
//! lack room because of another's writes; room is checked again after every [`STEP`] bytes written
//! to any dataset; reservations are made in the engine, so that the space is not given to other
//! writes; they are an upper bound, and end with a settling, which follows a recall or a large sum
//! of reservations by itself.

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

/// Bytes written to any dataset after which room is checked again.
const STEP: u64 = 4 << 20;
/// Bytes that stay free in addition to the cached writes: for writes of a step that are in
/// progress, and for the trees that reference them.
const BESIDE: u64 = 32 << 20;
/// Length assumed for a reserved write of unknown length.
const UNKNOWN: u64 = 1 << 20;
/// Largest share (1/n) of metadata for content, and its least size for the smallest write, which
/// may arrive as two pages.
const NAMING_PART: u64 = 64;
const NAMING_LEAST: u64 = 8 << 10;
/// If reservations exceed this share (1/n) of the room, and this many bytes, a settling checks
/// which writes have arrived already.
const PROMISED_PART: u64 = 2;
const PROMISED_MUCH: u64 = 4 << 20;

/// Space for content with its metadata.
fn need(bytes: u64) -> u64 {
    bytes.saturating_add((bytes / NAMING_PART).max(NAMING_LEAST))
}

/// The mounted datasets of a pool that share the admission of write-back.
#[derive(Default)]
pub struct WritebackGroup {
    members: Mutex<Vec<Weak<Member>>>,
    /// Bytes written since room was checked.
    since: AtomicU64,
    /// Room is short: every write is reserved.
    tight: AtomicBool,
    /// Bytes that may have been held back at the recall and have not arrived yet; 0 after the next
    /// settling.
    recalled: AtomicU64,
    /// FUSE front ends were also asked to request reservations for files that were not known to be
    /// written to at the recall.
    called_in: AtomicBool,
    /// Held while reserving or settling.
    announcing: Mutex<()>,
    /// Held while the stores of one page are tried once more.
    storing: Mutex<()>,
    /// A settling thread was started.
    settling: AtomicBool,
    arriving: Arriving,
    /// Number of failovers of FUSE front ends, whose kernels may hold back writes.
    went_on: AtomicU64,
}

/// Reserved writes that have arrived and are being written: not reserved any more and not charged
/// yet. A reservation that did not count them would be given their room once more.
#[derive(Debug, Default)]
struct Arriving {
    /// Bytes.
    bytes: AtomicU64,
    /// Number of writes that began to arrive.
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

/// A mounted dataset.
pub(super) struct Member {
    all: Arc<WritebackGroup>,
    files: Arc<Files>,
    door: OnceLock<Arc<dyn WritebackHost>>,
    /// Number of open files with cached writes.
    open: AtomicUsize,
    /// These files, by inode number.
    promised: Mutex<HashMap<u64, Promised>>,
    /// Sum of their reservations, bytes; never less than the sum in the table.
    promises: AtomicU64,
    arriving: Arriving,
    /// Number of active stops; `stopped` is a copy that each write reads.
    stops: Mutex<usize>,
    stopped: AtomicBool,
    going: Condvar,
}

/// A file that is open for cached writes.
#[derive(Debug, Default)]
struct Promised {
    /// Number of opens.
    open: usize,
    /// Reservations of writes that have not arrived yet.
    bytes: Promises,
}

/// Admission of arriving pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Only stores to a mapping can arrive.
    Stores,
    /// All pages are admitted: writes were cached without a request.
    Free,
    /// Accepted writes of so many bytes, and stores.
    Promised(u64),
}

/// Keeps new cached writes stopped until it is dropped. Direct writes continue.
pub struct StoppedWrites(Arc<Member>);

impl std::fmt::Debug for StoppedWrites {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoppedWrites").finish_non_exhaustive()
    }
}

impl StoppedWrites {
    /// Repeats the recall: for files that were opened during the first one.
    pub fn insist(&self) {
        if let Some(door) = self.0.door.get() {
            door.recall();
        }
    }

    /// Whether there can be cached writes.
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
    /// Adds a dataset.
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

    /// Bytes that all kernels may hold back.
    fn held(members: &[Arc<Member>]) -> u64 {
        members.iter().map(|member| member.held()).fold(0, u64::saturating_add)
    }

    /// The least room of a dataset that is being written to.
    fn room(members: &[Arc<Member>]) -> u64 {
        let written_to = members.iter().filter(|member| member.is_written_to());
        written_to.map(|member| member.files.files().room()).min().unwrap_or(u64::MAX)
    }

    /// Notes written bytes, and checks the room now and then.
    fn written(self: &Arc<Self>, bytes: u64) {
        if !self.is_tight() && self.since.fetch_add(bytes, Ordering::AcqRel) + bytes >= STEP {
            self.since.store(0, Ordering::Release);
            self.look();
        }
    }

    fn is_tight(&self) -> bool {
        self.tight.load(Ordering::Acquire)
    }

    /// Recalls write-back caching if there is too little room, or if quotas of owners have to be
    /// checked. Takes no lock that a write could hold.
    fn look(self: &Arc<Self>) -> bool {
        let members = self.members();
        let held = Self::held(&members);
        let of_owners = members.iter().any(|member| member.is_written_to() && member.tree().has_owner_quotas());
        if self.is_tight() || !of_owners && Self::room(&members) >= held.saturating_add(BESIDE) {
            return !self.is_tight();
        }
        self.recalled.store(held, Ordering::Release);
        // From here on no write is cached without a reservation.
        self.tight.store(true, Ordering::Release);
        self.called_in.store(false, Ordering::Release);
        for member in &members {
            member.recall();
        }
        self.settle_soon(Duration::ZERO);
        false
    }

    /// Checks the room after it may have shrunk, and recalls write-back caching if it is too
    /// little. Must not be called by threads that serve requests.
    pub fn look_again(self: &Arc<Self>) {
        if !self.is_tight() && !self.look() {
            let _one = self.announcing.lock();
            if let Err(error) = self.settle() {
                tracing::debug!(%error, "what is held back is not passed on now");
            }
        }
    }

    /// Ends the reservation of writes if there is room again for everything that kernels may hold
    /// back; returns whether there is.
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

    /// Flushes all cached writes of all kernels. The lock of reservations must be held.
    #[expect(clippy::disallowed_methods, reason = "tells promises from before the settling from later ones")]
    fn settle(&self) -> Result<()> {
        if !self.called_in.swap(true, Ordering::AcqRel) {
            self.members().iter().filter_map(|member| member.door.get()).for_each(|door| door.recall_unopened());
        }
        let (begun, went_on) = (Instant::now(), self.went_on.load(Ordering::Acquire));
        for member in self.members() {
            if let Some(door) = member.door.get().filter(|_| member.open.load(Ordering::Acquire) > 0) {
                // Answers that crossed the recall may have been applied after it.
                door.recall();
                door.flush()?;
            }
        }
        self.end_recalled(went_on);
        self.members().iter().for_each(|member| member.end_promises(|promises| promises.end_old(begun)));
        Ok(())
    }

    /// Ends the count of writes held back at a recall, which have arrived, unless a FUSE front end
    /// took over meanwhile, whose kernel may hold back more.
    fn end_recalled(&self, went_on: u64) {
        let mut before = self.recalled.load(Ordering::Acquire);
        while self.went_on.load(Ordering::Acquire) == went_on {
            match self.recalled.compare_exchange(before, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// A FUSE front end takes over: its kernel may hold back as much as it ever may. Handled like a
    /// recall; if there was one already, in addition to its count.
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

    /// Settles in a thread of its own after a while, for callers that cannot wait for it.
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
            // A reservation that finds no room settles as well.
            self.settling.store(false, Ordering::Release);
            tracing::debug!(%error, "no thread to have passed on what is held back");
        }
    }

    /// Whether accepted writes may still arrive.
    fn expects_any(&self) -> bool {
        let promises = || self.members().iter().any(|member| member.promises.load(Ordering::Acquire) > 0);
        let arriving = || self.arriving.bytes.load(Ordering::Acquire) > 0;
        self.recalled.load(Ordering::Acquire) > 0 || promises() || arriving()
    }

    /// Takes up to `most` bytes from the count of writes held back at the recall.
    fn take_recalled(&self, most: u64) -> u64 {
        let less = |recalled: u64| (recalled > 0).then(|| recalled.saturating_sub(most));
        self.recalled.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).map_or(0, |before| before.min(most))
    }
}

impl Member {
    /// A FUSE front end offers write-back caching.
    pub(super) fn collect(&self, door: &Arc<dyn WritebackHost>) -> bool {
        let taken = self.door.set(Arc::clone(door)).is_ok();
        if taken {
            door.lets_in();
        }
        taken
    }

    /// The dataset's FUSE front end took over from another process.
    pub(super) fn go_on(&self) {
        self.all.go_on(self);
    }

    /// Notes bytes written to the dataset in any way.
    pub(super) fn written(&self, bytes: usize) {
        self.all.written(bytes as u64);
    }

    fn held(&self) -> u64 {
        match self.door.get() {
            Some(door) if self.is_written_to() => door.dirty_limit(self.open.load(Ordering::Acquire)),
            _ => 0,
        }
    }

    /// Whether files of it are open for cached writes, or can be at any time.
    fn is_written_to(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0 || self.opens_unasked()
    }

    /// Whether the kernel opens files without a request.
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

    /// Returns the admission of arriving pages of a file, and the reserved part of them: of the
    /// accepted bytes, at most `length` are taken to arrive now, until [`Self::arrived`].
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
        // If there is room for the remainder, it is not taken from the count of the recall.
        let short = rest > 0 && self.tree().room() < need(rest).saturating_add(BESIDE);
        (Standing::Promised(bytes + if short { self.all.take_recalled(rest) } else { 0 }), bytes)
    }

    /// Notes that so many reserved bytes have been charged.
    fn arrived(&self, bytes: u64) {
        for arriving in [&self.arriving, &self.all.arriving] {
            arriving.end(bytes);
        }
    }

    /// Ends a reservation that was removed from the table.
    fn withdraw(&self, bytes: u64) {
        self.promises.fetch_sub(bytes, Ordering::AcqRel);
        self.tree().withdraw(bytes);
    }

    /// Ends the reservations that `end` removes.
    fn end_promises(&self, mut end: impl FnMut(&mut Promises) -> u64) {
        let bytes = self.promised.lock().values_mut().map(|file| end(&mut file.bytes)).fold(0, u64::saturating_add);
        self.withdraw(bytes);
    }

    /// Writes arriving pages of a file; `timed`: the kernel sends their times separately.
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
                // Many pages arrive at once, each with the largest space of its record reserved: a
                // commit shows what they really need, one after the other.
                Err(FileError::Quota | FileError::Pool(PoolError::NoSpace)) => {
                    let _one = self.all.storing.lock();
                    tree.write_stored(inode, offset, data, timed)
                }
                other => other,
            },
            // The remaining bytes are left for the next request.
            Standing::Promised(bytes) => {
                let accepted = usize::try_from(bytes).ok().and_then(|bytes| data.get(..bytes)).unwrap_or(data);
                tree.write_held(inode, Some(offset), accepted, timed)
            }
        };
        self.arrived(promised);
        outcome
    }

    /// Stops new cached writes.
    pub(super) fn stop(self: &Arc<Self>) -> StoppedWrites {
        {
            let mut stops = self.stops.lock();
            *stops += 1;
            // From here on no write is cached without a reservation.
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

    /// Reserves a write; see [`WritebackLease::announce`].
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
            // Writes that began to arrive meanwhile may not have been counted.
            self.tree().withdraw(need);
        };
        let _one = self.all.announcing.lock();
        let mut outcome = promise(&self.all.arriving);
        // In the second round arriving writes of other datasets do not count: they never cease, and
        // most limits of this dataset do not concern them.
        for (grace, arriving) in [(Duration::ZERO, &self.all.arriving), (GRACE, &self.arriving)] {
            if !matches!(outcome, Err(Errno::ENOSPC | Errno::EDQUOT)) || !self.all.expects_any() {
                break;
            }
            // No other write is admitted meanwhile: in the end all accepted writes have arrived.
            std::thread::sleep(grace);
            match self.all.settle() {
                // A request in progress keeps its file locked: its cached writes cannot be settled.
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

/// Write-back lease of one open file.
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

    /// Whether writes through this file are cached: then the kernel also reads it to fill pages.
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
        // Its cached writes have arrived.
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
