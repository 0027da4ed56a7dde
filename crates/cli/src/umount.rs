//! `nacre umount`: asks the process that serves a mount to end it, and unmounts mounts without a
//! process.

use nacre_daemon::{
    control::{self, Peer, Request},
    failure::{Exit, Failure},
    kernel_engine, mountinfo,
    report::path_text,
    runtime::Whose,
    unmount::refused,
};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Unmounts all named mounts in order, and continues after failures, as umount(8) does. Each
/// failure is printed as it happens; the returned exit code is that of the first.
pub fn run(lazy: bool, mountpoints: &[PathBuf]) -> ExitCode {
    // Only this user's mounts: for a mount of another user the kernel unmounts, and that user's
    // process is not involved.
    let mut peers = control::find(&Whose::Ours).peers;
    let mut first = None;
    for mountpoint in mountpoints {
        let done = control::lexical(mountpoint).and_then(|mountpoint| one(lazy, &mountpoint, &mut peers));
        if let Err(failure) = done {
            let code = failure.report("nacre");
            first.get_or_insert(code);
        }
    }
    first.unwrap_or(ExitCode::SUCCESS)
}

fn one(lazy: bool, mountpoint: &Path, peers: &mut Vec<Peer>) -> Result<(), Failure> {
    let text = path_text(mountpoint);
    // The topmost of several mounts at one mount point is the last in the mount table; among the
    // answering ones, the youngest comes first.
    let at =
        |detached| peers.iter().position(|peer| peer.report.mountpoint == text && peer.report.detached == detached);
    let (seen, detached) = (at(false), at(true));
    if let Some(place) = seen {
        return peers.remove(place).ask(&Request::Unmount { lazy }).map(drop);
    }
    if let Some(record) = nacre_daemon::cage::find::record(mountpoint)?
        .filter(|record| record.mountpoint == mountpoint || record.directory == mountpoint)
    {
        return nacre_daemon::cage::engines::engine_of(&record)?.detach(&record, lazy);
    }
    let mounted = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let Some(entry) = mounted else {
        if let Some(place) = detached {
            // A mount that only other mount namespaces contain.
            return peers.remove(place).ask(&Request::Unmount { lazy }).map(drop);
        }
        return Err(Failure::new(format!("nothing is mounted at {text}"))
            .exit(Exit::NotFound)
            .next("`nacre status` lists the mounts"));
    };
    let of_the_kernel = kernel_engine::records()?.iter().any(|report| report.mountpoint == text);
    if !of_the_kernel && !entry.kind.starts_with("fuse") {
        return Err(Failure::new(format!("what is mounted at {text} ({}) is no mount of nacre", entry.kind))
            .next("umount(8) unmounts it"));
    }
    fusewire::unmount(entry.identity(), lazy).map_err(|error| refused(&text, &error))?;
    // Reading the records drops those of mounts that are gone.
    kernel_engine::records().map(drop)
}
