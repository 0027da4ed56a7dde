//! Features by the names that ZFS has for them (`feature@NAME` of a pool), and those of this
//! format: which of them a pool has.

use super::PropertyError;

/// What the feature is called by which metadata is written twice.
pub const REDUNDANT_METADATA: &str = "metadata_twice";
/// What the feature is called by which names of neighbouring numbers lie side by side.
pub const ORDERED_NAMES: &str = "names_side_by_side";
/// What the feature is called by which names can be the same though their bytes differ.
pub const FOLDED: &str = "folded_names";
/// What the feature is called by which devices are in groups with copies or parity.
pub const GROUPS: &str = "device_groups";
/// What the feature is called by which groups of devices can be for metadata alone.
pub const CLASSES: &str = "allocation_classes";

/// What every pool has.
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

/// What no pool has.
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

/// Whether there is a feature of this name.
#[must_use]
pub fn is_known(name: &str) -> bool {
    is_own(name) || SERVED.contains(&name) || NOT_SERVED.contains(&name)
}

/// Whether it is one of this format: a pool gets it by an upgrade, or by what needs it: [`FOLDED`] by
/// its first such file system, [`CLASSES`] by its first such group, [`GROUPS`] by being made so.
#[must_use]
pub fn is_own(name: &str) -> bool {
    [REDUNDANT_METADATA, ORDERED_NAMES, FOLDED, GROUPS, CLASSES].contains(&name)
}

/// What a user wants to set: only what is so already.
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
