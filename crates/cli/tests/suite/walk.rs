//! A walk through all verbs: refused, failed or killed, each leaves the state before it, or its
//! result, and nothing in between.
//!
//! The verbs are taken from the program's own help, so that a verb without a row fails. A row is
//! carried out as an ordinary user, while a process is in the mounted directories, and to its end.
//! All visible state is compared before and after: mounts, processes, pools with their file systems
//! and properties, files, runtime files next to sockets and persistent state.
//!
//! With `NACRE_WALK_ROUNDS` it is a campaign as well: this number of times for each row, kill -9 at
//! some moment of the command, and of the processes behind it, and once without space.
//! `NACRE_WALK_SEED` is another seed, `NACRE_WALK_VERB` selects verbs by their beginning. Known to
//! fail there: a `pool destroy` whose processes all die at one moment leaves the record of the
//! pool's location.

mod rows;
mod scene;
mod walking;

use crate::crashing::Random;
use crate::mounting::{as_root, nacre, needs, run, text};
use rows::Row;
use scene::Scene;
use std::collections::BTreeSet;
use walking::walk;

/// The commands that a help lists.
fn listed(help: &str) -> Vec<String> {
    let block = help.split("\nCommands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap_or_default();
    let lines = block.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    lines.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).filter(|verb| verb != "help").collect()
}

/// All verbs of the program: a command that has commands, and can be called without one (`cage`),
/// is a verb as well.
fn verbs() -> BTreeSet<String> {
    let help = |words: &[&str]| text(&run(nacre(), words.iter().copied().chain(["--help"])).stdout);
    let mut verbs = BTreeSet::new();
    for family in listed(&help(&[])) {
        let help = help(&[&family]);
        // What measures works in places of its own, which it says.
        let below = if family == "bench" { Vec::new() } else { listed(&help) };
        if below.is_empty() || !help.contains(&format!("Usage: nacre {family} <COMMAND>")) {
            verbs.insert(family.clone());
        }
        verbs.extend(below.into_iter().map(|verb| format!("{family} {verb}")));
    }
    verbs
}

#[test]
fn every_verb_is_walked() {
    let all = verbs();
    assert!(all.len() > 70 && all.contains("fs create") && all.contains("cage"), "{all:?}");
    let walked: BTreeSet<String> = rows::all().map(|row| row.verb.to_owned()).collect();
    let missing: Vec<_> = all.difference(&walked).collect();
    let unknown: Vec<_> = walked.difference(&all).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "without a walk: {missing:?}; no verbs: {unknown:?}");
}

/// Walks all rows, and reports the remainders of each at the end.
fn walk_all(rows: &[Row]) {
    needs!(as_root());
    let number = |name: &str| std::env::var(name).map_or(0, |value| value.parse::<u64>().expect(name));
    let wanted = std::env::var("NACRE_WALK_VERB").unwrap_or_default();
    let (rounds, mut random) = (number("NACRE_WALK_ROUNDS"), Random(1 + number("NACRE_WALK_SEED")));
    println!("campaign: {rounds} kills of each verb, seed {} (NACRE_WALK_ROUNDS, NACRE_WALK_SEED)", random.0);
    let mut wrong = Vec::new();
    for row in rows.iter().filter(|row| row.verb.starts_with(&wanted)) {
        let begun = std::time::Instant::now();
        wrong.extend(walk(row, rounds, &mut random));
        println!("{:>6} ms  {}", begun.elapsed().as_millis(), row.command);
    }
    assert!(wrong.is_empty(), "{} are wrong:\n\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn mounts() {
    walk_all(rows::MOUNTS);
}

#[test]
fn unions() {
    walk_all(rows::UNIONS);
}

#[test]
fn cages() {
    walk_all(rows::CAGES);
}

#[test]
fn workspaces() {
    walk_all(rows::WORKSPACES);
}

#[test]
fn pools() {
    walk_all(rows::POOLS);
}

#[test]
fn file_systems() {
    walk_all(rows::FILE_SYSTEMS);
}

#[test]
fn file_systems_from_snapshots() {
    walk_all(rows::SNAPSHOTS);
}

/// Verbs that only query change nothing, killed or not: all of them on one scene.
#[test]
fn questions() {
    needs!(as_root());
    let scene = Scene::new(
        "mkdir m u c && nacre mirror source m && nacre union upper:lower u && nacre cage --size 10M source/d c && nacre workspace create w --from source && nacre fs send $P/a@s >.programs/stream",
        true,
    );
    let before = scene.look();
    let mut random = Random(7);
    let mut wrong = Vec::new();
    for row in rows::QUESTIONS {
        let (code, said) = scene.run(row.command);
        if code != Some(0) {
            wrong.push(format!("{}: {code:?} {said}", row.command));
        }
        scene.run_as_user(row.command);
        scene.killed(row.command, random.below(20));
    }
    let after = scene.look();
    assert!(wrong.is_empty() && before == after, "{}\n{}", wrong.join("\n"), scene::difference(&before, &after));
}
