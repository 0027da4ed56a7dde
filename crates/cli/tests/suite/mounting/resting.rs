//! Idle mounts on a file system with much activity elsewhere.
//!
//! Callers: `union_rest.rs`, `cage_rest.rs`. Each mount's files are on a file system of its own:
//! the fanotify mark would report the activity of other tests as well, and where events are more
//! frequent than a slow machine can read them, changes are lost, which ends every idle watch.

use super::{Fixture, eventually};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Returns the number of file systems that a process has marked with fanotify.
pub fn marked_file_systems(pid: u32) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("the daemon lives");
    let texts = descriptors.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.map(|text| text.lines().filter(|line| line.starts_with("fanotify sdev:")).count()).sum()
}

/// Runs the cases of a test, two at a time: most of the time each waits for its mount to become
/// idle. More would slow down what they wait for: the longer a cage counts, the longer it takes to
/// become idle.
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

/// Creates and removes files.
pub fn busy(directory: &Path, files: usize) {
    for number in 0..files {
        let path = directory.join(format!("busy{}", number % 100));
        fs::write(&path, "x").expect("write");
        fs::remove_file(&path).expect("remove");
    }
}

/// Is active outside of the source until the mount's process has removed its fanotify marks.
pub fn rested(fixture: &Fixture) {
    let elsewhere = fixture.source.with_file_name("elsewhere");
    if !elsewhere.exists() {
        fixture.directory("elsewhere");
    }
    eventually("nothing of the file system is heard", || {
        busy(&elsewhere, 200);
        // Not all of the time: many tests that wait at once would leave no processor to read the
        // events.
        std::thread::sleep(Duration::from_millis(20));
        marked_file_systems(fixture.pid()) == 0
    });
}
