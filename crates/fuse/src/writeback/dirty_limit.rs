//! How much the kernel can hold back: the limit of dirty pages of one mount.
//!
//! FUSE mounts have a strict limit, a share of what the whole system may have dirty (1 % unless
//! changed); `/sys/class/bdi` shows it. Tasks are checked against it only after they have dirtied
//! some pages, so that each adds something to it. Asked at each charge of the layer's books, so the
//! figures are kept for a moment.

use parking_lot::Mutex;
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// For how long a figure is taken for true.
const FRESH: Duration = Duration::from_secs(1);
/// What single writes that are under way when they are called in may still add, all together.
const UNDER_WAY: u64 = 64 * MIB;
/// For each file: what its writer dirties between two checks, and what is on its way to us.
const PER_FILE: u64 = MIB;
/// So many count of those that may be written to where nothing tells which are open: most of them
/// are closed. What all writers dirty between two checks is bounded for each processor
/// (`balance_dirty_pages_ratelimited_flags()`, Linux mm/page-writeback.c) and counted anyway.
pub(crate) const UNOPENED_MOST: usize = 256;
/// The limit that is set, bytes: the kernel's own share grows with memory.
pub(crate) const WANTED: u64 = 32 * MIB;
/// The most that is set where the layer has room for it, bytes: scattered small writes become few
/// large ones where they are held back together.
const WANTED_MOST: u64 = 1024 * MIB;
/// This part of the layer's room may be held back, and of what the system may have dirty.
const PART_OF_ROOM: u64 = 16;
const PART_OF_DIRTY: u64 = 4;
/// The share of the dirty limit that a mount has at first, per cent.
const SHARE: u64 = 1;
/// Where `/proc/vmstat` cannot be read: more than any limit.
const UNKNOWN: u64 = u64::MAX / 4;

/// The limit with the time when it was read.
#[derive(Default)]
pub(crate) struct KnownLimit(Mutex<Option<(Instant, u64)>>);

impl KnownLimit {
    /// The most that is held back while `files` files are open for collected writes.
    #[expect(clippy::disallowed_methods, reason = "how long a figure of the kernel is believed")]
    pub fn dirty_limit(&self, device: u64, files: usize) -> u64 {
        let now = Instant::now();
        let mut cached = self.0.lock();
        let dirty = match *cached {
            Some((read, dirty)) if now.duration_since(read) < FRESH => dirty,
            _ => {
                let dirty = most_dirty(device);
                *cached = Some((now, dirty));
                dirty
            }
        };
        dirty.saturating_add(PER_FILE.saturating_mul(files as u64)).saturating_add(UNDER_WAY)
    }
}

/// The limit that is wanted where a layer has so much room, bytes.
pub(crate) fn wanted(room: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    let dirty =
        fs::read_to_string("/proc/vmstat").ok().and_then(|text| threshold(&text)).unwrap_or(0).saturating_mul(page);
    wanted_of(room, dirty)
}

fn wanted_of(room: u64, dirty: u64) -> u64 {
    (room / PART_OF_ROOM).min(dirty / PART_OF_DIRTY).clamp(WANTED, WANTED_MOST)
}

/// Makes sure that there is a strict limit, and sets it to what is wanted, bytes.
///
/// # Errors
/// Why there is none.
pub(crate) fn limit(device: u64, wanted: u64) -> Result<(), String> {
    let strict = path(device, "strict_limit");
    let is_strict = || fs::read_to_string(&strict).map(|text| text.trim() == "1");
    match is_strict() {
        Ok(true) => {}
        Ok(false) => {
            fs::write(&strict, "1").map_err(|error| format!("{} cannot be set: {error}", strict.display()))?;
            if !matches!(is_strict(), Ok(true)) {
                return Err("the kernel limits what it holds back of this mount only roughly".to_owned());
            }
        }
        Err(error) => return Err(format!("{} cannot be read: {error}", strict.display())),
    }
    let most = path(device, "max_bytes");
    // At first it is a share of memory, which may be less than is wanted here.
    if wanted > WANTED || number(&most).is_none_or(|bytes| bytes > wanted) {
        let set = fs::write(&most, wanted.to_string());
        set.unwrap_or_else(|error| tracing::debug!(%error, path = %most.display(), "the limit stays as it is"));
    }
    Ok(())
}

/// Bytes that may be dirty before every writer waits.
fn most_dirty(device: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    let Some(pages) = fs::read_to_string("/proc/vmstat").ok().and_then(|text| threshold(&text)) else { return UNKNOWN };
    let all = pages.saturating_mul(page);
    let mount = number(&path(device, "max_bytes")).unwrap_or(all / 100 * SHARE).max(page);
    // A task may dirty that much before it is checked (the kernel's `ratelimit_pages`).
    mount.saturating_add(all / 32)
}

/// `nr_dirty_threshold`, pages.
fn threshold(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("nr_dirty_threshold "))?.trim().parse().ok()
}

fn number(path: &PathBuf) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn path(device: u64, name: &str) -> PathBuf {
    format!("/sys/class/bdi/{}:{}/{name}", rustix::fs::major(device), rustix::fs::minor(device)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_is_found_by_its_whole_name() {
        assert_eq!(threshold("nr_dirty 5\nnr_dirty_threshold_x 1\nnr_dirty_threshold 1215776\n"), Some(1_215_776));
        assert_eq!(threshold("nr_dirty 5\n"), None);
    }

    #[test]
    fn the_limit_grows_with_the_room_and_with_memory() {
        assert_eq!(wanted_of(0, u64::MAX), WANTED);
        assert_eq!(wanted_of(u64::MAX, 0), WANTED);
        assert_eq!(wanted_of(16 * 100 * MIB, u64::MAX), 100 * MIB);
        assert_eq!(wanted_of(u64::MAX, 4 * 200 * MIB), 200 * MIB);
        assert_eq!(wanted_of(u64::MAX, u64::MAX), WANTED_MOST);
    }

    #[test]
    fn each_file_adds_to_the_bound() {
        let cached = KnownLimit::default();
        let device = rustix::fs::makedev(0, 999_999);
        let none = cached.dirty_limit(device, 0);
        assert!(none > UNDER_WAY);
        assert_eq!(cached.dirty_limit(device, 10), none + 10 * PER_FILE);
        assert_eq!(cached.dirty_limit(device, usize::MAX), u64::MAX);
    }
}
