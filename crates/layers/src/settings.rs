//! Settings of the layers, as plain data: tables of keys, types and words.
//!
//! Used by the layers themselves, by crates with layers of their own, and by the stack builder,
//! which reads and writes them as text.
//!
//! Values that need the system (names of users) or a grammar of their own (permission rules, maps,
//! rates) stay text here and are compiled when a stack is built, so that a specification can be
//! written, printed and compared on any machine.

mod field;

use crate::{settings, words};
pub use field::{Field, SpecError, is_default, text, unknown_key};
use std::path::PathBuf;

words! {
    /// Which other processes may change a source, and how that is handled.
    pub enum HostCoherence {
        /// Other processes may change it; their changes are watched for and caches dropped.
        #[default]
        Watch = "watch",
        /// No other process changes it: cache without limit.
        Exclusive = "exclusive",
        /// Other processes may change it: ask again each time.
        Revalidate = "revalidate",
    }
}

words! {
    /// Presentation of a source's symbolic links.
    pub enum Symlinks {
        /// As links.
        #[default]
        Keep = "keep",
        /// As their targets, also outside the source; broken ones stay links, and no links can be
        /// created.
        Resolve = "resolve",
    }
}

words! {
    /// Effect of deleting a resolved symbolic link.
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
    /// Policy for a change of owner, group or mode.
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
    /// Policy for operations on extended attributes.
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
    /// Owner of new files.
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
    /// The extended attribute that holds owners, modes and types.
    pub enum OverrideAttribute {
        /// The one that the root directory carries; if it carries none, files show their own
        /// attributes.
        #[default]
        Carried = "carried",
        /// `security.fuseoverlayfs.override_stat`.
        Privileged = "privileged",
        /// `user.containers.override_stat`.
        Containers = "containers",
    }
}

words! {
    /// Verbosity of the trace.
    pub enum TraceLevel {
        /// Changes at `debug`, queries at `trace`.
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
        /// Which other processes may change it.
        "coherence" => coherence: HostCoherence,
        /// Presentation of symbolic links.
        "symlinks" => symlinks: Symlinks,
        /// Effect of deleting a resolved link.
        "symlink-deletion" => symlink_deletion: SymlinkDeletion,
        /// Keep `O_DIRECT` on the source's files and align buffers to this many bytes; without it,
        /// `O_DIRECT` is not passed to the source.
        "forward-odirect" => forward_odirect: Option<u32>,
        /// Accepted without effect: the ioctls of file flags are always forwarded.
        "ioctl" => ioctl: bool,
        /// Leave the source's access times alone, where the mounter may (root, and owners of
        /// files).
        "noatime" => noatime: bool,
        /// As a branch of a union: a work directory outside the source on the same mount, for
        /// unfinished copies and the like.
        "work" => work: Option<PathBuf>,
        /// A directory below the source that is excluded; may be given several times.
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
    /// Owners as another user namespace shows them. Ranges are `STORED:SHOWN:LENGTH`, several of
    /// them separated by `:` as well.
    pub struct ShiftSpec {
        /// Ranges of user ids; without any, user ids are unchanged.
        "uid" => uid: Option<String>,
        /// Ranges of group ids.
        "gid" => gid: Option<String>,
        /// Every file shows this user as its owner.
        "squash-uid" => squash_uid: Option<u32>,
        /// Every file shows this group.
        "squash-gid" => squash_gid: Option<u32>,
    }
}

settings! {
    /// Owners, modes and types kept in extended attributes.
    pub struct OverrideStatSpec {
        /// The attribute to use.
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
        /// Verbosity.
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
        /// Callers that are shown as the owner of every file: users and `@groups`.
        "mirror" => mirror: Option<String>,
        /// As `mirror`; for all other users but root, mode bits are shown as 000.
        "mirror-only" => mirror_only: Option<String>,
        /// Translates stored owners to shown ones: `1000/2000:@100/@200:1000-1999/5000:*/0`.
        "map" => map: Option<String>,
        /// A passwd file whose ids are shown as the local ids of the same names.
        "map-passwd" => map_passwd: Option<PathBuf>,
        /// A group file whose ids are shown as the local ids of the same names.
        "map-group" => map_group: Option<PathBuf>,
        /// A passwd file: the local ids of the same names are shown as its ids.
        "map-passwd-rev" => map_passwd_rev: Option<PathBuf>,
        /// A group file: the local ids of the same names are shown as its ids.
        "map-group-rev" => map_group_rev: Option<PathBuf>,
        /// Added to each user id that is shown, subtracted from each id that is stored.
        "uid-offset" => uid_offset: Option<i64>,
        /// Added to each group id that is shown, subtracted from each id that is stored.
        "gid-offset" => gid_offset: Option<i64>,
        /// Rewrites the permission bits that are shown (`u=rwX:g=rD:o=`).
        "perms" => perms: Option<String>,
        /// Clears r, w or x where the mounter itself lacks that access.
        "realistic-permissions" => realistic_permissions: bool,
        /// Owner of new files.
        "create-as" => create_as: CreateAs,
        /// New objects belong to this user.
        "create-for-user" => create_for_user: Option<String>,
        /// New objects belong to this group.
        "create-for-group" => create_for_group: Option<String>,
        /// Rewrites the mode of new objects.
        "create-with-perms" => create_with_perms: Option<String>,
        /// Policy for changes of owner.
        "chown" => chown: ChangePolicy,
        /// Policy for changes of group.
        "chgrp" => chgrp: ChangePolicy,
        /// Policy for changes of mode.
        "chmod" => chmod: ChangePolicy,
        /// Rewrites a requested mode, with `chmod=normal`.
        "chmod-filter" => chmod_filter: Option<String>,
        /// With `chmod=ignore` or `deny`: x bits of regular files can be changed all the same.
        "chmod-allow-x" => chmod_allow_x: bool,
        /// Policy for extended attributes.
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
        /// Names that are hidden, as globs (`*.tmp`); may be given several times.
        "hide" => hide: Vec<String>,
        /// A setting for some file types only, `TYPES:KEY=VALUE` with the letters of find's `-type`
        /// (`d:perms=0755`); may be given several times.
        "for" => for_types: Vec<String>,
    }
}
