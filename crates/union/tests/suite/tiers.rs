//! Files that go between fast and slow branches while they are in use: by command, by rule, by
//! being opened.

use crate::unions::{Directories, host, mem};
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
    model,
};
use nacre_union::{BranchMode, Control, Direction, Member, Stay, TierRules, Union, UnionOptions, Why};
use nacre_vfs::{
    Caller, Description, Errno, Filter, Filtered, Kind, Layer, Name, OpenFlags, SetAttr, SetTime, StatFs, Time,
    WriteOrigin, XattrFlags,
};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// A storage of so many blocks of 4 KiB, which its files fill.
struct Limited {
    below: Arc<dyn Layer>,
    blocks: u64,
}

impl Filter for Limited {
    fn name(&self) -> &'static str {
        "limited"
    }

    fn describe(&self) -> Description {
        Description::new("limited")
    }

    fn statfs_up(&self, statfs: &mut StatFs) {
        let world = World::new(Arc::clone(&self.below));
        let (mut used, mut waiting) = (0, vec![world.root.clone()]);
        while let Some(directory) = waiting.pop() {
            for entry in world.list(&directory, true, 64).into_iter().filter_map(|listed| listed.entry) {
                match entry.attr.kind {
                    Kind::Directory => waiting.push(entry.node),
                    _ => used += entry.attr.size.div_ceil(4096),
                }
            }
        }
        let free = self.blocks.saturating_sub(used);
        *statfs = StatFs { fragment: 4096, block: 4096, blocks: self.blocks, free, available: free, ..*statfs };
    }
}

struct Scene {
    below: Vec<Arc<dyn Layer>>,
    control: Control,
    world: World,
    fault: Arc<Fault>,
}

impl Scene {
    fn new(branches: &[(&str, u64)], options: UnionOptions) -> Scene {
        let below: Vec<Arc<dyn Layer>> = branches.iter().map(|_| mem()).collect();
        let fault = Fault::new(Errno::EIO, true);
        let member = |index: usize| {
            let (below, (mode, blocks)) = (&below[index], &branches[index]);
            let limited: Arc<dyn Layer> = Arc::new(Filtered::new(
                Arc::new(Limited { below: Arc::clone(below), blocks: *blocks }),
                Arc::clone(below),
            ));
            let layer: Arc<dyn Layer> = Arc::new(Faulty { below: limited, fault: Arc::clone(&fault) });
            Member {
                name: PathBuf::from(format!("/{index}")),
                layer,
                mode: BranchMode::parse(mode).unwrap(),
                work: None,
                lock: None,
            }
        };
        let members = (0..branches.len()).map(member).collect();
        let options = UnionOptions { sync: false, ..options };
        let union = Arc::new(Union::named(members, options).unwrap());
        let control = union.control();
        Scene { below, control, world: World::new(union), fault }
    }

    /// On which branches a file in `directory` is, with its content.
    fn places(&self, name: &[u8]) -> Vec<Option<Vec<u8>>> {
        let place = |layer: &Arc<dyn Layer>| {
            let world = World::new(Arc::clone(layer));
            let directory = world.find(b"directory").ok()?.node;
            world.find_in(&directory, name).ok().map(|found| world.content(&found.node))
        };
        self.below.iter().map(place).collect()
    }

    fn file(&self, name: &[u8], size: usize, used: i64) -> nacre_vfs::Entry {
        let directory = if self.world.exists(b"directory") {
            self.world.find(b"directory").unwrap().node
        } else {
            self.world.directory(b"directory")
        };
        let (entry, _) = self.world.file_in(&directory, name, &vec![name[0]; size]);
        let time = Some(SetTime::To(Time { sec: used, nsec: 0 }));
        self.world.change(&entry.node, SetAttr { atime: time, mtime: time, ..SetAttr::default() });
        entry
    }
}

fn go_on(_: u64) -> bool {
    true
}

#[test]
fn single_files_go_up_and_down() {
    let scene = Scene::new(&[("rw", 1000), ("ro", 1000), ("rw", 1000)], UnionOptions::default());
    let made = scene.file(b"file", 10_000, 5);
    let content = vec![b'f'; 10_000];
    scene.world.layer.setxattr(&scene.world.caller, &made.node, b"user.key", b"value", XattrFlags::default()).unwrap();
    let path = b"directory/file";
    assert_eq!(scene.control.move_file(path, Direction::Down, &mut go_on), Ok(10_000));
    assert_eq!(scene.places(b"file"), [None, None, Some(content.clone())]);
    let found = scene.world.find_in(&scene.world.find(b"directory").unwrap().node, b"file").unwrap();
    assert_eq!((found.attr.id, found.attr.mtime.sec, found.attr.size), (made.attr.id, 5, 10_000));
    assert_eq!(scene.world.attr(&made.node).id, made.attr.id);
    let location = scene.control.locate(path).unwrap();
    assert_eq!((location.shown, location.all), (PathBuf::from("/2"), vec![PathBuf::from("/2")]));
    assert_eq!(scene.control.move_file(path, Direction::Down, &mut go_on), Err(Stay::NoRoom), "there is nothing below");
    assert_eq!(scene.control.move_file(path, Direction::To(1), &mut go_on), Err(Stay::NoRoom), "read-only");
    let writer = scene.world.open(&made.node, OpenFlags::WRITE);
    assert_eq!(scene.control.move_file(path, Direction::Up, &mut go_on), Err(Stay::Open));
    drop(writer);
    let reader = scene.world.open(&made.node, OpenFlags::READ);
    assert_eq!(scene.control.move_file(path, Direction::Up, &mut |_| false), Err(Stay::Stopped));
    assert_eq!(scene.control.move_file(path, Direction::To(0), &mut go_on), Ok(10_000));
    assert_eq!(scene.places(b"file"), [Some(content.clone()), None, None]);
    scene.world.open(&made.node, OpenFlags::WRITE).write(b"new", 0, WriteOrigin::Caller).unwrap();
    let mut buffer = [0; 3];
    assert_eq!((reader.read(&mut buffer, 0), &buffer), (Ok(3), b"new"), "a reader follows");
    let mut value = [0; 8];
    assert_eq!(scene.world.layer.getxattr(&scene.world.caller, &made.node, b"user.key", &mut value), Ok(5));
    assert_eq!(scene.control.move_file(b"directory", Direction::Down, &mut go_on), Err(Stay::Failed(Errno::EISDIR)));
    assert_eq!(scene.control.move_file(b"nothing", Direction::Down, &mut go_on), Err(Stay::Changed));
}

#[test]
fn attributes_tell_and_pin() {
    let scene = Scene::new(&[("rw", 1000), ("rw", 1000)], UnionOptions::default());
    let made = scene.file(b"file", 10, 5);
    let (layer, caller) = (&scene.world.layer, &scene.world.caller);
    let read = |name: &str| {
        let mut value = vec![0; 256];
        let size = layer.getxattr(caller, &made.node, name.as_bytes(), &mut value)?;
        assert_eq!(layer.getxattr(caller, &made.node, name.as_bytes(), &mut []), Ok(size));
        value.truncate(size);
        Ok(String::from_utf8(value).unwrap())
    };
    for (name, wanted) in [
        ("user.nacre.branch", "/0"),
        ("user.nacre.branches", "/0"),
        ("user.mergerfs.basepath", "/0"),
        ("user.mergerfs.relpath", "/directory/file"),
        ("user.mergerfs.fullpath", "/0/directory/file"),
        ("user.mergerfs.allpaths", "/0/directory/file"),
    ] {
        assert_eq!(read(name), Ok(wanted.to_owned()), "{name}");
    }
    assert_eq!(layer.listxattr(caller, &made.node, &mut []), Ok(0), "not listed");
    assert_eq!(
        layer.setxattr(caller, &made.node, b"user.nacre.branch", b"/1", XattrFlags::default()),
        Err(Errno::EPERM)
    );
    assert_eq!(read("user.nacre.pin"), Err(Errno::ENODATA));
    layer.setxattr(caller, &made.node, b"user.nacre.pin", b"yes", XattrFlags::default()).unwrap();
    assert_eq!(read("user.nacre.pin"), Ok("1".to_owned()));
    assert!(scene.control.locate(b"directory/file").unwrap().pinned);
    assert_eq!(scene.control.move_file(b"directory/file", Direction::Down, &mut go_on), Err(Stay::Pinned));
    layer.removexattr(caller, &made.node, b"user.nacre.pin").unwrap();
    assert_eq!(scene.control.move_file(b"directory/file", Direction::Down, &mut go_on), Ok(10));
    assert_eq!(read("user.nacre.branch"), Ok("/1".to_owned()));
}

#[test]
fn a_full_tier_is_relieved() {
    let rules: TierRules = "high=80,low=50,every=3600,keep=kept*".parse().unwrap();
    let scene = Scene::new(
        &[("rw+tier", 20), ("rw", 1000), ("rw+tier", 1000)],
        UnionOptions { tier: rules, ..UnionOptions::default() },
    );
    // The thread looks once at the start, when nothing is there yet.
    let names = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"];
    let made: Vec<_> = names.iter().map(|name| scene.file(&name[..], 8192, 0)).collect();
    scene.file(b"kept", 4096, 0);
    let before = model::tree(&scene.world);
    for (used, entry) in (0..).zip(made.iter().rev()) {
        let time = Some(SetTime::To(Time { sec: used, nsec: 0 }));
        scene.world.change(&entry.node, SetAttr { atime: time, mtime: time, ..SetAttr::default() });
    }
    let writer = scene.world.open(
        &scene.world.find_in(&scene.world.find(b"directory").unwrap().node, b"h").unwrap().node,
        OpenFlags::WRITE,
    );
    let now = Duration::from_secs(1_000);
    let dry = scene.control.tier_run_at(now, true, &mut go_on).unwrap();
    let planned = |report: &nacre_union::TierReport| {
        report.planned.iter().map(|one| (one.path.clone(), one.why)).collect::<Vec<_>>()
    };
    let wanted: Vec<_> =
        [b"h", b"g", b"f", b"e"].iter().map(|name| ([b"directory/", &name[..]].concat(), Why::Full)).collect();
    assert_eq!((planned(&dry), dry.moved), (wanted.clone(), 0));
    assert_eq!(scene.control.locate(b"directory/g").unwrap().shown, PathBuf::from("/0"));
    let report = scene.control.tier_run_at(now, false, &mut go_on).unwrap();
    assert_eq!((planned(&report), report.moved, report.bytes), (wanted, 3, 3 * 8192));
    assert_eq!(
        report.left.iter().map(|left| (&left.path[..], &left.why[..])).collect::<Vec<_>>(),
        [(&b"directory/h"[..], "it is open")]
    );
    assert_eq!(scene.places(b"g"), [None, None, Some(vec![b'g'; 8192])]);
    assert!(scene.places(b"kept")[0].is_some() && scene.places(b"h")[0].is_some());
    assert_eq!(model::tree(&scene.world), before, "nothing has changed for users");
    let status = scene.control.tier_status();
    assert_eq!((status.moved_down, status.moved_up, status.tiers.len()), (3, 0, 2));
    drop(writer);
    let single = Scene::new(&[("rw+tier", 20), ("rw", 20)], UnionOptions::default());
    assert_eq!(single.control.tier_run_at(now, false, &mut go_on), Err(Errno::EINVAL));
}

#[test]
fn what_is_used_much_goes_up() {
    let rules: TierRules = "heat=3,every=3600".parse().unwrap();
    let scene =
        Scene::new(&[("rw+tier", 100), ("rw+tier", 1000)], UnionOptions { tier: rules, ..UnionOptions::default() });
    for name in [&b"hot"[..], b"cold"] {
        scene.file(name, 4096, 5);
        scene.control.move_file(&[b"directory/", name].concat(), Direction::Down, &mut go_on).unwrap();
    }
    let directory = scene.world.find(b"directory").unwrap().node;
    for _ in 0..5 {
        scene.world.content(&scene.world.find_in(&directory, b"hot").unwrap().node);
    }
    let report = scene.control.tier_run(false, &mut go_on).unwrap();
    assert_eq!(
        report.planned.iter().map(|one| (&one.path[..], one.why)).collect::<Vec<_>>(),
        [(&b"directory/hot"[..], Why::Hot)]
    );
    assert_eq!((scene.places(b"hot")[0].is_some(), scene.places(b"cold")[0].is_some()), (true, false));
    assert_eq!(scene.control.tier_status().moved_up, 1);
    scene.control.set_tier_rules("cold=hot,every=3600".parse().unwrap()).unwrap();
    scene.control.tier_run(false, &mut go_on).unwrap();
    assert!(scene.places(b"hot")[1].is_some());
}

#[test]
fn files_come_up_when_they_are_opened() {
    for (mode, stays) in [("ro+coo_reg", true), ("rw+coo_reg", true), ("rw+moo", false), ("rw+coo_all", true)] {
        let scene = Scene::new(&[("rw", 1000), (mode, 1000)], UnionOptions::default());
        let low = World::new(Arc::clone(&scene.below[1]));
        low.file_in(&low.directory(b"directory"), b"file", b"content");
        let directory = scene.world.find(b"directory").unwrap().node;
        scene.world.names(&directory);
        assert_eq!(World::new(Arc::clone(&scene.below[0])).exists(b"directory"), mode.contains("all"), "{mode}");
        let found = scene.world.find_in(&directory, b"file").unwrap();
        assert_eq!(scene.world.content(&found.node), b"content");
        let place = |there: bool| there.then(|| b"content".to_vec());
        assert_eq!(scene.places(b"file"), [place(true), place(stays)], "{mode}");
        let again = scene.world.find_in(&directory, b"file").unwrap();
        assert_eq!((again.attr.id, again.attr.nlink), (found.attr.id, 1));
        // A copy that is removed does not bring the old one to light.
        scene.world.layer.unlink(&scene.world.caller, &directory, Name::new(b"file").unwrap()).unwrap();
        assert_eq!(scene.world.find_in(&directory, b"file").err(), Some(Errno::ENOENT), "{mode}");
    }
    // Where there is no room above, it is opened where it is.
    let scene = Scene::new(&[("rw", 1), ("ro+coo_reg", 1000)], UnionOptions::default());
    let low = World::new(Arc::clone(&scene.below[1]));
    low.file_in(&low.directory(b"directory"), b"file", &[b'x'; 10_000]);
    let found = scene.world.find_in(&scene.world.find(b"directory").unwrap().node, b"file").unwrap();
    assert_eq!(scene.world.content(&found.node).len(), 10_000);
    assert_eq!(scene.places(b"file")[0], None);
}

#[test]
fn a_fault_at_any_step_of_a_move_loses_nothing() {
    for direction in [Direction::Down, Direction::Up] {
        for step in 0..25 {
            let scene = Scene::new(&[("rw", 1000), ("rw", 1000)], UnionOptions::default());
            scene.file(b"file", 9_000, 5);
            let content = vec![b'f'; 9_000];
            let path = b"directory/file";
            if direction == Direction::Up {
                scene.control.move_file(path, Direction::Down, &mut go_on).unwrap();
            }
            scene.fault.after(step);
            let moved = scene.control.move_file(path, direction, &mut go_on);
            scene.fault.end();
            // What is there by itself, as after a crash: a new union over the same trees.
            let again = crate::unions::union(
                scene.below.iter().map(|layer| (Arc::clone(layer), "rw")).collect(),
                UnionOptions::default(),
            );
            let again = World::new(again);
            let directory = again.find(b"directory").unwrap().node;
            let found = again.find_in(&directory, b"file").unwrap();
            assert_eq!(again.content(&found.node), content, "{direction:?} {step} {moved:?}");
            let here = scene.world.find_in(&scene.world.find(b"directory").unwrap().node, b"file").unwrap();
            assert_eq!(scene.world.content(&here.node), content, "{direction:?} {step} {moved:?}");
            assert_eq!(again.names(&directory), [b"file".to_vec()]);
        }
    }
}

/// Writers, readers, renames and removals while everything is moved to and fro and drained: nothing
/// is lost, nothing comes back.
#[test]
fn moves_under_load_lose_nothing() {
    let scene = Scene::new(&[("rw", 100_000), ("rw", 100_000)], UnionOptions::default());
    for number in 0..8 {
        scene.file(format!("{number}").as_bytes(), 1, 5);
    }
    let directory = scene.world.find(b"directory").unwrap().node;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let is_over = || stop.load(std::sync::atomic::Ordering::Relaxed);
    let (world, control) = (&scene.world, &scene.control);
    let mut moved = 0_u64;
    let written: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4_usize)
            .map(|part| {
                let (directory, is_over) = (&directory, &is_over);
                scope.spawn(move || {
                    let mut wanted = vec![part as u8 + b'0'];
                    let names = [format!("{part}"), format!("{part}-renamed")];
                    let mut at = 0;
                    while !is_over() || wanted.len() < 20 {
                        let found = world.find_in(directory, names[at].as_bytes()).unwrap();
                        let file = world.open(&found.node, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND));
                        assert_eq!(file.append(b"+"), Ok(1));
                        drop(file);
                        wanted.push(b'+');
                        assert_eq!(world.content(&found.node), wanted);
                        let (old, new) =
                            (Name::new(names[at].as_bytes()).unwrap(), Name::new(names[1 - at].as_bytes()).unwrap());
                        world
                            .layer
                            .rename(&world.caller, directory, old, directory, new, nacre_vfs::RenameFlags(0))
                            .unwrap();
                        at = 1 - at;
                        assert_eq!(world.find_in(directory, names[1 - at].as_bytes()).err(), Some(Errno::ENOENT));
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    if at == 1 {
                        let (old, new) =
                            (Name::new(names[1].as_bytes()).unwrap(), Name::new(names[0].as_bytes()).unwrap());
                        world
                            .layer
                            .rename(&world.caller, directory, old, directory, new, nacre_vfs::RenameFlags(0))
                            .unwrap();
                    }
                    wanted
                })
            })
            .collect();
        for round in 0..60 {
            for name in world.names(&directory) {
                let path = [b"directory/", &name[..]].concat();
                let direction = if round % 2 == 0 { Direction::Down } else { Direction::Up };
                moved += u64::from(control.move_file(&path, direction, &mut go_on).is_ok());
            }
            if round % 20 == 19 {
                let report = control.drain(control.list()[round / 20 % 2].slot, &mut |_| true).unwrap();
                moved += report.moved;
                control.modify(control.list()[round / 20 % 2].slot, BranchMode::rw()).ok();
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    assert!(moved > 100, "{moved} moves");
    for (part, wanted) in written.iter().enumerate() {
        let name = format!("{part}");
        let found = world.find_in(&directory, name.as_bytes()).unwrap();
        assert_eq!(&world.content(&found.node), wanted);
        assert_eq!(scene.places(name.as_bytes()).iter().flatten().count(), 1, "in one place");
    }
    assert_eq!(world.names(&directory).len(), 8);
}

/// A program that has the file open, or mapped, on the branch itself.
#[test]
fn what_others_use_on_the_branch_stays() {
    nacre_layers::host::prepare_worker().unwrap();
    let directories = Directories::new();
    let (top, bottom) = (directories.fresh(), directories.fresh());
    let member = |path: &PathBuf| Member {
        name: path.clone(),
        layer: host(path),
        mode: BranchMode::rw(),
        work: None,
        lock: None,
    };
    let union = Arc::new(Union::named(vec![member(&top), member(&bottom)], UnionOptions::default()).unwrap());
    std::fs::write(top.join("file"), b"content").unwrap();
    let control = union.control();
    let open = std::fs::OpenOptions::new().append(true).open(top.join("file")).unwrap();
    assert_eq!(control.move_file(b"file", Direction::Down, &mut go_on), Err(Stay::InUse));
    drop(open);
    let world = World::new(Arc::clone(&union) as Arc<dyn Layer>);
    let entry = world.find(b"file").unwrap();
    let reader = world.open(&entry.node, OpenFlags::READ);
    assert!(reader.backing().is_some());
    assert_eq!(
        control.move_file(b"file", Direction::Down, &mut go_on),
        Err(Stay::Open),
        "the kernel may read it by itself"
    );
    drop(reader);
    assert_eq!(control.move_file(b"file", Direction::Down, &mut go_on), Ok(7));
    assert_eq!(std::fs::read(bottom.join("file")).unwrap(), b"content");
    assert!(!top.join("file").exists());
    let caller = Caller::ROOT;
    let mut value = [0; 256];
    let size = world.layer.getxattr(&caller, &entry.node, b"user.mergerfs.fullpath", &mut value).unwrap();
    assert_eq!(&value[..size], bottom.join("file").to_str().unwrap().as_bytes());
    let name = format!("{}", Why::Full);
    assert!(!name.is_empty());
}
