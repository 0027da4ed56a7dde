//! Comma-separated values (RFC 4180), one line per cell, for spreadsheets. Where the unit is
//! `count`, the columns of seconds hold bytes, and there is no rate and no ratio.

use crate::report::Report;
use crate::summary::{cell_ratio, spread};
use crate::table::COUNT;

/// Returns the text, heading first.
pub fn text(report: &Report) -> String {
    let mut out = String::from(
        "table,test,target,baseline,file_bytes,record_bytes,amount,unit,rounds,median_s,min_s,max_s,rate_per_s,time_ratio\n",
    );
    for cell in &report.cells {
        let (Some(spread), Some(target)) =
            (spread(cell), report.targets.iter().find(|target| target.id == cell.target))
        else {
            continue;
        };
        let unit = report.tests.iter().find(|test| test.id == cell.test).map_or("", |test| test.unit.as_str());
        let (file, record) =
            cell.point.map_or_else(Default::default, |point| (point.file.to_string(), point.record.to_string()));
        let timed = unit != COUNT;
        let ratio = cell_ratio(report, cell, &target.baseline).filter(|_| timed);
        let ratio = ratio.map_or_else(String::new, |ratio| format!("{ratio:.6}"));
        let words = [
            quoted(&report.table),
            quoted(&cell.test),
            quoted(&cell.target),
            quoted(&target.baseline),
            file,
            record,
            format!("{}", cell.amount),
            unit.to_owned(),
            cell.samples.len().to_string(),
            format!("{:.9}", spread.median),
            format!("{:.9}", spread.minimum),
            format!("{:.9}", spread.maximum),
            if timed { format!("{:.3}", cell.amount / spread.median) } else { String::new() },
            ratio,
        ];
        out.push_str(&words.join(","));
        out.push('\n');
    }
    out
}

fn quoted(word: &str) -> String {
    if word.contains([',', '"', '\n', '\r']) { format!("\"{}\"", word.replace('"', "\"\"")) } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn one_line_per_cell() {
        let text = text(&report());
        assert_eq!(text.lines().count(), 8);
        let last =
            "mirror,stat-again,bindfs,direct,,,1000,operations,3,2.000000000,1.000000000,3.000000000,500.000,2.000000";
        assert_eq!(text.lines().nth(6), Some(last));
        let counted = "mirror,overshoot,bindfs,direct,,,0,count,3,0.000000000,0.000000000,4096.000000000,,";
        assert_eq!(text.lines().last(), Some(counted));
        let columns = text.lines().next().unwrap().split(',').count();
        assert!(text.lines().all(|line| line.split(',').count() == columns));
    }

    #[test]
    fn quoting() {
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(quoted("plain"), "plain");
    }
}
