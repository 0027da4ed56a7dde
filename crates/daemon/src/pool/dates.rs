//! Dates as ZFS' programs print them, in the local time zone.

use nacre_sys::local_time::local_time;

const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

fn seconds(at: u64) -> i64 {
    i64::try_from(at).unwrap_or(i64::MAX)
}

/// Formats a date as ctime(3): `Fri Nov 20 23:11:59 2026`.
pub fn long(at: u64) -> String {
    let Ok(time) = local_time(seconds(at)) else { return at.to_string() };
    let day = DAYS.get(time.weekday as usize).copied().unwrap_or("???");
    let month = MONTHS.get(time.month.saturating_sub(1) as usize).copied().unwrap_or("???");
    format!("{day} {month} {:2} {:02}:{:02}:{:02} {}", time.day, time.hour, time.minute, time.second, time.year)
}

/// Formats a date as in histories: `2026-11-20.23:11:59`.
pub fn dotted(at: u64) -> String {
    let Ok(time) = local_time(seconds(at)) else { return at.to_string() };
    format!("{}-{:02}-{:02}.{:02}:{:02}:{:02}", time.year, time.month, time.day, time.hour, time.minute, time.second)
}

/// Formats a date as in lists of events: `Nov 20 2026 23:11:59`.
pub fn event(at: u64) -> String {
    let Ok(time) = local_time(seconds(at)) else { return at.to_string() };
    let month = MONTHS.get(time.month.saturating_sub(1) as usize).copied().unwrap_or("???");
    format!("{month} {:2} {} {:02}:{:02}:{:02}", time.day, time.year, time.hour, time.minute, time.second)
}

/// Formats a duration: `1 days 02:03:04`, `00:00:05`.
pub fn length(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    if days > 0 { format!("{days} days {clock}") } else { clock }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time() {
        assert_eq!(length(5), "00:00:05");
        assert_eq!(length(93_784), "1 days 02:03:04");
    }

    #[test]
    fn dates_have_their_form() {
        // The 15th of November 2023, noon in Greenwich: the same month everywhere.
        assert!(dotted(1_700_049_600).starts_with("2023-11-1"));
        assert!(long(1_700_049_600).ends_with(" 2023"));
        assert!(event(1_700_049_600).starts_with("Nov 1"));
    }
}
