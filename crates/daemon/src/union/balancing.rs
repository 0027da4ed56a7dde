//! The thread that balances the usage of branches, in the process that serves a union.

use super::report::BalanceReport;
use crate::{
    failure::{Exit, Failure},
    report::printable,
};
use nacre_union::{BalanceRules, Control};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
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
    /// Starts a balance.
    ///
    /// # Errors
    /// Another one is running, or no thread can be started.
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

    /// Stops the balance.
    ///
    /// # Errors
    /// None is running.
    pub fn stop(&self) -> Result<(), Failure> {
        let balance = self.0.lock().clone().filter(|balance| !balance.told.lock().ended);
        let balance =
            balance.ok_or_else(|| Failure::new("the branches are not being balanced").exit(Exit::NotFound))?;
        balance.stop.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Stops the balance because the union ends.
    pub fn end(&mut self) {
        if let Some(balance) = self.0.get_mut() {
            balance.stop.store(true, Ordering::Relaxed);
        }
    }

    /// Returns its progress.
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
