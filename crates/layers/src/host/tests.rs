//! The host layer against the host itself: every operation through [`Layer`], next to the native
//! call where there is one.

mod binds;
mod creation;
mod files;
mod foreign;
mod identity;
mod links;
mod listings;
mod parity;
mod resting;
mod watch_groups;
mod watching;

use super::{Directories, Host, HostNode, HostOptions};
use crate::settings::HostCoherence;
use nacre_testkit::name;
use nacre_vfs::{
    Attr, Caller, Entry, Errno, FileId, Kind, Layer, LockOwner, Name, Node, OpenFlags, Opened, RenameFlags, Result,
    SetAttr, WriteOrigin, XattrFlags,
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{Mutex, RwLock},
};
use tempfile::TempDir;

const USER: Caller = Caller { uid: 4001, gid: 4002, pid: 0, umask: 0o022 };

/// A front end like FUSE's: one node per file, kept current by `adopt`.
struct Door {
    host: Host,
    nodes: Mutex<HashMap<FileId, Node>>,
    source: TempDir,
}

/// Held by tests while they start programs, shared by tests that open files of a source. A new
/// program has copies of all open descriptors, and closes them under its own process id a moment
/// later: a file opened for writing the ordinary way at that time would seem to be closed by
/// another process.
static STARTING: RwLock<()> = RwLock::new(());

/// Starts a program, which runs as another process: changes by this process are not reported where
/// the kernel names the process.
fn start(command: &mut Command) -> Child {
    let _nobody_opens = STARTING.write().unwrap();
    command.spawn().unwrap()
}

/// Runs a program; returns whether it succeeds.
fn succeeds(command: &mut Command) -> bool {
    start(command).wait().unwrap().success()
}

fn shell(directory: &Path, script: &str) {
    assert!(succeeds(Command::new("sh").arg("-c").arg(script).current_dir(directory)), "{script}");
}

/// Writes like a program on the FUSE mount with passthrough: the kernel writes to our descriptor
/// under that program's process id.
fn client_writes(file: &Opened) {
    let descriptor = file.backing().unwrap().try_clone_to_owned().unwrap();
    assert!(succeeds(Command::new("sh").arg("-c").arg("echo content").stdout(descriptor)));
}

/// One mount; undone when dropped, before the source is removed.
struct Bind(PathBuf);

impl Bind {
    fn new(from: &Path, to: &Path) -> Bind {
        assert!(succeeds(Command::new("mount").arg("--bind").args([from, to])));
        Bind(to.to_owned())
    }
}

impl Drop for Bind {
    fn drop(&mut self) {
        assert!(succeeds(Command::new("umount").arg("-l").arg(&self.0)));
    }
}

/// A file system of its own, for root: no other watch sees changes on it, and its watch sees no
/// changes elsewhere.
struct Apart {
    /// Unmounted before the directory is removed.
    _mount: Bind,
    directory: TempDir,
}

impl Apart {
    fn new() -> Apart {
        let directory = TempDir::new().unwrap();
        assert!(succeeds(Command::new("mount").args(["-t", "tmpfs", "nacre-test"]).arg(directory.path())));
        Apart { _mount: Bind(directory.path().to_owned()), directory }
    }

    fn directory(&self) -> TempDir {
        TempDir::new_in(&self.directory).unwrap()
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl Door {
    fn new() -> Door {
        Door::with(|_| {}, Directories::default_budget().0)
    }

    fn with(change: impl FnOnce(&mut HostOptions), budget: usize) -> Door {
        Door::of(TempDir::new().unwrap(), change, budget)
    }

    fn of(source: TempDir, change: impl FnOnce(&mut HostOptions), budget: usize) -> Door {
        let mut options = HostOptions::new(source.path());
        options.coherence = HostCoherence::Revalidate;
        change(&mut options);
        let host = Host::with_budget(options, (budget, usize::MAX)).unwrap();
        Door { host, nodes: Mutex::default(), source }
    }

    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.source.path().join(path)
    }

    /// Returns the entry with the known node.
    fn known(&self, entry: Entry) -> Entry {
        let mut nodes = self.nodes.lock().unwrap();
        let node = nodes.entry(entry.attr.id).or_insert_with(|| entry.node.clone()).clone();
        self.host.adopt(&node, &entry.node);
        Entry { node, attr: entry.attr }
    }

    fn root(&self) -> Node {
        self.known(self.host.root().unwrap()).node
    }

    /// Looks a path up, component by component.
    fn find(&self, path: &str) -> Result<Entry> {
        let mut entry = self.known(self.host.root()?);
        for part in path.split('/').filter(|part| !part.is_empty()) {
            entry = self.known(self.host.lookup(&Caller::ROOT, &entry.node, Name::new(part.as_bytes())?)?);
        }
        Ok(entry)
    }

    /// The directory and the last name of a path.
    fn split<'a>(&self, path: &'a str) -> Result<(Node, Name<'a>)> {
        let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = self.find(parent)?;
        // Like a path walk.
        if parent.attr.kind != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        Ok((parent.node, Name::new(last.as_bytes())?))
    }

    fn create(&self, caller: &Caller, path: &str, mode: u32, flags: u32) -> Result<(Entry, Opened)> {
        let (parent, name) = self.split(path)?;
        let _nobody_starts = STARTING.read().unwrap();
        let (entry, file) = self.host.create(caller, &parent, name, mode, OpenFlags(flags))?;
        Ok((self.known(entry), file))
    }

    fn mkdir(&self, caller: &Caller, path: &str, mode: u32) -> Result<Entry> {
        let (parent, name) = self.split(path)?;
        Ok(self.known(self.host.mkdir(caller, &parent, name, mode)?))
    }

    fn unlink(&self, path: &str) -> Result<()> {
        let (parent, name) = self.split(path)?;
        self.host.unlink(&Caller::ROOT, &parent, name)
    }

    fn rmdir(&self, path: &str) -> Result<()> {
        let (parent, name) = self.split(path)?;
        self.host.rmdir(&Caller::ROOT, &parent, name)
    }

    fn rename(&self, from: &str, to: &str, flags: u32) -> Result<()> {
        let (parent, old) = self.split(from)?;
        let (new_parent, new) = self.split(to)?;
        self.host.rename(&Caller::ROOT, &parent, old, &new_parent, new, RenameFlags(flags))?;
        for (parent, name) in [(parent, old), (new_parent, new)] {
            if let Ok(entry) = self.host.lookup(&Caller::ROOT, &parent, name) {
                self.known(entry);
            }
        }
        Ok(())
    }

    fn link(&self, from: &str, to: &str) -> Result<Entry> {
        let node = self.find(from)?.node;
        let (parent, name) = self.split(to)?;
        Ok(self.known(self.host.link(&Caller::ROOT, &node, None, &parent, name)?))
    }

    fn open(&self, path: &str, flags: u32) -> Result<Opened> {
        let node = self.find(path)?.node;
        let _nobody_starts = STARTING.read().unwrap();
        self.host.open(&Caller::ROOT, &node, OpenFlags(flags))
    }

    fn getattr(&self, node: &Node) -> Result<Attr> {
        self.host.getattr(&Caller::ROOT, node, None)
    }

    fn setattr(&self, path: &str, change: SetAttr) -> Result<Attr> {
        self.host.setattr(&Caller::ROOT, &self.find(path)?.node, None, &change)
    }
}

/// The bytes of a file by a path of the host itself.
fn native(path: impl AsRef<Path>) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn the_parts_of_the_fixture_agree() {
    let door = Door::new();
    assert!(door.root().get::<HostNode>().unwrap().is_root());
    assert_eq!(door.find("missing").unwrap_err(), Errno::ENOENT);
    let nobody = LockOwner(0);
    let (_, file) = door.create(&Caller::ROOT, "file", 0o600, 0o2).unwrap();
    file.write(b"content", 0, WriteOrigin::Caller).unwrap();
    file.flush(nobody).unwrap();
    assert_eq!(native(door.path("file")), b"content");
    door.host.setxattr(&Caller::ROOT, &door.root(), b"user.x", b"y", XattrFlags::default()).unwrap();
}
