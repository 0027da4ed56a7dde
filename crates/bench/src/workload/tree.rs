//! A source tree: unpacked by `tar`, measured by `du`, removed by `rm -rf`.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::listing::program;
use super::{Visit, finished, needs_making, repeated, timed};
use crate::failure::{Doing, Failure};
use crate::scale::Scale;

const PER_DIRECTORY: u64 = 32;
const LINE: &[u8] = b"static const int value = 42; /* a line as long as lines of programs are */\n";

/// Makes the archive: files of 0.3 to 15 KiB, 32 to a directory.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let directory = source.join("tree");
    if !needs_making(&directory)? {
        return Ok(());
    }
    let model = directory.join("model");
    for number in 0..scale.tree {
        let part = model.join(format!("part-{:03}", number / PER_DIRECTORY));
        fs::create_dir_all(&part).doing("creating", &part)?;
        let path = part.join(format!("source-{number:05}.c"));
        // Pseudo-random sizes, the same in every run.
        let lines = 4 + usize::try_from(number * 7919 % 197).unwrap_or(0);
        fs::write(&path, LINE.repeat(lines)).doing("writing", &path)?;
    }
    let archive = directory.join("model.tar");
    let status = Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&directory).arg("model").status();
    if !status.doing("running tar for", &archive)?.success() {
        return Err(Failure::new("tar could not make the archive"));
    }
    fs::remove_dir_all(&model).doing("removing", &model)?;
    finished(&directory)
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    if visit.reads_only {
        return Ok(());
    }
    let count = visit.scale.tree;
    let (archive, model) = (visit.shared("tree").join("model.tar"), visit.own.join("model"));
    let (archive, own) = (archive.to_string_lossy().into_owned(), visit.own.clone());
    visit.sample("tar-extract", timed(|| program("tar", &["-xf", &archive, "-C"], &own))?.0, count)?;
    visit.cold()?;
    visit.sample("du-first", timed(|| program("du", &["-s"], &model))?.0, count)?;
    visit.sample("du-again", repeated(|| program("du", &["-s"], &model))?, count)?;
    visit.sample("rm-rf", timed(|| program("rm", &["-rf"], &model))?.0, count)
}
