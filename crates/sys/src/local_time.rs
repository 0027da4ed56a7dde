//! Time of day in the user's time zone.

use std::io;

/// Calendar date and time in the local time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// The year, with the century.
    pub year: i64,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    /// 0 to 23.
    pub hour: u32,
    /// 0 to 59.
    pub minute: u32,
    /// 0 to 60.
    pub second: u32,
    /// Days since Sunday.
    pub weekday: u32,
}

/// Converts seconds since 1970 to local time. The time zone is that of `TZ`, or the system's.
///
/// # Errors
/// A year that does not fit (localtime(3): EOVERFLOW).
pub fn local_time(seconds: i64) -> io::Result<LocalTime> {
    let time: libc::time_t = seconds;
    // SAFETY: a `tm` of zeros is a valid value: it has numbers and a pointer that may be null.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values of ours that outlive the call; localtime_r keeps neither.
    let filled = unsafe { libc::localtime_r(&raw const time, &raw mut parts) };
    if filled.is_null() {
        return Err(io::Error::last_os_error());
    }
    let part = |number: libc::c_int| u32::try_from(number).unwrap_or_default();
    Ok(LocalTime {
        year: i64::from(parts.tm_year) + 1900,
        month: part(parts.tm_mon) + 1,
        day: part(parts.tm_mday),
        hour: part(parts.tm_hour),
        minute: part(parts.tm_min),
        second: part(parts.tm_sec),
        weekday: part(parts.tm_wday),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_day_is_what_it_was() {
        // Noon in Greenwich is the same day in nearly every zone.
        let time = local_time(1_700_049_600).unwrap();
        assert_eq!((time.year, time.month), (2023, 11));
        assert!((14..=16).contains(&time.day));
        assert!(local_time(i64::MAX).is_err());
    }
}
