//! `nacre pool upgrade`: what this program knows of the format, and which pools lack some of it. Pure.

use nacre_admin::pool::{Figures, figures::TWICE};
use nacre_pool::label;

/// `-v`: all that this program knows.
pub fn known() -> String {
    format!(
        "This program knows version {} of the format, and no other.\n\nThe following features are supported:\n\n\
         FEAT DESCRIPTION\n-------------------------------------------------------------\n\
         {TWICE}\n     Metadata lies in two places: a damaged copy is mended by the other.\n",
        label::VERSION
    )
}

/// Pools that lack something.
pub fn lacking(pools: &[Figures]) -> String {
    let lacking: Vec<&Figures> = pools.iter().filter(|pool| !pool.twice).collect();
    if lacking.is_empty() {
        return format!("All pools have version {} of the format, and every supported feature enabled.\n", label::VERSION);
    }
    let rows: String = lacking.iter().map(|pool| format!("{}\n      {TWICE}\n", pool.name)).collect();
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
        let pool = |name: &str, twice| Figures { name: name.to_owned(), twice, ..Figures::default() };
        assert!(lacking(&[pool("tank", true)]).starts_with("All pools have version 1"));
        let text = lacking(&[pool("tank", true), pool("old", false)]);
        assert!(text.contains("\nold\n      metadata_twice\n") && !text.contains("tank"));
        assert!(known().contains(TWICE));
    }
}
