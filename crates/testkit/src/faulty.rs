//! A layer that fails on demand: the next call, or that and all later ones, like after a power cut
//! or after its process was killed. Only calls that change something count; failing calls change
//! nothing.
//!
//! Callers: tests of unions, whose branches are such layers.

use nacre_vfs::{
    AllocateMode, AnyOpen, Attr, Caller, Created, Dev, Entry, Errno, Kind, Layer, Name, Node, OpenFile, OpenFlags,
    Opened, RenameFlags, Result, SetAttr, WriteOrigin, XattrFlags,
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

/// Time and kind of the failures.
pub struct Fault {
    left: AtomicI64,
    /// Error of failing calls.
    errno: Errno,
    /// All calls after the first failing one fail as well.
    lasting: bool,
    /// Whether the storage supports RENAME_EXCHANGE.
    exchanges: bool,
}

impl Fault {
    /// Fails with `errno`, once or, if `lasting`, from then on.
    pub fn new(errno: Errno, lasting: bool) -> Arc<Fault> {
        Arc::new(Fault { left: AtomicI64::new(i64::MAX), errno, lasting, exchanges: true })
    }

    /// Fails once with `errno`, on storage without RENAME_EXCHANGE.
    pub fn without_exchange(errno: Errno) -> Arc<Fault> {
        Arc::new(Fault { left: AtomicI64::new(i64::MAX), errno, lasting: false, exchanges: false })
    }

    /// Whether all calls after the first failing one fail as well.
    pub fn is_lasting(&self) -> bool {
        self.lasting
    }

    /// Lets this many more calls succeed.
    pub fn after(&self, calls: i64) {
        self.left.store(calls, Ordering::SeqCst);
    }

    /// Whether a call has failed.
    pub fn has_struck(&self) -> bool {
        self.left.load(Ordering::SeqCst) < 0
    }

    /// Ends all failures.
    pub fn end(&self) {
        self.left.store(i64::MAX, Ordering::SeqCst);
    }

    fn change(&self) -> Result<()> {
        let before = self.left.fetch_sub(1, Ordering::SeqCst);
        if before > 0 || before < 0 && !self.lasting { Ok(()) } else { Err(self.errno) }
    }
}

/// The failing layer.
pub struct Faulty {
    /// The layer that gets the calls.
    pub below: Arc<dyn Layer>,
    /// The failures.
    pub fault: Arc<Fault>,
}

impl Faulty {
    fn wrap(&self, file: Opened) -> Opened {
        Arc::new(FaultyFile { below: file, fault: Arc::clone(&self.fault) })
    }
}

impl Layer for Faulty {
    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        self.fault.change()?;
        self.below.setattr(caller, node, file, change)
    }
    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.fault.change()?;
        let (entry, file) = self.below.create(caller, parent, name, mode, flags)?;
        Ok((entry, self.wrap(file)))
    }
    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.fault.change()?;
        let (entry, file) = self.below.tmpfile(caller, parent, mode, flags)?;
        Ok((entry, self.wrap(file)))
    }
    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.fault.change()?;
        self.below.mkdir(caller, parent, name, mode)
    }
    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.fault.change()?;
        self.below.mknod(caller, parent, name, kind, mode, dev)
    }
    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.fault.change()?;
        self.below.symlink(caller, parent, name, target)
    }
    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.fault.change()?;
        self.below.link(caller, node, file, parent, name)
    }
    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.fault.change()?;
        self.below.unlink(caller, parent, name)
    }
    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.fault.change()?;
        self.below.rmdir(caller, parent, name)
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
        if flags.has(RenameFlags::EXCHANGE) && !self.fault.exchanges {
            return Err(Errno::EINVAL);
        }
        self.fault.change()?;
        self.below.rename(caller, parent, name, new_parent, new_name, flags)
    }
    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        Ok(self.wrap(self.below.open(caller, node, flags)?))
    }
    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.fault.change()?;
        self.below.fsyncdir(caller, node, data_only)
    }
    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.fault.change()?;
        self.below.setxattr(caller, node, name, value, flags)
    }
    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.fault.change()?;
        self.below.removexattr(caller, node, name)
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold getattr access readlink readdir statfs syncfs getxattr listxattr ioctl coherence watch capabilities describe }
}

/// A file of the layer.
struct FaultyFile {
    below: Opened,
    fault: Arc<Fault>,
}

impl OpenFile for FaultyFile {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        self.fault.change()?;
        self.below.write(data, offset, origin)
    }
    fn append(&self, data: &[u8]) -> Result<usize> {
        self.fault.change()?;
        self.below.append(data)
    }
    fn fsync(&self, data_only: bool) -> Result<()> {
        self.fault.change()?;
        self.below.fsync(data_only)
    }
    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.fault.change()?;
        self.below.allocate(mode, offset, length)
    }
    fn copy_to(&self, _: u64, _: &dyn OpenFile, _: u64, _: u64, _: u32) -> Result<u64> {
        // Copies are made by `write`, which counts.
        Err(Errno::EXDEV)
    }
    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn writeback_lease(&self) -> Option<&dyn nacre_vfs::WritebackLease> {
        None
    }

    nacre_vfs::forward_file! { inner read flush seek test_lock set_lock flock ioctl is_on_inner_mount }
}
