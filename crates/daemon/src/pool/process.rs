//! The process that owns an imported pool: the engine, the mounts of its datasets, and the socket for commands.
//!
//! Started by [`super::start`]. It lives until the pool is exported or destroyed, or until it is asked to end
//! (SIGTERM, SIGINT: then it exports the pool). Invariants: the name of a pool is locked before anything is
//! written, so that there is one process for it; the socket has its name only while the process listens on it; a
//! request that was received is carried out and answered before the process ends.

mod ending;

use super::{
    client, events,
    expected::{self, Expected},
    going_on::{self, OwnedPool},
    known,
    left::{LeftDevice, PoolLeft, PoolNotes},
    mounts::FuseMounts,
    name_lock::{NameLock, TAKEN},
    rewind, runtime_files,
    shares::Shares,
    start::{How, Start, ZPOOL},
    trust,
};
use crate::{
    background, clock,
    failure::Failure,
    figures, guardian,
    left::Guarded,
    report::printable,
    rpc::{
        endpoint::{Caller, Endpoint, Listener},
        stream::Channel,
    },
    runtime,
    service::SystemdService,
};
use nacre_admin::{
    Command, Imported, Kind, Mounts, Opening, Progress, Refusal, Reply, Silent, Verb,
    failing::Failing,
    fs,
    pool::{
        self, PoolAnswer, PoolRequest, Survives,
        devices::{self, Opened},
        shape::Shape,
        signatures::Accepted,
    },
};
use nacre_fuse::{Duty, SyncCalls};
use nacre_pool::Txg;
use nacre_pool::backend::NewGroup;
use nacre_pool::device::{Device, FileDevice};
use nacre_pool::label::Identity;
use nacre_pool::log::KeptLog;
use nacre_pool::store::Access;
use nacre_sys::{
    descriptors,
    signals::{Signal, Signals},
};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
};
use std::{
    cell::OnceCell,
    hash::{BuildHasher, RandomState},
    io::{self},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Server of the pool: the state that all threads of the process share.
struct Office {
    imported: Arc<Imported>,
    /// Another copy of the pool is imported: that copy's devices stay recorded.
    copy: bool,
    /// The pool is untrusted: its files give nobody more rights.
    harmless: bool,
    mounts: Arc<dyn Mounts>,
    /// Number of requests being carried out.
    busy: Mutex<usize>,
    /// Event descriptor, written to when a request has been carried out, or when the end is requested.
    changed: OwnedFd,
    /// Handoff state, where the pool survives its process.
    notes: Option<Arc<PoolNotes>>,
    /// Number of datasets that the import could not mount.
    unmounted: AtomicU64,
    ending: AtomicBool,
    /// The pool is exported or destroyed: nothing remains to be done.
    gone: AtomicBool,
}

impl Office {
    /// Whether the pool is gone, or the process is asked to end.
    fn ends(&self) -> bool {
        self.ending.load(Ordering::SeqCst) || self.gone.load(Ordering::SeqCst)
    }

    /// Records the devices of the pool.
    fn note_devices(&self) {
        if let Some(notes) = &self.notes {
            let devices = left_devices(&self.imported);
            notes.change(|left| (left.devices, left.coming) = (devices, Vec::new()));
        }
    }

    fn survives(&self) -> Option<Survives> {
        self.notes.as_ref().map(|notes| figures::survives(&notes.guarded))
    }

    fn tell(&self) {
        // It cannot fail before 2^64 writes were not read.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }
}

/// Guard of a request that is being carried out.
struct Busy(Arc<Office>);

impl Busy {
    fn new(office: &Arc<Office>) -> Busy {
        *office.busy.lock() += 1;
        Busy(Arc::clone(office))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.busy.lock() -= 1;
        self.0.tell();
    }
}

/// How long the caller may take to read an answer when the process is to end.
const LAST_ANSWER: Duration = Duration::from_secs(30);

/// How long a snapshot by mkdir in `.zfs/snapshot` waits for other commands.
const TURN: Duration = Duration::from_secs(5);

/// Owns a pool to its end, or supervises processes that do so one after the other.
///
/// # Errors
/// The pool is not imported, or it ended badly.
pub fn run(start: &Start) -> Result<(), Failure> {
    if !start.foreground {
        background::leave_session()?;
    }
    if start.survive { guardian::run_pool(start) } else { own(start, !start.foreground, None) }
}

/// Owns a pool to its end, as its first process or after one that was killed. With `background`, another process
/// waits until it answers.
///
/// # Errors
/// As [`run`].
pub(crate) fn own(start: &Start, background: bool, guarded: Option<Guarded>) -> Result<(), Failure> {
    let service = guarded.as_ref().map_or_else(SystemdService::of_this_process, |guarded| guarded.service.clone());
    let (notes, left) = match guarded.map(PoolNotes::of).transpose()? {
        Some((notes, left)) => (Some(Arc::new(notes)), left),
        None => (None, None),
    };
    let directory = runtime::own()?;
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    background::settle();
    let orders = Arc::new(Orders::default());
    obey(signals, Arc::clone(&orders))?;
    if let Some(notes) = notes.clone() {
        orders.failing.before_end(move |why| notes.guarded.memory.give_up(why));
    }
    let name = match &left {
        Some(left) => NameLock::left_name(&directory, start, left.name)?,
        None => NameLock::take(&directory, start)?,
    };
    log(&directory, start, left.is_some())?;
    let kept = notes.as_ref().map(|_| kept_log(start, left.as_ref())).transpose()?;
    let imported = match &left {
        Some(left) => {
            let opening = opening(start.cache, left.altroot.clone());
            let opening = Opening { kept: kept.clone(), failing: Arc::clone(&orders.failing), ..opening };
            going_on::go_on(start, &directory, left, opening)
        }
        None => import(start, &directory, kept.clone(), &orders.failing),
    };
    orders.failing.show_progress(None);
    let owned = imported.map_err(|refusal| {
        drop_empty_log(&directory, start);
        if left.is_some()
            && let Err(failure) = Expected::ended(&directory, &start.name, &refusal.to_string())
        {
            tracing::warn!(error = %failure, "nobody is told why the pool is not there");
        }
        client::failure(&refusal)
    })?;
    let OwnedPool { imported, number, mut fresh, harmless } = owned;
    let imported = Arc::new(imported);
    let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let changed = changed.map_err(|error| Failure::io("cannot make", "an event descriptor", &error.into()))?;
    let rules = trust::place_rules(&imported, harmless);
    events::start(&imported);
    if let (Some(notes), [place]) = (&notes, start.devices.as_slice()) {
        notes.needs(pool::in_bucket::needed(place, imported.opening.state.as_deref()));
    }
    let shares = Shares::new(harmless, number.is_none());
    let mounts = Arc::new(FuseMounts::new(Arc::clone(&imported.pool), shares, harmless, rules, notes.clone()));
    let office = Arc::new(Office {
        mounts: mounts.clone(),
        imported,
        copy: number.is_none(),
        harmless,
        busy: Mutex::new(0),
        changed,
        notes,
        unmounted: AtomicU64::new(0),
        ending: AtomicBool::new(false),
        gone: AtomicBool::new(false),
    });
    orders.are_for(&office);
    let behind = Arc::downgrade(&office);
    mounts.carry_out(Arc::new(move |request| {
        let Some(office) = behind.upgrade() else { return Err(Refusal::new(Kind::Busy, "the pool is being let go")) };
        // A verb may wait for this mount to end, and so for this thread.
        let changing = office.imported.changing.try_lock_for(TURN);
        let _changing = changing.ok_or_else(|| Refusal::new(Kind::Busy, "the pool is busy with another command"))?;
        fs::run(&office.imported, &*office.mounts, request, &mut Silent).map(drop)
    }));
    let left_hearing = left.as_ref().map(PoolLeft::heard).unwrap_or_default();
    let left_socket = left.as_ref().map(|left| left.socket);
    // Before any path is accessed, which may lead through these mounts.
    mounts.go_on(left.map(|left| left.mounts).unwrap_or_default());
    let hearing = match left_socket {
        Some(_) => settle(&office, &mounts, left_hearing)?,
        None => Hearing::Now(hear_sync(&office, &mounts)),
    };
    mounts.begin_sharing();
    follow(&office, start.mount)?;
    if let (Some(notes), false) = (&office.notes, left_socket.is_some()) {
        let (devices, altroot) = (left_devices(&office.imported), office.imported.opening.altroot.clone());
        notes.change(|left| {
            left.guid = office.imported.store.identity().pool;
            (left.name, left.number) = (name.descriptor(), number.as_ref().map(NameLock::descriptor));
            (left.devices, left.altroot, left.harmless) = (devices, altroot, harmless);
            left.writer = office.imported.writer();
            left.kept_log = kept.as_ref().map(|kept| kept.descriptor().as_raw_fd());
        });
    }
    let answers = move || SystemdService::answers(service.as_deref(), background, left_socket.is_some());
    let served = serve(start, (&directory, left_socket), &office, &mut fresh, answers);
    tracing::info!(pool = start.name, "the pool is let go");
    hearing.end();
    let ended = match &fresh {
        _ if office.gone.load(Ordering::SeqCst) => Ok(()),
        Some(_) => ending::undo(&office),
        None => ending::leave(&office),
    };
    drop(fresh);
    drop_empty_log(&directory, start);
    if ended.is_ok() {
        tracing::info!(pool = start.name, "exported or destroyed");
        expected::forget(&directory, &start.name);
    }
    drop((number, name));
    served.and(ended)
}

/// Interception of sync(2), or the thread that starts it.
enum Hearing {
    Now(Option<SyncCalls>),
    Soon(JoinHandle<Option<SyncCalls>>),
}

impl Hearing {
    fn end(self) {
        match self {
            Hearing::Now(hearing) => drop(hearing),
            // The thread waits for a commit, which is given up before the end.
            Hearing::Soon(settling) => drop(settling.join()),
        }
    }
}

/// Makes durable what earlier processes have acknowledged, while users continue. Callers of sync(2) meanwhile wait
/// for the interceptions of these processes (`heard`), which are released then.
fn settle(office: &Arc<Office>, mounts: &Arc<FuseMounts>, heard: Vec<(i32, i32)>) -> Result<Hearing, Failure> {
    let (office, mounts) = (Arc::clone(office), Arc::clone(mounts));
    let work = move || {
        let note = |heard: &[(i32, i32)]| {
            if let Some(notes) = &office.notes {
                notes.change(|left| {
                    left.hearing = left.hearing.filter(|now| !heard.contains(now));
                    left.heard = heard.to_vec();
                });
            }
        };
        note(&heard);
        // Calls from here on are intercepted; earlier calls were made before the commit.
        let hearing = hear_sync(&office, &mounts);
        if let Err(error) = office.imported.commit_changes() {
            // The pool is suspended, and answers that to commands.
            tracing::debug!(%error, "what was acknowledged is not durable");
        }
        note(&[]);
        heard.into_iter().for_each(|(device, mount)| nacre_fuse::let_go_of_sync_calls(device, mount));
        hearing
    };
    let thread = thread::Builder::new().name("nacre-settles".to_owned()).spawn(work);
    thread.map(Hearing::Soon).map_err(|error| Failure::io("cannot start", "the thread that commits", &error))
}

/// Intercepts sync(2), where the kernel allows it, so that operations before the call are durable when it returns.
fn hear_sync(office: &Office, mounts: &Arc<FuseMounts>) -> Option<SyncCalls> {
    if office.imported.read_only || !rustix::process::geteuid().is_root() {
        return None;
    }
    let (pool, mounts, same) =
        (Arc::downgrade(&office.imported), Arc::downgrade(mounts), Arc::downgrade(&office.imported));
    let notes = office.notes.clone();
    let opened = move |device, mount| {
        notes.iter().for_each(|notes| notes.change(|left| left.hearing = Some((device, mount))));
    };
    let make_durable = move || {
        let (Some(pool), Some(mounts)) = (pool.upgrade(), mounts.upgrade()) else { return };
        mounts.pass_on();
        if let Err(error) = pool.commit_changes() {
            // The pool is suspended, and answers that to commands.
            tracing::debug!(%error, "sync(2) was called in vain");
        }
    };
    let stuck =
        move || same.upgrade().is_some_and(|pool| pool.failing.waiting().is_some() || pool.pool.suspended().is_some());
    let (make_durable, stuck, opened) = (Box::new(make_durable), Box::new(stuck), Box::new(opened));
    let heard = SyncCalls::hear(Duty { make_durable, stuck, opened });
    heard
        .inspect_err(
            |error| tracing::info!(%error, "sync(2) is not heard: commits come by themselves, every few seconds"),
        )
        .ok()
}

/// Interval of looking for a newer state of the writer.
const FOLLOWED: Duration = Duration::from_secs(1);

/// Follows the commits of the machine that writes to the pool, where it is another one.
#[expect(clippy::disallowed_methods, reason = "a store tells nobody of what was put")]
fn follow(office: &Arc<Office>, mount: bool) -> Result<(), Failure> {
    if !office.imported.follows() {
        return Ok(());
    }
    let office = Arc::downgrade(office);
    let mut told = String::new();
    let work = move || {
        loop {
            thread::sleep(FOLLOWED);
            let Some(office) = office.upgrade().filter(|office| !office.ends()) else { return };
            let Some(_changing) = office.imported.changing.try_lock() else { continue };
            match fs::follow(&office.imported, &*office.mounts, mount, &mut Silent) {
                Ok(_) => told.clear(),
                Err(refusal) if refusal.what == told => {}
                Err(refusal) => {
                    tracing::warn!(error = %refusal, "what the writer has committed last is not to be seen yet");
                    told = refusal.what;
                }
            }
        }
    };
    let thread = thread::Builder::new().name("nacre-follow".to_owned()).spawn(work);
    thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread that follows the writer", &error))
}

/// Serves the pool until it is gone or the end is requested. `fresh` are the devices made for a new pool: they are
/// removed again unless the process that requested it is notified. `left` is the socket of the previous process.
/// `answers` is called when the pool answers, and notifies the process that waits for it.
fn serve(
    start: &Start,
    (directory, left): (&Path, Option<i32>),
    office: &Arc<Office>,
    fresh: &mut Option<devices::Fresh>,
    answers: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let socket = directory.join(runtime_files::file(&start.name));
    let busy = Arc::clone(office);
    let (listener, serving) = (Listener::start()?, Arc::new(move |caller: &Caller| answer(caller, &busy)));
    let endpoint = match left {
        Some(left) => Endpoint::left(&listener, &socket, left, serving),
        None => Endpoint::bind(&listener, &socket, serving),
    }?;
    let ready = match left {
        Some(_) => expect(start, directory, office),
        None => get_ready(start, directory, office),
    };
    if let Some(notes) = office.notes.as_ref().filter(|_| ready.is_ok()) {
        // The pool is imported, and the process that requested it is about to be notified.
        notes.begin(|left| left.socket = endpoint.descriptor());
        notes.guarded.memory.serves();
    }
    let ready = ready.and_then(|()| answers());
    if ready.is_ok() {
        tracing::info!(pool = start.name, "imported");
        drop(fresh.take().map(devices::Fresh::take));
    }
    let ready = ready.and_then(|()| background::leave_directory()).and_then(|()| endpoint.open());
    let served = ready.and_then(|()| {
        while !office.ends() {
            wait(office)?;
        }
        Ok(())
    });
    // The name goes first: a command that finds no socket knows that the pool is not imported.
    endpoint.close();
    while *office.busy.lock() > 0 {
        wait(office)?;
    }
    served
}

/// Completes an import: history, events, records of devices, mounts.
fn get_ready(start: &Start, directory: &Path, office: &Office) -> Result<(), Failure> {
    let Office { imported, mounts, .. } = office;
    pool::remember(imported, rustix::process::getuid().as_raw(), &start.command);
    let class = if matches!(start.how, How::Create { .. }) { "pool_create" } else { "pool_import" };
    imported.watch.note(&format!("sysevent.fs.zfs.{class}"), vec![("pool".to_owned(), imported.name())]);
    keep(office);
    expect(start, directory, office)?;
    if start.mount {
        let unmounted = fs::mount_all(imported, &**mounts, &mut Said).map_err(|refusal| client::failure(&refusal))?;
        office.unmounted.store(unmounted, Ordering::Relaxed);
    }
    Ok(())
}

/// Records the pool as expected to be imported.
fn expect(start: &Start, directory: &Path, office: &Office) -> Result<(), Failure> {
    let imported = &office.imported;
    let named = |place: PathBuf| printable(place.as_os_str().as_encoded_bytes());
    let devices = imported.places().into_iter().map(named).collect();
    if let Err(failure) = Expected::new(&start.name, imported.store.identity().pool, devices).keep(directory) {
        tracing::warn!(error = %failure, "nobody will be told if this process is killed");
    }
    Ok(())
}

fn left_devices(imported: &Imported) -> Vec<LeftDevice> {
    imported.devices.read().iter().filter_map(|device| LeftDevice::of(&**device)).collect()
}

/// Records the end of a pool whose processes were killed too often, for later commands, and opens the log for it.
///
/// # Errors
/// The record or the log cannot be written.
/// It cannot be.
pub(crate) fn ended_badly(start: &Start, why: &str) -> Result<(), Failure> {
    let directory = runtime::own()?;
    log(&directory, start, true)?;
    Expected::ended(&directory, &start.name, why)
}

/// Refuses devices that lie in a dataset of the pool itself: to open them, this process would wait for its own
/// answers.
fn outside(pool: &str, devices: &[PathBuf]) -> Result<(), Refusal> {
    let entries = crate::mountinfo::read().map_err(|error| {
        Refusal::new(Kind::Io, format!("cannot add to '{pool}': the table of mounts cannot be read: {error}"))
    })?;
    let is_own = |source: &str| source == pool || source.strip_prefix(pool).is_some_and(|rest| rest.starts_with('/'));
    let own: Vec<_> = entries
        .iter()
        .filter(|entry| entry.kind == "fuse.nacre" && entry.source.to_str().is_some_and(is_own))
        .collect();
    for device in devices {
        let resolved = fusewire::apart(|| match (std::fs::canonicalize(device), device.parent(), device.file_name()) {
            // A file that is still to be made.
            (Err(_), Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent)?.join(name)),
            (found, ..) => found,
        });
        // A device that cannot be found is reported where it is opened.
        let Some(place) = resolved.ok().and_then(|place| own.iter().find(|entry| place.starts_with(&entry.mountpoint)))
        else {
            continue;
        };
        let (device, place) = (crate::report::path_text(device), crate::report::path_text(&place.source));
        let what = format!("cannot add to '{pool}': '{device}' lies in '{place}', a file system of the pool itself");
        return Err(Refusal::new(Kind::Invalid, what).next("name a device, or a file that lies elsewhere"));
    }
    Ok(())
}

/// Records the devices of the pool, so that an import finds them.
fn keep(office: &Office) {
    let imported = &office.imported;
    if office.copy {
        return;
    }
    let devices = imported.places();
    // The directory of records may lie in a dataset of this very pool.
    let identity = imported.store.identity();
    let kept = fusewire::apart(|| Ok(known::keep(identity.pool, &identity.name, devices, !office.harmless)));
    if let Err(failure) = kept.unwrap_or_else(|error| Err(Failure::io("cannot start", "a thread", &error))) {
        tracing::warn!(error = %failure, "an import will have to be told where the pool lies");
    }
}

/// Removes an empty log.
fn drop_empty_log(directory: &Path, start: &Start) {
    let path = directory.join(runtime_files::file(&start.name)).with_extension("log");
    if std::fs::metadata(&path).is_ok_and(|log| log.len() == 0) {
        // A log that stays is overwritten by the next import.
        let _ = std::fs::remove_file(path);
    }
}

/// Opens the log: warnings and errors go to a file next to the socket, too. It starts empty with each import, and
/// is continued after a failover.
fn log(directory: &Path, start: &Start, goes_on: bool) -> Result<(), Failure> {
    crate::log::start_pool(&printable(start.name.as_bytes()), &log_file(directory, start), goes_on)
}

/// Sends the lines of `call` to the log of a pool, in its supervisor.
pub(crate) fn within_log(start: &Start, call: impl FnOnce()) -> Result<(), Failure> {
    let file = log_file(&runtime::own()?, start);
    crate::log::within_pool(&printable(start.name.as_bytes()), &file, call)
}

fn log_file(directory: &Path, start: &Start) -> PathBuf {
    directory.join(runtime_files::file(&start.name)).with_extension("log")
}

/// Returns the directory for state that survives a reboot.
#[must_use]
pub fn state_directory() -> Option<PathBuf> {
    crate::cage::state::base()
}

/// Returns the parameters of imports by this user on this machine.
pub fn opening(cache: u64, altroot: Option<PathBuf>) -> Opening {
    let home = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/"),
        false => std::env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from),
    };
    let state = state_directory();
    Opening {
        host: nacre_admin::host::this(),
        entropy: entropy(),
        cache,
        altroot,
        accepts_older: true,
        alias: None,
        home,
        state,
        kept: None,
        after: None,
        failing: Arc::default(),
    }
}

/// Locks the GUID of the pool. Where another copy holds the lock, the import is refused, unless it mounts nothing,
/// or below an altroot; the devices of the other copy stay recorded.
fn own_number(
    start: &Start,
    directory: &Path,
    identity: Option<&Identity>,
    altroot: Option<&Path>,
) -> Result<Option<NameLock>, Refusal> {
    let Some(identity) = identity else { return Ok(None) };
    let busy = |failure: Failure| Refusal::new(Kind::Busy, failure.what);
    let number = NameLock::number(directory, identity.pool, &start.name).map_err(busy)?;
    if number.is_none() && start.mount && altroot.is_none() {
        let what = format!(
            "cannot import '{}': it is a copy of a pool that is imported, with the same mount points",
            identity.name
        );
        let next = "-R DIRECTORY shows it below a directory of its own, -N imports it without mounts";
        return Err(Refusal::new(Kind::Busy, what).next(next));
    }
    Ok(number)
}

/// Creates or imports the pool.
fn import(
    start: &Start,
    directory: &Path,
    kept: Option<Arc<KeptLog>>,
    failing: &Arc<Failing>,
) -> Result<OwnedPool, Refusal> {
    failing.show_progress(Some(Box::new(crate::report::tell)));
    let mut opening = Opening { kept, failing: Arc::clone(failing), ..opening(start.cache, start.altroot.clone()) };
    let (imported, number, harmless) = match &start.how {
        How::Create { size, force, properties, groups } => {
            let shape = Shape::read(groups)?;
            let doing = format!("cannot create '{}'", start.name);
            free_mountpoint(&doing, &opening, &start.name, properties)?;
            if let [address] = start.devices.as_slice()
                && nacre_remote::is_address(address)
            {
                let imported = create_in_bucket(start, (address, *size), properties, opening)?;
                let number = NameLock::number(directory, imported.store.identity().pool, &start.name);
                let number = number.map_err(|failure| Refusal::new(Kind::Io, failure.what))?;
                let fresh = Some(devices::Fresh::none());
                return Ok(OwnedPool { imported, number, fresh, harmless: false });
            }
            let fresh = devices::fresh(&start.devices, *size, Accepted::at_creation(*force, start.program() == ZPOOL))?;
            fresh.check_size(&doing, nacre_pool::store::MINIMUM_DEVICE)?;
            fresh.check_groups(&shape.all().copied().collect::<Vec<_>>(), *force)?;
            let mut devices = fresh.devices();
            let of_data = if groups.is_empty() { devices.len() } else { shape.of_data().min(devices.len()) };
            let beside = devices.split_off(of_data);
            if !beside.is_empty() {
                fresh.try_writing(&doing)?;
            }
            try_out(start, properties, (&devices, &shape.groups), &opening)?;
            let imported = Imported::create(devices, &shape.groups, &start.name, properties, opening)?;
            let set = imported.add_beside(&beside, &shape);
            let set = set.and_then(|()| imported.set_up(properties, &start.properties));
            if let Err(refusal) = set {
                // An unfinished pool must not be imported.
                if let Err(error) = imported.destroy() {
                    tracing::warn!(%error, "a pool that was not finished keeps its labels");
                }
                return Err(refusal);
            }
            let number = NameLock::number(directory, imported.store.identity().pool, &start.name);
            let number = number.map_err(|failure| Refusal::new(Kind::Io, failure.what))?;
            return Ok(OwnedPool { imported, number, fresh: Some(fresh), harmless: false });
        }
        How::Import { old, read_only, txg, rewind, temporary, force, trusted, without_log } => {
            let other = start.name != *old;
            let name = (other && !temporary).then_some(start.name.as_str());
            let alias = (other && *temporary).then(|| start.name.clone());
            opening.alias = alias;
            opening.accepts_older = *force || *rewind || txg.is_some();
            let opened = open_devices(&start.devices, !read_only)?;
            let identity = trust::identity(&opened)?;
            let harmless = !trusted && trust::relocate(start, &opened, identity.as_ref(), &mut opening.altroot);
            let number = own_number(start, directory, identity.as_ref(), opening.altroot.as_deref())?;
            let access = match (read_only, txg) {
                (true, Some(txg)) => Access::ReadOnlyAt(Txg(*txg)),
                (true, None) if *rewind => Access::Salvage,
                (true, None) => Access::ReadOnly,
                (false, Some(txg)) => Access::Rewind(Txg(*txg)),
                (false, None) if *without_log => Access::WithoutLog,
                (false, None) => Access::ReadWrite,
            };
            let imported = match Imported::open(opened.clone(), access, name, opening.clone()) {
                Err(refusal) if *rewind && access.is_of_newest() && refusal.kind == Kind::Io => {
                    go_back(&refusal, opened, access, name, &opening)?
                }
                imported => imported.map_err(|refusal| of_import(old, refusal))?,
            };
            (imported, number, harmless)
        }
    };
    for log in imported.logs_aside() {
        crate::report::tell(&format!(
            "'{}' has what was synced and is not in the pool: another machine has had it since, or it was given up",
            log.display()
        ));
    }
    if !imported.read_only {
        imported.set_up(&[], &start.properties)?;
    }
    Ok(OwnedPool { imported, number, fresh: None, harmless })
}

/// Returns the replay journal: that of the previous process, where there was one. It takes no more memory than the
/// cache.
fn kept_log(start: &Start, left: Option<&PoolLeft>) -> Result<Arc<KeptLog>, Failure> {
    let kept = match left.and_then(|left| left.kept_log) {
        Some(number) => descriptors::take_over(number).and_then(KeptLog::taken_over),
        None => KeptLog::new(KeptLog::BYTES.min(usize::try_from(start.cache).unwrap_or(usize::MAX))),
    };
    kept.map_err(|error| Failure::io("cannot have", "the log of what is acknowledged", &error))
}

/// Creates a pool in an empty bucket.
fn create_in_bucket(
    start: &Start,
    (address, size): (&Path, Option<u64>),
    properties: &[(String, String)],
    opening: Opening,
) -> Result<Imported, Refusal> {
    let opened = devices::open_bucket(address)?;
    let Opened::Bucket(bucket, address) = opened else {
        return Err(Refusal::new(Kind::Invalid, format!("cannot create '{}': no bucket", start.name)));
    };
    let imported = Imported::create_in((bucket, address), size, &start.name, properties, opening)?;
    let mut of_pool = start.properties.clone();
    if !of_pool.iter().any(|(name, _)| name == "failmode") {
        // A server that is away comes back.
        of_pool.push(("failmode".to_owned(), "wait".to_owned()));
    }
    if let Err(refusal) = imported.set_up(properties, &of_pool) {
        if let Err(error) = imported.destroy().map_err(Refusal::from).and_then(|()| imported.erase(&mut Silent)) {
            tracing::warn!(%error, "a pool that was not finished keeps its objects");
        }
        return Err(refusal);
    }
    Ok(imported)
}

/// Tries properties with limits (quota, reservation) on a pool on memory devices of the same length: a refusal then
/// has changed nothing.
fn try_out(
    start: &Start,
    properties: &[(String, String)],
    (devices, groups): (&[Arc<dyn Device>], &[NewGroup]),
    opening: &Opening,
) -> Result<(), Refusal> {
    if !properties.iter().any(|(name, _)| name.contains("quota") || name.contains("reserv")) {
        return Ok(());
    }
    let in_memory = |device: &Arc<dyn Device>| -> io::Result<Arc<dyn Device>> {
        let memory = memfd_create("nacre-pool", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, device.length())?;
        Ok(Arc::new(FileDevice::open(&PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd())), true)?))
    };
    let Ok(copies) = devices.iter().map(in_memory).collect::<io::Result<Vec<_>>>() else {
        tracing::debug!("properties of the new pool are not tried before");
        return Ok(());
    };
    let opening = Opening { kept: None, failing: Arc::default(), ..opening.clone() };
    let tried = Imported::create(copies, groups, &start.name, properties, opening)?;
    let set = tried.set_up(properties, &start.properties);
    if let Err(error) = tried.destroy() {
        tracing::debug!(%error, "a pool in memory ends");
    }
    set
}

/// Opens the devices; waits for one that a killed process still holds. The kernel does not notify when it has
/// closed the files of that process.
fn open_devices(paths: &[PathBuf], writable: bool) -> Result<Opened, Refusal> {
    let until = clock::now() + TAKEN / 2;
    loop {
        match devices::open_home(paths, writable) {
            Err(refusal) if refusal.kind == Kind::Busy && clock::now() < until => {
                clock::pause(Duration::from_millis(10))
            }
            opened => return opened,
        }
    }
}

fn of_import(name: &str, mut refusal: Refusal) -> Refusal {
    refusal.what = format!("cannot import '{name}': {}", refusal.what);
    if refusal.kind == Kind::Unreachable && refusal.next.is_empty() {
        // An older state would give up data that may be intact.
        refusal.next = "nothing is known to be damaged: import it again when that answers".to_owned();
    }
    if refusal.kind == Kind::Io && refusal.next.is_empty() {
        refusal.next =
            "-F goes back to the newest state that can be read; -F -n says which, and does nothing; -F -o readonly=on \
             shows it and gives up nothing"
                .to_owned();
    }
    refusal
}

/// Imports the newest readable state, since the last one cannot be read.
fn go_back(
    why: &Refusal,
    opened: Opened,
    access: Access,
    name: Option<&str>,
    opening: &Opening,
) -> Result<Imported, Refusal> {
    let states = rewind::older(&opened).map_err(|failure| Refusal::new(Kind::Io, failure.what))?;
    for state in states {
        let txg = state.txg;
        let (access, given_up) = match access.writes() {
            true => (Access::Rewind(Txg(txg)), "all that came after it is given up"),
            false => (Access::ReadOnlyAt(Txg(txg)), "what came after it is not to be seen, and nothing is given up"),
        };
        match Imported::open(opened.clone(), access, name, opening.clone()) {
            Ok(imported) => {
                let back = state.text();
                crate::report::tell(&format!(
                    "the last state cannot be read ({why}): the pool is as it was after transaction group {back}; {given_up}"
                ));
                return Ok(imported);
            }
            Err(refusal) => tracing::info!(txg, error = %refusal, "this state cannot be read either"),
        }
    }
    Err(Refusal::new(Kind::Io, format!("no state that is kept can be read: {why}")))
}

/// Refuses a new pool's mount point that exists and is not an empty directory.
fn free_mountpoint(doing: &str, opening: &Opening, name: &str, properties: &[(String, String)]) -> Result<(), Refusal> {
    let named = properties.iter().find(|(property, _)| property == "mountpoint").map(|(_, value)| value.as_str());
    let place = match named {
        Some("none" | "legacy") => return Ok(()),
        Some(path) => PathBuf::from(path),
        None => opening.home.join(name),
    };
    let place = opening
        .altroot
        .as_ref()
        .map_or_else(|| place.clone(), |root| root.join(place.strip_prefix("/").unwrap_or(&place)));
    let used = match std::fs::read_dir(&place) {
        Ok(mut entries) => entries.next().map(|_| "exists and is not empty"),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Some("is not a directory"),
        Err(_) => None,
    };
    used.map_or(Ok(()), |used| {
        let what = format!("{doing}: mountpoint '{}' {used}", place.display());
        Err(Refusal::new(Kind::Exists, what).next("use '-m' option to provide a different default"))
    })
}

/// Returns a source of numbers that nobody can guess: a keyed hash of a counter, with a key from the system.
#[expect(clippy::disallowed_methods, reason = "the one place that draws keys")]
fn entropy() -> nacre_pool::engine::Entropy {
    let (key, count) = (RandomState::new(), AtomicU64::new(0));
    Arc::new(move || key.hash_one(count.fetch_add(1, Ordering::Relaxed)))
}

/// Requests by signals, for a pool that exists or is about to be imported.
#[derive(Default)]
struct Orders {
    failing: Arc<Failing>,
    ending: AtomicBool,
    office: OnceLock<Arc<Office>>,
}

impl Orders {
    /// Sets the server once the pool is imported.
    fn are_for(&self, office: &Arc<Office>) {
        let _ = self.office.set(Arc::clone(office));
        if self.ending.load(Ordering::SeqCst) {
            self.end();
        }
    }

    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        // A thread that waits for a device would keep the process from ending.
        self.failing.give_up();
        if let Some(office) = self.office.get() {
            office.ending.store(true, Ordering::SeqCst);
            office.imported.give_up();
            office.tell();
        }
    }
}

fn obey(signals: Signals, orders: Arc<Orders>) -> Result<(), Failure> {
    let act = move || {
        loop {
            match signals.next() {
                Ok(Signal::Interrupt | Signal::Terminate) => orders.end(),
                Ok(Signal::Hangup | Signal::User1) => {}
                Err(error) => return tracing::error!(%error, "signals are not obeyed any more"),
            }
        }
    };
    let thread = thread::Builder::new().name("nacre-signals".to_owned()).spawn(act);
    thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread for signals", &error))
}

/// Waits for an event: a request was carried out, or the end is requested.
fn wait(office: &Office) -> Result<(), Failure> {
    match poll(&mut [PollFd::new(&office.changed, PollFlags::IN)], None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(Failure::io("cannot wait for", "orders", &error.into())),
    }
    // The caller checks the state; there may be nothing to read.
    let _ = rustix::io::read(&office.changed, &mut [0; 8]);
    Ok(())
}

/// Answers the requests of one caller, as long as the pool is imported.
fn answer(caller: &Caller, office: &Arc<Office>) {
    for order in caller.requests() {
        let busy = Busy::new(office);
        if office.ends() {
            return;
        }
        let reply = carry_out(office, order, caller).map_err(|refusal| client::told(&refusal));
        // No lock is held any more: the caller may take its time, until the process ends.
        let until = OnceCell::new();
        let ends = || office.ends() && clock::now() >= *until.get_or_init(|| clock::now() + LAST_ANSWER);
        if caller.send_until(&reply, &ends).is_err() {
            return;
        }
        drop(busy);
    }
}

fn carry_out(office: &Office, order: Command, caller: &Caller) -> Result<Reply, Refusal> {
    let uid = caller.credentials.uid.as_raw();
    let alone = match &order.verb {
        Verb::Fs(request) => request.alone(),
        Verb::Pool(request) => request.changes(),
    };
    let notes = &mut Notes { caller, office, alone, channel: Channel::default() };
    let (imported, mounts) = (&*office.imported, &*office.mounts);
    match order.verb {
        Verb::Fs(request) => {
            let changes = request.changes();
            let _changing = alone.then(|| office.imported.changing.lock());
            let done = fs::run(imported, mounts, request, notes);
            if changes && done.is_ok() {
                mounts.room_changed();
                pool::remember(imported, uid, &order.command);
            }
            done.map(Reply::Fs)
        }
        Verb::Pool(request) => {
            let (changes, ends) = (alone, request.ends());
            let new = request.new_devices();
            match request {
                // Another request may wait for a device, and hold the lock needed here.
                PoolRequest::Export { force: true } => imported.give_up(),
                PoolRequest::Destroy { force: true } => imported.give_up_waiting(),
                PoolRequest::Clear { .. } => imported.failing.try_again(),
                _ => {}
            }
            let _changing = changes.then(|| office.imported.changing.lock());
            if let Some(devices) = &new {
                outside(&imported.name(), devices)?;
            }
            if let (Some(notes), Some(coming)) = (&office.notes, request.opened_devices()) {
                notes.change(|left| left.coming = coming);
            }
            if ends {
                // Afterwards nothing is written any more.
                pool::remember(imported, uid, &order.command);
            }
            let mut done = pool::run(imported, mounts, request, notes);
            if changes && !(ends && done.is_ok()) {
                office.note_devices();
            }
            if let Ok(PoolAnswer::Status(status)) = &mut done {
                status.figures.survives = office.survives();
            }
            if let Ok(PoolAnswer::Listed(figures)) = &mut done {
                figures.survives = office.survives();
                figures.unmounted = office.unmounted.load(Ordering::Relaxed);
            }
            if done.is_ok() {
                if ends {
                    done = ending::end(office, notes).and(done);
                }
                if changes && !ends {
                    pool::remember(imported, uid, &order.command);
                }
                if new.is_some() {
                    keep(office);
                }
            }
            done.map(Reply::Pool)
        }
    }
}

/// Sends notes to the caller; commands that only wait are asked to end when the process does.
struct Notes<'a> {
    caller: &'a Caller,
    office: &'a Office,
    /// Other requests wait for this one, and so its notes do not wait for a slow reader without a deadline.
    alone: bool,
    channel: Channel,
}

impl Progress for Notes<'_> {
    fn note(&mut self, line: &str) -> bool {
        if self.office.ends() {
            return false;
        }
        match self.alone {
            true => self.caller.note(line),
            false => self.caller.note_until(line, &|| self.office.ends()),
        }
    }

    fn give(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.caller.give(bytes, &|| self.office.ends())
    }

    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.caller.take(&mut self.channel, buffer, &|| self.office.ends())
    }
}

/// Writes notes to standard error, which the process that started this one reads until the pool answers.
struct Said;

impl Progress for Said {
    fn note(&mut self, line: &str) -> bool {
        crate::report::tell(line);
        true
    }
}
