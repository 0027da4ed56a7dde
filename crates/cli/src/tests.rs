//! The command line as a pure function: every option in every spelling, and both grammars.

mod cage;
mod commands;
mod kernel_engine;
mod options;
mod overlay;
mod personality;
mod serve;
mod union;

use crate::{plan::Plan, settings::Settings};
use nacre_daemon::plan::{MountPlan, StackSource};
use std::ffi::OsString;

fn os(arguments: &[&str]) -> Vec<OsString> {
    arguments.iter().map(OsString::from).collect()
}

/// Returns the plan of a mount; panics for another plan.
fn mount(plan: Plan) -> MountPlan {
    match plan {
        Plan::Mount(plan) => *plan,
        other => panic!("not a mount: {other:?}"),
    }
}

/// The stack of a plan in one line.
fn line(plan: &MountPlan) -> String {
    match &plan.stack {
        StackSource::Spec(spec) => spec.to_line(),
        StackSource::File(path) => format!("file {}", path.display()),
    }
}

/// Settings without the traces of how they were written.
fn bare(mut settings: Settings) -> Settings {
    settings.layer_option = None;
    settings.cage_option = None;
    settings.flags.clear();
    settings
}
