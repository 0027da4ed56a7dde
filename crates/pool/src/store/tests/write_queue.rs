//! Threads that write content in the background, on a device that delays the writes and then fails.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use super::*;

/// Outcome of large writes by threads of the store.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Fate {
    Pass,
    Wait,
    Fail,
    Panic,
}

/// A device whose large writes by these threads wait until their outcome is set.
struct Fateful {
    below: Arc<Simulator>,
    fate: AtomicU8,
    /// How many have come.
    begun: AtomicUsize,
}

impl Fateful {
    fn decide(&self, fate: Fate) {
        self.fate.store(fate as u8, Ordering::SeqCst);
    }
}

impl Device for Fateful {
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
        self.below.write_at(bytes, offset)
    }

    fn write_stream(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        if std::thread::current().name() != Some("pool-write") {
            return self.below.write_at(bytes, offset);
        }
        self.begun.fetch_add(1, Ordering::SeqCst);
        while self.fate.load(Ordering::SeqCst) == Fate::Wait as u8 {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.fate.load(Ordering::SeqCst) {
            fate if fate == Fate::Fail as u8 => Err(std::io::Error::from_raw_os_error(5)),
            fate if fate == Fate::Panic as u8 => panic!("a device's code is broken"),
            _ => self.below.write_at(bytes, offset),
        }
    }

    fn sync(&self) -> std::io::Result<()> {
        self.below.sync()
    }

    fn discard(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.below.discard(offset, length)
    }

    fn expect(&self, offset: u64, length: u64) {
        self.below.expect(offset, length);
    }
}

fn fateful() -> (Arc<Simulator>, Arc<Fateful>, Store) {
    let below = Arc::new(Simulator::new("sim0", 256 * MIB));
    let (fate, begun) = (AtomicU8::new(Fate::Pass as u8), AtomicUsize::new(0));
    let device = Arc::new(Fateful { below: Arc::clone(&below), fate, begun });
    let store = Store::create(vec![Arc::clone(&device) as Arc<dyn Device>], &new_pool()).unwrap().0;
    (below, device, store)
}

const LENGTH: usize = 300_000;

/// Incompressible content of a file.
fn write(store: &Store, txg: u64, number: u64) -> Result<Pointer> {
    let content = content(2 * number + 1, LENGTH);
    store.write(&NewFrame {
        compression: CompressionSetting::Off,
        checksum: ChecksumKind::Xxh3,
        ..frame(WriteStream::Data, txg, &content, 1)
    })
}

fn is_whole(store: &Store, pointer: &Pointer, number: u64) -> bool {
    store.read(pointer).is_ok_and(|read| *read == *content(2 * number + 1, LENGTH))
}

#[test]
fn content_whose_write_fails_behind_its_writer_is_in_no_commit() {
    for end in [Fate::Fail, Fate::Panic] {
        let (below, device, store) = fateful();
        let durable: Vec<Pointer> = (0..20).map(|number| write(&store, 2, number).unwrap()).collect();
        commit(&store, 2).unwrap();
        // No thread waits for the device, and unwritten pieces are read from memory.
        device.decide(Fate::Wait);
        let before = device.begun.load(Ordering::SeqCst);
        let fresh: Vec<Pointer> = (20..34).map(|number| write(&store, 3, number).unwrap()).collect();
        while device.begun.load(Ordering::SeqCst) == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!((20..).zip(&fresh).all(|(number, pointer)| is_whole(&store, pointer, number)));
        // A commit waits for it, and then fails.
        std::thread::scope(|scope| {
            let committing = scope.spawn(|| commit(&store, 3));
            device.decide(end);
            assert!(committing.join().unwrap().is_err());
        });
        assert!(commit(&store, 3).is_err() && commit(&store, 4).is_err());
        assert!(write(&store, 4, 50).is_err());
        // A failed piece stays in memory as long as it may be read.
        assert!((20..).zip(&fresh).all(|(number, pointer)| is_whole(&store, pointer, number)));
        device.decide(Fate::Pass);
        assert!(commit(&store, 5).is_err(), "a device that works again changes nothing");
        drop(store);
        below.crash(2);
        let (store, root) = open(&[below], Access::ReadWrite).unwrap();
        assert_eq!(root.txg, Txg(2));
        assert!((0..).zip(&durable).all(|(number, pointer)| is_whole(&store, pointer, number)));
    }
}

#[test]
fn a_scrub_waits_for_what_is_on_its_way_and_calls_it_whole() {
    let (_, device, store) = fateful();
    device.decide(Fate::Wait);
    for number in 0..14 {
        write(&store, 2, number).unwrap();
    }
    while device.begun.load(Ordering::SeqCst) < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(store.segments().iter().any(|segment| segment.live_frames > 0), "the table knows of some already");
    std::thread::scope(|scope| {
        let scrubbing = scope.spawn(|| {
            let mut seen = (0, Vec::new());
            store
                .scrub(&mut |checked| {
                    seen.0 += u64::from(checked.header.is_some());
                    seen.1.extend(checked.damage.as_ref().map(|damage| (checked.name, damage.clone())));
                    true
                })
                .unwrap();
            seen
        });
        // Where it does not wait, it ends soon.
        let mut patience = 100;
        while patience > 0 && !scrubbing.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
            patience -= 1;
        }
        device.decide(Fate::Pass);
        let (whole, damaged) = scrubbing.join().unwrap();
        assert_eq!(damaged, Vec::new());
        assert!(whole > 0);
    });
}

#[test]
fn a_store_that_ends_writes_first_what_waits() {
    let (below, device, store) = fateful();
    device.decide(Fate::Wait);
    for number in 0..14 {
        write(&store, 2, number).unwrap();
    }
    while device.begun.load(Ordering::SeqCst) < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let written = below.written();
    std::thread::scope(|scope| {
        let ending = scope.spawn(move || drop(store));
        device.decide(Fate::Pass);
        ending.join().unwrap();
    });
    // All threads have ended, and with them whatever they had to do.
    assert_eq!(Arc::strong_count(&device), 1);
    assert!(below.written() >= written + 2 * MIB);
}

#[test]
fn whoever_comes_when_enough_waits_is_told_of_a_failure() {
    let (_, device, store) = fateful();
    device.decide(Fate::Fail);
    // No commit in between: the next writers hear of it.
    let mut numbers = 0..;
    while numbers.next().is_some_and(|number| write(&store, 2, number).is_ok()) {
        std::thread::sleep(Duration::from_millis(u64::from(device.begun.load(Ordering::SeqCst) > 0)));
    }
    assert!(device.begun.load(Ordering::SeqCst) > 0, "no thread was asked before the room was used up");
    assert!(write(&store, 2, 2000).is_err());
    assert!(commit(&store, 2).is_err());
}
