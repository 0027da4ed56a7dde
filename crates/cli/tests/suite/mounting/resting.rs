//! Mounts that nobody asks, on a file system where much happens elsewhere.
//!
//! Callers: `union_rest.rs`, `cage_rest.rs`. Each mount's files are on a file system of
//! its own: what other tests do would be heard as well, and where more happens than a slow machine
//! can hear, changes are lost, which ends every rest.

use super::{Fixture, eventually};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How many whole file systems a process hears of.
pub fn marked_file_systems(pid: u32) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("the daemon lives");
    let texts = descriptors.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.map(|text| text.lines().filter(|line| line.starts_with("fanotify sdev:")).count()).sum()
}

/// Runs the cases of a test, two at a time: most of the time each waits for its mount to rest. More
/// would slow down what they wait for, as the longer a cage counts, the longer it does not rest.
pub fn side_by_side<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(case);
                }
            });
        }
    });
}

/// Makes and removes files.
pub fn busy(directory: &Path, files: usize) {
    for number in 0..files {
        let path = directory.join(format!("busy{}", number % 100));
        fs::write(&path, "x").expect("write");
        fs::remove_file(&path).expect("remove");
    }
}

/// Is busy beside the source until the mount's process hears of it no more.
pub fn rested(fixture: &Fixture) {
    let elsewhere = fixture.source.with_file_name("elsewhere");
    if !elsewhere.exists() {
        fixture.directory("elsewhere");
    }
    eventually("nothing of the file system is heard", || {
        busy(&elsewhere, 200);
        // Not all of the time: with many tests that wait so, nobody would come to hear it.
        std::thread::sleep(Duration::from_millis(20));
        marked_file_systems(fixture.pid()) == 0
    });
}
