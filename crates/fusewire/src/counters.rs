//! Counts and times of requests, per opcode.
//!
//! Written by the transports with relaxed atomics (a request costs two or three additions and two clock reads), read
//! for status and metrics. The numbers of one snapshot may differ by a request.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::abi::opcode;

/// Buckets of a time histogram: bucket `i` counts requests that took from 2^i to 2^(i+1) - 1
/// nanoseconds (bucket 0 also 0, the last also anything longer).
pub const BUCKETS: usize = 36;

/// Counters of one opcode.
#[derive(Debug)]
struct Op {
    errors: AtomicU64,
    total_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Op {
    const fn new() -> Op {
        Op { errors: AtomicU64::new(0), total_ns: AtomicU64::new(0), buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

/// Counts and times of one opcode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpCounts {
    /// The opcode: [`crate::abi::opcode`].
    pub opcode: u32,
    /// Its name as in the kernel, `OTHER` for all unknown ones.
    pub name: &'static str,
    /// Number of requests handled.
    pub requests: u64,
    /// Number of requests answered with an error (ENOENT for a missing name is one).
    pub errors: u64,
    /// Total time in the handler, nanoseconds.
    pub total_ns: u64,
    /// Histogram of the time in the handler, see [`BUCKETS`].
    pub buckets: [u64; BUCKETS],
}

/// Counters of a session.
#[derive(Debug)]
pub struct Counters {
    ops: [Op; opcode::COUNT],
}

impl Default for Counters {
    fn default() -> Counters {
        Counters { ops: [const { Op::new() }; opcode::COUNT] }
    }
}

impl Counters {
    /// Counts a request. Opcode 0, which the protocol does not have, counts the unknown ones.
    pub(crate) fn count(&self, opcode: u32, time: Duration, error: bool) {
        let Some(op) = self.ops.get(opcode as usize).or(self.ops.first()) else { return };
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = (ns.max(1).ilog2() as usize).min(BUCKETS - 1);
        if let Some(bucket) = op.buckets.get(bucket) {
            bucket.fetch_add(1, Relaxed);
        }
        op.total_ns.fetch_add(ns, Relaxed);
        if error {
            op.errors.fetch_add(1, Relaxed);
        }
    }

    /// Counts FORGETs, which come in batches and are not timed.
    pub(crate) fn count_many(&self, opcode: u32, requests: u64) {
        if let Some(bucket) = self.ops.get(opcode as usize).and_then(|op| op.buckets.first()) {
            bucket.fetch_add(requests, Relaxed);
        }
    }

    /// Returns the number of requests with this opcode.
    pub fn requests(&self, opcode: u32) -> u64 {
        self.ops.get(opcode as usize).map_or(0, |op| op.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum())
    }

    /// Returns the number of requests for which the kernel waited: all but FORGET, BATCH_FORGET and INTERRUPT.
    pub fn total(&self) -> u64 {
        self.snapshot().iter().map(|op| op.requests).sum::<u64>()
            - [opcode::FORGET, opcode::BATCH_FORGET, opcode::INTERRUPT]
                .iter()
                .map(|opcode| self.requests(*opcode))
                .sum::<u64>()
    }

    /// Returns every opcode that occurred, in the order of opcodes.
    pub fn snapshot(&self) -> Vec<OpCounts> {
        let all = self.ops.iter().zip(0_u32..).map(|(op, opcode)| {
            let buckets = std::array::from_fn(|i| op.buckets.get(i).map_or(0, |bucket| bucket.load(Relaxed)));
            OpCounts {
                opcode,
                name: opcode::name(opcode).unwrap_or("OTHER"),
                requests: buckets.iter().sum(),
                errors: op.errors.load(Relaxed),
                total_ns: op.total_ns.load(Relaxed),
                buckets,
            }
        });
        all.filter(|op| op.requests > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_land_in_their_buckets() {
        let counters = Counters::default();
        counters.count(opcode::LOOKUP, Duration::from_nanos(0), true);
        counters.count(opcode::LOOKUP, Duration::from_nanos(1023), false);
        counters.count(opcode::LOOKUP, Duration::from_nanos(1024), false);
        counters.count(opcode::LOOKUP, Duration::from_secs(1_000_000), false);
        counters.count(9999, Duration::ZERO, false);
        counters.count_many(opcode::FORGET, 7);
        let all = counters.snapshot();
        let lookup = all.iter().find(|op| op.name == "LOOKUP").unwrap();
        assert_eq!((lookup.requests, lookup.errors), (4, 1));
        assert_eq!([0, 9, 10, BUCKETS - 1].map(|i| lookup.buckets[i]), [1; 4]);
        assert_eq!(all.iter().find(|op| op.name == "OTHER").unwrap().requests, 1);
        assert_eq!(counters.requests(opcode::FORGET), 7);
        assert_eq!(counters.total(), 5);
    }
}
