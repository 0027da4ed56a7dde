//! Tiny runs over file systems in images: the kernel's, a stand-in for nacre's pools, and zfs-fuse where it is
//! installed. They need root and loop devices; elsewhere they print that and pass.

use std::collections::BTreeSet;

use super::*;

/// A stand-in for nacre whose pool is a bind mount: its verbs are those that the table uses, and
/// its crashes lose nothing.
const POOL: &str = "#!/bin/sh
home=${0%/*}
echo \"$*\" >> \"$home/calls\"
case \"$1 $2\" in
  'pool create')
    while [ $# -gt 2 ]; do [ \"$1\" = -m ] && echo \"$2\" > \"$home/point\"; shift; done
    rm -rf \"$home/content\"; mkdir \"$home/content\"; exec mount --bind \"$home/content\" \"$(cat \"$home/point\")\" ;;
  'pool import') exec mount --bind \"$home/content\" \"$(cat \"$home/point\")\" ;;
  'copy -q') exec cp -a \"$3\" \"$4\" ;;
  'pool export') exec umount \"$(cat \"$home/point\")\" ;;
  *) echo stand-in ;;
esac
";

const FEW: [&str; 14] = [
    "--rounds",
    "1",
    "--image",
    "512M",
    "--size",
    "8M",
    "--files",
    "40",
    "--overwrite",
    "8M",
    "--fsyncs",
    "3",
    "--snapshots",
    "3",
];

fn possible() -> bool {
    let possible = rustix::process::geteuid().is_root()
        && ["losetup", "mkfs.xfs", "xfs_io"].iter().all(|name| programs::find(name).is_some())
        && Path::new("/dev/loop-control").exists();
    if !possible {
        eprintln!("skipped: needs root, loop devices, mkfs.xfs and xfs_io");
    }
    possible
}

/// Runs a table with the stand-in; returns its report and the calls of the stand-in.
fn measured(table: &str, targets: &str, amounts: &[&str]) -> (Report, String) {
    let directory = tempfile::tempdir().unwrap();
    let (scratch, json, nacre) =
        (directory.path().join("scratch"), directory.path().join("result.json"), directory.path().join("nacre"));
    script(&nacre, POOL);
    let words =
        [table, "--scratch", scratch.to_str().unwrap(), "--nacre", nacre.to_str().unwrap(), "--targets", targets];
    let rest = ["--json", json.to_str().unwrap()];
    assert_eq!(run(&arguments(&[&words[..], amounts, &rest[..]].concat())), ExitCode::SUCCESS);
    assert_eq!(mounts::below(directory.path()).unwrap(), Vec::<std::path::PathBuf>::new());
    assert!(!scratch.exists());
    let report: Report = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    (report, fs::read_to_string(directory.path().join("calls")).unwrap_or_default())
}

fn missing(report: &Report, target: &str) -> BTreeSet<String> {
    report
        .tests
        .iter()
        .filter(|test| report.cells_of(&test.id, target).count() == 0)
        .map(|test| test.id.clone())
        .collect()
}

#[test]
fn pools_are_measured_beside_a_file_system_of_the_kernel() {
    if !possible() {
        return;
    }
    let groups = ["--tests", "small-writes,small-files,versions,recovery"];
    let (report, calls) = measured("pool", "nacre-pool", &[&FEW[..], &groups[..]].concat());
    assert_eq!(report.notes, Vec::<String>::new());
    for target in &report.targets {
        assert_eq!(target.skipped, None, "{}", target.id);
        assert_eq!(missing(&report, &target.id), BTreeSet::new(), "{}", target.id);
    }
    let lines = |start: &str| calls.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!((lines("pool create -f -O compression=on -m /"), lines("pool import -d /")), (4, 1), "{calls}");
    assert_eq!(lines("pool export nacre-bench-"), 4, "{calls}");
    let pool = format!("nacre-bench-{}", std::process::id());
    let snapshots = calls
        .lines()
        .filter(|line| line.starts_with("fs snapshot nacre-bench-") && !line.ends_with("@settled"))
        .count();
    assert_eq!((snapshots, lines(&format!("fs clone {pool}@first {pool}/copy"))), (4, 1), "{calls}");
    assert_eq!(
        (lines(&format!("fs destroy {pool}/copy")), lines(&format!("fs destroy {pool}@first"))),
        (1, 1),
        "{calls}"
    );
}

#[test]
fn directories_of_many_names_are_measured() {
    if !possible() {
        return;
    }
    let amounts = ["--rounds", "1", "--image", "512M", "--files", "200", "--directories", "50"];
    let (report, calls) = measured("listing", "nacre-pool", &amounts);
    assert_eq!(report.notes, Vec::<String>::new());
    // Neither the kernel nor the stand-in has a daemon.
    let mut left_out = BTreeSet::from(["many-memory", "tree-memory", "copy-memory"].map(str::to_owned));
    let has_rsync = crate::programs::find("rsync").is_some();
    if !has_rsync {
        left_out.insert("copy-rsync".to_owned());
    }
    assert_eq!((missing(&report, "xfs"), missing(&report, "nacre-pool")), (left_out.clone(), left_out));
    assert!(summary::worst(&report, "many-used", "xfs").unwrap() > 200.0 * 4096.0);
    let imports = calls.lines().filter(|line| line.starts_with("pool import")).count();
    assert_eq!(imports, if has_rsync { 7 } else { 6 }, "each directory is cold twice, each copy once: {calls}");
}

#[test]
fn aged_file_systems_are_measured() {
    if !possible() {
        return;
    }
    let amounts = ["--quick", "--image", "512M", "--seconds", "1", "--overwrite", "8M"];
    let tests = ["--tests", "aged-50,aged-reading"];
    let (report, calls) = measured("aged", "nacre-pool-off", &[&amounts[..], &tests[..]].concat());
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!(missing(&report, "xfs"), BTreeSet::new());
    // No process serves the stand-in.
    let costs = ["aged-50-16k-cost", "aged-50-4k-cost", "aged-50-128k-cost"].map(str::to_owned);
    assert_eq!(missing(&report, "nacre-pool-off"), BTreeSet::from(costs));
    let one = (1 << 20) as f64;
    let cost = summary::worst(&report, "aged-50-16k-cost", "xfs").unwrap();
    // It overwrites in place; what is overwritten again before it is written out is written once.
    assert!((1.0..1.5 * one).contains(&cost), "{cost}");
    // XFS allocates beyond the end of a file that grows.
    let size = summary::worst(&report, "aged-50-4k-size", "xfs").unwrap();
    assert!((one..1.5 * one).contains(&size), "{size}");
    let imports = calls.lines().filter(|line| line.starts_with("pool import")).count();
    assert_eq!(imports, 6, "fresh and after two loads, each twice cold: {calls}");
}

/// zfs-fuse serves a whole machine: where it runs already, it is reported and left out.
#[test]
fn zfs_fuse_is_measured_where_it_is_installed() {
    if !possible() || programs::find("zfs-fuse").is_none() {
        eprintln!("skipped: needs zfs-fuse");
        return;
    }
    let (report, _) = measured("pool", "zfs-fuse", &[&FEW[..], &["--tests", "versions,recovery"]].concat());
    let zfs = report.targets.iter().find(|target| target.id == "zfs-fuse").unwrap();
    if let Some(reason) = &zfs.skipped {
        assert!(reason.contains("another zfs-fuse is running"), "{reason}");
        return;
    }
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!(missing(&report, "zfs-fuse"), BTreeSet::new());
}

/// Over a real S3 server, which the stand-in never uses.
#[test]
fn file_systems_in_a_bucket_are_measured() {
    if !possible() || crate::buckets::obstacle().is_some() || programs::find("git").is_none() {
        eprintln!("skipped: needs root, git, and versitygw or moto_server");
        return;
    }
    let amounts =
        ["--rounds", "1", "--image", "512M", "--files", "5", "--tree", "5", "--fsyncs", "3", "--stream", "8M"];
    // The stand-in has no readers that could follow it.
    let (report, calls) = measured("object", "nacre-5", &[&amounts[..], &["--tests", "bucket"]].concat());
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!((missing(&report, "nacre-pool"), missing(&report, "nacre-5")), (BTreeSet::new(), BTreeSet::new()));
    let lines = |start: &str| calls.lines().filter(|line| line.starts_with(start)).count();
    let pool = format!("nacre-bench-bucket-{}", std::process::id());
    let made: Vec<&str> = calls.lines().filter(|line| line.contains(" --endpoint http://127.0.0.1:")).collect();
    assert!(made.len() == 1 && made[0].ends_with(&format!("{pool} s3://bench/pool")), "{calls}");
    assert_eq!((lines(&format!("pool import {pool}")), lines(&format!("pool export {pool}"))), (3, 4), "{calls}");
}
