//! `snapshot` by a schedule: one run takes a snapshot with a dated name and destroys snapshots of
//! earlier runs that the rule does not keep.
//!
//! Invariants:
//! - Only snapshots of the same label are considered: those that carry [`PROPERTY`] as a local
//!   value and still have the name that they got. One that was renamed, or has lost the property,
//!   is kept.
//! - The order is that in which they were taken, never that of their dates. A clock that jumps
//!   moves the new snapshot into another period and no other, so a run destroys at most one
//!   snapshot for each number of the rule, in addition to snapshots that could not be destroyed
//!   before.
//! - The snapshot of the run itself stays, and nothing is destroyed where it could not be taken.

use std::collections::HashSet;

use nacre_pool::Txg;
use nacre_pool::catalog::{PropertyRow, PropertySource, SnapshotRow};
use nacre_pool::names::Name;
use serde::{Deserialize, Serialize};

use super::destroying::{Doom, ToDestroy, carry_out, told};
use super::making::{ToSnapshot, settled, snapshot};
use super::objects::Objects;
use crate::{Imported, Kind, Mounts, Refusal, clock};

/// The property with the label for which a snapshot was taken.
pub const PROPERTY: &str = "nacre:schedule";

/// A kind of period of a retention rule. Periods are in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Period {
    /// Quarters of hours.
    Frequent,
    /// Hours.
    Hourly,
    /// Days.
    Daily,
    /// Weeks, which begin on Monday.
    Weekly,
    /// Months.
    Monthly,
    /// Years.
    Yearly,
}

impl Period {
    /// All, the shortest first.
    pub const ALL: [Period; 6] = [Self::Frequent, Self::Hourly, Self::Daily, Self::Weekly, Self::Monthly, Self::Yearly];

    /// Returns its name.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Frequent => "frequent",
            Self::Hourly => "hourly",
            Self::Daily => "daily",
            Self::Weekly => "weekly",
            Self::Monthly => "monthly",
            Self::Yearly => "yearly",
        }
    }

    /// Number of the period in which a moment (seconds since 1970) lies.
    fn number(self, seconds: i64) -> i64 {
        let days = seconds.div_euclid(86_400);
        match self {
            Self::Frequent => seconds.div_euclid(900),
            Self::Hourly => seconds.div_euclid(3600),
            Self::Daily => days,
            // The first day of 1970 was a Thursday.
            Self::Weekly => (days + 3).div_euclid(7),
            Self::Monthly => {
                let (year, month, _) = civil(days);
                year * 12 + month
            }
            Self::Yearly => civil(days).0,
        }
    }
}

/// A run of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToSchedule {
    /// The file systems.
    pub names: Vec<String>,
    /// Includes all descendants.
    pub recursive: bool,
    /// Prefix of the names of the snapshots; snapshots of other labels are ignored.
    pub label: String,
    /// For each kind of period: the number of newest periods with snapshots of which the last one is kept.
    pub keep: Vec<(Period, u64)>,
    /// User properties of each new snapshot.
    pub properties: Vec<(String, String)>,
    /// Dry run: only reports the actions.
    pub dry: bool,
    /// The steps to carry out.
    #[serde(default)]
    pub part: SchedulePart,
}

/// Steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulePart {
    /// All.
    #[default]
    Whole,
    /// Takes snapshots, destroys none.
    Take,
    /// Destroys snapshots, takes none; snapshots that were received with the property are included.
    Prune,
}

/// Result of a run, or of a dry run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduled {
    /// The snapshots that were taken.
    pub taken: Vec<String>,
    /// The snapshots that were destroyed.
    pub destroyed: Vec<String>,
    /// Snapshots that the rule does not keep but that stay, each with the reason.
    pub stay: Vec<(String, String)>,
}

/// Year, month and day of a day since 1970, by the rule of the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    // Counted from the first of March, so that the leap day is the last of its year.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (year, month, day) = (era * 400 + year, month, day - (153 * month + 2) / 5 + 1);
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

/// The name of a snapshot that is taken at a moment: `LABEL-2026-11-25T21:28:56Z`.
fn dated(label: &str, seconds: i64) -> String {
    let (year, month, day) = civil(seconds.div_euclid(86_400));
    let of_day = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{label}-{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Whether a name is made by [`dated`], with or without a number after it.
fn is_dated(label: &str, name: &str) -> bool {
    let Some(rest) = name.strip_prefix(label) else { return false };
    let form = b"-0000-00-00T00:00:00Z";
    let fits = |(there, wanted): (u8, &u8)| if *wanted == b'0' { there.is_ascii_digit() } else { there == *wanted };
    rest.len() >= form.len()
        && rest.bytes().zip(form).all(fits)
        && rest.get(form.len()..).is_some_and(|more| more.is_empty() || more.starts_with('-'))
}

/// Returns which snapshots a rule keeps; `taken` are their times, in the order of taking.
fn kept(taken: &[i64], keep: &[(Period, u64)]) -> HashSet<usize> {
    // The newest stays by any rule.
    let mut kept: HashSet<usize> = taken.len().checked_sub(1).into_iter().collect();
    for (period, most) in keep {
        let mut found = HashSet::new();
        for (place, seconds) in taken.iter().enumerate().rev() {
            if found.len() as u64 == *most {
                break;
            }
            if found.insert(period.number(*seconds)) {
                kept.insert(place);
            }
        }
    }
    kept
}

/// Whether a snapshot was taken by a schedule of this label, and is not yet to be destroyed.
fn is_of(what: &ToSchedule, row: &SnapshotRow, properties: &[(String, PropertyRow)]) -> bool {
    let (label, received) = (&what.label, what.part == SchedulePart::Prune);
    let own = |(name, row): &(String, PropertyRow)| {
        name == PROPERTY && (received || row.source == PropertySource::Local) && row.value == *label
    };
    is_dated(label, &row.name) && !row.deferred && properties.iter().any(own)
}

/// Carries out one run: takes the snapshots, all of them at one moment, then destroys those that
/// the rule does not keep.
pub(super) fn run(pool: &Imported, mounts: &dyn Mounts, what: &ToSchedule) -> Result<Scheduled, Refusal> {
    let invalid = |why: String| Refusal::new(Kind::Invalid, format!("cannot take snapshots by a schedule: {why}"));
    if what.keep.iter().all(|(_, most)| *most == 0) {
        return Err(invalid("nothing says what is to be kept".to_owned()).next("for example --keep-daily 30"));
    }
    let first = what.names.first().map_or("", String::as_str);
    Name::snapshot(&format!("{first}@{}", dated(&what.label, 0))).map_err(|error| invalid(error.to_string()))?;
    let now = i64::try_from(clock::now()).unwrap_or(i64::MAX);
    let (ids, name) = {
        let mut objects = Objects::now(pool, mounts);
        let ids = selected(&objects, what)?;
        let name = free_name(&mut objects, &ids, &dated(&what.label, now))?;
        (ids, name)
    };
    let mut done = Scheduled::default();
    if !what.dry && what.part != SchedulePart::Prune {
        let mut properties = what.properties.clone();
        properties.push((PROPERTY.to_owned(), what.label.clone()));
        let names = what.names.iter().map(|of| format!("{of}@{name}")).collect();
        snapshot(pool, mounts, &ToSnapshot { names, recursive: what.recursive, properties })?;
    }
    let mut left_over = Doom::default();
    {
        let mut objects = Objects::now(pool, mounts);
        // A file system that was made or destroyed since then is left to the next run.
        for id in ids {
            if !objects.catalog.is_there(id, None)? {
                continue;
            }
            let whole = objects.known(id)?.name.clone();
            if what.part != SchedulePart::Prune {
                done.taken.push(format!("{whole}@{name}"));
            }
            if what.part == SchedulePart::Take {
                continue;
            }
            let found = left_over_of(&objects, id, &whole, what, now, &mut done)?;
            if !found.is_empty() {
                left_over.snapshots.push((id, found));
            }
        }
    }
    destroy(pool, mounts, left_over, what.dry, &mut done)?;
    Ok(done)
}

/// Returns the selected file systems, each once.
fn selected(objects: &Objects<'_>, what: &ToSchedule) -> Result<Vec<u64>, Refusal> {
    let mut ids = Vec::new();
    for name in &what.names {
        let id = objects.filesystem("open", name)?;
        ids.extend(if what.recursive { settled(objects, objects.descendants(id)?)? } else { vec![id] });
    }
    Ok(ids)
}

/// Returns the name, with a number after it where it is in use: a clock that was set back gives the
/// same second again.
fn free_name(objects: &mut Objects<'_>, ids: &[u64], name: &str) -> Result<String, Refusal> {
    let mut candidate = name.to_owned();
    for number in 2_u64.. {
        let mut free = true;
        for id in ids {
            free = free && objects.catalog.snapshot_named(*id, &candidate)?.is_none();
        }
        if free {
            break;
        }
        candidate = format!("{name}-{number}");
    }
    Ok(candidate)
}

/// Returns the snapshots of a file system that the rule does not keep; those that cannot be destroyed are reported.
fn left_over_of(
    objects: &Objects<'_>,
    id: u64,
    whole: &str,
    what: &ToSchedule,
    now: i64,
    done: &mut Scheduled,
) -> Result<Vec<(Txg, String)>, Refusal> {
    let mut own = Vec::new();
    for (txg, row) in objects.catalog.snapshot_rows(id)? {
        if is_of(what, &row, &objects.catalog.snapshot_properties(id, txg)?) {
            own.push((txg, row));
        }
    }
    let mut moments: Vec<i64> = own.iter().map(|(_, row)| row.created_at).collect();
    if what.dry && what.part == SchedulePart::Whole {
        moments.push(now);
    }
    let kept = kept(&moments, &what.keep);
    let mut found = Vec::new();
    for (_, (txg, row)) in own.into_iter().enumerate().filter(|(place, _)| !kept.contains(place)) {
        let why = match (row.holds, row.clones) {
            (0, 0) => {
                found.push((txg, row.name));
                continue;
            }
            (0, _) => "it has clones",
            _ => "it is held",
        };
        done.stay.push((format!("{whole}@{}", row.name), why.to_owned()));
    }
    Ok(found)
}

/// Destroys the snapshots: all at once, or one after the other where one of them is being read.
fn destroy(pool: &Imported, mounts: &dyn Mounts, doom: Doom, dry: bool, done: &mut Scheduled) -> Result<(), Refusal> {
    if doom.snapshots.is_empty() {
        return Ok(());
    }
    let names = told(&mut Objects::now(pool, mounts), &doom)?.names;
    let by_name = |name: &str| ToDestroy { target: name.to_owned(), ..ToDestroy::default() };
    let first = names.first().map_or("", String::as_str);
    if dry || carry_out(pool, mounts, &doom, &by_name(first)).is_ok() {
        done.destroyed = names;
        return Ok(());
    }
    for (id, snapshots) in doom.snapshots {
        for one in snapshots {
            let one = Doom { snapshots: vec![(id, vec![one])], ..Doom::default() };
            let name = told(&mut Objects::now(pool, mounts), &one)?.names.concat();
            match carry_out(pool, mounts, &one, &by_name(&name)) {
                Ok(()) => done.destroyed.push(name),
                Err(refusal) if refusal.kind == Kind::Busy => done.stay.push((name, refusal.what)),
                Err(refusal) => return Err(refusal),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_their_dates() {
        for (seconds, wanted) in [
            (0, "a-1970-01-01T00:00:00Z"),
            (951_782_399, "a-2000-02-28T23:59:59Z"),
            (951_782_400, "a-2000-02-29T00:00:00Z"),
            (4_107_542_399, "a-2100-02-28T23:59:59Z"),
            (4_107_542_400, "a-2100-03-01T00:00:00Z"),
            (1_795_641_599, "a-2026-11-25T21:19:59Z"),
        ] {
            assert_eq!(dated("a", seconds), wanted);
            assert!(is_dated("a", wanted) && is_dated("a", &format!("{wanted}-2")) && !is_dated("b", wanted));
        }
        for other in
            ["a", "a-", "a-2026-11-25", "a-2026-11-25T21:19:59", "a-2026-11-25T21:19:59Zx", "a-x026-11-25T21:19:59Z"]
        {
            assert!(!is_dated("a", other), "{other}");
        }
        // Monday, 30 November 2026, begins a week.
        let monday = 1_795_996_800;
        assert_eq!(Period::Weekly.number(monday), Period::Weekly.number(monday - 1) + 1);
        assert_eq!(Period::Weekly.number(monday), Period::Weekly.number(monday + 7 * 86_400 - 1));
    }

    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;

    /// Snapshots that exist after runs at these moments, each of which destroys those that the rule does not keep.
    fn after(runs: impl IntoIterator<Item = i64>, keep: &[(Period, u64)]) -> Vec<i64> {
        let mut there: Vec<i64> = Vec::new();
        for now in runs {
            there.push(now);
            let before = there.len();
            let kept = kept(&there, keep);
            there = there.into_iter().enumerate().filter(|(place, _)| kept.contains(place)).map(|(_, at)| at).collect();
            assert!(there.last() == Some(&now) && before - there.len() <= 1 + keep.len(), "{now}: {before} {there:?}");
        }
        there
    }

    #[test]
    fn a_rule_keeps_the_last_of_each_period() {
        let hourly = |from: i64, hours: i64| (0..hours).map(move |hour| from + hour * HOUR + 120);
        let rule = [(Period::Hourly, 24), (Period::Daily, 30), (Period::Monthly, 12)];
        let there = after(hourly(0, 24 * 400), &rule);
        // 24 hours are those of the last day; of the 30 days one is among them; of the 12 months two.
        assert_eq!(there.len(), 24 + 29 + 10, "{there:?}");
        let last_day = 399 * DAY;
        assert_eq!(there.iter().filter(|at| **at >= last_day).count(), 24);
        // The last of each day before.
        assert_eq!(there.iter().filter(|at| **at % DAY == 23 * HOUR + 120 && **at < last_day).count(), 39);
        assert_eq!(after(hourly(0, 100), &[(Period::Yearly, 0), (Period::Hourly, 3)]).len(), 3);
    }

    #[test]
    fn a_clock_that_jumps_destroys_no_more_than_the_numbers_say() {
        let rule = [(Period::Hourly, 4), (Period::Daily, 3)];
        let before: Vec<i64> = (0..100).map(|hour| hour * HOUR).collect();
        let good = after(before.iter().copied(), &rule);
        // A year ahead once, back again: each run pushes out one of each number at most.
        for jumps in [vec![365 * DAY, 100 * HOUR], vec![-365 * DAY], vec![0], vec![i64::MAX, i64::MIN]] {
            let there = after(before.iter().copied().chain(jumps.iter().copied()), &rule);
            let lost = good.iter().filter(|at| !there.contains(at)).count();
            assert!(lost <= rule.len() * jumps.len() && there.len() >= 4, "{jumps:?}: {good:?} {there:?}");
        }
        // A clock that stands still replaces the snapshot of its period, and no other.
        let stuck = after(before.iter().copied().chain([99 * HOUR + 1; 50]), &rule);
        assert_eq!(stuck.len(), good.len());
        assert_eq!(stuck[..stuck.len() - 1], good[..good.len() - 1]);
        // One that has gone back for good: the new snapshots are the newest all the same.
        let back = after(before.iter().copied().chain((0..10).map(|hour| hour * HOUR - 9000 * DAY)), &rule);
        assert!(back.ends_with(&[
            6 * HOUR - 9000 * DAY,
            7 * HOUR - 9000 * DAY,
            8 * HOUR - 9000 * DAY,
            9 * HOUR - 9000 * DAY
        ]));
    }
}
