//! Undoes what a reply granted that the kernel did not accept: its caller was killed meanwhile.

use crate::door::Door;
use fusewire::{
    Header,
    abi::{self, opcode},
};

const ENTRY: usize = size_of::<abi::EntryOut>();
const DIRENT: usize = size_of::<abi::Dirent>();

impl Door {
    pub(crate) fn take_back(&self, request: &Header, reply: &[u8]) {
        match request.opcode {
            opcode::LOOKUP | opcode::MKNOD | opcode::MKDIR | opcode::SYMLINK | opcode::LINK => {
                self.take_back_entry(reply)
            }
            opcode::CREATE | opcode::TMPFILE => {
                self.take_back_open(reply.get(ENTRY..).unwrap_or_default());
                self.take_back_entry(reply);
            }
            opcode::OPEN => self.take_back_open(reply),
            opcode::READDIRPLUS => entries(reply).for_each(|nodeid| self.forget_lookups(nodeid, 1)),
            _ => {}
        }
    }

    fn take_back_entry(&self, reply: &[u8]) {
        // The node id comes first; 0 is a missing name.
        if let Some(nodeid) = number(reply, 0).filter(|&nodeid| nodeid != 0) {
            self.forget_lookups(nodeid, 1);
        }
    }

    fn take_back_open(&self, reply: &[u8]) {
        if let Some(fh) = number(reply, 0) {
            self.ungrant(fh);
        }
    }
}

/// Returns the node ids in the reply to a READDIRPLUS, which count as lookups.
fn entries(reply: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let mut rest = reply;
    std::iter::from_fn(move || {
        let nodeid = number(rest, 0)?;
        let name_len = number(rest, ENTRY + 16)? as u32 as usize;
        let length = (ENTRY + DIRENT + name_len).next_multiple_of(8);
        rest = rest.get(length..).unwrap_or_default();
        Some(nodeid)
    })
    .filter(|&nodeid| nodeid != 0)
}

/// Reads the number at an offset, in native byte order.
fn number(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk::<8>()?;
    Some(u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fusewire::Reply;

    #[test]
    fn every_look_up_of_a_listing_is_found() {
        let mut space = [0_u8; 4096];
        let mut reply = Reply::new(&mut space);
        let mut listing = reply.directory(4096);
        for (nodeid, name) in [(0, &b"."[..]), (5, b"a"), (0, b"gone"), (6, b"a longer name")] {
            let entry = abi::EntryOut { nodeid, ..abi::EntryOut::default() };
            assert!(listing.add_plus(&entry, 9, 9, 8, name));
        }
        assert_eq!(entries(reply.built()).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(entries(&[]).count(), 0);
    }
}
