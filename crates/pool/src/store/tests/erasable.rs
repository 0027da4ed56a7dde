//! Erasable keys on devices: each device has them, also one that joins, returns or becomes longer; none has a destroyed
//! one.

use super::*;
use crate::backend::NewGroup;
use crate::crypt::SecretKey;
use crate::label::GroupKind;

fn key(byte: u8) -> SecretKey {
    SecretKey::take(&mut [byte; 32])
}

/// Sequence numbers and first bytes of the keys.
fn keys(store: &Store) -> Vec<(u64, u8)> {
    store.erasable_keys().unwrap().iter().map(|(sequence, key)| (*sequence, key.expose()[0])).collect()
}

/// Number of places of a device that hold this key.
fn count(sim: &Simulator, byte: u8) -> usize {
    // Keys lie in the labels alone, at both ends.
    let bytes = sim.bytes();
    let ends = [&bytes[..MIB as usize], &bytes[bytes.len() - MIB as usize..]];
    ends.iter().map(|end| end.windows(32).filter(|part| part.iter().all(|found| *found == byte)).count()).sum()
}

fn counts(sims: &[Arc<Simulator>], byte: u8) -> Vec<usize> {
    sims.iter().map(|sim| count(sim, byte)).collect()
}

fn create_plain(sims: &[Arc<Simulator>]) -> Store {
    let store = create(sims);
    store.allow_sealed(1).unwrap();
    store
}

fn create_mirror(sims: &[Arc<Simulator>]) -> Store {
    let groups = [NewGroup { kind: GroupKind::Mirror, devices: sims.len() }];
    let (store, _) = Store::create_groups(devices(sims), &groups, &new_pool()).unwrap();
    store.allow_sealed(1).unwrap();
    store
}

#[test]
fn a_pool_without_encryption_has_no_erasable_keys() {
    let sims = simulators(2, 64 * MIB);
    let store = create(&sims);
    commit(&store, 1).unwrap();
    assert!(keys(&store).is_empty());
    assert!(matches!(store.add_erasable(&key(0xaa)), Err(PoolError::Refused(_))));
    assert!(store.keep_erasable(1).is_err());
    store.rename("lake", 2).unwrap();
    store.scrub(&mut |_| true).unwrap();
    for sim in &sims {
        assert!(!sim.bytes().windows(8).any(|part| part == b"nacreERA"));
    }
}

#[test]
fn keys_are_on_each_device_and_a_destroyed_one_is_on_none() {
    for create in [create_plain, create_mirror] {
        let sims = simulators(2, 64 * MIB);
        let store = create(&sims);
        assert!(keys(&store).is_empty());
        store.add_erasable(&key(0xaa)).unwrap();
        assert_eq!((keys(&store), counts(&sims, 0xaa)), (vec![(1, 0xaa)], vec![4, 4]));
        assert_eq!(store.add_erasable(&key(0xbb)).unwrap(), 2);
        assert!(matches!(store.add_erasable(&key(0xcc)), Err(PoolError::Refused(_))), "a renewal is not finished");
        assert!(store.keep_erasable(3).is_err());
        commit(&store, 1).unwrap();
        drop(store);
        let (store, _) = open(&sims, Access::ReadOnly).unwrap();
        assert_eq!(keys(&store), [(1, 0xaa), (2, 0xbb)]);
        assert!(store.keep_erasable(2).is_err(), "read only");
        drop(store);
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        assert_eq!(store.keep_erasable(2).unwrap(), Vec::<String>::new());
        assert_eq!((keys(&store), counts(&sims, 0xaa), counts(&sims, 0xbb)), (vec![(2, 0xbb)], vec![0, 0], vec![4, 4]));
        store.close(true, 4).unwrap();
        drop(store);
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        assert_eq!(keys(&store), [(2, 0xbb)]);
    }
}

/// At each write and sync of a renewal the power fails: the key that counts is there, and the renewal is finished by the
/// next process.
#[test]
fn a_renewal_survives_a_crash_at_each_write() {
    for create in [create_plain, create_mirror] {
        for operations in 0.. {
            let sims = simulators(2, 64 * MIB);
            let store = create(&sims);
            store.add_erasable(&key(0xaa)).unwrap();
            commit(&store, 1).unwrap();
            let before = sims[1].operations();
            sims[1].fail_after(operations);
            // A device of a mirror is lost, as it may be.
            let renewed = store.add_erasable(&key(0xbb)).and_then(|_| store.keep_erasable(2));
            let all = sims[1].operations() - before;
            drop(store);
            sims.iter().zip(operations..).for_each(|(sim, seed)| sim.crash(seed));
            let (store, _) = open(&sims, Access::ReadWrite).unwrap();
            let found = keys(&store);
            if renewed.is_ok() {
                assert_eq!(found, [(2, 0xbb)], "{operations}");
            } else {
                assert!(matches!(found[..], [(1, 0xaa)] | [(1, 0xaa), (2, 0xbb)] | [(2, 0xbb)]), "{found:?}");
            }
            if found.len() == 1 && found[0].0 == 1 {
                store.add_erasable(&key(0xbb)).unwrap();
            }
            assert!(store.keep_erasable(2).unwrap().is_empty());
            assert_eq!((keys(&store), counts(&sims, 0xaa)), (vec![(2, 0xbb)], vec![0, 0]), "{operations}");
            if all < operations {
                break;
            }
        }
    }
}

#[test]
fn an_absent_device_is_named_and_wiped_when_it_returns() {
    let sims = simulators(3, 64 * MIB);
    let store = create_mirror(&sims);
    store.add_erasable(&key(0xaa)).unwrap();
    commit(&store, 1).unwrap();
    // Taken offline, and brought back while the pool runs.
    store.offline(1).unwrap();
    store.add_erasable(&key(0xbb)).unwrap();
    assert_eq!(store.keep_erasable(2).unwrap(), ["sim1"]);
    assert_eq!((counts(&sims, 0xaa), counts(&sims, 0xbb)), (vec![0, 4, 0], vec![4, 0, 4]));
    store.online(1, sims[1].clone()).unwrap();
    assert_eq!((counts(&sims, 0xaa), counts(&sims, 0xbb)), (vec![0; 3], vec![4; 3]));
    commit(&store, 2).unwrap();
    store.close(true, 4).unwrap();
    drop(store);
    // Missing at an import, and there at the next one.
    let (store, _) = open(&sims[..2], Access::ReadWrite).unwrap();
    store.add_erasable(&key(0xcc)).unwrap();
    assert_eq!(store.keep_erasable(3).unwrap(), ["sim2"]);
    commit(&store, 3).unwrap();
    commit(&store, 4).unwrap();
    store.close(true, 5).unwrap();
    drop(store);
    assert_eq!((counts(&sims, 0xbb), counts(&sims, 0xcc)), (vec![0, 0, 4], vec![4, 4, 0]));
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!(keys(&store), [(3, 0xcc)], "the newest block counts");
    store.confirm().unwrap();
    assert_eq!((counts(&sims, 0xbb), counts(&sims, 0xcc)), (vec![0; 3], vec![4; 3]));
}

#[test]
fn devices_that_join_get_the_keys_and_those_that_leave_lose_them() {
    let sims = simulators(4, 64 * MIB);
    let store = create_plain(&sims[..1]);
    store.add_erasable(&key(0xaa)).unwrap();
    store.add_device(sims[1].clone(), 9).unwrap();
    assert_eq!(counts(&sims, 0xaa), [4, 4, 0, 0]);
    store.attach(0, sims[2].clone(), 77).unwrap();
    store.add_spare(sims[3].clone(), 78).unwrap();
    assert_eq!(counts(&sims, 0xaa), [4; 4]);
    let spare = store.identity().members.iter().position(|member| member.guid == 78);
    store.remove_spare(spare.unwrap() as u16).unwrap();
    assert_eq!(counts(&sims, 0xaa), [4, 4, 4, 0]);
}

#[test]
fn a_scrub_repairs_damaged_copies() {
    let sims = simulators(2, 64 * MIB);
    let store = create_mirror(&sims);
    store.add_erasable(&key(0xaa)).unwrap();
    commit(&store, 1).unwrap();
    for place in crate::label::places(64 * MIB) {
        sims[0].rot(place + (96 << 10) + 50, 1);
    }
    assert_eq!(counts(&sims, 0xaa), [0, 4]);
    assert_eq!(keys(&open(&sims, Access::ReadOnly).unwrap().0), [(1, 0xaa)], "from the other device");
    assert_eq!(store.backend.scrub_roots(&store.identity()).unwrap(), [4, 0]);
    assert_eq!(counts(&sims, 0xaa), [4, 4]);
    assert_eq!(store.backend.scrub_roots(&store.identity()).unwrap(), [0, 0]);
}

/// Devices of 64 MiB become longer: the labels at the new end have the keys, those at the old end have none.
#[test]
fn a_device_that_becomes_longer_keeps_no_key_at_its_old_end() {
    let sims = simulators(1, 64 * MIB);
    let store = create_plain(&sims);
    store.add_erasable(&key(0xaa)).unwrap();
    commit(&store, 1).unwrap();
    store.close(true, 3).unwrap();
    drop(store);
    let mut bytes = sims[0].bytes();
    bytes.resize(128 << 20, 0);
    let sims = [Arc::new(Simulator::with_bytes("sim0", bytes))];
    let all = |byte: u8| -> usize {
        let bytes = sims[0].bytes();
        let ends = [0, 63, 127].map(|at: usize| &bytes[at << 20..(at + 1) << 20]);
        ends.iter().map(|end| end.windows(32).filter(|part| part.iter().all(|found| *found == byte)).count()).sum()
    };
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    store.confirm().unwrap();
    assert_eq!(all(0xaa), 6, "at the new end as well");
    // Destroyed at the old end too, before the pool uses the new length.
    store.add_erasable(&key(0xbb)).unwrap();
    store.keep_erasable(2).unwrap();
    assert_eq!((all(0xaa), all(0xbb)), (0, 4));
    assert_eq!(store.expand(5).unwrap(), [0]);
    assert_eq!((all(0xaa), all(0xbb), keys(&store)), (0, 4, vec![(2, 0xbb)]));
}
