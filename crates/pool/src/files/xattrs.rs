//! Extended attributes: values in rows, long ones in frames of their own. Which names may be used by whom is judged above.

use std::sync::Arc;

use super::admission::worst;
use super::{Batch, FileError, Files, Inode, Result, Table};
use crate::deadlist::Dead;
use crate::frames::{NewFrame, Owner, Stream};
use crate::pointer::{FrameKind, Pointer, Txg};
use crate::rows::inode::flags::HAS_XATTRS;
use crate::rows::xattr::{INLINE_MOST, VALUE_MOST};
use crate::rows::{Xattr, keys};
use crate::space::Purpose;

impl<T: Table> Files<T> {
    /// The value of an attribute.
    ///
    /// # Errors
    /// [`FileError::NoData`] where there is none.
    pub fn attribute(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        if self.attributes(inode)?.flags & HAS_XATTRS == 0 {
            return Err(FileError::NoData);
        }
        self.attribute_value(&self.table.read(), inode.number(), name)?.ok_or(FileError::NoData)
    }

    pub(super) fn attribute_value(&self, table: &T, number: u64, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(row) = table.get(&keys::xattr(number, name))? else { return Ok(None) };
        Ok(Some(match Xattr::decode(&row)? {
            Xattr::Inline(value) => value.to_vec(),
            Xattr::Frame(pointer) => self.frames.read(&pointer)?.to_vec(),
        }))
    }

    /// The names of all attributes.
    ///
    /// # Errors
    /// Those of the engine.
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

    /// Sets an attribute; `exists` demands that it is there already, or that it is not. With `permissions` the permission bits become these in the same
    /// step, as an access control list asks for.
    ///
    /// # Errors
    /// [`FileError::AttributeExists`], [`FileError::NoData`], [`FileError::TooLarge`] for a value of more than 64 KiB, [`FileError::Invalid`] for an
    /// impossible name.
    pub fn set_attribute(
        &self,
        inode: &Arc<Inode>,
        name: &[u8],
        value: &[u8],
        exists: Option<bool>,
        permissions: Option<u16>,
    ) -> Result<()> {
        self.with_relief(|| self.admit_rows(Purpose::Write))?;
        let entered = self.enter()?;
        let mut edited = self.edit(inode)?;
        let mut batch = Batch::default();
        let freed = self.drop_attribute(inode.number(), name, exists)?;
        let charged = self.put_attribute(entered.txg(), inode.number(), name, value, &mut batch)?;
        self.settle_attributes(&mut edited, freed, charged);
        edited.row.flags |= HAS_XATTRS;
        if let Some(permissions) = permissions {
            edited.row.mode = edited.row.mode & !0o7777 | permissions & 0o7777;
        }
        edited.put(&mut batch);
        self.apply_recorded(entered.txg(), &batch)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// [`FileError::NoData`] where there is none.
    pub fn remove_attribute(&self, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
        self.with_relief(|| self.admit_rows(Purpose::Free))?;
        let entered = self.enter()?;
        let mut edited = self.edit(inode)?;
        let mut batch = Batch::default();
        let freed = self.drop_attribute(inode.number(), name, Some(true))?;
        batch.remove(&keys::xattr(inode.number(), name));
        self.settle_attributes(&mut edited, freed, 0);
        edited.put(&mut batch);
        self.apply_recorded(entered.txg(), &batch)
    }

    /// What the attribute is charged now, and frees its frame; checks that it exists where that matters.
    fn drop_attribute(&self, number: u64, name: &[u8], exists: Option<bool>) -> Result<u64> {
        let old = self.table.read().get(&keys::xattr(number, name))?;
        match (exists, &old) {
            (Some(true), None) => return Err(FileError::NoData),
            (Some(false), Some(_)) => return Err(FileError::AttributeExists),
            _ => {}
        }
        match old.as_deref().map(Xattr::decode).transpose()? {
            Some(Xattr::Frame(pointer)) => {
                self.freed.lock().push(Dead::of(&pointer, false));
                Ok(pointer.charged())
            }
            _ => Ok(0),
        }
    }

    fn settle_attributes(&self, edited: &mut super::inodes::Editing<'_>, freed: u64, charged: u64) {
        let change = charged as i64 - freed as i64;
        edited.row.charged = edited.row.charged.saturating_add_signed(change);
        edited.row.changed = (self.clock)();
        if change != 0 {
            self.count_owner(&edited.row, change, 0);
        }
    }

    /// Puts an attribute; answers what it is charged beyond its row.
    pub(super) fn put_attribute(&self, txg: Txg, number: u64, name: &[u8], value: &[u8], batch: &mut Batch) -> Result<u64> {
        if keys::check_xattr_name(name).is_err() {
            return Err(FileError::Invalid);
        }
        if value.len() > VALUE_MOST {
            return Err(FileError::TooLarge);
        }
        let key = keys::xattr(number, name);
        if value.len() <= INLINE_MOST {
            batch.put(&key, Xattr::Inline(value).encode());
            return Ok(0);
        }
        let storing = *self.storing.read();
        let owner = Owner { dataset: self.dataset, object: number, offset: 0 };
        let promised = worst(value.len());
        let purpose = if self.is_replaying() { None } else { Some(Purpose::Write) };
        self.admission.admit(self.dataset, promised, purpose)?;
        let written = self.write_frame(&NewFrame {
            stream: Stream::Metadata,
            kind: FrameKind::Value,
            owner,
            birth: txg,
            content: value,
            packing: storing.packing,
            checksum: storing.checksum,
        });
        let charged = written.as_ref().map_or(0, Pointer::charged);
        self.admission.turn(self.dataset, txg, promised, charged);
        let pointer = written?;
        batch.put(&key, Xattr::Frame(pointer).encode());
        // The frame is durable with the commit only, and other records may come to depend on this one.
        self.recorder.get().iter().for_each(|recorder| recorder.cannot_record(txg));
        Ok(pointer.charged())
    }
}
