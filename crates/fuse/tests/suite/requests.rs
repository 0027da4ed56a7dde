//! Number of requests of each operation: the primary figure, and the same on every machine.

use crate::fixture::{Mirror, counts, on_each_transport};
use nacre_fuse::{AclChoice, PassthroughChoice, XattrChoice};
use nacre_stack::spec::HostCoherence;
use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

fn some_files(source: &Path) {
    fs::create_dir(source.join("d")).unwrap();
    for number in 0..50 {
        fs::write(source.join(format!("d/f{number}")), vec![b'x'; 1024]).unwrap();
    }
}

#[test]
fn what_was_asked_once_is_answered_by_the_kernel() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        let file = mirror.path("d/f1");
        let first = mirror.cost(|| assert_eq!(fs::metadata(&file).unwrap().len(), 1024));
        assert_eq!(first.get("LOOKUP"), Some(&2), "{first:?}");
        assert_eq!(mirror.cost(|| assert!(file.exists())), counts([]));
        let missing = mirror.path("d/missing");
        let absent = || assert_eq!(fs::metadata(&missing).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(mirror.cost(absent), counts([("LOOKUP", 1)]));
        assert_eq!(mirror.cost(absent), counts([]));
    });
}

#[test]
fn set_id_bits_are_asked_for_each_time() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        let file = mirror.path("d/f1");
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
        assert_eq!(mirror.cost(|| assert!(file.exists())).values().sum::<u64>(), 1);
    });
}

#[test]
fn listing_again_costs_nothing() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        let list = || assert_eq!(fs::read_dir(mirror.path("d")).unwrap().count(), 50);
        list();
        let again = mirror.cost(list);
        assert!(again.values().sum::<u64>() <= 1, "{again:?}");
        assert_eq!(again.get("OPENDIR"), None);
    });
}

#[test]
fn listing_again_does_not_make_the_kernel_forget() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        let list = || {
            for entry in fs::read_dir(mirror.path("d")).unwrap() {
                let path = entry.unwrap().path();
                fs::metadata(&path).unwrap();
                let mut value = [0_u8; 64];
                assert_eq!(
                    rustix::fs::getxattr(&path, "system.posix_acl_access", &mut value),
                    Err(rustix::io::Errno::NODATA)
                );
            }
        };
        list();
        // The cached listing is dropped, the cached files are not.
        File::create(mirror.path("d/new")).unwrap();
        let again = mirror.cost(list);
        assert!(again.keys().any(|name| name.starts_with("READDIR")), "{again:?}");
        assert!(again.get("GETXATTR").is_none_or(|asked| *asked <= 1), "of the new file at most: {again:?}");
        assert_eq!(again.get("LOOKUP"), None, "{again:?}");
    });
}

#[test]
fn reading_a_small_file_is_an_open_and_a_release() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        if let Some(why) = mirror.mount.status().passthrough.refusal {
            println!("skipped: no passthrough: {why}");
            return;
        }
        let file = mirror.path("d/f2");
        fs::metadata(&file).unwrap();
        let read = || {
            let mut text = Vec::new();
            File::open(&file).unwrap().read_to_end(&mut text).unwrap();
            assert_eq!(text, vec![b'x'; 1024]);
        };
        for round in 0..3 {
            let mut cost = mirror.cost(read);
            // The standard library requests the size first; reading invalidates the time of access.
            cost.remove("GETATTR");
            cost.remove("STATX");
            assert_eq!(cost, counts([("OPEN", 1), ("RELEASE", 1)]), "round {round}");
        }
        assert_eq!(mirror.mount.status().passthrough.reused, 2, "the file was kept open in between");
        assert_eq!(mirror.mount.status().passthrough.kept, 1);
    });
}

#[test]
fn writes_do_not_reach_the_daemon() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        if let Some(why) = mirror.mount.status().passthrough.refusal {
            println!("skipped: no passthrough: {why}");
            return;
        }
        let file = OpenOptions::new().read(true).write(true).open(mirror.path("d/f3")).unwrap();
        // The first write checks once whether the file has capabilities to remove.
        let first = mirror.cost(|| file.write_all_at(b"first", 0).unwrap());
        assert_eq!(first, counts([("GETXATTR", 1)]));
        let cost = mirror.cost(|| (0..200).for_each(|block| file.write_all_at(&[b'y'; 4096], block * 4096).unwrap()));
        assert_eq!(cost, counts([]));
        let size = mirror.cost(|| assert_eq!(file.metadata().unwrap().len(), 200 * 4096));
        assert!(size.values().sum::<u64>() <= 1, "{size:?}");
        assert_eq!(fs::metadata(mirror.below("d/f3")).unwrap().len(), 200 * 4096);
    });
}

/// Its times may change by stores to a mapping, of which there is no notice.
#[test]
fn a_file_that_may_be_mapped_is_asked_for_each_time() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, some_files);
        if let Some(why) = mirror.mount.status().passthrough.refusal {
            println!("skipped: no passthrough: {why}");
            return;
        }
        let path = mirror.path("d/f8");
        let look = || assert_eq!(rustix::fs::stat(&path).unwrap().st_size, 1024);
        let open = |write| OpenOptions::new().read(true).write(write).open(&path).unwrap();
        look();
        let asked = |times| if times == 0 { counts([]) } else { counts([("GETATTR", times)]) };
        let file = open(true);
        assert_eq!(mirror.cost(look), asked(0), "mapping the file is what makes the kernel ask");
        let mapping = nacre_sys::mapping::SharedMapping::new(&file, 1024, true).unwrap();
        assert_eq!(mirror.cost(|| (0..10).for_each(|_| look())), asked(10));
        drop(file);
        assert_eq!(mirror.cost(|| (0..10).for_each(|_| look())), asked(10), "the mapping is still there");
        drop(mapping);
        assert_eq!(mirror.cost(|| (0..10).for_each(|_| look())), asked(1));
        // Neither descriptor can be mapped for writing.
        let reading = open(false);
        let writing = OpenOptions::new().write(true).open(&path).unwrap();
        assert_eq!(mirror.cost(|| (0..10).for_each(|_| look())), asked(0));
        drop((reading, writing));
        // Opened, written to and closed, the file costs one GETATTR, like any other that was written to.
        for _ in 0..2 {
            let mut cost = mirror.cost(|| open(true).write_all_at(b"x", 0).unwrap());
            cost.remove("GETXATTR");
            assert_eq!(cost, counts([("OPEN", 1), ("RELEASE", 1)]));
            assert_eq!(mirror.cost(|| (0..10).for_each(|_| look())), asked(1));
        }
    });
}

#[test]
fn creating_and_removing_costs_four_requests_and_the_parent() {
    on_each_transport(|transport| {
        // With extended attributes the first write checks for capabilities: one more request.
        let mirror =
            Mirror::new(transport, HostCoherence::Exclusive, some_files, |options| options.xattr = XattrChoice::Off);
        let file = mirror.path("d/new");
        let make = || {
            let mut new = OpenOptions::new().write(true).create_new(true).open(&file).unwrap();
            new.write_all(b"1").unwrap();
            drop(new);
            fs::remove_file(&file).unwrap();
        };
        make();
        let mut cost = mirror.cost(make);
        let parent = cost.remove("GETATTR").unwrap_or(0);
        assert!(parent <= 2, "the parent is asked for {parent} times");
        if mirror.mount.status().passthrough.refusal.is_none() {
            assert_eq!(cost, counts([("LOOKUP", 1), ("CREATE", 1), ("RELEASE", 1), ("UNLINK", 1)]));
        }
    });
}

#[test]
fn absent_attributes_are_asked_for_once() {
    on_each_transport(|transport| {
        let none = |options: &mut nacre_fuse::FuseOptions| {
            options.xattr = XattrChoice::Off;
            options.acl = AclChoice::Off;
        };
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, some_files, none);
        let ask = |number: u64| {
            let path = mirror.path(&format!("d/f{number}"));
            fs::metadata(&path).unwrap();
            let mut value = [0_u8; 16];
            assert_eq!(rustix::fs::getxattr(&path, "user.x", &mut value), Err(rustix::io::Errno::OPNOTSUPP));
        };
        ask(1);
        ask(2);
        assert_eq!(mirror.cost(|| ask(2)), counts([]));
    });
}

#[test]
fn a_mount_without_opens_reads_without_requests() {
    on_each_transport(|transport| {
        let immutable = |options: &mut nacre_fuse::FuseOptions| options.immutable = true;
        let no_open = |options: &mut nacre_fuse::FuseOptions| (options.no_open, options.read_only) = (true, true);
        for change in [immutable as fn(&mut nacre_fuse::FuseOptions), no_open] {
            let mirror = Mirror::new(transport, HostCoherence::Exclusive, some_files, change);
            let read = || {
                assert_eq!(fs::read(mirror.path("d/f4")).unwrap(), vec![b'x'; 1024]);
                assert_eq!(fs::read_dir(mirror.path("d")).unwrap().count(), 50);
                fs::metadata(mirror.path("d/f4")).unwrap();
            };
            read();
            read();
            assert_eq!(mirror.cost(read), counts([]));
            assert_eq!(fs::write(mirror.path("d/f4"), b"no").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
        }
    });
}

#[test]
fn served_content_stays_in_the_page_cache() {
    on_each_transport(|transport| {
        let off = |options: &mut nacre_fuse::FuseOptions| options.passthrough = PassthroughChoice::Off;
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, some_files, off);
        let file = mirror.path("d/f5");
        let read = || assert_eq!(fs::read(&file).unwrap(), vec![b'x'; 1024]);
        let first = mirror.cost(read);
        assert!(first.contains_key("READ"), "{first:?}");
        let again = mirror.cost(read);
        assert_eq!(again.get("READ"), None, "{again:?}");
        fs::write(&file, b"other").unwrap();
        assert_eq!(fs::read(mirror.below("d/f5")).unwrap(), b"other");
        assert_eq!(fs::read(&file).unwrap(), b"other");
    });
}

#[test]
fn nothing_is_kept_where_the_source_may_change_unnoticed() {
    on_each_transport(|transport| {
        let off = |options: &mut nacre_fuse::FuseOptions| options.passthrough = PassthroughChoice::Off;
        for passthrough in [true, false] {
            let mirror = Mirror::new(transport, HostCoherence::Revalidate, some_files, |options| {
                if !passthrough {
                    off(options);
                }
            });
            let file = mirror.path("d/f6");
            for round in 0..5 {
                let text = format!("round {round}");
                fs::write(mirror.below("d/f6"), &text).unwrap();
                assert_eq!(fs::read_to_string(&file).unwrap(), text);
                assert_eq!(fs::metadata(&file).unwrap().len(), text.len() as u64);
                fs::write(mirror.below(&format!("d/g{round}")), "").unwrap();
                assert!(fs::metadata(mirror.path(&format!("d/g{round}"))).is_ok());
                assert_eq!(fs::read_dir(mirror.path("d")).unwrap().count(), 51 + round);
                let mode = 0o600 + round as u32;
                fs::set_permissions(mirror.below("d/f6"), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
                assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, mode);
            }
        }
    });
}

#[test]
fn direct_io_reaches_the_daemon_each_time() {
    on_each_transport(|transport| {
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, some_files, |options| options.direct_io = true);
        let read = || assert_eq!(fs::read(mirror.path("d/f7")).unwrap(), vec![b'x'; 1024]);
        read();
        assert!(mirror.cost(read).contains_key("READ"));
        let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flag).open(mirror.path("d/f7")).unwrap();
        let mut odd = vec![0; 333];
        file.read_exact_at(&mut odd, 7).unwrap();
        assert_eq!(odd, vec![b'x'; 333]);
    });
}

#[test]
fn where_the_layer_judges_only_questions_of_permission_are_asked() {
    on_each_transport(|transport| {
        let mirror =
            Mirror::new(transport, HostCoherence::Exclusive, some_files, |options| options.default_permissions = false);
        let file = mirror.path("d/f1");
        let look = || assert_eq!(fs::metadata(&file).unwrap().len(), 1024);
        look();
        // Neither ACLs nor attributes of the directories in the path.
        assert_eq!(mirror.cost(look), counts([]));
        assert!(!mirror.mount.status().acls);
        let executable = || rustix::fs::access(&file, rustix::fs::Access::EXEC_OK).is_ok();
        let mut cost = mirror.cost(|| assert!(!executable(), "for nobody, not even for root"));
        cost.remove("GETATTR");
        assert_eq!(cost, counts([("ACCESS", 1)]));
        let list = || assert_eq!(fs::read_dir(mirror.path("d")).unwrap().count(), 50);
        list();
        let again = mirror.cost(list);
        assert_eq!(
            (again.get("OPENDIR"), again.get("READDIR"), again.get("READDIRPLUS")),
            (Some(&1), None, None),
            "{again:?}"
        );
        // After a restriction of a directory's mode, names are looked up again, and the layer checks the
        // permission.
        fs::set_permissions(mirror.path("d"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        assert_eq!(mirror.cost(look).get("LOOKUP"), Some(&2));
        assert_eq!(mirror.cost(look), counts([]));
        fs::set_permissions(mirror.path("d"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        // The kernel by itself looks up a directory again whose mode was changed, and nothing else: every user
        // may search it.
        assert_eq!(mirror.cost(look).get("LOOKUP"), Some(&1));
    });
}
