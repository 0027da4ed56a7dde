//! Handlers for directory listings, which are built directly in the reply.
//!
//! Positions in a directory are the layer's, with `.` and `..` before them. With attributes, an entry is looked up
//! only when there is space for it in the reply, so that no lookup has to be undone. Files that the kernel already
//! has are sent by name alone.

use crate::{
    door::{Door, LASTING, caller},
    failure::Outcome,
    inodes::Found,
    survival::nodes::NodePlace,
    wire,
};
use fusewire::{Directory, Header, Reply, abi};
use nacre_vfs::{Coherence, DirEntry, DirSink, Errno, Invalidation, Kind, Node};
use std::time::{Duration, Instant};

/// Position after `.`, where positions are a host's: within the 31 bits that 32-bit programs can take, and beyond what
/// file systems use (ext4 ends at 2^31 - 1, XFS' directories would have 16 GiB there). The next is that after `..`.
const AFTER_DOT: u64 = (1 << 31) - 16;
/// Position after `.` in versions whose positions had 63 bits: a listing may have begun there before an upgrade.
const AFTER_DOT_BEFORE: u64 = (1 << 63) - 16;
/// Position after `.` of layers with numbers.
const AFTER_DOT_NUMBERED: u64 = 1;
/// `R_OK`.
const READ: u32 = 4;
/// `DT_UNKNOWN`.
const UNKNOWN: u8 = 0;
/// Number of entries with attributes after which a reply may be sent early.
const ENOUGH: usize = 16;
/// Time after which it is.
const PATIENCE: Duration = Duration::from_millis(2);
/// Number of names from which a listing begins with a short reply with attributes: the kernel always asks for
/// attributes of the first names, and of the others only where a program wants them.
const VAST: u64 = 256;

impl Door {
    pub(crate) fn opendir(&self, header: &Header, reply: &mut Reply<'_>) -> Outcome {
        if self.agreement().opens_directories_itself {
            // The kernel remembers this, opens directories without a request and caches listings.
            return Err(Errno::ENOSYS.into());
        }
        let mut out = abi::OpenOut::default();
        if !self.options.default_permissions {
            let node = self.node(header.nodeid)?;
            self.layer.access(&caller(header), &node, READ)?;
            if self.names_coherence(&node) <= Coherence::Watched {
                out.open_flags = abi::fopen::CACHE_DIR | abi::fopen::KEEP_CACHE;
            }
        }
        Ok(reply.open(&out)?)
    }

    pub(crate) fn readdir(&self, header: &Header, offset: u64, size: u32, reply: &mut Reply<'_>) -> Outcome {
        self.list(header, offset, size, false, reply)
    }

    pub(crate) fn readdirplus(&self, header: &Header, offset: u64, size: u32, reply: &mut Reply<'_>) -> Outcome {
        self.list(header, offset, size, true, reply)
    }

    pub(crate) fn fsyncdir(&self, header: &Header, data_only: bool) -> Outcome {
        Ok(self.layer.fsyncdir(&caller(header), &self.node(header.nodeid)?, data_only)?)
    }

    #[expect(clippy::disallowed_methods, reason = "measures how long a listing takes")]
    fn list(&self, header: &Header, offset: u64, size: u32, attributes: bool, reply: &mut Reply<'_>) -> Outcome {
        let (node, own, parent) = self.inodes.directory(header.nodeid).ok_or(Errno::ESTALE)?;
        let coherence = self.names_coherence(&node);
        let parent = if self.inodes.is_root(header.nodeid) { own } else { parent };
        let directory = reply.directory(size);
        let mut listing = Listing {
            door: self,
            directory,
            plus: attributes,
            own,
            nodeid: header.nodeid,
            names: self.name_times(&node, coherence).0,
            adoptions: Vec::new(),
            full: false,
            begun: (attributes && offset == 0).then(Instant::now),
            short: attributes && offset == 0 && self.is_vast(header, &node),
            taken: 0,
        };
        let from = listing.dots(offset, own, parent);
        let listed = if listing.full {
            Ok(())
        } else {
            self.layer.readdir(&caller(header), &node, from, attributes, &mut listing)
        };
        let some = listing.directory.used() > 0;
        for (known, fresh) in std::mem::take(&mut listing.adoptions) {
            self.layer.adopt(&known, &fresh);
        }
        // Entries that were listed before an error are returned, with their lookups; the next request gets the error
        // again.
        if !some {
            listed?;
        }
        self.keep_short(coherence, header.nodeid);
        Ok(())
    }

    /// Whether a directory is known to have very many names.
    fn is_vast(&self, header: &Header, node: &Node) -> bool {
        // Layers with inode numbers report the number of names as a directory's size.
        self.inodes.by_number() && self.layer.getattr(&caller(header), node, None).is_ok_and(|attr| attr.size >= VAST)
    }

    /// Invalidates the listing of a directory that may change unnoticed: the kernel caches listings of directories
    /// that it opens itself.
    fn keep_short(&self, coherence: Coherence, nodeid: u64) {
        if coherence >= Coherence::Shared
            && self.agreement().opens_directories_itself
            && !self.options.immutable
            && let Some((_, id)) = self.inodes.node_and_id(nodeid)
        {
            self.change(Invalidation::Content { id });
        }
    }
}

/// A reply that is filled with the layer's entries.
struct Listing<'a, 'r, 'b> {
    door: &'a Door,
    directory: Directory<'r, 'b>,
    plus: bool,
    own: u64,
    nodeid: u64,
    names: Duration,
    /// Nodes that turned out to be known; merged after the layer's listing.
    adoptions: Vec<(Node, Node)>,
    full: bool,
    /// Start of the first reply of a listing with attributes.
    begun: Option<Instant>,
    /// A few entries are enough.
    short: bool,
    taken: usize,
}

impl Listing<'_, '_, '_> {
    /// Adds `.` and `..` if the position is before them; returns the position for the layer's part.
    fn dots(&mut self, offset: u64, own: u64, parent: u64) -> u64 {
        let directory = Kind::Directory.d_type();
        let after_dot = if self.door.inodes.by_number() { AFTER_DOT_NUMBERED } else { AFTER_DOT };
        let both: [(&[u8], u64, u64); 2] = [(b".", own, after_dot), (b"..", parent, after_dot + 1)];
        let skipped = match offset {
            0 => 0,
            _ if offset == after_dot || offset == AFTER_DOT_BEFORE => 1,
            _ if offset == after_dot + 1 || offset == AFTER_DOT_BEFORE + 1 => 2,
            _ => return offset,
        };
        for (name, ino, next) in both.into_iter().skip(skipped) {
            self.full |= !self.add(&abi::EntryOut::default(), ino, next, directory, name);
        }
        0
    }

    /// Whether the first reply is sent now: inodes that have to be loaded delay the first name for the caller.
    fn is_late(&self) -> bool {
        self.taken >= ENOUGH && (self.short || self.begun.is_some_and(|begun| begun.elapsed() > PATIENCE))
    }

    fn add(&mut self, entry: &abi::EntryOut, ino: u64, next: u64, d_type: u8, name: &[u8]) -> bool {
        if self.plus {
            self.directory.add_plus(entry, ino, next, d_type, name)
        } else {
            self.directory.add(ino, next, d_type, name)
        }
    }

    /// Whether the kernel has this file with long-lived attributes. As a rule it then has its name too: with the last
    /// cached name it drops the file.
    ///
    /// Sending the attributes again would cost more than it saves: the kernel drops the file's cached ACL, asks for
    /// it again at the next access, and requests the remainder of the directory with attributes as well
    /// (fs/fuse/readdir.c, `fuse_direntplus_link`).
    fn is_held(&mut self, entry: &nacre_vfs::Entry) -> bool {
        if self.names < LASTING {
            return false;
        }
        if self.door.inodes.by_number() {
            return self.door.inodes.is_kept(entry.attr.id.ino);
        }
        let Some(nodeid) = self.door.inodes.find(&entry.attr.id) else { return false };
        if self.door.listed_attr_time(nodeid, &entry.node, &entry.attr) < LASTING {
            return false;
        }
        if let Some(known) = self.door.inodes.node(nodeid).filter(|known| !known.same(&entry.node)) {
            self.adoptions.push((known, entry.node.clone()));
        }
        true
    }

    fn look_up(&mut self, entry: &nacre_vfs::Entry, name: &[u8]) -> abi::EntryOut {
        let found = Found { place: NodePlace { parent: self.nodeid, name }, ino: self.own };
        let registered = self.door.inodes.register(&entry.node, &entry.attr, found);
        if let Some(known) = registered.known {
            self.adoptions.push((known, entry.node.clone()));
        }
        let attributes = self.door.listed_attr_time(registered.nodeid, &entry.node, &entry.attr);
        self.door.inodes.keeps(registered.nodeid, attributes >= LASTING);
        let attr = self.door.with_sector(registered.nodeid, &entry.attr);
        let mut out = wire::entry(registered.nodeid, &attr, self.names, attributes);
        out.generation = self.door.generation(&entry.attr).into();
        out
    }
}

impl DirSink for Listing<'_, '_, '_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        let name = entry.name.bytes();
        if !self.directory.fits(name.len(), self.plus) || self.is_late() {
            return false;
        }
        self.taken += 1;
        let d_type = entry.kind.map_or(UNKNOWN, Kind::d_type);
        if !self.plus {
            return self.directory.add(entry.ino, entry.next, d_type, name);
        }
        // Without attributes only the name is sent; it is looked up when a program wants it.
        let out = match &entry.entry {
            Some(found) if !self.is_held(found) => self.look_up(found, name),
            _ => abi::EntryOut::default(),
        };
        self.directory.add_plus(&out, entry.ino, entry.next, d_type, name)
    }

    fn wants_number(&self, number: u64) -> bool {
        self.names < LASTING || !self.door.inodes.is_kept(number)
    }

    fn room(&self, _attributes: bool) -> usize {
        let room = self.directory.room(self.plus);
        if self.short { room.min(ENOUGH) } else { room }
    }
}
