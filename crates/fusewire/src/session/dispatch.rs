//! Dispatches one request: parses it, calls the handler, and returns the data for the reply's header.
//!
//! Called by both transports with the areas of a request. Requests without a reply (FORGET, INTERRUPT, NOTIFY_REPLY)
//! have their own function.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::state::SessionState;
use crate::abi::{BatchForgetIn, ForgetIn, ForgetOne, InHeader, InterruptIn, NotifyRetrieveIn, OutHeader, Pod, opcode};
use crate::errno::Errno;
use crate::reply::Reply;
use crate::request::{Header, parse};

/// Result of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// For the reply's header: 0 or a negative error number.
    error: i32,
    /// Length of the reply's body.
    pub(super) len: usize,
}

impl Outcome {
    pub(super) fn is_success(self) -> bool {
        self.error == 0
    }

    /// The header of the reply.
    pub(super) fn header(self, unique: u64) -> OutHeader {
        let len = u32::try_from(size_of::<OutHeader>() + self.len).unwrap_or(u32::MAX);
        OutHeader { len, error: self.error, unique }
    }
}

/// Whether requests of an opcode have no reply.
pub(super) fn is_one_way(opcode: u32) -> bool {
    matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY)
}

/// Whether a request is brief: one that truncates a file never is.
pub(super) fn is_brief(shared: &SessionState, header: &InHeader, fixed: &[u8]) -> bool {
    let truncates = || {
        let flags = fixed.first_chunk::<4>();
        flags.is_none_or(|flags| u32::from_ne_bytes(*flags) & libc::O_TRUNC.cast_unsigned() != 0)
    };
    shared.handler.is_brief(header.opcode) && (header.opcode != opcode::OPEN || !truncates())
}

/// Handles a request: the reply's body is in `out` afterwards.
#[expect(clippy::disallowed_methods, reason = "measures requests")]
pub(super) fn request(shared: &SessionState, header: &InHeader, fixed: &[u8], rest: &[u8], out: &mut [u8]) -> Outcome {
    let start = Instant::now();
    let mut reply = Reply::new(out);
    let result = match parse(header, fixed, rest, shared.form) {
        Ok(_) if shared.stuck.refuses(header, shared.bounds()) => Err(Errno::EAGAIN),
        Ok(request) => shared.guarded(|| shared.handler.handle(&request, &mut reply)).unwrap_or(Err(Errno::EIO)),
        Err(error) => {
            tracing::error!(
                opcode = header.opcode,
                len = header.len,
                "the kernel sent a request that contradicts its own lengths"
            );
            Err(error)
        }
    };
    let outcome = match result {
        Ok(()) => Outcome { error: 0, len: reply.len() },
        Err(error) => Outcome { error: error.wire(), len: 0 },
    };
    let time = start.elapsed();
    shared.counters.count(header.opcode, time, result.is_err_and(|errno| is_failure(header.opcode, errno)));
    told(header, result, time);
    outcome
}

/// Whether an error counts as a failure. A missing attribute or name is a regular answer, and ENOSYS keeps the kernel
/// from sending the request again.
fn is_failure(opcode: u32, errno: Errno) -> bool {
    match errno {
        Errno::ENOSYS => false,
        Errno(libc::ENOENT) => opcode != opcode::LOOKUP,
        Errno(libc::ENODATA) => opcode != opcode::GETXATTR,
        _ => true,
    }
}

/// Logs a request, if all are logged. A request by our own threads while they log another one is refused (EDEADLK),
/// and not logged itself.
fn told(header: &InHeader, result: Result<(), Errno>, time: Duration) {
    if result == Err(Errno(libc::EDEADLK)) {
        return;
    }
    tracing::debug!(
        target: "fusewire::request",
        operation = opcode::name(header.opcode).unwrap_or("OTHER"),
        node = header.nodeid,
        pid = header.pid,
        result = result.err().map_or(0, Errno::wire),
        micros = time.as_micros(),
        "request"
    );
}

/// Notifies the handler that the kernel did not accept a successful reply.
pub(super) fn undelivered(shared: &SessionState, header: &InHeader, body: &[u8]) {
    shared.guarded(|| shared.handler.undelivered(&Header::from(header), body));
}

/// Handles a request without a reply. `fixed` and `rest` as for parsing.
pub(super) fn one_way(shared: &Arc<SessionState>, header: &InHeader, fixed: &[u8], rest: &[u8]) {
    let handled = match header.opcode {
        opcode::FORGET => ForgetIn::read(fixed).map(|forget| {
            shared.counters.count_many(opcode::FORGET, 1);
            shared.guarded(|| shared.handler.forget(header.nodeid, forget.nlookup));
        }),
        opcode::BATCH_FORGET => batch_forget(shared, fixed, rest),
        opcode::INTERRUPT => InterruptIn::read(fixed).map(|interrupt| {
            shared.counters.count_many(opcode::INTERRUPT, 1);
            shared.interrupt(interrupt.unique);
        }),
        opcode::NOTIFY_REPLY => NotifyRetrieveIn::read(fixed).and_then(|head| {
            let data = rest.get(..head.size as usize)?;
            shared.counters.count_many(opcode::NOTIFY_REPLY, 1);
            shared.guarded(|| shared.handler.retrieved(header.unique, header.nodeid, head.offset, data));
            Some(())
        }),
        _ => None,
    };
    if handled.is_none() {
        tracing::error!(
            opcode = header.opcode,
            len = header.len,
            "the kernel sent a message that contradicts its own lengths"
        );
    }
}

fn batch_forget(shared: &Arc<SessionState>, fixed: &[u8], rest: &[u8]) -> Option<()> {
    let count = BatchForgetIn::read(fixed)?.count as usize;
    let list = rest.get(..count.checked_mul(size_of::<ForgetOne>())?)?;
    shared.counters.count_many(opcode::BATCH_FORGET, 1);
    shared.guarded(|| {
        for one in list.chunks_exact(size_of::<ForgetOne>()).filter_map(ForgetOne::read) {
            shared.handler.forget(one.nodeid, one.nlookup);
        }
    });
    Some(())
}
