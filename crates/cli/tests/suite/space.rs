//! Space on a real mount: a full pool and quotas refuse the writing call, whatever the kernel has
//! not yet written back, and msync(2) fails for stores to mappings without space; accepted data is
//! there after an import; deletes free space at once; copies within the kernel share blocks.

use crate::mounting::{as_root, needs, pools::Pool};
use nacre_sys::mapping::SharedMapping;
use rustix::fs::{FallocateFlags, XattrFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, chown};
use std::path::Path;

fn sized(short: &str, size: &str) -> Pool {
    Pool::made(short, size, &["-O", "compression=off"])
}

impl Pool {
    fn figure(&self, words: &[&str]) -> u64 {
        self.nacre(words).trim().parse().unwrap()
    }

    /// Whether the pool works: commits go through.
    fn assert_works(&self) {
        self.nacre(&["pool", "sync", "%"]);
        assert_eq!(self.nacre(&["pool", "list", "-H", "-o", "health", "%"]), "ONLINE\n");
    }

    /// Leaves the pool in order and takes it again.
    fn import_again(&self) {
        self.nacre(&["pool", "export", "%"]);
        self.import();
    }
}

/// Reproducible content of a file.
struct Pattern {
    block: Vec<u8>,
}

impl Pattern {
    /// Its length is prime, so no record is like another.
    const LENGTH: u64 = 65_521;

    fn new(seed: u64) -> Pattern {
        let word = |at: u64| {
            (seed << 40 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).wrapping_mul(0xd6e8_feb8_6659_fd93)
        };
        let mut block: Vec<u8> = (0..=Pattern::LENGTH / 8).flat_map(|at| word(at).to_le_bytes()).collect();
        block.truncate(Pattern::LENGTH as usize);
        Pattern { block }
    }

    fn bytes(&self, from: u64, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length);
        let mut at = (from % Pattern::LENGTH) as usize;
        while bytes.len() < length {
            let end = self.block.len().min(at + length - bytes.len());
            bytes.extend_from_slice(&self.block[at..end]);
            at = 0;
        }
        bytes
    }
}

/// Creates a file of this length, of holes only, and stores to all of it through a mapping; returns
/// the results of msync and then fsync.
fn store(path: &Path, seed: u64, length: usize) -> (std::io::Result<()>, std::io::Result<()>) {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(length as u64).unwrap();
    let mapping = SharedMapping::new(&file, length, true).unwrap();
    let pattern = Pattern::new(seed);
    for at in (0..length).step_by(1 << 20) {
        mapping.write(at, &pattern.bytes(at as u64, (length - at).min(1 << 20))).unwrap();
    }
    (mapping.sync(), file.sync_all())
}

/// Writes until it is refused; how much was accepted, and how it was refused.
fn fill(path: &Path, seed: u64, piece: usize) -> (u64, ErrorKind) {
    let (mut file, pattern) = (File::create(path).unwrap(), Pattern::new(seed));
    let mut accepted = 0;
    let refused = loop {
        match file.write(&pattern.bytes(accepted, piece)) {
            Ok(written) => accepted += written as u64,
            Err(error) => break error.kind(),
        }
    };
    file.sync_all().expect("what was accepted can be made durable");
    (accepted, refused)
}

fn assert_holds(path: &Path, seed: u64, length: u64) {
    let content = fs::read(path).unwrap();
    assert_eq!(content.len() as u64, length, "{}", path.display());
    assert!(content == Pattern::new(seed).bytes(0, length as usize), "{} is not what was written", path.display());
}

#[test]
fn a_full_pool_keeps_all_that_it_accepted() {
    needs!(as_root());
    let pool = sized("full", "128M");
    let file = |number: u64| pool.at("").join(format!("f{number}"));
    // Before it is full: the slowest writer shall have a file as well.
    (0..3).for_each(|number| drop(File::create(file(number)).unwrap()));
    let accepted: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = [5_000, 70_000, 300_000]
            .into_iter()
            .enumerate()
            .map(|(number, piece)| (number as u64, piece))
            .map(|(number, piece)| (file(number), number, piece))
            .map(|(path, number, piece)| scope.spawn(move || fill(&path, number, piece)))
            .collect();
        let filled = writers.into_iter().map(|writer| writer.join().unwrap());
        filled
            .inspect(|(_, refused)| assert_eq!(*refused, ErrorKind::StorageFull))
            .map(|(accepted, _)| accepted)
            .collect()
    });
    assert!(accepted.iter().sum::<u64>() > 40 << 20, "{accepted:?}");
    accepted.iter().enumerate().for_each(|(number, length)| assert_holds(&file(number as u64), number as u64, *length));
    pool.import_again();
    accepted.iter().enumerate().for_each(|(number, length)| assert_holds(&file(number as u64), number as u64, *length));
    // What is deleted is there for the next write.
    (0..accepted.len() as u64).for_each(|number| fs::remove_file(file(number)).unwrap());
    // The kernel reports the last close asynchronously.
    crate::mounting::eventually("what was deleted is free", || {
        pool.nacre(&["pool", "sync", &pool.name]);
        pool.figure(&["fs", "get", "-Hp", "-o", "value", "available", &pool.name]) > 50 << 20
    });
    let (again, _) = fill(&file(9), 9, 100_000);
    assert!(again > 40 << 20, "{again}");
    assert_holds(&file(9), 9, again);
}

#[test]
fn quotas_refuse_the_writing_call() {
    needs!(as_root());
    let pool = sized("quota", "128M");
    let (home, user) = (format!("{}/home", pool.name), format!("{}/home/user", pool.name));
    pool.nacre(&["fs", "create", "-o", "quota=20M", &home]);
    pool.nacre(&["fs", "create", "-o", "refquota=10M", &user]);
    let inside = pool.at("").join("home/user/f");
    let (accepted, refused) = fill(&inside, 1, 60_000);
    assert_eq!(refused, ErrorKind::QuotaExceeded);
    assert!((9 << 20..10 << 20).contains(&accepted), "{accepted}");
    let (beside, refused) = fill(&pool.at("").join("home/g"), 2, 60_000);
    assert_eq!(refused, ErrorKind::QuotaExceeded);
    assert!((9 << 20..11 << 20).contains(&beside), "{beside}");
    pool.nacre(&["pool", "sync", &pool.name]);
    assert!(pool.figure(&["fs", "get", "-Hp", "-o", "value", "used", &home]) <= 20 << 20);
    // A user's, as the file's owner is charged.
    pool.nacre(&["fs", "set", "quota=none", &home]);
    pool.nacre(&["fs", "set", "userquota@12345=2M", &home]);
    let owned = pool.at("").join("home/owned");
    File::create(&owned).unwrap();
    chown(&owned, Some(12345), None).unwrap();
    let (owned_bytes, refused) = fill(&owned, 3, 60_000);
    assert_eq!(refused, ErrorKind::QuotaExceeded);
    assert!(owned_bytes <= 2 << 20, "{owned_bytes}");
    // Of a user without a quota of his own.
    let other = pool.at("").join("home/other");
    File::create(&other).unwrap();
    chown(&other, Some(12346), None).unwrap();
    pool.nacre(&["fs", "set", "defaultuserquota=3M", "defaultgroupobjquota=1000", &home]);
    // Root is over his, and makes no file.
    assert_eq!(File::create(pool.at("").join("home/more")).unwrap_err().kind(), ErrorKind::QuotaExceeded);
    let (other_bytes, refused) = fill(&other, 4, 60_000);
    assert_eq!(refused, ErrorKind::QuotaExceeded);
    assert!((2 << 20..3 << 20).contains(&other_bytes), "{other_bytes}");
    pool.nacre(&["pool", "sync", &pool.name]);
    let space = pool.nacre(&["fs", "userspace", "-Hnp", "-o", "name,quota", &home]);
    assert!(
        space.lines().any(|line| line == "12345\t2097152") && space.lines().any(|line| line == "12346\t3145728"),
        "{space}"
    );
    assert_eq!(
        pool.nacre(&["fs", "get", "-H", "-o", "value,source", "userquota@12347,defaultuserquota", &home]),
        "3M\tdefault\n3M\tlocal\n"
    );
    pool.nacre(&["fs", "set", "defaultuserquota=none", &home]);
    for (path, seed, length) in [
        (inside, 1, accepted),
        (pool.at("").join("home/g"), 2, beside),
        (owned, 3, owned_bytes),
        (other, 4, other_bytes),
    ] {
        assert_holds(&path, seed, length);
    }
}

#[test]
fn quotas_of_users_count_small_things() {
    needs!(as_root());
    let pool = sized("small", "256M");
    type Making<'a> = &'a dyn Fn(&Path, u64) -> std::io::Result<()>;
    let owned = |path: &Path| {
        File::create_new(path)?;
        chown(path, Some(12345), None)
    };
    let attribute = |path: &Path, number: u64| {
        let value = Pattern::new(number).bytes(0, 4000);
        Ok(rustix::fs::setxattr(path.join("own"), format!("user.{number}"), &value, XattrFlags::empty())?)
    };
    let name = |number: u64| format!("{number:0>200}");
    let file = |path: &Path, number: u64| {
        let path = path.join(name(number));
        owned(&path)?;
        fs::write(&path, Pattern::new(number).bytes(0, 2000))
    };
    let link = |path: &Path, number: u64| fs::hard_link(path.join("own"), path.join(name(number)));
    let kinds: [(&str, Making<'_>); 3] = [("attributes", &attribute), ("files", &file), ("links", &link)];
    for (kind, make) in kinds {
        let name = format!("{}/{kind}", pool.name);
        pool.nacre(&["fs", "create", "-o", "userquota@12345=1M", &name]);
        let path = pool.at("").join(kind);
        owned(&path.join("own")).unwrap();
        let refused = (0..20_000).find_map(|number| make(&path, number).err()).unwrap();
        assert_eq!(refused.kind(), ErrorKind::QuotaExceeded, "{kind}");
        pool.nacre(&["pool", "sync", &pool.name]);
        let figure = |property: &str| pool.figure(&["fs", "get", "-Hp", "-o", "value", property, &name]);
        assert!((1_000_000..=1 << 20).contains(&figure("userused@12345")), "{kind}: {}", figure("userused@12345"));
        // At the limit, what does not grow is not refused, and what is removed makes room.
        pool.nacre(&["fs", "set", &format!("userquota@12345={}", figure("userused@12345")), &name]);
        let longer = path.join("x".repeat(250));
        assert_eq!(fs::rename(path.join("own"), &longer).unwrap_err().kind(), ErrorKind::QuotaExceeded, "{kind}");
        fs::rename(path.join("own"), path.join("o")).unwrap();
        fs::read_dir(&path).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
        crate::mounting::eventually("what was removed is not charged", || {
            pool.nacre(&["pool", "sync", &pool.name]);
            figure("userused@12345") == 0
        });
    }
}

#[test]
fn copies_of_the_kernel_share_what_they_can() {
    needs!(as_root());
    let pool = sized("share", "128M");
    let (from, to) = (pool.at("").join("a"), pool.at("").join("b"));
    let length = 12 * (1 << 20) + 777;
    fs::write(&from, Pattern::new(5).bytes(0, length)).unwrap();
    pool.nacre(&["pool", "sync", &pool.name]);
    let allocated = || pool.figure(&["pool", "list", "-Hp", "-o", "allocated", &pool.name]);
    let before = allocated();
    // The standard library asks for copy_file_range(2).
    let (mut source, mut target) = (File::open(&from).unwrap(), File::create(&to).unwrap());
    assert_eq!(std::io::copy(&mut source, &mut target).unwrap(), length as u64);
    drop((source, target));
    pool.nacre(&["pool", "sync", &pool.name]);
    let grown = allocated().saturating_sub(before);
    assert!(grown < 2 << 20, "{grown} bytes were written for a copy");
    assert!(pool.figure(&["fs", "get", "-Hp", "-o", "value", "used", &pool.name]) > 24 << 20, "each file is charged");
    // Each goes its way.
    OpenOptions::new().write(true).open(&from).unwrap().write_all_at(b"mine", 300_000).unwrap();
    assert_holds(&to, 5, length as u64);
    fs::remove_file(&from).unwrap();
    pool.import_again();
    assert_holds(&to, 5, length as u64);
    let mut first = [0; 8];
    File::open(&to).unwrap().read_exact(&mut first).unwrap();
    assert_eq!(first.to_vec(), Pattern::new(5).bytes(0, 8));
}

/// Copies a range by copy_file_range(2), as far as the kernel does it in several calls.
fn copy_range(from: &Path, to: &Path, (mut at, mut into): (u64, u64), mut length: usize) {
    let source = File::open(from).unwrap();
    let target = OpenOptions::new().write(true).create(true).truncate(false).open(to).unwrap();
    while length > 0 {
        let done = rustix::fs::copy_file_range(&source, Some(&mut at), &target, Some(&mut into), length).unwrap();
        assert!(done > 0, "nothing was copied");
        length -= done;
    }
}

#[test]
fn parts_of_files_are_shared_from_record_to_record() {
    needs!(as_root());
    let pool = sized("parts", "128M");
    let (from, whole, part) = (pool.at("").join("a"), pool.at("").join("b"), pool.at("").join("c"));
    let length = 8 << 20;
    let mut content = Pattern::new(7).bytes(0, length);
    fs::write(&from, &content).unwrap();
    let other = Pattern::new(8).bytes(0, length);
    fs::write(&part, &other).unwrap();
    let allocated = || {
        pool.nacre(&["pool", "sync", &pool.name]);
        pool.figure(&["pool", "list", "-Hp", "-o", "allocated", &pool.name])
    };
    allocated();
    // A small change to a large record is kept beside it.
    let small = [b'p'; 4096];
    OpenOptions::new().write(true).open(&from).unwrap().write_all_at(&small, 1_500_000).unwrap();
    content[1_500_000..1_504_096].copy_from_slice(&small);
    let before = allocated();
    copy_range(&from, &whole, (0, 0), length);
    let copied = allocated();
    assert!(copied.saturating_sub(before) < 1 << 20, "{} bytes for a whole file", copied.saturating_sub(before));
    assert!(fs::read(&whole).unwrap() == content);
    // From the middle of a record to the middle of another, a mebibyte further.
    copy_range(&from, &part, (100 << 10, (1 << 20) + (100 << 10)), 5 << 20);
    let grown = allocated().saturating_sub(copied);
    assert!(grown < 1 << 20, "{grown} bytes for a part");
    let mut expected = other;
    expected[(1 << 20) + (100 << 10)..(6 << 20) + (100 << 10)]
        .copy_from_slice(&content[100 << 10..(5 << 20) + (100 << 10)]);
    assert!(fs::read(&part).unwrap() == expected);
}

#[test]
fn what_many_have_deleted_is_free() {
    needs!(as_root());
    let pool = sized("gone", "128M");
    let root = pool.at("");
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let root = &root;
            scope.spawn(move || {
                for round in 0..60 {
                    let path = root.join(format!("{worker}-{}", round % 3));
                    let mut file = File::create(&path).unwrap();
                    file.write_all(&[worker + 1; 100_000]).unwrap();
                    drop(file);
                    fs::remove_file(&path).unwrap();
                }
            });
        }
    });
    crate::mounting::eventually("what was deleted is free", || {
        pool.nacre(&["pool", "sync", &pool.name]);
        pool.figure(&["fs", "get", "-Hp", "-o", "value", "used", &pool.name]) < 64 << 10
    });
}

#[test]
fn stores_to_mappings_end_at_quotas() {
    needs!(as_root());
    let pool = sized("store", "512M");
    let full = |outcome: std::io::Result<()>| assert_eq!(outcome.unwrap_err().kind(), ErrorKind::StorageFull);
    for (short, property, figure) in
        [("a", "quota", "used"), ("b", "refquota", "referenced"), ("c", "userquota@12345", "userused@12345")]
    {
        let name = format!("{}/{short}", pool.name);
        pool.nacre(&["fs", "create", "-o", &format!("{property}=4M"), &name]);
        let path = pool.at("").join(short).join("f");
        File::create(&path).unwrap();
        chown(&path, Some(12345), None).unwrap();
        let (told, told_again) = store(&path, 1, 60 << 20);
        full(told);
        // Each open file gets the error once, and it was the mapping's msync.
        told_again.unwrap();
        pool.assert_works();
        let used = pool.figure(&["fs", "get", "-Hp", "-o", "value", figure, &name]);
        assert!((3 << 20..(4 << 20) + (64 << 10)).contains(&used), "{property}: {used}");
        // With a larger quota, writing continues.
        pool.nacre(&["fs", "set", &format!("{property}=100M"), &name]);
        let (told, told_again) = store(&path, 2, 60 << 20);
        told.unwrap();
        told_again.unwrap();
        assert_holds(&path, 2, 60 << 20);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn stores_of_several_fill_a_pool_and_stop_nobody() {
    needs!(as_root());
    let pool = sized("fill", "512M");
    let file = |number: u64| pool.at("").join(format!("f{number}"));
    // The acknowledged write(2) of another process stays valid.
    let (accepted, refused) = std::thread::scope(|scope| {
        let stores: Vec<_> = (0..3)
            .map(|number| (number, file(number)))
            .map(|(number, path)| scope.spawn(move || store(&path, number, 150 << 20)))
            .collect();
        let writer = scope.spawn(|| fill(&file(9), 9, 50_000));
        let told = stores.into_iter().map(|stores| stores.join().unwrap().0).filter_map(Result::err);
        let kinds: Vec<ErrorKind> = told.map(|error| error.kind()).collect();
        assert!(!kinds.is_empty() && kinds.iter().all(|kind| *kind == ErrorKind::StorageFull), "{kinds:?}");
        writer.join().unwrap()
    });
    assert_eq!(refused, ErrorKind::StorageFull);
    pool.assert_works();
    // Who removes finds room.
    fs::remove_file(file(0)).unwrap();
    pool.import_again();
    assert_holds(&file(9), 9, accepted);
    // How much of the room the writer got is luck.
    [1, 2, 9].into_iter().for_each(|number| fs::remove_file(file(number)).unwrap());
    crate::mounting::eventually("what was deleted is free", || {
        pool.nacre(&["pool", "sync", &pool.name]);
        pool.figure(&["fs", "get", "-Hp", "-o", "value", "available", &pool.name]) > 100 << 20
    });
    let (told, told_again) = store(&file(4), 4, 60 << 20);
    told.unwrap();
    told_again.unwrap();
    assert_holds(&file(4), 4, 60 << 20);
}

#[test]
fn stores_and_writes_to_one_file_are_both_there() {
    needs!(as_root());
    let pool = sized("both", "512M");
    let name = format!("{}/home", pool.name);
    pool.nacre(&["fs", "create", &name]);
    let path = pool.at("").join("home/f");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    // From here on each write is announced.
    pool.nacre(&["fs", "set", "quota=150M", &name]);
    let (front, behind) = (60 << 20, 40 << 20);
    file.set_len(front + behind).unwrap();
    let mapped = file.try_clone().unwrap();
    let (written, stored) = (Pattern::new(1), Pattern::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mapping = SharedMapping::new(&mapped, (front + behind) as usize, true).unwrap();
            for at in (front..front + behind).step_by(1 << 20) {
                mapping.write(at as usize, &stored.bytes(at, 1 << 20)).unwrap();
            }
            mapping.sync().unwrap();
        });
        for at in (0..front).step_by(20_000) {
            file.write_all(&written.bytes(at, (front - at).min(20_000) as usize)).unwrap();
        }
    });
    file.sync_all().unwrap();
    let is_whole = || {
        let content = fs::read(&path).unwrap();
        assert!(content[..front as usize] == written.bytes(0, front as usize));
        assert!(content[front as usize..] == stored.bytes(front, behind as usize));
    };
    is_whole();
    drop((mapped, file));
    pool.import_again();
    is_whole();
}

#[test]
fn room_that_is_asked_for_is_there_or_refused_at_once() {
    needs!(as_root());
    let pool = sized("ask", "512M");
    let name = format!("{}/home", pool.name);
    pool.nacre(&["fs", "create", "-o", "quota=100M", &name]);
    let ask = |path: &Path, flags: FallocateFlags, length: u64| {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        rustix::fs::fallocate(&file, flags, 0, length)
    };
    let (free, limited) = (pool.at("").join("f"), pool.at("").join("home/f"));
    for flags in [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE] {
        assert_eq!(ask(&free, flags, 5 << 30), Err(rustix::io::Errno::NOSPC), "{flags:?}");
        assert_eq!(ask(&limited, flags, 101 << 20), Err(rustix::io::Errno::DQUOT), "{flags:?}");
        assert_eq!(fs::metadata(&free).unwrap().len(), 0, "{flags:?}");
    }
    ask(&free, FallocateFlags::empty(), 50 << 20).unwrap();
    ask(&limited, FallocateFlags::empty(), 90 << 20).unwrap();
    assert_eq!(fs::metadata(&limited).unwrap().len(), 90 << 20);
    // What holds content already needs no room.
    fs::write(&limited, Pattern::new(3).bytes(0, 80 << 20)).unwrap();
    ask(&limited, FallocateFlags::empty(), 80 << 20).unwrap();
    ask(&limited, FallocateFlags::KEEP_SIZE, 95 << 20).unwrap();
    assert_eq!(ask(&limited, FallocateFlags::KEEP_SIZE, 110 << 20), Err(rustix::io::Errno::DQUOT));
    assert_holds(&limited, 3, 80 << 20);
}
