//! Streams as bytes: what is written is read, and other bytes are refused.

use proptest::prelude::*;

use super::record::{Record, RowOp, SentFrame, SentProperty, SnapshotHead, StreamError, StreamHead, rows};
use super::{ResumeToken, StreamReader, StreamWriter};
use crate::codec::Writer;
use crate::pointer::{ChecksumKind, Compression};

fn head() -> SnapshotHead {
    SnapshotHead {
        below: "/a".into(),
        name: "tank/a@b".into(),
        guid: 7,
        created: -3,
        from: 9,
        clone: true,
        stored: true,
        lists: true,
        spelling: vec![SentProperty { name: "casesensitivity".into(), value: "mixed".into() }],
        after: vec![2, 3],
        properties: vec![SentProperty { name: "compression".into(), value: "zstd".into() }],
        of_snapshot: vec![SentProperty { name: "a:b".into(), value: String::new() }],
        holds: vec!["keep".into()],
    }
}

fn payload() -> Vec<u8> {
    let mut to = Writer::default();
    RowOp::Put { key: b"\x02a", value: b"v" }.encode(&mut to);
    RowOp::Gone { key: b"\x03" }.encode(&mut to);
    let frame = SentFrame {
        compression: Compression::Lz4,
        checksum_kind: ChecksumKind::Blake3,
        checksum: [3; 16],
        logical: 9,
        bytes: b"stored",
    };
    RowOp::Framed { key: b"\x06", pieces: b"p", frame }.encode(&mut to);
    RowOp::Nothing { key: b"\x06\0", until: b"\x07" }.encode(&mut to);
    RowOp::Nothing { key: b"\x07", until: b"" }.encode(&mut to);
    to.finish()
}

fn all() -> Vec<Record> {
    vec![
        Record::Stream(StreamHead {
            root: "tank".into(),
            pool: 5,
            package: true,
            there: vec![("/a".into(), "b".into(), 7)],
        }),
        Record::Snapshot(head()),
        Record::Rows(payload()),
        Record::SnapshotEnd(7),
        Record::End,
    ]
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sink = |some: &[u8]| {
        bytes.extend_from_slice(some);
        Ok(())
    };
    let mut writer = StreamWriter::begin(&mut sink).unwrap();
    records.iter().for_each(|record| writer.record(record).unwrap());
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<Record>, StreamError> {
    let mut reader = StreamReader::begin(bytes)?;
    let mut records = Vec::new();
    loop {
        records.push(reader.next()?.record);
        if records.last() == Some(&Record::End) {
            return Ok(records);
        }
    }
}

#[test]
fn what_is_written_is_read() {
    assert_eq!(read(&written(&all())).unwrap(), all());
    let payload = payload();
    let ops = rows(&payload).unwrap();
    assert_eq!(ops.iter().map(RowOp::key).collect::<Vec<_>>(), [&b"\x02a"[..], b"\x03", b"\x06", b"\x06\0", b"\x07"]);
    // There are no rows in a range that is stated to be empty.
    for until in [&b"\x02"[..], b"\x08", b""] {
        let mut to = Writer::default();
        RowOp::Nothing { key: b"\x02", until }.encode(&mut to);
        RowOp::Gone { key: b"\x03" }.encode(&mut to);
        assert!(rows(&to.finish()).is_err());
    }
}

#[test]
fn each_flipped_bit_and_each_cut_is_noticed() {
    let bytes = written(&all());
    for bit in 0..bytes.len() * 8 {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&other).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        assert!(matches!(read(&bytes[..length]), Err(StreamError::Cut)), "{length}");
    }
}

#[test]
fn streams_of_others_are_told_apart() {
    let mut zfs = vec![0; 312];
    zfs[8..16].copy_from_slice(&0x2_F5BA_CBAC_u64.to_le_bytes());
    assert!(read(&zfs).unwrap_err().to_string().contains("OpenZFS"));
    zfs[8..16].copy_from_slice(&0x2_F5BA_CBAC_u64.to_be_bytes());
    assert!(read(&zfs).unwrap_err().to_string().contains("OpenZFS"));
    assert!(matches!(read(&[1; 64]), Err(StreamError::Foreign(_))));
    let mut newer = written(&all());
    newer[8] = 2;
    assert!(matches!(read(&newer), Err(StreamError::Version(2))));
}

proptest! {
    #[test]
    fn tokens_survive_and_others_are_refused(to: u64, name: String, from: u64, clone: bool, stored: bool, after: Vec<u8>, bytes: u64, at: prop::sample::Index) {
        let token = ResumeToken { to, name, from, clone, stored, after, bytes };
        let text = token.text();
        prop_assert_eq!(ResumeToken::parse(&text).unwrap(), token);
        let mut other = text.into_bytes();
        let at = at.index(other.len());
        other[at] = if other[at] == b'0' { b'1' } else { b'0' };
        prop_assert!(ResumeToken::parse(std::str::from_utf8(&other).unwrap()).is_err());
    }

    #[test]
    fn any_bytes_are_records_or_an_error(kind in 0u8..8, bytes: Vec<u8>) {
        if let Ok(record) = Record::decode(kind, bytes.clone()) {
            if let Record::Rows(_) = record {
                let _ = rows(&bytes);
            } else {
                let (again, payload) = record.encode();
                prop_assert_eq!(Record::decode(again, payload).unwrap(), record);
            }
        }
        let _ = ResumeToken::decode(&bytes);
    }
}
