//! Random operations at the edge of a small cage: what is stored never exceeds the limit, the books
//! say what is there, and whatever was accepted reads back byte for byte.

use nacre_cage::{Cage, ChargeRule, Storage};
use nacre_layers::context::Context;
use nacre_stack::{self as stack, spec::StackSpec};
use nacre_testkit::World;
use nacre_testkit::name;
use nacre_vfs::{
    AllocateMode, Caller, Entry, Errno, FileId, Kind, LockOwner, Node, OpenFlags, Opened, RenameFlags, SetAttr, Whence,
    WriteOrigin,
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, FileFailurePersistence, TestRunner},
};
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

const BLOCK: u64 = 4096;
const BYTES: u64 = 40 * BLOCK;
const INODES: u64 = 14;
const NAMES: [&[u8]; 6] = [b"a", b"b", b"c.1", b"d.gz", b"e", b"f.old"];
/// Users who own files in turn, and the limit of the second.
const USERS: [u32; 2] = [0, 1000];
const USER_BYTES: u64 = 12 * BLOCK;

#[derive(Clone, Debug)]
enum Step {
    Create(usize, usize),
    Directory(usize),
    Symlink(usize, usize),
    Write(usize, u64, usize, u8),
    Append(usize, usize, u8),
    Truncate(usize, u64),
    Cut(usize),
    Allocate(usize, u32, u64, u64),
    Copy(usize, usize, u64, u64, u64),
    Unlink(usize),
    Rename(usize, usize, u32),
    Link(usize, usize),
    Hold(usize),
    Release(usize),
    WriteHeld(usize, u64, usize, u8),
    Nameless(usize, u8),
    Chown(usize, usize),
    Resize(u64),
    Flush(usize),
}

/// Offsets and lengths about blocks and their edges.
fn place() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..20_000u64,
        (0..12u64).prop_map(|block| block * BLOCK),
        (1..12u64).prop_map(|block| block * BLOCK - 1),
        0..200_000u64
    ]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![1..200usize, 1..9000usize, (1..10usize).prop_map(|blocks| blocks * 4096), 1..70_000usize]
}

fn step(keeps: bool) -> impl Strategy<Value = Step> {
    let name = 0..NAMES.len();
    let modes: Vec<u32> = if keeps { vec![0, 1, 3, 0x10, 0x11, 0x08, 0x20] } else { vec![0, 3, 0x10, 0x08, 0x20] };
    prop_oneof![
        4 => (name.clone(), 0..2usize).prop_map(|(name, user)| Step::Create(name, user)),
        1 => name.clone().prop_map(Step::Directory),
        1 => (name.clone(), 1..200usize).prop_map(|(name, length)| Step::Symlink(name, length)),
        8 => (name.clone(), place(), length(), any::<u8>()).prop_map(|(name, at, length, byte)| Step::Write(name, at, length, byte)),
        6 => (name.clone(), length(), any::<u8>()).prop_map(|(name, length, byte)| Step::Append(name, length, byte)),
        3 => (name.clone(), place()).prop_map(|(name, size)| Step::Truncate(name, size)),
        1 => name.clone().prop_map(Step::Cut),
        4 => (name.clone(), prop::sample::select(modes), place(), length()).prop_map(|(name, mode, at, length)| Step::Allocate(name, mode, at, length as u64)),
        2 => (name.clone(), name.clone(), place(), place(), length()).prop_map(|(from, to, at, to_at, length)| Step::Copy(from, to, at, to_at, length as u64)),
        4 => name.clone().prop_map(Step::Unlink),
        3 => (name.clone(), name.clone(), prop_oneof![3 => Just(0), 1 => Just(2)]).prop_map(|(from, to, flags)| Step::Rename(from, to, flags)),
        2 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Link(from, to)),
        2 => name.clone().prop_map(Step::Hold),
        2 => (0..4usize).prop_map(Step::Release),
        3 => (0..4usize, place(), length(), any::<u8>()).prop_map(|(held, at, length, byte)| Step::WriteHeld(held, at, length, byte)),
        1 => (length(), any::<u8>()).prop_map(|(length, byte)| Step::Nameless(length, byte)),
        2 => (name.clone(), 0..2usize).prop_map(|(name, user)| Step::Chown(name, user)),
        1 => (10..60u64).prop_map(|blocks| Step::Resize(blocks * BLOCK)),
        1 => name.prop_map(Step::Flush),
    ]
}

/// A file that somebody has open, perhaps without a name.
struct Held {
    file: Opened,
    node: Node,
    id: FileId,
}

/// The cage under test, what it lies over, and what should be in it.
struct Edge {
    world: World,
    cage: Arc<Cage>,
    rule: ChargeRule,
    content: BTreeMap<FileId, Vec<u8>>,
    held: Vec<Held>,
    limit: u64,
    keeps: bool,
    drops: bool,
    /// Files may come to hold blocks of the file system's own while they are written back: at most
    /// one each, as small as they are here.
    growing: bool,
}

impl Edge {
    fn new(line: &str, storage: Storage, keeps: bool) -> Edge {
        let drops = line.contains("drop-oldest");
        let spec = StackSpec::from_line(line.as_bytes()).unwrap();
        let built = stack::build(&spec, &Context::system().unwrap()).unwrap();
        let cage = built.cages().remove(0);
        let world = World::new(built.layer);
        let rule = ChargeRule::new(BLOCK, storage);
        Edge {
            world,
            cage,
            rule,
            content: BTreeMap::new(),
            held: Vec::new(),
            limit: BYTES,
            keeps,
            drops,
            growing: false,
        }
    }

    fn growing(self) -> Edge {
        Edge { growing: true, ..self }
    }

    fn caller(&self, user: usize) -> Caller {
        if self.world.is_root() { Caller { uid: USERS[user], ..self.world.caller } } else { self.world.caller }
    }

    fn find(&self, index: usize) -> Option<Entry> {
        self.world.find(NAMES[index]).ok()
    }

    fn file(&self, index: usize) -> Option<Entry> {
        self.find(index).filter(|entry| entry.attr.kind == Kind::File)
    }

    fn open(&self, entry: &Entry) -> Opened {
        self.world.open(&entry.node, OpenFlags::READ_WRITE)
    }

    /// The same write on the model; `written` is what was accepted.
    fn store(&mut self, id: FileId, at: u64, data: &[u8], written: usize) {
        let content = self.content.get_mut(&id).expect("a known file");
        let (at, end) = (at as usize, at as usize + written);
        if written > 0 {
            content.resize(content.len().max(end), 0);
            content[at..end].copy_from_slice(&data[..written]);
        }
    }

    fn write(&mut self, file: &Opened, id: FileId, at: u64, data: &[u8]) {
        match file.write(data, at, WriteOrigin::Caller) {
            Ok(written) => self.store(id, at, data, written),
            Err(Errno::ENOSPC | Errno::EDQUOT) => {}
            Err(other) => panic!("write: {other:?}"),
        }
    }

    fn allocate(&mut self, entry: &Entry, mode: u32, at: u64, length: u64) {
        let result = self.open(entry).allocate(AllocateMode(mode), at, length);
        let content = self.content.get_mut(&entry.attr.id).unwrap();
        let (start, end) = (at as usize, (at + length) as usize);
        match result {
            Ok(()) => match mode {
                0 => content.resize(content.len().max(end), 0),
                0x01 => {}
                0x08 => drop(content.drain(start..end)),
                0x20 => drop(content.splice(start..start, std::iter::repeat_n(0, end - start))),
                _ => {
                    if mode == 0x10 {
                        content.resize(content.len().max(end), 0);
                    }
                    let end = end.min(content.len());
                    if start < end {
                        content[start..end].fill(0);
                    }
                }
            },
            // Not everywhere, and not at every place.
            Err(Errno::ENOSPC | Errno::EDQUOT | Errno::EOPNOTSUPP | Errno::EINVAL) => {}
            Err(other) => panic!("allocate {mode:#x}: {other:?}"),
        }
    }

    fn apply(&mut self, step: &Step) {
        let world = self.world.clone();
        let (layer, caller, root) = (&world.layer, world.caller, &world.root);
        let full = |result: Result<(), Errno>| match result {
            Ok(())
            | Err(
                Errno::ENOSPC
                | Errno::EDQUOT
                | Errno::EEXIST
                | Errno::ENOENT
                | Errno::EISDIR
                | Errno::ENOTDIR
                | Errno::ENOTEMPTY,
            ) => {}
            Err(Errno::EPERM | Errno::EINVAL) => {}
            Err(other) => panic!("{step:?}: {other:?}"),
        };
        match *step {
            Step::Create(at, user) => {
                let made = layer.create(
                    &self.caller(user),
                    root,
                    name(NAMES[at]),
                    0o644,
                    OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL),
                );
                if let Ok((entry, _)) = &made {
                    self.content.insert(entry.attr.id, Vec::new());
                }
                full(made.map(drop));
            }
            Step::Directory(at) => full(layer.mkdir(&caller, root, name(NAMES[at]), 0o755).map(drop)),
            Step::Symlink(at, length) => {
                full(layer.symlink(&caller, root, name(NAMES[at]), &vec![b'x'; length]).map(drop))
            }
            Step::Write(at, offset, length, byte) => {
                if let Some(entry) = self.file(at) {
                    let file = self.open(&entry);
                    self.write(&file, entry.attr.id, offset, &vec![byte; length]);
                }
            }
            Step::Append(at, length, byte) => {
                if let Some(entry) = self.file(at) {
                    let file = world.open(&entry.node, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND));
                    let (end, data) = (self.content[&entry.attr.id].len() as u64, vec![byte; length]);
                    match file.append(&data) {
                        // Room may have been made at its own beginning.
                        Ok(written) if !self.drops => self.store(entry.attr.id, end, &data, written),
                        Ok(_) => self.reread(&entry),
                        Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                        Err(other) => panic!("append: {other:?}"),
                    }
                }
            }
            Step::Truncate(at, size) => {
                if let Some(entry) = self.file(at) {
                    let change = SetAttr { size: Some(size), ..SetAttr::default() };
                    match layer.setattr(&caller, &entry.node, None, &change) {
                        Ok(_) => self.content.get_mut(&entry.attr.id).unwrap().resize(size as usize, 0),
                        // Longer takes a block of zeros on some file systems.
                        Err(Errno::ENOSPC | Errno::EDQUOT) => assert!(size > entry.attr.size),
                        Err(other) => panic!("truncate: {other:?}"),
                    }
                }
            }
            Step::Cut(at) => {
                if let Some(entry) = self.file(at) {
                    drop(world.open(&entry.node, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNC)));
                    self.content.get_mut(&entry.attr.id).unwrap().clear();
                }
            }
            Step::Allocate(at, mode, offset, length) => {
                if let Some(entry) = self.file(at) {
                    self.allocate(&entry, mode, offset, length);
                }
            }
            Step::Copy(from, to, offset, target_offset, length) => {
                if let (Some(from), Some(to)) = (self.file(from), self.file(to)) {
                    let (source, target) = (self.open(&from), self.open(&to));
                    match source.copy_to(offset, &*target, target_offset, length, 0) {
                        Ok(copied) => {
                            let start = offset as usize;
                            let data: Vec<u8> = self.content[&from.attr.id]
                                .get(start..start + copied as usize)
                                .unwrap_or_default()
                                .to_vec();
                            self.store(to.attr.id, target_offset, &data, copied as usize);
                        }
                        Err(Errno::ENOSPC | Errno::EDQUOT | Errno::EINVAL) => {}
                        Err(other) => panic!("copy: {other:?}"),
                    }
                }
            }
            Step::Unlink(at) => {
                let directory = self.find(at).is_some_and(|entry| entry.attr.kind == Kind::Directory);
                full(if directory {
                    layer.rmdir(&caller, root, name(NAMES[at]))
                } else {
                    layer.unlink(&caller, root, name(NAMES[at]))
                });
            }
            Step::Rename(from, to, flags) => {
                full(layer.rename(&caller, root, name(NAMES[from]), root, name(NAMES[to]), RenameFlags(flags)))
            }
            Step::Link(from, to) => {
                if let Some(entry) = self.file(from) {
                    full(layer.link(&caller, &entry.node, None, root, name(NAMES[to])).map(drop));
                }
            }
            Step::Hold(at) => {
                if let Some(entry) = self.file(at).filter(|_| self.held.len() < 4) {
                    let file = self.open(&entry);
                    self.held.push(Held { file, node: entry.node, id: entry.attr.id });
                }
            }
            Step::Release(held) => {
                if held < self.held.len() {
                    self.held.remove(held);
                }
            }
            Step::WriteHeld(held, offset, length, byte) => {
                if let Some(held) = self.held.get(held) {
                    let (file, id) = (Arc::clone(&held.file), held.id);
                    self.write(&file, id, offset, &vec![byte; length]);
                }
            }
            Step::Nameless(length, byte) => {
                if self.held.len() < 4
                    && let Ok((entry, file)) = layer.tmpfile(&caller, root, 0o600, OpenFlags::READ_WRITE)
                {
                    self.content.insert(entry.attr.id, Vec::new());
                    self.write(&file, entry.attr.id, 0, &vec![byte; length]);
                    self.held.push(Held { file, node: entry.node, id: entry.attr.id });
                }
            }
            Step::Chown(at, user) => {
                if let Some(entry) = self.file(at).filter(|_| world.is_root()) {
                    let change = SetAttr { uid: Some(USERS[user]), ..SetAttr::default() };
                    full(layer.setattr(&caller, &entry.node, None, &change).map(drop));
                }
            }
            Step::Resize(bytes) => {
                let limits = nacre_cage::ledger::Limits { bytes: Some(bytes), ..self.cage.limits() };
                self.cage.resize(limits).unwrap();
                self.limit = bytes;
            }
            Step::Flush(at) => {
                if let Some(entry) = self.file(at) {
                    let file = self.open(&entry);
                    file.flush(LockOwner(1)).unwrap();
                    file.fsync(false).unwrap();
                }
            }
        }
    }

    /// After a write for which the file's own beginning may have been given up.
    fn reread(&mut self, entry: &Entry) {
        let content = self.world.content(&entry.node);
        self.content.insert(entry.attr.id, content);
    }

    /// All that lives: by name, and open without one.
    fn living(&self) -> BTreeMap<FileId, (u64, u32)> {
        let mut living = BTreeMap::new();
        let cost = |attr: &nacre_vfs::Attr| (self.rule.found(attr), attr.uid);
        for listed in self.world.list(&self.world.root, true, 100) {
            let entry = listed.entry.unwrap();
            let mut cost = cost(&entry.attr);
            if self.rule.storage == Storage::Ahead && entry.attr.kind == Kind::File {
                // The count of blocks is of no use here: what can be told apart are data and holes.
                cost.0 = data(&self.world.open(&entry.node, OpenFlags::READ), entry.attr.size);
            }
            living.insert(entry.attr.id, cost);
        }
        for held in &self.held {
            let attr = self.world.layer.getattr(&self.world.caller, &held.node, Some(&*held.file)).unwrap();
            let mut cost = cost(&attr);
            if self.rule.storage == Storage::Ahead {
                cost.0 = data(&held.file, attr.size);
            }
            living.insert(attr.id, cost);
        }
        living
    }

    /// `used` before the step: where a limit was lowered, nothing grows above it.
    fn check(&self, step: &Step, before: u64) -> u64 {
        let living = self.living();
        let stored: u64 = living.values().map(|(cost, _)| cost).sum();
        let report = self.cage.report();
        let grown = if self.growing { living.len() as u64 * BLOCK } else { 0 };
        assert!(
            stored <= self.limit.max(before) + grown,
            "{step:?}: {stored} stored, {} allowed, {before} before",
            self.limit
        );
        assert!(living.len() as u64 <= INODES, "{step:?}: {} files", living.len());
        assert_eq!(report.inodes, living.len() as u64, "{step:?}: files booked and there");
        if self.keeps || self.rule.storage == Storage::Ahead || self.growing {
            assert!(report.used + grown >= stored, "{step:?}: {} booked, {stored} there", report.used);
        } else {
            assert_eq!(report.used, stored, "{step:?}: bytes booked and there; {living:?}");
            let of_user: u64 = living.values().filter(|(_, uid)| *uid == USERS[1]).map(|(cost, _)| cost).sum();
            let booked = report.users.iter().find(|user| user.uid == USERS[1]).map_or(0, |user| user.used);
            assert_eq!(booked, of_user, "{step:?}: bytes of the user with a limit");
            assert!(of_user <= USER_BYTES, "{step:?}: {of_user} of the user");
        }
        assert_eq!(report.clamped, 0, "{step:?}");
        // What is allocated without being written can come to look like data by itself.
        stored.max(report.used)
    }

    fn read_back(&self) {
        let mut seen = HashSet::new();
        for listed in self.world.list(&self.world.root, true, 100) {
            let entry = listed.entry.unwrap();
            if entry.attr.kind == Kind::File && seen.insert(entry.attr.id) {
                assert!(
                    self.world.content(&entry.node) == self.content[&entry.attr.id],
                    "{:?} reads back differently",
                    listed.name
                );
            }
        }
    }

    fn run(mut self, steps: &[Step]) {
        let mut used = 0;
        for step in steps {
            self.apply(step);
            used = self.check(step, used);
        }
        if !self.drops {
            self.read_back();
        }
        self.held.clear();
        self.check(&Step::Release(0), used);
    }
}

/// Bytes of the blocks that hold data.
fn data(file: &Opened, size: u64) -> u64 {
    let (mut at, mut sum) = (0, 0);
    while let Ok(start) = file.seek(at, Whence::Data) {
        at = file.seek(start, Whence::Hole).unwrap();
        sum += at.min(size).next_multiple_of(BLOCK) - start / BLOCK * BLOCK;
    }
    sum
}

fn check(cases: u32, keeps: bool, make: impl Fn() -> Edge) {
    let cases = std::env::var("NACRE_MODEL_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(cases);
    println!("campaign: {cases} cases (NACRE_MODEL_CASES)");
    let persistence = Some(Box::new(FileFailurePersistence::Off) as Box<_>);
    let mut runner = TestRunner::new(Config {
        cases,
        max_shrink_iters: 2_000,
        failure_persistence: persistence,
        ..Config::default()
    });
    let outcome = runner.run(&vec(step(keeps), 1..60), |steps| {
        make().run(&steps);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

fn settings(more: &str) -> String {
    format!("cage:size={BYTES},inodes={INODES},limit=user:1000={USER_BYTES}{more}")
}

fn over_host(directories: &tempfile::TempDir, more: &str, keeps: bool) -> Edge {
    let directory = tempfile::tempdir_in(directories.path()).unwrap().keep();
    let magic = rustix::fs::statfs(&directory).unwrap().f_type as u64 & 0xffff_ffff;
    Edge::new(&format!("host:{} | {}", directory.to_str().unwrap(), settings(more)), Storage::of_magic(magic), keeps)
}

/// Where files are made: `NACRE_EDGE_DIR` names another file system. In memory nothing is written
/// back behind the test's back; on ext4 a file of more than four extents takes a block more as soon
/// as that happens.
fn directories() -> tempfile::TempDir {
    crate::stacks::prepare_thread();
    match std::env::var_os("NACRE_EDGE_DIR") {
        Some(place) => tempfile::tempdir_in(place).unwrap(),
        None => tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap(),
    }
}

/// A few files on whatever holds temporary files, where counts of blocks may grow by themselves.
#[test]
fn over_a_disk() {
    crate::stacks::prepare_thread();
    let directories = tempfile::tempdir().unwrap();
    check(50, false, || over_host(&directories, "", false).growing());
}

#[test]
fn over_mem() {
    check(400, false, || Edge::new(&format!("mem | {}", settings("")), Storage::Plain, false));
}

#[test]
fn over_the_host() {
    let directories = directories();
    check(150, false, || over_host(&directories, "", false));
}

#[test]
fn with_space_behind_the_end_of_files() {
    let directories = directories();
    check(100, true, || over_host(&directories, "", true));
}

#[test]
fn when_the_oldest_goes() {
    let directories = directories();
    check(100, false, || over_host(&directories, ",when-full=drop-oldest", false));
    check(200, false, || Edge::new(&format!("mem | {}", settings(",when-full=drop-oldest")), Storage::Plain, false));
}
