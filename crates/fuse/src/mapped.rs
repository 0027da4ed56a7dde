//! Files whose pages in the mount's own page cache may be dirty by stores to a shared mapping: mounts without
//! passthrough, and files that the kernel opens without a request. No request precedes such a store, and the kernel
//! looks for data and holes (LSEEK) without writing the pages back.
//!
//! Called by the handlers of `ops/` with LSEEK, with every open file, and with every reply with attributes.
//! Invariants: holes are reported only after the dirty pages have been written back, or where there can be none;
//! otherwise the file is reported as data up to its length. A file of non-zero length that may have dirty pages never
//! has zero blocks (`tar -S` would archive it as one hole).

use crate::{door::Door, failure::Outcome};
use fusewire::Header;
use nacre_vfs::{Attr, Caller, Kind, Node, OpenFlags, Opened};
use std::sync::Arc;

impl Door {
    /// Whether a shared mapping of a file may dirty pages of this mount. A mapping keeps its file open
    /// for reading and writing until the last munmap(2).
    pub(crate) fn may_be_mapped(&self, nodeid: u64) -> bool {
        if self.options.read_only {
            return false;
        }
        if self.writes_unopened() {
            return true;
        }
        self.inodes
            .with_any(nodeid, |record| record.open_state_if_any().is_some_and(|state| state.is_mapped_here()))
            .unwrap_or(false)
    }

    /// Whether a file without blocks may have dirty pages, which will allocate some.
    pub(crate) fn blocks_may_come(&self, nodeid: u64, attr: &Attr) -> bool {
        attr.kind == Kind::File && attr.size > 0 && attr.blocks == 0 && self.may_be_mapped(nodeid)
    }

    /// Invalidates cached attributes without blocks, which are no longer true after the first store, when a file has
    /// been opened in a way that allows stores to its pages.
    pub(crate) fn opened_for_mapping(&self, nodeid: u64, node: &Node, flags: OpenFlags, file: &Opened) {
        if !flags.maps_for_writing() || self.writeback.on() {
            return;
        }
        let empty = match self.layer.getattr(&Caller::ROOT, node, Some(&**file)) {
            Ok(attr) => self.blocks_may_come(nodeid, &attr),
            Err(_) => true,
        };
        if empty {
            // Attributes alone: the kernel takes no lock of the file for that.
            self.kernel.tell(|notifier| notifier.inval_inode(nodeid, -1, 0).is_ok());
        }
    }

    /// Writes the dirty pages of a file back before the layer searches for data and holes. Where that is not possible
    /// because the caller of lseek(2) holds the inode's lock, the file is reported as data up to the length returned
    /// here.
    pub(crate) fn flush_for_seek(&self, header: &Header, file: &Opened) -> Outcome<Option<u64>> {
        let nodeid = header.nodeid;
        if self.writeback.caches_writes(nodeid) {
            if !self.writeback.flush_for_seek {
                return Ok(fusewire::blocking(|| self.writeback.kernel_length(nodeid))??);
            }
            // Other threads serve the writes.
            fusewire::blocking(|| self.writeback.flush_file(nodeid))??;
            return Ok(None);
        }
        if !self.may_be_mapped(nodeid) {
            return Ok(None);
        }
        let Some(inode) = self.key_of(nodeid) else { return Ok(None) };
        let node = self.node(nodeid)?;
        let attr = self.layer.getattr(&Caller::ROOT, &node, Some(&**file))?;
        if attr.kind != Kind::File {
            return Ok(None);
        }
        let writeback = Arc::clone(&self.writeback);
        let clean = if writeback.flush_for_seek {
            fusewire::blocking(|| writeback.flush_mapped(inode, header.pid))
        } else if self.writes_unopened() {
            // The kernel keeps the times of such files, and a store moves them.
            fusewire::blocking(|| writeback.has_times(inode, attr.mtime))
        } else {
            Ok(false)
        };
        // The state is unknown where the thread is interrupted or no other thread could serve the writes.
        Ok(if clean.unwrap_or(false) { None } else { Some(attr.size) })
    }
}
