//! Whole copies in memory: all metadata arrives, everything else in DEST is safe, and an interrupted copy is
//! continued.
//!
//! `NACRE_TEST_DIR` and `NACRE_TEST_DIR2` name the directories for SOURCE and DEST, for runs on other file systems.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacre_copy::{CopyEvent, Figures, Options, Outcome, Reflink, Refusal, RefusalKind, Snapshot, Verify, run};
use rustix::fs::{self as sys, AtFlags, FileType, Mode, Timespec, Timestamps, XattrFlags};
use std::{
    collections::BTreeMap,
    fs,
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

fn scratch(variable: &str) -> tempfile::TempDir {
    match std::env::var_os(variable) {
        Some(place) => tempfile::tempdir_in(place).unwrap(),
        // Writing the state of a copy waits for the device; here that would only be slow.
        None => tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap(),
    }
}

fn options(source: &Path, destination: &Path) -> Options {
    Options {
        source: source.to_path_buf(),
        destination: destination.to_path_buf(),
        jobs: 4,
        update: false,
        verify: Verify::No,
        reflink: Reflink::Auto,
        one_file_system: false,
        strict: false,
        sync: false,
        estimate: true,
    }
}

/// A copy with its messages.
struct Run {
    outcome: Result<Outcome, Refusal>,
    now: Snapshot,
    told: Vec<CopyEvent>,
}

fn copy(options: &Options) -> Run {
    copy_until(options, |_| false)
}

/// Stops the copy when `enough` returns true for its counters.
fn copy_until(options: &Options, enough: impl Fn(&Snapshot) -> bool + Sync) -> Run {
    let (figures, stop, told) = (Figures::default(), AtomicBool::new(false), Mutex::new(Vec::new()));
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if enough(&figures.snapshot()) {
                    stop.store(true, Ordering::Relaxed);
                    return;
                }
                std::thread::yield_now();
            }
        });
        let outcome = run(options, &figures, &stop, &|what| told.lock().unwrap().push(what));
        over.store(true, Ordering::Relaxed);
        outcome
    });
    Run { outcome, now: figures.snapshot(), told: told.into_inner().unwrap() }
}

fn complete(options: &Options) -> Run {
    let run = copy(options);
    assert!(run.outcome.as_ref().is_ok_and(Outcome::complete), "{:?} {:?}", run.outcome, run.told);
    run
}

/// Properties of an entry that a copy has to keep.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    special: u64,
    /// Length and a hash, so that failures are readable.
    content: (usize, u64),
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    /// First name of the same file (hard link).
    same_as: PathBuf,
}

fn attributes(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let length = sys::llistxattr(path, &mut names).unwrap_or(0);
    let mut found = BTreeMap::new();
    for name in names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty() && *name != b"security.selinux" && !name.starts_with(b"trusted.SGI_ACL"))
    {
        let mut value = vec![0; 65_536];
        let length = sys::lgetxattr(path, name, &mut value).unwrap();
        value.truncate(length);
        found.insert(name.to_vec(), value);
    }
    found
}

fn look(root: &Path) -> BTreeMap<PathBuf, Seen> {
    fn each(root: &Path, path: &Path, firsts: &mut BTreeMap<u64, PathBuf>, seen: &mut BTreeMap<PathBuf, Seen>) {
        let meta = fs::symlink_metadata(path).unwrap();
        let below = path.strip_prefix(root).unwrap().to_path_buf();
        let content = if meta.is_symlink() {
            fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()
        } else if meta.is_file() {
            fs::read(path).unwrap()
        } else {
            Vec::new()
        };
        let same_as = if meta.is_dir() {
            below.clone()
        } else {
            firsts.entry(meta.ino()).or_insert_with(|| below.clone()).clone()
        };
        seen.insert(
            below,
            Seen {
                mode: meta.mode(),
                owner: (meta.uid(), meta.gid()),
                modified: (meta.mtime(), meta.mtime_nsec()),
                special: meta.rdev(),
                content: (content.len(), BuildHasherDefault::<DefaultHasher>::default().hash_one(&content)),
                attributes: attributes(path),
                same_as,
            },
        );
        if meta.is_dir() {
            let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
            names.sort();
            for name in names {
                each(root, &name, firsts, seen);
            }
        }
    }
    let mut seen = BTreeMap::new();
    each(root, root, &mut BTreeMap::new(), &mut seen);
    seen
}

#[track_caller]
fn assert_same(source: &Path, copy: &Path) {
    let (wanted, found) = (look(source), look(copy));
    let names = |seen: &BTreeMap<PathBuf, Seen>| seen.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&wanted));
    for (path, seen) in &wanted {
        assert_eq!(&found[path], seen, "{}", path.display());
    }
}

fn set_time(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time, last_modification: time };
    sys::utimensat(sys::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// One of everything.
fn plant(root: &Path) {
    fs::create_dir_all(root.join("d/deep/er")).unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    fs::write(root.join("small"), b"small").unwrap();
    fs::write(root.join("d/big"), pattern(3_000_001)).unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"d/not \xff text\n")), b"x").unwrap();
    fs::write(root.join("x".repeat(255)), b"long name").unwrap();
    let sparse = fs::File::create(root.join("d/sparse")).unwrap();
    sparse.write_all_at(b"begin", 0).unwrap();
    sparse.write_all_at(b"middle", 4 << 20).unwrap();
    sparse.set_len(10 << 20).unwrap();
    fs::File::create(root.join("hole")).unwrap().set_len(16 << 20).unwrap();
    fs::hard_link(root.join("small"), root.join("d/small again")).unwrap();
    fs::hard_link(root.join("small"), root.join("d/deep/small once more")).unwrap();
    symlink("/nowhere at all", root.join("d/link")).unwrap();
    symlink("../d", root.join("d/deep/up")).unwrap();
    fs::hard_link(root.join("d/link"), root.join("d/link again")).unwrap();
    sys::mknodat(sys::CWD, root.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    sys::mknodat(sys::CWD, root.join("socket"), FileType::Socket, Mode::from_raw_mode(0o600), 0).unwrap();
    let attribute = |path: &str, name: &str, value: &[u8]| {
        // Some temporary directories have no attributes.
        let _ = sys::lsetxattr(root.join(path), name, value, XattrFlags::empty());
    };
    attribute("small", "user.comment", b"a comment");
    attribute("d", "user.of a directory", &pattern(1000));
    // An access control list for one user, and one that new entries begin with: version 2, then
    // (tag, permissions, id).
    let list = |mode: u16| {
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, bits, id) in
            [(1_u16, 7_u16, u32::MAX), (2, 6, 1234), (4, 5, u32::MAX), (16, mode, u32::MAX), (32, 0, u32::MAX)]
        {
            list.extend(tag.to_le_bytes());
            list.extend(bits.to_le_bytes());
            list.extend(id.to_le_bytes());
        }
        list
    };
    attribute("d/big", "system.posix_acl_access", &list(6));
    attribute("d/deep", "system.posix_acl_default", &list(7));
    for (path, mode) in [("small", 0o4711), ("d/big", 0o440), ("d/deep", 0o1777), ("d/deep/er", 0o555)] {
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    }
    if is_root() {
        sys::mknodat(
            sys::CWD,
            root.join("device"),
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            sys::makedev(1, 3),
        )
        .unwrap();
        for (path, uid, gid) in [("small", 12, 34), ("d/link", 5, 6), ("pipe", 7, 8), ("d", 1000, 1001)] {
            std::os::unix::fs::lchown(root.join(path), Some(uid), Some(gid)).unwrap();
        }
        // The change of the owner has cleared the set-id bits.
        fs::set_permissions(root.join("small"), fs::Permissions::from_mode(0o4711)).unwrap();
        attribute("d/deep/small once more", "security.capability", b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        attribute("d/link", "trusted.of a link", b"yes");
    }
    for (path, seconds) in
        [("small", 1_000_000_000), ("d/link", -5), ("pipe", 7), ("d/deep/er", 1), ("d", 2), ("hole", 4_000_000_000)]
    {
        set_time(&root.join(path), seconds, 123_456_789);
    }
    set_time(root, 1_111_111_111, 1);
}

fn pattern(length: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(length)
    .collect()
}

/// A source with one of everything, and where to copy it.
fn planted() -> (tempfile::TempDir, tempfile::TempDir, PathBuf, PathBuf) {
    let (here, there) = (scratch("NACRE_TEST_DIR"), scratch("NACRE_TEST_DIR2"));
    let (source, destination) = (here.path().join("source"), there.path().join("copy"));
    fs::create_dir(&source).unwrap();
    plant(&source);
    (here, there, source, destination)
}

#[test]
fn everything_arrives() {
    let (_here, _there, source, destination) = planted();
    for reflink in [Reflink::Auto, Reflink::Never] {
        for jobs in [1, 7] {
            let run = complete(&Options {
                verify: Verify::After,
                sync: true,
                jobs,
                reflink,
                ..options(&source, &destination)
            });
            assert_same(&source, &destination);
            let entries = look(&source).len() as u64;
            assert_eq!((run.now.entries + run.now.directories + 1, run.now.verified + 1), (entries, entries));
            assert!(run.told.is_empty(), "{:?}", run.told);
            let allocated = |path: &str| fs::metadata(destination.join(path)).unwrap().blocks() * 512;
            assert!(allocated("hole") < 1 << 20 && allocated("d/sparse") < 5 << 20, "holes are kept");
            fs::remove_dir_all(&destination).unwrap();
        }
    }
}

#[test]
fn many_files_arrive_from_wide_and_deep_trees() {
    let (here, there) = (scratch("NACRE_TEST_DIR"), scratch("NACRE_TEST_DIR2"));
    let (source, destination) = (here.path().join("source"), there.path().join("copy"));
    let mut deep = source.clone();
    for level in 0..60 {
        deep.push(format!("level {level}"));
    }
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("bottom"), b"bottom").unwrap();
    for number in 0..3000 {
        fs::write(source.join(format!("file {number}")), number.to_string()).unwrap();
        // More directories than fit into the queue.
        fs::create_dir_all(source.join(format!("level 0/dir {number}"))).unwrap();
    }
    for number in 0..500 {
        fs::hard_link(source.join(format!("file {number}")), source.join(format!("level 0/dir {number}/link")))
            .unwrap();
        fs::hard_link(source.join(format!("file {number}")), source.join(format!("link {number}"))).unwrap();
    }
    let run = complete(&Options { verify: Verify::After, ..options(&source, &destination) });
    assert_same(&source, &destination);
    assert_eq!((run.now.links, run.now.lost_links), (1000, 0));
    assert!(run.now.counted);
    assert_eq!(run.now.expected_entries, run.now.entries + run.now.directories);
    assert_eq!(run.now.share_done(), Some(1.0));
}

#[test]
fn an_interrupted_copy_goes_on_and_copies_nothing_twice() {
    let (_here, _there, source, destination) = planted();
    fs::create_dir(source.join("many")).unwrap();
    for number in 0..2000 {
        fs::write(source.join(format!("many/{number}")), number.to_string()).unwrap();
    }
    let options = Options { jobs: 2, verify: Verify::After, ..options(&source, &destination) };
    let mut before = 0;
    let mut rounds = 0;
    loop {
        let run = copy_until(&options, |now| now.entries > before + 300);
        let outcome = run.outcome.unwrap();
        assert_eq!(outcome.resumed, rounds > 0);
        if outcome.complete() {
            break;
        }
        assert!(
            outcome.interrupted && outcome.failures == 0 && outcome.fatal.is_none(),
            "{:?} {:?}",
            outcome,
            run.told
        );
        assert!(destination.join(".nacre-copy-state").exists());
        for path in look(&destination).keys().filter(|path| !path.as_os_str().is_empty()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(source.join(path).symlink_metadata().is_ok() || name.starts_with(".nacre-copy"), "{name}");
        }
        before = run.now.entries;
        rounds += 1;
        assert!(rounds < 100, "no progress");
    }
    assert_same(&source, &destination);
    assert!(rounds >= 2, "it was interrupted {rounds} times");
}

#[test]
fn what_a_killed_copy_left_is_removed_and_half_files_are_never_taken_for_whole() {
    let (_here, _there, source, destination) = planted();
    let order = options(&source, &destination);
    let run = copy_until(&order, |now| now.entries >= 3);
    if run.outcome.unwrap().complete() {
        return;
    }
    // A killed process leaves a temporary file behind, under the prefix of its copy.
    let state = fs::read_to_string(destination.join(".nacre-copy-state")).unwrap();
    let id = state.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap();
    let left = destination.join(format!(".nacre-copy.{id}.0"));
    fs::write(&left, b"half").unwrap();
    fs::write(destination.join(".nacre-copy.of another.0"), b"not ours").unwrap();
    complete(&order);
    assert!(!left.exists() && !destination.join(".nacre-copy-state").exists());
    fs::remove_file(destination.join(".nacre-copy.of another.0")).unwrap();
    set_time(&destination, 1_111_111_111, 1);
    assert_same(&source, &destination);
}

#[test]
fn files_of_before_a_crash_of_the_machine_are_trusted_only_when_known_to_be_on_the_device() {
    let (_here, _there, source, destination) = planted();
    let order = options(&source, &destination);
    complete(&order);
    // As after a crash: the length and the time of a file are there, its data is not.
    let file = destination.join("d/big");
    let mode = fs::metadata(&file).unwrap().permissions();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&file, vec![0; 3_000_001]).unwrap();
    fs::set_permissions(&file, mode).unwrap();
    let wanted = fs::metadata(source.join("d/big")).unwrap();
    set_time(&file, wanted.mtime(), wanted.mtime_nsec());
    let whole = source.canonicalize().unwrap();
    let state = format!(
        "{{\"version\":1,\"id\":\"feed\",\"source\":{:?},\"boot\":\"another\",\"synced\":null,\"doubtful\":null}}",
        whole.to_str().unwrap()
    );
    fs::write(destination.join(".nacre-copy-state"), state).unwrap();
    let run = complete(&order);
    assert!(run.outcome.unwrap().resumed);
    assert_same(&source, &destination);
}

#[test]
fn an_update_copies_what_differs_and_leaves_the_rest_alone() {
    let (_here, _there, source, destination) = planted();
    let order = Options { update: true, ..options(&source, &destination) };
    complete(&order);
    fs::write(destination.join("d/not in source"), b"stays").unwrap();
    fs::remove_file(destination.join("empty")).unwrap();
    fs::write(source.join("small"), b"other").unwrap();
    fs::set_permissions(source.join("hole"), fs::Permissions::from_mode(0o604)).unwrap();
    fs::remove_file(destination.join("d/deep/small once more")).unwrap();
    fs::write(destination.join("d/deep/small once more"), b"somebody's").unwrap();
    let run = complete(&order);
    assert_eq!(fs::read(destination.join("d/not in source")).unwrap(), b"stays");
    fs::remove_file(destination.join("d/not in source")).unwrap();
    let meta = fs::metadata(source.join("d")).unwrap();
    set_time(&destination.join("d"), meta.mtime(), meta.mtime_nsec());
    assert_same(&source, &destination);
    // All but `empty` and the file that was written to, which has three names: one copied, and two
    // linked to it.
    assert_eq!(run.now.entries - run.now.present, 4);
    assert_eq!(run.now.replaced, 3, "the three names of the file that was written to");
    assert_eq!(run.now.renewed, 1, "`hole` has another mode");
    assert_eq!(run.now.directories, run.now.present_directories, "no directory was made");
    let again = complete(&order);
    assert_eq!(again.now.entries, again.now.present, "nothing is copied when nothing differs");
    assert_eq!((again.now.replaced, again.now.renewed), (0, 0));
}

#[test]
fn nothing_of_somebody_else_is_replaced() {
    let (_here, there, source, destination) = planted();
    fs::create_dir(&destination).unwrap();
    fs::write(destination.join("small"), b"precious").unwrap();
    let before = look(&destination);
    let refused = |order: &Options| copy(order).outcome.unwrap_err();
    let refusal = refused(&options(&source, &destination));
    assert!(refusal.what.contains("is not empty") && refusal.next.contains("--update"), "{refusal:?}");
    assert_eq!(look(&destination), before);
    // A directory is not replaced by a file, nor a file by a directory.
    fs::remove_file(destination.join("small")).unwrap();
    fs::create_dir(destination.join("small")).unwrap();
    fs::write(destination.join("d"), b"a file").unwrap();
    let run = copy(&Options { update: true, ..options(&source, &destination) });
    let outcome = run.outcome.unwrap();
    assert!(!outcome.complete() && outcome.failures >= 2 && outcome.fatal.is_none(), "{outcome:?}");
    assert!(destination.join("small").is_dir() && destination.join("d").is_file());
    assert!(
        run.told.iter().any(|told| matches!(told, CopyEvent::Failed(text) if text.contains("is a directory"))),
        "{:?}",
        run.told
    );
    // Wrong pairs.
    assert!(refused(&options(&source, &source)).what.contains("inside of"));
    assert!(refused(&options(&source, &source.join("d/new"))).what.contains("inside of"));
    assert!(!source.join("d/new").exists());
    assert_eq!(refused(&options(&source.join("nothing"), &destination)).kind, RefusalKind::NotFound);
    assert_eq!(refused(&options(&source, &there.path().join("no/such"))).kind, RefusalKind::NotFound);
    assert!(refused(&options(&source.join("small"), &there.path().join("new"))).what.contains("not a directory"));
    assert!(!there.path().join("new").exists());
}

#[test]
fn a_destination_belongs_to_one_copy() {
    let (_here, there, source, destination) = planted();
    let other = there.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("a"), b"a").unwrap();
    let run = copy_until(&options(&source, &destination), |now| now.entries >= 1);
    if run.outcome.unwrap().complete() {
        return;
    }
    let refusal = copy(&options(&other, &destination)).outcome.unwrap_err();
    assert!(refusal.what.contains("that was not finished"), "{refusal:?}");
    let refusal = copy(&options(&destination, &there.path().join("third"))).outcome.unwrap_err();
    assert!(refusal.what.contains("itself a copy that was not finished"), "{refusal:?}");
    // Two copies at the same time.
    let directory = fs::File::open(&destination).unwrap();
    rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(copy(&options(&source, &destination)).outcome.unwrap_err().kind, RefusalKind::Busy);
    drop(directory);
    complete(&options(&source, &destination));
    assert_same(&source, &destination);
}

#[test]
fn the_comparison_finds_every_difference() {
    let (_here, _there, source, destination) = planted();
    let only = Options { verify: Verify::Only, ..options(&source, &destination) };
    type Damage = (&'static str, Box<dyn Fn(&Path)>);
    let damages: Vec<Damage> = vec![
        (
            "differs from its source at byte 2000000",
            Box::new(|root| {
                let path = root.join("d/big");
                let meta = fs::metadata(&path).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
                let byte = fs::read(&path).unwrap()[2_000_000];
                fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[!byte], 2_000_000).unwrap();
                fs::set_permissions(&path, meta.permissions()).unwrap();
                set_time(&path, meta.mtime(), meta.mtime_nsec());
            }),
        ),
        (
            "has another mode",
            Box::new(|root| fs::set_permissions(root.join("hole"), fs::Permissions::from_mode(0o600)).unwrap()),
        ),
        ("has another time", Box::new(|root| set_time(&root.join("pipe"), 8, 0))),
        ("No such file", Box::new(|root| fs::remove_file(root.join("socket")).unwrap())),
        (
            "is of another type",
            Box::new(|root| {
                fs::remove_file(root.join("empty")).unwrap();
                symlink("small", root.join("empty")).unwrap();
            }),
        ),
        (
            "is a file of its own",
            Box::new(|root| {
                let path = root.join("d/small again");
                let meta = fs::metadata(&path).unwrap();
                let (content, values) = (fs::read(&path).unwrap(), attributes(&path));
                fs::remove_file(&path).unwrap();
                fs::write(&path, content).unwrap();
                for (name, value) in values {
                    sys::lsetxattr(&path, name.as_slice(), &value, XattrFlags::empty()).unwrap();
                }
                std::os::unix::fs::lchown(&path, Some(meta.uid()), Some(meta.gid())).unwrap();
                fs::set_permissions(&path, meta.permissions()).unwrap();
                if let Some(value) = attributes(&root.join("small")).get(b"security.capability".as_slice()) {
                    sys::lsetxattr(&path, "security.capability", value, XattrFlags::empty()).unwrap();
                }
                set_time(&path, meta.mtime(), meta.mtime_nsec());
            }),
        ),
        (
            "leads somewhere else",
            Box::new(|root| {
                let path = root.join("d/deep/up");
                let meta = fs::symlink_metadata(&path).unwrap();
                fs::remove_file(&path).unwrap();
                symlink("../e", &path).unwrap();
                set_time(&path, meta.mtime(), meta.mtime_nsec());
            }),
        ),
    ];
    for (wanted, damage) in damages {
        complete(&options(&source, &destination));
        complete(&only);
        damage(&destination);
        let run = copy(&only);
        let sentences: Vec<String> = run.told.iter().map(|told| format!("{told:?}")).collect();
        assert!(
            run.outcome.unwrap().failures >= 1 && sentences.iter().any(|told| told.contains(wanted)),
            "{wanted}: {sentences:?}"
        );
        fs::remove_dir_all(&destination).unwrap();
    }
}
