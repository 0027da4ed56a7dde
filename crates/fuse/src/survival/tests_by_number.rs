//! Tests of the handoff state of a mount whose files are found by inode number: a front end over a file system of a
//! pool, in one life after the other. The pool stays, and its clock stands still.

mod appends;

use super::{Survival, opens::OpenRecord};
use crate::{
    door::Door, mount::SinkFrontEnd, ops::unopened::FIRST_WRITE, options::FuseOptions, self_io::inotify_replay::Stage,
};
use fusewire::{Groups, Handler, Header, Offer, Op, Reply, Request, SecurityContexts, abi};
use nacre_pool::{
    device::{Device, Simulator},
    engine::{Pool, PoolConfig},
    rows::Timestamp,
    store::{NewPool, Store},
};
use nacre_poolfs::dataset::Dataset;
use nacre_vfs::{Caller, Errno, Ioctl, Layer, Name};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
    mpsc::{Receiver, channel},
};

fn pool() -> Arc<Pool> {
    let new =
        NewPool { name: "tank".to_owned(), guid: 7, host: (1, "here".to_owned()), time: 1, redundant_metadata: true };
    let device: Arc<dyn Device> = Arc::new(Simulator::new("disk", 256 << 20));
    let (store, _) = Store::create(vec![device], &new).unwrap();
    let random = AtomicU64::new(1);
    let store = Arc::new(store);
    let config = PoolConfig {
        log: Some(store.log().unwrap()),
        storage: store,
        clock: Arc::new(|| Timestamp { seconds: 1000, nanoseconds: 7 }),
        entropy: Arc::new(move || random.fetch_add(0x9e37_79b9, Ordering::Relaxed)),
        cache: 64 << 20,
        kept: None,
    };
    Arc::new(Pool::create(config, "tank").unwrap())
}

/// A front end over the file system, in one life after the other.
struct Lives {
    pool: Arc<Pool>,
    layer: Arc<Dataset>,
    memory: Survival,
    door: Arc<Door>,
    doubted: Receiver<u64>,
    unasked: bool,
}

const LOOKED_UP: usize = 128;

impl Lives {
    /// Files are opened without requests, or with requests where reads update the access time.
    fn new(unasked: bool) -> Lives {
        let (pool, memory) = (pool(), Survival::small().unwrap());
        let layer = dataset(&pool, unasked);
        let door = door(Arc::clone(&layer) as Arc<dyn Layer>, &memory);
        Lives { pool, layer, memory, door, doubted: channel().1, unasked }
    }

    /// The front end dies with all of its own memory.
    fn die(&mut self) {
        self.memory.next_life();
        let nameless = self.layer.capabilities().numbered.unwrap().kept();
        let layer = dataset(&self.pool, self.unasked);
        layer.keep_nameless(&nameless).unwrap();
        let door = door(Arc::clone(&layer) as Arc<dyn Layer>, &self.memory);
        let (doubts, doubted) = channel();
        door.inodes.doubt_with(Some(doubts));
        door.go_on();
        // Its files are never closed.
        std::mem::forget((std::mem::replace(&mut self.door, door), std::mem::replace(&mut self.layer, layer)));
        self.doubted = doubted;
    }

    fn request<T>(&self, unique: u64, nodeid: u64, op: Op<'_>, act: impl FnOnce(&Request<'_>) -> T) -> T {
        let header = Header { unique, opcode: 0, nodeid, uid: 0, gid: 0, pid: 0 };
        act(&Request { header, op, groups: Groups::default(), security: SecurityContexts::default() })
    }

    fn ask(&self, unique: u64, nodeid: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        let mut space = vec![0; 1 << 16];
        let mut reply = Reply::new(&mut space);
        let done = self.request(unique, nodeid, op, |request| self.door.handle(request, &mut reply));
        done.map(|()| reply.built().to_vec()).map_err(|error| error.0)
    }

    /// Sends a request, dies, and sends it again: the reply is the same.
    fn again(&mut self, unique: u64, op: Op<'_>) -> Vec<u8> {
        let first = self.ask(unique, 1, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
        self.die();
        assert_eq!(self.ask(unique | abi::UNIQUE_RESEND, 1, op), Ok(first.clone()), "{op:?}");
        first
    }

    fn begin(&self, unique: u64, op: Op<'_>) {
        self.request(unique, 1, op, |request| self.door.note_begun(self.door.survives.as_ref().unwrap(), request))
            .unwrap();
    }

    /// Resends a request begun by a front end that died before it could record the reply.
    fn finish(&mut self, unique: u64, op: Op<'_>) -> Result<Vec<u8>, i32> {
        self.begin(unique, op);
        let mut space = vec![0; 8192];
        self.request(unique, 1, op, |request| self.door.dispatch(request, &mut Reply::new(&mut space)))
            .unwrap_or_else(|error| panic!("{op:?}: {error:?}"));
        self.die();
        self.ask(unique | abi::UNIQUE_RESEND, 1, op)
    }

    /// Inode number of a name in the root.
    fn at(&self, name: &str) -> Option<u64> {
        let root = self.layer.root().unwrap().node;
        match self.layer.lookup(&Caller::ROOT, &root, Name::new(name.as_bytes()).unwrap()) {
            Ok(found) => Some(found.attr.id.ino),
            Err(error) => {
                assert_eq!(error, Errno::ENOENT);
                None
            }
        }
    }

    fn make(&self, unique: u64, name: &str) -> u64 {
        let made = self.ask(unique, 1, create(name.as_bytes()));
        node(&made.unwrap())
    }
}

fn dataset(pool: &Arc<Pool>, quiet: bool) -> Arc<Dataset> {
    let dataset = Dataset::open(pool, pool.find("tank").unwrap().unwrap()).unwrap();
    dataset.set_quiet(quiet);
    Arc::new(dataset)
}

fn door(layer: Arc<dyn Layer>, memory: &Survival) -> Arc<Door> {
    let options = FuseOptions { survival: Some(memory.clone()), ..FuseOptions::new("/nowhere") };
    // Without a receiver nothing is sent.
    let door = Arc::new(Door::new(layer, options, channel().0, 0).unwrap());
    door.writeback.decide_for_tests(&*door.layer);
    // Agreed on once.
    if memory.agreed_before().is_none() {
        let settings = door.init(&OFFER);
        memory.set(super::Head::Flags, settings.flags);
    } else {
        door.init(&OFFER);
    }
    door
}

const OFFER: Offer = Offer { minor: 45, flags: u64::MAX, max_readahead: 1 << 20 };
const CREATE: u32 = 0o102;
const EXCL: u32 = 0o200;

fn create(name: &[u8]) -> Op<'_> {
    Op::Create { name, flags: CREATE | EXCL, mode: 0o644, umask: 0, open_flags: 0 }
}

fn node(body: &[u8]) -> u64 {
    u64::from_ne_bytes(body[..8].try_into().unwrap())
}

fn handle(body: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(body[at..at + 8].try_into().unwrap())
}

fn makers() -> Vec<(u64, Op<'static>)> {
    vec![
        (10, Op::Mkdir { name: b"directory", mode: 0o755, umask: 0 }),
        (12, Op::Mknod { name: b"fifo", mode: 0o010_644, rdev: 0, umask: 0 }),
        (14, Op::Symlink { name: b"link", target: b"target" }),
        (16, create(b"file")),
    ]
}

fn rename<'a>(name: &'a str, new_name: &'a str, flags: u32) -> Op<'a> {
    Op::Rename { name: name.as_bytes(), new_dir: 1, new_name: new_name.as_bytes(), flags }
}

const NOREPLACE: u32 = 1;
const EXCHANGE: u32 = 2;
const WHITEOUT: u32 = 4;

#[test]
fn what_was_answered_is_answered_so_again() {
    for unasked in [true, false] {
        let mut lives = Lives::new(unasked);
        for (unique, op) in makers() {
            let nodeid = node(&lives.again(unique, op));
            // The previous front end may have sent it to the kernel as well.
            assert_eq!(lives.door.inodes.told_since(nodeid), Some(1), "{op:?}");
        }
        assert_eq!(lives.door.agreement().opens_files_itself, unasked);
        lives.again(20, rename("file", "moved", NOREPLACE));
        lives.again(22, rename("moved", "fifo", EXCHANGE));
        lives.again(24, Op::Unlink { name: b"link" });
        lives.again(26, Op::Rmdir { name: b"directory" });
        // A refusal is the same refusal, whatever has changed.
        assert_eq!(lives.ask(30, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
        lives.die();
        lives.make(32, "missing");
        assert_eq!(lives.ask(30 | abi::UNIQUE_RESEND, 1, Op::Unlink { name: b"missing" }), Err(Errno::ENOENT.raw()));
        assert!(lives.at("missing").is_some());
    }
}

#[test]
fn what_was_carried_out_but_not_answered_is_not_done_twice() {
    for unasked in [true, false] {
        let mut lives = Lives::new(unasked);
        for (unique, op) in makers() {
            let body = lives.finish(unique, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
            assert!(body.len() >= LOOKED_UP, "{op:?}");
        }
        for (unique, op) in makers() {
            // It was there before, however young it is.
            lives.begin(unique + 100, op);
            lives.die();
            assert_eq!(lives.ask((unique + 100) | abi::UNIQUE_RESEND, 1, op), Err(Errno::EEXIST.raw()), "{op:?}");
        }
        let (file, fifo) = (lives.at("file"), lives.at("fifo"));
        lives.finish(40, rename("file", "moved", NOREPLACE)).unwrap();
        assert_eq!((lives.at("moved"), lives.at("file")), (file, None));
        lives.finish(42, rename("moved", "fifo", EXCHANGE)).unwrap();
        assert_eq!((lives.at("fifo"), lives.at("moved")), (file, fifo), "an exchange is not taken back");
        lives.finish(44, rename("fifo", "left", WHITEOUT)).unwrap();
        let left = lives.at("fifo");
        assert!(lives.at("left") == file && left.is_some() && left != file);
        lives.finish(46, Op::Unlink { name: b"link" }).unwrap();
        lives.finish(48, Op::Rmdir { name: b"directory" }).unwrap();
        assert_eq!((lives.at("link"), lives.at("directory")), (None, None));
        let link = Op::Link { nodeid: file.unwrap(), name: b"second" };
        assert_eq!(node(&lives.finish(50, link).unwrap()), file.unwrap());
        let root = 1;
        let value = Op::Setxattr { name: b"user.a", value: b"1", flags: 1, setxattr_flags: 0 };
        lives.finish(52, value).unwrap();
        lives.finish(54, Op::Removexattr { name: b"user.a" }).unwrap();
        let asked = lives.ask(56, root, Op::Getxattr { name: b"user.a", size: 10 });
        assert_eq!(asked, Err(Errno::ENODATA.raw()));
    }
}

#[test]
fn what_was_only_begun_is_carried_out() {
    let mut lives = Lives::new(true);
    for (unique, op) in makers() {
        lives.begin(unique, op);
        lives.die();
        lives.ask(unique | abi::UNIQUE_RESEND, 1, op).unwrap_or_else(|error| panic!("{op:?}: {error}"));
    }
    for (unique, op) in [(50, rename("file", "new", 0)), (52, Op::Unlink { name: b"new" })] {
        lives.begin(unique, op);
        lives.die();
        lives.ask(unique | abi::UNIQUE_RESEND, 1, op).unwrap();
    }
    assert_eq!((lives.at("file"), lives.at("new")), (None, None));
}

#[test]
fn a_file_without_a_name_is_there_until_the_kernel_does_not_know_it() {
    let mut lives = Lives::new(true);
    let write = |data: &'static [u8], write_flags| Op::Write {
        fh: 0,
        offset: 0,
        data,
        flags: 2,
        write_flags,
        lock_owner: None,
    };
    let file = lives.make(2, "f");
    lives.ask(4, file, write(b"before", abi::flag::WRITE_CACHE)).unwrap();
    lives.ask(6, 1, Op::Unlink { name: b"f" }).unwrap();
    let unnamed = Op::Tmpfile { name: b"", flags: 2, mode: 0o600, umask: 0, open_flags: 0 };
    // Answered, but the kernel may not have the answer.
    let other = node(&lives.ask(8, 1, unnamed).unwrap());
    let kept = |lives: &Lives| {
        let mut kept = lives.layer.capabilities().numbered.unwrap().kept();
        kept.sort_unstable();
        kept
    };
    lives.die();
    assert_eq!(kept(&lives), [file, other]);
    assert_eq!(lives.doubted.try_iter().collect::<Vec<_>>(), [file], "what an answer may bring is not asked for");
    assert_eq!(node(&lives.ask(8 | abi::UNIQUE_RESEND, 1, unnamed).unwrap()), other);
    let read = Op::Read { fh: 0, offset: 0, size: 100, flags: 2, lock_owner: None, read_flags: 0 };
    assert_eq!(lives.ask(10, file, read), Ok(b"before".to_vec()));
    // The kernel may still have lookups from before.
    lives.door.forget(file, 1);
    assert_eq!((lives.doubted.try_iter().collect::<Vec<_>>(), kept(&lives).len()), (vec![file], 2));
    let told = lives.door.inodes.told_since(file).unwrap();
    assert!(lives.door.inodes.is_unknown(file, told).0);
    assert_eq!(kept(&lives), [other]);
    lives.die();
    assert_eq!(kept(&lives), [other]);
    // A file created in this life: its lookups are counted.
    let last = node(&lives.ask(12, 1, unnamed).unwrap());
    lives.door.forget(last, 1);
    assert_eq!(kept(&lives), [other]);
}

/// No request shows that a file is opened, and the flags are older than what the front end has of it.
#[test]
fn flags_from_before_the_kernel_knew_a_file_refuse_its_pages() {
    for (flag, refused) in [(0x10_u32, true), (0x20, false)] {
        let mut lives = Lives::new(true);
        let file = lives.make(2, "f");
        let write = |lives: &Lives, offset, data: &[u8]| {
            let write_flags = abi::flag::WRITE_CACHE;
            lives.ask(4, file, Op::Write { fh: 0, offset, data, flags: 2, write_flags, lock_owner: None }).map(drop)
        };
        write(&lives, 0, b"before").unwrap();
        lives.door.forget(file, 1);
        let root = lives.layer.root().unwrap().node;
        let found = lives.layer.lookup(&Caller::ROOT, &root, Name::new(b"f").unwrap()).unwrap();
        let set = Ioctl { command: Ioctl::SET_FLAGS, argument: 0, input: &flag.to_ne_bytes() };
        lives.layer.ioctl(&Caller::ROOT, &found.node, set, &mut []).unwrap();
        assert_eq!(node(&lives.ask(6, 1, Op::Lookup { name: b"f" }).unwrap()), file);
        let eperm = Err(Errno::EPERM.raw());
        assert_eq!(write(&lives, 0, b"stored"), eperm, "{flag:x}");
        let behind = write(&lives, 0, b"before and behind");
        assert_eq!(behind, if refused { eperm } else { Ok(()) }, "{flag:x}");
        let content = |lives: &Lives| {
            let op = Op::Read { fh: 0, offset: 0, size: 100, flags: 0, lock_owner: None, read_flags: 0 };
            lives.ask(8, file, op).unwrap()
        };
        let expected: &[u8] = if refused { b"before" } else { b"before and behind" };
        assert_eq!(content(&lives), expected, "{flag:x}");
        // Also in a process that takes over, where dirty pages from before the flags were written back at the change.
        lives.die();
        if lives.door.writeback.flush_for_seek {
            assert_eq!(write(&lives, 0, b"stored"), eperm, "{flag:x}");
            assert_eq!(content(&lives), expected, "{flag:x}");
        }
    }
}

#[test]
fn files_that_may_hold_writes_are_known_again() {
    let mut lives = Lives::new(true);
    let [written, read, gone] = ["written", "read", "gone"].map(|name| lives.make(name.len() as u64 * 2, name));
    let first_write = Op::Getxattr { name: FIRST_WRITE, size: 0 };
    for file in [written, gone] {
        assert_eq!(lives.ask(40, file, first_write), Err(Errno::ENODATA.raw()));
    }
    let uses = lives.door.writeback.written.uses(gone).unwrap();
    lives.door.writeback.leave_unused(gone, uses);
    for _ in 0..3 {
        lives.die();
        let table = &lives.door.writeback;
        assert_eq!((table.written.len(), table.nodes()), (1, vec![written]));
        assert!(table.caches_writes(written) && !table.caches_writes(read));
    }
    // The kernel opens files as negotiated first, even after a change of properties.
    lives.unasked = false;
    lives.die();
    assert!(lives.door.agreement().opens_files_itself && lives.layer.capabilities().needs_opens.is_some());
}

/// Such a thread has its own table of descriptors, or waits for a lock that a user keeps.
#[test]
fn threads_that_may_end_last_do_not_keep_the_front_end() {
    let lives = Lives::new(true);
    let (stage, sink) = (Stage::of(&lives.door, 1), SinkFrontEnd::of(&lives.door));
    let door = Arc::downgrade(&lives.door);
    drop(lives);
    assert!(door.upgrade().is_none() && !sink.has_epoch());
    drop(stage);
}

#[test]
fn open_files_are_taken_up_by_their_numbers() {
    let mut lives = Lives::new(false);
    let made = lives.ask(2, 1, create(b"f")).unwrap();
    let (file, fh) = (node(&made), handle(&made, LOOKED_UP));
    assert_ne!(fh, 0);
    let write = |data: &'static [u8], offset, write_flags| Op::Write {
        fh,
        offset,
        data,
        flags: 2,
        write_flags,
        lock_owner: None,
    };
    lives.die();
    let direct = lives.door.open.files.get(fh).unwrap();
    assert!(!direct.collected && direct.times.is_some(), "without a way to the kernel nothing is collected");
    let opens = &lives.door.survives.as_ref().unwrap().opens;
    let noted = opens.all().next().unwrap();
    opens.made(&OpenRecord { collected: true, ..noted });
    lives.die();
    assert!(lives.door.writeback.caches_writes(file), "the kernel goes on collecting");
    lives.ask(4, file, write(b"one", 0, abi::flag::WRITE_CACHE)).unwrap();
    let opened = lives.again_at(6, file, Op::Open { flags: 0, open_flags: 0 });
    lives.ask(8, 1, Op::Unlink { name: b"f" }).unwrap();
    lives.die();
    lives.ask(10, file, write(b" two", 3, abi::flag::WRITE_CACHE)).unwrap();
    let fh = handle(&opened, 0);
    let read = Op::Read { fh, offset: 0, size: 100, flags: 0, lock_owner: None, read_flags: 0 };
    assert_eq!(lives.ask(12, file, read), Ok(b"one two".to_vec()));
    lives.ask(14, file, Op::Release { fh, flags: 0, release_flags: 0, lock_owner: None }).unwrap();
    lives.die();
    assert_eq!(lives.ask(16, file, read), Err(Errno::ESTALE.raw()));
}

impl Lives {
    /// As [`Lives::again`], of a file.
    fn again_at(&mut self, unique: u64, nodeid: u64, op: Op<'_>) -> Vec<u8> {
        let first = self.ask(unique, nodeid, op).unwrap();
        self.die();
        assert_eq!(self.ask(unique | abi::UNIQUE_RESEND, nodeid, op), Ok(first.clone()), "{op:?}");
        first
    }
}
