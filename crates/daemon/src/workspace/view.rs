//! The view of a workspace as a mount: its layers, and how it is mounted and unmounted.
//!
//! All views of a user are served by one process, except those that survive their process and those whose directories
//! meet the ones of another view (a workspace over the view of another one).

use super::store::{Store, Workspace};
use crate::{
    background::{self, Started},
    clock,
    failure::{Exit, Failure},
    fuse_conf,
    hooks::WORKSPACE_PREFIX,
    mount_users, mountinfo,
    mountinfo::MountEntry,
    opening,
    plan::{Door, Engine, MountPlan, StackSource, UNION_PREFIX},
    report::path_text,
    shared, unmount,
};
use nacre_stack::spec::{
    BranchSource, BranchSpec, Branches, CageSpec, HostCoherence, HostSpec, LayerSpec, LimitError, RemapSpec, StackSpec,
    UnionSpec,
};
use nacre_union::BranchMode;
use rustix::process::geteuid;
use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// Name of the process that serves the views of a user.
const PROCESS: &str = "workspaces";
/// Deadline for the process of a view to release its directories after an unmount.
const RELEASED: Duration = Duration::from_secs(20);
/// Interval of polling for that.
const LOOK: Duration = Duration::from_millis(5);

/// The first column of the mount table.
pub fn source(workspace: &Workspace) -> String {
    format!("{WORKSPACE_PREFIX}{}", workspace.name)
}

/// The layers of a view.
pub fn stack(workspace: &Workspace, store: &Store) -> StackSpec {
    let settings = &workspace.settings;
    let changes = workspace.changes();
    let mut upper = vec![LayerSpec::Host(HostSpec {
        source: changes.join("upper"),
        work: Some(changes.join("work")),
        coherence: HostCoherence::Exclusive,
        ..HostSpec::default()
    })];
    if settings.size.is_some() || settings.files.is_some() {
        upper.push(LayerSpec::Cage(Box::new(CageSpec {
            size: settings.size.clone(),
            inodes: settings.files,
            // A full disk is ENOSPC: what has to be done differs.
            error: LimitError::Quota,
            state: Some(workspace.directory.join("accounts")),
            ..CageSpec::default()
        })));
    }
    let branch = |layers, mode| BranchSpec { source: BranchSource::Stack(StackSpec { layers }), mode };
    let mut branches = vec![branch(upper, BranchMode::rw())];
    let own = [store.directory().to_owned(), workspace.mountpoint()];
    for base in settings.directories() {
        let hidden = own.iter().filter(|path| path.starts_with(base) && **path != base);
        let host = HostSpec { source: base.to_owned(), without: hidden.cloned().collect(), ..HostSpec::default() };
        branches.push(branch(vec![LayerSpec::Host(host)], BranchMode::ro()));
    }
    let union = UnionSpec {
        branch: Branches(branches),
        base_log: Some(changes.join("base.log")),
        frozen: settings.read_only.iter().map(|path| path.0.clone()).collect(),
        ..UnionSpec::default()
    };
    let mut layers = vec![LayerSpec::Union(Box::new(union))];
    if !settings.hide.is_empty() {
        layers.push(LayerSpec::Remap(Box::new(RemapSpec { hide: settings.hide.clone(), ..RemapSpec::default() })));
    }
    StackSpec { layers }
}

/// Whether none of the bases, and nothing mounted below them, is mounted with an option that a view must not lift. Of the
/// mounts below, those of the kernel's own file systems do not count, and `noexec` does not.
fn allows(table: &[MountEntry], bases: &[&Path], option: &str) -> bool {
    let forbids = |entry: &MountEntry| entry.options.iter().any(|word| word == option);
    bases.iter().all(|base| {
        let above = table.iter().filter(|entry| base.starts_with(&entry.mountpoint));
        let own = above.max_by_key(|entry| entry.mountpoint.components().count());
        let below = table.iter().filter(|entry| entry.mountpoint.starts_with(base) && entry.mountpoint != *base);
        let mut brought = below.filter(|entry| option != "noexec" && mountinfo::kernel_kind(&entry.kind).is_none());
        own.is_some_and(|own| !forbids(own)) && !brought.any(forbids)
    })
}

/// The plan of a view's mount.
fn plan(workspace: &Workspace, store: &Store, table: &[MountEntry]) -> MountPlan {
    // What root's programs find in the base (set-user-id programs, devices) works in the view as well if it works in the
    // base: both can be reached by the same users.
    let is_root = geteuid().is_root();
    let bases = workspace.settings.directories();
    MountPlan {
        program: "nacre".to_owned(),
        stack: StackSource::Spec(stack(workspace, store)),
        mountpoint: workspace.mountpoint(),
        prefix: UNION_PREFIX,
        door: Door {
            allow_other: is_root && fuse_conf::can_show_others(),
            suid: is_root && allows(table, &bases, "nosuid"),
            dev: is_root && allows(table, &bases, "nodev"),
            exec: allows(table, &bases, "noexec"),
            fsname: Some(source(workspace)),
            survive: workspace.settings.survive,
            ..Door::default()
        },
        engine: Engine::Fuse,
        foreground: false,
        explain: false,
        verbosity: None,
        log_target: None,
        daemon: Some(PROCESS.to_owned()),
        nonempty: true,
        warnings: Vec::new(),
    }
}

/// Mounts the view of a workspace.
///
/// # Errors
/// The reason why it cannot be mounted.
pub fn mount(workspace: &Workspace, store: &Store) -> Result<(), Failure> {
    // What is written to a view now would be removed with what the commit has taken from it.
    workspace.check_no_commit()?;
    let plan = plan(workspace, store, &mountinfo::read()?);
    let reason = "a workspace";
    if workspace.settings.survive {
        return served(mount_alone(&plan, reason)?);
    }
    served(shared::client::mount_or(&plan, PROCESS, reason, &|_| mount_alone(&plan, reason))?)
}

/// The failure of a process that has printed the reason already.
fn served(code: ExitCode) -> Result<(), Failure> {
    if code == ExitCode::SUCCESS { Ok(()) } else { Err(Failure::new("the workspace's view is not mounted")) }
}

/// Has a process of its own serve a view.
fn mount_alone(plan: &MountPlan, reason: &str) -> Result<ExitCode, Failure> {
    let StackSource::Spec(spec) = &plan.stack else { return Err(Failure::new("a view has no file of layers")) };
    let mut arguments = vec![OsString::from("mount"), OsString::from(spec.to_line()), plan.mountpoint.clone().into()];
    let mut words = vec![format!("fsname={}", plan.door.fsname.clone().unwrap_or_default())];
    let given = [(plan.door.suid, "suid"), (plan.door.dev, "dev"), (!plan.door.exec, "noexec")];
    words.extend(given.iter().filter(|(is_given, _)| *is_given).map(|(_, word)| (*word).to_owned()));
    arguments.extend([OsString::from("-o"), OsString::from(words.join(","))]);
    if !plan.door.allow_other {
        arguments.push(OsString::from("--no-allow-other"));
    }
    if plan.door.survive {
        arguments.push(OsString::from("--survive"));
    }
    match background::spawn_for(OsStr::new("nacre"), arguments, reason)? {
        Started::Ready => Ok(ExitCode::SUCCESS),
        Started::Failed(code) => Ok(ExitCode::from(code)),
    }
}

/// State of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewState {
    /// Mounted.
    Mounted,
    /// Not mounted.
    Unmounted,
    /// Mounted, but the process that served it is gone.
    Dead,
}

impl ViewState {
    /// The word for users.
    pub fn word(self) -> &'static str {
        match self {
            ViewState::Mounted => "mounted",
            ViewState::Unmounted => "unmounted",
            ViewState::Dead => "dead",
        }
    }
}

/// The entry of a view in a mount table, if it is mounted.
pub fn entry<'a>(workspace: &Workspace, table: &'a [MountEntry]) -> Option<&'a MountEntry> {
    let mountpoint = workspace.mountpoint();
    let source = PathBuf::from(source(workspace));
    table.iter().rfind(|entry| entry.mountpoint == mountpoint && entry.source == source)
}

/// The state of a view by a mount table.
pub fn state(workspace: &Workspace, table: &[MountEntry]) -> ViewState {
    if entry(workspace, table).is_none() {
        return ViewState::Unmounted;
    }
    match rustix::fs::statfs(workspace.mountpoint()) {
        Err(rustix::io::Errno::NOTCONN | rustix::io::Errno::CONNABORTED) => ViewState::Dead,
        _ => ViewState::Mounted,
    }
}

/// Counts the processes inside of mounted views, by the device number of their mounts; `None` where they cannot be
/// counted in time.
pub fn processes(mounted: &[&MountEntry]) -> Option<HashMap<(u32, u32), usize>> {
    mount_users::count(mounted.iter().map(|entry| entry.device).collect())
}

/// Mounts the view of a workspace if it is not mounted, or dead.
///
/// # Errors
/// As [`mount`].
pub fn make_sure(workspace: &Workspace, store: &Store) -> Result<(), Failure> {
    workspace.check_no_commit()?;
    match state(workspace, &mountinfo::read()?) {
        ViewState::Mounted => Ok(()),
        ViewState::Unmounted | ViewState::Dead => mount(workspace, store),
    }
}

/// Unmounts the view of a workspace, and waits until its process has released its directories. Returns whether it was
/// mounted.
///
/// # Errors
/// Processes use it.
fn unmount(workspace: &Workspace) -> Result<bool, Failure> {
    let Some(identity) = entry(workspace, &mountinfo::read()?).map(MountEntry::identity) else { return Ok(false) };
    let text = path_text(&workspace.mountpoint());
    fusewire::unmount(identity, false).map_err(|error| unmount::refused(&text, &error))?;
    Ok(true)
}

/// As [`unmount`], for callers that use the workspace's directories afterwards: also waits until no process holds
/// them.
///
/// # Errors
/// As [`unmount`]; the view is still held by another mount namespace.
pub fn unmount_whole(workspace: &Workspace) -> Result<bool, Failure> {
    let was_mounted = unmount(workspace)?;
    let work = workspace.changes().join("work/work");
    let free = || !is_locked(&work);
    let mut is_free = free();
    if !is_free {
        // The end of a process's use is not notified.
        clock::look_until(RELEASED, LOOK, || {
            is_free = free();
            is_free
        });
    }
    if is_free {
        return Ok(was_mounted);
    }
    Err(Failure::new(format!("the view of {} is still used in another mount namespace", workspace.name))
        .exit(Exit::Busy)
        .next("end the commands that run in it"))
}

/// Whether a union has locked its work directory: it writes to the upper directory.
fn is_locked(work: &Path) -> bool {
    use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(directory) = open(work, flags, Mode::empty()) else { return false };
    flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
}

/// Prepares the mount point that a user names: made if it is missing.
///
/// # Errors
/// It cannot be made or resolved.
pub fn prepare_mountpoint(named: &Path) -> Result<PathBuf, Failure> {
    if let Err(error) = fs::create_dir(named)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(Failure::io("cannot make the mount point", path_text(named), &error));
    }
    opening::target(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_lifts_no_option_of_its_bases_mounts() {
        let table = mountinfo::parse(
            b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /proc rw,nosuid,nodev,noexec - proc proc rw\n\
              3 1 8:2 / /mnt/stick rw,nosuid,nodev,noexec - vfat /dev/b rw\n4 1 8:3 / /srv rw,noexec - ext4 /dev/c rw\n",
        );
        let allowed =
            |base: &str| ["nosuid", "nodev", "noexec"].map(|option| allows(&table, &[Path::new(base)], option));
        assert_eq!(allowed("/etc"), [true; 3]);
        assert_eq!(allowed("/mnt/stick/d"), [false; 3]);
        assert_eq!(allowed("/mnt/sticky"), [true; 3]);
        assert_eq!(allowed("/proc"), [false; 3]);
        assert_eq!(allowed("/srv/d"), [true, true, false]);
        assert_eq!(allowed("/"), [false, false, true]);
        assert!(!allows(&table, &[Path::new("/etc"), Path::new("/mnt/stick")], "nosuid"));
    }
}
