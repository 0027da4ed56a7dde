//! The walk of a row: its allowed remainders, whatever happens to it.

use super::{
    rows::Row,
    scene::{Look, Scene, difference},
};
use crate::crashing::Random;
use std::time::{Duration, Instant};

/// Maximum time for processes that continue without the command that started them.
const PATIENCE: Duration = Duration::from_secs(20);

/// States that may be there after a row.
struct Ends {
    before: Look,
    after: Look,
    /// The same with all mounts ended.
    after_bare: Look,
}

/// Returns whether `now` has nothing in addition to `end` but empty directories: mount points,
/// which are created before and removed after the mount, in another file system (ZFS leaves them as
/// well; the next mount uses them), and directories that a union creates on its branches before it
/// is mounted, and keeps there.
fn is_but_for_directories(now: &Look, end: &Look) -> bool {
    let is_place = |line: &String| line.contains(" 40755 0:0 0 ");
    let is_unions = |line: &String| {
        line.contains(" 40700 0:0 0 ")
            && ["/.wh..wh.", "work/work ", "work/links "].iter().any(|own| line.contains(own))
    };
    end.is_subset(now)
        && now.difference(end).all(|line| line.starts_with("file ") && (is_place(line) || is_unions(line)))
}

/// Returns the state without the accounting of cages: a cage reports that it cannot be saved, and
/// continues.
fn without_accounts(look: &Look) -> Look {
    look.iter().filter(|line| !line.contains("/state/cage/")).cloned().collect()
}

/// Waits until the visible state is one of these; returns the difference where it is not.
fn settle(scene: &Scene, ends: &[&Look]) -> Option<String> {
    settle_as(scene, ends, |now, end| now == end)
}

fn settle_as(scene: &Scene, ends: &[&Look], is: impl Fn(&Look, &Look) -> bool) -> Option<String> {
    let until = Instant::now() + PATIENCE;
    loop {
        let now = scene.look();
        if ends.iter().any(|end| is(&now, end)) {
            return None;
        }
        if Instant::now() > until {
            return Some(
                ends.iter()
                    .map(|end| format!("  from one of the ends (-) to what is there (+):\n{}", difference(end, &now)))
                    .collect(),
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Walks the row with this number of deaths; returns the violations.
pub fn walk(row: &Row, rounds: u64, random: &mut Random) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut fault = |what: &str, told: String| wrong.push(format!("{} {what}: {told}", row.command));
    let make = || Scene::new(row.prepare, row.pool);
    let mut scene = make();
    let before = scene.look();
    let (_, said) = scene.run_as_user(row.command);
    if let Some(told) = settle(&scene, &[&before]) {
        fault("as an ordinary user", format!("{said}\n{told}"));
        scene = make();
    }
    let sitting = scene.sit();
    let mut begun = Instant::now();
    let mut done = (!sitting.is_empty()).then(|| scene.run(row.command));
    let mut took = begun.elapsed();
    drop(sitting);
    let mut busy = None;
    if let Some((code, said)) = &done {
        if *code != Some(0) {
            if !row.again
                && let Some(told) = settle(&scene, &[&before])
            {
                fault("on a busy mount", format!("{code:?} {said}\n{told}"));
                scene = make();
            }
            done = None;
        } else if !row.pool {
            // What serves a mount goes after its last user.
            busy = Some((std::mem::replace(&mut scene, make()), done.take()));
        }
    }
    let (code, said) = done.unwrap_or_else(|| {
        begun = Instant::now();
        let done = scene.run(row.command);
        took = begun.elapsed();
        done
    });
    let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    if (code == Some(0)) == row.refused {
        fault("to its end", format!("{code:?} {said}"));
    }
    let after = scene.look();
    if row.refused && after != before {
        fault("refused", format!("{said}\n{}", difference(&before, &after)));
    }
    if let Some((scene, done)) = busy
        && !row.again
        && let Some(told) = settle(&scene, &[&after])
    {
        fault("on a busy mount", format!("{done:?}\n{told}"));
    }
    scene.unmount_all();
    let ends = Ends { before, after, after_bare: scene.look() };
    drop(scene);
    if row.refused {
        return wrong;
    }
    for round in 0..rounds {
        // From the first moment on, later and later.
        let delay = if round == 0 { 0 } else { took * 5 / 4 * round / rounds + random.below(took / rounds + 2) };
        for (kind, what) in ["killed", "killed with all processes", "without room"].into_iter().enumerate() {
            if kind == 2 && round > 0 {
                continue;
            }
            if let Some(told) = die(row, kind, delay, &ends) {
                fault(&format!("{what} after {delay} of {took} ms"), told);
            }
        }
    }
    wrong
}

/// One death, or one time without room.
fn die(row: &Row, kind: usize, delay: u64, ends: &Ends) -> Option<String> {
    let scene = Scene::new(row.prepare, row.pool);
    let Ends { before, after, after_bare } = ends;
    match kind {
        2 if !row.pool && row.prepare.contains("nacre") => return None,
        // What is killed while it makes the files of a pool cannot take them away.
        1 if row.verb == "pool create" || row.verb == "pool add" => return None,
        2 => {
            scene.fill();
            let (code, said) = scene.run(row.command);
            let allowed: &[&Look] = if code == Some(0) { &[after] } else { &[before] };
            // What is gone on with later, and what is as in ZFS, which says so: made, and not
            // mounted.
            if code != Some(0)
                && (row.again || said.contains("filesystem successfully created, but it could not be mounted"))
            {
                return None;
            }
            if said.contains("the accounts of a cage cannot be saved")
                && without_accounts(&scene.look()) == without_accounts(after)
            {
                return None;
            }
            return settle(&scene, allowed).map(|told| format!("{code:?} {said}\n{told}"));
        }
        1 => {
            scene.killed(row.command, delay);
            scene.kill_all();
        }
        _ => scene.killed(row.command, delay),
    }
    scene.recover();
    if row.again && scene.look() != *before {
        // What was begun is gone on with, or done already.
        scene.run(row.command);
    }
    if kind == 1 && !row.pool {
        scene.mount_union_again(row.prepare);
        scene.unmount_all();
        let bare = Scene::new(row.prepare, row.pool);
        bare.unmount_all();
        return settle_as(&scene, &[&bare.look(), after_bare], is_but_for_directories);
    }
    if kind == 1 || ["union", "fuse-overlayfs", "mergerfs"].contains(&row.verb) {
        return settle_as(&scene, &[before, after], is_but_for_directories);
    }
    settle(&scene, &[before, after])
}
