//! How commands find mounts that survive their process, during a failover and where the runtime
//! directory is full.

use crate::mounting::{Fixture, as_root, eventually, finish, nacre, needs, run, status::Status, text};
use crate::surviving::Guarded;
use rustix::process::Signal;
use std::{fs::File, process::Command};

/// Runs in a mount namespace with a runtime directory of its own: `$0` is the program, `$1` a
/// directory. Prints the output of `nacre status`.
const FULL: &str = r#"
mount -t tmpfs -o mode=700,size=64k,nr_inodes=16 none /run/nacre
mkdir $1/source $1/mount
echo content >$1/source/file
$0 mirror --survive --transport=device $1/source $1/mount
trap 'umount -l $1/mount' EXIT
served() { $0 status -H -o pid $1/mount; }
fill() { for number in $(seq 16); do touch /run/nacre/fill$number 2>/dev/null || return 0; done; false; }
another() { kill -9 $1; test "$(cat $2/mount/file)" = content; }
ask() { code=0; said=$($0 status $1/mount 2>&1 >/dev/null) || code=$?; echo "$code: $said"; }
first=$(served $1)
fill
another $first $1
second=$(served $1)
test $first != $second
ask $1
rm /run/nacre/*.sock
fill || true
another $second $1
ask $1
rm /run/nacre/fill*
until served $1 >/dev/null 2>&1; do sleep 0.1; done
ask $1
$0 umount $1/mount
trap - EXIT
"#;

#[test]
fn a_death_with_a_full_runtime_directory_costs_no_control_socket() {
    needs!(as_root());
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-ec", FULL]).arg(nacre()).arg(place.path());
    let output = finish(command.env_remove("XDG_RUNTIME_DIR"));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let missing = format!(
        "nacre: the mount at {}/mount works, but has no socket in /run/nacre: if that was full, it gets one when there is room",
        place.path().display()
    );
    assert_eq!(said, format!("0: \n1: {missing}\n0: \n"));
}

#[test]
fn status_names_a_stopped_process_without_a_socket() {
    needs!(as_root());
    let (fixture, other) = (Fixture::mirror(&[]), Fixture::mirror(&[]));
    let pid = Status::of(&fixture.mountpoint).number("pid");
    let names = std::fs::read_dir("/run/nacre").unwrap().flatten().map(|entry| entry.file_name());
    let is_its_own = |name: &std::ffi::OsString| {
        let number = name.to_str().and_then(|name| name.strip_suffix(".sock")).and_then(|name| name.split('-').next());
        number == Some(&pid.to_string())
    };
    let own: Vec<_> = names.filter(is_its_own).collect();
    assert!(!own.is_empty());
    for name in own {
        std::fs::remove_file(std::path::Path::new("/run/nacre").join(name)).unwrap();
    }
    fixture.signal(Signal::STOP);
    let said = run(nacre(), ["status"]);
    fixture.signal(Signal::CONT);
    let expected = format!("nacre: the mount at {} does not answer", fixture.mountpoint.display());
    assert!(text(&said.stderr).contains(&expected), "{}", text(&said.stderr));
    assert!(text(&said.stdout).contains(other.mountpoint.to_str().unwrap()), "{}", text(&said.stdout));
}

#[test]
fn status_waits_for_a_process_that_takes_a_mount_over() {
    needs!(as_root());
    let guarded = Guarded::new(&[]);
    let files: Vec<File> = (0..300).map(|number| File::create(guarded.at(&format!("file{number}"))).unwrap()).collect();
    let status = || run(nacre(), ["status".as_ref(), guarded.fixture.mountpoint.as_os_str()]);
    for round in 1..=2 {
        crate::mounting::kill(guarded.child().unwrap(), Signal::KILL);
        let said = status();
        assert!(said.status.success(), "round {round}: {}", text(&said.stderr));
        eventually("another process serves the mount", || guarded.restarts() == round);
    }
    drop(files);
}
