//! Formats values for people: sizes, ratios, dates. Pure except for the time zone.

use nacre_pool::properties::dataset_property;
use nacre_sys::local_time::local_time;

const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Formats a time in the local time zone, as ZFS does: `Fri Nov 20 23:15 2026`.
pub fn date(seconds: i64) -> String {
    let Ok(time) = local_time(seconds) else { return seconds.to_string() };
    let day = DAYS.get(time.weekday as usize).copied().unwrap_or_default();
    let month = MONTHS.get(time.month.saturating_sub(1) as usize).copied().unwrap_or_default();
    format!("{day} {month} {:>2} {:>2}:{:02} {}", time.day, time.hour, time.minute, time.year)
}

/// Formats a canonical value of a property, for people or exactly.
pub fn shown(property: &str, value: &str, exact: bool) -> String {
    if exact {
        return value.to_owned();
    }
    match property {
        "creation" | "snapshots_changed" => value.parse().map_or_else(|_| value.to_owned(), date),
        "compressratio" | "refcompressratio" => format!("{value}x"),
        _ => dataset_property(property).map_or_else(|_| value.to_owned(), |known| known.human(value)),
    }
}
