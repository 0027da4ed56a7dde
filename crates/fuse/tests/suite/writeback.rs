//! Write-back by the kernel on a real mount, with separate programs as users: which writes reach the daemon
//! when, the lengths of reserved writes, and that sizes and times are correct.
mod limited;

use crate::fixture::{eventually, mounted, on_each_transport, settle};
use limited::{Limited, Room};
use nacre_fuse::{FuseOptions, Mount, Status, TransportChoice};
use nacre_layers::host::{Host, HostOptions};
use nacre_stack::spec::HostCoherence;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::{
        fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::Ordering::SeqCst,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

/// Environment variable with the child's task: it runs this same program as a user of the mount.
const CLIENT: &str = "NACRE_TEST_CLIENT";

/// A mount with write-back for appends.
struct Writeback {
    mount: Mount,
    room: Arc<Room>,
    source: tempfile::TempDir,
    mountpoint: tempfile::TempDir,
}

impl Writeback {
    fn new(transport: TransportChoice, coherence: HostCoherence, change: impl FnOnce(&mut FuseOptions)) -> Writeback {
        Writeback::over(transport, coherence, true, change)
    }

    fn over(
        transport: TransportChoice,
        coherence: HostCoherence,
        wants: bool,
        change: impl FnOnce(&mut FuseOptions),
    ) -> Writeback {
        let source = tempfile::tempdir().unwrap();
        fs::set_permissions(source.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let below = Arc::new(Host::open(HostOptions { coherence, ..HostOptions::new(source.path()) }).unwrap());
        let room = Arc::new(Room::default());
        let (mount, mountpoint) =
            mounted(Arc::new(Limited { below, room: Arc::clone(&room), wants }), transport, change);
        Writeback { mount, room, source, mountpoint }
    }

    fn exclusive(transport: TransportChoice) -> Writeback {
        Writeback::new(transport, HostCoherence::Exclusive, |_| {})
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mountpoint.path().join(name)
    }

    fn below(&self, name: &str) -> PathBuf {
        self.source.path().join(name)
    }

    fn client(&self, name: &str, uid: u32) -> Client {
        Client::new(&self.path(name), uid)
    }

    fn requests(&self, name: &str) -> u64 {
        self.mount.status().requests_of(name)
    }

    /// The counters once all requests are answered.
    fn settled(&self) -> Status {
        settle(self.mountpoint.path());
        self.mount.status()
    }

    fn arrived(&self) -> u64 {
        self.room.arrived.load(SeqCst)
    }

    fn announced(&self) -> Vec<Option<u64>> {
        std::mem::take(&mut *self.room.announced.lock().unwrap())
    }
}

/// A process that uses a file by commands.
struct Client {
    child: Child,
    orders: ChildStdin,
    answers: ChildStdout,
}

impl Client {
    fn new(path: &Path, uid: u32) -> Client {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "writeback::client", "--nocapture", "--quiet"]).env(CLIENT, path);
        // The program is in a directory that an ordinary user may not search; it has been started before the
        // user changes.
        command.env("NACRE_TEST_UID", uid.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Client { child, orders, answers }
    }

    /// Sends a command and returns the answer: a number, negative for an error.
    fn order(&mut self, text: &str) -> i64 {
        writeln!(self.orders, "{text}").unwrap();
        // Output of the test program itself comes before.
        let mut line = Vec::new();
        loop {
            let mut byte = [0];
            assert_eq!(
                self.answers.read(&mut byte).unwrap(),
                1,
                "the client has ended: {}",
                String::from_utf8_lossy(&line)
            );
            if byte == *b"\n" {
                if let Some(number) = line.strip_prefix(b"=") {
                    return std::str::from_utf8(number).unwrap().parse().unwrap();
                }
                line.clear();
            } else {
                line.push(byte[0]);
            }
        }
    }

    fn ok(&mut self, text: &str) -> i64 {
        let answer = self.order(text);
        assert!(answer >= 0, "{text}: error {}", -answer);
        answer
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Its own process group; a kill(2) by number of a child not yet waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the process that [`Client`] starts.
#[test]
fn client() {
    let Some(path) = std::env::var_os(CLIENT) else { return };
    let uid: u32 = std::env::var("NACRE_TEST_UID").unwrap().parse().unwrap();
    if uid != 0 {
        let id = rustix::fs::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(id, id, id).unwrap();
    }
    let mut files: Vec<File> = Vec::new();
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match obey(Path::new(&path), &words, &mut files) {
            Ok(number) => number as i64,
            Err(error) => -i64::from(error.raw_os_error().unwrap()),
        };
        println!("\n={answer}");
        line.clear();
    }
}

fn obey(path: &Path, words: &[&str], files: &mut Vec<File>) -> std::io::Result<u64> {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    match words[0] {
        "append" => files.push(OpenOptions::new().append(true).create(true).open(path)?),
        "write" => files.push(OpenOptions::new().write(true).create(true).truncate(false).open(path)?),
        "update" => files.push(OpenOptions::new().read(true).write(true).open(path)?),
        "append-sync" => files.push(OpenOptions::new().append(true).create(true).custom_flags(0o4_010_000).open(path)?),
        "read" => files.push(File::open(path)?),
        "close" => {
            // close(2) reports the errors that fsync(2) would: a dup and its close are not needed, the kernel
            // flushes before it returns.
            files.pop();
        }
        // put COUNT LENGTH: that many write(2)s of that many bytes; answers how many succeeded.
        "put" => {
            let file = files.last_mut().unwrap();
            let data = vec![b'a'; number(2) as usize];
            for done in 0..number(1) {
                match file.write(&data) {
                    Ok(length) => assert_eq!(length, data.len()),
                    Err(error) if done == 0 => return Err(error),
                    Err(_) => return Ok(done),
                }
            }
            return Ok(number(1));
        }
        "text" => files.last_mut().unwrap().write_all(words[1].as_bytes())?,
        "vectors" => {
            let data = vec![b'v'; number(2) as usize];
            let vectors: Vec<_> = (0..number(1)).map(|_| std::io::IoSlice::new(&data)).collect();
            return files.last_mut().unwrap().write_vectored(&vectors).map(|length| length as u64);
        }
        "put-at" => files.last_mut().unwrap().write_all_at(&vec![b'p'; number(2) as usize], number(1))?,
        "end" => return files.last_mut().unwrap().seek(SeekFrom::End(0)),
        "fsync" => files.last().unwrap().sync_all()?,
        "size" => return Ok(files.last().unwrap().metadata()?.len()),
        "stat" => return Ok(fs::metadata(path)?.len()),
        "mtime" => {
            return Ok(
                fs::metadata(path)?.modified()?.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64
            );
        }
        "touch" => files.last().unwrap().set_modified(SystemTime::UNIX_EPOCH + Duration::from_nanos(number(1)))?,
        "length" => files.last().unwrap().set_len(number(1))?,
        "link" => fs::hard_link(path, path.with_extension("link"))?,
        "count" => return Ok(fs::read(path)?.iter().filter(|&&byte| byte == words[1].as_bytes()[0]).count() as u64),
        // hole AT: the offset of the first hole at or after this one.
        "hole" => return Ok(rustix::fs::seek(files.last().unwrap(), rustix::fs::SeekFrom::Hole(number(1)))?),
        "data" => return Ok(rustix::fs::seek(files.last().unwrap(), rustix::fs::SeekFrom::Data(number(1)))?),
        other => panic!("unknown order {other}"),
    }
    Ok(0)
}

fn mtime(path: &Path) -> i64 {
    let metadata = fs::metadata(path).unwrap();
    metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec()
}

#[test]
fn appends_are_collected_while_there_is_room() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let status = mount.mount.status();
        assert_eq!(status.writeback.refusal, None);
        assert!(status.passthrough.refusal.is_some());
        assert!(status.writeback.dirty_limit > 64 << 20);
        let mut client = mount.client("log", 0);
        client.ok("append");
        client.ok("put 1 100");
        let before = mount.settled();
        assert_eq!(before.writeback.files, 1);
        client.ok("put 1000 100");
        let after = mount.settled();
        for operation in &after.operations {
            // The kernel may flush at any time, without a process waiting for it.
            if !matches!(operation.name, "WRITE" | "SETATTR" | "FORGET" | "BATCH_FORGET") {
                assert_eq!(operation.requests, before.requests_of(operation.name), "{}", operation.name);
            }
        }
        assert!(after.requests_of("WRITE") < 10);
        assert_eq!(client.ok("size"), 100_100);
        assert_eq!(client.ok("stat"), 100_100);
        client.ok("close");
        assert_eq!(fs::metadata(mount.below("log")).unwrap().len(), 100_100);
        assert_eq!(mount.arrived(), 100_100);
        eventually("the file is closed", || mount.mount.status().writeback.files == 0);
        assert_eq!(client.ok("count a"), 100_100);
    });
}

#[test]
fn others_who_write_pass_the_cache_by() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        for (number, order) in ["write", "append-sync", "update"].into_iter().enumerate() {
            let mut client = mount.client("file", 0);
            client.ok(order);
            let before = mount.arrived();
            assert_eq!(client.ok("put 10 100"), 10);
            assert_eq!(mount.arrived() - before, 1000, "{order}");
            assert_eq!(mount.settled().writeback.files, 0);
            assert_eq!(client.ok("stat"), fs::metadata(mount.below("file")).unwrap().len() as i64, "{number}");
        }
    });
}

#[test]
fn after_a_recall_every_write_is_announced_with_its_length() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let mut client = mount.client("log", 0);
        client.ok("append");
        assert_eq!(client.ok("put 100 100"), 100);
        assert_eq!(mount.announced(), []);
        mount.room.recall(u64::MAX);
        client.ok("put 3 77");
        assert_eq!(mount.announced(), [Some(77), Some(77), Some(77)]);
        client.ok("vectors 200 5");
        assert_eq!(mount.announced(), [Some(1000)]);
        client.ok("put-at 0 12");
        assert_eq!(mount.announced(), [Some(12)]);
        // A request that is no write does not count as one, though the kernel sends it alike.
        assert_eq!(client.ok("end"), 10_000 + 3 * 77 + 1000 + 12);
        client.ok("size");
        client.ok("stat");
        assert_eq!(mount.announced(), []);
        // Other answers about the file do not end the write-back.
        client.ok("link");
        client.ok("touch 1000000000");
        fs::metadata(mount.path("log")).unwrap();
        for entry in fs::read_dir(mount.path("")).unwrap() {
            entry.unwrap().metadata().unwrap();
        }
        client.ok("put 1 1");
        assert_eq!(mount.announced(), [Some(1)]);
        // Until there is space again.
        mount.room.free();
        client.ok("put 100 10");
        assert_eq!(mount.announced(), []);
        mount.room.recall(u64::MAX);
        client.ok("put 2 10");
        assert_eq!(mount.announced(), [Some(10), Some(10)]);
        client.ok("close");
        assert_eq!(fs::metadata(mount.below("log")).unwrap().len(), 10_000 + 3 * 77 + 1000 + 12 + 1 + 1000 + 20);
        assert!(mount.mount.status().writeback.recalls == 2);
    });
}

#[test]
fn a_refused_write_fails_in_the_call_itself() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        for uid in [0, 1000] {
            mount.room.free();
            let name = format!("log{uid}");
            let mut client = mount.client(&name, uid);
            client.ok("append");
            client.ok("put 10 100");
            mount.room.recall(350);
            assert_eq!(client.ok("put 10 100"), 3, "uid {uid}");
            assert_eq!(client.order("put 1 100"), -28, "uid {uid}");
            assert_eq!(client.ok("put 1 50"), 1);
            assert_eq!(client.order("put 1 1"), -28);
            client.ok("fsync");
            assert_eq!(client.ok("size"), 1350);
            assert_eq!(fs::metadata(mount.below(&name)).unwrap().len(), 1350);
            assert!(mount.mount.status().writeback.refused >= 3);
        }
    });
}

#[test]
fn what_is_opened_after_a_recall_is_written_at_once() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let (mut held, mut late) = (mount.client("log", 0), mount.client("log", 0));
        held.ok("append");
        held.ok("text one-");
        mount.room.recall(u64::MAX);
        late.ok("append");
        let before = mount.arrived();
        late.ok("text two-");
        // Dirty data of the same page comes first.
        assert!(mount.arrived() >= before + 4);
        held.ok("text three-");
        late.ok("text four");
        held.ok("close");
        assert_eq!(fs::read_to_string(mount.below("log")).unwrap(), "one-two-three-four");
        assert_eq!(mount.room.appends.load(SeqCst), 0, "the end was the kernel's");
    });
}

#[test]
fn settling_passes_everything_on() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let mut clients: Vec<Client> = (0..5).map(|number| mount.client(&format!("log{number}"), 0)).collect();
        for client in &mut clients {
            client.ok("append");
            client.ok("put 3000 1000");
        }
        mount.room.recall(u64::MAX);
        let opens = mount.requests("OPEN");
        mount.room.door().flush().unwrap();
        assert_eq!(mount.arrived(), 15_000_000);
        assert_eq!(mount.requests("OPEN"), opens, "watchers would be told");
        for number in 0..5 {
            assert_eq!(fs::metadata(mount.below(&format!("log{number}"))).unwrap().len(), 3_000_000);
        }
        // No file stays open, and the mount can be unmounted.
        drop(clients);
        assert_eq!(mount.settled().open_files, 0);
        mount.mount.unmount(false).unwrap();
    });
}

#[test]
fn a_recall_inside_a_write_catches_every_writer() {
    const WRITERS: usize = 3;
    const EACH: u64 = 20_000_000;
    on_each_transport(|transport| {
        for round in 1..4_u64 {
            let mount = Writeback::exclusive(transport);
            mount.room.recall_at.store(2_000_000 * round, SeqCst);
            let mut clients: Vec<Client> =
                (0..WRITERS).map(|number| mount.client(&format!("log{number}"), 0)).collect();
            for client in &mut clients {
                client.ok("append");
            }
            let mut accepted = 0;
            std::thread::scope(|scope| {
                for client in &mut clients {
                    scope.spawn(|| {
                        client.ok(&format!("put {} 1000", EACH / 1000));
                        client.ok("fsync");
                    });
                }
                // Requests whose answers may be in flight when the recall comes.
                scope.spawn(|| questions(&mount, EACH * WRITERS as u64));
                while mount.room.at_recall.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                accepted = (0..WRITERS).map(|number| held_size(&mount.path(&format!("log{number}")))).sum::<u64>();
            });
            let all = EACH * WRITERS as u64;
            let announced = mount.announced().iter().map(|length| length.unwrap()).sum::<u64>();
            println!("round {round}: {accepted} accepted at the recall, {announced} announced");
            // The reserved and the earlier accepted bytes are the whole content, except for one write of each
            // client that was in flight.
            assert!(announced + accepted + 1000 * WRITERS as u64 >= all, "{announced} and {accepted} of {all}");
            assert!(announced > 0);
            let held = accepted.saturating_sub(mount.room.at_recall.load(SeqCst));
            assert!(held <= mount.room.door().dirty_limit(WRITERS));
            let below: u64 =
                (0..WRITERS).map(|number| fs::metadata(mount.below(&format!("log{number}"))).unwrap().len()).sum();
            assert_eq!(below, all);
        }
    });
}

/// The kernel's own size of a file, without a request.
fn held_size(path: &Path) -> u64 {
    use rustix::fs::{AtFlags, CWD, StatxFlags};
    rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE).unwrap().stx_size
}

/// Makes all sorts of requests about the files until so many bytes have arrived.
fn questions(mount: &Writeback, all: u64) {
    let mut other = mount.client("log0", 0);
    while mount.arrived() < all {
        other.order("link");
        other.order("stat");
        other.ok("append");
        other.ok("touch 1000000000");
        other.ok("close");
        let _ = fs::remove_file(mount.path("log0.link"));
        for entry in fs::read_dir(mount.path("")).unwrap() {
            let _ = entry.unwrap().metadata();
        }
    }
}

/// Waits until a write to a file gets another time than the file's: the FUSE front end treats times as equal
/// that are closer than 10 ms, and the clock of file times ticks late on a busy machine.
fn later(path: &Path) {
    let (last, end) = (mtime(path), Duration::from_millis(11).as_nanos() as i64);
    let now = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    while now() <= last + end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn times_of_direct_writes_are_true() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        fs::write(mount.below("file"), "text").unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        File::options().write(true).open(mount.below("file")).unwrap().set_modified(old).unwrap();
        let mut client = mount.client("file", 0);
        assert_eq!(client.ok("mtime"), 1_000_000_000_000_000_000);
        client.ok("write");
        for _ in 0..3 {
            later(&mount.below("file"));
            client.ok("put 1 5");
            assert_eq!(client.ok("mtime"), mtime(&mount.below("file")));
        }
        later(&mount.below("file"));
        client.ok("put 1 5");
        client.ok("close");
        assert_eq!(client.ok("mtime"), mtime(&mount.below("file")));
        assert!(mtime(&mount.below("file")) > 1_700_000_000_000_000_000);
        // The kernel's own later flush must not undo it.
        client.ok("write");
        client.ok("put 1 5");
        client.ok("link");
        client.ok("close");
        eventually("the times agree", || mtime(&mount.path("file")) == mtime(&mount.below("file")));
        assert!(mtime(&mount.below("file")) > 1_700_000_000_000_000_000);
        // Times set by a user stay.
        client.ok("write");
        client.ok("put 1 5");
        client.ok("touch 1234567890000000000");
        client.ok("close");
        assert_eq!(client.ok("mtime"), 1_234_567_890_000_000_000);
        assert_eq!(mtime(&mount.below("file")), 1_234_567_890_000_000_000);
        // The kernel sets the times of write-back writes itself.
        client.ok("append");
        client.ok("put 1 5");
        client.ok("close");
        assert_eq!(client.ok("mtime"), mtime(&mount.below("file")));
        assert!(mtime(&mount.below("file")) > 1_700_000_000_000_000_000);
    });
}

#[test]
fn a_new_file_shows_when_it_was_written() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let mut client = mount.client("new", 0);
        client.ok("write");
        later(&mount.below("new"));
        client.ok("put 1 5");
        assert_eq!(client.ok("mtime"), mtime(&mount.below("new")));
        later(&mount.below("new"));
        client.ok("put 1 5");
        client.ok("close");
        assert_eq!(client.ok("mtime"), mtime(&mount.below("new")));
    });
}

#[test]
fn changes_by_others_reach_the_kernels_own_sizes() {
    on_each_transport(|transport| {
        let mount = Writeback::new(transport, HostCoherence::Watch, |_| {});
        fs::write(mount.below("file"), "one\n").unwrap();
        let mut client = mount.client("file", 0);
        client.ok("read");
        assert_eq!(client.ok("size"), 4);
        assert_eq!(client.ok("count n"), 1);
        // By another process: the layer gets no notice of the serving process's own changes.
        let outside = |script: &str| {
            assert!(Command::new("sh").args(["-c", script]).env("F", mount.below("file")).status().unwrap().success())
        };
        outside("echo 'and n' >> $F");
        // Also for a process that has it open.
        let holder = File::open(mount.path("file")).unwrap();
        eventually("longer", || holder.metadata().unwrap().len() == 10);
        eventually("read", || fs::read_to_string(mount.path("file")).unwrap() == "one\nand n\n");
        assert_eq!(client.ok("size"), 10);
        assert_eq!(client.ok("stat"), 10);
        outside("printf x > $F");
        eventually("shorter", || client.clone_size() == 1);
        eventually("read again", || fs::read_to_string(mount.path("file")).unwrap() == "x");
        eventually("times", || mtime(&mount.path("file")) == mtime(&mount.below("file")));
        // The same length, other content.
        outside("printf y > $F");
        eventually("read once more", || fs::read_to_string(mount.path("file")).unwrap() == "y");
        // Appended to through the mount afterwards, at the right offset.
        client.ok("append");
        client.ok("text z");
        client.ok("close");
        assert_eq!(fs::read_to_string(mount.below("file")).unwrap(), "yz");
    });
}

impl Client {
    /// As `size`, for repeated conditions.
    fn clone_size(&self) -> u64 {
        // The descriptor of the child is visible in /proc.
        let mut sizes = fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            let target = fs::read_link(&path).ok()?;
            target.ends_with("file").then(|| fs::metadata(&path).unwrap().len())
        });
        sizes.next().unwrap()
    }
}

#[test]
fn appends_are_collected_whatever_was_done_to_the_file_before() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let mut client = mount.client("log", 0);
        for writes in [1, 1, 1, 1, 1, 10, 10, 10] {
            client.ok("append");
            client.ok(&format!("put {writes} 10"));
            assert_eq!(mount.mount.status().writeback.files, 1);
            client.ok("close");
            // The close is handled after close(2) has returned.
            mount.settled();
        }
        assert_eq!(fs::metadata(mount.below("log")).unwrap().len(), 350);
    });
}

#[test]
fn changes_by_others_while_writes_are_held_are_seen_after_the_close() {
    on_each_transport(|transport| {
        let mount = Writeback::new(transport, HostCoherence::Watch, |_| {});
        let mut client = mount.client("log", 0);
        client.ok("append");
        client.ok("put 1 10");
        client.ok("fsync");
        let script = Command::new("sh").args(["-c", "printf 12345 >> $F"]).env("F", mount.below("log")).status();
        assert!(script.unwrap().success());
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(client.ok("size"), 10, "the kernel goes by itself while the file is open");
        client.ok("close");
        eventually("seen", || fs::metadata(mount.path("log")).unwrap().len() == 15);
        assert_eq!(fs::read_to_string(mount.path("log")).unwrap(), "aaaaaaaaaa12345");
    });
}

#[test]
fn times_of_files_that_are_gone_fail_nobodys_sync() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let script = "cd $M && for i in 1 2 3 4 5 6 7 8 9; do echo x > a && ln a b && mv a c && rm b c && sync -f . || exit 1; done";
        assert!(Command::new("sh").args(["-c", script]).env("M", mount.path("")).status().unwrap().success());
        // Its last name is removed while it is open and its time is still the kernel's own.
        let mut client = mount.client("log", 0);
        client.ok("append");
        client.ok("put 1 10");
        fs::remove_file(mount.path("log")).unwrap();
        client.ok("fsync");
        client.ok("close");
        assert!(Command::new("sync").arg("-f").arg(mount.path("")).status().unwrap().success());
    });
}

#[test]
fn holes_are_found_behind_what_is_held_back() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        let mut client = mount.client("log", 0);
        client.ok("append");
        client.ok("put 100 1000");
        assert_eq!(client.ok("data 50000"), 50_000);
        assert_eq!(client.ok("hole 0"), 100_000);
        assert_eq!(mount.arrived(), 100_000);
    });
}

#[test]
fn where_the_kernel_cannot_flush_for_a_seek_a_file_is_data_up_to_the_kernels_length() {
    on_each_transport(|transport| {
        let mount = Writeback::new(transport, HostCoherence::Exclusive, |options| options.flush_for_seek = false);
        let mut client = mount.client("log", 0);
        client.ok("append");
        client.ok("put 1 100");
        client.ok("length 1048576");
        client.ok("put 1 100");
        let length = 1_048_676;
        assert_eq!(
            [client.ok("data 524288"), client.ok("hole 0"), client.ok("hole 524288")],
            [524_288, length, length]
        );
        let past = -i64::from(rustix::io::Errno::NXIO.raw_os_error());
        assert_eq!([client.order("data 1048676"), client.order("hole 1048677")], [past, past]);
        client.ok("close");
        // No dirty data is left: the layer answers.
        let mut reader = mount.client("log", 0);
        reader.ok("read");
        assert!(reader.ok("hole 0") < 524_288);
    });
}

#[test]
fn readers_see_what_is_held_back_and_do_not_disturb_it() {
    on_each_transport(|transport| {
        let mount = Writeback::exclusive(transport);
        fs::write(mount.below("log"), "begin-").unwrap();
        let (mut writer, mut reader) = (mount.client("log", 0), mount.client("log", 0));
        writer.ok("append");
        writer.ok("put 100 10");
        let written = mount.requests("WRITE");
        for _ in 0..10 {
            reader.ok("read");
            assert_eq!(reader.ok("count a"), 1000);
            assert_eq!(reader.ok("size"), 1006);
            reader.ok("close");
        }
        assert!(mount.requests("WRITE") <= written + 1, "readers made the kernel write");
        writer.ok("length 6");
        assert_eq!(reader.ok("stat"), 6);
        writer.ok("text end");
        writer.ok("close");
        assert_eq!(fs::read_to_string(mount.below("log")).unwrap(), "begin-end");
    });
}

/// Appends "before" and then 64 KiB from a file of a mount that does not answer: the kernel reads that with the
/// inode's lock held.
const WRITE: &str = "import mmap, os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
pages = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 65536)
os.write(file, b'before')
print('begins', flush=True)
os.write(file, pages)";

/// A process whose write(2) does not return before this is dropped.
struct HeldWrite {
    writer: Child,
    release: Option<Sender<()>>,
    buffer: Option<JoinHandle<()>>,
}

impl HeldWrite {
    /// Whether it cannot be started here; prints the reason.
    fn is_unusable() -> bool {
        let is_missing = Command::new("/usr/bin/python3").arg("-V").output().is_err();
        if is_missing {
            println!("skipped: python3 is not installed: it writes from a buffer that is not answered");
        }
        is_missing
    }

    fn new(path: &Path) -> HeldWrite {
        let ((release, released), (mounted, place)) = (channel(), channel());
        let buffer = std::thread::spawn(move || {
            let mount = Writeback::exclusive(TransportChoice::Device);
            fs::write(mount.below("buffer"), vec![b'b'; 65536]).unwrap();
            let hold = mount.room.hold_reads.lock().unwrap();
            mounted.send(mount.path("buffer")).unwrap();
            eventually("the write waits for its data", || mount.room.reads.load(SeqCst) > 0);
            mounted.send(PathBuf::new()).unwrap();
            // Released by the end of the channel.
            let _: Result<(), _> = released.recv();
            drop(hold);
            eventually("the buffer is closed", || mount.mount.unmount(false).is_ok());
        });
        let writer = Command::new("/usr/bin/python3").args(["-c", WRITE]).args([path, &place.recv().unwrap()]).spawn();
        let held = HeldWrite { writer: writer.expect("python3"), release: Some(release), buffer: Some(buffer) };
        place.recv().unwrap();
        held
    }
}

impl Drop for HeldWrite {
    fn drop(&mut self) {
        self.release.take();
        let (written, unmounted) = (self.writer.wait(), self.buffer.take().unwrap().join());
        if !std::thread::panicking() {
            assert!(written.unwrap().success() && unmounted.is_ok());
        }
    }
}

#[test]
fn a_write_that_never_returns_keeps_no_flush_from_ending() {
    if crate::fixture::unusable() || HeldWrite::is_unusable() {
        return;
    }
    for flush_for_seek in [true, false] {
        let mount = Writeback::new(TransportChoice::Device, HostCoherence::Exclusive, |options| {
            options.flush_for_seek &= flush_for_seek;
        });
        let held = HeldWrite::new(&mount.path("held"));
        let mut others = [mount.client("one", 0), mount.client("two", 0)];
        for round in 1..=2 {
            for client in &mut others {
                if round == 1 {
                    client.ok("append");
                }
                client.ok("put 1 10");
            }
            mount.mount.flush().unwrap();
            // What a layer asks for, which also waits for admitted writes.
            mount.room.door().flush().unwrap();
            let lengths = ["held", "one", "two"].map(|name| fs::metadata(mount.below(name)).unwrap().len());
            assert_eq!(lengths, [6, round * 10, round * 10], "what had returned has arrived");
        }
        drop(held);
        assert_eq!(fs::read(mount.below("held")).unwrap().len(), 6 + 65536);
    }
}

#[test]
fn a_flush_that_is_not_answered_is_shown() {
    let mount = Writeback::exclusive(TransportChoice::Device);
    let mut client = mount.client("log", 0);
    client.ok("append");
    client.ok("put 1 10");
    let hold = mount.room.hold.lock().unwrap();
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| mount.mount.flush());
        let begun = Instant::now();
        let late = loop {
            if let [late] = mount.mount.status().waiting.as_slice() {
                break late.clone();
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no request is shown as waiting");
            std::thread::sleep(Duration::from_millis(50));
        };
        assert!(late.request == "flush" && late.nodeid > 1 && late.seconds >= 10, "{late:?}");
        assert!(Path::new(&format!("/proc/self/task/{}", late.thread)).exists());
        drop(hold);
        flushing.join().unwrap().unwrap();
    });
    eventually("nothing waits", || mount.mount.status().waiting.is_empty());
}

#[test]
fn it_is_refused_where_the_kernels_own_sizes_would_be_wrong() {
    on_each_transport(|transport| {
        for case in 0..4 {
            let coherence = if case == 0 { HostCoherence::Revalidate } else { HostCoherence::Exclusive };
            let wants = case != 3;
            let mount = Writeback::over(transport, coherence, wants, |options| {
                options.direct_io = case == 1;
                options.read_only = case == 2;
            });
            let status = mount.mount.status();
            assert!(status.writeback.refusal.is_some(), "{:?}", status.writeback);
            assert_eq!(mount.room.offered(), !wants);
            if !matches!(fs::write(mount.path("f"), "x"), Err(error) if error.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
            {
                let mut client = mount.client("f", 0);
                client.ok("append");
                client.ok("put 10 10");
                assert_eq!(fs::metadata(mount.below("f")).unwrap().len(), 101);
            }
        }
    });
}
