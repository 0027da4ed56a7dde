//! A full branch: the file being written moves to another one, every writer and reader follows, and
//! nothing is lost at any step.

use crate::unions::{mem, union};
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
};
use nacre_union::UnionOptions;
use nacre_vfs::{Errno, Layer, Name, OpenFlags, WriteOrigin};
use std::sync::Arc;

struct Scene {
    fault: Arc<Fault>,
    top: Arc<dyn Layer>,
    bottom: Arc<dyn Layer>,
}

impl Scene {
    fn new(lasting: bool) -> Scene {
        Scene { fault: Fault::new(Errno::ENOSPC, lasting), top: mem(), bottom: mem() }
    }

    fn world(&self, move_when_full: bool) -> World {
        let top = Arc::new(Faulty { below: Arc::clone(&self.top), fault: Arc::clone(&self.fault) });
        let move_when_full = move_when_full.then(|| "mfs".parse().unwrap());
        let options = UnionOptions { move_when_full, sync: false, ..UnionOptions::default() };
        World::new(union(vec![(top, "rw"), (mem(), "ro"), (Arc::clone(&self.bottom), "rw")], options))
    }

    /// Where the file is: its content on the upper and on the lower branch.
    fn places(&self) -> [Option<Vec<u8>>; 2] {
        [&self.top, &self.bottom].map(|layer| {
            let world = World::new(Arc::clone(layer));
            let directory = world.find(b"directory").ok()?.node;
            world.find_in(&directory, b"file").ok().map(|found| world.content(&found.node))
        })
    }
}

#[test]
fn a_full_branch_is_left() {
    let scene = Scene::new(false);
    let world = scene.world(true);
    let directory = world.directory(b"directory");
    let (made, writer) = world.file_in(&directory, b"file", b"content");
    let reader = world.open(&made.node, OpenFlags::READ);
    assert!(writer.backing().is_none());
    scene.fault.after(0);
    assert_eq!(writer.append(b" and more"), Ok(9));
    assert!(scene.fault.has_struck());
    assert_eq!(scene.places(), [None, Some(b"content and more".to_vec())]);
    let mut buffer = [0; 32];
    assert_eq!(reader.read(&mut buffer, 0), Ok(16));
    assert_eq!(writer.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    let found = world.find_in(&directory, b"file").unwrap();
    assert_eq!((found.attr.id, found.attr.size, found.attr.nlink), (made.attr.id, 16, 1));
    let again = scene.world(true);
    let found = again.find_in(&again.find(b"directory").unwrap().node, b"file").unwrap();
    assert_eq!((found.attr.id, again.content(&found.node)), (made.attr.id, b"Content and more".to_vec()));
}

#[test]
fn what_cannot_move_is_told() {
    let scene = Scene::new(false);
    let world = scene.world(false);
    let directory = world.directory(b"directory");
    let (_, writer) = world.file_in(&directory, b"file", b"content");
    scene.fault.after(0);
    assert_eq!(writer.append(b"x"), Err(Errno::ENOSPC), "not asked for");
    scene.fault.end();
    drop(world);
    let world = scene.world(true);
    let directory = world.find(b"directory").unwrap().node;
    let found = world.find_in(&directory, b"file").unwrap();
    world.layer.link(&world.caller, &found.node, None, &directory, Name::new(b"other").unwrap()).unwrap();
    scene.fault.after(0);
    assert_eq!(world.open(&found.node, OpenFlags::WRITE).append(b"x"), Err(Errno::ENOSPC), "names on two branches");
    assert_eq!(scene.places(), [Some(b"content".to_vec()), None]);
}

#[test]
fn a_fault_at_any_step_loses_nothing() {
    for step in 0..20 {
        let scene = Scene::new(true);
        let world = scene.world(true);
        let directory = world.directory(b"directory");
        let (made, writer) = world.file_in(&directory, b"file", b"content");
        // From the write on, the full branch does not even let the file go after so many steps.
        scene.fault.after(step);
        let answer = writer.append(b"!");
        scene.fault.end();
        let wanted: &[u8] = if answer.is_ok() { b"content!" } else { b"content" };
        assert_eq!(world.content(&made.node), wanted, "step {step}");
        let again = scene.world(true);
        let found = again.find_in(&again.find(b"directory").unwrap().node, b"file").unwrap();
        assert_eq!((again.content(&found.node), found.attr.id), (wanted.to_vec(), made.attr.id), "step {step}");
    }
}

#[test]
fn writers_on_all_sides_lose_nothing() {
    for round in 0..50_u64 {
        let scene = Scene::new(false);
        let world = scene.world(true);
        let directory = world.directory(b"directory");
        let (made, _) = world.file_in(&directory, b"file", &[b'.'; 4096]);
        std::thread::scope(|scope| {
            for part in 0..4_u64 {
                let (world, node) = (&world, &made.node);
                scope.spawn(move || {
                    let file = world.open(node, OpenFlags::READ_WRITE);
                    for at in 0..1024 {
                        assert_eq!(file.write(&[b'0' + part as u8], part * 1024 + at, WriteOrigin::Caller), Ok(1));
                    }
                });
            }
            scene.fault.after(i64::try_from(round * 37).unwrap());
        });
        let content = world.content(&world.find_in(&directory, b"file").unwrap().node);
        assert!(
            content.len() == 4096 && content.iter().enumerate().all(|(at, byte)| usize::from(byte - b'0') == at / 1024)
        );
        assert_eq!(scene.places().iter().flatten().count(), 1);
    }
}
