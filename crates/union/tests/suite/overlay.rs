//! The kernel's overlay file system as the judge: the same operations have the same answers and
//! leave the same tree, and each of the two reads what the other has written. Needs the right to
//! mount; without it, the tests say so and pass.

mod native;

use crate::unions::{Directories, host, union};
use nacre_testkit::{
    World,
    model::{Operation, Tree, apply, operations, tree},
};
use nacre_union::{Style, UnionOptions};
use proptest::test_runner::{Config, FileFailurePersistence};
use rustix::mount::{MountFlags, UnmountFlags};
use std::{
    ffi::CString,
    path::{Path, PathBuf},
};

/// A mount of the kernel's overlay file system; unmounted with this value.
struct Overlay(PathBuf);

impl Overlay {
    fn mount(directories: &Directories, lower: &Path, upper: &Path, words: &str) -> Option<Overlay> {
        let work = directories.fresh();
        let data =
            format!("lowerdir={},upperdir={},workdir={},{words}", lower.display(), upper.display(), work.display());
        Overlay::mount_with(directories, data)
    }

    /// Both as layers that are only read: the kernel knows whiteouts by attribute on such alone.
    fn mount_read_only(directories: &Directories, lower: &Path, upper: &Path) -> Option<Overlay> {
        Overlay::mount_with(
            directories,
            format!("lowerdir={}:{},redirect_dir=follow", upper.display(), lower.display()),
        )
    }

    fn mount_with(directories: &Directories, data: String) -> Option<Overlay> {
        let target = directories.fresh();
        match rustix::mount::mount(
            "overlay",
            &target,
            "overlay",
            MountFlags::empty(),
            CString::new(data).unwrap().as_c_str(),
        ) {
            Ok(()) => Some(Overlay(target)),
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NODEV) => {
                println!("skipped: overlayfs cannot be mounted here");
                None
            }
            Err(error) => panic!("overlayfs: {error}"),
        }
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

/// What the lower branch is filled with, and what happens then.
type History = (Vec<Operation>, Vec<Operation>);

fn check(everyday: u32, run: impl Fn(&History)) {
    nacre_layers::host::prepare_worker().unwrap();
    rustix::process::umask(rustix::fs::Mode::empty());
    let cases = std::env::var("NACRE_OVERLAY_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(everyday);
    println!("campaign: {cases} cases (NACRE_OVERLAY_CASES)");
    let config = Config {
        cases,
        max_shrink_iters: 400,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    };
    let mut runner = crate::unions::runner(config);
    let outcome = runner.run(&(operations(40), operations(40)), |history| {
        run(&history);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

fn fill(directories: &Directories, operations: &[Operation]) -> PathBuf {
    let lower = directories.fresh();
    let world = World::new(host(&lower));
    for operation in operations {
        let _ = apply(&world, operation);
    }
    lower
}

/// What is done for the rename of a directory that is not on the upper branch as a whole.
const RENAMES: [UnionOptionsOf; 2] = [
    |options| UnionOptions { directory_redirect: false, ..options },
    // Without copying, every such rename is by redirect.
    |options| UnionOptions { directory_redirect: true, directory_copy_limit: 0, ..options },
];

type UnionOptionsOf = fn(UnionOptions) -> UnionOptions;

fn over(upper: &Path, lower: &Path, whiteout: Style, renames: UnionOptionsOf) -> World {
    let options = renames(UnionOptions { whiteout, sync: false, ..UnionOptions::default() });
    World::new(union(vec![(host(upper), "rw"), (host(lower), "ro+wh")], options))
}

#[test]
fn the_same_operations_have_the_same_answers() {
    for renames in RENAMES {
        check(30, |(before, then)| {
            let directories = Directories::new();
            let (lower, same) = (fill(&directories, before), fill(&directories, before));
            let Some(overlay) =
                Overlay::mount(&directories, &lower, &directories.fresh(), "redirect_dir=on,index=on,metacopy=off")
            else {
                return;
            };
            let upper = directories.fresh();
            let ours = over(&upper, &same, Style::Wh, renames);
            for (index, operation) in then.iter().enumerate() {
                let (wanted, got) = (native::apply(&overlay.0, operation), apply(&ours, operation));
                assert_eq!(
                    got,
                    wanted,
                    "operation {index}: {operation:?}\nafter {:#?}\nover {before:#?}",
                    &then[..index]
                );
            }
            let wanted = native::tree(&overlay.0);
            assert_eq!(tree(&ours), wanted, "the trees differ after {then:#?}\nover {before:#?}");
            drop(ours);
            assert_eq!(
                tree(&over(&upper, &same, Style::Wh, renames)),
                wanted,
                "a remount differs after {then:#?}\nover {before:#?}"
            );
        });
    }
}

/// What has links in it differs: the kernel's overlay forgets them with `index=off`, and reads ours
/// without their index.
fn without_links(operations: &[Operation]) -> Vec<Operation> {
    operations.iter().filter(|operation| !matches!(operation, Operation::Link(..))).cloned().collect()
}

/// A tree without the union's own directories.
fn of_users(mut tree: Tree) -> Tree {
    tree.retain(|path, _| !path.starts_with(b"/.wh."));
    tree
}

#[test]
fn what_the_kernel_has_written_is_read() {
    for redirect in ["off", "on"] {
        check(30, |(before, then)| {
            let directories = Directories::new();
            let lower = fill(&directories, &without_links(before));
            let upper = directories.fresh();
            let words = format!("redirect_dir={redirect},index=off,metacopy=off");
            let Some(overlay) = Overlay::mount(&directories, &lower, &upper, &words) else { return };
            for operation in without_links(then) {
                let _ = native::apply(&overlay.0, &operation);
            }
            let wanted = native::tree(&overlay.0);
            drop(overlay);
            let read_only = union(vec![(host(&upper), "ro+wh"), (host(&lower), "ro")], UnionOptions::default());
            assert_eq!(
                tree(&World::new(read_only)),
                wanted,
                "redirects {redirect}: read after {then:#?}\nover {before:#?}"
            );
            let taken_over = over(&upper, &lower, Style::Chardev, RENAMES[0]);
            assert_eq!(tree(&taken_over), wanted, "redirects {redirect}: taken over after {then:#?}\nover {before:#?}");
        });
    }
}

#[test]
fn the_kernel_reads_what_is_written() {
    for (style, renames) in [
        (Style::Chardev, RENAMES[0]),
        (Style::Xattr, RENAMES[0]),
        (Style::Chardev, RENAMES[1]),
        (Style::Xattr, RENAMES[1]),
    ] {
        check(20, |(before, then)| {
            let directories = Directories::new();
            let lower = fill(&directories, &without_links(before));
            let upper = directories.fresh();
            let ours = over(&upper, &lower, style, renames);
            for operation in without_links(then) {
                let _ = apply(&ours, &operation);
            }
            let wanted = tree(&ours);
            drop(ours);
            let overlay = match style {
                Style::Xattr => Overlay::mount_read_only(&directories, &lower, &upper),
                _ => Overlay::mount(&directories, &lower, &upper, "redirect_dir=on,index=off,metacopy=off"),
            };
            let Some(overlay) = overlay else { return };
            assert_eq!(of_users(native::tree(&overlay.0)), wanted, "{style:?} after {then:#?}\nover {before:#?}");
        });
    }
}
