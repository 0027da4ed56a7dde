//! The start of a cage: saved accounts are loaded, unknown ones are counted.

use super::{
    CageLocks, CageShared, LimitedDirs, Policy, ToldFull,
    background::{self, Background},
    charge_rule::ChargeRule,
    disk::DiskRoom,
    doors::Doors,
    inodes::Inodes,
    ledger::{Ledger, Sums},
    make_room::Dropping,
    options::{CageError, CageOptions},
    resting::Resting,
    saved::{Identity, SOMEWHERE, Saved, Start, Touched},
};
use nacre_layers::context::Context;
use nacre_vfs::{Caller, Entry, Errno, FileId, Layer, Name, Result};
use parking_lot::{Mutex, RwLock};
use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicBool},
};

fn failed(what: &str) -> impl Fn(Errno) -> CageError {
    move |error| CageError(format!("{what}: {error}"))
}

/// Looks up a path below the root.
fn find(below: &dyn Layer, path: &[u8]) -> Result<Entry> {
    let mut at = below.root()?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        at = below.lookup(&Caller::ROOT, &at.node, Name::new(name)?)?;
    }
    Ok(at)
}

/// Identities of the directories with a limit, as far as they exist.
fn find_limited(below: &dyn Layer, dirs: &[Vec<u8>]) -> Result<HashMap<FileId, usize>, CageError> {
    let mut limited = HashMap::new();
    for (group, dir) in dirs.iter().enumerate() {
        match find(below, dir) {
            Ok(entry) => {
                limited.insert(entry.attr.id, group);
            }
            // It may be created later.
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(error) => {
                return Err(failed(&format!("the directory \"{}\" cannot be reached", dir.escape_ascii()))(error));
            }
        }
    }
    Ok(limited)
}

impl CageShared {
    /// Looks up the directories with a limit again: one may have been created or replaced from
    /// outside.
    pub(super) fn find_limited_again(&self) {
        match find_limited(&*self.below, &self.dirs.paths) {
            Ok(limited) => *self.dirs.found.write() = limited,
            Err(error) => tracing::warn!(cage = self.name, %error, "the limits of directories may be booked wrongly"),
        }
    }
}

fn check_dirs(below: &dyn Layer, options: &CageOptions) -> Result<(), CageError> {
    if options.dirs.len() != options.limits.dirs.len() {
        return Err(CageError("each directory with a limit needs its path, and each path its limit".to_owned()));
    }
    for (index, dir) in options.dirs.iter().enumerate() {
        let inside = |other: &Vec<u8>| {
            other.strip_prefix(dir.as_slice()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        if let Some(other) = options.dirs.iter().enumerate().find(|(other, path)| *other != index && inside(path)) {
            return Err(CageError(format!(
                "the limits for \"{}\" and \"{}\" overlap; give a limit to one of them only",
                dir.escape_ascii(),
                other.1.escape_ascii()
            )));
        }
    }
    let root = below.root().map_err(failed("the root cannot be read"))?;
    if !options.dirs.is_empty() && below.path(&root.node).is_none() {
        return Err(CageError(
            "the layer below does not know the paths of its files, so directories cannot have limits of their own"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Builds the parts and brings the accounts up to date; also returns how the accounts were found.
pub(super) fn start(
    below: Arc<dyn Layer>,
    options: CageOptions,
    context: &Context,
) -> Result<(Arc<CageShared>, &'static str), CageError> {
    check_dirs(&*below, &options)?;
    let root = below.root().map_err(failed("the root cannot be read"))?;
    let figures =
        below.statfs(&Caller::ROOT, &root.node).map_err(failed("the figures of the file system cannot be read"))?;
    let rule = ChargeRule::new(u64::from(figures.fragment), options.storage);
    let dropping = Dropping::new(&options.keep, &options.rotated).map_err(CageError)?;
    let opened = match &options.state {
        Some(directory) => {
            let identity = Identity { root: root.attr.id, groups: options.dirs.clone() };
            Some(Saved::open(directory, &identity).map_err(|error| CageError(error.to_string()))?)
        }
        None => None,
    };
    let (saved, found) = opened.map_or((None, None), |(saved, found)| (Some(saved), Some(found)));
    let limited = find_limited(&*below, &options.dirs)?;
    let shared = Arc::new(CageShared {
        directories_cost: root.attr.blocks > 0 || options.storage != super::Storage::Plain,
        below,
        disk: DiskRoom::new(root.node.clone()),
        name: options.name,
        root: root.attr.id,
        rule,
        policy: Policy { writes: options.writes, when_full: options.when_full, error: options.error },
        ledger: Ledger::new(options.limits),
        inodes: Arc::new(Inodes::default()),
        dirs: LimitedDirs { paths: options.dirs, found: RwLock::new(limited) },
        saved,
        locks: CageLocks::default(),
        doors: Doors::new(Arc::clone(&context.waiting)),
        dropping,
        clock: Arc::clone(&context.clock),
        told_full: ToldFull { at: Mutex::default(), tell: Arc::clone(&context.tell) },
        written: Mutex::default(),
        background: Background::default(),
        resting: Resting::default(),
        exact: AtomicBool::new(false),
    });
    let (how, count) = take_up(&shared, found)?;
    if shared.ledger.limits().soft.is_some() || options.on_soft.is_some() {
        background::watch_soft(&shared, options.on_soft, Arc::clone(&context.tell));
    }
    background::start(&shared, count);
    Ok((shared, how))
}

/// Fills the accounts; returns how they were found and whether a recount in the background is
/// needed.
fn take_up(shared: &Arc<CageShared>, found: Option<Start>) -> Result<(&'static str, bool), CageError> {
    let (how, count) = match found {
        None => return count_now(shared, "counted"),
        Some(Start::New) => return count_now(shared, "new"),
        Some(Start::Lost { last: None }) => return count_now(shared, "lost"),
        Some(Start::Lost { last: Some(sums) }) => {
            trust(shared, &sums, false);
            ("lost", true)
        }
        // Files may have been changed while the cage was not mounted.
        Some(Start::Clean { sums, exact }) => {
            trust(shared, &sums, exact);
            ("clean", true)
        }
        Some(Start::Crashed { sums, exact, touched }) => {
            trust(shared, &sums, exact);
            let all = put_right(shared, &touched);
            shared.set_exact(exact && all);
            ("crashed", true)
        }
    };
    shared.checkpoint();
    Ok((how, count))
}

fn count_now(shared: &Arc<CageShared>, how: &'static str) -> Result<(&'static str, bool), CageError> {
    background::count(shared, true)
        .map_err(|error| CageError(format!("what is there cannot be counted: {error:?}")))?;
    shared.checkpoint();
    Ok((how, false))
}

fn trust(shared: &CageShared, sums: &Sums, exact: bool) {
    shared.ledger.replace(sums);
    shared.set_exact(exact);
}

/// Examines the files that were changed since the sums were saved, and books their current cost.
/// Returns whether all of them were found.
fn put_right(shared: &CageShared, touched: &[Touched]) -> bool {
    // Once a directory has moved, a path that leads nowhere does not prove that the file is gone.
    let moved = touched.iter().any(|touched| touched.place == SOMEWHERE);
    let mut all = true;
    for touched in touched {
        let (charge, existed) = (touched.charge & !1, touched.charge & 1);
        let now = match touched.place.as_slice() {
            SOMEWHERE => {
                all = false;
                continue;
            }
            b"" => None,
            place => match find(&*shared.below, place) {
                Ok(entry)
                    if entry.attr.id.ino == touched.id.ino && entry.attr.id.generation == touched.id.generation =>
                {
                    Some(entry)
                }
                Ok(_) | Err(Errno::ENOENT | Errno::ENOTDIR) if !moved => None,
                _ => {
                    all = false;
                    continue;
                }
            },
        };
        shared.ledger.release(touched.owner, charge, existed);
        if let Some(entry) = now {
            let owner = super::ledger::Owner {
                uid: entry.attr.uid,
                group: shared.group_of_path(&touched.place, entry.attr.kind),
            };
            shared.ledger.force(owner, shared.rule.cost(&entry.attr, shared.keeps(&entry.node, &entry.attr)), 1);
        }
    }
    all
}
