//! The check after a crash: it finds what is left over, puts it right, and never touches what is
//! needed.

use crate::unions::mem;
use nacre_testkit::name;
use nacre_testkit::{World, model::tree};
use nacre_union::{BranchMode, Problem, Union, UnionOptions};
use nacre_vfs::{Layer, OpenFlags, WriteOrigin, XattrFlags};
use std::sync::Arc;

struct Scene {
    upper: Arc<dyn Layer>,
    lower: Arc<dyn Layer>,
}

impl Scene {
    /// A file with three names below, one of which has been copied up.
    fn new() -> Scene {
        let scene = Scene { upper: mem(), lower: mem() };
        let lower = World::new(Arc::clone(&scene.lower));
        let (one, _) = lower.file(b"one", b"content");
        for other in [&b"two"[..], b"three"] {
            lower.layer.link(&lower.caller, &one.node, None, &lower.root, name(other)).unwrap();
        }
        lower.file_in(&lower.directory(b"directory"), b"below", b"");
        let (_, world) = scene.union();
        world.open(&world.find(b"one").unwrap().node, OpenFlags::WRITE).write(b"C", 0, WriteOrigin::Caller).unwrap();
        world.file_in(&world.find(b"directory").unwrap().node, b"above", b"");
        scene
    }

    fn union(&self) -> (Arc<Union>, World) {
        let branches = vec![(Arc::clone(&self.upper), BranchMode::rw()), (Arc::clone(&self.lower), BranchMode::ro())];
        let union = Arc::new(Union::new(branches, UnionOptions::default()).unwrap());
        (Arc::clone(&union), World::new(union))
    }
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    let scene = Scene::new();
    let (union, world) = scene.union();
    world.layer.unlink(&world.caller, &world.root, name(b"three")).unwrap();
    world.layer.unlink(&world.caller, &world.find(b"directory").unwrap().node, name(b"below")).unwrap();
    let before = tree(&world);
    assert_eq!(union.check(true).unwrap(), []);
    assert_eq!(tree(&scene.union().1), before);
}

#[test]
fn leftovers_go_and_nothing_else() {
    let scene = Scene::new();
    let upper = World::new(Arc::clone(&scene.upper));
    let directory = upper.find(b"directory").unwrap().node;
    upper.file(b".wh..wh.tmp.1", b"left");
    upper.file_in(&upper.directory_in(&directory, b".wh..wh.tmp.2"), b"inside", b"left");
    upper.file_in(&directory, b".wh.above", b"");
    upper.file_in(&directory, b".wh.unrelated", b"");
    let (union, world) = scene.union();
    let before = tree(&world);
    let found = union.check(false).unwrap();
    let told: Vec<_> =
        found.iter().map(|finding| (finding.path.as_slice(), finding.problem, finding.repaired)).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    for wanted in [
        (&b".wh..wh.tmp.1"[..], Problem::Leftover, false),
        (b"directory/.wh..wh.tmp.2", Problem::Leftover, false),
        (b"directory/.wh.above", Problem::UselessWhiteout, false),
    ] {
        assert!(told.contains(&wanted), "{wanted:?} in {told:?}");
    }
    assert!(union.check(true).unwrap().iter().all(|finding| finding.repaired));
    assert_eq!(union.check(true).unwrap(), []);
    assert_eq!(upper.names(&directory), [b".wh.unrelated".to_vec(), b"above".to_vec()]);
    assert_eq!(tree(&world), before);
}

#[test]
fn counts_of_links_are_put_right() {
    let scene = Scene::new();
    let upper = World::new(Arc::clone(&scene.upper));
    let index = upper.find(b".wh..wh.links").unwrap().node;
    let [entry] = upper.names(&index).try_into().unwrap();
    let copy = upper.find_in(&index, &entry).unwrap().node;
    upper
        .layer
        .setxattr(&upper.caller, &copy, b"trusted.nacre.names", &7_u32.to_le_bytes(), XattrFlags::default())
        .unwrap();
    let (union, world) = scene.union();
    assert_eq!(world.find(b"two").unwrap().attr.nlink, 8);
    let found = union.check(true).unwrap();
    assert_eq!(
        found.iter().map(|finding| finding.problem).collect::<Vec<_>>(),
        [Problem::TooManyLinks { counted: 7, found: 2 }]
    );
    assert_eq!(world.find(b"two").unwrap().attr.nlink, 3);
    let (union, world) = scene.union();
    assert_eq!((world.find(b"three").unwrap().attr.nlink, union.check(false).unwrap()), (3, Vec::new()));
    assert_eq!(world.content(&world.find(b"two").unwrap().node), b"Content");
}
