//! Real mounts for tests: a source, a mount point and a daemon, removed again however the test
//! ends.
//!
//! Callers: the other modules of the suite. Nothing here waits without a limit: a watchdog kills
//! the daemon of a test that takes too long, which turns every call that hangs in its mount into
//! ENOTCONN.
//!
//! Settings, all from the environment: `NACRE_BINARY` (another program), `NACRE_TEST_TRANSPORT`
//! (`uring`, `device`: for mounts that do not name one), `NACRE_TEST_REQUIRE` (`root,fuse`: a
//! missing requirement fails the test instead of skipping it), `NACRE_TEST_DIR` (directory of
//! sources and mount points).
pub mod cages;
pub mod images;
pub mod overlays;
pub mod pools;
pub mod resting;
pub mod status;
pub mod unions;

#[allow(unused_imports)]
pub use nacre_testkit::needs;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

pub use nacre_testkit::{PATIENCE, eventually};

/// How long a test may use its mount before the daemon is killed.
const LIMIT: Duration = Duration::from_secs(600);

/// Path of the program under test.
pub fn nacre() -> PathBuf {
    std::env::var_os("NACRE_BINARY").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_nacre")), PathBuf::from)
}

/// Whether this process is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn required(what: &str) -> bool {
    std::env::var("NACRE_TEST_REQUIRE").is_ok_and(|list| list.split(',').any(|word| word == what))
}

/// Prints why a test is skipped, or fails where `NACRE_TEST_REQUIRE` forbids that.
pub fn skip(what: &str, why: &str) -> bool {
    assert!(!required(what), "NACRE_TEST_REQUIRE={what}, but {why}");
    println!("skipped: {why}");
    false
}

/// Returns whether this process can mount FUSE file systems.
pub fn can_mount() -> bool {
    if std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        return skip("fuse", "/dev/fuse cannot be opened");
    }
    true
}

/// Returns whether this process is root and can mount, which most tests here need.
pub fn as_root() -> bool {
    if !is_root() {
        return skip("root", "only root can do this");
    }
    can_mount()
}

fn scratch_place() -> PathBuf {
    std::env::var_os("NACRE_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// Creates a directory that all users may enter, removed at the end.
pub fn scratch() -> tempfile::TempDir {
    let directory =
        tempfile::Builder::new().prefix("nacre-test.").tempdir_in(scratch_place()).expect("scratch directory");
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    directory
}

/// Returns the mount table; mount points of other programs may not be UTF-8.
pub fn mount_table() -> String {
    text(&std::fs::read("/proc/self/mountinfo").expect("the table of mounts"))
}

/// Mount points at or below a directory, the last mounted first.
pub fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    let table = mount_table();
    let mut found: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|path| PathBuf::from(path.replace("\\040", " ")))
        .filter(|path| path.starts_with(directory))
        .collect();
    found.reverse();
    found
}

/// One line of the mount table for a mount point: (type, source, options of the mount, options of
/// the file system).
pub fn mount_entry(mountpoint: &Path) -> Option<(String, String, String, String)> {
    let table = mount_table();
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == mountpoint.to_str())?;
    let (left, right) = line.split_once(" - ")?;
    let options = left.split(' ').nth(5)?.to_owned();
    let mut rest = right.split(' ');
    Some((rest.next()?.to_owned(), rest.next()?.to_owned(), options, rest.next()?.to_owned()))
}

/// Returns whether something is mounted exactly there. It reads the mount table, so that a hanging
/// mount does not block the test.
pub fn is_mounted(mountpoint: &Path) -> bool {
    mount_entry(mountpoint).is_some()
}

/// Unmounts by umount(8) or fusermount3, repeatedly: a mount is busy for a moment while a process
/// of another test starts or reads all mounts.
pub fn unmount_by(program: &str, words: &[&OsStr]) {
    eventually("the mount is not in use", || {
        let output = run(program, words);
        let said = text(&output.stderr);
        assert!(output.status.success() || said.to_lowercase().contains("busy"), "{program} {words:?}: {said}");
        output.status.success()
    });
}

/// Runs a program to its end, which must come within the time limit; returns its output, whatever
/// its status.
pub fn run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, arguments: impl IntoIterator<Item = S>) -> Output {
    finish(Command::new(program).args(arguments))
}

/// Runs a prepared command as [`run`] does.
pub fn finish(command: &mut Command) -> Output {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{shown}: {e}"));
    // A daemon may keep the pipes open: they are read while waiting, and only until the child
    // itself has ended.
    let (mut out, mut err) = (child.stdout.take().expect("stdout"), child.stderr.take().expect("stderr"));
    let (sender, receiver) = channel();
    let of_errors = sender.clone();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut out, &mut text);
        let _ = sender.send((true, text));
    });
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut err, &mut text);
        let _ = of_errors.send((false, text));
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("{shown} did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut output = Output { status, stdout: Vec::new(), stderr: Vec::new() };
    for _ in 0..2 {
        match receiver.recv_timeout(PATIENCE) {
            Ok((true, text)) => output.stdout = text,
            Ok((false, text)) => output.stderr = text,
            Err(_) => panic!("{shown} left a process behind that keeps its output open"),
        }
    }
    output
}

/// A process with its own mount namespace, which holds a mount, as containers and units with
/// private mounts do. It ends when dropped.
pub struct Namespace(Reaped);

impl Namespace {
    /// Starts the process. Mounts of other tests are not held.
    pub fn holding(mountpoint: &Path) -> Namespace {
        const LET_GO: &str = "while read -r id parent device root place rest; do
            case $place in \"$0\") ;; *) case $rest in *' - fuse'*) umount -l \"$place\" ;; esac ;; esac
        done </proc/self/mountinfo 2>/dev/null; exec cat";
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "unshare", "-m", "--propagation", "private", "sh", "-c", LET_GO])
            .arg(mountpoint)
            .stderr(Stdio::null())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        // The echoed byte shows that the namespace has been set up.
        let (input, output) = (child.stdin.as_mut().expect("stdin"), child.stdout.as_mut().expect("stdout"));
        std::io::Write::write_all(input, b".").expect("write");
        std::io::Read::read_exact(output, &mut [0]).expect("read");
        Namespace(Reaped(child))
    }

    /// Returns the path of a file as seen from that namespace.
    pub fn at(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.0.0.id())).join(path.strip_prefix("/").expect("an absolute path"))
    }
}

/// A child that is killed and waited for at the end.
pub struct Reaped(pub Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A bind mount, undone before the fixture removes what is below.
pub struct Bind(PathBuf);

impl Bind {
    pub fn new(from: &Path, to: &Path) -> Bind {
        assert!(run("mount", [Path::new("--bind"), from, to]).status.success());
        Bind(to.to_owned())
    }
}

impl Drop for Bind {
    fn drop(&mut self) {
        assert!(run("umount", [Path::new("-l"), &self.0]).status.success());
    }
}

/// Whether a process has ended, waited for or not.
pub fn is_gone(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Runs a shell script in a directory; panics unless it succeeds; returns its output.
pub fn sh(directory: &Path, script: &str) -> String {
    let output = finish(Command::new("sh").arg("-ec").arg(script).current_dir(directory).env("LC_ALL", "C"));
    assert!(output.status.success(), "`{script}` failed: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs a shell script as another user with these groups (ids); returns its exit code and its
/// output, errors included.
pub fn sh_as(directory: &Path, uid: u32, gid: u32, groups: &str, script: &str) -> (i32, String) {
    let groups = if groups.is_empty() { "--clear-groups".to_owned() } else { format!("--groups={groups}") };
    let arguments = [
        format!("--reuid={uid}"),
        format!("--regid={gid}"),
        groups,
        "--".into(),
        "sh".into(),
        "-c".into(),
        script.into(),
    ];
    let output = finish(Command::new("setpriv").args(arguments).current_dir(directory).env("LC_ALL", "C"));
    (output.status.code().unwrap_or(-1), text(&output.stdout) + &text(&output.stderr))
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory tree, a mount point, and what is mounted there.
pub struct Fixture {
    /// Its parent directory, for anything else a test needs.
    pub scratch: tempfile::TempDir,
    /// The directory that is shown.
    pub source: PathBuf,
    /// Where it is shown.
    pub mountpoint: PathBuf,
    daemons: Vec<Child>,
    watchdog: Option<Sender<()>>,
}

impl Fixture {
    /// A source and a mount point without a mount.
    pub fn bare() -> Fixture {
        Fixture::bare_in(scratch())
    }

    /// Creates a bare fixture on a file system of its own, where only the test is active. As root.
    pub fn bare_alone() -> Fixture {
        Fixture::bare_on("ext4")
    }

    /// Creates a bare fixture on a file system of this type.
    pub fn bare_on(kind: &str) -> Fixture {
        let (place, image) = (scratch(), tempfile::NamedTempFile::new_in(scratch_place()).expect("an image"));
        // The mount keeps the image after its file is removed. A machine that cannot mount it runs
        // the test on the common file system.
        if images::mounted(kind, image.path(), place.path()) {
            std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).expect("chmod");
        }
        Fixture::bare_in(place)
    }

    /// Creates a bare fixture in an existing directory.
    pub fn bare_in(scratch: tempfile::TempDir) -> Fixture {
        let (source, mountpoint) = (scratch.path().join("source"), scratch.path().join("mount"));
        for directory in [&source, &mountpoint] {
            std::fs::create_dir(directory).expect("mkdir");
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        }
        Fixture { scratch, source, mountpoint, daemons: Vec::new(), watchdog: None }
    }

    /// Mounts a mirror with these options.
    pub fn mirror(options: &[&str]) -> Fixture {
        let mut fixture = Fixture::bare();
        let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
        fixture.start(&[&["mirror"], options].concat(), source.as_ref(), &mountpoint);
        fixture
    }

    /// Mounts a mirror of a source that is filled first.
    pub fn mirror_of(options: &[&str], fill: impl FnOnce(&Path)) -> Fixture {
        let mut fixture = Fixture::bare();
        fill(&fixture.source);
        let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
        fixture.start(&[&["mirror"], options].concat(), source.as_ref(), &mountpoint);
        fixture
    }

    /// Mounts a stack in one line, where `SOURCE` stands for the source.
    pub fn stack(line: &str) -> Fixture {
        let mut fixture = Fixture::bare();
        let (line, mountpoint) = (line.replace("SOURCE", fixture.source.to_str().unwrap()), fixture.mountpoint.clone());
        fixture.start(&["mount"], line.as_ref(), &mountpoint);
        fixture
    }

    /// Creates a further directory next to the source.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.scratch.path().join(name);
        std::fs::create_dir(&path).expect("mkdir");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        path
    }

    /// Starts a daemon in the foreground and waits until it serves; returns its process id.
    pub fn start(&mut self, words: &[&str], what: &OsStr, mountpoint: &Path) -> u32 {
        let mut arguments: Vec<OsString> = words.iter().map(OsString::from).collect();
        arguments.extend(transport_words(words));
        arguments.extend([OsString::from("-f"), what.to_owned(), mountpoint.into()]);
        let before = mount_count(mountpoint);
        // The daemon is killed with its test, even if the test is killed. (setpriv execs the
        // daemon: the process id stays.)
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(nacre())
            .args(&arguments)
            .env("NACRE_STATE_DIR", self.state())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", nacre().display()));
        let start = Instant::now();
        // A dead mount at the mount point is removed before the new one appears: then the count may
        // never be seen to differ.
        while mount_count(mountpoint) == before && !(before > 0 && status::Status::is_told_by(mountpoint, child.id())) {
            if let Some(status) = child.try_wait().expect("wait") {
                panic!("nacre {arguments:?} ended at once: {status}");
            }
            if start.elapsed() > PATIENCE {
                let _ = child.kill();
                panic!("nacre {arguments:?} mounted nothing within {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let pid = child.id();
        self.daemons.push(child);
        self.watch();
        // The mount table lists the mount before the daemon is ready; a daemon that answers
        // requests is.
        status::Status::of(mountpoint);
        pid
    }

    /// Directory of the accounting of cages, outside of source and mount point.
    pub fn state(&self) -> PathBuf {
        self.scratch.path().join("state")
    }

    /// Runs a command of the program under test with this fixture's accounting directory.
    pub fn nacre<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        finish(Command::new(nacre()).args(arguments).env("NACRE_STATE_DIR", self.state()).env("LC_ALL", "C"))
    }

    /// Mounts a cage over the source at the mount point.
    pub fn cage(options: &[&str]) -> Fixture {
        Fixture::cage_of(options, |_| ())
    }

    /// Mounts a cage over a source that is filled first.
    pub fn cage_of(options: &[&str], fill: impl FnOnce(&Path)) -> Fixture {
        let mut fixture = Fixture::bare();
        fill(&fixture.source);
        fixture.start_cage(options);
        fixture
    }

    /// Mounts the cage, possibly again.
    pub fn start_cage(&mut self, options: &[&str]) -> u32 {
        let (source, mountpoint) = (self.source.clone(), self.mountpoint.clone());
        self.start(&[&["cage"], options].concat(), source.as_ref(), &mountpoint)
    }

    /// Kills the daemons when the test takes too long.
    fn watch(&mut self) {
        let pids: Vec<u32> = self.daemons.iter().map(Child::id).collect();
        let (sender, receiver) = channel::<()>();
        std::thread::spawn(move || {
            if receiver.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("the test took more than {LIMIT:?}: its daemons are killed");
                for pid in pids {
                    kill(pid, rustix::process::Signal::KILL);
                }
            }
        });
        self.watchdog = Some(sender);
    }

    /// Returns the process id of the daemon started last.
    pub fn pid(&self) -> u32 {
        self.daemons.last().expect("a daemon").id()
    }

    /// Sends the daemon started last a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        kill(self.pid(), signal);
    }

    /// Stops all threads of the daemon started last, until a SIGCONT.
    pub fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
        let is_stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
        eventually("all threads of the daemon are stopped", || {
            let mut threads =
                std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().map(|thread| thread.unwrap());
            threads.all(|thread| std::fs::read_to_string(thread.path().join("stat")).is_ok_and(is_stopped))
        });
    }

    /// Waits for the end of the daemon started last; returns its exit code (`None` after a signal).
    pub fn ended(&mut self) -> Option<i32> {
        let child = self.daemons.last_mut().expect("a daemon");
        let mut status = None;
        eventually("the daemon has ended", || {
            status = child.try_wait().expect("wait");
            status.is_some()
        });
        self.daemons.pop();
        status?.code()
    }

    /// Returns whether the daemon started last still runs.
    pub fn runs(&mut self) -> bool {
        self.daemons.last_mut().expect("a daemon").try_wait().expect("wait").is_none()
    }

    /// Unmounts by `nacre umount` and waits for the end of the daemon.
    pub fn unmount(&mut self) {
        // A child that another test is just starting has copies of this process' descriptors for a
        // moment.
        eventually("the mount is not in use", || {
            let output = run(nacre(), [OsStr::new("umount"), self.mountpoint.as_os_str()]);
            assert!(matches!(output.status.code(), Some(0 | 5)), "nacre umount: {}", text(&output.stderr));
            output.status.success()
        });
        assert_eq!(self.ended(), Some(0), "the daemon's exit code");
        assert!(!is_mounted(&self.mountpoint));
    }

    /// Returns a path in the mount.
    pub fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.mountpoint.join(name)
    }

    /// Returns the same path in the source.
    pub fn below(&self, name: impl AsRef<Path>) -> PathBuf {
        self.source.join(name)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // Daemons first: killing one ends every call that hangs in its mount.
        for child in &mut self.daemons {
            let _ = child.kill();
            let _ = child.wait();
        }
        clear(self.scratch.path());
    }
}

/// Detaches everything that is mounted below a directory.
pub fn clear(directory: &Path) {
    for mountpoint in mounts_below(directory) {
        if is_root() {
            let _ = rustix::mount::unmount(&mountpoint, rustix::mount::UnmountFlags::DETACH);
        } else {
            let _ = Command::new("fusermount3").arg("-uz").arg(&mountpoint).status();
        }
    }
}

fn mount_count(mountpoint: &Path) -> usize {
    mounts_below(mountpoint).len()
}

/// Returns the options that choose the transport under test, unless the caller's options name one.
pub fn transport_words(words: &[&str]) -> Vec<OsString> {
    let said = words.iter().any(|word| word.starts_with("--transport"));
    match std::env::var("NACRE_TEST_TRANSPORT") {
        Ok(transport) if !said && !transport.is_empty() => vec![OsString::from(format!("--transport={transport}"))],
        _ => Vec::new(),
    }
}

/// Returns the options of a mount without passthrough.
pub fn without_passthrough() -> &'static [&'static str] {
    static KNOWN: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    let known = KNOWN.get_or_init(|| text(&run(nacre(), ["mirror", "--help"]).stdout).contains("--passthrough"));
    // Rate limits that are never reached disable passthrough as well.
    if *known { &["--passthrough=off"] } else { &["--read-rate=1000G", "--write-rate=1000G"] }
}

/// Returns the worker process of a supervisor, or the one that it is starting, if there is one.
pub fn child_of(guardian: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{guardian}/task/{guardian}/children")).unwrap_or_default();
    children.split_whitespace().next_back().and_then(|child| child.parse().ok())
}

/// Sends a signal to a process that a test started.
pub fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

/// Returns the number of open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("proc").count()
}

/// Returns a field of a process's status in KiB (`VmRSS`, `RssAnon`).
pub fn memory(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("proc");
    let line = status.lines().find(|line| line.starts_with(field)).expect("field");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("number")
}

/// Returns the error number of a failed call.
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.expect_err("the call should have failed").raw_os_error().expect("an error of the system")
}
