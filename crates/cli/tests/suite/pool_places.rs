//! Mount points of a pool's file systems: the right mount is unmounted, in an order that hides
//! nothing, and a process that waits for a mount of its own can be killed.

use crate::mounting::{
    Fixture, Namespace, Reaped, as_root, eventually, finish, is_mounted, kill, needs,
    pools::{Pool, Yard},
    text,
};
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::Signal,
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, lchown, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

impl Pool {
    fn told_by(&self, family: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.run(&[&[family], arguments].concat());
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }

    fn ok(&self, family: &str, arguments: &[&str]) -> String {
        self.told(&[&[family], arguments].concat())
    }

    /// Returns the file system of a path, as df(1) reports it.
    fn shown_at(&self, name: &str) -> String {
        let output = finish(Command::new("df").arg("--output=source").arg(self.at(name)));
        text(&output.stdout).lines().last().unwrap_or_default().to_owned()
    }

    /// Returns the mount table's entry of a file system: mount id, mount point.
    fn mount_of(&self, name: &str) -> Option<(u64, PathBuf)> {
        let table = crate::mounting::mount_table();
        let source = format!(" {} ", self.of(name));
        let line = table.lines().find(|line| line.contains(&source))?;
        let fields: Vec<&str> = line.split(' ').collect();
        Some((fields[0].parse().unwrap(), fields[4].into()))
    }
}

/// A process that sits in a directory.
fn sitting(directory: &Path) -> Reaped {
    let mut command = Command::new("sleep");
    let child = command.arg("600").current_dir(directory).stdin(Stdio::null()).spawn().unwrap();
    let (pid, exe) = (child.id(), Path::new("sleep"));
    // It is in the directory before it is another program.
    eventually("the process", || {
        fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|now| now.ends_with(exe) || now.ends_with("coreutils"))
    });
    Reaped(child)
}

#[test]
fn a_refused_operation_leaves_all_mounts_where_they_were() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    for name in ["data", "home", "home/bob"] {
        pool.ok("fs", &["create", &pool.of(name)]);
    }
    let all = ["data", "home", "home/bob"];
    let mounts = || all.map(|name| pool.mount_of(name));
    let before = mounts();
    let elsewhere = format!("mountpoint={}", pool.place.path().join("elsewhere").display());
    let operations: [(&str, Vec<&str>); 6] = [
        ("pool", vec!["export", &pool.name]),
        ("fs", vec!["unmount", &pool.name]),
        ("fs", vec!["destroy", "-r", &pool.name]),
        ("fs", vec!["set", "canmount=off", &pool.name]),
        ("fs", vec!["set", &elsewhere, &pool.name]),
        ("pool", vec!["destroy", &pool.name]),
    ];
    // Of one on which nothing is mounted the kernel says before anything is done that it is in use.
    for (busy, untouched) in [("data", true), ("home/bob", true), ("home", false)] {
        let _sitting = sitting(&pool.at(busy));
        for (family, arguments) in &operations {
            let (code, said) = pool.told_by(family, arguments);
            assert!(code != Some(0) && said.contains("busy"), "{arguments:?}: {said}");
            for name in all {
                assert_eq!(pool.shown_at(name), pool.of(name), "{arguments:?} with {busy} in use");
            }
            if untouched {
                assert_eq!(mounts(), before, "{arguments:?}");
            }
        }
    }
    eventually("an export", || pool.told_by("pool", &["export", &pool.name]).0 == Some(0));
    assert_eq!(mounts(), [const { None }; 3]);
    pool.import();
}

#[test]
fn what_is_hidden_counts_as_not_mounted() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    for name in ["home", "home/bob"] {
        pool.ok("fs", &["create", &pool.of(name)]);
    }
    let seen = || pool.ok("fs", &["get", "-H", "-o", "value", "mounted", &pool.of("home/bob")]).trim().to_owned();
    // The pool hides none of its own.
    pool.ok("fs", &["unmount", &pool.of("home")]);
    pool.ok("fs", &["mount", &pool.of("home/bob")]);
    pool.ok("fs", &["mount", &pool.of("home")]);
    assert_eq!((pool.shown_at("home/bob"), seen()), (pool.of("home/bob"), "yes".to_owned()));
    // Others do.
    mount("none", pool.at("home"), "tmpfs", MountFlags::empty(), None).unwrap();
    assert_eq!(seen(), "no");
    let (code, said) = pool.told_by("fs", &["mount", &pool.of("home/bob")]);
    assert!(code == Some(5) && said.contains("over a directory above it"), "{said}");
    let (code, said) = pool.told_by("pool", &["export", &pool.name]);
    assert!(code == Some(5) && said.contains("over a directory above it"), "{said}");
    let (code, said) = pool.told_by("fs", &["unmount", "-f", &pool.of("home/bob")]);
    assert!(code == Some(5) && said.contains("over a directory above it"), "{said}");
    unmount(pool.at("home"), UnmountFlags::empty()).unwrap();
    assert_eq!((pool.shown_at("home/bob"), seen()), (pool.of("home/bob"), "yes".to_owned()));
    fs::write(pool.at("home/bob/works"), "still").unwrap();
    // A parent that takes the place above it while it is there: what is below steps aside for the
    // moment.
    let above = pool.place.path().join("above");
    fs::create_dir_all(above.join("home/bob")).unwrap();
    pool.ok("fs", &["set", &format!("mountpoint={}", above.join("home/bob").display()), &pool.of("home/bob")]);
    pool.ok("fs", &["set", &format!("mountpoint={}", above.display()), &pool.of("home")]);
    assert_eq!(seen(), "yes");
    pool.ok("pool", &["export", &pool.name]);
    pool.import();
    assert_eq!(seen(), "yes");
}

/// A mount that only another mount namespace or an open file still holds is none here: nothing may
/// be written below its place by mistake.
#[test]
fn what_is_held_elsewhere_counts_as_not_mounted() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    pool.ok("fs", &["create", &pool.of("home")]);
    let seen = || pool.ok("fs", &["get", "-H", "-o", "value", "mounted", &pool.of("home")]).trim().to_owned();
    let mut held = fs::File::create(pool.at("home").join("file")).unwrap();
    unmount(pool.at("home"), UnmountFlags::DETACH).unwrap();
    assert_eq!(seen(), "no");
    std::io::Write::write_all(&mut held, b"written").unwrap();
    // Its users are not cut off without a word.
    let (code, said) = pool.told_by("fs", &["mount", &pool.of("home")]);
    assert!(code == Some(5) && said.contains(&format!("(process {}) has ", std::process::id())), "{said}");
    std::io::Write::write_all(&mut held, b" on").unwrap();
    drop(held);
    // What was written through the old mount is in the new one.
    eventually("it is mounted again", || pool.told_by("fs", &["mount", &pool.of("home")]).0 == Some(0));
    assert_eq!((pool.shown_at("home"), seen()), (pool.of("home"), "yes".to_owned()));
    assert_eq!(fs::read(pool.at("home").join("file")).unwrap(), b"written on");
}

#[test]
fn users_in_another_mount_namespace_are_users() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    let (home, place) = (pool.of("home"), pool.place.path().join("home"));
    pool.ok("fs", &["create", "-o", &format!("mountpoint={}", place.display()), &home]);
    let container = Namespace::holding(&place);
    let log = container.at(&place.join("log"));
    let goes_on = |line: &str| {
        fs::write(&log, line).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), line);
    };
    let elsewhere = format!("mountpoint={}", pool.place.path().join("elsewhere").display());
    let export = ["export", &pool.name];
    let refused: [(&str, &[&str]); 3] =
        [("fs", &["destroy", &home]), ("fs", &["set", &elsewhere, &home]), ("pool", &export)];
    for (verb, words) in refused {
        let (code, said) = pool.told_by(verb, words);
        assert!(
            code == Some(5) && said.contains("pool or dataset is busy") && said.contains("cat (process "),
            "{said}"
        );
        assert!(said.contains("is in a mount namespace that has it mounted"), "{said}");
        assert!(is_mounted(&place), "{words:?}");
        goes_on(verb);
    }
    // An unmount is one of this namespace.
    pool.ok("fs", &["unmount", &home]);
    assert!(!is_mounted(&place));
    goes_on("unmounted");
    let (code, said) = pool.told_by("fs", &["mount", &home]);
    assert!(code == Some(5) && said.contains("cat (process "), "{said}");
    goes_on("not mounted");
    drop(container);
    eventually("it is mounted again", || pool.told_by("fs", &["mount", &home]).0 == Some(0));
    assert_eq!(fs::read_to_string(place.join("log")).unwrap(), "not mounted");
    // With force, they are cut off.
    let container = Namespace::holding(&place);
    let log = container.at(&place.join("log"));
    pool.ok("fs", &["destroy", "-f", &home]);
    assert_eq!(fs::read(&log).unwrap_err().raw_os_error(), Some(107));
}

#[test]
fn users_of_a_mount_are_named() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    pool.ok("fs", &["create", &pool.of("home")]);
    let held = fs::File::create(pool.at("home").join("held")).unwrap();
    for (verb, words) in [("fs", vec!["unmount", &pool.of("home")]), ("pool", vec!["export", &pool.name])] {
        let (code, said) = pool.told_by(verb, &words);
        let user = format!("(process {}) has {} open", std::process::id(), pool.at("home").join("held").display());
        assert!(code == Some(5) && said.contains(&user), "{said}");
    }
    drop(held);
}

/// A user's directory in which `x` is by turns a directory with a file system of the pool at `y`,
/// and a link to where something else is mounted at `y`.
struct Treacherous {
    user: PathBuf,
    foreign: PathBuf,
}

impl Treacherous {
    fn new(pool: &Pool) -> Treacherous {
        let (user, other) = (pool.place.path().join("user"), pool.place.path().join("other"));
        let foreign = other.join("y");
        fs::create_dir_all(user.join("x/y")).unwrap();
        fs::create_dir_all(&foreign).unwrap();
        symlink(&other, user.join("link")).unwrap();
        for path in [&user, &user.join("x"), &user.join("x/y")] {
            chown(path, Some(1000), Some(1000)).unwrap();
        }
        lchown(user.join("link"), Some(1000), Some(1000)).unwrap();
        fs::set_permissions(pool.place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        mount("none", &foreign, "tmpfs", MountFlags::empty(), None).unwrap();
        Treacherous { user, foreign }
    }

    fn exchange(&self) {
        renameat_with(CWD, self.user.join("x"), CWD, self.user.join("link"), RenameFlags::EXCHANGE).unwrap();
    }

    /// As it was at first.
    fn restore(&self) {
        if fs::symlink_metadata(self.user.join("x")).unwrap().is_symlink() {
            self.exchange();
        }
    }
}

#[test]
fn what_is_unmounted_is_what_was_mounted_wherever_its_path_leads() {
    needs!(as_root());
    let pool = Pool::made("pp", "256M", &[]);
    let scene = Treacherous::new(&pool);
    let (name, place) = (pool.of("f"), format!("mountpoint={}", scene.user.join("x/y").display()));
    let orders: [&[&str]; 4] =
        [&["unmount", &name], &["destroy", &name], &["set", "mountpoint=none", &name], &["unmount", "-f", &name]];
    for (round, order) in orders.into_iter().cycle().take(12).enumerate() {
        scene.restore();
        pool.ok("fs", &["create", "-o", &place, &name]);
        assert_eq!(pool.mount_of("f").unwrap().1, scene.user.join("x/y"));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Once for certain; then all the time.
            scene.exchange();
            if round >= orders.len() {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        scene.exchange()
                    }
                });
            }
            let (code, said) = pool.told_by("fs", order);
            over.store(true, Ordering::Relaxed);
            assert_eq!(code, Some(0), "{order:?}: {said}");
        });
        assert_eq!(pool.mount_of("f"), None, "{order:?}");
        assert!(is_mounted(&scene.foreign), "{order:?}");
        if order[0] != "destroy" {
            pool.ok("fs", &["destroy", &name]);
        }
    }
    scene.restore();
    pool.ok("fs", &["create", "-o", &place, &name]);
    scene.exchange();
    pool.ok("pool", &["export", &pool.name]);
    assert!(pool.mount_of("f").is_none() && is_mounted(&scene.foreign));
    scene.restore();
    pool.import();
    unmount(&scene.foreign, UnmountFlags::empty()).unwrap();
}

/// The threads of a process that have not ended.
fn threads(process: u32) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{process}/task"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|task| task.path());
    let lives = |task: &PathBuf| {
        fs::read_to_string(task.join("status"))
            .is_ok_and(|status| !status.contains("State:\tZ") && !status.contains("State:\tX"))
    };
    tasks.filter(lives).collect()
}

/// Whether a thread of this name waits for the answer of a FUSE mount.
fn waits(process: u32, names: &[&str]) -> bool {
    let says = |task: &Path, file: &str| fs::read_to_string(task.join(file)).unwrap_or_default().trim().to_owned();
    threads(process)
        .iter()
        .any(|task| names.contains(&says(task, "comm").as_str()) && says(task, "wchan") == "request_wait_answer")
}

#[test]
fn who_waits_for_his_own_mount_can_be_killed() {
    needs!(as_root());
    // The pool's device does not answer while its daemon is stopped, and neither do requests to the
    // pool's mounts that have to read. Over io_uring the kernel counts a request as being answered
    // at once, and a process that waits for a stopped daemon then cannot be killed.
    let device = Fixture::mirror(&["--passthrough=off", "--direct-io", "--transport=device"]);
    let pool = Pool::on(Yard::new(), device.at("device"), "pp", "256M", &[]);
    pool.ok("fs", &["create", &pool.of("home")]);
    pool.ok("fs", &["create", "-o", "canmount=noauto", &pool.of("home/bob")]);
    fs::create_dir(pool.at("home/bob")).unwrap();
    // More than is read at once.
    (0..5000)
        .for_each(|number| drop(fs::File::create(pool.at(&format!("home/a-name-of-some-length-{number}"))).unwrap()));
    let (bob, eve) = (pool.of("home/bob"), pool.of("home/eve"));
    let elsewhere = format!("mountpoint={}", pool.at("home/elsewhere").display());
    // A name is looked for, one is made on the way, and one while another is left.
    let orders: [&[&str]; 3] = [&["mount", &bob], &["create", &eve], &["set", &elsewhere, &bob]];
    for order in orders {
        pool.ok("pool", &["export", &pool.name]);
        pool.import();
        if order[0] == "set" {
            pool.ok("fs", &["set", "canmount=on", &bob]);
            pool.ok("pool", &["export", &pool.name]);
            pool.import();
        }
        let process = pool.process(&pool.name);
        device.signal(Signal::STOP);
        let mut ordered = pool
            .command("nacre")
            .arg("fs")
            .args(order)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("a thread that waits for its own process", || waits(process, &["nacre-control", "fuse-apart"]));
        kill(process, Signal::KILL);
        // Waiting processes get an error, and nothing keeps the device open.
        eventually("the end of all threads", || threads(process).is_empty());
        let told = finish(Command::new("timeout").args(["-s", "KILL", "60", "stat"]).arg(pool.at("home/bob")));
        device.signal(Signal::CONT);
        assert_eq!(told.status.code(), Some(1), "{}", text(&told.stderr));
        eventually("the end of the command", || ordered.try_wait().unwrap().is_some());
        pool.import();
        assert_eq!(pool.shown_at("home"), pool.of("home"));
    }
}
