//! Rows of the catalog survive, and any bytes are a row or an error.

use proptest::prelude::*;

use super::rows::{self, *};
use crate::deadlist::ListId;
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use crate::space::Usage;

fn pointer(segment: u32) -> Pointer {
    Pointer {
        segment,
        index: 1,
        offset: 2,
        stored: 3,
        logical: 4,
        kind: FrameKind::Inner,
        compression: Compression::Lz4,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(5),
        checksum: [6; 16],
    }
}

proptest! {
    #[test]
    fn datasets_and_snapshots_survive(name in "[a-z]{1,20}", guid: u64, at: i64, root: Option<u32>, numbers: [u64; 5], origin: bool) {
        let root = root.map(pointer);
        let usage = Usage {
            dataset: numbers[0],
            snapshots: numbers[1],
            referenced: numbers[2],
            unique: numbers[3],
            logical_used: numbers[4],
            logical_referenced: numbers[0],
        };
        let origin = origin.then_some((3, Txg(9)));
        let row = DatasetRow {
            parent: 1, name: name.clone(), guid, created: Txg(7), created_at: at, root, list: ListId(numbers[4]), usage, origin, newest: Txg(8),
        };
        prop_assert_eq!(DatasetRow::decode(&row.encode()).unwrap(), row);
        let row = SnapshotRow {
            name, guid, created_at: at, root, list: ListId(numbers[4]), referenced: numbers[2], logical: numbers[1], deferred: guid % 2 == 0, holds: 1, clones: 2,
        };
        prop_assert_eq!(SnapshotRow::decode(&row.encode()).unwrap(), row);
        let row = HistoryRow { at, txg: Txg(guid), uid: 5, internal: true, host: "h".to_owned(), text: "create".to_owned() };
        prop_assert_eq!(HistoryRow::decode(&row.encode()).unwrap(), row);
        let row = PropertyRow { source: PropertySource::Received, value: "off".to_owned() };
        prop_assert_eq!(PropertyRow::decode(&row.encode()).unwrap(), row);
        let row = BookmarkRow { txg: Txg(1), guid, created_at: at };
        prop_assert_eq!(BookmarkRow::decode(&row.encode()).unwrap(), row);
        let row = PoolHead { next: numbers[0], root: numbers[1], freeing: ListId(numbers[2]), history: numbers[3] };
        prop_assert_eq!(PoolHead::decode(&row.encode()).unwrap(), row);
    }

    #[test]
    fn any_bytes_are_a_row_or_an_error(bytes: Vec<u8>) {
        if let Ok(row) = DatasetRow::decode(&bytes) {
            prop_assert_eq!(DatasetRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = SnapshotRow::decode(&bytes) {
            prop_assert_eq!(SnapshotRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = HistoryRow::decode(&bytes) {
            prop_assert_eq!(row.encode(), bytes.clone());
        }
        if let Ok(row) = PropertyRow::decode(&bytes) {
            prop_assert_eq!(row.encode(), bytes.clone());
        }
        if let Ok(row) = BookmarkRow::decode(&bytes) {
            prop_assert_eq!(BookmarkRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = PoolHead::decode(&bytes) {
            prop_assert_eq!(PoolHead::decode(&row.encode()).unwrap(), row);
        }
    }

    #[test]
    fn keys_sort_as_their_numbers(a: [u64; 2], b: [u64; 2]) {
        prop_assert_eq!(rows::key(SNAPSHOT, &a, b"").cmp(&rows::key(SNAPSHOT, &b, b"")), a.cmp(&b));
        let named = rows::key(SNAPSHOT, &a, b"x");
        prop_assert_eq!(rows::parts::<2>(&named).unwrap(), (a, b"x".as_slice()));
        prop_assert!(rows::below(SNAPSHOT, &a[..1]).contains(&named));
    }
}
