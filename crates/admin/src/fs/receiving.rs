//! `receive`: the target of a stream's snapshots, the properties that they bring, and the effects on mounts.
//!
//! Invariants: a received file system is mounted when all of it is there; the stream's mount points
//! and set-user-id settings are accepted only where they harm no directory and no user of this
//! machine.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nacre_pool::catalog::{PropertyRow, PropertySource};
use nacre_pool::engine::Setting;
use nacre_pool::engine::receiving::{ReceiveInto, Receiving};
use nacre_pool::names::{Name, split_parent};
use nacre_pool::properties::{Property, dataset_property};
use nacre_pool::send_stream::{Record, SentProperty, SnapshotHead, StreamError, StreamHead, StreamReader};
use serde::{Deserialize, Serialize};

use super::following::Following;
use super::objects::Objects;
use super::{holds, moves, refused};
use crate::system_places::is_of_the_system;
use crate::{Imported, Kind, Mounts, Progress, Refusal, What};

/// Arguments of `receive`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToReceive {
    /// A file system, a snapshot, or the parent of the received file systems.
    pub into: String,
    /// Uses the sender's names without the pool (`-d`).
    pub but_pool: bool,
    /// Uses the last part of the sender's names (`-e`).
    pub last_part: bool,
    /// Rolls back or destroys what is in the way (`-F`).
    pub force: bool,
    /// Unmounts file systems in use for the moment.
    #[serde(default)]
    pub unmount: bool,
    /// Mounts nothing.
    pub unmounted: bool,
    /// Keeps the partially received state if the stream is cut (`-s`).
    pub resumable: bool,
    /// Dry run: receives nothing, only reports.
    pub dry: bool,
    /// Properties to set here.
    pub properties: Vec<(String, String)>,
    /// Properties of the stream to ignore.
    pub except: Vec<String>,
    /// Sets no holds of the stream.
    #[serde(default)]
    pub no_holds: bool,
}

/// Result of `receive`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedStream {
    /// The snapshots: name at the sender, name here, whether it is a full stream, bytes.
    pub snapshots: Vec<(String, String, bool, u64)>,
    /// Sentences about parts that failed.
    pub sentences: Vec<String>,
}

/// The bytes of a stream from the caller.
struct Incoming<'p> {
    progress: &'p mut dyn Progress,
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.progress.take(buffer)
    }
}

/// Whether a stream's mount point is refused there. The home of root is refused as a whole.
fn is_refused_place(path: &Path) -> bool {
    is_of_the_system(path) || path.starts_with("/root")
}

/// Why a stream's mount point is refused, where its path or the end of its links is a place of the system, or does
/// not answer; else whether the directory has content.
fn examine(mounts: &dyn Mounts, at: &Path) -> Result<bool, &'static str> {
    const OF_THE_SYSTEM: &str = "that is a place of the system";
    if is_refused_place(at) {
        return Err(OF_THE_SYSTEM);
    }
    let Some(state) = mounts.examine(at) else { return Err("a file system on that path does not answer") };
    if is_refused_place(&state.real) { Err(OF_THE_SYSTEM) } else { Ok(state.is_full) }
}

/// Properties that give rights to a stream's content (`setuid`, `devices`) or show it to other machines (`sharenfs`, `sharesmb`), with
/// their defaults.
const HARMFUL: [(&str, &str); 4] = [("setuid", "on"), ("devices", "on"), ("sharenfs", "off"), ("sharesmb", "off")];

/// The effective values of the properties of [`HARMFUL`].
type HarmfulValues = Vec<(&'static str, String)>;

fn harmful_values(objects: &mut Objects<'_>, id: u64) -> Result<HarmfulValues, Refusal> {
    let mut values = Vec::new();
    for (name, _) in HARMFUL {
        values.push((name, objects.effective(id, name)?.value));
    }
    Ok(values)
}

/// The same of the file system in this pool that a snapshot was sent from; empty where it comes from elsewhere. Any sender
/// can name this pool: it counts where the file system is here under the sent name, and has that snapshot. The base of a
/// difference shows nothing, as the receiver has it in any case.
fn harmful_values_of_source(
    pool: &Imported,
    mounts: &dyn Mounts,
    head: &StreamHead,
    snapshot: &SnapshotHead,
) -> Result<HarmfulValues, Refusal> {
    if head.pool != pool.store.identity().pool {
        return Ok(Vec::new());
    }
    let mut objects = Objects::now(pool, mounts);
    let filesystem = snapshot.name.split('@').next().unwrap_or_default();
    let Some(id) = objects.catalog.find(filesystem)? else { return Ok(Vec::new()) };
    let rows = objects.catalog.snapshot_rows(id)?;
    if rows.iter().any(|(_, row)| row.guid == snapshot.guid) {
        harmful_values(&mut objects, id)
    } else {
        Ok(Vec::new())
    }
}

/// The file system that a later snapshot of a stream comes to, as it is before.
#[derive(PartialEq, Eq)]
struct Earlier {
    id: u64,
    stored: Vec<(String, PropertyRow)>,
    harmful: HarmfulValues,
}

impl Earlier {
    /// Returns none where the file system does not exist; also where it is partially received, as
    /// it has not been mounted yet, and the remainder may come from another stream.
    fn of(pool: &Imported, mounts: &dyn Mounts, there: Option<u64>) -> Result<Option<Self>, Refusal> {
        let Some(id) = there else { return Ok(None) };
        let mut objects = Objects::now(pool, mounts);
        if objects.catalog.is_half(id)? {
            return Ok(None);
        }
        let harmful = harmful_values(&mut objects, id)?;
        Ok(Some(Self { id, stored: objects.known(id)?.stored.clone(), harmful }))
    }

    /// Whether a property was set or masked here: a received value has no effect.
    fn has_own(&self, name: &str) -> bool {
        self.stored.iter().any(|(stored, row)| stored == name && row.source != PropertySource::Received)
    }

    /// Whether this value of a property of [`HARMFUL`] gives no more than the effective one. A share has more values than
    /// on and off: another one may be for other machines, or for writing.
    fn allows(&self, name: &str, value: &str) -> bool {
        let effective = self.harmful.iter().find(|(there, _)| *there == name);
        effective.is_some_and(|(_, effective)| match name {
            "sharenfs" | "sharesmb" => effective == value,
            _ => effective != "off",
        })
    }

    /// Whether another value holds here once this one has been received.
    fn is_changed_by(&self, name: &str, value: &str) -> bool {
        let received = |(stored, row): &(String, PropertyRow)| {
            stored == name && row.source == PropertySource::Received && row.value == value
        };
        !self.has_own(name) && !self.stored.iter().any(received)
    }
}

/// Receives a stream.
pub(super) fn receive(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    progress: &mut dyn Progress,
) -> Result<ReceivedStream, Refusal> {
    let doing = "cannot receive";
    let mut reader = StreamReader::begin(Incoming { progress }).map_err(|error| said(doing, &error))?;
    let head = match reader.next().map_err(|error| said(doing, &error))?.record {
        Record::Stream(head) => head,
        _ => return Err(said(doing, &StreamError::Damaged("its beginning"))),
    };
    let mut done = ReceivedStream::default();
    let mut new = Vec::new();
    let came = snapshots(pool, mounts, what, &head, &mut reader, &mut done, &mut new);
    // What was received is there, and is mounted, even if the remainder failed.
    if !what.unmounted && !what.dry {
        let _changing = pool.changing.lock();
        let wanted = moves::wanted(&mut Objects::now(pool, mounts), &new)?;
        done.sentences.extend(moves::mount(mounts, wanted));
    }
    came.map(|()| done)
}

/// Receives all snapshots of a stream; adds new file systems to `new`.
fn snapshots<R: Read>(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    head: &StreamHead,
    reader: &mut StreamReader<R>,
    done: &mut ReceivedStream,
    new: &mut Vec<u64>,
) -> Result<(), Refusal> {
    let doing = "cannot receive";
    // Whether it is an incremental stream of a package is known from its first snapshot.
    let mut following: Option<Option<Following<'_>>> = None;
    loop {
        let received = reader.next().map_err(|error| said(doing, &error))?;
        match received.record {
            Record::Snapshot(snapshot) => {
                let target = target(what, head, &snapshot)?;
                match &following {
                    None if head.package && snapshot.from != 0 && !snapshot.clone && !what.dry => {
                        following = Some(Some(Following::begin((pool, mounts), (what, head), &snapshot, done)?));
                    }
                    None => following = Some(None),
                    Some(Some(following)) if snapshot.from != 0 && !snapshot.clone => {
                        following.before(target.split('@').next().unwrap_or_default(), done)?;
                    }
                    Some(_) => {}
                }
                let made = one(pool, mounts, what, head, &snapshot, &target, reader, done);
                let made = made.map_err(|refusal| with_target(refusal, &target))?;
                new.extend(made);
                if let Some(told) = done.snapshots.last_mut() {
                    told.3 = reader.position() - received.end;
                }
            }
            Record::End => break,
            _ => return Err(said(doing, &StreamError::Damaged("the order of its records"))),
        }
    }
    following.flatten().map_or(Ok(()), |following| following.end(done))
}

fn said(doing: &str, error: &StreamError) -> Refusal {
    match error {
        StreamError::Pool(error) => refused(doing, error),
        StreamError::Cut | StreamError::Io(_) => Refusal::new(Kind::Io, format!("{doing}: {error}")),
        other => Refusal::new(Kind::Invalid, format!("{doing}: {other}")),
    }
}

/// Returns the local name of a file system of the stream, given its name relative to the topmost one.
pub(super) fn place_of(what: &ToReceive, head: &StreamHead, below: &str) -> Result<String, Refusal> {
    // Any snapshot name gives the file system.
    let any = SnapshotHead { below: below.to_owned(), name: "@any".to_owned(), ..SnapshotHead::default() };
    Ok(target(what, head, &any)?.split('@').next().unwrap_or_default().to_owned())
}

/// Returns the local name of a snapshot of the stream.
fn target(what: &ToReceive, head: &StreamHead, snapshot: &SnapshotHead) -> Result<String, Refusal> {
    let invalid = |why: String| Refusal::new(Kind::Invalid, format!("cannot receive into '{}': {why}", what.into));
    let (into, given) = match what.into.split_once('@') {
        Some((filesystem, name)) => (filesystem, Some(name)),
        None => (what.into.as_str(), None),
    };
    let part = snapshot.name.rsplit('@').next().unwrap_or_default();
    if given.is_some() && (what.but_pool || what.last_part || head.package) {
        return Err(invalid("a snapshot cannot be named where several file systems may come".to_owned()));
    }
    let root = match (what.but_pool, what.last_part) {
        (true, _) => match head.root.split_once('/') {
            Some((_, rest)) => format!("{into}/{rest}"),
            None => into.to_owned(),
        },
        (_, true) => format!("{into}/{}", head.root.rsplit('/').next().unwrap_or_default()),
        _ => into.to_owned(),
    };
    // Otherwise it would not be below the target: "in" and "b" are "inb".
    if !snapshot.below.is_empty() && !snapshot.below.starts_with('/') {
        return Err(invalid(format!(
            "invalid stream ('{}' is no name below a file system)",
            snapshot.below.escape_debug()
        )));
    }
    let name = format!("{root}{}@{}", snapshot.below, given.unwrap_or(part));
    Name::snapshot(&name).map_err(|error| invalid(error.to_string()))?;
    Ok(name)
}

/// Adds the name of the snapshot that was not received. It is not in the first line: that has the
/// words of ZFS, which replication programs look for.
fn with_target(refusal: Refusal, target: &str) -> Refusal {
    let separator = if refusal.next.is_empty() { "" } else { "\n" };
    let next = format!("the stream was to become '{target}'{separator}{}", refusal.next);
    refusal.next(next)
}

/// Receives a snapshot; returns its file system where it is new.
#[expect(clippy::too_many_arguments, reason = "one snapshot of a stream, with all that the stream says")]
fn one<R: Read>(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    head: &StreamHead,
    snapshot: &SnapshotHead,
    target: &str,
    reader: &mut StreamReader<R>,
    done: &mut ReceivedStream,
) -> Result<Option<u64>, Refusal> {
    let (filesystem, name) = target.split_once('@').unwrap_or((target, ""));
    let doing = match snapshot.from {
        0 => "cannot receive new filesystem stream",
        _ => "cannot receive incremental stream",
    };
    let (parent, part) = place(pool, mounts, what, filesystem, doing)?;
    let there = pool.pool.find(filesystem)?;
    // Snapshots of a package that were received whole before the stream was cut are skipped.
    if head.package && !what.dry && has_come(pool, mounts, there, snapshot.guid)? {
        return skip(reader, snapshot, doing).map(|()| None);
    }
    // A given origin makes this a clone of it.
    let is_clone = snapshot.from != 0 && there.is_none() && what.properties.iter().any(|(name, _)| name == "origin");
    let snapshot = &SnapshotHead { clone: snapshot.clone || is_clone, ..snapshot.clone() };
    let earlier = Earlier::of(pool, mounts, there)?;
    let own = bringing(pool, mounts, what, head, snapshot, earlier.as_ref(), doing)?;
    if what.dry {
        done.snapshots.push((snapshot.name.clone(), target.to_owned(), snapshot.from == 0, 0));
        return skip(reader, snapshot, doing).map(|()| None);
    }
    let wrong_tag = snapshot.holds.iter().find(|tag| !holds::is_new_tag(tag));
    if let Some(tag) = wrong_tag.filter(|_| !what.no_holds) {
        return Err(Refusal::new(
            Kind::Invalid,
            format!("{doing}: the stream has a hold '{}', which is no tag", tag.escape_debug()),
        ));
    }
    let into = ReceiveInto {
        parent,
        name: part,
        snapshot: name.to_owned(),
        force: what.force,
        resumable: what.resumable,
        properties: own,
        of_snapshot: of_snapshot(snapshot),
        holds: if what.no_holds { Vec::new() } else { snapshot.holds.clone() },
    };
    let mut receiving = pool.pool.receive(into, snapshot).map_err(|error| refused(doing, &error))?;
    let (id, replaces) = (receiving.target(), receiving.replaces());
    if let Err(error) = take(reader, snapshot, &mut receiving) {
        return Err(cut(receiving, doing, &error));
    }
    let again = || {
        let now = Earlier::of(pool, mounts, there)?;
        if now == earlier {
            Ok(None)
        } else {
            bringing(pool, mounts, what, head, snapshot, now.as_ref(), doing).map(Some)
        }
    };
    finish(pool, mounts, what, &mut receiving, &again, doing)?;
    let left = receiving.left_out().iter();
    done.sentences.extend(left.map(|(name, why)| format!("cannot set property '{name}' of '{filesystem}': {why}")));
    done.snapshots.push((snapshot.name.clone(), target.to_owned(), snapshot.from == 0, 0));
    Ok((!replaces).then_some(id))
}

fn has_come(pool: &Imported, mounts: &dyn Mounts, there: Option<u64>, guid: u64) -> Result<bool, Refusal> {
    let Some(id) = there else { return Ok(false) };
    let rows = Objects::now(pool, mounts).catalog.snapshot_rows(id)?;
    Ok(rows.iter().any(|(_, row)| row.guid == guid))
}

/// Returns the parent dataset, and the last part of the name.
fn place(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    filesystem: &str,
    doing: &str,
) -> Result<(u64, String), Refusal> {
    if !filesystem.contains('/') {
        return Ok((0, filesystem.to_owned()));
    }
    let (above, part) =
        split_parent(filesystem).map_err(|error| Refusal::new(Kind::Invalid, format!("{doing}: {error}")))?;
    let make = what.but_pool && !what.dry;
    let _changing = make.then(|| pool.changing.lock());
    let (parent, _) = super::making::parent_of(pool, mounts, above, make, doing)?;
    Ok((parent, part.to_owned()))
}

/// Receives the rows of a snapshot.
fn take<R: Read>(
    reader: &mut StreamReader<R>,
    snapshot: &SnapshotHead,
    receiving: &mut Receiving,
) -> Result<(), StreamError> {
    loop {
        match reader.next()?.record {
            Record::Rows(payload) => receiving.rows(&payload)?,
            Record::SnapshotEnd(guid) if guid == snapshot.guid => return Ok(()),
            _ => return Err(StreamError::Damaged("the order of its records")),
        }
    }
}

fn skip<R: Read>(reader: &mut StreamReader<R>, snapshot: &SnapshotHead, doing: &str) -> Result<(), Refusal> {
    loop {
        match reader.next().map_err(|error| said(doing, &error))?.record {
            Record::Rows(_) => {}
            Record::SnapshotEnd(guid) if guid == snapshot.guid => return Ok(()),
            _ => return Err(said(doing, &StreamError::Damaged("the order of its records"))),
        }
    }
}

/// Ends a cut stream: keeps or discards the received part, and names the next step in the refusal.
fn cut(receiving: Receiving, doing: &str, error: &StreamError) -> Refusal {
    let text = receiving.token().text();
    let refusal = said(doing, error);
    match receiving.cut() {
        Ok(true) => refusal.next(format!(
            "Partially received snapshot is saved.\nA resuming stream can be generated on the sending system by running:\n    nacre fs send -t {text}"
        )),
        Ok(false) => refusal,
        Err(error) => refused(doing, &error),
    }
}

/// Makes the snapshot visible; users of the file system get its files, and mounts the properties that came with it.
/// `again` returns these properties where a `set` or `inherit` during the transfer has changed which of them count.
fn finish(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    receiving: &mut Receiving,
    again: &dyn Fn() -> Result<Option<Brought>, Refusal>,
    doing: &str,
) -> Result<(), Refusal> {
    // Checked before requests to the file system are blocked.
    receiving.check_shape().map_err(|error| refused(doing, &error))?;
    let _changing = pool.changing.lock();
    if receiving.replaces()
        && let Some(properties) = again()?
    {
        receiving.bring(properties);
    }
    exchange(mounts, what, receiving, doing)?;
    if receiving.replaces() {
        let affected = Objects::now(pool, mounts).descendants(receiving.target())?;
        moves::refresh(pool, mounts, &affected)?;
    }
    Ok(())
}

fn exchange(mounts: &dyn Mounts, what: &ToReceive, receiving: &mut Receiving, doing: &str) -> Result<(), Refusal> {
    let id = receiving.target();
    if !receiving.replaces() {
        return receiving.finish().map(drop).map_err(|error| refused(doing, &error));
    }
    mounts.settle(&[id])?;
    let mut below = moves::with_below(mounts, &[id]);
    if receiving.overwrites() {
        let gone = moves::unmount(mounts, &below, what.unmount)?;
        let done = receiving.finish().map(drop).map_err(|error| refused(doing, &error));
        gone.back(mounts);
        return done;
    }
    below.retain(|other| *other != id);
    let gone = moves::unmount(mounts, &below, what.unmount)?;
    let done = mounts.replace(id, &mut || receiving.finish().map(drop).map_err(|error| refused(doing, &error)));
    gone.back(mounts);
    done
}

/// Refuses a property under another name than that of the table, and one that comes twice: what is judged by its name
/// and what takes effect would be two things. Names that are unknown here are passed over later.
fn check_names(sent: &[SentProperty], doing: &str) -> Result<(), Refusal> {
    let mut names = HashSet::new();
    for SentProperty { name, .. } in sent {
        let is_other_name = match dataset_property(name) {
            Ok(Property::Known(known)) => known.name != name,
            _ => false,
        };
        let why = if is_other_name {
            "is under another name"
        } else if !names.insert(name.as_str()) {
            "comes twice"
        } else {
            continue;
        };
        let name = name.escape_debug();
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: invalid stream (property '{name}' {why})")));
    }
    Ok(())
}

/// Changes of a file system's properties, in their order.
type Brought = Vec<(String, Setting)>;

/// The properties that a file system gets: those of the stream that count here, and those that are
/// set here.
fn bringing(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToReceive,
    head: &StreamHead,
    snapshot: &SnapshotHead,
    earlier: Option<&Earlier>,
    doing: &str,
) -> Result<Brought, Refusal> {
    check_names(&snapshot.properties, doing)?;
    let is = |there: &str, name: &str| match dataset_property(there) {
        Ok(Property::Known(known)) => known.name == name,
        _ => there == name,
    };
    let given = |name: &str| what.properties.iter().any(|(there, _)| is(there, name));
    let excepted = |name: &str| what.except.iter().any(|there| there == name);
    let mut own = Vec::new();
    for SentProperty { name, value } in &snapshot.properties {
        let Ok(property) = dataset_property(name) else { continue };
        if excepted(name) && property.check_inherit().is_err() {
            continue;
        }
        let is_believed = !given(name) && !excepted(name);
        if name == "mountpoint" && is_believed && earlier.is_none_or(|earlier| earlier.is_changed_by(name, value)) {
            free_place(pool, mounts, earlier, value, doing)?;
        }
        own.push((name.clone(), Setting::Received(value.clone())));
        let from_above = given(name) && !snapshot.below.is_empty() && property.check_inherit().is_ok();
        // Values that were set here stay, as in zfs-receive(8).
        let is_set = earlier.is_some_and(|earlier| earlier.has_own(name));
        if from_above || excepted(name) && !given(name) && !is_set {
            own.push((name.clone(), Setting::Inherit));
        }
    }
    // In a package, given values are set on the first file system and inherited by its descendants.
    if snapshot.below.is_empty() {
        let given = what.properties.iter().filter(|(name, _)| name != "origin");
        own.extend(given.map(|(name, value)| (name.clone(), Setting::Local(value.clone()))));
    }
    let by_root = rustix::process::geteuid().is_root();
    // Those below the first one of a package may have their own settings.
    if by_root {
        let source = harmful_values_of_source(pool, mounts, head, snapshot)?;
        for (name, default) in HARMFUL {
            let sent = snapshot.properties.iter().find(|property| property.name == name);
            let sent = sent.map(|property| property.value.as_str());
            // The same counts in this pool already, for the same files.
            if source.iter().any(|(there, value)| *there == name && value == sent.unwrap_or(default)) {
                continue;
            }
            let is_harmful = match earlier {
                None => sent.unwrap_or(default) != "off",
                // All that was there is replaced.
                Some(earlier) if snapshot.from == 0 => sent.unwrap_or(default) != "off" && !earlier.has_own(name),
                // What is allowed here already was allowed here.
                Some(earlier) => sent.is_some_and(|value| {
                    value != "off" && earlier.is_changed_by(name, value) && !earlier.allows(name, value)
                }),
            };
            if !given(name) && !excepted(name) && is_harmful {
                own.push((name.to_owned(), Setting::Local("off".to_owned())));
            }
        }
    }
    if earlier.is_some() {
        return Ok(own);
    }
    if snapshot.lists && !given("acltype") && !snapshot.properties.iter().any(|property| property.name == "acltype") {
        own.push(("acltype".to_owned(), Setting::Received("posix".to_owned())));
    }
    Ok(own)
}

/// Checks that a stream's mount point covers no system directory, no other content and no mount.
fn free_place(
    pool: &Imported,
    mounts: &dyn Mounts,
    earlier: Option<&Earlier>,
    value: &str,
    doing: &str,
) -> Result<(), Refusal> {
    if matches!(value, "none" | "legacy") {
        return Ok(());
    }
    let at = match &pool.opening.altroot {
        Some(altroot) => altroot.join(value.trim_start_matches('/')),
        None => PathBuf::from(value),
    };
    // Normalized: without slashes at the end, and without two of them in a row.
    let at: PathBuf = at.components().collect();
    let there = mounts.mounted().into_iter().find(|mounted| mounted.at == at);
    if there.as_ref().is_some_and(|there| earlier.is_some_and(|earlier| there.what == What::head(earlier.id))) {
        return Ok(());
    }
    // The next import may be without the altroot.
    let without_altroot = if pool.opening.altroot.is_some() { examine(mounts, Path::new(value)) } else { Ok(false) };
    let what = match without_altroot.and_then(|_| examine(mounts, &at)) {
        Err(why) => Some(why),
        Ok(is_full) => (is_full || there.is_some()).then_some("something is there already"),
    };
    if let Some(what) = what {
        let why = format!("{doing}: the stream sets mountpoint={value}, and {what}");
        return Err(Refusal::new(Kind::Exists, why).next(
            "'-x mountpoint' mounts it below its parent here, '-o mountpoint=PATH' elsewhere, '-o mountpoint=none' nowhere",
        ));
    }
    Ok(())
}

/// Returns the user properties of the snapshot itself.
fn of_snapshot(snapshot: &SnapshotHead) -> Vec<(String, Setting)> {
    let users =
        snapshot.of_snapshot.iter().filter(|sent| matches!(dataset_property(&sent.name), Ok(Property::User(_))));
    users.map(|sent| (sent.name.clone(), Setting::Received(sent.value.clone()))).collect()
}

/// `receive -A`: discards a partially received state.
pub(super) fn abort(pool: &Imported, name: &str) -> Result<(), Refusal> {
    let doing = format!("cannot abort receive of '{name}'");
    let invalid = |error: nacre_pool::names::NameError| Refusal::new(Kind::Invalid, format!("{doing}: {error}"));
    Name::filesystem(name).map_err(invalid)?;
    let (parent, part) = match name.rsplit_once('/') {
        Some((above, part)) => (pool.pool.find(above)?.unwrap_or(u64::MAX), part),
        None => (0, name),
    };
    if pool.pool.abort_receive(parent, part).map_err(|error| refused(&doing, &error))? {
        return Ok(());
    }
    let why = format!("'{name}' does not have any resumable receive state to abort");
    Err(Refusal::new(Kind::NotFound, why))
}
