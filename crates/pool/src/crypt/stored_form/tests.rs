//! Round trips of sealed frames, changed bytes, and vectors of the format.

use proptest::prelude::*;

use super::*;
use crate::crypt::SecretKey;
use crate::crypt::tests::{Seeded, hex_of, key};
use crate::frame::stored;
use crate::pointer::{ChecksumKind, Txg};

const ID_OF_FRAME: [u8; ID] = [0xa5; ID];

fn keys(master: &SecretKey, cipher: Cipher) -> FrameKeys<'_> {
    FrameKeys { cipher, crypt_id: [1; ID], generation: [2; 8], master: master.view() }
}

fn content_frame<'a>(content: &'a [u8], compression: CompressionSetting) -> NewSeal<'a> {
    let (logical, content) = (content.len() as u32, NewContent::Plain(content, compression));
    NewSeal { id: ID_OF_FRAME, kind: FrameKind::Data, height: 0, children: &[], logical, content }
}

fn pointer_to(frame: &NewSeal<'_>, stored: &[u8]) -> Pointer {
    Pointer {
        segment: 1,
        index: 2,
        offset: 3,
        stored: stored.len() as u32,
        logical: frame.logical,
        kind: frame.kind,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Sealed,
        pin: 1,
        birth: Txg(4),
        checksum: frame.id,
    }
}

pub(in crate::crypt) fn child(kind: FrameKind, height: u8, number: u32) -> ChildEntry {
    let pointer = Pointer {
        segment: number,
        index: number + 1,
        offset: number + 2,
        stored: 160,
        logical: 64 + number * 16,
        kind,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Sealed,
        pin: 1 + (number % 255) as u8,
        birth: Txg(u64::from(number)),
        checksum: [number as u8; ID],
    };
    ChildEntry { pointer, height, since: None }
}

fn bytes_of(number: u64, length: usize) -> Vec<u8> {
    let random = Seeded::new(number);
    let mut bytes = vec![0; length];
    random.fill(&mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn content_is_sealed_and_opened(length in 1usize..5000, is_random: bool, is_aes: bool, seed: u64) {
        let master = key(&[9; 32]);
        let keys = keys(&master, if is_aes { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 });
        let content = if is_random { bytes_of(seed, length) } else { vec![seed as u8; length] };
        let frame = content_frame(&content, CompressionSetting::Lz4);
        let stored = seal_frame(&Seeded::new(seed), &keys, &frame).unwrap();
        let pointer = pointer_to(&frame, &stored);
        prop_assert!(pointer.check_seal().is_ok());
        prop_assert_eq!(stored::check(&pointer, &stored), None);
        if is_random {
            // The charge of the frame in the clear is 64 bytes less.
            prop_assert_eq!(stored.len(), (length + 64).next_multiple_of(16));
        } else if length > 200 {
            prop_assert!(stored.len() < length / 2 + 100, "compressed before it is sealed");
        }
        let form = StoredForm::decode(FrameKind::Data, &stored).unwrap();
        prop_assert_eq!((form.generation, form.height, form.children().unwrap().len()), ([2; 8], 0, 0));
        prop_assert_eq!(&form.open(&keys, &pointer).unwrap(), &content);
        let mut target = vec![0; length];
        form.open_into(&keys, &pointer, &mut target).unwrap();
        prop_assert_eq!(&target, &content);
        let mut longer = vec![0; length + 1];
        prop_assert!(form.open_into(&keys, &pointer, &mut longer).is_err());
        if length >= 16 && is_random {
            prop_assert!(!stored.windows(16).any(|part| part == &content[..16]), "nothing in the clear");
        }
    }

    #[test]
    fn nodes_are_sealed_with_their_lists(count in 0u32..60, length in 1usize..3000, seed: u64, height in 0u8..=3) {
        let master = key(&[9; 32]);
        let keys = keys(&master, Cipher::ChaCha20Poly1305);
        let children: Vec<ChildEntry> = (0..count.max(u32::from(height > 0)))
            .map(|number| match height {
                0 if number % 3 == 0 => child(FrameKind::Value, 0, number),
                0 => {
                    let entry = child(FrameKind::Data, 0, number);
                    ChildEntry { since: (number % 3 == 1).then_some(Txg(u64::from(number) + 5)), ..entry }
                }
                1 => child(FrameKind::Leaf, 0, number),
                _ => child(FrameKind::Inner, height - 1, number),
            })
            .collect();
        let content = bytes_of(seed, length);
        let kind = if height == 0 { FrameKind::Leaf } else { FrameKind::Inner };
        let frame = NewSeal { kind, height, children: &children, ..content_frame(&content, CompressionSetting::Lz4) };
        let mut stored = seal_frame(&Seeded::new(seed), &keys, &frame).unwrap();
        let pointer = pointer_to(&frame, &stored);
        prop_assert_eq!(stored.len() % 16, 0);
        {
            let form = StoredForm::decode(kind, &stored).unwrap();
            prop_assert_eq!(form.children().unwrap(), children.clone());
            prop_assert_eq!(form.open(&keys, &pointer).unwrap(), content.clone());
        }
        // Another address of a child needs no key: the tag does not cover it.
        if let Some(first) = children.first() {
            let moved = ChildEntry { pointer: Pointer { segment: 77, birth: Txg(1), ..first.pointer }, since: first.since.map(|_| Txg(99)), ..*first };
            let mut address = Writer::default();
            moved.encode_address(&mut address);
            let at = PREFIX + children.len() * PORTABLE;
            stored[at..at + ADDRESS].copy_from_slice(&address.finish());
            prop_assert!(stored::check(&pointer, &stored).is_some());
            rehash(&mut stored, &pointer.checksum, kind, pointer.counted_logical());
            prop_assert_eq!(stored::check(&pointer, &stored), None);
            let form = StoredForm::decode(kind, &stored).unwrap();
            prop_assert_eq!(form.children().unwrap()[0], moved);
            prop_assert_eq!(form.open(&keys, &pointer).unwrap(), content.clone());
        }
        // The lists belong to this kind of node.
        for other in [FrameKind::Data, FrameKind::Value, FrameKind::Table, FrameKind::Leaf, FrameKind::Inner] {
            let read = StoredForm::decode(other, &stored).and_then(|form| form.children());
            let is_bare = children.is_empty() && height == 0;
            prop_assert_eq!(read.is_ok(), other == kind || is_bare && !matches!(other, FrameKind::Inner | FrameKind::Table));
        }
    }

    #[test]
    fn any_bytes_are_a_sealed_frame_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), kind in 1u8..=5, count in 0u16..6, height in 0u8..3) {
        let kind = FrameKind::try_from(kind).unwrap();
        if let Some(part) = bytes.get_mut(36..40) {
            part.copy_from_slice(&[count as u8, 0, height, 0]);
        }
        bytes.truncate(bytes.len() / 16 * 16);
        let master = key(&[9; 32]);
        if let Ok(form) = StoredForm::decode(kind, &bytes) {
            let frame = NewSeal { kind, ..content_frame(&[0; 40], CompressionSetting::Off) };
            let _ = form.children();
            prop_assert!(form.open(&keys(&master, Cipher::Aes256Gcm), &pointer_to(&frame, &bytes)).is_err());
        }
    }
}

/// Everything but the addresses is authenticated, also where the hash, which anybody can compute, is right.
#[test]
fn every_changed_byte_behind_a_right_hash_is_found() {
    let master = key(&[9; 32]);
    let keys = keys(&master, Cipher::Aes256Gcm);
    let children = [child(FrameKind::Data, 0, 1), child(FrameKind::Value, 0, 2)];
    let content = bytes_of(3, 100);
    let frame =
        NewSeal { kind: FrameKind::Leaf, children: &children, ..content_frame(&content, CompressionSetting::Off) };
    let stored = seal_frame(&Seeded::new(1), &keys, &frame).unwrap();
    let pointer = pointer_to(&frame, &stored);
    let addresses = PREFIX + 2 * PORTABLE..PREFIX + 2 * (PORTABLE + ADDRESS);
    for at in HASH..stored.len() {
        for bit in 0..8 {
            let mut changed = stored.clone();
            changed[at] ^= 1 << bit;
            rehash(&mut changed, &pointer.checksum, pointer.kind, pointer.counted_logical());
            assert_eq!(stored::check(&pointer, &changed), None);
            let opened = StoredForm::decode(pointer.kind, &changed)
                .map_err(|_| Damage::Header)
                .and_then(|form| form.open(&keys, &pointer));
            assert_eq!(opened.is_ok(), addresses.contains(&at), "byte {at}, bit {bit}: {opened:?}");
        }
    }
    let form = StoredForm::decode(pointer.kind, &stored).unwrap();
    let wrong_pointers = [
        Pointer { checksum: [0; ID], ..pointer },
        Pointer { logical: pointer.logical + 16, ..pointer },
        Pointer { kind: FrameKind::Data, ..pointer },
    ];
    for wrong in wrong_pointers {
        assert_eq!(form.open(&keys, &wrong), Err(Damage::Seal), "{wrong:?}");
    }
    let other = key(&[8; 32]);
    let wrong_keys = [
        FrameKeys { crypt_id: [3; ID], ..keys },
        FrameKeys { generation: [3; 8], ..keys },
        FrameKeys { cipher: Cipher::ChaCha20Poly1305, ..keys },
        FrameKeys { master: other.view(), ..keys },
    ];
    for wrong in wrong_keys {
        assert_eq!(form.open(&wrong, &pointer), Err(Damage::Seal));
    }
}

#[test]
fn nonces_differ_for_different_content_under_equal_random_bytes() {
    let master = key(&[9; 32]);
    let keys = keys(&master, Cipher::Aes256Gcm);
    let seal = |random: u64, content: &[u8]| {
        seal_frame(&Seeded::new(random), &keys, &content_frame(content, CompressionSetting::Off)).unwrap()
    };
    let (one, other) = (seal(1, &[1; 50]), seal(1, &[2; 50]));
    assert_ne!(one[24..36], other[24..36]);
    assert_ne!(one[24..36], seal(2, &[1; 50])[24..36]);
    assert_eq!(one, seal(1, &[1; 50]));
}

/// One body under different fields that the tag covers: with one nonce, two tags would give the authentication key away.
#[test]
fn nonces_differ_for_different_associated_data_under_equal_random_bytes() {
    let master = key(&[9; 32]);
    let keys = keys(&master, Cipher::Aes256Gcm);
    let nonce = |keys: &FrameKeys<'_>, frame: &NewSeal<'_>| -> [u8; NONCE] {
        let stored = seal_frame(&Seeded::new(1), keys, frame).unwrap();
        stored[24..36].try_into().unwrap()
    };
    let children = [child(FrameKind::Data, 0, 1)];
    let others = [child(FrameKind::Data, 0, 2)];
    let frame =
        NewSeal { kind: FrameKind::Leaf, children: &children, ..content_frame(&[1; 50], CompressionSetting::Off) };
    let nonces: std::collections::BTreeSet<_> = [
        nonce(&keys, &frame),
        nonce(&keys, &NewSeal { children: &others, ..frame }),
        nonce(&keys, &NewSeal { children: &[], ..frame }),
        nonce(&keys, &NewSeal { kind: FrameKind::Inner, height: 2, ..frame }),
        nonce(&keys, &NewSeal { logical: frame.logical + 16, ..frame }),
        nonce(&FrameKeys { crypt_id: [3; ID], ..keys }, &frame),
        nonce(&FrameKeys { generation: [3; 8], ..keys }, &frame),
    ]
    .into();
    assert_eq!(nonces.len(), 7);
    assert!(nonces.contains(&nonce(&keys, &frame)));
}

#[test]
fn impossible_frames_are_not_sealed() {
    let master = key(&[9; 32]);
    let keys = keys(&master, Cipher::Aes256Gcm);
    let children = [child(FrameKind::Data, 0, 1)];
    let frame = content_frame(&[1; 50], CompressionSetting::Off);
    let many = vec![child(FrameKind::Data, 0, 1); CHILDREN_MAX + 1];
    for wrong in [
        NewSeal { children: &children, ..frame },
        NewSeal { height: 1, ..frame },
        NewSeal { kind: FrameKind::Leaf, children: &many, ..frame },
        NewSeal { logical: 0, ..frame },
        NewSeal { logical: u32::MAX, ..frame },
    ] {
        assert!(seal_frame(&Seeded::new(1), &keys, &wrong).is_err());
    }
}

/// The vector of the format: what has to come out for these inputs, for ever.
#[test]
fn a_sealed_leaf_stays_as_it_is_in_the_format() {
    let master = key(&(0..32).collect::<Vec<u8>>());
    let keys = keys(&master, Cipher::ChaCha20Poly1305);
    let children = [child(FrameKind::Data, 0, 1)];
    let frame = NewSeal {
        kind: FrameKind::Leaf,
        children: &children,
        ..content_frame(b"content of a leaf", CompressionSetting::Off)
    };
    let stored = seal_frame(&Seeded::new(7), &keys, &frame).unwrap();
    let mask = keys.owner_mask(&ID_OF_FRAME).unwrap();
    assert_eq!([hex_of(&stored), format!("{:016x} {:016x}", mask.0, mask.1)], VECTOR);
}

/// The stored bytes, and the mask of the owner.
const VECTOR: [&str; 2] = [
    "4707e10ab06d455e4ef5527751bffcfb02020202020202023933f06368282b6c350df7090100000001000200500000000101010101010101\
     0101010101010101010000000200000003000000a000000001000000000000000000000000000000fd48e5524ca7c8dd3041795e4d51a033\
     a74ded2b019e085e8f0ec732a6fd970af2e699949e2e66042ab8fcf8fc5082d3",
    "9f7ba44eb33c8c6f f20383423e589875",
];
