//! Sequential scrub on devices: reads segments with all copies and parity by direct I/O, one thread per device. The
//! devices read ahead while earlier ranges are verified, each in the order of the requests.
//!
//! Caller: the store, by [`Sweep`]. Invariants:
//! - Nothing is written here, and devices that may lack data are not read.
//! - The threads end with the scrub.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::columns::{Aligned, RowShape, has};
use super::layout::{Layout, Standing};
use super::{Columns, Disks, Result, SegmentAt, slots};
use crate::backend::{Sweep, SweptRange};
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::label::Place;
use crate::parity;

/// A request to read a column from a device.
struct Job {
    device: Arc<dyn Device>,
    at: u64,
    length: usize,
    memory: Aligned,
    column: usize,
    answer: Sender<Answer>,
}

/// A column that was read, or failed.
struct Answer {
    column: usize,
    device: Arc<dyn Device>,
    read: io::Result<()>,
    memory: Aligned,
}

impl Job {
    fn run(self) {
        let Self { device, at, length, mut memory, column, answer } = self;
        let read = device.read_past_caches(memory.of(length), at);
        // The requester may be gone.
        drop(answer.send(Answer { column, device, read, memory }));
    }
}

/// The thread that reads one device.
struct Stream {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    fn start() -> Self {
        let (jobs, waiting) = unbounded::<Job>();
        let work = move || {
            // The thread that starts it may be pinned to one processor.
            crate::workers::unpin_thread();
            waiting.into_iter().for_each(Job::run);
        };
        let thread = std::thread::Builder::new().name("pool-sweep".to_owned()).spawn(work).ok();
        Self { jobs: thread.is_some().then_some(jobs), thread }
    }

    /// Queues a read; without a thread the caller reads it itself.
    fn read(&self, job: Job) {
        match &self.jobs {
            Some(jobs) => {
                if let Err(job) = jobs.send(job) {
                    job.into_inner().run();
                }
            }
            None => job.run(),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.jobs = None;
        // A panic of the thread was noticed by the consumer, which got no answer.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// A queued range.
struct Asked {
    place: Place,
    rows: Option<RowShape>,
    length: usize,
    /// Present devices lack a part of the range.
    lacking: bool,
    /// Number of columns that are read.
    count: usize,
    answers: Receiver<Answer>,
}

/// Sequential scrub of the segments on a pool's devices.
pub(super) struct DiskSweep<'a> {
    disks: &'a Disks,
    // Dropped before the threads: what they still read has no consumer.
    asked: VecDeque<Asked>,
    streams: BTreeMap<u16, Stream>,
    spare: Vec<Aligned>,
    contents: Vec<Vec<u8>>,
}

impl Disks {
    pub(super) fn start_sweep(&self) -> DiskSweep<'_> {
        DiskSweep {
            disks: self,
            asked: VecDeque::new(),
            streams: BTreeMap::new(),
            spare: Vec::new(),
            contents: Vec::new(),
        }
    }

    /// Lane of a location: one per group, and one per device in groups without redundancy.
    pub(super) fn lane_of(&self, place: &Place) -> u64 {
        self.layout().lane(place)
    }

    /// The devices to read a column from, and whether present devices lack data.
    fn swept_holders(layout: &Layout, device: u16) -> (Vec<u16>, bool) {
        if layout.is_plain() {
            return (vec![device], false);
        }
        let there: Vec<(u16, &Standing)> = layout.holders(device).filter(|(_, standing)| standing.works()).collect();
        let whole: Vec<u16> = there.iter().filter(|(_, standing)| standing.has_all()).map(|(at, _)| *at).collect();
        let lacking = whole.len() < there.len();
        (whole, lacking)
    }
}

impl Sweep for DiskSweep<'_> {
    fn ask(&mut self, at: SegmentAt<'_>, offset: u64, length: usize) {
        let layout = self.disks.layout();
        let rows = self.disks.rows(&layout, at);
        let width = rows.map_or(1, |rows| rows.width.max(1));
        let (offset, length) = (offset / width as u64, length / width);
        let unwritten: Columns = self.disks.incomplete.of(at.segment);
        let (send, answers) = unbounded();
        let (mut lacking, mut count) = (false, 0);
        for (column, slot) in at.place.iter().enumerate() {
            let (holders, others) = Disks::swept_holders(&layout, slot.device);
            lacking |= others || has(unwritten, column) && layout.is_used(slot.device);
            for holder in holders.into_iter().filter(|_| !has(unwritten, column)) {
                let Ok(device) = self.disks.device(holder) else {
                    lacking = true;
                    continue;
                };
                let (memory, answer) = (self.spare.pop().unwrap_or_default(), send.clone());
                let at = slots::start(*slot, self.disks.slot) + offset;
                let stream = self.streams.entry(holder).or_insert_with(Stream::start);
                count += 1;
                stream.read(Job { device, at, length, memory, column, answer });
            }
        }
        self.asked.push_back(Asked { place: at.place.clone(), rows, length, lacking, count, answers });
    }

    fn take(&mut self) -> Result<SweptRange> {
        let nothing = PoolError::Format(Damage::Structure("nothing was asked for"));
        let asked = self.asked.pop_front().ok_or(nothing)?;
        let bytes = self.contents.pop().unwrap_or_default();
        let mut columns: Vec<Option<Aligned>> = asked.place.iter().map(|_| None).collect();
        let (mut agree, mut failure, mut answered) = (true, None, 0);
        for Answer { column, device, read, mut memory } in &asked.answers {
            answered += 1;
            if let Err(error) = read {
                (agree, failure) = (false, Some(failed(&*device, "reading", error)));
                self.spare.push(memory);
                continue;
            }
            match columns.get_mut(column) {
                Some(Some(there)) => {
                    agree &= there.of(asked.length) == memory.of(asked.length);
                    self.spare.push(memory);
                }
                Some(empty) => *empty = Some(memory),
                None => {}
            }
        }
        // A thread that has died sends no answers.
        agree &= answered == asked.count;
        let taken = match asked.rows {
            None => whole_copy(&mut columns, asked.length, bytes).map(|(bytes, same)| (bytes, agree && same)),
            Some(rows) => {
                whole_rows(&mut columns, rows, asked.length, bytes).map(|(bytes, fits)| (bytes, agree && fits))
            }
        };
        self.spare.extend(columns.into_iter().flatten());
        let Some((bytes, agree)) = taken else {
            let gone = PoolError::Refused("too many devices of a group are missing".to_owned());
            return Err(failure.unwrap_or(gone));
        };
        Ok(SweptRange { bytes, agree: agree && !asked.lacking })
    }

    fn give_back(&mut self, bytes: Vec<u8>) {
        self.contents.push(bytes);
    }
}

/// Returns the first copy, and whether the others are equal.
fn whole_copy(columns: &mut [Option<Aligned>], length: usize, mut bytes: Vec<u8>) -> Option<(Vec<u8>, bool)> {
    let mut there = columns.iter_mut().flatten();
    bytes.clear();
    bytes.extend_from_slice(there.next()?.of(length));
    let same = there.all(|other| *other.of(length) == *bytes);
    Some((bytes, same))
}

/// Returns rows of which some columns may be missing, and whether the spare parity matches; `None` where more columns
/// are missing than there is parity.
fn whole_rows(
    columns: &mut [Option<Aligned>],
    rows: RowShape,
    length: usize,
    mut bytes: Vec<u8>,
) -> Option<(Vec<u8>, bool)> {
    let lost: Vec<usize> = (0..).zip(columns.iter()).filter(|(_, column)| column.is_none()).map(|(at, _)| at).collect();
    if lost.len() > rows.parity {
        return None;
    }
    let mut memory: Vec<&mut [u8]> =
        columns.iter_mut().map(|column| column.get_or_insert_with(Aligned::default).of(length)).collect();
    parity::reconstruct(&mut memory, rows.width, &lost).ok()?;
    let (data, parity) = memory.split_at_mut(rows.width);
    let fits = if lost.len() < rows.parity {
        let mut right = vec![0; length * rows.parity];
        let mut columns: Vec<&mut [u8]> = right.chunks_mut(length.max(1)).collect();
        parity::encode(data, &mut columns).ok()?;
        columns.iter().zip(parity.iter()).all(|(right, found)| **right == **found)
    } else {
        // No spare parity to compare.
        true
    };
    let unit = rows.unit as usize;
    bytes.clear();
    bytes.reserve(length * rows.width);
    for from in (0..length).step_by(unit.max(1)) {
        for column in data.iter() {
            bytes.extend_from_slice(column.get(from..(from + unit).min(length)).unwrap_or_default());
        }
    }
    Some((bytes, fits))
}
