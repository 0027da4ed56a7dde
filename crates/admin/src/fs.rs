//! Verbs on datasets: `nacre fs` (called as `zfs`: `zfs`).
//!
//! Called by the process that owns the pool, one request after the other or at once: each verb
//! checks its request against the whole pool first, refuses what is impossible, and only then
//! changes anything. Output is formatted by the command. The words are ZFS'.
//!
//! ```text
//!  objects      lookup of objects: names, stored and inherited values, mount points
//!  list values  list, get: which objects, which values          space      userspace, groupspace
//!  making       create, clone, snapshot, bookmark               diff       diff
//!  destroying   destroy                                         holds      hold, release, holds
//!  rolling      rollback                                        mounting   mount, unmount
//!  sharing      share, unshare
//!  renaming     rename, promote
//!  setting      set, inherit                                    schedule   snapshot by a schedule
//!  sending      send                                            receiving  receive
//!  following    receive -R: renamed and destroyed snapshots and datasets of an incremental stream
//!  newer_state  a read-only pool moves to the state that the writing machine has committed
//!  moves        effect of changed names and properties on mounts
//! ```

mod destroying;
mod diff;
mod following;
mod holds;
mod list;
mod making;
mod mounting;
mod moves;
pub(crate) mod newer_state;
mod objects;
mod receiving;
mod renaming;
mod rolling;
mod schedule;
mod sending;
mod setting;
mod sharing;
mod space;
#[cfg(test)]
mod tests;
mod values;

pub use destroying::{Destroyed, ToDestroy};
pub use diff::{Difference, FileKind, How};
pub use holds::{Hold, ToHold};
pub use list::{From, ListedObject, Listing, ObjectType, Shown, Types};
pub use making::{ToCreate, ToSnapshot};
pub use mounting::{MountedAt, ToMount, ToUnmount, leave_all, mount_all, unmount_all};
pub use newer_state::follow;
pub(crate) use objects::missing;
pub use receiving::{ReceivedStream, ToReceive};
pub use renaming::ToRename;
pub use rolling::ToRollBack;
pub use schedule::{Period, SchedulePart, Scheduled, ToSchedule};
pub use sending::{Resumed, SentStream, ToSendStream};
pub use setting::{NewValue, ToSet};
pub use space::OwnerSpace;

use nacre_pool::PoolError;
use nacre_pool::error::LimitRefusal;
use serde::{Deserialize, Serialize};

use crate::{Imported, Kind, Mounts, Progress, Refusal};

/// A request on datasets.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsRequest {
    /// Lists objects with their properties.
    List(Listing),
    /// Creates a file system, or a clone.
    Create(ToCreate),
    /// Destroys an object.
    Destroy(ToDestroy),
    /// Sets or inherits properties.
    Set(ToSet),
    /// Lists the mounts.
    Mounted,
    /// Mounts file systems.
    Mount(ToMount),
    /// Unmounts file systems; with `force` even those in use.
    Unmount {
        /// The file systems.
        what: ToUnmount,
        /// Even those in use.
        force: bool,
    },
    /// Shares mounts as their properties say: this one, or all.
    Share(Option<String>),
    /// Ends the sharing of mounts.
    Unshare(ToUnmount),
    /// Makes snapshots.
    Snapshot(ToSnapshot),
    /// Makes and destroys snapshots by a schedule.
    Schedule(ToSchedule),
    /// Rolls a file system back to a snapshot.
    RollBack(ToRollBack),
    /// Promotes this clone.
    Promote(String),
    /// Renames an object.
    Rename(ToRename),
    /// Makes a bookmark.
    Bookmark {
        /// The snapshot or bookmark to bookmark.
        of: String,
        /// Name of the new bookmark.
        name: String,
    },
    /// Sets or releases holds.
    Hold(ToHold),
    /// Lists the holds of snapshots.
    Holds {
        /// The snapshots.
        snapshots: Vec<String>,
        /// Includes snapshots of the same names of descendants.
        recursive: bool,
    },
    /// Lists the differences between a snapshot and a later one, or the live file system. Each
    /// [`Difference`] is sent as a note, in JSON.
    Diff {
        /// The earlier snapshot.
        from: String,
        /// The later one, or a file system; `None`: the file system of the snapshot.
        to: Option<String>,
    },
    /// Lists space by owner of a file system or snapshot.
    Owners(String),
    /// Sends a stream of snapshots, while it is made.
    Send(ToSendStream),
    /// Receives a stream of snapshots.
    Receive(ToReceive),
    /// Discards a partially received state of a file system.
    AbortReceive(String),
}

/// Answer to an [`FsRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsAnswer {
    /// Done; the sentences are warnings about parts that failed.
    Done(Vec<String>),
    /// Objects.
    Listed(Vec<ListedObject>),
    /// The mounts.
    Mounted(Vec<MountedAt>),
    /// The destroyed objects.
    Destroyed(Destroyed),
    /// Holds.
    Holds(Vec<Hold>),
    /// Result of a schedule.
    Scheduled(Scheduled),
    /// Space by owner.
    Owners(Vec<OwnerSpace>),
    /// Summary of a sent stream.
    Sent(SentStream),
    /// Summary of a received stream.
    Received(ReceivedStream),
}

impl FsRequest {
    /// Whether it changes the pool: then it is entered in the pool's history.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::List(_)
            | Self::Mounted
            | Self::Mount(_)
            | Self::Unmount { .. }
            | Self::Share(_)
            | Self::Unshare(_)
            | Self::Holds { .. }
            | Self::Diff { .. }
            | Self::Send(_)
            | Self::Owners(_) => false,
            Self::Receive(what) => !what.dry,
            Self::AbortReceive(_) => true,
            Self::Destroy(what) => !what.dry,
            Self::Create(new) => !new.dry,
            Self::Schedule(what) => !what.dry,
            Self::Set(_) | Self::Snapshot(_) | Self::RollBack(_) | Self::Promote(_) | Self::Rename(_) => true,
            Self::Bookmark { .. } | Self::Hold(_) => true,
        }
    }

    /// Whether it excludes other requests that change names, properties or mounts.
    #[must_use]
    pub fn alone(&self) -> bool {
        // A stream takes its time; whenever it changes something, it takes the lock (`Imported::changing`) itself.
        self.changes() && !matches!(self, Self::Receive(_))
            || matches!(self, Self::Mount(_) | Self::Unmount { .. } | Self::Share(_) | Self::Unshare(_))
    }
}

/// Carries out a request.
///
/// # Errors
/// Why it was not done.
pub fn run(
    pool: &Imported,
    mounts: &dyn Mounts,
    request: FsRequest,
    progress: &mut dyn Progress,
) -> Result<FsAnswer, Refusal> {
    if pool.read_only && request.changes() {
        let refusal = Refusal::new(Kind::Permission, format!("cannot change '{}': pool is read-only", pool.name()));
        return Err(refusal.next("export it and import it without '-o readonly=on'"));
    }
    let done = |()| FsAnswer::Done(Vec::new());
    match request {
        FsRequest::List(listing) => list::run(pool, mounts, &listing).map(FsAnswer::Listed),
        FsRequest::Create(new) => making::create(pool, mounts, &new).map(FsAnswer::Done),
        FsRequest::Destroy(what) => destroying::destroy(pool, mounts, &what).map(FsAnswer::Destroyed),
        FsRequest::Set(what) => setting::set(pool, mounts, &what, progress).map(FsAnswer::Done),
        FsRequest::Mounted => mounting::list(pool, mounts).map(FsAnswer::Mounted),
        FsRequest::Mount(what) => mounting::mount(pool, mounts, &what).map(FsAnswer::Done),
        FsRequest::Unmount { what, force } => mounting::unmount_asked(pool, mounts, &what, force).map(FsAnswer::Done),
        FsRequest::Share(name) => sharing::share(pool, mounts, name.as_deref()).map(FsAnswer::Done),
        FsRequest::Unshare(what) => sharing::unshare(pool, mounts, &what).map(done),
        FsRequest::Snapshot(what) => making::snapshot(pool, mounts, &what).map(done),
        FsRequest::Schedule(what) => schedule::run(pool, mounts, &what).map(FsAnswer::Scheduled),
        FsRequest::RollBack(what) => rolling::roll_back(pool, mounts, &what).map(done),
        FsRequest::Promote(name) => renaming::promote(pool, mounts, &name).map(done),
        FsRequest::Rename(what) => renaming::rename(pool, mounts, &what).map(FsAnswer::Done),
        FsRequest::Bookmark { of, name } => making::bookmark(pool, mounts, &of, &name).map(done),
        FsRequest::Hold(what) => holds::hold(pool, mounts, &what).map(done),
        FsRequest::Holds { snapshots, recursive } => {
            holds::list(pool, mounts, &snapshots, recursive).map(FsAnswer::Holds)
        }
        FsRequest::Diff { from, to } => diff::run(pool, mounts, &from, to.as_deref(), progress).map(done),
        FsRequest::Owners(name) => space::run(pool, mounts, &name).map(FsAnswer::Owners),
        FsRequest::Send(what) => sending::send(pool, mounts, &what, progress).map(FsAnswer::Sent),
        FsRequest::Receive(what) => receiving::receive(pool, mounts, &what, progress).map(FsAnswer::Received),
        FsRequest::AbortReceive(name) => receiving::abort(pool, &name).map(done),
    }
}

/// An error of the engine while doing something, in ZFS' words.
fn refused(doing: &str, error: &PoolError) -> Refusal {
    let (kind, why) = match error {
        PoolError::NoSpace => (Kind::NoSpace, "out of space".to_owned()),
        PoolError::Quota { .. } => (Kind::Quota, "out of space".to_owned()),
        PoolError::Limit { why: LimitRefusal::BelowUse, .. } => {
            (Kind::Quota, "size is less than current used or reserved space".to_owned())
        }
        PoolError::Limit { .. } => (Kind::NoSpace, "size is greater than available space".to_owned()),
        PoolError::CountLimit { .. } => (Kind::Quota, error.to_string()),
        PoolError::Property(error) => (Kind::Invalid, error.to_string()),
        PoolError::Busy => (Kind::Busy, error.to_string()),
        other => return Refusal::pool(doing, other),
    };
    Refusal::new(kind, format!("{doing}: {why}"))
}
