//! The intent log: records, the ring over crashes and laps, group commit by real threads.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::codec::Reader;
use proptest::prelude::*;

mod group;
mod ring;

/// An area in memory that loses unsynced writes: a crash keeps any subset of the sectors written since the last sync.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Mutex<Sectors>>);

#[derive(Debug, Default)]
struct Sectors {
    durable: Vec<u8>,
    volatile: BTreeMap<u64, [u8; SECTOR]>,
    syncs: usize,
    fail_sync: bool,
}

const SECTOR: usize = 512;

impl Memory {
    pub fn new(length: u64) -> Self {
        Self(Arc::new(Mutex::new(Sectors { durable: vec![0; length as usize], ..Sectors::default() })))
    }

    /// The content after a crash: each unsynced sector survives if its bit is set.
    pub fn crash(&self, mut keep: impl FnMut() -> bool) {
        let mut sectors = self.0.lock();
        for (sector, content) in std::mem::take(&mut sectors.volatile) {
            if keep() {
                let at = sector as usize * SECTOR;
                sectors.durable[at..at + SECTOR].copy_from_slice(&content);
            }
        }
    }

    pub fn flip(&self, offset: u64) {
        self.0.lock().durable[offset as usize] ^= 0x10;
    }

    pub fn syncs(&self) -> usize {
        self.0.lock().syncs
    }

    /// From now on syncs fail.
    pub fn fail(&self) {
        self.0.lock().fail_sync = true;
    }
}

impl Area for Memory {
    fn length(&self) -> u64 {
        self.0.lock().durable.len() as u64
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        let sectors = self.0.lock();
        let (from, to) = (offset as usize, offset as usize + into.len());
        let mut content = sectors.durable.clone();
        for (sector, fresh) in &sectors.volatile {
            let at = *sector as usize * SECTOR;
            content[at..at + SECTOR].copy_from_slice(fresh);
        }
        into.copy_from_slice(&content[from..to]);
        Ok(())
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError> {
        assert_eq!((from.len() % SECTOR, offset as usize % SECTOR), (0, 0));
        let mut sectors = self.0.lock();
        assert!(offset as usize + from.len() <= sectors.durable.len());
        for (number, part) in from.chunks(SECTOR).enumerate() {
            sectors.volatile.insert(offset / SECTOR as u64 + number as u64, part.try_into().unwrap());
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), PoolError> {
        let mut sectors = self.0.lock();
        if sectors.fail_sync {
            let source = Arc::new(io::Error::from_raw_os_error(5));
            return Err(PoolError::Device { device: "memory".to_owned(), doing: "syncing", source });
        }
        sectors.syncs += 1;
        for (sector, content) in std::mem::take(&mut sectors.volatile) {
            let at = sector as usize * SECTOR;
            sectors.durable[at..at + SECTOR].copy_from_slice(&content);
        }
        Ok(())
    }
}

/// A distinguishable record: operation `number` of a txg.
pub fn operation(number: u64, txg: u64, data: &[u8]) -> Vec<u8> {
    let changes = vec![LogChange::Write { inode: number, offset: 0, data }];
    LogRecord { txg: Txg(txg), dataset: 1, changes }.encoded()
}

fn change() -> impl Strategy<Value = (u8, Vec<u8>, Vec<u8>, u64, u64)> {
    (1u8..=4, any::<Vec<u8>>(), any::<Vec<u8>>(), any::<u64>(), any::<u64>())
}

proptest! {
    #[test]
    fn records_survive(txg: u64, dataset: u64, parts in proptest::collection::vec(change(), 0..6)) {
        let changes = parts.iter().map(|(kind, first, second, inode, offset)| match kind {
            1 => LogChange::Put { key: first, value: second },
            2 => LogChange::Delete { key: first },
            3 => LogChange::DeleteRange { from: first, to: second },
            _ => LogChange::Write { inode: *inode, offset: *offset, data: second },
        });
        let record = LogRecord { txg: Txg(txg), dataset, changes: changes.collect() };
        let bytes = record.encoded().repeat(2);
        let mut from = Reader::new(&bytes);
        prop_assert_eq!(&LogRecord::decode(&mut from).unwrap(), &record);
        prop_assert_eq!(&LogRecord::decode(&mut from).unwrap(), &record);
        prop_assert!(from.is_empty());
        for cut in 0..bytes.len() / 2 {
            prop_assert!(LogRecord::decode(&mut Reader::new(&bytes[..cut])).is_err());
        }
    }

    #[test]
    fn any_bytes_are_a_record_or_an_error(bytes: Vec<u8>) {
        if let Ok(record) = LogRecord::decode(&mut Reader::new(&bytes)) {
            let again = record.encoded();
            prop_assert_eq!(LogRecord::decode(&mut Reader::new(&again)).unwrap(), record);
        }
    }
}
