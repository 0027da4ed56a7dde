//! The plan of a union from a command line, as plain data. Pure: nothing here looks at the system.

use crate::{
    libfuse_args::{self, Unknown},
    option_value::Given,
    options::Taker,
    plan::{self, Plan},
    settings::Settings,
};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, Engine, MountPlan, StackSource},
};
use nacre_stack::spec::{BranchSpec, HostCoherence, LayerSpec, RemapSpec, StackSpec, TraceLevel, TraceSpec, UnionSpec};
use nacre_union::{Udba, Words};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

/// The parsed texts after `-o`.
pub struct UnionWords {
    /// The words of unions.
    union: Words,
    /// All other words, as options.
    given: Vec<Given>,
}

/// Parses the texts after `-o`.
///
/// # Errors
/// Words that are not known or do not fit.
pub fn read_words(texts: &[OsString], unknown: Unknown) -> Result<UnionWords, Failure> {
    let list = texts.join(OsStr::new(","));
    let union = Words::parse(&list).map_err(|error| Failure::usage(error.to_string()))?;
    let mut given = Vec::new();
    for word in &union.rest {
        libfuse_args::parse_words(&Words::join([word.as_os_str()]), unknown, &mut given)?;
    }
    Ok(UnionWords { union, given })
}

/// Returns whether the texts after `-o` name the branches of a union.
pub fn names_branches(texts: &[OsString]) -> bool {
    let names = |word: &[u8]| {
        [&b"br:"[..], b"br=", b"dirs=", b"branches=", b"lowerdir="].iter().any(|name| word.starts_with(name))
    };
    texts.iter().any(|text| text.as_bytes().split(|byte| *byte == b',').any(names))
}

/// Builds the plan of a union. `options` are the options that are no words after `-o`; the
/// positionals are the branches, unless words name them, and the mount point.
///
/// # Errors
/// Too few or too many paths, branches that are not understood, or options that cannot go together.
pub fn union(
    program: &str,
    mut options: Vec<Given>,
    words: UnionWords,
    positionals: Vec<OsString>,
) -> Result<Plan, Failure> {
    let UnionWords { union: words, given } = words;
    options.extend(given);
    if let Some(other) = options.iter().find(|given| !given.option.row().is_for(Taker::Union)) {
        return Err(Failure::usage(format!("option {} is not for unions", other.option.row().written())).next(
            "`nacre union --help` lists the options; a stack such as 'union:/a=rw:/b | remap:force-user=alice' combines them (`nacre mount`)",
        ));
    }
    let settings = Settings::fold(&options)?;
    if settings.engine != Engine::Fuse {
        return Err(Failure::usage("a union is always served through FUSE: --engine is for `nacre mirror`"));
    }
    let (branches, mountpoint) = paths(&words, positionals)?;
    if settings.remount {
        return Ok(plan::remount(mountpoint, settings));
    }
    let branches = match branches {
        Some(text) => BranchSpec::parse_list(text.as_bytes(), true, words.pool)
            .map_err(|error| Failure::usage(format!("branches: {error}")))?,
        None => words.branches.iter().map(|(path, mode)| BranchSpec::directory(path, mode.clone())).collect(),
    };
    let mut mount = mount(program, settings, &words, branches, mountpoint)?;
    mount.prefix = nacre_daemon::plan::UNION_PREFIX;
    Ok(Plan::Mount(Box::new(mount)))
}

fn mount(
    program: &str,
    settings: Settings,
    words: &Words,
    branches: Vec<BranchSpec>,
    mountpoint: PathBuf,
) -> Result<MountPlan, Failure> {
    let own = words.own.iter().map(|word| {
        let text = word.to_str().map(str::to_owned);
        text.ok_or_else(|| Failure::usage(format!("the word {} is not UTF-8", word.as_bytes().escape_ascii())))
    });
    let option = own.collect::<Result<Vec<_>, _>>()?;
    let coherence = match words.udba {
        Some(Udba::None) => HostCoherence::Exclusive,
        Some(Udba::Reval) => HostCoherence::Revalidate,
        Some(Udba::Notify) => HostCoherence::Watch,
        None => settings.host.coherence,
    };
    let read_only = branches.iter().all(|branch| !branch.mode.creates());
    let spec = UnionSpec {
        branch: nacre_stack::spec::Branches(branches),
        option,
        coherence,
        noatime: settings.door.atime == Some(Atime::No),
        base_log: None,
        frozen: Vec::new(),
    };
    let mut layers = vec![LayerSpec::Union(Box::new(spec))];
    // The only rule that is supported here is umask=.
    if settings.remap != RemapSpec::default() {
        layers.push(LayerSpec::Remap(Box::new(settings.remap.clone())));
    }
    if settings.debug {
        layers.push(LayerSpec::Trace(TraceSpec { level: TraceLevel::All }));
    }
    let spec = StackSpec { layers };
    spec.check().map_err(|error| Failure::usage(error.to_string()))?;
    let mut mount = plan::mount(program, StackSource::Spec(spec), mountpoint, settings);
    mount.door.xattr = words.xattr.unwrap_or(mount.door.xattr);
    mount.door.acl = words.acl.unwrap_or(mount.door.acl) && mount.door.xattr;
    mount.warnings.extend(words.notices.iter().cloned());
    if read_only
        && words
            .own
            .iter()
            .any(|word| word.as_bytes().starts_with(b"create") || word.as_bytes().starts_with(b"category.create"))
    {
        mount.warnings.push("nothing can be created in this union: no branch is rw".to_owned());
    }
    Ok(mount)
}

/// Returns the branches, unless words name them, and the mount point. Where words name the
/// branches, the first column of fstab may hold anything, as with aufs.
fn paths(words: &Words, mut positionals: Vec<OsString>) -> Result<(Option<OsString>, PathBuf), Failure> {
    let named = !words.branches.is_empty();
    // mergerfs also accepts branches as separate arguments: the last path is the mount point.
    if words.pool && !named && positionals.len() > 2 {
        let mountpoint = positionals.split_off(positionals.len() - 1);
        positionals = std::iter::once(positionals.join(OsStr::new(":"))).chain(mountpoint).collect();
    }
    let mut rest = positionals.into_iter().filter(|path| !path.is_empty());
    match (rest.next(), rest.next(), rest.next()) {
        (_, _, Some(extra)) => Err(Failure::usage(format!("too many arguments: \"{}\"", extra.to_string_lossy()))
            .next("BRANCHES and MOUNTPOINT are needed; branches are divided by colons")),
        (Some(first), Some(_), None) if named && first.as_bytes().contains(&b'/') => {
            Err(Failure::usage("branches are named twice, before the mount point and after -o").next("keep one"))
        }
        (Some(_), Some(mountpoint), None) | (Some(mountpoint), None, None) if named => Ok((None, mountpoint.into())),
        (Some(branches), Some(mountpoint), None) => Ok((Some(branches), mountpoint.into())),
        _ => Err(Failure::usage("BRANCHES and MOUNTPOINT are needed")
            .next("as in `nacre union /upper=rw:/lower=ro /mnt`; --help shows more")),
    }
}
