//! Times of files: operations that must not change them do not, and changes are visible at once.

use crate::mounting::{Fixture, as_root, needs, sh};
use nacre_sys::mapping::SharedMapping;
use std::fs::{self, FileTimes, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LONG_AGO: Duration = Duration::from_secs(1_000_000_000);

/// Makes every read move the access time of a file or directory.
fn age(path: &Path) {
    let times = FileTimes::new().set_accessed(UNIX_EPOCH + LONG_AGO).set_modified(SystemTime::now());
    fs::File::open(path).unwrap().set_times(times).unwrap();
}

fn accessed(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().accessed().unwrap()
}

/// Whether reading at `shown` moves the access times at `source`: of files opened for reading, for
/// writing as well, and run; and of a directory.
fn moved(source: &Path, shown: &Path) -> Vec<String> {
    fs::create_dir_all(source.join("directory/within")).unwrap();
    for name in ["read", "both", "mapped", "script"] {
        fs::write(source.join(name), "#!/bin/true\n".repeat(1000)).unwrap();
    }
    sh(source, "chmod +x script");
    for name in ["read", "both", "mapped", "script", "directory"] {
        age(&source.join(name));
    }
    fs::read(shown.join("read")).unwrap();
    OpenOptions::new().read(true).write(true).open(shown.join("both")).unwrap().read_exact(&mut [0; 10]).unwrap();
    sh(
        shown,
        "/usr/bin/python3 -c 'import mmap; f = open(\"mapped\"); mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[5]'; ./script",
    );
    fs::read_dir(shown.join("directory")).unwrap().for_each(drop);
    let names = ["read", "both", "mapped", "script", "directory"];
    names
        .iter()
        .filter(|name| accessed(&source.join(name)) != UNIX_EPOCH + LONG_AGO)
        .map(|name| (*name).to_owned())
        .collect()
}

#[test]
fn noatime_leaves_the_source_alone() {
    needs!(as_root());
    let way = |passthrough, coherence| ["-o", "noatime", passthrough, coherence];
    for words in [
        way("--passthrough=auto", "--coherence=watch"),
        way("--passthrough=off", "--coherence=watch"),
        way("--passthrough=auto", "--coherence=exclusive"),
    ] {
        let mut fixture = Fixture::mirror(&words);
        assert_eq!(moved(&fixture.source, &fixture.mountpoint), [""; 0], "{words:?}");
        // The same as the kernel's own.
        let native = fixture.directory("native");
        sh(&native, &format!("mount --bind {} . && mount -o remount,bind,noatime .", fixture.source.display()));
        let judged = moved(&fixture.source, &native);
        sh(&fixture.source, &format!("umount {}", native.display()));
        assert_eq!(judged, [""; 0]);
        fixture.unmount();
    }
    let mut fixture = Fixture::mirror(&[]);
    assert!(!moved(&fixture.source, &fixture.mountpoint).is_empty(), "without it they move");
    fixture.unmount();
}

#[test]
fn noatime_leaves_the_branches_of_a_union_alone() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let lower = fixture.directory("lower");
    let line = format!("{}=rw:{}=ro", fixture.source.display(), lower.display());
    let mountpoint = fixture.mountpoint.clone();
    fixture.start(&["union", "-o", "noatime"], line.as_ref(), &mountpoint);
    assert_eq!(moved(&fixture.source, &fixture.mountpoint), [""; 0]);
    fs::write(lower.join("low"), "content").unwrap();
    age(&lower.join("low"));
    assert_eq!(fs::read(fixture.at("low")).unwrap(), b"content");
    assert_eq!(accessed(&lower.join("low")), UNIX_EPOCH + LONG_AGO);
    fixture.unmount();
}

/// Checks that stores to mappings are visible in a file's times at the first look after them: of a
/// process that ends, and of one that continues; with the file's descriptor closed last, or before
/// the store. The kernel does not update the times for these stores, and keeps times that were read
/// meanwhile.
fn stores_show(fixture: &Fixture) {
    let (shown, below) = (fixture.at("file"), fixture.below("file"));
    let map = || {
        let file = OpenOptions::new().read(true).write(true).open(&shown).unwrap();
        let mapping = SharedMapping::new(&file, 7, true).unwrap();
        rustix::fs::stat(&shown).unwrap();
        (file, mapping)
    };
    let kept = || {
        let (file, mapping) = map();
        mapping.write(0, b"A").unwrap();
        drop((mapping, file));
    };
    let closed = || {
        let (file, mapping) = map();
        drop(file);
        // The daemon has been notified of the close, and has answered a request since.
        crate::mounting::status::settle(&fixture.mountpoint);
        rustix::fs::stat(&shown).unwrap();
        mapping.write(0, b"B").unwrap();
        drop(mapping);
    };
    let script =
        "import mmap, os; f = open('file', 'r+b'); m = mmap.mmap(f.fileno(), 0); os.stat('file'); m[0:1] = b'C'";
    let ended = || drop(sh(&fixture.mountpoint, &format!("/usr/bin/python3 -c \"{script}\"")));
    let ways: [(&str, &dyn Fn()); 3] = [("kept", &kept), ("closed", &closed), ("ended", &ended)];
    for (way, store) in ways.iter().cycle().take(9) {
        // Through the mount, so that no notification is needed.
        fs::File::open(&shown).unwrap().set_modified(UNIX_EPOCH + LONG_AGO).unwrap();
        rustix::fs::stat(&shown).unwrap();
        store();
        for look in 0..50 {
            let (shown, below) = (rustix::fs::stat(&shown).unwrap(), rustix::fs::stat(&below).unwrap());
            let times = |stat: rustix::fs::Stat| (stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec);
            assert_eq!(times(shown), times(below), "{way}, look {look}");
        }
        assert_ne!(modified(&shown), UNIX_EPOCH + LONG_AGO, "{way}");
    }
}

#[test]
fn a_store_through_a_mapping_shows_when_it_is_over() {
    needs!(as_root());
    let fill = |source: &Path| fs::write(source.join("file"), "content").unwrap();
    for words in [&[][..], &["--coherence=exclusive"], &["--passthrough=off"]] {
        let mut fixture = Fixture::mirror_of(words, fill);
        stores_show(&fixture);
        fixture.unmount();
    }
    let mut fixture = Fixture::cage_of(&["--size=20M"], fill);
    stores_show(&fixture);
    fixture.unmount();
    let mut fixture = Fixture::bare();
    fill(&fixture.source);
    let line = format!("{}=rw:{}=ro", fixture.source.display(), fixture.directory("lower").display());
    let mountpoint = fixture.mountpoint.clone();
    fixture.start(&["union"], line.as_ref(), &mountpoint);
    stores_show(&fixture);
    fixture.unmount();
}

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}
