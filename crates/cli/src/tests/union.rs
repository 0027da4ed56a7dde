//! The command line of unions: accepted and refused options, and lines of fstab.

use super::{line, mount, os};
use crate::{
    clap_args::View,
    commands::{self, Invocation},
    personality,
    plan::Plan,
    union::command::{DrainHow, TierVerb, UnionVerb},
};
use nacre_daemon::{
    failure::{Exit, Failure},
    plan::{MountPlan, Remount},
    union::requests::BranchPosition,
};
use nacre_stack::spec::BranchSpec;
use nacre_union::BranchMode;
use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::Path};

fn order(arguments: &[&str]) -> Result<Invocation, Failure> {
    let all = [&["nacre", "union"], arguments].concat();
    let matches =
        commands::table().try_get_matches_from(os(&all)).map_err(|error| Failure::usage(error.to_string()))?;
    commands::parse(&matches)
}

fn union(arguments: &[&str]) -> MountPlan {
    match order(arguments) {
        Ok(Invocation::Mount(plan)) => mount(plan),
        other => panic!("{arguments:?}: {other:?}"),
    }
}

fn refused(arguments: &[&str]) -> Failure {
    match order(arguments) {
        Err(failure) => failure,
        Ok(other) => panic!("{arguments:?}: {other:?}"),
    }
}

fn verb(arguments: &[&str]) -> UnionVerb {
    match order(arguments) {
        Ok(Invocation::Union(order)) => order,
        other => panic!("{arguments:?}: {other:?}"),
    }
}

#[test]
fn branches_are_written_in_every_way() {
    let two = "union:branch=/a=rw,branch=/b=ro";
    for (arguments, expected) in [
        (&["/a:/b", "/m"][..], two.to_owned()),
        (&["/a=rw:/b=ro", "/m"], two.to_owned()),
        (&["-o", "br:/a:/b", "/m"], two.to_owned()),
        (&["/m", "-o", "dirs=/a=rw:/b"], two.to_owned()),
        (&["none", "/m", "-o", "br=/a:/b"], two.to_owned()),
        (&["/a", "/m"], "union:branch=/a=rw".to_owned()),
        (&["/a=RW:/b=NC,4G", "/m"], "union:branch=/a=rw,branch=/b=nc+minfree=4294967296".to_owned()),
        (&["/m", "-o", "lowerdir=/c:/b,upperdir=/a"], "union:branch=/a=rw,branch=/c=ro+wh,branch=/b=ro+wh".to_owned()),
        // Only mergerfs has categories.
        (
            &["/a:/b", "/m", "-o", "category.create=mfs"],
            "union:branch=/a=rw,branch=/b=rw,option=category.create=mfs".to_owned(),
        ),
        (&["/a:/b", "/m", "-o", "create=mfs", "-o", "cpup=bu"], format!("{two},option=create=mfs,option=cpup=bu")),
        (
            &["/a:/b", "/m", "-o", "create=mfs,noatime,udba=none"],
            format!("{two},option=create=mfs,coherence=exclusive,noatime"),
        ),
        (&["/a:/b", "/m", "-o", "udba=reval,dirwh=32,plink"], format!("{two},coherence=revalidate")),
        (&["/a:/b", "/m", "--coherence", "exclusive"], format!("{two},coherence=exclusive")),
        (&["/a:/b", "/m", "--coherence=exclusive", "-o", "udba=notify"], two.to_owned()),
        (&["/a:/b", "/m", "-d"], format!("{two} | trace:level=all")),
        (
            &["{host:/x | remap:force-user=5}=rw:/b", "/m"],
            "union:branch={host:/x \\| remap:force-user=5}=rw,branch=/b=ro".to_owned(),
        ),
    ] {
        let plan = union(arguments);
        assert_eq!(line(&plan), expected, "{arguments:?}");
        assert_eq!((plan.mountpoint.as_path(), plan.prefix), (Path::new("/m"), "union:"), "{arguments:?}");
    }
}

#[test]
fn words_of_the_mount_reach_the_mount() {
    let plan = union(&[
        "/a",
        "/m",
        "-o",
        "ro,noatime,fsname=x,create=mfs,noacl",
        "--passthrough=off",
        "-f",
        "--no-allow-other",
    ]);
    assert!(
        plan.door.read_only && plan.foreground && !plan.door.passthrough && !plan.door.acl && !plan.door.allow_other
    );
    assert_eq!(plan.door.fsname.as_deref(), Some("x"));
    assert!(!plan.door.lock_forwarding);
    // A line as users of mergerfs have it.
    let pool = "defaults,nonempty,allow_other,use_ino,cache.files=off,moveonenospc=true,category.create=mfs,dropcacheonclose=true,minfreespace=250G,fsname=pool";
    let plan = union(&["/a:/b", "/m", "-o", pool]);
    let all =
        "union:branch=/a=rw,branch=/b=rw,option=moveonenospc=true,option=category.create=mfs,option=minfreespace=250G";
    assert_eq!((line(&plan), plan.door.fsname.as_deref()), (all.to_owned(), Some("pool")));
    // What mergerfs' own documentation recommends.
    let recommended = "cache.files=off,category.create=pfrd,func.getattr=newest,dropcacheonclose=false";
    let plan = union(&["/a:/b", "/m", "-o", recommended]);
    let all = "union:branch=/a=rw,branch=/b=rw,option=category.create=pfrd,option=func.getattr=newest";
    assert_eq!((line(&plan), &plan.warnings[..]), (all.to_owned(), &[][..]));
    let plan =
        union(&["/a:/b", "/m", "-o", "category.create=ff,threads=4,posix_acl=false,passthrough.io=off,umask=027"]);
    assert_eq!(line(&plan), "union:branch=/a=rw,branch=/b=rw,option=category.create=ff | remap:perms=0750");
    assert!(!plan.door.acl && !plan.door.passthrough);
    assert_eq!(plan.warnings, ["threads=4: requests are served by as many threads as there are CPUs"]);
    let plan = union(&["-o", recommended, "/a", "/b:/c", "/d=NC", "/m"]);
    let all = "union:branch=/a=rw,branch=/b=rw,branch=/c=rw,branch=/d=nc,option=category.create=pfrd,option=func.getattr=newest";
    assert_eq!((line(&plan), plan.mountpoint.as_path()), (all.to_owned(), Path::new("/m")));
    // A comma in a value keeps its backslash on the way through.
    assert_eq!(union(&["/a", "/m", "-o", r"fsname=a\,b,create=ff"]).door.fsname.as_deref(), Some("a,b"));
    assert_eq!(union(&["/a", "/m", "-o", r"route={a\,b}=ff"]).warnings, Vec::<String>::new());
    let warned = union(&["/a=ro:/b=ro", "/m", "-o", "create=ff"]);
    assert!(warned.warnings.iter().any(|warning| warning.contains("no branch is rw")), "{:?}", warned.warnings);
}

#[test]
fn what_makes_no_sense_is_told() {
    for (arguments, says) in [
        (&["/a"][..], "BRANCHES and MOUNTPOINT are needed"),
        (&["/a", "/m", "/n"], "too many arguments: \"/n\""),
        (&["/a:/b", "/m", "-o", "br:/c"], "named twice"),
        (&["/a=colour", "/m"], "\"colour\" is no branch attribute"),
        (&["/a::/b", "/m"], "a branch has no path"),
        (&["/a", "/m", "-o", "create=best"], "there is no such policy"),
        (&["/a", "/m", "-o", "colour=red"], "unknown option -o colour"),
        (&["/a", "/m", "-o", "force-user=5"], "option --force-user is not for unions"),
        (&["/a", "/m", "-o", "size=5G"], "option --size is not for unions"),
        (&["/a", "/m", "-o", "enable-lock-forwarding"], "is not for unions"),
        (&["/a", "/m", "-o", "engine=kernel"], "is not for unions"),
        (&["/a:/b", "/m", "-o", "route=*=/c"], "/c, which is no branch"),
        (&["{host:/x", "/m"], "has to end with }"),
        (&["{host:/x}rw", "/m"], "only =ATTRIBUTES may follow"),
        (&["{mem | cage:size=1G}=rw", "/m"], "a cage below a union needs state=DIRECTORY"),
        (&["{remap}=rw", "/m"], "cannot be the lowest layer"),
    ] {
        let failure = refused(arguments);
        assert_eq!(failure.exit, Exit::Usage, "{arguments:?}");
        let said = format!("{failure:?}");
        assert!(said.contains(&says.replace('"', "\\\"")), "{arguments:?}: {said}");
    }
    let many = vec!["/a"; 128].join(":");
    assert!(format!("{:?}", refused(&[&many, "/m"])).contains("127"));
}

#[test]
fn fstab_writes_the_same() {
    let two = "union:branch=/a=rw,branch=/b=ro";
    for (arguments, expected) in [
        (&["union:/a=rw:/b=ro", "/m", "-o", "rw,_netdev,nofail"][..], format!("{two},option=nofail")),
        (&["union:/a:/b", "/m", "-o", "create=mfs", "-n"], format!("{two},option=create=mfs")),
        (&["none", "/m", "-o", "br:/a:/b"], two.to_owned()),
        (&["/anything/at/all", "/m", "-o", "rw,dirs=/a:/b"], two.to_owned()),
        (
            &["overlay", "/m", "-o", "lowerdir=/b,upperdir=/a,workdir=/w"],
            "union:branch=/a=rw,branch=/b=ro+wh".to_owned(),
        ),
    ] {
        let plan = mount(personality::mount_program("mount.fuse.nacre", os(arguments)).unwrap());
        assert_eq!(line(&plan), expected, "{arguments:?}");
        assert_eq!(plan.mountpoint, Path::new("/m"));
    }
    // mount(8) runs the program itself where there is no helper.
    let plan = mount(personality::bindfs("nacre", os(&["union:/a:/b", "/m", "-o", "rw,create=ff"])).unwrap());
    assert_eq!(line(&plan), format!("{two},option=create=ff"));
    assert_eq!(personality::mount_program("mount.fuse.nacre", os(&["union:/a", "/m", "-f"])), Ok(Plan::Nothing));
    let remount = personality::mount_program("mount.fuse.nacre", os(&["union:/a", "/m", "-o", "remount,ro"]));
    assert_eq!(remount, Ok(Plan::Remount(Remount { mountpoint: "/m".into(), flags: vec!["ro"] })));
    assert!(personality::mount_program("mount.fuse.nacre", os(&["union:/a", "/m", "-o", "nosuchword"])).is_err());
    assert!(personality::mount_program("mount.fuse.nacre", os(&["union:/a", "/m", "-s", "-o", "nosuchword"])).is_ok());
}

#[test]
fn paths_may_have_any_bytes() {
    let odd = OsString::from_vec(b"/a\\:b\xff=rw:/c".to_vec());
    let all = [OsString::from("nacre"), "union".into(), odd, "/m".into()];
    let matches = commands::table().try_get_matches_from(all).unwrap();
    let Ok(Invocation::Mount(plan)) = commands::parse(&matches) else { panic!("no mount") };
    let plan = mount(plan);
    assert_eq!(line(&plan), "union:branch=/a\\\\:b\\xff=rw,branch=/c=ro");
}

#[test]
fn verbs_say_what_they_say() {
    let (m, d) = (|| "/m".into(), || "/d".into());
    for (arguments, expected) in [
        (&["list"][..], UnionVerb::List { view: View::default(), mountpoints: vec![] }),
        (
            &["list", "--json", "/m"],
            UnionVerb::List { view: View { json: true, ..View::default() }, mountpoints: vec![m()] },
        ),
        (
            &["where", "/m/a", "/m/b"],
            UnionVerb::Where { json: false, all: false, paths: vec!["/m/a".into(), "/m/b".into()] },
        ),
        (&["where", "-a", "/m/a"], UnionVerb::Where { json: false, all: true, paths: vec!["/m/a".into()] }),
        (&["explain", "-d", "/m/a"], UnionVerb::Explain { json: false, directory: true, path: "/m/a".into() }),
        (&["check", "--repair", "/a:/b"], UnionVerb::Check { json: false, repair: true, what: "/a:/b".into() }),
        (
            &["add", "/m", "/d"],
            UnionVerb::Add {
                mountpoint: m(),
                branch: BranchSpec::directory("/d", BranchMode::ro()),
                place: BranchPosition::Bottom,
            },
        ),
        (
            &["add", "--top", "/m", "/d=rw"],
            UnionVerb::Add {
                mountpoint: m(),
                branch: BranchSpec::directory("/d", BranchMode::rw()),
                place: BranchPosition::Top,
            },
        ),
        (
            &["add", "--position=3", "/m", "/d"],
            UnionVerb::Add {
                mountpoint: m(),
                branch: BranchSpec::directory("/d", BranchMode::ro()),
                place: BranchPosition::At(3),
            },
        ),
        (&["del", "--force", "/m", "/d"], UnionVerb::Remove { mountpoint: m(), branch: d(), force: true }),
        (&["mod", "/m", "/d=ro+wh"], UnionVerb::Modify { mountpoint: m(), branch: d(), mode: BranchMode::layer() }),
        (&["drain", "/m", "/d"], UnionVerb::Drain { mountpoint: m(), branch: d(), how: DrainHow::Wait }),
        (&["drain", "--stop", "/m", "/d"], UnionVerb::Drain { mountpoint: m(), branch: d(), how: DrainHow::Stop }),
        (&["drain", "--no-wait", "/m", "/d"], UnionVerb::Drain { mountpoint: m(), branch: d(), how: DrainHow::Start }),
        (&["mvup", "/m/a", "/m/b"], UnionVerb::Move { up: true, paths: vec!["/m/a".into(), "/m/b".into()] }),
        (&["mvdown", "/m/a"], UnionVerb::Move { up: false, paths: vec!["/m/a".into()] }),
        (&["tier", "/m"], UnionVerb::Tier { mountpoint: m(), json: false, what: TierVerb::Status }),
        (
            &["tier", "/m", "high=90"],
            UnionVerb::Tier { mountpoint: m(), json: false, what: TierVerb::Rules("high=90".to_owned()) },
        ),
        (&["tier", "-n", "/m"], UnionVerb::Tier { mountpoint: m(), json: false, what: TierVerb::Run { dry: true } }),
        (
            &["tier", "--run", "--json", "/m"],
            UnionVerb::Tier { mountpoint: m(), json: true, what: TierVerb::Run { dry: false } },
        ),
    ] {
        assert_eq!(verb(arguments), expected, "{arguments:?}");
    }
    for arguments in [
        &["mod", "/m", "/d"][..],
        &["add", "/m", "/d=rx"],
        &["add", "--position=0", "/m", "/d"],
        &["where"],
        &["del", "/m"],
    ] {
        assert_eq!(refused(arguments).exit, Exit::Usage, "{arguments:?}");
    }
}
