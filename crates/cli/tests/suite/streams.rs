//! Snapshots travel from pool to pool: the received content is the sent one, whatever is cut or
//! killed on the way, and unmodified programs replicate by it.

use crate::mounting::{as_root, eventually, finish, nacre, needs, pools::Yard, skip, text};
use rustix::process::Signal;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

/// Returns whether a program is installed; if not, prints what is skipped.
fn has(program: &str) -> bool {
    let found = Command::new("which").arg(program).stdout(Stdio::null()).status().is_ok_and(|status| status.success());
    found || crate::mounting::skip(program, "scripts/setup installs it")
}

/// Two pools, and the program under its names: `a` is sent from, `b` received into.
struct Pair {
    yard: Yard,
    a: String,
    b: String,
}

impl Pair {
    fn new() -> Pair {
        Pair::sized("300M", "300M")
    }

    fn sized(first: &str, second: &str) -> Pair {
        let yard = Yard::new();
        fs::create_dir(yard.path("bin")).unwrap();
        for name in ["zfs", "zpool", "nacre"] {
            std::os::unix::fs::symlink(nacre(), yard.path("bin").join(name)).unwrap();
        }
        let (a, b) = (yard.name("sa"), yard.name("sb"));
        for (name, size, place) in [(&a, first, "a"), (&b, second, "b")] {
            let (file, at) = (yard.path(&format!("{place}.img")), yard.path(place));
            let words = ["pool", "create", "--size", size, "-m", at.to_str().unwrap(), "-O", "acltype=posix"];
            yard.nacre(&[&words[..], &[name, file.to_str().unwrap()]].concat());
        }
        Pair { yard, a, b }
    }

    fn shell(&self, script: &str) -> Command {
        let command = self.yard.command("bash");
        let mut shell = Command::new("bash");
        shell.arg("-euc").arg(format!("set -o pipefail\n{script}")).current_dir(self.yard.place.path());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                shell.env(name, value);
            }
        }
        let path = format!("{}:{}", self.yard.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        shell.env("PATH", path).env("A", &self.a).env("B", &self.b).env("HOME", self.yard.place.path());
        shell
    }

    /// Runs a script that has to succeed; returns its output.
    fn sh(&self, script: &str) -> String {
        let output = finish(&mut self.shell(script));
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{script}\n{said}");
        said.trim_end().to_owned()
    }

    /// Runs a script that has to fail; returns its output.
    fn fails(&self, script: &str) -> String {
        let output: Output = finish(&mut self.shell(script));
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!output.status.success(), "{script}\n{said}");
        said
    }

    /// Returns all observable properties of the files below a directory.
    fn tree(&self, at: &str) -> String {
        self.sh(&format!(
            r"cd {at}; export LC_ALL=C
            find . -printf '%P %i %n %m %U %G %s %y %l %T@ %A@ %C@\n' | sort
            find . -type f -print0 | sort -z | xargs -0r md5sum
            getfattr -Rhd -m - . 2>/dev/null | sort | grep -v '^#' || true
            find . -type b -o -type c -exec stat -c '%n %t %T' {{}} +
            getfacl -Rpn . 2>/dev/null | sort"
        ))
    }

    #[track_caller]
    fn same(&self, one: &str, other: &str) {
        let (one, other) = (self.tree(one), self.tree(other));
        assert!(one == other, "{}", self.difference(&one, &other));
    }

    fn difference(&self, one: &str, other: &str) -> String {
        fs::write(self.yard.path("one"), one).unwrap();
        fs::write(self.yard.path("other"), other).unwrap();
        text(&finish(&mut self.shell("diff one other | head -40 || true")).stdout)
    }

    fn check(&self) {
        for pool in [&self.a, &self.b] {
            let said = self.yard.told(&["pool", "check", pool]);
            assert!(said.starts_with("no problems: "), "{said}");
        }
    }

    /// A file system with files of all kinds.
    fn fill(&self) {
        self.sh(r"nacre fs create $A/home
            cd a/home
            mkdir -p d/e; seq 1 40000 > d/numbers; ln d/numbers linked; ln -s nowhere link
            head -c 3000000 /dev/urandom > big; truncate -s 40M hole; echo end >> hole
            mkfifo fifo; mknod null c 1 3; printf x > $'bad\xff\nname'; : > empty
            setfattr -n user.short -v v big; setfattr -n user.long -v $(head -c 20000 /dev/zero | tr '\0' x) big
            setfattr -n trusted.t -v 1 d; setfacl -m u:1234:rw big; setfacl -d -m g:55:r d
            chmod 4755 big; chown 12:34 linked; touch -d '1971-02-03 04:05:06.789012345' d/e
            for n in $(seq 1 300); do echo $n > d/e/f$n; done
            nacre fs snapshot $A/home@a");
    }

    fn change(&self) {
        self.sh(r"cd a/home
            mv d/e/f1 d/moved; rm d/e/f2 linked; echo more >> d/numbers; chmod 700 d; setfattr -x user.short big
            dd if=/dev/urandom of=big bs=4096 seek=100 count=3 conv=notrunc status=none
            head -c 5000000 /dev/urandom > another; truncate -s 10M hole; mkdir new; cp d/numbers new; rmdir $(mktemp -d ./XXXX); mv $'bad\xff\nname' $'\xfe'
            nacre fs snapshot $A/home@b");
    }
}

#[test]
fn what_arrives_is_what_was_sent() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.sh("nacre fs send $A/home@a | nacre fs receive $B/home");
    pair.same("a/home", "b/home");
    // Somebody is inside, and sees what has come.
    pair.change();
    pair.sh("nacre fs send -c -i @a $A/home@b > stream; (cd b/home/d; nacre fs receive $B/home < ../../../stream; test -e moved)");
    pair.same("a/home", "b/home");
    for word in ["guid", "creation"] {
        let of = |pool: &str| pair.sh(&format!("nacre fs get -Hp -o value {word} ${pool}/home@b"));
        assert_eq!(of("A"), of("B"), "{word}");
    }
    pair.check();
    // Back again, over an import, with an older one between.
    pair.sh("nacre pool export $B; nacre pool import -d b.img $B; cd b/home; rm -r d/e; echo 1 > mine; nacre fs snapshot $B/home@c");
    pair.sh(
        "nacre fs send -I @a $B/home@c > stream; nacre fs rollback -r $A/home@a; nacre fs receive $A/home < stream",
    );
    pair.same("a/home", "b/home");
    assert_eq!(pair.sh("nacre fs list -H -t snapshot -o name $A/home | wc -l"), "3");
    pair.check();
}

/// A dentry of a name that is gone would hold the inode that another name led to, when that is removed.
#[test]
fn names_that_a_stream_removes_keep_no_room() {
    needs!(as_root());
    if nacre_sys::kernel_version::kernel_version() < (6, 18) {
        skip("kernel", "it prunes no dentries on request");
        return;
    }
    let pair = Pair::new();
    pair.sh("nacre fs create $A/s; head -c 1M /dev/urandom > a/s/one; ln a/s/one a/s/two; mkdir -p a/s/d/e
        nacre fs snapshot $A/s@1; nacre fs send $A/s@1 | nacre fs receive $B/t; find b/t -ls
        rm a/s/two; mv a/s/d/e a/s/e; nacre fs snapshot $A/s@2
        nacre fs send -i @1 $A/s@2 | nacre fs receive $B/t; nacre fs destroy $B/t@1; nacre fs destroy $B/t@2
        rm -r b/t/one b/t/d b/t/e");
    eventually("the room of removed inodes is free", || {
        pair.sh("nacre pool sync $B; nacre fs userspace -Hpn -o objused $B/t") == "1"
    });
}

/// Properties of `receive -o` and `-x` hold for the whole tree, whatever the sender set below the
/// top.
#[test]
fn what_is_set_for_a_received_tree_is_inherited_below() {
    needs!(as_root());
    let pair = Pair::new();
    pair.sh(r"nacre fs create -p $A/top/low/lower; nacre fs set readonly=off compression=zstd quota=100M $A/top/low
        nacre fs set mountpoint=$PWD/elsewhere compression=lz4 $A/top/low/lower; nacre fs snapshot -r $A/top@one
        nacre fs send -R $A/top@one | nacre fs receive -o rdonly=on -o mountpoint=$PWD/copy -x compress -o quota=150M $B/to");
    let get = |of: &str, what: &str| pair.sh(&format!("nacre fs get -H -o value,source {what} $B/to{of}"));
    for of in ["/low", "/low/lower"] {
        assert!(get(of, "readonly").starts_with("on\tinherited from"), "{}", get(of, "readonly"));
        assert!(get(of, "mountpoint").contains(&format!("copy{of}\tinherited from")), "{}", get(of, "mountpoint"));
        assert!(!get(of, "compression").contains("received"), "{}", get(of, "compression"));
    }
    // What is not inherited is what the sender has.
    assert_eq!(get("", "quota"), "150M\tlocal");
    assert_eq!(get("/low", "quota"), "100M\treceived");
    assert!(pair.fails("touch copy/low/new").contains("Read-only"));
    // So it is with what comes later.
    pair.sh(
        r"nacre fs snapshot -r $A/top@two; nacre fs send -R -I @one $A/top@two | nacre fs receive -o readonly=on $B/to",
    );
    assert!(get("/low", "readonly").starts_with("on\tinherited from"));
}

#[test]
fn trees_travel_with_properties_clones_and_holds() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.sh(r"nacre fs create -o compression=zstd -o user:x=1 $A/home/low
        nacre fs create -p $A/home/gone/below
        echo low > a/home/low/file; mkdir a/home/low/below; nacre fs snapshot -r $A/home@r; nacre fs clone $A/home@r $A/home/twin
        echo twin > a/home/twin/twin; nacre fs snapshot $A/home/low@mine; nacre fs snapshot -r $A/home@s
        nacre fs hold keep $A/home@s
        nacre fs send -R -h $A/home@s > stream
        nacre fs create $B/in; nacre fs receive -d -u $B/in < stream; nacre fs mount -a");
    let listed = |of: &str| {
        pair.sh(&format!("cd {of}; nacre fs list -r -H -t all -o name $(test {of} = a && echo $A/home || echo $B/in/home) | sed 's,.*home,,'"))
    };
    assert_eq!(listed("a"), listed("b"));
    pair.same("a/home/low", "b/in/home/low");
    assert_eq!(pair.sh("cat b/in/home/twin/twin b/in/home/low/file"), "twin\nlow");
    assert_eq!(pair.sh("nacre fs get -H -o value origin $B/in/home/twin | sed s/.*in/in/"), "in/home@r");
    assert_eq!(
        pair.sh("nacre fs get -H -o value,source compression,user:x $B/in/home/low"),
        "zstd\treceived\n1\treceived"
    );
    assert_eq!(pair.sh("nacre fs holds -H $B/in/home@s | cut -f2"), "keep");
    pair.sh("nacre fs set compression=off $B/in/home/low; nacre fs inherit -S compression $B/in/home/low");
    assert_eq!(pair.sh("nacre fs get -H -o value,source compression $B/in/home/low"), "zstd\treceived");
    // What the sender has no more goes by force.
    pair.sh(r"nacre fs destroy $A/home/low@mine; nacre fs destroy -r $A/home/gone; nacre fs snapshot -r $A/home@t
        nacre fs create $B/in/home/mine; nacre fs send -R -h -I @s $A/home@t > stream
        nacre fs receive -F -h -d -u $B/in < stream; nacre fs list $B/in/home/mine; nacre fs destroy $B/in/home/mine");
    assert_eq!(listed("a"), listed("b"));
    // Something new without the snapshot is not passed over by itself.
    pair.sh("nacre fs create -p $A/home/new/below; nacre fs snapshot $A/home/new/below@t");
    assert!(pair.fails("nacre fs send -R $A/home@t > /dev/null").contains("home/new' has no snapshot '@t'"));
    assert!(pair.fails("nacre fs send -s $A/home@t > /dev/null").contains("needs -R"));
    let said = pair.sh("nacre fs send -V -s -R $A/home@t | nacre fs stream dump");
    assert!(said.contains("home/new' does not have the snapshot") && !said.contains("below@t"), "{said}");
    // Properties of what is there change with the snapshot; a limit that does not fit is left out.
    pair.sh(r"nacre fs set quota=200M user:x=2 $A/home/low; nacre fs snapshot $A/home/low@u
        nacre fs hold keep $A/home/low@u; nacre fs send -p -h -i @t $A/home/low@u > stream
        head -c 2M /dev/urandom > a/home/twin/twin; nacre fs snapshot $A/home/twin@u
        nacre fs set quota=40M $A/home/twin; nacre fs send -p -i @t $A/home/twin@u > twin.st
        nacre fs receive -h -x quota $B/in/home/low < stream");
    assert_eq!(pair.sh("nacre fs get -H -o value quota,user:x $B/in/home/low"), "none\n2");
    assert_eq!(pair.sh("nacre fs holds -H $B/in/home/low@u"), "");
    pair.sh("nacre fs mount -a; nacre fs set reservation=60M $B/in/home/twin");
    let said = pair.sh("nacre fs receive $B/in/home/twin < twin.st");
    assert!(said.contains("cannot set property 'quota'"), "{said}");
    pair.sh("nacre fs list $B/in/home/twin@u; nacre fs set reservation=none $B/in/home/twin");
    // -M unmounts for the moment what is in use below; nothing else does.
    let said = pair.sh(r"nacre fs send $A/home/low@t | nacre fs receive $B/over; nacre fs create $B/over/below
        (cd b/over/below; exec sleep 600) & user=$!; trap 'kill $user' EXIT
        until test $(readlink /proc/$user/cwd) = $PWD/b/over/below; do sleep 0.1; done
        nacre fs send -i @t $A/home/low@u > stream; ! nacre fs receive $B/over < stream
        ! nacre fs receive -F $B/over < stream
        nacre fs receive -M $B/over < stream; nacre fs unmount $B/over/below");
    assert!(said.contains("busy") || said.contains("in use"), "{said}");
    pair.sh("nacre fs destroy $B/over/below");
    pair.same("a/home/low", "b/over");
    pair.check();
}

#[test]
fn names_follow_those_of_the_sender() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.sh(r"nacre fs create $A/top
        for name in x y old old/below gone moves stays; do nacre fs create $A/top/$name; echo $name > a/top/$name/file; done
        nacre fs snapshot $A/top/x@mine; nacre fs snapshot -r $A/top@one; nacre fs snapshot -r $A/top@two; nacre fs snapshot -r $A/top@three
        nacre fs send -R $A/top@three | nacre fs receive $B/to");
    let here = |of: &str| {
        let (pool, top) = if of == "a" { ("$A", "top") } else { ("$B", "to") };
        let list = format!("nacre fs list -r -H -p -t filesystem,snapshot -o name,guid {pool}/{top}");
        let listed = pair.sh(&format!(
            "{list} | sed 's,^[^/@]*/[^/@\t]*,,' | awk -F '\t' '{{ print $1, $1 ~ /@/ ? $2 : 0 }}' | sort"
        ));
        listed + "\n" + &pair.sh(&format!("cd {of}/{top}; find . -type f | sort | xargs grep -H ."))
    };
    assert_eq!(here("a"), here("b"));
    // Two change their names, one takes the name of one that goes, one moves below one that has
    // another name now, one below one that is new, and a new one has its name. Snapshots do alike.
    pair.sh(r"cd a/top; to() { nacre fs rename $A/top/$1 $A/top/$2; }
        to x swap; to y x; to swap y
        nacre fs destroy -r $A/top/gone; to old gone; to moves gone/moved
        to stays away; nacre fs create $A/top/stays; nacre fs create $A/top/stays/new; to away stays/new/kept; echo again > stays/file
        nacre fs rename -r $A/top@one tmp; nacre fs rename -r $A/top@two one; nacre fs rename -r $A/top@tmp two
        nacre fs destroy $A/top/y@mine; nacre fs rename $A/top/x@two mine
        echo more >> x/file; echo more >> gone/below/file; echo more >> stays/new/kept/file
        nacre fs snapshot -r $A/top@four
        nacre fs send -R -I @three $A/top@four > $OLDPWD/stream");
    // In the way is what was made here, and what the sender has no more, unless that is given up.
    let before = here("b");
    let said = pair.fails("nacre fs receive $B/to < stream");
    assert!(said.contains("that the sender has given to another"), "{said}");
    assert_eq!(before, here("b"));
    // Cut at some position, it is resumed.
    let length = fs::metadata(pair.yard.path("stream")).unwrap().len();
    let said = pair.fails(&format!("head -c $(({length} / 3 * 2)) stream | nacre fs receive -F $B/to"));
    assert!(said.contains("incomplete stream"), "{said}");
    assert_ne!(pair.sh("nacre fs list -r -H -t snapshot -o name $B/to | grep -c four"), "0");
    pair.sh("nacre fs receive -F $B/to < stream");
    assert_eq!(here("a"), here("b"));
    pair.check();
    // Without -F names follow as well, and nothing goes.
    pair.sh(r"for name in $(nacre fs list -r -H -o name $B/to | tac); do nacre fs unmount $name; nacre fs rollback $name@four; done
        nacre fs create -o mountpoint=none $B/to/mine; nacre fs rename $A/top/x $A/top/z; nacre fs rename $A/top/y@one uno; nacre fs destroy -r $A/top/gone/below
        nacre fs snapshot -r $A/top@five; nacre fs send -R -I @four $A/top@five | nacre fs receive -u $B/to
        nacre fs list $B/to/gone/below@four $B/to/mine; nacre fs destroy $B/to/mine; nacre fs destroy -r $B/to/gone/below; nacre fs mount -a");
    assert_eq!(here("a"), here("b"));
    // What is in use keeps its name, and then nothing is received.
    let said = pair.sh(r"nacre fs rename $A/top/z $A/top/zz; nacre fs snapshot -r $A/top@six; nacre fs send -R -I @five $A/top@six > stream
        (cd b/to/z; exec sleep 600) & user=$!; trap 'kill $user' EXIT
        until test $(readlink /proc/$user/cwd) = $PWD/b/to/z; do sleep 0.1; done
        ! nacre fs receive -F $B/to < stream; nacre fs list $B/to/z; ! nacre fs list $B/to@six
        nacre fs receive -F -M $B/to < stream");
    assert!(said.contains("busy") || said.contains("in use"), "{said}");
    assert_eq!(here("a"), here("b"));
    pair.check();
}

#[test]
fn a_cut_stream_is_resumed_or_leaves_no_trace() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.change();
    pair.sh("nacre fs send $A/home@a > a.st; nacre fs send -i @a $A/home@b > b.st");
    for (stream, target) in [("a.st", "home"), ("b.st", "home")] {
        let before = pair.sh("nacre fs list -H -t all -o name,used,refer -r $B | tail -n +2");
        let length = fs::metadata(pair.yard.path(stream)).unwrap().len();
        for part in [10, 1000, length / 2, length - 20] {
            let said = pair.fails(&format!("head -c {part} {stream} | nacre fs receive $B/{target}"));
            assert!(said.contains("incomplete stream"), "{part}: {said}");
            let after = pair.sh("nacre pool sync $B; nacre fs list -H -t all -o name,used,refer -r $B | tail -n +2");
            assert_eq!(before, after, "{stream} cut at {part}");
        }
        pair.fails(&format!("head -c $(({length} / 2)) {stream} | nacre fs receive -s $B/{target}"));
        let token = pair.sh(&format!("nacre fs get -H -o value receive_resume_token $B/{target}"));
        pair.check();
        assert!(pair.sh(&format!("zfs send -nv -t {token}")).contains("toname = "), "{token}");
        // The process of the pool dies; then that of the command while it receives more.
        pair.yard.end(&pair.b, Signal::KILL);
        pair.sh("umount -l b/home 2>/dev/null || true; umount -l b; nacre pool import -d b.img $B");
        assert_eq!(token, pair.sh(&format!("nacre fs get -H -o value receive_resume_token $B/{target}")));
        pair.sh(&format!("nacre fs send -t {token} > rest"));
        // The look at whether it receives is a receiver as well; the one that is looked for tries
        // again when that one came first.
        let mut receiver = pair.shell(&format!(
            "until nacre fs receive -s $B/{target} < <(head -c 400 rest; exec sleep 600); do sleep 0.1; done"
        ));
        let mut receiver = receiver.stdin(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
        let busy =
            || text(&finish(&mut pair.shell("head -c 400 rest | nacre fs receive -s $B/home")).stderr).contains("busy");
        crate::mounting::eventually("two receive at once", busy);
        let group = rustix::process::Pid::from_child(&receiver);
        rustix::process::kill_process_group(group, Signal::KILL).unwrap();
        receiver.wait().unwrap();
        crate::mounting::eventually("the end of the receiver", || !busy());
        pair.sh(&format!(
            "token=$(nacre fs get -H -o value receive_resume_token $B/{target}); test $token = - || nacre fs send -t $token | nacre fs receive -s $B/{target}"
        ));
        pair.check();
    }
    pair.same("a/home", "b/home");
    // What has come whole is used, whatever is cut behind it.
    pair.fails("head -c -16 a.st | nacre fs receive $B/whole");
    pair.sh("nacre fs clone $A/home@a $A/whole");
    pair.same("a/whole", "b/whole");
    pair.sh("nacre fs destroy -r $B/whole; nacre fs destroy $A/whole");
    pair.fails("head -c 2500000 a.st | nacre fs receive -s $B/other");
    assert!(pair.fails("nacre fs mount $B/other").contains("half received"));
    pair.sh("nacre fs receive -A $B/other");
    assert!(pair.fails("nacre fs list $B/other").contains("does not exist"));
    pair.check();
}

#[test]
fn a_short_stream_that_is_cut_is_resumed() {
    needs!(as_root());
    let pair = Pair::new();
    pair.sh("nacre fs create $A/home; head -c 1000000 /dev/urandom > a/home/f; nacre fs snapshot $A/home@a");
    let state = "zfs list -Hp -o inconsistent,receive_resume_token $B/home";
    pair.fails("nacre fs send $A/home@a > a.st; head -c 400000 a.st | nacre fs receive -s -u $B/home");
    assert!(pair.sh(state).starts_with("1\t1-"), "{}", pair.sh(state));
    let rest = "zfs send -t $(zfs get -H -o value receive_resume_token $B/home)";
    assert!(pair.sh(&format!("{rest} | wc -c")).parse::<u64>().unwrap() < 900_000);
    pair.sh(&format!("{rest} | zfs receive -s $B/home"));
    assert_eq!(pair.sh(state), "0\t-");
    pair.same("a/home", "b/home");
    for property in ["casesensitivity", "normalization", "utf8only", "volsize"] {
        let said = pair.fails(&format!("zfs receive -x {property} $B/left < a.st"));
        assert!(said.contains(&format!("'{property}' cannot be left out of a stream")), "{said}");
    }
    // A half received difference holds its base as a clone would, under the name and with the words of ZFS.
    pair.sh("head -c 1000000 /dev/urandom > a/home/g; nacre fs snapshot $A/home@b");
    pair.sh("zfs send -i @a $A/home@b > b.st");
    let said = pair.fails("head -c 400000 b.st | zfs receive -s -u -F $B/home");
    let (begin, target) =
        ("cannot receive incremental stream: checksum mismatch or incomplete stream\n", pair.b.clone());
    assert!(said.contains(&format!("{begin}the stream was to become '{target}/home@b'\nPartially received")), "{said}");
    let said = pair.fails("zfs send -i @a $A/home@b | zfs receive $B/home");
    assert!(said.contains("contains partially-complete state from \"zfs receive -s\""), "{said}");
    let said = pair.fails("zfs destroy $B/home@a");
    let clones =
        format!("snapshot has dependent clones\nuse '-R' to destroy the following datasets:\n{target}/home/%recv\n");
    assert!(said.ends_with(&clones), "{said}");
    pair.sh("zfs destroy -R $B/home@a");
    assert_eq!(
        pair.sh("zfs list -Hp -t all -o name -r $B/home; zfs get -H -o value receive_resume_token $B/home"),
        format!("{target}/home\n-")
    );
    pair.check();
    // So it does where a rollback would destroy its base.
    pair.sh("zfs destroy -r $B/home; zfs send $A/home@a | zfs receive -u $B/home");
    pair.sh("zfs send -i @a $A/home@b | zfs receive -u -F $B/home; head -c 2000000 /dev/urandom > a/home/h");
    pair.sh("zfs snapshot $A/home@d");
    pair.fails("zfs send -i @b $A/home@d > d.st; head -c 400000 d.st | zfs receive -s -u $B/home");
    let said = pair.fails("zfs rollback -r $B/home@a");
    assert!(
        said.contains(
            "clones of previous snapshots exist\nuse '-R' to force deletion of the following clones and dependents:"
        ),
        "{said}"
    );
    assert!(said.ends_with(&format!("\n{target}/home/%recv\n")), "{said}");
    pair.sh("zfs rollback -R $B/home@a");
    assert_eq!(pair.sh("zfs list -H -t snapshot -o name $B/home"), format!("{target}/home@a"));
    pair.check();
}

#[test]
fn what_is_half_received_is_sent_on() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.change();
    pair.sh("nacre fs send $A/home@a > a.st; nacre fs send -c -i @a $A/home@b > b.st; nacre fs create $B/third");
    for (stream, kind) in [("a.st", "full\t"), ("b.st", "incremental\ta\t")] {
        let length = fs::metadata(pair.yard.path(stream)).unwrap().len();
        pair.fails(&format!("head -c $(({length} * 2 / 3)) {stream} | zfs receive -s -u $B/home"));
        let dry = pair.sh("zfs send -nvP -S $B/home");
        assert!(dry.starts_with(kind) && dry.contains("\nsize\t") && !dry.contains("token"), "{dry}");
        // It is no more than half of it there either, under the name that the first sender gave it.
        let said = pair.fails("zfs send --saved $B/home | zfs receive -s -u -e $B/third");
        assert!(said.contains("incomplete stream"), "{said}");
        let token = |of: &str| pair.sh(&format!("nacre fs get -H -o value receive_resume_token $B/{of}"));
        assert!(token("third/home").starts_with("1-"));
        // That stream was cut as well: it is resumed, and the sent part stays.
        pair.sh("nacre fs receive -A $B/third/home; nacre fs send -S $B/home > half.st");
        pair.fails("head -c 700000 half.st | nacre fs receive -s -u $B/third/home");
        let first = token("third/home");
        pair.fails(&format!("nacre fs send -S -t {first} $B/home | nacre fs receive -s -u $B/third/home"));
        assert_ne!(first, token("third/home"));
        for target in ["home", "third/home"] {
            let token = token(target);
            pair.sh(&format!("nacre fs send -t {token} | nacre fs receive -s $B/{target}"));
        }
        pair.check();
    }
    pair.sh("nacre fs mount -a");
    pair.same("a/home", "b/home");
    pair.same("a/home", "b/third/home");
    assert!(pair.fails("nacre fs send -S $B/home > f").contains("no partially received state"));
    for (words, why) in [("-S $B/home@a", "must specify the dataset"), ("-S -p $B/home", "incompatible flags")] {
        assert!(pair.fails(&format!("nacre fs send {words} > f")).contains(why), "{words}");
    }
    assert!(pair.fails("nacre fs send -t 1-0-00 $A/home@a > f").contains("no snapshot goes with it"));
    // While it is sent, it stays.
    pair.fails("head -c 3000000 a.st | nacre fs receive -s -u $B/more");
    let mut sender = pair.shell("mkfifo slow; nacre fs send -S $B/more > slow & exec 3< slow; head -c 1 <&3 > /dev/null; touch sends; until test -e go; do sleep 0.1; done; cat <&3 > /dev/null; wait $!");
    let mut sender = sender.stdin(Stdio::null()).spawn().unwrap();
    crate::mounting::eventually("the sender", || pair.yard.path("sends").exists());
    for words in ["receive -A $B/more", "destroy $B/more"] {
        let said = pair.fails(&format!("nacre fs {words}"));
        assert!(said.contains("busy"), "{words}: {said}");
    }
    fs::write(pair.yard.path("go"), "").unwrap();
    assert!(sender.wait().unwrap().success());
    pair.sh("nacre fs receive -A $B/more");
    pair.check();
}

#[test]
fn what_is_wrong_is_refused_and_changes_nothing() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::sized("300M", "64M");
    pair.fill();
    pair.sh("nacre fs send $A/home@a > a.st; head -c 8 /dev/zero > zfs; printf '\\xac\\xcb\\xba\\xf5\\x02\\0\\0\\0' >> zfs; head -c 300 /dev/zero >> zfs");
    assert!(pair.fails("nacre fs receive $B/home < zfs").contains("OpenZFS"));
    assert!(pair.fails("head -c 1000 /dev/urandom | nacre fs receive $B/home").contains("bad magic number"));
    assert!(
        pair.fails("(head -c 8 a.st; printf '\\x09\\0\\0\\0'; tail -c +13 a.st) | nacre fs receive $B/home")
            .contains("version 9")
    );
    for bit in [20, 300, 40_000, 1_000_000, 3_000_000] {
        let mut bytes = fs::read(pair.yard.path("a.st")).unwrap();
        bytes[bit] ^= 0x10;
        fs::write(pair.yard.path("flipped"), bytes).unwrap();
        assert!(pair.fails("nacre fs receive $B/home < flipped").contains("invalid stream"), "{bit}");
    }
    pair.sh("nacre fs receive $B/home < a.st; head -c 90M /dev/urandom > a/home/large; nacre fs snapshot $A/home@b; nacre fs send -i @a $A/home@b > b.st");
    let before = pair.tree("b/home");
    assert!(pair.fails("nacre fs receive $B/home < b.st").contains("out of space"));
    assert_eq!(before, pair.tree("b/home"), "a full pool");
    pair.sh("rm a/home/large; nacre fs rollback -r $A/home@a; echo c > a/home/c; nacre fs snapshot $A/home@c; nacre fs send -i @a $A/home@c > c.st; echo 1 > b/home/mine");
    assert!(pair.fails("nacre fs receive $B/home < c.st").contains("has been modified"));
    assert!(pair.fails("nacre fs receive $B < c.st").contains("does not match incremental source"));
    assert!(pair.fails("nacre fs receive $B/none < c.st").contains("does not exist"));
    assert!(pair.fails("nacre fs receive $B/home < a.st").contains("exists"));
    pair.sh("nacre fs receive -F $B/home < c.st; test ! -e b/home/mine");
    pair.same("a/home", "b/home");
    // A stranger's stream hides nothing, and gives no user rights.
    pair.sh("nacre fs set mountpoint=/etc canmount=noauto $A/home 2>/dev/null || nacre fs set -u mountpoint=/etc $A/home; nacre fs send -p $A/home@c > p.st");
    assert!(pair.fails("nacre fs receive $B/p < p.st").contains("mountpoint=/etc"));
    pair.sh("nacre fs receive -x mountpoint $B/p < p.st");
    assert_eq!(pair.sh("nacre fs get -H -o value setuid,devices $B/p"), "off\noff");
    pair.sh("nacre fs receive -u -o mountpoint=none -o setuid=on $B/q < p.st");
    assert_eq!(pair.sh("nacre fs get -H -o value setuid,mountpoint $B/q"), "on\nnone");
    // Nor in pieces, below its first file system, or at the place of another one.
    pair.fails("nacre fs send $A/home@c | head -c 2000000 | nacre fs receive -s $B/r");
    pair.sh("nacre fs send -t $(nacre fs get -H -o value receive_resume_token $B/r) | nacre fs receive -s $B/r");
    assert_eq!(pair.sh("nacre fs get -H -o value setuid,devices $B/r"), "off\noff");
    pair.sh("nacre fs create $A/tree; nacre fs create -o setuid=on $A/tree/low; nacre fs create -o canmount=off -o sharenfs=ro -o sharesmb=on $A/tree/shared; nacre fs snapshot -r $A/tree@a; nacre fs send -R $A/tree@a > t.st");
    pair.sh("nacre fs receive $B/tree < t.st");
    assert_eq!(pair.sh("nacre fs get -H -o value setuid,devices $B/tree/low"), "off\noff");
    assert_eq!(pair.sh("nacre fs get -H -o value,source sharenfs,sharesmb $B/tree/low"), "off\tdefault\noff\tdefault");
    assert_eq!(pair.sh("nacre fs get -H -o value,source sharenfs,sharesmb $B/tree/shared"), "off\tlocal\noff\tlocal");
    pair.sh("nacre fs inherit -S sharenfs $B/tree/shared");
    assert_eq!(pair.sh("nacre fs get -H -o value,source sharenfs $B/tree/shared"), "ro\treceived");
    pair.sh("nacre fs set -u mountpoint=$PWD/b/home $A/tree; nacre fs send -p $A/tree@a > t.st");
    assert!(pair.fails("nacre fs receive $B/over < t.st").contains("something is there already"));
    pair.check();
}

#[test]
fn a_bookmark_is_enough_for_a_difference() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.sh("nacre fs send $A/home@a | nacre fs receive $B/home; nacre fs bookmark $A/home@a '#mark'; nacre fs destroy $A/home@a");
    pair.change();
    assert!(pair.sh("nacre fs send -nv -i '#mark' $A/home@b").contains("from #mark to"));
    // What was there is not sent again: a file of 3 MB has 12 KB that are new.
    pair.sh("nacre fs send -i '#mark' $A/home@b > stream; test $(stat -c %s stream) -lt 8000000");
    pair.fails("head -c 2000000 stream | nacre fs receive -s $B/home");
    pair.sh("nacre fs send -t $(nacre fs get -H -o value receive_resume_token $B/home) | nacre fs receive -s $B/home");
    pair.same("a/home", "b/home");
    assert!(pair.fails("nacre fs send -i '#mark' $B/home@b").contains("does not exist"));
    // Bookmarks of what is given up are no part of the history.
    pair.sh(r"echo 1 > b/home/mine; nacre fs snapshot $B/home@mine; nacre fs bookmark $B/home@mine '#mine'; nacre fs bookmark $B/home@b '#b'
        echo 2 > a/home/two; nacre fs snapshot $A/home@c; nacre fs send -i @b $A/home@c | nacre fs receive -F $B/home");
    assert_eq!(pair.sh("nacre fs list -H -o name -t bookmark $B/home | cut -d'#' -f2"), "b");
    pair.same("a/home", "b/home");
    pair.check();
}

#[test]
fn a_killed_sender_is_gone_on_with() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    pair.change();
    let said = pair.fails(
        r"mkfifo pipe; nacre fs send $A/home@b > pipe & sender=$!
        (head -c 2000000; kill -9 $sender; cat) < pipe | zfs receive -s $B/home",
    );
    assert!(said.contains("running:\n    zfs send -t 1-"), "{said}");
    // The snapshot is no longer held then.
    crate::mounting::eventually("the end of the hold", || {
        finish(&mut pair.shell("nacre fs rename $A/home@b c && nacre fs rename $A/home@c b")).status.success()
    });
    // Then the process of the pool.
    let mut receiver = pair
        .shell(
            r"token=$(nacre fs get -H -o value receive_resume_token $B/home); nacre fs send -t $token > pipe &
            (head -c 1000000; touch half; while test -e half; do sleep 0.1; done; cat) < pipe | nacre fs receive -s $B/home",
        )
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    crate::mounting::eventually("half of the stream", || pair.yard.path("half").exists());
    pair.yard.end(&pair.a, Signal::KILL);
    fs::remove_file(pair.yard.path("half")).unwrap();
    assert!(!receiver.wait().unwrap().success());
    pair.sh("umount -l a/home; umount -l a; nacre pool import -d a.img $A");
    pair.sh("nacre fs send -t $(nacre fs get -H -o value receive_resume_token $B/home) | nacre fs receive -s $B/home");
    pair.same("a/home", "b/home");
    pair.check();
}

/// A server of ssh on this machine, which a `host` leads to.
struct Server(std::process::Child);

impl Server {
    fn start(pair: &Pair) -> Server {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let here = pair.yard.place.path().display();
        let variables: String = pair
            .shell("")
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_str()?, value?.to_str()?)))
            .filter(|(name, _)| *name == "PATH" || name.starts_with("NACRE_"))
            .map(|(name, value)| format!(" \"{name}={value}\""))
            .collect();
        fs::write(
            pair.yard.path("sshd_config"),
            format!(
                "Port {port}\nListenAddress 127.0.0.1\nHostKey {here}/host_key\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nAuthorizedKeysFile {here}/key.pub\nSetEnv{variables}\n"
            ),
        )
        .unwrap();
        fs::write(
            pair.yard.path("ssh_config"),
            format!(
                "Host host\nHostName 127.0.0.1\nPort {port}\nUser root\nIdentityFile {here}/key\nIdentitiesOnly yes\nStrictHostKeyChecking no\nUserKnownHostsFile {here}/known\nLogLevel ERROR\n"
            ),
        )
        .unwrap();
        pair.sh(r#"ssh-keygen -q -t ed25519 -N '' -f host_key; ssh-keygen -q -t ed25519 -N '' -f key; mkdir -p /run/sshd
            printf '#!/bin/sh\nexec %s -F %s/ssh_config "$@"\n' $(command -v ssh) "$PWD" > wrapper; mv wrapper bin/ssh; chmod 755 bin/ssh"#);
        let program = pair.sh("command -v sshd || echo /usr/sbin/sshd");
        let mut server = pair.shell(&format!("exec {program} -D -e -f sshd_config -E sshd.log"));
        // It starts itself anew for each connection, by its whole name.
        let server = Server(server.stdin(Stdio::null()).spawn().unwrap());
        crate::mounting::eventually("ssh", || finish(&mut pair.shell("ssh host true")).status.success());
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_second_place_may_be_elsewhere() {
    needs!(as_root() && has("setfacl") && has("sshd") && has("ssh"));
    let pair = Pair::new();
    pair.fill();
    let _server = Server::start(&pair);
    pair.sh("nacre fs replicate $A/home host:$B/home");
    pair.same("a/home", "b/home");
    pair.change();
    let said = pair.sh("sleep 1; nacre fs replicate -v --keep-hourly 5 $A/home host:$B/home");
    assert!(said.contains("send @"), "{said}");
    pair.same("a/home", "b/home");
    // From there to here as well, and a stream that was cut is gone on with.
    pair.sh("nacre fs replicate host:$A/home $B/pulled");
    pair.sh("sleep 1; head -c 5000000 /dev/urandom > a/home/more; nacre fs snapshot $A/home@z");
    pair.fails("last=$(nacre fs list -H -o name -t snapshot -s createtxg $B/pulled | tail -1 | cut -d@ -f2); nacre fs send -c -I @$last $A/home@z | head -c 3000000 | nacre fs receive -s $B/pulled");
    assert!(pair.sh("nacre fs replicate -v host:$A/home $B/pulled").contains("resume "));
    pair.same("a/home", "b/pulled");
    // A copy whose first stream was cut is one like others.
    pair.fails("nacre fs send -c $A/home@z | head -c 3000000 | nacre fs receive -s -u $B/again");
    assert!(pair.sh("nacre fs replicate -v $A/home host:$B/again").contains("resume "));
    assert_eq!(pair.sh("nacre fs get -H -o value readonly,mounted $B/again"), "on\nyes");
    // An unreachable host, or one without the program, is distinguished from one without the file
    // system.
    let run = |script: &str| {
        let output = finish(&mut pair.shell(script));
        (output.status.code().unwrap_or(-1), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = run("nacre fs replicate $A/home nowhere.invalid:$B/home");
    assert!(code == 1 && said.contains("'nowhere.invalid' cannot be reached by ssh"), "{code} {said}");
    let (code, said) = run("nacre fs replicate nowhere.invalid:$A/home $B/home");
    assert!(code == 1 && said.contains("'nowhere.invalid' cannot be reached by ssh"), "{code} {said}");
    let (code, said) = run(
        "mv bin/nacre nacre; code=0; ./nacre fs replicate $A/home host:$B/home || code=$?; mv nacre bin; exit $code",
    );
    assert!(code == 1 && said.contains("'host' has no nacre"), "{code} {said}");
    let (code, said) = run("nacre fs replicate host:$A/none $B/none");
    assert!(code == 3 && said.contains("does not exist"), "{code} {said}");
    // Programs in `events.d` are notified of a failure.
    pair.sh(r#"mkdir events.d; printf '#!/bin/sh\nenv | grep ^NACRE_ > %s/told\n' "$PWD" > events.d/50-note; chmod 755 events.d/50-note"#);
    let said = pair.fails(
        "nacre fs create $B/alien; export NACRE_EVENTS_DIR=$PWD/events.d; nacre fs replicate $A/home host:$B/alien",
    );
    assert!(said.contains("has no snapshot in common"), "{said}");
    let told = fs::read_to_string(pair.yard.path("told")).unwrap();
    for word in [
        "NACRE_EVENT=replication-failed",
        &format!("NACRE_SOURCE={}/home", pair.a),
        &format!("NACRE_TARGET={}/alien", pair.b),
    ] {
        assert!(told.lines().any(|line| line == word), "{word}: {told}");
    }
    assert!(told.contains("NACRE_REASON=") && told.contains("in common"), "{told}");
    pair.check();
}

/// Commands that zrepl runs for a push into a sink, with the parts of the answers that it parses.
#[test]
fn the_commands_of_zrepl_replicate() {
    needs!(as_root() && has("setfacl"));
    let pair = Pair::new();
    pair.fill();
    assert!(pair.fails("zfs send").contains("receive_resume_token"));
    assert!(pair.fails("zfs receive").contains("-A <filesystem|volume>"));
    assert!(
        ["enabled", "active"].contains(&pair.sh("zpool get -H -p -o value feature@extensible_dataset $B").as_str())
    );
    assert!(pair.sh("zfs list -H -r -t filesystem,volume -o name $A").contains("/home"));
    let get = |property: &str, of: &str| {
        pair.sh(&format!("zfs get -Hp -o name,property,value,source {property} {of} | cut -f2-"))
    };
    assert_eq!(get("encryption", "$A/home"), "encryption\toff\tdefault");
    assert_eq!(get("zrepl:placeholder", "$A/home"), "zrepl:placeholder\t-\t-");
    assert!(pair.fails("zfs get -Hp -o name,property,value,source guid $B/sink").contains("cannot open"));
    pair.sh("zfs create -o zrepl:placeholder=on -o mountpoint=none -o encryption=off $B/sink");
    assert_eq!(get("zrepl:placeholder", "$B/sink"), "zrepl:placeholder\ton\tlocal");
    pair.sh("zfs snapshot $A/home@zrepl_1; zfs hold zrepl_STEP_J_push $A/home@zrepl_1");
    let versions = |of: &str| {
        pair.sh(&format!(
            "zfs list -H -p -o name,guid,createtxg,creation,userrefs -r -d 1 -t snapshot,bookmark -s createtxg {of}"
        ))
    };
    assert!(versions("$A/home").lines().any(|line| line.contains("@zrepl_1\t") && line.ends_with("\t1")));
    let dry = pair.sh("zfs send -n -v -P -L -c -e $A/home@zrepl_1");
    assert!(dry.starts_with(&format!("full\t{}/home@zrepl_1\t", pair.a)), "{dry}");
    pair.sh("zfs send -L -c -e $A/home@zrepl_1 | zfs recv -s -x mountpoint -o readonly=on $B/sink/home@zrepl_1");
    pair.sh(r"guid=$(zfs get -Hp -o value guid $A/home@zrepl_1); zfs bookmark $A/home@zrepl_1 $A/home#zrepl_CURSOR_G_${guid}_J_push
        zfs hold zrepl_last_received_J_sink $B/sink/home@zrepl_1; zfs release zrepl_STEP_J_push $A/home@zrepl_1
        zfs destroy $A/home@zrepl_1; test $(zfs get -Hp -o value guid $A/home#zrepl_CURSOR_G_${guid}_J_push) = $guid");
    assert!(versions("$A/home").lines().any(|line| line.contains("#zrepl_CURSOR") && line.ends_with("\t-")));
    assert!(
        pair.fails("zfs hold zrepl_last_received_J_sink $B/sink/home@zrepl_1")
            .contains("tag already exists on this dataset")
    );
    // From the cursor, cut, and resumed.
    pair.change();
    let cursor = "cursor=$(zfs list -H -o name -t bookmark -d 1 $A/home)";
    let said = pair.fails(&format!("{cursor}; zfs send -L -c -e -i $cursor $A/home@b | head -c 2000000 | zfs recv -s -x mountpoint -o readonly=on $B/sink/home@b"));
    let running = "A resuming stream can be generated on the sending system by running:\n    zfs send -t ";
    let token = said.split_once(running).unwrap_or_else(|| panic!("{said}")).1.split_whitespace().next().unwrap();
    assert_eq!(token, pair.sh("zfs get -Hp -o value receive_resume_token $B/sink/home"));
    let contents = pair.sh(&format!("zfs send -nvt {token}"));
    assert!(contents.starts_with("resume token contents:\nnvlist version: 0\n"), "{contents}");
    let guid = pair.sh("zfs get -Hp -o value guid $A/home@b").parse::<u64>().unwrap();
    for line in [format!("\ttoguid = {guid:#x}"), format!("\ttoname = {}/home@b", pair.a)] {
        assert!(contents.contains(&line) && contents.contains("\tfromguid = 0x"), "{line}: {contents}");
    }
    pair.sh(&format!("zfs send -t {token} | zfs recv -s -x mountpoint -o readonly=on $B/sink/home@b"));
    pair.sh("zfs hold zrepl_last_received_J_sink $B/sink/home@b; zfs release zrepl_last_received_J_sink $B/sink/home@zrepl_1");
    assert_eq!(pair.sh("zfs holds -H $B/sink/home@b | cut -f2"), "zrepl_last_received_J_sink");
    assert!(
        pair.fails("zfs release zrepl_last_received_J_sink $B/sink/home@zrepl_1")
            .contains("no such tag on this dataset")
    );
    assert!(pair.fails("zfs recv -A $B/sink/home").contains("does not have any resumable receive state to abort"));
    // A token of a snapshot that is gone is shown all the same.
    pair.sh("zfs destroy $A/home@b");
    assert!(pair.fails(&format!("zfs send -nvt {token}")).contains("resume token contents:"));
    // Pruning: one and several, and what is not there.
    pair.sh("zfs snapshot $A/home@p1; zfs snapshot $A/home@p2; zfs destroy $A/home@p1,p2");
    assert!(
        pair.fails("zfs destroy $A/home@p1").contains("could not find any snapshots to destroy; check snapshot names.")
    );
    let said = pair.fails("zfs destroy $B/sink/home@b");
    assert!(said.contains("cannot destroy"), "{said}");
    assert!(
        pair.fails("zfs destroy $A/home#none").starts_with(&format!("bookmark '{}/home#none' does not exist", pair.a))
    );
    pair.sh("zfs mount $B/sink/home 2>/dev/null || true");
    pair.check();
}

#[test]
fn syncoid_replicates() {
    needs!(as_root() && has("setfacl") && has("syncoid"));
    let pair = Pair::new();
    pair.fill();
    let run = "syncoid --quiet $A/home $B/home 2>&1";
    pair.sh(run);
    pair.same("a/home", "b/home");
    pair.change();
    pair.sh(run);
    pair.same("a/home", "b/home");
    // A receiver that was cut is gone on with.
    pair.sh("head -c 5000000 /dev/urandom > a/home/more; nacre fs snapshot $A/home@z");
    pair.fails("last=$(nacre fs list -H -o name -t snapshot $A/home | grep syncoid); zfs send -I $last $A/home@z | head -c 3000000 | zfs receive -s -F $B/home");
    assert!(pair.sh("syncoid $A/home $B/home 2>&1").contains("Resuming interrupted zfs send/receive"));
    pair.same("a/home", "b/home");
    pair.check();
}

#[test]
fn programs_from_the_index_replicate() {
    needs!(as_root() && has("setfacl") && has("python3"));
    let pair = Pair::new();
    let made = finish(
        &mut pair.shell("python3 -m venv venv && timeout 120 venv/bin/pip install -q zfs-autobackup pyznap bzfs"),
    );
    if !made.status.success() {
        eprintln!(
            "skipped: zfs-autobackup, pyznap and bzfs cannot be had from the package index: {}",
            text(&made.stderr)
        );
        return;
    }
    pair.fill();
    pair.sh("nacre fs set autobackup:away=true $A/home; nacre fs create $B/auto; venv/bin/zfs-autobackup away $B/auto");
    pair.change();
    pair.sh("sleep 1; venv/bin/zfs-autobackup away $B/auto");
    pair.same("a/home", "b/auto/$A/home");
    pair.sh("printf '[%s/home]\\nhourly = 2\\nsnap = yes\\nclean = yes\\ndest = %s/znap\\n' $A $B > znap.conf; nacre fs create $B/znap");
    pair.sh("venv/bin/pyznap --config znap.conf snap --take; venv/bin/pyznap --config znap.conf send 2>&1");
    pair.same("a/home", "b/znap");
    // It resumes what another program has half received, and has bookmarks of what it has sent.
    pair.fails("zfs send $A/home@a > whole; head -c 1500000 whole | zfs receive -s -u $B/bz");
    // It makes directories for sockets in the home directory that the system has for its user.
    let said = pair.sh(r#"had=; [ ! -d ~root/.ssh ] || had=1
        venv/bin/bzfs --log-dir $PWD/bzfs-logs $A/home $B/bz 2>&1
        find ~root/.ssh/bzfs -depth -type d -empty -delete 2>&1 || true
        [ "$had" ] || rmdir ~root/.ssh"#);
    assert!(said.contains("Success"), "{said}");
    pair.sh("zfs mount $B/bz");
    pair.same("a/home", "b/bz");
    assert!(pair.sh("zfs list -H -t bookmark -o name $A/home").contains(&format!("{}/home#", pair.a)));
    pair.check();
}
