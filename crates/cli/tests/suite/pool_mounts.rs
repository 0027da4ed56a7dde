//! The file systems of a pool on real mounts: write-back, `.zfs/snapshot`, a full pool, unlinked
//! files, kill -9.

use crate::mounting::{as_root, eventually, finish, nacre, needs, pools::Pool, text};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use std::{
    fs,
    io::Write,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

/// Large enough for the kernel to collect writes; the file is sparse.
const ROOMY: &str = "3G";

#[test]
fn a_snapshot_holds_what_write_had_taken() {
    needs!(as_root());
    let pool = Pool::made("pm", ROOMY, &[]);
    let mut file = fs::File::create(pool.at("open")).unwrap();
    for round in 0..5_u32 {
        let line = format!("line {round}\n");
        // Neither closed nor synced.
        file.write_all(line.as_bytes()).unwrap();
        let (name, length) = (format!("s{round}"), u64::from(round + 1) * 7);
        if round % 2 == 0 {
            fs::create_dir(pool.at(".zfs/snapshot").join(&name)).unwrap();
        } else {
            pool.told(&["fs", "snapshot", &format!("{}@{name}", pool.name)]);
        }
        let then = fs::read_to_string(pool.at(".zfs/snapshot").join(&name).join("open")).unwrap();
        assert_eq!(then.len() as u64, length);
        assert!(then.ends_with(&line));
    }
    assert_eq!(fs::read_to_string(pool.at(".zfs/snapshot/s0/open")).unwrap(), "line 0\n");
}

/// Writes 1, 2, 3 ... to one file and then to the other until `over` is set.
fn count_in_both(one: &fs::File, other: &fs::File, over: &AtomicBool) {
    for number in 1_u64.. {
        one.write_all_at(&number.to_le_bytes(), 0).unwrap();
        other.write_all_at(&number.to_le_bytes(), 0).unwrap();
        if over.load(Ordering::Relaxed) {
            return;
        }
    }
}

#[test]
fn snapshots_are_one_moment_for_whoever_writes() {
    needs!(as_root());
    let pool = Pool::made("pm", ROOMY, &[]);
    for below in ["one", "two"] {
        pool.told(&["fs", "create", &format!("{}/{below}", pool.name)]);
    }
    let places = [("a", "b"), ("one/a", "two/b"), ("two/c", "one/c")];
    for (round, (first, second)) in places.into_iter().enumerate() {
        let create = |name| fs::File::create(pool.at(name)).unwrap();
        let (one, other, over) = (create(first), create(second), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| count_in_both(&one, &other, &over));
            for turn in 0..5 {
                pool.told(&["fs", "snapshot", "-r", &format!("{}@s{round}-{turn}", pool.name)]);
            }
            over.store(true, Ordering::Relaxed);
        });
        for turn in 0..5 {
            let seen = |name: &str| {
                let (below, name) = name.rsplit_once('/').unwrap_or(("", name));
                let content =
                    fs::read(pool.at(below).join(format!(".zfs/snapshot/s{round}-{turn}")).join(name)).unwrap();
                content.try_into().map_or(0, u64::from_le_bytes)
            };
            let (ahead, behind) = (seen(first), seen(second));
            assert!(behind <= ahead && ahead <= behind + 1, "{first} {ahead}, {second} {behind}: not one moment");
        }
    }
}

#[test]
fn snapshots_are_directories_that_cannot_be_changed() {
    needs!(as_root());
    let pool = Pool::made("pm", "64M", &[]);
    fs::create_dir(pool.at("d")).unwrap();
    fs::write(pool.at("d/file"), "before").unwrap();
    fs::hard_link(pool.at("d/file"), pool.at("second")).unwrap();
    let there = |name: &str| pool.at(".zfs/snapshot").join(name);
    fs::create_dir(there("one")).unwrap();
    fs::write(pool.at("d/file"), "afterwards").unwrap();
    fs::remove_file(pool.at("second")).unwrap();
    assert_eq!(fs::read_to_string(there("one/d/file")).unwrap(), "before");
    assert_eq!(fs::read_to_string(there("one/second")).unwrap(), "before");
    let (now, then) = (fs::metadata(pool.at("d/file")).unwrap(), fs::metadata(there("one/d/file")).unwrap());
    // Else `cp` and `diff` would take them for one file.
    assert_ne!(now.ino(), then.ino());
    assert_eq!(then.nlink(), 2);
    assert_eq!(then.ino(), fs::metadata(there("one/second")).unwrap().ino());
    for refused in [
        fs::write(there("one/d/file"), "x").unwrap_err(),
        fs::write(there("one/new"), "x").unwrap_err(),
        fs::remove_file(there("one/second")).unwrap_err(),
        fs::create_dir(there("one/dir")).unwrap_err(),
        fs::rename(there("one/second"), there("one/third")).unwrap_err(),
    ] {
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{refused}");
    }
    // Hidden until it is asked for.
    let listed = || fs::read_dir(pool.at("")).unwrap().any(|entry| entry.unwrap().file_name() == ".zfs");
    assert!(!listed());
    fs::rename(there("one"), there("two")).unwrap();
    assert_eq!(
        pool.told(&["fs", "list", "-H", "-t", "snapshot", "-o", "name", "-r", &pool.name]),
        format!("{}@two\n", pool.name)
    );
    fs::remove_dir(there("two")).unwrap();
    assert_eq!(fs::read_dir(there("")).unwrap().count(), 0);
    pool.told(&["fs", "set", "snapdir=disabled", &pool.name]);
    eventually("the end of .zfs", || !pool.at(".zfs").exists());
}

#[test]
fn a_full_pool_refuses_the_write_and_keeps_what_it_took() {
    needs!(as_root());
    let pool = Pool::made("pm", "64M", &[]);
    // Nothing that could be compressed.
    let mut noise = 1_u64;
    let mut block = Vec::new();
    while block.len() < 65536 {
        noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        block.extend_from_slice(&(noise >> 32).to_le_bytes()[..4]);
    }
    let content = |at: u64| {
        let mut content = block.clone();
        content[..8].copy_from_slice(&at.to_le_bytes());
        content
    };
    let file = fs::File::create_new(pool.at("fill")).unwrap();
    let mut taken = 0;
    let refused = loop {
        match file.write_at(&content(taken), taken << 16) {
            Ok(65536) => taken += 1,
            Ok(some) => panic!("{some} bytes of a write"),
            Err(error) => break error,
        }
        assert!(taken < 2000, "more than there is");
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull, "{refused}");
    assert!(taken > 100, "only {taken} of 64 KiB");
    file.sync_all().unwrap();
    drop(file);
    let verify = || {
        let file = fs::File::open(pool.at("fill")).unwrap();
        let mut read = vec![0; 65536];
        for at in 0..taken {
            file.read_exact_at(&mut read, at << 16).unwrap();
            assert!(read == content(at), "block {at} of {taken}");
        }
    };
    verify();
    pool.told(&["pool", "export", &pool.name]);
    pool.import();
    verify();
    fs::remove_file(pool.at("fill")).unwrap();
    eventually("room", || fs::write(pool.at("again"), content(1)).is_ok());
}

#[test]
fn what_was_synced_survives_the_death_of_the_process() {
    needs!(as_root());
    let pool = Pool::made("pm", ROOMY, &[]);
    let rounds = std::env::var("NACRE_TEST_KILLS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3);
    println!("campaign: {rounds} deaths (NACRE_TEST_KILLS)");
    let mut all = Vec::new();
    for round in 0..rounds {
        let synced = AtomicU32::new(0);
        let content = |number: u32| vec![number as u8 | 1; [10, 3000, 70_000, 200_000][number as usize % 4]];
        let name = |number: u32| pool.at(&format!("{round}-{number}"));
        let write = |number: u32| {
            let temporary = name(number).with_extension("new");
            let mut file = fs::File::create(&temporary)?;
            file.write_all(&content(number))?;
            file.sync_all()?;
            fs::rename(&temporary, name(number))?;
            fs::File::open(pool.at(""))?.sync_all()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Ends with the mount.
                while write(synced.load(Ordering::Relaxed)).is_ok() {
                    synced.fetch_add(1, Ordering::Relaxed);
                }
            });
            eventually("some files", || synced.load(Ordering::Relaxed) > 20);
            pool.die();
            pool.leave();
        });
        pool.import();
        all.extend((0..synced.into_inner()).map(|number| (name(number), content(number))));
        for (path, content) in &all {
            assert!(fs::read(path).unwrap() == *content, "{}", path.display());
        }
    }
}

#[test]
fn a_file_without_a_name_is_found_while_somebody_holds_it() {
    needs!(as_root());
    let pool = Pool::made("pm", "64M", &[]);
    fs::create_dir(pool.at("gone")).unwrap();
    fs::write(pool.at("file"), "content").unwrap();
    let hold = |name: &str| rustix::fs::open(pool.at(name), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let (directory, file) = (hold("gone"), hold("file"));
    fs::remove_dir(pool.at("gone")).unwrap();
    fs::remove_file(pool.at("file")).unwrap();
    for held in [&directory, &file] {
        let asked =
            rustix::fs::statx(held, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)
                .unwrap();
        assert_eq!(asked.stx_nlink, 0);
    }
    // An open file keeps its content, and one without a name can get one.
    let unnamed =
        rustix::fs::open(pool.at(""), OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
            .unwrap();
    let unnamed = fs::File::from(unnamed);
    unnamed.write_all_at(b"named at last", 0).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&unnamed));
    rustix::fs::linkat(CWD, path, CWD, pool.at("named"), AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(fs::read_to_string(pool.at("named")).unwrap(), "named at last");
}

#[test]
fn what_is_unlinked_is_free_again() {
    needs!(as_root());
    // Once written to directly, once collected by the kernel.
    for size in ["64M", ROOMY] {
        let pool = Pool::made("pm", size, &[]);
        let inodes = || {
            let figures = rustix::fs::statvfs(pool.at("")).unwrap();
            figures.f_files - figures.f_ffree
        };
        let before = inodes();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..50 {
                        let path = pool.at(&format!("{worker}-{round}"));
                        fs::write(&path, vec![7; 100_000]).unwrap();
                        fs::remove_file(&path).unwrap();
                    }
                });
            }
        });
        eventually("the end of what was unlinked", || {
            pool.told(&["pool", "sync", &pool.name]);
            inodes() == before
        });
    }
}

#[test]
fn a_mount_is_remounted_read_only_and_back() {
    needs!(as_root());
    let pool = Pool::made("pm", ROOMY, &[]);
    pool.told(&["fs", "set", "readonly=on", &pool.name]);
    let refused = fs::write(pool.at("file"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    pool.told(&["fs", "set", "readonly=off", &pool.name]);
    fs::write(pool.at("file"), "x").unwrap();
    pool.told(&["fs", "set", "exec=off", &pool.name]);
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(
        table.lines().any(|line| line.starts_with(&format!("{} ", pool.name)) && line.contains("noexec")),
        "{table}"
    );
    // What mount(8) calls.
    let helper = |source: &str, at: &std::path::Path, option: &str| {
        finish(pool.command("mount.fuse.nacre").arg(source).arg(at).args(["-o", option]))
    };
    // As the mount table calls it, and as fstab does.
    for source in [&pool.name, &format!("fs:{}", pool.name)] {
        assert!(helper(source, &pool.at(""), "remount,ro").status.success());
        assert_eq!(fs::write(pool.at("file"), "x").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        let output = helper(source, &pool.at(""), "remount,rw");
        assert!(output.status.success(), "{}", text(&output.stderr));
        fs::write(pool.at("file"), "y").unwrap();
    }
    // A snapshot stays as it is.
    pool.nacre(&["fs", "snapshot", "%@now"]);
    let shown = pool.place.path().join("shown");
    fs::create_dir(&shown).unwrap();
    let source = format!("fs:{}@now", pool.name);
    let mounted = helper(&source, &shown, "ro");
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    assert_eq!(fs::read(shown.join("file")).unwrap(), b"y");
    // Backup programs know a file by its number.
    let file = |at: &std::path::Path| fs::metadata(at).unwrap();
    assert_eq!(file(&shown.join("file")).ino(), file(&pool.at("file")).ino());
    assert_ne!(file(&shown).dev(), file(&pool.at("")).dev());
    assert_eq!(file(&shown).ino(), file(&pool.at("")).ino());
    let output = helper(&source, &shown, "remount,rw");
    assert!(text(&output.stderr).contains("stays read-only"), "{}", text(&output.stderr));
    pool.nacre(&["umount", shown.to_str().unwrap()]);
}

#[test]
fn mounts_of_pools_are_listed_and_ended_like_all_others() {
    needs!(as_root());
    let pool = Pool::made("pm", "256M", &[]);
    pool.told(&["fs", "create", &format!("{}/below", pool.name)]);
    fs::write(pool.at("below/file"), b"x").unwrap();
    let at = pool.at("below").to_str().unwrap().to_owned();
    let output = finish(Command::new(nacre()).args(["status", "--json"]).arg(&at));
    let reports: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(reports[0]["source"], format!("{}/below", pool.name).as_str());
    assert!(reports[0]["requests"].as_u64().unwrap() > 0, "{reports}");
    let list = finish(Command::new(nacre()).args(["status", "-H", "-o", "mountpoint"]));
    let list = text(&list.stdout);
    for place in [&at, pool.at("").to_str().unwrap()] {
        assert!(list.lines().any(|line| line == place), "{place}: {list}");
    }
    // Somebody is in it: nothing happens.
    let inside = fs::File::open(pool.at("below/file")).unwrap();
    let refused = finish(Command::new(nacre()).arg("umount").arg(&at));
    assert_eq!(refused.status.code(), Some(5), "{}", text(&refused.stderr));
    drop(inside);
    let ended = || finish(Command::new(nacre()).arg("umount").arg(&at)).status.success();
    eventually("the unmount of what nobody uses", ended);
    assert!(
        pool.told(&["fs", "get", "-H", "-o", "value", "mounted", &format!("{}/below", pool.name)]).starts_with("no")
    );
    let gone = finish(Command::new(nacre()).arg("status").arg(&at));
    assert!(text(&gone.stderr).contains("no mount of nacre answers"), "{}", text(&gone.stderr));
    pool.told(&["fs", "mount", &format!("{}/below", pool.name)]);
    assert_eq!(fs::read(pool.at("below/file")).unwrap(), b"x");
}

/// Records the inotify events of these files from now on, by inotify's names.
struct Watched(std::os::fd::OwnedFd);

impl Watched {
    fn new(files: &[PathBuf]) -> Watched {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        let inotify = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        for file in files {
            add_watch(&inotify, file, WatchFlags::ALL_EVENTS).unwrap();
        }
        Watched(inotify)
    }

    fn told(&self) -> Vec<String> {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 65536];
        let mut reader = rustix::fs::inotify::Reader::new(&self.0, &mut buffer);
        std::iter::from_fn(|| reader.next().ok().map(|event| format!("{:?}", event.events()))).collect()
    }
}

#[test]
fn watchers_are_told_of_nothing_that_no_user_did() {
    needs!(as_root());
    // With ACLs users see another inode than the first one as the root, without them that one
    // itself.
    for acls in ["posix", "off"] {
        let pool = Pool::made("pm", ROOMY, &[]);
        pool.told(&["fs", "set", &format!("acltype={acls}"), &pool.name]);
        pool.told(&["fs", "unmount", &pool.name]);
        pool.told(&["fs", "mount", &pool.name]);
        let mut file = fs::File::create(pool.at("open")).unwrap();
        file.write_all(b"first").unwrap();
        let watched = Watched::new(&[pool.at(""), pool.at("open")]);
        for round in 0..3 {
            // Passed on by itself, while it is open.
            let before = writes(&pool.at(""));
            file.write_all(b"more").unwrap();
            eventually("what is written to an open file is passed on", || writes(&pool.at("")) > before);
            // And because a snapshot needs it.
            file.write_all(b"again").unwrap();
            pool.told(&["fs", "snapshot", &format!("{}@s{round}", pool.name)]);
            let told = watched.told();
            assert!(!told.is_empty() && told.iter().all(|event| event == "ReadFlags(MODIFY)"), "{acls}: {told:?}");
        }
        let (length, then) =
            (file.metadata().unwrap().len(), fs::metadata(pool.at(".zfs/snapshot/s2/open")).unwrap().len());
        assert_eq!((length, then), (5 + 3 * 9, 5 + 3 * 9));
    }
}

#[test]
fn a_new_pool_has_no_acls_and_a_copy_says_what_it_lost() {
    needs!(as_root());
    let pool = Pool::made("pm", ROOMY, &[]);
    let source = pool.path("lists");
    fs::create_dir(&source).unwrap();
    // One for user 1234; the group may only look, whatever the mask says.
    let list: Vec<u8> =
        [(1_u16, 6_u16, u32::MAX), (2, 6, 1234), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)]
            .iter()
            .flat_map(|(tag, bits, id)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat())
            .collect();
    let list = [&2_u32.to_le_bytes()[..], &list].concat();
    fs::write(source.join("shared"), "x").unwrap();
    let access = "system.posix_acl_access";
    rustix::fs::setxattr(source.join("shared"), access, &list, rustix::fs::XattrFlags::empty()).unwrap();
    let mode = |file: &Path| fs::metadata(file).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&source.join("shared")), 0o660);
    let value = |what: &str| pool.nacre(&["fs", "get", "-Ho", "value,source", "acltype", what]);
    let child = format!("{}/child", pool.name);
    pool.nacre(&["fs", "create", &child]);
    assert_eq!(value(&pool.name), "off\tlocal\n");
    assert_eq!(value(&child), format!("off\tinherited from {}\n", pool.name));
    let dest = pool.at("copied");
    let words = ["copy", source.to_str().unwrap(), dest.to_str().unwrap()];
    let said = pool.told(&["copy", "--verify", words[1], words[2]]);
    assert!(said.contains("1 access control lists could not be kept") && said.contains("acltype=posix"), "{said}");
    assert_eq!(mode(&dest.join("shared")), 0o640, "the mask is not the group's");
    assert!(pool.refused(&["copy", "--verify-only", words[1], words[2]]).1.contains("has another mode"));
    assert!(pool.refused(&["copy", "--strict", "-u", words[1], words[2]]).1.contains("access control lists"));
    // Without a value of its own, as in pools made before, it has them.
    pool.told(&["fs", "inherit", "acltype", &pool.name]);
    assert_eq!(value(&pool.name), "posix\tdefault\n");
    pool.told(&["fs", "unmount", &pool.name]);
    pool.told(&["fs", "mount", &pool.name]);
    let said = pool.told(&["copy", "-u", words[1], words[2]]);
    assert!(!said.contains("could not be kept"), "{said}");
    assert_eq!(mode(&dest.join("shared")), 0o660);
    let other = pool.create("acl", &["-O", "acltype=posix"]);
    assert_eq!(value(&other.0), "posix\tlocal\n");
}

/// The WRITEs that have reached the daemon.
fn writes(at: &Path) -> u64 {
    crate::mounting::status::Status::of(at).requests().get("write").copied().unwrap_or(0)
}
