//! `nacre union balance`: starts the balancing thread in the process that serves a union, and shows
//! its progress.

use super::{
    command::DrainHow,
    run::{ask, at, tell},
};
use crate::clock;
use indicatif::{ProgressBar, ProgressStyle};
use nacre_daemon::{
    failure::{Exit, Failure},
    report::printable,
    union::{
        report::BalanceReport,
        requests::{UnionAnswer, UnionRequest},
    },
};
use nacre_layers::size::Size;
use nacre_union::BalanceRules;
use std::{path::Path, time::Duration};

/// Carries out the command.
///
/// # Errors
/// No such union, its error, or a balance that was stopped.
pub fn run(mountpoint: &Path, rules: &BalanceRules, how: DrainHow) -> Result<(), Failure> {
    let peer = at(mountpoint)?;
    if how == DrainHow::Stop {
        return ask(&peer, UnionRequest::StopBalance).map(drop);
    }
    let BalanceRules { spread, min_size, max_size, include, exclude } = rules.clone();
    ask(&peer, UnionRequest::Balance { spread, min_size, max_size, include, exclude })?;
    if how == DrainHow::Start {
        return Ok(());
    }
    // Hidden by itself when standard error is not a terminal.
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:20} {msg}") {
        bar.set_style(style);
    }
    loop {
        let UnionAnswer::Balance(told) = ask(&peer, UnionRequest::BalanceStatus)? else {
            return Err(Failure::new("the union does not say how far it is"));
        };
        let figures = format!(
            "{} files, {} moved, branches differ by {}",
            told.moved,
            Size::new(told.bytes).short(),
            percent(told.spread)
        );
        bar.set_length(told.expected.max(told.bytes));
        bar.set_position(told.bytes);
        bar.set_message(figures.clone());
        if told.ended {
            bar.finish_and_clear();
            return ended(&told, &figures, rules.spread);
        }
        clock::pause(Duration::from_millis(100));
    }
}

fn ended(told: &BalanceReport, figures: &str, wanted: u32) -> Result<(), Failure> {
    if let Some(why) = &told.failed {
        return Err(Failure::new(printable(why.as_bytes())));
    }
    crate::output::print(&format!("{figures}\n"))?;
    if told.spread <= wanted {
        return Ok(());
    }
    for (path, why) in &told.left {
        tell(&format!("{} stays: {}", printable(path.as_bytes()), printable(why.as_bytes())));
    }
    match told.stays {
        // The remaining files are too large, or are excluded.
        0 => {
            tell("nothing else that may go brings them nearer to each other");
            Ok(())
        }
        stays => Err(Failure::new(format!("{stays} files could not be moved"))
            .exit(Exit::Busy)
            .next("`nacre union balance` again tries them again")),
    }
}

/// Formats hundredths of a percent for people.
fn percent(hundredths: u32) -> String {
    format!("{}.{:02}%", hundredths / 100, hundredths % 100)
}
