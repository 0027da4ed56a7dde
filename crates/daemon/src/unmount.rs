//! Unmounts that the system refuses, and mounts whose process was killed.

use crate::{
    clock, control, door,
    failure::{Exit, Failure},
    mountinfo, opening,
    plan::MountPlan,
    report::path_text,
};
use std::{path::Path, time::Duration};

/// How long the kernel may take to end a mount whose process has ended.
const RINGS_DOWN: Duration = Duration::from_secs(5);
/// How often it is asked.
const LOOK: Duration = Duration::from_millis(10);

/// An unmount that the system refused.
pub fn refused(mountpoint: &str, error: &std::io::Error) -> Failure {
    let mut failure = Failure::io("cannot unmount", mountpoint, error);
    let told = crate::failure::reason(error);
    if told.starts_with("cannot unmount") {
        failure.what = told;
    }
    match failure.exit {
        Exit::Busy => failure
            .next(format!("somebody uses it; `fuser -vm {mountpoint}` says who, `nacre umount --lazy {mountpoint}` detaches it at once")),
        _ => failure,
    }
}

/// Takes away what a killed process of ours left at a mount point: nobody can use it any more, and
/// it would only be in the way.
///
/// # Errors
/// What the system says to its removal.
pub fn clear(mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    clear_of(mountpoint, &["nacre".to_owned(), "bindfs".to_owned(), door::subtype(plan)])
}

/// Takes away what a killed process left at a mount point, where its subtype is one of these.
///
/// # Errors
/// As [`clear`].
pub fn clear_of(mountpoint: &Path, types: &[String]) -> Result<(), Failure> {
    use rustix::io::Errno;
    // Attributes may be answered from what the kernel has kept; this is always asked. A mount whose
    // process is just ending says ECONNABORTED, or ECANCELED as long as its rings are being taken
    // down. By a thread without descriptors: a pool's process, and one of several mounts (`--daemon`), come
    // here as well, and what answers may be a mount of theirs.
    let ask = || fusewire::apart(|| Ok(rustix::fs::statfs(mountpoint).err())).unwrap_or_default();
    let mut lost = None;
    // The kernel tells nobody when the rings are down.
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
