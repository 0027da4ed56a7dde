//! Files with stores through a shared mapping while other processes copy them: queries for data,
//! holes and blocks include the stores.

use crate::mounting::{Fixture, as_root, needs, pools::Pool, run, text};
use nacre_sys::mapping::SharedMapping;
use rustix::fs::SeekFrom;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const LENGTH: usize = 16 << 20;
const STORED: &[u8] = b"stored through a mapping";

fn places() -> impl Iterator<Item = usize> {
    (0..LENGTH).step_by(4 << 20).map(|start| start + 12_345)
}

/// A copy of `file` by a program that keeps holes, as the content that it has.
fn copied(program: &str, file: &Path, scratch: &Path) -> Vec<u8> {
    let to = scratch.join(format!("copy-by-{program}"));
    let (folder, name) = (file.parent().unwrap(), Path::new(file.file_name().unwrap()));
    let words = match program {
        "cp" => vec![Path::new("--sparse=auto"), Path::new("--reflink=never"), file, &to],
        _ => vec![Path::new("-S"), Path::new("-cf"), &to, Path::new("-C"), folder, name],
    };
    let output = run(program, words);
    // tar(1) says so where the time of a store arrived meanwhile.
    let changed = text(&output.stderr).contains("file changed as we read it");
    assert!(output.status.success() || changed, "{}", text(&output.stderr));
    let content = if program == "cp" { fs::read(&to).unwrap() } else { run("tar", [Path::new("-xOf"), &to]).stdout };
    fs::remove_file(&to).unwrap();
    content
}

/// Stores into a mapping of `file`, a hole of [`LENGTH`] bytes, which lasts until `done` returns.
pub fn stored_while(file: &Path, done: impl FnOnce()) {
    let writer = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mapping = SharedMapping::new(&writer, LENGTH, true).unwrap();
    for place in places() {
        mapping.write(place, STORED).unwrap();
    }
    done();
    drop(mapping);
}

/// `file` has the stores of [`stored_while`].
pub fn has_stores(file: &Path) {
    let content = fs::read(file).unwrap();
    for place in places() {
        assert_eq!(&content[place..place + STORED.len()], STORED, "{} at {place}", file.display());
    }
}

/// Stores into a mapping of `file`, a hole of [`LENGTH`] bytes, and has it looked at and copied.
pub fn stores_are_copied(file: &Path, scratch: &Path) {
    // The kernel may keep these attributes.
    assert_eq!(fs::metadata(file).unwrap().size(), LENGTH as u64);
    let writer = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let reader = File::open(file).unwrap();
    let mapping = SharedMapping::new(&writer, LENGTH, true).unwrap();
    // Open no more, but mapped.
    drop(writer);
    for place in places() {
        mapping.write(place, STORED).unwrap();
        // A hole when it was asked last.
        let found = rustix::fs::seek(&reader, SeekFrom::Data(place as u64)).unwrap();
        assert_eq!(found, place as u64, "{}", file.display());
    }
    assert_ne!(fs::metadata(file).unwrap().blocks(), 0, "{}", file.display());
    for (program, place) in [("cp", 1 << 20), ("tar", 3 << 20)] {
        mapping.write(place, STORED).unwrap();
        let content = copied(program, file, scratch);
        assert_eq!(content.len(), LENGTH, "{program} of {}", file.display());
        for place in places().chain([place]) {
            assert_eq!(&content[place..place + STORED.len()], STORED, "{program} of {} at {place}", file.display());
        }
    }
}

/// Checks that a hole of the source is one in the mount, also while the file is open for writing;
/// where the kernel cannot write back for lseek(2), it is data.
fn holes_stay(file: &Path, below: &Path) {
    let open = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let below = File::open(below).unwrap();
    let (length, first) = (LENGTH as u64, places().next().unwrap() as u64);
    for from in [SeekFrom::Data(0), SeekFrom::Hole(first), SeekFrom::Data(first + (1 << 19))] {
        let (found, native) = (rustix::fs::seek(&open, from), rustix::fs::seek(&below, from));
        if kernel_writes_back() {
            assert_eq!(found, native, "{}: {from:?}", file.display());
        }
        assert!(found.is_ok_and(|found| found <= length));
    }
}

fn kernel_writes_back() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|character: char| !character.is_ascii_digit()).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    [next(), next()] >= [6, 18]
}

/// Creates a file with a hole.
pub fn hole(file: &Path) {
    File::create(file).unwrap().set_len(LENGTH as u64).unwrap();
}

#[test]
fn stores_to_a_mapping_are_in_copies_of_mirrors_and_cages() {
    needs!(as_root());
    let scratch = crate::mounting::scratch();
    for options in [crate::mounting::without_passthrough(), &["--read-rate=1G"], &[]] {
        let fixture = Fixture::mirror_of(options, |source| hole(&source.join("database")));
        stores_are_copied(&fixture.at("database"), scratch.path());
        holes_stay(&fixture.at("database"), &fixture.below("database"));
    }
    for options in [&["--size=200M"][..], &["--size=4G"], &["--size=1G", "--when-full=drop-oldest"]] {
        let cage = Fixture::cage_of(options, |source| hole(&source.join("database")));
        stores_are_copied(&cage.at("database"), scratch.path());
    }
}

#[test]
fn stores_to_a_mapping_are_in_copies_of_pools() {
    needs!(as_root());
    let scratch = crate::mounting::scratch();
    for more in [&[][..], &["-O", "atime=on"]] {
        let pool = Pool::made("mapped", "1G", more);
        hole(&pool.at("database"));
        // The kernel forgets what it knows of the file.
        pool.nacre(&["fs", "unmount", "%"]);
        pool.nacre(&["fs", "mount", "%"]);
        stores_are_copied(&pool.at("database"), scratch.path());
    }
}
