//! Reports about labels of pools, and owners of the files of pools: damage, copies, files that were
//! cut or deleted, images of other users.

use crate::mounting::{as_root, eventually, finish, needs, pools::Yard};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

/// A pool with its file as command lines have it.
fn create(yard: &Yard, short: &str) -> (String, String, PathBuf) {
    let (name, device, at) = yard.create(short, &[]);
    (name, device.to_str().unwrap().to_owned(), at)
}

#[test]
fn root_records_that_rotted_are_no_silent_step_back() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "rr");
    fs::write(at.join("before"), b"content").unwrap();
    yard.told(&["pool", "sync", &name]);
    let earlier = yard.told(&["pool", "inspect", &name]).lines().filter(|line| line.contains("  root ")).count();
    fs::write(at.join("after"), b"content").unwrap();
    yard.told(&["fs", "snapshot", &format!("{name}@taken")]);
    yard.told(&["pool", "export", &name]);
    let all = yard.told(&["pool", "inspect", "-d", &device]).lines().filter(|line| line.contains("  root ")).count();
    // One bit of each copy of all records since the file was synced.
    let file = fs::OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let flip = |offset: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
    };
    let newest = u64::try_from(all).unwrap();
    for generation in u64::try_from(earlier).unwrap() + 1..=newest {
        for label in [0, 512 << 10, 63 << 20, (63 << 20) + (512 << 10)] {
            flip(label + (128 << 10) + generation * 4096 + 60);
        }
    }
    let (_, said) = yard.refused(&["pool", "import", &name]);
    assert!(said.contains("which no power cut does") && said.contains("-F goes back"), "{said}");
    assert!(yard.refused(&["pool", "import", "-o", "readonly=on", &name]).1.contains("root record"));
    let said = yard.told(&["pool", "import", "-nF", &name]);
    assert!(said.contains("would go back to the newest of these"), "{said}");
    yard.told(&["pool", "import", "-F", "-o", "readonly=on", &name]);
    assert!(at.join("before").exists() && !at.join("after").exists());
    yard.told(&["pool", "export", &name]);
    let said = yard.told(&["pool", "import", "-F", &name]);
    assert!(said.contains("all that came after it is given up"), "{said}");
    assert_eq!(fs::read(at.join("before")).unwrap(), b"content");
    assert!(yard.told(&["pool", "check", &name]).starts_with("no problems: "));
    yard.told(&["pool", "export", &name]);
    yard.told(&["pool", "import", &name]);
}

#[test]
fn records_that_rotted_on_one_of_two_devices_cost_nothing() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "r2");
    let more = yard.path("more.img").to_str().unwrap().to_owned();
    yard.told(&["pool", "add", "--size", "64M", &name, &more]);
    fs::write(at.join("file"), b"content").unwrap();
    yard.told(&["pool", "export", &name]);
    let newest = yard.told(&["pool", "inspect", "-d", &device, "-d", &more, &name]);
    let last = newest.lines().rfind(|line| line.contains("  root ")).unwrap().trim().strip_prefix("root ").unwrap();
    let newest: u64 = last.split(':').next().unwrap().parse().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    for generation in newest - 3..=newest {
        for label in [0, 512 << 10, 63 << 20, (63 << 20) + (512 << 10)] {
            file.write_all_at(b"damaged", label + (128 << 10) + generation % 96 * 4096 + 60).unwrap();
        }
    }
    let said = yard.told(&["pool", "import", &name]);
    assert_eq!((said.as_str(), fs::read(at.join("file")).unwrap()), ("", b"content".to_vec()));
}

#[test]
fn a_file_that_was_cut_is_read_and_made_whole_again() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "ct");
    fs::write(at.join("file"), b"content").unwrap();
    yard.told(&["pool", "export", &name]);
    let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    file.set_len((64 << 20) - 1).unwrap();
    let (_, said) = yard.refused(&["pool", "import", &name]);
    assert!(said.contains("has become shorter: 67108863 of 67108864 bytes are there"), "{said}");
    assert!(said.contains(&format!("truncate -s 67108864 {device}")) && said.contains("readonly=on"), "{said}");
    // What is there can be looked at.
    assert!(yard.told(&["pool", "check", "-d", &device]).starts_with("no problems: "));
    yard.told(&["pool", "import", "-o", "readonly=on", &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
    yard.told(&["pool", "export", &name]);
    file.set_len(64 << 20).unwrap();
    yard.told(&["pool", "import", &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
    yard.told(&["pool", "scrub", "-w", &name]);
    assert!(yard.told(&["pool", "status", &name]).contains("with 0 errors"));
}

#[test]
fn a_copy_is_not_mounted_over_the_pool() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "cp");
    fs::write(at.join("file"), b"content").unwrap();
    yard.told(&["pool", "export", &name]);
    let copy = yard.path("copy.img").to_str().unwrap().to_owned();
    fs::copy(&device, &copy).unwrap();
    let altroot = yard.path("elsewhere");
    yard.told(&["pool", "import", "-d", &device, &name]);
    fs::write(at.join("file"), b"newer").unwrap();
    let other = yard.name("cq");
    let (_, said) = yard.refused(&["pool", "import", "-d", &copy, &name, &other]);
    assert!(said.contains("it is a copy of a pool that is imported") && said.contains("-R DIRECTORY"), "{said}");
    assert_eq!(fs::read(at.join("file")).unwrap(), b"newer");
    yard.told(&["pool", "import", "-R", altroot.to_str().unwrap(), "-d", &copy, &name, &other]);
    let there = altroot.join(at.strip_prefix("/").unwrap());
    assert_eq!(
        (fs::read(there.join("file")).unwrap(), fs::read(at.join("file")).unwrap()),
        (b"content".to_vec(), b"newer".to_vec())
    );
    yard.told(&["pool", "export", &other]);
    // Nor is one that comes without mounts at first, and mounts later.
    yard.told(&["pool", "import", "-N", "-d", &copy, &other]);
    let (_, said) = yard.refused(&["fs", "mount", "-O", &other]);
    assert!(said.contains(&format!("'{name}' of another pool is mounted there")), "{said}");
    yard.told(&["pool", "export", &other]);
    // It is the pool that is remembered, not its copy.
    yard.told(&["pool", "export", &name]);
    assert!(yard.told(&["pool", "import"]).contains(&device));
}

#[test]
fn a_file_that_was_deleted_is_said_and_saved() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "dl");
    fs::write(at.join("file"), b"content").unwrap();
    assert!(yard.told(&["pool", "status", "-x", &name]).contains("is healthy"));
    fs::remove_file(&device).unwrap();
    let log = Path::new("/run/nacre").join(format!("{name}.log"));
    fs::write(at.join("more"), b"content").unwrap();
    eventually("a word in the log", || {
        fs::read_to_string(&log).is_ok_and(|text| text.contains("the file was deleted"))
    });
    assert_eq!(yard.told(&["pool", "list", "-H", "-o", "health", &name]), "DEGRADED\n");
    let said = yard.told(&["pool", "status", "-x", &name]);
    assert!(said.contains(&format!("The file {device} was deleted.")) && said.contains("REMOVED"), "{said}");
    let (_, said) = yard.refused(&["pool", "export", &name]);
    assert!(said.contains("was deleted: it is there as long as the pool is imported"), "{said}");
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content", "mounts stay");
    // As it says.
    let open = said.split("--sparse=always ").nth(1).unwrap().split(' ').next().unwrap();
    let saved = yard.path("saved.img");
    yard.told(&["pool", "sync", &name]);
    assert!(finish(Command::new("cp").args(["--sparse=always", open]).arg(&saved)).status.success());
    yard.told(&["pool", "export", "-f", &name]);
    yard.told(&["pool", "import", "-d", saved.to_str().unwrap(), &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
    assert!(yard.told(&["pool", "check", &name]).starts_with("no problems: "));
}

/// The options of the mount at a place.
fn options(at: &Path) -> Option<String> {
    let table = crate::mounting::mount_table();
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == at.to_str())?;
    line.split(' ').nth(5).map(str::to_owned)
}

#[test]
fn what_others_can_write_is_imported_harmless_and_elsewhere() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = create(&yard, "an");
    yard.told(&["fs", "create", "-u", "-o", "mountpoint=/etc/cron.d", &format!("{name}/cron")]);
    fs::write(at.join("file"), b"content").unwrap();
    yard.told(&["pool", "export", &name]);
    let below = Path::new("/mnt").join(&name);
    let place = |path: &Path| below.join(path.strip_prefix("/").unwrap());
    // The file belongs to another user; its group may write to it; its directory belongs to another
    // user.
    let directory = yard.path("home");
    fs::create_dir(&directory).unwrap();
    let there = directory.join("an.img");
    for round in 0..3 {
        let (mut owner, mut mode, mut path) = (0, 0o600, PathBuf::from(&device));
        match round {
            0 => owner = 1000,
            1 => mode = 0o660,
            _ => {
                fs::rename(&device, &there).unwrap();
                std::os::unix::fs::chown(&directory, Some(1000), Some(1000)).unwrap();
                path.clone_from(&there);
            }
        }
        std::os::unix::fs::chown(&path, Some(owner), None).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let said = yard.told(&["pool", "import", "-d", path.to_str().unwrap(), &name]);
        assert!(
            said.contains("can be written or replaced by others than root") && said.contains("nosuid, nodev"),
            "{said}"
        );
        assert_eq!(options(&at), None);
        for mounted in [place(&at), place(Path::new("/etc/cron.d"))] {
            let options = options(&mounted).unwrap_or_else(|| panic!("{} is not mounted", mounted.display()));
            assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
        }
        assert_eq!(fs::read(place(&at).join("file")).unwrap(), b"content");
        // Nor later.
        yard.told(&["fs", "unmount", &name]);
        yard.told(&["fs", "mount", "-o", "suid,dev", &name]);
        yard.told(&["fs", "set", "setuid=on", &name]);
        assert!(options(&place(&at)).unwrap().contains("nosuid"));
        yard.told(&["pool", "export", &name]);
    }
    // On demand all is as it says, but for what is the system's own.
    let (code, said) = yard.refused(&["pool", "import", "-f", "-d", there.to_str().unwrap(), &name]);
    assert!(code == 1 && said.contains("cannot mount '/etc/cron.d': it is a directory of the system"), "{said}");
    assert!(!options(&at).unwrap().contains("nosuid"));
    assert_eq!(options(Path::new("/etc/cron.d")), None);
    yard.told(&["pool", "export", &name]);
    let _ = fs::remove_dir_all(&below);
}

#[test]
fn another_pool_at_a_remembered_place_is_passed_over() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, _) = create(&yard, "rm");
    let (other, exchanged, _) = create(&yard, "rn");
    for pool in [&name, &other] {
        yard.told(&["pool", "export", pool]);
    }
    fs::rename(&exchanged, &device).unwrap();
    let (_, said) = yard.refused(&["pool", "import", &other]);
    assert!(
        said.contains("another one lies here now: passed over") && said.contains("no such pool available"),
        "{said}"
    );
    yard.told(&["pool", "import", "-d", &device, &other]);
}

/// Returns the output of `nacre pool probe` for udev.
fn probed(member: &str, pool: &str, name: &str) -> String {
    format!(
        "ID_FS_TYPE=nacre_member\nID_FS_USAGE=raid\nID_FS_VERSION=1\nID_FS_LABEL={name}\nID_FS_LABEL_ENC={name}\n\
         ID_FS_UUID={pool}\nID_FS_UUID_ENC={pool}\nID_FS_UUID_SUB={member}\nID_FS_UUID_SUB_ENC={member}\n"
    )
}

#[test]
fn udev_gets_to_know_the_pool_of_a_device() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, _) = create(&yard, "pr");
    // The pool has its lock on the device meanwhile.
    let said = yard.nacre(&["pool", "probe", &device]);
    let value = |key: &str| said.lines().find_map(|line| line.strip_prefix(key)).unwrap().to_owned();
    let (pool, member) = (value("ID_FS_UUID="), value("ID_FS_UUID_SUB="));
    assert_eq!(said, probed(&member, &pool, &name));
    assert_eq!(yard.told(&["pool", "get", "-H", "-o", "value", "guid", &name]).trim(), pool);
    yard.told(&["pool", "export", &name]);
    assert_eq!(yard.nacre(&["pool", "probe", &device]), said);
    // As the rule has it.
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/udev/61-nacre.rules");
    let rules = fs::read_to_string(rules).unwrap();
    let program = rules.split("IMPORT{program}=\"").nth(1).unwrap().split('"').next().unwrap();
    let words = program.strip_prefix("/usr/bin/nacre ").unwrap().replace("$devnode", &device);
    assert_eq!(yard.nacre(&words.split(' ').collect::<Vec<_>>()), said);
    // One label is damaged, its checksum no longer fits: another one counts.
    let file = fs::OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let mut first = vec![0; 32 << 10];
    file.read_exact_at(&mut first, 64 << 10).unwrap();
    file.write_all_at(b"ID_FS_TYPE=ext4\n", (64 << 10) + 70).unwrap();
    assert_eq!(yard.nacre(&["pool", "probe", &device]), said);
    // Something else begins there: the labels at the end are left over.
    file.write_all_at(&vec![0; 1 << 20], 0).unwrap();
    assert_eq!(yard.refused(&["pool", "probe", &device]).0, 3);
    file.write_all_at(&first, 64 << 10).unwrap();
    assert_eq!(yard.nacre(&["pool", "probe", &device]), said);
    yard.told(&["pool", "import", "-d", &device, &name]);
    yard.told(&["pool", "destroy", &name]);
    let (code, said) = yard.refused(&["pool", "probe", &device]);
    assert!(code == 3 && said.contains("is destroyed"), "{code}: {said}");
    let pipe = yard.path("pipe").to_str().unwrap().to_owned();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for other in ["/dev/null", "/dev/nosuch", pipe.as_str()] {
        yard.refused(&["pool", "probe", other]);
    }
}

/// The type that libblkid finds on a device; nothing where it finds none.
fn known_to_blkid(device: &str) -> String {
    let output =
        Command::new("blkid").args(["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "value", device]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Signatures of other formats are erased when a device becomes part of a pool: a program that
/// mounted by them would overwrite the pool.
#[test]
fn a_device_of_a_pool_has_no_superblock_of_another_file_system() {
    needs!(as_root());
    let yard = Yard::new();
    let made = |name: &str| {
        let device = yard.path(name).to_str().unwrap().to_owned();
        // A remainder behind the last label.
        fs::File::create(&device).unwrap().set_len((128 << 20) + 300_000).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F", &device]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
        file.write_all_at(b"left over", (128 << 20) + 290_000).unwrap();
        assert_eq!(known_to_blkid(&device), "ext4");
        device
    };
    let check = |device: &str| {
        assert_eq!(known_to_blkid(device), "");
        let mut end = vec![1; 300_000];
        fs::File::open(device).unwrap().read_exact_at(&mut end, 128 << 20).unwrap();
        assert!(end.iter().all(|byte| *byte == 0));
        yard.nacre(&["pool", "probe", device]);
    };
    let [one, two, three, four] = ["one", "two", "three", "four"].map(made);
    let (name, at) = (yard.name("fo"), yard.path("at").to_str().unwrap().to_owned());
    let (_, said) = yard.refused(&["pool", "create", "-m", &at, &name, &one]);
    assert!(said.contains("contains a filesystem of type 'ext4'"), "{said}");
    assert_eq!(known_to_blkid(&one), "ext4");
    yard.told(&["pool", "create", "-f", "-m", &at, &name, &one]);
    check(&one);
    yard.told(&["pool", "add", "-f", &name, &two]);
    check(&two);
    yard.told(&["pool", "attach", "-fw", &name, &one, &three]);
    check(&three);
    yard.told(&["pool", "replace", "-fw", &name, &two, &four]);
    check(&four);
    yard.told(&["pool", "export", &name]);
    assert!(yard.refused(&["pool", "create", &yard.name("of"), &one]).1.contains("is part of exported pool"));
}
