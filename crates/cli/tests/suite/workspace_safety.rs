//! Workspaces in the face of failures and of other users: unfinished commits, replaced directories, mounts of others.

use crate::mounting::{Namespace, as_root, eventually, is_mounted, mount_entry, needs, run, text};
use crate::workspace::{Desk, tree};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Mounts a tmpfs with these options.
fn tmpfs(options: &str, at: &Path) {
    let output = run("mount", ["-t", "tmpfs", "-o", options, "tmpfs", at.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// A workspace over a small file system, with a change that does not fit into it and another one.
fn too_large() -> (Desk, PathBuf) {
    let desk = Desk::new();
    fs::create_dir(desk.at("small")).unwrap();
    tmpfs("size=1M", &desk.at("small"));
    fs::write(desk.at("small/kept"), "kept").unwrap();
    desk.done(&["create", "w", "--from", "./small", "--at", "view"]);
    let view = desk.at("view");
    fs::write(view.join("large"), vec![7; 2 << 20]).unwrap();
    fs::write(view.join("other"), "other").unwrap();
    (desk, view)
}

/// Fails to commit: nothing is committed (1), or a part of it (5); returns the message.
fn fails(desk: &Desk, words: &[&str]) -> String {
    let mut said = String::new();
    eventually("the view is not in use", || {
        let output = desk.run(words);
        said = text(&output.stdout) + &text(&output.stderr);
        let is_unfinished = output.status.code() == Some(5) && said.contains("the commit is unfinished");
        assert!(matches!(output.status.code(), Some(1 | 5)), "{said}");
        is_unfinished || output.status.code() == Some(1)
    });
    said
}

fn enlarge(desk: &Desk) {
    let small = desk.at("small");
    assert!(run("mount", ["-o", "remount,size=16M", small.to_str().unwrap()]).status.success());
}

/// Nothing shows or changes a workspace whose commit is unfinished: what is written meanwhile would be lost.
#[test]
fn an_unfinished_commit_keeps_the_view_away() {
    needs!(as_root());
    let (desk, view) = too_large();
    let said = fails(&desk, &["commit", "w"]);
    assert!(said.contains("the view stays unmounted") && said.contains("commit --undo w"), "{said}");
    assert!(!is_mounted(&view));
    for (words, code) in [
        (&["mount", "w"][..], 5),
        (&["create", "nested", "--from", "w"], 5),
        (&["run", "w", "--", "true"], 125),
        (&["diff", "w"], 5),
        (&["discard", "w"], 5),
        (&["snapshot", "w@s"], 5),
    ] {
        assert!(desk.refused(words, code).contains("interrupted"), "{words:?}");
        assert!(!is_mounted(&view), "{words:?}");
    }
    enlarge(&desk);
    desk.done(&["commit", "w"]);
    assert_eq!(fs::metadata(desk.at("small/large")).unwrap().len(), 2 << 20);
    assert_eq!(fs::read_to_string(desk.at("small/other")).unwrap(), "other");
    desk.done(&["mount", "w"]);
    assert_eq!(tree(&view), tree(&desk.at("small")));
    desk.discarded("w");
}

/// A commit of one path that is continued commits this path alone.
#[test]
fn a_continued_commit_takes_nothing_else() {
    needs!(as_root());
    let (desk, view) = too_large();
    fails(&desk, &["commit", "w", "large"]);
    enlarge(&desk);
    desk.done(&["commit", "w"]);
    assert!(desk.at("small/large").exists() && !desk.at("small/other").exists());
    assert_eq!(text(&desk.run(&["diff", "w"]).stdout), "A other\n");
    desk.done(&["mount", "w"]);
    assert_eq!(fs::read_to_string(view.join("other")).unwrap(), "other");
    desk.discarded("w");
}

/// The mount point below a file system that is not mounted any more gets nothing.
#[test]
fn a_base_that_is_not_mounted_gets_nothing() {
    needs!(as_root());
    let desk = Desk::new();
    let base = desk.at("mounted");
    fs::create_dir(&base).unwrap();
    tmpfs("size=1M", &base);
    let view = PathBuf::from(desk.done(&["create", "w", "--from", "./mounted"]).trim());
    fs::write(view.join("new"), "new").unwrap();
    assert!(run("umount", ["-l", base.to_str().unwrap()]).status.success());
    assert!(fails(&desk, &["commit", "w"]).contains("is another directory"));
    assert_eq!(fs::read_dir(&base).unwrap().count(), 0);
    desk.discarded("w");
}

/// A base whose parent's owner has put a link in its place gets nothing, with and without `-f`.
#[test]
fn a_link_in_the_bases_path_leads_nowhere() {
    needs!(as_root());
    let desk = Desk::new();
    fs::create_dir_all(desk.at("parent/base")).unwrap();
    fs::create_dir_all(desk.at("elsewhere/base")).unwrap();
    let view = PathBuf::from(desk.done(&["create", "w", "--from", "parent/base"]).trim());
    fs::write(view.join("ld.so.preload"), "/hostile.so").unwrap();
    fs::rename(desk.at("parent"), desk.at("moved")).unwrap();
    std::os::unix::fs::symlink(desk.at("elsewhere"), desk.at("parent")).unwrap();
    assert!(fails(&desk, &["commit", "w"]).contains("symbolic links"));
    assert!(fails(&desk, &["commit", "-f", "w"]).contains("symbolic links"));
    assert_eq!(fs::read_dir(desk.at("elsewhere/base")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(desk.at("moved/base")).unwrap().count(), 0);
    desk.discarded("w");
}

/// A commit does not take away the directory of workspaces: its journal lies there.
#[test]
fn a_commit_does_not_move_its_own_journal() {
    needs!(as_root());
    let desk = Desk::new();
    let base = desk.at("base");
    let state = base.join(".local/state");
    let nacre = |words: &[&str]| crate::mounting::finish(desk.command(words).env("NACRE_STATE_DIR", &state));
    let created = nacre(&["create", "w", "--from", "./base", "--at", "view"]);
    assert!(created.status.success(), "{}", text(&created.stderr));
    fs::write(base.join(".local/other"), "").unwrap();
    let view = desk.at("view");
    // The directories that the view shows.
    let moved = run("mv", [view.join(".local"), view.join("moved")]);
    assert!(moved.status.success(), "{}", text(&moved.stderr));
    for words in [&["commit", "w"][..], &["commit", "--ours", "w"]] {
        let mut said = String::new();
        eventually("the view is not in use", || {
            let output = nacre(words);
            said = text(&output.stdout) + &text(&output.stderr);
            assert_ne!(output.status.code(), Some(0), "{said}");
            output.status.code() != Some(5)
        });
        assert!(state.join("workspaces/w/workspace.toml").exists() && !base.join("moved").exists(), "{said}");
        assert_eq!(text(&nacre(&["list", "-H", "-o", "name"]).stdout), "w\n");
    }
    eventually("the view is not in use", || nacre(&["discard", "w"]).status.success());
}

/// A view has no set-user-id programs and devices where the base's mount has none.
#[test]
fn a_view_lifts_no_option_of_its_bases_mount() {
    needs!(as_root());
    let desk = Desk::new();
    let options = |at: &Path| {
        let (.., options, _) = mount_entry(at).unwrap();
        let has = |word: &str| options.split(',').any(|option| option == word);
        [has("nosuid"), has("nodev"), has("noexec")]
    };
    for (number, given) in ["nosuid,nodev,noexec", "nosuid", "suid,dev,exec"].into_iter().enumerate() {
        let (base, name) = (desk.at(&format!("b{number}")), format!("w{number}"));
        fs::create_dir(&base).unwrap();
        tmpfs(given, &base);
        let view = PathBuf::from(desk.done(&["create", &name, "--from", base.to_str().unwrap()]).trim());
        assert_eq!(options(&view), options(&base), "{given}");
        desk.discarded(&name);
    }
}

/// A view that another mount namespace still uses can be written to: nothing is removed below it.
#[test]
fn a_view_in_another_namespace_is_not_discarded() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    fs::write(view.join("new"), "new").unwrap();
    let namespace = Namespace::holding(&view);
    assert!(desk.refused(&["discard", "w"], 5).contains("another mount namespace"));
    fs::write(namespace.at(&view).join("later"), "later").unwrap();
    drop(namespace);
    desk.done(&["mount", "w"]);
    assert_eq!(fs::read_to_string(view.join("new")).unwrap(), "new");
    assert_eq!(fs::read_to_string(view.join("later")).unwrap(), "later");
    desk.discarded("w");
}
