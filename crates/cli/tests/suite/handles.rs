//! File handles on mounts of pools: kept over everything that happens to a mount, a pool and its
//! process, they lead to the file that they were made for or to none (ESTALE). A native XFS is asked
//! the same.

use crate::mounting::{as_root, errno, images, needs, pools::Pool, run, sh, status::Status};
use nacre_sys::handles::Kept;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    os::unix::fs::MetadataExt,
    path::Path,
};

const ESTALE: &str = "errno 116";
const ROOMY: &str = "2G";

/// Handles by the name of their file.
type Handles = BTreeMap<String, Kept>;

/// The handle of a file, a link not followed.
fn keep(path: &Path) -> Kept {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    Kept::of(file.unwrap_or_else(|error| panic!("{}: {error}", path.display())).as_fd()).unwrap()
}

fn keep_all(root: &Path, names: &[&str]) -> Handles {
    names.iter().map(|name| ((*name).to_owned(), keep(&root.join(name)))).collect()
}

/// Reads through a handle: the content of a file, the names in a directory, the target of a link.
fn said(root: &Path, handle: &Kept) -> String {
    let mount = File::open(root).unwrap();
    let opened = |flags: OFlags| handle.open(mount.as_fd(), flags.bits().cast_signed());
    let found: OwnedFd = match opened(OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(found) => found,
        Err(error) => return format!("errno {}", error.raw_os_error().unwrap()),
    };
    let stat = match rustix::fs::fstat(&found) {
        Ok(stat) => stat,
        Err(error) => return format!("opened, then errno {}", error.raw_os_error()),
    };
    let content = || {
        let mut text = String::new();
        File::from(opened(OFlags::RDONLY)?).read_to_string(&mut text)?;
        Ok::<String, std::io::Error>(text)
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => content().unwrap_or_else(|error| format!("unreadable: {error}")),
        FileType::Directory => {
            let through = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
            let names = fs::read_dir(&through).map(|names| {
                let mut names: Vec<_> = names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
                names.sort();
                names.join(" ")
            });
            // The way up is there as well.
            let above = rustix::fs::statat(&found, "..", AtFlags::empty());
            names.map_or_else(|error| format!("unlistable: {error}"), |names| format!("[{names}] {}", above.is_ok()))
        }
        FileType::Symlink => format!("-> {}", rustix::fs::readlinkat(&found, "", []).unwrap().to_str().unwrap()),
        other => format!("{other:?}"),
    }
}

fn all_said(root: &Path, handles: &Handles) -> BTreeMap<String, String> {
    handles.iter().map(|(name, handle)| (name.clone(), said(root, handle))).collect()
}

fn append(path: &Path, data: &str) {
    OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(data.as_bytes()).unwrap();
}

const TREE: &str = "mkdir -p d/e/deep other; echo content >d/e/file; ln d/e/file other/hard; ln -s ../target d/link
    mkfifo d/fifo; echo x >d/attributes; setfattr -n user.one -v two d/attributes; echo top >top";
const NAMES: [&str; 10] =
    ["d", "d/e", "d/e/deep", "d/e/file", "other", "other/hard", "d/link", "d/fifo", "d/attributes", "top"];

/// Runs the same changes of files in the mount at `root`; returns the results of all handles at
/// each step.
fn life(root: &Path, remount: &mut dyn FnMut()) -> Vec<(&'static str, BTreeMap<String, String>)> {
    let mut told = Vec::new();
    sh(root, TREE);
    let mut handles = keep_all(root, &NAMES);
    handles.insert("root".to_owned(), keep(root));
    told.push(("as made", all_said(root, &handles)));
    remount();
    told.push(("mounted again", all_said(root, &handles)));
    // A handle in use is one all the same.
    assert_eq!(keep(&root.join("d/e/file")), handles["d/e/file"]);
    assert_eq!(handles["other/hard"], handles["d/e/file"]);
    sh(root, "mv d/e other/moved; rm other/hard; mv top other/top");
    told.push(("renamed, one of two names gone", all_said(root, &handles)));
    remount();
    told.push(("and mounted again", all_said(root, &handles)));
    let open = File::open(root.join("other/moved/file")).unwrap();
    sh(root, "rm other/moved/file d/fifo d/link; rmdir other/moved/deep");
    told.push(("removed, one of them open", all_said(root, &handles)));
    drop(open);
    // The daemon may be notified of the last close a little later.
    crate::mounting::eventually("the end of the file", || said(root, &handles["d/e/file"]) == ESTALE);
    told.push(("closed", all_said(root, &handles)));
    sh(root, "for i in $(seq 100); do echo new >other/n$i; mkdir other/d$i; done");
    told.push(("others made", all_said(root, &handles)));
    remount();
    told.push(("at last", all_said(root, &handles)));
    told
}

#[test]
fn handles_are_what_they_are_on_xfs() {
    needs!(as_root());
    let outer = crate::mounting::scratch();
    let (image, native) = (outer.path().join("xfs"), outer.path().join("native"));
    fs::create_dir(&native).unwrap();
    if !images::mounted("xfs", &image, &native) {
        return;
    }
    let expected = life(&native, &mut || {
        assert!(run("umount", [&native]).status.success());
        assert!(run("mount", ["-o".as_ref(), "loop".as_ref(), image.as_os_str(), native.as_os_str()]).status.success());
    });
    assert!(run("umount", [&native]).status.success());
    assert_eq!(expected[1].1["d/e/file"], "content\n");
    assert_eq!(expected.last().unwrap().1["d/e/file"], ESTALE);

    type Again = fn(&Pool);
    let ways: [(&str, Again); 4] = [
        ("evicted", |pool| {
            // Unused names and inodes; those of dirty files stay.
            pool.nacre(&["pool", "sync", "%"]);
            fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        }),
        ("mounted", |pool| {
            pool.nacre(&["fs", "unmount", "%"]);
            pool.nacre(&["fs", "mount", "%"]);
        }),
        ("imported", |pool| {
            pool.nacre(&["pool", "export", "%"]);
            pool.import();
        }),
        ("killed", |pool| {
            // What is durable is what counts then.
            pool.nacre(&["pool", "sync", "%"]);
            pool.die();
            pool.leave();
            pool.import();
        }),
    ];
    for (way, again) in ways {
        let pool = Pool::made("same", ROOMY, &[]);
        assert_eq!(Status::of(&pool.at("")).asks_at_open(), None);
        let told = life(&pool.at(""), &mut || again(&pool));
        for ((step, told), (_, expected)) in told.iter().zip(&expected) {
            assert_eq!(told, expected, "{way}, {step}");
        }
    }
}

/// Inode numbers of files that a crash lost are used again: handles of the lost files are stale.
#[test]
fn no_handle_leads_to_another_file_after_a_crash_or_a_rollback() {
    needs!(as_root());
    let pool = Pool::made("again", ROOMY, &[]);
    let root = pool.at("");
    fs::write(root.join("kept"), "kept").unwrap();
    pool.nacre(&["pool", "sync", "%"]);
    let number = |name: &str| fs::symlink_metadata(pool.at(name)).unwrap().ino();
    let lost = |name: &str| {
        fs::write(root.join(name), "lost").unwrap();
        (number(name), keep(&root.join(name)))
    };
    let kept = keep(&root.join("kept"));
    fs::write(root.join("synced"), "synced").unwrap();
    let synced = keep(&root.join("synced"));
    File::open(root.join("synced")).unwrap().sync_all().unwrap();
    let gone: Vec<(u64, Kept)> = ["one", "two", "three"].map(lost).into();
    pool.die();
    pool.leave();
    pool.import();
    if !root.join("one").exists() {
        for name in ["four", "five", "six"] {
            fs::write(root.join(name), "another").unwrap();
        }
        assert_eq!(
            ["four", "five", "six"].map(number).to_vec(),
            gone.iter().map(|(number, _)| *number).collect::<Vec<_>>()
        );
        assert!(gone.iter().all(|(_, handle)| said(&root, handle) == ESTALE));
    }
    assert_eq!([said(&root, &kept), said(&root, &synced)], ["kept", "synced"]);

    // A rollback: what is there still is the same file, as it was then.
    sh(&root, "mkdir dir dir/below; echo then >changed; echo back >removed; echo in >dir/below/file");
    let before = keep_all(&root, &["kept", "dir", "dir/below", "dir/below/file", "changed", "removed"]);
    pool.nacre(&["fs", "snapshot", "%@then"]);
    sh(&root, "echo now >>changed; rm removed; echo later >later; mkdir new; echo newer >new/newer");
    let after = keep_all(&root, &["later", "new", "new/newer"]);
    assert_eq!(said(&root, &before["removed"]), ESTALE);
    assert_eq!(said(&root, &before["changed"]), "then\nnow\n");
    let held = File::open(root.join("changed")).unwrap();
    pool.nacre(&["fs", "rollback", "%@then"]);
    let expected = [
        ("changed", "then\n"),
        ("dir", "[below] true"),
        ("dir/below", "[file] true"),
        ("dir/below/file", "in\n"),
        ("kept", "kept"),
        ("removed", "back\n"),
    ];
    let expected: BTreeMap<String, String> =
        expected.into_iter().map(|(name, said)| (name.to_owned(), said.to_owned())).collect();
    assert_eq!(all_said(&root, &before), expected);
    assert!(after.values().all(|handle| said(&root, handle) == ESTALE), "{:?}", all_said(&root, &after));
    // A descriptor that was open before reads no more of it.
    assert!((&held).read(&mut [0; 4]).is_err());
    drop(held);
    append(&root.join("changed"), "again\n");
    assert_eq!(said(&root, &before["changed"]), "then\nagain\n");
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    sh(&root, "echo another >later; mkdir new; echo another >new/newer");
    assert!(after.values().all(|handle| said(&root, handle) == ESTALE), "{:?}", all_said(&root, &after));
    assert_eq!(said(&root, &before["removed"]), "back\n");
}

#[test]
fn handles_lead_into_snapshots_as_long_as_there_are_any() {
    needs!(as_root());
    let pool = Pool::made("snap", ROOMY, &[]);
    let root = pool.at("");
    sh(&root, "mkdir -p d/e; echo then >d/e/file");
    pool.nacre(&["fs", "snapshot", "%@one"]);
    sh(&root, "echo now >d/e/file");
    let names = [".zfs", ".zfs/snapshot", ".zfs/snapshot/one", ".zfs/snapshot/one/d/e", ".zfs/snapshot/one/d/e/file"];
    let handles = keep_all(&root, &names);
    let expected = ["[snapshot] true", "[one] true", "[d] true", "[file] true", "then\n"];
    let expected: BTreeMap<String, String> =
        names.iter().zip(expected).map(|(name, said)| ((*name).to_owned(), said.to_owned())).collect();
    assert_eq!(all_said(&root, &handles), expected);
    for name in names.iter().rev() {
        // Each as the first that anybody knows of `.zfs`, which no listing shows.
        pool.nacre(&["pool", "export", "%"]);
        pool.import();
        assert_eq!(said(&root, &handles[*name]), expected[*name], "{name}");
    }
    assert_eq!(all_said(&root, &handles), expected);
    let file = &handles[".zfs/snapshot/one/d/e/file"];
    // No user is let in.
    pool.nacre(&["fs", "set", "snapdir=disabled", "%"]);
    pool.nacre(&["fs", "unmount", "%"]);
    pool.nacre(&["fs", "mount", "%"]);
    assert!(all_said(&root, &handles).values().all(|said| said == ESTALE), "{:?}", all_said(&root, &handles));
    pool.nacre(&["fs", "set", "snapdir=visible", "%"]);
    assert_eq!(said(&root, file), "then\n");
    pool.nacre(&["fs", "rename", "%@one", "%@two"]);
    assert_eq!(said(&root, file), "then\n");
    pool.nacre(&["fs", "destroy", "%@two"]);
    pool.nacre(&["fs", "snapshot", "%@one"]);
    assert_eq!(said(&root, file), ESTALE);
    assert_eq!(said(&root, &handles[".zfs/snapshot"]), "[one] true");
}

/// Forged handles are stale, and do no harm.
#[test]
fn made_up_handles_lead_nowhere() {
    needs!(as_root());
    let pool = Pool::made("forged", ROOMY, &[]);
    let root = pool.at("");
    fs::write(root.join("file"), "content").unwrap();
    let mount = File::open(&root).unwrap();
    let numbers = [
        0,
        2,
        3,
        5_000,
        1 << 39,
        1 << 40,
        (1 << 40) + 1,
        77 << 40 | 5,
        1 << 62,
        1 << 62 | 3,
        1 << 63,
        u64::MAX,
        u64::MAX - 1,
    ];
    for number in numbers {
        for generation in [0_u32, 1, u32::MAX] {
            let words = [(number >> 32) as u32, number as u32, generation];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let handle = nacre_sys::handles::Handle { kind: 0x81, bytes: &bytes };
            let opened = nacre_sys::handles::open(mount.as_fd(), handle, OFlags::PATH.bits().cast_signed());
            assert_eq!(errno(opened), 116, "{number:#x} {generation}");
        }
    }
    assert_eq!(fs::read(root.join("file")).unwrap(), b"content");
    assert!(rustix::fs::statat(CWD, &root, AtFlags::empty()).is_ok());
}

/// Stops the workers when dropped, also where the test fails.
struct End<'a>(&'a std::sync::atomic::AtomicBool);
impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// No process waits forever, whatever directory locks it holds, and no process gets an old file
/// after the command has returned.
#[test]
fn files_become_others_while_everybody_works() {
    needs!(as_root());
    let pool = Pool::made("busy", ROOMY, &[]);
    let root = pool.at("");
    sh(&root, "mkdir dir; echo then >file; echo then >dir/file");
    pool.nacre(&["fs", "snapshot", "%@then"]);
    let handle = keep(&root.join("dir/file"));
    let end = std::sync::atomic::AtomicBool::new(false);
    let working = || !end.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let _end = End(&end);
        for number in 0..3 {
            let (root, working) = (&root, &working);
            scope.spawn(move || {
                // Whatever fails was of before.
                while working() {
                    let own = root.join(format!("own{number}"));
                    let _ = fs::write(&own, "now");
                    let _ = fs::read(root.join("file"));
                    let _ = fs::create_dir(root.join(format!("dir/{number}")));
                    let _ = fs::write(root.join("dir/file"), "now\n");
                    let _ =
                        fs::read_dir(root).map(|names| names.flatten().filter_map(|name| name.metadata().ok()).count());
                    let _ = fs::remove_file(&own);
                    let _ = fs::remove_dir(root.join(format!("dir/{number}")));
                }
            });
        }
        for _ in 0..8 {
            pool.nacre(&["fs", "rollback", "%@then"]);
            assert_eq!(fs::read(root.join("file")).unwrap(), b"then\n");
            // Somebody may have emptied it just now.
            let content = said(&root, &handle);
            assert!(!content.contains("err"), "{content}");
        }
    });
    pool.nacre(&["fs", "rollback", "%@then"]);
    assert_eq!([said(&root, &handle), fs::read_to_string(root.join("dir/file")).unwrap()], ["then\n", "then\n"]);
}
