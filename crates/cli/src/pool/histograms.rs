//! `nacre pool iostat -w` and `-r`: histograms of the latency and the size of device requests, by
//! powers of two. Pure.

use super::{
    form::PoolForm,
    tree::{self, Vdev},
};
use crate::columns;
use nacre_admin::counted::{DeviceRequest, Histogram, Spread};
use nacre_admin::pool::Figures;
use nacre_pool::properties::size::human;
use serde_json::json;

/// Quantity of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// Times: `-w`.
    Times,
    /// Sizes: `-r`.
    Sizes,
}

/// Exponent of the smallest request that has a line of its own: devices have no smaller requests.
const SMALLEST: usize = 9;

impl Of {
    fn histograms(self, spread: &Spread) -> &[Histogram; 4] {
        match self {
            Self::Times => &spread.times,
            Self::Sizes => &spread.sizes,
        }
    }

    /// Returns the columns, each with its index in the counters.
    fn columns(self) -> Vec<(&'static str, usize)> {
        let all = ["read", "write", "sync", "trim"].into_iter().zip(0..DeviceRequest::ALL.len());
        // Flushes have no size.
        all.filter(|(name, _)| self == Self::Times || *name != "sync").collect()
    }

    fn first(self) -> usize {
        match self {
            Self::Times => 0,
            Self::Sizes => SMALLEST,
        }
    }

    /// Returns the name of the line for requests from 2^place on.
    fn line(self, place: usize, exact: bool) -> String {
        let from = 1u64 << place.min(63);
        match self {
            Self::Times if exact => (from * 2 - 1).to_string(),
            Self::Times => match from * 2 - 1 {
                ns @ 0..1_000 => format!("{ns}ns"),
                ns @ 1_000..1_000_000 => format!("{}us", ns / 1_000),
                ns @ 1_000_000..1_000_000_000 => format!("{}ms", ns / 1_000_000),
                ns => format!("{}s", ns / 1_000_000_000),
            },
            Self::Sizes if exact => from.to_string(),
            Self::Sizes => human(from),
        }
    }
}

/// The histograms of a pool or a device.
struct Table {
    name: String,
    columns: Vec<Histogram>,
}

fn at(histogram: &Histogram, place: usize) -> u64 {
    histogram.get(place).copied().unwrap_or(0)
}

/// Returns the counts since an earlier sample of a histogram.
fn since(now: &Histogram, before: Option<&Histogram>) -> Histogram {
    now.iter()
        .enumerate()
        .map(|(place, number)| number.saturating_sub(before.map_or(0, |before| at(before, place))))
        .collect()
}

fn sum(all: &[Histogram]) -> Histogram {
    let longest = all.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).map(|place| all.iter().map(|one| at(one, place)).sum()).collect()
}

fn tables(of: Of, now: &[Figures], before: &[Figures], verbose: bool) -> Vec<Table> {
    let mut tables = Vec::new();
    for pool in now {
        let earlier = before.iter().find(|earlier| {
            earlier.guid == pool.guid && earlier.since == pool.since && earlier.process == pool.process
        });
        let device = |(index, device): (usize, &nacre_admin::pool::DeviceFigures)| {
            let earlier =
                earlier.and_then(|earlier| earlier.devices.get(index)).map(|device| of.histograms(&device.spread));
            let column = |(_, place): (&str, usize)| {
                let now = of.histograms(&device.spread).get(place).cloned().unwrap_or_default();
                since(&now, earlier.and_then(|earlier| earlier.get(place)))
            };
            Table { name: device.name().to_owned(), columns: of.columns().into_iter().map(column).collect() }
        };
        let devices: Vec<Table> = pool.devices.iter().enumerate().map(device).collect();
        let column = |place: usize| {
            sum(&devices.iter().filter_map(|device| device.columns.get(place)).cloned().collect::<Vec<_>>())
        };
        tables.push(Table { name: pool.name.clone(), columns: (0..of.columns().len()).map(column).collect() });
        if verbose {
            let of_group = |vdev: Vdev<'_>| {
                let own: Vec<&Table> = vdev
                    .devices(pool)
                    .iter()
                    .filter_map(|own| pool.devices.iter().position(|device| std::ptr::eq(*own, device)))
                    .filter_map(|at| devices.get(at))
                    .collect();
                let column = |place: usize| {
                    sum(&own.iter().filter_map(|table| table.columns.get(place)).cloned().collect::<Vec<_>>())
                };
                let columns = (0..of.columns().len()).map(column).collect();
                Table { name: vdev.name().into_owned(), columns }
            };
            tables.extend(tree::all_rows(pool).map(|(_, vdev)| of_group(vdev)));
        }
    }
    tables
}

/// Returns one table for each pool, and with `verbose` for each device.
pub fn text(of: Of, now: &[Figures], before: &[Figures], verbose: bool, form: PoolForm) -> String {
    let tables = tables(of, now, before, verbose);
    if form.json {
        return json(of, &tables);
    }
    let mut text = String::new();
    for table in &tables {
        let lines = of.first()..table.columns.iter().map(Vec::len).max().unwrap_or(0);
        let count = |number: u64| if form.exact { number.to_string() } else { human(number) };
        let cells: Vec<Vec<String>> = lines
            .map(|place| {
                let counts = table.columns.iter().map(|column| count(at(column, place)));
                std::iter::once(of.line(place, form.exact)).chain(counts).collect()
            })
            .collect();
        if form.scripted {
            let named = cells
                .into_iter()
                .map(|row| std::iter::once(table.name.clone()).chain(row).collect())
                .collect::<Vec<_>>();
            text.push_str(&columns::scripted(&named));
            continue;
        }
        let width = table.name.chars().count().max(12);
        let line = |cells: &[String]| {
            let mut line = String::new();
            for (place, cell) in cells.iter().enumerate() {
                line.push_str(&if place == 0 { format!("{cell:<width$}") } else { format!("  {cell:>6}") });
            }
            line.truncate(line.trim_end().len());
            line + "\n"
        };
        let unit = if of == Of::Times { "latency" } else { "req_size" };
        let heads: Vec<String> =
            std::iter::once(unit).chain(of.columns().into_iter().map(|(name, _)| name)).map(str::to_owned).collect();
        text.push_str(&format!("{}\n", table.name));
        text.push_str(&line(&heads));
        let rule: Vec<String> =
            (0..=of.columns().len()).map(|place| "-".repeat(if place == 0 { width } else { 6 })).collect();
        text.push_str(&line(&rule));
        cells.iter().for_each(|row| text.push_str(&line(row)));
        text.push_str(&line(&rule));
    }
    text
}

fn json(of: Of, tables: &[Table]) -> String {
    let rows: Vec<_> = tables
        .iter()
        .map(|table| {
            let columns: serde_json::Map<String, serde_json::Value> =
                of.columns().iter().zip(&table.columns).map(|((name, _), column)| ((*name).to_owned(), json!(column))).collect();
            json!({ "name": table.name, "of": if of == Of::Times { "nanoseconds" } else { "bytes" }, "by_powers_of_two": columns })
        })
        .collect();
    json!({ "output_version": super::form::json_head("iostat"), "histograms": rows }).to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_admin::pool::DeviceFigures;

    fn figures(reads: u64) -> Figures {
        let mut spread = Spread::default();
        spread.times[0] = vec![0, 0, reads, 0];
        spread.sizes[0] = vec![0; 14];
        spread.sizes[0][12] = reads;
        spread.sizes[1] = vec![0; 14];
        let devices = (0..2).map(|number| DeviceFigures {
            path: format!("/{number}"),
            spread: spread.clone(),
            ..DeviceFigures::default()
        });
        Figures { name: "tank".to_owned(), devices: devices.collect(), ..Figures::default() }
    }

    #[test]
    fn devices_add_up_and_looks_are_subtracted() {
        let form = PoolForm { scripted: true, exact: true, ..PoolForm::default() };
        let shown = text(Of::Times, &[figures(5)], &[figures(2)], true, form);
        assert!(shown.starts_with("tank\t1\t0\t0\t0\t0\ntank\t3\t0\t0\t0\t0\ntank\t7\t6\t0\t0\t0\n"), "{shown}");
        assert!(shown.contains("/1\t7\t3\t0\t0\t0\n"), "{shown}");
        let shown = text(Of::Sizes, &[figures(5)], &[], false, PoolForm::default());
        assert!(shown.starts_with("tank\nreq_size        read   write    trim\n"), "{shown}");
        assert!(shown.contains("\n4K                10       0       0\n"), "{shown}");
    }
}
