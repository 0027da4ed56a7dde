//! Changes of the shape of a pool, chosen at random.
//!
//! Callers: tests of pools that change their shape, with models of different levels.

use nacre_pool::backend::{Disks, NewShape};
use nacre_pool::device::Random;
use nacre_pool::label::{ChangeKind, GroupKind};

/// A change of what this device is in. It may be refused; `None` where there is none of the kind that was
/// chosen.
pub fn any(disks: &Disks, number: u16, random: &mut Random) -> Option<NewShape> {
    let health = disks.health();
    let own = health.get(usize::from(number)).filter(|own| own.is_own())?;
    let (group, kind) = (own.group, disks.kind_of(own.group));
    let rows = matches!(kind, GroupKind::RaidZ(_));
    match random.below(6) {
        0 => {
            let beside = (0..).zip(&health).filter(|(_, one)| one.is_own() && one.group == group);
            disks.without(&beside.map(|(at, _)| at).collect::<Vec<u16>>()).ok()
        }
        1 => disks.without(&[number]).ok(),
        // Where the intent log lies.
        2 => disks.without(disks.log_devices().get(..1)?).ok(),
        3 if rows => Some(expansion(disks, group)),
        _ => {
            let kinds = [GroupKind::RaidZ(1), GroupKind::RaidZ(2), GroupKind::RaidZ(3), GroupKind::Mirror];
            let (becomes, coming) = (*random.pick(&kinds)?, random.below(3) as usize);
            Some(NewShape { kind: ChangeKind::Conversion, group, becomes, leaving: Vec::new(), coming })
        }
    }
}

/// A group becomes wider by a device.
pub fn expansion(disks: &Disks, group: usize) -> NewShape {
    let becomes = disks.kind_of(group);
    NewShape { kind: ChangeKind::Expansion, group, becomes, leaving: Vec::new(), coming: 1 }
}
