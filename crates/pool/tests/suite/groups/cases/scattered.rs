//! Different devices are wrong in different places of the same frame: no one of them can be left out,
//! and yet nothing is lost.

use nacre_pool::device::Device;
use nacre_pool::label::{GroupKind, SlotAddress};
use nacre_pool::{Frames, Pointer};

use crate::groups::{MIB, Model, content};

/// Devices and offsets at which this part of a frame lies, looked for where its segment does; frames begin at
/// multiples of 16, with 80 bytes of their own.
pub fn places(model: &Model, pointer: &Pointer, part: &[u8]) -> Vec<(usize, u64)> {
    let segment = model.store().segments().into_iter().find(|segment| segment.id == pointer.segment).unwrap();
    let mut found = Vec::new();
    for slot in segment.place.iter() {
        let (number, start) = (usize::from(slot.device), MIB + u64::from(slot.slot) * model.store().slot());
        let mut content = vec![0; model.store().slot() as usize];
        model.sim(number).read_at(&mut content, start).unwrap();
        let chunks = content.chunks(16).zip(0..).filter(|(chunk, _)| *chunk == part);
        found.extend(chunks.map(|(_, chunk)| (number, start + chunk * 16)));
    }
    found
}

/// A pool, and a long frame in it.
fn pool(kind: GroupKind, devices: usize, seed: u64) -> (Model, u64, Pointer) {
    let mut model = Model::new(&[(kind, devices)], &[64], seed);
    for _ in 0..30 {
        model.write().unwrap();
    }
    model.commit().unwrap();
    let long = |number: &u64| !number.is_multiple_of(3) && content(*number).len() > 110_000;
    let number = model.now.keys().copied().find(long).unwrap();
    let pointer = model.now[&number];
    (model, number, pointer)
}

/// Harms the content of a frame at these offsets, each on so many devices: one that holds it, and others
/// in the same row or copy. Answers on how many devices in all.
fn harm(model: &Model, number: u64, spots: &[(usize, usize)]) -> usize {
    let (content, pointer) = (content(number), model.now[&number]);
    let segment = model.store().segments().into_iter().find(|segment| segment.id == pointer.segment).unwrap();
    let start = |slot: &SlotAddress| MIB + u64::from(slot.slot) * model.store().slot();
    let mut harmed = std::collections::BTreeSet::new();
    for (turn, (at, devices)) in spots.iter().enumerate() {
        let found = places(model, &pointer, &content[*at..at + 16]);
        let (first, offset) = found[turn % found.len()];
        let place: Vec<&SlotAddress> = segment.place.iter().collect();
        let column = place.iter().position(|slot| usize::from(slot.device) == first).unwrap();
        for more in 0..*devices {
            let slot = place[(column + more) % place.len()];
            model.sim(slot.device.into()).overwrite(offset - start(place[column]) + start(slot), &[0x5a; 700]);
            harmed.insert(slot.device);
        }
    }
    harmed.len()
}

fn is_whole(model: &mut Model) {
    model.commit().unwrap();
    model.scrub().unwrap();
    model.commit().unwrap();
    for _ in 0..6 {
        model.survives_losses();
    }
}

/// Read or scrubbed, such a frame is put together, and written anew where it was wrong.
#[test]
fn rot_on_different_devices_of_one_frame_is_mended() {
    // Content lies in units of 16 KiB, in rows of as many as there are columns of data: these are in
    // rows of their own.
    let (once, twice) = ([(96, 1), (60_000, 1), (102_000, 1)], [(96, 2), (60_000, 2), (102_000, 2)]);
    for (kind, devices, spots) in [
        (GroupKind::Mirror, 2, &once),
        (GroupKind::Mirror, 3, &twice),
        (GroupKind::RaidZ(1), 4, &once),
        (GroupKind::RaidZ(2), 5, &twice),
        (GroupKind::RaidZ(3), 6, &twice),
    ] {
        let (mut model, number, pointer) = pool(kind, devices, 31);
        assert!(harm(&model, number, spots) > spots[0].1, "{kind:?}: the same devices everywhere");
        let before = model.store().mended();
        assert!(*model.store().read(&pointer).unwrap() == *content(number), "{kind:?}");
        assert!(model.store().mended() > before, "{kind:?}: it was written anew");
        is_whole(&mut model);
        harm(&model, number, spots);
        is_whole(&mut model);
        assert!(*model.store().read(&pointer).unwrap() == *content(number), "{kind:?}");
    }
}

/// The header of a frame is wrong on one device, its content on another.
#[test]
fn a_header_and_content_on_different_devices_are_mended() {
    for (kind, devices) in [(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 4)] {
        let (mut model, number, pointer) = pool(kind, devices, 37);
        let content = content(number);
        let (device, offset) = places(&model, &pointer, &content[..16])[0];
        model.sim(device).overwrite(offset - 80, &[0xa5; 80]);
        let other = places(&model, &pointer, &content[60_000..60_016]).into_iter().find(|(other, _)| *other != device);
        let (other, offset) = other.unwrap();
        model.sim(other).overwrite(offset, &[0xa5; 5000]);
        is_whole(&mut model);
        assert!(*model.store().read(&pointer).unwrap() == *content);
    }
}

/// Half of a frame is wrong on one device, the other half on another.
#[test]
fn halves_of_a_frame_on_different_devices_are_mended() {
    let (mut model, number, pointer) = pool(GroupKind::Mirror, 2, 41);
    let content = content(number);
    let found = places(&model, &pointer, &content[..16]);
    // Devices lose whole blocks.
    let half = (found[0].1 + content.len() as u64 / 2) / 4096 * 4096 - found[0].1;
    model.sim(found[0].0).overwrite(found[0].1, &vec![0x5a; half as usize]);
    model.sim(found[1].0).overwrite(found[1].1 + half, &vec![0x5a; content.len() - half as usize]);
    assert!(*model.store().read(&pointer).unwrap() == *content);
    is_whole(&mut model);
}

/// More than there is redundancy for, in one place: that frame is lost, and told so; others are not.
#[test]
fn what_is_wrong_everywhere_is_lost() {
    for (kind, devices) in [(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 4)] {
        let (model, number, pointer) = pool(kind, devices, 43);
        harm(&model, number, &[(60_000, 2), (96, 1)]);
        assert!(model.store().read(&pointer).is_err(), "{kind:?}");
        let mut lost = Vec::new();
        let mut visit = |checked: &nacre_pool::store::Checked| {
            lost.extend((checked.damage.is_some() && !checked.mended).then_some(checked.name));
            true
        };
        model.store().scrub(&mut visit).unwrap();
        assert_eq!(lost, [(pointer.segment, pointer.index)], "{kind:?}");
        for (other, pointer) in model.now.iter().filter(|(other, _)| **other != number) {
            assert!(*model.store().read(pointer).unwrap() == *content(*other), "{kind:?}");
        }
    }
}
