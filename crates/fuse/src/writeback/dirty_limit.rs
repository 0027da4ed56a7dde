//! Limit of the kernel's dirty pages of one mount.
//!
//! FUSE mounts have a strict limit, a share of the system's dirty limit (1 % unless changed); `/sys/class/bdi` shows
//! it. Tasks are checked against it only after they have dirtied some pages, so that each task adds something to it.
//! Read at each charge of the layer's books, so the values are cached for a moment.

use parking_lot::Mutex;
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// How long a value is cached.
const FRESH: Duration = Duration::from_secs(1);
/// Bytes that single writes in progress during a recall may still add, in total.
const UNDER_WAY: u64 = 64 * MIB;
/// Bytes per file: dirtied by its writer between two checks, and in flight to us.
const PER_FILE: u64 = MIB;
/// Maximum number of files that count where it is not known which of them are open for writing: most of them are
/// closed. The pages that all writers dirty between two checks are bounded per processor
/// (`balance_dirty_pages_ratelimited_flags()`, Linux mm/page-writeback.c) and counted anyway.
pub(crate) const UNOPENED_MOST: usize = 256;
/// Limit that is set, bytes: the kernel's own share grows with memory.
pub(crate) const WANTED: u64 = 32 * MIB;
/// Maximum limit that is set where the layer has space for it, bytes: small scattered writes are merged into few
/// large ones while they are dirty together.
const WANTED_MOST: u64 = 1024 * MIB;
/// Divisors: this part of the layer's free space, and of the system's dirty limit, may be dirty.
const PART_OF_ROOM: u64 = 16;
const PART_OF_DIRTY: u64 = 4;
/// The default share of the system's dirty limit that a mount has, per cent.
const SHARE: u64 = 1;
/// Value where `/proc/vmstat` cannot be read: more than any limit.
const UNKNOWN: u64 = u64::MAX / 4;

/// The limit and the time when it was read.
#[derive(Default)]
pub(crate) struct KnownLimit(Mutex<Option<(Instant, u64)>>);

impl KnownLimit {
    /// Maximum dirty bytes while `files` files are open for cached writes.
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

/// Returns the limit wanted where a layer has this much free space, bytes.
pub(crate) fn wanted(room: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    let dirty =
        fs::read_to_string("/proc/vmstat").ok().and_then(|text| threshold(&text)).unwrap_or(0).saturating_mul(page);
    wanted_of(room, dirty)
}

fn wanted_of(room: u64, dirty: u64) -> u64 {
    (room / PART_OF_ROOM).min(dirty / PART_OF_DIRTY).clamp(WANTED, WANTED_MOST)
}

/// Makes sure that there is a strict limit, and sets it to the wanted one, bytes.
///
/// # Errors
/// Why there is no strict limit.
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
    // By default it is a share of memory, which may be less than wanted.
    if wanted > WANTED || number(&most).is_none_or(|bytes| bytes > wanted) {
        let set = fs::write(&most, wanted.to_string());
        set.unwrap_or_else(|error| tracing::debug!(%error, path = %most.display(), "the limit stays as it is"));
    }
    Ok(())
}

/// Returns the bytes that may be dirty before every writer waits.
fn most_dirty(device: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    let Some(pages) = fs::read_to_string("/proc/vmstat").ok().and_then(|text| threshold(&text)) else { return UNKNOWN };
    let all = pages.saturating_mul(page);
    let mount = number(&path(device, "max_bytes")).unwrap_or(all / 100 * SHARE).max(page);
    // A task may dirty this much before it is checked (the kernel's `ratelimit_pages`).
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
