//! Refused unmounts, and removal of dead mounts.

use crate::{
    clock, control, door,
    failure::{Exit, Failure},
    mount_users, mountinfo, opening,
    plan::MountPlan,
    report::path_text,
};
use std::{path::Path, time::Duration};

/// Deadline for the kernel to end a mount whose process has ended.
const RINGS_DOWN: Duration = Duration::from_secs(5);
/// Interval of polling.
const LOOK: Duration = Duration::from_millis(10);

/// Makes the failure for an unmount that the system refused.
pub fn refused(mountpoint: &str, error: &std::io::Error) -> Failure {
    let mut failure = Failure::io("cannot unmount", mountpoint, error);
    let told = crate::failure::reason(error);
    if told.starts_with("cannot unmount") {
        failure.what = told;
    }
    match failure.exit {
        Exit::Busy => {
            failure.next(format!("{}; `nacre umount --lazy {mountpoint}` detaches it at once", users(mountpoint)))
        }
        _ => failure,
    }
}

/// Describes the users of the topmost mount at a mount point, or where to look for them.
fn users(mountpoint: &str) -> String {
    // Without a mount table, none can be named.
    let table = mountinfo::read().unwrap_or_default();
    let entry = table.iter().rfind(|entry| path_text(&entry.mountpoint) == mountpoint);
    let named = entry.map(|entry| mount_users::named(entry.identity())).unwrap_or_default();
    if !named.is_empty() {
        return named;
    }
    let below = Path::new(mountpoint);
    match table.iter().find(|entry| entry.mountpoint != below && entry.mountpoint.starts_with(below)) {
        Some(nested) => format!("{} is mounted in it", path_text(&nested.mountpoint)),
        None => format!("another user or the kernel uses it: `fuser -vm {mountpoint}` as root shows more"),
    }
}

/// Removes a dead mount of a killed process of ours at a mount point: it is unusable, and would be in the way.
///
/// # Errors
/// The system refuses its removal.
pub fn clear(mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    clear_of(mountpoint, &["nacre".to_owned(), "bindfs".to_owned(), door::subtype(plan)])
}

/// Removes a dead mount of a killed process at a mount point, if its subtype is one of these.
///
/// # Errors
/// As [`clear`].
pub fn clear_of(mountpoint: &Path, types: &[String]) -> Result<(), Failure> {
    use rustix::io::Errno;
    // The kernel may answer attributes from its cache; statfs(2) is always a request. A mount whose process is just
    // ending answers ECONNABORTED, or ECANCELED while its rings are being torn down. Called by a thread without
    // descriptors: a process that serves a pool or several mounts (`--daemon`) comes here as well, and the mount
    // may be its own.
    let ask = || fusewire::apart(|| Ok(rustix::fs::statfs(mountpoint).err())).unwrap_or_default();
    let mut lost = None;
    // The kernel does not notify when the rings are torn down.
    clock::look_until(RINGS_DOWN, LOOK, || {
        lost = ask();
        lost != Some(Errno::CANCELED)
    });
    if !matches!(lost, Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED)) {
        return Ok(());
    }
    let place = fusewire::apart(|| Ok(control::lexical(mountpoint)))
        .map_err(|error| opening::unusable(mountpoint, &error))??;
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == place);
    let ours =
        |kind: &str| kind.strip_prefix("fuse.").is_some_and(|subtype| types.iter().any(|known| known == subtype));
    let Some(entry) = entry.filter(|entry| ours(&entry.kind)) else { return Ok(()) };
    let text = path_text(&place);
    tracing::warn!("the mount at {text} had lost its process and is taken away");
    fusewire::unmount(entry.identity(), true).map_err(|error| refused(&text, &error))
}
