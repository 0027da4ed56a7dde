//! Surroundings of a mount: bind mounts inside the source, signals that the parent process has
//! ignored, mounts that no process serves, programs that map files that they append to.

use crate::mounting::{Bind, Fixture, as_root, finish, is_mounted, nacre, needs, run, sh, text};
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

#[test]
fn a_process_stays_where_it_is_when_its_directory_shows_elsewhere_too() {
    needs!(as_root());
    for coherence in ["--coherence=watch", "--coherence=exclusive", "--coherence=revalidate"] {
        // Created before the watch begins: an event about a directory that a process is in already
        // takes its name from the working directory, and pwd(1) then searches for it by inode
        // number, which both places have in common.
        let fixture = Fixture::mirror_of(&[coherence], |source| {
            drop(sh(source, "mkdir -p a/below b; echo content > a/below/file"))
        });
        let _bind = Bind::new(&fixture.below("a"), &fixture.below("b"));
        let place = sh(&fixture.at("a/below"), "ls -l ../../b/below >/dev/null; cat ../../b/below/file; /bin/pwd -P");
        assert_eq!(place, format!("content\n{}\n", fixture.at("a/below").display()), "{coherence}");
        // What is made at one place is there at the other, also where it was missed before.
        assert!(!fixture.at("b/below/new").exists());
        fs::write(fixture.at("a/below/new"), "new").unwrap();
        crate::mounting::eventually("it shows at the other place", || {
            fs::read(fixture.at("b/below/new")).is_ok_and(|content| content == b"new")
        });
        assert_eq!(
            fs::metadata(fixture.at("a/below/new")).unwrap().ino(),
            fs::metadata(fixture.at("b/below/new")).unwrap().ino()
        );
    }
}

#[test]
fn the_source_bound_inside_itself_is_no_error() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], |source| drop(sh(source, "mkdir -p inner/below; echo content > file")));
    let _bind = Bind::new(&fixture.source, &fixture.below("inner"));
    let listed = sh(&fixture.mountpoint, "cat inner/file; ls -a inner inner/inner; cd inner && /bin/pwd -P");
    let native = sh(&fixture.source, "cat inner/file; ls -a inner inner/inner");
    assert_eq!(listed, format!("{native}{}\n", fixture.at("inner").display()));
}

#[test]
fn whoever_starts_us_may_ignore_the_ends_of_children() {
    needs!(as_root());
    let fixture = Fixture::bare();
    fs::write(fixture.below("file"), "content").unwrap();
    let start = |extra: &[&str]| {
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD").arg(nacre()).arg("mirror").args(extra);
        finish(command.args([&fixture.source, &fixture.mountpoint]))
    };
    let output = start(&[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
    assert!(run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]).status.success());
    // How the second process ended is what the first one says.
    let output = start(&["--force-user=no-such-user-here"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("no-such-user-here") && !text(&output.stderr).contains("child"),
        "{}",
        text(&output.stderr)
    );
    assert!(!is_mounted(&fixture.mountpoint));
}

#[test]
fn a_mount_of_the_kernel_alone_is_called_so_where_a_process_would_be_asked() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let words = ["mirror", "--engine=kernel"].map(OsStr::new);
    let output = run(nacre(), words.into_iter().chain([fixture.source.as_os_str(), fixture.mountpoint.as_os_str()]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = run(nacre(), [OsStr::new("reload"), fixture.mountpoint.as_os_str()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the kernel alone serves") && said.contains("--engine=fuse"), "{said}");
    assert!(run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]).status.success());
}

#[test]
fn a_mapping_of_a_file_that_is_open_for_appending_is_written_in_its_place() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough()] {
        let fixture = Fixture::mirror_of(options, |source| fs::write(source.join("file"), vec![b'.'; 8192]).unwrap());
        let file = fs::OpenOptions::new().read(true).append(true).open(fixture.at("file")).unwrap();
        let mapped = nacre_sys::mapping::SharedMapping::new(&file, 8192, true).unwrap();
        mapped.write(5000, b"stored").unwrap();
        mapped.sync().unwrap();
        let content = fs::read(fixture.below("file")).unwrap();
        assert_eq!(content.len(), 8192, "{options:?}");
        assert_eq!(&content[5000..5006], b"stored", "{options:?}");
    }
}

#[test]
fn the_flag_for_appending_is_a_matter_of_the_moment() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(crate::mounting::without_passthrough(), |source| {
        fs::write(source.join("file"), "start").unwrap()
    });
    let mut file = fs::OpenOptions::new().read(true).append(true).open(fixture.at("file")).unwrap();
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty()).unwrap();
    file.write_all_at(b"START", 0).unwrap();
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"START");
    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::APPEND).unwrap();
    // Behind our back: the end is where it is by now.
    sh(&fixture.source, "printf ' theirs' >> file");
    file.write_all(b" ours").unwrap();
    assert_eq!(fs::read(fixture.below("file")).unwrap(), b"START theirs ours");
}

/// A machine without the device, without fusermount3, and with every name taken: doctor reports it,
/// and its command provides the missing part.
#[test]
fn doctor_names_what_is_missing() {
    needs!(as_root());
    let place = crate::mounting::scratch();
    let without = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "sh", "-euc", script]).env("NACRE", nacre());
        finish(command.current_dir(place.path()))
    };
    // The names of other programs are those that the search path finds.
    let path = place.path().join("programs");
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::symlink(nacre(), path.join("bindfs")).unwrap();
    fs::write(path.join("zpool"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(path.join("zpool"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = without("mount -t tmpfs none /dev; PATH=$PWD/programs:$PATH \"$NACRE\" doctor");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    // A container is given the device, a machine loads the module.
    let container = ["/run/.containerenv", "/.dockerenv"].iter().any(|mark| fs::exists(mark).unwrap());
    let given = if container { "--device /dev/fuse" } else { "# modprobe fuse" };
    for line in ["MISSING fuse", given, "/bindfs is this program", "zpool           "] {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert!(said.lines().any(|line| line.contains("zpool") && line.contains("another program, and stays")), "{said}");
    let output = without("mount -t tmpfs none /dev; \"$NACRE\" doctor --json");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["works"], false);
    let found = json["findings"].as_array().unwrap().iter().find(|found| found["name"] == "fuse").unwrap();
    assert_eq!(found["state"], "missing");
    assert_eq!(found["command"].as_str(), (!container).then_some(given));
    let output = run(nacre(), ["doctor", "--json"]);
    assert!(output.status.success());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["works"], true);
}
