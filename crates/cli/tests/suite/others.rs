//! A user's files in the directories of sockets delay no other user: root asks other users'
//! processes only on request, all at once and for a second.

use crate::mounting::{as_root, eventually, finish, is_mounted, kill, nacre, needs, run, scratch, text};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Sockets of each kind. Asked one after the other, with two seconds each, they would take longer
/// than any command here may.
const MANY: usize = 150;

/// A user id that no one else uses, with a directory for sockets; removed at the end.
struct User {
    uid: u32,
    directory: PathBuf,
}

impl User {
    fn new(uid: u32) -> User {
        let directory = PathBuf::from(format!("/tmp/nacre-{uid}"));
        // Left by a test that was killed.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        chown(&directory, Some(uid), Some(uid)).unwrap();
        User { uid, directory }
    }

    /// Listens as this user at sockets, and never answers.
    fn listens(&self, names: impl Iterator<Item = String>) -> Vec<UnixListener> {
        let (uid, paths) = (self.uid, names.map(|name| self.directory.join(name)).collect::<Vec<_>>());
        // The peer's credentials are those of the listening thread: one thread becomes the user,
        // and ends.
        let listen = move || {
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(uid)).unwrap();
            let listeners: Vec<UnixListener> = paths.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
            listeners.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
            listeners
        };
        std::thread::spawn(listen).join().unwrap()
    }

    /// A command of this user.
    fn run(&self, program: &Path, place: &Path, words: &[&str]) -> Output {
        let mut command = Command::new("setpriv");
        command.args([
            format!("--reuid={}", self.uid),
            format!("--regid={}", self.uid),
            "--clear-groups".to_owned(),
            "--".to_owned(),
        ]);
        command
            .arg(program)
            .args(words)
            .current_dir(place)
            .env("HOME", place)
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("NACRE_STATE_DIR");
        finish(&mut command)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Files of the honest user, removed at the end.
struct Home<'a> {
    user: &'a User,
    program: PathBuf,
    place: PathBuf,
    pool: String,
}

impl Drop for Home<'_> {
    fn drop(&mut self) {
        for mount in crate::mounting::mounts_below(&self.place) {
            let _ = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH);
        }
        self.user.run(&self.program, &self.place, &["pool", "export", "-f", &self.pool]);
    }
}

/// Runs a command as root; returns its success, its output and its process id.
fn root(words: &[&str]) -> (bool, String, i32) {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$; exec \"$0\" \"$@\""]).arg(nacre()).args(words).env("LC_ALL", "C");
    let output = finish(&mut command);
    let said = text(&output.stdout) + &text(&output.stderr);
    let (number, said) = said.split_once('\n').unwrap();
    (output.status.success(), said.to_owned(), number.parse().unwrap())
}

/// How often the process of this number has knocked.
fn knocked(listeners: &[UnixListener], number: i32) -> usize {
    let by = |stream: &UnixStream| {
        rustix::net::sockopt::socket_peercred(stream).unwrap().pid.as_raw_nonzero().get() == number
    };
    listeners
        .iter()
        .map(|listener| std::iter::from_fn(|| listener.accept().ok()).filter(|(stream, _)| by(stream)).count())
        .sum()
}

#[test]
fn a_user_who_never_answers_delays_nobody() {
    needs!(as_root());
    // fusermount3 needs a name of the mounting user: `daemon` is in every user database.
    let (hostile, honest, place) = (User::new(1_000_000 + std::process::id()), User::new(1), scratch());
    let names = (0..MANY).flat_map(|number| [format!("{number}-0.sock"), format!("p{number}.pool")]);
    let listeners = hostile.listens(names);
    for number in 0..MANY {
        let at = |end: &str| hostile.directory.join(format!("q{number}.{end}"));
        symlink("/dev/zero", at("sock")).unwrap();
        assert!(run("mkfifo", [at("pool")]).status.success());
        assert!(run("mkfifo", [hostile.directory.join(format!("r{number}.sock"))]).status.success());
    }
    // What an honest user has is found among it.
    let home = place.path().join("home");
    for name in ["home", "home/source", "home/mount", "home/other"] {
        fs::create_dir(place.path().join(name)).unwrap();
        chown(place.path().join(name), Some(honest.uid), Some(honest.uid)).unwrap();
    }
    let program = place.path().join("nacre");
    assert!(run("cp", [nacre(), program.clone()]).status.success());
    let pool = format!("others{}", honest.uid);
    let _home = Home { user: &honest, program: program.clone(), place: home.clone(), pool: pool.clone() };
    for words in [
        &["mirror", "--no-allow-other", "source", "mount"][..],
        &["mirror", "--no-allow-other", "source", "other"],
        &["pool", "create", "--size", "64M", "-m", "none", &pool, "image"],
    ] {
        let output = honest.run(&program, &home, words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }
    let (mount, other) = (home.join("mount"), home.join("other"));
    let at = |path: &Path| path.to_str().unwrap().to_owned();

    // Root's own mounts and pools: no other user's process is asked.
    let mine = crate::mounting::Fixture::mirror(&[]);
    for words in [
        &["status"][..],
        &["top", "--once"],
        &["metrics"],
        &["reload", mine.mountpoint.to_str().unwrap()],
        &["cage", "list"],
        &["union", "list"],
        &["pool", "list"],
        &["pool", "status"],
        &["pool", "iostat"],
        &["fs", "list"],
        &["fs", "mount"],
        &["umount", mine.mountpoint.to_str().unwrap()],
    ] {
        let (_, said, number) = root(words);
        assert_eq!(knocked(&listeners, number), 0, "{words:?}: {said}");
        assert!(!said.contains(&pool) && !said.contains(&at(&mount)), "{words:?}: {said}");
    }
    assert!(!is_mounted(&mine.mountpoint));
    // Noted on terminals alone, for which the next list is shorter.
    let hint = "mounts of other users: --all-users asks";
    assert!(root(&["status"]).1.contains(hint));
    assert!(root(&["status"]).1.contains(hint));

    // All users, on request: processes that answer are shown, and the other is named.
    for (words, shown) in [
        (&["status", "--all-users"][..], at(&mount)),
        (&["top", "--once", "--all-users"], at(&mount)),
        (&["metrics", "--all-users"], at(&mount)),
        (&["cage", "list", "--all-users"], String::new()),
        (&["union", "list", "--all-users"], String::new()),
        (&["pool", "list", "--all-users"], pool.clone()),
        (&["pool", "status", "--all-users"], pool.clone()),
        (&["fs", "list", "--all-users"], pool.clone()),
    ] {
        let (mut said, mut number) = (String::new(), 0);
        // On a machine with much to do, a second may be too short for the honest one.
        eventually(&format!("{words:?} shows it"), || {
            (_, said, number) = root(words);
            said.contains(&shown)
        });
        assert!(
            words[0] == "union" || said.contains(&format!("user {} keeps sockets", hostile.uid)),
            "{words:?}: {said}"
        );
        assert!(knocked(&listeners, number) > 0, "{words:?}");
    }

    // What is named is asked of its owner alone.
    for words in [&["status", &at(&mount)][..], &["reload", &at(&mount)]] {
        let (done, said, number) = root(words);
        assert!(done, "{words:?}: {said}");
        assert_eq!(knocked(&listeners, number), 0, "{words:?}");
    }
    assert!(root(&["pool", "list", &pool]).1.contains("ONLINE"));
    assert!(!root(&["pool", "list", "p7"]).0);

    // A mount ends whatever its owner's process does.
    let (_, told, _) = root(&["status", "-H", "-o", "pid", &at(&other)]);
    let process: u32 = told.lines().next().unwrap().parse().unwrap();
    kill(process, Signal::STOP);
    assert!(root(&["umount", &at(&other)]).0);
    kill(process, Signal::CONT);
    assert!(root(&["umount", &at(&mount)]).0);
    assert!(!is_mounted(&mount) && !is_mounted(&other));
    let output = honest.run(&program, &home, &["pool", "export", &pool]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Another mount namespace may hold the mounts still, and their processes with them.
    let left = || -> Vec<String> {
        let names =
            fs::read_dir(&honest.directory).unwrap().flatten().map(|file| file.file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".pool")).collect()
    };
    eventually("the end of the honest pool", || left().is_empty());
}

/// Holds a lease on each file that is named, until it is killed.
const LEASES: &str = "import fcntl,os,signal,sys,time
signal.signal(signal.SIGIO, signal.SIG_IGN)
for name in sys.argv[1:]: fcntl.fcntl(os.open(name, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('held', flush=True)
time.sleep(1000)";

#[test]
fn leases_on_files_delay_no_search_for_pools() {
    needs!(as_root());
    let place = scratch();
    // Each lease would be waited for as long as the system says, 45 seconds.
    let files: Vec<PathBuf> = (0..4).map(|number| place.path().join(format!("disk{number}"))).collect();
    for file in &files {
        fs::File::create(file).unwrap().set_len(64 << 20).unwrap();
    }
    let holder = Command::new("python3").args(["-c", LEASES]).args(&files).stdout(std::process::Stdio::piped()).spawn();
    let Ok(mut holder) = holder else {
        crate::mounting::skip("python3", "python3 is not installed");
        return;
    };
    let mut said = [0; 4];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut said).unwrap();
    let (_, said, _) = root(&["pool", "import", "-d", place.path().to_str().unwrap()]);
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(said.contains("no pools available to import"), "{said}");
}
