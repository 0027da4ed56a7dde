//! Verbs on datasets: what `nacre fs` (called as `zfs`: `zfs`) means.
//!
//! Called by the process that owns the pool, one request after the other or at once: each verb
//! looks at the whole pool first, refuses what cannot be, and only then changes something. Where
//! and how it looks is in the command. The words are ZFS'.
//!
//! ```text
//!  objects      what there is: names, stored and inherited values, mount points
//!  list values  list, get: which objects, which values          space      userspace, groupspace
//!  making       create, clone, snapshot, bookmark               diff       diff
//!  destroying   destroy                                         holds      hold, release, holds
//!  rolling      rollback                                        mounting   mount, unmount
//!  sharing      share, unshare
//!  renaming     rename, promote
//!  setting      set, inherit                                    schedule   snapshot by a schedule
//!  sending      send                                            receiving  receive
//!  following    receive: new names, and what is gone, of a difference of everything
//!  newer_state  a pool that another machine writes to goes on to what that one has committed
//!  moves        what a change of names and properties means for mounts
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

/// What can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsRequest {
    /// Objects with their properties.
    List(Listing),
    /// A new file system, or a clone.
    Create(ToCreate),
    /// The end of something.
    Destroy(ToDestroy),
    /// Other properties.
    Set(ToSet),
    /// What is mounted.
    Mounted,
    /// Mounts.
    Mount(ToMount),
    /// The end of mounts; with `force` even of those in use.
    Unmount {
        /// Which.
        what: ToUnmount,
        /// Even in use.
        force: bool,
    },
    /// Mounts are shared as their properties say: this one, or all.
    Share(Option<String>),
    /// They are shared no more.
    Unshare(ToUnmount),
    /// Snapshots.
    Snapshot(ToSnapshot),
    /// Snapshots by a schedule.
    Schedule(ToSchedule),
    /// Back to a snapshot.
    RollBack(ToRollBack),
    /// A clone that is no clone any more: this file system.
    Promote(String),
    /// Another name.
    Rename(ToRename),
    /// A bookmark.
    Bookmark {
        /// Of this snapshot or bookmark.
        of: String,
        /// Its name.
        name: String,
    },
    /// Holds set or released.
    Hold(ToHold),
    /// The holds of snapshots.
    Holds {
        /// Of these.
        snapshots: Vec<String>,
        /// And of the same names below.
        recursive: bool,
    },
    /// What has changed from a snapshot to another, or to now. Each [`Difference`] comes as a note,
    /// in JSON.
    Diff {
        /// The snapshot.
        from: String,
        /// The later one, or a file system; `None`: that of the snapshot.
        to: Option<String>,
    },
    /// What owners use of a file system or snapshot.
    Owners(String),
    /// A stream of snapshots, given as it is made.
    Send(ToSendStream),
    /// A stream of snapshots is taken.
    Receive(ToReceive),
    /// The end of what is half received of a file system.
    AbortReceive(String),
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FsAnswer {
    /// Done, but for what these sentences say.
    Done(Vec<String>),
    /// Objects.
    Listed(Vec<ListedObject>),
    /// What is mounted.
    Mounted(Vec<MountedAt>),
    /// What went.
    Destroyed(Destroyed),
    /// Holds.
    Holds(Vec<Hold>),
    /// What a schedule did.
    Scheduled(Scheduled),
    /// Owners.
    Owners(Vec<OwnerSpace>),
    /// What was sent.
    Sent(SentStream),
    /// What was received.
    Received(ReceivedStream),
}

impl FsRequest {
    /// Whether it changes the pool: such commands are in its history.
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

    /// Whether nothing else that changes names, properties or mounts may happen meanwhile.
    #[must_use]
    pub fn alone(&self) -> bool {
        // A stream takes its time; what it changes in the end is the engine's one commit.
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
