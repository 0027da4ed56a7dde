//! What others do to the source becomes visible in the mount.

// A failed expectation in a test is what the test reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod mounting;

use mounting::{Fixture, as_root, eventually};
use std::fs;
use std::os::unix::fs::MetadataExt;
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

/// Each change that others can make, and how it is seen.
type Change = (&'static str, fn(&Fixture), fn(&Fixture) -> bool);

const CHANGES: &[Change] = &[
    ("content", |f| fs::write(f.below("file"), "new content").unwrap(), |f| fs::read(f.at("file")).is_ok_and(|c| c == b"new content")),
    (
        "content of the same size",
        |f| fs::write(f.below("file"), "new").unwrap(),
        |f| fs::read(f.at("file")).is_ok_and(|content| content == b"new"),
    ),
    ("size", |f| fs::write(f.below("file"), "longer than before").unwrap(), |f| fs::metadata(f.at("file")).is_ok_and(|m| m.len() == 18)),
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
    ("a new name in a listing", |f| fs::write(f.below("new"), "").unwrap(), |f| fs::read_dir(&f.mountpoint).unwrap().count() == 4),
    ("removal", |f| fs::remove_file(f.below("file")).unwrap(), |f| fs::metadata(f.at("file")).is_err()),
    ("removal from a listing", |f| fs::remove_file(f.below("other")).unwrap(), |f| fs::read_dir(&f.mountpoint).unwrap().count() == 2),
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
    if !as_root() {
        return;
    }
    for (what, change, seen) in CHANGES {
        let fixture = warmed(&["--coherence=watch"]);
        assert!(!seen(&fixture), "{what} is seen before it is made");
        change(&fixture);
        let start = Instant::now();
        eventually(what, || seen(&fixture));
        println!("{what}: {:?}", start.elapsed());
    }
}

#[test]
fn a_revalidated_source_is_never_stale() {
    if !as_root() {
        return;
    }
    for (what, change, seen) in CHANGES {
        let fixture = warmed(&["--coherence=revalidate"]);
        assert!(!seen(&fixture), "{what} is seen before it is made");
        change(&fixture);
        assert!(seen(&fixture), "{what} is not seen at once");
    }
}

#[test]
fn revalidation_follows_a_thousand_changes() {
    if !as_root() {
        return;
    }
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
    if !as_root() {
        return;
    }
    // Changes on both sides at once, more than any queue holds; at rest, both sides have to be equal.
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
    if !as_root() {
        return;
    }
    let fixture = Fixture::mirror_of(&[], |source| fs::write(source.join("file"), vec![b'.'; 8192]).unwrap());
    let passthrough = mounting::status::Status::of(&fixture.mountpoint).passthrough();
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
    while start.elapsed() < mounting::PATIENCE {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            let kind = match event.events() {
                flags if flags.contains(ReadFlags::CREATE) || flags.contains(ReadFlags::MOVED_TO) => "create",
                flags if flags.contains(ReadFlags::DELETE) || flags.contains(ReadFlags::MOVED_FROM) => "delete",
                flags if flags.contains(ReadFlags::MODIFY) => "modify",
                _ => "attributes",
            };
            seen.push(format!("{kind} {}", event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()));
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
    if !as_root() {
        return;
    }
    let fixture = warmed(&["--notify-watchers"]);
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
    if !as_root() {
        return;
    }
    let fixture = warmed(&[]);
    let act = || {
        fs::write(fixture.at("new"), "x").unwrap();
        fs::remove_file(fixture.at("other")).unwrap();
    };
    reported(&fixture.mountpoint, act, &["create new", "delete other"]).unwrap();
}
