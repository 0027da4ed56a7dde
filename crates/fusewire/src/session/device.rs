//! The transport over the fuse device: read a request, write its reply.
//!
//! Every thread has its own descriptor of the connection (a reply must go to the descriptor of its request) and reads
//! from the kernel's single queue. In addition to rings, the same loop serves the messages that do not come over
//! rings, FORGET and INTERRUPT, with a delay.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno as Os;

use super::dispatch::{self, Outcome};
use super::leader::Reader;
use super::state::SessionState;
use super::workers::{CallerIds, QueueId, Worker};
use crate::abi::{InHeader, OutHeader, Pod};
use crate::errno::Errno;
use crate::request::fixed_size;
use crate::sys::{self, Pages};

/// In addition to rings: pause after some FORGETs, so that they come in batches. It delays an INTERRUPT by no more
/// than that either.
const LAZINESS: Duration = Duration::from_millis(10);

/// Adds a thread to the device's queue.
pub(super) fn spawn(shared: &Arc<SessionState>) -> io::Result<()> {
    shared.device.add();
    let result = shared.spawn("fuse device".to_owned(), |shared| {
        let left = run(shared);
        shared.device.remove();
        match left {
            Ok(Left::End) => {}
            // It may have been the last waiting thread.
            Ok(Left::Surplus) => shared.supply(QueueId::Device, shared.lack(QueueId::Device)),
            Err(error) => tracing::error!(%error, "a thread of the fuse device ends"),
        }
    });
    if result.is_err() {
        shared.device.remove();
    }
    result
}

/// Next step after an error of the device.
enum Next {
    Again,
    Leave,
    Fail(io::Error),
}

/// Reason for which a thread leaves its loop.
enum Left {
    /// The connection has ended, or we end it.
    End,
    /// It was detached, and there are enough threads.
    Surplus,
}

fn run(shared: &Arc<SessionState>) -> io::Result<Left> {
    let result = start(shared);
    shared.device.end_growing();
    let (mut thread, worker) = match result {
        Ok(both) => both,
        // The session ended before the thread began.
        Err(_) if shared.is_ending() => return Ok(Left::End),
        Err(error) => return Err(error),
    };
    let left = thread.serve();
    shared.lead.end_for_now(worker.tid);
    shared.leave(&worker);
    if !matches!(left, Ok(Left::Surplus)) {
        shared.left_loop(left.is_ok());
    }
    left
}

fn start(shared: &Arc<SessionState>) -> io::Result<(Thread, Arc<Worker>)> {
    let main = shared.connection.device()?;
    let clone =
        if !shared.options.one_device && shared.affords_clone() { sys::clone_device(main.as_fd()).ok() } else { None };
    // Replies work as well over the shared descriptor; then the kernel's lock is shared, too.
    let device = clone.map_or(main, |clone| shared.connection.add(clone));
    // The kernel requires space for a maximum WRITE in each read.
    let mut input = Pages::new(shared.max_io + rustix::param::page_size())?;
    if shared.options.resident {
        input.make_resident()?;
    }
    let output = Pages::new(shared.max_io + size_of::<OutHeader>())?;
    if let Err(error) = sys::schedule(0, sys::Class::Batch) {
        tracing::debug!(%error, "no batch scheduling");
    }
    let worker = Arc::new(Worker::new(tid(), None));
    shared.enter(&worker, QueueId::Device);
    let reader = Reader::new(Arc::clone(&worker));
    Ok((Thread { shared: Arc::clone(shared), worker: Arc::clone(&worker), reader, device, input, output }, worker))
}

/// The thread id of the calling thread.
pub(super) fn tid() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}

struct Thread {
    shared: Arc<SessionState>,
    worker: Arc<Worker>,
    reader: Reader,
    device: Arc<OwnedFd>,
    input: Pages,
    output: Pages,
}

impl Thread {
    #[expect(clippy::disallowed_methods, reason = "lets what wants no reply gather")]
    fn serve(&mut self) -> io::Result<Left> {
        let lazy = !self.shared.rings.is_empty();
        while !self.shared.is_stopping() {
            self.shared.lead.wait_to_read(&mut self.reader);
            let size = match rustix::io::read(&self.device, self.input.bytes_mut()) {
                // Closed by `Connection::close`: the kernel never returns 0.
                Ok(0) => return Ok(Left::End),
                Ok(size) => size,
                Err(Os::AGAIN) => {
                    // The descriptor is non-blocking.
                    let mut fds = [PollFd::new(&self.device, PollFlags::IN)];
                    match rustix::event::poll(&mut fds, None) {
                        Ok(_) | Err(Os::INTR) => continue,
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => match after(error) {
                    Next::Again => continue,
                    Next::Leave => return Ok(Left::End),
                    Next::Fail(error) => return Err(error),
                },
            };
            let Some(header) = InHeader::read(self.input.bytes()).filter(|header| header.len as usize == size) else {
                tracing::error!(size, "the fuse device gave a request that contradicts its own length");
                continue;
            };
            if dispatch::is_one_way(header.opcode) {
                let (fixed, rest) = split(self.input.bytes(), &header, &self.shared);
                dispatch::one_way(&self.shared, &header, fixed, rest);
                if lazy && !self.shared.anyone_blocked() && !self.shared.is_ending() {
                    std::thread::sleep(LAZINESS);
                }
            } else if let Some(left) = self.answer(&header)? {
                return Ok(left);
            }
        }
        Ok(Left::End)
    }

    /// Handles a request and sends the reply; returns why to leave, if so.
    fn answer(&mut self, header: &InHeader) -> io::Result<Option<Left>> {
        let shared = Arc::clone(&self.shared);
        self.worker.called_by(CallerIds { uid: header.uid, pid: header.pid });
        self.worker.begin(header.unique, header.nodeid);
        shared.supply(QueueId::Device, shared.device.take(shared.limit(QueueId::Device)));
        let (fixed, rest) = split(self.input.bytes(), header, &shared);
        if shared.rings.is_empty() {
            let brief = dispatch::is_brief(&shared, header, fixed);
            shared.lead.came(&mut self.reader, header, fixed, brief);
        }
        let head = size_of::<OutHeader>();
        let outcome = match self.output.bytes_mut().get_mut(head..) {
            Some(body) => dispatch::request(&shared, header, fixed, rest, body),
            None => return Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        };
        shared.lead.yields(&mut self.reader);
        let goes_on = self.send(header, outcome)?;
        let was_detached = shared.handled(&self.worker, QueueId::Device);
        self.worker.answered();
        shared.device.give_back();
        if !goes_on {
            return Ok(Some(Left::End));
        }
        let is_surplus = was_detached && shared.device.has_surplus(shared.limit(QueueId::Device));
        Ok(is_surplus.then_some(Left::Surplus))
    }

    /// Sends a reply; false at the end of the connection.
    fn send(&mut self, header: &InHeader, outcome: Outcome) -> io::Result<bool> {
        let end = size_of::<OutHeader>() + outcome.len;
        let output = self.output.bytes_mut();
        if outcome.header(header.unique).write(output).is_none() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let message = output.get(..end).unwrap_or_default();
        let body = message.get(size_of::<OutHeader>()..).unwrap_or_default();
        loop {
            let error = match rustix::io::write(&self.device, message) {
                Ok(_) => return Ok(true),
                Err(error) => error,
            };
            match error {
                Os::INTR | Os::AGAIN => {}
                // The request was aborted meanwhile.
                Os::NOENT => {
                    if outcome.is_success() {
                        dispatch::undelivered(&self.shared, header, body);
                    }
                    return Ok(true);
                }
                Os::NODEV | Os::NOTCONN | Os::CONNABORTED | Os::PERM => return Ok(false),
                // The kernel considers the reply malformed and waits for another one.
                error => {
                    tracing::error!(opcode = header.opcode, len = end, %error, "the kernel refuses a reply");
                    let failure = OutHeader { len: 16, error: Errno::EIO.wire(), unique: header.unique };
                    if outcome.is_success() {
                        dispatch::undelivered(&self.shared, header, body);
                    }
                    return match rustix::io::write(&self.device, failure.bytes()) {
                        Ok(_) | Err(Os::NOENT) => Ok(true),
                        Err(error) => Err(error.into()),
                    };
                }
            }
        }
    }
}

/// Splits the bytes after the header into the request's struct and the remainder.
fn split<'a>(input: &'a [u8], header: &InHeader, shared: &SessionState) -> (&'a [u8], &'a [u8]) {
    let body = input.get(size_of::<InHeader>()..header.len as usize).unwrap_or_default();
    body.split_at_checked(fixed_size(header.opcode, shared.form)).unwrap_or((body, &[]))
}

/// Classifies an error of reading.
fn after(error: Os) -> Next {
    match error {
        // A signal; a request aborted between queue and buffer.
        Os::INTR | Os::NOENT => Next::Again,
        // Unmounted, aborted.
        Os::NODEV | Os::CONNABORTED | Os::NOTCONN => Next::Leave,
        error => Next::Fail(error.into()),
    }
}
