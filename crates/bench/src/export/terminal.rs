//! The table for the terminal: rates of the baseline, then each target's ratio of times.

use super::{COUNTS, Show, base, count, measured_columns, provenance, rate, ratio, remarks};
use crate::report::Report;
use crate::summary::{Entry, Row, counts, overall, sections};

const ROW_WIDTH: usize = 30;

/// The table as text with a final newline.
pub fn text(report: &Report, show: Show) -> String {
    let columns = measured_columns(report);
    let mut out = format!("{}\n", report.title);
    for line in provenance(report) {
        out.push_str(&format!("  {line}\n"));
    }
    let base = base(report);
    out.push_str(&match show {
        Show::Ratio => format!("  Cells: ratio of times to {base} (shorter is better)\n\n"),
        Show::Time => "  Cells: rates\n\n".to_owned(),
    });
    let widths: Vec<usize> = columns
        .iter()
        .filter_map(|column| report.targets.get(*column))
        .map(|target| target.title.len().max(10))
        .collect();
    let titles = columns.iter().filter_map(|column| report.targets.get(*column)).map(|target| target.title.clone());
    line(&mut out, "", titles, &widths);
    let sections = sections(report);
    for section in &sections {
        out.push_str(&format!("{}\n", section.title));
        for row in &section.rows {
            let cells = columns.iter().map(|column| {
                row.entries
                    .get(*column)
                    .copied()
                    .flatten()
                    .map_or_else(|| "-".to_owned(), |entry| cell(report, *column, row, entry, show))
            });
            line(&mut out, &format!("  {}", row.title), cells, &widths);
        }
        if section.rows.len() > 1 && show != Show::Time {
            mean(&mut out, "  mean", &section.mean, &columns, &widths);
        }
    }
    if sections.len() > 1 && show != Show::Time {
        mean(&mut out, "mean of all", &overall(report, &sections), &columns, &widths);
    }
    let counts = counts(report);
    if !counts.is_empty() {
        out.push_str(&format!("{COUNTS}\n"));
    }
    for row in counts {
        out.push_str(&format!("  {}\n", row.title));
        let cells = columns
            .iter()
            .map(|column| row.values.get(*column).copied().flatten().map_or_else(|| "-".to_owned(), count));
        line(&mut out, "", cells, &widths);
    }
    for remark in remarks(report) {
        out.push_str(&format!("note: {remark}\n"));
    }
    out
}

fn cell(report: &Report, column: usize, row: &Row, entry: Entry, show: Show) -> String {
    let is_baseline = report.targets.get(column).is_some_and(|target| target.baseline == target.id);
    match show {
        _ if is_baseline => rate(entry.rate, &row.unit),
        Show::Time => rate(entry.rate, &row.unit),
        Show::Ratio => ratio(entry.ratio),
    }
}

fn mean(out: &mut String, title: &str, means: &[Option<f64>], columns: &[usize], widths: &[usize]) {
    let cells = columns.iter().map(|column| means.get(*column).copied().flatten().map_or_else(String::new, ratio));
    line(out, title, cells, widths);
}

fn line(out: &mut String, title: &str, cells: impl Iterator<Item = String>, widths: &[usize]) {
    out.push_str(&format!("{title:ROW_WIDTH$}"));
    for (cell, width) in cells.zip(widths) {
        out.push_str(&format!("  {cell:>width$}"));
    }
    let kept = out.trim_end_matches(' ').len();
    out.truncate(kept);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn ratios_to_direct() {
        let text = text(&report(), Show::Ratio);
        let table = text.split_once("\n\n").unwrap().1;
        let expected = "                                    direct      bindfs\n\
                        data\n  read                           82.9 MB/s       4.00x\n\
                        names\n  stat, again                     1.00 k/s       2.00x\n\
                        mean of all                                      2.83x\n\
                        Bytes, or what the row says: the fewer the better, in the worst round\n  full: over the limit\n\
                        \x20                                        -        4096\n\
                        note: nacre skipped: nothing is mounted | at all\nnote: a <note>\n";
        assert_eq!(table, expected);
    }

    #[test]
    fn rates_of_all_targets() {
        assert!(text(&report(), Show::Time).contains("stat, again                     1.00 k/s      500 /s\n"));
    }
}
