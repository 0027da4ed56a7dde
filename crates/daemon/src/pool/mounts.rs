//! The FUSE mounts of a pool's datasets, in the process that owns the pool.
//!
//! Made by `process.rs`, used by the verbs through [`Mounts`]. One FUSE mount for each dataset; where the system
//! does not let the user mount below his own mounts, one shared mount for nested datasets (`carrier.rs`). Snapshots
//! appear in `.zfs/snapshot` and need no mount of their own. Invariants:
//! * mounts are made and ended one at a time, under one lock; a request of a mount never waits for it;
//! * a listed mount may have been ended from outside (umount(8)): each reader of the list removes ended ones.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use fusewire::{Identity, apart};
use nacre_admin::{
    AtOneMoment, Kind, MountOptions, Mounted, Mounts, Refusal, What,
    system_places::{self, PlaceState},
};
use nacre_fuse::{HeldWrites, Survival};
use nacre_pool::engine::{Changes, Pool};
use nacre_poolfs::dataset::{Dataset, StoppedWrites, WritebackGroup};
use nacre_sys::{descriptors, proc_looks::ProcLooks};
use parking_lot::{Mutex, MutexGuard};
use rustix::mount::MountFlags;

pub use super::snapshot_directory::SnapshotVerbs;
use super::{
    carrier::{self, Carrier},
    left::{LeftDoor, LeftMount, PoolNotes},
    mount_point::{self, MountPoint, PlaceRules, kind},
    place_operations,
    shares::Shares,
    snapshot_directory::{Directory, Verbs},
    telling::Telling,
};
use crate::{control_sockets::ControlSockets, mount_users, report::path_text};

/// Time for the kernel's RELEASE: it is sent some time after close(2) has returned, so a file that seems open may
/// be closed already.
const CLOSING: Duration = Duration::from_millis(500);
/// Deadline for a file server to release a mount.
const LETTING_GO: Duration = Duration::from_secs(2);
/// Further time where nobody but file servers uses the mount.
const LETTING_GO_UNDER_LOAD: Duration = Duration::from_secs(20);
const ASKED_AGAIN: Duration = Duration::from_millis(20);
/// Deadline for the end of an unused mount: the kernel ends it before umount(2) returns, but the threads of a busy
/// machine may notice that later.
const ENDING: Duration = Duration::from_secs(10);

/// Deadline for file systems on the path of a stream's mount point.
const ANSWERING: Duration = Duration::from_secs(10);

/// How a mount is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unmount {
    /// In all mount namespaces; refused while it is used in one of them.
    Everywhere,
    /// In all mount namespaces, even while the mount is used.
    Forced,
    /// In this mount namespace only: others keep the mount.
    Here,
}

/// The FUSE mounts of one pool.
pub struct FuseMounts {
    pool: Arc<Pool>,
    live: Arc<Mutex<Vec<Arc<Live>>>>,
    verbs: Arc<Verbs>,
    /// Write-back of the kernel for all mounts.
    writeback: Arc<WritebackGroup>,
    telling: Telling,
    /// Shares of the mounts by file servers of this machine.
    shares: Arc<Shares>,
    /// The pool is untrusted: its mounts give nobody more rights (`nosuid`, `nodev`), whatever properties and
    /// options request.
    harmless: bool,
    /// Rules for mount points.
    rules: PlaceRules,
    /// Directories that were made for mounts that are about to be made.
    places: Mutex<Vec<(PathBuf, MountPoint)>>,
    /// The thread that examines untrusted mount points.
    looks: ProcLooks,
    /// Handoff state, where mounts survive this process.
    notes: Option<Arc<PoolNotes>>,
}

/// One mounted dataset or snapshot.
struct Live {
    /// Control socket of the mount, closed first.
    _socket: Option<Arc<ControlSockets>>,
    /// Number of the mount in the handoff state.
    number: u64,
    what: What,
    at: PathBuf,
    options: Mutex<MountOptions>,
    place: MountPoint,
    layer: Arc<Dataset>,
    carrier: Arc<Carrier>,
    /// The dataset is grafted into another dataset's mount.
    within: bool,
    notes: Option<Arc<PoolNotes>>,
}

impl Drop for Live {
    fn drop(&mut self) {
        // It is removed from the handoff state before its descriptors are closed.
        self.notes.iter().for_each(|notes| notes.forget(self.number));
        tracing::info!(mountpoint = %path_text(&self.at), "unmounted");
    }
}

impl std::fmt::Debug for FuseMounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FuseMounts").field("live", &self.live.lock().len()).finish_non_exhaustive()
    }
}

impl FuseMounts {
    /// Makes an empty set of mounts.
    #[must_use]
    pub fn new(
        pool: Arc<Pool>,
        shares: Shares,
        harmless: bool,
        rules: PlaceRules,
        notes: Option<Arc<PoolNotes>>,
    ) -> FuseMounts {
        FuseMounts {
            telling: Telling::start(&pool, notes.clone()),
            pool,
            live: Arc::default(),
            verbs: Arc::default(),
            writeback: Arc::default(),
            looks: ProcLooks::default(),
            shares: Arc::new(shares),
            harmless,
            rules,
            places: Mutex::default(),
            notes,
        }
    }

    /// Takes over the mounts of the previous process.
    pub fn go_on(&self, left: Vec<LeftMount>) {
        let mut all = self.live.lock();
        let mut ended = Vec::new();
        let (own, mut within): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|mount| matches!(mount.door, LeftDoor::Own { .. }));
        for mount in own {
            let (at, source) = (mount.at.clone(), mount.options.source.clone());
            let of_it =
                |other: &mut LeftMount| matches!(other.door, LeftDoor::Within { mount: of, .. } if of == mount.what);
            let members: Vec<LeftMount> = within.extract_if(.., of_it).collect();
            let numbers: Vec<u64> = members.iter().chain([&mount]).map(|mount| mount.number).collect();
            match self.resume(mount, members) {
                Ok(live) if !live.is_empty() => all.extend(live),
                // It was about to be made, or had ended.
                Ok(_) => tracing::info!(mountpoint = %path_text(&at), source, "not mounted any more"),
                Err(refusal) => tracing::error!(mountpoint = %path_text(&at), %refusal, "a mount does not go on"),
            }
            for number in numbers {
                if !all.iter().any(|live| live.number == number) {
                    self.notes.iter().for_each(|notes| notes.forget(number));
                    ended.push(at.clone());
                }
            }
        }
        // Changes of names that the killed process had not notified the kernel of.
        for live in all.iter().filter(|live| live.what.snapshot.is_none()) {
            live.carrier.forget_control(live.what.dataset);
        }
        within.iter().for_each(|lost| self.notes.iter().for_each(|notes| notes.forget(lost.number)));
        drop(all);
        // All handles to files without a name are restored by now.
        if let Err(error) = self.pool.let_left_go() {
            tracing::warn!(%error, "files without a name take room until the next import");
        }
        // Dead mounts are unmounted. Their paths may lead through mounts that were taken over.
        for at in ended {
            let cleared = crate::unmount::clear_of(&at, &["nacre".to_owned()]);
            cleared.unwrap_or_else(|failure| tracing::warn!("a mount that has ended stays: {failure}"));
        }
    }

    fn resume(&self, mount: LeftMount, members: Vec<LeftMount>) -> Result<Vec<Arc<Live>>, Refusal> {
        let LeftMount { number, what, at, options, place, door } = mount;
        let LeftDoor::Own { memory, device } = door else { return Ok(Vec::new()) };
        let memory = descriptors::take_over(memory).and_then(Survival::taken_over);
        let mut memory = memory.map_err(|error| Refusal::new(Kind::Io, error.to_string()))?;
        if device.is_none() || !memory.can_resume() {
            memory.let_go();
            return memory.why_not().map_or(Ok(Vec::new()), |why| Err(Refusal::new(Kind::Io, why)));
        }
        memory.next_life();
        let carried = || {
            let layer = self.left_layer(what, &options)?;
            let mut put_in = Vec::new();
            for member in &members {
                let LeftDoor::Within { on, .. } = member.door else { continue };
                put_in.push((self.left_layer(member.what, &member.options)?, on, member.options.clone()));
            }
            let head = what.snapshot.is_none();
            let carrier = Carrier::start(&layer, head, &place, &options, Some(memory.clone()), &put_in)?;
            Ok((layer, put_in, carrier))
        };
        // Otherwise its users would wait forever.
        let (layer, put_in, carrier) = carried().inspect_err(|_: &Refusal| memory.let_go())?;
        tracing::info!(mountpoint = %path_text(&at), source = options.source, "the mount goes on");
        let carrier = Arc::new(carrier);
        let socket = self.socket(&carrier, &options.source);
        let mut live =
            vec![self.live((what, number), (&at, place), &options, (layer, Arc::clone(&carrier), socket), false)];
        for (member, (layer, ..)) in members.into_iter().zip(put_in) {
            let LeftMount { number, what, at, options, place, .. } = member;
            live.push(self.live((what, number), (&at, place), &options, (layer, Arc::clone(&carrier), None), true));
        }
        Ok(live)
    }

    /// Opens a dataset of the previous process, with the orphan inodes that are still open.
    fn left_layer(&self, what: What, options: &MountOptions) -> Result<Arc<Dataset>, Refusal> {
        let layer = self.opened(what, options)?;
        if what.snapshot.is_none() {
            let failed = |error: &dyn std::fmt::Display| {
                Refusal::new(Kind::Io, format!("cannot go on with '{}': {error}", options.source))
            };
            let nameless = self.pool.dataset(what.dataset).map_err(|error| failed(&error))?.files().left();
            layer.keep_nameless(&nameless).map_err(|error| failed(&error))?;
        }
        Ok(layer)
    }

    /// Starts sharing the mounts, once those of the previous process answer.
    pub fn begin_sharing(&self) {
        let all = self.live.lock().clone();
        self.shares.begin(|| all.iter().for_each(|live| self.reshare(live)));
    }

    fn socket(&self, carrier: &Arc<Carrier>, source: &str) -> Option<Arc<ControlSockets>> {
        let (live, shares) = (Arc::downgrade(&self.live), Arc::downgrade(&self.shares));
        let ended = move || {
            let (Some(live), Some(shares)) = (live.upgrade(), shares.upgrade()) else { return };
            let there = listed(&live);
            shares.retain(&there.iter().map(|live| live.what.dataset).collect::<Vec<u64>>());
        };
        self.telling.of(carrier, source, ended)
    }

    fn live(
        &self,
        (what, number): (What, u64),
        (at, place): (&Path, MountPoint),
        options: &MountOptions,
        (layer, carrier, socket): (Arc<Dataset>, Arc<Carrier>, Option<Arc<ControlSockets>>),
        within: bool,
    ) -> Arc<Live> {
        Arc::new(Live {
            _socket: socket,
            number,
            what,
            at: at.to_owned(),
            options: Mutex::new(options.clone()),
            place,
            layer,
            carrier,
            within,
            notes: self.notes.clone(),
        })
    }

    fn opened(&self, what: What, options: &MountOptions) -> Result<Arc<Dataset>, Refusal> {
        let layer = self.layer(what).map_err(|error| self.unreadable(what, options, error))?;
        layer.set_quiet(options.no_atime);
        Ok(Arc::new(layer))
    }

    /// Makes the refusal for a dataset that cannot be read, naming the lost metadata as far as the engine knows it.
    fn unreadable(&self, what: What, options: &MountOptions, error: nacre_vfs::Errno) -> Refusal {
        let source = &options.source;
        let dataset = self.pool.dataset(what.dataset);
        let Err(why) = dataset else {
            return Refusal::new(Kind::Io, format!("cannot mount '{source}': {error}"));
        };
        let pool = source.split(['/', '@']).next().unwrap_or(source);
        let next = format!(
            "`nacre pool check {pool}` lists what cannot be read. Its snapshots may be whole: `nacre fs clone` makes one a \
             file system. Older states of the pool may be as well: once it is exported, `nacre pool import -T 0 -o \
             readonly=on {pool}` lists those that are kept, and shows one with its number in the place of 0"
        );
        Refusal::new(Kind::Io, format!("cannot mount '{source}': its metadata is lost or damaged: {why}")).next(next)
    }

    /// Mounts a dataset so that the mount survives this process, if that is requested.
    fn carrier(
        &self,
        layer: &Arc<Dataset>,
        (what, number): (What, u64),
        (at, place): (&Path, &MountPoint),
        options: &MountOptions,
    ) -> Result<Carrier, Refusal> {
        let head = what.snapshot.is_none();
        let Some(notes) = &self.notes else { return Carrier::start(layer, head, place, options, None, &[]) };
        let memory = Survival::small().map_err(|error| {
            Refusal::new(Kind::Io, format!("cannot mount '{}' so that it survives: {error}", options.source))
        })?;
        if notes.guarded.service.is_some() {
            memory.set_stored();
        }
        let (at, place_left, of_mount) = (at.to_owned(), place.clone(), options.clone());
        let about = |device| LeftMount {
            number,
            what,
            at: at.clone(),
            options: of_mount.clone(),
            place: place_left.clone(),
            door: LeftDoor::Own { memory: memory.descriptor(), device },
        };
        notes.put(about(None));
        let carrier = Carrier::start(layer, head, place, options, Some(memory.clone()), &[]);
        let carrier = carrier.inspect_err(|_| notes.forget(number))?;
        if let Some(why) = memory.why_not() {
            notes.guarded.memory.give_up(&format!("the mount of '{}' does not go on: {why}", options.source));
        }
        notes.put(about(memory.device()));
        memory.serves();
        Ok(carrier)
    }

    /// Returns the directory to mount on, made if need be and not done already.
    fn place(&self, at: &Path, options: &MountOptions) -> Result<MountPoint, Refusal> {
        // The directory may be in another mount of the pool.
        let is_there = |place: &MountPoint| {
            let path = place.path().to_owned();
            place_operations::apart(place.path(), move || fs::metadata(path)).is_ok_and(|found| found.is_dir())
        };
        let made = self.places.lock().extract_if(.., |(there, place)| there == at && is_there(place)).next();
        made.map_or_else(|| MountPoint::prepare(at, options, &self.rules), |(_, place)| Ok(place))
    }

    fn allowed(&self, options: &MountOptions) -> MountOptions {
        MountOptions {
            no_suid: options.no_suid || self.harmless,
            no_dev: options.no_dev || self.harmless,
            overlay: options.overlay && (!self.harmless || options.place_was_named),
            ..options.clone()
        }
    }

    /// Sets the verbs for `.zfs/snapshot`: from now on snapshots can be made and destroyed there. The verbs may use
    /// these mounts.
    pub fn carry_out(&self, verbs: SnapshotVerbs) {
        // A second call would set the same.
        let _ = self.verbs.set(verbs);
    }

    /// Makes the kernel write back dirty pages of all mounts, as far as it can. No mount is kept from ending
    /// meanwhile.
    pub fn pass_on(&self) {
        let held: Vec<HeldWrites> = self.live.lock().iter().map(|live| live.carrier.mount.held()).collect();
        for held in held {
            if let Err(error) = held.pass_on() {
                // The writer gets the error from fsync(2).
                tracing::debug!(%error, "what was written below a mount could not be passed on");
            }
        }
    }

    fn find(&self, what: What) -> Option<Arc<Live>> {
        let live = listed(&self.live);
        live.iter().find(|live| live.what == what).cloned()
    }

    fn layer(&self, what: What) -> nacre_vfs::Result<Dataset> {
        match what.snapshot {
            None => {
                let directory = Directory {
                    pool: Arc::downgrade(&self.pool),
                    verbs: Arc::downgrade(&self.verbs),
                    dataset: what.dataset,
                };
                let layer = Dataset::open_among(&self.pool, what.dataset, &self.writeback)?;
                Ok(layer.with_snapshot_directory(Box::new(directory)))
            }
            Some(txg) => Dataset::snapshot(&self.pool, what.dataset, txg),
        }
    }

    fn start(
        &self,
        all: &[Arc<Live>],
        what: What,
        at: &Path,
        place: MountPoint,
        options: &MountOptions,
    ) -> Result<Arc<Live>, Refusal> {
        let source = &options.source;
        let layer = self.opened(what, options)?;
        let head = what.snapshot.is_none();
        let number = self.notes.as_ref().map_or(0, |notes| notes.number());
        let above = if head { carrier::at(at, all.iter().map(|live| &live.carrier)) } else { None };
        let within = above.is_some();
        let carrier = match above {
            Some((carrier, on)) => {
                let of = all.iter().find(|live| !live.within && Arc::ptr_eq(&live.carrier, &carrier));
                if let (Some(notes), Some(of)) = (&self.notes, of) {
                    let (at, place, options) = (at.to_owned(), place.clone(), options.clone());
                    let door = LeftDoor::Within { mount: of.what, on };
                    notes.put(LeftMount { number, what, at, options, place, door });
                }
                let put_in = carrier.put_in(&layer, (at, on), options);
                put_in.inspect_err(|_| self.notes.iter().for_each(|notes| notes.forget(number)))?;
                carrier
            }
            None => {
                let reserved = if head { self.shares.before_mount(&options.sharing) } else { None };
                let carrier = self.carrier(&layer, (what, number), (at, &place), options)?;
                if let (Some(reserved), Some(mount)) = (reserved, carrier.mount.identity())
                    && mount.device.1 != reserved.number
                {
                    // Something else was mounted or unmounted at the same moment, so the mount got another device
                    // number.
                    tracing::warn!(source, number = mount.device.1, "clients of NFS may have to mount again");
                }
                Arc::new(carrier)
            }
        };
        let socket = if within { None } else { self.socket(&carrier, source) };
        Ok(self.live((what, number), (at, place), options, (layer, carrier, socket), within))
    }

    /// Shares a mount that is not shared at present.
    fn reshare(&self, live: &Live) {
        if live.what.snapshot.is_none() {
            let options = live.options.lock().clone();
            self.shares.set(live.what.dataset, &options.source, &live.at, &options.sharing);
        }
    }

    /// Refuses where clients of the kernel's NFS server hold files of a mount open: without the share, they could
    /// not close them.
    fn free_of_clients(&self, live: &Live) -> Result<(), Refusal> {
        let Some(identity) = live.carrier.mount.identity().filter(|_| live.what.snapshot.is_none()) else {
            return Ok(());
        };
        let clients = self.shares.holders(live.what.dataset, identity.device);
        if clients.is_empty() {
            return Ok(());
        }
        let local = mount_users::named(identity);
        let all = if local.is_empty() { clients } else { format!("{local}; {clients}") };
        Err(busy(live, format!("{all}: end that, or use -f, which cuts it off")))
    }

    /// Removes the shares of a mount that is about to end; false if there are none. File servers have its root
    /// open, and release it a moment later.
    #[expect(clippy::disallowed_methods, reason = "a server notifies nobody of the release")]
    fn let_go(&self, live: &Live) -> bool {
        let device = live.carrier.mount.identity().map(|identity| identity.device).filter(|_| !live.within);
        if live.what.snapshot.is_some() || !self.shares.release(live.what.dataset, device) {
            return false;
        }
        let released = |within: Duration| {
            let end = Instant::now() + within;
            while !live.within && live.carrier.mount.in_use().unwrap_or(false) {
                if Instant::now() >= end {
                    return false;
                }
                std::thread::sleep(ASKED_AGAIN);
            }
            true
        };
        if !released(LETTING_GO) && live.carrier.mount.identity().is_some_and(mount_users::are_file_servers) {
            released(LETTING_GO_UNDER_LOAD);
        }
        true
    }

    fn forget_snapshot(&self, dataset: u64, txg: u64, force: bool) -> Result<(), Refusal> {
        let Some(live) = self.find(What::head(dataset)) else { return Ok(()) };
        let numbers = live.layer.numbers_of_snapshot(txg).filter(|_| live.carrier.mount.opens_unasked() && !force);
        if let Some((name, _)) = &numbers {
            let below = live.at.join(".zfs/snapshot").join(name);
            if let Some(below) = mounted_below(&below) {
                let what =
                    format!("cannot unmount the snapshot '{name}': something is mounted at '{}'", below.display());
                return Err(Refusal::new(Kind::Busy, what).next("unmount that first"));
            }
            live.carrier.forget_snapshot(name);
        }
        // For files that are opened without a request, the kernel only sends FORGET when it drops the inode.
        let known = || numbers.as_ref().is_some_and(|(_, (from, to))| live.carrier.mount.knows_any(*from, *to));
        let closing = CLOSING.max(live.carrier.forgets_within());
        if live.carrier.mount.wait_closed(closing, &mut || !known() && live.layer.forget_snapshot(txg, force)) {
            return Ok(());
        }
        let what = format!("cannot unmount the snapshot below '{}': files of it are open", live.at.display());
        Err(Refusal::new(Kind::Busy, what).next("close them, or use -f"))
    }

    fn unmount_as(&self, what: What, how: Unmount) -> Result<(), Refusal> {
        let force = how == Unmount::Forced;
        if let Some(txg) = what.snapshot
            && self.find(what).is_none()
        {
            return self.forget_snapshot(what.dataset, txg, force);
        }
        let mut all = listed(&self.live);
        let Some(live) = all.iter().find(|live| live.what == what).cloned() else { return Ok(()) };
        let mut leaving = vec![Arc::clone(&live)];
        if !live.within {
            leaving
                .extend(all.iter().filter(|other| other.within && Arc::ptr_eq(&other.carrier, &live.carrier)).cloned());
        }
        if leaving.len() > 1 && !force {
            return Err(busy(&live, "unmount those below it first, or use -f"));
        }
        if how == Unmount::Everywhere {
            free_elsewhere(&live)?;
        }
        // Of nested mounts, the last ones are on top.
        while let Some(last) = leaving.pop() {
            if !force {
                self.free_of_clients(&last)?;
            }
            self.let_go(&last);
            if let Err(refusal) = end(&last, force) {
                self.reshare(&last);
                return Err(refusal);
            }
            let patience = if how == Unmount::Here { CLOSING } else { ENDING };
            if !force && !last.within && !last.carrier.mount.ends_within(patience) {
                // Another mount namespace or an open file keeps it: it continues to be served.
                return if how == Unmount::Here { Ok(()) } else { Err(held(&last)) };
            }
            all.retain(|other| other.what != last.what);
        }
        // A mount point inside another dataset of the pool stays, for imports that cannot make one (read-only).
        let inside =
            live.place.path().parent().is_some_and(|above| all.iter().any(|other| above.starts_with(&other.at)));
        // One of its requests may wait for this lock.
        drop(all);
        let place = live.place.clone();
        // Waits for its threads: afterwards nothing of the dataset is in use.
        drop(live);
        if !inside {
            place.remove();
        }
        Ok(())
    }
}

impl Mounts for FuseMounts {
    fn mount(&self, what: What, at: &Path, options: &MountOptions) -> Result<(), Refusal> {
        let options = &self.allowed(options);
        let source = &options.source;
        // umount(2) returns before this process is notified.
        if let Some(live) = self.find(what)
            && !live.carrier.mount.attached()
        {
            live.carrier.mount.ends_within(CLOSING);
        }
        let mut all = listed(&self.live);
        if all.iter().any(|live| live.what == what) {
            return Err(Refusal::new(Kind::Busy, format!("cannot mount '{source}': filesystem already mounted")));
        }
        let place = self.place(at, options)?;
        let live = self.start(&all, what, at, place.clone(), options).inspect_err(|_| place.remove())?;
        tracing::info!(mountpoint = %path_text(at), source, "mounted");
        all.push(live);
        if what.snapshot.is_none() {
            self.shares.set(what.dataset, source, at, &options.sharing);
        }
        drop(all);
        // Where there is little room, writes are reserved from the first one on.
        self.writeback.look_again();
        Ok(())
    }

    fn make_place(&self, at: &Path, options: &MountOptions) -> Result<(), Refusal> {
        let place = MountPoint::prepare(at, &self.allowed(options), &self.rules)?;
        self.places.lock().push((at.to_owned(), place));
        Ok(())
    }

    fn not_mounted(&self) {
        // Nested ones first.
        let mut places = std::mem::take(&mut *self.places.lock());
        places.drain(..).rev().for_each(|(_, place)| place.remove());
    }

    fn unmount(&self, what: What, force: bool) -> Result<(), Refusal> {
        self.unmount_as(what, if force { Unmount::Forced } else { Unmount::Everywhere })
    }

    fn detach(&self, what: What) -> Result<(), Refusal> {
        self.unmount_as(what, Unmount::Here)
    }

    fn is_free(&self, what: What) -> Result<(), Refusal> {
        let Some(live) = self.find(what).filter(|live| !live.within) else { return Ok(()) };
        self.free_of_clients(&live)?;
        // A file server that holds it open is no user.
        let shared = self.let_go(&live);
        let used = live.carrier.mount.in_use();
        if shared {
            self.reshare(&live);
        }
        match used {
            Ok(true) => Err(busy(&live, in_use(&live))),
            Ok(false) => Ok(()),
            Err(error) => {
                tracing::debug!(%error, at = %live.at.display(), "it will turn out whether this mount is in use");
                Ok(())
            }
        }
    }

    fn hidden(&self) -> Vec<u64> {
        let live: Vec<Arc<Live>> = listed(&self.live).clone();
        let mounts: Vec<Identity> = live.iter().filter_map(|live| live.carrier.mount.identity()).collect();
        let hidden = fusewire::hidden(&mounts).unwrap_or_else(|error| {
            tracing::warn!(%error, "it cannot be seen which mounts are hidden");
            Vec::new()
        });
        let is_hidden = |live: &&Arc<Live>| live.carrier.mount.identity().is_some_and(|mount| hidden.contains(&mount));
        live.iter()
            .filter(is_hidden)
            .filter(|live| live.what.snapshot.is_none())
            .map(|live| live.what.dataset)
            .collect()
    }

    fn examine(&self, at: &Path) -> Option<PlaceState> {
        let at = at.to_owned();
        // The path may lead through mounts of this pool.
        let examined = self.looks.within(ANSWERING, move || apart(|| Ok(system_places::examine(&at))));
        match examined {
            Ok(Some(Ok(state))) => Some(state),
            Ok(None) => None,
            Ok(Some(Err(error))) | Err(error) => {
                tracing::warn!(%error, "a mount point cannot be examined");
                None
            }
        }
    }

    fn tidy(&self, at: &Path) {
        // It may have content of its own, or existed before for another purpose.
        if let Err(error) = mount_point::tidy(at) {
            tracing::debug!(at = %at.display(), %error, "the directory of a mount stays");
        }
    }

    fn remount(&self, what: What, options: &MountOptions) -> Result<(), Refusal> {
        let Some(live) = self.find(what) else { return Ok(()) };
        let mut now = live.options.lock();
        let options = &MountOptions { place_was_named: now.place_was_named, ..self.allowed(options) };
        if *now == *options {
            return Ok(());
        }
        if what.snapshot.is_none() {
            self.shares.set(what.dataset, &options.source, &live.at, &options.sharing);
        }
        let same = MountOptions { sharing: options.sharing.clone(), ..now.clone() } == *options;
        let note = || self.notes.iter().for_each(|notes| notes.changed(what, options));
        if same {
            *now = options.clone();
            note();
            return Ok(());
        }
        if live.carrier.set_rules(what.dataset, options) {
            // A shared mount, whose flags apply to all datasets in it.
        } else if rustix::process::geteuid().is_root() {
            // Without OPEN requests, the kernel makes each write durable.
            let synchronous = options.synchronous && live.carrier.mount.opens_unasked();
            let flags = flags(options) | if synchronous { MountFlags::SYNCHRONOUS } else { MountFlags::empty() };
            live.carrier.mount.remount(flags).map_err(|error| {
                Refusal::new(kind(&error), format!("cannot remount '{}': {error}", live.at.display()))
            })?;
        } else if (now.no_exec, now.no_suid, now.no_dev) != (options.no_exec, options.no_suid, options.no_dev) {
            return Err(Refusal::new(
                Kind::Permission,
                format!("cannot remount '{}': only root may change the options of a mount", live.at.display()),
            )
            .next(format!("unmount and mount it: nacre fs unmount {0} && nacre fs mount {0}", options.source)));
        }
        // The engine implements read-only and access times.
        live.layer.set_quiet(options.no_atime);
        *now = options.clone();
        note();
        Ok(())
    }

    fn begins_later(&self, what: What) -> Option<String> {
        let live = self.find(what)?;
        let options = live.options.lock();
        let later = !options.no_atime && live.carrier.mount.opens_unasked();
        later.then(|| format!("access times of '{}' are noted from its next mount on", options.source))
    }

    fn share(&self, dataset: u64) -> Result<(), Refusal> {
        let Some(live) = self.find(What::head(dataset)) else { return Ok(()) };
        self.shares.stop(dataset);
        self.reshare(&live);
        match self.shares.failure(dataset) {
            None => Ok(()),
            Some(why) => {
                let source = live.options.lock().source.clone();
                Err(Refusal::new(Kind::Invalid, format!("cannot share '{source}': {why}")))
            }
        }
    }

    fn unshare(&self, dataset: u64) {
        self.shares.stop(dataset);
    }

    fn share_failure(&self, dataset: u64) -> Option<String> {
        self.shares.failure(dataset)
    }

    fn room_changed(&self) {
        self.writeback.look_again();
    }

    fn mounted(&self) -> Vec<Mounted> {
        let live = listed(&self.live);
        live.iter()
            .map(|live| Mounted { what: live.what, at: live.at.clone(), options: live.options.lock().clone() })
            .collect()
    }

    fn settle(&self, datasets: &[u64]) -> Result<(), Refusal> {
        let live: Vec<Arc<Live>> = self.live.lock().clone();
        for live in live.iter().filter(|live| live.what.snapshot.is_none() && datasets.contains(&live.what.dataset)) {
            live.settle()?;
        }
        Ok(())
    }

    fn at_one_moment(&self, datasets: &[u64], act: &mut AtOneMoment<'_>) -> Result<(), Refusal> {
        // Most dirty pages are written back while users continue.
        self.settle(datasets)?;
        let concerned = |live: &&Arc<Live>| live.what.snapshot.is_none() && datasets.contains(&live.what.dataset);
        let live: Vec<Arc<Live>> = self.live.lock().iter().filter(concerned).cloned().collect();
        let mut stopped: Vec<StoppedWrites> = live.iter().map(|live| live.layer.stop_writes()).collect();
        if stopped.iter().any(StoppedWrites::any) {
            self.settle(datasets)?;
            stopped.iter().for_each(StoppedWrites::insist);
            self.settle(datasets)?;
        }
        act(&mut || stopped.clear())
    }

    fn replace(&self, dataset: u64, replace: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        let Some(live) = self.find(What::head(dataset)) else { return replace() };
        // The kernel unmounts mounts on directories whose dentries are invalidated.
        if let Some(below) = mounted_below(&live.at) {
            let what = format!(
                "cannot change the files of '{}': something is mounted at '{}'",
                live.at.display(),
                below.display()
            );
            return Err(Refusal::new(Kind::Busy, what).next("unmount it"));
        }
        live.carrier.mount.replacing();
        live.layer.hold();
        replace().inspect_err(|_| {
            live.layer.stays();
            live.carrier.mount.stays();
        })?;
        live.layer.replaced();
        live.carrier.replaced(&live.layer);
        Ok(())
    }

    fn changed(&self, dataset: u64, changes: &Changes) {
        if let Some(live) = self.find(What::head(dataset)) {
            live.carrier.changed(&live.layer, changes);
            for txg in &changes.snapshots {
                // Processes with open files of it have a snapshot open that does not exist any more.
                live.layer.forget_snapshot(txg.0, true);
            }
        }
    }

    fn root_changed(&self, dataset: u64) {
        if let Some(live) = self.find(What::head(dataset)) {
            live.carrier.control_changed(dataset);
        }
    }
}

impl Live {
    fn settle(&self) -> Result<(), Refusal> {
        if self.carrier.mount.ended() {
            // The kernel has written everything back before.
            return Ok(());
        }
        self.carrier.mount.flush().map_err(|error| {
            Refusal::new(
                kind(&error),
                format!("what was written below '{}' could not be passed on: {error}", self.at.display()),
            )
        })
    }
}

/// Returns advice that names the users of a mount, as far as they can be seen.
fn in_use(live: &Live) -> String {
    let users = live.carrier.mount.identity().map(mount_users::named).unwrap_or_default();
    if users.is_empty() {
        "it is in use, by the kernel or another user: `fuser -vm` says more; -f cuts all users off".to_owned()
    } else {
        format!("{users}: end that, or use -f, which cuts it off (its files answer ENOTCONN)")
    }
}

/// Refuses where another mount namespace keeps the mount, or where a mount in no tree is kept by open files.
fn free_elsewhere(live: &Live) -> Result<(), Refusal> {
    let mount = &live.carrier.mount;
    let Some(identity) = mount.identity().filter(|_| !live.within) else { return Ok(()) };
    if !fusewire::kept_by(identity).is_empty() || !mount.attached() && !mount.ends_within(CLOSING) {
        return Err(held(live));
    }
    Ok(())
}

/// Makes the refusal for users in other mount namespaces, or of a mount that is in no tree.
fn held(live: &Live) -> Refusal {
    let what = format!("cannot unmount '{}' everywhere: pool or dataset is busy", live.at.display());
    Refusal::new(Kind::Busy, what).next(in_use(live))
}

fn busy(live: &Live, next: impl Into<String>) -> Refusal {
    Refusal::new(Kind::Busy, format!("cannot unmount '{}': pool or dataset is busy", live.at.display())).next(next)
}

/// Ends a mount; dirty pages are written back before.
fn end(live: &Live, force: bool) -> Result<(), Refusal> {
    if live.within {
        return if live.carrier.take_out(live.what.dataset, &live.at, force) {
            Ok(())
        } else {
            Err(busy(live, in_use(live)))
        };
    }
    let mount = &live.carrier.mount;
    let is_hidden =
        || mount.identity().is_some_and(|mount| fusewire::hidden(&[mount]).is_ok_and(|hidden| !hidden.is_empty()));
    let refused = |error: &io::Error| match error.kind() {
        io::ErrorKind::ResourceBusy if is_hidden() => {
            let what =
                format!("cannot unmount '{}': something is mounted over a directory above it", live.at.display());
            Refusal::new(Kind::Busy, what).next("unmount that first, or use -f")
        }
        io::ErrorKind::ResourceBusy => busy(live, in_use(live)),
        _ => Refusal::new(kind(error), format!("cannot unmount '{}': {error}", live.at.display())),
    };
    if !force {
        // A mount that is detached here would be aborted: nobody writes its users' dirty pages back for us.
        if is_hidden() {
            live.settle()?;
        }
        return mount.unmount(false).map_err(|error| refused(&error));
    }
    if let Err(refusal) = live.settle() {
        // The mount ends all the same: by force, or because the process ends.
        tracing::error!(%refusal, "a mount ends without all that was written to it");
    }
    if mount.unmount(false).is_err() {
        let users = mount.identity().map(mount_users::named).unwrap_or_default();
        tracing::warn!(at = %live.at.display(), users, "a mount is cut off from its users");
        // Nothing can take it out of the tree: it stays as it is.
        if is_hidden() {
            return mount.unmount(true).map_err(|error| refused(&error));
        }
        // Abort comes before the unmount: afterwards nobody could force its end, and a handler that waits for
        // another request would wait forever.
        mount.abort();
        mount.unmount(true).map_err(|error| refused(&error))?;
    }
    Ok(())
}

/// Returns the mount point of another mount below this path.
fn mounted_below(at: &Path) -> Option<PathBuf> {
    let entries = crate::mountinfo::read().unwrap_or_default();
    entries.into_iter().map(|entry| entry.mountpoint).find(|place| place != at && place.starts_with(at))
}

/// Returns the list without mounts that were ended from outside. These are dropped without the lock: the drop waits
/// for their threads and callers.
fn listed(live: &Mutex<Vec<Arc<Live>>>) -> MutexGuard<'_, Vec<Arc<Live>>> {
    loop {
        let mut all = live.lock();
        let ended: Vec<Arc<Live>> = all.extract_if(.., |live| live.carrier.mount.ended()).collect();
        if ended.is_empty() {
            return all;
        }
        drop(all);
        drop(ended);
    }
}

fn flags(options: &MountOptions) -> MountFlags {
    let choices = [
        (options.read_only, MountFlags::RDONLY),
        (options.no_exec, MountFlags::NOEXEC),
        (options.no_suid, MountFlags::NOSUID),
        (options.no_dev, MountFlags::NODEV),
        (options.no_atime, MountFlags::NOATIME),
    ];
    choices.into_iter().filter(|(wanted, _)| *wanted).fold(MountFlags::empty(), |all, (_, flag)| all | flag)
}
