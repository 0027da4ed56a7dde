//! Files whose old content cannot be read.

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
    // More pieces than a patch can have, and more bytes than are worth a patch.
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

#[test]
fn a_file_whose_rows_rot_is_set_apart_and_nobody_else() {
    for (rotten, comes_back) in (0..3).flat_map(|rotten| [(rotten, false), (rotten, true)]) {
        let (files, frames) = empty();
        let file = make(&files, &files.root(), b"file", FileType::Regular);
        let other = make(&files, &files.root(), b"other", FileType::Regular);
        let data = vec![5; 4096 * 3];
        files.write(&file, Some(0), &data).unwrap();
        files.flush(Txg(7)).unwrap();
        // Parts of records, which are stored by the flush.
        let mut new = data.clone();
        for record in 0..3 {
            new[record * 4096 + 5..][..3000].fill(9);
            files.write(&file, Some(record as u64 * 4096 + 5), &[9; 3000]).unwrap();
        }
        files.write(&other, Some(0), &[7; 9000]).unwrap();
        let watched = files.look_at_table(|table| Arc::clone(&table.1));
        let key = match rotten {
            0 => keys::extent(file.number(), 1).to_vec(),
            1 => keys::inode(file.number()).to_vec(),
            _ => {
                new[4096..].copy_from_slice(&data[4096..]);
                files.zero(&file, 4096, 8192, false).unwrap();
                files.write(&file, Some(4096), &data[4096..]).unwrap();
                files.flush(Txg(7)).unwrap();
                files.write(&file, Some(4096), b"small").unwrap();
                new[4096..4101].copy_from_slice(b"small");
                keys::patch(file.number(), 1, 0).to_vec()
            }
        };
        watched.rotten.lock().push(key);
        for txg in 7..10 {
            files.flush(Txg(txg)).unwrap_or_else(|error| panic!("{rotten} {comes_back} {txg}: {error}"));
            assert!(files.buffered() > 0, "{rotten}");
            assert!(file.check_synced().is_err());
            assert!(files.write(&file, Some(1), b"x").is_err(), "{rotten}");
        }
        assert_eq!(content(&files, &other), [7; 9000]);
        if comes_back {
            watched.rotten.lock().clear();
            files.flush(Txg(10)).unwrap();
            assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
            assert_eq!(content(&files, &file), new);
            files.write(&file, Some(1), b"x").unwrap();
            files.flush(Txg(10)).unwrap();
        } else {
            files.flush(Txg(10)).unwrap();
            assert_eq!((files.buffered(), files.throttle.held()), (0, 0));
            // A sync fails once.
            assert!(file.check_synced().is_err());
            file.check_synced().unwrap();
            watched.rotten.lock().clear();
            let found = content(&files, &file);
            let kept = if rotten == 1 { 0 } else { 4096 };
            assert_eq!((&found[..kept], &found[4096..8192], found.len()), (&new[..kept], &data[4096..8192], new.len()));
        }
        check(&files, &frames, &mut Vec::new());
    }
}

#[test]
fn a_file_system_whose_head_rots_becomes_read_only_and_its_commits_succeed() {
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    files.write(&file, Some(0), &[5; 9000]).unwrap();
    let watched = files.look_at_table(|table| Arc::clone(&table.1));
    watched.rotten.lock().push(keys::head().to_vec());
    files.flush(Txg(7)).unwrap();
    assert_eq!(content(&files, &file), [5; 9000]);
    assert!(files.write(&file, Some(1), b"x").is_err());
    assert!(files.make(&files.root(), b"another", b"", &new(FileType::Regular)).is_err());
    watched.rotten.lock().clear();
    files.flush(Txg(8)).unwrap();
    files.write(&file, Some(1), b"x").unwrap();
    files.flush(Txg(8)).unwrap();
    check(&files, &frames, &mut Vec::new());
}
