//! The result of a run as plain data: the only input of every exporter, of `summary` and of `figures`.
//!
//! Serialised as the JSON export and read back by `nacre bench show`. Fields are only ever added;
//! `format` changes when the meaning of one changes.

use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const FORMAT: u32 = 1;

/// A finished run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`] at the time of writing.
    pub format: u32,
    /// Name of the table.
    pub table: String,
    /// Heading of the table.
    pub title: String,
    /// Start of the run, UTC, as `YYYY-MM-DD HH:MM`.
    pub started: String,
    /// Wall-clock length of the run in seconds.
    pub seconds: f64,
    /// Machine that it ran on.
    pub machine: Machine,
    /// Settings of the run.
    pub settings: Settings,
    /// Columns in order.
    pub targets: Vec<TargetEntry>,
    /// Rows in order.
    pub tests: Vec<TestEntry>,
    /// Measurements, one cell for each test, target and point.
    pub cells: Vec<Cell>,
    /// Remarks for the reader: what was left out and why.
    pub notes: Vec<String>,
}

/// The machine that the numbers belong to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release and architecture.
    pub kernel: String,
    /// Model name of the first processor.
    pub cpu: String,
    /// Processors usable by this process.
    pub cores: usize,
    /// Memory in bytes.
    pub memory: u64,
    /// File system of the source, with the device that it is on.
    pub filesystem: String,
    /// One-minute load average at the start: above about 0.5 the machine was not idle.
    pub load: f64,
    /// Whether the kernel offers FUSE over io_uring; absent when it does not know the switch.
    pub fuse_over_io_uring: Option<bool>,
    /// First line of each program's version text.
    pub programs: Vec<(String, String)>,
}

/// How a run was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Whether root made the run; promises hold for root unless they say otherwise.
    pub root: bool,
    /// Rounds; each target is measured once a round.
    pub rounds: u32,
    /// Amounts of work, for users.
    #[serde(default)]
    pub amounts: String,
    /// How caches were emptied before a "first" measurement.
    pub cold: String,
    /// Number of small files.
    pub files: u64,
    /// Number of files in the big directory.
    pub listing: u64,
    /// Number of entries in the source tree.
    pub tree: u64,
    /// Size of the page-cache file in bytes.
    pub cache_bytes: u64,
}

/// A column of the table: a target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetEntry {
    /// Identifier of the target.
    pub id: String,
    /// Heading of the column.
    pub title: String,
    /// Identifier of the target that ratios refer to.
    pub baseline: String,
    /// Why it was not measured, or not in full.
    pub skipped: Option<String>,
}

/// A row of the table: a test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestEntry {
    /// Identifier of the test.
    pub id: String,
    /// Heading of the row.
    pub title: String,
    /// Heading of its group.
    pub group: String,
    /// `bytes` or `operations`: unit of amounts; `count`: nothing is timed, samples are counts that should be zero
    /// or small.
    pub unit: String,
}

/// File size and record size of one point of iozone's automatic mode, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Point {
    /// Size of the file.
    pub file: u64,
    /// Size of each record.
    pub record: u64,
}

/// Measurements of one test on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Identifier of the test.
    pub test: String,
    /// Identifier of the target.
    pub target: String,
    /// The point, for tests that have them.
    pub point: Option<Point>,
    /// Bytes moved or operations done in each sample.
    pub amount: f64,
    /// Seconds, or bytes where the test counts, one per round.
    pub samples: Vec<f64>,
}

impl Report {
    /// Returns every cell of a test on a target.
    pub fn cells_of<'a>(&'a self, test: &'a str, target: &'a str) -> impl Iterator<Item = &'a Cell> {
        self.cells.iter().filter(move |cell| cell.test == test && cell.target == target)
    }

    /// Returns the cell of a test on a target at a point.
    pub fn cell(&self, test: &str, target: &str, point: Option<Point>) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.test == test && cell.target == target && cell.point == point)
    }

    /// Adds one sample, making the cell for the first one.
    pub fn add(&mut self, sample: Sample, target: &str) {
        let found = self
            .cells
            .iter_mut()
            .find(|cell| cell.test == sample.test && cell.target == target && cell.point == sample.point);
        match found {
            Some(cell) => cell.samples.push(sample.seconds),
            None => self.cells.push(Cell {
                test: sample.test.to_owned(),
                target: target.to_owned(),
                point: sample.point,
                amount: sample.amount,
                samples: vec![sample.seconds],
            }),
        }
    }
}

/// One measurement, to be added to the report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Identifier of the test.
    pub test: &'static str,
    /// The point, for tests that have them.
    pub point: Option<Point>,
    /// Elapsed seconds, or bytes where the test counts.
    pub seconds: f64,
    /// Bytes moved or operations done in that time.
    pub amount: f64,
}
