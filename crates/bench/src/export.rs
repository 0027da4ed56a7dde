//! Exporters: each turns the same [`Report`] into text. Pure, so that a saved result can be
//! exported again; only [`Exports::write`] touches files.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::failure::{Doing, Failure};
use crate::report::Report;

pub mod csv;
pub mod html;
pub mod markdown;
pub mod plot;
pub mod terminal;

/// What the cells of the terminal table show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Show {
    /// Ratio of times to the baseline.
    #[default]
    Ratio,
    /// Rates.
    Time,
}

/// Destinations of the results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exports {
    /// Cells of the terminal table.
    pub show: Show,
    /// JSON file.
    pub json: Option<PathBuf>,
    /// CSV file.
    pub csv: Option<PathBuf>,
    /// HTML file.
    pub html: Option<PathBuf>,
    /// Markdown file; the part between its markers is replaced.
    pub markdown: Option<PathBuf>,
    /// Name of that part, in addition to the table's; `None`: only the table's.
    pub section: Option<String>,
}

impl Exports {
    /// Checks that every requested file can be written, before anything is measured. Nothing is made or changed.
    pub fn check(&self, table: &str) -> Result<(), Failure> {
        for path in [&self.json, &self.csv, &self.html, &self.markdown].into_iter().flatten() {
            match fs::OpenOptions::new().append(true).open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let directory =
                        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                    rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK).doing("writing", path)?;
                }
                opened => drop(opened.doing("writing", path)?),
            }
        }
        if let Some(path) = self.markdown.as_ref().filter(|path| path.exists()) {
            let old = fs::read_to_string(path).doing("reading", path)?;
            markdown::place(&old, table, self.section.as_deref())?;
        }
        Ok(())
    }

    /// Writes every requested file.
    pub fn write(&self, report: &Report) -> Result<(), Failure> {
        if let Some(path) = &self.json {
            let text =
                serde_json::to_string_pretty(report).map_err(|error| Failure::new(format!("writing JSON: {error}")))?;
            fs::write(path, text + "\n").doing("writing", path)?;
        }
        if let Some(path) = &self.csv {
            fs::write(path, csv::text(report)).doing("writing", path)?;
        }
        if let Some(path) = &self.html {
            fs::write(path, html::page(report)?).doing("writing", path)?;
        }
        if let Some(path) = &self.markdown {
            let old = match fs::read_to_string(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
                result => result.doing("reading", path)?,
            };
            fs::write(path, markdown::replace(&old, self.section.as_deref(), report)?).doing("writing", path)?;
        }
        Ok(())
    }
}

/// A rate with its unit: `1.23 GB/s`, `45.6 k/s`.
pub fn rate(rate: f64, unit: &str) -> String {
    let suffix = if unit == "bytes" { "B/s" } else { "/s" };
    let (scaled, prefix) = match rate {
        rate if rate >= 1e9 => (rate / 1e9, "G"),
        rate if rate >= 1e6 => (rate / 1e6, "M"),
        rate if rate >= 1e3 => (rate / 1e3, "k"),
        rate => (rate, ""),
    };
    let digits = match scaled {
        scaled if scaled >= 100.0 => 0,
        scaled if scaled >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {prefix}{suffix}")
}

/// A ratio of times: `4.17x`, `12.3x`, `120x`.
pub fn ratio(ratio: f64) -> String {
    match ratio {
        ratio if ratio >= 100.0 => format!("{ratio:.0}x"),
        ratio if ratio >= 10.0 => format!("{ratio:.1}x"),
        ratio => format!("{ratio:.2}x"),
    }
}

/// Heading of the rows of [`crate::summary::counts`].
pub const COUNTS: &str = "Bytes, or what the row says: the fewer the better, in the worst round";

/// Formats a count: exactly, because one too many matters.
pub fn count(bytes: f64) -> String {
    format!("{bytes:.0}")
}

/// Returns the name of the baseline of ratios.
pub fn base(report: &Report) -> &str {
    match report.targets.iter().find(|target| target.id == target.baseline) {
        Some(target) if target.id != "direct" || target.title != "direct" => &target.title,
        _ => "the directory itself",
    }
}

/// Returns the lines that describe where and how a run was made.
pub fn provenance(report: &Report) -> Vec<String> {
    let (machine, settings) = (&report.machine, &report.settings);
    let transport = match machine.fuse_over_io_uring {
        Some(true) => "io_uring",
        Some(false) | None => "the fuse device",
    };
    let who = if settings.root { "root" } else { "an ordinary user" };
    let first = report.tests.iter().any(|test| test.id.ends_with("-first"));
    let cold = report.tests.iter().any(|test| test.title.ends_with(", cold"));
    let first = match (first, cold) {
        (true, _) => format!("; \"first\" is a {}", settings.cold),
        (false, true) => format!("; \"cold\" is a {}", settings.cold),
        (false, false) => String::new(),
    };
    // Older results have numbers only.
    let amounts =
        if settings.amounts.is_empty() { format!("{} small files", settings.files) } else { settings.amounts.clone() };
    let programs: Vec<String> = machine.programs.iter().map(|(name, version)| format!("{name}: {version}")).collect();
    let mut lines = vec![
        format!(
            "Linux {}, {} x {}, {:.1} GiB",
            machine.kernel,
            machine.cores,
            machine.cpu,
            machine.memory as f64 / f64::from(1 << 30)
        ),
        format!("Source on {}; FUSE over {transport}; measured by {who}", machine.filesystem),
        format!("{} UTC, {:.0} s, median of {}{first}", report.started, report.seconds, settings.rounds),
        amounts,
        programs.join("; "),
    ];
    if crate::machine::busy(machine) {
        lines.push(format!(
            "The machine was not idle at the start (load {:.2}): small differences mean nothing",
            machine.load
        ));
    }
    lines
}

/// Returns what was left out and why, and remarks of the run.
pub fn remarks(report: &Report) -> Vec<String> {
    let skipped = report
        .targets
        .iter()
        .filter_map(|target| target.skipped.as_ref().map(|why| format!("{} skipped: {why}", target.title)));
    skipped.chain(report.notes.iter().cloned()).collect()
}

/// Columns with at least one measurement, by index into the report's targets.
pub fn measured_columns(report: &Report) -> Vec<usize> {
    let has_cell = |id: &str| report.cells.iter().any(|cell| cell.target == id);
    report.targets.iter().enumerate().filter(|(_, target)| has_cell(&target.id)).map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_report::report;

    #[test]
    fn numbers_for_people() {
        assert_eq!(rate(1.234e9, "bytes"), "1.23 GB/s");
        assert_eq!(rate(45_600.0, "operations"), "45.6 k/s");
        assert_eq!(rate(7.0, "operations"), "7.00 /s");
        assert_eq!(ratio(4.166), "4.17x");
        assert_eq!(ratio(123.4), "123x");
    }

    #[test]
    fn every_file_is_written_and_json_reads_back() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| Some(directory.path().join(name));
        let exports = Exports {
            show: Show::Time,
            json: file("r.json"),
            csv: file("r.csv"),
            html: file("r.html"),
            markdown: file("r.md"),
            section: None,
        };
        exports.write(&report()).unwrap();
        let json = fs::read_to_string(directory.path().join("r.json")).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report());
        for name in ["r.csv", "r.html", "r.md"] {
            assert!(fs::metadata(directory.path().join(name)).unwrap().len() > 100, "{name}");
        }
        let before = fs::read_to_string(directory.path().join("r.md")).unwrap();
        exports.write(&report()).unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("r.md")).unwrap(), before, "writing again changes nothing");
    }

    #[test]
    fn what_cannot_be_written_is_found_before_anything_is_measured() {
        let directory = tempfile::tempdir().unwrap();
        let (there, page) = (directory.path().join("r.html"), directory.path().join("r.md"));
        let html = |path: PathBuf| Exports { html: Some(path), ..Exports::default() }.check("mirror");
        let markdown = || Exports { markdown: Some(page.clone()), ..Exports::default() }.check("mirror");
        assert_eq!(html(there.clone()), Ok(()));
        assert!(!there.exists(), "looking leaves nothing behind");
        assert!(html(directory.path().to_owned()).is_err(), "a directory is no file");
        assert!(html(directory.path().join("no/r.html")).is_err());
        assert_eq!(markdown(), Ok(()));
        fs::write(&page, "prose <!-- nacre bench mirror: begin -->").unwrap();
        assert!(markdown().is_err(), "one marker without the other");
        assert_eq!(fs::read_to_string(&page).unwrap(), "prose <!-- nacre bench mirror: begin -->");
    }

    #[test]
    fn skipped_columns_are_named_not_shown() {
        assert_eq!(measured_columns(&report()), [0, 1]);
        assert_eq!(remarks(&report()), ["nacre skipped: nothing is mounted | at all", "a <note>"]);
    }
}
