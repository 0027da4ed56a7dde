//! What devices are called in tables, by the letters of `zpool`: files by their paths, disks by the
//! last part of it (`-P`: all of it), with links followed (`-L`), or by their numbers (`-g`).

use nacre_admin::pool::{DeviceFigures, Figures};
use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

/// How devices are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Called {
    /// By their numbers.
    pub by_guid: bool,
    /// Where links end.
    pub resolved: bool,
    /// Disks, too, by their whole paths.
    pub whole: bool,
}

impl Called {
    /// Gives the devices of a pool their names.
    pub fn name(self, pool: &mut Figures) {
        pool.devices.iter_mut().for_each(|device| device.shown = Some(self.of(device)));
    }

    fn of(self, device: &DeviceFigures) -> String {
        // That of a pool whose process has ended is not known.
        if self.by_guid && device.guid != 0 { device.guid.to_string() } else { self.path(&device.path) }
    }

    /// What a device at this path is called.
    pub fn path(self, path: &str) -> String {
        let real = self.resolved.then(|| fs::canonicalize(path).ok()?.into_os_string().into_string().ok()).flatten();
        let shown = real.unwrap_or_else(|| path.to_owned());
        if self.whole || !is_disk(path) { shown } else { last_of(&shown).to_owned() }
    }
}

/// Whether a device is a disk; else it is a file. One that is gone is what its path says.
pub fn is_disk(path: &str) -> bool {
    fs::metadata(path).map_or_else(|_| path.starts_with("/dev/"), |there| there.file_type().is_block_device())
}

fn last_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether somebody who says `word` means this device: by its number, its path as it is or from
/// here, or the last part of a path in `/dev`.
pub fn is_meant(device: &DeviceFigures, word: &Path) -> bool {
    let text = word.to_str().unwrap_or_default();
    let absolute = std::path::absolute(word);
    device.guid.to_string() == text
        || device.path == text
        || absolute.is_ok_and(|absolute| absolute == Path::new(&device.path))
        || !text.contains('/') && last_of(&device.path) == text && is_disk(&device.path)
}

/// Whether two paths lead to one file or device.
pub(super) fn same(a: &Path, b: &Path) -> bool {
    let itself = |path: &Path| {
        let there = std::fs::metadata(path).ok()?;
        let block = there.file_type().is_block_device();
        Some(if block { (None, there.rdev()) } else { (Some(there.dev()), there.ino()) })
    };
    a == b || itself(a).is_some_and(|a| Some(a) == itself(b))
}

/// The device of a pool that is meant.
pub(super) fn named_device<'a>(pool: &'a Figures, word: &Path) -> Option<&'a DeviceFigures> {
    // One that was removed may lie where another one is now.
    let mut there = pool.devices.iter().filter(|device| device.role != "removed");
    there.find(|device| is_meant(device, word) || same(Path::new(&device.path), word))
}
