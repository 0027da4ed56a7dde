//! Sequential scrub: verifies segments one after the other in the order of their locations, read ahead with all
//! copies and parity; segments of different lanes in parallel.
//!
//! Caller: `scrub.rs`. Invariants:
//! - A segment whose copies agree and that is undamaged is read once and never written. Everything else is left to
//!   [`Store::scrub_segment`], which reads it again.
//! - The visitor runs on the caller's thread. Lanes wait for it, so a slow visitor slows down the devices.

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

/// Number of bytes of each column read at once.
const AT_ONCE: u64 = 1 << 20;
/// Number of reads requested ahead.
const AHEAD: usize = 4;
/// Maximum number of lanes in parallel.
const LANES: usize = 8;
/// Number of verified frames queued for the visitor.
const WAITING: usize = 64;

/// A segment to be verified, as it was at the start.
#[derive(Debug)]
pub(super) struct SweepStop {
    id: u32,
    pub(super) position: u64,
    lane: u64,
    place: Place,
    stream: WriteStream,
    written: WrittenSoFar,
    /// Number of bytes read at once.
    step: u64,
}

/// The segments of a lane that are being read.
struct Lane<'a> {
    stops: &'a [SweepStop],
    sweep: Box<dyn Sweep + 'a>,
    /// Requested ranges: index of the segment, and offset.
    asked: VecDeque<(usize, u64)>,
    /// The next range to request.
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

    /// Returns the next range of a segment; `None` after its end.
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
                // Of an earlier segment that was left.
                Ok(swept) => self.sweep.give_back(swept.bytes),
                Err(_) => {}
            }
        }
    }

    /// Requests nothing more of the segments up to this one.
    fn leave(&mut self, number: usize) {
        if self.next.0 <= number {
            self.next = (number + 1, 0);
        }
    }
}

/// The window over the last read ranges of a segment.
struct Sweeping<'l, 'a> {
    lane: &'l mut Lane<'a>,
    number: usize,
    start: usize,
    bytes: Vec<u8>,
    agree: bool,
}

impl Sweeping<'_, '_> {
    /// Reads the next range; returns whether there was one.
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

/// A message of a lane to the caller's thread.
enum Told {
    Checked(Checked),
    /// Everything before this position is verified in this lane.
    Reached(usize, u64),
}

impl Store {
    /// Describes a segment as it is now.
    pub(super) fn stop(&self, segment: SegmentInfo) -> SweepStop {
        let SegmentInfo { id, stream, sealed, place, frames, bytes, .. } = segment;
        let at = SegmentAt { segment: id, place: &place };
        let (row, width) = (u64::from(self.backend.row(&place)).max(1), place.width() as u64);
        let (position, lane) = (self.backend.position(at), self.backend.lane(at));
        let step = (AT_ONCE * width / row).max(1) * row;
        SweepStop { id, position, lane, place, stream, written: WrittenSoFar { frames, bytes, sealed }, step }
    }

    /// Verifies these segments; `done` gets the positions up to which everything is verified. Returns whether the
    /// visitor let it reach the end.
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
                // A caller that has stopped the scrub does not need this.
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
            // A lane may reach its end before the visitor has processed its reports.
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

    /// Whether the object store has reported that a segment's object is missing or too short.
    pub(super) fn is_gone(&self, error: &PoolError) -> bool {
        let PoolError::Device { source, .. } = error else { return false };
        let is_word = matches!(source.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof);
        // A missing bucket is no statement about its objects.
        self.backend.is_shared() && is_word && !source.to_string().starts_with("there is no")
    }

    /// Reports every live frame of a segment whose object is missing as lost; returns whether to continue.
    fn tell_gone(&self, stop: &SweepStop, error: &PoolError, visit: &mut dyn FnMut(&Checked) -> bool) -> bool {
        let now = self.map.read().table.segments().get(&stop.id).map(|segment| segment.place.clone());
        if now.as_ref() != Some(&stop.place) {
            // It was deleted with its segment.
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
            // It is verified once more, from all copies.
            _ => self.scrub_segment(stop.id, &mut |checked| {
                checked.damage.is_none() && met.found.contains(&checked.name) || visit(checked)
            }),
        }
    }
}
