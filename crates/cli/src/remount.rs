//! `mount -o remount,...`: changes the flags of an existing mount, and never starts a second
//! process.
//!
//! [`flags`] is pure. A mount served through FUSE is changed as a whole (mount and superblock); one
//! that the kernel serves alone shares its superblock with the source, so only the mount itself is
//! changed.

use nacre_daemon::{
    control,
    failure::{Exit, Failure},
    kernel_engine,
    mount_flags::flags,
    mountinfo,
    plan::Remount,
    report::path_text,
};
use rustix::mount::{MountFlags, mount_remount};

/// Carries out the command.
///
/// # Errors
/// No mount of ours there, a flag that cannot be changed, or the kernel's error.
pub fn run(remount: &Remount) -> Result<(), Failure> {
    let mountpoint = control::lexical(&remount.mountpoint)?;
    let text = path_text(&mountpoint);
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let entry = entry.ok_or_else(|| Failure::new(format!("nothing is mounted at {text}")).exit(Exit::NotFound))?;
    let peers = control::find_at(std::slice::from_ref(&mountpoint)).peers;
    let peer = peers.iter().find(|peer| peer.report.mountpoint == text);
    let of_the_kernel = kernel_engine::records()?.iter().any(|report| report.mountpoint == text);
    if peer.is_none() && !of_the_kernel && !is_of_a_pool(&entry) {
        return Err(Failure::new(format!("what is mounted at {text} is no mount of nacre")).exit(Exit::NotFound));
    }
    if peer.is_some_and(|peer| peer.report.stays_read_only) && remount.flags.contains(&"rw") {
        let what = format!("{text} shows a snapshot, or was mounted with --immutable or --no-open: it stays read-only");
        return Err(Failure::new(what).next("mount it again without that option"));
    }
    let mut flags = flags(&entry.options, &remount.flags);
    if of_the_kernel {
        flags |= MountFlags::BIND;
    }
    mount_remount(&mountpoint, flags, c"").map_err(|error| Failure::io("cannot remount", text, &error.into()))
}

/// Returns whether the mount is a file system of an imported pool.
fn is_of_a_pool(entry: &mountinfo::MountEntry) -> bool {
    let pool = entry.source.to_str().and_then(|source| source.split(['/', '@']).next());
    entry.kind == "fuse.nacre" && pool.is_some_and(|pool| nacre_daemon::pool::client::find(pool).is_some())
}
