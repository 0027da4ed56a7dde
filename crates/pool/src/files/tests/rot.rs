//! Files whose old content cannot be read any more.

use super::*;

#[test]
fn an_owner_whose_use_cannot_be_read_stops_nobody() {
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    files.flush(Txg(7)).unwrap();
    let rotten = files.look_at_table(|table| Arc::clone(&table.1));
    rotten.rotten.lock().push(keys::owner_use(OwnerKind::User, 10).to_vec());
    let data = vec![5; 4096 * 3];
    files.write(&file, Some(0), &data).unwrap();
    files.flush(Txg(7)).unwrap();
    assert_eq!(content(&files, &file), data);
    // It is counted once it can be read again.
    rotten.rotten.lock().clear();
    check(&files, &frames, &mut Vec::new());
    assert!(!files.has_changes());
}

#[test]
fn who_writes_where_rows_cannot_be_read_is_told_and_no_commit_fails() {
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    let mut data = vec![5; 4096 * 3];
    files.write(&file, Some(0), &data).unwrap();
    files.flush(Txg(7)).unwrap();
    for record in 0..3 {
        files.write(&file, Some(record * 4096), b"patch").unwrap();
        data[record as usize * 4096..][..5].copy_from_slice(b"patch");
    }
    files.flush(Txg(7)).unwrap();
    let watched = files.look_at_table(|table| Arc::clone(&table.1));
    for key in [keys::patch(file.number(), 1, 0).to_vec(), keys::extent(file.number(), 1).to_vec()] {
        watched.rotten.lock().push(key);
        assert!(files.write(&file, Some(4096 + 9), b"small").is_err());
        assert!(files.write(&file, Some(4096), &[1; 4096]).is_err());
        files.write(&file, Some(2 * 4096 + 9), b"elsewhere").unwrap();
        data[2 * 4096 + 9..][..9].copy_from_slice(b"elsewhere");
        files.flush(Txg(7)).unwrap();
        assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
        watched.rotten.lock().clear();
        assert_eq!(content(&files, &file), data);
        check(&files, &frames, &mut Vec::new());
    }
}

#[test]
fn writes_to_a_record_that_rots_are_stored_all_the_same() {
    let (files, frames) = empty();
    files.storing.write().record_shift = 17;
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    let old: Vec<u8> = (0..1 << 17).map(|at: u32| (at % 251) as u8 | 1).collect();
    files.write(&file, Some(0), &old).unwrap();
    files.flush(Txg(7)).unwrap();
    frames.rotten.lock().extend(frames.content.lock().keys());
    // More pieces than one patch has, and more than what is worth a patch.
    for at in (0..100u64).map(|number| number * 1300) {
        files.write(&file, Some(at), &[200; 700]).unwrap();
    }
    files.flush(Txg(7)).unwrap();
    assert_eq!(files.buffered(), 0);
    let mut all = vec![0; 1 << 17];
    assert!(files.read(&file, 0, &mut all).is_err(), "what was not written again is damaged still");
    // Had it been whole, nothing would be missing.
    frames.rotten.lock().clear();
    assert_eq!(files.read(&file, 0, &mut all).unwrap(), all.len());
    for (at, byte) in all.iter().enumerate() {
        let expected = if at % 1300 < 700 && at / 1300 < 100 { 200 } else { old[at] };
        assert_eq!(*byte, expected, "at {at}");
    }
    // A whole write heals it.
    frames.rotten.lock().extend(frames.content.lock().keys());
    files.write(&file, Some(0), &old).unwrap();
    files.flush(Txg(7)).unwrap();
    assert_eq!(files.read(&file, 0, &mut all).unwrap(), all.len());
    assert_eq!(all, old);
}
