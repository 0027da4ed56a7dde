//! Tests of the invalidation thread: order, repetition, overflow.

use super::*;
use crate::inodes::Found;
use nacre_vfs::{Attr, Kind, Node, Protection, Time};
use std::sync::mpsc;

#[derive(Clone, Default)]
pub(crate) struct Recorder(pub Arc<Mutex<Vec<String>>>, pub Arc<AtomicBool>, bool);

impl Recorder {
    fn note(&self, text: String) {
        self.0.lock().push(text);
    }
}

impl CacheControl for Recorder {
    type Moment = ();
    fn now(&self) {}
    fn passed(&self, (): &mut ()) -> bool {
        !self.1.load(Ordering::Acquire)
    }
    fn release_all_kept(&self) {}
    fn inode(&self, nodeid: u64, pages: bool) {
        self.note(format!("inode {nodeid} {pages}"));
    }
    fn entry(&self, parent: u64, name: &[u8]) -> bool {
        self.note(format!("entry {parent} {}", name.escape_ascii()));
        name.starts_with(b"there")
    }
    fn forget(&self, parent: u64, name: &[u8]) {
        self.note(format!("forget {parent} {}", name.escape_ascii()));
    }
    fn finish(&self) -> Option<Instant> {
        None
    }
    fn all_entries(&self) {
        self.note("all".to_owned());
    }
    fn all_entries_again(&self) {}
    fn layer_checks(&self) -> bool {
        self.2
    }
    fn release_kept(&self, _: u64) {}
    fn tell(&self, _: &[(u64, bool)], _: &[(u64, &[u8])]) -> bool {
        false
    }
    fn trim(&self) {
        self.note("trim".to_owned());
    }
    fn rest(&self, known: Option<&[Node]>) -> bool {
        self.note(known.map_or("drowsy".to_owned(), |known| format!("rest {}", known.len())));
        true
    }
}

pub(crate) fn attr(ino: u64) -> Attr {
    let zero = Time::default();
    Attr {
        id: FileId { fs: 1, ino, generation: 0 },
        kind: Kind::Directory,
        mode: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: zero,
        mtime: zero,
        ctime: zero,
        btime: None,
        protection: Protection::None,
    }
}

fn shared() -> InvalidationState {
    let root = Node::new(Arc::new(()));
    InvalidationState {
        inodes: Arc::new(Inodes::new(root, &attr(1))),
        counts: Arc::default(),
        stop: Arc::default(),
        trim: Arc::default(),
        written: Arc::default(),
        marks: Arc::default(),
    }
}

/// Runs the thread's body until it has nothing more to do.
fn sent(shared: &InvalidationState, changes: Vec<Invalidation>) -> Vec<String> {
    let recorder = Recorder::default();
    let (sender, receiver) = mpsc::channel();
    for change in changes {
        sender.send(change).unwrap();
    }
    let mut repeats = VecDeque::new();
    if let Ok(first) = receiver.try_recv() {
        let batch = collect(first, &receiver);
        let names = deliver(&batch, &recorder, shared);
        enqueue(&mut repeats, batch, names, &recorder);
    }
    while !repeats.is_empty() {
        repeat_due(&mut repeats, &recorder, shared);
        std::thread::yield_now();
    }
    recorder.0.lock().clone()
}

#[test]
fn a_name_is_taken_back_once_and_its_directory_twice() {
    let shared = shared();
    let name = Box::from(&b"a"[..]);
    let change = Invalidation::Entry { parent: attr(1).id, name };
    assert_eq!(sent(&shared, vec![change.clone(), change]), ["inode 1 true", "entry 1 a", "inode 1 true"]);
}

#[test]
fn a_name_that_still_leads_somewhere_is_told_twice() {
    let shared = shared();
    let change = Invalidation::Entry { parent: attr(1).id, name: Box::from(&b"there"[..]) };
    assert_eq!(sent(&shared, vec![change]), ["inode 1 true", "entry 1 there", "inode 1 true", "entry 1 there"]);
}

#[test]
fn a_name_that_is_given_up_is_told_once_wherever_it_leads() {
    let shared = shared();
    let change = Invalidation::Forget { parent: attr(1).id, name: Box::from(&b"there"[..]) };
    assert_eq!(sent(&shared, vec![change]), ["forget 1 there", "inode 1 true", "inode 1 true"]);
}

#[test]
fn names_alone_leave_the_files_as_they_are() {
    let shared = shared();
    assert_eq!(
        sent(&shared, vec![Invalidation::Names, Invalidation::Attributes { id: attr(1).id }]),
        ["inode 1 false", "all", "inode 1 false"]
    );
}

#[test]
fn content_outweighs_attributes_and_unknown_files_are_ignored() {
    let shared = shared();
    let id = attr(1).id;
    let unknown = attr(77).id;
    let changes =
        vec![Invalidation::Content { id }, Invalidation::Attributes { id }, Invalidation::Attributes { id: unknown }];
    assert_eq!(sent(&shared, changes), ["inode 1 true", "inode 1 true"]);
}

#[test]
fn a_file_that_becomes_known_meanwhile_gets_the_second_notification() {
    let shared = shared();
    let recorder = Recorder::default();
    recorder.1.store(true, Ordering::Release);
    let mut batch = Batch::default();
    batch.add(Invalidation::Attributes { id: attr(5).id });
    let names = deliver(&batch, &recorder, &shared);
    let mut repeats = VecDeque::new();
    enqueue(&mut repeats, batch, names, &recorder);
    for _ in 0..100 {
        repeat_due(&mut repeats, &recorder, &shared);
    }
    assert_eq!(repeats.len(), 1, "a request is under way");
    let nodeid = shared.inodes.register(&Node::new(Arc::new(())), &attr(5), Found::below(1)).nodeid;
    recorder.1.store(false, Ordering::Release);
    while !repeats.is_empty() {
        repeat_due(&mut repeats, &recorder, &shared);
    }
    assert_eq!(*recorder.0.lock(), [format!("inode {nodeid} false")]);
}

#[test]
fn everything_means_all_names_and_all_inodes() {
    let shared = shared();
    let list = sent(&shared, vec![Invalidation::Everything]);
    assert_eq!(list, ["all", "inode 1 true", "inode 1 true"]);
    assert_eq!(shared.counts.everything.load(Ordering::Relaxed), 1);
}

#[test]
fn a_mark_is_answered_when_what_came_before_is_delivered() {
    let state = shared();
    let recorder = Recorder::default();
    let (sender, receiver) = mpsc::channel();
    let (told, waiting) = mpsc::sync_channel(1);
    state.marks.lock().push_back(told);
    sender.send(Invalidation::Everything).unwrap();
    sender.send(mark()).unwrap();
    assert!(waiting.try_recv().is_err());
    drop(sender);
    run(&receiver, &recorder, &state);
    assert!(waiting.try_recv().is_ok());
    assert_eq!(recorder.0.lock().first().map(String::as_str), Some("all"));
    assert_eq!(state.counts.told.load(Ordering::Relaxed), 0, "a mark is no change");
}

#[test]
fn only_what_the_kernel_knows_is_counted() {
    let shared = shared();
    shared.inodes.register(&Node::new(Arc::new(())), &attr(5), Found::below(1));
    let change = |number| Invalidation::Content { id: attr(number).id };
    sent(
        &shared,
        vec![change(5), change(6), change(7), Invalidation::Entry { parent: attr(8).id, name: b"name"[..].into() }],
    );
    assert_eq!(shared.counts.told.load(Ordering::Relaxed), 1);
}

#[test]
fn the_thread_ends_when_told_and_when_nobody_can_send() {
    let state = shared();
    let (sender, receiver) = mpsc::channel();
    state.stop.store(true, Ordering::Release);
    sender.send(wake()).unwrap();
    run(&receiver, &Recorder::default(), &state);
    let (sender, receiver) = mpsc::channel();
    drop(sender);
    run(&receiver, &Recorder::default(), &shared());
}

#[test]
fn files_written_to_are_collected_and_taken_back_once_each() {
    let shared = shared();
    let recorder = Recorder::default();
    let known = |ino| shared.inodes.register(&Node::new(Arc::new(())), &attr(ino), Found::below(1)).nodeid;
    let (first, second, gone) = (known(7), known(9), known(11));
    assert!(shared.inodes.forget(gone, 1).is_some());
    shared.written.lock().extend([first, second, gone, first]);
    let due = written(None, &recorder, &shared);
    assert!(due.is_some() && recorder.0.lock().is_empty());
    assert_eq!(written(Some(Instant::now()), &recorder, &shared), None);
    // Ids are not in the order in which they were given out.
    let (first, second) = (first.min(second), first.max(second));
    assert_eq!(*recorder.0.lock(), [format!("inode {first} false"), format!("inode {second} false")]);
    assert_eq!(written(None, &recorder, &shared), None);
}

#[test]
fn where_the_layer_checks_a_changed_directory_makes_all_names_stale() {
    for (layer_checks, expected) in [(false, 0), (true, 1)] {
        let shared = shared();
        let recorder = Recorder(Arc::default(), Arc::default(), layer_checks);
        let mut batch = Batch::default();
        // A name that appeared or vanished does not change search permissions.
        batch.add(Invalidation::Entry { parent: attr(1).id, name: (*b"n").into() });
        deliver(&batch, &recorder, &shared);
        assert!(!recorder.0.lock().contains(&"all".to_owned()));
        batch.add(Invalidation::Attributes { id: attr(1).id });
        deliver(&batch, &recorder, &shared);
        assert_eq!(recorder.0.lock().iter().filter(|text| *text == "all").count(), expected);
    }
}
