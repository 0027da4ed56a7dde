//! Split records against a plain buffer: content after random writes, truncations and flushes, and
//! the space that files use.

use super::*;

/// Files whose room is short or not, as the test chooses.
fn with_room_that_changes() -> (MapFiles, Arc<MapFrames>, Arc<Unlimited>) {
    let frames = Arc::new(MapFrames { room: AtomicI64::new(-1), ..MapFrames::default() });
    let admission = Arc::new(Unlimited::default());
    let config = FilesConfig { admission: Arc::clone(&admission) as Arc<dyn Admission>, ..config(&frames) };
    let new = NewFiles { hashing: keys::Hashing::Ordered, folding: Folding::EXACT, seed: 99, owner: (0, 0) };
    (Files::format(config, MapTable::default(), new).unwrap(), frames, admission)
}

/// Numbers of one sequence for all runs.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

const RECORD: usize = 1 << 16;

#[test]
fn split_records_have_the_content_that_was_written() {
    for seed in 0..4 {
        let (files, frames, admission) = with_room_that_changes();
        files.storing.write().record_shift = 16;
        let file = make(&files, &files.root(), b"a", FileType::Regular);
        let mut random = Random(seed);
        let mut expected = random.bytes(RECORD * 3 + 777);
        files.write(&file, Some(0), &expected).unwrap();
        for step in 0..500 {
            admission.is_short.store(random.below(2) == 0, Ordering::Relaxed);
            match random.below(20) {
                0 => {
                    let size = RECORD + random.below(3 * RECORD);
                    files
                        .set_attributes(
                            &file,
                            &AttributeChange { size: Some(size as u64), ..AttributeChange::default() },
                        )
                        .unwrap();
                    expected.resize(size, 0);
                }
                1..4 => check(&files, &frames, &mut Vec::new()),
                4 => assert!(content(&files, &file) == expected, "seed {seed}, step {step}"),
                kind => {
                    let length = 1 + random.below([40, 600, 4096, 9000, 20_000, 70_000][kind % 6]);
                    let from = random.below(expected.len());
                    // Half of them aligned to pages.
                    let (from, length) = if kind % 2 == 0 {
                        (from / 4096 * 4096, length.next_multiple_of(4096))
                    } else {
                        (from, length)
                    };
                    let data = if kind == 19 { vec![0; length] } else { random.bytes(length) };
                    files.write(&file, Some(from as u64), &data).unwrap();
                    expected.resize(expected.len().max(from + length), 0);
                    expected[from..from + length].copy_from_slice(&data);
                }
            }
        }
        check(&files, &frames, &mut Vec::new());
        assert!(content(&files, &file) == expected, "seed {seed}");
        let from = expected.len() / 3;
        let mut part = vec![0; 12_345];
        files.read(&file, from as u64, &mut part).unwrap();
        assert!(part == expected[from..from + 12_345]);
    }
}

#[test]
fn a_file_does_not_grow_by_being_overwritten_where_room_is_short() {
    let (files, frames, admission) = with_room_that_changes();
    files.storing.write().record_shift = 17;
    let file = make(&files, &files.root(), b"a", FileType::Regular);
    let mut random = Random(1);
    let mut expected = random.bytes(8 << 17);
    files.write(&file, Some(0), &expected).unwrap();
    check(&files, &frames, &mut Vec::new());
    let takes = || files.attributes(&file).unwrap().charged;
    let fresh = takes();
    for (is_short, block, most) in
        [(false, 16 << 10, fresh / 2 * 3), (true, 16 << 10, fresh / 50), (true, 4096, fresh / 40), (true, 1 << 17, 0)]
    {
        admission.is_short.store(is_short, Ordering::Relaxed);
        for round in 0..3 * expected.len() / block {
            let from = if is_short && round < expected.len() / block {
                round * block
            } else {
                random.below(expected.len() / block) * block
            };
            let data = random.bytes(block);
            files.write(&file, Some(from as u64), &data).unwrap();
            expected[from..from + block].copy_from_slice(&data);
            if round % 7 == 0 {
                check(&files, &frames, &mut Vec::new());
            }
        }
        check(&files, &frames, &mut Vec::new());
        assert!(takes() <= fresh + most, "blocks of {block}: {} of {fresh}", takes());
    }
    assert!(content(&files, &file) == expected);
}

#[test]
fn where_a_block_cannot_be_read_or_written_nothing_is_lost() {
    let (files, frames, admission) = with_room_that_changes();
    admission.is_short.store(true, Ordering::Relaxed);
    files.storing.write().record_shift = 16;
    let file = make(&files, &files.root(), b"a", FileType::Regular);
    let mut random = Random(2);
    let mut expected = random.bytes(RECORD);
    files.write(&file, Some(0), &expected).unwrap();
    check(&files, &frames, &mut Vec::new());
    let data = random.bytes(4096);
    files.write(&file, Some(4096), &data).unwrap();
    expected[4096..8192].copy_from_slice(&data);
    // There is no room for all blocks: the written content waits, and no frame is leaked.
    for room in 0..5 {
        frames.room.store(room, Ordering::Relaxed);
        files.flush(Txg(7)).unwrap();
        assert!(content(&files, &file) == expected);
    }
    frames.room.store(-1, Ordering::Relaxed);
    check(&files, &frames, &mut Vec::new());
    // An unreadable block: a write next to it is stored, and can be read.
    let lost =
        frames.content.lock().iter().find(|(_, content)| content[..] == expected[8192..12_288]).map(|(at, _)| *at);
    frames.rotten.lock().push(lost.unwrap());
    let data = random.bytes(100);
    files.write(&file, Some(9000), &data).unwrap();
    check(&files, &frames, &mut Vec::new());
    let mut part = vec![0; 100];
    assert!(files.read(&file, 8192, &mut part).is_err(), "the damage is reported");
    files.read(&file, 9000, &mut part).unwrap();
    assert!(part == data);
    files.read(&file, 0, &mut part).unwrap();
    assert!(part == expected[..100]);
}
