//! Branches that come, go and change while the union is in use: it always shows what a new union
//! over the same branches would show.

use crate::unions::{Directories, host, mem};
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
    model::{self, Operation, Reference, Tree, go_on, operations},
};
use nacre_union::{BranchMode, Control, Member, Style, Union, UnionOptions};
use nacre_vfs::{Errno, Invalidation, Kind, Layer, Name, Node, OpenFlags, WriteOrigin};
use proptest::{
    prelude::*,
    test_runner::{Config, FileFailurePersistence},
};
use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A change between two pieces of history: on which branch, what.
#[derive(Clone, Debug)]
enum Change {
    Add(usize, &'static str),
    Remove(usize),
    Modify(usize, &'static str),
}

fn change() -> impl Strategy<Value = Change> {
    let mode = prop::sample::select(vec!["rw", "ro", "ro+wh", "nc"]);
    prop_oneof![
        (0..4_usize, mode.clone()).prop_map(|(at, mode)| Change::Add(at, mode)),
        (0..4_usize).prop_map(Change::Remove),
        (0..4_usize, mode).prop_map(|(at, mode)| Change::Modify(at, mode)),
    ]
}

type Steps = Vec<(Vec<Operation>, Change)>;

/// A union with all the branches that it may have.
struct Scene {
    pool: RefCell<Vec<(PathBuf, Arc<dyn Layer>)>>,
    union: Arc<Union>,
    control: Control,
    world: World,
    options: UnionOptions,
}

fn member(name: &Path, layer: &Arc<dyn Layer>, mode: &str) -> Member {
    Member {
        name: name.to_owned(),
        layer: Arc::clone(layer),
        mode: BranchMode::parse(mode).unwrap(),
        work: None,
        lock: None,
    }
}

impl Scene {
    fn new(layers: Vec<Arc<dyn Layer>>, modes: &[&str], options: UnionOptions) -> Scene {
        let pool: Vec<_> =
            (0..).zip(layers).map(|(index, layer)| (PathBuf::from(format!("/{index}")), layer)).collect();
        let members = pool.iter().zip(modes).map(|((name, layer), mode)| member(name, layer, mode)).collect();
        let union = Arc::new(Union::named(members, options.clone()).unwrap());
        let control = union.control();
        let world = World::new(Arc::clone(&union) as Arc<dyn Layer>);
        Scene { pool: RefCell::new(pool), union, control, world, options }
    }

    fn layer(&self, name: &Path) -> Arc<dyn Layer> {
        Arc::clone(&self.pool.borrow().iter().find(|(known, _)| known == name).unwrap().1)
    }

    fn at(&self, index: usize) -> (PathBuf, Arc<dyn Layer>) {
        self.pool.borrow()[index].clone()
    }

    /// A new union over the same branches.
    fn anew(&self) -> Union {
        let now = self.control.list();
        let members = now
            .iter()
            .map(|branch| member(&branch.name, &self.layer(&branch.name), &branch.mode.to_string()))
            .collect();
        Union::named(members, self.options.clone()).unwrap()
    }

    /// What it shows.
    fn fresh(&self) -> Tree {
        model::tree(&World::new(Arc::new(self.anew())))
    }

    /// Makes a change, if it makes sense now.
    fn change(&self, change: &Change) {
        let now = self.control.list();
        match change {
            Change::Add(at, mode) => {
                let pool = self.pool.borrow();
                let free: Vec<_> =
                    pool.iter().filter(|(name, _)| now.iter().all(|branch| branch.name != *name)).collect();
                if let Some((name, layer)) = free.get(at % 2).or(free.first()) {
                    self.control.add(member(name, layer, mode), *at).unwrap();
                }
            }
            Change::Remove(at) if now.len() > 1 => {
                let slot = now[at % now.len()].slot;
                if let Err(error) = self.control.remove(slot, false) {
                    let text = error.to_string();
                    assert!(error.errno() == Errno::EBUSY && (text.contains(" alone (")), "{text}");
                    self.control.remove(slot, true).unwrap();
                }
            }
            Change::Remove(at) => {
                assert_eq!(self.control.remove(now[at % now.len()].slot, true).unwrap_err().errno(), Errno::EINVAL);
            }
            Change::Modify(at, mode) => {
                self.control.modify(now[at % now.len()].slot, BranchMode::parse(mode).unwrap()).unwrap()
            }
        }
    }

    /// Everything that can be seen, with its nodes.
    fn nodes(&self) -> Vec<(Vec<u8>, Node, Kind)> {
        let mut all = Vec::new();
        let mut waiting = vec![(Vec::new(), self.world.root.clone())];
        while let Some((path, node)) = waiting.pop() {
            for listed in self.world.list(&node, true, 16) {
                let path = [&path[..], b"/", &listed.name[..]].concat();
                let entry = listed.entry.expect("attributes");
                if entry.attr.kind == Kind::Directory {
                    waiting.push((path.clone(), entry.node.clone()));
                }
                all.push((path, entry.node, entry.attr.kind));
            }
        }
        all
    }

    fn find(&self, path: &[u8]) -> nacre_vfs::Result<nacre_vfs::Entry> {
        let mut at = self.world.layer.root()?;
        for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            at = self.world.layer.lookup(&self.world.caller, &at.node, Name::new(part)?)?;
        }
        Ok(at)
    }
}

fn check(cases: u32, run: impl Fn(&Steps)) {
    let cases = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(cases);
    println!("campaign: {cases} cases (NACRE_MODEL_CASES)");
    let config =
        Config { cases, failure_persistence: Some(Box::new(FileFailurePersistence::Off)), ..Config::default() };
    let steps = prop::collection::vec((operations(12), change()), 1..8);
    let outcome = crate::unions::runner(config).run(&steps, |steps| {
        run(&steps);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

fn live(steps: &Steps, layers: Vec<Arc<dyn Layer>>, style: Style) {
    let options = UnionOptions { whiteout: style, sync: false, ..UnionOptions::default() };
    let scene = Scene::new(layers, &["rw", "ro"], options);
    for (operations, change) in steps {
        for operation in operations {
            // Opens that are refused are a failure to the model.
            if matches!(operation, Operation::Write(..)) && !scene.control.list()[0].mode.creates() {
                continue;
            }
            // What is answered is the business of other tests: here, branches contradict each
            // other.
            let _ = model::apply(&scene.world, operation);
        }
        // As a kernel would hold them.
        let held = scene.nodes();
        scene.change(change);
        let wanted = scene.fresh();
        assert_eq!(model::tree(&scene.world), wanted, "after {change:?}");
        for (path, node, kind) in &held {
            let now = scene.find(path);
            let held = scene.world.layer.getattr(&scene.world.caller, node, None);
            assert!(!matches!(held, Err(Errno::EIO)), "{}: {held:?}", path.escape_ascii());
            // A directory that goes on being there, is the same one.
            if let (Ok(now), Ok(held), Kind::Directory) = (now, held, kind) {
                let listed = |node: &Node| scene.world.names(node);
                if now.attr.id == held.id {
                    assert_eq!(listed(&now.node), listed(node), "{}", path.escape_ascii());
                }
            }
        }
    }
}

#[test]
fn a_changed_union_is_like_a_new_one() {
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        check(150, |steps| live(steps, vec![mem(), mem(), mem(), mem()], style));
    }
}

#[test]
fn over_real_directories() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    check(25, |steps| live(steps, (0..4).map(|_| host(&directories.fresh())).collect(), Style::Wh));
}

/// What was one directory of the union is two: others have moved one of the directories that it was
/// made of.
#[test]
fn a_directory_taken_apart_is_two() {
    nacre_layers::host::prepare_worker().unwrap();
    for moved in [0, 1] {
        for first in [&b"before"[..], b"after"] {
            let directories = Directories::new();
            let places = [directories.fresh(), directories.fresh()];
            let names = ["above", "below"];
            for (place, name) in places.iter().zip(names) {
                std::fs::create_dir(place.join("before")).unwrap();
                std::fs::write(place.join("before").join(name), name).unwrap();
            }
            let layers = places.iter().map(|place| host(place)).collect();
            let scene = Scene::new(layers, &["rw", "rw"], UnionOptions { sync: false, ..UnionOptions::default() });
            let held = scene.find(b"before").unwrap();
            assert_eq!(scene.world.names(&held.node).len(), 2);
            std::fs::rename(places[moved].join("before"), places[moved].join("after")).unwrap();
            let seen_first = scene.find(first).unwrap();
            for _ in 0..2 {
                let [before, after] = [&b"before"[..], b"after"].map(|path| scene.find(path).unwrap());
                assert_ne!(before.attr.id, after.attr.id);
                assert_eq!(scene.world.names(&before.node), [names[1 - moved].as_bytes()]);
                assert_eq!(scene.world.names(&after.node), [names[moved].as_bytes()]);
            }
            assert_eq!(scene.find(first).unwrap().attr.id, seen_first.attr.id);
        }
    }
}

/// A branch that is added on top of a union that is in use, and everything that is made on it: as
/// one that was there from the start.
#[test]
fn a_branch_added_on_top_changes_nothing() {
    check(100, |steps| {
        let scene =
            Scene::new(vec![mem(), mem(), mem()], &["rw"], UnionOptions { sync: false, ..UnionOptions::default() });
        let mut reference = Reference::new();
        for (index, (operations, _)) in steps.iter().enumerate() {
            go_on(&scene.world, &mut reference, operations);
            let now = scene.control.list();
            match index % 3 {
                0 if now.len() < 3 => {
                    scene.control.modify(now[0].slot, BranchMode::parse("ro+wh").unwrap()).unwrap();
                    let (name, layer) = scene.at(now.len());
                    scene.control.add(member(&name, &layer, "rw"), 0).unwrap();
                }
                1 => scene.control.modify(now[now.len() - 1].slot, BranchMode::parse("nc").unwrap()).unwrap_or(()),
                _ => {}
            }
            if scene.control.list().iter().all(|branch| !branch.mode.creates()) {
                scene.control.modify(now[0].slot, BranchMode::rw()).unwrap();
            }
            assert_eq!(model::tree(&scene.world), reference.tree(), "after the change");
        }
    });
}

#[test]
fn directories_stay_themselves_when_branches_come_and_go() {
    let scene = Scene::new(vec![mem(), mem()], &["rw"], UnionOptions { sync: false, ..UnionOptions::default() });
    let below = World::new(Arc::clone(&scene.at(1).1));
    below.file_in(&below.directory(b"directory"), b"low", b"");
    let held = scene.world.directory(b"directory");
    scene.world.file_in(&held, b"high", b"");
    let id = scene.world.attr(&held).id;
    let slot = scene.control.add(member(&scene.at(1).0, &scene.at(1).1, "ro"), 9).unwrap();
    assert_eq!(scene.world.find(b"directory").unwrap().attr.id, id, "seen first by a look-up");
    assert_eq!(scene.world.names(&held), [b"high".to_vec(), b"low".to_vec()]);
    scene.control.remove(slot, false).unwrap();
    assert_eq!(scene.world.names(&held), [b"high".to_vec()]);
    assert_eq!((scene.world.attr(&held).id, scene.world.find(b"directory").unwrap().attr.id), (id, id));
    assert_eq!(Arc::strong_count(&scene.at(1).1), 3, "nobody but the test and its world hold a removed branch");
}

#[test]
fn what_is_open_is_in_the_way() {
    let scene = Scene::new(vec![mem(), mem()], &["rw", "ro"], UnionOptions { sync: false, ..UnionOptions::default() });
    let below = World::new(Arc::clone(&scene.at(1).1));
    below.file(b"low", b"content");
    let slots: Vec<u8> = scene.control.list().iter().map(|branch| branch.slot).collect();
    let (sender, told) = std::sync::mpsc::channel();
    scene.union.watch(sender);
    let low = scene.world.find(b"low").unwrap();
    let reader = scene.world.open(&low.node, OpenFlags::READ);
    let refused = scene.control.remove(slots[1], false).unwrap_err();
    assert_eq!(refused.errno(), Errno::EBUSY);
    assert_eq!(refused.to_string(), "1 file is in use on /1 (low): close them, drain the branch, or use force");
    assert!(told.try_iter().any(|what| what == Invalidation::Everything), "doors are asked to let go");
    scene.control.remove(slots[1], true).unwrap();
    assert!(told.try_iter().any(|what| what == Invalidation::Everything));
    let mut buffer = [0; 16];
    assert_eq!(reader.read(&mut buffer, 0), Ok(7), "it goes on");
    assert!(!scene.world.exists(b"low"));
    drop(reader);
    let (_, writer) = scene.world.file(b"high", b"");
    let refused = scene.control.modify(slots[0], BranchMode::ro()).unwrap_err();
    assert_eq!((refused.errno(), refused.to_string().contains("for writing")), (Errno::EBUSY, true));
    assert_eq!(writer.append(b"x"), Ok(1));
    drop(writer);
    scene.control.modify(slots[0], BranchMode::ro()).unwrap();
    let again = scene.world.find(b"high").unwrap();
    assert_eq!(scene.world.layer.open(&scene.world.caller, &again.node, OpenFlags::WRITE).err(), Some(Errno::EROFS));
    let kept = scene.world.open(&again.node, OpenFlags::READ);
    scene.control.modify(slots[0], BranchMode::rw()).unwrap();
    assert_eq!(kept.read(&mut buffer, 0), Ok(1));
    assert_eq!(scene.world.open(&again.node, OpenFlags::WRITE).append(b"y"), Ok(1));
    assert_eq!(scene.control.remove(77, false).unwrap_err().errno(), Errno::ENOENT);
    assert_eq!(
        scene.control.add(member(&scene.at(0).0, &scene.at(0).1, "ro"), 0).unwrap_err().errno(),
        Errno::EINVAL,
        "twice"
    );
}

/// A file opened for writing on a branch that was read-only then, and is not any more.
#[test]
fn open_files_follow_a_change_of_mode() {
    let scene = Scene::new(vec![mem(), mem()], &["rw", "ro"], UnionOptions { sync: false, ..UnionOptions::default() });
    World::new(Arc::clone(&scene.at(1).1)).file(b"low", b"content");
    let low = scene.world.find(b"low").unwrap();
    let writer = scene.world.open(&low.node, OpenFlags::READ_WRITE);
    scene.control.modify(scene.control.list()[1].slot, BranchMode::rw()).unwrap();
    assert_eq!(writer.append(b"!"), Ok(1));
    assert_eq!(scene.world.content(&low.node), b"content!");
    assert!(!World::new(Arc::clone(&scene.at(0).1)).exists(b"low"), "changed where it is");
}

#[test]
fn branches_change_under_load() {
    let scene =
        Scene::new(vec![mem(), mem(), mem()], &["rw", "ro"], UnionOptions { sync: false, ..UnionOptions::default() });
    let low = World::new(Arc::clone(&scene.at(1).1));
    for number in 0..40 {
        low.file(format!("low{number}").as_bytes(), b"content");
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (name, layer) = scene.at(2);
    let world = &scene.world;
    std::thread::scope(|scope| {
        let stop = &stop;
        for part in 0..3_usize {
            scope.spawn(move || {
                let mut round = 0_usize;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let name = format!("made{part}-{}", round % 20);
                    let made = world.layer.create(
                        &world.caller,
                        &world.root,
                        Name::new(name.as_bytes()).unwrap(),
                        0o644,
                        OpenFlags::READ_WRITE,
                    );
                    let (_, file) = made.unwrap();
                    assert_eq!(file.write(name.as_bytes(), 0, WriteOrigin::Caller), Ok(name.len()));
                    let found = world.find(name.as_bytes()).unwrap();
                    assert_eq!(world.content(&found.node), name.as_bytes());
                    assert_eq!(
                        world
                            .list(&world.root, true, 16)
                            .iter()
                            .filter(|listed| listed.name.starts_with(b"low"))
                            .count(),
                        40
                    );
                    let low = world.find(format!("low{}", (round + part) % 40).as_bytes()).unwrap();
                    assert!(world.content(&low.node).starts_with(b"content"));
                    round += 1;
                }
            });
        }
        for round in 0..60 {
            // Read-only, and at any place: what is shown stays the same.
            let slot =
                scene.control.add(member(&name, &layer, if round % 2 == 0 { "ro" } else { "nc" }), round % 3).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2));
            // A listing that was begun before may be open there.
            scene.control.remove(slot, false).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// Everything that is drained goes on being shown as it was, and a branch that is empty then goes
/// without a trace.
fn drained(steps: &Steps, fresh: &dyn Fn() -> Arc<dyn Layer>, modes: &[&'static str], style: Style) {
    let layers: Vec<_> = modes.iter().map(|_| fresh()).collect();
    let mut reference = Reference::new();
    go_on(&World::new(Arc::clone(layers.last().unwrap())), &mut reference, &steps[0].0);
    let scene = Scene::new(layers, modes, UnionOptions { whiteout: style, sync: false, ..UnionOptions::default() });
    assert_eq!(model::tree(&scene.world), reference.tree());
    for (operations, change) in &steps[1..] {
        go_on(&scene.world, &mut reference, operations);
        let held = scene.nodes();
        let (Change::Add(at, _) | Change::Remove(at) | Change::Modify(at, _)) = change;
        let now = scene.control.list();
        let branch = &now[at % now.len()];
        let report = match scene.control.drain(branch.slot, &mut |_| true) {
            Ok(report) => report,
            Err(error) => {
                assert_eq!(error.errno(), Errno::EINVAL, "{error}");
                continue;
            }
        };
        assert!(!report.stopped);
        assert_eq!(
            model::tree(&scene.world),
            reference.tree(),
            "after draining {} ({report:?})",
            branch.name.display()
        );
        assert_eq!(scene.fresh(), reference.tree(), "after a remount ({report:?})");
        for (path, node, _) in &held {
            let (now, held) = (scene.find(path).unwrap(), scene.world.layer.getattr(&scene.world.caller, node, None));
            assert_eq!(held.map(|attr| attr.id), Ok(now.attr.id), "{}", path.escape_ascii());
        }
        if report.left == 0 && matches!(change, Change::Remove(_)) {
            let before = model::tree(&World::new(scene.layer(&branch.name)));
            scene.control.remove(branch.slot, false).unwrap();
            assert_eq!(
                model::tree(&scene.world),
                reference.tree(),
                "without {}, of which this was left: {before:?}",
                branch.name.display()
            );
            let free = scene.control.list().len();
            let new = fresh();
            scene.pool.borrow_mut().iter_mut().find(|(name, _)| *name == branch.name).unwrap().1 = Arc::clone(&new);
            scene.control.add(member(&branch.name, &new, "rw"), at % (free + 1)).unwrap();
        } else {
            scene.control.modify(branch.slot, branch.mode.clone()).unwrap();
        }
        assert_eq!(model::tree(&scene.world), reference.tree());
    }
}

#[test]
fn draining_a_pool_changes_nothing() {
    check(200, |steps| drained(steps, &mem, &["rw", "rw", "rw"], Style::Wh));
}

#[test]
fn draining_over_read_only_branches_changes_nothing() {
    for style in [Style::Wh, Style::Chardev] {
        check(120, |steps| drained(steps, &mem, &["rw", "rw", "ro"], style));
        check(120, |steps| drained(steps, &mem, &["rw", "ro", "rw"], style));
    }
}

#[test]
fn draining_real_directories_changes_nothing() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    check(15, |steps| drained(steps, &|| host(&directories.fresh()), &["rw", "rw", "rw"], Style::Wh));
    check(15, |steps| drained(steps, &|| host(&directories.fresh()), &["rw", "rw", "ro"], Style::Wh));
}

/// Draining with a storage that fails from some step on, as after a power cut: the tree stays what
/// it was, for those who are there and after a remount, and draining again comes to an end.
#[test]
fn a_fault_at_any_step_of_a_drain_changes_nothing() {
    for from in [0, 1] {
        for step in (0..160).step_by(if from == 0 { 1 } else { 3 }) {
            let fault = Fault::new(Errno::EIO, true);
            let layers: Vec<Arc<dyn Layer>> = (0..3).map(|_| mem()).collect();
            let low = World::new(Arc::clone(&layers[2]));
            for name in [&b"opaque"[..], b"merged", b"gone"] {
                low.file_in(&low.directory(name), b"low", b"low");
            }
            low.file(b"removed", b"");
            let faulty = layers.iter().map(|layer| -> Arc<dyn Layer> {
                Arc::new(Faulty { below: Arc::clone(layer), fault: Arc::clone(&fault) })
            });
            let scene = Scene::new(
                faulty.collect(),
                &["rw", "rw", "ro"],
                UnionOptions { sync: false, ..UnionOptions::default() },
            );
            let (world, caller) = (&scene.world, &scene.world.caller);
            let remove =
                |parent: &Node, name: &[u8]| world.layer.unlink(caller, parent, Name::new(name).unwrap()).unwrap();
            for name in [&b"opaque"[..], b"gone"] {
                let directory = world.find(name).unwrap().node;
                remove(&directory, b"low");
                world.layer.rmdir(caller, &world.root, Name::new(name).unwrap()).unwrap();
            }
            remove(&world.root, b"removed");
            let opaque = world.directory(b"opaque");
            world.file_in(&opaque, b"new", b"new");
            let merged = world.find(b"merged").unwrap().node;
            world.file_in(&merged, b"high", b"high");
            world.file_in(&world.directory_in(&merged, b"deep"), b"file", &[b'x'; 5_000]);
            world.change(&merged, nacre_vfs::SetAttr { mode: Some(0o750), ..Default::default() });
            if from == 1 {
                let slot = scene.control.list()[0].slot;
                assert_eq!(scene.control.drain(slot, &mut |_| true).unwrap().left, 0);
                scene.control.modify(slot, BranchMode::rw()).unwrap();
            }
            let before = model::tree(world);
            let slot = scene.control.list()[from].slot;
            fault.after(step);
            let report = scene.control.drain(slot, &mut |_| true).unwrap();
            fault.end();
            assert_eq!(model::tree(world), before, "branch {from}, step {step}: {report:?}");
            assert_eq!(scene.fresh(), before, "branch {from}, step {step}, after a remount: {report:?}");
            let again = scene.control.drain(slot, &mut |_| true).unwrap();
            assert_eq!(again.left, 0, "branch {from}, step {step}: {again:?}");
            scene.control.remove(slot, false).unwrap();
            assert_eq!(model::tree(world), before, "branch {from}, step {step}, without the branch");
        }
    }
}

/// A writable branch on which something is that users would miss is taken out by force only.
#[test]
fn what_would_be_missed_is_in_the_way() {
    let scene = Scene::new(
        vec![mem(), mem(), mem()],
        &["rw", "rw", "ro"],
        UnionOptions { sync: false, ..UnionOptions::default() },
    );
    let low = World::new(Arc::clone(&scene.at(2).1));
    low.file(b"removed", b"");
    low.file(b"kept", b"");
    let middle = World::new(Arc::clone(&scene.at(1).1));
    let directory = middle.directory(b"directory");
    for number in 0..4 {
        middle.file_in(&directory, format!("file{number}").as_bytes(), b"content");
    }
    let (world, slots) = (&scene.world, scene.control.list().iter().map(|branch| branch.slot).collect::<Vec<_>>());
    let refused = scene.control.remove(slots[1], false).unwrap_err();
    assert_eq!(refused.errno(), Errno::EBUSY);
    let text = refused.to_string();
    assert!(
        text.starts_with("5 files and directories are shown from /1 alone (directory, directory/file")
            && text.ends_with("or use force"),
        "{text}"
    );
    assert!(!scene.control.list()[1].draining, "a refusal changes nothing");
    assert_eq!(scene.control.drain(slots[1], &mut |_| true).unwrap().left, 0);
    scene.control.remove(slots[1], false).unwrap();
    // What only hides counts as well.
    world.layer.unlink(&world.caller, &world.root, Name::new(b"removed").unwrap()).unwrap();
    let slot = scene.control.add(member(&scene.at(1).0, &scene.at(1).1, "rw"), 0).unwrap();
    let top = World::new(Arc::clone(&scene.at(0).1));
    for name in top.names(&top.root) {
        if !name.starts_with(b".wh.") {
            let _ = top.layer.rmdir(&top.caller, &top.root, Name::new(&name).unwrap());
        }
    }
    let before = model::tree(world);
    let text = scene.control.remove(slots[0], false).unwrap_err().to_string();
    assert!(text.contains("1 removed name is hidden by /0 alone (removed) and would come back"), "{text}");
    assert_eq!(model::tree(world), before);
    scene.control.remove(slots[0], true).unwrap();
    assert!(world.exists(b"removed") && world.exists(b"kept"), "by force");
    assert_eq!(scene.control.remove(slot, false), Ok(()), "nobody misses what is empty");
}

/// What a user sees of names that lead to one file: its number, how many names it says it has, its
/// content.
fn one_file(world: &World, names: &[&[u8]]) -> (u64, u32, Vec<u8>) {
    let all: Vec<_> = names
        .iter()
        .map(|path| {
            let mut at = world.layer.root().unwrap();
            for part in path.split(|byte| *byte == b'/') {
                at = world.layer.lookup(&world.caller, &at.node, Name::new(part).unwrap()).unwrap();
            }
            (at.attr.id.ino, at.attr.nlink, world.content(&at.node))
        })
        .collect();
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all[0].clone()
}

fn link(world: &World, node: &Node, parent: &Node, name: &[u8]) {
    world.layer.link(&world.caller, node, None, parent, Name::new(name).unwrap()).unwrap();
}

/// A file of three names on each writable branch, one of them in the hard-link index, over a
/// read-only branch.
fn linked(layers: &[Arc<dyn Layer>], fault: &Arc<Fault>) -> Scene {
    let low = World::new(Arc::clone(&layers[2]));
    let node = low.file(b"low1", b"low").0.node;
    link(&low, &node, &low.root, b"low2");
    link(&low, &node, &low.directory(b"lows"), b"low3");
    let faulty = layers
        .iter()
        .map(|layer| -> Arc<dyn Layer> { Arc::new(Faulty { below: Arc::clone(layer), fault: Arc::clone(fault) }) });
    let scene =
        Scene::new(faulty.collect(), &["rw", "nc", "ro"], UnionOptions { sync: false, ..UnionOptions::default() });
    let world = &scene.world;
    let node = world.file(b"a1", b"plain").0.node;
    link(world, &node, &world.root, b"a2");
    link(world, &node, &world.directory(b"deep"), b"a3");
    // The copy gets one name, two are below.
    let copied = world.find(b"low1").unwrap().node;
    assert_eq!(world.open(&copied, OpenFlags::WRITE).append(b"er"), Ok(2));
    // Of another one, only a count is kept.
    scene.control.modify(scene.control.list()[1].slot, BranchMode::rw()).unwrap();
    scene
}

const PLAIN: [&[u8]; 3] = [b"a1", b"a2", b"deep/a3"];
const LOW: [&[u8]; 3] = [b"low1", b"low2", b"lows/low3"];

/// Files with several names go to another branch with all of them, down and up, also those that
/// only the hard-link index keeps together.
#[test]
fn files_with_several_names_are_drained() {
    let layers: Vec<Arc<dyn Layer>> = (0..3).map(|_| mem()).collect();
    let scene = linked(&layers, &Fault::new(Errno::EIO, true));
    let world = &scene.world;
    let (plain, low) = (one_file(world, &PLAIN), one_file(world, &LOW));
    assert_eq!((plain.1, low.1, &low.2[..]), (3, 3, &b"lower"[..]));
    let reader = world.open(&world.find(b"a2").unwrap().node, OpenFlags::READ);
    for round in 0..4 {
        let from = &scene.control.list()[round % 2];
        let report = scene.control.drain(from.slot, &mut |_| true).unwrap();
        assert_eq!(report.left, 0, "round {round}: {report:?}");
        let left = model::tree(&World::new(scene.layer(&from.name)));
        let files = |tree: &Tree| format!("{tree:?}").matches("plain").count();
        assert_eq!(files(&left), 0, "round {round}: {left:?}");
        for shown in [world, &World::new(Arc::new(scene.anew()))] {
            assert_eq!((one_file(shown, &PLAIN), one_file(shown, &LOW)), (plain.clone(), low.clone()), "round {round}");
        }
        let mut buffer = [0; 8];
        assert_eq!(reader.read(&mut buffer, 0), Ok(5), "an open one goes on");
        scene.control.modify(from.slot, BranchMode::rw()).unwrap();
    }
    // They are one file still.
    let node = world.find(b"deep").unwrap().node;
    let third = world.layer.lookup(&world.caller, &node, Name::new(b"a3").unwrap()).unwrap().node;
    assert_eq!(world.open(&third, OpenFlags::WRITE).append(b"!"), Ok(1));
    assert_eq!(one_file(world, &PLAIN).2, b"plain!");
    world.layer.unlink(&world.caller, &world.root, Name::new(b"a1").unwrap()).unwrap();
    assert_eq!(one_file(world, &PLAIN[1..]).1, 2);
    world.layer.unlink(&world.caller, &world.root, Name::new(b"low1").unwrap()).unwrap();
    assert_eq!(one_file(world, &LOW[1..]).1, 2);
}

/// The same with a storage that fails from some step on: it is one file with all its names at every
/// moment, after a remount, and in the end it has moved.
#[test]
fn a_fault_at_any_step_leaves_files_with_several_names_whole() {
    for from in [0, 1] {
        for lasting in [true, false] {
            for step in 0.. {
                let layers: Vec<Arc<dyn Layer>> = (0..3).map(|_| mem()).collect();
                let fault = Fault::new(Errno::EIO, lasting);
                let scene = linked(&layers, &fault);
                let world = &scene.world;
                if from == 1 {
                    let slot = scene.control.list()[0].slot;
                    assert_eq!(scene.control.drain(slot, &mut |_| true).unwrap().left, 0);
                    scene.control.modify(slot, BranchMode::rw()).unwrap();
                }
                let (plain, low) = (one_file(world, &PLAIN), one_file(world, &LOW));
                let reader = world.open(&world.find(b"a2").unwrap().node, OpenFlags::READ);
                let slot = scene.control.list()[from].slot;
                fault.after(step);
                let report = scene.control.drain(slot, &mut |_| true).unwrap();
                let what = format!("branch {from}, step {step}: {report:?}");
                // Before anything is put right: as users see it while the storage fails.
                let seen = one_file(world, &PLAIN);
                assert_eq!((seen.0, &seen.2), (plain.0, &plain.2), "{what}");
                if !fault.has_struck() {
                    assert!(step > 50 && report.left == 0, "{what}");
                    break;
                }
                fault.end();
                let mut buffer = [0; 8];
                assert_eq!(reader.read(&mut buffer, 0), Ok(5), "{what}");
                // Whatever is changed by one name is changed for all.
                assert_eq!(
                    world.open(&world.find(b"a1").unwrap().node, OpenFlags::WRITE).append(b"!"),
                    Ok(1),
                    "{what}"
                );
                let changed = (plain.0, plain.1, b"plain!".to_vec());
                assert_eq!((one_file(world, &PLAIN), one_file(world, &LOW)), (changed.clone(), low.clone()), "{what}");
                let fresh = World::new(Arc::new(scene.anew()));
                assert_eq!(
                    (one_file(&fresh, &PLAIN), one_file(&fresh, &LOW)),
                    (changed, low.clone()),
                    "after a remount, {what}"
                );
                drop(fresh);
                drop(reader);
                let again = scene.control.drain(slot, &mut |_| true).unwrap();
                assert_eq!(again.left, 0, "{what}, again: {again:?}");
                scene.control.remove(slot, false).unwrap();
                assert_eq!(
                    one_file(world, &PLAIN),
                    (plain.0, plain.1, b"plain!".to_vec()),
                    "without the branch, {what}"
                );
                assert_eq!(one_file(world, &LOW), low, "without the branch, {what}");
                drop(scene.anew());
                for layer in &layers[..2] {
                    let own = World::new(Arc::clone(layer));
                    let left = own.find(b".wh..wh.links").map(|index| own.names(&index.node)).unwrap_or_default();
                    // The branch that is no longer there was not looked at.
                    let gone = left.iter().filter(|name| {
                        name.ends_with(b".m") || name.ends_with(b".l") && Arc::ptr_eq(layer, &layers[1 - from])
                    });
                    assert_eq!(gone.count(), 0, "{what}: {left:?}");
                }
            }
        }
    }
}

/// A name that cannot be seen keeps the others.
#[test]
fn files_with_names_elsewhere_stay() {
    let layers: Vec<Arc<dyn Layer>> = (0..3).map(|_| mem()).collect();
    let below = World::new(Arc::clone(&layers[1]));
    let node = below.file(b"seen", b"").0.node;
    link(&below, &node, &below.root, b"hidden");
    let scene = Scene::new(layers, &["rw", "rw", "rw"], UnionOptions { sync: false, ..UnionOptions::default() });
    World::new(Arc::clone(&scene.at(0).1)).file(b"hidden", b"other");
    let report = scene.control.drain(scene.control.list()[1].slot, &mut |_| true).unwrap();
    let told: Vec<_> = report.examples.iter().map(|left| (&left.path[..], &left.why[..])).collect();
    assert_eq!(
        told,
        [(&b"seen"[..], "1 of its 2 names cannot be seen: outside of the branch, or hidden by another one")]
    );
}

/// Names come and go and files are written by several threads, while all is moved back and forth:
/// names of one file stay names of one file.
#[test]
fn files_with_several_names_move_under_load() {
    const FILES: usize = 12;
    let scene = Scene::new(vec![mem(), mem()], &["rw", "rw"], UnionOptions { sync: false, ..UnionOptions::default() });
    let world = &scene.world;
    let other = world.directory(b"other");
    for number in 0..FILES {
        let node = world.file(format!("first{number}").as_bytes(), b"").0.node;
        link(world, &node, &other, format!("second{number}").as_bytes());
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    let written: Vec<std::sync::atomic::AtomicUsize> =
        (0..FILES).map(|_| std::sync::atomic::AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        for part in 0..3_usize {
            let (stop, written, other) = (&stop, &written, &other);
            scope.spawn(move || {
                let mut round = part;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let number = round % FILES;
                    let (first, third) = (format!("first{number}"), format!("third{number}-{part}"));
                    let node = world.find(first.as_bytes()).unwrap().node;
                    if round % 3 == 0 {
                        assert_eq!(world.open(&node, OpenFlags::WRITE).append(b"x"), Ok(1));
                        written[number].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                    let (name, moved) = (Name::new(third.as_bytes()).unwrap(), Name::new(b"moved").unwrap());
                    // A link may find the file on its way; nothing is lost by that.
                    if world.layer.link(&world.caller, &node, None, &world.root, name).is_ok() {
                        if part == 0 {
                            world
                                .layer
                                .rename(&world.caller, &world.root, name, other, moved, nacre_vfs::RenameFlags(0))
                                .unwrap();
                            world.layer.unlink(&world.caller, other, moved).unwrap();
                        } else {
                            world.layer.unlink(&world.caller, &world.root, name).unwrap();
                        }
                    }
                    round += 1;
                }
            });
        }
        let mut went = 0;
        for round in 0..120 {
            let from = &scene.control.list()[round % 2];
            went += scene.control.drain(from.slot, &mut |_| true).unwrap().moved;
            scene.control.modify(from.slot, BranchMode::rw()).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(went > 0);
    });
    for (number, written) in written.iter().enumerate() {
        let names = [format!("first{number}"), format!("other/second{number}")];
        let (_, links, content) = one_file(world, &[names[0].as_bytes(), names[1].as_bytes()]);
        assert_eq!((links, content.len()), (2, written.load(std::sync::atomic::Ordering::Relaxed)), "{number}");
    }
    assert_eq!(scene.fresh(), model::tree(world));
}
