//! The retention options `--keep-daily 30` and the others, as `snapshot` and `replicate` take them.
//! Pure.

use clap::{Arg, ArgMatches, value_parser};
use nacre_admin::fs::Period;

/// Reads the retention options.
pub fn keep_of(matches: &ArgMatches) -> Vec<(Period, u64)> {
    let all = Period::ALL.into_iter();
    all.filter_map(|period| Some((period, *matches.get_one::<u64>(&format!("keep-{}", period.word()))?))).collect()
}

/// Returns the option for a period: the number of newest periods whose last snapshot is kept.
pub fn keep(period: Period) -> Arg {
    let (name, help) = match period {
        Period::Frequent => ("keep-frequent", "Keep the last snapshot of the N newest quarters of hours that have any"),
        Period::Hourly => ("keep-hourly", "The same of hours"),
        Period::Daily => ("keep-daily", "The same of days (UTC, as all periods)"),
        Period::Weekly => ("keep-weekly", "The same of weeks, which begin on Monday"),
        Period::Monthly => ("keep-monthly", "The same of months"),
        Period::Yearly => ("keep-yearly", "The same of years"),
    };
    Arg::new(name).long(name).value_name("N").value_parser(value_parser!(u64)).help(help)
}
