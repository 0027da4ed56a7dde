//! Sizes and numbers as ZFS' commands read and show them: 512, 10G, 1.5T; 1.21M.

use super::PropertyError;

/// What a size may look like, for whoever wrote something else.
pub const FORM: &str =
    "a size is a number of bytes, or a number with one of K, M, G, T, P, E (of 1024), as in 10G or 1.5T";

const SUFFIXES: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

/// Reads a size: digits, perhaps a fraction, perhaps one of B K M G T P E, perhaps followed by "B"
/// or "iB". What is finer than a byte is cut off.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str) -> Result<u64, PropertyError> {
    let bad = || PropertyError::BadNumber(text.to_owned());
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (whole, rest) = text.split_at(end);
    let (fraction, suffix) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(bad());
    }
    let shift = shift_of(suffix)?;
    let number: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| PropertyError::TooLarge)? };
    let scaled = number.checked_mul(1 << shift).ok_or(PropertyError::TooLarge)?;
    let total = scaled.checked_add(fraction_of(fraction, shift)).ok_or(PropertyError::TooLarge)?;
    u64::try_from(total).map_err(|_| PropertyError::TooLarge)
}

fn shift_of(suffix: &str) -> Result<u32, PropertyError> {
    let bad = || PropertyError::BadSuffix(suffix.to_owned());
    let mut chars = suffix.chars();
    let Some(first) = chars.next() else { return Ok(0) };
    let place = SUFFIXES.iter().position(|c| c.eq_ignore_ascii_case(&first)).ok_or_else(bad)?;
    let rest = chars.as_str();
    let unit = rest.is_empty() || (place > 0 && (rest.eq_ignore_ascii_case("b") || rest.eq_ignore_ascii_case("ib")));
    if unit { Ok(10 * place as u32) } else { Err(bad()) }
}

/// The decimal fraction of a unit, bytes.
fn fraction_of(digits: &str, shift: u32) -> u128 {
    let (mut sum, mut scale) = (0u128, 1u128);
    // Twenty digits are finer than a byte of any unit.
    for digit in digits.bytes().take(20).map(|byte| u128::from(byte - b'0')) {
        (sum, scale) = (sum * 10 + digit, scale * 10);
    }
    // At most 67 + 60 bits.
    (sum << shift) / scale
}

/// A number in at most five characters: 119K, 1.21M, 20.1G.
#[must_use]
pub fn human(number: u64) -> String {
    shown(number, "")
}

/// Bytes in at most five characters: 0B, 512B, 20.1M.
#[must_use]
pub fn human_bytes(number: u64) -> String {
    shown(number, "B")
}

/// A canonical number as [`human_bytes`]; other text stays.
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
