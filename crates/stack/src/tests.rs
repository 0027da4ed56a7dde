//! Tests of the builder: built and refused stacks, and changes while a stack serves.

use super::*;
use crate::spec::BranchSpec;
use nacre_layers::fakes::context;
use nacre_vfs::{Caller, Errno, Name, OpenFlags};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

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
    let create = stack.layer.create(
        &Caller::ROOT,
        &stack.layer.root().unwrap().node,
        Name::new(b"x").unwrap(),
        0o644,
        OpenFlags::WRITE,
    );
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

fn branch(text: String) -> BranchSpec {
    BranchSpec::parse(text.as_bytes(), nacre_union::BranchMode::ro()).unwrap()
}

#[test]
fn branches_of_a_union_change_while_it_serves() {
    let place = tempfile::tempdir().unwrap();
    let directory = |name: &str| {
        let path = place.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path.display().to_string()
    };
    let (a, b, c) = (directory("a"), directory("b"), directory("c"));
    std::fs::write(format!("{c}/file"), "c").unwrap();
    let stack = built(&format!("union:{a}=rw:{b}=ro | trace"));
    let seen = |stack: &Stack| {
        let root = stack.layer.root().unwrap().node;
        stack.layer.lookup(&Caller::ROOT, &root, Name::new(b"file").unwrap()).is_ok()
    };
    assert!(!seen(&stack));
    assert_eq!(stack.add_branch(branch(format!("{c}=rw")), 1, &context(0)), Ok(vec![]));
    assert!(seen(&stack));
    assert_eq!(stack.spec().to_line(), format!("union:branch={a}=rw,branch={c}=rw,branch={b}=ro | trace"));
    // The specification that reloads compare with is up to date.
    stack.reload(&stack.spec(), &context(0)).unwrap();
    // A branch with mode rw is claimed exclusively, until it becomes read-only or is removed.
    let taken = |line: String| build(&spec(&line), &context(0)).map(drop).map_err(|error| error.to_string());
    assert!(taken(format!("union:{c}=rw")).unwrap_err().contains("is written by another union"));
    assert_eq!(taken(format!("union:{c}=ro+wh")), Ok(()));
    assert_eq!(stack.modify_branch(1, "ro+wh".parse().unwrap(), &context(0)), Ok(vec![]));
    assert_eq!(taken(format!("union:{c}=rw")), Ok(()));
    let other = built(&format!("union:{c}=rw"));
    assert_eq!(
        stack.modify_branch(1, "rw".parse().unwrap(), &context(0)).unwrap_err().reason,
        Some(nacre_vfs::Errno::EBUSY)
    );
    drop(other);
    assert_eq!(stack.modify_branch(1, "rw".parse().unwrap(), &context(0)), Ok(vec![]));
    // No other branch has the file.
    assert!(stack.remove_branch(1, false).is_err());
    assert_eq!(stack.remove_branch(1, true), Ok(()));
    assert_eq!(taken(format!("union:{c}=rw")), Ok(()));
    assert!(!seen(&stack));
    assert!(stack.remove_branch(7, false).unwrap_err().what.contains("no such branch"));
    assert!(stack.add_branch(branch(format!("{c}/missing")), 0, &context(0)).unwrap_err().what.contains("missing"));
    assert_eq!(stack.spec().to_line(), format!("union:branch={a}=rw,branch={b}=ro | trace"));
    assert!(built("mem").add_branch(branch(c), 0, &context(0)).unwrap_err().what.contains("no union"));
}

/// A change is recorded before users see it: nothing is answered in between, and no refused change
/// is recorded.
#[test]
fn changes_of_branches_are_noted_before_anybody_sees_them() {
    let place = tempfile::tempdir().unwrap();
    let directory = |name: &str| {
        let path = place.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path.display().to_string()
    };
    let (a, b, c) = (directory("a"), directory("b"), directory("c"));
    let stack = built(&format!("union:{a}=rw:{b}=ro"));
    let noted = Arc::new(Mutex::new(Vec::new()));
    let (notes, layer) = (Arc::clone(&noted), Arc::clone(&stack.layer));
    let early = Arc::new(Mutex::new(Vec::new()));
    let users = Arc::clone(&early);
    stack.note_changes(move |spec| {
        let is_noted = Arc::new(AtomicBool::new(false));
        let (layer, seen) = (Arc::clone(&layer), Arc::clone(&is_noted));
        let user = std::thread::spawn(move || {
            let root = layer.root().unwrap().node;
            drop(layer.lookup(&Caller::ROOT, &root, Name::new(b"file").unwrap()));
            seen.load(Ordering::Relaxed)
        });
        users.lock().push(user);
        // Time for the look-up, if nothing blocked it.
        std::thread::sleep(std::time::Duration::from_millis(20));
        notes.lock().push(spec.to_line());
        is_noted.store(true, Ordering::Relaxed);
    });
    let last = || noted.lock().last().cloned();
    stack.add_branch(branch(format!("{c}=rw")), 0, &context(0)).unwrap();
    assert_eq!(last(), Some(stack.spec().to_line()));
    stack.modify_branch(0, "ro".parse().unwrap(), &context(0)).unwrap();
    assert_eq!(last(), Some(stack.spec().to_line()));
    stack.remove_branch(0, false).unwrap();
    assert_eq!(last(), Some(stack.spec().to_line()));
    stack.add_branch(branch(format!("{b}=rw")), 0, &context(0)).unwrap_err();
    std::fs::write(format!("{a}/only"), "").unwrap();
    stack.remove_branch(0, false).unwrap_err();
    assert_eq!(noted.lock().len(), 3, "what was refused is not noted");
    assert_eq!(last(), Some(stack.spec().to_line()));
    let users: Vec<_> = early.lock().drain(..).collect();
    assert!(users.into_iter().all(|user| user.join().unwrap()), "somebody was answered before it was noted");
}

#[test]
fn a_pool_claims_a_branch_without_a_directory_of_its_own() {
    let (place, locks) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = claiming(locks.path());
    let branch = place.path().display();
    let (pool, copying) = (format!("union:branch={branch}=rw,option=category.create=ff"), format!("union:{branch}=rw"));
    let taken = |line: &str| build(&spec(line), &context).map(drop).map_err(|error| error.to_string());
    for first in [&pool, &copying] {
        let stack = build(&spec(first), &context).unwrap();
        for second in [&pool, &copying] {
            assert!(taken(second).unwrap_err().contains("is written by another union"), "{second} beside {first}");
        }
        drop(stack);
        assert_eq!(taken(first), Ok(()));
    }
    assert_eq!(taken(&pool), Ok(()));
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "nothing is left on the branch");
    assert_eq!(std::fs::read_dir(locks.path()).unwrap().count(), 0, "no lock file is left");
}

/// Every process that may read a branch can lock its directory, and leave the lock to its children.
#[test]
fn locks_of_other_programs_on_a_branch_keep_no_union_away() {
    use rustix::fs::{FlockOperation, flock};
    let (place, locks) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = claiming(locks.path());
    let top = std::fs::File::open(place.path()).unwrap();
    flock(&top, FlockOperation::NonBlockingLockExclusive).unwrap();
    let branch = place.path().display();
    for line in [format!("union:branch={branch}=rw,option=category.create=ff"), format!("union:{branch}=rw")] {
        let stack = build(&spec(&line), &context).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(stack.warnings, [""; 0], "{line}");
    }
}

/// Context of unions that lock their branches in this directory.
fn claiming(locks: &std::path::Path) -> nacre_layers::context::Context {
    let lock_directory = nacre_layers::context::LockDirectory::At(locks.to_owned());
    nacre_layers::context::Context { lock_directory, ..context(0) }
}
