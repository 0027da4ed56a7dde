//! `nacre bench`: tables of file-system operations, measured on this machine over the directory itself, mounts of
//! nacre and of other programs. Called by the program `nacre-bench`, which `nacre` starts; runs every program,
//! nacre included, from outside.
//!
//! ```text
//! options   arguments -> Plan                     (pure)
//! table, target        what is measured over what (data)
//! measure   Plan -> Report: rounds, turns, visits
//!   transport, scratch, images, limits, pools, buckets, delay_line, mounted, mounts, holders, undo, programs, memory   effects on the machine, and undoing them
//!   workload/*                                    operations that are timed
//! clock     time, and waiting until a deadline
//! report    the result as data
//! summary, stats, figures, export/*               Report -> text (pure)
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod buckets;
mod clock;
mod delay_line;
mod export;
mod failure;
mod figures;
mod holders;
mod images;
mod limits;
mod machine;
mod measure;
mod memory;
mod mounted;
mod mounts;
mod options;
mod pools;
mod programs;
mod report;
#[cfg(test)]
mod sample_report;
mod scale;
mod scratch;
mod stats;
mod summary;
mod table;
mod target;
mod transport;
mod undo;
mod workload;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ArgMatches;

use export::Exports;
use failure::{Doing, Failure};
use report::Report;
use table::Table;

/// Runs the command line. Exit codes: 0 done, 1 failed (or a figure missed, with `--check`), 2 a wrong command
/// line.
pub fn run(matches: &ArgMatches) -> ExitCode {
    match dispatch(matches) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("nacre bench: {failure}");
            if failure.is_usage() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn dispatch(matches: &ArgMatches) -> Result<ExitCode, Failure> {
    match matches.subcommand() {
        Some(("show", matches)) => show(matches),
        Some((name, matches)) => match table::find(name) {
            Some(table) if matches.get_flag("list") => list(table),
            Some(table) => bench(table, matches),
            None => Err(Failure::usage(format!("no table {name}"))),
        },
        None => Err(Failure::usage("which table?")),
    }
}

fn bench(table: &'static Table, matches: &ArgMatches) -> Result<ExitCode, Failure> {
    let plan = options::plan(table, matches)?;
    plan.exports.check(table.arguments.name)?;
    let report = measure::run(&plan)?;
    publish(&report, &plan.exports, plan.check)
}

fn show(matches: &ArgMatches) -> Result<ExitCode, Failure> {
    let path = matches.get_one::<PathBuf>("result").ok_or_else(|| Failure::new("which result?"))?;
    let text = fs::read(path).doing("reading", path)?;
    let report: Report =
        serde_json::from_slice(&text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    if report.format != report::FORMAT {
        return Err(Failure::new(format!(
            "{} has format {}, this program reads {}",
            path.display(),
            report.format,
            report::FORMAT
        )));
    }
    let exports = options::exports(matches);
    exports.check(&report.table)?;
    publish(&report, &exports, false)
}

fn list(table: &Table) -> Result<ExitCode, Failure> {
    let mut text = String::from("targets (* by default)\n");
    for target in table.targets {
        let star = if table.default_targets.contains(&target.id) { '*' } else { ' ' };
        text.push_str(&format!("  {star} {:20} {}\n", target.id, target.title));
    }
    for group in table.groups() {
        text.push_str(&format!("tests of {}: {}\n", group.id(), group.title()));
        for test in table.tests.iter().filter(|test| test.group == group) {
            text.push_str(&format!("    {:24} {}\n", test.id, test.title));
        }
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn publish(report: &Report, exports: &Exports, check: bool) -> Result<ExitCode, Failure> {
    exports.write(report)?;
    print(&export::terminal::text(report, exports.show))?;
    let verdicts = figures::judge_table(report)?;
    let shown: Vec<figures::Verdict> =
        verdicts.iter().filter(|verdict| check || verdict.reached.is_some()).cloned().collect();
    if !shown.is_empty() {
        print(&format!("\n{}", figures::text(&shown)))?;
    }
    let missed = verdicts.iter().any(|verdict| verdict.kept == Some(false));
    Ok(if check && missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(text: &str) -> Result<(), Failure> {
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| Failure::new(format!("writing the result: {error}")))
}

#[cfg(test)]
mod tests;
