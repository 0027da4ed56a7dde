//! A workspace over the mounted view of another one.

use super::support::{Stop, Tree, Workspace, assert_same, names, tree, tree_of};
use crate::{Journal, Resolution};
use nacre_fuse::{FuseOptions, Mount};
use nacre_layers::host::prepare_worker;
use nacre_testkit::World;
use nacre_vfs::{OpenFlags, RenameFlags, SetAttr, WriteOrigin};
use std::{fs, os::unix::fs::symlink, sync::Arc};

/// The outer workspace with its mounted view, and the inner one over it.
struct Nested {
    inner: Workspace,
    mount: Option<Mount>,
    view: tempfile::TempDir,
    outer: Workspace,
}

/// Whether views can be mounted here.
fn can_mount() -> bool {
    rustix::process::geteuid().is_root() && nacre_fuse::usable().is_ok()
}

impl Nested {
    fn over(fill: impl FnOnce(&std::path::Path)) -> Nested {
        let outer = Workspace::over(fill);
        let view = tempfile::tempdir().unwrap();
        let mount = Some(mounted(&outer, &view));
        Nested { inner: Workspace::at(view.path()), mount, view, outer }
    }

    /// Mounts the outer view anew, as another process does after a kill.
    fn mount_again(&mut self) {
        self.mount = None;
        self.mount = Some(mounted(&self.outer, &self.view));
    }
}

fn mounted(outer: &Workspace, view: &tempfile::TempDir) -> Mount {
    let mut options = FuseOptions::new(view.path());
    options.worker_setup = Some(Arc::new(|| prepare_worker().unwrap()));
    Mount::start(outer.view().layer, options).unwrap()
}

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn write(view: &World, path: &[u8], content: &[u8]) {
    let file = view.find(path).unwrap();
    view.open(&file.node, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
}

/// Changes of all kinds.
fn changed() -> Nested {
    let nested = Nested::over(|base| {
        for name in ["written", "gone", "old", "linked", "replaced"] {
            fs::write(base.join(name), name).unwrap();
        }
        fs::hard_link(base.join("linked"), base.join("linked-too")).unwrap();
        symlink("gone", base.join("link")).unwrap();
        for name in ["d/e", "removed/e", "mode"] {
            fs::create_dir_all(base.join(name)).unwrap();
            fs::write(base.join(name).join("inside"), name).unwrap();
        }
    });
    // The outer workspace has changes of its own.
    fs::write(nested.view.path().join("of-the-outer"), "outer").unwrap();
    fs::write(nested.view.path().join("old"), "outer").unwrap();
    let view = nested.inner.view();
    write(&view, b"written", b"INNER");
    write(&view, b"of-the-outer", b"INNER");
    write(&view, b"linked", b"INNER");
    let root = &view.root;
    for gone in ["gone", "link"] {
        view.layer.unlink(&view.caller, root, name(gone)).unwrap();
    }
    view.layer.rename(&view.caller, root, name("old"), root, name("new"), RenameFlags(0)).unwrap();
    view.layer.rename(&view.caller, root, name("d"), root, name("moved"), RenameFlags(0)).unwrap();
    let removed = view.find(b"removed").unwrap().node;
    let inner = view.find_in(&removed, b"e").unwrap().node;
    view.layer.unlink(&view.caller, &inner, name("inside")).unwrap();
    view.layer.rmdir(&view.caller, &removed, name("e")).unwrap();
    view.layer.rmdir(&view.caller, root, name("removed")).unwrap();
    view.layer.unlink(&view.caller, root, name("replaced")).unwrap();
    let replaced = view.directory(b"replaced");
    view.file_in(&replaced, b"file", b"INNER");
    let mode = view.find(b"mode").unwrap().node;
    view.change(&mode, SetAttr { mode: Some(0o750), ..SetAttr::default() });
    view.file_in(&mode, b"added", b"INNER");
    view.layer.symlink(&view.caller, root, name("symlink"), b"target").unwrap();
    drop(view);
    nested
}

/// A tree without the times of directories: the outer union sets those of directories that it copies.
fn compared(mut tree: Tree) -> Tree {
    for entry in tree.values_mut().filter(|entry| entry.kind == nacre_vfs::Kind::Directory) {
        entry.modified = (0, 0);
    }
    tree
}

#[test]
fn an_inner_workspace_is_committed_into_the_outer_one_and_this_into_its_base() {
    if !can_mount() {
        return;
    }
    let mut nested = changed();
    let wanted = compared(tree(&nested.inner.view()));
    nested.inner.commit();
    for path in ["written", "linked-too", "of-the-outer", "replaced/file", "mode/added"] {
        let content = fs::read(nested.view.path().join(path)).unwrap();
        assert!(content.starts_with(b"INNER"), "{path}: {}", content.escape_ascii());
    }
    nested.inner.assert_clean();
    nested.mount_again();
    assert_same(&compared(tree_of(nested.view.path())), &wanted, "the outer view, mounted again");
    nested.mount = None;
    nested.outer.commit();
    assert_same(&compared(tree_of(&nested.outer.base)), &wanted, "the base");
    nested.outer.assert_clean();
}

#[test]
fn a_commit_into_a_view_that_is_killed_before_any_step_is_continued_or_undone() {
    if !can_mount() {
        return;
    }
    let mut all = Stop::before(usize::MAX);
    let first = changed();
    first.inner.plan().run_with(&first.inner.journal(), &mut || all.pause()).unwrap();
    drop(first);
    let (mut continued, mut undone) = (0, 0);
    for undo in [false, true] {
        for step in 0..all.made {
            let mut nested = changed();
            let wanted = compared(tree(&nested.inner.view()));
            let before = compared(tree_of(nested.view.path()));
            let mut stop = Stop::before(step);
            if nested.inner.plan().run_with(&nested.inner.journal(), &mut || stop.pause()).is_ok() {
                assert!(step + 3 > all.made, "{step} of {}", all.made);
                break;
            }
            // The process that serves the outer view is killed as well.
            nested.mount_again();
            let (base, upper) = nested.inner.opened();
            let journal = Journal::open(&nested.inner.journal()).unwrap().unwrap();
            if undo && journal.can_undo() {
                journal.undo(&base, &upper).unwrap_or_else(|error| panic!("undone at step {step}: {error}"));
                assert_same(&compared(tree_of(nested.view.path())), &before, &format!("undone at step {step}"));
                undone += 1;
                continue;
            }
            journal.resume(&base, &upper).unwrap_or_else(|error| panic!("continued at step {step}: {error}"));
            assert_same(&compared(tree_of(nested.view.path())), &wanted, &format!("continued at step {step}"));
            nested.inner.assert_clean();
            continued += 1;
        }
    }
    assert!(continued > 30 && undone > 20, "{continued}, {undone}");
}

#[test]
fn a_large_directory_is_removed_from_the_outer_view() {
    if !can_mount() {
        return;
    }
    let nested = Nested::over(|base| {
        fs::create_dir_all(base.join("large/deep")).unwrap();
        for number in 0..1200 {
            fs::write(base.join(format!("large/{number}")), "").unwrap();
        }
        fs::write(base.join("large/deep/file"), "").unwrap();
    });
    let view = nested.inner.view();
    let large = view.find(b"large").unwrap().node;
    let deep = view.find_in(&large, b"deep").unwrap().node;
    view.layer.unlink(&view.caller, &deep, name("file")).unwrap();
    view.layer.rmdir(&view.caller, &large, name("deep")).unwrap();
    for number in 0..1200 {
        view.layer.unlink(&view.caller, &large, name(&number.to_string())).unwrap();
    }
    view.layer.rmdir(&view.caller, &view.root, name("large")).unwrap();
    drop(view);
    nested.inner.commit();
    assert_eq!(names(nested.view.path()), [""; 0]);
    nested.inner.assert_clean();
}

#[test]
fn what_others_change_in_the_outer_view_is_a_conflict() {
    if !can_mount() {
        return;
    }
    let nested = changed();
    fs::write(nested.view.path().join("written"), "theirs, longer").unwrap();
    let mut plan = nested.inner.plan();
    let conflicts: Vec<_> = plan.conflicts().into_iter().map(|one| (one.path, one.theirs)).collect();
    assert_eq!(conflicts, [(b"written".to_vec(), "modified")]);
    plan.resolve(b"written", Resolution::Theirs);
    plan.run(&nested.inner.journal()).unwrap();
    assert_eq!(fs::read(nested.view.path().join("written")).unwrap(), b"theirs, longer");
    assert_eq!(fs::read(nested.view.path().join("linked-too")).unwrap(), b"INNERd");
}
