//! The layer `trace`: logs one line for each operation of the layer below, with caller, name,
//! result and duration.
//!
//! Made by the stack builder. It is no [`nacre_vfs::Filter`], since it has to see the results of
//! operations. It changes nothing and disables nothing: where the kernel reads and writes the lower
//! file directly (passthrough), those reads and writes are not seen. Lines have the target
//! `nacre::operation`; changes are logged at `debug`, queries at `trace` (or everything at
//! `debug`). Errors are part of the line and never a warning: a failed look-up is normal.

use crate::{clock::Clock, settings::TraceLevel};
use nacre_vfs::{
    AllocateMode, AnyOpen, Attr, Caller, Created, Description, Dev, DirSink, Entry, Errno, Ioctl, Kind, Layer,
    LockOwner, Name, Node, OpenFile, OpenFlags, Opened, RenameFlags, Result, SetAttr, StatFs, Whence, WriteOrigin,
    XattrFlags,
};
use std::{any::Any, sync::Arc};
use tracing::Level;

#[cfg(test)]
mod tests;

/// Target of the log lines.
const TARGET: &str = "nacre::operation";

/// The trace over one layer.
pub struct Trace {
    below: Arc<dyn Layer>,
    log: Log,
}

#[derive(Clone)]
struct Log {
    level: TraceLevel,
    clock: Arc<dyn Clock>,
}

/// Whether an operation queries or changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Question,
    Change,
}
use Sort::{Change, Question};

impl Log {
    fn run<T>(
        &self,
        sort: Sort,
        operation: &'static str,
        caller: Option<&Caller>,
        name: &dyn Fn() -> String,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let loud = sort == Change || self.level == TraceLevel::All;
        let enabled = if loud {
            tracing::enabled!(target: TARGET, Level::DEBUG)
        } else {
            tracing::enabled!(target: TARGET, Level::TRACE)
        };
        if !enabled {
            return work();
        }
        let start = self.clock.now();
        let result = work();
        let micros = u64::try_from(self.clock.now().saturating_sub(start).as_micros()).unwrap_or(u64::MAX);
        let (uid, gid, pid) = caller.map_or((0, 0, 0), |caller| (caller.uid, caller.gid, caller.pid));
        let outcome = result.as_ref().err().map_or_else(|| "ok".to_owned(), |errno: &Errno| format!("{errno:?}"));
        let name = name();
        if loud {
            tracing::debug!(target: TARGET, operation, name, uid, gid, pid, outcome, micros);
        } else {
            tracing::trace!(target: TARGET, operation, name, uid, gid, pid, outcome, micros);
        }
        result
    }
}

impl Trace {
    /// Puts a trace over a layer.
    pub fn new(below: Arc<dyn Layer>, level: TraceLevel, clock: Arc<dyn Clock>) -> Trace {
        Trace { below, log: Log { level, clock } }
    }

    fn wrap(&self, file: Opened) -> Opened {
        Arc::new(TracedFile { below: file, log: self.log.clone() })
    }
}

fn nameless() -> String {
    String::new()
}

impl Layer for Trace {
    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.log.run(Question, "lookup", Some(caller), &|| name.to_string(), || self.below.lookup(caller, parent, name))
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        self.log.run(Question, "getattr", Some(caller), &nameless, || self.below.getattr(caller, node, file))
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.log
            .run(Question, "access", Some(caller), &|| format!("{mask:o}"), || self.below.access(caller, node, mask))
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        self.log.run(Change, "setattr", Some(caller), &|| format!("{change:?}"), || {
            self.below.setattr(caller, node, file, change)
        })
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.log.run(Question, "readlink", Some(caller), &nameless, || self.below.readlink(caller, node))
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        let work = || self.below.create(caller, parent, name, mode, flags);
        let (entry, file) = self.log.run(Change, "create", Some(caller), &|| name.to_string(), work)?;
        Ok((entry, self.wrap(file)))
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        let work = || self.below.tmpfile(caller, parent, mode, flags);
        let (entry, file) = self.log.run(Change, "tmpfile", Some(caller), &nameless, work)?;
        Ok((entry, self.wrap(file)))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.log
            .run(Change, "mkdir", Some(caller), &|| name.to_string(), || self.below.mkdir(caller, parent, name, mode))
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.log.run(Change, "mknod", Some(caller), &|| name.to_string(), || {
            self.below.mknod(caller, parent, name, kind, mode, dev)
        })
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.log.run(Change, "symlink", Some(caller), &|| name.to_string(), || {
            self.below.symlink(caller, parent, name, target)
        })
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.log.run(Change, "link", Some(caller), &|| name.to_string(), || {
            self.below.link(caller, node, file, parent, name)
        })
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.log.run(Change, "unlink", Some(caller), &|| name.to_string(), || self.below.unlink(caller, parent, name))
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.log.run(Change, "rmdir", Some(caller), &|| name.to_string(), || self.below.rmdir(caller, parent, name))
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
        let work = || self.below.rename(caller, parent, name, new_parent, new_name, flags);
        self.log.run(Change, "rename", Some(caller), &|| format!("{name} -> {new_name}"), work)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let work = || self.below.open(caller, node, flags);
        self.log
            .run(Question, "open", Some(caller), &|| format!("flags {:#o}", flags.raw()), work)
            .map(|file| self.wrap(file))
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let work = || self.below.readdir(caller, node, from, attributes, sink);
        self.log.run(Question, "readdir", Some(caller), &|| format!("from {from}"), work)
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.log.run(Change, "fsyncdir", Some(caller), &nameless, || self.below.fsyncdir(caller, node, data_only))
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        self.log.run(Question, "statfs", Some(caller), &nameless, || self.below.statfs(caller, node))
    }

    fn syncfs(&self) -> Result<()> {
        self.log.run(Change, "syncfs", None, &nameless, || self.below.syncfs())
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let work = || self.below.getxattr(caller, node, name, buffer);
        self.log.run(Question, "getxattr", Some(caller), &|| name.escape_ascii().to_string(), work)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.log.run(Question, "listxattr", Some(caller), &nameless, || self.below.listxattr(caller, node, buffer))
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let work = || self.below.setxattr(caller, node, name, value, flags);
        self.log.run(Change, "setxattr", Some(caller), &|| name.escape_ascii().to_string(), work)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let work = || self.below.removexattr(caller, node, name);
        self.log.run(Change, "removexattr", Some(caller), &|| name.escape_ascii().to_string(), work)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let work = || self.below.ioctl(caller, node, request, output);
        self.log.run(Change, "ioctl", Some(caller), &|| format!("{:#x}", request.command), work)
    }

    fn describe(&self) -> Description {
        let mut own = Description::new("trace");
        if self.log.level != TraceLevel::default() {
            own = own.with("level", self.log.level.word());
        }
        own.over(self.below.describe())
    }

    nacre_vfs::forward_layer! { root id path adopt hold coherence watch rest capabilities }
}

/// An open file whose operations are logged. Its bytes are the lower file's.
struct TracedFile {
    below: Opened,
    log: Log,
}

impl OpenFile for TracedFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let length = buffer.len();
        self.log.run(Question, "read", None, &|| format!("{length} at {offset}"), || self.below.read(buffer, offset))
    }

    fn write(&self, data: &[u8], offset: u64, origin: WriteOrigin) -> Result<usize> {
        self.log.run(Change, "write", None, &|| format!("{} at {offset}", data.len()), || {
            self.below.write(data, offset, origin)
        })
    }

    fn append(&self, data: &[u8]) -> Result<usize> {
        self.log.run(Change, "append", None, &|| data.len().to_string(), || self.below.append(data))
    }

    fn flush(&self, owner: LockOwner) -> Result<()> {
        self.log.run(Question, "flush", None, &nameless, || self.below.flush(owner))
    }

    fn fsync(&self, data_only: bool) -> Result<()> {
        self.log.run(Change, "fsync", None, &nameless, || self.below.fsync(data_only))
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        let work = || self.below.allocate(mode, offset, length);
        self.log.run(Change, "allocate", None, &|| format!("{length} at {offset}, mode {:#x}", mode.0), work)
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        self.log
            .run(Question, "seek", None, &|| format!("{whence:?} from {offset}"), || self.below.seek(offset, whence))
    }

    fn copy_to(&self, offset: u64, target: &dyn OpenFile, target_offset: u64, length: u64, flags: u32) -> Result<u64> {
        let work = || self.below.copy_to(offset, target, target_offset, length, flags);
        self.log.run(Change, "copy", None, &|| format!("{length} from {offset} to {target_offset}"), work)
    }

    fn ioctl(&self, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        self.log.run(Change, "ioctl", None, &|| format!("{:#x}", request.command), || self.below.ioctl(request, output))
    }

    nacre_vfs::forward_file! { inner test_lock set_lock flock backing left is_on_inner_mount writeback_lease }
}
