//! Rows of keys survive, impossible ones are refused, and the encodings stay as they are in the format.

use proptest::prelude::*;

use super::*;
use crate::crypt::hex_for_tests as hex_of;
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};

const COST: Argon2Cost = Argon2Cost { salt: [3; 32], memory: 256 << 10, passes: 3, lanes: 1 };

fn slot() -> SlotRow {
    SlotRow {
        format: KeyFormat::Passphrase,
        derivation: SlotDerivation::Argon2(COST),
        location: "file:///etc/key".to_owned(),
        label: "laptop".to_owned(),
        created: 1_800_000_000,
        sealed: vec![9; ROOT_KEY_BOX],
    }
}

fn portable(height: u8) -> [u8; PORTABLE] {
    let pointer = Pointer {
        segment: 1,
        index: 2,
        offset: 3,
        stored: 160,
        logical: 4096,
        kind: if height == 0 { FrameKind::Leaf } else { FrameKind::Inner },
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Sealed,
        pin: 7,
        birth: Txg(5),
        checksum: [6; 16],
    };
    let mut to = Writer::default();
    ChildEntry { pointer, height, since: None }.encode_portable(&mut to);
    to.finish().try_into().unwrap()
}

fn seal() -> SealRow {
    SealRow {
        family: 3,
        floor: 12,
        state: SealedState {
            generation: [1; 8],
            complete: true,
            at: BranchPosition { branch: [2; 16], counter: 10 },
            split_from: BranchPosition { branch: [3; 16], counter: 4 },
            guid: 5,
            time: 6,
            session: [7; 16],
            next_logged: 8,
            next_journaled: 9,
            root: Some(portable(2)),
            properties: [10; 16],
        },
        mac: [11; 32],
    }
}

proptest! {
    #[test]
    fn key_rows_survive(id: [u8; 16], commitment: [u8; 32], number in 1u64.., iterations: u64, text in "[ -~]{0,40}", counter in 0u64..COUNTER_END, flags: [bool; 3], height in 0u8..=40) {
        let root = KeyRootRow { id, commitment, dataset: number, iterations };
        prop_assert_eq!(KeyRootRow::decode(&root.encode()).unwrap(), root);
        let plain = SlotRow { format: KeyFormat::Hex, derivation: SlotDerivation::Secret, location: text.clone(), label: String::new(), ..slot() };
        for row in [SlotRow { created: number, ..slot() }, plain] {
            prop_assert_eq!(SlotRow::decode(&row.encode()).unwrap(), row.clone());
            prop_assert!(row.encode().starts_with(&row.parameters()));
        }
        let target = flags[0].then(|| TargetSeed { dataset: number, sealed: vec![4; ROOT_KEY_BOX] });
        let family = FamilyRow { crypt_id: id, key_root: number, target };
        prop_assert_eq!(FamilyRow::decode(&family.encode()).unwrap(), family);
        let master = MasterKeyRow { generation: id[..8].try_into().unwrap(), sealed: vec![5; MASTER_KEY_BOX] };
        prop_assert_eq!(MasterKeyRow::decode(&master.encode()).unwrap(), master);
        let at = BranchPosition { branch: id, counter };
        let state = SealedState { complete: flags[0], at, root: flags[1].then(|| portable(height)), ..seal().state };
        let row = SealRow { floor: (counter + u64::from(flags[2])).min(COUNTER_END - 1), state, ..seal() };
        prop_assert_eq!(state.encode().len(), SealedState::LENGTH);
        prop_assert_eq!(SealRow::decode(&row.encode()).unwrap(), row);
        prop_assert_eq!(erasable_sequence(&number.to_le_bytes()).unwrap(), number);
    }

    #[test]
    fn any_bytes_are_a_key_row_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..260)) {
        if let Ok(row) = KeyRootRow::decode(&bytes) {
            prop_assert_eq!(KeyRootRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = SlotRow::decode(&bytes) {
            prop_assert_eq!(SlotRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = FamilyRow::decode(&bytes) {
            prop_assert_eq!(FamilyRow::decode(&row.encode()).unwrap(), row);
        }
        if let Ok(row) = MasterKeyRow::decode(&bytes) {
            prop_assert_eq!(row.encode(), bytes.clone());
        }
        if let Ok(row) = SealRow::decode(&bytes) {
            prop_assert_eq!(SealRow::decode(&row.encode()).unwrap(), row);
        }
        let _ = erasable_sequence(&bytes);
    }

    #[test]
    fn a_changed_byte_of_a_row_is_refused_or_read_as_it_is(at in 0usize..400, bit in 0u8..8) {
        for mut bytes in [slot().encode(), seal().encode()] {
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            if let Ok(row) = SlotRow::decode(&bytes) {
                prop_assert_eq!(row.encode(), bytes.clone());
            }
            if let Ok(row) = SealRow::decode(&bytes) {
                prop_assert_eq!(SealRow::decode(&row.encode()).unwrap(), row);
            }
        }
    }
}

/// Bounds hold at decoding, before anything is derived or allocated.
#[test]
fn impossible_slots_are_refused() {
    let with = |cost: Argon2Cost| SlotRow { derivation: SlotDerivation::Argon2(cost), ..slot() };
    let wrong = [
        with(Argon2Cost { memory: ARGON2_MEMORY_MAX + 1, ..COST }),
        with(Argon2Cost { memory: u32::MAX, ..COST }),
        with(Argon2Cost { memory: 7, ..COST }),
        with(Argon2Cost { memory: 16, lanes: 3, ..COST }),
        with(Argon2Cost { passes: ARGON2_PASSES_MAX + 1, ..COST }),
        with(Argon2Cost { passes: 0, ..COST }),
        with(Argon2Cost { lanes: ARGON2_LANES_MAX + 1, ..COST }),
        with(Argon2Cost { lanes: 0, ..COST }),
        SlotRow { derivation: SlotDerivation::Secret, ..slot() },
        SlotRow { format: KeyFormat::Raw, ..slot() },
        SlotRow { label: "two\nlines".to_owned(), ..slot() },
        SlotRow { location: "file:///a\nb".to_owned(), ..slot() },
        SlotRow { location: "x".repeat(LOCATION_MAX + 1), ..slot() },
        SlotRow { sealed: vec![0; ROOT_KEY_BOX - 1], ..slot() },
        SlotRow { sealed: vec![0; ROOT_KEY_BOX + 1], ..slot() },
    ];
    for row in wrong {
        assert!(SlotRow::decode(&row.encode()).is_err(), "{row:?}");
    }
    let most = Argon2Cost { memory: ARGON2_MEMORY_MAX, passes: ARGON2_PASSES_MAX, lanes: ARGON2_LANES_MAX, ..COST };
    assert!(SlotRow::decode(&with(most).encode()).is_ok());
    let mut bytes = slot().encode();
    bytes[1] = 1;
    assert!(SlotRow::decode(&bytes).is_err(), "a secret with parameters of Argon2");
}

#[test]
fn impossible_seals_are_refused() {
    let state = seal().state;
    let with = |state: SealedState| SealRow { state, ..seal() };
    let position = BranchPosition { branch: [0; 16], counter: COUNTER_END };
    let (mut data, mut high, mut plain) = (portable(0), portable(1), portable(0));
    data[0] = FrameKind::Data as u8;
    high[1] = 41;
    plain[1] |= 0x40;
    let wrong = [
        SealRow { floor: state.at.counter + FLOOR_ABOVE + 1, ..seal() },
        SealRow { floor: 1 << 61, ..seal() },
        SealRow { family: 0, ..seal() },
        SealRow { family: Sealer::FAMILY_MAX + 1, ..seal() },
        with(SealedState { at: position, ..state }),
        with(SealedState { split_from: position, ..state }),
        with(SealedState { root: Some([0; PORTABLE]), ..state }),
        with(SealedState { root: Some(data), ..state }),
        with(SealedState { root: Some(high), ..state }),
        with(SealedState { root: Some(plain), ..state }),
    ];
    for row in wrong {
        assert!(SealRow::decode(&row.encode()).is_err(), "{row:?}");
    }
    assert!(SealRow::decode(&SealRow { floor: state.at.counter + FLOOR_ABOVE, ..seal() }.encode()).is_ok());
    let bytes = seal().encode();
    // Other flags, and reserved bytes: behind family and floor.
    for at in 10..18 {
        let mut changed = bytes.clone();
        changed[at] ^= 0x80;
        assert!(SealRow::decode(&changed).is_err(), "byte {at}");
    }
    let mut empty = bytes;
    empty[10] |= SealedState::NO_ROOT;
    assert!(SealRow::decode(&empty).is_err(), "a root in the seal of an empty tree");
    assert!(FamilyRow::decode(&FamilyRow { crypt_id: [0; 16], key_root: 0, target: None }.encode()).is_err());
}

/// Fixtures of the format.
#[test]
fn key_rows_stay_as_they_are_in_the_format() {
    let root = KeyRootRow { id: [1; 16], commitment: [2; 32], dataset: 300, iterations: 350_000 };
    assert_eq!(hex_of(&root.encode()), format!("{}{}ac02b0ae15", "01".repeat(16), "02".repeat(32)));
    let parameters = format!("0302{}00000400{}01", "03".repeat(32), "03000000");
    let strings = "0f66696c653a2f2f2f6574632f6b6579066c6170746f70";
    assert_eq!(hex_of(&slot().encode()), format!("{parameters}{strings}00d2496b00000000{}", "09".repeat(80)));
    let family = FamilyRow { crypt_id: [4; 16], key_root: 2, target: None };
    assert_eq!(hex_of(&family.encode()), format!("{}0200", "04".repeat(16)));
    let target = FamilyRow { target: Some(TargetSeed { dataset: 9, sealed: vec![5; 80] }), ..family };
    assert_eq!(hex_of(&target.encode()), format!("{}020109{}", "04".repeat(16), "05".repeat(80)));
    let master = MasterKeyRow { generation: [6; 8], sealed: vec![7; 81] };
    assert_eq!(hex_of(&master.encode()), format!("{}{}", "06".repeat(8), "07".repeat(81)));
    let number = |number: u64| hex_of(&number.to_le_bytes());
    let state = [
        "01".repeat(8),
        "0100000000000000".to_owned(),
        "02".repeat(16) + &number(10),
        "03".repeat(16) + &number(4),
        number(5) + &number(6),
        "07".repeat(16),
        number(8) + &number(9),
        format!("0302070000100000{}", "06".repeat(16)),
        "0a".repeat(16),
    ];
    assert_eq!(hex_of(&seal().encode()), format!("030c{}{}", state.concat(), "0b".repeat(32)));
}
