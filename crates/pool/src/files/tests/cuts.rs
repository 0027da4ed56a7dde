//! Truncation and hole punching: an error changes nothing, long ranges are processed in steps.

use super::*;
use crate::codec::Reader;
use crate::files::content::STEP;
use crate::log::{LogChange, LogRecord};

fn watched(files: &MapFiles) -> Arc<Watched> {
    files.look_at_table(|table| Arc::clone(&table.1))
}

fn cut(size: u64) -> AttributeChange {
    AttributeChange { size: Some(size), ..AttributeChange::default() }
}

#[test]
fn what_may_only_grow_is_never_cut() {
    let (files, frames) = empty();
    let (file, mut data) = long(&files, 4);
    let longer = |size| AttributeChange { only_longer: true, ..cut(size) };
    // The file has grown since its size was read.
    assert_eq!(files.set_attributes(&file, &longer(700)).unwrap().size, 2048);
    assert_eq!(content(&files, &file), data);
    assert_eq!(files.set_attributes(&file, &longer(3000)).unwrap().size, 3000);
    data.resize(3000, 0);
    assert_eq!(content(&files, &file), data);
    check(&files, &frames, &mut Vec::new());
}

/// A file of so many stored records of 512 bytes.
fn long(files: &MapFiles, records: usize) -> (Arc<Inode>, Vec<u8>) {
    files.storing.write().record_shift = 9;
    let file = make(files, &files.root(), b"long", FileType::Regular);
    let data: Vec<u8> = (0..records * 512).map(|at| (at % 251) as u8 | 1).collect();
    files.write(&file, Some(0), &data).unwrap();
    files.flush(Txg(7)).unwrap();
    files.take_freed();
    (file, data)
}

/// Asserts that nothing was done: no frame is freed, and no memory stays reserved.
fn untouched(files: &MapFiles, frames: &MapFrames, file: &Inode, data: &[u8]) {
    assert!(files.freed.lock().is_empty());
    assert_eq!(content(files, file), data);
    check(files, frames, &mut Vec::new());
    assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
    assert!(!files.owners.has_waiting());
    assert_eq!(content(files, file), data);
}

#[test]
fn a_hole_that_cannot_be_made_is_not_made() {
    let (files, frames) = empty();
    let (file, mut data) = long(&files, 4);
    // The hole ends within a record that cannot be read.
    let last = *frames.content.lock().keys().last().unwrap();
    frames.rotten.lock().push(last);
    // Content of the other records in memory is unchanged as well.
    files.write(&file, Some(600), b"waits").unwrap();
    data[600..605].copy_from_slice(b"waits");
    assert!(files.zero(&file, 0, 3 * 512 + 100, false).is_err());
    frames.rotten.lock().clear();
    untouched(&files, &frames, &file, &data);
    // The row of a record in the middle.
    let key = keys::extent(file.number(), 2).to_vec();
    watched(&files).rotten.lock().push(key);
    files.write(&file, Some(600), b"again").unwrap();
    data[600..605].copy_from_slice(b"again");
    assert!(files.zero(&file, 10, 3 * 512, false).is_err());
    watched(&files).rotten.lock().clear();
    // The former frame of the small write is gone.
    assert_eq!(content(&files, &file), data);
    files.flush(Txg(7)).unwrap();
    assert_eq!(content(&files, &file), data);
    check(&files, &frames, &mut Vec::new());
    assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
}

#[test]
fn a_cut_that_the_table_refuses_changes_nothing() {
    let (files, frames) = empty();
    let (file, mut data) = long(&files, 4);
    let owner = |files: &MapFiles| files.owner_use((OwnerKind::User, 10)).unwrap();
    let before = owner(&files);
    files.write(&file, Some(1030), b"patch").unwrap();
    data[1030..1035].copy_from_slice(b"patch");
    files.flush(Txg(7)).unwrap();
    assert!(owner(&files).bytes > before.bytes);
    let to_another = AttributeChange { uid: Some(77), ..cut(700) };
    for refused in 0..3 {
        let rotten = match refused {
            0 => keys::patch(file.number(), 2, 0).to_vec(),
            1 => keys::extent(file.number(), 3).to_vec(),
            _ => Vec::new(),
        };
        files.write(&file, Some(515), &[refused + 1; 9]).unwrap();
        data[515..524].fill(refused + 1);
        let with_patch = owner(&files);
        watched(&files).rotten.lock().push(rotten);
        watched(&files).refuses.store(refused == 2, Ordering::Relaxed);
        assert!(files.set_attributes(&file, &to_another).is_err(), "{refused}");
        assert!(files.zero(&file, 100, 1948, false).is_err(), "{refused}");
        assert!(refused != 2 || files.write(&file, Some(512), &[9; 512]).is_err());
        watched(&files).refuses.store(false, Ordering::Relaxed);
        watched(&files).rotten.lock().clear();
        assert_eq!(owner(&files), with_patch);
        assert_eq!(content(&files, &file), data);
        check(&files, &frames, &mut Vec::new());
        assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
    }
    let row = files.set_attributes(&file, &to_another).unwrap();
    assert_eq!((row.size, row.uid), (700, 77));
    data.truncate(700);
    assert_eq!(content(&files, &file), data);
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn long_files_are_cut_and_punched_in_steps() {
    let (files, frames) = empty();
    let (file, mut data) = long(&files, 10 * STEP);
    let watched = watched(&files);
    watched.longest.store(0, Ordering::Relaxed);
    files.zero(&file, 100, 512 * (3 * STEP as u64), false).unwrap();
    data[100..512 * 3 * STEP + 100].fill(0);
    assert_eq!(content(&files, &file), data);
    files.set_attributes(&file, &cut(512 * 5 + 7)).unwrap();
    data.truncate(512 * 5 + 7);
    assert!(watched.longest.load(Ordering::Relaxed) <= STEP + 2);
    assert_eq!(content(&files, &file), data);
    check(&files, &frames, &mut Vec::new());
    let row = files.attributes(&file).unwrap();
    assert_eq!(row.flags & crate::rows::inode::flags::CUT, 0);
    // Zeroing may let a file grow, which it does last.
    files.zero(&file, 0, 1 << 30, true).unwrap();
    assert_eq!(files.attributes(&file).unwrap().size, 1 << 30);
    check(&files, &frames, &mut Vec::new());
    assert_eq!(files.attributes(&file).unwrap().charged, 0);
}

#[test]
fn what_a_cut_leaves_behind_never_comes_back() {
    use crate::rows::inode::flags::CUT;
    // How the file grows again, and whether the truncation continues at once or after an import.
    for (grows, reopened) in (0..5).flat_map(|grows| [(grows, false), (grows, true)]) {
        let (files, frames) = empty();
        let (file, mut data) = long(&files, 4 * STEP);
        let number = file.number();
        // The second step finds a row that it cannot read.
        let rotten = keys::extent(number, 2 * STEP as u64).to_vec();
        watched(&files).rotten.lock().push(rotten);
        assert!(files.set_attributes(&file, &cut(1000)).is_err());
        data.truncate(1000);
        let row = files.attributes(&file).unwrap();
        assert_eq!((row.size, row.flags & CUT), (1000, CUT));
        assert_eq!(content(&files, &file), data);
        assert_eq!(files.seek(&file, 0, SeekTo::Hole).unwrap(), 1000);
        // The flags are consistent, and the file may be truncated further.
        let change =
            AttributeChange { flags: Some(FlagChange { mask: u32::MAX, bits: 0 }), ..AttributeChange::default() };
        assert_eq!(files.set_attributes(&file, &change).unwrap().flags & CUT, CUT);
        assert!(files.write(&file, None, b"x").is_err(), "it grew over rows that are there still");
        files.write(&file, Some(10), b"inside").unwrap();
        data[10..16].copy_from_slice(b"inside");
        watched(&files).rotten.lock().clear();
        check(&files, &frames, &mut Vec::new());
        let (files, file) = if reopened {
            let files = Files::open(config(&frames), files.with_table(|table| table.clone())).unwrap();
            files.storing.write().record_shift = 9;
            let file = files.by_number(number).unwrap();
            (files, file)
        } else {
            (files, file)
        };
        let far = 512 * 3 * STEP;
        match grows {
            0 => {
                files.write(&file, Some(far as u64), b"behind").unwrap();
                data.resize(far, 0);
                data.extend(b"behind");
            }
            1 => {
                files.set_attributes(&file, &cut(far as u64)).unwrap();
                data.resize(far, 0);
            }
            2 => {
                files.zero(&file, far as u64 - 5, 5, true).unwrap();
                data.resize(far, 0);
            }
            3 => {
                files.set_attributes(&file, &cut(0)).unwrap();
                files.write(&file, Some(0), b"small").unwrap();
                data = b"small".to_vec();
                files.set_attributes(&file, &cut(far as u64)).unwrap();
                data.resize(far, 0);
            }
            _ => {
                let other = make(&files, &files.root(), b"other", FileType::Regular);
                files.write(&other, Some(0), &vec![8; far + 512]).unwrap();
                let range = super::super::Range { from: far as u64, to: far as u64, length: 512 };
                assert_eq!(files.share(&other, &file, range).unwrap(), 512);
                data.resize(far, 0);
                data.extend([8; 512]);
                files.take_shared();
            }
        }
        assert_eq!(content(&files, &file), data, "{grows} {reopened}");
        assert_eq!(files.attributes(&file).unwrap().flags & CUT, 0);
        if grows < 4 {
            check(&files, &frames, &mut Vec::new());
        }
    }
}

#[test]
fn what_a_broken_cut_leaves_is_swept_after_a_start() {
    use crate::rows::inode::flags::CUT;
    let (files, frames) = empty();
    let (file, mut data) = long(&files, 6 * STEP);
    let number = file.number();
    let used = files.attributes(&file).unwrap().charged;
    // After each step, as after a crash.
    let watched = watched(&files);
    *watched.history.lock() = Some(Vec::new());
    files.set_attributes(&file, &cut(1000)).unwrap();
    data.truncate(1000);
    let left = |rows: &Rows| {
        rows.keys()
            .filter(|key| matches!(keys::Key::decode(key), Ok(keys::Key::Extent { inode, record }) if inode == number && record > 1))
            .count()
    };
    let history = watched.history.lock().take().unwrap();
    let broken: Vec<&Rows> = history.iter().filter(|rows| left(rows) > 0).collect();
    assert!(broken.len() >= 3, "{}", broken.len());
    for rows in broken {
        let after = Files::open(config(&frames), MapTable(rows.clone(), Arc::default())).unwrap();
        after.storing.write().record_shift = 9;
        assert_eq!(after.attributes(&after.inode(number)).unwrap().flags & CUT, CUT);
        after.free_orphans().unwrap();
        let mut steps = 0;
        while after.sweep_cuts(1).unwrap() {
            steps += 1;
        }
        assert!(steps < 10);
        let row = after.attributes(&after.inode(number)).unwrap();
        assert_eq!((row.flags & CUT, row.size), (0, 1000));
        assert!(row.charged < used / 3, "{} {used}", row.charged);
        assert_eq!(
            after.look_at_table(|table| (left(&table.0), table.0.contains_key(keys::cut(number).as_slice()))),
            (0, false)
        );
    }
    // Nothing remains of a file that is removed in the middle.
    let rows = history.iter().find(|rows| left(rows) > 0).unwrap().clone();
    let after = Files::open(config(&frames), MapTable(rows, Arc::default())).unwrap();
    after.unlink(&after.root(), b"long").unwrap();
    after.free_orphans().unwrap();
    assert!(!after.sweep_cuts(1).unwrap());
    assert!(after.look_at_table(|table| !table.0.contains_key(keys::cut(number).as_slice())));
}

/// Recorded operations, encoded as changes of rows or content.
#[derive(Default)]
pub(super) struct Log(pub(super) Mutex<Vec<Vec<Recorded>>>);

pub(super) enum Recorded {
    Put(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Write(u64, u64, Vec<u8>),
}

impl Recorder for Log {
    fn record(&self, _: Txg, record: Vec<u8>) -> Ticket {
        let one = |change: &LogChange<'_>| match change {
            LogChange::Put { key, value } => Recorded::Put(key.to_vec(), value.to_vec()),
            LogChange::Delete { key } => Recorded::Delete(key.to_vec()),
            LogChange::Write { inode, offset, data } => Recorded::Write(*inode, *offset, data.to_vec()),
            _ => panic!("{change:?} is not recorded"),
        };
        let record = LogRecord::decode(&mut Reader::new(&record)).unwrap();
        self.0.lock().push(record.changes.iter().map(one).collect());
        Ticket::default()
    }

    fn cannot_record(&self, _: Txg) {}
}

pub(super) fn replay(files: &MapFiles, record: &[Recorded]) {
    for change in record {
        let change = match change {
            Recorded::Put(key, value) => LogChange::Put { key, value },
            Recorded::Delete(key) => LogChange::Delete { key },
            Recorded::Write(inode, offset, data) => LogChange::Write { inode: *inode, offset: *offset, data },
        };
        files.replay(&change).unwrap();
    }
}

#[test]
fn a_crash_in_the_middle_of_a_cut_finds_a_file_that_is_cut() {
    for size in [1000, 1024] {
        let (files, frames) = empty();
        let (file, data) = long(&files, 4 * STEP);
        let (watched, log) = (watched(&files), Arc::new(Log::default()));
        files.record_to(Arc::clone(&log) as Arc<dyn Recorder>);
        *watched.history.lock() = Some(vec![files.look_at_table(|table| table.0.clone())]);
        files.set_attributes(&file, &cut(size)).unwrap();
        let steps = log.0.lock().len();
        assert!(steps >= 4, "{steps}");
        let far = 512 * 3 * STEP + 9;
        files.write(&file, Some(far as u64), b"behind").unwrap();
        assert!(matches!(files.record_content(&file).unwrap(), Durability::Logged(_)));
        let history = watched.history.lock().take().unwrap();
        let records = log.0.lock();
        assert_eq!((records.len(), history.len()), (steps + 1, steps + 1));
        // If the end is within a record, memory has a part of what a commit would write.
        let commits = if size == 1024 { steps + 1 } else { 1 };
        for (committed, recorded) in
            (0..commits).flat_map(|committed| (committed..=steps + 1).map(move |recorded| (committed, recorded)))
        {
            let after = Files::open(config(&frames), MapTable(history[committed].clone(), Arc::default())).unwrap();
            after.storing.write().record_shift = 9;
            for record in &records[committed..recorded] {
                replay(&after, record);
                // Once more, as after a second crash.
                replay(&after, record);
            }
            let mut expected = data.clone();
            if recorded > 0 {
                expected.truncate(size as usize);
            }
            if recorded == steps + 1 {
                expected.resize(far, 0);
                expected.extend(b"behind");
            }
            let found = after.by_number(file.number()).unwrap();
            assert!(content(&after, &found) == expected, "{size}: {committed} {recorded}");
            if recorded > 0 {
                after.write(&found, Some(far as u64 + 100), b"x").unwrap();
                expected.resize(far + 100, 0);
                expected.push(b'x');
                after.flush(Txg(7)).unwrap();
                assert!(content(&after, &found) == expected, "{size}: {committed} {recorded}");
                let is_left = |key: &[u8]| match keys::Key::decode(key).unwrap() {
                    keys::Key::Extent { inode, record } => {
                        inode == file.number() && record > 1 && record < far as u64 >> 9
                    }
                    _ => false,
                };
                assert!(!after.look_at_table(|table| table.0.keys().any(|key| is_left(key))));
            }
        }
    }
}

#[test]
fn seeking_looks_no_further_than_it_must() {
    let (files, _frames) = empty();
    let (file, data) = long(&files, 1000);
    let watched = watched(&files);
    files.zero(&file, 512 * 4, 512, false).unwrap();
    watched.shown.store(0, Ordering::Relaxed);
    assert_eq!(files.seek(&file, 3, SeekTo::Data).unwrap(), 3);
    assert_eq!(files.seek(&file, 512 * 4 + 1, SeekTo::Data).unwrap(), 512 * 5);
    assert_eq!(files.seek(&file, 0, SeekTo::Hole).unwrap(), 512 * 4);
    assert!(watched.shown.load(Ordering::Relaxed) < 20);
    // Content in memory belongs to it.
    files.write(&file, Some(512 * 4 + 3), b"x").unwrap();
    files.write(&file, None, b"behind").unwrap();
    assert_eq!(files.seek(&file, 0, SeekTo::Hole).unwrap(), data.len() as u64 + 6);
    assert_eq!(files.seek(&file, 512 * 4 + 1, SeekTo::Data).unwrap(), 512 * 4 + 1);
}

#[test]
fn records_that_are_shorter_than_what_lies_in_a_row_are_read_back() {
    for (shift, length) in [(9, 513), (9, 1024), (9, 2048), (10, 1500), (10, 1024), (9, 512), (9, 1)] {
        let (files, frames) = empty();
        files.storing.write().record_shift = shift;
        let file = make(&files, &files.root(), b"short", FileType::Regular);
        let data: Vec<u8> = (0..length).map(|at: usize| (at % 251) as u8 | 1).collect();
        files.write(&file, Some(0), &data).unwrap();
        assert_eq!(content(&files, &file), data);
        check(&files, &frames, &mut Vec::new());
        assert_eq!(content(&files, &file), data);
    }
}

#[test]
fn reading_is_noted_where_that_can_be_and_fails_by_nothing() {
    let (files, _frames) = empty();
    let (file, data) = long(&files, 2);
    files.throttle.fail(&PoolError::NoSpace);
    assert_eq!(content(&files, &file), data);
    let before = files.attributes(&file).unwrap().accessed;
    files.touch(&file);
    assert_eq!(files.attributes(&file).unwrap().accessed, before);
}
