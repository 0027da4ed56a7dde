//! Sizes as people write them: digits, perhaps decimals, perhaps a unit.
//!
//! Used by `layers` (limits of cages), `union` (options) and `pool` (properties). What each of them
//! accepts of it and how it refuses the rest is its own: this takes a text apart and calculates.
//! Units are powers of 1024 in either case: `10G` is 10 GiB, and so are `10GB` and `10GiB`.
//!
//! Two grammars stay apart on purpose: rates (`layers/throttle/rate.rs`) are floating point as in
//! bindfs, and the sizes of `nacre bench` are whole, not zero, and have the units K, M and G only.
#![forbid(unsafe_code)]

/// The letters of units; each stands for 1024 times what the one before it does.
const UNITS: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// A text taken apart. The digits are digits; whether there are any is not said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written<'a> {
    /// The digits before the decimal point.
    pub whole: &'a str,
    /// Those after it; `None` without a point.
    pub decimals: Option<&'a str>,
    /// Whatever follows.
    pub unit: &'a str,
}

impl<'a> Written<'a> {
    /// Takes a text apart.
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

    /// The bytes, where the unit is two to the power of `shift`; what is finer than a byte is cut
    /// off. `None` for more than 64 bits hold.
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

/// The power of two that a unit stands for: none, or one of B K M G T P E, which `B` or `iB` may
/// follow. `None` for anything else.
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
