//! `nacre copy` as a program: killed, out of space, as an ordinary user, and while another process
//! moves files.

use crate::mounting::{as_root, is_root, nacre, needs, run, scratch, sh, sh_as, text};
use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

fn copy<const N: usize>(words: [&OsStr; N]) -> Output {
    let arguments = std::iter::once(OsStr::new("copy")).chain(words);
    run(nacre(), arguments)
}

#[track_caller]
fn copies<const N: usize>(words: [&OsStr; N]) -> String {
    let output = copy(words);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Creates some thousand files whose content names their path.
fn plant(root: &Path, files: usize) {
    for number in 0..files {
        let directory = root.join(format!("{}/{}", number % 7, number % 63));
        fs::create_dir_all(&directory).unwrap();
        let line = format!("file {number}\n");
        fs::write(directory.join(number.to_string()), line.repeat(1 + number % 50)).unwrap();
    }
}

/// Files below a directory.
fn files(root: &Path, found: &mut Vec<std::path::PathBuf>) {
    let Ok(entries) = fs::read_dir(root) else { return };
    for entry in entries.map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() { files(&entry.path(), found) } else { found.push(entry.path()) }
    }
}

#[test]
fn a_copy_that_is_killed_again_and_again_becomes_whole() {
    let place = scratch();
    let (source, dest) = (place.path().join("source"), place.path().join("dest"));
    plant(&source, 4000);
    let mut present = 0;
    let mut kills = 0;
    loop {
        let mut child = Command::new(nacre())
            .arg("copy")
            .args([&source, &dest])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut whole = Vec::new();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            whole.clear();
            files(&dest, &mut whole);
            if whole.len() >= present + 500 {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
        };
        if let Some(status) = status {
            assert!(status.success());
            break;
        }
        kills += 1;
        whole.clear();
        files(&dest, &mut whole);
        present = whole.len();
        for path in whole.iter().filter(|path| !path.file_name().unwrap().to_string_lossy().starts_with(".nacre-copy"))
        {
            let from = source.join(path.strip_prefix(&dest).unwrap());
            assert_eq!(fs::read(path).unwrap(), fs::read(&from).unwrap(), "{}", path.display());
            assert_eq!(fs::metadata(path).unwrap().mtime_nsec(), fs::metadata(&from).unwrap().mtime_nsec());
        }
        assert!(kills < 50);
    }
    let told = copies([OsStr::new("--verify-only"), source.as_ref(), dest.as_ref()]);
    assert!(told.contains("all the same"), "{told}");
    assert_eq!(sh(place.path(), "diff -r source dest; find dest -name '.nacre-copy*'"), "");
    assert!(kills > 0, "it was never killed");
}

#[test]
fn a_copy_that_was_killed_before_its_first_note_goes_on() {
    let place = scratch();
    let (source, dest) = (place.path().join("source"), place.path().join("dest"));
    plant(&source, 3);
    fs::create_dir(&dest).unwrap();
    // The note is written under this name first.
    fs::write(dest.join(".nacre-copy-state.new"), "{\"vers").unwrap();
    copies([source.as_os_str(), dest.as_os_str()]);
    let mut there = Vec::new();
    files(&dest, &mut there);
    assert_eq!(there.len(), 3, "{there:?}");
}

#[test]
fn a_full_destination_ends_the_copy_which_goes_on_when_there_is_room() {
    needs!(as_root());
    let place = scratch();
    let (source, dest) = (place.path().join("source"), place.path().join("dest"));
    fs::create_dir_all(&dest).unwrap();
    plant(&source, 2000);
    sh(place.path(), "mount -t tmpfs -o size=2m tmpfs dest");
    let output = copy([source.as_ref(), dest.as_ref()]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(
        told.contains("No space left on device") && told.contains("make room in DEST; the same command again"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 2, "one reason, not one for each file: {told}");
    // As many inodes as files, so that the second limit is met as well.
    sh(place.path(), "mount -o remount,size=64m,nr_inodes=1500 dest");
    let output = copy([source.as_ref(), dest.as_ref()]);
    assert!(text(&output.stderr).contains("No space left on device"), "{}", text(&output.stderr));
    sh(place.path(), "mount -o remount,size=64m,nr_inodes=100000 dest");
    let told = copies([OsStr::new("--verify"), source.as_ref(), dest.as_ref()]);
    assert!(told.contains("went on with a copy that was interrupted") && told.contains("all the same"), "{told}");
    let same = sh(place.path(), "diff -r source dest; find dest -name '.nacre-copy*'");
    sh(place.path(), "umount dest");
    assert_eq!(same, "");
}

#[test]
fn an_ordinary_user_copies_what_he_may() {
    needs!(is_root());
    let place = scratch();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let script = format!(
        "mkdir -p s/closed s/shut; echo a >s/closed/a; ln s/closed/a s/b; printf '#!/bin/sh\\n' >s/program; chmod 4755 s/program; \
         chown 0:0 s/program; chmod 4755 s/program; echo secret >s/secret; chmod 600 s/secret; chown -R 1234:1234 s/closed s/b s; chown 0:0 s/secret s/program; \
         chmod 4755 s/program; chmod 555 s/closed; cp {} nacre; chmod 755 nacre",
        nacre().display()
    );
    sh(place.path(), &script);
    let (code, told) = sh_as(place.path(), 1234, 1234, "", "./nacre copy --verify s d");
    assert_eq!(code, 1, "{told}");
    assert!(
        told.contains("cannot open s/secret: Permission denied") && told.contains("1 could not be given their owner"),
        "{told}"
    );
    assert!(!told.contains("b:") && !told.contains("program:"), "{told}");
    let listed = sh(
        place.path(),
        "stat -c '%n %U %a' d/program d/closed d/closed/a | sed 's/UNKNOWN/user/'; [ d/b -ef d/closed/a ]",
    );
    assert_eq!(listed, "d/program user 755\nd/closed user 555\nd/closed/a user 644\n");
    // Readable now: the copy continues, through a directory that its owner may not write to.
    sh(
        place.path(),
        "chmod 644 s/secret; chmod 755 s/closed; echo new >s/closed/new; chown 1234:1234 s/closed/new; chmod 555 s/closed",
    );
    let (code, told) =
        sh_as(place.path(), 1234, 1234, "", "./nacre copy s d && cat d/secret d/closed/new && stat -c %a d/closed");
    assert_eq!(code, 0, "{told}");
    assert!(told.contains("secret\nnew\n555\n"), "{told}");
    let (code, told) = sh_as(place.path(), 1234, 1234, "", "./nacre copy --strict s e");
    assert!(code == 1 && told.contains("its owner cannot be given away by this user"), "{told}");
    sh(place.path(), "chmod -R u+w .");
}

/// Exchanges two names again and again.
fn juggle(one: &Path, other: &Path, over: &AtomicBool) {
    let exchange = rustix::fs::RenameFlags::EXCHANGE;
    while !over.load(Ordering::Relaxed) {
        // The name may not be there yet.
        let _ = rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, exchange);
    }
}

#[test]
fn links_put_in_place_of_directories_lead_nowhere() {
    let place = scratch();
    let at = |name: &str| place.path().join(name);
    fs::create_dir(at("outside")).unwrap();
    for number in 0..20 {
        fs::write(at("outside").join(number.to_string()), "outside").unwrap();
    }
    fs::create_dir_all(at("source/d")).unwrap();
    for number in 0..200 {
        fs::write(at("source/d").join(number.to_string()), "inside").unwrap();
    }
    for name in ["link", "dest link"] {
        symlink(at("outside"), at(name)).unwrap();
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| juggle(&at("source/d"), &at("link"), &over));
        scope.spawn(|| juggle(&at("dest/d"), &at("dest link"), &over));
        for _ in 0..30 {
            // Whether it comes to an end is not the question.
            copy([OsStr::new("--update"), OsStr::new("-q"), at("source").as_ref(), at("dest").as_ref()]);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(
        sh(&at("outside"), "cat * | tr -d e | sort -u; ls | wc -l").trim(),
        format!("{}\n20", "outsid".repeat(20))
    );
    let mut found = Vec::new();
    files(&at("dest"), &mut found);
    for path in found.iter().filter(|path| !path.is_symlink()) {
        let content = fs::read_to_string(path).unwrap();
        let own = path.file_name().unwrap().to_string_lossy().starts_with(".nacre-copy");
        assert!(own || content == "inside", "{} holds {content}", path.display());
    }
}

#[test]
fn what_is_told_can_be_read_by_programs() {
    let place = scratch();
    let (source, dest) = (place.path().join("source"), place.path().join("dest"));
    plant(&source, 300);
    let told = copies([OsStr::new("--json"), OsStr::new("--verify"), source.as_ref(), dest.as_ref()]);
    let lines: Vec<serde_json::Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = lines.last().unwrap();
    assert!(end["event"] == "end" && end["complete"] == true && end["entries"] == 300 && end["failures"] == 0, "{end}");
    assert!(end["memory"].as_u64().unwrap() > 0);
    fs::write(dest.join("0/0/0"), "other").unwrap();
    let output = copy([OsStr::new("--json"), OsStr::new("--verify-only"), source.as_ref(), dest.as_ref()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).lines().any(|line| line.contains("\"event\":\"failed\"") && line.contains("0/0/0")));
    for (code, words) in [(3, ["/no/such", "/tmp/x"]), (2, ["--jobs=0", "a"]), (2, ["--verify", "--verify-only"])] {
        assert_eq!(copy(words.map(OsStr::new)).status.code(), Some(code), "{words:?}");
    }
}

#[test]
fn a_signal_ends_the_copy_in_order() {
    let place = scratch();
    let (source, dest) = (place.path().join("source"), place.path().join("dest"));
    plant(&source, 3000);
    let child = Command::new(nacre())
        .arg("copy")
        .args([&source, &dest])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    crate::mounting::eventually("some files are there", || {
        let mut found = Vec::new();
        files(&dest, &mut found);
        found.len() > 20
    });
    crate::mounting::kill(child.id(), rustix::process::Signal::TERM);
    let output = child.wait_with_output().unwrap();
    if output.status.code() == Some(0) {
        // It was done already.
        return;
    }
    let told = text(&output.stderr);
    assert_eq!(
        (output.status.code(), told.as_str()),
        (Some(1), "nacre: interrupted\nnacre: the same command again goes on where this one ended\n")
    );
    let left = sh(&dest, "find . -name '.nacre-copy*'");
    assert_eq!(left, "./.nacre-copy-state\n", "nothing half is left");
    copies([source.as_ref(), dest.as_ref()]);
}
