//! Names of devices in tables, by the letters of `zpool`: files by their paths, disks by the last
//! component (`-P`: by the whole path), with links followed (`-L`), or by their GUIDs (`-g`).

use nacre_admin::pool::{DeviceFigures, Figures};
use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

/// How devices are named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Called {
    /// By their GUIDs.
    pub by_guid: bool,
    /// By their paths with links resolved.
    pub resolved: bool,
    /// Disks by their whole paths, too.
    pub whole: bool,
}

impl Called {
    /// Sets the shown name of each device of a pool.
    pub fn name(self, pool: &mut Figures) {
        pool.devices.iter_mut().for_each(|device| device.shown = Some(self.of(device)));
    }

    fn of(self, device: &DeviceFigures) -> String {
        // The GUID is unknown for a pool whose process has ended.
        if self.by_guid && device.guid != 0 { device.guid.to_string() } else { self.path(&device.path) }
    }

    /// Returns the name of a device with this path.
    pub fn path(self, path: &str) -> String {
        let real = self.resolved.then(|| fs::canonicalize(path).ok()?.into_os_string().into_string().ok()).flatten();
        let shown = real.unwrap_or_else(|| path.to_owned());
        if self.whole || !is_disk(path) { shown } else { last_of(&shown).to_owned() }
    }
}

/// Returns whether a device is a disk; else it is a file. For a missing device its path decides.
pub fn is_disk(path: &str) -> bool {
    fs::metadata(path).map_or_else(|_| path.starts_with("/dev/"), |there| there.file_type().is_block_device())
}

fn last_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns whether `word` names this device: by its GUID, its path as it is or relative to here, or
/// the last component of a path in `/dev`.
pub fn is_meant(device: &DeviceFigures, word: &Path) -> bool {
    let text = word.to_str().unwrap_or_default();
    let absolute = std::path::absolute(word);
    device.guid.to_string() == text
        || device.path == text
        || absolute.is_ok_and(|absolute| absolute == Path::new(&device.path))
        || !text.contains('/') && last_of(&device.path) == text && is_disk(&device.path)
}

/// Returns whether two paths lead to one file or device.
pub(super) fn same(a: &Path, b: &Path) -> bool {
    let itself = |path: &Path| {
        let there = std::fs::metadata(path).ok()?;
        let block = there.file_type().is_block_device();
        Some(if block { (None, there.rdev()) } else { (Some(there.dev()), there.ino()) })
    };
    a == b || itself(a).is_some_and(|a| Some(a) == itself(b))
}

/// Returns the device of a pool that `word` names.
pub(super) fn named_device<'a>(pool: &'a Figures, word: &Path) -> Option<&'a DeviceFigures> {
    // The path of a removed device may be another device's now.
    let mut there = pool.devices.iter().filter(|device| device.role != "removed");
    there.find(|device| is_meant(device, word) || same(Path::new(&device.path), word))
}
