//! Hosts of one tree: one group of marks for all; no events about writes through any of them, but
//! events about everything that two of them could show, and about changes by other processes.

use super::{
    super::watch::{Tree, WatchGroup},
    *,
};
use nacre_testkit::needs;
use nacre_vfs::Invalidation;
use std::{
    io::Write,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

/// Time limit for a notice.
const PATIENCE: Duration = Duration::from_secs(60);

/// Several sources on one file system, each with a host that watches.
struct Branches {
    doors: Vec<(Door, Receiver<Invalidation>)>,
}

/// Makes branches; `None` where file systems cannot be marked.
fn branches(count: usize) -> Option<Branches> {
    let tree = Arc::new(WatchGroup::default()).tree();
    let doors: Vec<_> = (0..count).map(|_| joined(&tree)).collect();
    doors.iter().all(|(door, _)| door.host.shared.watch.method() == "fanotify").then_some(Branches { doors })
}

fn joined(tree: &Tree) -> (Door, Receiver<Invalidation>) {
    joined_with(TempDir::new().unwrap(), tree)
}

fn joined_with(source: TempDir, tree: &Tree) -> (Door, Receiver<Invalidation>) {
    let door = Door::of(
        source,
        |options| {
            options.coherence = HostCoherence::Watch;
            options.tree = Some(tree.clone());
        },
        64,
    );
    let (sender, receiver) = channel();
    door.host.watch(sender);
    (door, receiver)
}

impl Branches {
    fn door(&self, branch: usize) -> &Door {
        &self.doors[branch].0
    }

    /// The notices of a branch up to a change made now, after which all earlier ones have come.
    fn heard(&self, branch: usize) -> Vec<Invalidation> {
        static MARKERS: AtomicUsize = AtomicUsize::new(0);
        // Parallel tests change files of the same file system, each from a process of its own.
        let marker = format!("marker{}.{}", std::process::id(), MARKERS.fetch_add(1, Ordering::Relaxed));
        let (door, receiver) = &self.doors[branch];
        shell(door.source.path(), &format!("touch {marker}"));
        let mut heard = Vec::new();
        loop {
            let notice = receiver.recv_timeout(PATIENCE).expect("the notice never came");
            if matches!(&notice, Invalidation::Entry { name, .. } if **name == *marker.as_bytes()) {
                return heard;
            }
            heard.push(notice);
        }
    }

    fn hears(&self, branch: usize, id: FileId) -> bool {
        self.heard(branch).contains(&Invalidation::Content { id })
    }
}

#[test]
fn nobody_hears_what_is_written_through_one_of_them_and_everybody_hears_others() {
    let Some(branches) = branches(3) else { return };
    for (door, _) in &branches.doors {
        assert_eq!(door.host.shared.watch.hosts(), 3);
    }
    let (entry, file) = branches.door(0).create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    client_writes(&file);
    for branch in 0..3 {
        assert!(!branches.hears(branch, entry.attr.id), "{branch}");
    }
    // While it is open for writing, and although we have written to it.
    shell(branches.door(0).source.path(), "echo theirs >> file");
    for branch in 0..3 {
        assert!(branches.hears(branch, entry.attr.id), "{branch}");
    }
}

#[test]
fn a_file_with_a_name_in_each_of_two_is_heard_by_both() {
    let Some(branches) = branches(2) else { return };
    let entry = branches.door(0).create(&Caller::ROOT, "file", 0o644, 0o2).unwrap().0;
    let other = branches.door(1).path("linked");
    std::fs::hard_link(branches.door(0).path("file"), &other).unwrap();
    assert_eq!(branches.door(1).find("linked").unwrap().attr.id, entry.attr.id);
    for branch in 0..2 {
        let file = branches.door(branch).open(["file", "linked"][branch], OpenFlags::WRITE.raw()).unwrap();
        client_writes(&file);
        drop(file);
        assert!(branches.hears(0, entry.attr.id) && branches.hears(1, entry.attr.id), "{branch}");
    }
}

#[test]
fn what_is_bound_from_one_into_another_is_heard_from_when_it_is_met() {
    needs!(is_root());
    for what in ["directory", "single"] {
        let Some(branches) = branches(2) else { return };
        branches.door(0).mkdir(&Caller::ROOT, "directory", 0o755).unwrap();
        let path = ["directory/file", "single"][usize::from(what == "single")];
        let (entry, file) = branches.door(0).create(&Caller::ROOT, path, 0o644, 0o2).unwrap();
        let target = branches.door(1).path("bound");
        if what == "single" {
            std::fs::write(&target, b"").unwrap()
        } else {
            std::fs::create_dir(&target).unwrap()
        }
        let _bind = Bind::new(&branches.door(0).path(what), &target);
        client_writes(&file);
        assert!(!branches.hears(0, entry.attr.id));
        let shown = if what == "single" { "bound" } else { "bound/file" };
        assert_eq!(branches.door(1).find(shown).unwrap().attr.id, entry.attr.id);
        assert!(!branches.hears(1, entry.attr.id));
        // The file that has been open since before, and one that is opened now, through either.
        let again = branches.door(0).open(path, OpenFlags::WRITE.raw()).unwrap();
        let other = branches.door(1).open(shown, OpenFlags::WRITE.raw()).unwrap();
        for file in [&file, &again, &other] {
            client_writes(file);
            assert!(branches.hears(0, entry.attr.id) && branches.hears(1, entry.attr.id), "{what}");
        }
    }
}

#[test]
fn who_overlaps_with_another_is_heard_and_the_others_go_on_hearing_when_one_leaves() {
    let Some(mut branches) = branches(3) else { return };
    let tree = branches.door(0).host.shared.options.tree.clone().unwrap();
    branches.door(1).mkdir(&Caller::ROOT, "inside", 0o755).unwrap();
    let (entry, file) = branches.door(1).create(&Caller::ROOT, "inside/file", 0o644, 0o2).unwrap();
    let mut options = HostOptions::new(branches.door(1).path("inside"));
    (options.coherence, options.tree) = (HostCoherence::Watch, Some(tree));
    let inner = Host::open(options).unwrap();
    let (sender, receiver) = channel();
    inner.watch(sender);
    assert_eq!(inner.shared.watch.hosts(), 4);
    // By the file that has been open since before, and by one that is opened now.
    for file in [file, branches.door(1).open("inside/file", OpenFlags::WRITE.raw()).unwrap()] {
        while receiver.try_recv().is_ok() {}
        client_writes(&file);
        assert!(branches.hears(1, entry.attr.id));
        let mut notices = std::iter::from_fn(|| receiver.recv_timeout(Duration::from_secs(20)).ok());
        assert!(notices.any(|notice| notice == Invalidation::Content { id: entry.attr.id }));
    }
    // Writes in sources that do not overlap still cause no events.
    let (entry, file) = branches.door(2).create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    client_writes(&file);
    assert!(!branches.hears(2, entry.attr.id));
    drop(inner);
    while receiver.recv().is_ok() {}
    let (first, receiver) = branches.doors.remove(0);
    drop(first);
    // Its channel ends.
    while receiver.recv().is_ok() {}
    assert_eq!(branches.door(0).host.shared.watch.hosts(), 2);
    shell(branches.door(1).source.path(), "echo theirs >> file");
    for branch in 0..2 {
        assert!(branches.hears(branch, entry.attr.id), "{branch}");
    }
}

#[test]
fn what_we_change_of_a_file_with_names_in_two_trees_is_told_to_the_other() {
    let watch_group = Arc::new(WatchGroup::default());
    let branches = Branches { doors: vec![joined(&watch_group.tree()), joined(&watch_group.tree())] };
    needs!(branches.door(0).host.shared.watch.method() == "fanotify");
    assert_eq!(branches.door(0).host.shared.watch.hosts(), 2);
    let entry = branches.door(0).create(&Caller::ROOT, "file", 0o644, 0o2).unwrap().0;
    let told = Invalidation::Attributes { id: entry.attr.id };
    branches.door(0).setattr("file", SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    assert!(!branches.heard(1).contains(&told));
    std::fs::hard_link(branches.door(0).path("file"), branches.door(1).path("linked")).unwrap();
    branches.heard(1);
    branches.door(0).setattr("file", SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    assert!(branches.heard(1).contains(&told));
}

#[test]
fn one_that_nobody_listens_to_does_not_silence_the_others() {
    let Some(mut branches) = branches(2) else { return };
    let (deaf, receiver) = branches.doors.remove(0);
    drop(receiver);
    let entry = branches.door(0).create(&Caller::ROOT, "file", 0o644, 0o2).unwrap().0;
    for _ in 0..3 {
        shell(branches.door(0).source.path(), "echo theirs >> file");
        assert!(branches.hears(0, entry.attr.id));
    }
    drop(deaf);
    shell(branches.door(0).source.path(), "echo theirs >> file");
    assert!(branches.hears(0, entry.attr.id));
}

/// Changes files outside of all sources until it is dropped: more than are processed in an instant,
/// and fewer than would overflow the queue.
struct Storm {
    shells: Vec<Child>,
    _directory: TempDir,
}

impl Storm {
    fn in_the(directory: TempDir) -> Storm {
        // Bounded, in case it is not stopped.
        let change = |name| {
            let script = format!(
                "j=0; while [ $j -lt 100 ]; do j=$((j+1)); i=0; while [ $i -lt 6000 ]; do : > {name}$i; i=$((i+1)); done; done"
            );
            start(Command::new("sh").arg("-c").arg(script).current_dir(&directory))
        };
        Storm { shells: ["a", "b"].map(change).into(), _directory: directory }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        for shell in &mut self.shells {
            shell.kill().unwrap();
            shell.wait().unwrap();
        }
    }
}

#[test]
fn who_joins_while_others_are_being_told_misses_nothing() {
    needs!(is_root());
    let (apart, tree) = (Apart::new(), Arc::new(WatchGroup::default()).tree());
    let (first, _hears) = joined_with(apart.directory(), &tree);
    needs!(first.host.shared.watch.method() == "fanotify");
    // Started in advance: starting takes longer than the window to be hit.
    let mut other = start(Command::new("sh").stdin(Stdio::piped()));
    let mut orders = other.stdin.take().unwrap();
    let storm = Storm::in_the(apart.directory());
    for round in 0..15 {
        let (door, receiver) = joined_with(apart.directory(), &tree);
        let path = door.path("file");
        std::fs::write(&path, "").unwrap();
        let changed = Invalidation::Content { id: door.find("file").unwrap().attr.id };
        writeln!(orders, "echo theirs >> {}", path.display()).unwrap();
        // Changes by others must be reported, whether this one is or not.
        let asked = Instant::now();
        let left = || PATIENCE.saturating_sub(asked.elapsed());
        let mut notices = std::iter::from_fn(|| receiver.recv_timeout(left()).ok());
        // More changes than the queue holds may happen.
        assert!(notices.any(|it| it == changed || it == Invalidation::Everything), "{round}");
    }
    drop((storm, orders));
    assert!(other.wait().unwrap().success());
}
