//! A simulated object store: one seed decides in which order the programs on it go on, how long each
//! stands still, and what becomes of each request. A request may be lost, carried out without a reply,
//! carried out twice, or carried out later than others that were made after it; names may be missing in a
//! list for a while; who makes an object may be refused without anybody having made it.
//!
//! Invariant: one program runs at a time. Each request is a point where another one may go on, so the same
//! seed is the same history.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use nacre_pool::backend::{Bucket, Put};
use nacre_pool::device::Random;

/// What a list may miss is not older than this, seconds.
const STALE: u64 = 30;

pub type Objects = BTreeMap<String, Arc<Vec<u8>>>;

/// A moment of it: the objects, and the time, seconds since 1970.
pub type Still = (Objects, u64);

/// What is told of each change of an object, before anything else happens.
pub type Watch = dyn Fn(&Change<'_>) + Send + Sync;

pub struct Change<'a> {
    pub key: &'a str,
    pub removed: bool,
    /// What was there.
    pub before: Option<Arc<Vec<u8>>>,
    /// After it.
    pub objects: &'a Objects,
    pub clock: u64,
}

/// How bad it is: of so many requests something happens to one; 0: never.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub faults: u64,
    pub stalls: u64,
    pub cuts: u64,
}

#[derive(Clone, Debug)]
enum Write {
    Put(String, Arc<Vec<u8>>),
    PutNew(String, Arc<Vec<u8>>),
    Delete(String),
}

#[derive(Clone, Copy, Default)]
struct Program {
    gone: bool,
    stands_until: u64,
    cut_until: u64,
}

struct State {
    objects: Objects,
    random: Random,
    weather: Weather,
    /// Grows with each request, and when all stand still.
    step: u64,
    requests: u64,
    clock: u64,
    turn: usize,
    programs: Vec<Program>,
    /// Requests that arrive later.
    late: Vec<(u64, Write)>,
    /// What became of names lately: when, and whether they were made.
    names: Vec<(u64, String, bool)>,
    trace: Vec<String>,
}

pub struct Simulation {
    state: Mutex<State>,
    turned: Condvar,
    watch: Box<Watch>,
    tells: bool,
}

/// What one program sees of it.
pub struct Seen {
    pub of: Arc<Simulation>,
    pub program: usize,
}

fn no_reply() -> io::Error {
    io::ErrorKind::TimedOut.into()
}

impl State {
    /// Somebody who does not stand still goes on.
    fn pass_turn(&mut self) {
        let waiting = |program: &Program| (!program.gone).then_some(program.stands_until);
        let Some(first) = self.programs.iter().filter_map(waiting).min() else { return };
        self.step = self.step.max(first);
        let ready: Vec<usize> = (0..self.programs.len())
            .filter(|at| waiting(&self.programs[*at]).is_some_and(|until| until <= self.step))
            .collect();
        // Mostly whoever ran last: else nobody gets far.
        if !(ready.contains(&self.turn) && self.random.below(4) > 0) {
            self.turn = *self.random.pick(&ready).expect("the one that stands for the shortest time");
        }
    }

    fn stand(&mut self, program: usize) {
        let most = *self.random.pick(&[5, 60, 60, 400, 400, 4000]).unwrap();
        self.programs[program].stands_until = self.step + self.random.below(most);
        if self.random.below(12) == 0 {
            self.clock += *self.random.pick(&[700, 4000, 7300, 26 * 3600]).unwrap();
        }
    }

    fn write(&mut self, write: &Write, watch: &Watch) -> Put {
        let (key, before, removed) = match write {
            Write::PutNew(key, _) if self.objects.contains_key(key) => return Put::Exists,
            Write::Put(key, body) | Write::PutNew(key, body) => {
                (key, self.objects.insert(key.clone(), Arc::clone(body)), false)
            }
            Write::Delete(key) => (key, self.objects.remove(key), true),
        };
        self.names.push((self.clock, key.clone(), !removed));
        let clock = self.clock;
        watch(&Change { key, removed, before, objects: &self.objects, clock });
        Put::Made
    }

    /// What was under way arrives, in any order.
    fn arrive(&mut self, until: u64, watch: &Watch) {
        while let Some(at) = self.late.iter().position(|(due, ..)| *due <= until) {
            let (_, write) = self.late.swap_remove(at);
            self.write(&write, watch);
        }
    }

    fn list(&mut self, prefix: &str, after: &str) -> Vec<String> {
        let mut names: BTreeSet<String> = self.objects.keys().cloned().collect();
        let late =
            if self.weather.faults > 0 && self.random.below(8) == 0 { self.random.below(12) as usize } else { 0 };
        for (when, name, made) in self.names.iter().rev().take(late) {
            if when + STALE >= self.clock {
                if *made {
                    names.remove(name)
                } else {
                    names.insert(name.clone())
                };
            }
        }
        names.into_iter().filter(|name| name.starts_with(prefix) && name.as_str() > after).collect()
    }
}

impl Simulation {
    pub fn new(seed: u64, programs: usize, (objects, clock): &Still, weather: Weather, watch: Box<Watch>) -> Self {
        let state = State {
            objects: objects.clone(),
            random: Random(seed),
            weather,
            step: 0,
            requests: 0,
            clock: *clock,
            turn: 0,
            programs: vec![Program::default(); programs],
            late: Vec::new(),
            names: Vec::new(),
            trace: Vec::new(),
        };
        let tells = std::env::var_os("NACRE_POOL_TRACE").is_some();
        Self { state: Mutex::new(state), turned: Condvar::new(), watch, tells }
    }

    /// A program that has failed says why, the others need not go on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn clock(&self) -> u64 {
        self.lock().clock
    }

    pub fn requests(&self) -> u64 {
        self.lock().requests
    }

    /// What is there now, and what time it is.
    pub fn still(&self) -> Still {
        let state = self.lock();
        (state.objects.clone(), state.clock)
    }

    fn await_turn<'a>(&'a self, mut state: MutexGuard<'a, State>, program: usize) -> MutexGuard<'a, State> {
        while state.turn != program {
            state = self.turned.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        state
    }

    /// A program begins.
    pub fn enter(&self, program: usize) {
        drop(self.await_turn(self.lock(), program));
    }

    /// A program stands still for a while, of its own will.
    pub fn stand(&self, program: usize) {
        let mut state = self.lock();
        state.stand(program);
        state.pass_turn();
        self.turned.notify_all();
        drop(self.await_turn(state, program));
    }

    /// A program ends; what it has sent arrives all the same.
    pub fn leave(&self, program: usize) {
        let mut state = self.lock();
        state.programs[program].gone = true;
        state.pass_turn();
        self.turned.notify_all();
    }

    /// All that is under way arrives.
    pub fn settle(&self) {
        let mut state = self.lock();
        state.arrive(u64::MAX, &*self.watch);
        state.weather = Weather { faults: 0, stalls: 0, cuts: 0 };
        state.programs.push(Program::default());
        state.turn = state.programs.len() - 1;
    }

    pub fn tell(&self, what: impl FnOnce() -> String) {
        if self.tells {
            let what = what();
            self.lock().trace.push(what);
        }
    }

    pub fn trace(&self) -> String {
        self.lock().trace.join("\n")
    }
}

impl Seen {
    /// The moment at which a request is made: another program may go on first. An error: it is lost.
    fn request(&self, what: &dyn Fn() -> String) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.of.lock();
        let weather = state.weather;
        if weather.stalls > 0 && state.random.below(weather.stalls) == 0 {
            state.stand(self.program);
        }
        state.pass_turn();
        self.of.turned.notify_all();
        let mut state = self.of.await_turn(state, self.program);
        state.step += 1;
        state.requests += 1;
        let passed = state.random.below(3);
        state.clock += passed;
        let now = state.step;
        state.arrive(now, &*self.of.watch);
        if weather.cuts > 0 && state.random.below(weather.cuts) == 0 {
            let length = state.random.below(80);
            state.programs[self.program].cut_until = now + length;
        }
        let is_cut = state.programs[self.program].cut_until > now;
        let lost = is_cut || weather.faults > 0 && state.random.below(weather.faults * 2) == 0;
        if self.of.tells {
            let line = format!("{now} {} {}{}", self.program, what(), if lost { " (lost)" } else { "" });
            state.trace.push(line);
        }
        if lost { Err(no_reply()) } else { Ok(state) }
    }

    fn write(&self, write: &Write) -> io::Result<Put> {
        let mut state = self.request(&|| match write {
            Write::Put(key, body) => format!("put {key} ({})", body.len()),
            Write::PutNew(key, body) => format!("make {key} ({})", body.len()),
            Write::Delete(key) => format!("delete {key}"),
        })?;
        let later = state.step + 1 + state.random.below(60);
        let fate = if state.weather.faults == 0 { u64::MAX } else { state.random.next() % (state.weather.faults * 4) };
        let said = match fate {
            // It arrives when nobody waits for it any more.
            0 | 1 => {
                state.late.push((later, write.clone()));
                Err(no_reply())
            }
            // Two who make it at once may both be refused.
            2 if matches!(write, Write::PutNew(..)) => Ok(Put::Exists),
            3 => {
                state.late.push((later, write.clone()));
                Ok(state.write(write, &*self.of.watch))
            }
            4..=6 => {
                state.write(write, &*self.of.watch);
                Err(no_reply())
            }
            _ => Ok(state.write(write, &*self.of.watch)),
        };
        if self.of.tells {
            let line = format!("    {said:?}");
            state.trace.push(line);
        }
        said
    }
}

impl Bucket for Seen {
    fn name(&self) -> &str {
        "simulation"
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.write(&Write::Put(key.to_owned(), Arc::new(body.to_vec()))).map(drop)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        self.write(&Write::PutNew(key.to_owned(), Arc::new(body.to_vec())))
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        let state = self.request(&|| format!("get {key}"))?;
        let Some(body) = state.objects.get(key) else { return Ok(None) };
        Ok(Some(part(body, range)))
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let mut state = self.request(&|| format!("list {prefix} after {after}"))?;
        Ok(state.list(prefix, after))
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.write(&Write::Delete(key.to_owned())).map(drop)
    }
}

fn part(body: &[u8], range: Option<Range<u64>>) -> Vec<u8> {
    let Range { start, end } = range.unwrap_or(0..body.len() as u64);
    let (start, end) = (start.min(body.len() as u64) as usize, end.min(body.len() as u64) as usize);
    body.get(start..end.max(start)).unwrap_or_default().to_vec()
}

/// The objects of one moment, for readers.
pub struct OfOneMoment(pub Objects);

impl Bucket for OfOneMoment {
    fn name(&self) -> &str {
        "still"
    }

    fn put(&self, _: &str, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn put_new(&self, _: &str, _: &[u8]) -> io::Result<Put> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).map(|body| part(body, range)))
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        Ok(self.0.keys().filter(|name| name.starts_with(prefix) && name.as_str() > after).cloned().collect())
    }

    fn delete(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}
