//! Names: look-up, creation of files, links, removal, rename.
//!
//! Invariants: a look-up finds the name that is equal in this file system
//! ([`crate::rows::Folding`]), and the name keeps the bytes that it was created with; an operation
//! that changes names holds `names` throughout, and applies one batch; look-ups take the table's
//! lock alone.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inodes::Editing;
use super::keeping::NEW;
use super::owner_accounts::owners_of;
use super::xattrs::most_for_attribute;
use super::{Batch, FileError, Files, Inode, Result, Table, row_charges};
use crate::pointer::Txg;
use crate::rows::folding::Normal;
use crate::rows::{Entry, Extent, FileType, InodeRow, NameHint, NameTarget, Timestamp, entry, keys};
use crate::space::Purpose;

/// Maximum link count, the one of XFS (2^31 - 1).
const LINKS_MOST: u32 = i32::MAX as u32;

/// Description of a file that is to be created.
#[derive(Clone, Debug)]
pub struct NewInode {
    /// Type, permissions, owner, group, device; times, links and hint are set by this module.
    pub row: InodeRow,
    /// The target of a symbolic link, at most 4095 bytes.
    pub target: Option<Vec<u8>>,
    /// Extended attributes that it is created with.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl NewInode {
    /// Its largest possible charge under this name, bytes.
    fn most_charged(&self, name: &[u8]) -> u64 {
        let attributes = self.attributes.iter().map(|(name, value)| most_for_attribute(name, value)).sum::<u64>();
        let target = self.target.as_deref().map_or(0, row_charges::of_target);
        let name = if name.is_empty() { 0 } else { row_charges::of_name(name) };
        row_charges::INODE.saturating_add(attributes).saturating_add(target + name)
    }
}

/// State of the directory on which a new file may depend.
#[derive(Clone, Debug)]
pub struct ParentView {
    /// The directory's attributes.
    pub row: InodeRow,
    /// The requested extended attribute of the directory, if it has one.
    pub attribute: Option<Vec<u8>>,
    /// The time of the operation.
    pub now: Timestamp,
}

/// Describes a new file, from the state of its directory.
pub type Making<'a> = dyn Fn(&ParentView) -> Result<NewInode> + 'a;

/// An inode that is being created.
struct Birth<'b, 'e> {
    /// The directory that it is created in; and the same, locked.
    directory: &'b Inode,
    parent: &'b Editing<'e>,
    /// The directory's extended attribute that `new` gets.
    inherited: &'b [u8],
    new: &'b Making<'b>,
    /// Its name; empty for none.
    name: &'b [u8],
    now: Timestamp,
}

/// What a rename does if the new name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayReplace {
    /// Replace it.
    Yes,
    /// Refuse.
    No,
    /// Exchange the two.
    Exchange,
}

/// The result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundName {
    pub(super) inode: u64,
    pub(super) file_type: FileType,
    pub(super) sequence: u64,
}

/// A name in a directory that is locked for a change.
struct NameKey<'a> {
    directory: u64,
    name: &'a [u8],
}

impl<T: Table> Files<T> {
    /// Looks a name up in a directory; returns its inode and attributes.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::NotDirectory`], [`FileError::NameTooLong`].
    pub fn look_up(&self, directory: &Inode, name: &[u8]) -> Result<(Arc<Inode>, InodeRow)> {
        check_name(name)?;
        self.warm(&keys::names(directory.number(), self.hash(name)).start)?;
        let mut tries = 0..super::WARMED_MOST;
        let found = loop {
            let table = self.table.read();
            let Some(found) = self.find(&table, directory.number(), name)? else {
                drop(table);
                self.directory_row(directory)?;
                return Err(FileError::NotFound);
            };
            match table.absent(&keys::inode(found.inode))?.filter(|_| tries.next().is_some()) {
                None => {
                    self.keep_stored(&table, found.inode)?;
                    break found;
                }
                Some(read) => {
                    drop(table);
                    super::hint(read);
                }
            }
        };
        let inode = self.known.get(found.inode);
        // Not the row read above: a flush may have ended since, and the row of an active inode
        // lacks changes in memory.
        let row = self.attributes(&inode)?;
        Ok((inode, row))
    }

    fn hash(&self, name: &[u8]) -> u64 {
        self.numbers.hashing.hash(self.numbers.seed, &self.numbers.folding.fold(name))
    }

    /// The exact bytes of a name that was found.
    fn spelled(&self, table: &T, directory: u64, found: FoundName) -> Result<Vec<u8>> {
        let row = table.get(&keys::entry(directory, found.sequence))?;
        let row = row.ok_or(crate::PoolError::Format(crate::Damage::Structure("a name without its entry")))?;
        Ok(Entry::decode(&row)?.name.to_vec())
    }

    /// Checks a name for a file.
    fn check_new_name(&self, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let utf8 = name.is_ascii() || std::str::from_utf8(name).is_ok();
        if utf8 || self.numbers.folding.normal == Normal::None && !self.rules.read().utf8_only {
            Ok(())
        } else {
            Err(FileError::NotUtf8)
        }
    }

    fn directory_row(&self, directory: &Inode) -> Result<InodeRow> {
        let row = self.attributes(directory)?;
        if row.file_type() == Some(FileType::Directory) { Ok(row) } else { Err(FileError::NotDirectory) }
    }

    /// Finds the entry of a name: by its hash, then by comparing names.
    pub(super) fn find(&self, table: &T, directory: u64, name: &[u8]) -> Result<Option<FoundName>> {
        let hash = self.hash(name);
        let mut candidates = Vec::new();
        table.scan(keys::names(directory, hash), &mut |key, row| {
            candidates.push((key.to_vec(), row.to_vec()));
            true
        })?;
        for (key, row) in candidates {
            let keys::Key::Name { sequence, .. } = keys::Key::decode(&key)? else { continue };
            let NameTarget { inode, file_type } = NameTarget::decode(&row)?;
            let named = table.get(&keys::entry(directory, sequence))?;
            let named = named.ok_or(crate::PoolError::Format(crate::Damage::Structure("a name without its entry")))?;
            if self.numbers.folding.same(Entry::decode(&named)?.name, name) {
                return Ok(Some(FoundName { inode, file_type, sequence }));
            }
        }
        Ok(None)
    }

    /// Creates a file under a name. `new` gets the directory's state at that moment, and the value
    /// of its extended attribute `inherited` (its default access control list).
    ///
    /// # Errors
    /// [`FileError::Exists`], [`FileError::NotFound`] for a removed directory,
    /// [`FileError::NotDirectory`], [`FileError::NameTooLong`].
    pub fn make(
        &self,
        directory: &Inode,
        name: &[u8],
        inherited: &[u8],
        new: &dyn Fn(&ParentView) -> Result<NewInode>,
    ) -> Result<(Arc<Inode>, InodeRow)> {
        self.check_new_name(name)?;
        self.with_relief(|| {
            self.admit_rows(Purpose::Write)?;
            self.make_admitted(directory, name, inherited, new)
        })
    }

    fn make_admitted(
        &self,
        directory: &Inode,
        name: &[u8],
        inherited: &[u8],
        new: &dyn Fn(&ParentView) -> Result<NewInode>,
    ) -> Result<(Arc<Inode>, InodeRow)> {
        let entered = self.enter_with(NEW)?;
        let _names = self.names.lock();
        let mut parent = self.edit_directory(directory)?;
        if self.find(&self.table.read(), directory.number(), name)?.is_some() {
            return Err(FileError::Exists);
        }
        self.check_takes_names(&parent.row)?;
        let mut batch = Batch::default();
        let now = (self.clock)();
        let mut made = self.born(&Birth { directory, parent: &parent, inherited, new, name, now })?;
        let number = self.number()?;
        made.row.hint = Some(NameHint { directory: directory.number(), sequence: number });
        let file_type = file_type(&made.row)?;
        made.row.links = if file_type == FileType::Directory { 2 } else { 1 };
        let put = self.put_new(entered.txg(), number, &mut made, &mut batch).and_then(|()| {
            self.enter_name(&mut batch, &NameKey { directory: directory.number(), name }, number, (number, file_type));
            gain(&mut parent, file_type, now)
        });
        put.inspect_err(|_| self.abandon(&batch))?;
        parent.put_row(&mut batch);
        self.apply_recorded(entered.txg(), &batch)?;
        parent.take_over_row();
        self.count_new(&made.row);
        Ok((self.known.get(number), made.row))
    }

    /// Creates a regular file without a name (`O_TMPFILE`); a `linkable` one can be linked later.
    ///
    /// # Errors
    /// As [`Self::make`].
    pub fn make_nameless(
        &self,
        directory: &Inode,
        inherited: &[u8],
        linkable: bool,
        new: &dyn Fn(&ParentView) -> Result<NewInode>,
    ) -> Result<(Arc<Inode>, InodeRow)> {
        self.with_relief(|| {
            self.admit_rows(Purpose::Write)?;
            self.make_nameless_admitted(directory, inherited, linkable, new)
        })
    }

    fn make_nameless_admitted(
        &self,
        directory: &Inode,
        inherited: &[u8],
        linkable: bool,
        new: &dyn Fn(&ParentView) -> Result<NewInode>,
    ) -> Result<(Arc<Inode>, InodeRow)> {
        let entered = self.enter_with(NEW)?;
        let parent = self.edit_directory(directory)?;
        self.check_takes_names(&parent.row)?;
        let mut batch = Batch::default();
        let birth = Birth { directory, parent: &parent, inherited, new, name: b"", now: (self.clock)() };
        let mut made = self.born(&birth)?;
        drop(parent);
        let number = self.number()?;
        made.row.links = 0;
        self.put_new(entered.txg(), number, &mut made, &mut batch).inspect_err(|_| self.abandon(&batch))?;
        batch.put(&keys::orphan(number), Vec::new());
        // Held before it exists: it must not be freed as an orphan without holders.
        let inode = self.known.get(number);
        self.apply_recorded(entered.txg(), &batch)?;
        self.count_new(&made.row);
        let mut edited = self.edit(&inode)?;
        edited.lose_last_name();
        edited.activate().linkable = linkable;
        drop(edited);
        Ok((inode, made.row))
    }

    /// Locks a directory that is to get a name.
    fn edit_directory<'a>(&self, directory: &'a Inode) -> Result<Editing<'a>> {
        let edited = self.edit(directory)?;
        if edited.file_type() != FileType::Directory {
            return Err(FileError::NotDirectory);
        }
        if edited.row.links == 0 { Err(FileError::NotFound) } else { Ok(edited) }
    }

    fn born(&self, birth: &Birth<'_, '_>) -> Result<NewInode> {
        let Birth { directory, parent, inherited, new, name, now } = *birth;
        let attribute = if parent.row.flags & crate::rows::inode::flags::HAS_XATTRS == 0 {
            None
        } else {
            self.attribute_value(&self.table.read(), directory.number(), inherited)?
        };
        let mut made = new(&ParentView { row: parent.row, attribute, now })?;
        (made.row.accessed, made.row.modified, made.row.changed, made.row.born) = (now, now, now, now);
        self.judge_owners(&owners_of(&made.row), made.most_charged(name), 1)?;
        Ok(made)
    }

    fn put_new(&self, txg: Txg, number: u64, made: &mut NewInode, batch: &mut Batch) -> Result<()> {
        if let Some(target) = &made.target {
            if target.is_empty() || target.len() >= crate::rows::extent::INLINE_MOST {
                return Err(FileError::NameTooLong);
            }
            made.row.size = target.len() as u64;
            batch.put(&keys::extent(number, 0), Extent::Inline(target).encode());
        }
        for (name, value) in &made.attributes {
            made.row.charged += self.put_attribute(txg, number, name, value, batch)?;
            made.row.flags |= crate::rows::inode::flags::HAS_XATTRS;
        }
        batch.put(&keys::inode(number), made.row.encode());
        Ok(())
    }

    fn count_new(&self, row: &InodeRow) {
        self.numbers.objects.fetch_add(1, Ordering::Relaxed);
        self.count_owner(row, i64::try_from(row.charged).unwrap_or(i64::MAX), 1);
    }

    fn enter_name(&self, batch: &mut Batch, place: &NameKey<'_>, sequence: u64, (inode, file_type): (u64, FileType)) {
        let hash = self.hash(place.name);
        batch.put(&keys::entry(place.directory, sequence), Entry { inode, file_type, name: place.name }.encode());
        batch.put(&keys::name(place.directory, hash, sequence), NameTarget { inode, file_type }.encode());
    }

    fn leave_name(&self, batch: &mut Batch, place: &NameKey<'_>, sequence: u64) {
        let hash = self.hash(place.name);
        batch.remove(&keys::entry(place.directory, sequence));
        batch.remove(&keys::name(place.directory, hash, sequence));
    }

    /// Creates a hard link to a file.
    ///
    /// # Errors
    /// As [`Self::make`]; [`FileError::NotPermitted`] for directories, [`FileError::NotFound`] for
    /// a file that lost its last name, [`FileError::TooManyLinks`].
    pub fn link(&self, inode: &Arc<Inode>, directory: &Inode, name: &[u8]) -> Result<InodeRow> {
        self.check_new_name(name)?;
        self.with_relief(|| {
            self.admit_rows(Purpose::Write)?;
            self.link_admitted(inode, directory, name)
        })
    }

    fn link_admitted(&self, inode: &Arc<Inode>, directory: &Inode, name: &[u8]) -> Result<InodeRow> {
        let entered = self.enter()?;
        let _names = self.names.lock();
        if self.attributes(inode)?.file_type() == Some(FileType::Directory) {
            return Err(FileError::NotPermitted);
        }
        let mut parent = self.edit_directory(directory)?;
        if self.find(&self.table.read(), directory.number(), name)?.is_some() {
            return Err(FileError::Exists);
        }
        self.check_takes_names(&parent.row)?;
        let mut linked = self.edit(inode)?;
        self.check_linkable(&linked.row)?;
        let file_type = linked.file_type();
        // A file that never had a name has no hint.
        let was_left = linked.row.hint.is_none() && self.is_left(inode.number());
        if linked.row.links == 0 && !linked.activate().linkable && !was_left {
            return Err(FileError::NotFound);
        }
        if linked.row.links >= LINKS_MOST {
            return Err(FileError::TooManyLinks);
        }
        self.judge_owners(&owners_of(&linked.row), row_charges::of_name(name), 0)?;
        let mut batch = Batch::default();
        let now = (self.clock)();
        let sequence = self.number()?;
        self.enter_name(
            &mut batch,
            &NameKey { directory: directory.number(), name },
            sequence,
            (inode.number(), file_type),
        );
        if linked.row.links == 0 {
            batch.remove(&keys::orphan(inode.number()));
            linked.row.hint = Some(NameHint { directory: directory.number(), sequence });
        }
        linked.row.links += 1;
        linked.row.changed = now;
        linked.put_row(&mut batch);
        gain(&mut parent, file_type, now)?;
        parent.put_row(&mut batch);
        self.apply_recorded(entered.txg(), &batch)?;
        parent.take_over_row();
        linked.take_over_row();
        if let Some(active) = linked.active.as_mut() {
            (active.nameless, active.linkable) = (false, false);
        }
        Ok(linked.row)
    }

    /// Removes a name of a file that is no directory.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::IsDirectory`].
    pub fn unlink(&self, directory: &Inode, name: &[u8]) -> Result<()> {
        self.take(directory, name, false).map(drop)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::NotDirectory`], [`FileError::NotEmpty`].
    pub fn remove_directory(&self, directory: &Inode, name: &[u8]) -> Result<()> {
        self.take(directory, name, true).map(drop)
    }

    /// Removes the name of an empty directory, or of another file; returns its inode, and its
    /// remaining link count.
    ///
    /// # Errors
    /// As [`Self::unlink`] and [`Self::remove_directory`].
    pub fn take(&self, directory: &Inode, name: &[u8], is_directory: bool) -> Result<(Arc<Inode>, u32)> {
        check_name(name)?;
        self.with_relief(|| self.admit_rows(Purpose::Free))?;
        self.warm(&keys::names(directory.number(), self.hash(name)).start)?;
        let entered = self.enter()?;
        let _names = self.names.lock();
        let mut parent = self.edit(directory)?;
        if parent.file_type() != FileType::Directory {
            return Err(FileError::NotDirectory);
        }
        let found = self.find(&self.table.read(), directory.number(), name)?.ok_or(FileError::NotFound)?;
        match (found.file_type == FileType::Directory, is_directory) {
            (true, false) => return Err(FileError::IsDirectory),
            (false, true) => return Err(FileError::NotDirectory),
            _ => {}
        }
        if found.inode == directory.number() {
            return Err(leads_back());
        }
        // Declared before its lock, so that it is dropped after it.
        let inode = self.known.get(found.inode);
        let mut taken = self.edit(&inode)?;
        self.check_loses_name(&parent.row, &taken.row)?;
        check_empty(&taken)?;
        let mut batch = Batch::default();
        let now = (self.clock)();
        self.leave_name(&mut batch, &NameKey { directory: directory.number(), name }, found.sequence);
        lose_name(&mut taken, now, &mut batch);
        lose(&mut parent, found.file_type, now);
        parent.put_row(&mut batch);
        self.apply_recorded(entered.txg(), &batch)?;
        parent.take_over_row();
        take_over_lost_name(&mut taken);
        let left = taken.row.links;
        drop(taken);
        if left == 0 {
            self.note_last_name();
        }
        Ok((inode, left))
    }

    /// Renames.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::Exists`] with [`MayReplace::No`],
    /// [`FileError::NotEmpty`], [`FileError::NotDirectory`], [`FileError::IsDirectory`],
    /// [`FileError::Invalid`] for a directory that would come below itself.
    pub fn rename(&self, from: (&Inode, &[u8]), to: (&Inode, &[u8]), replace: MayReplace) -> Result<()> {
        self.rename_and(from, to, replace, None)
    }

    /// As [`Self::rename`], and creates another file under the old name in the same step: a
    /// whiteout of an overlay (`RENAME_WHITEOUT`). Not together with [`MayReplace::Exchange`].
    ///
    /// # Errors
    /// In addition, [`FileError::Invalid`] for an exchange, and the errors of [`Self::make`] for
    /// limits.
    pub fn rename_leaving(
        &self,
        from: (&Inode, &[u8]),
        to: (&Inode, &[u8]),
        replace: MayReplace,
        left: &Making<'_>,
    ) -> Result<()> {
        if replace == MayReplace::Exchange {
            Err(FileError::Invalid)
        } else {
            self.rename_and(from, to, replace, Some(left))
        }
    }

    fn rename_and(
        &self,
        from: (&Inode, &[u8]),
        to: (&Inode, &[u8]),
        replace: MayReplace,
        left: Option<&Making<'_>>,
    ) -> Result<()> {
        check_name(from.1)?;
        self.check_new_name(to.1)?;
        let purpose = if left.is_some() { Purpose::Write } else { Purpose::Free };
        self.with_relief(|| {
            self.admit_rows(purpose)?;
            self.rename_admitted(from, to, replace, left)
        })
    }

    fn rename_admitted(
        &self,
        from: (&Inode, &[u8]),
        to: (&Inode, &[u8]),
        replace: MayReplace,
        left: Option<&Making<'_>>,
    ) -> Result<()> {
        let entered = self.enter_with(NEW)?;
        let _names = self.names.lock();
        let (source, mut target) = {
            let table = self.table.read();
            let source = self.find(&table, from.0.number(), from.1)?;
            (source, self.find(&table, to.0.number(), to.1)?)
        };
        let Some(source) = source else {
            self.directory_row(from.0)?;
            return Err(FileError::NotFound);
        };
        let (mut old_name, mut new_name) = (Cow::Borrowed(from.1), Cow::Borrowed(to.1));
        if !self.numbers.folding.is_exact() {
            let table = self.table.read();
            let spelled = self.spelled(&table, from.0.number(), source)?;
            if target == Some(source) && from.0.number() == to.0.number() {
                // Another spelling of one name.
                if spelled == to.1 || left.is_some() || replace == MayReplace::Exchange {
                    return Ok(());
                }
                target = None;
            }
            old_name = Cow::Owned(spelled);
            if let (Some(target), MayReplace::Exchange) = (target, replace) {
                new_name = Cow::Owned(self.spelled(&table, to.0.number(), target)?);
            }
        }
        if let ControlFlow::Break(answer) = self.judge_rename(from.0, source, to.0, target, replace)? {
            return answer;
        }
        let parents = [from.0.number(), to.0.number()];
        if parents.contains(&source.inode) || target.is_some_and(|target| parents.contains(&target.inode)) {
            return Err(leads_back());
        }
        let mut parents = Parents::lock(self, from.0, to.0)?;
        if parents.to().row.links == 0 {
            return Err(FileError::NotFound);
        }
        let now = (self.clock)();
        let mut batch = Batch::default();
        let (old, new) = (
            NameKey { directory: from.0.number(), name: &old_name },
            NameKey { directory: to.0.number(), name: &new_name },
        );
        let moved = self.known.get(source.inode);
        let mut moving = self.edit(&moved)?;
        self.check_loses_name(&parents.from().row, &moving.row)?;
        self.check_takes_names(&parents.to().row)?;
        if target.is_none() {
            let longer = new_name.len().saturating_sub(old_name.len()) as u64;
            self.judge_owners(&owners_of(&moving.row), longer, 0)?;
        }
        if target.is_some() && replace != MayReplace::Exchange {
            self.record_before_replacing(entered.txg(), &mut moving);
        }
        let other = target.map(|target| self.known.get(target.inode));
        let mut replaced = other.as_deref().map(|other| self.edit(other)).transpose()?;
        if let Some(replaced) = &replaced {
            self.check_loses_name(&parents.to().row, &replaced.row)?;
        }
        // A name that exists before and after keeps its position in listings, and so does a file
        // that is renamed within its directory: a concurrent listing shows each of them once.
        let beside = from.0.number() == to.0.number() && left.is_none();
        let sequence = match target {
            Some(target) => target.sequence,
            None if beside => source.sequence,
            None => self.number()?,
        };
        lose(parents.from(), source.file_type, now);
        if let (Some(target), Some(edited)) = (target, replaced.as_mut()) {
            lose(parents.to(), target.file_type, now);
            if replace == MayReplace::Exchange {
                self.enter_name(&mut batch, &old, source.sequence, (target.inode, target.file_type));
                gain(parents.from(), target.file_type, now)?;
                edited.row.hint = Some(NameHint { directory: old.directory, sequence: source.sequence });
                edited.row.changed = now;
                edited.put_row(&mut batch);
            } else {
                check_empty(edited)?;
                lose_name(edited, now, &mut batch);
            }
        }
        if replace != MayReplace::Exchange && left.is_none() {
            self.leave_name(&mut batch, &old, source.sequence);
        }
        self.enter_name(&mut batch, &new, sequence, (source.inode, source.file_type));
        gain(parents.to(), source.file_type, now)?;
        moving.row.hint = Some(NameHint { directory: new.directory, sequence });
        moving.row.changed = now;
        moving.put_row(&mut batch);
        let made = left.map(|new| {
            self.leave_another(entered.txg(), (from.0, &old, source.sequence), parents.from(), new, now, &mut batch)
        });
        let made = made.transpose().inspect_err(|_| self.abandon(&batch))?;
        parents.put_rows(&mut batch);
        self.apply_recorded(entered.txg(), &batch)?;
        parents.take_over_rows();
        moving.take_over_row();
        replaced.as_mut().into_iter().for_each(take_over_lost_name);
        if let Some(row) = made {
            self.count_new(&row);
        }
        if target.is_some() && replace != MayReplace::Exchange {
            self.note_last_name();
        }
        Ok(())
    }

    /// Creates a file that is no directory under the name that a rename has just freed.
    fn leave_another(
        &self,
        txg: Txg,
        (directory, place, sequence): (&Inode, &NameKey<'_>, u64),
        parent: &mut Editing<'_>,
        new: &Making<'_>,
        now: Timestamp,
        batch: &mut Batch,
    ) -> Result<InodeRow> {
        let mut made = self.born(&Birth { directory, parent, inherited: b"", new, name: place.name, now })?;
        let number = self.number()?;
        made.row.hint = Some(NameHint { directory: place.directory, sequence });
        made.row.links = 1;
        let file_type = file_type(&made.row)?;
        if file_type == FileType::Directory {
            return Err(FileError::IsDirectory);
        }
        self.put_new(txg, number, &mut made, batch)?;
        self.enter_name(batch, place, sequence, (number, file_type));
        gain(parent, file_type, now)?;
        Ok(made.row)
    }

    /// Checks a rename; `Break` with its result if there is nothing to do.
    fn judge_rename(
        &self,
        from: &Inode,
        source: FoundName,
        to: &Inode,
        target: Option<FoundName>,
        replace: MayReplace,
    ) -> Result<ControlFlow<Result<()>>> {
        let stop = |error| Ok(ControlFlow::Break(Err(error)));
        self.directory_row(to)?;
        match (replace, target) {
            (MayReplace::No, Some(_)) => return stop(FileError::Exists),
            (MayReplace::Exchange, None) => return stop(FileError::NotFound),
            _ => {}
        }
        if source.file_type == FileType::Directory && self.is_at_or_below(to.number(), source.inode)? {
            return stop(FileError::Invalid);
        }
        let Some(target) = target else { return Ok(ControlFlow::Continue(())) };
        if target.file_type == FileType::Directory && self.is_at_or_below(from.number(), target.inode)? {
            return stop(if replace == MayReplace::Exchange { FileError::Invalid } else { FileError::NotEmpty });
        }
        if source.inode == target.inode {
            // Two names of one file: nothing happens (rename(2)).
            return Ok(ControlFlow::Break(Ok(())));
        }
        match (source.file_type == FileType::Directory, target.file_type == FileType::Directory) {
            _ if replace == MayReplace::Exchange => Ok(ControlFlow::Continue(())),
            (true, false) => stop(FileError::NotDirectory),
            (false, true) => stop(FileError::IsDirectory),
            _ => Ok(ControlFlow::Continue(())),
        }
    }

    /// Whether `directory` is `above` itself or lies below it. Directories have one name each, so
    /// their hints lead to the root.
    fn is_at_or_below(&self, directory: u64, above: u64) -> Result<bool> {
        let (mut at, mut climb) = (directory, Climb::default());
        loop {
            if at == above {
                return Ok(true);
            }
            climb.pass(at)?;
            match self.attributes(&self.known.get(at))?.hint {
                Some(hint) => at = hint.directory,
                None => return Ok(false),
            }
        }
    }

    /// Returns the parent of a directory; the root's is itself.
    ///
    /// # Errors
    /// [`FileError::NotFound`] if it is gone.
    pub fn parent(&self, directory: &Inode) -> Result<Arc<Inode>> {
        let above = self.attributes(directory)?.hint.map_or(self.numbers.root, |hint| hint.directory);
        Ok(self.known.get(above))
    }

    /// Returns the path of a file below the root, by the name in its hint; `None` if that name is
    /// gone.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn path(&self, inode: &Inode) -> Result<Option<Vec<u8>>> {
        let (mut parts, mut climb) = (Vec::new(), Climb::default());
        let mut at = inode.number();
        while at != self.numbers.root {
            climb.pass(at)?;
            let Some(hint) = self.attributes(&self.known.get(at))?.hint else { return Ok(None) };
            let Some(row) = self.table.read().get(&keys::entry(hint.directory, hint.sequence))? else {
                return Ok(None);
            };
            let entry = Entry::decode(&row)?;
            if entry.inode != at {
                return Ok(None);
            }
            parts.push(entry.name.to_vec());
            at = hint.directory;
        }
        parts.reverse();
        Ok(Some(parts.join(&b'/')))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// [`FileError::Invalid`] for anything else.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>> {
        if self.attributes(inode)?.file_type() != Some(FileType::Symlink) {
            return Err(FileError::Invalid);
        }
        let row = self.table.read().get(&keys::extent(inode.number(), 0))?.ok_or(FileError::NotFound)?;
        match Extent::decode(&row)? {
            Extent::Inline(target) => Ok(target.to_vec()),
            _ => Err(crate::PoolError::Format(crate::Damage::Structure("a symbolic link without its target")).into()),
        }
    }
}

/// The one or two directories of a rename, locked.
struct Parents<'a> {
    from: Editing<'a>,
    to: Option<Editing<'a>>,
}

impl<'a> Parents<'a> {
    fn lock<T: Table>(files: &Files<T>, from: &'a Inode, to: &'a Inode) -> Result<Self> {
        let locked = files.edit(from)?;
        let to = if from.number() == to.number() { None } else { Some(files.edit(to)?) };
        Ok(Self { from: locked, to })
    }

    fn from(&mut self) -> &mut Editing<'a> {
        &mut self.from
    }

    fn to(&mut self) -> &mut Editing<'a> {
        self.to.as_mut().unwrap_or(&mut self.from)
    }

    fn put_rows(&self, batch: &mut Batch) {
        self.from.put_row(batch);
        if let Some(to) = &self.to {
            to.put_row(batch);
        }
    }

    fn take_over_rows(&mut self) {
        self.from.take_over_row();
        if let Some(to) = &mut self.to {
            to.take_over_row();
        }
    }
}

/// A name in a damaged directory that leads to this directory: locking both would deadlock.
fn leads_back() -> FileError {
    crate::PoolError::Format(crate::Damage::Structure("a name that leads to its own directory")).into()
}

/// The path from a directory to the root; ends also if damaged hints form a cycle (Brent's
/// algorithm).
#[derive(Default)]
struct Climb {
    steps: u64,
    passed: Option<u64>,
}

impl Climb {
    fn pass(&mut self, at: u64) -> Result<()> {
        if self.passed == Some(at) {
            let damage = crate::Damage::Structure("a directory below itself");
            return Err(crate::PoolError::Format(damage).into());
        }
        self.steps += 1;
        if self.steps.is_power_of_two() {
            self.passed = Some(at);
        }
        Ok(())
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > keys::NAME_MOST {
        return Err(FileError::NameTooLong);
    }
    if entry::is_name(name) { Ok(()) } else { Err(FileError::Invalid) }
}

fn file_type(row: &InodeRow) -> Result<FileType> {
    row.file_type().ok_or(FileError::Invalid)
}

fn check_empty(edited: &Editing<'_>) -> Result<()> {
    if edited.file_type() == FileType::Directory && edited.row.size != 0 { Err(FileError::NotEmpty) } else { Ok(()) }
}

/// Counts a new name in a directory.
fn gain(directory: &mut Editing<'_>, of: FileType, now: Timestamp) -> Result<()> {
    let row = &mut directory.row;
    if of == FileType::Directory {
        if row.links >= LINKS_MOST {
            return Err(FileError::TooManyLinks);
        }
        row.links += 1;
    }
    row.size += 1;
    (row.modified, row.changed) = (now, now);
    Ok(())
}

/// Counts a removed name in a directory.
fn lose(directory: &mut Editing<'_>, of: FileType, now: Timestamp) {
    let row = &mut directory.row;
    if of == FileType::Directory {
        row.links = row.links.saturating_sub(1);
    }
    row.size = row.size.saturating_sub(1);
    (row.modified, row.changed) = (now, now);
}

/// Removes one of a file's names; a file without any is an orphan until its last holder drops it.
fn lose_name(edited: &mut Editing<'_>, now: Timestamp, batch: &mut Batch) {
    let directory = edited.file_type() == FileType::Directory;
    edited.row.links = if directory { 0 } else { edited.row.links.saturating_sub(1) };
    edited.row.changed = now;
    if edited.row.links == 0 {
        batch.put(&keys::orphan(edited.number), Vec::new());
    }
    edited.put_row(batch);
}

/// Puts the row of a file that may have lost its last name into the active inode, after the table has it.
fn take_over_lost_name(edited: &mut Editing<'_>) {
    edited.take_over_row();
    if edited.row.links == 0 {
        edited.lose_last_name();
    }
}
