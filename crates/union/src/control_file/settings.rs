//! The settings in mergerfs' control file: their names and values, and how one is changed.
//!
//! Called by [`super::ControlFile`]. mergerfs(1), "RUNTIME CONFIG", has the names, values and errors: EROFS for a
//! setting that cannot be changed while mounted, ENODATA for an unknown one, EINVAL for a value that is not
//! understood. Words of mergerfs that change nothing in a union are not settings.

use crate::{
    Action, BRANCHES_MAX, BranchMode, CreatePolicy, Hold, Ignored, Union, matching_directories, options, pattern,
    union::Edit,
};
use nacre_vfs::{Errno, Result};
use std::{
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// The emulated version of mergerfs.
const VERSION: &str = "2.40.2-nacre";

/// A setting's name and the function that reads its value.
type Row = (&'static str, fn(&Union) -> Vec<u8>);

const SETTINGS: [Row; 42] = [
    ("branches", |union| branches(union, true)),
    ("category.action", actions),
    ("category.create", creates),
    (
        "category.search",
        |union| if union.shared().rules().newest_times { b"ff,newest".to_vec() } else { b"ff".to_vec() },
    ),
    ("follow-symlinks", |_| b"never".to_vec()),
    ("func.access", |_| b"ff".to_vec()),
    ("func.chmod", |union| action(union, Action::Chmod)),
    ("func.chown", |union| action(union, Action::Chown)),
    ("func.create", create),
    ("func.getattr", |union| if union.shared().rules().newest_times { b"newest".to_vec() } else { b"ff".to_vec() }),
    ("func.getxattr", |_| b"ff".to_vec()),
    ("func.link", |union| action(union, Action::Link)),
    ("func.listxattr", |_| b"ff".to_vec()),
    ("func.mkdir", mkdir),
    ("func.mknod", create),
    ("func.open", |_| b"ff".to_vec()),
    ("func.readdir", |_| b"seq".to_vec()),
    ("func.readlink", |_| b"ff".to_vec()),
    ("func.removexattr", |union| action(union, Action::RemoveXattr)),
    ("func.rename", |union| action(union, Action::Rename)),
    ("func.rmdir", |union| action(union, Action::Rmdir)),
    ("func.setxattr", |union| action(union, Action::SetXattr)),
    ("func.symlink", create),
    ("func.truncate", |union| action(union, Action::Truncate)),
    ("func.unlink", |union| action(union, Action::Unlink)),
    ("func.utimens", |union| action(union, Action::Utimens)),
    ("ignorepponrename", |_| b"true".to_vec()),
    ("inodecalc", |_| b"passthrough".to_vec()),
    ("link-exdev", |_| b"passthrough".to_vec()),
    ("link_cow", |union| bool_text(union.shared().options.link_cow)),
    ("minfreespace", |union| union.shared().placing.rules.load().min_free.to_string().into_bytes()),
    ("moveonenospc", |union| union.shared().rules().move_when_full.map_or_else(|| b"false".to_vec(), written_policy)),
    ("nullrw", |_| b"false".to_vec()),
    ("pid", |_| std::process::id().to_string().into_bytes()),
    ("rename-exdev", |_| b"passthrough".to_vec()),
    ("security_capability", |union| bool_text(union.shared().options.capabilities)),
    ("srcmounts", |union| branches(union, false)),
    ("statfs", |union| if union.shared().rules().figures_of_path { b"full".to_vec() } else { b"base".to_vec() }),
    ("statfs_ignore", |union| {
        let ignored = match union.shared().rules().figures_ignored {
            Ignored::Nothing => "none",
            Ignored::ReadOnly => "ro",
            Ignored::NoCreate => "nc",
        };
        ignored.as_bytes().to_vec()
    }),
    ("symlinkify", |union| bool_text(union.shared().options.symlinkify.is_some())),
    ("symlinkify_timeout", |union| {
        union.shared().options.symlinkify.map_or(3600, |age| age.as_secs()).to_string().into_bytes()
    }),
    ("version", |_| VERSION.as_bytes().to_vec()),
];

/// The names of all settings.
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|(key, _)| *key)
}

fn row(key: &str) -> Option<&'static Row> {
    SETTINGS.iter().find(|(known, _)| options::same(key, known))
}

/// The value of a setting.
pub(super) fn get(union: &Union, key: &str) -> Option<Vec<u8>> {
    row(key).map(|(_, value)| value(union))
}

/// Changes a setting. Setting any setting to its present value succeeds without effect.
///
/// # Errors
/// See the file's head; for `branches`, the errors of adding and removing branches.
pub(super) fn set(union: &Union, key: &str, value: &[u8]) -> Result<()> {
    // The caches that mergerfs drops on demand do not exist here.
    if key.starts_with("cmd.") {
        return Ok(());
    }
    let (known, value_now) = row(key).ok_or(Errno::ENODATA)?;
    match *known {
        "branches" | "srcmounts" => {
            let edits = edits(&present(union), value)?;
            // All changes are made or none, as far as can be checked beforehand.
            let missing = |edit: &Edit| matches!(edit, Edit::Add { text, .. } if !is_directory(text));
            if edits.iter().any(missing) {
                return Err(Errno::ENOENT);
            }
            edits.into_iter().try_for_each(|edit| union.edit(edit))
        }
        known if is_live(known) => {
            let value = std::str::from_utf8(value).map_err(|_| Errno::EINVAL)?;
            union.edit(Edit::Word(format!("{}={value}", known.replace('_', "-"))))
        }
        _ if value_now(union) == value => Ok(()),
        _ => Err(Errno::EROFS),
    }
}

fn present(union: &Union) -> Vec<Listed> {
    let branches = union.shared().branches();
    branches.iter().map(|branch| Listed { path: branch.name.clone(), mode: (*branch.mode()).clone() }).collect()
}

fn is_directory(text: &[u8]) -> bool {
    let parsed = crate::parse_one(std::ffi::OsStr::from_bytes(text), BranchMode::rw());
    parsed.is_ok_and(|(path, _)| path.is_dir())
}

/// A branch of the union, or an item of a value of `branches`.
#[derive(Clone, Debug)]
struct Listed {
    path: PathBuf,
    mode: BranchMode,
}

impl Listed {
    /// The mode in mergerfs' words.
    fn shown(&self) -> &'static str {
        shown(&self.mode)
    }
}

/// Parses a value of `branches` into changes: `+<LIST` adds branches on top, `+LIST` and `+>LIST` at the
/// bottom; `-LIST` removes branches, `-<` the first one, `->` the last one; any other value, also after `=`, is
/// the whole list.
fn edits(present: &[Listed], value: &[u8]) -> Result<Vec<Edit>> {
    let on_top = |list: &[u8]| -> Result<Vec<Edit>> {
        Ok(new(present, list)?.into_iter().rev().map(|branch| add(&branch, 0)).collect())
    };
    let at_the_bottom = |list: &[u8]| -> Result<Vec<Edit>> {
        Ok(new(present, list)?.into_iter().map(|branch| add(&branch, usize::MAX)).collect())
    };
    let remove =
        |branch: Option<&Listed>| Ok(branch.map(|branch| Edit::Remove(branch.path.clone())).into_iter().collect());
    match value {
        [b'+', b'<', list @ ..] => on_top(list),
        [b'+', b'>', list @ ..] | [b'+', list @ ..] => at_the_bottom(list),
        [b'-', b'<'] => remove(present.first()),
        [b'-', b'>'] => remove(present.last()),
        [b'-', list @ ..] => {
            let named = parsed(list)?;
            // Patterns match the present branches.
            let (patterns, mut gone): (Vec<Listed>, Vec<Listed>) =
                named.into_iter().partition(|branch| pattern::is_pattern(&branch.path));
            let matching = present.iter().filter(|branch| {
                !is_in(&gone, branch) && patterns.iter().any(|of| pattern::matches(&of.path, &branch.path))
            });
            let matching: Vec<Listed> = matching.cloned().collect();
            gone.extend(matching);
            // At least one branch has to remain.
            if present.iter().all(|branch| is_in(&gone, branch)) {
                return Err(Errno::EINVAL);
            }
            Ok(gone.into_iter().map(|branch| Edit::Remove(branch.path)).collect())
        }
        [b'=', list @ ..] | list => replaced(present, &listed(list)?),
    }
}

fn add(branch: &Listed, place: usize) -> Edit {
    Edit::Add { text: written(branch), place }
}

fn is_in(list: &[Listed], branch: &Listed) -> bool {
    list.iter().any(|other| other.path == branch.path)
}

/// The branches of a list to add: none may already be present or be listed twice, and the total must not exceed
/// the maximum.
fn new(present: &[Listed], list: &[u8]) -> Result<Vec<Listed>> {
    let new = listed(list)?;
    let too_many = present.len() + new.len() > BRANCHES_MAX;
    if too_many || new.iter().any(|branch| is_in(present, branch)) { Err(Errno::EINVAL) } else { Ok(new) }
}

/// The changes from the present branches to a whole new list. Branches in both lists stay, and get their new
/// attributes where mergerfs has words for the difference.
fn replaced(present: &[Listed], wanted: &[Listed]) -> Result<Vec<Edit>> {
    let stays: Vec<&Path> = present.iter().filter(|branch| is_in(wanted, branch)).map(|branch| &*branch.path).collect();
    let kept: Vec<&Listed> = wanted.iter().filter(|branch| is_in(present, branch)).collect();
    // Files open on a branch would be lost if it were removed and added again at another position.
    if wanted.is_empty() || !kept.iter().map(|branch| &*branch.path).eq(stays) {
        return Err(Errno::EINVAL);
    }
    let mut edits: Vec<Edit> = Vec::new();
    // From the top: all branches above a position are added already, and removals come last, so that at least
    // one branch always remains. A removed branch is below a new one at the same position.
    let mut list: Vec<&Path> = present.iter().map(|branch| &*branch.path).collect();
    let mut above: Option<&Path> = None;
    for branch in wanted {
        if !is_in(present, branch) {
            let place = list.iter().position(|path| Some(*path) == above).map_or(0, |above| above + 1);
            list.insert(place, &branch.path);
            edits.push(add(branch, place));
        }
        above = Some(&branch.path);
    }
    for branch in kept {
        let before = present.iter().find(|before| before.path == branch.path);
        if before.is_some_and(|before| before.shown() != branch.shown() || before.mode.min_free != branch.mode.min_free)
        {
            edits.push(Edit::Modify { path: branch.path.clone(), mode: branch.mode.to_string() });
        }
    }
    let gone = present.iter().filter(|branch| !is_in(wanted, branch));
    edits.extend(gone.map(|branch| Edit::Remove(branch.path.clone())));
    Ok(edits)
}

/// Parses a list of branches divided by colons; those without attributes are `rw`, as in every pool.
fn parsed(list: &[u8]) -> Result<Vec<Listed>> {
    let parsed = crate::parse_pool(std::ffi::OsStr::from_bytes(list)).map_err(|_| Errno::EINVAL)?;
    Ok(parsed.into_iter().map(|(path, mode)| Listed { path, mode }).collect())
}

/// The branches of a list, each once, with patterns expanded to all matching directories.
fn listed(list: &[u8]) -> Result<Vec<Listed>> {
    let mut all = Vec::new();
    for Listed { path, mode } in parsed(list)? {
        all.extend(matching_directories(&path).into_iter().map(|path| Listed { path, mode: mode.clone() }));
    }
    let is_twice = |at: usize, branch: &Listed| all.iter().skip(at + 1).any(|other| other.path == branch.path);
    if all.iter().enumerate().any(|(at, branch)| is_twice(at, branch)) { Err(Errno::EINVAL) } else { Ok(all) }
}

/// Formats a branch as users write it.
fn written(branch: &Listed) -> Vec<u8> {
    let mut text = crate::escape_path(&branch.path).into_vec();
    text.push(b'=');
    text.extend_from_slice(branch.mode.to_string().as_bytes());
    text
}

fn shown(mode: &BranchMode) -> &'static str {
    match (mode.writable(), mode.creates()) {
        (true, true) => "RW",
        (true, false) => "NC",
        (false, _) => "RO",
    }
}

fn branches(union: &Union, modes: bool) -> Vec<u8> {
    let shared = union.shared();
    let text = |branch: &std::sync::Arc<crate::branches::Branch>| {
        let name = crate::escape_path(&branch.name).into_vec();
        let mode = shown(&branch.mode());
        let least = branch.mode().min_free.map_or_else(String::new, |bytes| format!(",{bytes}"));
        if modes { [&name, b"=".as_slice(), mode.as_bytes(), least.as_bytes()].concat() } else { name }
    };
    let all: Vec<Vec<u8>> = shared.branches().iter().map(text).collect();
    all.join(&b':')
}

fn bool_text(value: bool) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// Whether a setting can be changed while mounted.
fn is_live(key: &str) -> bool {
    const OTHERS: [&str; 9] = [
        "category.action",
        "category.create",
        "category.search",
        "func.create",
        "func.getattr",
        "func.mkdir",
        "minfreespace",
        "moveonenospc",
        "statfs",
    ];
    OTHERS.contains(&key) || key == "statfs_ignore" || key.strip_prefix("func.").and_then(Action::named).is_some()
}

fn action(union: &Union, action: Action) -> Vec<u8> {
    union.shared().rules().actions.of(action).to_string().into_bytes()
}

/// The policies of all changing functions, each once, sorted by name.
fn actions(union: &Union) -> Vec<u8> {
    let mut policies = Action::ALL.map(|of| action(union, of)).to_vec();
    policies.sort();
    policies.dedup();
    policies.join(&b',')
}

/// The policies of the creating functions, each once, sorted by name.
fn creates(union: &Union) -> Vec<u8> {
    let mut policies = vec![create(union), mkdir(union)];
    policies.sort();
    policies.dedup();
    policies.join(&b',')
}

fn create(union: &Union) -> Vec<u8> {
    written_policy(union.shared().placing.rules.load().create)
}

fn mkdir(union: &Union) -> Vec<u8> {
    let rules = union.shared().placing.rules.load();
    written_policy(rules.create_directories.unwrap_or(rules.create))
}

/// Formats a policy as mergerfs does: with the cache time of the figures of free space only if one was given.
fn written_policy(policy: CreatePolicy) -> Vec<u8> {
    let text = policy.to_string();
    text.strip_suffix(&format!(":{}", Hold::DEFAULT.0)).unwrap_or(&text).as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(value: &str) -> Result<Vec<String>> {
        let branch = |path: &str, mode: &str| Listed { path: path.into(), mode: BranchMode::parse(mode).unwrap() };
        let present = [branch("/a", "rw"), branch("/b", "rw+tier"), branch("/c", "ro+wh")];
        let shown = |edit: Edit| match edit {
            Edit::Add { text, place: usize::MAX } => format!("+>{}", String::from_utf8_lossy(&text)),
            Edit::Add { text, place } => format!("+{place} {}", String::from_utf8_lossy(&text)),
            Edit::Modify { path, mode } => format!("{}={mode}", path.display()),
            Edit::Remove(path) => format!("-{}", path.display()),
            Edit::Word(word) => word,
        };
        Ok(edits(&present, value.as_bytes())?.into_iter().map(shown).collect())
    }

    #[test]
    fn branches_are_edited_as_the_manual_says() {
        for (value, expected) in [
            ("+/x", &["+>/x=rw"][..]),
            ("+</x:/y", &["+0 /y=rw", "+0 /x=rw"]),
            ("+>/x:/y=RO", &["+>/x=rw", "+>/y=ro"]),
            ("-/a:/c", &["-/a", "-/c"]),
            ("-<", &["-/a"]),
            ("->", &["-/c"]),
            ("/a=RW:/b=RW:/c=RO", &[]),
            ("/a=RO:/b=NC:/c=RO", &["/a=ro", "/b=nc"]),
            ("=/a:/c=RO", &["-/b"]),
            ("/x:/a:/y:/c=RO", &["+0 /x=rw", "+2 /y=rw", "-/b"]),
            ("/x", &["+0 /x=rw", "-/a", "-/b", "-/c"]),
        ] {
            assert_eq!(changes(value).unwrap(), expected, "{value}");
        }
        for refused in ["/b:/a:/c", "+/a", "+</x:/x", "/x:/x", "-/a:/b:/c"] {
            assert_eq!(changes(refused), Err(Errno::EINVAL), "{refused}");
        }
        assert_eq!(changes(""), Err(Errno::EINVAL));
        assert_eq!(changes("+/x=nonsense"), Err(Errno::EINVAL));
    }
}
