//! Rates as text: `1048576`, `1.5M`, `10k`. Pure. Not `nacre_size`: as in bindfs, they are floating
//! point and have no `B`.

use std::{fmt, str::FromStr};

/// Bytes per second; finite and greater than zero.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Rate(f64);

/// Error of a malformed rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateError(String);

impl fmt::Display for RateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "invalid rate \"{}\"; write bytes per second greater than zero, with decimals and one of k, M, G, T (of 1024) if you like, as in 1.5M",
            self.0.escape_debug()
        )
    }
}

impl std::error::Error for RateError {}

impl Rate {
    /// Bytes per second.
    pub fn per_second(self) -> f64 {
        self.0
    }
}

impl FromStr for Rate {
    type Err = RateError;

    /// Digits, one decimal point, and a suffix in either case: k 2^10, M 2^20, G 2^30, T 2^40.
    fn from_str(text: &str) -> Result<Rate, RateError> {
        let bad = || RateError(text.to_owned());
        let factor = match text.bytes().last() {
            Some(b'k' | b'K') => 1024.0,
            Some(b'm' | b'M') => 1024.0 * 1024.0,
            Some(b'g' | b'G') => 1024.0 * 1024.0 * 1024.0,
            Some(b't' | b'T') => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => 1.0,
        };
        let number = text.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']).unwrap_or(text);
        // The standard library also reads signs, exponents and "inf", which are no rates.
        if !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return Err(bad());
        }
        let rate: f64 = number.parse::<f64>().map_err(|_| bad())? * factor;
        if rate.is_finite() && rate > 0.0 { Ok(Rate(rate)) } else { Err(bad()) }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = [("T", 1_099_511_627_776.0), ("G", 1_073_741_824.0), ("M", 1_048_576.0), ("k", 1024.0)];
        match steps.into_iter().find(|(_, factor)| self.0 >= *factor && (self.0 / factor * 100.0).fract() == 0.0) {
            Some((suffix, factor)) => write!(f, "{}{suffix}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}
