//! Pools and the files that they lie on: a disk that has no room, copies of a device, names for one import.

// A failed expectation in a test is what the test reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod mounting;

use mounting::{as_root, eventually, finish, nacre, scratch, text};
use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Pools of one test in a scratch directory.
struct Yard {
    place: tempfile::TempDir,
    names: Vec<String>,
}

impl Yard {
    fn new() -> Yard {
        Yard { place: scratch(), names: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// A name for a pool that no other test has.
    fn name(&mut self, short: &str) -> String {
        let name = format!("{short}{}", std::process::id());
        self.names.push(name.clone());
        name
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(nacre());
        command.arg0("nacre").current_dir(self.place.path()).env("NACRE_STATE_DIR", self.path("state")).env("LC_ALL", "C").env("TZ", "UTC");
        finish(command.args(words))
    }

    /// Runs what has to succeed; its output.
    fn nacre(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs what has to be refused; what it says.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(!output.status.success(), "{words:?} succeeded: {}", text(&output.stdout));
        text(&output.stderr)
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        for name in &self.names {
            // Most are gone already.
            self.run(&["pool", "destroy", "-f", name]);
            // What its process had to say of failures: this test has made them.
            let _ = fs::remove_file(Path::new("/run/nacre").join(format!("{name}.log")));
        }
        mounting::clear(self.place.path());
    }
}

/// A disk with so much room more than what it holds, MiB.
fn room(disk: &Path, more: u64) {
    let held = fs::metadata(disk.join("img")).map_or(0, |image| std::os::unix::fs::MetadataExt::blocks(&image) / 2048);
    let size = format!("remount,size={}m", held + more);
    assert!(mounting::run("mount", ["-o", &size, disk.to_str().unwrap()]).status.success());
}

#[test]
fn a_disk_without_room_is_waited_for_given_up_or_fatal() {
    if !as_root() {
        return;
    }
    let mut yard = Yard::new();
    let (disk, at) = (yard.path("disk"), yard.path("at"));
    fs::create_dir(&disk).unwrap();
    assert!(mounting::run("mount", ["-t", "tmpfs", "-o", "size=40m", "tmpfs", disk.to_str().unwrap()]).status.success());
    let name = yard.name("fm");
    let create = ["pool", "create", "-o", "failmode=wait", "-O", "compression=off", "--size", "256M", "-m", at.to_str().unwrap()];
    yard.nacre(&[&create[..], &[&name, "disk/img"]].concat());
    let fill = |file: &str| {
        let target = format!("of={}", at.join(file).display());
        Command::new("dd").args(["if=/dev/urandom", &target, "bs=1M", "count=60", "conv=fsync", "status=none"]).spawn().unwrap()
    };
    let suspended = || yard.nacre(&["pool", "list", "-H", "-o", "health", &name]) == "SUSPENDED\n";
    // It goes on where it was when there is room.
    let mut filling = fill("kept");
    eventually("the pool waits", suspended);
    let status = yard.nacre(&["pool", "status", &name]);
    assert!(status.contains("everybody waits until it can be made") && status.contains("No space left"), "{status}");
    room(&disk, 60);
    yard.nacre(&["pool", "clear", &name]);
    assert!(filling.wait().unwrap().success());
    eventually("the pool goes on", || !suspended());
    let kept = fs::read(at.join("kept")).unwrap();
    assert_eq!(kept.len(), 60 << 20);
    // Whoever waits is let go with the pool.
    room(&disk, 8);
    let mut filling = fill("more");
    eventually("the pool waits", suspended);
    yard.nacre(&["pool", "export", "-f", &name]);
    assert!(!filling.wait().unwrap().success());
    room(&disk, 200);
    yard.nacre(&["pool", "import", "-d", disk.to_str().unwrap(), &name]);
    assert!(fs::read(at.join("kept")).unwrap() == kept);
    // As a crash.
    yard.nacre(&["pool", "set", "failmode=panic", &name]);
    room(&disk, 8);
    assert!(!fill("more").wait().unwrap().success());
    eventually("the end of the process", || !yard.run(&["pool", "list", &name]).status.success());
    room(&disk, 200);
    yard.nacre(&["pool", "import", "-d", disk.to_str().unwrap(), &name]);
    assert!(fs::read(at.join("kept")).unwrap() == kept);
    assert!(yard.nacre(&["pool", "check", &name]).contains("no problems"));
}

#[test]
fn of_several_copies_of_a_device_the_newest_is_imported() {
    if !as_root() {
        return;
    }
    let mut yard = Yard::new();
    let (name, at) = (yard.name("cp"), yard.path("at"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    fs::write(at.join("file"), b"old").unwrap();
    yard.nacre(&["pool", "export", &name]);
    fs::copy(yard.path("img"), yard.path("backup")).unwrap();
    let twins = yard.refused(&["pool", "import", "-d", ".", &name]);
    assert!(twins.contains("are copies of the same device") && twins.contains("-d FILE"), "{twins}");
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    fs::write(at.join("file"), b"new").unwrap();
    yard.nacre(&["pool", "export", &name]);
    let output = yard.run(&["pool", "import", "-d", ".", &name]);
    assert!(output.status.success() && text(&output.stderr).contains("backup: an older copy of device 0"), "{}", text(&output.stderr));
    assert_eq!(fs::read(at.join("file")).unwrap(), b"new");
}

#[test]
fn a_name_for_one_import_leaves_the_pool_its_own() {
    if !as_root() {
        return;
    }
    let mut yard = Yard::new();
    let (name, other, at) = (yard.name("tn"), yard.name("to"), yard.path("at"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    yard.nacre(&["fs", "create", &format!("{name}/a")]);
    yard.nacre(&["pool", "export", &name]);
    assert!(yard.refused(&["pool", "import", "-d", "img", "-t", &name]).contains("-t wants a name"));
    yard.nacre(&["pool", "import", "-d", "img", "-t", &name, &other]);
    yard.nacre(&["fs", "create", &format!("{other}/b")]);
    assert_eq!(yard.nacre(&["fs", "list", "-H", "-o", "name", "-r", &other]), format!("{other}\n{other}/a\n{other}/b\n"));
    assert!(yard.nacre(&["pool", "status", &other]).contains(&format!("pool: {other}\n")));
    yard.nacre(&["pool", "export", &other]);
    yard.nacre(&["pool", "import", "-d", "img", "-o", "readonly=on", "-t", &name, &other]);
    assert_eq!(yard.nacre(&["fs", "list", "-H", "-o", "name", &other]), format!("{other}\n"));
    yard.nacre(&["pool", "export", &other]);
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert_eq!(yard.nacre(&["fs", "list", "-H", "-o", "name", "-r", &name]), format!("{name}\n{name}/a\n{name}/b\n"));
}

#[test]
fn a_device_that_has_become_longer_is_used_to_its_end() {
    if !as_root() {
        return;
    }
    let mut yard = Yard::new();
    let (image, at) = (yard.path("img"), yard.path("at"));
    let name = yard.name("ax");
    let create = ["pool", "create", "-O", "compression=off", "--size", "256M", "-m", at.to_str().unwrap()];
    yard.nacre(&[&create[..], &[&name, "img"]].concat());
    let size = |property: &str| yard.nacre(&["pool", "get", "-H", "-p", "-o", "value", property, &name]).trim().to_owned();
    let bytes = |property: &str| size(property).parse::<u64>().unwrap();
    let (before, kept) = (bytes("size"), vec![7; 20 << 20]);
    fs::write(at.join("kept"), &kept).unwrap();
    assert!(yard.refused(&["pool", "online", &name]).contains("-e"));
    assert!(yard.refused(&["pool", "online", "-e", &name, "other"]).contains("no such device in pool"));
    // While it is imported, when it is told to.
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(512 << 20).unwrap();
    assert_eq!(size("expandsize"), "-");
    yard.nacre(&["pool", "online", "-e", &name, "img"]);
    let grown = bytes("size");
    assert!(grown > before + (200 << 20), "{before} {grown}");
    // More than there was room for before: some of it lies where the old end was.
    let much: Vec<u8> = (0..300_u32 << 20).map(|at| (at / 997) as u8).collect();
    fs::write(at.join("much"), &much).unwrap();
    fs::File::open(at.join("much")).unwrap().sync_all().unwrap();
    yard.nacre(&["pool", "export", &name]);
    // By an import only where the property says so.
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(768 << 20).unwrap();
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert_eq!(bytes("size"), grown);
    assert!(bytes("expandsize") > 200 << 20);
    yard.nacre(&["pool", "set", "autoexpand=on", &name]);
    yard.nacre(&["pool", "export", &name]);
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert!(bytes("size") > grown + (200 << 20));
    assert_eq!(size("expandsize"), "-");
    assert!(fs::read(at.join("much")).unwrap() == much && fs::read(at.join("kept")).unwrap() == kept);
    yard.nacre(&["pool", "export", &name]);
    assert!(yard.nacre(&["pool", "check", "-d", "img"]).contains("no problems"));
}
