//! Calls into the layer below that take long: what others, and a recount that begins meanwhile, find. Files for which
//! the storage allocates whole extents.

use super::{Cage, CageOptions, Storage, inodes::Inode, ledger::Limits};
use nacre_layers::{context::Context, mem::Mem};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Created, Errno, Ioctl, Kind, Layer, Name, Node, OpenFile, OpenFlags, Opened, RenameFlags,
    Result, SetAttr, WriteOrigin,
};
use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

/// Storage below a cage. During each write a recount begins.
struct Below {
    below: Mem,
    cage: OnceLock<Weak<Cage>>,
    /// A program outside has a lease on each file.
    is_leased: AtomicBool,
    /// A lease was waited for under the file's lock.
    waited_locked: AtomicBool,
    /// Files have a size of extents, from their directory.
    has_extent_size: AtomicBool,
}

/// The size of extents.
const EXTENT: u64 = 1 << 20;

struct BelowFile {
    below: Opened,
    cage: Weak<Cage>,
    has_extent_size: bool,
}

impl Below {
    /// Waits for the lease of a program outside, which is released then.
    fn break_lease(&self, node: &Node, never_waits: bool) -> Result<()> {
        if !self.is_leased.load(SeqCst) {
            return Ok(());
        }
        if never_waits {
            return Err(Errno::EAGAIN);
        }
        let cage = self.cage().upgrade().unwrap();
        self.waited_locked.store(inode(&cage, node).is_locked(), SeqCst);
        self.is_leased.store(false, SeqCst);
        Ok(())
    }

    fn cage(&self) -> Weak<Cage> {
        self.cage.get().cloned().unwrap_or_default()
    }

    fn wrap(&self, file: Opened) -> Opened {
        let has_extent_size = self.has_extent_size.load(SeqCst);
        Arc::new(BelowFile { below: file, cage: self.cage(), has_extent_size })
    }
}

impl Layer for Below {
    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.below.create(caller, parent, name, mode, flags).map(|(entry, file)| (entry, self.wrap(file)))
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        self.break_lease(node, !flags.waits())?;
        self.below.open(caller, node, flags).map(|file| self.wrap(file))
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        let attr = self.below.getattr(caller, node, file)?;
        let is_extended = attr.kind == Kind::File && self.has_extent_size.load(SeqCst);
        Ok(if is_extended { Attr { blocks: (attr.blocks * 512).next_multiple_of(EXTENT) / 512, ..attr } } else { attr })
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        if change.size.is_some() && file.is_none() {
            self.break_lease(node, change.never_waits)?;
        }
        self.below.setattr(caller, node, file, change)
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold tmpfile access readlink mkdir mknod symlink link unlink rmdir rename readdir fsyncdir statfs syncfs getxattr listxattr setxattr removexattr ioctl coherence watch describe capabilities }
}

impl OpenFile for BelowFile {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        let written = self.below.write(data, offset, origin);
        if let Some(cage) = self.cage.upgrade() {
            cage.shared.background.begin_count();
        }
        written
    }
    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        if request.command != Ioctl::GET_EXTENDED || !self.has_extent_size {
            return self.below.ioctl(request, output);
        }
        // `FS_XFLAG_EXTSIZE`.
        output[..4].copy_from_slice(&0x800_u32.to_ne_bytes());
        Ok((0, output.len()))
    }
    fn backing(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    nacre_vfs::forward_file! { inner read append flush fsync allocate seek copy_to test_lock set_lock flock is_on_inner_mount writeback_lease }
}

fn inode(cage: &Cage, node: &Node) -> Arc<Inode> {
    cage.shared.inodes.get(cage.id(node).unwrap())
}

fn caged(storage: Storage) -> (Arc<Below>, Arc<Cage>) {
    let below = Arc::new(Below {
        below: Mem::new(),
        cage: OnceLock::new(),
        is_leased: AtomicBool::new(false),
        waited_locked: AtomicBool::new(false),
        has_extent_size: AtomicBool::new(false),
    });
    let options = CageOptions { storage, ..CageOptions::new(Limits::default()) };
    let cage = Cage::new(Arc::clone(&below) as Arc<dyn Layer>, options, &Context::system().unwrap()).unwrap();
    // One at the start would begin in between.
    while cage.report().recount.running || cage.report().recount.due {
        std::thread::yield_now();
    }
    below.cage.set(Arc::downgrade(&cage)).unwrap();
    (below, cage)
}

fn create(cage: &Cage) -> (Node, Opened) {
    let root = cage.root().unwrap().node;
    let name = Name::new(b"file").unwrap();
    let (entry, file) = cage.create(&Caller::ROOT, &root, name, 0o600, OpenFlags::READ_WRITE).unwrap();
    (entry.node, file)
}

#[test]
fn a_lease_is_waited_for_without_the_lock_of_the_file() {
    let (below, cage) = caged(Storage::Lagging);
    let (node, file) = create(&cage);
    file.write(&[1; 4096], 0, WriteOrigin::Caller).unwrap();
    let truncating = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNC);
    // A caller that does not want to wait.
    below.is_leased.store(true, SeqCst);
    let refused = cage.open(&Caller::ROOT, &node, OpenFlags(truncating.0 | OpenFlags::NONBLOCK));
    assert_eq!(refused.err(), Some(Errno::EAGAIN));
    let opened = cage.open(&Caller::ROOT, &node, truncating).unwrap();
    assert!(!below.is_leased.load(SeqCst) && !below.waited_locked.load(SeqCst));
    assert_eq!(cage.getattr(&Caller::ROOT, &node, Some(&*opened)).unwrap().size, 0);
    assert_eq!(cage.report().used, 0);
}

#[test]
fn a_change_of_the_length_waits_for_a_lease_without_the_lock_of_the_file() {
    let (below, cage) = caged(Storage::Lagging);
    let (node, file) = create(&cage);
    file.write(&[1; 8192], 0, WriteOrigin::Caller).unwrap();
    below.is_leased.store(true, SeqCst);
    let size = SetAttr { size: Some(4096), ..SetAttr::default() };
    assert_eq!(cage.setattr(&Caller::ROOT, &node, None, &size).unwrap().size, 4096);
    assert!(!below.is_leased.load(SeqCst) && !below.waited_locked.load(SeqCst));
    assert_eq!(cage.report().used, 4096);
}

#[test]
fn a_question_about_the_storage_waits_for_no_lease() {
    let (below, cage) = caged(Storage::Ahead);
    let (node, file) = create(&cage);
    let size = SetAttr { size: Some(100 * EXTENT), ..SetAttr::default() };
    cage.setattr(&Caller::ROOT, &node, Some(&*file), &size).unwrap();
    below.has_extent_size.store(true, SeqCst);
    below.is_leased.store(true, SeqCst);
    file.write(b"x", 3 * EXTENT, WriteOrigin::Caller).unwrap();
    assert!(below.is_leased.load(SeqCst) && !below.waited_locked.load(SeqCst));
    // Without an answer, what the storage shows is charged.
    assert_eq!(cage.report().used, EXTENT);
    // An account that is read anew: a file with blocks beyond its end.
    inode(&cage, &node).stale.store(true, SeqCst);
    let root = cage.root().unwrap().node;
    let [old, new] = [b"file", b"else"].map(|name| Name::new(name).unwrap());
    cage.rename(&Caller::ROOT, &root, old, &root, new, RenameFlags(0)).unwrap();
    assert!(below.is_leased.load(SeqCst));
}

#[test]
fn a_recount_that_begins_during_a_change_uses_what_is_booked() {
    let (_below, cage) = caged(Storage::Lagging);
    let (node, file) = create(&cage);
    let is_settled = || inode(&cage, &node).account.lock().count == cage.shared.background.counts();
    for block in 0..3 {
        // Its cost is booked exactly before the call.
        file.write(&[1; 4096], block * 4096, WriteOrigin::Caller).unwrap();
        assert!(is_settled(), "{block}");
    }
    cage.shared.background.begin_count();
    let size = SetAttr { size: Some(8192), ..SetAttr::default() };
    cage.setattr(&Caller::ROOT, &node, Some(&*file), &size).unwrap();
    assert!(is_settled());
}

#[test]
fn extents_that_a_file_has_by_its_directory_are_booked() {
    for (has_extent_size, stored) in [(true, EXTENT), (false, 8192)] {
        let (below, cage) = caged(Storage::Ahead);
        let (node, file) = create(&cage);
        let size = SetAttr { size: Some(100 * EXTENT), ..SetAttr::default() };
        cage.setattr(&Caller::ROOT, &node, Some(&*file), &size).unwrap();
        below.has_extent_size.store(has_extent_size, SeqCst);
        for extent in [3, 50] {
            file.write(b"x", extent * EXTENT, WriteOrigin::Caller).unwrap();
        }
        assert_eq!(cage.report().used, stored, "{has_extent_size}");
    }
}
