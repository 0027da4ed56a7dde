//! File systems of pools in which names are the same though their bytes differ, by the programs
//! that people use.

use crate::mounting::{as_root, errno, needs, pools::Pool, sh};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::{fs, os::unix::ffi::OsStrExt, path::Path, process::Command};

fn listed(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn names_are_found_by_any_case() {
    needs!(as_root());
    let pool = Pool::made("psp", "256M", &["-O", "casesensitivity=insensitive"]);
    let at = pool.at("");
    let is = |name: &str| at.join(name).exists();
    // Answers about one spelling must not hold for another one in the kernel's cache: found and
    // missing, before and after each change.
    fs::write(at.join("foo"), "1").unwrap();
    assert!(is("FOO") && is("Foo") && is("foo") && !is("bar") && !is("BAR"));
    assert_eq!(errno(fs::create_dir(at.join("FoO"))), 17);
    assert_eq!(errno(fs::hard_link(at.join("foo"), at.join("fOO"))), 17);
    fs::hard_link(at.join("FOO"), at.join("Bar")).unwrap();
    assert!(is("bar") && is("BAR"));
    assert_eq!(listed(&at), ["Bar", "foo"]);
    fs::remove_file(at.join("FOO")).unwrap();
    assert!(!is("foo") && !is("Foo") && !is("FOO") && is("BAR"));
    fs::rename(at.join("BAR"), at.join("Foo")).unwrap();
    assert!(is("foo") && is("FOO") && !is("bar") && !is("Bar"));
    assert_eq!(listed(&at), ["Foo"]);
    fs::write(at.join("other"), "2").unwrap();
    let no_replace = renameat_with(CWD, at.join("other"), CWD, at.join("FOO"), RenameFlags::NOREPLACE);
    assert_eq!(no_replace, Err(rustix::io::Errno::EXIST));
    renameat_with(CWD, at.join("OTHER"), CWD, at.join("FOO"), RenameFlags::EXCHANGE).unwrap();
    assert_eq!(
        (fs::read(at.join("fOo")).unwrap(), listed(&at)),
        (b"2".to_vec(), vec!["Foo".to_owned(), "other".to_owned()])
    );
    // In two steps the case changes.
    fs::rename(at.join("foo"), at.join("x")).unwrap();
    fs::rename(at.join("X"), at.join("FOO")).unwrap();
    assert_eq!(listed(&at), ["FOO", "other"]);
    // Directories, one of which is a working directory while other processes use another spelling.
    fs::create_dir_all(at.join("Dir/Sub")).unwrap();
    assert_eq!(sh(&at.join("DIR"), "echo x > SUB/f; cat ../dir/sub/F; cd ../dIR/sUB; ls"), "x\nf\n");
    assert_eq!(sh(&at, "rm -r dir; ls; test ! -e Dir"), "FOO\nother\n");
}

#[test]
fn trees_git_and_snapshots_in_a_file_system_without_case() {
    needs!(as_root());
    let pool = Pool::made("psp", "256M", &[]);
    pool.told(&["fs", "create", "-o", "casesensitivity=insensitive", "%/win"]);
    pool.told(&["fs", "create", "%/win/below"]);
    let (win, docs) = (pool.at("win"), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs"));
    sh(&win, &format!("cp -a {0} Copy && diff -r {0} COPY && ls COPY/POOL.MD", docs.display()));
    if Command::new("git").arg("--version").output().is_ok_and(|output| output.status.success()) {
        let commit = "git init -q Work && cd WORK && echo a > A && git add . && git -c user.name=n -c user.email=e commit -qm one && git status --short";
        assert_eq!(sh(&win, commit), "");
        assert_eq!(sh(&win, "git -C wORK config core.ignorecase"), "true\n");
    }
    // A mount that lies below is one by every spelling.
    fs::write(win.join("BELOW/File"), "x").unwrap();
    assert_eq!(fs::read(win.join("below/fILE")).unwrap(), b"x");
    pool.told(&["fs", "snapshot", "-r", "%/win@Before"]);
    sh(&win, "rm -r copy");
    assert!(win.join(".zfs/snapshot/bEFORE/COPY/fs.MD").exists() && !win.join("Copy").exists());
    pool.told(&["fs", "clone", "%/win@Before", "%/clone"]);
    assert!(pool.at("clone/COPY/fs.MD").exists());
    pool.told(&["fs", "rollback", "%/win@Before"]);
    assert!(win.join("COPY/fs.MD").exists());
    let said = pool.told(&["fs", "get", "-H", "-o", "value,source", "casesensitivity", "%", "%/clone", "%/win/below"]);
    assert_eq!(said, "sensitive\t-\ninsensitive\t-\ninsensitive\t-\n");
    pool.told(&["fs", "unmount", "%/win/below"]);
    pool.told(&["fs", "mount", "%/win/below"]);
    let said = pool.told(&["pool", "check", "%"]);
    assert!(said.starts_with("no problems"), "{said}");
}

#[test]
fn names_that_are_composed_differently_and_names_that_are_not_utf_8() {
    needs!(as_root());
    let pool = Pool::made("psp", "256M", &[]);
    pool.told(&["fs", "create", "-o", "normalization=formD", "%/mac"]);
    let (mac, other) = (pool.at("mac"), pool.at(""));
    fs::write(mac.join("caf\u{e9}"), "x").unwrap();
    assert_eq!(fs::read(mac.join("cafe\u{301}")).unwrap(), b"x");
    assert_eq!(listed(&mac), ["caf\u{e9}"]);
    assert!(!mac.join("CAF\u{c9}").exists());
    let not_utf8 = std::ffi::OsStr::from_bytes(b"a\xff");
    assert_eq!(errno(fs::write(mac.join(not_utf8), "")), 84);
    assert_eq!(errno(fs::create_dir(mac.join(not_utf8))), 84);
    assert_eq!(errno(fs::rename(mac.join("caf\u{e9}"), mac.join(not_utf8))), 84);
    fs::write(other.join(not_utf8), "").unwrap();
    for (arguments, why) in [
        (
            &["create", "-o", "normalization=formC", "-o", "utf8only=off"][..],
            "'utf8only' must be 'on' where 'normalization' is not 'none'",
        ),
        (&["create", "-o", "casesensitivity=on"], "'casesensitivity' must be one of 'sensitive | insensitive | mixed'"),
    ] {
        let (code, said) = pool.refused(&[&["fs"], arguments, &["%/refused"]].concat());
        assert_eq!((code, said.contains(why)), (1, true), "{said}");
    }
    let (_, said) = pool.refused(&["fs", "set", "casesensitivity=insensitive", "%"]);
    assert!(said.contains("'casesensitivity' is readonly: it can only be set at creation"), "{said}");
}
