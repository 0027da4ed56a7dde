//! `send`: the snapshots of a stream, and their headers. The engine sends the rows.
//!
//! Invariant: snapshots that are sent are held, so that they are not destroyed meanwhile.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use nacre_pool::Txg;
use nacre_pool::catalog::{BookmarkRow, PropertyRow, PropertySource, SnapshotRow};
use nacre_pool::engine::receiving::MARK;
use nacre_pool::engine::sending::{Earlier, Later, Moment, Saved, ToSend};
use nacre_pool::properties::spelling;
use nacre_pool::send_stream::{Record, ResumeToken, SentProperty, SnapshotHead, StreamError, StreamHead, StreamWriter};
use serde::{Deserialize, Serialize};

use super::objects::{Object, Objects};
use super::refused;
use crate::clock::moment;
use crate::{Imported, Kind, Mounts, Progress, Refusal};

/// Maximum number of snapshots that a stream lists: they have to fit into its first record.
const THERE_MOST: usize = 20_000;

/// Arguments of `send`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToSendStream {
    /// The snapshot.
    pub snapshot: String,
    /// The incremental base: `@NAME`, `#NAME`, or a whole name.
    pub from: Option<String>,
    /// With all intermediate snapshots (`-I`).
    pub between: bool,
    /// With all descendants, and all earlier snapshots (`-R`).
    pub package: bool,
    /// With properties.
    pub properties: bool,
    /// Received values of these, even where others are effective here.
    pub received: bool,
    /// With `package`: skips file systems without the snapshot.
    #[serde(default)]
    pub skip_missing: bool,
    /// With holds.
    pub holds: bool,
    /// With properties of snapshots.
    #[serde(default)]
    pub of_snapshots: bool,
    /// Sends frames as they are stored.
    pub stored: bool,
    /// Dry run: only reports the stream.
    pub dry: bool,
    /// Reports progress each second.
    pub progress: bool,
    /// Resumes a partially received stream by its token.
    pub token: Option<String>,
    /// `snapshot` is a file system: sends its partially received state.
    #[serde(default)]
    pub saved: bool,
}

/// Summary of a stream that was sent, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentStream {
    /// The snapshots: incremental base, name, bytes.
    pub snapshots: Vec<(Option<String>, String, u64)>,
    /// File systems that were skipped, with all their descendants.
    #[serde(default)]
    pub skipped: Vec<String>,
}

/// Content of a resume token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// Name of the snapshot at the sender.
    pub name: String,
    /// Its guid.
    pub guid: u64,
    /// GUID of the incremental base; 0: none.
    pub from: u64,
    /// The file that was received last.
    pub object: u64,
    /// Offset in it.
    pub offset: u64,
    /// Bytes received.
    pub bytes: u64,
}

impl Resumed {
    /// Decodes a resume token.
    #[must_use]
    pub fn of(token: &ResumeToken) -> Self {
        let number = |at: usize| {
            let bytes = token.after.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_be_bytes)
        };
        Self {
            name: token.name.clone(),
            guid: token.to,
            from: token.from,
            object: number(1),
            offset: number(9),
            bytes: token.bytes,
        }
    }
}

/// A snapshot of a stream.
struct Item {
    what: ToSend,
    head: SnapshotHead,
    from: Option<String>,
    /// Set if only a part of it has come here: the stream ends without its end record.
    half: Option<Saved>,
}

/// An incremental base.
#[derive(Clone)]
struct Base {
    there: Earlier,
    guid: u64,
    name: String,
    clone: bool,
}

/// Sends a stream.
pub(super) fn send(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToSendStream,
    progress: &mut dyn Progress,
) -> Result<SentStream, Refusal> {
    let ((head, items, mut done), _held) = pool.reading.hold(|| {
        let planned = match &what.token {
            _ if what.saved => saved(pool, mounts, what)?,
            Some(token) => resumed(pool, mounts, what, token)?,
            None => planned(pool, mounts, what)?,
        };
        let base = |item: &Item| match item.what.from {
            Some(Earlier::Snapshot(moment)) => Some(moment),
            Some(Earlier::Bookmark(_)) | None => None,
        };
        let sent = |item: &Item| match item.what.to {
            Later::Snapshot((id, txg)) => (id, Some(txg)),
            Later::Saved(id) => (id, None),
        };
        let base = |item: &Item| base(item).map(|(id, txg)| (id, Some(txg)));
        let held = planned.1.iter().flat_map(|item| [Some(sent(item)), base(item)]).flatten().collect();
        Ok::<_, Refusal>((planned, held))
    })?;
    if what.dry {
        for item in &items {
            let size = pool.pool.send_size(&item.what).map_err(|error| failed(&item.head.name, &error.into()))?;
            done.snapshots.push((item.from.clone(), item.head.name.clone(), size));
        }
        return Ok(done);
    }
    let told = std::cell::Cell::new(moment());
    let shared = std::cell::RefCell::new(progress);
    let mut sink = |bytes: &[u8]| shared.borrow_mut().give(bytes);
    let named = |error: StreamError| failed(&what.snapshot, &error);
    let mut writer = StreamWriter::begin(&mut sink).map_err(named)?;
    writer.record(&Record::Stream(head)).map_err(named)?;
    for item in &items {
        let named = |error: StreamError| failed(&item.head.name, &error);
        let before = writer.written;
        writer.record(&Record::Snapshot(item.head.clone())).map_err(named)?;
        pool.pool
            .send_rows(&item.what, &mut |payload| {
                writer.rows(payload)?;
                if what.progress && told.get().elapsed() >= Duration::from_secs(1) {
                    told.set(moment());
                    shared.borrow_mut().note(&format!("sent {} {}", writer.written, item.head.name));
                }
                Ok(())
            })
            .map_err(named)?;
        if item.half.is_some() {
            // The receiver has a part of it then.
            return Ok(done);
        }
        writer.record(&Record::SnapshotEnd(item.head.guid)).map_err(named)?;
        done.snapshots.push((item.from.clone(), item.head.name.clone(), writer.written - before));
    }
    writer.record(&Record::End).map_err(named)?;
    Ok(done)
}

fn failed(name: &str, error: &StreamError) -> Refusal {
    match error {
        StreamError::Pool(error) => refused(&format!("cannot send '{name}'"), error),
        other => Refusal::new(Kind::Io, format!("cannot send '{name}': {other}")),
    }
}

/// The stream's header, its snapshots, and its summary.
type Planned = (StreamHead, Vec<Item>, SentStream);

/// Plans a stream that continues at a resume token.
fn resumed(pool: &Imported, mounts: &dyn Mounts, what: &ToSendStream, text: &str) -> Result<Planned, Refusal> {
    let invalid = |why: String| Refusal::new(Kind::Invalid, format!("cannot resume send: {why}"));
    let token = ResumeToken::parse(text).map_err(|error| invalid(error.to_string()))?;
    let gone = |guid: u64| {
        Refusal::new(
            Kind::NotFound,
            format!("cannot resume send: '{}' is no longer the same snapshot used in the initial send", token.name),
        )
        .next(format!("there is no snapshot with the guid {guid}"))
    };
    let (to, row) = pool.pool.snapshot_with_guid(token.to)?.ok_or_else(|| gone(token.to))?;
    let from = match token.from {
        0 => None,
        guid => pool.pool.snapshot_with_guid(guid)?,
    };
    let mut objects = Objects::now(pool, mounts);
    let name = format!("{}@{}", objects.known(to.0)?.name, row.name);
    let base = match from {
        Some((moment, row)) => Some(Base {
            there: Earlier::Snapshot(moment),
            guid: row.guid,
            name: format!("{}@{}", objects.known(moment.0)?.name, row.name),
            clone: token.clone,
        }),
        None if token.from != 0 => {
            let mut marks = objects.catalog.bookmarks(to.0)?.into_iter();
            let mark = marks.find(|(_, row)| row.guid == token.from).filter(|_| !token.clone);
            let (part, row) = mark.ok_or_else(|| gone(token.from))?;
            Some(marked(&mut objects, to.0, &part, &row)?)
        }
        None => None,
    };
    let root = objects.known(to.0)?.name.clone();
    let stored = ToSendStream { stored: token.stored, ..what.clone() };
    let mut item = item(&mut objects, &stored, &root, to, &row, base)?;
    // The receiver knows it by the name of the first attempt.
    item.head.name = if token.name.is_empty() { name } else { token.name.clone() };
    item.head.after.clone_from(&token.after);
    item.what.after.clone_from(&token.after);
    let head = StreamHead { root, pool: pool.store.identity().pool, ..StreamHead::default() };
    Ok((head, vec![item], SentStream::default()))
}

/// Plans a stream of a partially received state here, under the sender's name.
fn saved(pool: &Imported, mounts: &dyn Mounts, what: &ToSendStream) -> Result<Planned, Refusal> {
    let doing = format!("cannot send '{}'", what.snapshot);
    let invalid = |why: &str| Refusal::new(Kind::Invalid, format!("{doing}: {why}"));
    let target = Objects::now(pool, mounts).filesystem("open", &what.snapshot)?;
    let half = pool.pool.saved(target).map_err(|error| refused(&doing, &error))?;
    let half = half.ok_or_else(|| {
        invalid("it has no partially received state").next("that is what 'receive -s' keeps of a stream that is cut")
    })?;
    let asked = what.token.as_deref().map(ResumeToken::parse).transpose();
    let asked = asked.map_err(|error| invalid(&error.to_string()))?;
    if asked.as_ref().is_some_and(|asked| (asked.to, asked.from) != (half.token.to, half.token.from)) {
        return Err(invalid("the token is of another stream than the one that is half received here"));
    }
    let mut objects = Objects::now(pool, mounts);
    let ResumeToken { to, name, from, clone, stored, .. } = half.token.clone();
    let after = asked.map(|asked| asked.after).unwrap_or_default();
    let head = SnapshotHead {
        name,
        guid: to,
        from,
        clone,
        stored,
        after: after.clone(),
        spelling: spelling_of(&mut objects, half.id)?,
        ..SnapshotHead::default()
    };
    let base = half.base.map(|base| known_base(&mut objects, base, clone)).transpose()?;
    let send = ToSend { to: Later::Saved(half.id), from: base.as_ref().map(|base| base.there), after, stored };
    let root = head.name.split('@').next().unwrap_or_default().to_owned();
    let whole = StreamHead { root, pool: pool.store.identity().pool, ..StreamHead::default() };
    let item = Item { what: send, head, from: base.map(|base| base.name), half: Some(half) };
    Ok((whole, vec![item], SentStream::default()))
}

fn planned(pool: &Imported, mounts: &dyn Mounts, what: &ToSendStream) -> Result<Planned, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let (id, txg) = objects.snapshot("open", &what.snapshot)?;
    let root = objects.known(id)?.name.clone();
    let mut head = StreamHead {
        root: root.clone(),
        pool: pool.store.identity().pool,
        package: what.package,
        ..StreamHead::default()
    };
    let row = objects.catalog.snapshot(id, txg)?;
    let mut items = Vec::new();
    if !what.package {
        let base = what.from.as_ref().map(|from| base(&mut objects, what, (id, txg), from)).transpose()?;
        line(&mut objects, what, &root, (id, txg), base, &mut items)?;
        return Ok((head, items, SentStream::default()));
    }
    let from = what.from.as_deref().map(|from| from.rsplit(['@', '#']).next().unwrap_or(from).to_owned());
    let all: Vec<u64> = objects.descendants(id)?;
    let among: HashSet<u64> = all.iter().copied().collect();
    let mut waiting: Vec<u64> = all.clone();
    let mut sent: HashSet<u64> = HashSet::new();
    let (mut skipped, mut passed_over) = (Vec::new(), HashSet::new());
    while !waiting.is_empty() {
        // A clone comes after its origin.
        let ready = waiting.iter().position(|id| {
            let origin = objects.known(*id).ok().and_then(|known| known.row.origin);
            origin.is_none_or(|(of, _)| !among.contains(&of) || sent.contains(&of))
        });
        let id = waiting.remove(ready.unwrap_or(0));
        sent.insert(id);
        let name = objects.known(id)?.name.clone();
        let below = name.strip_prefix(&root).unwrap_or_default().to_owned();
        // A file system without snapshots exists as well.
        head.there.push((below.clone(), String::new(), 0));
        for (_, row) in objects.catalog.snapshot_rows(id)? {
            head.there.push((below.clone(), row.name, row.guid));
        }
        let to = match objects.catalog.snapshot_named(id, &row.name)? {
            Some(to) if !passed_over.contains(&objects.known(id)?.row.parent) => to,
            Some(_) => {
                passed_over.insert(id);
                continue;
            }
            None if what.skip_missing || objects.catalog.is_half(id)? => {
                passed_over.insert(id);
                skipped.push(name);
                continue;
            }
            None => {
                let why = format!("cannot send '{}': '{name}' has no snapshot '@{}'", what.snapshot, row.name);
                return Err(Refusal::new(Kind::NotFound, why).next("-s passes such file systems over"));
            }
        };
        let there = match &from {
            Some(from) => objects.catalog.snapshot_named(id, from)?,
            None => None,
        };
        let base = match (there, objects.known(id)?.row.origin) {
            (Some(txg), _) => Some(known_base(&mut objects, (id, txg), false)?),
            (None, Some((of, txg))) if among.contains(&of) && !passed_over.contains(&of) => {
                Some(known_base(&mut objects, (of, txg), true)?)
            }
            (None, _) => None,
        };
        let all = ToSendStream { between: what.between || there.is_none(), ..what.clone() };
        line(&mut objects, &all, &root, (id, to), base, &mut items)?;
    }
    if head.there.len() > THERE_MOST {
        // The receiver destroys nothing then.
        (head.package, head.there) = (false, Vec::new());
    }
    if items.is_empty() {
        return Err(Refusal::new(Kind::NotFound, format!("cannot send '{}': there is nothing to send", what.snapshot)));
    }
    Ok((head, items, SentStream { skipped, ..SentStream::default() }))
}

fn known_base(objects: &mut Objects<'_>, moment: Moment, clone: bool) -> Result<Base, Refusal> {
    let row = objects.catalog.snapshot(moment.0, moment.1)?;
    let name = format!("{}@{}", objects.known(moment.0)?.name, row.name);
    Ok(Base { there: Earlier::Snapshot(moment), guid: row.guid, name, clone })
}

/// Returns a base from a bookmark, whose snapshot may be gone.
fn marked(objects: &mut Objects<'_>, of: u64, part: &str, row: &BookmarkRow) -> Result<Base, Refusal> {
    let name = format!("{}#{part}", objects.known(of)?.name);
    Ok(Base { there: Earlier::Bookmark(row.txg), guid: row.guid, name, clone: false })
}

/// Returns the incremental base of a snapshot.
fn base(objects: &mut Objects<'_>, what: &ToSendStream, to: Moment, from: &str) -> Result<Base, Refusal> {
    let invalid = |why: &str| Refusal::new(Kind::Invalid, format!("cannot send '{}': {why}", what.snapshot));
    let filesystem = objects.known(to.0)?.name.clone();
    let name = if from.starts_with(['@', '#']) { format!("{filesystem}{from}") } else { from.to_owned() };
    let name = if name.contains(['@', '#']) { name } else { format!("{filesystem}@{name}") };
    let earlier = "not an earlier snapshot from the same fs";
    let moment = match objects.open("open", &name)? {
        Object::Snapshot { of, txg } => (of, txg),
        Object::Bookmark { of, name: bookmark } => {
            let found = objects.catalog.bookmarks(of)?.into_iter().find(|(there, _)| *there == bookmark);
            let (part, row) = found.ok_or_else(|| invalid("the bookmark is gone"))?;
            let there = objects.catalog.snapshot_rows(of)?.into_iter().find(|(_, there)| there.guid == row.guid);
            match there {
                Some((txg, _)) => (of, txg),
                // Birth txgs after the bookmark's are enough to find the changes, in the same history.
                None if of == to.0 && row.txg < to.1 => return marked(objects, of, &part, &row),
                None => return Err(invalid(earlier)),
            }
        }
        Object::Filesystem(_) => return Err(invalid("incremental source is not a snapshot")),
    };
    let clone = moment.0 != to.0;
    if clone && objects.known(to.0)?.row.origin != Some(moment) || !clone && moment.1 >= to.1 {
        return Err(invalid(earlier));
    }
    known_base(objects, moment, clone)
}

/// Plans the snapshots of a file system up to one.
fn line(
    objects: &mut Objects<'_>,
    what: &ToSendStream,
    root: &str,
    to: Moment,
    base: Option<Base>,
    items: &mut Vec<Item>,
) -> Result<(), Refusal> {
    let since = base.as_ref().filter(|base| !base.clone).map_or(Txg(0), |base| match base.there {
        Earlier::Snapshot((_, txg)) | Earlier::Bookmark(txg) => txg,
    });
    let rows: HashMap<Txg, SnapshotRow> = objects.catalog.snapshot_rows(to.0)?.into_iter().collect();
    let mut txgs: Vec<Txg> = rows.keys().copied().filter(|txg| *txg > since && *txg <= to.1).collect();
    txgs.sort_unstable();
    if !what.between {
        txgs.retain(|txg| *txg == to.1);
    }
    let mut base = base;
    for txg in txgs {
        let Some(row) = rows.get(&txg) else { continue };
        let next = known_base(objects, (to.0, txg), false)?;
        items.push(item(objects, what, root, (to.0, txg), row, base.replace(next))?);
    }
    Ok(())
}

fn item(
    objects: &mut Objects<'_>,
    what: &ToSendStream,
    root: &str,
    to: Moment,
    row: &SnapshotRow,
    base: Option<Base>,
) -> Result<Item, Refusal> {
    let known = objects.known(to.0)?;
    let mut head = SnapshotHead {
        below: known.name.strip_prefix(root).unwrap_or_default().to_owned(),
        name: format!("{}@{}", known.name, row.name),
        guid: row.guid,
        created: row.created_at,
        from: base.as_ref().map_or(0, |base| base.guid),
        clone: base.as_ref().is_some_and(|base| base.clone),
        stored: what.stored,
        lists: objects.effective(to.0, "acltype")?.value != "off",
        spelling: spelling_of(objects, to.0)?,
        ..SnapshotHead::default()
    };
    if what.properties || what.package || what.received {
        head.properties = properties(&known.stored, what.received);
    }
    if what.properties || what.package || what.received || what.of_snapshots {
        let own = objects.catalog.snapshot_properties(to.0, to.1)?;
        head.of_snapshot = properties(&own, what.received);
    }
    if what.holds {
        head.holds = objects.catalog.holds(to.0, to.1)?.into_iter().map(|(tag, _)| tag).collect();
    }
    let from = base.as_ref().map(|base| base.name.clone());
    let base = base.map(|base| base.there);
    let send = ToSend { to: Later::Snapshot(to), from: base, after: Vec::new(), stored: what.stored };
    Ok(Item { what: send, head, from, half: None })
}

/// Returns the name-matching properties of a file system.
fn spelling_of(objects: &mut Objects<'_>, id: u64) -> Result<Vec<SentProperty>, Refusal> {
    let rules = ["casesensitivity", "normalization", "utf8only"].into_iter();
    let sent = |name: &str| Ok(SentProperty { name: name.to_owned(), value: objects.effective(id, name)?.value });
    rules.map(sent).collect()
}

/// Returns the properties to send: local and received ones.
fn properties(rows: &[(String, PropertyRow)], received: bool) -> Vec<SentProperty> {
    let mut sent: Vec<SentProperty> = Vec::new();
    let mut put = |name: &str, row: &PropertyRow| {
        if !sent.iter().any(|there| there.name == name) {
            sent.push(SentProperty { name: name.to_owned(), value: row.value.clone() });
        }
    };
    let ours = |name: &str| name == MARK || name == "snapshots_changed" || spelling::is_one(name);
    let order = if received {
        [PropertySource::Received, PropertySource::Local]
    } else {
        [PropertySource::Local, PropertySource::Received]
    };
    let masked = |name: &str| rows.iter().any(|(there, row)| there == name && row.source == PropertySource::Masked);
    for source in order {
        for (name, row) in rows.iter().filter(|(name, row)| row.source == source && !ours(name)) {
            if source == PropertySource::Local || received || !masked(name) {
                put(name, row);
            }
        }
    }
    sent
}
