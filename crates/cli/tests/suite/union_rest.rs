//! Idle unions on a file system with much activity elsewhere: they are notified of their own files
//! only, and never show anything stale.

use crate::mounting::resting::{busy, marked_file_systems, rested, side_by_side};
use crate::mounting::status::Status;
use crate::mounting::unions::branches;
use crate::mounting::{Fixture, as_root, eventually, needs, sh};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The branches of a fixture, from the top.
fn places(fixture: &Fixture) -> [PathBuf; 3] {
    ["upper", "second", "lower"].map(|name| fixture.source.with_file_name(name))
}

fn listed(places: &[PathBuf; 3], modes: [&str; 3]) -> OsString {
    branches(&places.iter().map(PathBuf::as_path).zip(modes).collect::<Vec<_>>())
}

/// Mounts two writable branches over a read-only one, filled by a script that runs in
/// their parent directory.
fn three(filled: &str) -> Fixture {
    three_with("udba=notify", filled)
}

fn three_with(options: &str, filled: &str) -> Fixture {
    let mut fixture = Fixture::bare_alone();
    let places = places(&fixture);
    for place in ["upper", "second", "lower"] {
        fixture.directory(place);
    }
    sh(fixture.source.parent().unwrap(), filled);
    let (list, mountpoint) = (listed(&places, ["rw", "rw", "ro+wh"]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", options], &list, &mountpoint);
    fixture
}

/// Everything that a tree shows, by path.
fn shown(top: &Path) -> BTreeMap<PathBuf, String> {
    let (mut all, mut ahead) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(directory) = ahead.pop() {
        // What has gone since its name was read is seen by the next one who looks.
        let Ok(names) = fs::read_dir(&directory) else { continue };
        for path in names.flatten().map(|entry| entry.path()) {
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            let content =
                if metadata.is_file() { fs::read_to_string(&path).unwrap_or_default() } else { String::new() };
            let size = if metadata.is_file() { metadata.len() } else { 0 };
            let name = path.strip_prefix(top).unwrap().to_owned();
            all.insert(name, format!("{:o} {size} {:?} {content}", metadata.mode(), metadata.mtime()));
            if metadata.is_dir() {
                ahead.push(path);
            }
        }
    }
    all
}

/// Also names that are not there.
fn warm(fixture: &Fixture) -> BTreeMap<PathBuf, String> {
    let all = shown(&fixture.mountpoint);
    let directories = all.keys().filter(|path| fixture.mountpoint.join(path).is_dir()).cloned().chain([PathBuf::new()]);
    for directory in directories {
        for name in NAMES {
            let _ = fs::symlink_metadata(fixture.mountpoint.join(&directory).join(name));
        }
    }
    all
}

/// Waits until everything that has happened on a branch so far is known, without asking for any
/// name: `mark` lies at the branch's top.
fn heard(fixture: &Fixture, branch: &Path, mark: &str) {
    // What comes in one batch with the first of them is delivered when the second one is.
    for mode in [0o640, 0o600] {
        fs::set_permissions(branch.join(mark), PermissionsExt::from_mode(mode)).unwrap();
        eventually("the mode is seen", || fs::metadata(fixture.at(mark)).unwrap().mode() & 0o777 == mode);
    }
}

const NAMES: [&str; 6] = ["a", "b", "c", "x", "y", "z"];

#[test]
fn a_union_that_nobody_asks_hears_only_of_its_own_files() {
    needs!(as_root());
    // Also where each name of a file is a file to the kernel.
    side_by_side(&["udba=notify", "udba=notify,link-cow=true"], |options| {
        let fixture =
            three_with(options, "mkdir lower/a upper/a; echo 1 > lower/a/x; echo 1 > upper/y; echo 1 > second/z");
        let told = || Status::of(&fixture.mountpoint).number("invalidations");
        eventually("a rest that nothing of ours ends", || {
            warm(&fixture);
            rested(&fixture);
            let before = told();
            busy(&fixture.source.with_file_name("elsewhere"), 10_000);
            heard(&fixture, &fixture.source.with_file_name("upper"), "y");
            let after = told();
            assert!(after - before < 100, "{before} changes told, then {after}");
            marked_file_systems(fixture.pid()) == 0
        });
        assert!(fs::metadata(fixture.at("a/unknown")).is_err());
        assert!(marked_file_systems(fixture.pid()) > 0);
    });
}

/// Changes by others on branches; a directory that a process is in meanwhile; and the names that
/// must, and must not, exist at the first lookup.
type Remade = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const REMADE: &[Remade] = &[
    ("mkdir -p upper/a/b; echo 2 > upper/a/b/x", "a/b", &["a/b/x", "a/b/c/y", "a/b/z"], &["a/b/y"]),
    ("mkdir -p second/a/b/c; echo 2 > second/a/b/c/x", "a/b/c", &["a/b/c/x", "a/b/c/y", "a/b/z"], &["a/b/x"]),
    ("mkdir -p made/b; echo 2 > made/b/x; mv made upper/a", "a/b", &["a/b/x", "a/b/c/y", "a/b/z"], &["a/x"]),
    (
        "mkdir -p made/b/c; touch made/b/.wh.z made/b/c/.wh.y; mv made second/a",
        "a/b/c",
        &["a/b/c"],
        &["a/b/z", "a/b/c/y"],
    ),
    ("mkdir -p made/b; touch made/b/.wh.c; mv made second/a", "a/b", &["a/b/z"], &["a/b/c", "a/b/c/y"]),
    ("touch upper/.wh.a", "a/b", &[], &["a", "a/b", "a/b/z"]),
    ("mv lower/a lower/x", "a/b", &["x/b/z", "x/b/c/y"], &["a", "a/b"]),
    ("rm -r lower/a/b/c", "a/b/c", &["a/b/z"], &["a/b/c", "a/b/c/y"]),
];

#[test]
fn a_directory_that_is_made_of_others_while_nobody_asks_is_shown_so_at_once() {
    needs!(as_root());
    side_by_side(REMADE, |&(script, inside, there, gone)| {
        let fixture = three(
            "mkdir -p lower/a/b/c; echo 1 > lower/a/b/z; echo 1 > lower/a/b/c/y; echo 1 > upper/mark; echo 1 > second/mark2; echo 1 > lower/mark3",
        );
        let before = warm(&fixture);
        assert!(before.contains_key(Path::new("a/b/c/y")));
        // The kernel cannot forget directories that are in use.
        let held = File::open(fixture.at(inside)).unwrap();
        rested(&fixture);
        sh(fixture.source.parent().unwrap(), script);
        for (branch, mark) in places(&fixture).iter().zip(["mark", "mark2", "mark3"]) {
            heard(&fixture, branch, mark);
        }
        let first = shown(&fixture.mountpoint);
        for path in there {
            assert!(first.contains_key(Path::new(path)), "{script}: no {path} in {first:?}");
            assert!(fs::metadata(fixture.at(path)).is_ok(), "{script}: no {path}");
        }
        for path in gone {
            assert!(!first.contains_key(Path::new(path)), "{script}: still {path} in {first:?}");
            assert!(fs::metadata(fixture.at(path)).is_err(), "{script}: still {path}");
        }
        drop(held);
    });
}

/// Numbers that look random, the same again for the same beginning.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % limit as u64).unwrap()
    }

    fn of<'a>(&mut self, names: &[&'a str]) -> &'a str {
        names[self.below(names.len())]
    }

    /// A path of directories, below which a file may be.
    fn directory(&mut self) -> String {
        let depth = self.below(4);
        (0..depth).map(|_| format!("{}/", self.of(&NAMES[..3]))).collect()
    }

    /// Makes a random change on a branch as another process would.
    fn change(&mut self, round: usize) -> String {
        let branch = self.of(&["upper", "second", "lower"]);
        let (directory, file) = (self.directory(), self.of(&NAMES[3..]));
        let (subdirectory, other) = (self.of(&NAMES[..3]), self.directory());
        let at = format!("{branch}/{directory}");
        match self.below(12) {
            0..2 => format!("mkdir -p {at} && echo {round} {} > {at}{file}", self.0),
            2 => format!("mkdir -p {at}{subdirectory}"),
            3 => format!("rm -f {at}{file}"),
            4 => format!("rm -rf {at}{subdirectory}"),
            5 => format!("test ! -e {at} || touch {at}.wh.{}", self.of(&NAMES)),
            6 => format!("rm -f {at}.wh.[a-z]"),
            7 => format!(
                "test ! -e {at}{subdirectory} || mv -T {at}{subdirectory} {branch}/{other}{} || true",
                self.of(&NAMES[..3])
            ),
            8 => format!("test ! -e {at}{file} || mv -T {at}{file} {branch}/{other}{file} || true"),
            9 => format!("test ! -e {at}{file} || chmod {} {at}{file}", self.of(&["600", "640", "644", "755"])),
            10 => format!(
                "rm -rf made && mkdir -p made/{subdirectory}/c && echo {round} > made/{file} && echo {round} > made/{subdirectory}/{file} && touch made/.wh.y && \
                 mkdir -p {at} && mv -T made {at}{} || true",
                self.of(&NAMES[..3])
            ),
            _ => format!("test ! -e {at}{file} || echo {round} >> {at}{file}"),
        }
    }
}

/// Mounts the same branches in a new process, and returns the visible tree.
fn fresh(fixture: &Fixture, round: usize) -> BTreeMap<PathBuf, String> {
    let mut other = Fixture::bare();
    let mountpoint = other.mountpoint.clone();
    other.start(&["union", "-o", "udba=reval"], &listed(&places(fixture), ["ro+wh"; 3]), &mountpoint);
    let all = shown(&mountpoint);
    println!("round {round}: {} names", all.len());
    all
}

#[test]
fn whatever_happens_while_nobody_asks_a_union_shows_what_a_fresh_one_does() {
    needs!(as_root());
    let rounds = std::env::var("NACRE_REST_ROUNDS").map_or(10, |rounds| rounds.parse().unwrap());
    // The same changes each time; others for those who look for more.
    let seed = std::env::var("NACRE_REST_SEED").map_or(16196, |seed| seed.parse().unwrap());
    println!("campaign: seed {seed}, {rounds} rounds (NACRE_REST_SEED, NACRE_REST_ROUNDS)");
    let mut dice = Dice(seed);
    let fixture = three(
        "mkdir -p lower/a/b/c lower/b upper/a; echo 1 > lower/a/b/z; echo 1 > lower/b/x; echo 1 > upper/a/x; echo 1 > second/y",
    );
    for round in 0..rounds {
        let before = warm(&fixture);
        let directories: Vec<&PathBuf> = before.keys().filter(|path| fixture.mountpoint.join(path).is_dir()).collect();
        let held = directories
            .get(dice.below(directories.len() + 1))
            .and_then(|path| File::open(fixture.mountpoint.join(path)).ok());
        rested(&fixture);
        let mut changes = Vec::new();
        for _ in 0..=dice.below(6) {
            let change = dice.change(round);
            sh(fixture.source.parent().unwrap(), &change);
            changes.push(change);
            // Somebody asks in between, now and then.
            if dice.below(8) == 0 {
                shown(&fixture.mountpoint);
            }
        }
        let wanted = fresh(&fixture, round);
        let mut last = BTreeMap::new();
        let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually("the same as a fresh union", || {
                last = shown(&fixture.mountpoint);
                last == wanted
            });
        }));
        let only = |one: &BTreeMap<PathBuf, String>, other: &BTreeMap<PathBuf, String>| {
            one.iter()
                .filter(|(path, what)| other.get(*path) != Some(what))
                .map(|(path, what)| format!("{path:?}: {what}"))
                .collect::<Vec<_>>()
        };
        assert!(
            seen.is_ok(),
            "seed {seed}, round {round}: {changes:#?}\nheld {held:?}\nwanted {:#?}\nshown {:#?}",
            only(&wanted, &last),
            only(&last, &wanted)
        );
    }
}
