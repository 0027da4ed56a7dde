//! Unions on real mounts: copy-up and whiteouts, branches that are added and removed under load,
//! crashes, the commands, and refusals.

use crate::mounting::status::{Status, least_requests_of, requests_of};
use crate::mounting::unions::{branches, list, names, over, told, union};
use crate::mounting::{
    Fixture, as_root, errno, eventually, is_mounted, mount_entry, nacre, needs, run, sh, sh_as, text, unmount_by,
};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const EPERM: i32 = 1;
const EROFS: i32 = 30;

fn filled(lower: &Path) {
    fs::create_dir(lower.join("dir")).unwrap();
    fs::write(lower.join("dir/inner"), "inner").unwrap();
    fs::write(lower.join("file"), "content").unwrap();
    fs::write(lower.join("large"), vec![b'x'; 4 << 20]).unwrap();
}

#[test]
fn changes_go_up_and_the_lower_branch_stays() {
    needs!(as_root());
    for options in
        [&[][..], &["-o", "whiteout=chardev"], &["-o", "whiteout=xattr"], &["-o", "udba=none"], &["-o", "udba=reval"]]
    {
        let (mut fixture, upper) = over(options, filled);
        let before = (names(&fixture.source), fs::metadata(fixture.below("file")).unwrap().ino());
        // A descriptor from before the copy sees it.
        let mut early = File::open(fixture.at("file")).unwrap();
        let number = fs::metadata(fixture.at("file")).unwrap().ino();
        OpenOptions::new().append(true).open(fixture.at("file")).unwrap().write_all(b", more").unwrap();
        let mut seen = String::new();
        early.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "content, more", "{options:?}");
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().ino(), number, "the number stays");
        fs::remove_file(fixture.at("dir/inner")).unwrap();
        fs::remove_dir(fixture.at("dir")).unwrap();
        fs::create_dir(fixture.at("dir")).unwrap();
        assert_eq!(fs::read_dir(fixture.at("dir")).unwrap().count(), 0, "{options:?}: a new directory is empty");
        let (kind, source, ..) = mount_entry(&fixture.mountpoint).unwrap();
        assert_eq!(
            (kind.as_str(), source),
            ("fuse.nacre", format!("union:{}=rw:{}=ro", upper.display(), fixture.source.display()))
        );
        drop(early);
        fixture.unmount();
        assert_eq!((names(&fixture.source), fs::metadata(fixture.below("file")).unwrap().ino()), before);
        assert_eq!(fs::read(fixture.below("file")).unwrap(), b"content");
        assert_eq!(fs::read(upper.join("file")).unwrap(), b"content, more");
        // Mounted again, it looks the same.
        let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
        fixture.start(&["union"], &list, &mountpoint);
        assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content, more");
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().ino(), number, "{options:?}: the number lasts");
        assert_eq!(fs::read_dir(fixture.at("dir")).unwrap().count(), 0, "{options:?}");
        assert_eq!(told(["check", mountpoint.to_str().unwrap()]), "");
    }
}

#[test]
fn data_in_its_place_never_reaches_the_daemon() {
    needs!(as_root());
    let (fixture, upper) = over(&[], filled);
    if !Status::of(&fixture.mountpoint).passthrough() {
        crate::mounting::skip("passthrough", "this kernel has no passthrough");
        return;
    }
    // The first write copies the file; from the next open on, the kernel does the rest.
    OpenOptions::new().append(true).open(fixture.at("large")).unwrap().write_all(b"y").unwrap();
    fs::write(fixture.at("new"), vec![b'n'; 1 << 20]).unwrap();
    let work = || {
        for name in ["large", "new"] {
            let file = OpenOptions::new().read(true).write(true).open(fixture.at(name)).unwrap();
            let mut block = [0; 4096];
            for number in 0..64 {
                file.read_exact_at(&mut block, number * 4096).unwrap();
                file.write_all_at(&block, number * 4096).unwrap();
            }
            file.sync_all().unwrap();
        }
    };
    let requests = requests_of(&fixture.mountpoint, work);
    assert_eq!((requests.get("read"), requests.get("write")), (None, None), "{requests:?}");
    assert_eq!(fs::metadata(upper.join("large")).unwrap().len(), (4 << 20) + 1);
    // A union without a writable branch has nothing to copy: all of it is in its place.
    let mountpoint = fixture.directory("second");
    let mut second = fixture;
    let list = branches(&[(&upper, "ro+wh"), (&second.source, "ro")]);
    second.unmount();
    second.start(&["union"], &list, &mountpoint);
    let requests = requests_of(&mountpoint, || assert_eq!(fs::read(mountpoint.join("new")).unwrap().len(), 1 << 20));
    assert_eq!(requests.get("read"), None, "{requests:?}");
    assert_eq!(errno(fs::write(mountpoint.join("no"), "")), EROFS);
}

#[test]
fn a_second_look_costs_nothing() {
    needs!(as_root());
    for coherence in ["none", "notify"] {
        let (fixture, _) = over(&["-o", &format!("udba={coherence}")], filled);
        let look = || {
            for name in ["file", "large", "dir/inner"] {
                rustix::fs::stat(fixture.at(name)).unwrap();
            }
            assert!(rustix::fs::stat(fixture.at("missing")).is_err());
            sh(&fixture.mountpoint, "ls -l . dir > /dev/null");
        };
        look();
        let again = least_requests_of(&fixture.mountpoint, look);
        // Reading a directory moves its access time, and ls asks it for its two ACLs: at most three
        // requests for each of the two.
        assert!(again.keys().all(|kind| kind == "getattr" || kind == "getxattr"), "{coherence}: {again:?}");
        assert!(again.values().sum::<u64>() <= 6, "{coherence}: {again:?}");
    }
}

#[test]
fn changes_made_on_a_branch_are_seen() {
    needs!(as_root());
    for udba in ["reval", "notify"] {
        let (fixture, upper) = over(&["-o", &format!("udba={udba}")], filled);
        for (branch, name) in [(&fixture.source, "below"), (&upper, "above")] {
            assert!(!fixture.at(name).exists());
            fs::write(branch.join(name), "1").unwrap();
            eventually("the new file is seen", || fixture.at(name).exists());
            fs::write(branch.join(name), "22").unwrap();
            eventually("the new size is seen", || fs::metadata(fixture.at(name)).unwrap().len() == 2);
            fs::remove_file(branch.join(name)).unwrap();
            eventually("the end is seen", || !fixture.at(name).exists());
        }
        fs::write(upper.join(".wh.file"), "").unwrap();
        eventually("the whiteout is seen", || !fixture.at("file").exists());
    }
}

#[test]
fn names_of_whiteouts_and_the_longest_names() {
    needs!(as_root());
    let (fixture, upper) = over(&[], |lower| fs::write(lower.join("l".repeat(255)), "long").unwrap());
    for name in [".wh.x", ".wh..wh..opq", ".wh..wh.work"] {
        assert_eq!(errno(fs::write(fixture.at(name), "")), EPERM, "{name}");
        assert_eq!(errno(fs::create_dir(fixture.at(name))), EPERM, "{name}");
        assert_eq!(errno(symlink("x", fixture.at(name))), EPERM, "{name}");
    }
    fs::write(fixture.at("plain"), "").unwrap();
    assert_eq!(errno(fs::rename(fixture.at("plain"), fixture.at(".wh.y"))), EPERM);
    let long = fixture.at("l".repeat(255));
    assert_eq!(fs::read(&long).unwrap(), b"long");
    fs::remove_file(&long).unwrap();
    assert!(!long.exists());
    fs::write(&long, "again").unwrap();
    assert_eq!(fs::read(&long).unwrap(), b"again");
    assert_eq!(fs::read_dir(&fixture.mountpoint).unwrap().count(), 2);
    assert!(fs::read_dir(&upper).unwrap().count() >= 3, "the union's own names are on the branch");
}

#[test]
fn others_have_the_rights_that_they_have_below() {
    needs!(as_root());
    let (fixture, upper) = over(&[], |lower| {
        sh(
            lower,
            "echo s > secret; chmod 600 secret; echo s > shared; chmod 666 shared; mkdir dir; echo f > dir/f
             mkdir -m 1777 open; echo r > open/roots; mkdir -m 700 closed; echo c > closed/c
             echo o > own; chown 65534:65534 own; chmod 640 own",
        );
    });
    let user = |script: &str| sh_as(&fixture.mountpoint, 65_534, 65_534, "", script);
    for script in [
        "cat secret",
        "echo x >> secret",
        "echo x >> dir/f",
        "rm -f dir/f",
        "mv dir/f dir/g",
        "touch dir/new",
        "rm -f open/roots",
        "ls closed",
        "cat closed/c",
        "chmod 666 secret",
        "chown 65534 shared",
        "ln -s x .wh.secret",
        "ls .wh..wh.work",
        "touch .wh..wh.work/x",
        "mknod device b 8 0",
        "setfattr -n trusted.overlay.opaque -v y open",
    ] {
        let (code, said) = user(script);
        assert_ne!(code, 0, "{script}: {said}");
    }
    assert_eq!(names(&upper), Vec::<String>::new(), "what was refused has copied nothing");
    for script in [
        "echo x >> shared",
        "echo n > open/new",
        "echo x >> own; chmod 600 own",
        "mkdir open/d; mv open/new open/d/",
        "ln own open/own",
    ] {
        let (code, said) = user(script);
        assert_eq!(code, 0, "{script}: {said}");
    }
    let of = |name: &str| {
        let data = fs::metadata(upper.join(name)).unwrap();
        (data.uid(), data.gid(), data.mode() & 0o7777)
    };
    assert_eq!(of("shared"), (0, 0, 0o666));
    assert_eq!(of("own"), (65_534, 65_534, 0o600));
    assert_eq!(of("open"), (0, 0, 0o1777));
    assert_eq!((of("open/d").0, of("open/d/new").0), (65_534, 65_534));
    assert_eq!(of(".wh..wh.work").2, 0o700);
}

#[test]
fn a_pool_is_filled_by_its_policy() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    let pattern = format!("{}/[ot][nw][eo]", fixture.scratch.path().display());
    let (list, mountpoint) = (pattern, fixture.mountpoint.clone());
    // mergerfs' word: all branches are writable.
    fixture.start(&["union", "-o", "category.create=ff,route=*.iso=rr"], list.as_ref(), &mountpoint);
    fs::write(fixture.at("plain"), "").unwrap();
    fs::write(fixture.at("a.iso"), "").unwrap();
    fs::write(fixture.at("b.iso"), "").unwrap();
    assert_eq!(
        crate::mounting::unions::list(&mountpoint),
        [(one.clone(), "rw".to_owned()), (two.clone(), "rw".to_owned())]
    );
    assert!(one.join("plain").exists());
    assert_ne!(one.join("a.iso").exists(), one.join("b.iso").exists(), "in turn");
    let explained = told(["explain", fixture.at("new").to_str().unwrap()]);
    assert!(explained.starts_with(&format!("create=ff: {}: ", one.display())), "{explained}");
    let explained = told(["explain", fixture.at("c.iso").to_str().unwrap()]);
    assert!(explained.starts_with("route=*.iso: "), "{explained}");
    let (output, place) = (told(["where", fixture.at("plain").to_str().unwrap()]), one.join("plain"));
    assert_eq!(output.trim_end(), place.to_str().unwrap());
    assert_eq!(union(["where", fixture.at("missing").to_str().unwrap()]).status.code(), Some(3));
    assert_eq!(union(["where", "/proc/self"]).status.code(), Some(3));
}

/// Writes to files of its own and checks their content until `stop` is set; returns the number of
/// rounds.
fn busy(place: &Path, stop: &AtomicBool) -> u64 {
    let open = |name: &str| {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(place.join(name)).unwrap()
    };
    let kept = open("kept");
    let mut rounds = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let data = rounds.to_le_bytes().repeat(512);
        kept.write_all_at(&data, rounds % 64 * 4096).unwrap();
        let mut read = vec![0; data.len()];
        kept.read_exact_at(&mut read, rounds % 64 * 4096).unwrap();
        assert_eq!(read, data);
        let name = format!("file{}", rounds % 16);
        open(&name).write_all_at(&data, 0).unwrap();
        assert_eq!(fs::read(place.join(&name)).unwrap(), data);
        rounds += 1;
    }
    rounds
}

#[test]
fn branches_come_and_go_under_load() {
    needs!(as_root());
    let (fixture, _) = over(&[], filled);
    let extra = fixture.directory("extra");
    fs::write(extra.join("treasure"), "gold").unwrap();
    fs::write(extra.join("file"), "hidden").unwrap();
    for writer in 0..3 {
        fs::create_dir(fixture.at(format!("w{writer}"))).unwrap();
    }
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let at = |place: &Path| place.to_str().unwrap().to_owned();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let (place, stop) = (fixture.at(format!("w{writer}")), &stop);
                scope.spawn(move || busy(&place, stop))
            })
            .collect();
        for round in 0..6 {
            told(["add", mountpoint, &at(&extra)]);
            assert_eq!(list(&fixture.mountpoint).len(), 3);
            assert_eq!(fs::read(fixture.at("treasure")).unwrap(), b"gold", "round {round}");
            assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content", "round {round}: the branches above hide it");
            let held = (round % 2 == 0).then(|| File::open(fixture.at("treasure")).unwrap());
            if let Some(mut held) = held {
                // An open file of the branch keeps it.
                let refused = union(["del", mountpoint, &at(&extra)]);
                assert_eq!(refused.status.code(), Some(5), "{}", text(&refused.stderr));
                told(["del", "--force", mountpoint, &at(&extra)]);
                let mut content = String::new();
                held.read_to_string(&mut content).unwrap();
                assert_eq!(content, "gold");
            } else {
                // A branch that takes files is not taken away with what it alone shows.
                told(["mod", mountpoint, &format!("{}=rw", extra.display())]);
                let refused = union(["del", mountpoint, &at(&extra)]);
                assert_eq!(refused.status.code(), Some(5), "{}", text(&refused.stderr));
                assert!(text(&refused.stderr).contains("alone (treasure)"), "{}", text(&refused.stderr));
                if round % 4 == 1 {
                    told(["del", "-f", mountpoint, &at(&extra)]);
                } else {
                    told(["mod", mountpoint, &format!("{}=ro", extra.display())]);
                    told(["del", mountpoint, &at(&extra)]);
                }
            }
            assert!(!fixture.at("treasure").exists(), "round {round}");
        }
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            assert!(writer.join().unwrap() > 0);
        }
    });
    assert_eq!(told(["check", mountpoint]), "");
    assert_eq!(fs::read(extra.join("file")).unwrap(), b"hidden");
}

/// Whether fio is there.
fn has_fio() -> bool {
    Command::new("fio").arg("--version").output().is_ok_and(|output| output.status.success())
        || crate::mounting::skip("fio", "fio is not installed")
}

#[test]
fn a_branch_is_drained_under_load() {
    needs!(as_root() && has_fio());
    let mut fixture = Fixture::bare();
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    for number in 0..40 {
        fs::create_dir_all(one.join(format!("dir{}", number % 5))).unwrap();
        fs::write(one.join(format!("dir{}/file{number}", number % 5)), vec![number; 100_000]).unwrap();
    }
    fs::hard_link(one.join("dir0/file0"), one.join("dir0/again")).unwrap();
    fs::hard_link(one.join("dir0/file0"), fixture.scratch.path().join("outside")).unwrap();
    let (list, mountpoint) = (branches(&[(&one, "rw"), (&two, "rw")]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", "create=ff"], &list, &mountpoint);
    let number = fs::metadata(fixture.at("dir1/file1")).unwrap().ino();
    let before = names(&mountpoint);
    let mut held = File::open(fixture.at("dir2/file2")).unwrap();
    let mount = mountpoint.to_str().unwrap();
    let load = format!(
        "fio --name=load --directory={mount} --size=2m --nrfiles=4 --rw=randrw --bs=4k --verify=crc32c --verify_fatal=1 --loops=6 --output=/dev/null"
    );
    let mut load = Command::new("sh")
        .arg("-c")
        .arg(load)
        .current_dir(fixture.scratch.path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the load has begun", || fs::read_dir(&mountpoint).unwrap().count() > 5);
    // What the load has open for writing stays for now.
    let first = union(["drain", mount, one.to_str().unwrap()]);
    assert!(matches!(first.status.code(), Some(0 | 5)), "{}", text(&first.stderr));
    assert!(crate::mounting::unions::list(&mountpoint).iter().any(|(branch, _)| branch == &one));
    assert!(load.wait().unwrap().success(), "what was written is what is read");
    let mut read = Vec::new();
    held.read_to_end(&mut read).unwrap();
    assert_eq!(read, vec![2; 100_000]);
    drop(held);
    // Names of one file move together; where one of them cannot be seen, it stays, and so does the
    // branch.
    let links = union(["drain", mount, one.to_str().unwrap()]);
    assert_eq!(links.status.code(), Some(5));
    assert!(text(&links.stderr).contains("stays: 1 of its 3 names cannot be seen"), "{}", text(&links.stderr));
    let kept = union(["del", mount, one.to_str().unwrap()]);
    assert_eq!(kept.status.code(), Some(5));
    let told_why = text(&kept.stderr);
    assert!(
        told_why.contains("are shown from") && told_why.contains("alone (dir0") && told_why.contains("--force"),
        "{told_why}"
    );
    fs::remove_file(fixture.scratch.path().join("outside")).unwrap();
    told(["drain", mount, one.to_str().unwrap()]);
    let [file, again] = ["dir0/file0", "dir0/again"].map(|name| fs::metadata(fixture.at(name)).unwrap());
    assert_eq!((file.ino(), file.nlink(), again.nlink()), (again.ino(), 2, 2), "one file still");
    assert_eq!(fs::metadata(two.join("dir0/again")).unwrap().nlink(), 2);
    assert_eq!(names(&one).iter().filter(|name| one.join(name).is_file()).count(), 0, "{:?}", names(&one));
    told(["del", mount, one.to_str().unwrap()]);
    let mut after = names(&mountpoint);
    after.retain(|name| !name.starts_with("load"));
    assert_eq!(after, before);
    for number in 0..40_u8 {
        assert_eq!(fs::read(fixture.at(format!("dir{}/file{number}", number % 5))).unwrap(), vec![number; 100_000]);
    }
    assert_eq!(fs::metadata(fixture.at("dir1/file1")).unwrap().ino(), number, "the number stays");
    assert_eq!(told(["check", mount]), "");
}

#[test]
fn files_move_between_tiers() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (fast, slow) = (fixture.directory("fast"), fixture.directory("slow"));
    // Nothing is moved to a tier that is nearly full, as this machine's disk may be.
    for tier in [&fast, &slow] {
        assert!(run("mount", ["-t", "tmpfs", "tmpfs", tier.to_str().unwrap()]).status.success());
    }
    let (list, mountpoint) = (branches(&[(&fast, "rw+tier"), (&slow, "rw+tier")]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", "create=ff,tier.cold=*.iso,tier.scan=1h"], &list, &mountpoint);
    let mount = mountpoint.to_str().unwrap();
    for name in ["a.iso", "b", "c.iso"] {
        fs::write(fixture.at(name), name).unwrap();
    }
    let open = OpenOptions::new().append(true).open(fixture.at("c.iso")).unwrap();
    let planned = told(["tier", "--dry-run", mount]);
    assert!(planned.contains("a.iso: ") && planned.contains("c.iso: ") && !planned.contains("b: "), "{planned}");
    assert!(fast.join("a.iso").exists());
    told(["tier", "--run", mount]);
    assert!(slow.join("a.iso").exists() && !fast.join("a.iso").exists());
    assert!(fast.join("b").exists() && fast.join("c.iso").exists(), "what is written stays");
    (&open).write_all(b", more").unwrap();
    drop(open);
    assert_eq!(fs::read(fixture.at("c.iso")).unwrap(), b"c.iso, more");
    // By hand, and by rules given later.
    told(["mvup", fixture.at("a.iso").to_str().unwrap()]);
    assert!(fast.join("a.iso").exists() && !slow.join("a.iso").exists());
    told(["mvdown", fixture.at("b").to_str().unwrap()]);
    assert_eq!(told(["where", fixture.at("b").to_str().unwrap()]).trim_end(), slow.join("b").to_str().unwrap());
    told(["tier", mount, "hot=b,high=95,low=90"]);
    assert!(told(["tier", mount]).contains("hot=b"));
    told(["tier", "--run", mount]);
    assert!(fast.join("b").exists() && fast.join("a.iso").exists());
    for (words, exit, says) in [
        (vec!["tier", mount, "high=10,low=20"], 2, "low=20 must be below high=10"),
        (vec!["tier", mount, "colour=red"], 2, "is no word for tiers"),
        (vec!["mvup", fixture.at("missing").to_str().unwrap()], 3, "cannot look for /missing"),
        (vec!["mvup", fixture.at("b").to_str().unwrap()], 1, "stays where it is"),
    ] {
        let output = union(&words);
        assert_eq!(output.status.code(), Some(exit), "{words:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(says), "{words:?}: {}", text(&output.stderr));
    }
    fixture.unmount();
    let plain = branches(&[(&fast, "rw"), (&slow, "ro")]);
    fixture.start(&["union"], &plain, &mountpoint);
    let output = union(["tier", "--run", mount]);
    assert!(text(&output.stderr).contains("has no tiers"), "{}", text(&output.stderr));
    assert_eq!(fs::read(fixture.at("a.iso")).unwrap(), b"a.iso");
}

#[test]
fn positions_and_refusals_of_changes() {
    needs!(as_root());
    let (fixture, upper) = over(&[], filled);
    let (top, middle) = (fixture.directory("top"), fixture.directory("middle"));
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let path = |place: &Path| place.to_str().unwrap().to_owned();
    told(["add", "--top", mountpoint, &format!("{}=rw", top.display())]);
    told(["add", "--position", "2", mountpoint, &format!("{}=ro+wh", middle.display())]);
    let expected = [(&top, "rw"), (&middle, "ro+wh"), (&upper, "rw"), (&fixture.source, "ro")];
    assert_eq!(list(&fixture.mountpoint), expected.map(|(path, mode)| (path.clone(), mode.to_owned())));
    fs::write(fixture.at("new"), "").unwrap();
    assert!(top.join("new").exists());
    for (words, exit, says) in [
        (vec!["add", mountpoint, "/no/such/branch"], 3, "cannot use the branch /no/such/branch"),
        (vec!["add", mountpoint, &path(&top)], 1, "given twice"),
        (vec!["add", mountpoint, mountpoint], 1, "is the union itself"),
        (vec!["add", mountpoint, "/tmp=bogus"], 2, "\"bogus\" is no branch attribute"),
        (vec!["mod", mountpoint, &path(&top)], 2, "no attributes"),
        (vec!["mod", mountpoint, "/no/such/branch=rw"], 3, "is no branch of this union"),
        (vec!["del", mountpoint, "/no/such/branch"], 3, "there are: "),
        (vec!["del", "/", &path(&top)], 3, "no mount of nacre answers"),
        (vec!["list", "/"], 3, "no mount of nacre answers"),
    ] {
        let output = union(&words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(exit), "{words:?}: {said}");
        assert!(said.contains(says), "{words:?}: {said}");
    }
    assert_eq!(list(&fixture.mountpoint).len(), 4);
    // What the mount says about itself follows.
    assert!(Status::of(&fixture.mountpoint).text("stack").contains(&format!("branch={}=ro+wh", middle.display())));
    let missed = union(["del", mountpoint, &path(&top)]);
    assert_eq!(missed.status.code(), Some(5));
    assert!(
        text(&missed.stderr).contains("1 file or directory is shown from")
            && text(&missed.stderr).contains("alone (new)")
    );
    fs::remove_file(fixture.at("new")).unwrap();
    for branch in [&top, &middle, &upper] {
        told(["del", mountpoint, &path(branch)]);
    }
    let last = union(["del", mountpoint, &path(&fixture.source)]);
    assert!(text(&last.stderr).contains("the last branch cannot be removed"), "{}", text(&last.stderr));
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
}

#[test]
fn what_cannot_stand_is_refused_and_nothing_is_mounted() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let (a, b) = (fixture.directory("a"), fixture.directory("b"));
    fs::create_dir(a.join("sub")).unwrap();
    fs::create_dir(fixture.at("inside")).unwrap();
    fs::write(fixture.scratch.path().join("f"), "").unwrap();
    let (a, b, m) = (a.to_str().unwrap(), b.to_str().unwrap(), fixture.mountpoint.to_str().unwrap());
    let file = fixture.scratch.path().join("f");
    for (words, exit, says) in [
        (vec![format!("{a}:{a}"), m.to_owned()], 1, "is given twice"),
        (vec![format!("{a}:{a}/sub"), m.to_owned()], 1, "lies inside the branch"),
        (vec![format!("{a}/sub=rw:{a}=ro"), m.to_owned()], 1, "lies inside the branch"),
        (vec![format!("{a}:{m}/inside"), m.to_owned()], 1, "lies inside the mount point"),
        (vec![format!("{a}:{b}"), format!("{a}/sub")], 1, "the union would contain itself"),
        (vec![format!("{a}:{a}x"), m.to_owned()], 3, "make it first"),
        (vec![format!("{a}:{}", file.display()), m.to_owned()], 1, "is not a directory"),
        (vec![format!("{a}=bogus:{b}"), m.to_owned()], 2, "is no branch attribute"),
        (vec![format!("{a}:{b}"), m.to_owned(), "-o".into(), "create=best".into()], 2, "there is no such policy"),
        (vec![format!("{a}:{b}"), m.to_owned(), "-o".into(), "nosuchword".into()], 2, "unknown option -o nosuchword"),
        (vec![format!("{a}:{b}"), m.to_owned(), "-o".into(), "wsum".into()], 2, "write sum"),
        (vec![format!("{a}:{b}"), m.to_owned(), "-o".into(), format!("br:{a}")], 2, "named twice"),
        (vec![format!("{a}:{b}"), m.to_owned(), "-o".into(), "force-user=root".into()], 2, "is not for unions"),
        (vec![format!("{a}:{b}")], 2, "BRANCHES and MOUNTPOINT are needed"),
        (vec![format!("{a}:{b}"), format!("{m}/no")], 3, "cannot use the mount point"),
    ] {
        let output = union(&words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(exit), "{words:?}: {said}");
        assert!(said.contains(says), "{words:?}: {said}");
        assert!(!is_mounted(&fixture.mountpoint));
    }
    assert_eq!(names(Path::new(a)), ["sub"], "nothing is left on a branch");
    // A union of read-only branches is valid; --explain reports that no branch takes new files.
    let said = text(&union([&format!("{a}=ro:{b}=ro"), m, "-o", "create=mfs", "--explain"]).stderr);
    assert!(said.contains("nothing can be created in this union"), "{said}");
    // --explain reports that owners and modes are hidden.
    fs::set_permissions(b, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for (word, says) in [("warn_perm", true), ("nowarn_perm", false)] {
        let said = text(&union([&format!("{a}:{b}"), m, "-o", word]).stderr);
        assert_eq!(said.contains("its top directory is 0:0 0700"), says, "{said}");
        unmount_by("umount", &[fixture.mountpoint.as_ref()]);
    }
}

#[test]
fn a_branch_has_one_writer() {
    needs!(as_root());
    let (mut fixture, upper) = over(&[], filled);
    let (other, second) = (fixture.directory("other"), fixture.directory("second"));
    let shared = branches(&[(&upper, "rw"), (&other, "ro")]);
    let refused = union([shared.as_os_str(), second.as_os_str()]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("is written by another union"), "{}", text(&refused.stderr));
    assert!(!is_mounted(&second));
    // umount(8) does not wait for the process that served the mount; the next mount at once does.
    let (list, third) = (branches(&[(&other, "rw"), (&fixture.source, "ro")]), fixture.directory("third"));
    for round in 0..10 {
        assert!(union([list.as_os_str(), third.as_os_str()]).status.success(), "{round}");
        unmount_by("umount", &[third.as_ref()]);
    }
    // Reading a branch that another union writes to is allowed, and a kill leaves nothing that
    // prevents a mount.
    let read = branches(&[(&other, "rw"), (&upper, "ro+wh")]);
    fixture.start(&["union"], &read, &second);
    fs::write(fixture.at("seen"), "by both").unwrap();
    eventually("the other union sees it", || second.join("seen").exists());
    fixture.signal(Signal::KILL);
    fixture.ended();
    fixture.start(&["union"], &read, &second);
    assert_eq!(fs::read(second.join("seen")).unwrap(), b"by both");
}

#[test]
fn killed_in_the_middle_of_a_copy() {
    needs!(as_root());
    const SIZE: usize = 8 << 20;
    let mut fixture = Fixture::bare();
    let content: Vec<u8> = (0..SIZE / 8).flat_map(|number| number.to_le_bytes()).collect();
    for number in 0..4 {
        fs::write(fixture.below(format!("file{number}")), &content).unwrap();
    }
    let upper = fixture.directory("upper");
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    // Once without a kill, to know how long it takes.
    fixture.start(&["union"], &list, &mountpoint);
    let start = Instant::now();
    OpenOptions::new().append(true).open(fixture.at("file0")).unwrap().write_all(b"!").unwrap();
    let whole = start.elapsed();
    fixture.unmount();
    for round in 0..8_u32 {
        for number in 0..4 {
            let _ = fs::remove_file(upper.join(format!("file{number}")));
        }
        fixture.start(&["union"], &list, &mountpoint);
        let mut writers: Vec<_> = (0..4)
            .map(|number| {
                let script = format!("printf '!' >> file{number}");
                Command::new("sh").arg("-c").arg(script).current_dir(&mountpoint).stderr(Stdio::null()).spawn().unwrap()
            })
            .collect();
        std::thread::sleep(whole * round / 4);
        fixture.signal(Signal::KILL);
        fixture.ended();
        for writer in &mut writers {
            writer.wait().unwrap();
        }
        crate::mounting::clear(&mountpoint);
        // Before anything is cleared away, each name is what it was or what it should become.
        for number in 0..4 {
            let name = format!("file{number}");
            assert_eq!(fs::read(fixture.below(&name)).unwrap(), content, "{round}: {name} below is as it was");
            if let Ok(copy) = fs::read(upper.join(&name)) {
                assert!(copy.len() == SIZE || copy.len() == SIZE + 1, "{round}: {name}: {}", copy.len());
                assert!(copy[..SIZE] == content[..], "{round}: {name} is whole");
            }
        }
        assert_eq!(told(["check".as_ref(), list.as_os_str()]), "", "{round}");
        assert_eq!(
            names(&upper).iter().filter(|name| !name.starts_with("file")).count(),
            0,
            "{round}: nothing is left"
        );
    }
}

/// Files of three names each go from one branch to the other and back, and the process is killed
/// meanwhile: they are one file each at every moment.
#[test]
fn killed_in_the_middle_of_moving_hard_links() {
    needs!(as_root());
    const FILES: usize = 40;
    let mut fixture = Fixture::bare();
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    let content = |number: usize| vec![u8::try_from(number).unwrap(); 5_000];
    let names_of = |number: usize| [format!("a/file{number}"), format!("b/file{number}"), format!("again{number}")];
    for directory in ["a", "b"] {
        fs::create_dir(one.join(directory)).unwrap();
    }
    for number in 0..FILES {
        let [first, second, third] = names_of(number).map(|name| one.join(name));
        fs::write(&first, content(number)).unwrap();
        fs::hard_link(&first, second).unwrap();
        fs::hard_link(&first, third).unwrap();
    }
    let (list, mountpoint) = (branches(&[(&one, "rw"), (&two, "rw")]), fixture.mountpoint.clone());
    let mount = mountpoint.to_str().unwrap().to_owned();
    let mut numbers: Vec<u64> = Vec::new();
    let mut went = 0;
    for round in 0..8_u64 {
        fixture.start(&["union"], &list, &mountpoint);
        for number in 0..FILES {
            let seen = names_of(number).map(|name| fs::metadata(fixture.at(name)).unwrap());
            assert!(
                seen.iter().all(|one| one.nlink() == 3 && one.ino() == seen[0].ino()),
                "{round}: {number}: {seen:?}"
            );
            match numbers.get(number) {
                Some(known) => assert_eq!(seen[0].ino(), *known, "{round}: {number}"),
                None => numbers.push(seen[0].ino()),
            }
            for name in names_of(number) {
                assert_eq!(fs::read(fixture.at(&name)).unwrap(), content(number), "{round}: {name}");
            }
        }
        let from = if round % 2 == 0 { &one } else { &two };
        let left = || (0..FILES).filter(|number| from.join(format!("again{number}")).exists()).count();
        let start = left();
        let mut drain = Command::new(crate::mounting::nacre())
            .args(["union", "drain", &mount, from.to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Each time a little later, however fast the machine is.
        let wanted = start.saturating_sub(5 * usize::try_from(round).unwrap());
        eventually("some have moved", || left() <= wanted || drain.try_wait().unwrap().is_some());
        fixture.signal(Signal::KILL);
        fixture.ended();
        drain.wait().unwrap();
        crate::mounting::clear(&mountpoint);
        went += start - left();
    }
    assert!(went > 0, "nothing has ever moved");
    fixture.start(&["union"], &list, &mountpoint);
    told(["drain", &mount, one.to_str().unwrap()]);
    told(["del", &mount, one.to_str().unwrap()]);
    // A change by one name is seen by all.
    OpenOptions::new().append(true).open(fixture.at("a/file7")).unwrap().write_all(b"!").unwrap();
    assert!(names_of(7).iter().all(|name| fs::read(fixture.at(name)).unwrap() == [content(7), b"!".to_vec()].concat()));
    assert_eq!(told(["check", &mount]), "");
    assert_eq!(fs::read_dir(two.join(".wh..wh.links")).unwrap().count(), 0, "nothing is left in the index");
}

#[test]
fn killed_in_the_middle_of_renames_and_removals() {
    needs!(as_root());
    const FILES: usize = 30;
    let mut fixture = Fixture::bare();
    let fill = |place: &Path| {
        fs::create_dir(place).unwrap();
        for number in 0..FILES {
            fs::write(place.join(format!("file{number}")), number.to_string()).unwrap();
        }
    };
    fill(&fixture.below("moving"));
    fill(&fixture.below("going"));
    let upper = fixture.directory("upper");
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    let whole = |place: &Path| {
        (0..FILES).all(|number| {
            fs::read(place.join(format!("file{number}"))).is_ok_and(|content| content == number.to_string().as_bytes())
        })
    };
    for round in 0..10_u64 {
        fixture.start(&["union"], &list, &mountpoint);
        let script = "while :; do mv moving moved && mv moved moving; mkdir made; touch made/x; rm -r going made; mkdir going; \
                      ln moving/file0 linked; mv linked linked2; rm linked2; done";
        let mut load = Command::new("sh")
            .args(["-c", script])
            .current_dir(&mountpoint)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20 + 17 * round));
        fixture.signal(Signal::KILL);
        fixture.ended();
        load.kill().unwrap();
        load.wait().unwrap();
        crate::mounting::clear(&mountpoint);
        assert!(
            whole(&fixture.below("moving")) && whole(&fixture.below("going")),
            "{round}: the lower branch is as it was"
        );
        let found = union(["check".as_ref(), "--repair".as_ref(), list.as_os_str()]);
        assert!(found.status.success(), "{round}: {}", text(&found.stderr));
        assert_eq!(told(["check".as_ref(), list.as_os_str()]), "", "{round}");
        // The directory is under one of its names, whole; what was removed is removed or as it was.
        fixture.start(&["union"], &list, &mountpoint);
        let places: Vec<_> = ["moving", "moved"].into_iter().filter(|name| fixture.at(name).exists()).collect();
        assert!(!places.is_empty(), "{round}: {:?}", names(&mountpoint));
        for place in &places {
            assert!(whole(&fixture.at(place)), "{round}: {place} of {places:?}: {:?}", names(&mountpoint));
        }
        sh(&mountpoint, "rm -rf made linked linked2");
        if places.len() == 2 {
            sh(&mountpoint, "rm -r moved");
        } else if places == ["moved"] {
            sh(&mountpoint, "mv moved moving");
        }
        sh(&mountpoint, "rm -rf going");
        assert_eq!(fs::read_dir(&mountpoint).unwrap().count(), 1, "{round}: {:?}", names(&mountpoint));
        fixture.unmount();
    }
}

#[test]
fn a_file_of_a_pool_is_replaced_at_once() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    let (list, mountpoint) = (branches(&[(&one, "rw"), (&two, "rw")]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", "create=rr"], &list, &mountpoint);
    // As editors and rsync do it: the new file is on either branch, and was closed a moment ago, or
    // is open still.
    for round in 0..100 {
        let mut file = File::create(fixture.at("new")).unwrap();
        file.write_all(round.to_string().as_bytes()).unwrap();
        let held = (round % 3 == 0).then_some(file);
        fs::rename(fixture.at("new"), fixture.at("file")).unwrap_or_else(|error| panic!("{round}: {error}"));
        assert_eq!(fs::read_to_string(fixture.at("file")).unwrap(), round.to_string());
        assert!(!fixture.at("new").exists());
        if let Some(mut held) = held {
            held.write_all(b"!").unwrap();
            assert_eq!(fs::read_to_string(fixture.at("file")).unwrap(), format!("{round}!"));
        }
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().nlink(), 1);
    }
    assert_eq!(names(&mountpoint), ["file"]);
    assert_eq!(names(&one).len() + names(&two).len(), 1, "one file is left");
}

#[test]
fn fstab_and_its_words() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    filled(&fixture.source);
    let upper = fixture.directory("upper");
    let helper = fixture.scratch.path().join("mount.fuse.nacre");
    symlink(nacre(), &helper).unwrap();
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    let prefixed = format!("union:{}", list.to_str().unwrap());
    let of_aufs = format!("br:{},create=mfs,udba=none,noatime,dirwh=64,nofail", list.to_str().unwrap());
    let of_overlay = format!("lowerdir={},upperdir={}", fixture.source.display(), upper.display());
    for (source, words) in
        [(prefixed.as_str(), "create=mfs,rw,noatime,_netdev"), ("none", &of_aufs), ("overlay", &of_overlay)]
    {
        let mount = || run(&helper, [OsStr::new(source), mountpoint.as_os_str(), "-o".as_ref(), words.as_ref()]);
        let output = mount();
        assert!(output.status.success(), "{source}: {}", text(&output.stderr));
        assert_eq!(fs::read(fixture.at("file")).unwrap(), b"content");
        // `mount -a` again changes nothing.
        let again = mount();
        assert!(again.status.success(), "{source}: {}", text(&again.stderr));
        assert_eq!(crate::mounting::mounts_below(&mountpoint).len(), 1, "{source}");
        assert!(run(nacre(), [OsStr::new("umount"), mountpoint.as_os_str()]).status.success());
    }
    assert!(!run(&helper, ["none", mountpoint.to_str().unwrap(), "-o", "br:/no/such/place"]).status.success());
    fixture.start(&["union", "-o", "ro"], &list, &mountpoint);
    assert_eq!(errno(fs::write(fixture.at("x"), "")), EROFS);
}

#[test]
fn mounted_over_its_own_branch() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    filled(&fixture.source);
    let (upper, extra) = (fixture.directory("upper"), fixture.directory("extra"));
    fs::write(upper.join("own"), "upper").unwrap();
    fs::write(extra.join("more"), "").unwrap();
    let list = branches(&[(&upper, "rw"), (&fixture.source, "ro")]);
    fixture.start(&["union"], &list, &upper);
    let at = upper.to_str().unwrap();
    assert_eq!(names(&upper), ["dir", "dir/inner", "file", "large", "own"]);
    // Nothing that commands do hangs in the mount that they are about.
    told(["add", at, extra.to_str().unwrap()]);
    assert!(upper.join("more").exists());
    assert_eq!(crate::mounting::unions::list(&upper).len(), 3);
    assert!(text(&union(["add", at, at]).stderr).contains("is the union itself"));
    assert_eq!(told(["check", at]), "");
    fs::remove_file(upper.join("file")).unwrap();
    assert!(run(nacre(), ["umount", at]).status.success());
    assert_eq!(fixture.ended(), Some(0));
    assert!(upper.join("own").exists() && upper.join(".wh.file").exists() && !upper.join("more").exists());
}

#[test]
fn a_full_branch_sends_files_elsewhere() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (small, large) = (fixture.directory("small"), fixture.directory("large"));
    for (place, size) in [(&small, "size=1m"), (&large, "size=32m")] {
        assert!(run("mount", ["-t", "tmpfs", "-o", size, "tmpfs", place.to_str().unwrap()]).status.success());
    }
    let (list, mountpoint) = (branches(&[(&small, "rw"), (&large, "rw")]), fixture.mountpoint.clone());
    let content: Vec<u8> = (0..3_u32 << 18).flat_map(u32::to_le_bytes).collect();
    for (words, fits) in [("create=ff,moveonenospc=false", false), ("create=ff,moveonenospc=true", true)] {
        fixture.start(&["union", "-o", words], &list, &mountpoint);
        let mut file = File::create(fixture.at("file")).unwrap();
        assert!(small.join("file").exists());
        let written = file.write_all(&content);
        assert_eq!(written.as_ref().err().and_then(std::io::Error::raw_os_error), (!fits).then_some(28), "{words}");
        if fits {
            assert_eq!(fs::read(fixture.at("file")).unwrap(), content);
            assert!(large.join("file").exists() && !small.join("file").exists());
        }
        drop(file);
        fs::remove_file(fixture.at("file")).unwrap();
        fixture.unmount();
    }
    // A branch with too little room takes nothing new.
    let list = branches(&[(&small, "rw+minfree=2M"), (&large, "rw")]);
    fixture.start(&["union", "-o", "create=ff"], &list, &mountpoint);
    fs::write(fixture.at("file"), "x").unwrap();
    assert!(large.join("file").exists());
}

#[test]
fn a_signal_ends_it_in_order_and_a_kill_is_survived() {
    needs!(as_root());
    let (mut fixture, upper) = over(&[], filled);
    let mut file = OpenOptions::new().append(true).open(fixture.at("file")).unwrap();
    file.write_all(b", more").unwrap();
    drop(file);
    fixture.signal(Signal::TERM);
    assert_eq!(fixture.ended(), Some(0));
    assert!(!is_mounted(&fixture.mountpoint));
    assert_eq!(fs::read(upper.join("file")).unwrap(), b"content, more");
    let (list, mountpoint) = (branches(&[(&upper, "rw"), (&fixture.source, "ro")]), fixture.mountpoint.clone());
    fixture.start(&["union"], &list, &mountpoint);
    // The remainders of a crash of an earlier version, or of another program, are found.
    fs::write(upper.join(".wh.file"), "").unwrap();
    let found = union(["check", mountpoint.to_str().unwrap()]);
    assert_eq!(found.status.code(), Some(1));
    assert!(
        text(&found.stdout).contains(".wh.file: a whiteout beside the name that it would hide"),
        "{}",
        text(&found.stdout)
    );
    assert!(told(["check", "--repair", mountpoint.to_str().unwrap()]).contains("(repaired)"));
    assert!(!upper.join(".wh.file").exists());
    fixture.signal(Signal::KILL);
    assert_eq!(fixture.ended(), None);
    crate::mounting::clear(&mountpoint);
    assert_eq!(fs::read(upper.join("file")).unwrap(), b"content, more");
}

#[test]
fn stacks_below_and_above() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    filled(&fixture.source);
    let (upper, mountpoint) = (fixture.directory("upper"), fixture.mountpoint.clone());
    let forwarded = run(
        nacre(),
        ["mount", "--enable-lock-forwarding", &format!("union:{}", upper.display()), mountpoint.to_str().unwrap()],
    );
    assert_eq!(forwarded.status.code(), Some(2));
    assert!(text(&forwarded.stderr).contains("locks cannot be forwarded over a union"), "{}", text(&forwarded.stderr));
    // A branch that shows other owners, and a cage over the whole.
    let below = format!("{{host:{} | remap:force-user=4711}}=ro", fixture.source.display()).replace('|', "\\|");
    let line = format!("union:{}=rw:{below} | cage:size=64M | remap:hide=large", upper.display());
    fixture.start(&["mount"], line.as_ref(), &mountpoint);
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 4711);
    assert!(!fixture.at("large").exists());
    fs::write(fixture.at("new"), "x").unwrap();
    assert!(upper.join("new").exists());
    let full = OpenOptions::new().create(true).append(true).open(fixture.at("big")).unwrap();
    let block = vec![1; 1 << 20];
    let written = (0..100).take_while(|_| (&full).write_all(&block).is_ok()).count();
    assert!((40..64).contains(&written), "{written}");
    assert_eq!(list(&mountpoint).len(), 2);
    let shown = Status::of(&mountpoint).text("stack").to_owned();
    // What is printed can be mounted again.
    drop(full);
    fixture.unmount();
    fixture.start(&["mount"], shown.as_ref(), &mountpoint);
    assert_eq!(fs::metadata(fixture.at("file")).unwrap().uid(), 4711);
}

#[test]
fn figures_of_branches() {
    needs!(as_root());
    let (fixture, upper) = over(&[], filled);
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let table = told(["list", "-H", "-p", "-o", "branch,mode,place", mountpoint]);
    assert_eq!(table, format!("{}\trw\t1\n{}\tro\t2\n", upper.display(), fixture.source.display()));
    let metrics = text(&run(nacre(), ["metrics", mountpoint]).stdout);
    assert!(metrics.contains(&format!(
        "nacre_union_branch_free_bytes{{mountpoint=\"{mountpoint}\",branch=\"{}\"",
        upper.display()
    )));
    let detail = text(&run(nacre(), ["status", mountpoint]).stdout);
    assert!(detail.contains("BRANCH") && detail.contains("union create=tdp cpup=tdp whiteout=wh"), "{detail}");
    assert!(text(&run(nacre(), ["top", "--once", mountpoint]).stdout).contains(mountpoint));
    let place = text(&run(nacre(), ["union", "where", "--json", fixture.at("dir/inner").to_str().unwrap()]).stdout);
    let place: serde_json::Value = serde_json::from_str(&place).unwrap();
    assert_eq!(place[0]["file"].as_str().unwrap(), fixture.below("dir/inner").to_str().unwrap());
    let counted: BTreeMap<String, u64> = Status::of(&fixture.mountpoint).requests();
    assert!(counted.values().sum::<u64>() > 0);
}
