//! Flushes in parts, between which programs write.

use super::*;
use crate::files::content::{Flushed, Progress};

/// Length of a record, bytes.
const RECORD: u64 = 4096;

#[test]
fn a_flush_in_parts_ends_although_a_program_keeps_writing_ahead_of_it() {
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    let (mut expected, mut records) = (Vec::new(), 0);
    let mut write_ahead = |count: u64| {
        for _ in 0..count {
            // Not whole: they wait in memory.
            files.write(&file, Some(records * RECORD), &[1 + records as u8; 4000]).unwrap();
            expected.resize((records * RECORD) as usize, 0);
            expected.resize(expected.len() + 4000, 1 + records as u8);
            records += 1;
        }
    };
    write_ahead(64);
    let (mut progress, mut parts) = (Progress::in_parts(), 0);
    loop {
        let flushed = files.flush_part(Txg(7), &file, &mut progress).unwrap();
        parts += 1;
        write_ahead(20);
        if flushed != Flushed::Part || progress.is_done() {
            break;
        }
        assert!(parts < 10, "it follows the program");
    }
    assert!(parts > 2);
    assert_eq!(file.buffered(), 4000 * 20 * parts, "what was there at the beginning is stored");
    files.flush(Txg(7)).unwrap();
    assert_eq!((files.buffered(), files.throttle.held(), files.throttle.content()), (0, 0, 0));
    assert!(content(&files, &file) == expected);
    check(&files, &frames, &mut Vec::new());
}

#[test]
fn a_record_that_cannot_be_stored_keeps_no_other_of_its_file_in_memory() {
    let (files, frames) = empty();
    let file = make(&files, &files.root(), b"file", FileType::Regular);
    let other = make(&files, &files.root(), b"other", FileType::Regular);
    files.write(&file, Some(0), &[5; 40 * RECORD as usize]).unwrap();
    files.flush(Txg(7)).unwrap();
    for record in 0..40 {
        files.write(&file, Some(record * RECORD + 5), &[9; 3000]).unwrap();
    }
    files.write(&other, Some(0), &[7; 9000]).unwrap();
    let watched = files.look_at_table(|table| Arc::clone(&table.1));
    watched.rotten.lock().push(keys::extent(file.number(), 1).to_vec());
    files.flush_most().unwrap();
    assert_eq!((file.buffered(), other.buffered()), (RECORD, 0), "one record is left for the closed gate");
    assert!(file.check_synced().is_err());
    watched.rotten.lock().clear();
    files.flush_most().unwrap();
    file.check_synced().unwrap();
    assert_eq!(files.buffered(), 0);
    assert!(content(&files, &file).chunks(RECORD as usize).all(|record| record[5..3005] == [9; 3000]));
    check(&files, &frames, &mut Vec::new());
}
