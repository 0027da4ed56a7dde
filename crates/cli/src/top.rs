//! `nacre top`: the activity of mounts, pools and cages, repeatedly.
//!
//! On a terminal by [`screen`]; as plain tables for scripts here. [`frame`] is pure; [`run`]
//! gathers, prints and waits.

mod screen;
pub mod tables;

use crate::{
    clock,
    columns::{self, Align},
    metrics::gathered::Everything,
    status,
};
use nacre_daemon::{failure::Failure, report::Report};
use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};
use tables::{Looks, Tab};

/// Objects to watch, and the form of the tables.
#[derive(Clone, Debug, PartialEq)]
pub struct TopOrder {
    /// As plain tables, also on a terminal.
    pub batch: bool,
    /// Number of plain tables; `None`: until interrupted.
    pub rounds: Option<u64>,
    /// Seconds between tables.
    pub interval: f64,
    /// The table.
    pub tab: Tab,
    /// Include mounts of other users.
    pub everybody: bool,
    /// The mount points; empty: all, and pools.
    pub mountpoints: Vec<PathBuf>,
}

/// Carries out the command.
///
/// # Errors
/// A mount point where nothing of ours is mounted; output that cannot be written.
pub fn run(asked: TopOrder) -> Result<(), Failure> {
    let terminal = io::stdout().is_terminal();
    if terminal && io::stdin().is_terminal() && !asked.batch && asked.rounds.is_none() {
        return screen::run(asked);
    }
    let TopOrder { rounds, interval, tab, everybody, mountpoints, .. } = asked;
    let mut before: Option<(Instant, Everything)> = None;
    let mut round = 0;
    loop {
        let everything = match tab {
            Tab::Mounts => Everything { mounts: status::gather(&mountpoints, everybody)?, ..Everything::default() },
            _ => Everything::gather(&mountpoints, everybody, true)?,
        };
        let now = (clock::now(), everything);
        let seconds = before.as_ref().map(|(then, _)| now.0.duration_since(*then).as_secs_f64());
        let old = before.as_ref().map(|(_, look)| look);
        let mut text = match tab {
            Tab::Mounts => frame(old.map_or(&[][..], |look| &look.mounts), &now.1.mounts, seconds, terminal),
            other => {
                let mut table = tables::table(other, Looks { before: old, now: &now.1, seconds });
                table.sort_by_activity();
                table.text(terminal)
            }
        };
        if round > 0 {
            text.insert(0, '\n');
        }
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // The reader needs no more.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.map_err(|error| Failure::io("cannot write", "the table", &error))?,
        }
        round += 1;
        if rounds.is_some_and(|rounds| round >= rounds) {
            return Ok(());
        }
        before = Some(now);
        clock::pause(Duration::from_secs_f64(interval));
    }
}

/// Formats one table, the most active mounts first: rates since `before`, totals without it.
fn frame(before: &[Report], now: &[Report], seconds: Option<f64>, bold: bool) -> String {
    if now.is_empty() {
        return "no mounts\n".to_owned();
    }
    let unit = if seconds.is_some() { "/S" } else { "" };
    let (requests, errors) = (format!("REQUESTS{unit}"), format!("ERRORS{unit}"));
    let headings = [
        ("MOUNTPOINT", Align::Left),
        (requests.as_str(), Align::Right),
        (errors.as_str(), Align::Right),
        ("MEAN", Align::Right),
        ("IN-FLIGHT", Align::Right),
        ("INODES", Align::Right),
        ("OPEN", Align::Right),
        ("PASSTHROUGH", Align::Left),
        ("MOST", Align::Left),
    ];
    let mut sorted: Vec<&Report> = now.iter().collect();
    let requests =
        |report: &Report| report.requests.saturating_sub(find(before, report).map_or(0, |earlier| earlier.requests));
    sorted.sort_by(|a, b| requests(b).cmp(&requests(a)).then_with(|| a.mountpoint.cmp(&b.mountpoint)));
    let rows: Vec<Vec<String>> = sorted.iter().map(|report| row(find(before, report), report, seconds)).collect();
    columns::aligned(&headings, &rows, bold)
}

fn find<'a>(reports: &'a [Report], like: &Report) -> Option<&'a Report> {
    reports.iter().find(|report| report.pid == like.pid && report.mountpoint == like.mountpoint)
}

fn row(before: Option<&Report>, now: &Report, seconds: Option<f64>) -> Vec<String> {
    let since = |value: fn(&Report) -> u64| value(now).saturating_sub(before.map_or(0, value));
    let requests = since(|report| report.requests);
    vec![
        now.title(),
        rate(requests, seconds),
        rate(since(|report| report.errors), seconds),
        columns::nanoseconds(since(Report::total_ns).checked_div(requests).unwrap_or(0)),
        columns::count(now.in_flight),
        columns::count(now.inodes),
        columns::count(now.open_files),
        if now.passthrough.on { "on" } else { "off" }.to_owned(),
        most(before, now),
    ]
}

fn rate(number: u64, seconds: Option<f64>) -> String {
    match seconds {
        // A rate for people: far below the range where the conversion loses digits that are shown.
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Some(seconds) if seconds > 0.0 => columns::count((number as f64 / seconds).round() as u64),
        _ => columns::count(number),
    }
}

/// Returns the most frequent kinds of request, with their shares.
fn most(before: Option<&Report>, now: &Report) -> String {
    let earlier = |name: &str| {
        let operations = before.map_or(&[][..], |report| report.operations.as_slice());
        operations.iter().find(|operation| operation.name == name).map_or(0, |operation| operation.requests)
    };
    let mut kinds: Vec<(u64, &str)> = now
        .operations
        .iter()
        .map(|operation| (operation.requests.saturating_sub(earlier(&operation.name)), operation.name.as_str()))
        .filter(|(requests, _)| *requests > 0)
        .collect();
    kinds.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    let all: u64 = kinds.iter().map(|(requests, _)| requests).sum();
    let kinds =
        kinds.iter().take(3).map(|(requests, name)| format!("{name} {} %", requests.saturating_mul(100) / all.max(1)));
    kinds.collect::<Vec<String>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_daemon::report::OperationReport;

    fn report(lookups: u64, reads: u64) -> Report {
        let operation = |name: &str, requests| OperationReport {
            name: name.to_owned(),
            requests,
            total_ns: requests * 100,
            ..OperationReport::default()
        };
        Report {
            mountpoint: "/m".to_owned(),
            pid: 1,
            requests: lookups + reads,
            operations: vec![operation("lookup", lookups), operation("read", reads)],
            ..Report::default()
        }
    }

    #[test]
    fn totals_first_then_rates() {
        let first = frame(&[], &[report(30, 10)], None, false);
        let line = first.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line, "/m 40 0 100 ns 0 0 0 off lookup 75 %, read 25 %");
        let second = frame(&[report(30, 10)], &[report(30, 30)], Some(2.0), false);
        assert!(second.starts_with("MOUNTPOINT  REQUESTS/S"));
        let line = second.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line, "/m 10 0 100 ns 0 0 0 off read 100 %");
        assert_eq!(frame(&[], &[], None, false), "no mounts\n");
    }

    #[test]
    fn the_most_active_mounts_come_first() {
        let named = |mountpoint: &str, reads| Report { mountpoint: mountpoint.to_owned(), ..report(0, reads) };
        let order = |text: String| -> Vec<String> {
            text.lines().skip(1).filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
        };
        let (before, now) = ([named("/a", 100), named("/b", 0)], [named("/a", 110), named("/b", 20), named("/c", 10)]);
        assert_eq!(order(frame(&[], &now, None, false)), ["/a", "/b", "/c"]);
        assert_eq!(order(frame(&before, &now, Some(1.0), false)), ["/b", "/a", "/c"]);
    }

    #[test]
    fn another_process_starts_from_zero() {
        let mut other = report(5, 0);
        other.pid = 2;
        let text = frame(&[report(100, 100)], &[other], Some(1.0), false);
        assert!(text.lines().nth(1).unwrap().starts_with("/m                   5"), "{text}");
    }
}
