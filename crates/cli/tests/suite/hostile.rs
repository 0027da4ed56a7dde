//! Hostile and unlucky cases that make other userspace file systems fail, hang or crash.

use crate::mounting::{Fixture, Reaped, as_root, descriptors, errno, eventually, is_mounted, memory, needs, run, sh};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::process::Signal;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ENOTCONN: i32 = 107;
const ECONNABORTED: i32 = 103;

/// Error of fsync(2) for a page whose request was aborted.
const EIO: i32 = 5;
/// Error of requests that wait in a ring of a daemon that dies.
const ECANCELED: i32 = 125;

#[test]
fn two_names_of_one_file_are_alike_at_once() {
    needs!(as_root());
    for coherence in ["watch", "exclusive", "revalidate"] {
        let fixture = Fixture::mirror(&[&format!("--coherence={coherence}")]);
        fs::write(fixture.at("one"), "x").unwrap();
        fs::hard_link(fixture.at("one"), fixture.at("two")).unwrap();
        fs::create_dir(fixture.at("d")).unwrap();
        fs::hard_link(fixture.at("one"), fixture.at("d/three")).unwrap();
        let same = |what: &str| {
            let all = ["one", "two", "d/three"].map(|name| {
                let m = fs::metadata(fixture.at(name)).unwrap();
                (m.ino(), m.nlink(), m.size(), m.mode(), m.uid(), m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec())
            });
            assert!(all[0] == all[1] && all[1] == all[2], "{coherence}, {what}: {all:?}");
        };
        same("links");
        fs::OpenOptions::new().append(true).open(fixture.at("two")).unwrap().write_all(b"more").unwrap();
        same("append");
        fs::set_permissions(fixture.at("d/three"), fs::Permissions::from_mode(0o600)).unwrap();
        same("chmod");
        std::os::unix::fs::chown(fixture.at("one"), Some(5), Some(6)).unwrap();
        same("chown");
        fs::OpenOptions::new().write(true).open(fixture.at("one")).unwrap().set_len(2).unwrap();
        same("truncate");
        fs::hard_link(fixture.at("two"), fixture.at("four")).unwrap();
        same("one more link");
        fs::remove_file(fixture.at("four")).unwrap();
        same("one less link");
    }
}

/// Held by tests that have many files open: all tests are one process, which may open only so many.
static MANY_FILES: Mutex<()> = Mutex::new(());

#[test]
fn thousands_of_descriptors() {
    needs!(as_root());
    let _alone = MANY_FILES.lock();
    let fixture = Fixture::mirror(&[]);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(20_000).min(20_000);
    let raised = rustix::process::Rlimit { current: Some(wanted), maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let count = usize::try_from(wanted).unwrap() - 500;
    let before = descriptors(fixture.pid());
    let files: Vec<fs::File> = (0..count)
        .map(|index| {
            fs::File::create(fixture.at(format!("file{index}")))
                .unwrap_or_else(|e| panic!("file {index} of {count}: {e}"))
        })
        .collect();
    for (index, mut file) in files.iter().enumerate().step_by(97) {
        file.write_all(format!("{index}").as_bytes()).unwrap();
    }
    drop(files);
    eventually("the daemon closes what it opened", || descriptors(fixture.pid()) <= before + 70);
    assert_eq!(fs::read(fixture.below("file97")).unwrap(), b"97");
}

#[test]
fn at_the_limit_of_descriptors_nothing_breaks() {
    needs!(as_root());
    let _alone = MANY_FILES.lock();
    for limit in [200, 64] {
        for layer in ["mirror", "cage", "union"] {
            with_few_descriptors(limit, layer);
        }
    }
}

/// A daemon that may open few files: users get EMFILE or ENFILE for further opens, everything else
/// works, and nothing is leaked.
fn with_few_descriptors(limit: u32, layer: &str) {
    const DIRECTORIES: usize = 50;
    let mut fixture = Fixture::bare();
    let lower = fixture.directory("lower");
    let filled = if layer == "union" { &lower } else { &fixture.source };
    let deep: PathBuf = (0..DIRECTORIES).map(|depth| format!("deep{depth}")).collect();
    fs::create_dir_all(filled.join(&deep)).unwrap();
    for index in 0..DIRECTORIES {
        fs::create_dir(filled.join(format!("d{index}"))).unwrap();
        (0..20).for_each(|file| fs::write(filled.join(format!("d{index}/f{file}")), "content").unwrap());
    }
    let place: PathBuf = match layer {
        "union" => format!("{}=rw:{}=ro", fixture.source.display(), lower.display()).into(),
        _ => fixture.source.clone(),
    };
    // Root would raise the limit where it may.
    let mut daemon = std::process::Command::new("setpriv");
    daemon
        .arg("--bounding-set=-sys_resource")
        .arg("prlimit")
        .arg(format!("--nofile={limit}:{limit}"))
        .arg(crate::mounting::nacre());
    daemon.args([layer, "-f"]).args(crate::mounting::transport_words(&[])).env("NACRE_STATE_DIR", fixture.state());
    daemon.args((layer == "cage").then_some("--size=8G")).arg(place).arg(&fixture.mountpoint);
    let guard = Reaped(daemon.spawn().unwrap());
    eventually("mounted", || is_mounted(&fixture.mountpoint));
    let all = || {
        (0..DIRECTORIES).for_each(|index| changes_by_name(&fixture.at(format!("d{index}"))));
        fixture.at(&deep).ancestors().take(DIRECTORIES).for_each(changes_of_names);
    };
    all();
    let mut files = Vec::new();
    let mut refused = 0;
    for index in 0..600 {
        let path = fixture.at(format!(
            "d{}/{}{}",
            index % DIRECTORIES,
            if index % 2 == 0 { "f" } else { "new" },
            index / DIRECTORIES + 1
        ));
        match fs::OpenOptions::new().read(true).append(true).create(true).open(path) {
            Ok(file) => files.push(file),
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(23 | 24)), "file {index}: {error}");
                refused += 1;
            }
        }
    }
    println!("{layer} with {limit} descriptors: {} open, {refused} refused", files.len());
    // Cages are not asked to open a file.
    assert!(!files.is_empty() && (refused > 0) != (layer == "cage"));
    // What is open works, and so does everything that opens nothing for long, also by many at once.
    files.iter_mut().for_each(|file| file.write_all(b"x").unwrap());
    all();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let own = fixture.at(format!("own{thread}"));
            scope.spawn(move || {
                fs::create_dir(&own).unwrap();
                (0..DIRECTORIES).for_each(|_| changes_of_names(&own));
            });
        }
    });
    drop(files);
    eventually("opens work again", || fs::write(fixture.at("again"), "x").is_ok());
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), DIRECTORIES + 10);
    assert!(run(crate::mounting::nacre(), [Path::new("umount"), &fixture.mountpoint]).status.success());
    drop(guard);
    fixture.mountpoint = fixture.scratch.path().join("none");
}

const NEW_YEAR: rustix::fs::Timespec = rustix::fs::Timespec { tv_sec: 946_684_800, tv_nsec: 0 };

/// Changes the files of a directory by their names, and then the names.
fn changes_by_name(directory: &Path) {
    for index in 0..20 {
        let file = directory.join(format!("f{index}"));
        assert!(fs::metadata(&file).unwrap().is_file());
        if index % 10 == 0 {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
            rustix::fs::setxattr(&file, "user.note", b"kept", rustix::fs::XattrFlags::empty()).unwrap();
            let times = rustix::fs::Timestamps { last_access: NEW_YEAR, last_modification: NEW_YEAR };
            rustix::fs::utimensat(CWD, &file, &times, AtFlags::empty()).unwrap();
            fs::hard_link(&file, directory.join("linked")).unwrap();
            fs::remove_file(directory.join("linked")).unwrap();
        }
    }
    changes_of_names(directory);
}

/// Makes, lists, renames and removes names in a directory.
fn changes_of_names(directory: &Path) {
    let at = |name: &str| directory.join(name);
    fs::create_dir(at("made")).unwrap();
    fs::rename(at("made"), at("moved")).unwrap();
    std::os::unix::fs::symlink("target", at("moved/link")).unwrap();
    fs::rename(at("moved/link"), at("link")).unwrap();
    assert!(fs::read_dir(directory).unwrap().any(|entry| entry.unwrap().file_name() == "link"));
    fs::remove_file(at("link")).unwrap();
    fs::set_permissions(at("moved"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::remove_dir(at("moved")).unwrap();
}

#[test]
fn nothing_leaks() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    let work = |round: u32| {
        for index in 0..50 {
            let (file, directory) = (fixture.at(format!("f{index}")), fixture.at(format!("d{index}")));
            fs::write(&file, format!("{round}")).unwrap();
            fs::read(&file).unwrap();
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("inner"), "").unwrap();
            fs::rename(&file, directory.join("moved")).unwrap();
            assert!(fs::File::open(fixture.at("missing")).is_err());
            std::os::unix::fs::symlink("x", directory.join("link")).unwrap();
            fs::read_dir(&directory).unwrap().count();
            let nameless =
                rustix::fs::open(&directory, OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o600)).unwrap();
            rustix::io::write(&nameless, b"x").unwrap();
            drop(nameless);
            fs::remove_dir_all(&directory).unwrap();
        }
    };
    work(0);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let before = descriptors(fixture.pid());
    // Threads that start meanwhile have descriptors of their own.
    const FEW: usize = 16;
    for round in 1..=2 * FEW as u32 {
        work(round);
    }
    eventually("descriptors return to what they were", || descriptors(fixture.pid()) <= before + FEW);
    let status = crate::mounting::status::Status::of(&fixture.mountpoint);
    eventually("no file stays open", || {
        crate::mounting::status::Status::of(&fixture.mountpoint).number("open_files") == 0
    });
    println!("{} inodes known at the end", status.number("inodes"));
}

#[test]
fn a_blocked_flock_can_be_interrupted() {
    needs!(as_root());
    for options in [&[][..], &["--enable-lock-forwarding"]] {
        let fixture = Fixture::mirror(options);
        let holder = fs::File::create(fixture.at("file")).unwrap();
        rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
        // Many waiters, more than there are threads: others must be served meanwhile.
        let mut waiters: Vec<Reaped> = (0..12)
            .map(|_| Reaped(std::process::Command::new("flock").arg(fixture.at("file")).arg("true").spawn().unwrap()))
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(300));
        for index in 0..20 {
            fs::write(fixture.at(format!("meanwhile{index}")), "x").unwrap();
        }
        for waiter in &mut waiters {
            assert!(waiter.0.try_wait().unwrap().is_none(), "{options:?}: a waiter got the lock");
        }
        for waiter in waiters.iter().take(6) {
            crate::mounting::kill(waiter.0.id(), Signal::TERM);
        }
        eventually("interrupted waiters end", || {
            waiters[..6].iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some())
        });
        for waiter in waiters.iter().skip(6).take(3) {
            crate::mounting::kill(waiter.0.id(), Signal::KILL);
        }
        eventually("killed waiters end", || {
            waiters[..9].iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some())
        });
        drop(holder);
        eventually("the others get the lock", || {
            waiters[9..].iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some_and(|status| status.success()))
        });
    }
}

#[test]
fn forwarded_locks_hold_against_the_source() {
    needs!(as_root());
    let fixture = Fixture::mirror(&["--enable-lock-forwarding"]);
    fs::write(fixture.at("file"), "content").unwrap();
    let above = fs::File::options().read(true).write(true).open(fixture.at("file")).unwrap();
    let below = fs::File::options().read(true).write(true).open(fixture.below("file")).unwrap();
    rustix::fs::flock(&above, FlockOperation::LockExclusive).unwrap();
    assert!(rustix::fs::flock(&below, FlockOperation::NonBlockingLockExclusive).is_err(), "flock does not hold below");
    rustix::fs::flock(&above, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&below, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(
        rustix::fs::flock(&above, FlockOperation::NonBlockingLockExclusive).is_err(),
        "flock below does not hold above"
    );
    // Not by closing: a child that another test is just starting has a copy of the descriptor until
    // it is another program.
    rustix::fs::flock(&below, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&above, FlockOperation::NonBlockingLockExclusive).unwrap();
    // Without the option, the two are apart.
    let fixture = Fixture::mirror(&["--disable-lock-forwarding"]);
    fs::write(fixture.at("file"), "content").unwrap();
    let (above, below) = (fs::File::open(fixture.at("file")).unwrap(), fs::File::open(fixture.below("file")).unwrap());
    rustix::fs::flock(&above, FlockOperation::LockExclusive).unwrap();
    rustix::fs::flock(&below, FlockOperation::NonBlockingLockExclusive).unwrap();
}

#[test]
fn swapped_names_never_leave_the_source() {
    needs!(as_root());
    // One thread swaps a directory and a link to a place outside, others create, chown and chmod
    // below that name through the mount: nothing outside may ever be touched.
    let fixture = Fixture::mirror(&["--create-with-perms=0600"]);
    let outside = fixture.directory("outside");
    fs::write(outside.join("victim"), "safe").unwrap();
    let clean = |what: &str| {
        let names: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["victim"], "{what}");
        let victim = fs::metadata(outside.join("victim")).unwrap();
        assert_eq!((victim.uid(), victim.mode() & 0o777, victim.len()), (0, 0o644, 4), "{what}");
    };
    fs::create_dir(fixture.below("d")).unwrap();
    fs::write(fixture.below("d/victim"), "decoy").unwrap();
    std::os::unix::fs::symlink(&outside, fixture.below("link")).unwrap();
    let done = AtomicBool::new(false);
    let made = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            // On and on until the others have had their turns, too.
            for round in 0.. {
                if round >= 3_000 && (made.load(Ordering::Relaxed) > 0 || start.elapsed() > Duration::from_secs(20)) {
                    break;
                }
                let _ = rustix::fs::renameat_with(
                    CWD,
                    fixture.below("d"),
                    CWD,
                    fixture.below("link"),
                    RenameFlags::EXCHANGE,
                );
            }
            done.store(true, Ordering::Release);
        });
        for thread in 0..2 {
            let (fixture, done, made) = (&fixture, &done, &made);
            scope.spawn(move || {
                // The names stay inside of one open directory, where a link is never followed by
                // the kernel in front of us.
                let root =
                    rustix::fs::open(&fixture.mountpoint, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
                let mut round = 0;
                while !done.load(Ordering::Acquire) {
                    round += 1;
                    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
                    let Ok(directory) = rustix::fs::openat(&root, "d", flags, Mode::empty()) else { continue };
                    let name = format!("new{thread}-{round}");
                    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW;
                    if rustix::fs::openat(&directory, &name, flags, Mode::from_raw_mode(0o666)).is_ok() {
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                    let (uid, gid) = (rustix::fs::Uid::from_raw(1000), rustix::fs::Gid::from_raw(1000));
                    let _ = rustix::fs::chownat(&directory, "victim", Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
                    let _ = rustix::fs::chmodat(&directory, "victim", Mode::from_raw_mode(0o777), AtFlags::empty());
                    let _ = rustix::fs::openat(
                        &directory,
                        "victim",
                        OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW,
                        Mode::empty(),
                    );
                    let _ = rustix::fs::unlinkat(&directory, &name, AtFlags::empty());
                }
            });
        }
    });
    clean("after the race");
    assert!(made.load(Ordering::Relaxed) > 0, "the race never got into the directory");
}

#[test]
fn creations_and_renames_race() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    for name in ["a", "b"] {
        fs::create_dir(fixture.at(name)).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2_000 {
                for (from, to) in [("a", "c"), ("b", "a"), ("c", "b")] {
                    fs::rename(fixture.at(from), fixture.at(to)).unwrap();
                }
            }
            done.store(true, Ordering::Release);
        });
        for thread in 0..3 {
            let (fixture, done) = (&fixture, &done);
            scope.spawn(move || {
                let mut round = 0;
                while !done.load(Ordering::Acquire) {
                    round += 1;
                    let path = fixture.at(format!("{}/{thread}-{round}", ["a", "b", "c"][round % 3]));
                    match fs::write(&path, format!("{thread}-{round}")) {
                        Ok(()) | Err(_) if done.load(Ordering::Acquire) => {}
                        Ok(()) => {}
                        Err(error) => {
                            assert!(matches!(error.raw_os_error(), Some(2 | 116)), "{}: {error}", path.display())
                        }
                    }
                }
            });
        }
    });
    for name in ["a", "b"] {
        let names = |directory: &Path| {
            let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let listed = names(&fixture.at(name));
        assert_eq!(listed, names(&fixture.below(name)));
        for file in listed {
            let content = fs::read(fixture.at(name).join(&file)).unwrap();
            assert!(content == file.as_bytes() || content.is_empty(), "{file:?} holds another file's content");
        }
    }
}

#[test]
fn a_removed_source_is_an_error_and_not_a_hang() {
    needs!(as_root());
    let mut fixture = Fixture::mirror_of(&[], |source| fs::write(source.join("file"), "content").unwrap());
    let mut open = fs::File::open(fixture.at("file")).unwrap();
    fs::remove_dir_all(&fixture.source).unwrap();
    eventually("the file is gone", || fs::metadata(fixture.at("file")).is_err());
    assert!(fs::write(fixture.at("new"), "x").is_err());
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!(content, "content", "an open file lives on");
    drop(open);
    let _ = fs::read_dir(&fixture.mountpoint).map(Iterator::count);
    assert!(fixture.runs());
    // A new directory by the old name is another directory.
    fs::create_dir(&fixture.source).unwrap();
    fs::write(fixture.below("other"), "").unwrap();
    assert!(fs::metadata(fixture.at("other")).is_err());
    fixture.unmount();
}

#[test]
fn a_killed_daemon_leaves_the_source_whole() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough()] {
        let mut fixture = Fixture::mirror(options);
        let stop = AtomicBool::new(false);
        let synced = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (fixture, stop, synced) = (&fixture, &stop, &synced);
                scope.spawn(move || {
                    for index in 0.. {
                        let path = fixture.at(format!("{writer}-{index}"));
                        let result = fs::File::create(&path).and_then(|mut file| {
                            file.write_all(format!("{writer}-{index}").as_bytes())?;
                            file.sync_all()
                        });
                        match result {
                            Ok(()) if writer == 0 => synced.store(index + 1, Ordering::Release),
                            Ok(()) => {}
                            Err(error) => {
                                // What was under way is aborted, what comes later finds no
                                // connection.
                                assert!(stop.load(Ordering::Acquire), "before the daemon was killed: {error}");
                                assert!(
                                    matches!(error.raw_os_error(), Some(ENOTCONN | ECONNABORTED | ECANCELED | EIO)),
                                    "{error}"
                                );
                                return;
                            }
                        }
                    }
                });
            }
            let reader = &fixture;
            eventually("some files are written", || synced.load(Ordering::Acquire) > 20);
            stop.store(true, Ordering::Release);
            crate::mounting::kill(reader.pid(), Signal::KILL);
        });
        assert_eq!(fixture.ended(), None, "the daemon died of the signal");
        // Its rings may exist for a moment longer than the process.
        eventually("the mount is dead", || errno(fs::metadata(fixture.at("never asked for"))) == ENOTCONN);
        assert_eq!(errno(fs::File::open(fixture.at("0-0"))), ENOTCONN);
        assert_eq!(errno(fs::write(fixture.at("new"), "x")), ENOTCONN);
        for index in 0..synced.load(Ordering::Acquire) {
            assert_eq!(fs::read(fixture.below(format!("0-{index}"))).unwrap(), format!("0-{index}").as_bytes());
        }
        // The dead mount goes, the next one works.
        let output = run(crate::mounting::nacre(), [Path::new("umount"), &fixture.mountpoint]);
        assert!(output.status.success(), "{}", crate::mounting::text(&output.stderr));
        assert!(!is_mounted(&fixture.mountpoint));
        let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
        fixture.start(&["mirror"], source.as_ref(), &mountpoint);
        assert_eq!(fs::read(fixture.at("0-0")).unwrap(), b"0-0");
        fixture.unmount();
    }
}

#[test]
fn a_new_mount_over_a_dead_one_works() {
    needs!(as_root());
    let mut fixture = Fixture::mirror(&[]);
    fixture.signal(Signal::KILL);
    assert_eq!(fixture.ended(), None);
    eventually("the mount is dead", || {
        fs::metadata(fixture.at("x")).is_err_and(|error| error.raw_os_error() == Some(ENOTCONN))
    });
    // What an administrator tries first: the same command again. It works, or says what to do.
    let output = run(crate::mounting::nacre(), [Path::new("mirror"), &fixture.source, &fixture.mountpoint]);
    if output.status.success() {
        assert!(fs::metadata(&fixture.mountpoint).is_ok());
        assert!(run(crate::mounting::nacre(), [Path::new("umount"), &fixture.mountpoint]).status.success());
    } else {
        assert!(crate::mounting::text(&output.stderr).contains("umount"), "{}", crate::mounting::text(&output.stderr));
    }
}

#[test]
fn a_source_that_contains_its_own_mount_point() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    fs::create_dir_all(fixture.below("a/mount")).unwrap();
    fs::write(fixture.below("a/mount/covered"), "covered").unwrap();
    let mountpoint = fixture.below("a/mount");
    let source = fixture.source.clone();
    fixture.start(&["mirror"], source.as_ref(), &mountpoint);
    assert_eq!(fs::read(mountpoint.join("file")).unwrap(), b"content");
    // Into the mount, out of it, and through itself: every walk ends.
    let walked = sh(&mountpoint, "find . | sort | head -100");
    assert!(walked.contains("./file") && walked.contains("./a/mount"), "{walked}");
    let _ = fs::metadata(mountpoint.join("a/mount/a/mount/a/mount"));
    fs::write(mountpoint.join("new"), "x").unwrap();
    sh(&fixture.source.clone(), "find . -xdev | head -100; du -s . >/dev/null 2>&1 || true");
    fixture.mountpoint = mountpoint;
    fixture.unmount();
    assert_eq!(fs::read(fixture.below("a/mount/covered")).unwrap(), b"covered");
}

#[test]
fn a_mount_over_its_own_source() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let source = fixture.source.clone();
    fixture.start(&["mirror", "--force-user=1234"], source.as_ref(), &source);
    let file = fs::metadata(source.join("file")).unwrap();
    assert_eq!(file.uid(), 1234);
    fs::write(source.join("new"), "x").unwrap();
    fixture.mountpoint = source;
    fixture.unmount();
    assert_eq!(fs::metadata(fixture.below("new")).unwrap().uid(), 0);
}

#[test]
fn other_mounts_in_the_source_are_crossed_or_shown_as_empty_but_never_hang() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], |source| {
        fs::create_dir(source.join("inner")).unwrap();
        let output = run("mount", ["-t", "tmpfs", "tmpfs", source.join("inner").to_str().unwrap()]);
        assert!(output.status.success());
        fs::write(source.join("inner/file"), "inside").unwrap();
    });
    assert_eq!(
        fs::read(fixture.at("inner/file")).unwrap(),
        b"inside",
        "a mount in the source is part of what is shown"
    );
    assert_eq!(errno(fs::rename(fixture.at("inner/file"), fixture.at("file"))), 18);
    assert_eq!(errno(fs::hard_link(fixture.at("inner/file"), fixture.at("file"))), 18);
    sh(&fixture.mountpoint, "cp inner/file copy && ls -lR . >/dev/null");
    assert_eq!(fs::read(fixture.below("copy")).unwrap(), b"inside");
}

#[test]
fn many_threads_do_everything_at_once() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let fixture = &fixture;
            scope.spawn(move || {
                for round in 0..150 {
                    let name = format!("{}", (thread * 31 + round * 17) % 23);
                    let other = format!("{}", (thread * 7 + round * 5) % 23);
                    let _ = fs::write(fixture.at(&name), format!("{thread} {round}"));
                    let _ = fs::read(fixture.at(&other));
                    let _ = fs::hard_link(fixture.at(&name), fixture.at(format!("link{other}")));
                    let _ = fs::rename(fixture.at(&name), fixture.at(&other));
                    let _ = fs::remove_file(fixture.at(format!("link{name}")));
                    let _ = fs::read_dir(&fixture.mountpoint).map(Iterator::count);
                    let _ = fs::metadata(fixture.at(&name));
                }
            });
        }
    });
    let names = |directory: &Path| {
        let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&fixture.mountpoint), names(&fixture.source));
    for name in names(&fixture.source) {
        let (above, below) = (fs::metadata(fixture.at(&name)).unwrap(), fs::metadata(fixture.below(&name)).unwrap());
        assert_eq!((above.ino(), above.nlink(), above.len()), (below.ino(), below.nlink(), below.len()), "{name:?}");
        assert_eq!(fs::read(fixture.at(&name)).unwrap(), fs::read(fixture.below(&name)).unwrap(), "{name:?}");
    }
}

#[test]
fn a_full_file_system_is_told() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough()] {
        let mut fixture = Fixture::bare();
        let source = fixture.source.clone();
        assert!(run("mount", ["-t", "tmpfs", "-o", "size=1m", "tmpfs", source.to_str().unwrap()]).status.success());
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&[&["mirror"], options].concat(), source.as_ref(), &mountpoint);
        let mut file = fs::File::create(fixture.at("file")).unwrap();
        let result = (0..40).try_for_each(|_| file.write_all(&[1; 65_536])).and_then(|()| file.sync_all());
        assert_eq!(errno(result), 28, "{options:?}");
        drop(file);
        fs::remove_file(fixture.at("file")).unwrap();
        // The space is free when the daemon has closed the file, which no caller waits for.
        eventually("there is room again", || fs::write(fixture.at("small"), "fits").is_ok());
        assert_eq!(fs::read(fixture.below("small")).unwrap(), b"fits");
    }
}

#[test]
fn locks_of_processes_that_die_are_freed() {
    needs!(as_root());
    for options in [&[][..], &["--enable-lock-forwarding"]] {
        let fixture = Fixture::mirror(options);
        fs::write(fixture.at("file"), "x").unwrap();
        let mut holder =
            Reaped(std::process::Command::new("flock").arg(fixture.at("file")).args(["sleep", "100"]).spawn().unwrap());
        let file = fs::File::open(fixture.at("file")).unwrap();
        eventually("the lock is held", || {
            let free = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            if free {
                rustix::fs::flock(&file, FlockOperation::Unlock).unwrap();
            }
            !free
        });
        sh(Path::new("/"), &format!("kill -9 $(cat /proc/{0}/task/{0}/children)", holder.0.id()));
        holder.0.kill().unwrap();
        holder.0.wait().unwrap();
        eventually("the lock is free", || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
    }
}

#[test]
fn a_hundred_thousand_visited_files_cost_little_memory() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], |source| {
        for directory in 0..100 {
            let directory = source.join(format!("d{directory}"));
            fs::create_dir(&directory).unwrap();
            for file in 0..1_000 {
                fs::File::create(directory.join(format!("file-{file}"))).unwrap();
            }
        }
    });
    // Pages of the program's own file are not counted: the kernel has them once for all, and drops
    // them at will.
    let idle = memory(fixture.pid(), "RssAnon");
    assert!(idle < 10 * 1024, "an idle daemon takes {idle} KiB");
    // The kernel may forget inodes at any time, as when its caches are dropped: then they are
    // visited again.
    let (mut visited, mut inodes) = (0, 0);
    eventually("every file is known", || {
        sh(&fixture.mountpoint, "find . -type f -size +1k | wc -l");
        visited = memory(fixture.pid(), "RssAnon");
        inodes = crate::mounting::status::Status::of(&fixture.mountpoint).number("inodes");
        inodes >= 100_000
    });
    let each = visited.saturating_sub(idle) * 1024 / inodes;
    println!("idle {idle} KiB, after {inodes} files {visited} KiB: {each} bytes each");
    assert!(each < 400, "{each} bytes for each visited file (a debug build: 200 is the aim of a release build)");
    assert!(descriptors(fixture.pid()) < 3_000, "{} descriptors", descriptors(fixture.pid()));
    // When the kernel forgets, so does the daemon.
    let mount = rustix::fs::open(&fixture.mountpoint, OFlags::PATH, Mode::empty()).unwrap();
    let _: &OwnedFd = &mount;
    assert!(mount.as_raw_fd() >= 0);
    sh(Path::new("/"), "sync; echo 2 > /proc/sys/vm/drop_caches");
    eventually("the daemon forgets", || {
        crate::mounting::status::Status::of(&fixture.mountpoint).number("inodes") < inodes / 2
    });
}

/// A mount whose daemon is stopped, and users who wait for it.
fn stuck(options: &[&str]) -> (Fixture, Vec<Reaped>) {
    let fixture = Fixture::mirror(options);
    fixture.signal(Signal::STOP);
    let stopped =
        |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| stat.contains(") T "));
    let tasks = format!("/proc/{}/task", fixture.pid());
    eventually("every thread is stopped", || fs::read_dir(&tasks).unwrap().all(|task| stopped(task.unwrap())));
    let stat = |index| {
        std::process::Command::new("stat")
            .arg(fixture.at(format!("never asked {index}")))
            .stderr(std::process::Stdio::null())
            .spawn()
    };
    let mut waiters: Vec<Reaped> = (0..3).map(|index| Reaped(stat(index).unwrap())).collect();
    std::thread::sleep(std::time::Duration::from_millis(300));
    for waiter in &mut waiters {
        assert!(waiter.0.try_wait().unwrap().is_none(), "nobody can have answered");
    }
    crate::mounting::kill(waiters[0].0.id(), Signal::KILL);
    (fixture, waiters)
}

#[test]
fn users_of_a_stuck_daemon_are_freed_by_its_end() {
    needs!(as_root());
    let (mut fixture, mut waiters) = stuck(&[]);
    fixture.signal(Signal::KILL);
    assert_eq!(fixture.ended(), None);
    eventually("the waiters end", || waiters.iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some()));
}

#[test]
fn users_of_a_stuck_daemon_are_freed_by_force() {
    needs!(as_root());
    // Over io_uring, requests wait until the daemon's own threads are released, and only its end
    // (as above) helps.
    let (mut fixture, mut waiters) = stuck(&["--transport=device"]);
    let output = run("umount", [Path::new("-f"), Path::new("-l"), &fixture.mountpoint]);
    assert!(output.status.success(), "{}", crate::mounting::text(&output.stderr));
    eventually("the waiters end", || waiters.iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some()));
    assert!(!is_mounted(&fixture.mountpoint));
    fixture.signal(Signal::CONT);
    assert_eq!(fixture.ended(), Some(0), "the daemon sees that it is over");
}

#[test]
fn a_blocked_record_lock_can_be_killed() {
    needs!(as_root());
    let Ok(output) = std::process::Command::new("python3").arg("-V").output() else {
        crate::mounting::skip("python", "python3 is not installed: it makes the record locks of another process");
        return;
    };
    assert!(output.status.success());
    let script = "import fcntl,sys\nf=open(sys.argv[1],'r+')\nfcntl.lockf(f,fcntl.LOCK_EX,10,5)\nprint('got',flush=True)\nsys.stdin.read()";
    for options in [&[][..], &["--enable-lock-forwarding"]] {
        let fixture = Fixture::mirror(options);
        fs::write(fixture.at("file"), "content").unwrap();
        let python = || {
            let mut command = std::process::Command::new("python3");
            command.args(["-c", script]).arg(fixture.at("file"));
            Reaped(command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap())
        };
        let got = |holder: &mut Reaped| {
            let mut line = [0; 4];
            holder.0.stdout.as_mut().unwrap().read_exact(&mut line).is_ok_and(|()| &line == b"got\n")
        };
        let mut holder = python();
        assert!(got(&mut holder), "{options:?}");
        let (mut killed, mut patient) = (python(), python());
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(
            killed.0.try_wait().unwrap().is_none() && patient.0.try_wait().unwrap().is_none(),
            "{options:?}: both wait"
        );
        fs::write(fixture.at("meanwhile"), "x").unwrap();
        crate::mounting::kill(killed.0.id(), Signal::KILL);
        eventually("a waiter can be killed", || killed.0.try_wait().unwrap().is_some());
        holder.0.kill().unwrap();
        holder.0.wait().unwrap();
        assert!(got(&mut patient), "{options:?}: the lock of a dead process is free");
    }
}

fn has_python() -> bool {
    let found = std::process::Command::new("python3").arg("-V").output().is_ok();
    found || crate::mounting::skip("python", "python3 is not installed: it makes system calls of another process")
}

/// Runs a program of Python's that prints a line when it has begun.
fn python<S: AsRef<std::ffi::OsStr>>(script: &str, arguments: impl IntoIterator<Item = S>) -> Reaped {
    let mut command = std::process::Command::new("python3");
    command.args(["-c", script]).args(arguments).stdout(std::process::Stdio::piped());
    let mut program = Reaped(command.stdin(std::process::Stdio::piped()).spawn().unwrap());
    let mut line = [0; 1];
    program.0.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    program
}

/// Has other users' requests be answered, which the kernel has caches for none of.
fn others_go_on(view: &Path, what: &str) {
    for round in 0..3 {
        let script = format!("echo x > meanwhile{round} && chmod 600 meanwhile{round} && ls -l . > /dev/null");
        let mut other =
            Reaped(std::process::Command::new("sh").args(["-c", &script]).current_dir(view).spawn().unwrap());
        eventually(what, || other.0.try_wait().unwrap().is_some_and(|status| status.success()));
    }
}

/// Number of requests that wait for a lock of the source: more than there are threads.
const WAITERS: usize = 60;

/// A write from memory that never arrives holds the inode's lock in the source; other users of that
/// inode wait, and no one else.
#[test]
fn a_lock_that_is_held_below_for_good_holds_nobody_else_up() {
    needs!(as_root());
    if !has_python() {
        return;
    }
    let script = "import ctypes,mmap,os,sys\nc=ctypes.CDLL(None)\nc.mmap.restype=ctypes.c_void_p\n\
        memory=os.open(sys.argv[1],os.O_RDONLY)\nto=os.open(sys.argv[2],os.O_WRONLY)\n\
        page=c.mmap(None,ctypes.c_size_t(4096),1,2,memory,ctypes.c_long(0))\n\
        print(end='x',flush=True)\nsys.stdin.readline()\nc.write(to,ctypes.c_void_p(page),ctypes.c_size_t(4096))";
    let (union, upper) = crate::mounting::unions::over(&[], |_| ());
    let mirrors = [Fixture::mirror(&["--transport=device"]), Fixture::mirror(&["--survive", "--transport=device"])];
    let views = mirrors.iter().map(|mirror| (mirror, mirror.source.clone())).chain([(&union, upper)]);
    for (fixture, source) in views {
        fs::write(source.join("held"), "content").unwrap();
        // Declared first, so ended last: they wait for the daemon that is stopped.
        let (mut waiters, mut holder): (Vec<Reaped>, Reaped);
        let absent =
            Fixture::mirror_of(&["--passthrough=off"], |source| fs::write(source.join("page"), [7; 4096]).unwrap());
        holder = python(script, [absent.at("page"), source.join("held")]);
        absent.freeze();
        holder.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let stack = format!("/proc/{}/stack", holder.0.id());
        eventually("the writer waits for its memory", || fs::read_to_string(&stack).unwrap().contains("fault"));
        let truncate =
            || std::process::Command::new("sh").args(["-c", ": > held"]).current_dir(&fixture.mountpoint).spawn();
        waiters = (0..WAITERS).map(|_| Reaped(truncate().unwrap())).collect();
        others_go_on(&fixture.mountpoint, "others go on beside a lock that is held for good");
        assert!(waiters.iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_none()), "all wait for the lock");
        absent.signal(Signal::CONT);
        eventually("all get the lock", || waiters.iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some()));
    }
}

/// Leases of other processes on files of the source.
#[test]
fn opens_wait_for_leases_as_natively() {
    needs!(as_root());
    if !has_python() {
        return;
    }
    let holds = "import fcntl,os,signal,sys\nsignal.signal(signal.SIGIO,signal.SIG_IGN)\n\
        all=[os.open(path,os.O_RDWR) for path in sys.argv[1:]]\n\
        [fcntl.fcntl(file,fcntl.F_SETLEASE,fcntl.F_WRLCK) for file in all]\nprint(end='x',flush=True)\nsys.stdin.read()";
    let open = "import os,sys\nprint(end='x',flush=True)\n\
        os.truncate(sys.argv[1],3) if sys.argv[2]=='cut' else os.close(os.open(sys.argv[1],os.O_RDWR))";
    let at_once =
        "import os,sys\ntry: os.open(sys.argv[1],os.O_RDWR|os.O_NONBLOCK)\nexcept OSError as e: print(e.errno)";
    let (union, upper) = crate::mounting::unions::over(&[], |_| ());
    let (bare, mirror) = (Fixture::bare(), Fixture::mirror(&[]));
    let views = [
        (bare.source.clone(), bare.source.clone()),
        (mirror.mountpoint.clone(), mirror.source.clone()),
        (union.mountpoint.clone(), upper),
    ];
    for (view, source) in views {
        let names: Vec<String> = (0..WAITERS).map(|index| format!("leased{index}")).collect();
        names.iter().for_each(|name| fs::write(source.join(name), "content").unwrap());
        let mut holder = python(holds, names.iter().map(|name| source.join(name)));
        let refused = sh(&view, &format!("python3 -c '{at_once}' leased0"));
        assert_eq!(refused.trim(), "11", "{view:?}: EWOULDBLOCK");
        let mut waiters: Vec<Reaped> = names
            .iter()
            .zip(["open", "cut"].into_iter().cycle())
            .map(|(name, how)| python(open, [view.join(name), how.into()]))
            .collect();
        others_go_on(&view, "others go on beside leases");
        let (killed, patient) = waiters.split_at_mut(WAITERS / 2);
        killed.iter().for_each(|waiter| crate::mounting::kill(waiter.0.id(), Signal::KILL));
        eventually("waiters can be killed", || killed.iter_mut().all(|waiter| waiter.0.try_wait().unwrap().is_some()));
        holder.0.kill().unwrap();
        holder.0.wait().unwrap();
        let opened = |waiter: &mut Reaped| waiter.0.try_wait().unwrap().is_some_and(|status| status.success());
        eventually("the others open their files", || patient.iter_mut().all(opened));
    }
}

/// The user who is shown as the owner of root's files gets no program that runs as root below.
#[test]
fn set_id_bits_belong_to_owners_below() {
    needs!(as_root());
    let script = "chmod 6755 roots; install -m 6755 /bin/true new; chmod 6755 new; chmod 2775 d; true";
    for options in [
        &["--force-user=1000", "--force-group=1000"][..],
        &["--force-user=1000", "--force-group=1000", "--create-for-user=0", "--create-for-group=0"],
        &["--map=0/1000:@0/@1000"],
        &["--mirror=1000"],
    ] {
        let fixture = Fixture::mirror_of(options, |source| {
            fs::write(source.join("roots"), "x").unwrap();
            fs::create_dir(source.join("d")).unwrap();
        });
        let (code, said) = crate::mounting::sh_as(&fixture.mountpoint, 1000, 1000, "1000", script);
        assert_eq!(code, 0, "{options:?}: {said}");
        assert_eq!(fs::metadata(fixture.below("roots")).unwrap().mode() & 0o7777, 0o755, "{options:?}");
        let new = fs::metadata(fixture.below("new")).unwrap();
        let own = if (new.uid(), new.gid()) == (1000, 1000) { 0o6755 } else { 0o755 };
        assert_eq!(new.mode() & 0o7777, own, "{options:?}");
        fs::set_permissions(fixture.at("roots"), fs::Permissions::from_mode(0o6755)).unwrap();
        assert_eq!(fs::metadata(fixture.below("roots")).unwrap().mode() & 0o7777, 0o6755, "{options:?}: root");
    }
}

/// A process whose working directory is removed or replaced sees in it the same as natively.
#[test]
fn a_directory_without_a_name_answers() {
    needs!(as_root());
    let script = |view: &Path| {
        let asked = "stat -c '%h %a %F' .; ls -la .; chmod 700 .; touch -d @1 .; stat -c '%a %Y' .; setfattr -n user.a -v 1 .; getfattr -d . 2>&1; touch new 2>&1; mkdir new 2>&1";
        let all = format!(
            "set +e; mkdir -p d e/f g/h; (cd d; rmdir ../d; {asked}); (cd e/f; mv -T ../../g/h ../../e/f; {asked})
             mkdir k; exec 3<k; rmdir k; stat -L -c '%h %F' /proc/self/fd/3; exec 3<&-; rm -r e g; ls"
        );
        sh(view, &all)
    };
    let bare = Fixture::bare();
    let natively = script(&bare.source);
    assert!(natively.starts_with("0 755 directory\ntotal 0\n700 1\n"), "{natively}");
    let mirrors =
        ["watch", "exclusive", "revalidate"].map(|coherence| Fixture::mirror(&[&format!("--coherence={coherence}")]));
    for fixture in mirrors.iter().chain([&Fixture::cage(&["--size=1G"])]) {
        assert_eq!(script(&fixture.mountpoint), natively);
    }
    let (union, _) = crate::mounting::unions::over(&[], |_| ());
    assert_eq!(script(&union.mountpoint), natively);
}
