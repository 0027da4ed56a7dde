//! Checks: extended attributes.

use super::Check;
use crate::{World, conformance::lacks};
use nacre_vfs::{Errno, Node, XattrFlags};

pub(super) const CHECKS: &[Check] = &[
    ("an extended attribute is kept", kept),
    ("creation and replacement keep to their words", create_and_replace),
    ("sizes are told and checked", sizes),
    ("extended attributes are listed and removed", listed_and_removed),
    ("directories have extended attributes", on_directories),
];

fn set(world: &World, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<(), Errno> {
    world.layer.setxattr(&world.caller, node, name, value, flags)
}

fn get(world: &World, node: &Node, name: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0; 65_536];
    let size = world.layer.getxattr(&world.caller, node, name, &mut buffer)?;
    buffer.truncate(size);
    Ok(buffer)
}

fn names(world: &World, node: &Node) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 65_536];
    let size = world.layer.listxattr(&world.caller, node, &mut buffer).expect("listxattr");
    let mut names: Vec<Vec<u8>> =
        buffer[..size].split(|byte| *byte == 0).map(<[u8]>::to_vec).filter(|n| n.starts_with(b"user.")).collect();
    names.sort();
    names
}

fn file_with(world: &World) -> Option<Node> {
    let (made, _) = world.file(b"file", b"");
    let answer = set(world, &made.node, b"user.first", b"one", XattrFlags::default());
    if lacks("extended attributes", &answer) {
        return None;
    }
    answer.expect("setxattr");
    Some(made.node)
}

fn kept(world: &World) {
    let Some(node) = file_with(world) else { return };
    assert_eq!(get(world, &node, b"user.first"), Ok(b"one".to_vec()));
    set(world, &node, b"user.first", b"\0\xffbinary", XattrFlags::default()).expect("setxattr");
    assert_eq!(get(world, &node, b"user.first"), Ok(b"\0\xffbinary".to_vec()));
    set(world, &node, b"user.empty", b"", XattrFlags::default()).expect("setxattr");
    assert_eq!(get(world, &node, b"user.empty"), Ok(Vec::new()));
    assert_eq!(get(world, &node, b"user.missing"), Err(Errno::ENODATA));
    assert_eq!(get(world, &world.find(b"file").unwrap().node, b"user.first"), Ok(b"\0\xffbinary".to_vec()));
}

fn create_and_replace(world: &World) {
    let Some(node) = file_with(world) else { return };
    let create = XattrFlags { create: true, ..XattrFlags::default() };
    let replace = XattrFlags { replace: true, ..XattrFlags::default() };
    assert_eq!(set(world, &node, b"user.first", b"two", create), Err(Errno::EEXIST));
    assert_eq!(set(world, &node, b"user.second", b"two", replace), Err(Errno::ENODATA));
    set(world, &node, b"user.first", b"two", replace).expect("replace");
    set(world, &node, b"user.second", b"three", create).expect("create");
    assert_eq!(get(world, &node, b"user.first"), Ok(b"two".to_vec()));
    assert_eq!(get(world, &node, b"user.second"), Ok(b"three".to_vec()));
}

fn sizes(world: &World) {
    let Some(node) = file_with(world) else { return };
    assert_eq!(world.layer.getxattr(&world.caller, &node, b"user.first", &mut []), Ok(3));
    assert_eq!(world.layer.getxattr(&world.caller, &node, b"user.first", &mut [0; 2]), Err(Errno::ERANGE));
    let size = world.layer.listxattr(&world.caller, &node, &mut []).expect("listxattr");
    assert!(size >= b"user.first\0".len());
    assert_eq!(world.layer.listxattr(&world.caller, &node, &mut vec![0; size - 1]), Err(Errno::ERANGE));
    assert_eq!(world.layer.listxattr(&world.caller, &node, &mut vec![0; size]), Ok(size));
}

fn listed_and_removed(world: &World) {
    let Some(node) = file_with(world) else { return };
    set(world, &node, b"user.second", b"two", XattrFlags::default()).expect("setxattr");
    assert_eq!(names(world, &node), [b"user.first".to_vec(), b"user.second".to_vec()]);
    world.layer.removexattr(&world.caller, &node, b"user.first").expect("removexattr");
    assert_eq!(names(world, &node), [b"user.second".to_vec()]);
    assert_eq!(world.layer.removexattr(&world.caller, &node, b"user.first"), Err(Errno::ENODATA));
}

fn on_directories(world: &World) {
    let directory = world.directory(b"directory");
    let answer = set(world, &directory, b"user.first", b"one", XattrFlags::default());
    if lacks("extended attributes", &answer) {
        return;
    }
    answer.expect("setxattr");
    assert_eq!(get(world, &directory, b"user.first"), Ok(b"one".to_vec()));
    assert_eq!(get(world, &world.root, b"user.first"), Err(Errno::ENODATA));
}
