//! Kills the processes of a mount or a pool at random moments, or replaces them by another program,
//! and logs its actions.
//!
//! Used by `campaign.rs` and `pools.rs`, each with the processes of one supervisor.

use super::campaign::Told;
use crate::{
    crashing::Random,
    mounting::{self, child_of, eventually, finish, kill, text},
};
use rustix::process::Signal;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

/// Deaths that a supervisor allows within a minute.
pub const DEATHS: u32 = 2;

/// Two other copies of the program.
pub struct Programs {
    _place: tempfile::TempDir,
    copies: [PathBuf; 2],
}

impl Programs {
    /// Creates the copies.
    pub fn new() -> Programs {
        let place = mounting::scratch();
        let copies = ["one", "other"].map(|name| place.path().join(name));
        for copy in &copies {
            fs::copy(mounting::nacre(), copy).expect("a copy of the program");
        }
        Programs { _place: place, copies }
    }
}

/// Kills and replaces the processes of one supervisor.
pub struct Killer<'a> {
    /// The mount or pool, and the actions on it.
    pub what: String,
    /// Source of its random decisions.
    pub random: Random,
    /// Counters of the campaign.
    pub told: &'a Told,
    /// Number of deaths of processes.
    pub deaths: u32,
    guardian: u32,
    /// The mount point, or one of a pool's.
    place: PathBuf,
    /// State directory for commands, where it is not the default.
    state: Option<PathBuf>,
    programs: &'a Programs,
    /// Index of the copy that serves, once one does.
    copy: usize,
    killed: Option<u32>,
}

impl<'a> Killer<'a> {
    /// Creates one for the processes of this supervisor.
    pub fn new(guardian: u32, place: &Path, (told, programs): (&'a Told, &'a Programs)) -> Killer<'a> {
        let (what, random) = (String::new(), Random(0));
        let place = place.to_owned();
        Killer { what, random, told, deaths: 0, guardian, place, state: None, programs, copy: 0, killed: None }
    }

    /// Sets the description and the seed.
    pub fn of(self, what: String, seed: u64) -> Killer<'a> {
        Killer { what, random: Random(seed), ..self }
    }

    /// Sets the state directory.
    pub fn reached_by(self, state: PathBuf) -> Killer<'a> {
        Killer { state: Some(state), ..self }
    }

    /// Performs a random action after a pause. The maxima of the pauses, microseconds: before the
    /// action, during the failover of the next process, during an upgrade.
    pub fn act(&mut self, [before, going_on, upgrading]: [u64; 3]) {
        self.pause(before);
        match self.random.below(6) {
            0 => self.upgrade(None),
            1 => self.upgrade(Some(upgrading)),
            2 if self.deaths + 2 <= DEATHS => {
                self.strike();
                let next = self.next();
                self.pause(going_on);
                self.note(&format!("kill {next}, which went on"));
                self.kill(next);
                self.deaths += 1;
            }
            _ => self.strike(),
        }
    }

    /// Returns the process that serves now, or is starting; never a killed one.
    pub fn next(&self) -> u32 {
        let mut next = None;
        eventually("a process is there", || {
            next = self.next_if_any();
            next.is_some()
        });
        next.unwrap()
    }

    /// Returns the process as [`Self::next`] does, where there is one.
    pub fn next_if_any(&self) -> Option<u32> {
        child_of(self.guardian).filter(|child| Some(*child) != self.killed)
    }

    /// Kills the serving process.
    pub fn strike(&mut self) {
        let next = self.next();
        self.note(&format!("kill {next}"));
        self.kill(next);
        self.deaths += 1;
    }

    /// Kills this process, which is a serving one or the supervisor.
    pub fn kill(&mut self, process: u32) {
        self.killed = Some(process);
        kill(process, Signal::KILL);
        self.told.killed();
    }

    /// Upgrades to another copy of the program; where `killed` is given, the process is killed
    /// meanwhile, after at most this many microseconds.
    fn upgrade(&mut self, killed: Option<u64>) {
        self.copy = 1 - self.copy;
        let mut command = Command::new(&self.programs.copies[self.copy]);
        command.arg("upgrade").arg(&self.place);
        if let Some(state) = &self.state {
            command.env("NACRE_STATE_DIR", state);
        }
        self.note("upgrade");
        self.told.upgraded();
        let Some(most) = killed else {
            let output = finish(&mut command);
            assert!(output.status.success(), "{}: {}", self.what, text(&output.stderr));
            return;
        };
        let upgrading = thread::spawn(move || drop(finish(&mut command)));
        self.pause(most);
        self.strike();
        upgrading.join().unwrap();
    }

    /// Waits at most this many microseconds.
    pub fn pause(&mut self, most: u64) {
        thread::sleep(Duration::from_micros(self.random.below(most)));
    }

    /// Logs an action.
    pub fn note(&mut self, what: &str) {
        self.what.push_str(", ");
        self.what.push_str(what);
    }
}
