//! Forwarding for wrappers: `forward_layer!` and `forward_file!` write the methods of
//! [`crate::Layer`] and [`crate::OpenFile`] that a wrapper leaves alone.
//!
//! Called by filters that wrap files, and by layers around layers, those of tests among them. A
//! wrapper keeps what it wraps in a field `below` and lists the methods to forward by name, so that
//! every method of the trait is either listed or written out: none can be forgotten.

/// Writes methods of [`crate::Layer`] that go to `self.below`.
#[macro_export]
macro_rules! forward_layer {
    ($($name:ident)*) => { $($crate::forward_layer!(@ $name);)* };
    (@ root) => {
        fn root(&self) -> $crate::Result<$crate::Entry> {
            self.below.root()
        }
    };
    (@ lookup) => {
        fn lookup(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<$crate::Entry> {
            self.below.lookup(caller, parent, name)
        }
    };
    (@ id) => {
        fn id(&self, node: &$crate::Node) -> $crate::Result<$crate::FileId> {
            self.below.id(node)
        }
    };
    (@ path) => {
        fn path(&self, node: &$crate::Node) -> ::std::option::Option<::std::vec::Vec<u8>> {
            self.below.path(node)
        }
    };
    (@ adopt) => {
        fn adopt(&self, known: &$crate::Node, fresh: &$crate::Node) {
            self.below.adopt(known, fresh);
        }
    };
    (@ hold) => {
        fn hold(&self, directory: &$crate::Node, gone: bool) {
            self.below.hold(directory, gone);
        }
    };
    (@ getattr) => {
        fn getattr(&self, caller: &$crate::Caller, node: &$crate::Node, file: ::std::option::Option<&dyn $crate::OpenFile>) -> $crate::Result<$crate::Attr> {
            self.below.getattr(caller, node, file)
        }
    };
    (@ access) => {
        fn access(&self, caller: &$crate::Caller, node: &$crate::Node, mask: u32) -> $crate::Result<()> {
            self.below.access(caller, node, mask)
        }
    };
    (@ setattr) => {
        fn setattr(&self, caller: &$crate::Caller, node: &$crate::Node, file: ::std::option::Option<&dyn $crate::OpenFile>, change: &$crate::SetAttr) -> $crate::Result<$crate::Attr> {
            self.below.setattr(caller, node, file, change)
        }
    };
    (@ readlink) => {
        fn readlink(&self, caller: &$crate::Caller, node: &$crate::Node) -> $crate::Result<::std::vec::Vec<u8>> {
            self.below.readlink(caller, node)
        }
    };
    (@ create) => {
        fn create(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, mode: u32, flags: $crate::OpenFlags) -> $crate::Result<($crate::Entry, $crate::Opened)> {
            self.below.create(caller, parent, name, mode, flags)
        }
    };
    (@ tmpfile) => {
        fn tmpfile(&self, caller: &$crate::Caller, parent: &$crate::Node, mode: u32, flags: $crate::OpenFlags) -> $crate::Result<($crate::Entry, $crate::Opened)> {
            self.below.tmpfile(caller, parent, mode, flags)
        }
    };
    (@ mkdir) => {
        fn mkdir(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, mode: u32) -> $crate::Result<$crate::Entry> {
            self.below.mkdir(caller, parent, name, mode)
        }
    };
    (@ mknod) => {
        fn mknod(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, kind: $crate::Kind, mode: u32, device: (u32, u32)) -> $crate::Result<$crate::Entry> {
            self.below.mknod(caller, parent, name, kind, mode, device)
        }
    };
    (@ symlink) => {
        fn symlink(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, target: &[u8]) -> $crate::Result<$crate::Entry> {
            self.below.symlink(caller, parent, name, target)
        }
    };
    (@ link) => {
        fn link(&self, caller: &$crate::Caller, node: &$crate::Node, file: ::std::option::Option<&dyn $crate::OpenFile>, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<$crate::Entry> {
            self.below.link(caller, node, file, parent, name)
        }
    };
    (@ unlink) => {
        fn unlink(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<()> {
            self.below.unlink(caller, parent, name)
        }
    };
    (@ rmdir) => {
        fn rmdir(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<()> {
            self.below.rmdir(caller, parent, name)
        }
    };
    (@ rename) => {
        fn rename(&self, caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, new_parent: &$crate::Node, new_name: $crate::Name<'_>, flags: $crate::RenameFlags) -> $crate::Result<()> {
            self.below.rename(caller, parent, name, new_parent, new_name, flags)
        }
    };
    (@ open) => {
        fn open(&self, caller: &$crate::Caller, node: &$crate::Node, flags: $crate::OpenFlags) -> $crate::Result<$crate::Opened> {
            self.below.open(caller, node, flags)
        }
    };
    (@ readdir) => {
        fn readdir(&self, caller: &$crate::Caller, node: &$crate::Node, from: u64, attributes: bool, sink: &mut dyn $crate::DirSink) -> $crate::Result<()> {
            self.below.readdir(caller, node, from, attributes, sink)
        }
    };
    (@ fsyncdir) => {
        fn fsyncdir(&self, caller: &$crate::Caller, node: &$crate::Node, data_only: bool) -> $crate::Result<()> {
            self.below.fsyncdir(caller, node, data_only)
        }
    };
    (@ statfs) => {
        fn statfs(&self, caller: &$crate::Caller, node: &$crate::Node) -> $crate::Result<$crate::StatFs> {
            self.below.statfs(caller, node)
        }
    };
    (@ syncfs) => {
        fn syncfs(&self) -> $crate::Result<()> {
            self.below.syncfs()
        }
    };
    (@ getxattr) => {
        fn getxattr(&self, caller: &$crate::Caller, node: &$crate::Node, name: &[u8], buffer: &mut [u8]) -> $crate::Result<usize> {
            self.below.getxattr(caller, node, name, buffer)
        }
    };
    (@ listxattr) => {
        fn listxattr(&self, caller: &$crate::Caller, node: &$crate::Node, buffer: &mut [u8]) -> $crate::Result<usize> {
            self.below.listxattr(caller, node, buffer)
        }
    };
    (@ setxattr) => {
        fn setxattr(&self, caller: &$crate::Caller, node: &$crate::Node, name: &[u8], value: &[u8], flags: $crate::XattrFlags) -> $crate::Result<()> {
            self.below.setxattr(caller, node, name, value, flags)
        }
    };
    (@ removexattr) => {
        fn removexattr(&self, caller: &$crate::Caller, node: &$crate::Node, name: &[u8]) -> $crate::Result<()> {
            self.below.removexattr(caller, node, name)
        }
    };
    (@ ioctl) => {
        fn ioctl(&self, caller: &$crate::Caller, node: &$crate::Node, request: $crate::Ioctl<'_>, output: &mut [u8]) -> $crate::Result<(i32, usize)> {
            self.below.ioctl(caller, node, request, output)
        }
    };
    (@ coherence) => {
        fn coherence(&self, scope: $crate::Scope<'_>) -> $crate::Coherence {
            self.below.coherence(scope)
        }
    };
    (@ watch) => {
        fn watch(&self, channel: ::std::sync::mpsc::Sender<$crate::Invalidation>) {
            self.below.watch(channel);
        }
    };
    (@ rest) => {
        fn rest(&self, known: ::std::option::Option<&[$crate::Node]>) -> bool {
            self.below.rest(known)
        }
    };
    (@ capabilities) => {
        fn capabilities(&self) -> $crate::Capabilities<'_> {
            self.below.capabilities()
        }
    };
    (@ describe) => {
        fn describe(&self) -> $crate::Description {
            self.below.describe()
        }
    };
}

/// Writes methods of [`crate::OpenFile`] that go to `self.below`.
#[macro_export]
macro_rules! forward_file {
    ($($name:ident)*) => { $($crate::forward_file!(@ $name);)* };
    (@ inner) => { fn inner(&self) -> &dyn $crate::OpenFile { self.below.inner() } };
    (@ read) => { fn read(&self, buffer: &mut [u8], offset: u64) -> $crate::Result<usize> { self.below.read(buffer, offset) } };
    (@ write) => {
        fn write(&self, data: &[u8], offset: u64, origin: $crate::WriteOrigin) -> $crate::Result<usize> {
            self.below.write(data, offset, origin)
        }
    };
    (@ append) => { fn append(&self, data: &[u8]) -> $crate::Result<usize> { self.below.append(data) } };
    (@ flush) => { fn flush(&self, owner: $crate::LockOwner) -> $crate::Result<()> { self.below.flush(owner) } };
    (@ fsync) => { fn fsync(&self, data_only: bool) -> $crate::Result<()> { self.below.fsync(data_only) } };
    (@ allocate) => {
        fn allocate(&self, mode: $crate::AllocateMode, offset: u64, length: u64) -> $crate::Result<()> {
            self.below.allocate(mode, offset, length)
        }
    };
    (@ seek) => {
        fn seek(&self, offset: u64, whence: $crate::Whence) -> $crate::Result<u64> { self.below.seek(offset, whence) }
    };
    (@ copy_to) => {
        fn copy_to(
            &self,
            offset: u64,
            target: &dyn $crate::OpenFile,
            target_offset: u64,
            length: u64,
            flags: u32,
        ) -> $crate::Result<u64> {
            self.below.copy_to(offset, target, target_offset, length, flags)
        }
    };
    (@ test_lock) => {
        fn test_lock(
            &self,
            owner: $crate::LockOwner,
            lock: $crate::FileLock,
        ) -> $crate::Result<$crate::FileLock> {
            self.below.test_lock(owner, lock)
        }
    };
    (@ set_lock) => {
        fn set_lock(&self, owner: $crate::LockOwner, lock: $crate::FileLock, wait: bool) -> $crate::Result<()> {
            self.below.set_lock(owner, lock, wait)
        }
    };
    (@ flock) => {
        fn flock(&self, owner: $crate::LockOwner, kind: $crate::LockKind, wait: bool) -> $crate::Result<()> {
            self.below.flock(owner, kind, wait)
        }
    };
    (@ ioctl) => {
        fn ioctl(&self, request: $crate::Ioctl<'_>, output: &mut [u8]) -> $crate::Result<(i32, usize)> {
            self.below.ioctl(request, output)
        }
    };
    (@ backing) => { fn backing(&self) -> Option<::std::os::fd::BorrowedFd<'_>> { self.below.backing() } };
    (@ writeback_lease) => { fn writeback_lease(&self) -> Option<&dyn $crate::WritebackLease> { self.below.writeback_lease() } };
}
