//! Tests of files over a map: each operation by itself, then random ones against a plain model,
//! with flushes and reopening.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::error::Damage;
use crate::frames::NewFrame;
use crate::log::LogChange;
use crate::rows::{Entry, FileType, InodeRow, OwnerKind};
use crate::space::Purpose;

mod cuts;
mod failing;
mod flush_parts;
mod folded;
mod rot;
mod row_charges;
mod split;

#[derive(Clone, Default)]
struct MapTable(Rows, Arc<Watched>);

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// Injected errors and statistics of a table.
#[derive(Default)]
struct Watched {
    /// Rows that cannot be read.
    rotten: Mutex<Vec<Vec<u8>>>,
    /// All changes fail.
    refuses: AtomicBool,
    /// Rows that scans have shown.
    shown: AtomicU64,
    /// The most changes of a batch.
    longest: AtomicUsize,
    /// The rows after each batch, if a test needs them.
    history: Mutex<Option<Vec<Rows>>>,
}

impl Watched {
    fn look(&self, key: &[u8]) -> std::result::Result<(), PoolError> {
        let rotten = self.rotten.lock().iter().any(|row| row == key);
        if rotten { Err(PoolError::Format(Damage::Checksum)) } else { Ok(()) }
    }
}

/// Admits everything.
#[derive(Default)]
struct Unlimited {
    is_short: AtomicBool,
}

impl Admission for Unlimited {
    fn admit(&self, _: u64, _: u64, _: Option<Purpose>) -> Result<()> {
        Ok(())
    }

    fn admit_replacing(&self, _: u64, _: &Overwrite) -> Result<()> {
        Ok(())
    }

    fn check(&self, _: u64, _: u64, _: Purpose) -> Result<()> {
        Ok(())
    }

    fn charge(&self, _: u64, _: Txg, _: u64, _: u64) {}

    fn dirtied(&self, _: u64, _: Txg, _: u64) {}

    fn room_before_cleaning(&self) -> u64 {
        u64::MAX
    }

    fn relieve(&self, _: Option<u64>, _: bool) -> std::result::Result<bool, PoolError> {
        Ok(false)
    }

    fn room(&self, _: u64) -> u64 {
        u64::MAX
    }

    fn is_short(&self, _: u64) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }
}

impl Table for MapTable {
    /// None of it is ever written.
    fn dirty_bytes(&self) -> u64 {
        0
    }

    fn get(&self, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, PoolError> {
        self.1.look(key)?;
        Ok(self.0.get(key).cloned())
    }

    fn scan(
        &self,
        range: Range<Vec<u8>>,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> std::result::Result<(), PoolError> {
        for (key, row) in self.0.range(range) {
            self.1.look(key)?;
            self.1.shown.fetch_add(1, Ordering::Relaxed);
            if !visit(key, row) {
                break;
            }
        }
        Ok(())
    }

    fn change(&mut self, _: Txg, changes: &[Change<'_>]) -> std::result::Result<(), PoolError> {
        if self.1.refuses.load(Ordering::Relaxed) {
            return Err(PoolError::Format(Damage::Checksum));
        }
        changes.iter().try_for_each(|change| self.1.look(change.key))?;
        self.1.longest.fetch_max(changes.len(), Ordering::Relaxed);
        for change in changes {
            match change.row {
                Some(row) => self.0.insert(change.key.to_vec(), row.to_vec()),
                None => self.0.remove(change.key),
            };
        }
        if let Some(history) = &mut *self.1.history.lock() {
            history.push(self.0.clone());
        }
        Ok(())
    }
}

#[derive(Default)]
struct MapFrames {
    content: Mutex<BTreeMap<u32, Arc<[u8]>>>,
    next: AtomicU32,
    /// Frames that cannot be read.
    rotten: Mutex<Vec<u32>>,
    /// Writes that still succeed; negative: all.
    room: AtomicI64,
    /// Frames are stored as if they were sealed.
    sealed: std::sync::atomic::AtomicBool,
    /// Called by each write.
    on_write: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl Frames for MapFrames {
    fn read(&self, pointer: &Pointer) -> std::result::Result<Arc<[u8]>, PoolError> {
        if self.rotten.lock().contains(&pointer.index) {
            return Err(PoolError::Frame { pointer: *pointer, damage: Damage::Checksum });
        }
        Ok(self.content.lock().get(&pointer.index).cloned().expect("a frame that was freed is read"))
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> std::result::Result<Pointer, PoolError> {
        if self.room.load(Ordering::Relaxed) == 0 {
            return Err(PoolError::NoSpace);
        }
        self.room.fetch_sub(1, Ordering::Relaxed);
        let on_write = self.on_write.lock().clone();
        on_write.iter().for_each(|call| call());
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        self.content.lock().insert(index, frame.content.into());
        let is_sealed = self.sealed.load(Ordering::Relaxed);
        // Zeros are compressed, other content is not.
        let stored = if frame.content.iter().all(|byte| *byte == 0) { 16 } else { frame.content.len() as u32 };
        Ok(Pointer {
            segment: 1,
            index,
            offset: 0,
            stored: if is_sealed { (stored + 64).next_multiple_of(16) } else { stored },
            logical: frame.content.len() as u32,
            kind: frame.kind,
            compression: crate::Compression::Off,
            checksum_kind: if is_sealed { ChecksumKind::Sealed } else { frame.checksum },
            pin: u8::from(is_sealed),
            birth: frame.birth,
            checksum: [0; 16],
        })
    }
}

fn config(frames: &Arc<MapFrames>) -> FilesConfig {
    let ticks = AtomicI64::new(0);
    FilesConfig {
        dataset: 5,
        gate: Arc::new(Gate::new(Txg(7))),
        frames: Arc::clone(frames) as Arc<dyn Frames>,
        clock: Arc::new(move || Timestamp { seconds: ticks.fetch_add(1, Ordering::Relaxed), nanoseconds: 0 }),
        throttle: Arc::default(),
        admission: Arc::new(Unlimited::default()),
        storing: Storing { record_shift: 12, compression: CompressionSetting::Lz4, checksum: ChecksumKind::Xxh3 },
        longest_record: 1 << 24,
    }
}

fn empty() -> (Files<MapTable>, Arc<MapFrames>) {
    let frames = Arc::new(MapFrames { room: AtomicI64::new(-1), ..MapFrames::default() });
    (
        Files::format(
            config(&frames),
            MapTable::default(),
            NewFiles { hashing: keys::Hashing::Ordered, folding: Folding::EXACT, seed: 99, owner: (0, 0) },
        )
        .unwrap(),
        frames,
    )
}

fn new(file_type: FileType) -> impl Fn(&ParentView) -> Result<NewInode> {
    move |parent| {
        let mut row = InodeRow::new(file_type, 0o644, parent.now);
        (row.uid, row.gid) = (10, 20);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    }
}

type MapFiles = Files<MapTable>;

fn make(files: &MapFiles, directory: &Inode, name: &[u8], file_type: FileType) -> Arc<Inode> {
    files.make(directory, name, b"", &new(file_type)).unwrap().0
}

fn content(files: &MapFiles, inode: &Inode) -> Vec<u8> {
    let size = files.attributes(inode).unwrap().size as usize;
    let mut all = vec![1; size + 10];
    assert_eq!(files.read(inode, 0, &mut all).unwrap(), size);
    all.truncate(size);
    all
}

fn names(files: &MapFiles, directory: &Inode) -> Vec<Vec<u8>> {
    files.list(directory, 0, false, usize::MAX).unwrap().into_iter().map(|entry| entry.name).collect()
}

/// Checks everything that must hold between the rows: counts, sizes, names by hash and by sequence,
/// usage of owners; and that rows reference exactly the frames that were written and not freed.
fn check(files: &MapFiles, frames: &MapFrames, freed: &mut Vec<Dead>) {
    let entered = files.gate.enter();
    files.flush(entered.txg()).unwrap();
    drop(entered);
    for pointer in files.take_freed() {
        assert!(frames.content.lock().remove(&pointer.index).is_some(), "freed twice");
        freed.push(pointer);
    }
    let table = files.with_table(|table| table.clone());
    let (mut links, mut sizes, mut uses) = (BTreeMap::<u64, u32>::new(), BTreeMap::<u64, u64>::new(), BTreeMap::new());
    let (mut named, mut inodes, mut by_hash, mut entries) = (BTreeMap::new(), BTreeMap::new(), 0, 0);
    let (mut reached, mut row_charges, mut row_sums) = (Vec::new(), BTreeMap::new(), BTreeMap::<u64, u64>::new());
    for (key, row) in &table.0 {
        if let Some((inode, bytes)) = super::row_charges::charge_of(key, row) {
            *row_sums.entry(inode).or_default() += bytes;
        }
        match keys::Key::decode(key).unwrap() {
            keys::Key::Inode(number) => {
                inodes.insert(number, InodeRow::decode(row).unwrap());
                let rows = InodeRow::decode_charged(row).unwrap().1;
                row_charges.insert(number, rows);
            }
            keys::Key::Entry { directory, sequence } => {
                let entry = crate::rows::Entry::decode(row).unwrap();
                entries += 1;
                *links.entry(entry.inode).or_default() += 1;
                *sizes.entry(directory).or_default() += 1;
                if entry.file_type == FileType::Directory {
                    *links.entry(directory).or_default() += 1;
                    *links.entry(entry.inode).or_default() += 1;
                }
                named.insert((directory, sequence), entry.inode);
                let key = keys::name(directory, keys::ordered_hash(99, &files.folding().fold(entry.name)), sequence);
                assert!(table.0.contains_key(key.as_slice()));
            }
            keys::Key::Name { .. } => by_hash += 1,
            keys::Key::Extent { inode, .. } => {
                if let Some(pointer) = crate::rows::Extent::decode(row).unwrap().pointer() {
                    reached.push(pointer.index);
                    *sizes.entry(u64::MAX - inode).or_default() += pointer.charged();
                }
            }
            keys::Key::Patch { inode, record, .. } => {
                let patch = crate::rows::Patch::decode(row).unwrap();
                reached.push(patch.pointer.index);
                *sizes.entry(u64::MAX - inode).or_default() += patch.pointer.charged();
                assert!(inodes[&inode].flags & crate::rows::inode::flags::HAS_PATCHES != 0);
                let base = table.0.get(keys::extent(inode, record).as_slice()).expect("the record of a patch");
                let base = *crate::rows::Extent::decode(base).unwrap().pointer().unwrap();
                assert!(patch.pieces.iter().all(|(from, length)| from + length <= base.logical));
            }
            keys::Key::Xattr { inode, .. } => {
                if let crate::rows::Xattr::Frame(pointer) = crate::rows::Xattr::decode(row).unwrap() {
                    reached.push(pointer.index);
                    *sizes.entry(u64::MAX - inode).or_default() += pointer.charged();
                }
            }
            _ => {}
        }
    }
    assert_eq!(by_hash, entries);
    assert_eq!(inodes.len() as u64, files.objects());
    for (number, row) in &inodes {
        let root = u32::from(*number == 1) * 2;
        assert_eq!(row.links, links.get(number).copied().unwrap_or(0) + root, "links of {number}");
        if row.file_type() == Some(FileType::Directory) {
            assert_eq!(row.size, sizes.get(number).copied().unwrap_or(0), "names in {number}");
        }
        if let Some(hint) = row.hint.filter(|_| row.file_type() == Some(FileType::Directory) && row.links > 0) {
            assert_eq!(named.get(&(hint.directory, hint.sequence)), Some(number));
        }
        let rows = super::row_charges::INODE + row_sums.get(number).copied().unwrap_or(0);
        assert_eq!(row_charges[number], rows, "rows of {number}");
        assert_eq!(row.charged, sizes.get(&(u64::MAX - number)).copied().unwrap_or(0), "charged to {number}");
        for owner in [(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)] {
            let used: &mut crate::rows::OwnerUse = uses.entry(owner).or_default();
            used.bytes += row.charged + row_charges[number];
            used.objects += 1;
        }
    }
    for (owner, used) in &uses {
        let row = table.0.get(keys::owner_use(owner.0, owner.1).as_slice()).expect("the use of an owner");
        assert_eq!(crate::rows::OwnerUse::decode(row).unwrap(), *used, "{owner:?}");
    }
    reached.sort_unstable();
    assert_eq!(reached, frames.content.lock().keys().copied().collect::<Vec<_>>());
}

#[test]
fn names_are_made_found_listed_and_taken() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    let d = make(&files, &root, b"d", FileType::Directory);
    assert!(matches!(files.make(&root, b"a", b"", &new(FileType::Regular)), Err(FileError::Exists)));
    assert!(matches!(files.make(&a, b"x", b"", &new(FileType::Regular)), Err(FileError::NotDirectory)));
    assert!(matches!(files.make(&root, &[b'n'; 256], b"", &new(FileType::Regular)), Err(FileError::NameTooLong)));
    make(&files, &root, &[0xff; 255], FileType::Regular);
    assert_eq!(files.look_up(&root, b"a").unwrap().0.number(), a.number());
    assert!(matches!(files.look_up(&root, b"b"), Err(FileError::NotFound)));
    assert!(matches!(files.look_up(&a, b"b"), Err(FileError::NotDirectory)));
    assert_eq!(names(&files, &root), [b"a".to_vec(), b"d".to_vec(), vec![0xff; 255]]);
    let first = files.list(&root, 0, true, 1).unwrap();
    let rest = files.list(&root, first[0].sequence, true, 9).unwrap();
    assert_eq!((first.len(), rest.len(), rest[0].name.as_slice()), (1, 2, b"d".as_slice()));
    let inside = make(&files, &d, b"f", FileType::Regular);
    assert_eq!(files.path(&inside).unwrap().unwrap(), b"d/f");
    assert!(matches!(files.remove_directory(&root, b"d"), Err(FileError::NotEmpty)));
    assert!(matches!(files.unlink(&root, b"d"), Err(FileError::IsDirectory)));
    assert!(matches!(files.remove_directory(&root, b"a"), Err(FileError::NotDirectory)));
    files.unlink(&d, b"f").unwrap();
    files.remove_directory(&root, b"d").unwrap();
    assert!(matches!(files.make(&d, b"x", b"", &new(FileType::Regular)), Err(FileError::NotFound)));
    assert_eq!(files.attributes(&d).unwrap().links, 0);
    // The listing holds the inodes that it has shown.
    drop((d, inside));
    assert_eq!(files.free_released(u64::MAX).unwrap().gone, 1);
    drop((first, rest));
    assert_eq!(files.free_released(u64::MAX).unwrap().gone, 1);
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn a_listing_meets_each_name_once_and_none_that_came_later() {
    let (files, frames) = empty();
    let root = files.root();
    let _made: Vec<Arc<Inode>> = (b'a'..=b'h').map(|name| make(&files, &root, &[name], FileType::Regular)).collect();
    let end = files.next_sequence();
    let listed = |behind: u64, end: u64, most: usize| {
        let mut names = Vec::new();
        let visit = &mut |seen: &SeenEntry<'_>| {
            names.push((seen.sequence, String::from_utf8(seen.name.to_vec()).unwrap()));
            names.len() < most
        };
        files.visit(&root, (behind, end), Some(&|_| true), most, visit).unwrap();
        names
    };
    let first = listed(0, end, 2);
    // Moved to before and after the listing's position; put over another; exchanged; new; one that
    // leaves a whiteout.
    for (old, new, replace) in
        [("a", "moved-a", MayReplace::No), ("c", "moved-c", MayReplace::No), ("d", "e", MayReplace::Yes)]
    {
        files.rename((&root, old.as_bytes()), (&root, new.as_bytes()), replace).unwrap();
    }
    files.rename((&root, b"f"), (&root, b"g"), MayReplace::Exchange).unwrap();
    files.rename_leaving((&root, b"h"), (&root, b"moved-h"), MayReplace::No, &new(FileType::CharDevice)).unwrap();
    make(&files, &root, b"new", FileType::Regular);
    let rest = listed(first[1].0, end, 100);
    let told = |listed: &[(u64, String)]| listed.iter().map(|(_, name)| name.clone()).collect::<Vec<_>>().join(" ");
    assert_eq!((told(&first), told(&rest)), ("a b".to_owned(), "moved-c e f g h".to_owned()));
    assert_eq!(listed(rest[4].0, end, 100), []);
    assert_eq!(told(&listed(0, files.next_sequence(), 100)), "moved-a b moved-c e f g h moved-h new");
    assert_eq!(files.look_up(&root, b"h").unwrap().1.file_type(), Some(FileType::CharDevice));
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn times_are_those_that_whoever_keeps_them_tells() {
    let (files, _) = empty();
    let root = files.root();
    let file = make(&files, &root, b"f", FileType::Regular);
    let at = |seconds| Timestamp { seconds, nanoseconds: 5 };
    let told = |modified, changed| {
        let change =
            AttributeChange { modified: Some(TimeChange::To(at(modified))), changed, ..AttributeChange::default() };
        let row = files.set_attributes(&file, &change).unwrap();
        (row.modified, row.changed)
    };
    let now = || {
        let row = files.attributes(&file).unwrap();
        (row.modified, row.changed)
    };
    files.write(&file, Some(0), &[1; 10_000]).unwrap();
    assert_eq!(told(-7, ChangedTime::To(at(-8))), (at(-7), at(-8)));
    // A late write-back: short, long, and the first of a file.
    files.write_held(&file, Some(0), b"late", true).unwrap();
    files.write_held(&file, Some(0), &[2; 300_000], true).unwrap();
    let small = make(&files, &root, b"g", FileType::Regular);
    let made = files.attributes(&small).unwrap().changed;
    files.write_held(&small, Some(0), b"late", true).unwrap();
    assert_eq!(files.attributes(&small).unwrap().changed, made);
    // The size that it has.
    let resized = AttributeChange { size: Some(300_000), changed: ChangedTime::Stays, ..AttributeChange::default() };
    files.set_attributes(&file, &resized).unwrap();
    // A copy that the kernel asked for, shared or written, and an allocation.
    let source = make(&files, &root, b"source", FileType::Regular);
    files.write(&source, Some(0), &[3; 8192]).unwrap();
    let range = super::Range { from: 0, to: 0, length: 4096 };
    assert_eq!(files.share_timed(&source, &file, range, true).unwrap(), 4096);
    files.write_stored(&file, 4096, &[3; 100], true).unwrap();
    files.zero_timed(&file, 8192, 4096, false, true).unwrap();
    assert_eq!(now(), (at(-7), at(-8)));
    // Without a given time each change has the time of the clock.
    files.write_held(&file, Some(0), b"late", false).unwrap();
    assert!(now().0 > at(0) && now().1 > at(0));
    files.unlink(&root, b"f").unwrap();
    assert_eq!(told(-9, ChangedTime::To(at(-10))), (at(-9), at(-10)), "nor does a file without a name forget it");
}

#[test]
fn a_file_without_a_name_lives_while_it_is_held() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    let data = vec![7; 100_000];
    files.write(&a, Some(0), &data).unwrap();
    files.unlink(&root, b"a").unwrap();
    check(&files, &frames, &mut Vec::new());
    assert_eq!(files.free_released(u64::MAX).unwrap().gone, 0);
    assert_eq!(content(&files, &a), data);
    assert!(matches!(files.link(&a, &root, b"b"), Err(FileError::NotFound)));
    let (t, row) = files.make_nameless(&root, b"", true, &new(FileType::Regular)).unwrap();
    assert_eq!(row.links, 0);
    files.write(&t, Some(0), b"tmp").unwrap();
    files.link(&t, &root, b"t").unwrap();
    drop((a, t));
    assert_eq!(files.free_released(u64::MAX).unwrap().gone, 1);
    check(&files, &frames, &mut Vec::new());
    assert_eq!(content(&files, &files.look_up(&root, b"t").unwrap().0), b"tmp");
    // Orphans of a crash are freed at the next import.
    let held = files.make_nameless(&root, b"", true, &new(FileType::Regular)).unwrap().0;
    files.write(&held, Some(0), &data).unwrap();
    check(&files, &frames, &mut Vec::new());
    let reopened = Files::open(config(&frames), files.with_table(|table| table.clone())).unwrap();
    assert_eq!(reopened.free_orphans().unwrap(), 1);
    check(&reopened, &frames, &mut Vec::new());
}

#[test]
fn holes_are_found_and_made() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    files.write(&a, Some(3 * 4096), &[5; 4096]).unwrap();
    files.write(&a, Some(10 * 4096 + 1), b"x").unwrap();
    assert_eq!(files.seek(&a, 0, SeekTo::Data).unwrap(), 3 * 4096);
    assert_eq!(files.seek(&a, 0, SeekTo::Hole).unwrap(), 0);
    assert_eq!(files.seek(&a, 3 * 4096 + 5, SeekTo::Hole).unwrap(), 4 * 4096);
    assert_eq!(files.seek(&a, 5 * 4096, SeekTo::Data).unwrap(), 10 * 4096);
    assert_eq!(files.seek(&a, 10 * 4096, SeekTo::Hole).unwrap(), 10 * 4096 + 2);
    assert!(matches!(files.seek(&a, 10 * 4096 + 2, SeekTo::Data), Err(FileError::NoData)));
    check(&files, &frames, &mut Vec::new());
    files.zero(&a, 0, 1 << 40, false).unwrap();
    assert_eq!(files.attributes(&a).unwrap().size, 10 * 4096 + 2);
    assert!(matches!(files.seek(&a, 0, SeekTo::Data), Err(FileError::NoData)));
    check(&files, &frames, &mut Vec::new());
    assert_eq!(files.attributes(&a).unwrap().charged, 0);
    files.zero(&a, 0, 1 << 40, true).unwrap();
    assert_eq!(files.attributes(&a).unwrap().size, 1 << 40);
    // Zeros are a hole where content may be compressed.
    files.write(&a, Some(0), &[0; 8192]).unwrap();
    check(&files, &frames, &mut Vec::new());
    assert_eq!(files.attributes(&a).unwrap().charged, 0);
    assert!(matches!(files.write(&a, Some(i64::MAX as u64), b"x"), Err(FileError::TooLarge)));
}

#[test]
fn a_file_is_made_no_longer_than_its_bound() {
    let (files, _) = empty();
    let a = make(&files, &files.root(), b"a", FileType::Regular);
    let sized = |size| files.set_attributes(&a, &AttributeChange { size: Some(size), ..AttributeChange::default() });
    let too_large = |outcome: super::Result<()>| assert!(matches!(outcome, Err(FileError::TooLarge)), "{outcome:?}");
    assert_eq!(sized(SIZE_MOST).unwrap().size, SIZE_MOST);
    files.write(&a, Some(SIZE_MOST - 1), b"x").unwrap();
    files.check_write(&a, Some(SIZE_MOST - 1), 1).unwrap();
    files.check_write(&a, Some(SIZE_MOST), 0).unwrap();
    too_large(files.check_write(&a, Some(SIZE_MOST), 1));
    too_large(files.check_write(&a, Some(u64::MAX), 1));
    too_large(files.check_write(&a, None, 1));
    too_large(sized(SIZE_MOST + 1).map(drop));
    too_large(files.zero(&a, SIZE_MOST, 1, true));
    too_large(files.would_fill(&a, SIZE_MOST, 1));
    assert_eq!(files.attributes(&a).unwrap().size, SIZE_MOST);
    // What a kernel has collected is kept, and holes can be made of it.
    files.write_held(&a, Some(SIZE_MOST), b"more", false).unwrap();
    assert_eq!(files.attributes(&a).unwrap().size, SIZE_MOST + 4);
    files.zero(&a, SIZE_MOST, 4, false).unwrap();
    assert_eq!(sized(1).unwrap().size, 1);
}

#[test]
fn numbers_end_with_an_error() {
    let (files, frames) = empty();
    let root = files.root();
    files.numbers.next.store(keys::NUMBER_MOST - 1, Ordering::Relaxed);
    let last = make(&files, &root, b"last", FileType::Regular);
    assert_eq!(last.number(), keys::NUMBER_MOST - 1);
    for _ in 0..3 {
        let refused = files.make(&root, b"more", b"", &new(FileType::Regular));
        assert!(matches!(refused, Err(FileError::Pool(PoolError::NoSpace))), "{refused:?}");
        let refused = files.link(&last, &root, b"link");
        assert!(matches!(refused, Err(FileError::Pool(PoolError::NoSpace))), "{refused:?}");
    }
    // A log with a number above the limit is forged.
    let entry = Entry { inode: u64::MAX, file_type: FileType::Regular, name: b"forged" }.encode();
    files.replay(&LogChange::Put { key: &keys::entry(root.number(), 7), value: &entry }).unwrap();
    assert_eq!(files.numbers.next.load(Ordering::Relaxed), keys::NUMBER_MOST);
    files.replay(&LogChange::Delete { key: &keys::entry(root.number(), 7) }).unwrap();
    files.rename((&root, b"last"), (&root, b"renamed"), MayReplace::Yes).unwrap();
    assert_eq!(names(&files, &root), [b"renamed"]);
    files.unlink(&root, b"renamed").unwrap();
    drop(last);
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn a_full_pool_loses_nothing_that_was_accepted() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    let data: Vec<u8> = (0..40_000u32).map(|byte| byte as u8 | 1).collect();
    frames.room.store(5, Ordering::Relaxed);
    let outcome = files.write(&a, Some(0), &data).unwrap();
    assert_eq!(outcome.written, 5 * 4096);
    assert!(matches!(files.write(&a, Some(5 * 4096), &data), Err(FileError::Pool(PoolError::NoSpace))));
    files.write(&a, Some(100), b"parts are kept in memory").unwrap();
    files.write(&a, Some(5000), b"until there is room").unwrap();
    // Operations on other files succeed, and a sync of it or a further write fails.
    let other = make(&files, &root, b"other", FileType::Regular);
    files.flush(Txg(7)).unwrap();
    assert!(files.look_at_table(|table| table.0.contains_key(keys::inode(other.number()).as_slice())));
    assert!(matches!(a.check_synced(), Err(FileError::Pool(PoolError::NoSpace))));
    assert!(matches!(files.write(&a, Some(100), b"more"), Err(FileError::Pool(PoolError::NoSpace))));
    let mut expected = data[..5 * 4096].to_vec();
    expected[100..124].copy_from_slice(b"parts are kept in memory");
    expected[5000..5019].copy_from_slice(b"until there is room");
    assert_eq!(content(&files, &a), expected);
    frames.room.store(-1, Ordering::Relaxed);
    check(&files, &frames, &mut Vec::new());
    assert_eq!(files.buffered(), 0);
    assert_eq!(content(&files, &a), expected);
    a.check_synced().unwrap();
    // If there is no room for long, it is given up: memory is not held for ever.
    files.write(&a, Some(100), b"gone with the next commits").unwrap();
    frames.room.store(0, Ordering::Relaxed);
    (7..67).for_each(|txg| files.flush(Txg(txg)).unwrap());
    assert!(files.buffered() > 0);
    files.flush(Txg(67)).unwrap();
    assert_eq!(files.buffered(), 0);
    assert!(a.check_synced().is_err() && a.check_synced().is_ok());
    assert_eq!(content(&files, &a), expected);
}

#[test]
fn small_writes_into_records_are_patches_until_there_are_too_many() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    let mut expected: Vec<u8> = (0..20_000u32).map(|byte| (byte / 3) as u8 | 1).collect();
    files.write(&a, Some(0), &expected).unwrap();
    check(&files, &frames, &mut Vec::new());
    let patches = |files: &MapFiles| {
        let kinds = files.look_at_table(|table| table.0.keys().filter(|key| key[0] == keys::PATCH).count());
        (kinds, frames.content.lock().len())
    };
    assert_eq!(patches(&files), (0, 5));
    for round in 0..30usize {
        // Two parts of one record and one of another, overlapping those of the rounds before; each
        // is read back before and after it is stored.
        for (from, length) in [(100 + round * 37 % 300, 50), (700 + round, 200), (5000 + round * 10, 11)] {
            let part = vec![round as u8 | 1; length];
            files.write(&a, Some(from as u64), &part).unwrap();
            expected[from..from + length].copy_from_slice(&part);
        }
        assert_eq!(content(&files, &a), expected);
        check(&files, &frames, &mut Vec::new());
        assert_eq!(content(&files, &a), expected);
        let (rows, stored) = patches(&files);
        assert!(rows <= 16 && stored == 5 + rows, "{rows} patches, {stored} frames");
        assert!(rows > 0 || round % 9 == 8, "round {round}");
    }
    // Truncated, replaced or removed records lose their patches.
    files.write(&a, Some(100), b"again").unwrap();
    files.set_attributes(&a, &AttributeChange { size: Some(4500), ..AttributeChange::default() }).unwrap();
    expected[100..105].copy_from_slice(b"again");
    expected.truncate(4500);
    assert_eq!(content(&files, &a), expected);
    check(&files, &frames, &mut Vec::new());
    assert_eq!(content(&files, &a), expected);
    files.write(&a, Some(4100), b"more").unwrap();
    files.write(&a, Some(0), &[3; 4096]).unwrap();
    expected[4100..4104].copy_from_slice(b"more");
    expected[..4096].fill(3);
    assert_eq!(content(&files, &a), expected);
    check(&files, &frames, &mut Vec::new());
    files.write(&a, Some(9), b"last").unwrap();
    files.unlink(&root, b"a").unwrap();
    check(&files, &frames, &mut Vec::new());
    drop(a);
    files.free_released(u64::MAX).unwrap();
    check(&files, &frames, &mut Vec::new());
    assert!(frames.content.lock().is_empty());
    assert_eq!(files.buffered(), 0);
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

/// The size that `look` finds of a file with 5000 bytes, which is flushed between the look at the table and the look at
/// memory.
fn size_beside_a_flush(look: impl FnOnce(&MapFiles) -> u64) -> u64 {
    let (files, frames) = empty();
    let a = make(&files, &files.root(), b"a", FileType::Regular);
    assert_eq!(files.write(&a, Some(0), &[7; 5000]).unwrap().written, 5000);
    let watched = files.with_table(|table| Arc::clone(&table.1));
    let before = watched.shown.load(Ordering::Relaxed);
    let flushes = Arc::new(AtomicBool::new(false));
    let begun = Arc::clone(&flushes);
    *frames.on_write.lock() = Some(Arc::new(move || {
        begun.store(true, Ordering::Relaxed);
        wait_for("the table is looked at", || watched.shown.load(Ordering::Relaxed) > before);
    }));
    std::thread::scope(|scope| {
        scope.spawn(|| files.flush(files.gate.enter().txg()).unwrap());
        wait_for("a flush writes", || flushes.load(Ordering::Relaxed));
        look(&files)
    })
}

#[test]
fn sizes_are_those_that_were_written_beside_a_flush() {
    let listed = |files: &MapFiles| files.list(&files.root(), 0, true, 10).unwrap()[0].file.as_ref().unwrap().1.size;
    assert_eq!(size_beside_a_flush(listed), 5000, "listed");
    let looked_up = |files: &MapFiles| files.look_up(&files.root(), b"a").unwrap().1.size;
    assert_eq!(size_beside_a_flush(looked_up), 5000, "looked up");
}

#[test]
fn attributes_short_and_long() {
    let (files, frames) = empty();
    let root = files.root();
    let a = make(&files, &root, b"a", FileType::Regular);
    assert!(matches!(files.attribute(&a, b"user.x"), Err(FileError::NoData)));
    files.set_attribute(&a, b"user.x", b"1", Some(false), None).unwrap();
    assert!(matches!(files.set_attribute(&a, b"user.x", b"2", Some(false), None), Err(FileError::AttributeExists)));
    assert!(matches!(files.set_attribute(&a, b"user.y", b"2", Some(true), None), Err(FileError::NoData)));
    let long = vec![9; 65536];
    files.set_attribute(&a, b"user.long", &long, None, Some(0o751)).unwrap();
    assert!(matches!(files.set_attribute(&a, b"user.longer", &[0; 65537], None, None), Err(FileError::TooLarge)));
    assert_eq!(files.attribute(&a, b"user.long").unwrap(), long);
    assert_eq!(files.attributes(&a).unwrap().mode & 0o7777, 0o751);
    assert_eq!(files.attribute_names(&a).unwrap(), [b"user.long".to_vec(), b"user.x".to_vec()]);
    check(&files, &frames, &mut Vec::new());
    files.set_attribute(&a, b"user.long", b"short", Some(true), None).unwrap();
    files.remove_attribute(&a, b"user.x").unwrap();
    check(&files, &frames, &mut Vec::new());
    files.unlink(&root, b"a").unwrap();
    drop(a);
    assert_eq!(files.free_released(u64::MAX).unwrap().gone, 1);
    check(&files, &frames, &mut Vec::new());
    assert!(frames.content.lock().is_empty());
}

/// A random operation; numbers choose among the existing files.
#[derive(Clone, Debug)]
enum Step {
    Make(u8, u8, bool),
    Write(u8, u32, u32, u8),
    Append(u8, u16),
    Resize(u8, u32),
    Zero(u8, u32, u32),
    Unlink(u8, u8),
    Rename(u8, u8, u8, u8, u8),
    Link(u8, u8, u8),
    Chown(u8, u8),
    Flush,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        4 => (any::<u8>(), 0u8..6, any::<bool>()).prop_map(|(a, b, c)| Step::Make(a, b, c)),
        6 => (any::<u8>(), 0u32..30_000, 0u32..20_000, any::<u8>()).prop_map(|(a, b, c, d)| Step::Write(a, b, c, d)),
        2 => (any::<u8>(), any::<u16>()).prop_map(|(a, b)| Step::Append(a, b % 9000)),
        3 => (any::<u8>(), 0u32..40_000).prop_map(|(a, b)| Step::Resize(a, b)),
        2 => (any::<u8>(), 0u32..40_000, 0u32..20_000).prop_map(|(a, b, c)| Step::Zero(a, b, c)),
        3 => (any::<u8>(), 0u8..6).prop_map(|(a, b)| Step::Unlink(a, b)),
        4 => (any::<u8>(), 0u8..6, any::<u8>(), 0u8..6, 0u8..3).prop_map(|(a, b, c, d, e)| Step::Rename(a, b, c, d, e)),
        2 => (any::<u8>(), any::<u8>(), 0u8..6).prop_map(|(a, b, c)| Step::Link(a, b, c)),
        1 => (any::<u8>(), 0u8..3).prop_map(|(a, b)| Step::Chown(a, b)),
        2 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(one, 1..80)
}

/// The model: directories by path, files by number with their content.
#[derive(Default)]
struct Model {
    directories: BTreeMap<u64, BTreeMap<Vec<u8>, u64>>,
    files: BTreeMap<u64, Vec<u8>>,
}

impl Model {
    fn pick(map: &[u64], by: u8) -> Option<u64> {
        map.get(by as usize % map.len().max(1)).copied()
    }

    fn directory(&self, by: u8) -> u64 {
        Self::pick(&self.directories.keys().copied().collect::<Vec<_>>(), by).unwrap()
    }

    fn file(&self, by: u8) -> Option<u64> {
        Self::pick(&self.files.keys().copied().collect::<Vec<_>>(), by)
    }

    fn holds(&self, above: u64, directory: u64) -> bool {
        above == directory
            || self.directories[&above]
                .values()
                .any(|inside| self.directories.contains_key(inside) && self.holds(*inside, directory))
    }

    fn forget(&mut self, number: u64) {
        let named = self.directories.values().flat_map(BTreeMap::values).any(|other| *other == number);
        if !named {
            self.files.remove(&number);
            self.directories.remove(&number);
        }
    }
}

fn run(files: &mut MapFiles, frames: &Arc<MapFrames>, model: &mut Model, step: &Step, freed: &mut Vec<Dead>) {
    let name = |by: u8| format!("n{by}").into_bytes();
    let known = |files: &MapFiles, number| files.by_number(number).unwrap();
    match *step {
        Step::Make(d, n, directory) => {
            let d = model.directory(d);
            let kind = if directory { FileType::Directory } else { FileType::Regular };
            let made = files.make(&known(files, d), &name(n), b"", &new(kind));
            if model.directories[&d].contains_key(&name(n)) {
                assert!(matches!(made, Err(FileError::Exists)));
                return;
            }
            let number = made.unwrap().0.number();
            model.directories.get_mut(&d).unwrap().insert(name(n), number);
            if directory {
                model.directories.insert(number, BTreeMap::new());
            } else {
                model.files.insert(number, Vec::new());
            }
        }
        Step::Write(f, offset, length, byte) => {
            let Some(f) = model.file(f) else { return };
            let data = vec![byte; length as usize];
            assert_eq!(files.write(&known(files, f), Some(offset.into()), &data).unwrap().written, data.len());
            if !data.is_empty() {
                let content = model.files.get_mut(&f).unwrap();
                let end = offset as usize + data.len();
                content.resize(content.len().max(end), 0);
                content[offset as usize..end].copy_from_slice(&data);
            }
        }
        Step::Append(f, length) => {
            let Some(f) = model.file(f) else { return };
            let data: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            files.write(&known(files, f), None, &data).unwrap();
            model.files.get_mut(&f).unwrap().extend(data);
        }
        Step::Resize(f, size) => {
            let Some(f) = model.file(f) else { return };
            files
                .set_attributes(
                    &known(files, f),
                    &AttributeChange { size: Some(size.into()), ..AttributeChange::default() },
                )
                .unwrap();
            model.files.get_mut(&f).unwrap().resize(size as usize, 0);
        }
        Step::Zero(f, offset, length) => {
            let Some(f) = model.file(f) else { return };
            files.zero(&known(files, f), offset.into(), length.into(), false).unwrap();
            let content = model.files.get_mut(&f).unwrap();
            let end = content.len().min((offset + length) as usize);
            if let Some(zeroed) = content.get_mut(offset as usize..end) {
                zeroed.fill(0);
            }
        }
        Step::Unlink(d, n) => {
            let d = model.directory(d);
            let directory = known(files, d);
            let Some(number) = model.directories[&d].get(&name(n)).copied() else {
                assert!(matches!(files.unlink(&directory, &name(n)), Err(FileError::NotFound)));
                return;
            };
            match model.directories.get(&number) {
                Some(inside) if !inside.is_empty() => {
                    assert!(matches!(files.remove_directory(&directory, &name(n)), Err(FileError::NotEmpty)));
                    return;
                }
                Some(_) => files.remove_directory(&directory, &name(n)).unwrap(),
                None => files.unlink(&directory, &name(n)).unwrap(),
            }
            model.directories.get_mut(&d).unwrap().remove(&name(n));
            model.forget(number);
        }
        Step::Rename(from, old, to, new, how) => {
            let (from, to) = (model.directory(from), model.directory(to));
            let how = [MayReplace::Yes, MayReplace::No, MayReplace::Exchange][how as usize];
            let done = files.rename((&known(files, from), &name(old)), (&known(files, to), &name(new)), how);
            let source = model.directories[&from].get(&name(old)).copied();
            let target = model.directories[&to].get(&name(new)).copied();
            let is_directory = |number: u64| model.directories.contains_key(&number);
            let Some(source) = source else {
                assert!(matches!(done, Err(FileError::NotFound)));
                return;
            };
            let below_itself = is_directory(source) && model.holds(source, to);
            let above = target.is_some_and(|target| is_directory(target) && model.holds(target, from));
            let refused = match (how, target) {
                (MayReplace::No, Some(_)) | (MayReplace::Exchange, None) => true,
                _ if below_itself || above => true,
                (MayReplace::Exchange, Some(_)) => false,
                (_, Some(target)) if target == source => false,
                (_, Some(target)) => match (is_directory(source), is_directory(target)) {
                    (true, true) => !model.directories[&target].is_empty(),
                    (a, b) => a != b,
                },
                _ => false,
            };
            assert_eq!(done.is_err(), refused, "{done:?}");
            if refused || target == Some(source) {
                return;
            }
            model.directories.get_mut(&from).unwrap().remove(&name(old));
            model.directories.get_mut(&to).unwrap().insert(name(new), source);
            if let Some(target) = target {
                if how == MayReplace::Exchange {
                    model.directories.get_mut(&from).unwrap().insert(name(old), target);
                } else {
                    model.forget(target);
                }
            }
        }
        Step::Link(f, d, n) => {
            let (Some(f), d) = (model.file(f), model.directory(d)) else { return };
            let done = files.link(&known(files, f), &known(files, d), &name(n));
            if model.directories[&d].contains_key(&name(n)) {
                assert!(matches!(done, Err(FileError::Exists)));
            } else {
                done.unwrap();
                model.directories.get_mut(&d).unwrap().insert(name(n), f);
            }
        }
        Step::Chown(f, uid) => {
            let Some(f) = model.file(f) else { return };
            let change =
                AttributeChange { uid: Some(uid.into()), permissions: Some(0o600), ..AttributeChange::default() };
            assert_eq!(files.set_attributes(&known(files, f), &change).unwrap().uid, u32::from(uid));
        }
        Step::Flush => {
            files.free_released(u64::MAX).unwrap();
            check(files, frames, freed);
        }
        Step::Reopen => {
            check(files, frames, freed);
            *files = Files::open(config(frames), files.with_table(|table| table.clone())).unwrap();
            files.free_orphans().unwrap();
        }
    }
}

fn compare(files: &MapFiles, model: &Model) {
    for (number, expected) in &model.directories {
        let directory = files.by_number(*number).unwrap();
        let mut listed = names(files, &directory);
        listed.sort();
        assert_eq!(listed, expected.keys().cloned().collect::<Vec<_>>());
        for (name, target) in expected {
            assert_eq!(files.look_up(&directory, name).unwrap().0.number(), *target);
        }
    }
    for (number, expected) in &model.files {
        assert!(content(files, &files.by_number(*number).unwrap()) == *expected, "content of {number}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn random_operations_as_the_model(steps in steps(), record_shift in prop_oneof![Just(9), Just(12)]) {
        let (mut files, frames) = empty();
        files.storing.write().record_shift = record_shift;
        let mut model = Model::default();
        model.directories.insert(1, BTreeMap::new());
        let mut freed = Vec::new();
        for step in &steps {
            run(&mut files, &frames, &mut model, step, &mut freed);
            compare(&files, &model);
        }
        files.free_released(u64::MAX).unwrap();
        check(&files, &frames, &mut freed);
        prop_assert_eq!(files.buffered(), 0);
        let reopened = Files::open(config(&frames), files.with_table(|table| table.clone())).unwrap();
        compare(&reopened, &model);
    }
}
