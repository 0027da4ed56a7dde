//! Writers of all kinds, each a process of its own, that record which of their calls were
//! acknowledged.
//!
//! Callers: `cage_torture.rs`, which starts itself again as each of these ([`spawn`],
//! [`run_if_asked`]). A writer changes only its own directory, and stores, outside of the cage, the
//! content that every file must have by the answers of its calls; the caller compares
//! ([`differences`]). A failed call ends its writer with a panic, unless it failed for want of
//! space, or the daemon is killed on purpose.
mod kinds;

pub use kinds::{KINDS, KINDS_TO_KILL};

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const ENOSPC: i32 = 28;

/// Numbers that are the same in each run with the same seed (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// One time in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Bytes, none of which is zero: what is lost shows.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&(self.next() | 0x0101_0101_0101_0101).to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

/// The content that a file must have.
#[derive(Clone, Default)]
pub struct Book {
    pub content: Vec<u8>,
    /// Range that was written since the last successful fsync.
    pub unsynced: Option<(usize, usize)>,
    /// Whether all writes were at the end of the file.
    pub appended: bool,
    /// Range of the call that was interrupted by the kill of the daemon: its bytes may be the old
    /// or the new ones.
    pub doubtful: Option<(usize, usize)>,
    /// Range of the call before, where it returned less than was asked for: the remaining bytes may
    /// be there.
    pub torn: Option<(usize, usize)>,
}

/// Unsynced writes that may be lost with a killed daemon.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Each write is stored when it is acknowledged.
    Nothing,
    /// Writes at the end of a file opened for appending.
    Appends,
    /// Any unsynced write.
    Writes,
}

impl Book {
    pub fn put(&mut self, at: usize, data: &[u8]) {
        // What lies between the old end and the first byte is new as well.
        let begin = at.min(self.content.len());
        let (from, to) = self.unsynced.unwrap_or((begin, at));
        self.unsynced = Some((from.min(begin), to.max(at + data.len())));
        if self.content.len() < at + data.len() {
            self.content.resize(at + data.len(), 0);
        }
        self.content[at..at + data.len()].copy_from_slice(data);
    }

    pub fn zero(&mut self, at: usize, end: usize) {
        let end = end.min(self.content.len());
        if at < end {
            self.content[at..end].fill(0);
            let (from, to) = self.unsynced.unwrap_or((at, end));
            self.unsynced = Some((from.min(at), to.max(end)));
        }
    }
}

/// A writer.
pub struct Writer {
    kind: String,
    /// Its directory in the cage, and the same on the host.
    place: PathBuf,
    below: PathBuf,
    report: PathBuf,
    stop: PathBuf,
    /// Whether the daemon is going to be killed.
    killed: bool,
    /// Maximum length of a file before it is restarted, bytes.
    most: usize,
    random: Random,
    /// Numbers of files begun, of calls accepted, and of calls refused for want of space.
    begun: u64,
    accepted: u64,
    refused: u64,
}

/// Reasons why a writer stops.
pub enum Stop {
    /// There is no space.
    Full,
    /// The daemon was killed.
    Gone,
}

impl Writer {
    fn from_environment(kind: String) -> Writer {
        let path = |name: &str| PathBuf::from(std::env::var_os(name).expect(name));
        let number = |name: &str| std::env::var(name).expect(name).parse::<u64>().expect(name);
        let seed = number("NACRE_TORTURE_SEED") ^ kind.bytes().fold(7, |seed, byte| seed * 31 + u64::from(byte));
        Writer {
            place: path("NACRE_TORTURE_PLACE").join(&kind),
            below: path("NACRE_TORTURE_BELOW").join(&kind),
            report: path("NACRE_TORTURE_REPORT").join(&kind),
            stop: path("NACRE_TORTURE_STOP"),
            killed: number("NACRE_TORTURE_KILLED") == 1,
            most: usize::try_from(number("NACRE_TORTURE_MOST")).unwrap(),
            random: Random::new(seed),
            begun: 0,
            accepted: 0,
            refused: 0,
            kind,
        }
    }

    fn goes_on(&self) -> bool {
        !self.stop.exists()
    }

    /// Checks the result of a call: its value, or a reason to stop; every other error is a failure
    /// of the test.
    fn told<T>(&mut self, what: &str, result: io::Result<T>) -> Result<T, Stop> {
        match result {
            Ok(done) => {
                self.accepted += 1;
                Ok(done)
            }
            Err(error) if error.raw_os_error() == Some(ENOSPC) => {
                self.refused += 1;
                Err(Stop::Full)
            }
            Err(_) if self.killed => Err(Stop::Gone),
            Err(error) => panic!("{}: {what}: {error}", self.kind),
        }
    }

    /// Checks the result of a call that needs no space and must succeed.
    fn must<T>(&mut self, what: &str, result: io::Result<T>) -> Result<T, Stop> {
        match result {
            Ok(done) => Ok(done),
            Err(_) if self.killed => Err(Stop::Gone),
            Err(error) => panic!("{}: {what} must not fail: {error}", self.kind),
        }
    }

    /// Calls fsync, after which everything must be on the host, and compares the file there.
    fn settle(&mut self, file: &File, name: &str, book: &mut Book) -> Result<(), Stop> {
        let synced = file.sync_all();
        self.must("fsync", synced)?;
        book.unsynced = None;
        book.torn = None;
        if self.killed {
            return Ok(());
        }
        let found = fs::read(self.below.join(name)).expect("the file on the host");
        if let Some(difference) = difference(&found, book, Lost::Nothing) {
            panic!("{}: {name} after fsync: {difference}", self.kind);
        }
        Ok(())
    }

    /// Returns a name for the next file: a new one each time where the daemon may be killed in
    /// between.
    fn next_name(&mut self) -> String {
        self.begun += 1;
        if self.killed { format!("file.{}", self.begun) } else { "file".to_owned() }
    }

    /// Stores the expected content of a file for the comparison.
    fn leave(&mut self, name: &str, book: &Book) {
        let place = self.report.join(name);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("content"), &book.content).unwrap();
        let ((from, to), (cut, end)) = (book.doubtful.unwrap_or_default(), book.torn.unwrap_or_default());
        let (first, last) = book.unsynced.unwrap_or_default();
        let rules = format!("{first} {last} {} {from} {to} {cut} {end}", u64::from(book.appended));
        fs::write(place.join("rules"), rules).unwrap();
    }

    fn rest(&self) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Describes how a file differs from its expected content. Lost bytes are missing, or zero; where
/// they overwrote others, they may be the old ones.
fn difference(found: &[u8], book: &Book, lost: Lost) -> Option<String> {
    let expected = &book.content;
    if found == expected.as_slice() {
        return None;
    }
    let ((from, to), (cut, end)) = (book.doubtful.unwrap_or_default(), book.torn.unwrap_or_default());
    let may_be_lost = lost == Lost::Writes || lost == Lost::Appends && book.appended;
    let (first, last) = book.unsynced.filter(|_| may_be_lost).unwrap_or_default();
    for at in 0..found.len().max(expected.len()) {
        let (is, must) = (found.get(at), expected.get(at));
        let doubtful = (from..to).contains(&at) || (cut..end).contains(&at);
        let missing = (first..last).contains(&at) && (!book.appended || is.is_none() || is == Some(&0));
        if is != must && !doubtful && !missing {
            return Some(format!(
                "byte {at}: {is:?} instead of {must:?}; length {} instead of {}, not synced {:?}, in doubt {from}..{to} and {cut}..{end}",
                found.len(),
                expected.len(),
                book.unsynced
            ));
        }
    }
    None
}

/// Compares the recorded contents with the files; returns the number of compared bytes.
pub fn differences(report: &Path, below: &Path, lost: Lost) -> u64 {
    let mut compared = 0;
    for kind in fs::read_dir(report).unwrap() {
        let kind = kind.unwrap();
        for place in fs::read_dir(kind.path()).unwrap() {
            let place = place.unwrap();
            let rules = fs::read_to_string(place.path().join("rules")).unwrap();
            let rules: Vec<usize> = rules.split(' ').map(|word| word.parse().unwrap()).collect();
            let book = Book {
                content: fs::read(place.path().join("content")).unwrap(),
                unsynced: Some((rules[0], rules[1])),
                appended: rules[2] == 1,
                doubtful: Some((rules[3], rules[4])),
                torn: Some((rules[5], rules[6])),
            };
            let name = PathBuf::from(place.file_name().to_str().unwrap().replace('+', "/"));
            let path = below.join(kind.file_name()).join(name);
            let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            if let Some(difference) = difference(&found, &book, lost) {
                panic!("{}: {difference}", path.display());
            }
            compared += found.len() as u64;
        }
    }
    compared
}

/// Parameters of a run, common to its writers.
pub struct Run {
    pub mountpoint: PathBuf,
    pub below: PathBuf,
    /// A directory outside of the cage.
    pub desk: PathBuf,
    pub killed: bool,
    pub most: u64,
    pub seed: u64,
}

impl Run {
    fn report(&self) -> PathBuf {
        self.desk.join("report")
    }

    /// Starts one writer of each kind.
    pub fn spawn(&self, kinds: &[&str]) -> Vec<Child> {
        kinds
            .iter()
            .map(|kind| {
                fs::create_dir_all(self.mountpoint.join(kind)).expect("a directory in the cage");
                fs::create_dir_all(self.report().join(kind)).unwrap();
                Command::new("setpriv")
                    .args(["--pdeathsig", "KILL", "--"])
                    .arg(std::env::current_exe().unwrap())
                    .args(["--exact", "cage_torture::one_writer", "--nocapture", "--test-threads=1", "--quiet"])
                    .env("NACRE_TORTURE_KIND", kind)
                    .env("NACRE_TORTURE_PLACE", &self.mountpoint)
                    .env("NACRE_TORTURE_BELOW", &self.below)
                    .env("NACRE_TORTURE_REPORT", self.report())
                    .env("NACRE_TORTURE_STOP", self.desk.join("stop"))
                    .env("NACRE_TORTURE_KILLED", u8::from(self.killed).to_string())
                    .env("NACRE_TORTURE_MOST", self.most.to_string())
                    .env("NACRE_TORTURE_SEED", self.seed.to_string())
                    .stdin(Stdio::null())
                    .spawn()
                    .expect("a writer")
            })
            .collect()
    }

    /// Asks the writers to stop.
    pub fn stop(&self) {
        fs::write(self.desk.join("stop"), "").unwrap();
    }

    /// Compares, see [`differences`].
    pub fn compare(&self, lost: Lost) -> u64 {
        differences(&self.report(), &self.below, lost)
    }
}

/// Runs the writer in a process that was started as one.
pub fn run_if_asked() {
    let Ok(kind) = std::env::var("NACRE_TORTURE_KIND") else { return };
    let mut writer = Writer::from_environment(kind);
    writer.work();
    println!("{}: {} begun, {} accepted, {} refused", writer.kind, writer.begun, writer.accepted, writer.refused);
}
