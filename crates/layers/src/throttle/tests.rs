//! Tests of the filter over a fake clock: all times are computed, none is waited for.

use super::*;
use crate::{clock::Clock, context::simply_waiting, fakes::FakeClock, mem::Mem};
use nacre_vfs::{Caller, Errno, Filtered, Layer, Name, WriteOrigin};
use proptest::prelude::*;
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

fn rate(text: &str) -> Rate {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn rates_take_decimals_and_suffixes() {
    for (text, bytes) in [
        ("1", 1.0),
        ("0.5", 0.5),
        ("10k", 10_240.0),
        ("1K", 1024.0),
        ("1.5M", 1_572_864.0),
        ("1m", 1_048_576.0),
        ("2G", 2_147_483_648.0),
        ("1T", 1_099_511_627_776.0),
        (".5k", 512.0),
        ("1.k", 1024.0),
    ] {
        assert_eq!(rate(text).per_second(), bytes, "{text}");
    }
    for text in ["", "k", "0", "0.0M", "-1", "+1", "1e3", "inf", "nan", "1kb", "1 k", "1..5", ".", "1P", "k1"] {
        assert!(text.parse::<Rate>().is_err(), "{text:?}");
    }
}

#[test]
fn rates_print_as_they_are_read() {
    for text in ["1", "1023", "1k", "1.5M", "2.25G", "1T", "0.3"] {
        assert_eq!(rate(text).to_string(), text);
    }
}

fn throttled(read: Option<&str>, write: Option<&str>) -> (Arc<FakeClock>, Arc<Throttle>, Opened) {
    let clock = Arc::new(FakeClock::default());
    clock.advance(Duration::from_secs(100));
    let throttle = Arc::new(Throttle::new(
        Rates { read: read.map(rate), write: write.map(rate) },
        Arc::clone(&clock) as _,
        simply_waiting(),
    ));
    let layer = Filtered::new(Arc::clone(&throttle), Arc::new(Mem::new()));
    let root = layer.root().unwrap().node;
    let (_, file) = layer.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o644, OpenFlags::READ_WRITE).unwrap();
    (clock, throttle, file)
}

#[test]
fn reads_and_writes_have_their_own_bucket() {
    let (clock, _, file) = throttled(Some("1k"), Some("2k"));
    file.write(&[1; 4096], 0, WriteOrigin::Caller).unwrap();
    // Two seconds' worth, minus the credit of an idle bucket.
    assert_eq!(clock.paused(), Duration::from_millis(1800));
    assert_eq!(file.read(&mut [0; 1024], 0), Ok(1024));
    assert_eq!(clock.paused(), Duration::from_millis(1800 + 800));
}

#[test]
fn only_bytes_that_are_there_are_charged() {
    let (clock, _, file) = throttled(Some("1k"), None);
    file.write(&[1; 10], 0, WriteOrigin::Caller).unwrap();
    assert_eq!(file.read(&mut [0; 65536], 0), Ok(10));
    assert_eq!(clock.paused(), Duration::ZERO, "within the credit");
}

#[test]
fn the_rate_holds_over_time() {
    let (clock, _, file) = throttled(None, Some("1M"));
    let start = clock.now();
    for _ in 0..100 {
        file.write(&[1; 102_400], 0, WriteOrigin::Caller).unwrap();
    }
    let seconds = (clock.now() - start).as_secs_f64();
    assert!((seconds - (10_240_000.0 / 1_048_576.0 - 0.2)).abs() < 1e-6, "{seconds}");
}

#[test]
fn a_user_who_gives_up_has_written_nothing() {
    let clock = Arc::new(FakeClock::default());
    clock.advance(Duration::from_secs(100));
    let rates = Rates { read: None, write: Some(rate("1k")) };
    // The first two waits are interrupted.
    let waits = AtomicUsize::new(0);
    let waiting: Waiting = Arc::new(move |call| {
        if waits.fetch_add(1, SeqCst) < 2 {
            return Err(Errno::EINTR);
        }
        call();
        Ok(())
    });
    let paused = Arc::clone(&clock);
    let layer = Filtered::new(Arc::new(Throttle::new(rates, clock, waiting)), Arc::new(Mem::new()));
    let root = layer.root().unwrap().node;
    let (made, file) =
        layer.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o644, OpenFlags::READ_WRITE).unwrap();
    assert_eq!(file.write(&[1; 1 << 20], 0, WriteOrigin::Caller), Err(Errno::EINTR));
    assert_eq!(file.write(&[1; 1 << 20], 0, WriteOrigin::Caller), Err(Errno::EINTR));
    assert_eq!(layer.getattr(&Caller::ROOT, &made.node, None).unwrap().size, 0);
    // Nor is it charged.
    assert_eq!(file.write(&[1; 1 << 10], 0, WriteOrigin::Caller), Ok(1 << 10));
    assert_eq!(paused.paused(), Duration::from_millis(800));
}

#[test]
fn rates_can_be_replaced_and_lifted() {
    let (clock, throttle, file) = throttled(None, Some("1k"));
    throttle.replace(Rates::default());
    file.write(&[1; 1 << 20], 0, WriteOrigin::Caller).unwrap();
    assert_eq!(clock.paused(), Duration::ZERO);
    throttle.replace(Rates { read: None, write: Some(rate("1M")) });
    file.write(&[1; 1 << 20], 0, WriteOrigin::Caller).unwrap();
    assert_eq!(clock.paused(), Duration::from_millis(800));
}

#[test]
fn a_copy_is_charged_in_steps_and_nothing_bypasses() {
    let (clock, _, file) = throttled(Some("1M"), Some("1M"));
    assert!(file.backing().is_none());
    assert_eq!(file.copy_to(0, &*file, 1 << 30, u64::MAX >> 2, 0), Ok(0), "there is nothing to copy");
    assert!(clock.paused() <= Duration::from_secs(3), "a step of 1 MiB, not everything");
}

proptest! {
    #[test]
    fn never_more_than_the_rate_and_the_credit(charges in prop::collection::vec((0u64..100_000, 0u64..500), 1..60)) {
        let (bucket, rate) = (Bucket::default(), rate("64k"));
        let (mut now, mut total, mut done) = (Duration::from_secs(1000), 0, Duration::ZERO);
        let start = now;
        for (bytes, idle) in charges {
            now += Duration::from_millis(idle);
            total += bytes;
            done = now + bucket.charge(rate, bytes, now);
        }
        let allowed = ((done - start).as_secs_f64() + 0.2) * rate.per_second();
        prop_assert!(total as f64 <= allowed + 1.0, "{} of {}", total, allowed);
    }
}
