//! The vdev tree of a pool, as `zpool` shows it: groups with their devices, and top-level devices.
//! Pure.

use super::status;
use nacre_admin::pool::{
    DeviceFigures, Figures, GroupFigures,
    figures::{LOG, SPECIAL},
};
use nacre_daemon::pool::expected::UNAVAILABLE;
use std::borrow::Cow;

/// Name of the root vdev.
pub const ROOT: &str = "root-0";

/// A vdev of a pool, or the root.
#[derive(Clone, Copy, Debug)]
pub enum Vdev<'a> {
    Root,
    Group(&'a GroupFigures),
    /// A device with the one that is replacing it, by the number in its group: a `replacing` or
    /// `spare` vdev.
    Pair(usize, &'a DeviceFigures, &'a DeviceFigures),
    Leaf(&'a DeviceFigures),
}

impl<'a> Vdev<'a> {
    /// Returns the name of the vdev.
    pub fn name(&self) -> Cow<'a, str> {
        match self {
            Self::Root => ROOT.into(),
            Self::Group(group) => group.name.as_str().into(),
            Self::Pair(number, _, beside) => format!("{}-{number}", beside.role).into(),
            Self::Leaf(device) => device.name().into(),
        }
    }

    /// Returns the state of the vdev.
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

    /// Returns the devices of the vdev.
    pub fn devices(&self, pool: &'a Figures) -> Vec<&'a DeviceFigures> {
        match self {
            Self::Root => pool.devices.iter().filter(|device| device.role != "removed").collect(),
            Self::Group(group) => group.devices.iter().filter_map(|at| pool.devices.get(*at)).collect(),
            Self::Pair(_, device, beside) => vec![*device, *beside],
            Self::Leaf(device) => vec![*device],
        }
    }
}

/// Returns the spares of a pool.
pub fn spares(pool: &Figures) -> impl Iterator<Item = &DeviceFigures> {
    pool.devices.iter().filter(|device| device.role == "spare")
}

/// Returns the state of a spare in the words of ZFS.
pub fn spare_state(device: &DeviceFigures) -> &'static str {
    match (device.beside, device.health()) {
        (Some(_), _) => "INUSE",
        (None, "ONLINE") => "AVAIL",
        (None, state) => state,
    }
}

/// Returns a device of a group, as a pair where another one is replacing it.
fn part<'a>(pool: &'a Figures, number: usize, device: &'a DeviceFigures) -> Vdev<'a> {
    let at = pool.devices.iter().position(|there| std::ptr::eq(there, device));
    let beside =
        pool.devices.iter().find(|other| other.role != "removed" && other.beside.is_some() && other.beside == at);
    beside.map_or(Vdev::Leaf(device), |beside| Vdev::Pair(number, device, beside))
}

/// Returns the parent of a device, unless that is the root.
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

/// Returns the group of a device, if it is in one.
pub fn group_of<'a>(pool: &'a Figures, device: &DeviceFigures) -> Option<Vdev<'a>> {
    let is_in = |vdev: &Vdev<'_>| vdev.devices(pool).iter().any(|own| std::ptr::eq(*own, device));
    tops(pool).into_iter().map(|top| top.vdev).find(|vdev| matches!(vdev, Vdev::Group(_)) && is_in(vdev))
}

/// A top-level vdev with its children.
pub struct Top<'a> {
    pub vdev: Vdev<'a>,
    pub below: Vec<Vdev<'a>>,
    /// Its class.
    pub class: &'a str,
}

/// Returns the top-level vdevs of a pool: groups, and devices without a group.
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

/// The sections of a shown pool: the class of their vdevs, and their heading. Spares follow these.
pub const PARTS: [(&str, Option<&str>); 3] = [("", None), (SPECIAL, Some("special")), (LOG, Some("logs"))];

/// Returns the vdevs of a class, parents first, each with its depth.
pub fn rows<'a>(pool: &'a Figures, class: &str) -> Vec<(usize, Vdev<'a>)> {
    let mut rows = Vec::new();
    for top in tops(pool).into_iter().filter(|top| top.class == class) {
        with_pair(&mut rows, 1, top.vdev);
        top.below.into_iter().for_each(|vdev| with_pair(&mut rows, 2, vdev));
    }
    rows
}

/// Returns the vdevs of all classes, each with its depth.
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
