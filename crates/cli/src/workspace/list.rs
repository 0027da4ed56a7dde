//! `nacre workspace list`: a row for each workspace.

use crate::{
    clap_args::View,
    columns::{self, Column, left, right},
    union::run::json,
};
use nacre_daemon::{
    failure::Failure,
    mountinfo::{self, MountEntry},
    report::path_text,
    workspace::{
        settings::WorkspaceSettings,
        snapshots,
        store::{Store, Workspace},
        view,
    },
};
use nacre_layers::size::Size;
use serde::Serialize;
use std::{fs, os::unix::fs::MetadataExt, path::Path};

/// A row of `nacre workspace list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkspaceReport {
    /// Its name.
    pub name: String,
    /// Seconds since its creation.
    pub age: u64,
    /// Allocated size of its upper directory, bytes; snapshots of the workspace are not counted.
    pub size: u64,
    /// Files, directories and whiteouts of its changes.
    pub files: u64,
    /// Processes inside; `null` where they cannot be counted.
    pub processes: Option<usize>,
    /// `mounted`, `unmounted` or `dead`.
    pub state: &'static str,
    /// The directories that it shows.
    pub base: Vec<String>,
    /// Where it is shown.
    pub view: String,
    /// Names of its snapshots.
    pub snapshots: Vec<String>,
    /// Why its settings cannot be read.
    pub error: Option<String>,
}

const COLUMNS: &[Column<WorkspaceReport>] = &[
    left("name", "NAME", |report, _| report.name.clone()),
    right("age", "AGE", |report, exact| if exact { report.age.to_string() } else { columns::uptime(report.age) }),
    right("size", "SIZE", |report, exact| if exact { report.size.to_string() } else { Size::new(report.size).short() }),
    right("files", "FILES", |report, _| report.files.to_string()),
    right("processes", "PROCESSES", |report, _| {
        report.processes.map_or_else(|| "-".to_owned(), |processes| processes.to_string())
    }),
    left("state", "STATE", |report, _| report.state.to_owned()),
    left("base", "BASE", |report, _| report.base.join(":")),
    left("view", "VIEW", |report, _| report.view.clone()),
    left("snapshots", "SNAPSHOTS", |report, _| report.snapshots.join(",")),
];

const USUAL: &[&str] = &["name", "age", "size", "files", "processes", "state", "base", "view"];

/// The text of `nacre workspace list`.
///
/// # Errors
/// A column that does not exist, or the workspaces cannot be read.
pub fn text(store: &Store, view: &View, now: u64, bold: bool) -> Result<String, Failure> {
    let chosen = columns::chosen(COLUMNS, Some(USUAL), view)?;
    let reports = reports(store, now)?;
    if view.json {
        return json(&reports);
    }
    Ok(match reports.is_empty() && !view.scripted {
        true => "no workspaces\n".to_owned(),
        false => columns::table(&reports, &chosen, view, bold),
    })
}

/// The row of one workspace.
///
/// # Errors
/// The mount table cannot be read.
pub fn one(workspace: &Workspace, now: u64) -> Result<WorkspaceReport, Failure> {
    let table = mountinfo::read()?;
    let processes = match view::entry(workspace, &table) {
        Some(entry) => view::processes(&[entry]).map(|counts| counts.get(&entry.device).copied().unwrap_or_default()),
        None => Some(0),
    };
    Ok(report(workspace, now, processes, view::state(workspace, &table).word()))
}

fn reports(store: &Store, now: u64) -> Result<Vec<WorkspaceReport>, Failure> {
    let table = mountinfo::read()?;
    let found: Vec<(String, Result<Workspace, Failure>)> =
        store.names()?.into_iter().map(|name| (name.clone(), store.open(&name))).collect();
    let mounted: Vec<&MountEntry> =
        found.iter().filter_map(|(_, found)| view::entry(found.as_ref().ok()?, &table)).collect();
    let processes = view::processes(&mounted);
    let report = |(name, found): (String, Result<Workspace, Failure>)| match found {
        Ok(workspace) => {
            let entry = view::entry(&workspace, &table);
            let counted = match (entry, &processes) {
                (None, _) => Some(0),
                (Some(entry), Some(counts)) => Some(counts.get(&entry.device).copied().unwrap_or(0)),
                (Some(_), None) => None,
            };
            report(&workspace, now, counted, view::state(&workspace, &table).word())
        }
        Err(failure) => WorkspaceReport {
            name,
            age: 0,
            size: 0,
            files: 0,
            processes: None,
            state: "broken",
            base: Vec::new(),
            view: String::new(),
            snapshots: Vec::new(),
            error: Some(failure.what),
        },
    };
    Ok(found.into_iter().map(report).collect())
}

fn report(workspace: &Workspace, now: u64, processes: Option<usize>, state: &'static str) -> WorkspaceReport {
    let settings: &WorkspaceSettings = &workspace.settings;
    let (size, files) = used(&workspace.changes().join("upper"));
    WorkspaceReport {
        name: workspace.name.clone(),
        age: now.saturating_sub(settings.created),
        size,
        files,
        processes,
        state,
        base: settings.directories().into_iter().map(path_text).collect(),
        view: path_text(&workspace.mountpoint()),
        snapshots: snapshots::list(workspace),
        error: None,
    }
}

/// Bytes on the disk and number of entries below a directory. What cannot be read does not count: it is changing, or
/// another user's.
fn used(directory: &Path) -> (u64, u64) {
    let (mut bytes, mut entries, mut waiting) = (0, 0, vec![directory.to_owned()]);
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            bytes += about.blocks() * 512;
            entries += 1;
            if about.is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    (bytes, entries)
}
