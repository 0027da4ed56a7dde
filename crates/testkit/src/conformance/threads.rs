//! Checks: calls from many threads at once. What is asserted holds for every interleaving.

use super::Check;
use crate::World;
use crate::world::name;
use nacre_vfs::{Errno, OpenFlags, RenameFlags, SetAttr, WriteOrigin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub(super) const CHECKS: &[Check] = &[
    ("one of many exclusive creations wins", one_creation_wins),
    ("threads in one directory do not disturb each other", one_directory),
    ("renames and look-ups run into each other", renames_and_lookups),
    ("writers to parts of a file keep to their parts", parts_of_a_file),
];

fn one_creation_wins(world: &World) {
    for round in 0..20 {
        let bytes = format!("name{round}").into_bytes();
        let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
        let wins: usize = thread::scope(|scope| {
            let handles: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        world.layer.create(&world.caller, &world.root, name(&bytes), 0o644, flags).map(|_| ())
                    })
                })
                .collect();
            let answers: Vec<_> = handles.into_iter().map(|handle| handle.join().unwrap()).collect();
            assert!(answers.iter().all(|answer| matches!(answer, Ok(()) | Err(Errno::EEXIST))), "{answers:?}");
            answers.iter().filter(|answer| answer.is_ok()).count()
        });
        assert_eq!(wins, 1);
    }
}

fn one_directory(world: &World) {
    thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for index in 0..100 {
                    let bytes = format!("{thread}-{index}").into_bytes();
                    let (made, _) = world.file(&bytes, &bytes);
                    let moved = format!("{thread}-{index}-moved").into_bytes();
                    world
                        .layer
                        .rename(&world.caller, &world.root, name(&bytes), &world.root, name(&moved), RenameFlags(0))
                        .expect("rename");
                    let fresh = world.find(&moved).expect("lookup");
                    world.layer.adopt(&made.node, &fresh.node);
                    assert_eq!(world.content(&made.node), bytes);
                    if index % 2 == 0 {
                        world.layer.unlink(&world.caller, &world.root, name(&moved)).expect("unlink");
                    }
                }
            });
        }
    });
    let mut wanted: Vec<Vec<u8>> = (0..4)
        .flat_map(|thread| (0..100).filter(|i| i % 2 == 1).map(move |i| format!("{thread}-{i}-moved").into_bytes()))
        .collect();
    wanted.sort();
    assert_eq!(world.names(&world.root), wanted);
}

fn renames_and_lookups(world: &World) {
    let (made, _) = world.file(b"a", b"content");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..500 {
                let (from, to) = if round % 2 == 0 { (b"a", b"b") } else { (b"b", b"a") };
                let answer =
                    world.layer.rename(&world.caller, &world.root, name(from), &world.root, name(to), RenameFlags(0));
                if answer.is_err() {
                    done.store(true, Ordering::Release);
                    panic!("rename {round}: {answer:?}");
                }
            }
            done.store(true, Ordering::Release);
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    for bytes in [b"a", b"b"] {
                        match world.find(bytes) {
                            Ok(found) => assert_eq!(found.attr.id, made.attr.id),
                            Err(error) => assert_eq!(error, Errno::ENOENT),
                        }
                    }
                    assert!(world.page(&world.root, 0, true, 10).is_ok());
                }
            });
        }
    });
    assert_eq!(world.id(b"a"), made.attr.id);
}

fn parts_of_a_file(world: &World) {
    let (made, file) = world.file(b"file", b"");
    world.change(&made.node, SetAttr { size: Some(4 * 64 * 1024), ..SetAttr::default() });
    thread::scope(|scope| {
        for part in 0..4u64 {
            let file = &file;
            scope.spawn(move || {
                for block in 0..64u64 {
                    let offset = part * 64 * 1024 + block * 1024;
                    assert_eq!(file.write(&[b'0' + part as u8; 1024], offset, WriteOrigin::Caller), Ok(1024));
                }
            });
        }
    });
    let content = world.content(&made.node);
    assert_eq!(content.len(), 4 * 64 * 1024);
    assert!(content.iter().enumerate().all(|(index, byte)| *byte == b'0' + (index / (64 * 1024)) as u8));
}
