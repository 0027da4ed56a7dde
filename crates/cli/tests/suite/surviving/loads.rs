//! Loads on a mount whose processes die, and their checks after it has died for good: everything
//! that was acknowledged has to be there.

use super::{Slowest, change_below_once, change_once};
use crate::crashing::{Dead, Load, expected};
use nacre_sys::locks::{self, Range};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    os::fd::AsFd,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::Duration,
};

/// Figures that all loads of a mount share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Number of finished steps.
    pub done: AtomicU64,
    /// Longest call.
    pub slowest: Slowest,
}

/// Works until an error, which has to be that of a dead mount.
pub fn until_dead(dead: &Dead, shared: &Shared, mut once: impl FnMut(u64) -> io::Result<()>) {
    for round in 0.. {
        if dead.is_end() {
            return;
        }
        if let Err(error) = once(round) {
            return expected(&error, dead);
        }
        shared.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// A load of all operations on names.
pub struct Changes {
    pub number: u64,
    pub shared: Arc<Shared>,
    pub rounds: u64,
}

impl Load for Changes {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let (shared, number, rounds) = (Arc::clone(&self.shared), self.number, &mut self.rounds);
        until_dead(dead, &shared, |round| {
            change_once(at, number, round, &shared.slowest)?;
            *rounds = round + 1;
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let log = fs::read_to_string(at.join(format!("log-{}", self.number))).unwrap_or_default();
        let lines = log.lines().count() as u64;
        let all: String = (0..lines).map(|round| format!("{round}\n")).collect();
        assert_eq!(log, all, "{what}: what was appended is there once, in its order");
        assert!((self.rounds..=self.rounds + 1).contains(&lines), "{what}: {lines} lines of {}", self.rounds);
        let first = format!("{}-", self.number);
        let left: Vec<_> = fs::read_dir(at)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with(&first))
            .collect();
        // All remaining names belong to the interrupted round.
        let last = format!("{}-{}-", self.number, self.rounds);
        assert!(left.iter().all(|name| name.starts_with(&last)), "{what}: {left:?}, {} rounds", self.rounds);
    }

    fn promises(&self) -> String {
        format!("{} rounds of changes", self.rounds)
    }
}

/// A load of operations on the files of the lower branch.
pub struct Below {
    pub shared: Arc<Shared>,
    pub rounds: u64,
    /// Number of these files.
    pub all: u64,
}

impl Load for Below {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let (shared, all, rounds) = (Arc::clone(&self.shared), self.all, &mut self.rounds);
        until_dead(dead, &shared, |round| {
            if round >= all {
                std::thread::sleep(Duration::from_millis(2));
                return fs::metadata(at.join("low0")).map(drop);
            }
            change_below_once(at, 0, round, &shared.slowest)?;
            *rounds = round + 1;
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        for round in 0..self.rounds {
            let text = |end: &str| fs::read_to_string(at.join(format!("low0/{round}-{end}")));
            assert_eq!(text("moved").ok().as_deref(), Some("below+more+last"), "{what}: {round}");
            assert_eq!(text("other").ok().as_deref(), Some("one"), "{what}: {round}");
        }
    }

    fn promises(&self) -> String {
        format!("{} files copied up", self.rounds)
    }
}

/// The output lines of a program that runs until it is killed.
struct Lines {
    child: Child,
    lines: Receiver<io::Result<String>>,
}

impl Lines {
    /// Starts the program; none where the mount is dead.
    fn of(command: &mut Command, dead: &Dead) -> Option<Lines> {
        let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => {
                expected(&error, dead);
                return None;
            }
        };
        let output: ChildStdout = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Some(Lines { child, lines })
    }

    /// Returns the next line; none where the mount is dead.
    fn next(&self, dead: &Dead) -> Option<String> {
        loop {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => return Some(line.expect("a line")),
                Err(RecvTimeoutError::Timeout) if !dead.is_set() => {}
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => {
                    assert!(dead.is_set(), "the program ended by itself");
                    return None;
                }
            }
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `tail -f`, which has to print everything that is appended.
pub struct Tail {
    pub shared: Arc<Shared>,
    pub lines: u64,
}

impl Load for Tail {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let path = at.join("tailed");
        let mut file = match OpenOptions::new().append(true).create(true).open(&path) {
            Ok(file) => file,
            Err(error) => return expected(&error, dead),
        };
        let words = ["-n", "+1", "-s", "0.1", "-f"];
        let Some(tail) = Lines::of(Command::new("tail").args(words).arg(&path), dead) else { return };
        let (shared, lines) = (Arc::clone(&self.shared), &mut self.lines);
        until_dead(dead, &shared, |round| {
            shared.slowest.of(|| file.write_all(format!("line {round}\n").as_bytes()))?;
            *lines = round + 1;
            match tail.next(dead) {
                Some(line) => assert_eq!(line, format!("line {round}"), "tail -f"),
                None => return Err(io::Error::from(rustix::io::Errno::NOTCONN)),
            }
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let log = fs::read_to_string(at.join("tailed")).unwrap_or_default();
        let expected: String = (0..log.lines().count()).map(|round| format!("line {round}\n")).collect();
        assert_eq!(log, expected, "{what}");
        assert!(log.lines().count() as u64 >= self.lines, "{what}: {} lines of {}", log.lines().count(), self.lines);
    }

    fn promises(&self) -> String {
        format!("{} lines followed", self.lines)
    }
}

/// A shell whose working directory is in the mount.
pub struct Shell {
    pub shared: Arc<Shared>,
    pub lines: u64,
}

impl Load for Shell {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let place = at.join("shell/within");
        if let Err(error) = fs::create_dir_all(&place) {
            return expected(&error, dead);
        }
        let mut command = Command::new("sh");
        let shell = Lines::of(command.current_dir(&place).stdin(Stdio::piped()), dead);
        let Some(mut shell) = shell else { return };
        let mut input = shell.child.stdin.take().unwrap();
        let (shared, lines) = (Arc::clone(&self.shared), &mut self.lines);
        until_dead(dead, &shared, |round| {
            let script =
                format!("echo {round} >>log && mv log log2 && mv log2 ../within/log && wc -l <log || echo failed\n");
            input.write_all(script.as_bytes())?;
            let line = shell.next(dead);
            match line.as_deref().map(str::trim) {
                Some(line) if line == (round + 1).to_string() => *lines = round + 1,
                line => {
                    assert!(dead.is_set(), "round {round}: {line:?}");
                    return Err(io::Error::from(rustix::io::Errno::NOTCONN));
                }
            }
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let read = |name: &str| fs::read_to_string(at.join("shell/within").join(name)).ok();
        let log = read("log").or_else(|| read("log2")).unwrap_or_default();
        let expected: String = (0..log.lines().count()).map(|round| format!("{round}\n")).collect();
        assert_eq!(log, expected, "{what}");
        assert!(log.lines().count() as u64 >= self.lines, "{what}: {} lines of {}", log.lines().count(), self.lines);
    }

    fn promises(&self) -> String {
        format!("{} lines of a shell", self.lines)
    }
}

/// Files that are locked as long as they are open.
pub struct Locked {
    pub shared: Arc<Shared>,
    pub rounds: u64,
}

impl Locked {
    fn once(holder: &File, path: &Path, round: u64, shared: &Shared) -> io::Result<()> {
        use rustix::fs::FlockOperation::{NonBlockingLockExclusive, NonBlockingLockShared};
        use std::os::unix::fs::FileExt;
        shared.slowest.of(|| holder.write_all_at(&round.to_le_bytes(), 8 * round))?;
        let other = shared.slowest.of(|| File::open(path))?;
        for operation in [NonBlockingLockExclusive, NonBlockingLockShared] {
            match rustix::fs::flock(&other, operation) {
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => panic!("round {round}: somebody else got the lock"),
            }
        }
        let mut read = vec![0; usize::try_from(8 * round + 8).unwrap()];
        other.read_exact_at(&mut read, 0)?;
        assert!(read.chunks(8).zip(0_u64..).all(|(bytes, number)| bytes == number.to_le_bytes()), "round {round}");
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }
}

impl Load for Locked {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let path = at.join("locked");
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let holder = match opened.and_then(|file| {
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        }) {
            Ok(holder) => holder,
            Err(error) => return expected(&error, dead),
        };
        let (shared, rounds) = (Arc::clone(&self.shared), &mut self.rounds);
        until_dead(dead, &shared, |round| {
            Locked::once(&holder, &path, round, &shared)?;
            *rounds = round + 1;
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let read = fs::read(at.join("locked")).unwrap_or_default();
        assert!(read.len() as u64 >= 8 * self.rounds, "{what}: {} bytes, {} rounds", read.len(), self.rounds);
        assert!(read.chunks(8).zip(0_u64..).all(|(bytes, number)| bytes == number.to_le_bytes()), "{what}");
    }

    fn promises(&self) -> String {
        format!("{} rounds of a locked file", self.rounds)
    }
}

/// Ranges of files that are locked by an open file description, or by a process; the kernel keeps
/// both.
pub struct Ranges {
    pub shared: Arc<Shared>,
    pub rounds: u64,
}

/// Returns a range of eight bytes, locked for writing.
fn eight(start: u64) -> Range {
    Range { kind: locks::Kind::Write, start, length: 8, pid: 0 }
}

/// Opens a file for a lock.
fn locked_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

impl Ranges {
    /// `process` was opened before the process took its lock, which is released by the first
    /// descriptor of the file that it closes.
    fn once(at: &Path, holder: &File, process: &File, shared: &Shared) -> io::Result<()> {
        let other = shared.slowest.of(|| locked_file(&at.join("ranges")))?;
        assert_eq!(locks::test(other.as_fd(), eight(8))?.kind, locks::Kind::Write, "the open file has its lock");
        assert_eq!(locks::test(process.as_fd(), eight(0))?.kind, locks::Kind::Write, "the process has its lock");
        match shared.slowest.of(|| locks::set(other.as_fd(), eight(4), false)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(()) => panic!("somebody else got the lock"),
        }
        // A range without a lock can be locked; the close releases it. It may have to wait: a child
        // of this process between fork and exec has the open file of the last round as well.
        shared.slowest.of(|| locks::set(other.as_fd(), eight(0), true))?;
        assert_eq!(locks::test(holder.as_fd(), eight(0))?.kind, locks::Kind::Write, "it was got");
        drop(other);
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }
}

impl Load for Ranges {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let taken = locked_file(&at.join("ranges")).and_then(|holder| {
            locks::set(holder.as_fd(), eight(8), false)?;
            let [owner, other] = [locked_file(&at.join("process")), locked_file(&at.join("process"))];
            let (owner, other) = (owner?, other?);
            rustix::fs::fcntl_lock(&owner, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
            Ok((holder, owner, other))
        });
        let (holder, _owner, other) = match taken {
            Ok(taken) => taken,
            Err(error) => return expected(&error, dead),
        };
        let (shared, rounds) = (Arc::clone(&self.shared), &mut self.rounds);
        until_dead(dead, &shared, |round| {
            Ranges::once(at, &holder, &other, &shared)?;
            *rounds = round + 1;
            Ok(())
        });
    }

    fn judge(&mut self, at: &Path, what: &str) {
        assert!(self.rounds == 0 || at.join("ranges").exists(), "{what}");
    }

    fn promises(&self) -> String {
        format!("{} rounds of locked ranges", self.rounds)
    }
}
