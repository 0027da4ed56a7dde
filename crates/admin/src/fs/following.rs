//! Renames and destroys that an incremental stream of a package (`send -R -i`, `-R -I`) brings:
//! file systems and snapshots that the sender has renamed get their new names, matched by the guids
//! of snapshots, before anything is received; with `-F`, objects that the sender has destroyed are
//! destroyed at the end.
//!
//! An object whose name another one needs, and that cannot have its own new name yet, is called
//! `recv-...` for the moment: two have exchanged their names, it moves below a file system that
//! comes later in the stream, or it is to be destroyed. Invariants: nothing is destroyed before all
//! of the stream has come; objects that were made here keep their names. A receiver that dies in
//! between leaves temporary names, which the next one matches by guids as well.

use std::collections::{HashMap, HashSet, VecDeque};

use nacre_pool::send_stream::{SnapshotHead, StreamHead};

use super::destroying::{self, ToDestroy};
use super::objects::Objects;
use super::receiving::{ReceivedStream, ToReceive, place_of};
use super::refused;
use super::renaming::{self, ToRename};
use crate::{Imported, Kind, Mounts, Refusal};

/// State of receiving an incremental stream of a package.
pub(super) struct Following<'a> {
    pool: &'a Imported,
    mounts: &'a dyn Mounts,
    what: &'a ToReceive,
    head: &'a StreamHead,
    there: There<'a>,
    /// Local name of the snapshot that is the stream's incremental base.
    base: Option<String>,
}

/// Names of a snapshot at the sender: several, where it was received there twice.
struct Names<'a> {
    first: &'a str,
    all: HashSet<&'a str>,
}

/// Names of all snapshots at the sender.
#[derive(Default)]
struct SentNames<'a> {
    by_guid: HashMap<u64, Names<'a>>,
    all: HashSet<&'a str>,
}

impl<'a> SentNames<'a> {
    fn add(&mut self, guid: u64, name: &'a str) {
        self.all.insert(name);
        self.by_guid.entry(guid).or_insert_with(|| Names { first: name, all: HashSet::new() }).all.insert(name);
    }
}

/// Index of the sender's file systems and snapshots: built once, without the administration lock,
/// as its size is the sender's choice.
struct There<'a> {
    /// File systems that have the snapshot with a guid.
    filesystems: HashMap<u64, HashSet<&'a str>>,
    names: SentNames<'a>,
    /// The snapshots of each file system, name and guid.
    snapshots: HashMap<&'a str, Vec<(&'a str, u64)>>,
    /// Local names of all of the sender's file systems.
    places: HashSet<String>,
}

impl<'a> There<'a> {
    fn of(what: &ToReceive, head: &'a StreamHead) -> Result<Self, Refusal> {
        let mut there = Self {
            filesystems: HashMap::new(),
            names: SentNames::default(),
            snapshots: HashMap::new(),
            places: HashSet::new(),
        };
        for (below, snapshot, guid) in &head.there {
            let snapshots = there.snapshots.entry(below).or_default();
            if snapshot.is_empty() {
                continue;
            }
            snapshots.push((snapshot, *guid));
            there.filesystems.entry(*guid).or_default().insert(below);
            there.names.add(*guid, snapshot);
        }
        for below in there.snapshots.keys() {
            there.places.insert(place_of(what, head, below)?);
        }
        Ok(there)
    }
}

/// Snapshots of a local file system, and the sender's name of it relative to the top.
struct SnapshotsHere {
    id: u64,
    name: String,
    below: Option<String>,
    here: Vec<(u64, String)>,
}

/// Returns the name of a file system relative to the topmost one, as streams have it.
fn below_top(objects: &mut Objects<'_>, top: u64, id: u64) -> Result<String, Refusal> {
    let top = objects.known(top)?;
    let known = objects.known(id)?;
    Ok(known.name.strip_prefix(top.name.as_str()).unwrap_or_default().to_owned())
}

/// The local file systems from the topmost one down, and which of them the sender has.
struct Seen {
    top: u64,
    all: Vec<u64>,
    /// The sender's name relative to the top; empty: the name here is not changed.
    matched: HashMap<u64, String>,
    /// The sender still has it, but no snapshot of it.
    bare: HashSet<u64>,
}

impl Seen {
    fn stays(&self, id: u64) -> bool {
        id == self.top || self.matched.contains_key(&id) || self.bare.contains(&id)
    }
}

impl<'a> Following<'a> {
    /// Makes the renames that are needed before the first snapshot is received.
    pub fn begin(
        (pool, mounts): (&'a Imported, &'a dyn Mounts),
        (what, head): (&'a ToReceive, &'a StreamHead),
        first: &SnapshotHead,
        done: &mut ReceivedStream,
    ) -> Result<Self, Refusal> {
        let there = There::of(what, head)?;
        let base = {
            let objects = Objects::now(pool, mounts);
            let rows = match objects.catalog.find(&place_of(what, head, &first.below)?)? {
                Some(id) => objects.catalog.snapshot_rows(id)?,
                None => Vec::new(),
            };
            rows.into_iter().find(|(_, row)| row.guid == first.from).map(|(_, row)| row.name)
        };
        let this = Self { pool, mounts, what, head, there, base };
        let _changing = pool.changing.lock();
        // If an object is in the way, nothing is renamed.
        this.next_rename()?;
        this.snapshots()?;
        this.file_systems(done)?;
        Ok(this)
    }

    /// Repeats the renames for an incremental snapshot whose file system is not at its place: its
    /// new parent may have been received by now.
    pub fn before(&self, filesystem: &str, done: &mut ReceivedStream) -> Result<(), Refusal> {
        let _changing = self.pool.changing.lock();
        if self.pool.pool.find(filesystem)?.is_some() {
            return Ok(());
        }
        self.file_systems(done)
    }

    /// Ends the stream: objects that the sender has destroyed are destroyed. Nothing else is created or renamed
    /// between the selection of these objects and their end.
    pub fn end(&self, done: &mut ReceivedStream) -> Result<(), Refusal> {
        let _changing = self.pool.changing.lock();
        self.file_systems(done)?;
        if self.what.force { self.give_up(done) } else { Ok(()) }
    }

    fn see(&self, objects: &mut Objects<'_>) -> Result<Option<Seen>, Refusal> {
        let Some(top) = objects.catalog.find(&place_of(self.what, self.head, "")?)? else { return Ok(None) };
        let sent = &self.there.filesystems;
        let all = objects.descendants(top)?;
        let mut claims: HashMap<&str, Vec<u64>> = HashMap::new();
        let mut matched = HashMap::new();
        for id in &all {
            // The newest common snapshot identifies it; earlier ones may have been another file system's.
            let rows = objects.catalog.snapshot_rows(*id)?;
            let newest = rows.iter().filter(|(_, row)| sent.contains_key(&row.guid)).max_by_key(|(txg, _)| *txg);
            let Some(found) = newest.and_then(|(_, row)| sent.get(&row.guid)) else { continue };
            match (found.iter().next(), found.len()) {
                (Some(below), 1) => claims.entry(below).or_default().push(*id),
                // The sender has this snapshot in two file systems.
                _ => drop(matched.insert(*id, String::new())),
            }
        }
        for (below, ids) in claims {
            let place = place_of(self.what, self.head, below)?;
            for id in &ids {
                // Where several match, each keeps its name.
                let below = if ids.len() == 1 || objects.known(*id)?.name == place { below } else { "" };
                matched.insert(*id, below.to_owned());
            }
        }
        let mut bare = HashSet::new();
        for id in &all {
            let below = below_top(objects, top, *id)?;
            if self.there.snapshots.get(below.as_str()).is_some_and(Vec::is_empty) {
                bare.insert(*id);
            }
        }
        Ok(Some(Seen { top, all, matched, bare }))
    }

    /// Returns file systems that took part in the stream before and are not at the sender any more,
    /// and have no descendants that were made here.
    fn no_longer_sent(&self, objects: &Objects<'_>, seen: &Seen) -> Result<HashSet<u64>, Refusal> {
        let Some(base) = &self.base else { return Ok(HashSet::new()) };
        let mut gone = HashSet::new();
        for id in &seen.all {
            if !seen.stays(*id) && objects.catalog.snapshot_named(*id, base)?.is_some() {
                gone.insert(*id);
            }
        }
        let mut doomed = HashSet::new();
        for id in &gone {
            if objects.descendants(*id)?.iter().all(|below| gone.contains(below)) {
                doomed.insert(*id);
            }
        }
        Ok(doomed)
    }

    fn snapshots(&self) -> Result<(), Refusal> {
        let mut all = Vec::new();
        {
            let mut objects = Objects::now(self.pool, self.mounts);
            let Some(seen) = self.see(&mut objects)? else { return Ok(()) };
            for id in &seen.all {
                let rows = objects.catalog.snapshot_rows(*id)?;
                let here: Vec<(u64, String)> = rows.into_iter().map(|(_, row)| (row.guid, row.name)).collect();
                let below = match seen.matched.get(id) {
                    Some(below) if below.is_empty() => Some(below_top(&mut objects, seen.top, *id)?),
                    other => other.cloned(),
                };
                all.push(SnapshotsHere { id: *id, name: objects.known(*id)?.name.clone(), below, here });
            }
        }
        let mut renames = Vec::new();
        for SnapshotsHere { id, name, below, here } in all {
            let guids: HashSet<u64> = here.iter().map(|(guid, _)| *guid).collect();
            let sent = below.and_then(|below| self.there.snapshots.get(below.as_str()));
            let comes = sent.into_iter().flatten().filter(|(_, guid)| !guids.contains(guid));
            let comes = comes.map(|(snapshot, _)| *snapshot).collect();
            let steps = steps(here, &self.there.names, &comes, self.what.force)
                .map_err(|snapshot| in_the_way(&format!("{name}@{snapshot}")))?;
            renames.extend(steps.into_iter().map(|step| (id, step)));
        }
        for (id, (old, new)) in renames {
            let doing = format!("cannot receive: cannot rename '@{old}' to '@{new}'");
            self.pool.pool.rename_snapshots(&[id], &old, &new).map_err(|error| refused(&doing, &error))?;
        }
        Ok(())
    }

    fn file_systems(&self, done: &mut ReceivedStream) -> Result<(), Refusal> {
        while let Some((from, to)) = self.next_rename()? {
            let rename = ToRename { from, to, force: self.what.unmount, ..ToRename::default() };
            let renamed = renaming::rename(self.pool, self.mounts, &rename);
            done.sentences.extend(
                renamed.map_err(|refusal| Refusal { what: format!("cannot receive: {}", refusal.what), ..refusal })?,
            );
        }
        Ok(())
    }

    /// Returns the next rename of a file system: old and new name.
    fn next_rename(&self) -> Result<Option<(String, String)>, Refusal> {
        let mut objects = Objects::now(self.pool, self.mounts);
        let Some(seen) = self.see(&mut objects)? else { return Ok(None) };
        let doomed = if self.what.force { self.no_longer_sent(&objects, &seen)? } else { HashSet::new() };
        let top = objects.known(seen.top)?.name.clone();
        let comes = &self.there.places;
        let aside = |objects: &Objects<'_>, id: u64| {
            for name in (0_u32..).map(|number| format!("{top}/recv-{id}-{number}")) {
                if !comes.contains(&name) && objects.catalog.find(&name)?.is_none() {
                    return Ok(name);
                }
            }
            Err(in_the_way(&top))
        };
        // Parents before children.
        let mut pending: Vec<(u64, String, String)> = Vec::new();
        for id in seen.all.iter().filter(|id| **id != seen.top) {
            let Some(below) = seen.matched.get(id).filter(|below| !below.is_empty()) else { continue };
            let (name, wanted) = (objects.known(*id)?.name.clone(), place_of(self.what, self.head, below)?);
            if name != wanted {
                pending.push((*id, name, wanted));
            }
        }
        pending.sort_by(|a, b| a.2.cmp(&b.2));
        let waiting: HashSet<u64> = pending.iter().map(|(id, _, _)| *id).collect();
        let waits = |id: u64| waiting.contains(&id);
        for (_, _, wanted) in &pending {
            match objects.catalog.find(wanted)? {
                Some(id) if !seen.stays(id) && !doomed.contains(&id) => return Err(in_the_way(wanted)),
                Some(_) | None => {}
            }
        }
        for (_, name, wanted) in &pending {
            // Its new parent has to be here, under its own name.
            let above = objects.catalog.find(wanted.rsplit_once('/').map_or("", |(above, _)| above))?;
            let is_ready = above.is_some_and(|id| seen.stays(id) && !waits(id));
            let is_within = wanted.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('/'));
            if is_ready && !is_within && objects.catalog.find(wanted)?.is_none() {
                return Ok(Some((name.clone(), wanted.clone())));
            }
        }
        for (_, _, wanted) in &pending {
            match objects.catalog.find(wanted)? {
                Some(id) if waits(id) || doomed.contains(&id) => {
                    return Ok(Some((wanted.clone(), aside(&objects, id)?)));
                }
                // The name belongs to a file system that the sender has as well; or its parent is not there yet.
                Some(_) | None => {}
            }
        }
        // Another file system will come under this name.
        for id in seen.all.iter().filter(|id| waits(**id) || doomed.contains(id)) {
            let name = objects.known(*id)?.name.clone();
            if comes.contains(&name) {
                let aside = aside(&objects, *id)?;
                return Ok(Some((name, aside)));
            }
        }
        Ok(None)
    }

    /// Destroys snapshots and file systems that the sender does not have any more.
    fn give_up(&self, done: &mut ReceivedStream) -> Result<(), Refusal> {
        let there: HashSet<u64> = self.head.there.iter().map(|(_, _, guid)| *guid).collect();
        let (mut snapshots, mut filesystems) = (Vec::new(), Vec::new());
        {
            let mut objects = Objects::now(self.pool, self.mounts);
            let Some(seen) = self.see(&mut objects)? else { return Ok(()) };
            for id in seen.all.iter().filter(|id| seen.stays(**id)) {
                let rows = objects.catalog.snapshot_rows(*id)?.into_iter();
                let gone = rows.filter(|(_, row)| !there.contains(&row.guid) && row.holds == 0 && row.clones == 0);
                let names: Vec<String> = gone.map(|(_, row)| row.name).collect();
                snapshots.push((*id, objects.known(*id)?.name.clone(), names));
            }
            let doomed = self.no_longer_sent(&objects, &seen)?;
            for id in seen.all.iter().filter(|id| doomed.contains(id)) {
                let known = objects.known(*id)?;
                if !doomed.contains(&known.row.parent) {
                    filesystems.push(known.name.clone());
                }
            }
        }
        for (id, filesystem, names) in snapshots {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            if !names.is_empty() {
                let doing = format!("cannot destroy snapshots of '{filesystem}'");
                self.pool.pool.destroy_snapshots(id, &names, false).map_err(|error| refused(&doing, &error))?;
            }
        }
        for target in filesystems {
            let doom = ToDestroy { target, recursive: true, force: self.what.unmount, ..ToDestroy::default() };
            if let Err(refusal) = destroying::destroy(self.pool, self.mounts, &doom) {
                let stays = format!("the sender does not have '{}' any more; it stays: {}", doom.target, refusal.what);
                done.sentences.push(stays);
            }
        }
        Ok(())
    }
}

fn in_the_way(name: &str) -> Refusal {
    Refusal::new(Kind::Exists, format!("cannot receive: '{name}' has a name that the sender has given to another"))
        .next("rename it; what the sender has no more goes with -F")
}

/// Renames of the snapshots of one file system to the names that the sender has for their guids.
struct Renaming<'n> {
    /// Guid and name of each.
    here: Vec<(u64, String)>,
    /// Index of the snapshot that has a name.
    owners: HashMap<String, usize>,
    names: &'n SentNames<'n>,
    /// Snapshots that the sender does not have may be renamed.
    force: bool,
    steps: Vec<(String, String)>,
}

impl<'n> Renaming<'n> {
    /// Returns the new name of a snapshot, if it changes.
    fn wanted(&self, at: usize) -> Option<&'n str> {
        let (guid, name) = self.here.get(at)?;
        let names = self.names.by_guid.get(guid)?;
        if names.all.contains(name.as_str()) { None } else { Some(names.first) }
    }

    /// Renames a snapshot, and returns its old name, which is free now.
    fn rename(&mut self, at: usize, new: String) -> Result<String, String> {
        let Some((guid, name)) = self.here.get_mut(at) else { return Ok(String::new()) };
        if !self.names.by_guid.contains_key(guid) && !self.force {
            return Err(name.clone());
        }
        let old = std::mem::replace(name, new.clone());
        self.owners.remove(&old);
        self.owners.insert(new.clone(), at);
        self.steps.push((old.clone(), new));
        Ok(old)
    }

    /// Returns a temporary name that is not in use.
    fn aside(&self, at: usize) -> String {
        let guid = self.here.get(at).map_or(0, |(guid, _)| *guid);
        let is_free = |name: &String| !self.owners.contains_key(name) && !self.names.all.contains(name.as_str());
        (0_u32..).map(|number| format!("recv-{guid:x}-{number}")).find(is_free).unwrap_or_default()
    }

    /// Renames the ready snapshots, and those that wait for a name which becomes free by that.
    fn settle(
        &mut self,
        mut ready: VecDeque<usize>,
        waiting: &mut HashMap<&'n str, VecDeque<usize>>,
    ) -> Result<(), String> {
        while let Some(at) = ready.pop_front() {
            let Some(wanted) = self.wanted(at) else { continue };
            if self.owners.contains_key(wanted) {
                waiting.entry(wanted).or_default().push_back(at);
                continue;
            }
            let free = self.rename(at, wanted.to_owned())?;
            ready.extend(waiting.remove(free.as_str()).into_iter().flatten());
        }
        Ok(())
    }
}

/// Returns the renames, in their order, by which the snapshots of a file system get the names that
/// the sender has for their guids; `comes`: further names that will be needed. A snapshot that the
/// sender does not have is in the way, unless `force`. The work grows with the number of names, not
/// with its square: the sender chooses it.
fn steps(
    here: Vec<(u64, String)>,
    names: &SentNames<'_>,
    comes: &HashSet<&str>,
    force: bool,
) -> Result<Vec<(String, String)>, String> {
    let owners = here.iter().enumerate().map(|(at, (_, name))| (name.clone(), at)).collect();
    let count = here.len();
    let mut renaming = Renaming { here, owners, names, force, steps: Vec::new() };
    let mut waiting = HashMap::new();
    renaming.settle((0..count).collect(), &mut waiting)?;
    for at in 0..count {
        let Some(wanted) = renaming.wanted(at) else { continue };
        let Some(owner) = renaming.owners.get(wanted).copied() else { continue };
        let is_known = renaming.here.get(owner).is_some_and(|(guid, _)| names.by_guid.contains_key(guid));
        // It has its own name, and keeps it.
        if is_known && renaming.wanted(owner).is_none() {
            continue;
        }
        let aside = renaming.aside(owner);
        let free = renaming.rename(owner, aside)?;
        let ready = waiting.remove(free.as_str()).unwrap_or_default();
        renaming.settle(ready, &mut waiting)?;
    }
    for at in 0..count {
        let Some((guid, name)) = renaming.here.get(at) else { continue };
        if force && !names.by_guid.contains_key(guid) && comes.contains(name.as_str()) {
            let aside = renaming.aside(at);
            renaming.rename(at, aside)?;
        }
    }
    Ok(renaming.steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renamed(
        here: &[(u64, &str)],
        sent: &[(u64, &'static str)],
        comes: &[&str],
        force: bool,
    ) -> Result<String, String> {
        let mut all: HashMap<String, u64> = here.iter().map(|(guid, name)| ((*name).to_owned(), *guid)).collect();
        let mut names = SentNames::default();
        sent.iter().for_each(|(guid, name)| names.add(*guid, name));
        let here = here.iter().map(|(guid, name)| (*guid, (*name).to_owned())).collect();
        for (old, new) in steps(here, &names, &comes.iter().copied().collect(), force)? {
            let guid = all.remove(&old).expect("it is there");
            assert!(all.insert(new, guid).is_none(), "a name is taken");
        }
        let mut all: Vec<(u64, String)> = all.into_iter().map(|(name, guid)| (guid, name)).collect();
        all.sort();
        Ok(all.into_iter().map(|(guid, name)| format!("{guid}:{name} ")).collect())
    }

    /// With work that grows with the square of their number this would not end.
    #[test]
    fn very_many_snapshots_get_the_names_of_the_sender() {
        const MANY: u64 = 50_000;
        let here = (0..MANY).map(|guid| (guid, format!("s{guid}"))).collect();
        let names: Vec<String> = (0..MANY).map(|guid| format!("s{}", (guid + 1) % MANY)).collect();
        let mut sent = SentNames::default();
        names.iter().zip(0..).for_each(|(name, guid)| sent.add(guid, name));
        let steps = steps(here, &sent, &HashSet::new(), false).unwrap();
        // One of the cycle gets a temporary name first.
        assert_eq!(steps.len() as u64, MANY + 1);
        let mut all: HashSet<String> = (0..MANY).map(|guid| format!("s{guid}")).collect();
        for (old, new) in steps {
            assert!(all.remove(&old) && all.insert(new), "a name is taken");
        }
        assert_eq!(all, names.into_iter().collect());
    }

    #[test]
    fn snapshots_get_the_names_of_the_sender() {
        for (here, sent, comes, force, expected) in [
            (&[(1, "a"), (2, "b")][..], &[(1, "a"), (2, "c")][..], &[][..], false, Ok("1:a 2:c ")),
            (&[(1, "a"), (2, "b"), (3, "c")], &[(1, "b"), (2, "c"), (3, "a")], &[], false, Ok("1:b 2:c 3:a ")),
            (&[(1, "a"), (2, "b")], &[(1, "b"), (2, "a")], &[], false, Ok("1:b 2:a ")),
            // Snapshots that the sender does not have any more.
            (&[(1, "a"), (9, "b")], &[(1, "b")], &[], false, Err("b")),
            (&[(1, "a"), (9, "b")], &[(1, "b")], &[], true, Ok("1:b 9:recv-9-0 ")),
            (&[(9, "b")], &[(1, "a")], &["b"], false, Ok("9:b ")),
            (&[(9, "b")], &[(1, "a")], &["b"], true, Ok("9:recv-9-0 ")),
            // A guid that the sender has twice.
            (&[(1, "a")], &[(1, "b"), (1, "a")], &[], true, Ok("1:a ")),
            (&[(1, "a"), (2, "x")], &[(1, "x"), (2, "x")], &[], true, Ok("1:a 2:x ")),
        ] {
            let found = renamed(here, sent, comes, force);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{here:?} {sent:?}");
        }
    }
}
