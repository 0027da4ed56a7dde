//! Parity of calls about attributes: modes, owners, times, access checks, statfs figures.

use super::log::timestamps;
use super::{Case, Log};
use rustix::fs::{Access, AtFlags, CWD, Gid, Mode, OFlags, Timespec, UTIME_NOW, UTIME_OMIT, Uid};

pub(super) const CASES: &[Case] = &[
    ("chmod", chmod),
    ("chown", chown),
    ("set-id bits", set_id_bits),
    ("set-id bits and root's writes", set_id_bits_and_root),
    ("utimensat", times),
    ("access", access),
    ("permissions of others", others),
    ("set-group-id directories", setgid_directories),
    ("sticky directories", sticky_directories),
    ("statfs", statfs),
    ("statx", statx),
];

fn chmod(log: &mut Log) {
    let file = log.file("file", b"");
    log.mkdir("d");
    rustix::fs::symlink("file", log.at("s")).expect("symlink");
    for mode in [0o000, 0o644, 0o755, 0o4755, 0o2755, 0o1644, 0o7777] {
        for name in ["file", "d", "s"] {
            let answer = rustix::fs::chmod(log.at(name), Mode::from_raw_mode(mode));
            log.did(&format!("chmod {name} {mode:o}"), answer);
            log.stat(name);
        }
        log.stat("file");
    }
    let mark = log.mark("file");
    let answer = rustix::fs::fchmod(&file, Mode::from_raw_mode(0o640));
    log.did("fchmod", answer);
    log.moved("fchmod", "file", mark);
    log.stat("file");
    let answer = rustix::fs::chmod(log.at("missing"), Mode::from_raw_mode(0o640));
    log.did("chmod missing", answer);
}

fn owner(log: &mut Log, name: &str, uid: Option<u32>, gid: Option<u32>, flags: AtFlags) {
    let answer = rustix::fs::chownat(CWD, log.at(name), uid.map(Uid::from_raw), gid.map(Gid::from_raw), flags);
    log.did(&format!("chown {name} {uid:?} {gid:?}"), answer);
    log.stat(name);
}

fn chown(log: &mut Log) {
    log.file("file", b"");
    log.mkdir("d");
    rustix::fs::symlink("file", log.at("s")).expect("symlink");
    let none = AtFlags::empty();
    owner(log, "file", Some(1000), Some(1001), none);
    owner(log, "file", None, Some(5), none);
    owner(log, "file", Some(6), None, none);
    owner(log, "file", None, None, none);
    owner(log, "d", Some(7), Some(8), none);
    owner(log, "s", Some(9), Some(10), AtFlags::SYMLINK_NOFOLLOW);
    log.stat("file");
    owner(log, "s", Some(11), Some(12), none);
    log.stat("file");
    owner(log, "file", Some(3_000_000_000), Some(4_294_967_294), none);
    owner(log, "missing", Some(1), Some(1), none);
    let mark = log.mark("file");
    owner(log, "file", Some(1), Some(1), none);
    log.moved("chown", "file", mark);
}

fn set_id_bits_and_root(log: &mut Log) {
    for (name, mode) in [("suid", 0o4755), ("sgid", 0o2755), ("both", 0o6775)] {
        log.file(name, b"content");
        rustix::fs::chmod(log.at(name), Mode::from_raw_mode(mode)).expect("chmod");
        if let Some(file) = log.open(name, OFlags::WRONLY, 0) {
            rustix::io::pwrite(&file, b"x", 0).expect("write");
        }
        log.stat(name);
    }
}

fn set_id_bits(log: &mut Log) {
    for (name, mode) in [("suid", 0o4755), ("sgid", 0o2755), ("both", 0o6775), ("no-group-x", 0o2644)] {
        log.file(name, b"content");
        rustix::fs::chmod(log.at(name), Mode::from_raw_mode(mode)).expect("chmod");
        log.stat(name);
        owner(log, name, Some(1000), Some(1000), AtFlags::empty());
        rustix::fs::chmod(log.at(name), Mode::from_raw_mode(mode)).expect("chmod");
        log.stat(name);
    }
    log.mkdir("d");
    rustix::fs::chmod(log.at("d"), Mode::from_raw_mode(0o6777)).expect("chmod");
    owner(log, "d", Some(1000), Some(1000), AtFlags::empty());
    // An ordinary user's write, truncation and append clear the bits.
    for (name, script) in [
        ("suid", "echo x >> suid"),
        ("sgid", ": > sgid"),
        ("both", "dd if=/dev/zero of=both bs=1 count=1 conv=notrunc"),
    ] {
        rustix::fs::chmod(log.at(name), Mode::from_raw_mode(0o6777)).expect("chmod");
        act_as(log, "2000", script);
        log.stat(name);
    }
}

/// Runs a shell script as another user, without supplementary groups, and logs its output and
/// status.
fn act_as(log: &mut Log, ids: &str, script: &str) {
    let (uid, gid) = ids.split_once(':').unwrap_or((ids, ids));
    act_with_groups(log, uid, gid, "--clear-groups", script);
}

fn act_with_groups(log: &mut Log, uid: &str, gid: &str, groups: &str, script: &str) {
    let output = std::process::Command::new("setpriv")
        .args([&format!("--reuid={uid}"), &format!("--regid={gid}"), groups, "--", "sh", "-c", script])
        .current_dir(log.at(""))
        .env("LC_ALL", "C")
        .output()
        .expect("setpriv");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().replace('\n', " / ");
    let errors = text(&output.stderr);
    // dd prints its speed.
    let errors = if script.starts_with("dd ") { String::new() } else { errors };
    log.say(format!("{uid}:{gid} {groups} `{script}`: {:?} {} {errors}", output.status.code(), text(&output.stdout)));
}

fn times(log: &mut Log) {
    let file = log.file("file", b"");
    log.mkdir("d");
    rustix::fs::symlink("file", log.at("s")).expect("symlink");
    let (omit, now) = ((0, UTIME_OMIT), (0, UTIME_NOW));
    for (atime, mtime) in [
        ((1_000_000_000, 123_456_789), (1_500_000_000, 987_654_321)),
        (omit, (1, 1)),
        ((2, 2), omit),
        (omit, omit),
        ((-1, 0), (-1, 999_999_999)),
        ((0, 0), (4_294_967_296, 5)),
        ((1, 1_000_000_000), (1, 1)),
    ] {
        for name in ["file", "d", "s"] {
            let answer = rustix::fs::utimensat(CWD, log.at(name), &timestamps(atime, mtime), AtFlags::SYMLINK_NOFOLLOW);
            log.did(&format!("utimensat {name} {atime:?} {mtime:?}"), answer);
            log.times(name);
        }
    }
    let mark = log.mark("file");
    let answer = rustix::fs::futimens(&file, &timestamps(omit, now));
    log.did("futimens now", answer);
    log.moved("futimens now", "file", mark);
    let mark = log.mark("file");
    let set = rustix::fs::Timestamps {
        last_access: Timespec { tv_sec: 5, tv_nsec: 6 },
        last_modification: Timespec { tv_sec: 7, tv_nsec: 8 },
    };
    rustix::fs::futimens(&file, &set).expect("futimens");
    log.moved("futimens to the past", "file", mark);
    log.times("file");
}

fn access(log: &mut Log) {
    log.file("file", b"");
    for mode in [0o000, 0o444, 0o111, 0o755] {
        rustix::fs::chmod(log.at("file"), Mode::from_raw_mode(mode)).expect("chmod");
        for (what, bits) in
            [("r", Access::READ_OK), ("w", Access::WRITE_OK), ("x", Access::EXEC_OK), ("e", Access::EXISTS)]
        {
            let answer = rustix::fs::accessat(CWD, log.at("file"), bits, AtFlags::empty());
            log.did(&format!("access {mode:o} {what}"), answer);
        }
    }
    let answer = rustix::fs::accessat(CWD, log.at("missing"), Access::EXISTS, AtFlags::empty());
    log.did("access missing", answer);
}

fn others(log: &mut Log) {
    log.file("private", b"secret");
    rustix::fs::chmod(log.at("private"), Mode::from_raw_mode(0o600)).expect("chmod");
    log.file("public", b"open");
    log.mkdir("open");
    rustix::fs::chmod(log.at("open"), Mode::from_raw_mode(0o777)).expect("chmod");
    log.file("of-group", b"of the group");
    owner(log, "of-group", Some(0), Some(3000), AtFlags::empty());
    rustix::fs::chmod(log.at("of-group"), Mode::from_raw_mode(0o660)).expect("chmod");
    log.file("own", b"own");
    owner(log, "own", Some(2000), Some(2000), AtFlags::empty());
    for script in [
        "cat private",
        "cat public",
        "echo x >> public",
        "rm -f public",
        "mkdir d",
        "mkdir open/d && touch open/f && ln -s x open/s && mkfifo open/p && stat -c '%n %u:%g %a' open/*",
        "chmod 600 public",
        "chown 2000 public",
        "chgrp 2000 own && stat -c %g own",
        "chgrp 3000 own",
        "mv public open/",
        "touch -d @5 own && stat -c %Y own",
        "touch -d @5 public",
        "ln own open/own",
        "cat of-group",
    ] {
        act_as(log, "2000:2000", script);
    }
    // A supplementary group gives access to its files, and may be set by chgrp.
    for script in
        ["cat of-group", "chgrp 3000 own && stat -c %g own", "touch open/in-group && chgrp 3000 open/in-group"]
    {
        act_with_groups(log, "2000", "2000", "--groups=2500,3000", script);
    }
}

fn setgid_directories(log: &mut Log) {
    log.mkdir("d");
    owner(log, "d", Some(0), Some(3000), AtFlags::empty());
    rustix::fs::chmod(log.at("d"), Mode::from_raw_mode(0o2777)).expect("chmod");
    let show = "stat -c '%n %u:%g %a' d/*";
    act_as(log, "2000:2000", &format!("touch d/f && mkdir d/d && mkfifo d/p && ln -s x d/s && {show}"));
    act_with_groups(
        log,
        "2000",
        "2000",
        "--groups=3000",
        &format!("mkdir d/e && touch d/e/g && {show} && stat -c '%n %u:%g %a' d/e/*"),
    );
    if let Some(file) = log.open("d/x", OFlags::CREATE | OFlags::RDWR, 0o2775) {
        drop(file);
        log.stat("d/x");
    }
    act_as(log, "2000:2000", "umask 0; python3 -c 1 2>/dev/null; mknod d/r p -m 2775; stat -c '%n %u:%g %a' d/r");
}

fn sticky_directories(log: &mut Log) {
    log.mkdir("d");
    rustix::fs::chmod(log.at("d"), Mode::from_raw_mode(0o1777)).expect("chmod");
    log.file("d/of-root", b"");
    act_as(log, "2000:2000", "touch d/mine && mkdir d/dir");
    act_as(log, "2001:2001", "rm -f d/mine");
    act_as(log, "2001:2001", "mv d/mine d/stolen");
    act_as(log, "2001:2001", "rmdir d/dir");
    act_as(log, "2000:2000", "rm -f d/of-root");
    act_as(log, "2000:2000", "rm d/mine && rmdir d/dir && ls d");
}

fn statfs(log: &mut Log) {
    let directory = log.at("");
    match rustix::fs::statvfs(&directory) {
        Ok(figures) => {
            log.say(format!("{} {} {} {}", figures.f_bsize, figures.f_frsize, figures.f_blocks, figures.f_namemax))
        }
        Err(error) => log.say(format!("statvfs: {error}")),
    }
    log.file("file", b"");
    let of_file =
        rustix::fs::statvfs(log.at("file")).map(|figures| (figures.f_blocks, figures.f_files, figures.f_namemax));
    log.saw("of a file", of_file);
}

fn statx(log: &mut Log) {
    log.file("file", &[1; 5_000]);
    for flags in [AtFlags::empty(), AtFlags::STATX_FORCE_SYNC, AtFlags::STATX_DONT_SYNC] {
        let answer = rustix::fs::statx(
            CWD,
            log.at("file"),
            flags,
            rustix::fs::StatxFlags::BASIC_STATS | rustix::fs::StatxFlags::BTIME,
        );
        match answer {
            Ok(stat) => {
                // If an invalidation overtakes an answer, the kernel does not cache that answer, so
                // an earlier requested birth time may be unknown to a later statx(2) without a
                // request.
                let unknown =
                    flags == AtFlags::STATX_DONT_SYNC && stat.stx_mask & rustix::fs::StatxFlags::BTIME.bits() == 0;
                let born = unknown || stat.stx_btime.tv_sec > 0 && stat.stx_btime.tv_sec <= stat.stx_ctime.tv_sec;
                log.say(format!(
                    "statx: size {} blksize {} born {born} nlink {}",
                    stat.stx_size, stat.stx_blksize, stat.stx_nlink
                ));
            }
            Err(error) => log.say(format!("statx: {error}")),
        }
    }
}
