//! New file systems in image files, under loop devices. Called by `scratch` and `mounted`; needs
//! root.
//!
//! Invariant: every device and mount is entered in the [`Undo`] list before anything else can fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Doing, Failure};
use crate::programs;
use crate::undo::{self, Effect, Undo};

/// Default of mke2fs: one inode for this many bytes.
const EXT4_BYTES_PER_INODE: u64 = 16 << 10;

/// Makes a sparse file of `bytes` bytes.
pub fn sparse(image: &Path, bytes: u64) -> Result<(), Failure> {
    let file = fs::File::create(image).doing("creating", image)?;
    file.set_len(bytes).doing("sizing", image)
}

/// Makes a sparse file of `bytes` bytes and a file system of type `kind` in it. `names` is the number of inodes
/// that it must be able to hold, for file systems with a fixed number of inodes.
pub fn make(image: &Path, kind: &str, bytes: u64, names: u64, log: &Path) -> Result<(), Failure> {
    sparse(image, bytes)?;
    let maker = format!("mkfs.{kind}");
    let program = programs::find(&maker).ok_or_else(|| Failure::new(format!("{maker} is not installed")))?;
    let inodes = (2 * names).to_string();
    let arguments: &[&str] = match kind {
        "ext4" if names > bytes / EXT4_BYTES_PER_INODE / 2 => {
            &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-N", &inodes]
        }
        // Lazy initialisation would write in the background during the measurements.
        "ext4" => &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
        _ => &["-q", "-f"],
    };
    programs::run(Command::new(program).args(arguments).arg(image), log).map(drop)
}

/// Attaches the image to a loop device, whose path is returned.
pub fn attach(image: &Path, direct_io: bool, undo: &Undo, log: &Path) -> Result<PathBuf, Failure> {
    let mut command = Command::new("losetup");
    command.args(["-f", "--show"]).arg(if direct_io { "--direct-io=on" } else { "--direct-io=off" }).arg(image);
    let device = PathBuf::from(programs::run(&mut command, log)?);
    // Entered after the fact, because the program returns the name; `undo::remove_tree` finds the device too.
    undo.enter(Effect::Loop(device.clone())).inspect_err(|_| drop(undo::release_loop(&device)))?;
    Ok(device)
}

/// Mounts the device at `point`, which must have been entered already.
pub fn mount(device: &Path, kind: &str, options: &str, point: &Path, log: &Path) -> Result<(), Failure> {
    let mut command = Command::new("mount");
    command.args(["-t", kind]);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    programs::run(command.arg(device).arg(point), log).map(drop)
}
