//! dd(1) as administrators measure with it: every block synced, everything synced at the end by
//! sync(1) or by dd itself; and several dd that append at once, as loggers do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::appends::{Line, expect_length};
use super::{Visit, timed};
use crate::clock;
use crate::failure::{Doing, Failure};

const MIB: u64 = 1024 * 1024;

fn command(arguments: &[String], file: &Path) -> Command {
    let mut output = std::ffi::OsString::from("of=");
    output.push(file);
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "status=none"]).args(arguments).arg(output).env("LC_ALL", "C").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn start(arguments: &[String], file: &Path) -> Result<Child, Failure> {
    command(arguments, file).spawn().map_err(|error| Failure::new(format!("starting dd: {error}")))
}

fn finish(child: Child) -> Result<(), Failure> {
    let output = child.wait_with_output().map_err(|error| Failure::new(format!("waiting for dd: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
    Err(Failure::new(format!("dd failed ({}): {text}", output.status)))
}

fn sync() -> Result<(), Failure> {
    let status = Command::new("sync")
        .stdin(Stdio::null())
        .status()
        .map_err(|error| Failure::new(format!("starting sync: {error}")))?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("sync failed ({status})"))) }
}

/// Returns the dirty bytes of the machine.
fn dirty() -> Result<u64, Failure> {
    let path = Path::new("/proc/meminfo");
    Ok(parse_dirty(&fs::read_to_string(path).doing("reading", path)?))
}

fn parse_dirty(meminfo: &str) -> u64 {
    let of = |word: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(word));
        line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
    };
    (of("Dirty:") + of("Writeback:")) * 1024
}

/// Measures dd alone on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (file, bytes) = (visit.own.join("file"), visit.scale.dd * MIB);
    let words = |extra: &str| -> Vec<String> {
        let usual = [String::from("bs=1M"), format!("count={}", visit.scale.dd)];
        usual.into_iter().chain((!extra.is_empty()).then(|| extra.to_owned())).collect()
    };
    let once = |extra: &str| timed(|| finish(start(&words(extra), &file)?));
    let done = |test: &'static str, elapsed: Duration| {
        expect_length(&file, bytes)?;
        visit.sample(test, elapsed, bytes)?;
        visit.tidy(std::slice::from_ref(&file))
    };
    done("dd-sync", once("oflag=sync")?.0)?;
    // The sync applies to the whole machine: other processes' dirty data must not be part of it.
    sync()?;
    let alone = once("")?.0;
    let syncing = timed(sync)?.0;
    let left = dirty()?;
    visit.sample("dd-alone", alone, bytes)?;
    visit.count("dirty-after-sync", left)?;
    done("dd-then-sync", alone + syncing)?;
    done("dd-fsync", once("conv=fsync")?.0)
}

/// Measures several dd that append short lines at once.
pub fn run_writers(visit: &mut Visit<'_>) -> Result<(), Failure> {
    for (test, writers, together) in
        [("writers2-own", 2, false), ("writers2-one", 2, true), ("writers4-own", 4, false), ("writers4-one", 4, true)]
    {
        let paths: Vec<PathBuf> =
            (0..writers).map(|writer| visit.own.join(format!("log-{}", if together { 0 } else { writer }))).collect();
        let elapsed = append_at_once(&paths, visit.scale.appends)?;
        let mut files = paths;
        files.dedup();
        let line = Line::Short.text().len() as u64 + 1;
        let all = visit.scale.appends * writers;
        files.iter().try_for_each(|file| expect_length(file, all * line / files.len() as u64))?;
        visit.sample(test, elapsed, all)?;
        visit.tidy(&files)?;
    }
    Ok(())
}

/// Starts one dd for each path, concurrently; returns the time until the last has ended.
fn append_at_once(paths: &[PathBuf], count: u64) -> Result<Duration, Failure> {
    let line = Line::Short.text().len() + 1;
    let words = [format!("bs={line}"), format!("count={count}"), "oflag=append".to_owned(), "conv=notrunc".to_owned()];
    let begin = clock::now();
    let started: Vec<Result<Child, Failure>> = paths.iter().map(|path| start(&words, path)).collect();
    // Every one that runs is waited for, even if others failed.
    let results: Vec<Result<(), Failure>> = started.into_iter().map(|child| child.and_then(finish)).collect();
    let elapsed = begin.elapsed();
    results.into_iter().collect::<Result<Vec<()>, Failure>>()?;
    Ok(elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_bytes_are_read() {
        assert_eq!(
            parse_dirty("MemFree: 9 kB\nDirty:        12 kB\nWriteback:     4 kB\nWritebackTmp: 8 kB\n"),
            16 * 1024
        );
        assert_eq!(parse_dirty(""), 0);
    }

    #[test]
    fn writers_share_a_file_without_losing_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        append_at_once(&[path.clone(), path.clone(), path.clone()], 50).unwrap();
        expect_length(&path, 3 * 50 * 51).unwrap();
        let failure = append_at_once(&[directory.path().join("missing/log")], 1).unwrap_err();
        assert!(failure.to_string().contains("dd failed"), "{failure}");
    }
}
