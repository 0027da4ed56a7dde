//! A union whose upper branch fails at any step: what users see is the state before the operation
//! or the one after it, at once and after a remount. Once with one failing call (a full disk), once
//! with all calls failing from some moment on (a power cut).

use crate::unions::{mem, union, union_itself};
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
    model::{Tree, tree},
};
use nacre_union::{Style, UnionOptions};
use nacre_vfs::{Errno, Kind, Layer, Name, Node, OpenFlags, RenameFlags, Result, SetAttr, WriteOrigin, XattrFlags};
use std::sync::Arc;

fn name(bytes: &str) -> Name<'_> {
    Name::new(bytes.as_bytes()).unwrap()
}

fn walk(world: &World, path: &str) -> Result<Node> {
    let mut at = world.root.clone();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        at = world.find_in(&at, part.as_bytes())?.node;
    }
    Ok(at)
}

/// The directory and the last name of a path.
fn split<'a>(world: &World, path: &'a str) -> Result<(Node, Name<'a>)> {
    let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
    Ok((walk(world, parent)?, name(last)))
}

/// One operation on a union.
type Operation = (&'static str, fn(&World) -> Result<()>);

fn rename(world: &World, from: &str, to: &str, flags: u32) -> Result<()> {
    let ((old, name), (new, new_name)) = (split(world, from)?, split(world, to)?);
    world.layer.rename(&world.caller, &old, name, &new, new_name, RenameFlags(flags))
}

fn unlink(world: &World, path: &str) -> Result<()> {
    let (parent, name) = split(world, path)?;
    world.layer.unlink(&world.caller, &parent, name)
}

fn create(world: &World, path: &str) -> Result<()> {
    let (parent, name) = split(world, path)?;
    world
        .layer
        .create(&world.caller, &parent, name, 0o640, OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL))
        .map(drop)
}

fn mkdir(world: &World, path: &str) -> Result<()> {
    let (parent, name) = split(world, path)?;
    world.layer.mkdir(&world.caller, &parent, name, 0o750).map(drop)
}

fn rmdir(world: &World, path: &str) -> Result<()> {
    let (parent, name) = split(world, path)?;
    world.layer.rmdir(&world.caller, &parent, name)
}

fn write(world: &World, path: &str) -> Result<()> {
    let node = walk(world, path)?;
    let file = world.layer.open(&world.caller, &node, OpenFlags::READ_WRITE)?;
    file.write(b"changed", 3, WriteOrigin::Caller).map(drop)
}

fn mode(world: &World, path: &str) -> Result<()> {
    let change = SetAttr { mode: Some(0o711), ..SetAttr::default() };
    world.layer.setattr(&world.caller, &walk(world, path)?, None, &change).map(drop)
}

const OPERATIONS: &[Operation] = &[
    ("create", |world| create(world, "new")),
    ("create over a whiteout", |world| create(world, "hidden")),
    ("create over a hidden directory", |world| create(world, "hidden-dir")),
    ("create deep below", |world| create(world, "low/deep/new")),
    ("mkdir", |world| mkdir(world, "new")),
    ("mkdir over a whiteout", |world| mkdir(world, "hidden")),
    ("mkdir over a hidden directory", |world| mkdir(world, "hidden-dir")),
    ("symlink over a whiteout", |world| {
        world.layer.symlink(&world.caller, &world.root, name("hidden"), b"x").map(drop)
    }),
    ("write to a file below", |world| write(world, "low/deep/file")),
    ("write to a linked file below", |world| write(world, "low/one")),
    ("mode of a file below", |world| mode(world, "low/deep/file")),
    ("mode of a directory below", |world| mode(world, "low/deep")),
    ("an attribute of a link's target below", |world| {
        world.layer.setxattr(&world.caller, &walk(world, "low/two")?, b"user.new", b"v", XattrFlags::default())
    }),
    ("truncation of a file below", |world| {
        let change = SetAttr { size: Some(2), ..SetAttr::default() };
        world.layer.setattr(&world.caller, &walk(world, "low/deep/file")?, None, &change).map(drop)
    }),
    ("unlink above", |world| unlink(world, "above")),
    ("unlink below", |world| unlink(world, "low/deep/file")),
    ("unlink of one of two names below", |world| unlink(world, "low/one")),
    ("unlink of both", |world| unlink(world, "both")),
    ("rmdir above", |world| rmdir(world, "empty-above")),
    ("rmdir below", |world| rmdir(world, "empty-below")),
    ("rmdir of an emptied directory", |world| rmdir(world, "emptied")),
    ("link of a file below", |world| {
        world.layer.link(&world.caller, &walk(world, "low/deep/file")?, None, &world.root, name("hidden")).map(drop)
    }),
    ("rename above", |world| rename(world, "above", "new", 0)),
    ("rename of a file below", |world| rename(world, "low/deep/file", "new", 0)),
    ("rename of a file below over a whiteout", |world| rename(world, "low/deep/file", "hidden", 0)),
    ("rename of a file above over one below", |world| rename(world, "above", "low/deep/file", 0)),
    ("rename of both over one above", |world| rename(world, "both", "above", 0)),
    ("rename of a linked file below", |world| rename(world, "low/one", "new", 0)),
    ("rename of a directory above", |world| rename(world, "full-above", "new", 0)),
    ("rename of a directory above over a hidden one", |world| rename(world, "full-above", "hidden-dir", 0)),
    ("rename of a directory above over an empty one below", |world| rename(world, "full-above", "empty-below", 0)),
    ("rename of a directory above over an emptied one", |world| rename(world, "full-above", "emptied", 0)),
    ("rename of a directory below", |world| rename(world, "low", "new", 0)),
    ("rename of a merged directory", |world| rename(world, "merged", "hidden-dir", 0)),
    ("exchange of a file above and a directory below", |world| {
        rename(world, "above", "low/deep", RenameFlags::EXCHANGE)
    }),
    ("exchange of two merged directories", |world| rename(world, "merged", "emptied", RenameFlags::EXCHANGE)),
];

/// The form of whiteouts, and whether directories are renamed by redirects.
#[derive(Clone, Copy, Debug)]
struct Way(Style, bool);

impl Way {
    fn options(self) -> UnionOptions {
        let defaults = UnionOptions { whiteout: self.0, ..UnionOptions::default() };
        if self.1 { UnionOptions { directory_redirect: true, directory_copy_limit: 0, ..defaults } } else { defaults }
    }
}

/// Two branches with everything that the operations meet.
struct Scene {
    lower: Arc<dyn Layer>,
    upper: Arc<dyn Layer>,
    style: Way,
}

impl Scene {
    fn new(style: Way) -> Scene {
        let scene = Scene { lower: mem(), upper: mem(), style };
        let low = World::new(Arc::clone(&scene.lower));
        let directory = low.directory(b"low");
        let deep = low.directory_in(&directory, b"deep");
        let (file, _) = low.file_in(&deep, b"file", b"0123456789");
        low.layer.setxattr(&low.caller, &file.node, b"user.old", b"value", XattrFlags::default()).unwrap();
        let (one, _) = low.file_in(&directory, b"one", b"linked");
        low.layer.link(&low.caller, &one.node, None, &directory, name("two")).unwrap();
        low.layer.mknod(&low.caller, &directory, name("fifo"), Kind::Fifo, 0o600, (0, 0)).unwrap();
        for file in [&b"hidden"[..], b"both"] {
            low.file(file, b"below");
        }
        for directory in [&b"hidden-dir"[..], b"emptied", b"merged"] {
            low.file_in(&low.directory(directory), b"inside", b"below");
        }
        low.directory(b"empty-below");
        let world = World::new(scene.union(Arc::clone(&scene.upper)));
        world.file(b"above", b"above");
        world.directory(b"empty-above");
        world.file_in(&world.directory(b"full-above"), b"inside", b"above");
        for path in ["hidden", "hidden-dir/inside", "emptied/inside"] {
            unlink(&world, path).unwrap();
        }
        rmdir(&world, "hidden-dir").unwrap();
        write(&world, "both").unwrap();
        create(&world, "merged/added").unwrap();
        scene
    }

    fn union(&self, upper: Arc<dyn Layer>) -> Arc<dyn Layer> {
        let options = self.style.options();
        union(vec![(upper, "rw"), (Arc::clone(&self.lower), "ro")], options)
    }

    /// The check puts right whatever is left over, and changes nothing that can be seen.
    fn checked(&self, seen: &Tree) {
        let options = self.style.options();
        let union = union_itself(vec![(Arc::clone(&self.upper), "rw"), (Arc::clone(&self.lower), "ro")], options);
        let findings = union.check(true).unwrap();
        assert!(findings.iter().all(|finding| finding.repaired), "{findings:?}");
        assert_eq!(union.check(true).unwrap(), []);
        assert_eq!(&without_counts(tree(&World::new(union))), seen, "after {findings:?}");
        assert_eq!(&self.remounted(), seen, "after {findings:?} and a remount");
    }

    fn remounted(&self) -> Tree {
        without_counts(tree(&World::new(self.union(Arc::clone(&self.upper)))))
    }
}

/// A count of links may be too high after a crash.
fn without_counts(mut tree: Tree) -> Tree {
    for leaf in tree.values_mut() {
        leaf.links = 0;
    }
    tree
}

fn strike(style: Way, (title, operation): &Operation, fault: &Arc<Fault>) {
    let before = Scene::new(style).remounted();
    let done = Scene::new(style);
    let world = World::new(done.union(Arc::clone(&done.upper)));
    operation(&world).unwrap_or_else(|error| panic!("{title}: {error:?}"));
    let after = done.remounted();
    assert_ne!(before, after, "{title} changes nothing");
    for step in 0.. {
        let scene = Scene::new(style);
        let faulty = Arc::new(Faulty { below: Arc::clone(&scene.upper), fault: Arc::clone(fault) });
        let world = World::new(scene.union(faulty));
        fault.after(step);
        let answer = operation(&world);
        if !fault.has_struck() {
            assert_eq!(answer, Ok(()), "{title} without a fault");
            fault.end();
            return;
        }
        fault.end();
        if !fault.is_lasting() {
            let seen = without_counts(tree(&world));
            let wanted = if answer.is_ok() { &after } else { &before };
            assert!(
                &seen == wanted || seen == after,
                "{title}, step {step} of {style:?}, answered {answer:?}: {}",
                difference(&seen, wanted)
            );
        }
        drop(world);
        let seen = scene.remounted();
        let known = seen == before || seen == after;
        assert!(known, "{title}, step {step} of {style:?}, remounted: {}", difference(&seen, &before));
        scene.checked(&seen);
    }
}

fn difference(seen: &Tree, wanted: &Tree) -> String {
    let mut text = String::new();
    for path in seen.keys().chain(wanted.keys()) {
        if seen.get(path) != wanted.get(path) {
            text += &format!("\n{}: {:?} instead of {:?}", path.escape_ascii(), seen.get(path), wanted.get(path));
        }
    }
    text
}

fn strike_all(style: Way, errno: Errno, lasting: bool) {
    strike_each(style, OPERATIONS, &|| Fault::new(errno, lasting));
}

fn strike_each(style: Way, operations: &[Operation], fault: &dyn Fn() -> Arc<Fault>) {
    let mut failed = Vec::new();
    for operation in operations {
        let run = std::panic::AssertUnwindSafe(|| strike(style, operation, &fault()));
        if std::panic::catch_unwind(run).is_err() {
            failed.push(operation.0);
        }
    }
    assert!(failed.is_empty(), "{} operations: {}", failed.len(), failed.join(", "));
}

#[test]
fn a_power_cut_at_any_step() {
    strike_all(Way(Style::Wh, false), Errno::EIO, true);
}

#[test]
fn a_full_disk_at_any_step() {
    strike_all(Way(Style::Wh, false), Errno::ENOSPC, false);
}

#[test]
fn other_marks() {
    for style in [Style::Chardev, Style::Xattr] {
        strike_all(Way(style, false), Errno::EIO, true);
        strike_all(Way(style, false), Errno::ENOSPC, false);
    }
}

#[test]
fn directories_renamed_by_redirect() {
    for style in [Style::Wh, Style::Chardev] {
        strike_all(Way(style, true), Errno::EIO, true);
        strike_all(Way(style, true), Errno::ENOSPC, false);
    }
}

/// As on bindfs, mergerfs and NFS. A power cut may show a step in between there.
#[test]
fn a_full_disk_without_exchange() {
    let is_exchange = |operation: &&Operation| operation.0.starts_with("exchange");
    let operations: Vec<Operation> = OPERATIONS.iter().filter(|operation| !is_exchange(operation)).copied().collect();
    for style in [Style::Wh, Style::Chardev, Style::Xattr] {
        strike_each(Way(style, false), &operations, &|| Fault::without_exchange(Errno::ENOSPC));
        strike_each(Way(style, true), &operations, &|| Fault::without_exchange(Errno::ENOSPC));
    }
}
