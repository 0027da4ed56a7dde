//! `nacre fs` through the real program on real mounts: snapshots of unsynced writes, mounts that
//! follow renames, rollbacks, quotas, and an ordinary user without root.

use crate::mounting::{
    as_root, finish, is_mounted, nacre, needs,
    pools::{Pool, Yard},
    text,
};
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

impl Pool {
    /// Splits a command line, in which `%` stands for the pool's name.
    fn words(&self, line: &str) -> Vec<String> {
        line.split(' ').map(|word| word.replace('%', &self.name)).collect()
    }

    /// Runs a command line of `nacre fs`, in which `%` stands for the pool's name; returns its
    /// output, with `%` in place of the name.
    fn fs(&self, line: &str) -> String {
        let output = self.try_fs(line);
        assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout).replace(&self.name, "%")
    }

    fn try_fs(&self, line: &str) -> Output {
        finish(self.command("nacre").arg("fs").args(self.words(line)))
    }

    /// Runs a command that has to be refused; returns the exit code and the message.
    fn refuses(&self, line: &str) -> (i32, String) {
        let output = self.try_fs(line);
        assert!(!output.status.success(), "{line} succeeded: {}", text(&output.stdout));
        (output.status.code().unwrap(), text(&output.stderr).replace(&self.name, "%"))
    }

    fn check(&self) {
        self.nacre(&["pool", "sync", "%"]);
        self.nacre(&["pool", "check", "%"]);
    }
}

/// A user that exists on every system: fusermount3 looks up the name.
const NOBODY: u32 = 65_534;

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_snapshot_holds_what_was_written_and_not_synced() {
    needs!(as_root());
    let pool = Pool::made("snap", "256M", &[]);
    pool.fs("create %/a");
    let mut files = Vec::new();
    // Open, not synced, not closed: the kernel may keep all of it.
    for number in 0..20 {
        let mut file = fs::File::create(pool.at("").join(format!("a/{number}"))).unwrap();
        file.write_all(&vec![number; 100_000]).unwrap();
        files.push(file);
    }
    pool.fs("snapshot -r %@now");
    for (number, file) in files.iter_mut().enumerate() {
        file.write_all(b"later").unwrap();
        let then = pool.at("").join(format!("a/.zfs/snapshot/now/{number}"));
        assert_eq!(fs::read(then).unwrap(), vec![number as u8; 100_000]);
    }
    let reading = fs::File::open(pool.at("").join("a/.zfs/snapshot/now/3")).unwrap();
    assert_eq!(pool.refuses("destroy %/a@now").0, 5);
    drop(reading);
    pool.fs("clone %/a@now %/c");
    assert_eq!(fs::read(pool.at("").join("c/7")).unwrap(), vec![7; 100_000]);
    fs::write(pool.at("").join("c/7"), "mine").unwrap();
    pool.fs("promote %/c");
    assert_eq!(pool.fs("list -H -o name,origin -r %"), "%\t-\n%/a\t%/c@now\n%/c\t-\n");
    drop(files);
    assert_eq!(fs::metadata(pool.at("").join("a/7")).unwrap().len(), 100_005);
    pool.check();
}

#[test]
fn mounts_follow_names_and_properties() {
    needs!(as_root());
    let pool = Pool::made("move", "256M", &[]);
    let elsewhere = pool.path("elsewhere");
    for name in ["%/a", "%/a/b"] {
        pool.fs(&format!("create {name}"));
    }
    fs::write(pool.at("").join("a/b/f"), "content").unwrap();
    pool.fs(&format!("set mountpoint={} %/a", elsewhere.display()));
    assert_eq!(read(elsewhere.join("b/f")), "content");
    assert!(!pool.at("").join("a").exists(), "the directory that was made for the mount is still there");
    // One file in use below keeps everything where it is.
    let held = fs::File::open(elsewhere.join("b/f")).unwrap();
    let (code, said) = pool.refuses("inherit mountpoint %/a");
    assert_eq!(code, 5, "{said}");
    assert_eq!(read(elsewhere.join("b/f")), "content");
    drop(held);
    pool.fs("inherit mountpoint %/a");
    pool.fs("rename %/a %/z");
    assert_eq!(read(pool.at("").join("z/b/f")), "content");
    assert_eq!(pool.fs("get -H -o value mounted %/z/b"), "yes\n");
    pool.fs("set readonly=on %/z");
    assert_eq!(fs::write(pool.at("").join("z/b/f"), "x").unwrap_err().raw_os_error(), Some(30));
    pool.fs("set readonly=off %/z/b");
    fs::write(pool.at("").join("z/b/f"), "other").unwrap();
    // What lies below goes with it; its place stays, for an import that can make none.
    pool.fs("unmount %/z");
    assert_eq!(fs::read_dir(pool.at("").join("z")).unwrap().count(), 0);
    pool.fs("mount %/z");
    pool.fs("mount %/z/b");
    pool.nacre(&["pool", "export", &pool.name]);
    let device = pool.path("image");
    pool.nacre(&["pool", "import", "-d", device.to_str().unwrap(), "-o", "readonly=on", &pool.name]);
    assert_eq!(pool.fs("get -Ho value mounted %/z/b"), "yes\n");
    pool.nacre(&["pool", "export", &pool.name]);
    pool.nacre(&["pool", "import", "-d", device.to_str().unwrap(), &pool.name]);
    pool.fs("unmount %/z/b");
    assert!(!is_mounted(&pool.at("").join("z/b")));
    assert!(pool.refuses("unmount %/z/b").1.contains("not currently mounted"));
    pool.fs("mount -o ro %/z/b");
    assert_eq!(pool.fs("get -H -o value,source readonly %/z/b"), "on\ttemporary\n");
    assert_eq!(read(pool.at("").join("z/b/f")), "other");
    let listed = pool.fs("mount");
    assert!(
        listed.contains(&format!("%/z/b{:27}{}", "", pool.at("").join("z/b").display())) || listed.contains("%/z/b "),
        "{listed}"
    );
    assert_eq!(pool.refuses("destroy %/z").0, 5);
    pool.fs("destroy -r %/z");
    assert!(!pool.at("").join("z").exists());
    assert_eq!(pool.refuses("list %/z").0, 3);
    pool.check();
}

#[test]
fn a_file_system_goes_back_while_it_is_used() {
    needs!(as_root());
    let pool = Pool::made("back", "256M", &[]);
    pool.fs("create %/a");
    pool.fs("create %/a/below");
    let at = pool.at("").join("a");
    fs::write(at.join("kept"), "old").unwrap();
    pool.fs("snapshot %/a@1");
    let mut kept = fs::OpenOptions::new().read(true).write(true).open(at.join("kept")).unwrap();
    kept.write_all(b"new content").unwrap();
    fs::write(at.join("gone"), "x").unwrap();
    fs::create_dir(at.join("directory")).unwrap();
    let (stays, goes) = (fs::File::open(&at).unwrap(), fs::File::open(at.join("directory")).unwrap());
    assert_eq!(pool.fs("diff -H %/a@1").lines().map(|line| &line[..1]).collect::<String>(), "MM++");
    pool.fs("snapshot %/a@2");
    assert!(pool.refuses("rollback %/a@1").1.contains("use '-r' to force deletion"));
    // What lies below is in use: nothing changes, not even the newer snapshot.
    let below = fs::File::create(at.join("below/file")).unwrap();
    let (code, said) = pool.refuses("rollback -r %/a@1");
    assert_eq!(code, 5, "{said}");
    assert_eq!(read(at.join("kept")), "new content");
    assert_eq!(pool.fs("list -H -t snapshot -o name -r %"), "%/a@1\n%/a@2\n");
    drop(below);
    crate::mounting::eventually("nobody uses what lies below", || pool.try_fs("rollback -r %/a@1").status.success());
    // What was open is of no use, and nothing of it reaches the file that is there now; a directory
    // that is still there is.
    assert!(kept.write_all(b"late").is_err());
    assert!(kept.set_len(0).is_err() && fs::File::open(format!("/proc/self/fd/{}", kept.as_raw_fd())).is_err());
    assert!(fs::read_dir(format!("/proc/self/fd/{}", goes.as_raw_fd())).is_err());
    assert_eq!(read(format!("/proc/self/fd/{}/kept", stays.as_raw_fd())), "old");
    drop(kept);
    let mut names: Vec<String> =
        fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["below", "kept"]);
    assert_eq!(read(at.join("kept")), "old");
    assert!(is_mounted(&at.join("below")) && at.join("below/file").exists());
    pool.fs("set snapdir=visible %/a");
    assert!(fs::read_dir(&at).unwrap().any(|entry| entry.unwrap().file_name() == ".zfs"));
    assert!(is_mounted(&at.join("below")) && at.join("below/file").exists());
    fs::write(at.join("kept"), "older").unwrap();
    assert_eq!(read(at.join("kept")), "older");
    assert_eq!(pool.fs("list -H -t snapshot -o name -r %"), "%/a@1\n");
    pool.check();
}

#[test]
fn quotas_stop_the_call_that_would_exceed_them() {
    needs!(as_root());
    let pool = Pool::made("quota", "256M", &["-O", "compression=off"]);
    pool.fs("create -o quota=10M %/q");
    let at = pool.at("").join("q");
    let mut file = fs::File::create(at.join("f")).unwrap();
    let chunk: Vec<u8> = (0..1u32 << 20).map(|number| (number.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let refused = (0..20).find_map(|_| file.write_all(&chunk).err()).expect("twenty megabytes fit into ten");
    assert_eq!(refused.raw_os_error(), Some(122), "{refused}");
    file.sync_all().unwrap();
    let used: u64 = pool.fs("get -Hp -o value used %/q").trim().parse().unwrap();
    assert!((8 << 20..=10 << 20).contains(&used), "{used}");
    assert!(pool.refuses("set quota=5M %/q").1.contains("size is less than current used or reserved space"));
    pool.fs("set quota=20M userquota@1234=1M %/q");
    file.write_all(&chunk).unwrap();
    fs::set_permissions(&at, fs::Permissions::from_mode(0o777)).unwrap();
    let write = format!("head -c 3M /dev/urandom > {}", at.join("theirs").display());
    let (code, said) = crate::mounting::sh_as(pool.place.path(), 1234, 1234, "", &write);
    assert!(code != 0 && said.contains("quota exceeded"), "{said}");
    let table = pool.fs("userspace -Hp -n -o name,quota %/q");
    assert!(table.contains("1234\t1048576"), "{table}");
    pool.check();
}

#[test]
fn called_as_zfs_it_speaks_as_zfs() {
    needs!(as_root());
    let pool = Pool::made("zfs", "256M", &[]);
    let zfs = |line: &str| {
        let output = finish(pool.command("zfs").args(pool.words(line)));
        (output.status.code().unwrap(), (text(&output.stdout) + &text(&output.stderr)).replace(&pool.name, "%"))
    };
    assert_eq!(zfs("create %/a"), (0, String::new()));
    assert_eq!(zfs("create %/a"), (1, "cannot create '%/a': dataset already exists\n".to_owned()));
    assert_eq!(zfs("list -H -o name,mountpoint %/a"), (0, format!("%/a\t{}\n", pool.at("").join("a").display())));
    assert_eq!(zfs("get -Hp -o value quota %/a"), (0, "0\n".to_owned()));
    assert_eq!(zfs("snapshot %/a@1"), (0, String::new()));
    let (code, said) = zfs("destroy %/a");
    assert_eq!(
        (code, said.as_str()),
        (1, "cannot destroy '%/a': filesystem has children\nuse '-r' to destroy the following datasets:\n%/a@1\n")
    );
    assert_eq!(
        zfs("destroy -nvr %/a").1,
        "would destroy %/a@1\nwould destroy %/a\nwould reclaim 160B\n"
            .replace("160B", &reclaimed(&zfs("destroy -nvr %/a").1))
    );
    let (code, said) = zfs("frobnicate");
    assert!(
        code == 2 && said.starts_with("unrecognized command 'frobnicate'\nusage: zfs command args ...\n"),
        "{said}"
    );
    let (code, said) = zfs("rename %/a");
    assert!(code == 2 && said.starts_with("missing target dataset argument\nusage:\n\trename [-"), "{said}");
    let (code, said) = zfs("list -o nosuch");
    assert!(code == 2 && said.starts_with("bad property list: invalid property 'nosuch'\nusage:\n\tlist ["), "{said}");
    assert_eq!(zfs("create /x"), (1, "cannot create '/x': leading slash in name\n".to_owned()));
    assert_eq!(zfs("create nosuchpool/x"), (1, "cannot create 'nosuchpool/x': no such pool 'nosuchpool'\n".to_owned()));
    assert_eq!(zfs("create -V 1G %/v").0, 1);
    assert!(zfs("list -o all %/a").1.contains(" ACLINHERIT "));
    assert!(zfs("version").1.starts_with("zfs-2."));
    assert_eq!(
        zfs("list %/nothing"),
        (1, "cannot open '%/nothing': dataset does not exist\n'zfs list -t all' lists what there is\n".to_owned())
    );
    let (code, history) = (0, pool.nacre(&["pool", "history", &pool.name]));
    assert!(code == 0 && history.contains(&format!("zfs snapshot {}/a@1", pool.name)), "{history}");
    let json: serde_json::Value = serde_json::from_str(&zfs("get -j -p type %/a@1").1).unwrap();
    assert_eq!(json["datasets"]["%/a@1"]["properties"]["type"]["value"], "snapshot");
}

/// The pool's process would mount where the caller does not see it.
#[test]
fn another_mount_namespace_is_told() {
    needs!(as_root());
    let pool = Pool::made("ns", "256M", &[]);
    pool.fs("create -o canmount=noauto %/a");
    let apart = |program: &str, words: &[&str]| {
        let mut command = Command::new("unshare");
        command
            .args(["-m", "--propagation", "private", "--"])
            .arg(nacre())
            .args(words)
            .env("NACRE_STATE_DIR", pool.path("state"));
        if program != "nacre" {
            command = Command::new("unshare");
            let link = pool.path(program);
            std::os::unix::fs::symlink(nacre(), &link).unwrap();
            command
                .args(["-m", "--propagation", "private", "--"])
                .arg(link)
                .args(words)
                .env("NACRE_STATE_DIR", pool.path("state"));
        }
        let output = finish(&mut command);
        (output.status.code().unwrap(), text(&output.stderr).replace(&pool.name, "%"))
    };
    let [a, b] = ["a", "b"].map(|name| format!("{}/{name}", pool.name));
    let mounted = || pool.fs("list -rHo name,mounted %");
    let (code, said) = apart("nacre", &["fs", "mount", &a]);
    assert!(
        code != 0
            && said.starts_with("nacre: cannot mount: the pool's process")
            && said.contains("another mount namespace"),
        "{said}"
    );
    assert_eq!(mounted(), "%\tyes\n%/a\tno\n");
    pool.fs("mount %/a");
    let (code, said) = apart("nacre", &["fs", "unmount", &a]);
    assert!(code != 0 && said.starts_with("nacre: cannot unmount: "), "{said}");
    assert_eq!(mounted(), "%\tyes\n%/a\tyes\n");
    let (code, said) = apart("nacre", &["fs", "create", &b]);
    assert!(code == 0 && said.contains("what is mounted is seen there, not here"), "{said}");
    assert_eq!(mounted(), "%\tyes\n%/a\tyes\n%/b\tyes\n");
    pool.fs("unmount %/b");
    pool.fs("set mountpoint=legacy %/b");
    let at = pool.path("elsewhere");
    fs::create_dir(&at).unwrap();
    let (code, said) = apart("mount.fuse.nacre", &[&format!("fs:{b}"), at.to_str().unwrap(), "-o", "rw"]);
    assert!(code == 32 && said.contains("another mount namespace"), "{said}");
    assert!(!is_mounted(&at));
    // The file systems are mounted in the mount namespace of the importing process.
    pool.nacre(&["pool", "export", &pool.name]);
    let seen = format!(
        "{0} pool import -d {1} {2} && mountpoint -q {3} && {0} fs unmount {4} && {0} fs mount {4} && {0} pool export {2}",
        nacre().display(),
        pool.device.display(),
        pool.name,
        pool.at("").display(),
        pool.name,
    );
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-ec", &seen]).env("NACRE_STATE_DIR", pool.path("state"));
    let output = finish(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn mount_8_mounts_what_is_left_to_it() {
    needs!(as_root());
    let pool = Pool::made("leg", "256M", &[]);
    pool.fs("create -o mountpoint=legacy %/old");
    pool.fs("create -u %/a");
    let at = pool.path("elsewhere");
    fs::create_dir(&at).unwrap();
    let mount = |name: &str, words: &str| {
        let source = format!("fs:{}/{name}", pool.name);
        let output =
            finish(pool.command("mount.fuse.nacre").args([source.as_str(), at.to_str().unwrap(), "-o", words]));
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let (code, said) = pool.refuses("mount %/old");
    assert!(code == 1 && said.contains("legacy mountpoint\nnacre: use mount(8)"), "{said}");
    let (code, said) = mount("a", "rw");
    assert!(code == 32 && said.contains("mounts those whose mountpoint is 'legacy'"), "{said}");
    assert_eq!(
        mount("old", &format!("rw,noexec,nofail,x-systemd.automount,fsname=fs:{}/old", pool.name)),
        (0, String::new())
    );
    fs::write(at.join("file"), "content").unwrap();
    assert_eq!(pool.fs("get -Ho value,source exec %/old"), "off\ttemporary\n");
    // As `mount -a` does for each line whose source it does not find in the table of mounts.
    assert_eq!(mount("old", "rw"), (0, String::new()));
    let other = pool.path("other");
    fs::create_dir(&other).unwrap();
    let source = format!("fs:{}/old", pool.name);
    let moved = finish(pool.command("mount.fuse.nacre").args([source.as_str(), other.to_str().unwrap(), "-o", "rw"]));
    assert_eq!(moved.status.code(), Some(32), "{}", text(&moved.stderr));
    // Other names and properties leave it where mount(8) has put it.
    pool.fs("rename %/old %/a/new");
    pool.fs("set atime=off %/a/new");
    assert_eq!(read(at.join("file")), "content");
    assert_eq!(pool.fs("list -Ho mounted,mountpoint %/a/new"), "yes\tlegacy\n");
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(pool.fs("get -Ho value mounted %/a/new"), "no\n");
    assert_eq!(mount("a/new", "ro"), (0, String::new()));
    assert_eq!(fs::write(at.join("file"), "x").unwrap_err().raw_os_error(), Some(30));
    // One that gets a place of its own goes there.
    pool.fs("inherit mountpoint %/a/new");
    assert_eq!(read(pool.at("").join("a/new/file")), "content");
    assert!(!is_mounted(&at));
}

fn reclaimed(said: &str) -> String {
    said.trim_end().rsplit(' ').next().unwrap_or_default().to_owned()
}

#[test]
fn what_would_be_made_is_told_and_when_snapshots_have_changed() {
    needs!(as_root());
    let pool = Pool::made("dry", "256M", &[]);
    assert_eq!(
        pool.fs("create -nv -o compression=zstd -o quota=1M %/a"),
        "would create %/a\n\tcompression=zstd\n\tquota=1M\n"
    );
    assert_eq!(pool.fs("create -nP -o atime=off %/a"), "create\t%/a\nproperty\tatime\toff\n");
    assert_eq!(pool.fs("create -n %/a"), "");
    for (line, why) in [
        ("create -n %/x/y", "parent does not exist"),
        ("create -n -o quota=0 %/a", "none"),
        ("create -n -o reservation=1T %/a", "available space"),
        ("create -n %", "missing dataset name"),
    ] {
        let said = pool.refuses(line).1;
        assert!(said.contains(why), "{line}: {said}");
    }
    assert_eq!(pool.fs("create -npv %/x/y"), "would create %/x/y\n");
    assert_eq!(pool.fs("list -H -r -o name %"), "%\n", "nothing was made");
    assert_eq!(pool.fs("create -v %/a"), "create %/a\n");
    let changed = || pool.fs("get -Hp -o value snapshots_changed %/a").trim().to_owned();
    assert_eq!(changed(), "-");
    pool.fs("snapshot %/a@1");
    let first: u64 = changed().parse().unwrap();
    assert!(first > 1_700_000_000);
    pool.fs("destroy %/a@1");
    assert!(changed().parse::<u64>().unwrap() >= first);
    assert_eq!(pool.fs("get -Hp -o value snapshots_changed %"), "-\n");
}

#[test]
fn an_ordinary_user_needs_no_root() {
    needs!(as_root());
    if !Path::new("/usr/bin/fusermount3").exists() && !Path::new("/bin/fusermount3").exists() {
        crate::mounting::skip("fusermount3", "fusermount3 is not installed");
        return;
    }
    let pool = Pool::within(Yard::of(Some(NOBODY)), "user", "256M", &[]);
    // Side by side; below one another: user.rs.
    let (a, b) = (pool.path("home/a"), pool.path("home/b"));
    pool.fs(&format!("create -o mountpoint={} %/a", a.display()));
    let (code, said) = crate::mounting::sh_as(
        pool.place.path(),
        NOBODY,
        NOBODY,
        "",
        &format!("echo mine > {}/f && sync -f {}/f", a.display(), a.display()),
    );
    assert_eq!(code, 0, "{said}");
    pool.fs("snapshot -r %@1");
    pool.fs(&format!("clone -o mountpoint={} %/a@1 %/b", b.display()));
    let (code, said) = crate::mounting::sh_as(
        pool.place.path(),
        NOBODY,
        NOBODY,
        "",
        &format!("cat {}/f {}/.zfs/snapshot/1/f", b.display(), a.display()),
    );
    assert_eq!((code, said.as_str()), (0, "mine\nmine\n"));
    pool.fs("destroy %/b");
    pool.fs("rename %/a %/c");
    pool.fs("rollback %/c@1");
    assert!(pool.fs("userspace -Hn -o name %/c").contains(&NOBODY.to_string()));
    pool.check();
}

#[test]
fn a_user_does_not_choose_where_root_mounts() {
    needs!(as_root());
    let pool = Pool::made("links", "256M", &[]);
    let (home, secret) = (pool.path("home"), pool.path("secret"));
    for directory in [&home, &secret] {
        fs::create_dir(directory).unwrap();
    }
    std::os::unix::fs::chown(&home, Some(1000), Some(1000)).unwrap();
    let at = home.join("x");
    pool.fs(&format!("create -o mountpoint={} %/a", at.display()));
    assert!(is_mounted(&at));
    pool.fs("unmount %/a");
    assert!(!at.exists());
    std::os::unix::fs::symlink(&secret, &at).unwrap();
    let (_, said) = pool.refuses("mount %/a");
    assert!(said.contains("a symbolic link that is not root's alone"), "{said}");
    assert!(!is_mounted(&secret));
    // A part of the path as well.
    pool.fs(&format!("set mountpoint={} %/a", home.join("y/z").display()));
    pool.fs("mount %/a");
    pool.fs("unmount %/a");
    fs::remove_dir(home.join("y")).unwrap();
    std::os::unix::fs::symlink(&secret, home.join("y")).unwrap();
    pool.refuses("mount %/a");
    assert_eq!(fs::read_dir(&secret).unwrap().count(), 0);
    fs::remove_file(home.join("y")).unwrap();
    pool.fs("mount %/a");
    assert!(is_mounted(&home.join("y/z")));
    pool.fs("set mountpoint=none %/a");
}
