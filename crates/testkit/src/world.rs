//! A layer under test with a caller, and short helpers for calls.
//!
//! Callers: the conformance checks, the model, tests of single layers. Every helper that does not
//! return a result panics on an error, with the operation and the name in the message.

use nacre_vfs::{
    Attr, Caller, DirEntry, DirSink, Entry, Errno, FileId, Kind, Layer, Name, Node, OpenFlags, Opened, Result, SetAttr,
    WriteOrigin,
};
use std::sync::Arc;

/// A layer with a caller.
#[derive(Clone)]
pub struct World {
    /// The layer under test.
    pub layer: Arc<dyn Layer>,
    /// Its root directory.
    pub root: Node,
    /// The caller of every operation: this process, with umask 0.
    pub caller: Caller,
}

/// One name of a listing, owned.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The name.
    pub name: Vec<u8>,
    /// `d_ino`.
    pub ino: u64,
    /// `d_type`, if reported.
    pub kind: Option<Kind>,
    /// The position after this entry.
    pub next: u64,
    /// The file, if attributes were requested.
    pub entry: Option<Entry>,
}

/// A sink that takes at most `room` names.
struct Page {
    room: usize,
    taken: Vec<Listed>,
}

impl DirSink for Page {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.taken.len() == self.room {
            return false;
        }
        self.taken.push(Listed {
            name: entry.name.bytes().to_vec(),
            ino: entry.ino,
            kind: entry.kind,
            next: entry.next,
            entry: entry.entry,
        });
        true
    }
}

/// Converts a name from the test itself.
pub fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).unwrap_or_else(|error| panic!("the test uses a bad name {}: {error:?}", bytes.escape_ascii()))
}

impl World {
    /// Wraps a layer, with this process as the caller.
    pub fn new(layer: Arc<dyn Layer>) -> World {
        let root = layer.root().expect("root").node;
        let caller = Caller {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            pid: u32::try_from(rustix::process::getpid().as_raw_nonzero().get()).unwrap_or(0),
            umask: 0,
        };
        World { layer, root, caller }
    }

    /// Whether this process is root, and may therefore make devices and change owners.
    pub fn is_root(&self) -> bool {
        self.caller.uid == 0
    }

    /// Looks a name up in the root directory.
    pub fn find(&self, bytes: &[u8]) -> Result<Entry> {
        self.find_in(&self.root, bytes)
    }

    /// Looks a name up.
    pub fn find_in(&self, parent: &Node, bytes: &[u8]) -> Result<Entry> {
        self.layer.lookup(&self.caller, parent, name(bytes))
    }

    /// Creates a file with mode 0644 and this content, in the root directory.
    pub fn file(&self, bytes: &[u8], content: &[u8]) -> (Entry, Opened) {
        self.file_in(&self.root, bytes, content)
    }

    /// Creates a file with mode 0644 and this content.
    pub fn file_in(&self, parent: &Node, bytes: &[u8], content: &[u8]) -> (Entry, Opened) {
        let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
        let shown = bytes.escape_ascii();
        let (entry, file) = self
            .layer
            .create(&self.caller, parent, name(bytes), 0o644, flags)
            .unwrap_or_else(|e| panic!("create {shown}: {e:?}"));
        if !content.is_empty() {
            assert_eq!(file.write(content, 0, WriteOrigin::Caller), Ok(content.len()), "write {shown}");
        }
        (entry, file)
    }

    /// Makes a directory with mode 0755 in the root directory.
    pub fn directory(&self, bytes: &[u8]) -> Node {
        self.directory_in(&self.root, bytes)
    }

    /// Makes a directory with mode 0755.
    pub fn directory_in(&self, parent: &Node, bytes: &[u8]) -> Node {
        self.layer
            .mkdir(&self.caller, parent, name(bytes), 0o755)
            .unwrap_or_else(|e| panic!("mkdir {}: {e:?}", bytes.escape_ascii()))
            .node
    }

    /// Opens a node.
    pub fn open(&self, node: &Node, flags: OpenFlags) -> Opened {
        self.layer.open(&self.caller, node, flags).expect("open")
    }

    /// Reads attributes by node alone.
    pub fn attr(&self, node: &Node) -> Attr {
        self.layer.getattr(&self.caller, node, None).expect("getattr")
    }

    /// Changes attributes.
    pub fn change(&self, node: &Node, change: SetAttr) -> Attr {
        self.layer.setattr(&self.caller, node, None, &change).expect("setattr")
    }

    /// Reads the whole content of a file.
    pub fn content(&self, node: &Node) -> Vec<u8> {
        read_all(&self.open(node, OpenFlags::READ))
    }

    /// Reads a page of at most `room` names from a position.
    pub fn page(&self, node: &Node, from: u64, attributes: bool, room: usize) -> Result<Vec<Listed>> {
        let mut page = Page { room, taken: Vec::new() };
        self.layer.readdir(&self.caller, node, from, attributes, &mut page)?;
        Ok(page.taken)
    }

    /// Reads a whole listing in pages of `room` names.
    pub fn list(&self, node: &Node, attributes: bool, room: usize) -> Vec<Listed> {
        let (mut all, mut from): (Vec<Listed>, u64) = (Vec::new(), 0);
        loop {
            let page = self.page(node, from, attributes, room).expect("readdir");
            let Some(last) = page.last() else { return all };
            assert_ne!(last.next, 0, "a position must not be 0, which is the start");
            from = last.next;
            all.extend(page);
            assert!(all.len() < 1_000_000, "the listing does not end");
        }
    }

    /// Reads the names of a directory, sorted.
    pub fn names(&self, node: &Node) -> Vec<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = self.list(node, false, 100).into_iter().map(|listed| listed.name).collect();
        names.sort();
        names
    }

    /// Whether a name of the root directory exists.
    pub fn exists(&self, bytes: &[u8]) -> bool {
        match self.find(bytes) {
            Ok(_) => true,
            Err(Errno::ENOENT) => false,
            Err(other) => panic!("lookup {}: {other:?}", bytes.escape_ascii()),
        }
    }

    /// The identity of the file with this name in the root directory.
    pub fn id(&self, bytes: &[u8]) -> FileId {
        self.find(bytes).expect("lookup").attr.id
    }
}

/// Reads an open file to its end.
pub(crate) fn read_all(file: &Opened) -> Vec<u8> {
    let mut content = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let size = file.read(&mut buffer, content.len() as u64).expect("read");
        if size == 0 {
            return content;
        }
        content.extend_from_slice(&buffer[..size]);
    }
}
