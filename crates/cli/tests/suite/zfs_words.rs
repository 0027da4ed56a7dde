//! ZFS' words: command lines of `zpool` and `zfs`, and the form of answers that programs for ZFS
//! parse.

use crate::mounting::{as_root, finish, is_mounted, nacre, needs, scratch, text};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A pool on a file with the file system `a`; it goes with the test.
struct Pool {
    place: tempfile::TempDir,
    name: String,
}

impl Pool {
    fn new(short: &str, more: &[&str]) -> Pool {
        let pool = Pool { place: scratch(), name: format!("zw{short}{}", std::process::id()) };
        let (at, image) = (pool.path("tank"), pool.path("image"));
        let mut words = vec!["create", "--size", "256M", "-m", at.to_str().unwrap()];
        words.extend(more);
        words.extend([pool.name.as_str(), image.to_str().unwrap()]);
        let made = finish(pool.command("zpool").args(words));
        assert!(made.status.success(), "{}", text(&made.stderr));
        pool.done("zfs create %/a");
        pool
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(nacre());
        command.arg0(program).current_dir(self.place.path()).env("LC_ALL", "C").env("TZ", "UTC").env("NO_COLOR", "1");
        command.env("NACRE_STATE_DIR", self.path("state")).env_remove("ZPOOL_SCRIPTS_AS_ROOT");
        command
    }

    /// A command line of `zfs` or `zpool`, in which `%` stands for the pool's name.
    fn call(&self, line: &str) -> Output {
        let mut words = line.split(' ').map(|word| word.replace('%', &self.name));
        let program = words.next().unwrap();
        finish(self.command(&program).args(words))
    }

    /// Runs a command that has to succeed; returns its output, with `%` in place of the name.
    fn done(&self, line: &str) -> String {
        let output = self.call(line);
        assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout).replace(&self.name, "%")
    }

    /// Runs a command that has to be refused; returns the exit code and the message.
    fn refused(&self, line: &str) -> (i32, String) {
        let output = self.call(line);
        assert!(!output.status.success(), "{line} succeeded: {}", text(&output.stdout));
        (output.status.code().unwrap(), text(&output.stderr).replace(&self.name, "%"))
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.done(line)).unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Whatever state it is in: the directory is cleared in any case.
        let _ = self.command("nacre").args(["pool", "export", "-f", &self.name]).output();
        crate::mounting::clear(self.place.path());
    }
}

#[test]
fn columns_go_by_their_heads_too() {
    needs!(as_root());
    let pool = Pool::new("col", &[]);
    let heads =
        |line: &str| pool.done(line).lines().next().unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let of_pools = "alloc,ckpoint,expandsz,rdonly,frag,cap,dedup,listsnaps,expand";
    assert_eq!(heads(&format!("zpool list -o {of_pools} %")).join(",").to_lowercase(), of_pools);
    let of_zfs = "usedsnap,usedds,usedrefreserv,usedchild,refratio,case,volblock,fscount,sscount,fslimit,avail,refer,lrefer,recsize";
    assert_eq!(heads(&format!("zfs list -o {of_zfs} %")).join(",").to_lowercase(), of_zfs);
    assert_eq!(heads("zpool list -o ALLOC %"), ["ALLOC"]);
    assert_eq!(pool.done("zpool get -Ho property alloc,cap %"), "allocated\ncapacity\n");
    assert_eq!(pool.done("zfs get -Ho property usedsnap,refratio %"), "usedbysnapshots\nrefcompressratio\n");
    pool.done("zfs set recsize=16K %/a");
    assert_eq!(pool.done("zfs get -Ho property,value,source recsize %/a"), "recordsize\t16K\tlocal\n");
    pool.done("zfs inherit recsize %/a");
    assert_eq!(pool.done("zfs get -Ho value,source recordsize %/a"), "128K\tdefault\n");
    // Programs check for a file system by querying its name.
    assert_eq!(pool.done("zfs get -H name %/a"), "%/a\tname\t%/a\t-\n");
    assert_eq!(pool.done("zfs get -Hpo value type,name,quota %/a"), "filesystem\n%/a\n0\n");
    for (line, usage) in [
        ("zfs help", "Usage: zfs <COMMAND>"),
        ("zpool help", "Usage: zpool <COMMAND>"),
        ("zfs help list", "Usage: zfs list "),
        ("zpool help list", "Usage: zpool list "),
        ("zpool -?", "Usage: zpool <COMMAND>"),
    ] {
        assert!(pool.done(line).contains(usage), "{line}");
    }
    // What replication programs ask each file system for; `get all` shows neither here, as in ZFS.
    assert_eq!(pool.done("zfs list -Hp -o inconsistent,encryptionroot %/a"), "0\t-\n");
    let all = pool.done("zfs get -H -o property all %/a");
    assert!(!all.contains("inconsistent") && !all.contains("encryptionroot"), "{all}");
    assert_eq!(pool.done("zfs list -H -o written@x,written#x %/a"), "-\t-\n");
    let (_, said) = pool.refused("zfs list %/nosuch");
    assert_eq!(said, "cannot open '%/nosuch': dataset does not exist\n'zfs list -t all' lists what there is\n");
    let (_, said) = pool.refused("zpool status %nosuch");
    assert!(said.contains("`zpool list` shows those that are imported, `zpool import` those"), "{said}");
    let (code, said) = pool.refused("zpool list -o nosuch %");
    assert!(code == 2 && said.starts_with("bad property list: invalid property 'nosuch'\nusage:\n\tlist ["), "{said}");
}

#[test]
fn file_systems_with_one_mount_point_leave_together() {
    needs!(as_root());
    let pool = Pool::new("same", &[]);
    let at = pool.path("same");
    for name in ["b", "c"] {
        pool.done(&format!("zfs create -o mountpoint={} %/{name}", at.display()));
    }
    let image = pool.path("image");
    for _ in 0..2 {
        assert_eq!(pool.done("zfs list -H -o mounted %/b %/c"), "yes\nyes\n");
        pool.done("zpool export %");
        assert!(!is_mounted(&at));
        pool.done(&format!("zpool import -d {} %", image.display()));
    }
    for (one, states) in [("b", "no\nyes\n"), ("c", "yes\nno\n")] {
        pool.done(&format!("zfs unmount %/{one}"));
        assert_eq!(pool.done("zfs list -H -o mounted %/b %/c"), states);
        assert!(is_mounted(&at));
        pool.done(&format!("zfs mount %/{one}"));
    }
    // The last one mounted is on top.
    pool.done(&format!("zfs unmount {}", at.display()));
    assert_eq!(pool.done("zfs list -H -o mounted %/b %/c"), "yes\nno\n");
    pool.done("zfs mount %/c");
    pool.done(&format!("zfs set mountpoint={} %/b", pool.path("else").display()));
    assert_eq!(pool.done("zfs list -H -o mounted %/b %/c"), "yes\nyes\n");
    assert!(is_mounted(&at) && is_mounted(&pool.path("else")));
    pool.done("zpool destroy %");
}

#[test]
fn a_device_comes_back_by_online_with_expansion_too() {
    needs!(as_root());
    let pool = Pool::new("back", &[]);
    let (one, other) = (pool.path("one"), pool.path("other"));
    let name = format!("{}m", pool.name);
    let (one, other) = (one.to_str().unwrap(), other.to_str().unwrap());
    pool.done(&format!("zpool create --size 128M -m none {name} mirror {one} {other}"));
    pool.done(&format!("zpool offline {name} {one}"));
    assert_eq!(pool.done(&format!("zpool list -H -o health {name}")), "DEGRADED\n");
    pool.done(&format!("zpool export {name}"));
    let found = pool.done(&format!("zpool import -d {one} -d {other}"));
    let state = |device: &str| {
        let line = found.lines().find(|line| line.trim_start().starts_with(&format!("{device} ")));
        line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or_default().to_owned()
    };
    assert_eq!(
        (state(one), state(other), state("mirror-0")),
        ("OFFLINE".into(), "ONLINE".into(), "DEGRADED".into()),
        "{found}"
    );
    assert!(found.contains("have been taken offline"), "{found}");
    pool.done(&format!("zpool import -d {one} -d {other} {name}"));
    pool.done(&format!("zpool online -e {name} {one}"));
    pool.done(&format!("zpool wait -t resilver {name}"));
    assert_eq!(pool.done(&format!("zpool list -H -o health {name}")), "ONLINE\n");
    let history = pool.done(&format!("zpool history {name}"));
    assert_eq!(history.matches("zpool online -e").count(), 1, "{history}");
    pool.done(&format!("zpool destroy {name}"));
}

#[test]
fn json_has_the_form_of_openzfs() {
    needs!(as_root());
    let pool = Pool::new("json", &[]);
    let image = pool.path("image");
    let image = image.to_str().unwrap();
    let status = pool.json("zpool status -j %");
    assert_eq!(status["output_version"], json!({ "command": "zpool status", "vers_major": 0, "vers_minor": 1 }));
    let of_pool = &status["pools"]["%"];
    for (field, value) in
        [("name", "%"), ("state", "ONLINE"), ("spa_version", "5000"), ("zpl_version", "5"), ("error_count", "0")]
    {
        assert_eq!(of_pool[field], value, "{field}");
    }
    assert!(of_pool["pool_guid"].as_str().unwrap().parse::<u64>().is_ok() && of_pool["txg"].is_string());
    // It was never verified, and nothing is wrong.
    assert!(
        of_pool.get("scan_stats").is_none() && of_pool.get("status").is_none() && of_pool.get("action").is_none(),
        "{of_pool}"
    );
    let root = &of_pool["vdevs"]["%"];
    assert_eq!(
        (root["vdev_type"].as_str(), root["class"].as_str(), root["state"].as_str()),
        (Some("root"), Some("normal"), Some("ONLINE"))
    );
    assert!(
        root["total_space"].as_str().unwrap().ends_with('M')
            && root["alloc_space"].is_string()
            && root["def_space"].is_string()
    );
    let device = &root["vdevs"][image];
    for (field, value) in [
        ("name", image),
        ("path", image),
        ("vdev_type", "file"),
        ("state", "ONLINE"),
        ("read_errors", "0"),
        ("checksum_errors", "0"),
    ] {
        assert_eq!(device[field], value, "{field}");
    }
    // Numbers as numbers, pools by their numbers, devices beside each other.
    pool.done("zpool scrub -w %");
    let status = pool.json("zpool status --json --json-int --json-flat-vdevs --json-pool-key-guid -Ppvs %");
    let (guid, of_pool) = status["pools"].as_object().unwrap().iter().next().unwrap();
    assert_eq!(of_pool["pool_guid"].as_u64(), guid.parse().ok());
    let flat = of_pool["vdevs"].as_object().unwrap();
    assert_eq!((flat["%"]["vdev_type"].as_str(), flat[image]["parent"].as_str()), (Some("root"), Some("%")));
    assert!(flat[image]["total_space"].as_u64().unwrap() > 200 << 20 && flat[image]["write_errors"] == 0);
    let scan = &of_pool["scan_stats"];
    assert_eq!(
        (scan["function"].as_str(), scan["state"].as_str(), &scan["errors"]),
        (Some("SCRUB"), Some("FINISHED"), &json!(0))
    );
    assert!(
        scan["start_time"].as_u64().unwrap() > 1_700_000_000
            && scan["end_time"].as_u64() >= scan["start_time"].as_u64()
    );
    assert!(
        ["to_examine", "examined", "skipped", "processed", "issued", "pass_start", "scrub_pause"]
            .iter()
            .all(|field| scan[field].is_u64()),
        "{scan}"
    );
    assert!(
        pool.json("zpool status -jp %")["pools"]["%"]["scan_stats"]["end_time"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .is_ok()
    );
    // The list, with devices.
    let list = pool.json("zpool list -jv %");
    let of_pool = &list["pools"]["%"];
    assert_eq!((of_pool["type"].as_str(), of_pool["properties"].get("name")), (Some("POOL"), None));
    assert_eq!(of_pool["properties"]["altroot"], json!({ "value": "-", "source": { "type": "DEFAULT", "data": "-" } }));
    let device = &of_pool["vdevs"][image];
    assert_eq!(
        (device["vdev_type"].as_str(), device["properties"]["health"]["value"].as_str()),
        (Some("file"), Some("ONLINE"))
    );
    assert_eq!(device["properties"]["dedupratio"]["value"], "-");
    let list = pool.json("zpool list -jv --json-int -o size,cap,health %");
    assert!(
        list["pools"]["%"]["vdevs"][image]["properties"]["size"]["value"].is_u64()
            && list["pools"]["%"]["properties"]["capacity"]["value"] == 0
    );
    let get = pool.json("zpool get -j --json-int feature@blake3,size %");
    assert_eq!(get["pools"]["%"]["properties"]["feature@blake3"]["value"], "active");
    let listed = pool.json("zfs list -j --json-int -o used,usedsnap,compressratio,quota %/a");
    let values = &listed["datasets"]["%/a"]["properties"];
    assert!(
        values["used"]["value"].is_u64()
            && values["usedbysnapshots"]["value"] == 0
            && values["compressratio"]["value"] == "1.00",
        "{values}"
    );
    assert!(listed["datasets"]["%/a"]["createtxg"].is_u64());
    for program in ["zfs", "zpool"] {
        let version = pool.json(&format!("{program} version -j"));
        assert_eq!(version["output_version"]["command"], format!("{program} version"));
        // Programs take the parts of both lines, and choose by the number how to call.
        let lines = pool.done(&format!("{program} version"));
        let both: Vec<&str> = lines.lines().collect();
        assert!(
            both.len() == 2 && both[0].starts_with("zfs-2.") && both[1] == both[0].replacen("zfs-", "zfs-kmod-", 1),
            "{lines}"
        );
        assert_eq!(
            (pool.done(&format!("{program} --version")), pool.done(&format!("{program} -V"))),
            (lines.clone(), lines.clone())
        );
        assert_eq!(version["zfs_version"], json!({ "userland": both[0], "kernel": both[1] }));
    }
    assert!(pool.done("nacre fs version").starts_with("nacre 0."));
    // What changes JSON goes with JSON.
    for line in [
        "zpool status --json-int %",
        "zpool list --json-pool-key-guid %",
        "zfs list --json-int %",
        "zpool status --json-flat-vdevs",
    ] {
        assert_eq!(pool.refused(line).0, 2, "{line}");
    }
}

#[test]
fn of_a_list_of_snapshots_those_that_are_there_are_destroyed() {
    needs!(as_root());
    let pool = Pool::new("des", &[]);
    for name in ["1", "2", "3", "4"] {
        pool.done(&format!("zfs snapshot %/a@{name}"));
    }
    let left = || pool.done("zfs list -Ht snapshot -o name %/a").replace("%/a@", "").replace('\n', " ");
    let output = pool.call("zfs destroy %/a@1,missing,,@,3");
    let said = text(&output.stderr).replace(&pool.name, "%");
    assert_eq!((output.status.code(), left().as_str()), (Some(0), "2 4 "));
    assert!(said.starts_with("could not find snapshot '%/a@missing' to destroy\n"), "{said}");
    let (code, said) = pool.refused("zfs destroy %/a@missing,gone");
    assert!(
        code == 1 && said.starts_with("could not find any snapshots to destroy; check snapshot names.\n"),
        "{said}"
    );
    assert_eq!(pool.refused("zfs destroy %/a@missing").0, 1);
    assert_eq!(pool.refused("zfs destroy %/a@b@c").0, 1);
    assert!(pool.done("zfs destroy -nv %/a@missing,2").starts_with("would destroy %/a@2\n"));
    // One that cannot go keeps all of them.
    pool.done("zfs hold keep %/a@4");
    assert_eq!(pool.refused("zfs destroy %/a@2,missing,4").0, 1);
    assert_eq!(left(), "2 4 ");
}

#[test]
fn pools_know_features_compatibility_and_files_that_say_where_they_lie() {
    needs!(as_root());
    let words = [
        "-o",
        "compatibility=openzfs-2.1-linux,grub2",
        "-o",
        "feature@lz4_compress=enabled",
        "-o",
        "feature@draid=disabled",
        "-o",
        "feature@folded_names=enabled",
    ];
    let pool = Pool::new("feat", &words);
    assert_eq!(pool.done("zpool get -H -o value feature@extensible_dataset %"), "active\n");
    assert_eq!(
        pool.done("zpool get -Hp -o value feature@encryption,feature@metadata_twice,compatibility %"),
        "disabled\nactive\nopenzfs-2.1-linux,grub2\n"
    );
    for feature in ["bookmarks", "bookmark_v2", "bookmark_written"] {
        assert!(pool.done("zpool get -H all %").contains(&format!("%\tfeature@{feature}\tactive\tlocal\n")));
    }
    assert_eq!(pool.refused("zpool get feature@nosuch %").0, 2);
    // What the first file system that needs it brings.
    assert!(pool.done("zpool get -H all %").contains("%\tfeature@folded_names\tenabled\tlocal\n"));
    pool.done("zpool set feature@folded_names=enabled %");
    pool.done("zfs create -o casesensitivity=insensitive %/folding");
    assert_eq!(pool.done("zpool get -H -o value feature@folded_names %"), "active\n");
    assert_eq!(pool.refused("zpool set feature@folded_names=disabled %").0, 1);
    pool.done("zpool set feature@bookmarks=enabled %");
    let (code, said) = pool.refused("zpool set feature@encryption=enabled %");
    assert!(code == 1 && said.contains("this pool has no such feature"), "{said}");
    pool.done("zpool set compatibility=off %");
    assert_eq!(pool.refused("zpool set compatibility=a,,b %").0, 1);
    // What a file says is enough to find the pool, and nothing else is looked at.
    let (file, other) = (pool.path("cache"), pool.path("other"));
    pool.done(&format!("zpool set cachefile={} %", file.display()));
    assert_eq!(pool.done("zpool get -Ho value cachefile %").trim(), file.to_str().unwrap());
    fs::write(&other, "something else").unwrap();
    let (code, said) = pool.refused(&format!("zpool set cachefile={} %", other.display()));
    assert!(
        code == 1
            && said.contains("is no cache file of pools of nacre")
            && fs::read(&other).unwrap() == b"something else",
        "{said}"
    );
    pool.done("zpool export %");
    fs::remove_dir_all(pool.path("state")).unwrap();
    assert_eq!(pool.refused("zpool import %").0, 1);
    assert_eq!(pool.refused(&format!("zpool import -c {} %", other.display())).0, 1);
    assert_eq!(pool.refused(&format!("zpool import -c {} -d / %", file.display())).0, 2);
    assert!(pool.done(&format!("zpool import -c {}", file.display())).contains("  pool: %\n"));
    pool.done(&format!("zpool import -c {} -aN", file.display()));
    assert_eq!(pool.done("zpool list -Ho name %"), "%\n");
    assert!(!is_mounted(&pool.path("tank")));
}

#[test]
fn programs_tell_more_of_devices() {
    needs!(as_root());
    let pool = Pool::new("scr", &[]);
    let scripts = pool.path("scripts");
    fs::create_dir(&scripts).unwrap();
    for (name, content) in [("two", "echo upath=$VDEV_UPATH\necho size=7"), ("one", "echo 'a value'")] {
        fs::write(scripts.join(name), format!("#!/bin/sh\n{content}\n")).unwrap();
        fs::set_permissions(scripts.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let (code, said) = pool.refused("zpool status -c two %");
    assert!(code == 1 && said.contains("unless ZPOOL_SCRIPTS_AS_ROOT is set"), "{said}");
    let with = |words: &[&str]| {
        let mut command = pool.command("zpool");
        command.env("ZPOOL_SCRIPTS_AS_ROOT", "1").env("ZPOOL_SCRIPTS_PATH", &scripts).args(words).arg(&pool.name);
        let output = finish(&mut command);
        (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = with(&["status", "-c", "two,one"]);
    let image = pool.path("image").display().to_string();
    let line = |first: &str| {
        said.lines()
            .find(|line| line.trim_start().starts_with(first))
            .unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
    };
    assert_eq!(line("NAME")[5..], ["upath", "size", "one"], "{said}");
    assert_eq!((code, &line(&image)[5..]), (0, &[image.as_str(), "7", "a", "value"][..]), "{said}");
    assert_eq!(with(&["status", "-c", "nosuch"]).0, 1);
    assert_eq!(with(&["status", "-c", "../one"]).0, 1);
    // Only what is ill; nothing is.
    let ill = pool.done("zpool status -e %");
    assert!(!ill.contains("image") && ill.contains("\t%"), "{ill}");
    fs::remove_file(pool.path("image")).unwrap();
    let ill = pool.done("zpool status -e %");
    assert!(ill.contains("image") && ill.contains("REMOVED"), "{ill}");
}

#[test]
fn mount_8_mounts_a_snapshot() {
    needs!(as_root());
    let pool = Pool::new("snap", &[]);
    let (file, at) = (pool.path("tank/a/file"), pool.path("at"));
    fs::create_dir(&at).unwrap();
    fs::write(&file, "before").unwrap();
    pool.done("zfs snapshot %/a@s");
    fs::write(&file, "after").unwrap();
    let mount = |program: &str, source: String| {
        let output = finish(pool.command(program).args([&source, at.to_str().unwrap(), "-o", "rw,noexec"]));
        (output.status.code().unwrap(), text(&output.stderr))
    };
    assert_eq!(mount("mount.zfs", format!("{}/a@missing", pool.name)).0, 32);
    assert_eq!(mount("mount.zfs", format!("{}/a@s", pool.name)), (0, String::new()));
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "before");
    assert_eq!(fs::write(at.join("new"), "x").unwrap_err().raw_os_error(), Some(30));
    let (_, source, options, _) = crate::mounting::mount_entry(&at).unwrap();
    assert_eq!(source, format!("{}/a@s", pool.name));
    assert!(options.starts_with("ro") && options.contains("noexec"), "{options}");
    // It is no mount of the file system, and that is as it was.
    assert_eq!(pool.done("zfs list -Ho mounted,mountpoint %/a"), format!("yes\t{}\n", pool.path("tank/a").display()));
    // A process in the file system keeps the snapshot and the pool.
    let open = fs::File::open(at.join("file")).unwrap();
    assert_eq!(pool.refused("zfs destroy %/a@s").0, 1);
    assert_eq!(pool.refused("zpool export %").0, 1);
    assert!(is_mounted(&at) && is_mounted(&pool.path("tank/a")));
    drop(open);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(mount("mount.fuse.nacre", format!("fs:{}/a@s", pool.name)), (0, String::new()));
    let (code, said) = pool.refused("zfs mount %/a@s");
    assert!(code == 1 && said.starts_with("cannot mount '%/a@s': it is a snapshot\n"), "{said}");
    crate::mounting::eventually("nobody uses it", || pool.call("zpool export %").status.success());
    assert!(!is_mounted(&at) && !is_mounted(&pool.path("tank/a")));
}

#[test]
fn programs_that_know_only_zfs_are_answered() {
    needs!(as_root());
    let pool = Pool::new("tool", &[]);
    pool.done("zfs snapshot %/a@s");
    let lines = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/suite/zfs_compare/tools.txt"))
        .unwrap();
    let mut wrong = Vec::new();
    for line in lines.lines().filter(|line| !line.starts_with('#')) {
        let (answers, line) = line.strip_prefix("= ").map_or((false, line), |line| (true, line));
        let output = pool.call(line);
        if !output.status.success() || answers && output.stdout.is_empty() {
            wrong.push(format!("{line}: {:?} {}", output.status.code(), text(&output.stderr)));
        }
    }
    // Others' pools beside it may not answer: that is theirs.
    wrong.retain(|line| !line.contains("does not answer"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn devices_have_properties() {
    needs!(as_root());
    let pool = Pool::new("vdev", &[]);
    let image = pool.path("image");
    let image = image.to_str().unwrap();
    let all = pool.done("zpool get -Hp all % all-vdevs");
    let of = |device: &str, property: &str| {
        let line = all.lines().find(|line| line.starts_with(&format!("{device}\t{property}\t"))).unwrap_or_default();
        line.split('\t').skip(2).map(str::to_owned).collect::<Vec<_>>()
    };
    for (device, property, expected) in [
        ("root-0", "children", [image, "-"]),
        ("root-0", "numchildren", ["1", "-"]),
        ("root-0", "state", ["ONLINE", "-"]),
        ("root-0", "parent", ["-", "-"]),
        (image, "psize", ["268435456", "-"]),
        (image, "path", [image, "-"]),
        (image, "parent", ["root-0", "-"]),
        (image, "numchildren", ["0", "-"]),
        (image, "read_errors", ["0", "-"]),
        (image, "allocating", ["on", "-"]),
        // Properties that are not known or counted.
        (image, "slow_ios", ["-", "-"]),
        (image, "devid", ["-", "-"]),
        (image, "checksum_n", ["-", "default"]),
    ] {
        assert_eq!(of(device, property), expected, "{device} {property}");
    }
    assert!(
        of(image, "write_bytes")[0].parse::<u64>().unwrap() > 0 && of("root-0", "size") == of(image, "size"),
        "{all}"
    );
    // A device goes by its path, from here as well, and by its number; properties by the heads of
    // their columns.
    let guid = of(image, "guid")[0].clone();
    for word in [image, "image", guid.as_str()] {
        assert_eq!(
            pool.done(&format!("zpool get -H -o name,value name,STATE,a:b % {word} root")).lines().count(),
            6,
            "{word}"
        );
        assert_eq!(pool.done(&format!("zpool get -H -o value RDERR % {word}")), "0\n", "{word}");
        pool.done(&format!("zpool clear % {word}"));
        pool.done(&format!("zpool online % {word}"));
    }
    let json = pool.json("zpool get -j --json-int size,state % all-vdevs");
    let device = &json["vdevs"][image];
    assert!(
        device["properties"]["size"]["value"].is_u64() && device["type"] == "VDEV" && device["vdev_type"] == "file",
        "{json}"
    );
    assert_eq!(
        (&json["vdevs"]["root-0"]["vdev_type"], &json["output_version"]["command"]),
        (&json!("root"), &json!("zpool get"))
    );
    let (code, said) = pool.refused("zpool get state % nosuch");
    assert!(
        code == 2 && said.starts_with("Expected a list of vdevs in \"%\", but got: nosuch\nusage:\n\tget ["),
        "{said}"
    );
    assert_eq!(pool.refused("zpool get health % all-vdevs").0, 2);
    let (code, said) = pool.refused("zpool set comment=x % image");
    assert_eq!((code, said.as_str()), (1, "cannot set property for 'image' of '%': devices have none to be set\n"));
}

#[test]
fn devices_are_called_as_asked() {
    needs!(as_root());
    let pool = Pool::new("call", &[]);
    let (image, link) = (pool.path("other"), pool.path("link"));
    fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let [image, link] = [image, link].map(|path| path.to_str().unwrap().to_owned());
    assert!(pool.done(&format!("zpool add -nL % {link}")).ends_with(&format!("\t  {image}\n")));
    pool.done(&format!("zpool add % {link}"));
    let guid = pool.done(&format!("zpool get -H -o value guid % {link}")).trim().to_owned();
    let has = |line: &str, name: &str| pool.done(line).split_whitespace().any(|word| word == name);
    for (letters, name) in
        [("-p", &link), ("-P", &link), ("-L", &image), ("-LP", &image), ("-g", &guid), ("-gLP", &guid)]
    {
        for line in [
            "zpool status L %",
            "zpool list -v L %",
            "zpool list -vH L %",
            "zpool iostat -v L %",
            "zpool iostat -vH L %",
        ] {
            let line = line.replace('L', letters);
            assert!(has(&line, name), "{line}: {name}");
        }
        assert!(pool.done(&format!("zpool iostat -wv {letters} %")).contains(name.as_str()), "{letters}");
        for line in ["zpool status -j", "zpool list -jv"] {
            let of_pool = pool.json(&format!("{line} {letters} %"))["pools"]["%"].take();
            let devices = if line.contains("list") { &of_pool["vdevs"] } else { &of_pool["vdevs"]["%"]["vdevs"] };
            assert!(devices[name]["name"] == *name && devices[name]["path"] == link, "{line} {letters}: {devices}");
        }
    }
    // For disks the last component of the path is shown; this name is accepted, too.
    let disk = pool.path("disk");
    fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let shown = Command::new("losetup").args(["-f", "--show"]).arg(&disk).output();
    let Some(device) =
        shown.ok().filter(|output| output.status.success()).map(|output| text(&output.stdout).trim().to_owned())
    else {
        crate::mounting::skip("loop", "there are no loop devices");
        return;
    };
    let short = device.strip_prefix("/dev/").unwrap().to_owned();
    pool.done(&format!("zpool add % {device}"));
    let calls = [
        ("zpool status %", &short),
        ("zpool status -P %", &device),
        ("zpool list -vHP %", &device),
        ("zpool list -vH %", &short),
    ];
    let wrong: Vec<_> = calls.iter().filter(|(line, name)| !has(line, name)).collect();
    let short = pool.call(&format!("zpool clear % {short}"));
    let exported = pool.call("zpool export %");
    let detached = Command::new("losetup").args(["-d", &device]).status().unwrap();
    assert!(wrong.is_empty() && short.status.success() && exported.status.success() && detached.success(), "{wrong:?}");
}

#[test]
fn one_that_fails_keeps_no_other_from_it() {
    needs!(as_root());
    let (pool, second) = (Pool::new("one", &[]), Pool::new("two", &[]));
    let with = |line: &str| line.replace('&', &second.name);
    let missing = "cannot open 'zwnosuch': no such pool\n";
    // What is done to several is done to those that are there.
    for line in ["zpool sync zwnosuch % &", "zpool scrub -w zwnosuch % &", "zpool upgrade zwnosuch % &"] {
        let (code, said) = pool.refused(&with(line));
        assert!(code == 1 && said.contains(missing), "{line}: {said}");
    }
    for of in [&pool, &second] {
        assert!(of.done("zpool status %").contains("scrub repaired"), "the others were verified");
    }
    for line in ["zpool list -Ho name", "zpool status", "zpool history", "zpool iostat"] {
        let output = pool.call(&with(&format!("{line} zwnosuch % &")));
        let said = text(&output.stdout);
        assert!(
            output.status.code() == Some(1) && said.contains(&pool.name) && said.contains(&second.name),
            "{line}: {said}"
        );
        assert!(text(&output.stderr).contains(missing), "{line}");
    }
    // One that is missing ends no repetition.
    let again = pool.call("zpool list -Ho name % zwnosuch 0.1 2");
    assert_eq!((again.status.code(), text(&again.stdout).lines().count()), (Some(1), 2));
    // File systems.
    pool.done("zfs create %/b");
    let values = |property: &str| pool.done(&format!("zfs get -Ho value {property} %/a %/b")).replace('\n', " ");
    let fails = |line: &str, why: &str| {
        let (code, said) = pool.refused(&with(line));
        assert!(code == 1 && said.contains(why), "{line}: {said}");
    };
    fails("zfs set relatime=off %/a %/nosuch %/b &/a", "cannot open '%/nosuch': dataset does not exist\n");
    assert_eq!(
        (values("relatime").as_str(), second.done("zfs get -Ho value relatime %/a").as_str()),
        ("off off ", "off\n")
    );
    fails("zfs inherit relatime %/a nosuchpool/x %/b", "nosuchpool");
    assert_eq!(values("relatime"), "on on ");
    fails("zfs snapshot %/a@1 %/nosuch@1", "dataset does not exist");
    assert_eq!(pool.done("zfs list -rHt snapshot -o name %"), "", "snapshots are taken all or none");
    pool.done("zfs snapshot %/a@1 %/b@1");
    fails("zfs hold keep %/a@1 %/a@nosuch %/b@1", "'%/a@nosuch'");
    assert_eq!(values("userrefs").as_str(), "- - ");
    assert_eq!(pool.done("zfs get -Ho value userrefs %/a@1 %/b@1"), "1\n1\n");
    let output = pool.call("zfs holds -H %/a@1 %/a@nosuch %/b@1");
    assert_eq!((output.status.code(), text(&output.stdout).lines().count()), (Some(1), 2));
    fails("zfs release keep %/a@1 %/a@nosuch %/b@1", "'%/a@nosuch'");
    assert_eq!(pool.done("zfs get -Ho value userrefs %/a@1 %/b@1"), "0\n0\n");
    let output = pool.call("zfs list -Ho name %/a %/nosuch %/b");
    assert_eq!((output.status.code(), text(&output.stdout).lines().count()), (Some(1), 2));
    // Of the pools to export, one in use stays.
    let held = fs::File::open(pool.path("tank/a")).unwrap();
    let (code, said) = pool.refused(&with("zpool export zwnosuch % & &"));
    assert!(code == 1 && said.contains(missing) && said.contains("busy"), "{said}");
    assert!(is_mounted(&pool.path("tank/a")) && second.refused("zpool list %").0 == 1);
    drop(held);
}

#[test]
fn nothing_is_delegated() {
    needs!(as_root());
    let pool = Pool::new("allow", &[]);
    assert_eq!(pool.done("zfs allow %/a"), "");
    assert!(pool.refused("zfs allow %/nosuch").1.starts_with("cannot open '%/nosuch': dataset does not exist\n"));
    for line in
        ["zfs allow -u root snapshot %/a", "zfs allow everyone mount %/a", "zfs unallow %/a", "zfs unallow -r root %"]
    {
        let (code, said) = pool.refused(line);
        assert!(
            code == 1 && said.contains("permissions cannot be delegated") && said.lines().count() == 1,
            "{line}: {said}"
        );
    }
    assert_eq!((pool.refused("zfs allow").0, pool.refused("zfs unallow").0), (2, 2));
}

#[test]
fn wrong_calls_of_ours_say_what_is_missing_and_how_it_is_meant() {
    let said = |words: &str| {
        let output = crate::mounting::run(nacre(), words.split(' '));
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let two = |what: &str, usage: &str| (2, format!("nacre: {what}\nnacre: usage: nacre {usage}\n"));
    assert_eq!(said("pool set foo"), two("missing pool name argument", "pool set PROPERTY=VALUE POOL"));
    assert_eq!(
        said("pool set foo tank"),
        two("missing value in property=value argument: 'foo'", "pool set PROPERTY=VALUE POOL")
    );
    assert_eq!(said("pool export"), two("missing pool name argument", "pool export [-af] [POOL]..."));
    assert_eq!(said("pool clear tank --force"), two("invalid option '--force'", "pool clear POOL [DEVICE]"));
    assert_eq!(said("fs set a=b"), two("missing dataset name", "fs set [-u] PROPERTY=VALUE... FILESYSTEM..."));
    assert_eq!(said("fs promote a b"), two("too many arguments", "fs promote FILESYSTEM"));
}

#[test]
fn letters_of_openzfs_are_taken() {
    needs!(as_root());
    let pool = Pool::new("let", &[]);
    let image = pool.path("more");
    let image = image.to_str().unwrap();
    assert!(pool.done(&format!("zpool add -n -o ashift=12 --size 64M % {image}")).contains(image));
    for (line, why) in [
        (format!("zpool add -n -o ashift=99 --size 64M % {image}"), "'ashift' must be a number"),
        (format!("zpool add -n -o comment=x --size 64M % {image}"), "property 'comment' is none of devices"),
        ("zpool trim -d %".to_owned(), "not made to forget for good"),
        ("zpool import -l nosuchpool".to_owned(), "no such pool available"),
    ] {
        let (code, said) = pool.refused(&line);
        assert!(code == 1 && said.contains(why), "{line}: {said}");
    }
    let (code, said) = pool.refused("zpool scrub -a %");
    assert!(code == 2 && said.starts_with("too many arguments\n"), "{said}");
    let heads = |line: &str| pool.done(line).lines().filter(|line| line.starts_with("pool ")).count();
    assert_eq!(
        (heads("zpool iostat % 0.1 3"), heads("zpool iostat -n % 0.1 3"), heads("zpool iostat -nv % 0.1 2")),
        (3, 1, 1)
    );
    assert_eq!(pool.done("zpool iostat -nH % 0.1 3").lines().count(), 3);
    // What is mounted stays where it is, until it is unmounted.
    pool.done("zfs create %/a/b");
    let (before, after) = (pool.path("tank/a"), pool.path("moved"));
    pool.done(&format!("zfs set -u mountpoint={} %/a", after.display()));
    assert!(is_mounted(&before) && is_mounted(&before.join("b")) && !after.exists());
    assert_eq!(pool.done("zfs get -Ho value mountpoint %/a").trim(), after.to_str().unwrap());
    pool.done("zfs set -u readonly=on %/a");
    assert_eq!(fs::write(before.join("file"), "x").unwrap_err().raw_os_error(), Some(30));
    pool.done("zfs unmount %/a");
    // What does not ask for it, and what is mounted, is passed over.
    pool.done("zfs create -o canmount=noauto %/a/c");
    for _ in 0..2 {
        pool.done("zfs mount -R %/a");
        assert!(
            is_mounted(&after) && is_mounted(&after.join("b")) && !is_mounted(&after.join("c")) && !is_mounted(&before)
        );
    }
    assert_eq!(pool.refused("zfs mount -R %/nosuch").0, 1);
    assert_eq!(pool.refused("zfs mount -R").0, 2);
}

#[test]
fn content_without_a_signature_is_taken_as_zpool_takes_it() {
    needs!(as_root());
    let pool = Pool::new("taken", &[]);
    let other = pool.path("other");
    let image = other.to_str().unwrap();
    let write = |bytes: &[u8]| {
        fs::write(&other, bytes).unwrap();
        fs::File::options().write(true).open(&other).unwrap().set_len(128 << 20).unwrap();
    };
    write(b"XFSB");
    let (code, said) = pool.refused(&format!("zpool create %x {image}"));
    assert!(code == 1 && said.contains("contains a filesystem of type 'xfs'"), "{said}");
    write(b"hello");
    let (_, said) = pool.refused(&format!("nacre pool create %x {image}"));
    assert!(said.contains("it is not empty"), "{said}");
    pool.done(&format!("zpool create -m none %x {image}"));

    // The label of a pool in use stays, that of an exported one goes when forced.
    let (code, said) = pool.refused(&format!("zpool labelclear -f {image}"));
    assert!(code == 1 && said.contains("is a member (ACTIVE) of pool \"%x\""), "{said}");
    pool.done("zpool export %x");
    let (code, said) = pool.refused(&format!("zpool labelclear {image}"));
    let expected = format!("use '-f' to override the following error:\n{image} is a member of exported pool \"%x\"\n");
    assert_eq!((code, said), (1, expected));
    pool.done(&format!("zpool labelclear -f {image}"));
    let (code, said) = pool.refused(&format!("zpool labelclear {image}"));
    assert!(code == 1 && said.starts_with(&format!("failed to read label from {image}")), "{said}");
}

#[test]
fn verbs_of_zpool_that_are_not_there_look_at_pool_and_device_first() {
    needs!(as_root());
    let pool = Pool::new("verbs", &[]);
    let image = pool.path("image");
    let image = image.to_str().unwrap();
    for (line, expected) in [
        ("zpool resilver %", "cannot restart resilver of '%': "),
        ("zpool resilver %none", "cannot open '%none': no such pool"),
        ("zpool checkpoint %", "cannot checkpoint '%': there are no checkpoints"),
        ("zpool checkpoint -d %", "cannot discard checkpoint in '%': checkpoint does not exist\n"),
        ("zpool checkpoint %none", "cannot open '%none': no such pool"),
        ("zpool initialize %", "cannot initialize '%': "),
        ("zpool initialize % nosuch", "cannot initialize 'nosuch': no such device in pool\n"),
        ("zpool initialize %none", "cannot open '%none': no such pool"),
    ] {
        let (code, said) = pool.refused(line);
        assert!(code == 1 && said.starts_with(expected), "{line}: {code} {said}");
    }
    let (code, said) = pool.refused(&format!("zpool initialize -c % {image}"));
    let none = format!("cannot cancel initializing '{image}': there is no active initialization\n");
    assert_eq!((code, said), (1, none));
    let usage = "missing pool name argument\nusage:\n\tresilver <pool> ...\n";
    assert_eq!(pool.refused("zpool resilver"), (2, usage.to_owned()));
}

#[test]
fn receive_leaves_out_when_snapshots_changed() {
    needs!(as_root());
    let pool = Pool::new("recv", &[]);
    pool.done("zfs snapshot %/a@s");
    let sent = pool.call("zfs send %/a@s");
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    fs::write(pool.path("stream"), sent.stdout).unwrap();
    let into = format!("{}/b", pool.name);
    let mut receive = pool.command("zfs");
    receive.args(["receive", "-o", "snapshots_changed=123", "-o", "compression=off", &into]);
    let received = receive.stdin(fs::File::open(pool.path("stream")).unwrap()).output().unwrap();
    assert!(received.status.success() && received.stderr.is_empty(), "{}", text(&received.stderr));
    assert_eq!(pool.done("zfs get -H -o value compression %/b"), "off\n");
}
