//! Mounts that the kernel serves alone: a bind mount, optionally read-only or with mapped ids.
//!
//! [`reduce`] decides (pure function): either the whole plan is one bind mount, or it returns the reason why not.
//! [`mount`] makes it, [`records`] lists it for `nacre status`, because no process of ours stays behind.
//!
//! An id map of the kernel is one-to-one, and an id outside of it is shown as the overflow id (65534). A plan whose
//! map covers all ids behaves exactly the same either way; otherwise the difference is reported, and
//! `--engine=auto` chooses FUSE.

use crate::{
    failure::{Exit, Failure},
    mountinfo::{self, MountEntry},
    plan::{Atime, Door, MountPlan, StackSource},
    report::{LayerReport, PassthroughReport, Report, path_text},
    runtime,
};
use nacre_layers::{
    accounts::{Accounts, group_id, user_id},
    remap::id_map::{MapRule, parse_rule},
};
use nacre_stack::spec::{CreateAs, HostSpec, LayerSpec, RemapSpec, Symlinks};
use nacre_sys::clocks::{self, Clock};
use nacre_sys::mounts::{self, IdRange, MountAttributes};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    ops::RangeInclusive,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

/// Maximum number of ranges in one map (user_namespaces(7)).
const RANGES_MAX: usize = 340;
/// The greatest id; the one above means "no change".
const ID_MAX: u32 = u32::MAX - 1;

/// Parameters of a bind mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelMount {
    /// The directory to show.
    pub source: PathBuf,
    /// Attributes of the mount.
    pub attributes: MountAttributes,
    /// Map of users; empty: not mapped.
    pub users: Vec<IdRange>,
    /// Map of groups; empty: not mapped.
    pub groups: Vec<IdRange>,
    /// Differences to the same plan served through FUSE.
    pub differences: Vec<String>,
}

/// Returns the bind mount that a plan is equal to.
///
/// # Errors
/// The reason why not, as the end of a sentence.
pub fn reduce(plan: &MountPlan, accounts: &dyn Accounts) -> Result<KernelMount, String> {
    let StackSource::Spec(spec) = &plan.stack else {
        return Err("the stack comes from a file".to_owned());
    };
    let (host, remap) = match spec.layers.as_slice() {
        [LayerSpec::Host(host)] => (host, RemapSpec::default()),
        [LayerSpec::Host(host), LayerSpec::Remap(remap)] => (host, (**remap).clone()),
        [_, .., other] => return Err(format!("the layer {} works only through FUSE", other.name())),
        _ => return Err("there is no directory below".to_owned()),
    };
    refuse_host(host)?;
    refuse_door(&plan.door)?;
    let mut differences = Vec::new();
    let (users, groups) = maps(&remap, accounts, &mut differences)?;
    refuse_remap(remap)?;
    Ok(KernelMount { source: host.source.clone(), attributes: attributes(&plan.door), users, groups, differences })
}

fn refuse_host(host: &HostSpec) -> Result<(), String> {
    match (host.symlinks, host.forward_odirect) {
        (Symlinks::Resolve, _) => Err("--resolve-symlinks works only through FUSE".to_owned()),
        (_, Some(_)) => Err("--forward-odirect works only through FUSE".to_owned()),
        // Coherence, ioctls and locks: a bind mount is the source itself.
        _ => Ok(()),
    }
}

fn refuse_door(door: &Door) -> Result<(), String> {
    let refused = [
        (!door.allow_other, "--no-allow-other"),
        (door.direct_io, "--direct-io"),
        (door.immutable, "--immutable"),
        (door.no_open, "--no-open"),
        (!door.xattr, "--xattr-none"),
        (!door.acl, "--acl=off"),
        (door.sync || door.dirsync, "-o sync"),
        (door.atime == Some(Atime::Strict), "-o strictatime"),
        (door.fsname.is_some(), "-o fsname"),
        (door.subtype.is_some(), "-o subtype"),
        (!door.kernel_words.is_empty(), "-o context"),
    ];
    match refused.iter().find(|(asked, _)| *asked) {
        Some((_, option)) => Err(format!("{option} works only through FUSE")),
        None => Ok(()),
    }
}

/// Refuses all rules except maps and offsets.
fn refuse_remap(remap: RemapSpec) -> Result<(), String> {
    let rest = RemapSpec { map: None, uid_offset: None, gid_offset: None, ..remap };
    let rest = match rest.create_as {
        // On a bind mount new files belong to the process that makes them.
        CreateAs::Auto | CreateAs::User => RemapSpec { create_as: CreateAs::Auto, ..rest },
        CreateAs::Mounter => rest,
    };
    match LayerSpec::Remap(Box::new(rest)).settings().first() {
        Some((key, _)) => Err(format!("the rule {key} works only through FUSE")),
        None => Ok(()),
    }
}

fn attributes(door: &Door) -> MountAttributes {
    let chosen = [
        (door.read_only, MountAttributes::READ_ONLY),
        (!door.suid, MountAttributes::NO_SUID),
        (!door.dev, MountAttributes::NO_DEVICES),
        (!door.exec, MountAttributes::NO_EXEC),
        (!door.symfollow, MountAttributes::NO_SYMLINK_FOLLOW),
        (door.atime == Some(Atime::No), MountAttributes::NO_ATIME),
        (door.nodiratime, MountAttributes::NO_DIRECTORY_ATIME),
    ];
    let chosen = chosen.iter().filter(|(asked, _)| *asked);
    chosen.fold(MountAttributes::empty(), |all, (_, attribute)| all.with(*attribute))
}

type Maps = (Vec<IdRange>, Vec<IdRange>);

fn maps(remap: &RemapSpec, accounts: &dyn Accounts, differences: &mut Vec<String>) -> Result<Maps, String> {
    let (mut users, mut groups) = (Vec::new(), Vec::new());
    for rule in remap.map.as_deref().unwrap_or_default().split([',', ':']).filter(|rule| !rule.is_empty()) {
        let (text, of_groups) = match rule.strip_prefix('@') {
            Some(_) => (rule.replace('@', ""), true),
            None => (rule.to_owned(), false),
        };
        let resolve = |name: &str| if of_groups { group_id(accounts, name) } else { user_id(accounts, name) };
        parse_rule(&text, &resolve, if of_groups { &mut groups } else { &mut users })
            .map_err(|error| error.to_string())?;
    }
    let users = ranges("users", &users, remap.uid_offset, differences)?;
    let groups = ranges("groups", &groups, remap.gid_offset, differences)?;
    // If only users or only groups are mapped, the other map is the identity.
    let whole = || vec![IdRange { inside: 0, outside: 0, count: u32::MAX }];
    Ok(match (users.is_empty(), groups.is_empty()) {
        (false, true) => (users, whole()),
        (true, false) => (whole(), groups),
        _ => (users, groups),
    })
}

fn ranges(
    kind: &str,
    rules: &[MapRule],
    offset: Option<i64>,
    differences: &mut Vec<String>,
) -> Result<Vec<IdRange>, String> {
    match (rules, offset.filter(|offset| *offset != 0)) {
        ([], None) => Ok(Vec::new()),
        ([], Some(offset)) => Ok(shifted(offset)),
        (rules, None) => complete(kind, rules, differences),
        (_, Some(_)) => Err("a map and an offset together work only through FUSE".to_owned()),
    }
}

/// Returns the map that shifts every id by `offset`; ids that would leave the range are not mapped.
fn shifted(offset: i64) -> Vec<IdRange> {
    let distance = u32::try_from(offset.unsigned_abs()).unwrap_or(u32::MAX);
    let count = u32::MAX - distance;
    match (count, offset > 0) {
        (0, _) => Vec::new(),
        (count, true) => vec![IdRange { inside: 0, outside: distance, count }],
        (count, false) => vec![IdRange { inside: distance, outside: 0, count }],
    }
}

/// Returns the rules as ranges, and the identity for every id that no rule names.
fn complete(kind: &str, rules: &[MapRule], differences: &mut Vec<String>) -> Result<Vec<IdRange>, String> {
    let mut ranges = Vec::new();
    for rule in rules {
        match rule {
            MapRule::One(stored, shown) => ranges.push(IdRange { inside: *stored, outside: *shown, count: 1 }),
            MapRule::Shifted(ids, shown) => {
                ranges.push(IdRange { inside: *ids.start(), outside: *shown, count: ids.end() - ids.start() + 1 });
            }
            MapRule::Many(..) | MapRule::Rest(_) => {
                return Err("a map of many ids to one works only through FUSE".to_owned());
            }
        }
    }
    let stored: Vec<RangeInclusive<u32>> =
        ranges.iter().map(|range| range.inside..=range.inside + (range.count - 1)).collect();
    let shown: Vec<RangeInclusive<u32>> =
        ranges.iter().map(|range| range.outside..=range.outside + (range.count - 1)).collect();
    let lost = without(&shown, &stored);
    if !lost.is_empty() {
        let list: Vec<String> = lost.iter().map(span).collect();
        differences.push(format!(
            "{kind} {} of the source appear as 65534, because others are shown by these numbers",
            list.join(", ")
        ));
    }
    let named: Vec<RangeInclusive<u32>> = stored.into_iter().chain(shown).collect();
    for ids in without(&[0..=ID_MAX], &named) {
        ranges.push(IdRange { inside: *ids.start(), outside: *ids.start(), count: ids.end() - ids.start() + 1 });
    }
    ranges.sort_by_key(|range| range.inside);
    if ranges.len() > RANGES_MAX {
        return Err(format!("the kernel takes {RANGES_MAX} ranges of ids, and this map has {}", ranges.len()));
    }
    Ok(ranges)
}

fn span(ids: &RangeInclusive<u32>) -> String {
    if ids.start() == ids.end() { ids.start().to_string() } else { format!("{}-{}", ids.start(), ids.end()) }
}

/// Returns the ids in `all` and in none of `taken`, as ranges in ascending order.
fn without(all: &[RangeInclusive<u32>], taken: &[RangeInclusive<u32>]) -> Vec<RangeInclusive<u32>> {
    let mut taken = taken.to_vec();
    taken.sort_by_key(|ids| *ids.start());
    let mut left = Vec::new();
    for ids in all {
        let (mut next, end) = (u64::from(*ids.start()), u64::from(*ids.end()));
        for hole in &taken {
            let (from, to) = (u64::from(*hole.start()), u64::from(*hole.end()));
            if from > next && next <= end {
                left.push(narrow(next, (from - 1).min(end)));
            }
            next = next.max(to + 1);
        }
        if next <= end {
            left.push(narrow(next, end));
        }
    }
    left.sort_by_key(|ids| *ids.start());
    left
}

/// Makes a range of ids from numbers that are within the range of ids at all callers.
fn narrow(first: u64, last: u64) -> RangeInclusive<u32> {
    u32::try_from(first).unwrap_or(ID_MAX)..=u32::try_from(last).unwrap_or(ID_MAX)
}

/// Makes the mount.
///
/// # Errors
/// The kernel's error, with advice what to do instead.
pub fn mount(mount: &KernelMount, mountpoint: &Path) -> Result<(), Failure> {
    let failed = |doing: &str| {
        let what = format!("cannot {doing} {}", path_text(&mount.source));
        move |error: io::Error| {
            let exit = if error.kind() == io::ErrorKind::PermissionDenied { Exit::Denied } else { Exit::Failure };
            Failure::new(format!("{what}: {}", crate::failure::reason(&error))).exit(exit).next(advice(&error))
        }
    };
    let namespace = match mount.users.is_empty() && mount.groups.is_empty() {
        true => None,
        false => Some(mounts::user_namespace(&mount.users, &mount.groups).map_err(failed("make the id map for"))?),
    };
    let clone = mounts::clone_tree(&mount.source, false).map_err(failed("clone the mount of"))?;
    let map = namespace.as_ref().map(AsFd::as_fd);
    let cleared = MountAttributes::empty();
    let set = mounts::set_attributes(clone.as_fd(), mount.attributes, cleared, map, false);
    set.map_err(failed("set the attributes of a mount of"))?;
    mounts::attach(clone.as_fd(), mountpoint)
        .map_err(failed(&format!("attach, at {}, a mount of", path_text(mountpoint))))?;
    // Otherwise later mounts below either directory would be propagated to the other one, without these attributes.
    mounts::make_private(clone.as_fd()).map_err(failed("make private the mount of"))
}

/// Returns a message if there are mounts below `source`, which a bind mount does not show.
pub fn hidden(source: &Path, table: &[MountEntry]) -> Option<String> {
    let below = table.iter().find(|entry| entry.mountpoint.starts_with(source) && entry.mountpoint != source)?;
    Some(format!("what is mounted below the source, such as {}, is not shown", path_text(&below.mountpoint)))
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(1) => "only root mounts with --engine=kernel; --engine=fuse works for everybody",
        Some(22) => "this file system cannot map owners in the kernel; --engine=fuse can",
        _ => "",
    }
}

/// Record of a mount that no process of ours serves.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Mount id.
    mount: u64,
    /// Mount namespace of the mount.
    namespace: String,
    /// Time of the mount, in seconds since the system started.
    made: u64,
    report: Report,
}

/// Records a mount that was just made.
///
/// # Errors
/// The mount is not in the table, or the record cannot be written.
pub fn remember(mountpoint: &Path, reason: String, stack: String, mount: &KernelMount) -> Result<(), Failure> {
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    let entry = entry.ok_or_else(|| Failure::new(format!("the mount at {} is gone already", path_text(mountpoint))))?;
    let settings = mount.differences.iter().map(|difference| ("difference".to_owned(), difference.clone())).collect();
    let report = Report {
        mountpoint: path_text(mountpoint),
        source: path_text(&std::path::absolute(&mount.source).unwrap_or_else(|_| mount.source.clone())),
        uid: rustix::process::geteuid().as_raw(),
        engine: "kernel".to_owned(),
        engine_reason: reason,
        stack,
        layers: Some(LayerReport { layer: "bind".to_owned(), settings, below: Vec::new() }),
        transport: "none".to_owned(),
        passthrough: PassthroughReport { on: true, why_not: None },
        coherence: "the source itself".to_owned(),
        ..Report::default()
    };
    let record = Record { mount: entry.id, namespace: namespace(), made: uptime(), report };
    let path = runtime::own()?.join(format!("{}.kernel", entry.id));
    let text = serde_json::to_vec(&record).map_err(io::Error::from);
    let written = text.and_then(|text| fs::write(&path, text));
    written.map_err(|error| Failure::io("cannot write", path.display(), &error))
}

/// Returns the recorded mounts that still exist; removes other records.
///
/// # Errors
/// The mount table cannot be read.
pub fn records() -> Result<Vec<Report>, Failure> {
    let table = mountinfo::read()?;
    let directory = runtime::ours();
    let mut reports = Vec::new();
    for path in
        runtime::children(&directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == "kernel"))
    {
        let Some(mut record) = fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Record>(&text).ok())
        else {
            continue;
        };
        let there = table
            .iter()
            .any(|entry| entry.id == record.mount && path_text(&entry.mountpoint) == record.report.mountpoint);
        if there {
            record.report.uptime = uptime().saturating_sub(record.made);
            reports.push(record.report);
        } else if record.namespace == namespace() {
            // It was unmounted by other means. A record that cannot be removed is ignored again next time.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(reports)
}

fn namespace() -> String {
    fs::read_link("/proc/self/ns/mnt").map(|link| path_text(&link)).unwrap_or_default()
}

fn uptime() -> u64 {
    clocks::now(Clock::Boottime).as_secs()
}
