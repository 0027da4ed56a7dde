//! Time: the only file of this crate that reads clocks, and that polls for events without notification.

use std::{
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Returns the monotonic time, for deadlines and measurements.
#[expect(clippy::disallowed_methods, reason = "deadlines of waits, and how long mounts have been there")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Returns the date in seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "records say when they were made; nothing depends on it")]
pub(crate) fn date() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the date for a line of a log, in the local time zone: `2026-11-20 23:11:59`.
pub(crate) fn stamp() -> String {
    let date = date();
    match nacre_sys::local_time::local_time(i64::try_from(date).unwrap_or(i64::MAX)) {
        Ok(at) => format!("{}-{:02}-{:02} {:02}:{:02}:{:02}", at.year, at.month, at.day, at.hour, at.minute, at.second),
        Err(_) => date.to_string(),
    }
}

/// Sleeps.
#[expect(clippy::disallowed_methods, reason = "callers say who tells nobody")]
pub(crate) fn pause(time: Duration) {
    thread::sleep(time);
}

/// Polls `come` every `every` until it returns true; returns false after `patience`.
pub(crate) fn look_until(patience: Duration, every: Duration, mut come: impl FnMut() -> bool) -> bool {
    let until = now() + patience;
    loop {
        match come() {
            true => return true,
            false if now() >= until => return false,
            false => pause(every),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_late_is_seen_and_what_does_not_come_is_given_up() {
        let mut looks = 0;
        assert!(look_until(Duration::from_secs(3600), Duration::from_millis(1), || {
            looks += 1;
            looks == 3
        }));
        assert!(!look_until(Duration::from_millis(2), Duration::from_millis(1), || false));
        assert!(look_until(Duration::ZERO, Duration::from_millis(1), || true));
    }
}
