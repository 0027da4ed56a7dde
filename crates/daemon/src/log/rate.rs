//! Rate limit of a log, since users can cause any number of events.
//!
//! Used by [`super`] for each log that others have to read and store. Invariants: at most [`Rate::most`] lines are
//! admitted within [`WHILE`], of these at most [`SITE_MOST`] of one call site; the next admitted line reports the
//! number of lines dropped before it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use tracing::callsite::Identifier;

const WHILE: Duration = Duration::from_secs(10);
/// Limit for lines of all call sites, where requests are not logged.
pub(super) const LINES_MOST: u64 = 100;
/// Limit for lines of all call sites, where each request is logged.
pub(super) const REQUESTS_MOST: u64 = 20_000;
/// Limit for lines of one call site, out of [`LINES_MOST`].
const SITE_MOST: u64 = 20;

/// Rate limit of one log.
#[derive(Debug)]
pub(super) struct Rate {
    most: u64,
    since: Instant,
    lines: u64,
    sites: HashMap<Identifier, u64>,
    left_out: u64,
}

impl Rate {
    pub fn new(most: u64, now: Instant) -> Rate {
        Rate { most, since: now, lines: 0, sites: HashMap::new(), left_out: 0 }
    }

    /// Whether a line of this call site may be written now; if so, returns the number of lines dropped before it.
    pub fn admit(&mut self, site: Identifier, now: Instant) -> Option<u64> {
        if now.saturating_duration_since(self.since) >= WHILE {
            (self.since, self.lines) = (now, 0);
            self.sites.clear();
        }
        let of_site = self.sites.entry(site).or_default();
        let share = self.most.saturating_mul(SITE_MOST) / LINES_MOST;
        // Where requests are logged, one call site may use the whole limit.
        let share = if self.most > LINES_MOST { self.most } else { share };
        if self.lines >= self.most || *of_site >= share {
            self.left_out += 1;
            return None;
        }
        *of_site += 1;
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(event: impl FnOnce()) -> Identifier {
        use std::sync::{Arc, Mutex};
        struct Heard(Arc<Mutex<Option<Identifier>>>);
        impl tracing::Subscriber for Heard {
            fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
                true
            }
            fn event(&self, event: &tracing::Event<'_>) {
                *self.0.lock().unwrap() = Some(event.metadata().callsite());
            }
            fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
                tracing::span::Id::from_u64(1)
            }
            fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
            fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
            fn enter(&self, _: &tracing::span::Id) {}
            fn exit(&self, _: &tracing::span::Id) {}
        }
        let heard = Arc::new(Mutex::new(None));
        tracing::subscriber::with_default(Heard(Arc::clone(&heard)), event);
        let site = heard.lock().unwrap().take();
        site.unwrap()
    }

    #[test]
    fn lines_without_end_are_counted() {
        let now = Instant::now();
        let (one, other) = (site(|| tracing::info!("one")), site(|| tracing::info!("other")));
        let mut rate = Rate::new(LINES_MOST, now);
        let admitted = (0..50).filter(|_| rate.admit(one.clone(), now).is_some()).count();
        assert_eq!(admitted as u64, SITE_MOST);
        assert_eq!(rate.admit(other.clone(), now), Some(30), "one kind does not keep others from being told");
        assert_eq!(rate.admit(one.clone(), now), None);
        assert_eq!(rate.admit(one.clone(), now + WHILE), Some(1));
        let mut all = Rate::new(REQUESTS_MOST, now);
        assert!((0..REQUESTS_MOST).all(|_| all.admit(one.clone(), now) == Some(0)));
        assert_eq!(all.admit(other, now), None);
    }
}
