//! The built program, run from outside: exit codes, messages, and that a wrong command line mounts
//! nothing. Nothing here needs FUSE.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Output},
};

fn run(argv0: &str, directory: &Path, arguments: &[&str]) -> Output {
    let state = directory.join("m/state");
    Command::new(env!("CARGO_BIN_EXE_nacre"))
        .arg0(argv0)
        .args(arguments)
        .current_dir(directory)
        .env("NACRE_STATE_DIR", state)
        .output()
        .unwrap()
}

fn outcome(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// A directory with a source and a mount point, and the number of mounts before.
struct Scratch {
    directory: tempfile::TempDir,
}

impl Scratch {
    fn new() -> Scratch {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("s")).unwrap();
        fs::create_dir(directory.path().join("m")).unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        Scratch { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn mounts(&self) -> usize {
        let table = String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").unwrap()).into_owned();
        table.lines().filter(|line| line.contains(self.path().to_str().unwrap())).count()
    }
}

#[test]
fn a_wrong_command_line_says_why_and_mounts_nothing() {
    let scratch = Scratch::new();
    for (argv0, arguments, code, says) in [
        ("nacre", &["mirror", "--bogus", "s", "m"][..], 2, "--bogus"),
        ("nacre", &["mirror", "s"], 2, "MOUNTPOINT"),
        ("nacre", &["mirror", "s", "m", "x"], 2, "too many arguments"),
        ("nacre", &["mirror", "-o", "bogus", "s", "m"], 2, "unknown option -o bogus"),
        ("nacre", &["mirror", "--engine=bogus", "s", "m"], 2, "is not one of fuse, kernel, auto"),
        ("nacre", &["mirror", "missing", "m"], 3, "directory\nnacre: name a directory that is there"),
        ("nacre", &["mirror", "s", "missing"], 3, "make it first"),
        ("nacre", &["mirror", "s", "file"], 1, "is not a directory, the source is\nnacre: name an empty one"),
        ("nacre", &["mirror", "file", "m"], 1, "is not a directory, the mount point is\nnacre: name one"),
        ("nacre", &["mirror", "--map=1/2:1/3", "s", "m"], 2, "1 is mapped twice"),
        ("nacre", &["mirror", "--map=1", "s", "m"], 2, "no /"),
        ("nacre", &["mirror", "--map=1", "--engine=kernel", "s", "m"], 2, "no /"),
        ("nacre", &["mirror", "--map=no-such-user-here/1", "s", "m"], 1, "no-such-user-here"),
        ("nacre", &["mirror", "--map-passwd=missing", "s", "m"], 3, "missing"),
        ("nacre", &["mirror", "--for=q:x", "s", "m"], 2, "TYPES:KEY=VALUE"),
        ("nacre", &["mirror", "--for=d:perms=q", "s", "m"], 2, "d:perms=q"),
        ("nacre", &["mirror", "--for=d:force-user=no-such-user-here", "s", "m"], 1, "no-such-user-here"),
        ("nacre", &["mirror", "--hide=[", "s", "m"], 2, "invalid pattern"),
        ("nacre", &["mirror", "--mirror-only=@", "s", "m"], 2, "empty name"),
        ("nacre", &["mirror", "--mirror=5", "--mirror-only=6", "s", "m"], 2, "exclude each other"),
        ("nacre", &["mirror", "--perms=999", "s", "m"], 2, "999"),
        ("nacre", &["mirror", "--force-user=no-such-user-here", "s", "m"], 1, "no-such-user-here"),
        ("nacre", &["mirror", "--mirror=no-such-user-here", "s", "m"], 1, "no-such-user-here"),
        ("nacre", &["mirror", "--read-rate=1x", "s", "m"], 2, "1x"),
        ("nacre", &["mirror", "--engine=kernel", "-p", "a-w", "s", "m"], 1, "the rule perms works only through FUSE"),
        ("nacre", &["mount", "bogus:x", "m"], 3, "cannot read the stack"),
        ("nacre", &["mount", "readonly", "m"], 2, "cannot be the lowest layer"),
        ("nacre", &["mount", "host:missing", "m"], 3, "cannot use the source"),
        ("nacre", &["mount", "mem", "missing"], 3, "make it first"),
        ("nacre", &["cage", "s"], 2, "--size is needed"),
        ("nacre", &["cage", "--size", "10X", "s"], 2, "size: \"10X\" is no size"),
        ("nacre", &["cage", "--size", "4095", "s"], 2, "less than one block"),
        ("nacre", &["cage", "--size", "1G", "missing"], 3, "cannot use the directory missing"),
        ("nacre", &["cage", "--size", "1G", "file"], 1, "file is not a directory\nnacre: a cage limits"),
        ("nacre", &["cage", "--size", "1G", "s", "missing"], 3, "make it first"),
        ("nacre", &["cage", "--size", "1G", "s", "file"], 1, "is not a directory, the source is"),
        ("nacre", &["cage", "--size", "1G", ".", "m"], 1, "the cage would contain itself"),
        ("nacre", &["cage", "--size", "1G", "s", "."], 1, "the mount would cover it"),
        (
            "nacre",
            &["cage", "--size", "1G", "--state", "s/state", "s"],
            1,
            "the accounting cannot be kept in the cage itself",
        ),
        ("nacre", &["cage", "--size", "1G", "--limit", "user:no-such-user-here=1G", "s"], 1, "no-such-user-here"),
        ("nacre", &["cage", "--size", "1G", "--engine", "kernel", "s"], 2, "not one of fuse, loop, quota, auto"),
        ("nacre", &["cage", "resize", "s", "2G"], 3, "s is no cage"),
        ("nacre", &["cage", "status", "s"], 3, "s is no cage"),
        ("nacre", &["cage", "status", "-o", "bogus"], 2, "there is no column"),
        ("nacre", &["cage", "remove", "s"], 3, "s is no cage"),
        ("nacre", &["mirror", "-o", "size=1G", "s", "m"], 2, "option size is for cages"),
        ("nacre", &["cage", "--size", "1G", "--when-full=drop-oldest", "--keep=[", "s"], 2, "the pattern"),
        ("nacre", &["mount", "host:s | remap:hide=[", "m"], 2, "invalid pattern"),
        ("nacre", &["mount", "host:s | throttle:read-rate=x", "m"], 2, "invalid rate"),
        ("nacre", &["mount", "host:. | cage:size=1G", "m"], 1, "the cage would contain itself"),
        ("nacre", &["mount", "host:s | cage:size=10X", "m"], 2, "10X"),
        ("nacre", &["umount", "m"], 3, "nothing is mounted at"),
        ("nacre", &["umount", "missing/x", "m"], 3, "/m\n"),
        ("nacre", &["bench", "mirror", "--bogus"], 2, "--bogus"),
        ("nacre", &["bench", "mirror", "--cache", "1T"], 2, "1T is not a size such as 64K or 16M"),
        ("nacre", &["pool", "create", "--size", "10X", "new", "image"], 2, "one of K, M, G, T, P, E"),
        ("nacre", &["pool", "create", "--size", "10", "new", "image"], 2, "at least 64M"),
        (
            "nacre",
            &["pool", "create", "--size", "64M", "-o", "autotirm=on", "new", "image"],
            1,
            "did you mean autotrim?",
        ),
        (
            "nacre",
            &["pool", "create", "--size", "64M", "-O", "compresion=on", "new", "image"],
            1,
            "did you mean compression?",
        ),
        ("nacre", &["fs", "set", "foo"], 2, "usage: nacre fs set [-u] PROPERTY=VALUE... FILESYSTEM..."),
        ("nacre", &["fs", "set", "foo=1"], 2, "missing dataset name"),
        ("nacre", &["fs", "set", "qouta=1G", "tank"], 1, "did you mean quota"),
        ("nacre", &["fs", "set", "quota=1X", "tank"], 1, "one of K, M, G, T, P, E"),
        ("nacre", &["fs", "get", "compresion"], 2, "did you mean compression?"),
        ("nacre", &["status", "m"], 3, "no mount of nacre answers at"),
        ("nacre", &["status", "-o", "bogus"], 2, "there is no column"),
        ("nacre", &["reload", "m"], 3, "no mount of nacre answers at"),
        ("nacre", &["bogus"], 2, "bogus"),
        ("nacre", &[], 2, "Usage"),
        ("nacre", &["bindfs", "--bogus", "s", "m"], 1, "bindfs: unknown option --bogus"),
        ("bindfs", &["--force-user", "5", "s", "m"], 1, "bindfs: option --force-user needs a value"),
        ("bindfs", &["s"], 1, "bindfs: SOURCE and MOUNTPOINT are needed"),
        ("bindfs", &["s", "m", "x"], 1, "too many arguments"),
        ("bindfs", &["-p", "8", "s", "m"], 1, "8"),
        ("bindfs", &["missing", "m"], 1, "cannot use the source"),
        ("/sbin/mount.fuse.nacre", &["s", "m", "-o", "bogus"], 1, "mount.fuse.nacre: unknown option -o bogus"),
        ("/sbin/mount.fuse.nacre", &["s", "m", "-o", "map=1"], 1, "no /"),
        ("/sbin/mount.fuse.nacre", &["cage:s", "s"], 1, "--size is needed"),
        ("/sbin/mount.fuse.nacre", &["cage:missing", "m", "-o", "size=1G"], 32, "cannot use the directory"),
        ("/sbin/mount.fuse.nacre", &["missing", "m", "-o", "ro"], 32, "cannot use the source"),
        (
            "/sbin/mount.fuse.nacre",
            &["missing", "m", "-o", "ro,nofail"],
            0,
            "missing: No such file or directory; left out (nofail)",
        ),
        ("/sbin/mount.fuse.nacre", &["cage:missing", "m", "-o", "size=1G,nofail"], 0, "left out (nofail)"),
        ("/sbin/mount.fuse.nacre", &["fs:nopool/x", "m", "-o", "nofail"], 0, "left out (nofail)"),
        ("/sbin/mount.fuse.nacre", &["s", "missing", "-o", "nofail"], 32, "make it first"),
        ("/sbin/mount.fuse.nacre", &["s", "m", "-o", "remount,ro"], 32, "nothing is mounted at"),
    ] {
        let (found, out, error) = outcome(&run(argv0, scratch.path(), arguments));
        assert_eq!(found, code, "{argv0} {arguments:?}: {out}{error}");
        assert!(error.contains(says), "{argv0} {arguments:?}: {error}");
        assert_eq!(out, "", "{argv0} {arguments:?}");
        assert_eq!(scratch.mounts(), 0, "{argv0} {arguments:?}");
    }
}

#[test]
fn help_and_versions_succeed() {
    let scratch = Scratch::new();
    for (argv0, arguments, says) in [
        ("nacre", &["--help"][..], "mirror"),
        ("nacre", &["--version"], "nacre 0."),
        ("nacre", &["mirror", "--help"], "Examples:"),
        ("nacre", &["bench", "--help"], "mirror"),
        ("nacre", &["bindfs", "--help"], "--create-with-perms"),
        ("bindfs", &["-h"], "--create-with-perms=SPEC"),
        ("bindfs", &["-V"], "bindfs (nacre) 0."),
        ("bindfs", &["--fuse-version"], "FUSE kernel interface 7."),
        ("nacre", &["status", "--help"], "--json"),
        ("nacre", &["cage", "--help"], "--when-full"),
        ("nacre", &["cage", "resize", "--help"], "nothing can grow"),
        ("nacre", &["cage", "status", "--help"], "--json"),
        ("/sbin/mount.fuse.nacre", &["s", "m", "-f", "-o", "ro"], ""),
    ] {
        let (code, out, error) = outcome(&run(argv0, scratch.path(), arguments));
        assert_eq!((code, error.as_str()), (0, ""), "{argv0} {arguments:?}");
        assert!(out.contains(says), "{argv0} {arguments:?}: {out}");
    }
}

#[test]
fn explain_mounts_nothing() {
    let scratch = Scratch::new();
    let arguments = ["mirror", "--explain", "--engine=auto", "--force-user=root", "--delete-deny", "s", "m"];
    let (code, out, error) = outcome(&run("nacre", scratch.path(), &arguments));
    assert_eq!((code, error.as_str()), (0, ""));
    for line in [
        "engine      fuse (the rule force-user works only through FUSE)",
        "stack       host:",
        "delete-deny",
        "  remap",
        "    host",
    ] {
        assert!(out.contains(line), "{line} in\n{out}");
    }
    assert_eq!(scratch.mounts(), 0);
}

#[test]
fn documents_are_generated_from_the_table() {
    let scratch = Scratch::new();
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = outcome(&run("nacre", scratch.path(), &["completions", shell]));
        assert_eq!(code, 0);
        // The script asks the program, which knows its table.
        assert!(out.contains("nacre complete"), "{shell}: {out}");
    }
    for (words, one) in
        [(&["m"][..], "mirror"), (&["mirror", "--force"], "--force-user"), (&["cage", "--when"], "--when-full")]
    {
        let (code, out, _) = outcome(&run("nacre", scratch.path(), &[&["complete", "nacre"], words].concat()));
        assert!(code == 0 && out.lines().any(|line| line.split('\t').next() == Some(one)), "{one} in {out}");
    }
    let (code, out, error) = outcome(&run("nacre", scratch.path(), &["man", "."]));
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(out.lines().count() >= 11, "{out}");
    let page = fs::read_to_string(scratch.path().join("nacre-mirror.1")).unwrap();
    for word in [".TH \"NACRE-MIRROR\"", "force\\-user", ".SH EXAMPLES"] {
        assert!(page.contains(word), "{word} in\n{page}");
    }
    let (code, _, error) = outcome(&run("nacre", scratch.path(), &["man", "missing/man1"]));
    assert!(code == 0 && scratch.path().join("missing/man1/nacre-mirror.1").exists(), "{error}");
    let (code, _, error) = outcome(&run("nacre", scratch.path(), &["man", "missing/man1/nacre-mirror.1"]));
    assert!(code != 0 && error.contains("cannot make the directory"), "{code} {error}");
}

#[test]
fn commands_of_the_field_are_found() {
    let scratch = tempfile::tempdir().unwrap();
    for (command, tip) in [
        ("zfs", "nacre fs --help"),
        ("zpool", "nacre pool --help"),
        ("list", "nacre pool list"),
        ("ls", "nacre fs list"),
        ("unmount", "nacre umount"),
        ("create", "nacre pool create"),
        ("snapshot", "nacre fs snapshot"),
        ("scrub", "nacre pool scrub"),
        ("import", "nacre pool import"),
        ("send", "nacre fs send"),
        ("resize", "nacre cage resize"),
    ] {
        let (code, out, error) = outcome(&run("nacre", scratch.path(), &[command, "x"]));
        assert!(code == 2 && out.is_empty() && error.contains(tip), "{command}: {code} {error}");
        assert!(error.contains(&format!("unrecognized command '{command}'")), "{error}");
    }
    // Below another command the word has another meaning.
    for words in [&["cage", "create"][..], &["union", "snapshot"], &["pool", "unmount"]] {
        let (code, _, error) = outcome(&run("nacre", scratch.path(), words));
        assert!(
            code == 2 && !error.contains("nacre fs") && !error.contains("nacre umount"),
            "{words:?}: {code} {error}"
        );
    }
}

#[test]
fn a_link_chooses_the_personality() {
    let scratch = Scratch::new();
    let link = scratch.path().join("bindfs");
    symlink(env!("CARGO_BIN_EXE_nacre"), &link).unwrap();
    let output = Command::new(&link).arg("-V").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("bindfs (nacre)"));
}

#[test]
fn a_program_of_its_own_measures() {
    // The program under a name of its own, so that only what the test puts there is beside it.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (nacre, beside, path) =
        (directory.path().join("nacre"), directory.path().join("nacre-bench"), directory.path().join("path"));
    fs::hard_link(env!("CARGO_BIN_EXE_nacre"), &nacre).unwrap();
    fs::create_dir(&path).unwrap();
    let bench = |words: &[&str]| {
        let output = Command::new(&nacre).arg("bench").args(words).env("PATH", &path).output().unwrap();
        outcome(&output)
    };
    let (code, out, error) = bench(&["mirror", "--list"]);
    assert_eq!((code, out.as_str()), (1, ""), "{error}");
    let first = format!("nacre: bench: nacre-bench is neither beside {} nor in PATH\n", nacre.display());
    assert!(error.starts_with(&first) && error.contains("install"), "{error}");
    let write = |file: &Path, says: &str| {
        fs::write(file, format!("#!/bin/sh\necho {says} \"$@\"\nexit 7\n")).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    };
    write(&path.join("nacre-bench"), "path");
    assert_eq!(bench(&["show", "x"]), (7, "path show x\n".to_owned(), String::new()));
    write(&beside, "beside");
    let ours = format!("beside mirror --nacre {} --list\n", nacre.display());
    assert_eq!(bench(&["mirror", "--list"]), (7, ours, String::new()));
    assert_eq!(bench(&["mirror", "--nacre", "x"]), (7, "beside mirror --nacre x\n".to_owned(), String::new()));
}
