//! Our own command line: the table is valid, and `mirror` understands the options of `bindfs`.

use super::{line, mount, os};
use crate::{
    clap_args::View,
    commands::{self, Invocation},
    options::{Spelling, TABLE},
    personality,
    plan::Plan,
};
use nacre_daemon::failure::Failure;

fn order(arguments: &[&str]) -> Result<Invocation, Failure> {
    let matches =
        commands::table().try_get_matches_from(os(arguments)).map_err(|error| Failure::usage(error.to_string()))?;
    commands::parse(&matches)
}

fn planned(arguments: &[&str]) -> Plan {
    match order(arguments) {
        Ok(Invocation::Mount(plan)) => plan,
        other => panic!("{arguments:?}: {other:?}"),
    }
}

#[test]
fn the_table_is_sound() {
    commands::table().debug_assert();
}

#[test]
fn mirror_and_bindfs_agree_on_every_option() {
    for row in
        TABLE.iter().filter(|row| !matches!(row.spelling, Spelling::Word | Spelling::Cage) && row.heading != "About")
    {
        let value = match (row.value, row.name) {
            (None, _) => None,
            (Some(_), "xattr") => Some("ro"),
            (Some(_), "acl" | "passthrough") => Some("off"),
            (Some(_), "engine") => Some("auto"),
            (Some(_), "coherence") => Some("exclusive"),
            (Some(_), "transport") => Some("uring"),
            (Some(_), "log") => Some("info"),
            (Some(_), "log-target") => Some("syslog"),
            (Some(_), "resolved-symlink-deletion") => Some("deny"),
            (Some(_), "gid-offset") => Some("-5"),
            (Some(_), "") => Some("ro,nodev,force-user=7"),
            (Some(_), _) => Some("5"),
        };
        let long = match (row.name, value) {
            ("", _) => None,
            (name, None) => Some(format!("--{name}")),
            (name, Some(value)) => Some(format!("--{name}={value}")),
        };
        let short = row.short.map(|letter| format!("-{letter}{}", value.unwrap_or_default()));
        for argument in [long, short].into_iter().flatten() {
            let ours = planned(&["nacre", "mirror", &argument, "/src", "/mnt"]);
            let theirs = personality::bindfs("nacre", os(&[&argument, "/src", "/mnt"])).unwrap();
            assert_eq!(ours, theirs, "{argument}");
        }
        if let (Some(value), false) = (value, row.name.is_empty()) {
            let apart = planned(&["nacre", "mirror", "/src", "/mnt", &format!("--{}", row.name), value]);
            let joined = planned(&["nacre", "mirror", "/src", "/mnt", &format!("--{}={value}", row.name)]);
            assert_eq!(apart, joined, "{}", row.name);
        }
    }
}

#[test]
fn the_order_of_options_counts_in_both_grammars() {
    for arguments in [
        &["--chown-deny", "--chown-ignore", "/src", "/mnt"][..],
        &["--chown-ignore", "--chown-deny", "/src", "/mnt"],
        &["--chown-ignore", "-o", "ro,chown-deny", "/src", "-r", "/mnt", "-o", "rw"],
        &["-o", "chown-deny", "-u1", "--chown-ignore", "/src", "/mnt", "-u2"],
        &["--hide=a", "/src", "--hide=b", "/mnt", "--for=d:perms=0755", "--hide=c"],
        &["-f", "-f", "/src", "/mnt"],
    ] {
        let ours = planned(&[&["nacre", "mirror"], arguments].concat());
        assert_eq!(ours, personality::bindfs("nacre", os(arguments)).unwrap(), "{arguments:?}");
    }
}

#[test]
fn a_stack_comes_from_a_line_or_a_file() {
    let plan = mount(planned(&["nacre", "mount", "host:/srv | remap:force-user=5", "/mnt", "-o", "ro,noexec", "-f"]));
    assert_eq!(line(&plan), "host:/srv | remap:force-user=5");
    assert!(plan.door.read_only && !plan.door.exec && plan.foreground);
    assert_eq!(line(&mount(planned(&["nacre", "mount", "mem", "/mnt"]))), "mem");
    assert_eq!(line(&mount(planned(&["nacre", "mount", "./host", "/mnt"]))), "file ./host");
    assert_eq!(line(&mount(planned(&["nacre", "mount", "data.toml", "/mnt"]))), "file data.toml");
    for (stack, says) in
        [("host:", "the stack is not understood"), ("remap:force-user=5", "cannot be the lowest layer")]
    {
        let error = order(&["nacre", "mount", stack, "/mnt"]).unwrap_err();
        assert!(error.what.contains(says), "{stack}: {}", error.what);
    }
    let error = order(&["nacre", "mount", "mem", "/mnt", "-o", "force-user=5"]).unwrap_err();
    assert_eq!(error.what, "option force-user belongs to a layer, not to the mount");
    assert!(order(&["nacre", "mount", "mem", "/mnt", "--force-user=5"]).is_err());
    assert!(order(&["nacre", "mount", "mem", "/mnt", "-o", "engine=kernel"]).is_err());
}

#[test]
fn reload_takes_rules_only() {
    match order(&["nacre", "reload", "/mnt"]).unwrap() {
        Invocation::Reload { mountpoint, rules: None } => assert_eq!(mountpoint, std::path::Path::new("/mnt")),
        other => panic!("{other:?}"),
    }
    match order(&["nacre", "reload", "/mnt", "-u5", "-o", "perms=a-w"]).unwrap() {
        Invocation::Reload { rules: Some(rules), .. } => {
            assert_eq!((rules.force_user.as_deref(), rules.perms.as_deref()), (Some("5"), Some("a-w")));
        }
        other => panic!("{other:?}"),
    }
    assert!(
        order(&["nacre", "reload", "/mnt", "-o", "ro"]).unwrap_err().what.contains("cannot be changed while mounted")
    );
    assert!(order(&["nacre", "reload", "/mnt", "--engine=kernel"]).is_err());
}

#[test]
fn the_other_verbs() {
    match order(&["nacre", "umount", "-l", "/a", "/b"]).unwrap() {
        Invocation::Umount { lazy: true, mountpoints } => assert_eq!(mountpoints.len(), 2),
        other => panic!("{other:?}"),
    }
    match order(&["nacre", "status", "-H", "-p", "-o", "mountpoint,pid", "/a"]).unwrap() {
        Invocation::Status { view, mountpoints } => {
            let columns = Some(vec!["mountpoint".to_owned(), "pid".to_owned()]);
            assert_eq!(view, View { json: false, scripted: true, exact: true, columns, everybody: false });
            assert_eq!(mountpoints.len(), 1);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(order(&["nacre", "top", "--once"]).unwrap(), Invocation::Top(top) if top.rounds == Some(1)));
    assert!(matches!(order(&["nacre", "top", "-n3", "-i0.5"]).unwrap(), Invocation::Top(top) if top.rounds == Some(3)));
    assert!(matches!(order(&["nacre", "metrics"]).unwrap(), Invocation::Metrics { .. }));
    assert!(
        matches!(order(&["nacre", "completions", "fish", "zfs"]).unwrap(), Invocation::Completions { name, .. } if name == "zfs")
    );
    for wrong in [
        &["nacre"][..],
        &["nacre", "bogus"],
        &["nacre", "umount"],
        &["nacre", "top", "-i", "-1"],
        &["nacre", "top", "-i", "0"],
        &["nacre", "top", "-n", "0"],
        &["nacre", "completions", "tcsh"],
        &["nacre", "mirror", "/src"],
        &["nacre", "mirror", "/src", "/mnt", "/more"],
        &["nacre", "mirror", "--bogus", "/src", "/mnt"],
        &["nacre", "mirror", "-o", "bogus", "/src", "/mnt"],
    ] {
        assert!(order(wrong).is_err(), "{wrong:?}");
    }
}
