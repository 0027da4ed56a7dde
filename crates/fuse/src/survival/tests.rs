//! Tests of a mount's handoff state: records cut at every store. `lives.rs`: a front end in one life after the other;
//! `repeated.rs`: resent requests, over layers of every kind; `unions.rs`: the same where files of a lower branch are
//! copied, hidden and moved; `steps.rs`: crashes between any two steps of a union.

mod lives;
mod repeated;
mod steps;
mod unions;

use super::{
    Survival, cut,
    nodes::{NodePlace, NodeRecord, Nodes},
    numbers::{Sets, Words},
    opens::{OpenLeft, OpenRecord, Opens},
    requests::{PanicReply, RenameRecord, Requests},
};
use nacre_vfs::{FileId, Kind, OpenFlags};
use std::{
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

const ID: FileId = FileId { fs: 1, ino: 2, generation: 3 };

fn place<'a>(parent: u64, name: &'a [u8]) -> NodePlace<'a> {
    NodePlace { parent, name }
}

/// Kills an operation after each of its stores in turn, and checks the state that remains.
fn killed_everywhere(mut prepare: impl FnMut() -> Survival, act: impl Fn(&Survival), check: impl Fn(&Survival, bool)) {
    for stores in 0.. {
        let memory = prepare();
        cut::after(Some(stores));
        let killed = catch_unwind(AssertUnwindSafe(|| act(&memory))).is_err();
        cut::after(None);
        check(&memory, !killed);
        if !killed {
            assert!(stores > 3, "nothing was stored");
            return;
        }
    }
}

#[test]
fn what_is_noted_in_another_way_is_not_taken_over() {
    let mut memory = Survival::new().unwrap();
    let another = || memory.shared.descriptor().try_clone_to_owned().unwrap();
    assert!(memory.take_program().is_none());
    assert!(memory.set_program(Path::new("/bin/program")) && !memory.set_program(Path::new(&"x".repeat(4097))));
    assert!(memory.take_program().is_none(), "one that does not fit is none");
    assert!(memory.set_program(Path::new("/bin/program")));
    let taken = Survival::taken_over(another()).unwrap();
    assert_eq!(taken.take_program().as_deref(), Some(Path::new("/bin/program")));
    assert!(memory.take_program().is_none(), "once");
    let (smaller, _) = std::io::pipe().unwrap();
    assert!(Survival::taken_over(smaller.into()).is_err());
    let later = another();
    memory.next_life();
    assert_eq!(Survival::taken_over(later.try_clone().unwrap()).unwrap().restarts(), 1);
    memory.set(super::Head::Version, super::VERSION + 1);
    assert!(Survival::taken_over(later).is_err());
}

#[test]
fn a_node_is_noted_or_not() {
    for name in [&b"short"[..], &[b'n'; 72], &[b'x'; 255]] {
        let noted = NodeRecord {
            nodeid: 5 << 32 | 16,
            parent: 9,
            name: name.to_vec(),
            id: ID,
            kind: Kind::Fifo,
            lookups: 1,
            unlisted: false,
        };
        let make = |memory: &Survival| Nodes::new(memory).made(1, 5 << 32 | 16, place(9, name), ID, Kind::Fifo);
        let check = |memory: &Survival, whole: bool| match Nodes::new(memory).read(1) {
            Some(record) => assert_eq!(record, noted),
            None => assert!(!whole),
        };
        killed_everywhere(|| Survival::new().unwrap(), make, check);
    }
}

#[test]
fn a_node_that_moves_is_at_one_place_or_the_other() {
    let (old, new) = (vec![b'o'; 100], vec![b'w'; 200]);
    let prepare = || {
        let memory = Survival::new().unwrap();
        Nodes::new(&memory).made(3, 7 << 32, place(1, &old), ID, Kind::File);
        memory
    };
    let check = |memory: &Survival, whole: bool| {
        let nodes = Nodes::new(memory);
        nodes.end_move();
        let record = nodes.read(3).unwrap();
        let there = (record.parent, record.name);
        assert!(there == (2, new.clone()) || !whole && there == (1, old.clone()), "{there:?}");
        assert_eq!((record.id, record.kind, record.nodeid), (ID, Kind::File, 7 << 32));
    };
    killed_everywhere(prepare, |memory| Nodes::new(memory).found(3, 7 << 32, place(2, &new)), check);
}

#[test]
fn a_slot_that_is_used_again_holds_one_node_or_none() {
    let prepare = || {
        let memory = Survival::new().unwrap();
        Nodes::new(&memory).made(0, 1 << 32, place(1, b"before"), ID, Kind::File);
        memory
    };
    let again = |memory: &Survival| {
        let nodes = Nodes::new(memory);
        nodes.forgotten(0);
        nodes.made(0, 2 << 32, place(1, b"after"), FileId { ino: 9, ..ID }, Kind::Directory);
    };
    let check = |memory: &Survival, whole: bool| match Nodes::new(memory).read(0) {
        Some(record) if record.nodeid == 2 << 32 => {
            assert_eq!((record.name, record.id.ino, record.kind), (b"after".to_vec(), 9, Kind::Directory));
        }
        Some(record) => {
            assert_eq!((record.name, record.id.ino, record.kind), (b"before".to_vec(), 2, Kind::File));
            assert!(!whole);
        }
        None => assert!(!whole),
    };
    killed_everywhere(prepare, again, check);
}

#[test]
fn an_open_file_is_noted_or_not() {
    let open = OpenRecord {
        fh: 1 << 32 | 8,
        nodeid: 77,
        flags: OpenFlags(0o2001),
        uid: 1000,
        left: Some(OpenLeft { descriptor: 0, place: 5 }),
        backing: None,
        collected: false,
        unique: 42,
    };
    let other = OpenRecord { fh: 2 << 32 | 8, left: None, backing: Some(12), collected: true, ..open };
    let act = |memory: &Survival| {
        let opens = Opens::new(memory);
        opens.made(&open);
        opens.closed(open.fh);
        opens.made(&other);
    };
    let check = |memory: &Survival, whole: bool| {
        let all: Vec<OpenRecord> = Opens::new(memory).all().collect();
        assert!(all == [other] || !whole && (all.is_empty() || all == [open]), "{all:?}");
    };
    killed_everywhere(|| Survival::new().unwrap(), act, check);
    let copied = OpenRecord { left: Some(OpenLeft { descriptor: 9, place: 6 }), backing: Some(12), ..open };
    let memory = Survival::new().unwrap();
    let opens = Opens::new(&memory);
    opens.made(&OpenRecord { backing: Some(12), ..open });
    opens.changed(other.fh, None);
    opens.changed(open.fh, copied.left);
    opens.closed(other.fh);
    assert_eq!(opens.all().collect::<Vec<_>>(), [copied], "the place of another one is left alone");
}

#[test]
fn a_request_is_not_begun_or_begun_or_answered() {
    let prepare = || {
        let memory = Survival::new().unwrap();
        let requests = Arc::new(Requests::new(&memory));
        requests.begin(2, 5, [1; 6], None).unwrap();
        requests.answer(Err(17));
        memory
    };
    let act = |memory: &Survival| {
        // Another thread would have another record.
        let requests = Arc::new(Requests::again(memory));
        requests.begin(4, 6, [7, 8, 9, 10, 11, 12], None).unwrap();
        requests.answer(Ok(&[3; 144]));
    };
    let check = |memory: &Survival, whole: bool| {
        let mut next = memory.clone();
        next.next_life();
        let requests = Requests::new(&next);
        let (first, second) = (requests.before(2), requests.before(4));
        assert!(first.is_none_or(|noted| noted.answer == Some(Err(17)) && noted.begun == 5));
        match second {
            None => assert!(!whole),
            Some(noted) => {
                assert_eq!((noted.begun, noted.facts), (6, [7, 8, 9, 10, 11, 12]));
                assert!(noted.answer == Some(Ok(vec![3; 144])) || !whole && noted.answer.is_none());
            }
        }
    };
    killed_everywhere(prepare, act, check);
}

#[test]
fn unanswered_renames_of_the_last_life_are_known() {
    let rename = |name: &[u8]| RenameRecord {
        parent: 1,
        name: name.to_vec(),
        new_parent: 7,
        new_name: b"new".to_vec(),
        flags: 2,
        uid: 1000,
        gid: 100,
    };
    let known = |act: &dyn Fn(&Arc<Requests>)| {
        let mut memory = Survival::new().unwrap();
        act(&Arc::new(Requests::new(&memory)));
        let mut lives = [(); 2].map(|()| {
            memory.next_life();
            let requests = Requests::new(&memory);
            let renames = requests.unanswered_renames();
            requests.renames_are_finished();
            renames
        });
        assert!(lives[1].is_empty(), "a later life has no part in it");
        std::mem::take(&mut lives[0])
    };
    let begun = |requests: &Arc<Requests>, name: &[u8]| requests.begin(4, 6, [7; 6], Some(&rename(name))).unwrap();
    let [(unique, noted)] = &known(&|requests| begun(requests, b"old"))[..] else { panic!("it is not known") };
    assert_eq!((*unique, noted.begun, noted.rename.as_ref()), (4, 6, Some(&rename(b"old"))));
    assert_eq!(known(&|requests| begun(requests, &[b'x'; 141])).len(), 1);
    assert!(known(&|requests| begun(requests, &[b'x'; 142])).is_empty(), "its names are too long");
    let answered = known(&|requests| {
        begun(requests, b"old");
        requests.answer(Ok(&[]));
    });
    assert!(answered.is_empty());
    let panicked = known(&|requests| {
        begun(requests, b"old");
        let handler = || {
            let _reply = PanicReply(requests);
            panic!("in the handler");
        };
        assert!(catch_unwind(AssertUnwindSafe(handler)).is_err());
    });
    assert!(panicked.is_empty(), "it was answered, and its names are free");
}

#[test]
fn texts_replace_each_other_whole() {
    let prepare = || {
        let memory = Survival::new().unwrap();
        assert!(memory.set_text(b"the first one"));
        memory
    };
    let check = |memory: &Survival, whole: bool| {
        let text = memory.text().unwrap();
        assert!(text == b"the second" || !whole && text == b"the first one");
    };
    killed_everywhere(prepare, |memory| assert!(memory.set_text(b"the second")), check);
    assert!(!Survival::new().unwrap().set_text(&[0; 1 << 17]));
}

#[test]
fn what_is_noted_by_number_is_noted_or_not() {
    // Files that may have cached writes: one replaces another.
    let prepare = || {
        let memory = Survival::small().unwrap();
        assert_eq!(Words::written(&memory).add(7), Some(0));
        memory
    };
    let act = |memory: &Survival| {
        let words = Words::written(memory);
        words.remove(0);
        assert_eq!((words.add(8), words.add(9)), (Some(0), Some(1)));
        words.remove(1);
        assert_eq!(words.add(10), Some(1));
    };
    let check = |memory: &Survival, whole: bool| {
        let all: Vec<u64> = Words::written(memory).all().into_iter().map(|(_, word)| word).collect();
        let some: [&[u64]; 4] = [&[7], &[], &[8], &[8, 9]];
        assert!(all == [8, 10] || !whole && some.contains(&&*all), "{all:?}");
    };
    killed_everywhere(prepare, act, check);
    // Sets of files: one in the slot of a previous one has none of its bits.
    let prepare = || {
        let memory = Survival::small().unwrap();
        let sets = Sets::new(&memory);
        assert_eq!(sets.add(5), Some(0));
        sets.set(0, 3, 0xff);
        memory
    };
    let act = |memory: &Survival| {
        let sets = Sets::new(memory);
        sets.remove(0);
        assert_eq!(sets.add(6), Some(0));
        sets.set(0, 4, 1);
    };
    let check = |memory: &Survival, whole: bool| {
        let mut memory = memory.clone();
        memory.next_life();
        let all = Sets::new(&memory).left();
        assert!(all.len() <= 1 && (!whole || all.len() == 1));
        for set in all {
            let bits = (set.words[3], set.words[4]);
            assert!(
                (set.key, bits) == (6, (0, 1)) || !whole && [(5, (0xff, 0)), (6, (0, 0))].contains(&(set.key, bits)),
                "{} {bits:?}",
                set.key
            );
        }
    };
    killed_everywhere(prepare, act, check);
    // Numbers that are assigned, through any clone of the memory.
    let act = |memory: &Survival| {
        memory.given_numbers().give([1, 2, 3]);
        memory.clone().given_numbers().give([4, 5, 6]);
    };
    let check = |memory: &Survival, whole: bool| {
        let all = memory.given_numbers().all();
        let most = [[1, 2, 3], [4, 5, 6]];
        assert!(most.starts_with(&all) && (!whole || all.len() == 2), "{all:?}");
    };
    killed_everywhere(|| Survival::small().unwrap(), act, check);
    // Both sizes of memory are recognized.
    let small = Survival::small().unwrap();
    small.set_program(Path::new("/bin/program"));
    let taken = Survival::taken_over(small.shared.descriptor().try_clone_to_owned().unwrap()).unwrap();
    assert!(taken.take_program().is_some());
    Nodes::new(&taken).made(1, 5 << 32, place(9, b"name"), ID, Kind::Fifo);
    assert!(taken.why_not().is_some(), "there is no room for nodes in it");
}

/// It waits for the next worker's reply if it is killed at that moment.
#[test]
fn a_thread_that_shows_a_mount_below_another_is_known_to_wait() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let unanswered = fusewire::mount(place.path(), &fusewire::MountOptions::default()).unwrap();
    let (mount, at) = (nacre_sys::mounts::clone_tree(Path::new("/proc"), false).unwrap(), place.path().join("below"));
    let show = move || nacre_sys::mounts::show(mount.as_fd(), None, &at, nacre_sys::mounts::MountAttributes::empty());
    let showing = std::thread::spawn(show);
    let waits = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let within = std::fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
        name.trim_end() == nacre_sys::worker::WAITS && within.contains("fuse")
    };
    while !std::fs::read_dir("/proc/self/task").unwrap().any(|task| task.is_ok_and(waits)) {
        assert!(!showing.is_finished(), "it waited for nobody");
        std::thread::yield_now();
    }
    drop(unanswered);
    assert!(showing.join().unwrap().is_err());
}
