//! Files with several names, whose content is replaced in place while others write to them.

use super::support::{Stop, Workspace, assert_same, looked_at, tree, tree_of};
use crate::Journal;
use nacre_vfs::{OpenFlags, SetAttr, WriteOrigin};
use std::{fs, os::unix::fs::FileExt};

/// Bytes of a piece that is written at a time.
const PIECE: usize = 256 << 10;

fn content(letter: u8, pieces: usize) -> Vec<u8> {
    vec![letter; pieces * PIECE]
}

/// A workspace in which a file with two names has another content.
fn workspace(old: &[u8], new: &[u8]) -> Workspace {
    let workspace = Workspace::over(|base| {
        fs::write(base.join("l"), old).unwrap();
        fs::hard_link(base.join("l"), base.join("l2")).unwrap();
    });
    let view = workspace.view();
    let file = view.find(b"l").unwrap();
    view.change(&file.node, SetAttr { size: Some(0), ..SetAttr::default() });
    view.open(&file.node, OpenFlags::READ_WRITE).write(new, 0, WriteOrigin::Caller).unwrap();
    drop(view);
    workspace
}

fn count(old: &[u8], new: &[u8]) -> usize {
    let mut all = Stop::before(usize::MAX);
    let first = workspace(old, new);
    first.plan().run_with(&first.journal(), &mut || all.pause()).unwrap();
    all.made
}

#[test]
fn what_others_write_before_any_step_is_never_lost() {
    let sizes = [(3, 3), (4, 2), (2, 4)];
    for (old, new) in sizes.map(|(old, new)| (content(b'o', old), content(b'n', new))) {
        let steps = count(&old, &new);
        assert!(steps > 8, "{steps}");
        let mut refused = 0;
        for step in 0..steps {
            // A write within the file, one behind its end, and another content.
            for (at, theirs) in [(PIECE + 5, &b"theirs"[..]), (5 * PIECE, b"theirs"), (usize::MAX, b"theirs")] {
                let workspace = workspace(&old, &new);
                let (path, mut left) = (workspace.base.join("l2"), step);
                let done = workspace.plan().run_with(&workspace.journal(), &mut || {
                    if left == 0 && at == usize::MAX {
                        fs::write(&path, theirs).unwrap();
                    } else if left == 0 {
                        fs::File::options().write(true).open(&path).unwrap().write_at(theirs, at as u64).unwrap();
                    }
                    left = left.wrapping_sub(1);
                    Ok(())
                });
                let what = format!("{} to {} bytes, step {step}, at {at}: {done:?}", old.len(), new.len());
                let has_theirs = || {
                    let start = if at == usize::MAX { 0 } else { at };
                    fs::read(&path).unwrap()[start..].starts_with(theirs)
                };
                assert!(has_theirs(), "{what}");
                let Err(error) = done else { continue };
                assert!(error.what.contains("changed by others"), "{what}");
                refused += 1;
                let (base, upper) = workspace.opened();
                Journal::open(&workspace.journal()).unwrap().unwrap().resume(&base, &upper).unwrap_err();
                assert!(has_theirs(), "{what}");
                let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
                journal.undo(&base, &upper).unwrap();
                assert!(has_theirs(), "{what}");
                // Around it the file is as it was, so nothing of the commit is in it.
                let now = fs::read(&path).unwrap();
                let others = if at == usize::MAX { 0..now.len() } else { at - at % 4096..at + 4096 };
                for (index, byte) in now.iter().enumerate().filter(|(index, _)| !others.contains(index)) {
                    assert_eq!(*byte, old.get(index).copied().unwrap_or(0), "{what}: byte {index}");
                }
                // The workspace keeps its content, and the next commit has a conflict.
                let plan = workspace.plan();
                assert!(plan.conflicts().iter().any(|one| one.theirs == "modified"), "{what}");
            }
        }
        assert!(refused > 6, "{refused}");
    }
}

#[test]
fn a_replacement_that_is_stopped_in_any_piece_is_continued_or_undone() {
    let sizes = [(3, 3), (4, 2), (2, 4)];
    for (old, new) in sizes.map(|(old, new)| (content(b'o', old), content(b'n', new))) {
        for undo in [false, true] {
            for step in 0..count(&old, &new) {
                let workspace = workspace(&old, &new);
                let (wanted, before) = (tree(&workspace.view()), tree_of(&workspace.base));
                let mut stop = Stop::before(step);
                workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
                let (base, upper) = workspace.opened();
                let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
                if undo && journal.can_undo() {
                    journal.undo(&base, &upper).unwrap();
                    assert_same(&tree_of(&workspace.base), &before, &format!("undone at step {step}"));
                } else {
                    journal.resume(&base, &upper).unwrap();
                    assert_same(&tree_of(&workspace.base), &wanted, &format!("continued at step {step}"));
                    workspace.assert_clean();
                }
            }
        }
    }
}

#[test]
fn holes_of_the_new_content_are_holes_in_place() {
    let workspace = workspace(&content(b'o', 4), b"");
    let view = workspace.view();
    let file = view.find(b"l").unwrap();
    view.open(&file.node, OpenFlags::READ_WRITE).write(b"far", 3 * PIECE as u64 + 5000, WriteOrigin::Caller).unwrap();
    drop(view);
    let inode = looked_at(&workspace.base.join("l2")).1;
    let wanted = tree(&workspace.view());
    workspace.commit();
    assert_same(&tree_of(&workspace.base), &wanted, "committed");
    assert_eq!(looked_at(&workspace.base.join("l")).1, inode);
    workspace.assert_clean();
}
