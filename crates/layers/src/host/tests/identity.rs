//! Files keep their identity whatever happens to names, and a name that is swapped meanwhile never
//! leads to another file.

use super::*;
use nacre_vfs::{SetTime, WriteOrigin};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::atomic::{AtomicBool, Ordering},
};

#[test]
fn a_chain_of_renames_is_followed() {
    let door = Door::new();
    for path in ["a", "b", "c"] {
        door.mkdir(&Caller::ROOT, path, 0o755).unwrap();
    }
    door.create(&Caller::ROOT, "a/file", 0o644, 0o2).unwrap();
    let node = door.find("a/file").unwrap().node;
    door.rename("a/file", "b/file", 0).unwrap();
    door.rename("b", "c/b", 0).unwrap();
    door.rename("c", "d", 0).unwrap();
    let attr = door.getattr(&node).unwrap();
    assert_eq!(attr.id, door.find("d/b/file").unwrap().attr.id);
    door.rename("d/b/file", "a/file", RenameFlags::NOREPLACE).unwrap();
    fs::write(door.path("d/b/other"), b"").unwrap();
    assert_eq!(door.rename("d/b/other", "a/file", RenameFlags::NOREPLACE), Err(Errno::EEXIST));
    door.rename("d/b/other", "a/file", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(door.getattr(&node).unwrap().id, door.find("d/b/other").unwrap().attr.id);
    assert_eq!(door.rename("a", "a/below", 0), Err(Errno::EINVAL));
}

#[test]
fn a_file_of_an_overlay_stays_itself_when_it_is_copied_up() {
    if !is_root() {
        return println!("skipped: only root mounts overlays");
    }
    let script = "mkdir lower upper work merged && echo content > lower/file && \
        mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged";
    let overlaid = |options: &mut HostOptions| {
        shell(&options.source, script);
        options.source.push("merged");
    };
    let door = Door::with(overlaid, 64);
    // Detached now, so that it is unmounted before the directory is removed in any case.
    shell(door.source.path(), "exec 3< merged/file; umount -l merged");
    let file = door.find("file").unwrap();
    let opened = door.host.open(&Caller::ROOT, &file.node, OpenFlags::WRITE).unwrap();
    assert_eq!(opened.write(b"C", 0, WriteOrigin::Caller), Ok(1));
    drop(opened);
    assert_eq!(door.getattr(&file.node).unwrap().id, file.attr.id);
    assert_eq!(door.find("file").unwrap().attr.id, file.attr.id);
    assert_eq!(fs::read(door.path("upper/file")).unwrap(), b"Content\n");
}

#[test]
fn hard_links_answer_until_the_last_name_is_gone() {
    let door = Door::new();
    door.create(&Caller::ROOT, "one", 0o644, 0o2).unwrap();
    let node = door.find("one").unwrap().node;
    let two = door.link("one", "two").unwrap();
    assert!(two.node.same(&node));
    assert_eq!(two.attr.nlink, 2);
    door.link("two", "three").unwrap();
    // The newest name goes first, then the oldest.
    door.unlink("three").unwrap();
    assert_eq!(door.getattr(&node).unwrap().nlink, 2);
    door.unlink("one").unwrap();
    assert_eq!(door.getattr(&node).unwrap().nlink, 1);
    door.host.open(&Caller::ROOT, &node, OpenFlags::READ).unwrap();
    door.host.setxattr(&Caller::ROOT, &node, b"user.k", b"v", XattrFlags::default()).unwrap();
    // Another file takes the name that the node knows first.
    fs::write(door.path("three"), b"another").unwrap();
    assert_eq!(door.getattr(&node).unwrap().nlink, 1);
    door.unlink("two").unwrap();
    assert_eq!(door.getattr(&node), Err(Errno::ESTALE));
    assert_eq!(door.host.open(&Caller::ROOT, &node, OpenFlags::READ).err(), Some(Errno::ESTALE));
    assert_eq!(door.host.getxattr(&Caller::ROOT, &node, b"user.k", &mut []).err(), Some(Errno::ESTALE));
}

#[test]
fn an_open_file_outlives_its_names() {
    let door = Door::new();
    let (entry, file) = door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    door.unlink("file").unwrap();
    fs::write(door.path("file"), b"an impostor").unwrap();
    file.write(b"still here", 0, WriteOrigin::Caller).unwrap();
    let attr = door.getattr(&entry.node).unwrap();
    assert_eq!((attr.nlink, attr.size, attr.id), (0, 10, entry.attr.id));
    assert_eq!(door.host.getattr(&USER, &entry.node, Some(&*file)).unwrap(), attr);
    let change = SetAttr { size: Some(5), mode: Some(0o600), mtime: Some(SetTime::Now), ..SetAttr::default() };
    assert_eq!(door.host.setattr(&Caller::ROOT, &entry.node, None, &change).unwrap().size, 5);
    door.host.setxattr(&Caller::ROOT, &entry.node, b"user.k", b"v", XattrFlags::default()).unwrap();
    let again = door.host.open(&Caller::ROOT, &entry.node, OpenFlags::READ).unwrap();
    drop(file);
    let mut buffer = [0; 16];
    assert_eq!(again.read(&mut buffer, 0).unwrap(), 5);
    assert_eq!(native(door.path("file")), b"an impostor");
    drop(again);
    assert_eq!(door.getattr(&entry.node), Err(Errno::ESTALE));
}

#[test]
fn a_name_that_means_another_file_is_not_touched() {
    let door = Door::new();
    fs::write(door.path("file"), b"first").unwrap();
    let node = door.find("file").unwrap().node;
    fs::write(door.path("fresh"), b"second").unwrap();
    fs::rename(door.path("fresh"), door.path("file")).unwrap();
    let before = fs::metadata(door.path("file")).unwrap();
    let all =
        SetAttr { mode: Some(0o777), uid: Some(9), size: Some(0), mtime: Some(SetTime::Now), ..SetAttr::default() };
    assert_eq!(door.host.setattr(&Caller::ROOT, &node, None, &all).err(), Some(Errno::ESTALE));
    for flags in [0, 1, 2, 1 | OpenFlags::TRUNC, OpenFlags::TRUNC] {
        assert_eq!(door.host.open(&Caller::ROOT, &node, OpenFlags(flags)).err(), Some(Errno::ESTALE));
    }
    assert_eq!(door.host.setxattr(&Caller::ROOT, &node, b"user.k", b"v", XattrFlags::default()), Err(Errno::ESTALE));
    assert_eq!(door.host.removexattr(&Caller::ROOT, &node, b"user.k"), Err(Errno::ESTALE));
    let after = fs::metadata(door.path("file")).unwrap();
    assert_eq!((before.mode(), before.uid(), before.ctime_nsec()), (after.mode(), after.uid(), after.ctime_nsec()));
    assert_eq!(native(door.path("file")), b"second");
    // A fifo with the same name does not block the open.
    fs::remove_file(door.path("file")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, door.path("file"), 0o600.into()).unwrap();
    for flags in [0, 1, 2] {
        assert_eq!(door.host.open(&Caller::ROOT, &node, OpenFlags(flags)).err(), Some(Errno::ESTALE));
    }
}

#[test]
fn swapping_names_under_load_never_reaches_outside() {
    let outside = TempDir::new().unwrap();
    fs::create_dir(outside.path().join("directory")).unwrap();
    for path in ["file", "directory/file"] {
        fs::write(outside.path().join(path), b"outside").unwrap();
        fs::set_permissions(outside.path().join(path), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let door = Door::with(|_| {}, 4);
    fs::create_dir(door.path("directory")).unwrap();
    fs::write(door.path("directory/file"), b"inside").unwrap();
    fs::write(door.path("file"), b"inside").unwrap();
    symlink(outside.path().join("directory"), door.path("evil-directory")).unwrap();
    symlink(outside.path().join("file"), door.path("evil-file")).unwrap();
    let done = AtomicBool::new(false);
    let exchange = |one: &str, two: &str| {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, door.path(one), rustix::fs::CWD, door.path(two), flags).unwrap();
    };
    let mut touched = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                exchange("directory", "evil-directory");
                exchange("file", "evil-file");
            }
        });
        let change = SetAttr { mode: Some(0o777), size: Some(3), ..SetAttr::default() };
        for round in 0..3000 {
            let path = if round % 2 == 0 { "file" } else { "directory/file" };
            let Ok(entry) = door.find(path) else { continue };
            if entry.attr.kind != Kind::File {
                continue;
            }
            touched += u32::from(door.host.setattr(&Caller::ROOT, &entry.node, None, &change).is_ok());
            if let Ok(file) = door.host.open(&Caller::ROOT, &entry.node, OpenFlags(1 | OpenFlags::TRUNC)) {
                file.write(b"changed", 0, WriteOrigin::Caller).unwrap();
            }
            let _any = door.host.setxattr(&Caller::ROOT, &entry.node, b"user.evil", b"1", XattrFlags::default());
            let _any = door.create(&Caller::ROOT, "directory/new", 0o666, 0o2);
            let _any = door.unlink("directory/new");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(touched > 0);
    for path in ["file", "directory/file"] {
        let path = outside.path().join(path);
        assert_eq!(native(&path), b"outside");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(rustix::fs::getxattr(&path, "user.evil", &mut [0_u8; 8]).is_err());
    }
    assert!(!outside.path().join("directory/new").exists());
}

#[test]
fn directories_beyond_the_budget_are_reopened() {
    let door = Door::with(|_| {}, 8);
    let mut path = String::new();
    for depth in 0..400 {
        path.push_str("/d");
        door.mkdir(&Caller::ROOT, &path, 0o755).unwrap();
        assert!(door.host.shared.directories.open() <= 10, "{depth}");
    }
    let (entry, _) = door.create(&Caller::ROOT, &format!("{path}/file"), 0o644, 0o2).unwrap();
    // Wide as well, so that everything above is evicted.
    for number in 0..100 {
        door.mkdir(&Caller::ROOT, &format!("w{number}"), 0o755).unwrap();
        door.mkdir(&Caller::ROOT, &format!("w{number}/below"), 0o755).unwrap();
    }
    assert_eq!(door.getattr(&entry.node).unwrap().id, entry.attr.id);
    door.host.open(&Caller::ROOT, &entry.node, OpenFlags::READ).unwrap();
    assert!(door.host.shared.directories.open() <= 10);
    // A directory in the middle is moved from outside: nodes below are stale until they are looked
    // up again.
    fs::rename(door.path("d/d"), door.path("moved")).unwrap();
    for number in 0..100 {
        door.find(&format!("w{number}/below")).unwrap();
        door.create(&Caller::ROOT, &format!("w{number}/below/file"), 0o644, 0o2).unwrap();
    }
    assert_eq!(door.getattr(&entry.node), Err(Errno::ESTALE));
    door.find("moved").unwrap();
    assert_eq!(door.getattr(&entry.node).unwrap().id, entry.attr.id);
}

#[test]
fn a_path_longer_than_path_max_works() {
    let door = Door::with(|_| {}, 16);
    let part = "x".repeat(250);
    let mut parent = door.root();
    for _ in 0..40 {
        parent = door.known(door.host.mkdir(&Caller::ROOT, &parent, name(part.as_bytes()), 0o755).unwrap()).node;
    }
    let (entry, file) = door.host.create(&Caller::ROOT, &parent, name(b"deep"), 0o644, OpenFlags(2)).unwrap();
    file.write(b"deep", 0, WriteOrigin::Caller).unwrap();
    assert_eq!(door.getattr(&entry.node).unwrap().size, 4);
    door.host.setxattr(&Caller::ROOT, &entry.node, b"user.deep", b"1", XattrFlags::default()).unwrap();
    assert_eq!(door.host.getxattr(&Caller::ROOT, &entry.node, b"user.deep", &mut [0; 4]).unwrap(), 1);
}

#[test]
fn a_removed_source_answers_errors_only() {
    let door = Door::new();
    door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    fs::remove_dir_all(door.source.path()).unwrap();
    assert_eq!(door.find("file").unwrap_err(), Errno::ENOENT);
    assert_eq!(door.create(&Caller::ROOT, "new", 0o644, 0o2).err(), Some(Errno::ENOENT));
    assert_eq!(door.host.root().unwrap().attr.nlink, 0);
}

#[test]
fn nodes_of_files_are_no_directories() {
    let door = Door::new();
    door.create(&Caller::ROOT, "file", 0o644, 0o2).unwrap();
    let node = door.find("file").unwrap().node;
    assert_eq!(door.host.lookup(&Caller::ROOT, &node, name(b"x")).err(), Some(Errno::ENOTDIR));
    assert_eq!(door.host.readlink(&Caller::ROOT, &node), Err(Errno::EINVAL));
    assert_eq!(door.host.open(&Caller::ROOT, &door.root(), OpenFlags::READ).err(), Some(Errno::EISDIR));
    assert_eq!(door.setattr("", SetAttr { size: Some(0), ..SetAttr::default() }), Err(Errno::EISDIR));
}

#[test]
fn many_threads_and_few_descriptors_get_along() {
    let door = Door::with(|_| {}, 4);
    for number in 0..8 {
        door.mkdir(&Caller::ROOT, &format!("d{number}"), 0o755).unwrap();
        door.mkdir(&Caller::ROOT, &format!("d{number}/below"), 0o755).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let door = &door;
            scope.spawn(move || {
                let mine = format!("file{thread}");
                for round in 0..300 {
                    let directory = format!("d{}/below", (round + thread) % 8);
                    let path = format!("{directory}/{mine}");
                    let (_, file) = door.create(&Caller::ROOT, &path, 0o644, 0o2).unwrap();
                    file.write(b"x", 0, WriteOrigin::Caller).unwrap();
                    let moved = format!("d{}/{mine}", round % 8);
                    door.rename(&path, &moved, 0).unwrap();
                    assert_eq!(door.find(&moved).unwrap().attr.size, 1);
                    door.unlink(&moved).unwrap();
                    // The same directory is moved as well.
                    let _either =
                        door.rename(&format!("d{thread}/wanderer"), &format!("d{}/wanderer", (thread + 1) % 4), 0);
                    let _either = door.mkdir(&Caller::ROOT, &format!("d{thread}/wanderer"), 0o755);
                }
            });
        }
    });
    assert!(door.host.shared.directories.open() <= 4 + 4 + 4);
}
