//! A pool in a control group with little memory: it takes its share and is not killed.

use crate::mounting::{as_root, finish, mounts_below, nacre, needs, scratch, sh, skip, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Memory limit of the control group, bytes.
const LIMIT: u64 = 64 << 20;

/// A control group of its own; gone at the end.
struct Group(PathBuf);

impl Group {
    /// `None` where there is no hierarchy for memory that can be written to.
    fn new() -> Option<Group> {
        let name = format!("nacre-test-{}", std::process::id());
        [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")].into_iter().find_map(
            |(tree, file)| {
                let group = Group(Path::new(tree).join(&name));
                fs::create_dir(&group.0).ok()?;
                group.0.join(file).exists().then(|| fs::write(group.0.join(file), LIMIT.to_string()).ok())??;
                Some(group)
            },
        )
    }

    /// Runs a shell script in the group, which its children stay in.
    fn run(&self, place: &Path, script: &str) -> Output {
        let inside = format!("echo $$ > {}/cgroup.procs && {script}", self.0.display());
        let state = place.join("state");
        finish(
            Command::new("sh")
                .arg("-ec")
                .arg(inside)
                .current_dir(place)
                .env("LC_ALL", "C")
                .env("NACRE_STATE_DIR", state),
        )
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Empty once the pool's process has ended.
        let _ = fs::remove_dir(&self.0);
    }
}

/// A pool, exported when dropped.
struct Pool<'a> {
    name: String,
    place: &'a Path,
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        finish(Command::new(nacre()).args(["pool", "export", "-f", &self.name]));
        for mount in mounts_below(self.place) {
            let _ = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

#[test]
fn a_pool_fits_into_its_control_group() {
    needs!(as_root());
    let Some(group) = Group::new() else {
        skip("cgroup", "there is no control group for memory that could be made");
        return;
    };
    let (place, program) = (scratch(), nacre());
    let pool = Pool { name: format!("small{}", std::process::id()), place: place.path() };
    let (name, program) = (&pool.name, program.display());
    let run = |script: &str| {
        let output = group.run(place.path(), script);
        assert!(output.status.success(), "{script}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };
    // More than the group has, in small files and large ones, which nothing makes smaller.
    let (small, large) = (place.path().join("tree/small"), place.path().join("tree/large"));
    let mut state = 1_u64;
    let mut noise = |length: usize| -> Vec<u8> {
        let words = (0..length.div_ceil(8)).flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state ^ (state >> 29)).to_le_bytes()
        });
        words.take(length).collect()
    };
    for directory in [&small, &large] {
        fs::create_dir_all(directory).unwrap();
    }
    for number in 0..4000 {
        fs::write(small.join(number.to_string()), noise(100 + number * 4)).unwrap();
    }
    for number in 0..10 {
        fs::write(large.join(number.to_string()), noise(12 << 20)).unwrap();
    }
    run(&format!("{program} pool create --size 1G -m {}/at {name} image", place.path().display()));
    let process = run(&format!("{program} pool status --json {name}"));
    // What these read and write is not the pool's: in its group, the kernel would count the pages
    // of both trees, and read the programs again and again.
    sh(place.path(), "cp -r tree at/");
    run(&format!("{program} fs snapshot {name}@a"));
    sh(place.path(), "diff -r tree at/tree");
    let number =
        |told: &str| serde_json::from_str::<serde_json::Value>(told).unwrap()["pools"][name]["process"].clone();
    assert_eq!(number(&run(&format!("{program} pool status --json {name}"))), number(&process), "it was killed");
    run(&format!("{program} pool check {name}"));
    run(&format!("{program} pool export {name}"));
}
