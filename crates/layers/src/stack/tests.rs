//! Tests of the builder: what it builds, what it refuses, and what can be changed while a stack serves.

use super::*;
use crate::remap::tests::context;
use nacre_vfs::{Caller, Errno, Name, OpenFlags};

fn spec(line: &str) -> StackSpec {
    StackSpec::from_line(line.as_bytes()).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn built(line: &str) -> Stack {
    build(&spec(line), &context(0)).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn root_uid(stack: &Stack) -> u32 {
    stack.layer.root().unwrap().attr.uid
}

#[test]
fn layers_lie_on_each_other_in_the_order_of_writing() {
    let stack = built("mem | remap:map=0/5 | remap:map=5/6 | throttle:read-rate=1.5M | trace | readonly");
    assert_eq!(root_uid(&stack), 6);
    let mut description = stack.layer.describe();
    let mut names = Vec::new();
    loop {
        names.push(description.layer.clone());
        let Some(below) = description.below.pop() else { break };
        description = below;
    }
    assert_eq!(names, ["readonly", "trace", "throttle", "remap", "remap", "mem"]);
    let create = stack.layer.create(&Caller::ROOT, &stack.layer.root().unwrap().node, Name::new(b"x").unwrap(), 0o644, OpenFlags::WRITE);
    assert_eq!(create.map(|_| ()).unwrap_err(), Errno::EROFS);
}

#[test]
fn mistakes_name_the_layer_and_the_setting() {
    for (line, parts) in [
        ("mem | remap:perms=8", &["layer 2 (remap)", "perms", "\"8\""][..]),
        ("mem | trace | throttle:write-rate=fast", &["layer 3 (throttle)", "write-rate", "fast", "1.5M"]),
        ("host:/no/such/directory", &["layer 1 (host)", "/no/such/directory", "No such file"]),
    ] {
        let error = build(&spec(line), &context(0)).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    assert!(build(&StackSpec::default(), &context(0)).unwrap_err().to_string().contains("empty"));
}

#[test]
fn rules_and_rates_are_replaced_while_serving() {
    let stack = built("mem | remap:force-user=5 | throttle:read-rate=1k");
    assert_eq!(root_uid(&stack), 5);
    stack.reload(&spec("mem | remap:force-user=6 | throttle:write-rate=2k"), &context(0)).unwrap();
    assert_eq!(root_uid(&stack), 6);
    assert_eq!(stack.layer.describe().settings, [("write-rate".to_owned(), "2k".to_owned())]);
}

#[test]
fn a_reload_happens_whole_or_not_at_all() {
    let stack = built("mem | remap:force-user=5 | remap:force-group=5");
    for (line, part) in [
        ("mem | remap:force-user=6 | remap:force-group=nobody-here", "layer 3 (remap)"),
        ("mem | remap:force-user=6", "added, removed or moved"),
        ("mem | remap:force-user=6 | remap:block-devices-as-files", "block-devices-as-files"),
        ("mem | remap:force-user=6 | remap:xattr=none", "xattr=none"),
        ("mem | remap:force-user=6,mirror-only=0 | remap", "mirror list"),
    ] {
        let error = stack.reload(&spec(line), &context(0)).unwrap_err().to_string();
        assert!(error.contains(part), "{line}: {error}");
        assert_eq!(root_uid(&stack), 5, "{line}");
    }
    let stack = built("mem | trace");
    let error = stack.reload(&spec("mem | trace:level=all"), &context(0)).unwrap_err().to_string();
    assert!(error.contains("layer 2 (trace)") && error.contains("unmount"), "{error}");
}

#[test]
fn host_and_filters_work_together() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("f"), "content").unwrap();
    let stack = built(&format!("host:{} | remap:force-user=4294967294,perms=0444", directory.path().display()));
    let root = stack.layer.root().unwrap().node;
    let found = stack.layer.lookup(&Caller::ROOT, &root, Name::new(b"f").unwrap()).unwrap();
    assert_eq!((found.attr.uid, found.attr.mode, found.attr.size), (4_294_967_294, 0o444, 7));
}
