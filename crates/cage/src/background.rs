//! Background work of a cage: saving its accounts, recounts, waiting for write-back, running the
//! command of the soft limit.
//!
//! Started with the cage (and, for write-back, when a front end offers it), ended by
//! [`super::Cage::shut_down`]. Invariants: operations wait for nothing here but write-back; a
//! recount replaces the accounts, and a checkpoint copies them, only while no file is being created
//! and nothing is being booked ([`CageLocks::naming`], then [`CageLocks::changing`]).

use super::{
    CageShared,
    inodes::Account,
    ledger::Sums,
    options::RecountReport,
    recount::{Control, CountRule, Held, Recount, Stopped, lower_priority},
    resting::Counting,
    writeback::WritebackPermit,
};
use nacre_layers::context::Tell;
use nacre_vfs::{Attr, FileId, Name, Node, WritebackHost};
use parking_lot::{Condvar, Mutex, RwLockWriteGuard};
use std::{
    collections::{HashMap, HashSet},
    process::{Command, Stdio},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Interval at which changed accounts are saved.
const SAVE_EVERY: Duration = Duration::from_secs(30);

/// Interval at which the saving thread looks for work.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Minimum distance between recounts because of changes from outside; also twenty times the last
/// recount's duration.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Interval at which the recount thread looks whether a recount is due.
const DOUBT_EVERY: Duration = Duration::from_millis(500);

/// Interval of retries after a front end could not write back.
const SETTLE_AGAIN: Duration = Duration::from_secs(5);

/// Maximum delay of a watch's report of our own change; a later report counts as another process'
/// change.
const REPORTED: Duration = Duration::from_secs(1);

/// Time that a call about to write gets to begin.
const STRAGGLERS: Duration = Duration::from_millis(10);

/// Least and greatest time that one attempt at the exclusive naming lock blocks creations.
const PATIENCE_LEAST: Duration = Duration::from_millis(10);
const PATIENCE_MOST: Duration = Duration::from_millis(200);

/// Maximum number of own changes that are remembered until they are reported.
const OWN_NAMES: usize = 4096;

/// State of the background threads; see the file's head.
#[derive(Default)]
pub(super) struct Background {
    wishes: Mutex<Wishes>,
    /// Number of recounts started.
    counts: AtomicU64,
    wake: Condvar,
    changed: AtomicBool,
    doubtful: AtomicBool,
    /// Where the watch reports our own changes as well: the names changed by us.
    own_names: Mutex<Option<HashMap<Box<[u8]>, Instant>>>,
    /// Where the watch reports our own changes as well: the files changed by us.
    own_ids: Mutex<Option<HashMap<FileId, Instant>>>,
    /// Every file known to lie in the cage, as far as it has been counted: the watch also reports
    /// files elsewhere.
    members: Mutex<Members>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Digests of the identities of files in the cage.
#[derive(Default)]
struct Members {
    present: HashSet<u64>,
    /// Digests found by the running recount.
    next: Option<HashSet<u64>>,
}

/// Digest of an identity. A collision costs a needless recount at most.
fn digest(id: &FileId) -> u64 {
    [id.ino, id.generation, id.fs].into_iter().fold(0xcbf2_9ce4_8422_2325, |digest: u64, part| {
        // FNV-1a over words.
        (digest ^ part).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29)
    })
}

#[derive(Default)]
struct Wishes {
    stop: bool,
    checkpoint: bool,
    count: bool,
    running: Option<Arc<Control>>,
    report: RecountReport,
}

impl Background {
    /// Records a change, so that a checkpoint is worth making.
    pub(super) fn note_change(&self) {
        if !self.changed.swap(true, Ordering::Relaxed) {
            self.rouse();
        }
    }

    /// Wakes the threads that have found nothing to do.
    fn rouse(&self) {
        drop(self.wishes.lock());
        self.wake.notify_all();
    }

    /// Records that a change needs a recount to be booked.
    pub(super) fn doubt(&self) {
        if !self.doubtful.swap(true, Ordering::Relaxed) {
            self.rouse();
        }
    }

    /// Drops the need for a recount: an idle cage recounts before its accounts are used.
    pub(super) fn no_doubt(&self) {
        self.doubtful.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    /// Speeds up the running recount: a caller waits for it.
    pub(super) fn hurry(&self) {
        if let Some(control) = &self.wishes.lock().running {
            control.hurry(true);
        }
    }

    pub(super) fn report(&self) -> RecountReport {
        let mut report = self.wishes.lock().report;
        report.due |= self.is_doubtful();
        report
    }

    /// Records that a directory has moved: a running recount walks it again, and the recorded paths
    /// of the files below it are out of date, so that a checkpoint is due.
    pub(super) fn directory_moved(&self, node: &Node, group: Option<usize>) {
        let mut wishes = self.wishes.lock();
        if let Some(control) = &wishes.running {
            control.moved(node.clone(), group);
        }
        wishes.checkpoint = true;
        self.wake.notify_all();
    }

    fn wish(&self, wish: impl FnOnce(&mut Wishes)) {
        wish(&mut self.wishes.lock());
        self.wake.notify_all();
    }

    /// Has changes override a recount's result, as its beginning does.
    #[cfg(test)]
    pub(super) fn begin_count(&self) {
        self.counts.fetch_add(1, Ordering::AcqRel);
    }

    /// Number of the current recount period, which marks changed accounts.
    pub(super) fn counts(&self) -> u64 {
        self.counts.load(Ordering::Acquire) + 1
    }

    /// Starts to remember the names that we change ourselves.
    pub(super) fn expect_own_names(&self) {
        *self.own_names.lock() = Some(HashMap::new());
        *self.own_ids.lock() = Some(HashMap::new());
    }

    /// Records that we are about to change this name.
    #[expect(clippy::disallowed_methods, reason = "how long a name is remembered; nothing else depends on it")]
    pub(super) fn own_name(&self, name: Name<'_>) {
        if let Some(names) = &mut *self.own_names.lock() {
            if names.len() >= OWN_NAMES {
                names.clear();
            }
            names.insert(name.bytes().into(), Instant::now());
        }
    }

    /// Whether a reported change of a name was ours.
    pub(super) fn was_own(&self, name: &[u8]) -> bool {
        self.own_names.lock().as_mut().and_then(|names| names.remove(name)).is_some_and(|at| at.elapsed() < REPORTED)
    }

    /// Records that we are about to change this file in a way that the accounts do not notice.
    #[expect(clippy::disallowed_methods, reason = "how long a number is remembered; nothing else depends on it")]
    pub(super) fn own_id(&self, id: impl FnOnce() -> nacre_vfs::Result<FileId>) {
        if let Some(ids) = &mut *self.own_ids.lock()
            && let Ok(id) = id()
        {
            if ids.len() >= OWN_NAMES {
                ids.clear();
            }
            ids.insert(id, Instant::now());
        }
    }

    /// Whether a reported change of a file was ours.
    pub(super) fn was_own_id(&self, id: &FileId) -> bool {
        self.own_ids.lock().as_mut().and_then(|ids| ids.remove(id)).is_some_and(|at| at.elapsed() < REPORTED)
    }

    /// Records a file that was created or found in the cage.
    pub(super) fn belongs(&self, id: &FileId) {
        let mut members = self.members.lock();
        members.present.insert(digest(id));
        if let Some(next) = &mut members.next {
            next.insert(digest(id));
        }
    }

    /// Whether a file is known to lie in the cage.
    pub(super) fn has(&self, id: &FileId) -> bool {
        let members = self.members.lock();
        let is_in = |set: &HashSet<u64>| set.contains(&digest(id));
        is_in(&members.present) || members.next.as_ref().is_some_and(is_in)
    }

    /// Removes a file without names and open files from the set.
    pub(super) fn ended(&self, id: &FileId) {
        let mut members = self.members.lock();
        members.present.remove(&digest(id));
        if let Some(next) = &mut members.next {
            next.remove(&digest(id));
        }
    }

    fn found(&self, id: &FileId) {
        if let Some(next) = &mut self.members.lock().next {
            next.insert(digest(id));
        }
    }

    fn add(&self, thread: std::io::Result<JoinHandle<()>>) {
        match thread {
            Ok(thread) => self.threads.lock().push(thread),
            Err(error) => {
                tracing::error!(%error, "a thread of a cage cannot be started; its accounts are not saved, nor counted again")
            }
        }
    }

    /// Ends all threads and waits for them. Called once.
    pub(super) fn stop(&self) {
        self.wish(|wishes| {
            wishes.stop = true;
            if let Some(control) = &wishes.running {
                control.cancel();
            }
        });
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of a cage had failed");
            }
        }
    }
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work)
}

/// Starts the threads for saving and recounts; with `count`, with a recount.
pub(super) fn start(shared: &Arc<CageShared>, count: bool) {
    shared.background.wish(|wishes| wishes.count = count);
    let books = Arc::clone(shared);
    shared.background.add(thread("nacre-cage-save", move || save(&books)));
    let counts = Arc::clone(shared);
    shared.background.add(thread("nacre-cage-count", move || keep_counting(&counts)));
}

/// Saves the accounts periodically, and on request.
fn save(shared: &CageShared) {
    let background = &shared.background;
    let Some(saved) = &shared.saved else { return };
    let mut last = shared.clock.now();
    loop {
        {
            let mut wishes = background.wishes.lock();
            if !wishes.stop && !wishes.checkpoint {
                if background.changed.load(Ordering::Relaxed) {
                    background.wake.wait_for(&mut wishes, LOOK_EVERY);
                } else {
                    background.wake.wait(&mut wishes);
                }
            }
            if wishes.stop {
                return;
            }
            let due =
                shared.clock.now().saturating_sub(last) >= SAVE_EVERY && background.changed.load(Ordering::Relaxed);
            if !std::mem::take(&mut wishes.checkpoint) && !due && !saved.wants_checkpoint() {
                continue;
            }
        }
        background.changed.store(false, Ordering::Relaxed);
        shared.checkpoint();
        last = shared.clock.now();
    }
}

impl CageShared {
    /// Locks out creations and moves. One of these may be waiting for a front end's write-back
    /// meanwhile, and readers queue behind a waiting writer: so each attempt is short, lest all
    /// threads that serve the front end queue here.
    #[expect(clippy::disallowed_methods, reason = "a lock that nobody may queue for is tried again")]
    fn nothing_made(&self) -> RwLockWriteGuard<'_, ()> {
        let mut patience = PATIENCE_LEAST;
        loop {
            if let Some(naming) = self.locks.naming.try_write_for(patience) {
                return naming;
            }
            std::thread::sleep(PATIENCE_LEAST * 2);
            patience = (patience * 2).min(PATIENCE_MOST);
        }
    }

    /// Saves the accounts at a checkpoint.
    pub(super) fn checkpoint(&self) {
        let Some(saved) = &self.saved else { return };
        let pending = {
            let _naming = self.nothing_made();
            let _changing = self.locks.changing.write();
            saved.begin_checkpoint(&self.ledger.sums(), self.exact.load(Ordering::Relaxed))
        };
        // Files open for writing may need less than is booked for them: after a crash they are
        // examined. Files without a name are gone then, or taken over by the next process.
        for inode in self.inodes.all() {
            let mut state = inode.lock();
            if state.loaded && (state.writers > 0 || state.pool > 0 || state.gone) {
                self.touch(&inode, &mut state);
            }
        }
        if let Err(error) = pending.and_then(super::saved::Pending::commit) {
            tracing::warn!(cage = self.name, %error, "the accounts of a cage cannot be saved");
            self.background.note_change();
        }
    }

    /// Saves the accounts at shutdown.
    pub(super) fn close_books(&self) {
        let Some(saved) = &self.saved else { return };
        let sums = {
            let _naming = self.nothing_made();
            let _changing = self.locks.changing.write();
            self.ledger.sums()
        };
        if let Err(error) = saved.close(&sums, self.exact.load(Ordering::Relaxed)) {
            tracing::warn!(cage = self.name, %error, "the accounts of a cage cannot be saved; they are put right at the next start");
        }
    }
}

/// The cage's rules for a recount.
struct CageCountRule {
    shared: Weak<CageShared>,
}

impl CountRule for CageCountRule {
    fn counts(&self, _id: &FileId) -> bool {
        // Subvolumes have device numbers of their own, and file systems mounted inside are stored
        // through the cage, too.
        true
    }

    fn cost(&self, node: &Node, attr: &Attr) -> u64 {
        let Some(shared) = self.shared.upgrade() else { return 0 };
        shared.background.found(&attr.id);
        shared.rule.cost(attr, shared.keeps(node, attr))
    }

    fn group(&self, directory: &FileId, above: Option<usize>) -> Option<usize> {
        let shared = self.shared.upgrade()?;
        shared.dirs.found.read().get(directory).copied().or(above)
    }
}

/// Recounts on request, and when changes from outside have made it necessary.
fn keep_counting(shared: &Arc<CageShared>) {
    lower_priority();
    let background = &shared.background;
    loop {
        // Lock order: the recount lock first, then `wishes`.
        let not_before = {
            let last = shared.resting.counting.lock();
            last.ended + COUNT_EVERY.max(last.took * 20)
        };
        let asked = {
            let mut wishes = background.wishes.lock();
            if !wishes.stop && !wishes.count {
                if background.doubtful.load(Ordering::Relaxed) {
                    background.wake.wait_for(&mut wishes, DOUBT_EVERY);
                } else {
                    background.wake.wait(&mut wishes);
                }
            }
            if wishes.stop {
                return;
            }
            let due = background.is_doubtful() && shared.clock.now() >= not_before;
            let asked = std::mem::take(&mut wishes.count);
            if !asked && !due {
                continue;
            }
            asked
        };
        let mut counting = shared.resting.counting.lock();
        // The cage has become idle meanwhile: a recount precedes the next use.
        if !asked && shared.resting.books_are_old() {
            continue;
        }
        // Reset before the recount: later changes need another one.
        background.doubtful.store(false, Ordering::Relaxed);
        if let Err(error @ Stopped::Root(_)) = count_next(shared, &mut counting, false) {
            tracing::warn!(cage = shared.name, ?error, "the files of a cage cannot be counted");
            background.doubt();
        }
    }
}

/// Counts all files and replaces the accounts by the result.
///
/// # Errors
/// Cancelled, or the root cannot be reached.
pub(super) fn count(shared: &Arc<CageShared>, hurry: bool) -> Result<(), Stopped> {
    count_next(shared, &mut shared.resting.counting.lock(), hurry)
}

/// Counts all files like [`count`], under the caller's lock on the recount times.
pub(super) fn count_next(shared: &Arc<CageShared>, counting: &mut Counting, hurry: bool) -> Result<(), Stopped> {
    shared.resting.wakes();
    let _everything_touched = shared.inodes.pin();
    // Changes from here on override the result of the walk.
    shared.background.counts.fetch_add(1, Ordering::AcqRel);
    if !shared.dirs.paths.is_empty() {
        shared.find_limited_again();
    }
    let start = shared.clock.now();
    let rule = Arc::new(CageCountRule { shared: Arc::downgrade(shared) });
    let mut recount = Recount::new(Arc::clone(&shared.below), rule, Arc::clone(&shared.clock));
    let control = recount.control();
    control.hurry(hurry);
    let background = &shared.background;
    {
        let mut wishes = background.wishes.lock();
        if wishes.stop {
            return Err(Stopped::Cancelled);
        }
        wishes.running = Some(Arc::clone(&control));
        wishes.report.running = true;
    }
    background.members.lock().next = Some(HashSet::from([digest(&shared.root)]));
    let result = count_and_settle(shared, &mut recount);
    {
        let mut members = background.members.lock();
        if let Some(next) = members.next.take().filter(|_| result.is_ok()) {
            members.present = next;
        }
    }
    let ended = shared.clock.now();
    counting.note(ended, ended.saturating_sub(start), hurry);
    let seconds = counting.took.as_secs_f64();
    shared.resting.woke(result.is_ok());
    background.wish(|wishes| {
        wishes.running = None;
        wishes.report.running = false;
        if let Ok(corrected) = result {
            wishes.report.done += 1;
            wishes.report.seconds = seconds;
            wishes.report.corrected = corrected;
            wishes.checkpoint = true;
        }
    });
    result.map(|corrected| {
        let progress = control.progress();
        tracing::info!(
            cage = shared.name,
            files = progress.files,
            bytes = progress.bytes,
            corrected,
            seconds,
            "the files of a cage were counted"
        );
    })
}

fn count_and_settle(shared: &CageShared, recount: &mut Recount) -> Result<i64, Stopped> {
    loop {
        recount.run()?;
        let _naming = shared.nothing_made();
        let _changing = shared.locks.changing.write();
        let touched = shared.inodes.all().into_iter().filter(|inode| inode.id != shared.root).filter_map(|inode| {
            let account: Account = *inode.account.lock();
            // An open file may have lost its name, so that the walk did not find it.
            let held = account.count == shared.background.counts()
                || account.count > 0 && inode.open.load(Ordering::Acquire) > 0;
            if !held {
                // For this file the walk's result is used, which includes changes by others.
                inode.stale.store(true, Ordering::Release);
            }
            held.then(|| Held {
                id: inode.id,
                owner: account.owner,
                bytes: account.bytes,
                inodes: u64::from(account.counted),
            })
        });
        let Some(counted) = recount.settle(touched) else { continue };
        let before: Sums = shared.ledger.sums();
        for unread in &counted.unread {
            tracing::warn!(cage = shared.name, path = %unread.path.escape_ascii(), error = %unread.errno, "this could not be counted");
        }
        if counted.complete {
            shared.ledger.replace(&counted.sums);
        } else {
            shared.ledger.raise(&counted.sums);
        }
        shared.set_exact(counted.complete);
        let after = shared.ledger.sums();
        drop((_changing, _naming));
        shared.look_at_room();
        return Ok(i64::try_from(i128::from(after.whole.bytes) - i128::from(before.whole.bytes)).unwrap_or(i64::MAX));
    }
}

/// Allows write-back, with a thread that waits for its end when it is recalled. Returns whether
/// write-back can be used.
pub(super) fn begin_writeback(shared: &Arc<CageShared>, door: &Arc<dyn WritebackHost>) -> bool {
    let writeback = Arc::new(WritebackPermit::new(Arc::clone(door)));
    let (weak, waiting) = (Arc::downgrade(shared), Arc::clone(&writeback));
    // The thread may be waiting for the front end when the cage ends, so it is not joined.
    match thread("nacre-cage-settle", move || settle(&weak, &waiting)) {
        Ok(_detached) => shared.doors.writeback.set(writeback).is_ok(),
        Err(error) => {
            tracing::warn!(%error, "no thread for settling: writes are not collected");
            false
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "stragglers tell nobody when they have gone by")]
fn settle(shared: &Weak<CageShared>, writeback: &WritebackPermit) {
    while writeback.wait_unsettled(SETTLE_AGAIN) {
        // A call that has asked for permission, but not begun to copy, is not visible: it gets time
        // to begin, then a second flush covers it.
        if writeback.opens_unasked() {
            writeback.door.recall_unopened();
        }
        let result = writeback.door.flush().and_then(|()| {
            std::thread::sleep(STRAGGLERS);
            writeback.door.flush()
        });
        let Some(shared) = shared.upgrade() else { return };
        match result {
            Ok(()) => {
                shared.drain_stale();
                writeback.settled(true);
            }
            Err(error) => {
                tracing::warn!(cage = shared.name, %error, "what the kernel holds back cannot be written now; room is kept for it, and it is tried again");
                writeback.settled(false);
            }
        }
    }
}

/// Starts the reports of the soft limit: in the log, as an event, and by a command.
pub(super) fn watch_soft(shared: &Arc<CageShared>, command: Option<String>, others: Tell) {
    let (tell, told): (Sender<bool>, Receiver<bool>) = channel();
    let weak = Arc::downgrade(shared);
    let tell = Mutex::new(tell);
    match thread("nacre-cage-soft", move || soft(&weak, &told, command.as_deref(), &others)) {
        // Ends with the ledger, which holds the sender.
        Ok(_detached) => shared.ledger.on_soft(move |above| {
            if tell.lock().send(above).is_err() {
                tracing::debug!("nobody is told of the soft limit any more");
            }
        }),
        Err(error) => tracing::error!(%error, "no thread for the soft limit: nobody is told of it"),
    }
}

fn soft(shared: &Weak<CageShared>, told: &Receiver<bool>, command: Option<&str>, others: &Tell) {
    while let Ok(mut above) = told.recv() {
        // Only the newest crossing counts, where the command took longer than the change.
        while let Ok(newer) = told.try_recv() {
            above = newer;
        }
        let Some(shared) = shared.upgrade() else { return };
        let totals = shared.ledger.totals();
        let (name, used) = (shared.name.clone(), totals.sums.whole.bytes);
        drop(shared);
        let (limit, soft) = (totals.limits.bytes.unwrap_or(u64::MAX), totals.limits.soft.unwrap_or(u64::MAX));
        if above {
            tracing::warn!(cage = name, used, soft, limit, "use has reached the soft limit");
        } else {
            tracing::info!(cage = name, used, soft, limit, "use has fallen below the soft limit");
        }
        let state = if above { "above" } else { "below" };
        let details = [
            ("cage", name.clone()),
            ("state", state.to_owned()),
            ("used", used.to_string()),
            ("soft", soft.to_string()),
            ("limit", limit.to_string()),
        ];
        others("cage-soft", details.map(|(name, value)| (name.to_owned(), value)).to_vec());
        if let Some(command) = command {
            run(command, &name, used, limit, if above { "soft" } else { "below" });
        }
    }
}

/// Runs the command and waits for its end.
fn run(command: &str, name: &str, used: u64, limit: u64, event: &str) {
    let result = Command::new("/bin/sh")
        .args(["-c", command])
        .env("NACRE_CAGE", name)
        .env("NACRE_CAGE_USED", used.to_string())
        .env("NACRE_CAGE_LIMIT", limit.to_string())
        .env("NACRE_CAGE_EVENT", event)
        .current_dir("/")
        .stdin(Stdio::null())
        .status();
    match result {
        Ok(status) if status.success() => tracing::info!(cage = name, event, "the command of the soft limit has ended"),
        Ok(status) => tracing::warn!(cage = name, event, %status, "the command of the soft limit has failed"),
        Err(error) => tracing::warn!(cage = name, event, %error, "the command of the soft limit cannot be run"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cage, CageOptions, ledger::Limits};
    use nacre_layers::{context::Context, mem::Mem};
    use nacre_vfs::{Caller, Layer, Name, OpenFlags};
    use std::sync::Arc;

    #[test]
    fn what_is_gone_takes_no_memory() {
        let cage = Cage::new(
            Arc::new(Mem::new()),
            CageOptions::new(Limits::default()),
            &Context::system().expect("the surroundings"),
        )
        .expect("a cage");
        let members = || cage.shared.background.members.lock().present.len();
        let (root, before) = (cage.root().expect("the root").node, members());
        for number in 0..100 {
            let text = number.to_string();
            let name = Name::new(text.as_bytes()).expect("a name");
            let (_, file) = cage.create(&Caller::ROOT, &root, name, 0o600, OpenFlags::READ_WRITE).expect("a file");
            assert_eq!(members(), before + 1);
            cage.unlink(&Caller::ROOT, &root, name).expect("gone");
            assert_eq!(members(), before + 1, "somebody has it open");
            drop(file);
            assert_eq!(members(), before);
        }
    }
}
