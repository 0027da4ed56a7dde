//! create, clone, rename, promote, destroy: names and dependencies.

use super::*;

#[test]
fn names_come_and_go() {
    let world = World::new();
    world.create("t/a");
    assert_eq!(world.refused(create("t/a")).0, "cannot create 't/a': dataset already exists");
    assert_eq!(world.refused(create("t/x/y")).0, "cannot create 't/x/y': parent does not exist");
    assert_eq!(world.refused(create("t")).0, "cannot create 't': missing dataset name");
    assert_eq!(world.refused(create("t/a@b")).0, "cannot create 't/a@b': snapshot delimiter '@' in filesystem name");
    assert_eq!(world.refused(create("t/a$")).0, "cannot create 't/a$': invalid character '$' in name");
    let with_parents =
        |name: &str| FsRequest::Create(ToCreate { name: name.to_owned(), parents: true, ..ToCreate::default() });
    world.ok(with_parents("t/x/y/z"));
    world.ok(with_parents("t/x/y/z"));
    world.ok(with_parents("t"));
    assert_eq!(world.names(), ["t", "t/a", "t/x", "t/x/y", "t/x/y/z"]);
    let bad = world.refused(create_with("t/b", &[("recordsize", "3000")]));
    assert_eq!(bad.0, "cannot create 't/b': 'recordsize' must be power of 2 from 512B to 16M");
    assert_eq!(world.names().len(), 5);
    world.ok(create_with("t/b", &[("recordsize", "64K"), ("quota", "10M"), ("module:x", "y")]));
    assert_eq!(world.value("t/b", "recordsize"), (Some("65536".to_owned()), From::Local));
    assert_eq!(world.value("t/b", "module:x"), (Some("y".to_owned()), From::Local));
}

#[test]
fn what_depends_on_something_keeps_it() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    world.snapshot(&["t/a@1"]);
    world.ok(clone("t/a@1", "t/c"));
    world.create("t/c/d");
    let refused = world.refused(FsRequest::Destroy(destroy("t/a")));
    assert_eq!(refused.0, "cannot destroy 't/a': filesystem has children");
    assert_eq!(refused.1, "use '-r' to destroy the following datasets:\nt/a@1\nt/a/b");
    let refused = world.refused(FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t/a") }));
    assert_eq!(refused.0, "cannot destroy 't/a': filesystem has dependent clones");
    assert!(refused.1.starts_with("use '-R' to destroy the following datasets:\n") && refused.1.contains("t/c"));
    let refused = world.refused(FsRequest::Destroy(destroy("t/a@1")));
    assert_eq!(refused.0, "cannot destroy 't/a@1': snapshot has dependent clones");
    let all = ToDestroy { clones: true, dry: true, ..destroy("t/a") };
    let FsAnswer::Destroyed(told) = world.ok(FsRequest::Destroy(all.clone())) else { panic!() };
    assert_eq!(told.names.last().map(String::as_str), Some("t/a"));
    let place = |name: &str| told.names.iter().position(|told| told == name).unwrap();
    assert!(place("t/c/d") < place("t/c") && place("t/c") < place("t/a@1") && place("t/a/b") < place("t/a"));
    assert_eq!(world.names().len(), 6);
    world.ok(FsRequest::Destroy(ToDestroy { dry: false, ..all }));
    assert_eq!(world.names(), ["t"]);
}

#[test]
fn a_clone_of_what_lies_below_it_is_told_and_can_be_helped() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    world.ok(clone("t/a@1", "t/b"));
    world.ok(FsRequest::Rename(ToRename { from: "t/a".to_owned(), to: "t/b/a".to_owned(), ..ToRename::default() }));
    let all = FsRequest::Destroy(ToDestroy { clones: true, ..destroy("t/b") });
    let refused = world.refused(all.clone());
    assert!(refused.0.contains("it is a clone of something that lies below it"), "{refused:?}");
    assert_eq!(world.names(), ["t", "t/b", "t/b/a", "t/b/a@1"]);
    world.ok(FsRequest::Promote("t/b".to_owned()));
    assert_eq!(world.names(), ["t", "t/b", "t/b/a", "t/b@1"]);
    world.ok(all);
    assert_eq!(world.names(), ["t"]);
}

#[test]
fn the_pools_own_file_system_stays() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t@1"]);
    let refused = world.refused(FsRequest::Destroy(destroy("t")));
    assert_eq!(refused.0, "cannot destroy 't': operation does not apply to pools");
    world.ok(FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t") }));
    assert_eq!(world.names(), ["t"]);
    let rename = ToRename { from: "t".to_owned(), to: "t/u".to_owned(), ..ToRename::default() };
    assert_eq!(world.refused(FsRequest::Rename(rename)).2, Kind::Invalid);
}

#[test]
fn snapshots_are_selected_by_lists_and_ranges() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    for name in ["t/a@1", "t/a@2", "t/a@3", "t/a@4", "t/a@5", "t/a/b@2", "t/a/b@9"] {
        world.snapshot(&[name]);
    }
    let of_a = |world: &World| world.names().into_iter().filter(|name| name.starts_with("t/a@")).collect::<Vec<_>>();
    let refused = world.refused(FsRequest::Destroy(destroy("t/a@nope")));
    assert_eq!(
        (refused.0.as_str(), refused.2),
        ("could not find any snapshots to destroy; check snapshot names.", Kind::NotFound)
    );
    let FsAnswer::Destroyed(told) = world.ok(FsRequest::Destroy(ToDestroy { dry: true, ..destroy("t/a@1,nope") }))
    else {
        panic!()
    };
    assert_eq!((told.names, told.missing), (vec!["t/a@1".to_owned()], vec!["t/a@nope".to_owned()]));
    assert_eq!(of_a(&world).len(), 5);
    world.ok(FsRequest::Destroy(destroy("t/a@2%3,5")));
    assert_eq!(of_a(&world), ["t/a@1", "t/a@4"]);
    world.snapshot(&["t/a@2"]);
    world.ok(FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t/a@2,9") }));
    assert_eq!(world.names(), ["t", "t/a", "t/a/b", "t/a@1", "t/a@4"]);
    world.ok(FsRequest::Destroy(destroy("t/a@%")));
    assert_eq!(world.names(), ["t", "t/a", "t/a/b"]);
}

#[test]
fn holds_keep_and_deferred_destruction_waits() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    world.ok(snapshot(&["t/a@1"], true));
    let hold = |tag: &str, name: &str, recursive, release| {
        FsRequest::Hold(ToHold { tag: tag.to_owned(), snapshots: vec![name.to_owned()], recursive, release })
    };
    world.ok(hold("keep", "t/a@1", true, false));
    assert_eq!(
        world.refused(hold("keep", "t/a@1", false, false)).0,
        "cannot hold snapshot 't/a@1': tag already exists on this dataset"
    );
    let release = world.refused(hold("other", "t/a@1", false, true));
    assert_eq!(
        (release.0.as_str(), release.2),
        ("cannot release hold from snapshot 't/a@1': no such tag on this dataset", Kind::NotFound)
    );
    let FsAnswer::Holds(holds) = world.ok(FsRequest::Holds { snapshots: vec!["t/a@1".to_owned()], recursive: true })
    else {
        panic!()
    };
    assert_eq!(holds.iter().map(|hold| hold.snapshot.as_str()).collect::<Vec<_>>(), ["t/a@1", "t/a/b@1"]);
    let refused = world.refused(FsRequest::Destroy(destroy("t/a@1")));
    assert_eq!((refused.0.as_str(), refused.2), ("cannot destroy 't/a@1': dataset is busy", Kind::Busy));
    assert!(world.run(FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t/a") })).is_err());
    assert_eq!(world.value("t/a@1", "userrefs").0.as_deref(), Some("1"));
    world.ok(FsRequest::Destroy(ToDestroy { deferred: true, ..destroy("t/a@1") }));
    assert_eq!(world.value("t/a@1", "defer_destroy").0.as_deref(), Some("on"));
    world.ok(hold("keep", "t/a@1", true, true));
    assert_eq!(world.names(), ["t", "t/a", "t/a/b", "t/a/b@1"]);
}

#[test]
fn snapshots_are_taken_together_or_not_at_all() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/c"] {
        world.create(name);
    }
    world.snapshot(&["t/a/b@1"]);
    let refused = world.refused(snapshot(&["t/a@1"], true));
    assert_eq!(refused.0, "cannot create snapshot 't/a/b@1': dataset already exists");
    assert_eq!(refused.1, "no snapshots were created");
    assert!(
        world.refused(snapshot(&["t/a@x", "t/a@y"], false)).0.contains("multiple snapshots of same fs not allowed")
    );
    assert!(world.refused(snapshot(&["t/a"], false)).0.contains("missing '@' delimiter in snapshot name"));
    assert_eq!(world.names(), ["t", "t/a", "t/a/b", "t/a/b@1", "t/c"]);
    world.ok(snapshot(&["t/a@2", "t/c@2"], true));
    let txgs: HashSet<_> = ["t/a@2", "t/a/b@2", "t/c@2"].map(|name| world.value(name, "createtxg").0).into();
    assert_eq!(txgs.len(), 1);
    let settled = format!("settle {:?}", [world.id("t/a"), world.id("t/a/b"), world.id("t/c")]);
    assert!(world.mounts.asked.lock().contains(&settled));
}

#[test]
fn snapshots_get_other_names() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    world.ok(snapshot(&["t/a@1"], true));
    world.snapshot(&["t/a/b@2"]);
    let rename = |to: &str, recursive| {
        FsRequest::Rename(ToRename { from: "t/a@1".to_owned(), to: to.to_owned(), recursive, ..ToRename::default() })
    };
    assert_eq!(world.refused(rename("t/a@2", true)).0, "cannot rename 't/a/b@1': dataset already exists");
    assert!(world.refused(rename("t@3", false)).0.contains("must be part of same dataset"));
    world.ok(rename("@3", true));
    assert_eq!(world.names(), ["t", "t/a", "t/a/b", "t/a/b@2", "t/a/b@3", "t/a@3"]);
}

#[test]
fn bookmarks_outlive_their_snapshots() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    let bookmark = |of: &str, name: &str| FsRequest::Bookmark { of: of.to_owned(), name: name.to_owned() };
    world.ok(bookmark("t/a@1", "t/a#m"));
    assert_eq!(world.refused(bookmark("t/a@1", "t/a#m")).0, "cannot create bookmark 't/a#m': bookmark exists");
    assert!(world.run(bookmark("t/a@1", "t#m")).is_err());
    let guid = world.value("t/a@1", "guid").0;
    world.ok(FsRequest::Destroy(destroy("t/a@1")));
    world.ok(bookmark("t/a#m", "t/a#n"));
    assert_eq!(world.value("t/a#n", "guid").0, guid);
    world.ok(FsRequest::Destroy(destroy("t/a#m")));
    assert_eq!(world.refused(FsRequest::Destroy(destroy("t/a#m"))).0, "bookmark 't/a#m' does not exist.");
    assert_eq!(world.names(), ["t", "t/a", "t/a#n"]);
}

#[test]
fn promoting_asks_for_names_that_clash() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    world.ok(clone("t/a@1", "t/c"));
    world.snapshot(&["t/c@1"]);
    assert_eq!(world.value("t/c", "origin").0.as_deref(), Some("t/a@1"));
    assert_eq!(world.value("t/a@1", "clones").0.as_deref(), Some("t/c"));
    let refused = world.refused(FsRequest::Promote("t/c".to_owned()));
    assert_eq!(refused.0, "cannot promote 't/c': conflicting snapshot '1' from parent 't/a'");
    assert_eq!(world.refused(FsRequest::Promote("t/a".to_owned())).0, "cannot promote 't/a': not a cloned filesystem");
    world.ok(FsRequest::Rename(ToRename { from: "t/c@1".to_owned(), to: "@2".to_owned(), ..ToRename::default() }));
    world.ok(FsRequest::Promote("t/c".to_owned()));
    assert_eq!(world.names(), ["t", "t/a", "t/c", "t/c@1", "t/c@2"]);
    assert_eq!(world.value("t/a", "origin").0.as_deref(), Some("t/c@1"));
}
