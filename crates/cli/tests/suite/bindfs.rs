//! Each line of docs/bindfs.md on a real mount; where Debian's bindfs knows the option, it has to
//! do the same.

mod cases;

use crate::mounting::{Fixture, PATIENCE, as_root, eventually, finish, is_mounted, nacre, needs, run, sh, skip, text};
use cases::{CASES, Case, ELSEWHERE, PRINTING, REFUSED, SOURCE};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const PRELUDE: &str = r#"
st() { stat -c '%u:%g %a' "$@"; }
as() { local id=$1; shift; setpriv --reuid="$id" --regid="$id" --clear-groups -- bash -c "$(declare -f st as try has); $(printf '%q ' "$@")"; }
try() { if "$@" >/dev/null 2>&1; then echo ok; else echo refused; fi; }
has() { if findmnt -no OPTIONS "$MNT" | tr , '\n' | grep -qx "$1"; then echo yes; else echo no; fi; }
"#;

fn documentation() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/bindfs.md")).unwrap()
}

/// The first columns of the tables.
fn documented() -> Vec<String> {
    let page = documentation();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split('`').next()).map(str::to_owned).collect()
}

#[test]
fn each_line_of_the_documentation_has_a_test() {
    let documented = documented();
    assert!(documented.len() > 80, "{} lines", documented.len());
    let tested: BTreeSet<&str> = CASES
        .iter()
        .map(|case| case.option)
        .chain(PRINTING.iter().map(|(option, _, _)| *option))
        .chain(REFUSED.iter().map(|(option, _)| *option))
        .chain(ELSEWHERE.iter().copied())
        .collect();
    let missing: Vec<&String> = documented.iter().filter(|option| !tested.contains(option.as_str())).collect();
    assert!(missing.is_empty(), "these lines of docs/bindfs.md have no test: {missing:?}");
    let unknown: Vec<&&str> = tested.iter().filter(|option| !documented.iter().any(|line| line == **option)).collect();
    assert!(unknown.is_empty(), "these tests are of options that docs/bindfs.md does not have: {unknown:?}");
}

#[test]
fn each_option_of_the_program_is_documented() {
    // Every long option that help shows stands in the page.
    let help = text(&run(nacre(), ["bindfs", "--help"]).stdout);
    let page = documented();
    let mut missing = Vec::new();
    for line in help.lines() {
        let option = line.trim_start().split([' ', ',', '=', '[']).find(|word| word.starts_with("--"));
        if let Some(option) = option
            && line.starts_with("  ")
            && !page.iter().any(|documented| {
                documented == option || documented == &format!("-o {}", option.trim_start_matches('-'))
            })
            && !["--read-only", "--foreground", "--debug"].contains(&option)
        {
            missing.push(option.to_owned());
        }
    }
    assert!(missing.is_empty(), "docs/bindfs.md does not have {missing:?}");
}

/// A mount of a program that may return or stay.
struct Mounted {
    child: Child,
}

impl Mounted {
    /// Mounts; returns the error message where that fails.
    fn new(program: &[&OsStr], words: &[String], fixture: &Fixture) -> Result<Mounted, String> {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).args(words).arg(&fixture.source).arg(&fixture.mountpoint);
        let errors = fixture.scratch.path().join("errors");
        let log = fs::File::create(&errors).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).current_dir(fixture.scratch.path());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let start = Instant::now();
        loop {
            let ended = child.try_wait().unwrap();
            if ended.is_some_and(|status| !status.success()) || (ended.is_some() && !is_mounted(&fixture.mountpoint)) {
                return Err(format!("{ended:?}: {}", fs::read_to_string(&errors).unwrap()));
            }
            if is_mounted(&fixture.mountpoint) && fs::symlink_metadata(&fixture.mountpoint).is_ok() {
                return Ok(Mounted { child });
            }
            if start.elapsed() > PATIENCE {
                let _ = child.kill();
                return Err("not mounted in time".to_owned());
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Unmounts and waits for a program that stayed.
    fn end(mut self, fixture: &Fixture) {
        let output = run("umount", [fixture.mountpoint.as_os_str()]);
        if !output.status.success() {
            crate::mounting::clear(&fixture.mountpoint);
        }
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() && start.elapsed() < PATIENCE {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the output of a case's script on a mount of some program; an error of the mount as text.
fn observe(program: &[&OsStr], case: &Case) -> String {
    let fixture = Fixture::bare();
    sh(&fixture.source, SOURCE);
    let place = fixture.scratch.path();
    fs::write(place.join("passwd"), "nobody:x:1000:1001::/:/bin/sh\n").unwrap();
    fs::write(place.join("group"), "nogroup:x:1001:\n").unwrap();
    let fill = |word: &str| {
        let path = |name: &str| place.join(name).to_str().unwrap().to_owned();
        word.replace("PASSWD", &path("passwd")).replace("GROUP", &path("group")).replace("LOGFILE", &path("log"))
    };
    let words: Vec<String> = case.words.iter().map(|word| fill(word)).collect();
    let mounted = match Mounted::new(program, &words, &fixture) {
        Ok(mounted) => mounted,
        Err(why) => return format!("cannot mount: {why}"),
    };
    let output = finish(
        Command::new("bash")
            .arg("-c")
            .arg(format!("{PRELUDE}\n{}", fill(case.script)))
            .current_dir(&fixture.mountpoint)
            .env("SRC", &fixture.source)
            .env("MNT", &fixture.mountpoint)
            .env("LC_ALL", "C"),
    );
    mounted.end(&fixture);
    (text(&output.stdout) + &text(&output.stderr)).trim_end().to_owned()
}

fn differences(what: &str, program: &[&OsStr], cases: impl Iterator<Item = &'static Case>) -> (usize, String) {
    let (mut count, mut wrong) = (0, String::new());
    for case in cases {
        count += 1;
        let got = observe(program, case);
        if got != case.wanted {
            wrong.push_str(&format!(
                "{what} {:?}\n  script: {}\n  wanted: {:?}\n  got:    {got:?}\n",
                case.words, case.script, case.wanted
            ));
        }
    }
    (count, wrong)
}

#[test]
fn ours_does_what_each_line_says() {
    needs!(as_root());
    let program = nacre();
    let (count, wrong) = differences("nacre bindfs", &[program.as_os_str(), OsStr::new("bindfs")], CASES.iter());
    assert!(wrong.is_empty(), "of {count} options:\n{wrong}");
}

#[test]
fn bindfs_does_the_same_where_it_knows_the_option() {
    needs!(as_root());
    let version = Command::new("bindfs").arg("-V").output().map(|output| text(&output.stdout)).unwrap_or_default();
    if !version.contains("bindfs 1.14.7") {
        skip("bindfs", "Debian 12's bindfs 1.14.7 is not installed");
        return;
    }
    let (count, wrong) = differences("bindfs", &[OsStr::new("bindfs")], CASES.iter().filter(|case| case.rival));
    assert!(wrong.is_empty(), "of {count} options:\n{wrong}");
}

#[test]
fn printing_options_mount_nothing() {
    for (option, words, contained) in PRINTING {
        let fixture = Fixture::bare();
        let words: Vec<String> = words
            .iter()
            .map(|word| {
                word.replace("SOURCE", fixture.source.to_str().unwrap())
                    .replace("MOUNT", fixture.mountpoint.to_str().unwrap())
            })
            .collect();
        let output = finish(Command::new(nacre()).arg("bindfs").args(words));
        assert!(output.status.success(), "{option}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains(contained), "{option}: {}", text(&output.stdout));
        assert!(!is_mounted(&fixture.mountpoint), "{option}");
    }
}

#[test]
fn refused_options_mount_nothing() {
    for (option, words) in REFUSED {
        let fixture = Fixture::bare();
        let output =
            finish(Command::new(nacre()).arg("bindfs").args(*words).arg(&fixture.source).arg(&fixture.mountpoint));
        assert!(!output.status.success(), "{option}");
        assert!(!text(&output.stderr).is_empty(), "{option} is refused without a word");
        assert!(!is_mounted(&fixture.mountpoint), "{option}");
    }
}

#[test]
fn the_old_form_of_fstab() {
    needs!(as_root());
    let fixture = Fixture::bare();
    sh(&fixture.source, SOURCE);
    let source = format!("bindfs#{}", fixture.source.display());
    let output = finish(
        Command::new(nacre()).args(["bindfs", &source]).arg(&fixture.mountpoint).args(["-o", "rw,force-user=4711"]),
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 4711);
    assert!(run(nacre(), [OsStr::new("umount"), fixture.mountpoint.as_os_str()]).status.success());
}

#[test]
fn sigusr1_reads_the_databases_again() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    sh(&fixture.source, SOURCE);
    let passwd = fixture.scratch.path().join("passwd");
    fs::write(&passwd, "nobody:x:1000:1001::/:/bin/sh\n").unwrap();
    let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
    fixture.start(&["mirror", &format!("--map-passwd={}", passwd.display())], source.as_ref(), &mountpoint);
    assert_eq!(fs::metadata(fixture.at("other")).unwrap().uid(), 65_534);
    fs::write(&passwd, "daemon:x:1000:1001::/:/bin/sh\n").unwrap();
    fixture.signal(rustix::process::Signal::USR1);
    eventually("the new table is used", || fs::metadata(fixture.at("other")).unwrap().uid() == 1);
    fixture.unmount();
}
