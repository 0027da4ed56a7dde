//! The figures that nacre promises, as data (`figures` next to `Cargo.toml`), and their comparison with a run.
//!
//! Timing on a busy machine proves nothing, so this is information unless `--check` is given.

use crate::failure::Failure;
use crate::report::Report;
use crate::summary::{rate, ratio, worst};
use crate::table::{self, COUNT, Table};

/// The file as it was when this program was built.
pub const PROMISED: &str = include_str!("../figures");

/// Used instead of a base: the target is compared with itself in the other test.
pub const OWN: &str = "own";

/// One promised figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The target that the promise is about.
    pub target: String,
    /// The target it is compared with; [`COUNT`] for a count, [`OWN`] for no other target.
    pub base: String,
    /// Test that the promise is about.
    pub test: String,
    /// If given, the time in `test` is first divided by the time in this one: how the target scales.
    pub per: Option<String>,
    /// Largest ratio of times, or largest count.
    pub limit: f64,
    /// Rate in amounts per second that is enough whatever the ratio.
    pub or_rate: Option<f64>,
    /// Factor of the limit where requests are transported by the FUSE device.
    pub over_device: f64,
}

/// A promise and what a run reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The promise.
    pub figure: Figure,
    /// Ratio of times, or the count, if the run measured it.
    pub reached: Option<f64>,
    /// Whether it was kept, if the run measured it.
    pub kept: Option<bool>,
}

/// Parses the file: `TARGET BASE TEST[/TEST] LIMIT [or-rate NUMBER | over-device TIMES]`, or
/// `TARGET count TEST LIMIT`; `#` starts a comment.
pub fn parse(text: &str) -> Result<Vec<Figure>, Failure> {
    let mut figures = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        figures.push(parse_words(&words).ok_or_else(|| Failure::new(format!("figures, line {}: {line}", number + 1)))?);
    }
    Ok(figures)
}

fn parse_words(words: &[&str]) -> Option<Figure> {
    let (target, base, test, limit, rest) = match words {
        [target, base, test, limit, rest @ ..] => (target, base, test, limit, rest),
        _ => return None,
    };
    let (or_rate, over_device) = match rest {
        [] => (None, 1.0),
        ["or-rate", rate] => (Some(rate.parse().ok()?), 1.0),
        ["over-device", times] => (None, times.parse().ok().filter(|times: &f64| *times >= 1.0)?),
        _ => return None,
    };
    let (test, per) = test.split_once('/').map_or((*test, None), |(test, per)| (test, Some(per.to_owned())));
    Some(Figure {
        target: (*target).to_owned(),
        base: (*base).to_owned(),
        test: test.to_owned(),
        per,
        limit: limit.parse().ok().filter(|limit: &f64| *limit > 0.0 || *base == COUNT && *limit == 0.0)?,
        or_rate,
        over_device,
    })
}

/// Returns the figures of this table.
fn of_table(figures: Vec<Figure>, table: &Table) -> Vec<Figure> {
    figures
        .into_iter()
        .filter(|figure| table.test(&figure.test).is_some() && table.target(&figure.target).is_some())
        .collect()
}

/// Compares a run with the promises.
fn judge(report: &Report, figures: Vec<Figure>) -> Vec<Verdict> {
    figures
        .into_iter()
        .map(|mut figure| {
            if report.machine.fuse_over_io_uring != Some(true) {
                figure.limit *= figure.over_device;
            }
            let reached = reached(report, &figure);
            let fast_enough =
                figure.or_rate.and_then(|enough| rate(report, &figure.test, &figure.target).map(|rate| rate >= enough));
            let kept = reached.map(|ratio| ratio <= figure.limit || fast_enough == Some(true));
            Verdict { figure, reached, kept }
        })
        .collect()
}

/// Compares a run with the promises about its table. None of them is about runs by an ordinary user: the promise
/// for the mount of an ordinary user is measured by root's run, in a target of its own.
pub fn judge_table(report: &Report) -> Result<Vec<Verdict>, Failure> {
    let Some(table) = table::find(&report.table).filter(|_| report.settings.root) else { return Ok(Vec::new()) };
    Ok(judge(report, of_table(parse(PROMISED)?, table)))
}

fn reached(report: &Report, figure: &Figure) -> Option<f64> {
    if figure.base == COUNT {
        return worst(report, &figure.test, &figure.target);
    }
    if figure.base == OWN {
        // The amounts differ, so rates are compared.
        let own = rate(report, figure.per.as_deref()?, &figure.target)? / rate(report, &figure.test, &figure.target)?;
        return own.is_finite().then_some(own);
    }
    let own = ratio(report, &figure.test, &figure.target, &figure.base)?;
    match &figure.per {
        Some(per) => ratio(report, per, &figure.target, &figure.base).map(|single| own / single),
        None => Some(own),
    }
}

/// The verdicts as aligned text, one per line, in the file's own order.
pub fn text(verdicts: &[Verdict]) -> String {
    let mut out =
        String::from("kept  target           over             test                              limit    reached\n");
    for Verdict { figure, reached, kept } in verdicts {
        let test = figure.per.as_ref().map_or_else(|| figure.test.clone(), |per| format!("{}/{per}", figure.test));
        let mark = match kept {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        };
        // Counts are exact.
        let digits = if figure.base == COUNT { (0, 0) } else { (2, 3) };
        let limit = format!("{:.*}", digits.0, figure.limit);
        let reached = reached.map_or_else(|| "not measured".to_owned(), |ratio| format!("{ratio:.*}", digits.1));
        let rate = figure.or_rate.map_or_else(String::new, |rate| match rate {
            rate if rate >= 1e6 => format!("  or {:.0} MB/s", rate / 1e6),
            rate => format!("  or {rate:.0} /s"),
        });
        out.push_str(&format!(
            "{mark:5} {:16} {:16} {test:32} {limit:>6} {reached:>10}{rate}\n",
            figure.target, figure.base
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;
    use crate::table::{TABLES, Unit};

    #[test]
    fn the_file_names_real_targets_and_tests() {
        let figures = parse(PROMISED).unwrap();
        let of_tables: Vec<usize> = TABLES.iter().map(|table| of_table(figures.clone(), table).len()).collect();
        assert!(of_tables.iter().all(|count| *count > 5), "{of_tables:?}");
        assert_eq!(of_tables.iter().sum::<usize>(), figures.len(), "one of them is about nothing, or about two tables");
        for table in TABLES {
            for figure in of_table(figures.clone(), table) {
                assert!(
                    [COUNT, OWN].contains(&figure.base.as_str()) || table.target(&figure.base).is_some(),
                    "{}",
                    figure.base
                );
                assert!(figure.per.is_none_or(|per| table.test(&per).is_some()), "{}", figure.test);
                let counts = table.test(&figure.test).unwrap().unit == Unit::Count;
                assert!(counts || figure.base != COUNT, "{}", figure.test);
            }
        }
    }

    #[test]
    fn bad_lines_are_errors() {
        for bad in [
            "nacre direct stat-again",
            "nacre direct stat-again x",
            "nacre direct stat-again 1.2 or 3",
            "a b c -1",
            "a b c 0",
            "a count c -1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("# only\n\n  # comments").unwrap(), []);
    }

    #[test]
    fn verdicts() {
        let figures = parse(
            "bindfs direct stat-again 2.0\nbindfs direct stat-again 1.9\nnacre direct stat-again 1\n\
             bindfs direct stat-again 1.9 or-rate 500\nbindfs direct iozone-read/stat-again 1.5\n\
             bindfs count overshoot 0\nbindfs count overshoot 4096\nnacre count overshoot 0\n\
             bindfs own stat-again/stat-again 1\nbindfs own stat-again 1",
        );
        let kept: Vec<Option<bool>> = judge(&report(), figures.unwrap()).iter().map(|verdict| verdict.kept).collect();
        assert_eq!(
            kept,
            [Some(true), Some(false), None, Some(true), Some(false), Some(false), Some(true), None, Some(true), None]
        );
    }
}
