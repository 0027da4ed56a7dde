//! Snapshots within a workspace: copies of its changes, to which it can go back.
//!
//! The callers hold the workspace's exclusive lock, and its view is not mounted.

use super::store::{Workspace, check_name, remove_tree};
use crate::{
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_union::base_log::{HiddenEntry, parse};
use std::{
    collections::HashMap,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// Takes `NAME@SNAPSHOT` apart.
///
/// # Errors
/// There is no `@`, or one of the names cannot be one.
pub fn names(text: &str) -> Result<(&str, &str), Failure> {
    let (workspace, snapshot) = text.split_once('@').ok_or_else(|| {
        Failure::usage(format!("\"{}\" names no snapshot", text.escape_debug())).next("write WORKSPACE@SNAPSHOT")
    })?;
    check_name(workspace)?;
    check_name(snapshot)?;
    Ok((workspace, snapshot))
}

fn place(workspace: &Workspace, snapshot: &str) -> PathBuf {
    workspace.directory.join("snapshots").join(snapshot)
}

/// The snapshots of a workspace, sorted.
pub fn list(workspace: &Workspace) -> Vec<String> {
    let entries = fs::read_dir(workspace.directory.join("snapshots")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| check_name(name).is_ok())
        .collect();
    names.sort();
    names
}

/// Makes a snapshot; `copy` copies a tree with all attributes and hard links.
///
/// # Errors
/// There is a snapshot of this name, or errors of the storage; then there is none.
pub fn create(
    workspace: &Workspace,
    snapshot: &str,
    copy: &dyn Fn(&Path, &Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let target = place(workspace, snapshot);
    if target.exists() {
        return Err(Failure::new(format!("there is a snapshot {}@{snapshot} already", workspace.name))
            .next("choose another name"));
    }
    let above = workspace.directory.join("snapshots");
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&above);
    made.map_err(|error| Failure::io("cannot make", path_text(&above), &error))?;
    copy_whole(&workspace.changes(), &target, &above.join(".new"), copy)
}

/// Goes back to a snapshot: all changes since then are lost. The snapshot stays.
///
/// # Errors
/// There is no such snapshot, or errors of the storage; then nothing has changed.
pub fn rollback(
    workspace: &Workspace,
    snapshot: &str,
    copy: &dyn Fn(&Path, &Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let source = place(workspace, snapshot);
    if !source.is_dir() {
        return Err(Failure::new(format!("there is no snapshot {}@{snapshot}", workspace.name)).exit(Exit::NotFound));
    }
    let (ready, old) = (workspace.directory.join(".changes"), workspace.directory.join(".old"));
    remove_tree(&ready)?;
    remove_tree(&old)?;
    copy_whole(&source, &ready, &workspace.directory.join(".new"), copy)?;
    replace_changes(workspace, &ready)
}

/// Puts another directory with changes in the place of the workspace's.
///
/// # Errors
/// Errors of the storage; then nothing has changed.
pub fn replace_changes(workspace: &Workspace, ready: &Path) -> Result<(), Failure> {
    let changes = workspace.changes();
    let failed = |error: io::Error| Failure::io("cannot replace", path_text(&changes), &error);
    // In one step: a kill leaves the old or the new changes.
    rustix::fs::renameat_with(rustix::fs::CWD, ready, rustix::fs::CWD, &changes, rustix::fs::RenameFlags::EXCHANGE)
        .map_err(|error| failed(error.into()))?;
    // The cage counts anew.
    let accounts = workspace.directory.join("accounts");
    if accounts.is_dir() {
        remove_tree(&accounts)?;
        DirBuilder::new().mode(0o700).create(&accounts).map_err(failed)?;
    }
    remove_tree(ready)
}

/// Copies a directory with changes under a name that it gets when it is complete.
fn copy_whole(
    source: &Path,
    target: &Path,
    unready: &Path,
    copy: &dyn Fn(&Path, &Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    remove_tree(unready)?;
    let made = copy(source, unready).and_then(|()| renumber(source, unready));
    let made = made.and_then(|()| {
        fs::rename(unready, target).map_err(|error| Failure::io("cannot make", path_text(target), &error))
    });
    if made.is_err() {
        remove_tree(unready)?;
    }
    made
}

/// Gives the log of hidden entries of a copy the inode numbers of the copied files.
fn renumber(source: &Path, copy: &Path) -> Result<(), Failure> {
    let failed = |path: &Path| {
        let text = path_text(path);
        move |error: io::Error| Failure::io("cannot copy", &text, &error)
    };
    let mut numbers = HashMap::new();
    for tree in ["upper", "work/links"] {
        let mut waiting = vec![PathBuf::from(tree)];
        while let Some(path) = waiting.pop() {
            let (from, to) = (source.join(&path), copy.join(&path));
            let Ok(old) = fs::symlink_metadata(&from) else { continue };
            let new = fs::symlink_metadata(&to).map_err(failed(&to))?;
            numbers.insert(old.ino(), new.ino());
            if old.is_dir() {
                for entry in fs::read_dir(&from).map_err(failed(&from))? {
                    waiting.push(path.join(entry.map_err(failed(&from))?.file_name()));
                }
            }
        }
    }
    let log = copy.join("base.log");
    let text: String = parse(&fs::read(&log).map_err(failed(&log))?)
        .into_iter()
        .map(|entry| {
            let copy = entry.copy.and_then(|number| numbers.get(&number).copied());
            HiddenEntry { copy, ..entry }.line()
        })
        .collect();
    fs::write(&log, text).map_err(failed(&log))
}
