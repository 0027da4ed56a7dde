//! Blocks of erasable keys: their form, damaged copies, crashes between their writes.

use proptest::prelude::*;

use super::*;
use crate::device::Simulator;

fn key(byte: u8) -> SecretKey {
    SecretKey::take(&mut [byte; 32])
}

fn block(revision: u64, keys: &[(u64, u8)]) -> ErasableBlock {
    ErasableBlock { revision, keys: keys.iter().map(|(sequence, byte)| (*sequence, key(*byte))).collect() }
}

/// The revision, and each key's sequence number and first byte.
fn seen(block: Option<ErasableBlock>) -> Option<(u64, Vec<(u64, u8)>)> {
    let ErasableBlock { revision, keys } = block?;
    Some((revision, keys.iter().map(|(sequence, key)| (*sequence, key.expose()[0])).collect()))
}

#[test]
fn blocks_come_back_and_impossible_ones_are_refused() {
    for keys in [vec![(1, 7)], vec![(1, 7), (2, 8)], vec![(5, 7), (u64::MAX, 8)]] {
        let bytes = block(3, &keys).encode().unwrap();
        assert_eq!(bytes.len(), LENGTH);
        assert_eq!(seen(ErasableBlock::decode(&bytes).unwrap()), Some((3, keys)));
    }
    for keys in [vec![], vec![(0, 7)], vec![(2, 7), (1, 8)], vec![(2, 7), (2, 8)], vec![(1, 7), (2, 8), (3, 9)]] {
        assert!(block(3, &keys).encode().is_err(), "{keys:?}");
    }
    assert!(ErasableBlock::decode(&[0; LENGTH]).unwrap().is_none());
    let right = block(3, &[(1, 7), (2, 8)]).encode().unwrap();
    for bit in 0..LENGTH * 8 {
        let mut changed = right.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(!matches!(ErasableBlock::decode(&changed), Ok(Some(_))), "bit {bit}");
    }
    // With a right checksum, which anybody can compute: a number of keys that is not there, bytes behind them.
    for (at, byte) in [(32, 0), (32, 1), (32, 3), (32, 255), (200, 1), (LENGTH - 1, 1), (73, 1)] {
        let mut changed = right.to_vec();
        changed[at] = byte;
        let hash = checksum::structure(&changed[HEAD..]);
        changed[8..HEAD].copy_from_slice(&hash);
        assert!(ErasableBlock::decode(&changed).is_err(), "byte {at}: {byte}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_block_or_not(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), is_hashed: bool) {
        if is_hashed && bytes.len() > HEAD {
            bytes[..8].copy_from_slice(&MAGIC);
            let at = 32.min(bytes.len() - 1);
            bytes[at] %= 4;
            let hash = checksum::structure(&bytes[HEAD..]);
            bytes[8..HEAD].copy_from_slice(&hash);
        }
        if let Ok(Some(block)) = ErasableBlock::decode(&bytes) {
            let again = block.encode().unwrap();
            prop_assert_eq!(&again[HEAD..bytes.len()], &bytes[HEAD..]);
        }
    }
}

/// The block is in the format as this vector: key 0, 1, 2, ... of sequence 9.
#[test]
fn a_block_stays_as_it_is_in_the_format() {
    let bytes: Vec<u8> = (0..32).collect();
    let keys = vec![(9, SecretKey::from_slice(&bytes).unwrap())];
    let bytes = ErasableBlock { revision: 5, keys }.encode().unwrap();
    assert_eq!(&bytes[..8], b"nacreERA");
    assert_eq!(bytes[24..33], [5, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(bytes[33..41], [9, 0, 0, 0, 0, 0, 0, 0]);
    assert!(bytes[41..73].iter().copied().eq(0..32) && bytes[73..].iter().all(|byte| *byte == 0));
    assert_eq!(bytes[8..24], checksum::structure(&bytes[24..]));
}

/// After a crash in any place the old block or the new one is read; after the last sync no copy has the old key.
#[test]
fn a_crash_during_a_write_leaves_the_old_block_or_the_new_one() {
    let length = 8 << 20;
    let old = block(1, &[(1, 0xaa)]);
    let new = block(2, &[(2, 0xbb)]);
    let whole = {
        let device = Simulator::new("whole", length);
        write_erasable(&device, &old).unwrap();
        let before = device.operations();
        write_erasable(&device, &new).unwrap();
        let has = |byte: u8| device.bytes().windows(32).any(|part| part.iter().all(|found| *found == byte));
        assert!(has(0xbb) && !has(0xaa), "overwritten in all four labels");
        device.operations() - before
    };
    assert_eq!(whole, 6, "four writes and two syncs");
    for operations in 0..=whole {
        for seed in 0..12 {
            let device = Simulator::new("cut", length);
            write_erasable(&device, &old).unwrap();
            device.fail_after(operations);
            let written = write_erasable(&device, &new);
            assert_eq!(written.is_ok(), operations == whole);
            device.crash(seed);
            let found = seen(read_erasable(&device).unwrap()).unwrap();
            assert!(found == (1, vec![(1, 0xaa)]) || found == (2, vec![(2, 0xbb)]), "{operations} {seed}: {found:?}");
            if operations == whole {
                assert_eq!(found.0, 2);
            }
        }
    }
}

#[test]
fn damaged_copies_are_found_and_rewritten() {
    let length = 8 << 20;
    let device = Simulator::new("sim", length);
    let right = block(1, &[(1, 0xaa)]);
    assert!(read_erasable(&device).unwrap().is_none());
    write_erasable(&device, &right).unwrap();
    assert_eq!(mend_erasable(&device, &right).unwrap(), 0);
    let places = places(length);
    places.iter().skip(1).for_each(|place| device.rot(place + ERASABLE_AT + 50, 2));
    assert_eq!(seen(read_erasable(&device).unwrap()), Some((1, vec![(1, 0xaa)])), "one copy is enough");
    assert_eq!(mend_erasable(&device, &right).unwrap(), 3);
    assert_eq!(mend_erasable(&device, &right).unwrap(), 0);
    // An older block in one of them counts as damage as well.
    let old = block(0, &[(1, 0x11)]).encode().unwrap();
    device.overwrite(places[2] + ERASABLE_AT, &old);
    assert_eq!(mend_erasable(&device, &right).unwrap(), 1);
    device.fail_reads(true);
    assert!(read_erasable(&device).is_err());
}

#[test]
fn the_block_at_a_former_end_is_zeroed() {
    let (former, length) = (6 << 20, 9 << 20);
    let device = Simulator::new("sim", length);
    let right = block(1, &[(1, 0xaa)]).encode().unwrap();
    for place in places(former).into_iter().chain(places(length)) {
        device.overwrite(place + ERASABLE_AT, &right);
    }
    let copies = || device.bytes().windows(32).filter(|part| part.iter().all(|found| *found == 0xaa)).count();
    assert_eq!(copies(), 6);
    clear_former_end(&device, former).unwrap();
    assert_eq!(copies(), 4);
    clear_former_end(&device, length).unwrap();
    clear_former_end(&device, length + 10).unwrap();
    clear_former_end(&device, 64 << 20).unwrap();
    assert_eq!(copies(), 4, "the labels of the present length stay");
}
