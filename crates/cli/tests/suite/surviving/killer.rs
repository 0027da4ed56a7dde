//! Who kills the processes of a mount or a pool at random moments, or has another program go on, and says
//! what it has done.
//!
//! Used by `campaign.rs` and `pools.rs`, each with the processes of one guardian.

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

/// Deaths that a guardian allows within a minute.
pub const DEATHS: u32 = 2;

/// Two other copies of the program.
pub struct Programs {
    _place: tempfile::TempDir,
    copies: [PathBuf; 2],
}

impl Programs {
    /// Makes them.
    pub fn new() -> Programs {
        let place = mounting::scratch();
        let copies = ["one", "other"].map(|name| place.path().join(name));
        for copy in &copies {
            fs::copy(mounting::nacre(), copy).expect("a copy of the program");
        }
        Programs { _place: place, copies }
    }
}

/// See the file's head.
pub struct Killer<'a> {
    /// What is used, and what was done to it.
    pub what: String,
    /// Its dice.
    pub random: Random,
    /// What it has come to.
    pub told: &'a Told,
    /// How often a process has died.
    pub deaths: u32,
    guardian: u32,
    /// What is mounted, or one mount of it.
    place: PathBuf,
    /// Where commands find it, where that is elsewhere than usual.
    state: Option<PathBuf>,
    programs: &'a Programs,
    /// The copy that serves, once one does.
    copy: usize,
    killed: Option<u32>,
}

impl<'a> Killer<'a> {
    /// Of the processes of this guardian.
    pub fn new(guardian: u32, place: &Path, (told, programs): (&'a Told, &'a Programs)) -> Killer<'a> {
        let (what, random) = (String::new(), Random(0));
        let place = place.to_owned();
        Killer { what, random, told, deaths: 0, guardian, place, state: None, programs, copy: 0, killed: None }
    }

    /// The same for this, with dice from this seed.
    pub fn of(self, what: String, seed: u64) -> Killer<'a> {
        Killer { what, random: Random(seed), ..self }
    }

    /// The same, reached by what is kept here.
    pub fn reached_by(self, state: PathBuf) -> Killer<'a> {
        Killer { state: Some(state), ..self }
    }

    /// Does one thing of several after a while; at most so long, microseconds: until then, while the next process
    /// goes on, while another program does.
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

    /// The process that serves now, or is about to: none that was killed.
    pub fn next(&self) -> u32 {
        let mut next = None;
        eventually("a process is there", || {
            next = self.next_if_any();
            next.is_some()
        });
        next.unwrap()
    }

    /// The same, where there is one.
    pub fn next_if_any(&self) -> Option<u32> {
        child_of(self.guardian).filter(|child| Some(*child) != self.killed)
    }

    /// Kills that.
    pub fn strike(&mut self) {
        let next = self.next();
        self.note(&format!("kill {next}"));
        self.kill(next);
        self.deaths += 1;
    }

    /// Kills this process, which is one of them or the guardian.
    pub fn kill(&mut self, process: u32) {
        self.killed = Some(process);
        kill(process, Signal::KILL);
        self.told.killed();
    }

    /// Has another copy of the program go on; perhaps the process is killed meanwhile, after so many microseconds
    /// at most.
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

    /// Waits at most so many microseconds.
    pub fn pause(&mut self, most: u64) {
        thread::sleep(Duration::from_micros(self.random.below(most)));
    }

    /// Notes what was done.
    pub fn note(&mut self, what: &str) {
        self.what.push_str(", ");
        self.what.push_str(what);
    }
}
