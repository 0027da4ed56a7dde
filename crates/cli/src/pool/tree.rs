//! What a pool consists of, as `zpool` shows it: groups with their devices, and devices for
//! themselves. Pure.

use super::status;
use nacre_admin::pool::{
    DeviceFigures, Figures, GroupFigures,
    figures::{LOG, SPECIAL},
};
use nacre_daemon::pool::expected::UNAVAILABLE;
use std::borrow::Cow;

/// What the device is called that stands for the whole pool.
pub const ROOT: &str = "root-0";

/// A part of a pool, or all of it.
#[derive(Clone, Copy, Debug)]
pub enum Vdev<'a> {
    Root,
    Group(&'a GroupFigures),
    /// A device of a group, by its number there, with another one that stands beside it.
    Pair(usize, &'a DeviceFigures, &'a DeviceFigures),
    Leaf(&'a DeviceFigures),
}

impl<'a> Vdev<'a> {
    /// What it is called.
    pub fn name(&self) -> Cow<'a, str> {
        match self {
            Self::Root => ROOT.into(),
            Self::Group(group) => group.name.as_str().into(),
            Self::Pair(number, _, beside) => format!("{}-{number}", beside.role).into(),
            Self::Leaf(device) => device.name().into(),
        }
    }

    /// Its state.
    pub fn state(&self, pool: &'a Figures) -> &'a str {
        match self {
            Self::Root => &pool.health,
            Self::Group(_) if pool.health == UNAVAILABLE => UNAVAILABLE,
            Self::Group(group) => &group.state,
            Self::Pair(_, device, beside) => {
                let whole = |device| status::device_state(pool, device) == "ONLINE" && !device.resilvering;
                if whole(device) && whole(beside) { "ONLINE" } else { "DEGRADED" }
            }
            Self::Leaf(device) => status::device_state(pool, device),
        }
    }

    /// The devices that it consists of.
    pub fn devices(&self, pool: &'a Figures) -> Vec<&'a DeviceFigures> {
        match self {
            Self::Root => pool.devices.iter().filter(|device| device.role != "removed").collect(),
            Self::Group(group) => group.devices.iter().filter_map(|at| pool.devices.get(*at)).collect(),
            Self::Pair(_, device, beside) => vec![*device, *beside],
            Self::Leaf(device) => vec![*device],
        }
    }
}

/// The spares of a pool.
pub fn spares(pool: &Figures) -> impl Iterator<Item = &DeviceFigures> {
    pool.devices.iter().filter(|device| device.role == "spare")
}

/// What a spare is doing, in the words of ZFS.
pub fn spare_state(device: &DeviceFigures) -> &'static str {
    match (device.beside, device.health()) {
        (Some(_), _) => "INUSE",
        (None, "ONLINE") => "AVAIL",
        (None, state) => state,
    }
}

/// A device of a group, or what stands for it and for another one beside it.
fn part<'a>(pool: &'a Figures, number: usize, device: &'a DeviceFigures) -> Vdev<'a> {
    let at = pool.devices.iter().position(|there| std::ptr::eq(there, device));
    let beside =
        pool.devices.iter().find(|other| other.role != "removed" && other.beside.is_some() && other.beside == at);
    beside.map_or(Vdev::Leaf(device), |beside| Vdev::Pair(number, device, beside))
}

/// What a device lies directly below of, if not of the pool.
pub fn above<'a>(pool: &'a Figures, device: &DeviceFigures) -> Option<Vdev<'a>> {
    let is = |other: &DeviceFigures| std::ptr::eq(other, device);
    for top in tops(pool) {
        for vdev in top.below.iter().chain([&top.vdev]) {
            match vdev {
                Vdev::Pair(_, one, other) if is(one) || is(other) => return Some(*vdev),
                Vdev::Leaf(leaf) if is(leaf) => return Some(top.vdev).filter(|top| !matches!(top, Vdev::Leaf(_))),
                _ => {}
            }
        }
    }
    None
}

/// The group that a device is in, unless it is for itself.
pub fn group_of<'a>(pool: &'a Figures, device: &DeviceFigures) -> Option<Vdev<'a>> {
    let is_in = |vdev: &Vdev<'_>| vdev.devices(pool).iter().any(|own| std::ptr::eq(*own, device));
    tops(pool).into_iter().map(|top| top.vdev).find(|vdev| matches!(vdev, Vdev::Group(_)) && is_in(vdev))
}

/// What a pool consists of directly, with the devices below it.
pub struct Top<'a> {
    pub vdev: Vdev<'a>,
    pub below: Vec<Vdev<'a>>,
    /// The class of its group.
    pub class: &'a str,
}

/// The groups of a pool, and its devices that are in none.
pub fn tops(pool: &Figures) -> Vec<Top<'_>> {
    if pool.groups.is_empty() {
        return alone(pool, "", pool.devices.iter().collect());
    }
    pool.groups.iter().flat_map(|group| of_group(pool, group)).collect()
}

fn alone<'a>(pool: &'a Figures, class: &'a str, devices: Vec<&'a DeviceFigures>) -> Vec<Top<'a>> {
    let top = |(number, device)| Top { vdev: part(pool, number, device), below: Vec::new(), class };
    devices.into_iter().enumerate().map(top).collect()
}

fn of_group<'a>(pool: &'a Figures, group: &'a GroupFigures) -> Vec<Top<'a>> {
    let vdev = Vdev::Group(group);
    let devices = vdev.devices(pool);
    if group.kind == "plain" {
        return alone(pool, &group.class, devices);
    }
    let below = devices.into_iter().enumerate().map(|(number, device)| part(pool, number, device)).collect();
    vec![Top { vdev, below, class: &group.class }]
}

/// The parts in which a pool is shown: of which class the groups are, and what stands above them. Spares
/// come after these.
pub const PARTS: [(&str, Option<&str>); 3] = [("", None), (SPECIAL, Some("special")), (LOG, Some("logs"))];

/// What the groups of a class consist of, from above, each with how deep it lies.
pub fn rows<'a>(pool: &'a Figures, class: &str) -> Vec<(usize, Vdev<'a>)> {
    let mut rows = Vec::new();
    for top in tops(pool).into_iter().filter(|top| top.class == class) {
        with_pair(&mut rows, 1, top.vdev);
        top.below.into_iter().for_each(|vdev| with_pair(&mut rows, 2, vdev));
    }
    rows
}

/// The same of all groups.
pub fn all_rows(pool: &Figures) -> impl Iterator<Item = (usize, Vdev<'_>)> {
    PARTS.into_iter().flat_map(|(class, _)| rows(pool, class))
}

fn with_pair<'a>(rows: &mut Vec<(usize, Vdev<'a>)>, depth: usize, vdev: Vdev<'a>) {
    rows.push((depth, vdev));
    if let Vdev::Pair(_, device, beside) = vdev {
        rows.extend([(depth + 1, Vdev::Leaf(device)), (depth + 1, Vdev::Leaf(beside))]);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A pool of a plain device and a mirror of two.
    pub fn mixed() -> Figures {
        let device = |path: &str, size| DeviceFigures { path: path.to_owned(), size, ..DeviceFigures::default() };
        let group = |name: &str, kind: &str, devices, size| GroupFigures {
            name: name.to_owned(),
            kind: kind.to_owned(),
            state: "ONLINE".to_owned(),
            devices,
            size,
            usable: size,
            ..GroupFigures::default()
        };
        Figures {
            name: "tank".to_owned(),
            health: "ONLINE".to_owned(),
            size: 300,
            devices: vec![device("/a", 100), device("/b", 200), device("/c", 210)],
            groups: vec![group("plain-0", "plain", vec![0], 100), group("mirror-1", "mirror", vec![1, 2], 200)],
            redundant_metadata: true,
            ordered_names: true,
            ..Figures::default()
        }
    }

    #[test]
    fn groups_come_before_their_devices() {
        let pool = mixed();
        let names = |pool: &Figures| -> Vec<(usize, String)> {
            rows(pool, "").iter().map(|(depth, vdev)| (*depth, vdev.name().into_owned())).collect()
        };
        let expected = [(1, "/a"), (1, "mirror-1"), (2, "/b"), (2, "/c")];
        assert_eq!(names(&pool), expected.map(|(depth, name)| (depth, name.to_owned())));
        let mut replacing = mixed();
        replacing.devices.push(DeviceFigures {
            path: "/d".to_owned(),
            role: "replacing".to_owned(),
            beside: Some(2),
            ..DeviceFigures::default()
        });
        let expected = [(1, "/a"), (1, "mirror-1"), (2, "/b"), (2, "replacing-1"), (3, "/c"), (3, "/d")];
        assert_eq!(names(&replacing), expected.map(|(depth, name)| (depth, name.to_owned())));
        assert_eq!(Vdev::Root.devices(&pool).len(), 3);
        let plain = Figures { groups: Vec::new(), ..mixed() };
        assert!(rows(&plain, "").iter().all(|(depth, _)| *depth == 1));
        let mut with_log = mixed();
        with_log.groups[1].class = LOG.to_owned();
        assert_eq!(names(&with_log), [(1, "/a".to_owned())]);
        assert_eq!((rows(&with_log, LOG).len(), rows(&with_log, SPECIAL).len()), (3, 0));
    }
}
