//! Tests of labels: decoders survive any bytes, copies replace each other, rings keep the last
//! roots.

use super::*;
use crate::checksum;
use crate::device::Simulator;
use crate::pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
use proptest::prelude::*;

fn identity(revision: u64) -> Identity {
    Identity {
        revision,
        incompatible: 0,
        read_only_compatible: 0,
        compatible: 5,
        pool: 77,
        name: "tank".to_owned(),
        state: PoolState::Active,
        host: (3, "here".to_owned()),
        time: 1_700_000_000,
        slot: 1 << 20,
        index: 1,
        members: vec![
            Member { guid: 1, length: 64 << 20, path: b"/dev/one".to_vec(), state: MemberState::default() },
            Member { guid: 2, length: 64 << 20, path: b"/dev/tw\xff".to_vec(), state: MemberState::default() },
        ],
        groups: Vec::new(),
        change: None,
    }
}

#[test]
fn what_devices_are_to_each_other_is_kept() {
    let roles = [
        (MemberRole::Own, MemberStatus::Online, false),
        (MemberRole::Own, MemberStatus::Removed, false),
        (MemberRole::Spare, MemberStatus::Faulted, false),
        (MemberRole::SpareFor(0), MemberStatus::Online, true),
        (MemberRole::Successor(1), MemberStatus::Offline, true),
        (MemberRole::Own, MemberStatus::Joining, false),
    ];
    let member = |(at, (role, status, stale)): (usize, &(MemberRole, MemberStatus, bool))| Member {
        guid: at as u64,
        length: 64 << 20,
        path: b"/dev/x".to_vec(),
        state: MemberState { group: at as u8 % 2, role: *role, status: *status, stale: *stale },
    };
    let groups = vec![Group::new(GroupKind::Mirror), Group::new(GroupKind::RaidZ(2))];
    let members = roles.iter().enumerate().map(member).collect();
    let new = Identity { incompatible: Identity::GROUPS, members, groups, ..identity(3) };
    assert_eq!(Identity::decode(&new.encode().unwrap()).unwrap(), new);
    // No device is paired with one that is paired itself, or that does not exist.
    for beside in [3, 6] {
        let mut wrong = new.clone();
        wrong.members[4].state.role = MemberRole::Successor(beside);
        assert!(Identity::decode(&wrong.encode().unwrap()).is_err());
    }
    let incompatible = Identity::GROUPS | Identity::SHAPES;
    let change = ShapeChange { kind: ChangeKind::Removal, group: 1, before: 700, tolerance: 2, leaving: vec![1, 4] };
    for change in [None, Some(change.clone())] {
        let changing = Identity { incompatible, change, ..new.clone() };
        assert_eq!(Identity::decode(&changing.encode().unwrap()).unwrap(), changing);
    }
    // Neither a group nor a device that there is not.
    for wrong in [ShapeChange { group: 2, ..change.clone() }, ShapeChange { leaving: vec![6], ..change }] {
        let wrong = Identity { incompatible, change: Some(wrong), ..new.clone() };
        assert!(Identity::decode(&wrong.encode().unwrap()).is_err());
    }
}

fn pointer(segment: u32) -> Pointer {
    Pointer {
        segment,
        index: 3,
        offset: 4,
        stored: 5,
        logical: 6,
        kind: FrameKind::Table,
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(7),
        checksum: [9; 16],
    }
}

fn root(generation: u64) -> Root {
    Root {
        pool: 77,
        generation,
        kept: generation.saturating_sub(3),
        txg: Txg(generation * 2),
        time: 5,
        clean: false,
        next_segment: 12,
        catalog: Some(pointer(1)),
        upper: vec![1; UPPER_LIMIT],
        log_start: LogStart { position: 4096, sequence: 8, chain: 99 },
        log: vec![(SlotAddress { device: 0, slot: 0 }, 4)],
        table_segments: (0..24)
            .map(|id| TableSegment {
                id: 1 << 28 | id,
                place: vec![SlotAddress { device: 1, slot: 1 << 20 }].into(),
                frames: 1000,
                bytes: 1 << 26,
                dead_since: (id % 2 == 0).then_some(1 << 40),
            })
            .collect(),
        table: Some(pointer(2)),
        deltas: (0..12).map(pointer).collect(),
        table_top: vec![pointer(3)],
        table_list: vec![pointer(4), pointer(5)],
        listed: [].into(),
        guarded: true,
    }
}

#[test]
fn the_largest_root_fits_and_survives() {
    let record = root(5).encode().unwrap();
    assert_eq!(record.len(), root::LENGTH);
    assert_eq!(Root::decode(&record).unwrap(), root(5));
    let mut large = root(5);
    large.upper.push(0);
    assert!(large.encode().is_err());
    for bit in 0..record.len() * 8 {
        let mut rotten = record.clone();
        rotten[bit / 8] ^= 1 << (bit % 8);
        assert!(Root::decode(&rotten).is_err());
    }
}

#[test]
fn identities_are_found_while_one_copy_is_left() {
    let device = Simulator::new("sim", (64 << 20) + 12_345);
    assert_eq!(probe(&device).unwrap(), None);
    write_identity(&device, &identity(1)).unwrap();
    assert_eq!(probe(&device).unwrap().unwrap(), identity(1));
    write_identity(&device, &identity(2)).unwrap();
    let places = places(device.length());
    assert_eq!(places, vec![0, 512 << 10, 63 << 20, (63 << 20) + (512 << 10)]);
    for place in &places[..3] {
        device.rot(place + IDENTITY_AT + 100, 3);
        assert_eq!(probe(&device).unwrap().unwrap(), identity(2));
    }
    device.rot(places[3] + IDENTITY_AT + 30_000, 3);
    assert_eq!(probe(&device).unwrap(), None);
    assert!(super::places((2 << 20) - 1).is_empty());
}

#[test]
fn a_crash_while_identities_are_written_leaves_one() {
    for seed in 0..64 {
        for allowed in 0..7 {
            let device = Simulator::new("sim", 64 << 20);
            write_identity(&device, &identity(1)).unwrap();
            device.fail_after(allowed);
            assert_eq!(write_identity(&device, &identity(2)).is_ok(), allowed >= 6);
            device.crash(seed);
            let found = probe(&device).unwrap().unwrap();
            assert!(found == identity(2) || (found == identity(1) && allowed < 6));
        }
    }
}

#[test]
fn a_newer_format_is_refused_in_words() {
    let device = Simulator::new("sim", 64 << 20);
    let mut newer = identity(1);
    newer.incompatible = 256;
    write_identity(&device, &newer).unwrap();
    let error = probe(&device).unwrap_err();
    assert!(error.to_string().contains("features that this program does not know: 0x100"), "{error}");
}

/// The bit of unfinished encryption is known to this version; programs without it refuse the pool, as this one refuses
/// its neighbour.
#[test]
fn a_pool_with_sealed_frames_is_refused_by_programs_that_do_not_know_them() {
    let with = |bit: u64| {
        let identity = identity(1);
        Identity { incompatible: identity.incompatible | bit, ..identity }
    };
    let sealed = with(Identity::UNFINISHED_ENCRYPTION);
    assert_eq!(Identity::decode(&sealed.encode().unwrap()).unwrap(), sealed);
    let error = Identity::decode(&with(1 << 61).encode().unwrap()).unwrap_err();
    assert!(error.to_string().contains("0x2000000000000000"), "{error}");
}

#[test]
fn rings_keep_the_last_roots() {
    let device = Simulator::new("sim", 64 << 20);
    for generation in 1..=100 {
        for round in [Round::First, Round::Second] {
            write_root(&device, generation, &root(generation).encode().unwrap(), round).unwrap();
        }
    }
    let found: Vec<u64> = roots(&device, 77).unwrap().iter().map(|root| root.generation).collect();
    assert_eq!(found, (5..=100).collect::<Vec<_>>());
    assert!(roots(&device, 78).unwrap().is_empty());
    device.fail_reads(true);
    assert!(roots(&device, 77).is_err());
    assert!(probe(&device).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_a_label_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..600), as_root: bool) {
        // With the right checksum in front, so that the fields are judged.
        let (magic, length) = if as_root { (*b"nacreROO", root::LENGTH) } else { (*b"nacrePOO", 32 << 10) };
        let mut body = body;
        body.resize(length - 24, 0);
        if !as_root {
            body[..4].copy_from_slice(&1u32.to_le_bytes());
            body[12..20].fill(0);
        }
        let mut block = magic.to_vec();
        block.extend(checksum::structure(&body));
        block.extend(&body);
        if as_root { let _ = Root::decode(&block); } else { let _ = Identity::decode(&block); }
        let _ = Root::decode(&body);
        let _ = Identity::decode(&body);
    }

    #[test]
    fn identities_survive(name in "[a-z]{1,30}", index in 0u16..2, flip in 0usize..(32 << 13)) {
        let mut written = identity(9);
        written.name = name;
        written.index = index;
        let mut block = written.encode().unwrap();
        prop_assert_eq!(Identity::decode(&block).unwrap(), written);
        block[flip % (32 << 10)] ^= 1 << (flip % 8);
        prop_assert!(Identity::decode(&block).is_err());
    }
}

/// Headers, partition tables and uberblocks of other programs anywhere that labels lie or those programs look.
#[test]
fn a_device_of_a_pool_is_nobody_elses() {
    const MIB: u64 = 1 << 20;
    for length in [64 * MIB, 64 * MIB + 12_345 * 512] {
        let device = Simulator::new("disk", length);
        let found: [(u64, &[u8]); 8] = [
            (0x438, &[0x53, 0xef]),
            (0x4000, b"SKUL\xba\xbe"),
            (0x10_0000, b"SKUL\xba\xbe"),
            (0x20_0000, &[0x5e, 0xf1, 0xab, 0x2f]),
            (0x40_0000, b"SKUL\xba\xbe"),
            (128 << 10, &0x00ba_b10c_u64.to_le_bytes()),
            (length - 0x2000, &[0xfc, 0x4e, 0x2b, 0xa9]),
            (length - 512, b"EFI PART"),
        ];
        for (offset, magic) in found {
            device.write_at(magic, offset).unwrap();
        }
        let before = device.bytes();
        try_writing(&device).unwrap();
        assert_eq!(device.bytes(), before);
        // Data of any kind that is no header.
        device.write_at(b"SKUL", 0x30_0000).unwrap();
        clear_foreign(&device).unwrap();
        let now = device.bytes();
        for (offset, magic) in found {
            assert!(now[offset as usize..][..magic.len()].iter().all(|byte| *byte == 0), "{length} {offset:x}");
        }
        assert_eq!(&now[0x30_0000..][..4], b"SKUL");
    }
}

/// Labels at the end of a device that was longer already when its pool was imported are in use; all else there is not.
#[test]
fn labels_in_use_at_a_new_end_stay() {
    let device = Simulator::new("disk", (64 << 20) + 12_345);
    let length = device.length();
    write_identity(&device, &identity(3)).unwrap();
    for generation in 1..4 {
        let record = root(generation).encode().unwrap();
        write_root(&device, generation, &record, Round::First).unwrap();
        write_root(&device, generation, &record, Round::Second).unwrap();
    }
    let end = 63 << 20;
    let foreign = [end, end + LENGTH + 512, end + RING_AT - 512, length - 512];
    for offset in foreign {
        device.write_at(b"EFI PART", offset).unwrap();
    }
    clear_new_end(&device, 77, 1).unwrap();
    let now = device.bytes();
    for offset in foreign {
        assert!(now[offset as usize..][..8].iter().all(|byte| *byte == 0), "{offset:x}");
    }
    // The labels at the beginning are damaged before the next ones are written.
    let whole = device.copy();
    device.write_at(&vec![0xaa; ENDS as usize], 0).unwrap();
    assert_eq!(probe(&device).unwrap(), Some(identity(3)));
    assert_eq!(roots(&device, 77).unwrap().last().unwrap().generation, 3);
    // Labels of another pool, and of another device of this one.
    for (pool, index) in [(78, 1), (77, 0)] {
        let other = whole.copy();
        clear_new_end(&other, pool, index).unwrap();
        assert!(other.bytes()[end as usize..].iter().all(|byte| *byte == 0), "{pool} {index}");
        assert_eq!(probe(&other).unwrap(), Some(identity(3)));
    }
}
