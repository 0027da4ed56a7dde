//! Tests of what a mount leaves: records cut at every store, tables made again, requests that come
//! again after they were carried out.

use super::{
    Survival, Survives, cut,
    nodes::{NodePlace, NodeRecord, Nodes},
    numbers::{Sets, Words},
    opens::{OpenLeft, OpenRecord, Opens},
    requests::Requests,
};
use crate::{door::Door, options::FuseOptions};
use fusewire::{Groups, Handler, Header, Op, Reply, Request, SecurityContexts, abi};
use nacre_layers::host::{Host, HostOptions};
use nacre_vfs::{Errno, FileId, Kind, Layer, OpenFlags};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, mpsc::channel},
};

const ID: FileId = FileId { fs: 1, ino: 2, generation: 3 };

fn place<'a>(parent: u64, name: &'a [u8]) -> NodePlace<'a> {
    NodePlace { parent, name }
}

/// Runs something that is killed after each of its stores in turn, and looks at what is left.
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
        requests.begin(2, 5, [1, 1, 1]).unwrap();
        requests.answer(Err(17));
        memory
    };
    let act = |memory: &Survival| {
        // Another thread would have another record.
        let requests = Arc::new(Requests::again(memory));
        requests.begin(4, 6, [7, 8, 9]).unwrap();
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
                assert_eq!((noted.begun, noted.facts), (6, [7, 8, 9]));
                assert!(noted.answer == Some(Ok(vec![3; 144])) || !whole && noted.answer.is_none());
            }
        }
    };
    killed_everywhere(prepare, act, check);
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
    // Files that may hold writes: in place of one, another.
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
    // Sets of files: one that was another before has nothing of it.
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
    // Numbers that are given out, by whoever has the memory.
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
    // Both kinds of memory are told apart.
    let small = Survival::small().unwrap();
    small.set_program(Path::new("/bin/program"));
    let taken = Survival::taken_over(small.shared.descriptor().try_clone_to_owned().unwrap()).unwrap();
    assert!(taken.take_program().is_some());
    Nodes::new(&taken).made(1, 5 << 32, place(9, b"name"), ID, Kind::Fifo);
    assert!(taken.why_not().is_some(), "there is no room for nodes in it");
}

/// A door over a directory, in one life after the other.
struct Lives {
    source: tempfile::TempDir,
    memory: Survival,
    door: Arc<Door>,
}

impl Lives {
    fn new() -> Lives {
        let (source, memory) = (tempfile::tempdir().unwrap(), Survival::new().unwrap());
        let door = door(source.path(), &memory);
        Lives { source, memory, door }
    }

    /// The door dies with all that it has in memory of its own.
    fn die(&mut self) {
        self.memory.next_life();
        let next = door(self.source.path(), &self.memory);
        // Nobody closes its descriptors, as in a table that is shared.
        std::mem::forget(std::mem::replace(&mut self.door, next));
        self.door.take_up_open_files(self.survives());
    }

    fn survives(&self) -> &Survives {
        self.door.survives.as_ref().unwrap()
    }

    fn ask(&self, unique: u64, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        let header = Header { unique, opcode: 0, nodeid, uid: 0, gid: 0, pid: 0 };
        let request = Request { header, op, groups: Groups::default(), security: SecurityContexts::default() };
        let mut space = vec![0; 8192];
        let mut reply = Reply::new(&mut space);
        let done = self.door.handle(&request, &mut reply);
        done.map(|()| reply.built().to_vec()).map_err(|error| error.0)
    }

    /// Asks, dies, and is asked the same again: the answer is the same.
    fn again(&mut self, unique: u64, op: Op<'_>) -> Vec<u8> {
        let first = self.ask(unique, 1, op).unwrap();
        self.die();
        assert_eq!(self.ask(unique | abi::UNIQUE_RESEND, 1, op), Ok(first.clone()), "{op:?}");
        first
    }

    /// Is asked again what was begun by a door that died before it could note an answer.
    fn finish(&mut self, unique: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        let header = Header { unique, opcode: 0, nodeid: 1, uid: 0, gid: 0, pid: 0 };
        let request = Request { header, op, groups: Groups::default(), security: SecurityContexts::default() };
        let mut space = vec![0; 8192];
        // As far as the answer of the layer: what is noted of the answer is lost.
        self.door.note_begun(self.survives(), &request).unwrap();
        let _ = self.door.dispatch(&request, &mut Reply::new(&mut space));
        self.die();
        self.ask(unique | abi::UNIQUE_RESEND, 1, op)
    }
}

fn door(source: &Path, memory: &Survival) -> Arc<Door> {
    let layer: Arc<dyn Layer> = Arc::new(Host::open(HostOptions::new(source)).unwrap());
    let options = FuseOptions { survival: Some(memory.clone()), ..FuseOptions::new("/nowhere") };
    // What nobody hears is not sent.
    Arc::new(Door::new(layer, options, channel().0, 0).unwrap())
}

const CREATE: u32 = 0o102;
const EXCL: u32 = 0o200;

fn makers() -> Vec<(u64, Op<'static>)> {
    vec![
        (10, Op::Mkdir { name: b"directory", mode: 0o755, umask: 0 }),
        (12, Op::Mknod { name: b"fifo", mode: 0o010_644, rdev: 0, umask: 0 }),
        (14, Op::Symlink { name: b"link", target: b"target" }),
        (16, Op::Create { name: b"file", flags: CREATE | EXCL, mode: 0o644, umask: 0, open_flags: 0 }),
    ]
}

#[test]
fn what_was_answered_is_answered_so_again() {
    let mut lives = Lives::new();
    for (unique, op) in makers() {
        lives.again(unique, op);
    }
    let rename = Op::Rename { name: b"file", new_dir: 1, new_name: b"moved", flags: 0 };
    lives.again(20, rename);
    lives.again(22, Op::Rename { name: b"moved", new_dir: 1, new_name: b"fifo", flags: 2 });
    lives.again(24, Op::Unlink { name: b"link" });
    lives.again(26, Op::Rmdir { name: b"directory" });
    // A refusal is the same refusal, whatever has changed.
    assert_eq!(lives.ask(30, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
    lives.die();
    std::fs::write(lives.source.path().join("missing"), "").unwrap();
    assert_eq!(lives.ask(30 | abi::UNIQUE_RESEND, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
    assert!(lives.source.path().join("missing").exists());
}

#[test]
fn what_was_carried_out_but_not_answered_is_not_done_twice() {
    let mut lives = Lives::new();
    let source = lives.source.path().to_owned();
    for (unique, op) in makers() {
        let body = lives.finish(unique, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
        assert!(body.len() >= 128, "{op:?}");
    }
    for (unique, op) in makers() {
        assert_eq!(lives.ask(unique + 100, 1, op), Err(Errno::EEXIST.raw()), "{op:?}: it was there before");
    }
    let id = |name: &str| std::os::unix::fs::MetadataExt::ino(&std::fs::symlink_metadata(source.join(name)).unwrap());
    let (file, fifo) = (id("file"), id("fifo"));
    lives.finish(40, Op::Rename { name: b"file", new_dir: 1, new_name: b"moved", flags: 0 }).unwrap();
    assert_eq!(id("moved"), file);
    lives.finish(42, Op::Rename { name: b"moved", new_dir: 1, new_name: b"fifo", flags: 2 }).unwrap();
    assert_eq!((id("fifo"), id("moved")), (file, fifo), "an exchange is not taken back");
    lives.finish(44, Op::Unlink { name: b"link" }).unwrap();
    lives.finish(46, Op::Rmdir { name: b"directory" }).unwrap();
    assert!(!source.join("link").exists() && !source.join("directory").exists());
    // What somebody made there since is not removed by it.
    let unlink = Op::Unlink { name: b"moved" };
    lives.finish(48, unlink).unwrap();
    std::fs::write(source.join("moved"), "new").unwrap();
    lives.die();
    assert_eq!(lives.ask(48 | abi::UNIQUE_RESEND, 1, unlink), Ok(Vec::new()));
    assert!(source.join("moved").exists());
}

#[test]
fn what_was_only_begun_is_carried_out() {
    let mut lives = Lives::new();
    let source = lives.source.path().to_owned();
    std::fs::write(source.join("old"), "").unwrap();
    let begun = |lives: &Lives, unique, op| {
        let header = Header { unique, opcode: 0, nodeid: 1, uid: 0, gid: 0, pid: 0 };
        let request = Request { header, op, groups: Groups::default(), security: SecurityContexts::default() };
        lives.door.note_begun(lives.survives(), &request).unwrap();
    };
    for (unique, op) in makers() {
        begun(&lives, unique, op);
        lives.die();
        lives.ask(unique | abi::UNIQUE_RESEND, 1, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
    }
    let rename = Op::Rename { name: b"old", new_dir: 1, new_name: b"new", flags: 0 };
    begun(&lives, 50, rename);
    lives.die();
    lives.ask(50 | abi::UNIQUE_RESEND, 1, rename).unwrap();
    assert!(source.join("new").exists() && !source.join("old").exists());
}

#[test]
fn nodes_and_open_files_are_found_again() {
    let mut lives = Lives::new();
    let number = |body: &[u8], at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().unwrap());
    let directory = number(&lives.ask(2, 1, Op::Mkdir { name: b"d", mode: 0o755, umask: 0 }).unwrap(), 0);
    let create = Op::Create { name: b"f", flags: CREATE, mode: 0o644, umask: 0, open_flags: 0 };
    let made = lives.ask(4, directory, create).unwrap();
    let (file, fh) = (number(&made, 0), number(&made, 128));
    let write =
        |data: &'static [u8], offset| Op::Write { fh, offset, data, flags: 2, write_flags: 0, lock_owner: None };
    lives.ask(6, file, write(b"before", 0)).unwrap();
    lives.die();
    assert_eq!(lives.ask(8, directory, Op::Lookup { name: b"f" }).map(|body| number(&body, 0)), Ok(file));
    lives.ask(10, file, write(b" after", 6)).unwrap();
    assert_eq!(std::fs::read(lives.source.path().join("d/f")).unwrap(), b"before after");
    // Nothing but the open file leads to it.
    lives.ask(12, directory, Op::Unlink { name: b"f" }).unwrap();
    lives.die();
    lives.ask(14, file, write(b"nowhere", 0)).unwrap();
    let read = Op::Read { fh, offset: 0, size: 100, flags: 2, lock_owner: None, read_flags: 0 };
    assert_eq!(lives.ask(16, file, read), Ok(b"nowhereafter".to_vec()));
    lives.ask(18, file, Op::Getattr { fh: Some(fh) }).unwrap();
    // Two look-ups were counted, and with the last one it is forgotten.
    lives.ask(20, file, Op::Release { fh, flags: 2, release_flags: 0, lock_owner: None }).unwrap();
    lives.die();
    assert!(lives.ask(22, file, read).is_err());
    lives.door.forget(file, 2);
    assert!(!lives.door.inodes.is_known(file));
    assert!(lives.door.inodes.is_known(directory));
}

#[test]
fn an_append_that_was_cut_short_is_completed() {
    let mut lives = Lives::new();
    let number = |body: &[u8], at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().unwrap());
    let create = Op::Create { name: b"log", flags: CREATE | 0o2000, mode: 0o644, umask: 0, open_flags: 0 };
    let made = lives.ask(2, 1, create).unwrap();
    let (file, fh) = (number(&made, 0), number(&made, 128));
    let append =
        |data: &'static [u8]| Op::Write { fh, offset: 0, data, flags: 0o2002, write_flags: 0, lock_owner: None };
    lives.ask(4, file, append(b"first\n")).unwrap();
    let path = lives.source.path().join("log");
    for (unique, written) in [(6, 0), (8, 3), (10, 7)] {
        let before = std::fs::read(&path).unwrap();
        let op = append(b"second\n");
        let header = Header { unique, opcode: 0, nodeid: file, uid: 0, gid: 0, pid: 0 };
        let request = Request { header, op, groups: Groups::default(), security: SecurityContexts::default() };
        lives.door.note_begun(lives.survives(), &request).unwrap();
        std::fs::write(&path, [before.as_slice(), &b"second\n"[..written]].concat()).unwrap();
        lives.die();
        let answer = lives.ask(unique | abi::UNIQUE_RESEND, file, op).unwrap();
        assert_eq!(answer.first(), Some(&7), "all of it is said to be written");
        assert_eq!(std::fs::read(&path).unwrap(), [before.as_slice(), b"second\n"].concat());
    }
}
