//! Streams with very many rows of one kind: receiving them takes no quadratic time.
//!
//! Nothing is measured: with work that grows with the square of the number these tests would not end within
//! [`ENDS_WITHIN`], and otherwise they take seconds.

use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::engine::Setting;

/// How long each of them may take.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

/// How many holds and properties a stream brings.
const MANY: usize = 40_000;

fn ends(act: impl FnOnce() + Send + 'static) {
    let (sender, done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        act();
        sender.send(()).unwrap();
    });
    match done.recv_timeout(ENDS_WITHIN) {
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the work grows with the square of the number"),
    }
}

/// Receives an empty file system with these holds and properties.
fn received(to: &Side, bringing: ReceiveInto) -> (u64, Txg, Vec<String>) {
    let from = Side::new();
    let home = from.pool.create_dataset(&NewDataset::named(from.top, "home")).unwrap();
    let txg = from.snapshot(home, "a");
    let full = ToSend { to: Later::Snapshot((home, txg)), from: None, after: Vec::new(), stored: false };
    let mut receiving = to.pool.receive(bringing, &head(&from, home, txg, None)).unwrap();
    sent(&from, &full).iter().for_each(|payload| receiving.rows(payload).unwrap());
    let txg = receiving.finish().unwrap();
    let left_out = receiving.left_out().iter().map(|(name, _)| name.clone()).collect();
    (receiving.target(), txg, left_out)
}

#[test]
fn very_many_holds_are_received() {
    ends(|| {
        let to = Side::new();
        let holds: Vec<String> = (0..MANY).map(|number| format!("tag-{number}")).collect();
        // One of them twice.
        let twice = ReceiveInto { holds: [&holds[..], &holds[..1]].concat(), ..into(&to, "a") };
        let (id, txg, _) = received(&to, twice);
        assert_eq!(to.row(id, txg).holds, MANY as u64);
        // They move with the snapshot to a clone that is promoted.
        let clone = NewDataset::named(to.top, "clone");
        let clone = to.pool.clone_snapshot(id, "a", &clone).unwrap();
        to.pool.promote(clone).unwrap();
        let row = to.row(clone, txg);
        assert_eq!((row.holds, row.clones), (MANY as u64, 1));
        to.pool.hold(clone, "a", "tag-0", false).unwrap();
        assert!(to.pool.hold(clone, "a", "tag-0", false).is_err());
        assert_eq!(to.row(clone, txg).holds, MANY as u64 - 1);
        check(&to.pool, &to.storage);
    });
}

#[test]
fn very_many_properties_are_received() {
    ends(|| {
        let to = Side::new();
        let set = |value: &str| Setting::Received(value.to_owned());
        let mut properties: Vec<(String, Setting)> =
            (0..MANY).map(|number| (format!("a:{number}"), set("1"))).collect();
        // With a limit that does not fit, and often the same one.
        properties.extend((0..MANY).map(|_| ("quota".to_owned(), set("1"))));
        let (id, _, left_out) = received(&to, ReceiveInto { properties, ..into(&to, "a") });
        assert_eq!(left_out, ["quota"]);
        let rows = to.pool.admin.lock().catalog.properties(id).unwrap();
        assert_eq!(rows.iter().filter(|(name, _)| name.starts_with("a:")).count(), MANY);
        assert!(rows.iter().all(|(name, _)| name != "quota"));
    });
}
