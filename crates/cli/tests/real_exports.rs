//! Pools' file systems given to others by NFS-Ganesha and Samba, on loopback, with clients that
//! mount nothing.
//!
//! Ganesha and Samba are the machine's, so tests here run one at a time, and where somebody else
//! runs one, they are left out.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod mounting;

use mounting::{Fixture, as_root, eventually, finish, needs, pools::Pool, scratch, skip, text, unions};
use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
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

/// What a client of NFS says of a file or directory.
fn nfs(program: &str, path: &Path) -> Option<Vec<u8>> {
    let output = finish(Command::new(program).arg(url(path)));
    output.status.success().then_some(output.stdout)
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
    let _ganesha = Ganesha::start(&pool.state());
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
    let many = std::env::var("NACRE_EXPORT_FILES").ok().and_then(|many| many.parse().ok()).unwrap_or(10_000);
    println!("campaign: NACRE_EXPORT_FILES={many}");
    fs::create_dir(pool.at("many")).unwrap();
    let mut expected: Vec<String> = (0..many).map(|number| format!("f{number}")).collect();
    expected.iter().for_each(|name| drop(fs::File::create(pool.at("many").join(name)).unwrap()));
    expected.sort();
    assert!(names(&nfs("nfs-ls", &pool.at("many")).unwrap()) == expected);
    // The server holds the mount; it lets go of it, and takes it up again.
    let read = |name: &str| nfs("nfs-cat", &pool.at(name));
    let whole = |what: &str, below: &str| {
        eventually(what, || read("dir/file").is_some_and(|content| content == b"content"));
        eventually(what, || read(below).is_some_and(|content| content == b"below" || content == b"content"));
        // The client makes new files only.
        fs::remove_file(&back).unwrap();
        copy(&url(&pool.at("dir/large")), back.to_str().unwrap());
        assert!(fs::read(&back).unwrap() == large, "{what}");
    };
    pool.nacre(&["fs", "unmount", "%/below"]);
    pool.nacre(&["fs", "mount", "%/below"]);
    whole("mounted again", "below/file");
    pool.nacre(&["pool", "export", "%"]);
    assert!(nfs("nfs-ls", &root).is_none(), "nothing is given of what is not mounted");
    pool.import();
    whole("imported again", "below/file");
    pool.nacre(&["pool", "sync", "%"]);
    pool.die();
    pool.leave();
    pool.import();
    whole("after the end of its process", "below/file");
    // Who is shared changes with the mounts.
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

/// Samba with shares of users, and the template that docs/exports.md has.
struct Samba {
    _server: Running,
    configuration: PathBuf,
    _place: tempfile::TempDir,
}

impl Samba {
    fn start() -> Samba {
        let place = scratch();
        let at = place.path().display().to_string();
        let template = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/exports.md")).unwrap();
        let template = template.split("```ini\n").nth(1).unwrap().split("```").next().unwrap().to_owned();
        let own = format!(
            "[global]\n server role = standalone server\n map to guest = Bad User\n guest account = root\n interfaces = lo\n
             bind interfaces only = yes\n smb ports = {SMB}\n pid directory = {at}\n lock directory = {at}\n
             state directory = {at}\n cache directory = {at}\n private dir = {at}\n ncalrpc dir = {at}/ncalrpc\n
             log file = {at}/log\n disable spoolss = yes\n load printers = no\n"
        );
        let configuration = place.path().join("smb.conf");
        fs::write(&configuration, own + template.trim_start_matches("[global]\n")).unwrap();
        let mut command = Command::new("smbd");
        let server = Running::start(command.args(["-F", "--no-process-group", "-s"]).arg(&configuration));
        eventually("Samba", || listens(SMB));
        Samba { _server: server, configuration, _place: place }
    }

    /// What a client says to these commands.
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
    let samba = Samba::start();
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
    for again in ["export", "die"] {
        if again == "die" {
            pool.nacre(&["pool", "sync", "%"]);
            pool.die();
            pool.leave();
        } else {
            pool.nacre(&["pool", "export", "%"]);
            assert!(samba.told(&share, "ls").1.contains("BAD_NETWORK_NAME"));
        }
        pool.import();
        eventually("the share", || samba.told(&share, &format!("get file {}", back.display())).0);
        assert_eq!(fs::read(&back).unwrap(), b"now", "{again}");
    }
    pool.nacre(&["fs", "set", "sharesmb=off", "%"]);
    assert!(samba.told(&share, "ls").1.contains("BAD_NETWORK_NAME"));
}

/// The recipe of docs/exports.md for what has no properties.
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
    let samba = Samba::start();
    let content = noise(4 << 20);
    let local = union.scratch.path().join("local");
    fs::write(&local, &content).unwrap();
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

/// What would mean something to a server reaches none: neither from users, nor from a pool that
/// others than root could have written.
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
