//! The books of cages are right after every kind of end, and after changes behind their backs.

use crate::mounting::cages::{Cage, cost, zeros};
use crate::mounting::{Fixture, as_root, eventually, is_mounted, needs, run};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;

fn cage(options: &[&str]) -> Fixture {
    Fixture::cage(options)
}

#[test]
fn books_survive_an_orderly_end() {
    needs!(as_root());
    for end in ["nacre umount", "umount", "SIGTERM", "SIGINT"] {
        let mut fixture = cage(&["--size=4M", "--limit=user:1234=2M", "--limit=dir:part=1M"]);
        fs::create_dir(fixture.at("part")).unwrap();
        fs::write(fixture.at("part/file"), zeros(300_000)).unwrap();
        fs::write(fixture.at("file"), zeros(500_000)).unwrap();
        std::os::unix::fs::chown(fixture.at("file"), Some(1234), None).unwrap();
        let before = Cage::of(&fixture, &fixture.mountpoint);
        match end {
            "nacre umount" => fixture.unmount(),
            "umount" => {
                assert!(run("umount", [&fixture.mountpoint]).status.success());
                assert_eq!(fixture.ended(), Some(0));
            }
            signal => {
                fixture.signal(if signal == "SIGTERM" { Signal::TERM } else { Signal::INT });
                assert_eq!(fixture.ended(), Some(0), "{end}");
            }
        }
        assert!(!is_mounted(&fixture.mountpoint));
        fixture.start_cage(&["--size=4M", "--limit=user:1234=2M", "--limit=dir:part=1M"]);
        let after = Cage::of(&fixture, &fixture.mountpoint);
        for field in ["used", "inodes", "free", "users", "directories"] {
            assert_eq!(after.0[field], before.0[field], "{end}: {field}");
        }
        assert_eq!((after.number("used"), after.number("inodes")), cost(&fixture.source), "{end}");
        fixture.unmount();
    }
}

#[test]
fn what_changed_while_it_was_unmounted_is_found() {
    needs!(as_root());
    let mut fixture = cage(&["--size=4M"]);
    fs::write(fixture.at("file"), zeros(MIB)).unwrap();
    fixture.unmount();
    fs::write(fixture.below("behind"), zeros(2 * MIB)).unwrap();
    fs::remove_file(fixture.below("file")).unwrap();
    fixture.start_cage(&["--size=4M"]);
    eventually("the books are right", || Cage::of(&fixture, &fixture.mountpoint).number("used") == 2 * MIB);
}

#[test]
fn what_changes_behind_the_cage_is_counted() {
    needs!(as_root());
    let fixture = cage(&["--size=4M"]);
    fs::write(fixture.at("file"), zeros(MIB)).unwrap();
    fs::write(fixture.below("behind"), zeros(2 * MIB)).unwrap();
    let used = || Cage::of(&fixture, &fixture.mountpoint).number("used");
    eventually("a new file is counted", || used() == 3 * MIB);
    fs::remove_file(fixture.below("file")).unwrap();
    eventually("a deleted file is", || used() == 2 * MIB);
}

/// Changes files of all kinds until `stop` is set; everything may fail from the kill on.
fn change_files(place: &Path, stop: &AtomicBool) {
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let name = place.join(format!("d/{}", number * 7 % 300));
        let _ = match number % 6 {
            0 => fs::remove_file(&name),
            1 => fs::rename(&name, place.join(format!("d/{}", number % 300))),
            2 => File::options().write(true).open(&name).and_then(|file| file.set_len(number % 9000)),
            3 => File::options()
                .append(true)
                .create(true)
                .open(&name)
                .and_then(|mut file| file.write_all(&zeros(number % 5000))),
            4 => fs::hard_link(&name, place.join(format!("d/link{}", number % 50))),
            _ => fs::write(&name, zeros(number % 20_000)),
        };
    }
}

#[test]
fn after_a_kill_the_use_is_right() {
    needs!(as_root());
    for (round, options) in
        [["--size=64M", "--writes=through"], ["--size=64G", "--writes=collected"]].iter().cycle().take(6).enumerate()
    {
        let mut fixture = cage(options);
        fs::create_dir(fixture.at("d")).unwrap();
        for number in 0..200 {
            fs::write(fixture.at(format!("d/{number}")), zeros(1000 + number * 50)).unwrap();
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2).map(|_| scope.spawn(|| change_files(&fixture.mountpoint, &stop))).collect();
            std::thread::sleep(std::time::Duration::from_millis(50 + round as u64 * 30));
            fixture.signal(Signal::KILL);
            stop.store(true, Ordering::Relaxed);
            writers.into_iter().for_each(|writer| writer.join().unwrap());
        });
        assert_eq!(fixture.ended(), None);
        // The next process removes the remainders of the killed one.
        fixture.start_cage(options);
        let (cage, there) = (Cage::of(&fixture, &fixture.mountpoint), cost(&fixture.source));
        // Of each writer, at most one file was being made when the kill came, and the other one may
        // have written to it already: the count in the background finds it.
        let making = there.1.saturating_sub(cage.number("inodes"));
        let right = making <= 2 && cage.number("inodes") <= there.1;
        assert!(right, "round {round}: {there:?} there, {}", cage.0);
        let most = cage.number("used") + making * 20_480;
        assert!((cage.number("used")..=most).contains(&there.0), "round {round}: {there:?} there, {}", cage.0);
        eventually("everything is counted", || {
            let cage = Cage::of(&fixture, &fixture.mountpoint);
            (cage.number("used"), cage.number("inodes")) == there
        });
        fixture.unmount();
    }
}
