//! A small pool stored in the repository: a pool written by format 1 opens for ever.

use super::*;
use crate::codec::{Reader, Writer};

const FIXTURE: &[u8] = include_bytes!("fixture-v1.zst");

/// The pool in the fixture: frames of all kinds, moved ones, freed ones, a later txg that was not
/// committed; the pointers are in the root.
fn make() -> Vec<u8> {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let mut frames: Vec<(Pointer, u64)> =
        (0..30u64).map(|number| (put(&store, 1, number, 100 + number as usize * 97).unwrap(), number)).collect();
    commit(&store, 1).unwrap();
    frames.drain(..6).for_each(|(pointer, _)| store.free(&pointer, Txg(2)));
    commit(&store, 2).unwrap();
    let segment = frames[0].0.segment;
    store.move_out_for_tests(segment, 8 * MIB, &mut Cleaned::default()).unwrap();
    frames.extend((30..34u64).map(|number| (put(&store, 3, number, 100 + number as usize * 97).unwrap(), number)));
    put(&store, 4, 99, 1000).unwrap();
    let mut upper = Writer::default();
    upper.varint(frames.len() as u64);
    // The engine's own data has 2 KiB: the names of all frames; their content is derived from their number.
    for (pointer, number) in &frames {
        upper.varint(*number);
        pointer.encode(&mut upper);
    }
    let upper = upper.finish();
    let log_start = LogStart { position: 8192, sequence: 3, chain: 4 };
    store.commit(&Commit { txg: Txg(3), catalog: Some(frames[0].0), upper: &upper, log_start, time: 2 }).unwrap();
    store.log_write(0, b"a log").unwrap();
    store.log_sync().unwrap();
    drop(store);
    sims[0].bytes()
}

fn check(image: Vec<u8>) {
    let sims = vec![Arc::new(Simulator::with_bytes("fixture", image))];
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let (store, root) = open(&sims, access).unwrap();
        let identity = store.identity();
        assert_eq!((identity.name.as_str(), identity.pool, identity.members.len()), ("tank", 0x1234_5678_9abc_def0, 1));
        assert_eq!((root.txg, root.log_start), (Txg(3), LogStart { position: 8192, sequence: 3, chain: 4 }));
        let mut from = Reader::new(&root.upper);
        let count = from.varint().unwrap();
        assert_eq!(count, 28);
        let mut charged = 0;
        for _ in 0..count {
            let number = from.varint().unwrap();
            let pointer = Pointer::decode(&mut from).unwrap();
            assert_eq!(*store.read(&pointer).unwrap(), *content(number, 100 + number as usize * 97));
            charged += pointer.charged();
        }
        assert_eq!(used(&store), charged);
        assert!(store.segments().iter().any(|segment| segment.moved > 0));
        let mut log = [0; 5];
        store.log_read(0, &mut log).unwrap();
        assert_eq!(&log, b"a log");
        let mut checked = 0;
        store
            .scrub(&mut |frame| {
                checked += u64::from(frame.damage.is_none() && frame.header.is_some());
                true
            })
            .unwrap();
        assert_eq!(checked, count);
    }
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    put(&store, 4, 1, 100).unwrap();
    commit(&store, 4).unwrap();
}

#[test]
fn a_pool_of_format_1_opens() {
    check(zstd::stream::decode_all(FIXTURE).unwrap());
}

#[test]
fn what_is_written_today_is_what_the_fixture_holds() {
    check(make());
}

/// Run by hand, for a new format only: `NACRE_POOL_FIXTURE=FILE cargo test -p nacre-pool --
/// --ignored the_fixture_is_written`.
#[test]
#[ignore = "writes the fixture of a new format"]
fn the_fixture_is_written() {
    let path = std::env::var("NACRE_POOL_FIXTURE").unwrap();
    std::fs::write(path, zstd::stream::encode_all(make().as_slice(), 19).unwrap()).unwrap();
}
