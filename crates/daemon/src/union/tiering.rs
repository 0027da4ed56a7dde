//! Answers to commands on tiering, in the daemon.

use super::report::{TierBranchReport, TierMoveReport, TierRunReport, TieringReport};
use crate::{
    failure::Failure,
    report::{path_text, printable},
};
use nacre_union::{Control, PlannedMove, TierRules};
use nacre_vfs::Errno;

/// Returns the state of tiering.
pub fn status(control: &Control) -> TieringReport {
    let told = control.tier_status();
    let tier = |tier: nacre_union::TierFigures| TierBranchReport {
        branch: path_text(&tier.name),
        used: tier.used,
        size: tier.total,
    };
    TieringReport {
        rules: told.rules.to_string(),
        tiers: told.tiers.into_iter().map(tier).collect(),
        busy: told.busy,
        moved_up: told.moved_up,
        moved_down: told.moved_down,
        bytes: told.bytes,
        last_run: told.last_run.and_then(|time| time.elapsed().ok()).map(|time| time.as_secs()),
    }
}

/// Replaces all rules.
///
/// # Errors
/// The rules are not understood.
pub fn set(control: &Control, rules: &str) -> Result<(), Failure> {
    let rules: TierRules = rules.parse().map_err(|error: nacre_union::ParseError| Failure::usage(error.to_string()))?;
    control.set_tier_rules(rules).map_err(|error| Failure::usage(error.to_string()))
}

/// Starts a tiering run.
///
/// # Errors
/// There are no tiers, or errors of the branches.
pub fn run(control: &Control, dry: bool) -> Result<TierRunReport, Failure> {
    let report = control.tier_run(dry, &mut |_| true).map_err(|error| match error {
        Errno::EINVAL => Failure::new("this union has no tiers: at least two of its branches have to be rw+tier")
            .next("`nacre union mod MOUNTPOINT BRANCH=rw+tier` makes a branch one"),
        error => Failure::new(format!("not all files could be looked at: {error}")),
    })?;
    let planned = |plan: PlannedMove| TierMoveReport {
        path: printable(&plan.path),
        from: path_text(&plan.from),
        to: path_text(&plan.to),
        bytes: plan.bytes,
        why: plan.why.to_string(),
    };
    Ok(TierRunReport {
        planned: report.planned.into_iter().map(planned).collect(),
        moved: report.moved,
        bytes: report.bytes,
        left: report.left.into_iter().map(|left| (printable(&left.path), left.why)).collect(),
    })
}
