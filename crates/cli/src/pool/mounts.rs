//! The mounts of a pool's file systems, over FUSE, in the process that owns the pool.
//!
//! Made by `process.rs`, used by the verbs through [`Mounts`]. One FUSE mount for each dataset; its snapshots appear in `.zfs/snapshot` of that mount and
//! need none of their own. Invariants:
//! * mounts come and go one at a time, under one lock; a request of a mount never waits for it;
//! * a mount that is listed may have been ended from outside (umount(8)): whoever looks clears it away.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use nacre_admin::{Kind, MountOptions, Mounted, Mounts, Refusal, What, fs as fs_verbs};
use nacre_fuse::{FuseOptions, Mount, MountError};
use nacre_layers::dataset::{Dataset, Gathering, SnapshotDirectory};
use nacre_pool::engine::Pool;
use parking_lot::Mutex;
use rustix::mount::MountFlags;

/// Carries out what `mkdir`, `rmdir` and `mv` in `.zfs/snapshot` ask for: the same verbs as the commands'.
pub type SnapshotVerbs = Arc<dyn Fn(fs_verbs::Request) -> Result<(), Refusal> + Send + Sync>;

/// The mounts of one pool.
pub struct FuseMounts {
    pool: Arc<Pool>,
    live: Mutex<Vec<Arc<Live>>>,
    verbs: Arc<Verbs>,
    /// Writes to all of them that the kernel collects.
    gathering: Arc<Gathering>,
}

/// Set when whoever carries the verbs out stands; until then the directory of snapshots cannot be changed.
type Verbs = std::sync::OnceLock<SnapshotVerbs>;

/// One mount.
struct Live {
    what: What,
    at: PathBuf,
    options: Mutex<MountOptions>,
    /// The directory was made for it.
    made: bool,
    mount: Mount,
    layer: Arc<Dataset>,
}

impl std::fmt::Debug for FuseMounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FuseMounts").field("live", &self.live.lock().len()).finish_non_exhaustive()
    }
}

impl FuseMounts {
    /// No mounts yet.
    #[must_use]
    pub fn new(pool: Arc<Pool>) -> FuseMounts {
        FuseMounts { pool, live: Mutex::default(), verbs: Arc::default(), gathering: Arc::default() }
    }

    /// From now on snapshots can be made and destroyed in `.zfs/snapshot`. The verbs may use these mounts.
    pub fn carry_out(&self, verbs: SnapshotVerbs) {
        // A second one would be the same.
        let _ = self.verbs.set(verbs);
    }

    fn find(&self, what: What) -> Option<Arc<Live>> {
        let mut live = self.live.lock();
        clear_ended(&mut live);
        live.iter().find(|live| live.what == what).cloned()
    }

    fn forget_snapshot(&self, dataset: u64, txg: u64, force: bool) -> Result<(), Refusal> {
        let Some(live) = self.find(What::head(dataset)) else { return Ok(()) };
        if live.layer.forget_snapshot(txg, force) {
            return Ok(());
        }
        Err(Refusal::new(Kind::Busy, format!("cannot unmount the snapshot below '{}': files of it are open", live.at.display()))
            .next("close them, or use -f"))
    }
}

impl Mounts for FuseMounts {
    fn mount(&self, what: What, at: &Path, options: &MountOptions) -> Result<(), Refusal> {
        let source = &options.source;
        let mut all = self.live.lock();
        clear_ended(&mut all);
        if all.iter().any(|live| live.what == what) {
            return Err(Refusal::new(Kind::Busy, format!("cannot mount '{source}': filesystem already mounted")));
        }
        let made = prepare(at, options)?;
        let live = start(self, what, at, options, made).inspect_err(|_| {
            if made {
                remove(at);
            }
        })?;
        all.push(live);
        Ok(())
    }

    fn unmount(&self, what: What, force: bool) -> Result<(), Refusal> {
        if let Some(txg) = what.snapshot
            && self.find(what).is_none()
        {
            return self.forget_snapshot(what.dataset, txg, force);
        }
        let mut all = self.live.lock();
        clear_ended(&mut all);
        let Some(place) = all.iter().position(|live| live.what == what) else { return Ok(()) };
        let Some(live) = all.get(place).cloned() else { return Ok(()) };
        end(&live, force)?;
        drop(all.remove(place));
        // One of its requests may wait for this lock.
        drop(all);
        let (at, made) = (live.at.clone(), live.made);
        // Waits for its threads: nothing of the dataset is in use then.
        drop(live);
        if made {
            remove(&at);
        }
        Ok(())
    }

    fn remount(&self, what: What, options: &MountOptions) -> Result<(), Refusal> {
        let Some(live) = self.find(what) else { return Ok(()) };
        let mut now = live.options.lock();
        if *now == *options {
            return Ok(());
        }
        if rustix::process::geteuid().is_root() {
            live.mount
                .remount(flags(options))
                .map_err(|error| Refusal::new(kind(&error), format!("cannot remount '{}': {error}", live.at.display())))?;
        } else if (now.no_exec, now.no_suid, now.no_dev) != (options.no_exec, options.no_suid, options.no_dev) {
            return Err(Refusal::new(
                Kind::Permission,
                format!("cannot remount '{}': only root may change the options of a mount", live.at.display()),
            )
            .next(format!("unmount and mount it: nacre fs unmount {0} && nacre fs mount {0}", options.source)));
        }
        // What is left, reading only and access times, the engine sees to.
        *now = options.clone();
        Ok(())
    }

    fn mounted(&self) -> Vec<Mounted> {
        let mut live = self.live.lock();
        clear_ended(&mut live);
        live.iter().map(|live| Mounted { what: live.what, at: live.at.clone(), options: live.options.lock().clone() }).collect()
    }

    fn settle(&self, datasets: &[u64]) -> Result<(), Refusal> {
        let live: Vec<Arc<Live>> = self.live.lock().clone();
        for live in live.iter().filter(|live| live.what.snapshot.is_none() && datasets.contains(&live.what.dataset)) {
            live.settle()?;
        }
        Ok(())
    }

    fn changed(&self, dataset: u64) {
        if let Some(live) = self.find(What::head(dataset)) {
            live.mount.invalidate_everything();
        }
    }
}

impl Live {
    fn settle(&self) -> Result<(), Refusal> {
        if self.mount.ended() {
            // The kernel has passed everything on before.
            return Ok(());
        }
        self.mount.settle().map_err(|error| {
            Refusal::new(kind(&error), format!("what was written below '{}' could not be passed on: {error}", self.at.display()))
        })
    }
}

/// Snapshots by mkdir and rmdir.
struct Directory {
    pool: Weak<Pool>,
    verbs: Weak<Verbs>,
    dataset: u64,
}

impl Directory {
    /// Has something done with snapshots of the dataset, which has this name now.
    fn ask(&self, request: impl FnOnce(String) -> fs_verbs::Request) -> nacre_vfs::Result<()> {
        let verbs = self.verbs.upgrade().and_then(|verbs| verbs.get().cloned()).ok_or(nacre_vfs::Errno::EROFS)?;
        let pool = self.pool.upgrade().ok_or(nacre_vfs::Errno::EIO)?;
        let refused = |refusal: Refusal| {
            tracing::info!(%refusal, "a snapshot asked for by its directory");
            errno(refusal.kind)
        };
        // The verb has the kernel write back what it holds, which comes in requests that other threads serve.
        let done = fusewire::blocking(|| {
            let name = pool.look().name(self.dataset)?;
            verbs(request(name))
        });
        done.map_err(|error| nacre_vfs::Errno::from_raw(error.0))?.map_err(refused)
    }
}

impl SnapshotDirectory for Directory {
    fn take(&self, name: &str) -> nacre_vfs::Result<()> {
        self.ask(|dataset| fs_verbs::Request::Snapshot(fs_verbs::ToSnapshot { names: vec![format!("{dataset}@{name}")], recursive: false }))
    }

    fn destroy(&self, name: &str) -> nacre_vfs::Result<()> {
        self.ask(|dataset| {
            fs_verbs::Request::Destroy(fs_verbs::ToDestroy {
                target: format!("{dataset}@{name}"),
                recursive: false,
                clones: false,
                force: false,
                deferred: false,
                dry: false,
                keep_below: false,
            })
        })
    }

    fn rename(&self, name: &str, new: &str) -> nacre_vfs::Result<()> {
        self.ask(|dataset| {
            fs_verbs::Request::Rename(fs_verbs::ToRename {
                from: format!("{dataset}@{name}"),
                to: format!("{dataset}@{new}"),
                parents: false,
                recursive: false,
                unmounted: false,
                force: false,
            })
        })
    }
}

fn errno(kind: Kind) -> nacre_vfs::Errno {
    use nacre_vfs::Errno;
    match kind {
        Kind::NotFound => Errno::ENOENT,
        Kind::Exists => Errno::EEXIST,
        Kind::Busy => Errno::EBUSY,
        Kind::Invalid => Errno::EINVAL,
        Kind::NoSpace => Errno::ENOSPC,
        Kind::Quota => Errno::EDQUOT,
        Kind::Permission => Errno::EPERM,
        Kind::Io => Errno::EIO,
    }
}

fn start(mounts: &FuseMounts, what: What, at: &Path, options: &MountOptions, made: bool) -> Result<Arc<Live>, Refusal> {
    let source = &options.source;
    let refused = |error: nacre_vfs::Errno| Refusal::new(Kind::Io, format!("cannot mount '{source}': {error}"));
    let layer = match what.snapshot {
        None => {
            let directory = Directory { pool: Arc::downgrade(&mounts.pool), verbs: Arc::downgrade(&mounts.verbs), dataset: what.dataset };
            Dataset::open_among(&mounts.pool, what.dataset, &mounts.gathering)
                .map_err(refused)?
                .with_snapshot_directory(Box::new(directory))
        }
        Some(txg) => Dataset::snapshot(&mounts.pool, what.dataset, txg).map_err(refused)?,
    };
    let layer = Arc::new(layer);
    let root = rustix::process::geteuid().is_root();
    let fuse = FuseOptions {
        fsname: source.clone(),
        read_only: options.read_only || what.snapshot.is_some(),
        // Others than the owner of a pool see it where the system lets him show it (fuse.conf).
        allow_other: root || may_show_others(),
        noexec: options.no_exec,
        nosuid: options.no_suid,
        nodev: options.no_dev,
        noatime: options.no_atime,
        ..FuseOptions::new(at)
    };
    let mount = Mount::start(Arc::clone(&layer) as Arc<_>, fuse).map_err(|error| match error {
        MountError::Mount(cause) => {
            let refusal = Refusal::new(kind(&cause), format!("cannot mount '{source}': {cause}"));
            let within = !root && !may_show_others() && cause.to_string().contains("failed to access mountpoint");
            // fusermount3 is root's, and is kept out of a mount that is its owner's alone.
            if within { refusal.next(NESTED) } else { refusal }
        }
        other => Refusal::new(Kind::Io, format!("cannot mount '{source}': {other}")),
    })?;
    Ok(Arc::new(Live { what, at: at.to_owned(), options: Mutex::new(options.clone()), made, mount, layer }))
}

/// What an ordinary user can do where one mount is to lie within another.
const NESTED: &str = "an ordinary user's mount can lie within another only where /etc/fuse.conf has user_allow_other; \
                      or give it a mountpoint of its own: nacre fs set mountpoint=PATH";

/// Whether the system lets ordinary users show their mounts to others (mount.fuse3(8)).
fn may_show_others() -> bool {
    fs::read_to_string("/etc/fuse.conf").is_ok_and(|text| text.lines().any(|line| line.trim() == "user_allow_other"))
}

/// Ends a mount; what the kernel holds of it is passed on before.
fn end(live: &Live, force: bool) -> Result<(), Refusal> {
    let refused = |error: &io::Error| {
        let why = if error.kind() == io::ErrorKind::ResourceBusy { "pool or dataset is busy".to_owned() } else { error.to_string() };
        let refusal = Refusal::new(kind(error), format!("cannot unmount '{}': {why}", live.at.display()));
        if error.kind() == io::ErrorKind::ResourceBusy {
            refusal.next("end the processes that use it (fuser -m), or use -f")
        } else {
            refusal
        }
    };
    if !force {
        return live.mount.unmount(false).map_err(|error| refused(&error));
    }
    live.settle()?;
    if live.mount.unmount(false).is_err() {
        live.mount.unmount(true).map_err(|error| refused(&error))?;
        live.mount.abort();
    }
    Ok(())
}

/// Takes those that were ended from outside off the list.
fn clear_ended(live: &mut Vec<Arc<Live>>) {
    live.retain(|live| !live.mount.ended());
}

/// Makes the directory where it is missing (answers whether), and refuses one that holds something.
fn prepare(at: &Path, options: &MountOptions) -> Result<bool, Refusal> {
    let source = &options.source;
    let refused = |error: &io::Error| {
        Refusal::new(kind(error), format!("cannot mount '{source}': failed to create mountpoint '{}': {error}", at.display()))
    };
    // What a process that was killed has left there would only be in the way.
    crate::serve::clear_of(at, &["nacre".to_owned()]).map_err(|failure| Refusal::new(Kind::Busy, failure.what).next(failure.next))?;
    match fs::read_dir(at) {
        Ok(mut entries) => {
            if !options.overlay && entries.next().is_some() {
                let refusal = Refusal::new(Kind::Busy, format!("cannot mount '{}': directory is not empty", at.display()));
                return Err(refusal.next("empty it, choose another mountpoint, or mount over it with -O"));
            }
            Ok(false)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(at).map_err(|error| refused(&error))?;
            Ok(true)
        }
        Err(error) => Err(refused(&error)),
    }
}

/// Removes a mount point that was made for a mount. It may have come into use by others.
fn remove(at: &Path) {
    if let Err(error) = fs::remove_dir(at) {
        tracing::debug!(%error, at = %at.display(), "a mount point stays");
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

fn kind(error: &io::Error) -> Kind {
    match error.kind() {
        io::ErrorKind::NotFound => Kind::NotFound,
        io::ErrorKind::PermissionDenied => Kind::Permission,
        io::ErrorKind::ResourceBusy => Kind::Busy,
        io::ErrorKind::StorageFull => Kind::NoSpace,
        io::ErrorKind::QuotaExceeded => Kind::Quota,
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput => Kind::Invalid,
        _ => Kind::Io,
    }
}
