//! A branch that writes down, in one list with the others of its union, what changes on it and what
//! is made durable, and whose syncs can fail.

use nacre_vfs::{
    AnyOpen, Caller, Created, Dev, Entry, Errno, FileId, Kind, Layer, Name, Node, OpenFlags, Opened, RenameFlags,
    Result, XattrFlags,
};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// What has happened to a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A name has come to be in it.
    Came(Vec<u8>),
    /// A name has gone from it.
    Went(Vec<u8>),
    /// An attribute has been set on it, or on a file.
    Marked,
    /// An attribute has been removed from it, or from a file.
    Unmarked,
    /// It has been put on stable storage.
    Synced,
}

/// On which branch, in which directory, what.
pub type Event = (usize, FileId, What);

/// What somebody else does in the middle of a call.
type Act = Box<dyn FnOnce() + Send>;

/// What happens on all branches.
#[derive(Default)]
pub struct EventLog {
    events: Mutex<Vec<Event>>,
    failing: [AtomicBool; 4],
    at_open: Mutex<Option<(usize, Act)>>,
}

impl EventLog {
    pub fn new() -> Arc<EventLog> {
        Arc::default()
    }

    /// What has happened since the last call.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events.lock())
    }

    /// From now on, nothing can be made durable on a branch, or it can again.
    pub fn fail(&self, branch: usize, fails: bool) {
        self.failing[branch].store(fails, Ordering::SeqCst);
    }

    /// Runs this when the next file is opened on a branch, before that is done.
    pub fn at_open(&self, branch: usize, act: impl FnOnce() + Send + 'static) {
        *self.at_open.lock() = Some((branch, Box::new(act)));
    }

    fn push(&self, branch: usize, directory: FileId, what: What) {
        self.events.lock().push((branch, directory, what));
    }
}

/// The position of the last of such events.
pub fn last(events: &[Event], wanted: &Event) -> usize {
    events.iter().rposition(|event| event == wanted).unwrap_or_else(|| panic!("no {wanted:?} in {events:#?}"))
}

/// The first event has happened, then its directory has become durable, and only then has the
/// second one happened.
pub fn assert_durable_before(events: &[Event], first: &Event, second: &Event) {
    let (begin, end) = (last(events, first), last(events, second));
    let synced = (first.0, first.1, What::Synced);
    assert!(
        begin < end && events[begin..end].contains(&synced),
        "{second:?} without {first:?} being durable: {events:#?}"
    );
}

/// The branch.
pub struct Recorded {
    pub below: Arc<dyn Layer>,
    pub branch: usize,
    pub record: Arc<EventLog>,
}

impl Recorded {
    fn note(&self, directory: &Node, what: What) -> Result<()> {
        self.record.push(self.branch, self.below.id(directory)?, what);
        Ok(())
    }

    fn came(&self, directory: &Node, name: Name<'_>) -> Result<()> {
        self.note(directory, What::Came(name.bytes().to_vec()))
    }
}

impl Layer for Recorded {
    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        let made = self.below.create(caller, parent, name, mode, flags)?;
        self.came(parent, name).map(|()| made)
    }
    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let made = self.below.mkdir(caller, parent, name, mode)?;
        self.came(parent, name).map(|()| made)
    }
    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let made = self.below.mknod(caller, parent, name, kind, mode, dev)?;
        self.came(parent, name).map(|()| made)
    }
    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let made = self.below.symlink(caller, parent, name, target)?;
        self.came(parent, name).map(|()| made)
    }
    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let made = self.below.link(caller, node, file, parent, name)?;
        self.came(parent, name).map(|()| made)
    }
    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.below.unlink(caller, parent, name)?;
        self.note(parent, What::Went(name.bytes().to_vec()))
    }
    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.below.rmdir(caller, parent, name)?;
        self.note(parent, What::Went(name.bytes().to_vec()))
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
        self.below.rename(caller, parent, name, new_parent, new_name, flags)?;
        self.came(new_parent, new_name)?;
        self.note(parent, What::Went(name.bytes().to_vec()))
    }
    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        if self.record.failing[self.branch].load(Ordering::SeqCst) {
            return Err(Errno::EIO);
        }
        self.below.fsyncdir(caller, node, data_only)?;
        self.note(node, What::Synced)
    }
    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.below.setxattr(caller, node, name, value, flags)?;
        self.note(node, What::Marked)
    }
    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.below.removexattr(caller, node, name)?;
        self.note(node, What::Unmarked)
    }
    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let asked = self.record.at_open.lock().take_if(|(branch, _)| *branch == self.branch);
        if let Some((_, act)) = asked {
            act();
        }
        self.below.open(caller, node, flags)
    }

    nacre_vfs::forward_layer! { root lookup id path adopt hold getattr access readlink readdir statfs syncfs getxattr listxattr ioctl coherence watch capabilities describe tmpfile setattr }
}
