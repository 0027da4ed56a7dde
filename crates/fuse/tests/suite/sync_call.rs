//! sync(2) interception, with a real kernel.

use nacre_fuse::{Duty, SyncCalls};
use nacre_testkit::eventually;
use std::{
    io::ErrorKind,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
};

/// None where sync(2) cannot be intercepted here.
fn hear(make_durable: impl Fn() + Send + Sync + 'static, stuck: bool) -> Option<SyncCalls> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
        println!("skipped: needs root and loop devices");
        return None;
    }
    match SyncCalls::hear(Duty {
        make_durable: Box::new(make_durable),
        stuck: Box::new(move || stuck),
        opened: Box::new(|_, _| ()),
    }) {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            println!("skipped: {error}");
            None
        }
        heard => Some(heard.unwrap()),
    }
}

/// Loop devices of this process.
fn devices() -> usize {
    let name = format!("nacre-sync-{} ", std::process::id());
    let entries = std::fs::read_dir("/sys/block").unwrap();
    let backing = entries
        .map(|entry| std::fs::read_to_string(entry.unwrap().path().join("loop/backing_file")).unwrap_or_default());
    backing.filter(|backing| backing.contains(&name)).count()
}

// One test: each interception gets the calls of the others.
#[test]
fn whoever_calls_it_waits_for_what_is_done_for_him_and_no_longer() {
    // Work done before the call is seen by a run that began after it.
    let (done, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let make_durable = {
        let (done, seen) = (Arc::clone(&done), Arc::clone(&seen));
        move || {
            let at_first = done.load(SeqCst);
            std::thread::yield_now();
            seen.store(at_first, SeqCst);
        }
    };
    let Some(calls) = hear(make_durable, false) else { return };
    assert_eq!(devices(), 1);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let mine = done.fetch_add(1, SeqCst) + 1;
                    rustix::fs::sync();
                    assert!(seen.load(SeqCst) >= mine);
                }
            });
        }
    });
    drop(calls);
    eventually("the device is let go", || devices() == 0);

    // A run that cannot finish blocks neither the caller nor the end of the interception.
    let (held, begun) = (Arc::new(Mutex::new(())), Arc::new(AtomicBool::new(false)));
    let holding = held.lock().unwrap();
    let make_durable = {
        let (held, begun) = (Arc::clone(&held), Arc::clone(&begun));
        move || {
            begun.store(true, SeqCst);
            drop(held.lock());
        }
    };
    let calls = hear(make_durable, true).unwrap();
    rustix::fs::sync();
    assert!(begun.load(SeqCst));
    drop(calls);
    drop(holding);
    eventually("the device is let go", || devices() == 0);

    // A caller that waits at the end of the interception is released.
    let (wait, end) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel();
    let end = Mutex::new(end);
    let make_durable = move || {
        begin.send(()).unwrap();
        // Until the other end is dropped.
        assert!(end.lock().unwrap().recv().is_err());
    };
    let calls = hear(make_durable, false).unwrap();
    let caller = std::thread::spawn(rustix::fs::sync);
    begun.recv().unwrap();
    drop(calls);
    caller.join().unwrap();
    drop(wait);
    eventually("the device is let go", || devices() == 0);
}
