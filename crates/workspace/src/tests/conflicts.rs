//! Conflicts by pairs of all kinds of change: found before anything is changed, and resolved path by path.

use super::support::{Workspace, assert_same, tree, tree_of};
use crate::{CommitOptions, CommitPlan, Resolution, Selection};
use nacre_testkit::World;
use nacre_vfs::{OpenFlags, RenameFlags, SetAttr, WriteOrigin};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

/// A change in the view.
struct Ours {
    name: &'static str,
    /// The path in the base that it concerns.
    path: &'static str,
    make: fn(&World),
}

/// A change that others make in the base, to a path.
struct Theirs {
    name: &'static str,
    /// The words of the conflict.
    word: &'static str,
    make: fn(&Path),
}

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn write(view: &World, path: &str, content: &[u8]) {
    let file = view.find(path.as_bytes()).unwrap();
    view.open(&file.node, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
}

fn chmod(view: &World, path: &str, mode: u32) {
    let found = view.find(path.as_bytes()).unwrap();
    view.change(&found.node, SetAttr { mode: Some(mode), ..SetAttr::default() });
}

fn unlink(view: &World, path: &str) {
    view.layer.unlink(&view.caller, &view.root, name(path)).unwrap();
}

fn rename(view: &World, from: &str, to: &str) {
    view.layer.rename(&view.caller, &view.root, name(from), &view.root, name(to), RenameFlags(0)).unwrap();
}

fn remove_directory(view: &World) {
    let directory = view.find(b"d").unwrap().node;
    view.layer.unlink(&view.caller, &directory, name("x")).unwrap();
    view.layer.rmdir(&view.caller, &view.root, name("d")).unwrap();
}

const OURS: &[Ours] = &[
    Ours { name: "write f", path: "f", make: |view| write(view, "f", b"ours") },
    Ours { name: "chmod f", path: "f", make: |view| chmod(view, "f", 0o600) },
    Ours { name: "remove f", path: "f", make: |view| unlink(view, "f") },
    Ours { name: "rename f", path: "f", make: |view| rename(view, "f", "g") },
    Ours {
        name: "f becomes a directory",
        path: "f",
        make: |view| {
            unlink(view, "f");
            let made = view.directory(b"f");
            view.file_in(&made, b"inside", b"ours");
        },
    },
    Ours { name: "write l", path: "l", make: |view| write(view, "l", b"ours") },
    Ours { name: "create n", path: "n", make: |view| drop(view.file(b"n", b"ours")) },
    Ours { name: "mkdir n", path: "n", make: |view| drop(view.file_in(&view.directory(b"n"), b"inside", b"ours")) },
    Ours { name: "rename other to n", path: "n", make: |view| rename(view, "other", "n") },
    Ours { name: "rename d to n", path: "n", make: |view| rename(view, "d", "n") },
    Ours { name: "remove d", path: "d", make: remove_directory },
    Ours { name: "rename d", path: "d", make: |view| rename(view, "d", "e") },
    Ours { name: "chmod d", path: "d", make: |view| chmod(view, "d", 0o700) },
    Ours {
        name: "d becomes a file",
        path: "d",
        make: |view| {
            remove_directory(view);
            view.file(b"d", b"ours");
        },
    },
    Ours {
        name: "write d/x",
        path: "d/x",
        make: |view| {
            let directory = view.find(b"d").unwrap().node;
            let file = view.find_in(&directory, b"x").unwrap().node;
            view.open(&file, OpenFlags::READ_WRITE).write(b"ours", 0, WriteOrigin::Caller).unwrap();
        },
    },
];

fn remove(path: &Path) {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// Changes of an entry that is there.
const THEIRS: &[Theirs] = &[
    Theirs {
        name: "write",
        word: "modified",
        make: |path| {
            if path.is_dir() {
                fs::set_permissions(path, fs::Permissions::from_mode(0o711)).unwrap()
            } else {
                fs::write(path, "theirs").unwrap()
            }
        },
    },
    Theirs {
        name: "chmod",
        word: "modified",
        make: |path| fs::set_permissions(path, fs::Permissions::from_mode(0o750)).unwrap(),
    },
    Theirs { name: "remove", word: "removed", make: remove },
    Theirs {
        name: "replace by a file",
        word: "replaced",
        make: |path| {
            let new = path.with_file_name("new");
            fs::write(&new, "theirs").unwrap();
            remove(path);
            fs::rename(new, path).unwrap();
        },
    },
    Theirs {
        name: "replace by a directory",
        word: "replaced",
        make: |path| {
            let new = path.with_file_name("new");
            fs::create_dir(&new).unwrap();
            fs::write(new.join("theirs"), "theirs").unwrap();
            remove(path);
            fs::rename(new, path).unwrap();
        },
    },
    Theirs {
        name: "replace by a link",
        word: "replaced",
        make: |path| {
            let new = path.with_file_name("new");
            symlink("/etc/passwd", &new).unwrap();
            remove(path);
            fs::rename(new, path).unwrap();
        },
    },
];

/// Changes of a path that is free.
const ADDED: &[Theirs] = &[
    Theirs { name: "create", word: "added", make: |path| fs::write(path, "theirs").unwrap() },
    Theirs { name: "make a link", word: "added", make: |path| symlink("/etc/passwd", path).unwrap() },
    Theirs {
        name: "make a directory with another mode",
        word: "added",
        make: |path| {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o711)).unwrap();
            fs::write(path.join("theirs"), "theirs").unwrap();
        },
    },
];

fn workspace() -> Workspace {
    Workspace::over(|base| {
        for name in ["f", "other", "l"] {
            fs::write(base.join(name), "base").unwrap();
        }
        fs::hard_link(base.join("l"), base.join("l2")).unwrap();
        fs::create_dir(base.join("d")).unwrap();
        fs::write(base.join("d/x"), "base").unwrap();
    })
}

#[test]
fn every_pair_is_a_conflict_and_can_be_resolved_for_either_side() {
    let mut count = 0;
    for ours in OURS {
        let theirs = if ours.path == "n" { ADDED } else { THEIRS };
        for theirs in theirs {
            // Both have removed it.
            if ours.name.starts_with("remove") && theirs.name == "remove" {
                continue;
            }
            count += 1;
            let what = format!("{} against {}", ours.name, theirs.name);
            for resolution in [Resolution::Ours, Resolution::Theirs] {
                let workspace = workspace();
                (ours.make)(&workspace.view());
                (theirs.make)(&workspace.base.join(ours.path));
                let (view, base) = (tree(&workspace.view()), tree_of(&workspace.base));
                let mut plan = workspace.plan();
                let conflicts = plan.conflicts();
                let found = conflicts.iter().find(|conflict| conflict.path == ours.path.as_bytes());
                let found = found.unwrap_or_else(|| panic!("{what}: {conflicts:?}"));
                assert_eq!(found.theirs, theirs.word, "{what}");
                // Without a resolution nothing is changed.
                workspace.plan().run(&workspace.journal()).unwrap_err();
                assert!(!workspace.journal().exists());
                assert_same(&tree_of(&workspace.base), &base, &what);
                for conflict in &conflicts {
                    plan.resolve(&conflict.path, resolution);
                }
                assert_eq!(plan.conflicts(), []);
                plan.run(&workspace.journal()).unwrap_or_else(|error| panic!("{what}: {error}"));
                let mut wanted = without_times(if resolution == Resolution::Ours { view } else { base });
                let mut got = without_times(tree_of(&workspace.base));
                if ours.name == "rename d" && resolution == Resolution::Ours {
                    // The mode that others have set, and the workspace has not, goes along.
                    for tree in [&mut wanted, &mut got] {
                        tree.entry(b"/e".to_vec()).and_modify(|entry| entry.mode = 0);
                    }
                }
                assert_same(&got, &wanted, &format!("{what}, {resolution:?}"));
                workspace.assert_clean();
            }
        }
    }
    assert!(count > 60, "{count}");
}

/// Directories that others have changed keep their times.
fn without_times(mut tree: super::support::Tree) -> super::support::Tree {
    for entry in tree.values_mut() {
        entry.modified = (0, 0);
    }
    tree
}

#[test]
fn names_that_others_make_in_a_removed_directory_are_conflicts() {
    for make in [remove_directory as fn(&World), |view| rename(view, "d", "e")] {
        let workspace = workspace();
        make(&workspace.view());
        fs::write(workspace.base.join("d/new"), "theirs").unwrap();
        let before = tree_of(&workspace.base);
        let mut plan = workspace.plan();
        let conflicts = plan.conflicts();
        assert_eq!(conflicts.len(), 1, "{conflicts:?}");
        assert_eq!((&conflicts[0].path[..], conflicts[0].theirs), (&b"d/new"[..], "added"));
        workspace.plan().run(&workspace.journal()).unwrap_err();
        assert_same(&tree_of(&workspace.base), &before, "refused");
        plan.resolve(b"d/new", Resolution::Theirs);
        plan.run(&workspace.journal()).unwrap();
        let kept = ["d/new", "e/new"]
            .iter()
            .any(|path| fs::read(workspace.base.join(path)).is_ok_and(|text| text == b"theirs"));
        assert!(kept, "{:?}", tree_of(&workspace.base).keys());
        workspace.assert_clean();
    }
}

#[test]
fn changes_of_others_elsewhere_stay() {
    let workspace = workspace();
    let view = workspace.view();
    write(&view, "f", b"ours");
    drop(view);
    fs::write(workspace.base.join("other"), "theirs").unwrap();
    fs::write(workspace.base.join("d/new"), "theirs").unwrap();
    workspace.commit();
    assert_eq!(fs::read(workspace.base.join("other")).unwrap(), b"theirs");
    assert_eq!(fs::read(workspace.base.join("d/new")).unwrap(), b"theirs");
    assert_eq!(fs::read(workspace.base.join("f")).unwrap(), b"ours");
}

#[test]
fn the_same_content_on_both_sides_is_no_conflict_where_content_is_compared() {
    let workspace = workspace();
    drop(workspace.view().file(b"n", b"same"));
    fs::write(workspace.base.join("n"), "same").unwrap();
    let then = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    fs::File::options().write(true).open(workspace.base.join("n")).unwrap().set_modified(then).unwrap();
    fs::set_permissions(workspace.base.join("n"), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(workspace.plan().conflicts().len(), 1);
    let (base, upper) = workspace.opened();
    let changes = crate::changes(&base, &upper, &Selection::default()).unwrap();
    let plan = CommitPlan::new(&base, &upper, changes, CommitOptions { compare_content: true }).unwrap();
    assert_eq!(plan.conflicts(), []);
    plan.run(&workspace.journal()).unwrap();
    workspace.assert_clean();
}

#[test]
fn a_changed_file_whose_other_names_others_have_taken_is_a_conflict_of_its_name() {
    for remove_all in [false, true] {
        for resolution in [Resolution::Ours, Resolution::Theirs] {
            let workspace = workspace();
            write(&workspace.view(), "l", b"ours");
            for path in ["l", "l2"] {
                remove(&workspace.base.join(path));
                if !remove_all {
                    fs::write(workspace.base.join(path), "theirs").unwrap();
                }
            }
            let wanted = without_times(tree(&workspace.view()));
            let before = without_times(tree_of(&workspace.base));
            let mut plan = workspace.plan();
            let conflicts: Vec<_> = plan.conflicts().into_iter().map(|one| (one.path, one.theirs)).collect();
            assert_eq!(conflicts, [(b"l".to_vec(), if remove_all { "removed" } else { "replaced" })]);
            plan.resolve(b"l", resolution);
            plan.run(&workspace.journal()).unwrap();
            let mut wanted = if resolution == Resolution::Ours { wanted } else { before };
            // The view counts the name that the base does not have any more.
            wanted.entry(b"/l".to_vec()).and_modify(|entry| entry.links = 1);
            assert_same(&without_times(tree_of(&workspace.base)), &wanted, "committed");
            workspace.assert_clean();
        }
    }
}

#[test]
fn a_changed_file_without_any_name_left_is_dropped_only_if_that_is_chosen() {
    let workspace = workspace();
    let view = workspace.view();
    write(&view, "l", b"ours");
    unlink(&view, "l");
    view.file(b"n", b"ours");
    view.file(b"m", b"ours");
    drop(view);
    remove(&workspace.base.join("l"));
    remove(&workspace.base.join("l2"));
    // Other paths can be committed meanwhile.
    workspace.plan_of(&["n"]).run(&workspace.journal()).unwrap();
    let mut plan = workspace.plan();
    assert_eq!(plan.conflicts().into_iter().map(|one| one.path).collect::<Vec<_>>(), [b"l".to_vec()]);
    plan.resolve(b"l", Resolution::Ours);
    let error = plan.run(&workspace.journal()).unwrap_err();
    let file = error.what.split("the content is ").nth(1).unwrap().split(':').next().unwrap();
    assert_eq!(fs::read(file).unwrap(), b"ours", "{error}");
    let mut plan = workspace.plan();
    plan.resolve(b"l", Resolution::Theirs);
    plan.run(&workspace.journal()).unwrap();
    workspace.assert_clean();
}
