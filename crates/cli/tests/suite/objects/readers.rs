//! Readers of a pool that another process writes to: they follow it, and invalidate exactly the
//! changed files in their kernels.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::PathBuf,
    time::Instant,
};

use rustix::fs::XattrFlags;

use super::InBucket;
use crate::mounting::{as_root, eventually, needs, pools::Yard, sh, sh_as, status::least_requests_of};

/// An ordinary user.
const NOBODY: u32 = 65_534;

/// A writer and a reader of one pool, in a directory that is a bucket.
struct Followed {
    yard: Yard,
    /// The reader's name of it.
    reader: String,
    /// Where the writer has it.
    at: PathBuf,
    /// Where the reader has it.
    there: PathBuf,
}

impl Followed {
    fn new() -> Followed {
        let yard = Yard::new();
        let (name, reader) = (yard.name("fo"), yard.name("re"));
        let (at, root) = (yard.path("at"), yard.path("there"));
        fs::create_dir(yard.path("bucket")).unwrap();
        let address = format!("file://{}", yard.path("bucket").display());
        yard.nacre(&["pool", "create", "-m", at.to_str().unwrap(), &name, &address]);
        fs::write(at.join("keep"), vec![7; 1 << 20]).unwrap();
        fs::create_dir(at.join("d")).unwrap();
        for name in ["changed", "gone", "old", "cut", "d/x", "mode"] {
            fs::write(at.join(name), name.repeat(2000)).unwrap();
        }
        yard.nacre(&["pool", "sync", "%"]);
        let import = ["pool", "import", "-o", "readonly=on", "-t", "-R", root.to_str().unwrap(), &address, &reader];
        yard.nacre(&import);
        let there = root.join(at.strip_prefix("/").unwrap());
        Followed { yard, reader, at, there }
    }

    /// Changes something as the writer, and waits until the reader sees the result.
    #[track_caller]
    fn follows(&self, what: &str, change: impl FnOnce(), seen: impl FnMut() -> bool) {
        change();
        self.yard.nacre(&["pool", "sync", "%"]);
        let since = Instant::now();
        eventually(what, seen);
        println!("{what}: seen after {} ms", since.elapsed().as_millis());
    }

    fn see(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.there.join(name)).ok()
    }
}

#[test]
fn a_reader_follows_the_writer() {
    needs!(as_root());
    let pool = Followed::new();
    let (at, there) = (&pool.at, &pool.there);
    let nacre = |words: &[&str]| pool.yard.nacre(words);
    // All of it is in the kernel's cache, also that some names are not there.
    assert_eq!(fs::read(there.join("keep")).unwrap(), vec![7; 1 << 20]);
    sh(there, "cat changed gone old cut d/x mode > /dev/null; ls -lR > /dev/null; [ ! -e new ] && [ ! -e d/y ]");
    let mut kept = File::open(there.join("keep")).unwrap();
    let gone = File::open(there.join("gone")).unwrap();
    assert!(fs::write(there.join("mine"), "x").is_err_and(|error| error.raw_os_error() == Some(30)), "EROFS");

    pool.follows("a new file", || fs::write(at.join("new"), "new").unwrap(), || pool.see("new").is_some());
    assert_eq!(pool.see("new").unwrap(), "new");
    let write = || {
        File::options().write(true).open(at.join("changed")).unwrap().write_all(b"other").unwrap();
        fs::write(at.join("d/y"), "y").unwrap();
    };
    pool.follows("content", write, || pool.see("changed").unwrap().starts_with("othered"));
    assert_eq!(pool.see("d/y").unwrap(), "y");
    let rename = || {
        fs::rename(at.join("old"), at.join("d/renamed")).unwrap();
        fs::remove_file(at.join("gone")).unwrap();
        fs::create_dir(at.join("made")).unwrap();
        File::options().write(true).open(at.join("cut")).unwrap().set_len(3).unwrap();
        sh(at, "chmod 4711 mode");
        rustix::fs::setxattr(at.join("keep"), "user.a", b"1", XattrFlags::empty()).unwrap();
    };
    pool.follows("names", rename, || there.join("made").is_dir());
    assert!(pool.see("old").is_none() && pool.see("gone").is_none() && pool.see("d/renamed").is_some());
    assert_eq!(pool.see("cut").unwrap(), "cut");
    assert_eq!(sh(there, "ls; stat -c %a mode"), "changed\ncut\nd\nkeep\nmade\nmode\nnew\n4711\n");
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(there.join("keep"), "user.a", &mut value).unwrap(), 1);
    assert!(gone.metadata().is_err_and(|error| error.raw_os_error() == Some(116)), "ESTALE");

    // What has not changed is in the kernel still, after all that.
    let again = least_requests_of(there, || assert_eq!(fs::read(there.join("keep")).unwrap().len(), 1 << 20));
    assert_eq!(again.get("read"), None, "{again:?}");
    let mut content = Vec::new();
    kept.read_to_end(&mut content).unwrap();
    assert_eq!(content, vec![7; 1 << 20]);

    // Snapshots, back again, file systems.
    let names = || sh(there, "ls .zfs/snapshot");
    pool.follows("a snapshot", || drop(nacre(&["fs", "snapshot", "%@a"])), || names() == "a\n");
    assert_eq!(sh(there, "cat .zfs/snapshot/a/cut"), "cut");
    fs::write(at.join("cut"), "other").unwrap();
    fs::write(at.join("after"), "after").unwrap();
    pool.follows("what comes after it", || (), || pool.see("after").is_some() && pool.see("cut").unwrap() == "other");
    // The reader invalidates one file after the other in its kernel.
    let went_back = || pool.see("after").is_none() && pool.see("cut").unwrap() == "cut";
    pool.follows("going back", || drop(nacre(&["fs", "rollback", "%@a"])), went_back);
    pool.follows("a snapshot that goes", || drop(nacre(&["fs", "destroy", "%@a"])), || names().is_empty());
    let fill = || {
        nacre(&["fs", "create", "%/more"]);
        fs::write(at.join("more/a"), "a").unwrap();
    };
    pool.follows("a file system", fill, || pool.see("more/a").is_some());
    let more = format!("{}/more", pool.reader);
    assert!(nacre(&["fs", "list", "-H", "-o", "name,mounted", "-r", &pool.reader]).contains(&format!("{more}\tyes")));
    pool.follows(
        "a file system that goes",
        || drop(nacre(&["fs", "destroy", "%/more"])),
        || pool.see("more/a").is_none(),
    );

    // It says so, and has written nothing.
    let status = nacre(&["pool", "status", &pool.reader]);
    assert!(status.contains("follow: root "), "{status}");
    let json: serde_json::Value = serde_json::from_str(&nacre(&["pool", "status", "--json", &pool.reader])).unwrap();
    let bucket = json["pools"][&pool.reader]["vdevs"][&pool.reader]["vdevs"].as_object().unwrap();
    let asked = &bucket.values().next().unwrap()["requests"];
    assert_eq!((asked["puts"].as_u64(), asked["deletes"].as_u64()), (Some(0), Some(0)), "{json}");
    assert!(json["pools"][&pool.reader]["follows"]["generation"].as_u64() > Some(1), "{json}");
    println!("what it has asked: {asked}");
    drop((kept, gone));
    nacre(&["pool", "export", &pool.reader]);
    assert!(nacre(&["pool", "check", "%"]).starts_with("no problems: "));
    nacre(&["pool", "destroy", "%"]);
}

#[test]
fn a_reader_asks_for_nothing_that_it_may_not() {
    needs!(as_root());
    let pool = InBucket::made(&["-o", "log=none"]);
    let gate = pool.moto.gate_of_readers();
    let way = ["--endpoint", &gate.endpoint, "--profile", "test", "--credentials-file", "keys"];
    let nacre = |words: &[&str]| pool.yard.nacre(words);
    // Anybody might write there, if anybody could.
    pool.sh("echo first > at/a; chmod 777 at; sync at/a; sync at");
    // Root's reader, and an ordinary user's, on the same machine.
    let (reader, root) = (pool.yard.name("re"), pool.yard.path("there"));
    let import = ["pool", "import", "-o", "readonly=on", "-t", "-R", root.to_str().unwrap()];
    nacre(&[&import[..], &way, &[&pool.address, &reader]].concat());
    let user = Yard::of(Some(NOBODY));
    let (theirs, home) = (user.name("us"), user.path("home"));
    fs::copy(pool.yard.path("keys"), home.join("keys")).unwrap();
    let keys = home.join("keys").display().to_string();
    let way = ["--endpoint", &gate.endpoint, "--profile", "test", "--credentials-file", &keys];
    let import = ["pool", "import", "-o", "readonly=on", "-t", "-R", home.to_str().unwrap()];
    user.nacre(&[&import[..], &way, &[&pool.address, &theirs]].concat());
    let below = |root: &PathBuf| root.join(pool.at.strip_prefix("/").unwrap());
    let (there, at_home) = (below(&root), below(&home));
    // No other user gets in, not even root.
    let inside = format!("cd {}", at_home.display());
    let of_user = |script: &str| sh_as(&home, NOBODY, NOBODY, "", &format!("{inside} && {script}"));
    assert_eq!(sh(&there, "cat a"), "first\n");
    assert_eq!(of_user("cat a"), (0, "first\n".to_owned()));
    let (code, said) = of_user("echo x > b");
    assert!(code != 0 && said.contains("Read-only file system"), "{said}");
    pool.sh("echo second > at/a; mkdir at/d; echo new > at/d/n");
    nacre(&["fs", "create", "%/below"]);
    pool.sh("echo below > at/below/f");
    nacre(&["fs", "snapshot", "-r", "%@s"]);
    nacre(&["pool", "sync", "%"]);
    let all = "cat a d/n below/f .zfs/snapshot/s/a";
    let told = || sh(&there, &format!("{all} 2>&1 || true"));
    eventually("what is new", || told() == "second\nnew\nbelow\nsecond\n");
    eventually("what is new, by a user", || of_user(all) == (0, "second\nnew\nbelow\nsecond\n".to_owned()));
    nacre(&["fs", "destroy", "-r", "%/below"]);
    nacre(&["pool", "sync", "%"]);
    eventually("what is gone", || !there.join("below").exists() && of_user("test ! -e below").0 == 0);
    nacre(&["pool", "status", &reader]);
    nacre(&["pool", "export", &reader]);
    user.nacre(&["pool", "export", &theirs]);
    assert_eq!(gate.harmed(), 0, "{:?}", gate.heads());
    assert!(gate.requests() > 10);
    // A reader cannot write, and has changed nothing.
    nacre(&["pool", "export", "%"]);
    let before = pool.moto.keys("");
    let way = ["--endpoint", &gate.endpoint, "--profile", "test", "--credentials-file", "keys"];
    let (_, said) = pool.yard.refused(&[&["pool", "import"][..], &way, &[&pool.address]].concat());
    assert!(said.contains("403 AccessDenied"), "{said}");
    assert_eq!(pool.moto.keys(""), before);
    nacre(&["pool", "import", "%"]);
    nacre(&["pool", "destroy", "%"]);
}

/// The options of the mount at a place, if something is mounted there.
fn options_at(at: &std::path::Path) -> Option<String> {
    let table = crate::mounting::mount_table();
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == at.to_str())?;
    line.split(' ').nth(5).map(str::to_owned)
}

#[test]
fn a_reader_mounts_nothing_where_the_writer_wants_it() {
    needs!(as_root());
    let writer = Yard::new();
    let machine = Yard::new();
    let (name, reader) = (writer.name("wr"), machine.name("re"));
    let (at, outside, later) = (writer.path("at"), writer.path("outside"), writer.path("later"));
    for directory in [&writer.path("bucket"), &outside, &later] {
        fs::create_dir(directory).unwrap();
    }
    let address = format!("file://{}", writer.path("bucket").display());
    writer.nacre(&["pool", "create", "-m", at.to_str().unwrap(), &name, &address]);
    let place = format!("mountpoint={}", outside.display());
    writer.nacre(&["fs", "create", "-u", "-o", &place, &format!("{name}/evil")]);
    sh(&at, "cp /bin/true shell && chmod 4755 shell && mknod null c 1 3");
    std::os::unix::fs::symlink(&later, at.join("link")).unwrap();
    writer.nacre(&["pool", "sync", "%"]);
    let import = ["pool", "import", "-o", "readonly=on", "-t"];
    let said = machine.told(&[&import[..], &[&address, &reader]].concat());
    assert!(said.contains("nosuid, nodev") && said.contains("--trust"), "{said}");
    let below = PathBuf::from("/mnt").join(&reader);
    let there = |path: &PathBuf| below.join(path.strip_prefix("/").unwrap());
    for mounted in [there(&at), there(&outside)] {
        let options = options_at(&mounted).unwrap_or_else(|| panic!("{} is not mounted", mounted.display()));
        assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
    }
    assert_eq!(options_at(&outside), None);
    // Nor where the writer wants it later; also not by a link in the pool that is root's own.
    writer.nacre(&["fs", "set", &format!("mountpoint={}", later.display()), &format!("{name}/evil")]);
    writer.nacre(&["pool", "sync", "%"]);
    eventually("the new mount point", || options_at(&there(&later)).is_some());
    assert_eq!(options_at(&later), None);
    writer.nacre(&["fs", "set", &format!("mountpoint={}/link/x", at.display()), &format!("{name}/evil")]);
    writer.nacre(&["pool", "sync", "%"]);
    eventually("the mount's end", || options_at(&there(&later)).is_none());
    let last = writer.path("last");
    writer.nacre(&["fs", "create", "-o", &format!("mountpoint={}", last.display()), &format!("{name}/last")]);
    writer.nacre(&["pool", "sync", "%"]);
    eventually("what comes after that", || options_at(&there(&last)).is_some());
    assert!(options_at(&later.join("x")).is_none() && fs::read_dir(&later).unwrap().next().is_none());
    machine.nacre(&["pool", "export", &reader]);
    writer.nacre(&["fs", "set", &format!("mountpoint={}", outside.display()), &format!("{name}/evil")]);
    writer.nacre(&["pool", "export", "%"]);
    // That the machine before has lost the pool says nothing about what is in it.
    machine.nacre(&["pool", "import", "-f", "-t", &address, &reader]);
    assert!(options_at(&there(&at)).is_some_and(|options| options.contains("nosuid")));
    machine.nacre(&["pool", "export", &reader]);
    // Where root says so, from then on; and where it was made.
    machine.nacre(&["pool", "import", "--trust", "-t", &address, &reader]);
    for _ in 0..2 {
        assert!(options_at(&at).is_some_and(|options| !options.contains("nosuid")) && options_at(&outside).is_some());
        machine.nacre(&["pool", "export", &reader]);
        machine.nacre(&["pool", "import", "-t", &address, &reader]);
    }
    machine.nacre(&["pool", "export", &reader]);
    writer.nacre(&["pool", "import", "%"]);
    assert!(options_at(&at).is_some_and(|options| !options.contains("nosuid")));
    // What is the system's is no place for a pool that others can write to.
    let (_, said) = writer.refused(&["fs", "set", "mountpoint=/usr/local/bin", &format!("{name}/evil")]);
    assert!(said.contains("a directory of the system"), "{said}");
    let _ = fs::remove_dir_all(&below);
}
