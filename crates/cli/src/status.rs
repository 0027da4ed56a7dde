//! `nacre status`: mounts as a table, in full, for scripts, or as JSON.
//!
//! [`gather`] asks the mounts; everything else is pure.

use crate::{
    clap_args::View,
    clock,
    columns::{self, Align, Column, left, right},
};
use nacre_admin::pool::Survives;
use nacre_daemon::{
    control::{self, FoundMounts, Peer},
    failure::{Exit, Failure},
    kernel_engine,
    mountinfo::{self, MountEntry},
    pool::expected,
    report::{DETACHED, OperationReport, Report, path_text, printable, tell_detached, tree},
    runtime::{self, Whose},
};
use nacre_sys::proc_looks::ProcLooks;
use rustix::io::Errno;
use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Maximum time between the start of a mount and its control socket.
const BEING_MADE: Duration = Duration::from_millis(300);
/// Deadline for all mounts without an answering control socket to answer statfs(2).
const STATFS_LIMIT: Duration = Duration::from_secs(2);
/// Least time that each of them has.
const SHORTEST_LOOK: Duration = Duration::from_millis(100);
/// File in the runtime directory that records that the hint about mounts of other users was given.
const OTHER_USERS_HINT: &str = "other-users.hint";

const COLUMNS: &[Column<Report>] = &[
    left("mountpoint", "MOUNTPOINT", |report, _| report.mountpoint.clone()),
    left("source", "SOURCE", |report, _| report.source.clone()),
    left("engine", "ENGINE", |report, _| report.engine.clone()),
    left("transport", "TRANSPORT", |report, _| report.transport.clone()),
    left("transport-reason", "TRANSPORT-REASON", |report, _| {
        report.transport_reason.clone().unwrap_or_else(|| "-".to_owned())
    }),
    left("passthrough", "PASSTHROUGH", |report, _| if report.passthrough.on { "on" } else { "off" }.to_owned()),
    left("coherence", "COHERENCE", |report, _| report.coherence.clone()),
    right("requests", "REQUESTS", |report, exact| number(report.requests, exact)),
    right("errors", "ERRORS", |report, exact| number(report.errors, exact)),
    right("in-flight", "IN-FLIGHT", |report, exact| number(report.in_flight, exact)),
    left("waiting", "WAITING", |report, _| if report.waiting.is_empty() { "-".to_owned() } else { waiting(report) }),
    right("inodes", "INODES", |report, exact| number(report.inodes, exact)),
    right("open-files", "OPEN-FILES", |report, exact| number(report.open_files, exact)),
    right("passthrough-opens", "PASSTHROUGH-OPENS", |report, exact| number(report.passthrough_opens, exact)),
    right("cache-hits", "CACHE-HITS", |report, exact| number(report.cache_hits, exact)),
    right("invalidations", "INVALIDATIONS", |report, exact| number(report.invalidations, exact)),
    right("full-invalidations", "FULL-INVALIDATIONS", |report, exact| number(report.full_invalidations, exact)),
    left("attached", "ATTACHED", |report, _| if report.detached { "no" } else { "yes" }.to_owned()),
    right("pid", "PID", |report, _| report.pid.to_string()),
    right("uid", "UID", |report, _| report.uid.to_string()),
    right(
        "uptime",
        "UPTIME",
        |report, exact| if exact { report.uptime.to_string() } else { columns::uptime(report.uptime) },
    ),
    left("stack", "STACK", |report, _| report.stack.clone()),
];

const USUAL: [&str; 7] = ["mountpoint", "source", "engine", "transport", "passthrough", "requests", "uptime"];

fn number(number: u64, exact: bool) -> String {
    if exact { number.to_string() } else { columns::count(number) }
}

/// Carries out the command; returns the text to print.
///
/// # Errors
/// A column that does not exist, a mount point where nothing of ours is mounted.
pub fn run(view: &View, mountpoints: &[PathBuf]) -> Result<String, Failure> {
    let columns = choose(view)?;
    let reports = gather(mountpoints, view.everybody)?;
    if view.json {
        let json = serde_json::to_string_pretty(&reports)
            .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
        return Ok(json + "\n");
    }
    if let ([report], false, None, false) = (reports.as_slice(), mountpoints.is_empty(), &view.columns, view.scripted) {
        return Ok(detail(report, view.exact));
    }
    let bold = std::io::stdout().is_terminal();
    Ok(match reports.is_empty() && !view.scripted {
        true => "no mounts\n".to_owned(),
        false => table(&reports, &columns, view, bold),
    })
}

/// Prints the number of other users' mounts after a list of our own: on a terminal once per boot.
pub fn hint_at_other_users(view: &View, mountpoints: &[PathBuf]) {
    let is_list = mountpoints.is_empty() && !view.everybody && !view.scripted && !view.json;
    if !is_list || !rustix::process::geteuid().is_root() {
        return;
    }
    let foreign = foreign_mounts();
    if foreign == 0 || was_hinted() {
        return;
    }
    // A hint that cannot be written is no failure.
    let _ = writeln!(
        std::io::stderr(),
        "nacre: {foreign} mounts of other users: --all-users asks the processes that serve them"
    );
}

/// Returns whether the hint was printed on a terminal before, and records it. Where that cannot be
/// recorded, it is printed again.
fn was_hinted() -> bool {
    let Ok(directory) = runtime::own() else { return false };
    let note = directory.join(OTHER_USERS_HINT);
    if !std::io::stderr().is_terminal() {
        return note.exists();
    }
    let noted = std::fs::File::create_new(note);
    noted.is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists)
}

/// Gathers the reports of these mounts, of all where none is named; mounts that do not answer are
/// reported.
///
/// # Errors
/// A mount point where nothing of ours is mounted.
pub fn gather(mountpoints: &[PathBuf], everybody: bool) -> Result<Vec<Report>, Failure> {
    gather_and(mountpoints, everybody, true)
}

/// Gathers the reports as [`gather`] does, without reporting mounts that do not answer.
///
/// # Errors
/// A mount point where nothing of ours is mounted.
pub fn gather_silently(mountpoints: &[PathBuf], everybody: bool) -> Result<Vec<Report>, Failure> {
    gather_and(mountpoints, everybody, false)
}

fn gather_and(mountpoints: &[PathBuf], everybody: bool, told: bool) -> Result<Vec<Report>, Failure> {
    let (mut found, mut unheard) = ask(mountpoints, everybody);
    if !unheard.mute.is_empty() {
        // A mount that is being created has no socket for a moment.
        clock::pause(BEING_MADE);
        (found, unheard) = ask(mountpoints, everybody);
    }
    let Unheard { dead, mute, stuck } = unheard;
    if told {
        found.tell_silent();
    }
    if mountpoints.is_empty() && told {
        for lost in expected::lost(&[]) {
            let failure = lost.failure();
            let _ = writeln!(std::io::stderr(), "nacre: {}; {}", failure.what, failure.next);
        }
        tell_detached(found.peers.iter().map(|peer| (&peer.report.mountpoint, peer.report.detached, peer.report.pid)));
        for place in &mute {
            let _ = writeln!(std::io::stderr(), "nacre: {}", tell_mute(place));
        }
        for place in &stuck {
            let _ = writeln!(std::io::stderr(), "nacre: {}", tell_stuck(place));
        }
        for place in &dead {
            let _ = writeln!(
                std::io::stderr(),
                "nacre: the mount at {place} has lost its process; `nacre umount {place}` removes it"
            );
        }
    }
    let taken_over: Vec<String> = found.taken_over.into_iter().map(|(place, _)| place).collect();
    let mut reports: Vec<Report> = found.peers.into_iter().map(|peer| sanitised(peer.report)).collect();
    reports.extend(kernel_engine::records()?);
    reports.sort_by(|a, b| a.mountpoint.cmp(&b.mountpoint));
    if mountpoints.is_empty() {
        return Ok(reports);
    }
    let mut chosen = Vec::new();
    for mountpoint in mountpoints {
        let text = path_text(&control::lexical(mountpoint)?);
        let found = reports.iter().find(|report| report.mountpoint == text);
        chosen.push(found.cloned().ok_or_else(|| {
            if dead.contains(&text) {
                let what = format!("the mount at {text} has lost its process");
                return Failure::new(what).exit(Exit::NotFound).next(format!("`nacre umount {text}` removes it"));
            }
            if taken_over.contains(&text) {
                return control::taken_over(&text);
            }
            if mute.contains(&text) {
                return Failure::new(tell_mute(&text));
            }
            if stuck.contains(&text) {
                return Failure::new(tell_stuck(&text));
            }
            Failure::new(format!("no mount of nacre answers at {text}"))
                .exit(Exit::NotFound)
                .next("`nacre status` lists those that do")
        })?);
    }
    Ok(chosen)
}

/// Returns the number of mounts of other users than root in the mount table. Their processes are
/// not asked: they could make root wait.
fn foreign_mounts() -> usize {
    // Without a mount table, none are known.
    let mounts = mountinfo::read().unwrap_or_default();
    mounts.iter().filter(|entry| entry.is_served() && entry.user() != Some(0)).count()
}

/// Asks the mounts; returns the answers, and the mounts without one, as far as the kernel reports
/// them.
fn ask(mountpoints: &[PathBuf], everybody: bool) -> (FoundMounts, Unheard) {
    let found = match mountpoints {
        [] => control::find(&Whose::told(everybody)),
        named => control::find_at(named),
    };
    // A mount whose process is stuck would block statfs.
    let all_answer = found.silent.is_empty() && found.taken_over.is_empty() && found.is_whole;
    let unheard = if all_answer { unheard(&found.peers) } else { Unheard::default() };
    (found, unheard)
}

/// Returns the notice about a mount that works but has no control socket.
fn tell_mute(place: &str) -> String {
    let directory = path_text(&runtime::ours());
    format!(
        "the mount at {place} works, but has no socket in {directory}: if that was full, it gets one when there is room"
    )
}

/// Returns the notice about a mount whose process answers neither at a control socket nor requests of the kernel.
fn tell_stuck(place: &str) -> String {
    format!("the mount at {place} does not answer: its process is stopped, or waits for something")
}

/// Mounts of nacre without an answering control socket, by their mount points.
#[derive(Default)]
struct Unheard {
    /// Their process does not answer requests.
    stuck: Vec<String>,
    /// Their process has ended.
    dead: Vec<String>,
    /// They are served under the type `fuse.nacre` (mounts of other types may be another
    /// program's).
    mute: Vec<String>,
}

/// Checks mounts of nacre that are not among the answering ones with statfs.
fn unheard(served: &[Peer]) -> Unheard {
    let own = Some(rustix::process::geteuid().as_raw());
    let mut unheard = Unheard::default();
    let end = clock::now() + STATFS_LIMIT;
    // Without a mount table, there are none to report.
    for entry in mountinfo::read().unwrap_or_default() {
        let text = path_text(&entry.mountpoint);
        if !entry.is_served() || entry.user() != own || served.iter().any(|peer| peer.report.mountpoint == text) {
            continue;
        }
        // Attributes may be answered from the kernel's cache; statfs is always a request. This process serves no mount
        // itself, so it cannot wait for itself.
        let is_ours = entry.kind == "fuse.nacre";
        let limit = end.saturating_duration_since(clock::now()).max(SHORTEST_LOOK);
        match answer_of_statfs(&entry, limit) {
            None => unheard.stuck.push(text),
            Some(Ok(())) if is_ours => unheard.mute.push(text),
            Some(Err(Errno::NOTCONN)) => unheard.dead.push(text),
            Some(_) => {}
        }
    }
    unheard
}

/// Result of statfs(2) on a mount; `None` if its process does not answer within `limit`.
fn answer_of_statfs(entry: &MountEntry, limit: Duration) -> Option<Result<(), Errno>> {
    /// By mount id: a mount has at most one thread that waits for it, however often `nacre top` asks.
    static LOOKS: Mutex<BTreeMap<u64, Arc<ProcLooks>>> = Mutex::new(BTreeMap::new());
    let looks = {
        let mut all = LOOKS.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(entry.id).or_default())
    };
    let place = entry.mountpoint.clone();
    // Without a thread, nothing is known of the mount.
    looks.within(limit, move || rustix::fs::statfs(&place).map(drop)).ok().flatten()
}

/// Escapes texts of a report: other users' processes may send anything, and no control sequence may
/// reach a terminal.
fn sanitised(mut report: Report) -> Report {
    let clean = |text: &mut String| {
        if text.chars().any(char::is_control) {
            *text = printable(text.as_bytes());
        }
    };
    let Report {
        mountpoint,
        source,
        engine,
        engine_reason,
        stack,
        transport,
        transport_reason,
        coherence,
        passthrough,
        asks_at_open,
        survives,
        operations,
        cages,
        branches,
        ..
    } = &mut report;
    for text in [mountpoint, source, engine, engine_reason, stack, transport, coherence] {
        clean(text);
    }
    let why_not = survives.as_mut().and_then(|survives| survives.why_not.as_mut());
    passthrough.why_not.iter_mut().chain(transport_reason).chain(asks_at_open).chain(why_not).for_each(clean);
    operations.iter_mut().for_each(|operation| clean(&mut operation.name));
    cages.iter_mut().for_each(nacre_daemon::cage::find::sanitise);
    branches.iter_mut().for_each(crate::union::run::sanitise);
    report
}

fn choose(view: &View) -> Result<Vec<&'static Column<Report>>, Failure> {
    columns::chosen(COLUMNS, Some(&USUAL), view)
}

fn table(reports: &[Report], chosen: &[&Column<Report>], view: &View, bold: bool) -> String {
    let mut reports = reports.to_vec();
    for report in reports.iter_mut().filter(|report| report.detached && !view.scripted) {
        report.mountpoint.push_str(" (detached)");
    }
    columns::table(&reports, chosen, view, bold)
}

fn detail(report: &Report, exact: bool) -> String {
    let passthrough = match (&report.passthrough.why_not, report.passthrough.on) {
        (Some(why), false) => format!("off: {why}"),
        (None, false) => "off".to_owned(),
        (_, true) => "on".to_owned(),
    };
    let count = |value| number(value, exact);
    let lines = [
        (
            "mountpoint",
            if report.detached { format!("{} ({DETACHED})", report.mountpoint) } else { report.mountpoint.clone() },
        ),
        ("source", report.source.clone()),
        ("engine", format!("{} ({})", report.engine, report.engine_reason)),
        ("stack", report.stack.clone()),
        (
            "transport",
            report
                .transport_reason
                .as_ref()
                .map_or(report.transport.clone(), |why| format!("{} (no io_uring: {why})", report.transport)),
        ),
        ("passthrough", passthrough),
        (
            "opens",
            report
                .asks_at_open
                .as_ref()
                .map_or("answered by the kernel".to_owned(), |why| format!("one request each: {why}")),
        ),
        ("coherence", coherence(&report.coherence)),
        ("survives", survives(report)),
        (
            "invalidations",
            format!("{} ({} of all caches)", count(report.invalidations), count(report.full_invalidations)),
        ),
        (
            "requests",
            format!(
                "{} ({} failed, {} in flight)",
                count(report.requests),
                count(report.errors),
                count(report.in_flight)
            ),
        ),
        ("waiting", waiting(report)),
        ("inodes", count(report.inodes)),
        (
            "open files",
            format!("{} ({} opens passed through)", count(report.open_files), count(report.passthrough_opens)),
        ),
        ("cache hits", count(report.cache_hits)),
        ("process", if report.pid == 0 { "none".to_owned() } else { format!("{} of user {}", report.pid, report.uid) }),
        ("uptime", if exact { report.uptime.to_string() } else { columns::uptime(report.uptime) }),
    ];
    let told = lines.iter().filter(|(_, value)| !value.is_empty());
    let mut text: String = told.map(|(name, value)| format!("{name:<13} {value}\n")).collect();
    if let Some(layers) = &report.layers {
        text.push_str("\nlayers\n");
        text.push_str(&tree(layers, 1));
    }
    if !report.branches.is_empty() {
        text.push('\n');
        text.push_str(&crate::union::list::within(&report.branches, exact));
    }
    if !report.operations.is_empty() {
        text.push('\n');
        text.push_str(&operations(&report.operations, exact));
    }
    text
}

/// Lists unanswered requests of the mount's own threads to the mount itself.
fn waiting(report: &Report) -> String {
    let waiting: Vec<String> = report.waiting.iter().map(ToString::to_string).collect();
    waiting.join("; ")
}

/// Describes whether the mount survives the death of its process; empty where survival was not
/// requested.
fn survives(report: &Report) -> String {
    report.survives.as_ref().map(Survives::text).unwrap_or_default()
}

fn operations(operations: &[OperationReport], exact: bool) -> String {
    let mut sorted: Vec<&OperationReport> = operations.iter().collect();
    sorted.sort_by(|a, b| b.requests.cmp(&a.requests).then_with(|| a.name.cmp(&b.name)));
    let time = |ns: u64| if exact { ns.to_string() } else { microseconds(ns) };
    let rows: Vec<Vec<String>> = sorted
        .iter()
        .map(|operation| {
            let mean = operation.total_ns.checked_div(operation.requests).unwrap_or(0);
            let p99 = quantile(operation, 99).map_or_else(
                || "-".to_owned(),
                |ns| format!("<= {}", time(if exact { ns } else { ns.next_multiple_of(100) })),
            );
            vec![
                operation.name.clone(),
                number(operation.requests, exact),
                number(operation.errors, exact),
                time(mean),
                p99,
            ]
        })
        .collect();
    let headings = [
        ("REQUEST", Align::Left),
        ("COUNT", Align::Right),
        ("ERRORS", Align::Right),
        ("MEAN", Align::Right),
        ("99 %", Align::Right),
    ];
    columns::aligned(&headings, &rows, false)
}

/// Formats a time in the one unit of the table.
fn microseconds(ns: u64) -> String {
    format!("{}.{} us", ns / 1000, ns % 1000 / 100)
}

/// Describes how the mount notices changes of the source: the word of `--coherence`, and its
/// meaning.
fn coherence(word: &str) -> String {
    let meaning = match word {
        "exclusive" => "the source changes through this mount only",
        "watch" => "changes in the source invalidate caches",
        "revalidate" => "each use asks the source",
        _ => return word.to_owned(),
    };
    format!("{word} ({meaning})")
}

/// Returns the upper bound of the bucket that contains this percentile of the latencies.
fn quantile(operation: &OperationReport, percent: u64) -> Option<u64> {
    let total: u64 = operation.latency.iter().map(|(_, requests)| requests).sum();
    let wanted = total.checked_mul(percent)?.div_ceil(100);
    let mut seen = 0;
    let bucket = operation.latency.iter().find(|(_, requests)| {
        seen += requests;
        total > 0 && seen >= wanted
    })?;
    bucket.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            mountpoint: "/mnt/a".to_owned(),
            source: "/srv".to_owned(),
            engine: "fuse".to_owned(),
            engine_reason: "asked for".to_owned(),
            transport: "uring".to_owned(),
            requests: 123_456,
            uptime: 90,
            pid: 7,
            operations: vec![
                OperationReport {
                    name: "read".to_owned(),
                    requests: 1,
                    errors: 0,
                    total_ns: 5_000,
                    latency: vec![(Some(8191), 1), (None, 0)],
                },
                OperationReport {
                    name: "lookup".to_owned(),
                    requests: 100,
                    errors: 3,
                    total_ns: 200_000,
                    latency: vec![(Some(2047), 99), (None, 1)],
                },
            ],
            ..Report::default()
        }
    }

    #[test]
    fn scripts_get_exact_columns() {
        let columns = Some(vec!["mountpoint".to_owned(), "requests".to_owned(), "uptime".to_owned()]);
        let view = View { json: false, scripted: true, exact: true, columns, everybody: false };
        assert_eq!(table(&[report()], &choose(&view).unwrap(), &view, false), "/mnt/a\t123456\t90\n");
        let wrong = View { columns: Some(vec!["bogus".to_owned()]), ..View::default() };
        assert!(choose(&wrong).is_err());
        let all = View { columns: Some(vec!["all".to_owned()]), ..View::default() };
        assert_eq!(choose(&all).unwrap().len(), COLUMNS.len());
    }

    #[test]
    fn people_get_headings() {
        let view = View::default();
        let text = table(&[report()], &choose(&view).unwrap(), &view, false);
        assert_eq!(
            text,
            "MOUNTPOINT  SOURCE  ENGINE  TRANSPORT  PASSTHROUGH  REQUESTS  UPTIME\n/mnt/a      /srv    fuse    uring      off              123k    90 s\n"
        );
    }

    #[test]
    fn reasons_do_not_widen_the_table() {
        let why = "the kernel does not offer it".to_owned();
        let report = Report { transport: "device".to_owned(), transport_reason: Some(why), detached: true, ..report() };
        let view = View::default();
        let text = table(std::slice::from_ref(&report), &choose(&view).unwrap(), &view, false);
        assert_eq!(
            text.lines().nth(1).unwrap(),
            "/mnt/a (detached)  /srv    fuse    device     off              123k    90 s"
        );
        assert!(
            detail(&report, false).contains("\ntransport     device (no io_uring: the kernel does not offer it)\n")
        );
        let columns = Some(["mountpoint", "transport", "transport-reason", "attached"].map(str::to_owned).to_vec());
        let view = View { scripted: true, columns, ..View::default() };
        let text = table(std::slice::from_ref(&report), &choose(&view).unwrap(), &view, false);
        assert_eq!(text, "/mnt/a\tdevice\tthe kernel does not offer it\tno\n");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["transport"], &json["transport_reason"]),
            (&"device".into(), &"the kernel does not offer it".into())
        );
    }

    #[test]
    fn requests_are_listed_by_number() {
        let text = operations(&report().operations, false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "lookup     100       3  2.0 us  <= 2.1 us");
        assert_eq!(lines[2], "read         1       0  5.0 us  <= 8.2 us");
    }

    #[test]
    fn quantiles_come_from_buckets() {
        let operation =
            OperationReport { latency: vec![(Some(1), 98), (Some(3), 1), (None, 1)], ..OperationReport::default() };
        assert_eq!(quantile(&operation, 50), Some(1));
        assert_eq!(quantile(&operation, 99), Some(3));
        assert_eq!(quantile(&operation, 100), None);
        assert_eq!(quantile(&OperationReport::default(), 99), None);
    }

    #[test]
    fn a_terminal_gets_no_commands_from_others() {
        let mut hostile = report();
        hostile.source = "\x1b]0;x\x07".to_owned();
        assert_eq!(sanitised(hostile).source, "\\x1b]0;x\\x07");
    }
}
