//! The mount program of container engines: compared with fuse-overlayfs, and under podman. Programs
//! that are not installed are skipped.

use crate::mounting::overlays::{Overlay, listing};
use crate::mounting::status::Status;
use crate::mounting::{
    as_root, errno, eventually, finish, is_mounted, kill, nacre, needs, run, sh, sh_as, skip, text, unmount_by,
};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Two layers with something of everything.
const LAYERS: &str = "
    mkdir -p l2/d/sub l2/e/f l1/d l2/g l2/keep
    echo 1 > l1/d/a; echo 2 > l2/d/b; echo 3 > l2/e/f/x; ln l2/e/f/x l2/g/x2
    echo s > l2/suid; chown 5:7 l2/suid; chmod 4755 l2/suid
    echo r > l2/r; chown 1000:1000 l2/r; chmod 640 l2/r; setfattr -n user.k -v v l2/r
    ln -s r l2/lnk; mkfifo l2/ff; touch -d 2001-01-01 l2/old l2/d l2/keep; chmod 777 upper";

/// Changes by users. A change that fails does so with both programs.
const CHANGES: &str = "
    rm d/b; rm -r e; mkdir e; touch e/new; echo more >> g/x2; mkdir newdir; mv newdir nd2; mv d d2; echo l > lnk1; ln lnk1 lnk2
    chown 1005:1007 r; chmod 600 suid; ln -s nowhere sl; mkfifo p; mknod cdev c 1 3; mknod bdev b 7 9; mv old old2; rmdir keep
    setpriv --reuid 1002 --regid 1003 --clear-groups touch byuser 2>&1 | sed s/.*:// ; setfattr -n user.z -v 1 r; ls -n suid | cut -c1-20
    echo over > suid; rm lnk; mkdir lnk; rm ff; mv r ff; rmdir g 2>&1 || true; mv missing x 2>&1 || true";

fn installed(program: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program}")])
        .output()
        .is_ok_and(|output| output.status.success());
    found || skip(program, &format!("{program} is not installed"))
}

/// Returns whether a line is a whiteout, or an attribute by which a directory hides lower ones.
fn is_mark(line: &str) -> bool {
    line.contains("/.wh.") || line.starts_with("# file") || line.is_empty() || line.starts_with("user.fuseoverlayfs.")
}

/// Runs the same script on both programs; returns its output, the visible tree, and the content of
/// the upper directory.
fn beside_fuse_overlayfs(words: &str) -> [(String, Vec<String>, Vec<String>); 2] {
    let theirs = Overlay::bare(LAYERS);
    let said = run(
        "fuse-overlayfs",
        ["-o", &format!("{},{words}", theirs.words()), theirs.fixture.mountpoint.to_str().unwrap()],
    );
    assert!(said.status.success(), "{}", text(&said.stderr));
    let ours = Overlay::mounted(LAYERS, words);
    [theirs, ours].map(|mut overlay| {
        let said = overlay.sh(CHANGES);
        let seen = listing(&overlay.fixture.mountpoint);
        if is_ours(&overlay) {
            overlay.fixture.unmount();
        } else {
            // What was closed last may count as open for a moment.
            unmount_by("umount", &[overlay.fixture.mountpoint.as_ref()]);
        }
        let upper = listing(&overlay.upper).into_iter().filter(|line| !is_mark(line)).collect();
        (said, seen, upper)
    })
}

fn is_ours(overlay: &Overlay) -> bool {
    run(nacre(), ["status".as_ref(), overlay.fixture.mountpoint.as_os_str()]).status.success()
}

#[test]
fn trees_come_out_as_with_fuse_overlayfs() {
    needs!(as_root() && installed("fuse-overlayfs"));
    for words in ["", "volatile,noacl", "squash_to_root", "uidmapping=0:1000:10:1000:0:1,gidmapping=0:1000:10:1000:0:1"]
    {
        let [theirs, ours] = beside_fuse_overlayfs(words);
        assert_eq!(theirs.0, ours.0, "{words}");
        assert_eq!(theirs.1, ours.1, "{words}");
        assert_eq!(theirs.2, ours.2, "{words}: the upper directory");
    }
}

#[test]
fn nothing_of_ours_is_in_the_upper_directory() {
    needs!(as_root());
    let mut overlay = Overlay::mounted(LAYERS, "");
    overlay.sh(CHANGES);
    // A long name that is hidden, a directory in place of one, and a hard link of which one name is
    // copied.
    overlay.sh("mkdir -p x/y; mv d2 x/y/d3; rm -r x");
    overlay.fixture.unmount();
    let found = sh(
        &overlay.upper,
        "find . -name '.wh*'; find . -name '*nacre*'; getfattr -Rh -d -m '^user' --absolute-names . | grep -v '^user.[kz]=' | grep = || true",
    );
    assert_eq!(found, "");
    let work = sh(&overlay.work, "find . -mindepth 1 | sort");
    assert_eq!(work, "./links\n./work\n");
    assert_eq!(fs::metadata(overlay.work.join("work")).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn layers_alone_are_read_only() {
    needs!(as_root());
    let overlay = Overlay::bare(LAYERS);
    let (mountpoint, [first, second]) = (overlay.fixture.mountpoint.clone(), overlay.lower.clone());
    let words = format!("lowerdir={}:{}", first.display(), second.display());
    // In the background, as engines call it: the mount is there when the program returns, and
    // nothing is said.
    let said = run(nacre(), ["fuse-overlayfs", "-o", &words, mountpoint.to_str().unwrap()]);
    assert!(said.status.success() && said.stderr.is_empty(), "{}", text(&said.stderr));
    assert_eq!(fs::read(mountpoint.join("d/b")).unwrap(), b"2\n");
    assert_eq!(errno(fs::write(mountpoint.join("new"), "x")), 30);
    assert_eq!(errno(fs::remove_file(mountpoint.join("suid"))), 30);
    unmount_by("fusermount3", &["-u".as_ref(), mountpoint.as_ref()]);
    assert!(!is_mounted(&mountpoint));
}

#[test]
fn owners_are_shifted_both_ways() {
    needs!(as_root());
    let overlay =
        Overlay::mounted(&format!("{LAYERS}; chmod 777 upper"), "uidmapping=0:100000:1000,gidmapping=0:200000:1000");
    let owner = |path: &Path| fs::symlink_metadata(path).map(|data| (data.uid(), data.gid())).unwrap();
    let mountpoint = &overlay.fixture.mountpoint;
    assert_eq!(owner(&mountpoint.join("suid")), (100_005, 200_007));
    assert_eq!(owner(&mountpoint.join("r")), (65_534, 65_534), "outside of the ranges");
    let (code, said) = sh_as(
        mountpoint,
        100_003,
        200_004,
        "",
        "umask 022; mkdir dir && touch dir/file && chmod 600 dir/file && ls -n dir",
    );
    assert_eq!(code, 0, "{said}");
    assert_eq!(owner(&overlay.upper.join("dir/file")), (3, 4));
    assert_eq!(owner(&mountpoint.join("dir/file")), (100_003, 200_004));
    std::os::unix::fs::chown(mountpoint.join("suid"), Some(100_009), None).unwrap();
    assert_eq!(owner(&overlay.upper.join("suid")), (9, 7));
    assert_eq!(errno(std::os::unix::fs::chown(mountpoint.join("suid"), Some(5), None)), 22, "nobody to give it to");
    // ACLs name the same people.
    overlay.sh("setfacl -m u:100008:r suid; getfacl -nc suid | grep ^user:100008:r--");
    sh(&overlay.upper, "getfacl -nc suid | grep ^user:8:r--");
}

#[test]
fn owners_and_modes_are_kept_in_attributes() {
    needs!(as_root());
    let mut overlay = Overlay::mounted(LAYERS, "xattr_permissions=2");
    let changes = "
        umask 022; touch new; chown 44:55 new; chmod 4751 new; mknod dev c 1 3; chown 3:4 dev; mkfifo pipe; chmod 600 d/a; chown 7:7 d; chmod 1777 d
        ln -s a sl; setpriv --reuid 5 --regid 7 --clear-groups touch d/byuser; mkdir -m 2775 sg; chgrp 9 sg; chmod g+s sg; touch sg/f
        rm suid; ! setfattr -n user.containers.override_stat -v 0:0:777 new 2>/dev/null";
    overlay.sh(changes);
    let seen = listing(&overlay.fixture.mountpoint);
    for line in [
        "./new f 4751 44:55 1 0 ",
        "./dev c 644 3:4 1 0 ",
        "./pipe p 644 0:0 1 0 ",
        "./d d 1777 7:7",
        "./d/a f 600 0:0 1 2 ",
        "./d/byuser f 644 5:7 1 0 ",
        "./sg/f f 644 0:9 1 0 ",
    ] {
        assert!(seen.iter().any(|seen| seen == line), "{line} in {seen:#?}");
    }
    assert!(!seen.iter().any(|line| line.contains("override_stat")));
    overlay.fixture.unmount();
    // Nothing below needs any right to be what it shows as.
    let below = sh(
        &overlay.upper,
        "find . -type f -printf '%p %m %U:%G\\n' | sort; getfattr --absolute-names --only-values -n user.containers.override_stat new dev",
    );
    for line in ["./new 600 0:0", "./dev 600 0:0", "44:55:4751:file", "3:4:644:char-1-3"] {
        assert!(below.contains(line), "{line} in {below}");
    }
    // As a layer below, it is recognised by its root.
    let merged = overlay.fixture.directory("again");
    let words = format!("lowerdir={}", overlay.upper.display());
    overlay.fixture.start(&["fuse-overlayfs", "-o", &words], "overlay".as_ref(), &merged);
    let again = listing(&merged);
    for line in ["./new f 4751 44:55 1 0 ", "./dev c 644 3:4 1 0 ", "./d d 1777 7:7"] {
        assert!(again.iter().any(|seen| seen == line), "{line} in {again:#?}");
    }
    assert!(!merged.join("suid").exists(), "a whiteout stays one");
}

#[test]
fn an_ordinary_user_in_a_namespace_of_his_own() {
    needs!(as_root() && installed("unshare"));
    let overlay = Overlay::bare(&format!("{LAYERS}; chown -hR 65534:65534 l1 l2 upper work mount"));
    let program = overlay.fixture.scratch.path().join("fuse-overlayfs");
    assert!(run("cp", [nacre(), program.clone()]).status.success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!(
        "unshare --user --map-root-user --mount sh -ec '
            {} -o {} mount
            cd mount; rm -r d; mkdir d; echo x > d/new; rm suid; echo more >> r; ln r r2; cd ..
            {0} --version > /dev/null
            umount mount'",
        program.display(),
        overlay.words()
    );
    let (code, said) =
        sh_as(overlay.fixture.scratch.path(), 65_534, 65_534, "", &format!("XDG_RUNTIME_DIR=$PWD/work {script}"));
    if said.contains("unshare failed") || said.contains("unshare: ") {
        skip("userns", &said);
        return;
    }
    assert_eq!((code, said.as_str()), (0, ""));
    let upper = sh(&overlay.upper, "find . -printf '%p %y %n\\n' | sort");
    assert_eq!(upper, ". d 3\n./d d 2\n./d/new f 1\n./r f 2\n./r2 f 2\n./suid c 1\n");
    assert_eq!(fs::metadata(overlay.upper.join("suid")).unwrap().rdev(), 0);
    assert_eq!(sh(&overlay.upper, "getfattr --absolute-names --only-values -n user.overlay.opaque d"), "y");
}

/// `/` as a layer, and a directory that contains all others: neither the mount point nor the upper
/// directory is visible in it, and nothing hangs.
#[test]
fn a_layer_round_its_own_mount_point() {
    needs!(as_root() && installed("unshare"));
    for (rootless, lower) in [(false, "/"), (false, "."), (true, "/"), (true, ".")] {
        let overlay = Overlay::bare("mkdir own; echo 1 > own/file; chown -hR 65534:65534 .");
        let place = overlay.fixture.scratch.path();
        let program = place.join("fuse-overlayfs");
        assert!(run("cp", [nacre(), program.clone()]).status.success());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let there = if lower == "/" { format!("mount{}", place.display()) } else { "mount".to_owned() };
        // An ordinary user's copies of directories that are root's cannot be made, in any program.
        let change = if rootless && lower == "/" {
            "true"
        } else {
            "echo 2 >> own/file; mkdir mount; echo new > mount/new; cat own/file mount/new"
        };
        let script = format!(
            "{}/fuse-overlayfs -o lowerdir={lower},upperdir=upper,workdir=work mount
             ls mount > /dev/null; cd {there}; ls; {change}; cd {}; timeout 20 find mount -maxdepth 2 > /dev/null 2>&1 || test $? = 1; umount mount",
            place.display(),
            place.display()
        );
        let script = if rootless {
            format!("unshare --user --map-root-user --mount sh -ec '{script}'")
        } else {
            format!("sh -ec '{script}'")
        };
        let id = if rootless { 65_534 } else { 0 };
        let (code, said) = sh_as(place, id, id, "", &format!("XDG_RUNTIME_DIR=$PWD/work timeout 60 {script}"));
        if said.contains("unshare failed") || said.contains("unshare: ") {
            skip("userns", &said);
            return;
        }
        let seen = "fuse-overlayfs\nl1\nl2\nown\nsource\n";
        let changed = if change == "true" { "" } else { "1\n2\nnew\n" };
        assert_eq!((code, said), (0, format!("{seen}{changed}")), "{rootless} {lower}");
        assert_eq!(fs::read(place.join("own/file")).unwrap(), b"1\n", "the layer stays as it is");
        assert_eq!(fs::read_dir(place.join("mount")).unwrap().count(), 0);
    }
}

#[test]
fn what_a_killed_daemon_leaves_is_cleared_away() {
    needs!(as_root());
    let mut overlay = Overlay::mounted(&format!("{LAYERS}; truncate -s 300M l2/big"), "");
    overlay.sh("head -c 50000000 /dev/urandom > new; rm d/b");
    kill(overlay.fixture.pid(), rustix::process::Signal::KILL);
    assert_eq!(overlay.fixture.ended(), None);
    fs::write(overlay.work.join("work/leftover"), "half a copy").unwrap();
    // The dead mount is taken away, and the new one stands in its place.
    overlay.mount("");
    assert_eq!(overlay.sh("ls d; stat -c %s new"), "a\nsub\n50000000\n");
    assert_eq!(fs::read_dir(overlay.work.join("work")).unwrap().count(), 0);
    overlay.fixture.unmount();
}

#[test]
fn a_mount_that_is_just_ending_is_waited_for() {
    needs!(as_root());
    let mut overlay = Overlay::mounted(LAYERS, "");
    let second = overlay.fixture.directory("second");
    let mut waiting = Command::new(nacre())
        .args(["fuse-overlayfs", "-o", &overlay.words(), second.to_str().unwrap()])
        .spawn()
        .expect("the program");
    eventually("it is tried", || fs::read_to_string(format!("/proc/{}/stat", waiting.id())).is_ok());
    assert!(!is_mounted(&second));
    overlay.fixture.unmount();
    assert!(waiting.wait().unwrap().success());
    assert_eq!(fs::read(second.join("d/a")).unwrap(), b"1\n");
    unmount_by("umount", &[second.as_ref()]);
}

#[test]
fn what_cannot_be_mounted_is_said() {
    needs!(as_root());
    let overlay = Overlay::bare(&format!("{LAYERS}; mkdir mount/d"));
    let place = overlay.fixture.scratch.path();
    let mountpoint = overlay.fixture.mountpoint.to_str().unwrap();
    for (words, said) in [
        ("lowerdir=l1,upperdir=upper", "workdir="),
        ("lowerdir=missing,upperdir=upper,workdir=work", "missing"),
        ("lowerdir=l1,upperdir=upper,workdir=missing", "missing"),
        ("lowerdir=l1,upperdir=upper,workdir=/dev/shm", "same mount"),
        ("lowerdir=l1,upperdir=upper,workdir=upper/d", "upper/d"),
        ("lowerdir=l1:l1", "twice"),
        ("lowerdir=l1/d:l1", "inside"),
        ("lowerdir=mount/d", "lies inside the mount point"),
        ("lowerdir=l1,uidmapping=1:2", "uidmapping"),
    ] {
        let output = finish(Command::new(nacre()).args(["fuse-overlayfs", "-o", words, mountpoint]).current_dir(place));
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(1) && error.contains(said), "{words}: {error}");
        assert!(!is_mounted(&overlay.fixture.mountpoint), "{words}");
    }
}

#[test]
fn the_kernel_reads_and_writes_in_our_place() {
    needs!(as_root());
    let overlay = Overlay::mounted(LAYERS, "");
    let status = Status::of(&overlay.fixture.mountpoint);
    if !status.passthrough() {
        skip("passthrough", "this kernel has no passthrough");
        return;
    }
    // The first write to a file of a layer copies it, and what is read of one may have to follow
    // that; from then on nothing is asked.
    overlay.sh("echo more >> d/b");
    let requests = crate::mounting::status::requests_of(&overlay.fixture.mountpoint, || {
        overlay.sh("head -c 1000000 /dev/zero > new; cat new d/b > /dev/null; echo more >> d/b");
    });
    assert!(!requests.contains_key("read") && !requests.contains_key("write"), "{requests:?}");
}

/// The beginning of a script for podman with its storage in the directory at hand, `$1` being the
/// mount program and `$2` a word for it.
const PODMAN: &str = r#"
    set -e
    [ -e /sys/fs/cgroup/cgroup.controllers ] || echo "no single tree of control groups" >&2
    P="podman --root $PWD/$2 --runroot $PWD/run-$2 --storage-driver overlay --cgroup-manager cgroupfs --log-level error --storage-opt overlay.mount_program=$1"
    LIMITS="--ulimit nofile=1024:1024 --ulimit nproc=1000:1000"
    RUN="$P run --network none --cgroups disabled $LIMITS"
    layers() { # the layers of an image: everything but times
        $P save -q -o "$1.tar" "$2"; mkdir "$1.d"; tar -C "$1.d" -xf "$1.tar"
        for layer in $(tr ',' '\n' < "$1.d/manifest.json" | grep -o '[^"/]*\(/layer\)\?\.tar'); do
            echo "layer"; tar -tv --numeric-owner -f "$1.d/$layer" | sed -E 's/ +[0-9]{4}-[0-9-]+ [0-9:]+ / /' | tr -s ' ' | sort
        done > "$1"
    }
    $P import -q base.tar base:1 > /dev/null
    $RUN --name changes base:1 /bin/sh -ec '
        rm -r /usr/share; mkdir /usr/share; echo x > /usr/share/new; chmod 700 /bin; ln /etc/passwd /etc/linked; mv /var /moved
        head -c 100000 /dev/zero > /bin/zeros; chown 12:34 /etc/group; rm /etc/gone; touch /tmp/$(busybox printf %0250d 1); busybox head -1 /proc/mounts'
    $P diff changes | cut -c1-60 | sort > "$2.diff"
    $P commit -q changes changed:1 > /dev/null
    layers "$2.changed" changed:1
    printf 'FROM base:1\nRUN echo new > /etc/new && rm /usr/share/hello && mkdir /usr/share/hello && chmod 600 /etc/passwd\nRUN rm -r /usr/share\n' > Containerfile
    $P build -q $LIMITS --network host --isolation chroot -t built:1 . > /dev/null
    layers "$2.built" built:1
    $RUN --rm built:1 /bin/sh -ec 'cat /etc/new; ! test -e /usr/share; stat -c %a /etc/passwd'
    $RUN --rm --uidmap 0:100:1000 --gidmap 0:100:1000 changed:1 /bin/sh -ec 'stat -c %u:%g /etc/group /etc/passwd; touch /tmp/a; stat -c %u:%g /tmp/a'
    $P start -a changes > again 2>&1 || true
    $P rm -f changes > /dev/null
    # What cleans up after a container runs beside podman.
    for attempt in $(seq 1000); do grep -q "fuse.fuse-overlayfs" /proc/mounts || break; sleep 0.02; done
    grep -c "fuse.fuse-overlayfs" /proc/mounts || true
"#;

/// Expected output of the containers.
const SAID: &str = "fuse-overlayfs / fuse.fuse-overlayfs";

/// An image of nothing but busybox.
fn image(place: &Path) {
    let script = "mkdir -p base/bin base/etc base/tmp base/root base/usr/share base/var
        cp /bin/busybox base/bin/; for name in sh ls cat echo rm mkdir touch chmod chown ln mv stat head test; do ln -s busybox base/bin/$name; done
        echo root:x:0:0:root:/root:/bin/sh > base/etc/passwd; echo root:x:0: > base/etc/group
        chmod 1777 base/tmp; echo hello > base/usr/share/hello; echo gone > base/etc/gone; tar -C base -cf base.tar .; rm -r base";
    sh(place, script);
}

/// Runs podman with a mount program, everything in namespaces that end with it; returns its output.
/// As root, or as nobody.
fn podman(place: &Path, program: &Path, word: &str, rootless: bool) -> Option<String> {
    fs::write(place.join("podman.sh"), PODMAN).unwrap();
    fs::write(place.join("subid"), "nobody:200000:65536\n").unwrap();
    let user = if rootless {
        "setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=$PWD XDG_RUNTIME_DIR=$PWD"
    } else {
        ""
    };
    // A copy of a mount keeps its process from ending: those of other tests go from this namespace
    // at once, some with the one that they lie in. /dev/null is one of this namespace: crun gives the standard
    // streams of a container to its user.
    let script = format!(
        "mkdir -p null; mount -t tmpfs none null; mknod -m 666 null/null c 1 3; mount --bind null/null /dev/null
         awk '$2 ~ /\\/nacre-test\\./ {{ print $2 }}' /proc/mounts | while read -r mount; do umount -l \"$mount\" 2>/dev/null || true; done
         [ -e /sys/fs/cgroup/cgroup.controllers ] || {{ umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; }}
         touch /etc/subuid /etc/subgid; mount --bind subid /etc/subuid; mount --bind subid /etc/subgid
         {user} sh podman.sh {} {word}",
        program.display()
    );
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
        "sh",
        "-ec",
        &script,
    ]);
    let output = finish(command.current_dir(place).env("LC_ALL", "C").env_remove("XDG_RUNTIME_DIR"));
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    if !output.status.success() {
        println!("podman with {} fails: {said}{errors}", program.display());
        return None;
    }
    Some(said)
}

/// Runs podman with our program, and with fuse-overlayfs: the output has to be the same.
fn under_podman(rootless: bool) {
    if !as_root()
        || !["podman", "crun", "unshare", "fuse-overlayfs", "busybox"].into_iter().all(installed)
        || (rootless && !installed("newuidmap"))
    {
        return;
    }
    let scratch = crate::mounting::scratch();
    let place = scratch.path();
    image(place);
    if rootless {
        std::os::unix::fs::chown(place, Some(65_534), Some(65_534)).unwrap();
    }
    // What does not work with the program that podman knows cannot be asked of another one:
    // machines without the right to limit processes, or to make namespaces.
    let Some(theirs) = podman(place, &PathBuf::from("/usr/bin/fuse-overlayfs"), "theirs", rootless) else {
        skip("podman", "podman does not work here with fuse-overlayfs either");
        return;
    };
    let program = place.join("fuse-overlayfs");
    assert!(run("cp", [nacre(), program.clone()]).status.success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let ours = podman(place, &program, "ours", rootless).expect("podman with our program");
    assert!(ours.contains(SAID), "{ours}");
    let owners = |said: &str| said.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(owners(&ours), owners(&theirs));
    for result in ["diff", "changed", "built"] {
        let read = |word: &str| fs::read_to_string(place.join(format!("{word}.{result}"))).unwrap();
        assert!(!read("ours").is_empty());
        assert_eq!(read("ours"), read("theirs"), "{result}");
    }
    let changed = fs::read_to_string(place.join("ours.changed")).unwrap();
    for line in ["usr/share/.wh.hello", "etc/.wh.gone", ".wh.var", "etc/linked", "moved/"] {
        assert!(changed.contains(line), "{line} in {changed}");
    }
}

#[test]
fn podman_as_root() {
    under_podman(false);
}

#[test]
fn podman_as_an_ordinary_user() {
    under_podman(true);
}
