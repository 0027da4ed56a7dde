//! Checks: renaming, replacing, exchanging, and nodes whose names move.

use super::Check;
use crate::world::name;
use crate::{World, conformance::lacks};
use nacre_vfs::{Errno, Node, RenameFlags, Result};

pub(super) const CHECKS: &[Check] = &[
    ("a file is renamed", file_is_renamed),
    ("a rename replaces its target", replaces),
    ("a rename keeps to kinds", keeps_to_kinds),
    ("a rename can be told not to replace", no_replace),
    ("two names are exchanged", exchange),
    ("a directory does not move into itself", not_into_itself),
    ("a rename between two names of one file does nothing", between_two_names),
    ("a moved directory keeps its nodes usable", moved_directory),
    ("a missing source is ENOENT", missing_source),
];

fn rename(world: &World, from: (&Node, &[u8]), to: (&Node, &[u8]), flags: u32) -> Result<()> {
    world.layer.rename(&world.caller, from.0, name(from.1), to.0, name(to.1), RenameFlags(flags))
}

fn file_is_renamed(world: &World) {
    let directory = world.directory(b"directory");
    let (made, _) = world.file(b"a", b"content");
    rename(world, (&world.root, b"a"), (&world.root, b"b"), 0).expect("rename");
    assert!(!world.exists(b"a"));
    assert_eq!(world.id(b"b"), made.attr.id);
    rename(world, (&world.root, b"b"), (&directory, b"c"), 0).expect("rename");
    assert!(!world.exists(b"b"));
    let found = world.find_in(&directory, b"c").expect("lookup");
    assert_eq!(found.attr.id, made.attr.id);
    assert_eq!(world.content(&found.node), b"content");
    rename(world, (&directory, b"c"), (&directory, b"c"), 0).expect("onto itself");
    assert_eq!(world.names(&directory), [b"c".to_vec()]);
}

fn replaces(world: &World) {
    let (a, _) = world.file(b"a", b"new");
    world.file(b"b", b"old");
    rename(world, (&world.root, b"a"), (&world.root, b"b"), 0).expect("rename");
    assert_eq!(world.id(b"b"), a.attr.id);
    assert_eq!(world.content(&world.find(b"b").unwrap().node), b"new");
    let inner = world.directory(b"d1");
    world.file_in(&inner, b"inside", b"");
    world.directory(b"d2");
    rename(world, (&world.root, b"d1"), (&world.root, b"d2"), 0).expect("over an empty directory");
    assert_eq!(world.names(&world.find(b"d2").unwrap().node), [b"inside".to_vec()]);
    assert!(!world.exists(b"d1"));
}

fn keeps_to_kinds(world: &World) {
    world.file(b"file", b"");
    world.directory(b"empty");
    let full = world.directory(b"full");
    world.file_in(&full, b"inside", b"");
    assert_eq!(rename(world, (&world.root, b"file"), (&world.root, b"empty"), 0), Err(Errno::EISDIR));
    assert_eq!(rename(world, (&world.root, b"empty"), (&world.root, b"file"), 0), Err(Errno::ENOTDIR));
    assert_eq!(rename(world, (&world.root, b"empty"), (&world.root, b"full"), 0), Err(Errno::ENOTEMPTY));
    assert_eq!(world.names(&world.root), [b"empty".to_vec(), b"file".to_vec(), b"full".to_vec()]);
}

fn no_replace(world: &World) {
    let (a, _) = world.file(b"a", b"");
    let (b, _) = world.file(b"b", b"");
    let answer = rename(world, (&world.root, b"a"), (&world.root, b"b"), RenameFlags::NOREPLACE);
    if lacks("RENAME_NOREPLACE", &answer) {
        return;
    }
    assert_eq!(answer, Err(Errno::EEXIST));
    assert_eq!((world.id(b"a"), world.id(b"b")), (a.attr.id, b.attr.id));
    rename(world, (&world.root, b"a"), (&world.root, b"c"), RenameFlags::NOREPLACE).expect("to a free name");
    assert_eq!(world.id(b"c"), a.attr.id);
}

fn exchange(world: &World) {
    let (a, _) = world.file(b"a", b"");
    let directory = world.directory(b"d");
    let answer = rename(world, (&world.root, b"a"), (&world.root, b"d"), RenameFlags::EXCHANGE);
    if lacks("RENAME_EXCHANGE", &answer) || answer == Err(Errno::EINVAL) {
        return;
    }
    answer.expect("exchange");
    // A caller looks moved names up and informs the layer, before it uses the known nodes again.
    let (of_a, of_d) = (world.find(b"d").expect("lookup"), world.find(b"a").expect("lookup"));
    world.layer.adopt(&a.node, &of_a.node);
    world.layer.adopt(&directory, &of_d.node);
    assert_eq!(of_a.attr.id, a.attr.id);
    assert_eq!(of_d.attr.id, world.attr(&directory).id);
    let missing = rename(world, (&world.root, b"a"), (&world.root, b"missing"), RenameFlags::EXCHANGE);
    assert_eq!(missing, Err(Errno::ENOENT));
    let both = rename(world, (&world.root, b"a"), (&world.root, b"d"), RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
    assert_eq!(both, Err(Errno::EINVAL));
}

fn not_into_itself(world: &World) {
    let outer = world.directory(b"outer");
    let inner = world.directory_in(&outer, b"inner");
    assert_eq!(rename(world, (&world.root, b"outer"), (&outer, b"x"), 0), Err(Errno::EINVAL));
    assert_eq!(rename(world, (&world.root, b"outer"), (&inner, b"x"), 0), Err(Errno::EINVAL));
    assert_eq!(world.names(&world.root), [b"outer".to_vec()]);
}

fn between_two_names(world: &World) {
    let (made, _) = world.file(b"one", b"");
    let linked = world.layer.link(&world.caller, &made.node, None, &world.root, name(b"two"));
    if lacks("hard links", &linked) {
        return;
    }
    rename(world, (&world.root, b"one"), (&world.root, b"two"), 0).expect("rename");
    assert_eq!(world.names(&world.root), [b"one".to_vec(), b"two".to_vec()]);
}

fn moved_directory(world: &World) {
    let from = world.directory(b"from");
    let inner = world.directory_in(&from, b"inner");
    let (file, _) = world.file_in(&inner, b"file", b"content");
    let elsewhere = world.directory(b"elsewhere");
    rename(world, (&world.root, b"from"), (&elsewhere, b"to"), 0).expect("rename");
    let fresh = world.find_in(&elsewhere, b"to").expect("lookup");
    world.layer.adopt(&from, &fresh.node);
    // Nodes known from before still work, at every depth.
    assert_eq!(world.content(&file.node), b"content");
    assert_eq!(world.find_in(&inner, b"file").expect("lookup").attr.id, file.attr.id);
    world.file_in(&inner, b"later", b"");
    world.file_in(&from, b"beside", b"");
    assert_eq!(world.names(&fresh.node), [b"beside".to_vec(), b"inner".to_vec()]);
    assert_eq!(world.names(&inner), [b"file".to_vec(), b"later".to_vec()]);
    let taken = world.layer.mkdir(&world.caller, &world.root, name(b"from"), 0o755).expect("the old name is free");
    assert!(world.names(&taken.node).is_empty());
    assert_eq!(world.names(&from).len(), 2, "and does not become the moved directory");
}

fn missing_source(world: &World) {
    world.file(b"b", b"");
    assert_eq!(rename(world, (&world.root, b"a"), (&world.root, b"b"), 0), Err(Errno::ENOENT));
    assert_eq!(rename(world, (&world.root, b"a"), (&world.root, b"c"), RenameFlags::EXCHANGE), Err(Errno::ENOENT));
    assert!(world.exists(b"b"));
}
