//! Pools that are imported without some of their devices.

use std::sync::Arc;

use nacre_pool::Frames;
use nacre_pool::device::Simulator;
use nacre_pool::label::GroupKind;
use nacre_pool::store::Access;

use crate::groups::{Model, content, open};

/// Any devices up to the parity may be missing; one more is refused by name, and nothing is written.
#[test]
fn whatever_may_be_missing_may_be_missing() {
    for (groups, parity) in [
        (vec![(GroupKind::Mirror, 3)], 2u32),
        (vec![(GroupKind::RaidZ(1), 4)], 1),
        (vec![(GroupKind::RaidZ(2), 5)], 2),
        (vec![(GroupKind::RaidZ(3), 5)], 3),
    ] {
        let mut model = Model::new(&groups, &[64], 5);
        for _ in 0..60 {
            model.write().unwrap();
        }
        model.commit().unwrap();
        model.store.take().unwrap().close(true, 1).unwrap();
        let count = model.devices.len();
        for missing in 0u32..1 << count {
            if missing.count_ones() > parity + 1 {
                continue;
            }
            let given: Vec<&Arc<Simulator>> =
                (0..count).filter(|at| missing >> at & 1 == 0).map(|at| model.sim(at)).collect();
            if given.is_empty() {
                continue;
            }
            let written: Vec<u64> = given.iter().map(|device| device.operations()).collect();
            let opened = open(&given, Access::ReadOnly);
            if missing.count_ones() <= parity {
                let store = opened.unwrap();
                for (number, pointer) in &model.now {
                    assert!(*store.read(pointer).unwrap() == *content(*number));
                }
            } else {
                let refused = opened.map(drop).unwrap_err().to_string();
                let first = missing.trailing_zeros();
                assert!(refused.contains(&format!("device {first} is missing; it was at sim{first}")), "{refused}");
                let writing = open(&given, Access::ReadWrite).map(drop).unwrap_err().to_string();
                assert_eq!(writing, refused);
            }
            assert_eq!(written, given.iter().map(|device| device.operations()).collect::<Vec<_>>());
        }
    }
}

/// Each half of a mirror was written to without the other: neither is filled from the other one, until one of
/// them is given alone.
#[test]
fn halves_that_were_used_apart_are_not_put_together() {
    let mut model = Model::new(&[(GroupKind::Mirror, 2)], &[64], 6);
    model.write().unwrap();
    model.commit().unwrap();
    model.store.take().unwrap().close(true, 1).unwrap();
    let halves: Vec<Arc<Simulator>> = (0..2).map(|at| Arc::clone(model.sim(at))).collect();
    let alone = |half: &Arc<Simulator>, time| open(&[half], Access::ReadWrite).unwrap().close(true, time).unwrap();
    // One of them was used alone: the other one is filled.
    alone(&halves[0], 2);
    let store = open(&[&halves[0], &halves[1]], Access::ReadWrite).unwrap();
    assert_eq!(store.on_devices().unwrap().health().iter().filter(|health| health.stale).count(), 1);
    crate::groups::resilver(&store, 100).unwrap();
    store.close(true, 3).unwrap();
    for half in &halves {
        alone(half, 4);
    }
    let both = [&halves[0], &halves[1]];
    let written: Vec<u64> = halves.iter().map(|half| half.operations()).collect();
    for access in [Access::ReadWrite, Access::ReadOnly] {
        let refused = open(&both, access).map(drop).unwrap_err().to_string();
        assert!(refused.contains("'sim0' and 'sim1' were each used without the other"), "{refused}");
    }
    assert_eq!(written, halves.iter().map(|half| half.operations()).collect::<Vec<_>>());
    let store = open(&[&halves[1]], Access::ReadWrite).unwrap();
    let refused = store.online(0, Arc::clone(&halves[0]) as _).unwrap_err().to_string();
    assert!(refused.contains("it was used without the pool"), "{refused}");
    store.close(true, 5).unwrap();
    assert!(open(&both, Access::ReadWrite).is_err(), "the other one still has its own");
}

/// Two of three that were away in turn: the third was there each time.
#[test]
fn devices_that_were_away_in_turn_are_put_together() {
    let mut model = Model::new(&[(GroupKind::Mirror, 3)], &[64], 6);
    model.write().unwrap();
    model.commit().unwrap();
    model.store.take().unwrap().close(true, 1).unwrap();
    let all: Vec<Arc<Simulator>> = (0..3).map(|at| Arc::clone(model.sim(at))).collect();
    open(&[&all[0], &all[2]], Access::ReadWrite).unwrap().close(true, 2).unwrap();
    let store = open(&[&all[1], &all[2]], Access::ReadWrite).unwrap();
    crate::groups::resilver(&store, 100).unwrap();
    store.close(true, 3).unwrap();
    let store = open(&[&all[0], &all[1], &all[2]], Access::ReadWrite).unwrap();
    crate::groups::resilver(&store, 500).unwrap();
    store.close(true, 4).unwrap();
}

/// The last device of a wide mirror has everything, root records among it.
#[test]
fn any_one_of_many_copies_is_enough() {
    let mut model = Model::new(&[(GroupKind::Mirror, 10)], &[64], 7);
    model.write().unwrap();
    model.commit().unwrap();
    drop(model.store.take());
    for number in [0, 8, 9] {
        let store = open(&[model.sim(number)], Access::ReadOnly).unwrap();
        for (number, pointer) in &model.now {
            assert!(*store.read(pointer).unwrap() == *content(*number));
        }
    }
}
