//! `nacre pool` through the real program: pools on files, the process that owns them, the content
//! that survives its death, and refusals.
//!
//! Pools are mounted below a scratch directory, have names of their own per test and process, and
//! are destroyed at the end however the test ends.

use crate::mounting::{as_root, eventually, finish, nacre, needs, pools::Yard, text};
use std::{fs, os::unix::fs::FileExt, path::Path, process::Command};

#[test]
fn a_pool_is_made_exported_and_imported_under_another_name() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("io", &["-O", "compression=zstd", "-o", "comment=a test"]);
    fs::write(at.join("file"), b"content").unwrap();
    assert_eq!(
        yard.nacre(&["pool", "get", "-H", "-o", "value", "health,comment,readonly", &name]),
        "ONLINE\na test\noff\n"
    );
    let listed = yard.nacre(&["pool", "list", "-H", "-p", "-o", "name,size", &name]);
    assert!(listed.starts_with(&format!("{name}\t")), "{listed}");
    yard.nacre(&["pool", "export", &name]);
    assert!(!at.join("file").exists());
    assert_eq!(yard.refused(&["pool", "list", &name]).0, 3);
    // Known from before, so it is found without a given place.
    assert!(yard.nacre(&["pool", "import"]).contains(&format!("  pool: {name}\n")));
    let other = yard.name("ip");
    yard.nacre(&["pool", "import", "-d", device.to_str().unwrap(), &name, &other]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
    let history = yard.nacre(&["pool", "history", &other]);
    assert!(history.contains("pool create --size 64M") && history.contains("pool import -d"), "{history}");
    assert!(yard.nacre(&["pool", "events", "-H", &other]).contains("sysevent.fs.zfs.pool_import"));
    yard.nacre(&["pool", "destroy", &other]);
    assert!(
        yard.refused(&["pool", "import", "-d", device.to_str().unwrap(), &other]).1.contains("no such pool available")
    );
    yard.nacre(&["pool", "import", "-D", "-d", device.to_str().unwrap(), &other]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
}

#[test]
fn a_pool_whose_maker_is_killed_was_never_there() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = (yard.name("mk"), yard.path("mk.img"), yard.path("mk.at"));
    for _ in 0..4 {
        let words = ["pool", "create", "--size", "256M", "-m", at.to_str().unwrap(), &name, device.to_str().unwrap()];
        let mut maker = yard.command("nacre").args(words).spawn().unwrap();
        eventually("the file is made", || device.exists());
        maker.kill().unwrap();
        maker.wait().unwrap();
        // It may have come to its end before, and it may be seen for a moment before it is undone.
        let nothing = || yard.processes().is_empty() && !device.exists() && !at.exists();
        let destroyed = || yard.run(&["pool", "destroy", &name]).status.success() && fs::remove_file(&device).is_ok();
        eventually("all of it, or nothing", || nothing() || destroyed());
    }
    assert!(yard.state().join("pools").read_dir().is_ok_and(|mut kept| kept.next().is_none()));
}

#[test]
fn what_was_synced_survives_the_death_of_the_process() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("kl", &[]);
    for round in 0..3 {
        let path = at.join(format!("synced{round}"));
        fs::write(&path, vec![round; 100_000]).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        yard.end(&name, rustix::process::Signal::KILL);
        let checked = yard.nacre(&["pool", "check", "-d", device.to_str().unwrap()]);
        assert!(checked.starts_with("no problems: "), "{checked}");
        yard.nacre(&["pool", "import", &name]);
        for earlier in 0..=round {
            assert_eq!(fs::read(at.join(format!("synced{earlier}"))).unwrap(), vec![earlier; 100_000]);
        }
    }
    // Terminated by a signal, it exports: nothing at all is lost, and any machine may import it.
    fs::write(at.join("unsynced"), b"there").unwrap();
    yard.end(&name, rustix::process::Signal::TERM);
    assert!(!crate::mounting::is_mounted(&at));
    assert!(yard.nacre(&["pool", "inspect", "-d", device.to_str().unwrap()]).contains("state Exported"));
    yard.nacre(&["pool", "import", &name]);
    assert_eq!(fs::read(at.join("unsynced")).unwrap(), b"there");
}

#[test]
fn damage_is_found_and_named() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("dm", &["-O", "compression=off"]);
    fs::create_dir(at.join("dir")).unwrap();
    fs::write(at.join("dir/victim"), vec![b'V'; 300_000]).unwrap();
    fs::write(at.join("dir/other"), vec![b'O'; 300_000]).unwrap();
    yard.nacre(&["pool", "scrub", "-w", &name]);
    assert!(yard.nacre(&["pool", "status", &name]).contains("with 0 errors on"));
    assert_eq!(yard.nacre(&["pool", "status", "-x", &name]), format!("pool '{name}' is healthy\n"));
    yard.nacre(&["pool", "export", &name]);
    let file = fs::OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let content = fs::read(&device).unwrap();
    let place = content
        .windows(4096)
        .position(|window| window.iter().all(|byte| *byte == b'V'))
        .expect("the content of the victim");
    file.write_all_at(b"v", place as u64 + 2000).unwrap();
    let (code, said) = yard.refused(&["pool", "check", "-d", device.to_str().unwrap()]);
    assert!(code == 1 && said.contains("1 problems"), "{said}");
    yard.nacre(&["pool", "import", &name]);
    // It is never returned as data.
    let read = fs::read(at.join("dir/victim")).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(5), "{read}");
    assert_eq!(fs::read(at.join("dir/other")).unwrap(), vec![b'O'; 300_000]);
    let (code, said) = yard.refused(&["pool", "scrub", "-w", &name]);
    assert!(code == 1 && said.contains("has found 1 errors"), "{said}");
    let status = yard.nacre(&["pool", "status", "-v", &name]);
    assert!(
        status.contains("with 1 errors on") && status.contains(&format!("        {}/dir/victim\n", at.display())),
        "{status}"
    );
    assert!(yard.nacre(&["pool", "events", "-H", &name]).contains("ereport.fs.zfs.checksum"));
    // Written anew, and verified anew: nothing is damaged any more.
    fs::remove_file(at.join("dir/victim")).unwrap();
    // The kernel releases the file asynchronously.
    eventually("nothing is damaged any more", || {
        yard.nacre(&["pool", "sync", &name]);
        yard.nacre(&["pool", "clear", &name]);
        // Ends with 1 as long as something is damaged.
        yard.run(&["pool", "scrub", "-w", &name]);
        yard.nacre(&["pool", "status", "-x", &name]) == format!("pool '{name}' is healthy\n")
    });
}

#[test]
fn the_newest_state_that_can_be_read_is_gone_back_to() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("bk", &[]);
    for round in 0..4 {
        fs::write(at.join(format!("file{round}")), b"content").unwrap();
        yard.nacre(&["pool", "sync", &name]);
    }
    yard.nacre(&["pool", "export", &name]);
    let shown = device.to_str().unwrap();
    // The catalog of the last root record: the name of its frame, the place of its segment, its
    // offset there.
    let labels = yard.nacre(&["pool", "inspect", "-d", shown]);
    let last = labels.lines().rfind(|line| line.contains("  root ")).unwrap();
    let catalog = last.split("catalog ").nth(1).unwrap().split(' ').next().unwrap();
    let segment = catalog.split('.').next().unwrap();
    let frames = yard.nacre(&["pool", "inspect", "-d", shown, "--frames", segment]);
    let frame =
        frames.lines().find(|line| line.contains(&format!(": {catalog} "))).unwrap_or_else(|| panic!("{frames}"));
    let offset: u64 = frame.trim().split(':').next().unwrap().parse().unwrap();
    let segments = yard.nacre(&["pool", "inspect", "-d", shown, "--segments"]);
    let place = segments.lines().find(|line| line.starts_with(&format!("segment {segment}:"))).unwrap();
    let places = place.split("  at ").nth(1).unwrap().split(' ').next().unwrap();
    let slots = labels.split("slots of ").nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    // Metadata lies in two places: what is damaged in one of them alone is mended.
    for place in places.split(',') {
        let slot: u64 = place.strip_prefix("0:").unwrap().parse().unwrap();
        file.write_all_at(b"damaged", (1 << 20) + slot * slots + offset + 90).unwrap();
    }
    let (_, said) = yard.refused(&["pool", "import", &name]);
    assert!(said.contains(&format!("frame {catalog}: ")) && said.contains("-F goes back"), "{said}");
    assert!(yard.nacre(&["pool", "import", "-nF", &name]).contains("would go back to the newest of these"));
    let output = yard.run(&["pool", "import", "-F", &name]);
    assert!(
        output.status.success() && text(&output.stderr).contains("the pool is as it was after"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(fs::read(at.join("file0")).unwrap(), b"content");
    assert!(yard.nacre(&["pool", "check", &name]).starts_with("no problems: "));
}

#[test]
fn whoever_only_listens_keeps_no_pool() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, _, _) = yard.create("ev", &[]);
    let log = yard.path("events");
    let listener =
        yard.command("nacre").args(["pool", "events", "-fH", &name]).stdout(fs::File::create(&log).unwrap()).spawn();
    let mut listener = listener.unwrap();
    let heard = |what: &str| fs::read_to_string(&log).is_ok_and(|text| text.contains(what));
    eventually("the events until now", || heard("pool_create"));
    yard.nacre(&["pool", "scrub", "-w", &name]);
    eventually("what happens meanwhile", || heard("scrub_finish"));
    yard.nacre(&["pool", "export", &name]);
    eventually("the end of whoever listens", || listener.try_wait().unwrap().is_some());
}

#[test]
fn another_machine_asks_before_it_takes_a_pool() {
    let machine = Path::new("/etc/machine-id");
    needs!(as_root() && machine.exists());
    let yard = Yard::new();
    let (name, device, at) = yard.create("mc", &[]);
    let device = device.to_str().unwrap();
    fs::write(at.join("file"), b"content").unwrap();
    yard.nacre(&["pool", "export", &name]);
    // A machine with another identity imports it, and dies.
    let other = yard.path("identity");
    fs::write(&other, "00000000000000000000000000000001\n").unwrap();
    let there = "mount --bind \"$1\" /etc/machine-id && exec \"$2\" pool import -N -d \"$3\" \"$4\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", there, "sh"]).arg(&other).arg(nacre()).args([device, &name]);
    let output = finish(command.env("NACRE_STATE_DIR", yard.path("state")));
    assert!(output.status.success(), "{}", text(&output.stderr));
    yard.end(&name, rustix::process::Signal::KILL);
    let (code, said) = yard.refused(&["pool", "import", "-d", device, &name]);
    assert!(code == 5 && said.contains("pool was previously in use from another system"), "{said}");
    assert!(yard.nacre(&["pool", "import", "-d", device]).contains("Last accessed by "));
    yard.nacre(&["pool", "import", "-f", "-d", device, &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"content");
}

#[test]
fn a_pool_grows_by_another_file() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, _, at) = yard.create("gr", &[]);
    let more = yard.path("more.img");
    let size =
        |yard: &Yard| yard.nacre(&["pool", "list", "-H", "-p", "-o", "size", &name]).trim().parse::<u64>().unwrap();
    let before = size(&yard);
    let foreseen = yard.nacre(&["pool", "add", "-n", "--size", "128M", &name, more.to_str().unwrap()]);
    assert!(foreseen.contains("would update") && !more.exists());
    yard.nacre(&["pool", "add", "--size", "128M", &name, more.to_str().unwrap()]);
    assert!(size(&yard) > before + (100 << 20));
    fs::write(at.join("large"), vec![1; 60 << 20]).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    assert_eq!(yard.nacre(&["pool", "list", "-H", "-v", &name]).lines().count(), 3);
    yard.nacre(&["pool", "export", &name]);
    // Only devices that are named are taken, though the first one knows where the second one was.
    fs::remove_dir_all(yard.path("state")).unwrap();
    let (first, second) = (yard.path("gr.img"), more.to_str().unwrap());
    let (_, said) = yard.refused(&["pool", "import", "-d", first.to_str().unwrap(), &name]);
    assert!(said.contains("one or more devices is currently unavailable"), "{said}");
    yard.nacre(&["pool", "import", "-d", first.to_str().unwrap(), "-d", second, &name]);
    assert_eq!(fs::metadata(at.join("large")).unwrap().len(), 60 << 20);
    yard.nacre(&["pool", "export", &name]);
    fs::rename(&more, yard.path("gone")).unwrap();
    let (_, said) = yard.refused(&["pool", "import", "-d", yard.path("gr.img").to_str().unwrap(), &name]);
    assert!(said.contains("one or more devices is currently unavailable"), "{said}");
    assert!(
        yard.nacre(&["pool", "import", "-d", yard.path("gr.img").to_str().unwrap()]).contains("UNAVAIL  cannot open")
    );
    yard.nacre(&["pool", "import", "-d", yard.place.path().to_str().unwrap(), &name]);
}

#[test]
fn nothing_is_overwritten_by_mistake() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, _) = yard.create("no", &[]);
    let device = device.to_str().unwrap();
    let other = yard.name("np");
    let full = yard.path("full");
    fs::write(&full, vec![1; 64 << 20]).unwrap();
    let full = full.to_str().unwrap();
    let small = yard.path("small");
    fs::File::create(&small).unwrap().set_len(1 << 20).unwrap();
    fs::create_dir_all(yard.path("used/inside")).unwrap();
    let used = yard.path("used");
    let in_use = format!("no.img is part of active pool '{name}'");
    for (arguments, said) in [
        (&["create", &name, full][..], "pool already exists"),
        (&["create", "--size", "64M", &other, device], "it exists"),
        (&["create", &other, device], &in_use),
        (&["create", "-f", &other, device], &in_use),
        (&["create", &other, full], "it is not empty"),
        (&["create", "-f", &other, small.to_str().unwrap()], "device is too small"),
        (&["create", "--size", "1M", &other, "new"], "are too little"),
        (&["create", &other, "missing"], "No such file or directory"),
        (&["create", "-f", &other, full, full], "is named twice"),
        (&["create", "--size", "64M", "mirror", "new"], "name is reserved"),
        (&["create", "--size", "64M", "9lives", "new"], "name must begin with a letter"),
        (&["create", "--size", "64M", "-o", "nonsense=1", &other, "new"], "invalid property 'nonsense'"),
        (&["create", "--size", "64M", "-o", "autotrim=maybe", &other, "new"], "must be one of"),
        (&["create", "--size", "64M", "-O", "recordsize=3", &other, "new"], "recordsize"),
        (&["create", "--size", "64M", "-m", used.to_str().unwrap(), &other, "new"], "exists and is not empty"),
        (&["create", "--size", "64M", &other, "mirror", "a"], "mirror requires at least 2 devices"),
        (&["create", "--size", "lots", &other, "new"], "bad numeric value"),
        (&["import", "-d", device, &name], "a pool with that name is already created/imported"),
        (&["import", "-d", device, &other], "no such pool available"),
        (&["labelclear", "-f", device], "is a member (ACTIVE) of pool"),
        (&["set", "size=5", &name], "is readonly"),
        (&["set", "readonly=on", &name], "can only be set at creation"),
        (&["attach", &name, "a", "b"], "no such device in pool"),
        (&["scrub", "-s", &name], "there is no active scrub"),
        (&["get", "nonsense", &name], "invalid property"),
    ] {
        let (_, refused) = yard.refused(&[&["pool"], arguments].concat());
        assert!(refused.contains(said), "{arguments:?}: {refused}");
        assert!(!yard.path("new").exists(), "{arguments:?} has made a file");
    }
    for limit in ["quota=1", "reservation=1G"] {
        yard.refused(&["pool", "create", "-f", "-O", limit, &other, full]);
    }
    assert_eq!(fs::read(full).unwrap(), vec![1; 64 << 20]);
    yard.nacre(&["pool", "create", "-f", "-m", "none", &other, full]);
    yard.nacre(&["pool", "export", &other]);
    assert!(yard.refused(&["pool", "create", "third", full]).1.contains("part of exported pool"));
    assert!(yard.refused(&["pool", "labelclear", full]).1.contains("exported pool"));
    yard.nacre(&["pool", "labelclear", "-f", full]);
    assert!(yard.refused(&["pool", "labelclear", full]).1.contains("no label"));
}

#[test]
fn a_pool_that_is_read_only_stays_what_it_is() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("ro", &[]);
    fs::write(at.join("file"), b"kept").unwrap();
    yard.nacre(&["pool", "export", &name]);
    let before = fs::read(&device).unwrap();
    yard.nacre(&["pool", "import", "-o", "readonly=on", &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"kept");
    assert_eq!(fs::write(at.join("file"), b"new").unwrap_err().raw_os_error(), Some(30));
    assert!(yard.refused(&["pool", "set", "comment=x", &name]).1.contains("pool is read only"));
    assert!(yard.refused(&["pool", "destroy", &name]).1.contains("pool is read only"));
    yard.nacre(&["pool", "export", &name]);
    assert!(fs::read(&device).unwrap() == before, "a device was written to");
}

#[test]
fn one_gets_along_as_with_zpool() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, _, at) = yard.create("zp", &[]);
    let zpool = |arguments: &[&str]| finish(yard.command("zpool").args(arguments));
    let listed = zpool(&["list", "-Hpo", "name,health", &name]);
    assert_eq!(text(&listed.stdout), format!("{name}\tONLINE\n"));
    let missing = zpool(&["list", "nosuchpool"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).starts_with("cannot open 'nosuchpool': no such pool\n"));
    let wrong = zpool(&["list", "--nonsense"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        text(&wrong.stderr).starts_with("invalid option '--nonsense'\nusage:\n\tlist [-"),
        "{}",
        text(&wrong.stderr)
    );
    // Those that are there are shown all the same.
    let half = zpool(&["list", "-Ho", "name", "nosuchpool", &name]);
    assert_eq!((half.status.code(), text(&half.stdout)), (Some(1), format!("{name}\n")));
    // What the process says that is to own a pool is said in the same manner.
    let device = yard.path("zp.img");
    let taken = zpool(&["create", "-f", "another", device.to_str().unwrap()]);
    let said = "invalid vdev specification\nthe following errors must be manually repaired:\n";
    assert_eq!(text(&taken.stderr), format!("{said}{} is part of active pool '{name}'\n", device.display()));
    let missing = zpool(&["create", "another", yard.path("missing").to_str().unwrap()]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).starts_with("cannot open '"), "{}", text(&missing.stderr));
    assert_eq!(zpool(&["online", &name, device.to_str().unwrap()]).status.code(), Some(0));
    assert_eq!(zpool(&["online", &name, "/dev/null"]).status.code(), Some(1));
    let listed = text(&zpool(&["list", "-o", "all", &name]).stdout);
    assert!(listed.contains(" ALLOC ") && listed.contains("VERSION"), "{listed}");
    fs::write(at.join("a"), vec![1; 1 << 20]).unwrap();
    let twice = text(&zpool(&["iostat", "-H", "-v", &name, "0.05", "2"]).stdout);
    assert_eq!(twice.lines().count(), 4, "{twice}");
    let busy = fs::File::open(at.join("a")).unwrap();
    let refused = zpool(&["export", &name]);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stdout));
    // It is as it was.
    assert!(crate::mounting::is_mounted(&at));
    drop(busy);
    assert!(zpool(&["export", "-f", &name]).status.success());
}

/// Returns the allocated bytes of a file.
fn taken(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn room_is_given_back_by_hand_and_requests_are_counted() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, device, at) = yard.create("tr", &["-O", "compression=off"]);
    let path = device.to_str().unwrap();
    let content: Vec<u8> =
        (0..20u32 << 18).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    fs::write(at.join("kept"), &content[..1 << 20]).unwrap();
    fs::write(at.join("large"), &content).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    let full = taken(&device);
    fs::remove_file(at.join("large")).unwrap();
    // Until no state that could be gone back to needs it.
    for _ in 0..8 {
        fs::write(at.join("turn"), b"on").unwrap();
        yard.nacre(&["pool", "sync", &name]);
    }
    yard.nacre(&["pool", "wait", "-t", "free", &name]);
    assert!(yard.nacre(&["pool", "status", "-t", &name]).contains("(untrimmed)"));
    eventually("room on the disk", || {
        yard.nacre(&["pool", "sync", &name]);
        yard.nacre(&["pool", "trim", "-w", &name, path]);
        taken(&device) + (10 << 20) < full
    });
    assert!(yard.nacre(&["pool", "status", "-t", &name]).contains("(100% trimmed, completed at "));
    assert_eq!(fs::read(at.join("kept")).unwrap(), &content[..1 << 20]);
    let (_, said) = yard.refused(&["pool", "trim", "-c", &name]);
    assert!(said.contains("there is no active trim"), "{said}");
    let (code, said) = yard.refused(&["pool", "trim", &name, "/nowhere"]);
    assert!(code == 3 && said.contains("no such device in pool"), "{code} {said}");
    assert!(yard.nacre(&["pool", "events", "-H", &name]).contains("trim_finish"));
    // One that is slow is suspended and ended.
    yard.nacre(&["pool", "trim", "-r", "1", &name]);
    yard.nacre(&["pool", "trim", "-s", &name]);
    assert!(yard.nacre(&["pool", "status", "-t", &name]).contains("suspended"));
    yard.nacre(&["pool", "trim", "-c", &name]);
    yard.nacre(&["pool", "check", &name]);

    let sum = |shown: String, column: usize| -> u64 {
        shown.lines().map(|line| line.split('\t').nth(column).unwrap().parse::<u64>().unwrap()).sum()
    };
    for (letter, columns) in [("-w", 4), ("-r", 3)] {
        let shown = yard.nacre(&["pool", "iostat", letter, "-H", "-p", &name]);
        assert!(shown.lines().all(|line| line.split('\t').count() == columns + 2), "{shown}");
        // Some data was written, and its device was trimmed.
        assert!(sum(shown.clone(), 3) > 0 && sum(shown, columns + 1) > 0);
    }
    let shown = yard.nacre(&["pool", "iostat", "-q", "-l", "-H", "-v", &name]);
    assert!(shown.lines().count() == 2 && shown.lines().all(|line| line.split('\t').count() == 14), "{shown}");
    yard.nacre(&["pool", "clear", &name, path]);
    assert_eq!(yard.refused(&["pool", "clear", &name, "/nowhere"]).0, 3);
    assert_eq!(yard.refused(&["pool", "clear", "-F", &name]).0, 2);
    yard.nacre(&["pool", "wait", &name]);
}
