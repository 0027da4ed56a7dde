//! Workspaces for tests, and trees to compare.

use crate::{Base, Change, ChangeKind, CommitOptions, CommitPlan, Selection, Upper, WorkspaceError, layer};
use nacre_layers::host::{Host, HostOptions};
use nacre_testkit::World;
use nacre_union::{BranchMode, Member, Union, UnionOptions, base_log::BaseLog};
use nacre_vfs::{Errno, Kind, Layer, OpenFlags, Whence};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

/// A base, and a workspace over it.
pub(super) struct Workspace {
    scratch: TempDir,
    pub(super) base: PathBuf,
    /// Directories of the base below that one.
    pub(super) below: Vec<PathBuf>,
    pub(super) changes: PathBuf,
}

impl Workspace {
    /// A workspace over a base that this fills.
    pub(super) fn over(fill: impl FnOnce(&Path)) -> Workspace {
        nacre_layers::host::prepare_worker().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let (base, changes) = (scratch.path().join("base"), scratch.path().join("changes"));
        fs::create_dir(&base).unwrap();
        fill(&base);
        let workspace = Workspace { scratch, base, below: Vec::new(), changes };
        workspace.begin();
        workspace
    }

    /// A workspace over a directory that is there.
    pub(super) fn at(base: &Path) -> Workspace {
        nacre_layers::host::prepare_worker().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let (base, changes) = (base.to_path_buf(), scratch.path().join("changes"));
        let workspace = Workspace { scratch, base, below: Vec::new(), changes };
        workspace.begin();
        workspace
    }

    /// Makes the directory with the changes: none.
    fn begin(&self) {
        for directory in ["", "upper", "work"] {
            fs::create_dir(self.changes.join(directory)).unwrap();
        }
        let top = fs::metadata(&self.base).unwrap();
        fs::set_permissions(self.upper_path(), top.permissions()).unwrap();
        let base = Base::open(&[&self.base]).unwrap();
        let meta = base.meta(Path::new("")).unwrap().unwrap();
        let line = layer::line_of(Path::new(""), &meta);
        fs::write(self.changes.join("base.log"), line.line()).unwrap();
    }

    pub(super) fn upper_path(&self) -> PathBuf {
        self.changes.join("upper")
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.scratch.path().join("commit")
    }

    /// The view: a union, as the workspace's process serves it.
    pub(super) fn view(&self) -> World {
        self.view_with(UnionOptions::default())
    }

    pub(super) fn view_with(&self, options: UnionOptions) -> World {
        let upper = Host::open(HostOptions::new(self.upper_path())).unwrap();
        let apart = upper.beside(&self.changes.join("work")).unwrap();
        let upper = Member {
            name: "upper".into(),
            layer: Arc::new(upper),
            mode: BranchMode::rw(),
            work: Some(apart),
            lock: None,
        };
        let mut members = vec![upper];
        for directory in std::iter::once(&self.base).chain(&self.below) {
            members.push(Member {
                name: "base".into(),
                layer: host(directory),
                mode: BranchMode::parse("ro").unwrap(),
                work: None,
                lock: None,
            });
        }
        let union = Union::named(members, UnionOptions { sync: false, ..options }).unwrap();
        union.log_hidden_entries(BaseLog::open(&self.changes.join("base.log")).unwrap());
        World::new(Arc::new(union))
    }

    pub(super) fn opened(&self) -> (Base, Upper) {
        let directories: Vec<&PathBuf> = std::iter::once(&self.base).chain(&self.below).collect();
        (Base::open(&directories).unwrap(), Upper::open(&self.changes).unwrap())
    }

    pub(super) fn changes(&self) -> Vec<Change> {
        let (base, upper) = self.opened();
        crate::changes(&base, &upper, &Selection::default()).unwrap()
    }

    /// The changes in short: `A path`, `D path`, `R old -> new`, `M path`.
    pub(super) fn list(&self) -> Vec<String> {
        let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
        let line = |change: &Change| match &change.kind {
            ChangeKind::Added => format!("A {}", text(&change.path)),
            ChangeKind::Removed => format!("D {}", text(&change.path)),
            ChangeKind::Renamed { from, .. } => format!("R {} -> {}", text(from), text(&change.path)),
            ChangeKind::Modified(_) => format!("M {}", text(&change.path)),
        };
        self.changes().iter().map(line).collect()
    }

    pub(super) fn plan(&self) -> CommitPlan {
        self.plan_of(&[])
    }

    /// A plan for some paths.
    pub(super) fn plan_of(&self, paths: &[&str]) -> CommitPlan {
        let (base, upper) = self.opened();
        let selection = Selection { paths: paths.iter().map(|path| path.as_bytes().to_vec()).collect() };
        let changes = crate::changes(&base, &upper, &selection).unwrap();
        CommitPlan::new(&base, &upper, changes, CommitOptions::default()).unwrap()
    }

    pub(super) fn commit(&self) {
        let plan = self.plan();
        assert_eq!(plan.conflicts(), []);
        plan.run(&self.journal()).unwrap();
        assert!(!self.journal().exists());
    }

    /// Nothing is left of the changes, nor of the commit.
    pub(super) fn assert_clean(&self) {
        assert_eq!(self.list(), [""; 0]);
        assert_eq!(names(&self.upper_path()), [""; 0]);
        assert_eq!(all_names(&self.base).iter().filter(|name| name.contains(".wh.")).count(), 0);
        let log = fs::read_to_string(self.changes.join("base.log")).unwrap();
        assert!(log.lines().count() <= 1, "{log}");
    }
}

pub(super) fn host(path: &Path) -> Arc<dyn Layer> {
    Arc::new(Host::open(HostOptions::new(path)).unwrap())
}

pub(super) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn all_names(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        found.push(entry.path().to_string_lossy().into_owned());
        if entry.file_type().unwrap().is_dir() {
            found.extend(all_names(&entry.path()));
        }
    }
    found
}

/// An entry of a tree with all that a commit keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    pub(super) modified: (i64, u32),
    pub(super) device: (u32, u32),
    pub(super) content: Vec<u8>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Smallest of the names that lead to the same file.
    pub(super) first_name: Vec<u8>,
    pub(super) links: u32,
    /// Ranges with data.
    pub(super) data: Vec<(u64, u64)>,
}

pub(super) type Tree = BTreeMap<Vec<u8>, Entry>;

/// The whole tree of a layer, with its top as an empty path.
pub(super) fn tree(world: &World) -> Tree {
    let plain = nacre_testkit::model::tree(world);
    let mut paths: Vec<Vec<u8>> = plain.keys().cloned().collect();
    paths.push(Vec::new());
    let mut tree = Tree::new();
    for path in paths {
        let mut at = world.layer.root().unwrap();
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            at = world.find_in(&at.node, name).unwrap();
        }
        let attr = world.attr(&at.node);
        let leaf = plain.get(&path);
        let data = if attr.kind == Kind::File { data_of(world, &at.node, attr.size) } else { Vec::new() };
        let entry = Entry {
            kind: attr.kind,
            mode: attr.mode,
            owner: (attr.uid, attr.gid),
            modified: (attr.mtime.sec, attr.mtime.nsec),
            device: (attr.rdev_major, attr.rdev_minor),
            content: leaf.map(|leaf| leaf.content.clone()).unwrap_or_default(),
            xattrs: xattrs_of(world, &at.node, attr.kind),
            first_name: leaf.map(|leaf| leaf.first_name.clone()).unwrap_or_default(),
            links: leaf.map(|leaf| leaf.links).unwrap_or_default(),
            data,
        };
        tree.insert(path, entry);
    }
    tree
}

/// The tree of a real directory.
pub(super) fn tree_of(path: &Path) -> Tree {
    tree(&World::new(host(path)))
}

fn data_of(world: &World, node: &nacre_vfs::Node, size: u64) -> Vec<(u64, u64)> {
    let file = world.open(node, OpenFlags::READ);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < size {
        let start = match file.seek(at, Whence::Data) {
            Ok(start) => start,
            Err(Errno::ENXIO) => break,
            other => other.unwrap(),
        };
        let end = file.seek(start, Whence::Hole).unwrap().min(size);
        found.push((start, end));
        at = end;
    }
    found
}

fn xattrs_of(world: &World, node: &nacre_vfs::Node, kind: Kind) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    if !matches!(kind, Kind::File | Kind::Directory) {
        return found;
    }
    let mut list = vec![0; 4096];
    let size = world.layer.listxattr(&world.caller, node, &mut list).unwrap_or(0);
    for name in list[..size].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 4096];
        let size = world.layer.getxattr(&world.caller, node, name, &mut value).unwrap();
        found.insert(name.to_vec(), value[..size].to_vec());
    }
    found
}

/// Compares two trees, and shows the entries that differ.
pub(super) fn assert_same(got: &Tree, wanted: &Tree, what: &str) {
    let short = |tree: &Tree| -> Vec<String> { tree.keys().map(|path| path.escape_ascii().to_string()).collect() };
    assert_eq!(short(got), short(wanted), "{what}: names");
    for (path, entry) in wanted {
        assert_eq!(&got[path], entry, "{what}: {}", path.escape_ascii());
    }
}

/// Stops a commit before a step.
pub(super) struct Stop {
    pub(super) left: usize,
    pub(super) made: usize,
}

impl Stop {
    pub(super) fn before(step: usize) -> Stop {
        Stop { left: step, made: 0 }
    }

    pub(super) fn pause(&mut self) -> crate::Result<()> {
        if self.left == 0 {
            return Err(WorkspaceError { what: "stopped".to_owned(), errno: None });
        }
        self.left -= 1;
        self.made += 1;
        Ok(())
    }
}

/// Mode, inode and content of a file.
pub(super) fn looked_at(path: &Path) -> (u32, u64, Vec<u8>) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.permissions().mode() & 0o7777, meta.ino(), fs::read(path).unwrap())
}
