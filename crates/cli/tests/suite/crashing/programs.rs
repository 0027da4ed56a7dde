//! Programs that depend on durability: fio, SQLite, git.

use super::{Dead, Load};
use crate::mounting::{finish, text};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Returns whether a program is installed.
pub fn is_there(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[track_caller]
fn succeeds(command: &mut Command, what: &str) -> String {
    let output = finish(command);
    assert!(output.status.success(), "{what}: {command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Random overwriting of blocks that carry checksums.
#[derive(Default)]
pub struct Fio {
    rounds: u64,
}

impl Fio {
    fn command(at: &Path, seed: u64, words: &[&str]) -> Command {
        let mut command = Command::new("fio");
        let place = format!("--filename={}", at.join("fio").display());
        command.args([
            "--name=load",
            "--ioengine=psync",
            "--bs=4k",
            "--size=16m",
            "--verify=crc32c",
            "--verify_fatal=1",
            &place,
        ]);
        command.arg(format!("--randseed={}", seed % 1_000_000)).args(words).current_dir(std::env::temp_dir());
        command
    }
}

impl Load for Fio {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        if !at.join("fio").exists() {
            // Each block has its checksum before the first crash that matters.
            let output = finish(&mut Fio::command(at, seed, &["--rw=write", "--do_verify=0", "--end_fsync=1"]));
            if !output.status.success() {
                assert!(dead.is_set(), "{}{}", text(&output.stdout), text(&output.stderr));
                return;
            }
            self.rounds = 1;
        }
        let words = ["--rw=randwrite", "--norandommap", "--do_verify=0", "--fsync=16", "--time_based", "--runtime=100"];
        let output = finish(&mut Fio::command(at, seed, &words));
        assert!(dead.is_set(), "fio ended by itself: {}{}", text(&output.stdout), text(&output.stderr));
    }

    fn judge(&mut self, at: &Path, what: &str) {
        if self.rounds == 0 {
            // Not even the file was laid out.
            let _ = fs::remove_file(at.join("fio"));
            return;
        }
        self.rounds += 1;
        succeeds(&mut Fio::command(at, 1, &["--rw=read"]), what);
    }

    fn promises(&self) -> String {
        format!("fio {} rounds", self.rounds)
    }
}

/// One database with a row for each transaction.
pub struct Sqlite {
    name: String,
    journal: &'static str,
    committed: u64,
    /// Number of the last commit that the program acknowledged, perhaps only because the mount was
    /// gone.
    claimed: u64,
}

impl Sqlite {
    /// Creates the load with this journal mode.
    pub fn new(journal: &'static str) -> Sqlite {
        Sqlite { name: format!("sqlite-{}.db", journal.to_lowercase()), journal, committed: 0, claimed: 0 }
    }

    fn transactions(&mut self, child: &mut Child, dead: &Dead, first: u64) -> std::io::Result<()> {
        let mut input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        writeln!(
            input,
            ".bail on\nPRAGMA journal_mode={};\nPRAGMA synchronous=EXTRA;\nPRAGMA wal_autocheckpoint=50;",
            self.journal
        )?;
        writeln!(input, "CREATE TABLE IF NOT EXISTS t (number INTEGER PRIMARY KEY, filler BLOB, mark TEXT);")?;
        for number in first.. {
            write!(
                input,
                "BEGIN; INSERT INTO t VALUES ({number}, randomblob({}), 'm{number}');",
                10 + number * 37 % 6000
            )?;
            writeln!(
                input,
                "UPDATE t SET mark = mark || 'x' WHERE number = {}; COMMIT; SELECT 'done {number}';",
                number / 2
            )?;
            input.flush()?;
            let mut line = String::new();
            while line.trim() != format!("done {number}") {
                line.clear();
                if output.read_line(&mut line)? == 0 {
                    return Ok(());
                }
            }
            self.claimed = number;
            // SQLite ignores a directory that it cannot open to sync: its acknowledgment on a dead
            // mount is no promise.
            if dead.is_set() {
                return Ok(());
            }
            self.committed = number;
        }
        Ok(())
    }
}

impl Load for Sqlite {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let mut command = Command::new("sqlite3");
        command.arg(at.join(&self.name)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("sqlite3");
        // A broken pipe means the end of the program, whose output names the reason.
        let _ = self.transactions(&mut child, dead, self.committed + 1);
        let _ = child.kill();
        let output = child.wait_with_output().expect("sqlite3");
        assert!(dead.is_set(), "sqlite3 ended by itself: {}", text(&output.stderr));
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let place = at.join(&self.name);
        if !place.exists() {
            assert_eq!(self.committed, 0, "{what}: {} is gone", self.name);
            return;
        }
        let query = "PRAGMA integrity_check; SELECT count(*), coalesce(max(number), 0) FROM t;";
        let tables = "SELECT count(*) FROM sqlite_master;";
        if self.committed == 0 && succeeds(Command::new("sqlite3").arg(&place).arg(tables), what).trim() == "0" {
            return;
        }
        let said = succeeds(Command::new("sqlite3").arg(&place).arg(query), what);
        let figures: Vec<u64> = said
            .strip_prefix("ok\n")
            .unwrap_or_else(|| panic!("{what}: {}: {said}", self.name))
            .trim()
            .split('|')
            .map(|n| n.parse().unwrap())
            .collect();
        assert_eq!(figures[0], figures[1], "{what}: {} has rows missing", self.name);
        assert!(figures[1] >= self.committed, "{what}: {} has {} rows of {}", self.name, figures[1], self.committed);
        assert!(figures[1] <= self.claimed + 1, "{what}: {} has {} rows of {}", self.name, figures[1], self.claimed);
        (self.committed, self.claimed) = (figures[1], figures[1]);
    }

    fn promises(&self) -> String {
        format!("{} {} transactions", self.name, self.committed)
    }
}

/// Clones of a repository, and commits in one.
pub struct Git {
    origin: PathBuf,
    clones: Vec<String>,
    commits: Vec<String>,
    all: u64,
    rounds: u64,
}

fn git(place: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("git");
    // git itself changes to the directory: a process cannot even be started in a directory whose
    // daemon is dead.
    command.current_dir("/").arg("-C").arg(place).args([
        "-c",
        "core.fsync=all",
        "-c",
        "core.fsyncMethod=fsync",
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.org",
    ]);
    command
        .args(["-c", "gc.auto=0", "-c", "init.defaultBranch=main"])
        .args(words)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("HOME", "/nonexistent");
    command
}

impl Git {
    /// Creates the load with a new repository outside of the pool.
    pub fn new(place: &Path) -> Git {
        let origin = place.join("origin");
        fs::create_dir(&origin).unwrap();
        succeeds(&mut git(&origin, &["init", "-q"]), "git");
        let mut random = super::Random(7);
        for round in 0..4 {
            for at in 0..60 {
                let directory = origin.join(format!("d{}", at % 7));
                fs::create_dir_all(&directory).unwrap();
                let length = random.below(9000) as usize;
                fs::write(directory.join(format!("f{at}")), random.bytes(length)).unwrap();
            }
            succeeds(&mut git(&origin, &["add", "-A"]), "git");
            succeeds(&mut git(&origin, &["commit", "-q", "-m", &format!("round {round}")]), "git");
        }
        Git { origin, clones: Vec::new(), commits: Vec::new(), all: 0, rounds: 0 }
    }

    /// Clones, then commits to that clone; returns the first failure.
    fn turn(&mut self, at: &Path, name: &str, seed: u64) -> Result<(), Output> {
        let run = |mut command: Command| {
            let output = finish(&mut command);
            if output.status.success() { Ok(text(&output.stdout)) } else { Err(output) }
        };
        let origin = format!("file://{}", self.origin.display());
        run(git(Path::new("/"), &["clone", "-q", &origin, at.join(name).to_str().unwrap()]))?;
        self.clones.push(name.to_owned());
        self.commits.clear();
        for number in 0..3 {
            let place = at.join(name);
            let content = super::Random(seed ^ number).bytes(3000);
            if fs::write(place.join(format!("new{number}")), content).is_err() {
                return Ok(());
            }
            run(git(&place, &["add", "-A"]))?;
            run(git(&place, &["commit", "-q", "-m", "more"]))?;
            self.commits.push(run(git(&place, &["rev-parse", "HEAD"]))?.trim().to_owned());
            self.all += 1;
        }
        Ok(())
    }
}

impl Load for Git {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        self.rounds += 1;
        for number in 0.. {
            let name = format!("clone{}-{number}", self.rounds);
            if let Err(output) = self.turn(at, &name, seed.wrapping_add(number * 16)) {
                assert!(dead.is_set(), "git: {}{}", text(&output.stdout), text(&output.stderr));
                return;
            }
            if dead.is_set() {
                return;
            }
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let last = self.clones.last().cloned();
        for name in self.clones.drain(..) {
            let place = at.join(&name);
            succeeds(&mut git(&place, &["fsck", "--full", "--strict", "--no-dangling"]), what);
            if Some(&name) == last.as_ref() {
                // The reference of the newest commit may still be the previous one; the objects of
                // the commit are there.
                for commit in &self.commits {
                    succeeds(&mut git(&place, &["cat-file", "-e", commit]), what);
                }
                if let [.., before, _] = &self.commits[..] {
                    succeeds(&mut git(&place, &["merge-base", "--is-ancestor", before, "HEAD"]), what);
                }
            }
            for lock in ["index.lock", "HEAD.lock", "refs/heads/main.lock"] {
                let _ = fs::remove_file(place.join(".git").join(lock));
            }
            succeeds(&mut git(&place, &["reset", "-q", "--hard"]), what);
            assert_eq!(
                succeeds(&mut git(&place, &["status", "--porcelain", "--untracked-files=no"]), what),
                "",
                "{what}: {name}"
            );
        }
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("clone") {
                fs::remove_dir_all(path).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
        }
        self.commits.clear();
    }

    fn promises(&self) -> String {
        format!("git {} commits", self.all)
    }
}

/// Returns all loads whose programs this machine has.
pub fn all(place: &Path) -> Vec<Box<dyn Load>> {
    let mut loads: Vec<Box<dyn Load>> =
        (0..2).map(|number| Box::new(super::recorder::Recorder::new(number)) as Box<dyn Load>).collect();
    loads.push(Box::new(super::recorder::Recorder::of_streams(2)));
    if is_there("fio") {
        loads.push(Box::new(Fio::default()));
    }
    if is_there("sqlite3") {
        loads.push(Box::new(Sqlite::new("WAL")));
        loads.push(Box::new(Sqlite::new("DELETE")));
    }
    if is_there("git") {
        loads.push(Box::new(Git::new(place)));
    }
    loads
}
