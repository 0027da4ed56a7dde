//! Observation from outside: logs in a journal and in syslog, metrics as Prometheus reads them,
//! programs that are notified of events, `nacre top` on a terminal, and an ordinary user's view of
//! root's mounts.

mod exposition;

use crate::mounting::pools::Yard;
use crate::mounting::{Fixture, Reaped, as_root, eventually, finish, is_mounted, nacre, needs, run, scratch, sh, text};
use exposition::Exposition;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Something that takes datagrams as a journal or syslog does.
struct Taker {
    path: PathBuf,
    socket: UnixDatagram,
    got: Vec<String>,
}

impl Taker {
    fn new(path: PathBuf) -> Taker {
        let socket = UnixDatagram::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        socket.set_nonblocking(true).unwrap();
        Taker { path, socket, got: Vec::new() }
    }

    fn take(&mut self) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length) = self.socket.recv(&mut buffer) {
            self.got.push(String::from_utf8(buffer[..length].to_vec()).expect("UTF-8"));
        }
    }

    /// Waits for a message in which all of these are.
    fn wait(&mut self, words: &[&str]) -> String {
        let mut found = None;
        eventually(&format!("a message with {words:?}"), || {
            self.take();
            found = self.got.iter().find(|message| words.iter().all(|word| message.contains(word))).cloned();
            found.is_some()
        });
        found.unwrap()
    }
}

/// A name that tries to be a line of its own, a command for a terminal, and no text.
fn hostile() -> OsString {
    OsString::from_vec(b"m\nPRIORITY=0\x1b[31m \xff\"$(touch x)".to_vec())
}

fn mirror(taker: &Taker, variable: &str, options: &[&str], source: &Path, mountpoint: &Path) {
    let output =
        finish(Command::new(nacre()).arg("mirror").args(options).args([source, mountpoint]).env(variable, &taker.path));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn unmount(mountpoint: &Path) {
    let output = run(nacre(), [OsStr::new("umount"), mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn the_journal_hears_of_mounts_and_no_name_is_a_line() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let place = fixture.scratch.path().join(hostile());
    fs::create_dir(&place).unwrap();
    let mut journal = Taker::new(fixture.scratch.path().join("journal"));
    // By itself: there is a journal.
    mirror(&journal, "NACRE_JOURNAL_SOCKET", &[], &fixture.source, &place);
    let told = journal.wait(&["MESSAGE=mounted "]);
    for field in ["PRIORITY=6", "SYSLOG_IDENTIFIER=nacre"] {
        assert_eq!(told.lines().filter(|line| *line == field).count(), 1, "{told}");
    }
    assert!(!told.lines().any(|line| line == "PRIORITY=0"), "{told}");
    let escaped = "m\\x0aPRIORITY=0\\x1b[31m \\xff\"$(touch x)";
    let mountpoint = format!("NACRE_MOUNTPOINT={}/{escaped}", fixture.scratch.path().display());
    assert!(told.lines().any(|line| line == mountpoint), "{mountpoint} in {told}");
    // Names of users' files must not be logged.
    fs::write(place.join("private-name"), "x").unwrap();
    let _ = fs::read(place.join("no-such-name"));
    unmount(&place);
    journal.wait(&["MESSAGE=unmounted "]);
    for message in &journal.got {
        assert!(!message.contains("private-name") && !message.contains("no-such-name"), "{message}");
        assert!(message.lines().all(|line| line.contains('=')) && !message.contains('\x1b'), "{message}");
    }
}

#[test]
fn requests_are_logged_where_that_is_asked_for() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let mut syslog = Taker::new(fixture.scratch.path().join("syslog"));
    let options = ["--log-target=syslog", "--log=debug"];
    mirror(&syslog, "NACRE_SYSLOG_SOCKET", &options, &fixture.source, &fixture.mountpoint);
    fs::write(fixture.below("file"), "x").unwrap();
    let mut asker = Command::new("getfattr");
    asker.args(["-n", "user.none"]).arg(fixture.at("file")).stdout(Stdio::null()).stderr(Stdio::null());
    let asker = asker.spawn().unwrap();
    let pid = format!("pid={} ", asker.id());
    asker.wait_with_output().unwrap();
    syslog.wait(&["request operation=LOOKUP node=", &pid, "result=0 micros="]);
    let told = syslog.wait(&["request operation=GETXATTR node=", &pid, "result=-61 micros="]);
    assert!(told.starts_with("<31>") && told.contains(" nacre["), "{told}");
    unmount(&fixture.mountpoint);
    // Nowhere, where that is wanted.
    let before = syslog.got.len();
    syslog.take();
    let before = before.max(syslog.got.len());
    mirror(&syslog, "NACRE_SYSLOG_SOCKET", &["--log-target=none"], &fixture.source, &fixture.mountpoint);
    unmount(&fixture.mountpoint);
    syslog.take();
    assert_eq!(syslog.got.len(), before);
    let output = run(nacre(), ["mirror", "--log-target=nowhere", "a", "b"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    // Events are logged to a file; the removal of a dead mount is logged, too.
    let log = fixture.scratch.path().join("log");
    let target = format!("--log-target=file:{}", log.display());
    mirror(&syslog, "NACRE_SYSLOG_SOCKET", &[&target], &fixture.source, &fixture.mountpoint);
    let pid = crate::mounting::status::Status::of(&fixture.mountpoint).number("pid");
    crate::mounting::kill(u32::try_from(pid).unwrap(), rustix::process::Signal::KILL);
    eventually("its end", || crate::mounting::is_gone(u32::try_from(pid).unwrap()));
    mirror(&syslog, "NACRE_SYSLOG_SOCKET", &[&target], &fixture.source, &fixture.mountpoint);
    unmount(&fixture.mountpoint);
    eventually("the end in the log", || fs::read_to_string(&log).unwrap().contains(" INFO unmounted "));
    let log = fs::read_to_string(&log).unwrap();
    assert!(log.contains(" INFO mounted ") && log.contains("had lost its process and is taken away"), "{log}");
}

/// A directory of programs for events; each writes its variables to a file of its own.
struct Events {
    place: tempfile::TempDir,
}

impl Events {
    fn new() -> Events {
        let events = Events { place: scratch() };
        fs::create_dir(events.directory()).unwrap();
        events.program(
            "50-note",
            &format!("env -0 >>{0}/told; printf '\\001' >>{0}/told", events.place.path().display()),
        );
        events
    }

    fn directory(&self) -> PathBuf {
        self.place.path().join("events.d")
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.directory().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Returns the notifications so far: the variables of each call.
    fn told(&self) -> Vec<Vec<String>> {
        let told = fs::read(self.place.path().join("told")).unwrap_or_default();
        let calls = told.split(|byte| *byte == 1).filter(|call| !call.is_empty());
        calls.map(|call| call.split(|byte| *byte == 0).map(text).collect()).collect()
    }

    /// Those about an event of this kind.
    fn of(&self, kind: &str) -> Vec<Vec<String>> {
        let word = format!("NACRE_EVENT={kind}");
        self.told().into_iter().filter(|call| call.contains(&word)).collect()
    }

    fn environment(&self, command: &mut Command) {
        command.env("NACRE_EVENTS_DIR", self.directory());
    }
}

fn has(call: &[String], word: &str) -> bool {
    call.iter().any(|one| one == word)
}

#[test]
fn programs_are_told_of_each_event_of_a_pool_once() {
    needs!(as_root());
    let (yard, events) = (Yard::new(), Events::new());
    let disk = yard.path("disk");
    fs::create_dir(&disk).unwrap();
    // What is written to a full file system fails.
    let mounted = run("mount", ["-t", "tmpfs", "-o", "size=40m", "tmpfs", disk.to_str().unwrap()]);
    assert!(mounted.status.success());
    // One that hangs, and one that others can change, which is not run.
    events.program("10-slow", "sleep 1000");
    events.program("60-open", &format!("touch {}/open-was-run", events.place.path().display()));
    fs::set_permissions(events.directory().join("60-open"), fs::Permissions::from_mode(0o777)).unwrap();
    let name = yard.name("ev");
    let device = disk.join("a b;$(touch x)'\"\u{fc}.img");
    let mut journal = Taker::new(yard.path("journal"));
    let mut create = yard.command("nacre");
    events.environment(&mut create);
    create.env("NACRE_EVENTS_SECONDS", "1").env("NACRE_JOURNAL_SOCKET", &journal.path);
    create.args(["pool", "create", "--size", "256M", "-o", "failmode=continue", "-m"]);
    let output = finish(create.arg(yard.path("at")).arg(&name).arg(&device));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let pool = format!("NACRE_POOL={name}");
    journal.wait(&["MESSAGE=imported ", &pool]);

    yard.nacre(&["pool", "scrub", "-w", &name]);
    // The pool answers although the first program hangs.
    fs::write(yard.path("at").join("file"), "x").unwrap();
    yard.nacre(&["pool", "sync", &name]);
    eventually("the end of the scrub", || !events.of("scrub-end").is_empty());
    let told = events.of("scrub-end");
    assert!(has(&told[0], &pool) && has(&told[0], "NACRE_ERRORS=0"), "{told:?}");
    journal.wait(&["took too long and was killed", "10-slow"]);
    journal.wait(&["the program of an event has ended", "50-note"]);

    let mut file = fs::File::create(yard.path("at").join("large")).unwrap();
    let mut noise = fs::File::open("/dev/urandom").unwrap();
    let mut piece = vec![0; 1 << 20];
    for _ in 0..80 {
        noise.read_exact(&mut piece).unwrap();
        if file.write_all(&piece).and_then(|()| file.sync_data()).is_err() {
            break;
        }
    }
    drop(file);
    eventually("the fault", || !events.of("device-fault").is_empty());
    // Its name as it is.
    let faults = events.of("device-fault");
    let device = format!("NACRE_DEVICE={}", device.display());
    assert!(faults.iter().all(|call| has(call, &device) && has(call, &pool)), "{faults:?}");
    assert_eq!(faults.iter().filter(|call| has(call, "NACRE_STATE=FAULTED")).count(), 1, "{faults:?}");
    journal.wait(&["a device fails", "FAULTED"]);
    eventually("the suspended pool", || !events.of("pool-suspended").is_empty());
    assert_eq!((events.of("scrub-end").len(), events.of("pool-suspended").len()), (1, 1));
    assert!(!events.place.path().join("open-was-run").exists() && !Path::new("/x").exists());
    journal.wait(&["is not run", "60-open"]);
    let metrics = exposition::read(&yard.nacre(&["metrics"]));
    let errors = metrics.value("nacre_pool_device_errors_total", &[("pool", &name), ("kind", "write")]);
    assert!(errors.is_some_and(|errors| errors > 0.0), "{errors:?}");
    assert_eq!(metrics.value("nacre_pool_health", &[("pool", &name), ("state", "SUSPENDED")]), Some(1.0));
    yard.nacre(&["pool", "export", "-f", &name]);
    eventually("the unmount", || run("umount", [&disk]).status.success());
}

#[test]
fn programs_are_told_of_full_pools_and_cages() {
    needs!(as_root());
    let (yard, events) = (Yard::new(), Events::new());
    let name = yard.name("fu");
    let mut create = yard.command("nacre");
    events.environment(&mut create);
    create.args(["pool", "create", "--size", "64M", "-m"]).arg(yard.path("at")).arg(&name).arg(yard.path("image"));
    let output = finish(&mut create);
    assert!(output.status.success(), "{}", text(&output.stderr));
    sh(&yard.path("at"), "head -c 200M /dev/urandom >all 2>/dev/null || sync");
    eventually("a full pool", || events.of("pool-full").iter().any(|call| has(call, "NACRE_THRESHOLD=95")));
    let told = events.of("pool-full");
    assert!(told.iter().all(|call| has(call, &format!("NACRE_POOL={name}"))), "{told:?}");
    // On the way there, it may have been seen at a lower one.
    for threshold in ["80", "90", "95"] {
        let word = format!("NACRE_THRESHOLD={threshold}");
        assert!(told.iter().filter(|call| has(call, &word)).count() <= 1, "{told:?}");
    }

    let fixture = Fixture::bare();
    let mut cage = Command::new(nacre());
    events.environment(&mut cage);
    cage.args(["cage", "--size=1M", "--soft=50%"]).args([&fixture.source, &fixture.mountpoint]);
    let output = finish(cage.env("NACRE_STATE_DIR", fixture.state()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    sh(&fixture.mountpoint, "head -c 700k /dev/zero >some; head -c 2M /dev/zero >more 2>/dev/null || :");
    eventually("the soft limit", || !events.of("cage-soft").is_empty() && !events.of("cage-full").is_empty());
    let told = events.of("cage-soft");
    assert_eq!((told.len(), events.of("cage-full").len()), (1, 1), "{told:?}");
    assert!(has(&told[0], "NACRE_STATE=above"), "{told:?}");
    unmount(&fixture.mountpoint);
}

/// Names of metrics in a text.
fn names(text: &str) -> BTreeSet<&str> {
    let letter = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    text.split(|byte| !letter(byte)).filter(|word| word.starts_with("nacre_") && word.len() > 6).collect()
}

#[test]
fn metrics_are_what_prometheus_reads_and_dashboards_name() {
    needs!(as_root());
    let (yard, mut fixture) = (Yard::new(), Fixture::bare());
    let place = fixture.scratch.path().join(hostile());
    fs::create_dir(&place).unwrap();
    assert!(run(nacre(), [OsStr::new("mirror"), fixture.source.as_os_str(), place.as_os_str()]).status.success());
    fs::write(place.join("file"), "x").unwrap();
    let (name, _, at) = yard.create("me", &[]);
    fs::write(at.join("file"), vec![7; 1 << 20]).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    yard.nacre(&["pool", "scrub", "-w", &name]);
    let (caged, cage) = (fixture.directory("caged"), fixture.mountpoint.clone());
    fixture.start(&["cage", "--size=1M", "--soft=50%", "--inodes=100"], caged.as_os_str(), &cage);
    let union = fixture.directory("union");
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    let branches = format!("{}:{}", one.display(), two.display());
    assert!(run(nacre(), ["union", &branches, union.to_str().unwrap()]).status.success());

    let all = exposition::read(&yard.nacre(&["metrics"]));
    let pool = [("pool", name.as_str())];
    for figure in ["size_bytes", "allocated_bytes", "free_bytes", "commit_duration_seconds_count", "cache_limit_bytes"]
    {
        let value = all.value(&format!("nacre_pool_{figure}"), &pool);
        assert!(value.is_some_and(|value| value > 0.0), "{figure}: {value:?}");
    }
    assert_eq!(all.value("nacre_pool_health", &[("pool", &name), ("state", "ONLINE")]), Some(1.0));
    assert!(all.value("nacre_pool_scrub_age_seconds", &pool).is_some_and(|age| age < 600.0));
    assert!(all.value("nacre_pool_up", &pool) == Some(1.0));
    // A pool's mount has times of its requests, as all have.
    let times = all.samples.iter().filter(|sample| {
        sample.name == "nacre_request_duration_seconds_count" && sample.label("mountpoint") == at.to_str()
    });
    assert!(times.count() > 0, "{}", at.display());
    let shown = all.samples.iter().any(|sample| {
        sample.label("mountpoint").is_some_and(|at| at.ends_with("m\\x0aPRIORITY=0\\x1b[31m \\xff\"$(touch x)"))
    });
    assert!(shown, "the mount with a hostile name");
    let known = all.series();
    for file in ["dist/grafana/nacre.json", "dist/prometheus/alerts.yml"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)).unwrap();
        let named = names(&text);
        assert!(named.len() > 5, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} names what is not printed: {unknown:?}");
        if file.ends_with(".json") {
            serde_json::from_str::<serde_json::Value>(&text).unwrap();
        }
    }
    over_http(&all);
    for place in [&place, &union] {
        unmount(place);
    }
}

/// Returns the answer of an HTTP server to these bytes.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // It may have had enough before all is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    text(&answer)
}

fn over_http(before: &Exposition) {
    let mut server = Command::new(nacre())
        .args(["metrics", "--listen", "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let _server = Reaped(server);
    let address = line.trim_end().strip_prefix("nacre: http://").unwrap().strip_suffix("/metrics").unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("version=0.0.4"), "{head}");
    let kinds = exposition::read(body).kinds;
    assert!(before.kinds.keys().all(|name| kinds.contains_key(name)));
    for (request, status) in [
        (&b"POST /metrics HTTP/1.1\r\n\r\n"[..], "405"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "404"),
        (b"nonsense\r\n\r\n", "400"),
    ] {
        let answer = ask(address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    let long = [b"GET /metrics HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 16 << 10]].concat();
    assert!(ask(address, &long).starts_with("HTTP/1.1 431 "));
    // A silent client keeps no other waiting, and is disconnected.
    let mut silent: Vec<TcpStream> = (0..16).map(|_| TcpStream::connect(address).unwrap()).collect();
    eventually("too many", || ask(address, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 503 "));
    silent[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
    eventually("room again", || ask(address, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

/// Runs a command as nobody, of a copy of the program that all users can reach.
fn as_nobody(place: &Path, words: &[&OsStr], before: &str) -> (i32, String) {
    let program = place.join("nacre");
    if !program.exists() {
        assert!(run("cp", [nacre().as_path(), &program]).status.success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c"])
        .arg(format!("{before} exec setpriv --reuid=65534 --regid=65534 --clear-groups -- \"$0\" \"$@\""));
    let output = finish(command.arg(&program).args(words).env_remove("XDG_RUNTIME_DIR"));
    (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn ordinary_users_see_figures_of_roots_mounts_and_nothing_else() {
    needs!(as_root());
    let fixture = Fixture::mirror(&["--hide=secret-rule"]);
    fs::write(fixture.at("file"), "x").unwrap();
    let place = fixture.directory("program");
    let at = fixture.mountpoint.as_os_str();
    let status = |words: &[&str], before: &str| {
        let words: Vec<&OsStr> = ["status"].iter().chain(words).map(OsStr::new).collect();
        as_nobody(&place, &words, before)
    };
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let (code, told) = status(&["--json", mountpoint], "");
    assert_eq!(code, 0, "{told}");
    let report: serde_json::Value = serde_json::from_str(&told).unwrap();
    let report = &report[0];
    assert_eq!((report["mountpoint"].as_str(), report["uid"].as_u64()), (Some(mountpoint), Some(0)));
    assert!(report["requests"].as_u64().unwrap() > 0 && report["layers"].is_null(), "{told}");
    assert!(report["stack"].as_str().unwrap().starts_with("host") && !told.contains("secret-rule"), "{told}");
    // He has metrics of it, too, and can change nothing.
    let (code, told) = as_nobody(&place, &[OsStr::new("metrics"), at], "");
    assert!(code == 0 && exposition::read(&told).value("nacre_open_files", &[("mountpoint", mountpoint)]).is_some());
    for verb in ["umount", "reload"] {
        let (code, told) = as_nobody(&place, &[OsStr::new(verb), at], "");
        assert!(code != 0, "{verb}: {told}");
    }
    assert!(is_mounted(&fixture.mountpoint));
    // A user who cannot see the mount gets no report, although he finds the socket.
    let (code, told) = status(&["--all-users", "--json"], "");
    assert!(code == 0 && told.contains(mountpoint), "{told}");
    let hidden = format!("umount -l '{mountpoint}';");
    let (_, told) = status(&["--all-users", "--json"], &hidden);
    assert!(!told.contains(mountpoint), "{told}");
    // What root has for himself stays his.
    let private = Fixture::mirror(&["--no-allow-other"]);
    let (code, told) = status(&[private.mountpoint.to_str().unwrap()], "");
    assert_eq!(code, 3, "{told}");
    assert!(!status(&["--all-users", "--json"], "").1.contains(private.mountpoint.to_str().unwrap()));
}

/// A terminal of 80 by 24 that a program runs in.
struct Terminal(String);

impl Terminal {
    fn run(name: &str, command: &str) -> Terminal {
        let terminal = Terminal(format!("{name}-{}", std::process::id()));
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", command]);
        terminal
    }

    fn tmux(&self, words: &[&str]) -> String {
        let output = finish(Command::new("tmux").args(["-L", &self.0]).args(words).env("LC_ALL", "C.UTF-8"));
        assert!(output.status.success(), "tmux {words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn shows(&self, what: &str) -> String {
        let mut screen = String::new();
        eventually(what, || {
            screen = self.screen();
            screen.contains(what)
        });
        screen
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.0, "kill-server"]).stderr(Stdio::null()).status();
    }
}

#[test]
fn top_is_driven_by_keys_and_leaves_the_terminal_as_it_was() {
    needs!(as_root());
    let (yard, fixture) = (Yard::new(), Fixture::bare());
    let place = fixture.scratch.path().join(hostile());
    fs::create_dir(&place).unwrap();
    assert!(run(nacre(), [OsStr::new("mirror"), fixture.source.as_os_str(), place.as_os_str()]).status.success());
    let (name, device, _) = yard.create("to", &[]);
    let program = nacre();
    let command = format!(
        "sh -c 'stty -a >{0}/before; echo the shell; sh -c \"echo \\$\\$ >{0}/pid; exec {1} top -d 0.2\"; echo ended with $?; \
         stty -a >{0}/after; echo done; sleep 1000'",
        fixture.scratch.path().display(),
        program.display()
    );
    let terminal = Terminal::run("nacre-top", &command);
    let screen = terminal.shows("MOUNTPOINT ");
    // The end of its path, as far as there is room.
    assert!(screen.contains("0\\x1b[31m \\xff\"$(touch x)") && !screen.contains("the shell"), "{screen}");
    assert!(screen.lines().all(|line| line.chars().count() <= 80) && screen.lines().count() <= 24, "{screen}");
    terminal.keys(&["2"]);
    terminal.shows("REQ/S-");
    terminal.keys(&["2"]);
    terminal.shows("REQ/S+");
    terminal.keys(&["Tab"]);
    let screen = terminal.shows("HEALTH");
    assert!(screen.contains(&name) && screen.contains("ONLINE"), "{screen}");
    terminal.keys(&["d"]);
    let screen = terminal.shows("DEVICE ");
    let end = device.file_name().unwrap().to_str().unwrap();
    assert!(screen.contains(end), "{screen}");
    terminal.keys(&["c"]);
    eventually("cages", || !terminal.screen().contains("DEVICE"));
    terminal.keys(&["q"]);
    let screen = terminal.shows("done");
    assert!(screen.contains("the shell") && screen.contains("ended with 0"), "{screen}");
    let stty = |name: &str| fs::read_to_string(fixture.scratch.path().join(name)).unwrap();
    assert_eq!(stty("after"), stty("before"));
    drop(terminal);
    // The same when it is terminated by a signal.
    let terminal = Terminal::run("nacre-term", &command);
    terminal.shows("MOUNTPOINT ");
    crate::mounting::kill(stty("pid").trim().parse().unwrap(), rustix::process::Signal::TERM);
    let screen = terminal.shows("done");
    assert!(screen.contains("the shell") && screen.contains("ended with 0"), "{screen}");
    assert_eq!(stty("after"), stty("before"));
    // Plain, for scripts.
    let plain = yard.nacre(&["top", "--batch", "-n", "2", "-d", "0.1", "--tab=devices"]);
    assert_eq!(plain.matches("DEVICE").count(), 2, "{plain}");
    assert!(plain.contains(end) && !plain.contains('\x1b'), "{plain}");
    unmount(&place);
}
