//! Single lists: chunks, buckets, moves, draining, and damage.

use super::*;

fn dead(index: u32, birth: u64) -> Dead {
    Dead { segment: 1, index, charged: 160, owner_charge: 160, logical: 500, birth: Txg(birth), shared: false }
}

fn all(rows: &mut Map, list: ListId) -> BTreeSet<u32> {
    let mut seen = BTreeSet::new();
    Deadlists::new(rows)
        .visit(list, Births::ALL, &mut |entry| {
            assert!(seen.insert(entry.index));
            Ok(())
        })
        .unwrap();
    seen
}

#[test]
fn a_long_list_has_chunks_of_bounded_length_and_exact_totals() {
    let mut rows = Map::default();
    let mut lists = Deadlists::new(&mut rows);
    let list = lists.create().unwrap();
    let history = [Txg(10), Txg(20)];
    for batch in 0..50u32 {
        let entries: Vec<Dead> = (0..200).map(|n| dead(batch * 200 + n, u64::from(n % 20) + 1)).collect();
        lists.append(list, &history, &entries).unwrap();
    }
    assert_eq!(
        lists.totals(list, Births::ALL).unwrap(),
        Totals { bytes: 1_600_000, logical: 5_000_000, entries: 10_000 }
    );
    assert_eq!(lists.totals(list, Births::through(Txg(10))).unwrap().entries, 5_000);
    assert_eq!(lists.totals(list, Births::after(Txg(10))).unwrap().entries, 5_000);
    assert_eq!(lists.totals(list, Births::after(Txg(20))).unwrap().entries, 0);
    let chunks = rows.0.keys().filter(|key| key[0] == CHUNK).count();
    assert!((8..=20).contains(&chunks), "{chunks} chunks");
    assert_eq!(all(&mut rows, list).len(), 10_000);
}

#[test]
fn moving_a_long_list_leaves_its_chunks_where_they_are() {
    let mut rows = Map::default();
    let mut lists = Deadlists::new(&mut rows);
    let (from, to) = (lists.create().unwrap(), lists.create().unwrap());
    let entries: Vec<Dead> = (0..5_000).map(|n| dead(n, 5)).collect();
    lists.append(from, &[], &entries).unwrap();
    let before: Vec<_> =
        rows.0.iter().filter(|(key, _)| key[0] == CHUNK).map(|(key, value)| (key.clone(), value.clone())).collect();
    assert_eq!(Deadlists::new(&mut rows).transfer(from, Births::ALL, to).unwrap().entries, 5_000);
    let after: Vec<_> =
        rows.0.iter().filter(|(key, _)| key[0] == CHUNK).map(|(key, value)| (key.clone(), value.clone())).collect();
    assert_eq!(before, after);
    assert_eq!((all(&mut rows, from).len(), all(&mut rows, to).len()), (0, 5_000));
}

#[test]
fn many_small_merges_leave_few_chunks() {
    let mut rows = Map::default();
    let mut lists = Deadlists::new(&mut rows);
    let to = lists.create().unwrap();
    for n in 0..1_000 {
        let from = lists.create().unwrap();
        lists.append(from, &[], &[dead(n, 5)]).unwrap();
        lists.transfer(from, Births::ALL, to).unwrap();
    }
    let chunks = rows.0.keys().filter(|key| key[0] == CHUNK).count();
    assert!(chunks <= 4, "{chunks} chunks");
    assert_eq!(all(&mut rows, to).len(), 1_000);
}

#[test]
fn draining_goes_on_where_it_stopped_and_leaves_nothing() {
    let mut rows = Map::default();
    let mut lists = Deadlists::new(&mut rows);
    let list = lists.create().unwrap();
    let entries: Vec<Dead> = (0..5_000).map(|n| dead(n, u64::from(n % 3) * 10 + 1)).collect();
    lists.append(list, &[Txg(10), Txg(20)], &entries).unwrap();
    let mut seen = BTreeSet::new();
    let mut rounds = 0;
    loop {
        let part = lists.drain(list, 100).unwrap();
        if part.is_empty() {
            break;
        }
        rounds += 1;
        seen.extend(part.iter().map(|entry| entry.index));
        assert_eq!(lists.totals(list, Births::ALL).unwrap().entries, 5_000 - seen.len() as u64);
    }
    assert_eq!(seen.len(), 5_000);
    assert!(rounds > 4, "{rounds} rounds");
    assert_eq!(rows.0.keys().collect::<Vec<_>>(), vec![&vec![COUNTERS]]);
}

#[test]
fn a_lost_chunk_is_damage_and_not_an_empty_list() {
    let mut rows = Map::default();
    let mut lists = Deadlists::new(&mut rows);
    let list = lists.create().unwrap();
    lists.append(list, &[], &[dead(1, 1)]).unwrap();
    rows.0.retain(|key, _| key[0] != CHUNK);
    let mut lists = Deadlists::new(&mut rows);
    assert!(matches!(lists.visit(list, Births::ALL, &mut |_| Ok(())), Err(PoolError::Format(_))));
    assert!(matches!(lists.append(list, &[], &[dead(2, 1)]), Err(PoolError::Format(_))));
    // Freeing skips it: its space is lost, and other frames are freed all the same.
    assert_eq!(lists.drain(list, 1).unwrap(), []);
    assert_eq!(lists.totals(list, Births::ALL).unwrap(), Totals::default());
    lists.append(list, &[], &[dead(2, 1)]).unwrap();
    assert_eq!(lists.drain(list, 1).unwrap(), [dead(2, 1)]);
}
