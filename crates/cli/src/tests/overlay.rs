//! fuse-overlayfs' command line: the effect of each word.

use super::os;
use crate::{overlay::overlay, plan::Plan};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, MountPlan, StackSource, Transport},
};

fn read(arguments: &[&str]) -> Result<Plan, Failure> {
    overlay(os(arguments), true, false)
}

fn mount(words: &str) -> MountPlan {
    match read(&["-o", words, "/m"]).unwrap() {
        Plan::Mount(plan) => *plan,
        other => panic!("{other:?}"),
    }
}

fn line(plan: &MountPlan) -> String {
    match &plan.stack {
        StackSource::Spec(spec) => spec.to_line(),
        StackSource::File(path) => panic!("{}", path.display()),
    }
}

const BASE: &str = "lowerdir=/l,upperdir=/u,workdir=/w";

#[test]
fn what_podman_says() {
    let plan = mount("lowerdir=l/A:l/B,upperdir=/c/diff,workdir=/c/work,volatile,context=\"x\",");
    let text = line(&plan);
    assert!(
        text.contains("/c/diff")
            && text.contains("work=/c/work")
            && text.contains("volatile")
            && text.contains("whiteout=chardev"),
        "{text}"
    );
    assert_eq!(text.matches("coherence=exclusive").count(), 4, "{text}");
    assert_eq!(nacre_stack::spec::StackSpec::from_line(text.as_bytes()).unwrap().to_line(), text);
    assert_eq!(plan.door.kernel_words, ["context=\"x\""]);
    assert_eq!(
        (plan.door.fsname.as_deref(), plan.door.subtype.as_deref()),
        (Some("fuse-overlayfs"), Some("fuse-overlayfs"))
    );
    assert!(plan.door.suid && !plan.door.dev && plan.door.allow_other && plan.door.atime == Some(Atime::No));
    assert_eq!(plan.warnings, [""; 0]);
}

#[test]
fn layers_alone_are_read_only() {
    let text = line(&mount("lowerdir=/a:/b"));
    assert!(!text.contains("rw") && !text.contains("work="), "{text}");
}

#[test]
fn paths_may_hold_anything() {
    let plan = mount(r"lowerdir=/a\:b:/c\,d:/e\072f,upperdir=/u\,v\:w\134,workdir=/w");
    let StackSource::Spec(spec) = &plan.stack else { panic!("no file was named") };
    let paths: Vec<_> = spec.directories().iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    assert_eq!(paths, [r"/u,v:w\", "/w", "/a:b", "/c,d", "/e:f"]);
}

#[test]
fn owners() {
    let text = line(&mount(&format!("{BASE},uidmapping=0:1000:1:1:100000:65536,gidmapping=0:5:1")));
    assert!(text.contains("shift:uid=0:1000:1:1:100000:65536,gid=0:5:1"), "{text}");
    assert!(line(&mount(&format!("{BASE},squash_to_root"))).contains("shift:squash-uid=0,squash-gid=0"));
    assert!(
        line(&mount(&format!("{BASE},squash_to_uid=7,squash_to_gid=8"))).contains("shift:squash-uid=7,squash-gid=8")
    );
    assert!(line(&mount(&format!("{BASE},xattr_permissions=2"))).contains("attribute=containers"));
    assert!(line(&mount(&format!("{BASE},xattr_permissions=1"))).contains("attribute=privileged"));
    assert!(!line(&mount(&format!("{BASE},xattr_permissions=0"))).contains("attribute="));
}

#[test]
fn flags_of_the_mount() {
    let plan = mount(&format!("{BASE},ro,dev,nosuid,noexec,atime,noacl,timeout=2.5,fsync=0"));
    assert!(
        plan.door.read_only
            && plan.door.dev
            && !plan.door.suid
            && !plan.door.exec
            && !plan.door.acl
            && plan.door.atime.is_none()
    );
    assert_eq!(plan.door.attr_timeout.map(|time| time.as_millis()), Some(2500));
    assert!(line(&plan).contains("volatile"));
    assert!(!mount(&format!("{BASE},noxattrs=1")).door.xattr);
    assert!(!line(&mount(&format!("{BASE},fsync=1"))).contains("volatile"));
    assert!(mount(&format!("{BASE},timeout=1e12")).door.attr_timeout.is_some());
}

#[test]
fn others_are_let_in_by_those_who_may() {
    for (root, words, shared) in
        [(true, BASE, true), (false, BASE, false), (false, &*format!("{BASE},allow_other"), true)]
    {
        let Plan::Mount(plan) = overlay(os(&["-o", words, "/m"]), root, false).unwrap() else { panic!("{words}") };
        assert_eq!(plan.door.allow_other, shared, "{root} {words}");
    }
}

#[test]
fn what_is_not_known_is_told_and_ignored() {
    let words = format!(
        "{BASE},bogus=1,threaded=0,metacopy=on,index=off,static_nlink,lazytime,xino=auto,plugins=,redirect_dir=off,nonsense"
    );
    assert_eq!(mount(&words).warnings, ["unknown argument ignored: bogus=1", "unknown argument ignored: nonsense"]);
}

#[test]
fn what_would_change_the_files_is_refused() {
    for words in [
        "upperdir=/u,workdir=/w",
        "lowerdir=/l,upperdir=/u",
        "lowerdir=/a::/b",
        "lowerdir=",
        "lowerdir=/l,plugins=/x.so",
        "lowerdir=/l,redirect_dir=on",
        "lowerdir=/l,uidmapping=0:1",
        "lowerdir=/l,gidmapping=0:0:2:1:5:1",
        "lowerdir=/l,squash_to_uid=root",
        "lowerdir=/l,xattr_permissions=3",
        "lowerdir=/l,fsync=yes",
        "lowerdir=/l,timeout=-1",
        "lowerdir=/l,timeout=never",
    ] {
        let error = read(&["-o", words, "/m"]).unwrap_err();
        assert_eq!(error.code("fuse-overlayfs"), 1, "{words}: {error}");
    }
    for arguments in [&["-o"][..], &["-o", BASE], &["-o", BASE, "a", "b", "c"], &["-x", "/m"], &["--plugins=x", "/m"]] {
        assert!(read(arguments).is_err(), "{arguments:?}");
    }
}

#[test]
fn the_rest_of_the_line() {
    let attached = format!("-o{BASE}");
    let Plan::Mount(plan) = read(&["-f", &attached, "-s", "overlay", "/m"]).unwrap() else { panic!("it mounts") };
    assert!(plan.foreground && plan.mountpoint.as_os_str() == "/m");
    let Plan::Mount(plan) = read(&["-d", "-o", BASE, "/m"]).unwrap() else { panic!("it mounts") };
    assert!(plan.foreground && line(&plan).ends_with("trace:level=all"));
    let Plan::Mount(plan) = read(&["--transport=device", "-o", &format!("{BASE},passthrough=off"), "/m"]).unwrap()
    else {
        panic!("it mounts")
    };
    assert!(plan.door.transport == Transport::Device && !plan.door.passthrough);
    assert_eq!(read(&["--help"]).unwrap(), Plan::Help);
    assert_eq!(read(&["--version", "-x"]).unwrap(), Plan::Version);
    let Plan::Mount(plan) = overlay(os(&["-o", BASE, "/m"]), true, true).unwrap() else { panic!("it mounts") };
    assert!(line(&plan).contains("whiteout=wh"));
}

#[test]
fn the_document_names_every_word() {
    let text = include_str!("../../../../docs/union.md");
    let own = text.split("## Called as fuse-overlayfs").nth(1).unwrap();
    let obeyed = [
        "lowerdir=",
        "upperdir=",
        "workdir=",
        "uidmapping=",
        "gidmapping=",
        "squash_to_root",
        "squash_to_uid=",
        "squash_to_gid=",
        "xattr_permissions=",
        "volatile",
        "fsync=0",
        "timeout=",
        "noacl",
        "noxattrs=1",
        "context=",
        "ro",
        "suid",
        "dev",
        "noexec",
        "noatime",
        "sync",
        "dirsync",
        "allow_other",
        "debug",
        "transport=",
        "passthrough=",
        "plugins=",
        "redirect_dir=on",
    ];
    for word in obeyed.iter().chain(crate::overlay::UNNEEDED) {
        let name = word.split_inclusive('=').next().unwrap();
        assert!(
            own.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{name}"))),
            "docs/union.md does not name {word}"
        );
    }
}
