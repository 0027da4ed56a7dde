//! Forwarding for wrappers: `forward_layer!` and `forward_file!` generate the methods of [`crate::Layer`] and
//! [`crate::OpenFile`] that a wrapper does not change.
//!
//! Used by filters that wrap files, and by layers around layers, including those of tests. A wrapper keeps the
//! wrapped object in a field `below` and lists the methods to forward by name, so that every method of the trait is
//! either listed or written out: none can be forgotten. In these macros each method is its signature, after `=`.

/// Generates methods of [`crate::Layer`] that call `self.below`.
#[macro_export]
macro_rules! forward_layer {
    ($($name:ident)*) => { $($crate::forward_layer!(@ $name);)* };
    (= $name:ident($($parameter:ident: $kind:ty),*) $(-> $answer:ty)?) => {
        fn $name(&self, $($parameter: $kind),*) $(-> $answer)? {
            self.below.$name($($parameter),*)
        }
    };
    (@ root) => { $crate::forward_layer!(= root() -> $crate::Result<$crate::Entry>); };
    (@ lookup) => {
        $crate::forward_layer!(= lookup(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<$crate::Entry>);
    };
    (@ id) => { $crate::forward_layer!(= id(node: &$crate::Node) -> $crate::Result<$crate::FileId>); };
    (@ path) => { $crate::forward_layer!(= path(node: &$crate::Node) -> ::std::option::Option<::std::vec::Vec<u8>>); };
    (@ adopt) => { $crate::forward_layer!(= adopt(known: &$crate::Node, fresh: &$crate::Node)); };
    (@ hold) => { $crate::forward_layer!(= hold(directory: &$crate::Node, gone: bool)); };
    (@ getattr) => {
        $crate::forward_layer!(= getattr(caller: &$crate::Caller, node: &$crate::Node, file: $crate::AnyOpen<'_>) -> $crate::Result<$crate::Attr>);
    };
    (@ access) => {
        $crate::forward_layer!(= access(caller: &$crate::Caller, node: &$crate::Node, mask: u32) -> $crate::Result<()>);
    };
    (@ setattr) => {
        $crate::forward_layer!(= setattr(caller: &$crate::Caller, node: &$crate::Node, file: $crate::AnyOpen<'_>, change: &$crate::SetAttr) -> $crate::Result<$crate::Attr>);
    };
    (@ readlink) => {
        $crate::forward_layer!(= readlink(caller: &$crate::Caller, node: &$crate::Node) -> $crate::Result<::std::vec::Vec<u8>>);
    };
    (@ create) => {
        $crate::forward_layer!(= create(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, mode: u32, flags: $crate::OpenFlags) -> $crate::Result<$crate::Created>);
    };
    (@ tmpfile) => {
        $crate::forward_layer!(= tmpfile(caller: &$crate::Caller, parent: &$crate::Node, mode: u32, flags: $crate::OpenFlags) -> $crate::Result<$crate::Created>);
    };
    (@ mkdir) => {
        $crate::forward_layer!(= mkdir(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, mode: u32) -> $crate::Result<$crate::Entry>);
    };
    (@ mknod) => {
        $crate::forward_layer!(= mknod(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, kind: $crate::Kind, mode: u32, dev: $crate::Dev) -> $crate::Result<$crate::Entry>);
    };
    (@ symlink) => {
        $crate::forward_layer!(= symlink(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, target: &[u8]) -> $crate::Result<$crate::Entry>);
    };
    (@ link) => {
        $crate::forward_layer!(= link(caller: &$crate::Caller, node: &$crate::Node, file: $crate::AnyOpen<'_>, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<$crate::Entry>);
    };
    (@ unlink) => {
        $crate::forward_layer!(= unlink(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<()>);
    };
    (@ rmdir) => {
        $crate::forward_layer!(= rmdir(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>) -> $crate::Result<()>);
    };
    (@ rename) => {
        $crate::forward_layer!(= rename(caller: &$crate::Caller, parent: &$crate::Node, name: $crate::Name<'_>, new_parent: &$crate::Node, new_name: $crate::Name<'_>, flags: $crate::RenameFlags) -> $crate::Result<()>);
    };
    (@ open) => {
        $crate::forward_layer!(= open(caller: &$crate::Caller, node: &$crate::Node, flags: $crate::OpenFlags) -> $crate::Result<$crate::Opened>);
    };
    (@ readdir) => {
        $crate::forward_layer!(= readdir(caller: &$crate::Caller, node: &$crate::Node, from: u64, attributes: bool, sink: &mut dyn $crate::DirSink) -> $crate::Result<()>);
    };
    (@ fsyncdir) => {
        $crate::forward_layer!(= fsyncdir(caller: &$crate::Caller, node: &$crate::Node, data_only: bool) -> $crate::Result<()>);
    };
    (@ statfs) => {
        $crate::forward_layer!(= statfs(caller: &$crate::Caller, node: &$crate::Node) -> $crate::Result<$crate::StatFs>);
    };
    (@ syncfs) => { $crate::forward_layer!(= syncfs() -> $crate::Result<()>); };
    (@ getxattr) => {
        $crate::forward_layer!(= getxattr(caller: &$crate::Caller, node: &$crate::Node, name: &[u8], buffer: &mut [u8]) -> $crate::Result<usize>);
    };
    (@ listxattr) => {
        $crate::forward_layer!(= listxattr(caller: &$crate::Caller, node: &$crate::Node, buffer: &mut [u8]) -> $crate::Result<usize>);
    };
    (@ setxattr) => {
        $crate::forward_layer!(= setxattr(caller: &$crate::Caller, node: &$crate::Node, name: &[u8], value: &[u8], flags: $crate::XattrFlags) -> $crate::Result<()>);
    };
    (@ removexattr) => {
        $crate::forward_layer!(= removexattr(caller: &$crate::Caller, node: &$crate::Node, name: &[u8]) -> $crate::Result<()>);
    };
    (@ ioctl) => {
        $crate::forward_layer!(= ioctl(caller: &$crate::Caller, node: &$crate::Node, request: $crate::Ioctl<'_>, output: &mut [u8]) -> $crate::Result<(i32, usize)>);
    };
    (@ coherence) => { $crate::forward_layer!(= coherence(scope: $crate::Scope<'_>) -> $crate::Coherence); };
    (@ watch) => { $crate::forward_layer!(= watch(channel: ::std::sync::mpsc::Sender<$crate::Invalidation>)); };
    (@ rest) => { $crate::forward_layer!(= rest(known: ::std::option::Option<&[$crate::Node]>) -> bool); };
    (@ capabilities) => { $crate::forward_layer!(= capabilities() -> $crate::Capabilities<'_>); };
    (@ describe) => { $crate::forward_layer!(= describe() -> $crate::Description); };
}

/// Generates methods of [`crate::OpenFile`] that call `self.below`.
#[macro_export]
macro_rules! forward_file {
    ($($name:ident)*) => { $($crate::forward_file!(@ $name);)* };
    (@ inner) => { $crate::forward_layer!(= inner() -> &dyn $crate::OpenFile); };
    (@ read) => { $crate::forward_layer!(= read(buffer: &mut [u8], offset: u64) -> $crate::Result<usize>); };
    (@ write) => {
        $crate::forward_layer!(= write(data: &[u8], offset: u64, origin: $crate::WriteOrigin) -> $crate::Result<usize>);
    };
    (@ append) => { $crate::forward_layer!(= append(data: &[u8]) -> $crate::Result<usize>); };
    (@ flush) => { $crate::forward_layer!(= flush(owner: $crate::LockOwner) -> $crate::Result<()>); };
    (@ fsync) => { $crate::forward_layer!(= fsync(data_only: bool) -> $crate::Result<()>); };
    (@ allocate) => {
        $crate::forward_layer!(= allocate(mode: $crate::AllocateMode, offset: u64, length: u64) -> $crate::Result<()>);
    };
    (@ seek) => { $crate::forward_layer!(= seek(offset: u64, whence: $crate::Whence) -> $crate::Result<u64>); };
    (@ copy_to) => {
        $crate::forward_layer!(= copy_to(offset: u64, target: &dyn $crate::OpenFile, target_offset: u64, length: u64, flags: u32) -> $crate::Result<u64>);
    };
    (@ test_lock) => {
        $crate::forward_layer!(= test_lock(owner: $crate::LockOwner, lock: $crate::FileLock) -> $crate::Result<$crate::FileLock>);
    };
    (@ set_lock) => {
        $crate::forward_layer!(= set_lock(owner: $crate::LockOwner, lock: $crate::FileLock, wait: bool) -> $crate::Result<()>);
    };
    (@ flock) => {
        $crate::forward_layer!(= flock(owner: $crate::LockOwner, kind: $crate::LockKind, wait: bool) -> $crate::Result<()>);
    };
    (@ ioctl) => {
        $crate::forward_layer!(= ioctl(request: $crate::Ioctl<'_>, output: &mut [u8]) -> $crate::Result<(i32, usize)>);
    };
    (@ backing) => {
        $crate::forward_layer!(= backing() -> ::std::option::Option<::std::os::fd::BorrowedFd<'_>>);
    };
    (@ left) => {
        $crate::forward_layer!(= left() -> ::std::option::Option<$crate::LeftFile<'_>>);
    };
    (@ is_on_inner_mount) => { $crate::forward_layer!(= is_on_inner_mount() -> bool); };
    (@ writeback_lease) => {
        $crate::forward_layer!(= writeback_lease() -> ::std::option::Option<&dyn $crate::WritebackLease>);
    };
}
