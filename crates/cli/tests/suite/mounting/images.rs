//! File systems on images, for tests that depend on the type of the underlying file system. As
//! root.

use super::{Fixture, run, skip, text};
use std::ffi::OsStr;
use std::path::Path;

/// Creates a file system of 600 MiB and mounts it at `place`, which exists; returns false (and
/// prints the reason) where the machine cannot.
pub fn mounted(kind: &str, image: &Path, place: &Path) -> bool {
    let file = std::fs::File::create(image).expect("image");
    file.set_len(600 << 20).expect("image");
    let force = if kind == "ext4" { "-F" } else { "-f" };
    let made = std::process::Command::new(format!("mkfs.{kind}")).args(["-q", force]).arg(image).output();
    match made {
        Err(error) => return skip("images", &format!("mkfs.{kind}: {error}")),
        Ok(output) => assert!(output.status.success(), "mkfs.{kind}: {}", text(&output.stderr)),
    }
    let output = run("mount", [OsStr::new("-o"), OsStr::new("loop"), image.as_os_str(), place.as_os_str()]);
    if !output.status.success() {
        return skip("images", &format!("{kind} on an image cannot be mounted: {}", text(&output.stderr).trim()));
    }
    true
}

/// Runs a test on a new file system of each kind that the machine can mount.
pub fn on_each(test: impl Fn(&str, &mut Fixture)) {
    for kind in ["ext4", "xfs", "btrfs"] {
        let outer = Fixture::bare();
        let (image, place) = (outer.scratch.path().join("image"), outer.directory("host"));
        if mounted(kind, &image, &place) {
            test(kind, &mut Fixture::bare_in(tempfile::tempdir_in(&place).expect("a directory")));
            assert!(run("umount", [&place]).status.success(), "{kind}");
        }
    }
}
