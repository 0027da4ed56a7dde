//! Random operations on a layer and on a plain tree in memory: each has to have the same result
//! (value or error), and the whole trees have to be equal at the end.
//!
//! Callers: `crates/layers/tests/model.rs`. The reference is written for clarity and is itself
//! checked against the kernel: the same test over the host layer runs each operation on a real file
//! system. Every generated operation is meaningful, because names are drawn from a small set and
//! nodes from the existing ones.

mod operation;
mod reference;

pub use operation::{Operation, operations};
pub use reference::Reference;

use crate::World;
use crate::world::{name, read_all};
use nacre_vfs::{Entry, Errno, Kind, Layer, OpenFlags, RenameFlags, SetAttr, WriteOrigin, XattrFlags};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Result of one operation: nothing, bytes, or an error.
pub type Answer = Result<Vec<u8>, Errno>;

/// A tree as a map from path to file; files with several names have the same `first_name`.
pub type Tree = BTreeMap<Vec<u8>, Leaf>;

/// The file at one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Type.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Content, or the target of a symbolic link.
    pub content: Vec<u8>,
    /// Extended attributes in the user namespace.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Other names of the same file: its smallest path. Empty for directories.
    pub first_name: Vec<u8>,
    /// Hard links; 0 for directories, where file systems differ.
    pub links: u32,
}

/// Runs operations on both and compares.
///
/// # Panics
/// At the first operation with different results, with all operations before it.
pub fn compare(layer: Arc<dyn Layer>, operations: &[Operation]) {
    go_on(&World::new(layer), &mut Reference::new(), operations);
}

/// Runs operations on both, which are equal at the start, and compares: a test can act on the layer
/// between two runs.
///
/// # Panics
/// As [`compare`].
pub fn go_on(world: &World, reference: &mut Reference, operations: &[Operation]) {
    for (index, operation) in operations.iter().enumerate() {
        let wanted = reference.apply(operation);
        let got = apply(world, operation);
        assert_eq!(got, wanted, "operation {index}: {operation:?}\nafter {:#?}", &operations[..index]);
    }
    let (got, wanted) = (tree(world), reference.tree());
    assert_eq!(got, wanted, "the trees differ after {operations:#?}");
}

/// Looks up the directories of a path (a list of names).
fn parent(world: &World, path: &[&'static [u8]]) -> Result<Entry, Errno> {
    let mut at = world.layer.root()?;
    for part in path {
        at = world.layer.lookup(&world.caller, &at.node, name(part))?;
    }
    Ok(at)
}

/// Looks up the parent directory of a path.
fn directory(world: &World, path: &[&'static [u8]]) -> Result<Entry, Errno> {
    let found = parent(world, path)?;
    if found.attr.kind == Kind::Directory { Ok(found) } else { Err(Errno::ENOTDIR) }
}

/// Runs one operation on a layer.
pub fn apply(world: &World, operation: &Operation) -> Answer {
    let (layer, caller) = (&world.layer, &world.caller);
    let none = |()| Vec::new();
    let dropped = |_: Entry| Vec::new();
    match operation {
        Operation::Create(at, mode) => {
            let dir = parent(world, &at.parents())?;
            let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
            layer.create(caller, &dir.node, name(at.last()), *mode, flags).map(|_| Vec::new())
        }
        Operation::Mkdir(at, mode) => {
            layer.mkdir(caller, &parent(world, &at.parents())?.node, name(at.last()), *mode).map(dropped)
        }
        Operation::Symlink(at, target) => {
            layer.symlink(caller, &parent(world, &at.parents())?.node, name(at.last()), target).map(dropped)
        }
        Operation::Link(from, to) => {
            let file = parent(world, &from.whole())?;
            let dir = directory(world, &to.parents())?;
            // The kernel in front of a FUSE front end looks up the new name before it asks for the
            // old one's type.
            if world.find_in(&dir.node, to.last()).is_ok() && file.attr.kind == Kind::Directory {
                return Err(Errno::EEXIST);
            }
            layer.link(caller, &file.node, None, &dir.node, name(to.last())).map(dropped)
        }
        Operation::Unlink(at) => layer.unlink(caller, &parent(world, &at.parents())?.node, name(at.last())).map(none),
        Operation::Rmdir(at) => layer.rmdir(caller, &parent(world, &at.parents())?.node, name(at.last())).map(none),
        Operation::Rename(from, to, flags) => {
            let (a, b) = (parent(world, &from.parents())?, parent(world, &to.parents())?);
            // Both parents have to be directories before a request is made, as well.
            if a.attr.kind != Kind::Directory || b.attr.kind != Kind::Directory {
                return Err(Errno::ENOTDIR);
            }
            layer.rename(caller, &a.node, name(from.last()), &b.node, name(to.last()), RenameFlags(*flags)).map(none)
        }
        Operation::Write(at, offset, data) => {
            let file = regular(world, at)?;
            world.open(&file.node, OpenFlags::READ_WRITE).write(data, *offset, WriteOrigin::Caller).map(|_| Vec::new())
        }
        Operation::Truncate(at, size) => {
            let file = regular(world, at)?;
            layer
                .setattr(caller, &file.node, None, &SetAttr { size: Some(*size), ..SetAttr::default() })
                .map(|_| Vec::new())
        }
        Operation::Chmod(at, mode) => {
            let file = parent(world, &at.whole())?;
            if file.attr.kind == Kind::Symlink {
                return Err(Errno::EOPNOTSUPP);
            }
            layer
                .setattr(caller, &file.node, None, &SetAttr { mode: Some(*mode), ..SetAttr::default() })
                .map(|_| Vec::new())
        }
        Operation::Setxattr(at, key, value) => {
            layer.setxattr(caller, &regular(world, at)?.node, key, value, XattrFlags::default()).map(none)
        }
        Operation::Removexattr(at, key) => layer.removexattr(caller, &regular(world, at)?.node, key).map(none),
        Operation::Read(at) => Ok(read_all(&world.open(&regular(world, at)?.node, OpenFlags::READ))),
        Operation::List(at) => {
            let directory = parent(world, &at.whole())?;
            if directory.attr.kind != Kind::Directory {
                return Err(Errno::ENOTDIR);
            }
            Ok(world.names(&directory.node).join(&b'/'))
        }
    }
}

/// Looks up a regular file, with the checks that the kernel in front of a FUSE front end makes.
fn regular(world: &World, at: &operation::Place) -> Result<Entry, Errno> {
    let found = parent(world, &at.whole())?;
    match found.attr.kind {
        Kind::File => Ok(found),
        Kind::Directory => Err(Errno::EISDIR),
        _ => Err(Errno::ELOOP),
    }
}

/// Reads a layer's whole tree.
pub fn tree(world: &World) -> Tree {
    let mut tree = Tree::new();
    let mut first_names = BTreeMap::new();
    let mut next = vec![(Vec::new(), world.root.clone())];
    while let Some((path, node)) = next.pop() {
        for listed in world.list(&node, true, 16) {
            let mut path = path.clone();
            path.extend([b"/", &listed.name[..]].concat());
            let entry = listed.entry.expect("a listing with attributes");
            if entry.attr.kind == Kind::Directory {
                next.push((path.clone(), entry.node.clone()));
            } else {
                let first: &mut Vec<u8> = first_names.entry(entry.attr.id).or_insert_with(|| path.clone());
                if path < *first {
                    first.clone_from(&path);
                }
            }
            tree.insert(path, leaf(world, &entry));
        }
    }
    for (path, leaf) in &mut tree {
        if leaf.kind != Kind::Directory {
            let parts: Vec<&[u8]> = path[1..].split(|byte| *byte == b'/').collect();
            let mut at = world.root.clone();
            for part in &parts[..parts.len() - 1] {
                at = world.find_in(&at, part).expect("walk").node;
            }
            let found = world.find_in(&at, parts[parts.len() - 1]).expect("walk");
            leaf.first_name.clone_from(&first_names[&found.attr.id]);
        }
    }
    tree
}

fn leaf(world: &World, entry: &Entry) -> Leaf {
    let content = match entry.attr.kind {
        Kind::File => world.content(&entry.node),
        Kind::Symlink => world.layer.readlink(&world.caller, &entry.node).expect("readlink"),
        _ => Vec::new(),
    };
    if entry.attr.kind == Kind::File {
        assert_eq!(entry.attr.size, content.len() as u64);
    }
    let links = if entry.attr.kind == Kind::Directory { 0 } else { entry.attr.nlink };
    let mode = if entry.attr.kind == Kind::Symlink { 0o777 } else { entry.attr.mode };
    Leaf { kind: entry.attr.kind, mode, content, xattrs: xattrs(world, entry), first_name: Vec::new(), links }
}

fn xattrs(world: &World, entry: &Entry) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    if entry.attr.kind != Kind::File {
        return found;
    }
    let mut names = vec![0; 4096];
    let size = world.layer.listxattr(&world.caller, &entry.node, &mut names).unwrap_or(0);
    for key in names[..size].split(|byte| *byte == 0).filter(|key| key.starts_with(b"user.")) {
        let mut value = vec![0; 4096];
        let size = world.layer.getxattr(&world.caller, &entry.node, key, &mut value).expect("getxattr");
        value.truncate(size);
        found.insert(key.to_vec(), value);
    }
    found
}
