//! Directories bind-mounted at several paths below the source: each is a directory of its own at
//! each path, each file is one file.

use super::*;
use nacre_testkit::needs;
use nacre_vfs::{Coherence, Invalidation, Scope};
use std::{
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// The bind mount is declared last, so that it is dropped first.
fn tree(coherence: HostCoherence) -> (Door, Bind) {
    let door = Door::with(|options| options.coherence = coherence, 64);
    shell(door.source.path(), "mkdir -p a/below b; echo content > a/below/file");
    let bind = Bind::new(&door.path("a"), &door.path("b"));
    (door, bind)
}

/// Waits for these notices; with a long time limit, as only their arrival is asserted.
fn expect(receiver: &Receiver<Invalidation>, mut wanted: Vec<Invalidation>) {
    while !wanted.is_empty() {
        let notice = receiver.recv_timeout(Duration::from_secs(20)).expect("a notice never came");
        wanted.retain(|it| *it != notice);
    }
}

#[test]
fn a_directory_bound_at_two_places_is_two_and_its_files_are_one() {
    needs!(is_root());
    let (door, _bind) = tree(HostCoherence::Revalidate);
    let (a, b) = (door.find("a/below").unwrap(), door.find("b/below").unwrap());
    assert_eq!(a.attr.id.ino, b.attr.id.ino);
    assert_ne!(a.attr.id, b.attr.id);
    assert_ne!(door.find("a").unwrap().attr.id, door.find("b").unwrap().attr.id);
    let place = |entry: &Entry| entry.node.get::<HostNode>().unwrap().place().unwrap();
    // Seeing the other path does not move this one.
    door.find("b/below").unwrap();
    assert!(std::ptr::eq(&*place(&a).parent, door.find("a").unwrap().node.get::<HostNode>().unwrap()));
    assert_eq!(door.getattr(&a.node).unwrap().id, a.attr.id);
    assert_eq!(door.getattr(&b.node).unwrap().id, b.attr.id);
    let (one, other) = (door.find("a/below/file").unwrap(), door.find("b/below/file").unwrap());
    assert_eq!(one.attr.id, other.attr.id);
    assert!(one.node.same(&other.node));
    // Natively, too, names do not move from mount to mount.
    assert_eq!(door.rename("a/below/file", "b/below/moved", 0), Err(Errno::EXDEV));
    door.rename("b/below/file", "b/moved", 0).unwrap();
    assert_eq!(native(door.path("a/moved")), b"content\n");
}

#[test]
fn the_source_bound_inside_itself_can_be_used() {
    needs!(is_root());
    let door = Door::new();
    shell(door.source.path(), "mkdir -p inner/deeper; echo content > file");
    let _bind = Bind::new(door.source.path(), &door.path("inner"));
    let inner = door.find("inner").unwrap();
    assert_eq!(inner.attr.id.ino, door.root().get::<HostNode>().unwrap().id().ino);
    assert_ne!(inner.attr.id, door.host.root().unwrap().attr.id);
    assert_eq!(door.find("inner/file").unwrap().attr.id, door.find("file").unwrap().attr.id);
    // The bind mount shows the directory's content; inside it, the directory is empty, as nothing
    // is mounted there.
    assert!(door.find("inner/inner/deeper").is_ok());
    assert_eq!(door.find("inner/deeper").err(), Some(Errno::ENOENT));
    door.create(&Caller::ROOT, "inner/inner/new", 0o644, 0o2).unwrap();
    door.mkdir(&Caller::ROOT, "inner/made", 0o755).unwrap();
    assert!(door.find("made").is_ok());
    assert_eq!(door.getattr(&inner.node).unwrap().id, inner.attr.id);
}

#[test]
fn a_change_at_one_place_reaches_all_identities() {
    needs!(is_root());
    let (door, _bind) = tree(HostCoherence::Watch);
    let (sender, receiver) = channel();
    door.host.watch(sender);
    needs!(door.host.shared.watch.method() == "fanotify");
    let (a, b) = (door.find("a/below").unwrap().attr.id, door.find("b/below").unwrap().attr.id);
    let entry = |parent, name: &str| Invalidation::Entry { parent, name: name.as_bytes().into() };
    shell(door.source.path(), "touch a/below/theirs; chmod 700 b/below");
    expect(
        &receiver,
        vec![
            entry(a, "theirs"),
            entry(b, "theirs"),
            Invalidation::Attributes { id: a },
            Invalidation::Attributes { id: b },
        ],
    );
    // Our own change through one path invalidates the other.
    door.create(&Caller::ROOT, "a/below/ours", 0o644, 0o2).unwrap();
    expect(&receiver, vec![entry(b, "ours")]);
    door.unlink("b/below/ours").unwrap();
    expect(&receiver, vec![entry(a, "ours")]);
    door.setattr("b/below", SetAttr { mode: Some(0o711), ..SetAttr::default() }).unwrap();
    expect(&receiver, vec![Invalidation::Attributes { id: a }]);
}

#[test]
fn the_same_where_directories_are_watched_one_by_one() {
    needs!(is_root());
    let (door, _bind) = tree(HostCoherence::Watch);
    let (sender, receiver) = channel();
    super::super::watch::start_by_directories(&door.host.shared, sender);
    let (a, b) = (door.find("a/below").unwrap(), door.find("b/below").unwrap());
    assert!(door.find("a/below/none").is_err() && door.find("b/below/none").is_err());
    door.create(&Caller::ROOT, "a/below/ours", 0o644, 0o2).unwrap();
    let entry = |parent| Invalidation::Entry { parent, name: b"ours".as_slice().into() };
    expect(&receiver, vec![entry(a.attr.id), entry(b.attr.id)]);
}

#[test]
fn an_exclusive_source_promises_nothing_of_directories_with_two_places() {
    needs!(is_root());
    let (door, _bind) = tree(HostCoherence::Exclusive);
    let a = door.find("a/below").unwrap();
    assert_eq!(door.host.coherence(Scope::Names(&a.node)), Coherence::Exclusive);
    let b = door.find("b/below").unwrap();
    for directory in [&a, &b] {
        assert_eq!(door.host.coherence(Scope::Names(&directory.node)), Coherence::Shared);
        assert_eq!(door.host.coherence(Scope::Attributes(&directory.node, &directory.attr)), Coherence::Shared);
    }
    let file = door.find("b/below/file").unwrap();
    assert_eq!(door.host.coherence(Scope::Attributes(&file.node, &file.attr)), Coherence::Exclusive);
}
