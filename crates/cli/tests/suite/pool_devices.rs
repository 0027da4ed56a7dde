//! Pools and the files that they lie on: a disk that has no room, copies of a device, names for one
//! import.

use crate::mounting::{as_root, eventually, nacre, needs, pools::Yard, text};
use std::{
    fs,
    os::unix::{fs::FileExt, process::CommandExt},
    path::Path,
    process::Command,
};

/// Resizes a disk to this much more than its content, MiB.
fn room(disk: &Path, more: u64) {
    let held = fs::metadata(disk.join("img")).map_or(0, |image| std::os::unix::fs::MetadataExt::blocks(&image) / 2048);
    let size = format!("remount,size={}m", held + more);
    assert!(crate::mounting::run("mount", ["-o", &size, disk.to_str().unwrap()]).status.success());
}

#[test]
fn a_disk_without_room_is_waited_for_given_up_or_fatal() {
    needs!(as_root());
    let yard = Yard::new();
    let (disk, at) = (yard.path("disk"), yard.path("at"));
    fs::create_dir(&disk).unwrap();
    assert!(
        crate::mounting::run("mount", ["-t", "tmpfs", "-o", "size=40m", "tmpfs", disk.to_str().unwrap()])
            .status
            .success()
    );
    let name = yard.name("fm");
    let create = [
        "pool",
        "create",
        "-o",
        "failmode=wait",
        "-O",
        "compression=off",
        "--size",
        "256M",
        "-m",
        at.to_str().unwrap(),
    ];
    yard.nacre(&[&create[..], &[&name, "disk/img"]].concat());
    let fill = |file: &str| {
        let target = format!("of={}", at.join(file).display());
        Command::new("dd")
            .args(["if=/dev/urandom", &target, "bs=1M", "count=60", "conv=fsync", "status=none"])
            .spawn()
            .unwrap()
    };
    let suspended = || yard.nacre(&["pool", "list", "-H", "-o", "health", &name]) == "SUSPENDED\n";
    // It continues at the same place when there is free space.
    let mut filling = fill("kept");
    eventually("the pool waits", suspended);
    let status = yard.nacre(&["pool", "status", &name]);
    assert!(status.contains("everybody waits until it can be made") && status.contains("No space left"), "{status}");
    // A command about all pools is not kept waiting by this one.
    for words in [&["fs", "list"][..], &["fs", "get", "used"], &["fs", "list", &name]] {
        let output = yard.run(words);
        let said = text(&output.stderr);
        // What others on this machine have may be stuck as well.
        let told = said.contains(&format!("pool '{name}' does not answer: it is suspended"));
        assert!(told || text(&output.stdout).contains(&name), "{words:?}: {said}");
    }
    room(&disk, 60);
    yard.nacre(&["pool", "clear", &name]);
    assert!(filling.wait().unwrap().success());
    eventually("the pool goes on", || !suspended());
    let kept = fs::read(at.join("kept")).unwrap();
    assert_eq!(kept.len(), 60 << 20);
    // Waiting processes are released with the pool.
    room(&disk, 8);
    let mut filling = fill("more");
    eventually("the pool waits", suspended);
    yard.nacre(&["pool", "export", "-f", &name]);
    assert!(!filling.wait().unwrap().success());
    room(&disk, 200);
    yard.nacre(&["pool", "import", "-d", disk.to_str().unwrap(), &name]);
    assert!(fs::read(at.join("kept")).unwrap() == kept);
    // As a crash.
    yard.nacre(&["pool", "set", "failmode=panic", &name]);
    room(&disk, 8);
    assert!(!fill("more").wait().unwrap().success());
    eventually("the end of the process", || yard.nacre(&["pool", "list", "-H", "-o", "health", &name]) == "UNAVAIL\n");
    room(&disk, 200);
    yard.nacre(&["pool", "import", "-d", disk.to_str().unwrap(), &name]);
    assert!(fs::read(at.join("kept")).unwrap() == kept);
    assert!(yard.nacre(&["pool", "check", &name]).contains("no problems"));
}

#[test]
fn of_several_copies_of_a_device_the_newest_is_imported() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("cp"), yard.path("at"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    fs::write(at.join("file"), b"old").unwrap();
    yard.nacre(&["pool", "export", &name]);
    fs::copy(yard.path("img"), yard.path("backup")).unwrap();
    let (_, twins) = yard.refused(&["pool", "import", "-d", ".", &name]);
    assert!(twins.contains("are copies of the same device") && twins.contains("-d FILE"), "{twins}");
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    fs::write(at.join("file"), b"new").unwrap();
    yard.nacre(&["pool", "export", &name]);
    let output = yard.run(&["pool", "import", "-d", ".", &name]);
    assert!(
        output.status.success() && text(&output.stderr).contains("backup: an older copy of device 0"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(fs::read(at.join("file")).unwrap(), b"new");
}

/// Overwrites the newest leaf of the catalog in an image, all copies of it (docs/pool-format.md).
fn lose_catalog(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let number = |at: usize, length: usize| {
        let number = bytes[at..at + length].iter().rev();
        number.fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
    };
    let is_leaf_of_catalog =
        |at: &usize| bytes[*at..*at + 4] == *b"NFr1" && bytes[at + 48] == 2 && number(at + 56, 8) == 0;
    let leaves: Vec<usize> = (0..bytes.len() - 80).step_by(16).filter(is_leaf_of_catalog).collect();
    let name = |at: usize| (number(at + 24, 8), number(at + 8, 4), number(at + 12, 4));
    let newest = leaves.iter().map(|at| name(*at)).max().unwrap();
    let lost: Vec<(usize, u64)> =
        leaves.into_iter().filter(|at| name(*at) == newest).map(|at| (at, 80 + number(at + 16, 4))).collect();
    lost.into_iter().for_each(|(at, length)| bytes[at..at + usize::try_from(length).unwrap()].fill(0));
    fs::write(image, bytes).unwrap();
}

#[test]
fn a_pool_whose_catalog_is_lost_is_shown_as_it_was() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at, image) = (yard.name("cat"), yard.path("at"), yard.path("img"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    fs::write(at.join("file"), b"kept").unwrap();
    yard.nacre(&["pool", "sync", &name]);
    fs::write(at.join("later"), b"later").unwrap();
    yard.nacre(&["pool", "export", &name]);
    lose_catalog(&image);
    for words in [&["pool", "import"][..], &["pool", "import", "-o", "readonly=on"]] {
        let (_, said) = yard.refused(&[words, &["-d", "img", &name]].concat());
        let lost = "the catalog, which lists its file systems, is lost or damaged: frame ";
        assert!(said.contains(lost) && said.contains("-F -o readonly=on shows it"), "{words:?}: {said}");
    }
    let before = fs::read(&image).unwrap();
    let said = yard.told(&["pool", "import", "-F", "-o", "readonly=on", "-d", "img", &name]);
    assert!(said.contains("nothing is given up"), "{said}");
    assert_eq!(fs::read(at.join("file")).unwrap(), b"kept");
    assert!(fs::write(at.join("file"), b"other").is_err());
    yard.nacre(&["pool", "export", &name]);
    assert!(fs::read(&image).unwrap() == before, "something was written to the device");
    let said = yard.told(&["pool", "import", "-F", "-d", "img", &name]);
    assert!(said.contains("all that came after it is given up"), "{said}");
    assert_eq!(fs::read(at.join("file")).unwrap(), b"kept");
}

#[test]
fn an_older_state_is_shown_by_an_import_that_writes_nothing() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("past"), yard.path("at"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    fs::write(at.join("file"), b"old").unwrap();
    yard.nacre(&["pool", "sync", &name]);
    fs::write(at.join("file"), b"new").unwrap();
    yard.nacre(&["pool", "export", &name]);
    // The states that are kept, by a refusal that lists them.
    let (_, said) = yard.refused(&["pool", "import", "-T", "1000000", "-d", "img", &name]);
    let (_, listed) = said.split_once("these are: ").unwrap();
    let states = listed.lines().next().unwrap().split(", ").map(str::to_owned);
    let content = |state: &str| {
        yard.nacre(&["pool", "import", "-T", state, "-o", "readonly=on", "-d", "img", &name]);
        let content = fs::read_to_string(at.join("file")).unwrap_or_default();
        yard.nacre(&["pool", "export", &name]);
        content
    };
    let mut seen: Vec<String> = states.map(|state| content(&state)).collect();
    seen.dedup();
    assert!(seen.ends_with(&["old".to_owned(), "new".to_owned()]), "{seen:?}");
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert_eq!(fs::read(at.join("file")).unwrap(), b"new");
}

#[test]
fn a_name_for_one_import_leaves_the_pool_its_own() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, other, at) = (yard.name("tn"), yard.name("to"), yard.path("at"));
    yard.nacre(&["pool", "create", "--size", "64M", "-m", at.to_str().unwrap(), &name, "img"]);
    yard.nacre(&["fs", "create", &format!("{name}/a")]);
    yard.nacre(&["pool", "export", &name]);
    assert!(yard.refused(&["pool", "import", "-d", "img", "-t", &name]).1.contains("-t wants a name"));
    yard.nacre(&["pool", "import", "-d", "img", "-t", &name, &other]);
    yard.nacre(&["fs", "create", &format!("{other}/b")]);
    assert_eq!(
        yard.nacre(&["fs", "list", "-H", "-o", "name", "-r", &other]),
        format!("{other}\n{other}/a\n{other}/b\n")
    );
    assert!(yard.nacre(&["pool", "status", &other]).contains(&format!("pool: {other}\n")));
    yard.nacre(&["pool", "export", &other]);
    yard.nacre(&["pool", "import", "-d", "img", "-o", "readonly=on", "-t", &name, &other]);
    assert_eq!(yard.nacre(&["fs", "list", "-H", "-o", "name", &other]), format!("{other}\n"));
    yard.nacre(&["pool", "export", &other]);
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert_eq!(yard.nacre(&["fs", "list", "-H", "-o", "name", "-r", &name]), format!("{name}\n{name}/a\n{name}/b\n"));
}

#[test]
fn a_device_that_has_become_longer_is_used_to_its_end() {
    needs!(as_root());
    let yard = Yard::new();
    let (image, at) = (yard.path("img"), yard.path("at"));
    let name = yard.name("ax");
    let create = ["pool", "create", "-O", "compression=off", "--size", "256M", "-m", at.to_str().unwrap()];
    yard.nacre(&[&create[..], &[&name, "img"]].concat());
    let size =
        |property: &str| yard.nacre(&["pool", "get", "-H", "-p", "-o", "value", property, &name]).trim().to_owned();
    let bytes = |property: &str| size(property).parse::<u64>().unwrap();
    let (before, kept) = (bytes("size"), vec![7; 20 << 20]);
    fs::write(at.join("kept"), &kept).unwrap();
    assert!(yard.refused(&["pool", "online", &name]).1.contains("missing"));
    assert!(yard.refused(&["pool", "online", "-e", &name, "other"]).1.contains("no such device in pool"));
    // While it is imported, on request.
    let longer = fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
    longer.set_len(512 << 20).unwrap();
    // The copy of a partition table at the new end.
    let table = (512 << 20) - 512;
    longer.write_all_at(b"EFI PART", table).unwrap();
    assert_eq!(size("expandsize"), "-");
    yard.nacre(&["pool", "online", "-e", &name, "img"]);
    let mut there = [1; 8];
    longer.read_exact_at(&mut there, table).unwrap();
    assert_ne!(&there, b"EFI PART");
    let grown = bytes("size");
    assert!(grown > before + (200 << 20), "{before} {grown}");
    // More than there was room for before: some of it lies where the old end was.
    let piece: Vec<u8> = (0..997_u32 << 8).map(|at| (at / 997) as u8).collect();
    let mut much = piece.repeat((300 << 20) / piece.len());
    much.extend(&piece[..1000]);
    fs::write(at.join("much"), &much).unwrap();
    fs::File::open(at.join("much")).unwrap().sync_all().unwrap();
    yard.nacre(&["pool", "export", &name]);
    // By an import only where the property says so.
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(768 << 20).unwrap();
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert_eq!(bytes("size"), grown);
    assert!(bytes("expandsize") > 200 << 20);
    yard.nacre(&["pool", "set", "autoexpand=on", &name]);
    yard.nacre(&["pool", "export", &name]);
    yard.nacre(&["pool", "import", "-d", "img", &name]);
    assert!(bytes("size") > grown + (200 << 20));
    assert_eq!(size("expandsize"), "-");
    assert!(fs::read(at.join("much")).unwrap() == much && fs::read(at.join("kept")).unwrap() == kept);
    yard.nacre(&["pool", "export", &name]);
    assert!(yard.nacre(&["pool", "check", "-d", "img"]).contains("no problems"));
}

/// A loop device, for as long as it is needed.
struct Loop(String);

impl Loop {
    fn over(image: &Path) -> Loop {
        let output = crate::mounting::run("losetup", ["-f", "--show", image.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        Loop(text(&output.stdout).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        crate::mounting::run("losetup", ["-d", &self.0]);
    }
}

#[test]
fn a_block_device_gets_back_what_is_not_used() {
    needs!(as_root());
    let yard = Yard::new();
    let image = yard.path("image");
    fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let device = Loop::over(&image);
    let held = || fs::metadata(&image).map(|image| std::os::unix::fs::MetadataExt::blocks(&image) / 2048).unwrap();
    let name = yard.name("trim");
    let at = yard.path("at");
    yard.nacre(&["pool", "create", "-m", at.to_str().unwrap(), &name, &device.0]);
    let mut content = Vec::with_capacity(96 << 20);
    let mut state = 7_u64;
    while content.len() < 96 << 20 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        content.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    fs::write(at.join("kept"), &content[..1 << 20]).unwrap();
    fs::write(at.join("large"), &content).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    let full = held();
    assert!(full >= 96, "{full} MiB");
    fs::remove_file(at.join("large")).unwrap();
    // By hand: what was freed by the commits so far.
    eventually("its room is given back", || {
        yard.nacre(&["pool", "sync", &name]);
        yard.nacre(&["pool", "trim", "-w", &name]);
        held() + 80 < full
    });
    assert!(
        yard.nacre(&["pool", "status", "-t", &name]).contains("trimmed"),
        "{}",
        yard.nacre(&["pool", "status", "-t", &name])
    );
    // By itself.
    yard.nacre(&["pool", "set", "autotrim=on", &name]);
    fs::write(at.join("large"), &content).unwrap();
    yard.nacre(&["pool", "sync", &name]);
    assert!(held() >= 96);
    fs::remove_file(at.join("large")).unwrap();
    eventually("its room is given back by itself", || {
        yard.nacre(&["pool", "sync", &name]);
        held() + 80 < full
    });
    // Nothing else has gone.
    assert!(fs::read(at.join("kept")).unwrap() == content[..1 << 20]);
    yard.nacre(&["pool", "scrub", "-w", &name]);
    assert!(yard.nacre(&["pool", "status", &name]).contains("with 0 errors"));
    yard.nacre(&["pool", "export", &name]);
    yard.nacre(&["pool", "import", "-d", &device.0, &name]);
    assert!(fs::read(at.join("kept")).unwrap() == content[..1 << 20]);
    yard.nacre(&["pool", "destroy", &name]);
}

#[test]
fn what_a_diff_reads_is_not_destroyed_meanwhile() {
    needs!(as_root());
    let yard = Yard::new();
    let name = yard.name("diff");
    let at = yard.path("at");
    yard.nacre(&[
        "pool",
        "create",
        "--size",
        "256M",
        "-m",
        at.to_str().unwrap(),
        &name,
        yard.path("device").to_str().unwrap(),
    ]);
    let of = |rest: &str| format!("{name}{rest}");
    yard.nacre(&["fs", "create", &of("/a")]);
    yard.nacre(&["fs", "snapshot", &of("/a@one")]);
    yard.nacre(&["fs", "clone", &of("/a@one"), &of("/b")]);
    // More names than a pipe holds: the one who reads has not read yet.
    (0..4000).for_each(|at_number| {
        fs::write(at.join(format!("a/a-file-with-a-name-of-some-length-{at_number}")), "").unwrap()
    });
    yard.nacre(&["fs", "snapshot", &of("/a@two")]);
    let mut diff = Command::new(nacre());
    diff.arg0("nacre").env("NACRE_STATE_DIR", yard.path("state")).args(["fs", "diff", &of("/a@one"), &of("/a@two")]);
    let mut diff = diff.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut first = [0; 1];
    std::io::Read::read_exact(diff.stdout.as_mut().unwrap(), &mut first).unwrap();
    let said = |words: &[&str]| {
        let (_, said) = yard.refused(words);
        assert!(said.contains("busy") && said.contains("diff"), "{words:?}: {said}");
    };
    said(&["fs", "destroy", &of("/a@two")]);
    said(&["fs", "destroy", "-R", &of("/a@one")]);
    said(&["fs", "promote", &of("/b")]);
    // Others may go.
    yard.nacre(&["fs", "snapshot", &of("/b@other")]);
    yard.nacre(&["fs", "destroy", &of("/b@other")]);
    let rest = diff.wait_with_output().unwrap();
    assert!(rest.status.success());
    assert_eq!(text(&rest.stdout).lines().filter(|line| line.contains("a-file-with-a-name")).count(), 4000);
    eventually("it is read no more", || yard.run(&["fs", "promote", &of("/b")]).status.success());
    yard.nacre(&["pool", "destroy", &name]);
}

/// A pool that was to lie in itself would wait for its own answers, and with it everybody, also
/// after kill -9.
#[test]
fn a_pool_does_not_lie_in_itself() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("itself"), yard.path("at"));
    yard.nacre(&[
        "pool",
        "create",
        "--size",
        "128M",
        "-m",
        at.to_str().unwrap(),
        &name,
        yard.path("img").to_str().unwrap(),
    ]);
    fs::File::create(at.join("inside")).unwrap().set_len(100 << 20).unwrap();
    std::os::unix::fs::symlink(at.join("inside"), yard.path("link")).unwrap();
    for device in [at.join("inside"), at.join("new"), yard.path("link")] {
        let (_, said) = yard.refused(&["pool", "add", "--size", "100M", &name, device.to_str().unwrap()]);
        assert!(said.contains("a file system of the pool itself"), "{said}");
    }
    assert!(!at.join("new").exists());
    yard.nacre(&["pool", "add", "--size", "100M", &name, yard.path("outside").to_str().unwrap()]);
}
