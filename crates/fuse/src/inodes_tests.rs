//! Tests of the inode table: identity, lookup counts, reuse of ids, memory.

use super::*;
use nacre_vfs::{Protection, Time};
use std::sync::Arc;

fn attr(ino: u64, kind: Kind) -> Attr {
    Attr {
        id: FileId { fs: 7, ino, generation: 0 },
        kind,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
        btime: None,
        protection: Protection::None,
    }
}

fn node(number: u64) -> Node {
    Node::new(Arc::new(number))
}

fn table() -> Inodes {
    Inodes::new(node(1), &attr(1, Kind::Directory))
}

#[test]
fn the_root_is_node_one_and_stays() {
    let table = table();
    assert_eq!(table.find(&attr(1, Kind::Directory).id), Some(ROOT));
    assert_eq!(table.register(&node(1), &attr(1, Kind::Directory), Found::below(1)).nodeid, ROOT);
    assert!(table.forget(ROOT, 1000).is_none());
    assert!(table.node(ROOT).is_some());
    assert_eq!(table.len(), 1);
}

#[test]
fn one_file_has_one_node_id_until_its_last_lookup_is_forgotten() {
    let table = table();
    let first = node(5);
    let one = table.register(&first, &attr(5, Kind::File), Found::below(1));
    assert!(one.known.is_none());
    let again = table.register(&first, &attr(5, Kind::File), Found::below(1));
    assert!(again.known.is_none(), "the same node needs no adoption");
    let other = table.register(&node(5), &attr(5, Kind::File), Found::below(1));
    assert_eq!((one.nodeid, one.nodeid), (again.nodeid, other.nodeid));
    assert!(other.known.is_some_and(|known| known.same(&first)));
    assert!(table.forget(one.nodeid, 2).is_none());
    assert!(table.node(one.nodeid).is_some());
    assert!(table.forget(one.nodeid, 1).is_some_and(|gone| gone.node.same(&first)));
    assert!(table.node(one.nodeid).is_none());
    assert_eq!(table.find(&attr(5, Kind::File).id), None);
    assert!(table.forget(one.nodeid, 1).is_none(), "a node id is forgotten once");
}

#[test]
fn a_node_id_never_means_two_files() {
    let table = table();
    let mut seen = std::collections::HashSet::new();
    for ino in 10..2000 {
        let id = table.register(&node(ino), &attr(ino, Kind::File), Found::below(1)).nodeid;
        assert!(seen.insert(id), "{id:#x} was used before");
        if ino % 3 != 0 {
            table.forget(id, 1);
        }
    }
}

#[test]
fn a_number_reused_by_another_type_is_another_file() {
    let table = table();
    let file = table.register(&node(9), &attr(9, Kind::File), Found::below(1)).nodeid;
    let directory = table.register(&node(9), &attr(9, Kind::Directory), Found::below(1)).nodeid;
    assert_ne!(file, directory);
    assert_eq!(table.find(&attr(9, Kind::File).id), Some(directory));
    assert!(table.forget(file, 1).is_some());
    assert_eq!(table.find(&attr(9, Kind::File).id), Some(directory));
    assert!(table.forget(directory, 1).is_some());
    assert_eq!(table.len(), 1);
}

#[test]
fn directories_know_their_parent() {
    let table = table();
    let id = table.register(&node(9), &attr(9, Kind::Directory), Found::below(33)).nodeid;
    assert_eq!(table.directory(id).map(|(_, own, parent)| (own, parent)), Some((9, 33)));
    table.register(&node(9), &attr(9, Kind::Directory), Found::below(44));
    assert_eq!(table.directory(id).map(|(_, _, parent)| parent), Some(44));
}

#[test]
fn every_file_is_visited_once() {
    let table = table();
    let mut expected: Vec<u64> =
        (10..5000).map(|ino| table.register(&node(ino), &attr(ino, Kind::File), Found::below(1)).nodeid).collect();
    expected.push(ROOT);
    let mut seen = Vec::new();
    table.for_each(|id| seen.push(id));
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected);
}

#[test]
fn memory_goes_with_the_files() {
    let table = table();
    let ids: Vec<u64> =
        (10..100_000).map(|ino| table.register(&node(ino), &attr(ino, Kind::File), Found::below(1)).nodeid).collect();
    for id in ids {
        assert!(table.forget(id, 1).is_some());
    }
    assert_eq!(table.len(), 1);
    let left: usize = table.shards.iter().map(|shard| shard.lock().chunks.iter().flatten().count()).sum();
    assert!(left <= SHARDS + 1, "{left} chunks are kept for the root, and one for each shard");
    let buckets: usize = table.shards.iter().map(|shard| shard.lock().places.capacity()).sum();
    assert!(buckets < SHARDS * 2048, "{buckets} places in the hash tables");
    assert!(table.register(&node(5), &attr(5, Kind::File), Found::below(1)).nodeid != ROOT);
}

#[test]
fn a_million_files_stay_small() {
    let slot = size_of::<Slot>();
    assert!(slot <= 72, "{slot} bytes a slot");
    let table = table();
    let shared = node(0);
    for ino in 10..1_000_010 {
        table.register(&shared, &attr(ino, Kind::File), Found::below(1));
    }
    let bytes: usize = table
        .shards
        .iter()
        .map(|shard| {
            let shard = shard.lock();
            let chunks: usize = shard
                .chunks
                .iter()
                .flatten()
                .map(|chunk| chunk.slots.capacity() * slot + chunk.free.capacity() * 2)
                .sum();
            chunks + shard.places.allocation_size() + shard.chunks.capacity() * size_of::<Option<Chunk>>()
        })
        .sum();
    assert!(bytes < 90_000_000, "{} bytes a file", bytes / 1_000_000);
}
