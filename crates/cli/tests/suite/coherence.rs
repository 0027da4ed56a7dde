//! Changes of the source by others become visible in the mount.

use crate::mounting::resting::{busy, marked_file_systems, rested};
use crate::mounting::status::Status;
use crate::mounting::{Fixture, as_root, eventually, needs, sh, text};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// A mount with everything of the source in its caches.
fn warmed(options: &[&str]) -> Fixture {
    let fixture = Fixture::mirror_of(options, |source| {
        fs::write(source.join("file"), "old").unwrap();
        fs::write(source.join("other"), "other").unwrap();
        fs::create_dir(source.join("directory")).unwrap();
        fs::write(source.join("directory/inner"), "inner").unwrap();
    });
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"old");
    assert!(fs::metadata(fixture.at("missing")).is_err());
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 3);
    assert_eq!(fs::read_dir(fixture.at("directory")).unwrap().count(), 1);
    fs::metadata(fixture.at("directory/inner")).unwrap();
    fixture
}

/// A change by others, and the check that it is visible.
type Change = (&'static str, fn(&Fixture), fn(&Fixture) -> bool);

const CHANGES: &[Change] = &[
    (
        "content",
        |f| fs::write(f.below("file"), "new content").unwrap(),
        |f| fs::read(f.at("file")).is_ok_and(|c| c == b"new content"),
    ),
    (
        "content of the same size",
        |f| fs::write(f.below("file"), "new").unwrap(),
        |f| fs::read(f.at("file")).is_ok_and(|content| content == b"new"),
    ),
    (
        "size",
        |f| fs::write(f.below("file"), "longer than before").unwrap(),
        |f| fs::metadata(f.at("file")).is_ok_and(|m| m.len() == 18),
    ),
    (
        "mode",
        |f| fs::set_permissions(f.below("file"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap(),
        |f| fs::metadata(f.at("file")).is_ok_and(|m| m.mode() & 0o777 == 0o640),
    ),
    (
        "owner",
        |f| std::os::unix::fs::chown(f.below("file"), Some(1234), None).unwrap(),
        |f| fs::metadata(f.at("file")).is_ok_and(|m| m.uid() == 1234),
    ),
    ("a missing name", |f| fs::write(f.below("missing"), "").unwrap(), |f| fs::metadata(f.at("missing")).is_ok()),
    (
        "a new name in a listing",
        |f| fs::write(f.below("new"), "").unwrap(),
        |f| fs::read_dir(&f.mountpoint).unwrap().count() == 4,
    ),
    ("removal", |f| fs::remove_file(f.below("file")).unwrap(), |f| fs::metadata(f.at("file")).is_err()),
    (
        "removal from a listing",
        |f| fs::remove_file(f.below("other")).unwrap(),
        |f| fs::read_dir(&f.mountpoint).unwrap().count() == 2,
    ),
    (
        "a rename",
        |f| fs::rename(f.below("file"), f.below("moved")).unwrap(),
        |f| fs::metadata(f.at("file")).is_err() && fs::read(f.at("moved")).is_ok_and(|c| c == b"old"),
    ),
    (
        "a replacement",
        |f| fs::rename(f.below("other"), f.below("file")).unwrap(),
        |f| fs::read(f.at("file")).is_ok_and(|content| content == b"other"),
    ),
    (
        "a hard link",
        |f| fs::hard_link(f.below("file"), f.below("link")).unwrap(),
        |f| fs::metadata(f.at("file")).is_ok_and(|m| m.nlink() == 2),
    ),
    (
        "a change in a directory below",
        |f| fs::write(f.below("directory/late"), "late").unwrap(),
        |f| {
            fs::read(f.at("directory/late")).is_ok_and(|content| content == b"late")
                && fs::read_dir(f.at("directory")).unwrap().count() == 2
        },
    ),
    (
        "a moved directory",
        |f| fs::rename(f.below("directory"), f.below("elsewhere")).unwrap(),
        |f| fs::metadata(f.at("directory")).is_err() && fs::read(f.at("elsewhere/inner")).is_ok_and(|c| c == b"inner"),
    ),
    (
        "a removed tree",
        |f| fs::remove_dir_all(f.below("directory")).unwrap(),
        |f| fs::metadata(f.at("directory")).is_err() && fs::metadata(f.at("directory/inner")).is_err(),
    ),
];

#[test]
fn a_watched_source_shows_each_change_soon() {
    needs!(as_root());
    for options in [&["--coherence=watch"][..], &["--coherence=watch", "--no-open"]] {
        for (what, change, seen) in CHANGES {
            let fixture = warmed(options);
            assert!(!seen(&fixture), "{what} is seen before it is made");
            change(&fixture);
            let start = Instant::now();
            eventually(what, || seen(&fixture));
            println!("{options:?}: {what}: {:?}", start.elapsed());
        }
    }
}

/// Features that depend on open requests: with `--no-open`, the kernel does not report opens to the
/// daemon.
#[test]
fn a_mount_without_opens_is_as_true_as_one_with() {
    needs!(as_root());
    let fixture = warmed(&["--coherence=watch", "--no-open"]);
    assert_eq!(Status::of(&fixture.mountpoint).asks_at_open(), None);
    rested(&fixture);
    let mut open = fs::File::open(fixture.at("file")).unwrap();
    fs::write(fixture.below("file"), "new").unwrap();
    let content = |open: &mut fs::File| {
        let mut content = Vec::new();
        open.rewind().unwrap();
        open.read_to_end(&mut content).map(|_| content)
    };
    eventually("new content of an open file", || content(&mut open).unwrap() == b"new");
    // The file is found by its node, wherever it has gone.
    fs::rename(fixture.below("file"), fixture.below("directory/moved")).unwrap();
    fs::write(fixture.below("directory/moved"), "newer").unwrap();
    eventually("new content of a file that has moved", || content(&mut open).unwrap() == b"newer");
    // Without a watch, files are opened by requests, and each open shows the current content.
    let revalidated = warmed(&["--coherence=revalidate", "--no-open"]);
    assert_eq!(Status::of(&revalidated.mountpoint).asks_at_open(), Some("others may change files unnoticed"));
    fs::write(revalidated.below("file"), "now").unwrap();
    assert_eq!(fs::read(revalidated.at("file")).unwrap(), b"now");
    // The kernel makes it writable all the same: what then is not written is refused, and what is
    // truncated is truncated.
    let point = fixture.mountpoint.clone();
    rustix::mount::mount_remount(&point, rustix::mount::MountFlags::empty(), "").unwrap();
    fs::File::options().write(true).truncate(true).open(fixture.at("other")).unwrap();
    assert_eq!(fs::read(fixture.below("other")).unwrap(), b"");
    assert_eq!(crate::mounting::errno(fs::write(fixture.at("other"), "x")), 30);
}

#[test]
fn a_source_that_nobody_asks_for_shows_each_change_soon() {
    needs!(as_root());
    for (what, change, seen) in CHANGES {
        let fixture = warmed(&["--coherence=watch"]);
        assert!(!seen(&fixture), "{what} is seen before it is made");
        rested(&fixture);
        change(&fixture);
        eventually(what, || seen(&fixture));
        // Also once all events are received again, and then not.
        rested(&fixture);
        fs::write(fixture.below("later"), "later").unwrap();
        eventually("a later name", || fs::read(fixture.at("later")).is_ok_and(|content| content == b"later"));
    }
}

#[test]
fn a_mount_that_nobody_asks_hears_only_of_its_own_files() {
    needs!(as_root());
    let fixture = warmed(&["--coherence=watch"]);
    let heard = || Status::of(&fixture.mountpoint).number("invalidations");
    let mode = |mode: u32| {
        fs::set_permissions(fixture.below("file"), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        eventually("the mode is seen", || fs::metadata(fixture.at("file")).unwrap().mode() & 0o777 == mode);
    };
    eventually("a rest that no change of a known file ends", || {
        rested(&fixture);
        mode(0o640);
        let before = heard();
        busy(&fixture.source.with_file_name("elsewhere"), 10_000);
        // Earlier events have been received by then.
        mode(0o600);
        let after = heard();
        assert!(after - before < 100, "{before} changes heard, then {after}");
        // A name that the kernel has just dropped is looked for again, which ends it.
        marked_file_systems(fixture.pid()) == 0
    });
    // A name that the kernel does not know yet.
    assert!(fs::metadata(fixture.at("directory/unknown")).is_err());
    assert!(marked_file_systems(fixture.pid()) > 0);
}

#[test]
fn what_is_mounted_inside_stays_while_nobody_asks() {
    needs!(as_root());
    let fixture = warmed(&["--coherence=watch"]);
    crate::mounting::sh(&fixture.mountpoint, "mount -t tmpfs inside directory && touch directory/inside");
    rested(&fixture);
    fs::write(fixture.below("file"), "new content").unwrap();
    eventually("a change", || fs::read(fixture.at("file")).is_ok_and(|content| content == b"new content"));
    assert!(fs::metadata(fixture.at("directory/inside")).is_ok());
    crate::mounting::sh(&fixture.mountpoint, "umount directory");
    assert!(fs::metadata(fixture.at("directory/inner")).is_ok());
}

#[test]
fn a_revalidated_source_is_never_stale() {
    needs!(as_root());
    for (what, change, seen) in CHANGES {
        let fixture = warmed(&["--coherence=revalidate"]);
        assert!(!seen(&fixture), "{what} is seen before it is made");
        change(&fixture);
        assert!(seen(&fixture), "{what} is not seen at once");
    }
}

#[test]
fn revalidation_follows_a_thousand_changes() {
    needs!(as_root());
    let fixture = warmed(&["--coherence=revalidate"]);
    for round in 0..1_000u32 {
        let content = format!("round {round}");
        fs::write(fixture.below("file"), &content).unwrap();
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().len(), content.len() as u64);
        assert_eq!(fs::read_to_string(fixture.at("file")).unwrap(), content);
        let (name, before) = (format!("name{round}"), format!("name{}", round.wrapping_sub(1)));
        fs::write(fixture.below(&name), "").unwrap();
        assert!(fs::metadata(fixture.at(&name)).is_ok());
        let _ = fs::remove_file(fixture.below(&before));
        assert!(fs::metadata(fixture.at(&before)).is_err());
    }
}

#[test]
fn a_watched_source_ends_right_after_a_storm() {
    needs!(as_root());
    // Changes on both sides at once, more than any queue holds; at rest, both sides have to be
    // equal.
    let fixture = warmed(&["--coherence=watch"]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0..20_000 {
                let path = fixture.below(format!("storm{}", index % 300));
                if index % 3 == 2 {
                    let _ = fs::remove_file(path);
                } else {
                    fs::write(path, format!("{index}")).unwrap();
                }
            }
        });
        scope.spawn(|| {
            for index in 0..5_000 {
                let _ = fs::metadata(fixture.at(format!("storm{}", index % 300)));
                let _ = fs::read(fixture.at(format!("storm{}", (index * 7) % 300)));
            }
        });
    });
    let state = |directory: &std::path::Path| {
        let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let with_content = |name| {
            let content = fs::read(directory.join(&name)).ok();
            (name, content)
        };
        names.into_iter().filter(|name| name != "directory").map(with_content).collect::<Vec<_>>()
    };
    let wanted = state(&fixture.source);
    eventually("both sides are equal", || state(&fixture.mountpoint) == wanted);
    for index in 0..300 {
        // The notice of a removal may come later than a listing without the name.
        let name = format!("storm{index}");
        eventually(&name, || fs::metadata(fixture.at(&name)).is_ok() == fs::metadata(fixture.below(&name)).is_ok());
    }
}

#[test]
fn a_shared_mapping_is_the_source() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], |source| fs::write(source.join("file"), vec![b'.'; 8192]).unwrap());
    let passthrough = crate::mounting::status::Status::of(&fixture.mountpoint).passthrough();
    let open = |path| fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let (above, below) = (open(fixture.at("file")), open(fixture.below("file")));
    let mapped = nacre_sys::mapping::SharedMapping::new(&above, 8192, true).unwrap();
    let native = nacre_sys::mapping::SharedMapping::new(&below, 8192, true).unwrap();
    let mut buffer = [0; 5];
    // Without passthrough the two have pages of their own, as with every file system in userspace.
    if passthrough {
        native.write(100, b"below").unwrap();
        mapped.read(100, &mut buffer).unwrap();
        assert_eq!(&buffer, b"below");
        mapped.write(5000, b"above").unwrap();
        native.read(5000, &mut buffer).unwrap();
        assert_eq!(&buffer, b"above");
    } else {
        mapped.write(5000, b"above").unwrap();
        mapped.sync().unwrap();
        native.read(5000, &mut buffer).unwrap();
        assert_eq!(&buffer, b"above");
    }
}

/// The names that inotify reports in a directory from now on, once something has been done.
fn reported(directory: &std::path::Path, act: impl FnOnce(), wanted: &[&str]) -> Result<(), String> {
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags};
    let inotify = rustix::fs::inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
    let all = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MODIFY | WatchFlags::ATTRIB | WatchFlags::MOVE;
    rustix::fs::inotify::add_watch(&inotify, directory, all).unwrap();
    act();
    let mut seen: Vec<String> = Vec::new();
    let start = Instant::now();
    while start.elapsed() < crate::mounting::PATIENCE {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            let kind = match event.events() {
                flags if flags.contains(ReadFlags::CREATE) || flags.contains(ReadFlags::MOVED_TO) => "create",
                flags if flags.contains(ReadFlags::DELETE) || flags.contains(ReadFlags::MOVED_FROM) => "delete",
                flags if flags.contains(ReadFlags::MODIFY) => "modify",
                _ => "attributes",
            };
            seen.push(format!(
                "{kind} {}",
                event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
            ));
        }
        if wanted.iter().all(|wanted| seen.iter().any(|seen| seen == wanted)) {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Err(format!("wanted {wanted:?}, saw {seen:?}"))
}

#[test]
fn watchers_in_the_mount_are_told() {
    needs!(as_root());
    watchers_are_told(&warmed(&["--notify-watchers"]));
    let fixture = warmed(&["--notify-watchers"]);
    rested(&fixture);
    watchers_are_told(&fixture);
}

fn watchers_are_told(fixture: &Fixture) {
    let act = || {
        fs::write(fixture.below("new"), "x").unwrap();
        fs::write(fixture.below("file"), "changed").unwrap();
        fs::remove_file(fixture.below("other")).unwrap();
        fs::create_dir(fixture.below("late")).unwrap();
    };
    reported(&fixture.mountpoint, act, &["create new", "modify file", "delete other", "create late"]).unwrap();
    // The source is as it was left: telling changes nothing.
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"changed");
    let mut names: Vec<_> = fs::read_dir(&fixture.source).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["directory", "file", "late", "new"]);
}

#[test]
fn watchers_in_the_mount_see_what_happens_there() {
    needs!(as_root());
    let fixture = warmed(&[]);
    let act = || {
        fs::write(fixture.at("new"), "x").unwrap();
        fs::remove_file(fixture.at("other")).unwrap();
    };
    reported(&fixture.mountpoint, act, &["create new", "delete other"]).unwrap();
}

/// Returns how often the mount has invalidated everything in the kernel.
fn full_invalidations(fixture: &Fixture) -> u64 {
    let output = fixture.nacre([OsStr::new("metrics"), fixture.mountpoint.as_os_str()]);
    let told = text(&output.stdout);
    let line = told.lines().find(|line| line.starts_with("nacre_full_invalidations_total")).expect("the counter");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Makes changes whose notifications are lost: more follow than the fanotify queue holds for a
/// stopped reader.
fn unheard(fixture: &Fixture, changes: impl FnOnce()) {
    let kept = |of: &str| {
        fs::read_to_string(format!("/proc/sys/fs/{of}/max_queued_events"))
            .map_or(16384, |text| text.trim().parse().unwrap())
    };
    let before = full_invalidations(fixture);
    fixture.signal(Signal::STOP);
    changes();
    for number in 0..kept("fanotify").max(kept("inotify")) + 1000_u64 {
        fs::write(fixture.below(format!("storm/{number}")), "").unwrap();
    }
    fixture.signal(Signal::CONT);
    eventually("the overflow of the queue", || full_invalidations(fixture) > before);
}

fn mount_inside(at: &Path) {
    sh(Path::new("/"), &format!("mount -t tmpfs inside '{0}' && touch '{0}/mark'", at.display()));
}

#[test]
fn what_others_have_mounted_inside_stays() {
    needs!(as_root());
    let mut fixture = Fixture::mirror_of(&[], |source| {
        for directory in ["storm", "elsewhere", "deep", "deep/place"] {
            fs::create_dir(source.join(directory)).unwrap();
        }
        fs::write(source.join("file"), "old").unwrap();
        fs::write(source.join("deep/moved"), "old").unwrap();
    });
    let seen = |name: &str| fs::metadata(fixture.at(name)).is_ok();
    assert!(seen("file") && seen("deep/moved") && !seen("new") && !seen("deep/to"));
    assert_eq!(fs::read_dir(fixture.at("storm")).unwrap().count(), 0);
    // As a container engine does: in a mount namespace of its own.
    let script = "mount -t tmpfs inside \"$1\" && touch \"$1/mark\" && echo mounted && read go && test -e \"$1/mark\" && echo there";
    let mut container = Command::new("unshare")
        .args(["-m", "sh", "-ec", script, "sh"])
        .arg(fixture.at("elsewhere"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(container.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "mounted");
    unheard(&fixture, || {
        fs::remove_file(fixture.below("file")).unwrap();
        fs::write(fixture.below("new"), "").unwrap();
        fs::rename(fixture.below("deep/moved"), fixture.below("deep/to")).unwrap();
    });
    eventually("what is there now", || {
        !seen("file") && seen("new") && !seen("deep/moved") && seen("deep/to") && seen("elsewhere")
    });
    mount_inside(&fixture.at("deep/place"));
    let reloaded = fixture.nacre([OsStr::new("reload"), fixture.mountpoint.as_os_str(), OsStr::new("--perms=a-w")]);
    assert!(reloaded.status.success(), "{}", text(&reloaded.stderr));
    assert!(seen("deep/place/mark"), "rules were reloaded");
    // Another branch, or a name that others make and remove, changes nothing of what is mounted.
    fs::set_permissions(fixture.below("deep"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    fs::write(fixture.below("deep/beside"), "").unwrap();
    eventually("the name beside", || seen("deep/beside"));
    assert!(seen("deep/place/mark"));
    container.stdin.take().unwrap().write_all(b"go\n").unwrap();
    assert_eq!(said.next().map(Result::unwrap).as_deref(), Some("there"), "in the other mount namespace");
    container.wait().unwrap();
    sh(Path::new("/"), &format!("umount '{}'", fixture.at("deep/place").display()));
    fixture.unmount();
}

#[test]
fn a_directory_that_has_just_been_made_below_can_be_mounted_on() {
    needs!(as_root());
    let mut fixture = warmed(&[]);
    let names: Vec<String> = (0..40).map(|number| format!("directory/{number}")).collect();
    for name in &names {
        fs::create_dir(fixture.below(name)).unwrap();
        mount_inside(&fixture.at(name));
    }
    // Notifications keep their order.
    fs::write(fixture.below("directory/last"), "").unwrap();
    eventually("the last name", || fs::metadata(fixture.at("directory/last")).is_ok());
    let left: Vec<&String> = names.iter().filter(|name| fs::metadata(fixture.at(name).join("mark")).is_err()).collect();
    assert!(left.is_empty(), "nothing is mounted any more at {left:?}");
    for name in &names {
        sh(Path::new("/"), &format!("umount '{}'", fixture.at(name).display()));
    }
    fixture.unmount();
}
