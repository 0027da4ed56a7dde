//! Checks: listings, whole and in pages, with and without attributes, while names change.

use super::Check;
use crate::World;
use crate::world::name;
use nacre_vfs::{Kind, RenameFlags};
use std::collections::BTreeSet;

pub(super) const CHECKS: &[Check] = &[
    ("an empty directory lists nothing", empty),
    ("each name is listed once, whatever the page", each_name_once),
    ("a listing goes on where any entry says", goes_on),
    ("attributes in a listing are those of a look-up", attributes_agree),
    ("removal while listing loses nothing else", removal_while_listing),
    ("removal in batches empties a directory", removal_in_batches),
    ("a listing ends though names come and move", ends_among_new_names),
    ("a listing from the start shows what came since", begins_anew),
];

fn filled(world: &World, count: usize) -> (nacre_vfs::Node, Vec<Vec<u8>>) {
    let directory = world.directory(b"directory");
    let mut names: Vec<Vec<u8>> = (0..count).map(|index| format!("name-{index:04}").into_bytes()).collect();
    for bytes in &names {
        world.file_in(&directory, bytes, b"");
    }
    names.sort();
    (directory, names)
}

fn empty(world: &World) {
    let directory = world.directory(b"directory");
    assert_eq!(world.page(&directory, 0, false, 10).expect("readdir").len(), 0);
    assert_eq!(world.page(&directory, 0, true, 10).expect("readdir").len(), 0);
}

fn each_name_once(world: &World) {
    let (directory, names) = filled(world, 500);
    for (room, attributes) in [(1, false), (7, true), (100, false), (1_000, true)] {
        let mut listed: Vec<Vec<u8>> =
            world.list(&directory, attributes, room).into_iter().map(|listed| listed.name).collect();
        listed.sort();
        assert_eq!(listed, names, "pages of {room}");
    }
}

fn goes_on(world: &World) {
    let (directory, _) = filled(world, 50);
    let whole = world.list(&directory, false, 1_000);
    let positions: BTreeSet<u64> = whole.iter().map(|listed| listed.next).collect();
    assert_eq!(positions.len(), whole.len(), "positions are different from each other");
    for (index, listed) in whole.iter().enumerate() {
        let rest: Vec<_> =
            world.page(&directory, listed.next, false, 1_000).expect("readdir").into_iter().map(|l| l.name).collect();
        let wanted: Vec<_> = whole[index + 1..].iter().map(|l| l.name.clone()).collect();
        assert_eq!(rest, wanted, "after {}", listed.name.escape_ascii());
    }
}

fn attributes_agree(world: &World) {
    let directory = world.directory(b"directory");
    world.file_in(&directory, b"file", b"content");
    world.directory_in(&directory, b"inner");
    world.layer.symlink(&world.caller, &directory, name(b"link"), b"target").expect("symlink");
    world.layer.mknod(&world.caller, &directory, name(b"fifo"), Kind::Fifo, 0o644, (0, 0)).expect("mknod");
    let listed = world.list(&directory, true, 100);
    assert_eq!(listed.len(), 4);
    for item in listed {
        let found = world.find_in(&directory, &item.name).expect("lookup");
        assert_eq!(item.ino, found.attr.id.ino);
        assert!(item.kind.is_none_or(|kind| kind == found.attr.kind));
        let entry = item.entry.expect("attributes were asked for and the file exists");
        assert_eq!(entry.attr, found.attr);
        assert_eq!(world.attr(&entry.node).id, found.attr.id, "the node of a listing works");
    }
}

fn removal_while_listing(world: &World) {
    let (directory, names) = filled(world, 200);
    let (mut seen, mut from) = (Vec::new(), 0);
    loop {
        let page = world.page(&directory, from, false, 10).expect("readdir");
        let Some(last) = page.last() else { break };
        from = last.next;
        for (index, listed) in page.into_iter().enumerate() {
            if index % 2 == 0 {
                world.layer.unlink(&world.caller, &directory, name(&listed.name)).expect("unlink");
            }
            seen.push(listed.name);
        }
        assert!(seen.len() <= 1_000, "the listing does not end");
    }
    seen.sort();
    assert_eq!(seen, names, "each name once, also those removed after they were listed");
    assert_eq!(world.names(&directory).len(), 100);
}

fn removal_in_batches(world: &World) {
    // Like `rm -rf`: list, remove all of the page, continue from the same position or from the
    // start.
    let (directory, _) = filled(world, 300);
    let mut rounds = 0;
    loop {
        let page = world.page(&directory, 0, false, 40).expect("readdir");
        if page.is_empty() {
            break;
        }
        for listed in page {
            world.layer.unlink(&world.caller, &directory, name(&listed.name)).expect("unlink");
        }
        rounds += 1;
        assert!(rounds < 100, "removed names are listed again");
    }
    world.layer.rmdir(&world.caller, &world.root, name(b"directory")).expect("rmdir");
}

fn ends_among_new_names(world: &World) {
    // Like `for name in *; do mv $name ...; cp ...; done` by way of readdir(3).
    for attributes in [false, true] {
        let (directory, names) = filled(world, 200);
        let (mut seen, mut from) = (Vec::new(), 0);
        loop {
            let page = world.page(&directory, from, attributes, 10).expect("readdir");
            let Some(last) = page.last() else { break };
            from = last.next;
            for listed in page {
                let (moved, made) = (format!("moved-{}", seen.len()), format!("made-{}", seen.len()));
                let flags = RenameFlags::default();
                world
                    .layer
                    .rename(&world.caller, &directory, name(&listed.name), &directory, name(moved.as_bytes()), flags)
                    .expect("rename");
                world.file_in(&directory, made.as_bytes(), b"");
                seen.push(listed.name);
            }
            // A file system in which new names may be placed before or after old ones shows some of
            // them.
            assert!(seen.len() <= names.len() * 10, "the listing does not end");
        }
        let mut old: Vec<Vec<u8>> = seen.into_iter().filter(|seen| seen.starts_with(b"name-")).collect();
        old.sort();
        assert_eq!(old, names, "each name that was there is shown once");
        for name_now in world.names(&directory) {
            world.layer.unlink(&world.caller, &directory, name(&name_now)).expect("unlink");
        }
        world.layer.rmdir(&world.caller, &world.root, name(b"directory")).expect("rmdir");
    }
}

fn begins_anew(world: &World) {
    let (directory, names) = filled(world, 60);
    let first = world.page(&directory, 0, false, 10).expect("readdir");
    world.file_in(&directory, b"name-new", b"");
    let moved = &names[59];
    world
        .layer
        .rename(&world.caller, &directory, name(moved), &directory, name(b"name-other"), RenameFlags::default())
        .expect("rename");
    let mut now = names.clone();
    now.pop();
    now.extend([b"name-new".to_vec(), b"name-other".to_vec()]);
    // A listing that begins now, or rewinds, shows all; an earlier listing continues independently.
    assert_eq!(world.names(&directory), now);
    let (mut seen, mut from) = (Vec::new(), 0);
    for page in std::iter::once(first).chain(std::iter::repeat_n(Vec::new(), 1_000)) {
        let page = if page.is_empty() { world.page(&directory, from, false, 10).expect("readdir") } else { page };
        let Some(last) = page.last() else { break };
        from = last.next;
        seen.extend(page.into_iter().map(|listed| listed.name));
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.iter().filter(|seen| names[..59].contains(seen)).count(), 59, "all that stayed");
    assert_eq!(world.names(&directory), now);
}
