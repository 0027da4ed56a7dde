//! Sizes and numbers as ZFS' commands parse and display them: 512, 10G, 1.5T; 1.21M.

use super::PropertyError;
use nacre_size::Written;

/// Description of the format of sizes, for error messages.
pub const FORM: &str =
    "a size is a number of bytes, or a number with one of K, M, G, T, P, E (of 1024), as in 10G or 1.5T";

const SUFFIXES: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// Parses a size as `nacre_size` does. As in ZFS, a fraction needs no unit, and fractions of a byte
/// are cut off.
///
/// # Errors
/// The reason why it is invalid.
pub fn parse(text: &str) -> Result<u64, PropertyError> {
    let written = Written::new(text);
    if written.is_empty() {
        return Err(PropertyError::BadNumber(text.to_owned()));
    }
    let shift = nacre_size::shift(written.unit).ok_or_else(|| PropertyError::BadSuffix(written.unit.to_owned()))?;
    written.bytes(shift).ok_or(PropertyError::TooLarge)
}

/// Formats a number in at most five characters: 119K, 1.21M, 20.1G.
#[must_use]
pub fn human(number: u64) -> String {
    shown(number, "")
}

/// Formats bytes in at most five characters: 0B, 512B, 20.1M.
#[must_use]
pub fn human_bytes(number: u64) -> String {
    shown(number, "B")
}

/// Formats a canonical number as [`human_bytes`] does; other text is returned unchanged.
#[must_use]
pub fn human_bytes_of(value: &str) -> String {
    value.parse().map_or_else(|_| value.to_owned(), human_bytes)
}

fn shown(number: u64, unit: &str) -> String {
    let index = (63u32.saturating_sub(number.max(1).leading_zeros())) / 10;
    let suffix = SUFFIXES.get(index as usize).copied().unwrap_or('E');
    if index == 0 {
        return format!("{number}{unit}");
    }
    let one = 1u64 << (10 * index);
    if number.is_multiple_of(one) {
        return format!("{}{suffix}", number / one);
    }
    let value = number as f64 / one as f64;
    for digits in [2, 1] {
        let text = format!("{value:.digits$}{suffix}");
        if text.len() <= 5 {
            return text;
        }
    }
    format!("{value:.0}{suffix}")
}
