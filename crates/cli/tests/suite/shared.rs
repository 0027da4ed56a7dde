//! Several mounts in one process (`--daemon=NAME`): each is as it would be alone, and they come and
//! go independently of each other.

use crate::mounting::status::Status;
use crate::mounting::{
    as_root, clear, descriptors, eventually, finish, is_mounted, kill, nacre, needs, scratch, sh, text,
};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Directories, a name that no other test has, and whatever is mounted: taken away at the end.
struct Group {
    scratch: tempfile::TempDir,
    name: String,
}

impl Group {
    fn new() -> Group {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Group { scratch: scratch(), name }
    }

    fn option(&self) -> String {
        format!("--daemon={}", self.name)
    }

    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        // What a killed process left there says that it is not there.
        if !is_mounted(&path) {
            fs::create_dir_all(&path).unwrap();
        }
        path
    }

    /// A command in the directory of the group.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(nacre());
        command.args(words).current_dir(self.scratch.path()).env("LC_ALL", "C");
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        finish(&mut self.command(words))
    }

    /// Mounts in this process' group, which has to succeed; returns the messages.
    fn mount(&self, words: &[&str]) -> String {
        let output = self.run(&[words, &[&self.option()]].concat());
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
        text(&output.stderr)
    }

    /// A mirror of a directory of its own, which has a file with its name.
    fn mirror(&self, name: &str) -> PathBuf {
        let (source, mountpoint) = (self.directory(&format!("of-{name}")), self.directory(name));
        fs::write(source.join("file"), name).unwrap();
        assert_eq!(self.mount(&["mirror", "--coherence=exclusive", &format!("of-{name}"), name]), "");
        assert_eq!(fs::read_to_string(mountpoint.join("file")).unwrap(), name);
        mountpoint
    }

    fn umount(&self, name: &str) {
        // A child that another test just starts holds copies of this process' descriptors for a
        // moment.
        eventually("the mount is not in use", || {
            let output = self.run(&["umount", name]);
            assert!(matches!(output.status.code(), Some(0 | 5)), "{}", text(&output.stderr));
            // Another test's mount namespace may have a copy of the mount: then a message says so.
            output.status.success() || text(&output.stderr).contains("is unmounted, but other mount namespaces")
        });
        assert!(!is_mounted(&self.at(name)));
    }

    /// The process that serves a mount.
    fn process(&self, name: &str) -> u32 {
        u32::try_from(Status::of(&self.at(name)).number("pid")).unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        clear(self.scratch.path());
    }
}

fn runs(pid: u32) -> bool {
    // What has ended and is still to be waited for does not run.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn ended(pid: u32) {
    eventually("the process ends with its last mount", || !runs(pid));
}

/// Returns the proportional set size of a process, KiB.
fn proportional(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

#[test]
fn fifty_unions_have_one_process() {
    needs!(as_root());
    const UNIONS: usize = 50;
    let group = Group::new();
    for lower in 1..=4 {
        let directory = group.directory(&format!("lower{lower}"));
        fs::write(directory.join(format!("of{lower}")), "x").unwrap();
        fs::write(directory.join("all"), lower.to_string()).unwrap();
    }
    for union in 0..UNIONS {
        group.directory(&format!("upper{union}"));
        let mountpoint = format!("m{union}");
        group.directory(&mountpoint);
        let branches = format!("upper{union}=rw:lower1=ro:lower2=ro:lower3=ro:lower4=ro");
        assert_eq!(group.mount(&["union", &branches, &mountpoint, "-o", "udba=none"]), "");
    }
    let pid = group.process("m0");
    for union in 0..UNIONS {
        let mountpoint = group.at(format!("m{union}"));
        fs::write(mountpoint.join("own"), format!("of {union}")).unwrap();
        fs::write(mountpoint.join("all"), "changed").unwrap();
        assert_eq!(fs::read(mountpoint.join("of4")).unwrap(), b"x");
    }
    for union in 0..UNIONS {
        let upper = group.at(format!("upper{union}"));
        assert_eq!(fs::read_to_string(upper.join("own")).unwrap(), format!("of {union}"));
        assert_eq!(fs::read(upper.join("all")).unwrap(), b"changed");
        assert_eq!(fs::read_dir(group.at(format!("m{union}"))).unwrap().count(), 6);
    }
    assert_eq!(fs::read(group.at("lower1/all")).unwrap(), b"1");
    let memory = proportional(pid);
    assert!(memory < 3 * 1024 * UNIONS as u64, "{memory} KiB");
    let cpus = std::thread::available_parallelism().unwrap().get();
    let (threads, files) = (threads(pid), descriptors(pid));
    println!("{UNIONS} unions: {memory} KiB, {threads} threads, {files} descriptors");
    assert!(threads <= 10 + UNIONS * (12 + 4 * cpus), "{threads}");
    assert!(files <= 50 + UNIONS * (40 + 6 * cpus), "{files}");
    // Each answers for itself; on a busy machine not at once, and then the next process is asked.
    let prefix = format!("{}/m", group.scratch.path().display());
    let own = |line: &&str| line.starts_with(&prefix) && line.ends_with(&format!("\t{pid}"));
    eventually("all are told of", || {
        let told = group.run(&["status", "-H", "-o", "mountpoint,pid"]);
        text(&told.stdout).lines().filter(own).count() == UNIONS
    });
    for union in 0..UNIONS {
        assert!(runs(pid));
        group.umount(&format!("m{union}"));
    }
    ended(pid);
}

#[test]
fn commands_of_mounts_find_theirs() {
    needs!(as_root());
    let group = Group::new();
    group.mirror("a");
    for directory in ["up", "low", "more", "u"] {
        group.directory(directory);
    }
    fs::write(group.at("low/file"), "x").unwrap();
    group.mount(&["union", "up=rw:low=ro", "u"]);
    let pid = group.process("a");
    assert_eq!(group.process("u"), pid);
    // Rules of one, branches of the other.
    let output = group.run(&["reload", "a", "--perms=a-w"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    eventually("the rules are in force", || sh(group.scratch.path(), "stat -c %a a/file").trim() == "444");
    let output = group.run(&["reload", "u", "--perms=a-w"]);
    assert!(text(&output.stderr).contains("no rules that could be changed"), "{}", text(&output.stderr));
    fs::write(group.at("more/added"), "y").unwrap();
    assert!(group.run(&["union", "add", "u", "more=ro"]).status.success());
    assert_eq!(fs::read(group.at("u/added")).unwrap(), b"y");
    let told = text(&group.run(&["union", "list", "-H", "-o", "branch,mode", "u"]).stdout);
    assert_eq!(told.lines().filter(|line| line.ends_with("\tro")).count(), 2, "{told}");
    let output = group.run(&["union", "where", "u/file"]);
    assert_eq!(text(&output.stdout).trim(), group.at("low/file").to_str().unwrap());
    assert!(text(&group.run(&["metrics", "u"]).stdout).contains(group.at("u").to_str().unwrap()));
    assert_eq!(text(&group.run(&["top", "--once", "a"]).stdout).lines().filter(|line| line.contains("/a")).count(), 1);
    // All mounts read users and groups again, and none ends.
    kill(pid, Signal::HUP);
    group.umount("a");
    assert_eq!(fs::read(group.at("u/file")).unwrap(), b"x");
    kill(pid, Signal::TERM);
    ended(pid);
    assert!(!is_mounted(&group.at("u")));
}

#[test]
fn what_goes_wrong_is_told_as_by_a_process_alone() {
    needs!(as_root());
    let group = Group::new();
    group.mirror("kept");
    for directory in ["a", "b", "b/in", "m"] {
        group.directory(directory);
    }
    fs::write(group.at("bad.toml"), "[[layer]]\nlayer = \"nothing\"\n").unwrap();
    fs::write(group.at("file"), "").unwrap();
    for words in [
        &["mirror", "missing", "m"][..],
        &["mirror", "a", "missing"],
        &["mirror", "file", "m"],
        &["mirror", "--force-user=nosuchuser", "a", "m"],
        &["mirror", "--map-passwd=missing", "a", "m"],
        &["mirror", "--log-file=/missing/log", "a", "m"],
        &["mirror", "--acl=off", "-o", "context=nonsense", "a", "m"],
        &["mount", "bad.toml", "m"],
        &["mount", "missing.toml", "m"],
        &["mount", "host:a | remap:force-user=nosuchuser", "m"],
        &["union", "a=rw:missing=ro", "m"],
        &["union", "a=rw:b=ro", "b/in"],
        &["union", "a=rw:b=ro:b/in=ro", "m"],
        &["union", "a=rw:b=rx", "m"],
        &["union", "a=rw:b=ro", "m", "-o", "create=best"],
    ] {
        let alone = group.run(words);
        let together = group.run(&[words, &[&group.option()]].concat());
        assert!(alone.status.code().is_some_and(|code| code > 0), "{words:?}");
        assert_eq!(together.status.code(), alone.status.code(), "{words:?}");
        assert_eq!(text(&together.stderr), text(&alone.stderr), "{words:?}");
        assert!(!is_mounted(&group.at("m")), "{words:?}");
    }
    // Warnings of a new mount are printed, too.
    sh(group.scratch.path(), "chmod 700 b; chown 5:5 b");
    let words = ["union", "a=rw:b=ro", "m", "-o", "warn_perm"];
    let alone = group.run(&words);
    assert!(text(&alone.stderr).contains("WARN"), "{}", text(&alone.stderr));
    group.umount("m");
    assert_eq!(group.mount(&words), text(&alone.stderr));
    assert_eq!(group.process("m"), group.process("kept"));
    // The two options exclude each other.
    let output = group.run(&["mirror", "a", "m", "-f", &group.option()]);
    assert_eq!((output.status.code(), text(&output.stderr).contains("in the background")), (Some(2), true));
    assert_eq!(group.run(&["mirror", "a", "m", "--daemon=a/b"]).status.code(), Some(2));
    let output = group.run(&["mount", "host:a | cage:size=1G", "m", &group.option()]);
    assert_eq!(
        (output.status.code(), text(&output.stderr).contains("a cage has a process to itself")),
        (Some(2), true)
    );
}

#[test]
fn first_commands_at_the_same_time_start_one_process() {
    needs!(as_root());
    let group = Group::new();
    let names: Vec<String> = (0..8).map(|number| format!("m{number}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| group.mirror(name));
        }
    });
    let pid = group.process("m0");
    for name in &names {
        assert_eq!(group.process(name), pid);
    }
    // The last mounts end while others begin: each new one is served, by the old process or by a
    // new one.
    for round in 0..10 {
        let next = format!("n{round}");
        std::thread::scope(|scope| {
            scope.spawn(|| group.mirror(&next));
            for name in &names {
                if is_mounted(&group.at(name)) {
                    group.umount(name);
                }
            }
            if round > 0 {
                group.umount(&format!("n{}", round - 1));
            }
        });
    }
    let pid = group.process("n9");
    group.umount("n9");
    ended(pid);
}

#[test]
fn who_is_not_alike_has_another_process() {
    needs!(as_root());
    let group = Group::new();
    group.mirror("a");
    let (pid, program, option) = (group.process("a"), nacre(), group.option());
    for directory in ["src", "masked", "lesser", "apart"] {
        group.directory(directory);
    }
    let program = program.display();
    let (words, place) = (format!("mirror --coherence=exclusive {option} src"), group.scratch.path());
    for (mountpoint, script) in [
        ("masked", format!("umask 027; {program} {words} masked")),
        (
            "lesser",
            format!("setpriv --groups 5,6 --bounding-set=-sys_boot --inh-caps=-sys_boot -- {program} {words} lesser"),
        ),
        ("apart", format!("unshare -m --propagation private -- {program} {words} apart")),
    ] {
        sh(place, &script);
        let other = group.process(mountpoint);
        assert_ne!(other, pid, "{mountpoint}");
        group.umount(mountpoint);
        ended(other);
    }
    // No other user may reach the socket.
    let socket = sh(place, &format!("ls /run/nacre/{}-*.shared", group.name));
    let (code, said) = crate::mounting::sh_as(place, 65_534, 65_534, "", &format!("ls {}", socket.trim()));
    assert!(code != 0 && said.contains("denied"), "{said}");
    group.umount("a");
    ended(pid);
    assert!(!Path::new(socket.trim()).exists());
}

#[test]
fn mounts_that_would_meet_stay_apart() {
    needs!(as_root());
    let group = Group::new();
    for directory in ["up", "low", "other", "u", "v", "w", "low/in"] {
        group.directory(directory);
    }
    group.mount(&["union", "up=rw:low=ro", "u"]);
    let pid = group.process("u");
    for (words, mountpoint) in [
        // One changes what the other shows.
        (&["mirror", "up", "v"][..], "v"),
        (&["union", "other=rw:up=ro", "v"], "v"),
        // One shows the other.
        (&["mirror", "u", "v"], "v"),
        (&["mirror", ".", "v"], "v"),
        (&["mirror", "other", "low/in"], "low/in"),
    ] {
        let said = group.mount(words);
        assert!(said.contains("nacre: served by a process of its own: "), "{words:?}: {said}");
        let other = group.process(mountpoint);
        assert_ne!(other, pid, "{words:?}");
        group.umount(mountpoint);
        ended(other);
    }
    // A change is seen through the other mount at once, as ever.
    group.mount(&["mirror", "up", "v"]);
    fs::write(group.at("u/new"), "x").unwrap();
    eventually("the change is seen", || fs::read(group.at("v/new")).is_ok_and(|read| read == b"x"));
    // Nor do they meet later.
    group.mirror("w");
    assert_eq!(group.process("w"), pid);
    let output = group.run(&["union", "add", "u", "of-w=ro"]);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("this union shares a process with others"), "{}", text(&output.stderr));
    assert!(group.run(&["union", "add", "u", "other=ro"]).status.success());
    let output = group.run(&["mirror", "other", "low/in", &group.option()]);
    assert!(text(&output.stderr).contains("a process of its own"), "{}", text(&output.stderr));
    group.umount("low/in");
    assert!(group.run(&["union", "del", "u", "other"]).status.success());
}

#[test]
fn changes_below_reach_all_that_show_them() {
    needs!(as_root());
    let group = Group::new();
    group.directory("low");
    fs::write(group.at("low/file"), "old").unwrap();
    for union in ["u", "v", "w"] {
        group.directory(union);
        group.directory(&format!("up-{union}"));
        group.mount(&["union", &format!("up-{union}=rw:low=ro"), union]);
        assert_eq!(fs::read(group.at(union).join("file")).unwrap(), b"old");
        assert!(!group.at(union).join("new").exists());
    }
    let pid = group.process("u");
    let mut shown = vec!["u", "v", "w"];
    for text in ["first", "second", "third"] {
        fs::write(group.at("low/file"), text).unwrap();
        fs::write(group.at("low/new"), text).unwrap();
        for union in &shown {
            assert_eq!(group.process(union), pid);
            let sees = |name: &str| fs::read_to_string(group.at(union).join(name)).is_ok_and(|read| read == text);
            eventually("changes are seen", || sees("file") && sees("new"));
        }
        // The remaining mounts still receive events.
        let gone = shown.remove(0);
        group.umount(gone);
    }
    ended(pid);
}

#[test]
fn who_is_killed_takes_all_and_all_can_be_mounted_again() {
    needs!(as_root());
    let group = Group::new();
    let names = ["a", "b", "c"];
    names.iter().for_each(|name| drop(group.mirror(name)));
    let pid = group.process("a");
    kill(pid, Signal::KILL);
    ended(pid);
    // Its other threads and its rings may exist for a moment longer.
    for name in names {
        eventually("the mount is dead", || {
            rustix::fs::statfs(group.at(name)).is_err_and(|error| error == rustix::io::Errno::NOTCONN)
        });
    }
    let status = group.run(&["status"]);
    let named = group.run(&["status", "b"]);
    assert_eq!(
        (named.status.code(), text(&named.stderr).contains("has lost its process")),
        (Some(3), true),
        "{}",
        text(&named.stderr)
    );
    for name in names {
        assert_eq!(crate::mounting::errno(fs::metadata(group.at(name).join("file"))), 107, "{name}");
        let line = format!("nacre: the mount at {} has lost its process; ", group.at(name).display());
        assert!(text(&status.stderr).contains(&line), "{}", text(&status.stderr));
    }
    for name in ["a", "b"] {
        group.mirror(name);
    }
    assert_eq!(group.process("a"), group.process("b"));
    group.umount("c");
    assert!(!text(&group.run(&["status"]).stderr).contains(group.at("c").to_str().unwrap()));
}

#[test]
fn each_mount_has_a_log() {
    needs!(as_root());
    let group = Group::new();
    group.mirror("silent");
    for name in ["a", "b"] {
        group.directory(name);
        let log = format!("--log-file={name}.log");
        group.mount(&["mirror", "--log=info", &log, "of-silent", name, "-r", "--coherence=exclusive", "-o", "nofail"]);
    }
    // Both show what the silent one may change: they have processes of their own, and are alone
    // there.
    let pid = group.process("silent");
    assert_ne!(group.process("a"), pid);
    for name in ["x", "y"] {
        for directory in [name.to_owned(), format!("of-{name}")] {
            group.directory(&directory);
        }
        let log = format!("--log-file={name}.log");
        group.mount(&["mirror", "--log=info", &log, &format!("of-{name}"), name]);
        assert_eq!(group.process(name), pid);
    }
    assert!(group.run(&["reload", "x"]).status.success());
    group.umount("x");
    let read = |name: &str| fs::read_to_string(group.at(format!("{name}.log"))).unwrap();
    let unmounted = |name: &str| read(name).contains(&format!("unmounted mountpoint={}", group.at(name).display()));
    // The command waits for the end of the mount, but not for good.
    eventually("the end is logged", || unmounted("x"));
    assert!(read("x").contains("rules are reloaded"), "{}", read("x"));
    assert!(!read("y").contains("unmounted") && !read("y").contains("rules are reloaded"), "{}", read("y"));
    group.umount("y");
    eventually("the end is logged", || unmounted("y"));
    assert!(!read("x").contains(group.at("y").to_str().unwrap()));
}

#[test]
fn nothing_is_left_of_what_is_unmounted() {
    needs!(as_root());
    let group = Group::new();
    group.mirror("kept");
    let pid = group.process("kept");
    for directory in ["up", "low", "u"] {
        group.directory(directory);
    }
    fs::write(group.at("low/file"), "x").unwrap();
    let round = || {
        group.mount(&["union", "up=rw:low=ro", "u"]);
        fs::write(group.at("u/file"), "changed").unwrap();
        assert!(fs::read_dir(group.at("u")).unwrap().count() >= 1);
        assert_eq!(group.process("u"), pid);
        group.umount("u");
    };
    round();
    let settled = |what: &str, most: (usize, usize)| {
        eventually(what, || threads(pid) <= most.0 && descriptors(pid) <= most.1);
    };
    // Threads of commands end a moment after their answers.
    let mut least = (threads(pid), descriptors(pid));
    for _ in 0..20 {
        least = (least.0.min(threads(pid)), least.1.min(descriptors(pid)));
        std::thread::yield_now();
    }
    for _ in 0..10 {
        round();
    }
    settled("threads and descriptors are given back", (least.0 + 1, least.1 + 1));
    // What lies below is free when the command returns.
    group.mount(&["union", "up=rw:low=ro", "u"]);
    group.umount("u");
    group.mount(&["union", "up=rw:low=ro", "u"]);
    group.umount("u");
    assert_eq!(fs::read_to_string(group.at("kept/file")).unwrap(), "kept");
}

#[test]
fn other_command_lines_know_it() {
    needs!(as_root());
    let group = Group::new();
    for directory in ["low", "up", "work", "merged", "src", "m", "n"] {
        group.directory(directory);
    }
    fs::write(group.at("low/file"), "x").unwrap();
    let words = format!("lowerdir=low,upperdir=up,workdir=work,daemon={}", group.name);
    let output = group.run(&["fuse-overlayfs", "-o", &words, "merged"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    fs::write(group.at("merged/file"), "changed").unwrap();
    assert_eq!(fs::read(group.at("up/file")).unwrap(), b"changed");
    let pid = group.process("merged");
    // As mount(8) calls it, and as bindfs.
    for (name, mountpoint) in [("mount.fuse.nacre", "m"), ("bindfs", "n")] {
        std::os::unix::fs::symlink(nacre(), group.at(name)).unwrap();
        let source = group.directory(&format!("of-{mountpoint}"));
        fs::write(source.join("file"), name).unwrap();
        let mut command = Command::new(group.at(name));
        command
            .args([source.as_os_str(), OsStr::new(mountpoint), OsStr::new("-o")])
            .arg(format!("daemon={}", group.name));
        let output = finish(command.current_dir(group.scratch.path()));
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        assert_eq!(fs::read_to_string(group.at(mountpoint).join("file")).unwrap(), name);
        assert_eq!(group.process(mountpoint), pid);
    }
    kill(pid, Signal::TERM);
    ended(pid);
    assert!(["merged", "m", "n"].iter().all(|name| !is_mounted(&group.at(name))));
}
