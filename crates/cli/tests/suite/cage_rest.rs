//! Idle cages on a file system with much activity elsewhere: they are notified of their own files
//! only, and their limit holds from the first write on.

use crate::mounting::cages::Cage;
use crate::mounting::resting::{busy, marked_file_systems, rested};
use crate::mounting::{Fixture, as_root, eventually, needs};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn megabytes(count: u64) -> Vec<u8> {
    vec![b'x'; usize::try_from(count * MIB).unwrap()]
}

/// Bytes that a file system shows as used.
fn used(path: &Path) -> u64 {
    let figures = rustix::fs::statvfs(path).unwrap();
    (figures.f_blocks - figures.f_bfree) * figures.f_frsize
}

/// A cage of 16 MiB with one directory that the kernel does not know.
fn cage() -> Fixture {
    let mut fixture = Fixture::bare_alone();
    fixture.start_cage(&["--size=16M"]);
    fs::create_dir_all(fixture.below("deep/deeper")).unwrap();
    fs::write(fixture.below("deep/deeper/there"), megabytes(1)).unwrap();
    eventually("what is there is booked", || used(&fixture.mountpoint) >= MIB);
    fixture
}

/// The first request to a cage after an idle time; returns whether it shows the additional 12 MiB.
type First = (&'static str, fn(&Fixture) -> bool);

const FIRST: &[First] = &[
    ("statfs", |fixture| used(&fixture.mountpoint) >= 13 * MIB),
    ("status", |fixture| Cage::of(fixture, &fixture.source).number("used") >= 13 * MIB),
    ("a new file", |fixture| !fits(File::create(fixture.at("new")))),
    ("a file that is there", |fixture| !fits(OpenOptions::new().append(true).open(fixture.at("known")))),
    ("a file made larger by its name", |fixture| {
        let grown = OpenOptions::new().write(true).open(fixture.at("known")).unwrap();
        grown.write_all_at(&megabytes(4), 0).is_err()
    }),
    ("a directory", |fixture| {
        fs::create_dir(fixture.at("directory")).unwrap();
        used(&fixture.mountpoint) >= 13 * MIB
    }),
    ("a removal", |fixture| {
        fs::remove_file(fixture.at("known")).unwrap();
        let used = used(&fixture.mountpoint);
        (13 * MIB..14 * MIB).contains(&used)
    }),
];

fn fits(file: std::io::Result<File>) -> bool {
    let mut file = file.unwrap();
    (0..4).all(|_| file.write_all(&megabytes(1)).is_ok()) && file.sync_all().is_ok()
}

#[test]
fn a_cage_that_nobody_asks_hears_only_of_its_own_files_and_its_limit_holds_all_the_same() {
    needs!(as_root());
    // One after the other: a request for the state of one cage asks all cages.
    for (what, sees) in FIRST {
        let fixture = cage();
        fs::write(fixture.at("known"), "1").unwrap();
        rested(&fixture);
        fs::write(fixture.below("deep/deeper/grown"), megabytes(11)).unwrap();
        File::options()
            .append(true)
            .open(fixture.below("deep/deeper/there"))
            .unwrap()
            .write_all(&megabytes(1))
            .unwrap();
        assert_eq!(marked_file_systems(fixture.pid()), 0, "{what}: nobody has asked");
        assert!(sees(&fixture), "{what}: {} are booked", used(&fixture.mountpoint));
        assert!(used(&fixture.mountpoint) <= 16 * MIB, "{what}");
    }
}

#[test]
fn a_cage_that_is_read_while_it_rests_goes_on_hearing_what_others_do() {
    needs!(as_root());
    let fixture = cage();
    assert_eq!(fs::read(fixture.at("deep/deeper/there")).unwrap().len() as u64, MIB);
    rested(&fixture);
    // A lookup of an unknown name wakes the watch, and not the accounting.
    assert!(fs::metadata(fixture.at("unknown")).is_err());
    assert!(marked_file_systems(fixture.pid()) > 0);
    fs::write(fixture.below("unknown"), "now").unwrap();
    eventually("the new file is seen", || fs::read(fixture.at("unknown")).is_ok_and(|content| content == b"now"));
    fs::write(fixture.below("deep/deeper/there"), megabytes(3)).unwrap();
    eventually("the new size is seen", || fs::metadata(fixture.at("deep/deeper/there")).unwrap().len() == 3 * MIB);
    eventually("what has grown is booked", || used(&fixture.mountpoint) >= 3 * MIB);
    // A writer keeps it awake.
    rested(&fixture);
    let mut writer = File::create(fixture.at("written")).unwrap();
    for _ in 0..4 {
        busy(&fixture.source.with_file_name("elsewhere"), 500);
        writer.write_all(&megabytes(1)).unwrap();
    }
    assert!(marked_file_systems(fixture.pid()) > 0);
    writer.sync_all().unwrap();
    assert!(used(&fixture.mountpoint) >= 7 * MIB);
}
