//! Tests of keys and rows: a written one is read back; any bytes are a row or an error; keys sort as
//! intended.

use super::*;
use crate::codec::Writer;
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use proptest::prelude::*;

const TYPES: [FileType; 7] = [
    FileType::Fifo,
    FileType::CharDevice,
    FileType::Directory,
    FileType::BlockDevice,
    FileType::Regular,
    FileType::Symlink,
    FileType::Socket,
];

fn file_type() -> impl Strategy<Value = FileType> {
    proptest::sample::select(TYPES.to_vec())
}

fn timestamp() -> impl Strategy<Value = Timestamp> {
    (any::<i64>(), 0u32..1_000_000_000).prop_map(|(seconds, nanoseconds)| Timestamp { seconds, nanoseconds })
}

fn entry_name() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 1..=255).prop_filter("a name", |name| entry::is_name(name))
}

fn key() -> impl Strategy<Value = Key> {
    let few = prop_oneof![0u64..4, 250u64..260, any::<u64>().prop_map(|n| n & keys::NUMBER_MOST)];
    prop_oneof![
        Just(Key::Head),
        few.clone().prop_map(Key::Inode),
        (few.clone(), few.clone()).prop_map(|(directory, sequence)| Key::Entry { directory, sequence }),
        (few.clone(), few.clone(), few.clone()).prop_map(|(directory, hash, sequence)| Key::Name {
            directory,
            hash,
            sequence
        }),
        (few.clone(), proptest::collection::vec(1u8.., 1..=255)).prop_map(|(inode, name)| Key::Xattr { inode, name }),
        (few.clone(), few.clone()).prop_map(|(inode, record)| Key::Extent { inode, record }),
        few.clone().prop_map(Key::Orphan),
        few.prop_map(Key::Cut),
        Just(Key::Received),
        Just(Key::Recounted),
        (any::<bool>(), any::<u32>())
            .prop_map(|(user, id)| Key::OwnerUse(if user { OwnerKind::User } else { OwnerKind::Group }, id)),
    ]
}

fn frame(kind: FrameKind, logical: u32) -> Pointer {
    Pointer {
        segment: 7,
        index: 9,
        offset: 11,
        stored: 100,
        logical,
        kind,
        compression: Compression::Lz4,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(5),
        checksum: [3; 16],
    }
}

fn inode() -> impl Strategy<Value = InodeRow> {
    let times = (timestamp(), timestamp(), timestamp(), timestamp(), 0u8..8);
    let small = (file_type(), 0u16..0o10000, any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>());
    let rare = (
        any::<u64>(),
        any::<u32>(),
        any::<u64>(),
        prop_oneof![Just(0u8), 9u8..=24],
        proptest::option::of((any::<u64>(), any::<u64>())),
    );
    (times, small, rare).prop_map(|((born, mut accessed, mut modified, mut changed, same), small, rare)| {
        let (file_type, permissions, uid, gid, links, size, charged) = small;
        let (device, flags, generation, record_shift, hint) = rare;
        if same & 1 != 0 {
            accessed = born;
        }
        if same & 2 != 0 {
            modified = born;
        }
        if same & 4 != 0 {
            changed = modified;
        }
        let hint = hint.map(|(directory, sequence)| NameHint { directory, sequence });
        let mode = file_type.mode_bits() | permissions;
        InodeRow {
            mode,
            uid,
            gid,
            links,
            size,
            charged,
            accessed,
            modified,
            changed,
            born,
            device,
            flags,
            generation,
            record_shift,
            hint,
        }
    })
}

/// Runs every decoder on the same bytes; the result names those that accepted them.
fn all_decoders(bytes: &[u8]) -> [bool; 7] {
    [
        InodeRow::decode(bytes).is_ok_and(|inode| InodeRow::decode(&inode.encode()).unwrap() == inode),
        Entry::decode(bytes).is_ok_and(|entry| Entry::decode(&entry.encode()).unwrap() == entry),
        NameTarget::decode(bytes).is_ok_and(|target| NameTarget::decode(&target.encode()).unwrap() == target),
        Extent::decode(bytes).is_ok_and(|extent| Extent::decode(&extent.encode()).unwrap() == extent),
        Xattr::decode(bytes).is_ok_and(|xattr| Xattr::decode(&xattr.encode()).unwrap() == xattr),
        DatasetHead::decode(bytes).is_ok_and(|head| DatasetHead::decode(&head.encode()).unwrap() == head),
        OwnerUse::decode(bytes).is_ok_and(|used| OwnerUse::decode(&used.encode()).unwrap() == used),
    ]
}

proptest! {
    #[test]
    fn keys_survive(key in key()) {
        let sequence = if let Key::Entry { sequence, .. } = key { Some(sequence) } else { None };
        prop_assert_eq!(keys::sequence_of_entry(&key.encode()).unwrap(), sequence);
        prop_assert_eq!(Key::decode(&key.encode()).unwrap(), key);
    }

    #[test]
    fn keys_sort_as_their_numbers(a in key(), b in key()) {
        prop_assert_eq!(a.encode().cmp(&b.encode()), a.cmp(&b));
    }

    #[test]
    fn any_bytes_are_a_key_or_an_error(kind in 0u8..10, rest in proptest::collection::vec(any::<u8>(), 0..40)) {
        let bytes = [&[kind][..], &rest].concat();
        prop_assert_eq!(keys::sequence_of_entry(&bytes).is_ok(), Key::decode(&bytes).is_ok());
        if let Ok(key) = Key::decode(&bytes) {
            prop_assert_eq!(key.encode(), bytes);
        }
    }

    #[test]
    fn inodes_survive(inode in inode()) {
        prop_assert_eq!(InodeRow::decode(&inode.encode()).unwrap(), inode);
        for cut in 0..inode.encode().len() {
            prop_assert!(InodeRow::decode(&inode.encode()[..cut]).is_err());
        }
    }

    #[test]
    fn entries_survive(inode: u64, file_type in file_type(), name in entry_name()) {
        let entry = Entry { inode, file_type, name: &name };
        let bytes = entry.encode();
        prop_assert_eq!(Entry::decode(&bytes).unwrap(), entry);
        let target = NameTarget { inode, file_type };
        prop_assert_eq!(NameTarget::decode(&target.encode()).unwrap(), target);
    }

    #[test]
    fn content_survives(content in proptest::collection::vec(any::<u8>(), 0..=4096)) {
        let (extent, xattr) = (Extent::Inline(&content).encode(), Xattr::Inline(&content).encode());
        prop_assert_eq!(Extent::decode(&extent).unwrap(), Extent::Inline(&content));
        prop_assert_eq!(Xattr::decode(&xattr).unwrap(), Xattr::Inline(&content));
    }

    #[test]
    fn counters_survive(seed: u64, next in 1..=keys::NUMBER_MOST, root: u64, objects: u64, bytes: u64) {
        let hashing = if seed.is_multiple_of(2) { keys::Hashing::Whole } else { keys::Hashing::Ordered };
        let head = DatasetHead { next, root: root % next, seed, hashing, folding: Folding::EXACT, objects };
        prop_assert_eq!(DatasetHead::decode(&head.encode()).unwrap(), head);
        let used = OwnerUse { bytes, objects };
        prop_assert_eq!(OwnerUse::decode(&used.encode()).unwrap(), used);
    }

    #[test]
    fn any_bytes_are_a_row_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80), first in 0u8..16) {
        all_decoders(&bytes);
        if let Some((_, rest)) = bytes.split_first() {
            all_decoders(&[&[first], rest].concat());
        }
    }

    #[test]
    fn a_damaged_inode_is_an_inode_or_an_error(inode in inode(), place: proptest::sample::Index, byte: u8) {
        let mut bytes = inode.encode();
        let place = place.index(bytes.len());
        bytes[place] = byte;
        if let Ok(other) = InodeRow::decode(&bytes) {
            prop_assert_eq!(InodeRow::decode(&other.encode()).unwrap(), other);
        }
    }
}

#[test]
fn rows_with_pointers() {
    let data = frame(FrameKind::Data, 4096);
    for extent in [Extent::Frame(data), Extent::Shared { pointer: data, since: crate::Txg(data.birth.0 + 3) }] {
        assert_eq!(Extent::decode(&extent.encode()).unwrap(), extent);
        assert_eq!(extent.pointer(), Some(&data));
    }
    let value = frame(FrameKind::Value, 65536);
    assert_eq!(Xattr::decode(&Xattr::Frame(value).encode()).unwrap(), Xattr::Frame(value));
    assert!(Xattr::decode(&Xattr::Frame(frame(FrameKind::Value, 65537)).encode()).is_err());
    assert!(Xattr::decode(&Xattr::Frame(data).encode()).is_err());
    assert!(Extent::decode(&Extent::Frame(value).encode()).is_err());
    let mut longer = Extent::Frame(data).encode();
    longer.push(0);
    assert!(Extent::decode(&longer).is_err());
}

#[test]
fn what_no_row_may_hold() {
    let entry = |name| Entry { inode: 1, file_type: FileType::Regular, name }.encode();
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'x'; 256]] {
        assert!(Entry::decode(&entry(name)).is_err(), "{name:?}");
    }
    assert!(Entry::decode(&entry(&[b'x'; 255])).is_ok());
    assert!(Extent::decode(&Extent::Inline(&[0; 4097]).encode()).is_err());
    assert!(Xattr::decode(&Xattr::Inline(&[0; 4097]).encode()).is_err());
    assert!(Key::decode(&keys::entry(1, u64::MAX)).is_err());
    assert!(Key::decode(&keys::xattr(1, b"")).is_err());
    assert!(
        DatasetHead::decode(
            &DatasetHead {
                next: 3,
                root: 3,
                seed: 0,
                hashing: keys::Hashing::Whole,
                folding: Folding::EXACT,
                objects: 0
            }
            .encode()
        )
        .is_err()
    );
    let mut inode = InodeRow::new(FileType::Regular, 0o644, Timestamp::default());
    inode.mode = 0o644;
    assert!(InodeRow::decode(&inode.encode()).is_err());
    inode = InodeRow::new(FileType::Regular, 0o644, Timestamp { seconds: 1, nanoseconds: 1_000_000_000 });
    assert!(InodeRow::decode(&inode.encode()).is_err());
    inode = InodeRow::new(FileType::Regular, 0o644, Timestamp::default());
    inode.record_shift = 25;
    assert!(InodeRow::decode(&inode.encode()).is_err());
}

#[test]
fn unknown_fields_of_an_inode_are_refused() {
    let mut to = Writer::default();
    to.varint(1 << 8);
    to.bytes(InodeRow::new(FileType::Regular, 0o644, Timestamp::default()).encode().split_at(1).1);
    assert!(InodeRow::decode(&to.finish()).is_err());
}

#[test]
fn patches_survive_and_nonsense_is_refused() {
    let pointer = Pointer {
        segment: 1,
        index: 2,
        offset: 3,
        stored: 30,
        logical: 60,
        kind: FrameKind::Data,
        compression: Compression::Lz4,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(5),
        checksum: [6; 16],
    };
    let good = Patch { pointer, pieces: vec![(0, 10), (11, 20), (70_000, 30)] };
    let bytes = good.encode();
    assert_eq!(Patch::decode(&bytes).unwrap(), good);
    for length in 0..bytes.len() {
        assert!(Patch::decode(&bytes[..length]).is_err());
    }
    assert!(Patch::decode(&[bytes.as_slice(), &[0]].concat()).is_err());
    let wrong: [&[(u32, u32)]; 6] =
        [&[], &[(0, 59)], &[(0, 30), (30, 30)], &[(20, 30), (0, 30)], &[(0, 60), (90, 0)], &[((1 << 24) - 59, 60)]];
    for pieces in wrong {
        assert!(Patch::decode(&Patch { pointer, pieces: pieces.to_vec() }.encode()).is_err(), "{pieces:?}");
    }
    assert!(Patch::decode(&Patch { pointer: Pointer { kind: FrameKind::Leaf, ..pointer }, ..good }.encode()).is_err());
    let range = keys::patches(7, 3, u64::MAX);
    assert!(
        range.contains(&keys::patch(7, 3, 0).to_vec()) && range.contains(&keys::patch(7, u64::MAX, u64::MAX).to_vec())
    );
    assert!(!range.contains(&keys::patch(7, 2, u64::MAX).to_vec()) && !range.contains(&keys::patch(8, 0, 0).to_vec()));
    let key = keys::Key::Patch { inode: 7, record: 8, number: 9 };
    assert_eq!(keys::Key::decode(&key.encode()).unwrap(), key);
}

#[test]
fn an_inode_is_small() {
    let now = Timestamp { seconds: 1_800_000_000, nanoseconds: 987_654_321 };
    let mut inode = InodeRow::new(FileType::Regular, 0o644, now);
    (inode.uid, inode.gid, inode.size, inode.charged) = (1000, 1000, 100, 0);
    inode.hint = Some(NameHint { directory: 2, sequence: 1_600_000 });
    assert_eq!(inode.encode().len(), 24);
    inode.accessed.seconds += 86_400;
    inode.modified.seconds -= 100_000_000;
    inode.changed.seconds += 3;
    (inode.size, inode.charged, inode.record_shift) = (5 << 30, 6 << 30, 17);
    assert!((45..=60).contains(&inode.encode().len()), "{}", inode.encode().len());
}

#[test]
fn ranges_hold_what_they_say() {
    let entries = keys::entries(1, 5);
    assert!(
        entries.contains(&keys::entry(1, 5).to_vec()) && entries.contains(&keys::entry(1, keys::NUMBER_MOST).to_vec())
    );
    assert!(!entries.contains(&keys::entry(1, 4).to_vec()) && !entries.contains(&keys::entry(2, 0).to_vec()));
    let last = keys::extents(u64::MAX, 0, u64::MAX);
    let none = keys::extents(1, 0x100, 0xff);
    assert_eq!(none.start, none.end);
    assert!(last.contains(&keys::extent(u64::MAX, u64::MAX).to_vec()) && !last.contains(&keys::orphan(0).to_vec()));
    assert!(keys::names(1, u64::MAX).contains(&keys::name(1, u64::MAX, 0).to_vec()));
    assert!(keys::xattrs(0xff).contains(&keys::xattr(0xff, &[0xff; 255])));
    assert!(keys::of_kind(keys::OWNER_USE).contains(&keys::owner_use(OwnerKind::Group, u32::MAX).to_vec()));
    assert!(!keys::of_kind(keys::INODE).contains(&keys::entry(0, 0).to_vec()));
}

#[test]
fn hashes_depend_on_the_seed_and_stay() {
    assert_ne!(keys::name_hash(1, b"name"), keys::name_hash(2, b"name"));
    assert_eq!(keys::name_hash(0, b""), 0x2d06_8005_38d3_94c2);
}

#[test]
fn names_with_neighbouring_numbers_lie_side_by_side() {
    let ordered = |name: &str| keys::ordered_hash(5, name.as_bytes());
    let group = |name: &str| ordered(name) >> 14;
    for (one, other) in [
        ("file-00000000.dat", "file-00009999.dat"),
        ("7", "8"),
        ("IMG_0001.mp3", "IMG_9000.mp3"),
        (".2", ".3"),
        ("a10b", "a99b"),
    ] {
        assert_eq!(group(one), group(other), "{one} {other}");
        assert!(ordered(one) < ordered(other), "{one} {other}");
    }
    assert_eq!((ordered("x-0042.y") & 0x3fff, ordered("x-0042.y7") & 0x3fff), (42, 42));
    // Another number of digits, another prefix or suffix: another group.
    for (one, other) in
        [("f1", "f10"), ("f01", "f1"), ("f00001", "f10001"), ("a1b2.c", "a2b2.c"), ("1.2", "1.3"), ("x/1", "x7")]
    {
        assert_ne!(group(one), group(other), "{one} {other}");
    }
    assert_eq!(ordered("no digits. at all"), keys::name_hash(5, b"no digits. at all"));
    assert_eq!(ordered("1.2") & 0x3fff, 1, "the number before the extension");
    assert_eq!(ordered("v.2") & 0x3fff, 2);
    assert_ne!(keys::ordered_hash(6, b"f1") >> 14, group("f1"));
    let longest = [b'9'; keys::NAME_MOST];
    assert_eq!(keys::ordered_hash(5, &longest) & 0x3fff, 9999);
    let short = [&[b'a'; keys::NAME_MOST - 1][..], b"3"].concat();
    assert_eq!(keys::ordered_hash(5, &short) & 0x3fff, 3);
    assert_eq!(keys::ordered_hash(0, b"file 17"), keys::name_hash(0, b"file /2") >> 14 << 14 | 17);
}
