//! A layer that hides some directories: for a host directory that contains the mount point itself,
//! or the union's upper branch.
//!
//! Put over a leaf by the stack builder (`without=` of `host`): a union that shows `/` must show
//! neither its own mount point nor its upper branch below it, whose files would appear twice. A
//! hidden directory is identified by its parent and name, so that it need not be examined: a mount
//! point would have to answer its own request. The hidden names cannot be created, like names that
//! exist.

use nacre_vfs::{
    AnyOpen, Caller, Created, Description, Dev, DirEntry, DirSink, Entry, Errno, FileId, Kind, Layer, Name, Node,
    OpenFlags, RenameFlags, Result,
};
use std::sync::Arc;

/// A layer without some of its directories.
pub struct Without {
    below: Arc<dyn Layer>,
    hidden: Vec<Hidden>,
}

struct Hidden {
    directory: FileId,
    name: Vec<u8>,
}

impl Without {
    /// Hides the files at these paths, with names separated by `/` from the root of the layer. A
    /// path with a missing directory hides nothing.
    ///
    /// # Errors
    /// As the layer.
    pub fn new(below: Arc<dyn Layer>, paths: &[Vec<u8>]) -> Result<Without> {
        let mut hidden = Vec::new();
        for path in paths {
            hidden.extend(find(&*below, path)?);
        }
        Ok(Without { below, hidden })
    }

    fn hides(&self, directory: &Node, name: Name<'_>) -> Result<bool> {
        let mut named = self.hidden.iter().filter(|hidden| hidden.name == name.bytes()).peekable();
        if named.peek().is_none() {
            return Ok(false);
        }
        let directory = self.below.id(directory)?;
        Ok(named.any(|hidden| hidden.directory == directory))
    }

    fn existing(&self, directory: &Node, name: Name<'_>) -> Result<()> {
        if self.hides(directory, name)? { Err(Errno::ENOENT) } else { Ok(()) }
    }

    fn fresh(&self, directory: &Node, name: Name<'_>) -> Result<()> {
        if self.hides(directory, name)? { Err(Errno::EACCES) } else { Ok(()) }
    }
}

fn find(layer: &dyn Layer, path: &[u8]) -> Result<Option<Hidden>> {
    let mut names: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
    let Some(last) = names.pop() else { return Ok(None) };
    let mut at = layer.root()?;
    for name in names {
        at = match layer.lookup(&Caller::ROOT, &at.node, Name::new(name)?) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            other => other?,
        };
    }
    Ok(Some(Hidden { directory: at.attr.id, name: last.to_vec() }))
}

struct Rest<'a> {
    names: Vec<&'a [u8]>,
    above: &'a mut dyn DirSink,
}

impl DirSink for Rest<'_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        self.names.contains(&entry.name.bytes()) || self.above.push(entry)
    }
}

impl Layer for Without {
    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.existing(parent, name)?;
        self.below.lookup(caller, parent, name)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let id = self.below.id(node)?;
        let names: Vec<&[u8]> =
            self.hidden.iter().filter(|hidden| hidden.directory == id).map(|hidden| &hidden.name[..]).collect();
        if names.is_empty() {
            return self.below.readdir(caller, node, from, attributes, sink);
        }
        // Attributes are not requested: the process that would answer for a hidden mount point may
        // be this one.
        self.below.readdir(caller, node, from, false, &mut Rest { names, above: sink })
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.fresh(parent, name)?;
        self.below.create(caller, parent, name, mode, flags)
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.fresh(parent, name)?;
        self.below.mkdir(caller, parent, name, mode)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.fresh(parent, name)?;
        self.below.mknod(caller, parent, name, kind, mode, dev)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.fresh(parent, name)?;
        self.below.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.fresh(parent, name)?;
        self.below.link(caller, node, file, parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.existing(parent, name)?;
        self.below.unlink(caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.existing(parent, name)?;
        self.below.rmdir(caller, parent, name)
    }

    fn rename(
        &self,
        caller: &Caller,
        from: &Node,
        old: Name<'_>,
        to: &Node,
        new: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.existing(from, old)?;
        self.fresh(to, new)?;
        self.below.rename(caller, from, old, to, new, flags)
    }

    fn describe(&self) -> Description {
        Description::new("without").over(self.below.describe())
    }

    nacre_vfs::forward_layer! {
        root id path adopt hold getattr access setattr readlink tmpfile open fsyncdir getxattr setxattr listxattr removexattr statfs syncfs
        ioctl coherence watch rest capabilities
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_layers::mem::Mem;
    use nacre_testkit::World;

    #[test]
    fn what_is_hidden_does_not_exist() {
        let below: Arc<dyn Layer> = Arc::new(Mem::new());
        let plain = World::new(Arc::clone(&below));
        let outer = plain.directory(b"outer");
        for name in [&b"inner"[..], b"other"] {
            plain.file_in(&plain.directory_in(&outer, name), b"file", b"");
        }
        plain.directory(b"inner");
        let world = World::new(Arc::new(Without::new(below, &[b"outer/inner".to_vec(), b"no/such".to_vec()]).unwrap()));
        let outer = world.find(b"outer").unwrap().node;
        assert_eq!(
            (world.names(&outer), world.names(&world.root)),
            (vec![b"other".to_vec()], vec![b"inner".to_vec(), b"outer".to_vec()])
        );
        let (layer, caller, name) = (&world.layer, &world.caller, Name::new(b"inner").unwrap());
        assert_eq!(layer.lookup(caller, &outer, name).err(), Some(Errno::ENOENT));
        assert_eq!(layer.rmdir(caller, &outer, name).err(), Some(Errno::ENOENT));
        assert_eq!(layer.mkdir(caller, &outer, name, 0o755).err(), Some(Errno::EACCES));
        let other = Name::new(b"other").unwrap();
        assert_eq!(layer.rename(caller, &outer, other, &outer, name, RenameFlags(0)).err(), Some(Errno::EACCES));
        assert_eq!(
            layer.rename(caller, &outer, other, &world.root, Name::new(b"new").unwrap(), RenameFlags(0)),
            Ok(())
        );
        assert!(world.exists(b"inner"), "one of the same name elsewhere");
    }
}
