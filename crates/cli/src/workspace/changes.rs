//! What is done with the changes of a workspace: shown, committed, exported, imported.

use super::{
    ask::Terminal,
    command::{ChangesForm, CommitOrder, DiffOrder},
    of_pool,
    run::{mount_again, with_changes},
};
use crate::{output, union::run::json};
use nacre_daemon::{
    failure::{Exit, Failure},
    report::{path_text, printable},
    workspace::{
        snapshots,
        store::{self, LockMode, Store, Workspace},
        view,
    },
};
use nacre_workspace::{
    Aspects, Base, Change, ChangeKind, CommitOptions, CommitPlan, Committed, Conflict, Danger, Entry, Journal,
    Selection, Upper, WorkspaceError,
};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use serde::Serialize;
use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, IsTerminal, Read, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Exit code of `diff` where there are changes.
const DIFFERENCES: u8 = 1;
/// Exit code of `commit` where others have changed what the workspace has changed.
const CONFLICTS: u8 = 4;

/// Exit code of `diff` where the changes cannot be found out, as of diff(1).
const TROUBLE: u8 = 2;

pub(super) fn failed(error: WorkspaceError) -> Failure {
    let failure = Failure::new(error.what);
    match error.errno {
        Some(number) => failure.because(io::Error::from_raw_os_error(number).kind()),
        None => failure,
    }
}

fn opened(workspace: &Workspace) -> Result<(Base, Upper), Failure> {
    let base = Base::open(&workspace.settings.directories()).map_err(failed)?;
    Ok((base, Upper::open(&workspace.changes()).map_err(failed)?))
}

fn opened_for_commit(workspace: &Workspace) -> Result<(Base, Upper), Failure> {
    let targets = of_pool::targets(&workspace.settings);
    for target in &targets {
        // The path has no links at the creation: one that leads elsewhere has been put there since.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let found = openat2(CWD, *target, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        found.map_err(|error| {
            Failure::io("cannot commit to", path_text(target), &error.into())
                .next("the path must lead to the directory without symbolic links, as at the creation")
        })?;
    }
    // The plan compares the directory that is open then with that of the creation.
    let base = Base::open(&targets).map_err(failed)?;
    Ok((base, Upper::open(&workspace.changes()).map_err(failed)?))
}

/// The paths that a command is limited to, relative to the base.
fn selection(workspace: &Workspace, paths: &[PathBuf]) -> Result<Selection, Failure> {
    let mut selected = Vec::new();
    for path in paths {
        let view = workspace.mountpoint();
        let places = workspace.settings.directories().into_iter().chain([view.as_path()]);
        let below = places.filter_map(|place| path.strip_prefix(place).ok()).next();
        let relative = match below {
            Some(below) => below,
            None if path.is_absolute() => {
                return Err(Failure::usage(format!("{} is not in the workspace", path_text(path)))
                    .next("name paths relative to its directory"));
            }
            None => path.as_path(),
        };
        let relative: PathBuf = relative.components().filter(|part| *part != std::path::Component::CurDir).collect();
        if relative.components().any(|part| part == std::path::Component::ParentDir) {
            return Err(Failure::usage(format!("{} leads out of the workspace", path_text(path))));
        }
        // The whole workspace: no limit.
        if relative.as_os_str().is_empty() {
            return Ok(Selection::default());
        }
        selected.push(relative.as_os_str().as_bytes().to_vec());
    }
    Ok(Selection { paths: selected })
}

/// A change, as JSON.
#[derive(Serialize)]
struct ChangeReport {
    kind: &'static str,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changed: Vec<&'static str>,
    old: Option<EntryReport>,
    new: Option<EntryReport>,
}

#[derive(Serialize)]
struct EntryReport {
    mode: String,
    uid: u32,
    gid: u32,
    size: u64,
}

fn words(aspects: Aspects) -> Vec<&'static str> {
    let all = [
        (aspects.content, "content"),
        (aspects.kind, "type"),
        (aspects.mode, "mode"),
        (aspects.owner, "owner"),
        (aspects.xattrs, "attributes"),
        (aspects.target, "target"),
        (aspects.device, "device"),
    ];
    all.into_iter().filter(|(is_changed, _)| *is_changed).map(|(_, word)| word).collect()
}

/// Letter, old path and changed aspects of a change.
fn parts(change: &Change) -> (&'static str, Option<&[u8]>, Vec<&'static str>) {
    match &change.kind {
        ChangeKind::Added => ("A", None, Vec::new()),
        ChangeKind::Removed => ("D", None, Vec::new()),
        ChangeKind::Renamed { from, aspects } => ("R", Some(from), words(*aspects)),
        ChangeKind::Modified(aspects) => ("M", None, words(*aspects)),
    }
}

fn report(change: &Change) -> ChangeReport {
    let entry = |entry: &Entry| EntryReport {
        mode: format!("{:06o}", entry.mode),
        uid: entry.uid,
        gid: entry.gid,
        size: entry.size,
    };
    let (kind, from, changed) = parts(change);
    ChangeReport {
        kind,
        path: printable(&change.path),
        from: from.map(printable),
        changed,
        old: change.old.as_ref().map(entry),
        new: change.new.as_ref().map(entry),
    }
}

/// A change as a line for people.
pub(super) fn line(change: &Change, stat: bool) -> String {
    let (letter, from, changed) = parts(change);
    let path = printable(&change.path);
    let mut line = match from {
        Some(from) => format!("{letter} {} -> {path}", printable(from)),
        None => format!("{letter} {path}"),
    };
    // Content alone is what M says.
    if !changed.is_empty() && changed != ["content"] {
        line.push_str(&format!(" ({})", changed.join(", ")));
    }
    if stat {
        let size =
            |entry: &Option<Entry>| entry.as_ref().map_or_else(|| "-".to_owned(), |entry| entry.size.to_string());
        line.push_str(&format!("  {} -> {} bytes", size(&change.old), size(&change.new)));
    }
    line.push('\n');
    line
}

/// `nacre workspace diff`.
///
/// # Errors
/// No such workspace, or it is in use.
pub fn diff(store: &Store, order: &DiffOrder) -> Result<ExitCode, Failure> {
    match compared(store, order) {
        // 1 says that there are differences.
        Err(failure) if failure.exit == Exit::Failure => {
            failure.report("nacre");
            Ok(ExitCode::from(TROUBLE))
        }
        outcome => outcome,
    }
}

fn compared(store: &Store, order: &DiffOrder) -> Result<ExitCode, Failure> {
    let (workspace, _lock) = store.open_locked(&order.name, LockMode::Shared)?;
    workspace.check_no_commit()?;
    let (base, upper) = opened(&workspace)?;
    let changes = nacre_workspace::changes(&base, &upper, &selection(&workspace, &order.paths)?).map_err(failed)?;
    match order.form {
        ChangesForm::Json => {
            let reports: Vec<ChangeReport> = changes.iter().map(report).collect();
            output::print(&json(&reports)?)?;
        }
        ChangesForm::Patch => {
            let mut out = BufWriter::new(io::stdout().lock());
            nacre_workspace::patch(&base, &upper, &changes, &mut out).map_err(failed)?;
            out.flush().map_err(|error| Failure::io("cannot write", "the patch", &error))?;
        }
        ChangesForm::Scripted => {
            let text: String = changes
                .iter()
                .map(|change| {
                    let (letter, from, changed) = parts(change);
                    let from = from.map(printable).unwrap_or_default();
                    format!("{letter}\t{}\t{from}\t{}\n", printable(&change.path), changed.join(","))
                })
                .collect();
            output::print(&text)?;
        }
        ChangesForm::Names | ChangesForm::Stat => {
            let text: String = changes.iter().map(|change| line(change, order.form == ChangesForm::Stat)).collect();
            output::print(&text)?;
        }
    }
    Ok(if changes.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DIFFERENCES) })
}

/// Result of a commit, as JSON.
#[derive(Serialize)]
struct CommitReport {
    workspace: String,
    conflicts: Vec<ConflictReport>,
    to_confirm: Vec<DangerReport>,
    committed: Option<Committed>,
    /// An interrupted commit was taken back.
    undone: bool,
    /// The base may have a part of the commit, which has to be continued or taken back.
    unfinished: bool,
}

impl CommitReport {
    /// The report of a commit that has done nothing.
    fn of(workspace: &Workspace) -> CommitReport {
        CommitReport {
            workspace: workspace.name.clone(),
            conflicts: Vec::new(),
            to_confirm: Vec::new(),
            committed: None,
            undone: false,
            unfinished: false,
        }
    }
}

#[derive(Serialize)]
struct ConflictReport {
    path: String,
    ours: &'static str,
    theirs: &'static str,
}

#[derive(Serialize)]
struct DangerReport {
    path: String,
    what: String,
}

/// What came of a commit.
enum Outcome {
    Committed(Committed),
    Undone,
    /// The user has quit.
    Quit,
    Conflicts(Vec<Conflict>),
    ToConfirm(Vec<Danger>),
}

/// `nacre workspace commit`.
///
/// # Errors
/// Processes are inside, or a step failed.
pub fn commit(store: &Store, order: &CommitOrder) -> Result<ExitCode, Failure> {
    let terminal = if order.ask { Some(Terminal::open()?) } else { None };
    match committed(store, order, terminal.as_ref()) {
        // 4 says that there are conflicts.
        Err(failure) if failure.exit == Exit::Denied => Err(failure.exit(Exit::Failure)),
        outcome => outcome,
    }
}

fn committed(store: &Store, order: &CommitOrder, terminal: Option<&Terminal>) -> Result<ExitCode, Failure> {
    let (workspace, _lock) = store.open_locked(&order.name, LockMode::Exclusive)?;
    if workspace.settings.directories().len() > 1 {
        // Removals and names of files in the lower ones cannot be committed into the first one.
        let failure = Failure::new("a workspace over several directories cannot be committed: nothing is committed");
        let keep = "`nacre workspace diff --patch` and `nacre workspace export` keep its changes";
        return Err(failure.next(keep));
    }
    let was_mounted = view::unmount_whole(&workspace)?;
    let outcome = match commit_unmounted(&workspace, order, terminal) {
        Err(failure) if workspace.journal().exists() => {
            if order.json {
                let report = CommitReport { unfinished: true, ..CommitReport::of(&workspace) };
                output::print(&json(&report)?)?;
            }
            Err(unfinished(failure, &workspace))
        }
        outcome => outcome,
    };
    // The exit code is that of the commit: a commit that is done must not look like one to be tried again.
    if let Err(failure) = mount_again(&workspace, store, was_mounted) {
        failure.next(format!("`nacre workspace mount {}` shows the workspace again", workspace.name)).report("nacre");
    }
    report_commit(&workspace, order, outcome?)
}

/// The failure of a commit that has a journal: the base may have a part of it, so the view stays away.
fn unfinished(failure: Failure, workspace: &Workspace) -> Failure {
    let name = &workspace.name;
    let mut next = failure.next.clone();
    if !next.is_empty() {
        next.push('\n');
    }
    next.push_str(&format!(
        "the commit is unfinished, and the view stays unmounted: `nacre workspace commit {name}` continues, \
         `nacre workspace commit --undo {name}` takes back what is done; then `nacre workspace mount {name}` shows it"
    ));
    failure.next(next).exit(Exit::Busy)
}

fn report_commit(workspace: &Workspace, order: &CommitOrder, outcome: Outcome) -> Result<ExitCode, Failure> {
    if order.json {
        let mut report = CommitReport::of(workspace);
        match &outcome {
            Outcome::Committed(committed) => report.committed = Some(*committed),
            Outcome::Undone => report.undone = true,
            Outcome::Quit => {}
            Outcome::Conflicts(conflicts) => report.conflicts = conflicts.iter().map(conflict_report).collect(),
            Outcome::ToConfirm(dangers) => report.to_confirm = dangers.iter().map(danger_report).collect(),
        }
        output::print(&json(&report)?)?;
    }
    match outcome {
        Outcome::Committed(committed) => {
            if !order.json {
                output::print(&format!("committed: {} names, {} bytes\n", committed.names, committed.bytes))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Undone => Ok(ExitCode::SUCCESS),
        Outcome::Quit => Err(Failure::new("nothing is committed")),
        Outcome::Conflicts(conflicts) => {
            if !order.json {
                let text: String = conflicts
                    .iter()
                    .map(|one| format!("{}: {} here, {} in the base\n", printable(&one.path), one.ours, one.theirs))
                    .collect();
                output::print(&text)?;
            }
            let failure = Failure::new(format!(
                "{} paths were changed in the base as well: nothing is committed",
                conflicts.len()
            ));
            failure
                .next("`--ours` takes the workspace's, `--theirs` the base's; with PATH for these alone; `-i` asks")
                .report("nacre");
            Ok(ExitCode::from(CONFLICTS))
        }
        Outcome::ToConfirm(dangers) => {
            if !order.json {
                let text: String =
                    dangers.iter().map(|one| format!("{}: {}\n", printable(&one.path), one.what)).collect();
                output::print(&text)?;
            }
            Err(Failure::new("the commit would give the base what takes an administrator's word: nothing is committed")
                .next("look at each of the paths; `-f` commits them"))
        }
    }
}

fn conflict_report(conflict: &Conflict) -> ConflictReport {
    ConflictReport { path: printable(&conflict.path), ours: conflict.ours, theirs: conflict.theirs }
}

fn danger_report(danger: &Danger) -> DangerReport {
    DangerReport { path: printable(&danger.path), what: danger.what.clone() }
}

fn commit_unmounted(
    workspace: &Workspace,
    order: &CommitOrder,
    terminal: Option<&Terminal>,
) -> Result<Outcome, Failure> {
    of_pool::renumber(workspace)?;
    let (base, upper) = opened_for_commit(workspace)?;
    if let Some(journal) = Journal::open(&workspace.journal()).map_err(failed)? {
        if order.undo {
            journal.undo(&base, &upper).map_err(failed)?;
            return Ok(Outcome::Undone);
        }
        let resumed = journal.resume(&base, &upper).map_err(failed)?;
        // A failure to print a note is ignored.
        let _ = writeln!(io::stderr(), "nacre: the interrupted commit is complete");
        // The changes on disk are others now. Only a workspace that has none left begins anew: others had been left out.
        let (base, upper) = opened_for_commit(workspace)?;
        let rest = nacre_workspace::changes(&base, &upper, &Selection::default()).map_err(failed)?;
        if rest.is_empty() {
            begin_anew(workspace)?;
        } else {
            let _ = writeln!(io::stderr(), "nacre: {} more changes are not committed", rest.len());
        }
        return Ok(Outcome::Committed(resumed));
    }
    if order.undo {
        return Err(Failure::new("no commit of this workspace was interrupted: there is nothing to take back"));
    }
    commit_planned(workspace, order, terminal, Compared { base: &base, upper: &upper })
}

/// The two sides of a comparison.
struct Compared<'a> {
    base: &'a Base,
    upper: &'a Upper,
}

fn commit_planned(
    workspace: &Workspace,
    order: &CommitOrder,
    terminal: Option<&Terminal>,
    compared: Compared<'_>,
) -> Result<Outcome, Failure> {
    let Compared { base, upper } = compared;
    let selection = selection(workspace, &order.paths)?;
    let mut changes = nacre_workspace::changes(base, upper, &selection).map_err(failed)?;
    if let Some(terminal) = terminal {
        let Some(chosen) = terminal.choose(base, upper, changes)? else { return Ok(Outcome::Quit) };
        if chosen.is_empty() {
            return Ok(Outcome::Committed(Committed::default()));
        }
        changes = chosen;
    }
    let options = CommitOptions { compare_content: order.compare_content };
    let mut plan = CommitPlan::new(base, upper, changes, options).map_err(failed)?;
    let added = plan.added();
    if let Some(terminal) = terminal.filter(|_| !added.is_empty())
        && !terminal.confirm(&added)?
    {
        return Ok(Outcome::Quit);
    }
    let is_whole = selection.paths.is_empty() && (terminal.is_none() || plan.is_whole());
    for conflict in plan.conflicts() {
        let resolution = match (order.resolution, terminal) {
            (Some(resolution), _) => resolution,
            (None, Some(terminal)) => match terminal.resolve(&conflict)? {
                Some(resolution) => resolution,
                None => return Ok(Outcome::Quit),
            },
            (None, None) => continue,
        };
        plan.resolve(&conflict.path, resolution);
    }
    let conflicts = plan.conflicts();
    if !conflicts.is_empty() {
        return Ok(Outcome::Conflicts(conflicts));
    }
    let user = rustix::process::geteuid();
    let dangers = if user.is_root() { plan.dangers(user.as_raw()) } else { Vec::new() };
    if !dangers.is_empty() && !order.force {
        return Ok(Outcome::ToConfirm(dangers));
    }
    // The commit works with both: of the mount point, its directory may be gone.
    let own = [workspace.directory.clone(), workspace.mountpoint()];
    plan.protect(&own.into_iter().filter(|path| path.exists()).collect::<Vec<_>>());
    let committed = plan.run(&workspace.journal()).map_err(failed)?;
    if is_whole {
        begin_anew(workspace)?;
    }
    Ok(Outcome::Committed(committed))
}

/// Has the workspace begin anew, without a log of what is in the base now.
fn begin_anew(workspace: &Workspace) -> Result<(), Failure> {
    of_pool::renew(&workspace.settings)?;
    let ready = workspace.directory.join(".changes");
    // What a killed command left.
    match fs::remove_dir_all(&ready) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Failure::io("cannot remove", path_text(&ready), &error));
        }
        _ => {}
    }
    store::make_changes(&ready, &workspace.settings)?;
    snapshots::replace_changes(workspace, &ready)
}

/// `nacre workspace export`.
///
/// # Errors
/// Processes are inside, or the archive cannot be written.
pub fn export(store: &Store, name: &str, file: Option<&Path>, is_json: bool) -> Result<(), Failure> {
    if file.is_none() && io::stdout().is_terminal() {
        return Err(Failure::usage("an archive is not for a terminal").next("name a file with -o, or a pipe"));
    }
    with_changes(store, name, &mut |workspace| {
        let (base, upper) = opened(workspace)?;
        let mut out: Box<dyn Write> = match file {
            Some(file) => {
                Box::new(File::create(file).map_err(|error| Failure::io("cannot write", path_text(file), &error))?)
            }
            None => Box::new(io::stdout().lock()),
        };
        let mut buffered = BufWriter::new(&mut out);
        nacre_workspace::export(&base, &upper, &mut buffered).map_err(failed)?;
        buffered.flush().map_err(|error| Failure::io("cannot write", "the archive", &error))
    })?;
    let Some(file) = file.filter(|_| is_json) else { return Ok(()) };
    let about = fs::metadata(file).map_err(|error| Failure::io("cannot look at", path_text(file), &error))?;
    let report = ExportReport { workspace: name.to_owned(), file: path_text(file), bytes: about.len() };
    output::print(&json(&report)?)
}

/// Result of an export, as JSON.
#[derive(Serialize)]
struct ExportReport {
    workspace: String,
    file: String,
    bytes: u64,
}

/// `nacre workspace import`.
///
/// # Errors
/// The workspace has changes, processes are inside, or the archive cannot be read.
pub fn import(store: &Store, name: &str, file: Option<&Path>) -> Result<(), Failure> {
    with_changes(store, name, &mut |workspace| {
        let (base, upper) = opened(workspace)?;
        let present = nacre_workspace::changes(&base, &upper, &Selection::default()).map_err(failed)?;
        if !present.is_empty() {
            return Err(Failure::new(format!("the workspace {name} has changes already")).next("import into a new one"));
        }
        let archive: Box<dyn Read> = match file {
            Some(file) => {
                Box::new(File::open(file).map_err(|error| Failure::io("cannot read", path_text(file), &error))?)
            }
            None => Box::new(io::stdin().lock()),
        };
        nacre_workspace::import(&base, &upper, &mut BufReader::new(archive)).map_err(failed)
    })
}
