//! The target exported by NFS-Ganesha and by Samba, on loopback, to clients that mount nothing: a large file and
//! many small ones in both directions, and a listing.
//!
//! Servers are started for a visit and end with it. If their ports are in use already, the group fails.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::material::Material;
use super::{Visit, finished, needs_making, timed};
use crate::clock::Deadline;
use crate::failure::{Doing, Failure};
use crate::programs;
use crate::scale::Scale;

const NFS: u16 = 21_490;
const MOUNTD: u16 = 21_480;
const SMB: u16 = 21_445;
const PORTMAPPER: u16 = 111;
/// Chunk of the large file in bytes; its size is a multiple of that.
const PIECE: u64 = 1 << 20;
/// Bytes of a small file.
const SMALL: usize = 1000;
/// Directory with the files that clients upload, outside of the target.
const BROUGHT: &str = "served";
/// Deadline for a server to answer.
const PATIENCE: Duration = Duration::from_secs(20);
const ASKED_AGAIN: Duration = Duration::from_millis(20);

/// Makes the files that clients upload.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let brought = source.join(BROUGHT);
    if !needs_making(&brought)? {
        return Ok(());
    }
    let supply = Material::Random.supply();
    let path = brought.join("stream");
    let mut stream = fs::File::create(&path).doing("creating", &path)?;
    for number in 0..scale.stream / PIECE {
        stream.write_all(supply.block(number * PIECE, PIECE as usize)).doing("writing", &path)?;
    }
    let small = brought.join("small");
    fs::create_dir(&small).doing("creating", &small)?;
    for number in 0..scale.files {
        let path = small.join(format!("f{number:06}"));
        fs::write(&path, supply.block(number * SMALL as u64, SMALL)).doing("writing", &path)?;
    }
    finished(&brought)
}

/// A server process, ended when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which the clients reported.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

fn start(name: &str, arguments: &[&str], ports: &[u16]) -> Result<Server, Failure> {
    if ports.iter().any(|port| listens(*port)) {
        return Err(Failure::new(format!("{name}: somebody else listens on its port")));
    }
    let program = programs::find(name).ok_or_else(|| Failure::new(format!("{name} is not installed")))?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let server = Server(command.spawn().map_err(|error| Failure::new(format!("starting {name}: {error}")))?);
    let deadline = Deadline::after(PATIENCE);
    while !ports.iter().all(|port| listens(*port)) {
        if deadline.left().is_zero() {
            return Err(Failure::new(format!("{name} does not answer")));
        }
        wait();
    }
    Ok(server)
}

#[expect(clippy::disallowed_methods, reason = "a server tells nobody that it answers")]
fn wait() {
    thread::sleep(ASKED_AGAIN);
}

/// Runs a client to its end.
fn client(name: &str, arguments: &[&str]) -> Result<Vec<u8>, Failure> {
    let output = Command::new(name).args(arguments).current_dir("/").stdin(Stdio::null()).output();
    let output = output.map_err(|error| Failure::new(format!("starting {name}: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    if output.status.success() && !said.contains("NT_STATUS") {
        return Ok(output.stdout);
    }
    Err(Failure::new(format!("{name}: {}", said.lines().last().unwrap_or("failed"))))
}

fn text(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| Failure::new(format!("{} cannot be named to a server", path.display())))
}

fn expect_same(one: &Path, other: &Path) -> Result<(), Failure> {
    let read = |path: &Path| fs::read(path).doing("reading", path);
    if read(one)? == read(other)? { Ok(()) } else { Err(Failure::new("what came back is something else")) }
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let brought = visit.source.join(BROUGHT);
    let work = visit.source.join("served-work");
    if work.exists() {
        fs::remove_dir_all(&work).doing("removing", &work)?;
    }
    fs::create_dir(&work).doing("creating", &work)?;
    nfs(visit, &brought, &work)?;
    smb(visit, &brought, &work)?;
    fs::remove_dir_all(&work).doing("removing", &work)
}

fn nfs(visit: &Visit<'_>, brought: &Path, work: &Path) -> Result<(), Failure> {
    let many = visit.own.join("many");
    fs::create_dir(&many).doing("creating", &many)?;
    for number in 0..visit.scale.files {
        let path = many.join(format!("f{number:06}"));
        fs::File::create(&path).doing("creating", &path)?;
    }
    visit.tidy(&[])?;
    let _portmapper = if listens(PORTMAPPER) {
        None
    } else {
        fs::create_dir_all("/run/rpcbind").doing("creating", Path::new("/run/rpcbind"))?;
        Some(start("rpcbind", &["-f"], &[PORTMAPPER])?)
    };
    let recovery = work.join("recovery");
    fs::create_dir(&recovery).doing("creating", &recovery)?;
    let configuration = work.join("ganesha.conf");
    let root = text(&visit.root)?;
    let content = format!(
        "NFS_CORE_PARAM {{ NFS_Port = {NFS}; MNT_Port = {MOUNTD}; Protocols = 3; Enable_UDP = false; Enable_NLM = false;
          Enable_RQUOTA = false; Bind_addr = 127.0.0.1; mount_path_pseudo = true; }}
         NFSV4 {{ Graceless = true; RecoveryRoot = \"{}\"; RecoveryBackend = fs; }}
         EXPORT {{ Export_Id = 1; Path = \"{root}\"; Pseudo = \"{root}\"; Filesystem_Id = 1.1; Access_Type = RW;
          Squash = No_Root_Squash; PrivilegedPort = false; FSAL {{ Name = VFS; }} }}\n",
        text(&recovery)?
    );
    fs::write(&configuration, content).doing("writing", &configuration)?;
    let (log, process) = (work.join("ganesha.log"), work.join("ganesha.pid"));
    let arguments = ["-F", "-f", text(&configuration)?, "-L", text(&log)?, "-p", text(&process)?];
    let server = start("ganesha.nfsd", &arguments, &[NFS, MOUNTD])?;
    let url =
        |path: &Path| Ok::<_, Failure>(format!("nfs://127.0.0.1{}?nfsport={NFS}&mountport={MOUNTD}", text(path)?));
    let (stream, there, back) = (brought.join("stream"), visit.own.join("by-nfs"), work.join("back"));
    let (elapsed, ()) = timed(|| {
        client("nfs-cp", &[text(&stream)?, &url(&there)?])?;
        visit.tidy(&[])
    })?;
    visit.sample("nfs-in", elapsed, visit.scale.stream)?;
    let (elapsed, _) = timed(|| client("nfs-cp", &[&url(&there)?, text(&back)?]))?;
    visit.sample("nfs-out", elapsed, visit.scale.stream)?;
    expect_same(&stream, &back)?;
    let (elapsed, listed) = timed(|| client("nfs-ls", &[&url(&many)?]))?;
    let count = listed.iter().filter(|byte| **byte == b'\n').count() as u64;
    if count != visit.scale.files {
        return Err(Failure::new(format!("{count} of {} names were listed", visit.scale.files)));
    }
    visit.sample("nfs-list", elapsed, count)?;
    // The server holds the exported root open.
    drop(server);
    for path in [&back, &there] {
        fs::remove_file(path).doing("removing", path)?;
    }
    fs::remove_dir_all(&many).doing("removing", &many)
}

fn smb(visit: &Visit<'_>, brought: &Path, work: &Path) -> Result<(), Failure> {
    let configuration = work.join("smb.conf");
    let at = text(work)?;
    let content = format!(
        "[global]\nserver role = standalone server\nmap to guest = Bad User\nguest account = root\ninterfaces = lo\n\
         bind interfaces only = yes\nsmb ports = {SMB}\npid directory = {at}\nlock directory = {at}\nstate directory = {at}\n\
         cache directory = {at}\nprivate dir = {at}\nncalrpc dir = {at}/ncalrpc\nlog file = {at}/log\n\
         disable spoolss = yes\nload printers = no\n[bench]\npath = {}\nguest ok = yes\nread only = no\n",
        text(&visit.own)?
    );
    fs::write(&configuration, content).doing("writing", &configuration)?;
    let server = start("smbd", &["-F", "--no-process-group", "-s", text(&configuration)?], &[SMB])?;
    let port = SMB.to_string();
    let said = |commands: &str| {
        client("smbclient", &["-s", text(&configuration)?, "-p", &port, "-N", "//127.0.0.1/bench", "-c", commands])
    };
    let (stream, back) = (brought.join("stream"), work.join("back"));
    let (elapsed, ()) = timed(|| {
        said(&format!("put {} by-smb", text(&stream)?))?;
        visit.tidy(&[])
    })?;
    visit.sample("smb-in", elapsed, visit.scale.stream)?;
    let (elapsed, _) = timed(|| said(&format!("get by-smb {}", text(&back)?)))?;
    visit.sample("smb-out", elapsed, visit.scale.stream)?;
    expect_same(&stream, &back)?;
    let (small, returned) = (brought.join("small"), work.join("returned"));
    fs::create_dir(&returned).doing("creating", &returned)?;
    let (elapsed, ()) = timed(|| {
        said(&format!("prompt OFF; mkdir small; cd small; lcd {}; mput f*", text(&small)?))?;
        visit.tidy(&[])
    })?;
    visit.sample("smb-files-in", elapsed, visit.scale.files)?;
    let (elapsed, _) = timed(|| said(&format!("prompt OFF; cd small; lcd {}; mget f*", text(&returned)?)))?;
    let count = fs::read_dir(&returned).doing("reading", &returned)?.count() as u64;
    if count != visit.scale.files {
        return Err(Failure::new(format!("{count} of {} files came back", visit.scale.files)));
    }
    visit.sample("smb-files-out", elapsed, count)?;
    drop(server);
    let left: PathBuf = visit.own.join("by-smb");
    fs::remove_file(&left).doing("removing", &left)
}
