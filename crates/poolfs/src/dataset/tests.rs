//! The conformance suite over a dataset of a pool in memory, and its state after a crash.

use super::{Dataset, WritebackGroup};
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::{Durable, Pool, PoolConfig};
use nacre_pool::rows::Timestamp;
use nacre_pool::store::{Access, Import, NewPool, Store};
use nacre_vfs::{Caller, Layer, Name, OpenFlags, WriteAhead, WriteOrigin};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{SystemTime, UNIX_EPOCH};

/// Pages of a page cache.
const PAGES: WriteOrigin = WriteOrigin::Writeback { timed: false };

fn config(store: Store) -> PoolConfig {
    let random = AtomicU64::new(1);
    let store = Arc::new(store);
    PoolConfig {
        log: Some(store.log().unwrap()),
        storage: store,
        clock: Arc::new(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
        }),
        entropy: Arc::new(move || random.fetch_add(0x9e37_79b9, Ordering::Relaxed)),
        cache: 64 << 20,
        kept: None,
    }
}

pub(crate) fn create(device: &Arc<Simulator>) -> Arc<Pool> {
    let new =
        NewPool { name: "tank".to_owned(), guid: 7, host: (1, "here".to_owned()), time: 1, redundant_metadata: true };
    let (store, _) = Store::create(vec![Arc::clone(device) as Arc<dyn Device>], &new).unwrap();
    Arc::new(Pool::create(config(store), "tank").unwrap())
}

pub(crate) fn open(device: &Arc<Simulator>) -> Arc<Pool> {
    let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".to_owned()), time: 2 };
    let (store, root) = Store::open(vec![Arc::clone(device) as Arc<dyn Device>], &import).unwrap();
    let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
    Arc::new(Pool::open(config(store), &durable).unwrap())
}

fn dataset(pool: &Arc<Pool>) -> Dataset {
    Dataset::open(pool, pool.find("tank").unwrap().unwrap()).unwrap()
}

#[test]
fn a_dataset_conforms() {
    nacre_testkit::conformance::run(|| {
        let device = Arc::new(Simulator::new("disk", 128 << 20));
        Arc::new(dataset(&create(&device)))
    });
}

#[test]
fn what_was_synced_is_there_after_a_crash() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    {
        let layer = dataset(&create(&device));
        let root = layer.root().unwrap().node;
        let (_, file) = layer.create(&Caller::ROOT, &root, name("kept"), 0o600, OpenFlags::READ_WRITE).unwrap();
        file.write(b"safe", 0, WriteOrigin::Caller).unwrap();
        file.fsync(false).unwrap();
        layer.create(&Caller::ROOT, &root, name("lost"), 0o600, OpenFlags::READ_WRITE).unwrap();
    }
    device.crash(3);
    let layer = dataset(&open(&device));
    let root = layer.root().unwrap().node;
    let kept = layer.lookup(&Caller::ROOT, &root, name("kept")).unwrap();
    let mut content = [0; 9];
    assert_eq!(layer.open(&Caller::ROOT, &kept.node, OpenFlags::READ).unwrap().read(&mut content, 0), Ok(4));
    assert_eq!(&content[..4], b"safe");
    assert!(layer.lookup(&Caller::ROOT, &root, name("lost")).is_err());
}

#[test]
fn with_sync_always_whatever_changes_content_is_there_after_a_crash() {
    use nacre_pool::engine::{Edit, Setting};
    use nacre_vfs::{AllocateMode, SetAttr};
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let record = 128 << 10;
    let old = vec![7; 3 * record];
    for change in 0..6 {
        let device = Arc::new(Simulator::new("disk", 256 << 20));
        {
            let pool = create(&device);
            let layer = dataset(&pool);
            let set =
                Edit { dataset: layer.number(), name: "sync".to_owned(), to: Setting::Local("always".to_owned()) };
            pool.set_properties(&[set]).unwrap();
            let root = layer.root().unwrap().node;
            let create = |text| layer.create(&Caller::ROOT, &root, name(text), 0o600, OpenFlags::READ_WRITE).unwrap();
            let ((entry, file), (_, other)) = (create("f"), create("other"));
            file.write(&old, 0, WriteOrigin::Caller).unwrap();
            other.write(&vec![9; record], 0, WriteOrigin::Caller).unwrap();
            pool.commit().unwrap();
            match change {
                0 => file
                    .allocate(AllocateMode(AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE), 0, record as u64)
                    .unwrap(),
                1 => file.allocate(AllocateMode(AllocateMode::ZERO_RANGE), 5, 10).unwrap(),
                2 => file.allocate(AllocateMode(0), 0, 1 << 20).unwrap(),
                3 => {
                    let flags = OpenFlags(OpenFlags::READ_WRITE.raw() | OpenFlags::TRUNC);
                    layer.open(&Caller::ROOT, &entry.node, flags).unwrap();
                }
                4 => assert_eq!(other.copy_to(0, &*file, record as u64, record as u64, 0), Ok(record as u64)),
                _ => {
                    file.write(b"x", 0, WriteOrigin::Caller).unwrap();
                    let longer = SetAttr { size: Some(1 << 20), ..SetAttr::default() };
                    layer.setattr(&Caller::ROOT, &entry.node, None, &longer).unwrap();
                }
            }
        }
        device.crash(3);
        let mut expected = old.clone();
        match change {
            0 => expected[..record].fill(0),
            1 => expected[5..15].fill(0),
            2 => expected.resize(1 << 20, 0),
            3 => expected.clear(),
            4 => expected[record..2 * record].fill(9),
            _ => {
                expected[0] = b'x';
                expected.resize(1 << 20, 0);
            }
        }
        let layer = dataset(&open(&device));
        let found = layer.lookup(&Caller::ROOT, &layer.root().unwrap().node, name("f")).unwrap();
        let mut content = vec![1; (1 << 20) + 1];
        let read = layer.open(&Caller::ROOT, &found.node, OpenFlags::READ).unwrap().read(&mut content, 0).unwrap();
        content.truncate(read);
        assert!(content == expected, "{change}: {read} bytes of {}", expected.len());
    }
}

/// A FUSE front end that counts its calls; its kernel holds nothing back.
#[derive(Default)]
struct Door {
    recalls: AtomicU64,
    settled: AtomicU64,
    lets_in: AtomicU64,
}

impl nacre_vfs::WritebackHost for Door {
    fn dirty_limit(&self, files: usize) -> u64 {
        8 << 20 | files as u64
    }

    fn lets_in(&self) {
        self.lets_in.fetch_add(1, Ordering::Relaxed);
    }

    fn recall(&self) {
        self.recalls.fetch_add(1, Ordering::Relaxed);
    }

    fn flush(&self) -> nacre_vfs::Result<()> {
        self.settled.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Incompressible content.
fn noise() -> Vec<u8> {
    let mut noise = 1_u64;
    let mut block = Vec::new();
    while block.len() < 1 << 20 {
        noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        block.extend_from_slice(&noise.to_le_bytes());
    }
    block
}

#[test]
fn writes_are_announced_when_room_is_short_and_what_arrives_is_let_in() {
    let device = Arc::new(Simulator::new("disk", 256 << 20));
    let layer = dataset(&create(&device));
    let door = Arc::new(Door::default());
    assert!(layer.capabilities().writeback.unwrap().accept(&(Arc::clone(&door) as Arc<dyn nacre_vfs::WritebackHost>)));
    assert_eq!(door.lets_in.load(Ordering::Relaxed), 1);
    let root = layer.root().unwrap().node;
    let create = |name: &'static str| {
        layer.create(&Caller::ROOT, &root, Name::new(name.as_bytes()).unwrap(), 0o600, OpenFlags::WRITE).unwrap().1
    };
    let file = create("filled");
    // Without write-back caching, a file that is open for writing only cannot be read.
    assert!(file.read(&mut [0], 0).is_err());
    let permission = file.writeback_lease().unwrap();
    assert!(permission.begin() && permission.unannounced());
    assert_eq!(file.read(&mut [0], 0), Ok(0));
    let block = noise();
    let mut at = 0;
    while permission.unannounced() {
        assert_eq!(file.write(&block, at, PAGES), Ok(block.len()), "at {at}");
        at += block.len() as u64;
        assert!(at < 256 << 20, "more than there is");
    }
    assert!(door.recalls.load(Ordering::Relaxed) > 0);
    // There is room for some writes, but not for all; this shows only when all have arrived.
    assert_eq!(permission.announce(WriteAhead::append(Some(1000))), Ok(()));
    assert_eq!(permission.announce(WriteAhead::append(Some(256 << 20))), Err(nacre_vfs::Errno::ENOSPC));
    assert!(door.settled.load(Ordering::Relaxed) > 0);
    // No further file is cached, and its writes are refused one by one; reserved ones are admitted
    // when they arrive.
    assert_eq!(permission.announce(WriteAhead::append(Some(block.len() as u64))), Ok(()));
    let other = create("other");
    assert!(!other.writeback_lease().unwrap().begin());
    let mut taken = 0;
    while let Ok(some) = other.write(&block, taken, WriteOrigin::Caller) {
        taken += some as u64;
    }
    assert_eq!(other.write(&block, taken, WriteOrigin::Caller), Err(nacre_vfs::Errno::ENOSPC));
    // Stores to a mapping of another file do not get the reservations of this one.
    assert_eq!(other.write(&block, taken, PAGES), Err(nacre_vfs::Errno::ENOSPC));
    assert_eq!(file.write(&block, at, PAGES), Ok(block.len()));
    // Beyond that only stores can arrive.
    let mut stored = 0;
    while let Ok(some) = file.write(&block, at + (block.len() + stored) as u64, PAGES) {
        stored += some;
        assert!(stored < 1 << 20, "more than what was promised for naming");
    }
    // Existing content can be overwritten, by reserved writes and by stores.
    let over = WriteAhead { offset: Some(0), length: Some(block.len() as u64) };
    assert_eq!(permission.announce(over), Ok(()));
    assert_eq!(other.write(&block, 0, PAGES), Ok(block.len()));
    assert_eq!(permission.announce(WriteAhead::append(Some(block.len() as u64))), Err(nacre_vfs::Errno::ENOSPC));
}

/// A FUSE front end after a failover: its kernel holds writes back until it may flush them.
struct Heir {
    passing: Mutex<Receiver<()>>,
    asked: AtomicU64,
}

impl Heir {
    fn of(layer: &Dataset) -> (Arc<Heir>, Sender<()>) {
        let (pass, passing) = channel();
        let heir = Arc::new(Heir { passing: Mutex::new(passing), asked: AtomicU64::new(0) });
        let door = Arc::clone(&heir) as Arc<dyn nacre_vfs::WritebackHost>;
        assert!(layer.capabilities().writeback.unwrap().accept(&door));
        (heir, pass)
    }
}

impl nacre_vfs::WritebackHost for Heir {
    fn dirty_limit(&self, _files: usize) -> u64 {
        4 << 20
    }
    fn opens_unasked(&self) -> bool {
        true
    }
    fn lets_in(&self) {}
    fn recall(&self) {}
    fn flush(&self) -> nacre_vfs::Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        // At the end of the test no operation waits any more.
        let _ = self.passing.lock().recv();
        Ok(())
    }
}

#[test]
fn what_was_accepted_before_a_death_finds_its_room() {
    use nacre_pool::engine::NewDataset;
    let pool = create(&Arc::new(Simulator::new("disk", 256 << 20)));
    let top = pool.find("tank").unwrap().unwrap();
    let below =
        pool.create_dataset(&NewDataset { parent: top, name: "below".to_owned(), properties: Vec::new() }).unwrap();
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let (block, root) = (noise(), |layer: &Dataset| layer.root().unwrap().node);
    for id in [top, below] {
        let layer = Dataset::open(&pool, id).unwrap();
        layer.create(&Caller::ROOT, &root(&layer), name("f"), 0o600, OpenFlags::WRITE).unwrap();
    }
    // Other writes take all the room that there is.
    let layer = Dataset::open(&pool, top).unwrap();
    let other = layer.create(&Caller::ROOT, &root(&layer), name("other"), 0o600, OpenFlags::WRITE).unwrap().1;
    let mut taken = 0;
    while other.write(&block, taken, WriteOrigin::Caller) == Ok(block.len()) {
        taken += block.len() as u64;
    }
    // The process crashes, and two FUSE front ends take over.
    let group = Arc::new(WritebackGroup::default());
    let open = |id| {
        let layer = Dataset::open_among(&pool, id, &group).unwrap();
        let node = layer.lookup(&Caller::ROOT, &root(&layer), name("f")).unwrap().node;
        let file = layer.open(&Caller::ROOT, &node, OpenFlags::READ_WRITE).unwrap();
        (layer, file)
    };
    let ((first, one), (second, two)) = (open(top), open(below));
    assert_eq!(one.write(&block, 0, PAGES), Err(nacre_vfs::Errno::ENOSPC), "it is a store to a mapping");
    let (heir, pass) = Heir::of(&first);
    one.writeback_lease().unwrap().begin_unopened();
    first.capabilities().writeback.unwrap().goes_on();
    assert_eq!(one.write(&block, 0, PAGES), Ok(block.len()));
    let asked = |times| {
        while heir.asked.load(Ordering::Relaxed) < times {
            std::thread::yield_now();
        }
    };
    // The second one arrives while the held-back writes of the first one are flushed.
    asked(1);
    let (_, pass_second) = Heir::of(&second);
    two.writeback_lease().unwrap().begin_unopened();
    second.capabilities().writeback.unwrap().goes_on();
    drop(pass_second);
    pass.send(()).unwrap();
    asked(2);
    for at in 0..3 {
        assert_eq!(two.write(&block, at << 20, PAGES), Ok(block.len()), "{at}");
    }
    // Flushed writes are not counted any more.
    drop(pass);
    let refused = |at| two.write(&block, at, PAGES) == Err(nacre_vfs::Errno::ENOSPC);
    let mut at = 3 << 20;
    while !refused(at) {
        at += 1 << 20;
        assert!(at < 16 << 20, "no end of it");
    }
}

#[test]
fn stores_to_mappings_are_within_quotas_and_the_room() {
    use nacre_pool::engine::{Edit, NewDataset, Setting};
    let device = Arc::new(Simulator::new("disk", 256 << 20));
    let pool = create(&device);
    let top = pool.find("tank").unwrap().unwrap();
    let new = |name: &str, property: &str, value: &str| {
        let properties = vec![(property.to_owned(), value.to_owned())];
        pool.create_dataset(&NewDataset { parent: top, name: name.to_owned(), properties }).unwrap()
    };
    let block = noise();
    // Whether files may be cached or not: these are not.
    let store = |id: u64, most: u64| {
        let layer = Dataset::open(&pool, id).unwrap();
        let root = layer.root().unwrap().node;
        let file =
            layer.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o600, OpenFlags::READ_WRITE).unwrap().1;
        let mut at = 0;
        let refused = loop {
            match file.write(&block[..256 << 10], at, PAGES) {
                Ok(stored) => at += stored as u64,
                Err(error) => break error,
            }
            assert!(at <= most, "{at} beyond {most}");
        };
        pool.commit().unwrap();
        (at, refused, layer, file)
    };
    for (name, property, value) in [("a", "quota", "4M"), ("b", "refquota", "4M"), ("c", "userquota@0", "4M")] {
        let id = new(name, property, value);
        let (stored, refused, _layer, file) = store(id, 4 << 20);
        assert_eq!(refused, nacre_vfs::Errno::EDQUOT, "{property}");
        assert!(stored > 3 << 20, "{property}: {stored}");
        assert!(pool.space(id).unwrap().1.referenced <= (4 << 20) + (64 << 10), "{property}");
        // With a larger one the write succeeds.
        pool.set_properties(&[Edit { dataset: id, name: property.to_owned(), to: Setting::Local("16M".to_owned()) }])
            .unwrap();
        assert_eq!(file.write(&block, stored, PAGES), Ok(block.len()), "{property}");
    }
    let free = pool.room(top).unwrap();
    let (stored, refused, layer, _file) = store(top, free);
    assert_eq!(refused, nacre_vfs::Errno::ENOSPC);
    assert!(stored > free / 4 * 3, "{stored} of {free}");
    assert!(pool.suspended().is_none());
    // Removals find room.
    let root = layer.root().unwrap().node;
    layer.unlink(&Caller::ROOT, &root, Name::new(b"f").unwrap()).unwrap();
    pool.commit().unwrap();
}

#[test]
fn writes_stand_still_while_a_moment_is_taken() {
    let layer = dataset(&create(&Arc::new(Simulator::new("disk", 256 << 20))));
    let door = Arc::new(Door::default());
    assert!(layer.capabilities().writeback.unwrap().accept(&(Arc::clone(&door) as Arc<dyn nacre_vfs::WritebackHost>)));
    let root = layer.root().unwrap().node;
    let open = |text: &'static str| {
        let name = Name::new(text.as_bytes()).unwrap();
        layer.create(&Caller::ROOT, &root, name, 0o600, OpenFlags::WRITE).unwrap().1
    };
    let file = open("f");
    let permission = file.writeback_lease().unwrap();
    assert!(!layer.stop_writes().any(), "nothing is collected yet");
    assert!(permission.begin() && permission.unannounced() && !permission.stopped());
    let recalls = door.recalls.load(Ordering::Relaxed);
    let (one, two) = (layer.stop_writes(), layer.stop_writes());
    assert!(one.any() && permission.stopped() && !permission.unannounced());
    assert_eq!(door.recalls.load(Ordering::Relaxed), recalls + 2);
    // No operation waits for ever.
    permission.wait(std::time::Duration::from_millis(1));
    assert!(permission.stopped());
    drop(one);
    assert!(permission.stopped(), "the other one still needs it");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| permission.wait(std::time::Duration::from_secs(600)));
        drop(two);
        waiting.join().unwrap();
    });
    assert!(!permission.stopped() && permission.unannounced());
    // Direct writes continue.
    let _stopped = layer.stop_writes();
    assert_eq!(open("other").write(b"x", 0, WriteOrigin::Caller), Ok(1));
}

#[test]
fn a_whiteout_is_left_behind() {
    use nacre_vfs::{Errno, Kind, RenameFlags};
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = create(&device);
    let layer = dataset(&pool);
    let root = layer.root().unwrap().node;
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let create = |text| layer.create(&Caller::ROOT, &root, name(text), 0o600, OpenFlags::WRITE).unwrap();
    let rename = |old, new, flags| layer.rename(&Caller::ROOT, &root, name(old), &root, name(new), RenameFlags(flags));
    let file = create("f").0.attr.id;
    create("there");
    layer.mkdir(&Caller::ROOT, &root, name("d"), 0o755).unwrap();
    assert_eq!(rename("f", "there", RenameFlags::WHITEOUT | RenameFlags::NOREPLACE), Err(Errno::EEXIST));
    assert_eq!(rename("f", "there", RenameFlags::WHITEOUT | RenameFlags::EXCHANGE), Err(Errno::EINVAL));
    assert_eq!(rename("f", "there", RenameFlags::WHITEOUT), Ok(()));
    assert_eq!(rename("d", "moved", RenameFlags::WHITEOUT), Ok(()));
    pool.commit().unwrap();
    drop((layer, pool));
    let layer = dataset(&open(&device));
    let root = layer.root().unwrap().node;
    let attr = |text| layer.lookup(&Caller::ROOT, &root, name(text)).unwrap().attr;
    for left in ["f", "d"] {
        let attr = attr(left);
        assert_eq!(
            (attr.kind, attr.mode & 0o7777, attr.nlink, attr.rdev_major, attr.rdev_minor),
            (Kind::Character, 0, 1, 0, 0),
            "{left}"
        );
    }
    assert_eq!((attr("there").id, attr("moved").kind), (file, Kind::Directory));
    assert_eq!(layer.getattr(&Caller::ROOT, &root, None).unwrap().nlink, 3);
    layer.unlink(&Caller::ROOT, &root, name("f")).unwrap();
}

#[test]
fn capabilities_go_with_what_the_file_was() {
    use nacre_vfs::{Errno, XattrFlags};
    const CAPABILITY: &[u8] = b"security.capability";
    let layer = dataset(&create(&Arc::new(Simulator::new("disk", 128 << 20))));
    let root = layer.root().unwrap().node;
    let (entry, file) = layer.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o755, OpenFlags::WRITE).unwrap();
    let trust = || layer.setxattr(&Caller::ROOT, &entry.node, CAPABILITY, &[0; 20], XattrFlags::default()).unwrap();
    let trusted = || layer.getxattr(&Caller::ROOT, &entry.node, CAPABILITY, &mut [0; 64]);
    let truncated = || {
        let flags = OpenFlags(OpenFlags::WRITE.raw() | OpenFlags::TRUNC);
        layer.open(&Caller::ROOT, &entry.node, flags).unwrap();
    };
    layer.setxattr(&Caller::ROOT, &entry.node, b"user.kept", b"1", XattrFlags::default()).unwrap();
    let write = |bytes: &[u8], at| assert_eq!(file.write(bytes, at, WriteOrigin::Caller), Ok(bytes.len()));
    let changes: [(&dyn Fn(), &str); 5] = [
        (&|| write(b"first, in its row", 0), "a first write"),
        (&|| write(&[7; 200_000], 3), "a long one"),
        (&|| assert_eq!(file.append(b"x"), Ok(1)), "one at the end"),
        (&truncated, "opening that truncates"),
        (&truncated, "the same where there is nothing"),
    ];
    for (change, name) in changes {
        trust();
        assert_eq!(trusted(), Ok(20));
        change();
        assert_eq!(trusted(), Err(Errno::ENODATA), "{name}");
    }
    // A kernel with write-back caching does this itself.
    trust();
    file.write(b"y", 0, PAGES).unwrap();
    assert_eq!(trusted(), Ok(20));
    assert_eq!(layer.getxattr(&Caller::ROOT, &entry.node, b"user.kept", &mut [0; 4]), Ok(1));
}

#[test]
fn whoever_opens_a_file_to_read_it_is_noted() {
    use nacre_vfs::{SetAttr, SetTime, Time};
    let layer = dataset(&create(&Arc::new(Simulator::new("disk", 128 << 20))));
    let root = layer.root().unwrap().node;
    let (entry, _file) = layer.create(&Caller::ROOT, &root, Name::new(b"f").unwrap(), 0o644, OpenFlags::WRITE).unwrap();
    let long_ago = SetTime::To(Time { sec: 1_000_000_000, nsec: 5 });
    let old = SetAttr { atime: Some(long_ago), mtime: Some(long_ago), ..SetAttr::default() };
    let noted = |flags: OpenFlags| {
        layer.setattr(&Caller::ROOT, &entry.node, None, &old).unwrap();
        layer.open(&Caller::ROOT, &entry.node, flags).unwrap();
        layer.getattr(&Caller::ROOT, &entry.node, None).unwrap().atime.sec > 1_000_000_000
    };
    let noatime = OpenFlags(rustix::fs::OFlags::NOATIME.bits());
    assert_eq!(
        [OpenFlags::READ, noatime, OpenFlags::WRITE, OpenFlags::READ_WRITE].map(noted),
        [true, false, false, false]
    );
    layer.set_quiet(true);
    assert!(!noted(OpenFlags::READ));
}

#[test]
fn files_become_others_under_those_who_have_them_open() {
    let pool = create(&Arc::new(Simulator::new("disk", 128 << 20)));
    let layer = Arc::new(dataset(&pool));
    let id = layer.number();
    let root = layer.root().unwrap().node;
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let (entry, file) = layer.create(&Caller::ROOT, &root, name("f"), 0o600, OpenFlags::WRITE).unwrap();
    file.write(b"then", 0, WriteOrigin::Caller).unwrap();
    pool.snapshot(&[(id, "s".to_owned())]).unwrap();
    file.write(b"now!", 0, WriteOrigin::Caller).unwrap();
    // An operation during the pause waits, and gets the result.
    let late = |file: nacre_vfs::Opened| std::thread::spawn(move || file.write(b"late", 0, WriteOrigin::Caller));
    layer.hold();
    let waiting = late(Arc::clone(&file));
    layer.stays();
    assert_eq!(waiting.join().unwrap(), Ok(4));
    layer.hold();
    let waiting = late(Arc::clone(&file));
    pool.roll_back(id, "s").unwrap();
    layer.replaced();
    assert_eq!(waiting.join().unwrap(), Err(nacre_vfs::Errno::ESTALE));
    assert_eq!(file.write(b"late", 0, WriteOrigin::Caller), Err(nacre_vfs::Errno::ESTALE));
    // It is the same file, unchanged; so is the directory.
    let numbered = layer.capabilities().numbered.unwrap();
    let generation = numbered.generation(&entry.attr);
    let root = numbered.node(1).unwrap();
    let found = layer.lookup(&Caller::ROOT, &root, name("f")).unwrap();
    assert_eq!((found.attr.id, numbered.generation(&found.attr)), (entry.attr.id, generation));
    let mut content = [0; 10];
    assert_eq!(layer.open(&Caller::ROOT, &found.node, OpenFlags::READ).unwrap().read(&mut content, 0), Ok(4));
    assert_eq!(&content[..4], b"then");
}

#[test]
fn files_are_found_by_their_numbers_until_they_are_forgotten() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = create(&device);
    let layer = dataset(&pool);
    let root = layer.root().unwrap().node;
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let made = layer.mkdir(&Caller::ROOT, &root, name("d"), 0o755).unwrap();
    let below = layer.create(&Caller::ROOT, &made.node, name("f"), 0o600, OpenFlags::WRITE).unwrap().0;
    pool.snapshot(&[(pool.find("tank").unwrap().unwrap(), "then".to_owned())]).unwrap();
    let numbered = layer.capabilities().numbered.unwrap();
    let getattr = |number| numbered.node(number).and_then(|node| layer.getattr(&Caller::ROOT, &node, None));
    // The file of the snapshot has a number of its own, which leads to it.
    let control = layer.lookup(&Caller::ROOT, &root, name(".zfs")).unwrap().node;
    let snapshots = layer.lookup(&Caller::ROOT, &control, name("snapshot")).unwrap().node;
    let then = layer.lookup(&Caller::ROOT, &snapshots, name("then")).unwrap().node;
    let then = layer.lookup(&Caller::ROOT, &then, name("d")).unwrap();
    assert_ne!(then.attr.id.ino, made.attr.id.ino);
    for number in [made.attr.id.ino, below.attr.id.ino, then.attr.id.ino] {
        assert_eq!(getattr(number).unwrap().id.ino, number);
    }
    assert_eq!(numbered.parent(&numbered.node(made.attr.id.ino).unwrap()), layer.root().unwrap().attr.id.ino);
    // Without a name, and not open.
    let number = below.attr.id.ino;
    drop(below);
    layer.unlink(&Caller::ROOT, &made.node, name("f")).unwrap();
    pool.commit().unwrap();
    assert_eq!(getattr(number).unwrap().nlink, 0);
    numbered.forgotten(number);
    pool.commit().unwrap();
    assert!(getattr(number).is_err());
}

#[test]
fn without_acls_there_are_none_to_be_seen_or_set() {
    use nacre_pool::engine::{Edit, Setting};
    use nacre_vfs::{Errno, XattrFlags};
    const ACCESS: &[u8] = b"system.posix_acl_access";
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let pool = create(&device);
    // Version 2: user 7 may read, as may the group.
    let entry = |tag: u8, bits: u8, id: u32| [&[tag, 0, bits, 0][..], &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let entries = [entry(1, 6, none), entry(2, 4, 7), entry(4, 4, none), entry(16, 4, none), entry(32, 0, none)];
    let acl = [&[2, 0, 0, 0][..], &entries.concat()].concat();
    let find = |layer: &Dataset| {
        layer.lookup(&Caller::ROOT, &layer.root().unwrap().node, Name::new(b"a").unwrap()).unwrap().node
    };
    let layer = dataset(&pool);
    layer
        .create(&Caller::ROOT, &layer.root().unwrap().node, Name::new(b"a").unwrap(), 0o600, OpenFlags::READ_WRITE)
        .unwrap();
    layer.setxattr(&Caller::ROOT, &find(&layer), ACCESS, &acl, XattrFlags::default()).unwrap();
    layer.setxattr(&Caller::ROOT, &find(&layer), b"user.b", b"c", XattrFlags::default()).unwrap();
    assert!(layer.capabilities().acls);
    let id = pool.find("tank").unwrap().unwrap();
    let set = |value: &str| Edit { dataset: id, name: "acltype".to_owned(), to: Setting::Local(value.to_owned()) };
    pool.set_properties(&[set("off")]).unwrap();
    // The kernel was told in the negotiation that there are some: this does not change during a
    // mount.
    assert!(layer.capabilities().acls && layer.getxattr(&Caller::ROOT, &find(&layer), ACCESS, &mut []).is_ok());
    let off = dataset(&pool);
    assert!(!off.capabilities().acls);
    assert_eq!(off.getxattr(&Caller::ROOT, &find(&off), ACCESS, &mut []), Err(Errno::ENODATA));
    assert_eq!(off.setxattr(&Caller::ROOT, &find(&off), ACCESS, &acl, XattrFlags::default()), Err(Errno::EOPNOTSUPP));
    assert_eq!(off.removexattr(&Caller::ROOT, &find(&off), ACCESS), Err(Errno::EOPNOTSUPP));
    let mut names = [0; 64];
    let length = off.listxattr(&Caller::ROOT, &find(&off), &mut names).unwrap();
    assert_eq!(&names[..length], b"user.b\0");
    pool.set_properties(&[set("posix")]).unwrap();
    assert!(dataset(&pool).capabilities().acls, "what was set is there again");
}

#[test]
fn what_a_listing_has_shown_without_an_acl_may_get_one() {
    use nacre_vfs::{DirEntry, DirSink, Errno, XattrFlags};
    const ACCESS: &[u8] = b"system.posix_acl_access";
    const DEFAULT: &[u8] = b"system.posix_acl_default";
    struct Numbers(Vec<u64>);
    impl DirSink for Numbers {
        fn push(&mut self, entry: DirEntry<'_>) -> bool {
            self.0.push(entry.ino);
            true
        }
        fn room(&self, _attributes: bool) -> usize {
            200
        }
    }
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let layer = dataset(&create(&device));
    let root = layer.root().unwrap().node;
    let make = |name: &str| {
        let name = Name::new(name.as_bytes()).unwrap();
        layer.create(&Caller::ROOT, &root, name, 0o660, OpenFlags::READ_WRITE).unwrap().0.attr.id.ino
    };
    (0..100).for_each(|number| _ = make(&format!("f{number}")));
    let list = || {
        let mut seen = Numbers(Vec::new());
        layer.readdir(&Caller::ROOT, &root, 0, true, &mut seen).unwrap();
        seen.0
    };
    let numbers = list();
    assert_eq!(numbers.len(), 100);
    let entry = |tag: u8, bits: u8, id: u32| [&[tag, 0, bits, 0][..], &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let entries = [entry(1, 6, none), entry(2, 4, 7), entry(4, 4, none), entry(16, 4, none), entry(32, 0, none)];
    let acl = [&[2, 0, 0, 0][..], &entries.concat()].concat();
    // By number, like the FUSE front end.
    let node = |number: u64| layer.capabilities().numbered.unwrap().node(number).unwrap();
    let ask = |number: u64, name: &[u8]| layer.getxattr(&Caller::ROOT, &node(number), name, &mut []);
    let (with, other) = (numbers[50], numbers[51]);
    for _ in 0..2 {
        assert_eq!((ask(with, ACCESS), ask(other, ACCESS)), (Err(Errno::ENODATA), Err(Errno::ENODATA)));
        layer.setxattr(&Caller::ROOT, &node(with), ACCESS, &acl, XattrFlags::default()).unwrap();
        assert_eq!((ask(with, ACCESS), ask(other, ACCESS)), (Ok(acl.len()), Err(Errno::ENODATA)));
        list();
        assert_eq!((ask(with, ACCESS), ask(other, ACCESS)), (Ok(acl.len()), Err(Errno::ENODATA)));
        layer.removexattr(&Caller::ROOT, &node(with), ACCESS).unwrap();
        list();
    }
    layer.setxattr(&Caller::ROOT, &root, DEFAULT, &acl, XattrFlags::default()).unwrap();
    let heir = make("heir");
    assert_eq!((ask(heir, ACCESS), ask(other, ACCESS)), (Ok(acl.len()), Err(Errno::ENODATA)));
    list();
    assert_eq!(ask(heir, ACCESS), Ok(acl.len()));
    layer.unlink(&Caller::ROOT, &root, Name::new(b"f51").unwrap()).unwrap();
    layer.capabilities().numbered.unwrap().forgotten(other);
    assert!(ask(other, ACCESS).is_err());
}

#[test]
fn flags_are_read_while_a_rollback_waits_for_their_reader() {
    use super::file_flags;
    use super::mounted_tree::NodeKind;
    use nacre_vfs::Ioctl;
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let layer = dataset(&create(&device));
    let root = layer.root().unwrap();
    let Ok(NodeKind::File(file_node)) = layer.node_kind(&root.node) else { panic!("the root is no file of a tree") };
    let tree = &file_node.tree;
    let entered = tree.enter().unwrap();
    std::thread::scope(|scope| {
        let rollback = scope.spawn(|| layer.hold());
        while !tree.is_paused() {
            std::thread::yield_now();
        }
        let (tell, told) = channel();
        scope.spawn(move || {
            let request = Ioctl { command: Ioctl::GET_FLAGS, argument: 0, input: &[] };
            tell.send(file_flags::ioctl(tree.files.files(), file_node, &request, &mut [0; 4])).unwrap();
        });
        let answer = told.recv_timeout(std::time::Duration::from_secs(60));
        drop(entered);
        rollback.join().unwrap();
        layer.stays();
        assert_eq!(answer, Ok(Ok((0, 4))));
    });
}

#[test]
fn a_minimal_acl_takes_a_list_and_the_bits_of_its_mask_away_in_one_step() {
    use nacre_pool::files::Table;
    use nacre_pool::rows::{InodeRow, keys};
    use nacre_vfs::XattrFlags;
    use std::sync::OnceLock;
    const ACCESS: &[u8] = b"system.posix_acl_access";
    let new =
        NewPool { name: "tank".to_owned(), guid: 7, host: (1, "here".to_owned()), time: 1, redundant_metadata: true };
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let usual = config(Store::create(vec![device as Arc<dyn Device>], &new).unwrap().0);
    // Each change of a file reads the clock before the table has it.
    let look = Arc::new(OnceLock::<Box<dyn Fn() + Send + Sync>>::new());
    let (looks, clock) = (Arc::clone(&look), Arc::clone(&usual.clock));
    let clock = Arc::new(move || {
        looks.get().into_iter().for_each(|look| look());
        clock()
    });
    let pool = Arc::new(Pool::create(PoolConfig { clock, ..usual }, "tank").unwrap());
    let layer = dataset(&pool);
    let (root, name) = (layer.root().unwrap().node, Name::new(b"f").unwrap());
    let (made, _) = layer.create(&Caller::ROOT, &root, name, 0o600, OpenFlags::READ_WRITE).unwrap();
    let (number, files) = (made.attr.id.ino, pool.dataset(layer.number()).unwrap());
    let looked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&looked);
    let see = move || {
        let row = |key: &[u8]| files.files().look_at_table(|table| table.get(key)).unwrap();
        let mode = InodeRow::decode(&row(&keys::inode(number)).unwrap()).unwrap().mode;
        assert!(mode & 0o070 == 0 || row(&keys::xattr(number, ACCESS)).is_some(), "the group may do what bob may");
        counted.fetch_add(1, Ordering::Relaxed);
    };
    assert!(look.set(Box::new(see)).is_ok());
    let entry = |tag: u8, bits: u8, id: u32| [&[tag, 0, bits, 0][..], &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let (user, group, other) = (entry(1, 6, none), entry(4, 0, none), entry(32, 0, none));
    let list = |entries: &[Vec<u8>]| [&[2, 0, 0, 0][..], &entries.concat()].concat();
    let with_bob = list(&[user.clone(), entry(2, 6, 7), group.clone(), entry(16, 6, none), other.clone()]);
    let mode = || layer.getattr(&Caller::ROOT, &made.node, None).unwrap().mode & 0o777;
    layer.setxattr(&Caller::ROOT, &made.node, ACCESS, &with_bob, XattrFlags::default()).unwrap();
    assert_eq!(mode(), 0o660);
    layer.setxattr(&Caller::ROOT, &made.node, ACCESS, &list(&[user, group, other]), XattrFlags::default()).unwrap();
    assert_eq!(mode(), 0o600);
    assert!(looked.load(Ordering::Relaxed) >= 2);
}
