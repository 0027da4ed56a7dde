//! Parser for sizes as users write them: digits, optional decimals, optional unit.
//!
//! Used by `layers` (limits of cages), `union` (options) and `pool` (properties). Each of them
//! decides which of these texts it accepts and how it refuses others: this crate splits a text and
//! calculates. Units are powers of 1024 in either case: `10G` is 10 GiB, and so are `10GB` and
//! `10GiB`.
//!
//! Two grammars are separate on purpose: rates (`layers/throttle/rate.rs`) are floating point like
//! in bindfs, and the sizes of `nacre bench` are whole, not zero, and have the units K, M and G
//! only.
#![forbid(unsafe_code)]

/// Unit letters; each is 1024 times the previous one.
const UNITS: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// A text split into its parts. The digits are checked to be digits; there may be none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written<'a> {
    /// The digits before the decimal point.
    pub whole: &'a str,
    /// The digits after it; `None` without a point.
    pub decimals: Option<&'a str>,
    /// The remaining text.
    pub unit: &'a str,
}

impl<'a> Written<'a> {
    /// Splits a text.
    pub fn new(text: &'a str) -> Written<'a> {
        let (whole, rest) = digits(text);
        match rest.strip_prefix('.').map(digits) {
            Some((decimals, unit)) => Written { whole, decimals: Some(decimals), unit },
            None => Written { whole, decimals: None, unit: rest },
        }
    }

    /// Whether there is no digit at all.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.decimals.unwrap_or("").is_empty()
    }

    /// The size in bytes, for a unit of two to the power of `shift`; fractions of a byte are
    /// truncated. `None` if it exceeds 64 bits.
    pub fn bytes(&self, shift: u32) -> Option<u64> {
        let whole: u64 = if self.whole.is_empty() { 0 } else { self.whole.parse().ok()? };
        let (mut sum, mut scale) = (0_u128, 1_u128);
        // Twenty digits are finer than a byte of any unit, and at most 67 + 60 bits.
        for digit in self.decimals.unwrap_or("").bytes().take(20).map(|byte| u128::from(byte - b'0')) {
            (sum, scale) = (sum * 10 + digit, scale * 10);
        }
        u64::try_from(u128::from(whole).checked_mul(1 << shift)?.checked_add((sum << shift) / scale)?).ok()
    }
}

/// The power of two of a unit: none, or one of B K M G T P E, optionally followed by `B` or `iB`.
/// `None` for anything else.
pub fn shift(unit: &str) -> Option<u32> {
    let mut letters = unit.chars();
    let Some(first) = letters.next() else { return Some(0) };
    let place = UNITS.iter().position(|known| known.eq_ignore_ascii_case(&first))?;
    let rest = letters.as_str();
    let ends = rest.is_empty() || (place > 0 && (rest.eq_ignore_ascii_case("b") || rest.eq_ignore_ascii_case("ib")));
    ends.then_some(10 * place as u32)
}

fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Option<u64> {
        let written = Written::new(text);
        (!written.is_empty()).then_some(())?;
        written.bytes(shift(written.unit)?)
    }

    #[test]
    fn sizes_are_read() {
        for (text, size) in [
            ("0", 0),
            ("10B", 10),
            ("1k", 1 << 10),
            ("10GiB", 10 << 30),
            ("10gb", 10 << 30),
            (".5M", 1 << 19),
            ("1.M", 1 << 20),
            ("0.1K", 102),
            ("1.99999999999999999999999E", (2 << 60) - 1),
            ("15.99999999999999999999999E", u64::MAX),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(bytes(text), Some(size), "{text}");
        }
        for text in ["", ".", "G", "-1", "+1", "1e9", "1 G", "1.5.5G", "10i", "10BB", "16E", "18446744073709551616"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }

    #[test]
    fn a_point_without_decimals_is_told_from_none() {
        assert_eq!(Written::new("1.M"), Written { whole: "1", decimals: Some(""), unit: "M" });
        assert_eq!(Written::new("1M"), Written { whole: "1", decimals: None, unit: "M" });
    }
}
