//! Tests over real directories: every crash point is a copy of the directory at that instant, which
//! is then opened like after a crash.

mod crashes;
mod killed;

use super::*;
use crate::ledger::Sum;
use std::{collections::BTreeMap, fs};
use tempfile::TempDir;

/// Callback for each step of a checkpoint.
pub(super) type Observer = Box<dyn FnMut(&'static str) + Send>;

const BOOT: BootId = BootId([1; 16]);
const NEXT_BOOT: BootId = BootId([2; 16]);

fn id(ino: u64) -> FileId {
    FileId { fs: 7, ino, generation: ino + 1 }
}

fn identity() -> Identity {
    Identity { root: FileId { fs: 7, ino: 2, generation: 99 }, groups: vec![b"var".to_vec(), b"srv/www".to_vec()] }
}

fn owner(uid: u32, group: Option<usize>) -> Owner {
    Owner { uid, group }
}

fn sums(bytes: u64) -> Sums {
    let sum = Sum { bytes, inodes: 3 };
    Sums { whole: sum, users: BTreeMap::from([(0, sum)]), dirs: BTreeMap::from([(1, Sum { bytes: 1, inodes: 1 })]) }
}

fn open(directory: &TempDir, boot: BootId) -> (Saved, Start) {
    Saved::open_in(directory.path(), &identity(), boot).unwrap()
}

/// The state that the next start would find; the directory is not changed.
fn find(directory: &TempDir, boot: BootId) -> Start {
    find_as(directory, &identity(), boot)
}

fn find_as(directory: &TempDir, identity: &Identity, boot: BootId) -> Start {
    Saved::open_in(copy(directory.path()).path(), identity, boot).unwrap().1
}

fn copy(from: &Path) -> TempDir {
    let to = TempDir::new().unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
        }
    }
    to
}

/// A state directory with a checkpoint and three records, as after a crash.
fn crashed() -> TempDir {
    let directory = TempDir::new().unwrap();
    let (saved, start) = open(&directory, BOOT);
    assert_eq!(start, Start::New);
    saved.checkpoint(&sums(1000), true).unwrap();
    saved.touch(id(10), b"a", 100, owner(1, None));
    saved.touch(id(11), b"", 200, owner(2, Some(1)));
    saved.touch(id(12), &[b'x'; 300], 0, owner(1, Some(0)));
    directory
}

fn all_touched() -> Vec<Touched> {
    vec![
        Touched { id: id(10), charge: 100, owner: owner(1, None), place: b"a".to_vec() },
        Touched { id: id(11), charge: 200, owner: owner(2, Some(1)), place: Vec::new() },
        Touched { id: id(12), charge: 0, owner: owner(1, Some(0)), place: vec![b'x'; 300] },
    ]
}

fn the_log(directory: &TempDir) -> PathBuf {
    let logs: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"log."))
        .collect();
    assert_eq!(logs.len(), 1);
    logs[0].path()
}

#[test]
fn nothing_is_known_of_a_new_cage() {
    let directory = TempDir::new().unwrap();
    let (saved, start) = open(&directory, BOOT);
    assert_eq!((start, saved.follows()), (Start::New, false));
    saved.touch(id(1), b"a", 0, owner(0, None));
    drop(saved);
    assert_eq!(open(&directory, BOOT).1, Start::New);
}

#[test]
fn a_crash_knows_the_checkpoint_and_what_was_touched_since() {
    let directory = crashed();
    let expected = Start::Crashed { sums: sums(1000), exact: true, touched: all_touched() };
    assert_eq!(find(&directory, BOOT), expected);
    // A crash during recovery loses nothing, and the records made meanwhile add up.
    let (saved, start) = open(&directory, BOOT);
    assert_eq!((start, saved.follows()), (expected, true));
    saved.touch(id(13), b"d", 5, owner(4, None));
    drop(saved);
    let Start::Crashed { touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!(touched.len(), 4);
    assert_eq!(touched[3], Touched { id: id(13), charge: 5, owner: owner(4, None), place: b"d".to_vec() });
}

#[test]
fn a_file_touched_again_keeps_its_first_charge_and_its_last_place() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    saved.touch(id(10), b"elsewhere/a", 170, owner(3, Some(1)));
    saved.touch(FileId { generation: 0, ..id(10) }, b"a", 1, owner(0, None));
    drop(saved);
    let Start::Crashed { touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!(touched[0], Touched { id: id(10), charge: 100, owner: owner(1, None), place: b"elsewhere/a".to_vec() });
    assert_eq!(touched.len(), 4, "another file had the same inode number");
}

#[test]
fn after_a_power_loss_only_the_last_known_value_is_left() {
    assert_eq!(find(&crashed(), NEXT_BOOT), Start::Lost { last: Some(sums(1000)) });
}

#[test]
fn an_orderly_end_is_believed_once() {
    for boot in [BOOT, NEXT_BOOT] {
        let directory = crashed();
        let (saved, _) = open(&directory, BOOT);
        saved.close(&sums(555), true).unwrap();
        drop(saved);
        assert_eq!(find(&directory, boot), Start::Clean { sums: sums(555), exact: true });
        // The daemon starts and dies, with or without the machine.
        drop(open(&directory, boot));
        assert_eq!(find(&directory, boot), Start::Crashed { sums: sums(555), exact: true, touched: Vec::new() });
        assert_eq!(find(&directory, BootId([3; 16])), Start::Lost { last: Some(sums(555)) });
    }
}

#[test]
fn what_was_never_counted_stays_marked() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    saved.checkpoint(&sums(1), false).unwrap();
    drop(saved);
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(1), exact: false, touched: Vec::new() });
    let (saved, _) = open(&directory, BOOT);
    saved.close(&sums(2), false).unwrap();
    drop(saved);
    assert_eq!(find(&directory, BOOT), Start::Clean { sums: sums(2), exact: false });
}

#[test]
fn a_touch_after_the_end_undoes_it() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    saved.close(&sums(9), true).unwrap();
    saved.touch(id(1), b"late", 4, owner(0, None));
    drop(saved);
    let touched = vec![Touched { id: id(1), charge: 4, owner: owner(0, None), place: b"late".to_vec() }];
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(9), exact: true, touched });
    assert_eq!(find(&directory, NEXT_BOOT), Start::Lost { last: Some(sums(9)) });
}

#[test]
fn two_processes_cannot_own_one_state() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    let error = Saved::open_in(directory.path(), &identity(), BOOT).unwrap_err();
    assert!(matches!(&error, SavedError::Busy { pid: Some(pid), .. } if *pid == std::process::id()), "{error}");
    assert!(error.to_string().contains(&format!("in use by process {}", std::process::id())), "{error}");
    drop(saved);
    assert_eq!(open(&directory, BOOT).1, Start::New);
}

#[test]
fn the_state_of_another_directory_is_not_used() {
    let directory = crashed();
    let other = Identity { root: FileId { generation: 100, ..identity().root }, ..identity() };
    assert_eq!(find_as(&directory, &other, BOOT), Start::New);
    let elsewhere = Identity { root: FileId { fs: 1234, ..identity().root }, ..identity() };
    assert!(matches!(find_as(&directory, &elsewhere, BOOT), Start::Crashed { .. }), "device numbers change");
    // A new checkpoint replaces it.
    let (saved, _) = Saved::open_in(directory.path(), &other, BOOT).unwrap();
    saved.checkpoint(&sums(3), true).unwrap();
    drop(saved);
    assert_eq!(find_as(&directory, &other, BOOT), Start::Crashed { sums: sums(3), exact: true, touched: Vec::new() });
}

#[test]
fn other_directory_limits_void_the_sums_of_directories_only() {
    let other = Identity { groups: vec![b"srv/www".to_vec()], ..identity() };
    let Start::Crashed { sums: found, exact: false, touched } = find_as(&crashed(), &other, BOOT) else { panic!() };
    assert_eq!(found, Sums { dirs: BTreeMap::new(), ..sums(1000) });
    assert!(touched.iter().all(|touched| touched.owner.group.is_none()));
    assert_eq!(touched.len(), 3);
}

#[test]
fn a_log_cut_short_anywhere_tells_what_is_whole() {
    let directory = crashed();
    let log = the_log(&directory);
    let bytes = fs::read(&log).unwrap();
    let touched = all_touched();
    let ends: Vec<usize> = touched
        .iter()
        .scan(format::HEADER, |end, touched| {
            *end += format::RECORD_HEAD + 40 + touched.place.len();
            Some(*end)
        })
        .collect();
    assert_eq!(ends.last(), Some(&bytes.len()));
    for length in 0..=bytes.len() {
        fs::write(&log, &bytes[..length]).unwrap();
        let expected = if length < format::HEADER {
            Start::Lost { last: Some(sums(1000)) }
        } else {
            let whole = ends.iter().filter(|&&end| end <= length).count();
            Start::Crashed { sums: sums(1000), exact: true, touched: touched[..whole].to_vec() }
        };
        assert_eq!(find(&directory, BOOT), expected, "cut to {length}");
    }
    // The cut-off record is removed for good: the next record follows the last whole one.
    fs::write(&log, &bytes[..bytes.len() - 1]).unwrap();
    let (saved, _) = open(&directory, BOOT);
    saved.touch(id(12), b"again", 0, owner(1, None));
    drop(saved);
    let Start::Crashed { touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!((touched.len(), &touched[2].place[..]), (3, &b"again"[..]));
}

#[test]
fn a_log_that_was_being_started_does_no_harm() {
    let directory = crashed();
    let bytes = fs::read(the_log(&directory)).unwrap();
    let (saved, _) = open(&directory, BOOT);
    let next = directory.path().join(format!("log.{}", saved.generation() + 1));
    drop(saved);
    for length in 0..format::HEADER {
        fs::write(&next, &bytes[..length]).unwrap();
        assert!(
            matches!(find(&directory, BOOT), Start::Crashed { touched, .. } if touched == all_touched()),
            "{length}"
        );
    }
    let (saved, _) = open(&directory, BOOT);
    saved.touch(id(13), b"d", 5, owner(4, None));
    saved.checkpoint(&sums(80), true).unwrap();
    drop(saved);
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(80), exact: true, touched: Vec::new() });
}

#[test]
fn no_damaged_byte_of_a_log_goes_unnoticed() {
    let directory = crashed();
    let log = the_log(&directory);
    let bytes = fs::read(&log).unwrap();
    for at in 0..bytes.len() {
        for bit in [1, 0x80] {
            let mut damaged = bytes.clone();
            damaged[at] ^= bit;
            fs::write(&log, &damaged).unwrap();
            assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(1000)) }, "byte {at}");
        }
    }
}

#[test]
fn no_damaged_byte_of_a_checkpoint_goes_unnoticed() {
    let directory = crashed();
    let path = directory.path().join("checkpoint");
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, &damaged).unwrap();
        assert_eq!(find(&directory, BOOT), Start::Lost { last: None }, "byte {at}");
        fs::write(&path, &bytes[..at]).unwrap();
        assert_eq!(find(&directory, BOOT), Start::Lost { last: None }, "cut to {at}");
    }
    fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    assert_eq!(find(&directory, BOOT), Start::Lost { last: None }, "something behind");
    // An unreadable state is replaced.
    let (saved, _) = open(&directory, BOOT);
    saved.checkpoint(&sums(3), true).unwrap();
    drop(saved);
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(3), exact: true, touched: Vec::new() });
}

#[test]
fn checkpoints_read_as_they_were_written() {
    let checkpoint = Checkpoint {
        generation: u64::MAX,
        boot: BOOT,
        clean: true,
        exact: false,
        written: 1,
        root: (3, 4),
        groups: vec![Vec::new(), vec![0xff; 5000]],
        sums: Sums {
            users: (0..1000).map(|uid| (uid, Sum { bytes: u64::MAX - u64::from(uid), inodes: 1 })).collect(),
            ..sums(u64::MAX)
        },
    };
    assert_eq!(Checkpoint::decode(&checkpoint.encode()), Ok(checkpoint.clone()));
    let mut other = checkpoint.encode();
    other[7] = 2;
    assert_eq!(Checkpoint::decode(&other), Err(format::Unreadable::Version(2)));
    // A count that exceeds the available bytes.
    let empty = Checkpoint { groups: Vec::new(), sums: Sums::default(), ..checkpoint };
    let mut bytes = empty.encode();
    let groups = 16 + 8 + 16 + 4 + 24;
    bytes[groups..groups + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let sum = format::crc(&bytes[16..]);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Checkpoint::decode(&bytes), Err(format::Unreadable::Damaged));
}

#[test]
fn the_checksum_is_the_known_one() {
    // RFC 3720, B.4, and the usual check value.
    assert_eq!(format::crc(b"123456789"), 0xe306_9283);
    assert_eq!(format::crc(&[0; 32]), 0x8a91_36aa);
    assert_eq!(format::crc(&[0xff; 32]), 0x62a8_ab43);
}

#[test]
fn boot_ids_are_read() {
    let id = files::parse_boot_id("01234567-89ab-cdef-0123-456789abcdef\n").unwrap();
    assert_eq!(id.0, [1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
    for bad in ["", "+1234567-89ab-cdef-0123-456789abcdef", "01234567", "z1234567-89ab-cdef-0123-456789abcdef"] {
        assert_eq!(files::parse_boot_id(bad), None, "{bad}");
    }
    assert_eq!(BootId::present().unwrap(), BootId::present().unwrap());
}

#[test]
fn a_full_disk_costs_the_log_until_the_next_checkpoint() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    saved.log.write().as_mut().unwrap().fill_the_disk();
    saved.touch(id(20), b"f", 1, owner(0, None));
    assert!(!saved.follows());
    saved.touch(id(21), b"g", 1, owner(0, None));
    assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(1000)) }, "a record is lacking");
    saved.checkpoint(&sums(30), true).unwrap();
    assert!(saved.follows());
    saved.touch(id(22), b"h", 1, owner(0, None));
    let Start::Crashed { sums: found, touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!((found, touched.len()), (sums(30), 1));
    saved.log.write().as_mut().unwrap().fill_the_disk();
    saved.touch(id(23), b"i", 1, owner(0, None));
    saved.close(&sums(40), true).unwrap();
    drop(saved);
    assert_eq!(find(&directory, NEXT_BOOT), Start::Clean { sums: sums(40), exact: true });
}

#[test]
fn a_full_disk_between_a_checkpoints_begin_and_its_end_is_not_forgotten() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    let pending = saved.begin_checkpoint(&sums(50), true).unwrap();
    saved.log.write().as_mut().unwrap().fill_the_disk();
    saved.touch(id(20), b"f", 1, owner(0, None));
    assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(1000)) });
    pending.commit().unwrap();
    assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(50)) });
}

#[test]
fn a_log_that_cannot_be_removed_is_made_invalid() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    saved.log.read().as_ref().unwrap().invalidate(&saved.directory).unwrap();
    assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(1000)) });
}

#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_older_one_valid() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    let in_the_way = directory.path().join("checkpoint.new");
    fs::create_dir(&in_the_way).unwrap();
    for attempt in 0..3 {
        let error = saved.checkpoint(&sums(2000), true).unwrap_err();
        assert!(error.to_string().contains("checkpoint.new"), "{error}");
        saved.touch(id(30 + attempt), b"n", 7, owner(0, None));
    }
    let Start::Crashed { sums: found, touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!((found, touched.len()), (sums(1000), 6), "all logs since count");
    fs::remove_dir(&in_the_way).unwrap();
    saved.checkpoint(&sums(2000), true).unwrap();
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(2000), exact: true, touched: Vec::new() });
    the_log(&directory);
}

#[test]
fn a_clean_state_that_cannot_be_marked_as_in_use_is_not_believed_again() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    saved.close(&sums(9), true).unwrap();
    drop(saved);
    fs::create_dir(directory.path().join("checkpoint.new")).unwrap();
    let (saved, start) = open(&directory, BOOT);
    assert_eq!((start, saved.follows()), (Start::Clean { sums: sums(9), exact: true }, false));
    saved.touch(id(1), b"a", 0, owner(0, None));
    drop(saved);
    assert_eq!(find(&directory, BOOT), Start::Lost { last: Some(sums(9)) });
    assert_eq!(find(&directory, NEXT_BOOT), Start::Lost { last: Some(sums(9)) });
}

#[test]
fn an_overtaken_checkpoint_is_left_out() {
    let directory = crashed();
    let (saved, _) = open(&directory, BOOT);
    let older = saved.begin_checkpoint(&sums(60), true).unwrap();
    let newer = saved.begin_checkpoint(&sums(70), true).unwrap();
    newer.commit().unwrap();
    older.commit().unwrap();
    assert_eq!(find(&directory, BOOT), Start::Crashed { sums: sums(70), exact: true, touched: Vec::new() });
}

#[test]
fn a_missing_log_in_the_sequence_is_noticed() {
    for missing in 0..3 {
        let directory = crashed();
        let (saved, _) = open(&directory, BOOT);
        let first = saved.generation();
        let _ = saved.begin_checkpoint(&sums(60), true).unwrap();
        let _ = saved.begin_checkpoint(&sums(70), true).unwrap();
        saved.touch(id(40), b"n", 7, owner(0, None));
        drop(saved);
        assert!(matches!(find(&directory, BOOT), Start::Crashed { touched, .. } if touched.len() == 4));
        fs::remove_file(directory.path().join(format!("log.{}", first + missing))).unwrap();
        let start = find(&directory, BOOT);
        // Only the order in which logs are removed shows that there was a third log: the first one
        // is removed first.
        assert_eq!(start == Start::Lost { last: Some(sums(1000)) }, missing < 2, "{missing}");
    }
}

#[test]
fn a_log_that_has_grown_asks_for_a_checkpoint() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    assert!(!saved.wants_checkpoint());
    saved.checkpoint(&sums(0), true).unwrap();
    for ino in 0..9 {
        assert!(!saved.wants_checkpoint());
        saved.touch(id(ino), &vec![b'p'; 1 << 20], 0, owner(0, None));
        if ino < 7 {
            assert_eq!(saved.generation(), 1);
        } else {
            break;
        }
    }
    assert!(saved.wants_checkpoint());
    saved.checkpoint(&sums(0), true).unwrap();
    assert!(!saved.wants_checkpoint());
}

#[test]
fn threads_may_touch_together() {
    let directory = TempDir::new().unwrap();
    let (saved, _) = open(&directory, BOOT);
    saved.checkpoint(&sums(0), true).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let saved = &saved;
            scope.spawn(move || {
                for file in 0..500 {
                    saved.touch(
                        id(thread << 32 | file),
                        &vec![b'p'; (file % 200) as usize],
                        file,
                        owner(thread as u32, None),
                    );
                }
            });
        }
    });
    drop(saved);
    let Start::Crashed { touched, .. } = find(&directory, BOOT) else { panic!() };
    assert_eq!(touched.len(), 4000);
    assert!(
        touched.iter().all(|touched| touched.charge == touched.id.ino & 0xffff_ffff
            && touched.place.len() as u64 == touched.charge % 200)
    );
}
