//! Makes the [`Report`] of a running mount from the status of its FUSE front end.

use crate::left::Guarded;
use crate::mountinfo::device_text;
use crate::report::{LayerReport, OperationReport, PassthroughReport, Report, WaitingReport, path_text};
use nacre_admin::pool::Survives;
use nacre_fuse::{OperationCounts, Status, Transport, Waiting};
use nacre_vfs::Coherence;
use std::time::Instant;

/// Prefix in the field for the stack that a mount of a pool's dataset has: the dataset's name follows.
pub const OF_POOL: &str = "dataset:";

/// Constant data of a mount.
#[derive(Debug)]
pub struct About {
    /// First column of the mount table.
    pub source: String,
    /// The reason why FUSE serves the mount.
    pub engine_reason: String,
    /// Time of the mount.
    pub started: Instant,
    /// Survival of the mount, if a supervisor restarts its process.
    pub guarded: Option<Guarded>,
}

/// Makes a report.
pub fn report(about: &About, stack: String, status: Status) -> Report {
    let errors = status.operations.iter().map(|operation| operation.errors).sum();
    let ends = || about.guarded.as_ref().map(|_| "requests under way would end with the process".to_owned());
    let transport_reason = status.transport_fallback.or_else(ends).filter(|_| status.transport == Transport::Device);
    Report {
        mountpoint: path_text(&status.mountpoint),
        device: status.device.map(|device| device_text(rustix::fs::major(device), rustix::fs::minor(device))),
        source: about.source.clone(),
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        uptime: about.started.elapsed().as_secs(),
        engine: "fuse".to_owned(),
        engine_reason: about.engine_reason.clone(),
        stack,
        layers: Some(LayerReport::from(status.stack)),
        detached: !status.attached,
        stays_read_only: status.stays_read_only,
        transport: status.transport.name().to_owned(),
        transport_reason,
        passthrough: PassthroughReport {
            on: status.passthrough.refusal.is_none(),
            why_not: status.passthrough.refusal,
        },
        asks_at_open: status.asks_at_open.map(str::to_owned),
        coherence: coherence(status.coherence).to_owned(),
        full_invalidations: status.invalidated_all,
        invalidations: status.invalidations,
        requests: status.requests,
        errors,
        in_flight: status.in_flight as u64,
        waiting: status.waiting.iter().map(waiting).collect(),
        inodes: status.inodes as u64,
        open_files: status.open_files as u64,
        passthrough_opens: status.passthrough.opens,
        cache_hits: status.passthrough.reused,
        operations: status.operations.into_iter().map(operation).collect(),
        survives: about.guarded.as_ref().map(survives),
        cages: Vec::new(),
        branches: Vec::new(),
    }
}

/// Returns how the mount survives its process.
pub fn survives(guarded: &Guarded) -> Survives {
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_pid().unsigned_abs());
    Survives {
        guardian: parent.filter(|parent| *parent == guarded.guardian),
        restarts: guarded.memory.restarts(),
        why_not: guarded.memory.why_not(),
        stored: guarded.service.as_ref().map(|service| service.stored()),
    }
}

/// Returns the word for it, as in `--coherence` where it has one.
fn coherence(coherence: Coherence) -> &'static str {
    match coherence {
        Coherence::Exclusive => "exclusive",
        Coherence::Watched => "watch",
        Coherence::Shared => "revalidate",
        Coherence::PerCaller => "per caller",
    }
}

fn waiting(waiting: &Waiting) -> WaitingReport {
    let Waiting { request, thread, nodeid, seconds } = *waiting;
    WaitingReport { request: request.to_owned(), thread, inode: nodeid, seconds }
}

fn operation(counts: OperationCounts) -> OperationReport {
    OperationReport {
        name: counts.name.to_lowercase(),
        requests: counts.requests,
        errors: counts.errors,
        total_ns: counts.total_ns,
        latency: latency(&counts.histogram),
    }
}

/// Buckets of powers of two as upper bounds, without the empty ones at both ends.
fn latency(histogram: &[u64]) -> Vec<(Option<u64>, u64)> {
    let last = histogram.len().saturating_sub(1);
    let buckets = histogram.iter().enumerate().map(|(place, requests)| {
        let bound = u32::try_from(place + 1).ok().and_then(|power| 1_u64.checked_shl(power)).filter(|_| place < last);
        (bound.map(|bound| bound - 1), *requests)
    });
    let first = histogram.iter().position(|requests| *requests > 0).unwrap_or(histogram.len());
    let end = histogram.iter().rposition(|requests| *requests > 0).map_or(first, |place| place + 1);
    buckets.skip(first).take(end - first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_ends_are_left_out() {
        assert_eq!(latency(&[0, 0, 5, 0, 1, 0]), [(Some(7), 5), (Some(15), 0), (Some(31), 1)]);
        assert_eq!(latency(&[1, 0, 2]), [(Some(1), 1), (Some(3), 0), (None, 2)]);
        assert_eq!(latency(&[0, 0]), []);
        assert_eq!(latency(&[]), []);
    }
}
