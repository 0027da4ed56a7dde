//! Pools on simulated devices, through the public interface of the engine alone.
//!
//! Callers: the tests beside. Clock, entropy and crashes come from one seed: a failure comes again.
pub mod gentle;
pub mod shapes;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

pub use nacre_pool::device::Random;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::{Durable, Pool, PoolConfig};
use nacre_pool::log::KeptLog;
use nacre_pool::rows::Timestamp;
use nacre_pool::store::{Access, Import, NewPool, Store};
use nacre_pool::{PoolError, Txg};

/// A number from the environment, as campaigns set them.
pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect(name))
}

/// A pool with its store.
pub struct Imported {
    /// The engine.
    pub pool: Arc<Pool>,
    /// What it stands on.
    pub store: Arc<Store>,
}

fn devices(disks: &[Arc<Simulator>]) -> Vec<Arc<dyn Device>> {
    disks.iter().map(|disk| Arc::clone(disk) as Arc<dyn Device>).collect()
}

fn config(store: &Arc<Store>, seed: u64, logged: bool, kept: Option<&Arc<KeptLog>>) -> PoolConfig {
    let (ticks, random) = (AtomicI64::new(1_800_000_000), AtomicU64::new(seed));
    PoolConfig {
        log: if logged { Some(store.log().unwrap()) } else { None },
        storage: Arc::clone(store) as _,
        clock: Arc::new(move || Timestamp { seconds: ticks.fetch_add(1, Ordering::Relaxed), nanoseconds: 1 }),
        entropy: Arc::new(move || Random(random.fetch_add(1, Ordering::Relaxed)).next()),
        cache: 8 << 20,
        kept: kept.cloned(),
    }
}

fn host() -> (u64, String) {
    (1, "here".to_owned())
}

/// Makes a pool `tank`.
pub fn create(disks: &[Arc<Simulator>], seed: u64) -> Imported {
    create_kept(disks, seed, None)
}

/// Makes a pool `tank`, whose changes are kept.
pub fn create_kept(disks: &[Arc<Simulator>], seed: u64, kept: Option<&Arc<KeptLog>>) -> Imported {
    let new = NewPool {
        name: "tank".to_owned(),
        guid: seed | 1,
        host: host(),
        time: 1_800_000_000,
        redundant_metadata: seed.is_multiple_of(2),
    };
    let (store, _) = Store::create(devices(disks), &new).unwrap();
    let store = Arc::new(store);
    let pool = Arc::new(Pool::create(config(&store, seed, true, kept), "tank").unwrap());
    Imported { pool, store }
}

/// Imports it.
pub fn open(disks: &[Arc<Simulator>], seed: u64, access: Access) -> Result<Imported, PoolError> {
    open_kept(disks, seed, access, None)
}

/// Imports it, and goes on from what was kept.
pub fn open_kept(
    disks: &[Arc<Simulator>],
    seed: u64,
    access: Access,
    kept: Option<&Arc<KeptLog>>,
) -> Result<Imported, PoolError> {
    let import = Import { access, name: None, host: host(), time: 1_800_000_001 };
    let (store, root) = Store::open(devices(disks), &import)?;
    let store = Arc::new(store);
    let unfinished = || PoolError::Refused("the making of this pool was never finished".to_owned());
    let catalog = root.catalog.filter(|_| root.txg > Txg(0)).ok_or_else(unfinished)?;
    let durable = Durable { txg: root.txg, catalog, log: root.log_start.into() };
    let pool = Arc::new(Pool::open(config(&store, seed, access != Access::ReadOnly, kept), &durable)?);
    Ok(Imported { pool, store })
}

/// What the headers of frames say that are named in these sentences.
fn headers(imported: &Imported, told: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for segment in imported.store.segments() {
        let _ = imported.store.inspect(segment.id, &mut |header, _, lives| {
            let name = format!("frame {}:{} ", header.pointer.segment, header.pointer.index);
            if told.iter().any(|sentence| sentence.contains(&name)) {
                found.push(format!("{name}(lives: {lives}) in segment {}: {header:?}", segment.id));
            }
            true
        });
    }
    found
}

/// Checks everything against everything; panics where something is wrong.
#[track_caller]
pub fn check(imported: &Imported) {
    let mut told = Vec::new();
    let seen = imported.pool.check(&imported.store, false, &mut |what| told.push(what.to_owned())).unwrap();
    if seen.problems > 0 {
        told.extend(headers(imported, &told));
    }
    assert!(seen.problems == 0, "{} problems: {told:#?}", seen.problems);
}
