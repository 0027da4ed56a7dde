//! Snapshots created, destroyed and renamed by mkdir, rmdir and mv in `.zfs/snapshot`: carried out by the verbs of
//! the commands.

use std::sync::{Arc, OnceLock, Weak};

use nacre_admin::{Kind, Refusal, fs as fs_verbs};
use nacre_pool::engine::Pool;
use nacre_poolfs::dataset::SnapshotDirectory;

/// Carries out the requests of `mkdir`, `rmdir` and `mv` in `.zfs/snapshot`: the same verbs as for the commands.
pub type SnapshotVerbs = Arc<dyn Fn(fs_verbs::FsRequest) -> Result<(), Refusal> + Send + Sync>;

/// Set once the verbs can be carried out; until then the directory of snapshots is read-only.
pub(super) type Verbs = OnceLock<SnapshotVerbs>;

/// The directory `.zfs/snapshot` of a dataset.
pub(super) struct Directory {
    pub pool: Weak<Pool>,
    pub verbs: Weak<Verbs>,
    pub dataset: u64,
}

impl Directory {
    /// Carries out a request for the dataset's snapshots; `request` gets the dataset's present name.
    fn ask(&self, request: impl FnOnce(String) -> fs_verbs::FsRequest) -> nacre_vfs::Result<()> {
        let verbs = self.verbs.upgrade().and_then(|verbs| verbs.get().cloned()).ok_or(nacre_vfs::Errno::EROFS)?;
        let pool = self.pool.upgrade().ok_or(nacre_vfs::Errno::EIO)?;
        let refused = |refusal: Refusal| {
            tracing::info!(%refusal, "a snapshot asked for by its directory");
            errno(refusal.kind)
        };
        // The verb has the kernel write back dirty pages, by WRITE requests that other threads serve.
        let done = fusewire::blocking(|| {
            let name = pool.catalog_view().name(self.dataset)?;
            verbs(request(name))
        });
        done.map_err(|error| nacre_vfs::Errno::from_raw(error.0))?.map_err(refused)
    }
}

impl SnapshotDirectory for Directory {
    fn take(&self, name: &str) -> nacre_vfs::Result<()> {
        self.ask(|dataset| {
            fs_verbs::FsRequest::Snapshot(fs_verbs::ToSnapshot {
                names: vec![format!("{dataset}@{name}")],
                ..Default::default()
            })
        })
    }

    fn destroy(&self, name: &str, force: bool) -> nacre_vfs::Result<()> {
        self.ask(|dataset| {
            fs_verbs::FsRequest::Destroy(fs_verbs::ToDestroy {
                target: format!("{dataset}@{name}"),
                recursive: false,
                clones: false,
                force,
                deferred: false,
                dry: false,
                keep_below: false,
            })
        })
    }

    fn rename(&self, name: &str, new: &str) -> nacre_vfs::Result<()> {
        self.ask(|dataset| {
            fs_verbs::FsRequest::Rename(fs_verbs::ToRename {
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
        Kind::Io | Kind::Unreachable => Errno::EIO,
    }
}
