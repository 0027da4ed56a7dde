//! The program that was called, by its name, and the two command lines that are not our own: those
//! of bindfs and of mount(8)'s helpers.
//!
//! Pure: names and arguments in, a [`Plan`] out.

use crate::{
    cage, fs,
    libfuse_args::{self, Unknown},
    mergerfs,
    option_value::Given,
    options::Opt,
    plan::{self, Plan},
    settings::Settings,
    union,
};
use nacre_daemon::{
    failure::Failure,
    plan::{FUSE_OVERLAYFS, MERGERFS},
    pool::start::ZPOOL,
};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
};

/// Program whose command line is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Personality {
    /// `nacre VERB ...`.
    Nacre,
    /// `bindfs [options] SOURCE MOUNTPOINT`; mount(8) also runs it for the type `fuse.nacre` where
    /// no helper of ours is installed.
    Bindfs,
    /// `fuse-overlayfs -o lowerdir=...,upperdir=...,workdir=... MOUNTPOINT`, as container engines
    /// call it.
    Overlay,
    /// `mergerfs [-o WORDS] BRANCHES MOUNTPOINT`.
    Mergerfs,
    /// `zfs VERB ...`: `nacre fs` with the messages of ZFS.
    Fs,
    /// `zpool VERB ...`, as ZFS' own program.
    Pool,
    /// `mount.fuse.nacre SOURCE MOUNTPOINT [-sfnv] [-o WORDS]`.
    MountProgram,
}

/// Returns the name that the program was called by, without its directory.
pub fn program(argv0: &OsStr) -> String {
    Path::new(argv0).file_name().map_or_else(|| "nacre".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Returns the personality of `program`, whose first argument is `first`.
pub fn of(program: &str, first: Option<&OsStr>) -> Personality {
    match program {
        "bindfs" => Personality::Bindfs,
        FUSE_OVERLAYFS => Personality::Overlay,
        MERGERFS => Personality::Mergerfs,
        fs::run::ZFS => Personality::Fs,
        ZPOOL => Personality::Pool,
        name if name.starts_with("mount.") => Personality::MountProgram,
        // No verb has a slash: this is how mount(8) runs the program that the type `fuse.nacre`
        // names.
        _ if first.is_some_and(|first| first.as_bytes().contains(&b'/')) => Personality::Bindfs,
        _ => Personality::Nacre,
    }
}

/// Parses bindfs' command line.
///
/// # Errors
/// A wrong command line.
pub fn bindfs(program: &str, arguments: impl IntoIterator<Item = OsString>) -> Result<Plan, Failure> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // Words of unions are not in bindfs' table: a line with them is parsed as mount(8) writes it.
    let others = |argument: &OsString| {
        nacre_daemon::union::place::prefixed(argument).is_some()
            || fs::args::dataset(program, std::slice::from_ref(argument)).is_some()
    };
    if program != "bindfs" && arguments.iter().any(others) {
        return mount_program(program, arguments);
    }
    let words = libfuse_args::parse(arguments, Unknown::Refuse)?;
    let settings = Settings::fold(&words.given)?;
    if settings.help {
        return Ok(Plan::Help);
    }
    if settings.version {
        return Ok(Plan::Version);
    }
    if settings.fuse_version {
        return Ok(Plan::FuseVersion);
    }
    if let (false, Some(positionals)) = (program == "bindfs", caged(&words.positionals)) {
        return cage::plan::cage(program, settings, &words.given, positionals);
    }
    plan::mirror(program, settings, without_prefix(words.positionals))
}

/// Parses the command line of a mount(8) helper.
///
/// # Errors
/// A wrong command line.
pub fn mount_program(program: &str, arguments: impl IntoIterator<Item = OsString>) -> Result<Plan, Failure> {
    let MountCall { mut given, texts, unknown, mut positionals, fake } = mount_call(arguments)?;
    // A remount changes flags only, for every kind of mount.
    let remount = texts.iter().any(|text| text.as_bytes().split(|byte| *byte == b',').any(|word| word == b"remount"));
    if mergerfs::is_its_name(program) && !remount {
        let plan = mergerfs::plan(program, given, texts, unknown, positionals);
        return if fake { plan.map(|_| Plan::Nothing) } else { plan };
    }
    if let Some(name) = fs::args::dataset(program, &positionals).filter(|_| !remount) {
        let plan = fs::args::mount(name, &positionals, &texts, !given.is_empty())?;
        return Ok(if fake { Plan::Nothing } else { plan });
    }
    let branches =
        positionals.first().and_then(|first| nacre_daemon::union::place::prefixed(first)).map(OsStr::to_owned);
    if branches.is_some() || union::plan::names_branches(&texts) {
        positionals.splice(..1.min(positionals.len()), [branches.unwrap_or_default()]);
        let plan = union::plan::union(program, given, union::plan::read_words(&texts, unknown)?, positionals);
        return if fake { plan.map(|_| Plan::Nothing) } else { plan };
    }
    for text in &texts {
        libfuse_args::parse_words(text, unknown, &mut given).map_err(|failure| for_unions(failure, &texts))?;
    }
    let settings = Settings::fold(&given)?;
    if fake {
        return Ok(Plan::Nothing);
    }
    if let Some(positionals) = caged(&positionals) {
        return cage::plan::cage(program, settings, &given, positionals);
    }
    let positionals = without_prefix(positionals);
    // Column 1 of fstab is a directory to mirror, or a file that describes a stack.
    if positionals.first().is_some_and(|source| source.as_bytes().ends_with(b".toml")) && !settings.remount {
        return plan::stack(program, settings, positionals);
    }
    plan::mirror(program, settings, positionals)
}

/// Adds a hint to the failure of a line with words of unions whose source lacks `union:`.
fn for_unions(failure: Failure, texts: &[OsString]) -> Failure {
    let list = texts.join(OsStr::new(","));
    match nacre_union::Words::parse(&list) {
        Ok(words) if !words.own.is_empty() || !words.unneeded.is_empty() || !words.notices.is_empty() => failure
            .next("the words are those of a union, whose source begins with union: as in union:/mnt/disk1:/mnt/disk2"),
        _ => failure,
    }
}

/// Returns whether the source of an fstab line may be missing (`nofail` of mount(8)): only the
/// mount point has to exist.
pub fn may_be_missing(arguments: &[OsString]) -> bool {
    let Ok(MountCall { texts, positionals, .. }) = mount_call(arguments.iter().cloned()) else { return false };
    let says_so = |text: &OsString| text.as_bytes().split(|byte| *byte == b',').any(|word| word == b"nofail");
    texts.iter().any(says_so) && positionals.get(1).is_some_and(|mountpoint| Path::new(mountpoint).exists())
}

/// Adds the words `suid` and `dev` of the line of /etc/fstab that mount(8) works on, where root mounts and the
/// arguments do not say otherwise: mount(8) does not pass them on.
pub fn with_table_words(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if !rustix::process::geteuid().is_root() {
        return arguments;
    }
    let Ok(MountCall { texts, positionals, .. }) = mount_call(arguments.iter().cloned()) else { return arguments };
    let [source, mountpoint] = positionals.as_slice() else { return arguments };
    let given: Vec<&[u8]> = texts.iter().flat_map(|text| text.as_bytes().split(|byte| *byte == b',')).collect();
    if given.contains(&&b"remount"[..]) {
        return arguments;
    }
    for word in nacre_daemon::fstab::permissive_words(source, Path::new(mountpoint)) {
        if !given.contains(&format!("no{word}").as_bytes()) {
            arguments.extend([OsString::from("-o"), OsString::from(word)]);
        }
    }
    arguments
}

/// Arguments of a mount(8) helper.
struct MountCall {
    given: Vec<Given>,
    /// The text after each `-o`.
    texts: Vec<OsString>,
    unknown: Unknown,
    positionals: Vec<OsString>,
    fake: bool,
}

fn mount_call(arguments: impl IntoIterator<Item = OsString>) -> Result<MountCall, Failure> {
    let mut positionals = Vec::new();
    let mut texts = Vec::new();
    let (mut sloppy, mut fake, mut read_only) = (false, false, false);
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        let [b'-', letters @ ..] = argument.as_bytes() else {
            positionals.push(argument);
            continue;
        };
        match letters {
            b"o" => {
                texts.push(rest.next().ok_or_else(|| Failure::usage("option -o needs a value: -o WORD[,WORD]..."))?)
            }
            [b'o', attached @ ..] => texts.push(OsStr::from_bytes(attached).to_owned()),
            // mount(8) itself enters the namespace; the type is known.
            b"t" | b"N" => {
                rest.next();
            }
            letters => {
                for letter in letters {
                    match letter {
                        b's' => sloppy = true,
                        b'f' => fake = true,
                        b'r' => read_only = true,
                        b'n' | b'v' | b'w' => {}
                        other => return Err(Failure::usage(format!("unknown option -{}", char::from(*other)))),
                    }
                }
            }
        }
    }
    let mut given = Vec::new();
    if read_only {
        given.push(Given::new(Opt::ReadOnly, ""));
    }
    let unknown = if sloppy { Unknown::Drop } else { Unknown::Refuse };
    Ok(MountCall { given, texts, unknown, positionals, fake })
}

/// Returns the paths of a cage, whose first column in fstab is `cage:DIR`.
fn caged(positionals: &[OsString]) -> Option<Vec<OsString>> {
    let (first, rest) = positionals.split_first()?;
    let directory = first.as_bytes().strip_prefix(nacre_daemon::plan::CAGE_PREFIX.as_bytes())?;
    Some(std::iter::once(OsStr::from_bytes(directory).to_owned()).chain(rest.iter().cloned()).collect())
}

/// Strips the prefix of fstab's old form `bindfs#SOURCE`.
fn without_prefix(mut positionals: Vec<OsString>) -> Vec<OsString> {
    if let Some(source) = positionals.first_mut() {
        for prefix in [&b"bindfs#"[..], b"nacre#"] {
            if let Some(path) = source.as_bytes().strip_prefix(prefix) {
                *source = OsStr::from_bytes(path).to_owned();
                break;
            }
        }
    }
    positionals
}
