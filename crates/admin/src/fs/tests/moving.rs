//! Mounts follow names and properties.

use super::*;

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(name, at)| ((*name).to_owned(), (*at).to_owned())).collect()
}

#[test]
fn new_file_systems_are_mounted_where_they_belong() {
    let world = World::new();
    world.create("t/a");
    world.ok(create_with("t/b", &[("mountpoint", "/srv/b")]));
    world.create("t/b/c");
    world.ok(create_with("t/d", &[("canmount", "off"), ("mountpoint", "/d")]));
    world.create("t/d/e");
    world.ok(create_with("t/f", &[("mountpoint", "none")]));
    world.ok(create_with("t/g", &[("mountpoint", "legacy"), ("canmount", "on")]));
    world.ok(FsRequest::Create(ToCreate { name: "t/h".to_owned(), unmounted: true, ..ToCreate::default() }));
    let wanted = [("t/a", "/nowhere/t/a"), ("t/b", "/srv/b"), ("t/b/c", "/srv/b/c"), ("t/d/e", "/d/e")];
    assert_eq!(world.mounted(), pairs(&wanted));
    assert_eq!(world.value("t/b/c", "mountpoint"), (Some("/srv/b/c".to_owned()), From::Inherited("t/b".to_owned())));
    assert_eq!(world.value("t", "mountpoint"), (Some("/nowhere/t".to_owned()), From::Default));
    assert_eq!(world.value("t/a", "mounted").0.as_deref(), Some("yes"));
    assert_eq!(world.value("t/h", "mounted").0.as_deref(), Some("no"));
    let FsAnswer::Done(told) = world.ok(create_with("t/i", &[("mountpoint", "/broken/i")])) else { panic!() };
    assert!(told[0].contains("successfully created, but it could not be mounted"), "{told:?}");
}

#[test]
fn changing_a_mount_point_takes_those_that_inherit_along() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c"] {
        world.create(name);
    }
    world.ok(create_with("t/a/own", &[("mountpoint", "/own")]));
    world.ok(set("t/a", "mountpoint", "/new"));
    let new = [("t/a", "/new"), ("t/a/b", "/new/b"), ("t/a/b/c", "/new/b/c"), ("t/a/own", "/own")];
    assert_eq!(world.mounted(), pairs(&new));
    // If one is in use, all stay mounted.
    world.mounts.used.lock().insert(world.id("t/a/b"));
    let refused = world.refused(set("t/a", "mountpoint", "/other"));
    assert_eq!(refused.2, Kind::Busy);
    assert_eq!(world.mounted(), pairs(&new));
    assert_eq!(world.value("t/a", "mountpoint").0.as_deref(), Some("/new"));
    world.mounts.used.lock().clear();
    world.ok(set("t/a", "mountpoint", "none"));
    assert_eq!(world.mounted(), pairs(&[("t/a/own", "/own")]));
    world.ok(inherit("t/a", "mountpoint", false));
    let back =
        [("t/a", "/nowhere/t/a"), ("t/a/b", "/nowhere/t/a/b"), ("t/a/b/c", "/nowhere/t/a/b/c"), ("t/a/own", "/own")];
    assert_eq!(world.mounted(), pairs(&back));
}

#[test]
fn what_is_mounted_below_steps_aside_and_comes_back() {
    let world = World::new();
    world.ok(create_with("t/a", &[("mountpoint", "/x")]));
    world.ok(create_with("t/b", &[("mountpoint", "/x/sub")]));
    world.ok(create_with("t/a/own", &[("mountpoint", "/x/own")]));
    world.ok(set("t/a", "mountpoint", "/y"));
    assert_eq!(world.mounted(), pairs(&[("t/a", "/y"), ("t/a/own", "/x/own"), ("t/b", "/x/sub")]));
}

#[test]
fn what_was_unmounted_by_hand_stays_so() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    let unmount = |name: &str| FsRequest::Unmount { what: ToUnmount::Name(name.to_owned()), force: false };
    world.ok(unmount("t/a/b"));
    assert_eq!(world.refused(unmount("t/a/b")).0, "cannot unmount 't/a/b': not currently mounted");
    world.ok(set("t/a", "mountpoint", "/new"));
    assert_eq!(world.mounted(), pairs(&[("t/a", "/new")]));
    world.ok(FsRequest::Mount(ToMount { name: Some("t/a/b".to_owned()), ..ToMount::default() }));
    assert_eq!(world.mounted(), pairs(&[("t/a", "/new"), ("t/a/b", "/new/b")]));
    let again = world.refused(FsRequest::Mount(ToMount { name: Some("t/a".to_owned()), ..ToMount::default() }));
    assert_eq!(again.0, "cannot mount 't/a': filesystem already mounted");
    world.ok(set("t/a/b", "canmount", "off"));
    assert_eq!(world.mounted(), pairs(&[("t/a", "/new")]));
    let off = world.refused(FsRequest::Mount(ToMount { name: Some("t/a/b".to_owned()), ..ToMount::default() }));
    assert_eq!(off.0, "cannot mount 't/a/b': 'canmount' property is set to 'off'");
    world.ok(set("t/a/b", "canmount", "on"));
    assert_eq!(world.mounted().len(), 2);
}

#[test]
fn options_follow_properties_at_once() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    let options = |name: &str| {
        let id = world.id(name);
        world.mounts.mounted().into_iter().find(|mounted| mounted.what.dataset == id).unwrap().options
    };
    assert!(!options("t/a/b").read_only && !options("t/a/b").no_exec && options("t/a/b").overlay);
    world.ok(set("t/a", "readonly", "on"));
    world.ok(set("t/a", "exec", "off"));
    assert!(options("t/a/b").read_only && options("t/a/b").no_exec);
    assert_eq!(options("t/a").source, "t/a");
    world.ok(set("t/a/b", "readonly", "off"));
    assert!(options("t/a").read_only && !options("t/a/b").read_only);
    world.ok(FsRequest::Unmount { what: ToUnmount::Name("t/a/b".to_owned()), force: false });
    let mount = ToMount {
        name: Some("t/a/b".to_owned()),
        words: vec!["ro".to_owned(), "exec".to_owned()],
        ..ToMount::default()
    };
    world.ok(FsRequest::Mount(mount));
    assert_eq!(world.value("t/a/b", "readonly"), (Some("on".to_owned()), From::Temporary));
    assert_eq!(world.value("t/a/b", "exec"), (Some("on".to_owned()), From::Temporary));
    assert_eq!(world.value("t/a/b", "atime"), (Some("off".to_owned()), From::Inherited("t".to_owned())));
}

#[test]
fn renaming_moves_mounts() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/x"] {
        world.create(name);
    }
    world.ok(create_with("t/a/own", &[("mountpoint", "/own")]));
    let rename = |from: &str, to: &str| ToRename { from: from.to_owned(), to: to.to_owned(), ..ToRename::default() };
    assert_eq!(world.refused(FsRequest::Rename(rename("t/a", "t/x"))).0, "cannot rename 't/a': dataset already exists");
    assert!(world.refused(FsRequest::Rename(rename("t/a", "t/a/b/c"))).0.contains("cannot be a descendant"));
    assert_eq!(
        world.refused(FsRequest::Rename(rename("t/a", "t/no/a"))).0,
        "cannot rename 't/a': parent does not exist"
    );
    world.ok(FsRequest::Rename(rename("t/a", "t/a")));
    assert_eq!(
        world.refused(FsRequest::Rename(rename("t/no", "t/no"))).0,
        "cannot open 't/no': dataset does not exist"
    );
    world.ok(FsRequest::Rename(rename("t/a", "t/x/y")));
    let moved =
        [("t/x", "/nowhere/t/x"), ("t/x/y", "/nowhere/t/x/y"), ("t/x/y/b", "/nowhere/t/x/y/b"), ("t/x/y/own", "/own")];
    assert_eq!(world.mounted(), pairs(&moved));
    let sources: HashSet<String> = world.mounts.mounted().into_iter().map(|mounted| mounted.options.source).collect();
    assert!(sources.contains("t/x/y/own"), "{sources:?}");
    world.ok(FsRequest::Rename(ToRename { unmounted: true, ..rename("t/x/y", "t/z") }));
    assert!(world.mounted().contains(&("t/z/b".to_owned(), "/nowhere/t/x/y/b".to_owned())));
}

#[test]
fn everything_is_mounted_and_unmounted_in_order() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c", "t/d"] {
        world.create(name);
    }
    // Mounts below are unmounted with it, or all of them stay.
    let unmount = || FsRequest::Unmount { what: ToUnmount::Name("t/a".to_owned()), force: false };
    world.mounts.used.lock().insert(world.id("t/a"));
    assert_eq!(world.run(unmount()).unwrap_err().kind, Kind::Busy);
    assert_eq!(world.mounted().len(), 4);
    world.mounts.used.lock().clear();
    world.ok(unmount());
    assert_eq!(world.mounted(), pairs(&[("t/d", "/nowhere/t/d")]));
    world.ok(FsRequest::Unmount { what: ToUnmount::All, force: false });
    assert!(world.mounted().is_empty());
    mount_all(&world.pool, &world.mounts, &mut Silent).unwrap();
    // The pool's own as well.
    assert_eq!(world.mounted().len(), 5);
    let order: Vec<PathBuf> = world.mounts.mounted().into_iter().map(|mounted| mounted.at).collect();
    for (place, at) in order.iter().enumerate() {
        assert!(!order[..place].iter().any(|before| before != at && before.starts_with(at)), "{order:?}");
    }
    world.mounts.used.lock().insert(world.id("t/a"));
    assert_eq!(unmount_all(&world.pool, &world.mounts, false).unwrap_err().kind, Kind::Busy);
    assert_eq!(world.mounted().len(), 5);
    // Unmounting all leaves mounts in use, and reports them.
    let FsAnswer::Done(stay) = world.ok(FsRequest::Unmount { what: ToUnmount::All, force: false }) else { panic!() };
    assert_eq!(world.mounted(), pairs(&[("t", "/nowhere/t"), ("t/a", "/nowhere/t/a")]));
    assert!(stay.len() == 2 && stay[0] == "cannot unmount '/nowhere/t/a': pool or dataset is busy", "{stay:?}");
    assert!(stay[1].starts_with("cannot unmount '/nowhere/t': "), "{stay:?}");
    unmount_all(&world.pool, &world.mounts, true).unwrap();
    assert!(world.mounted().is_empty());
}

#[test]
fn an_alternate_root_is_before_every_path() {
    let world = World::within(Opening { altroot: Some(PathBuf::from("/mnt/alt")), ..opening() });
    world.create("t/a");
    world.ok(create_with("t/b", &[("mountpoint", "/srv/b")]));
    world.ok(create_with("t/r", &[("mountpoint", "/")]));
    let wanted = [("t/a", "/mnt/alt/nowhere/t/a"), ("t/b", "/mnt/alt/srv/b"), ("t/r", "/mnt/alt")];
    assert_eq!(world.mounted(), pairs(&wanted));
}

#[test]
fn destroying_unmounts_and_what_is_in_use_stops_it() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/b");
    world.mounts.used.lock().insert(world.id("t/a"));
    let all = ToDestroy { recursive: true, ..destroy("t/a") };
    assert_eq!(world.refused(FsRequest::Destroy(all.clone())).2, Kind::Busy);
    assert_eq!(world.mounted().len(), 2);
    assert_eq!(world.names(), ["t", "t/a", "t/a/b"]);
    world.ok(FsRequest::Destroy(ToDestroy { force: true, ..all }));
    assert!(world.mounted().is_empty());
    assert_eq!(world.names(), ["t"]);
}

#[test]
fn what_is_mounted_over_another_leaves_for_the_moment() {
    let world = World::new();
    for name in ["t/a", "t/b"] {
        world.create(name);
        world.ok(set(name, "mountpoint", "/same"));
    }
    assert_eq!(order(&world).iter().filter(|at| *at == "/same").count(), 2);
    world.ok(set("t/a", "mountpoint", "/else"));
    let at = |name: &str| {
        let all = world.mounts.mounted();
        let of_it = all.into_iter().find(|mounted| mounted.what.dataset == world.id(name));
        of_it.unwrap().at
    };
    assert_eq!((at("t/a"), at("t/b")), ("/else".into(), "/same".into()));
}

#[test]
fn of_file_systems_at_the_same_place_one_is_unmounted() {
    let world = World::new();
    for (name, at) in [("t/a", "/same"), ("t/b", "/same"), ("t/inner", "/same/inner")] {
        world.create(name);
        world.ok(set(name, "mountpoint", at));
    }
    let there = || {
        let all = order(&world);
        let count = |at: &str| all.iter().filter(|one| *one == at).count();
        (count("/same"), count("/same/inner"))
    };
    let mount = || world.ok(FsRequest::Mount(ToMount::default()));
    assert_eq!(there(), (2, 1));
    // What is mounted in the one on top stays with it.
    world.ok(unmount("t/a"));
    assert_eq!((there(), mounted(&world, "t/a")), ((1, 1), false));
    mount();
    assert_eq!(there(), (2, 1));
    // The other is on top now, and is meant by the path.
    world.ok(FsRequest::Unmount { what: ToUnmount::At("/same".into()), force: false });
    assert_eq!((mounted(&world, "t/a"), mounted(&world, "t/b")), (false, true));
    world.ok(unmount("t/b"));
    assert_eq!(there(), (0, 0));
}

fn mounted(world: &World, name: &str) -> bool {
    world.mounts.mounted().iter().any(|mounted| mounted.what.dataset == world.id(name))
}

fn unmount(name: &str) -> FsRequest {
    FsRequest::Unmount { what: ToUnmount::Name(name.to_owned()), force: false }
}

/// Where mounts are, in the order in which they were made.
fn order(world: &World) -> Vec<String> {
    world.mounts.mounted().into_iter().map(|mounted| mounted.at.display().to_string()).collect()
}

#[test]
fn what_was_unmounted_for_nothing_is_mounted_again_parents_first() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c"] {
        world.create(name);
    }
    let before = order(&world);
    // Children go before it, and it is found in use only then.
    world.mounts.used.lock().insert(world.id("t/a"));
    let changes = [
        unmount("t/a"),
        FsRequest::Destroy(ToDestroy { recursive: true, ..destroy("t/a") }),
        set("t/a", "mountpoint", "/other"),
        set("t/a", "canmount", "off"),
    ];
    for change in changes {
        assert_eq!(world.refused(change).2, Kind::Busy);
        assert_eq!(order(&world), before);
    }
    assert_eq!(unmount_all(&world.pool, &world.mounts, false).unwrap_err().kind, Kind::Busy);
    assert!(world.mounts.hidden().is_empty());
    world.mounts.used.lock().clear();
    unmount_all(&world.pool, &world.mounts, false).unwrap();
}

#[test]
fn all_are_asked_before_any_is_unmounted() {
    let world = World::new();
    for name in ["t/data", "t/home", "t/home/bob"] {
        world.create(name);
    }
    world.mounts.used.lock().insert(world.id("t/data"));
    let before = world.mounts.mounted();
    assert_eq!(unmount_all(&world.pool, &world.mounts, false).unwrap_err().kind, Kind::Busy);
    assert_eq!(world.mounts.mounted(), before);
    // Mounts with no other mount on them are checked first; with force none is.
    let asked = [format!("free {}", world.id("t/data")), format!("free {}", world.id("t/home/bob"))];
    assert_eq!(*world.mounts.asked.lock(), asked[..1]);
    world.mounts.used.lock().clear();
    unmount_all(&world.pool, &world.mounts, false).unwrap();
    assert_eq!(world.mounts.asked.lock()[1..], asked);
}

#[test]
fn a_parent_that_is_mounted_later_hides_nothing() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/a/b/c"] {
        world.create(name);
    }
    world.ok(unmount("t/a"));
    let mount = |name: &str| FsRequest::Mount(ToMount { name: Some(name.to_owned()), ..ToMount::default() });
    world.ok(mount("t/a/b/c"));
    world.ok(mount("t/a"));
    world.ok(mount("t/a/b"));
    assert_eq!(order(&world), ["/nowhere/t/a", "/nowhere/t/a/b", "/nowhere/t/a/b/c"]);
    // Refused if a mount in use would have to be unmounted for it.
    world.ok(unmount("t/a"));
    world.ok(mount("t/a/b/c"));
    world.mounts.used.lock().insert(world.id("t/a/b/c"));
    let refused = world.refused(mount("t/a"));
    assert_eq!(
        (refused.0.starts_with("cannot mount 't/a': cannot unmount '/nowhere/t/a/b/c'"), refused.2),
        (true, Kind::Busy)
    );
    assert_eq!(order(&world), ["/nowhere/t/a/b/c"]);
}

#[test]
fn hidden_mounts_count_as_none_and_are_found_again() {
    let world = World::new();
    for name in ["t/a", "t/a/b", "t/d"] {
        world.create(name);
    }
    world.ok(set("t/a/b", "canmount", "noauto"));
    let hide = || {
        let mut there = world.mounts.there.lock();
        let place = there.iter().position(|mounted| mounted.what.dataset == world.id("t/a")).unwrap();
        let above = there.remove(place);
        there.push(above);
    };
    let seen = || world.value("t/a/b", "mounted").0;
    let mount = |name: Option<&str>| FsRequest::Mount(ToMount { name: name.map(str::to_owned), ..ToMount::default() });
    for repair in [mount(None), mount(Some("t/a/b"))] {
        hide();
        assert_eq!((seen().as_deref(), world.value("t/a", "mounted").0.as_deref()), (Some("no"), Some("yes")));
        world.ok(repair);
        assert_eq!(seen().as_deref(), Some("yes"));
        assert_eq!(world.mounted().len(), 4);
    }
    // A mount in use that hides another one stays, and all others do.
    hide();
    world.mounts.used.lock().insert(world.id("t/a"));
    assert_eq!(world.refused(mount(Some("t/a/b"))).2, Kind::Busy);
    let FsAnswer::Done(told) = world.ok(mount(None)) else { panic!() };
    assert!(told[0].contains("busy"), "{told:?}");
    assert_eq!(world.mounted().len(), 4);
    world.mounts.used.lock().clear();
    // Only the hidden one is unmounted for good.
    world.ok(unmount("t/a/b"));
    assert_eq!(world.mounted().len(), 3);
    world.ok(mount(Some("t/a/b")));
    hide();
    unmount_all(&world.pool, &world.mounts, false).unwrap();
    assert!(world.mounted().is_empty());
}

#[test]
fn force_is_for_those_that_were_named() {
    let upper = pairs(&[("t/b", "/same"), ("t/in", "/same/in")]);
    let all = pairs(&[("t/a", "/same"), ("t/b", "/same"), ("t/in", "/same/in")]);
    let force = || FsRequest::Unmount { what: ToUnmount::Name("t/a".to_owned()), force: true };
    for upper_in_use in ["t/b", "t/in"] {
        let world = World::new();
        for (name, at) in &all {
            world.create(name);
            world.ok(set(name, "mountpoint", at));
        }
        world.mounts.used.lock().extend([world.id("t/a"), world.id(upper_in_use)]);
        assert_eq!(world.refused(force()).2, Kind::Busy);
        let destroy = ToDestroy { force: true, ..destroy("t/a") };
        assert_eq!(world.refused(FsRequest::Destroy(destroy.clone())).2, Kind::Busy);
        assert_eq!(world.mounted(), all);
        world.mounts.used.lock().remove(&world.id(upper_in_use));
        world.ok(force());
        assert_eq!(world.mounted(), upper);
        world.ok(FsRequest::Destroy(destroy));
        assert_eq!(world.mounted(), upper);
    }
}

#[test]
fn mounts_of_snapshots_are_there_after_a_refusal() {
    let world = World::new();
    for name in ["t/a", "t/a/b"] {
        world.create(name);
    }
    world.snapshot(&["t/a@1"]);
    for name in ["t/a@2", "t/a@3"] {
        world.snapshot(&[name]);
        let at = Some(PathBuf::from(name.replace("t/a@", "/snap")));
        world.ok(FsRequest::Mount(ToMount { name: Some(name.to_owned()), at, ..ToMount::default() }));
    }
    let there = || {
        let mut there: Vec<PathBuf> = world.mounts.mounted().into_iter().map(|mounted| mounted.at).collect();
        there.sort();
        there
    };
    let before = there();
    assert_eq!(before.len(), 4);
    world.mounts.used.lock().insert(world.id("t/a/b"));
    let all = ToDestroy { recursive: true, ..destroy("t/a") };
    assert_eq!(world.refused(FsRequest::Destroy(all)).2, Kind::Busy);
    assert_eq!(there(), before);
    let back = ToRollBack { snapshot: "t/a@1".to_owned(), newer: true, ..ToRollBack::default() };
    assert_eq!(world.refused(FsRequest::RollBack(back)).2, Kind::Busy);
    assert_eq!(there(), before);
    assert_eq!(unmount_all(&world.pool, &world.mounts, false).unwrap_err().kind, Kind::Busy);
    assert_eq!(there(), before);
}
