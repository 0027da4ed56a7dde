//! Workspaces through the program: what is done in one, the directory below it, and the end of both.

use crate::mounting::{
    as_root, can_mount, clear, eventually, finish, is_mounted, kill, nacre, needs, run, scratch, text,
};
use rustix::process::Signal;
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A directory with files, and the workspaces over it; all of it is removed at the end.
pub struct Desk {
    scratch: tempfile::TempDir,
}

impl Desk {
    pub fn new() -> Desk {
        let desk = Desk { scratch: scratch() };
        fs::create_dir_all(desk.at("base/d/e")).unwrap();
        for (name, content) in [("base/a", "a"), ("base/d/b", "b"), ("base/d/e/c", "c"), ("base/key.pem", "secret")] {
            fs::write(desk.at(name), content).unwrap();
        }
        desk
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(nacre());
        command
            .arg("workspace")
            .args(words)
            .current_dir(self.scratch.path())
            .env("NACRE_STATE_DIR", self.at("state"))
            .env("NACRE_EVENTS_DIR", self.at("events.d"))
            .env("LC_ALL", "C");
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        finish(&mut self.command(words))
    }

    /// Runs a verb that has to succeed; returns its output.
    pub fn done(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a verb that has to end with this exit code; returns what it says.
    pub fn refused(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        said
    }

    /// Makes a workspace shown at `view`; returns its directory there.
    pub fn made(&self, options: &[&str]) -> PathBuf {
        self.done(&[&["create", "w", "--from", "./base", "--at", "view"], options].concat());
        self.at("view")
    }

    /// Discards it; a mount is busy for a moment while other processes look at all mounts.
    pub fn discarded(&self, name: &str) {
        eventually("the workspace is not in use", || {
            let output = self.run(&["discard", name]);
            assert!(matches!(output.status.code(), Some(0 | 5)), "{}", text(&output.stderr));
            output.status.success()
        });
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        clear(self.scratch.path());
    }
}

/// The names below a directory with their contents.
pub fn tree(directory: &Path) -> Vec<String> {
    let output = finish(
        Command::new("sh")
            .current_dir(directory)
            .args(["-c", "find . -type f -exec sh -c 'echo \"$0 $(cat \"$0\")\"' {} \\; ; find . -not -type f"]),
    );
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Changes of each kind, in a directory like that of [`Desk`].
const WORK: &str = "echo new >new; echo more >>d/b; rm d/e/c; mv a moved; mkdir -p x/y; ln -s a link; chmod 600 d/b";

pub fn work_in(directory: &Path) {
    let output = finish(Command::new("sh").args(["-ec", WORK]).current_dir(directory));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn changes_lie_apart_and_go_with_the_workspace() {
    needs!(as_root());
    let desk = Desk::new();
    let before = tree(&desk.at("base"));
    let view = desk.made(&[]);
    assert_eq!(tree(&view), before);
    work_in(&view);
    assert_eq!(tree(&desk.at("base")), before);
    assert_eq!(fs::read_to_string(view.join("d/b")).unwrap(), "bmore\n");
    assert!(!view.join("a").exists() && view.join("moved").exists() && !view.join("d/e/c").exists());
    let log = fs::read_to_string(desk.at("state/workspaces/w/changes/base.log")).unwrap();
    let ino = fs::metadata(desk.at("base/a")).unwrap().ino();
    let line = log.lines().rfind(|line| line.split(' ').nth(1) == Some("a")).unwrap();
    assert!(line.contains(&format!(" {ino} ")), "{line}");
    let listed = desk.done(&["list", "-H", "-o", "name,state,processes"]);
    assert_eq!(listed, "w\tmounted\t0\n");
    assert!(desk.refused(&["create", "w", "--from", "./base"], 1).contains("already"));
    desk.discarded("w");
    assert!(!is_mounted(&view) && fs::read_dir(desk.at("state/workspaces")).unwrap().next().is_none());
    assert_eq!(tree(&desk.at("base")), before);
}

#[test]
fn commands_run_over_the_directory_itself() {
    needs!(as_root());
    over_the_directory(&Desk::new(), &[]);
}

/// What holds for commands, of root and of others.
fn over_the_directory(desk: &Desk, options: &[&str]) {
    desk.done(&[&["create", "w", "--from", "./base"], options].concat());
    let base = desk.at("base");
    let path = base.to_str().unwrap();
    let shell = |script: &str| desk.run(&["run", "w", "--", "sh", "-c", script]);
    let output = shell(&format!("pwd; echo inside >{path}/inside; cat {path}/inside; exit 7"));
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(7), format!("{path}\ninside\n")));
    assert!(!base.join("inside").exists());
    // What it wrote is there for the next one, and the command's working directory stays.
    let mut next = desk.command(&["run", "w", "--", "sh", "-c", "cat ../../inside; pwd"]);
    let output = finish(next.current_dir(base.join("d/e")));
    assert_eq!(text(&output.stdout), format!("inside\n{path}/d/e\n"), "{}", text(&output.stderr));
    // A signal ends it as it would end the command alone.
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&shell("kill -TERM $$").status), Some(15));
    assert_eq!(desk.refused(&["run", "w", "--", "/missing"], 127).lines().count(), 1);
    // A command that did not start leaves the workspace.
    assert!(desk.refused(&["run", "--discard", "w", "--", "/missing"], 127).contains("not discarded"));
    // While one runs, the workspace cannot be discarded.
    let mut waiting = desk.command(&["run", "w", "--", "sh", "-c", "echo started; read line"]);
    let mut child = waiting.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut started = [0; 8];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut started).unwrap();
    assert!(desk.refused(&["discard", "w"], 5).contains("in use"));
    drop(child.stdin.take());
    child.wait().unwrap();
    let output = desk.run(&["run", "--discard", "w", "--", "sh", "-c", "kill -INT $$"]);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_eq!(desk.done(&["list", "-H"]), "");
    assert!(!base.join("inside").exists());
}

#[test]
fn limits_and_rules_hold() {
    needs!(as_root());
    let desk = Desk::new();
    let (program, event) = (desk.at("events.d/note"), desk.at("event"));
    fs::create_dir(desk.at("events.d")).unwrap();
    fs::write(&program, format!("#!/bin/sh\nenv >{0}.new && mv {0}.new {0}\n", event.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let view = desk.made(&["--size", "1M", "--files", "50", "--ro", "d", "--hide", "*.pem"]);
    assert!(!view.join("key.pem").exists() && fs::write(view.join("other.pem"), "").is_err());
    for (what, done) in [
        ("write", fs::write(view.join("d/b"), "x")),
        ("create", fs::write(view.join("d/new"), "x")),
        ("remove", fs::remove_file(view.join("d/e/c"))),
        ("rename", fs::rename(view.join("d"), view.join("y"))),
        ("chmod", fs::set_permissions(view.join("d/b"), fs::Permissions::from_mode(0o600))),
    ] {
        assert_eq!(done.map_err(|error| error.raw_os_error()), Err(Some(30)), "{what}");
    }
    const EDQUOT: i32 = 122;
    let large = vec![7; 2 << 20];
    assert_eq!(fs::write(view.join("large"), &large).unwrap_err().raw_os_error(), Some(EDQUOT));
    fs::remove_file(view.join("large")).unwrap();
    eventually("the event", || event.exists());
    let variables = fs::read_to_string(&event).unwrap();
    for variable in ["NACRE_EVENT=workspace-full", "NACRE_WORKSPACE=w", "NACRE_WHICH=whole"] {
        assert!(variables.lines().any(|line| line == variable), "{variable}: {variables}");
    }
    let many: Vec<_> = (0..60).map(|number| fs::write(view.join(format!("f{number}")), "")).collect();
    assert!(many.iter().any(|made| made.as_ref().is_err_and(|error| error.raw_os_error() == Some(EDQUOT))));
    fs::write(view.join("a"), "changed").unwrap_or_default();
    assert_eq!(fs::read_to_string(desk.at("base/a")).unwrap(), "a");
    desk.discarded("w");
}

/// A full disk is another error than the limit of the workspace.
#[test]
fn a_full_disk_is_no_limit() {
    needs!(as_root());
    const ENOSPC: i32 = 28;
    let desk = Desk::new();
    fs::create_dir(desk.at("state")).unwrap();
    let state = desk.at("state");
    let mounted = run("mount", ["-t", "tmpfs", "-o", "size=8M", "tmpfs", state.to_str().unwrap()]);
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    let view = desk.made(&["--size", "1G"]);
    let written = fs::write(view.join("large"), vec![7; 16 << 20]).and_then(|()| fs::File::open(view.join("large")));
    assert_eq!(written.and_then(|file| file.sync_all()).unwrap_err().raw_os_error(), Some(ENOSPC));
    desk.discarded("w");
}

#[test]
fn names_and_states_change() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    fs::write(view.join("new"), "1").unwrap();
    eventually("the view is not in use", || desk.run(&["snapshot", "w@one"]).status.success());
    fs::write(view.join("new"), "2").unwrap();
    fs::remove_file(view.join("a")).unwrap();
    eventually("the view is not in use", || desk.run(&["rollback", "w@one"]).status.success());
    assert_eq!(fs::read_to_string(view.join("new")).unwrap(), "1");
    assert!(view.join("a").exists());
    eventually("the view is not in use", || desk.run(&["rename", "w", "v"]).status.success());
    assert_eq!(fs::read_to_string(view.join("new")).unwrap(), "1");
    assert_eq!(desk.done(&["list", "-H", "-o", "name,snapshots"]), "v\tone\n");
    desk.refused(&["rollback", "v@missing"], 3);
    desk.refused(&["rollback", "v"], 2);
    // A view that was unmounted comes back as it was.
    assert!(run(nacre(), [Path::new("umount"), &view]).status.success());
    assert_eq!(desk.done(&["list", "-H", "-o", "state"]), "unmounted\n");
    desk.done(&["mount", "v"]);
    assert_eq!(fs::read_to_string(view.join("new")).unwrap(), "1");
    desk.discarded("v");
}

#[test]
fn a_workspace_lies_over_another_one() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    fs::write(view.join("a"), "outer").unwrap();
    let inner = PathBuf::from(desk.done(&["create", "inner", "--from", "w"]).trim());
    assert_eq!(fs::read_to_string(inner.join("a")).unwrap(), "outer");
    fs::write(inner.join("a"), "inner").unwrap();
    assert_eq!(fs::read_to_string(view.join("a")).unwrap(), "outer");
    let base = desk.at("base/a");
    assert_eq!(desk.done(&["run", "inner", "--", "cat", base.to_str().unwrap()]), "inner");
    desk.discarded("inner");
    desk.discarded("w");
}

#[test]
fn one_process_serves_many() {
    needs!(as_root());
    let desk = Desk::new();
    let names: Vec<String> = (0..20).map(|number| format!("w{number}")).collect();
    for name in &names {
        let view = PathBuf::from(desk.done(&["create", name, "--from", "./base"]).trim());
        fs::write(view.join("own"), name).unwrap();
    }
    let output = run(nacre(), ["status", "-H", "-o", "pid"]);
    let mut pids: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    pids.dedup();
    assert_eq!(pids.len(), 1, "{pids:?}");
    for name in &names {
        let own = desk.at(&format!("state/workspaces/{name}/view/own"));
        assert_eq!(fs::read_to_string(own).unwrap(), *name);
        desk.discarded(name);
    }
}

#[test]
fn a_killed_process_loses_nothing() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    fs::write(view.join("a"), "changed").unwrap();
    let pid: u32 = text(&run(nacre(), ["status", "-H", "-o", "pid"]).stdout).trim().parse().unwrap();
    kill(pid, Signal::KILL);
    eventually("the view is dead", || desk.done(&["list", "-H", "-o", "state"]) == "dead\n");
    let base = desk.at("base/a");
    assert_eq!(desk.done(&["run", "w", "--", "cat", base.to_str().unwrap()]), "changed");
    assert_eq!(fs::read_to_string(&base).unwrap(), "a");
    desk.discarded("w");
}

#[test]
fn an_ordinary_user_needs_nothing() {
    needs!(can_mount());
    needs!(crate::user::as_user("workspace::an_ordinary_user_needs_nothing"));
    let desk = Desk::new();
    let before = tree(&desk.at("base"));
    let view = desk.made(&[]);
    work_in(&view);
    assert_eq!(tree(&desk.at("base")), before);
    desk.discarded("w");
    let namespaces = Command::new("unshare").args(["-Ur", "true"]).output();
    if namespaces.is_ok_and(|output| output.status.success()) {
        over_the_directory(&desk, &["--read-only-below"]);
    }
}

/// A commit of each kind of change gives the directory what the view showed; a conflict gives it nothing.
#[test]
fn a_commit_makes_the_view_true() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    work_in(&view);
    let shown = tree(&view);
    assert_eq!(desk.run(&["diff", "w"]).status.code(), Some(1));
    let listed = text(&desk.run(&["diff", "-H", "w"]).stdout);
    let names: Vec<String> =
        listed.lines().map(|line| line.split('\t').take(3).collect::<Vec<_>>().join(" ")).collect();
    for line in ["M d/b ", "D d/e/c ", "R moved a", "A new ", "A x ", "A link "] {
        assert!(names.iter().any(|name| name == line), "{line}: {names:?}");
    }
    // Others change a path meanwhile.
    fs::write(desk.at("base/d/e/c"), "theirs").unwrap();
    let before = tree(&desk.at("base"));
    let said = desk.refused(&["commit", "w"], 4);
    assert!(said.contains("d/e/c: removed here, modified in the base"), "{said}");
    assert_eq!(tree(&desk.at("base")), before);
    desk.done(&["commit", "--ours", "w"]);
    assert_eq!(tree(&desk.at("base")), shown);
    assert_eq!(tree(&view), shown);
    assert_eq!(desk.done(&["diff", "w"]), "");
    desk.discarded("w");
    assert_eq!(tree(&desk.at("base")), shown);
}

/// Root's commits say what they would make dangerous.
#[test]
fn set_id_bits_take_an_administrators_word() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    fs::write(view.join("tool"), "").unwrap();
    fs::set_permissions(view.join("tool"), fs::Permissions::from_mode(0o4755)).unwrap();
    std::os::unix::fs::chown(view.join("a"), Some(1234), Some(1234)).unwrap();
    let said = desk.refused(&["commit", "w"], 1);
    assert!(said.contains("tool: ") && said.contains("a: ") && said.contains("nothing is committed"), "{said}");
    assert!(!desk.at("base/tool").exists());
    desk.done(&["commit", "-f", "w"]);
    assert_eq!(fs::metadata(desk.at("base/tool")).unwrap().mode() & 0o7777, 0o4755);
    assert_eq!(fs::metadata(desk.at("base/a")).unwrap().uid(), 1234);
    desk.discarded("w");
}

#[test]
fn changes_travel_as_a_layer() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    work_in(&view);
    desk.done(&["export", "-o", "changes.tar", "w"]);
    let copy = PathBuf::from(desk.done(&["create", "v", "--from", "./base"]).trim());
    desk.done(&["import", "v", "changes.tar"]);
    assert_eq!(tree(&copy), tree(&view));
    assert!(desk.refused(&["import", "v", "changes.tar"], 1).contains("has changes already"));
    desk.discarded("v");
    desk.discarded("w");
}

/// A workspace over a file system of a pool shows a snapshot, and is committed into the file system.
#[test]
fn a_file_system_of_a_pool_is_a_base() {
    needs!(as_root());
    let yard = crate::mounting::pools::Yard::new();
    let (name, _, at) = yard.create("ws", &[]);
    fs::write(at.join("a"), "one").unwrap();
    fs::write(at.join("b"), "two").unwrap();
    let view = PathBuf::from(yard.nacre(&["workspace", "create", "w", "--from", &name]).trim());
    fs::write(view.join("a"), "changed").unwrap();
    fs::remove_file(view.join("b")).unwrap();
    fs::write(view.join("c"), "new").unwrap();
    // The snapshot does not change, the file system may.
    fs::write(at.join("other"), "theirs").unwrap();
    fs::write(at.join("c"), "theirs").unwrap();
    assert!(!view.join("other").exists());
    let (code, said) = yard.refused(&["workspace", "commit", "w"]);
    assert!(code == 4 && said.contains("c: ") && said.contains("added in the base") && !said.contains("a: "), "{said}");
    yard.nacre(&["workspace", "commit", "--ours", "w"]);
    let content = |name: &str| fs::read_to_string(at.join(name)).ok();
    assert_eq!((content("a").as_deref(), content("b"), content("c").as_deref()), (Some("changed"), None, Some("new")));
    assert_eq!(content("other").as_deref(), Some("theirs"));
    assert_eq!(fs::read_to_string(view.join("other")).unwrap(), "theirs");
    assert!(yard.nacre(&["fs", "list", "-t", "snapshot", "-H", "-o", "name"]).contains("@workspace-w"));
    eventually("the workspace is not in use", || yard.run(&["workspace", "discard", "w"]).status.success());
    assert!(!yard.nacre(&["fs", "list", "-t", "snapshot", "-H", "-o", "name"]).contains("@workspace-w"));
}
