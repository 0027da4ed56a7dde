//! Pools' file systems exported by NFS-Ganesha and Samba, on loopback, with clients in user space.
//!
//! There is one Ganesha and one Samba per machine, so the tests here run one at a time, and are
//! skipped where another process runs one.

use crate::mounting::{Fixture, as_root, eventually, finish, needs, pools::Pool, scratch, skip, text, unions};
use rustix::mount::{FsOpenFlags, fsconfig_create, fsopen};
use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// One server at a time.
static TURN: Mutex<()> = Mutex::new(());

const NFS: u16 = 20_490;
const MOUNTD: u16 = 20_480;
const SMB: u16 = 20_445;

/// A program that runs until this goes.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Running {
        Running(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a server"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn installed(programs: &[&str]) -> bool {
    let missing = |name: &&&str| {
        !["/usr/bin", "/usr/sbin", "/sbin"].iter().any(|directory| Path::new(directory).join(name).exists())
    };
    match programs.iter().find(missing) {
        Some(name) => skip("exports", &format!("{name} is not installed (scripts/setup)")),
        None => true,
    }
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// A client with open files, based on the library of nfs-ls. Its arguments are the ports, the
/// directory and the path here. [`LOCKER`] locks files and answers each line of its input with the
/// content that it reads by its open handle, [`HOLDER`] does the second alone.
///
/// libnfs 4 encodes calls of NFSv4 in 4 KiB, so larger writes fail in the client; and after a lock
/// that was denied or released its counter is wrong, so each attempt is a client of its own.
const CLIENT: &str = r#"
import ctypes, fcntl, itertools, os, sys
try: nfs = ctypes.CDLL("libnfs.so.13")
except OSError: print("none"); sys.exit()
pointer, u64, count = ctypes.c_void_p, ctypes.c_uint64, itertools.count()
for name in ("nfs_init_context", "nfs_parse_url_dir"): getattr(nfs, name).restype = pointer
class Url(ctypes.Structure): _fields_ = [(name, ctypes.c_char_p) for name in ("server", "path", "file")]
class Lock(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("kind", "whence", "pid")] + [("start", u64), ("length", u64)]
port, mount, root = sys.argv[1:4]
def ok(result):
    if result < 0: raise OSError(-result, os.strerror(-result))
    return result
class Client:
    def __init__(self, version, name):
        self.nfs = pointer(nfs.nfs_init_context())
        url = f"nfs://127.0.0.1{root}?nfsport={port}&mountport={mount}&version={version}"
        url = ctypes.cast(nfs.nfs_parse_url_dir(self.nfs, url.encode()), ctypes.POINTER(Url)).contents
        who = f"{os.getpid()}-{next(count)}".encode()
        nfs.nfs4_set_client_name(self.nfs, who)
        nfs.nfs4_set_verifier(self.nfs, who[-8:].rjust(8, b"-"))
        ok(nfs.nfs_mount(self.nfs, url.server, url.path))
        self.file = pointer()
        ok(nfs.nfs_open2(self.nfs, b"/" + name.encode(), os.O_RDWR, 0, ctypes.byref(self.file)))
    def read(self, at, length):
        data = ctypes.create_string_buffer(length)
        got = ok(nfs.nfs_pread(self.nfs, self.file, u64(at), u64(length), data))
        return data.raw[:got]
    def write(self, at, data): ok(nfs.nfs_pwrite(self.nfs, self.file, u64(at), u64(len(data)), data))
    def locks(self, kind, start, length):
        lock = Lock(kind, 0, os.getpid(), start, length)
        return nfs.nfs_fcntl(self.nfs, self.file, 0, ctypes.byref(lock)) >= 0
"#;

/// See [`CLIENT`].
const LOCKER: &str = r#"
SHARED, ALONE, NOT = 0, 1, 2
def other(kind, start, length):
    client = Client(4, "locked")
    got = client.locks(kind, start, length)
    return got and client.locks(NOT, start, length)
def here(start, length):
    try: fcntl.lockf(local, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except BlockingIOError: return False
    return True
for version in (3, 4):
    client = Client(version, "large")
    for at in (version, (1 << 32) - 3 - version * 10, (1 << 40) + version * 10): client.write(at, b"0123456789")
    assert client.read((1 << 32) - 3 - version * 10, 10) == b"0123456789"
one, local = Client(4, "locked"), os.open(sys.argv[4] + "/locked", os.O_RDWR)
assert one.locks(ALONE, 0, 10) and one.locks(SHARED, 1 << 33, 10)
assert [other(ALONE, 5, 5), other(SHARED, 0, 1), other(ALONE, 10, 10), other(ALONE, 1 << 40, 1)] == [0, 0, 1, 1]
assert [other(SHARED, 1 << 33, 5), other(ALONE, 1 << 33, 5)] == [1, 0]
assert [here(0, 10), here(30, 10), other(ALONE, 30, 1)] == [0, 1, 0]
assert one.locks(NOT, 0, 10) and other(ALONE, 5, 5)
held = Client(3, "held")
print("ready", flush=True)
for line in sys.stdin: print(held.read(0, 100).decode(), flush=True)
"#;

/// See [`CLIENT`].
const HOLDER: &str = r#"
held = Client(3, "held")
print("ready", flush=True)
for line in sys.stdin:
    try: print(held.read(0, 100).decode(), flush=True)
    except OSError as error: print(error.strerror, flush=True)
"#;

/// A client that runs, and answers each question with a line.
struct Holding {
    _client: Running,
    asked: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Holding {
    /// Starts the client; `None` where the library is missing.
    fn start(script: &str, directory: &Path) -> Option<Holding> {
        let mut command = Command::new("python3");
        command.args(["-c", &format!("{CLIENT}{script}"), &NFS.to_string(), &MOUNTD.to_string()]);
        let client = command.args([directory; 2]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut client) = client else {
            skip("exports", "python3 is not installed");
            return None;
        };
        let (asked, answers) = (client.stdin.take().unwrap(), BufReader::new(client.stdout.take().unwrap()));
        let mut holding = Holding { _client: Running(client), asked, answers };
        let first = holding.answer();
        if first == "none\n" {
            skip("exports", "libnfs is another one");
            return None;
        }
        assert_eq!(first, "ready\n");
        Some(holding)
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line
    }

    /// Returns the content that the client reads by its handle.
    fn reads(&mut self) -> String {
        self.asked.write_all(b"again\n").unwrap();
        self.answer()
    }
}

/// NFS-Ganesha, with the file of exports that the pools of one test write.
struct Ganesha {
    _server: Running,
    _portmapper: Option<Running>,
    _place: tempfile::TempDir,
}

impl Ganesha {
    fn start(state: &Path) -> Ganesha {
        let place = scratch();
        let portmapper = (!listens(111)).then(|| {
            fs::create_dir_all("/run/rpcbind").unwrap();
            Running::start(Command::new("rpcbind").arg("-f"))
        });
        eventually("a portmapper", || listens(111));
        fs::create_dir_all("/run/ganesha").unwrap();
        let recovery = place.path().join("recovery");
        fs::create_dir(&recovery).unwrap();
        let configuration = format!(
            "NFS_CORE_PARAM {{ NFS_Port = {NFS}; MNT_Port = {MOUNTD}; Protocols = 3,4; Enable_UDP = false; Enable_NLM = false;
              Enable_RQUOTA = false; Bind_addr = 127.0.0.1; mount_path_pseudo = true; }}
             NFSV4 {{ Graceless = true; RecoveryRoot = \"{}\"; RecoveryBackend = fs; Only_Numeric_Owners = true; }}
             %include \"{}\"\n",
            recovery.display(),
            state.join("ganesha.conf").display()
        );
        let file = place.path().join("ganesha.conf");
        fs::write(&file, configuration).unwrap();
        let log = place.path().join("log");
        let mut command = Command::new("ganesha.nfsd");
        command.arg("-F").arg("-f").arg(&file).arg("-L").arg(&log).args(["-p", "/run/ganesha/ganesha.pid"]);
        let server = Running::start(&mut command);
        eventually("NFS-Ganesha", || listens(NFS) && listens(MOUNTD));
        Ganesha { _server: server, _portmapper: portmapper, _place: place }
    }
}

fn url(path: &Path) -> String {
    format!("nfs://127.0.0.1{}?nfsport={NFS}&mountport={MOUNTD}", path.display())
}

/// Takes the lowest free number of a device that is none, as long as it is kept.
fn number_taken() -> OwnedFd {
    let context = fsopen("ramfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_create(&context).unwrap();
    context
}

/// Returns the output of an NFS client for a file or directory.
fn nfs(program: &str, path: &Path) -> Option<Vec<u8>> {
    let output = finish(Command::new(program).arg(url(path)));
    output.status.success().then_some(output.stdout)
}

/// The same by NFSv4.
fn nfs4(program: &str, path: &Path) -> Option<Vec<u8>> {
    let output = finish(Command::new(program).arg(url(path) + "&version=4"));
    output.status.success().then_some(output.stdout)
}

/// Large files, byte ranges that two clients and a program here lock, and a handle that a client
/// holds while caches are emptied and the server starts again.
fn hold_and_lock(pool: &Pool, ganesha: Ganesha) -> Ganesha {
    for name in ["large", "locked", "held"] {
        fs::write(pool.at(name), "content").unwrap();
    }
    let Some(mut client) = Holding::start(LOCKER, &pool.at("")) else { return ganesha };
    let content = fs::File::open(pool.at("large")).unwrap();
    assert_eq!(content.metadata().unwrap().len(), (1 << 40) + 50);
    let mut data = [0; 20];
    std::os::unix::fs::FileExt::read_exact_at(&content, &mut data, (1 << 40) + 30).unwrap();
    assert_eq!(&data, b"01234567890123456789");
    assert_eq!(client.reads(), "content\n");
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert_eq!(client.reads(), "content\n", "evicted");
    drop(ganesha);
    eventually("the end of the server", || !listens(NFS));
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    let ganesha = Ganesha::start(&pool.state());
    assert_eq!(client.reads(), "content\n", "another server");
    drop(client);
    for name in ["large", "locked", "held"] {
        fs::remove_file(pool.at(name)).unwrap();
    }
    ganesha
}

/// Checks listings while names come and go: each permanent name is listed once, none twice.
fn listed_while_others_move(directory: &Path, expected: &BTreeSet<String>, list: &dyn Fn() -> Vec<String>) {
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in (0_usize..).map(|number| number % 500).take_while(|_| !end.load(Ordering::Relaxed)) {
                let other = directory.join(format!("x{number}"));
                if fs::remove_file(&other).is_err() {
                    fs::File::create(&other).unwrap();
                }
            }
        });
        for _ in 0..2 {
            let told = list();
            let once: BTreeSet<String> = told.iter().cloned().collect();
            let twice = told.len() - once.len();
            let missing = expected.difference(&once).count();
            end.store(missing + twice > 0, Ordering::Relaxed);
            assert!(missing + twice == 0, "{missing} are missing, {twice} are told twice");
        }
        end.store(true, Ordering::Relaxed);
    });
}

fn many() -> usize {
    let many = std::env::var("NACRE_EXPORT_FILES").ok().and_then(|many| many.parse().ok()).unwrap_or(10_000);
    println!("campaign: NACRE_EXPORT_FILES={many}");
    many
}

/// So many files in a new directory; their names.
fn fill(directory: &Path, many: usize) -> BTreeSet<String> {
    fs::create_dir(directory).unwrap();
    let names: BTreeSet<String> = (0..many).map(|number| format!("f{number}")).collect();
    names.iter().for_each(|name| drop(fs::File::create(directory.join(name)).unwrap()));
    names
}

fn copy(from: &str, to: &str) {
    let output = finish(Command::new("nfs-cp").args([from, to]));
    assert!(output.status.success(), "{from} {to}: {}{}", text(&output.stdout), text(&output.stderr));
}

fn names(listing: &[u8]) -> Vec<String> {
    let mut names: Vec<String> =
        text(listing).lines().filter_map(|line| Some(line.rsplit_once(' ')?.1.to_owned())).collect();
    names.sort();
    names
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..bytes / 8)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_ne_bytes()
        })
        .collect()
}

#[test]
fn nfs_clients_see_what_is_there_whatever_becomes_of_the_pool() {
    needs!(as_root() && installed(&["ganesha.nfsd", "rpcbind", "nfs-ls", "nfs-cat", "nfs-cp"]));
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if listens(NFS) || Path::new("/proc/fs/nfsd/threads").exists() {
        skip("exports", "another server of NFS runs");
        return;
    }
    let pool = Pool::made("nfs", "2G", &[]);
    fs::create_dir(pool.at("dir")).unwrap();
    fs::write(pool.at("dir/file"), "content").unwrap();
    pool.nacre(&["fs", "set", "sharenfs=rw=127.0.0.1,no_root_squash,insecure", "%"]);
    pool.nacre(&["fs", "create", "%/below"]);
    fs::write(pool.at("below/file"), "below").unwrap();
    let ganesha = Ganesha::start(&pool.state());
    let root = pool.at("");
    eventually("the export", || nfs("nfs-ls", &root).is_some());
    // In and out, large as well, and seen at once from both sides.
    let large = noise(48 << 20);
    let (local, back) = (pool.path("large"), pool.path("back"));
    fs::write(&local, &large).unwrap();
    copy(local.to_str().unwrap(), &url(&pool.at("dir/large")));
    assert!(fs::read(pool.at("dir/large")).unwrap() == large);
    copy(&url(&pool.at("dir/large")), back.to_str().unwrap());
    assert!(fs::read(&back).unwrap() == large);
    let expected = fill(&pool.at("many"), many());
    assert!(names(&nfs("nfs-ls", &pool.at("many")).unwrap()).into_iter().eq(expected.iter().cloned()));
    for list in [nfs, nfs4] {
        listed_while_others_move(&pool.at("many"), &expected, &|| names(&list("nfs-ls", &pool.at("many")).unwrap()));
    }
    // The other protocol, in and out.
    let small = pool.path("small");
    fs::write(&small, "by NFSv4").unwrap();
    copy(small.to_str().unwrap(), &(url(&pool.at("dir/four")) + "&version=4"));
    assert_eq!(nfs4("nfs-cat", &pool.at("dir/four")).unwrap(), fs::read(pool.at("dir/four")).unwrap());
    assert_eq!(fs::read(pool.at("dir/four")).unwrap(), b"by NFSv4");
    let _ganesha = hold_and_lock(&pool, ganesha);
    // The server holds the mount; it releases it, and opens it again.
    let read = |name: &str| nfs("nfs-cat", &pool.at(name));
    // What a client holds open in a file system that was shared when it was mounted.
    fs::write(pool.at("below/held"), "held").unwrap();
    let number = |what: &str| {
        eventually(what, || read("below/file").is_some());
        fs::metadata(pool.at("below")).unwrap().dev()
    };
    let first = number("shared");
    let mut holding = Holding::start(HOLDER, &pool.at("below"));
    let mut held = |what: &str| {
        assert_eq!(number(what), first, "{what}");
        if let Some(client) = &mut holding {
            assert_eq!(client.reads(), "held\n", "{what}");
        }
    };
    held("at first");
    // Numbers that were free are others' when it comes back.
    let mut others = Vec::new();
    let mut take_numbers = || others.extend((0..30).map(|_| number_taken()));
    let whole = |what: &str, below: &str| {
        eventually(what, || read("dir/file").is_some_and(|content| content == b"content"));
        eventually(what, || read(below).is_some_and(|content| content == b"below" || content == b"content"));
        // The client makes new files only.
        fs::remove_file(&back).unwrap();
        copy(&url(&pool.at("dir/large")), back.to_str().unwrap());
        assert!(fs::read(&back).unwrap() == large, "{what}");
    };
    pool.nacre(&["fs", "unmount", "%/below"]);
    take_numbers();
    pool.nacre(&["fs", "mount", "%/below"]);
    held("mounted again");
    whole("mounted again", "below/file");
    pool.nacre(&["pool", "export", "%"]);
    assert!(nfs("nfs-ls", &root).is_none(), "nothing is given of what is not mounted");
    take_numbers();
    pool.import();
    held("imported again");
    whole("imported again", "below/file");
    pool.nacre(&["pool", "sync", "%"]);
    pool.die();
    pool.leave();
    take_numbers();
    pool.import();
    held("after the end of its process");
    whole("after the end of its process", "below/file");
    survive_from_now_on(&pool);
    held("imported to survive");
    pool.die();
    held("another process goes on");
    whole("another process goes on", "below/file");
    // The exports change with the mounts.
    pool.nacre(&["fs", "rename", "%/below", "%/moved"]);
    eventually("the new place", || nfs("nfs-cat", &pool.at("moved/file")).is_some_and(|content| content == b"below"));
    pool.nacre(&["fs", "unshare", "%/moved"]);
    eventually("the end of the share", || nfs("nfs-ls", &pool.at("moved")).is_none());
    pool.nacre(&["fs", "share", "-a"]);
    eventually("the share", || nfs("nfs-ls", &pool.at("moved")).is_some());
    pool.nacre(&["fs", "set", "sharenfs=ro=127.0.0.1", "%/moved"]);
    eventually("reading only", || {
        let local = local.to_str().unwrap();
        !finish(Command::new("nfs-cp").args([local, &url(&pool.at("moved/new"))])).status.success()
    });
    pool.nacre(&["fs", "destroy", "-r", "%/moved"]);
    let exports = fs::read_to_string(pool.state().join("ganesha.conf")).unwrap();
    assert!(exports.contains(root.to_str().unwrap()) && !exports.contains("moved"), "{exports}");
    // A snapshot by its path, and what was there then.
    pool.nacre(&["fs", "snapshot", "%@then"]);
    fs::write(pool.at("dir/file"), "changed").unwrap();
    let then = pool.at(".zfs/snapshot/then/dir/file");
    eventually("the snapshot", || nfs("nfs-cat", &then).is_some_and(|content| content == b"content"));
    pool.nacre(&["fs", "rollback", "%@then"]);
    whole("rolled back", "dir/file");
}

/// From now on its process is followed by another one.
fn survive_from_now_on(pool: &Pool) {
    pool.nacre(&["pool", "export", "%"]);
    pool.nacre(&["pool", "import", "--survive", "-d", pool.device.to_str().unwrap(), "%"]);
}

/// Samba with shares of users, and the template that docs/exports.md has.
struct Samba {
    _server: Running,
    configuration: PathBuf,
    _place: tempfile::TempDir,
}

impl Samba {
    /// With these lines more in the template.
    fn start(more: &str) -> Samba {
        let place = scratch();
        let at = place.path().display().to_string();
        let template = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/exports.md")).unwrap();
        let template = template.split("```ini\n").nth(1).unwrap().split("```").next().unwrap().to_owned();
        // Some clients know one port only.
        let ports = if listens(445) { SMB.to_string() } else { format!("{SMB} 445") };
        let own = format!(
            "[global]\n server role = standalone server\n map to guest = Bad User\n guest account = root\n interfaces = lo\n
             bind interfaces only = yes\n smb ports = {ports}\n pid directory = {at}\n lock directory = {at}\n
             state directory = {at}\n cache directory = {at}\n private dir = {at}\n ncalrpc dir = {at}/ncalrpc\n
             log file = {at}/log\n disable spoolss = yes\n load printers = no\n"
        );
        let configuration = place.path().join("smb.conf");
        fs::write(&configuration, own + template.trim_start_matches("[global]\n") + more).unwrap();
        let mut command = Command::new("smbd");
        let server = Running::start(command.args(["-F", "--no-process-group", "-s"]).arg(&configuration));
        eventually("Samba", || listens(SMB));
        Samba { _server: server, configuration, _place: place }
    }

    /// Runs these commands in a client; returns its success and output.
    fn told(&self, share: &str, commands: &str) -> (bool, String) {
        let mut client = Command::new("smbclient");
        client.arg("-s").arg(&self.configuration).args(["-p", &SMB.to_string(), "-N", &format!("//127.0.0.1/{share}")]);
        let output = finish(client.args(["-c", commands]));
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    }

    fn ok(&self, share: &str, commands: &str) -> String {
        let (ok, said) = self.told(share, commands);
        assert!(ok && !said.contains("NT_STATUS"), "{commands}: {said}");
        said
    }
}

#[test]
fn smb_clients_write_rename_and_see_previous_versions() {
    needs!(as_root() && installed(&["smbd", "smbclient", "net"]));
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if listens(SMB) || !Path::new("/var/lib/samba/usershares").is_dir() {
        skip("exports", "another server of SMB runs, or shares of users have no place");
        return;
    }
    let pool = Pool::made("smb", "1G", &[]);
    let share = pool.name.clone();
    pool.nacre(&["fs", "set", "sharesmb=guestok=true", "%"]);
    pool.nacre(&["fs", "create", "-o", "sharesmb=name=nacre-test-ro,ro,guestok=true", "%/reading"]);
    let samba = Samba::start("");
    let (local, back) = (pool.path("local"), pool.path("back"));
    let content = noise(20 << 20);
    fs::write(&local, &content).unwrap();
    samba.ok(&share, &format!("mkdir dir; put {} dir\\large; rename dir\\large dir\\renamed", local.display()));
    assert!(fs::read(pool.at("dir/renamed")).unwrap() == content);
    // What a client of Windows sets is kept beside the file.
    samba.ok(&share, "setmode dir\\renamed +h; ls dir\\*");
    let access = finish(Command::new("getfattr").args(["-d", "-m", "-"]).arg(pool.at("dir/renamed")));
    assert!(text(&access.stdout).contains("user.DOSATTRIB"), "{}", text(&access.stdout));
    // Any spelling finds it.
    samba.ok(&share, &format!("get DIR\\RENAMED {}", back.display()));
    assert!(fs::read(&back).unwrap() == content);
    fs::write(pool.at("file"), "then").unwrap();
    pool.nacre(&["fs", "snapshot", "--keep-daily", "3", "%"]);
    fs::write(pool.at("file"), "now").unwrap();
    let versions = samba.ok(&share, "allinfo file");
    let version = versions.lines().find(|line| line.starts_with("@GMT-")).unwrap_or_else(|| panic!("{versions}"));
    samba.ok(&share, &format!("get {version}\\file {}", back.display()));
    assert_eq!(fs::read(&back).unwrap(), b"then");
    let (_, said) = samba.told("nacre-test-ro", &format!("put {} new", local.display()));
    assert!(said.contains("NT_STATUS_ACCESS_DENIED") && !pool.at("reading/new").exists(), "{said}");
    for again in ["export", "die", "die and go on"] {
        match again {
            "export" => {
                pool.nacre(&["pool", "export", "%"]);
                assert!(samba.told(&share, "ls").1.contains("BAD_NETWORK_NAME"));
                pool.import();
            }
            "die" => {
                pool.nacre(&["pool", "sync", "%"]);
                pool.die();
                pool.leave();
                pool.import();
            }
            _ => {
                survive_from_now_on(&pool);
                pool.die();
            }
        }
        eventually("the share", || samba.told(&share, &format!("get file {}", back.display())).0);
        assert_eq!(fs::read(&back).unwrap(), b"now", "{again}");
    }
    pool.nacre(&["fs", "set", "sharesmb=off", "%"]);
    assert!(samba.told(&share, "ls").1.contains("BAD_NETWORK_NAME"));
}

/// Metadata that Windows clients store with a file is kept: over mounts, and in snapshots.
#[test]
fn smb_clients_keep_acls_streams_and_attributes() {
    needs!(as_root() && installed(&["smbd", "smbclient", "smbcacls", "net"]));
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if listens(SMB) || listens(445) || !Path::new("/var/lib/samba/usershares").is_dir() {
        skip("exports", "another server of SMB runs, or shares of users have no place");
        return;
    }
    let pool = Pool::made("kept", "1G", &["-O", "casesensitivity=insensitive"]);
    let share = pool.name.clone();
    pool.nacre(&["fs", "set", "sharesmb=guestok=true", "%"]);
    let samba = Samba::start("    case sensitive = yes\n");
    let (local, back) = (pool.path("local"), pool.path("back"));
    fs::write(&local, noise(50_000)).unwrap();
    let said = local.display();
    samba.ok(
        &share,
        &format!("mkdir Dir; put {said} Dir\\File; setea dir\\file one value; put {said} dir\\FILE:stream"),
    );
    // The pool finds any spelling, and keeps the first.
    samba.ok(&share, "rename DIR\\FILE Dir\\Kept");
    assert_eq!(fs::read_dir(pool.at("Dir")).unwrap().next().unwrap().unwrap().file_name(), "Kept");
    let acl = |path: &str, more: &[&str]| {
        let mut command = Command::new("smbcacls");
        command.arg("-s").arg(&samba.configuration).args(["-N", "--numeric", &format!("//127.0.0.1/{share}"), path]);
        let output = finish(command.args(more));
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };
    acl("dir/kept", &["-a", "ACL:S-1-5-21-1-2-3-1234:1/0x0/0x00010000"]);
    let before = acl("dir/kept", &[]);
    assert!(before.contains("S-1-5-21-1-2-3-1234:1/"), "{before}");
    pool.nacre(&["fs", "snapshot", "%@then"]);
    acl("dir/kept", &["-D", "ACL:S-1-5-21-1-2-3-1234:1/0x0/0x00010000"]);
    let after = acl("dir/kept", &[]);
    assert!(!after.contains("1234"), "{after}");
    pool.nacre(&["fs", "unmount", "%"]);
    pool.nacre(&["fs", "mount", "%"]);
    for (directory, expected) in [("dir", after), (".zfs/snapshot/then/dir", before)] {
        let kept = format!("{directory}/kept");
        eventually("the share", || samba.told(&share, "ls").0);
        assert_eq!(acl(&kept, &[]), expected, "{kept}");
        assert!(samba.ok(&share, &format!("geteas {kept}")).contains("one"), "{kept}");
        samba.ok(&share, &format!("get {kept}:stream {}", back.display()));
        assert!(fs::read(&back).unwrap() == noise(50_000), "{kept}");
    }
    let expected = fill(&pool.at("many"), many());
    listed_while_others_move(&pool.at("many"), &expected, &|| {
        let said = samba.ok(&share, "ls many\\*");
        let names = said.lines().filter_map(|line| line.split_whitespace().next());
        names.filter(|name| name.starts_with('f') || name.starts_with('x')).map(str::to_owned).collect()
    });
}

/// The recipe of docs/exports.md for exports that have no properties.
#[test]
fn smb_clients_use_cages_and_unions() {
    needs!(as_root() && installed(&["smbd", "smbclient", "net"]));
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if listens(SMB) || !Path::new("/var/lib/samba/usershares").is_dir() {
        skip("exports", "another server of SMB runs, or shares of users have no place");
        return;
    }
    let cage = Fixture::cage(&["--size=200M"]);
    let (union, upper) = unions::over(&[], |lower| fs::write(lower.join("below"), "below").unwrap());
    let samba = Samba::start("");
    let content = noise(4 << 20);
    let local = union.scratch.path().join("local");
    fs::write(&local, &content).unwrap();
    // Servers of NFS need handles.
    for mountpoint in [&cage.mountpoint, &union.mountpoint] {
        let mount = fs::File::open(mountpoint).unwrap();
        let handle = nacre_sys::handles::Kept::of(std::os::fd::AsFd::as_fd(&mount));
        assert_eq!(handle.err().and_then(|error| error.raw_os_error()), Some(95));
    }
    for (fixture, below) in [(&cage, cage.source.clone()), (&union, upper)] {
        let name = format!("nacre-test-{}", std::process::id());
        let at = fixture.mountpoint.to_str().unwrap();
        let usershare = |words: &[&str]| {
            let output = finish(Command::new("net").arg("usershare").args(words));
            assert!(output.status.success(), "{}", text(&output.stderr));
        };
        usershare(&["add", &name, at, "", "S-1-1-0:F", "guest_ok=y"]);
        samba.ok(&name, &format!("mkdir dir; put {} dir\\file; rename dir\\file dir\\renamed", local.display()));
        assert!(fs::read(fixture.mountpoint.join("dir/renamed")).unwrap() == content);
        assert!(fs::read(below.join("dir/renamed")).unwrap() == content);
        if below != cage.source {
            samba.ok(&name, "rename below above");
            assert_eq!(fs::read(fixture.mountpoint.join("above")).unwrap(), b"below");
        }
        usershare(&["delete", &name]);
        // The client's connection has ended; the server's process for it does so a little later.
        eventually("the end of the connection", || !samba.told(&name, "ls").0);
    }
}

/// Characters with a meaning to a server never reach its configuration: neither from users, nor
/// from a pool that users other than root could have written.
#[test]
fn nobody_exports_what_is_not_his_to_export() {
    needs!(as_root());
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let pool = Pool::made("mine", "64M", &[]);
    for bad in [
        "sharenfs=rw=a;b",
        "sharenfs=rw=*(rw)",
        "sharenfs=fsid=0",
        "sharenfs=rw=a\nEXPORT { }",
        "sharesmb=name=global",
        "sharesmb=name=a]\n[b",
        "sharesmb=path=/etc",
    ] {
        let (code, said) = pool.refused(&["fs", "set", bad, "%"]);
        assert!(code == 1 && said.contains("must be one of"), "{bad}: {said}");
    }
    let (_, said) = pool.refused(&["fs", "share", "%"]);
    assert!(said.contains("legacy share"), "{said}");
    let (_, said) = pool.refused(&["fs", "unshare", "%"]);
    assert!(said.contains("not currently shared"), "{said}");
    assert!(!pool.state().join("ganesha.conf").exists());
    // A mount point that could be written in no configuration.
    let odd = pool.path("odd\"} EXPORT { ");
    pool.nacre(&["fs", "create", "-o", &format!("mountpoint={}", odd.display()), "%/odd"]);
    let said = pool.told(&["fs", "set", "sharenfs=on", "sharesmb=on", "%/odd"]);
    assert!(said.contains("is not shared"), "{said}");
    assert!(!fs::read_to_string(pool.state().join("ganesha.conf")).is_ok_and(|all| all.contains("odd")));
    pool.nacre(&["fs", "inherit", "sharenfs", "%/odd"]);
    pool.nacre(&["fs", "inherit", "sharesmb", "%/odd"]);
    // Anybody's file: its properties share nothing.
    pool.nacre(&["fs", "set", "sharenfs=on", "sharesmb=on", "%"]);
    pool.nacre(&["pool", "export", "%"]);
    std::os::unix::fs::chown(&pool.device, Some(1000), Some(1000)).unwrap();
    pool.import();
    let (_, said) = pool.refused(&["fs", "share", "%"]);
    assert!(said.contains("others than root could have written"), "{said}");
    assert!(!fs::read_to_string(pool.state().join("ganesha.conf")).is_ok_and(|all| all.contains("EXPORT")));
    let shared = finish(Command::new("net").args(["usershare", "list"]).stdin(Stdio::null()));
    assert!(!text(&shared.stdout).lines().any(|line| line == pool.name));
}

/// The share for Time Machine of docs/exports.md: the written data of a Mac can be read back, and
/// its metadata of a file is in snapshots as well.
#[test]
fn a_share_for_time_machine_keeps_what_macs_write() {
    needs!(as_root() && installed(&["smbd", "smbclient"]));
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if listens(SMB) {
        skip("exports", "another server of SMB runs");
        return;
    }
    let pool = Pool::made("mac", "1G", &[]);
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/exports.md")).unwrap();
    let share = page.split("[timemachine]\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(share.contains("/tank/timemachine") && share.contains("max size = 500G"), "{share}");
    let share = share.replace("/tank/timemachine", pool.at("").to_str().unwrap()).replace("500G", "100M");
    let samba = Samba::start(&format!("[timemachine]\n guest ok = yes\n{share}"));
    let (local, back) = (pool.path("local"), pool.path("back"));
    let band = noise(8 << 20);
    fs::write(&local, &band).unwrap();
    let put = format!(
        "mkdir b.sparsebundle; mkdir b.sparsebundle\\bands; put {} b.sparsebundle\\bands\\new",
        local.display()
    );
    samba.ok("timemachine", &put);
    samba.ok("timemachine", "rename b.sparsebundle\\bands\\new b.sparsebundle\\bands\\0");
    assert!(fs::read(pool.at("b.sparsebundle/bands/0")).unwrap() == band);
    // The largest size is reported as the size of the file system.
    let list = "<plist><dict><key>band-size</key>\n<integer>8388608</integer></dict></plist>\n";
    fs::write(pool.at("b.sparsebundle/Info.plist"), list).unwrap();
    let listed = samba.ok("timemachine", "ls");
    let blocks = listed.lines().find(|line| line.contains("blocks of size")).unwrap_or_else(|| panic!("{listed}"));
    let words: Vec<u64> =
        blocks.split_whitespace().filter_map(|word| word.trim_end_matches('.').parse().ok()).collect();
    assert_eq!(words[0] * words[1], 100 << 20, "{blocks}");
    let fork = noise(3000);
    samba.ok("timemachine", &format!("put {} document", local.display()));
    fs::write(&local, &fork).unwrap();
    samba.ok("timemachine", &format!("put {} document:AFP_Resource", local.display()));
    samba.ok("timemachine", "rename document renamed");
    let same = |when: &str| {
        samba.ok("timemachine", &format!("get renamed:AFP_Resource {}", back.display()));
        assert!(fs::read(&back).unwrap() == fork, "{when}");
        samba.ok("timemachine", &format!("get renamed {}", back.display()));
        assert!(fs::read(&back).unwrap() == band, "{when}");
    };
    same("renamed");
    pool.nacre(&["fs", "snapshot", "%@then"]);
    samba.ok("timemachine", "del renamed");
    assert!(!pool.at("renamed").exists());
    pool.nacre(&["fs", "rollback", "%@then"]);
    same("rolled back");
}
