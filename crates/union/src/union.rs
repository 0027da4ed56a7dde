//! The union as a layer: how it is built, and which file implements each operation.
//!
//! Built by the crate `stack` and by tests; used through [`Layer`] only.

use crate::{
    Notices, OWN, PlacementState, TreeMoves, Union, UnionShared,
    base_log::BaseLog,
    branch::{BRANCHES_MAX, BranchMode},
    branches::{Branch, Member, Slots, believe},
    control_file::ControlFile,
    hardlinks::index::HardlinkIndex,
    identity::Identities,
    listing::Listings,
    lookup::{self, root_parts},
    membership::Membership,
    node::{Nodes, UnionNode},
    options::UnionOptions,
    per_name::PerName,
    policy::{PolicyState, SpaceCache},
    tier::{self, Tiering},
    watch,
    work::NOT_OWN,
};
use arc_swap::ArcSwap;
use nacre_vfs::{
    AnyOpen, AttachedDoor, Attr, Caller, Capabilities, Coherence, Created, Description, Dev, DirSink, Entry, Errno,
    FileId, Invalidation, Ioctl, Kind, Layer, LeftNumbers, LeftOpen, Name, Node, OpenFileClient, OpenFileHost,
    OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use parking_lot::RwLock;
use std::{
    error::Error,
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock, Weak, mpsc::Sender},
    time::Instant,
};

/// Why a union cannot be built: the branch, and how to correct it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnionError {
    what: String,
    /// The error of the branch, if that is the reason.
    pub reason: Option<Errno>,
}

impl fmt::Display for UnionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for UnionError {}

impl UnionError {
    fn new(what: String) -> UnionError {
        UnionError { what, reason: None }
    }
}

/// A change of the union that a user requests through the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    /// Adds a branch.
    Add {
        /// The branch as users write it.
        text: Vec<u8>,
        /// Position from the top, 0 the first; a position beyond the last one is the bottom.
        place: usize,
    },
    /// Changes the attributes of a branch.
    Modify {
        /// Path of the branch.
        path: PathBuf,
        /// The attributes as users write them.
        mode: String,
    },
    /// Removes a branch, even if files on it are open.
    Remove(PathBuf),
    /// Changes the policy for new files, as one of the `-o` options.
    Word(String),
}

/// The callback that makes changes.
pub(crate) type Editor = dyn Fn(Edit) -> Result<()> + Send + Sync;

impl fmt::Debug for Union {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Union").field("branches", &self.shared.branches().len()).finish_non_exhaustive()
    }
}

impl Union {
    /// Builds a union from branches, the first one on top. Creates the union's own directories on the writable
    /// ones, and empties their work directories.
    ///
    /// # Errors
    /// No branch or too many; whiteouts shown over a writable branch; a branch that cannot be read, or cannot
    /// be written although its mode asks for it.
    pub fn new(
        branches: Vec<(Arc<dyn Layer>, BranchMode)>,
        options: UnionOptions,
    ) -> std::result::Result<Union, UnionError> {
        let name = |index: usize| PathBuf::from(format!("branch {}", index + 1));
        let member = |(index, (layer, mode))| Member { name: name(index), layer, mode, work: None, lock: None };
        Union::named(branches.into_iter().enumerate().map(member).collect(), options)
    }

    /// Builds a union from branches with names, as [`Union::new`].
    ///
    /// # Errors
    /// As [`Union::new`].
    pub fn named(members: Vec<Member>, options: UnionOptions) -> std::result::Result<Union, UnionError> {
        Union::going_on(members, options, None)
    }

    /// Notes from now on in a log which entries of read-only branches are hidden. The first log that is set counts.
    pub fn log_hidden_entries(&self, log: BaseLog) {
        // A second log would know half of the entries.
        let _ = self.shared.base_log.set(log);
    }

    /// As [`Union::named`], with the inode numbers that the previous process assigned; new ones are recorded
    /// for the next process.
    ///
    /// # Errors
    /// As [`Union::new`].
    #[expect(
        clippy::disallowed_methods,
        reason = "from here on it is counted how long figures of free space are believed"
    )]
    pub fn going_on(
        members: Vec<Member>,
        options: UnionOptions,
        left: Option<Arc<dyn LeftNumbers>>,
    ) -> std::result::Result<Union, UnionError> {
        if members.is_empty() {
            return Err(UnionError::new("a union needs a branch; name at least one directory".to_owned()));
        }
        if members.len() > BRANCHES_MAX {
            return Err(UnionError::new(format!(
                "{} branches are more than {BRANCHES_MAX}; join some of them in a union of their own",
                members.len()
            )));
        }
        if options.show_whiteouts && members.iter().any(|member| member.mode.writable()) {
            return Err(UnionError::new(
                "whiteouts can only be shown by a union that is read-only as a whole; make all branches ro+wh"
                    .to_owned(),
            ));
        }
        let mut slots = Slots::default();
        let mut opened: Vec<Arc<Branch>> = Vec::with_capacity(members.len());
        for (index, member) in members.into_iter().enumerate() {
            let failed = |error: Errno| UnionError {
                what: match error {
                    Errno::EEXIST => format!("branch {} cannot be used: {NOT_OWN}", index + 1),
                    _ => format!(
                        "branch {} cannot be used: {error}; name a directory that can be read, and written where it is to be",
                        index + 1
                    ),
                },
                reason: Some(error),
            };
            let slot = slots.free().ok_or_else(|| failed(Errno::ENOSPC))?;
            let branch = Arc::new(Branch::open(slot, member, &options).map_err(failed)?);
            if opened.iter().any(|other| other.root_id == branch.root_id) {
                return Err(UnionError::new(format!(
                    "branch {} is the same directory as one above it; name it once",
                    index + 1
                )));
            }
            branch.set_index(index);
            slots.take(&branch);
            opened.push(branch);
        }
        believe(&opened);
        let identities = Arc::new(Identities::new(left.clone()));
        let hardlinks = HardlinkIndex::new(Arc::clone(&identities));
        // From the bottom, so that a branch added on top later changes no inode numbers.
        for branch in opened.iter().rev() {
            identities.register(branch.root_id);
        }
        for branch in &opened {
            hardlinks.load(branch).map_err(|error| {
                UnionError::new(format!("the hard-link index of branch {} cannot be read: {error}", branch.index() + 1))
            })?;
        }
        let nodes = Arc::new(Nodes::new(left));
        let failed = |error| UnionError::new(format!("the branches cannot be put together: {error}"));
        let last = opened.last().map(|last| last.root_id).ok_or_else(|| failed(Errno::EIO))?;
        let (parts, floor) = root_parts(&opened).map_err(failed)?;
        let id = identities.root(identities.of(last));
        nodes.set_root(id);
        let root = nodes.get(crate::node::Known { id, kind: Kind::Directory, parts, floor });
        let tier = options.tier.clone();
        let names = (options.link_cow || options.symlinkify.is_some()).then(Arc::default);
        let shared = UnionShared {
            branches: ArcSwap::from_pointee(opened),
            gate: RwLock::new(()),
            membership: Membership::new(slots),
            placing: PlacementState {
                routes: ArcSwap::from_pointee(options.routes.clone()),
                rules: ArcSwap::from_pointee(options.live_rules()),
                policy: PolicyState::default(),
                space: SpaceCache::default(),
                started: Instant::now(),
            },
            door: AttachedDoor::default(),
            options,
            root,
            nodes,
            identities,
            hardlinks,
            listings: Listings::default(),
            tree: TreeMoves::default(),
            tiering: Tiering::new(tier),
            notices: Notices::default(),
            names,
            editor: OnceLock::new(),
            base_log: OnceLock::new(),
        };
        let shared = Arc::new(shared);
        if let Err(error) = shared.finish_moves() {
            tracing::warn!(
                ?error,
                "a file with several names is still on its way to another branch; its names show the copy"
            );
        }
        tier::start(&shared);
        Ok(Union { shared })
    }

    /// The layer for FUSE front ends: the union itself, or the per-name layer or the control file over it if an
    /// option asks for them.
    pub fn layer(self: &Arc<Union>) -> Arc<dyn Layer> {
        let shown = match &self.shared.names {
            Some(names) => Arc::new(PerName::new(Arc::clone(self), Arc::clone(names))),
            None => Arc::clone(self) as Arc<dyn Layer>,
        };
        if self.shared.options.control_file { Arc::new(ControlFile::new(Arc::clone(self), shown)) } else { shown }
    }

    /// Sets the callback that makes the changes which users request through the control file: it opens branches
    /// and records the change. Only the first call has an effect.
    pub fn edit_by(&self, editor: impl Fn(Edit) -> Result<()> + Send + Sync + 'static) {
        // A second callback would be a mistake of the caller and changes nothing.
        let _ = self.shared.editor.set(Box::new(editor));
    }

    /// Makes a change through the callback.
    ///
    /// # Errors
    /// EROFS without a callback; errors of the callback.
    pub(crate) fn edit(&self, edit: Edit) -> Result<()> {
        self.shared.editor.get().ok_or(Errno::EROFS)?(edit)
    }

    /// The shared state, for queries that are no operations.
    pub(crate) fn shared(&self) -> &Arc<UnionShared> {
        &self.shared
    }
}

impl UnionShared {
    /// The branches from the top.
    pub(crate) fn branches(&self) -> arc_swap::Guard<Arc<Vec<Arc<Branch>>>> {
        self.branches.load()
    }

    /// The present values of the options that change while mounted.
    pub(crate) fn rules(&self) -> crate::options::LiveRules {
        **self.placing.rules.load()
    }

    /// Replaces the list of branches. No operation is running.
    pub(crate) fn set_branches(&self, branches: Vec<Arc<Branch>>) {
        self.branches.store(Arc::new(branches));
    }

    /// How long names of a directory may be cached.
    pub(crate) fn coherence_of_names(&self, node: &UnionNode) -> Coherence {
        let parts = node.parts();
        let branches = self.branches();
        let told = branches.iter().map(|branch| {
            let part = parts.iter().find(|part| part.branch.slot == branch.slot);
            branch.layer.coherence(Scope::Names(part.map_or(&branch.root, |part| &part.node)))
        });
        told.max().unwrap_or(Coherence::Shared)
    }
}

impl Layer for Union {
    fn root(&self) -> Result<Entry> {
        let node = Node::new(Arc::clone(&self.shared.root));
        let _branches = self.shared.gate.read();
        let attr = self.shared.getattr(&OWN, &node, None)?;
        Ok(Entry { node, attr })
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let _branches = self.shared.gate.read();
        self.shared.lookup(caller, parent, name)
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        Ok(self.shared.held(node)?.id)
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        self.shared.held(node).ok()?.path()
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        // A file has one node as long as it is referenced, so there is nothing to learn.
        if let (Ok(known), Ok(fresh)) = (self.shared.held(known), self.shared.held(fresh))
            && !Arc::ptr_eq(&known, &fresh)
            && let Some(place) = fresh.place()
        {
            known.arrive(&place.parent, &place.name);
        }
    }

    fn hold(&self, _directory: &Node, _gone: bool) {
        // Directories of branches stay with their node.
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        let _branches = self.shared.gate.read();
        self.shared.getattr(caller, node, file)
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.access(caller, node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        let _branches = self.shared.gate.read();
        self.shared.setattr(caller, node, file, change)
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        let _branches = self.shared.gate.read();
        self.shared.readlink(caller, node)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        let _branches = self.shared.gate.read();
        self.shared.create(caller, parent, name, mode, flags)
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        let _branches = self.shared.gate.read();
        self.shared.tmpfile(caller, parent, mode, flags)
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let _branches = self.shared.gate.read();
        self.shared.mkdir(caller, parent, name, mode)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let _branches = self.shared.gate.read();
        self.shared.mknod(caller, parent, name, kind, mode, dev)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let _branches = self.shared.gate.read();
        self.shared.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let _branches = self.shared.gate.read();
        self.shared.link(caller, node, file, parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.unlink(caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let _branches = self.shared.gate.read();
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
        let _branches = self.shared.gate.read();
        self.shared.rename(caller, (parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let _branches = self.shared.gate.read();
        self.shared.open(caller, node, flags)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let _branches = self.shared.gate.read();
        lookup::list(&self.shared, caller, node, from, attributes, sink)
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.fsyncdir(caller, node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        let _branches = self.shared.gate.read();
        self.shared.statfs(caller, node)
    }

    fn syncfs(&self) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let _branches = self.shared.gate.read();
        self.shared.getxattr(caller, node, name, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        let _branches = self.shared.gate.read();
        self.shared.listxattr(caller, node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.setxattr(caller, node, name, value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.removexattr(caller, node, name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let _branches = self.shared.gate.read();
        self.shared.ioctl(caller, node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        match scope {
            Scope::Names(node) => {
                self.shared.held(node).map_or(Coherence::Shared, |node| self.shared.coherence_of_names(&node))
            }
            // Any of its parts may be the one whose times are shown.
            Scope::Attributes(node, attr) if self.shared.rules().newest_times && attr.kind == Kind::Directory => {
                let parts = self.shared.held(node).map(|node| node.parts());
                let told = parts
                    .iter()
                    .flat_map(|parts| parts.iter())
                    .map(|part| part.branch.layer.coherence(Scope::Attributes(&part.node, attr)));
                told.max().unwrap_or(Coherence::Shared)
            }
            Scope::Attributes(node, attr) => match self.shared.held(node).and_then(|node| node.top()) {
                Ok(top) => top.branch.layer.coherence(Scope::Attributes(&top.node, attr)),
                Err(_) => Coherence::Shared,
            },
        }
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        let _branches = self.shared.gate.read();
        watch::start(&self.shared, &channel);
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        self.shared.rest(known)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let branches = self.shared.branches();
        let any = |has: fn(&Capabilities<'_>) -> bool| branches.iter().any(|branch| has(&branch.layer.capabilities()));
        let any_left_open = any(|branch| branch.left_open.is_some());
        Capabilities {
            acls: any(|branch| branch.acls),
            // Copies are changed where their owner and directory allow it to the caller.
            judges_callers: self.shared.options.duplicates || any(|branch| branch.judges_callers),
            reuses_numbers: any(|branch| branch.reuses_numbers),
            numbered: None,
            // Copy-up has to see the first write.
            writeback: None,
            needs_opens: branches.iter().find_map(|branch| branch.layer.capabilities().needs_opens),
            open_files: Some(self),
            left_open: (any_left_open && self.shared.names.is_none()).then_some(self as &dyn LeftOpen),
            interrupted: Some(self),
        }
    }

    fn describe(&self) -> Description {
        let options = &self.shared.options;
        let mut text = Description::new("union")
            .with("create", self.shared.placing.rules.load().create.to_string())
            .with("cpup", options.copy_up.to_string())
            .with("whiteout", options.whiteout.to_string());
        for branch in self.shared.branches().iter() {
            text = text.over(branch.layer.describe());
        }
        text
    }
}

impl OpenFileClient for Union {
    fn attach(&self, door: Weak<dyn OpenFileHost>) {
        self.shared.door.attach(door);
        self.shared.branches().iter().for_each(|branch| self.shared.attach(branch));
    }
}

impl UnionShared {
    /// Attaches the FUSE front end to a branch, once there is one: the branch's files are closed with the
    /// union's.
    pub(crate) fn attach(&self, branch: &Branch) {
        if let (Some(door), Some(client)) = (self.door.get(), branch.layer.capabilities().open_files) {
            client.attach(door);
        }
    }
}
