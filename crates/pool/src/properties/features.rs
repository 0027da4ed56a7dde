//! Features of pools, by the names that ZFS has for them (`feature@NAME`), and those of this
//! format.

use super::PropertyError;

/// Name of the feature "metadata is written twice".
pub const REDUNDANT_METADATA: &str = "metadata_twice";
/// Name of the feature "names with neighbouring numbers are stored side by side".
pub const ORDERED_NAMES: &str = "names_side_by_side";
/// Name of the feature "file systems may have name folding".
pub const FOLDED: &str = "folded_names";
/// Name of the feature "devices are in groups with copies or parity" (like ZFS' vdevs).
pub const GROUPS: &str = "device_groups";
/// Name of the feature "groups of devices may be reserved for metadata".
pub const CLASSES: &str = "allocation_classes";

/// Features that every pool has.
pub const SERVED: &[&str] = &[
    "async_destroy",
    "blake3",
    "block_cloning",
    "bookmark_v2",
    "bookmark_written",
    "bookmarks",
    "embedded_data",
    "empty_bpobj",
    "enabled_txg",
    "extensible_dataset",
    "filesystem_limits",
    "head_errlog",
    "hole_birth",
    "large_blocks",
    "large_dnode",
    "large_microzap",
    "livelist",
    "log_spacemap",
    "lz4_compress",
    "spacemap_histogram",
    "spacemap_v2",
    "userobj_accounting",
    "zilsaxattr",
    "zstd_compress",
];

/// Features that no pool has.
const NOT_SERVED: &[&str] = &[
    "block_cloning_endian",
    "device_rebuild",
    "device_removal",
    "draid",
    "dynamic_gang_header",
    "edonr",
    "encryption",
    "fast_dedup",
    "longname",
    "multi_vdev_crash_dump",
    "obsolete_counts",
    "physical_rewrite",
    "project_quota",
    "raidz_expansion",
    "redacted_datasets",
    "redaction_bookmarks",
    "redaction_list_spill",
    "resilver_defer",
    "sha512",
    "skein",
    "vdev_zaps_v2",
    "zpool_checkpoint",
];

/// Whether a feature of this name exists.
#[must_use]
pub fn is_known(name: &str) -> bool {
    is_own(name) || SERVED.contains(&name) || NOT_SERVED.contains(&name)
}

/// Whether it is a feature of this format: a pool gets it by an upgrade, or with its first use:
/// [`FOLDED`] with the first file system of that kind, [`CLASSES`] with the first group of that
/// kind, [`GROUPS`] at its creation.
#[must_use]
pub fn is_own(name: &str) -> bool {
    [REDUNDANT_METADATA, ORDERED_NAMES, FOLDED, GROUPS, CLASSES].contains(&name)
}

/// Parses a user's value: only the current state is accepted.
pub(super) fn parse(name: &str, value: &str) -> Result<String, PropertyError> {
    let unknown = || PropertyError::Unknown(format!("feature@{name}"));
    let lacking = NOT_SERVED.iter().find(|known| **known == name);
    match (value, lacking) {
        ("enabled", Some(known)) => Err(PropertyError::Unserved(known, "this pool has no such feature")),
        ("enabled", None) | ("disabled", Some(_)) if is_known(name) => Ok(value.to_owned()),
        _ if is_known(name) => {
            Err(PropertyError::NotOneOf("feature@", if lacking.is_some() { "disabled" } else { "enabled" }))
        }
        _ => Err(unknown()),
    }
}
