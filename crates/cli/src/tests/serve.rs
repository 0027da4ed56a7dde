//! Which engine serves a plan.

use super::{mount, os};
use crate::personality;
use nacre_daemon::{
    failure::Exit,
    serve::{self, Choice},
};
use nacre_layers::context::{Context, Mounter};

fn choose(uid: u32, options: &[&str]) -> Result<Choice, String> {
    let plan = mount(personality::bindfs("bindfs", os(&[options, &["/no/such/source", "/m"]].concat())).unwrap());
    let context = Context { mounter: Mounter { uid, gid: uid, groups: vec![uid] }, ..Context::system().unwrap() };
    serve::choose(&plan, &context).map_err(|failure| {
        assert_eq!(failure.exit, Exit::Failure);
        failure.what
    })
}

/// The engine and the reason.
fn engine(uid: u32, options: &[&str]) -> (&'static str, String) {
    match choose(uid, options).unwrap() {
        Choice::Kernel(_, reason) => ("kernel", reason),
        Choice::Fuse(reason) => ("fuse", reason),
    }
}

#[test]
fn fuse_unless_something_else_is_asked_for() {
    for (uid, options, expected, reason) in [
        (0, &["-r"][..], "fuse", "the default"),
        (0, &["--engine=fuse"], "fuse", "the default"),
        (0, &["--engine=kernel", "-r"], "kernel", "asked for"),
        (0, &["--engine=kernel", "--map=1/2"], "kernel", "asked for"),
        (0, &["--engine=auto", "-r"], "kernel", "does all"),
        (0, &["--engine=auto", "--map=1/2:2/1"], "kernel", "does all"),
        (0, &["--engine=auto", "--map=1/2"], "fuse", "users 2 of the source appear as 65534"),
        (0, &["--engine=auto", "--delete-deny"], "fuse", "the rule delete-deny"),
        (0, &["--engine=auto", "-f"], "fuse", "no process to stay in the foreground"),
        (5, &["--engine=auto", "-r"], "fuse", "only root"),
        (5, &["--engine=kernel", "-r"], "kernel", "asked for"),
    ] {
        let (found, why) = engine(uid, options);
        assert_eq!(found, expected, "{options:?}: {why}");
        assert!(why.contains(reason), "{options:?}: {why}");
    }
}

#[test]
fn what_the_kernel_cannot_do_is_refused_with_the_reason() {
    for (options, reason) in [
        (
            &["--engine=kernel", "-p", "a-w"][..],
            "--engine=kernel is not possible: the rule perms works only through FUSE",
        ),
        (&["--engine=kernel", "-f"], "no process to stay in the foreground"),
        (&["--engine=kernel", "--map=*/5"], "many ids to one"),
    ] {
        let found = choose(0, options).unwrap_err();
        assert!(found.contains(reason), "{options:?}: {found}");
    }
}
