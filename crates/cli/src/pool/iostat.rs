//! `nacre pool iostat`: reads and writes of pools and devices, from two samples of their counters.
//! Pure.

use super::{
    form::PoolForm,
    histograms::Of,
    list::bytes,
    tree::{self, Vdev},
};
use crate::columns;
use nacre_admin::{
    counted::Counts,
    pool::{DeviceFigures, Figures},
};
use nacre_pool::properties::size::human;
use serde_json::json;

/// Columns of `iostat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IostatColumns {
    /// Average latency of requests.
    pub latency: bool,
    /// Number of active requests.
    pub queue: bool,
    /// Histograms replace the table.
    pub histograms: Option<Of>,
}

/// Number of heading lines of a table.
pub const HEADINGS: usize = 3;

/// Figures of a pool or a device, per second.
struct Row {
    name: String,
    /// Allocated and free space; for a device in a group, the group shows it.
    room: Option<(u64, u64)>,
    now: Counts,
    before: Counts,
    /// Number of active requests, by their kind.
    active: [u64; 4],
    seconds: f64,
    /// Whether the row is only the heading of a class.
    is_heading: bool,
}

fn sum<'a>(devices: impl IntoIterator<Item = &'a DeviceFigures>) -> Counts {
    devices.into_iter().fold(Counts::default(), |mut sum, device| {
        let counts = &device.counts;
        sum.reads += counts.reads;
        sum.writes += counts.writes;
        sum.syncs += counts.syncs;
        sum.read_bytes += counts.read_bytes;
        sum.written_bytes += counts.written_bytes;
        sum.read_time += counts.read_time;
        sum.write_time += counts.write_time;
        sum.sync_time += counts.sync_time;
        sum
    })
}

impl Row {
    /// Returns the difference of a counter between the samples, per second.
    fn rate(&self, of: fn(&Counts) -> u64) -> u64 {
        let counted = of(&self.now).saturating_sub(of(&self.before));
        (counted as f64 / self.seconds.max(0.001)).round() as u64
    }

    /// Returns the average latency of a request, nanoseconds.
    fn time(&self, time: fn(&Counts) -> u64, count: fn(&Counts) -> u64) -> Option<u64> {
        let number = count(&self.now).saturating_sub(count(&self.before));
        time(&self.now).saturating_sub(time(&self.before)).checked_div(number)
    }

    fn cells(&self, shown: IostatColumns, form: PoolForm) -> Vec<String> {
        let count = |number: u64| if form.exact { number.to_string() } else { human(number) };
        let room = |of: fn((u64, u64)) -> u64| self.room.map_or("-".to_owned(), |room| bytes(of(room), form.exact));
        let mut cells = vec![
            self.name.clone(),
            room(|(allocated, _)| allocated),
            room(|(_, free)| free),
            count(self.rate(|counts| counts.reads)),
            count(self.rate(|counts| counts.writes)),
            bytes(self.rate(|counts| counts.read_bytes), form.exact),
            bytes(self.rate(|counts| counts.written_bytes), form.exact),
        ];
        if shown.queue {
            cells.extend(self.active.map(&count));
        }
        if shown.latency {
            let times = [
                self.time(|counts| counts.read_time, |counts| counts.reads),
                self.time(|counts| counts.write_time, |counts| counts.writes),
                self.time(|counts| counts.sync_time, |counts| counts.syncs),
            ];
            cells.extend(times.map(|time| match time {
                None => "-".to_owned(),
                Some(time) if form.exact => time.to_string(),
                Some(time) => columns::nanoseconds(time).replace(' ', ""),
            }));
        }
        if self.is_heading {
            cells.iter_mut().skip(1).for_each(|cell| "-".clone_into(cell));
        }
        cells
    }
}

fn rows(now: &[Figures], before: &[Figures], verbose: bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for pool in now {
        // The counters of a pool that was imported again start from 0.
        let earlier = before.iter().find(|earlier| {
            earlier.guid == pool.guid && earlier.since == pool.since && earlier.process == pool.process
        });
        let seconds = pool.now.saturating_sub(earlier.map_or(pool.since, |earlier| earlier.now)).max(1) as f64;
        let active = |devices: &[&DeviceFigures]| {
            let mut active = [0; 4];
            for device in devices {
                active.iter_mut().zip(device.spread.active).for_each(|(sum, active)| *sum += active);
            }
            active
        };
        // Devices of both samples correspond by their index.
        let same = |device: &DeviceFigures| {
            let at = pool.devices.iter().position(|there| std::ptr::eq(there, device))?;
            earlier?.devices.get(at)
        };
        let row = |name: String, room, devices: Vec<&DeviceFigures>| {
            let before = sum(devices.iter().filter_map(|device| same(device)));
            let (now, active) = (sum(devices.iter().copied()), active(&devices));
            Row { name, room, now, before, active, seconds, is_heading: false }
        };
        rows.push(row(pool.name.clone(), Some((pool.allocated, pool.free)), pool.devices.iter().collect()));
        for (class, heading) in tree::PARTS.into_iter().filter(|_| verbose) {
            let part = tree::rows(pool, class);
            let heading = heading.filter(|_| !part.is_empty()).map(|heading| row(heading.to_owned(), None, Vec::new()));
            rows.extend(heading.map(|row| Row { is_heading: true, ..row }));
            for (depth, vdev) in part {
                let room = match vdev {
                    Vdev::Root | Vdev::Pair(..) => None,
                    Vdev::Group(group) => Some((group.allocated, group.free())),
                    Vdev::Leaf(device) => Some((device.allocated, device.free())).filter(|_| depth == 1),
                };
                rows.push(row(format!("{}{}", "  ".repeat(depth), vdev.name()), room, vdev.devices(pool)));
            }
        }
    }
    rows
}

/// Formats the table. `seconds`: the time between the samples, where it is known more precisely
/// than by their timestamps in seconds.
pub fn table(
    now: &[Figures],
    before: &[Figures],
    seconds: Option<f64>,
    verbose: bool,
    shown: IostatColumns,
    form: PoolForm,
) -> String {
    let mut rows = rows(now, before, verbose);
    if let Some(seconds) = seconds {
        rows.iter_mut().for_each(|row| row.seconds = seconds);
    }
    if form.json {
        return json(&rows);
    }
    let cells: Vec<Vec<String>> = rows.iter().map(|row| row.cells(shown, form)).collect();
    if form.scripted {
        return columns::scripted(
            &cells
                .into_iter()
                .map(|mut row| {
                    if let Some(name) = row.first_mut() {
                        *name = name.trim_start().to_owned();
                    }
                    row
                })
                .collect::<Vec<_>>(),
        );
    }
    let width = cells.iter().filter_map(|row| row.first()).map(|name| name.chars().count()).max().unwrap_or(0).max(10);
    let queue = if shown.queue { "        under way          " } else { "" };
    let wait = if shown.latency { "       wait for      " } else { "" };
    let mut text = format!("{:<width$}    capacity     operations     bandwidth  {queue}{wait}\n", "");
    let line = |cells: &[String]| {
        let mut line = String::new();
        for (place, cell) in cells.iter().enumerate() {
            line.push_str(&if place == 0 { format!("{cell:<width$}") } else { format!("  {cell:>5}") });
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    };
    text = text.trim_end().to_owned() + "\n";
    let mut headings = vec!["pool", "alloc", "free", "read", "write", "read", "write"];
    if shown.queue {
        headings.extend(["read", "write", "sync", "trim"]);
    }
    if shown.latency {
        headings.extend(["read", "write", "sync"]);
    }
    let shown = headings.len();
    text.push_str(&line(&headings.iter().map(|heading| (*heading).to_owned()).collect::<Vec<_>>()));
    let rule: Vec<String> = (0..shown).map(|place| "-".repeat(if place == 0 { width } else { 5 })).collect();
    text.push_str(&line(&rule));
    cells.iter().for_each(|row| text.push_str(&line(row)));
    if verbose {
        text.push_str(&line(&rule));
    }
    text
}

fn json(rows: &[Row]) -> String {
    let row = |row: &Row| {
        json!({
            "name": row.name.trim_start(), "allocated": row.room.map(|room| room.0), "free": row.room.map(|room| room.1), "seconds": row.seconds,
            "reads": row.rate(|counts| counts.reads), "writes": row.rate(|counts| counts.writes), "syncs": row.rate(|counts| counts.syncs),
            "read_bytes": row.rate(|counts| counts.read_bytes), "written_bytes": row.rate(|counts| counts.written_bytes),
            "read_ns": row.time(|counts| counts.read_time, |counts| counts.reads),
            "write_ns": row.time(|counts| counts.write_time, |counts| counts.writes),
            "sync_ns": row.time(|counts| counts.sync_time, |counts| counts.syncs),
            "active": { "read": row.active[0], "write": row.active[1], "sync": row.active[2], "trim": row.active[3] },
        })
    };
    json!({ "output_version": super::form::json_head("iostat"), "rows": rows.iter().filter(|row| !row.is_heading).map(row).collect::<Vec<_>>() })
        .to_string()
        + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(reads: u64, now: u64) -> Figures {
        let counts = Counts { reads, read_bytes: reads * 4096, read_time: reads * 2000, ..Counts::default() };
        let devices = vec![DeviceFigures { path: "/a".to_owned(), counts, ..DeviceFigures::default() }];
        Figures { name: "tank".to_owned(), since: 100, now, devices, ..Figures::default() }
    }

    #[test]
    fn rates_are_differences() {
        let form = PoolForm { scripted: true, exact: true, ..PoolForm::default() };
        let first = table(&[figures(100, 110)], &[], None, false, IostatColumns::default(), form);
        assert_eq!(first, "tank\t0\t0\t10\t0\t40960\t0\n");
        let next = table(
            &[figures(300, 112)],
            &[figures(100, 110)],
            Some(2.0),
            true,
            IostatColumns { latency: true, ..IostatColumns::default() },
            form,
        );
        assert_eq!(next, "tank\t0\t0\t100\t0\t409600\t0\t2000\t-\t-\n/a\t0\t0\t100\t0\t409600\t0\t2000\t-\t-\n");
        assert!(
            table(&[figures(0, 100)], &[], None, false, IostatColumns::default(), PoolForm::default())
                .starts_with("              capacity     operations     bandwidth\n")
        );
    }
    #[test]
    fn groups_are_the_sum_of_their_devices() {
        let mut pool = tree::tests::mixed();
        pool.devices.iter_mut().for_each(|device| device.counts.reads = 7);
        (pool.now, pool.groups[1].allocated) = (1, 50);
        let form = PoolForm { scripted: true, exact: true, ..PoolForm::default() };
        let text = table(&[pool], &[], None, true, IostatColumns::default(), form);
        let lines: Vec<&str> = text.lines().map(|line| line.rsplitn(4, '\t').last().unwrap()).collect();
        assert_eq!(lines, ["tank\t0\t0\t21", "/a\t0\t100\t7", "mirror-1\t50\t150\t14", "/b\t-\t-\t7", "/c\t-\t-\t7"]);
    }
}
