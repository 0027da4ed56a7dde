//! Mounts that survive the process that serves them: killed while programs use them, without an
//! error in any program.
//!
//! Each mount is killed twice at most: the third time within a minute it stays down, which is a
//! test of its own. `NACRE_SURVIVAL_ROUNDS` and `NACRE_SURVIVAL_KILLS` make campaigns of the random
//! ones, from `NACRE_SURVIVAL_SEED`.

use crate::mounting::{
    Fixture, as_root,
    cages::{Cage, cost, zeros},
    eventually, is_gone, is_mounted, kill,
    status::Status,
};
use crate::surviving::{BELOW, Guarded, Raised, campaign, change, change_below, fill_below, restarts, worker};
use rustix::process::Signal;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

fn opened_files_go_on(mut guarded: Guarded) {
    let at = |name: &str| guarded.fixture.at(name);
    fs::create_dir_all(at("a/b")).unwrap();
    let open =
        |name: &str| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at(name)).unwrap();
    let (named, nameless, mut moved) = (open("a/b/named"), open("a/nameless"), open("a/before"));
    let mut appended = OpenOptions::new().append(true).create(true).open(at("a/log")).unwrap();
    let unnamed = OpenOptions::new().read(true).write(true).custom_flags(libc_tmpfile()).open(at("a"));
    named.write_all_at(b"one", 0).unwrap();
    nameless.write_all_at(b"gone", 0).unwrap();
    moved.write_all(b"moved").unwrap();
    appended.write_all(b"1\n").unwrap();
    fs::remove_file(at("a/nameless")).unwrap();
    fs::rename(at("a/before"), at("a/b/after")).unwrap();
    fs::hard_link(at("a/b/named"), at("a/linked")).unwrap();
    let (ino, directory) = (named.metadata().unwrap().ino(), File::open(at("a/b")).unwrap());
    let mut shell =
        Command::new("sh").current_dir(at("a/b")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
    for round in 1..=2 {
        guarded.kill();
        assert_eq!(guarded.restarts(), round);
        assert_eq!(named.metadata().unwrap().ino(), ino);
        named.write_all_at(b"two", 3 * round).unwrap();
        nameless.write_all_at(b"!", 3 + round).unwrap();
        appended.write_all(b"2\n").unwrap();
        appended.sync_all().unwrap();
        directory.sync_all().unwrap();
    }
    let text = |mut file: &File| {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    };
    assert_eq!(text(&named), "onetwotwo");
    assert_eq!(text(&nameless), "gone!!");
    assert_eq!(nameless.metadata().unwrap().nlink(), 0);
    assert_eq!(text(&moved), "moved");
    nameless.set_len(2).unwrap();
    assert_eq!(text(&nameless), "go");
    if let Ok(unnamed) = unnamed {
        unnamed.write_all_at(b"unnamed", 0).unwrap();
        assert_eq!(text(&unnamed), "unnamed");
    }
    shell.stdin.take().unwrap().write_all(b"cat named && echo new >made && cat ../b/after\n").unwrap();
    assert_eq!(crate::mounting::text(&shell.wait_with_output().unwrap().stdout), "onetwotwomoved");
    let below = |name: &str| fs::read_to_string(guarded.fixture.below(name)).unwrap();
    assert_eq!(below("a/log"), "1\n2\n2\n");
    assert_eq!((below("a/linked"), below("a/b/made")), ("onetwotwo".to_owned(), "new\n".to_owned()));
    drop((named, nameless, moved, appended, directory));
    eventually("all files are closed", || Status::of(&guarded.fixture.mountpoint).number("open_files") == 0);
    guarded.fixture.unmount();
    assert!(guarded.workers.iter().all(|worker| is_gone(*worker)));
}

/// Directories in which programs work, renamed and exchanged in the source: by another mount, or there.
fn directories_that_others_rename_are_found(mut guarded: Guarded) {
    let (at, below) = (guarded.fixture.mountpoint.clone(), guarded.fixture.source.clone());
    fs::create_dir_all(at.join("top/busy/inner")).unwrap();
    ["one", "two", "elsewhere"].iter().for_each(|name| fs::create_dir(at.join(name)).unwrap());
    let open = |name: &str| {
        fs::write(at.join(name).join("content"), name).unwrap();
        File::open(at.join(name)).unwrap()
    };
    let (inner, one, two) = (open("top/busy/inner"), open("one"), open("two"));
    let content = |directory: &File| {
        let file = rustix::fs::openat(directory, "content", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
        file.map(|file| std::io::read_to_string(File::from(file)).unwrap())
    };
    for round in 0..2 {
        let (from, to) = if round == 0 { ("top/busy", "elsewhere/moved") } else { ("elsewhere/moved", "top/again") };
        fs::rename(below.join(from), below.join(to)).unwrap();
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, below.join("one"), rustix::fs::CWD, below.join("two"), flags)
            .unwrap();
        guarded.kill();
        for (directory, expected) in [(&inner, "top/busy/inner"), (&one, "one"), (&two, "two")] {
            assert_eq!(content(directory).as_deref(), Ok(expected), "round {round}");
        }
        let made = rustix::fs::mkdirat(&inner, format!("made{round}"), rustix::fs::Mode::RWXU);
        assert_eq!(made, Ok(()), "round {round}");
        assert!(below.join(to).join(format!("inner/made{round}")).is_dir());
    }
    drop((inner, one, two));
    guarded.fixture.unmount();
}

#[test]
fn directories_that_others_rename_are_found_in_a_mirror() {
    if as_root() {
        directories_that_others_rename_are_found(Guarded::new(&[]));
    }
}

#[test]
fn directories_that_others_rename_are_found_in_a_cage() {
    if as_root() {
        directories_that_others_rename_are_found(Guarded::cage(&["--size=8M"]));
    }
}

/// `O_TMPFILE`.
fn libc_tmpfile() -> i32 {
    rustix::fs::OFlags::TMPFILE.bits().cast_signed()
}

#[test]
fn opened_files_go_on_in_passthrough() {
    if as_root() {
        opened_files_go_on(Guarded::new(&[]));
    }
}

#[test]
fn opened_files_go_on_through_the_process() {
    if as_root() {
        opened_files_go_on(Guarded::new(crate::mounting::without_passthrough()));
    }
}

#[test]
fn opened_files_go_on_in_a_cage() {
    if as_root() {
        opened_files_go_on(Guarded::cage(&["--size=8M"]));
    }
}

#[test]
fn opened_files_go_on_in_a_union() {
    if as_root() {
        opened_files_go_on(Guarded::union(&[], |_| ()));
    }
}

/// Files of the branch below: read, copied up, removed and moved around the death of the process, and
/// branches that come and change while mounted.
#[test]
fn a_union_that_goes_on_has_its_branches() {
    if !as_root() {
        return;
    }
    let names = ["read", "gone", "risen", "later", "moved", "linked"];
    let mut guarded = Guarded::union(&[], |lower| {
        fs::create_dir_all(lower.join("tree/sub")).unwrap();
        names.iter().for_each(|name| fs::write(lower.join("tree").join(name), "below").unwrap());
        fs::hard_link(lower.join("tree/linked"), lower.join("tree/sub/linked")).unwrap();
    });
    let place = guarded.fixture.mountpoint.clone();
    let at = |name: &str| place.join("tree").join(name);
    let writable = |name: &str| OpenOptions::new().read(true).write(true).open(at(name)).unwrap();
    let content = |file: &File| {
        let mut text = vec![0; 32];
        let read = file.read_at(&mut text, 0).unwrap();
        String::from_utf8(text[..read].to_vec()).unwrap()
    };
    let union = |words: &[&str]| {
        let output = guarded.fixture.nacre([&["union"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", crate::mounting::text(&output.stderr));
        crate::mounting::text(&output.stdout)
    };
    let mount = place.to_str().unwrap().to_owned();
    let third = guarded.fixture.scratch.path().join("third");
    fs::create_dir_all(third.join("own")).unwrap();
    fs::write(third.join("own/file"), "third").unwrap();
    union(&["add", &mount, &format!("{}=rw", third.display())]);
    union(&["mod", &mount, &format!("{}=ro", third.display())]);
    // By descriptor alone: what is there now is another directory.
    fs::rename(&third, guarded.fixture.scratch.path().join("renamed")).unwrap();
    fs::create_dir(&third).unwrap();
    let branches = || -> Vec<String> {
        let list = union(&["list", &mount]);
        let words = |line: &str| line.split_whitespace().skip(1).take(3).collect::<Vec<_>>().join(" ");
        list.lines().map(words).collect()
    };
    let before = branches();
    let (read, gone, risen, later) =
        (File::open(at("read")).unwrap(), writable("gone"), writable("risen"), writable("later"));
    let risen_reader = File::open(at("risen")).unwrap();
    risen.write_all_at(b"above", 0).unwrap();
    fs::remove_file(at("risen")).unwrap();
    fs::remove_file(at("gone")).unwrap();
    let moved = writable("moved");
    fs::rename(at("moved"), at("sub/moved")).unwrap();
    let linked = writable("linked");
    linked.write_all_at(b"L", 0).unwrap();
    let third_file = File::open(place.join("own/file")).unwrap();
    let inodes = |files: &[&File]| files.iter().map(|file| file.metadata().unwrap().ino()).collect::<Vec<_>>();
    let all = [&read, &gone, &risen, &risen_reader, &later, &moved, &linked, &third_file];
    let numbers = inodes(&all);
    let mut shell =
        Command::new("sh").current_dir(at("sub")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
    let killed = *guarded.workers.last().unwrap();
    kill(killed, Signal::KILL);
    eventually("another process serves the mount", || worker(&place) != killed);
    assert_eq!(inodes(&all), numbers);
    assert_eq!(branches(), before);
    guarded.workers.push(worker(&place));
    assert_eq!(
        (content(&gone), content(&risen), content(&risen_reader)),
        ("below".into(), "above".into(), "above".into())
    );
    assert_eq!((gone.metadata().unwrap().nlink(), risen.metadata().unwrap().nlink()), (0, 0));
    assert!(!at("gone").exists() && !at("risen").exists() && !at("moved").exists());
    assert_eq!(
        (content(&third_file), fs::read_to_string(place.join("own/file")).unwrap()),
        ("third".into(), "third".into())
    );
    gone.write_all_at(b"G", 0).unwrap();
    risen.write_all_at(b"R", 0).unwrap();
    later.write_all_at(b"l", 0).unwrap();
    moved.write_all_at(b"m", 0).unwrap();
    // Somebody else copies it up: who reads it sees that.
    writable("read").write_all_at(b"r", 0).unwrap();
    guarded.kill();
    assert_eq!(inodes(&all), numbers);
    let texts: Vec<String> = all.iter().map(|file| content(file)).collect();
    assert_eq!(texts, ["relow", "Gelow", "Rbove", "Rbove", "lelow", "melow", "Lelow", "third"]);
    assert_eq!(fs::read_to_string(at("sub/linked")).unwrap(), "Lelow");
    shell.stdin.take().unwrap().write_all(b"cat moved && echo new >made && ls | wc -l\n").unwrap();
    assert_eq!(crate::mounting::text(&shell.wait_with_output().unwrap().stdout).trim(), "melow3");
    assert_eq!(fs::read_to_string(guarded.fixture.below("tree/sub/made")).unwrap(), "new\n");
    let lower = guarded.fixture.scratch.path().join("lower/tree");
    assert!(names.iter().all(|name| fs::read_to_string(lower.join(name)).unwrap() == "below"), "it is only read");
    drop((read, gone, risen, risen_reader, later, moved, linked, third_file));
    guarded.fixture.unmount();
}

/// Changes of a mounted union by commands survive, and so do its pending waits.
#[test]
fn a_union_that_goes_on_has_its_rules_and_awaits_missing_branches() {
    if !as_root() {
        return;
    }
    let words = ["union", "-o", "nofail,create=ff"];
    let mut guarded = Guarded::over_lower(&words, "SOURCE=rw+tier:LOWER=rw+tier:BESIDE/late=ro", |_| ());
    let mount = guarded.fixture.mountpoint.to_str().unwrap().to_owned();
    let union = |guarded: &Guarded, words: &[&str]| {
        let output = guarded.fixture.nacre([&["union"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", crate::mounting::text(&output.stderr));
        crate::mounting::text(&output.stdout)
    };
    let is_missing = |guarded: &Guarded| union(guarded, &["list", &mount]).contains("missing");
    let rules = "high=97,low=96,cold=*.iso,age=30d";
    union(&guarded, &["tier", &mount, rules]);
    let told = |guarded: &Guarded| union(guarded, &["tier", &mount]).lines().next().map(str::to_owned);
    let before = told(&guarded);
    assert!(before.as_ref().is_some_and(|line| line.contains("97")), "{before:?}");
    assert!(is_missing(&guarded));
    guarded.kill();
    assert_eq!(told(&guarded), before);
    assert!(is_missing(&guarded));
    // Made beside, complete.
    let beside = guarded.fixture.scratch.path();
    crate::mounting::sh(beside, "mkdir new; echo content >new/name; mv new late");
    eventually("the branch is there", || !is_missing(&guarded));
    let file = File::open(guarded.at("name")).unwrap();
    guarded.kill();
    assert_eq!((told(&guarded), is_missing(&guarded)), (before, false));
    let mut text = [0; 8];
    file.read_exact_at(&mut text, 0).unwrap();
    assert_eq!((&text, fs::read_to_string(guarded.at("name")).unwrap().as_str()), (b"content\n", "content\n"));
    drop(file);
    guarded.fixture.unmount();
}

/// Over its own branch, with a directory of its own elsewhere, under filters.
#[test]
fn a_union_over_its_own_branch_goes_on() {
    if !as_root() {
        return;
    }
    let mut fixture = Fixture::bare();
    let (lower, work, place) = (fixture.directory("lower"), fixture.directory("work"), fixture.source.clone());
    fs::create_dir(lower.join("tree")).unwrap();
    ["one", "two", "gone"].iter().for_each(|name| fs::write(lower.join("tree").join(name), "below").unwrap());
    fs::write(place.join("own"), "own").unwrap();
    let line = format!(
        "union:{{host:{}\\,work={}}}=rw:{}=ro | remap:perms=a+r | trace",
        place.display(),
        work.display(),
        lower.display()
    );
    fixture.mountpoint.clone_from(&place);
    fixture.start(&["mount", "-o", "rw", "--survive", "--transport=device"], line.as_ref(), &place);
    let mut guarded = Guarded::of(fixture);
    let at = |name: &str| place.join(name);
    let writable = |name: &str| OpenOptions::new().read(true).write(true).open(at(name)).unwrap();
    let (one, own) = (writable("tree/one"), writable("own"));
    one.write_all_at(b"above", 0).unwrap();
    fs::remove_file(at("tree/gone")).unwrap();
    guarded.kill();
    one.write_all_at(b"!", 5).unwrap();
    own.write_all_at(b"!", 3).unwrap();
    let two = writable("tree/two");
    two.write_all_at(b"above", 0).unwrap();
    fs::rename(at("tree/two"), at("moved")).unwrap();
    guarded.kill();
    two.write_all_at(b"?", 5).unwrap();
    fs::write(at("tree/new"), "new").unwrap();
    let texts = |place: &Path| {
        let text = |name: &str| fs::read_to_string(place.join(name)).ok();
        ["tree/one", "own", "moved", "tree/new", "tree/gone", "tree/two"].map(text)
    };
    let expected =
        [Some("above!"), Some("own!"), Some("above?"), Some("new"), None, None].map(|text| text.map(str::to_owned));
    assert_eq!(texts(&place), expected);
    drop((one, own, two));
    guarded.fixture.unmount();
    assert_eq!(texts(&place)[..4], expected[..4], "it lies in the branch");
    assert!(fs::read_dir(work.join("work")).unwrap().next().is_none(), "nothing is left of what was under way");
}

#[test]
fn nobody_notices_that_the_process_of_a_union_dies() {
    if !as_root() {
        return;
    }
    let rounds = std::env::var("NACRE_SURVIVAL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1_u64);
    println!("campaign: NACRE_SURVIVAL_ROUNDS={rounds}");
    for round in 0..rounds {
        let options = if round % 2 == 0 { &[][..] } else { crate::mounting::without_passthrough() };
        let mut guarded = Guarded::union(options, |lower| (0..2).for_each(|number| fill_below(lower, number, BELOW)));
        let place = guarded.fixture.mountpoint.clone();
        let (over, done, below) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let (over, done, below, place) = (&over, &done, &below, &place);
            let end = Raised(over);
            let mut threads = vec![scope.spawn(move || change(place, 9, over, done))];
            threads.extend((0..2).map(|number| scope.spawn(move || change_below(place, number, over, below))));
            for _ in 0..2 {
                let before = (done.load(Ordering::Relaxed), below.load(Ordering::Relaxed));
                eventually("they go on", || {
                    done.load(Ordering::Relaxed) > before.0 + 5 && below.load(Ordering::Relaxed) > before.1 + 20
                });
                std::thread::sleep(Duration::from_micros(round * 911 % 5000));
                guarded.kill();
            }
            eventually("they come to the end", || below.load(Ordering::Relaxed) > 2 * BELOW + 2);
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        for number in 0..2 {
            let mut finished = 0;
            for round in 0..BELOW {
                let name = |what: &str| place.join(format!("low{number}/{round}-{what}"));
                if name("moved").exists() && !name("one").exists() {
                    assert_eq!(fs::read_to_string(name("moved")).unwrap(), "below+more+last");
                    assert!(!name("file").exists() && !name("old").exists());
                    finished += 1;
                }
            }
            assert!(finished > 40, "{finished}");
        }
        guarded.fixture.unmount();
    }
}

/// Returns the report of the cage.
fn cage(guarded: &Guarded) -> Cage {
    Cage::of(&guarded.fixture, &guarded.fixture.source)
}

/// Blocks that `FALLOC_FL_KEEP_SIZE` allocated beyond the end of files, however few, are known to
/// the next process before it answers any request.
#[test]
fn a_cage_that_goes_on_counts_what_lies_behind_the_end_of_files() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::cage(&["--size=8M"]);
    let page = zeros(4096);
    for (number, tail) in (1..=40).zip([4096_u64, 8192, 12_288, 200_000].into_iter().cycle()) {
        let file = File::create(guarded.at(&format!("file{number}"))).unwrap();
        file.write_all_at(&page, 0).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 4096, tail).unwrap();
    }
    let used = |guarded: &Guarded| Cage::of(&guarded.fixture, &guarded.fixture.mountpoint).number("used");
    let before = used(&guarded);
    guarded.kill();
    assert_eq!(used(&guarded), before);
    // To the edge, which is the host's as well.
    let mut last = File::create(guarded.at("last")).unwrap();
    while last.write(&page).is_ok_and(|written| written > 0) {}
    let below: u64 = fs::read_dir(&guarded.fixture.source)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512)
        .sum();
    assert!(below > 7 << 20 && below <= 8 << 20, "{below}");
    drop(last);
    guarded.fixture.unmount();
}

/// Over its own directory, with files that have no name, limits within the limit and another size.
#[test]
fn a_cage_that_goes_on_has_its_books() {
    if !as_root() {
        return;
    }
    let mut fixture = Fixture::bare();
    let place = fixture.source.clone();
    fixture.mountpoint.clone_from(&place);
    let options = ["--survive", "--transport=device", "--size=4M", "--limit=dir:part=1M", "--limit=user:1234=2M"];
    fixture.start(&[&["cage"], &options[..]].concat(), place.as_ref(), &place);
    let mut guarded = Guarded::of(fixture);
    let at = |name: &str| place.join(name);
    let used = |guarded: &Guarded| (cage(guarded).number("used"), cage(guarded).number("inodes"));
    fs::create_dir(at("part")).unwrap();
    let mut log = OpenOptions::new().append(true).create(true).open(at("log")).unwrap();
    log.write_all(&zeros(100 << 10)).unwrap();
    let mut gone = File::create(at("gone")).unwrap();
    gone.write_all(&zeros(1 << 20)).unwrap();
    let read_only = File::open(at("gone")).unwrap();
    fs::remove_file(at("gone")).unwrap();
    drop(gone);
    fs::write(at("part/file"), zeros(500 << 10)).unwrap();
    std::os::unix::fs::chown(at("part/file"), Some(1234), None).unwrap();
    let before = used(&guarded);
    assert_eq!(before, ((100 << 10) + (1 << 20) + (500 << 10) + 4096, 4), "three files and a directory");
    guarded.kill();
    assert_eq!(used(&guarded), before);
    assert_eq!(cage(&guarded).text("mode"), "through");
    let (written, error) = crate::mounting::cages::fill(&mut File::create(at("part/more")).unwrap(), 4096);
    assert_eq!((written, error), ((1 << 20) - (500 << 10) - 4096, 28), "the directory's limit");
    let resized = guarded.fixture.nacre(["cage", "resize", place.to_str().unwrap(), "3M"]);
    assert!(resized.status.success(), "{}", crate::mounting::text(&resized.stderr));
    guarded.kill();
    assert_eq!(cage(&guarded).number("limit"), 3 << 20);
    let (written, error) = crate::mounting::cages::fill(&mut log, 4096);
    assert_eq!((written, error), ((1 << 20) - (100 << 10), 28), "the whole's limit");
    drop(read_only);
    eventually("what had no name is free", || cage(&guarded).number("used") == 2 << 20);
    log.write_all(&zeros(4096)).unwrap();
    let counted = || cage(&guarded).text("accounting") == "exact" && cage(&guarded).number("recounts") > 0;
    eventually("all of it is counted", counted);
    assert_eq!(used(&guarded), cost(&place));
    drop(log);
    guarded.fixture.unmount();
}

/// The descriptors of a process that programs started by it would have, but for the standard ones.
fn kept_for_children(process: u32) -> Vec<String> {
    let is_kept = |number: &String| {
        let told = fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).unwrap_or_default();
        let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).map(str::trim).unwrap_or("0");
        !told.is_empty()
            && i32::from_str_radix(flags, 8).unwrap() & rustix::fs::OFlags::CLOEXEC.bits().cast_signed() == 0
    };
    let all = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let numbers = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    numbers.filter(|number| !["0", "1", "2"].contains(&number.as_str())).filter(is_kept).collect()
}

/// Another copy of the program takes over from the one that serves, while all of it is used.
#[test]
fn another_program_goes_on() {
    if !as_root() {
        return;
    }
    let mut mirror = Guarded::new(&["--perms=a+r"]);
    let mut cage = Guarded::cage(&["--size=64M"]);
    let newer = mirror.fixture.scratch.path().join("newer");
    fs::copy(crate::mounting::nacre(), &newer).unwrap();
    let runs_newer = |process: u32| fs::read_link(format!("/proc/{process}/exe")).is_ok_and(|program| program == newer);
    let upgrade = |guarded: &Guarded| {
        let mut command = Command::new(&newer);
        let output = crate::mounting::finish(command.arg("upgrade").arg(&guarded.fixture.mountpoint));
        assert!(output.status.success(), "{}", crate::mounting::text(&output.stderr));
    };
    let mut union = Guarded::union(&[], |_| ());
    for guarded in [&mut mirror, &mut cage, &mut union] {
        let mountpoint = guarded.fixture.mountpoint.clone();
        let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut nameless =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(mountpoint.join("x")).unwrap();
        nameless.write_all(b"content").unwrap();
        fs::remove_file(mountpoint.join("x")).unwrap();
        std::thread::scope(|scope| {
            let (over, done, place) = (&over, &done, &mountpoint);
            let end = Raised(over);
            let threads: Vec<_> = (0..3).map(|number| scope.spawn(move || change(place, number, over, done))).collect();
            let goes_on = || {
                let before = done.load(Ordering::Relaxed);
                eventually("they go on", || done.load(Ordering::Relaxed) > before + 20);
            };
            goes_on();
            upgrade(guarded);
            let now = worker(place);
            assert!(runs_newer(now) && runs_newer(guarded.guardian), "worker and guardian");
            guarded.workers.push(now);
            assert!(kept_for_children(guarded.guardian).is_empty(), "programs that it starts have nothing of it");
            // Whom the program is already is left alone.
            upgrade(guarded);
            assert_eq!((worker(place), restarts(place)), (now, 1));
            goes_on();
            // It continues after deaths as the previous one did.
            guarded.kill();
            assert!(runs_newer(worker(place)));
            goes_on();
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let mut text = String::new();
        nameless.seek(SeekFrom::Start(0)).unwrap();
        nameless.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        drop(nameless);
        let gone = guarded.fixture.nacre(["upgrade", guarded.fixture.at("no/mount").to_str().unwrap()]);
        assert_eq!(gone.status.code(), Some(3));
        guarded.fixture.unmount();
    }
}

#[test]
fn what_cannot_be_gone_on_with_is_not_touched() {
    if !as_root() {
        return;
    }
    let plain = Fixture::mirror(&[]);
    let newer = plain.scratch.path().join("newer");
    fs::copy(crate::mounting::nacre(), &newer).unwrap();
    let before = worker(&plain.mountpoint);
    let output = crate::mounting::finish(Command::new(&newer).arg("upgrade").arg(&plain.mountpoint));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        crate::mounting::text(&output.stderr).contains("without --survive"),
        "{}",
        crate::mounting::text(&output.stderr)
    );
    assert_eq!(worker(&plain.mountpoint), before);
    // A supervisor that is signaled without a reason does nothing.
    let guarded = Guarded::new(&[]);
    guarded.fixture.signal(Signal::USR2);
    fs::write(guarded.at("file"), "content").unwrap();
    assert_eq!((worker(&guarded.fixture.mountpoint), guarded.restarts()), (guarded.workers[0], 0));
}

/// Creates a program under this name, or a file that is none.
fn program(guarded: &Guarded, name: &str, content: &[u8], mode: u32) -> PathBuf {
    let path = guarded.fixture.scratch.path().join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    path
}

#[test]
fn a_program_that_cannot_go_on_is_not_begun_with() {
    if !as_root() {
        return;
    }
    let guarded = Guarded::new(&[]);
    let real = fs::read(crate::mounting::nacre()).unwrap();
    // An ELF header says for which processor it is, and which loader it needs.
    let mut foreign = real.clone();
    foreign[18] ^= 0x7f;
    let mut unloadable = real.clone();
    let loader = real.windows(8).position(|window| window == b"/ld-linu").unwrap();
    unloadable[loader + 1] = b'x';
    let script = |text: &str| format!("#!/bin/sh\n{text}\n").into_bytes();
    let copied = format!("exec {} \"$@\"", crate::mounting::nacre().display());
    let wrong: [(&str, Vec<u8>, u32, &str); 8] = [
        ("foreign", foreign, 0o755, "for machines of another kind"),
        ("unloadable", unloadable, 0o755, "cannot be started: No such file or directory"),
        ("unexecutable", real, 0o644, "cannot be started: Permission denied"),
        ("failing", script("exit 1"), 0o755, "does not say that it can (exit status: 1)"),
        ("silent", script("exit 0"), 0o755, "does not say that it can (exit status: 0)"),
        ("echoing", script("exec cat"), 0o755, "does not say that it can (exit status: 0)"),
        ("killed", script("kill -9 $$"), 0o755, "does not say that it can (signal: 9"),
        // It does not know how the mount is noted.
        ("older", script(&format!("sed 's/\"version\":[0-9]*/\"version\":999/' | {copied}")), 0o755, "reads version"),
    ];
    let before = worker(&guarded.fixture.mountpoint);
    for (name, content, mode, why) in wrong {
        let program = program(&guarded, name, &content, mode);
        let option = format!("--program={}", program.display());
        let output = guarded.fixture.nacre(["upgrade", &option, guarded.fixture.mountpoint.to_str().unwrap()]);
        let said = crate::mounting::text(&output.stderr);
        assert!(!output.status.success() && said.contains(why) && said.contains("no mount"), "{name}: {said}");
        assert_eq!((worker(&guarded.fixture.mountpoint), guarded.restarts()), (before, 0), "{name}");
    }
    // The process of the mount may find something else there than the command.
    let program = program(&guarded, "changing", &script("[ -e $0.asked ] && exit 1; : >$0.asked\nexec NACRE"), 0o755);
    fs::write(&program, fs::read_to_string(&program).unwrap().replace("exec NACRE", &copied)).unwrap();
    let option = format!("--program={}", program.display());
    let output = guarded.fixture.nacre(["upgrade", &option, guarded.fixture.mountpoint.to_str().unwrap()]);
    assert!(
        crate::mounting::text(&output.stderr).contains("does not say that it can"),
        "{}",
        crate::mounting::text(&output.stderr)
    );
    assert_eq!((worker(&guarded.fixture.mountpoint), guarded.restarts()), (before, 0));
    fs::write(guarded.at("file"), "content").unwrap();
}

/// Another program takes over, and its processes die at once: the previous program serves again.
#[test]
fn a_program_whose_processes_die_is_followed_by_the_one_before() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    let newer = program(&guarded, "newer", &fs::read(crate::mounting::nacre()).unwrap(), 0o755);
    let option = format!("--program={}", newer.display());
    let output = guarded.fixture.nacre(["upgrade", &option, guarded.fixture.mountpoint.to_str().unwrap()]);
    assert!(output.status.success(), "{}", crate::mounting::text(&output.stderr));
    let runs = |process: u32| fs::read_link(format!("/proc/{process}/exe")).unwrap();
    assert_eq!(runs(guarded.guardian), newer);
    let mut file = OpenOptions::new().read(true).append(true).create(true).open(guarded.at("file")).unwrap();
    guarded.workers.push(worker(&guarded.fixture.mountpoint));
    let old = fs::canonicalize(crate::mounting::nacre()).unwrap();
    for death in 1..=5_u64 {
        guarded.kill();
        file.write_all(b"x").unwrap();
        let program = if death < 3 { &newer } else { &old };
        let now = (runs(guarded.guardian), runs(worker(&guarded.fixture.mountpoint)));
        assert_eq!(now, (program.clone(), program.clone()), "death {death}");
        assert_eq!(guarded.restarts(), death + 1);
    }
    assert_eq!(fs::read(guarded.at("file")).unwrap(), b"xxxxx");
    // There is no previous program to go back to.
    kill(*guarded.workers.last().unwrap(), Signal::KILL);
    assert_eq!(guarded.fixture.ended(), Some(1));
}

#[test]
fn nobody_notices_that_the_process_dies() {
    if !as_root() {
        return;
    }
    let rounds = std::env::var("NACRE_SURVIVAL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3_u64);
    println!("campaign: NACRE_SURVIVAL_ROUNDS={rounds}");
    for round in 0..rounds {
        let mut guarded = match round % 3 {
            0 => Guarded::new(&[]),
            1 => Guarded::new(crate::mounting::without_passthrough()),
            _ => Guarded::cage(&["--size=1G"]),
        };
        let mountpoint = guarded.fixture.mountpoint.clone();
        let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let database = "import sqlite3, sys\n\
            c = sqlite3.connect(sys.argv[1] + '/db'); c.execute('create table t(i integer primary key, v)'); n = 0\n\
            import os\n\
            while not os.path.exists(sys.argv[1] + '/over'):\n\
            \x20   with c: c.execute('insert into t(v) values(?)', ('x' * 500,)); n += 1\n\
            assert c.execute('select count(*) from t').fetchone() == (n,)\n\
            assert c.execute('pragma integrity_check').fetchone() == ('ok',)";
        let database = Command::new("python3").arg("-c").arg(database).arg(&mountpoint).spawn();
        std::thread::scope(|scope| {
            let (over, done, place) = (&over, &done, &mountpoint);
            let end = Raised(over);
            let threads: Vec<_> = (0..3).map(|number| scope.spawn(move || change(place, number, over, done))).collect();
            for _ in 0..2 {
                let before = done.load(Ordering::Relaxed);
                eventually("they go on", || done.load(Ordering::Relaxed) > before + 20 + round % 7);
                // At no particular moment.
                std::thread::sleep(Duration::from_micros(round * 911 % 5000));
                guarded.kill();
            }
            let before = done.load(Ordering::Relaxed);
            eventually("they go on", || done.load(Ordering::Relaxed) > before + 20);
            drop(end);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        fs::write(guarded.at("over"), "").unwrap();
        if let Ok(mut database) = database {
            assert!(database.wait().unwrap().success(), "the database");
        }
        for number in 0..3 {
            let log = fs::read_to_string(guarded.fixture.below(format!("log-{number}"))).unwrap();
            let expected: String = (0..log.lines().count()).map(|round| format!("{round}\n")).collect();
            assert!(log == expected, "what was appended is there once, in its order");
        }
        let left = fs::read_dir(&guarded.fixture.source).unwrap().filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(|first: char| first.is_ascii_digit())
        });
        assert_eq!(left.count(), 0);
        if round % 3 == 2 {
            let (used, inodes) = cost(&guarded.fixture.source);
            eventually("the books of the cage are right", || {
                (cage(&guarded).number("used"), cage(&guarded).number("inodes")) == (used, inodes)
            });
        }
        guarded.fixture.unmount();
    }
}

#[test]
fn a_process_that_dies_before_it_has_gone_on_is_followed_by_another_one() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    let mut file = File::create(guarded.at("file")).unwrap();
    file.write_all(b"one").unwrap();
    let (guardian, first) = (guarded.guardian, guarded.workers[0]);
    let next = || {
        let children = fs::read_to_string(format!("/proc/{guardian}/task/{guardian}/children")).expect("children");
        children.split_whitespace().filter_map(|child| child.parse().ok()).find(|child| *child != first)
    };
    kill(first, Signal::KILL);
    eventually("the next process is there", || next().is_some());
    let second = next().unwrap();
    guarded.workers.push(second);
    kill(second, Signal::KILL);
    file.write_all(b"two").unwrap();
    file.sync_all().unwrap();
    assert_eq!(guarded.restarts(), 2);
    guarded.workers.push(worker(&guarded.fixture.mountpoint));
    assert_eq!(fs::read_to_string(guarded.fixture.below("file")).unwrap(), "onetwo");
}

/// How threads of a process with this name are: the letters of proc(5).
fn states(process: u32, name: &str) -> String {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    stats.filter_map(|stat| stat.split_once(&format!("({name}) "))?.1.chars().next()).collect()
}

/// Creates a mount whose process cannot die: one of its threads invalidates a removed name, and waits
/// for the directory, in which a file is being created; the creation waits for a fanotify answer,
/// which the returned child gives only when it ends.
fn telling_in_vain() -> (Guarded, std::process::Child, std::thread::JoinHandle<std::io::Result<()>>) {
    const PROGRAM: &str = "import ctypes, os, sys\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        group = libc.fanotify_init(4, os.O_RDONLY)\n\
        mask = ctypes.c_uint64(0x10000 | 0x08000000)\n\
        assert libc.fanotify_mark(group, 1, mask, -100, sys.argv[1].encode()) == 0, ctypes.get_errno()\n\
        print('held', flush=True)\n\
        sys.stdin.read()";
    let guarded = Guarded::new(crate::mounting::without_passthrough());
    let below = guarded.fixture.below("d");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("other"), "").unwrap();
    assert!(guarded.at("d/other").exists());
    // An open of a file there waits for the answer of this program, which gives none.
    let mut holder = Command::new("python3");
    let holder = holder.arg("-c").arg(PROGRAM).arg(&below).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().expect("python3");
    let mut said = [0; 5];
    holder.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"held\n");
    let place = guarded.at("d/new");
    let making = std::thread::spawn(move || fs::write(place, "new"));
    eventually("the file is being made", || below.join("new").exists());
    fs::remove_file(below.join("other")).unwrap();
    eventually("the kernel is being told", || states(guarded.workers[0], "nacre-waits") == "D");
    (guarded, holder, making)
}

fn is_there(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

fn a_process_that_waits_dies_of(signal: Signal) {
    let (mut guarded, mut holder, making) = telling_in_vain();
    let first = guarded.workers[0];
    guarded.die_of(signal);
    assert_eq!(states(first, "nacre-waits"), "D", "it waits for what the other process answers");
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    making.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(guarded.at("d/new")).unwrap(), "new");
    assert!(!guarded.at("d/other").exists());
    eventually("it is dead", || !is_there(first));
    guarded.kill();
    assert_eq!(guarded.restarts(), 2);
}

#[test]
fn a_process_that_waits_for_its_own_mount_is_followed_by_another_one() {
    if as_root() {
        a_process_that_waits_dies_of(Signal::KILL);
    }
}

/// The kernel writes no core dump of it: before the dump, it would wait for a thread that waits for
/// the next process.
#[test]
fn a_process_that_crashes_while_it_waits_is_followed_by_another_one() {
    if as_root() {
        a_process_that_waits_dies_of(Signal::ABORT);
    }
}

#[test]
fn a_mount_stays_down_whoever_waits_for_it() {
    if !as_root() {
        return;
    }
    let (mut guarded, mut holder, making) = telling_in_vain();
    let first = guarded.workers[0];
    for _ in 0..2 {
        guarded.kill();
        let serving = *guarded.workers.last().unwrap();
        eventually("the file is being made", || states(serving, "fuse device").contains('D'));
    }
    kill(*guarded.workers.last().unwrap(), Signal::KILL);
    assert_eq!(guarded.fixture.ended(), Some(1));
    assert!(making.join().unwrap().is_err());
    eventually("it is dead", || !is_there(first));
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
}

/// A thread of the process notifies the kernel of a new name, and waits for the directory's lock,
/// whose holder waits for the process: it cannot die before the next process has answered the
/// holder.
#[test]
fn a_process_that_cannot_die_before_it_has_answered_is_followed_by_another_one() {
    if !as_root() {
        return;
    }
    let line = "union:SOURCE=rw:{host:LOWER \\| throttle:read-rate=1M}=ro";
    let mut guarded = Guarded::over_lower(&["mount", "-o", "rw"], line, |lower| {
        fs::create_dir(lower.join("tree")).unwrap();
        fs::write(lower.join("tree/large"), zeros(4 << 20)).unwrap();
    });
    fs::write(guarded.at("tree/made"), "").unwrap();
    let (old, new) = (guarded.at("tree/large"), guarded.at("tree/moved"));
    // It is copied first, slowly.
    let moving = std::thread::spawn(move || fs::rename(old, new));
    let killed = guarded.workers[0];
    let waits = |task: std::io::Result<fs::DirEntry>| {
        let place = fs::read_to_string(task.unwrap().path().join("wchan"));
        place.is_ok_and(|place| place.starts_with("fuse_reverse_inval"))
    };
    let mut number = 0;
    eventually("a thread waits for the directory", || {
        number += 1;
        fs::write(guarded.fixture.below(format!("tree/{number}")), "").unwrap();
        fs::read_dir(format!("/proc/{killed}/task")).unwrap().any(waits)
    });
    assert!(!moving.is_finished());
    guarded.kill();
    moving.join().unwrap().unwrap();
    assert_eq!(fs::metadata(guarded.at("tree/moved")).unwrap().len(), 4 << 20);
    assert!(!guarded.at("tree/large").exists());
    eventually("nothing is left of the process", || !Path::new(&format!("/proc/{killed}")).exists());
    guarded.fixture.unmount();
}

#[test]
fn a_guardian_is_small() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    // Pages of the program's file are private to no process, even where they count as dirty: those
    // of a new copy do.
    let private = |process: u32| {
        let (mut own, mut private) = (0, 0);
        for line in fs::read_to_string(format!("/proc/{process}/smaps")).unwrap().lines() {
            let mut words = line.split_whitespace();
            let (name, number) = (words.next().unwrap_or_default(), words.next().and_then(|word| word.parse().ok()));
            match (name, number) {
                ("Private_Clean:" | "Private_Dirty:", Some(number)) => private += number,
                ("Anonymous:", Some(number)) => own += std::mem::take(&mut private).min(number),
                _ => {}
            }
        }
        assert!(own > 0, "kilobytes");
        own
    };
    assert!(private(guarded.guardian) < 3 << 10, "{} KiB", private(guarded.guardian));
    guarded.kill();
    assert!(private(guarded.guardian) < 3 << 10, "{} KiB", private(guarded.guardian));
}

#[test]
fn the_third_death_within_a_minute_is_the_last() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    guarded.kill();
    guarded.kill();
    kill(*guarded.workers.last().unwrap(), Signal::KILL);
    assert_eq!(guarded.fixture.ended(), Some(1));
    assert_eq!(crate::mounting::errno(fs::metadata(guarded.at("x"))), rustix::io::Errno::NOTCONN.raw_os_error());
}

#[test]
fn a_mount_goes_on_without_its_guardian_until_its_process_dies() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    fs::write(guarded.at("file"), "content").unwrap();
    let why = Status::of(&guarded.fixture.mountpoint).text("transport_reason").to_owned();
    assert!(why.contains("end with the process"), "no io_uring: {why}");
    guarded.fixture.signal(Signal::KILL);
    assert_eq!(guarded.fixture.ended(), None);
    assert_eq!(fs::read_to_string(guarded.at("file")).unwrap(), "content");
    let mountpoint = guarded.fixture.mountpoint.clone();
    assert!(Status::of(&mountpoint).survives().get("guardian").is_none(), "nobody goes on with it");
    kill(guarded.workers[0], Signal::KILL);
    eventually("the mount is dead", || {
        fs::metadata(mountpoint.join("file")).is_err_and(|error| error.raw_os_error() == Some(107))
    });
}

#[test]
fn a_signal_to_the_guardian_ends_the_mount() {
    if !as_root() {
        return;
    }
    let mut guarded = Guarded::new(&[]);
    guarded.kill();
    guarded.fixture.signal(Signal::TERM);
    assert_eq!(guarded.fixture.ended(), Some(0));
    assert!(!is_mounted(&guarded.fixture.mountpoint));
    assert!(guarded.workers.iter().all(|worker| is_gone(*worker)));
}

#[test]
fn what_cannot_outlive_its_process_is_refused() {
    if !as_root() {
        return;
    }
    let fixture = Fixture::bare();
    let (source, mountpoint) = (fixture.source.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    for (options, why) in [
        (&["--transport=uring"][..], "io_uring"),
        (&["--enable-lock-forwarding"], "locks"),
        (&["--immutable"], "without a request"),
        (&["--notify-watchers"], "raise events"),
    ] {
        let words = [&["mirror", "--survive"], options, &[source, mountpoint]].concat();
        let output = fixture.nacre(&words);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(crate::mounting::text(&output.stderr).contains(why), "{}", crate::mounting::text(&output.stderr));
    }
    let output = fixture.nacre(["cage", "--survive", "--size=1M", "--writes=collected", source]);
    assert!(
        crate::mounting::text(&output.stderr).contains("--writes=through"),
        "{}",
        crate::mounting::text(&output.stderr)
    );
    let below = fixture.scratch.path().join("below");
    fs::create_dir(&below).unwrap();
    let (branches, below) = (format!("{source}=rw:{}=ro", below.display()), below.display());
    for (words, why) in [
        (["union", "-o", "link-cow=true", &branches], "numbers of this process"),
        (["mount", "-o", "rw", &format!("union:{branches} | cage:size=1M")], "a cage lies over a union"),
        (["mount", "-o", "rw", &format!("union:{source}=rw:{{union:{below}=ro}}=ro")], "a union itself"),
        (["mount", "-o", "rw", &format!("union:{source}=rw:{{mem}}=ro")], "\"mem\""),
    ] {
        let output = fixture.nacre([&words[..], &["--survive", "--transport=device", mountpoint]].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", crate::mounting::text(&output.stderr));
        assert!(crate::mounting::text(&output.stderr).contains(why), "{}", crate::mounting::text(&output.stderr));
    }
    let output = fixture.nacre(["mount", "--survive", "mem", mountpoint]);
    assert!(crate::mounting::text(&output.stderr).contains("\"mem\""), "{}", crate::mounting::text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
}

/// Kills at random moments on mounts of all kinds, with loads that check acknowledged operations.
#[test]
fn what_was_answered_is_kept_by_mounts_of_all_kinds() {
    if !as_root() {
        return;
    }
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |value| value.parse().expect(name));
    let (kills, seed) = (number("NACRE_SURVIVAL_KILLS", 12), number("NACRE_SURVIVAL_SEED", 1));
    let told = campaign::run(kills, 3, seed);
    println!("campaign: NACRE_SURVIVAL_KILLS={kills} NACRE_SURVIVAL_SEED={seed}: {}", told.text());
}
