//! Mounts and pools that survive their processes as services of a real systemd(1), which stores
//! their descriptors: all processes of a service are killed at once, and programs in the mounts
//! continue.
//!
//! Each test boots a systemd of its own, as process 1 of its own namespaces (processes, mounts,
//! control groups), with only the units that the test writes. Programs that use a mount run in the
//! same namespaces (nsenter(1)), as scripts, whose lines of output are compared. Skipped without
//! root, systemd or control groups of the second version.

use crate::mounting::{eventually, nacre, needs, scratch, skip, text};
use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

const SYSTEMD: &str = "/lib/systemd/systemd";

/// Words that scripts have.
const WORDS: &str = "
    group=/sys/fs/cgroup/system.slice/test.service
    main() { systemctl show test.service --value -p MainPID; }
    all_die() { echo 1 > $group/cgroup.kill; }
    worker_dies() { kill -9 $(grep -vx $(main) $group/cgroup.procs); }
";

/// Command of most services.
const MIRROR: &str = "mirror --survive --foreground $dir/source $dir/mount";

/// Where the second version of control groups is mounted.
fn control_groups() -> Option<PathBuf> {
    let table = crate::mounting::mount_table();
    let line = table.lines().find(|line| line.contains(" - cgroup2 "))?;
    line.split(' ').nth(4).map(PathBuf::from)
}

fn can_boot() -> bool {
    if !crate::mounting::as_root() {
        return false;
    }
    if !Path::new(SYSTEMD).exists() {
        return skip("systemd", "systemd is not installed");
    }
    control_groups().is_some() || skip("systemd", "there are no control groups of the second version")
}

/// A systemd with its services. They all end with it.
struct Machine {
    scratch: tempfile::TempDir,
    group: PathBuf,
    namespaces: Child,
}

impl Machine {
    /// With directories to mount and to mount on.
    fn boot() -> Machine {
        let scratch = scratch();
        for name in ["source", "lower", "mount"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        let group =
            control_groups().unwrap().join(format!("nacre-test-{}", scratch.path().display()).replace('/', "_"));
        fs::create_dir(&group).unwrap();
        // In a container it leaves alone what is the machine's.
        let boot = "echo $$ > \"$1\"/cgroup.procs
            exec unshare --pid --fork --kill-child --mount --mount-proc --cgroup --uts --ipc sh -ec '
                mount --make-rprivate /
                mount -t tmpfs tmpfs /run
                umount -R /sys/fs/cgroup
                mount -t cgroup2 cgroup2 /sys/fs/cgroup
                mkdir -p /run/systemd/system
                printf \"[Unit]\\nDefaultDependencies=no\\n\" > /run/systemd/system/test.target
                export container=other
                exec \"$0\" --system --unit=test.target --log-target=console' \"$0\"";
        let log = fs::File::create(scratch.path().join("systemd.log")).unwrap();
        let namespaces = Command::new("sh")
            .args(["-c", boot, SYSTEMD])
            .arg(&group)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let machine = Machine { scratch, group, namespaces };
        eventually("systemd answers", || {
            machine.try_run("systemctl list-units").is_some_and(|done| done.status.success())
        });
        machine
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The process that is 1 in there, once it is there.
    fn init(&self) -> Option<u32> {
        let of = self.namespaces.id();
        let children = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    fn try_run(&self, script: &str) -> Option<Output> {
        let namespaces = ["-m", "-p", "-u", "-i", "-C", "-t", &self.init()?.to_string()].map(str::to_owned);
        let mut command = Command::new("nsenter");
        command.args(namespaces).args(["timeout", "-s", "KILL", "60", "bash", "-ec", &format!("{WORDS}{script}")]);
        Some(command.env("nacre", nacre()).env("dir", self.scratch.path()).output().unwrap())
    }

    /// Runs a script, which finds the program as `$nacre` and the scratch directory as `$dir`, and
    /// returns its output. It ends at the first command that fails.
    fn run(&self, script: &str) -> String {
        let done = self.try_run(script).expect("systemd is there");
        let (out, err) = (text(&done.stdout), text(&done.stderr));
        assert!(done.status.success(), "{script}: {:?}\n{out}\n{err}\n{}", done.status, self.told());
        out
    }

    /// Returns the logs of systemd and the services.
    fn told(&self) -> String {
        ["systemd.log", "service.log"].map(|log| fs::read_to_string(self.at(log)).unwrap_or_default()).concat()
    }

    /// Writes the unit of a service, with these lines as well, and starts it.
    fn start(&self, command: &str, lines: &str) {
        let unit = format!(
            "[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\nType=notify\nNotifyAccess=all\nExecStart={} {command}\nKillMode=mixed\n\
             OOMPolicy=continue\nRestart=on-failure\nFileDescriptorStoreMax=512\nStandardOutput=append:{log}\n\
             StandardError=append:{log}\n{lines}\n",
            nacre().display(),
            log = self.at("service.log").display(),
        );
        let unit = unit.replace("$dir", self.scratch.path().to_str().unwrap());
        fs::write(self.at("test.service"), unit.replace("$nacre", nacre().to_str().unwrap())).unwrap();
        self.run("cp $dir/test.service /run/systemd/system/; systemctl daemon-reload; systemctl start test.service");
    }

    /// A property of the service.
    fn show(&self, property: &str) -> String {
        self.run(&format!("systemctl show test.service --value -p {property}")).trim().to_owned()
    }

    /// Waits until the service has been started again so often, and answers.
    fn restarted(&self, times: u32) {
        let times = times.to_string();
        eventually("the service is there again", || {
            self.show("NRestarts") == times && self.show("ActiveState") == "active"
        });
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Its process 1 goes with it, and all processes with that.
        let _ = self.namespaces.kill();
        let _ = self.namespaces.wait();
        let empty =
            || fs::read_to_string(self.group.join("cgroup.events")).is_ok_and(|now| now.contains("populated 0"));
        if !std::thread::panicking() {
            eventually("all processes are gone", empty);
        }
        remove_groups(&self.group);
    }
}

fn remove_groups(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_groups(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}

/// Activities of users around the simultaneous death of all processes of the service, in `$mount`:
/// a shell in a directory, open files with a name, one that is appended to.
const USERS: &str = "
    cd $mount
    echo hello > f; exec 5<>f; exec 6>>log
    mkdir d; cd d
    for life in 1 2 3; do
        echo before >&6
        all_die
        read -u 5 line; echo \"$line\"
        echo after >&6
        pwd -P > /dev/null; touch new$life; ls
        exec 5<>../f
    done
    sort ../log | uniq -c | tr -s ' '
    $nacre status $mount | grep -o 'by process.*descriptors.*' | sed 's/process [0-9]*/process N/'
";

const SEEN: &str = "hello\nnew1\nhello\nnew1\nnew2\nhello\nnew1\nnew2\nnew3\n 3 after\n 3 before\n";

#[test]
fn a_mirror_goes_on_when_all_its_processes_are_killed() {
    needs!(can_boot());
    let machine = Machine::boot();
    // Without passthrough files are open in the process alone.
    machine.start("mirror --survive --foreground --passthrough=off $dir/source $dir/mount", "");
    let said = machine.run(&format!("mount=$dir/mount{USERS}"));
    assert_eq!(
        said,
        format!("{SEEN}by process N, and by the service manager with 4 descriptors (restarted 3 times)\n")
    );
    // A file without a name is nowhere any more: an error, not another file. A name that is left leads to it.
    let said = machine.run(
        "cd $dir/mount; exec 5<>gone 7<>first; echo there >&5; rm gone; echo linked >&7; ln first d/second; rm first
         all_die
         ls; for error in \"$( (read -u 5 line) 2>&1)\" \"$( (echo more >&5) 2>&1)\" \"$(cat /proc/self/fd/5 2>&1)\"; do echo \"${error##*: }\"; done
         echo more >&7; cat /proc/self/fd/7 d/second f",
    );
    assert_eq!(
        said,
        "d\nf\nlog\nBad file descriptor\nBad file descriptor\nStale file handle\nlinked\nmore\nlinked\nmore\nhello\n"
    );
    // The supervisor alone, and the worker alone, after which the service is not started again.
    machine.run("kill -9 $(main); cat $dir/mount/f");
    machine.restarted(5);
    machine.run("worker_dies; cat $dir/mount/f");
    machine.restarted(5);
    machine.run("systemctl stop test.service; ! mountpoint -q $dir/mount");
    assert_eq!([machine.show("NFileDescriptorStore"), machine.show("Result")], ["0", "success"]);
}

#[test]
fn a_cage_and_a_union_go_on_when_all_their_processes_are_killed() {
    needs!(can_boot());
    let machine = Machine::boot();
    machine.start("cage --survive --foreground --size=4M $dir/source $dir/mount", "");
    assert!(machine.run(&format!("mount=$dir/mount{USERS}")).starts_with(SEEN));
    let said = machine.run(
        "cd $dir/mount; head -c 8M /dev/zero > full || true; wc -c < full; rm full; cd /; systemctl stop test.service",
    );
    assert!((3 << 20..=4 << 20).contains(&said.trim().parse::<u32>().unwrap()), "{said}");
    fs::remove_dir_all(machine.at("source/d")).unwrap();
    fs::remove_file(machine.at("source/log")).unwrap();
    fs::write(machine.at("lower/below"), "below\n").unwrap();
    fs::create_dir(machine.at("lower/e")).unwrap();
    fs::write(machine.at("lower/twice"), "twice\n").unwrap();
    fs::hard_link(machine.at("lower/twice"), machine.at("lower/e/twin")).unwrap();
    machine.start("union --survive --foreground $dir/source=rw:$dir/lower=ro $dir/mount", "");
    // One that is copied up after it was opened below is the copy afterwards.
    let said = machine.run(
        "cd $dir/mount; exec 7<below; echo more >> below
         all_die
         cat <&7; cat $dir/lower/below; rm below; systemctl reset-failed test.service",
    );
    assert_eq!(said, "below\nmore\nbelow\n");
    // Files whose first name is gone, of either branch: a name that is left leads to them.
    let said = machine.run(
        "cd $dir/mount; exec 7<>first 8<>own; echo linked >&7; echo own >&8
         ln first e/second; rm first; ln own e/other; mv own e/moved; rm e/moved
         exec 9<twice; rm twice; cat e/twin
         all_die
         echo more >&7; echo more >&8; cat /proc/self/fd/7 e/second e/other /proc/self/fd/8; cat <&9; ls e
         rm -r e; systemctl reset-failed test.service",
    );
    assert_eq!(said, "twice\nlinked\nmore\nlinked\nmore\nown\nmore\nown\nmore\ntwice\nother\nsecond\ntwin\n");
    assert!(machine.run(&format!("mount=$dir/mount{USERS}")).starts_with(SEEN));
}

#[test]
fn a_pool_goes_on_when_all_its_processes_are_killed() {
    needs!(can_boot());
    let machine = Machine::boot();
    machine.run(
        "$nacre pool create --size 512M -m $dir/tank tank $dir/pool.img; $nacre fs create tank/a; $nacre pool export tank",
    );
    machine.start("pool import --survive --foreground -d $dir/pool.img tank", "ExecStop=-$nacre pool export tank");
    let said = machine.run(&format!("mount=$dir/tank/a{USERS}"));
    assert!(said.starts_with(SEEN), "{said}");
    // What was not synced, files without a name, and what is mounted between two deaths.
    let said = machine.run(
        "cd $dir/tank/a; systemctl reset-failed test.service; exec 7<>gone; rm gone
         for life in 1 2; do
             seq 1 100000 > numbers$life; echo $life >&7
             all_die
             seq 1 100000 | cmp - numbers$life
             $nacre fs create tank/new$life; echo $life > $dir/tank/new$life/file
             all_die
             cat $dir/tank/new*/file /proc/self/fd/7
         done
         $nacre pool status tank | grep -c 'and by the service manager'",
    );
    assert_eq!(said, "1\n1\n1\n2\n1\n2\n1\n");
    machine.run("cd /; $nacre pool scrub -w tank; $nacre pool status tank | grep 'No known data errors'; $nacre pool export tank");
    eventually("the service is over", || machine.show("ActiveState") == "inactive");
    assert_eq!([machine.show("NFileDescriptorStore"), machine.show("Result")], ["0", "success"]);
    let said = machine.run(
        "$nacre pool import -d $dir/pool.img tank; cat $dir/tank/new1/file; ls $dir/tank/a; $nacre pool export tank",
    );
    assert_eq!(said, "1\nd\nf\nlog\nnumbers1\nnumbers2\n");
}

#[test]
fn a_service_begins_anew_where_it_cannot_go_on() {
    needs!(can_boot());
    let machine = Machine::boot();
    let restarts = "$nacre status $dir/mount | grep -o '(restarted.*'";
    // The manager keeps less than is needed.
    machine.start(MIRROR, "FileDescriptorStoreMax=2");
    machine.run("all_die");
    machine.restarted(1);
    assert_eq!(machine.run(&format!("echo x > $dir/mount/f; {restarts}")), "(restarted 0 times)\n");
    assert!(machine.told().contains("begins anew"), "{}", machine.told());
    machine.run("systemctl stop test.service");
    // Workers that die one after the other: it stays down, and the next process of the service has nothing of it.
    machine.start(MIRROR, "");
    machine.run(
        "for death in 1 2 3; do
             cat $dir/mount/f
             worker_dies
         done",
    );
    machine.restarted(1);
    assert_eq!(machine.run(&format!("cat $dir/mount/f; {restarts}")), "x\n(restarted 0 times)\n");
    assert!(machine.told().contains("it stays down"), "{}", machine.told());
    // Somebody unmounts it: over, without an error, with nothing left.
    machine.run("umount $dir/mount");
    eventually("the service is over", || machine.show("ActiveState") == "inactive");
    assert_eq!([machine.show("NFileDescriptorStore"), machine.show("Result")], ["0", "success"]);
}

/// A service manager that kills the process of a service at the moment in which this process reports that it is ready:
/// both run on one processor, and the manager has the higher priority.
const KILLS_AT_READY: &str = r#"
import array, os, signal, socket, subprocess, sys
program, place, patience = sys.argv[1:]
hears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
hears.settimeout(float(patience))
hears.bind(place + '/notify')
def message():
    text, ancillary, _, _ = hears.recvmsg(4096, socket.CMSG_SPACE(64))
    for _, _, data in ancillary:
        given = array.array('i', data[:len(data) - len(data) % 4])
        for number in given:
            os.close(number)
    return text
# So the process is killed before it does anything else; where that is forbidden, a moment later.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
try:
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(50))
except PermissionError:
    pass
words = 'export SYSTEMD_EXEC_PID=$$; exec "$0" mirror --survive --foreground --transport=device "$@"'
service = subprocess.Popen(['sh', '-c', words, program, place + '/source', place + '/mount'],
                           env={**os.environ, 'NOTIFY_SOCKET': place + '/notify'})
while b'READY=1' not in message():
    pass
children = open(f'/proc/{service.pid}/task/{service.pid}/children').read().split()
os.kill(int(children[-1]), signal.SIGKILL)
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
hears.settimeout(0.1)
ready = False
while service.poll() is None and not ready:
    try:
        ready = b'READY=1' in message()
    except TimeoutError:
        pass
print(open(place + '/mount/file').read() if ready else 'it is over', end='')
service.terminate()
while service.poll() is None:
    try:
        message()
    except TimeoutError:
        pass
"#;

#[test]
fn a_mount_that_has_reported_ready_goes_on() {
    needs!(crate::mounting::as_root());
    let place = scratch();
    ["source", "mount"].iter().for_each(|name| fs::create_dir(place.path().join(name)).unwrap());
    fs::write(place.path().join("source/file"), "content").unwrap();
    let mut manager = Command::new("python3");
    let patience = nacre_testkit::PATIENCE.as_secs().to_string();
    let manager = manager.arg("-c").arg(KILLS_AT_READY).arg(nacre()).arg(place.path()).arg(patience);
    let done = crate::mounting::finish(manager);
    crate::mounting::clear(place.path());
    assert_eq!(text(&done.stdout), "content", "{}", text(&done.stderr));
}

#[test]
fn two_processes_never_serve_the_same() {
    needs!(can_boot());
    let machine = Machine::boot();
    machine.start(MIRROR, "KillMode=process");
    machine.run("kill -9 $(main); echo x > $dir/mount/f");
    eventually("the next process looks for the last one", || machine.told().contains("serves still"));
    assert_eq!(machine.run("cat $dir/mount/f"), "x\n");
}

#[test]
fn an_upgrade_is_of_the_service_as_well() {
    needs!(can_boot());
    let machine = Machine::boot();
    fs::copy(nacre(), machine.at("nacre")).unwrap();
    machine.start(MIRROR, "");
    let said = machine.run(
        "cd $dir/mount; echo x > f; main=$(main)
         $dir/nacre upgrade $dir/mount
         test $main = $(main)
         test $(readlink /proc/$main/exe) = $dir/nacre
         all_die
         cat f; $nacre status $dir/mount | grep -o '(restarted.*'",
    );
    assert_eq!(said, "x\n(restarted 2 times)\n");
}

#[test]
fn a_service_without_surviving_says_when_it_answers() {
    needs!(can_boot());
    let machine = Machine::boot();
    fs::write(machine.at("source/f"), "x\n").unwrap();
    machine.start("mirror --foreground $dir/source $dir/mount", "NotifyAccess=main");
    assert_eq!(machine.run("cat $dir/mount/f; systemctl stop test.service; ls $dir/mount"), "x\n");
}
