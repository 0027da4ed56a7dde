//! `nacre union balance`: the thread that evens out branches in the process that serves a union,
//! and the command that starts it and shows how far it is.

use super::{
    command::DrainHow,
    report::BalanceReport,
    run::{UnionAnswer, UnionRequest, ask, at, tell},
};
use crate::{
    failure::{Exit, Failure},
    report::printable,
};
use indicatif::{ProgressBar, ProgressStyle};
use nacre_layers::size::Size;
use nacre_union::{BalanceRules, Control};
use parking_lot::Mutex;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// The balance that was started last.
#[derive(Debug, Default)]
pub struct Balances(Mutex<Option<Arc<Balance>>>);

#[derive(Debug, Default)]
struct Balance {
    stop: AtomicBool,
    told: Mutex<BalanceReport>,
}

impl Balances {
    /// Begins one.
    ///
    /// # Errors
    /// Another one is under way, or no thread can be had.
    pub fn start(&self, control: Control, rules: BalanceRules) -> Result<(), Failure> {
        let mut present = self.0.lock();
        if present.as_ref().is_some_and(|balance| !balance.told.lock().ended) {
            return Err(Failure::new("the branches are being balanced already")
                .exit(Exit::Busy)
                .next("wait for its end, or stop it: `nacre union balance --stop`"));
        }
        let balance = Arc::new(Balance::default());
        *present = Some(Arc::clone(&balance));
        let thread =
            thread::Builder::new().name("nacre-balance".to_owned()).spawn(move || balance.run(&control, &rules));
        thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread that moves files", &error))
    }

    /// Stops it.
    ///
    /// # Errors
    /// There is none.
    pub fn stop(&self) -> Result<(), Failure> {
        let balance = self.0.lock().clone().filter(|balance| !balance.told.lock().ended);
        let balance =
            balance.ok_or_else(|| Failure::new("the branches are not being balanced").exit(Exit::NotFound))?;
        balance.stop.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Nobody wants it any more.
    pub fn end(&mut self) {
        if let Some(balance) = self.0.get_mut() {
            balance.stop.store(true, Ordering::Relaxed);
        }
    }

    /// How far it is.
    pub fn told(&self) -> BalanceReport {
        self.0.lock().as_ref().map_or_else(BalanceReport::default, |balance| balance.told.lock().clone())
    }
}

impl Balance {
    fn run(&self, control: &Control, rules: &BalanceRules) {
        let result = control.balance_branches(rules, &mut |progress| {
            let mut told = self.told.lock();
            (told.moved, told.bytes, told.expected) = (progress.moved, progress.bytes, progress.expected);
            (told.spread, told.stays) = (progress.spread, progress.left);
            !self.stop.load(Ordering::Relaxed)
        });
        let mut told = self.told.lock();
        match result {
            Ok(report) => {
                (told.moved, told.bytes, told.expected) = (report.moved, report.bytes, report.expected);
                (told.spread, told.stays) = (report.spread, report.left);
                told.left = report.examples.into_iter().map(|left| (printable(&left.path), left.why)).collect();
                told.failed = report.stopped.then(|| "the balance was stopped".to_owned());
            }
            Err(error) => told.failed = Some(error.to_string()),
        }
        told.ended = true;
    }
}

/// Carries out the command.
///
/// # Errors
/// No such union, what it says, or a balance that was stopped.
pub fn order(mountpoint: &Path, rules: &BalanceRules, how: DrainHow) -> Result<(), Failure> {
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
        thread::sleep(Duration::from_millis(100));
    }
}

fn ended(told: &BalanceReport, figures: &str, wanted: u32) -> Result<(), Failure> {
    if let Some(why) = &told.failed {
        return Err(Failure::new(printable(why.as_bytes())));
    }
    crate::run::print(&format!("{figures}\n"))?;
    if told.spread <= wanted {
        return Ok(());
    }
    for (path, why) in &told.left {
        tell(&format!("{} stays: {}", printable(path.as_bytes()), printable(why.as_bytes())));
    }
    match told.stays {
        // Files are too large, or are to stay.
        0 => {
            tell("nothing else that may go brings them nearer to each other");
            Ok(())
        }
        stays => Err(Failure::new(format!("{stays} files could not be moved"))
            .exit(Exit::Busy)
            .next("`nacre union balance` again tries them again")),
    }
}

/// Hundredths of a percent, for people.
fn percent(hundredths: u32) -> String {
    format!("{}.{:02}%", hundredths / 100, hundredths % 100)
}
