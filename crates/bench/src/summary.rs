//! Rows for readers, computed from samples: pure functions of a [`Report`], shared by every exporter and by
//! `figures`.

use crate::report::{Cell, Report, TestEntry};
use crate::stats::{geometric_mean, maximum, median, minimum};
use crate::table::COUNT;

/// One cell of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entry {
    /// Median time over the baseline's median time; over several points the geometric mean.
    pub ratio: f64,
    /// Rate: amount per second at the median, geometric mean over points.
    pub rate: f64,
    /// Median seconds, for tests without points.
    pub seconds: Option<f64>,
}

/// One row; cells in the order of [`Report::targets`], `None` where nothing was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Identifier of the test, or of the mean.
    pub id: String,
    /// Heading of the row.
    pub title: String,
    /// `bytes` or `operations`.
    pub unit: String,
    /// Cells of the row.
    pub entries: Vec<Option<Entry>>,
}

/// Rows of one group and their mean.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    /// Heading of the section.
    pub title: String,
    /// Rows in order.
    pub rows: Vec<Row>,
    /// Geometric mean of each column's ratios; none for baselines.
    pub mean: Vec<Option<f64>>,
}

/// A row of counts, which should be zero or small; cells in the order of [`Report::targets`].
#[derive(Debug, Clone, PartialEq)]
pub struct CountRow {
    /// Heading, with that of its group.
    pub title: String,
    /// The worst of all rounds.
    pub values: Vec<Option<f64>>,
}

/// Least, middle and largest seconds of a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Fastest round.
    pub minimum: f64,
    /// Median.
    pub median: f64,
    /// Slowest round.
    pub maximum: f64,
}

/// Returns the spread of a cell's samples.
pub fn spread(cell: &Cell) -> Option<Spread> {
    Some(Spread { minimum: minimum(&cell.samples)?, median: median(&cell.samples)?, maximum: maximum(&cell.samples)? })
}

/// Returns the ratio of a cell's median to that of another target at the same point.
pub fn cell_ratio(report: &Report, cell: &Cell, base: &str) -> Option<f64> {
    let base = report.cell(&cell.test, base, cell.point)?;
    let (own, base) = (median(&cell.samples)?, median(&base.samples)?);
    (base > 0.0).then(|| own / base)
}

/// Returns the ratio of times of `target` to `base` in `test`: over several points, the geometric mean of the
/// points both have.
pub fn ratio(report: &Report, test: &str, target: &str, base: &str) -> Option<f64> {
    let ratios: Vec<f64> = report.cells_of(test, target).filter_map(|cell| cell_ratio(report, cell, base)).collect();
    geometric_mean(&ratios)
}

/// Returns the amount per second at the median; over several points, the geometric mean.
pub fn rate(report: &Report, test: &str, target: &str) -> Option<f64> {
    let rates = report
        .cells_of(test, target)
        .filter_map(|cell| median(&cell.samples).filter(|seconds| *seconds > 0.0).map(|seconds| cell.amount / seconds));
    geometric_mean(&rates.collect::<Vec<f64>>())
}

fn row(report: &Report, test: &TestEntry) -> Row {
    let entries = report.targets.iter().map(|target| {
        let mut cells = report.cells_of(&test.id, &target.id);
        let first = cells.next()?;
        let seconds = if first.point.is_none() { median(&first.samples) } else { None };
        Some(Entry {
            ratio: ratio(report, &test.id, &target.id, &target.baseline)?,
            rate: rate(report, &test.id, &target.id)?,
            seconds,
        })
    });
    Row { id: test.id.clone(), title: test.title.clone(), unit: test.unit.clone(), entries: entries.collect() }
}

/// Returns the geometric mean of each column over its rows; `None` for baselines, where it is always 1.
fn means<'a>(report: &Report, rows: impl Iterator<Item = &'a Row> + Clone) -> Vec<Option<f64>> {
    let is_baseline = |column: usize| report.targets.get(column).is_some_and(|target| target.id == target.baseline);
    (0..report.targets.len())
        .map(|column| {
            if is_baseline(column) {
                return None;
            }
            let ratios: Vec<f64> = rows
                .clone()
                .filter_map(|row| row.entries.get(column).copied().flatten())
                .map(|entry| entry.ratio)
                .collect();
            geometric_mean(&ratios)
        })
        .collect()
}

/// Returns every group with a measured row, in the order of the table.
pub fn sections(report: &Report) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for test in report.tests.iter().filter(|test| test.unit != COUNT) {
        let row = row(report, test);
        if row.entries.iter().all(Option::is_none) {
            continue;
        }
        match sections.last_mut().filter(|section| section.title == test.group) {
            Some(section) => section.rows.push(row),
            None => sections.push(Section { title: test.group.clone(), rows: vec![row], mean: Vec::new() }),
        }
    }
    for section in &mut sections {
        section.mean = means(report, section.rows.iter());
    }
    sections
}

/// Returns the largest count of `test` on `target` in any round.
pub fn worst(report: &Report, test: &str, target: &str) -> Option<f64> {
    report.cell(test, target, None).and_then(|cell| maximum(&cell.samples))
}

/// Returns the rows of all tests with counts that were made.
pub fn counts(report: &Report) -> Vec<CountRow> {
    let counted = report.tests.iter().filter(|test| test.unit == COUNT);
    let rows = counted.map(|test| CountRow {
        title: format!("{}: {}", test.group, test.title),
        values: report.targets.iter().map(|target| worst(report, &test.id, &target.id)).collect(),
    });
    rows.filter(|row| row.values.iter().any(Option::is_some)).collect()
}

/// Returns the geometric mean of each column over all rows of the sections.
pub fn overall(report: &Report, sections: &[Section]) -> Vec<Option<f64>> {
    means(report, sections.iter().flat_map(|section| section.rows.iter()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn ratios_are_of_medians_and_points_average() {
        let report = report();
        assert_eq!(ratio(&report, "stat-again", "bindfs", "direct"), Some(2.0));
        // 2x at one point and 8x at the other.
        let mean = ratio(&report, "iozone-read", "bindfs", "direct").unwrap();
        assert!((mean - 4.0).abs() < 1e-9, "{mean}");
        assert_eq!(ratio(&report, "stat-again", "nacre", "direct"), None);
        assert_eq!(rate(&report, "stat-again", "direct"), Some(1000.0));
    }

    #[test]
    fn sections_follow_the_table() {
        let report = report();
        let sections = sections(&report);
        let titles: Vec<&str> = sections.iter().map(|section| section.title.as_str()).collect();
        assert_eq!(titles, ["data", "names"]);
        let entries = &sections[1].rows[0].entries;
        assert_eq!(entries[0].unwrap().ratio, 1.0);
        assert_eq!(entries[1].unwrap().seconds, Some(2.0));
        assert_eq!(entries[2], None);
        let overall = overall(&report, &sections);
        assert!((overall[1].unwrap() - 8.0_f64.sqrt()).abs() < 1e-9);
        assert_eq!(overall[2], None);
    }

    #[test]
    fn the_worst_round_counts() {
        let counts = counts(&report());
        assert_eq!(
            counts,
            [CountRow { title: "full: over the limit".to_owned(), values: vec![None, Some(4096.0), None] }]
        );
    }
}
