//! How long a pool takes to go on from what a dead process has kept: `cargo run --release -p nacre-pool
//! --example kept_replay -- DIRECTORY`.
//!
//! For each kind of work, a pool on a file in the directory is worked on without a commit until so much is
//! kept (MIB in the environment, 100); then it is dropped, and imported with the log.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a program for developers"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nacre_pool::Store;
use nacre_pool::device::{Device, FileDevice, Random};
use nacre_pool::engine::{Dataset, Durable, Pool, PoolConfig};
use nacre_pool::files::{Inode, NewInode, ParentView};
use nacre_pool::log::KeptLog;
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_pool::store::{Access, Import, NewPool};

const MIB: u64 = 1 << 20;

fn config(store: &Arc<Store>, kept: &Arc<KeptLog>) -> PoolConfig {
    let clock = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
    };
    PoolConfig {
        log: Some(store.log().unwrap()),
        storage: Arc::clone(store) as _,
        clock: Arc::new(clock),
        entropy: Arc::new(|| 42),
        cache: 192 * MIB,
        kept: Some(Arc::clone(kept)),
    }
}

fn make(dataset: &Dataset, name: &str) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    };
    dataset.files().make(&dataset.files().root(), name.as_bytes(), b"", &new).unwrap().0
}

fn noise(random: &mut Random, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]));
    bytes
}

fn measure(path: &Path, what: &str, work: &mut dyn FnMut(&Pool, &Dataset, u64)) {
    let kept = KeptLog::new(KeptLog::BYTES).unwrap();
    let _ = std::fs::remove_file(path);
    let device: Arc<dyn Device> = Arc::new(FileDevice::create(path, 4 << 30).unwrap());
    let host = (1, "here".to_owned());
    let new = NewPool { name: "bench".to_owned(), guid: 7, host: host.clone(), time: 1, redundant_metadata: true };
    let store = Arc::new(Store::create(vec![device], &new).unwrap().0);
    let pool = Pool::create(config(&store, &kept), "bench").unwrap();
    let dataset = pool.dataset(pool.root().unwrap()).unwrap();
    let (start, mut at, most) = (Instant::now(), 0, std::env::var("MIB").map_or(100, |mib| mib.parse().unwrap()) * MIB);
    while kept.used() < most {
        work(&pool, &dataset, at);
        at += 1;
    }
    let (worked, used) = (start.elapsed(), kept.used());
    drop((dataset, pool, store));
    let left = KeptLog::taken_over(kept.descriptor().try_clone_to_owned().unwrap()).unwrap();
    let start = Instant::now();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path, true).unwrap());
    let import = Import { access: Access::ReadWrite, name: None, host, time: 2 };
    let (store, root) = Store::open(vec![device], &import).unwrap();
    let store = Arc::new(store);
    let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
    let opened = start.elapsed();
    let pool = Pool::open(config(&store, &left), &durable).unwrap();
    println!(
        "{what:32} {at:8} operations in {:6.3} s, {:4} MiB kept; import {:6.3} s, of it the replay {:6.3} s",
        worked.as_secs_f64(),
        used / MIB,
        start.elapsed().as_secs_f64(),
        (start.elapsed() - opened).as_secs_f64(),
    );
    assert_eq!(pool.kept().map(|kept| kept.used()), Some(0));
}

fn main() {
    nacre_sys::memory::keep_large_blocks_apart();
    let path = PathBuf::from(std::env::args().nth(1).expect("a directory")).join("kept.img");
    let mut random = Random(1);
    let block = noise(&mut random, MIB as usize);
    let mut file = None;
    measure(&path, "writes of 1 MiB", &mut |_, dataset, at| {
        let file = file.get_or_insert_with(|| make(dataset, "file"));
        dataset.files().write(file, Some(at * MIB), &block).unwrap();
    });
    let mut file = None;
    measure(&path, "4 KiB anywhere in 64 MiB", &mut |pool, dataset, at| {
        let file = file.get_or_insert_with(|| {
            let file = make(dataset, "file");
            for at in 0..64 {
                dataset.files().write(&file, Some(at * MIB), &block).unwrap();
            }
            pool.commit().unwrap();
            file
        });
        let from = (at as usize * 8) % 100_000;
        let place = Random(at).next() % (16 << 10);
        dataset.files().write(file, Some(place * 4096), &block[from..from + 4096]).unwrap();
    });
    measure(&path, "files of 100 bytes", &mut |_, dataset, at| {
        let file = make(dataset, &format!("file{at}"));
        dataset.files().write(&file, Some(0), &block[..100]).unwrap();
    });
    measure(&path, "files of 20,000 bytes", &mut |_, dataset, at| {
        let file = make(dataset, &format!("file{at}"));
        dataset.files().write(&file, Some(0), &block[..20_000]).unwrap();
    });
    let mut file = None;
    measure(&path, "appends of 100 bytes", &mut |_, dataset, _| {
        let file = file.get_or_insert_with(|| make(dataset, "log"));
        dataset.files().write(file, None, &block[..100]).unwrap();
    });
    let _ = std::fs::remove_file(&path);
}
