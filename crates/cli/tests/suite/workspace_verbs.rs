//! Workspaces for scripts and at terminals: JSON, exit codes, signals, questions.

use crate::mounting::{as_root, can_mount, eventually, finish, nacre, needs, run, skip, text};
use crate::workspace::{Desk, tree};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

fn parsed(said: &str) -> Value {
    serde_json::from_str(said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Runs a verb until no process that looks at all mounts makes a view busy; returns its output, as JSON.
fn once_free(desk: &Desk, words: &[&str]) -> Value {
    let mut said = String::new();
    eventually("the view is not in use", || {
        let output = desk.run(words);
        assert!(matches!(output.status.code(), Some(0 | 5)), "{words:?}: {}", text(&output.stderr));
        said = text(&output.stdout);
        output.status.success()
    });
    parsed(&said)
}

#[test]
fn each_verb_reports_as_json() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.at("view");
    let made = parsed(&desk.done(&["create", "w", "--from", "./base", "--at", "view", "--json"]));
    assert_eq!(made["name"], "w");
    assert_eq!((made["state"].as_str(), made["view"].as_str()), (Some("mounted"), view.to_str()));
    fs::write(view.join("a"), "changed").unwrap();
    let mounted = parsed(&desk.done(&["mount", "--json", "w"]));
    assert_eq!((mounted["name"].as_str(), mounted["state"].as_str()), (Some("w"), Some("mounted")));
    assert_eq!(once_free(&desk, &["snapshot", "--json", "w@one"])["snapshots"], serde_json::json!(["one"]));
    assert_eq!(once_free(&desk, &["rollback", "--json", "w@one"])["name"], "w");
    let exported = once_free(&desk, &["export", "--json", "-o", "changes.tar", "w"]);
    assert_eq!(exported["bytes"].as_u64(), Some(fs::metadata(desk.at("changes.tar")).unwrap().len()));
    // The archive goes to standard output: nothing else does.
    desk.refused(&["export", "--json", "w"], 2);
    desk.done(&["create", "v", "--from", "./base"]);
    assert_eq!(once_free(&desk, &["import", "--json", "v", "changes.tar"])["files"], 1);
    assert_eq!(once_free(&desk, &["rename", "--json", "v", "u"])["name"], "u");
    let diff = desk.run(&["diff", "--json", "w"]);
    assert_eq!((diff.status.code(), parsed(&text(&diff.stdout))[0]["path"].as_str()), (Some(1), Some("a")));
    let committed = once_free(&desk, &["commit", "--json", "w"]);
    assert_eq!((committed["committed"]["names"].as_u64(), committed["undone"].as_bool()), (Some(1), Some(false)));
    // Those that can be discarded are, and each is named.
    eventually("the view is not in use", || {
        let output = desk.run(&["discard", "--json", "missing", "w"]);
        let reports = parsed(&text(&output.stdout));
        assert_eq!((output.status.code(), reports[0]["discarded"].as_bool()), (Some(3), Some(false)));
        assert!(reports[0]["error"].as_str().is_some_and(|error| error.contains("missing")), "{reports}");
        reports[1]["discarded"] == true
    });
    assert_eq!(desk.done(&["list", "-H", "-o", "name"]), "u\n");
    desk.discarded("u");
}

/// The report of `run` goes to a file or a descriptor: standard output is the command's.
#[test]
fn a_command_reports_its_end() {
    needs!(as_root());
    let desk = Desk::new();
    desk.done(&["create", "w", "--from", "./base"]);
    let ended = |words: &[&str], code: i32| {
        let said = desk.refused(&[&["run", "--json", "report"], words].concat(), code);
        (parsed(&fs::read_to_string(desk.at("report")).unwrap()), said)
    };
    let (report, said) = ended(&["w", "--", "sh", "-c", "echo out; exit 7"], 7);
    assert_eq!(said, "out\n");
    assert_eq!(report["command"], serde_json::json!(["sh", "-c", "echo out; exit 7"]));
    assert_eq!((report["started"].as_bool(), report["exit_code"].as_i64()), (Some(true), Some(7)));
    assert_eq!((&report["signal"], report["discarded"].as_bool()), (&Value::Null, Some(false)));
    let (report, _) = ended(&["w", "--", "sh", "-c", "kill -TERM $$"], 143);
    assert_eq!((report["signal"].as_i64(), report["exit_code"].as_i64()), (Some(15), Some(143)));
    let (report, _) = ended(&["--discard", "w", "--", "/missing"], 127);
    assert_eq!((report["started"].as_bool(), report["discarded"].as_bool()), (Some(false), Some(false)));
    assert!(report["error"].as_str().is_some_and(|error| error.contains("did not start")), "{report}");
    // A file that cannot be written is a failure before the command runs.
    let said = desk.refused(&["run", "--json", "missing/report", "w", "--", "touch", "ran"], 125);
    assert!(said.contains("missing/report") && !desk.at("state/workspaces/w/changes/upper/ran").exists(), "{said}");
    let script = format!("exec 3>report3; {} workspace run --discard --json /dev/fd/3 w -- true", nacre().display());
    let shell = finish(
        Command::new("sh").args(["-c", &script]).current_dir(desk.at("")).env("NACRE_STATE_DIR", desk.at("state")),
    );
    assert_eq!(shell.status.code(), Some(0), "{}", text(&shell.stderr));
    assert_eq!(parsed(&fs::read_to_string(desk.at("report3")).unwrap())["discarded"], true);
    assert_eq!(desk.done(&["list", "-H"]), "");
}

#[test]
fn exit_codes_are_distinct() {
    needs!(as_root());
    let desk = Desk::new();
    // The workspace is the trouble, not the command.
    desk.refused(&["run", "missing", "--", "true"], 125);
    desk.refused(&["diff", "missing"], 3);
    let view = desk.made(&[]);
    assert_eq!(desk.refused(&["diff", "w"], 0), "");
    fs::write(view.join("a"), "changed").unwrap();
    desk.refused(&["diff", "w"], 1);
    desk.refused(&["run", "w", "--", "/missing"], 127);
    desk.refused(&["run", "w", "--", "/etc/passwd"], 126);
    // Questions need somebody who answers.
    assert!(desk.refused(&["commit", "-i", "w"], 2).contains("terminal"));
    assert!(run(nacre(), [Path::new("umount"), &view]).status.success());
    let (upper, away) = (desk.at("state/workspaces/w/changes/upper"), desk.at("away"));
    fs::rename(&upper, &away).unwrap();
    fs::write(&upper, "").unwrap();
    desk.refused(&["diff", "w"], 2);
    fs::remove_file(&upper).unwrap();
    fs::rename(&away, &upper).unwrap();
    desk.discarded("w");
}

/// A signal to `run --discard` ends the command; the workspace goes, and the exit code is the signal's.
#[test]
fn signals_end_the_command_and_its_workspace() {
    needs!(as_root());
    for (signal, code) in [(Signal::QUIT, 131), (Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let desk = Desk::new();
        desk.done(&["create", "w", "--from", "./base"]);
        let mut command =
            desk.command(&["run", "--discard", "w", "--", "sh", "-c", "ulimit -c 0; echo started; exec sleep 1000"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert_eq!(desk.done(&["list", "-H"]), "", "{signal:?}");
    }
}

/// Runs a verb at a terminal with these answers; returns its exit code and what the terminal showed.
fn at_a_terminal(desk: &Desk, words: &str, answers: &str) -> (Option<i32>, String) {
    let mut child = Command::new("script")
        .args(["-qec", &format!("{} workspace {words}", nacre().display()), "/dev/null"])
        .current_dir(desk.at(""))
        .env("NACRE_STATE_DIR", desk.at("state"))
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Open until the end: script(1) takes its end for the terminal's.
    let mut input = child.stdin.take().unwrap();
    input.write_all(answers.as_bytes()).unwrap();
    let mut shown = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut shown).unwrap();
    (child.wait().unwrap().code(), text(&shown))
}

#[test]
fn a_commit_asks_for_each_change() {
    needs!(can_mount());
    needs!(crate::user::as_user("workspace_verbs::a_commit_asks_for_each_change"));
    if Command::new("script").arg("--version").output().is_err() {
        skip("terminals", "script is not installed");
        return;
    }
    let desk = Desk::new();
    let before = tree(&desk.at("base"));
    let view = desk.made(&[]);
    fs::write(view.join("a"), "changed\x1b[31m\n").unwrap();
    fs::write(view.join("d/b"), "changed").unwrap();
    fs::remove_file(view.join("d/e/c")).unwrap();
    fs::write(view.join("new"), "new").unwrap();
    fs::write(view.join("other"), "other").unwrap();
    let asked = |answers: &str| {
        let mut result = (None, String::new());
        eventually("the view is not in use", || {
            result = at_a_terminal(&desk, "commit -i w", answers);
            result.0 != Some(5)
        });
        result
    };
    // Quitting after a yes commits nothing.
    let (code, shown) = asked("y\nq\n");
    assert!(code == Some(1) && shown.contains("nothing is committed"), "{code:?} {shown}");
    assert_eq!(tree(&desk.at("base")), before);
    // Of a, the difference is shown; d/b and all else below d stay.
    let (code, shown) = asked("?\nd\ny\ns\ny\nn\n");
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("+changed\\u{1b}[31m") && !shown.contains('\x1b'), "{shown}");
    assert!(shown.contains("(1/5) M a") && shown.contains("committed: 2 names"), "{shown}");
    let base = |name: &str| fs::read_to_string(desk.at("base").join(name)).ok();
    assert_eq!(base("a").as_deref(), Some("changed\x1b[31m\n"));
    assert_eq!((base("new").as_deref(), base("d/b").as_deref(), base("other")), (Some("new"), Some("b"), None));
    assert_eq!(base("d/e/c").as_deref(), Some("c"));
    let left = |desk: &Desk| text(&desk.run(&["diff", "w"]).stdout);
    assert_eq!(left(&desk), "M d/b\nD d/e/c\nA other\n");
    assert_eq!(fs::read_to_string(view.join("d/b")).unwrap(), "changed");
    // A conflict is asked for as well; the directory's changes are taken with one answer.
    fs::write(desk.at("base/d/b"), "theirs").unwrap();
    let (code, shown) = asked("a\ny\nx\no\n");
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("d/b: modified here, modified in the base. Take"), "{shown}");
    assert_eq!(
        (base("d/b").as_deref(), base("d/e/c"), base("other").as_deref()),
        (Some("changed"), None, Some("other"))
    );
    assert_eq!(left(&desk), "");
    desk.discarded("w");
}

/// Mounts of workspaces have their names in status, top and metrics.
#[test]
fn figures_name_the_workspace() {
    needs!(as_root());
    let desk = Desk::new();
    let view = desk.made(&[]);
    let said = |words: &[&str]| text(&run(nacre(), words.iter().map(|word| word.to_string())).stdout);
    assert_eq!(said(&["status", "-H", "-o", "source"]), "workspace:w\n");
    assert!(said(&["top", "--once"]).contains(&format!("{} (workspace w)", view.display())));
    let metrics = said(&["metrics"]);
    let line = format!("nacre_mount_info{{mountpoint=\"{}\",source=\"workspace:w\"}} 1", view.display());
    assert!(metrics.lines().any(|metric| metric == line), "{metrics}");
    desk.discarded("w");
}

/// Runs the comparison of real programs with native runs.
fn as_natively(programs: &[&str]) {
    let scratch = crate::mounting::scratch();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/try-workspaces");
    // An ordinary user cannot reach the sources.
    let (copied, directory) = (scratch.path().join("try-workspaces"), scratch.path().join("work"));
    fs::copy(script, &copied).unwrap();
    fs::set_permissions(&copied, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(&directory).unwrap();
    let mut command = Command::new(copied);
    command.args(programs).env("NACRE_BINARY", nacre()).env("NACRE_TRY_DIR", &directory).env("NACRE_TRY_FILES", "60");
    let output = finish(&mut command);
    crate::mounting::clear(scratch.path());
    let said = text(&output.stdout) + &text(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "{said}");
    for program in programs {
        let prefix = format!("{program}: ");
        assert!(said.lines().any(|line| line.starts_with(&prefix)), "{program}: {said}");
    }
}

#[test]
fn builds_end_as_natively() {
    needs!(as_root());
    as_natively(&["git", "make", "cargo"]);
}

#[test]
fn packages_of_python_and_podman_are_as_natively() {
    needs!(as_root());
    as_natively(&["pip", "npm", "podman"]);
}

#[test]
fn a_users_builds_end_as_natively() {
    needs!(can_mount());
    needs!(crate::user::as_user("workspace_verbs::a_users_builds_end_as_natively"));
    let namespaces = Command::new("unshare").args(["-Ur", "true"]).output();
    if !namespaces.is_ok_and(|output| output.status.success()) {
        skip("namespaces", "this user cannot make user namespaces");
        return;
    }
    as_natively(&["git", "make"]);
}
