//! Calls of a device that panic, or during which something else happens; and commits without other threads.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::backend::NewGroup;
use crate::label::{GroupKind, SlotAddress};
use crate::workers::refusal;

/// A call of a device that changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Write { length: usize },
    Sync,
    Discard,
}

type Hook = Box<dyn Fn(Call) + Send>;

/// A device with a function that runs before each call.
struct Hooked {
    below: Arc<Simulator>,
    hook: Mutex<Option<Hook>>,
}

impl Hooked {
    fn before(&self, call: Call) {
        self.hook.lock().iter().for_each(|hook| hook(call));
    }

    /// Lets calls panic.
    fn break_at(&self, broken: fn(Call) -> bool) {
        let panics = move |call| assert!(!broken(call), "a device's code is broken");
        *self.hook.lock() = Some(Box::new(panics));
    }
}

impl Device for Hooked {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn length(&self) -> u64 {
        self.below.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.below.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.before(Call::Write { length: bytes.len() });
        self.below.write_at(bytes, offset)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.before(Call::Sync);
        self.below.sync()
    }

    fn discard(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.before(Call::Discard);
        self.below.discard(offset, length)
    }

    fn expect(&self, _: u64, _: u64) {}
}

fn hooked() -> (Arc<Simulator>, Arc<Hooked>, Store) {
    let below = Arc::new(Simulator::new("sim0", 64 * MIB));
    let device = Arc::new(Hooked { below: Arc::clone(&below), hook: Mutex::new(None) });
    let store = Store::create(vec![Arc::clone(&device) as Arc<dyn Device>], &new_pool()).unwrap().0;
    (below, device, store)
}

fn panics<R>(act: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(act)).is_err()
}

/// The last state is that of txg 1, with this frame.
fn is_as_before(below: &Arc<Simulator>, frame: &Pointer, number: u64) {
    below.crash(9);
    let (store, root) = open(std::slice::from_ref(below), Access::ReadWrite).unwrap();
    assert_eq!(root.txg, Txg(1));
    assert_eq!(*store.read(frame).unwrap(), *content(number, 3000));
    commit(&store, 4).unwrap();
}

#[test]
fn without_other_threads_all_devices_are_written_and_synced() {
    let sims = simulators(2, 64 * MIB);
    let mirror = NewGroup { kind: GroupKind::Mirror, devices: 2 };
    let store = Store::create_groups(devices(&sims), &[mirror], &new_pool()).unwrap().0;
    // Long enough to be written in parallel.
    let content = content(1, 700_000);
    let pointer = refusal::during(|| {
        let pointer = store.write(&frame(WriteStream::Data, 1, &content, 1)).unwrap();
        commit(&store, 1).unwrap();
        pointer
    });
    drop(store);
    for sim in &sims {
        sim.crash(5);
        let (store, root) = open(std::slice::from_ref(sim), Access::ReadOnly).unwrap();
        assert_eq!(root.txg, Txg(1));
        assert_eq!(*store.read(&pointer).unwrap(), *content, "{}", sim.name());
    }
}

#[test]
fn a_commit_that_panics_is_the_last_one() {
    let (below, device, store) = hooked();
    let durable = put(&store, 1, 2, 3000).unwrap();
    commit(&store, 1).unwrap();
    put(&store, 2, 4, 3000).unwrap();
    device.break_at(|call| call == Call::Sync);
    assert!(panics(|| commit(&store, 2)));
    *device.hook.lock() = None;
    assert!(matches!(commit(&store, 3), Err(PoolError::Suspended { durable: Txg(1), .. })));
    assert!(matches!(put(&store, 3, 6, 3000), Err(PoolError::Suspended { .. })));
    drop(store);
    is_as_before(&below, &durable, 2);
}

#[test]
fn after_a_write_that_panics_no_commit_waits_for_it() {
    let (below, device, store) = hooked();
    let durable = put(&store, 1, 2, 3000).unwrap();
    commit(&store, 1).unwrap();
    device.break_at(|call| matches!(call, Call::Write { length } if length >= 64 << 10));
    let metadata = content(1, 100_000);
    assert!(panics(|| (0..20).for_each(|_| drop(store.write(&frame(WriteStream::Metadata, 2, &metadata, 1))))));
    *device.hook.lock() = None;
    assert!(store.suspended().is_some());
    assert!(matches!(commit(&store, 2), Err(PoolError::Suspended { durable: Txg(1), .. })));
    drop(store);
    is_as_before(&below, &durable, 2);
}

#[test]
fn a_slot_that_a_segment_takes_during_its_discard_stays_taken() {
    let (_, device, store) = hooked();
    store.set_autotrim(true);
    let pointers: Vec<Pointer> = (0..40).map(|number| put(&store, 1, 3 * number + 1, 100_000).unwrap()).collect();
    commit(&store, 1).unwrap();
    pointers.iter().for_each(|pointer| store.free(pointer, Txg(2)));
    for txg in 2..8 {
        commit(&store, txg).unwrap();
    }
    let store = Arc::new(store);
    let waiting = store.disks.as_ref().unwrap().untold();
    assert!(!waiting.is_empty());
    // The number becomes another device's, and a segment takes the same slots.
    let (at, slots) = (Arc::downgrade(&store), waiting.clone());
    *device.hook.lock() = Some(Box::new(move |call| {
        let Some(store) = at.upgrade().filter(|_| call == Call::Discard) else { return };
        store.disks.as_ref().unwrap().take_withheld(&slots, 77);
    }));
    while store.trim_step().unwrap() {}
    let owner = |slot: &SlotAddress| store.disks.as_ref().unwrap().owner_of(*slot);
    assert!(waiting.iter().all(|slot| owner(slot) == Some(77)), "{waiting:?}");
}
