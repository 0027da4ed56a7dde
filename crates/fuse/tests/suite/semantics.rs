//! The visible behaviour of a mount: the same as natively.

use crate::fixture::{Mirror, eventually, mounted, on_each_transport};
use nacre_fuse::{FuseOptions, PassthroughChoice, TransportChoice};
use nacre_layers::host::{Host, HostOptions};
use nacre_stack::spec::HostCoherence;
use nacre_sys::mapping::SharedMapping;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, StatxFlags, XattrFlags};
use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Seek, Write},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown},
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};

/// Longer than any test may take.
const LONG: Duration = Duration::from_secs(3600);

fn empty(_: &Path) {}

/// With I/O by the kernel (passthrough) and by the daemon.
fn in_each_mode(test: impl Fn(TransportChoice, PassthroughChoice)) {
    on_each_transport(|transport| {
        for passthrough in [PassthroughChoice::Auto, PassthroughChoice::Off] {
            println!("passthrough: {passthrough:?}");
            test(transport, passthrough);
        }
    });
}

fn exclusive(transport: TransportChoice, passthrough: PassthroughChoice) -> Mirror {
    Mirror::new(transport, HostCoherence::Exclusive, empty, |options: &mut FuseOptions| {
        options.passthrough = passthrough
    })
}

#[test]
fn a_tree_made_through_the_mount_is_in_the_source() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::create_dir_all(mirror.path("a/b/c")).unwrap();
        let data: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        fs::write(mirror.path("a/b/c/data"), &data).unwrap();
        assert_eq!(fs::read(mirror.below("a/b/c/data")).unwrap(), data);
        assert_eq!(fs::read(mirror.path("a/b/c/data")).unwrap(), data);
        std::os::unix::fs::symlink("b/c/data", mirror.path("a/link")).unwrap();
        assert_eq!(fs::read(mirror.path("a/link")).unwrap(), data);
        assert_eq!(fs::read_link(mirror.path("a/link")).unwrap(), Path::new("b/c/data"));
        let mut appending = OpenOptions::new().append(true).open(mirror.path("a/b/c/data")).unwrap();
        appending.write_all(b"tail").unwrap();
        assert!(fs::read(mirror.below("a/b/c/data")).unwrap().ends_with(b"tail"));
        File::options().write(true).truncate(true).open(mirror.path("a/b/c/data")).unwrap();
        assert_eq!(fs::metadata(mirror.below("a/b/c/data")).unwrap().len(), 0);
        fs::remove_dir_all(mirror.path("a")).unwrap();
        assert!(!mirror.below("a").exists());
    });
}

#[test]
fn attributes_are_the_sources() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::write(mirror.path("f"), "text").unwrap();
        fs::set_permissions(mirror.path("f"), fs::Permissions::from_mode(0o640)).unwrap();
        chown(mirror.path("f"), Some(4_000_000_000), Some(77)).unwrap();
        let time = std::time::UNIX_EPOCH - std::time::Duration::from_nanos(1_500_000_000);
        File::options().write(true).open(mirror.path("f")).unwrap().set_modified(time).unwrap();
        let all = |path: &Path| {
            let m = fs::metadata(path).unwrap();
            (
                m.ino(),
                m.mode(),
                m.nlink(),
                m.uid(),
                m.gid(),
                m.size(),
                m.blocks(),
                m.mtime(),
                m.mtime_nsec(),
                m.ctime(),
                m.ctime_nsec(),
            )
        };
        assert_eq!(all(&mirror.path("f")), all(&mirror.below("f")));
        assert_eq!(all(&mirror.path("f")).7, -2);
        let birth = |path: &Path| {
            let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::BTIME).unwrap();
            (found.stx_mask & StatxFlags::BTIME.bits(), found.stx_btime.tv_sec, found.stx_btime.tv_nsec)
        };
        assert_eq!(birth(&mirror.path("f")), birth(&mirror.below("f")));
    });
}

#[test]
fn two_names_of_a_file_are_one_file_at_once() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::write(mirror.path("one"), "1").unwrap();
        fs::hard_link(mirror.path("one"), mirror.path("two")).unwrap();
        for name in ["one", "two"] {
            assert_eq!(fs::metadata(mirror.path(name)).unwrap().nlink(), 2);
        }
        fs::write(mirror.path("one"), "longer").unwrap();
        assert_eq!(fs::metadata(mirror.path("two")).unwrap().len(), 6);
        fs::set_permissions(mirror.path("two"), fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(fs::metadata(mirror.path("one")).unwrap().mode() & 0o777, 0o600);
        fs::remove_file(mirror.path("one")).unwrap();
        assert_eq!(fs::metadata(mirror.path("two")).unwrap().nlink(), 1);
        assert_eq!(fs::read(mirror.path("two")).unwrap(), b"longer");
        // Whichever name is removed, the other still leads to the file.
        for gone in ["three", "two"] {
            fs::hard_link(mirror.path("two"), mirror.path("three")).unwrap();
            fs::remove_file(mirror.path(gone)).unwrap();
            let left = mirror.path(if gone == "two" { "three" } else { "two" });
            fs::set_permissions(&left, fs::Permissions::from_mode(0o640)).unwrap();
            assert_eq!(fs::metadata(&left).unwrap().mode() & 0o777, 0o640);
            OpenOptions::new().append(true).open(&left).unwrap().write_all(b"!").unwrap();
            assert_eq!(fs::metadata(&left).unwrap().nlink(), 1);
        }
        assert_eq!(fs::read(mirror.below("three")).unwrap(), b"longer!!");
    });
}

#[test]
fn renames_move_what_is_open_and_what_lies_below() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::create_dir_all(mirror.path("from/deep")).unwrap();
        fs::create_dir(mirror.path("to")).unwrap();
        fs::write(mirror.path("from/deep/f"), "here").unwrap();
        let open = File::options().read(true).write(true).open(mirror.path("from/deep/f")).unwrap();
        fs::rename(mirror.path("from/deep"), mirror.path("to/moved")).unwrap();
        assert_eq!(fs::read(mirror.path("to/moved/f")).unwrap(), b"here");
        open.write_all_at(b"HERE", 0).unwrap();
        open.set_len(2).unwrap();
        assert_eq!(fs::read(mirror.below("to/moved/f")).unwrap(), b"HE");
        fs::write(mirror.path("to/moved/new"), "new").unwrap();
        assert_eq!(fs::read(mirror.below("to/moved/new")).unwrap(), b"new");

        let cwd = rustix::fs::CWD;
        fs::write(mirror.path("x"), "x").unwrap();
        fs::write(mirror.path("y"), "yy").unwrap();
        let rename = |flags| rustix::fs::renameat_with(cwd, mirror.path("x"), cwd, mirror.path("y"), flags);
        assert_eq!(rename(RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
        rename(RenameFlags::EXCHANGE).unwrap();
        assert_eq!(
            (fs::metadata(mirror.path("x")).unwrap().len(), fs::metadata(mirror.path("y")).unwrap().len()),
            (2, 1)
        );
        assert_eq!(
            (fs::read(mirror.path("x")).unwrap(), fs::read(mirror.path("y")).unwrap()),
            (b"yy".to_vec(), b"x".to_vec())
        );
        rename(RenameFlags::empty()).unwrap();
        assert_eq!(fs::read(mirror.path("y")).unwrap(), b"yy");
        assert_eq!(fs::metadata(mirror.path("x")).unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn a_file_without_a_name_lives_while_it_is_open() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(mirror.path("gone")).unwrap();
        file.write_all(b"still here").unwrap();
        fs::remove_file(mirror.path("gone")).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
        file.set_len(5).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 5);
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still");
    });
}

#[test]
fn who_waits_for_a_close_is_asked_again_when_it_comes() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        let open = File::create(mirror.path("open")).unwrap();
        let is_closed = || mirror.mount.status().open_files == 0;
        assert!(!mirror.mount.wait_closed(Duration::ZERO, &mut { is_closed }));
        let (seen, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                mirror.mount.wait_closed(LONG, &mut || {
                    let closed = is_closed();
                    seen.send(closed).unwrap();
                    closed
                })
            });
            assert_eq!(told.recv(), Ok(false));
            drop(open);
            assert!(waiting.join().unwrap());
        });
        assert_eq!(told.try_iter().last(), Some(true));
    });
}

#[test]
fn a_temporary_file_can_be_given_a_name() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        let file =
            rustix::fs::open(mirror.path(""), OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o644)).unwrap();
        rustix::io::write(&file, b"named later").unwrap();
        assert_eq!(fs::read_dir(mirror.path("")).unwrap().count(), 0);
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        rustix::fs::linkat(
            rustix::fs::CWD,
            link.as_str(),
            rustix::fs::CWD,
            mirror.path("name"),
            AtFlags::SYMLINK_FOLLOW,
        )
        .unwrap();
        assert_eq!(fs::read(mirror.path("name")).unwrap(), b"named later");
        assert_eq!(fs::read(mirror.below("name")).unwrap(), b"named later");
        assert_eq!(fs::metadata(mirror.path("name")).unwrap().nlink(), 1);
    });
}

#[test]
fn exclusive_creation_fails_for_all_but_one() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        for round in 0..20 {
            let path = mirror.path(&format!("f{round}"));
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let path = path.clone();
                    std::thread::spawn(move || OpenOptions::new().write(true).create_new(true).open(path).is_ok())
                })
                .collect();
            let made = threads.into_iter().filter_map(|thread| thread.join().ok()).filter(|made| *made).count();
            assert_eq!(made, 1);
        }
    });
}

#[test]
fn long_listings_are_complete_and_can_be_resumed() {
    on_each_transport(|transport| {
        let fill = |source: &Path| {
            (0..5000)
                .for_each(|i| drop(File::create(source.join(format!("name-{i:06}-{}", "x".repeat(i % 50)))).unwrap()))
        };
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, fill, |_| {});
        let names =
            |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>();
        let expected = names(&mirror.below(""));
        assert_eq!(expected.len(), 5000);
        for _ in 0..2 {
            assert_eq!(names(&mirror.path("")), expected);
        }
        let numbers = |path: &Path| {
            let entries = fs::read_dir(path).unwrap().map(Result::unwrap);
            entries
                .map(|entry| (std::os::unix::fs::DirEntryExt::ino(&entry), entry.metadata().unwrap().ino()))
                .collect::<BTreeSet<_>>()
        };
        assert_eq!(numbers(&mirror.path("")), numbers(&mirror.below("")));
        let dots = |path: &Path| {
            let directory = rustix::fs::open(path, OFlags::DIRECTORY, Mode::empty()).unwrap();
            let entries = rustix::fs::Dir::new(directory).unwrap().map(Result::unwrap);
            let dots = entries.filter(|entry| matches!(entry.file_name().to_bytes(), b"." | b".."));
            dots.map(|entry| (entry.file_name().to_owned(), entry.ino(), entry.file_type())).collect::<Vec<_>>()
        };
        fs::create_dir_all(mirror.path("up/down")).unwrap();
        assert_eq!(dots(&mirror.path("up/down")).len(), 2);
        for (dot, native) in dots(&mirror.path("up/down")).iter().zip(dots(&mirror.below("up/down"))) {
            assert_eq!((dot.1, dot.2), (native.1, native.2), "{:?}", dot.0);
        }
        for i in 0..5000 {
            fs::remove_file(mirror.path(&format!("name-{i:06}-{}", "x".repeat(i % 50)))).unwrap();
        }
        assert_eq!(fs::read_dir(mirror.path("")).unwrap().count(), 1);
    });
}

#[test]
fn a_mapped_file_is_data_where_its_pages_cannot_be_written_back() {
    on_each_transport(|transport| {
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, empty, |options: &mut FuseOptions| {
            options.passthrough = PassthroughChoice::Off;
            options.flush_for_seek = false;
        });
        File::create(mirror.below("f")).unwrap().set_len(1 << 20).unwrap();
        let reader = File::open(mirror.path("f")).unwrap();
        let seek = |from| rustix::fs::seek(&reader, from);
        let past = Err(rustix::io::Errno::NXIO);
        assert_eq!((seek(SeekFrom::Data(0)), seek(SeekFrom::Hole(0))), (past, Ok(0)));
        let writer = File::options().read(true).write(true).open(mirror.path("f")).unwrap();
        let mapping = SharedMapping::new(&writer, 1 << 20, true).unwrap();
        mapping.write(70_000, b"stored").unwrap();
        assert_eq!((seek(SeekFrom::Data(5)), seek(SeekFrom::Hole(5))), (Ok(5), Ok(1 << 20)));
        assert_eq!((seek(SeekFrom::Data(1 << 20)), seek(SeekFrom::Hole(1 << 20))), (past, past));
        drop((mapping, writer));
        // The last munmap(2) writes back, and the layer answers again.
        eventually("holes", || seek(SeekFrom::Data(0)).is_ok_and(|from| from > 0));
    });
}

#[test]
fn holes_allocation_and_copies_reach_the_source() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        let native =
            File::options().read(true).write(true).create(true).truncate(true).open(mirror.below("native")).unwrap();
        let file = File::options().read(true).write(true).create(true).truncate(true).open(mirror.path("f")).unwrap();
        for target in [&native, &file] {
            target.write_all_at(&[1; 65536], 0).unwrap();
            target.write_all_at(&[1; 65536], 1 << 20).unwrap();
        }
        let seek = |file: &File, from| rustix::fs::seek(file, from);
        // A file of this mount may be mapped: without a flush under the inode's lock its whole content counts
        // as data.
        let knows_holes = FuseOptions::new("/").flush_for_seek;
        for from in [SeekFrom::Hole(0), SeekFrom::Data(200_000), SeekFrom::Data(1 << 21)] {
            if knows_holes {
                assert_eq!(seek(&file, from), seek(&native, from), "{from:?}");
            }
        }
        rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 65536).unwrap();
        let mut block = [9; 4096];
        file.read_exact_at(&mut block, 4096).unwrap();
        assert_eq!(block, [0; 4096]);
        let copy =
            File::options().read(true).write(true).create(true).truncate(true).open(mirror.path("copy")).unwrap();
        let (mut from, mut to) = (1 << 20, 0);
        let copied = rustix::fs::copy_file_range(&file, Some(&mut from), &copy, Some(&mut to), 65536).unwrap();
        assert_eq!(copied, 65536);
        assert_eq!(fs::read(mirror.below("copy")).unwrap(), vec![1; 65536]);
        assert_eq!(copy.metadata().unwrap().len(), 65536);
        file.sync_all().unwrap();
        file.sync_data().unwrap();
        File::open(mirror.path("")).unwrap().sync_all().unwrap();
    });
}

#[test]
fn extended_attributes_come_and_go() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("f"), "").unwrap());
        let (path, below) = (mirror.path("f"), mirror.below("f"));
        if rustix::fs::setxattr(&below, "user.probe", b"1", XattrFlags::empty()).is_err() {
            println!("skipped: the file system of the test has no extended attributes");
            return;
        }
        rustix::fs::setxattr(&path, "user.colour", b"nacre", XattrFlags::CREATE).unwrap();
        let exists = rustix::fs::setxattr(&path, "user.colour", b"other", XattrFlags::CREATE);
        assert_eq!(exists, Err(rustix::io::Errno::EXIST));
        let mut buffer = [0_u8; 64];
        // Without a buffer, getxattr(2) returns the size.
        let size = Command::new("getfattr").args(["--only-values", "-n", "user.colour"]).arg(&path).output();
        assert!(size.map_or(true, |output| output.stdout == b"nacre"));
        assert_eq!(rustix::fs::getxattr(&path, "user.colour", &mut buffer[..3]), Err(rustix::io::Errno::RANGE));
        assert_eq!(rustix::fs::getxattr(&below, "user.colour", &mut buffer).unwrap(), 5);
        assert_eq!(&buffer[..5], b"nacre");
        let length = rustix::fs::listxattr(&path, &mut buffer).unwrap();
        let mut names: Vec<_> = buffer[..length].split(|b| *b == 0).filter(|name| name.starts_with(b"user.")).collect();
        names.sort_unstable();
        assert_eq!(names, [&b"user.colour"[..], b"user.probe"]);
        rustix::fs::removexattr(&path, "user.colour").unwrap();
        assert_eq!(rustix::fs::getxattr(&path, "user.colour", &mut buffer), Err(rustix::io::Errno::NODATA));
    });
}

#[test]
fn names_of_any_byte_and_of_255_bytes_work_and_longer_ones_do_not() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, empty);
        use std::os::unix::ffi::OsStrExt;
        let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe \n\"'\x01");
        fs::write(mirror.path("").join(odd), "odd").unwrap();
        assert_eq!(fs::read(mirror.below("").join(odd)).unwrap(), b"odd");
        let longest = "n".repeat(255);
        fs::write(mirror.path(&longest), "long").unwrap();
        assert_eq!(fs::read(mirror.below(&longest)).unwrap(), b"long");
        let longer = "n".repeat(256);
        for error in [fs::metadata(mirror.path(&longer)).unwrap_err(), fs::write(mirror.path(&longer), "").unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::InvalidFilename);
        }
    });
}

/// Runs a shell command as an ordinary user.
fn as_user(command: &str) -> bool {
    use std::os::unix::process::CommandExt;
    Command::new("sh").arg("-c").arg(command).uid(12_345).gid(12_345).status().unwrap().success()
}

/// An ordinary user writes to an open file, root gives it set-id bits, the user writes again.
fn written_twice(path: &Path) {
    let beside = |suffix: &str| path.with_extension(suffix);
    let script = format!(
        "exec 3>>'{0}'; echo 1 >&3; touch '{0}.1'; while ! [ -e '{0}.2' ]; do sleep 0.01; done; echo 2 >&3",
        path.display()
    );
    std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("the first write is done", || beside("1").exists());
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, 0o777);
            fs::set_permissions(path, fs::Permissions::from_mode(0o6777)).unwrap();
            fs::write(beside("2"), "").unwrap();
        });
        assert!(as_user(&script));
    });
    fs::remove_file(beside("1")).unwrap();
    fs::remove_file(beside("2")).unwrap();
}

#[test]
fn a_program_that_runs_is_not_truncated() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        let path = mirror.path("program");
        // By a process of its own: a descriptor for writing in this one could be inherited by a
        // child of another test, and a program that is open for writing cannot be run.
        assert!(Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap().success());
        let size = fs::metadata(&path).unwrap().len();
        let mut running = Command::new(&path).arg("60").spawn().unwrap();
        for access in [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR] {
            let opened = rustix::fs::open(&path, access | OFlags::TRUNC, Mode::empty());
            assert_eq!(opened.err(), Some(rustix::io::Errno::TXTBSY), "{access:?}");
            assert_eq!(fs::metadata(mirror.below("program")).unwrap().len(), size, "{access:?}");
        }
        assert!(running.try_wait().unwrap().is_none(), "it has lost its code");
        running.kill().unwrap();
        running.wait().unwrap();
        rustix::fs::open(&path, OFlags::RDONLY | OFlags::TRUNC, Mode::empty()).unwrap();
        assert_eq!(fs::metadata(mirror.below("program")).unwrap().len(), 0);
    });
}

#[test]
fn set_id_bits_end_with_a_write_or_truncation_by_an_ordinary_user() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::set_permissions(mirror.below(""), fs::Permissions::from_mode(0o777)).unwrap();
        for parent in [mirror.path(""), mirror.below("")] {
            fs::set_permissions(parent, fs::Permissions::from_mode(0o777)).unwrap();
        }
        let prepare = |name: &str| {
            fs::write(mirror.path(name), "#!/bin/true").unwrap();
            chown(mirror.path(name), Some(0), Some(0)).unwrap();
            fs::set_permissions(mirror.path(name), fs::Permissions::from_mode(0o6777)).unwrap();
            mirror.path(name)
        };
        let mode = |name: &str| fs::metadata(mirror.below(name)).unwrap().mode() & 0o7777;
        for (name, command) in [("w", "echo x >> "), ("t", "echo y > "), ("z", "truncate -s 3 ")] {
            let path = prepare(name);
            assert_eq!(mode(name), 0o6777);
            assert!(as_user(&format!("{command} '{}'", path.display())), "{command}");
            assert_eq!(mode(name), 0o777, "after {command}");
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777, "as seen after {command}");
        }
        // Also where the bits are set again between two writes of one open file.
        for first in [0o6777, 0o777] {
            let path = prepare("again");
            fs::set_permissions(&path, fs::Permissions::from_mode(first)).unwrap();
            written_twice(&path);
            assert_eq!(mode("again"), 0o777);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
        }
        // Root may keep them or not, but the visible mode is the file's mode.
        let path = prepare("r");
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"x").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, mode("r"));
        // Changing the owner removes them for every user.
        prepare("r");
        chown(&path, Some(1), None).unwrap();
        assert_eq!(mode("r"), 0o777);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
    });
}

#[test]
fn what_users_create_is_theirs_and_permissions_hold() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("secret"), "s").unwrap());
        for parent in [mirror.below(""), mirror.path("")] {
            fs::set_permissions(&parent, fs::Permissions::from_mode(0o777)).unwrap();
        }
        fs::set_permissions(mirror.path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        let at = mirror.path("");
        assert!(as_user(&format!("umask 027; cd '{}' && mkdir d && echo 1 > d/f && ln -s f d/l", at.display())));
        for name in ["d", "d/f", "d/l"] {
            let found = fs::symlink_metadata(mirror.below(name)).unwrap();
            assert_eq!((found.uid(), found.gid()), (12_345, 12_345), "{name}");
        }
        assert_eq!(fs::metadata(mirror.below("d")).unwrap().mode() & 0o777, 0o750);
        assert_eq!(fs::metadata(mirror.below("d/f")).unwrap().mode() & 0o777, 0o640);
        assert!(!as_user(&format!("cat '{}' 2>/dev/null", mirror.path("secret").display())));
        assert_eq!(fs::read(mirror.path("secret")).unwrap(), b"s");
    });
}

#[test]
fn a_file_open_through_the_page_cache_and_again_works() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::write(mirror.path("f"), "0123456789").unwrap();
        let handles: Vec<File> =
            (0..50).map(|i| OpenOptions::new().read(true).write(i % 2 == 0).open(mirror.path("f")).unwrap()).collect();
        for (i, handle) in handles.iter().enumerate() {
            if i % 2 == 0 {
                handle.write_all_at(&[b'a' + i as u8 % 26], i as u64 % 10).unwrap();
            }
            let mut one = [0; 10];
            handle.read_exact_at(&mut one, 0).unwrap();
            assert_eq!(one.to_vec(), fs::read(mirror.below("f")).unwrap());
        }
        drop(handles);
        eventually("all are closed", || mirror.mount.status().open_files == 0);
    });
}

#[test]
fn special_files_are_made_and_used() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, empty);
        use rustix::fs::{CWD, FileType, mknodat};
        mknodat(CWD, mirror.path("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        mknodat(
            CWD,
            mirror.path("null"),
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            rustix::fs::makedev(1, 3),
        )
        .unwrap();
        assert_eq!(fs::metadata(mirror.path("null")).unwrap().rdev(), rustix::fs::makedev(1, 3));
        assert_eq!(fs::metadata(mirror.below("null")).unwrap().rdev(), rustix::fs::makedev(1, 3));
        fs::write(mirror.path("null"), "into the void").unwrap();
        let fifo = mirror.path("fifo");
        let reader = std::thread::spawn(move || fs::read_to_string(fifo).unwrap());
        fs::write(mirror.path("fifo"), "through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        let listener = std::os::unix::net::UnixListener::bind(mirror.path("socket")).unwrap();
        let client = std::thread::spawn({
            let path = mirror.path("socket");
            move || std::os::unix::net::UnixStream::connect(path).is_ok()
        });
        listener.accept().unwrap();
        assert!(client.join().unwrap());
    });
}

#[test]
fn changes_below_show_in_a_watching_mount() {
    on_each_transport(|transport| {
        let fill = |source: &Path| {
            fs::create_dir(source.join("d")).unwrap();
            fs::write(source.join("d/f"), "old").unwrap();
        };
        let mirror = Mirror::new(transport, HostCoherence::Watch, fill, |_| {});
        let count = || fs::read_dir(mirror.path("d")).unwrap().count();
        // By another process: changes below by the serving process itself count as made through the mount.
        let elsewhere = |command: &str| {
            assert!(Command::new("sh").arg("-c").arg(command).current_dir(mirror.below("")).status().unwrap().success())
        };
        for round in 0..8_usize {
            assert!(fs::metadata(mirror.path(&format!("d/n{round}"))).is_err());
            fs::metadata(mirror.path("d/f")).unwrap();
            assert_eq!(count(), 1 + round);
            elsewhere(&format!("echo new > d/n{round}"));
            eventually("a new name is seen", || mirror.path(&format!("d/n{round}")).exists());
            eventually("it is listed", || count() == 2 + round);
            elsewhere(&format!("printf '%{round}s' '' > d/f"));
            eventually("a new size is seen", || fs::metadata(mirror.path("d/f")).unwrap().len() == round as u64);
            eventually("new content is seen", || fs::read(mirror.path("d/f")).unwrap() == vec![b' '; round]);
            elsewhere(&format!("chmod 60{round} d/f"));
            eventually("new permissions are seen", || {
                fs::metadata(mirror.path("d/f")).unwrap().mode() & 0o777 == 0o600 + round as u32
            });
        }
        elsewhere("mv d e");
        eventually("a renamed directory is seen", || mirror.path("e/f").exists() && !mirror.path("d").exists());
        elsewhere("rm -r e");
        eventually("a removed directory is seen", || !mirror.path("e").exists());
    });
}

/// Reads never return zeros in place of data that other processes appended, and, where each read is a request,
/// never data that they have overwritten.
#[test]
fn a_reader_sees_what_others_write_meanwhile() {
    in_each_mode(|transport, passthrough| {
        for coherence in [HostCoherence::Revalidate, HostCoherence::Watch] {
            let mirror = Mirror::new(
                transport,
                coherence,
                |source| fs::write(source.join("log"), "hello").unwrap(),
                |options| {
                    options.passthrough = passthrough;
                },
            );
            let asks = coherence == HostCoherence::Revalidate;
            let reader = File::open(mirror.path("log")).unwrap();
            let content = || {
                let mut buffer = [0_u8; 64];
                let read = reader.read_at(&mut buffer, 0).unwrap();
                buffer[..read].to_vec()
            };
            assert_eq!(content(), b"hello");
            // By another process, as above.
            let elsewhere = |command: &str| {
                assert!(
                    Command::new("sh").arg("-c").arg(command).current_dir(mirror.below("")).status().unwrap().success()
                )
            };
            elsewhere("printf ' world' >> log");
            let length = reader.metadata().unwrap().len() as usize;
            let seen = content();
            assert!(seen.len() >= length && b"hello world".starts_with(&seen), "{seen:?}");
            assert!(!asks || length == 11);
            eventually("the end of the file", || content() == b"hello world");
            elsewhere("printf HELLO 1<> log");
            assert!(!asks || content() == b"HELLO world");
            eventually("the start of the file", || content() == b"HELLO world");
        }
    });
}

#[test]
fn everything_can_be_asked_for_again() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("f"), "old").unwrap());
        assert_eq!(fs::metadata(mirror.path("f")).unwrap().len(), 3);
        assert!(fs::metadata(mirror.path("g")).is_err());
        fs::write(mirror.below("f"), "longer").unwrap();
        fs::write(mirror.below("g"), "").unwrap();
        mirror.mount.invalidate_everything();
        eventually("the new size is seen", || fs::metadata(mirror.path("f")).unwrap().len() == 6);
        eventually("the new name is seen", || mirror.path("g").exists());
        assert_eq!(fs::read(mirror.path("f")).unwrap(), b"longer");
    });
}

#[test]
fn a_source_that_contains_its_mount_point_does_not_hang() {
    on_each_transport(|transport| {
        let source = tempfile::tempdir().unwrap();
        let inside = source.path().join("mnt");
        fs::create_dir(&inside).unwrap();
        fs::write(source.path().join("f"), "f").unwrap();
        let host =
            Host::open(HostOptions { coherence: HostCoherence::Exclusive, ..HostOptions::new(source.path()) }).unwrap();
        let (mount, _unused) = mounted(Arc::new(host), transport, |options| options.mountpoint = inside.clone());
        assert_eq!(fs::read(inside.join("f")).unwrap(), b"f");
        let walk = Command::new("timeout").args(["20", "find"]).arg(&inside).arg("-ls").output().unwrap();
        assert_ne!(walk.status.code(), Some(124), "walking the tree hung");
        mount.unmount(true).unwrap();
        mount.wait();
    });
}

#[test]
fn memory_goes_when_the_kernel_forgets() {
    on_each_transport(|transport| {
        let fill = |source: &Path| (0..2000).for_each(|i| drop(File::create(source.join(format!("f{i}"))).unwrap()));
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, fill, |_| {});
        (0..2000).for_each(|i| assert!(mirror.path(&format!("f{i}")).exists()));
        // The kernel may evict unreferenced inodes at any time.
        let hold = |i| rustix::fs::open(mirror.path(&format!("f{i}")), OFlags::PATH, Mode::empty()).unwrap();
        let held: Vec<_> = (0..300).map(hold).collect();
        assert!(mirror.mount.status().inodes > 300);
        drop(held);
        (0..2000).for_each(|i| fs::remove_file(mirror.path(&format!("f{i}"))).unwrap());
        eventually("removed files are forgotten", || mirror.mount.status().inodes < 10);
    });
}

#[test]
fn unmounting_is_refused_while_in_use_unless_lazy() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("f"), "f").unwrap());
        let open = File::open(mirror.path("f")).unwrap();
        assert!(mirror.mount.unmount(false).is_err());
        mirror.mount.unmount(true).unwrap();
        let mut one = [0];
        open.read_exact_at(&mut one, 0).unwrap();
        assert_eq!(&one, b"f");
        drop(open);
        mirror.mount.wait();
        assert!(mirror.mount.ended());
        assert!(!mirror.path("f").exists());
    });
}

#[test]
fn stores_to_a_mapping_change_the_times_when_the_file_is_closed() {
    in_each_mode(|transport, passthrough| {
        let mirror = exclusive(transport, passthrough);
        fs::write(mirror.path("f"), vec![0; 8192]).unwrap();
        let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        File::options().write(true).open(mirror.path("f")).unwrap().set_modified(old).unwrap();
        assert_eq!(fs::metadata(mirror.path("f")).unwrap().modified().unwrap(), old);
        let script = "import mmap,os,sys\nf=open(sys.argv[1],'r+b')\nm=mmap.mmap(f.fileno(),0)\nos.fstat(f.fileno())\nm[0:3]=b'new'\nm.flush()\nm.close()\nf.close()";
        match Command::new("python3").arg("-c").arg(script).arg(mirror.path("f")).status() {
            Ok(status) => assert!(status.success()),
            Err(error) => return println!("skipped: python3: {error}"),
        }
        assert_eq!(&fs::read(mirror.below("f")).unwrap()[..4], b"new\0");
        let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        assert_ne!(modified(&mirror.below("f")), old);
        eventually("the new time is seen", || modified(&mirror.path("f")) == modified(&mirror.below("f")));
        // Not before, as reading makes the kernel send a request, too.
        assert_eq!(&fs::read(mirror.path("f")).unwrap()[..4], b"new\0");
    });
}
