//! Unions for tests: an upper branch over the fixture's source, and the output of commands about
//! them.

use super::{Fixture, finish, nacre, text};
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns a list of branches in the order given, each with its attributes.
pub fn branches(of: &[(&Path, &str)]) -> OsString {
    let mut list = OsString::new();
    for (path, mode) in of {
        if !list.is_empty() {
            list.push(":");
        }
        list.push(path);
        list.push("=");
        list.push(mode);
    }
    list
}

/// Mounts a union of a writable branch over the source, which is filled first; returns the fixture
/// and the upper branch.
pub fn over(options: &[&str], fill: impl FnOnce(&Path)) -> (Fixture, PathBuf) {
    let mut fixture = Fixture::bare();
    fill(&fixture.source);
    let upper = fixture.directory("upper");
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    fixture.start(&[&["union"], options].concat(), &list, &mountpoint);
    (fixture, upper)
}

/// Runs `nacre union ...`.
pub fn union<S: AsRef<std::ffi::OsStr>>(words: impl IntoIterator<Item = S>) -> Output {
    finish(Command::new(nacre()).arg("union").args(words).env("LC_ALL", "C"))
}

/// Runs `nacre union ...`, which has to succeed; returns its output.
pub fn told<S: AsRef<std::ffi::OsStr>>(words: impl IntoIterator<Item = S>) -> String {
    let output = union(words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Returns the branches of a mount, with their attributes.
pub fn list(mountpoint: &Path) -> Vec<(PathBuf, String)> {
    let output = union([std::ffi::OsStr::new("list"), "--json".as_ref(), mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let branch = |branch: &Value| {
        (PathBuf::from(branch["branch"].as_str().unwrap()), branch["mode"].as_str().unwrap().to_owned())
    };
    value.as_array().expect("a list").iter().map(branch).collect()
}

/// Returns the names in a branch from its root down, without the union's own directories.
pub fn names(branch: &Path) -> Vec<String> {
    let (mut found, mut ahead) = (Vec::new(), vec![branch.to_owned()]);
    while let Some(place) = ahead.pop() {
        for entry in std::fs::read_dir(&place).unwrap().flatten() {
            let name = entry.path().strip_prefix(branch).unwrap().to_string_lossy().into_owned();
            if name.starts_with(".wh..wh.") {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                ahead.push(entry.path());
            }
            found.push(name);
        }
    }
    found.sort();
    found
}
