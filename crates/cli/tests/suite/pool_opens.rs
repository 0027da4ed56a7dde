//! File systems of pools whose files the kernel opens without a request: the saved requests, and
//! the other means for the purposes of opens.

use crate::mounting::{
    as_root, eventually, needs,
    pools::Pool,
    sh,
    status::{Status, least_requests_of, requests_of},
};
use rustix::{
    fs::{FallocateFlags, Mode, OFlags},
    io::Errno,
};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

const ROOMY: &str = "2G";

/// So many bytes that no packer makes smaller.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

fn append(path: &Path, data: &[u8]) -> std::io::Result<()> {
    OpenOptions::new().append(true).open(path)?.write_all(data)
}

fn opens(pool: &Pool) -> Option<String> {
    Status::of(&pool.at("")).asks_at_open().map(str::to_owned)
}

fn remount(pool: &Pool) {
    pool.nacre(&["fs", "unmount", "%"]);
    pool.nacre(&["fs", "mount", "%"]);
}

#[test]
fn opening_a_known_file_reaches_nobody() {
    needs!(as_root());
    let pool = Pool::made("open", ROOMY, &[]);
    assert_eq!(opens(&pool), None);
    let file = pool.at("file");
    fs::write(&file, "content").unwrap();
    let read = least_requests_of(&pool.at(""), || {
        for _ in 0..10 {
            assert_eq!(fs::read(&file).unwrap(), b"content");
        }
    });
    // std asks for the length, which the kernel has forgotten the blocks of at the last close.
    assert!(read.keys().all(|kind| kind == "getattr" || kind == "statx"), "{read:?}");
    let appended = requests_of(&pool.at(""), || {
        for _ in 0..10 {
            append(&file, b"x").unwrap();
        }
    });
    assert!(!appended.contains_key("open") && !appended.contains_key("release"), "{appended:?}");
    assert_eq!(fs::read(&file).unwrap().len(), 17);
    // Truncation is a change like any other.
    File::create(&file).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().len(), 0);
    fs::write(&file, "new").unwrap();
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    assert_eq!(fs::read(&file).unwrap(), b"new");
}

#[test]
fn what_needs_opens_has_them_and_says_why() {
    needs!(as_root());
    let pool = Pool::made("why", ROOMY, &["-O", "atime=on"]);
    assert_eq!(opens(&pool).as_deref(), Some("access times are noted (atime=on)"));
    pool.nacre(&["fs", "set", "atime=off", "%"]);
    remount(&pool);
    assert_eq!(opens(&pool), None);
    let said = pool.told(&["fs", "set", "atime=on", "%"]);
    assert!(said.contains("from its next mount on"), "{said}");
    remount(&pool);
    assert!(opens(&pool).is_some());
    pool.nacre(&["fs", "set", "atime=off", "sync=always", "%"]);
    remount(&pool);
    assert_eq!(opens(&pool).as_deref(), Some("each write is made durable (sync=always)"));
}

#[test]
fn each_write_is_durable_as_soon_as_that_is_asked_for() {
    needs!(as_root());
    let pool = Pool::made("sync", ROOMY, &[]);
    let mut held = File::create(pool.at("held")).unwrap();
    held.write_all(b"before").unwrap();
    pool.nacre(&["fs", "set", "sync=always", "%"]);
    assert_eq!(opens(&pool), None);
    held.write_all(b" and after").unwrap();
    let mut new = File::create(pool.at("new")).unwrap();
    new.write_all(b"written").unwrap();
    pool.die();
    pool.leave();
    drop((held, new));
    pool.import();
    assert_eq!(fs::read(pool.at("held")).unwrap(), b"before and after");
    assert_eq!(fs::read(pool.at("new")).unwrap(), b"written");
    pool.nacre(&["fs", "set", "sync=standard", "%"]);
}

#[test]
fn a_file_is_made_no_longer_than_its_bound() {
    const MOST: u64 = (1 << 62) - 1;
    needs!(as_root());
    let pool = Pool::made("longest", ROOMY, &[]);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(pool.at("file")).unwrap();
    // Its writes are not collected.
    let flags = OFlags::DIRECT.bits().cast_signed();
    let direct = OpenOptions::new().write(true).custom_flags(flags).open(pool.at("file")).unwrap();
    file.set_len(MOST).unwrap();
    let size = || file.metadata().unwrap().len();
    assert_eq!(size(), MOST);
    direct.write_all_at(b"x", MOST - 1).unwrap();
    file.set_len(1).unwrap();
    let too_large = |outcome: io::Result<()>| {
        let outcome = outcome.map_err(|error| error.raw_os_error());
        assert_eq!((outcome, size()), (Err(Some(Errno::FBIG.raw_os_error())), 1));
    };
    too_large(file.set_len(MOST + 1));
    too_large(file.set_len(u64::MAX >> 1));
    for mode in [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE] {
        too_large(rustix::fs::fallocate(&file, mode, MOST, 1).map_err(io::Error::from));
    }
    too_large(direct.write_all_at(b"x", MOST));
    // What the kernel has collected is stored.
    file.write_all_at(b"x", MOST).unwrap();
    file.sync_all().unwrap();
    assert_eq!(size(), MOST + 1);
}

#[test]
fn a_path_only_descriptor_outlives_the_name() {
    needs!(as_root());
    let pool = Pool::made("path", ROOMY, &[]);
    fs::write(pool.at("file"), b"content").unwrap();
    let file = rustix::fs::open(pool.at("file"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    fs::remove_file(pool.at("file")).unwrap();
    pool.nacre(&["pool", "sync", "%"]);
    let found = rustix::fs::fstat(&file).unwrap();
    assert_eq!((found.st_size, found.st_nlink), (7, 0));
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    assert_eq!(fs::read(path).unwrap(), b"content");
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed() {
    needs!(as_root());
    let pool = Pool::made("nameless", ROOMY, &[]);
    let used = || {
        let text = pool.nacre(&["fs", "list", "-H", "-p", "-o", "used", "%"]);
        text.trim().parse::<u64>().unwrap()
    };
    let before = used();
    let noise = noise(8 << 20, 1);
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(pool.at("file")).unwrap();
    file.write_all(&noise).unwrap();
    fs::remove_file(pool.at("file")).unwrap();
    file.write_all(b"more").unwrap();
    // Nothing is in the kernel's cache any more.
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut read = Vec::new();
    file.read_to_end(&mut read).unwrap();
    assert!(read.len() == noise.len() + 4 && read.starts_with(&noise));
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let unnamed = File::from(rustix::fs::open(pool.at(""), flags, Mode::RUSR | Mode::WUSR).unwrap());
    unnamed.write_all_at(b"never named", 0).unwrap();
    unnamed.sync_all().unwrap();
    let mut content = [0; 11];
    unnamed.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"never named");
    drop((file, unnamed));
    eventually("the room is free again", || {
        pool.nacre(&["pool", "sync", "%"]);
        used() < before + (1 << 20)
    });
}

#[test]
fn who_writes_to_a_file_of_long_ago_is_refused_where_nothing_fits() {
    needs!(as_root());
    let pool = Pool::made("full", "512M", &[]);
    let old: Vec<_> = (0..200).map(|number| pool.at(&format!("old{number}"))).collect();
    for path in &old {
        fs::write(path, "old").unwrap();
    }
    // The kernel has their attributes, and they have not been written to for a while.
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    for path in &old {
        assert_eq!(fs::metadata(path).unwrap().len(), 3);
    }
    let mut fill = File::create(pool.at("fill")).unwrap();
    let mut at = 0_u64;
    let full = loop {
        at += 1;
        if let Err(error) = fill.write_all(&noise(1 << 20, at)) {
            break error;
        }
        assert!(at < 1 << 10, "a pool of 512 MiB takes more than 1 GiB");
    };
    assert_eq!(full.raw_os_error(), Some(28), "{full}");
    drop(fill);
    // Nothing that write(2) takes is lost, and what does not fit it refuses itself.
    let big = noise(4 << 20, at + 1);
    let mut taken = 0;
    for path in &old {
        let mut file = OpenOptions::new().append(true).open(path).unwrap();
        match file.write(&big) {
            Ok(written) => {
                taken += written as u64;
                file.sync_all().unwrap_or_else(|error| panic!("{written} bytes were taken, and then: {error}"));
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(28), "{error}"),
        }
    }
    let sizes: u64 = old.iter().map(|path| fs::metadata(path).unwrap().len() - 3).sum();
    assert_eq!(sizes, taken);
    fs::remove_file(pool.at("fill")).unwrap();
    pool.nacre(&["pool", "sync", "%"]);
    append(&old[0], b"fits").unwrap();
}

#[test]
fn a_quota_counts_from_the_moment_when_it_is_set() {
    needs!(as_root());
    let pool = Pool::made("quota", ROOMY, &[]);
    let noise = noise(8 << 20, 1);
    fs::write(pool.at("first"), &noise).unwrap();
    fs::write(pool.at("old"), "old").unwrap();
    pool.nacre(&["pool", "sync", "%"]);
    pool.nacre(&["fs", "set", "quota=9M", "%"]);
    let mut old = OpenOptions::new().append(true).open(pool.at("old")).unwrap();
    let error = old.write_all(&noise).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(28 | 122)), "{error}");
    pool.nacre(&["fs", "set", "quota=none", "%"]);
    old.write_all(&noise).unwrap();
    old.sync_all().unwrap();
}

#[test]
fn a_snapshot_whose_files_are_open_is_not_destroyed() {
    needs!(as_root());
    let pool = Pool::made("busy", ROOMY, &[]);
    fs::write(pool.at("file"), "then").unwrap();
    pool.nacre(&["fs", "snapshot", "%@one"]);
    fs::write(pool.at("file"), "now").unwrap();
    let mut open = File::open(pool.at(".zfs/snapshot/one/file")).unwrap();
    let (_, said) = pool.refused(&["fs", "destroy", "%@one"]);
    assert!(said.contains("open"), "{said}");
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "then");
    drop(open);
    // Looked into, and nothing of it is open.
    assert_eq!(fs::read(pool.at(".zfs/snapshot/one/file")).unwrap(), b"then");
    pool.nacre(&["fs", "destroy", "%@one"]);
    assert!(!pool.at(".zfs/snapshot/one").exists());
}

#[test]
fn nothing_of_a_file_from_before_reaches_one_that_was_rolled_back() {
    needs!(as_root());
    let pool = Pool::made("back", ROOMY, &[]);
    fs::write(pool.at("file"), "then").unwrap();
    pool.nacre(&["fs", "snapshot", "%@one"]);
    let mut open = OpenOptions::new().read(true).append(true).open(pool.at("file")).unwrap();
    let reader = File::open(pool.at("file")).unwrap();
    open.write_all(b" and later").unwrap();
    pool.nacre(&["fs", "rollback", "%@one"]);
    assert!(open.write_all(b"lost").and_then(|()| open.sync_all()).is_err());
    assert!(reader.read_at(&mut [0; 4], 0).is_err());
    drop((open, reader));
    assert_eq!(fs::read(pool.at("file")).unwrap(), b"then");
    append(&pool.at("file"), b" again").unwrap();
    assert_eq!(fs::read(pool.at("file")).unwrap(), b"then again");
}

/// Each file is created when the one before is written: no snapshot contains a file without those
/// before it.
#[test]
fn a_snapshot_is_one_moment_of_many_new_files() {
    needs!(as_root());
    let pool = Pool::made("moment", ROOMY, &[]);
    // Half of them exist before, and have not been written to for a while.
    let old: Vec<File> = (0..4000)
        .step_by(2)
        .map(|number| OpenOptions::new().append(true).create(true).open(pool.at(&format!("f{number}"))).unwrap())
        .collect();
    drop(old);
    let (made, end) = (AtomicU32::new(0), AtomicBool::new(false));
    let mut held: Vec<OwnedFd> = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..4000 {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                let path = pool.at(&format!("f{number}"));
                let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
                file.write_all(b"written").unwrap();
                // Open files pass nothing on by themselves.
                held.push(file.into());
                made.store(number, Ordering::Relaxed);
            }
        });
        for taken in 0..5 {
            let before = made.load(Ordering::Relaxed);
            pool.nacre(&["fs", "snapshot", &format!("%@s{taken}")]);
            let seen = |number: u32| {
                fs::read(pool.at(&format!(".zfs/snapshot/s{taken}/f{number}"))).is_ok_and(|text| text == b"written")
            };
            let there = (0..4000).take_while(|number| seen(*number)).count() as u32;
            let after = (there..4000).filter(|number| seen(*number)).collect::<Vec<_>>();
            assert!(after.is_empty(), "of {there} on, files are missing before {after:?}");
            assert!(before == 0 || there > before, "what was written before is not there: {there} of {before}");
        }
        end.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_is_written_to_no_more_is_not_looked_after() {
    needs!(as_root());
    let pool = Pool::made("quiet", ROOMY, &[]);
    let held: Vec<File> = (0..20).map(|number| File::create(pool.at(&format!("f{number}"))).unwrap()).collect();
    for file in &held {
        file.write_all_at(b"one", 0).unwrap();
    }
    let looked_after = || Status::of(&pool.at("")).number("open_files");
    assert!(looked_after() >= 20);
    eventually("files leave", || looked_after() == 0);
    // A write to one of them is noticed.
    held[3].write_all_at(b"two", 3).unwrap();
    assert_eq!(looked_after(), 1);
    pool.nacre(&["fs", "snapshot", "%@one"]);
    assert_eq!(fs::read(pool.at(".zfs/snapshot/one/f3")).unwrap(), b"onetwo");
    assert_eq!(fs::read(pool.at(".zfs/snapshot/one/f4")).unwrap(), b"one");
}

/// Write-back for sync(2) and snapshots opens files by name where the kernel has it: a file that was
/// found by handle would be looked up anew at its next open.
#[test]
fn what_was_passed_on_keeps_its_name() {
    needs!(as_root());
    let pool = Pool::made("names", ROOMY, &[]);
    // A user without rights of his own there needs the directory's ACL.
    let deep = pool.at("of/somebody");
    fs::create_dir_all(&deep).unwrap();
    std::os::unix::fs::chown(&deep, Some(1000), Some(1000)).unwrap();
    fs::set_permissions(&deep, fs::Permissions::from_mode(0o770)).unwrap();
    let files: Vec<_> = (0..40)
        .map(|number| if number < 20 { pool.at(&format!("f{number}")) } else { deep.join(format!("f{number}")) })
        .collect();
    let looked_after = || Status::of(&pool.at("")).number("open_files");
    let passed_on: [(&str, &dyn Fn()); 3] = [
        ("sync(2)", &rustix::fs::sync),
        ("a snapshot", &|| drop(pool.nacre(&["fs", "snapshot", "%@one"]))),
        ("some quiet seconds", &|| eventually("files leave", || looked_after() == 0)),
    ];
    for (what, pass_on) in passed_on {
        for file in &files {
            append(file, b"more").or_else(|_| fs::write(file, "more")).unwrap();
        }
        assert!(looked_after() >= 40);
        pass_on();
        let asked = requests_of(&pool.at(""), || {
            for file in &files {
                assert!(fs::read(file).unwrap().ends_with(b"more"));
            }
        });
        assert_eq!(asked.get("lookup"), None, "after {what}: {asked:?}");
    }
}

#[test]
fn a_new_small_file_is_five_requests_and_at_times_six() {
    needs!(as_root());
    let pool = Pool::made("new", ROOMY, &[]);
    // The kernel learns with the first open that none is a request: what was created before, it
    // releases.
    fs::write(pool.at("first"), "content").unwrap();
    fs::read(pool.at("first")).unwrap();
    let made = AtomicU32::new(0);
    let requests = least_requests_of(&pool.at(""), || {
        for _ in 0..50 {
            let path = pool.at(&format!("f{}", made.fetch_add(1, Ordering::Relaxed)));
            OpenOptions::new().write(true).create_new(true).open(path).unwrap().write_all(b"content").unwrap();
        }
    });
    for (kind, count) in &requests {
        match kind.as_str() {
            // The directory, whose attributes Linux forgets with each new name.
            "getattr" => assert!(*count <= 51, "{requests:?}"),
            // Where the clock ticks between the creation and the write.
            "setattr" => assert!(*count <= 50, "{requests:?}"),
            "lookup" | "create" | "getxattr" | "write" => assert_eq!(*count, 50, "{kind}: {requests:?}"),
            // A program that queries the free space of all mounts of the machine asks this one,
            // too.
            "statfs" => {}
            other => panic!("{other}: {requests:?}"),
        }
    }
}

/// The kernel drops the number of blocks of a file with each close. A listing brings it back with
/// the names, once.
#[test]
fn a_listing_shows_written_files_without_asking_for_each() {
    needs!(as_root());
    let pool = Pool::made("list", ROOMY, &[]);
    let list = || drop(sh(&pool.at(""), "ls -l > /dev/null"));
    for content in ["content", "more"] {
        for number in 0..300 {
            fs::write(pool.at(&format!("f{number}")), content).unwrap();
        }
        // Writes of opened files arrive when they are closed.
        let told = requests_of(&pool.at(""), list);
        let asked = |kind: &str| told.get(kind).copied().unwrap_or(0);
        assert!(asked("getattr") + asked("statx") + asked("lookup") <= 10, "{content}: {told:?}");
    }
    let again = least_requests_of(&pool.at(""), list);
    let asked = |kind: &str| again.get(kind).copied().unwrap_or(0);
    assert!(asked("getattr") + asked("statx") + asked("readdirplus") <= 3, "{again:?}");
}

/// Programs take a file without a sector for a hole, and store zeros.
#[test]
fn what_was_just_written_has_a_sector() {
    needs!(as_root());
    let pool = Pool::made("sectors", ROOMY, &[]);
    let mut held = File::create(pool.at("held")).unwrap();
    held.write_all(b"x").unwrap();
    assert!(held.metadata().unwrap().blocks() > 0);
    let tar = "tar cSf $1.tar $1 && mkdir $1.d && tar xf $1.tar -C $1.d && cmp $1 $1.d/$1";
    sh(
        &pool.at(""),
        &format!("set -e; t() {{ {tar}; }}; echo x > new; truncate -s 1M new; t new; truncate -s 1M held; t held"),
    );
    drop(held);
}
