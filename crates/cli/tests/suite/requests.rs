//! Requests per operation: the primary figure of speed, because it is the same on every machine.
//! Counted by the mount itself.

use crate::mounting::status::{Status, least_requests_of, requests_of, settle};
use crate::mounting::{Fixture, as_root, needs, sh};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

fn total(requests: &BTreeMap<String, u64>) -> u64 {
    requests.values().sum()
}

fn of(requests: &BTreeMap<String, u64>, kind: &str) -> u64 {
    requests.get(kind).copied().unwrap_or(0)
}

fn filled(source: &Path) {
    for index in 0..100 {
        fs::write(source.join(format!("file{index:02}")), "content").unwrap();
    }
    fs::write(source.join("large"), vec![b'x'; 4 << 20]).unwrap();
    fs::create_dir(source.join("directory")).unwrap();
}

/// Requests that fail count as errors of a mount; a missing attribute or name does not.
#[test]
fn answers_are_not_counted_as_errors() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    fs::write(fixture.at("file"), "").unwrap();
    let errors = || Status::of(&fixture.mountpoint).number("errors");
    let before = errors();
    let mut room = [0; 8];
    let missing = rustix::fs::getxattr(fixture.at("file"), "user.none", &mut room[..]);
    assert_eq!(missing.unwrap_err(), rustix::io::Errno::NODATA);
    assert!(fs::metadata(fixture.at("none")).is_err());
    assert_eq!(errors(), before);
    let removed = rustix::fs::removexattr(fixture.at("file"), "user.none");
    assert_eq!(removed.unwrap_err(), rustix::io::Errno::NODATA);
    assert_eq!(errors(), before + 1);
}

#[test]
fn data_never_reaches_the_daemon() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], filled);
    if !Status::of(&fixture.mountpoint).passthrough() {
        let why = Status::of(&fixture.mountpoint);
        assert!(!has_passthrough(), "the kernel has passthrough, the mount has not: {why:?}");
        crate::mounting::skip("passthrough", "this kernel has no passthrough");
        return;
    }
    let requests = requests_of(&fixture.mountpoint, || {
        let mut file = fs::OpenOptions::new().read(true).write(true).open(fixture.at("large")).unwrap();
        let mut buffer = vec![0; 4096];
        for block in (0..1024).rev() {
            file.seek(SeekFrom::Start(block * 4096)).unwrap();
            file.read_exact(&mut buffer).unwrap();
            file.seek(SeekFrom::Start(block * 4096)).unwrap();
            file.write_all(&buffer).unwrap();
        }
        file.sync_all().unwrap();
        let mapping = nacre_sys::mapping::SharedMapping::new(&file, 1 << 20, true).unwrap();
        mapping.write(4096, b"mapped").unwrap();
        mapping.sync().unwrap();
    });
    assert_eq!((of(&requests, "read"), of(&requests, "write")), (0, 0), "{requests:?}");
    assert_eq!(&fs::read(fixture.below("large")).unwrap()[4096..4102], b"mapped");
}

/// Whether the kernel can do passthrough: Linux 6.9 or newer, and built with it.
fn has_passthrough() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let numbers: Vec<u32> = release.split(['.', '-']).take(2).map(|part| part.parse().unwrap_or(0)).collect();
    numbers >= vec![6, 9]
}

#[test]
fn a_second_look_costs_nothing() {
    needs!(as_root());
    for coherence in ["exclusive", "watch"] {
        let fixture = Fixture::mirror_of(&[&format!("--coherence={coherence}")], filled);
        // stat(2) does not ask for the birth time; statx(2) with it costs one request for each
        // file, once.
        let look = || {
            for index in 0..100 {
                rustix::fs::stat(fixture.at(format!("file{index:02}"))).unwrap();
            }
        };
        let first = requests_of(&fixture.mountpoint, look);
        assert!(total(&first) <= 105, "{coherence}, first: {first:?}");
        assert_eq!(least_requests_of(&fixture.mountpoint, look), BTreeMap::new(), "{coherence}: stat again");
        let with_birth = || {
            for index in 0..100 {
                fs::metadata(fixture.at(format!("file{index:02}"))).unwrap();
            }
        };
        assert_eq!(total(&requests_of(&fixture.mountpoint, with_birth)), 100, "{coherence}: the birth time, once");
        assert_eq!(
            least_requests_of(&fixture.mountpoint, with_birth),
            BTreeMap::new(),
            "{coherence}: the birth time again"
        );
        let missing = || {
            for index in 0..100 {
                assert!(rustix::fs::stat(fixture.at(format!("missing{index}"))).is_err());
            }
        };
        let first = requests_of(&fixture.mountpoint, missing);
        assert_eq!(total(&first), 100, "{coherence}, missing names: {first:?}");
        assert_eq!(
            least_requests_of(&fixture.mountpoint, missing),
            BTreeMap::new(),
            "{coherence}: missing names again"
        );
    }
}

#[test]
fn listings_carry_attributes_and_are_kept() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], filled);
    let list = || {
        sh(&fixture.mountpoint, "ls -l > /dev/null");
    };
    let first = requests_of(&fixture.mountpoint, list);
    // 102 names: no look-up for each of them.
    assert!(of(&first, "lookup") <= 5, "{first:?}");
    assert!(of(&first, "getattr") <= 5, "{first:?}");
    let again = least_requests_of(&fixture.mountpoint, list);
    assert!(of(&again, "readdir") + of(&again, "readdirplus") == 0, "a listing is kept: {again:?}");
    // The directory itself is looked at again: reading it has moved its access time.
    assert!(total(&again) <= 3, "absent attributes are not asked for again: {again:?}");
    let names = least_requests_of(&fixture.mountpoint, || {
        assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 102);
    });
    assert_eq!(total(&names), 0, "names again: {names:?}");
}

#[test]
fn an_open_costs_an_open_and_a_release() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&[], filled);
    fs::metadata(fixture.at("file00")).unwrap();
    let requests = requests_of(&fixture.mountpoint, || {
        for _ in 0..50 {
            let mut buffer = [0; 20];
            assert_eq!(fs::File::open(fixture.at("file00")).unwrap().read(&mut buffer).unwrap(), 7);
        }
    });
    assert!(of(&requests, "open") <= 50 && of(&requests, "release") <= 50, "{requests:?}");
    assert!(of(&requests, "flush") <= 1, "a close costs no flush: {requests:?}");
    assert!(total(&requests) <= 105, "{requests:?}");
}

#[test]
fn a_mount_without_opens_reads_without_a_request() {
    needs!(as_root());
    for option in ["--immutable", "--no-open"] {
        let fixture = Fixture::mirror_of(&[option], filled);
        assert_eq!(fs::read(fixture.at("file00")).unwrap(), b"content");
        let requests = least_requests_of(&fixture.mountpoint, || {
            for _ in 0..50 {
                assert_eq!(fs::read(fixture.at("file00")).unwrap(), b"content");
                assert_eq!(fs::metadata(fixture.at("file00")).unwrap().len(), 7);
            }
        });
        assert_eq!(total(&requests), 0, "{option}: {requests:?}");
        assert_eq!(crate::mounting::errno(fs::write(fixture.at("file00"), "x")), 30);
    }
}

#[test]
fn a_new_file_costs_few_requests() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    let requests = requests_of(&fixture.mountpoint, || {
        for index in 0..50 {
            fs::write(fixture.at(format!("new{index}")), "content").unwrap();
        }
    });
    assert!(of(&requests, "create") == 50, "{requests:?}");
    // For each: a look-up, the creation, the kernel's question for file capabilities before the
    // first write, the directory's new attributes before the next creation, the release. Nothing
    // for the content.
    assert!(requests.values().all(|count| *count <= 50), "{requests:?}");
    assert!(total(&requests) <= 5 * 50, "{requests:?}");
    let requests = requests_of(&fixture.mountpoint, || {
        for index in 0..50 {
            fs::remove_file(fixture.at(format!("new{index}"))).unwrap();
        }
    });
    assert_eq!(of(&requests, "unlink"), 50, "{requests:?}");
    assert!(total(&requests) <= 105, "{requests:?}");
}

#[test]
fn revalidation_asks_each_time() {
    needs!(as_root());
    let fixture = Fixture::mirror_of(&["--coherence=revalidate"], filled);
    let look = || {
        fs::metadata(fixture.at("file00")).unwrap();
    };
    requests_of(&fixture.mountpoint, look);
    assert!(total(&requests_of(&fixture.mountpoint, look)) >= 1);
}

#[test]
fn an_idle_mount_does_nothing() {
    needs!(as_root());
    // A file system of its own: watching a source may mean hearing of everything on its file
    // system.
    let mut fixture = Fixture::bare();
    let (source, mountpoint) = (fixture.source.clone(), fixture.mountpoint.clone());
    assert!(crate::mounting::run("mount", ["-t", "tmpfs", "tmpfs", source.to_str().unwrap()]).status.success());
    filled(&source);
    fixture.start(&["mirror"], source.as_ref(), &mountpoint);
    sh(&fixture.mountpoint, "ls -l > /dev/null");
    // Other tests' `nacre status` asks every mount of the machine: the threads that answer are left
    // out.
    let answering = |name: &str| name.starts_with("nacre-listen") || name.starts_with("nacre-control");
    let ticks = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", fixture.pid())).unwrap();
        let of_task = |path: std::path::PathBuf| {
            let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
            let (name, rest) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") ")).unwrap_or(("", ""));
            let numbers = rest.split(' ').skip(11).take(2).map(|number| number.parse().unwrap_or(0));
            if answering(name) { 0 } else { numbers.sum::<u64>() }
        };
        tasks.map(|task| of_task(task.unwrap().path())).sum::<u64>()
    };
    let switches = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", fixture.pid())).unwrap();
        let of_task = |path: std::path::PathBuf| {
            let status = fs::read_to_string(path.join("status")).unwrap_or_default();
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
                line.split_once(':').map_or("", |(_, value)| value.trim()).to_owned()
            };
            (
                format!("{} {}", field("Name"), field("Pid")),
                field("voluntary_ctxt_switches").parse::<u64>().unwrap_or(0),
            )
        };
        tasks.map(|task| of_task(task.unwrap().path())).collect::<BTreeMap<String, u64>>()
    };
    settle(&fixture.mountpoint);
    // What the kernel forgets is its own affair, and comes at any time.
    let requests = || {
        let mut requests = Status::of(&fixture.mountpoint).requests();
        requests.retain(|name, _| !name.contains("forget"));
        requests
    };
    let asked = requests();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let before = (ticks(), switches());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let after = (ticks(), switches());
    // A thread that has ended in between takes its ticks along.
    let used = after.0.saturating_sub(before.0);
    assert!(used <= 1, "{used} clock ticks of CPU in two idle seconds");
    let woken: BTreeMap<&String, u64> = after
        .1
        .iter()
        .map(|(task, count)| (task, count - before.1.get(task).unwrap_or(&0)))
        .filter(|(_, count)| *count > 0)
        .collect();
    let woken: BTreeMap<&String, u64> = woken.into_iter().filter(|(task, _)| !answering(task)).collect();
    assert!(woken.values().sum::<u64>() <= 10, "wake-ups in two idle seconds: {woken:?}");
    assert_eq!(requests(), asked);
}
