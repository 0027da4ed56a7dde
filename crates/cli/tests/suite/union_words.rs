//! mergerfs' options on real mounts: lines of real fstabs, the effect of each option, and a
//! comparison with mergerfs where it is installed.

use crate::mounting::unions::{branches, list, union};
use crate::mounting::{Fixture, as_root, eventually, is_mounted, nacre, needs, run, sh, text};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Options that mergerfs' documentation recommends.
const RECOMMENDED: &str = "cache.files=off,category.create=pfrd,func.getattr=newest,dropcacheonclose=false";

/// File systems of these sizes, as branches without attributes.
fn disks(fixture: &Fixture, sizes: &[(&str, &str)]) -> (Vec<PathBuf>, OsString) {
    let places: Vec<PathBuf> = sizes
        .iter()
        .map(|(name, size)| {
            let place = fixture.directory(name);
            let option = format!("size={size}");
            assert!(run("mount", ["-t", "tmpfs", "-o", &option, "tmpfs", place.to_str().unwrap()]).status.success());
            place
        })
        .collect();
    let list = places.iter().map(|place| place.to_str().unwrap()).collect::<Vec<_>>().join(":");
    (places, list.into())
}

#[test]
fn the_recommended_lines_mount_as_they_are() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let (places, list_of) = disks(&fixture, &[("one", "8m"), ("two", "8m")]);
    let mountpoint = fixture.mountpoint.to_str().unwrap();
    let words = [
        RECOMMENDED.to_owned(),
        format!("{RECOMMENDED},minfreespace=1M,fsname=pool,moveonenospc=true"),
        "allow_other,use_ino,cache.files=auto-full,dropcacheonclose=true,category.create=epmfs,category.action=epall,func.readdir=seq"
            .to_owned(),
    ];
    for words in &words {
        let output = union(["-o", words, list_of.to_str().unwrap(), mountpoint]);
        assert!(output.status.success() && output.stderr.is_empty(), "{words}: {}", text(&output.stderr));
        assert_eq!(
            list(&fixture.mountpoint),
            [(places[0].clone(), "rw".to_owned()), (places[1].clone(), "rw".to_owned())]
        );
        fs::write(fixture.at("file"), "content").unwrap();
        assert_eq!(places.iter().filter(|place| place.join("file").exists()).count(), 1, "{words}");
        fs::remove_file(fixture.at("file")).unwrap();
        assert!(run(nacre(), ["umount", mountpoint]).status.success());
    }
    // As fstab calls it.
    let source = format!("union:{}", list_of.to_str().unwrap());
    let mut call = Command::new(nacre());
    std::os::unix::process::CommandExt::arg0(&mut call, "mount.fuse.nacre");
    let output = crate::mounting::finish(call.args([&source, mountpoint, "-o", &format!("rw,nofail,{RECOMMENDED}")]));
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    assert_eq!(list(&fixture.mountpoint).len(), 2);
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    // Each difference is reported in one line, and nothing else is.
    let output = union([
        "-o",
        "category.create=ff,func.readdir=cor:4,lazy-umount-mountpoint=true,rename-exdev=rel-symlink",
        list_of.to_str().unwrap(),
        mountpoint,
    ]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");
    assert!(
        said.contains("func.readdir=cor:4: ")
            && said.contains("lazy-umount-mountpoint=true: ")
            && said.contains("rename-exdev=rel-symlink: "),
        "{said}"
    );
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    let output = union(["-o", "follow-symlinks=all", list_of.to_str().unwrap(), mountpoint]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("followed as root"), "{}", text(&output.stderr));
    assert!(!is_mounted(&fixture.mountpoint));
}

/// Changes to directories that are on two branches, and a description of the pool as its users see
/// it.
const CHANGES: &str = "chmod 2750 both; chown 5:6 both; touch -d @1000000 both; stat -c '%a %u %g %Y' both; \
    setfattr -n user.note -v x both; getfattr --only-values -n user.note both; echo; df --output=size . | tail -1; ls";

/// The same on the branches.
const SEEN_BELOW: &str = "for disk in one two; do stat -c '%a %u %g %Y' $disk/both; getfattr --only-values -n user.note $disk/both; echo; ls $disk; done";

/// Fills two branches alike, mounts a pool of them, and returns the view of users and of the
/// branches after the changes.
fn changed(fixture: &mut Fixture, mount: impl FnOnce(&mut Fixture, &OsString)) -> (String, String, OsString) {
    let (places, list_of) = disks(fixture, &[("one", "8m"), ("two", "16m")]);
    for place in &places {
        fs::create_dir(place.join("both")).unwrap();
    }
    mount(fixture, &list_of);
    (sh(&fixture.mountpoint, CHANGES), sh(fixture.scratch.path(), SEEN_BELOW), list_of)
}

#[test]
fn a_pool_changes_its_directories_on_all_branches_as_mergerfs_does() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (scratch, mountpoint) = (fixture.scratch.path().to_owned(), fixture.mountpoint.clone());
    let ours = changed(&mut fixture, |fixture, list| {
        fixture.start(&["union", "-o", RECOMMENDED], list, &mountpoint);
    });
    // tmpfs reports its size in KiB: 8 and 16 MiB together.
    assert_eq!(ours.0.lines().map(str::trim).collect::<Vec<_>>(), ["2750 5 6 1000000", "x", "24576", "both"]);
    assert_eq!(ours.1, "2750 5 6 1000000\nx\nboth\n2750 5 6 1000000\nx\nboth\n");
    fixture.unmount();
    if run("sh", ["-c", "command -v mergerfs"]).status.success() {
        let mut rival = Fixture::bare();
        let theirs = changed(&mut rival, |fixture, list| {
            let words =
                "cache.files=off,category.create=pfrd,func.getattr=newest,dropcacheonclose=false,allow_other,use_ino";
            let mounted =
                run("mergerfs", ["-o".as_ref(), words.as_ref(), list.as_os_str(), fixture.mountpoint.as_os_str()]);
            assert!(mounted.status.success(), "{}", text(&mounted.stderr));
            eventually("mergerfs is mounted", || is_mounted(&fixture.mountpoint));
        });
        assert!(run("umount", [rival.mountpoint.as_os_str()]).status.success());
        assert_eq!((&ours.0, &ours.1), (&theirs.0, &theirs.1));
    } else {
        crate::mounting::skip("the same beside mergerfs", "mergerfs is not installed");
    }
    // Only on the highest, where that is asked for.
    fixture.start(&["union", "-o", "category.create=ff,category.action=epff"], &ours.2, &mountpoint);
    sh(&mountpoint, "chmod 700 both; touch -d @2000000 both");
    assert_eq!(sh(&scratch, "stat -c '%a %Y' one/both two/both"), "2700 2000000\n2750 1000000\n");
}

#[test]
fn times_are_those_of_the_newest_branch() {
    needs!(as_root());
    for (words, time) in [("category.create=ff", 1_000_000), ("category.create=ff,func.getattr=newest", 3_000_000)] {
        let mut fixture = Fixture::bare();
        let (places, list_of) = disks(&fixture, &[("one", "8m"), ("two", "8m")]);
        sh(fixture.scratch.path(), "mkdir one/d two/d; touch -d @1000000 one/d; touch -d @3000000 two/d");
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&["union", "-o", words], &list_of, &mountpoint);
        assert_eq!(fs::metadata(fixture.at("d")).unwrap().mtime(), time, "{words}");
        // A change on the lower branch alone is seen, too.
        sh(&places[1], "touch -d @5000000 d");
        let time = if time == 3_000_000 { 5_000_000 } else { time };
        eventually("the time is the new one", || fs::metadata(fixture.at("d")).unwrap().mtime() == time);
        // What programs set holds, on whichever branch: they look whether it does.
        sh(&mountpoint, "touch -d @2000000 d");
        assert_eq!(fs::metadata(fixture.at("d")).unwrap().mtime(), 2_000_000, "{words}");
    }
}

#[test]
fn figures_are_of_all_branches_or_of_those_that_have_the_file() {
    needs!(as_root());
    for (words, of_all, of_one, available) in [
        ("statfs=base", 14, 14, 14),
        ("statfs=full", 14, 2, 14),
        ("statfs=base,statfs_ignore=nc", 14, 14, 10),
        ("statfs=base,statfs-ignore=ro", 14, 14, 2),
        ("sum", 14, 14, 14),
        ("create=ff", 2, 2, 2),
    ] {
        let mut fixture = Fixture::bare();
        let (places, _) = disks(&fixture, &[("one", "2m"), ("two", "4m"), ("three", "8m")]);
        fs::write(places[0].join("file"), "").unwrap();
        let of = branches(&[(&places[0], "rw"), (&places[1], "nc"), (&places[2], "ro")]);
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&["union", "-o", words], &of, &mountpoint);
        let figures = |name: &str| {
            let data = rustix::fs::statvfs(fixture.at(name)).unwrap();
            let mebibytes = |blocks: u64| (blocks * data.f_frsize + (1 << 19)) >> 20;
            (mebibytes(data.f_blocks), mebibytes(data.f_bavail))
        };
        assert_eq!(figures(""), (of_all, available), "{words}");
        assert_eq!(figures("file").0, of_one, "{words}");
    }
}

#[test]
fn a_full_branch_sends_files_where_the_policy_says() {
    needs!(as_root());
    for (policy, goes_to) in [("mfs", "large"), ("lfs", "middle"), ("ff", "middle"), ("true", "large")] {
        let mut fixture = Fixture::bare();
        let (places, list_of) = disks(&fixture, &[("small", "1m"), ("middle", "16m"), ("large", "32m")]);
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&["union", "-o", &format!("category.create=ff,moveonenospc={policy}")], &list_of, &mountpoint);
        let mut file = File::create(fixture.at("file")).unwrap();
        assert!(places[0].join("file").exists());
        file.write_all(&vec![7; 3 << 20]).unwrap();
        drop(file);
        let there: Vec<_> = places.iter().filter(|place| place.join("file").exists()).collect();
        assert_eq!(there, [&fixture.scratch.path().join(goes_to)], "{policy}");
        assert_eq!(fs::read(fixture.at("file")).unwrap(), vec![7; 3 << 20]);
    }
}

#[test]
fn modes_attributes_and_directories_are_as_the_words_say() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (places, list_of) = disks(&fixture, &[("one", "8m"), ("two", "16m")]);
    let mountpoint = fixture.mountpoint.clone();
    let words = "category.create=ff,func.mkdir=mfs,umask=027,security_capability=false";
    fixture.start(&["union", "-o", words], &list_of, &mountpoint);
    sh(&mountpoint, "mkdir d; echo x > f; chmod 666 f");
    assert!(places[1].join("d").exists() && !places[0].join("d").exists(), "directories by their own policy");
    assert!(places[0].join("f").exists());
    assert_eq!(sh(&mountpoint, "stat -c %a f d"), "750\n750\n");
    assert_eq!(fs::metadata(places[0].join("f")).unwrap().mode() & 0o777, 0o666);
    let below = places[0].join("f");
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rustix::fs::setxattr(&below, "security.capability", &capability, rustix::fs::XattrFlags::empty()).unwrap();
    let asked = |path: &Path| {
        rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 64]).map_err(|error| error.raw_os_error())
    };
    assert_eq!(asked(&below), Ok(20));
    assert_eq!(asked(&fixture.at("f")), Err(61));
    fixture.unmount();
    fixture.start(&["union", "-o", "category.create=ff,posix_acl=true"], &list_of, &mountpoint);
    assert_eq!(asked(&fixture.at("f")), Ok(20));
    let holds = Command::new("sh").args(["-c", "command -v setfacl"]).stdout(Stdio::null()).status().unwrap().success();
    if holds {
        let set = run("setfacl", ["-m", "u:5:r", fixture.at("f").to_str().unwrap()]);
        assert!(set.status.success(), "{}", text(&set.stderr));
    }
}

/// The branches of a mount with their states, in order.
fn states(mountpoint: &Path) -> Vec<(String, String)> {
    let output = union(["list", "-H", "-o", "branch,state", mountpoint.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line = |line: &str| line.split_once('\t').map(|(branch, state)| (branch.to_owned(), state.to_owned())).unwrap();
    text(&output.stdout).lines().map(line).collect()
}

#[test]
fn a_branch_that_is_missing_comes_in_when_it_is_there() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let (one, two, three) = (fixture.directory("one"), fixture.scratch.path().join("two"), fixture.directory("three"));
    fs::write(three.join("name"), "lowest").unwrap();
    let (of, mountpoint) =
        (branches(&[(&one, "rw"), (&two, "rw"), (&three, "ro")]), fixture.mountpoint.to_str().unwrap());
    let of = of.to_str().unwrap();
    let refused = union([of, mountpoint]);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    let mounted = union(["-o", "nofail", of, mountpoint]);
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    let named = |path: &Path, state: &str| (path.to_str().unwrap().to_owned(), state.to_owned());
    assert_eq!(states(&fixture.mountpoint), [named(&one, "active"), named(&three, "active"), named(&two, "missing")]);
    let told = run(nacre(), ["status", mountpoint]);
    assert!(text(&told.stdout).contains("missing"), "{}", text(&told.stdout));
    assert_eq!(fs::read(fixture.at("name")).unwrap(), b"lowest");
    // It is made beside, complete: what it shows is shown in its place, above the third one.
    sh(fixture.scratch.path(), "mkdir new; echo middle > new/name; echo more > new/other; mv new two");
    eventually("the branch is there", || {
        states(&fixture.mountpoint) == [named(&one, "active"), named(&two, "active"), named(&three, "active")]
    });
    assert_eq!(fs::read(fixture.at("name")).unwrap(), b"middle\n");
    assert_eq!(fs::read(fixture.at("other")).unwrap(), b"more\n");
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    // What is given up is waited for no more.
    fs::remove_dir_all(&two).unwrap();
    assert!(union(["-o", "nofail", of, mountpoint]).status.success());
    assert!(union(["del", mountpoint, two.to_str().unwrap()]).status.success());
    assert_eq!(states(&fixture.mountpoint).len(), 2);
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    // Nothing at all is no union.
    let none = union(["-o", "nofail", &format!("{0}/no:{0}/none", fixture.scratch.path().display()), mountpoint]);
    assert_eq!(none.status.code(), Some(3));
    assert!(text(&none.stderr).contains("no branch is there"), "{}", text(&none.stderr));
    // A line of fstab is left out.
    let program = fixture.scratch.path().join("mount.fuse.nacre");
    std::os::unix::fs::symlink(nacre(), &program).unwrap();
    let source = format!("union:{0}/no:{0}/none", fixture.scratch.path().display());
    let left_out = run(&program, [&source, mountpoint, "-o", "rw,nofail"]);
    assert!(left_out.status.success() && text(&left_out.stderr).contains("left out"), "{}", text(&left_out.stderr));
}

#[test]
fn branches_are_waited_for_until_they_are_mounted() {
    needs!(as_root());
    let fixture = Fixture::bare();
    let (one, two) = (fixture.directory("one"), fixture.directory("two"));
    for place in [&one, &two] {
        fs::write(place.join(".mergerfs.branch_mounts_here"), "").unwrap();
    }
    let (of, mountpoint) = (format!("{}:{}", one.display(), two.display()), fixture.mountpoint.to_str().unwrap());
    let disk = |place: &Path| assert!(run("mount", ["-t", "tmpfs", "tmpfs", place.to_str().unwrap()]).status.success());
    disk(&one);
    let failed =
        union(["-o", "category.create=ff,branches-mount-timeout=1,branches-mount-timeout-fail=true", &of, mountpoint]);
    assert_eq!(failed.status.code(), Some(3), "{}", text(&failed.stderr));
    assert!(
        text(&failed.stderr).contains("not mounted within 1 seconds") && text(&failed.stderr).contains("two"),
        "{}",
        text(&failed.stderr)
    );
    assert!(!is_mounted(&fixture.mountpoint));
    let mounted = union(["-o", "category.create=ff,branches_mount_timeout=1", &of, mountpoint]);
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    assert_eq!(
        states(&fixture.mountpoint).iter().map(|(_, state)| state.as_str()).collect::<Vec<_>>(),
        ["active", "missing"]
    );
    disk(&two);
    fs::write(two.join("file"), "of the disk").unwrap();
    eventually("the disk is there", || states(&fixture.mountpoint).iter().all(|(_, state)| state == "active"));
    assert_eq!(fs::read(fixture.at("file")).unwrap(), b"of the disk");
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    // All branches are there: the mount does not wait. Plain directories are used as they are after
    // the timeout.
    assert!(union(["-o", "branches-mount-timeout=600", &of, mountpoint]).status.success());
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
    let plain = fixture.directory("plain");
    let mounted = union([
        "-o",
        "branches-mount-timeout=1",
        &format!("{}={}:{}=rw", one.display(), "rw", plain.display()),
        mountpoint,
    ]);
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    assert!(states(&fixture.mountpoint).iter().all(|(_, state)| state == "active"));
    assert!(run(nacre(), ["umount", mountpoint]).status.success());
}

/// Mounts a pool of two directories with nacre and with mergerfs, and returns the output of a
/// script there.
fn beside(words: &str, fill: &str, script: &str) -> (String, Option<String>) {
    let places = |fixture: &Fixture| {
        let places = ["one", "two"].map(|name| fixture.directory(name));
        sh(fixture.scratch.path(), fill);
        places.iter().map(|place| place.to_str().unwrap()).collect::<Vec<_>>().join(":")
    };
    // What a script needs to say where it is.
    let seen = |fixture: &Fixture| {
        sh(&fixture.mountpoint, script).replace(fixture.scratch.path().to_str().unwrap(), "SCRATCH")
    };
    let mut fixture = Fixture::bare();
    let (list_of, mountpoint) = (places(&fixture), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", words], list_of.as_ref(), &mountpoint);
    let ours = seen(&fixture);
    fixture.unmount();
    if !run("sh", ["-c", "command -v mergerfs"]).status.success() {
        crate::mounting::skip("the same beside mergerfs", "mergerfs is not installed");
        return (ours, None);
    }
    let rival = Fixture::bare();
    let list_of = places(&rival);
    let mountpoint = rival.mountpoint.to_str().unwrap();
    let mounted = run("mergerfs", ["-o", &format!("{words},allow_other,use_ino"), &list_of, mountpoint]);
    assert!(mounted.status.success(), "{}", text(&mounted.stderr));
    eventually("mergerfs is mounted", || is_mounted(&rival.mountpoint));
    let theirs = seen(&rival);
    assert!(run("umount", [mountpoint]).status.success());
    (ours, Some(theirs))
}

#[test]
fn a_name_of_a_linked_file_gets_its_own_before_a_write() {
    needs!(as_root());
    // Names of one file, one of them in another directory.
    let fill = "mkdir one/d; echo old > one/a; chown 5:6 one/a; chmod 640 one/a; setfattr -n user.note -v x one/a; touch -d @1000000 one/a;
        for name in b c d/e f g; do ln one/a one/$name; done; echo two > two/low; ln two/low two/low2";
    let script = "cat b >/dev/null; chmod 644 a; stat -c '%n %h' a f
        echo more >> b; stat -c '%n %h %a %u %g %Y' a; stat -c '%n %h %a %u %g' b; getfattr --only-values -n user.note b; echo
        echo fresh > c; dd if=/dev/zero of=d/e bs=1 count=1 conv=notrunc status=none
        exec 3<f; exec 4<>f; echo new >&4; cat <&3; cat f
        echo x > low; cat low2; mv a moved; ln moved again; echo y >> moved; cat again; rm again
        for name in b c d/e f g moved low low2; do stat -c '%n %h %s' $name; od -c $name; done";
    let words = "category.create=ff,link_cow=true,cache.attr=0,cache.entry=0";
    let (ours, theirs) = beside(words, fill, script);
    assert!(ours.starts_with("a 6\nf 6\na 5 644 5 6 1000000\nb 1 644 5 6\nx\nold\nnew\ntwo\nold\nb 1 9\n"), "{ours}");
    if let Some(theirs) = theirs {
        assert_eq!(ours, theirs);
    }
    // One inode number for all names of a file, and another one for what has been taken from it;
    // truncate(2) is a write as well.
    let mut fixture = Fixture::bare();
    let place = fixture.directory("one");
    sh(&place, "echo old > a; ln a b; ln a c; mkdir d");
    let (list_of, mountpoint) = (branches(&[(&place, "rw")]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", words], &list_of, &mountpoint);
    let inode = |name: &str| fs::metadata(fixture.at(name)).unwrap().ino();
    let number = inode("a");
    assert_eq!((inode("b"), inode("c")), (number, number));
    let mut reader = File::open(fixture.at("b")).unwrap();
    // truncate(2), not open(2) and ftruncate(2).
    sh(&mountpoint, "perl -e 'truncate(\"b\", 1) or die $!'");
    let read = |name: &str| fs::read_to_string(fixture.at(name)).unwrap();
    assert_eq!((read("a"), read("b"), read("c")), ("old\n".into(), "o".into(), "old\n".into()));
    let mut kept = String::new();
    reader.read_to_string(&mut kept).unwrap();
    assert_eq!(kept, "old\n");
    assert_ne!(inode("b"), number);
    // A process that has the only name open for writing can write, whatever is linked meanwhile.
    let mut writer = File::options().append(true).open(fixture.at("b")).unwrap();
    fs::hard_link(fixture.at("b"), fixture.at("d/again")).unwrap();
    writer.write_all(b"!").unwrap();
    writer.set_len(1).unwrap();
    writer.write_all(b"?").unwrap();
    assert_eq!((read("b"), read("d/again")), ("o?".into(), "o?".into()));
    // A name that another process has replaced on the branch is not taken for the old file.
    sh(&place, "echo other > fresh; mv fresh c; ln c c2");
    eventually("the other file is there", || read("c") == "other\n");
    sh(&mountpoint, "echo more >> c");
    assert_eq!((read("a"), read("c"), read("c2")), ("old\n".into(), "other\nmore\n".into(), "other\n".into()));
    assert_eq!(sh(&place, "cat a c c2; find . -name '.wh*'"), "old\nother\nmore\nother\n");
}

#[test]
fn names_of_a_linked_file_are_written_at_the_same_time() {
    needs!(as_root());
    const NAMES: usize = 24;
    for words in ["link_cow=true", "link_cow=true,passthrough=off"] {
        let mut fixture = Fixture::bare();
        let place = fixture.directory("one");
        fs::write(place.join("0"), "old").unwrap();
        for name in 1..NAMES {
            fs::hard_link(place.join("0"), place.join(name.to_string())).unwrap();
        }
        let (list_of, mountpoint) = (branches(&[(&place, "rw")]), fixture.mountpoint.clone());
        fixture.start(&["union", "-o", words], &list_of, &mountpoint);
        // Each name is written by two at once; the last three are only read.
        std::thread::scope(|scope| {
            for name in (0..NAMES - 3).flat_map(|name| [name, name]) {
                let path = fixture.at(name.to_string());
                scope.spawn(move || File::options().append(true).open(path).unwrap().write_all(b"+").unwrap());
            }
        });
        for name in 0..NAMES {
            let (text, links) = if name < NAMES - 3 { ("old++", 1) } else { ("old", 3) };
            let path = fixture.at(name.to_string());
            assert_eq!(
                (fs::read_to_string(&path).unwrap().as_str(), fs::metadata(&path).unwrap().nlink()),
                (text, links),
                "{words}"
            );
        }
    }
}

#[test]
fn a_name_of_a_linked_file_on_a_read_only_branch_is_copied_up_alone() {
    needs!(as_root());
    let mut fixture = Fixture::bare();
    let (upper, lower) = (fixture.directory("upper"), fixture.directory("lower"));
    sh(&lower, "mkdir d; echo old > a; for name in b c d/e; do ln a $name; done");
    let (list_of, mountpoint) = (branches(&[(&upper, "rw"), (&lower, "ro")]), fixture.mountpoint.clone());
    for round in 0..2 {
        fixture.start(&["union", "-o", "link_cow=true"], &list_of, &mountpoint);
        if round == 0 {
            sh(&mountpoint, "echo new >> d/e; echo more >> c; mv b moved; echo x >> moved");
        }
        let seen = sh(&mountpoint, "cat a; cat d/e; cat c; cat moved; stat -c '%n %h' a c d/e moved; ls");
        assert_eq!(
            seen, "old\nold\nnew\nold\nmore\nold\nx\na 1\nc 1\nd/e 1\nmoved 1\na\nc\nd\nmoved\n",
            "round {round}"
        );
        fixture.unmount();
    }
    assert_eq!(sh(&lower, "cat a b c d/e"), "old\nold\nold\nold\n");
    assert_eq!(text(&run(nacre(), ["union".as_ref(), "check".as_ref(), list_of.as_os_str()]).stderr), "");
}

#[test]
fn old_files_that_nobody_may_write_to_are_shown_as_links() {
    needs!(as_root());
    let fill =
        "mkdir -p one/d two/d; for name in one/d/file two/low one/open; do echo $name > $name; chmod 444 $name; done; echo w > one/writable
        ln -s d/file one/link; mkdir -m 555 one/closed; mkfifo -m 444 one/pipe; touch -d @1000000 one/d/file two/low one/open one/writable
        now=$(date +%s); until [ $(date +%s) -gt $((now + 1)) ]; do sleep 0.1; done";
    // Times of change cannot be set: the files are new, and old enough.
    let words = "category.create=ff,symlinkify=true,symlinkify_timeout=0";
    let script = "stat -c '%n %F' *; readlink d/file low open; cat d/file low open";
    let (ours, theirs) = beside(words, fill, script);
    let links = "SCRATCH/one/d/file\nSCRATCH/two/low\nSCRATCH/one/open\none/d/file\ntwo/low\none/open\n";
    assert!(ours.contains(links) && ours.contains("pipe fifo\n") && ours.contains("writable regular"), "{ours}");
    if let Some(theirs) = theirs {
        // There, what is no regular file becomes a link as well.
        assert_eq!(ours, theirs.replace("pipe symbolic link", "pipe fifo"));
    }
    let mut fixture = Fixture::bare();
    let place = fixture.directory("one");
    let (list_of, mountpoint) = (branches(&[(&place, "rw")]), fixture.mountpoint.clone());
    fixture.start(&["union", "-o", "symlinkify=true,symlinkify-timeout=1"], &list_of, &mountpoint);
    sh(&mountpoint, "echo content > file; ln file other; chmod 444 file");
    let is_link = |name: &str| fs::symlink_metadata(fixture.at(name)).unwrap().is_symlink();
    // A process that has it open when it becomes a link reads it as before.
    let mut open = File::open(fixture.at("file")).unwrap();
    assert!(!is_link("file"));
    eventually("it is a link", || is_link("file") && is_link("other"));
    let found = fs::symlink_metadata(fixture.at("file")).unwrap();
    assert_eq!((found.mode(), found.len()), (0o120_777, place.join("file").as_os_str().len() as u64));
    assert_eq!(fs::read_link(fixture.at("other")).unwrap(), place.join("other"));
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), open.metadata().unwrap().is_file()), ("content\n", true));
    // Names of a link are given, changed and taken as those of a file; it is one again when it may
    // be written to.
    sh(&mountpoint, "ln file third; mv third fourth; rm other; chmod 644 file");
    eventually("it is a file", || !is_link("file") && !is_link("fourth"));
    assert_eq!(sh(&mountpoint, "echo more >> fourth; cat file; ls"), "content\nmore\nfile\nfourth\n");
}
