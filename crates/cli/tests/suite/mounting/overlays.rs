//! Overlays for tests: layers, an upper directory and its work directory, mounted as container
//! engines do.

use super::{Fixture, sh};
use std::path::{Path, PathBuf};

/// An overlay and its directories.
pub struct Overlay {
    pub fixture: Fixture,
    /// The layers, the uppermost first.
    pub lower: [PathBuf; 2],
    pub upper: PathBuf,
    pub work: PathBuf,
}

impl Overlay {
    /// Creates and fills the directories without mounting.
    pub fn bare(fill: &str) -> Overlay {
        let fixture = Fixture::bare();
        let lower = [fixture.directory("l1"), fixture.directory("l2")];
        let (upper, work) = (fixture.directory("upper"), fixture.directory("work"));
        sh(fixture.scratch.path(), fill);
        Overlay { fixture, lower, upper, work }
    }

    /// Creates, fills and mounts an overlay with further options.
    pub fn mounted(fill: &str, words: &str) -> Overlay {
        let mut overlay = Overlay::bare(fill);
        overlay.mount(words);
        overlay
    }

    /// Returns the options that name the directories.
    pub fn words(&self) -> String {
        let [first, second] = &self.lower;
        format!(
            "lowerdir={}:{},upperdir={},workdir={}",
            first.display(),
            second.display(),
            self.upper.display(),
            self.work.display()
        )
    }

    /// Mounts the overlay, possibly again.
    pub fn mount(&mut self, words: &str) {
        let words = format!("{},{words}", self.words());
        let mountpoint = self.fixture.mountpoint.clone();
        self.fixture.start(&["fuse-overlayfs", "-o", &words], "overlay".as_ref(), &mountpoint);
    }

    /// Runs a script in the merged tree.
    pub fn sh(&self, script: &str) -> String {
        sh(&self.fixture.mountpoint, script)
    }
}

/// Lists everything in a tree without times, one line each: type, mode, owner, size of files,
/// targets of links, and `user.` attributes.
pub fn listing(directory: &Path) -> Vec<String> {
    let script = r"find . \( -type d -printf '%p %y %m %U:%G\n' \) -o -printf '%p %y %m %U:%G %n %s %l\n'
        find . \( -type f -o -type d \) -exec getfattr -h -d -m '^user' --absolute-names -- {} +";
    let mut lines: Vec<String> = sh(directory, script).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}
