//! What users, rotations and waiting doors could do to a cage: one attack at a time.

use nacre_cage::{Cage, CageOptions, Storage, WhenFull, ledger::Limits};
use nacre_layers::context::Context;
use nacre_stack::{self as stack, spec::StackSpec};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_vfs::{
    Caller, Description, Errno, Filter, Filtered, Layer, Op, OpenFlags, RenameFlags, Result, WriteOrigin, WritebackHost,
};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

const APPEND: OpenFlags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);
/// After that, something waits for good.
const FOR_GOOD: Duration = Duration::from_secs(30);

fn over(directory: &Path, settings: &str) -> (World, Arc<Cage>) {
    crate::stacks::prepare_thread();
    let line = format!("host:{} | cage:{settings}", directory.to_str().unwrap());
    let built = stack::build(&StackSpec::from_line(line.as_bytes()).unwrap(), &Context::system().unwrap()).unwrap();
    let cage = built.cages().remove(0);
    (World::new(built.layer), cage)
}

fn rename(world: &World, from: &[u8], to: &[u8]) -> Result<()> {
    world.layer.rename(&world.caller, &world.root, name(from), &world.root, name(to), RenameFlags::default())
}

#[test]
fn a_directory_does_not_come_under_a_limit_uncounted() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage) = over(place.path(), "size=10M,limit=dir:nginx=40K,limit=dir:a/b=40K");
    let other = world.directory(b"other");
    world.file_in(&other, b"big", &[7; 400 << 10]);
    world.layer.mkdir(&world.caller, &other, name(b"b"), 0o755).unwrap();
    assert_eq!(rename(&world, b"other", b"nginx"), Err(Errno::EXDEV), "mv(1) copies then, which is counted");
    assert_eq!(rename(&world, b"other", b"a"), Err(Errno::EXDEV));
    world.directory(b"nginx");
    assert_eq!(rename(&world, b"other", b"nginx"), Err(Errno::EXDEV), "nor in place of the empty one");
    assert_eq!(rename(&world, b"other", b"nginx2"), Ok(()));
    assert!(cage.report().dirs.iter().all(|dir| dir.used <= 8 << 10));
    assert_eq!(cage.report().clamped, 0);
}

#[test]
fn a_file_in_the_place_of_a_limited_directory_is_in_no_directory() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("nginx"), [7; 100 << 10]).unwrap();
    let (world, cage) = over(place.path(), "size=10M,limit=dir:nginx=40K");
    let file = world.open(&world.find(b"nginx").unwrap().node, OpenFlags::READ_WRITE);
    assert_eq!(file.write(&[1; 4096], 200 << 10, WriteOrigin::Caller), Ok(4096), "its limit is for a directory");
    drop(file);
    world.layer.unlink(&world.caller, &world.root, name(b"nginx")).unwrap();
    let report = cage.report();
    assert_eq!((report.used, report.dirs[0].used, report.clamped), (0, 0, 0));
}

#[test]
fn a_file_that_also_has_a_kept_name_keeps_its_head() {
    let place = tempfile::tempdir().unwrap();
    let (world, cage) = over(place.path(), "size=40K,when-full=drop-oldest,keep=*.keep");
    let (entry, file) = world.file(b"log", b"");
    world.layer.link(&world.caller, &entry.node, None, &world.root, name(b"log.keep")).unwrap();
    while file.append(&[1; 4096]).is_ok() {}
    assert_eq!((file.append(&[1; 4096]), cage.report().dropped.heads), (Err(Errno::ENOSPC), 0));
    world.layer.unlink(&world.caller, &world.root, name(b"log.keep")).unwrap();
    assert_eq!(file.append(&[1; 4096]), Ok(4096), "it is only a log now");
}

/// Rotates the logs between the search for old files and the first removal.
struct Rotation {
    directory: PathBuf,
    seen: AtomicUsize,
}

impl Filter for Rotation {
    fn name(&self) -> &'static str {
        "rotation"
    }

    fn describe(&self) -> Description {
        Description::new("rotation")
    }

    fn allow(&self, _caller: &Caller, op: &Op<'_>) -> Result<()> {
        let at = |name: &str| self.directory.join(name);
        if let Op::Lookup(name) = op
            && name.bytes() == b"log.1"
            && at("armed").exists()
            && self.seen.fetch_add(1, SeqCst) == 1
        {
            std::fs::rename(at("log.1"), at("log.2")).unwrap();
            std::fs::rename(at("log"), at("log.1")).unwrap();
        }
        Ok(())
    }
}

#[test]
fn a_rotation_meanwhile_does_not_cost_the_newest_log() {
    crate::stacks::prepare_thread();
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_owned();
    let line = format!("host:{}", directory.to_str().unwrap());
    let context = Context::system().unwrap();
    let host = stack::build(&StackSpec::from_line(line.as_bytes()).unwrap(), &context).unwrap().layer;
    let rotation = Arc::new(Rotation { directory: directory.clone(), seen: AtomicUsize::new(0) });
    let below: Arc<dyn Layer> = Arc::new(Filtered::new(rotation, host));
    let limits = Limits { bytes: Some(40 << 10), ..Limits::default() };
    let options = CageOptions { when_full: WhenFull::DropOldest, storage: Storage::Plain, ..CageOptions::new(limits) };
    let cage = Cage::new(below, options, &context).unwrap();
    let world = World::new(Arc::clone(&cage) as Arc<dyn Layer>);
    world.file(b"log.1", b"oldest");
    let (_, newest) = world.file(b"log", b"newest");
    let (_, other) = world.file(b"other.keep", b"");
    while cage.report().free != Some(0) {
        other.append(&[1; 4096]).unwrap();
    }
    std::fs::write(directory.join("armed"), "").unwrap();
    let _ = other.append(&[1; 4096]);
    assert_eq!(std::fs::read(directory.join("log.1")).unwrap(), b"newest");
    drop(newest);
}

/// A door that settles when it is told to.
struct Slow {
    settling: Sender<()>,
    go_on: parking_lot::Mutex<Receiver<()>>,
}

impl WritebackHost for Slow {
    fn lets_in(&self) {
        panic!("a cage lets in only what was granted");
    }

    fn dirty_limit(&self, _files: usize) -> u64 {
        1 << 20
    }

    fn recall(&self) {}

    fn flush(&self) -> Result<()> {
        self.settling.send(()).map_err(|_| Errno::EIO)?;
        self.go_on.lock().recv().map_err(|_| Errno::EIO)
    }
}

#[test]
fn who_waits_for_a_door_holds_nobody_else_off() {
    let (place, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (world, cage) =
        over(place.path(), &format!("size=4M,writes=collected,state={}", state.path().to_str().unwrap()));
    let (settling, begun) = channel();
    let (go_on, told) = channel();
    let door: Arc<dyn WritebackHost> = Arc::new(Slow { settling, go_on: parking_lot::Mutex::new(told) });
    assert!(world.layer.capabilities().writeback.unwrap().accept(&door));
    let world = Arc::new(world);
    let below = world.directory(b"below");
    world.directory(b"moving");
    let log = world.layer.create(&world.caller, &world.root, name(b"log"), 0o644, APPEND).unwrap().1;
    assert!(log.writeback_lease().unwrap().begin());
    // What is held back arrives and leaves too little, so that the permission is recalled.
    assert_eq!(log.write(&vec![1; (3 << 20) - (8 << 10)], 0, WriteOrigin::Caller), Ok((3 << 20) - (8 << 10)));
    let maker = {
        let world = Arc::clone(&world);
        std::thread::spawn(move || {
            crate::stacks::prepare_thread();
            world.layer.mkdir(&world.caller, &below, name(b"waits"), 0o755).map(|_| ())
        })
    };
    begun.recv_timeout(FOR_GOOD).unwrap();
    // A checkpoint is due whenever a directory has moved.
    let (done, end) = channel();
    let others = {
        let world = Arc::clone(&world);
        std::thread::spawn(move || {
            crate::stacks::prepare_thread();
            rename(&world, b"moving", b"moved").unwrap();
            for number in 0..300 {
                std::thread::sleep(Duration::from_millis(1));
                world
                    .layer
                    .create(&world.caller, &world.root, name(format!("{number}").as_bytes()), 0o644, OpenFlags::WRITE)
                    .unwrap();
            }
            done.send(()).unwrap();
        })
    };
    let ended = end.recv_timeout(FOR_GOOD);
    drop(go_on);
    assert_eq!(ended, Ok(()), "whoever makes something waits for what waits for a door");
    others.join().unwrap();
    let _either = maker.join().unwrap();
    cage.shut_down();
}
