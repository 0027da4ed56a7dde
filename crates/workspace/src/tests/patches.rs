//! Patches: `git apply` and `patch -p1` make the base's files those of the view.

use super::support::Workspace;
use crate::Selection;
use nacre_vfs::{OpenFlags, RenameFlags, SetAttr, WriteOrigin};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

fn patch_of(workspace: &Workspace) -> Vec<u8> {
    let (base, upper) = workspace.opened();
    let changes = crate::changes(&base, &upper, &Selection::default()).unwrap();
    let mut text = Vec::new();
    crate::patch(&base, &upper, &changes, &mut text).unwrap();
    text
}

/// Applies a patch in a directory.
fn apply(program: &str, arguments: &[&str], directory: &Path, patch: &[u8]) {
    let file = directory.with_extension("patch");
    fs::write(&file, patch).unwrap();
    let output = Command::new(program)
        .args(arguments)
        .env("GIT_CEILING_DIRECTORIES", directory.parent().unwrap())
        .current_dir(directory)
        .stdin(Stdio::from(fs::File::open(&file).unwrap()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{program}: {said}\n{}", String::from_utf8_lossy(patch));
}

/// The files of a tree as git sees them: executable bit, link or not, content.
fn files(directory: &Path) -> BTreeMap<PathBuf, (bool, bool, Vec<u8>)> {
    let (mut found, mut waiting) = (BTreeMap::new(), vec![directory.to_path_buf()]);
    while let Some(at) = waiting.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let (path, meta) = (entry.as_ref().unwrap().path(), entry.unwrap().metadata().unwrap());
            let name = path.strip_prefix(directory).unwrap().to_path_buf();
            if meta.is_dir() {
                waiting.push(path);
            } else if meta.is_symlink() {
                let target = fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec();
                found.insert(name, (false, true, target));
            } else {
                found.insert(name, (meta.permissions().mode() & 0o100 != 0, false, fs::read(&path).unwrap()));
            }
        }
    }
    found
}

fn numbered(changed: &[usize]) -> Vec<u8> {
    let line =
        |number| if changed.contains(&number) { format!("changed {number}\n") } else { format!("line {number}\n") };
    (0..200).map(line).collect::<String>().into_bytes()
}

/// A base with files of many kinds, and changes of all of them; with binary ones only where asked.
fn workspace(binary: bool) -> Workspace {
    let workspace = Workspace::over(|base| {
        for (name, content) in [
            ("text", numbered(&[])),
            ("gone", b"gone\n".to_vec()),
            ("renamed", numbered(&[])),
            ("renamed and changed", numbered(&[])),
            ("tool", b"#!/bin/sh\n".to_vec()),
            ("no end", b"last line".to_vec()),
            ("empty", Vec::new()),
            ("filled", Vec::new()),
        ] {
            fs::write(base.join(name), content).unwrap();
        }
        fs::create_dir_all(base.join("d/deep")).unwrap();
        fs::write(base.join("d/one"), "one\n").unwrap();
        fs::write(base.join("d/deep/two"), "two\n").unwrap();
        fs::create_dir(base.join("removed")).unwrap();
        fs::write(base.join("removed/file"), "file\n").unwrap();
        symlink("old target", base.join("link")).unwrap();
        let odd = OsStr::from_bytes(b"odd \"name\"\t\xff\\");
        fs::write(base.join(odd), "odd\n").unwrap();
        if binary {
            fs::write(base.join("image"), (0..=255).cycle().take(5000).collect::<Vec<u8>>()).unwrap();
        }
    });
    let view = workspace.view();
    let name = |text: &'static str| nacre_vfs::Name::new(text.as_bytes()).unwrap();
    let replace = |path: &[u8], content: &[u8]| {
        let file = view.find(path).unwrap().node;
        view.change(&file, SetAttr { size: Some(0), ..SetAttr::default() });
        view.open(&file, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
    };
    let rename = |from: &'static str, to: &'static str| {
        view.layer.rename(&view.caller, &view.root, name(from), &view.root, name(to), RenameFlags(0)).unwrap();
    };
    replace(b"text", &numbered(&[0, 7, 8, 100, 199]));
    replace(b"no end", b"last line\nand one more");
    replace(b"filled", b"no longer empty\n");
    replace(b"odd \"name\"\t\xff\\", b"even\n");
    view.layer.unlink(&view.caller, &view.root, name("gone")).unwrap();
    view.layer.unlink(&view.caller, &view.root, name("empty")).unwrap();
    rename("renamed", "new name");
    rename("renamed and changed", "new name, changed");
    replace(b"new name, changed", &numbered(&[50]));
    rename("d", "e");
    let tool = view.find(b"tool").unwrap().node;
    view.change(&tool, SetAttr { mode: Some(0o755), ..SetAttr::default() });
    let removed = view.find(b"removed").unwrap().node;
    view.layer.unlink(&view.caller, &removed, name("file")).unwrap();
    view.layer.rmdir(&view.caller, &view.root, name("removed")).unwrap();
    view.layer.unlink(&view.caller, &view.root, name("link")).unwrap();
    view.layer.symlink(&view.caller, &view.root, name("link"), b"new target").unwrap();
    let added = view.directory(b"added");
    view.file_in(&added, b"file", b"new\n");
    view.file_in(&added, b"nothing", b"");
    view.layer.symlink(&view.caller, &added, name("to"), b"file").unwrap();
    if binary {
        replace(b"image", &(0..=255).rev().cycle().take(7000).collect::<Vec<u8>>());
        view.file(b"more", &[0; 300]);
        view.layer.unlink(&view.caller, &view.root, name("tool")).unwrap();
        view.layer.symlink(&view.caller, &view.root, name("tool"), b"elsewhere").unwrap();
    }
    drop(view);
    workspace
}

/// A copy of the base.
fn copied(workspace: &Workspace, name: &str) -> PathBuf {
    let copy = workspace.base.with_file_name(name);
    let copied = Command::new("cp").arg("-a").arg(&workspace.base).arg(&copy).status().unwrap();
    assert!(copied.success());
    copy
}

#[test]
fn git_applies_a_patch_and_takes_it_back() {
    for binary in [false, true] {
        let workspace = workspace(binary);
        let (patch, copy) = (patch_of(&workspace), copied(&workspace, "copy"));
        let before = files(&copy);
        apply("git", &["apply", "--whitespace=nowarn", "-"], &copy, &patch);
        workspace.commit();
        assert_eq!(files(&copy), files(&workspace.base));
        apply("git", &["apply", "-R", "--whitespace=nowarn", "-"], &copy, &patch);
        assert_eq!(files(&copy), before);
    }
}

#[test]
fn patch_applies_a_patch() {
    let workspace = workspace(false);
    let (patch, copy) = (patch_of(&workspace), copied(&workspace, "copy"));
    apply("patch", &["-p1", "--no-backup-if-mismatch"], &copy, &patch);
    workspace.commit();
    let (got, wanted) = (files(&copy), files(&workspace.base));
    assert_eq!(got, wanted);
}

#[test]
fn a_workspace_without_changes_has_an_empty_patch() {
    let workspace = Workspace::over(|base| fs::write(base.join("f"), "x").unwrap());
    assert_eq!(patch_of(&workspace), b"");
}
