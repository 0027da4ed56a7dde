//! Runs the programs that make, check and resize file systems: each file system brings its own.

use crate::{
    cage::engine::FileSystem,
    failure::{Exit, Failure},
    report::{path_text, printable},
};
use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Label of every file system that we make. XFS takes 12 characters.
pub const LABEL: &str = "nacre-cage";

/// A program and the Debian package that contains it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Name of the program.
    pub name: &'static str,
    /// The Debian package.
    pub package: &'static str,
}

/// The program `e2fsck(8)`.
pub const E2FSCK: Program = Program { name: "e2fsck", package: "e2fsprogs" };
/// The program `e2image(8)`.
pub const E2IMAGE: Program = Program { name: "e2image", package: "e2fsprogs" };
/// The program `resize2fs(8)`.
pub const RESIZE2FS: Program = Program { name: "resize2fs", package: "e2fsprogs" };
/// The program `xfs_growfs(8)`.
pub const XFS_GROWFS: Program = Program { name: "xfs_growfs", package: "xfsprogs" };
/// The program `btrfs(8)`.
pub const BTRFS: Program = Program { name: "btrfs", package: "btrfs-progs" };

/// Runs a program and waits for its end.
///
/// # Errors
/// It is not installed, or it failed: its exit code is above `tolerated`.
pub fn run<S: AsRef<OsStr>>(program: Program, arguments: &[S], tolerated: i32) -> Result<Output, Failure> {
    let output = Command::new(program.name)
        .args(arguments)
        .env("LC_ALL", "C")
        .env("PATH", search_path(env::var_os("PATH")))
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => missing(program),
        _ => Failure::io("cannot run", program.name, &error),
    })?;
    match output.status.code() {
        Some(code) if code <= tolerated => Ok(output),
        Some(_) => Err(Failure::new(format!("{} failed: {}", program.name, said(&output)))),
        None => Err(Failure::new(format!("{} was ended by a signal", program.name))),
    }
}

fn missing(program: Program) -> Failure {
    let what = format!("{} is not installed", program.name);
    Failure::new(what)
        .exit(Exit::NotFound)
        .next(format!("it is in Debian's package {}: apt install {0}", program.package))
}

/// Appends the directories of administrators' programs to `PATH`: services are often started without them.
fn search_path(path: Option<OsString>) -> OsString {
    let mut path = path.unwrap_or_default();
    if !path.is_empty() {
        path.push(":");
    }
    path.push("/usr/sbin:/usr/bin:/sbin:/bin");
    path
}

/// Returns the last messages of a program, in one line.
fn said(output: &Output) -> String {
    let lines = |bytes: &[u8]| -> Vec<String> {
        let lines = bytes.split(|&byte| byte == b'\n').map(|line| printable(line.trim_ascii()));
        // Programs print their version first.
        lines.filter(|line| !line.is_empty() && !is_version(line)).collect()
    };
    let mut said = lines(&output.stderr);
    if said.is_empty() {
        said = lines(&output.stdout);
    }
    let last = said.len().saturating_sub(3);
    if said.is_empty() { format!("{}", output.status) } else { said.split_off(last).join("; ") }
}

/// Whether a line is the version line of the programs of e2fsprogs: `resize2fs 1.47.0 (5-Feb-2023)`.
fn is_version(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    matches!(words.as_slice(), [_, version, date] if version.starts_with(|c: char| c.is_ascii_digit()) && date.starts_with('('))
}

/// Makes a file system on a new image of `bytes` full of zeros. None of its blocks is discarded.
///
/// # Errors
/// As [`run`].
pub fn make(kind: FileSystem, image: &Path, bytes: u64, inodes: Option<u64>) -> Result<(), Failure> {
    let image = image.as_os_str();
    let with = |words: &[&str]| -> Vec<OsString> {
        let words = words.iter().map(|word| OsString::from(*word));
        words
            .chain(inodes.map(|inodes| OsString::from(format!("-N{inodes}"))))
            .chain([OsString::from("--"), image.to_owned()])
            .collect()
    };
    match kind {
        FileSystem::Ext4 => {
            let program = Program { name: "mkfs.ext4", package: "e2fsprogs" };
            // 4 KiB blocks suit direct I/O on every disk; no blocks are reserved for root, who writes in the cage
            // like everybody.
            let words = |extended| ["-q", "-F", "-b", "4096", "-m", "0", "-L", LABEL, "-E", extended];
            // The image holds zeros already: neither mkfs nor the kernel, later, has to write them.
            let made = run(program, &with(&words("nodiscard,assume_storage_prezeroed=1")), 0);
            // Before 1.47 mke2fs does not know this option; other errors occur again.
            made.or_else(|_| run(program, &with(&words("nodiscard")), 0)).map(drop)
        }
        FileSystem::Xfs => {
            let program = Program { name: "mkfs.xfs", package: "xfsprogs" };
            // Sectors of 4 KiB: a loop device on a disk that has them takes no smaller requests.
            run(program, &with(&["-q", "-K", "-s", "size=4096", "-L", LABEL]), 0).map(drop)
        }
        FileSystem::Btrfs => {
            let program = Program { name: "mkfs.btrfs", package: "btrfs-progs" };
            // Data chunks take all the space that they can get, and then there is none for metadata, not even to
            // delete something: in a small file system both share their chunks, in a large one mkfs sets enough
            // aside for metadata (and a copy of it).
            const SHARED_BELOW: u64 = 5 << 30;
            let shared: &[&str] = if bytes < SHARED_BELOW {
                &["--mixed", "-d", "single", "-m", "single"]
            } else {
                &["-d", "single", "-m", "dup"]
            };
            run(program, &with(&[&["-q", "-K", "-L", LABEL], shared].concat()), 0).map(drop)
        }
    }
}

/// Smallest size of an image in bytes, with the reason.
pub fn least(kind: FileSystem) -> (u64, &'static str) {
    match kind {
        FileSystem::Ext4 => (16 << 20, "with its journal"),
        FileSystem::Xfs => (300 << 20, "mkfs.xfs makes none below"),
        FileSystem::Btrfs => (128 << 20, "with room for its metadata"),
    }
}

/// Checks the file system on a copy of an unmounted image and repairs what e2fsck repairs without asking (`-p`).
///
/// # Errors
/// Damage that needs a decision.
pub fn check_ext4(copy: &Path, image: &Path) -> Result<(), Failure> {
    let checked = run(E2FSCK, &[OsStr::new("-f"), OsStr::new("-p"), copy.as_os_str()], 1);
    checked.map(drop).map_err(|failure| failure.next(format!("`e2fsck -f {}` asks what to do", path_text(image))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_missing_program_names_its_package() {
        let failure = run(Program { name: "nacre-no-such-program", package: "xfsprogs" }, &["x"], 0).unwrap_err();
        assert_eq!(failure.exit, Exit::NotFound);
        assert!(failure.next.contains("apt install xfsprogs"), "{}", failure.next);
    }

    #[test]
    fn the_last_words_of_a_program_are_told() {
        let failure = run(
            Program { name: "sh", package: "dash" },
            &["-c", "echo resize2fs 1.47.0 '(5-Feb-2023)' >&2; echo no >&2; exit 3"],
            1,
        );
        assert_eq!(failure.unwrap_err().what, "sh failed: no");
        let failure = run(Program { name: "sh", package: "dash" }, &["-c", "echo one; exit 1"], 0);
        assert_eq!(failure.unwrap_err().what, "sh failed: one");
        assert!(run(Program { name: "sh", package: "dash" }, &["-c", "exit 1"], 1).is_ok());
        let silent = Output { status: std::process::ExitStatus::from_raw(256), stdout: Vec::new(), stderr: Vec::new() };
        assert_eq!(said(&silent), "exit status: 1");
    }

    #[test]
    fn programs_of_administrators_are_found() {
        assert_eq!(search_path(None), "/usr/sbin:/usr/bin:/sbin:/bin");
        assert_eq!(search_path(Some("/x".into())), "/x:/usr/sbin:/usr/bin:/sbin:/bin");
    }
}
