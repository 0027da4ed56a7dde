//! The same commands on the real zfs-fuse and on nacre, called as `zfs`: both refuse the same
//! commands, and after each step all objects use the same space, except for the overhead of the
//! format. Skipped where zfs-fuse is not installed.
//!
//! The steps are in `zfs_compare/steps.txt`, calls whose exit codes are compared in `codes.txt`;
//! `zfs_compare/side.sh SIDE STEPS DIRECTORY` runs one side alone.

use crate::mounting::{as_root, finish, nacre, needs, scratch, skip, text};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Allowed difference between formats, in bytes and as a share of the larger figure: indirect
/// blocks, leaves, tables, the content of a pool's root.
const BYTES: u64 = 1 << 20;
const SHARE: f64 = 0.02;

/// One step of one side.
#[derive(Debug, Default)]
struct Step {
    line: String,
    done: bool,
    code: i32,
    said: String,
    /// By name and property.
    figures: BTreeMap<(String, String), u64>,
}

fn steps_of(output: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in output.lines() {
        if let Some(line) = line.strip_prefix("## ") {
            steps.push(Step { line: line.to_owned(), done: true, ..Step::default() });
            continue;
        }
        let Some(step) = steps.last_mut() else { continue };
        if let Some(code) = line.strip_prefix("rc=") {
            step.done = code == "0";
            step.code = code.parse().unwrap();
        } else if let Some(said) = line.strip_prefix("said=") {
            step.said.push_str(said);
            step.said.push('\n');
        } else if let [name, property, value] = line.split('\t').collect::<Vec<_>>()[..]
            && let Ok(value) = value.parse()
        {
            step.figures.insert((name.to_owned(), property.to_owned()), value);
        }
    }
    steps
}

fn side(name: &str, programs: &Path, directory: &Path, steps: &str) -> Vec<Step> {
    let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/suite/zfs_compare");
    fs::create_dir(directory).unwrap();
    let mut command = match name {
        "nacre" => Command::new("bash"),
        _ => {
            let mut command = Command::new("unshare");
            command.args(["-m", "bash"]);
            command
        }
    };
    let search = format!("{}:{}:/sbin:/usr/sbin", programs.display(), std::env::var("PATH").unwrap());
    command.arg(place.join("side.sh")).arg(name).arg(place.join(steps)).arg(directory);
    command.env("PATH", search).env("NACRE_STATE_DIR", directory.join("state")).env("LC_ALL", "C");
    let output = finish(&mut command);
    assert!(output.status.success(), "{name}: {:?}\n{}\n{}", output.status, text(&output.stdout), text(&output.stderr));
    steps_of(&text(&output.stdout))
}

fn close(a: u64, b: u64) -> bool {
    a.abs_diff(b) <= BYTES.max((a.max(b) as f64 * SHARE) as u64)
}

/// Returns the differences in the figures after a step.
fn differences(theirs: &Step, ours: &Step) -> Vec<String> {
    let mut wrong = Vec::new();
    let root = |step: &Step| step.figures.get(&("zc".to_owned(), "available".to_owned())).copied().unwrap_or_default();
    for (key, theirs_value) in &theirs.figures {
        let (name, property) = key;
        let Some(our_value) = ours.figures.get(key) else {
            wrong.push(format!("{name} {property}: theirs {theirs_value}, ours missing"));
            continue;
        };
        let (a, b) = (*theirs_value, *our_value);
        // Pools keep back different shares of themselves: where no quota bounds, what counts is the
        // difference to the pool's.
        let beside = property == "available" && close(a.abs_diff(root(theirs)), b.abs_diff(root(ours)));
        if !close(a, b) && !beside {
            wrong.push(format!("{name} {property}: theirs {a}, ours {b}"));
        }
    }
    let missing = ours
        .figures
        .keys()
        .filter(|key| !theirs.figures.contains_key(*key))
        .map(|(name, property)| format!("{name} {property}: only ours"));
    wrong.extend(missing);
    wrong
}

/// Both tests have a pool of the same name.
static ALONE: Mutex<()> = Mutex::new(());

fn can_compare() -> bool {
    as_root() && (Path::new("/sbin/zfs-fuse").exists() || skip("zfs-fuse", "zfs-fuse is not installed"))
}

#[test]
fn exit_codes_are_those_of_zfs() {
    needs!(can_compare());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (theirs, ours) = both("codes.txt");
    let wrong: Vec<String> = theirs
        .iter()
        .zip(&ours)
        .filter(|(theirs, ours)| theirs.code != ours.code)
        .map(|(theirs, ours)| {
            format!("{}: theirs {} {}ours {} {}", theirs.line, theirs.code, theirs.said, ours.code, ours.said)
        })
        .collect();
    assert!(theirs.iter().filter(|step| step.code == 2).count() > 50, "the other side takes too much: does it run?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn figures_and_refusals_are_those_of_zfs() {
    needs!(can_compare());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Now and then zfs-fuse is late with a figure, or calls something busy that is not: what
    // differs differs twice.
    let differing = compared();
    if differing.is_empty() {
        return;
    }
    println!("again, because of:\n{}", differing.join("\n"));
    let differing = compared();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

/// Normalizes sentences for the comparison: without the name of the program, and of the pool, in
/// advice; without lines about sectors and scrubs; devices in use in the words of current ZFS; and
/// with uniform white space.
fn words(said: &str) -> Vec<String> {
    let told = |line: &&str| !["scan:", "scrub:", "Defaulting to"].iter().any(|word| line.trim().starts_with(word));
    let text = said.lines().filter(told).collect::<Vec<_>>().join(" ").replace("nacre pool", "zpool");
    let repaired = "the following errors must be manually repaired:";
    let text = text.replace(" zg'.", "'.").replace("online zg'", "online'");
    let text = text.replace(repaired, "use '-f' to override the following errors:");
    text.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn groups_are_told_as_zfs_does() {
    needs!(can_compare());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (theirs, ours) = both("groups.txt");
    let differs = |(theirs, ours): (&Step, &Step)| {
        // A device that is not there is -1 to it.
        let theirs_code = if theirs.code == 255 { 1 } else { theirs.code };
        (theirs_code != ours.code || words(&theirs.said) != words(&ours.said)).then(|| {
            format!("{}: theirs {}\n{}ours {}\n{}", theirs.line, theirs.code, theirs.said, ours.code, ours.said)
        })
    };
    let wrong: Vec<String> = theirs.iter().zip(&ours).filter_map(differs).collect();
    assert!(theirs.iter().filter(|step| !step.done).count() > 10, "the other side takes too much: does it run?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The steps of both sides.
fn both(steps: &str) -> (Vec<Step>, Vec<Step>) {
    let place = scratch();
    let names = place.path().join("programs");
    fs::create_dir(&names).unwrap();
    for name in ["nacre", "zfs", "zpool"] {
        std::os::unix::fs::symlink(nacre(), names.join(name)).unwrap();
    }
    let nothing = place.path().join("none");
    fs::create_dir(&nothing).unwrap();
    // Side by side: the one waits for its figures most of the time.
    let (theirs, ours) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| side("zfs-fuse", &nothing, &place.path().join("theirs"), steps));
        let ours = side("nacre", &names, &place.path().join("ours"), steps);
        (theirs.join().unwrap(), ours)
    });
    crate::mounting::clear(place.path());
    assert_eq!(theirs.len(), ours.len());
    assert!(theirs.iter().zip(&ours).all(|(theirs, ours)| theirs.line == ours.line));
    (theirs, ours)
}

/// Returns the differences between the two sides.
fn compared() -> Vec<String> {
    let (theirs, ours) = both("steps.txt");
    assert!(theirs.iter().filter(|step| !step.done).count() > 20, "the other side refuses too little: does it run?");
    let mut wrong = Vec::new();
    for (theirs, ours) in theirs.iter().zip(&ours) {
        if theirs.done != ours.done {
            let does =
                |step: &Step| if step.done { "done".to_owned() } else { format!("refused: {}", step.said.trim()) };
            wrong.push(format!("{}\n  theirs {}\n  ours   {}", theirs.line, does(theirs), does(ours)));
        }
        wrong
            .extend(differences(theirs, ours).into_iter().map(|difference| format!("{}\n  {difference}", theirs.line)));
    }
    wrong
}
