//! A small made-up report for the tests of `summary`, `figures` and the exporters.

use crate::report::{Cell, FORMAT, Machine, Point, Report, Settings, TargetEntry, TestEntry};

/// Two tests and a count, three targets of which one was skipped, two points.
pub fn report() -> Report {
    let target = |id: &str, title: &str, skipped: Option<&str>| TargetEntry {
        id: id.to_owned(),
        title: title.to_owned(),
        baseline: "direct".to_owned(),
        skipped: skipped.map(str::to_owned),
    };
    let test = |id: &str, title: &str, group: &str, unit: &str| TestEntry {
        id: id.to_owned(),
        title: title.to_owned(),
        group: group.to_owned(),
        unit: unit.to_owned(),
    };
    let cell = |test: &str, target: &str, point: Option<(u64, u64)>, amount: f64, samples: &[f64]| Cell {
        test: test.to_owned(),
        target: target.to_owned(),
        point: point.map(|(file, record)| Point { file, record }),
        amount,
        samples: samples.to_vec(),
    };
    let (small, large) = (Some((65_536, 4096)), Some((1 << 20, 4096)));
    Report {
        format: FORMAT,
        table: "mirror".to_owned(),
        title: "A directory at a second place".to_owned(),
        started: "2026-11-20 11:00".to_owned(),
        seconds: 61.5,
        machine: Machine {
            kernel: "6.18.0 x86_64".to_owned(),
            cpu: "Example <9000>".to_owned(),
            cores: 2,
            memory: 1 << 30,
            filesystem: "ext4 on a loop device of 8192 MiB".to_owned(),
            load: 0.1,
            fuse_over_io_uring: Some(true),
            programs: vec![("bindfs".to_owned(), "bindfs 1.14.7".to_owned())],
        },
        settings: Settings {
            root: true,
            rounds: 3,
            amounts: "1000 small files".to_owned(),
            cold: "fresh".to_owned(),
            files: 1000,
            listing: 1000,
            tree: 100,
            cache_bytes: 1 << 20,
        },
        targets: vec![
            target("direct", "direct", None),
            target("bindfs", "bindfs", None),
            target("nacre", "nacre", Some("nothing is mounted | at all")),
        ],
        tests: vec![
            test("iozone-read", "read", "data", "bytes"),
            test("stat-again", "stat, again", "names", "operations"),
            test("overshoot", "over the limit", "full", "count"),
        ],
        cells: vec![
            cell("iozone-read", "direct", small, 65_536.0, &[0.001, 0.001, 0.002]),
            cell("iozone-read", "bindfs", small, 65_536.0, &[0.002, 0.002, 0.002]),
            cell("iozone-read", "direct", large, 1_048_576.0, &[0.01, 0.01, 0.01]),
            cell("iozone-read", "bindfs", large, 1_048_576.0, &[0.07, 0.08, 0.09]),
            cell("stat-again", "direct", None, 1000.0, &[1.0, 0.9, 1.1]),
            cell("stat-again", "bindfs", None, 1000.0, &[2.0, 3.0, 1.0]),
            cell("overshoot", "bindfs", None, 0.0, &[0.0, 4096.0, 0.0]),
        ],
        notes: vec!["a <note>".to_owned()],
    }
}
