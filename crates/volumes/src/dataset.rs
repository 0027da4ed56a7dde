//! Volumes that are file systems of a pool: making, cloning, mounting and destroying them by
//! `nacre fs`.
//!
//! A file system of ours carries the record's id as the property [`ID`]. One without it is never
//! adopted and never destroyed.

use crate::{
    command::Nacre,
    failure::{Failure, Kind},
    options::{Dataset, Place},
    store::{Locked, Store},
};
use std::path::Path;

/// Property with the id of the volume's record.
const ID: &str = "nacre-volumes:id";

/// State of a volume's file system.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Ours,
    Foreign,
    Missing,
}

/// The name of a volume's file system.
pub fn name(dataset: &Dataset, volume: &str) -> String {
    format!("{}/{volume}", dataset.parent)
}

/// Makes the file system, or finds the one that an earlier, killed call has made.
///
/// # Errors
/// One of this name exists; the pool is not imported; the source of a clone is missing.
pub fn make(
    nacre: &Nacre,
    store: &Store,
    locked: &Locked,
    dataset: &Dataset,
    mountpoint: &Path,
) -> Result<(), Failure> {
    let name = name(dataset, &locked.record.name);
    let mut words: Vec<String> = vec!["-o".into(), "canmount=noauto".into()];
    words.extend(["-o".into(), format!("mountpoint={}", mountpoint.display())]);
    words.extend(["-o".into(), format!("{ID}={}", locked.record.id)]);
    for property in &dataset.properties {
        words.extend(["-o".into(), property.clone()]);
    }
    let Some(from) = &dataset.from else {
        let mut command = vec!["fs", "create"];
        command.extend(words.iter().map(String::as_str));
        command.extend(["--", name.as_str()]);
        return made(nacre, locked, &name, &command);
    };
    // Before a snapshot is taken for it.
    if !exists(nacre, locked, &dataset.parent)? {
        return Err(not_imported(&dataset.parent));
    }
    let missing = || Failure::new(Kind::Missing, format!("from: there is no volume {}", from.volume));
    let is_ready = |record: &crate::store::Record| record.phase == crate::store::Phase::Ready;
    // Before its lock is waited for: a source that is being made may be waiting for this volume.
    if from.volume == locked.record.name || !store.read(&from.volume)?.is_some_and(|record| is_ready(&record)) {
        return Err(missing());
    }
    let source = store.lock(&from.volume)?.ok_or_else(missing)?;
    let Place::Dataset(of_source) = source.record.spec()?.place else {
        return Err(Failure::new(Kind::Invalid, format!("from: volume {} is not in a pool", from.volume)));
    };
    let source_name = self::name(&of_source, &source.record.name);
    let origin = match &from.snapshot {
        Some(snapshot) => format!("{source_name}@{snapshot}"),
        None => {
            let origin = own_snapshot(&source_name, locked);
            if find(nacre, locked, &name, &dataset.parent)? == Found::Missing {
                match nacre.done(Some(&locked.lock), &["fs", "snapshot", "--", &origin]) {
                    Ok(_) => {}
                    // Of an earlier call.
                    Err(_) if exists(nacre, locked, &origin)? => {}
                    Err(failure) => return Err(failure),
                }
            }
            origin
        }
    };
    let mut command = vec!["fs", "clone"];
    command.extend(words.iter().map(String::as_str));
    command.extend(["--", origin.as_str(), name.as_str()]);
    made(nacre, locked, &name, &command)?;
    if from.snapshot.is_none() {
        drop_snapshot(nacre, locked, &origin)?;
    }
    Ok(())
}

/// Runs a command that makes the file system; it may have been made before.
fn made(nacre: &Nacre, locked: &Locked, name: &str, command: &[&str]) -> Result<(), Failure> {
    match nacre.done(Some(&locked.lock), command) {
        Ok(_) => Ok(()),
        Err(failure) => match id(nacre, locked, name)? {
            Some(found) if found == locked.record.id => Ok(()),
            _ => Err(failure),
        },
    }
}

/// Destroys the file system with its snapshots, where it is ours.
///
/// # Errors
/// The pool is not imported; it has clones, file systems below it, or users.
pub fn destroy(nacre: &Nacre, store: &Store, locked: &Locked, dataset: &Dataset) -> Result<(), Failure> {
    let name = name(dataset, &locked.record.name);
    if find(nacre, locked, &name, &dataset.parent)? == Found::Ours {
        let words = ["fs", "list", "-H", "-o", "name", "-t", "filesystem", "-r", "--", &name];
        let below = nacre.done(Some(&locked.lock), &words)?;
        if below.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count() > 1 {
            return Err(Failure::new(Kind::InUse, format!("{name} has file systems below it")));
        }
        // Not with -r: a file system that is made below it meanwhile makes the pool refuse.
        let words = ["fs", "list", "-H", "-o", "name", "-t", "snapshot", "--", &name];
        let snapshots = nacre.done(Some(&locked.lock), &words)?;
        let snapshots = String::from_utf8_lossy(&snapshots);
        let own = snapshots.lines().filter_map(|line| line.strip_prefix(&name)?.strip_prefix('@'));
        let own: Vec<&str> = own.collect();
        if !own.is_empty() {
            // All or none of them: one may have a clone.
            let all = format!("{name}@{}", own.join(","));
            nacre.done(Some(&locked.lock), &["fs", "destroy", "--", &all])?;
        }
        nacre.done(Some(&locked.lock), &["fs", "destroy", "--", &name])?;
    }
    // The snapshot of a clone whose making was killed: without the clone, nothing else destroys it.
    let Some(from) = &dataset.from else { return Ok(()) };
    if from.snapshot.is_some() {
        return Ok(());
    }
    let Some(source) = store.read(&from.volume)? else { return Ok(()) };
    let Place::Dataset(of_source) = source.spec()?.place else { return Ok(()) };
    drop_snapshot(nacre, locked, &own_snapshot(&self::name(&of_source, &source.name), locked))
}

/// Whether the file system is there, and the volume's.
///
/// # Errors
/// The pool is not imported.
pub fn is_there(nacre: &Nacre, locked: &Locked, dataset: &Dataset) -> Result<bool, Failure> {
    Ok(find(nacre, locked, &name(dataset, &locked.record.name), &dataset.parent)? == Found::Ours)
}

/// Mounts the file system at its mount point, unless it is.
///
/// # Errors
/// It is missing, or the mount point cannot be used.
pub fn mount(nacre: &Nacre, locked: &Locked, dataset: &Dataset) -> Result<(), Failure> {
    let name = name(dataset, &locked.record.name);
    match id(nacre, locked, &name)? {
        Some(found) if found == locked.record.id => {}
        Some(_) => return Err(Failure::new(Kind::Exists, format!("{name} is not the file system of this volume"))),
        None => return Err(not_imported(&name)),
    }
    let finished = nacre.run(Some(&locked.lock), &["fs", "mount", "--", &name], crate::command::SHORT)?;
    // 5: it is mounted; the caller looks whether it is at its place.
    if matches!(finished.code, Some(0 | 5)) { Ok(()) } else { Err(finished.failure()) }
}

/// Name of the snapshot that a clone of a volume's present content begins with.
fn own_snapshot(source: &str, locked: &Locked) -> String {
    format!("{source}@clone-{}", locked.record.id)
}

/// Destroys a clone's snapshot as soon as the clone is gone.
fn drop_snapshot(nacre: &Nacre, locked: &Locked, snapshot: &str) -> Result<(), Failure> {
    match nacre.done(Some(&locked.lock), &["fs", "destroy", "-d", "--", snapshot]) {
        Err(failure) if failure.kind != Kind::Missing => Err(failure),
        _ => Ok(()),
    }
}

/// Finds the file system. Its absence counts only where its parent is there: the pool of a missing
/// parent is not imported.
fn find(nacre: &Nacre, locked: &Locked, name: &str, parent: &str) -> Result<Found, Failure> {
    match id(nacre, locked, name)? {
        Some(found) if found == locked.record.id => Ok(Found::Ours),
        Some(_) => Ok(Found::Foreign),
        None if exists(nacre, locked, parent)? => Ok(Found::Missing),
        None => Err(not_imported(parent)),
    }
}

fn not_imported(name: &str) -> Failure {
    Failure::new(Kind::Missing, format!("there is no {name}: is its pool imported?"))
}

/// The id that a file system carries, `-` for none; `None` where it does not exist.
fn id(nacre: &Nacre, locked: &Locked, name: &str) -> Result<Option<String>, Failure> {
    match nacre.done(Some(&locked.lock), &["fs", "get", "-H", "-o", "value", ID, "--", name]) {
        Ok(output) => Ok(Some(String::from_utf8_lossy(&output).trim().to_owned())),
        Err(failure) if failure.kind == Kind::Missing => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn exists(nacre: &Nacre, locked: &Locked, name: &str) -> Result<bool, Failure> {
    match nacre.done(Some(&locked.lock), &["fs", "list", "-H", "-o", "name", "--", name]) {
        Ok(_) => Ok(true),
        Err(failure) if failure.kind == Kind::Missing => Ok(false),
        Err(failure) => Err(failure),
    }
}
