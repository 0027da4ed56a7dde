//! The door itself: one request in, one call of the [`Layer`] down, one reply out.
//!
//! Called by fusewire's threads, many at a time. Each family of operations is a file under `ops/`;
//! here is only what they share, and which request belongs to which. Invariants:
//! * a look-up is counted in the inode table exactly when its reply names a node;
//! * nobody holds a lock of a table while a layer is called;
//! * a request that our own threads make on our own mount is refused at once: a source that
//!   contains its own mount point must not hang.

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

/// How long attributes are kept that the kernel asked for to seek in a file that may be stored to.
const SOUGHT: Duration = Duration::from_millis(10);
/// What the kernel keeps for at least this long, it is told of when it changes.
pub(crate) const LASTING: Duration = Duration::from_secs(60);

/// One mount's worth of state between the kernel and a layer.
pub(crate) struct Door {
    /// What is served.
    pub layer: Arc<dyn Layer>,
    /// What was asked for.
    pub options: FuseOptions,
    /// The inode table.
    pub inodes: Arc<Inodes>,
    /// What is open.
    pub open: OpenTables,
    /// Writes that the kernel collects.
    pub writeback: Arc<Writeback>,
    /// Threads of ours that use the mount.
    pub self_io: Arc<SelfIo>,
    /// Where whoever asks waits while files become others.
    pub gate: Gate,
    /// What makes those of before bad, while they do.
    pub replacer: Mutex<Option<std::io::Result<Replacer>>>,
    /// The kernel's side.
    pub kernel: KernelSide,
    /// The way to the thread that takes the kernel's answers back.
    pub invalidations: InvalidationFeed,
    /// What is left to a process after this one, where the mount outlives its process.
    pub survives: Option<Survives>,
}

impl Door {
    /// A door in front of `layer`; `changes` leads to the invalidation thread.
    ///
    /// # Errors
    /// What the layer's root says.
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

    /// How long the kernel may keep what.
    pub fn times(&self) -> CacheTimes {
        self.kernel.times()
    }

    /// What the kernel accepted; nothing before INIT.
    pub fn agreement(&self) -> Agreement {
        self.kernel.agreement()
    }

    /// Sends a change to the invalidation thread.
    pub fn change(&self, change: Invalidation) {
        self.invalidations.send(change);
    }

    /// Who may pass a directory has changed. Where the kernel checks that by itself, it knows;
    /// where the layer does, it does so when a name is looked up, so all names are asked for anew
    /// from now on.
    pub fn permissions_changed(&self) {
        if self.options.default_permissions {
            return;
        }
        if !self.kernel.tell(|notifier| !self.kernel.carries_mounts() && notifier.inc_epoch().is_ok()) {
            self.change(Invalidation::Everything);
        }
    }

    /// Whether a name leads somewhere. What may be mounted there stays only if the kernel asks for
    /// the name before it gives it up.
    pub fn leads_somewhere(&self, parent: u64, name: &[u8]) -> bool {
        let (Some(directory), Ok(name)) = (self.inodes.node(parent), Name::new(name)) else { return false };
        self.layer.lookup(&Caller::ROOT, &directory, name).is_ok()
    }

    /// The layer's node of a node id.
    pub fn node(&self, nodeid: u64) -> Outcome<Node> {
        self.inodes.node(nodeid).ok_or(Failure::from(Errno::ESTALE))
    }

    /// Where files are below the root, as far as the layer knows a name of them.
    pub fn names(&self, files: impl IntoIterator<Item = u64>) -> Names {
        let named = |nodeid: u64| Some((nodeid, self.layer.path(&self.inodes.node(nodeid)?)?));
        files.into_iter().filter_map(named).collect()
    }

    /// The generation of a file's number, as the kernel is told of it.
    pub fn generation(&self, attr: &nacre_vfs::Attr) -> u32 {
        let numbered = if self.inodes.by_number() { self.layer.capabilities().numbered } else { None };
        numbered.map_or(0, |numbered| numbered.generation(attr))
    }

    /// How the kernel's handles name the file of a node id, which has these attributes.
    pub fn key(&self, nodeid: u64, attr: &nacre_vfs::Attr) -> InodeKey {
        InodeKey { nodeid, generation: self.generation(attr) }
    }

    /// The same, asked of the layer; none where the file is gone.
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

    /// How long names that there are in a directory may be kept, and that there is none. Not at all
    /// where another spelling leads to the same file: what the kernel does to one of them leaves
    /// the others as it has them.
    pub fn name_times(&self, directory: &Node, coherence: Coherence) -> (Duration, Duration) {
        if self.inodes.by_number()
            && self.layer.capabilities().numbered.is_some_and(|numbered| numbered.folds(directory))
        {
            return (Duration::ZERO, Duration::ZERO);
        }
        (self.times().names(coherence), self.times().missing(coherence))
    }

    /// How long these attributes may be kept. Set-id bits end with a write that the kernel passes
    /// through, which leaves them in its own copy; running the file must not meet them there, so
    /// they are asked for each time.
    ///
    /// Where writes are collected, also not those of a file whose writes are to be announced, and
    /// while the kernel may have other times.
    pub fn attr_time(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, Some(node), Duration::ZERO)
    }

    /// The same in the midst of a listing, where no other call of the layer is made: that a file
    /// may be stored to is taken for granted.
    pub fn listed_attr_time(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, None, Duration::ZERO)
    }

    /// The same where the kernel asks by an open file. Then it wants the length, for lseek(2),
    /// which databases call all the time; stores to a mapping leave that as it is.
    pub fn attr_time_by_file(&self, nodeid: u64, node: &Node, attr: &nacre_vfs::Attr) -> Duration {
        self.attr_time_where(nodeid, node, attr, Some(node), SOUGHT)
    }

    /// `asked`: how the layer is asked whether the file may be stored to ([`Door::is_stored_to`]);
    /// `if_stored`: the time if so.
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
        if attr.protection != Protection::None && attr.kind == Kind::File && self.writeback.on() {
            // The kernel asks before it takes a write, which is refused then.
            return Duration::ZERO;
        }
        let time = self.times().attributes(self.layer.coherence(Scope::Attributes(node, attr)));
        if time > if_stored && attr.kind == Kind::File && self.is_stored_to(nodeid, asked) { if_stored } else { time }
    }

    /// The attributes as the kernel gets them. A file to which it may hold writes has a sector at least:
    /// programs take a file without any for a hole (`tar -S`), and the kernel keeps the number until
    /// the file is closed, whatever is written meanwhile. Where it opens files without a request, that may be any.
    pub fn with_sector(&self, nodeid: u64, attr: &nacre_vfs::Attr) -> nacre_vfs::Attr {
        let is_held = if self.writeback.on() {
            attr.kind == Kind::File && (attr.size > 0 || self.writes_unopened() || self.writeback.caches_writes(nodeid))
        } else {
            self.blocks_may_come(nodeid, attr)
        };
        if is_held { nacre_vfs::Attr { blocks: attr.blocks.max(1), ..*attr } } else { *attr }
    }

    /// Whether writes to a file are to be announced.
    fn announces(&self, nodeid: u64) -> bool {
        if self.writes_unopened() { !self.unannounced() } else { self.writeback.announces(nodeid) }
    }

    /// Whether an inode's attributes may be kept, and taken back ([`KernelSide::root_is_taken`]).
    pub fn root_is_taken(&self, nodeid: u64) -> bool {
        nodeid != ROOT || !self.options.default_permissions || self.kernel.root_is_taken()
    }

    /// Counts a look-up of a file found or made at a place, and answers the reply for it.
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

    /// The same for an answer that the kernel takes for true whatever else it was told meanwhile.
    pub fn made(&self, entry: &Entry, found: Found<'_>, names: Duration) -> abi::EntryOut {
        let mut out = self.found(entry, found, names);
        if entry.attr.kind == Kind::File && self.writeback.on() {
            (out.attr_valid, out.attr_valid_nsec) = (0, 0);
            self.inodes.keeps(out.nodeid, false);
        }
        out
    }

    /// A file is read or written to. Where the kernel collects writes, it drops the number of blocks
    /// when the file is closed, of which nothing is heard here (fs/fuse/file.c, `fuse_flush()`).
    pub fn used(&self, nodeid: u64) {
        if self.writeback.on() {
            self.inodes.keeps(nodeid, false);
        }
    }

    /// Takes look-ups back.
    pub fn forget_lookups(&self, nodeid: u64, lookups: u64) {
        let uses = self.writeback.written.uses(nodeid);
        let removed = self.inodes.forget(nodeid, lookups);
        self.forgotten(nodeid, uses, removed);
    }

    /// The kernel may not know a file any more, which had been written to so often before; what its record
    /// leaves.
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
        // A release undoes what was granted; it must never be refused. All else from our own
        // threads would wait for ourselves.
        let releases = matches!(request.op, Op::Release { .. } | Op::Releasedir { .. } | Op::Destroy);
        if !releases && header.pid != 0 && self.kernel.is_own_thread(header.pid) {
            return Err(Errno::EDEADLK.into());
        }
        if self.gate.is_closed() && !releases {
            self.wait_at_gate(request)?;
        }
        self.operate(request, reply)
    }

    /// Answers a request of a thread of ours that uses the mount (`self_io.rs`): what belongs to its
    /// role, from what the door knows; all else as for anybody.
    fn answer_own(&self, role: Role, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome {
        match (role, &request.op) {
            (Role::Replay, _) => self.replay_request(request, reply),
            (Role::Replaced, _) if self.answer_replacer(request, reply)? => Ok(()),
            // Who changes the mount's flags has this role as well, and where the kernel holds nothing
            // back he asks like anybody.
            (Role::Times, Op::Setattr(told)) if self.writeback.on() => {
                self.refresh_setattr(&request.header, told, reply)
            }
            (Role::Flush, _) if flush::answer(request, reply)? => Ok(()),
            _ => self.operate(request, reply),
        }
    }

    /// Which request belongs to which operation.
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
            // Answered once each: the kernel remembers, and does without from then on.
            Op::Bmap { .. } | Op::Poll { .. } | Op::Unknown(_) => Err(Errno::ENOSYS.into()),
        }
    }
}

/// Who asks. On an idmapped mount only creations carry ids; the kernel has checked all else. A caller outside of
/// this process's pid namespace, who has no number here, is not [`Caller::ROOT`].
pub(crate) fn caller(header: &Header) -> Caller {
    let known = |id: u32| if id == abi::INVALID_UIDGID { 0 } else { id };
    let is_unknown = header.uid == abi::INVALID_UIDGID && header.pid == 0;
    let pid = if is_unknown { u32::MAX } else { header.pid };
    Caller { uid: known(header.uid), gid: known(header.gid), pid, umask: 0 }
}

/// A name from the kernel.
pub(crate) fn name(bytes: &[u8]) -> Outcome<Name<'_>> {
    Ok(Name::new(bytes)?)
}

impl OpenFileHost for Door {
    fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        let mut closed = || {
            // Each time: what is closed meanwhile may be kept as well.
            for nodeid in files.iter().filter_map(|id| self.inodes.find(id)) {
                self.open.passthrough.drop_kept(nodeid, &self.inodes);
                self.open.implicit.forget(nodeid);
            }
            closed()
        };
        // The close is a request like any other, and may be waiting for this very thread.
        match fusewire::blocking(|| self.open.closes.wait(most, &mut closed)) {
            Ok(done) => done,
            // He is interrupted, or there is nobody else to serve the close.
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
        // What is found by its number is a pool's: its names and attributes are in memory, or read
        // with no lock held.
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
