//! Nodes with all kinds of rows are restored; changed places and lists are refused.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::pointer::{ChecksumKind, Compression};
use crate::rows::{Extent, Patch, Xattr, keys};
use crate::tree::node::{Node, header};

fn pointer(kind: FrameKind, number: u32, is_sealed: bool, logical: u32) -> Pointer {
    Pointer {
        segment: number,
        index: number * 2,
        offset: number * 3,
        stored: 80 + (number % 50) * 16,
        logical,
        kind,
        compression: if is_sealed || number.is_multiple_of(2) { Compression::Off } else { Compression::Lz4 },
        checksum_kind: match (is_sealed, number % 3) {
            (true, _) => ChecksumKind::Sealed,
            (false, 0) => ChecksumKind::Blake3,
            (false, _) => ChecksumKind::Xxh3,
        },
        pin: if is_sealed { 1 + (number % 255) as u8 } else { 0 },
        birth: Txg(u64::from(number)),
        checksum: [number as u8; 16],
    }
}

/// A row of kind `which`.
fn row(number: u32, which: u8, length: u32, is_sealed: bool) -> (Vec<u8>, Vec<u8>) {
    let inode = u64::from(number) + 1;
    let data = pointer(FrameKind::Data, number, is_sealed, length);
    match which {
        0 => (keys::inode(inode).to_vec(), vec![7; length as usize % 90]),
        1 => (keys::extent(inode, 3).to_vec(), Extent::Frame(data).encode()),
        2 => {
            let since = Txg(u64::from(number) + u64::from(length));
            (keys::extent(inode, 4).to_vec(), Extent::Shared { pointer: data, since }.encode())
        }
        3 => (keys::extent(inode, 0).to_vec(), Extent::Inline(&vec![1; length as usize % 2000]).encode()),
        4 => (keys::xattr(inode, b"user.a"), Xattr::Inline(&vec![2; length as usize % 300]).encode()),
        5 => {
            let value = pointer(FrameKind::Value, number, is_sealed, 1 + length % 65_536);
            (keys::xattr(inode, b"user.b"), Xattr::Frame(value).encode())
        }
        _ => {
            let half = (length / 2).max(1);
            let pieces = vec![(1, half), (half + 5, half)];
            let pointer = Pointer { logical: 2 * half, ..data };
            (keys::patch(inode, 5, 6).to_vec(), Patch { pointer, pieces }.encode())
        }
    }
}

fn leaf(mut rows: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<u8> {
    rows.sort();
    rows.dedup_by(|one, other| one.0 == other.0);
    let mut content = header(0, rows.len()).to_vec();
    for (key, value) in rows {
        content.extend((key.len() as u16).to_le_bytes());
        content.extend((value.len() as u16).to_le_bytes());
        content.extend(key);
        content.extend(value);
    }
    content
}

fn inner(level: u8, children: &[(Vec<u8>, Pointer)]) -> Vec<u8> {
    let mut to = Writer::default();
    to.bytes(&header(level, children.len()));
    for (key, pointer) in children {
        to.u16(key.len() as u16);
        to.bytes(key);
        pointer.encode(&mut to);
    }
    to.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn leaves_are_restored(rows in proptest::collection::vec((0u8..7, 1u32..200_000, any::<bool>()), 1..25)) {
        let rows: Vec<_> = rows.iter().enumerate().map(|(number, (which, length, is_sealed))| row(number as u32, *which, *length, *is_sealed)).collect();
        let pointers: usize = rows.iter().filter(|(key, value)| crate::rows::pointer_of(key, value).unwrap().is_some()).count();
        let content = leaf(rows);
        prop_assert!(Node::decode(Arc::from(content.clone()), true).is_ok(), "the test makes leaves");
        let short = ShortNode::new(&content).unwrap();
        prop_assert_eq!((short.height, short.children.len()), (0, pointers));
        prop_assert!(short.content.len() <= content.len() - pointers * 45);
        prop_assert_eq!(short.restore().unwrap(), content);
        check_changes(&short);
    }

    #[test]
    fn inner_nodes_are_restored(count in 1u32..200, level in 1u8..=4, is_sealed: bool) {
        let kind = if level == 1 { FrameKind::Leaf } else { FrameKind::Inner };
        let children: Vec<_> = (0..count)
            .map(|number| {
                let key = if number == 0 { Vec::new() } else { number.to_be_bytes().to_vec() };
                // A child in the clear keeps its exact length.
                let logical = if is_sealed { 16 * (number + 1) } else { number + 1 };
                (key, pointer(kind, number, is_sealed, logical))
            })
            .collect();
        let content = inner(level, &children);
        prop_assert!(Node::decode(Arc::from(content.clone()), false).is_ok(), "the test makes nodes");
        let short = ShortNode::new(&content).unwrap();
        prop_assert_eq!((short.height, short.children.len()), (level, count as usize));
        prop_assert!(short.children.iter().all(|child| child.height == level - 1));
        prop_assert_eq!(short.restore().unwrap(), content);
        check_changes(&short);
        let exact: Vec<_> = children.iter().map(|(key, pointer)| (key.clone(), Pointer { logical: pointer.logical + 1, ..*pointer })).collect();
        prop_assert_eq!(ShortNode::new(&inner(level, &exact)).is_ok(), !is_sealed, "pointers to sealed nodes have rounded lengths");
    }

    #[test]
    fn any_bytes_are_a_node_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), level in 0u8..3, count in 0u8..5) {
        if let Some(part) = bytes.get_mut(..8) {
            part.copy_from_slice(&[1, level, 0, 0, count, 0, 0, 0]);
        }
        if let Ok(short) = ShortNode::new(&bytes) {
            let restored = short.restore();
            // A varint may be longer than needed: then another node comes out, which is stable.
            if let Ok(restored) = restored {
                let again = ShortNode::new(&restored).unwrap();
                prop_assert_eq!(again.restore().unwrap(), restored);
            }
        }
        let short = ShortNode { height: level, children: vec![crate::crypt::stored_form::tests::child(FrameKind::Data, 0, 1)], content: bytes };
        let _ = short.restore();
    }
}

/// Lists and places that are not those of the node are refused.
fn check_changes(short: &ShortNode) {
    if short.children.is_empty() {
        return;
    }
    let mut fewer = short.clone();
    fewer.children.pop();
    assert!(fewer.restore().is_err(), "a child less");
    let mut more = short.clone();
    more.children.push(short.children[0]);
    assert!(more.restore().is_err(), "a child more");
    let other = ShortNode { height: short.height + 1, ..short.clone() };
    assert!(other.restore().is_err(), "another height");
    if short.height > 0 {
        return;
    }
    for at in 0..short.children.len() {
        let mut changed = short.clone();
        let child = &mut changed.children[at];
        child.since = if child.since.is_some() { None } else { Some(Txg(u64::MAX)) };
        assert!(changed.restore().is_err(), "shared or not");
        let mut changed = short.clone();
        let child = &mut changed.children[at];
        let is_data = child.pointer.kind == FrameKind::Data;
        child.pointer.kind = if is_data { FrameKind::Value } else { FrameKind::Data };
        assert!(changed.restore().is_err(), "another kind");
    }
}

#[test]
fn places_have_to_rise_and_lengths_to_fit() {
    let content = leaf(vec![row(1, 1, 100, true), row(2, 1, 100, true)]);
    let short = ShortNode::new(&content).unwrap();
    // The value of the first row: its tag, the place, and the difference between 112 and 100.
    let at = 8 + 4 + 17;
    assert_eq!(short.content[at..at + 4], [EXTENT_FRAME, 0, 0, 12]);
    for (byte, value) in [(at + 1, 1), (at + 2, 1), (at + 3, 16), (at, EXTENT_SHARED)] {
        let mut changed = short.clone();
        changed.content[byte] = value;
        assert!(changed.restore().is_err(), "byte {byte}");
    }
    let mut swapped = short.clone();
    swapped.children.swap(0, 1);
    let restored = swapped.restore().unwrap();
    assert_ne!(restored, content, "the list is what the seal of the node authenticates");
    let long = ShortNode { content: [header(0, 1).as_slice(), &vec![0; MAX_CONTENT]].concat(), ..ShortNode::default() };
    assert!(long.restore().is_err());
    assert!(ShortNode::new(&vec![0; MAX_CONTENT + 1]).is_err());
}
