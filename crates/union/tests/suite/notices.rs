//! Changes that others make on a branch while the union looks at it.

use nacre_layers::mem::Mem;
use nacre_union::{BranchMode, Union, UnionOptions};
use nacre_vfs::{Caller, Entry, FileId, Invalidation, Layer, Name, Node, OpenFlags, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a notice may take before the test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A branch on which somebody changes a file in the moment in which its attributes have been read.
struct Changing {
    below: Arc<dyn Layer>,
    union: Mutex<Option<Sender<Invalidation>>>,
    heard: Arc<Mutex<Receiver<Invalidation>>>,
}

impl Layer for Changing {
    nacre_vfs::forward_layer! {
        root id path adopt hold getattr access setattr readlink create tmpfile mkdir mknod symlink link unlink rmdir rename open readdir fsyncdir statfs syncfs
        getxattr listxattr setxattr removexattr ioctl coherence capabilities describe
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let found = self.below.lookup(caller, parent, name)?;
        let sender = self.union.lock().unwrap().clone().expect("the union listens");
        sender.send(Invalidation::Content { id: found.attr.id }).unwrap();
        // The union is through with it when it has passed on what follows.
        sender.send(Invalidation::Everything).unwrap();
        let heard = self.heard.lock().unwrap();
        while heard.recv_timeout(PATIENCE).expect("the union passes everything on") != Invalidation::Everything {}
        Ok(found)
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        *self.union.lock().unwrap() = Some(channel);
    }
}

#[test]
fn a_change_during_a_first_look_is_told_afterwards() {
    let mem: Arc<dyn Layer> = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    mem.create(&Caller::ROOT, &root, Name::new(b"file").unwrap(), 0o644, OpenFlags::WRITE).unwrap();
    let (sender, receiver) = channel();
    let heard = Arc::new(Mutex::new(receiver));
    let branch: Arc<dyn Layer> = Arc::new(Changing { below: mem, union: Mutex::default(), heard: Arc::clone(&heard) });
    let union = Union::new(vec![(branch, BranchMode::ro())], UnionOptions::default()).unwrap();
    union.watch(sender);
    let root = union.root().unwrap().node;
    let seen: FileId = union.lookup(&Caller::ROOT, &root, Name::new(b"file").unwrap()).unwrap().attr.id;
    let told = heard.lock().unwrap().recv_timeout(PATIENCE).expect("what was read is old, and nobody says so");
    assert_eq!(told, Invalidation::Content { id: seen });
}
