//! Listings in pieces, from anywhere, with attributes and while names come and go.

use super::*;
use nacre_vfs::{DirEntry, DirSink};
use std::{collections::BTreeSet, fs, sync::atomic::Ordering};

/// A sink that takes a number of entries.
struct Taker {
    room: usize,
    names: Vec<String>,
    last: u64,
    entries: usize,
    kinds: Vec<Option<Kind>>,
}

impl Taker {
    fn new(room: usize) -> Taker {
        Taker { room, names: Vec::new(), last: 0, entries: 0, kinds: Vec::new() }
    }
}

impl DirSink for Taker {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.room == 0 {
            return false;
        }
        assert_ne!(entry.next, 0);
        assert!(i64::try_from(entry.next).is_ok());
        self.room -= 1;
        self.names.push(String::from_utf8(entry.name.bytes().to_vec()).unwrap());
        self.last = entry.next;
        self.kinds.push(entry.kind);
        if let Some(found) = entry.entry {
            assert_eq!(found.attr.id.ino, entry.ino);
            assert_eq!(Some(found.attr.kind), entry.kind);
            self.entries += 1;
        }
        true
    }
}

fn list(door: &Door, node: &Node, from: u64, room: usize, attributes: bool) -> Taker {
    let mut sink = Taker::new(room);
    door.host.readdir(&Caller::ROOT, node, from, attributes, &mut sink).unwrap();
    sink
}

fn filled(count: usize) -> Door {
    let door = Door::new();
    for number in 0..count {
        fs::write(door.path(format!("file-{number:05}")), b"").unwrap();
    }
    door
}

#[test]
fn a_listing_in_pieces_is_complete_and_without_repetition() {
    let door = filled(5000);
    let root = door.root();
    for (piece, attributes) in [(1, false), (7, true), (1000, false), (100_000, true)] {
        let mut from = 0;
        let mut names = BTreeSet::new();
        loop {
            let part = list(&door, &root, from, piece, attributes);
            if part.names.is_empty() {
                break;
            }
            assert_eq!(part.entries, if attributes { part.names.len() } else { 0 });
            for name in part.names {
                assert!(names.insert(name));
            }
            from = part.last;
            if piece == 1 && names.len() == 600 {
                break;
            }
        }
        assert_eq!(names.len(), if piece == 1 { 600 } else { 5000 });
    }
}

#[test]
fn going_ahead_changes_nothing() {
    let door = filled(5000);
    door.host.shared.listings.always_ahead.store(true, Ordering::Relaxed);
    let root = door.root();
    let (mut names, mut from) = (Vec::new(), 0);
    loop {
        let piece = list(&door, &root, from, 100, true);
        if piece.names.is_empty() {
            break;
        }
        if from == 0 {
            // The thread examines the remainder of the first buffer while the caller waits.
            while door.host.shared.listings.examined_ahead() < 500 {
                std::thread::yield_now();
            }
        }
        // A file that vanishes after it was examined is not listed.
        if names.len() == 500 {
            fs::remove_file(door.path("file-04999")).unwrap();
        }
        from = piece.last;
        names.extend(piece.names);
    }
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= 4999, "{}", names.len());
}

#[test]
fn every_position_can_be_returned_to() {
    let door = filled(300);
    let root = door.root();
    let mut positions = vec![0];
    let mut names = Vec::new();
    loop {
        let part = list(&door, &root, *positions.last().unwrap(), 1, false);
        let Some(name) = part.names.first() else { break };
        names.push(name.clone());
        positions.push(part.last);
    }
    assert_eq!(names.len(), 300);
    for at in [299, 0, 150, 151, 7, 298] {
        let part = list(&door, &root, positions[at], 2, at % 2 == 0);
        assert_eq!(part.names, names[at..(at + 2).min(300)]);
    }
    assert!(list(&door, &root, positions[300], 10, false).names.is_empty());
    // Another mount of the same directory understands them.
    let other = Host::open(HostOptions::new(door.source.path())).unwrap();
    let mut sink = Taker::new(1);
    other.readdir(&Caller::ROOT, &other.root().unwrap().node, positions[42], false, &mut sink).unwrap();
    assert_eq!(sink.names, names[42..43]);
}

#[test]
fn counted_positions_serve_the_same_listing() {
    let door = filled(3000);
    let root = door.root();
    let device = root.get::<HostNode>().unwrap().device();
    let expected: BTreeSet<_> = list(&door, &root, 0, usize::MAX, false).names.into_iter().collect();
    door.host.shared.listings.count_positions(device);
    let mut from = 0;
    let mut names = BTreeSet::new();
    loop {
        let part = list(&door, &root, from, 700, false);
        if part.names.is_empty() {
            break;
        }
        names.extend(part.names);
        from = part.last;
    }
    assert_eq!(names, expected);
    // Records are counted, `.` and `..` among them, wherever the file system puts those.
    assert!(list(&door, &root, 3002, 10, true).names.is_empty());
    assert!((7..=9).contains(&list(&door, &root, 3002 - 9, 10, true).names.len()));
}

#[test]
fn what_appears_and_vanishes_meanwhile_does_no_harm() {
    let door = filled(2000);
    let root = door.root();
    let first = list(&door, &root, 0, 10, true);
    for number in 0..2000 {
        fs::remove_file(door.path(format!("file-{number:05}"))).unwrap();
    }
    fs::write(door.path("new"), b"").unwrap();
    let mut from = first.last;
    loop {
        let part = list(&door, &root, from, 100, true);
        assert_eq!(part.entries, part.names.len());
        if part.names.is_empty() {
            break;
        }
        from = part.last;
    }
    assert_eq!(list(&door, &root, 0, 10, true).names, ["new"]);
}

#[test]
fn kinds_are_told_and_listed_nodes_are_good() {
    let door = Door::new();
    fs::create_dir(door.path("directory")).unwrap();
    fs::write(door.path("file"), b"12345").unwrap();
    std::os::unix::fs::symlink("nowhere", door.path("link")).unwrap();
    struct All(Vec<(Vec<u8>, Entry)>);
    impl DirSink for All {
        fn push(&mut self, entry: DirEntry<'_>) -> bool {
            self.0.push((entry.name.bytes().to_vec(), entry.entry.unwrap()));
            true
        }
    }
    let mut all = All(Vec::new());
    door.host.readdir(&Caller::ROOT, &door.root(), 0, true, &mut all).unwrap();
    assert_eq!(all.0.len(), 3);
    for (name, entry) in all.0 {
        let kind = match &name[..] {
            b"directory" => Kind::Directory,
            b"file" => Kind::File,
            _ => Kind::Symlink,
        };
        assert_eq!(entry.attr.kind, kind);
        assert_eq!(door.getattr(&entry.node).unwrap(), entry.attr);
        match kind {
            Kind::Symlink => assert_eq!(door.host.readlink(&Caller::ROOT, &entry.node).unwrap(), b"nowhere"),
            Kind::File => drop(door.host.open(&Caller::ROOT, &entry.node, OpenFlags::READ).unwrap()),
            _ => assert!(list(&door, &entry.node, 0, 10, true).names.is_empty()),
        }
    }
    let file = door.find("file").unwrap().node;
    let mut sink = Taker::new(1);
    assert_eq!(door.host.readdir(&Caller::ROOT, &file, 0, false, &mut sink), Err(Errno::ENOTDIR));
}

#[test]
fn a_file_that_is_not_wanted_is_not_examined() {
    /// A sink that wants attributes of all files but one.
    struct Choosy(Vec<(String, Option<Kind>, bool)>);
    impl DirSink for Choosy {
        fn push(&mut self, entry: DirEntry<'_>) -> bool {
            self.0.push((entry.name.to_string(), entry.kind, entry.entry.is_some()));
            true
        }

        fn wants_file(&self, name: Name<'_>) -> bool {
            name.bytes() != b"file-00001"
        }
    }
    let door = filled(3);
    let mut sink = Choosy(Vec::new());
    door.host.readdir(&Caller::ROOT, &door.root(), 0, true, &mut sink).unwrap();
    sink.0.sort_by(|one, other| one.0.cmp(&other.0));
    let listed = |name: &str, found| (name.to_owned(), Some(Kind::File), found);
    assert_eq!(sink.0, [listed("file-00000", true), listed("file-00001", false), listed("file-00002", true)]);
}

#[test]
fn descriptors_are_not_leaked() {
    let door = filled(50);
    for number in 0..100 {
        door.mkdir(&Caller::ROOT, &format!("d{number}"), 0o755).unwrap();
        let node = door.find(&format!("d{number}")).unwrap().node;
        fs::write(door.path(format!("d{number}/a")), b"").unwrap();
        fs::write(door.path(format!("d{number}/b")), b"").unwrap();
        // Abandoned in the middle.
        assert_eq!(list(&door, &node, 0, 1, true).names.len(), 1);
    }
    assert!(door.host.shared.listings.len() <= 16);
}

#[test]
fn a_listing_never_goes_on_with_what_was_read_before_it_began() {
    let door = filled(300);
    let root = door.root();
    let whole = list(&door, &root, 0, 1000, false).names;
    // Abandoned in the middle, like by a program whose buffer was smaller than the answer.
    let left = list(&door, &root, 0, 100, false);
    whole[150..].iter().for_each(|name| fs::remove_file(door.path(name)).unwrap());
    let again = list(&door, &root, 0, 100, false);
    assert_eq!((&again.names[..], again.last), (&whole[..100], left.last));
    assert_eq!(list(&door, &root, again.last, 1000, false).names, whole[100..150]);
}
