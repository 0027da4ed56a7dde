//! Real programs in cages, as users run them: system loggers, log rotation, a database, a writer
//! like journald's, and tools on a full disk. Programs that are not installed are skipped
//! (`NACRE_TEST_REQUIRE=services` forbids that).

use crate::mounting::cages::{Cage, cost, data};
use crate::mounting::{Fixture, Reaped, as_root, eventually, finish, kill, needs, run, sh, skip, text};
use nacre_sys::mapping::SharedMapping;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const MIB: u64 = 1 << 20;
const WRITES: [&str; 2] = ["--writes=through", "--writes=collected"];

/// Whether the programs are there.
fn have(programs: &[&str]) -> bool {
    as_root()
        && programs.iter().all(|program| {
            let found =
                Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status();
            found.is_ok_and(|status| status.success()) || skip("services", &format!("{program} is not installed"))
        })
}

fn resize(fixture: &Fixture, size: &str) {
    let output =
        fixture.nacre([OsStr::new("cage"), OsStr::new("resize"), fixture.mountpoint.as_os_str(), OsStr::new(size)]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn cage(fixture: &Fixture) -> Cage {
    Cage::of(fixture, &fixture.mountpoint)
}

/// Checks that the accounting equals the content, at the latest when everything is closed.
fn books_are_right(fixture: &Fixture) {
    eventually("the books say what is there", || {
        let cage = cage(fixture);
        (cage.number("used"), cage.number("inodes")) == cost(&fixture.source)
    });
}

fn in_mount(fixture: &Fixture, script: &str) -> Output {
    finish(Command::new("sh").args(["-c", script]).current_dir(&fixture.mountpoint).env("LC_ALL", "C"))
}

#[test]
fn a_system_logger_outlives_a_full_cage() {
    needs!(have(&["rsyslogd", "logger"]));
    for writes in WRITES {
        let mut fixture = Fixture::cage(&["--size=256K", writes]);
        let (desk, log) = (fixture.directory("desk"), fixture.at("messages"));
        let socket = desk.join("socket");
        let rules = format!(
            "module(load=\"imuxsock\" SysSock.Use=\"off\")\n\
             input(type=\"imuxsock\" Socket=\"{}\" RateLimit.Interval=\"0\")\n\
             *.* action(type=\"omfile\" file=\"{}\" template=\"RSYSLOG_FileFormat\" action.resumeRetryCount=\"-1\" action.resumeInterval=\"1\" \
             action.resumeIntervalMax=\"1\")\n",
            socket.display(),
            log.display()
        );
        fs::write(desk.join("conf"), rules).unwrap();
        let service = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "rsyslogd", "-n", "-f"])
            .arg(desk.join("conf"))
            .arg("-i")
            .arg(desk.join("pid"))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut service = Reaped(service);
        eventually("it listens", || socket.exists());
        let tell = |words: &str| {
            assert!(run("logger", ["--socket", socket.to_str().unwrap(), words]).status.success());
        };
        let arrived = |words: &str| text(&fs::read(&log).unwrap_or_default()).contains(words);
        tell("the first of all");
        eventually("it is written", || arrived("the first of all"));
        // More than there is room for.
        let lines = desk.join("lines");
        fs::write(&lines, "a line that says little, at some length\n".repeat(6000)).unwrap();
        let sent = run("logger", ["--socket", socket.to_str().unwrap(), "--file", lines.to_str().unwrap()]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        eventually("it is full", || cage(&fixture).refused("size") > 0);
        assert!(data(&fixture.source) <= 256 * 1024);
        assert!(service.0.try_wait().unwrap().is_none(), "it still runs");
        resize(&fixture, "8M");
        tell("there is room again");
        eventually("it goes on", || arrived("there is room again"));
        assert!(arrived("the first of all"));
        kill(service.0.id(), Signal::TERM);
        service.0.wait().unwrap();
        books_are_right(&fixture);
        assert!(data(&fixture.source) <= 8 * MIB);
        fixture.unmount();
    }
}

#[test]
fn logs_are_rotated_in_a_full_cage() {
    needs!(have(&["logrotate", "logger"]));
    for writes in WRITES {
        let mut fixture = Fixture::cage(&["--size=1M", writes]);
        let desk = fixture.directory("desk");
        for way in ["create", "copytruncate", "compress\ncreate"] {
            let conf = desk.join("conf");
            let rules =
                format!("su root root\n{}/*.log {{\n rotate 1\n missingok\n {way}\n}}\n", fixture.mountpoint.display());
            fs::write(&conf, rules).unwrap();
            // A logger that keeps its descriptor, until nothing more fits.
            let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("app.log")).unwrap();
            let mut accepted = log.metadata().unwrap().len();
            while accepted < 450_000 {
                accepted += log.write(&[b'x'; 99]).unwrap() as u64;
            }
            if way != "copytruncate" {
                // To the last block: to copy needs room.
                let mut rest = OpenOptions::new().append(true).create(true).open(fixture.at("rest")).unwrap();
                while rest.write(&[b'y'; 4096]).is_ok() {}
            }
            let rotate = || {
                run("logrotate", ["--force", "--state", desk.join("state").to_str().unwrap(), conf.to_str().unwrap()])
            };
            let output = rotate();
            if way == "create" {
                assert!(output.status.success(), "{writes} {way}: {}", text(&output.stderr));
                assert_eq!(fs::metadata(fixture.at("app.log.1")).unwrap().len(), accepted);
            }
            // It may have had no room for a compressed copy: then it says so, and nothing is lost.
            if way.starts_with("compress") && !output.status.success() {
                assert!(text(&output.stderr).contains("No space left"), "{}", text(&output.stderr));
            }
            drop(log);
            sh(&fixture.mountpoint, "rm -f ./*");
            books_are_right(&fixture);
            assert!(data(&fixture.source) <= MIB);
        }
        fixture.unmount();
    }
}

#[test]
fn a_database_meets_a_full_disk_and_recovers() {
    needs!(have(&["sqlite3"]));
    for writes in WRITES {
        for journal in ["delete", "wal"] {
            let mut fixture = Fixture::cage(&["--size=2M", writes]);
            let sql = |script: &str| {
                finish(
                    Command::new("sqlite3")
                        .args(["-bail", "base.db", script])
                        .current_dir(&fixture.mountpoint)
                        .env("LC_ALL", "C"),
                )
            };
            let made = sql(&format!("pragma journal_mode={journal}; create table t(n integer primary key, v blob);"));
            assert!(made.status.success(), "{}", text(&made.stderr));
            let insert = "insert into t(v) values (randomblob(50000));";
            let mut rows = 0;
            let full = loop {
                let output = sql(insert);
                if !output.status.success() {
                    break text(&output.stderr);
                }
                rows += 1;
                assert!(rows < 100, "nothing stops it");
            };
            assert!(full.contains("full") || full.contains("disk I/O error"), "{writes} {journal}: {full}");
            assert!(data(&fixture.source) <= 2 * MIB);
            let check = |rows: u32| {
                let output = sql("pragma integrity_check; select count(*) from t;");
                assert_eq!(
                    text(&output.stdout),
                    format!("ok\n{rows}\n"),
                    "{writes} {journal}: {}",
                    text(&output.stderr)
                );
            };
            resize(&fixture, "8M");
            check(rows);
            for _ in 0..10 {
                let output = sql(insert);
                assert!(output.status.success(), "{writes} {journal}: {}", text(&output.stderr));
            }
            check(rows + 10);
            books_are_right(&fixture);
            fixture.unmount();
            let output = run(
                "sqlite3",
                [fixture.below("base.db").to_str().unwrap(), "pragma integrity_check; select count(*) from t;"],
            );
            assert_eq!(text(&output.stdout), format!("ok\n{}\n", rows + 10), "{}", text(&output.stderr));
        }
    }
}

/// Writes as systemd-journald does: space by fallocate, content by a mapping; the bytes that were
/// accepted.
fn write_journal(path: &Path, piece: usize) -> Vec<u8> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    let mut content = Vec::new();
    loop {
        let end = content.len() + piece;
        if let Err(error) = fallocate(&file, FallocateFlags::empty(), content.len() as u64, piece as u64) {
            assert_eq!(error, rustix::io::Errno::NOSPC);
            return content;
        }
        let mapping = SharedMapping::new(&file, end, true).unwrap();
        while content.len() < end {
            let entry = format!("entry {};", content.len()).into_bytes();
            let entry = &entry[..entry.len().min(end - content.len())];
            mapping.write(content.len(), entry).unwrap();
            content.extend_from_slice(entry);
        }
        mapping.sync().expect("what is allocated can be written");
    }
}

#[test]
fn a_journal_is_kept_to_the_byte() {
    needs!(as_root());
    for writes in WRITES {
        let mut fixture = Fixture::cage(&["--size=1M", writes]);
        let content = write_journal(&fixture.at("system.journal"), 128 * 1024);
        assert_eq!(content.len() as u64, MIB, "{writes}");
        resize(&fixture, "1200K");
        let second = write_journal(&fixture.at("user.journal"), 64 * 1024);
        assert_eq!(second.len(), 2 * 64 * 1024);
        books_are_right(&fixture);
        fixture.unmount();
        assert!(fs::read(fixture.below("system.journal")).unwrap() == content, "{writes}");
        assert!(fs::read(fixture.below("user.journal")).unwrap() == second, "{writes}");
    }
}

#[test]
fn tools_say_that_the_disk_is_full() {
    needs!(have(&["tar", "rsync", "dd", "gzip"]));
    for writes in WRITES {
        let mut fixture = Fixture::cage(&["--size=1M", writes]);
        let desk = fixture.directory("desk");
        fs::create_dir(desk.join("tree")).unwrap();
        for number in 0..40 {
            fs::write(desk.join(format!("tree/{number}")), vec![b'z'; 50_000]).unwrap();
        }
        sh(&desk, "tar cf all.tar tree");
        let desk = desk.display();
        for tool in [
            format!("cp -r {desk}/tree ."),
            format!("cp --sparse=always --reflink=auto {desk}/all.tar ."),
            format!("tar xf {desk}/all.tar"),
            format!("rsync -a {desk}/tree ."),
            "dd if=/dev/zero of=file bs=64k count=100".to_owned(),
            "dd if=/dev/zero of=file bs=64k count=100 oflag=append conv=notrunc".to_owned(),
            "fallocate -l 2M file".to_owned(),
            format!("cat {desk}/all.tar > file"),
        ] {
            let output = in_mount(&fixture, &tool);
            let said = text(&output.stderr);
            assert!(
                !output.status.success() && said.contains("No space left on device"),
                "{writes} {tool}: {:?} {said}",
                output.status
            );
            assert!(data(&fixture.source) <= MIB, "{writes} {tool}");
            books_are_right(&fixture);
            sh(&fixture.mountpoint, "rm -rf ./*");
            eventually("everything is free", || cage(&fixture).number("used") == 0);
        }
        fixture.unmount();
    }
}

#[test]
fn the_log_that_never_ends() {
    needs!(as_root());
    for writes in WRITES {
        let mut fixture = Fixture::cage(&["--size=2M", "--when-full=drop-oldest", "--keep=audit*", writes]);
        let audit = vec![b'a'; 300_000];
        fs::write(fixture.at("audit.log"), &audit).unwrap();
        fs::write(fixture.at("audit.log.1"), &audit).unwrap();
        // An hour of logs: 30 MB, rotated now and then by the logger itself.
        for rotation in 0..30 {
            let mut log = OpenOptions::new().append(true).create(true).open(fixture.at("app.log")).unwrap();
            for line in 0..1000 {
                let words = format!("{:>999}\n", format!("rotation {rotation}, line {line}"));
                log.write_all(words.as_bytes()).unwrap_or_else(|error| panic!("{writes} {rotation} {line}: {error}"));
                if line % 100 == 0 {
                    assert!(data(&fixture.source) <= 2 * MIB, "{writes}");
                }
            }
            drop(log);
            if rotation % 3 != 2 {
                fs::rename(fixture.at("app.log"), fixture.at(format!("app.log.{}", rotation % 10))).unwrap();
            }
        }
        assert!(
            fs::read(fixture.at("audit.log")).unwrap() == audit
                && fs::read(fixture.at("audit.log.1")).unwrap() == audit
        );
        let cage = cage(&fixture);
        assert!(cage.0["dropped"]["files"].as_u64() > Some(5), "{}", cage.0);
        books_are_right(&fixture);
        fixture.unmount();
        assert!(data(&fixture.source) <= 2 * MIB);
        assert!(fs::read(fixture.below("audit.log")).unwrap() == audit);
    }
}
