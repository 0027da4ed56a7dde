//! The built program `nacre-bench`, run from outside: refused arguments, exit codes, and its output. Nothing here
//! mounts.

#![allow(clippy::unwrap_used)] // A failed expectation is what a test reports.

use std::fs;
use std::path::Path;
use std::process::Command;

fn run(directory: &Path, words: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_nacre-bench")).args(words).current_dir(directory).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_wrong_command_line_says_why_and_measures_nothing() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("m")).unwrap();
    for (words, code, says) in [
        (&["mirror", "--targets", "foo"][..], 2, "nacre bench: no target foo"),
        (&["mirror", "--tests", "foo"], 2, "nacre bench: no test foo"),
        (&["mirror", "--user", "root"], 2, "must not be root"),
        (&["mirror", "--html", "missing/x.html"], 1, "missing/x.html"),
        (&["mirror", "--json", "m"], 1, "writing m"),
        (&["mirror", "--bogus"], 2, "--bogus"),
        (&["show", "missing"], 1, "reading missing"),
        (&[], 2, "Usage: nacre-bench <COMMAND>"),
    ] {
        let (found, out, error) = run(directory.path(), words);
        assert_eq!((found, out.as_str()), (code, ""), "{words:?}: {error}");
        assert!(error.contains(says), "{words:?}: {error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "{words:?}");
    }
}

#[test]
fn it_tells_what_it_measures() {
    let directory = tempfile::tempdir().unwrap();
    for (words, says) in [
        (&["--version"][..], concat!("nacre-bench ", env!("CARGO_PKG_VERSION"))),
        (&["--help"], "  mirror "),
        (&["union", "--list"], "targets (* by default)\n"),
    ] {
        let (code, out, error) = run(directory.path(), words);
        assert_eq!((code, error.as_str()), (0, ""), "{words:?}");
        assert!(out.contains(says), "{words:?}: {out}");
    }
}
