//! A tiny real run over the directory itself and a symbolic link: everything but mounts, on real files.

use std::fs;
use std::process::ExitCode;

use super::*;

fn arguments(words: &[&str]) -> ArgMatches {
    command().try_get_matches_from([&["bench"], words].concat()).unwrap()
}

#[test]
fn a_small_run_measures_every_test_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (source, scratch, json) = (directory.path().join("source"), directory.path().join("scratch"), directory.path().join("result.json"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("precious"), "x").unwrap();
    let (source_word, scratch_word, json_word) = (source.to_str().unwrap(), scratch.to_str().unwrap(), json.to_str().unwrap());
    let groups = "iozone,cache,files,listing,tree,clients";
    let words = ["mirror", "--source", source_word, "--scratch", scratch_word, "--targets", "direct,symlink", "--tests", groups];
    let small =
        ["--rounds", "2", "--sizes", "64K", "--records", "4K,64K", "--cache", "1M", "--files", "20", "--listing", "20", "--tree", "5"];
    let code = run(&arguments(&[&words[..], &small[..], &["--json", json_word]].concat()));
    assert_eq!(code, ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    for test in &report.tests {
        for target in ["direct", "symlink"] {
            let cells: Vec<_> = report.cells_of(&test.id, target).collect();
            assert_eq!(cells.len(), if test.id.starts_with("iozone") { 2 } else { 1 }, "{} on {target}", test.id);
            for cell in cells {
                assert_eq!(cell.samples.len(), 2, "{} on {target}", test.id);
                assert!(cell.amount > 0.0 && cell.samples.iter().all(|seconds| *seconds > 0.0), "{} on {target}", test.id);
            }
        }
    }
    let left: Vec<_> = fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["precious"], "the source directory is as it was");
    assert!(!scratch.exists());
    let shown = run(&arguments(&["show", json_word, "--csv", directory.path().join("again.csv").to_str().unwrap()]));
    assert_eq!(shown, ExitCode::SUCCESS);
    assert!(directory.path().join("again.csv").exists());
}

#[test]
fn a_scratch_directory_of_somebody_else_fails_the_run() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("precious"), "x").unwrap();
    let path = directory.path().to_str().unwrap();
    assert_eq!(run(&arguments(&["mirror", "--source", path, "--scratch", path, "--targets", "direct"])), ExitCode::FAILURE);
    let left: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["precious"]);
}

#[test]
fn bad_arguments_are_errors() {
    for bad in [&["mirror", "--fs", "fat"][..], &["mirror", "--rounds", "0"], &["mirror", "--quick", "--full"], &["nothing"], &[]] {
        assert!(command().try_get_matches_from([&["bench"], bad].concat()).is_err(), "{bad:?}");
    }
    assert_eq!(run(&arguments(&["mirror", "--targets", "nonsense"])), ExitCode::FAILURE);
    assert_eq!(run(&arguments(&["mirror", "--cache", "1000"])), ExitCode::FAILURE);
}

/// Needs root, bindfs and the fuse device, like every test that mounts; says so and passes elsewhere.
#[test]
fn real_mounts_are_measured_and_taken_away() {
    let root = rustix::process::geteuid().is_root();
    if !root || programs::find("bindfs").is_none() || !std::path::Path::new("/dev/fuse").exists() {
        eprintln!("skipped: needs root, bindfs and /dev/fuse");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let source_word = directory.path().to_str().unwrap();
    let words = ["mirror", "--source", source_word, "--scratch", scratch.to_str().unwrap(), "--targets", "bind,bindfs,bind-bindfs"];
    let small = ["--tests", "cache,tree,rename", "--rounds", "1", "--cache", "1M", "--files", "20", "--tree", "5"];
    assert_eq!(run(&arguments(&[&words[..], &small[..], &["--json", json.to_str().unwrap()]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    for target in &report.targets {
        assert_eq!(target.skipped, None, "{}", target.id);
        for test in &report.tests {
            assert_eq!(report.cells_of(&test.id, &target.id).count(), 1, "{} on {}", test.id, target.id);
        }
    }
    assert_eq!(mounts::below(directory.path()).unwrap(), Vec::<std::path::PathBuf>::new());
    assert!(!scratch.exists());
}

#[test]
fn a_nacre_that_does_not_mount_is_skipped_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let liar = programs::find("true").unwrap();
    let words = ["mirror", "--source", directory.path().to_str().unwrap(), "--scratch", scratch.to_str().unwrap()];
    let liar = ["--nacre", liar.to_str().unwrap(), "--targets", "nacre", "--tests", "mmap,cache", "--rounds", "1", "--cache", "1M"];
    assert_eq!(run(&arguments(&[&words[..], &liar[..], &["--json", json.to_str().unwrap()]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let reason = report.targets.iter().find(|target| target.id == "nacre").unwrap().skipped.clone();
    assert!(reason.as_deref().is_some_and(|reason| reason.contains("nothing is mounted")), "{reason:?}");
    assert_eq!(report.cells_of("cache-read-4k", "direct").count(), 1);
    assert_eq!(report.cells_of("cache-read-4k", "nacre").count(), 0);
}
