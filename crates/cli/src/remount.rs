//! `mount -o remount,...`: other flags for a mount of ours, never a second daemon.
//!
//! [`flags`] is pure. A mount served through FUSE is changed as a whole (mount and superblock); one
//! that the kernel serves alone shares its superblock with the source, so only the mount itself is
//! changed.

use crate::{
    control,
    failure::{Exit, Failure},
    kernel_engine, mountinfo,
    plan::Remount,
    report::path_text,
};
use rustix::mount::{MountFlags, mount_remount};
use std::path::Path;

/// A word of the mount table, the word that takes it back, and its flag.
const FLAGS: &[(&str, &str, MountFlags)] = &[
    ("ro", "rw", MountFlags::RDONLY),
    ("nosuid", "suid", MountFlags::NOSUID),
    ("nodev", "dev", MountFlags::NODEV),
    ("noexec", "exec", MountFlags::NOEXEC),
    ("noatime", "atime", MountFlags::NOATIME),
    ("nodiratime", "diratime", MountFlags::NODIRATIME),
    ("relatime", "strictatime", MountFlags::RELATIME),
    ("nosymfollow", "symfollow", NOSYMFOLLOW),
];

/// `MS_NOSYMFOLLOW` (linux/mount.h).
const NOSYMFOLLOW: MountFlags = MountFlags::from_bits_retain(256);

/// Carries out the command.
///
/// # Errors
/// No mount of ours there, a change that it cannot take, or what the kernel says.
pub fn run(remount: &Remount) -> Result<(), Failure> {
    let mountpoint = control::lexical(&remount.mountpoint)?;
    let text = path_text(&mountpoint);
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let entry = entry.ok_or_else(|| Failure::new(format!("nothing is mounted at {text}")).exit(Exit::NotFound))?;
    let peers = control::find(&control::whose(std::slice::from_ref(&mountpoint))).peers;
    let peer = peers.iter().find(|peer| peer.report.mountpoint == text);
    let of_the_kernel = kernel_engine::records()?.iter().any(|report| report.mountpoint == text);
    if peer.is_none() && !of_the_kernel && !is_of_a_pool(&entry) {
        return Err(Failure::new(format!("what is mounted at {text} is no mount of nacre")).exit(Exit::NotFound));
    }
    if peer.is_some_and(|peer| peer.report.immutable) && remount.flags.contains(&"rw") {
        return Err(Failure::new(format!("{text} is mounted with --immutable and cannot become writable"))
            .next("unmount and mount again"));
    }
    let mut flags = flags(&entry.options, &remount.flags);
    if of_the_kernel {
        flags |= MountFlags::BIND;
    }
    mount_remount(&mountpoint, flags, c"").map_err(|error| Failure::io("cannot remount", text, &error.into()))
}

/// Whether it is a file system of a pool that is imported.
fn is_of_a_pool(entry: &mountinfo::MountEntry) -> bool {
    let pool = entry.source.to_str().and_then(|source| source.split(['/', '@']).next());
    entry.kind == "fuse.nacre" && pool.is_some_and(|pool| crate::pool::client::find(pool).is_some())
}

/// Adds flags to a mount that was just made, without touching its superblock.
///
/// # Errors
/// EPERM for anybody but root.
pub fn narrow(mountpoint: &Path, words: &[&'static str]) -> Result<(), Failure> {
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let options = entry.map(|entry| entry.options).unwrap_or_default();
    let changed = mount_remount(mountpoint, flags(&options, words) | MountFlags::BIND, c"");
    changed.map_err(|error| {
        Failure::io(&format!("cannot set {} on", words.join(",")), path_text(mountpoint), &error.into())
    })
}

/// The flags that a mount has, changed by words in the order given.
fn flags(has: &[String], words: &[&'static str]) -> MountFlags {
    let mut flags = MountFlags::empty();
    for word in has.iter().map(String::as_str).chain(words.iter().copied()) {
        for (set, clear, flag) in FLAGS {
            if word == *set {
                flags |= *flag;
            } else if word == *clear {
                flags &= !*flag;
            }
        }
        match word {
            "noatime" => flags &= !(MountFlags::RELATIME | MountFlags::STRICTATIME),
            "relatime" => flags &= !(MountFlags::NOATIME | MountFlags::STRICTATIME),
            "strictatime" => flags = (flags & !MountFlags::NOATIME) | MountFlags::STRICTATIME,
            _ => {}
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_change_only_what_they_name() {
        let has: Vec<String> = ["rw", "nosuid", "nodev", "relatime"].map(String::from).to_vec();
        let kept = MountFlags::NOSUID | MountFlags::NODEV;
        for (words, expected) in [
            (&[][..], kept | MountFlags::RELATIME),
            (&["ro"], kept | MountFlags::RELATIME | MountFlags::RDONLY),
            (&["ro", "rw"], kept | MountFlags::RELATIME),
            (&["suid", "noexec"], MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RELATIME),
            (&["noatime"], kept | MountFlags::NOATIME),
            (&["strictatime"], kept | MountFlags::STRICTATIME),
            (&["nosymfollow"], kept | MountFlags::RELATIME | NOSYMFOLLOW),
        ] {
            assert_eq!(flags(&has, words), expected, "{words:?}");
        }
    }
}
