//! The command line of cages: accepted and refused options, and lines of fstab.

use super::os;
use crate::{
    cage::{command::CageVerb, plan::CagePlan},
    clap_args::View,
    commands::{self, Invocation},
    personality,
    plan::Plan,
};
use nacre_daemon::{
    cage::change::{InodeChange, SizeChange},
    failure::{Exit, Failure},
    plan::{Engine, StackSource},
};
use std::path::Path;

fn order(arguments: &[&str]) -> Result<Invocation, Failure> {
    let all = [&["nacre", "cage"], arguments].concat();
    let matches =
        commands::table().try_get_matches_from(os(&all)).map_err(|error| Failure::usage(error.to_string()))?;
    commands::parse(&matches)
}

fn planned(plan: Plan) -> CagePlan {
    match plan {
        Plan::Cage(plan) => *plan,
        other => panic!("not a cage: {other:?}"),
    }
}

fn cage(arguments: &[&str]) -> CagePlan {
    match order(arguments) {
        Ok(Invocation::Mount(plan)) => planned(plan),
        other => panic!("{arguments:?}: {other:?}"),
    }
}

fn line(plan: &CagePlan) -> String {
    match &plan.mount.stack {
        StackSource::Spec(spec) => spec.to_line(),
        StackSource::File(path) => format!("file {}", path.display()),
    }
}

#[test]
fn a_cage_is_the_directory_and_the_cage_over_it() {
    for (arguments, expected) in [
        (&["--size", "10G", "/d"][..], "host:/d | cage:size=10G"),
        (&["--size=10240M", "/d"], "host:/d | cage:size=10G"),
        (
            &["/d", "--size=10G", "--inodes=5000", "--coherence=exclusive"],
            "host:/d,coherence=exclusive | cage:size=10G,inodes=5000",
        ),
        (&["-o", "size=1G,inodes=7", "/d"], "host:/d | cage:size=1G,inodes=7"),
        (
            &["--size=1G", "--when-full=drop-oldest", "--keep=a*", "--keep=b*", "--rotated=*.gz", "/d"],
            "host:/d | cage:size=1G,when-full=drop-oldest,keep=a*,keep=b*,rotated=*.gz",
        ),
        (
            &["--size=1G", "--soft=80%", "--on-soft=logger x, y", "--limit=user:bob=1M", "--limit=dir:a/b=2M", "/d"],
            "host:/d | cage:size=1G,soft=80%,on-soft=logger x\\, y,limit=user:bob=1M,limit=dir:a/b=2M",
        ),
        (&["--size=1G", "--writes=through", "--state=/s", "/d"], "host:/d | cage:size=1G,writes=through,state=/s"),
        (&["--size=1G", "-d", "/d"], "host:/d | cage:size=1G | trace:level=all"),
    ] {
        let plan = cage(arguments);
        assert_eq!(line(&plan), expected, "{arguments:?}");
        assert_eq!(
            (plan.directory.as_path(), plan.mountpoint.as_deref(), plan.mount.mountpoint.as_path()),
            (Path::new("/d"), None, Path::new("/d"))
        );
        assert_eq!((plan.engine, plan.mount.prefix), (Engine::Fuse, "cage:"));
    }
    let plan = cage(&["--size=1G", "/d", "/m", "-r", "--no-allow-other", "-f"]);
    assert_eq!((plan.mountpoint.as_deref(), plan.mount.mountpoint.as_path()), (Some(Path::new("/m")), Path::new("/m")));
    assert!(plan.mount.door.read_only && !plan.mount.door.allow_other && plan.mount.foreground);
}

#[test]
fn engines_know_what_is_not_theirs() {
    for (arguments, engine, fuse_only) in [
        (&["--size=1G", "/d"][..], Engine::Fuse, None),
        (&["--size=1G", "--engine=auto", "/d"], Engine::Auto, None),
        (&["--size=1G", "--inodes=5", "--engine=quota", "-o", "rw,defaults", "/d"], Engine::Quota, None),
        (&["--engine=loop", "/d"], Engine::Loop, None),
        (&["--size=1G", "--engine=loop", "--fstype=xfs", "--image=/i", "--sparse", "/d"], Engine::Loop, None),
        (&["--size=1G", "--engine=auto", "--soft=5%", "/d"], Engine::Auto, Some("--soft")),
        (&["--size=1G", "--engine=auto", "-o", "noexec", "/d"], Engine::Auto, Some("-o noexec")),
        (&["--size=1G", "--engine=quota", "-f", "/d"], Engine::Quota, Some("--foreground")),
    ] {
        let plan = cage(arguments);
        assert_eq!((plan.engine, plan.fuse_only.as_deref()), (engine, fuse_only), "{arguments:?}");
        assert_eq!(
            plan.engine_by_default,
            !arguments.iter().any(|argument| argument.starts_with("--engine")),
            "{arguments:?}"
        );
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (arguments, says) in [
        (&["--engine=quota", "/d"][..], "--size is needed"),
        (&["--engine=fuse", "/d"], "--size is needed"),
        (&["--size=10X", "/d"], "size: \"10X\" is no size"),
        (&["--size=-1G", "/d"], "is no size"),
        (&["--size=", "/d"], "is no size"),
        (&["--size=0", "/d"], "less than one block"),
        (&["--size=4095", "/d"], "less than one block"),
        (&["--size=99999999999G", "/d"], "more than any file system holds"),
        (&["--size=1G", "--inodes=0", "/d"], "1 or more"),
        (&["--size=1G", "--inodes=many", "/d"], "whole number"),
        (&["--size=1G", "--engine=kernel", "/d"], "not one of fuse, loop, quota, auto"),
        (&["--size=1G", "--engine=steam", "/d"], "steam"),
        (&["--size=1G", "--image=/i", "/d"], "for --engine=loop only"),
        (&["--size=1G", "--sparse", "--engine=auto", "/d"], "for --engine=loop only"),
        (&["--size=1G", "--fstype=zfs", "--engine=loop", "/d"], "one of ext4, xfs, btrfs"),
        (&["--size=1G", "--when-full=panic", "/d"], "one of deny, drop-oldest"),
        (&["--size=1G", "--keep=x", "/d"], "--keep does nothing without --when-full=drop-oldest"),
        (&["--size=1G", "--rotated=x", "/d"], "--rotated does nothing without"),
        (&["--size=1G", "--on-soft=x", "/d"], "--on-soft does nothing without --soft"),
        (&["--size=1G", "--soft=101%", "/d"], "no percentage"),
        (&["--size=1G", "--soft=2G", "/d"], "never be reached"),
        (&["--size=1G", "--limit=bob=1G", "/d"], "there are limits for a user and for a dir"),
        (&["--size=1G", "--limit=dir:/abs=1G", "/d"], "relative to the caged directory"),
        (&["--size=1G", "--limit=user:bob=10X", "/d"], "10X"),
        (&["--size=1G", "--writes=fast", "/d"], "one of auto, collected, through"),
        (&["--size=1G", "--force-user=5", "/d"], "unexpected argument"),
        (&["--size=1G", "-o", "force-user=5", "/d"], "option force-user is not for cages"),
        (&["--size=1G", "-o", "attr_timeout=5", "/d"], "option attr_timeout is not for cages"),
        (&["--size=1G", "/d", "/m", "/x"], "too many arguments: \"/x\""),
        (&["--size=1G", "/d", "/m", "/x", "/y"], "too many arguments"),
        (&["--size=1G"], "DIR"),
        (&["--size=1G", ""], "DIR is needed"),
        (&[], "DIR"),
        (&["resize", "/d"], "SIZE"),
        (&["resize", "/d", "10X"], "size: \"10X\" is no size"),
        (&["resize", "/d", "100"], "less than one block"),
        (&["resize", "/d", "--inodes=0"], "inodes"),
        (&["resize"], "DIR"),
        (&["remove"], "DIR"),
        (&["list", "/d"], "unexpected argument"),
    ] {
        let failure = order(arguments).expect_err(&format!("{arguments:?}"));
        assert!(failure.what.contains(says), "{arguments:?}: {}", failure.what);
        assert_eq!(failure.exit, Exit::Usage, "{arguments:?}");
    }
}

#[test]
fn commands_on_cages_that_there_are() {
    let resize = |arguments: &[&str]| match order(arguments) {
        Ok(Invocation::Cage(CageVerb::Resize { directory, size, inodes })) => {
            (directory.display().to_string(), size, inodes)
        }
        other => panic!("{arguments:?}: {other:?}"),
    };
    assert_eq!(resize(&["resize", "/d", "20G"]), ("/d".to_owned(), Some(SizeChange::To(20 << 30)), None));
    assert_eq!(resize(&["resize", "/d", "+1G"]).1, Some(SizeChange::Grow(1 << 30)));
    assert_eq!(resize(&["resize", "/d", "-1G"]).1, Some(SizeChange::Shrink(1 << 30)));
    assert_eq!(resize(&["resize", "/d", "--inodes", "none"]), ("/d".to_owned(), None, Some(InodeChange::None)));
    assert_eq!(resize(&["resize", "/d", "1G", "--inodes=5"]).2, Some(InodeChange::To(5)));
    match order(&["status", "-H", "-p", "-o", "name,used", "/d", "/e"]) {
        Ok(Invocation::Cage(CageVerb::Status { view, directories })) => {
            let columns = Some(vec!["name".to_owned(), "used".to_owned()]);
            assert_eq!(view, View { json: false, scripted: true, exact: true, columns, everybody: false });
            assert_eq!(directories.len(), 2);
        }
        other => panic!("{other:?}"),
    }
    assert!(
        matches!(order(&["status"]), Ok(Invocation::Cage(CageVerb::Status { directories, .. })) if directories.is_empty())
    );
    assert!(matches!(order(&["list", "--json"]), Ok(Invocation::Cage(CageVerb::List { view })) if view.json));
    assert!(matches!(order(&["remove", "/d"]), Ok(Invocation::Cage(CageVerb::Remove { yes: false, .. }))));
    assert!(matches!(order(&["remove", "--yes", "/d"]), Ok(Invocation::Cage(CageVerb::Remove { yes: true, .. }))));
    // Directories may have the names of commands.
    assert_eq!(cage(&["--size=1G", "list"]).directory, Path::new("list"));
    assert_eq!(cage(&["--size=1G", "./status"]).directory, Path::new("./status"));
}

#[test]
fn fstab_has_a_word_for_it() {
    let mount = |arguments: &[&str]| personality::mount_program("mount.fuse.nacre", os(arguments));
    let plan = planned(mount(&["cage:/d", "/d", "-o", "rw,size=10G,nofail,x-systemd.automount,engine=auto"]).unwrap());
    assert_eq!(
        (line(&plan).as_str(), plan.mountpoint.as_deref(), plan.engine),
        ("host:/d | cage:size=10G", None, Engine::Auto)
    );
    let plan = planned(mount(&["cage:/d", "/m", "-o", "size=10G,when-full=drop-oldest,keep=a\\,b"]).unwrap());
    assert_eq!(line(&plan), "host:/d | cage:size=10G,when-full=drop-oldest,keep=a\\,b");
    assert_eq!(plan.mountpoint.as_deref(), Some(Path::new("/m")));
    assert!(
        matches!(mount(&["cage:/d", "/d", "-o", "remount,ro,size=10G"]), Ok(Plan::Remount(remount)) if remount.mountpoint == Path::new("/d"))
    );
    assert_eq!(mount(&["cage:/d", "/d", "-f", "-o", "size=1G"]), Ok(Plan::Nothing));
    // One that is in an image already has its size.
    assert!(planned(mount(&["cage:/d", "/d"]).unwrap()).engine_by_default);
    assert!(mount(&["cage:/d", "/d", "-o", "engine=fuse"]).unwrap_err().what.contains("--size is needed"));
    assert!(mount(&["cage:", "/d", "-o", "size=1G"]).unwrap_err().what.contains("DIR is needed"));
    // A mirror has no limits, and refuses their options.
    for failure in [
        mount(&["/d", "/m", "-o", "size=10G"]).unwrap_err(),
        personality::bindfs("bindfs", os(&["--size=10G", "/d", "/m"])).unwrap_err(),
    ] {
        assert_eq!(failure.what, "option size is for cages: a mirror limits nothing");
    }
    let engine = personality::bindfs("bindfs", os(&["--engine=loop", "/d", "/m"])).unwrap_err();
    assert!(engine.what.contains("is not one of fuse, kernel, auto"), "{}", engine.what);
    // mount(8) without the link runs the program by its own name.
    assert!(matches!(personality::bindfs("nacre", os(&["cage:/d", "/d", "-o", "size=1G"])), Ok(Plan::Cage(_))));
    assert!(matches!(personality::bindfs("bindfs", os(&["cage:/d", "/m"])), Ok(Plan::Mount(_))));
}
