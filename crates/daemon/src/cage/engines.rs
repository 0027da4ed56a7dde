//! Chooses the engine of a cage.

use super::{
    engine::{CageEngine, EngineKind, Wanted},
    loop_engine::LoopEngine,
    quota_engine::{self, QuotaEngine},
    record::CageRecord,
};
use crate::{failure::Failure, report::path_text};

/// Returns the engine of this kind; `None` for `fuse`.
pub fn engine(kind: EngineKind) -> Option<&'static dyn CageEngine> {
    match kind {
        EngineKind::Fuse => None,
        EngineKind::Loop => Some(&LoopEngine),
        EngineKind::Quota => Some(&QuotaEngine),
    }
}

/// Returns why a new cage for which `--engine=auto` was given gets the engine `fuse`: no quota keeps every promise of a
/// cage.
pub fn why_not_quota(wanted: &Wanted, root: bool) -> String {
    match (&wanted.fuse_only, &wanted.mountpoint) {
        _ if !root => "only root can set quotas".to_owned(),
        (Some(option), _) => format!("quotas have no {option}"),
        (_, Some(mountpoint)) => format!("a quota cannot be shown at {}", path_text(mountpoint)),
        (None, None) => quota_engine::shortcoming(&wanted.directory),
    }
}

/// Returns the engine of a recorded cage.
///
/// # Errors
/// The record names an engine that is not the kernel's.
pub fn engine_of(record: &CageRecord) -> Result<&'static dyn CageEngine, Failure> {
    engine(record.engine).ok_or_else(|| {
        Failure::new(format!("the record of {} names no engine of the kernel", path_text(&record.directory)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn the_reason_against_a_quota_fits_the_cage() {
        let wanted = Wanted { directory: PathBuf::from("/proc"), bytes: Some(1 << 30), ..Wanted::default() };
        for (wanted, root, why) in [
            (wanted.clone(), false, "only root can set quotas"),
            (Wanted { fuse_only: Some("--soft".to_owned()), ..wanted.clone() }, true, "quotas have no --soft"),
            (
                Wanted { mountpoint: Some(PathBuf::from("/mnt")), ..wanted.clone() },
                true,
                "a quota cannot be shown at /mnt",
            ),
            (wanted, true, "proc has no quotas of directories"),
        ] {
            assert_eq!(why_not_quota(&wanted, root), why);
        }
    }
}
