//! What others change around a commit: modes of directories, mounts, parts of the journal.

use super::support::{Stop, Workspace, looked_at, names};
use crate::Journal;
use nacre_vfs::RenameFlags;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

/// A mount, unmounted when this is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn at(path: &Path) -> Mounted {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(path).status().unwrap();
        assert!(mounted.success());
        Mounted(path.to_path_buf())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_directory_in_which_something_is_mounted_is_not_taken_away() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let make = || Workspace::over(|base| fs::create_dir_all(base.join("d/e")).unwrap());
    let remove = |workspace: &Workspace, names: &[&str]| {
        let view = workspace.view();
        let d = view.find(b"d").unwrap().node;
        for inner in names {
            view.layer.rmdir(&view.caller, &d, name(inner)).unwrap();
        }
        d
    };
    // Mounted below a removed directory, and at a removed one.
    for (place, removed) in [("d/e", &["e"][..]), ("d", &["e"])] {
        let workspace = make();
        remove(&workspace, removed);
        let view = workspace.view();
        view.layer.rmdir(&view.caller, &view.root, name("d")).unwrap();
        drop(view);
        let mount = Mounted::at(&workspace.base.join(place));
        fs::write(workspace.base.join(place).join("kept"), "of the mount").unwrap();
        let (base, upper) = workspace.opened();
        let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
        let planned = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default());
        let refused = planned.and_then(|mut plan| {
            for conflict in plan.conflicts() {
                plan.resolve(&conflict.path, crate::Resolution::Ours);
            }
            plan.run(&workspace.journal())
        });
        let error = refused.unwrap_err();
        assert!(error.what.contains("mounted there"), "{error}");
        assert!(!workspace.journal().exists());
        assert_eq!(looked_at(&workspace.base.join(place).join("kept")).2, b"of the mount");
        drop(mount);
    }
    // Renamed with changes in the file system that is mounted in it.
    let workspace = Workspace::over(|base| fs::create_dir_all(base.join("d/e")).unwrap());
    let mount = Mounted::at(&workspace.base.join("d/e"));
    fs::create_dir(workspace.base.join("d/e/inner")).unwrap();
    let view = workspace.view();
    let renamed = view.layer.rename(&view.caller, &view.root, name("d"), &view.root, name("x"), RenameFlags(0));
    if renamed.is_ok() {
        let x = view.find(b"x").unwrap().node;
        let e = view.find_in(&x, b"e").unwrap().node;
        view.file_in(&e, b"new", b"ours");
        drop(view);
        let (base, upper) = workspace.opened();
        let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
        let plan = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default());
        plan.and_then(|plan| plan.run(&workspace.journal())).unwrap_err();
        assert!(!workspace.journal().exists());
        assert_eq!(names(&workspace.base), ["d"]);
    }
    drop(mount);
}

#[test]
fn what_is_mounted_in_a_removed_directory_afterwards_is_not_emptied() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir_all(scratch.path().join("top/inner")).unwrap();
    let mount = Mounted::at(&scratch.path().join("top/inner"));
    fs::write(scratch.path().join("top/inner/kept"), "kept").unwrap();
    let tree = crate::beneath::Tree::open(scratch.path()).unwrap();
    let directory = tree.directory(Path::new("")).unwrap();
    let removed = crate::beneath::remove_tree(std::os::fd::AsFd::as_fd(&directory), std::ffi::OsStr::new("top"));
    removed.unwrap_err();
    assert_eq!(looked_at(&scratch.path().join("top/inner/kept")).2, b"kept");
    drop(mount);
}

#[test]
fn a_mode_that_others_set_during_the_commit_stays() {
    let make = || {
        let workspace = Workspace::over(|base| {
            fs::create_dir(base.join("d")).unwrap();
            fs::set_permissions(base.join("d"), fs::Permissions::from_mode(0o755)).unwrap();
        });
        let view = workspace.view();
        let d = view.find(b"d").unwrap().node;
        view.file_in(&d, b"new", b"ours");
        drop(view);
        workspace
    };
    let mut all = Stop::before(usize::MAX);
    let first = make();
    first.plan().run_with(&first.journal(), &mut || all.pause()).unwrap();
    for undo in [false, true] {
        for step in 0..all.made {
            let workspace = make();
            let directory = workspace.base.join("d");
            let mut stop = Stop::before(step);
            workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o750)).unwrap();
            let (base, upper) = workspace.opened();
            let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
            if undo && journal.can_undo() {
                journal.undo(&base, &upper).unwrap();
            } else {
                journal.resume(&base, &upper).unwrap();
            }
            let mode = fs::metadata(&directory).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode, 0o750, "step {step}, undo: {undo}");
        }
    }
}

#[test]
fn one_byte_of_a_phase_is_a_phase_that_did_not_begin() {
    let workspace = Workspace::over(|_| {});
    drop(workspace.view().file(b"new", b"ours"));
    let mut stop = Stop::before(2);
    workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
    let phase = workspace.journal().join("phase");
    fs::write(&phase, "\"").unwrap();
    let (base, upper) = workspace.opened();
    Journal::open(&workspace.journal()).unwrap().unwrap().resume(&base, &upper).unwrap();
    assert_eq!(looked_at(&workspace.base.join("new")).2, b"ours");
}
