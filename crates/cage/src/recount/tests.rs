//! Walks over `mem`, alone and with concurrent changes of the tree.

mod changing;

use super::{super::ledger::Sum, *};
use hashbrown::HashMap;
use nacre_layers::{
    fakes::FakeClock,
    host::{Host, HostOptions},
    mem::Mem,
};
use nacre_vfs::{Description, Filter, Filtered, Op, OpenFlags, RenameFlags, Result, SetAttr, WriteOrigin};
use proptest::prelude::*;
use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt, path::Path};

/// By allocated blocks; the directories in the list are the groups.
struct ByBlocks {
    fs: u64,
    groups: Vec<FileId>,
}

impl CountRule for ByBlocks {
    fn counts(&self, id: &FileId) -> bool {
        id.fs == self.fs
    }
    fn cost(&self, _: &Node, attr: &Attr) -> u64 {
        attr.blocks * 512
    }
    fn group(&self, directory: &FileId, above: Option<usize>) -> Option<usize> {
        self.groups.iter().position(|group| group == directory).or(above)
    }
}

/// A filter that runs a hook before each listing and for each entry; the hook may return an error.
struct Hook<F>(F);

impl<F: Fn(&Op<'_>, Option<&mut Attr>) -> Result<()> + Send + Sync + 'static> Filter for Hook<F> {
    fn name(&self) -> &'static str {
        "hook"
    }
    fn describe(&self) -> Description {
        Description::new("hook")
    }
    fn allow(&self, _: &Caller, op: &Op<'_>) -> Result<()> {
        // Entries are seen by `attr_up`; a refused name would not be listed at all.
        if matches!(op, Op::Readdir) { (self.0)(op, None) } else { Ok(()) }
    }
    fn attr_up(&self, _: &Caller, attr: &mut Attr) -> Result<()> {
        (self.0)(&Op::Getattr, Some(attr))
    }
}

fn name(name: &[u8]) -> Name<'_> {
    Name::new(name).unwrap()
}

fn directory(mem: &Mem, parent: &Node, path: &str) -> Node {
    mem.mkdir(&Caller::ROOT, parent, name(path.as_bytes()), 0o755).unwrap().node
}

fn file(mem: &Mem, parent: &Node, path: &str, uid: u32, pages: u64) -> Node {
    let caller = Caller { uid, ..Caller::ROOT };
    let (entry, file) = mem.create(&caller, parent, name(path.as_bytes()), 0o644, OpenFlags::WRITE).unwrap();
    for page in 0..pages {
        file.write(b"x", page * 4096, WriteOrigin::Caller).unwrap();
    }
    entry.node
}

fn id(mem: &Mem, node: &Node) -> FileId {
    mem.getattr(&Caller::ROOT, node, None).unwrap().id
}

fn rule(mem: &Mem, groups: &[&Node]) -> Arc<ByBlocks> {
    let root = mem.root().unwrap().attr.id;
    Arc::new(ByBlocks { fs: root.fs, groups: groups.iter().map(|group| id(mem, group)).collect() })
}

fn recount(below: Arc<dyn Layer>, rule: &Arc<ByBlocks>) -> Recount {
    Recount::new(below, Arc::clone(rule) as _, Arc::new(FakeClock::default()))
}

fn count(below: Arc<dyn Layer>, rule: &Arc<ByBlocks>) -> Counted {
    let mut recount = recount(below, rule);
    recount.run().unwrap();
    recount.settle([]).unwrap()
}

fn sum(pages: u64, inodes: u64) -> Sum {
    Sum { bytes: pages * 4096, inodes }
}

#[test]
fn everything_counts_once_for_user_and_group() {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    let a = directory(&mem, &root, "a");
    let inner = directory(&mem, &a, "inner");
    let deep = directory(&mem, &inner, "deep");
    file(&mem, &root, "f", 1, 2);
    let linked = file(&mem, &a, "g", 2, 3);
    mem.link(&Caller::ROOT, &linked, None, &inner, name(b"h")).unwrap();
    mem.link(&Caller::ROOT, &linked, None, &a, name(b"h")).unwrap();
    file(&mem, &deep, "i", 2, 5);
    mem.symlink(&Caller::ROOT, &deep, name(b"l"), b"../..").unwrap();
    mem.mknod(&Caller::ROOT, &deep, name(b"p"), Kind::Fifo, 0o600, (0, 0)).unwrap();
    // `inner` has a limit of its own inside `a`.
    let rule = rule(&mem, &[&a, &inner]);
    let counted = count(Arc::clone(&mem) as _, &rule);
    // `g` may be met first in `a` or in `inner`; a cage does not let links cross groups.
    let with_linked =
        |group: usize| sum(3, 1).bytes * u64::from(counted.sums.dirs[&group].bytes >= sum(3, 1).bytes && group == 0);
    assert!(counted.complete && counted.unread.is_empty());
    assert_eq!(counted.sums.whole, sum(10, 8));
    assert_eq!(counted.sums.users, BTreeMap::from([(0, sum(0, 5)), (1, sum(2, 1)), (2, sum(8, 2))]));
    assert_eq!(counted.sums.dirs[&0].bytes, with_linked(0));
    assert_eq!(counted.sums.dirs[&0].bytes + counted.sums.dirs[&1].bytes, sum(8, 0).bytes);
    assert_eq!(counted.sums.dirs[&0].inodes + counted.sums.dirs[&1].inodes, 7);
}

#[test]
fn large_and_deep_directories_are_walked_in_batches() {
    let mem = Arc::new(Mem::new());
    let mut at = mem.root().unwrap().node;
    for number in 0..1000 {
        file(&mem, &at, &format!("f{number}"), 1, 1);
    }
    for number in 0..BATCH * 2 {
        directory(&mem, &at, &format!("d{number}"));
    }
    for _ in 0..20_000 {
        at = directory(&mem, &at, "deep");
    }
    file(&mem, &at, "bottom", 1, 7);
    let most = Arc::new(AtomicU64::new(0));
    let (seen, entries) = (Arc::clone(&most), AtomicU64::new(0));
    let hook = move |op: &Op<'_>, _: Option<&mut Attr>| {
        match op {
            Op::Readdir => entries.store(0, Ordering::Relaxed),
            _ => _ = seen.fetch_max(entries.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed),
        }
        Ok(())
    };
    let rule = rule(&mem, &[]);
    let counted = count(Arc::new(Filtered::new(Arc::new(Hook(hook)), mem)), &rule);
    assert_eq!(counted.sums.whole, sum(1007, 1000 + 2 * BATCH as u64 + 20_000 + 1));
    // The entry that does not fit is examined in vain.
    assert_eq!(most.load(Ordering::Relaxed), BATCH as u64 + 1);
}

#[test]
fn other_file_systems_are_left_out_with_all_that_is_below() {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    let foreign = directory(&mem, &root, "mounted");
    let inside = file(&mem, &foreign, "inside", 1, 9);
    file(&mem, &root, "here", 1, 1);
    let (mounted, rule) = (id(&mem, &foreign), rule(&mem, &[]));
    let hook = move |_: &Op<'_>, attr: Option<&mut Attr>| {
        if let Some(attr) = attr.filter(|attr| attr.id == mounted) {
            attr.id.fs += 1;
        }
        Ok(())
    };
    assert_eq!(
        count(Arc::new(Filtered::new(Arc::new(Hook(hook)), Arc::clone(&mem) as _)), &rule).sums.whole,
        sum(1, 1)
    );
    // A single file can be a mount point, too.
    let file = id(&mem, &inside);
    let hook = move |_: &Op<'_>, attr: Option<&mut Attr>| {
        if let Some(attr) = attr.filter(|attr| attr.id == file) {
            attr.id.fs += 1;
        }
        Ok(())
    };
    assert_eq!(count(Arc::new(Filtered::new(Arc::new(Hook(hook)), mem)), &rule).sums.whole, sum(1, 2));
}

#[test]
fn what_cannot_be_read_is_told_and_what_is_gone_is_not() {
    for (errno, complete) in [(Errno::EACCES, false), (Errno::EIO, false), (Errno::ESTALE, true), (Errno::ENOENT, true)]
    {
        let mem = Arc::new(Mem::new());
        let root = mem.root().unwrap().node;
        let sub = directory(&mem, &root, "sub");
        let closed = directory(&mem, &sub, "closed");
        file(&mem, &closed, "inside", 1, 9);
        let bad = file(&mem, &root, "bad", 1, 4);
        file(&mem, &root, "good", 1, 1);
        let (bad, rule, listings) = (id(&mem, &bad), rule(&mem, &[]), AtomicU64::new(0));
        let hook = move |op: &Op<'_>, attr: Option<&mut Attr>| match (op, attr) {
            // The root, `sub`, and then `closed`.
            (Op::Readdir, _) if listings.fetch_add(1, Ordering::Relaxed) == 2 => Err(errno),
            (_, Some(attr)) if attr.id == bad => Err(errno),
            _ => Ok(()),
        };
        let counted = count(Arc::new(Filtered::new(Arc::new(Hook(hook)), mem)), &rule);
        let mut unread = counted.unread;
        unread.sort_by(|one, other| one.path.cmp(&other.path));
        let expected: Vec<Unread> = [&b"bad"[..], b"sub/closed"]
            .iter()
            .filter(|_| !complete)
            .map(|path| Unread { path: path.to_vec(), errno })
            .collect();
        assert_eq!((counted.complete, unread), (complete, expected));
        assert_eq!(counted.sums.whole, sum(1, 3), "what can be seen counts");
    }
}

#[test]
fn a_root_that_is_gone_is_an_error() {
    let mem = Arc::new(Mem::new());
    let rule = rule(&mem, &[]);
    let gone = |_: &Op<'_>, _: Option<&mut Attr>| Err(Errno::ESTALE);
    let mut recount = recount(Arc::new(Filtered::new(Arc::new(Hook(gone)), mem)), &rule);
    assert_eq!(recount.run(), Err(Stopped::Root(Errno::ESTALE)));
    assert_eq!(recount.settle([]), None);
}

#[test]
fn it_can_be_cancelled_in_the_middle() {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    for number in 0..1000 {
        file(&mem, &root, &number.to_string(), 1, 1);
    }
    let (control, rule) = (Arc::new(Mutex::new(None::<Arc<Control>>)), rule(&mem, &[]));
    let inner = Arc::clone(&control);
    let hook = move |op: &Op<'_>, _: Option<&mut Attr>| {
        if let (Op::Readdir, Some(control)) = (op, &*inner.lock())
            && control.progress().files >= 2 * BATCH as u64
        {
            control.cancel();
        }
        Ok(())
    };
    let mut recount = recount(Arc::new(Filtered::new(Arc::new(Hook(hook)), mem)), &rule);
    *control.lock() = Some(recount.control());
    assert_eq!(recount.run(), Err(Stopped::Cancelled));
    assert_eq!(recount.control().progress(), Progress { files: 768, directories: 1, bytes: 768 * 4096, unread: 0 });
    assert_eq!(recount.settle([]), None, "half a count is no count");
}

#[test]
fn it_rests_as_long_as_it_works_unless_somebody_waits() {
    for (hurried, rests) in [(false, 4 * 15), (true, 0)] {
        let mem = Arc::new(Mem::new());
        let root = mem.root().unwrap().node;
        for number in 0..3 {
            directory(&mem, &root, &number.to_string());
        }
        let (clock, rule) = (Arc::new(FakeClock::default()), rule(&mem, &[]));
        let ticking = Arc::clone(&clock);
        let hook = move |op: &Op<'_>, _: Option<&mut Attr>| {
            if matches!(op, Op::Readdir) {
                ticking.advance(Duration::from_millis(15));
            }
            Ok(())
        };
        let below = Arc::new(Filtered::new(Arc::new(Hook(hook)), mem));
        let mut recount = Recount::new(below, rule, Arc::clone(&clock) as _);
        recount.control().hurry(hurried);
        recount.run().unwrap();
        assert_eq!(clock.paused(), Duration::from_millis(rests));
        assert_eq!(recount.control().progress().directories, 4);
    }
}

#[test]
fn the_ledger_has_the_last_word_on_what_it_touched() {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    let group = directory(&mem, &root, "group");
    let (kept, written, gone) =
        (file(&mem, &root, "kept", 1, 1), file(&mem, &root, "written", 1, 2), file(&mem, &group, "gone", 2, 4));
    let rule = rule(&mem, &[&group]);
    let mut recount = recount(Arc::clone(&mem) as _, &rule);
    recount.run().unwrap();
    assert_eq!(recount.settle([]).unwrap().sums.whole, sum(7, 4));
    let (one, two) = (Owner { uid: 1, group: None }, Owner { uid: 2, group: Some(0) });
    let fresh = FileId { ino: 1000, ..id(&mem, &kept) };
    let reused = FileId { generation: 7, ..id(&mem, &gone) };
    let held = [
        // Recorded more than once: the last entry is used.
        Held { id: id(&mem, &written), owner: one, bytes: 1, inodes: 1 },
        Held { id: id(&mem, &written), owner: two, bytes: 5 * 4096, inodes: 1 },
        Held { id: id(&mem, &gone), owner: two, bytes: 0, inodes: 0 },
        // The inode number of a removed file, reused; counted once by the walk.
        Held { id: reused, owner: one, bytes: 10 * 4096, inodes: 1 },
        Held { id: fresh, owner: one, bytes: 100 * 4096, inodes: 1 },
    ];
    let sums = recount.settle(held).unwrap().sums;
    assert_eq!(sums.whole, sum(1 + 5 + 10 + 100, 5));
    assert_eq!(sums.users, BTreeMap::from([(0, sum(0, 1)), (1, sum(111, 3)), (2, sum(5, 1))]));
    assert_eq!(sums.dirs, BTreeMap::from([(0, sum(5, 2))]), "the directory itself, and the file");
}

#[test]
fn a_directory_that_moves_behind_the_walk_is_walked_again() {
    let mem = Arc::new(Mem::new());
    let root = mem.root().unwrap().node;
    let (early, late) = (directory(&mem, &root, "a"), directory(&mem, &root, "b"));
    let moving = directory(&mem, &late, "moving");
    file(&mem, &moving, "inside", 1, 3);
    let rule = rule(&mem, &[]);
    // The last entry of a batch is walked first: so `b` is walked before `a`, and the directory
    // moves in the opposite direction, out of `a`.
    mem.rename(&Caller::ROOT, &late, name(b"moving"), &early, name(b"moving"), RenameFlags(0)).unwrap();
    let (below, target, from) = (Arc::clone(&mem), late.clone(), early.clone());
    let listings = AtomicU64::new(0);
    let hook = move |op: &Op<'_>, _: Option<&mut Attr>| {
        if matches!(op, Op::Readdir) && listings.fetch_add(1, Ordering::Relaxed) == 2 {
            below.rename(&Caller::ROOT, &from, name(b"moving"), &target, name(b"moving"), RenameFlags(0)).unwrap();
        }
        Ok(())
    };
    let mut recount = recount(Arc::new(Filtered::new(Arc::new(Hook(hook)), Arc::clone(&mem) as _)), &rule);
    recount.run().unwrap();
    assert_eq!(recount.settle([]).unwrap().sums.whole, sum(0, 2), "it went past the walk");
    recount.control().moved(moving.clone(), None);
    assert_eq!(recount.settle([]), None, "not yet");
    recount.run().unwrap();
    // The ledger reports the directory itself: it was renamed.
    let held = Held { id: id(&mem, &moving), owner: Owner { uid: 0, group: None }, bytes: 0, inodes: 1 };
    assert_eq!(recount.settle([held]).unwrap().sums.whole, sum(3, 4));
    assert_eq!(count(Arc::clone(&mem) as _, &rule).sums.whole, sum(3, 4));
}

/// Usage as `du` counts it.
fn disk_usage(directory: &Path, seen: &mut HashMap<u64, ()>) -> (u64, u64) {
    let (mut bytes, mut inodes) = (0, 0);
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        if seen.insert(metadata.ino(), ()).is_none() {
            (bytes, inodes) = (bytes + metadata.blocks() * 512, inodes + 1);
        }
        if metadata.is_dir() {
            let below = disk_usage(&entry.path(), seen);
            (bytes, inodes) = (bytes + below.0, inodes + below.1);
        }
    }
    (bytes, inodes)
}

#[test]
fn a_directory_of_the_host_counts_as_du_counts_it() {
    let directory = tempfile::TempDir::new().unwrap();
    for sub in 0..20 {
        let below = directory.path().join(format!("{sub}/a/b"));
        fs::create_dir_all(&below).unwrap();
        for file in 0..60 {
            fs::write(below.join(format!("{file}")), vec![1; file * 777]).unwrap();
        }
        fs::hard_link(below.join("7"), below.parent().unwrap().join("linked")).unwrap();
        fs::File::create(below.join("hole")).unwrap().set_len(1 << 30).unwrap();
        std::os::unix::fs::symlink("x".repeat(200), below.join("link")).unwrap();
    }
    // Delayed allocation is done now.
    rustix::fs::syncfs(fs::File::open(directory.path()).unwrap()).unwrap();
    let host = Host::open(HostOptions::new(directory.path())).unwrap();
    let rule = Arc::new(ByBlocks { fs: host.root().unwrap().attr.id.fs, groups: Vec::new() });
    let mut recount = Recount::new(Arc::new(host), Arc::clone(&rule) as _, Arc::new(FakeClock::default()));
    recount.run().unwrap();
    let counted = recount.settle([]).unwrap();
    let (bytes, inodes) = disk_usage(directory.path(), &mut HashMap::new());
    assert_eq!((counted.sums.whole, counted.complete), (Sum { bytes, inodes }, true));
    assert_eq!(inodes, 20 * (3 + 60 + 2));
}

#[test]
fn only_the_counting_thread_steps_back() {
    let before = rustix::process::getpriority_process(None).unwrap();
    let counting = std::thread::spawn(|| {
        lower_priority();
        rustix::process::getpriority_process(None).unwrap()
    });
    assert_eq!(counting.join().unwrap(), 19);
    assert_eq!(rustix::process::getpriority_process(None).unwrap(), before);
}

#[test]
fn inode_numbers_mean_something_within_a_file_system_only() {
    let mut visited = Visited::default();
    let (here, there) = (FileId { fs: 1, ino: 5, generation: 0 }, FileId { fs: 2, ino: 5, generation: 0 });
    assert!(visited.add(&here, Owner::default(), 4096) && visited.add(&there, Owner::default(), 1));
    assert!(!visited.add(&there, Owner::default(), 1));
    let gone = Held { id: there, owner: Owner::default(), bytes: 0, inodes: 0 };
    assert_eq!(visited.sums_with([gone]).whole, sum(1, 1));
}

proptest! {
    /// Packed values against a plain map.
    #[test]
    fn packed_values_are_the_values(
        files in prop::collection::vec((prop_oneof![0u64..300, any::<u64>()], 0u32..3, prop::option::of(0usize..2),
            prop_oneof![(0u64..100).prop_map(|units| units * 512), any::<u64>().prop_map(|bytes| bytes >> 12), 0u64..5000]), 0..400),
    ) {
        let mut visited = Visited::default();
        let mut plain = HashMap::new();
        for &(ino, uid, group, bytes) in &files {
            let owner = Owner { uid, group };
            prop_assert_eq!(visited.add(&FileId { fs: 3, ino, generation: ino >> 2 }, owner, bytes), !plain.contains_key(&ino));
            plain.entry(ino).or_insert((owner, bytes));
        }
        prop_assert_eq!(visited.sums_with([]).whole.bytes, plain.values().map(|value| value.1).sum::<u64>());
        // After all are subtracted one by one, the sums are zero.
        let gone: Vec<Held> = plain.iter().map(|(&ino, value)| Held { id: FileId { fs: 3, ino, generation: 0 }, owner: value.0, bytes: 0, inodes: 0 }).collect();
        prop_assert_eq!(visited.sums_with(gone), Sums::default());
    }
}
