//! Messages of a machine whose bucket is not as expected: older than it was before, unreachable,
//! full of foreign objects, or without its local log.

use std::fs;

use super::InBucket;
use crate::mounting::{as_root, eventually, needs, pools::Yard, sh};
use crate::s3_server::{BUCKET, Weather};

#[test]
fn a_bucket_that_was_rolled_back_is_refused_on_a_machine_that_knows_better() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at, bucket) = (yard.name("rb"), yard.path("at"), yard.path("bucket"));
    fs::create_dir(&bucket).unwrap();
    let address = format!("file://{}", bucket.display());
    yard.nacre(&["pool", "create", "-m", at.to_str().unwrap(), &name, &address]);
    fs::write(at.join("old"), "old").unwrap();
    yard.nacre(&["pool", "sync", "%"]);
    sh(yard.place.path(), "ls bucket/roots > kept");
    fs::write(at.join("new"), "new").unwrap();
    yard.nacre(&["pool", "export", "%"]);
    sh(yard.place.path(), "cd bucket/roots; for root in *; do grep -qx $root ../../kept || rm $root; done");
    let (_, said) = yard.refused(&["pool", "import", "%"]);
    assert!(said.contains("this machine has seen number") && said.contains("-f takes what is there"), "{said}");
    // Another machine knows nothing of it.
    let other = Yard::new();
    let reader = other.name("re");
    other.nacre(&["pool", "import", "-o", "readonly=on", "-N", "-t", &address, &reader]);
    other.nacre(&["pool", "export", &reader]);
    yard.nacre(&["pool", "import", "-f", "-m", "%"]);
    assert!(at.join("old").exists() && !at.join("new").exists());
    yard.nacre(&["pool", "export", "%"]);
    yard.nacre(&["pool", "import", "%"]);
    yard.nacre(&["pool", "destroy", "%"]);
}

/// What a killed process has left, and what a write that failed would leave.
#[test]
fn a_bucket_on_a_full_disk_keeps_nothing_unfinished() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at, disk) = (yard.name("fu"), yard.path("at"), yard.path("disk"));
    fs::create_dir(&disk).unwrap();
    sh(yard.place.path(), "mount -t tmpfs -o size=24m none disk; mkdir disk/bucket");
    let address = format!("file://{}", disk.join("bucket").display());
    yard.nacre(&["pool", "create", "-O", "compression=off", "-m", at.to_str().unwrap(), &name, &address]);
    yard.nacre(&["pool", "set", "failmode=continue", "%"]);
    let unfinished = || fs::read_dir(disk.join("bucket/.unfinished")).unwrap().count();
    sh(yard.place.path(), "head -c 60000000 /dev/urandom > at/big || true");
    yard.refused(&["pool", "sync", "%"]);
    assert_eq!(unfinished(), 0);
    yard.nacre(&["pool", "export", "-f", "%"]);
    sh(yard.place.path(), "mount -o remount,size=100m disk; echo half > disk/bucket/.unfinished/1-1");
    yard.nacre(&["pool", "import", "%"]);
    assert_eq!(unfinished(), 0);
    yard.nacre(&["pool", "destroy", "%"]);
    sh(yard.place.path(), "umount -l disk");
}

#[test]
fn a_store_that_is_away_holds_a_pool_all_the_same() {
    needs!(as_root());
    let pool = InBucket::made(&[]);
    pool.yard.nacre(&["pool", "export", "%"]);
    pool.moto.weather(Weather::Closed);
    for words in [&["pool", "import", "%"][..], &["pool", "import", "-F", "%"]] {
        let (_, said) = pool.yard.refused(words);
        assert!(said.contains("cannot be reached"), "{said}");
        assert!(!said.contains("no such pool") && !said.contains("-F"), "{said}");
    }
    pool.moto.weather(Weather::Fair);
    pool.import();
}

#[test]
fn what_others_have_put_is_removed_many_at_a_time() {
    needs!(as_root());
    let pool = InBucket::made(&[]);
    for number in 0..2300 {
        let key = format!("/{BUCKET}/one/tank/seg/{:02x}/1-{}", number & 0xff, 1_000_000 + number);
        assert_eq!(pool.moto.ask("PUT", &key).0, 200);
    }
    pool.yard.nacre(&["pool", "export", "%"]);
    pool.import();
    let before = pool.moto.heads().len();
    pool.yard.nacre(&["pool", "destroy", "%"]);
    assert_eq!(pool.moto.keys("one/"), Vec::<String>::new());
    let asked = pool.moto.heads().split_off(before);
    let removals = asked.iter().filter(|head| head.contains("?delete") || head.starts_with("DELETE ")).count();
    assert!((3..60).contains(&removals), "{removals} requests");
}

#[test]
fn a_log_that_finds_no_room_is_told_of() {
    needs!(as_root());
    let pool = InBucket::empty();
    let directory = pool.yard.path("log");
    fs::create_dir(&directory).unwrap();
    pool.sh("mount -t tmpfs -o size=1m none log");
    let log = ["--log-dir", directory.to_str().unwrap()];
    pool.create(&log);
    pool.sh("echo x > at/x; sync at/x");
    let status = pool.status();
    assert!(status.contains("log: none is kept on this machine") && status.contains("No space left"), "{status}");
    pool.sh("test -z \"$(find log -type f)\"");
    pool.yard.nacre(&["pool", "set", "log=remote", "%"]);
    assert!(!pool.status().contains("none is kept on this machine"));
    pool.sh("mount -o remount,size=100m log");
    pool.yard.nacre(&["pool", "set", "log=local", "%"]);
    let status = pool.status();
    assert!(!status.contains("none is kept on this machine"), "{status}");
    pool.yard.nacre(&["pool", "destroy", "%"]);
    pool.sh("umount -l log");
}

#[test]
fn a_pool_whose_objects_cannot_be_removed_is_destroyed_in_two_steps() {
    needs!(as_root());
    let pool = InBucket::made(&[]);
    pool.sh("head -c 3000000 /dev/urandom > at/file");
    pool.yard.nacre(&["pool", "sync", "%"]);
    pool.moto.weather(Weather::Keeping);
    let process = pool.yard.process(&pool.name);
    let (code, said) = pool.yard.refused(&["pool", "destroy", "%"]);
    let is_told = said.contains("is destroyed, but objects of it are still in the bucket: 's3://pools/one/tank'");
    assert!(code == 4 && is_told && said.contains("(403 AccessDenied)"), "{code}: {said}");
    assert!(said.contains(&format!("`nacre pool destroy {}` removes them", pool.name)), "{said}");
    // Its process is gone, and no message recommends an import.
    eventually("the end of its process", || !std::path::Path::new(&format!("/proc/{process}")).exists());
    let (code, said) = pool.yard.refused(&["pool", "status", "%"]);
    assert!(code == 3 && said.contains("no such pool"), "{code}: {said}");
    let (code, said) = pool.yard.refused(&["pool", "import", "%"]);
    assert!(code == 3 && said.contains("it is destroyed, but objects of it are still in"), "{code}: {said}");
    let (code, _) = pool.yard.refused(&["pool", "destroy", "%"]);
    assert_eq!(code, 4);
    pool.moto.weather(Weather::Fair);
    let address = format!(
        "{}?endpoint={}&profile=test&credentials-file={}/keys",
        pool.address,
        pool.moto.endpoint,
        pool.yard.place.path().display()
    );
    let (_, said) = pool.yard.refused(&["pool", "import", &address]);
    assert!(said.contains("`nacre pool destroy 's3://pools/one/tank?"), "{said}");
    pool.yard.nacre(&["pool", "destroy", "%"]);
    assert_eq!(pool.moto.keys("one/"), Vec::<String>::new());
    let (code, said) = pool.yard.refused(&["pool", "destroy", &address]);
    assert!(code == 3 && said.contains("there is no pool"), "{code}: {said}");
    // What is in use is none.
    pool.create(&[]);
    let (_, said) = pool.yard.refused(&["pool", "destroy", &address]);
    assert!(said.contains(&format!("it holds pool '{}'", pool.name)), "{said}");
}

#[test]
fn a_scrub_that_is_waited_for_says_what_it_has_found() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("sc"), yard.path("at"));
    fs::create_dir(yard.path("bucket")).unwrap();
    let address = format!("file://{}", yard.path("bucket").display());
    yard.nacre(&["pool", "create", "-m", at.to_str().unwrap(), &name, &address]);
    sh(yard.place.path(), "head -c 20000000 /dev/urandom > at/file; sync at/file");
    yard.nacre(&["pool", "sync", "%"]);
    yard.nacre(&["pool", "scrub", "-w", "%"]);
    // The largest objects are of the file's content alone.
    sh(yard.place.path(), "rm $(ls -S bucket/seg/*/* | head -n 1)");
    let (code, said) = yard.refused(&["pool", "scrub", "-w", "%"]);
    assert!(code == 1 && said.contains("the scrub of") && said.contains("has found"), "{code}: {said}");
    assert!(yard.nacre(&["pool", "status", "-v", "%"]).contains(at.join("file").to_str().unwrap()));
    // ZFS' program has the codes of ZFS.
    let zpool = crate::mounting::finish(yard.command("zpool").args(["scrub", "-w", &name]));
    assert_eq!(zpool.status.code(), Some(0));
    yard.nacre(&["pool", "destroy", "-f", "%"]);
}

#[test]
fn an_import_without_a_mount_is_no_success() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, _, at) = yard.create("im", &[]);
    yard.nacre(&["pool", "export", "%"]);
    // The directory may be gone with the mount.
    let _ = fs::remove_dir(&at);
    fs::write(&at, "").unwrap();
    let place = yard.place.path().to_str().unwrap();
    let (code, said) = yard.refused(&["pool", "import", "-d", place, &name]);
    let told = format!("'{name}' is imported, but 1 of its file systems could not be mounted");
    assert!(code == 1 && said.contains(&told) && said.contains(&format!("cannot mount '{name}'")), "{code}: {said}");
    assert!(yard.nacre(&["pool", "list", "-H", "-o", "name", "%"]).starts_with(&name));
    yard.nacre(&["pool", "export", "%"]);
    yard.nacre(&["pool", "import", "-N", "-d", place, &name]);
}
