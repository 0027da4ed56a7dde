//! A tree of file systems in memory: the conformance suite, and the borders between file systems.

use super::{DatasetTree, Rules, join};
use crate::dataset::Dataset;
use crate::dataset::tests::create;
use nacre_pool::device::Simulator;
use nacre_pool::engine::{NewDataset, Pool};
use nacre_vfs::{
    Attr, Caller, DirEntry, DirSink, Entry, Errno, Invalidation, Layer, Name, Node, Numbered, OpenFlags, RenameFlags,
    Result, SetAttr, WriteOrigin,
};
use std::sync::{Arc, mpsc};

const WHO: Caller = Caller::ROOT;

struct World {
    pool: Arc<Pool>,
    tree: DatasetTree,
    changes: mpsc::Receiver<Invalidation>,
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

impl World {
    fn new() -> World {
        World::over(create(&Arc::new(Simulator::new("disk", 128 << 20))))
    }

    fn over(pool: Arc<Pool>) -> World {
        let first = Dataset::open(&pool, pool.find("tank").unwrap().unwrap()).unwrap();
        let tree = DatasetTree::new(Arc::new(first), Rules::default());
        let (sender, changes) = mpsc::channel();
        tree.watch(sender);
        World { pool, tree, changes }
    }

    fn dataset(&self, called: &str) -> u64 {
        let parent = self.pool.find("tank").unwrap().unwrap();
        let found = self.pool.find(&format!("tank/{called}")).unwrap();
        found.unwrap_or_else(|| {
            self.pool.create_dataset(&NewDataset { parent, name: called.to_owned(), properties: Vec::new() }).unwrap()
        })
    }

    /// Mounts a file system on a directory; returns its number.
    fn graft(&self, called: &str, on: &Entry) -> u64 {
        let id = self.dataset(called);
        self.tree.graft(Arc::new(Dataset::open(&self.pool, id).unwrap()), on.attr.id.ino, Rules::default()).unwrap();
        id
    }

    fn root(&self) -> Node {
        self.tree.root().unwrap().node
    }

    fn mkdir(&self, parent: &Node, called: &str) -> Entry {
        self.tree.mkdir(&WHO, parent, name(called), 0o755).unwrap()
    }

    fn find(&self, path: &str) -> Result<Entry> {
        let root = self.tree.root()?;
        path.split('/')
            .filter(|part| !part.is_empty())
            .try_fold(root, |at, part| self.tree.lookup(&WHO, &at.node, name(part)))
    }

    fn write(&self, path: &str, content: &[u8]) -> Attr {
        let (above, called) = path.rsplit_once('/').unwrap();
        let above = self.find(above).unwrap().node;
        let (made, file) = self.tree.create(&WHO, &above, name(called), 0o600, OpenFlags::WRITE).unwrap();
        file.write(content, 0, WriteOrigin::Caller).unwrap();
        made.attr
    }

    fn read(&self, path: &str) -> Result<Vec<u8>> {
        let file = self.tree.open(&WHO, &self.find(path)?.node, OpenFlags::READ)?;
        let mut content = vec![0; 100];
        let count = file.read(&mut content, 0)?;
        content.truncate(count);
        Ok(content)
    }
}

#[derive(Default)]
struct Names(Vec<(String, u64, Option<u64>)>);

impl DirSink for Names {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        let called = String::from_utf8(entry.name.bytes().to_vec()).unwrap();
        self.0.push((called, entry.ino, entry.entry.map(|entry| entry.attr.id.ino)));
        true
    }
}

#[test]
fn a_tree_of_one_conforms() {
    nacre_testkit::conformance::run(|| Arc::new(World::new().tree));
}

#[test]
fn one_lies_below_another() {
    let world = World::new();
    let covered = world.mkdir(&world.root(), "a");
    world.write("a/hidden", b"below");
    let id = world.graft("a", &covered);
    let told = world.changes.try_recv().unwrap();
    assert_eq!(told, Invalidation::Forget { parent: world.tree.root().unwrap().attr.id, name: (*b"a").into() });
    assert_eq!(world.read("a/hidden"), Err(Errno::ENOENT));
    let made = world.write("a/f", b"mine");
    assert_eq!(world.read("a/f").unwrap(), b"mine");
    // Each file has a number of its own, which leads to it.
    let top = world.find("a").unwrap();
    assert_ne!(top.attr.id.ino, covered.attr.id.ino);
    assert_ne!(top.attr.id.ino, made.id.ino);
    for number in [1, top.attr.id.ino, made.id.ino] {
        let node = world.tree.node(number).unwrap();
        assert_eq!(world.tree.getattr(&WHO, &node, None).unwrap().id.ino, number);
        assert_eq!(world.tree.id(&node).unwrap().fs, world.tree.root().unwrap().attr.id.fs);
    }
    assert_eq!(world.tree.parent(&top.node), 1);
    assert_eq!(world.tree.parent(&world.find("a/f").unwrap().node), top.attr.id.ino);
    assert_eq!(world.tree.path(&world.find("a/f").unwrap().node).unwrap(), b"a/f");
    for attributes in [false, true] {
        let mut names = Names::default();
        world.tree.readdir(&WHO, &world.root(), 0, attributes, &mut names).unwrap();
        assert_eq!(names.0, [("a".to_owned(), top.attr.id.ino, attributes.then_some(top.attr.id.ino))]);
    }
    // Files written there belong to that file system.
    world.pool.commit().unwrap();
    let alone = Dataset::open(&world.pool, id).unwrap();
    assert!(alone.lookup(&WHO, &alone.root().unwrap().node, name("f")).is_ok());
}

#[test]
fn they_stay_apart() {
    let world = World::new();
    let covered = world.mkdir(&world.root(), "a");
    world.graft("a", &covered);
    world.write("/f", b"f");
    world.write("a/g", b"g");
    let (root, a) = (world.root(), world.find("a").unwrap().node);
    let rename = |from: &Node, old, to: &Node, new, flags| {
        world.tree.rename(&WHO, from, name(old), to, name(new), RenameFlags(flags))
    };
    assert_eq!(rename(&root, "f", &a, "f", 0), Err(Errno::EXDEV));
    assert_eq!(rename(&a, "g", &root, "f", RenameFlags::EXCHANGE), Err(Errno::EXDEV));
    let file = world.find("f").unwrap().node;
    assert!(matches!(world.tree.link(&WHO, &file, None, &a, name("f")), Err(Errno::EXDEV)));
    // A covered directory cannot be moved.
    world.mkdir(&root, "free");
    assert_eq!(rename(&root, "a", &root, "b", 0), Err(Errno::EBUSY));
    assert_eq!(rename(&root, "free", &root, "a", 0), Err(Errno::EBUSY));
    assert_eq!(world.tree.rmdir(&WHO, &root, name("a")), Err(Errno::EBUSY));
    assert_eq!(
        world.tree.graft(
            Arc::new(Dataset::open(&world.pool, world.dataset("x")).unwrap()),
            covered.attr.id.ino,
            Rules::default()
        ),
        Err(Errno::EBUSY)
    );
    assert_eq!(
        world.tree.graft(Arc::new(Dataset::open(&world.pool, world.dataset("x")).unwrap()), 1, Rules::default()),
        Err(Errno::EBUSY)
    );
    let file = world.find("f").unwrap().attr.id.ino;
    assert_eq!(
        world.tree.graft(Arc::new(Dataset::open(&world.pool, world.dataset("x")).unwrap()), file, Rules::default()),
        Err(Errno::ENOTDIR)
    );
    // Its parent may move: everything below it moves along.
    let deep = world.mkdir(&world.find("free").unwrap().node, "deep");
    world.graft("deep", &deep);
    world.write("free/deep/h", b"h");
    rename(&root, "free", &root, "moved", 0).unwrap();
    assert_eq!(world.read("moved/deep/h").unwrap(), b"h");
    // Content can be copied from one to the other.
    let (from, to) = (world.find("moved/deep/h").unwrap().node, world.find("a/g").unwrap().node);
    let from = world.tree.open(&WHO, &from, OpenFlags::READ).unwrap();
    let to = world.tree.open(&WHO, &to, OpenFlags::WRITE).unwrap();
    assert_eq!(from.copy_to(0, &*to, 1, 100, 0), Ok(1));
    assert_eq!(world.read("a/g").unwrap(), b"gh");
}

#[test]
fn what_is_taken_out_is_gone() {
    let world = World::new();
    let covered = world.mkdir(&world.root(), "a");
    let id = world.graft("a", &covered);
    let made = world.write("a/f", b"f");
    let top = world.find("a").unwrap();
    let below = world.mkdir(&top.node, "b");
    let lower = world.graft("b", &below);
    assert!(world.tree.is_used(id), "another covers a directory of it");
    world.tree.take_out(lower);
    assert!(!world.tree.is_used(id));
    let open = world.tree.open(&WHO, &world.find("a/f").unwrap().node, OpenFlags::READ).unwrap();
    assert!(world.tree.is_used(id));
    let ranges = world.tree.numbers(id);
    assert!(ranges.iter().any(|(from, to)| (*from..=*to).contains(&made.id.ino)));
    world.changes.try_iter().for_each(drop);
    world.tree.take_out(id);
    assert!(matches!(world.changes.try_recv(), Ok(Invalidation::Forget { name, .. }) if *name == *b"a"));
    assert_eq!(open.read(&mut [0; 1], 0), Err(Errno::ESTALE));
    assert!(matches!(world.tree.getattr(&WHO, &top.node, None), Err(Errno::ESTALE)));
    assert_eq!(world.find("a").unwrap().attr.id.ino, covered.attr.id.ino);
    assert!(matches!(world.tree.node(made.id.ino), Err(Errno::ESTALE)));
    // The numbers may still be in use: they are not assigned again.
    world.graft("a", &covered);
    assert_ne!(world.find("a/f").unwrap().attr.id.ino, made.id.ino);
    world.tree.take_out(id);
    let again = world.graft("a", &covered);
    assert_eq!((again, world.read("a/f").unwrap()), (id, b"f".to_vec()));
    world.tree.forgotten(made.id.ino);
}

#[test]
fn each_has_its_rules_and_its_snapshots() {
    let world = World::new();
    let covered = world.mkdir(&world.root(), "a");
    let id = world.graft("a", &covered);
    world.write("a/f", b"then");
    world.write("/f", b"f");
    world.pool.commit().unwrap();
    world.pool.snapshot(&[(id, "s".to_owned())]).unwrap();
    let then = world.find("a/.zfs/snapshot/s/f").unwrap();
    assert_eq!(world.read("a/.zfs/snapshot/s/f").unwrap(), b"then");
    let known = world.tree.node(then.attr.id.ino).unwrap();
    assert_eq!(world.tree.id(&known).unwrap(), then.attr.id);
    assert!(matches!(world.find(".zfs/snapshot/s"), Err(Errno::ENOENT)));
    assert_ne!(world.find(".zfs").unwrap().attr.id, world.find("a/.zfs").unwrap().attr.id);
    let inside = world.find("a/.zfs/snapshot/s").unwrap().attr.id.ino;
    let other = || Arc::new(Dataset::open(&world.pool, world.dataset("x")).unwrap());
    assert_eq!(world.tree.graft(other(), inside, Rules::default()), Err(Errno::EINVAL));
    assert_eq!(world.tree.graft(other(), join(77, 1), Rules::default()), Err(Errno::ESTALE));
    world.tree.set_rules(id, Rules { read_only: true, no_exec: true });
    let (root, a) = (world.root(), world.find("a").unwrap().node);
    let (mine, other) = (world.find("a/f").unwrap().node, world.find("f").unwrap().node);
    assert!(matches!(world.tree.mkdir(&WHO, &a, name("d"), 0o755), Err(Errno::EROFS)));
    assert!(matches!(world.tree.open(&WHO, &mine, OpenFlags::WRITE), Err(Errno::EROFS)));
    assert!(matches!(
        world.tree.setattr(&WHO, &mine, None, &SetAttr { mode: Some(0o755), ..SetAttr::default() }),
        Err(Errno::EROFS)
    ));
    assert_eq!(world.tree.unlink(&WHO, &a, name("f")), Err(Errno::EROFS));
    assert_eq!((world.tree.access(&WHO, &mine, 1), world.tree.access(&WHO, &a, 1)), (Err(Errno::EACCES), Ok(())));
    assert_eq!(world.tree.access(&WHO, &other, 1), Ok(()));
    assert_eq!(world.tree.unlink(&WHO, &root, name("f")), Ok(()));
    world.tree.set_rules(id, Rules::default());
    assert_eq!(world.tree.unlink(&WHO, &a, name("f")), Ok(()));
}

#[test]
fn a_handle_is_good_in_the_next_process() {
    let device = Arc::new(Simulator::new("disk", 128 << 20));
    let world = World::over(create(&device));
    let below = world.mkdir(&world.root(), "below");
    let id = world.graft("a", &below);
    world.write("below/file", b"content");
    world.mkdir(&world.find("below").unwrap().node, "directory");
    for dataset in [id, world.pool.find("tank").unwrap().unwrap()] {
        world.pool.snapshot(&[(dataset, "then".to_owned())]).unwrap();
    }
    let paths = ["below", "below/file", "below/directory", "below/.zfs/snapshot/then/file", ".zfs/snapshot/then/below"];
    let handles =
        paths.map(|path| world.find(path).unwrap().attr).map(|attr| (attr.id.ino, world.tree.generation(&attr)));
    drop(world);
    let world = World::over(crate::dataset::tests::open(&device));
    world.graft("a", &world.find("below").unwrap());
    for (path, (number, generation)) in paths.into_iter().zip(handles).rev() {
        let found = world.tree.look_up(number).unwrap();
        assert_eq!((found.attr.id.ino, world.tree.generation(&found.attr)), (number, generation), "{path}");
        assert_eq!(world.find(path).unwrap().attr, found.attr, "{path}");
    }
    // The file system below was not added: its files are not found.
    assert_eq!(world.tree.look_up(handles[3].0 ^ 1 << 50).unwrap_err(), Errno::ESTALE);
    assert_eq!(world.tree.parent(&world.tree.look_up(handles[2].0).unwrap().node), handles[0].0);
    world.tree.take_out(id);
    assert_eq!(world.tree.look_up(handles[1].0).unwrap_err(), Errno::ESTALE);
}
