//! Cages on real mounts: the limit holds for every call and every descriptor, the accounting is
//! right after every kind of end, and the commands have their documented effect. As root; ordinary
//! users are tested in `user.rs`.

use crate::mounting::cages::{Cage, cost, data, fill, zeros};
use crate::mounting::{
    Fixture, as_root, errno, eventually, finish, is_mounted, mount_entry, nacre, needs, run, sh, text,
};
use rustix::fs::{FallocateFlags, copy_file_range, fallocate};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;
const EXDEV: i32 = 18;
const MIB: u64 = 1 << 20;

/// Both ways of taking writes.
const WRITES: [&str; 2] = ["--writes=through", "--writes=collected"];

fn cage(options: &[&str]) -> Fixture {
    Fixture::cage(options)
}

fn statvfs(path: &Path) -> (u64, u64, u64, u64, u64) {
    let figures = rustix::fs::statvfs(path).unwrap();
    let used = (figures.f_blocks - figures.f_bfree) * figures.f_frsize;
    (figures.f_blocks * figures.f_frsize, used, figures.f_bavail * figures.f_frsize, figures.f_files, figures.f_ffree)
}

#[test]
fn df_shows_the_cage() {
    needs!(as_root());
    for writes in WRITES {
        let fixture = cage(&["--size=8M", "--inodes=100", writes]);
        assert_eq!(statvfs(&fixture.mountpoint), (8 * MIB, 0, 8 * MIB, 100, 100));
        fs::write(fixture.at("file"), zeros(3 * MIB)).unwrap();
        let (size, used, free, inodes, inodes_free) = statvfs(&fixture.mountpoint);
        assert_eq!((size, used, free, inodes, inodes_free), (8 * MIB, 3 * MIB, 5 * MIB, 100, 99), "{writes}");
        let shown = text(&run("df", ["-B1", "--output=size,used,avail", fixture.mountpoint.to_str().unwrap()]).stdout);
        let figures: Vec<u64> =
            shown.lines().nth(1).unwrap().split_whitespace().map(|figure| figure.parse().unwrap()).collect();
        assert_eq!(figures, [8 * MIB, 3 * MIB, 5 * MIB]);
        let (kind, source, ..) = mount_entry(&fixture.mountpoint).unwrap();
        assert_eq!((kind.as_str(), source), ("fuse.nacre", format!("cage:{}", fixture.source.display())));
    }
}

/// `df -i` of a cage without a limit of inodes shows those of the cage as used, not those of the file system below.
#[test]
fn df_shows_the_inodes_of_the_cage() {
    needs!(as_root());
    for writes in WRITES {
        let fixture = cage(&["--size=8M", writes]);
        if rustix::fs::statvfs(&fixture.source).unwrap().f_files == 0 {
            // A file system below that counts no inodes.
            return;
        }
        let used = || {
            let shown = run("df", ["--output=iused", fixture.mountpoint.to_str().unwrap()]).stdout;
            text(&shown).lines().nth(1).unwrap().trim().parse::<u64>().unwrap()
        };
        assert_eq!(used(), 0, "{writes}");
        (0..3).for_each(|number| fs::write(fixture.at(number.to_string()), "").unwrap());
        assert_eq!(used(), 3, "{writes}");
    }
}

#[test]
fn every_call_that_does_not_fit_says_so() {
    needs!(as_root());
    for writes in WRITES {
        let mut fixture = cage(&["--size=4M", "--inodes=20", writes]);
        let file = File::create(fixture.at("file")).unwrap();
        file.write_all_at(&zeros(3 * MIB), 0).unwrap();
        // fallocate fits as a whole or not at all.
        assert_eq!(
            fallocate(&file, FallocateFlags::empty(), 0, 5 * MIB).unwrap_err().raw_os_error(),
            ENOSPC,
            "{writes}"
        );
        assert_eq!(fallocate(&file, FallocateFlags::KEEP_SIZE, 3 * MIB, 2 * MIB).unwrap_err().raw_os_error(), ENOSPC);
        assert_eq!(file.metadata().unwrap().len(), 3 * MIB);
        // Copying in the kernel.
        let (from, to) = (File::open(fixture.at("file")).unwrap(), File::create(fixture.at("copy")).unwrap());
        let mut copied = 0;
        let error = loop {
            match copy_file_range(&from, None, &to, None, 2 << 20) {
                Ok(0) => panic!("it all fitted"),
                Ok(length) => copied += length as u64,
                Err(error) => break error.raw_os_error(),
            }
        };
        assert_eq!(error, ENOSPC);
        assert!(copied <= MIB);
        assert_eq!(to.metadata().unwrap().len(), copied);
        fs::remove_file(fixture.at("copy")).unwrap();
        drop(to);
        // The daemon is notified of the last close of a deleted file after close(2) has returned.
        eventually("the copy is gone", || Cage::of(&fixture, &fixture.mountpoint).number("used") == 3 * MIB);
        // A hole costs nothing, what is written into it does.
        file.set_len(64 * MIB).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 64 * MIB);
        file.write_all_at(&zeros(MIB / 2), 32 * MIB).unwrap();
        assert_eq!(errno(file.write_all_at(&zeros(MIB), 48 * MIB)), ENOSPC);
        file.set_len(3 * MIB).unwrap();
        // A write that fits in part is done in part.
        let mut tail = OpenOptions::new().append(true).open(fixture.at("file")).unwrap();
        let accepted = tail.write(&zeros(2 * MIB)).unwrap() as u64;
        assert_eq!(accepted, MIB, "{writes}");
        assert_eq!(errno(tail.write(b"x")), ENOSPC);
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().len(), 4 * MIB);
        // What is there can be overwritten.
        file.write_all_at(&zeros(4 * MIB), 0).unwrap();
        assert_eq!(errno(file.write_all_at(b"x", 4 * MIB)), ENOSPC);
        drop((tail, file, from));
        assert_eq!(data(&fixture.source), 4 * MIB);
        fs::remove_file(fixture.at("file")).unwrap();
        let inodes = |fixture: &Fixture| Cage::of(fixture, &fixture.mountpoint).number("inodes");
        eventually("the file is gone", || inodes(&fixture) == 0);
        // Inodes: of every kind.
        for number in 0..20 {
            File::create(fixture.at(format!("{number}"))).unwrap();
        }
        assert_eq!(errno(File::create(fixture.at("one-more"))), ENOSPC);
        assert_eq!(errno(fs::create_dir(fixture.at("directory"))), ENOSPC);
        assert_eq!(errno(std::os::unix::fs::symlink("x", fixture.at("link"))), ENOSPC);
        assert!(!run("mkfifo", [fixture.at("fifo")]).status.success());
        fs::hard_link(fixture.at("0"), fixture.at("hard")).unwrap();
        fs::remove_file(fixture.at("0")).unwrap();
        assert_eq!(errno(File::create(fixture.at("one-more"))), ENOSPC, "the other name keeps the inode");
        fs::remove_file(fixture.at("hard")).unwrap();
        eventually("the inode is free", || inodes(&fixture) == 19);
        File::create(fixture.at("one-more")).unwrap();
        let cage = Cage::of(&fixture, &fixture.mountpoint);
        assert!(cage.refused("size") >= 5 && cage.refused("inodes") >= 4, "{writes}: {}", cage.0);
        assert_eq!((cage.number("inodes"), cage.number("inode_limit")), (20, 20));
        fixture.unmount();
    }
}

#[test]
fn a_logger_with_an_old_descriptor_is_stopped_at_the_edge() {
    needs!(as_root());
    for writes in WRITES {
        for piece in [1, 81, 4096, 100_000] {
            let mut fixture = cage(&["--size=1M", writes]);
            let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("log")).unwrap();
            // All but a part is taken by others while the descriptor is held: a small one where
            // each byte is a request.
            let part = if piece == 1 { 16 * 1024 } else { 128 * 1024 };
            fs::write(fixture.at("other"), zeros(MIB - part)).unwrap();
            let (accepted, error) = fill(&mut log, piece);
            assert_eq!(error, ENOSPC, "{writes} {piece}");
            assert_eq!(accepted, part, "{writes} {piece}: to the byte");
            log.sync_all().unwrap();
            drop(log);
            assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), accepted);
            assert!(fs::read(fixture.below("log")).unwrap().iter().all(|byte| *byte == b'x'));
            assert_eq!(data(&fixture.source), MIB);
            // With free space again, writing continues, with the same kind of descriptor.
            let mut log = OpenOptions::new().append(true).open(fixture.at("log")).unwrap();
            fs::remove_file(fixture.at("other")).unwrap();
            eventually("the other file is gone", || Cage::of(&fixture, &fixture.mountpoint).number("used") == part);
            let room = MIB - part;
            // Byte by byte only at the edge.
            let ahead = if piece == 1 { room - 16 * 1024 } else { 0 };
            log.write_all(&zeros(ahead)).unwrap();
            assert_eq!(fill(&mut log, piece), (room - ahead, ENOSPC), "{writes} {piece}");
            drop(log);
            fixture.unmount();
            assert_eq!(data(&fixture.source), MIB);
        }
    }
}

#[test]
fn appends_are_collected_while_there_is_room() {
    needs!(as_root());
    let mut fixture = cage(&["--size=64G", "--writes=collected"]);
    assert_eq!(Cage::of(&fixture, &fixture.mountpoint).text("mode"), "collected");
    let requests = crate::mounting::status::requests_of(&fixture.mountpoint, || {
        let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("log")).unwrap();
        for _ in 0..10_000 {
            log.write_all(&[b'x'; 80]).unwrap();
        }
    });
    assert!(requests.values().sum::<u64>() < 1000, "{requests:?}");
    // What is read and counted is what was written, whether it has arrived below or not.
    assert_eq!(fs::read(fixture.at("log")).unwrap().len(), 800_000);
    eventually("it is all there", || {
        let used = Cage::of(&fixture, &fixture.mountpoint).number("used");
        assert!(used <= 802_816, "{used}");
        used == 802_816
    });
    fixture.unmount();
    assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), 800_000);
    // Another way of writing is exact at any time.
    fixture.start_cage(&["--size=64G", "--writes=through"]);
    assert_eq!(Cage::of(&fixture, &fixture.mountpoint).text("mode"), "through");
    let requests = crate::mounting::status::requests_of(&fixture.mountpoint, || {
        let mut log = OpenOptions::new().append(true).open(fixture.at("log")).unwrap();
        for _ in 0..1000 {
            log.write_all(&[b'x'; 80]).unwrap();
        }
    });
    // The kernel cuts a write in two where a page ends.
    assert!((1000..=1020).contains(&requests["write"]), "{requests:?}");
    fixture.unmount();
}

#[test]
fn files_deleted_while_open_count_until_they_are_closed() {
    needs!(as_root());
    let fixture = cage(&["--size=1M"]);
    let mut file = File::create(fixture.at("file")).unwrap();
    file.write_all(&zeros(MIB)).unwrap();
    fs::remove_file(fixture.at("file")).unwrap();
    assert_eq!(errno(fs::write(fixture.at("other"), "x")), ENOSPC);
    drop(file);
    eventually("the space is there again", || fs::write(fixture.at("other"), zeros(MIB)).is_ok());
}

#[test]
fn a_cage_is_resized_while_it_is_written_to() {
    needs!(as_root());
    for writes in WRITES {
        let mut fixture = cage(&["--size=2M", writes]);
        let (stop, accepted) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("log")).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    match log.write(&[b'y'; 1000]) {
                        Ok(written) => drop(accepted.fetch_add(written as u64, Ordering::Relaxed)),
                        Err(error) => assert_eq!(error.raw_os_error(), Some(ENOSPC)),
                    }
                }
                log.sync_all().unwrap();
            });
            let resize = |size: &str| {
                let output = fixture.nacre([
                    OsStr::new("cage"),
                    OsStr::new("resize"),
                    fixture.mountpoint.as_os_str(),
                    OsStr::new(size),
                ]);
                assert!(output.status.success(), "{}", text(&output.stderr));
                text(&output.stderr)
            };
            let stands_at = |bytes: u64| eventually("it is full", || accepted.load(Ordering::Relaxed) == bytes);
            stands_at(2 * MIB);
            assert_eq!(resize("+2M"), "");
            stands_at(4 * MIB);
            let said = resize("1M");
            assert!(said.contains("holds 4M, more than its new limit of 1M"), "{said}");
            resize("5M");
            stands_at(5 * MIB);
            resize("-1M");
            assert_eq!(statvfs(&fixture.mountpoint).2, 0);
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
        });
        assert_eq!(accepted.load(Ordering::Relaxed), 5 * MIB);
        assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), 5 * MIB);
        let cage = Cage::of(&fixture, &fixture.source);
        assert_eq!((cage.number("limit"), cage.number("used"), cage.number("free")), (4 * MIB, 5 * MIB, 0));
        fixture.unmount();
    }
}

#[test]
fn what_was_there_before_counts() {
    needs!(as_root());
    let mut fixture = Fixture::cage_of(&["--size=4M", "--inodes=1000"], |source| {
        fs::create_dir_all(source.join("a/b")).unwrap();
        fs::write(source.join("a/file"), zeros(MIB)).unwrap();
        fs::hard_link(source.join("a/file"), source.join("a/b/same")).unwrap();
        fs::write(source.join("a/b/other"), zeros(5000)).unwrap();
        let sparse = File::create(source.join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        sparse.write_all_at(&zeros(4096), 1 << 30).unwrap();
        std::os::unix::fs::symlink("nowhere", source.join("link")).unwrap();
    });
    let found = |fixture: &Fixture| {
        let cage = Cage::of(fixture, &fixture.mountpoint);
        (cage.number("used"), cage.number("inodes"))
    };
    eventually("everything is counted", || found(&fixture) == cost(&fixture.source));
    let free = Cage::of(&fixture, &fixture.mountpoint).number("free");
    let (accepted, error) = fill(&mut File::create(fixture.at("more")).unwrap(), 4096);
    assert_eq!((accepted, error), (free / 4096 * 4096, ENOSPC));
    fixture.unmount();
}

#[test]
fn a_limit_that_the_disk_cannot_hold_is_told_and_taken() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let told = |words: &[&str]| {
        let output = fixture.nacre(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stderr)
    };
    let source = fixture.source.to_str().unwrap();
    let said = told(&["cage", "--size", "1E", source]);
    assert!(said.contains("1E is more than the file system of") && said.lines().count() == 1, "{said}");
    assert_eq!(told(&["cage", "resize", source, "1M"]), "");
    let said = told(&["cage", "resize", source, "1E"]);
    assert!(said.contains("1E is more than the file system of"), "{said}");
    told(&["umount", source]);
}

#[test]
fn more_than_the_limit_is_no_error_and_cannot_grow() {
    needs!(as_root());
    let fixture = Fixture::cage_of(&["--size=1M"], |source| fs::write(source.join("file"), zeros(3 * MIB)).unwrap());
    eventually("it is counted", || Cage::of(&fixture, &fixture.mountpoint).number("used") == 3 * MIB);
    let (size, used, free, ..) = statvfs(&fixture.mountpoint);
    assert_eq!(free, 0);
    assert!(used <= size || size >= MIB, "{size} {used}");
    assert_eq!(errno(fs::write(fixture.at("other"), "x")), ENOSPC);
    File::options().write(true).open(fixture.at("file")).unwrap().set_len(MIB / 2).unwrap();
    fs::write(fixture.at("other"), zeros(MIB / 2)).unwrap();
    assert_eq!(errno(fs::write(fixture.at("third"), "x")), ENOSPC);
}

#[test]
fn an_end_with_open_files_comes_with_the_last_of_them() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let place = fixture.source.clone();
    fixture.start(&["cage", "--size=1M"], place.as_ref(), &place);
    let mut log = OpenOptions::new().append(true).create(true).open(place.join("log")).unwrap();
    fixture.signal(Signal::TERM);
    eventually("detached", || !is_mounted(&place));
    // The limit holds for the processes that still use the mount; a second cage next to it would
    // not know of them.
    assert_eq!(fill(&mut log, 4096), (MIB, ENOSPC));
    let output = fixture.nacre([OsStr::new("cage"), OsStr::new("--size=2M"), place.as_os_str()]);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("still open"), "{}", text(&output.stderr));
    assert_eq!(Cage::of(&fixture, &place).0["attached"], false);
    assert!(!is_mounted(&place));
    drop(log);
    assert_eq!(fixture.ended(), Some(0));
    fixture.start(&["cage", "--size=2M"], place.as_ref(), &place);
    assert_eq!(Cage::of(&fixture, &place).number("used"), MIB);
}

#[test]
fn told_to_end_twice_it_does_not_wait_for_open_files() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let place = fixture.source.clone();
    fixture.start(&["cage", "--size=1M"], place.as_ref(), &place);
    let mut log = OpenOptions::new().append(true).create(true).open(place.join("log")).unwrap();
    log.write_all(&[1; 5000]).unwrap();
    fixture.signal(Signal::TERM);
    eventually("detached", || !is_mounted(&place));
    log.write_all(&[2; 5000]).unwrap();
    fixture.signal(Signal::TERM);
    assert_eq!(fixture.ended(), Some(0));
    // What write(2) had taken has arrived, collected or not.
    assert_eq!(fs::read(place.join("log")).unwrap(), [[1; 5000], [2; 5000]].concat());
    // The connection is gone (ENOTCONN), or goes just now (ECONNABORTED).
    let error = log.write(&[3]).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(107 | 103)), "{error}");
}

/// Cached pages of a file that others changed are dropped when it is opened.
#[test]
fn a_fifo_that_others_write_to_does_not_keep_it() {
    needs!(as_root());
    let mut fixture = Fixture::cage(&["--size=1G"]);
    assert_eq!(Cage::of(&fixture, &fixture.mountpoint).text("mode"), "collected");
    sh(&fixture.source, "mkfifo fifo");
    let told = || crate::mounting::status::Status::of(&fixture.mountpoint).number("invalidations");
    let before = told();
    eventually("the change is heard of", || {
        // What is told is only what the kernel knows: that of its making may have come in between.
        fs::metadata(fixture.at("fifo")).unwrap();
        sh(&fixture.source, "exec 3<>fifo; echo content >&3");
        told() > before
    });
    fixture.signal(Signal::TERM);
    assert_eq!(fixture.ended(), Some(0));
}

#[test]
fn what_only_other_mount_namespaces_hold_is_detached() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let place = fixture.source.clone();
    let first = fixture.start(&["cage", "--size=1M"], place.as_ref(), &place);
    let elsewhere = crate::mounting::Namespace::holding(&place);
    assert!(run("umount", [&place]).status.success());
    let seen_there = elsewhere.at(&place).join("file");
    fs::write(&seen_there, "limited").unwrap();
    let told = Cage::of(&fixture, &place);
    assert_eq!((&told.0["attached"], told.number("pid")), (&false.into(), u64::from(first)));
    let status = fixture.nacre(["cage", "status", place.to_str().unwrap()]);
    assert!(text(&status.stdout).contains("not mounted"), "{}", text(&status.stdout));
    // Another one takes the place over.
    let second = fixture.start(&["cage", "--size=2M"], place.as_ref(), &place);
    eventually("the first cage has ended", || crate::mounting::is_gone(first));
    assert_eq!(fs::read(&seen_there).unwrap_err().raw_os_error(), Some(107));
    let told = Cage::of(&fixture, &place);
    assert_eq!(
        (&told.0["attached"], told.number("pid"), told.number("limit")),
        (&true.into(), u64::from(second), 2 * MIB)
    );
    // A command reports a mount that remains in other namespaces, and ends it there when called
    // again.
    let elsewhere = crate::mounting::Namespace::holding(&place);
    let umount = || fixture.nacre([OsStr::new("umount"), place.as_os_str()]);
    let output = umount();
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("other mount namespaces"), "{}", text(&output.stderr));
    assert!(!is_mounted(&place));
    let output = umount();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fixture.ended(), Some(0));
    drop(elsewhere);
    // A signal does not leave it there.
    fixture.start(&["cage", "--size=1M"], place.as_ref(), &place);
    let elsewhere = crate::mounting::Namespace::holding(&place);
    fixture.signal(Signal::TERM);
    assert_eq!(fixture.ended(), Some(0));
    // Over io_uring the kernel may still be taking the connection down (ECONNABORTED) when the process is gone.
    let seen_there = elsewhere.at(&place).join("file");
    eventually("it has gone there", || fs::read(&seen_there).unwrap_err().raw_os_error() == Some(107));
    assert_eq!(fs::read(place.join("file")).unwrap(), b"limited");
}

#[test]
fn over_the_directory_itself() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.below("before"), "content").unwrap();
    let source = fixture.source.to_str().unwrap();
    let output = fixture.nacre(["cage", "--size=1M", source]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout) + &text(&output.stderr), "", "a cage that works says nothing");
    assert!(is_mounted(&fixture.source));
    assert_eq!(fs::read(fixture.below("before")).unwrap(), b"content");
    let (accepted, error) = fill(&mut File::create(fixture.below("log")).unwrap(), 4096);
    assert_eq!((accepted, error), (MIB - 4096, ENOSPC));
    // Not twice, however it is named, and nothing is changed by trying.
    let link = fixture.scratch.path().join("link");
    std::os::unix::fs::symlink(&fixture.source, &link).unwrap();
    for again in [source, link.to_str().unwrap()] {
        let output = fixture.nacre(["cage", "--size=2M", again]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("is a cage already"), "{}", text(&output.stderr));
    }
    let output = fixture.nacre([
        OsStr::new("cage"),
        OsStr::new("--size=2M"),
        fixture.source.as_os_str(),
        fixture.mountpoint.as_os_str(),
    ]);
    assert!(text(&output.stderr).contains("is a cage already"), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
    assert_eq!(Cage::of(&fixture, &link).number("limit"), MIB);
    assert!(fixture.nacre(["umount", source]).status.success());
    assert!(!is_mounted(&fixture.source));
    assert_eq!(fs::metadata(fixture.below("log")).unwrap().len(), MIB - 4096);
}

#[test]
fn who_writes_past_it_is_named() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let log = OpenOptions::new().append(true).create(true).open(fixture.below("held.log")).unwrap();
    let output = fixture.nacre(["cage", "--size=1M", fixture.source.to_str().unwrap()]);
    assert!(output.status.success());
    let said = text(&output.stderr);
    let own =
        format!("(process {}) holds {} open for writing", std::process::id(), fixture.below("held.log").display());
    assert!(said.contains(&own) && said.contains("reload or restart"), "{said}");
    drop(log);
    assert!(fixture.nacre([OsStr::new("umount"), fixture.source.as_os_str()]).status.success());
}

#[test]
fn within_reach_of_its_own_mount_nothing_is_mounted() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let inside = fixture.below("inside");
    fs::create_dir(&inside).unwrap();
    let link = fixture.scratch.path().join("link");
    std::os::unix::fs::symlink(&inside, &link).unwrap();
    for (directory, mountpoint) in
        [(&fixture.source, &inside), (&inside, &fixture.source), (&fixture.source, &link), (&link, &fixture.source)]
    {
        for command in [&["cage", "--size=1M"][..], &["cage", "--size=1M", "--explain"], &["cage", "--size=1M", "-f"]] {
            let paths = [directory.to_str().unwrap(), mountpoint.to_str().unwrap()];
            let output = fixture.nacre([command, &paths].concat());
            assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
            assert!(text(&output.stderr).contains("lies inside of"), "{}", text(&output.stderr));
        }
    }
    assert!(crate::mounting::mounts_below(fixture.scratch.path()).is_empty());
    assert!(!fixture.state().exists(), "no accounting is left of what was never made");
}

#[test]
fn status_and_list_tell_the_same() {
    needs!(as_root());
    let fixture = cage(&[
        "--size=8M",
        "--inodes=50",
        "--soft=50%",
        "--limit=user:1234=3M",
        "--limit=dir:part=2M",
        "--writes=through",
    ]);
    fs::create_dir(fixture.at("part")).unwrap();
    fs::write(fixture.at("part/file"), zeros(MIB)).unwrap();
    std::os::unix::fs::chown(fixture.at("part/file"), Some(1234), None).unwrap();
    let at = fixture.mountpoint.to_str().unwrap();
    let cage = Cage::of(&fixture, &fixture.mountpoint);
    for (field, expected) in [
        ("directory", fixture.source.to_str().unwrap()),
        ("mountpoint", at),
        ("engine", "fuse"),
        ("mode", "through"),
        ("when_full", "deny"),
    ] {
        assert_eq!(cage.text(field), expected);
    }
    let directory = cost(&fixture.source).0 - MIB;
    assert_eq!((cage.number("limit"), cage.number("used"), cage.number("soft")), (8 * MIB, MIB + directory, 4 * MIB));
    let users = cage.0["users"].as_array().unwrap();
    let user = users.iter().find(|user| user["uid"] == 1234).unwrap();
    assert_eq!(
        (user["used"].as_u64(), user["limit"].as_u64(), user["user"].as_str()),
        (Some(MIB), Some(3 * MIB), Some("1234"))
    );
    assert_eq!(cage.0["directories"][0]["path"], "part");
    assert_eq!(cage.0["directories"][0]["limit"], 2 * MIB);
    // The same cage, by its directory and by its mount, in every form.
    for named in [fixture.source.to_str().unwrap(), at] {
        let output = fixture.nacre([
            "cage",
            "status",
            "-H",
            "-p",
            "-o",
            "name,limit,used,free,use%,inodes,inode-limit,refused,engine",
            named,
        ]);
        let line = format!(
            "{}\t{}\t{}\t{}\t{}\t2\t50\t0\tfuse\n",
            fixture.source.display(),
            8 * MIB,
            MIB + directory,
            7 * MIB - directory,
            (100 * (MIB + directory)).div_ceil(8 * MIB)
        );
        assert_eq!(text(&output.stdout), line);
        let whole = text(&fixture.nacre(["cage", "status", named]).stdout);
        for part in [
            "limit         8M",
            "inodes        2 of 50",
            "soft limit    4M (not reached)",
            "when full     deny",
            "mode          through",
        ] {
            assert!(whole.lines().any(|line| line == part), "{part} in\n{whole}");
        }
    }
    let listed = text(&fixture.nacre(["cage", "list"]).stdout);
    assert!(
        listed.starts_with("NAME") && listed.lines().any(|line| line.starts_with(fixture.source.to_str().unwrap())),
        "{listed}"
    );
    let all: serde_json::Value = serde_json::from_slice(&fixture.nacre(["cage", "list", "--json"]).stdout).unwrap();
    assert!(all.as_array().unwrap().iter().any(|cage| cage["mountpoint"] == at));
    // As part of the figures of the mount, and for Prometheus.
    let status: serde_json::Value = serde_json::from_slice(&fixture.nacre(["status", "--json", at]).stdout).unwrap();
    assert_eq!(status[0]["cages"][0]["limit"], 8 * MIB);
    let metrics = text(&fixture.nacre(["metrics", at]).stdout);
    let label = format!("directory=\"{}\",mountpoint=\"{at}\",engine=\"fuse\"", fixture.source.display());
    for line in [
        format!("nacre_cage_limit_bytes{{{label}}} {}", 8 * MIB),
        format!("nacre_cage_refused_total{{{label},limit=\"size\"}} 0"),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}");
    }
}

#[test]
fn resizing_takes_no_time() {
    needs!(as_root());
    let fixture = cage(&["--size=8M"]);
    let at = fixture.mountpoint.to_str().unwrap();
    for size in ["9M", "7M", "+1M", "-2M", "6M"] {
        assert!(fixture.nacre(["cage", "resize", at, size]).status.success());
    }
    assert_eq!(statvfs(&fixture.mountpoint).0, 6 * MIB);
    assert!(fixture.nacre(["cage", "resize", at, "--inodes=7"]).status.success());
    assert_eq!(statvfs(&fixture.mountpoint).3, 7);
    for number in 0..7 {
        File::create(fixture.at(format!("{number}"))).unwrap();
    }
    assert_eq!(errno(File::create(fixture.at("8"))), ENOSPC);
    assert!(fixture.nacre(["cage", "resize", at, "--inodes=none"]).status.success());
    File::create(fixture.at("8")).unwrap();
    for (change, code) in [("-6M", 1), ("-7M", 1), ("10X", 2), ("100", 2)] {
        let output = fixture.nacre(["cage", "resize", at, change]);
        assert_eq!(output.status.code(), Some(code), "{change}: {}", text(&output.stderr));
        assert_eq!(statvfs(&fixture.mountpoint).0, 6 * MIB, "{change}");
    }
}

#[test]
fn cages_lie_in_each_other_and_side_by_side() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (a, b) = (fixture.below("a"), fixture.below("b"));
    fs::create_dir(&a).unwrap();
    fs::create_dir(&b).unwrap();
    let outer = fixture.source.clone();
    fixture.start(&["cage", "--size=2M"], outer.as_ref(), &outer);
    fixture.start(&["cage", "--size=1M"], a.as_ref(), &a);
    fixture.start(&["cage", "--size=512K"], b.as_ref(), &b);
    let own = cost(&outer);
    assert_eq!((statvfs(&outer).0, statvfs(&a).0, statvfs(&b).0), (2 * MIB, MIB, MIB / 2));
    let fills = |place: &Path| fill(&mut File::create(place.join("file")).unwrap(), 4096);
    assert_eq!(fills(&b), (MIB / 2, ENOSPC));
    assert_eq!(fills(&a), (MIB, ENOSPC));
    // The outer one holds both, and its own directories.
    assert_eq!(fills(&outer), (MIB / 2 - own.0, ENOSPC));
    assert_eq!(errno(fs::write(a.join("more"), "x")), ENOSPC);
    fs::remove_file(a.join("file")).unwrap();
    // The inner one closes the file a moment after its last user has.
    eventually("the space is there again", || statvfs(&outer).2 == MIB);
    assert_eq!(fills(&outer), (MIB / 2 - own.0 + MIB, ENOSPC));
    // Now the inner one has room of its own, and the outer one none.
    assert_eq!(errno(fs::write(a.join("file"), zeros(4096))), ENOSPC);
    for place in [&a, &b, &outer] {
        let output = fixture.nacre([OsStr::new("umount"), place.as_os_str()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn a_cage_is_a_layer_of_any_stack() {
    needs!(as_root());
    let mut fixture = Fixture::stack("host:SOURCE | remap:map=1000/2000 | cage:size=1M,limit=user:2000=512K | trace");
    let file = File::create(fixture.at("file")).unwrap();
    std::os::unix::fs::chown(fixture.at("file"), Some(2000), None).unwrap();
    assert_eq!(fs::metadata(fixture.below("file")).unwrap().uid(), 1000);
    assert_eq!(errno(file.write_all_at(&zeros(MIB), 0)), EDQUOT);
    assert_eq!(fs::metadata(fixture.below("file")).unwrap().len(), MIB / 2);
    assert_eq!(fill(&mut File::create(fixture.at("other")).unwrap(), 4096), (MIB / 2, ENOSPC));
    assert!(fixture.nacre(["cage", "resize", fixture.mountpoint.to_str().unwrap(), "2M"]).status.success());
    assert_eq!(Cage::of(&fixture, &fixture.source).number("limit"), 2 * MIB);
    assert!(crate::mounting::status::Status::of(&fixture.mountpoint).text("stack").contains("cage:size=2M"));
    drop(file);
    fixture.unmount();
    let mut fixture = Fixture::stack("mem | cage:size=1M");
    assert_eq!(fill(&mut File::create(fixture.at("file")).unwrap(), 4096).1, ENOSPC);
    fixture.unmount();
}

#[test]
fn limits_of_users_and_directories_hold() {
    needs!(as_root());
    let fixture = Fixture::cage_of(
        &["--size=8M", "--limit=user:1234=1M", "--limit=dir:part=2M", "--limit=dir:later=1M"],
        |source| {
            fs::create_dir(source.join("part")).unwrap();
            fs::set_permissions(source, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        },
    );
    let (code, said) = crate::mounting::sh_as(&fixture.mountpoint, 1234, 1234, "", "head -c 2M /dev/zero > mine");
    assert!(code != 0 && said.contains("Disk quota exceeded"), "{said}");
    assert_eq!(fs::metadata(fixture.at("mine")).unwrap().len(), MIB);
    // Given away, it burdens the other one; taken over, it must fit.
    std::os::unix::fs::chown(fixture.at("mine"), Some(0), None).unwrap();
    fs::write(fixture.at("roots"), zeros(3 * MIB)).unwrap();
    assert_eq!(errno(std::os::unix::fs::chown(fixture.at("roots"), Some(1234), None)), EDQUOT);
    std::os::unix::fs::chown(fixture.at("mine"), Some(1234), None).unwrap();
    // Directories, those that come later included.
    assert_eq!(fill(&mut File::create(fixture.at("part/file")).unwrap(), 4096).1, ENOSPC);
    fs::create_dir(fixture.at("later")).unwrap();
    assert_eq!(fill(&mut File::create(fixture.at("later/file")).unwrap(), 4096).1, ENOSPC);
    let cage = Cage::of(&fixture, &fixture.mountpoint);
    let parts = cage.0["directories"].as_array().unwrap();
    assert!(parts.iter().all(|part| part["used"].as_u64() <= part["limit"].as_u64()), "{parts:?}");
    assert!(cage.refused("user") >= 2 && cage.refused("directory") >= 2, "{}", cage.0);
    // Across the border, files move with what they cost, links and directories do not.
    fs::remove_file(fixture.at("part/file")).unwrap();
    eventually("the part has room", || {
        let cage = Cage::of(&fixture, &fixture.mountpoint);
        let parts = cage.0["directories"].as_array().unwrap();
        parts.iter().any(|part| part["path"] == "part" && part["used"].as_u64() < Some(MIB))
    });
    fs::rename(fixture.at("mine"), fixture.at("part/mine")).unwrap();
    assert_eq!(errno(fs::rename(fixture.at("roots"), fixture.at("part/roots"))), ENOSPC);
    assert_eq!(errno(fs::hard_link(fixture.at("roots"), fixture.at("part/link"))), EXDEV);
    fs::create_dir(fixture.at("tree")).unwrap();
    assert_eq!(errno(fs::rename(fixture.at("tree"), fixture.at("part/tree"))), EXDEV);
    assert!(run("mv", [fixture.at("tree"), fixture.at("part/tree")]).status.success(), "mv copies then");
}

#[test]
fn the_oldest_goes_first() {
    needs!(as_root());
    for writes in WRITES {
        let mut fixture = cage(&["--size=1M", "--when-full=drop-oldest", "--keep=audit*", writes]);
        for (name, days) in [("audit.log.9", 90), ("app.log.2", 20), ("app.log.1", 10), ("web.log.1.gz", 15)] {
            fs::write(fixture.at(name), zeros(200_000)).unwrap();
            sh(&fixture.mountpoint, &format!("touch -d '{days} days ago' {name}"));
        }
        let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("app.log")).unwrap();
        log.write_all(&zeros(300_000)).unwrap();
        let names = || {
            let mut names: Vec<String> = fs::read_dir(&fixture.mountpoint)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["app.log", "app.log.1", "audit.log.9", "web.log.1.gz"], "{writes}");
        // Writing continues, and the host never holds more.
        for _ in 0..40 {
            log.write_all(&zeros(100_000)).unwrap();
            assert!(data(&fixture.source) <= MIB, "{writes}");
        }
        assert_eq!(names(), ["app.log", "audit.log.9"], "{writes}");
        assert_eq!(fs::metadata(fixture.at("audit.log.9")).unwrap().len(), 200_000);
        let cage = Cage::of(&fixture, &fixture.mountpoint);
        assert!(
            cage.0["dropped"]["files"].as_u64() >= Some(3) && cage.0["dropped"]["bytes"].as_u64() > Some(3_000_000),
            "{}",
            cage.0
        );
        // The newest is what is left.
        log.write_all(b"the end").unwrap();
        drop(log);
        let mut content = Vec::new();
        File::open(fixture.at("app.log")).unwrap().read_to_end(&mut content).unwrap();
        assert!(content.ends_with(b"the end"));
        fixture.unmount();
    }
}

#[test]
fn crossing_the_soft_limit_runs_the_command() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let told = fixture.scratch.path().join("told");
    let hook = format!("--on-soft=echo $NACRE_CAGE_EVENT $NACRE_CAGE_LIMIT >> {}", told.display());
    fixture.start_cage(&["--size=1M", "--soft=50%", &hook]);
    let said = || fs::read_to_string(&told).unwrap_or_default();
    fs::write(fixture.at("file"), zeros(MIB / 4)).unwrap();
    fs::write(fixture.at("other"), zeros(MIB / 2)).unwrap();
    eventually("it is told", || said() == format!("soft {MIB}\n"));
    fs::write(fixture.at("third"), zeros(MIB / 8)).unwrap();
    fs::remove_file(fixture.at("other")).unwrap();
    eventually("it is told that it is over", || said() == format!("soft {MIB}\nbelow {MIB}\n"));
    fixture.unmount();
}

#[test]
fn a_small_file_system_below_does_not_confuse_it() {
    needs!(as_root());
    crate::mounting::images::on_each(|kind, inner| {
        for writes in WRITES {
            inner.start_cage(&["--size=32M", writes]);
            let mut log = OpenOptions::new().append(true).create(true).open(inner.at("log")).unwrap();
            let (accepted, error) = fill(&mut log, 10_000);
            assert_eq!((accepted, error), (32 * MIB, ENOSPC), "{kind} {writes}");
            log.sync_all().unwrap();
            drop(log);
            assert_eq!(data(&inner.source), 32 * MIB, "{kind} {writes}");
            fs::remove_file(inner.at("log")).unwrap();
            eventually("all is free again", || Cage::of(inner, &inner.mountpoint).number("used") == 0);
            inner.unmount();
        }
    });
}

/// Returns the allocated bytes of regular files on the host, including blocks beyond their ends.
fn held(directory: &Path) -> u64 {
    let sizes = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512);
    sizes.sum()
}

#[test]
fn space_behind_the_end_of_a_file_is_found_again() {
    needs!(as_root());
    crate::mounting::images::on_each(|kind, inner| {
        inner.start_cage(&["--size=20M"]);
        let ask = |name: &str, bytes: u64| {
            let file = OpenOptions::new().append(true).create(true).open(inner.at(name)).unwrap();
            fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes).map_err(std::io::Error::from)
        };
        ask("asked", 12 * MIB).unwrap();
        // On XFS, this one has more behind its end than its length, too, and gives it back by
        // itself.
        let mut log = OpenOptions::new().append(true).create(true).open(inner.at("log")).unwrap();
        (0..20).for_each(|_| log.write_all(&zeros(40_000)).unwrap());
        let asked_again = [errno(ask("other", 12 * MIB))];
        drop(log);
        assert_eq!(asked_again, [ENOSPC], "{kind}");
        let used = |inner: &Fixture| Cage::of(inner, &inner.mountpoint).number("used");
        let right = 12 * MIB + 800_000_u64.next_multiple_of(4096);
        assert_eq!(used(inner), right, "{kind}");
        for end in ["killed", "in order", "without books"] {
            match end {
                "killed" => {
                    inner.signal(Signal::KILL);
                    assert_eq!(inner.ended(), None);
                }
                _ => inner.unmount(),
            }
            if end == "without books" {
                fs::remove_dir_all(inner.state()).unwrap();
            }
            inner.start_cage(&["--size=20M"]);
            eventually("all is counted", || {
                let cage = Cage::of(inner, &inner.mountpoint);
                cage.number("recounts") > 0 || cage.text("start") == "crashed"
            });
            assert_eq!(used(inner), right, "{kind} {end}");
            let file = OpenOptions::new().append(true).open(inner.at("other")).unwrap();
            assert_eq!(
                errno(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 12 * MIB).map_err(std::io::Error::from)),
                ENOSPC,
                "{kind} {end}"
            );
            fallocate(&file, FallocateFlags::KEEP_SIZE, 0, MIB).unwrap();
            drop(file);
            assert!(held(&inner.source) <= 20 * MIB, "{kind} {end}");
            fs::remove_file(inner.at("other")).unwrap();
            File::create(inner.at("other")).unwrap();
            eventually("it is given back", || used(inner) == right);
        }
        inner.unmount();
    });
}

#[test]
fn resize_is_quick() {
    needs!(as_root());
    // Information, not a promise of this test: the figure belongs to the bench.
    let fixture = cage(&["--size=8M"]);
    let start = Instant::now();
    let output = finish(Command::new(nacre()).args(["cage", "resize"]).arg(&fixture.mountpoint).arg("16M"));
    assert!(output.status.success());
    println!("resize took {:?}", start.elapsed());
    assert_eq!(statvfs(&fixture.mountpoint).0, 16 * MIB);
}
