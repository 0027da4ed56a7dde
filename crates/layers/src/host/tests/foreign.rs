//! File systems mounted inside the source: nothing keeps them in use while no file there is open,
//! and mounts and unmounts are noticed.

use super::*;
use nacre_testkit::{eventually, needs};
use nacre_vfs::{Coherence, DirEntry, DirSink, Invalidation, Scope};
use std::{
    fs,
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// Time limit for a notice.
const PATIENCE: Duration = Duration::from_secs(60);

/// A tmpfs at `in` of the source, with `a/b/c/file`.
fn mount_inside(door: &Door) {
    shell(door.source.path(), "mkdir -p in && mount -t tmpfs inside in && mkdir -p in/a/b/c && echo x > in/a/b/c/file");
}

/// Unmounts like a user does, which fails while anything there is in use.
fn unmounts(door: &Door, path: &str) -> bool {
    succeeds(Command::new("umount").arg(door.path(path)).stderr(std::process::Stdio::null()))
}

fn watched() -> (Door, Receiver<Invalidation>) {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    door.host.watch(sender);
    (door, receiver)
}

/// The notices up to and including the given one.
fn heard(receiver: &Receiver<Invalidation>, last: &Invalidation) -> Vec<Invalidation> {
    let mut heard = Vec::new();
    loop {
        let notice = receiver.recv_timeout(PATIENCE).expect("the notice never came");
        if notice == *last {
            return heard;
        }
        heard.push(notice);
    }
}

/// A sink that takes a number of names, and records the position after the last one.
struct Names {
    room: usize,
    last: u64,
}

impl DirSink for Names {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.room == 0 {
            return false;
        }
        self.room -= 1;
        self.last = entry.next;
        true
    }
}

/// Reads some names of a directory; returns the position after them.
fn some_names(door: &Door, node: &Node, from: u64, names: usize) -> u64 {
    let mut sink = Names { room: names, last: from };
    door.host.readdir(&Caller::ROOT, node, from, true, &mut sink).unwrap();
    sink.last
}

/// Lists a directory to its end, like programs do.
fn list(door: &Door, node: &Node) {
    let end = some_names(door, node, 0, usize::MAX);
    assert_eq!(some_names(door, node, end, usize::MAX), end);
}

/// For each watch method.
#[test]
fn what_was_seen_there_can_be_unmounted_at_once() {
    needs!(is_root());
    let revalidated = Door::new();
    let (marked, _hears) = watched();
    let singly = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, _also) = channel();
    super::super::watch::start_by_directories(&singly.host.shared, sender);
    let quiet = Door::with(|options| options.noatime = true, 64);
    for door in [revalidated, marked, singly, quiet] {
        mount_inside(&door);
        let mut nodes = Vec::new();
        for path in ["in", "in/a", "in/a/b", "in/a/b/c", "in/a/b/c/file"] {
            let entry = door.find(path).unwrap();
            if entry.attr.kind == Kind::Directory {
                list(&door, &entry.node);
            }
            door.getattr(&entry.node).unwrap();
            nodes.push(entry.node);
        }
        let file = door.open("in/a/b/c/file", OpenFlags::READ.raw() | OpenFlags::WRITE.raw()).unwrap();
        assert!(!unmounts(&door, "in"), "a file there is open");
        drop(file);
        assert!(unmounts(&door, "in"));
        assert_eq!(door.getattr(&nodes[3]).unwrap_err(), Errno::ESTALE);
        assert_eq!(door.find("in/a").unwrap_err(), Errno::ENOENT);
        // Another file system with the same names.
        mount_inside(&door);
        assert!(door.find("in/a/b/c/file").is_ok());
        assert!(unmounts(&door, "in"));
    }
}

#[test]
fn the_superblock_goes_with_the_mount() {
    needs!(is_root());
    let image = tempfile::NamedTempFile::new().unwrap();
    let (door, _hears) = watched();
    let script = format!(
        "truncate -s 8M {0} && mkfs.ext4 -q {0} && mkdir disk && mount -o loop {0} disk && mkdir disk/a && echo x > disk/a/file",
        image.path().display()
    );
    needs!(succeeds(Command::new("sh").args(["-ec", &script]).current_dir(door.source.path())));
    let directory = door.find("disk/a").unwrap();
    list(&door, &directory.node);
    drop(door.open("disk/a/file", OpenFlags::WRITE.raw()).unwrap());
    assert!(unmounts(&door, "disk"));
    // The loop device is released with the file system.
    eventually("the disk is not in use", || {
        let devices = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path().join("loop/backing_file"));
        let path = image.path().to_str().unwrap();
        !devices.into_iter().any(|file| fs::read_to_string(file).is_ok_and(|text| text.trim_end() == path))
    });
}

#[test]
fn a_listing_that_nobody_goes_on_with_ends() {
    needs!(is_root());
    let door = Door::new();
    mount_inside(&door);
    shell(&door.path("in"), "i=0; while [ $i -lt 100 ]; do : > f$i; i=$((i+1)); done");
    some_names(&door, &door.find("in").unwrap().node, 0, 3);
    eventually("the mount is not in use", || unmounts(&door, "in"));
}

#[test]
fn a_directory_there_that_is_in_use_stays_good_without_its_name() {
    needs!(is_root());
    let door = Door::new();
    mount_inside(&door);
    let full = door.find("in/a/b").unwrap().node;
    door.host.hold(&full, false);
    assert_eq!(door.rmdir("in/a/b").unwrap_err(), Errno::ENOTEMPTY);
    let empty = door.mkdir(&Caller::ROOT, "in/a/empty", 0o755).unwrap().node;
    door.mkdir(&Caller::ROOT, "in/a/other", 0o755).unwrap();
    let replaced = door.find("in/a/other").unwrap().node;
    door.host.hold(&empty, false);
    door.rmdir("in/a/empty").unwrap();
    door.host.hold(&empty, true);
    door.mkdir(&Caller::ROOT, "in/a/new", 0o755).unwrap();
    door.host.hold(&replaced, false);
    door.rename("in/a/new", "in/a/other", 0).unwrap();
    door.host.hold(&replaced, true);
    for gone in [&empty, &replaced] {
        assert_eq!(door.getattr(gone).unwrap().nlink, 0);
    }
    door.nodes.lock().unwrap().clear();
    drop((empty, replaced));
    // The directory that was not removed has no descriptor.
    assert!(unmounts(&door, "in"));
    drop(full);
}

#[test]
fn a_directory_there_is_never_another_one() {
    needs!(is_root());
    let door = Door::new();
    mount_inside(&door);
    let deep = door.find("in/a/b/c").unwrap().node;
    assert!(door.getattr(&deep).is_ok());
    // Replaced by a link, and by another directory.
    shell(&door.path("in"), "mv a z; ln -s z a");
    assert_eq!(door.host.statfs(&Caller::ROOT, &deep).unwrap_err(), Errno::ESTALE);
    shell(&door.path("in"), "rm a; mkdir -p a/b/c");
    assert_eq!(door.host.statfs(&Caller::ROOT, &deep).unwrap_err(), Errno::ESTALE);
    shell(&door.path("in"), "rm -r a; mv z a");
    assert!(door.host.statfs(&Caller::ROOT, &deep).is_ok());
    assert!(unmounts(&door, "in"));
}

#[test]
fn what_is_mounted_and_unmounted_is_noticed_and_what_is_beside_is_not() {
    needs!(is_root());
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() != "none");
    shell(door.source.path(), "mkdir -p in own/below 'own/with blank'");
    let (root, own) = (door.host.root().unwrap().attr.id, door.find("own").unwrap().attr.id);
    let entry = |parent, name: &[u8]| Invalidation::Entry { parent, name: name.into() };
    let beside = TempDir::new().unwrap();
    drop(Bind::new(door.source.path(), beside.path()));
    mount_inside(&door);
    assert!(!heard(&receiver, &entry(root, b"in")).contains(&Invalidation::Everything));
    assert!(door.find("in/a/b/c/file").is_ok());
    shell(door.source.path(), "mount -t tmpfs inside 'own/with blank'");
    assert!(!heard(&receiver, &entry(own, b"with blank")).contains(&Invalidation::Everything));
    // Here a directory on a foreign mount would have to be examined.
    shell(door.source.path(), "mount -t tmpfs inside in/a");
    heard(&receiver, &Invalidation::Everything);
    assert!(unmounts(&door, "in/a") && unmounts(&door, "own/with blank"));
    heard(&receiver, &entry(own, b"with blank"));
    assert!(unmounts(&door, "in"));
    heard(&receiver, &entry(root, b"in"));
    drop(door);
    // The threads have ended, and with them the senders.
    while receiver.recv().is_ok() {}
}

#[test]
fn a_watch_there_ends_with_the_mount() {
    needs!(is_root());
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() == "fanotify");
    mount_inside(&door);
    let directory = door.find("in/a").unwrap();
    list(&door, &directory.node);
    assert_eq!(door.host.coherence(Scope::Names(&directory.node)), Coherence::Watched);
    shell(&door.path("in/a"), "touch theirs");
    heard(&receiver, &Invalidation::Entry { parent: directory.attr.id, name: b"theirs".as_slice().into() });
    assert!(unmounts(&door, "in"));
    heard(&receiver, &Invalidation::Everything);
    eventually("nothing is promised", || door.host.coherence(Scope::Names(&directory.node)) == Coherence::Shared);
    eventually("no watch is left", || door.host.shared.watch.directory_count() == 0);
}
