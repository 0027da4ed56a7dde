//! The tables of `nacre top` for mounts, pools, devices of pools and cages. Pure.
//!
//! Used by [`super`] and [`super::screen`]. Rates are computed from two samples; the first sample
//! has none, and totals are shown.

use crate::{
    columns::{self, Align},
    metrics::gathered::Everything,
};
use nacre_admin::pool::{DeviceFigures, Status};
use nacre_daemon::{cage::report::CageReport, report::Report};
use std::cmp::Ordering;

/// Subject of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tab {
    #[default]
    Mounts,
    Pools,
    Devices,
    Cages,
}

impl Tab {
    pub const ALL: [Tab; 4] = [Tab::Mounts, Tab::Pools, Tab::Devices, Tab::Cages];

    pub fn word(self) -> &'static str {
        match self {
            Tab::Mounts => "mounts",
            Tab::Pools => "pools",
            Tab::Devices => "devices",
            Tab::Cages => "cages",
        }
    }

    /// Returns the heading of the history.
    pub fn history(self) -> &'static str {
        match self {
            Tab::Mounts => "requests per second",
            Tab::Pools | Tab::Devices => "bytes per second",
            Tab::Cages => "bytes used",
        }
    }
}

/// A cell: the shown text, and the number to sort by where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub text: String,
    pub number: Option<u64>,
}

fn word(text: impl Into<String>) -> Shown {
    Shown { text: text.into(), number: None }
}

fn count(number: u64) -> Shown {
    Shown { text: columns::count(number), number: Some(number) }
}

fn bytes(number: u64) -> Shown {
    const UNITS: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];
    let text = match UNITS.iter().find(|(_, unit)| number >= *unit) {
        None => number.to_string(),
        Some((suffix, unit)) => {
            let tenths = u128::from(number) * 10 / u128::from(*unit);
            if tenths >= 1000 {
                format!("{}{suffix}", tenths / 10)
            } else {
                format!("{}.{}{suffix}", tenths / 10, tenths % 10)
            }
        }
    };
    Shown { text, number: Some(number) }
}

fn time(ns: u64) -> Shown {
    Shown { text: columns::nanoseconds(ns), number: Some(ns) }
}

fn percent(number: u64) -> Shown {
    Shown { text: format!("{number}%"), number: Some(number) }
}

/// A row with the key that identifies it across samples, and the figure whose history is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownRow {
    pub key: String,
    pub cells: Vec<Shown>,
    pub figure: u64,
}

/// A table. The first column names the row's object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShownTable {
    pub headings: Vec<(&'static str, Align)>,
    pub rows: Vec<ShownRow>,
}

/// Two samples, and the seconds between them.
#[derive(Clone, Copy, Debug)]
pub struct Looks<'a> {
    pub before: Option<&'a Everything>,
    pub now: &'a Everything,
    pub seconds: Option<f64>,
}

impl Looks<'_> {
    /// Returns the difference of a counter between the samples, per second.
    fn rate(self, before: u64, now: u64) -> u64 {
        let number = now.saturating_sub(before);
        match self.seconds {
            // A rate for people: far below the range where the conversion loses digits that are
            // shown.
            #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Some(seconds) if seconds > 0.0 => (number as f64 / seconds).round() as u64,
            _ => number,
        }
    }
}

/// Returns the table of a tab.
pub fn table(tab: Tab, looks: Looks<'_>) -> ShownTable {
    match tab {
        Tab::Mounts => mounts(looks),
        Tab::Pools => pools(looks),
        Tab::Devices => devices(looks),
        Tab::Cages => cages(looks.now),
    }
}

impl ShownTable {
    /// Sorts by a column, then by the first column.
    pub fn sort(&mut self, column: usize, downwards: bool) {
        let cell = |row: &ShownRow| row.cells.get(column).cloned();
        self.rows.sort_by(|a, b| {
            let order = match (cell(a), cell(b)) {
                (Some(a), Some(b)) => a.number.cmp(&b.number).then_with(|| a.text.cmp(&b.text)),
                _ => Ordering::Equal,
            };
            let order = if downwards { order.reverse() } else { order };
            order.then_with(|| a.key.cmp(&b.key))
        });
    }

    /// Sorts by the figure whose history is kept, in descending order.
    pub fn sort_by_activity(&mut self) {
        self.rows.sort_by(|a, b| b.figure.cmp(&a.figure).then_with(|| a.key.cmp(&b.key)));
    }

    /// Formats the table as text.
    pub fn text(&self, bold: bool) -> String {
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.cells.iter().map(|cell| cell.text.clone()).collect()).collect();
        columns::aligned(&self.headings, &rows, bold)
    }
}

/// Returns the meaning of each column, by its heading.
pub fn legend(tab: Tab) -> &'static [(&'static str, &'static str)] {
    match tab {
        Tab::Mounts => &[
            ("MOUNTPOINT", "where it is mounted"),
            ("REQ/S", "requests of the kernel per second"),
            ("ERR/S", "failed requests per second"),
            ("MEAN", "mean time of a request"),
            ("NOW", "requests that are being answered now"),
            ("INODES", "inodes that the kernel knows"),
            ("OPEN", "open files"),
            ("PASS", "passthrough: the kernel reads and writes itself"),
        ],
        Tab::Pools => &[
            ("POOL", "name"),
            ("HEALTH", "state of its devices"),
            ("SIZE", "all of its devices"),
            ("ALLOC", "allocated bytes"),
            ("FREE", "bytes that are not allocated"),
            ("FRAG", "fragmentation of the free space"),
            ("READ/S", "bytes per second from devices"),
            ("WRITE/S", "bytes per second to devices"),
            ("HITS", "share of reads that the cache has answered"),
            ("COMMIT", "time of the last commit"),
            ("LOST", "objects with damage that cannot be repaired"),
        ],
        Tab::Devices => &[
            ("DEVICE", "path"),
            ("POOL", "pool that it belongs to"),
            ("STATE", "state in the pool"),
            ("R/S", "reads per second"),
            ("W/S", "writes per second"),
            ("READ/S", "bytes read per second"),
            ("WRITE/S", "bytes written per second"),
            ("READ", "mean time of a read"),
            ("WRITE", "mean time of a write"),
            ("ERR", "errors of reads, writes and checksums"),
        ],
        Tab::Cages => &[
            ("MOUNTPOINT", "where it is mounted"),
            ("USED", "bytes in the cage"),
            ("LIMIT", "limit of bytes"),
            ("FULL", "used share of the limit"),
            ("FREE", "bytes that can still be written"),
            ("INODES", "files and directories"),
            ("REFUSED", "operations that the limits refused"),
            ("DROPPED", "files removed by --when-full=drop-oldest"),
        ],
    }
}

fn headings(first: &[&'static str], numbers: &[&'static str]) -> Vec<(&'static str, Align)> {
    let words = first.iter().map(|heading| (*heading, Align::Left));
    words.chain(numbers.iter().map(|heading| (*heading, Align::Right))).collect()
}

fn mounts(looks: Looks<'_>) -> ShownTable {
    let none = Report::default();
    let row = |now: &Report| {
        let same = |report: &&Report| report.pid == now.pid && report.mountpoint == now.mountpoint;
        let before = looks.before.and_then(|look| look.mounts.iter().find(same)).unwrap_or(&none);
        let requests = now.requests.saturating_sub(before.requests);
        let mean = now.total_ns().saturating_sub(before.total_ns()).checked_div(requests).unwrap_or(0);
        let rate = looks.rate(before.requests, now.requests);
        ShownRow {
            key: format!("{} {}", now.mountpoint, now.pid),
            figure: rate,
            cells: vec![
                word(now.title()),
                count(rate),
                count(looks.rate(before.errors, now.errors)),
                time(mean),
                count(now.in_flight),
                count(now.inodes),
                count(now.open_files),
                word(if now.passthrough.on { "on" } else { "off" }),
            ],
        }
    };
    let mut headings = headings(&["MOUNTPOINT"], &["REQ/S", "ERR/S", "MEAN", "NOW", "INODES", "OPEN"]);
    headings.push(("PASS", Align::Left));
    ShownTable { headings, rows: looks.now.mounts.iter().map(row).collect() }
}

fn moved(pool: &Status) -> (u64, u64) {
    let devices = pool.figures.devices.iter().map(|device| device.counts);
    devices.fold((0, 0), |sum, counts| (sum.0 + counts.read_bytes, sum.1 + counts.written_bytes))
}

fn pools(looks: Looks<'_>) -> ShownTable {
    let none = Status::default();
    let row = |now: &Status| {
        let same =
            |pool: &&Status| pool.figures.name == now.figures.name && pool.figures.process == now.figures.process;
        let before = looks.before.and_then(|look| look.pools.iter().find(same)).unwrap_or(&none);
        let (figures, engine, old) = (&now.figures, &now.figures.engine, &before.figures.engine);
        let (read, written) = (looks.rate(moved(before).0, moved(now).0), looks.rate(moved(before).1, moved(now).1));
        let hits = (engine.nodes.0 + engine.content.0).saturating_sub(old.nodes.0 + old.content.0);
        let misses = (engine.nodes.1 + engine.content.1).saturating_sub(old.nodes.1 + old.content.1);
        let hit = (hits.saturating_mul(100)).checked_div(hits + misses);
        ShownRow {
            key: format!("{} {}", figures.name, figures.process),
            figure: read.saturating_add(written),
            cells: vec![
                word(&figures.name),
                word(&figures.health),
                bytes(figures.size),
                bytes(figures.allocated),
                bytes(figures.free),
                percent(figures.fragmentation),
                bytes(read),
                bytes(written),
                hit.map_or_else(|| word("-"), percent),
                time(engine.commit_last.saturating_mul(1000)),
                count(now.damaged),
            ],
        }
    };
    let numbers = ["SIZE", "ALLOC", "FREE", "FRAG", "READ/S", "WRITE/S", "HITS", "COMMIT", "LOST"];
    ShownTable { headings: headings(&["POOL", "HEALTH"], &numbers), rows: looks.now.pools.iter().map(row).collect() }
}

fn devices(looks: Looks<'_>) -> ShownTable {
    let (none, mut rows) = (DeviceFigures::default(), Vec::new());
    for pool in &looks.now.pools {
        let name = &pool.figures.name;
        let before = looks.before.and_then(|look| look.pools.iter().find(|pool| pool.figures.name == *name));
        for now in &pool.figures.devices {
            let same = |device: &&DeviceFigures| device.guid == now.guid;
            let old = before.and_then(|pool| pool.figures.devices.iter().find(same)).unwrap_or(&none).counts;
            let counts = now.counts;
            let mean = |time: u64, old_time: u64, number: u64, old_number: u64| {
                time.saturating_sub(old_time).checked_div(number.saturating_sub(old_number)).unwrap_or(0)
            };
            let (read, written) =
                (looks.rate(old.read_bytes, counts.read_bytes), looks.rate(old.written_bytes, counts.written_bytes));
            let state = if now.state.is_empty() || now.deleted.is_some() { now.health() } else { now.state.as_str() };
            rows.push(ShownRow {
                key: format!("{name} {}", now.guid),
                figure: read.saturating_add(written),
                cells: vec![
                    word(now.name()),
                    word(name),
                    word(state),
                    count(looks.rate(old.reads, counts.reads)),
                    count(looks.rate(old.writes, counts.writes)),
                    bytes(read),
                    bytes(written),
                    time(mean(counts.read_time, old.read_time, counts.reads, old.reads)),
                    time(mean(counts.write_time, old.write_time, counts.writes, old.writes)),
                    count(counts.read_errors + counts.write_errors + counts.checksum_errors),
                ],
            });
        }
    }
    let numbers = ["R/S", "W/S", "READ/S", "WRITE/S", "READ", "WRITE", "ERR"];
    ShownTable { headings: headings(&["DEVICE", "POOL", "STATE"], &numbers), rows }
}

fn cages(now: &Everything) -> ShownTable {
    let row = |cage: &CageReport| ShownRow {
        key: format!("{} {}", cage.mountpoint, cage.directory),
        figure: cage.used,
        cells: vec![
            word(&cage.mountpoint),
            bytes(cage.used),
            cage.limit.map_or_else(|| word("-"), bytes),
            cage.percent().map_or_else(|| word("-"), percent),
            bytes(cage.free),
            cage.inodes.map_or_else(|| word("-"), count),
            count(cage.refused.total()),
            count(cage.dropped.files),
        ],
    };
    let numbers = ["USED", "LIMIT", "FULL", "FREE", "INODES", "REFUSED", "DROPPED"];
    ShownTable { headings: headings(&["MOUNTPOINT"], &numbers), rows: now.cages.iter().map(row).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_admin::{counted::Counts, pool::Figures};

    fn pool(read_bytes: u64) -> Status {
        let counts = Counts { read_bytes, reads: read_bytes / 100, write_errors: 2, ..Counts::default() };
        let device = DeviceFigures { path: "/d".to_owned(), guid: 1, counts, ..DeviceFigures::default() };
        let figures = Figures { name: "tank".to_owned(), size: 3 << 30, devices: vec![device], ..Figures::default() };
        Status { figures, ..Status::default() }
    }

    #[test]
    fn rates_are_between_two_looks() {
        let before = Everything { pools: vec![pool(1000)], ..Everything::default() };
        let now = Everything { pools: vec![pool(9000)], ..Everything::default() };
        let looks = Looks { before: Some(&before), now: &now, seconds: Some(2.0) };
        let devices = table(Tab::Devices, looks);
        assert_eq!(devices.rows[0].figure, 4000);
        let texts: Vec<&str> = devices.rows[0].cells.iter().map(|cell| cell.text.as_str()).collect();
        assert_eq!(texts[..6], ["/d", "tank", "ONLINE", "40", "0", "3.9K"]);
        assert_eq!(texts.last(), Some(&"2"));
        assert_eq!(table(Tab::Pools, looks).rows[0].cells[2].text, "3.0G");
        let first = Looks { before: None, now: &now, seconds: None };
        assert_eq!(table(Tab::Devices, first).rows[0].figure, 9000);
        for tab in Tab::ALL {
            let shown = table(tab, looks);
            assert!(shown.rows.iter().all(|row| row.cells.len() == shown.headings.len()), "{tab:?}");
            let headings: Vec<&str> = shown.headings.iter().map(|(heading, _)| *heading).collect();
            let explained: Vec<&str> = legend(tab).iter().map(|(heading, _)| *heading).collect();
            assert_eq!(headings, explained);
            assert!(legend(tab).iter().all(|(_, meaning)| meaning.len() <= 49), "60 columns, {tab:?}");
        }
    }

    #[test]
    fn numbers_are_sorted_as_numbers() {
        let mount = |place: &str, requests| Report { mountpoint: place.to_owned(), requests, ..Report::default() };
        let mounts = vec![mount("/b", 9), mount("/c", 10_000), mount("/a", 9)];
        let now = Everything { mounts, ..Everything::default() };
        let mut shown = table(Tab::Mounts, Looks { before: None, now: &now, seconds: None });
        let order = |shown: &ShownTable| shown.rows.iter().map(|row| row.cells[0].text.clone()).collect::<Vec<_>>();
        shown.sort(1, true);
        assert_eq!(order(&shown), ["/c", "/a", "/b"]);
        shown.sort(0, false);
        assert_eq!(order(&shown), ["/a", "/b", "/c"]);
        shown.sort_by_activity();
        assert_eq!(order(&shown), ["/c", "/a", "/b"]);
    }
}
