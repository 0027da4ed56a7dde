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

/// Chooses the engine for `--engine=auto`, with the reason as the end of a sentence. Quotas are chosen only where
/// they keep every promise of a cage: root is limited, too, a full cage answers ENOSPC, and `df` shows the limit.
/// Of the file systems with quotas, only XFS does all that.
pub fn choose(wanted: &Wanted, root: bool) -> (EngineKind, String) {
    let why_not = match (&wanted.fuse_only, &wanted.mountpoint) {
        _ if !root => Some("only root can set quotas".to_owned()),
        (Some(option), _) => Some(format!("quotas have no {option}")),
        (_, Some(mountpoint)) => Some(format!("a quota cannot be shown at {}", path_text(mountpoint))),
        (None, None) => quota_engine::shortcoming(&wanted.directory),
    };
    match why_not {
        Some(why) => (EngineKind::Fuse, why),
        None => (EngineKind::Quota, "the file system enforces project quotas".to_owned()),
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
    fn auto_takes_no_quota_that_could_break_a_promise() {
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
            assert_eq!(choose(&wanted, root), (EngineKind::Fuse, why.to_owned()));
        }
    }
}
