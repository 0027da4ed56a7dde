//! Rollback, and the figures of clones and content.

use super::*;

fn read(world: &World, name: &str, file: &str) -> Option<u64> {
    let dataset = world.pool.pool.dataset(world.id(name)).unwrap();
    let files = dataset.files();
    files.look_up(&files.root(), file.as_bytes()).ok().map(|(_, row)| row.size)
}

fn roll_back(snapshot: &str) -> ToRollBack {
    ToRollBack { snapshot: snapshot.to_owned(), ..ToRollBack::default() }
}

#[test]
fn a_file_system_goes_back() {
    let world = World::new();
    world.create("t/a");
    world.write("t/a", "old", 100_000, 1);
    world.snapshot(&["t/a@1"]);
    world.write("t/a", "new", 200_000, 2);
    world.ok(FsRequest::RollBack(roll_back("t/a@1")));
    assert_eq!((read(&world, "t/a", "old"), read(&world, "t/a", "new")), (Some(100_000), None));
    assert_eq!(world.mounted().len(), 1);
    // The kernel's cached writes were written back before, and its caches dropped afterwards.
    let id = world.id("t/a");
    assert!(world.mounts.asked.lock().ends_with(&[format!("settle [{id}]"), format!("replaced {id}")]));
    // A file system in use stays mounted; mounts below it are unmounted for the rollback, unless they are in use.
    world.mounts.used.lock().insert(id);
    world.create("t/a/below");
    world.write("t/a", "new", 200_000, 2);
    world.ok(FsRequest::RollBack(roll_back("t/a@1")));
    assert_eq!((read(&world, "t/a", "new"), world.mounted().len()), (None, 2));
    world.write("t/a", "new", 200_000, 2);
    world.mounts.used.lock().insert(world.id("t/a/below"));
    assert_eq!(world.refused(FsRequest::RollBack(roll_back("t/a@1"))).2, Kind::Busy);
    assert_eq!((read(&world, "t/a", "new"), world.mounted().len()), (Some(200_000), 2));
    world.ok(FsRequest::RollBack(ToRollBack { force: true, ..roll_back("t/a@1") }));
    assert_eq!((read(&world, "t/a", "new"), world.mounted().len()), (None, 2));
}

#[test]
fn newer_snapshots_bookmarks_and_clones_have_to_be_given_up() {
    let world = World::new();
    world.create("t/a");
    world.create("t/a/below");
    world.ok(snapshot(&["t/a@1"], true));
    world.write("t/a", "f", 50_000, 1);
    world.ok(snapshot(&["t/a@2"], true));
    world.ok(FsRequest::Bookmark { of: "t/a@2".to_owned(), name: "t/a#m".to_owned() });
    world.ok(clone("t/a@2", "t/c"));
    let refused = world.refused(FsRequest::RollBack(roll_back("t/a@1")));
    assert_eq!(refused.0, "cannot rollback to 't/a@1': clones of previous snapshots exist");
    assert_eq!(refused.1, "use '-R' to force deletion of the following clones and dependents:\nt/c");
    world.ok(FsRequest::Destroy(destroy("t/c")));
    let refused = world.refused(FsRequest::RollBack(roll_back("t/a@1")));
    assert_eq!(refused.0, "cannot rollback to 't/a@1': more recent snapshots or bookmarks exist");
    assert_eq!(refused.1, "use '-r' to force deletion of the following snapshots and bookmarks:\nt/a@2\nt/a#m");
    world.ok(clone("t/a@2", "t/c"));
    world.ok(FsRequest::RollBack(ToRollBack { clones: true, ..roll_back("t/a@1") }));
    // File systems below are not rolled back.
    assert_eq!(world.names(), ["t", "t/a", "t/a/below", "t/a/below@1", "t/a/below@2", "t/a@1"]);
    assert_eq!(read(&world, "t/a", "f"), None);
}

#[test]
fn a_preview_tells_what_destroying_frees() {
    let world = World::new();
    world.create("t/a");
    for place in 1..=4 {
        world.write("t/a", "f", 1 << 20, place);
        world.snapshot(&[&format!("t/a@{place}")]);
    }
    world.write("t/a", "f", 1 << 20, 9);
    let preview = |target: &str| {
        let FsAnswer::Destroyed(told) = world.ok(FsRequest::Destroy(ToDestroy { dry: true, ..destroy(target) })) else {
            panic!()
        };
        told
    };
    let one = preview("t/a@2");
    assert_eq!(one.names, ["t/a@2"]);
    assert_eq!(Some(one.freed.to_string()), world.value("t/a@2", "used").0);
    let several = preview("t/a@1%3").freed;
    assert!(several > 3 << 20 && several < 4 << 20, "{several}");
    let all: u64 = world.value("t/a", "used").0.unwrap().parse().unwrap();
    let FsAnswer::Destroyed(told) =
        world.ok(FsRequest::Destroy(ToDestroy { dry: true, recursive: true, ..destroy("t/a") }))
    else {
        panic!()
    };
    assert_eq!((told.names.len(), told.freed), (5, all));
    assert_eq!(world.names().len(), 6);
}

/// Hears notes, up to a number.
struct Heard(Vec<Difference>, usize);

impl Progress for Heard {
    fn note(&mut self, line: &str) -> bool {
        self.0.push(serde_json::from_str(line).unwrap());
        self.0.len() < self.1
    }
}

fn differences(world: &World, from: &str, to: Option<&str>, most: usize) -> Vec<(How, String)> {
    let mut heard = Heard(Vec::new(), most);
    let request = FsRequest::Diff { from: from.to_owned(), to: to.map(ToOwned::to_owned) };
    let done = super::super::run(&world.pool, &world.mounts, request, &mut heard);
    assert_eq!(done.is_err(), heard.0.len() == most, "a list that is not read to its end is no success");
    heard.0.into_iter().map(|difference| (difference.how, String::from_utf8(difference.path).unwrap())).collect()
}

#[test]
fn differences_have_names() {
    let world = World::new();
    world.create("t/a");
    for name in ["same", "changed", "gone", "moved", "linked"] {
        world.write("t/a", name, 10_000, 1);
    }
    world.snapshot(&["t/a@1"]);
    assert_eq!(differences(&world, "t/a@1", None, 99), []);
    world.write("t/a", "changed", 20_000, 2);
    world.write("t/a", "new", 10, 3);
    {
        let dataset = world.pool.pool.dataset(world.id("t/a")).unwrap();
        let files = dataset.files();
        let root = files.root();
        files.unlink(&root, b"gone").unwrap();
        files.rename((&root, b"moved"), (&root, b"elsewhere"), nacre_pool::files::MayReplace::Yes).unwrap();
        let (linked, _) = files.look_up(&root, b"linked").unwrap();
        files.link(&linked, &root, b"second").unwrap();
        files.unlink(&root, b"linked").unwrap();
        files.link(&linked, &root, b"third").unwrap();
    }
    world.pool.pool.commit().unwrap();
    let path = |name: &str| format!("/nowhere/t/a/{name}");
    let renamed = |from: &str| How::Renamed(path(from).into_bytes());
    let mut wanted = vec![
        (How::Modified(0), path("")),
        (How::Modified(0), path("changed")),
        (How::Removed, path("gone")),
        (renamed("moved"), path("elsewhere")),
        (How::Added, path("new")),
    ];
    let found = differences(&world, "t/a@1", None, 99);
    let (links, mut rest): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|(_, path)| path.ends_with("second") || path.ends_with("third"));
    assert_eq!(links.len(), 1);
    assert_eq!(links[0].0, renamed("linked"));
    let by_path = |a: &(How, String), b: &(How, String)| a.1.cmp(&b.1);
    rest.sort_by(by_path);
    wanted.sort_by(by_path);
    assert_eq!(rest, wanted);
    // The temporary snapshot is gone, and the caller may stop listening before the end.
    assert_eq!(world.names(), ["t", "t/a", "t/a@1"]);
    assert_eq!(differences(&world, "t/a@1", None, 2).len(), 2);
    world.snapshot(&["t/a@2"]);
    assert_eq!(differences(&world, "t/a@1", Some("t/a@2"), 99).len(), 6);
    world.ok(clone("t/a@1", "t/c"));
    world.write("t/c", "in the clone", 5, 1);
    assert_eq!(differences(&world, "t/a@1", Some("t/c"), 99).len(), 2);
    let backwards = world.refused(FsRequest::Diff { from: "t/a@2".to_owned(), to: Some("t/a@1".to_owned()) });
    assert_eq!(backwards.0, "cannot diff 't/a@2': not an earlier snapshot from the same fs");
}

#[test]
fn owners_are_counted() {
    let world = World::new();
    world.create("t/a");
    world.write("t/a", "f", 100_000, 1);
    world.write("t/a", "g", 100_000, 2);
    world.ok(set("t/a", "userquota@7", "1M"));
    world.snapshot(&["t/a@1"]);
    world.write("t/a", "h", 100_000, 3);
    let FsAnswer::Owners(owners) = world.ok(FsRequest::Owners("t/a".to_owned())) else { panic!() };
    let user = |id: u32| *owners.iter().find(|owner| !owner.group && owner.id == id).unwrap();
    // Three files, and the root directory.
    assert_eq!(user(0).objects, 4);
    assert!(user(0).used > 300_000 && user(0).used < 310_000, "{}", user(0).used);
    assert_eq!((user(7).used, user(7).quota), (0, Some(1 << 20)));
    assert!(owners.iter().any(|owner| owner.group && owner.id == 0));
    let FsAnswer::Owners(then) = world.ok(FsRequest::Owners("t/a@1".to_owned())) else { panic!() };
    assert_eq!(then.iter().find(|owner| !owner.group && owner.id == 0).unwrap().objects, 3);
    assert_eq!(world.value("t/a", "userused@0").0, Some(user(0).used.to_string()));
    assert_eq!(world.value("t/a", "userobjused@0").0.as_deref(), Some("4"));
    assert_eq!(world.value("t/a", "groupused@9").0.as_deref(), Some("0"));
}

/// A caller that reads this many lines.
struct Reads(usize);

impl Progress for Reads {
    fn note(&mut self, _: &str) -> bool {
        let is_read = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        is_read
    }
}

#[test]
fn a_result_that_is_not_read_to_its_end_is_refused() {
    let world = World::new();
    world.create("t/a");
    world.snapshot(&["t/a@1"]);
    for file in ["f", "g", "h"] {
        world.put("t/a", file, b"x");
    }
    let diff = |lines: usize| {
        let diff = FsRequest::Diff { from: "t/a@1".to_owned(), to: None };
        super::super::run(&world.pool, &world.mounts, diff, &mut Reads(lines))
    };
    let inspect = |lines: usize| {
        crate::pool::inspect::run(&world.pool, &crate::pool::inspect::Wanted::default(), &mut Reads(lines))
    };
    // The directory and its three files.
    assert!(diff(4).is_ok() && inspect(100).is_ok());
    for lines in 0..4 {
        assert_eq!(diff(lines).unwrap_err().kind, Kind::Io);
        assert_eq!(inspect(lines).unwrap_err().kind, Kind::Io);
    }
    assert_eq!(world.names(), ["t", "t/a", "t/a@1"]);
}
