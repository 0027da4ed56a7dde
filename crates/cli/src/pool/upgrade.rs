//! `nacre pool upgrade`: the formats that this program supports, and the pools with an older one.
//! Pure.

use nacre_admin::pool::{
    Figures,
    figures::{CLASSES, FOLDED, GROUPS, ORDERED_NAMES, REDUNDANT_METADATA},
};
use nacre_pool::label;

/// Returns the text of `-v`: all supported formats and features.
pub fn known() -> String {
    format!(
        "This program knows version {} of the format, and no other.\n\nThe following features are supported:\n\n\
         FEAT DESCRIPTION\n-------------------------------------------------------------\n\
         {REDUNDANT_METADATA}\n     Metadata lies in two places: a damaged copy is mended by the other.\n{ORDERED_NAMES}\n     Names of neighbouring numbers lie side by side in file systems made from\n     now on: \
         directories of many files are made and removed faster.\n\
         {FOLDED}\n     Names that differ in case or composition can be the same. Enabled by the\n     first file system that is made so.\n\
         {GROUPS}\n     Devices stand in for each other: mirrors and RAID-Z. Pools have it that\n     were made so.\n\
         {CLASSES}\n     Devices can be for metadata alone. Enabled by the first of them.\n",
        label::VERSION
    )
}

/// Returns the list of pools that lack features.
pub fn lacking(pools: &[Figures]) -> String {
    let lacking: Vec<&Figures> = pools.iter().filter(|pool| !(pool.redundant_metadata && pool.ordered_names)).collect();
    if lacking.is_empty() {
        return format!(
            "All pools have version {} of the format, and every supported feature enabled.\n",
            label::VERSION
        );
    }
    let rows: String = lacking
        .iter()
        .flat_map(|pool| {
            let features = [(REDUNDANT_METADATA, pool.redundant_metadata), (ORDERED_NAMES, pool.ordered_names)]
                .into_iter()
                .filter(|(_, there)| !there);
            std::iter::once(format!("{}\n", pool.name)).chain(features.map(|(feature, _)| format!("      {feature}\n")))
        })
        .collect();
    format!(
        "Some supported features are not enabled on the following pools. Once a\nfeature is enabled the pool may become incompatible with software\n\
         that does not support it.\n\nPOOL  FEATURE\n---------------\n{rows}\nEnable them with 'nacre pool upgrade POOL'.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_that_lack_something_are_named() {
        let pool = |name: &str, redundant_metadata, ordered_names| Figures {
            name: name.to_owned(),
            redundant_metadata,
            ordered_names,
            ..Figures::default()
        };
        assert!(lacking(&[pool("tank", true, true)]).starts_with("All pools have version 1"));
        let text = lacking(&[pool("tank", true, true), pool("old", false, false), pool("newer", true, false)]);
        assert!(
            text.contains("\nold\n      metadata_twice\n      names_side_by_side\nnewer\n      names_side_by_side\n"),
            "{text}"
        );
        assert!(!text.contains("tank"));
        assert!(known().contains(REDUNDANT_METADATA) && known().contains(ORDERED_NAMES) && known().contains(FOLDED));
        assert!(known().contains(GROUPS) && known().contains(CLASSES));
    }
}
