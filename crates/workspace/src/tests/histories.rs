//! Random histories in a view, committed: the base equals the view; also if the commit is stopped before any step, and
//! continued or undone.

use super::support::{Stop, Workspace, assert_same, host, tree, tree_of};
use crate::{CommitOptions, CommitPlan, Journal, Selection};
use nacre_testkit::{
    World,
    model::{Operation, apply, operations},
};
use nacre_vfs::{Caller, SetAttr, SetTime, Time};
use proptest::test_runner::{Config, FileFailurePersistence, TestRng, TestRunner};

type History = (Vec<Operation>, Vec<Operation>);

fn check(everyday: u32, run: impl Fn(&History)) {
    let cases = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(everyday);
    let config = Config {
        cases,
        max_shrink_iters: 300,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(config.rng_algorithm);
    let mut runner = match std::env::var_os("NACRE_MODEL_SEEDS") {
        Some(_) => TestRunner::new(config),
        None => TestRunner::new_with_rng(config, rng),
    };
    let outcome = runner.run(&(operations(40), operations(40)), |history| {
        run(&history);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// The operation of a user: root alone reads what nobody may read.
fn allowed(operation: &Operation) -> Operation {
    let is_root = rustix::process::geteuid().is_root();
    let readable = |mode: &u32| if is_root { *mode } else { mode | 0o700 };
    match operation {
        Operation::Create(at, mode) => Operation::Create(at.clone(), readable(mode)),
        Operation::Mkdir(at, mode) => Operation::Mkdir(at.clone(), readable(mode)),
        Operation::Chmod(at, mode) => Operation::Chmod(at.clone(), readable(mode)),
        other => other.clone(),
    }
}

/// A workspace after a history in the base, and another one in the view.
fn workspace(history: &History) -> Workspace {
    let workspace = Workspace::over(|base| {
        let world = World::new(host(base));
        for operation in &history.0 {
            let _ = apply(&world, &allowed(operation));
        }
        make_old(&world);
    });
    let view = workspace.view();
    for operation in &history.1 {
        let _ = apply(&view, &allowed(operation));
    }
    workspace
}

/// Gives all entries other times and owners than new ones get.
fn make_old(world: &World) {
    let mut waiting = vec![world.root.clone()];
    while let Some(node) = waiting.pop() {
        for listed in world.list(&node, true, 16) {
            let entry = listed.entry.unwrap();
            let then = Some(SetTime::To(Time { sec: 1_000_000_000 + i64::from(entry.attr.mode), nsec: 5 }));
            let change = SetAttr { atime: then, mtime: then, ..SetAttr::default() };
            world.layer.setattr(&Caller::ROOT, &entry.node, None, &change).unwrap();
            if entry.attr.kind == nacre_vfs::Kind::Directory {
                waiting.push(entry.node);
            }
        }
    }
}

#[test]
fn a_committed_history_leaves_the_base_as_the_view_was() {
    check(150, |history| {
        let workspace = workspace(history);
        let wanted = tree(&workspace.view());
        let before = tree_of(&workspace.base);
        let listed = workspace.list();
        assert_same(&tree_of(&workspace.base), &before, "a list changes nothing");
        workspace.commit();
        assert_same(&tree_of(&workspace.base), &wanted, &format!("{listed:?}"));
        workspace.assert_clean();
        assert_same(&tree(&workspace.view()), &wanted, "the view over the new base");
    });
}

/// Trees without the times of directories: those of the view change when some of its changes go to the base.
fn without_times_of_directories(mut tree: super::support::Tree) -> super::support::Tree {
    for entry in tree.values_mut().filter(|entry| entry.kind == nacre_vfs::Kind::Directory) {
        entry.modified = (0, 0);
    }
    tree
}

#[test]
fn a_history_can_be_committed_in_two_parts() {
    for part in [0, 1] {
        check(100, |history| {
            let workspace = workspace(history);
            let wanted = without_times_of_directories(tree(&workspace.view()));
            let (base, upper) = workspace.opened();
            let all = crate::changes(&base, &upper, &Selection::default()).unwrap();
            let listed = workspace.list();
            let some = all.into_iter().enumerate().filter(|(index, _)| index % 2 == part).map(|(_, change)| change);
            let plan = CommitPlan::new(&base, &upper, some.collect(), CommitOptions::default()).unwrap();
            plan.run(&workspace.journal()).unwrap();
            let between = workspace.list();
            let what = format!("{listed:?}, then {between:?}");
            let mut view = without_times_of_directories(tree(&workspace.view()));
            for (path, entry) in &mut view {
                // Names that are committed as removed later count until then.
                entry.links = wanted.get(path).map_or(0, |wanted| wanted.links);
            }
            assert_same(&view, &wanted, &format!("the view: {what}"));
            let rest = workspace.plan();
            assert_eq!(rest.conflicts(), [], "{what}");
            rest.run(&workspace.journal()).unwrap();
            assert_same(&without_times_of_directories(tree_of(&workspace.base)), &wanted, &format!("the base: {what}"));
            workspace.assert_clean();
        });
    }
}

/// Number of steps of a commit.
fn steps(history: &History) -> usize {
    let workspace = workspace(history);
    let mut all = Stop::before(usize::MAX);
    workspace.plan().run_with(&workspace.journal(), &mut || all.pause()).unwrap();
    all.made
}

#[test]
fn a_commit_that_is_stopped_before_any_step_is_continued() {
    check(6, |history| {
        let count = steps(history);
        for step in 0..count {
            let workspace = workspace(history);
            let wanted = tree(&workspace.view());
            let mut stop = Stop::before(step);
            if workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).is_ok() {
                // Times of directories that happen to be the same need no step.
                assert!(step + 3 > count, "{step} of {count}");
                break;
            }
            let (base, upper) = workspace.opened();
            // Stopped once more, in the middle of what remains.
            let mut again = Stop::before(step / 2);
            let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
            if journal.resume_with(&base, &upper, &mut || again.pause()).is_err() {
                let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
                journal.resume(&base, &upper).unwrap();
            }
            assert_same(&tree_of(&workspace.base), &wanted, &format!("stopped before step {step}"));
            workspace.assert_clean();
            assert!(Journal::open(&workspace.journal()).unwrap().is_none());
        }
    });
}

#[test]
fn a_commit_that_is_stopped_before_any_step_is_undone() {
    check(6, |history| {
        let count = steps(history);
        for step in 0..count {
            let workspace = workspace(history);
            let (wanted, before) = (tree(&workspace.view()), tree_of(&workspace.base));
            let mut stop = Stop::before(step);
            if workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).is_ok() {
                // Times of directories that happen to be the same need no step.
                assert!(step + 3 > count, "{step} of {count}");
                break;
            }
            let (base, upper) = workspace.opened();
            let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
            if !journal.can_undo() {
                journal.resume(&base, &upper).unwrap();
                assert_same(&tree_of(&workspace.base), &wanted, &format!("continued at step {step}"));
                continue;
            }
            // Stopped once more, in the middle of the undoing.
            let mut again = Stop::before(step / 3);
            if journal.undo_with(&base, &upper, &mut || again.pause()).is_err() {
                Journal::open(&workspace.journal()).unwrap().unwrap().undo(&base, &upper).unwrap();
            }
            assert_same(&tree_of(&workspace.base), &before, &format!("undone at step {step}"));
            assert_same(&tree(&workspace.view()), &wanted, "the view after the undoing");
        }
    });
}
