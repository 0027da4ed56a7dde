//! Nodes from any bytes.

use proptest::prelude::*;

use super::*;
use crate::pointer::{ChecksumKind, Compression, Txg};

fn pointer(index: u32, kind: FrameKind) -> Pointer {
    Pointer {
        segment: 1,
        index,
        offset: 0,
        stored: 100,
        logical: 200,
        kind,
        compression: Compression::Lz4,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(3),
        checksum: [index as u8; 16],
    }
}

fn encoded_leaf(rows: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>) -> Vec<u8> {
    let mut leaf = Leaf::default();
    for (key, value) in rows {
        leaf.push(key, value);
    }
    let mut content = header(0, leaf.len()).to_vec();
    leaf.encode(&mut content);
    assert_eq!(content.len(), leaf.used());
    content
}

fn encoded_inner(keys: &std::collections::BTreeSet<Vec<u8>>) -> Vec<u8> {
    let mut inner = Inner::over(1, Child::Clean(pointer(0, FrameKind::Leaf)));
    for (at, key) in keys.iter().enumerate() {
        inner.push(key, Child::Clean(pointer(at as u32 + 1, FrameKind::Leaf)));
    }
    let pointers: Vec<Pointer> = inner.children.iter().filter_map(Child::pointer).collect();
    let mut content = Vec::new();
    inner.encode(&pointers, &mut content);
    assert_eq!(content.len(), inner.used());
    content
}

/// Uses everything of a decoded node: nothing may panic, whatever it was decoded from, and its
/// encoding decodes to an equal node.
fn exercise(content: &[u8], leaf: bool, probe: &[u8]) -> bool {
    let Ok(node) = Node::decode(Arc::from(content), leaf) else { return false };
    match &node.body {
        Body::Leaf(leaf) => {
            for at in 0..leaf.len() {
                let (key, value) = leaf.row(at).expect("decoded rows are there");
                assert_eq!(leaf.find(key), Ok(at));
                assert_eq!(leaf.get(key), Some(value));
            }
            let mut again = header(0, leaf.len()).to_vec();
            leaf.encode(&mut again);
            assert_eq!(again, content);
            let mut copy = leaf.thaw();
            if let Some(split) = copy.put(probe, probe, 512) {
                assert!(copy.len() > 0 && split.right.len() > 0);
                assert!(
                    copy.key(copy.len() - 1) < split.separator.as_slice()
                        && split.separator.as_slice() <= split.right.key(0)
                );
            } else {
                assert_eq!(copy.get(probe), Some(probe));
                copy.remove(copy.find(probe).unwrap());
                assert_eq!(copy.get(probe), None);
            }
        }
        Body::Inner(inner) => {
            for at in 0..inner.len() {
                assert_eq!(inner.find(inner.key(at)), at);
            }
            let pointers: Vec<Pointer> = inner.children.iter().filter_map(Child::pointer).collect();
            let mut again = Vec::new();
            inner.encode(&pointers, &mut again);
            assert_eq!(again, content);
            let mut copy = inner.clone();
            copy.insert(copy.find(probe) + 1, probe, Child::Clean(pointer(9, FrameKind::Leaf)));
            let (separator, right) = copy.split(0);
            assert!(copy.len() > 0 && right.len() > 0 && right.key(0).is_empty());
            copy.append(&separator, &right);
            assert_eq!(copy.len(), inner.len() + 1);
            while copy.remove(copy.len() / 2).is_some() {}
            assert_eq!(copy.used(), HEADER);
        }
    }
    true
}

proptest! {
    #[test]
    fn any_bytes_are_a_node_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), leaf: bool, probe in proptest::collection::vec(any::<u8>(), 0..20), fix: bool) {
        if fix && bytes.len() >= HEADER {
            let head = header(u8::from(!leaf), bytes.len() / 60);
            bytes[..HEADER].copy_from_slice(&head);
        }
        exercise(&bytes, leaf, &probe);
    }

    #[test]
    fn leaves_survive_and_damaged_ones_do_no_harm(
        rows: std::collections::BTreeMap<Vec<u8>, Vec<u8>>, probe in proptest::collection::vec(any::<u8>(), 0..20), at: prop::sample::Index, flip: u8, cut: prop::sample::Index,
    ) {
        prop_assume!(!rows.is_empty());
        let content = encoded_leaf(&rows);
        prop_assert!(exercise(&content, true, &probe));
        let mut damaged = content.clone();
        let place = at.index(damaged.len());
        damaged[place] ^= flip;
        exercise(&damaged, true, &probe);
        prop_assert!(!exercise(&content[..cut.index(content.len())], true, &probe), "a cut leaf is an error");
        let mut longer = content.clone();
        longer.push(flip);
        prop_assert!(!exercise(&longer, true, &probe), "and so is a longer one");
    }

    #[test]
    fn inner_nodes_survive_and_damaged_ones_do_no_harm(
        mut keys: std::collections::BTreeSet<Vec<u8>>, probe in proptest::collection::vec(any::<u8>(), 1..20), at: prop::sample::Index, flip: u8, cut: prop::sample::Index,
    ) {
        keys.remove(&Vec::new());
        prop_assume!(!keys.contains(&probe));
        let content = encoded_inner(&keys);
        prop_assert!(exercise(&content, false, &probe));
        let mut damaged = content.clone();
        let place = at.index(damaged.len());
        damaged[place] ^= flip;
        if let Ok(Node { body: Body::Inner(inner), .. }) = Node::decode(damaged.as_slice().into(), false) {
            prop_assert!(inner.level() >= 1 && inner.level() <= MAX_LEVEL);
            inner.find(&probe);
        }
        prop_assert!(!exercise(&content[..cut.index(content.len())], false, &probe), "a cut node is an error");
    }
}

proptest! {
    #[test]
    fn children_are_found_where_keys_of_several_kinds_meet(
        mut keys in proptest::collection::btree_set(proptest::collection::vec(0u8..3, 1..9), 0..60), probe in proptest::collection::vec(0u8..4, 0..9),
    ) {
        keys.insert(vec![1]);
        let Ok(Node { body: Body::Inner(inner), .. }) = Node::decode(encoded_inner(&keys).into(), false) else {
            return Err(TestCaseError::fail("an inner node is one"));
        };
        for key in keys.iter().chain([&probe]) {
            prop_assert_eq!(inner.find(key), keys.iter().filter(|low| *low <= key).count());
        }
    }
}

#[test]
fn what_is_refused() {
    let rows = [(b"a".to_vec(), b"1".to_vec()), (b"b".to_vec(), b"2".to_vec())].into_iter().collect();
    let good = encoded_leaf(&rows);
    let with = |at: usize, byte: u8| {
        let mut content = good.clone();
        content[at] = byte;
        Node::decode(content.as_slice().into(), true).map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(with(0, 2), "a node of an unknown version");
    assert_eq!(with(1, 1), "the height of a node is not that of its kind");
    assert_eq!(with(2, 1), "reserved bytes of a node");
    assert_eq!(with(4, 1), "bytes after the last entry of a node");
    assert_eq!(with(4, 3), "a structure ends too early");
    assert_eq!(with(7, 0xff), "a structure ends too early", "a count that cannot be allocates nothing");
    assert_eq!(with(8, 200), "a row of a leaf does not end inside it");
    assert_eq!(with(12, b'b'), "the keys of a node do not rise");
    let empty = header(0, 0);
    assert_eq!(
        Node::decode(empty.as_slice().into(), true).map(|_| ()).unwrap_err().to_string(),
        "a node without entries"
    );
    assert!(Node::decode(vec![0; MAX_CONTENT + 1].into(), true).is_err());
}
