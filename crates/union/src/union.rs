//! The union as a layer: what its parts share, how it is built, and the way of each operation to the file that does it.
//!
//! Built by whoever wires stacks and by tests; used through [`Layer`] only.

use crate::{
    branch::BranchMode,
    branches::Branch,
    identity::Identities,
    links::Links,
    listing::Listings,
    lookup,
    marks::{Marks, Style},
    node::{Nodes, Part, UnionNode},
    policy::{CopyUpPolicy, CreatePolicy, PolicyState, Routes, SpaceCache},
    watch,
    work::Work,
};
use nacre_vfs::{
    Attr, Caller, Coherence, Collector, Description, DirSink, Entry, Errno, FileId, Invalidation, Ioctl, Kind, Layer, Name, Node, OpenFile,
    OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use parking_lot::Mutex;
use std::{
    error::Error,
    fmt,
    sync::{Arc, atomic::AtomicU64, mpsc::Sender},
    time::Instant,
};

/// Who does the union's own work on branches.
pub(crate) const OWN: Caller = Caller::ROOT;

/// The most branches (as aufs by default).
const BRANCHES_MAX: usize = 127;

/// How a union behaves.
#[derive(Clone, Debug)]
pub struct UnionOptions {
    /// Where new files go.
    pub create: CreatePolicy,
    /// Paths with a policy or a branch of their own.
    pub routes: Routes,
    /// Nothing new is put on a branch with less free bytes, unless the branch says otherwise; 0 for no such limit.
    pub min_free: u64,
    /// Where files are copied to before they are changed.
    pub copy_up: CopyUpPolicy,
    /// The form of new whiteouts.
    pub whiteout: Style,
    /// Shows whiteouts as names; only for unions without a writable branch.
    pub show_whiteouts: bool,
    /// Copies are on stable storage before they take the place of the original.
    pub sync: bool,
    /// Every new directory is opaque, not only those that take the place of a hidden one.
    pub opaque_always: bool,
    /// `statfs(2)` tells all file systems together, not only that of the file.
    pub sum: bool,
    /// How many entries are copied at most for the rename of a directory that is not on a writable branch as a whole; beyond it the
    /// answer is EXDEV, upon which programs copy by themselves. 0: always EXDEV.
    pub directory_copy_limit: usize,
    /// Directories beyond that limit are renamed by a mark on their upper part that tells where they go on below, instead of EXDEV; only where
    /// no branch below is writable.
    pub directory_redirect: bool,
    /// A write that finds a branch full moves the file to the branch with most room and is tried again. The kernel then cannot read and write
    /// files in our place.
    pub move_when_full: bool,
}

impl Default for UnionOptions {
    fn default() -> UnionOptions {
        UnionOptions {
            create: CreatePolicy::default(),
            routes: Routes::default(),
            min_free: 0,
            copy_up: CopyUpPolicy::default(),
            whiteout: Style::default(),
            show_whiteouts: false,
            sync: true,
            opaque_always: false,
            sum: false,
            directory_copy_limit: 1_000,
            directory_redirect: false,
            move_when_full: false,
        }
    }
}

/// Why a union cannot be built: on which branch, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnionError(String);

impl fmt::Display for UnionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UnionError {}

/// What all operations share.
pub(crate) struct Shared {
    pub(crate) branches: Vec<Arc<Branch>>,
    pub(crate) options: UnionOptions,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) identities: Identities,
    pub(crate) links: Links,
    pub(crate) listings: Listings,
    pub(crate) policy: PolicyState,
    pub(crate) space: SpaceCache,
    /// The clock of `space`.
    pub(crate) started: Instant,
    /// Held while a directory moves, goes, or comes to be on one more branch.
    pub(crate) tree: Mutex<()>,
    /// How many directories have moved so far.
    pub(crate) moves: AtomicU64,
    pub(crate) root: Arc<UnionNode>,
}

/// Several branches as one tree.
pub struct Union {
    shared: Arc<Shared>,
}

impl fmt::Debug for Union {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Union").field("branches", &self.shared.branches.len()).finish_non_exhaustive()
    }
}

impl Union {
    /// Puts branches together, the first one on top. Makes the union's own directories on the writable ones, and empties the place where
    /// copies were being built when it last ended.
    ///
    /// # Errors
    /// No branch or too many; whiteouts shown over a writable branch; a branch that cannot be read, or not be written though it should.
    pub fn new(branches: Vec<(Arc<dyn Layer>, BranchMode)>, options: UnionOptions) -> std::result::Result<Union, UnionError> {
        if branches.is_empty() {
            return Err(UnionError("a union needs a branch; name at least one directory".to_owned()));
        }
        if branches.len() > BRANCHES_MAX {
            return Err(UnionError(format!(
                "{} branches are more than {BRANCHES_MAX}; join some of them in a union of their own",
                branches.len()
            )));
        }
        if options.show_whiteouts && branches.iter().any(|(_, mode)| mode.writable()) {
            return Err(UnionError(
                "whiteouts can only be shown by a union that is read-only as a whole; make all branches ro+wh".to_owned(),
            ));
        }
        let mut opened: Vec<Branch> = Vec::with_capacity(branches.len());
        for (index, (layer, mode)) in branches.into_iter().enumerate() {
            let failed = |error: Errno| {
                UnionError(format!(
                    "branch {} cannot be used: {error}; name a directory that can be read, and written where it is to be",
                    index + 1
                ))
            };
            let branch = open_branch(index, layer, mode, options.whiteout).map_err(failed)?;
            if opened.iter().any(|other: &Branch| other.root_id == branch.root_id) {
                return Err(UnionError(format!("branch {} is the same directory as one above it; name it once", index + 1)));
            }
            opened.push(branch);
        }
        // Marks on branches that are only read have been written by a union like this one.
        let namespace = opened.iter().find(|branch| branch.is_writable()).map(|branch| branch.marks.namespace);
        for branch in opened.iter_mut().filter(|branch| !branch.is_writable()) {
            branch.marks.namespace = namespace.unwrap_or(branch.marks.namespace);
        }
        let opened: Vec<Arc<Branch>> = opened.into_iter().map(Arc::new).collect();
        let links = Links::default();
        let identities = Identities::default();
        // From the bottom, so that a branch put on top later changes no numbers.
        for branch in opened.iter().rev() {
            identities.of(branch.root_id);
        }
        for branch in &opened {
            links
                .load(branch)
                .map_err(|error| UnionError(format!("the hard-link index of branch {} cannot be read: {error}", branch.index + 1)))?;
        }
        let nodes = Arc::new(Nodes::default());
        let root =
            root(&nodes, &identities, &opened).map_err(|error| UnionError(format!("the branches cannot be put together: {error}")))?;
        let shared = Shared {
            branches: opened,
            options,
            nodes,
            identities,
            links,
            listings: Listings::default(),
            policy: PolicyState::default(),
            space: SpaceCache::default(),
            started: Instant::now(),
            tree: Mutex::new(()),
            moves: AtomicU64::new(0),
            root,
        };
        Ok(Union { shared: Arc::new(shared) })
    }

    /// What all operations share, for questions that are no operations.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

fn open_branch(index: usize, layer: Arc<dyn Layer>, mode: BranchMode, style: Style) -> Result<Branch> {
    let root = layer.root()?;
    if root.attr.kind != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    let work = if mode.writable() { Some(Work::open(&*layer, &root.node)?) } else { None };
    let namespace = match &work {
        Some(work) => Marks::probe(&*layer, &work.directory)?,
        // Nothing is written there.
        None => crate::marks::Namespace::Trusted,
    };
    let links = if mode.reads_marks() { Work::links(&*layer, &root.node, mode.writable())? } else { None };
    let marks = Marks { style, namespace };
    Ok(Branch { index, mode, root: root.node, root_id: root.attr.id, marks, links, work, layer })
}

fn root(nodes: &Arc<Nodes>, identities: &Identities, branches: &[Arc<Branch>]) -> Result<Arc<UnionNode>> {
    let mut parts = Vec::new();
    let mut floor = branches.len().saturating_sub(1);
    for branch in branches {
        let opacity = if branch.mode.reads_marks() { branch.marks.opacity(&*branch.layer, &branch.root)? } else { Default::default() };
        parts.push(Part { x_directory: opacity.x, impure: opacity.impure, ..Part::new(branch, branch.root.clone(), branch.root_id) });
        if opacity.opaque {
            floor = branch.index;
            break;
        }
    }
    let last = branches.last().ok_or(Errno::EIO)?;
    let id = identities.of(last.root_id);
    nodes.set_root(id);
    Ok(nodes.get(crate::node::Known { id, kind: Kind::Directory, parts, floor }))
}

impl Shared {
    /// How long what is known of a directory's names stays true.
    pub(crate) fn coherence_of_names(&self, node: &UnionNode) -> Coherence {
        let parts = node.parts();
        let told = self.branches.iter().map(|branch| {
            let part = parts.iter().find(|part| part.branch.index == branch.index);
            branch.layer.coherence(Scope::Names(part.map_or(&branch.root, |part| &part.node)))
        });
        told.max().unwrap_or(Coherence::Shared)
    }
}

impl Layer for Union {
    fn root(&self) -> Result<Entry> {
        let node = Node::new(Arc::clone(&self.shared.root));
        let attr = self.shared.getattr(&OWN, &node, None)?;
        Ok(Entry { node, attr })
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.lookup(caller, parent, name)
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        Ok(self.shared.node(node)?.id)
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        self.shared.node(node).ok()?.path()
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        // A file has one node as long as anybody holds it: there is nothing to learn.
        if let (Ok(known), Ok(fresh)) = (self.shared.node(known), self.shared.node(fresh))
            && !Arc::ptr_eq(&known, &fresh)
            && let Some(place) = fresh.place()
        {
            known.arrive(&place.parent, &place.name);
        }
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: Option<&dyn OpenFile>) -> Result<Attr> {
        self.shared.getattr(caller, node, file)
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.shared.access(caller, node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: Option<&dyn OpenFile>, change: &SetAttr) -> Result<Attr> {
        self.shared.setattr(caller, node, file, change)
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.shared.readlink(caller, node)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        self.shared.create(caller, parent, name, mode, flags)
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        self.shared.tmpfile(caller, parent, mode, flags)
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.shared.mkdir(caller, parent, name, mode)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, device: (u32, u32)) -> Result<Entry> {
        self.shared.mknod(caller, parent, name, kind, mode, device)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.shared.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: &Node, file: Option<&dyn OpenFile>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.link(caller, node, file, parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.unlink(caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.rmdir(caller, parent, name)
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.shared.rename(caller, (parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        self.shared.open(caller, node, flags)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        lookup::list(&self.shared, caller, node, from, attributes, sink)
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.shared.fsyncdir(caller, node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        self.shared.statfs(caller, node)
    }

    fn syncfs(&self) -> Result<()> {
        self.shared.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.shared.getxattr(caller, node, name, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.shared.listxattr(caller, node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.shared.setxattr(caller, node, name, value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.shared.removexattr(caller, node, name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        self.shared.ioctl(caller, node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        match scope {
            Scope::Names(node) => self.shared.node(node).map_or(Coherence::Shared, |node| self.shared.coherence_of_names(&node)),
            Scope::Attributes(node, attr) => match self.shared.node(node).and_then(|node| node.top()) {
                Ok(top) => top.branch.layer.coherence(Scope::Attributes(&top.node, attr)),
                Err(_) => Coherence::Shared,
            },
        }
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        watch::start(&self.shared, &channel);
    }

    fn has_acls(&self) -> bool {
        self.shared.branches.iter().any(|branch| branch.layer.has_acls())
    }

    fn judges_callers(&self) -> bool {
        self.shared.branches.iter().any(|branch| branch.layer.judges_callers())
    }

    fn collect(&self, _: &Arc<dyn Collector>) -> bool {
        // Copy-up has to see the first write.
        false
    }

    fn describe(&self) -> Description {
        let options = &self.shared.options;
        let mut text = Description::new("union")
            .with("create", options.create.to_string())
            .with("cpup", options.copy_up.to_string())
            .with("whiteout", options.whiteout.to_string());
        for branch in &self.shared.branches {
            text = text.over(branch.layer.describe());
        }
        text
    }
}
