//! A tree of very many small files, copied to the target by `cp -a`, `rsync -a` and `nacre copy`: the slow
//! operation of the original document.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::material::Material;
use super::{Visit, finished, needs_making, timed};
use crate::failure::{Doing, Failure};
use crate::programs::find;
use crate::scale::Scale;

/// Files per directory.
const TOGETHER: u64 = 1000;
/// Bytes of the largest file; the smallest is empty.
const MOST: u64 = 4000;
/// Name of the tree, on the file system that it is copied from.
const TREE: &str = "copied";

/// Makes the tree.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let tree = source.join(TREE);
    if !needs_making(&tree)? {
        return Ok(());
    }
    let supply = Material::Text.supply();
    for number in 0..scale.files {
        let directory = tree.join(format!("{:06}", number / TOGETHER));
        if number % TOGETHER == 0 {
            fs::create_dir(&directory).doing("creating", &directory)?;
        }
        let path = directory.join(format!("measurement-{number:08}.dat"));
        let length = usize::try_from(number.wrapping_mul(0x9e37_79b9) % MOST).unwrap_or(0);
        fs::write(&path, supply.block(number * MOST, length)).doing("writing", &path)?;
    }
    finished(&tree)
}

/// Runs a copy until its result is durable.
fn copied(visit: &Visit<'_>, command: &mut Command, to: &Path) -> Result<Duration, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    visit.cold()?;
    let (elapsed, ()) = timed(|| {
        let status = command
            .arg(visit.source.join(TREE))
            .arg(to)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        let status = status.map_err(|error| Failure::new(format!("starting {name}: {error}")))?;
        if !status.success() {
            return Err(Failure::new(format!("{name}: {status}")));
        }
        visit.tidy(&[])
    })?;
    fs::remove_dir_all(to).doing("removing", to)?;
    Ok(elapsed)
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.files;
    let by_cp = copied(visit, Command::new("cp").arg("-a"), &visit.own.join("by-cp"))?;
    visit.sample("copy-cp", by_cp, count)?;
    if find("rsync").is_some() {
        let by_rsync = copied(visit, Command::new("rsync").arg("-a"), &visit.own.join("by-rsync"))?;
        visit.sample("copy-rsync", by_rsync, count)?;
    }
    let by_nacre = copied(visit, Command::new(&visit.nacre).args(["copy", "-q"]), &visit.own.join("by-nacre"))?;
    visit.sample("copy-nacre", by_nacre, count)?;
    match visit.daemon_memory()? {
        Some(bytes) => visit.count("copy-memory", bytes),
        None => Ok(()),
    }
}
