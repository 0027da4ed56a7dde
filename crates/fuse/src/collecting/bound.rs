//! How much the kernel can hold back: the limit of dirty pages of one mount.
//!
//! FUSE mounts have a strict limit, a share of what the whole system may have dirty (1 % unless changed); `/sys/class/bdi` shows it. Tasks
//! are checked against it only after they have dirtied some pages, so that each adds something to it. Asked at each charge of the layer's
//! books, so the figures are kept for a moment.

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
/// The limit that is set, bytes: the kernel's own share grows with memory.
const WANTED: u64 = 32 * MIB;
/// The share of the dirty limit that a mount has at first, per cent.
const SHARE: u64 = 1;
/// Where `/proc/vmstat` cannot be read: more than any limit.
const UNKNOWN: u64 = u64::MAX / 4;

/// The limit with the time when it was read.
#[derive(Default)]
pub(crate) struct Cached(Mutex<Option<(Instant, u64)>>);

impl Cached {
    /// The most that is held back while `files` files are open for collected writes.
    pub fn most_held(&self, device: u64, files: usize) -> u64 {
        let now = Instant::now();
        let mut cached = self.0.lock();
        let dirty = match *cached {
            Some((read, dirty)) if now.duration_since(read) < FRESH => dirty,
            _ => {
                let dirty = dirty_limit(device);
                *cached = Some((now, dirty));
                dirty
            }
        };
        dirty.saturating_add(PER_FILE.saturating_mul(files as u64)).saturating_add(UNDER_WAY)
    }
}

/// Makes sure that there is a strict limit, and lowers it to what is wanted.
///
/// # Errors
/// Why there is none.
pub(crate) fn limit(device: u64) -> Result<(), String> {
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
    if number(&most).is_none_or(|bytes| bytes > WANTED)
        && let Err(error) = fs::write(&most, WANTED.to_string())
    {
        tracing::debug!(%error, path = %most.display(), "the limit stays as it is");
    }
    Ok(())
}

/// Bytes that may be dirty before every writer waits.
fn dirty_limit(device: u64) -> u64 {
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
    fn each_file_adds_to_the_bound() {
        let cached = Cached::default();
        let device = rustix::fs::makedev(0, 999_999);
        let none = cached.most_held(device, 0);
        assert!(none > UNDER_WAY);
        assert_eq!(cached.most_held(device, 10), none + 10 * PER_FILE);
        assert_eq!(cached.most_held(device, usize::MAX), u64::MAX);
    }
}
