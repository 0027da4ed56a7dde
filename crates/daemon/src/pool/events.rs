//! Forwards a pool's events to the log and to the programs in `events.d`.
//!
//! A thread of the process that owns the pool, started by `process.rs`. It waits for the events of the pool (`nacre
//! pool events`), and checks every few seconds how full the pool is. Invariant: each event is forwarded once;
//! nothing in the pool waits for this thread.

use crate::hooks;
use nacre_admin::{Imported, watch::Event};
use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

/// Interval of checking how full the pool is.
const LOOK: Duration = Duration::from_secs(5);
/// Thresholds of used space that are reported, in percent.
const FULL: [u64; 3] = [80, 90, 95];
/// Usage has to fall below a threshold by this many percent before it is reported again.
const BACK: u64 = 2;

/// Starts the thread.
pub(super) fn start(imported: &Arc<Imported>) {
    let pool = Arc::downgrade(imported);
    let thread = thread::Builder::new().name("nacre-events".to_owned()).stack_size(256 << 10);
    if let Err(error) = thread.spawn(move || tell(&pool)) {
        tracing::error!(%error, "no thread for the events of the pool: nobody is told of them");
    }
}

fn tell(pool: &Weak<Imported>) {
    let Some(watch) = pool.upgrade().map(|pool| Arc::clone(&pool.watch)) else { return };
    let (mut last, mut full, mut suspended) = (0, Fullness::default(), false);
    loop {
        let events = watch.wait(last, LOOK);
        let Some(pool) = pool.upgrade() else { return };
        let name = pool.name();
        for event in events {
            last = event.number;
            if let Some((kind, details)) = hook(&event, &name) {
                hooks::tell(kind, details);
            }
        }
        let now = pool.suspended();
        if let Some(why) = now.as_ref().filter(|_| !suspended) {
            let details = vec![("pool".to_owned(), name.clone()), ("reason".to_owned(), why.clone())];
            watch.note("resource.fs.nacre.suspended", details);
        }
        suspended = now.is_some();
        if pool.failing.waiting().is_some() {
            // The engine does not answer while the pool is suspended.
            continue;
        }
        let used = used(&pool);
        if let Some(threshold) = full.crossed(used) {
            tracing::warn!(pool = name, used, threshold, "the pool is nearly full");
            let details = [("pool", name), ("capacity", used.to_string()), ("threshold", threshold.to_string())];
            let details = details.map(|(name, value)| (name.to_owned(), value)).to_vec();
            watch.note("sysevent.fs.nacre.pool_full", details);
        }
    }
}

/// Returns the used part of the space for ordinary writes, in percent.
fn used(pool: &Imported) -> u64 {
    let space = pool.store.space();
    let whole = space.size.saturating_sub(space.slop).max(1);
    100 - nacre_admin::pool::figures::percent(space.available.min(whole), whole).min(100)
}

/// The highest threshold that was reported.
#[derive(Debug, Default)]
struct Fullness(u64);

impl Fullness {
    /// Returns the threshold to report now.
    fn crossed(&mut self, used: u64) -> Option<u64> {
        let reached = FULL.into_iter().rfind(|threshold| used >= *threshold).unwrap_or(0);
        if reached > self.0 {
            self.0 = reached;
            return Some(reached);
        }
        if used + BACK < self.0 {
            self.0 = reached;
        }
        None
    }
}

/// Returns the event for the programs in `events.d`, if they get it at all.
fn hook(event: &Event, pool: &str) -> Option<(&'static str, Vec<(String, String)>)> {
    let kind = match event.class.as_str() {
        "resource.fs.zfs.statechange" => "device-fault",
        "resource.fs.nacre.suspended" => "pool-suspended",
        "sysevent.fs.zfs.scrub_finish" => "scrub-end",
        "sysevent.fs.nacre.pool_full" => "pool-full",
        _ => return None,
    };
    let mut details = vec![
        ("pool".to_owned(), pool.to_owned()),
        ("class".to_owned(), event.class.clone()),
        ("event_number".to_owned(), event.number.to_string()),
    ];
    for (name, value) in &event.details {
        let name = match name.as_str() {
            "vdev_path" => "device",
            "vdev_state" => "state",
            "pool" => continue,
            other => other,
        };
        details.push((name.to_owned(), value.clone()));
    }
    Some((kind, details))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_threshold_is_told_once() {
        let mut full = Fullness::default();
        let told: Vec<Option<u64>> =
            [10, 79, 80, 81, 79, 80, 99, 94, 92, 95, 10, 80].map(|used| full.crossed(used)).to_vec();
        let expected = [None, None, Some(80), None, None, None, Some(95), None, None, Some(95), None, Some(80)];
        assert_eq!(told, expected);
    }

    #[test]
    fn programs_get_what_is_known() {
        let details = [("vdev_path", "/a\nb"), ("vdev_state", "FAULTED")];
        let details = details.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let mut event = Event { number: 7, at: 1, class: "resource.fs.zfs.statechange".to_owned(), details };
        let (kind, told) = hook(&event, "tank").unwrap();
        assert_eq!(kind, "device-fault");
        for pair in [("pool", "tank"), ("device", "/a\nb"), ("state", "FAULTED"), ("event_number", "7")] {
            assert!(told.iter().any(|(name, value)| (name.as_str(), value.as_str()) == pair), "{told:?}");
        }
        event.class = "sysevent.fs.zfs.pool_import".to_owned();
        assert!(hook(&event, "tank").is_none());
    }
}
