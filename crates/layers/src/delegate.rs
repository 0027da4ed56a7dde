//! Forwarding for wrappers of open files: `forward!` writes the methods that a wrapper leaves alone.
//!
//! Called by the filters that wrap files (`throttle`, `readonly`, `remap`). A wrapper keeps what it wraps in a field `below` and lists the
//! methods to forward by name, so that every method of the trait is either listed or written out: none can be forgotten.

/// Writes methods of `OpenFile` that go to `self.below`.
macro_rules! forward {
    ($($name:ident)*) => { $($crate::delegate::forward!(@ $name);)* };
    (@ inner) => { fn inner(&self) -> &dyn ::nacre_vfs::OpenFile { self.below.inner() } };
    (@ read) => { fn read(&self, buffer: &mut [u8], offset: u64) -> ::nacre_vfs::Result<usize> { self.below.read(buffer, offset) } };
    (@ write) => { fn write(&self, data: &[u8], offset: u64) -> ::nacre_vfs::Result<usize> { self.below.write(data, offset) } };
    (@ append) => { fn append(&self, data: &[u8]) -> ::nacre_vfs::Result<usize> { self.below.append(data) } };
    (@ flush) => { fn flush(&self, owner: ::nacre_vfs::LockOwner) -> ::nacre_vfs::Result<()> { self.below.flush(owner) } };
    (@ fsync) => { fn fsync(&self, data_only: bool) -> ::nacre_vfs::Result<()> { self.below.fsync(data_only) } };
    (@ allocate) => {
        fn allocate(&self, mode: ::nacre_vfs::AllocateMode, offset: u64, length: u64) -> ::nacre_vfs::Result<()> {
            self.below.allocate(mode, offset, length)
        }
    };
    (@ seek) => {
        fn seek(&self, offset: u64, whence: ::nacre_vfs::Whence) -> ::nacre_vfs::Result<u64> { self.below.seek(offset, whence) }
    };
    (@ copy_to) => {
        fn copy_to(
            &self,
            offset: u64,
            target: &dyn ::nacre_vfs::OpenFile,
            target_offset: u64,
            length: u64,
            flags: u32,
        ) -> ::nacre_vfs::Result<u64> {
            self.below.copy_to(offset, target, target_offset, length, flags)
        }
    };
    (@ test_lock) => {
        fn test_lock(
            &self,
            owner: ::nacre_vfs::LockOwner,
            lock: ::nacre_vfs::FileLock,
        ) -> ::nacre_vfs::Result<::nacre_vfs::FileLock> {
            self.below.test_lock(owner, lock)
        }
    };
    (@ set_lock) => {
        fn set_lock(&self, owner: ::nacre_vfs::LockOwner, lock: ::nacre_vfs::FileLock, wait: bool) -> ::nacre_vfs::Result<()> {
            self.below.set_lock(owner, lock, wait)
        }
    };
    (@ flock) => {
        fn flock(&self, owner: ::nacre_vfs::LockOwner, kind: ::nacre_vfs::LockKind, wait: bool) -> ::nacre_vfs::Result<()> {
            self.below.flock(owner, kind, wait)
        }
    };
    (@ ioctl) => {
        fn ioctl(&self, request: ::nacre_vfs::Ioctl<'_>, output: &mut [u8]) -> ::nacre_vfs::Result<(i32, usize)> {
            self.below.ioctl(request, output)
        }
    };
    (@ backing) => { fn backing(&self) -> Option<::std::os::fd::BorrowedFd<'_>> { self.below.backing() } };
    (@ collected) => { fn collected(&self) -> Option<&dyn ::nacre_vfs::Collected> { self.below.collected() } };
}

pub(crate) use forward;
