//! Snapshots by a schedule: which are taken, destroyed and kept.

use super::*;

/// A run that keeps one snapshot: the one that it takes.
fn run(names: &[&str], recursive: bool, label: &str) -> ToSchedule {
    ToSchedule {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        recursive,
        label: label.to_owned(),
        keep: vec![(Period::Daily, 1)],
        ..ToSchedule::default()
    }
}

impl World {
    fn schedule(&self, what: ToSchedule) -> Scheduled {
        let FsAnswer::Scheduled(done) = self.ok(FsRequest::Schedule(what)) else { panic!() };
        done
    }

    fn snapshots(&self) -> Vec<String> {
        self.names().into_iter().filter(|name| name.contains('@')).collect()
    }
}

#[test]
fn a_run_takes_one_and_destroys_what_earlier_runs_took() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    let first = world.schedule(run(&["t/a"], true, "auto"));
    assert!(first.destroyed.is_empty() && first.stay.is_empty());
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort();
        names
    };
    assert_eq!(world.snapshots(), sorted(&first.taken));
    assert!(first.taken[0].starts_with("t/a@auto-2") && first.taken[1].starts_with("t/a/b@auto-2"), "{first:?}");
    // The same second again, as after a clock that was set back.
    let second = world.schedule(run(&["t/a"], true, "auto"));
    assert_eq!((second.taken.len(), second.destroyed.len()), (2, 2));
    assert_eq!(second.destroyed, first.taken);
    assert_eq!(world.snapshots(), sorted(&second.taken));
    // Of one alone.
    let third = world.schedule(run(&["t/a"], false, "auto"));
    assert_eq!((third.taken.len(), third.destroyed.len()), (1, 1));
    assert_eq!(world.value(&third.taken[0], "nacre:schedule").0.as_deref(), Some("auto"));
}

#[test]
fn snapshots_of_others_are_no_concern_of_a_run() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@monday", "t@monday"]);
    // A name as a run makes them, without the property.
    world.snapshot(&["t/a@auto-2020-01-01T00:00:00Z"]);
    // The property, set by hand and inherited, without a dated name; and as if received with the file system's.
    world.ok(set("t/a@monday", "nacre:schedule", "auto"));
    world.ok(set("t/a", "nacre:schedule", "auto"));
    let other = world.schedule(run(&["t/a"], false, "other"));
    let renamed = world.schedule(run(&["t/a"], false, "auto"));
    let to = "t/a@kept".to_owned();
    world.ok(FsRequest::Rename(ToRename { from: renamed.taken[0].clone(), to, ..ToRename::default() }));
    for _ in 0..3 {
        let done = world.schedule(run(&["t/a"], false, "auto"));
        assert!(done.stay.is_empty() && done.destroyed.iter().all(|name| name.starts_with("t/a@auto-2")), "{done:?}");
        let mut wanted = vec!["t/a@auto-2020-01-01T00:00:00Z", "t/a@kept", "t/a@monday", "t@monday"];
        wanted.extend([other.taken[0].as_str(), done.taken[0].as_str()]);
        wanted.sort_unstable();
        assert_eq!(world.snapshots(), wanted);
    }
}

#[test]
fn what_is_held_cloned_or_read_stays_and_is_named() {
    let world = World::new();
    world.create("t/a");
    let take = || world.schedule(run(&["t/a"], false, "auto"));
    let (mut kept, mut taken) = (Vec::new(), take().taken.remove(0));
    let hold = |release| ToHold { tag: "keep".to_owned(), snapshots: vec![taken.clone()], recursive: false, release };
    let held = hold(true);
    world.ok(FsRequest::Hold(hold(false)));
    kept.push((taken, "it is held".to_owned()));
    taken = take().taken.remove(0);
    world.ok(clone(&taken, "t/c"));
    kept.push((taken.clone(), "it has clones".to_owned()));
    // One that is mounted and in use, and another one that is not.
    taken = take().taken.remove(0);
    let dataset = world.id("t/a");
    let txg = world.pool.pool.find_snapshot(dataset, taken.split_once('@').unwrap().1).unwrap();
    let what = What { dataset, snapshot: Some(txg.unwrap().0) };
    world.mounts.there.lock().push(Mounted { what, at: PathBuf::from("/s"), options: MountOptions::default() });
    world.mounts.used.lock().insert(what.dataset);
    let done = take();
    assert!(done.destroyed.is_empty(), "{done:?}");
    assert_eq!(done.stay[..2], kept);
    assert!(done.stay.len() == 3 && done.stay[2].0 == taken && done.stay[2].1.contains("busy"), "{done:?}");
    let unused = done.taken[0].clone();
    let done = take();
    assert_eq!((done.destroyed, done.stay.len()), (vec![unused], 3));
    // A released snapshot is destroyed.
    world.mounts.used.lock().clear();
    world.ok(FsRequest::Hold(held.clone()));
    let done = take();
    assert_eq!((done.destroyed.len(), done.stay), (3, vec![kept[1].clone()]));
    assert!(done.destroyed.contains(&held.snapshots[0]) && done.destroyed.contains(&taken), "{:?}", done.destroyed);
}

#[test]
fn a_run_that_cannot_be_changes_nothing() {
    let world = World::new();
    world.create("t/a");
    let first = world.schedule(run(&["t/a"], false, "auto"));
    for (what, words) in [
        (ToSchedule { keep: Vec::new(), ..run(&["t/a"], false, "auto") }, "nothing says what is to be kept"),
        (ToSchedule { keep: vec![(Period::Daily, 0)], ..run(&["t/a"], false, "auto") }, "nothing says what"),
        (run(&["t/a"], false, "a/b"), "cannot take snapshots by a schedule"),
        (run(&["t/none"], false, "auto"), "does not exist"),
        (run(&["t/a@monday"], false, "auto"), "cannot"),
        (run(&["t/a", "t/a"], false, "auto"), "multiple snapshots of same fs"),
    ] {
        assert!(world.refused(FsRequest::Schedule(what)).0.contains(words), "{words}");
        assert_eq!(world.snapshots(), first.taken);
    }
    let dry = world.schedule(ToSchedule { dry: true, ..run(&["t/a"], false, "auto") });
    assert_eq!((dry.taken.len(), &dry.destroyed), (1, &first.taken));
    assert_eq!(world.snapshots(), first.taken);
}
