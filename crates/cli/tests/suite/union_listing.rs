//! Listings of large directories over two branches, on real mounts: large enough for names to be
//! read ahead by a thread.

use crate::mounting::unions::{branches, told};
use crate::mounting::{Fixture, as_root, needs};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const LOWER: u32 = 12_000;
const BOTH: u32 = 2_000;
const UPPER: u32 = 5_000;
const REMOVED: u32 = 500;

fn create(directory: &Path, names: impl IntoIterator<Item = String>) {
    names.into_iter().for_each(|name| drop(File::create(directory.join(name)).unwrap()));
}

/// `large` on both branches: names 0 to 12,000 on the lower one, of which the first 500 have
/// whiteouts; 10,000 to 15,000 on the upper one.
fn large(options: &[&str]) -> (Fixture, BTreeSet<String>) {
    let mut fixture = Fixture::bare();
    let upper = fixture.directory("upper");
    for branch in [&fixture.source, &upper] {
        fs::create_dir(branch.join("large")).unwrap();
    }
    create(&fixture.below("large"), (0..LOWER).map(|number| format!("{number:05}")));
    create(&upper.join("large"), (0..REMOVED).map(|number| format!(".wh.{number:05}")));
    create(&upper.join("large"), (LOWER - BOTH..LOWER - BOTH + UPPER).map(|number| format!("{number:05}")));
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    fixture.start(&[&["union"], options].concat(), &list, &mountpoint);
    (fixture, (REMOVED..LOWER - BOTH + UPPER).map(|number| format!("{number:05}")).collect())
}

/// Every name, none of them twice.
fn once(directory: &Path) -> BTreeSet<String> {
    let names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let unique: BTreeSet<String> = names.iter().cloned().collect();
    assert_eq!(unique.len(), names.len(), "a name comes twice");
    unique
}

#[test]
fn every_name_comes_once() {
    needs!(as_root());
    for options in [&[][..], &["-o", "udba=none"], &["-o", "udba=reval"]] {
        let (fixture, expected) = large(options);
        for round in 0..2 {
            assert!(once(&fixture.at("large")) == expected, "{options:?}, round {round}");
        }
        // With attributes: each is the file that a look-up finds.
        for entry in fs::read_dir(fixture.at("large")).unwrap().map(Result::unwrap) {
            assert_eq!(
                entry.metadata().unwrap().ino(),
                std::os::unix::fs::DirEntryExt::ino(&entry),
                "{:?}",
                entry.file_name()
            );
        }
    }
}

#[test]
fn changes_in_the_middle_of_a_listing() {
    needs!(as_root());
    for options in [&[][..], &["-o", "udba=none"]] {
        let (fixture, mut expected) = large(options);
        let directory = fixture.at("large");
        let mut listing = fs::read_dir(&directory).unwrap();
        let mut seen: Vec<String> =
            listing.by_ref().take(3000).map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        // Some that were seen and some that were not, of either branch.
        let removed: Vec<String> = expected.iter().step_by(7).cloned().collect();
        for name in &removed {
            fs::remove_file(directory.join(name)).unwrap();
            expected.remove(name);
        }
        create(&directory, ["new".to_owned()]);
        seen.extend(listing.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        let unique: BTreeSet<&String> = seen.iter().collect();
        assert_eq!(unique.len(), seen.len(), "{options:?}: a name comes twice");
        assert!(
            expected.iter().all(|name| unique.contains(name)),
            "{options:?}: a name that was there all the time is missing"
        );
        expected.insert("new".to_owned());
        assert!(once(&directory) == expected, "{options:?}: whoever begins now sees the present state");
    }
}

#[test]
fn removed_while_it_is_listed() {
    needs!(as_root());
    let (fixture, _) = large(&[]);
    fs::remove_dir_all(fixture.at("large")).unwrap();
    assert!(!fixture.at("large").exists());
    fs::create_dir(fixture.at("large")).unwrap();
    assert!(once(&fixture.at("large")).is_empty());
    assert_eq!(fs::read_dir(fixture.below("large")).unwrap().count(), LOWER as usize, "the lower branch is as it was");
}

#[test]
fn a_branch_is_removed_while_it_is_listed() {
    needs!(as_root());
    let (fixture, expected) = large(&[]);
    // More than one reply of its own, and names of the other branches.
    let extra = fixture.directory("extra");
    fs::create_dir(extra.join("large")).unwrap();
    let own: BTreeSet<String> = (0..5000).map(|number| format!("own{number}")).collect();
    create(
        &extra.join("large"),
        own.iter().cloned().chain((LOWER - 4000..LOWER + 1000).map(|number| format!("{number:05}"))),
    );
    let (mountpoint, path) = (fixture.mountpoint.to_str().unwrap(), extra.to_str().unwrap());
    told(["add", "--top", mountpoint, path]);
    let mut listing = fs::read_dir(fixture.at("large")).unwrap();
    let mut seen: Vec<String> =
        listing.by_ref().take(3000).map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    told(["del", "--force", mountpoint, path]);
    seen.extend(listing.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
    let unique: BTreeSet<String> = seen.iter().cloned().collect();
    assert!(expected.is_subset(&unique), "a name that was there all the time is missing");
    assert_eq!(unique.len(), seen.len(), "a name comes twice");
    assert!(unique.difference(&expected).all(|name| own.contains(name)));
    assert!(own.difference(&unique).count() > 1000, "the rest went with the branch");
    assert!(once(&fixture.at("large")) == expected);
}
