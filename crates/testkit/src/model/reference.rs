//! The reference: a tree in plain maps, with the errors of a Linux file system.

use super::operation::{Operation, Place};
use super::{Answer, Leaf, Tree};
use nacre_vfs::{Errno, Kind, RenameFlags};
use std::collections::BTreeMap;

type Number = usize;

#[derive(Clone, Debug)]
struct Inode {
    leaf: Leaf,
    names: BTreeMap<Vec<u8>, Number>,
}

/// The reference tree; inode number 0 is the root.
#[derive(Clone, Debug)]
pub struct Reference {
    inodes: BTreeMap<Number, Inode>,
    next: Number,
}

impl Default for Reference {
    fn default() -> Reference {
        Reference::new()
    }
}

impl Reference {
    /// An empty tree.
    pub fn new() -> Reference {
        let mut reference = Reference { inodes: BTreeMap::new(), next: 0 };
        reference.add(Kind::Directory, 0o755, Vec::new());
        reference
    }

    fn add(&mut self, kind: Kind, mode: u32, content: Vec<u8>) -> Number {
        let number = self.next;
        self.next += 1;
        let leaf = Leaf { kind, mode, content, xattrs: BTreeMap::new(), first_name: Vec::new(), links: 0 };
        self.inodes.insert(number, Inode { leaf, names: BTreeMap::new() });
        number
    }

    fn kind(&self, number: Number) -> Kind {
        self.inodes[&number].leaf.kind
    }

    fn leaf(&mut self, number: Number) -> &mut Leaf {
        &mut self.inodes.get_mut(&number).expect("numbers are never stale").leaf
    }

    fn child(&self, directory: Number, name: &[u8]) -> Result<Number, Errno> {
        if self.kind(directory) != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        self.inodes[&directory].names.get(name).copied().ok_or(Errno::ENOENT)
    }

    fn walk(&self, path: &[&'static [u8]]) -> Result<Number, Errno> {
        path.iter().try_fold(0, |at, part| self.child(at, part))
    }

    /// The directory for a new name, if the name is free.
    fn free(&self, at: &Place) -> Result<Number, Errno> {
        let directory = self.walk(&at.parents())?;
        match self.child(directory, at.last()) {
            Ok(_) => Err(Errno::EEXIST),
            Err(Errno::ENOENT) => Ok(directory),
            Err(other) => Err(other),
        }
    }

    fn put(&mut self, directory: Number, name: &[u8], number: Number) {
        self.inodes.get_mut(&directory).expect("numbers are never stale").names.insert(name.to_vec(), number);
        if self.kind(number) != Kind::Directory {
            self.leaf(number).links += 1;
        }
    }

    fn take(&mut self, directory: Number, name: &[u8]) -> Number {
        let number =
            self.inodes.get_mut(&directory).and_then(|inode| inode.names.remove(name)).expect("was just found");
        if self.kind(number) != Kind::Directory {
            self.leaf(number).links -= 1;
        }
        number
    }

    fn regular(&self, at: &Place) -> Result<Number, Errno> {
        let number = self.walk(&at.whole())?;
        match self.kind(number) {
            Kind::File => Ok(number),
            Kind::Directory => Err(Errno::EISDIR),
            _ => Err(Errno::ELOOP),
        }
    }

    fn make(&mut self, at: &Place, kind: Kind, mode: u32, content: Vec<u8>) -> Answer {
        let directory = self.free(at)?;
        let number = self.add(kind, mode, content);
        self.put(directory, at.last(), number);
        Ok(Vec::new())
    }

    /// Applies one operation.
    ///
    /// # Errors
    /// As the call on Linux.
    pub fn apply(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::Create(at, mode) => self.make(at, Kind::File, *mode, Vec::new()),
            Operation::Mkdir(at, mode) => self.make(at, Kind::Directory, *mode, Vec::new()),
            Operation::Symlink(at, target) => self.make(at, Kind::Symlink, 0o777, target.clone()),
            Operation::Link(from, to) => self.link(from, to),
            Operation::Unlink(at) => self.unlink(at),
            Operation::Rmdir(at) => self.rmdir(at),
            Operation::Rename(from, to, flags) => self.rename(from, to, RenameFlags(*flags)),
            Operation::Chmod(at, mode) => self.chmod(at, *mode),
            Operation::List(at) => {
                let number = self.walk(&at.whole())?;
                if self.kind(number) != Kind::Directory {
                    return Err(Errno::ENOTDIR);
                }
                Ok(self.inodes[&number].names.keys().cloned().collect::<Vec<_>>().join(&b'/'))
            }
            Operation::Read(at) => Ok(self.regular(at).map(|number| self.inodes[&number].leaf.content.clone())?),
            other => self.change_content(other),
        }
    }

    fn change_content(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::Write(at, offset, data) => {
                let number = self.regular(at)?;
                let (content, start) = (&mut self.leaf(number).content, *offset as usize);
                content.resize(content.len().max(start + data.len()), 0);
                content[start..start + data.len()].copy_from_slice(data);
            }
            Operation::Truncate(at, size) => {
                let number = self.regular(at)?;
                self.leaf(number).content.resize(*size as usize, 0);
            }
            Operation::Setxattr(at, key, value) => {
                let number = self.regular(at)?;
                self.leaf(number).xattrs.insert(key.to_vec(), value.clone());
            }
            Operation::Removexattr(at, key) => {
                let number = self.regular(at)?;
                self.leaf(number).xattrs.remove(*key).ok_or(Errno::ENODATA)?;
            }
            other => unreachable!("{other:?} is applied elsewhere"),
        }
        Ok(Vec::new())
    }

    fn chmod(&mut self, at: &Place, mode: u32) -> Answer {
        let number = self.walk(&at.whole())?;
        if self.kind(number) == Kind::Symlink {
            return Err(Errno::EOPNOTSUPP);
        }
        self.leaf(number).mode = mode;
        Ok(Vec::new())
    }

    fn link(&mut self, from: &Place, to: &Place) -> Answer {
        let number = self.walk(&from.whole())?;
        let directory = self.free(to)?;
        if self.kind(number) == Kind::Directory {
            return Err(Errno::EPERM);
        }
        self.put(directory, to.last(), number);
        Ok(Vec::new())
    }

    fn unlink(&mut self, at: &Place) -> Answer {
        let directory = self.walk(&at.parents())?;
        let number = self.child(directory, at.last())?;
        if self.kind(number) == Kind::Directory {
            return Err(Errno::EISDIR);
        }
        self.take(directory, at.last());
        Ok(Vec::new())
    }

    fn rmdir(&mut self, at: &Place) -> Answer {
        let directory = self.walk(&at.parents())?;
        let number = self.child(directory, at.last())?;
        if self.kind(number) != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        if !self.inodes[&number].names.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.take(directory, at.last());
        Ok(Vec::new())
    }

    /// Whether `below` is `above` or a descendant of it.
    fn within(&self, below: Number, above: Number) -> bool {
        below == above || self.inodes[&above].names.values().any(|child| self.within(below, *child))
    }

    fn rename(&mut self, from: &Place, to: &Place, flags: RenameFlags) -> Answer {
        let (old, new) = (self.walk(&from.parents())?, self.walk(&to.parents())?);
        for directory in [old, new] {
            if self.kind(directory) != Kind::Directory {
                return Err(Errno::ENOTDIR);
            }
        }
        // The checks are in the kernel's order: names first, then ancestry, then types.
        let source = self.child(old, from.last())?;
        let target = self.child(new, to.last());
        match target {
            Ok(_) if flags.has(RenameFlags::NOREPLACE) => return Err(Errno::EEXIST),
            Err(error) if flags.has(RenameFlags::EXCHANGE) => return Err(error),
            _ => {}
        }
        if self.within(new, source) {
            return Err(Errno::EINVAL);
        }
        if let Ok(target) = target
            && self.within(old, target)
        {
            return Err(if flags.has(RenameFlags::EXCHANGE) { Errno::EINVAL } else { Errno::ENOTEMPTY });
        }
        let Ok(target) = target else {
            let number = self.take(old, from.last());
            self.put(new, to.last(), number);
            return Ok(Vec::new());
        };
        if source == target {
            return Ok(Vec::new());
        }
        if flags.has(RenameFlags::EXCHANGE) {
            let (a, b) = (self.take(old, from.last()), self.take(new, to.last()));
            self.put(new, to.last(), a);
            self.put(old, from.last(), b);
            return Ok(Vec::new());
        }
        match (self.kind(source), self.kind(target)) {
            (Kind::Directory, Kind::Directory) if !self.inodes[&target].names.is_empty() => {
                return Err(Errno::ENOTEMPTY);
            }
            (Kind::Directory, Kind::Directory) => {}
            (Kind::Directory, _) => return Err(Errno::ENOTDIR),
            (_, Kind::Directory) => return Err(Errno::EISDIR),
            _ => {}
        }
        self.take(new, to.last());
        let number = self.take(old, from.last());
        self.put(new, to.last(), number);
        Ok(Vec::new())
    }

    /// Returns the whole tree.
    pub fn tree(&self) -> Tree {
        let mut tree = Tree::new();
        let mut first: BTreeMap<Number, Vec<u8>> = BTreeMap::new();
        let mut found: Vec<(Vec<u8>, Number)> = Vec::new();
        let mut next = vec![(Vec::new(), 0)];
        while let Some((path, number)) = next.pop() {
            for (name, child) in &self.inodes[&number].names {
                let path = [&path[..], b"/", name].concat();
                next.push((path.clone(), *child));
                found.push((path, *child));
            }
        }
        found.sort();
        for (path, number) in found {
            let mut leaf = self.inodes[&number].leaf.clone();
            if leaf.kind != Kind::Directory {
                leaf.first_name = first.entry(number).or_insert_with(|| path.clone()).clone();
            }
            tree.insert(path, leaf);
        }
        tree
    }
}
