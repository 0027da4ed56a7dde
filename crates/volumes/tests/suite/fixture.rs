//! A plugin with a state directory of its own, its client, and what must be left at the end: nothing.

pub use nacre_testkit::{eventually, needs};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

/// Whether a test that lacks this has to fail.
fn required(what: &str) -> bool {
    std::env::var("NACRE_TEST_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == what))
}

/// Notes that a test is skipped.
pub fn skip(what: &str, why: &str) -> bool {
    assert!(!required(what), "NACRE_TEST_REQUIRE={what}, but {why}");
    println!("skipped: {why}");
    false
}

/// Whether this process is root and can mount.
pub fn as_root() -> bool {
    if !rustix::process::geteuid().is_root() {
        return skip("root", "only root can do this");
    }
    if fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        return skip("fuse", "/dev/fuse cannot be opened");
    }
    true
}

/// Whether a program is in PATH.
pub fn installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null()).status();
    found.is_ok_and(|status| status.success()) || skip(program, &format!("{program} is not installed"))
}

/// The program under test.
pub fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_nacre-volumes"))
}

/// The program nacre, which is built beside it.
pub fn nacre() -> PathBuf {
    let beside = program().with_file_name("nacre");
    assert!(beside.exists(), "{} is missing: cargo nextest run --workspace builds it", beside.display());
    beside
}

/// Runs nacre, which has to succeed; returns what it printed.
pub fn run_nacre(words: &[&str]) -> String {
    let output = Command::new(nacre()).args(words).output().unwrap();
    assert!(output.status.success(), "nacre {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// An answer: status of HTTP, and the body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    /// The body of a call that succeeded.
    #[track_caller]
    pub fn done(self) -> Value {
        assert_eq!((self.status, self.body["Err"].as_str().unwrap_or("")), (200, ""), "{}", self.body);
        self.body
    }

    /// The message of a call that failed.
    #[track_caller]
    pub fn refused(self) -> String {
        assert_ne!(self.status, 200, "{}", self.body);
        self.body["Err"].as_str().unwrap().to_owned()
    }
}

/// A plugin, restarted where a test kills it.
pub struct Plugin {
    place: tempfile::TempDir,
    child: Option<Child>,
    /// The program that the plugin calls.
    pub nacre: PathBuf,
    pools: Vec<String>,
}

impl Plugin {
    /// A plugin that serves.
    pub fn new() -> Plugin {
        let place = tempfile::Builder::new().prefix("nacre-test.").tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut plugin = Plugin { place, child: None, nacre: nacre(), pools: Vec::new() };
        plugin.start();
        plugin
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("nacre.sock")
    }

    /// The directory that a volume's containers see.
    pub fn at(&self, volume: &str) -> PathBuf {
        self.path("state/volumes").join(volume).join("at")
    }

    /// Starts it, and waits until it answers.
    pub fn start(&mut self) {
        self.child = Some(self.spawn(&self.socket()));
        eventually("the plugin answers", || UnixStream::connect(self.socket()).is_ok());
    }

    /// Starts a process of it at a socket.
    pub fn spawn(&self, socket: &Path) -> Child {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("log")).unwrap();
        let mut command = self.command(&self.nacre, &["serve", "--socket", socket.to_str().unwrap()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn command(&self, nacre: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("--state").arg(self.path("state")).arg("--nacre").arg(nacre).args(words);
        command
    }

    /// Runs a verb of the program.
    pub fn verb(&self, words: &[&str]) -> Output {
        self.command(&nacre(), words).output().unwrap()
    }

    /// Runs a verb, which has to succeed.
    #[track_caller]
    pub fn verb_done(&self, words: &[&str]) -> String {
        let output = self.verb(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Ends it by SIGKILL, where a test has not done it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// A call, which has to be answered.
    #[track_caller]
    pub fn call(&self, call: &str, body: &Value) -> Answer {
        request(&self.socket(), &format!("VolumeDriver.{call}"), &body.to_string()).unwrap()
    }

    #[track_caller]
    pub fn create(&self, name: &str, options: &Value) -> Answer {
        self.call("Create", &json!({ "Name": name, "Opts": options }))
    }

    #[track_caller]
    pub fn mount(&self, name: &str, id: &str) -> Answer {
        self.call("Mount", &json!({ "Name": name, "ID": id }))
    }

    #[track_caller]
    pub fn unmount(&self, name: &str, id: &str) -> Answer {
        self.call("Unmount", &json!({ "Name": name, "ID": id }))
    }

    #[track_caller]
    pub fn remove(&self, name: &str) -> Answer {
        self.call("Remove", &json!({ "Name": name }))
    }

    #[track_caller]
    pub fn get(&self, name: &str) -> Answer {
        self.call("Get", &json!({ "Name": name }))
    }

    /// A pool on a file of 64 MiB, destroyed at the end.
    pub fn pool(&mut self, word: &str) -> String {
        let pool = format!("vt{word}{}", std::process::id());
        let file = self.path(&format!("{word}.pool"));
        run_nacre(&["pool", "create", "--size", "64M", "-m", "none", &pool, file.to_str().unwrap()]);
        self.pools.push(pool.clone());
        pool
    }

    /// Mount points below the state directory.
    pub fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let state = self.path("state");
        let mounted = table.lines().filter_map(|line| line.split(' ').nth(4));
        mounted.filter(|at| Path::new(at).starts_with(&state)).map(str::to_owned).collect()
    }

    /// Entries of the directory of volumes, also of those that are half made or half deleted.
    pub fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("state/volumes")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// File systems and snapshots of a pool, without its own.
    pub fn datasets(&self, pool: &str) -> Vec<String> {
        let list = run_nacre(&["fs", "list", "-H", "-o", "name", "-t", "all", "-r", pool]);
        list.lines().filter(|name| *name != pool).map(str::to_owned).collect()
    }

    /// Puts in order what kills have left; then nothing may be there.
    #[track_caller]
    pub fn nothing_is_left(&self) {
        self.verb_done(&["tend"]);
        assert_eq!(self.mounts(), Vec::<String>::new());
        // The plugin deletes the files of the last volume after its answer.
        eventually("all directories are gone", || self.entries().is_empty());
        for pool in &self.pools {
            assert_eq!(self.datasets(pool), Vec::<String>::new());
        }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            println!("{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
        for at in self.mounts() {
            let _ = Command::new("umount").args(["-l", &at]).status();
        }
        for pool in &self.pools {
            let _ = Command::new(nacre()).args(["pool", "destroy", "-f", pool]).status();
        }
    }
}

/// Sends a request; `None` where the connection ends without an answer.
pub fn request(socket: &Path, path: &str, body: &str) -> Option<Answer> {
    let head = format!("POST /{path} HTTP/1.1\r\nHost: plugin\r\nContent-Length: {}\r\n\r\n", body.len());
    raw(socket, format!("{head}{body}").as_bytes())
}

/// Sends these bytes; `None` where the connection ends without an answer.
pub fn raw(socket: &Path, bytes: &[u8]) -> Option<Answer> {
    let mut stream = UnixStream::connect(socket).ok()?;
    // A plugin that refuses early does not read the rest.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let body = serde_json::from_str(body).unwrap_or_else(|_| Value::from(body));
    Some(Answer { status, body })
}
