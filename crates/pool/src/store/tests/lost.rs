//! Root records that cannot be read: power that fails never leaves a generation without a copy, and
//! damage that does is no import's silent step back.

use super::*;
use crate::device::Random;
use crate::label::{self, RING_AT};

/// Devices that were used for something else before.
fn used_ones(count: usize) -> Vec<Arc<Simulator>> {
    let mut random = Random(7);
    let sims = simulators(count, 64 * MIB);
    for sim in &sims {
        for place in label::places(64 * MIB) {
            let noise: Vec<u8> = (0..(label::LENGTH - RING_AT) / 8).flat_map(|_| random.next().to_le_bytes()).collect();
            sim.write_at(&noise, place + RING_AT).unwrap();
        }
        sim.sync().unwrap();
    }
    sims
}

/// Flips a bit in each copy of the record of a generation.
fn rot(sims: &[Arc<Simulator>], generation: u64) {
    for sim in sims {
        for place in label::places(64 * MIB) {
            sim.rot(place + RING_AT + generation % label::RING * 4096 + 100, 3);
        }
    }
}

/// A commit whose root record is long: of many sectors some are kept and some are not.
fn commit_long(store: &Store, txg: u64) -> Result<()> {
    let (upper, log_start) = (content(txg * 2 + 1, 2000), LogStart { position: txg, sequence: 0, chain: 0 });
    store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &upper, log_start, time: 1 })
}

/// Power fails at any write or sync of creations, imports, commits, added devices and growth, again
/// and again, for longer than the ring is. Whatever the devices keep, the next import goes through.
fn cut(devices_at_first: usize, more: usize, seeds: u64) {
    for seed in 0..seeds {
        let mut random = Random(seed);
        let sims = used_ones(devices_at_first + more);
        let mut store = create(&sims[..devices_at_first]);
        let (mut used, mut txg) = (devices_at_first, 0);
        let mut cuts = 0_u32;
        while store.root().generation < 120 || cuts < 60 {
            let allowed = random.below(24 * used as u64);
            sims.iter().for_each(|sim| sim.fail_after(allowed));
            loop {
                txg += 1;
                if commit_long(&store, txg).is_err() {
                    break;
                }
                if used < sims.len() && random.below(20) == 0 {
                    let grown = store.add_device(Arc::clone(&sims[used]) as Arc<dyn Device>, 9);
                    // The device is examined, whether the labels name it by then or not.
                    used += 1;
                    if grown.is_err() {
                        break;
                    }
                }
            }
            drop(store);
            let mut state = random.next();
            loop {
                sims.iter().for_each(|sim| sim.crash(state));
                state = random.next();
                // Power fails in imports too.
                let allowed = random.below(60);
                sims.iter().for_each(|sim| sim.fail_after(allowed));
                let members =
                    sims.iter().filter(|sim| label::probe(&***sim).unwrap().is_some()).cloned().collect::<Vec<_>>();
                match open(&members, Access::ReadWrite) {
                    Ok((opened, _)) => {
                        store = opened;
                        break;
                    }
                    Err(error) => assert!(!matches!(error, PoolError::Lost { .. }), "seed {seed}, cut {cuts}: {error}"),
                }
            }
            txg = store.root().txg.0;
            used = store.identity().members.len();
            cuts += 1;
        }
    }
}

#[test]
fn no_power_cut_looks_like_damage() {
    cut(1, 0, 2);
}

#[test]
fn no_power_cut_of_several_devices_looks_like_damage() {
    cut(2, 2, 1);
}

#[test]
fn power_that_fails_while_a_pool_is_made_is_no_damage() {
    let count = {
        let sims = used_ones(1);
        let before = sims[0].operations();
        let store = create(&sims);
        commit_long(&store, 1).unwrap();
        sims[0].operations() - before
    };
    for allowed in 0..count {
        for seed in 0..8 {
            let sims = used_ones(1);
            sims[0].fail_after(allowed);
            if let Ok((store, _)) = Store::create(devices(&sims), &new_pool()) {
                assert!(commit_long(&store, 1).is_err());
            }
            sims[0].crash(seed);
            if let Err(error) = open(&sims, Access::ReadWrite) {
                assert!(matches!(error, PoolError::Refused(_)), "after {allowed} operations: {error}");
            }
        }
    }
}

#[test]
fn lost_records_are_told_and_given_up_on_demand_alone() {
    for count in [1, 2] {
        let sims = used_ones(count);
        let store = create(&sims);
        let mut frames = Vec::new();
        for txg in 1..=200 {
            frames.push(put(&store, txg, txg, 3000).unwrap());
            commit(&store, txg).unwrap();
        }
        let newest = store.root().generation;
        drop(store);
        (newest - 3..=newest).for_each(|generation| rot(&sims, generation));
        let before: Vec<_> = sims.iter().map(|sim| sim.operations()).collect();
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let error = open(&sims, access).err().unwrap();
            assert!(matches!(error, PoolError::Lost { states: 4, txg: Txg(196) }), "{error}");
        }
        assert_eq!(open(&sims, Access::Salvage).unwrap().1.txg, Txg(196));
        assert_eq!(sims.iter().map(|sim| sim.operations()).collect::<Vec<_>>(), before, "nothing was written");
        let (store, root) = open(&sims, Access::Rewind(Txg(196))).unwrap();
        assert_eq!(root.txg, Txg(196));
        assert!(root.generation > newest, "what cannot be read now never counts again");
        store.confirm().unwrap();
        drop(store);
        // And from then on all is well.
        for seed in 0..4 {
            sims.iter().for_each(|sim| sim.crash(seed));
            let (store, root) = open(&sims, Access::ReadWrite).unwrap();
            for (pointer, number) in frames.iter().zip(1..=196) {
                assert_eq!(*store.read(pointer).unwrap(), *content(number, 3000));
            }
            commit(&store, root.txg.0 + 1).unwrap();
        }
    }
}

#[test]
fn one_copy_of_one_record_is_enough() {
    let sims = used_ones(1);
    let store = create(&sims);
    (1..=5).for_each(|txg| commit(&store, txg).unwrap());
    let newest = store.root().generation;
    drop(store);
    for place in &label::places(64 * MIB)[1..] {
        sims[0].rot(place + RING_AT + newest * 4096 + 9, 1);
    }
    // Records of states that newer ones have followed are no loss.
    rot(&sims, newest - 2);
    assert_eq!(open(&sims, Access::ReadOnly).unwrap().1.txg, Txg(5));
    let (store, root) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!(root.txg, Txg(5));
    store.confirm().unwrap();
    drop(store);
    sims[0].rot(RING_AT + newest * 4096 + 9, 1);
    assert_eq!(open(&sims, Access::ReadOnly).unwrap().1.txg, Txg(5), "the import has written the others anew");
}

#[test]
fn records_of_a_version_that_guarded_nothing_are_taken_as_they_are() {
    let sims = used_ones(1);
    let store = create(&sims);
    (1..=5).for_each(|txg| commit(&store, txg).unwrap());
    let root = store.root();
    drop(store);
    // As that version left it: one round, interrupted by a power failure, at positions with arbitrary content.
    let old = Root { generation: root.generation + 1, guarded: false, ..root };
    for round in [label::Round::First, label::Round::Second] {
        label::write_root(&*sims[0], old.generation, &old.encode().unwrap(), round).unwrap();
    }
    rot(&sims, old.generation + 1);
    sims[0].sync().unwrap();
    for _ in 0..3 {
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        drop(store);
    }
    let (store, root) = open(&sims, Access::ReadWrite).unwrap();
    commit(&store, 9).unwrap();
    drop(store);
    assert!(open(&sims, Access::ReadOnly).unwrap().1.guarded);
    rot(&sims, root.generation + 2);
    assert_eq!(
        open(&sims, Access::ReadOnly).err().unwrap().to_string(),
        PoolError::Lost { states: 1, txg: Txg(9) }.to_string()
    );
}

#[test]
fn two_rounds_take_no_more_barriers_than_one() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    commit(&store, 1).unwrap();
    for txg in 2..20 {
        let before = sims[0].syncs();
        commit(&store, txg).unwrap();
        assert_eq!(
            sims[0].syncs() - before,
            2,
            "the one before the record, and the one that makes its first round durable"
        );
    }
}
