//! Deadlists against a naive simulation with all blocks of every snapshot: freed frames, the time
//! of their freeing, and every figure.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::pointer::{ChecksumKind, Compression, FrameKind};
use proptest::prelude::*;

mod lists;
mod simulation;
mod zfs;

/// Rows in a map.
#[derive(Clone, Debug, Default)]
pub struct Map(pub BTreeMap<Vec<u8>, Vec<u8>>);

impl Rows for Map {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError> {
        Ok(self.0.get(key).cloned())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        assert!(value.len() <= 8000, "a row of {} bytes", value.len());
        self.0.insert(key.to_vec(), value.to_vec());
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), PoolError> {
        self.0.remove(key);
        Ok(())
    }

    fn range(&self, range: Range<Vec<u8>>, visit: &mut RowVisitor<'_>) -> Result<(), PoolError> {
        for (key, value) in self.0.range(range) {
            if !visit(key, value)? {
                break;
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_chunk_or_an_error(bytes: Vec<u8>) {
        if let Ok(entries) = decode_chunk(&bytes) {
            let mut to = Writer::default();
            entries.iter().for_each(|entry| entry.encode(&mut to));
            prop_assert_eq!(decode_chunk(&to.finish()).unwrap(), entries);
        }
        let _ = Totals::decode(&bytes).map(|totals| assert_eq!(Totals::decode(&totals.encode()).unwrap(), totals));
        let _ = Bucket::decode(&bytes).map(|bucket| assert_eq!(Bucket::decode(&bucket.encode()).unwrap(), bucket));
        let _ = Part::decode(&bytes, &bytes).map(|part| assert_eq!(bytes[0], PART, "{}", part.chunk));
    }

    #[test]
    fn entries_survive(segment: u32, index: u32, units in 0u64..1 << 40, birth: u64, shared: bool) {
        let charged = units * 16;
        let (owner_charge, logical, birth) = (charged, index, Txg(birth));
        let entry = Dead { segment, index, charged, owner_charge, logical, birth, shared };
        let mut to = Writer::default();
        entry.encode(&mut to);
        prop_assert!(to.len() <= ENTRY_BYTES);
        prop_assert_eq!(decode_chunk(&to.finish()).unwrap(), vec![entry]);
    }
}

#[test]
fn an_entry_is_its_pointer() {
    let pointer = Pointer {
        segment: 3,
        index: 4,
        offset: 5,
        stored: 100,
        logical: 4096,
        kind: FrameKind::Data,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(6),
        checksum: [0; 16],
    };
    assert_eq!(
        Dead::of(&pointer, true),
        Dead { segment: 3, index: 4, charged: 192, owner_charge: 192, logical: 4096, birth: Txg(6), shared: true }
    );
}
