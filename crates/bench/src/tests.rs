//! A tiny real run over the directory itself and a symbolic link: everything except mounts, on real files.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use super::*;

mod pools;

fn arguments(words: &[&str]) -> ArgMatches {
    nacre_bench_arguments::command().try_get_matches_from([&["bench"], words].concat()).unwrap()
}

#[test]
fn a_small_run_measures_every_test_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (source, scratch, json) =
        (directory.path().join("source"), directory.path().join("scratch"), directory.path().join("result.json"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("precious"), "x").unwrap();
    let (source_word, scratch_word, json_word) =
        (source.to_str().unwrap(), scratch.to_str().unwrap(), json.to_str().unwrap());
    let groups = "iozone,cache,files,listing,tree,clients";
    let words = [
        "mirror",
        "--source",
        source_word,
        "--scratch",
        scratch_word,
        "--targets",
        "direct,symlink",
        "--tests",
        groups,
    ];
    let small = [
        "--rounds",
        "2",
        "--sizes",
        "64K",
        "--records",
        "4K,64K",
        "--cache",
        "1M",
        "--files",
        "20",
        "--listing",
        "20",
        "--tree",
        "5",
    ];
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
                assert!(
                    cell.amount > 0.0 && cell.samples.iter().all(|seconds| *seconds > 0.0),
                    "{} on {target}",
                    test.id
                );
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

/// Amounts of the table of logs that take no time.
const FEW: [&str; 14] = [
    "--rounds",
    "2",
    "--dd",
    "2",
    "--appends",
    "30",
    "--cache",
    "1M",
    "--files",
    "20",
    "--cage",
    "320M",
    "--fill",
    "320M",
];

#[test]
fn logs_are_measured_in_the_scratch_directory_itself() {
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let words =
        ["logs", "--scratch", scratch.to_str().unwrap(), "--targets", "direct", "--json", json.to_str().unwrap()];
    assert_eq!(run(&arguments(&[&words[..], &FEW[..]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    for test in report.tests.iter().filter(|test| !["overshoot", "lost"].contains(&test.id.as_str())) {
        let cells: Vec<_> = report.cells_of(&test.id, "direct").collect();
        assert_eq!(cells.len(), 1, "{}", test.id);
        assert!(
            cells.iter().all(|cell| cell.samples.len() == 2 && (test.unit == table::COUNT || cell.amount > 0.0)),
            "{}",
            test.id
        );
    }
    assert_eq!(report.cells_of("overshoot", "direct").count(), 0, "nothing bounds it, so nothing may fill it");
    assert!(!scratch.exists());
}

/// Needs root, loop devices, ext4 and Btrfs; prints that and passes elsewhere.
#[test]
fn images_are_filled_measured_and_taken_away() {
    let root = rustix::process::geteuid().is_root();
    let programs = ["losetup", "mkfs.ext4", "mkfs.btrfs", "chattr"];
    if !root
        || programs.iter().any(|name| programs::find(name).is_none())
        || !std::path::Path::new("/dev/loop-control").exists()
    {
        eprintln!("skipped: needs root, loop devices, {}", programs.join(", "));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let words = ["logs", "--scratch", scratch.to_str().unwrap(), "--targets", "loop-ext4-direct,loop-nodatacow"];
    let tests = ["--tests", "held-long,warm,fill", "--json", json.to_str().unwrap()];
    assert_eq!(run(&arguments(&[&words[..], &tests[..], &FEW[..]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    for target in &report.targets {
        assert_eq!(target.skipped, None, "{}", target.id);
        let bounded = target.id.starts_with("loop");
        for test in report.tests.iter().filter(|test| bounded || test.unit != table::COUNT) {
            assert_eq!(report.cells_of(&test.id, &target.id).count(), 1, "{} on {}", test.id, target.id);
        }
        if bounded {
            assert_eq!(
                summary::worst(&report, "overshoot", &target.id),
                Some(0.0),
                "an image is never more than its size"
            );
            assert_eq!(summary::worst(&report, "lost", &target.id), Some(0.0));
        }
    }
    assert_eq!(mounts::below(directory.path()).unwrap(), Vec::<std::path::PathBuf>::new());
    assert!(!scratch.exists());
}

/// Makes a program from a text. By a process of its own: a descriptor for writing in this one could be inherited by
/// a child of another test, and a program that is open for writing cannot be run.
pub(crate) fn script(path: &Path, text: &str) {
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(path).arg(text).status().unwrap().success());
}

/// A stand-in for nacre whose cage is a bind mount, which has no limit: the table must detect that.
const BOUNDLESS: &str = "#!/bin/sh
echo \"$NACRE_STATE_DIR $*\" >> \"${0%/*}/calls\"
case $1 in
  cage) while [ $# -gt 2 ]; do shift; done; exec mount --bind \"$1\" \"$2\" ;;
  umount) exec umount \"$2\" ;;
  *) echo stand-in ;;
esac
";

/// Needs root, to mount; prints that and passes elsewhere.
#[test]
fn a_cage_that_does_not_hold_is_found_out() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json, nacre) =
        (directory.path().join("scratch"), directory.path().join("result.json"), directory.path().join("nacre"));
    script(&nacre, BOUNDLESS);
    let words = [
        "logs",
        "--scratch",
        scratch.to_str().unwrap(),
        "--nacre",
        nacre.to_str().unwrap(),
        "--targets",
        "nacre-collected",
    ];
    let rest = ["--tests", "held-short,overshoot,lost", "--check", "--json", json.to_str().unwrap()];
    assert_eq!(run(&arguments(&[&words[..], &rest[..], &FEW[..]].concat())), ExitCode::FAILURE, "a figure is missed");
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    assert!(summary::worst(&report, "overshoot", "nacre-collected").unwrap() > f64::from(320 << 17));
    assert_eq!(summary::worst(&report, "lost", "nacre-collected"), Some(0.0));
    let calls = fs::read_to_string(directory.path().join("calls")).unwrap();
    let (state, cage) = calls.lines().find(|line| line.contains(" cage ")).unwrap().split_once(' ').unwrap();
    assert!(state.starts_with(scratch.to_str().unwrap()), "{state}");
    let shown = scratch.join("mnt/nacre-collected");
    let (own, shown) = (scratch.join("source/own/nacre-collected"), shown.display());
    assert_eq!(cage, format!("cage --size 335544320 --engine=fuse --writes=collected {} {shown}", own.display()));
    assert_eq!(
        calls.lines().filter(|line| line.ends_with(&format!(" umount {shown}"))).count(),
        4,
        "two groups, two rounds"
    );
    assert!(!scratch.exists());
}

#[test]
fn a_nacre_without_cages_is_skipped_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let liar = programs::find("false").unwrap();
    let words = ["logs", "--scratch", scratch.to_str().unwrap(), "--nacre", liar.to_str().unwrap()];
    let rest = ["--targets", "nacre-collected", "--tests", "held-short", "--json", json.to_str().unwrap()];
    assert_eq!(run(&arguments(&[&words[..], &rest[..], &FEW[..]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let reason = report.targets.iter().find(|target| target.id == "nacre-collected").unwrap().skipped.clone();
    assert!(reason.as_deref().is_some_and(|reason| reason.contains("false failed")), "{reason:?}");
    assert_eq!(report.cells_of("held-short", "direct").count(), 1);
    assert!(!scratch.exists());
}

#[test]
fn a_scratch_directory_of_somebody_else_fails_the_run() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("precious"), "x").unwrap();
    let path = directory.path().to_str().unwrap();
    assert_eq!(
        run(&arguments(&["mirror", "--source", path, "--scratch", path, "--targets", "direct"])),
        ExitCode::FAILURE
    );
    let left: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["precious"]);
}

#[test]
fn bad_arguments_are_errors() {
    for bad in [
        &["mirror", "--fs", "fat"][..],
        &["mirror", "--rounds", "0"],
        &["mirror", "--quick", "--full"],
        &["nothing"],
        &[],
    ] {
        assert!(nacre_bench_arguments::command().try_get_matches_from([&["bench"], bad].concat()).is_err(), "{bad:?}");
    }
    assert_eq!(run(&arguments(&["mirror", "--targets", "nonsense"])), ExitCode::from(2));
    assert_eq!(run(&arguments(&["mirror", "--cache", "1000"])), ExitCode::from(2));
    // No usage error, but found in advance: nothing is measured for a result that cannot be written.
    let directory = tempfile::tempdir().unwrap();
    let (scratch, page) = (directory.path().join("scratch"), directory.path().join("missing/page.html"));
    let words = ["mirror", "--scratch", scratch.to_str().unwrap(), "--html", page.to_str().unwrap()];
    assert_eq!(run(&arguments(&words)), ExitCode::FAILURE);
    assert!(!scratch.exists());
}

/// Needs root, bindfs and the fuse device, like every test that mounts; prints that and passes elsewhere.
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
    let words = [
        "mirror",
        "--source",
        source_word,
        "--scratch",
        scratch.to_str().unwrap(),
        "--targets",
        "bind,bindfs,bind-bindfs",
    ];
    let small = ["--tests", "cache,tree,rename", "--rounds", "1", "--cache", "1M", "--files", "20", "--tree", "5"];
    assert_eq!(
        run(&arguments(&[&words[..], &small[..], &["--json", json.to_str().unwrap()]].concat())),
        ExitCode::SUCCESS
    );
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
    let liar = [
        "--nacre",
        liar.to_str().unwrap(),
        "--targets",
        "nacre",
        "--tests",
        "mmap,cache",
        "--rounds",
        "1",
        "--cache",
        "1M",
    ];
    assert_eq!(
        run(&arguments(&[&words[..], &liar[..], &["--json", json.to_str().unwrap()]].concat())),
        ExitCode::SUCCESS
    );
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let reason = report.targets.iter().find(|target| target.id == "nacre").unwrap().skipped.clone();
    assert!(reason.as_deref().is_some_and(|reason| reason.contains("nothing is mounted")), "{reason:?}");
    assert_eq!(report.cells_of("cache-read-4k", "direct").count(), 1);
    assert_eq!(report.cells_of("cache-read-4k", "nacre").count(), 0);
}

/// Needs root, to mount, and overlayfs; prints that and passes elsewhere. Programs that are not installed are left
/// out.
#[test]
fn unions_are_measured_and_taken_away() {
    let knows = fs::read_to_string("/proc/filesystems").is_ok_and(|text| text.contains("\toverlay\n"));
    if !rustix::process::geteuid().is_root() || !knows || !std::path::Path::new("/dev/fuse").exists() {
        eprintln!("skipped: needs root, overlayfs and /dev/fuse");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json) = (directory.path().join("scratch"), directory.path().join("result.json"));
    let rivals: Vec<&str> =
        [("mergerfs", "mergerfs"), ("unionfs", "unionfs-fuse"), ("fuse-overlayfs", "fuse-overlayfs")]
            .into_iter()
            .filter_map(|(program, target)| programs::find(program).map(|_| target))
            .collect();
    let targets = format!("overlayfs,{}", rivals.join(","));
    let words = [
        "union",
        "--source",
        directory.path().to_str().unwrap(),
        "--scratch",
        scratch.to_str().unwrap(),
        "--targets",
        &targets,
    ];
    let small = [
        "--rounds",
        "1",
        "--names",
        "60",
        "--files",
        "20",
        "--copy",
        "1M",
        "--cache",
        "1M",
        "--json",
        json.to_str().unwrap(),
    ];
    assert_eq!(run(&arguments(&[&words[..], &small[..]].concat())), ExitCode::SUCCESS);
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    for target in &report.targets {
        assert_eq!(target.skipped, None, "{}", target.id);
        for test in &report.tests {
            let nobodys = ["direct", "overlayfs"].contains(&target.id.as_str()) && test.unit == table::COUNT
                || test.id == "memory-per-name";
            let copies_up = target.id == "mergerfs" && test.id.starts_with("copy-up");
            let expected = usize::from(!nobodys && !copies_up);
            assert_eq!(report.cells_of(&test.id, &target.id).count(), expected, "{} on {}", test.id, target.id);
        }
    }
    assert_eq!(mounts::below(directory.path()).unwrap(), Vec::<std::path::PathBuf>::new());
    assert!(!scratch.exists());
}
