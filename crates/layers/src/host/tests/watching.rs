//! Changes made by another process are reported; our own are not; an unwatchable source is declared
//! shared.

use super::*;
use nacre_testkit::needs;
use nacre_vfs::{Coherence, Invalidation, Scope, WriteOrigin};
use std::{
    fs,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

fn watched() -> (Door, Receiver<Invalidation>) {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    door.host.watch(sender);
    (door, receiver)
}

/// Waits for a notice; with a long time limit, as only its arrival is asserted.
fn expect(receiver: &Receiver<Invalidation>, wanted: impl Fn(&Invalidation) -> bool) {
    loop {
        let notice = receiver.recv_timeout(Duration::from_secs(20)).expect("the notice never came");
        if wanted(&notice) {
            return;
        }
    }
}

fn is_entry<'a>(parent: &'a Attr, name: &'a str) -> impl Fn(&Invalidation) -> bool + 'a {
    move |notice| matches!(notice, Invalidation::Entry { parent: id, name: bytes } if *id == parent.id && &bytes[..] == name.as_bytes())
}

/// The same for both watch methods.
fn changes_arrive(door: &Door, receiver: &Receiver<Invalidation>) {
    fs::create_dir(door.path("directory")).unwrap();
    fs::write(door.path("directory/file"), b"old").unwrap();
    let root = door.host.root().unwrap().attr;
    let directory = door.find("directory").unwrap().attr;
    let file = door.find("directory/file").unwrap();
    shell(door.source.path(), "echo new > directory/file");
    expect(receiver, |notice| *notice == Invalidation::Content { id: file.attr.id });
    shell(door.source.path(), "chmod 600 directory/file");
    expect(receiver, |notice| *notice == Invalidation::Attributes { id: file.attr.id });
    shell(door.source.path(), "echo more >> directory/file; touch directory/fresh");
    expect(receiver, |notice| *notice == Invalidation::Content { id: file.attr.id });
    expect(receiver, is_entry(&directory, "fresh"));
    shell(door.source.path(), "mv directory/fresh moved");
    expect(receiver, is_entry(&directory, "fresh"));
    expect(receiver, is_entry(&root, "moved"));
    shell(door.source.path(), "ln moved directory/linked");
    expect(receiver, is_entry(&directory, "linked"));
    shell(door.source.path(), "rm directory/linked");
    expect(receiver, is_entry(&directory, "linked"));
    shell(door.source.path(), "mkdir directory/below");
    expect(receiver, is_entry(&directory, "below"));
    shell(door.source.path(), "rm -r directory");
    expect(receiver, is_entry(&root, "directory"));
}

#[test]
fn a_whole_file_system_is_watched() {
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() == "fanotify");
    let root = door.root();
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    changes_arrive(&door, &receiver);
    // Our own change comes before one of another process, and is not among the notices.
    door.create(&Caller::ROOT, "ours", 0o644, 0o2).unwrap();
    shell(door.source.path(), "touch theirs");
    let parent = door.host.root().unwrap().attr;
    expect(&receiver, |notice| {
        assert!(!is_entry(&parent, "ours")(notice));
        is_entry(&parent, "theirs")(notice)
    });
    let file = door.find("theirs").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    shell(door.source.path(), "ln theirs again");
    let file = door.find("theirs").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    drop(door);
    // The thread has ended, and with it the sender.
    while receiver.recv().is_ok() {}
}

/// Waits for the notice of a change made just now, after which all earlier ones have come; fails on
/// one of `unwanted`.
fn nothing_about(door: &Door, receiver: &Receiver<Invalidation>, unwanted: FileId) {
    // A name of its own each time: an earlier one may still be among the notices.
    static MARKERS: AtomicUsize = AtomicUsize::new(0);
    let marker = format!("marker{}", MARKERS.fetch_add(1, Ordering::Relaxed));
    shell(door.source.path(), &format!("touch {marker}; rm {marker}"));
    let root = door.host.root().unwrap().attr;
    expect(receiver, |notice| {
        assert_ne!(*notice, Invalidation::Content { id: unwanted });
        is_entry(&root, &marker)(notice)
    });
}

/// Another process writes to the file: that is reported, perhaps twice (at the write and at the
/// close); afterwards all notices have arrived.
fn theirs(door: &Door, receiver: &Receiver<Invalidation>, name: &str, written: FileId) {
    shell(door.source.path(), &format!("echo theirs >> {name}"));
    expect(receiver, |notice| *notice == Invalidation::Content { id: written });
    nothing_about(door, receiver, FileId { fs: 0, ino: 0, generation: 0 });
}

/// How many marks the notification group has.
fn marks(door: &Door) -> usize {
    use std::os::fd::AsRawFd;
    let group = door.host.shared.watch.group().unwrap().as_raw_fd();
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{group}")).unwrap();
    information.lines().filter(|line| line.starts_with("fanotify ") && !line.starts_with("fanotify flags:")).count()
}

#[test]
fn what_is_written_through_us_is_not_reported_but_what_others_write_to_the_same_file_is() {
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() == "fanotify");
    let (entry, created) = door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    let opened = door.open("file", OpenFlags::READ_WRITE.raw()).unwrap();
    let (_, nameless) = {
        let flags = OpenFlags(OpenFlags::READ_WRITE.raw());
        door.host.tmpfile(&Caller::ROOT, &door.root(), 0o600, flags).unwrap()
    };
    for file in [&created, &opened, &nameless] {
        client_writes(file);
    }
    nothing_about(&door, &receiver, entry.attr.id);
    // While it is open for writing through us, and although we have written to it.
    theirs(&door, &receiver, "file", entry.attr.id);
    client_writes(&opened);
    drop((created, opened, nameless));
    nothing_about(&door, &receiver, entry.attr.id);
    theirs(&door, &receiver, "file", entry.attr.id);
    assert_eq!(door.host.coherence(Scope::Attributes(&entry.node, &entry.attr)), Coherence::Watched);
}

#[test]
fn another_name_and_no_name_make_no_difference() {
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() == "fanotify");
    let (entry, file) = door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    door.link("file", "linked").unwrap();
    let linked = door.open("linked", OpenFlags::WRITE.raw()).unwrap();
    client_writes(&linked);
    nothing_about(&door, &receiver, entry.attr.id);
    theirs(&door, &receiver, "linked", entry.attr.id);
    door.rename("file", "moved", 0).unwrap();
    door.unlink("linked").unwrap();
    door.unlink("moved").unwrap();
    client_writes(&file);
    client_writes(&linked);
    nothing_about(&door, &receiver, entry.attr.id);
}

#[test]
fn writes_through_a_link_shown_as_its_target_are_reported_for_the_target() {
    let watch = |options: &mut HostOptions| {
        options.coherence = HostCoherence::Watch;
        options.symlinks = crate::settings::Symlinks::Resolve;
    };
    let door = Door::with(watch, 64);
    let (sender, receiver) = channel();
    door.host.watch(sender);
    needs!(door.host.shared.watch.method() == "fanotify");
    shell(door.source.path(), "echo old > target; ln -s target link");
    let target = door.find("target").unwrap();
    assert_ne!(door.find("link").unwrap().attr.id, target.attr.id);
    nothing_about(&door, &receiver, FileId { fs: 0, ino: 0, generation: 0 });
    let open = door.open("link", OpenFlags::WRITE.raw()).unwrap();
    client_writes(&open);
    expect(&receiver, |notice| *notice == Invalidation::Content { id: target.attr.id });
}

#[test]
fn open_files_leave_no_marks_and_no_descriptors() {
    let (door, receiver) = watched();
    needs!(door.host.shared.watch.method() == "fanotify");
    // One for the file system, one for our own mount of it.
    assert_eq!(marks(&door), 2);
    for round in 0..50 {
        let (_, created) = door.create(&Caller::ROOT, &format!("file{round}"), 0o644, 0o1).unwrap();
        let again = door.open(&format!("file{round}"), OpenFlags::WRITE.raw()).unwrap();
        client_writes(&created);
        client_writes(&again);
        assert_eq!(marks(&door), 2);
        if round % 2 == 0 {
            door.unlink(&format!("file{round}")).unwrap();
        }
    }
    assert_eq!(marks(&door), 2);
    drop((door, receiver));
}

#[test]
fn a_file_opened_through_our_own_mount_is_opened_as_asked() {
    let (door, _receiver) = watched();
    let (_, file) = door.create(&Caller::ROOT, "file", 0o600, 0o1).unwrap();
    file.write(b"0123456789", 0, WriteOrigin::Caller).unwrap();
    // Write-only, as requested.
    assert_eq!(file.read(&mut [0; 4], 0).unwrap_err(), Errno::EBADF);
    let append = door.open("file", OpenFlags::READ_WRITE.raw() | OpenFlags::APPEND).unwrap();
    append.append(b"abc").unwrap();
    let mut buffer = [0; 16];
    assert_eq!(append.read(&mut buffer, 8).unwrap(), 5);
    assert_eq!(&buffer[..5], b"89abc");
    let truncated = door.open("file", OpenFlags::WRITE.raw() | OpenFlags::TRUNC).unwrap();
    truncated.write(b"new", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(native(door.path("file")), b"new");
    // Two open files, not two copies of one: each may be locked by itself.
    let kind = nacre_vfs::LockKind::Write;
    append.flock(LockOwner(1), kind, false).unwrap();
    assert_eq!(truncated.flock(LockOwner(2), kind, false).unwrap_err(), Errno::EAGAIN);
}

#[test]
fn single_directories_are_watched() {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    super::super::watch::start_by_directories(&door.host.shared, sender);
    assert_eq!(door.host.shared.watch.method(), "inotify");
    let root = door.root();
    // The root from the start, every other directory when it is first looked into.
    assert_eq!(
        (door.host.coherence(Scope::Names(&root)), door.host.shared.watch.directory_count()),
        (Coherence::Watched, 1)
    );
    changes_arrive(&door, &receiver);
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    shell(door.source.path(), "echo 1 > file; mkdir untouched");
    let file = door.find("file").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    let untouched = door.find("untouched").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&untouched.node, &untouched.attr)), Coherence::Shared);
    // While we write to it ourselves, our writes must not invalidate our caches.
    let open = door.open("file", 1).unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Shared);
    drop(open);
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    shell(door.source.path(), "ln file again");
    let file = door.find("file").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Shared);
    // A file that leaves for an unwatched directory invalidates everything.
    shell(door.source.path(), "echo 2 > leaving");
    door.find("leaving").unwrap();
    shell(door.source.path(), "mv leaving untouched/");
    expect(&receiver, |notice| *notice == Invalidation::Everything);
}

#[test]
fn a_watcher_that_ends_takes_its_promises_back() {
    let (door, receiver) = watched();
    let root = door.root();
    drop(door.find("missing"));
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    // No receiver is left; the thread notices at the next change.
    drop(receiver);
    for round in 0..2000 {
        shell(door.source.path(), &format!("touch file{round}"));
        if door.host.coherence(Scope::Names(&root)) == Coherence::Shared {
            return;
        }
    }
    panic!("still promised");
}

#[test]
fn watches_of_forgotten_directories_are_given_back() {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    super::super::watch::start_by_directories(&door.host.shared, sender);
    for number in 0..50 {
        fs::create_dir(door.path(format!("d{number}"))).unwrap();
        assert!(door.find(&format!("d{number}/missing")).is_err());
    }
    assert_eq!(door.host.shared.watch.directory_count(), 51);
    door.nodes.lock().unwrap().clear();
    assert_eq!(door.host.shared.watch.directory_count(), 1);
    drop((door, receiver));
}

#[test]
fn without_watching_the_options_decide() {
    for (mode, expected) in
        [(HostCoherence::Exclusive, Coherence::Exclusive), (HostCoherence::Revalidate, Coherence::Shared)]
    {
        let door = Door::with(|options| options.coherence = mode, 64);
        let (sender, receiver) = channel();
        door.host.watch(sender);
        assert!(receiver.recv().is_err());
        let root = door.root();
        let attr = door.getattr(&root).unwrap();
        assert_eq!(door.host.coherence(Scope::Names(&root)), expected);
        assert_eq!(door.host.coherence(Scope::Attributes(&root, &attr)), expected);
    }
    // Configured to watch, but not started yet.
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    assert_eq!(door.host.coherence(Scope::Names(&door.root())), Coherence::Shared);
}
