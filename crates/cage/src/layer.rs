//! The cage as a layer: operations that change stored data, and their bookings.

use super::{
    Cage, CageShared,
    books::Short,
    file::{CageFile, Lease, judge_ioctl},
    inodes::{Inode, InodeState},
    ledger::Owner,
    names::{Changing, Reserve},
};
use crate::settings::{WhenFull, Writes};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Capabilities, Coherence, Created, Description, Dev, DirSink, Entry, Errno, FileId,
    FoundOpen, Invalidation, Ioctl, Kind, Layer, LeftOpen, Name, Node, OpenFile, OpenFlags, Opened, RenameFlags,
    Result, Scope, SetAttr, StatFs, WritebackHost, XattrFlags,
};
use rustix::fs::OFlags;
use std::sync::{Arc, mpsc::Sender};

/// Maximum number of attempts of a creation that finds the name both present and absent.
const TRIES: usize = 8;

impl Cage {
    /// Opens an existing file.
    fn open_existing(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let shared = &self.shared;
        let inode = shared.inodes.get(shared.below.id(node)?);
        // Readable, since write-back of parts of pages reads the remainder; where that is refused,
        // the file is opened as requested, without write-back.
        if shared.collects(flags) {
            match self.open_with(caller, node, &inode, flags, true) {
                Err(error) => tracing::debug!(%error, "a file cannot be opened for collecting writes to it"),
                opened => return opened,
            }
        }
        self.open_with(caller, node, &inode, flags, false)
    }

    /// Opens a file; `collected` allows write-back.
    fn open_with(
        &self,
        caller: &Caller,
        node: &Node,
        inode: &Arc<Inode>,
        flags: OpenFlags,
        collected: bool,
    ) -> Result<Opened> {
        let shared = &self.shared;
        let lower = if collected { both_ways(flags) } else { flags };
        let lease = Lease::new(shared, inode, flags, collected);
        let below = if flags.truncates() {
            self.open_truncated(caller, node, inode, lower)?
        } else {
            let below = shared.below.open(caller, node, lower)?;
            let mut state = inode.lock();
            // Each append refreshes by itself, and so does the start of write-back.
            if flags.writes() && !(flags.appends() && state.loaded) {
                let attr = shared.below.getattr(caller, node, Some(&*below))?;
                shared.learn(inode, &mut state, node, &attr);
            }
            drop(state);
            below
        };
        Ok(Arc::new(CageFile::new(below, node.clone(), lease)))
    }

    /// Opens and empties a file. The lease of a program outside is waited for without the file's lock, which others need:
    /// as long as the file is open, there is no new one.
    fn open_truncated(&self, caller: &Caller, node: &Node, inode: &Inode, lower: OpenFlags) -> Result<Opened> {
        let shared = &self.shared;
        let mut unleased = None;
        loop {
            let mut state = inode.lock();
            if !state.loaded {
                let attr = shared.below.getattr(caller, node, None)?;
                shared.load(&mut state, node, &attr);
            }
            shared.touch(inode, &mut state);
            let waits = if unleased.is_some() { 0 } else { OpenFlags::NONBLOCK };
            match shared.below.open(caller, node, OpenFlags(lower.raw() | waits)) {
                Ok(below) => {
                    cut(shared, inode, &mut state, node, &*below);
                    return Ok(below);
                }
                Err(Errno::EAGAIN) if unleased.is_none() && lower.waits() => {}
                Err(error) => return Err(error),
            }
            drop(state);
            unleased = Some(shared.below.open(caller, node, writing(lower))?);
        }
    }

    /// Creates a file that must not exist yet.
    fn create_new(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<Created> {
        let shared = &self.shared;
        let _naming = shared.locks.naming.read();
        let group = shared.group(parent);
        let _parent = Changing::begin(shared, parent, true)?;
        let reserve = Reserve::new(shared, Owner { uid: caller.uid, group }, 0, 1)?;
        let fresh = OpenFlags((flags.raw() | OpenFlags::EXCL) & !OpenFlags::TRUNC);
        let writeback_allowed = shared.collects(flags);
        let _name = shared.lock_name(parent, name)?;
        let (entry, below) = shared.below.create(
            caller,
            parent,
            name,
            mode,
            if writeback_allowed { both_ways(fresh) } else { fresh },
        )?;
        let inode = shared.born(&entry, group, true, reserve);
        let lease = Lease::new(shared, &inode, flags, writeback_allowed);
        let file = Arc::new(CageFile::new(below, entry.node.clone(), lease));
        Ok((entry, file))
    }
}

impl CageShared {
    /// Whether a file opened with these flags can use write-back: for appends only, where opens are
    /// requests.
    fn collects(&self, flags: OpenFlags) -> bool {
        let unasked = || self.doors.writeback.get().is_some_and(|writeback| writeback.opens_unasked());
        self.writes_back() && (appends_only(flags) || flags.writes() && unasked())
    }
}

/// Whether all writes are appends, by a writer who does not wait for the storage.
fn appends_only(flags: OpenFlags) -> bool {
    let waits = OFlags::SYNC | OFlags::DSYNC | OFlags::DIRECT;
    flags.writes() && !flags.reads() && flags.appends() && !OFlags::from_bits_retain(flags.raw()).intersects(waits)
}

/// Returns open flags for reading and writing at any offset, otherwise unchanged.
fn both_ways(flags: OpenFlags) -> OpenFlags {
    OpenFlags((flags.raw() & !(3 | OpenFlags::APPEND)) | OpenFlags::READ_WRITE.raw())
}

/// The flags to open a file for writing that is to be truncated later.
fn writing(flags: OpenFlags) -> OpenFlags {
    if flags.writes() {
        OpenFlags(flags.raw() & !OpenFlags::TRUNC)
    } else {
        OpenFlags((flags.raw() & !(3 | OpenFlags::TRUNC)) | OpenFlags::READ_WRITE.raw())
    }
}

/// Books a file that was truncated to nothing.
fn cut(shared: &CageShared, inode: &Inode, state: &mut InodeState, node: &Node, file: &dyn OpenFile) {
    state.unsure();
    state.kept = false;
    if let Some(announced) = &mut state.announced {
        announced.end = 0;
    }
    shared.refresh(inode, state, node, Some(file));
}

impl Layer for Cage {
    fn root(&self) -> Result<Entry> {
        self.shared.below.root()
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.below.lookup(caller, parent, name)
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        self.shared.below.id(node)
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        self.shared.below.path(node)
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        self.shared.below.adopt(known, fresh);
    }

    fn hold(&self, directory: &Node, gone: bool) {
        self.shared.below.hold(directory, gone);
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        self.shared.below.getattr(caller, node, file)
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.shared.below.access(caller, node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        self.shared.attend();
        let shared = &self.shared;
        shared.background.own_id(|| shared.below.id(node));
        if change.size.is_none() && change.uid.is_none() {
            return shared.below.setattr(caller, node, file, change);
        }
        let inode = shared.inodes.get(shared.below.id(node)?);
        let mut round = 0;
        // The lease of a program outside is waited for as in `open_truncated`.
        let mut unleased = None;
        loop {
            let never_waits = change.size.is_some() && unleased.is_none();
            let mut state = inode.lock();
            if !state.loaded {
                let attr = shared.below.getattr(caller, node, file)?;
                shared.load(&mut state, node, &attr);
            }
            let limited = change.uid.is_some_and(|uid| shared.ledger.limits().users.contains_key(&uid));
            if limited && change.uid != Some(state.owner.uid) && shared.collects_appends(&state) {
                return Err(Errno::EBUSY);
            }
            let change = SetAttr { never_waits, ..*change };
            match change_under(shared, caller, (node, &inode, &mut state), file, &change) {
                Ok(Err(Errno::EAGAIN)) if never_waits => {
                    drop(state);
                    unleased = Some(shared.below.open(caller, node, OpenFlags::WRITE)?);
                    continue;
                }
                Ok(attr) => return attr,
                Err((short, bytes)) => {
                    let owner = Owner { uid: change.uid.unwrap_or(state.owner.uid), ..state.owner };
                    let holds = state.writeback > 0;
                    drop(state);
                    shared.relieve_holding(holds, short, owner, bytes, round)?;
                }
            }
            round += 1;
        }
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.shared.below.readlink(caller, node)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.shared.attend();
        self.shared.background.own_name(name);
        for _ in 0..TRIES {
            let refused = match self.create_new(caller, parent, name, mode, flags) {
                // Opening an existing file needs no room.
                Err(error @ (Errno::EEXIST | Errno::ENOSPC | Errno::EDQUOT)) if !flags.exclusive() => error,
                other => return other,
            };
            match self.shared.below.lookup(caller, parent, name) {
                Ok(entry) if entry.attr.kind == Kind::File => {
                    let file = self.open_existing(caller, &entry.node, flags)?;
                    let attr =
                        if flags.truncates() { self.getattr(caller, &entry.node, Some(&*file))? } else { entry.attr };
                    return Ok((Entry { attr, ..entry }, file));
                }
                Ok(entry) if entry.attr.kind == Kind::Directory => return Err(Errno::EISDIR),
                // The kernel looks the name up again and acts by its kind.
                Ok(_) => return Err(Errno::ESTALE),
                Err(Errno::ENOENT) if refused == Errno::EEXIST => {}
                Err(Errno::ENOENT) => return Err(refused),
                Err(error) => return Err(error),
            }
        }
        Err(Errno::ESTALE)
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.shared.attend();
        let shared = &self.shared;
        let _naming = shared.locks.naming.read();
        let group = shared.group(parent);
        let reserve = Reserve::new(shared, Owner { uid: caller.uid, group }, 0, 1)?;
        let (entry, below) = shared.below.tmpfile(caller, parent, mode, flags)?;
        let inode = shared.inodes.get(entry.attr.id);
        let lease = Lease::new(shared, &inode, flags, false);
        shared.born(&entry, group, false, reserve);
        let file = Arc::new(CageFile::new(below, entry.node.clone(), lease));
        Ok((entry, file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.shared.attend();
        self.shared.background.own_name(name);
        let bytes = if self.shared.directories_cost { self.shared.rule.unit } else { 0 };
        let entry =
            self.shared.make(caller, (parent, name), bytes, || self.shared.below.mkdir(caller, parent, name, mode))?;
        self.shared.new_directory(&entry);
        Ok(entry)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.shared.attend();
        self.shared.background.own_name(name);
        self.shared.make(caller, (parent, name), 0, || self.shared.below.mknod(caller, parent, name, kind, mode, dev))
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.shared.attend();
        self.shared.background.own_name(name);
        // Some file systems keep short ones in the inode, some never do; the cost is corrected at
        // once.
        let bytes = self.shared.rule.whole(target.len() as u64);
        self.shared.make(caller, (parent, name), bytes, || self.shared.below.symlink(caller, parent, name, target))
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.attend();
        self.shared.add_link(caller, node, file, parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.attend();
        self.shared.remove(caller, parent, name, false)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.attend();
        self.shared.remove(caller, parent, name, true)
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
        self.shared.attend();
        self.shared.move_name(caller, (parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        if flags.writes() || flags.truncates() {
            self.shared.attend();
        }
        self.open_existing(caller, node, flags)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        self.shared.below.readdir(caller, node, from, attributes, sink)
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.shared.below.fsyncdir(caller, node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        self.shared.attend();
        let shared = &self.shared;
        shared.doors.await_forgotten(shared.clock.now(), true);
        let mut figures = shared.below.statfs(caller, node)?;
        let totals = shared.ledger.totals();
        let group = shared.group(node);
        let of_group = group.and_then(|group| {
            Some((*totals.limits.dirs.get(group)?, totals.sums.dirs.get(&group).map_or(0, |sum| sum.bytes)))
        });
        let whole = totals.limits.bytes.map(|limit| (limit, totals.sums.whole.bytes));
        let fragment = u64::from(figures.fragment.max(1));
        for (limit, used) in whole.into_iter().chain(of_group) {
            let free = limit.saturating_sub(used) / fragment;
            figures.blocks = if whole.is_some_and(|whole| whole.0 == limit) {
                limit / fragment
            } else {
                figures.blocks.min(limit / fragment)
            };
            figures.free = figures.free.min(free);
            figures.available = figures.available.min(free);
        }
        if let Some(limit) = totals.limits.inodes {
            let free = limit.saturating_sub(totals.sums.whole.inodes);
            // File systems that allocate inodes on demand report 0 files.
            figures.files_free = if figures.files == 0 { free } else { figures.files_free.min(free) };
            figures.files = limit;
        } else if figures.files != 0 {
            // statvfs(3) derives used inodes from total and free ones: the total is chosen so that
            // the cage's usage results.
            figures.files = figures.files_free.saturating_add(totals.sums.whole.inodes);
        }
        Ok(figures)
    }

    fn syncfs(&self) -> Result<()> {
        self.shared.below.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.shared.below.getxattr(caller, node, name, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.shared.below.listxattr(caller, node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.shared.attend();
        let shared = &self.shared;
        shared.background.own_id(|| shared.below.id(node));
        let work = || shared.below.setxattr(caller, node, name, value, flags);
        self.with_attributes(caller, node, shared.rule.whole(value.len() as u64).saturating_add(shared.rule.unit), work)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.shared.attend();
        self.shared.background.own_id(|| self.shared.below.id(node));
        self.with_attributes(caller, node, 0, || self.shared.below.removexattr(caller, node, name))
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        judge_ioctl(&request)?;
        self.shared.below.ioctl(caller, node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        self.shared.below.coherence(scope)
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        super::outside::watch(&self.shared, channel);
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        self.shared.rest(known)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            numbered: None,
            writeback: Some(self),
            open_files: Some(self),
            needs_opens: self.needs_opens().or(self.shared.below.capabilities().needs_opens),
            left_open: self.shared.below.capabilities().left_open.map(|_| self as &dyn LeftOpen),
            ..self.shared.below.capabilities()
        }
    }

    fn describe(&self) -> Description {
        let limits = self.shared.ledger.limits();
        let size = |bytes: u64| nacre_layers::size::Size::new(bytes).to_string();
        let mut text = Description::new("cage");
        if let Some(bytes) = limits.bytes {
            text = text.with("size", size(bytes));
        }
        if let Some(inodes) = limits.inodes {
            text = text.with("inodes", inodes.to_string());
        }
        if let Some(soft) = limits.soft {
            text = text.with("soft", size(soft));
        }
        text = text.with("writes", self.writes()).with("when-full", self.shared.policy.when_full.word());
        for (uid, bytes) in &limits.users {
            text = text.with("limit", format!("user:{uid}={}", size(*bytes)));
        }
        for (path, bytes) in self.shared.dirs.paths.iter().zip(&limits.dirs) {
            text = text.with("limit", format!("dir:{}={}", path.escape_ascii(), size(*bytes)));
        }
        text.over(self.shared.below.describe())
    }
}

/// Takes over open files of an earlier process; not where write-back is in use, as the reservations
/// of that process are unknown.
impl LeftOpen for Cage {
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Opened)> {
        let shared = &self.shared;
        let below = shared.below.capabilities().left_open.ok_or(Errno::ESTALE)?;
        let (node, file) = below.take_up(node, left, flags)?;
        let attr = shared.below.getattr(&Caller::ROOT, &node, Some(&*file))?;
        let inode = shared.inodes.get(attr.id);
        let lease = Lease::new(shared, &inode, flags, false);
        let mut state = inode.lock();
        match attr.nlink {
            0 if !state.loaded => shared.take_up_nameless(&inode, &mut state, &node, &attr),
            _ => shared.learn(&inode, &mut state, &node, &attr),
        }
        drop(state);
        Ok((node.clone(), Arc::new(CageFile::new(file, node, lease))))
    }
}

impl nacre_vfs::OpenFileClient for Cage {
    fn attach(&self, door: std::sync::Weak<dyn nacre_vfs::OpenFileHost>) {
        if let Some(below) = self.shared.below.capabilities().open_files {
            below.attach(std::sync::Weak::clone(&door));
        }
        self.shared.doors.closes.attach(door);
    }
}

impl nacre_vfs::WritebackLayer for Cage {
    fn accept(&self, door: &Arc<dyn WritebackHost>) -> bool {
        let wanted = match self.shared.policy.writes {
            Writes::Through => false,
            Writes::Collected => true,
            Writes::Auto => self.is_roomy(&**door),
        };
        wanted && super::background::begin_writeback(&self.shared, door)
    }

    fn unannounced(&self) -> bool {
        self.shared.unannounced()
    }
}

impl Cage {
    /// Whether the front end's dirty limit is a small part of the cage's limit.
    fn is_roomy(&self, door: &dyn WritebackHost) -> bool {
        /// Minimum number of files with write-back at once: for fewer, it is not worth its cost to
        /// the mount's other writers.
        const FILES: usize = 16;
        let limit = self.shared.ledger.limits().bytes.unwrap_or(u64::MAX);
        limit >= door.dirty_limit(FILES).saturating_mul(3)
    }

    /// Reason why each open has to be a request, if there is one.
    fn needs_opens(&self) -> Option<&'static str> {
        let shared = &self.shared;
        let writeback = shared.doors.writeback.get()?;
        if shared.policy.when_full != WhenFull::Deny {
            Some("open files stay when room is made")
        } else if shared.ledger.has_limits_within() {
            Some("users or directories have limits of their own")
        } else if !self.is_roomy(&*writeback.door) {
            Some("the kernel may hold back too much for this limit")
        } else {
            None
        }
    }

    /// Changes extended attributes, which may take a block of a directory or symbolic link. Regular
    /// files are charged for their content alone.
    fn with_attributes(
        &self,
        caller: &Caller,
        node: &Node,
        bytes: u64,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let shared = &self.shared;
        if !shared.directories_cost {
            return work();
        }
        let attr = shared.below.getattr(caller, node, None)?;
        if attr.kind == Kind::File || attr.id == shared.root {
            return work();
        }
        let inode = shared.inodes.get(attr.id);
        let owner = Owner { uid: attr.uid, group: shared.group_of(node, attr.kind) };
        let _naming = shared.locks.naming.read();
        let _room = if bytes > 0 { Some(Reserve::new(shared, owner, bytes, 0)?) } else { None };
        let mut state = inode.lock();
        if !state.loaded {
            let attr = shared.below.getattr(caller, node, None)?;
            shared.load(&mut state, node, &attr);
        }
        let result = work();
        shared.refresh(&inode, &mut state, node, None);
        result
    }
}

/// Changes owner or length under the file's lock; returns the lack of room where the change does
/// not fit.
fn change_under(
    shared: &CageShared,
    caller: &Caller,
    (node, inode, state): (&Node, &Inode, &mut InodeState),
    file: AnyOpen<'_>,
    change: &SetAttr,
) -> Result<Result<Attr>, (Short, u64)> {
    let before = state.owner;
    if let Some(size) = change.size
        && state.kind == Some(Kind::File)
    {
        // A hole costs nothing, unless cost follows the length.
        let lagging = shared.rule.storage == super::Storage::Lagging;
        shared.before_jump(inode, state, node, file, size);
        let new = match () {
            () if lagging => shared.rule.whole(size).saturating_sub(state.cost),
            () if size > state.size => shared.gap(state, size),
            () => shared.tail(state, size),
        };
        match shared.book_new(inode, state, new, super::books::Source::Call) {
            // Truncation helps a full cage: it is not refused for a block of zeros.
            Err(_) if size <= state.size => {}
            booked => booked.map_err(|short| (short, new))?,
        }
    }
    if let Some(uid) = change.uid {
        shared
            .try_give(inode, state, Owner { uid, ..state.owner })
            .map_err(|full| (Short::Full(full), state.booked()))?;
    }
    {
        let _changing = shared.locks.changing.read();
        shared.touch(inode, state);
    }
    let result = shared.below.setattr(caller, node, file, change);
    // With a lease, the size is as it was.
    let is_leased = change.never_waits && matches!(result, Err(Errno::EAGAIN));
    if let Some(size) = change.size.filter(|_| !is_leased) {
        if size < state.size {
            state.solid.end = state.solid.end.min(shared.rule.whole(size)).max(state.solid.start);
        }
        if shared.rule.storage != super::Storage::Lagging {
            state.kept = false;
        }
        state.forget_announced_blocks();
        if let Some(announced) = &mut state.announced {
            announced.end = size;
        }
    }
    match &result {
        Ok(attr) => {
            // Changing a file's length frees the blocks beyond its end, unless the new attributes
            // show that they are kept.
            if change.size.is_some() {
                state.kept = shared.rule.seems_kept(attr);
            }
            shared.learn(inode, state, node, attr);
            shared.settle_account(inode, state);
        }
        Err(_) => {
            shared.give(inode, state, before);
            shared.refresh(inode, state, node, file);
        }
    }
    Ok(result)
}
