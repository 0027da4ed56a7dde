//! Converts words of the mount table to flags of mount(2). [`flags`] is pure.

use crate::{failure::Failure, mountinfo, report::path_text};
use rustix::mount::{MountFlags, mount_remount};
use std::path::Path;

/// A word of the mount table, the word that clears it, and its flag.
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

/// Adds flags to a mount that was just made, without changing its superblock.
///
/// # Errors
/// EPERM for users other than root.
pub fn narrow(mountpoint: &Path, words: &[&'static str]) -> Result<(), Failure> {
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let options = entry.map(|entry| entry.options).unwrap_or_default();
    let changed = mount_remount(mountpoint, flags(&options, words) | MountFlags::BIND, c"");
    changed.map_err(|error| {
        Failure::io(&format!("cannot set {} on", words.join(",")), path_text(mountpoint), &error.into())
    })
}

/// Returns the flags of a mount, changed by words in the order given.
pub fn flags(has: &[String], words: &[&'static str]) -> MountFlags {
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
