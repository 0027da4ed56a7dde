//! What a pool consists of, as `zpool` shows it: groups with their devices, and devices for
//! themselves. Pure.

use super::status;
use nacre_admin::pool::{DeviceFigures, Figures, GroupFigures};
use nacre_daemon::pool::expected::UNAVAILABLE;

/// What the device is called that stands for the whole pool.
pub const ROOT: &str = "root-0";

/// A part of a pool, or all of it.
#[derive(Clone, Copy, Debug)]
pub enum Vdev<'a> {
    Root,
    Group(&'a GroupFigures),
    Leaf(&'a DeviceFigures),
}

impl<'a> Vdev<'a> {
    /// What it is called.
    pub fn name(&self) -> &'a str {
        match self {
            Self::Root => ROOT,
            Self::Group(group) => &group.name,
            Self::Leaf(device) => device.name(),
        }
    }

    /// Its state.
    pub fn state(&self, pool: &'a Figures) -> &'a str {
        match self {
            Self::Root => &pool.health,
            Self::Group(_) if pool.health == UNAVAILABLE => UNAVAILABLE,
            Self::Group(group) => &group.state,
            Self::Leaf(device) => status::device_state(pool, device),
        }
    }

    /// The devices that it consists of.
    pub fn devices(&self, pool: &'a Figures) -> Vec<&'a DeviceFigures> {
        match self {
            Self::Root => tops(pool).iter().flat_map(|top| top.vdev.devices(pool)).collect(),
            Self::Group(group) => group.devices.iter().filter_map(|at| pool.devices.get(*at)).collect(),
            Self::Leaf(device) => vec![*device],
        }
    }
}

/// What a pool consists of directly, with the devices below it.
pub struct Top<'a> {
    pub vdev: Vdev<'a>,
    pub below: Vec<&'a DeviceFigures>,
}

/// The groups of a pool, and its devices that are in none.
pub fn tops(pool: &Figures) -> Vec<Top<'_>> {
    if pool.groups.is_empty() {
        return pool.devices.iter().map(alone).collect();
    }
    pool.groups.iter().flat_map(|group| of_group(pool, group)).collect()
}

fn alone(device: &DeviceFigures) -> Top<'_> {
    Top { vdev: Vdev::Leaf(device), below: Vec::new() }
}

fn of_group<'a>(pool: &'a Figures, group: &'a GroupFigures) -> Vec<Top<'a>> {
    let vdev = Vdev::Group(group);
    let devices = vdev.devices(pool);
    if group.kind == "plain" { devices.into_iter().map(alone).collect() } else { vec![Top { vdev, below: devices }] }
}

/// Everything that a pool consists of, from above, each with how deep it lies.
pub fn rows(pool: &Figures) -> Vec<(usize, Vdev<'_>)> {
    let mut rows = Vec::new();
    for top in tops(pool) {
        rows.push((1, top.vdev));
        rows.extend(top.below.into_iter().map(|device| (2, Vdev::Leaf(device))));
    }
    rows
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
        let names: Vec<(usize, &str)> = rows(&pool).iter().map(|(depth, vdev)| (*depth, vdev.name())).collect();
        assert_eq!(names, [(1, "/a"), (1, "mirror-1"), (2, "/b"), (2, "/c")]);
        assert_eq!(Vdev::Root.devices(&pool).len(), 3);
        let plain = Figures { groups: Vec::new(), ..mixed() };
        assert!(rows(&plain).iter().all(|(depth, _)| *depth == 1));
    }
}
