//! The FUSE front end's request handler: one request in, one call of the [`Layer`] down, one reply out.
//!
//! Called by fusewire's threads, many at a time. Each family of operations is a file under `ops/`; this file has the
//! state they share and the dispatch. Invariants:
//! * the inode table counts a lookup exactly when its reply names a node;
//! * no lock of a table is held while a layer is called;
//! * a request that one of our own threads makes on our own mount is refused at once: a source that contains its own
//!   mount point must not hang.

use crate::{
    failure::{Failure, Outcome},
    inodes::{Found, Inodes, ROOT, Removed},
    invalidate::InvalidationFeed,
    kernel_side::KernelSide,
    negotiate::{self, Agreement, CacheTimes},
    open_tables::OpenTables,
    options::FuseOptions,
    self_io::{
        Role, SelfIo, flush,
        gate::{Gate, Replacer},
        own_mount::{InodeKey, Names},
    },
    survival::{Survives, opens::OpenLeft},
    wire,
    writeback::{Writeback, written_files::Uses},
};
use fusewire::{Handler, Header, Offer, Op, Reply, Request, Settings, abi};
use nacre_sys::kernel_version::kernel_version;
use nacre_vfs::{
    Caller, Coherence, Entry, Errno, FileId, Invalidation, Ioctl, Kind, Layer, Name, Node, OpenFileHost, Opened,
    Protection, Scope,
};
use parking_lot::Mutex;
use std::{
    sync::{Arc, mpsc::Sender},
    time::Duration,
};

/// Attribute timeout for a getattr by file handle (the kernel seeks) of a file that may be written by mmap.
const SOUGHT: Duration = Duration::from_millis(10);
/// Minimum timeout of long-lived cache entries, of whose changes the kernel is notified.
pub(crate) const LASTING: Duration = Duration::from_secs(60);

/// State of one mount between the kernel and a layer.
pub(crate) struct Door {
    /// The layer that is served.
    pub layer: Arc<dyn Layer>,
    /// The mount's options.
    pub options: FuseOptions,
    /// The inode table.
    pub inodes: Arc<Inodes>,
    /// The tables of open files.
    pub open: OpenTables,
    /// Write-back caching by the kernel.
    pub writeback: Arc<Writeback>,
    /// Our own threads that use the mount.
    pub self_io: Arc<SelfIo>,
    /// Blocks requests during a rollback.
    pub gate: Gate,
    /// Marks the old inodes as bad (EIO) during a rollback.
    pub replacer: Mutex<Option<std::io::Result<Replacer>>>,
    /// The features agreed on with the kernel, and the channels to it.
    pub kernel: KernelSide,
    /// Channel to the thread that invalidates the kernel's caches.
    pub invalidations: InvalidationFeed,
    /// Handoff state for the next process, where the mount survives its process.
    pub survives: Option<Survives>,
}

impl Door {
    /// Creates the front end of `layer`; `changes` leads to the invalidation thread.
    ///
    /// # Errors
    /// The error of [`Layer::root`].
    pub fn new(
        layer: Arc<dyn Layer>,
        options: FuseOptions,
        changes: Sender<Invalidation>,
        kept_limit: usize,
    ) -> Result<Door, Errno> {
        let root = layer.root()?;
        let self_io: Arc<SelfIo> = Arc::default();
        let memory = options.survival.as_ref();
        let writeback = Writeback::new(&options.mountpoint, options.flush_for_seek, &self_io);
        if let Some(memory) = memory {
            self_io.note_in(memory);
            writeback.outlives(memory);
            layer.capabilities().numbered.iter().for_each(|numbered| numbered.note_in(&memory.given_numbers()));
        }
        Ok(Door {
            inodes: Arc::new(Inodes::over(&layer, root.node, &root.attr, memory)?),
            survives: memory.map(Survives::new),
            open: OpenTables::new(&*layer, &options, kept_limit),
            writeback: Arc::new(writeback),
            self_io,
            gate: Gate::default(),
            replacer: Mutex::new(None),
            kernel: KernelSide::new(&options),
            invalidations: InvalidationFeed::new(changes),
            layer,
            options,
        })
    }

    /// Returns the kernel's cache timeouts.
    pub fn times(&self) -> CacheTimes {
        self.kernel.times()
    }

    /// Returns the features agreed on in INIT; none before INIT.
    pub fn agreement(&self) -> Agreement {
        self.kernel.agreement()
    }

    /// Sends a change to the invalidation thread.
    pub fn change(&self, change: Invalidation) {
        self.invalidations.send(change);
    }

    /// Invalidates cached names after the search permission of a directory has changed. Where the kernel checks
    /// permissions, nothing is to be done; where the layer does, it checks at lookup, so from now on the kernel has
    /// to look up all names again.
    pub fn permissions_changed(&self) {
        if self.options.default_permissions {
            return;
        }
        if !self.kernel.tell(|notifier| !self.kernel.carries_mounts() && notifier.inc_epoch().is_ok()) {
            self.change(Invalidation::Everything);
        }
    }

    /// Whether a name resolves to a file. A file system mounted there by others stays only if the kernel revalidates
    /// the name before it drops the dentry.
    pub fn leads_somewhere(&self, parent: u64, name: &[u8]) -> bool {
        let (Some(directory), Ok(name)) = (self.inodes.node(parent), Name::new(name)) else { return false };
        self.layer.lookup(&Caller::ROOT, &directory, name).is_ok()
    }

    /// The layer's node of a node id.
    pub fn node(&self, nodeid: u64) -> Outcome<Node> {
        self.inodes.node(nodeid).ok_or(Failure::from(Errno::ESTALE))
    }

    /// Paths of these files below the root, as far as the layer knows their names.
    pub fn names(&self, files: impl IntoIterator<Item = u64>) -> Names {
        let named = |nodeid: u64| Some((nodeid, self.layer.path(&self.inodes.node(nodeid)?)?));
        files.into_iter().filter_map(named).collect()
    }

    /// The inode generation that the kernel gets for a file.
    pub fn generation(&self, attr: &nacre_vfs::Attr) -> u32 {
        let numbered = if self.inodes.by_number() { self.layer.capabilities().numbered } else { None };
        numbered.map_or(0, |numbered| numbered.generation(attr))
    }

    /// The kernel's file handle (node id and generation) of a file that has these attributes.
    pub fn key(&self, nodeid: u64, attr: &nacre_vfs::Attr) -> InodeKey {
        InodeKey { nodeid, generation: self.generation(attr) }
    }

    /// The kernel's file handle of the file of a node id; `None` where the file is gone.
    pub fn key_of(&self, nodeid: u64) -> Option<InodeKey> {
        if !self.inodes.by_number() {
            return Some(InodeKey { nodeid, generation: 0 });
        }
        let (node, file) = self.inodes.node_and_file(nodeid)?;
        self.layer.getattr(&Caller::ROOT, &node, file.as_deref()).ok().map(|attr| self.key(nodeid, &attr))
    }

    /// The layer's node of a node id and its identity.
    pub fn parent(&self, nodeid: u64) -> Outcome<(Node, FileId)> {
        self.inodes.node_and_id(nodeid).ok_or(Failure::from(Errno::ESTALE))
    }

    /// The layer's node of a node id and any open file of it.
    pub fn node_and_file(&self, nodeid: u64) -> Outcome<(Node, Option<Opened>)> {
        self.inodes.node_and_file(nodeid).ok_or(Failure::from(Errno::ESTALE))
    }

    /// How coherent the names of a directory are.
    pub fn names_coherence(&self, node: &Node) -> Coherence {
        self.layer.coherence(Scope::Names(node))
    }

    /// Timeouts of names in a directory: of existing ones and of missing ones (negative dentries). Zero where names
    /// are matched without case or normalization: when the kernel changes the dentry of one variant, it keeps the
    /// dentries of the other variants as they are.
    pub fn name_times(&self, directory: &Node, coherence: Coherence) -> (Duration, Duration) {
        if self.inodes.by_number()
            && self.layer.capabilities().numbered.is_some_and(|numbered| numbered.folds(directory))
        {
            return (Duration::ZERO, Duration::ZERO);
        }
        (self.times().names(coherence), self.times().missing(coherence))
    }

    /// Attribute timeout of a file. A write in passthrough removes set-id bits from the file, but not from the
    /// kernel's cached mode; execve(2) must not use the stale bits, so attributes of such files are not cached.
    ///
    /// With write-back caching, also zero for files with reserved writes, and while the kernel may have other times
    /// than the layer.
    pub fn attr_time(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, Some(node), Duration::ZERO)
    }

    /// Attribute timeout of an entry of a directory listing, where no further call of the layer is made: the file is
    /// assumed to be open for shared mappings.
    pub fn listed_attr_time(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, None, Duration::ZERO)
    }

    /// Attribute timeout in the reply to a getattr by file handle. The kernel then wants the length, for lseek(2),
    /// which databases call all the time; stores to a mapping do not change the length.
    pub fn attr_time_by_file(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, Some(node), SOUGHT)
    }

    /// `asked`: the node by which the layer is asked whether the file may be stored to ([`Door::is_stored_to`]);
    /// `if_stored`: the timeout if so.
    fn attr_time_where(
        &self,
        nodeid: u64,
        node: &Node,
        attr: &nacre_vfs::Attr,
        asked: Option<&Node>,
        if_stored: Duration,
    ) -> Duration {
        if attr.kind == Kind::File && self.writeback.on() && (self.announces(nodeid) || self.times_move(nodeid)) {
            return Duration::ZERO;
        }
        if !self.writeback.on() && self.blocks_may_come(nodeid, attr) {
            return Duration::ZERO;
        }
        if attr.mode & 0o6000 != 0 && attr.kind == Kind::File && !self.options.immutable {
            return Duration::ZERO;
        }
        let is_protected = attr.protection != Protection::None && attr.kind == Kind::File && self.writeback.on();
        if is_protected && self.may_be_written(nodeid) {
            // The kernel asks before it takes a write, which is refused then.
            return Duration::ZERO;
        }
        let time = self.times().attributes(self.layer.coherence(Scope::Attributes(node, attr)));
        if time > if_stored && attr.kind == Kind::File && self.is_stored_to(nodeid, asked) { if_stored } else { time }
    }

    /// Attributes as reported to the kernel. A file for which it may hold dirty pages has at least one block:
    /// programs take a file without blocks for a hole (`tar -S`), and the kernel keeps the number until the file is
    /// closed, whatever is written meanwhile. Where the kernel opens files without a request, that may be any file.
    pub fn with_sector(&self, nodeid: u64, attr: &nacre_vfs::Attr) -> nacre_vfs::Attr {
        let is_held = if self.writeback.on() {
            attr.kind == Kind::File && (attr.size > 0 || self.writes_unopened() || self.writeback.caches_writes(nodeid))
        } else {
            self.blocks_may_come(nodeid, attr)
        };
        if is_held { nacre_vfs::Attr { blocks: attr.blocks.max(1), ..*attr } } else { *attr }
    }

    /// Whether writes to a file have to be reserved first.
    fn announces(&self, nodeid: u64) -> bool {
        if self.writes_unopened() { !self.unannounced() } else { self.writeback.announces(nodeid) }
    }

    /// Whether the kernel may cache an inode's attributes, and they may be invalidated
    /// ([`KernelSide::root_is_taken`]).
    pub fn root_is_taken(&self, nodeid: u64) -> bool {
        nodeid != ROOT || !self.options.default_permissions || self.kernel.root_is_taken()
    }

    /// Counts a lookup of a file found or created at a location, and returns the reply for it.
    pub fn found(&self, entry: &Entry, found: Found<'_>, names: Duration) -> abi::EntryOut {
        let registered = self.inodes.register(&entry.node, &entry.attr, found);
        if let Some(known) = registered.known {
            self.layer.adopt(&known, &entry.node);
        }
        let attributes = self.attr_time(registered.nodeid, &entry.node, &entry.attr);
        self.inodes.keeps(registered.nodeid, attributes >= LASTING);
        let attr = self.with_sector(registered.nodeid, &entry.attr);
        let mut out = wire::entry(registered.nodeid, &attr, names, attributes);
        out.generation = self.generation(&entry.attr).into();
        out
    }

    /// Like [`Door::found`], for a reply that the kernel accepts even if an invalidation overtakes it: attributes of
    /// regular files are not cached with write-back caching.
    pub fn made(&self, entry: &Entry, found: Found<'_>, names: Duration) -> abi::EntryOut {
        let mut out = self.found(entry, found, names);
        if entry.attr.kind == Kind::File && self.writeback.on() {
            (out.attr_valid, out.attr_valid_nsec) = (0, 0);
            self.inodes.keeps(out.nodeid, false);
        }
        out
    }

    /// Notes a read or write of a file. With write-back caching, the kernel drops the cached number of blocks at
    /// close, without a request to us (fs/fuse/file.c, `fuse_flush()`).
    pub fn used(&self, nodeid: u64) {
        if self.writeback.on() {
            self.inodes.keeps(nodeid, false);
        }
    }

    /// Decrements a lookup count.
    pub fn forget_lookups(&self, nodeid: u64, lookups: u64) {
        let uses = self.writeback.written.uses(nodeid);
        let removed = self.inodes.forget(nodeid, lookups);
        self.forgotten(nodeid, uses, removed);
    }

    /// Cleans up after the kernel may have forgotten a file. `uses`: its count of uses before that; `removed`: the
    /// state of its record.
    pub fn forgotten(&self, nodeid: u64, uses: Option<Uses>, removed: Option<Removed>) {
        self.unknown(nodeid, uses);
        let Some(removed) = removed else { return self.open.closes.heard() };
        if let Some(open) = removed.open {
            self.open.passthrough.abandon(open);
        }
        drop(removed.node);
        self.open.closes.heard();
        self.invalidations.forgotten();
    }

    pub(crate) fn dispatch(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let header = &request.header;
        if let Some(role) = self.self_io.role(header.pid) {
            return self.answer_own(role, request, reply);
        }
        // A release undoes a grant; it must never be refused. All else from our own threads would wait for ourselves.
        let releases = matches!(request.op, Op::Release { .. } | Op::Releasedir { .. } | Op::Destroy);
        if !releases && header.pid != 0 && self.kernel.is_own_thread(header.pid) {
            return Err(Errno::EDEADLK.into());
        }
        if self.gate.is_closed() && !releases {
            self.wait_at_gate(request)?;
        }
        self.operate(request, reply)
    }

    /// Answers a request of one of our own threads that use the mount (`self_io.rs`): requests of its role from the
    /// front end's own state, all others as for any caller.
    fn answer_own(&self, role: Role, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        match (role, &request.op) {
            (Role::Replay, _) => self.replay_request(request, reply),
            (Role::Replaced, _) if self.answer_replacer(request, reply)? => Ok(()),
            // The thread that changes the mount's flags has this role as well; without write-back caching it is
            // served like any caller.
            (Role::Times, Op::Setattr(told)) if self.writeback.on() => {
                self.refresh_setattr(&request.header, told, reply)
            }
            (Role::Flush, _) if flush::answer(request, reply)? => Ok(()),
            _ => self.operate(request, reply),
        }
    }

    /// Calls the handler of an operation.
    pub(crate) fn operate(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        let head = &request.header;
        if matches!(request.op, Op::Lookup { .. } | Op::Opendir { .. } | Op::Readdir { .. } | Op::Readdirplus { .. }) {
            self.kernel.entered_directory(head.nodeid);
        }
        match request.op {
            Op::Lookup { name } => self.lookup(head, name, reply),
            Op::Symlink { name, target } => self.symlink(head, name, target, reply),
            Op::Mknod { name, mode, rdev, umask } => self.mknod(head, name, mode, umask, rdev, reply),
            Op::Mkdir { name, mode, umask } => self.mkdir(head, name, mode, umask, reply),
            Op::Unlink { name } => self.unlink(head, name),
            Op::Rmdir { name } => self.rmdir(head, name),
            Op::Rename { name, new_dir, new_name, flags } => self.rename(head, name, new_dir, new_name, flags),
            Op::Link { nodeid, name } => self.link(head, nodeid, name, reply),
            Op::Create { name, flags, mode, umask, .. } => self.create(head, name, flags, mode, umask, reply),
            Op::Tmpfile { flags, mode, umask, .. } => self.tmpfile(head, flags, mode, umask, reply),
            Op::Getattr { fh } => self.getattr(head, fh, reply),
            Op::Setattr(change) => self.setattr(head, &change, reply),
            Op::Statx { fh, .. } => self.statx(head, fh, reply),
            Op::Readlink => self.readlink(head, reply),
            Op::Statfs => self.statfs(head, reply),
            Op::Open { flags, open_flags } => self.open(head, flags, open_flags, reply),
            Op::Read { fh, offset, size, .. } => self.read(head, fh, offset, size, reply),
            Op::Write { fh, offset, data, flags, write_flags, .. } => {
                self.write(head, (fh, offset), data, flags, write_flags, reply)
            }
            Op::Release { fh, lock_owner, .. } => self.release(fh, lock_owner),
            Op::Flush { fh, lock_owner } => self.flush(fh, lock_owner),
            Op::Fsync { fh, datasync } => self.fsync(head, fh, datasync),
            Op::Fallocate { fh, offset, length, mode } => self.fallocate(head, fh, mode, offset, length),
            Op::Lseek { fh, offset, whence } => self.lseek(head, fh, offset, whence, reply),
            Op::CopyFileRange { fh_in, off_in, nodeid_out, fh_out, off_out, len, flags, wide } => {
                self.copy_file_range(head, (fh_in, off_in), (nodeid_out, fh_out, off_out), (len, flags), wide, reply)
            }
            Op::Ioctl { fh, flags, cmd, arg, input, out_size } => {
                let request = Ioctl { command: cmd, argument: arg, input };
                self.ioctl(head, fh, flags, request, out_size, reply)
            }
            Op::Access { mask } => self.access(head, mask),
            Op::Opendir { .. } => self.opendir(head, reply),
            Op::Readdir { offset, size, .. } => self.readdir(head, offset, size, reply),
            Op::Readdirplus { offset, size, .. } => self.readdirplus(head, offset, size, reply),
            Op::Releasedir { .. } => Ok(()),
            Op::Fsyncdir { datasync, .. } => self.fsyncdir(head, datasync),
            Op::Getxattr { name, size } => self.getxattr(head, name, size, reply),
            Op::Setxattr { name, value, flags, setxattr_flags } => {
                self.setxattr(head, name, value, flags, setxattr_flags)
            }
            Op::Listxattr { size } => self.listxattr(head, size, reply),
            Op::Removexattr { name } => self.removexattr(head, name),
            Op::Getlk { fh, owner, lock, .. } => self.getlk(fh, owner, &lock, reply),
            Op::Setlk { fh, owner, lock, flags, wait } => self.setlk(fh, owner, &lock, flags, wait),
            Op::Syncfs => Ok(self.layer.syncfs()?),
            Op::Destroy => Ok(()),
            // Answered once each: the kernel remembers ENOSYS and does without the operation from then on.
            Op::Bmap { .. } | Op::Poll { .. } | Op::Unknown(_) => Err(Errno::ENOSYS.into()),
        }
    }
}

/// The caller of a request. On an idmapped mount only creations carry ids; the kernel has checked all else. A caller
/// outside of this process's pid namespace, which has no pid here, is not [`Caller::ROOT`].
pub(crate) fn caller(header: &Header) -> Caller {
    let known = |id: u32| if id == abi::INVALID_UIDGID { 0 } else { id };
    let is_unknown = header.uid == abi::INVALID_UIDGID && header.pid == 0;
    let pid = if is_unknown { u32::MAX } else { header.pid };
    Caller { uid: known(header.uid), gid: known(header.gid), pid, umask: 0 }
}

/// Checks a name from the kernel.
pub(crate) fn name(bytes: &[u8]) -> Outcome<Name<'_>> {
    Ok(Name::new(bytes)?)
}

impl OpenFileHost for Door {
    fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        let mut closed = || {
            // In each round: a file closed meanwhile may have been kept open as well.
            for nodeid in files.iter().filter_map(|id| self.inodes.find(id)) {
                self.open.passthrough.drop_kept(nodeid, &self.inodes);
                self.open.implicit.forget(nodeid);
            }
            closed()
        };
        // The RELEASE is a request like any other, and may be queued for this very thread.
        match fusewire::blocking(|| self.open.closes.wait(most, &mut closed)) {
            Ok(done) => done,
            // The caller is interrupted, or no other thread could serve the RELEASE.
            Err(_) => closed(),
        }
    }

    fn left_changed(&self, file: FileId) {
        let Some((survives, nodeid)) = self.survives.as_ref().zip(self.inodes.find(&file)) else { return };
        let open = self.inodes.with(nodeid, |record| Some(record.open_state_if_any()?.all())).flatten();
        for (fh, file) in open.unwrap_or_default() {
            survives.opens.changed(fh, OpenLeft::of(&*file));
        }
    }
}

impl Handler for Door {
    fn init(&self, offer: &Offer) -> Settings {
        let before = self.survives.as_ref().and_then(|survives| survives.memory.agreed_before());
        let collect = self.writeback.on();
        let (settings, agreement) = negotiate::answer(offer, &self.options, &*self.layer, (collect, before));
        if agreement.writeback {
            self.open.passthrough.refuse("writes are collected by the kernel, which excludes it");
        } else if self.writeback.on() {
            self.writeback.drop_it();
        }
        if agreement.opens_files_itself && agreement.writeback {
            self.writeback.unopened(&self.inodes);
            let descriptors = if self.inodes.by_number() { usize::MAX } else { self.open.spare() };
            self.writeback.written.hold(descriptors, nacre_sys::memory_limit::limit());
        }
        if agreement.opens_files_itself {
            self.open.passthrough.refuse("files are opened without requests, which excludes it");
        } else if !agreement.passthrough {
            let is_old = kernel_version() < (6, 9);
            let why = if is_old { "this kernel is too old (Linux 6.9)" } else { "this kernel was built without it" };
            self.open.passthrough.refuse(why);
        }
        self.kernel.agree(agreement);
        settings
    }

    fn worker_started(&self) {
        if let Some(setup) = &self.options.worker_setup {
            setup();
        }
    }

    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), fusewire::Errno> {
        let handled = match &self.survives {
            Some(survives) => self.handle_noted(survives, request, reply),
            None => self.dispatch(request, reply),
        };
        handled.map_err(fusewire::Errno::from)
    }

    fn is_brief(&self, opcode: u32) -> bool {
        use abi::opcode::{
            BATCH_FORGET, FLUSH, FORGET, GETATTR, GETXATTR, LISTXATTR, LOOKUP, OPEN, OPENDIR, RELEASE, RELEASEDIR,
            STATX,
        };
        // Files found by inode number are in a pool: its names and attributes are in memory, or read without a lock
        // held.
        self.inodes.by_number()
            && matches!(
                opcode,
                GETATTR
                    | LOOKUP
                    | GETXATTR
                    | LISTXATTR
                    | OPEN
                    | RELEASE
                    | FLUSH
                    | FORGET
                    | BATCH_FORGET
                    | STATX
                    | OPENDIR
                    | RELEASEDIR
            )
    }

    fn forget(&self, nodeid: u64, lookups: u64) {
        self.forget_lookups(nodeid, lookups);
    }

    fn undelivered(&self, request: &Header, reply: &[u8]) {
        self.take_back(request, reply);
    }

    fn destroy(&self) {
        self.kernel.disconnect();
        self.writeback.end();
        self.open.clear();
        self.inodes.clear();
    }
}
