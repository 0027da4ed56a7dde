//! Power failing at every single write and sync of a piece of work.

use std::collections::BTreeMap;

use super::*;

/// The work: returns the frames of each txg, as far as it came, and the last txg that was reported as durable.
fn work(store: &Store, states: &mut BTreeMap<u64, Vec<(Pointer, u64)>>, durable: &mut u64) -> Result<()> {
    let mut frames: Vec<(Pointer, u64)> = Vec::new();
    for txg in 1..=6u64 {
        for at in 0..6 {
            let number = txg * 100 + at;
            frames.push((put(store, txg, number, 30_000)?, number));
        }
        for (pointer, _) in frames.drain(..frames.len() / 3) {
            store.free(&pointer, Txg(txg));
        }
        states.insert(txg, frames.clone());
        // Another thread writes for the next txg already.
        let uncommitted = put(store, txg + 1, 77, 10_000)?;
        if txg == 4 {
            store.commit_moves()?;
        }
        commit(store, txg)?;
        *durable = txg;
        store.free(&uncommitted, Txg(txg + 1));
        if txg == 3 {
            let sealed: Vec<u32> =
                store.segments().iter().filter(|segment| segment.live_frames > 0).map(|segment| segment.id).collect();
            for id in sealed {
                store.move_out_for_tests(id, MIB, &mut Cleaned::default())?;
            }
        }
    }
    store.close(true, 9)
}

#[test]
fn every_point_of_failure_leaves_a_whole_state() {
    let count = {
        let sims = simulators(1, 64 * MIB);
        let store = create(&sims);
        let before = sims[0].operations();
        work(&store, &mut BTreeMap::new(), &mut 0).unwrap();
        sims[0].operations() - before
    };
    assert!(count > 60, "{count} operations");
    for allowed in 0..count {
        for seed in [1, allowed + 2] {
            let sims = simulators(1, 64 * MIB);
            let store = create(&sims);
            sims[0].fail_after(allowed);
            let (mut states, mut durable) = (BTreeMap::from([(0, Vec::new())]), 0);
            let error = work(&store, &mut states, &mut durable).unwrap_err();
            assert!(matches!(error, PoolError::Suspended { .. }), "{error}");
            drop(store);
            sims[0].crash(seed);
            let (store, root) = open(&sims, Access::ReadWrite).unwrap();
            assert!(root.txg.0 >= durable);
            let frames = &states[&root.txg.0];
            for (pointer, number) in frames {
                assert_eq!(*store.read(pointer).unwrap(), *content(*number, 30_000), "after {allowed} operations");
            }
            assert_eq!(used(&store), frames.iter().map(|(pointer, _)| pointer.charged()).sum::<u64>());
            // And the work continues.
            let pointer = put(&store, root.txg.0 + 1, 5, 1000).unwrap();
            commit(&store, root.txg.0 + 1).unwrap();
            drop(store);
            sims[0].crash(1);
            let (store, _) = open(&sims, Access::ReadOnly).unwrap();
            assert_eq!(*store.read(&pointer).unwrap(), *content(5, 1000));
        }
    }
}
