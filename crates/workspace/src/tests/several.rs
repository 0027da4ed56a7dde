//! Workspaces over several directories: what is committed goes into the topmost one.

use super::support::{Workspace, assert_same, host, names, tree, tree_of};
use crate::Resolution;
use nacre_layers::host::prepare_worker;
use nacre_testkit::World;
use nacre_union::{BranchMode, Member, Union, UnionOptions};
use nacre_vfs::{OpenFlags, RenameFlags, SetAttr, WriteOrigin};
use std::{fs, path::Path, sync::Arc};

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn write(view: &World, path: &[&str], content: &[u8]) {
    let mut node = view.root.clone();
    for part in path {
        node = view.find_in(&node, part.as_bytes()).unwrap().node;
    }
    view.open(&node, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
}

/// A workspace over two directories; both have `d` and `d/both`, each a directory and files of its own.
fn workspace() -> (Workspace, tempfile::TempDir) {
    let fill = |base: &Path, own: &str| {
        fs::create_dir_all(base.join("d")).unwrap();
        fs::create_dir_all(base.join(format!("only-{own}/deep"))).unwrap();
        for path in ["d/both".to_owned(), format!("d/{own}"), format!("only-{own}/deep/file"), format!("file-{own}")] {
            fs::write(base.join(path), own).unwrap();
        }
    };
    let mut workspace = Workspace::over(|base| fill(base, "top"));
    let below = tempfile::tempdir().unwrap();
    fill(below.path(), "low");
    workspace.below.push(below.path().to_path_buf());
    (workspace, below)
}

/// What both directories show together.
fn shown(workspace: &Workspace) -> super::support::Tree {
    prepare_worker().unwrap();
    let members = std::iter::once(&workspace.base).chain(&workspace.below).map(|directory| Member {
        name: "base".into(),
        layer: host(directory),
        mode: BranchMode::parse("ro").unwrap(),
        work: None,
        lock: None,
    });
    let union = Union::named(members.collect(), UnionOptions::default()).unwrap();
    without_times_of_directories(tree(&World::new(Arc::new(union))))
}

fn without_times_of_directories(mut tree: super::support::Tree) -> super::support::Tree {
    for entry in tree.values_mut().filter(|entry| entry.kind == nacre_vfs::Kind::Directory) {
        entry.modified = (0, 0);
    }
    tree
}

#[test]
fn changes_go_into_the_topmost_directory() {
    let (workspace, below) = workspace();
    let view = workspace.view();
    for path in [&["d", "both"][..], &["d", "low"], &["d", "top"], &["only-low", "deep", "file"], &["file-low"]] {
        write(&view, path, b"OURS");
    }
    let low = view.find(b"only-low").unwrap().node;
    view.change(&low, SetAttr { mode: Some(0o711), ..SetAttr::default() });
    view.file_in(&low, b"new", b"ours");
    view.layer.unlink(&view.caller, &view.root, name("file-top")).unwrap();
    let top = view.find(b"only-top").unwrap().node;
    view.layer.rename(&view.caller, &view.root, name("only-top"), &view.root, name("moved"), RenameFlags(0)).unwrap();
    drop((view, top));
    let (wanted, before) = (without_times_of_directories(tree(&workspace.view())), tree_of(below.path()));
    workspace.commit();
    assert_same(&shown(&workspace), &wanted, "the directories");
    assert_same(&tree_of(below.path()), &before, "the directory below");
    assert_eq!(names(&workspace.base), ["d", "file-low", "moved", "only-low"]);
    workspace.assert_clean();
}

#[test]
fn removing_or_renaming_what_lies_below_is_refused_with_a_list() {
    type Make = fn(&World);
    let makes: [(Make, &str); 4] = [
        (|view| view.layer.unlink(&view.caller, &view.root, name("file-low")).unwrap(), "file-low"),
        (
            |view| {
                let d = view.find(b"d").unwrap().node;
                view.layer.unlink(&view.caller, &d, name("both")).unwrap();
            },
            "d/both",
        ),
        (
            |view| {
                let (root, flags) = (&view.root, RenameFlags(0));
                view.layer.rename(&view.caller, root, name("file-low"), root, name("moved"), flags).unwrap();
            },
            "file-low",
        ),
        (
            |view| {
                let (root, flags) = (&view.root, RenameFlags(0));
                view.layer.rename(&view.caller, root, name("only-low"), root, name("moved"), flags).unwrap();
            },
            "only-low",
        ),
    ];
    for (make, path) in makes {
        let (workspace, _below) = workspace();
        let view = workspace.view();
        make(&view);
        view.file(b"new", b"ours");
        drop(view);
        let before = shown(&workspace);
        let (base, upper) = workspace.opened();
        let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
        let error = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default()).unwrap_err();
        assert!(error.what.ends_with(&format!("in the way are: {path}")), "{error}");
        assert_same(&shown(&workspace), &before, "refused");
        // The other paths are committed.
        workspace.plan_of(&["new"]).run(&workspace.journal()).unwrap();
        assert_eq!(fs::read(workspace.base.join("new")).unwrap(), b"ours");
        assert!(!workspace.list().iter().any(|line| line == "A new"));
    }
}

#[test]
fn what_others_change_in_any_of_the_directories_is_a_conflict() {
    for (directory, word) in [("low", "modified"), ("top", "added")] {
        for resolution in [Resolution::Ours, Resolution::Theirs] {
            let (workspace, below) = workspace();
            write(&workspace.view(), &["file-low"], b"OURS");
            let changed = if directory == "low" { below.path() } else { &workspace.base };
            fs::write(changed.join("file-low"), "theirs, longer").unwrap();
            let mut plan = workspace.plan();
            let conflicts: Vec<_> = plan.conflicts().into_iter().map(|one| (one.path, one.theirs)).collect();
            assert_eq!(conflicts, [(b"file-low".to_vec(), word)], "{directory}");
            plan.resolve(b"file-low", resolution);
            plan.run(&workspace.journal()).unwrap();
            let now = shown(&workspace)[&b"/file-low"[..]].content.clone();
            let wanted = if resolution == Resolution::Ours { b"OURS".to_vec() } else { b"theirs, longer".to_vec() };
            assert_eq!(now[..4], wanted[..4], "{directory}, {resolution:?}");
        }
    }
}

#[test]
fn a_file_with_several_names_below_is_refused() {
    let (workspace, below) = workspace();
    fs::hard_link(below.path().join("file-low"), below.path().join("linked")).unwrap();
    write(&workspace.view(), &["file-low"], b"OURS");
    let (base, upper) = workspace.opened();
    let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
    let error = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default()).unwrap_err();
    assert!(error.what.ends_with("in the way are: linked"), "{error}");
}
