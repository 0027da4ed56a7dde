//! chattr(1) and lsattr(1) on mounts, compared with ext4: flags, and the refusals of immutable and
//! append-only files.

use crate::mounting::{
    Fixture, as_root, images, needs,
    pools::Pool,
    sh, sh_as,
    status::{Status, least_requests_of},
    unions::branches,
};
use crate::surviving::pools::Surviving;
use nacre_sys::mapping::SharedMapping;
use rustix::fs::{OFlags, fcntl_setfl};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

const EPERM: i32 = rustix::io::Errno::PERM.raw_os_error();
/// A user that is neither root nor an owner of the tests' files.
const NOBODY: u32 = 65534;

/// Each line of the answer is a command and whether it succeeded, or its error.
const OPERATIONS: &str = r#"
set +e
try() { if out=$("$@" 2>&1); then echo "$*: ok"; else echo "$*: ${out##*: }"; fi; }
flags() { lsattr -d "$1" | cut -d ' ' -f 1 | tr -d 'e-'; }
rm -rf t; mkdir t; cd t
echo content > i; echo content > a; mkdir id ad; echo x > id/x; echo x > ad/x; echo y > other
try chattr +d other; flags other
try chattr -d +A other; flags other
try chattr -A other; flags other
try chattr +i i; try chattr +a a; try chattr +i id; try chattr +a ad
flags i; flags a; flags id; flags ad
for file in i a id/x ad/x; do
  try cat $file
  try dd if=other of=$file oflag=append conv=notrunc status=none
  try sh -c "echo over > $file"
  try dd if=other of=$file conv=notrunc status=none
  try truncate -s 3 $file
  try chmod 600 $file
  try chown 1:1 $file
  try touch $file
  try touch -d @1 $file
  try setfattr -n user.a -v 1 $file
  try fallocate -p -o 0 -l 1 $file
  try ln $file linked; rm -f linked
  try mv $file moved; [ ! -e moved ] || mv moved $file
  try mv other $file; [ -e other ] || echo y > other
  try rm $file
done
for directory in id ad; do
  try touch $directory/new
  try mkdir $directory/d
  try ln other $directory/link
  try mv other $directory/moved
  [ -e other ] || echo y > other
  try rm $directory/new
  try rmdir $directory/d
  try mv $directory renamed; [ ! -e renamed ] || mv renamed $directory
  try chmod 700 $directory
done
mkdir empty; chattr +i empty; try rmdir empty; chattr -i empty; try rmdir empty
chattr -i i id; chattr -a a ad
flags i; flags a; flags id; flags ad
try sh -c "echo over > i"; try rm -r i a id ad
cd ..; rm -rf t
"#;

fn compared(native: &Path, place: &Path, what: &str) {
    let expected = sh(native, OPERATIONS);
    assert!(expected.contains("Operation not permitted"), "{expected}");
    pretty_equal(&sh(place, OPERATIONS), &expected, what);
}

fn pretty_equal(got: &str, expected: &str, what: &str) {
    for (got, expected) in got.lines().zip(expected.lines()) {
        assert_eq!(got, expected, "{what}");
    }
    assert_eq!(got.lines().count(), expected.lines().count(), "{what}: {got}");
}

/// A directory of an ext4 file system: `test` gets it, and where further ones can be made.
fn on_ext4(test: impl Fn(&Path, &Path)) {
    let outer = Fixture::bare();
    let (image, place) = (outer.scratch.path().join("image"), outer.directory("host"));
    if !images::mounted("ext4", &image, &place) {
        return;
    }
    let native = place.join("native");
    fs::create_dir(&native).unwrap();
    test(&native, &place);
    assert!(crate::mounting::run("umount", [&place]).status.success());
}

#[test]
fn flags_of_mounts_are_those_below() {
    needs!(as_root());
    on_ext4(|native, place| {
        let start = |words: &[&str], list: &dyn Fn(&Path) -> PathBuf| {
            let mut fixture = Fixture::bare_in(tempfile::tempdir_in(place).unwrap());
            let (source, mountpoint) = (list(&fixture.source), fixture.mountpoint.clone());
            fixture.start(words, source.as_os_str(), &mountpoint);
            fixture
        };
        let itself = |source: &Path| source.to_owned();
        for words in [&["mirror"][..], &["bindfs"], &["cage", "--size=100M"]] {
            compared(native, &start(words, &itself).mountpoint, &words.join(" "));
        }
        let lower = place.join("lower");
        fs::create_dir(&lower).unwrap();
        fs::write(lower.join("below"), "x").unwrap();
        let union = start(&["union"], &|source| branches(&[(source, "rw"), (&lower, "ro")]).into());
        compared(native, &union.mountpoint, "union");
        // A flag is a change: the file is copied up.
        let done = sh(&union.mountpoint, "chattr +d below; lsattr below | tr -d e-; lsattr below | grep -c d");
        assert!(done.contains('d'), "{done}");
        assert!(union.source.join("below").exists());
    });
}

#[test]
fn files_of_a_pool_have_flags() {
    needs!(as_root());
    for atime in ["atime=on", "atime=off"] {
        let pool = Pool::made("opens", "256M", &["-O", atime]);
        assert_eq!(Status::of(&pool.at("")).asks_at_open().is_some(), atime == "atime=on");
        on_ext4(|native, _| compared(native, &pool.at(""), atime));
    }
    let pool = Pool::made("flags", "256M", &["-O", "atime=on"]);
    sh(&pool.at(""), "echo x > kept; echo x > log; mkdir d; chattr +iA kept; chattr +a log; chattr +ia d; chattr +d .");
    let flags = || sh(&pool.at(""), "lsattr -d . kept log d | tr -d -");
    assert_eq!(flags(), "d .\niA kept\na log\nia d\n");
    // Durable like any other change.
    pool.nacre(&["fs", "set", "atime=off", "%"]);
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    assert_eq!(flags(), "d .\niA kept\na log\nia d\n");
    let refused = sh(
        &pool.at(""),
        "set +e; echo y > y; cp y kept 2>&1; cp y log 2>&1; touch d/x 2>&1; echo y >> log; cat kept log",
    );
    assert_eq!(refused.matches("Operation not permitted").count(), 3, "{refused}");
    assert!(refused.ends_with("x\nx\ny\n"), "{refused}");
    // What was written before a file became immutable arrives.
    sh(&pool.at(""), "yes | head -c 3000000 > late; chattr +i late; sync; yes | head -c 3000000 | cmp - late");
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    sh(&pool.at(""), "yes | head -c 3000000 | cmp - late");
    for flag in ["+S", "+C", "+c"] {
        let refused = sh(&pool.at(""), &format!("chattr {flag} log 2>&1 || true"));
        assert!(refused.contains("not supported"), "{flag}: {refused}");
    }
    sh(&pool.at(""), "chattr -i late kept; chattr -a log; chattr -ia d; rm -r late kept log d");
}

/// Content that the kernel has taken before a file is protected arrives, also after a death of the process.
#[test]
fn content_from_before_is_kept() {
    needs!(as_root());
    const LENGTH: usize = 300_000;
    for atime in ["atime=on", "atime=off"] {
        let surviving = Surviving::made("kept", "256M", &["-O", atime]);
        let pool = &surviving.pool;
        let names = ["immutable", "appended"];
        for name in names {
            fs::write(pool.at(name), vec![b'a'; LENGTH]).unwrap();
        }
        let files = names.map(|name| OpenOptions::new().read(true).write(true).open(pool.at(name)).unwrap());
        let mappings = files.each_ref().map(|file| SharedMapping::new(file, LENGTH, true).unwrap());
        for (file, mapping) in files.iter().zip(&mappings) {
            file.write_all_at(b"written", 10).unwrap();
            mapping.write(150_000, b"stored").unwrap();
        }
        sh(&pool.at(""), "chattr +i immutable; chattr +a appended");
        surviving.kill();
        sh(&pool.at(""), "lsattr immutable appended; sync -f .");
        drop((files, mappings));
        pool.nacre(&["fs", "snapshot", "%@s"]);
        for name in names {
            let stored = fs::read(pool.at(&format!(".zfs/snapshot/s/{name}"))).unwrap();
            assert_eq!(
                (stored.len(), &stored[10..17], &stored[150_000..150_006]),
                (LENGTH, &b"written"[..], &b"stored"[..]),
                "{atime}, {name}"
            );
        }
        sh(&pool.at(""), "chattr -i immutable; chattr -a appended");
    }
}

/// Descriptors and mappings do not change protected content: neither descriptors that were open
/// before `chattr +i`, nor those of an append-only file, also after fcntl(2) has cleared O_APPEND.
#[test]
fn protected_content_stays_as_it_is() {
    needs!(as_root());
    const LENGTH: usize = 16_384;
    let before = vec![b'a'; LENGTH];
    let judges_pages = nacre_sys::kernel_version::kernel_version() >= (6, 18);
    for atime in ["atime=on", "atime=off"] {
        let pool = Pool::made("protected", "1G", &["-O", atime]);
        for name in ["immutable", "appended"] {
            fs::write(pool.at(name), &before).unwrap();
        }
        let open = |name| OpenOptions::new().read(true).write(true).open(pool.at(name)).unwrap();
        let immutable = open("immutable");
        let mapping = SharedMapping::new(&immutable, LENGTH, true).unwrap();
        mapping.write(0, b"A").unwrap();
        immutable.write_all_at(b"B", 1).unwrap();
        sh(&pool.at(""), "chattr +i immutable; chattr +a appended");
        let refused = |done: std::io::Result<()>| assert_eq!(done.unwrap_err().raw_os_error(), Some(EPERM), "{atime}");
        refused(immutable.write_all_at(b"x", 2));
        refused(immutable.write_all_at(b"x", LENGTH as u64));
        refused(immutable.set_len(5));
        mapping.write(8192, b"x").unwrap();
        // Attributes that the kernel has kept let no write through.
        assert_eq!(fs::metadata(pool.at("appended")).unwrap().len(), LENGTH as u64, "{atime}");
        let appended = OpenOptions::new().read(true).append(true).open(pool.at("appended")).unwrap();
        (&appended).write_all(b"more").unwrap();
        let overwriting = SharedMapping::new(&appended, LENGTH, true).unwrap();
        overwriting.write(4096, b"x").unwrap();
        fcntl_setfl(&appended, OFlags::empty()).unwrap();
        refused(appended.write_all_at(b"x", 20));
        fcntl_setfl(&appended, OFlags::APPEND).unwrap();
        (&appended).write_all(b" and more").unwrap();
        let synced = [&mapping, &overwriting].map(|mapping| mapping.sync().is_ok());
        assert_eq!(synced, [!judges_pages; 2], "{atime}");
        // A store that is refused fails no snapshot.
        mapping.write(12_288, b"x").unwrap();
        pool.nacre(&["fs", "snapshot", "%@s"]);
        assert_eq!(mapping.sync().is_ok(), !judges_pages, "{atime}: its error comes once");
        let stored = |name: &str| fs::read(pool.at(&format!(".zfs/snapshot/s/{name}"))).unwrap();
        let appended_now = stored("appended");
        assert_eq!(&appended_now[LENGTH..], b"more and more", "{atime}");
        if judges_pages {
            assert!(stored("immutable")[..3] == *b"ABa" && stored("immutable")[2..] == before[2..], "{atime}");
            assert!(appended_now[..LENGTH] == before, "{atime}");
        }
        // Without the flag, the mapping is one like any other.
        sh(&pool.at(""), "chattr -i immutable; chattr -a appended");
        mapping.write(10, b"after").unwrap();
        mapping.sync().unwrap();
        drop((mapping, immutable, overwriting, appended));
        pool.nacre(&["fs", "snapshot", "%@t"]);
        assert_eq!(&fs::read(pool.at(".zfs/snapshot/t/immutable")).unwrap()[10..15], b"after", "{atime}");
    }
}

/// Flags of an earlier import protect from the first store on, also where no request shows that a file is opened.
#[test]
fn protected_content_stays_as_it_is_after_an_import() {
    needs!(as_root());
    const LENGTH: usize = 16_384;
    let pool = Pool::made("imported", "256M", &["-O", "atime=off"]);
    let names = ["immutable", "appended"];
    for name in names {
        fs::write(pool.at(name), vec![b'a'; LENGTH]).unwrap();
    }
    sh(&pool.at(""), "chattr +i immutable; chattr +a appended");
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    for name in names {
        // Where opens are requests, this one is refused, as natively.
        let opened = OpenOptions::new().read(true).write(true).open(pool.at(name));
        let stored = opened.and_then(|file| {
            let mapping = SharedMapping::new(&file, LENGTH, true)?;
            mapping.write(4096, b"x")?;
            mapping.sync()
        });
        assert_eq!(stored.map_err(|error| error.raw_os_error()), Err(Some(EPERM)), "{name}");
    }
    pool.nacre(&["fs", "snapshot", "%@s"]);
    for name in names {
        assert!(fs::read(pool.at(&format!(".zfs/snapshot/s/{name}"))).unwrap() == [b'a'; LENGTH], "{name}");
    }
    sh(&pool.at(""), "chattr -i immutable; chattr -a appended");
}

/// The kernel reads the beginning of a short program past its end, for which it asks as for a write.
#[test]
fn protected_programs_are_executed() {
    needs!(as_root());
    for atime in ["atime=on", "atime=off"] {
        let pool = Pool::made("executed", "256M", &["-O", atime]);
        let script = "printf '#!/bin/sh\\necho done\\n' > s; chmod +x s; chattr +i s; ./s; cat s | wc -l; chattr -i s";
        assert_eq!(sh(&pool.at(""), script), "done\n2\n", "{atime}");
    }
}

/// The kernel keeps the attributes of protected files that nobody can write to.
#[test]
fn protected_trees_are_not_asked_for_again() {
    needs!(as_root());
    let pool = Pool::made("cached", "256M", &["-O", "atime=on"]);
    assert!(Status::of(&pool.at("")).asks_at_open().is_some());
    let names: Vec<PathBuf> = (0..50).map(|number| pool.at(&format!("d/f{number}"))).collect();
    fs::create_dir(pool.at("d")).unwrap();
    for name in &names {
        fs::write(name, "content").unwrap();
    }
    sh(&pool.at(""), "chattr -R +i d");
    let look = || assert!(names.iter().all(|name| fs::metadata(name).unwrap().len() == 7));
    look();
    let asked = least_requests_of(&pool.at(""), look);
    assert!(asked.values().sum::<u64>() <= 10, "{asked:?}");
    sh(&pool.at(""), "chattr -R -i d");
}

/// A descriptor that was open for writing before `chattr +a` can still write, as on ext4.
#[test]
fn descriptors_from_before_append_only_go_on() {
    needs!(as_root());
    let written = |place: &Path| {
        fs::write(place.join("log"), [b'a'; 100]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(place.join("log")).unwrap();
        sh(place, "chattr +a log");
        file.write_all_at(b"before", 10).unwrap();
        file.write_all_at(b"end", 100).unwrap();
        let refused = [file.set_len(3), OpenOptions::new().write(true).open(place.join("log")).map(drop)];
        let refused = refused.map(|done| done.map_err(|error| error.raw_os_error()));
        sh(place, "sync -f .; chattr -a log");
        drop(file);
        (fs::read(place.join("log")).unwrap(), refused)
    };
    let pool = Pool::made("descriptors", "1G", &["-O", "atime=on"]);
    on_ext4(|native, _| assert_eq!(written(&pool.at("")), written(native)));
}

#[test]
fn flags_take_the_callers_own_rights() {
    needs!(as_root());
    let pool = Pool::made("rights", "256M", &["-O", "atime=on"]);
    let mirror = Fixture::mirror(&[]);
    let cage = Fixture::cage(&["--size=100M"]);
    for place in [pool.at(""), mirror.mountpoint.clone(), cage.mountpoint.clone()] {
        fs::write(place.join("roots"), "").unwrap();
        fs::create_dir(place.join("own")).unwrap();
        std::os::unix::fs::chown(place.join("own"), Some(NOBODY), Some(NOBODY)).unwrap();
        let script =
            "touch f; for flag in +i +a; do chattr $flag f; done; chattr +d f; lsattr f | tr -d e-; chattr +d ../roots";
        let (code, said) = sh_as(&place.join("own"), NOBODY, NOBODY, "", script);
        assert_ne!(code, 0, "{said}");
        assert_eq!(said.matches("Operation not permitted").count(), 3, "{said}");
        assert!(said.contains("d f\n"), "{said}");
    }
}
