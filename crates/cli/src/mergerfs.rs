//! mergerfs' command line: `mergerfs [-o WORDS] BRANCHES MOUNTPOINT`, and that of mount(8) for the types `mergerfs` and
//! `fuse.mergerfs`.
//!
//! Called when the program is named `mergerfs` or `mount.mergerfs`, and for `nacre mergerfs`. Pure:
//! words in, a [`Plan`] for a union out. mergerfs' defaults are in [`DEFAULTS`], which are applied
//! before the given words.

use crate::{
    libfuse_args::Unknown,
    option_value::Given,
    options::Opt,
    plan::Plan,
    union::plan::{read_words, union},
};
use nacre_daemon::{failure::Failure, plan::MERGERFS};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
};

/// The behavior of mergerfs 2.33 to 2.40 (mergerfs(1), "OPTIONS"). Branches may be missing. Without
/// ACLs the root in the mount table is `/`, by which mergerfs-tools recognize a pool.
const DEFAULTS: &str =
    "category.create=epmfs,minfreespace=4G,posix-acl=false,nofail,control-file=true,duplicates=change";

/// Returns whether a program of this name reads mergerfs' command line or fstab's line for it.
pub fn is_its_name(program: &str) -> bool {
    program.rsplit('.').next() == Some(MERGERFS)
}

/// Parses the command line.
///
/// # Errors
/// A wrong command line.
pub fn mergerfs(arguments: impl IntoIterator<Item = OsString>) -> Result<Plan, Failure> {
    let (mut given, mut texts, mut positionals) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        match argument.as_bytes() {
            b"-h" | b"--help" => return Ok(Plan::Help),
            b"-v" | b"-V" | b"--version" => return Ok(Plan::Version),
            b"-f" => given.push(Given::new(Opt::Foreground, "")),
            b"-d" => given.push(Given::new(Opt::Debug, "")),
            // One thread would only be slower.
            b"-s" => {}
            b"--" => positionals.extend(rest.by_ref()),
            b"-o" => {
                let words = rest.next().ok_or_else(|| Failure::usage("option -o needs a value: -o WORD[,WORD]..."))?;
                texts.push(words);
            }
            [b'-', b'o', attached @ ..] => texts.push(OsStr::from_bytes(attached).to_owned()),
            [b'-', _, ..] => {
                return Err(Failure::usage(format!("unknown option {}", argument.as_bytes().escape_ascii()))
                    .next("--help shows how"));
            }
            _ => positionals.push(argument),
        }
    }
    plan(MERGERFS, given, texts, Unknown::Refuse, positionals)
}

/// Builds the plan of a union as mergerfs would mount it. The source in the mount table is the
/// branches as they are written, so that mount(8) recognizes a line of fstab as mounted.
///
/// # Errors
/// As [`union`].
pub fn plan(
    program: &str,
    mut given: Vec<Given>,
    mut texts: Vec<OsString>,
    unknown: Unknown,
    positionals: Vec<OsString>,
) -> Result<Plan, Failure> {
    let names_itself =
        |text: &OsString| text.as_bytes().split(|byte| *byte == b',').any(|word| word.starts_with(b"fsname="));
    if let [branches @ .., _] = positionals.as_slice()
        && !branches.is_empty()
        && !texts.iter().any(names_itself)
    {
        given.push(Given::new(Opt::FsName, branches.join(OsStr::new(":"))));
    }
    texts.insert(0, DEFAULTS.into());
    union(program, given, read_words(&texts, unknown)?, positionals)
}

/// Returns the text of `--help`.
pub fn help() -> &'static str {
    "Usage: mergerfs [-f] [-d] [-o WORD[,WORD...]] BRANCHES MOUNTPOINT\n\n\
     Shows several directories, divided by colons, as one tree; each file lies whole in one of them.\n\n  \
     -f, -d, -h, -V                 foreground; and log everything; this help; the version\n  \
     -o category.create=POLICY      where new files go: epmfs (the default), mfs, pfrd, ff, lfs, ...\n  \
     -o minfreespace=SIZE           least room that a branch for new files has (4G)\n  \
     -o moveonenospc=true           a file moves to another branch when its own is full\n  \
     -o func.getattr=newest         directories show the newest times of their branches\n  \
     -o ro, nosuid, noexec...       as mount(8) has them\n\n\
     docs/union.md lists all words. Settings can be read and changed while mounted: `getfattr -d MOUNTPOINT/.mergerfs`.\n\n\
     Example: mergerfs -o category.create=mfs,cache.files=off '/mnt/disk*' /mnt/pool\n"
}
