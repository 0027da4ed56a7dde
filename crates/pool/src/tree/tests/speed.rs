//! Figures, printed, in processor time, so that a busy machine changes them little: `cargo test
//! --release -p nacre-pool -- --ignored --nocapture speed_of_trees`.

use super::*;

const ROWS: usize = 1_600_000;

/// Processor time of this thread, ns.
struct Instant(u64);

impl Instant {
    fn now() -> Self {
        let figures = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Self(figures.split(' ').next().unwrap().parse().unwrap())
    }

    fn seconds(&self) -> f64 {
        (Self::now().0 - self.0) as f64 / 1e9
    }
}

fn say(what: &str, operations: usize, start: Instant) {
    said(what, operations, start.seconds());
}

fn said(what: &str, operations: usize, seconds: f64) {
    println!(
        "{what:44} {:8.3} s {:9.2} M/s {:8.0} ns each",
        seconds,
        operations as f64 / seconds / 1e6,
        seconds * 1e9 / operations as f64
    );
}

fn scan(ctx: Context<'_>, view: &View) -> usize {
    let mut cursor = view.cursor(ctx, &[], None).unwrap();
    let (mut rows, mut bytes) = (0, 0);
    while let Some((key, value)) = cursor.next().unwrap() {
        rows += 1;
        bytes += key.len() + value.len();
    }
    assert!(bytes > 0);
    rows
}

/// A row like an inode's: numbers that differ little.
fn value(n: u64) -> [u8; 88] {
    let mut value = [0; 88];
    for (at, chunk) in value.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&(n * (at as u64 % 3) + 1_700_000_000).to_le_bytes());
    }
    value
}

fn key(n: u64) -> [u8; 9] {
    let mut key = [2; 9];
    key[1..].copy_from_slice(&n.to_be_bytes());
    key
}

#[test]
#[ignore = "measures; prints figures"]
fn speed_of_trees() {
    let bench = Bench { cache: Cache::new(1 << 30), ..Bench::new() };
    let ctx = bench.ctx();
    let mut dice = Random(1);

    let mut random = Tree::empty(1, Settings::default());
    let order: Vec<u64> = (0..ROWS).map(|_| dice.next() >> 8).collect();
    let start = Instant::now();
    for n in &order {
        random.put(&ctx, Txg(1), &key(*n), &value(*n)).unwrap();
    }
    say("put, random keys", ROWS, start);
    let start = Instant::now();
    for n in order.iter().take(ROWS / 2) {
        random.put(&ctx, Txg(1), &key(*n), &value(*n + 1)).unwrap();
    }
    say("put, in place, random", ROWS / 2, start);
    let start = Instant::now();
    for n in &order {
        assert!(random.remove(&ctx, Txg(1), &key(*n)).unwrap());
    }
    say("remove, random", ROWS, start);
    assert!(random.is_empty());

    let mut tree = Tree::empty(1, Settings::default());
    let start = Instant::now();
    for n in 0..ROWS as u64 {
        tree.put(&ctx, Txg(1), &key(n), &value(n)).unwrap();
    }
    say("put, rising keys", ROWS, start);
    println!("{} levels, {} MB dirty", height(ctx, &tree), tree.dirty_bytes() >> 20);

    let start = Instant::now();
    let frozen = tree.freeze();
    say("freeze", 1, start);
    let start = Instant::now();
    let written = frozen.write_out(&ctx, form(1)).unwrap();
    say("write out, lz4 (rows)", ROWS, start);
    let start = Instant::now();
    tree.settle(&frozen).unwrap();
    say("settle", 1, start);
    drop(frozen);
    println!("{} frames, {} MB", written.frames, written.bytes >> 20);

    for (what, cached) in [("get, random, cached", true), ("get, rising, cached", false)] {
        let start = Instant::now();
        for n in 0..ROWS as u64 {
            let n = if cached { dice.next() % ROWS as u64 } else { n };
            let found = tree.get_with(&ctx, &key(n), |value| value.is_some()).unwrap();
            assert!(found);
        }
        say(what, ROWS, start);
    }
    let tree_ref = &tree;
    let seconds: f64 = std::thread::scope(|scope| {
        let reader = |thread: u64| {
            scope.spawn(move || {
                let (mut dice, start) = (Random(thread), Instant::now());
                for _ in 0..ROWS {
                    assert!(tree_ref.get_with(&ctx, &key(dice.next() % ROWS as u64), |value| value.is_some()).unwrap());
                }
                start.seconds()
            })
        };
        let threads = [reader(1), reader(2)];
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    said("get, random, cached, two threads (sum)", 2 * ROWS, seconds);

    let view = tree.view();
    assert_eq!(scan(ctx, &view), ROWS);
    let start = Instant::now();
    assert_eq!(scan(ctx, &view), ROWS);
    say("scan, cached", ROWS, start);
    let small = Cache::new(32 << 20);
    let uncached = Context { frames: &*bench.frames, cache: &small };
    let start = Instant::now();
    assert_eq!(scan(uncached, &view), ROWS);
    say("scan, from lz4 frames", ROWS, start);

    let start = Instant::now();
    for txg in 2..12 {
        for _ in 0..10_000 {
            let n = dice.next() % ROWS as u64;
            tree.put(&ctx, Txg(txg), &key(n), &value(n + txg)).unwrap();
        }
        let written = bench.commit(&mut tree, txg);
        assert_eq!(tree.take_dead(Txg(txg)).len() as u64, written.frames);
    }
    say("ten commits of 10,000 random puts", 100_000, start);

    let start = Instant::now();
    let mut diff = view.diff(ctx, &tree.view()).unwrap();
    let mut changed = 0;
    while diff.next().unwrap().is_some() {
        changed += 1;
    }
    say("diff over them (rows that differ)", changed, start);

    let start = Instant::now();
    let mut loader = Tree::load_sorted(ctx, 1, Settings::default(), form(20));
    for n in 0..ROWS as u64 {
        loader.push(&key(n), &value(n)).unwrap();
    }
    loader.finish().unwrap();
    say("load sorted, lz4", ROWS, start);

    let start = Instant::now();
    assert!(tree.remove_range(&ctx, Txg(20), &key(10), Some(&key(ROWS as u64 - 10))).unwrap());
    say("remove a range (rows)", ROWS - 20, start);
}
