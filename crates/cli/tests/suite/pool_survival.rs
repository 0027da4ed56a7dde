//! Pools that survive the process that owns them: killed while programs use their file systems,
//! without an error in any program.
//!
//! `NACRE_SURVIVAL_KILLS` makes a campaign of the random one, from `NACRE_SURVIVAL_SEED`.

use crate::mounting::{
    as_root, eventually, finish, is_gone, is_mounted, kill, needs,
    pools::{Pool, Yard},
    text,
};
use crate::surviving::pools::{self, Surviving, is_dead, survives};
use rustix::process::Signal;
use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    os::unix::fs::{FileExt, MetadataExt, symlink},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

#[test]
fn a_pool_without_mounts_goes_on_and_stays_down_after_three_deaths() {
    needs!(as_root());
    let surviving = Surviving::made("plain", "64M", &[]);
    let pool = &surviving.pool;
    pool.nacre(&["fs", "set", "mountpoint=none", "%"]);
    assert!(pool.nacre(&["pool", "status", "%"]).contains("survives: yes, by process "));
    for round in 1..=2 {
        let killed = surviving.kill();
        // Requests during the failover wait.
        pool.nacre(&["pool", "sync", "%"]);
        assert_ne!(pool.process(&pool.name), killed);
        assert_eq!(surviving.restarts(), round);
        // What an export would need is there as well.
        pool.nacre(&["pool", "set", &format!("comment=round {round}"), "%"]);
    }
    surviving.kill();
    surviving.has_ended();
    let said = pool.nacre(&["pool", "status", "%"]);
    assert!(said.contains("the 3rd time within a minute: it stays down"), "{said}");
    let (_, said) = pool.refused(&["pool", "sync", "%"]);
    assert!(said.contains("has ended without exporting it") && said.contains("stays down"), "{said}");
    pool.import();
    assert_eq!(pool.nacre(&["pool", "get", "-H", "-o", "value", "comment", "%"]), "round 2\n");
    assert!(survives(pool).is_null(), "this import was not told to");
}

#[test]
fn what_a_pool_lies_on_is_gone_on_with_as_it_is() {
    needs!(as_root());
    let yard = Yard::new();
    let files: Vec<String> = (0..4)
        .map(|number| {
            let path = yard.path(&format!("device{number}"));
            File::create(&path).unwrap().set_len(128 << 20).unwrap();
            path.to_str().unwrap().to_owned()
        })
        .collect();
    let name = yard.name("devices");
    let at = yard.path("at");
    let words = ["pool", "create", "--survive", "-m", at.to_str().unwrap(), &name, "mirror", &files[0], &files[1]];
    yard.nacre(&words);
    let states = || {
        let said = yard.nacre(&["pool", "status", "%"]);
        let state = |file: &String| {
            let line = said.lines().find(|line| line.split_whitespace().next() == Some(file));
            line.map(|line| line.split_whitespace().nth(1).unwrap().to_owned())
        };
        files.iter().map(state).collect::<Vec<_>>()
    };
    let dies = || {
        let before = (states(), yard.process(&name));
        kill(before.1, Signal::KILL);
        yard.nacre(&["pool", "sync", "%"]);
        assert_ne!(yard.process(&name), before.1);
        assert_eq!(states(), before.0);
        for file in files.iter().zip(states()).filter(|(_, state)| state.is_some()).map(|(file, _)| file) {
            let lock =
                rustix::fs::flock(File::open(file).unwrap(), rustix::fs::FlockOperation::NonBlockingLockExclusive);
            assert_eq!(lock, Err(rustix::io::Errno::WOULDBLOCK), "{file} is the pool's");
        }
    };
    let again = || {
        yard.nacre(&["pool", "export", "%"]);
        yard.nacre(&["pool", "import", "--survive", "-d", yard.place.path().to_str().unwrap(), "%"]);
    };
    fs::write(at.join("file"), "content").unwrap();
    yard.nacre(&["pool", "attach", "-w", "%", &files[0], &files[2]]);
    dies();
    yard.nacre(&["pool", "detach", "%", &files[0]]);
    yard.nacre(&["pool", "offline", "%", &files[1]]);
    dies();
    again();
    yard.nacre(&["pool", "online", "%", &files[1]]);
    yard.nacre(&["pool", "replace", "-w", "%", &files[1], &files[3]]);
    dies();
    yard.nacre(&["pool", "add", "-f", "%", &files[0]]);
    dies();
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "content");
    again();
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "content");
    yard.nacre(&["pool", "scrub", "-w", "%"]);
    assert_eq!(yard.nacre(&["pool", "status", "-x", "%"]), format!("pool '{name}' is healthy\n"));
}

#[test]
fn open_files_and_what_was_answered_are_there_after_a_death() {
    needs!(as_root());
    let surviving = Surviving::made("open", "256M", &[]);
    let pool = &surviving.pool;
    pool.nacre(&["fs", "create", &pool.of("below")]);
    let at = |name: &str| pool.at(name);
    let open =
        |name: &str| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at(name)).unwrap();
    fs::create_dir_all(at("a/b")).unwrap();
    let (named, nameless, below) = (open("a/b/named"), open("a/nameless"), open("below/file"));
    named.write_all_at(b"one", 0).unwrap();
    nameless.write_all_at(b"gone", 0).unwrap();
    below.write_all_at(&vec![7; 3 << 20], 0).unwrap();
    fs::remove_file(at("a/nameless")).unwrap();
    symlink("b/named", at("a/link")).unwrap();
    let value = vec![b'v'; 20_000];
    rustix::fs::setxattr(at("a/b"), c"user.large", &value, rustix::fs::XattrFlags::empty()).unwrap();
    rustix::fs::flock(&named, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let (ino, gone) = (named.metadata().unwrap().ino(), nameless.metadata().unwrap().ino());
    let mut tail = Command::new("tail");
    let mut tail =
        tail.args(["-n", "+1", "-s", "0.05", "-f"]).arg(at("a/b/named")).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap());
    let mut shell =
        Command::new("sh").current_dir(at("a/b")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut answers) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
    let mut size = 3;
    for round in 1..=2_u64 {
        fs::write(at(&format!("a/before{round}")), round.to_string()).unwrap();
        pool.nacre(&["fs", "snapshot", &format!("%@s{round}")]);
        surviving.kill();
        assert_eq!(fs::read_to_string(at(&format!("a/before{round}"))).unwrap(), round.to_string());
        assert_eq!((named.metadata().unwrap().ino(), nameless.metadata().unwrap().ino()), (ino, gone));
        assert_eq!(nameless.metadata().unwrap().nlink(), 0);
        let line = format!("{round}\n");
        named.write_all_at(line.as_bytes(), size).unwrap();
        size += line.len() as u64;
        nameless.write_all_at(b"!", 3 + round).unwrap();
        let mut said = String::new();
        lines.read_line(&mut said).unwrap();
        assert_eq!(said, if round == 1 { "one1\n" } else { "2\n" });
        writeln!(input, "echo {round} >>log && cat log | wc -l && pwd -P").unwrap();
        let mut said = String::new();
        (0..2).for_each(|_| assert_ne!(answers.read_line(&mut said).unwrap(), 0));
        assert_eq!(said, format!("{round}\n{}\n", at("a/b").display()));
        let other = File::open(at("a/b/named")).unwrap();
        let locked = rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockShared);
        assert_eq!(locked, Err(rustix::io::Errno::WOULDBLOCK));
        let new = File::create(at(&format!("a/new{round}"))).unwrap();
        assert!(![ino, gone].contains(&new.metadata().unwrap().ino()));
        assert_eq!(fs::read_link(at("a/link")).unwrap(), std::path::Path::new("b/named"));
        let mut read = vec![0; 1 << 16];
        let length = rustix::fs::getxattr(at("a/b"), c"user.large", &mut read).unwrap();
        assert!(read[..length] == value);
        assert!(fs::read(at("below/file")).unwrap() == vec![7; 3 << 20]);
        let snapshots = pool.nacre(&["fs", "list", "-H", "-o", "name", "-t", "snapshot", "-r", "%"]);
        assert!(snapshots.contains(&format!("@s{round}")), "{snapshots}");
        let kept = fs::read_to_string(at(&format!(".zfs/snapshot/s{round}/a/before{round}"))).unwrap();
        assert_eq!(kept, round.to_string());
    }
    let mut content = vec![0; 6];
    nameless.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(content, b"gone!!");
    assert_eq!(surviving.restarts(), 2);
    drop((input, answers));
    shell.wait().unwrap();
    tail.kill().unwrap();
    tail.wait().unwrap();
    drop((named, nameless, below, lines));
    pool.nacre(&["pool", "export", "%"]);
    surviving.has_ended();
    let said = pool.told(&["pool", "check", "-d", pool.device.to_str().unwrap()]);
    assert!(said.starts_with("no problems: "), "{said}");
    pool.import();
    assert_eq!(fs::read_to_string(at("a/b/named")).unwrap(), "one1\n2\n");
}

#[test]
fn mounts_come_and_go_before_and_after_a_death() {
    needs!(as_root());
    let surviving = Surviving::made("mounts", "128M", &[]);
    let pool = &surviving.pool;
    for name in ["one", "two", "two/within"] {
        pool.nacre(&["fs", "create", &pool.of(name)]);
    }
    pool.nacre(&["fs", "set", "readonly=on", &pool.of("one")]);
    pool.nacre(&["fs", "unmount", &pool.of("two/within")]);
    surviving.kill();
    assert!(!is_mounted(&pool.at("two/within")));
    assert_eq!(fs::write(pool.at("one/file"), "x").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    fs::write(pool.at("two/file"), "x").unwrap();
    pool.nacre(&["fs", "mount", &pool.of("two/within")]);
    pool.nacre(&["fs", "set", "readonly=off", &pool.of("one")]);
    fs::write(pool.at("one/file"), "x").unwrap();
    // Unmounted by another program, as with umount(8).
    crate::mounting::unmount_by("umount", &[pool.at("one").as_os_str()]);
    surviving.kill();
    fs::write(pool.at("two/within/file"), "x").unwrap();
    assert!(!is_mounted(&pool.at("one")));
    pool.nacre(&["fs", "mount", &pool.of("one")]);
    assert_eq!(fs::read_to_string(pool.at("one/file")).unwrap(), "x");
    pool.nacre(&["fs", "destroy", "-r", &pool.of("two")]);
    assert!(!is_mounted(&pool.at("two")));
    pool.nacre(&["pool", "destroy", "%"]);
    surviving.has_ended();
    assert!(!is_mounted(&pool.at("")));
}

#[test]
fn file_systems_of_an_ordinary_user_go_on_in_their_one_mount() {
    needs!(as_root());
    if fs::read_to_string("/etc/fuse.conf").is_ok_and(|conf| conf.lines().any(|line| line == "user_allow_other")) {
        return;
    }
    const NOBODY: u32 = 65534;
    let pool = Pool::within(Yard::of(Some(NOBODY)), "family", "256M", &["--survive"]);
    let sh = |script: &str| {
        let script = format!("cd {} && {script}", pool.at("").display());
        let (code, said) = crate::mounting::sh_as(pool.place.path(), NOBODY, NOBODY, "", &script);
        assert_eq!(code, 0, "{script}: {said}");
        said
    };
    for name in ["sub", "sub/deep"] {
        pool.nacre(&["fs", "create", &pool.of(name)]);
    }
    sh("echo x >sub/file && echo y >sub/deep/file");
    pool.nacre(&["fs", "snapshot", "-r", "%@one"]);
    let numbers = sh("ls -id sub sub/deep sub/deep/file sub/.zfs/snapshot/one/file");
    for round in 1..=2 {
        let killed = pool.process(&pool.name);
        kill(killed, Signal::KILL);
        assert_eq!(sh("cat sub/file sub/deep/file sub/.zfs/snapshot/one/file"), "x\ny\nx\n");
        assert_eq!(sh("ls -id sub sub/deep sub/deep/file sub/.zfs/snapshot/one/file"), numbers);
        assert_eq!(survives(&pool)["restarts"], round);
        let name = pool.of(&format!("new{round}"));
        pool.nacre(&["fs", "create", &name]);
        sh(&format!("echo {round} >new{round}/file"));
    }
    assert_eq!(sh("cat new1/file new2/file"), "1\n2\n");
    pool.nacre(&["fs", "unmount", &pool.of("sub/deep")]);
    assert_eq!(sh("ls sub/deep"), "");
    pool.nacre(&["fs", "destroy", "-r", &pool.of("sub")]);
    pool.nacre(&["pool", "export", "%"]);
    pool.import();
    assert_eq!(sh("cat new1/file new2/file"), "1\n2\n");
}

#[test]
fn the_ends_of_a_pool_are_those_of_its_processes() {
    needs!(as_root());
    let surviving = Surviving::made("ends", "64M", &[]);
    let pool = &surviving.pool;
    fs::write(pool.at("file"), "content").unwrap();
    surviving.kill();
    pool.nacre(&["pool", "export", "%"]);
    surviving.has_ended();
    // Terminated by its supervisor.
    let import = ["pool", "import", "--survive", "-d", pool.device.to_str().unwrap(), "%"];
    pool.nacre(&import);
    let guardian = survives(pool)["guardian"].as_u64().unwrap() as u32;
    kill(guardian, Signal::TERM);
    eventually("it is exported", || is_gone(guardian) && !is_mounted(&pool.at("")));
    // Without its supervisor, the process runs, and is the last.
    pool.nacre(&import);
    let (guardian, process) = (survives(pool)["guardian"].as_u64().unwrap() as u32, pool.process(&pool.name));
    kill(guardian, Signal::KILL);
    eventually("that is told", || pool.nacre(&["pool", "status", "%"]).contains("survives: no: its guardian is gone"));
    assert_eq!(fs::read_to_string(pool.at("file")).unwrap(), "content");
    kill(process, Signal::KILL);
    eventually("the mount is dead", || is_dead(&pool.at("")));
    pool.import();
    assert_eq!(fs::read_to_string(pool.at("file")).unwrap(), "content");
}

#[test]
fn what_is_synced_when_the_process_dies_is_answered() {
    needs!(as_root());
    let surviving = Surviving::made("sync", "128M", &[]);
    let pool = &surviving.pool;
    for round in 1..=2 {
        fs::write(pool.at("file"), vec![round; 1 << 20]).unwrap();
        let syncing = thread::spawn(rustix::fs::sync);
        let durable = thread::spawn({
            let at = pool.at("");
            move || File::open(at).unwrap().sync_all()
        });
        thread::sleep(Duration::from_millis(3));
        surviving.kill();
        syncing.join().unwrap();
        durable.join().unwrap().unwrap();
        assert_eq!(surviving.restarts(), u64::from(round));
    }
}

#[test]
fn another_program_goes_on_with_a_pool() {
    needs!(as_root());
    let surviving = Surviving::made("program", "128M", &[]);
    let pool = &surviving.pool;
    pool.nacre(&["fs", "create", &pool.of("below")]);
    let file = File::create(pool.at("below/file")).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    let copy = pool.path("newer");
    fs::copy(crate::mounting::nacre(), &copy).unwrap();
    let output = finish(Command::new(&copy).arg("upgrade").arg(pool.at("below")));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let process = pool.process(&pool.name);
    assert_eq!(fs::read_link(format!("/proc/{process}/exe")).unwrap(), copy);
    file.write_all_at(b" after", 6).unwrap();
    assert_eq!(fs::read_to_string(pool.at("below/file")).unwrap(), "before after");
    assert_eq!(u64::from(surviving.guardian), survives(pool)["guardian"].as_u64().unwrap());
    drop(file);
    pool.nacre(&["pool", "export", "%"]);
    surviving.has_ended();
    // One that was imported without it is refused by name.
    pool.import();
    let output = finish(Command::new(&copy).arg("upgrade").arg(pool.at("")));
    assert!(text(&output.stderr).contains("its pool was imported without --survive"), "{}", text(&output.stderr));
}

#[test]
fn what_cannot_survive_is_refused() {
    needs!(as_root());
    let pool = Pool::made("refused", "64M", &[]);
    pool.nacre(&["pool", "export", "%"]);
    let device = pool.device.to_str().unwrap();
    let (_, said) = pool.refused(&["pool", "import", "--survive", "-o", "readonly=on", "-d", device, "%"]);
    assert!(said.contains("--survive is not possible here: what is imported read-only"), "{said}");
    let output = finish(pool.command("zpool").args(["import", "--survive", "-d", device, &pool.name]));
    assert!(!output.status.success() && text(&output.stderr).contains("--survive"), "{}", text(&output.stderr));
    pool.import();
}

#[test]
fn what_was_answered_is_kept_by_pools() {
    needs!(as_root());
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |value| value.parse().expect(name));
    let (kills, seed) = (number("NACRE_SURVIVAL_KILLS", 4), number("NACRE_SURVIVAL_SEED", 1));
    let told = pools::run(kills, 2, seed);
    println!("campaign: NACRE_SURVIVAL_KILLS={kills} NACRE_SURVIVAL_SEED={seed}: {}", told.text());
}
