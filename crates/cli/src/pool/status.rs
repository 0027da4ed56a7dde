//! `nacre pool status`: the health of a pool in ZFS' form. Pure.

use super::{
    changing,
    form::PoolForm,
    scripts::Columns,
    tree::{self, Vdev},
};
use nacre_admin::pool::{
    DeviceFigures, Figures, Phase, ScrubReport, Status, TrimReport,
    figures::{RequestFigures, percent},
};
use nacre_daemon::pool::{dates, expected::UNAVAILABLE};
use nacre_pool::properties::size::human_bytes;

/// Content and form of `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusView {
    pub form: PoolForm,
    /// As JSON, devices stand next to the root vdev.
    pub flat: bool,
    /// List damaged files by name.
    pub verbose: bool,
    /// Show the progress of TRIM for each device.
    pub trim: bool,
    /// Show only unhealthy pools.
    pub only_ill: bool,
    /// Show only unhealthy devices.
    pub ill_devices: bool,
    /// Programs that report more about each device.
    pub scripts: Option<String>,
}

/// Returns whether something is wrong with a pool.
pub fn is_ill(status: &Status) -> bool {
    let figures = &status.figures;
    let devices = there(figures).any(|device| device_is_ill(figures, device));
    let groups = figures.groups.iter().any(|group| group.state != "ONLINE");
    is_lost(figures) || figures.suspended.is_some() || devices || groups || status.damaged > 0
}

/// Returns the devices that belong to a pool.
fn there(figures: &Figures) -> impl Iterator<Item = &DeviceFigures> {
    figures.devices.iter().filter(|device| device.role != "removed")
}

/// Returns whether something is wrong with a device.
pub fn device_is_ill(figures: &Figures, device: &DeviceFigures) -> bool {
    device_state(figures, device) != "ONLINE" || errors(device) != [0; 3]
}

/// Returns the errors of a device: reads, writes, checksums.
pub fn errors(device: &DeviceFigures) -> [u64; 3] {
    [device.counts.read_errors, device.counts.write_errors, device.counts.checksum_errors]
}

/// Returns the sum of the errors of all devices without redundancy. Errors of devices in groups are
/// repaired from the others; unrecoverable ones are listed as damaged files.
pub fn all_errors(figures: &Figures) -> [u64; 3] {
    let alone = tree::tops(figures).into_iter().filter_map(|top| match top.vdev {
        Vdev::Leaf(device) => Some(device),
        _ => None,
    });
    alone.map(errors).fold([0; 3], |[a, b, c], [d, e, f]| [a + d, b + e, c + f])
}

/// Returns whether the process that owned it has ended without an export.
fn is_lost(figures: &Figures) -> bool {
    figures.health == UNAVAILABLE
}

/// Returns the time since the import where it is below an hour: the requests of the monthly cost
/// are extrapolated from it.
fn of_minutes(figures: &Figures) -> String {
    match figures.now.saturating_sub(figures.since) / 60 {
        minutes @ 0..60 => format!(", {} minutes ago", minutes.max(1)),
        _ => String::new(),
    }
}

/// Returns the state of a device of a pool.
pub fn device_state(figures: &Figures, device: &DeviceFigures) -> &'static str {
    if is_lost(figures) { UNAVAILABLE } else { device.health() }
}

/// Formats the status of a pool. `more`: columns of the programs.
pub fn text(status: &Status, shown: &StatusView, more: &Columns) -> String {
    let figures = &status.figures;
    let mut text = format!("  pool: {}\n state: {}\n", figures.name, figures.health);
    for (heading, words) in advice(status) {
        text.push_str(&format!("{heading}: {}\n", words.replace('\n', "\n\t")));
    }
    if let Some(scan) = resilver(&status.resilver, figures.now) {
        text.push_str(&format!("  scan: {scan}\n"));
    }
    if let Some(scan) = scan(&status.scrub, figures.now) {
        text.push_str(&format!("  scan: {scan}\n"));
    }
    if let Some((heading, words)) = changing::status(&status.reshape, figures.now) {
        text.push_str(&format!("{heading}: {words}\n"));
    }
    if let Some(requests) = there(figures).find_map(|device| device.requests) {
        text.push_str(&format!(" store: {}\n", asked(&requests)));
    }
    if let Some((seconds, why)) = there(figures).find_map(|device| device.silence.as_ref()) {
        text.push_str(&format!("\tno answer for {seconds} s, and requests are made again: {why}\n"));
    }
    if let Some(why) = &figures.log_trouble {
        text.push_str(&format!("   log: none is kept on this machine, and each fsync waits for the store: {why}\n"));
    }
    if let Some(month) = figures.month_cost() {
        let (all, stored) = (month.stored + month.requests, human_bytes(figures.allocated));
        text.push_str(&format!(
            "  cost: {all:.2} a month: {:.2} for {stored} there, {:.2} for requests as since the import{}\n",
            month.stored,
            month.requests,
            of_minutes(figures)
        ));
    }
    if let Some(survives) = &figures.survives {
        text.push_str(&format!("survives: {}\n", survives.text()));
    }
    if let Some(follows) = &figures.follows {
        let age = figures.now.saturating_sub(follows.time);
        text.push_str(&format!(
            "follow: root {}, committed {age} s ago by the machine that writes\n",
            follows.generation
        ));
        if let Some(error) = &follows.error {
            text.push_str(&format!("\ta newer one is not to be seen yet: {error}\n"));
        }
    }
    text.push_str("config:\n\n");
    text.push_str(&config(figures, shown, more));
    if is_lost(figures) {
        return text;
    }
    text.push('\n');
    text.push_str(&match (status.damaged, shown.verbose) {
        (0, _) => "errors: No known data errors\n".to_owned(),
        (damaged, false) => format!("errors: {damaged} data errors, use '-v' for a list\n"),
        (_, true) => {
            let files: Vec<String> = status.names.iter().map(|name| format!("        {name}\n")).collect();
            format!("errors: Permanent errors have been detected in the following files:\n\n{}", files.concat())
        }
    });
    text
}

/// Describes the requests to a bucket since the import.
fn asked(requests: &RequestFigures) -> String {
    let RequestFigures { puts, gets, lists, deletes, again, sent, received, kept } = *requests;
    let (sent, received) = (human_bytes(sent), human_bytes(received));
    let again = if again == 0 { String::new() } else { format!(", {again} of them once more") };
    let kept = kept.map_or_else(String::new, |kept| {
        let (bytes, limit) = (human_bytes(kept.bytes), human_bytes(kept.limit));
        format!(
            "\n  kept: {bytes} of at most {limit} on this machine; {} parts found there, {} not",
            kept.hits, kept.misses
        )
    });
    format!("{puts} PUT, {gets} GET, {lists} LIST, {deletes} DELETE{again}; {sent} sent, {received} received{kept}")
}

/// Returns the problem of a pool and the recommended action.
pub fn advice(status: &Status) -> Vec<(&'static str, String)> {
    let figures = &status.figures;
    if is_lost(figures) {
        let why = figures.ended.as_ref().map(|why| format!("\n{why}.")).unwrap_or_default();
        let what = format!(
            "The process that owned the pool (number {}, since {}) has ended without\nexporting it. What was synced is there; its mounts answer nobody.{why}",
            figures.process,
            dates::long(figures.since)
        );
        let cure = format!(
            "Import it again with 'nacre pool import {0}', which mounts it again as well.\n'nacre pool export -f {0}' gives it up.",
            figures.name
        );
        return vec![("status", what), ("action", cure)];
    }
    if let Some(why) = figures.suspended.as_ref().filter(|_| figures.waits) {
        let cure = format!(
            "Cure the device, or make room where it lies: what waits goes on by itself, 'nacre pool clear {0}' tries again at once.\n'nacre pool export -f {0}' gives it up.",
            figures.name
        );
        return vec![
            ("status", format!("A write has failed, and everybody waits until it can be made (failmode=wait).\n{why}")),
            ("action", cure),
        ];
    }
    if let Some(why) = &figures.suspended {
        return vec![
            (
                "status",
                format!("A write has failed, and nothing is accepted any more. What was durable before is.\n{why}"),
            ),
            (
                "action",
                format!(
                    "Cure the device. Then let the pool go with 'nacre pool export -f {0}' and import it again.",
                    figures.name
                ),
            ),
        ];
    }
    let survives = !figures.groups.is_empty() && figures.groups.iter().all(|group| group.survives(&figures.devices));
    let deleted = there(figures).find_map(|device| Some((device, device.deleted.as_ref()?)));
    if let Some((device, open)) = deleted.filter(|_| !survives) {
        return vec![
            (
                "status",
                format!(
                    "The file {} was deleted.  All that is in the pool is there as long\nas the pool is imported, and lost when it is let go.",
                    device.path
                ),
            ),
            ("action", nacre_admin::pool::rescue(&figures.name, open)),
        ];
    }
    if let Some(advice) = of_groups(figures).filter(|_| status.damaged == 0) {
        return advice;
    }
    if status.damaged > 0 {
        return vec![
            (
                "status",
                "One or more devices has experienced an error resulting in data\ncorruption.  Applications may be affected.".to_owned(),
            ),
            ("action", "Restore the file in question if possible.  Otherwise restore the\nentire pool from backup.".to_owned()),
        ];
    }
    if is_ill(status) {
        return vec![
            (
                "status",
                "One or more devices has experienced an error.  Nothing that is stored now\nis known to be damaged."
                    .to_owned(),
            ),
            (
                "action",
                format!(
                    "Verify with 'nacre pool scrub {0}', and forget the errors with\n'nacre pool clear {0}'.",
                    figures.name
                ),
            ),
        ];
    }
    if figures.unwritten > 0 {
        return vec![
            (
                "status",
                format!(
                    "Metadata could be written to one of its two places only, {} times.  Nothing is lost:\n{} of it waits for another copy elsewhere.",
                    figures.unwritten,
                    human_bytes(figures.lies_once)
                ),
            ),
            ("action", "Look after the device.".to_owned()),
        ];
    }
    if !(figures.redundant_metadata && figures.ordered_names) {
        let lacking = if figures.redundant_metadata { "" } else { ": metadata has no second copy" };
        return vec![
            (
                "status",
                format!(
                    "Some supported features are not enabled on the pool{lacking}.\nThe pool can be used all the same."
                ),
            ),
            (
                "action",
                format!(
                    "Enable them with 'nacre pool upgrade {}'.  Programs that do not know\nthem cannot import the pool any more.",
                    figures.name
                ),
            ),
        ];
    }
    if figures.lies_once > 0 {
        let left = human_bytes(figures.lies_once);
        return vec![("status", format!("Second copies of metadata are being written: {left} to go."))];
    }
    Vec::new()
}

/// Returns the problem of devices whose groups still work without them.
fn of_groups(figures: &Figures) -> Option<Vec<(&'static str, String)>> {
    let is = |state: &str| there(figures).any(|device| device.standing == state);
    let (status, action) = if there(figures).any(|device| device.deleted.is_some()) {
        (
            "One or more devices has been removed by the administrator.\nSufficient replicas exist for the pool to continue functioning in a\ndegraded state.",
            format!("Replace the device with 'nacre pool replace {}'.", figures.name),
        )
    } else if is("FAULTED") {
        (
            "One or more devices are faulted in response to persistent errors.\nSufficient replicas exist for the pool to continue functioning in a\ndegraded state.",
            format!(
                "Replace the faulted device, or use 'nacre pool clear {}' to mark the device\nrepaired.",
                figures.name
            ),
        )
    } else if is("UNAVAIL") {
        (
            "One or more devices could not be opened.  Sufficient replicas exist for\nthe pool to continue functioning in a degraded state.",
            format!("Attach the missing device and online it using 'nacre pool online {}'.", figures.name),
        )
    } else if is("OFFLINE") {
        (
            "One or more devices has been taken offline by the administrator.\nSufficient replicas exist for the pool to continue functioning in a\ndegraded state.",
            format!(
                "Online the device using 'nacre pool online {0}' or replace the device with\n'nacre pool replace {0}'.",
                figures.name
            ),
        )
    } else if there(figures).any(|device| device.resilvering) {
        (
            "One or more devices is currently being resilvered.  The pool will\ncontinue to function, possibly in a degraded state.",
            "Wait for the resilver to complete.".to_owned(),
        )
    } else {
        return None;
    };
    Some(vec![("status", status.to_owned()), ("action", action)])
}

/// Describes a running or finished resilver.
fn resilver(report: &ScrubReport, now: u64) -> Option<String> {
    let repaired = human_bytes(report.repaired);
    Some(match report.phase {
        Phase::Never | Phase::Canceled | Phase::Paused => return None,
        Phase::Finished => {
            let length = dates::length(report.elapsed / 1000);
            let ended = dates::long(report.ended);
            format!("resilvered {repaired} in {length} with {} errors on {ended}", report.errors)
        }
        Phase::Running => {
            let done = percent(report.examined.saturating_mul(100), report.total).min(10_000);
            let speed = report.examined.saturating_mul(1000) / report.elapsed.max(1);
            let left = report.total.saturating_sub(report.examined) / speed.max(1);
            let to_go = match speed == 0 || now == report.started {
                true => ", no estimated completion time".to_owned(),
                false => format!(", {} to go", dates::length(left)),
            };
            format!(
                "resilver in progress since {}\n\t{} / {} scanned at {}/s\n\t{repaired} resilvered, {}.{:02}% done{to_go}",
                dates::long(report.started),
                human_bytes(report.examined),
                human_bytes(report.total),
                human_bytes(speed),
                done / 100,
                done % 100,
            )
        }
    })
}

fn scan(scrub: &ScrubReport, now: u64) -> Option<String> {
    let seconds = scrub.elapsed / 1000;
    Some(match scrub.phase {
        Phase::Never => return None,
        Phase::Finished => {
            let (repaired, ended) = (human_bytes(scrub.repaired), dates::long(scrub.ended));
            format!("scrub repaired {repaired} in {} with {} errors on {ended}", dates::length(seconds), scrub.errors)
        }
        Phase::Canceled => format!("scrub canceled on {}", dates::long(scrub.ended)),
        Phase::Running | Phase::Paused => {
            let done = percent(scrub.examined.saturating_mul(100), scrub.total).min(10_000);
            let head = match scrub.phase {
                Phase::Paused => {
                    format!(
                        "scrub paused since {}\n\tscrub started on {}",
                        dates::long(scrub.ended),
                        dates::long(scrub.started)
                    )
                }
                _ => format!("scrub in progress since {}", dates::long(scrub.started)),
            };
            let speed = scrub.examined.saturating_mul(1000) / scrub.elapsed.max(1);
            let left = scrub.total.saturating_sub(scrub.examined) / speed.max(1);
            let to_go = match scrub.phase {
                Phase::Paused => String::new(),
                _ if speed == 0 || now == scrub.started => ", no estimated completion time".to_owned(),
                _ => format!(", {} to go", dates::length(left)),
            };
            format!(
                "{head}\n\t{} / {} scanned at {}/s\n\t{} repaired, {} errors, {}.{:02}% done{to_go}",
                human_bytes(scrub.examined),
                human_bytes(scrub.total),
                human_bytes(speed),
                human_bytes(scrub.repaired),
                scrub.errors,
                done / 100,
                done % 100,
            )
        }
    })
}

/// Describes the progress of TRIM on a device.
fn trimmed(trim: &TrimReport) -> String {
    let done = percent(trim.passed, trim.total);
    match trim.phase {
        _ if trim.unsupported => "trim unsupported".to_owned(),
        Phase::Never => "untrimmed".to_owned(),
        Phase::Running => format!("{done}% trimmed, started at {}", dates::long(trim.started)),
        Phase::Paused => format!("{done}% trimmed, suspended, started at {}", dates::long(trim.started)),
        Phase::Canceled => format!("{done}% trimmed, canceled at {}", dates::long(trim.ended)),
        Phase::Finished => format!("100% trimmed, completed at {}", dates::long(trim.ended)),
    }
}

/// Returns the remark after a device's errors.
fn remark(figures: &Figures, device: &DeviceFigures, shown: &StatusView) -> String {
    let why = match device_state(figures, device) {
        _ if is_lost(figures) => return String::new(),
        "UNAVAIL" => "  cannot open",
        "FAULTED" => "  too many errors",
        _ => "",
    };
    let trim = if shown.trim { format!("  ({})", trimmed(&device.trim)) } else { String::new() };
    why.to_owned() + &trim + if device.resilvering { "  (resilvering)" } else { changing::remark(device) }
}

/// Formats the tree of groups and devices with their errors.
fn config(figures: &Figures, shown: &StatusView, more: &Columns) -> String {
    let wanted = |device: &DeviceFigures| !shown.ill_devices || device_is_ill(figures, device);
    let shown_rows = |(class, heading): (&str, Option<&'static str>)| {
        let rows = tree::rows(figures, class).into_iter();
        let rows: Vec<_> = rows.filter(|(_, vdev)| vdev.devices(figures).into_iter().any(wanted)).collect();
        (heading, rows)
    };
    let parts: Vec<_> = tree::PARTS.into_iter().map(shown_rows).collect();
    let width = parts
        .iter()
        .flat_map(|(_, rows)| rows)
        .map(|(depth, vdev)| vdev.name().chars().count() + 2 * depth)
        .chain(tree::spares(figures).map(|spare| spare.name().chars().count() + 2))
        .chain([figures.name.chars().count(), 10])
        .max()
        .unwrap_or(10);
    let row = |name: &str, state: &str, errors: [String; 3], more: &str| {
        let [read, write, checksum] = errors;
        let line = format!("\t{name:<width$}  {state:<9} {read:>4} {write:>5} {checksum:>5}{more}");
        line.trim_end().to_owned() + "\n"
    };
    let numbers = |errors: [u64; 3]| errors.map(|number| number.to_string());
    let mut text = row("NAME", "STATE", ["READ", "WRITE", "CKSUM"].map(str::to_owned), &more.heading());
    text.push_str(&row(&figures.name, &figures.health, numbers(all_errors(figures)), &more.nothing()));
    for (heading, rows) in parts {
        if let Some(heading) = heading.filter(|_| !rows.is_empty()) {
            text.push_str(&format!("\t{heading}\n"));
        }
        for (depth, vdev) in rows {
            let name = format!("{}{}", "  ".repeat(depth), vdev.name());
            let (errors, more) = match vdev {
                Vdev::Leaf(device) => (errors(device), more.of(&device.path) + &remark(figures, device, shown)),
                Vdev::Group(_) if vdev.state(figures) == UNAVAILABLE && !is_lost(figures) => {
                    ([0; 3], more.nothing() + "  insufficient replicas")
                }
                _ => ([0; 3], more.nothing()),
            };
            text.push_str(&row(&name, vdev.state(figures), numbers(errors), &more));
        }
    }
    if tree::spares(figures).next().is_some() {
        text.push_str("\tspares\n");
    }
    for spare in tree::spares(figures) {
        let state = tree::spare_state(spare);
        let note = if state == "INUSE" { "     currently in use" } else { "" };
        text.push_str(format!("\t{:<width$}  {state}{note}", format!("  {}", spare.name())).trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let devices = vec![DeviceFigures { path: "/srv/a".to_owned(), ..DeviceFigures::default() }];
        let figures = Figures {
            name: "tank".to_owned(),
            health: "ONLINE".to_owned(),
            devices,
            redundant_metadata: true,
            ordered_names: true,
            ..Figures::default()
        };
        Status { figures, ..Status::default() }
    }

    #[test]
    fn a_pool_in_order() {
        let expected = "  pool: tank\n state: ONLINE\nconfig:\n\n\tNAME        STATE     READ WRITE CKSUM\n\ttank        ONLINE       0     0     0\n\t  /srv/a    ONLINE       0     0     0\n\nerrors: No known data errors\n";
        assert_eq!(text(&status(), &StatusView::default(), &Columns::default()), expected);
        assert!(!is_ill(&status()));
    }

    #[test]
    fn groups_are_shown_as_a_tree() {
        let mut figures = tree::tests::mixed();
        figures.health = "DEGRADED".to_owned();
        figures.groups[1].state = "DEGRADED".to_owned();
        (figures.devices[1].standing, figures.devices[1].counts.read_errors) = ("FAULTED".to_owned(), 3);
        figures.devices[2].resilvering = true;
        let mut status = Status { figures, ..Status::default() };
        let expected = "\tNAME        STATE     READ WRITE CKSUM\n\ttank        DEGRADED     0     0     0\n\t  /a        ONLINE       0     0     0\n\t  mirror-1  DEGRADED     0     0     0\n\t    /b      FAULTED      3     0     0  too many errors\n\t    /c      ONLINE       0     0     0  (resilvering)\n";
        let shown = text(&status, &StatusView::default(), &Columns::default());
        assert!(shown.contains(expected), "{shown}");
        assert!(is_ill(&status) && shown.contains("status: One or more devices are faulted"));
        let ill = StatusView { ill_devices: true, ..StatusView::default() };
        let shown = text(&status, &ill, &Columns::default());
        assert!(shown.contains("mirror-1") && shown.contains("/b") && !shown.contains("/c"), "{shown}");
        status.figures.devices[1] = DeviceFigures { path: "/b".to_owned(), ..DeviceFigures::default() };
        let shown = text(&status, &StatusView::default(), &Columns::default());
        assert!(shown.contains("status: One or more devices is currently being resilvered"), "{shown}");
    }

    #[test]
    fn features_that_are_not_enabled_are_told_and_no_illness() {
        let mut status = status();
        status.figures.redundant_metadata = false;
        assert!(!is_ill(&status));
        assert!(
            text(&status, &StatusView::default(), &Columns::default())
                .contains("action: Enable them with 'nacre pool upgrade tank'.")
        );
    }

    #[test]
    fn damage_is_told() {
        let mut status = status();
        status.damaged = 2;
        status.names = vec!["tank:/a".to_owned()];
        assert!(is_ill(&status));
        assert!(
            text(&status, &StatusView::default(), &Columns::default())
                .ends_with("errors: 2 data errors, use '-v' for a list\n")
        );
        assert!(
            text(&status, &StatusView { verbose: true, ..StatusView::default() }, &Columns::default())
                .ends_with("in the following files:\n\n        tank:/a\n")
        );
        status.figures.suspended = Some("writing /srv/a: no".to_owned());
        assert!(
            text(&status, &StatusView::default(), &Columns::default())
                .contains("status: A write has failed, and nothing is accepted any more")
        );
        status.figures.waits = true;
        let waiting = text(&status, &StatusView::default(), &Columns::default());
        assert!(
            waiting.contains("everybody waits until it can be made") && waiting.contains("'nacre pool clear tank'"),
            "{waiting}"
        );
    }

    #[test]
    fn a_scrub_tells_how_far_it_is() {
        let mut status = status();
        status.scrub = ScrubReport {
            phase: Phase::Running,
            total: 1000,
            examined: 250,
            elapsed: 1000,
            started: 5,
            ..ScrubReport::default()
        };
        status.figures.now = 6;
        assert!(
            text(&status, &StatusView::default(), &Columns::default())
                .contains("250B / 1000B scanned at 250B/s\n\t0B repaired, 0 errors, 25.00% done, 00:00:03 to go")
        );
    }
}
