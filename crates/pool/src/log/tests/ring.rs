//! The ring: laps, crashes at any moment, damage, room.

use super::*;
use crate::codec::Writer;

const POOL: u64 = 77;

fn open(memory: &Memory, start: Start, committed: u64) -> (Ring<Memory>, Replayed, Vec<u64>) {
    let mut seen = Vec::new();
    let (ring, replayed) = Ring::replay(memory.clone(), POOL, start, Txg(committed), &mut |record| {
        match record.changes[..] {
            [LogChange::Write { inode, .. }] => seen.push(inode),
            _ => panic!("{record:?}"),
        }
        Ok(())
    })
    .unwrap();
    (ring, replayed, seen)
}

#[derive(Clone, Debug)]
enum Step {
    /// A block with this many records of this length in bytes.
    Append { records: u8, bytes: u16 },
    /// The txg is committed.
    Commit,
    /// A crash after this many bytes of a block were written.
    Crash { bytes: u16, keep: Vec<bool> },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1u8..5, 0u16..9000).prop_map(|(records, bytes)| Step::Append { records, bytes }),
        2 => Just(Step::Commit),
        2 => (0u16..20000, proptest::collection::vec(any::<bool>(), 1..9)).prop_map(|(bytes, keep)| Step::Crash { bytes, keep }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn what_was_synced_is_replayed(steps in proptest::collection::vec(step(), 1..60)) {
        let memory = Memory::new(64 * 1024);
        let mut root = Start::default();
        let mut committed = 0;
        let mut ring = Ring::new(memory.clone(), POOL, root).unwrap();
        // Operations that were promised durable and are not committed.
        let mut promised: Vec<u64> = Vec::new();
        let mut number = 0;
        for step in steps {
            match step {
                Step::Append { records, bytes } => {
                    let mut payload = Vec::new();
                    let numbers: Vec<u64> = (0..u64::from(records)).map(|n| number + n).collect();
                    for number in &numbers {
                        payload.extend(operation(*number, committed + 1, &vec![7; bytes.into()]));
                    }
                    number += u64::from(records);
                    let room = ring.used() + block_length(payload.len()) <= memory.length();
                    prop_assert_eq!(ring.append(Txg(committed + 1), &payload).unwrap(), room);
                    if room {
                        promised.extend(numbers);
                    }
                }
                Step::Commit => {
                    committed += 1;
                    root = ring.start_after(Txg(committed));
                    ring.forget(Txg(committed), root);
                    prop_assert_eq!(ring.used(), 0);
                    promised.clear();
                }
                Step::Crash { bytes, keep } => {
                    let whole = crash_within_append(&mut ring, &memory, operation(number, committed + 1, &vec![9; bytes.into()]), committed + 1, &keep);
                    let (again, replayed, seen) = open(&memory, root, committed);
                    // The block was never promised: it may be there, and has to be if all of it
                    // arrived.
                    if whole || seen.last() == Some(&number) {
                        promised.push(number);
                    }
                    prop_assert_eq!(replayed.lost, None);
                    prop_assert_eq!(replayed.records as usize, seen.len());
                    prop_assert_eq!(&seen, &promised);
                    number += 1;
                    ring = again;
                }
            }
        }
        let (_, replayed, seen) = open(&memory, root, committed);
        prop_assert_eq!(&seen, &promised);
        prop_assert_eq!(replayed.lost, None);
    }

    #[test]
    fn any_area_is_replayed_without_harm(length in 1u64..8, bytes in proptest::collection::vec(any::<u8>(), 0..200), position in 0u64..9) {
        let memory = Memory::new(length * 4096);
        {
            let ring = &mut Ring::new(memory.clone(), POOL, Start::default()).unwrap();
            ring.append(Txg(1), &operation(1, 1, b"x")).unwrap();
        }
        for (place, byte) in bytes.iter().enumerate() {
            memory.0.lock().durable[place] ^= *byte;
        }
        let start = Start { position: position * 4096, sequence: 0, chain: 0 };
        let replayed = Ring::replay(memory, POOL, start, Txg(0), &mut |_| Ok(()));
        prop_assert!(replayed.is_ok());
    }
}

fn block_length(payload: usize) -> u64 {
    (48 + payload as u64).next_multiple_of(4096)
}

/// Writes a block whose sync does not happen and of which only some sectors arrive. Whether all
/// did.
fn crash_within_append(ring: &mut Ring<Memory>, memory: &Memory, payload: Vec<u8>, txg: u64, keep: &[bool]) -> bool {
    // Otherwise it is the wiping of an earlier torn block that is cut short.
    let wiped = keep.len().is_multiple_of(2);
    if wiped {
        ring.wipe_torn().unwrap();
    }
    memory.fail();
    let written = ring.append(Txg(txg), &payload);
    memory.0.lock().fail_sync = false;
    let mut kept = keep.iter().cycle();
    let mut all = true;
    memory.crash(|| {
        let keep = *kept.next().unwrap();
        all &= keep;
        keep
    });
    wiped && written.is_err() && all
}

#[test]
fn a_start_survives() {
    let start = Start { position: 3 * 4096, sequence: 9, chain: u64::MAX };
    let mut to = Writer::default();
    start.encode(&mut to);
    let bytes = to.finish();
    assert_eq!(bytes.len(), Start::LENGTH);
    assert_eq!(Start::decode(&mut Reader::new(&bytes)).unwrap(), start);
    let mut to = Writer::default();
    Start { position: 1, ..start }.encode(&mut to);
    assert!(Start::decode(&mut Reader::new(&to.finish())).is_err());
}

#[test]
fn many_laps_lead_to_the_same_place() {
    let memory = Memory::new(16 * 4096);
    let mut ring = Ring::new(memory.clone(), POOL, Start::default()).unwrap();
    for txg in 1..200 {
        assert!(ring.append(Txg(txg), &operation(txg, txg, &[1; 9000])).unwrap());
        assert!(ring.append(Txg(txg), &operation(txg + 1000, txg, &[2; 100])).unwrap());
        let (_, replayed, seen) = open(&memory, ring.start_after(Txg(txg - 1)), txg - 1);
        assert_eq!((replayed.blocks, seen), (2, vec![txg, txg + 1000]));
        ring.forget(Txg(txg), ring.start_after(Txg(txg)));
    }
    assert_eq!(ring.start_after(Txg(199)).position, 199 * 4 * 4096);
}

#[test]
fn a_full_ring_refuses_and_a_commit_makes_room() {
    let memory = Memory::new(4 * 4096);
    let mut ring = Ring::new(memory, POOL, Start::default()).unwrap();
    for txg in 1..=4 {
        assert!(ring.append(Txg(txg), &operation(1, txg, b"x")).unwrap());
    }
    assert!(!ring.append(Txg(5), &operation(1, 5, b"x")).unwrap());
    ring.forget(Txg(2), ring.start_after(Txg(2)));
    assert_eq!(ring.used(), 2 * 4096);
    assert!(!ring.append(Txg(5), &operation(1, 5, &[0; 8192])).unwrap());
    assert!(ring.append(Txg(5), &operation(1, 5, &[0; 4096])).unwrap());
    assert_eq!(ring.used(), 4 * 4096);
}

#[test]
fn records_of_a_committed_txg_are_passed_over() {
    let memory = Memory::new(8 * 4096);
    let mut ring = Ring::new(memory.clone(), POOL, Start::default()).unwrap();
    let both = [operation(1, 1, b"x"), operation(2, 2, b"x")].concat();
    ring.append(Txg(2), &both).unwrap();
    assert_eq!(ring.start_after(Txg(1)), Start::default());
    assert_eq!(open(&memory, ring.start_after(Txg(1)), 1).2, vec![2]);
    ring.forget(Txg(1), ring.start_after(Txg(1)));
    assert_eq!(ring.used(), 4096);
}

#[test]
fn damage_before_a_whole_block_is_told() {
    let memory = Memory::new(8 * 4096);
    let mut ring = Ring::new(memory.clone(), POOL, Start::default()).unwrap();
    for number in 0..3 {
        ring.append(Txg(1), &operation(number, 1, b"x")).unwrap();
    }
    memory.flip(4096 + 50);
    let (_, replayed, seen) = open(&memory, Start::default(), 0);
    assert_eq!((seen, replayed.lost), (vec![0], Some(1)));
    memory.flip(4096 + 50);
    memory.flip(2 * 4096 + 50);
    let (_, replayed, seen) = open(&memory, Start::default(), 0);
    assert_eq!((seen, replayed.lost), (vec![0, 1], None));
}

#[test]
fn another_pools_log_is_not_ours() {
    let memory = Memory::new(8 * 4096);
    Ring::new(memory.clone(), POOL + 1, Start::default()).unwrap().append(Txg(1), &operation(1, 1, b"x")).unwrap();
    let (_, replayed, seen) = open(&memory, Start::default(), 0);
    assert_eq!((replayed, seen), (Replayed::default(), vec![]));
    assert!(Ring::new(Memory::new(4096 + 512), POOL, Start::default()).is_err());
    assert!(Ring::new(Memory::new(0), POOL, Start::default()).is_err());
}

#[test]
fn what_was_replayed_is_needed_until_the_commit_that_has_it() {
    let memory = Memory::new(64 * 1024);
    let mut ring = Ring::new(memory.clone(), POOL, Start::default()).unwrap();
    for txg in [5, 6] {
        assert!(ring.append(Txg(txg), &operation(txg, txg, b"")).unwrap());
    }
    let (mut ring, replayed, _) = open(&memory, Start::default(), 4);
    assert_eq!(replayed.blocks, 2);
    ring.settle(Txg(5));
    assert_eq!(ring.start_after(Txg(4)), Start::default());
    let behind = ring.start_after(Txg(5));
    assert!(ring.append(Txg(6), &operation(7, 6, b"")).unwrap());
    assert_eq!(open(&memory, behind, 5).2, vec![7], "and not what the commit has");
    ring.forget(Txg(5), behind);
    assert_eq!(ring.used(), 4096);
}
