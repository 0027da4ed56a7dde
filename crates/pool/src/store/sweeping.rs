//! Segments verified one after the other in the order in which they lie, read ahead with all copies and
//! parity; those of different lanes at the same time.
//!
//! Caller: `scrub.rs`. Invariants:
//! - What agrees in all copies and is whole is read once and never written. Everything else is left to
//!   [`Store::scrub_segment`], which looks for itself.
//! - The visitor is called by the thread of the caller. Lanes wait for it, so whoever slows it slows
//!   the devices.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Sender, bounded};

use super::scrub::{Checked, Met, SegmentInfo, WalkedPart, WrittenSoFar};
use super::{Result, Store};
use crate::backend::{Backend, SegmentAt, Sweep, SweptRange};
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::Place;
use crate::workers::unpin_thread;

/// So much of each column is read at once, bytes.
const AT_ONCE: u64 = 1 << 20;
/// So many reads are asked for ahead.
const AHEAD: usize = 4;
/// So many lanes are gone along at the same time, at most.
const LANES: usize = 8;
/// So many frames that were verified wait for the visitor.
const WAITING: usize = 64;

/// A segment to be verified, as it was when that began.
#[derive(Debug)]
pub(super) struct SweepStop {
    id: u32,
    pub(super) position: u64,
    lane: u64,
    place: Place,
    stream: WriteStream,
    written: WrittenSoFar,
    /// How much is read at once, bytes.
    step: u64,
}

/// The segments of a lane being read.
struct Lane<'a> {
    stops: &'a [SweepStop],
    sweep: Box<dyn Sweep + 'a>,
    /// What was asked for: of which segment, from where.
    asked: VecDeque<(usize, u64)>,
    /// What is asked for next.
    next: (usize, u64),
}

impl<'a> Lane<'a> {
    fn new(backend: &'a dyn Backend, stops: &'a [SweepStop]) -> Self {
        Self { stops, sweep: backend.sweep(), asked: VecDeque::new(), next: (0, 0) }
    }

    fn ask_ahead(&mut self) {
        while self.asked.len() < AHEAD {
            let (number, offset) = self.next;
            let Some(stop) = self.stops.get(number) else { return };
            let end = u64::from(stop.written.bytes);
            if offset >= end {
                self.next = (number + 1, 0);
                continue;
            }
            let length = stop.step.min(end - offset);
            self.sweep.ask(SegmentAt { segment: stop.id, place: &stop.place }, offset, length as usize);
            self.asked.push_back((number, offset));
            self.next = (number, offset + length);
        }
    }

    /// What comes next of a segment; `None` behind its end.
    fn take(&mut self, number: usize) -> Option<Result<(u64, SweptRange)>> {
        loop {
            self.ask_ahead();
            let (of, offset) = *self.asked.front()?;
            if of > number {
                return None;
            }
            self.asked.pop_front();
            let swept = self.sweep.take();
            match swept {
                swept if of == number => return Some(swept.map(|swept| (offset, swept))),
                // Of a segment before it, which was left.
                Ok(swept) => self.sweep.give_back(swept.bytes),
                Err(_) => {}
            }
        }
    }

    /// Nothing more is asked for of the segments up to this one.
    fn leave(&mut self, number: usize) {
        if self.next.0 <= number {
            self.next = (number + 1, 0);
        }
    }
}

/// The part of a segment that was read last.
struct Sweeping<'l, 'a> {
    lane: &'l mut Lane<'a>,
    number: usize,
    start: usize,
    bytes: Vec<u8>,
    agree: bool,
}

impl Sweeping<'_, '_> {
    /// Reads on; answers whether there was anything.
    fn read_on(&mut self, from: usize) -> Result<bool> {
        let Some(taken) = self.lane.take(self.number) else { return Ok(false) };
        let (offset, SweptRange { bytes, agree }) = taken?;
        self.agree &= agree;
        let gone = from.saturating_sub(self.start).min(self.bytes.len());
        self.start += gone;
        if gone == self.bytes.len() {
            self.start = offset as usize;
            self.lane.sweep.give_back(std::mem::replace(&mut self.bytes, bytes));
        } else {
            self.bytes.drain(..gone);
            self.bytes.extend_from_slice(&bytes);
            self.lane.sweep.give_back(bytes);
        }
        Ok(true)
    }
}

impl WalkedPart for Sweeping<'_, '_> {
    fn slide(&mut self, from: usize, to: usize, _end: usize) -> Result<()> {
        while to > self.start + self.bytes.len() {
            if !self.read_on(from)? {
                return Err(PoolError::Format(Damage::Structure("behind the end of a segment")));
            }
        }
        Ok(())
    }

    fn get(&self, from: usize, to: usize) -> Option<&[u8]> {
        self.bytes.get(from.checked_sub(self.start)?..to.checked_sub(self.start)?)
    }
}

/// What a lane tells.
enum Told {
    Checked(Checked),
    /// All before this position is done in this lane.
    Reached(usize, u64),
}

impl Store {
    /// A segment as it is now.
    pub(super) fn stop(&self, segment: SegmentInfo) -> SweepStop {
        let SegmentInfo { id, stream, sealed, place, frames, bytes, .. } = segment;
        let at = SegmentAt { segment: id, place: &place };
        let (row, width) = (u64::from(self.backend.row(&place)).max(1), place.width() as u64);
        let (position, lane) = (self.backend.position(at), self.backend.lane(at));
        let step = (AT_ONCE * width / row).max(1) * row;
        SweepStop { id, position, lane, place, stream, written: WrittenSoFar { frames, bytes, sealed }, step }
    }

    /// Verifies these segments; `done` is told the positions up to which all is done. Answers whether
    /// the visitor has let it come to the end.
    pub(super) fn sweep(
        &self,
        stops: Vec<SweepStop>,
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        let mut lanes: BTreeMap<u64, Vec<SweepStop>> = BTreeMap::new();
        let numbers: BTreeSet<u64> = stops.iter().map(|stop| stop.lane).collect();
        let number_of: BTreeMap<u64, u64> =
            numbers.into_iter().zip(0..).map(|(lane, number)| (lane, number % LANES as u64)).collect();
        for stop in stops {
            lanes.entry(number_of.get(&stop.lane).copied().unwrap_or(0)).or_default().push(stop);
        }
        let mut lanes: Vec<Vec<SweepStop>> = lanes.into_values().collect();
        lanes.iter_mut().for_each(|stops| stops.sort_by_key(|stop| (stop.position, stop.id)));
        match lanes.as_slice() {
            [] => Ok(true),
            [alone] => self.sweep_lane(alone, visit, done),
            lanes => self.sweep_lanes(lanes, visit, done),
        }
    }

    fn sweep_lanes(
        &self,
        lanes: &[Vec<SweepStop>],
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        let stopped = AtomicBool::new(false);
        let (tell, told) = bounded::<Told>(WAITING);
        let along = |number: usize, stops: &[SweepStop], tell: &Sender<Told>| {
            unpin_thread();
            let mut visit = |checked: &Checked| {
                !stopped.load(Ordering::Relaxed) && tell.send(Told::Checked(checked.clone())).is_ok()
            };
            let swept = self.sweep_lane(stops, &mut visit, &mut |position| {
                // Nobody who has stopped it needs to know.
                let _ = tell.send(Told::Reached(number, position));
            });
            if matches!(swept, Ok(true)) {
                let _ = tell.send(Told::Reached(number, u64::MAX));
            } else {
                stopped.store(true, Ordering::Relaxed);
            }
            swept
        };
        let along = &along;
        std::thread::scope(|scope| {
            let mut started = Vec::new();
            for (number, stops) in lanes.iter().enumerate() {
                let tell = tell.clone();
                let work = move || along(number, stops, &tell);
                started.push(std::thread::Builder::new().name("pool-verify".to_owned()).spawn_scoped(scope, work));
            }
            drop(tell);
            let first = |stops: &Vec<SweepStop>| stops.first().map_or(u64::MAX, |stop| stop.position);
            let mut reached: Vec<u64> = lanes.iter().map(first).collect();
            let (mut before, mut refused) = (0, false);
            for told in told {
                match told {
                    Told::Checked(checked) => {
                        if !refused && !visit(&checked) {
                            refused = true;
                            stopped.store(true, Ordering::Relaxed);
                        }
                    }
                    Told::Reached(lane, position) => {
                        if let Some(there) = reached.get_mut(lane) {
                            *there = position;
                        }
                        let all = reached.iter().min().copied().unwrap_or(0);
                        if all > before && all < u64::MAX && !refused {
                            before = all;
                            done(all);
                        }
                    }
                }
            }
            let failed = |why: &str| Err(PoolError::Refused(why.to_owned()));
            let ended = started.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| failed("a thread that verified segments is gone")),
                Err(_) => failed("no thread can be started to verify segments"),
            });
            // A lane may have come to its end before the visitor came to what it has told.
            ended.reduce(|all, one| Ok(all? && one?)).unwrap_or(Ok(true)).map(|all| all && !refused)
        })
    }

    fn sweep_lane(
        &self,
        stops: &[SweepStop],
        visit: &mut dyn FnMut(&Checked) -> bool,
        done: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        let mut lane = Lane::new(&*self.backend, stops);
        for (number, stop) in stops.iter().enumerate() {
            let swept = match self.sweep_segment(&mut lane, number, stop, visit) {
                Err(error) if self.is_gone(&error) => {
                    lane.leave(number);
                    Ok(self.tell_gone(stop, &error, visit))
                }
                swept => swept,
            };
            if !swept? {
                return Ok(false);
            }
            if let Some(next) = stops.get(number + 1) {
                done(next.position);
            }
        }
        Ok(true)
    }

    /// Whether this is the store's word that the object of a segment is not there, or is too short.
    pub(super) fn is_gone(&self, error: &PoolError) -> bool {
        let PoolError::Device { source, .. } = error else { return false };
        let is_word = matches!(source.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof);
        // Without the bucket nothing is known of its objects.
        self.backend.is_shared() && is_word && !source.to_string().starts_with("there is no")
    }

    /// Every frame that lives in a segment whose object is gone is lost; whether to go on.
    fn tell_gone(&self, stop: &SweepStop, error: &PoolError, visit: &mut dyn FnMut(&Checked) -> bool) -> bool {
        let now = self.map.read().table.segments().get(&stop.id).map(|segment| segment.place.clone());
        if now.as_ref() != Some(&stop.place) {
            // It was removed with its segment.
            return true;
        }
        let at = SegmentAt { segment: stop.id, place: &stop.place };
        let object = self.backend.label_of(at);
        let lost = self.living(stop.id);
        tracing::error!(object, frames = lost.len(), %error, "an object of the pool is lost");
        let device = self.backend.member(at, 0);
        lost.into_iter().all(|name| {
            let damage = Some(Damage::Structure("its object is lost, or cut short"));
            visit(&Checked { damage, ..Checked::of(name, device) })
        })
    }

    fn sweep_segment(
        &self,
        lane: &mut Lane<'_>,
        number: usize,
        stop: &SweepStop,
        visit: &mut dyn FnMut(&Checked) -> bool,
    ) -> Result<bool> {
        let at = SegmentAt { segment: stop.id, place: &stop.place };
        let stays = || self.map.read().table.segments().get(&stop.id).is_some_and(|now| now.place == stop.place);
        if !stays() {
            lane.leave(number);
            return self.scrub_segment(stop.id, visit);
        }
        let copied = self.is_copied(at);
        let mut part = Sweeping { lane, number, start: 0, bytes: Vec::new(), agree: true };
        let verified = self.verify(at, (stop.stream, stop.written, copied), &mut part, visit);
        let rest = |part: &mut Sweeping<'_, '_>| {
            while part.read_on(usize::MAX)? {}
            Ok(part.agree)
        };
        let (met, agree) = match verified {
            Ok(Met { go_on: false, .. }) => return Ok(false),
            Ok(met) => {
                let agree = rest(&mut part);
                (met, agree)
            }
            Err(error) => (Met { found: BTreeSet::new(), whole: false, go_on: true }, Err(error)),
        };
        lane.leave(number);
        match agree {
            Ok(agree) if !copied || met.whole && agree => Ok(true),
            Err(error) if !copied => Err(error),
            // It is looked at once more, in all ways.
            _ => self.scrub_segment(stop.id, &mut |checked| {
                checked.damage.is_none() && met.found.contains(&checked.name) || visit(checked)
            }),
        }
    }
}
