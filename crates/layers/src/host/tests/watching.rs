//! Changes made by another process arrive; our own do not; what cannot be watched is said to be shared.

use super::*;
use nacre_vfs::{Coherence, Invalidation, Scope};
use std::{
    fs,
    process::Command,
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// As another process: what this one does itself is not reported where the kernel tells who did it.
fn shell(door: &Door, script: &str) {
    let status = Command::new("sh").arg("-c").arg(script).current_dir(door.source.path()).status().unwrap();
    assert!(status.success());
}

fn watched() -> (Door, Receiver<Invalidation>) {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    door.host.watch(sender);
    (door, receiver)
}

/// Waits for a notice; long, because only that it comes is asserted.
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

/// The same for both ways of watching.
fn changes_arrive(door: &Door, receiver: &Receiver<Invalidation>) {
    fs::create_dir(door.path("directory")).unwrap();
    fs::write(door.path("directory/file"), b"old").unwrap();
    let root = door.host.root().unwrap().attr;
    let directory = door.find("directory").unwrap().attr;
    let file = door.find("directory/file").unwrap();
    shell(door, "echo new > directory/file");
    expect(receiver, |notice| *notice == Invalidation::Content { id: file.attr.id });
    shell(door, "chmod 600 directory/file");
    expect(receiver, |notice| *notice == Invalidation::Attributes { id: file.attr.id });
    shell(door, "echo more >> directory/file; touch directory/fresh");
    expect(receiver, |notice| *notice == Invalidation::Content { id: file.attr.id });
    expect(receiver, is_entry(&directory, "fresh"));
    shell(door, "mv directory/fresh moved");
    expect(receiver, is_entry(&directory, "fresh"));
    expect(receiver, is_entry(&root, "moved"));
    shell(door, "ln moved directory/linked");
    expect(receiver, is_entry(&directory, "linked"));
    shell(door, "rm directory/linked");
    expect(receiver, is_entry(&directory, "linked"));
    shell(door, "mkdir directory/below");
    expect(receiver, is_entry(&directory, "below"));
    shell(door, "rm -r directory");
    expect(receiver, is_entry(&root, "directory"));
}

#[test]
fn a_whole_file_system_is_watched() {
    let (door, receiver) = watched();
    if door.host.shared.watch.method() != "fanotify" {
        return;
    }
    let root = door.root();
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    changes_arrive(&door, &receiver);
    // Our own change comes before one of others, and is not among the notices.
    door.create(&Caller::ROOT, "ours", 0o644, 0o2).unwrap();
    shell(&door, "touch theirs");
    let parent = door.host.root().unwrap().attr;
    expect(&receiver, |notice| {
        assert!(!is_entry(&parent, "ours")(notice));
        is_entry(&parent, "theirs")(notice)
    });
    let file = door.find("theirs").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    shell(&door, "ln theirs again");
    let file = door.find("theirs").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    drop(door);
    // The thread is gone and with it the sender.
    while receiver.recv().is_ok() {}
}

#[test]
fn single_directories_are_watched() {
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    let (sender, receiver) = channel();
    super::super::watch::start_by_directories(&door.host.shared, sender);
    assert_eq!(door.host.shared.watch.method(), "inotify");
    let root = door.root();
    // Nothing was looked for in it yet.
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Shared);
    changes_arrive(&door, &receiver);
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    shell(&door, "echo 1 > file; mkdir untouched");
    let file = door.find("file").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    let untouched = door.find("untouched").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&untouched.node, &untouched.attr)), Coherence::Shared);
    // While we write it ourselves, its own writes must not empty anybody's caches.
    let open = door.open("file", 1).unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Shared);
    drop(open);
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Watched);
    shell(&door, "ln file again");
    let file = door.find("file").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Shared);
    // A file that leaves for where nobody looks takes all promises with it.
    shell(&door, "echo 2 > leaving");
    door.find("leaving").unwrap();
    shell(&door, "mv leaving untouched/");
    expect(&receiver, |notice| *notice == Invalidation::Everything);
}

#[test]
fn a_watcher_that_ends_takes_its_promises_back() {
    let (door, receiver) = watched();
    let root = door.root();
    drop(door.find("missing"));
    assert_eq!(door.host.coherence(Scope::Names(&root)), Coherence::Watched);
    // Nobody listens any more; the next change tells the thread.
    drop(receiver);
    for round in 0..2000 {
        shell(&door, &format!("touch file{round}"));
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
    for (mode, expected) in [(HostCoherence::Exclusive, Coherence::Exclusive), (HostCoherence::Revalidate, Coherence::Shared)] {
        let door = Door::with(|options| options.coherence = mode, 64);
        let (sender, receiver) = channel();
        door.host.watch(sender);
        assert!(receiver.recv().is_err());
        let root = door.root();
        let attr = door.getattr(&root).unwrap();
        assert_eq!(door.host.coherence(Scope::Names(&root)), expected);
        assert_eq!(door.host.coherence(Scope::Attributes(&root, &attr)), expected);
    }
    // Asked to watch, but not yet begun.
    let door = Door::with(|options| options.coherence = HostCoherence::Watch, 64);
    assert_eq!(door.host.coherence(Scope::Names(&door.root())), Coherence::Shared);
}
