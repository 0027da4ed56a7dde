//! The transport over io_uring: one queue per CPU, several threads per queue, each with a ring of
//! its own and one entry in it.
//!
//! A thread waits in the same system call that sends its reply, on the CPU of its queue, so that request and reply
//! cost only two context switches. One entry per ring, because a handler that takes long would delay all other
//! requests of its ring. CPUs that are offline need an entry too (the kernel starts only when every possible CPU has
//! one): one thread holds the entries of all of them.
//!
//! Invariant: while an entry is with the kernel nothing here touches its memory; between a completion and the next
//! submission the kernel does not. A thread never leaves before the connection ends: an entry that disappears could
//! take a request with it.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::{Condvar, Mutex};

use super::device::tid;
use super::dispatch;
use super::pace::Own;
use super::state::SessionState;
use super::uring::{Completion, Uring};
use super::workers::{CallerIds, Queue, QueueId, Worker};
use crate::abi::{
    InHeader, NotifyRetrieveOut, OutHeader, Pod, UringCmdReq, UringEntInOut, device, notify, opcode, uring,
};
use crate::sys::{self, Pages};

/// Number of consecutive refusals of one entry that end its thread.
const MOST_REFUSALS: u32 = 3;
/// Size of the reply to a request whose data is in the payload area (WRITE: 8 bytes).
const SMALL_REPLY: usize = 64;

/// Marks our own requests for cached data: see [`Thread::kick`].
const KICK: u64 = 1 << 62;
const _: () = assert!(size_of::<OutHeader>() + size_of::<NotifyRetrieveOut>() == 48);

/// The machine's CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cpus {
    /// Number of the kernel's queues.
    possible: usize,
    online: Vec<usize>,
}

impl Cpus {
    pub(super) fn read() -> io::Result<Cpus> {
        let list = |name: &str| {
            let path = format!("/sys/devices/system/cpu/{name}");
            let text = std::fs::read_to_string(&path)
                .map_err(|error| sys::with_context(format!("cannot read {path}"), error))?;
            parse_list(&text).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{path} holds no list of CPUs: {text:?}"))
            })
        };
        Ok(Cpus { possible: list("possible")?.len(), online: list("online")? })
    }

    /// Creates the queues of a session.
    pub(super) fn queues(&self) -> io::Result<Vec<Queue>> {
        let queue = |cpu| u16::try_from(cpu).map(Queue::new).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG));
        (0..self.possible).map(queue).collect()
    }
}

/// Parses `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        match part.split_once('-') {
            Some((first, last)) => cpus.extend(first.parse().ok()?..=last.parse::<usize>().ok()?),
            None => cpus.push(part.parse().ok()?),
        }
    }
    Some(cpus)
}

/// Holds the first threads until INIT has been answered.
#[derive(Debug, Default)]
struct Gate {
    open: Mutex<Option<bool>>,
    changed: Condvar,
}

impl Gate {
    /// Waits until it is set; returns whether to continue.
    fn pass(&self) -> bool {
        let mut open = self.open.lock();
        loop {
            match *open {
                Some(go) => return go,
                None => self.changed.wait(&mut open),
            }
        }
    }

    fn set(&self, go: bool) {
        *self.open.lock() = Some(go);
        self.changed.notify_all();
    }
}

/// Reports of a first thread: its ring is created; its entries are registered.
struct Report {
    sender: Sender<io::Result<()>>,
    gate: Arc<Gate>,
}

/// Threads with rings that wait until INIT has been answered.
pub(super) struct Prepared {
    shared: Arc<SessionState>,
    reports: Receiver<io::Result<()>>,
    gate: Arc<Gate>,
    threads: usize,
}

/// Starts the first threads and creates their rings. All steps that can fail for lack of permission or memory fail
/// here, when the device can still be chosen: once the kernel knows that there will be rings, it holds all requests
/// back until they exist.
pub(super) fn prepare(shared: &Arc<SessionState>, cpus: &Cpus) -> io::Result<Prepared> {
    let each = match shared.options.threads {
        0 if cpus.online.len() <= 8 => 3,
        0 => 2,
        chosen => chosen as usize,
    };
    let mut plan: Vec<(Vec<usize>, Option<usize>)> = Vec::new();
    let is_served = |cpu: &usize| *cpu < cpus.possible;
    for cpu in cpus.online.iter().copied().filter(is_served) {
        plan.extend((0..each).map(|_| (vec![cpu], Some(cpu))));
    }
    let offline: Vec<usize> = (0..cpus.possible).filter(|cpu| !cpus.online.contains(cpu)).collect();
    if !offline.is_empty() {
        plan.push((offline, None));
    }
    if !shared.affords_rings(plan.len()) {
        return Err(sys::with_context(
            "cannot make an io_uring ring for each thread".to_owned(),
            rustix::io::Errno::MFILE.into(),
        ));
    }
    let (sender, reports) = channel();
    let mut prepared = Prepared { shared: Arc::clone(shared), reports, gate: Arc::default(), threads: 0 };
    for (queues, cpu) in plan {
        let report = Report { sender: sender.clone(), gate: Arc::clone(&prepared.gate) };
        if let Err(error) = spawn(shared, queues, cpu, Some(report)) {
            prepared.cancel();
            return Err(error);
        }
        prepared.threads += 1;
    }
    drop(sender);
    match prepared.all_report() {
        Ok(()) => Ok(prepared),
        Err(error) => {
            prepared.cancel();
            Err(error)
        }
    }
}

impl Prepared {
    fn all_report(&self) -> io::Result<()> {
        for _ in 0..self.threads {
            self.reports.recv().unwrap_or_else(|_| Err(io::Error::other("a thread died while it made its ring")))?;
        }
        Ok(())
    }

    /// Hands all entries to the kernel, after INIT has been answered. After an error the connection cannot be used.
    pub(super) fn go(self) -> io::Result<()> {
        self.gate.set(true);
        self.all_report()
    }

    /// Ends the threads and waits for them; the session can continue with the device.
    pub(super) fn cancel(self) {
        self.gate.set(false);
        self.shared.wait();
    }
}

/// Adds a thread to the queue of a CPU while requests are coming.
pub(super) fn grow(shared: &Arc<SessionState>, queue: usize) -> io::Result<()> {
    spawn(shared, vec![queue], Some(queue), None)
}

fn spawn(shared: &Arc<SessionState>, queues: Vec<usize>, cpu: Option<usize>, report: Option<Report>) -> io::Result<()> {
    let places: Vec<QueueId> = queues.into_iter().map(QueueId::Ring).collect();
    let name = cpu.map_or_else(|| "fuse ring".to_owned(), |cpu| format!("fuse ring {cpu}"));
    let all = places.clone();
    places.iter().for_each(|place| shared.queue(*place).add());
    let result = shared.spawn(name, move |shared| {
        run(shared, &all, cpu, report);
        all.iter().for_each(|place| shared.queue(*place).remove());
    });
    if result.is_err() {
        places.iter().for_each(|place| shared.queue(*place).remove());
    }
    result
}

fn run(shared: &Arc<SessionState>, places: &[QueueId], cpu: Option<usize>, report: Option<Report>) {
    let made = Thread::new(shared, places, cpu);
    let mut thread = match (made, &report) {
        (Ok(thread), None) => thread,
        (Ok(thread), Some(report)) => {
            // The receiver is only gone when the start has failed; then the gate is set to false.
            let _ = report.sender.send(Ok(()));
            if !report.gate.pass() {
                return;
            }
            thread
        }
        (Err(error), Some(report)) => {
            let _ = report.sender.send(Err(error));
            return;
        }
        (Err(error), None) => {
            tracing::warn!(%error, "cannot make another ring; requests may wait for each other");
            places.iter().for_each(|place| shared.queue(*place).end_growing());
            return;
        }
    };
    let first = places.first().copied().unwrap_or(QueueId::Device);
    shared.enter(&thread.worker, first);
    let registered = thread.register_all();
    places.iter().for_each(|place| shared.queue(*place).end_growing());
    let (early, error) = match registered {
        Ok(early) => (Some(early), None),
        Err(error) => (None, Some(error)),
    };
    let late = report.is_none();
    match (report, error) {
        (Some(report), error) => {
            let _ = report.sender.send(error.map_or(Ok(()), Err));
        }
        (None, Some(error)) => {
            tracing::warn!(%error, "cannot register another ring entry; requests may wait for each other")
        }
        (None, None) => {}
    }
    if let Some(early) = early {
        if late {
            thread.kick();
        }
        let result = thread.serve(early);
        thread.shared.pace.works(&mut thread.class);
        if let Err(error) = &result {
            tracing::error!(%error, "a ring of the fuse connection fails; the session ends");
        }
        shared.left_loop(result.is_ok());
    }
    let worker = Arc::clone(&thread.worker);
    drop(thread);
    shared.leave(&worker);
}

/// One entry of a ring: header area, payload area, and a buffer for small inputs (which share the payload area with
/// the reply).
struct Entry {
    place: QueueId,
    memory: Pages,
    /// The two areas as an array of `struct iovec`, for the kernel.
    areas: [usize; 4],
    /// The request that was answered last and the length of a successful reply, until the next request.
    last: Option<(InHeader, usize)>,
    refusals: u32,
}

impl Entry {
    fn new(place: QueueId, max_io: usize) -> io::Result<Entry> {
        let page = rustix::param::page_size();
        // Header area | payload | copy of the input, which may be as long as a payload.
        let memory = Pages::new(page + 2 * max_io)?;
        let start = memory.address() as usize;
        Ok(Entry { place, areas: [start, uring::HEADER_SIZE, start + page, max_io], memory, last: None, refusals: 0 })
    }
}

struct Thread {
    shared: Arc<SessionState>,
    worker: Arc<Worker>,
    ring: Uring,
    device: Arc<OwnedFd>,
    entries: Vec<Entry>,
    class: Own,
}

impl Thread {
    fn new(shared: &Arc<SessionState>, places: &[QueueId], cpu: Option<usize>) -> io::Result<Thread> {
        if let Some(cpu) = cpu
            && let Err(error) = sys::pin_to_cpu(0, cpu)
        {
            tracing::debug!(cpu, %error, "a ring thread is not pinned");
        }
        if let Err(error) = sys::schedule(0, sys::Class::Batch) {
            tracing::debug!(%error, "no batch scheduling");
        }
        let count = u32::try_from(places.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
        let ring =
            Uring::new(count).map_err(|error| sys::with_context("cannot make an io_uring ring".to_owned(), error))?;
        let entries = places.iter().map(|place| Entry::new(*place, shared.max_io)).collect::<io::Result<Vec<_>>>()?;
        let worker = Arc::new(Worker::new(tid(), Some(ring.consumed())));
        Ok(Thread {
            shared: Arc::clone(shared),
            worker,
            ring,
            device: shared.connection.device()?,
            entries,
            class: Own::default(),
        })
    }

    /// Hands all entries to the kernel. Returns completions that came in at once: requests, or the end of the
    /// connection.
    fn register_all(&mut self) -> io::Result<Vec<Completion>> {
        for index in 0..self.entries.len() {
            self.register(index)?;
        }
        self.ring.enter(false)?;
        let mut early = Vec::new();
        while let Some(completion) = self.ring.next() {
            if completion.result < 0 && !is_end(completion.result) {
                let error = io::Error::from_raw_os_error(-completion.result);
                return Err(sys::with_context("the kernel refuses a ring entry".to_owned(), error));
            }
            early.push(completion);
        }
        Ok(early)
    }

    /// Unblocks requests that came while this thread was being started and no other was waiting. The kernel has put
    /// them into a list from which only the end of another request of the same queue takes them, not a new entry. So
    /// another request is needed: a RETRIEVE of length 0 makes the kernel send one, on this CPU, hence to this queue.
    /// That needs a regular file, which is taken from the requests being handled (if all are about directories, their
    /// own end unblocks the list: only locks are waited for without limit).
    fn kick(&self) {
        let unique = KICK | u64::from(self.worker.tid) << 1;
        let nodes = self.shared.workers().into_iter().map(|worker| worker.node()).filter(|node| *node != 0);
        for nodeid in nodes {
            let ask = NotifyRetrieveOut { notify_unique: unique, nodeid, ..NotifyRetrieveOut::default() };
            let header = OutHeader { len: 48, error: notify::RETRIEVE, unique: 0 };
            let parts = [IoSlice::new(header.bytes()), IoSlice::new(ask.bytes())];
            if self.shared.connection.send(&parts).is_ok() || self.shared.is_ending() {
                return;
            }
        }
        tracing::debug!("no regular file to wake requests with that may have been waiting for this thread");
    }

    fn register(&mut self, index: usize) -> io::Result<()> {
        let Some(entry) = self.entries.get(index) else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        let request = UringCmdReq { qid: self.shared.queue(entry.place).qid, ..UringCmdReq::default() };
        self.worker.other_submission();
        self.ring.push(
            self.device.as_raw_fd(),
            device::URING_REGISTER,
            entry.areas.as_ptr() as u64,
            &request,
            index as u64,
        )
    }

    fn serve(&mut self, early: Vec<Completion>) -> io::Result<()> {
        let mut early = early.into_iter();
        while !self.shared.is_stopping() {
            let Some(completion) = early.next().or_else(|| self.ring.next()) else {
                self.enter(true)?;
                continue;
            };
            let Ok(index) = usize::try_from(completion.user_data) else { continue };
            if completion.result < 0 {
                if !self.refused(index, completion.result)? {
                    return Ok(());
                }
            } else {
                self.answer(index)?;
            }
            if self.ring.ready() {
                // Several entries in one ring: no reply is delayed by the handling of the next request.
                self.enter(false)?;
            }
        }
        Ok(())
    }

    fn enter(&mut self, wait: bool) -> io::Result<()> {
        let Thread { shared, ring, class, .. } = self;
        if wait {
            shared.pace.yields(class);
        }
        match ring.enter(wait) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Err(error),
            _ => Ok(()),
        }
    }

    /// Handles an entry that the kernel refused or ended; false at the end of the connection.
    fn refused(&mut self, index: usize, result: i32) -> io::Result<bool> {
        self.shared.pace.works(&mut self.class);
        if is_end(result) || self.shared.is_ending() {
            // It is unknown whether the kernel accepted the entry's last reply, and does not matter: the kernel
            // forgets everything now.
            return Ok(false);
        }
        let error = io::Error::from_raw_os_error(-result);
        tracing::warn!(%error, "the kernel refuses a reply over io_uring");
        self.undelivered(index);
        match self.entries.get_mut(index) {
            Some(entry) if entry.refusals < MOST_REFUSALS => entry.refusals += 1,
            _ => return Err(error),
        }
        self.register(index)?;
        Ok(true)
    }

    /// Notifies the handler that the kernel did not accept this entry's reply; an entry that only waited had none.
    fn undelivered(&mut self, index: usize) {
        let page = rustix::param::page_size();
        if let Some(entry) = self.entries.get_mut(index)
            && let Some((header, len)) = entry.last.take()
        {
            let body = entry.memory.bytes().get(page..page + len).unwrap_or_default();
            dispatch::undelivered(&self.shared, &header, body);
        }
    }

    /// Handles the request in an entry and queues the reply.
    fn answer(&mut self, index: usize) -> io::Result<()> {
        let Thread { shared, worker, ring, device, entries, class } = self;
        let several = entries.len() > 1;
        let Some(entry) = entries.get_mut(index) else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        let queue = shared.queue(entry.place);
        let memory = entry.memory.bytes_mut();
        let (Some(header), Some(mut carried)) =
            (InHeader::read(memory), memory.get(uring::ENT_IN_OUT..).and_then(UringEntInOut::read))
        else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let fixed = memory.get(uring::OP_IN..).unwrap_or_default();
        if !dispatch::is_brief(shared, &header, fixed) {
            shared.pace.works(class);
        }
        shared.pace.came(header.pid, queue.qid);
        if several {
            shared.set_place(worker, entry.place);
        }
        worker.called_by(CallerIds { uid: header.uid, pid: header.pid });
        if worker.begin(header.unique, header.nodeid) {
            shared.pace.busy();
        }
        shared.supply(entry.place, queue.take(shared.limit(entry.place)));
        let error_or_len = handle(shared, &header, carried.payload_sz as usize, memory);
        let (out, len) = error_or_len.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        entry.last = out.is_success().then_some((header, len));
        entry.refusals = 0;
        carried.payload_sz = u32::try_from(len).unwrap_or(0);
        let written = out.header(header.unique).write(memory);
        let written = written.and_then(|()| carried.write(memory.get_mut(uring::ENT_IN_OUT..)?));
        debug_assert!(written.is_some(), "the header area is a page");
        shared.handled(worker, entry.place);
        queue.give_back();
        let request = UringCmdReq { flags: 0, commit_id: carried.commit_id, qid: queue.qid, padding: [0; 6] };
        ring.push(device.as_raw_fd(), device::URING_COMMIT_AND_FETCH, 0, &request, index as u64)
    }
}

/// Whether a completion means that the connection has ended.
fn is_end(result: i32) -> bool {
    matches!(-result, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED | libc::ENODEV)
}

/// Handles the request in these areas; the reply's body is in the payload area afterwards. `None` if the areas are
/// too small for their content.
fn handle(
    shared: &Arc<SessionState>,
    header: &InHeader,
    size: usize,
    memory: &mut [u8],
) -> Option<(dispatch::Outcome, usize)> {
    let (head, rest) = memory.split_at_mut_checked(rustix::param::page_size())?;
    let (payload, copy) = rest.split_at_mut_checked(shared.max_io)?;
    let fixed = head.get(uring::OP_IN..uring::OP_IN + uring::OP_IN_SIZE)?;
    let size = size.min(payload.len());
    if header.opcode == opcode::NOTIFY_REPLY && header.unique & KICK != 0 {
        return Some((dispatch::Outcome::default(), 0));
    }
    if dispatch::is_one_way(header.opcode) {
        dispatch::one_way(shared, header, fixed, payload.get(..size)?);
        return Some((dispatch::Outcome::default(), 0));
    }
    if header.opcode == opcode::WRITE {
        let mut small = [0_u8; SMALL_REPLY];
        let outcome = dispatch::request(shared, header, fixed, payload.get(..size)?, &mut small);
        payload.get_mut(..outcome.len)?.copy_from_slice(small.get(..outcome.len)?);
        return Some((outcome, outcome.len));
    }
    // Names and values stay readable while the reply is built over them.
    let input = copy.get_mut(..size)?;
    input.copy_from_slice(payload.get(..size)?);
    let outcome = dispatch::request(shared, header, fixed, input, payload);
    Some((outcome, outcome.len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(parse_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("\n"), None);
        assert_eq!(parse_list("0-x"), None);
    }
}
