//! Mounts of an ordinary user: through fusermount3, without any privilege. Run by root, each test
//! runs again as nobody.

use crate::mounting::cages::Cage;
use crate::mounting::status::Status;
use crate::mounting::{Fixture, can_mount, errno, eventually, is_mounted, is_root, nacre, needs, run, skip, text};
use crate::surviving::{Guarded, Raised};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Returns whether the body of a test (of this module, or with its path) shall run in this process. As root, the test is run again in
/// a process of nobody's, with a copy of the program that nobody can reach, and the result is
/// false.
pub fn as_user(test: &str) -> bool {
    if !can_mount() {
        return false;
    }
    if Command::new("fusermount3").arg("-V").output().is_err() {
        return skip("fuse", "fusermount3 is not installed");
    }
    if !is_root() {
        return true;
    }
    let place = crate::mounting::scratch();
    let copy = |from: &std::path::Path, name: &str| {
        let to = place.path().join(name);
        // A copy is made by a process of its own: a descriptor for writing in this one could be
        // inherited by a child of another test, and a program open for writing cannot be run.
        assert!(fs::hard_link(from, &to).is_ok() || run("cp", [from, &to]).status.success());
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).unwrap();
        to
    };
    let (program, tests) = (copy(&nacre(), "nacre"), copy(&std::env::current_exe().unwrap(), "tests"));
    let own = place.path().join("own");
    fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(65_534), Some(65_534)).unwrap();
    let output = crate::mounting::finish(
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
            .arg(tests)
            .args([
                &*if test.contains("::") { test.to_owned() } else { format!("user::{test}") },
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .current_dir(&own)
            .env("NACRE_BINARY", program)
            .env("NACRE_TEST_DIR", &own)
            .env("XDG_RUNTIME_DIR", &own)
            .env("HOME", &own),
    );
    let said = text(&output.stdout) + &text(&output.stderr);
    println!("as nobody:\n{said}");
    assert!(output.status.success() && said.contains("1 passed"), "{test} fails as an ordinary user");
    false
}

/// A mirror that only its mounter sees, which any user may make.
fn own_mirror(options: &[&str]) -> Fixture {
    Fixture::mirror(&[&["--no-allow-other"], options].concat())
}

#[test]
fn a_user_mounts_and_unmounts() {
    needs!(as_user("a_user_mounts_and_unmounts"));
    let mut fixture = own_mirror(&[]);
    fs::write(fixture.at("file"), "content").unwrap();
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"content");
    let status = Status::of(&fixture.mountpoint);
    assert!(!status.passthrough(), "passthrough needs CAP_SYS_ADMIN");
    fixture.unmount();
}

#[test]
fn the_command_returns_and_umount_ends_it() {
    needs!(as_user("the_command_returns_and_umount_ends_it"));
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let words = [OsStr::new("mirror"), OsStr::new("-n"), fixture.source.as_os_str(), fixture.mountpoint.as_os_str()];
    let output = run(nacre(), words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
    let pid = Status::of(&fixture.mountpoint).number("pid");
    let output = run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
    eventually("the daemon ends", || {
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        state.is_empty() || state.contains(") Z ")
    });
}

/// Where fuse.conf forbids to show a mount to other users, it is private unless the user asked for
/// others.
#[test]
fn a_mount_that_others_may_not_see_is_the_users_own() {
    needs!(as_user("a_mount_that_others_may_not_see_is_the_users_own"));
    let allowed = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    let allowed = allowed.lines().any(|line| line.trim() == "user_allow_other");
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let (source, at) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    let branch = format!("{source}=rw");
    let state = format!("--state={}", fixture.state().display());
    for words in [
        &["mirror", source, at][..],
        &["union", &branch, at],
        &["mount", &format!("host:{source}"), at],
        &["cage", "--size=1M", &state, source, at],
        // Errors that other users would get, too, are reported the same way.
        &["mirror", "--force-user=nobody", source, at],
    ] {
        let output = run(nacre(), words);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
        let notices = said.lines().filter(|line| line.contains("only you can use this mount")).count();
        assert_eq!(notices, usize::from(!allowed), "{words:?}: {said}");
        assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content", "{words:?}");
        let (.., options) = crate::mounting::mount_entry(&fixture.mountpoint).unwrap();
        assert_eq!(options.contains("allow_other"), allowed, "{words:?}: {options}");
        eventually("the mount is not in use", || run(nacre(), ["umount", at]).status.success());
    }
    // A line of fstab with `user`.
    let helper = fixture.state().with_file_name("mount.fuse.nacre");
    std::os::unix::fs::symlink(nacre(), &helper).unwrap();
    let output = run(&helper, [source, at, "-o", "rw,noexec,nosuid,nodev,user"]);
    let said = text(&output.stderr);
    assert!(output.status.success() && allowed != said.contains("only you can use this mount"), "{said}");
    eventually("the mount is not in use", || run(nacre(), ["umount", at]).status.success());
    // Asked for, it is no mount that others cannot use; nor where the program stands in for another.
    for words in [&["mirror", "-o", "allow_other", source, at][..], &["bindfs", source, at]] {
        let output = run(nacre(), words);
        assert_eq!(output.status.success(), allowed, "{words:?}");
        let said = text(&output.stderr);
        assert!(allowed || said.contains("user_allow_other"), "{words:?}: {said}");
        assert_eq!(is_mounted(&fixture.mountpoint), allowed, "{words:?}");
        if allowed {
            assert!(run(nacre(), ["umount", at]).status.success());
        }
    }
}

/// The kernel drops an answer about the root that an invalidation overtakes: without the first
/// answer, no user may enter.
#[test]
fn a_fresh_mount_is_entered_while_its_source_changes() {
    needs!(as_user("a_fresh_mount_is_entered_while_its_source_changes"));
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let (source, at) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    let branch = format!("{source}=rw");
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let name = fixture.below("changing");
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                fs::write(&name, "").and_then(|()| fs::remove_file(&name)).unwrap();
            }
        });
        let entered = std::panic::catch_unwind(|| {
            for round in 0..60 {
                let words: &[&str] = match round % 2 {
                    0 => &["bindfs", "-u", "55544", "--no-allow-other", source, at],
                    _ => &["union", "--no-allow-other", &branch, at],
                };
                let output = run(nacre(), words);
                assert!(output.status.success(), "{}", text(&output.stderr));
                let found = fs::metadata(fixture.at("file")).map(|data| data.len());
                eventually("the mount is not in use", || run("fusermount3", ["-u", at]).status.success());
                assert_eq!(found.unwrap(), 7, "round {round} of {words:?}");
            }
        });
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        entered.unwrap();
    });
}

#[test]
fn everything_works_but_giving_away() {
    needs!(as_user("everything_works_but_giving_away"));
    let fixture = own_mirror(&[]);
    let native = fixture.directory("native");
    // The parity cases that root's rights have no part in; those that do fail alike on both sides.
    nacre_testkit::parity::compare(&native, &fixture.mountpoint);
}

#[test]
fn content_goes_through_the_cache() {
    needs!(as_user("content_goes_through_the_cache"));
    let fixture = own_mirror(&[]);
    let content: Vec<u8> = (0..3_000_000u32).map(|index| (index / 5) as u8).collect();
    fs::write(fixture.at("file"), &content).unwrap();
    assert!(fs::read(fixture.below("file")).unwrap() == content);
    assert!(fs::read(fixture.at("file")).unwrap() == content);
    // Without privilege, the watcher cannot distinguish our own writes from others': the cached
    // pages of our writes may be dropped once more.
    eventually("what is in the page cache is not read again", || {
        let again = crate::mounting::status::requests_of(&fixture.mountpoint, || {
            assert!(fs::read(fixture.at("file")).unwrap() == content);
        });
        !again.contains_key("read")
    });
    // A change of the source is seen all the same.
    fs::write(fixture.below("file"), "new").unwrap();
    eventually("the change is seen", || fs::read(fixture.at("file")).is_ok_and(|content| content == b"new"));
}

#[test]
fn owners_are_shown_as_asked() {
    needs!(as_user("owners_are_shown_as_asked"));
    let fixture = own_mirror(&["--force-user=0", "--perms=a=rD"]);
    fs::write(fixture.below("file"), "content").unwrap();
    eventually("the file is seen", || fs::metadata(fixture.at("file")).is_ok());
    let file = fs::metadata(fixture.at("file")).unwrap();
    assert_eq!((file.uid(), file.mode() & 0o777), (0, 0o444));
}

#[test]
fn what_only_root_may_ask_for_is_refused() {
    needs!(as_user("what_only_root_may_ask_for_is_refused"));
    let fixture = Fixture::bare();
    for option in [
        "--create-as-user",
        "--create-for-user=1",
        "--create-for-group=1",
        "--map=1/2",
        "--uid-offset=1",
        "--engine=kernel",
    ] {
        let words = [
            OsStr::new("mirror"),
            OsStr::new("-n"),
            OsStr::new(option),
            fixture.source.as_os_str(),
            fixture.mountpoint.as_os_str(),
        ];
        let output = run(nacre(), words);
        // A kernel mount for oneself alone is not there for root, either.
        let code = if option == "--engine=kernel" { 1 } else { 4 };
        assert_eq!(output.status.code(), Some(code), "{option}: {}", text(&output.stderr));
        assert!(
            !text(&output.stderr).is_empty() && !text(&output.stderr).contains("panicked"),
            "{option}: {}",
            text(&output.stderr)
        );
        assert!(!is_mounted(&fixture.mountpoint), "{option}");
    }
    // A branch that is to be written to, and cannot be.
    let closed = fixture.directory("closed");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    let both = format!("{}=rw:{}=rw", fixture.source.display(), closed.display());
    let output = run(nacre(), ["union", "-n", &both, fixture.mountpoint.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
    // A mount point of another user, or one that he may not write to.
    for place in [Path::new("/usr"), &closed] {
        let output =
            run(nacre(), [OsStr::new("mirror"), OsStr::new("-n"), fixture.source.as_os_str(), place.as_os_str()]);
        assert_eq!(output.status.code(), Some(4), "{}: {}", place.display(), text(&output.stderr));
    }
}

#[test]
fn others_are_kept_out() {
    needs!(as_user("others_are_kept_out"));
    let mut fixture = own_mirror(&[]);
    let private = fixture.below("private");
    fs::write(&private, "x").unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o000)).unwrap();
    eventually("the file is seen", || fs::metadata(fixture.at("private")).is_ok());
    assert_eq!(errno(fs::read(fixture.at("private"))), 13);
    // Not even root may enter, but it may see that there is a mount; it is enough that the mount
    // still works afterwards.
    assert!(fixture.runs());
    fixture.unmount();
}

#[test]
fn a_dead_mount_can_be_cleared_by_its_user() {
    needs!(as_user("a_dead_mount_can_be_cleared_by_its_user"));
    let mut fixture = own_mirror(&[]);
    fixture.signal(rustix::process::Signal::KILL);
    assert_eq!(fixture.ended(), None);
    let output = run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
}

#[test]
fn the_source_judges_what_its_user_may_do() {
    needs!(as_user("the_source_judges_what_its_user_may_do"));
    let mut fixture = own_mirror(&[]);
    let forbid = |path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    fs::create_dir(fixture.at("directory")).unwrap();
    fs::write(fixture.at("directory/file"), "content").unwrap();
    assert!(fixture.at("directory/file").exists());
    // At once for what the kernel has in its caches, whether the change came through the mount or
    // not.
    forbid(fixture.at("directory"), 0o400);
    assert_eq!(errno(fs::metadata(fixture.at("directory/file"))), 13);
    assert_eq!(fs::read_dir(fixture.at("directory")).unwrap().count(), 1, "to list it, the right to read is enough");
    forbid(fixture.at("directory"), 0o700);
    assert_eq!(fs::read(fixture.at("directory/file")).unwrap(), b"content");
    forbid(fixture.below("directory"), 0o100);
    eventually("the change is noticed", || fs::read_dir(fixture.at("directory")).is_err());
    forbid(fixture.below("directory"), 0o200);
    eventually("the change is noticed", || !fixture.at("directory/file").exists());
    forbid(fixture.below("directory"), 0o700);
    // The kernel enforces nothing here, so nothing may depend on rules.
    let words = [OsStr::new("reload"), fixture.mountpoint.as_os_str(), OsStr::new("--perms=a=r")];
    let output = run(nacre(), words);
    assert!(
        !output.status.success() && text(&output.stderr).contains("made without rules"),
        "{}",
        text(&output.stderr)
    );
    fixture.unmount();
}

#[test]
fn a_cage_holds_for_its_user() {
    needs!(as_user("a_cage_holds_for_its_user"));
    let mut fixture = Fixture::bare();
    fs::write(fixture.below("before"), [7; 100_000]).unwrap();
    let place = fixture.source.clone();
    fixture.start(&["cage", "--no-allow-other", "--size=1M", "--inodes=20"], place.as_ref(), &place);
    let cage = || Cage::of(&fixture, &place);
    eventually("what was there is counted", || cage().number("used") == 102_400);
    assert_eq!(cage().text("mode"), "through", "the kernel bounds what it collects only for root");
    let mut log = fs::OpenOptions::new().append(true).create(true).open(fixture.below("log")).unwrap();
    let mut accepted = 0;
    let error = loop {
        match std::io::Write::write(&mut log, &[b'x'; 3000]) {
            Ok(written) => accepted += written,
            Err(error) => break error.raw_os_error(),
        }
    };
    assert_eq!((accepted, error), ((1 << 20) - 102_400, Some(28)));
    let resize =
        |size: &str| fixture.nacre([OsStr::new("cage"), OsStr::new("resize"), place.as_os_str(), OsStr::new(size)]);
    assert!(resize("2M").status.success());
    std::io::Write::write_all(&mut log, b"more").unwrap();
    assert_eq!(resize("10X").status.code(), Some(2));
    drop(log);
    // The books are the user's own, and are taken up again.
    fixture.signal(rustix::process::Signal::TERM);
    assert_eq!(fixture.ended(), Some(0));
    assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), accepted as u64 + 4);
    fixture.start(&["cage", "--no-allow-other", "--size=2M"], place.as_ref(), &place);
    assert_eq!(Cage::of(&fixture, &place).number("used"), (1 << 20) + 4096);
    assert!(fixture.state().join("cage").is_dir());
}

#[test]
fn a_user_makes_a_union() {
    needs!(as_user("a_user_makes_a_union"));
    let (mut fixture, upper) = crate::mounting::unions::over(&["--no-allow-other"], |lower| {
        fs::create_dir(lower.join("dir")).unwrap();
        fs::write(lower.join("dir/file"), "content").unwrap();
        fs::write(lower.join("gone"), "").unwrap();
    });
    fs::write(fixture.at("dir/file"), "changed").unwrap();
    fs::remove_file(fixture.at("gone")).unwrap();
    assert_eq!(fs::read(fixture.below("dir/file")).unwrap(), b"content");
    assert_eq!(fs::read(upper.join("dir/file")).unwrap(), b"changed");
    assert_eq!(crate::mounting::unions::list(&fixture.mountpoint).len(), 2);
    let number = fs::metadata(fixture.at("dir/file")).unwrap().ino();
    let extra = fixture.directory("extra");
    crate::mounting::unions::told([OsStr::new("add"), fixture.mountpoint.as_os_str(), extra.as_os_str()]);
    assert_eq!(crate::mounting::unions::list(&fixture.mountpoint).len(), 3);
    fixture.unmount();
    let list = crate::mounting::unions::branches(&[(&upper, "rw"), (&fixture.source, "ro")]);
    let mountpoint = fixture.mountpoint.clone();
    fixture.start(&["union", "--no-allow-other"], &list, &mountpoint);
    assert_eq!(fs::metadata(fixture.at("dir/file")).unwrap().ino(), number);
    assert!(!fixture.at("gone").exists());
}

/// An append that is under way when the process dies or is replaced comes again, and the next process cannot read the
/// file to see how much of it was written.
#[test]
fn what_may_be_written_but_not_read_goes_on_in_a_union() {
    needs!(as_user("what_may_be_written_but_not_read_goes_on_in_a_union"));
    let (fixture, upper) =
        crate::mounting::unions::over(&["--no-allow-other", "--survive", "--transport=device"], |_| ());
    let mut guarded = Guarded::of(fixture);
    let log = upper.join("log");
    fs::write(&log, "").unwrap();
    fs::set_permissions(&log, fs::Permissions::from_mode(0o200)).unwrap();
    eventually("the file is seen", || guarded.at("log").exists());
    let append = |path: &Path| fs::OpenOptions::new().append(true).open(path).unwrap();
    let (mut open, place) = (append(&guarded.at("log")), guarded.at("log"));
    let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    assert_eq!(errno(fs::read(&place)), 13);
    let lines = std::thread::scope(|scope| {
        let end = Raised(&over);
        let (over, done) = (&over, &done);
        let appending = scope.spawn(move || {
            let mut lines = 0_u64;
            while !over.load(Ordering::Relaxed) {
                // Lines of many pages are written in more than a moment.
                let line = format!("{lines} {}\n", "x".repeat(99_990));
                // Every other one by a descriptor of its own.
                let mut other;
                let file = if lines.is_multiple_of(2) {
                    &mut open
                } else {
                    other = append(&place);
                    &mut other
                };
                std::io::Write::write_all(file, line.as_bytes()).unwrap();
                lines += 1;
                done.store(lines, Ordering::Relaxed);
            }
            lines
        });
        for upgraded in [false, true, false, true, false] {
            let before = done.load(Ordering::Relaxed);
            eventually("lines are appended", || done.load(Ordering::Relaxed) > before + 5 || appending.is_finished());
            if upgraded { guarded.upgrade() } else { guarded.kill() }
        }
        drop(end);
        appending.join().unwrap()
    });
    assert_eq!(guarded.restarts(), 5);
    fs::set_permissions(&log, fs::Permissions::from_mode(0o600)).unwrap();
    let text = fs::read_to_string(&log).unwrap();
    let expected = (0..lines).map(|line| format!("{line} {}", "x".repeat(99_990)));
    assert!(text.lines().eq(expected), "{lines} lines, {} bytes", text.len());
    guarded.fixture.unmount();
}

#[test]
fn mounts_share_a_process() {
    needs!(as_user("mounts_share_a_process"));
    let fixture = Fixture::bare();
    let (other, second) = (fixture.directory("other"), fixture.directory("second"));
    fs::write(fixture.below("file"), "one").unwrap();
    fs::write(other.join("file"), "two").unwrap();
    let mirror = |source: &std::path::Path, mountpoint: &std::path::Path| {
        let output = run(
            nacre(),
            [OsStr::new("mirror"), "-n".as_ref(), "--daemon=mine".as_ref(), source.as_ref(), mountpoint.as_ref()],
        );
        assert!(output.status.success(), "{}", text(&output.stderr));
        Status::of(mountpoint).number("pid")
    };
    let pid = mirror(&fixture.source, &fixture.mountpoint);
    assert_eq!(mirror(&other, &second), pid);
    assert_eq!(fs::read(second.join("file")).unwrap(), b"two");
    fs::write(fixture.at("file"), "changed").unwrap();
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"changed");
    for mountpoint in [&fixture.mountpoint, &second] {
        eventually("the mount is not in use", || {
            run(nacre(), [OsStr::new("umount"), mountpoint.as_ref()]).status.success()
        });
        assert!(!is_mounted(mountpoint));
    }
    let stat = format!("/proc/{pid}/stat");
    eventually("the process ends", || !fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")));
}

#[test]
fn a_users_file_systems_lie_below_one_another() {
    needs!(as_user("a_users_file_systems_lie_below_one_another"));
    let place = crate::mounting::scratch();
    let name = format!("nest{}", std::process::id());
    let nacre_says = |arguments: &str| {
        let output = run(nacre(), arguments.replace('%', &name).split(' '));
        (output.status.success(), text(&output.stdout).replace(&name, "%") + &text(&output.stderr))
    };
    let ok = |arguments: &str| {
        let (done, said) = nacre_says(arguments);
        assert!(done, "{arguments}: {said}");
        said
    };
    let at = place.path().join("at");
    ok(&format!("pool create --size 64M -m {} % {}", at.display(), place.path().join("device").display()));
    ok("fs create %/a");
    ok("fs create -o quota=1M %/a/b");
    assert_eq!(ok("fs list -Ho name,mounted"), "%\tyes\n%/a\tyes\n%/a/b\tyes\n");
    for (path, content) in [("file", "top"), ("a/file", "middle"), ("a/b/file", "bottom")] {
        fs::write(at.join(path), content).unwrap();
    }
    // Each has its own files, numbers, figures, limits and snapshots.
    let number = |path: &str| fs::metadata(at.join(path)).map(|file| (file.dev(), file.ino())).unwrap();
    let mut all: Vec<_> = [".", "file", "a", "a/file", "a/b", "a/b/file"].map(number).to_vec();
    assert_eq!(number("a/.."), number("."));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6);
    assert_eq!(errno(fs::rename(at.join("file"), at.join("a/other"))), 18);
    assert_eq!(errno(fs::hard_link(at.join("a/b/file"), at.join("a/other"))), 18);
    assert_eq!(errno(fs::rename(at.join("a"), at.join("moved"))), 16);
    assert_eq!(errno(fs::remove_dir(at.join("a/b"))), 16);
    assert_eq!(errno(fs::write(at.join("a/b/big"), pseudorandom(3 << 20))), 122);
    fs::write(at.join("big"), pseudorandom(3 << 20)).unwrap();
    let room = |path: &str| rustix::fs::statvfs(at.join(path)).unwrap().f_blocks;
    assert!(room("a/b") < room("a"), "{} of {}", room("a/b"), room("a"));
    ok("fs snapshot -r %@then");
    fs::write(at.join("a/b/file"), "later").unwrap();
    assert_eq!(fs::read(at.join("a/b/.zfs/snapshot/then/file")).unwrap(), b"bottom");
    assert_eq!(fs::read(at.join("a/.zfs/snapshot/then/file")).unwrap(), b"middle");
    ok("fs set readonly=on %/a/b");
    assert_eq!(errno(fs::write(at.join("a/b/new"), "")), 30);
    fs::write(at.join("a/new"), "").unwrap();
    ok("fs set readonly=off %/a/b");
    // They come and go while others stay; a process in one keeps it.
    let open = fs::File::open(at.join("a/b/file")).unwrap();
    let (done, said) = nacre_says("fs unmount %/a");
    assert!(!done && said.contains("busy"), "another that is in use lies in it: {said}");
    let (done, said) = nacre_says("fs unmount %/a/b");
    assert!(!done && said.contains("busy"), "{said}");
    assert_eq!(fs::read(at.join("a/b/file")).unwrap(), b"later");
    ok("fs unmount -f %/a/b");
    assert!(fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open))).is_err());
    drop(open);
    assert_eq!(fs::read_dir(at.join("a/b")).unwrap().count(), 0, "its place stays in the one above");
    assert_eq!(ok("fs get -Ho value mounted %/a/b"), "no\n");
    ok("fs mount %/a/b");
    assert_eq!(fs::read(at.join("a/b/file")).unwrap(), b"later");
    let open = fs::File::open(at.join("a/b/file")).unwrap();
    ok("fs rollback %/a/b@then");
    drop(open);
    assert_eq!(fs::read(at.join("a/b/file")).unwrap(), b"bottom");
    eventually("nobody uses it", || nacre_says("fs rename %/a/b %/c").0);
    assert_eq!(fs::read(at.join("c/file")).unwrap(), b"bottom");
    eventually("nobody uses it", || nacre_says("fs destroy -r %/c").0);
    assert!(!at.join("c").exists());
    eventually("nobody uses it", || nacre_says("pool export %").0);
    assert!(!is_mounted(&at) && !at.join("a").exists());
    ok("pool import %");
    assert_eq!(fs::read(at.join("a/file")).unwrap(), b"middle");
    ok("pool destroy -f %");
}

#[test]
fn a_directory_moves_with_the_file_system_below_it() {
    needs!(as_user("a_directory_moves_with_the_file_system_below_it"));
    let place = crate::mounting::scratch();
    let name = format!("move{}", std::process::id());
    let ok = |arguments: &str| {
        let output = run(nacre(), arguments.replace('%', &name).split(' '));
        let said = text(&output.stdout).replace(&name, "%") + &text(&output.stderr);
        assert!(output.status.success(), "{arguments}: {said}");
        said
    };
    let at = place.path().join("at");
    ok(&format!("pool create --size 64M -m {} % {}", at.display(), place.path().join("device").display()));
    fs::create_dir(at.join("dir")).unwrap();
    ok(&format!("fs create -o mountpoint={} %/a", at.join("dir/below").display()));
    fs::write(at.join("dir/below/file"), "in it").unwrap();
    fs::write(at.join("dir/beside"), "not in it").unwrap();
    let open = fs::File::open(at.join("dir/below/file")).unwrap();
    // As with mounts of the kernel, what is mounted goes with the directory that it is mounted in.
    fs::rename(at.join("dir"), at.join("other")).unwrap();
    assert!(!at.join("dir").exists());
    assert_eq!(fs::read(at.join("other/below/file")).unwrap(), b"in it");
    assert_eq!(fs::read(at.join("other/beside")).unwrap(), b"not in it");
    fs::write(at.join("other/below/new"), "made there").unwrap();
    assert_eq!(errno(fs::rename(at.join("other/below"), at.join("other/away"))), 16);
    assert_eq!(errno(fs::remove_dir(at.join("other/below"))), 16);
    assert_eq!(ok("fs get -Ho value mounted %/a"), "yes\n");
    drop(open);
    eventually("nobody uses it", || run(nacre(), ["fs", "unmount", &format!("{name}/a")]).status.success());
    assert_eq!(fs::read_dir(at.join("other/below")).unwrap().count(), 0);
    // Where it is mounted next, its property says.
    ok("fs mount %/a");
    assert_eq!(fs::read(at.join("dir/below/new")).unwrap(), b"made there");
    assert_eq!(fs::read_dir(at.join("other/below")).unwrap().count(), 0);
    eventually("nobody uses it", || run(nacre(), ["pool", "export", &name]).status.success());
    assert!(!is_mounted(&at));
    ok("pool import %");
    assert_eq!(fs::read(at.join("dir/below/file")).unwrap(), b"in it");
    ok("pool destroy -f %");
}

/// Bytes that no compression makes fewer.
fn pseudorandom(length: usize) -> Vec<u8> {
    let mut state = 7_u32;
    let next = |()| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_n((), length).map(next).collect()
}

#[test]
fn a_user_owns_a_pool() {
    needs!(as_user("a_user_owns_a_pool"));
    let place = crate::mounting::scratch();
    let name = format!("mine{}", std::process::id());
    let pool = |arguments: &[&str]| {
        let output = run(nacre(), arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let (device, at, second) = (place.path().join("device"), place.path().join("at"), place.path().join("second"));
    let (device, shown) = (device.to_str().unwrap(), at.to_str().unwrap());
    pool(&["pool", "create", "--size", "64M", "-m", shown, &name, device]);
    // Not within the other.
    pool(&["fs", "create", "-o", &format!("mountpoint={}", second.display()), &format!("{name}/below")]);
    fs::write(at.join("file"), "mine").unwrap();
    fs::write(second.join("file"), "mine as well").unwrap();
    let user = rustix::process::geteuid().as_raw();
    assert_eq!(fs::metadata(&at).unwrap().uid(), user);
    pool(&["pool", "export", &name]);
    assert!(!is_mounted(&at));
    pool(&["pool", "import", &name]);
    assert_eq!(fs::read(second.join("file")).unwrap(), b"mine as well");
    pool(&["pool", "destroy", &name]);
    assert!(!is_mounted(&at));
}

#[test]
fn stores_to_a_mapping_are_in_a_users_copies() {
    needs!(as_user("stores_to_a_mapping_are_in_a_users_copies"));
    let scratch = crate::mounting::scratch();
    let mirror = own_mirror(&[]);
    crate::mapped::hole(&mirror.below("database"));
    crate::mapped::stores_are_copied(&mirror.at("database"), scratch.path());
    let pool = crate::mounting::pools::Pool::made("usermap", "256M", &[]);
    crate::mapped::hole(&pool.at("database"));
    crate::mapped::stores_are_copied(&pool.at("database"), scratch.path());
}

#[test]
fn stores_to_a_mapping_are_kept_by_a_forced_unmount_of_a_nested_file_system() {
    needs!(as_user("stores_to_a_mapping_are_kept_by_a_forced_unmount_of_a_nested_file_system"));
    let pool = crate::mounting::pools::Pool::made("userforce", "256M", &[]);
    let nested = pool.of("nested");
    pool.told(&["fs", "create", &nested]);
    let file = pool.at("nested/database");
    crate::mapped::hole(&file);
    crate::mapped::stored_while(&file, || {
        pool.told(&["fs", "unmount", "-f", &nested]);
    });
    pool.told(&["fs", "mount", &nested]);
    crate::mapped::has_stores(&file);
}
