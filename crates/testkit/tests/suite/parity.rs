//! The parity harness, tried on directories that need no mount: two native ones are equal, and a
//! difference is found.

use std::panic::catch_unwind;

#[test]
fn two_native_directories_are_equal() {
    let place = tempfile::tempdir().unwrap();
    let (one, two) = (place.path().join("one"), place.path().join("two"));
    for directory in [&one, &two] {
        std::fs::create_dir(directory).unwrap();
    }
    nacre_testkit::parity::compare(&one, &two);
}

#[test]
fn a_difference_is_found() {
    // /dev/shm is another file system than the build's: it has no birth time, other sizes, other
    // limits.
    if !std::path::Path::new("/dev/shm").is_dir() {
        println!("skipped: no /dev/shm");
        return;
    }
    let (one, two) =
        (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let outcome = catch_unwind(|| nacre_testkit::parity::compare(two.path(), one.path()));
    assert!(outcome.is_err(), "two different file systems were found equal");
}
