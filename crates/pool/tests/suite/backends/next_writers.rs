//! Writers of a pool in a bucket one after the other: what the next one finds, and what is removed of those
//! before it.

use super::*;

/// What fsync has promised is there for the next program; and who lost the pool to it promises
/// nothing any more.
#[test]
fn what_was_synced_in_a_bucket_is_there_for_the_next_program() {
    let ground = InBucket::new(4, 9);
    let mut last = PoolInBucket::create(&ground);
    last.pool.commit().unwrap();
    let mut promised = Vec::new();
    for life in 0..6 {
        for number in 0..5 {
            let name = format!("file {number} of life {life}");
            last.write(&name).unwrap();
            promised.push(name);
            if number == life {
                last.pool.commit().unwrap();
            }
        }
        let stalled = std::mem::replace(&mut last, PoolInBucket::import(&ground));
        for name in &promised {
            assert!(last.has(name), "{name}");
        }
        assert!(stalled.write("too late").is_err(), "it was told to be durable, and is not");
        assert!(!last.has("too late"));
    }
    // Blocks are gone with the commits that hold them; what ends an epoch stays.
    last.pool.commit().unwrap();
    let blocks = ground.bucket.keys().into_iter().filter(|key| key.starts_with("log/"));
    assert_eq!(blocks.count(), 6);
}

/// What no root needs is removed of logs and of who the pool was, a day later, but for seals; who was stopped all the
/// time does not take a free name for its own.
#[test]
fn logs_and_identities_that_no_root_needs_are_removed() {
    let ground = InBucket::new(4, 0);
    let first = PoolInBucket::create(&ground);
    first.pool.commit().unwrap();
    for life in 0..3 {
        PoolInBucket::import(&ground).write(&format!("of life {life}")).unwrap();
    }
    let stalled = PoolInBucket::import(&ground);
    stalled.write("before it stood still").unwrap();
    let last = PoolInBucket::import(&ground);
    let of = |kind: &str| ground.bucket.keys().into_iter().filter(|key| key.starts_with(kind)).count();
    assert!(of("log/") > 4 && of("pool/") == 6, "{} of logs, {} of identities", of("log/"), of("pool/"));
    let commit = |number: u32| {
        last.write(&format!("number {number}")).unwrap();
        last.pool.commit().unwrap();
    };
    (0..3).for_each(commit);
    ground.clock.fetch_add(30 * 3600, Ordering::Relaxed);
    (3..530).for_each(commit);
    assert_eq!((of("log/"), of("pool/")), (5, 2), "seals of five epochs stay");
    assert!(stalled.write("too late").is_err(), "it was told to be durable, and is not");
    assert!((0..530).all(|number| last.has(&format!("number {number}"))) && last.has("before it stood still"));
    drop((first, stalled, last));
    let again = PoolInBucket::import(&ground);
    assert!(again.has("number 529") && !again.has("too late"));
}
