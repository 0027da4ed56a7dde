//! Power that fails at the writes of a change of what a pool consists of, one after the other.
//!
//! Called by the tests of changes of groups (`groups.rs`) and of shapes (`reshape.rs`). Invariant: after
//! each cut the pool is imported from those devices that have one of its labels, and what it held is read.

use crate::groups::*;

/// Has the power fail at write 1 of `change`, then at each that `next` gives, until it comes to its end.
/// `more` devices of 64 MiB lie beside those of `model`; `seed` says what of the last writes stays; `after` does what the pool needs to be whole again.
pub fn cut(
    what: &str,
    mut model: Model,
    more: usize,
    seed: u64,
    change: Change,
    next: impl Fn(u64) -> u64,
    after: impl Fn(&Store) -> Result<(), PoolError>,
) {
    drop(model.store.take());
    let images: Vec<Arc<Simulator>> = model.devices.into_values().collect();
    let (mut cut, mut ended) = (1, false);
    while !ended {
        let fuse = Fuse::default();
        let sims: Vec<Arc<Simulator>> = images
            .iter()
            .map(|device| Arc::new(device.copy()))
            .chain((0..more).map(|at| Arc::new(Simulator::new(&format!("more{at}"), 64 * MIB))))
            .collect();
        let fused = |device: &Arc<Simulator>| fuse.on(device);
        let (old, new) = sims.split_at(images.len());
        let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".into()), time: 1 };
        let (store, _) = Store::open(old.iter().map(fused).collect(), &import).unwrap();
        fuse.set(cut);
        CRASHES.fetch_add(1, Ordering::Relaxed);
        ended = change(&store, new.iter().map(fused).collect()).is_ok();
        drop(store);
        sims.iter().enumerate().for_each(|(at, device)| device.crash(seed + cut * 31 + at as u64));
        let is_found =
            |device: &&Arc<Simulator>| nacre_pool::label::probe(&***device).is_ok_and(|found| found.is_some());
        let found: Vec<&Arc<Simulator>> = sims.iter().filter(is_found).collect();
        let whole = |error: PoolError| -> ! { panic!("{what} cut at {cut}: {error}") };
        let store = open(&found, Access::ReadWrite).unwrap_or_else(|error| whole(error));
        let read = || {
            for (number, pointer) in &model.now {
                let read = store.read(pointer).unwrap_or_else(|error| whole(error));
                assert!(*read == *content(*number), "{what} cut at {cut}");
            }
        };
        read();
        after(&store).unwrap_or_else(|error| whole(error));
        read();
        cut = next(cut);
    }
    println!("campaign: {what}: up to write {cut}; {} crashes", CRASHES.load(Ordering::Relaxed));
}
