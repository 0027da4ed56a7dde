//! The grammar of branches, line by line.

use super::*;

fn read(text: &str) -> Vec<(String, String)> {
    let branches = parse_branches(OsStr::new(text)).unwrap();
    branches.into_iter().map(|(path, mode)| (path.display().to_string(), mode.to_string())).collect()
}

fn refused(text: &str) -> String {
    parse_branches(OsStr::new(text)).unwrap_err().to_string()
}

#[test]
fn branches_as_people_write_them() {
    for (text, wanted) in [
        ("/ssd:/hdd", &[("/ssd", "rw"), ("/hdd", "ro")][..]),
        ("/ssd=rw:/hdd=rw", &[("/ssd", "rw"), ("/hdd", "rw")]),
        ("/a=ro+wh:/b=rr+wh+icex", &[("/a", "ro+wh"), ("/b", "rr+wh+icex")]),
        ("/a=rw+nolwh+icexsec+icexusr", &[("/a", "rw+icexsec+icexusr")]),
        ("/a=RW,4G:/b=NC,500M:/c=RO", &[("/a", "rw+minfree=4294967296"), ("/b", "nc+minfree=524288000"), ("/c", "ro")]),
        ("/a=rw+minfree=10K:/x", &[("/a", "rw+minfree=10240"), ("/x", "ro")]),
        ("/a=b=rw", &[("/a=b", "rw")]),
        (
            "/a/minfree=ro:/a=b/minfree=rw:/a+minfree=ro",
            &[("/a/minfree", "ro"), ("/a=b/minfree", "rw"), ("/a+minfree", "ro")],
        ),
        (r"/a\=b:/c\:d=ro:/e\\f", &[("/a=b", "rw"), ("/c:d", "ro"), (r"/e\f", "ro")]),
        ("relative", &[("relative", "rw")]),
    ] {
        let got = read(text);
        assert_eq!(got.iter().map(|(path, mode)| (path.as_str(), mode.as_str())).collect::<Vec<_>>(), wanted, "{text}");
    }
}

#[test]
fn bytes_that_are_no_text() {
    let branches = parse_branches(OsStr::from_bytes(b"/\xff\xfe=ro")).unwrap();
    assert_eq!(branches[0].0.as_os_str().as_bytes(), b"/\xff\xfe");
    assert_eq!(branches[0].1, BranchMode::ro());
}

#[test]
fn nonsense_is_refused_with_what_exists() {
    for (text, part) in [
        ("/a=rx", "there are rw, ro, rr and nc"),
        ("/a=rw+wx", "\"wx\" is no branch attribute"),
        ("/a=rw+wh", "whiteouts always count"),
        ("/a=", "\"\" is no branch attribute"),
        ("=rw", "no path"),
        ("/a::/b", "no path"),
        ("", "no path"),
        ("/a=b", "written \\="),
        ("/a=ro+moo", "+moo goes with rw"),
        ("/a=ro+fhsm", "+fhsm goes with rw"),
        ("/a=rw,4X", "is no size"),
        ("/a=rw+minfree=", "is no size"),
        ("/a=rw+minfree=99999999999P", "is no size"),
    ] {
        let error = refused(text);
        assert!(error.contains(part), "{text}: {error}");
    }
    let many = vec!["/x"; 128].join(":");
    assert!(refused(&many).contains("127"));
}

#[test]
fn modes_read_what_they_write() {
    for text in [
        "rw",
        "ro",
        "rr+wh",
        "nc",
        "rw+icex",
        "ro+coo_reg",
        "rw+coo_all",
        "rw+moo+tier",
        "ro+wh+icexsec+icexoth+minfree=5",
    ] {
        assert_eq!(BranchMode::parse(text).unwrap().to_string(), text);
    }
}

#[test]
fn what_modes_allow() {
    for (text, writable, creates, reads_marks) in [
        ("rw", true, true, true),
        ("nc", true, false, true),
        ("ro", false, false, false),
        ("ro+wh", false, false, true),
        ("rr", false, false, false),
    ] {
        let mode = BranchMode::parse(text).unwrap();
        assert_eq!((mode.writable(), mode.creates(), mode.reads_marks()), (writable, creates, reads_marks), "{text}");
    }
}

#[test]
fn classes_of_attributes() {
    let mode = BranchMode::parse("rw+icexsys+icexoth").unwrap();
    for (name, ignored) in [
        ("system.posix_acl_access", true),
        ("btrfs.compression", true),
        ("user.x", false),
        ("security.selinux", false),
        ("trusted.x", false),
    ] {
        assert_eq!(mode.ignores_xattr(name.as_bytes()), ignored, "{name}");
    }
    assert!(BranchMode::parse("rw+icex").unwrap().ignores_xattr(b"user.x"));
    assert!(!BranchMode::rw().ignores_xattr(b"user.x"));
}

#[test]
fn overlay_directories() {
    let branches = parse_overlay(Some(OsStr::new("/up:per")), OsStr::new(r"/a:/b\:c")).unwrap();
    let shown: Vec<String> = branches.iter().map(|(path, mode)| format!("{} {mode}", path.display())).collect();
    assert_eq!(shown, ["/up:per rw", "/a ro+wh", "/b:c ro+wh"]);
    assert!(parse_overlay(None, OsStr::new("/a::/data")).is_err());
    assert!(parse_overlay(None, OsStr::new("")).is_err());
}

#[test]
fn pools_are_writable_throughout() {
    let branches = parse_pool(OsStr::new("/a:/b=NC:/c")).unwrap();
    assert_eq!(branches.iter().map(|(_, mode)| mode.to_string()).collect::<Vec<_>>(), ["rw", "nc", "rw"]);
}

#[test]
fn branches_must_not_overlap() {
    let paths = |texts: &[&str]| texts.iter().map(PathBuf::from).collect::<Vec<_>>();
    assert!(check_overlap(&paths(&["/a", "/ab", "/b/a"]), Some(Path::new("/m"))).is_ok());
    assert!(
        check_overlap(&paths(&["/a", "/b"]), Some(Path::new("/a"))).is_ok(),
        "covering a branch hides it on purpose"
    );
    assert!(
        check_overlap(&paths(&["/a", "/b"]), Some(Path::new("/a/m"))).is_ok(),
        "a mount point in a branch is like any other in it"
    );
    for (branches, mount_point, part) in [
        (paths(&["/a", "/a"]), None, "twice"),
        (paths(&["/a", "/a/b"]), None, "/a/b lies inside the branch /a"),
        (paths(&["/x", "/a/b", "/a"]), None, "/a/b lies inside the branch /a"),
        (paths(&["/m/a"]), Some(Path::new("/m")), "inside the mount point"),
    ] {
        let error = check_overlap(&branches, mount_point).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
