//! Completion in bash, zsh and fish, and man pages, as users see them: in a terminal.
//!
//! A terminal is a window of tmux(1): keys go in, the screen is read, and checked for the expected
//! text. Shells that are not installed are skipped (`NACRE_TEST_REQUIRE=bash,zsh,fish,man,tmux`
//! forbids that).

use crate::mounting::pools::Yard;
use crate::mounting::{as_root, finish, nacre, needs, run, scratch, skip, text};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

fn is_there(program: &str, version: &str) -> bool {
    let found = Command::new(program).arg(version).output();
    found.is_ok_and(|output| output.status.success()) || skip(program, &format!("{program} is not installed"))
}

/// A window with a program in it.
struct Terminal {
    socket: String,
}

impl Terminal {
    fn new(place: &Path, state: &Path, command: &str) -> Terminal {
        let socket = place.join("tmux").to_str().unwrap().to_owned();
        let path = format!("{}:{}", place.display(), std::env::var("PATH").unwrap());
        let mut tmux = Command::new("tmux");
        tmux.args(["-S", &socket, "-f", "/dev/null", "new-session", "-d", "-x", "160", "-y", "60", command]);
        tmux.current_dir(place).env("PATH", path).env("NACRE_STATE_DIR", state).env("LC_ALL", "C.UTF-8");
        tmux.env("HOME", place).env("TERM", "screen").env_remove("TMUX");
        let output = finish(&mut tmux);
        assert!(output.status.success(), "{}", text(&output.stderr));
        Terminal { socket }
    }

    fn tmux(&self, words: &[&str]) -> String {
        text(&run("tmux", [&["-S", self.socket.as_str()], words].concat()).stdout)
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn send(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn type_text(&self, words: &str) {
        self.tmux(&["send-keys", "-l", words]);
    }

    /// Waits for a screen that is right.
    fn shows_what(&self, what: &str, right: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        for _ in 0..600 {
            screen = self.screen();
            if right(&screen) {
                return screen;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("{what} is not on the screen:\n{}", screen.trim_end());
    }

    /// Waits for something on the screen.
    fn shows(&self, what: &[&str]) -> String {
        self.shows_what(&format!("{what:?}"), |screen| what.iter().all(|what| screen.contains(what)))
    }

    /// Requests the completions of a line, on an empty screen.
    fn offers(&self, line: &str, wanted: &[&str]) -> String {
        // No interrupt: the terminal would throw away what is typed meanwhile.
        self.send(&["C-u"]);
        self.send(&["C-l"]);
        self.shows_what("an empty line", |screen| screen.trim() == "ready>");
        self.type_text(line);
        self.send(&["Tab", "Tab"]);
        self.shows(wanted)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-S", &self.socket, "kill-server"]).output();
    }
}

/// The programs by their names in a directory, and their scripts for a shell.
fn prepare(place: &Path, shell: &str) -> Vec<std::path::PathBuf> {
    let names = ["nacre", "zfs", "zpool", "bindfs"];
    let script = |name: &&str| {
        let _ = symlink(nacre(), place.join(name));
        let output = run(nacre(), ["completions", shell, name]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let file = place.join(format!("{name}.{shell}"));
        fs::write(&file, &output.stdout).unwrap();
        file
    };
    names.iter().map(script).collect()
}

fn completes(shell: &str, start: &str) {
    needs!(as_root() && is_there("tmux", "-V") && is_there(shell, "--version"));
    let yard = Yard::new();
    // The pools of the other shells are there as well.
    let pool = yard.name(shell);
    let begun = &pool[..shell.len() - 1];
    let made = |words: &[&str]| {
        let output = finish(yard.command("nacre").args(words));
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    };
    let tank = yard.path("tank");
    made(&["pool", "create", "--size", "128M", "-m", tank.to_str().unwrap(), &pool, "image"]);
    made(&["fs", "create", &format!("{pool}/home")]);
    made(&["fs", "snapshot", &format!("{pool}/home@monday")]);
    made(&["fs", "snapshot", &format!("{pool}/home@morning")]);
    let place = scratch();
    let scripts = prepare(place.path(), shell);
    let file = place.path().join("start");
    let lines: String = scripts.iter().map(|script| format!("source {}\n", script.display())).collect();
    let prompt = if shell == "fish" { "function fish_prompt; echo 'ready> '; end\n" } else { "PS1='ready> '\n" };
    let before = if shell == "zsh" { "autoload -Uz compinit && compinit -u -D\nsetopt nobeep\n" } else { "" };
    fs::write(&file, format!("{before}{lines}{prompt}")).unwrap();
    if shell == "zsh" {
        fs::copy(&file, place.path().join(".zshrc")).unwrap();
    }
    let terminal = Terminal::new(place.path(), &yard.state(), &start.replace("START", file.to_str().unwrap()));
    terminal.shows(&["ready>"]);
    let (home, tank) = (format!("{pool}/home"), tank.display().to_string());
    for (line, wanted) in [
        // Commands and options of the one table.
        ("nacre f", &["fs"][..]),
        ("nacre mirror --chown-", &["--chown-deny", "--chown-ignore"]),
        // Words that an option takes.
        ("nacre mirror --coherence ", &["exclusive", "revalidate", "watch"]),
        ("nacre mirror --transport=", &["auto", "device", "uring"]),
        // Users, also for another name of the program.
        ("nacre mirror --force-user nob", &["nobody"]),
        ("bindfs -u nob", &["nobody"]),
        ("nacre mirror --force-group nogr", &["nogroup"]),
        // Mounts, pools, file systems, snapshots, properties.
        (&format!("nacre umount {}", &tank[..tank.len() - 1]), &[&tank]),
        (&format!("nacre pool scrub {begun}"), &[&pool]),
        (&format!("zpool status {begun}"), &[&pool]),
        (&format!("zfs list {pool}/ho"), &[&home]),
        (&format!("nacre fs destroy {home}@mo"), &["monday", "morning"]),
        (&format!("zfs rollback {home}@mor"), &["@morning"]),
        ("zfs set compr", &["compression="]),
        ("nacre fs create -o compression=zs", &["compression=zstd"]),
        ("zfs get compressr", &["compressratio"]),
    ] {
        let screen = terminal.offers(line, wanted);
        assert!(!screen.contains("panicked") && !screen.contains("error"), "{line}:\n{screen}");
    }
    drop(terminal);
}

#[test]
fn bash_completes() {
    completes("bash", "bash --noprofile --rcfile START -i");
}

#[test]
fn zsh_completes() {
    completes("zsh", "zsh -i");
}

#[test]
fn fish_completes() {
    completes("fish", "fish --no-config --init-command 'source START'");
}

/// Nothing is started for a completion: no pool that is not imported, no process.
#[test]
fn completion_imports_nothing() {
    needs!(as_root());
    let yard = Yard::new();
    let pool = yard.name("shells");
    let nacre = |words: &[&str]| finish(yard.command("nacre").args(words));
    assert!(nacre(&["pool", "create", "--size", "128M", "-m", "none", &pool, "image"]).status.success());
    let filesystem = nacre(&["complete", "zfs", "list", &pool]);
    assert_eq!(text(&filesystem.stdout), format!("{pool}\n"));
    assert!(nacre(&["pool", "export", &pool]).status.success());
    for words in [&["complete", "zfs", "list", pool.as_str()][..], &["complete", "nacre", "pool", "export", &pool]] {
        let output = nacre(words);
        assert_eq!(
            (output.status.success(), text(&output.stdout), text(&output.stderr)),
            (true, String::new(), String::new())
        );
    }
    let list = nacre(&["pool", "list", "-H", "-o", "name"]);
    assert!(!text(&list.stdout).contains(&pool));
}

#[test]
fn man_shows_the_pages() {
    needs!(is_there("man", "--version"));
    let place = scratch();
    let output = run(nacre(), [Path::new("man"), place.path()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let pages = text(&output.stdout);
    for page in pages.lines() {
        let mut man = Command::new("man");
        let output = finish(man.args(["-l", "--warnings=w", page]).env("MANWIDTH", "80").env("LC_ALL", "C.UTF-8"));
        let (shown, said) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && said.is_empty(), "{page}: {said}");
        let of_commands: &[&str] = if page.ends_with(".1") { &["SYNOPSIS", "EXIT STATUS"] } else { &[] };
        for head in ["NAME", "DESCRIPTION", "SEE ALSO"].iter().chain(of_commands) {
            assert!(shown.lines().any(|line| line == *head), "{page}: no {head}:\n{shown}");
        }
        assert!(!shown.lines().any(|line| line == "EXTRA"), "{page}");
    }
    // And in a terminal, where people read them.
    needs!(is_there("tmux", "-V"));
    let page = place.path().join("nacre-mirror.1");
    let terminal = Terminal::new(place.path(), place.path(), &format!("man -l {}", page.display()));
    let screen = terminal.shows(&["NACRE-MIRROR(1)", "nacre-mirror - ", "SYNOPSIS", "nacre mirror [OPTIONS] <SOURCE>"]);
    assert!(!screen.contains(".SH") && !screen.contains("\\f"), "{screen}");
}
