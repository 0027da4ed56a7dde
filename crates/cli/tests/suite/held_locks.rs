//! Locks of files and directories that an ordinary user keeps for as long as he likes: by system calls with a buffer
//! in a FUSE mount that does not answer, which the kernel reads with the lock held. Nobody else may be delayed.

use crate::mounting::{
    Fixture, PATIENCE, Reaped, as_root, eventually, finish, kill, needs, pools::Pool, sh, skip, text,
};
use crate::surviving::{self, Guarded};
use rustix::process::Signal;
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Makes a system call for each path from the same buffer, in as many threads, and prints a line before.
const CALLS: &str = r#"
import ctypes, mmap, os, sys, threading
call, buffer, paths = sys.argv[1], sys.argv[2], sys.argv[3:]
pages = mmap.mmap(os.open(buffer, os.O_RDWR), 65536)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
libc = ctypes.CDLL(None)
def begin(path):
    if call == "write":
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.write(file, b"before")
        return lambda: libc.write(file, address, 4096)
    if call == "list":
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        return lambda: libc.syscall(217, directory, address, 65536)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    return lambda: libc.read(file, address, 4096)
threading.stack_size(65536)
calls = [threading.Thread(target=begin(path)) for path in paths]
print("begins", flush=True)
sys.stdin.readline()
for thread in calls: thread.start()
print("began", flush=True)
for thread in calls: thread.join()
"#;

/// The number of getdents64(2) in [`CALLS`] is this architecture's.
const LISTS: bool = cfg!(target_arch = "x86_64");

/// A user's process that holds the locks of files or directories until this is dropped.
struct Holder {
    buffer: Fixture,
    user: Reaped,
}

impl Holder {
    /// `call`: `write` (appends "before" first), `list`, or `read` (direct).
    fn new(call: &str, paths: &[PathBuf]) -> Holder {
        let buffer = Fixture::mirror_of(&["--passthrough=off"], |source| {
            fs::write(source.join("buffer"), vec![b'b'; 65536]).unwrap();
            fs::set_permissions(source.join("buffer"), fs::Permissions::from_mode(0o666)).unwrap();
        });
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", CALLS, call]);
        command.arg(buffer.at("buffer")).args(paths).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut user = Reaped(command.spawn().unwrap());
        let mut lines = BufReader::new(user.0.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().expect("the calls begin").unwrap(), "begins");
        buffer.freeze();
        user.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert_eq!(lines.next().expect("the calls began").unwrap(), "began");
        let holder = Holder { buffer, user };
        let waiting = |task: &Path| !fs::read_to_string(task.join("wchan")).unwrap_or_default().contains("futex");
        eventually("all calls wait for the buffer", || {
            let tasks = fs::read_dir(format!("/proc/{}/task", holder.user.0.id())).unwrap();
            let threads: Vec<PathBuf> = tasks.map(|task| task.unwrap().path()).collect();
            let asleep = |task: &PathBuf| {
                let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
                stat.contains(") S ") || stat.contains(") D ")
            };
            threads.iter().all(asleep) && threads.iter().filter(|task| waiting(task)).count() >= paths.len()
        });
        holder
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // The calls end with the mount.
        self.buffer.signal(Signal::KILL);
        let _ = self.user.0.wait();
    }
}

fn has_python() -> bool {
    let found = Command::new("/usr/bin/python3").arg("-V").output().is_ok();
    found || skip("python", "python3 is not installed: it makes system calls of another user")
}

/// Creates files that everybody may write to.
fn files_of_all(directory: &Path, names: impl Iterator<Item = String>) -> Vec<PathBuf> {
    names
        .map(|name| {
            let path = directory.join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
            path
        })
        .collect()
}

/// More files than seconds within which a command of a test has to end, and than threads that wait for locks.
fn many() -> u64 {
    PATIENCE.as_secs() + 100
}

#[test]
fn writes_that_never_return_delay_no_sync_and_no_snapshot() {
    needs!(as_root());
    if !has_python() {
        return;
    }
    let pool = Pool::made("hl", "3G", &[]);
    pool.told(&["fs", "create", &pool.of("other")]);
    let mut mine = fs::File::create(pool.at("other/mine")).unwrap();
    let held = files_of_all(&pool.at(""), (0..many()).map(|index| format!("held{index}")));
    let holder = Holder::new("write", &held);
    let mut all = fs::File::create(pool.at("mine")).unwrap();
    for round in ["one", "two"] {
        all.write_all(b"x").unwrap();
        mine.write_all(b"x").unwrap();
        pool.told(&["pool", "sync", &pool.name]);
        sh(Path::new("/"), "sync");
        pool.told(&["fs", "snapshot", "-r", &format!("{}@{round}", pool.name)]);
        pool.told(&["fs", "snapshot", &format!("{}@{round}-alone", pool.of("other"))]);
    }
    let then = |path: &str| fs::read_to_string(pool.at(path)).unwrap();
    for index in [0, 70, many() - 1] {
        assert_eq!(then(&format!(".zfs/snapshot/one/held{index}")), "before", "what had returned is in the snapshot");
    }
    assert_eq!((then(".zfs/snapshot/one/mine"), then(".zfs/snapshot/two/mine")), ("x".into(), "xx".into()));
    assert_eq!(then("other/.zfs/snapshot/two-alone/mine"), "xx");
    drop(holder);
    // The process of the user is killed, or its write ends with less.
    assert!(then("held0").starts_with("before"));
}

#[test]
fn a_write_that_never_returns_takes_no_room_of_a_cage() {
    needs!(as_root());
    if !has_python() {
        return;
    }
    let mut cage = Fixture::bare();
    cage.start_cage(&["--size=800M", "--writes=collected"]);
    let held = files_of_all(&cage.mountpoint, std::iter::once("held".to_owned()));
    let _holder = Holder::new("write", &held);
    let write = |name: &str, mib: u32| {
        let to = format!("of={}", cage.at(name).display());
        finish(Command::new("dd").args(["if=/dev/zero", "bs=1M", &format!("count={mib}"), &to]))
    };
    // The first file makes the cage recall the writes, the next ones fit.
    for (name, mib) in [("first", 700), ("second", 30), ("third", 30)] {
        let output = write(name, mib);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
    }
    assert!(!write("too much", 100).status.success());
}

#[test]
fn a_listing_that_never_returns_ends_the_coherence_of_no_other_directory() {
    needs!(as_root());
    if !has_python() || !LISTS {
        return;
    }
    let fill = |source: &Path| {
        for directory in ["held", "other"] {
            fs::create_dir(source.join(directory)).unwrap();
            for name in ["one", "two", "three"] {
                fs::write(source.join(directory).join(name), "content").unwrap();
            }
        }
    };
    for options in [&[][..], &["--notify-watchers"]] {
        let fixture = Fixture::mirror_of(options, fill);
        sh(&fixture.mountpoint, "ls -lR");
        let holder = Holder::new("list", &[fixture.at("held")]);
        fs::remove_file(fixture.below("held/one")).unwrap();
        for round in 0..2 {
            let mode = 0o600 + round;
            fs::set_permissions(fixture.below("other/two"), fs::Permissions::from_mode(mode)).unwrap();
            let seen = || fs::metadata(fixture.at("other/two")).unwrap().permissions().mode() & 0o777 == mode;
            eventually("a change of mode is seen", seen);
        }
        fs::remove_file(fixture.below("other/one")).unwrap();
        eventually("a removed file is gone", || !fixture.at("other/one").exists());
        let place = fixture.mountpoint.to_str().unwrap();
        let output = fixture.nacre(["reload", place, "--perms=o-rwx"]);
        assert!(output.status.success(), "reload: {}", text(&output.stderr));
        assert_eq!(fs::metadata(fixture.at("other/three")).unwrap().permissions().mode() & 0o7, 0);
        drop(holder);
        eventually("the held directory follows", || !fixture.at("held/one").exists());
    }
}

#[test]
fn a_thread_of_a_killed_process_that_does_not_end_is_in_the_log() {
    needs!(as_root());
    if !has_python() || !LISTS {
        return;
    }
    let mut fixture = Fixture::bare();
    let held = fixture.below("held");
    fs::create_dir(&held).unwrap();
    (0..50).for_each(|index| fs::write(held.join(format!("file{index}")), "").unwrap());
    let log = fixture.scratch.path().join("log");
    let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
    let target = format!("--log-target=file:{}", log.display());
    fixture.start(&["mirror", "--survive", "--transport=device", &target], source.as_ref(), &mountpoint);
    let guarded = Guarded::of(fixture);
    let worker = guarded.workers[0];
    let holder = Holder::new("list", &[held]);
    let mut creates = Reaped(Command::new("touch").arg(guarded.at("held/new")).spawn().unwrap());
    let mut waits_since = 0;
    eventually("a thread of the process waits for the directory", || {
        let threads = fs::read_dir(format!("/proc/{worker}/task")).unwrap();
        let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // For a moment a thread waits for a disk like this, too.
        let waits = threads.map(Result::unwrap).any(|task| stat(task).contains(") D "));
        waits_since = if waits { waits_since + 1 } else { 0 };
        waits_since > 200
    });
    kill(worker, Signal::KILL);
    eventually("the log names the thread", || {
        fs::read_to_string(&log).unwrap_or_default().contains("these threads do not end")
    });
    drop(holder);
    assert!(creates.0.wait().unwrap().success(), "the request is carried out once the thread has ended");
    assert!(guarded.fixture.below("held/new").exists());
    eventually("another process serves", || surviving::worker(&guarded.fixture.mountpoint) != worker);
}
