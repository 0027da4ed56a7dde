//! Creating names: files, directories, links.
//!
//! A new file is made directly under its own name where the name is free on the branch, so that the directory
//! itself passes on its group and access control lists. If a whiteout has the very name, the file is made under
//! a hidden name in the same directory, and then renamed over the whiteout. A directory that replaces a hidden
//! one is opaque before it gets its name.

use crate::{
    ATTEMPTS, OWN, UnionShared,
    branches::Branch,
    duplicates::Duplicates,
    lookup::{FoundFile, Sight},
    marks,
    node::{Part, UnionNode},
    open_file::UnionFile,
    swap::Swap,
    work::{Temporary, WorkDirectory},
};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Created, Dev, Entry, Errno, Kind, Layer, Name, Node, OpenFlags, RenameFlags, Result,
};
use std::{ops::Deref, sync::Arc};

/// The location of a new file. The directory's names are locked.
pub(crate) struct Spot<'a> {
    pub(crate) branch: &'a Arc<Branch>,
    pub(crate) directory: &'a Node,
    part: &'a Part,
    name: Name<'a>,
    /// A whiteout has the very name.
    occupied: bool,
    /// A `.wh.` whiteout hides the name.
    covered: bool,
    /// It stays beside the new file.
    keeps_whiteout: bool,
    /// The last branch on which the new file would be visible, and the last that could show a directory of this
    /// name.
    floor: usize,
}

/// The name under which a file is made first.
enum Making<'a> {
    Itself(Name<'a>),
    /// In the same directory.
    Hidden(Temporary),
    /// In the work directory, which is emptied by the next process after a kill: a name that stayed would be
    /// counted as a link.
    Apart(Temporary),
}

/// A character device 0/0 that is to be left by a rename.
pub(crate) struct PreparedDevice {
    branch: Arc<Branch>,
    home: Part,
    making: Making<'static>,
    entry: Entry,
}

/// The directory in which a file is made first.
enum MakingHome<'a> {
    Directory(&'a Node),
    Work(WorkDirectory<'a>),
}

impl Deref for MakingHome<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        match self {
            MakingHome::Directory(directory) => directory,
            MakingHome::Work(directory) => directory,
        }
    }
}

impl<'a> Spot<'a> {
    fn making(&self, hidden: bool) -> Result<Making<'a>> {
        Ok(if hidden { Making::Hidden(self.branch.work()?.hidden_temporary()) } else { Making::Itself(self.name) })
    }

    /// Returns the directory in which the file is made first.
    fn home(&self, making: &Making<'_>) -> Result<MakingHome<'_>> {
        match making {
            Making::Itself(_) | Making::Hidden(_) => Ok(MakingHome::Directory(self.directory)),
            Making::Apart(_) => Ok(MakingHome::Work(self.branch.work_directory()?)),
        }
    }

    /// Gives the new file its final name.
    fn finish(&self, making: &Making<'_>, node: &Node, kind: Kind) -> Result<()> {
        let layer = &self.branch.layer;
        if let Making::Hidden(temporary) | Making::Apart(temporary) = making {
            let made_in = self.home(making)?;
            let home: &Node = &made_in;
            let moved = self.move_over(&**layer, home, temporary.name()?, kind);
            if let Err(error) = moved {
                let _ = if kind == Kind::Directory {
                    crate::listing::purge(&**layer, node).and_then(|()| layer.rmdir(&OWN, home, temporary.name()?))
                } else {
                    layer.unlink(&OWN, home, temporary.name()?)
                };
                return Err(error);
            }
            let fresh = layer.lookup(&OWN, self.directory, self.name)?;
            layer.adopt(node, &fresh.node);
        }
        if self.covered
            && !(self.keeps_whiteout && kind != Kind::Directory)
            && let Err(error) = self.branch.marks().unhide(&**layer, self.directory, self.name)
        {
            // It hides nothing that is visible.
            tracing::warn!(branch = self.branch.index(), ?error, "a whiteout stays beside its name");
        }
        Ok(())
    }

    fn move_over(&self, layer: &dyn Layer, home: &Node, temporary: Name<'_>, kind: Kind) -> Result<()> {
        if kind == Kind::Directory && self.occupied {
            let (directory, work) = (self.directory, self.branch.work_directory()?);
            let aside = self.branch.work()?.temporary();
            Swap {
                layer,
                caller: &OWN,
                from: home,
                from_name: temporary,
                to: directory,
                to_name: self.name,
                work: &work,
                aside: aside.name()?,
            }
            .run()?;
            return layer.unlink(&OWN, home, temporary);
        }
        layer.rename(&OWN, home, temporary, self.directory, self.name, RenameFlags(0))
    }
}

impl Making<'_> {
    fn name(&self) -> Result<Name<'_>> {
        match self {
            Making::Itself(name) => Ok(*name),
            Making::Hidden(temporary) | Making::Apart(temporary) => temporary.name(),
        }
    }
}

/// Refuses the union's reserved names.
///
/// # Errors
/// EPERM, as aufs.
pub(crate) fn check_name(name: Name<'_>) -> Result<()> {
    if marks::is_reserved(name.bytes()) { Err(Errno::EPERM) } else { Ok(()) }
}

/// How the branch of a new name is chosen.
#[derive(Clone, Copy)]
enum On<'a> {
    /// By the policy.
    Any,
    /// By the policy for directories.
    AnyForDirectory,
    /// This one.
    Branch(&'a Arc<Branch>),
}

impl UnionShared {
    /// Finds the location of a new name and makes the file there.
    fn make<T>(
        &self,
        caller: &Caller,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        on: On<'_>,
        act: &mut dyn FnMut(&Spot<'_>) -> Result<T>,
    ) -> Result<T> {
        check_name(name)?;
        // Chosen once: a round-robin policy must not advance several times for one file.
        let mut chosen: Option<Arc<Branch>> = None;
        for _ in 0..ATTEMPTS {
            let target = {
                let _names = parent.names.write();
                if parent.is_gone() {
                    return Err(Errno::ENOENT);
                }
                let view = parent.view();
                let sight = self.sight(caller, &view, name)?;
                if sight.found.is_some() {
                    return Err(Errno::EEXIST);
                }
                let target = match (on, chosen.take().filter(|branch| branch.index() <= sight.limit)) {
                    (On::Branch(branch), _) if branch.index() <= sight.limit => Arc::clone(branch),
                    (On::Branch(_), _) => return Err(Errno::EXDEV),
                    (_, Some(branch)) => branch,
                    (on, None) => {
                        self.branch_for_new(parent, Some(name), matches!(on, On::AnyForDirectory), sight.limit)?
                    }
                };
                if let Some(part) = view.on(&target) {
                    let mut spot = spot(&target, part, name, &sight)?;
                    // A branch that cannot say keeps the whiteout: without it, a removed file could come back.
                    spot.keeps_whiteout = spot.covered
                        && self.hides_others(&view, name, target.index(), &Duplicates::default()).unwrap_or(true);
                    let made = act(&spot)?;
                    self.listings.forget(parent.id);
                    return Ok(made);
                }
                target
            };
            self.grow(parent, &target)?;
            chosen = Some(target);
        }
        Err(Errno::EBUSY)
    }

    /// The node of a new file.
    fn born(
        &self,
        parent: &Arc<UnionNode>,
        spot: &Spot<'_>,
        node: Node,
        mut attr: Attr,
        floor: usize,
    ) -> Result<(Entry, Arc<UnionNode>)> {
        let id = self.identities.of(attr.id);
        let part = Part::new(spot.branch, node, attr.id);
        let known = self.nodes.get(crate::node::Known { id, kind: attr.kind, parts: vec![part], floor });
        self.tell_unheard(&known);
        known.arrive(parent, spot.name.bytes());
        attr.id = known.id;
        Ok((Entry { node: Node::new(Arc::clone(&known)), attr }, known))
    }

    pub(crate) fn create(
        self: &Arc<UnionShared>,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<Created> {
        let parent = self.directory(parent)?;
        for _ in 0..ATTEMPTS {
            let made = self.make(caller, &parent, name, On::Any, &mut |spot| {
                let making = spot.making(spot.occupied)?;
                let flags = OpenFlags(flags.0 | OpenFlags::EXCL);
                let (entry, file) = spot.branch.layer.create(caller, spot.directory, making.name()?, mode, flags)?;
                spot.finish(&making, &entry.node, Kind::File)?;
                let (entry, node) = self.born(&parent, spot, entry.node, entry.attr, spot.branch.index())?;
                Ok((entry, self.wrap(&node, spot.branch, file, flags)))
            });
            match made {
                Err(Errno::EEXIST) if !flags.exclusive() => match self.open_existing(caller, &parent, name, flags) {
                    Err(Errno::ENOENT) => {}
                    other => return other,
                },
                other => return other,
            }
        }
        Err(Errno::EBUSY)
    }

    fn open_existing(
        self: &Arc<UnionShared>,
        caller: &Caller,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        flags: OpenFlags,
    ) -> Result<Created> {
        let entry = self.lookup(caller, &Node::new(Arc::clone(parent)), name)?;
        let node = self.node(&entry.node)?;
        match node.kind {
            Kind::File => {}
            Kind::Directory => return Err(Errno::EISDIR),
            // The kernel looks the name up again and retries.
            _ => return Err(Errno::ESTALE),
        }
        let file = self.open_node(caller, &node, flags)?;
        let attr = if flags.truncates() { self.getattr(caller, &entry.node, Some(&*file))? } else { entry.attr };
        Ok((Entry { node: entry.node, attr }, file))
    }

    pub(crate) fn tmpfile(
        self: &Arc<UnionShared>,
        caller: &Caller,
        parent: &Node,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<Created> {
        let parent = self.directory(parent)?;
        if parent.is_gone() {
            return Err(Errno::ENOENT);
        }
        let view = parent.view();
        let target = self.branch_for_new(&parent, None, false, view.floor)?;
        let part = self.grow(&parent, &target)?;
        let (entry, file) = target.layer.tmpfile(caller, &part.node, mode, flags)?;
        let mut attr = entry.attr;
        let id = self.identities.of(attr.id);
        let part = Part::new(&target, entry.node, attr.id);
        let node = self.nodes.get(crate::node::Known { id, kind: attr.kind, parts: vec![part], floor: target.index() });
        self.tell_unheard(&node);
        attr.id = id;
        let file = self.wrap(&node, &target, file, flags);
        Ok((Entry { node: Node::new(node), attr }, file))
    }

    pub(crate) fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let parent = self.directory(parent)?;
        self.make(caller, &parent, name, On::AnyForDirectory, &mut |spot| {
            let opaque = spot.occupied || spot.covered || self.options.opaque_always;
            let layer = &spot.branch.layer;
            let making = spot.making(opaque)?;
            // The server may run without privileges, and has to be able to work in the directory until it is
            // finished.
            let first = if opaque { mode | 0o700 } else { mode };
            let mut entry = layer.mkdir(caller, spot.directory, making.name()?, first)?;
            if opaque {
                let finished =
                    spot.branch.marks().make_opaque(&**layer, &entry.node).and_then(|()| match first == mode {
                        true => layer.getattr(&OWN, &entry.node, None),
                        false => {
                            let mode = entry.attr.mode & !(0o700 & !mode);
                            layer.setattr(
                                &OWN,
                                &entry.node,
                                None,
                                &nacre_vfs::SetAttr { mode: Some(mode), ..Default::default() },
                            )
                        }
                    });
                match finished {
                    Ok(attr) => entry.attr = attr,
                    Err(error) => {
                        let _ = crate::listing::purge(&**layer, &entry.node)
                            .and_then(|()| layer.rmdir(&OWN, spot.directory, making.name()?));
                        return Err(error);
                    }
                }
            }
            spot.finish(&making, &entry.node, Kind::Directory)?;
            let floor = if opaque { spot.branch.index() } else { spot.floor };
            Ok(self.born(&parent, spot, entry.node, entry.attr, floor)?.0)
        })
    }

    pub(crate) fn mknod(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        kind: Kind,
        mode: u32,
        dev: Dev,
    ) -> Result<Entry> {
        let parent = self.directory(parent)?;
        let ambiguous = marks::is_whiteout_device(kind, dev);
        self.make(caller, &parent, name, On::Any, &mut |spot| {
            let making = spot.making(spot.occupied || ambiguous)?;
            let layer = &spot.branch.layer;
            let entry = layer.mknod(caller, spot.directory, making.name()?, kind, mode, dev)?;
            if ambiguous && let Err(error) = spot.branch.marks().keep_device(&**layer, &entry.node) {
                layer.unlink(&OWN, spot.directory, making.name()?)?;
                return Err(error);
            }
            spot.finish(&making, &entry.node, kind)?;
            Ok(self.born(&parent, spot, entry.node, entry.attr, spot.branch.index())?.0)
        })
    }

    /// Makes a character device 0/0 for a name in a directory, on the branch for new files: whatever refuses it
    /// (a quota) does so before a rename that is to leave it under `name`.
    pub(crate) fn prepare_device(
        self: &Arc<UnionShared>,
        caller: &Caller,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
    ) -> Result<PreparedDevice> {
        let branch = self.branch_for_new(parent, Some(name), false, parent.view().floor)?;
        let home = self.grow(parent, &branch)?;
        let (layer, hidden) = (&branch.layer, branch.work()?.hidden_temporary());
        let entry = layer.mknod(caller, &home.node, hidden.name()?, Kind::Character, 0, (0, 0))?;
        if let Err(error) = branch.marks().keep_device(&**layer, &entry.node) {
            layer.unlink(&OWN, &home.node, hidden.name()?)?;
            return Err(error);
        }
        // It has got its owner and access control list by the directory, and waits where a kill leaves nothing.
        let apart = branch.work()?.temporary();
        let work = branch.work_directory();
        let moved =
            work.and_then(|work| layer.rename(&OWN, &home.node, hidden.name()?, &work, apart.name()?, RenameFlags(0)));
        let making = match moved {
            Ok(()) => Making::Apart(apart),
            Err(error) => {
                // EXDEV: the directory is on a file system mounted inside the branch.
                tracing::debug!(?error, "the device of a rename waits in its directory");
                Making::Hidden(hidden)
            }
        };
        Ok(PreparedDevice { branch: Arc::clone(&branch), home, making, entry })
    }

    /// Gives a prepared device its name.
    ///
    /// # Errors
    /// EXDEV where another branch would hide it there, and errors of the storage.
    pub(crate) fn place_device(
        &self,
        caller: &Caller,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
        device: &PreparedDevice,
    ) -> Result<()> {
        self.make(caller, parent, name, On::Branch(&device.branch), &mut |spot| {
            spot.finish(&device.making, &device.entry.node, Kind::Character)?;
            self.born(parent, spot, device.entry.node.clone(), device.entry.attr, spot.branch.index()).map(drop)
        })
    }

    /// Removes a prepared device that has not got its name.
    pub(crate) fn drop_device(&self, device: &PreparedDevice) {
        let layer = &device.branch.layer;
        let removed = match &device.making {
            Making::Apart(temporary) => {
                device.branch.work_directory().and_then(|work| layer.unlink(&OWN, &work, temporary.name()?))
            }
            making => making.name().and_then(|name| layer.unlink(&OWN, &device.home.node, name)),
        };
        match removed {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => tracing::warn!(branch = device.branch.index(), ?error, "a hidden device stays"),
        }
    }

    pub(crate) fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let parent = self.directory(parent)?;
        self.make(caller, &parent, name, On::Any, &mut |spot| {
            let making = spot.making(spot.occupied)?;
            let entry = spot.branch.layer.symlink(caller, spot.directory, making.name()?, target)?;
            spot.finish(&making, &entry.node, Kind::Symlink)?;
            Ok(self.born(&parent, spot, entry.node, entry.attr, spot.branch.index())?.0)
        })
    }

    pub(crate) fn link(
        self: &Arc<UnionShared>,
        caller: &Caller,
        node: &Node,
        file: AnyOpen<'_>,
        parent: &Node,
        name: Name<'_>,
    ) -> Result<Entry> {
        let node = self.node(node)?;
        let parent = self.directory(parent)?;
        if node.kind == Kind::Directory {
            return Err(Errno::EPERM);
        }
        check_name(name)?;
        self.settled(node.id)?;
        if self.lookup(caller, &Node::new(Arc::clone(&parent)), name).is_ok() {
            return Err(Errno::EEXIST);
        }
        if node.is_gone() {
            return Err(Errno::ENOENT);
        }
        let copies = self.duplicates_before_link(caller, &node)?;
        let mut most = usize::MAX;
        for _ in 0..ATTEMPTS {
            let part = self.copy_up(&node, most, u64::MAX)?;
            match self.link_on(caller, &node, &part, file, &parent, name) {
                // The name is hidden on a branch above: the file has to be copied up there, unless a process
                // may be writing to it on its branch.
                Err(Errno::EXDEV) if part.branch.index() > 0 && node.open_files().is_empty() => {
                    most = part.branch.index() - 1
                }
                // It has moved meanwhile.
                Err(Errno::EBUSY) => {}
                Ok(entry) => {
                    self.link_duplicates(caller, &copies, &parent, name, part.branch.index());
                    return Ok(entry);
                }
                Err(error) => return Err(error),
            }
        }
        Err(Errno::EBUSY)
    }

    fn link_on(
        &self,
        caller: &Caller,
        node: &Arc<UnionNode>,
        part: &Part,
        file: AnyOpen<'_>,
        parent: &Arc<UnionNode>,
        name: Name<'_>,
    ) -> Result<Entry> {
        let _still = self.hold_still(node);
        if node.top()?.branch.index() != part.branch.index() {
            return Err(Errno::EBUSY);
        }
        let open = file.and_then(|file| file.inner().as_any().downcast_ref::<UnionFile>());
        let open =
            open.filter(|open| open.is_of(node) && open.is_on(&part.branch)).map(|open| Arc::clone(open.present()));
        self.make(caller, parent, name, On::Branch(&part.branch), &mut |spot| {
            let layer = &spot.branch.layer;
            if self.is_copy(node, part) {
                self.mark_home(parent, spot.part)?;
            }
            let file = open.as_deref().map(|file| file.inner());
            // A link has no owner of its own, and users have no access to the work directory.
            let apart = |making: &Making<'_>| layer.link(&OWN, &part.node, file, &*spot.home(making)?, making.name()?);
            let (making, entry) = if spot.occupied {
                let making = Making::Apart(spot.branch.work()?.temporary());
                match apart(&making) {
                    // The directory is on a file system mounted inside the branch.
                    Err(Errno::EXDEV) => {
                        let hidden = Making::Hidden(spot.branch.work()?.hidden_temporary());
                        let entry = apart(&hidden)?;
                        (hidden, entry)
                    }
                    entry => (making, entry?),
                }
            } else {
                (Making::Itself(spot.name), layer.link(caller, &part.node, file, spot.directory, spot.name)?)
            };
            layer.adopt(&part.node, &entry.node);
            spot.finish(&making, &part.node, node.kind)?;
            node.arrive(parent, name.bytes());
            Ok(Entry { node: Node::new(Arc::clone(node)), attr: self.attr_up(node, entry.attr) })
        })
    }
}

fn spot<'a>(branch: &'a Arc<Branch>, part: &'a Part, name: Name<'a>, sight: &Sight) -> Result<Spot<'a>> {
    let hidden_here = sight.whiteout == Some(branch.index());
    let occupied = hidden_here
        && match branch.layer.lookup(&OWN, &part.node, name) {
            Ok(_) => true,
            Err(Errno::ENOENT) => false,
            Err(error) => return Err(error),
        };
    let floor = match sight.whiteout {
        Some(index) if index > branch.index() => index - 1,
        _ => sight.limit,
    };
    let covered = hidden_here && !occupied;
    Ok(Spot { branch, directory: &part.node, part, name, occupied, covered, keeps_whiteout: false, floor })
}

impl FoundFile {
    /// Whether it is a directory.
    pub(crate) fn is_directory(&self) -> bool {
        self.kind == Kind::Directory
    }
}
