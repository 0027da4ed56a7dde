//! Tests of the devices.

use super::*;
use simulator::Random;

fn filled(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.next() as u8).collect()
}

#[test]
fn a_file_is_a_device() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let device = FileDevice::create(&path, 1 << 20).unwrap();
    assert_eq!(device.length(), 1 << 20);
    assert_eq!(device.name(), path.to_str().unwrap());
    let content = filled(8192, 1);
    device.write_at(&content, 4096).unwrap();
    device.sync().unwrap();
    let mut back = vec![0; 8192];
    device.read_at(&mut back, 4096).unwrap();
    assert_eq!(back, content);
    device.expect(0, 8192);
    device.discard(4096, 8192).unwrap();
    assert!(device.write_at(&content, (1 << 20) - 4096).is_err(), "a write must not make the file longer");
    assert!(device.read_at(&mut back, (1 << 20) - 4096).is_err());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    // One process has a device open for writing, without readers; readers share it.
    assert_eq!(FileDevice::open(&path, true).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    assert_eq!(FileDevice::open(&path, false).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    drop(device);
    let one = FileDevice::open(&path, false).unwrap();
    let two = FileDevice::open(&path, false).unwrap();
    assert!(FileDevice::open(&path, true).is_err());
    assert_eq!((one.length(), two.length()), (1 << 20, 1 << 20));
    assert!(FileDevice::create(&path, 1).is_err(), "an existing file is not overwritten");
    assert!(FileDevice::open(directory.path(), true).is_err(), "a directory is no device");
}

/// As another process does that looks for pools.
#[test]
fn a_writer_waits_for_readers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    drop(FileDevice::create(&path, 1 << 20).unwrap());
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut opened = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                opened += u32::from(FileDevice::open(&path, false).is_ok());
            }
            opened
        });
        // As long as other tests wait: a busy machine lets the reader rest while it has the lock.
        let open = || FileDevice::open_within(&path, true, std::time::Duration::from_secs(180));
        let refused: Vec<_> = (0..500).filter_map(|_| open().err()).collect();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(refused.is_empty(), "{} times: {}", refused.len(), refused[0]);
        assert!(reader.join().unwrap() > 0);
    });
}

#[test]
fn a_crash_keeps_what_was_synced_and_sectors_whole() {
    let mut kept_some = 0;
    for seed in 0..200 {
        let device = Simulator::new("sim", 64 << 10);
        let old = filled(64 << 10, seed);
        device.write_at(&old, 0).unwrap();
        device.sync().unwrap();
        let new = filled(10_000, seed + 1000);
        device.write_at(&new, 700).unwrap();
        let newer = filled(3000, seed + 2000);
        device.write_at(&newer, 5000).unwrap();
        device.crash(seed);
        let after = device.bytes();
        let mut first = old.clone();
        first[700..10_700].copy_from_slice(&new);
        let mut second = first.clone();
        second[5000..8000].copy_from_slice(&newer);
        let mut olds = 0;
        for (at, sector) in after.chunks(512).enumerate() {
            let range = at * 512..at * 512 + 512;
            let mut alone = old.clone();
            alone[5000..8000].copy_from_slice(&newer);
            let states = [&old[range.clone()], &first[range.clone()], &second[range.clone()], &alone[range.clone()]];
            assert!(states.contains(&sector) || range.start < 8000, "a torn sector");
            olds += usize::from(sector == states[0]);
        }
        assert_eq!(&after[..700], &old[..700]);
        assert_eq!(&after[10_752..], &old[10_752..]);
        match seed % 4 {
            0 => assert_eq!(after, second),
            1 => assert_eq!(after, old),
            _ => kept_some += usize::from(olds > 108 && olds < 127),
        }
    }
    assert!(kept_some > 20, "crashes must tear");
}

#[test]
fn failures_are_put_in() {
    let device = Simulator::new("sim", 4096);
    device.fail_after(2);
    device.write_at(&[1; 512], 0).unwrap();
    device.sync().unwrap();
    assert!(device.write_at(&[2; 512], 0).is_err());
    assert!(device.sync().is_err());
    assert_eq!(device.operations(), 2);
    device.crash(0);
    let mut back = [0; 1];
    device.read_at(&mut back, 0).unwrap();
    assert_eq!(back, [1]);
    device.rot(0, 3);
    device.read_at(&mut back, 0).unwrap();
    assert_eq!(back, [9]);
    device.fail_reads(true);
    assert!(device.read_at(&mut back, 0).is_err());
    assert!(device.read_at(&mut back, 1 << 40).is_err());
    device.slow_down(std::time::Duration::from_millis(1));
    device.write_at(&[3], 4095).unwrap();
    assert_eq!(device.written(), 513);
}

#[test]
fn streams_are_written_whatever_lies_at_multiples_of_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let device = FileDevice::create(&directory.path().join("file"), 1 << 20).unwrap();
    let memory: Vec<u8> = (0..300_000u32).map(|number| (number % 241) as u8).collect();
    let even = memory.as_ptr().align_offset(4096);
    for (from, length, offset) in [
        (even, 8192, 4096),
        (even + 1, 8192, 16384),
        (even, 5000, 32768),
        (even, 65536, 131_072),
        (even, 4096, 300_001),
    ] {
        let bytes = &memory[from..from + length];
        device.write_at(&[255; 20_000], offset).unwrap();
        device.write_stream(bytes, offset).unwrap();
        let mut back = vec![0; length];
        device.read_at(&mut back, offset).unwrap();
        assert_eq!(back, bytes);
    }
    assert!(device.write_stream(&memory[even..even + 8192], (1 << 20) - 4096).is_err(), "behind the end");
    assert_eq!(device.length(), std::fs::metadata(directory.path().join("file")).unwrap().len());
}
