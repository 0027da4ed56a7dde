//! Frames in a map: compressed and checked as in a pool, counted, and damaged on request.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Damage, PoolError};
use crate::frames::{Compressed, CompressionSetting, Frames, NewFrame, Owner};
use crate::pointer::{Compression, Pointer};

#[derive(Default)]
pub(super) struct Memory {
    frames: RwLock<HashMap<u32, Vec<u8>>>,
    written: Mutex<Vec<(Pointer, Owner)>>,
    pub(super) reads: AtomicU64,
    pub(super) named: Mutex<Vec<Vec<Pointer>>>,
    pub(super) fail_writes: AtomicBool,
}

impl Memory {
    /// All frames that were ever written.
    pub(super) fn written(&self) -> Vec<(Pointer, Owner)> {
        self.written.lock().clone()
    }

    pub(super) fn all(&self) -> BTreeSet<u32> {
        self.written.lock().iter().map(|(pointer, _)| pointer.index).collect()
    }

    pub(super) fn free(&self, index: u32) {
        self.frames.write().remove(&index).expect("freed once");
    }

    pub(super) fn damage(&self, index: u32) {
        let mut frames = self.frames.write();
        let content = frames.get_mut(&index).unwrap();
        let middle = content.len() / 2;
        content[middle] ^= 0x40;
    }

    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Frames for Memory {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let wrong = |damage| PoolError::Frame { pointer: *pointer, damage };
        let frames = self.frames.read();
        let stored = frames.get(&pointer.index).ok_or_else(|| wrong(Damage::Header))?;
        if pointer.is_sealed() {
            return match crate::frame::stored::check(pointer, stored) {
                Some(damage) => Err(wrong(damage)),
                None => Ok(stored.as_slice().into()),
            };
        }
        let content: Arc<[u8]> = match pointer.compression {
            Compression::Lz4 => {
                let mut content: Arc<[u8]> = std::iter::repeat_n(0, pointer.logical as usize).collect();
                let space = Arc::get_mut(&mut content).unwrap();
                lz4_flex::block::decompress_into(stored, space).map_err(|_| wrong(Damage::Compression))?;
                content
            }
            _ => stored.as_slice().into(),
        };
        if xxh3_128(&content).to_le_bytes() != pointer.checksum {
            return Err(wrong(Damage::Checksum));
        }
        Ok(content)
    }

    fn expect(&self, pointers: &[Pointer]) {
        self.named.lock().push(pointers.to_vec());
    }

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        if self.fail_writes.load(Ordering::Relaxed) {
            return Err(PoolError::NoSpace);
        }
        let compressed = if frame.compression == CompressionSetting::Lz4 {
            lz4_flex::block::compress(frame.content)
        } else {
            Vec::new()
        };
        let fits = frame.compression == CompressionSetting::Lz4
            && compressed.len() <= frame.content.len() - frame.content.len() / 8;
        let (stored, compression) =
            if fits { (compressed, Compression::Lz4) } else { (frame.content.to_vec(), Compression::Off) };
        let mut written = self.written.lock();
        let pointer = Pointer {
            segment: 7,
            index: written.len() as u32,
            offset: written.len() as u32,
            stored: stored.len() as u32,
            logical: frame.content.len() as u32,
            kind: frame.kind,
            compression,
            checksum_kind: frame.checksum,
            pin: 0,
            birth: frame.birth,
            checksum: xxh3_128(frame.content).to_le_bytes(),
        };
        written.push((pointer, frame.owner));
        self.frames.write().insert(pointer.index, stored);
        Ok(pointer)
    }

    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        if self.fail_writes.load(Ordering::Relaxed) {
            return Err(PoolError::NoSpace);
        }
        let stored = compressed.stored.clone().expect("sealed frames have their stored bytes");
        let mut written = self.written.lock();
        let index = written.len() as u32;
        let pointer = Pointer { segment: 7, index, offset: index, birth: frame.birth, ..compressed.pointer };
        written.push((pointer, frame.owner));
        self.frames.write().insert(index, stored);
        Ok(pointer)
    }
}
