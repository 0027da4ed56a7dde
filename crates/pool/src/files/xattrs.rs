//! Extended attributes: values in rows, long ones in frames of their own; logs have the values in
//! full. The caller checks which names a user may access.

use std::sync::Arc;

use super::keeping::ROWS;
use super::owner_accounts::owners_of;
use super::quota_check::worst;
use super::row_charges::of_attribute;
use super::{Batch, FileError, Files, Inode, Result, Table};
use crate::deadlist::Dead;
use crate::frames::{NewFrame, Owner, WriteStream};
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::inode::flags::HAS_XATTRS;
use crate::rows::xattr::{INLINE_MOST, VALUE_MOST};
use crate::rows::{InodeRow, Xattr, keys};
use crate::space::Purpose;

/// Largest possible charge of an attribute, bytes: its row, and the frame of a long value.
pub(super) fn most_for_attribute(name: &[u8], value: &[u8]) -> u64 {
    if value.len() > INLINE_MOST { worst(value.len()) + name.len() as u64 } else { of_attribute(name, value) }
}

/// Sets the permission bits, if there are new ones.
fn set_permissions(row: &mut InodeRow, permissions: Option<u16>) {
    if let Some(permissions) = permissions {
        row.mode = row.mode & !0o7777 | permissions & 0o7777;
    }
}

impl<T: Table> Files<T> {
    /// Returns the value of an attribute.
    ///
    /// # Errors
    /// [`FileError::NoData`] if there is none.
    pub fn attribute(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        if self.attributes(inode)?.flags & HAS_XATTRS == 0 {
            return Err(FileError::NoData);
        }
        self.attribute_value(&self.table.read(), inode.number(), name)?.ok_or(FileError::NoData)
    }

    pub(super) fn attribute_value(&self, table: &T, number: u64, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let key = keys::xattr(number, name);
        let Some(row) = table.get(&key)? else { return Ok(None) };
        if let Some(value) = self.held_values.get(&key) {
            return Ok(Some(value));
        }
        Ok(Some(match Xattr::decode(&row)? {
            Xattr::Inline(value) => value.to_vec(),
            Xattr::Frame(pointer) => self.frames.read(&pointer)?.to_vec(),
        }))
    }

    /// Returns the names of all attributes.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn attribute_names(&self, inode: &Inode) -> Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        if self.attributes(inode)?.flags & HAS_XATTRS != 0 {
            let range = keys::xattrs(inode.number());
            let before_name = range.start.len();
            self.table.read().scan(range, &mut |key, _| {
                names.push(key.get(before_name..).unwrap_or_default().to_vec());
                true
            })?;
        }
        Ok(names)
    }

    /// Sets an attribute; `exists` requires that it exists already, or that it does not. With
    /// `permissions` the permission bits are set in the same step, as an access control list
    /// requires.
    ///
    /// # Errors
    /// [`FileError::AttributeExists`], [`FileError::NoData`], [`FileError::TooLarge`] for a value
    /// of more than 64 KiB, [`FileError::Invalid`] for an impossible name, [`FileError::NotPermitted`] for an immutable
    /// or append-only file.
    pub fn set_attribute(
        &self,
        inode: &Arc<Inode>,
        name: &[u8],
        value: &[u8],
        exists: Option<bool>,
        permissions: Option<u16>,
    ) -> Result<()> {
        self.with_relief(|| {
            self.admit_rows(Purpose::Write)?;
            self.set_admitted(inode, (name, value), exists, permissions)
        })
    }

    fn set_admitted(
        &self,
        inode: &Arc<Inode>,
        (name, value): (&[u8], &[u8]),
        exists: Option<bool>,
        permissions: Option<u16>,
    ) -> Result<()> {
        let entered = self.enter_with(ROWS + value.len() as u64)?;
        let mut edited = self.edit(inode)?;
        self.check_takes_xattrs(&edited.row)?;
        let mut batch = Batch::default();
        let (old, replaced) = self.old_frame(inode.number(), name, exists)?;
        self.judge_owners(&owners_of(&edited.row), most_for_attribute(name, value).saturating_sub(replaced), 0)?;
        let charged = self.put_attribute(entered.txg(), inode.number(), name, value, &mut batch)?;
        edited.row.flags |= HAS_XATTRS;
        set_permissions(&mut edited.row, permissions);
        self.settle_attributes(entered.txg(), edited, (old, charged), batch)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// [`FileError::NoData`] where there is none, [`FileError::NotPermitted`] for an immutable or append-only file.
    pub fn remove_attribute(&self, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
        self.remove_where(inode, name, None, &|row| self.check_takes_xattrs(row))
    }

    /// Removes an attribute and sets the permission bits in the same step, as the removal of an access control list
    /// requires.
    ///
    /// # Errors
    /// As [`Self::remove_attribute`].
    pub fn remove_attribute_setting_mode(&self, inode: &Arc<Inode>, name: &[u8], permissions: u16) -> Result<()> {
        self.remove_where(inode, name, Some(permissions), &|row| self.check_takes_xattrs(row))
    }

    /// Removes an attribute that a write to the file takes away, whatever the file's flags.
    ///
    /// # Errors
    /// [`FileError::NoData`] where there is none.
    pub fn remove_attribute_by_write(&self, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
        self.remove_where(inode, name, None, &|_| Ok(()))
    }

    fn remove_where(
        &self,
        inode: &Arc<Inode>,
        name: &[u8],
        permissions: Option<u16>,
        check: &dyn Fn(&InodeRow) -> Result<()>,
    ) -> Result<()> {
        self.with_relief(|| self.admit_rows(Purpose::Free))?;
        let entered = self.enter()?;
        let mut edited = self.edit(inode)?;
        check(&edited.row)?;
        let mut batch = Batch::default();
        let (old, _) = self.old_frame(inode.number(), name, Some(true))?;
        let key = keys::xattr(inode.number(), name);
        batch.remove(&key);
        self.held_values.remove(&key);
        set_permissions(&mut edited.row, permissions);
        self.settle_attributes(entered.txg(), edited, (old, 0), batch)
    }

    /// The current frame of an attribute, if any, and the least that the attribute is charged;
    /// checks whether it exists as required.
    pub(super) fn old_frame(&self, number: u64, name: &[u8], exists: Option<bool>) -> Result<(Option<Pointer>, u64)> {
        let old = self.table.read().get(&keys::xattr(number, name))?;
        match (exists, &old) {
            (Some(true), None) => return Err(FileError::NoData),
            (Some(false), Some(_)) => return Err(FileError::AttributeExists),
            _ => {}
        }
        Ok(match old.as_deref().map(Xattr::decode).transpose()? {
            Some(Xattr::Frame(pointer)) => (Some(pointer), pointer.owner_charge() + of_attribute(name, &[])),
            Some(Xattr::Inline(value)) => (None, of_attribute(name, value)),
            None => (None, 0),
        })
    }

    /// Applies a change of an attribute with its old frame and its new charge. The old frame is
    /// freed only once no row references it.
    fn settle_attributes(
        &self,
        txg: Txg,
        mut edited: super::inodes::Editing<'_>,
        (old, charged): (Option<Pointer>, u64),
        mut batch: Batch,
    ) -> Result<()> {
        let change = charged as i64 - old.as_ref().map_or(0, Pointer::owner_charge) as i64;
        edited.row.charged = edited.row.charged.saturating_add_signed(change);
        edited.row.changed = (self.clock)();
        edited.put_row(&mut batch);
        self.apply_recorded(txg, &batch)?;
        edited.take_over_row();
        if change != 0 {
            self.count_owner(&edited.row, change, 0);
        }
        if let Some(pointer) = old {
            self.freed.lock().push(Dead::of(&pointer, false));
        }
        Ok(())
    }

    /// Puts an attribute; returns its charge in addition to its row.
    pub(super) fn put_attribute(
        &self,
        txg: Txg,
        number: u64,
        name: &[u8],
        value: &[u8],
        batch: &mut Batch,
    ) -> Result<u64> {
        if keys::check_xattr_name(name).is_err() {
            return Err(FileError::Invalid);
        }
        if value.len() > VALUE_MOST {
            return Err(FileError::TooLarge);
        }
        let key = keys::xattr(number, name);
        self.held_values.remove(&key);
        if value.len() <= INLINE_MOST {
            batch.put(&key, Xattr::Inline(value).encode());
            return Ok(0);
        }
        if self.throttle.is_in_memory() {
            self.held_values.put(&key, value);
            batch.put(&key, Xattr::Inline(&[]).encode());
            return Ok(0);
        }
        let storing = *self.storing.read();
        let owner = Owner { dataset: self.dataset, object: number, offset: 0 };
        let promised = worst(value.len());
        let purpose = if self.is_replaying() { None } else { Some(Purpose::Write) };
        self.admission.admit(self.dataset, promised, purpose)?;
        let written = self.write_frame(&NewFrame {
            stream: WriteStream::Metadata,
            kind: FrameKind::Value,
            owner,
            birth: txg,
            content: value,
            compression: storing.compression,
            checksum: storing.checksum,
        });
        let charged = written.as_ref().map_or(0, Pointer::charged);
        self.admission.charge(self.dataset, txg, promised, charged);
        let pointer = written?;
        if self.keeper.get().is_some() || self.recorder.get().is_some() {
            // The frame becomes durable with a commit only, and other records may depend on this
            // one.
            batch.logged_as.push((key.clone(), Xattr::Inline(value).encode()));
        }
        batch.put(&key, Xattr::Frame(pointer).encode());
        batch.written.push(Dead::of(&pointer, false));
        Ok(pointer.owner_charge())
    }
}
