//! Carries out the verbs of workspaces.

use super::{
    changes,
    command::{CreateOrder, WorkspaceVerb},
    discard, execute, list,
    of_pool::{self, Dataset},
};
use crate::{clock, output};
use nacre_daemon::{
    failure::{Exit, Failure},
    opening,
    report::path_text,
    workspace::{
        settings::{StoredPath, WorkspaceSettings},
        snapshots,
        store::{LockMode, Store, Workspace, check_name},
        view,
    },
};
use nacre_layers::size::Size;
use std::{
    ffi::OsString,
    fs,
    io::{self, IsTerminal},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Carries out a verb; returns its exit code.
///
/// # Errors
/// No such workspace, or the error of the verb.
pub fn run(verb: WorkspaceVerb) -> Result<ExitCode, Failure> {
    let store = Store::find()?;
    match verb {
        WorkspaceVerb::Create(order) => create(&store, &order)?,
        WorkspaceVerb::Mount { name, json } => {
            let (workspace, _lock) = store.open_locked(&name, LockMode::Shared)?;
            workspace.check_no_commit()?;
            view::make_sure(&workspace, &store)?;
            print_view(&workspace, json)?;
        }
        WorkspaceVerb::List { view } => {
            output::print(&list::text(&store, &view, clock::seconds(), io::stdout().is_terminal())?)?;
        }
        WorkspaceVerb::Diff(order) => return changes::diff(&store, &order),
        WorkspaceVerb::Commit(order) => return changes::commit(&store, &order),
        WorkspaceVerb::Export { name, file, json } => changes::export(&store, &name, file.as_deref(), json)?,
        WorkspaceVerb::Import { name, file, json } => {
            changes::import(&store, &name, file.as_deref())?;
            report(&store, &name, json)?;
        }
        WorkspaceVerb::Run(order) => {
            return Ok(execute::run(&store, &order).unwrap_or_else(|failure| {
                failure.report("nacre");
                ExitCode::from(execute::NOT_RUN)
            }));
        }
        WorkspaceVerb::Discard { names, json } => return discard::all(&store, &names, json),
        WorkspaceVerb::Rename { name, to, json } => {
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
            report(&store, &to, json)?;
        }
        WorkspaceVerb::Snapshot { snapshot, json } => {
            let (name, snapshot) = snapshots::names(&snapshot)?;
            with_changes(&store, name, &mut |workspace| snapshots::create(workspace, snapshot, &copy_tree))?;
            report(&store, name, json)?;
        }
        WorkspaceVerb::Rollback { snapshot, json } => {
            let (name, snapshot) = snapshots::names(&snapshot)?;
            with_changes(&store, name, &mut |workspace| snapshots::rollback(workspace, snapshot, &copy_tree))?;
            report(&store, name, json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the workspace's row of `list --json`, if that is wanted.
fn report(store: &Store, name: &str, json: bool) -> Result<(), Failure> {
    if json { print_row(&store.open(name)?) } else { Ok(()) }
}

fn print_row(workspace: &Workspace) -> Result<(), Failure> {
    output::print(&crate::union::run::json(&list::one(workspace, clock::seconds())?)?)
}

/// Prints where a workspace is shown, or its row as JSON.
fn print_view(workspace: &Workspace, json: bool) -> Result<(), Failure> {
    if json {
        return print_row(workspace);
    }
    output::print(&format!("{}\n", path_text(&workspace.mountpoint())))
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
    print_view(&workspace, order.json)
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
