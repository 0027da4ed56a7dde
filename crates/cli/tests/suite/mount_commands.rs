//! Mounting and unmounting by all means: by hand, by mount(8), in the background, by signals, by
//! force; and bad input, after which nothing remains.

use crate::mounting::status::Status;
use crate::mounting::{
    Fixture, as_root, errno, eventually, finish, is_mounted, mount_entry, nacre, needs, run, scratch, sh, text,
    unmount_by,
};
use nacre_sys::mounts::{self, IdRange, MountAttributes};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

/// A mount made by a command that returns; taken down by the fixture.
fn background(fixture: &Fixture, program: &Path, words: &[&str]) -> std::process::Output {
    let mut command = Command::new(program);
    command.args(words).args(crate::mounting::transport_words(words)).arg(&fixture.source).arg(&fixture.mountpoint);
    finish(&mut command)
}

/// Takes the topmost of several mounts away.
fn umount_one(fixture: &Fixture) {
    let output = run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn umount(fixture: &Fixture) {
    umount_one(fixture);
    assert!(!is_mounted(&fixture.mountpoint));
}

#[test]
fn the_command_returns_when_the_mount_is_up() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let output = background(&fixture, &nacre(), &["mirror"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        (String::new(), String::new()),
        "a mount that works says nothing"
    );
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
    let status = Status::of(&fixture.mountpoint);
    assert_eq!(status.text("mountpoint"), fixture.mountpoint.to_str().unwrap());
    let pid = status.number("pid");
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    umount(&fixture);
    eventually("the daemon ends", || !Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn the_mount_table_says_what_it_is() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    let (kind, source, options, _) = mount_entry(&fixture.mountpoint).unwrap();
    assert_eq!((kind.as_str(), source.as_str()), ("fuse.nacre", fixture.source.to_str().unwrap()));
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
    drop(fixture);
    let fixture = Fixture::mirror(&["-o", "fsname=papers,noatime,noexec", "-r"]);
    let (_, source, options, of_file_system) = mount_entry(&fixture.mountpoint).unwrap();
    assert_eq!(source, "papers");
    for word in ["ro", "noatime", "noexec"] {
        assert!(
            options.split(',').chain(of_file_system.split(',')).any(|option| option == word),
            "{word} in {options}"
        );
    }
}

#[test]
fn in_the_foreground_the_process_is_the_mount() {
    needs!(as_root());
    let mut fixture = Fixture::mirror(&[]);
    assert_eq!(Status::of(&fixture.mountpoint).number("pid"), u64::from(fixture.pid()), "one process, its number kept");
    assert!(fixture.runs());
    fixture.unmount();
}

#[test]
fn signals_end_it_cleanly() {
    needs!(as_root());
    for signal in [Signal::TERM, Signal::INT] {
        let mut fixture = Fixture::mirror(&[]);
        fs::write(fixture.at("file"), "content").unwrap();
        fixture.signal(signal);
        assert_eq!(fixture.ended(), Some(0), "{signal:?}");
        assert!(!is_mounted(&fixture.mountpoint), "{signal:?}");
        assert_eq!(fs::read(fixture.below("file")).unwrap(), b"content");
    }
}

#[test]
fn a_hangup_reads_users_again_and_ends_nothing() {
    needs!(as_root());
    let mut fixture =
        Fixture::mirror_of(&["--force-user=1234"], |source| fs::write(source.join("file"), "content").unwrap());
    fixture.signal(Signal::HUP);
    fixture.signal(Signal::USR1);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(fixture.runs());
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 1234);
    fixture.unmount();
}

#[test]
fn a_busy_mount_ends_by_signal_too() {
    needs!(as_root());
    let mut fixture = Fixture::mirror(&[]);
    let file = fs::File::create(fixture.at("file")).unwrap();
    fixture.signal(Signal::TERM);
    // It detaches itself: no process can enter any more, and it ends no later than its last user.
    eventually("detached", || !is_mounted(&fixture.mountpoint));
    drop(file);
    assert_eq!(fixture.ended(), Some(0));
}

#[test]
fn a_mount_of_other_namespaces_is_told_of_and_ends() {
    needs!(as_root());
    for transport in ["--transport=device", "--transport=auto"] {
        let mut fixture = Fixture::mirror(&[transport]);
        fs::write(fixture.below("file"), "content").unwrap();
        let elsewhere = crate::mounting::Namespace::holding(&fixture.mountpoint);
        unmount_by("umount", &[fixture.mountpoint.as_ref()]);
        assert_eq!(fs::read(elsewhere.at(&fixture.at("file"))).unwrap(), b"content");
        let place = fixture.mountpoint.to_str().unwrap();
        let told = run(nacre(), ["status", "-H", "-o", "attached", place]);
        assert_eq!(text(&told.stdout), "no\n");
        let told = run(nacre(), ["status", place]);
        assert!(text(&told.stdout).contains("(detached: "), "{}", text(&told.stdout));
        fixture.signal(Signal::TERM);
        assert_eq!(fixture.ended(), Some(0), "{transport}");
    }
}

/// Scripts wait for a mount by looking for its source in the table of mounts.
#[test]
fn the_source_is_in_the_table_of_mounts_at_its_place_alone() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
    let (done, ready) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let ours = |line: &&str| line.contains(&format!(" {} ", source.display()));
            let mut places = BTreeSet::new();
            ready.wait();
            while !done.load(Ordering::Acquire) {
                let table = crate::mounting::mount_table();
                places.extend(table.lines().filter(ours).map(|line| line.split(' ').nth(4).unwrap().to_owned()));
            }
            places
        });
        ready.wait();
        for words in [
            &["mirror"][..],
            &["mirror", "--acl=off"],
            &["mirror", "-o", "nosymfollow"],
            &["mirror", "--notify-watchers"],
        ] {
            for _ in 0..3 {
                fixture.start(words, source.as_ref(), &mountpoint);
                fixture.unmount();
            }
        }
        done.store(true, Ordering::Release);
        assert_eq!(seen.join().unwrap(), BTreeSet::from([mountpoint.to_str().unwrap().to_owned()]));
    });
}

/// A source that the new mount calls do not accept (a name of more than 255 bytes) is mounted by
/// mount(2).
#[test]
fn a_source_with_a_long_name_is_mounted() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let source = fixture.source.join("a".repeat(200)).join("b".repeat(200));
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("file"), "content").unwrap();
    let mountpoint = fixture.mountpoint.clone();
    fixture.start(&["mirror", "-o", "nosymfollow"], source.as_ref(), &mountpoint);
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
    let (_, shown, options, _) = mount_entry(&mountpoint).unwrap();
    assert_eq!(shown, source.to_str().unwrap());
    assert!(options.contains("nosymfollow"), "{options}");
    fixture.unmount();
}

#[test]
fn unmounting_goes_on_after_a_failure_and_follows_links() {
    needs!(as_root());
    let (first, second) = (Fixture::mirror(&[]), Fixture::mirror(&[]));
    let missing = first.scratch.path().join("nothing");
    let (link, link_to_link) = (first.scratch.path().join("link"), first.scratch.path().join("again"));
    std::os::unix::fs::symlink(&second.mountpoint, &link).unwrap();
    std::os::unix::fs::symlink("link", &link_to_link).unwrap();
    let open = fs::File::open(&first.mountpoint).unwrap();
    let shown = run(nacre(), [OsStr::new("status"), link_to_link.as_os_str()]);
    assert!(text(&shown.stdout).contains(second.mountpoint.to_str().unwrap()), "{}", text(&shown.stderr));
    let words = [OsStr::new("umount"), missing.as_os_str(), first.mountpoint.as_os_str(), link_to_link.as_os_str()];
    let output = run(nacre(), words);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "the code is that of the first failure: {said}");
    assert!(
        said.contains("nothing is mounted at") && said.contains("open; `nacre umount --lazy"),
        "each failure is told: {said}"
    );
    assert!(is_mounted(&first.mountpoint) && !is_mounted(&second.mountpoint), "{said}");
    drop(open);
}

#[test]
fn what_cannot_be_mounted_is_told_and_nothing_else_is() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let inner = fixture.directory("mount/inner");
    let file = fixture.scratch.path().join("file");
    fs::write(&file, "").unwrap();
    let [source, place, file, inner] =
        [&fixture.source, &fixture.mountpoint, &file, &inner].map(|path| path.to_str().unwrap().to_owned());
    for (words, code, expected) in [
        (vec!["mirror", &file, &file], 1, "is not a directory"),
        (vec!["mirror", &source, &file], 1, "is not a directory"),
        (vec!["union", &source, &file], 1, "is not a directory"),
        // The mount point is not empty, which is of no interest here.
        (vec!["union", &inner, &place], 1, "lies inside the mount point"),
        (vec!["umount", ""], 2, "an empty word is no path"),
        (vec!["status", ""], 2, "an empty word is no path"),
    ] {
        let output = run(nacre(), &words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        let first = said.lines().next().unwrap_or_default();
        assert!(
            first.contains(expected) && said.lines().count() <= 2 && !said.contains("os error"),
            "{words:?}: {said}"
        );
        assert!(!is_mounted(&fixture.mountpoint), "{words:?}");
    }
}

#[test]
fn what_a_mount_hides_is_told_and_no_reason_to_refuse_it() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let said = |words: &[&str]| {
        let output = background(&fixture, &nacre(), words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    fs::write(fixture.at("under"), "").unwrap();
    let filled = said(&["mirror"]);
    assert!(filled.contains("is not empty: what is in it is hidden") && filled.lines().count() == 1, "{filled}");
    let twice = said(&["mirror"]);
    assert!(twice.contains("already: this is one more mount on top of it") && twice.lines().count() == 1, "{twice}");
    umount_one(&fixture);
    umount(&fixture);
    // In the place of bindfs, which says nothing; and for those who know.
    for words in [
        &["bindfs"][..],
        &["mirror", "-o", "nonempty"],
        &["union", "-o", "nonempty"],
        &["cage", "--size=10M", "-o", "nonempty"],
    ] {
        assert_eq!(said(words), "", "{words:?}");
        umount(&fixture);
    }
    let daemon = format!("--daemon=filled-{}", std::process::id());
    for words in [&["union"][..], &["cage", "--size=10M"], &["mirror", &daemon]] {
        let filled = said(words);
        assert!(
            filled.contains("is not empty: what is in it is hidden") && filled.lines().count() == 1,
            "{words:?}: {filled}"
        );
        umount(&fixture);
    }
    let larger = said(&["cage", "--size=10M", "--limit=user:0=20M", "--limit=user:1=10M", "-o", "nonempty"]);
    assert_eq!(larger, "nacre: user:0=20M is more than the cage holds (10M): it is full before that\n");
    umount(&fixture);
    let over_itself = run(nacre(), [OsStr::new("mirror"), fixture.source.as_os_str(), fixture.source.as_os_str()]);
    assert_eq!(text(&over_itself.stderr), "", "a directory over itself hides nothing");
    run(nacre(), [OsStr::new("umount"), fixture.source.as_os_str()]);
}

#[test]
fn only_changes_of_the_source_are_counted() {
    needs!(as_root());
    let mut fixture =
        Fixture::mirror_of(&["--coherence=watch"], |source| fs::write(source.join("file"), "content").unwrap());
    // The kernel knows it as long as it is open.
    let file = fs::File::open(fixture.at("file")).unwrap();
    let told = || {
        let status = Status::of(&fixture.mountpoint);
        ["invalidations", "full_invalidations"].map(|figure| status.number(figure))
    };
    let elsewhere = fixture.directory("elsewhere");
    let before = told();
    for number in 0..500 {
        fs::write(elsewhere.join(number.to_string()), "content").unwrap();
    }
    // Changes are reported in their order. Where the file system has more events, of any process,
    // than a slow machine can read, some are lost, which is reported as a change of everything.
    fs::write(fixture.below("file"), "changed").unwrap();
    eventually("the change is heard of", || told() != before);
    let [counted, _] = told();
    assert!(counted - before[0] < 100, "{before:?}, then {counted}");
    drop(file);
    fixture.unmount();
}

#[test]
fn the_transport_is_a_word() {
    needs!(as_root());
    for wanted in ["--transport=auto", "--transport=device"] {
        let mut fixture = Fixture::mirror(&[wanted]);
        let told = run(
            nacre(),
            [OsStr::new("status"), "-Ho".as_ref(), "transport,transport-reason".as_ref(), fixture.mountpoint.as_ref()],
        );
        let told = text(&told.stdout);
        let (transport, why) = told.trim_end().split_once('\t').unwrap();
        assert!(matches!((transport, why), ("uring" | "device", _)), "{told}");
        assert_eq!(why != "-", transport == "device" && wanted == "--transport=auto", "{told}");
        fixture.unmount();
    }
}

#[test]
fn a_busy_mount_is_not_unmounted_unless_lazily() {
    needs!(as_root());
    let mut fixture = Fixture::mirror(&[]);
    let file = fs::File::create(fixture.at("file")).unwrap();
    let output = run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("busy") || text(&output.stderr).contains("use"), "{}", text(&output.stderr));
    assert!(is_mounted(&fixture.mountpoint));
    fs::write(fixture.at("other"), "still works").unwrap();
    let output = run(nacre(), [OsStr::new("umount"), OsStr::new("--lazy"), fixture.mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
    rustix::io::write(&file, b"late").unwrap();
    drop(file);
    assert_eq!(fixture.ended(), Some(0));
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"late");
}

#[test]
fn other_programs_can_unmount_it() {
    needs!(as_root());
    for command in [&["umount"][..], &["fusermount3", "-u"], &["umount", "-l"], &["umount", "-f"]] {
        let mut fixture = Fixture::mirror(&[]);
        let mut arguments: Vec<&OsStr> = command[1..].iter().map(OsStr::new).collect();
        arguments.push(fixture.mountpoint.as_os_str());
        let output = run(command[0], arguments);
        assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
        assert_eq!(fixture.ended(), Some(0), "{command:?}");
        assert!(!is_mounted(&fixture.mountpoint));
    }
}

#[test]
fn bad_input_mounts_nothing_and_says_why() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let file = fixture.scratch.path().join("file");
    fs::write(&file, "").unwrap();
    let (source, mountpoint) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    let (missing, file) = (fixture.scratch.path().join("missing"), file.to_str().unwrap());
    let missing = missing.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--no-such-option", source, mountpoint], "no-such-option"),
        (&["-o", "no-such-word", source, mountpoint], "no-such-word"),
        (&["--map=1000", source, mountpoint], "1000"),
        (&["--map=1000/2000:1000/3000", source, mountpoint], "1000"),
        (&["--map=no-such-user/5", source, mountpoint], "no-such-user"),
        (&["--force-user=no-such-user", source, mountpoint], "no-such-user"),
        (&["--mirror=no-such-user", source, mountpoint], "no-such-user"),
        (&["--mirror=@no-such-group", source, mountpoint], "no-such-group"),
        (&["--mirror=0", "--mirror-only=0", source, mountpoint], "mirror"),
        (&["--perms=8", source, mountpoint], "8"),
        (&["--perms=u=q", source, mountpoint], "q"),
        (&["--perms=a+r::g-w", source, mountpoint], "perms"),
        (&["--create-with-perms=01000", source, mountpoint], "01000"),
        (&["--read-rate=1x", source, mountpoint], "1x"),
        (&["--uid-offset=ten", source, mountpoint], "ten"),
        (&["--uid-offset=1", "--map=1/2", source, mountpoint], "offset"),
        (&["--resolved-symlink-deletion=never", source, mountpoint], "never"),
        (&["--coherence=sometimes", source, mountpoint], "sometimes"),
        (&["--engine=steam", source, mountpoint], "steam"),
        (&["--forward-odirect=0", source, mountpoint], "odirect"),
        (&["--map-passwd=/no/such/file", source, mountpoint], "/no/such/file"),
        (&[missing, mountpoint], "missing"),
        (&[source, missing], "missing"),
        (&[source, file], "file"),
        (&[source], "MOUNTPOINT"),
        (&[], "SOURCE"),
        (&[source, mountpoint, "third"], "third"),
    ];
    for (words, named) in cases {
        let output = finish(Command::new(nacre()).arg("mirror").args(*words));
        let message = text(&output.stderr);
        assert!(matches!(output.status.code(), Some(1..=5)), "{words:?}: {:?} {message}", output.status);
        assert!(message.contains(named), "{words:?}: the message names what is wrong: {message}");
        assert!(!message.contains("panicked"), "{words:?}: {message}");
        assert!(!is_mounted(&fixture.mountpoint), "{words:?} mounted something");
    }
    for stack in [
        "nonsense",
        "host",
        "host:/no/such/place",
        "mem | remap:no-such-key=1",
        "remap",
        "mem | mem",
        "mem | throttle:read-rate=fast",
        "/no/such/stack.toml",
    ] {
        let output = finish(Command::new(nacre()).args(["mount", stack, mountpoint]));
        assert!(!output.status.success(), "{stack}");
        assert!(
            !text(&output.stderr).is_empty() && !text(&output.stderr).contains("panicked"),
            "{stack}: {}",
            text(&output.stderr)
        );
        assert!(!is_mounted(&fixture.mountpoint), "{stack} mounted something");
    }
    assert!(crate::mounting::mounts_below(fixture.scratch.path()).is_empty());
}

#[test]
fn explain_does_nothing() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let output = background(&fixture, &nacre(), &["mirror", "--explain", "--force-user=1234", "-r"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("host") && said.contains("remap") && said.contains("1234"), "{said}");
    assert!(!is_mounted(&fixture.mountpoint));
}

/// Installs the program under another name for as long as this lives.
struct Installed(PathBuf);

impl Installed {
    fn new(path: impl Into<PathBuf>) -> Installed {
        let path = path.into();
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(nacre(), &path).unwrap();
        Installed(path)
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn mount_8_mounts_it_from_a_table() {
    needs!(as_root());
    if fs::symlink_metadata("/sbin/mount.fuse.nacre").is_ok() {
        println!("skipped: nacre is installed on this machine");
        return;
    }
    let _installed = Installed::new("/sbin/mount.fuse.nacre");
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let (source, mountpoint) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    let output = run("mount", ["-t", "fuse.nacre", "-o", "force-user=1234,perms=a-w:u+r", source, mountpoint]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 1234);
    let (kind, shown, options, _) = mount_entry(&fixture.mountpoint).unwrap();
    assert_eq!((kind.as_str(), shown.as_str()), ("fuse.nacre", source));
    assert!(options.contains("nosuid") && options.contains("nodev"), "not asked for, not given: {options}");
    // A remount changes the flags and starts no second daemon.
    let pid = Status::of(&fixture.mountpoint).number("pid");
    assert!(run("mount", ["-o", "remount,ro", mountpoint]).status.success());
    assert_eq!(errno(fs::write(fixture.at("new"), "x")), 30);
    assert!(run("mount", ["-o", "remount,rw", mountpoint]).status.success());
    fs::write(fixture.at("new"), "x").unwrap();
    assert_eq!(Status::of(&fixture.mountpoint).number("pid"), pid);
    unmount_by("umount", &[mountpoint.as_ref()]);
    // The same from a table, with the words that mount(8) and systemd add.
    let table = fixture.scratch.path().join("fstab");
    let line =
        format!("{source} {mountpoint} fuse.nacre ro,nofail,noauto,_netdev,x-systemd.automount,force-group=1234 0 0\n");
    fs::write(&table, line).unwrap();
    let output = run("mount", ["-T", table.to_str().unwrap(), mountpoint]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().gid(), 1234);
    assert_eq!(errno(fs::write(fixture.at("more"), "x")), 30);
    // Nothing is mounted twice by `mount -a`.
    fs::write(&table, fs::read_to_string(&table).unwrap().replace("noauto,", "")).unwrap();
    assert!(run("mount", ["-a", "-T", table.to_str().unwrap()]).status.success());
    assert_eq!(crate::mounting::mounts_below(&fixture.mountpoint).len(), 1);
    unmount_by("umount", &[mountpoint.as_ref()]);
    // mount(8) keeps `suid` and `dev` for itself: they are read from the system's table.
    if Path::new("/etc/fstab").exists() {
        fs::write(&table, format!("{source}/ {mountpoint} fuse.nacre suid,noauto 0 0\n")).unwrap();
        let script = "mount --bind $0 /etc/fstab; mount $1; findmnt -no OPTIONS $1; umount $1; mount -o nosuid $1; findmnt -no OPTIONS $1; umount $1";
        let table = table.to_str().unwrap();
        let output = run("unshare", ["-m", "--propagation", "private", "sh", "-ec", script, table, mountpoint]);
        let shown = text(&output.stdout);
        let is_refused: Vec<bool> = shown.lines().map(|options| options.contains("nosuid")).collect();
        assert_eq!(is_refused, [false, true], "{shown}{}", text(&output.stderr));
    }
    // A cage over the directory itself: `mount -a` makes it once, however often it is called.
    let line =
        format!("cage:{source} {source} fuse.nacre size=1M,inodes=10,state={},nofail 0 0\n", fixture.state().display());
    fs::write(&table, line).unwrap();
    for _ in 0..2 {
        let output = run("mount", ["-a", "-T", table.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let figures = rustix::fs::statvfs(&fixture.source).unwrap();
        assert_eq!((figures.f_blocks * figures.f_frsize, figures.f_files), (1 << 20, 10));
    }
    assert_eq!(mount_entry(&fixture.source).unwrap().1, format!("cage:{source}"));
    assert_eq!(crate::mounting::mounts_below(&fixture.source).len(), 1);
    assert!(run("mount", ["-o", "remount,ro", source]).status.success());
    assert_eq!(errno(fs::write(fixture.below("more"), "x")), 30);
    unmount_by("umount", &[source.as_ref()]);
}

#[test]
fn called_as_bindfs_it_is_bindfs() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let bindfs = fixture.scratch.path().join("bindfs");
    let _installed = Installed::new(&bindfs);
    // Options between the paths, letters with attached values, long ones after -o: bindfs' grammar.
    let mut command = Command::new(&bindfs);
    command.arg(&fixture.source).args(["-u1234", "-o", "force-group=99,nodev"]).arg(&fixture.mountpoint).arg("-p0440");
    let output = finish(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let file = fs::metadata(fixture.at("file")).unwrap();
    assert_eq!((file.uid(), file.gid(), file.mode() & 0o777), (1234, 99, 0o440));
    assert_eq!(mount_entry(&fixture.mountpoint).unwrap().0, "fuse.bindfs");
    umount(&fixture);
    for (words, code) in [
        (&["--force-user", "5"][..], 1),
        (&["--nonsense"], 1),
        (&["--mirror=no-such-user"], 1),
        (&["-V"], 0),
        (&["-h"], 0),
    ] {
        let output = background(&fixture, &bindfs, words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output.stderr));
        assert!(!is_mounted(&fixture.mountpoint), "{words:?}");
    }
    let output = background(&fixture, &nacre(), &["bindfs", "-u", "77"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 77);
    umount(&fixture);
}

#[test]
fn rules_are_reloaded_while_mounted() {
    needs!(as_root());
    let fixture =
        Fixture::mirror_of(&["--force-user=1111"], |source| fs::write(source.join("file"), "content").unwrap());
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 1111);
    let file = fs::File::open(fixture.at("file")).unwrap();
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let output = run(nacre(), ["reload", mountpoint, "--force-user=2222", "--perms=a=r"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    eventually("the new rules show", || {
        let file = fs::metadata(fixture.at("file")).unwrap();
        (file.uid(), file.mode() & 0o777) == (2222, 0o444)
    });
    assert_eq!(file.metadata().unwrap().uid(), 2222);
    let output = run(nacre(), ["reload", mountpoint, "--perms=9"]);
    assert!(!output.status.success(), "bad rules are refused");
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 2222, "and the old ones stay");
    assert!(run(nacre(), ["reload", mountpoint]).status.success());
    fixture.signal(Signal::USR1);
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 2222);
}

#[test]
fn an_idmapped_mount_can_be_put_on_top() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], |source| fs::write(source.join("file"), "content").unwrap());
    let upper = fixture.directory("upper");
    match idmapped_bind(&fixture.mountpoint, &upper) {
        Ok(()) => {
            assert_eq!(fs::metadata(upper.join("file")).unwrap().uid(), 5000);
            // User 5000 of the mount is root below.
            let (code, said) = crate::mounting::sh_as(&upper, 5000, 5000, "", "echo x > new && stat -c %u:%g new");
            assert_eq!((code, said.trim()), (0, "5000:5000"));
            assert_eq!(fs::metadata(fixture.below("new")).unwrap().uid(), 0);
        }
        Err(why) => {
            crate::mounting::skip("idmap", &format!("idmapped mounts on FUSE: {why}"));
        }
    }
}

/// Binds a directory with ids 0 to 999 shown as 5000 to 5999.
fn idmapped_bind(from: &Path, to: &Path) -> std::io::Result<()> {
    let ids = [IdRange { inside: 0, outside: 5000, count: 1000 }];
    let map = mounts::user_namespace(&ids, &ids)?;
    let tree = mounts::clone_tree(from, false)?;
    let none = MountAttributes::empty();
    mounts::set_attributes(tree.as_fd(), none, none, Some(map.as_fd()), false)?;
    mounts::attach(tree.as_fd(), to)
}

#[test]
fn the_kernel_can_serve_what_it_can() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let output = background(&fixture, &nacre(), &["mirror", "--engine=kernel", "-r"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
    assert_eq!(errno(fs::write(fixture.at("new"), "x")), 30);
    assert!(!mount_entry(&fixture.mountpoint).unwrap().0.starts_with("fuse"));
    umount(&fixture);
    let output = background(&fixture, &nacre(), &["mirror", "--engine=kernel", "--perms=a-w"]);
    assert!(!output.status.success());
    assert!(
        text(&output.stderr).contains("perms"),
        "it says which option the kernel cannot do: {}",
        text(&output.stderr)
    );
    assert!(!is_mounted(&fixture.mountpoint));
    let output = background(&fixture, &nacre(), &["mirror", "--engine=auto", "--perms=a-w"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(mount_entry(&fixture.mountpoint).unwrap().0, "fuse.nacre");
    umount(&fixture);
}

#[test]
fn a_file_can_be_mirrored_by_the_kernel() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let (source, target) = (fixture.scratch.path().join("one"), fixture.scratch.path().join("two"));
    fs::write(&source, "content").unwrap();
    fs::write(&target, "covered").unwrap();
    for engine in ["--engine=kernel", "--engine=auto"] {
        let output = run(nacre(), [OsStr::new("mirror"), OsStr::new(engine), source.as_os_str(), target.as_os_str()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(fs::read(&target).unwrap(), b"content");
        assert!(run(nacre(), [OsStr::new("umount"), target.as_os_str()]).status.success());
        assert_eq!(fs::read(&target).unwrap(), b"covered");
    }
    let output =
        run(nacre(), [OsStr::new("mirror"), OsStr::new("--force-user=1"), source.as_os_str(), target.as_os_str()]);
    assert!(
        !output.status.success() && text(&output.stderr).contains("--engine=kernel can show a single file"),
        "{}",
        text(&output.stderr)
    );
    assert!(!is_mounted(&target));
}

#[test]
fn what_is_below_the_mount_point_does_not_matter() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.at("covered"), "covered").unwrap();
    assert!(background(&fixture, &nacre(), &["mirror"]).status.success());
    assert!(fs::metadata(fixture.at("covered")).is_err());
    // A second mount over the first is a second mount; each is taken down by itself.
    assert!(background(&fixture, &nacre(), &["mirror", "--force-user=9"]).status.success());
    assert_eq!(fs::metadata(&fixture.mountpoint).unwrap().uid(), 9);
    assert!(run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]).status.success());
    assert_eq!(fs::metadata(&fixture.mountpoint).unwrap().uid(), 0);
    umount(&fixture);
    assert_eq!(fs::read(fixture.at("covered")).unwrap(), b"covered");
}

#[test]
fn paths_of_all_kinds() {
    needs!(as_root());
    let place = scratch();
    for name in ["with space", "comma,colon:", "back\\slash", "new\nline", "tab\t", "%s%n", "-dash", "\u{e4}\u{f6}"] {
        let (source, mountpoint) = (place.path().join(name), place.path().join(format!("{name} mount")));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&mountpoint).unwrap();
        fs::write(source.join("file"), name).unwrap();
        let output = run(nacre(), [OsStr::new("mirror"), source.as_os_str(), mountpoint.as_os_str()]);
        assert!(output.status.success(), "{name:?}: {}", text(&output.stderr));
        assert_eq!(fs::read(mountpoint.join("file")).unwrap(), name.as_bytes());
        let output = run(nacre(), [OsStr::new("umount"), mountpoint.as_os_str()]);
        assert!(output.status.success(), "{name:?}: {}", text(&output.stderr));
        assert!(fs::metadata(mountpoint.join("file")).is_err());
    }
    // A relative source and mount point, from another directory than the daemon's.
    fs::create_dir(place.path().join("s")).unwrap();
    fs::create_dir(place.path().join("m")).unwrap();
    sh(
        place.path(),
        &format!("'{0}' mirror s m && touch m/file && '{0}' umount m && test -e s/file", nacre().display()),
    );
}

#[test]
fn a_mount_in_memory() {
    needs!(as_root());
    let fixture = Fixture::stack("mem");
    fs::set_permissions(&fixture.mountpoint, fs::Permissions::from_mode(0o711)).unwrap();
    sh(
        &fixture.mountpoint,
        "mkdir a; echo content > a/b; ln a/b c; ln -s c d; test \"$(cat d)\" = content; mv a e; ls -lR . >/dev/null; rm -rf e c d",
    );
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 0);
}

#[test]
fn set_user_id_programs_and_devices_work_only_where_asked_for() {
    needs!(as_root());
    let prepare = |source: &Path| {
        fs::copy("/usr/bin/id", source.join("id")).unwrap();
        fs::set_permissions(source.join("id"), fs::Permissions::from_mode(0o4755)).unwrap();
        sh(source, "mknod null c 1 3 && chmod 666 null");
    };
    let fixture = Fixture::mirror_of(&[], prepare);
    let (_, said) = crate::mounting::sh_as(&fixture.mountpoint, 2000, 2000, "", "./id -u");
    assert_eq!(said.trim(), "2000");
    assert_eq!(errno(fs::write(fixture.at("null"), "x")), 13);
    let fixture = Fixture::mirror_of(&["-o", "suid,dev"], prepare);
    let (_, said) = crate::mounting::sh_as(&fixture.mountpoint, 2000, 2000, "", "./id -u");
    assert_eq!(said.trim(), "0");
    fs::write(fixture.at("null"), "x").unwrap();
}

#[test]
fn a_daemon_that_ends_takes_its_mount_along_wherever_that_has_been_moved() {
    needs!(as_root());
    for words in [&["mirror"][..], &["mirror", "-o", "nosymfollow"], &["cage", "--size=10M"], &["union"]] {
        let mut fixture = Fixture::bare();
        let (user, other, source) = (fixture.directory("user"), fixture.directory("other"), fixture.source.clone());
        fs::create_dir_all(user.join("x/y")).unwrap();
        fs::create_dir(other.join("y")).unwrap();
        rustix::mount::mount("none", other.join("y"), "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        fixture.start(words, source.as_ref(), &user.join("x/y"));
        // A user who may change the directory above the mount moves it away, and puts a link to
        // another mount there.
        fs::rename(user.join("x"), user.join("z")).unwrap();
        std::os::unix::fs::symlink(&other, user.join("x")).unwrap();
        assert!(is_mounted(&user.join("z/y")), "{words:?}");
        fixture.signal(Signal::TERM);
        assert_eq!(fixture.ended(), Some(0), "{words:?}");
        assert!(!is_mounted(&user.join("z/y")) && is_mounted(&other.join("y")), "{words:?}");
        rustix::mount::unmount(other.join("y"), rustix::mount::UnmountFlags::empty()).unwrap();
    }
}
