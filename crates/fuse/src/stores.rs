//! Files whose times may change without a request or notification: by stores to a shared mapping of a backing file
//! (passthrough).
//!
//! The first store to a page changes the times below, which the kernel does not notice here. It asks for attributes
//! after each mmap(2); so their timeout is zero while the file is open for reading and writing (no other open file
//! can be mapped for writing), and while a mapping outlives that. No request comes when a mapping ends, but the
//! mapping keeps the source's file open for writing: that is checked when attributes are requested next.

use crate::door::Door;
use nacre_sys::lease;
use nacre_vfs::{Caller, Node, OpenFlags};

impl Door {
    /// Whether a regular file may be stored to through a mapping. Without `node` no call goes to the layer, and a
    /// possible mapping counts as one.
    pub(crate) fn is_stored_to(&self, nodeid: u64, node: Option<&Node>) -> bool {
        if self.open.passthrough.refusal().is_some() {
            return false;
        }
        let known = self.inodes.with_any(nodeid, |record| {
            let open = record.open_state_if_any().is_some_and(|state| state.is_mappable());
            (open, *record.outlived())
        });
        match (known, node) {
            (None | Some((false, 0)), _) => false,
            (Some((true, _)), _) | (_, None) => true,
            (Some((false, last)), Some(node)) => {
                let mapped = self.is_mapped(node);
                if !mapped {
                    // It may have been opened and closed again meanwhile.
                    self.inodes.with_any(nodeid, |record| {
                        if *record.outlived() == last {
                            *record.outlived() = 0;
                        }
                    });
                }
                mapped
            }
        }
    }

    /// Whether there may be a mapping of a file that is no longer open. Storage that cannot answer counts as no.
    fn is_mapped(&self, node: &Node) -> bool {
        let Ok(file) = self.layer.open(&Caller::ROOT, node, OpenFlags::READ) else { return true };
        file.backing().is_none_or(|descriptor| lease::is_open_for_writing(descriptor).unwrap_or(false))
    }
}
