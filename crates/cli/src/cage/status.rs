//! `nacre cage status` and `nacre cage list`: cages as a table, in full, for scripts, or as JSON.
//! Pure except for the requests to the cages.

use crate::{
    clap_args::View,
    columns::{self, Align, Column, left, right},
};
use nacre_daemon::{
    cage::{find, report::CageReport},
    control,
    failure::Failure,
    runtime::Whose,
};
use nacre_layers::size::Size;
use std::{io::IsTerminal, path::PathBuf};

const COLUMNS: &[Column<CageReport>] = &[
    left("name", "NAME", |cage, _| cage.directory.clone()),
    right("limit", "LIMIT", |cage, exact| optional(cage.limit, exact)),
    right("used", "USED", |cage, exact| bytes(cage.used, exact)),
    right("free", "FREE", |cage, exact| bytes(cage.free, exact)),
    right("use%", "USE%", |cage, exact| match cage.percent() {
        Some(percent) if exact => percent.to_string(),
        Some(percent) => format!("{percent}%"),
        None => "-".to_owned(),
    }),
    right("inodes", "INODES", |cage, exact| cage.inodes.map_or_else(|| "-".to_owned(), |inodes| count(inodes, exact))),
    right("inode-limit", "INODE-LIMIT", |cage, exact| {
        cage.inode_limit.map_or_else(|| "-".to_owned(), |inodes| count(inodes, exact))
    }),
    right("refused", "REFUSED", |cage, exact| count(cage.refused.total(), exact)),
    left("engine", "ENGINE", |cage, _| cage.engine.clone()),
    left("mode", "MODE", |cage, _| cage.mode.clone()),
    left("mountpoint", "MOUNTPOINT", |cage, _| cage.mountpoint.clone()),
    left("when-full", "WHEN-FULL", |cage, _| cage.when_full.clone()),
    right("soft", "SOFT", |cage, exact| optional(cage.soft, exact)),
    right("dropped", "DROPPED", |cage, exact| bytes(cage.dropped.bytes, exact)),
    left("accounting", "ACCOUNTING", |cage, _| cage.accounting.clone()),
    left("attached", "ATTACHED", |cage, _| if cage.attached { "yes" } else { "no" }.to_owned()),
    right("pid", "PID", |cage, _| cage.pid.to_string()),
    right("uid", "UID", |cage, _| cage.uid.to_string()),
    right("uptime", "UPTIME", |cage, exact| if exact { cage.uptime.to_string() } else { columns::uptime(cage.uptime) }),
];

const USUAL: [&str; 9] = ["name", "limit", "used", "free", "use%", "inodes", "refused", "engine", "mode"];

fn bytes(bytes: u64, exact: bool) -> String {
    if exact { bytes.to_string() } else { Size::new(bytes).short() }
}

fn optional(value: Option<u64>, exact: bool) -> String {
    value.map_or_else(|| "-".to_owned(), |value| bytes(value, exact))
}

fn count(number: u64, exact: bool) -> String {
    if exact { number.to_string() } else { columns::count(number) }
}

/// Carries out `status`; returns the text to print.
///
/// # Errors
/// A column that does not exist, a directory that is no cage.
pub fn status(view: &View, directories: &[PathBuf]) -> Result<String, Failure> {
    let columns = choose(view)?;
    let found = find::all(&match directories {
        [] => Whose::told(view.everybody),
        named => control::whose(named),
    })?;
    let mut chosen = Vec::new();
    for directory in directories {
        chosen.push(find::named(&found, directory)?.clone());
    }
    let cages = if directories.is_empty() { found } else { chosen };
    if let ([cage], false, None, false, false) =
        (cages.as_slice(), directories.is_empty(), &view.columns, view.scripted, view.json)
    {
        return Ok(detail(cage, view.exact));
    }
    show(&cages, &columns, view)
}

/// Carries out `list`; returns the text to print.
///
/// # Errors
/// A column that does not exist.
pub fn list(view: &View) -> Result<String, Failure> {
    let columns = choose(view)?;
    show(&find::all(&Whose::told(view.everybody))?, &columns, view)
}

fn show(cages: &[CageReport], columns: &[&Column<CageReport>], view: &View) -> Result<String, Failure> {
    if view.json {
        let json =
            serde_json::to_string_pretty(cages).map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
        return Ok(json + "\n");
    }
    Ok(match cages.is_empty() && !view.scripted {
        true => "no cages\n".to_owned(),
        false => columns::table(cages, columns, view, std::io::stdout().is_terminal()),
    })
}

fn choose(view: &View) -> Result<Vec<&'static Column<CageReport>>, Failure> {
    columns::chosen(COLUMNS, Some(&USUAL), view)
}

fn detail(cage: &CageReport, exact: bool) -> String {
    let size = |value| bytes(value, exact);
    let none = || "none".to_owned();
    let used = match cage.percent() {
        Some(percent) => format!("{} ({percent}%)", size(cage.used)),
        None => size(cage.used),
    };
    let engine = match cage.engine_reason.as_str() {
        "" => cage.engine.clone(),
        why => format!("{} ({why})", cage.engine),
    };
    let of_limits = cage.inode_limit.map_or_else(String::new, |limit| format!(" of {}", count(limit, exact)));
    let inodes = cage
        .inodes
        .map_or_else(|| "not told by the file system".to_owned(), |inodes| count(inodes, exact) + &of_limits);
    let mut lines = vec![
        ("cage", cage.directory.clone()),
        (
            "mountpoint",
            if cage.attached {
                cage.mountpoint.clone()
            } else {
                format!("{} (not mounted: nothing is limited there)", cage.mountpoint)
            },
        ),
        ("limit", cage.limit.map_or_else(none, size)),
        ("used", used),
        ("free", size(cage.free)),
        ("inodes", inodes),
        ("refused", refused(cage, exact)),
        ("engine", engine),
        ("mode", mode(cage, exact)),
        ("accounting", cage.accounting.clone()),
    ];
    if !cage.when_full.is_empty() {
        lines.push(("when full", when_full(cage, exact)));
    }
    if let Some(soft) = cage.soft {
        let reached = if cage.used >= soft { "reached" } else { "not reached" };
        lines.push(("soft limit", format!("{} ({reached})", size(soft))));
    }
    lines.push(("process", if cage.pid == 0 { none() } else { format!("{} of user {}", cage.pid, cage.uid) }));
    if cage.uptime > 0 || cage.pid != 0 {
        lines.push(("uptime", if exact { cage.uptime.to_string() } else { columns::uptime(cage.uptime) }));
    }
    let mut text: String = lines.iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect();
    for note in &cage.notes {
        text.push_str(&format!("{:<13} {note}\n", "note"));
    }
    text.push_str(&users(cage, exact));
    text.push_str(&directories(cage, exact));
    text
}

fn mode(cage: &CageReport, exact: bool) -> String {
    let Some(collecting) = &cage.collecting else { return cage.mode.clone() };
    match &collecting.why_not {
        Some(why) => format!("{} (not collected: {why})", cage.mode),
        None if cage.mode == "through" => cage.mode.clone(),
        None => format!(
            "{} ({} files, {} recalls, the kernel holds back {} at most)",
            cage.mode,
            count(collecting.files, exact),
            count(collecting.recalls, exact),
            bytes(collecting.most_held, exact)
        ),
    }
}

fn refused(cage: &CageReport, exact: bool) -> String {
    let refused = cage.refused;
    let kinds = [
        ("size", refused.size),
        ("inodes", refused.inodes),
        ("user limits", refused.user),
        ("directory limits", refused.directory),
    ];
    let kinds: Vec<String> =
        kinds.iter().filter(|(_, n)| *n > 0).map(|(kind, n)| format!("{kind} {}", count(*n, exact))).collect();
    let total = count(refused.total(), exact);
    if kinds.is_empty() { total } else { format!("{total} ({})", kinds.join(", ")) }
}

fn when_full(cage: &CageReport, exact: bool) -> String {
    match cage.dropped.bytes {
        0 => cage.when_full.clone(),
        dropped => format!(
            "{} ({} dropped, {} whole files)",
            cage.when_full,
            bytes(dropped, exact),
            count(cage.dropped.files, exact)
        ),
    }
}

fn users(cage: &CageReport, exact: bool) -> String {
    if cage.users.is_empty() {
        return String::new();
    }
    let row = |user: &nacre_daemon::cage::report::UserReport| {
        vec![user.user.clone(), bytes(user.used, exact), optional(user.limit, exact)]
    };
    let rows: Vec<Vec<String>> = cage.users.iter().map(row).collect();
    let headings = [("USER", Align::Left), ("USED", Align::Right), ("LIMIT", Align::Right)];
    format!("\n{}", columns::aligned(&headings, &rows, false))
}

fn directories(cage: &CageReport, exact: bool) -> String {
    if cage.directories.is_empty() {
        return String::new();
    }
    let row = |group: &nacre_daemon::cage::report::DirectoryReport| {
        vec![group.path.clone(), bytes(group.used, exact), bytes(group.limit, exact)]
    };
    let rows: Vec<Vec<String>> = cage.directories.iter().map(row).collect();
    let headings = [("DIRECTORY", Align::Left), ("USED", Align::Right), ("LIMIT", Align::Right)];
    format!("\n{}", columns::aligned(&headings, &rows, false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_daemon::cage::report::{CollectingReport, DirectoryReport, DroppedReport, RefusedReport, UserReport};

    fn cage() -> CageReport {
        CageReport {
            directory: "/var/log/nginx".to_owned(),
            mountpoint: "/var/log/nginx".to_owned(),
            engine: "fuse".to_owned(),
            engine_reason: "asked for".to_owned(),
            mode: "collected".to_owned(),
            attached: true,
            when_full: "deny".to_owned(),
            limit: Some(10 << 30),
            used: (2 << 30) + (512 << 20),
            free: (7 << 30) + (512 << 20),
            inode_limit: Some(100_000),
            inodes: Some(12_345),
            accounting: "exact".to_owned(),
            pid: 7,
            uptime: 90,
            ..CageReport::default()
        }
    }

    #[test]
    fn scripts_get_exact_columns() {
        let columns = Some(["name", "limit", "used", "free", "use%", "inodes", "refused"].map(str::to_owned).to_vec());
        let view = View { json: false, scripted: true, exact: true, columns, everybody: false };
        let text = columns::table(&[cage()], &choose(&view).unwrap(), &view, false);
        assert_eq!(text, "/var/log/nginx\t10737418240\t2684354560\t8053063680\t25\t12345\t0\n");
        let wrong = View { columns: Some(vec!["bogus".to_owned()]), ..View::default() };
        assert_eq!(choose(&wrong).err().map(|failure| failure.exit), Some(nacre_daemon::failure::Exit::Usage));
        let all = View { columns: Some(vec!["all".to_owned()]), ..View::default() };
        assert_eq!(choose(&all).unwrap().len(), COLUMNS.len());
    }

    #[test]
    fn people_get_headings_and_short_sizes() {
        let view = View::default();
        let unlimited = CageReport { directory: "/x".to_owned(), limit: None, inodes: None, ..cage() };
        let text = columns::table(&[cage(), unlimited], &choose(&view).unwrap(), &view, false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "NAME            LIMIT   USED   FREE  USE%  INODES  REFUSED  ENGINE  MODE");
        assert_eq!(lines[1], "/var/log/nginx    10G  2.50G  7.50G   25%   12.3k        0  fuse    collected");
        assert_eq!(lines[2], "/x                  -  2.50G  7.50G     -       -        0  fuse    collected");
    }

    #[test]
    fn a_cage_in_full() {
        let mut cage = cage();
        cage.soft = Some(8 << 30);
        cage.collecting =
            Some(CollectingReport { files: 3, recalls: 1, most_held: 64 << 20, ..CollectingReport::default() });
        cage.refused = RefusedReport { size: 3, user: 1, ..RefusedReport::default() };
        cage.when_full = "drop-oldest".to_owned();
        cage.dropped = DroppedReport { files: 2, bytes: 5 << 20 };
        cage.users = vec![UserReport { user: "www-data".to_owned(), uid: 33, used: 2 << 30, limit: Some(3 << 30) }];
        cage.directories = vec![DirectoryReport { path: "a".to_owned(), used: 1 << 20, limit: 2 << 20 }];
        let text = detail(&cage, false);
        for line in [
            "limit         10G",
            "used          2.50G (25%)",
            "inodes        12.3k of 100k",
            "refused       4 (size 3, user limits 1)",
            "when full     drop-oldest (5M dropped, 2 whole files)",
            "soft limit    8G (not reached)",
            "engine        fuse (asked for)",
            "mode          collected (3 files, 1 recalls, the kernel holds back 64M at most)",
            "www-data    2G     3G",
            "a            1M     2M",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn full_means_full() {
        let of = |used, limit| CageReport { used, limit: Some(limit), ..CageReport::default() }.percent();
        assert_eq!(of(0, 100), Some(0));
        assert_eq!(of(1, 1_000_000), Some(1));
        assert_eq!(of(999_999, 1_000_000), Some(99));
        assert_eq!(of(1_000_000, 1_000_000), Some(100));
        assert_eq!(of(3_000_000, 1_000_000), Some(300));
        assert_eq!(of(u64::MAX, 1), Some(u64::MAX));
        assert_eq!(of(5, 0), Some(100));
        assert_eq!(CageReport::default().percent(), None);
    }
}
