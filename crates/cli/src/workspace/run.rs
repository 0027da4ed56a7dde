//! Carries out the verbs of workspaces.

use super::{
    changes,
    command::{CreateOrder, RunOrder, WorkspaceVerb},
    list,
    of_pool::{self, Dataset},
};
use crate::{clock, output};
use nacre_daemon::{
    failure::{Exit, Failure},
    opening,
    report::path_text,
    workspace::{
        inside,
        settings::{StoredPath, WorkspaceSettings},
        snapshots,
        store::{LockMode, Store, Workspace, check_name},
        view,
    },
};
use nacre_layers::size::Size;
use nacre_sys::signals::{self, Signals};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    ffi::OsString,
    fs,
    io::{self, IsTerminal, Write},
    os::fd::AsRawFd,
    os::unix::{
        ffi::OsStrExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
};

/// Environment variable with the path of the file that gets a byte before the command of a `run --discard` starts.
const STARTS: &str = "NACRE_WORKSPACE_STARTS";

/// Carries out a verb; returns its exit code.
///
/// # Errors
/// No such workspace, or the error of the verb.
pub fn run(verb: WorkspaceVerb) -> Result<ExitCode, Failure> {
    let store = Store::find()?;
    match verb {
        WorkspaceVerb::Create(order) => create(&store, &order)?,
        WorkspaceVerb::Mount { name } => {
            let (workspace, _lock) = store.open_locked(&name, LockMode::Shared)?;
            workspace.check_no_commit()?;
            view::make_sure(&workspace, &store)?;
            output::print(&format!("{}\n", path_text(&workspace.mountpoint())))?;
        }
        WorkspaceVerb::List { view } => {
            output::print(&list::text(&store, &view, clock::seconds(), io::stdout().is_terminal())?)?;
        }
        WorkspaceVerb::Diff(order) => return changes::diff(&store, &order),
        WorkspaceVerb::Commit(order) => return changes::commit(&store, &order),
        WorkspaceVerb::Export { name, file } => changes::export(&store, &name, file.as_deref())?,
        WorkspaceVerb::Import { name, file } => changes::import(&store, &name, file.as_deref())?,
        WorkspaceVerb::Run(order) => return run_command(&store, &order),
        WorkspaceVerb::Discard { names } => {
            for name in &names {
                discard(&store, name)?;
            }
        }
        WorkspaceVerb::Rename { name, to } => {
            check_name(&to)?;
            let (workspace, _lock) = store.open_locked(&name, LockMode::Exclusive)?;
            let was_mounted = view::unmount_whole(&workspace)?;
            match store.rename(workspace.clone(), &to) {
                Ok(renamed) => mount_again(&renamed, &store, was_mounted)?,
                Err(failure) => {
                    mount_again(&workspace, &store, was_mounted)?;
                    return Err(failure);
                }
            }
        }
        WorkspaceVerb::Snapshot { snapshot } => {
            let (name, snapshot) = snapshots::names(&snapshot)?;
            with_changes(&store, name, &mut |workspace| snapshots::create(workspace, snapshot, &copy_tree))?;
        }
        WorkspaceVerb::Rollback { snapshot } => {
            let (name, snapshot) = snapshots::names(&snapshot)?;
            with_changes(&store, name, &mut |workspace| snapshots::rollback(workspace, snapshot, &copy_tree))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Does something with the changes of a workspace while nothing can change them: its view is not mounted meanwhile.
///
/// # Errors
/// Processes are inside, or the error of `act`.
pub(super) fn with_changes(
    store: &Store,
    name: &str,
    act: &mut dyn FnMut(&Workspace) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (workspace, _lock) = store.open_locked(name, LockMode::Exclusive)?;
    workspace.check_no_commit()?;
    let was_mounted = view::unmount_whole(&workspace)?;
    let done = act(&workspace);
    mount_again(&workspace, store, was_mounted)?;
    done
}

pub(super) fn mount_again(workspace: &Workspace, store: &Store, was_mounted: bool) -> Result<(), Failure> {
    // With half a commit in the base, the view stays away: what is written to it would be lost.
    if was_mounted && !workspace.journal().exists() { view::mount(workspace, store) } else { Ok(()) }
}

fn create(store: &Store, order: &CreateOrder) -> Result<(), Failure> {
    check_name(&order.name)?;
    let (mut base, mut over) = (Vec::new(), None);
    let dataset = match order.from.as_slice() {
        [only] => dataset(store, only)?,
        _ => None,
    };
    let of_pool = dataset.map(|dataset| dataset.settings(&order.name, clock::seconds())).transpose()?;
    for from in order.from.iter().filter(|_| of_pool.is_none()) {
        let (directory, shown_over) = find_base(store, from)?;
        over.get_or_insert(shown_over);
        base.push(directory);
    }
    let made = match of_pool {
        Some(settings) => Ok(settings),
        None => over
            .ok_or_else(|| Failure::usage("a workspace needs a directory: --from"))
            .map(|over| WorkspaceSettings::new(base, over, clock::seconds())),
    };
    let settings = made?;
    let created = create_with(store, order, settings.clone());
    if created.is_err() {
        of_pool::release(&settings)?;
    }
    created
}

/// The file system of a pool that a word of `--from` names, unless it names a workspace.
fn dataset(store: &Store, from: &OsString) -> Result<Option<Dataset>, Failure> {
    let Some(word) = from.to_str() else { return Ok(None) };
    if check_name(word).is_ok() && store.open(word).is_ok() {
        return Ok(None);
    }
    let found = of_pool::find(word)?;
    if found.is_some() && Path::new(from).is_dir() {
        return Err(Failure::usage(format!("{word} is a file system of a pool and a directory"))
            .next(format!("write ./{word} for the directory")));
    }
    Ok(found)
}

fn create_with(store: &Store, order: &CreateOrder, mut settings: WorkspaceSettings) -> Result<(), Failure> {
    settings.size = order.size.clone();
    settings.files = order.files;
    settings.hide.clone_from(&order.hide);
    settings.read_only_below = order.read_only_below;
    settings.survive = order.survive;
    if let Some(size) = &order.size {
        size.parse::<Size>().and_then(Size::limit).map_err(|error| Failure::usage(format!("size: {error}")))?;
    }
    for path in &order.read_only {
        settings.read_only.push(StoredPath(within(&settings, path)?));
    }
    if let Some(at) = &order.at {
        settings.at = Some(StoredPath(view::prepare_mountpoint(at)?));
    }
    let (workspace, _lock) = store.create(&order.name, settings)?;
    if let Err(failure) = view::mount(&workspace, store) {
        store.remove(&workspace)?;
        return Err(failure);
    }
    output::print(&format!("{}\n", path_text(&workspace.mountpoint())))
}

/// Finds what a word of `--from` names: the directory of the base, and the directory over which the workspace lies for
/// commands.
fn find_base(store: &Store, from: &OsString) -> Result<(PathBuf, PathBuf), Failure> {
    let has_slash = from.as_bytes().contains(&b'/') || from.as_bytes().starts_with(b".");
    let name = from.to_str().filter(|name| !has_slash && check_name(name).is_ok());
    let workspace = match name.map(|name| store.open(name)) {
        Some(Err(failure)) if failure.exit != Exit::NotFound => return Err(failure),
        Some(Ok(workspace)) => Some(workspace),
        _ => None,
    };
    let Some(Workspace { name, .. }) = workspace else {
        let directory = opening::directory(Path::new(from), "base", "a workspace shows a directory that is there")?;
        return Ok((directory.clone(), directory));
    };
    if Path::new(from).is_dir() {
        return Err(Failure::usage(format!("{name} is a workspace and a directory"))
            .next(format!("write ./{name} for the directory")));
    }
    let (workspace, _lock) = store.open_locked(&name, LockMode::Shared)?;
    view::make_sure(&workspace, store)?;
    Ok((workspace.mountpoint(), workspace.settings.over.0))
}

/// A path in a workspace, relative to its top, which has to be there.
fn within(settings: &WorkspaceSettings, named: &Path) -> Result<PathBuf, Failure> {
    for base in settings.directories() {
        let relative = if named.is_absolute() {
            let Ok(relative) = named.strip_prefix(base) else { continue };
            relative
        } else {
            named
        };
        let is_plain = relative.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if is_plain && relative.file_name().is_some() && fs::symlink_metadata(base.join(relative)).is_ok() {
            return Ok(relative.components().collect());
        }
    }
    Err(Failure::new(format!("{} is no path in the base", path_text(named)))
        .exit(Exit::NotFound)
        .next("name one that is there, relative to the directory of --from"))
}

fn discard(store: &Store, name: &str) -> Result<(), Failure> {
    let (workspace, _lock) = store.open_locked(name, LockMode::Exclusive)?;
    workspace.check_no_commit()?;
    // Nobody can change its directories while they are removed, also from another mount namespace.
    view::unmount_whole(&workspace)?;
    store.remove(&workspace)?;
    of_pool::release(&workspace.settings)
}

fn run_command(store: &Store, order: &RunOrder) -> Result<ExitCode, Failure> {
    if order.discard {
        return run_and_discard(store, order);
    }
    // Opened here: from the command's namespaces, the other process cannot be reached.
    let unopened = |error: io::Error| Failure::io("cannot open", "the file of `run --discard`", &error);
    let starts = std::env::var_os(STARTS).map(|path| fs::OpenOptions::new().write(true).open(path));
    let mut starts = starts.transpose().map_err(unopened)?;
    let (workspace, lock) = store.open_locked(&order.name, LockMode::Shared)?;
    workspace.check_no_commit()?;
    view::make_sure(&workspace, store)?;
    inside::enter(&workspace, order.as_root)?;
    // The lock is held until the last process of the command has ended.
    rustix::io::fcntl_setfd(&lock.0, rustix::io::FdFlags::empty())
        .map_err(|error| Failure::io("cannot keep", "the workspace's lock", &error.into()))?;
    let (program, arguments) = match order.command.split_first() {
        Some((program, arguments)) => (program.clone(), arguments.to_vec()),
        None => (std::env::var_os("SHELL").unwrap_or_else(|| OsString::from("/bin/sh")), Vec::new()),
    };
    if let Some(starts) = &mut starts {
        starts.write_all(b"1").map_err(unopened)?;
    }
    let error = Command::new(&program).args(arguments).env_remove(STARTS).exec();
    drop(lock);
    if let Some(starts) = &starts {
        starts.set_len(0).map_err(unopened)?;
    }
    let failure = Failure::io("cannot run", path_text(Path::new(&program)), &error);
    // As shells do.
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    failure.report("nacre");
    Ok(ExitCode::from(code))
}

/// Has another process of this program run the command, waits for it, and discards the workspace if the command ran.
fn run_and_discard(store: &Store, order: &RunOrder) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::io("cannot run", "the command", &error);
    let signals = Signals::block().map_err(failed)?;
    let starts = rustix::fs::memfd_create("starts", rustix::fs::MemfdFlags::CLOEXEC);
    let starts = fs::File::from(starts.map_err(|error| failed(error.into()))?);
    let mut command = Command::new("/proc/self/exe");
    command.arg0("nacre").args(["workspace", "run"]);
    command.env(STARTS, format!("/proc/{}/fd/{}", std::process::id(), starts.as_raw_fd()));
    if order.as_root {
        command.arg("--root");
    }
    command.args([&order.name, "--"]).args(&order.command);
    let mut child = signals::unblocked_in(&mut command).spawn().map_err(failed)?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // Ends with this process.
    thread::Builder::new()
        .spawn(move || {
            while let Ok((signal, _, of_kernel)) = signals.next_and_origin() {
                let signal = match signal {
                    signals::Signal::Hangup => Signal::HUP,
                    signals::Signal::Interrupt => Signal::INT,
                    signals::Signal::Terminate => Signal::TERM,
                    signals::Signal::User1 => Signal::USR1,
                };
                // A signal of the terminal has reached the command as well.
                if !of_kernel && let Some(pid) = pid {
                    // The command may have ended.
                    let _ = kill_process(pid, signal);
                }
            }
        })
        .map_err(failed)?;
    let status = child.wait().map_err(failed)?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    if starts.metadata().map_err(failed)?.len() == 0 {
        Failure::new(format!("the command did not start: the workspace {} is not discarded", order.name))
            .report("nacre");
    } else if let Err(failure) = discard(store, &order.name) {
        if code == 0 {
            return Err(failure);
        }
        // The exit code stays that of the command.
        failure.report("nacre");
    }
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Copies a tree with all attributes, hard links and holes.
fn copy_tree(source: &Path, destination: &Path) -> Result<(), Failure> {
    let options = nacre_copy::Options {
        source: source.to_owned(),
        destination: destination.to_owned(),
        jobs: 2,
        update: false,
        verify: nacre_copy::Verify::No,
        reflink: nacre_copy::Reflink::Auto,
        one_file_system: false,
        strict: true,
        sync: true,
        estimate: false,
    };
    crate::copy::quietly(&options)
}
