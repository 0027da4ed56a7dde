//! The program called as `mergerfs`: its command line, its control file, and a comparison with
//! mergerfs where that is installed.

use crate::mounting::unions::list;
use crate::mounting::{Fixture, as_root, finish, is_mounted, nacre, needs, run, sh, sh_as, text};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Three branches, the last of which is not in the first list.
fn fixture() -> Fixture {
    let fixture = Fixture::bare();
    sh(fixture.scratch.path(), "mkdir -p a/d b/d c; echo 1 > a/d/one; echo 2 > b/d/two; echo 3 > c/three");
    fixture
}

/// Our program under the name `mergerfs`, or mergerfs itself.
fn called(program: &str, place: &Path, arguments: &[&str]) -> Output {
    let mut call = Command::new(if program == "ours" { nacre() } else { "/usr/bin/mergerfs".into() });
    std::os::unix::process::CommandExt::arg0(&mut call, "mergerfs");
    finish(call.args(arguments).current_dir(place))
}

fn mount(fixture: &Fixture, program: &str, words: &str) {
    let place = fixture.scratch.path();
    let list = format!("{0}/a:{0}/b", place.display());
    let output = called(program, place, &["-o", words, &list, fixture.mountpoint.to_str().unwrap()]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

/// Returns the output of a script in the mount, with the folder's path replaced by `PLACE`.
fn said(fixture: &Fixture, script: &str) -> String {
    let place = fixture.scratch.path().to_str().unwrap();
    let said = sh(&fixture.mountpoint, &format!("set +e; place={place}; exec 2>&1\n{script}true"));
    said.replace(place, "PLACE")
}

/// Script with the same results in both programs.
const ALIKE: &str = r#"
get() { getfattr --absolute-names --only-values -n "user.mergerfs.$1" "${2:-.mergerfs}"; echo; }
set_() { setfattr -n "user.mergerfs.$1" -v "$2" .mergerfs && get "$1"; }
ls -A; stat -c '%F %s' .mergerfs
get branches; get srcmounts; get category.create; get func.mkdir; get minfreespace; get category.action; get func.open
for file in d d/one d/two; do
  for key in basepath relpath fullpath; do get $key $file; done
  getfattr --absolute-names --only-values -n user.mergerfs.allpaths $file | tr '\0' ' '; echo
done
set_ branches "+>$place/c"; cat three
set_ branches "->"; ls
set_ branches "+<$place/c"; set_ branches "-$place/b"; ls d
set_ srcmounts "$place/c:$place/a:$place/b"; ls d
set_ category.create ff; set_ minfreespace 1; echo new > new; ls "$place/c"; get category.create
set_ category.create mfs; get func.create; set_ func.mkdir ff; get func.mkdir; get category.create
set_ pid 1; set_ nonsense 1
set_ branches "$place/c=RO:$place/a=NC:$place/b=RW"; echo more > more; ls "$place/b"; set_ branches "$place/c:$place/a:$place/b"
getfattr -n user.other .mergerfs; setfattr -x user.mergerfs.pid .mergerfs
cat .mergerfs; rm .mergerfs
getfattr --absolute-names -m nothing d/one
"#;

#[test]
fn the_control_file_is_that_of_mergerfs() {
    needs!(as_root());
    let fixture_of = |program: &str| {
        let fixture = fixture();
        mount(&fixture, program, "category.create=mfs,minfreespace=1M,allow_other,use_ino,cache.files=off");
        let said = said(&fixture, ALIKE);
        sh(fixture.scratch.path(), &format!("umount {}", fixture.mountpoint.display()));
        said
    };
    let ours = fixture_of("ours");
    for line in ["PLACE/a=RW:PLACE/b=RW", "PLACE/a:PLACE/b", "1048576", "PLACE/c=RW:PLACE/a=RW", "epall", "/d/one"] {
        assert!(ours.lines().any(|said| said == line), "{line} in {ours}");
    }
    if Path::new("/usr/bin/mergerfs").exists() {
        // What both say of a file without a name is not in the same words.
        assert_eq!(ours, fixture_of("mergerfs"));
    }
}

#[test]
fn only_who_has_mounted_changes_settings_and_nobody_takes_the_name() {
    needs!(as_root());
    let fixture = fixture();
    mount(&fixture, "ours", "category.create=ff,minfreespace=0");
    let (at, place) = (&fixture.mountpoint, fixture.scratch.path());
    sh(place, "chmod 777 a b mount; chmod 755 .");
    let script = "setfattr -n user.mergerfs.category.create -v mfs .mergerfs; getfattr --only-values -n user.mergerfs.category.create .mergerfs";
    let (code, said) = sh_as(at, 65_534, 65_534, "", script);
    assert_eq!((code, said.contains("Permission denied"), said.starts_with("ff")), (0, true, true), "{said}");
    // mergerfs takes it for 0.
    let output = finish(
        Command::new("setfattr").args(["-n", "user.mergerfs.minfreespace", "-v", "much", ".mergerfs"]).current_dir(at),
    );
    assert!(text(&output.stderr).contains("Invalid argument"), "{}", text(&output.stderr));
    for script in [
        "mv d/one .mergerfs",
        "ln d/one .mergerfs",
        "mkdir .mergerfs",
        "ln -s x .mergerfs",
        "chmod 600 .mergerfs",
        "mv .mergerfs other",
        "ln .mergerfs other",
    ] {
        let output = finish(Command::new("sh").args(["-c", script]).current_dir(at));
        assert!(!output.status.success(), "{script}");
    }
    let names = sh(place, "ls -A a b | grep -v '^[.]wh'");
    assert_eq!(names, "a:\nd\n\nb:\nd\n");
    // What is below a directory is no control file.
    sh(at, "echo x > d/.mergerfs; cat d/.mergerfs; rm d/.mergerfs");
    assert!(run("umount", [at]).status.success());
}

#[test]
fn it_mounts_by_every_way_that_fstab_has() {
    needs!(as_root());
    let fixture = fixture();
    let (at, place) = (fixture.mountpoint.to_str().unwrap(), fixture.scratch.path());
    let of_table = || sh(place, &format!("findmnt -nvo FSTYPE,SOURCE {at}"));
    mount(&fixture, "ours", "defaults,category.create=mfs");
    assert_eq!(of_table(), format!("fuse.mergerfs {0}/a:{0}/b\n", place.display()));
    assert_eq!(list(&fixture.mountpoint).len(), 2);
    // By which mergerfs-tools know a pool.
    assert_eq!(sh(place, &format!("findmnt -no FSROOT {at}")), "/\n");
    assert!(run(nacre(), ["umount", at]).status.success());
    // Patterns, blanks, and mount(8)'s helper.
    let pattern = format!("{}/[ab]", place.display());
    assert!(called("ours", place, &["-o", "fsname=pool", &pattern, at]).status.success());
    assert_eq!(of_table(), "fuse.mergerfs pool\n");
    // As `mount -a` asks again.
    assert!(called("ours", place, &["-o", "fsname=pool", &pattern, at]).status.success());
    assert_eq!(sh(place, &format!("findmnt -n {at} | wc -l")), "1\n");
    assert!(run(nacre(), ["umount", at]).status.success());
    assert!(called("ours", place, &["a", "b", "c", at]).status.success());
    assert_eq!(list(&fixture.mountpoint).len(), 3);
    assert!(run(nacre(), ["umount", at]).status.success());
    // A disk that is not there.
    assert!(called("ours", place, &["a:nowhere", at]).status.success());
    assert_eq!(list(&fixture.mountpoint).len(), 2);
    assert_eq!(
        sh(&fixture.mountpoint, "getfattr --only-values -n user.mergerfs.srcmounts .mergerfs").matches(':').count(),
        0
    );
    assert!(run(nacre(), ["umount", at]).status.success());
    for helper in ["mount.mergerfs", "mount.fuse.mergerfs"] {
        let mut call = Command::new(nacre());
        std::os::unix::process::CommandExt::arg0(&mut call, helper);
        let output = finish(call.args([&pattern, at, "-o", "rw,nofail,category.create=ff"]));
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
        assert!(of_table().starts_with("fuse.mergerfs "));
        assert!(run(nacre(), ["umount", at]).status.success());
    }
    for wrong in [&["-o", "nonsense", "a:b", at][..], &["-x", "a:b", at], &["a:b"], &["-o"]] {
        assert_eq!(called("ours", place, wrong).status.code(), Some(1), "{wrong:?}");
        assert!(!is_mounted(&fixture.mountpoint));
    }
    for told in ["--help", "-V"] {
        assert!(text(&called("ours", place, &[told]).stdout).contains("mergerfs"), "{told}");
    }
}

/// The next process has the policy and the branch that were set by the control file.
#[test]
fn what_was_set_outlives_the_process() {
    needs!(as_root());
    let fixture = fixture();
    mount(&fixture, "ours", "category.create=ff,minfreespace=0,survive");
    let at = &fixture.mountpoint;
    sh(at, "setfattr -n user.mergerfs.category.create -v lfs .mergerfs");
    sh(at, &format!("setfattr -n user.mergerfs.branches -v '+>{}/c' .mergerfs", fixture.scratch.path().display()));
    let before = sh(at, "getfattr --only-values -n user.mergerfs.pid .mergerfs");
    assert!(run("kill", ["-KILL", before.as_str()]).status.success());
    let after = sh(at, "getfattr --only-values -n user.mergerfs.pid .mergerfs");
    assert_ne!(before, after);
    assert_eq!(sh(at, "getfattr --only-values -n user.mergerfs.category.create .mergerfs; cat three"), "lfs3\n");
    assert!(run("umount", [at]).status.success());
    fs::read_dir(fixture.scratch.path().join("c")).unwrap();
}

/// Script on files of which three branches have a copy.
const COPIES: &str = r#"
rm one; mv two renamed; mv three d/moved; mv four d/inner; mv lone five; mv six e/lone2
chmod 600 seven; chown 5:6 seven; setfattr -n user.new -v 1 seven; touch -d @1000 seven
truncate -s 2 eight; ln nine tenth; setfattr -x user.old eleven; chmod 700 d
rm -r gone; rm ten; echo new > ten; mv d dd; touch made; mkdir fresh; mv made fresh/made
setfattr -n user.mergerfs.func.unlink -v ff .mergerfs; rm twelve; cat twelve
setfattr -n user.mergerfs.category.action -v epff .mergerfs; chmod 640 thirteen
getfattr --only-values -n user.mergerfs.category.action .mergerfs; echo
getfattr --only-values -n user.mergerfs.func.unlink .mergerfs; echo
for set in moveonenospc=true moveonenospc=pfrd moveonenospc=false func.getattr=newest statfs=full statfs_ignore=ro; do
  setfattr -n user.mergerfs.${set%%=*} -v ${set#*=} .mergerfs; getfattr --only-values -n user.mergerfs.${set%%=*} .mergerfs; echo
done
setfattr -n user.mergerfs.branches -v "+>$place/disk*" .mergerfs; cat extra
setfattr -n user.mergerfs.branches -v "-$place/disk*" .mergerfs
getfattr --only-values -n user.mergerfs.srcmounts .mergerfs; echo
setfattr -n user.mergerfs.branches -v "=$place/[abc]" .mergerfs
getfattr --only-values -n user.mergerfs.branches .mergerfs; echo
"#;

#[test]
fn copies_on_other_branches_are_treated_as_by_mergerfs() {
    needs!(as_root());
    let done_by = |program: &str| {
        let fixture = Fixture::bare();
        let place = fixture.scratch.path();
        let fill = "mkdir a b c disk1 disk2; echo extra > disk1/extra; for branch in a b c; do (cd $branch; mkdir d gone; echo x > gone/x
            for name in one two three four five six seven eight nine ten eleven twelve thirteen d/inner; do echo $branch > $name; done
            setfattr -n user.old -v 1 eleven); done; mkdir b/e; echo lone > b/lone; echo lone2 > b/e/lone2";
        sh(place, fill);
        let list = format!("{0}/a:{0}/b:{0}/c", place.display());
        let words = "category.create=ff,minfreespace=0,cache.files=off";
        let output = called(program, place, &["-o", words, &list, fixture.mountpoint.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = said(&fixture, COPIES);
        sh(place, &format!("umount {}", fixture.mountpoint.display()));
        let left = "for branch in a b c; do cd $branch
            find . -mindepth 1 \\( -name made -o -name ten -o -type d \\) -printf '%p %y %m\\n' -o -printf '%p %y %m %s %U:%G %n %T@\\n' |
                sed 's/ [0-9]\\{10\\}[.].*//' | sort
            find . -type f -exec getfattr -d --absolute-names {} + | grep -v '^$'; grep -r . . | sort; cd ..; done";
        (said, sh(place, left))
    };
    let ours = done_by("ours");
    assert!(ours.0.contains("\nepff\n") && ours.0.contains("mfs\n"), "{}", ours.0);
    assert!(!ours.1.contains(".wh."), "{}", ours.1);
    if Path::new("/usr/bin/mergerfs").exists() {
        let theirs = done_by("mergerfs");
        assert_eq!(ours.0, theirs.0);
        assert_eq!(ours.1, theirs.1);
    }
}

/// Words of old lines of fstab, of any version of mergerfs.
#[test]
fn old_lines_of_fstab_are_taken() {
    needs!(as_root());
    let fixture = fixture();
    let (at, place) = (fixture.mountpoint.to_str().unwrap(), fixture.scratch.path());
    for words in [
        "defaults,allow_other,use_ino,direct_io,auto_cache,hard_remove,noforget,big_writes,splice_move,splice_read",
        "async_read,attr_timeout=1,entry_timeout=1,negative_timeout=0,ac_attr_timeout=1,kernel_cache,readdir_ino,nonempty",
        "log.metrics=false,readdirplus=true,posix_acl=false,security_capability=false,symlinkify=false,threads=0",
        "remember-nodes=0,handle-killpriv=true,handle-killpriv-v2=true,gid-cache.expire-timeout=3600,intr,remember=5",
    ] {
        let output = called("ours", place, &["-o", words, "a:b", at]);
        assert!(output.status.success() && output.stderr.is_empty(), "{words}: {}", text(&output.stderr));
        assert!(run("umount", [at]).status.success());
    }
    let output = called("ours", place, &["-o", "uid=1000,gid=1000", "a:b", at]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr).matches("owners and groups are those on the branches").count(), 2);
    assert!(run("umount", [at]).status.success());
}

/// Everybody who may read a branch can lock it, and leave the lock to a child: of another user, of root, and of a process
/// that is dead.
#[test]
fn locks_of_other_programs_keep_nobody_from_mounting() {
    needs!(as_root());
    // A subvolume has another device number than its file system has in /proc/locks.
    let fixture = Fixture::bare_on("btrfs");
    let (at, place) = (fixture.mountpoint.to_str().unwrap(), fixture.scratch.path());
    sh(place, "chmod 755 .; btrfs subvolume create a || mkdir a; mkdir b second");
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    for flock in [&format!("{user} flock -x"), "flock -x", "flock -s"] {
        // flock(1) ends, and its child keeps the lock.
        let holder = sh(place, &format!("{flock} a sh -c 'sleep 600 >/dev/null 2>&1 & echo $!'"));
        let output = called("ours", place, &["-o", "category.create=ff", "a:b", at]);
        let second = place.join("second");
        let refused = called("ours", place, &["-o", "category.create=ff", "a:b", second.to_str().unwrap()]);
        sh(place, &format!("kill {holder}"));
        assert!(output.status.success() && output.stderr.is_empty(), "{flock}: {}", text(&output.stderr));
        assert!(!refused.status.success(), "{flock}: a second union writes there");
        assert!(text(&refused.stderr).contains("is written by another union"), "{}", text(&refused.stderr));
        assert!(run("umount", [at]).status.success());
    }
}

/// A user changes through a pool of root's no copy that the user could not change on its branch.
#[test]
fn copies_of_others_stay() {
    needs!(as_root());
    let fixture = fixture();
    let script = "for name in removed moved changed; do echo copy > b/u/$name; cp b/u/$name a/u/$name; done; chown -R 1000:1000 a/u";
    sh(fixture.scratch.path(), &format!("mkdir a/u b/u; {script}"));
    mount(&fixture, "ours", "category.create=ff");
    let (code, said) = sh_as(&fixture.mountpoint, 1000, 1000, "", "cd u; rm removed; mv moved new; chmod 777 changed");
    assert_eq!((code, said.as_str()), (0, ""));
    let kept =
        sh(fixture.scratch.path(), "stat -c '%n %U %a' b/u/removed b/u/moved b/u/changed; ls -A b/u | grep -vc wh");
    assert_eq!(kept, "b/u/removed root 644\nb/u/moved root 644\nb/u/changed root 644\n3\n");
    assert!(!fixture.at("u/removed").exists() && !fixture.at("u/moved").exists());
}
