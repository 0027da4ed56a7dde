//! Rules that the kernel enforces before the FUSE front end, and calls that are passed to the files below:
//! ACLs, locks, ioctls, stacking.

use crate::fixture::{Mirror, counts, eventually, mounted, on_each_transport};
use nacre_layers::host::{Host, HostOptions};
use nacre_stack::spec::HostCoherence;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::fd::AsFd,
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

const USER: u32 = 12_345;

fn as_user(command: &str) -> bool {
    Command::new("sh").arg("-c").arg(command).uid(USER).gid(USER).status().unwrap().success()
}

fn ran(program: &str, arguments: &[&str], path: &Path) -> Option<String> {
    let output = Command::new(program).args(arguments).arg(path).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn open_to_all(mirror: &Mirror) {
    for path in [mirror.below(""), mirror.path("")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
}

#[test]
fn acls_of_the_source_decide() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("f"), "for some").unwrap());
        open_to_all(&mirror);
        fs::set_permissions(mirror.path("f"), fs::Permissions::from_mode(0o600)).unwrap();
        let entry = format!("u:{USER}:r");
        if ran("setfacl", &["-m", &entry], &mirror.path("f")).is_none() {
            println!(
                "skipped: setfacl is missing, or the file system of the test has no ACLs: {:?}",
                mirror.mount.status().acls
            );
            return;
        }
        assert!(mirror.mount.status().acls);
        assert_eq!(ran("getfacl", &["-cpn"], &mirror.path("f")), ran("getfacl", &["-cpn"], &mirror.below("f")));
        assert!(as_user(&format!("cat '{}' >/dev/null", mirror.path("f").display())));
        assert!(!as_user(&format!("echo x 2>/dev/null >> '{}'", mirror.path("f").display())));
        // A default ACL, not the umask, decides what new files get.
        fs::create_dir(mirror.path("d")).unwrap();
        ran("setfacl", &["-d", "-m", "u::rwx,g::rwx,o::rwx"], &mirror.path("d")).unwrap();
        fs::set_permissions(mirror.path("d"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(as_user(&format!("umask 077; touch '{}'", mirror.path("d/new").display())));
        assert_eq!(fs::metadata(mirror.below("d/new")).unwrap().mode() & 0o777, 0o666);
        assert!(as_user(&format!("umask 077; touch '{}'", mirror.path("plain").display())));
        assert_eq!(fs::metadata(mirror.below("plain")).unwrap().mode() & 0o777, 0o600);
    });
}

/// The kernel fails to cache the absence of an ACL for its first inode of a mount, and only for that one; so
/// that inode is not the visible root.
#[test]
fn a_path_costs_users_nothing_either() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |source| fs::write(source.join("file"), "x").unwrap());
        if !mirror.mount.status().acls {
            println!("skipped: no ACLs here");
            return;
        }
        open_to_all(&mirror);
        let walk = || assert!(as_user(&format!("test -e '{}'", mirror.path("file").display())));
        walk();
        assert_eq!(mirror.cost(walk), counts([]));
    });
}

#[test]
fn a_file_that_others_made_meanwhile_is_not_handed_out_as_a_new_one() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |_| ());
        open_to_all(&mirror);
        for command in [">>", ">"] {
            // The kernel caches the name as free, and is not notified otherwise.
            assert!(fs::metadata(mirror.path("private")).is_err());
            fs::write(mirror.below("private"), "secret").unwrap();
            fs::set_permissions(mirror.below("private"), fs::Permissions::from_mode(0o600)).unwrap();
            assert!(
                !as_user(&format!("echo x 2>/dev/null {command} '{}'", mirror.path("private").display())),
                "{command}"
            );
            assert_eq!(fs::read(mirror.below("private")).unwrap(), b"secret", "{command}");
            fs::remove_file(mirror.path("private")).unwrap();
        }
        // A user with permission opens it.
        assert!(fs::metadata(mirror.path("shared")).is_err());
        fs::write(mirror.below("shared"), "a").unwrap();
        OpenOptions::new().create(true).append(true).open(mirror.path("shared")).unwrap().write_all(b"b").unwrap();
        assert_eq!(fs::read(mirror.below("shared")).unwrap(), b"ab");
    });
}

#[test]
fn forwarded_locks_hold_against_processes_outside() {
    on_each_transport(|transport| {
        let fill = |source: &Path| fs::write(source.join("f"), "locked").unwrap();
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, fill, |options| options.lock_forwarding = true);
        let path = |inside: bool| if inside { mirror.path("f") } else { mirror.below("f") };
        let free = |inside: bool| {
            let path = path(inside);
            Command::new("flock").arg("-n").arg(path).arg("true").status().unwrap().success()
        };
        let file = File::open(mirror.path("f")).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(!free(true) && !free(false), "held inside");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
        assert!(free(true), "released");
        // The processes that locked it meanwhile were inside, and their last close arrives a moment later.
        eventually("released outside", || free(false));
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        drop(file);
        eventually("closing releases", || free(false));
        // A waiting process gets the lock when it is free; meanwhile other requests are served.
        let outside = File::open(mirror.below("f")).unwrap();
        rustix::fs::flock(&outside, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let waiters: Vec<_> =
            (0..6).map(|_| Command::new("flock").arg(mirror.path("f")).arg("true").spawn().unwrap()).collect();
        for round in 0..50 {
            fs::write(mirror.path("other"), format!("{round}")).unwrap();
            assert_eq!(fs::read_to_string(mirror.path("other")).unwrap(), format!("{round}"));
        }
        drop(outside);
        for mut waiter in waiters {
            assert!(waiter.wait().unwrap().success());
        }
        // A waiting process that is killed ends.
        let outside = File::open(mirror.below("f")).unwrap();
        rustix::fs::flock(&outside, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let mut waiter = Command::new("flock").arg(mirror.path("f")).arg("true").spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        waiter.kill().unwrap();
        assert!(!waiter.wait().unwrap().success());
        drop(outside);
        eventually("nobody holds it", || free(true));
    });
}

/// Locks of an open file (`F_OFD_SETLK`) end with it, also where others have the file open, and not before.
#[test]
fn forwarded_locks_of_an_open_file_end_with_it() {
    use nacre_sys::locks::{Kind, Range, set, test};
    let range = Range { kind: Kind::Write, start: 100, length: 1, pid: 0 };
    on_each_transport(|transport| {
        let fill = |source: &Path| fs::write(source.join("f"), "locked").unwrap();
        let mirror = Mirror::new(transport, HostCoherence::Exclusive, fill, |options| options.lock_forwarding = true);
        let open = |path: PathBuf| OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (inside, outside) = (open(mirror.path("f")), open(mirror.below("f")));
        let is_free = || [&inside, &outside].map(|file| test(file.as_fd(), range).unwrap().kind) == [Kind::Unlock; 2];
        let (holder, other) = (open(mirror.path("f")), open(mirror.path("f")));
        set(holder.as_fd(), range, false).unwrap();
        assert!(!is_free());
        drop(other);
        assert!(!is_free(), "another open file has been closed");
        drop(holder);
        eventually("it ends with its file", is_free);
        set(inside.as_fd(), range, false).unwrap();
        assert_eq!(test(outside.as_fd(), range).unwrap().kind, Kind::Write);
    });
}

#[test]
fn file_flags_are_those_of_the_source() {
    on_each_transport(|transport| {
        let source = tempfile::tempdir().unwrap();
        let below = |name: &str| source.path().join(name);
        fs::write(below("f"), "").unwrap();
        fs::create_dir(below("d")).unwrap();
        let options = HostOptions { coherence: HostCoherence::Exclusive, ..HostOptions::new(source.path()) };
        let (mount, place) = mounted(Arc::new(Host::open(options).unwrap()), transport, |_| {});
        // Declared after the directory: dropped before it.
        let _mount = mount;
        let path = |name: &str| place.path().join(name);
        let flags = |path: &Path| {
            ran("lsattr", &["-d"], path).map(|text| text.split(' ').next().unwrap_or_default().to_owned())
        };
        for name in ["f", "d"] {
            let Some(native) = flags(&below(name)) else {
                println!("skipped: lsattr is missing, or the file system of the test has no flags");
                return;
            };
            assert_eq!(flags(&path(name)), Some(native));
            ran("chattr", &["+A"], &path(name)).unwrap();
            assert!(flags(&below(name)).unwrap().contains('A'));
            assert_eq!(flags(&path(name)), flags(&below(name)));
            ran("chattr", &["-A"], &path(name)).unwrap();
        }
        // An ioctl that is not for files is refused as natively.
        let file = File::open(path("f")).unwrap();
        assert_eq!(rustix::termios::tcgetattr(&file).err(), Some(rustix::io::Errno::NOTTY));
    });
}

#[test]
fn a_mount_over_a_mount_works() {
    on_each_transport(|transport| {
        let lower = Mirror::exclusive(transport, |source| fs::write(source.join("f"), "deep").unwrap());
        let host = Host::open(HostOptions { coherence: HostCoherence::Exclusive, ..HostOptions::new(lower.path("")) })
            .unwrap();
        let (upper, place) = mounted(Arc::new(host), transport, |_| {});
        assert_eq!(fs::read(place.path().join("f")).unwrap(), b"deep");
        let mut file = OpenOptions::new().read(true).append(true).open(place.path().join("f")).unwrap();
        file.write_all(b"er").unwrap();
        let mut text = String::new();
        File::open(place.path().join("f")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "deeper");
        assert_eq!(fs::read(lower.below("f")).unwrap(), b"deeper");
        fs::write(place.path().join("g"), vec![7; 300_000]).unwrap();
        assert_eq!(fs::read(lower.below("g")).unwrap(), vec![7; 300_000]);
        drop(file);
        upper.unmount(true).unwrap();
        upper.wait();
    });
}

#[test]
fn killed_callers_leave_nothing_behind() {
    on_each_transport(|transport| {
        let fill = |source: &Path| (0..300).for_each(|i| fs::write(source.join(format!("f{i}")), "x").unwrap());
        let mirror = Mirror::new(transport, HostCoherence::Revalidate, fill, |_| {});
        for _ in 0..20 {
            let script = "while :; do cat f* >/dev/null; ls -l >/dev/null; : > new$$; rm -f new$$; done";
            let mut victims: Vec<_> = (0..3)
                .map(|_| {
                    Command::new("sh")
                        .arg("-c")
                        .arg(script)
                        .current_dir(mirror.path(""))
                        .stderr(Stdio::null())
                        .spawn()
                        .unwrap()
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_millis(15));
            for victim in &mut victims {
                victim.kill().unwrap();
                victim.wait().unwrap();
            }
        }
        eventually("all files are closed", || mirror.mount.status().open_files == 0);
        fs::read_dir(mirror.path("")).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
        eventually("all files are forgotten", || mirror.mount.status().inodes <= 2);
    });
}

#[test]
fn many_files_can_be_open_at_once() {
    on_each_transport(|transport| {
        let mirror = Mirror::exclusive(transport, |_| {});
        let files: Vec<File> = (0..300)
            .map(|i| {
                OpenOptions::new().read(true).write(true).create_new(true).open(mirror.path(&format!("f{i}"))).unwrap()
            })
            .collect();
        for (i, file) in files.iter().enumerate() {
            file.write_all_at(format!("{i}").as_bytes(), 0).unwrap();
        }
        for i in 0..300 {
            assert_eq!(fs::read_to_string(mirror.path(&format!("f{i}"))).unwrap(), format!("{i}"));
        }
        eventually("only these are open", || mirror.mount.status().open_files == 300);
        drop(files);
        eventually("all are closed", || mirror.mount.status().open_files == 0);
    });
}
