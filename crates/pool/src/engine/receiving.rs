//! Receiving a stream: its rows go into a separate dataset, which becomes visible as a snapshot in
//! one commit when the stream is complete.
//!
//! ```text
//!  a new file system          is created and marked, and its tree grows row by row
//!  an existing file system    a clone of the base below it, `%recv`, takes the rows
//!  at the end                 the mark is removed, or the live dataset takes the clone's tree; the snapshot is entered
//! ```
//!
//! Called by the verb `receive`, which knows mounts and properties. Invariants: a partially
//! received dataset has the property [`MARK`] and cannot be used; it is either destroyed or
//! resumed. A live dataset that was modified since its base stays unchanged unless the receiver is
//! asked to discard the changes (`receive -F`).

use std::sync::Arc;

use super::administration::{DestroySet, snapshot_row};
use super::properties::{Edit, Setting};
use super::received_shape::ReceivedShape;
use super::{Admin, Dataset, Pool, as_pool_error};
use crate::catalog::rows::PARTIAL;
use crate::catalog::{DatasetRow, PropertyRow, PropertySource, SnapshotRow};
use crate::error::PoolError;
use crate::pointer::{Compression, Pointer, Txg};
use crate::rows::{DatasetHead, InodeRow, Key, keys};
use crate::send_stream::record::{self, SnapshotHead, StreamError};
use crate::send_stream::{ResumeToken, RowOp};
use crate::space::Usage;
use crate::tree::{Context, Settings, Tree};
use crate::{checksum, compress};

/// Property that marks a dataset as partially received; users cannot set it.
pub const MARK: &str = "receiving";
/// Value of the mark: the rows are kept if the stream is interrupted (`receive -s`).
const RESUMABLE: &str = "resumable";
/// Value of the mark: the rows are dropped with the receiving process.
const ONCE: &str = "once";

/// Destination of a received snapshot.
#[derive(Clone, Debug, Default)]
pub struct ReceiveInto {
    /// Number of the parent dataset.
    pub parent: u64,
    /// Last component of the file system's name.
    pub name: String,
    /// The snapshot's name.
    pub snapshot: String,
    /// Discards changes and snapshots of the file system that are newer than the base of the
    /// stream.
    pub force: bool,
    /// Keeps the rows if the stream is interrupted.
    pub resumable: bool,
    /// Properties that the file system gets together with the snapshot.
    pub properties: Vec<(String, Setting)>,
    /// Properties of the snapshot.
    pub of_snapshot: Vec<(String, Setting)>,
    /// Tags of holds on the snapshot.
    pub holds: Vec<String>,
}

/// A snapshot that is being received.
pub struct Receiving {
    pool: Arc<Pool>,
    into: ReceiveInto,
    /// The file system that gets the snapshot; `dataset` takes the rows, and may be another one.
    target: u64,
    dataset: Arc<Dataset>,
    /// The base of an incremental stream.
    base: Option<Txg>,
    fresh: bool,
    head: SnapshotHead,
    token: ResumeToken,
    left_out: Vec<(String, PoolError)>,
    /// All rows received so far were checked to be a consistent file system.
    is_whole: bool,
    ended: bool,
}

impl std::fmt::Debug for Receiving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiving").field("target", &self.target).field("token", &self.token).finish_non_exhaustive()
    }
}

/// The properties of the file system, as edits of this dataset.
fn edits(into: &ReceiveInto, dataset: u64) -> Vec<Edit> {
    into.properties.iter().map(|(name, to)| Edit { dataset, name: name.clone(), to: to.clone() }).collect()
}

fn refused<T>(why: impl Into<String>) -> Result<T, PoolError> {
    Err(PoolError::Refused(why.into()))
}

/// A receive that begins or is resumed.
struct Begun {
    target: u64,
    id: u64,
    base: Option<Txg>,
    fresh: bool,
    token: Option<ResumeToken>,
}

/// Reasons why an existing file system cannot take a stream, in ZFS' words.
const MODIFIED: &str = "destination has been modified since most recent snapshot";
const OTHER_BASE: &str = "most recent snapshot does not match incremental source";
const PARTLY: &str = "destination contains partially-complete state from \"zfs receive -s\"";

impl Pool {
    /// Begins to receive a snapshot, or resumes if the stream is a resumed one.
    ///
    /// # Errors
    /// [`PoolError::Refused`] with the reason in ZFS' words; [`PoolError::Busy`] while another
    /// stream is received there.
    pub fn receive(self: &Arc<Self>, into: ReceiveInto, head: &SnapshotHead) -> Result<Receiving, PoolError> {
        let mut admin = self.admin.lock();
        // An invalid value is refused before anything is received.
        admin.plan_edits(&edits(&into, 0), &self.bounds())?;
        for (name, to) in &into.of_snapshot {
            snapshot_row(name, to)?;
        }
        self.spelling_of(head)?;
        let begun = match self.going_on(&admin, &into, head)? {
            Some(begun) => begun,
            None => {
                let plan = self.plan_receive(&admin, &into, head)?;
                self.commit_under(&mut admin, |admin, txg| self.enter_received(admin, txg, &into, head, &plan))?
            }
        };
        let root = admin.catalog.dataset(begun.id)?.root;
        let dataset = Arc::new(Dataset::receiving(self, (begun.id, root), begun.target)?);
        dataset.adopt(admin.behaviour_of(begun.id)?, &self.bounds(), admin.owner_quotas(begun.id)?);
        self.receiving.lock().insert(begun.id);
        self.datasets.write().insert(begun.id, Arc::clone(&dataset));
        drop(admin);
        let token = begun.token.unwrap_or_else(|| ResumeToken {
            to: head.guid,
            name: head.name.clone(),
            from: head.from,
            clone: head.clone,
            stored: head.stored,
            after: Vec::new(),
            bytes: 0,
        });
        Ok(Receiving {
            pool: Arc::clone(self),
            into,
            target: begun.target,
            dataset,
            base: begun.base,
            fresh: begun.fresh,
            head: head.clone(),
            token,
            left_out: Vec::new(),
            is_whole: false,
            ended: false,
        })
    }

    /// Finds the partially received state of a file system: the file system's number, and that of
    /// the dataset with the rows.
    fn half(&self, admin: &Admin, parent: u64, name: &str) -> Result<Option<(u64, u64)>, PoolError> {
        let Some(target) = admin.catalog.child(parent, name)? else { return Ok(None) };
        if admin.is_half(target)? {
            return Ok(Some((target, target)));
        }
        Ok(admin.catalog.child(target, PARTIAL)?.map(|id| (target, id)))
    }

    fn going_on(&self, admin: &Admin, into: &ReceiveInto, head: &SnapshotHead) -> Result<Option<Begun>, PoolError> {
        let Some((target, id)) = self.half(admin, into.parent, &into.name)? else {
            return if head.after.is_empty() {
                Ok(None)
            } else {
                refused("destination has no half received state that this stream goes on with")
            };
        };
        if self.receiving.lock().contains(&id) {
            return Err(PoolError::Busy);
        }
        if head.after.is_empty() {
            return refused(PARTLY);
        }
        let row = admin.catalog.dataset(id)?;
        let Some(token) = self.token_at(row.root)? else { return refused(PARTLY) };
        if (token.to, token.from, &token.after) != (head.guid, head.from, &head.after) {
            return refused("the stream goes on elsewhere than where destination has come to");
        }
        let base = match row.origin {
            Some((of, txg)) if of == target => Some(txg),
            // The base is another file system's by now.
            Some(_) if id != target => return refused(OTHER_BASE),
            _ => None,
        };
        Ok(Some(Begun { target, id, base, fresh: row.origin.is_none(), token: Some(token) }))
    }

    /// The position up to which the rows of a stream were received into a tree; `None` if all that
    /// was received are ranges without rows before its first row: those are dropped when the stream
    /// is interrupted.
    pub(super) fn token_at(&self, root: Option<Pointer>) -> Result<Option<ResumeToken>, PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let row = Tree::open(root, 0, Settings::default()).view().get(&context, &keys::received())?;
        let token = row.map(|row| ResumeToken::decode(&row)).transpose()?;
        Ok(token.filter(|token| !token.after.is_empty()))
    }

    /// The position up to which a resumable stream was received into a dataset.
    pub(super) fn resume_token(&self, admin: &Admin, target: u64) -> Result<Option<ResumeToken>, PoolError> {
        Ok(self.resumable(admin, target)?.map(|(_, token)| token))
    }

    /// As [`Self::resume_token`], with the dataset that takes the rows.
    pub(super) fn resumable(&self, admin: &Admin, target: u64) -> Result<Option<(u64, ResumeToken)>, PoolError> {
        let half = if admin.is_half(target)? { Some(target) } else { admin.catalog.child(target, PARTIAL)? };
        let Some(id) = half else { return Ok(None) };
        if admin.mark(id)?.is_none_or(|mark| mark != RESUMABLE) {
            return Ok(None);
        }
        Ok(self.token_at(admin.catalog.dataset(id)?.root)?.map(|token| (id, token)))
    }

    /// The rules for names in a stream. Other properties are refused here, since users cannot
    /// exclude them on the command line.
    fn spelling_of(&self, head: &SnapshotHead) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        const RULES: [&str; 3] = ["casesensitivity", "normalization", "utf8only"];
        if let Some(other) = head.spelling.iter().find(|property| !RULES.contains(&property.name.as_str())) {
            return refused(format!(
                "the stream has '{}' as a rule for names, which it is not",
                other.name.escape_debug()
            ));
        }
        let given = head.spelling.iter().map(|property| (property.name.clone(), property.value.clone()));
        self.parse_new(&given.collect::<Vec<_>>())
    }

    /// Chooses the dataset that takes the rows: all checks are made before anything is changed.
    fn plan_receive(&self, admin: &Admin, into: &ReceiveInto, head: &SnapshotHead) -> Result<Plan, PoolError> {
        let Some(target) = admin.catalog.child(into.parent, &into.name)? else {
            return match head.from {
                0 => Ok(Plan::New),
                from if head.clone => match find_guid(admin, from)? {
                    Some((of, txg)) => Ok(Plan::Clone(of, txg)),
                    None => refused("the origin of the clone that is sent is not in this pool"),
                },
                _ => refused("destination does not exist"),
            };
        };
        let snapshots = admin.catalog.snapshots(target)?;
        if snapshots.iter().any(|(_, row)| row.name == into.snapshot) {
            return refused(format!("destination snapshot '@{}' exists already", into.snapshot));
        }
        if head.from == 0 {
            if !into.force {
                return refused("destination exists: must specify -F to overwrite it");
            }
            judge_overwritten(&snapshots)?;
            return Ok(Plan::Below(target, None));
        }
        let Some((base, row)) = snapshots.iter().find(|(_, row)| row.guid == head.from) else {
            return refused(OTHER_BASE);
        };
        let newest = snapshots.last().is_some_and(|(txg, _)| txg == base);
        if !into.force && !newest {
            return refused(OTHER_BASE);
        }
        if !into.force && self.is_modified(row.root, admin.catalog.dataset(target)?.root)? {
            return refused(MODIFIED);
        }
        Ok(Plan::Below(target, Some(*base)))
    }

    fn enter_received(
        &self,
        admin: &mut Admin,
        txg: Txg,
        into: &ReceiveInto,
        head: &SnapshotHead,
        plan: &Plan,
    ) -> Result<Begun, PoolError> {
        let (parent, name, origin) = match plan {
            Plan::New => (into.parent, into.name.as_str(), None),
            Plan::Clone(of, txg) => (into.parent, into.name.as_str(), Some((*of, *txg))),
            Plan::Below(target, base) => (*target, PARTIAL, base.map(|base| (*target, base))),
        };
        let rows = admin.with_rules_for_names(parent, self.spelling_of(head)?)?;
        let usage = match origin {
            Some((of, txg)) => {
                let of = admin.catalog.snapshot(of, txg)?;
                Usage { referenced: of.referenced, logical_referenced: of.logical, ..Usage::default() }
            }
            None => Usage::default(),
        };
        let limits = admin.judge_new(parent, &rows, usage)?;
        let root = origin.map_or(Ok(None), |(of, txg)| admin.catalog.snapshot(of, txg).map(|row| row.root))?;
        let id = admin.catalog.number()?;
        let list = admin.catalog.deadlists().create()?;
        let row = DatasetRow {
            created: txg,
            root,
            usage,
            origin,
            newest: origin.map_or(Txg(0), |(_, txg)| txg),
            ..self.new_row(parent, name, list)
        };
        admin.catalog.enter(id, &row)?;
        if let Some((of, txg)) = origin {
            admin.catalog.set_clone(of, txg, id, true)?;
        }
        admin.put_rows(id, &rows)?;
        let value = if into.resumable { RESUMABLE } else { ONCE }.to_owned();
        admin.catalog.set_property(id, MARK, Some(&PropertyRow { source: PropertySource::Local, value }))?;
        admin.quota_tree().add(id, parent, usage, limits)?;
        let (target, base) = match plan {
            Plan::Below(target, base) => (*target, *base),
            Plan::New | Plan::Clone(..) => (id, None),
        };
        Ok(Begun { target, id, base, fresh: origin.is_none(), token: None })
    }

    /// Whether a live dataset differs from a snapshot in anything that users see: files without a
    /// name in the snapshot are freed when the live dataset is used.
    fn is_modified(&self, snapshot: Option<Pointer>, head: Option<Pointer>) -> Result<bool, PoolError> {
        if snapshot == head {
            return Ok(false);
        }
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let view = |root| Tree::open(root, 0, Settings::default()).view();
        let mut rows = view(snapshot).diff(context, &view(head))?;
        let mut nameless = std::collections::HashSet::new();
        while let Some(row) = rows.next()? {
            let known = match Key::decode(row.key)? {
                Key::Head | Key::OwnerUse(..) | Key::Received | Key::Recounted => true,
                Key::Inode(number) => {
                    let was = row.old.map(InodeRow::decode).transpose()?;
                    let is = row.new.map(InodeRow::decode).transpose()?;
                    let gone = was.is_some_and(|was| was.links == 0) && is.is_none();
                    // The space that its rows are charged is no attribute.
                    was == is || gone && nameless.insert(number)
                }
                Key::Orphan(number) | Key::Cut(number) => nameless.contains(&number),
                Key::Xattr { inode, .. } | Key::Extent { inode, .. } | Key::Patch { inode, .. } => {
                    nameless.contains(&inode)
                }
                Key::Entry { .. } | Key::Name { .. } => false,
            };
            if !known {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Destroys the partially received state of a file system; returns whether there was any.
    ///
    /// # Errors
    /// [`PoolError::Busy`] while a stream is being received into it.
    pub fn abort_receive(&self, parent: u64, name: &str) -> Result<bool, PoolError> {
        // One lock for all of it: no stream may resume between the check and the commit.
        let mut admin = self.admin.lock();
        let Some((_, id)) = self.half(&admin, parent, name)? else { return Ok(false) };
        if self.receiving.lock().contains(&id) {
            return Err(PoolError::Busy);
        }
        self.commit_under(&mut admin, |admin, _| self.destroy_head(admin, id))?;
        Ok(true)
    }

    /// Destroys what a crashed process was receiving, unless it can be resumed. A file system stays
    /// that has others below it, or snapshots.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn abort_unfinished(&self) -> Result<(), PoolError> {
        let mut left = Vec::new();
        {
            let admin = self.admin.lock();
            for (id, row) in admin.catalog.datasets()? {
                let mark = admin.mark(id)?;
                if mark.is_some_and(|mark| mark == ONCE) || admin.is_half(id)? && self.token_at(row.root)?.is_none() {
                    left.push(id);
                }
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        self.commit_with(|admin, _| {
            // One goes after those below it.
            let mut at = 0;
            while let Some(id) = left.get(at).copied() {
                match admin.judge_head(id) {
                    Ok(()) => {
                        self.destroy_head(admin, id)?;
                        left.remove(at);
                        at = 0;
                    }
                    Err(PoolError::Refused(_)) => at += 1,
                    Err(error) => return Err(error),
                }
            }
            for id in &left {
                let name = admin.catalog.dataset(*id)?.name;
                tracing::warn!(name, "what was half received stays: it has file systems below it, or snapshots");
            }
            Ok(())
        })
    }
}

/// The dataset that takes the rows of a stream.
enum Plan {
    /// A new file system.
    New,
    /// A clone of a snapshot.
    Clone(u64, Txg),
    /// A temporary dataset below the existing one: a clone of the base, or empty.
    Below(u64, Option<Txg>),
}

/// Refuses to overwrite a file system that has snapshots.
fn judge_overwritten(snapshots: &[(Txg, SnapshotRow)]) -> Result<(), PoolError> {
    match snapshots.first() {
        Some((_, row)) => {
            refused(format!("destination has snapshots (eg. @{}): must destroy them to overwrite it", row.name))
        }
        None => Ok(()),
    }
}

fn find_guid(admin: &Admin, guid: u64) -> Result<Option<(u64, Txg)>, PoolError> {
    for (id, _) in admin.catalog.datasets()? {
        if let Some((txg, _)) = admin.catalog.snapshots(id)?.into_iter().find(|(_, row)| row.guid == guid) {
            return Ok(Some((id, txg)));
        }
    }
    Ok(None)
}

impl Admin {
    pub(super) fn mark(&self, id: u64) -> Result<Option<String>, PoolError> {
        Ok(self.catalog.own_property(id, MARK)?.map(|row| row.value))
    }

    /// Whether a dataset is partially received.
    pub(super) fn is_half(&self, id: u64) -> Result<bool, PoolError> {
        Ok(self.mark(id)?.is_some())
    }

    /// Refuses a partially received dataset as a parent: it is destroyed if its stream is cut.
    pub(super) fn judge_parent(&self, parent: u64) -> Result<(), PoolError> {
        if self.is_half(parent)? { refused("parent is partially received") } else { Ok(()) }
    }
}

impl Receiving {
    /// Receives a record of rows.
    ///
    /// # Errors
    /// Damaged rows; no space; errors of the engine.
    pub fn rows(&mut self, payload: &[u8]) -> Result<(), StreamError> {
        let ops = record::rows(payload)?;
        let (Some(first), Some(last)) = (ops.first(), ops.last()) else { return Ok(()) };
        if !self.token.after.is_empty() && first.key() <= self.token.after.as_slice() {
            return Err(StreamError::Damaged("rows out of order"));
        }
        self.check(&ops)?;
        let owner = (self.target, self.fresh);
        for op in &ops {
            if let RowOp::Nothing { key, until } = op {
                let range = (*key, *until);
                self.dataset.files().take_away(range, owner, &self.token.encode()).map_err(as_stream_error)?;
            }
        }
        let mut token = ResumeToken {
            after: last.key().to_vec(),
            bytes: self.token.bytes + payload.len() as u64,
            ..self.token.clone()
        };
        self.is_whole = false;
        self.dataset.files().receive(&ops, owner, &token.encode()).map_err(as_stream_error)?;
        std::mem::swap(&mut self.token, &mut token);
        Ok(())
    }

    /// Refuses rows that cannot be stored here, and frames that do not match their own checksum or
    /// length.
    fn check(&self, ops: &[RowOp<'_>]) -> Result<(), StreamError> {
        let most = self.pool.storage.largest_frame();
        let mut content = Vec::new();
        for op in ops {
            match op {
                RowOp::Framed { frame, .. } => {
                    if u64::from(frame.logical) > most {
                        let why = "the stream has records that are longer than this pool can hold";
                        return Err(PoolError::Refused(why.to_owned()).into());
                    }
                    let whole = match frame.compression {
                        Compression::Off => frame.bytes.len() == frame.logical as usize,
                        compression => {
                            content.resize(frame.logical as usize, 0);
                            compress::decompress(compression, frame.bytes, &mut content)
                                && checksum::content(frame.checksum_kind, &content) == Some(frame.checksum)
                        }
                    };
                    if !whole || frame.logical == 0 {
                        return Err(StreamError::Damaged("the content of a file"));
                    }
                }
                RowOp::Put { key, value } if *key == keys::head() => {
                    let head = DatasetHead::decode(value).map_err(|_| StreamError::Damaged("the head"))?;
                    if !head.folding.is_exact() {
                        self.pool.storage.allow_folding(self.pool.seconds())?;
                    }
                    if self.pool.storage.hashing() == keys::Hashing::Whole && head.hashing != keys::Hashing::Whole {
                        let why = "this pool is of an older format than the stream needs";
                        return Err(PoolError::Refused(why.to_owned()).into());
                    }
                }
                RowOp::Put { .. } | RowOp::Gone { .. } | RowOp::Nothing { .. } => {}
            }
        }
        Ok(())
    }

    /// Number of the file system that gets the snapshot.
    #[must_use]
    pub fn target(&self) -> u64 {
        self.target
    }

    /// Whether that file system existed before.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.target != self.dataset.id()
    }

    /// Whether nothing of the existing file system remains: it must not be in use at the end then,
    /// since its rules for names may change.
    #[must_use]
    pub fn overwrites(&self) -> bool {
        self.replaces() && self.base.is_none()
    }

    /// Position up to which the stream was received.
    #[must_use]
    pub fn token(&self) -> &ResumeToken {
        &self.token
    }

    /// The limits of the stream that the file system does not get, since they do not fit here.
    #[must_use]
    pub fn left_out(&self) -> &[(String, PoolError)] {
        &self.left_out
    }

    /// Checks, once all rows were received, that they are a consistent file system; if not, the
    /// receive cannot be resumed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] with the reason; errors of reading.
    pub fn check_shape(&mut self) -> Result<(), PoolError> {
        if self.is_whole {
            return Ok(());
        }
        let base = {
            let admin = self.pool.admin.lock();
            match admin.catalog.dataset(self.dataset.id())?.origin {
                Some((of, txg)) => admin.catalog.snapshot(of, txg)?.root,
                None => None,
            }
        };
        let shape = ReceivedShape {
            context: Context { frames: &*self.pool.frames, cache: &self.pool.cache },
            old: Tree::open(base, 0, Settings::default()).view(),
            new: self.dataset.files().look_at_table(|table| table.tree.view()),
        };
        match shape.check() {
            Ok(()) => {
                self.is_whole = true;
                Ok(())
            }
            Err(PoolError::Format(what)) => {
                // Further rows would not repair it.
                self.into.resumable = false;
                refused(format!("invalid stream (its rows are no file system: {what})"))
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces the properties that the file system gets: those that it has may have changed since the receive began.
    pub fn bring(&mut self, properties: Vec<(String, Setting)>) {
        self.into.properties = properties;
    }

    /// Completes the receive once all rows were received: when this returns, the snapshot exists
    /// and the file system has its properties.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the file system was changed meanwhile, [`PoolError::Busy`] if it
    /// is in use and is [overwritten](Self::overwrites): nothing has changed then.
    pub fn finish(&mut self) -> Result<Txg, PoolError> {
        self.check_shape()?;
        let pool = Arc::clone(&self.pool);
        let id = self.dataset.id();
        if self.overwrites() {
            pool.close_datasets(&[self.target])?;
        }
        let mut admin = pool.admin.lock();
        if self.overwrites() && pool.datasets.read().contains_key(&self.target) {
            return Err(PoolError::Busy);
        }
        let used = if self.replaces() { pool.datasets.read().get(&self.target).cloned() } else { None };
        let stopped = used.as_ref().map(|dataset| dataset.files().stop());
        self.dataset.files().received().map_err(as_pool_error)?;
        let done = pool.commit_under(&mut admin, |admin, txg| {
            used.iter().for_each(|used| used.files().keep_numbers());
            self.enter_snapshot(admin, txg)
        });
        let txg = match done {
            Ok((txg, left_out)) => {
                self.left_out = left_out;
                txg
            }
            Err(error) => {
                drop(stopped);
                drop(admin);
                // The receive can be resumed, or completed by another try.
                self.dataset
                    .files()
                    .receive(&[], (self.target, self.fresh), &self.token.encode())
                    .map_err(as_pool_error)?;
                return Err(error);
            }
        };
        self.ended = true;
        pool.datasets.write().remove(&id);
        pool.receiving.lock().remove(&id);
        if let Some(stopped) = stopped {
            // Before the next commit, which would write the old tree.
            let replaced = admin
                .catalog
                .dataset(self.target)
                .and_then(|row| stopped.replace(Dataset::table(&pool, self.target, row.root)));
            if let Err(error) = replaced {
                admin.failed = Some(error.clone());
                pool.throttle.fail(&error);
                return Err(error);
            }
            drop(stopped);
        }
        pool.refresh(&admin)?;
        drop(admin);
        if let Some(dataset) = &used
            && let Err(error) = dataset.files().adopt_orphans()
        {
            tracing::error!(%error, "files without a name cannot be freed now");
        }
        Ok(txg)
    }

    fn enter_snapshot(&self, admin: &mut Admin, txg: Txg) -> Result<(Txg, Vec<(String, PoolError)>), PoolError> {
        let (id, target) = (self.dataset.id(), self.target);
        if admin.catalog.snapshot_named(target, &self.into.snapshot)?.is_some() {
            return refused(format!("destination snapshot '@{}' exists already", self.into.snapshot));
        }
        let gives_up = self.replaces().then(|| self.judge_target(admin)).transpose()?;
        let planned = admin.plan_edits(&edits(&self.into, target), &self.pool.bounds())?;
        let of_snapshot: Vec<(String, Option<PropertyRow>)> =
            self.into.of_snapshot.iter().map(|(name, to)| snapshot_row(name, to)).collect::<Result<_, _>>()?;
        // Nothing is refused from here on.
        if let Some(newer) = gives_up {
            self.become_received(admin, id, &newer)?;
        } else {
            admin.catalog.set_property(id, MARK, None)?;
        }
        admin.enter_snapshot(target, txg, &self.into.snapshot, (self.head.guid, self.head.created))?;
        admin.recount(target)?;
        for (name, row) in &of_snapshot {
            admin.catalog.set_snapshot_property(target, txg, name, row.as_ref())?;
        }
        for tag in &self.into.holds {
            admin.catalog.set_hold(target, txg, tag, Some((self.pool.clock)().seconds))?;
        }
        Ok((txg, admin.enter_what_fits(&planned)?))
    }

    /// Checks that the file system still matches the base of the stream, or still has no snapshots
    /// if there is no base; returns the newer snapshots and bookmarks to destroy.
    fn judge_target(&self, admin: &Admin) -> Result<DestroySet, PoolError> {
        let snapshots = admin.catalog.snapshots(self.target)?;
        if self.base.is_none() {
            judge_overwritten(&snapshots)?;
        }
        // Earlier versions created file systems below it.
        admin.judge_head(self.dataset.id())?;
        let base = self.base.unwrap_or_default();
        if admin.catalog.dataset(self.dataset.id())?.origin != self.base.map(|base| (self.target, base)) {
            return refused(OTHER_BASE);
        }
        let newer: Vec<String> =
            snapshots.iter().filter(|(txg, _)| *txg > base).map(|(_, row)| row.name.clone()).collect();
        if !self.into.force {
            if !newer.is_empty() {
                return refused(OTHER_BASE);
            }
            let of = snapshots.iter().find(|(txg, _)| *txg == base).and_then(|(_, row)| row.root);
            if self.base.is_some() && self.pool.is_modified(of, admin.catalog.dataset(self.target)?.root)? {
                return refused(MODIFIED);
            }
        }
        // The states of newer bookmarks are no part of the history any more.
        let marks = admin.catalog.bookmarks(self.target)?.into_iter().filter(|(_, row)| row.txg > base);
        let set = DestroySet {
            snapshots: if newer.is_empty() { Vec::new() } else { vec![(self.target, newer)] },
            bookmarks: marks.map(|(name, _)| (self.target, name)).collect(),
            ..DestroySet::default()
        };
        self.pool.judge_destroy_set(admin, &set)?;
        Ok(set)
    }

    /// Replaces the live dataset of the file system by the dataset that took the rows, which is
    /// removed.
    fn become_received(&self, admin: &mut Admin, id: u64, newer: &DestroySet) -> Result<(), PoolError> {
        let (pool, target) = (&self.pool, self.target);
        pool.take_away(admin, newer)?;
        let taken = admin.catalog.dataset(id)?;
        let mut row = admin.catalog.dataset(target)?;
        // What was born earlier belongs to the base, or to the origin of a clone.
        pool.doom(admin, row.root, row.newest)?;
        admin.catalog.deadlists().forget(row.list)?;
        (row.root, row.list) = (taken.root, taken.list);
        (row.usage.referenced, row.usage.logical_referenced) = (taken.usage.referenced, taken.usage.logical_referenced);
        let origin = if self.base.is_none() { row.origin.take() } else { None };
        if self.base.is_none() {
            row.newest = Txg(0);
        }
        admin.catalog.set_dataset(target, &row)?;
        if let Some((of, txg)) = origin {
            admin.catalog.set_clone(of, txg, target, false)?;
            admin.drop_if_due(of, txg)?;
        }
        if self.base.is_none() {
            // The stream may bring other rules for names.
            for (name, row) in pool.spelling_of(&self.head)? {
                admin.catalog.set_property(target, &name, Some(&row))?;
            }
        }
        admin.reservations.forget(id);
        admin.quota_tree().remove(id)?;
        admin.catalog.leave(id)?;
        if let Some((of, txg)) = taken.origin {
            admin.catalog.set_clone(of, txg, id, false)?;
            admin.drop_if_due(of, txg)?;
        }
        admin.recount(target)
    }

    /// Ends an interrupted receive: keeps the rows if it is resumable, and destroys them otherwise.
    /// Returns whether they are kept.
    ///
    /// # Errors
    /// Errors of a commit.
    pub fn cut(mut self) -> Result<bool, PoolError> {
        let keep = self.into.resumable && !self.token.after.is_empty();
        self.end(keep)?;
        Ok(keep)
    }

    /// Destroys the received rows of an invalid stream.
    ///
    /// # Errors
    /// Errors of a commit.
    pub fn abort(mut self) -> Result<(), PoolError> {
        self.end(false)
    }

    fn end(&mut self, keep: bool) -> Result<(), PoolError> {
        let (pool, id) = (Arc::clone(&self.pool), self.dataset.id());
        self.ended = true;
        let mut admin = pool.admin.lock();
        if keep {
            let committed = pool.commit_under(&mut admin, |_, _| Ok(()));
            pool.datasets.write().remove(&id);
            pool.receiving.lock().remove(&id);
            return committed;
        }
        // The first commit makes the rows in memory part of the dataset, which the second one
        // destroys.
        let committed = pool.commit_under(&mut admin, |_, _| Ok(()));
        pool.datasets.write().remove(&id);
        let gone = committed.and_then(|()| pool.commit_under(&mut admin, |admin, _| pool.destroy_head(admin, id)));
        pool.receiving.lock().remove(&id);
        gone
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !self.ended
            && let Err(error) = self.end(self.into.resumable && !self.token.after.is_empty())
        {
            tracing::error!(%error, "what was half received stays until the pool is imported again");
        }
    }
}

fn as_stream_error(error: crate::files::FileError) -> StreamError {
    match error {
        crate::files::FileError::Quota | crate::files::FileError::OwnerQuota => PoolError::NoSpace.into(),
        other => as_pool_error(other).into(),
    }
}
