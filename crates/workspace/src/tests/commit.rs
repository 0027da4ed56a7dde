//! Single commits: kinds of changes, dangers, hostile links, errors of the storage.

use super::support::{Stop, Workspace, assert_same, looked_at, names, tree, tree_of};
use crate::{Journal, WorkspaceError};
use nacre_testkit::World;
use nacre_vfs::{Kind, OpenFlags, RenameFlags, SetAttr, WriteOrigin, XattrFlags};
use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        process::ExitStatusExt,
    },
    path::Path,
    process::Command,
    time::Instant,
};

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn write(view: &World, path: &[u8], content: &[u8]) {
    let file = view.find(path).unwrap();
    view.open(&file.node, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn kinds_of_changes_are_listed() {
    let workspace = Workspace::over(|base| {
        for name in ["changed", "gone", "old", "mode", "touched"] {
            fs::write(base.join(name), name).unwrap();
        }
        fs::create_dir_all(base.join("d/deep")).unwrap();
        fs::write(base.join("d/deep/file"), "file").unwrap();
        fs::create_dir(base.join("empty")).unwrap();
    });
    let view = workspace.view();
    write(&view, b"changed", b"CHANGED");
    view.layer.unlink(&view.caller, &view.root, name("gone")).unwrap();
    view.layer.rename(&view.caller, &view.root, name("old"), &view.root, name("new"), RenameFlags(0)).unwrap();
    view.layer.rename(&view.caller, &view.root, name("d"), &view.root, name("e"), RenameFlags(0)).unwrap();
    view.layer.rmdir(&view.caller, &view.root, name("empty")).unwrap();
    let mode = view.find(b"mode").unwrap().node;
    view.change(&mode, SetAttr { mode: Some(0o640), ..SetAttr::default() });
    // Opened for writing, and left as it was.
    drop(view.open(&view.find(b"touched").unwrap().node, OpenFlags::READ_WRITE));
    let added = view.directory(b"added");
    view.file_in(&added, b"f", b"");
    drop(view);
    let list = ["A added", "A added/f", "M changed", "R d -> e", "D empty", "D gone", "M mode", "R old -> new"];
    assert_eq!(workspace.list(), list);
    let aspects: Vec<_> = workspace.changes().into_iter().filter(|change| change.path == b"mode").collect();
    let wanted = crate::Aspects { mode: true, ..crate::Aspects::default() };
    assert_eq!(aspects[0].kind, crate::ChangeKind::Modified(wanted));
    let inode = looked_at(&workspace.base.join("old")).1;
    let wanted = tree(&workspace.view());
    workspace.commit();
    assert_eq!(looked_at(&workspace.base.join("new")).1, inode, "a rename keeps the inode");
    assert_same(&tree_of(&workspace.base), &wanted, "committed");
    workspace.assert_clean();
}

#[test]
fn a_file_with_names_outside_of_the_view_stays_one_file() {
    let workspace = Workspace::over(|base| {
        fs::write(base.join("a"), "content").unwrap();
        fs::hard_link(base.join("a"), base.join("b")).unwrap();
    });
    let outside = workspace.base.with_file_name("outside");
    fs::hard_link(workspace.base.join("a"), &outside).unwrap();
    let view = workspace.view();
    write(&view, b"a", b"CHANGED");
    drop(view);
    let inode = looked_at(&outside).1;
    assert_eq!(workspace.list(), ["M a", "M b"]);
    workspace.commit();
    for path in [workspace.base.join("a"), workspace.base.join("b"), outside] {
        let (_, ino, content) = looked_at(&path);
        assert_eq!((ino, content.as_slice()), (inode, &b"CHANGED"[..]), "{}", path.display());
    }
    workspace.assert_clean();
}

#[test]
fn a_file_whose_changed_name_was_removed_is_changed_under_the_others() {
    let workspace = Workspace::over(|base| {
        fs::create_dir(base.join("d")).unwrap();
        fs::write(base.join("a"), "content").unwrap();
        fs::hard_link(base.join("a"), base.join("d/b")).unwrap();
    });
    let view = workspace.view();
    write(&view, b"a", b"CHANGED");
    view.layer.unlink(&view.caller, &view.root, name("a")).unwrap();
    drop(view);
    assert_eq!(workspace.list(), ["D a", "M d/b"]);
    workspace.commit();
    assert_eq!(looked_at(&workspace.base.join("d/b")).2, b"CHANGED");
    assert_eq!(names(&workspace.base), ["d"]);
    workspace.assert_clean();
}

#[test]
fn some_paths_are_committed_and_the_rest_stays() {
    let workspace = Workspace::over(|base| {
        for name in ["a", "b", "c"] {
            fs::write(base.join(name), name).unwrap();
        }
        fs::create_dir(base.join("d")).unwrap();
        fs::write(base.join("d/x"), "x").unwrap();
        fs::write(base.join("d/y"), "y").unwrap();
    });
    let view = workspace.view();
    write(&view, b"a", b"A");
    view.layer.unlink(&view.caller, &view.root, name("b")).unwrap();
    view.layer.unlink(&view.caller, &view.root, name("c")).unwrap();
    let d = view.find(b"d").unwrap().node;
    view.layer.unlink(&view.caller, &d, name("x")).unwrap();
    let new = view.directory(b"new");
    view.file_in(&new, b"one", b"1");
    let (file, _) = view.file_in(&new, b"two", b"2");
    view.layer.link(&view.caller, &file.node, None, &view.root, name("linked")).unwrap();
    let wanted = tree(&view);
    drop(view);
    workspace.plan_of(&["a", "b", "new/two"]).run(&workspace.journal()).unwrap();
    // The other name of a file comes along; its directory does, too.
    assert_eq!(workspace.list(), ["D c", "D d/x", "A new/one"]);
    assert_eq!(names(&workspace.base), ["a", "c", "d", "linked", "new"]);
    let (two, linked) = (looked_at(&workspace.base.join("new/two")), looked_at(&workspace.base.join("linked")));
    assert_eq!((two.1, two.2.as_slice()), (linked.1, &b"2"[..]));
    // Later changes in the workspace do not reach the base.
    write(&workspace.view(), b"linked", b"later");
    assert_eq!(looked_at(&workspace.base.join("new/two")).2, b"2");
    workspace.commit();
    let names = |tree: &super::support::Tree| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&tree_of(&workspace.base)), names(&wanted));
    workspace.assert_clean();
}

#[test]
fn a_name_that_was_committed_as_removed_can_be_used_again() {
    let workspace = Workspace::over(|base| fs::write(base.join("a"), "base").unwrap());
    let view = workspace.view();
    view.layer.unlink(&view.caller, &view.root, name("a")).unwrap();
    drop(view);
    workspace.commit();
    drop(workspace.view().file(b"a", b"new"));
    workspace.commit();
    assert_eq!(looked_at(&workspace.base.join("a")).2, b"new");
}

#[test]
fn dangers_are_named() {
    if !is_root() {
        return;
    }
    let workspace = Workspace::over(|base| {
        fs::write(base.join("was"), "x").unwrap();
        fs::set_permissions(base.join("was"), fs::Permissions::from_mode(0o4755)).unwrap();
    });
    let view = workspace.view();
    let change = |path: &[u8], change: SetAttr| {
        let file = view.find(path).unwrap().node;
        view.change(&file, change);
    };
    for path in [&b"setuid"[..], b"setgid", b"foreign", b"capable", b"plain"] {
        view.file(path, b"x");
    }
    change(b"setuid", SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    change(b"setgid", SetAttr { mode: Some(0o2755), ..SetAttr::default() });
    change(b"foreign", SetAttr { uid: Some(1001), gid: Some(1002), ..SetAttr::default() });
    view.layer.mknod(&view.caller, &view.root, name("disk"), Kind::Block, 0o600, (8, 0)).unwrap();
    let capable = view.find(b"capable").unwrap().node;
    // VFS_CAP_REVISION_2 with CAP_CHOWN (linux/capability.h).
    let value = [1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    view.layer.setxattr(&view.caller, &capable, b"security.capability", &value, XattrFlags::default()).unwrap();
    // A file that had the bit in the base, and other content now.
    write(&view, b"was", b"y");
    change(b"was", SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    drop(view);
    let found = workspace.plan().dangers(0);
    let lines: Vec<String> = found.iter().map(|one| format!("{}: {}", one.path.escape_ascii(), one.what)).collect();
    let wanted = [
        "capable: file capabilities",
        "disk: block device 8:0",
        "foreign: owned by 1001:1002",
        "setgid: set-group-id of root",
        "setuid: set-user-id of root",
        "was: set-user-id of root",
    ];
    assert_eq!(lines, wanted);
    let wanted = tree(&workspace.view());
    workspace.commit();
    assert_same(&tree_of(&workspace.base), &wanted, "committed");
}

#[test]
fn holes_times_attributes_and_lists_are_kept() {
    let workspace = Workspace::over(|_| {});
    let view = workspace.view();
    let (file, open) = view.file(b"sparse", b"");
    open.write(b"far", 1 << 20, WriteOrigin::Caller).unwrap();
    view.change(&file.node, SetAttr { size: Some(3 << 20), ..SetAttr::default() });
    view.layer.setxattr(&view.caller, &file.node, b"user.one", b"value", XattrFlags::default()).unwrap();
    let directory = view.directory(b"shared");
    // Version 2; owner rwx, group r-x, others ---, and user 1000 rwx with mask (posix_acl_xattr.h).
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let list = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 7, none),
        entry(2, 7, 1000),
        entry(4, 5, none),
        entry(16, 7, none),
        entry(32, 0, none),
    ]
    .concat();
    for kind in [&b"system.posix_acl_access"[..], b"system.posix_acl_default"] {
        match view.layer.setxattr(&view.caller, &directory, kind, &list, XattrFlags::default()) {
            Ok(()) | Err(nacre_vfs::Errno::EOPNOTSUPP) => {}
            other => other.unwrap(),
        }
    }
    view.file_in(&directory, b"inherits", b"");
    let wanted = tree(&view);
    drop((open, view));
    workspace.commit();
    let got = tree_of(&workspace.base);
    assert_same(&got, &wanted, "committed");
    assert!(got[&b"/sparse"[..]].data.iter().map(|(start, end)| end - start).sum::<u64>() <= 1 << 16);
}

#[test]
fn a_commit_is_not_led_elsewhere_by_links() {
    let workspace = Workspace::over(|base| {
        fs::create_dir(base.join("d")).unwrap();
        fs::write(base.join("d/file"), "base").unwrap();
    });
    let outside = workspace.base.with_file_name("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "outside").unwrap();
    let view = workspace.view();
    let d = view.find(b"d").unwrap().node;
    let file = view.find_in(&d, b"file").unwrap().node;
    view.open(&file, OpenFlags::READ_WRITE).write(b"OURS", 0, WriteOrigin::Caller).unwrap();
    view.file_in(&d, b"new", b"ours");
    drop(view);
    // Between the plan and its execution, the directory becomes a link.
    let plan = workspace.plan();
    fs::rename(workspace.base.join("d"), workspace.base.join("moved")).unwrap();
    symlink(&outside, workspace.base.join("d")).unwrap();
    plan.run(&workspace.journal()).unwrap_err();
    assert_eq!(names(&outside), ["file"]);
    assert_eq!(fs::read(outside.join("file")).unwrap(), b"outside");
    assert_eq!(fs::read(workspace.base.join("moved/file")).unwrap(), b"base");
}

#[test]
fn what_others_change_during_a_commit_is_not_replaced() {
    let workspace = Workspace::over(|base| {
        for name in ["a", "b", "c"] {
            fs::write(base.join(name), name).unwrap();
        }
    });
    let view = workspace.view();
    write(&view, b"a", b"A");
    view.layer.unlink(&view.caller, &view.root, name("b")).unwrap();
    view.file(b"new", b"ours");
    drop(view);
    let mut steps = 0;
    workspace_steps(&workspace, &mut steps);
    for path in ["a", "b", "new"] {
        for step in 0..steps {
            let (copy, mut left) = (
                Workspace::over(|base| {
                    for name in ["a", "b", "c"] {
                        fs::write(base.join(name), name).unwrap();
                    }
                }),
                step,
            );
            let view = copy.view();
            write(&view, b"a", b"A");
            view.layer.unlink(&view.caller, &view.root, name("b")).unwrap();
            view.file(b"new", b"ours");
            drop(view);
            let target = copy.base.join(path);
            let done = copy.plan().run_with(&copy.journal(), &mut || {
                if left == 0 {
                    fs::write(copy.base.join("theirs"), "theirs of another size").unwrap();
                    fs::rename(copy.base.join("theirs"), &target).unwrap();
                }
                left = left.wrapping_sub(1);
                Ok(())
            });
            // Refused, or others came after the step: in no case is their file lost.
            let kept = fs::read(&target).is_ok_and(|text| text == b"theirs of another size");
            assert!(kept, "{path} at step {step}: {done:?}");
            if done.is_err() {
                let (base, upper) = copy.opened();
                let journal = Journal::open(&copy.journal()).unwrap().unwrap();
                if journal.can_undo() {
                    let undone = journal.undo(&base, &upper);
                    let kept = fs::read(&target).is_ok_and(|text| text == b"theirs of another size");
                    assert!(kept, "{path} at step {step}: {undone:?}");
                }
            }
        }
    }
}

fn workspace_steps(workspace: &Workspace, steps: &mut usize) {
    let mut all = Stop::before(usize::MAX);
    workspace.plan().run_with(&workspace.journal(), &mut || all.pause()).unwrap();
    *steps = all.made;
}

#[test]
fn a_full_disk_in_the_middle_leaves_a_choice() {
    let workspace = Workspace::over(|base| fs::write(base.join("a"), "base").unwrap());
    let view = workspace.view();
    write(&view, b"a", b"OURS");
    view.file(b"new", b"ours");
    let wanted = tree(&view);
    drop(view);
    let before = tree_of(&workspace.base);
    let mut count = 0;
    let full = |count: &mut usize, at: usize| {
        *count += 1;
        if *count == at {
            return Err(WorkspaceError {
                what: "cannot write new: No space left on device".to_owned(),
                errno: Some(28),
            });
        }
        Ok(())
    };
    let error = workspace.plan().run_with(&workspace.journal(), &mut || full(&mut count, 3)).unwrap_err();
    assert_eq!(error.errno, Some(28));
    assert!(error.what.ends_with("nothing is changed yet; the commit can be continued or undone"), "{error}");
    let (base, upper) = workspace.opened();
    Journal::open(&workspace.journal()).unwrap().unwrap().undo(&base, &upper).unwrap();
    assert_same(&tree_of(&workspace.base), &before, "undone");
    workspace.commit();
    assert_same(&tree_of(&workspace.base), &wanted, "committed after all");
}

#[test]
fn a_broken_journal_is_refused_and_an_empty_one_is_none() {
    let workspace = Workspace::over(|_| {});
    fs::create_dir(workspace.journal()).unwrap();
    fs::write(workspace.journal().join("steps.new"), "{").unwrap();
    assert!(Journal::open(&workspace.journal()).unwrap().is_none());
    assert!(!workspace.journal().exists());
    fs::create_dir(workspace.journal()).unwrap();
    fs::write(workspace.journal().join("steps"), "{").unwrap();
    Journal::open(&workspace.journal()).unwrap_err();
}

#[test]
fn a_hundred_changes_in_a_large_tree_touch_little_of_it() {
    let workspace = Workspace::over(|base| {
        for directory in 0..20 {
            let path = base.join(format!("d{directory}"));
            fs::create_dir(&path).unwrap();
            for file in 0..100 {
                fs::write(path.join(format!("f{file}")), "content").unwrap();
            }
        }
    });
    let view = workspace.view();
    for number in 0..100 {
        let directory = view.find(format!("d{}", number % 20).as_bytes()).unwrap().node;
        let file = view.find_in(&directory, format!("f{number}").as_bytes()).unwrap().node;
        view.open(&file, OpenFlags::READ_WRITE).write(b"CONTENT", 0, WriteOrigin::Caller).unwrap();
    }
    drop(view);
    let unread = accessed(&workspace.base);
    let used = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).tv_nsec;
    let (begun, before) = (Instant::now(), used());
    assert_eq!(workspace.list().len(), 100);
    println!("100 changes listed in {:?}, {} us of the processor", begun.elapsed(), (used() - before) / 1000);
    assert_eq!(accessed(&workspace.base), unread, "no directory of the base is read");
}

/// Access times of the directories: a listing would change them, as they are older than the last change.
fn accessed(base: &Path) -> Vec<(i64, i64)> {
    let entries = fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path());
    let mut times: Vec<_> =
        entries.map(|path| fs::metadata(path).unwrap()).map(|meta| (meta.atime(), meta.atime_nsec())).collect();
    times.sort();
    times
}

#[test]
fn a_staging_directory_of_somebody_else_is_not_used() {
    if !is_root() {
        return;
    }
    let workspace = Workspace::over(|base| {
        fs::write(base.join("a"), "base").unwrap();
        fs::set_permissions(base, fs::Permissions::from_mode(0o777)).unwrap();
    });
    let view = workspace.view();
    write(&view, b"a", b"OURS");
    view.file(b"new", b"ours");
    drop(view);
    let before = fs::read(workspace.base.join("a")).unwrap();
    let mut count = 0;
    // A user who may write to the base puts a directory of his own, with a link in it, in the place of the staging one.
    let error = workspace.plan().run_with(&workspace.journal(), &mut || {
        count += 1;
        if count == 2 {
            let stage = names(&workspace.base).into_iter().find(|name| name.starts_with(".wh.")).unwrap();
            let stage = workspace.base.join(stage);
            fs::rename(&stage, workspace.base.join("stolen")).unwrap();
            fs::create_dir(&stage).unwrap();
            for number in 0..4 {
                symlink(workspace.base.join("a"), stage.join(number.to_string())).unwrap();
            }
            std::os::unix::fs::chown(&stage, Some(1001), Some(1001)).unwrap();
        }
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(error.what.contains("changed by others"), "{error}");
    // Whatever was made, it is the workspace's file or the old one.
    let now = fs::read(workspace.base.join("a")).unwrap();
    assert!(now == before || now == b"OURS", "{now:?}");
    let new = fs::read(workspace.base.join("new"));
    assert!(new.is_err() || new.unwrap() == b"ours");
    // Another process does not use it either.
    let (base, upper) = workspace.opened();
    let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
    let error = journal.resume(&base, &upper).unwrap_err();
    assert!(error.what.contains("is not the staging directory"), "{error}");
}

/// A small file system, unmounted when this is dropped.
struct SmallDisk<'a>(&'a Path);

impl SmallDisk<'_> {
    fn mount(at: &Path, options: &str) {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).status().unwrap();
        assert!(mounted.success());
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_full_base_is_left_as_it_was_and_takes_the_commit_when_it_has_room() {
    if !is_root() {
        return;
    }
    let workspace = Workspace::over(|base| {
        SmallDisk::mount(base, "size=1m");
        fs::write(base.join("a"), "base").unwrap();
    });
    let disk = SmallDisk(&workspace.base);
    let view = workspace.view();
    write(&view, b"a", b"OURS");
    let (_, file) = view.file(b"large", b"");
    file.write(&vec![7; 3 << 20], 0, WriteOrigin::Caller).unwrap();
    let wanted = tree(&view);
    drop((file, view));
    let before = tree_of(&workspace.base);
    for is_undone in [true, false] {
        let error = workspace.plan().run(&workspace.journal()).unwrap_err();
        assert_eq!(error.errno, Some(28), "{error}");
        assert!(error.what.ends_with("nothing is changed yet; the commit can be continued or undone"), "{error}");
        let (base, upper) = workspace.opened();
        let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
        if is_undone {
            journal.undo(&base, &upper).unwrap();
            assert_same(&tree_of(&workspace.base), &before, "undone");
        } else {
            let grown = Command::new("mount").args(["-o", "remount,size=16m"]).arg(&workspace.base).status().unwrap();
            assert!(grown.success());
            journal.resume(&base, &upper).unwrap();
            assert_same(&tree_of(&workspace.base), &wanted, "continued");
        }
    }
    workspace.assert_clean();
    drop(disk);
}

/// Environment of the process that is killed: the directories of the workspace, and the step.
const VICTIM: &str = "NACRE_WORKSPACE_VICTIM";

#[test]
fn a_killed_process_is_followed_by_another_one() {
    let fill = |base: &Path| {
        fs::write(base.join("changed"), "base").unwrap();
        fs::write(base.join("old"), "base").unwrap();
        fs::create_dir(base.join("gone")).unwrap();
    };
    if let Ok(victim) = std::env::var(VICTIM) {
        let (directory, step) = victim.split_once('|').unwrap();
        let (directory, mut left) = (Path::new(directory), step.parse::<u32>().unwrap());
        let base = crate::Base::open(&[directory.join("base")]).unwrap();
        let upper = crate::Upper::open(&directory.join("changes")).unwrap();
        let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
        let plan = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default()).unwrap();
        plan.run_with(&directory.join("commit"), &mut || {
            if left == 0 {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            }
            left -= 1;
            Ok(())
        })
        .unwrap();
        return;
    }
    let mut killed = 0;
    for step in 0.. {
        let workspace = Workspace::over(fill);
        let view = workspace.view();
        write(&view, b"changed", b"CHANGED");
        view.layer.rename(&view.caller, &view.root, name("old"), &view.root, name("new"), RenameFlags(0)).unwrap();
        view.layer.rmdir(&view.caller, &view.root, name("gone")).unwrap();
        view.file(b"added", b"added");
        let wanted = tree(&view);
        drop(view);
        let directory = workspace.base.parent().unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::commit::a_killed_process_is_followed_by_another_one"])
            .env(VICTIM, format!("{}|{step}", directory.display()))
            .output()
            .unwrap()
            .status;
        if status.success() {
            assert_same(&tree_of(&workspace.base), &wanted, "not killed");
            break;
        }
        assert_eq!(status.signal(), Some(9));
        killed += 1;
        let (base, upper) = workspace.opened();
        Journal::open(&workspace.journal()).unwrap().unwrap().resume(&base, &upper).unwrap();
        assert_same(&tree_of(&workspace.base), &wanted, &format!("killed before step {step}"));
        workspace.assert_clean();
    }
    assert!(killed > 10, "{killed}");
}

#[test]
fn several_bases_are_compared() {
    let workspace = Workspace::over(|base| {
        for half in ["one", "two"] {
            fs::create_dir_all(base.join(half).join("d")).unwrap();
            fs::write(base.join(half).join("d/both"), half).unwrap();
            fs::write(base.join(half).join("d").join(half), half).unwrap();
        }
    });
    let bases = [workspace.base.join("one"), workspace.base.join("two")];
    // The form of an upper in which the lower file was removed, the upper one changed, and one added.
    let upper = workspace.upper_path();
    fs::create_dir(upper.join("d")).unwrap();
    fs::write(upper.join("d/.wh.two"), "").unwrap();
    fs::write(upper.join("d/both"), "changed").unwrap();
    fs::write(upper.join("d/new"), "").unwrap();
    let base = crate::Base::open(&bases).unwrap();
    let upper = crate::Upper::open(&workspace.changes).unwrap();
    let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
    let paths: Vec<String> = changes.iter().map(|change| change.path.escape_ascii().to_string()).collect();
    assert_eq!(paths, ["d/both", "d/new", "d/two"]);
    assert_eq!(changes[0].old.as_ref().unwrap().size, 3, "the upper directory's file is on top");
}

#[test]
fn a_torn_line_of_the_journal_is_a_phase_that_did_not_begin() {
    let fill = |base: &Path| fs::write(base.join("a"), "base").unwrap();
    let mut count = Stop::before(usize::MAX);
    let first = Workspace::over(fill);
    write(&first.view(), b"a", b"OURS");
    first.plan().run_with(&first.journal(), &mut || count.pause()).unwrap();
    let mut torn = 0;
    for step in 0..count.made {
        let workspace = Workspace::over(fill);
        write(&workspace.view(), b"a", b"OURS");
        let mut stop = Stop::before(step);
        workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
        let phase = workspace.journal().join("phase");
        let mut text = fs::read(&phase).unwrap_or_default();
        text.extend(b"\"Publ");
        fs::write(&phase, &text).unwrap();
        let (base, upper) = workspace.opened();
        let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
        assert!(!fs::read(&phase).unwrap().ends_with(b"\"Publ"), "the half line is cut off");
        journal.resume(&base, &upper).unwrap();
        assert_eq!(looked_at(&workspace.base.join("a")).2, b"OURS");
        workspace.assert_clean();
        torn += 1;
    }
    assert!(torn > 5, "{torn}");
}

#[test]
fn an_undoing_that_is_stopped_before_any_step_is_repeated() {
    let workspace = || {
        let workspace = Workspace::over(|base| {
            fs::create_dir(base.join("d")).unwrap();
            fs::write(base.join("d/f"), "base").unwrap();
            fs::write(base.join("l"), "base").unwrap();
            fs::hard_link(base.join("l"), base.join("l2")).unwrap();
        });
        let view = workspace.view();
        view.layer.rename(&view.caller, &view.root, name("d"), &view.root, name("e"), RenameFlags(0)).unwrap();
        let directory = view.find(b"e").unwrap().node;
        view.layer.unlink(&view.caller, &directory, name("f")).unwrap();
        view.layer.symlink(&view.caller, &directory, name("f"), b"target").unwrap();
        write(&view, b"l", b"OURS");
        drop(view);
        workspace
    };
    let mut all = Stop::before(usize::MAX);
    let first = workspace();
    first.plan().run_with(&first.journal(), &mut || all.pause()).unwrap();
    let mut repeated = 0;
    for step in 0..all.made {
        for undone in 0.. {
            let workspace = workspace();
            let before = tree_of(&workspace.base);
            let mut stop = Stop::before(step);
            workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
            let (base, upper) = workspace.opened();
            let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
            if !journal.can_undo() {
                break;
            }
            let mut again = Stop::before(undone);
            let is_done = journal.undo_with(&base, &upper, &mut || again.pause()).is_ok();
            if !is_done {
                Journal::open(&workspace.journal()).unwrap().unwrap().undo(&base, &upper).unwrap();
                repeated += 1;
            }
            assert_same(&tree_of(&workspace.base), &before, &format!("step {step}, undone until {undone}"));
            if is_done {
                break;
            }
        }
    }
    assert!(repeated > 50, "{repeated}");
}

#[test]
fn what_others_write_to_a_file_with_several_names_after_a_kill_stays() {
    let workspace = || {
        let workspace = Workspace::over(|base| {
            fs::write(base.join("l"), "base").unwrap();
            fs::hard_link(base.join("l"), base.join("l2")).unwrap();
        });
        write(&workspace.view(), b"l", b"OURS");
        workspace
    };
    let mut all = Stop::before(usize::MAX);
    let first = workspace();
    first.plan().run_with(&first.journal(), &mut || all.pause()).unwrap();
    let mut tried = 0;
    for undo in [false, true] {
        for step in 0..all.made {
            let workspace = workspace();
            let mut stop = Stop::before(step);
            workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
            let path = workspace.base.join("l2");
            let is_begun = names(&workspace.base).iter().any(|stage| {
                stage.contains(".wh.") && names(&workspace.base.join(stage)).iter().any(|name| name.ends_with(".begun"))
            });
            let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
            if is_begun || undo && !journal.can_undo() {
                continue;
            }
            fs::write(&path, "theirs").unwrap();
            let (base, upper) = workspace.opened();
            // Either is refused, or leaves the file alone.
            let _ = if undo { journal.undo(&base, &upper) } else { journal.resume(&base, &upper).map(drop) };
            assert_eq!(looked_at(&path).2, b"theirs", "step {step}, undo: {undo}");
            tried += 1;
        }
    }
    assert!(tried > 10, "{tried}");
}

#[test]
fn what_others_make_in_a_removed_directory_during_the_commit_is_not_deleted() {
    for replace in [false, true] {
        let workspace = Workspace::over(|base| {
            fs::create_dir(base.join("d")).unwrap();
            fs::write(base.join("d/x"), "base").unwrap();
        });
        let view = workspace.view();
        let directory = view.find(b"d").unwrap().node;
        view.layer.unlink(&view.caller, &directory, name("x")).unwrap();
        view.layer.rmdir(&view.caller, &view.root, name("d")).unwrap();
        if replace {
            drop(view.file(b"d", b"ours"));
        }
        drop(view);
        let plan = workspace.plan();
        fs::write(workspace.base.join("d/new"), "theirs").unwrap();
        let error = plan.run(&workspace.journal()).unwrap_err();
        assert!(error.what.contains("changed by others"), "{error}");
        let (base, upper) = workspace.opened();
        Journal::open(&workspace.journal()).unwrap().unwrap().undo(&base, &upper).unwrap();
        assert_eq!(looked_at(&workspace.base.join("d/new")).2, b"theirs");
    }
}

#[test]
fn a_directory_that_the_commit_works_in_is_not_taken_away() {
    let workspace = Workspace::over(|base| fs::create_dir_all(base.join("home/state")).unwrap());
    let view = workspace.view();
    view.layer.rename(&view.caller, &view.root, name("home"), &view.root, name("x"), RenameFlags(0)).unwrap();
    drop(view);
    let mut plan = workspace.plan();
    plan.protect(&[workspace.base.join("home/state")]);
    let error = plan.run(&workspace.journal()).unwrap_err();
    assert!(error.what.contains("home/state"), "{error}");
    assert!(!workspace.journal().exists());
    assert_eq!(names(&workspace.base), ["home"]);
}

#[test]
fn another_directory_in_place_of_the_base_gets_nothing() {
    let workspace = Workspace::over(|_| {});
    drop(workspace.view().file(b"added", b"ours"));
    let mut stop = Stop::before(6);
    workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
    let away = workspace.base.with_file_name("away");
    fs::rename(&workspace.base, &away).unwrap();
    fs::create_dir(&workspace.base).unwrap();
    let (base, upper) = workspace.opened();
    let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
    let error = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default()).unwrap_err();
    assert!(error.what.contains("another directory"), "{error}");
    for undo in [false, true] {
        let journal = Journal::open(&workspace.journal()).unwrap().unwrap();
        let refused = if undo { journal.undo(&base, &upper) } else { journal.resume(&base, &upper).map(drop) };
        assert!(refused.unwrap_err().what.contains("another directory"));
    }
    assert_eq!(names(&workspace.base), [""; 0]);
}

#[test]
fn a_staging_directory_that_the_owner_of_the_base_has_exchanged_is_refused() {
    if !is_root() {
        return;
    }
    let workspace = Workspace::over(|base| std::os::unix::fs::chown(base, Some(1000), Some(1000)).unwrap());
    drop(workspace.view().file(b"added", b"ours"));
    let mut stop = Stop::before(3);
    workspace.plan().run_with(&workspace.journal(), &mut || stop.pause()).unwrap_err();
    let stage = workspace.base.join(names(&workspace.base).pop().unwrap());
    fs::rename(&stage, workspace.base.join("away")).unwrap();
    fs::create_dir(&stage).unwrap();
    fs::write(stage.join("file"), "of another user").unwrap();
    std::os::unix::fs::chown(&stage, Some(1000), Some(1000)).unwrap();
    let (base, upper) = workspace.opened();
    let error = Journal::open(&workspace.journal()).unwrap().unwrap().resume(&base, &upper).unwrap_err();
    assert!(error.what.contains("is not the staging directory"), "{error}");
    assert_eq!(looked_at(&stage.join("file")).2, b"of another user");
}

#[test]
fn a_changed_file_with_several_names_that_is_not_found_in_the_base_is_refused() {
    let workspace = Workspace::over(|base| {
        fs::write(base.join("a"), "base").unwrap();
        fs::hard_link(base.join("a"), base.join("b")).unwrap();
    });
    write(&workspace.view(), b"a", b"OURS");
    // As where the view and the commit see other inode numbers.
    let links = workspace.changes.join("work/links");
    for link in names(&links) {
        let parts: Vec<&str> = link.split('-').collect();
        if let [label, ino, birth] = parts[..] {
            let other = u64::from_str_radix(ino, 16).unwrap() + (1 << 50);
            fs::rename(links.join(&link), links.join(format!("{label}-{other:x}-{birth}"))).unwrap();
        }
    }
    let _ = fs::remove_file(workspace.upper_path().join("a"));
    let (base, upper) = workspace.opened();
    let changes = crate::changes(&base, &upper, &crate::Selection::default()).unwrap();
    let error = crate::CommitPlan::new(&base, &upper, changes, crate::CommitOptions::default()).unwrap_err();
    assert!(error.what.contains("inode numbers"), "{error}");
}
