//! The settings of the layers, as plain data: tables of keys, types and words.
//!
//! Used by the layers themselves, by the crates that have layers of their own, and by the stack
//! builder, which reads and writes them as text.
//!
//! Values that need the system (names of users) or a grammar of their own (permission rules, maps,
//! rates) stay text here and are compiled when a stack is built, so that a specification can be
//! written, printed and compared anywhere.

mod field;

use crate::{settings, words};
pub use field::{Field, SpecError, is_default, text, unknown_key};
use std::path::PathBuf;

words! {
    /// Who else may change a source, and what is done about it.
    pub enum HostCoherence {
        /// Others may change it; their changes are watched for and caches dropped.
        #[default]
        Watch = "watch",
        /// Nobody else changes it: cache for good.
        Exclusive = "exclusive",
        /// Others may change it: ask again each time.
        Revalidate = "revalidate",
    }
}

words! {
    /// How symbolic links of a source appear.
    pub enum Symlinks {
        /// As links.
        #[default]
        Keep = "keep",
        /// As what they point to, also outside the source; broken ones stay links, and none can be
        /// made.
        Resolve = "resolve",
    }
}

words! {
    /// What deleting a resolved symbolic link removes.
    pub enum SymlinkDeletion {
        /// The link only.
        #[default]
        SymlinkOnly = "symlink-only",
        /// Nothing: EPERM.
        Deny = "deny",
        /// The link, then its target as far as possible.
        SymlinkFirst = "symlink-first",
        /// The target, which must succeed, then the link.
        TargetFirst = "target-first",
    }
}

words! {
    /// What becomes of a change of owner, group or mode.
    pub enum ChangePolicy {
        /// It reaches the source.
        #[default]
        Normal = "normal",
        /// It succeeds without effect.
        Ignore = "ignore",
        /// EPERM.
        Deny = "deny",
    }
}

words! {
    /// Which operations on extended attributes pass.
    pub enum XattrPolicy {
        /// All.
        #[default]
        Rw = "rw",
        /// Reading; setting and removing give EACCES.
        Ro = "ro",
        /// None: EOPNOTSUPP.
        None = "none",
    }
}

words! {
    /// Whom new objects belong to.
    pub enum CreateAs {
        /// The caller where the mounter is root, the mounter otherwise.
        #[default]
        Auto = "auto",
        /// The caller (root's mounts only).
        User = "user",
        /// The mounter.
        Mounter = "mounter",
    }
}

words! {
    /// Which extended attribute holds owners, modes and types.
    pub enum OverrideAttribute {
        /// The one that the root directory carries; where it carries none, everything is what it
        /// looks like.
        #[default]
        Carried = "carried",
        /// `security.fuseoverlayfs.override_stat`.
        Privileged = "privileged",
        /// `user.containers.override_stat`.
        Containers = "containers",
    }
}

words! {
    /// How loud the trace is.
    pub enum TraceLevel {
        /// Changes at `debug`, questions at `trace`.
        #[default]
        Changes = "changes",
        /// Everything at `debug`.
        All = "all",
    }
}

settings! {
    /// A directory of the host.
    pub struct HostSpec {
        /// The directory. In the one-line form, the first setting may be the bare path.
        "source" => source: PathBuf,
        /// Who else may change it.
        "coherence" => coherence: HostCoherence,
        /// How symbolic links appear.
        "symlinks" => symlinks: Symlinks,
        /// What deleting a resolved link removes.
        "symlink-deletion" => symlink_deletion: SymlinkDeletion,
        /// Keep `O_DIRECT` on the source's files and align buffers to so many bytes; without it,
        /// `O_DIRECT` is dropped on the way down.
        "forward-odirect" => forward_odirect: Option<u32>,
        /// Changes nothing: the ioctls of file flags are always forwarded.
        "ioctl" => ioctl: bool,
        /// Leave the source's access times alone, where the mounter may (root, and owners of
        /// files).
        "noatime" => noatime: bool,
        /// As a branch of a union: a directory outside the source on the same mount, for copies
        /// that are being made and the like.
        "work" => work: Option<PathBuf>,
        /// A directory below the source that does not exist in it; may be given several times.
        "without" => without: Vec<PathBuf>,
    }
}

settings! {
    /// A tree in memory; it has no settings.
    pub struct MemSpec {}
}

settings! {
    /// Refuses every change; it has no settings.
    pub struct ReadonlySpec {}
}

settings! {
    /// Owners as another user namespace sees them. Ranges are `STORED:SHOWN:LENGTH`, several
    /// divided by `:` as well.
    pub struct ShiftSpec {
        /// Ranges of user ids; without any, users are who they are.
        "uid" => uid: Option<String>,
        /// Ranges of group ids.
        "gid" => gid: Option<String>,
        /// Everything shows as this user's.
        "squash-uid" => squash_uid: Option<u32>,
        /// Everything shows as this group's.
        "squash-gid" => squash_gid: Option<u32>,
    }
}

settings! {
    /// Owners, modes and types kept in extended attributes.
    pub struct OverrideStatSpec {
        /// Which attribute.
        "attribute" => attribute: OverrideAttribute,
    }
}

settings! {
    /// Limits of throughput: one bucket for the whole mount and each direction.
    pub struct ThrottleSpec {
        /// Bytes per second read, with decimals and a suffix (`10M`, `1.5G`).
        "read-rate" => read_rate: Option<String>,
        /// Bytes per second written.
        "write-rate" => write_rate: Option<String>,
    }
}

settings! {
    /// Logging of operations.
    pub struct TraceSpec {
        /// What is logged how loudly.
        "level" => level: TraceLevel,
    }
}

settings! {
    /// Other owners, modes and rules. Lists are separated by `:` or `,`; users and groups are names
    /// or numbers.
    pub struct RemapSpec {
        /// Every object shows this owner.
        "force-user" => force_user: Option<String>,
        /// Every object shows this group.
        "force-group" => force_group: Option<String>,
        /// Callers that see themselves as the owner of everything: users and `@groups`.
        "mirror" => mirror: Option<String>,
        /// As `mirror`; all others but root see mode bits 000.
        "mirror-only" => mirror_only: Option<String>,
        /// Owners as they are and as they shall appear: `1000/2000:@100/@200:1000-1999/5000:*/0`.
        "map" => map: Option<String>,
        /// A passwd file whose numbers appear as the local ids of the same names.
        "map-passwd" => map_passwd: Option<PathBuf>,
        /// The same with a group file.
        "map-group" => map_group: Option<PathBuf>,
        /// A passwd file whose numbers the local ids of the same names appear as.
        "map-passwd-rev" => map_passwd_rev: Option<PathBuf>,
        /// The same with a group file.
        "map-group-rev" => map_group_rev: Option<PathBuf>,
        /// Added to each user id that is shown, subtracted on the way down.
        "uid-offset" => uid_offset: Option<i64>,
        /// The same for groups.
        "gid-offset" => gid_offset: Option<i64>,
        /// Rewrites the permission bits that are shown (`u=rwX:g=rD:o=`).
        "perms" => perms: Option<String>,
        /// Clears r, w or x where the mounter itself has no such access.
        "realistic-permissions" => realistic_permissions: bool,
        /// Whom new objects belong to.
        "create-as" => create_as: CreateAs,
        /// New objects belong to this user.
        "create-for-user" => create_for_user: Option<String>,
        /// New objects belong to this group.
        "create-for-group" => create_for_group: Option<String>,
        /// Rewrites the mode of new objects.
        "create-with-perms" => create_with_perms: Option<String>,
        /// Changes of owner.
        "chown" => chown: ChangePolicy,
        /// Changes of group.
        "chgrp" => chgrp: ChangePolicy,
        /// Changes of mode.
        "chmod" => chmod: ChangePolicy,
        /// Rewrites a requested mode, with `chmod=normal`.
        "chmod-filter" => chmod_filter: Option<String>,
        /// With `chmod=ignore` or `deny`: x bits of regular files can be changed all the same.
        "chmod-allow-x" => chmod_allow_x: bool,
        /// Extended attributes.
        "xattr" => xattr: XattrPolicy,
        /// `unlink` and `rmdir` give EPERM.
        "delete-deny" => delete_deny: bool,
        /// `rename` gives EPERM.
        "rename-deny" => rename_deny: bool,
        /// A rename must not replace an existing target: EPERM.
        "replace-deny" => replace_deny: bool,
        /// No file can be made shorter, neither by truncation nor at open: EPERM.
        "truncate-deny" => truncate_deny: bool,
        /// The link count shows 1.
        "hide-hard-links" => hide_hard_links: bool,
        /// Block devices appear as regular files of the device's size.
        "block-devices-as-files" => block_devices_as_files: bool,
        /// The change time shows the modification time.
        "ctime-from-mtime" => ctime_from_mtime: bool,
        /// Names that do not exist for users, as globs (`*.tmp`); may be given several times.
        "hide" => hide: Vec<String>,
        /// A setting for some file types only, `TYPES:KEY=VALUE` with the letters of find's `-type`
        /// (`d:perms=0755`); may be given several times.
        "for" => for_types: Vec<String>,
    }
}
