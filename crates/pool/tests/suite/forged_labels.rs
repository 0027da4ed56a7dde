//! Labels and logs whose checksums are right and whose content is not: opening them is an error or
//! goes well, never a panic, never a loop, and never takes memory for what is not there.
//!
//! `NACRE_POOL_TRIALS` is the number of trials, `NACRE_POOL_SEED` another beginning.

use std::sync::Arc;

use crate::crash_model::World;
use crate::pools::gentle::{self, Watchdog};
use crate::pools::{Random, create, number, open};
use nacre_pool::device::{Device, Simulator};
use nacre_pool::label::{self, IDENTITY_AT, RING, RING_AT};
use nacre_pool::store::Access;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

const LENGTH: u64 = 64 << 20;
/// Where the area of the log begins.
const LOG_AT: usize = 1 << 20;

/// The image of a pool in use whose log holds something.
fn planted(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let disks = [Arc::new(Simulator::new("disk", LENGTH))];
    let imported = create(&disks, random.next());
    let mut world = World::new();
    for _ in 0..150 {
        assert!(world.step(&imported, &mut random));
    }
    imported.pool.commit().unwrap();
    let dataset = imported.pool.dataset(imported.pool.root().unwrap()).unwrap();
    let files = dataset.files();
    for at in 0..6 {
        let name = format!("logged {at}");
        let new = |parent: &nacre_pool::files::ParentView| {
            let row = nacre_pool::rows::InodeRow::new(nacre_pool::rows::FileType::Regular, 0o644, parent.now);
            Ok(nacre_pool::files::NewInode { row, target: None, attributes: vec![(b"user.a".to_vec(), vec![1; 300])] })
        };
        let (file, _) = files.make(&files.root(), name.as_bytes(), b"", &new).unwrap();
        files.write(&file, Some(0), &vec![at; 3000]).unwrap();
        imported.pool.sync_file(&dataset, &file).unwrap();
    }
    files.unlink(&files.root(), b"logged 3").unwrap();
    imported.pool.sync_names().unwrap();
    drop(dataset);
    drop(imported);
    disks[0].bytes()
}

/// A few bytes that are others.
fn mutate(bytes: &mut [u8], random: &mut Random) -> String {
    let mut done = String::new();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes[at] = 0,
            3 => bytes[at] = 0xff,
            _ => {
                let end = bytes.len().min(at + 8);
                bytes[at..end].fill(0xff);
            }
        }
        done.push_str(&format!(" {at}"));
    }
    done
}

/// How much of a block says something.
fn used(block: &[u8]) -> usize {
    block.iter().rposition(|byte| *byte != 0).map_or(1, |at| at + 1)
}

/// Forges a block that begins with 8 bytes of magic and a checksum of 16 bytes, in all labels.
fn forge_block(image: &mut [u8], at: u64, length: usize, random: &mut Random) -> String {
    let places = label::places(LENGTH);
    let first = (places[0] + at) as usize;
    let mut block = image[first..first + length].to_vec();
    let end = used(&block).max(25).min(length) + random.below(16) as usize;
    let done = mutate(&mut block[24..end.min(length)], random);
    let checksum = xxh3_128(&block[24..]).to_le_bytes();
    block[8..24].copy_from_slice(&checksum);
    for place in places {
        let at = (place + at) as usize;
        image[at..at + length].copy_from_slice(&block);
    }
    done
}

/// Where the blocks of the log begin that replay reads.
fn log_blocks(image: &[u8], start: u64) -> Vec<usize> {
    let mut found = Vec::new();
    let mut at = LOG_AT + usize::try_from(start).unwrap();
    while image[at..].starts_with(b"nLog") {
        found.push(at);
        let length = u32::from_le_bytes(image[at + 4..at + 8].try_into().unwrap()) as usize;
        at += (48 + length).next_multiple_of(4096);
    }
    found
}

/// Forges a block of the log, and seals it and all behind it anew.
fn forge_log(image: &mut [u8], start: u64, random: &mut Random) -> String {
    let blocks = log_blocks(image, start);
    assert!(blocks.len() > 3, "the log is empty");
    let chosen = random.below(blocks.len() as u64) as usize;
    let mut done = String::new();
    for (index, at) in blocks.iter().copied().enumerate().skip(chosen) {
        let length = u32::from_le_bytes(image[at + 4..at + 8].try_into().unwrap()) as usize;
        if index == chosen {
            done = format!("block {chosen}:{}", mutate(&mut image[at + 48..at + 48 + length], random));
        } else {
            let before = blocks[index - 1];
            let chain: [u8; 8] = image[before + 40..before + 48].try_into().unwrap();
            image[at + 32..at + 40].copy_from_slice(&chain);
        }
        image[at + 40..at + 48].fill(0);
        let checksum = xxh3_64(&image[at..at + 48 + length]).to_le_bytes();
        image[at + 40..at + 48].copy_from_slice(&checksum);
    }
    done
}

#[test]
fn labels_and_logs_that_are_wrong_do_no_harm_to_the_program() {
    let seed = number("NACRE_POOL_SEED", 1);
    let image = planted(seed);
    let root = {
        let disk: Arc<dyn Device> = Arc::new(Simulator::with_bytes("disk", image.clone()));
        let guid = label::probe(&*disk).unwrap().unwrap().pool;
        label::roots(&*disk, guid).unwrap().into_iter().max_by_key(|root| root.generation).unwrap()
    };
    let watchdog = Watchdog::start();
    let mut random = Random(seed ^ 0xbeef);
    let mut outcomes = [[0; 2]; 3];
    for trial in 0..number("NACRE_POOL_TRIALS", 40) {
        let mut forged = image.clone();
        let kind = random.below(3) as usize;
        let done = match kind {
            0 => forge_block(&mut forged, IDENTITY_AT, 32 << 10, &mut random),
            1 => forge_block(&mut forged, RING_AT + root.generation % RING * 4096, 4096, &mut random),
            _ => forge_log(&mut forged, root.log_start.position, &mut random),
        };
        let what = format!("seed {seed}, trial {trial}, {} {done}", ["identity", "root", "log"][kind]);
        watchdog.trial(&what);
        let disk = Arc::new(Simulator::with_bytes("disk", forged));
        let access = if random.below(3) == 0 { Access::ReadOnly } else { Access::ReadWrite };
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let Ok(imported) = open(&[Arc::clone(&disk)], random.next(), access) else { return false };
            for (id, _) in gentle::datasets(&imported) {
                if let Ok(dataset) = imported.pool.dataset(id) {
                    gentle::read(dataset.files());
                }
            }
            let _ = imported.pool.check(&imported.store, access == Access::ReadOnly, &mut |_| {});
            let _ = imported.store.scrub(&mut |_| true);
            let _ = imported.pool.commit();
            true
        }));
        match tried {
            Ok(opened) => outcomes[kind][usize::from(opened)] += 1,
            Err(panic) => {
                eprintln!("{what}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!(
        "campaign: seed {seed}, refused and opened, of identities, roots and logs: {outcomes:?} (NACRE_POOL_TRIALS, NACRE_POOL_SEED)"
    );
    assert!(outcomes[2].iter().sum::<u64>() > 0);
}
