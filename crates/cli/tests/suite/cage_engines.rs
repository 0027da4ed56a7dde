//! Cages that the kernel keeps: images (`--engine=loop`) and quotas (`--engine=quota`). As root, on
//! images in a scratch directory.
//!
//! Engines that the kernel lacks are skipped with a message: many kernels have no project quotas
//! for ext4 or XFS.

use crate::mounting::cages::fill;
use crate::mounting::{finish, is_mounted, is_root, mount_entry, nacre, needs, run, scratch, sh, skip, text};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

fn ready() -> bool {
    if !is_root() {
        return skip("root", "only root can do this");
    }
    Path::new("/dev/loop-control").exists() || skip("loop", "there are no loop devices")
}

/// A scratch directory, and the end of whatever is mounted in it.
struct Place {
    root: tempfile::TempDir,
}

impl Drop for Place {
    fn drop(&mut self) {
        crate::mounting::clear(self.root.path());
    }
}

impl Place {
    fn new() -> Place {
        Place { root: scratch() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        fs::create_dir(&path).unwrap();
        path
    }

    fn command(&self) -> Command {
        let mut command = Command::new(nacre());
        command.env("NACRE_STATE_DIR", self.at("state")).env("LC_ALL", "C");
        command
    }

    /// Runs `nacre WORDS... DIRECTORY [MORE]`.
    fn nacre(&self, words: &[&str], directory: &Path, more: &[&str]) -> Output {
        finish(self.command().args(words).arg(directory).args(more))
    }

    /// Runs a command that has to succeed; returns its output.
    fn done(&self, words: &[&str], directory: &Path, more: &[&str]) -> String {
        let output = self.nacre(words, directory, more);
        let told = text(&output.stderr);
        assert!(output.status.success(), "nacre {words:?} {more:?}: {told}");
        told
    }

    /// Runs a command that has to fail with this exit code; returns its output.
    fn refused(&self, code: i32, words: &[&str], directory: &Path, more: &[&str]) -> String {
        let output = self.nacre(words, directory, more);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "nacre {words:?} {more:?}: {told}");
        told
    }

    fn status(&self, directory: &Path) -> Value {
        let output = self.nacre(&["cage", "status", "--json"], directory, &[]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        let cages = value.as_array().cloned().or_else(|| value["cages"].as_array().cloned()).unwrap();
        assert_eq!(cages.len(), 1, "{value}");
        cages[0].clone()
    }

    /// A file system with these options, mounted; none where this machine cannot.
    fn file_system(&self, kind: &str, options: &[&str], mount: &str) -> Option<PathBuf> {
        let (image, mountpoint) = (self.at("host.img"), self.directory("host"));
        File::create(&image).unwrap().set_len(400 * MIB).unwrap();
        let made = Command::new(format!("mkfs.{kind}"))
            .args(["-q", if kind == "ext4" { "-F" } else { "-f" }])
            .args(options)
            .arg(&image)
            .output();
        match made {
            Err(error) => {
                skip("images", &format!("mkfs.{kind}: {error}"));
                return None;
            }
            Ok(output) => assert!(output.status.success(), "mkfs.{kind}: {}", text(&output.stderr)),
        }
        let output = run("mount", [OsStr::new("-o"), OsStr::new(mount), image.as_os_str(), mountpoint.as_os_str()]);
        if !output.status.success() {
            skip("quotas", &format!("this kernel mounts no {kind} with {mount}: {}", text(&output.stderr).trim()));
            return None;
        }
        Some(mountpoint)
    }
}

/// Appends until nothing fits any more; bytes that were accepted, and the error.
fn append_all(path: &Path) -> (u64, i32) {
    fill(&mut OpenOptions::new().create(true).append(true).open(path).unwrap(), 1 << 16)
}

/// Bytes that a file takes of the host.
fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// Random content and its checksum, which `sha1sum -c` reads.
fn content(directory: &Path, mebibytes: u32) {
    sh(directory, &format!("head -c {mebibytes}M /dev/urandom > data; sha1sum data > ../sum"));
}

fn unharmed(directory: &Path) {
    sh(directory, "sha1sum -c ../sum");
}

#[test]
fn an_image_limits_and_grows_and_comes_back() {
    needs!(ready());
    for (kind, size, grown) in [("ext4", 48, 64), ("xfs", 304, 336), ("btrfs", 256, 288)] {
        let place = Place::new();
        let (directory, image) = (place.directory("d"), place.at("d.cage"));
        std::os::unix::fs::chown(&directory, Some(1234), Some(4321)).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o2771)).unwrap();
        let fstype = format!("--fstype={kind}");
        place.done(&["cage", "--engine=loop", &fstype, &format!("--size={size}M"), "--sparse"], &directory, &[]);
        let (mounted, device, ..) = mount_entry(&directory).unwrap();
        assert!(mounted == kind && device.starts_with("/dev/loop"), "{mounted} {device}");
        let metadata = fs::metadata(&directory).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (1234, 4321, 0o2771), "{kind}");
        assert_eq!(fs::metadata(&image).unwrap().mode() & 0o777, 0o600);
        content(&directory, 5);
        // The others cannot be small: most of it is set aside without being written.
        if kind != "ext4" {
            sh(&directory, "fallocate -l 200M aside");
        }

        let (accepted, errno) = append_all(&directory.join("full"));
        assert_eq!(errno, ENOSPC, "{kind}");
        assert!(accepted > 16 * MIB && accepted < size * MIB, "{kind}: {accepted}");
        assert_eq!(fs::metadata(&image).unwrap().len(), size * MIB);
        let status = place.status(&directory);
        assert_eq!(number(&status, "limit"), size * MIB);
        assert!(number(&status, "used") >= accepted && number(&status, "free") < 16 * MIB, "{status}");
        assert_eq!((status["engine"].as_str(), status["attached"].as_bool()), (Some("loop"), Some(true)));

        place.done(&["cage", "resize"], &directory, &[&format!("{grown}M")]);
        assert_eq!(fs::metadata(&image).unwrap().len(), grown * MIB);
        let (more, errno) = append_all(&directory.join("full"));
        assert_eq!(errno, ENOSPC, "{kind}");
        assert!(more > 8 * MIB, "{kind}: {more}");
        fs::remove_file(directory.join("full")).unwrap();
        unharmed(&directory);

        place.done(&["umount"], &directory, &[]);
        assert!(!is_mounted(&directory));
        assert_eq!(place.status(&directory)["attached"].as_bool(), Some(false));
        let told = place.refused(1, &["cage", "--engine=loop", "--size=1G"], &directory, &[]);
        assert!(told.contains("nacre cage resize"), "{told}");
        // The options of the creation need not be repeated.
        place.done(&["cage"], &directory, &[]);
        assert_eq!(mount_entry(&directory).unwrap().0, kind);
        unharmed(&directory);
        place.refused(2, &["cage", "remove"], &directory, &[]);
        // Mounting by fstab's line, as the status prints it.
        place.done(&["umount"], &directory, &[]);
        let status = place.status(&directory);
        let notes: Vec<&str> = status["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let line = notes.iter().find_map(|note| note.split_once("fstab: ")).unwrap_or_else(|| panic!("{notes:?}")).1;
        let columns: Vec<&str> = line.split(' ').collect();
        // mount(8) calls it by this name.
        let helper = place.at("mount.fuse.nacre");
        std::os::unix::fs::symlink(nacre(), &helper).unwrap();
        let mut mount = Command::new(&helper);
        mount.env("NACRE_STATE_DIR", place.at("state"));
        let output = finish(mount.args([columns[0], columns[1], "-o", columns[3]]));
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        assert_eq!(mount_entry(&directory).unwrap().0, kind);
        unharmed(&directory);
        place.done(&["cage", "remove", "--yes"], &directory, &[]);
        assert!(!image.exists() && !is_mounted(&directory));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }
}

#[test]
fn an_image_shrinks_where_its_file_system_can() {
    needs!(ready());
    for (kind, size, small, too_small) in
        [("ext4", 96, 64, "16M"), ("btrfs", 400, 300, "256M"), ("xfs", 320, 304, "300M")]
    {
        let place = Place::new();
        let size = format!("--size={size}M");
        let (directory, image) = (place.directory("d"), place.at("d.cage"));
        place.done(&["cage", "--engine=loop", &format!("--fstype={kind}"), &size, "--sparse"], &directory, &[]);
        // Something that has to move: it lies behind what is removed.
        let first = if kind == "ext4" { "head -c 50M /dev/zero > first" } else { "fallocate -l 220M first" };
        sh(&directory, first);
        content(&directory, 15);
        fs::remove_file(directory.join("first")).unwrap();
        let length = fs::metadata(&image).unwrap().len();
        let to = format!("{small}M");
        if kind == "xfs" {
            let told = place.refused(1, &["cage", "resize"], &directory, &[&to]);
            assert!(told.contains("XFS cannot shrink"), "{told}");
            assert_eq!(fs::metadata(&image).unwrap().len(), length);
            continue;
        }
        if kind == "ext4" {
            let open = File::open(directory.join("data")).unwrap();
            let told = place.refused(5, &["cage", "resize"], &directory, &[&to]);
            assert!(told.contains("/data open"), "{told}");
            drop(open);
        }
        place.done(&["cage", "resize"], &directory, &[&to]);
        assert!(is_mounted(&directory), "{kind}");
        assert_eq!(fs::metadata(&image).unwrap().len(), small * MIB);
        assert!(number(&place.status(&directory), "free") < small * MIB);
        unharmed(&directory);
        // What does not fit is refused, and all is as it was.
        sh(&directory, if kind == "ext4" { "head -c 20M /dev/zero > more" } else { "fallocate -l 250M more" });
        place.refused(1, &["cage", "resize"], &directory, &[too_small]);
        assert!(is_mounted(&directory), "{kind}");
        assert_eq!(number(&place.status(&directory), "limit"), small * MIB);
        unharmed(&directory);
    }
}

#[test]
fn a_shrinking_that_is_killed_loses_nothing() {
    needs!(ready());
    let place = Place::new();
    let (directory, image) = (place.directory("d"), place.at("d.cage"));
    place.done(&["cage", "--engine=loop", "--size=128M", "--sparse"], &directory, &[]);
    sh(&directory, "head -c 60M /dev/zero > first");
    content(&directory, 30);
    fs::remove_file(directory.join("first")).unwrap();
    for milliseconds in [5, 20, 40, 70, 120] {
        let mut command = place.command();
        command.args(["cage", "resize"]).arg(&directory).arg("80M").stdout(Stdio::null()).stderr(Stdio::null());
        // With the programs that it has started.
        let mut child = std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        let group = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        child.wait().unwrap();
        if !is_mounted(&directory) {
            place.done(&["cage", "--engine=loop"], &directory, &[]);
        }
        unharmed(&directory);
        assert!(!place.at("d.cage.new").exists());
        // The same command again brings it to its end.
        place.done(&["cage", "resize"], &directory, &["80M"]);
        assert_eq!(fs::metadata(&image).unwrap().len(), 80 * MIB);
        unharmed(&directory);
        place.done(&["cage", "resize"], &directory, &["128M"]);
    }
    place.done(&["umount"], &directory, &[]);
    let checked = run("e2fsck", [OsStr::new("-fn"), image.as_os_str()]);
    assert!(checked.status.success(), "{}", text(&checked.stdout));
}

#[test]
fn room_for_an_image_is_set_aside_unless_told_otherwise() {
    needs!(ready());
    let place = Place::new();
    let (solid, sparse) = (place.directory("solid"), place.directory("sparse"));
    place.done(&["cage", "--engine=loop", "--size=64M"], &solid, &[]);
    let told = place.done(&["cage", "--engine=loop", "--size=64M", "--sparse"], &sparse, &[]);
    assert!(told.contains("only as it fills"), "{told}");
    assert!(allocated(&place.at("solid.cage")) >= 64 * MIB);
    assert!(allocated(&place.at("sparse.cage")) < 16 * MIB);
    // Given back by discard, taken again by the same size.
    sh(&solid, "fstrim . || true");
    place.done(&["cage", "resize"], &solid, &["64M"]);
    assert!(allocated(&place.at("solid.cage")) >= 64 * MIB);
    place.done(&["cage", "resize"], &solid, &["80M"]);
    assert!(allocated(&place.at("solid.cage")) >= 80 * MIB);
    // More than the host has is refused, and changes nothing.
    let told = place.refused(1, &["cage", "resize"], &solid, &["8000T"]);
    assert!(told.contains("cannot give its size"), "{told}");
    assert_eq!(fs::metadata(place.at("solid.cage")).unwrap().len(), 80 * MIB);
    let none = place.directory("none");
    place.refused(1, &["cage", "--engine=loop", "--size=8000T"], &none, &[]);
    assert!(!place.at("none.cage").exists() && !place.at("none.cage.new").exists() && !is_mounted(&none));
}

#[test]
fn an_image_is_refused_where_it_would_do_harm() {
    needs!(ready());
    let place = Place::new();
    let (full, empty) = (place.directory("full"), place.directory("empty"));
    fs::write(full.join("file"), "content").unwrap();
    let told = place.refused(1, &["cage", "--engine=loop", "--size=64M"], &full, &[]);
    assert!(told.contains("not empty") && told.contains("--engine=fuse"), "{told}");
    for (words, code, why) in [
        (&["--size=64K"][..], 2, "16 MiB"),
        (&["--size=64M", "--fstype=xfs"], 2, "300 MiB"),
        (&["--size=64M", "--fstype=btrfs"], 2, "128 MiB"),
        (&[], 2, "--size"),
        (&["--size=400M", "--fstype=xfs", "--inodes=100"], 2, "--inodes"),
        (&["--size=64M", "--soft=80%"], 2, "--soft"),
    ] {
        let told = place.refused(code, &[&["cage", "--engine=loop"], words].concat(), &empty, &[]);
        assert!(told.contains(why), "{words:?}: {told}");
    }
    let inside = format!("--image={}", empty.join("image").display());
    place.refused(2, &["cage", "--engine=loop", "--size=64M", &inside], &empty, &[]);
    // Neither what is no image nor one that others could have written is taken up.
    let image = place.at("image");
    fs::write(&image, "mine").unwrap();
    let named = format!("--image={}", image.display());
    place.refused(1, &["cage", "--engine=loop", "--size=64M", &named], &empty, &[]);
    assert_eq!(fs::read(&image).unwrap(), b"mine");
    assert!(!is_mounted(&empty) && !is_mounted(&full));
    assert_eq!(
        fs::read_dir(place.root.path()).unwrap().filter(|entry| entry.as_ref().unwrap().file_name() != "state").count(),
        3
    );
    fs::remove_file(&image).unwrap();

    place.done(&["cage", "--engine=loop", "--size=64M", "--inodes=100", &named], &empty, &[]);
    let status = place.status(&empty);
    assert!((100..300).contains(&number(&status, "inode_limit")), "{status}");
    let made = (0..300).find(|number| File::create(empty.join(number.to_string())).is_err());
    assert!(made.is_some_and(|made| made < 300));
    // One image has one mount.
    let told = place.refused(5, &["cage", "--engine=loop", &named], &empty, &[]);
    assert!(told.contains("in use already"), "{told}");
    // Not shown elsewhere than asked for.
    place.done(&["umount"], &empty, &[]);
    let elsewhere = place.directory("elsewhere");
    place.done(&["cage", "--engine=loop", &named], &empty, &[elsewhere.to_str().unwrap()]);
    assert!(is_mounted(&elsewhere) && !is_mounted(&empty));
    assert!(elsewhere.join("1").exists());
}

/// Expected behavior of quotas on a type of file system.
struct Expected {
    errno: i32,
    root_too: bool,
    inodes: bool,
    df: bool,
}

/// A cage of 10 MiB in a directory with 3 MiB in it.
fn quota(place: &Place, directory: &Path, expected: &Expected) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
    sh(
        directory,
        "mkdir sub; head -c 3M /dev/zero > sub/old; ln sub/old sub/link; ln -s old sub/symlink; mkfifo fifo; sync -f .",
    );
    let words: &[&str] = if expected.inodes { &["--inodes=20"] } else { &[] };
    place.done(&[&["cage", "--engine=quota", "--size=10M"], words].concat(), directory, &[]);
    let status = place.status(directory);
    assert_eq!((number(&status, "limit"), status["attached"].as_bool()), (10 * MIB, Some(true)), "{status}");
    assert!((3 * MIB..4 * MIB).contains(&number(&status, "used")), "{status}");
    place.refused(5, &["cage", "--engine=quota", "--size=10M"], directory, &[]);

    if expected.root_too {
        let (accepted, errno) = append_all(&directory.join("root"));
        assert_eq!(errno, expected.errno);
        assert!(accepted <= 7 * MIB, "{accepted}");
        sh(directory, "rm root; sync -f .");
    }
    let told = sh(
        directory,
        "setpriv --reuid=1000 --regid=1000 --clear-groups head -c 20M /dev/zero 2>&1 > user || true; sync -f .",
    );
    assert!(told.contains(if expected.errno == ENOSPC { "No space left" } else { "quota exceeded" }), "{told}");
    let used: u64 = sh(directory, "du -sk . | cut -f1").trim().parse().unwrap();
    assert!((9 * 1024..=10 * 1024).contains(&used), "{used}");
    if expected.df {
        let stat = rustix::fs::statvfs(directory).unwrap();
        // Less than a piece may be left.
        assert_eq!(stat.f_blocks * stat.f_frsize, 10 * MIB);
        assert!(stat.f_bavail * stat.f_frsize < 64 << 10, "{}", stat.f_bavail);
    }
    // More room for a cage that is full.
    place.done(&["cage", "resize"], directory, &["12M"]);
    assert_eq!(number(&place.status(directory), "limit"), 12 * MIB);
    sh(directory, "head -c 1M /dev/zero >> user; sync -f .");
    // Less than is in use: nothing can grow.
    place.done(&["cage", "resize"], directory, &["5M"]);
    let (code, told) =
        crate::mounting::sh_as(directory, 1000, 1000, "", "head -c 1M /dev/zero > more && sync -f . || exit 7");
    assert_eq!(code, 7, "{told}");
    sh(directory, "rm -f user more; sync -f .");
    if expected.inodes {
        let made = sh(
            directory,
            "setpriv --reuid=1000 --regid=1000 --clear-groups sh -c 'for i in $(seq 30); do touch i$i || break; done' 2>/dev/null; find . -name 'i*' | wc -l",
        );
        assert!(made.trim().parse::<u64>().unwrap() < 20, "{made}");
    }
    place.done(&["umount"], directory, &[]);
    sh(directory, "head -c 20M /dev/zero > free; sync -f .");
    let output = place.nacre(&["cage", "status"], directory, &[]);
    assert!(!output.status.success());
}

#[test]
fn a_subvolume_is_limited_by_its_qgroup() {
    needs!(ready());
    let place = Place::new();
    let Some(host) = place.file_system("btrfs", &[], "loop") else { return };
    sh(&host, "btrfs subvolume create sub; mkdir plain");
    let told = place.refused(1, &["cage", "--engine=quota", "--size=10M"], &host.join("plain"), &[]);
    assert!(told.contains("subvolume create"), "{told}");
    let told = place.refused(1, &["cage", "--engine=quota", "--size=10M"], &host.join("sub"), &[]);
    assert!(told.contains("btrfs quota enable"), "{told}");
    sh(&host, "btrfs quota enable .");
    place.refused(2, &["cage", "--engine=quota", "--size=10M", "--inodes=5"], &host.join("sub"), &[]);
    quota(&place, &host.join("sub"), &Expected { errno: EDQUOT, root_too: true, inodes: false, df: false });
    // The directory is gone before its cage is.
    place.done(&["cage", "--engine=quota", "--size=10M"], &host.join("sub"), &[]);
    sh(&host, "btrfs subvolume delete sub");
    place.done(&["cage", "remove"], &host.join("sub"), &[]);
}

#[test]
fn a_directory_of_ext4_is_limited_by_its_project() {
    needs!(ready());
    let place = Place::new();
    let options = ["-O", "project,quota", "-E", "quotatype=prjquota"];
    let Some(host) = place.file_system("ext4", &options, "loop,prjquota") else { return };
    fs::create_dir(host.join("d")).unwrap();
    quota(&place, &host.join("d"), &Expected { errno: EDQUOT, root_too: false, inodes: true, df: true });
}

#[test]
fn a_directory_of_xfs_is_limited_by_its_project() {
    needs!(ready());
    let place = Place::new();
    let Some(host) = place.file_system("xfs", &[], "loop,prjquota") else { return };
    let directory = host.join("d");
    fs::create_dir(&directory).unwrap();
    quota(&place, &directory, &Expected { errno: ENOSPC, root_too: true, inodes: true, df: true });
    // Projects do not nest.
    place.done(&["cage", "--engine=quota", "--size=10M"], &directory, &[]);
    let told = place.refused(1, &["cage", "--engine=quota", "--size=1M"], &directory.join("sub"), &[]);
    assert!(told.contains("do not nest"), "{told}");
    // auto takes what keeps every promise: an owner can take his files out of a project.
    fs::create_dir(host.join("auto")).unwrap();
    let auto = place.done(&["cage", "--engine=auto", "--explain", "--size=10M"], &host.join("auto"), &[]);
    assert!(auto.contains("fuse (an owner can take his files out of a quota of XFS)"), "{auto}");
    // The directory is gone before its cage is.
    fs::remove_dir_all(&directory).unwrap();
    place.done(&["cage", "remove"], &directory, &[]);
}

#[test]
fn where_there_are_no_quotas_it_says_how_to_get_them() {
    needs!(ready());
    for (kind, how) in [("ext4", "tune2fs -O project,quota"), ("xfs", "mount -o prjquota")] {
        let place = Place::new();
        let Some(host) = place.file_system(kind, &[], "loop") else { return };
        let directory = host.join("d");
        fs::create_dir(&directory).unwrap();
        let told = place.refused(1, &["cage", "--engine=quota", "--size=10M"], &directory, &[]);
        assert!(told.contains("no project quotas") || told.contains("not on"), "{told}");
        assert!(told.contains(how), "{told}");
    }
    let place = Place::new();
    let directory = place.directory("tmpfs");
    sh(&directory, "mount -t tmpfs none .");
    let told = place.refused(1, &["cage", "--engine=quota", "--size=10M"], &directory, &[]);
    assert!(told.contains("tmpfs limits only a whole mount"), "{told}");
    place.refused(
        2,
        &["cage", "--engine=quota", "--size=10M"],
        &directory,
        &[place.directory("elsewhere").to_str().unwrap()],
    );
}
