//! Name folding: names of a file system that are equal though their bytes differ: `casesensitivity`
//! and `normalization`. Part of the dataset header; used by look-ups, changes of names, and checks.
//!
//! Invariants: names are stored as they were given, and hashed and compared in the form that
//! [`Folding::fold`] returns; this form of a name never changes, in no version of the program:
//! tables are those of Unicode 16.0, for case in `case.rs`, for normalization in a library of
//! exactly that version (a test compares its results with recorded ones). Names that are not UTF-8
//! are equal only byte by byte.

mod case;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use unicode_normalization::UnicodeNormalization;

/// Normalization of names before they are compared. The forms C and D are one here, and so are KC
/// and KD: the same names are equal in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normal {
    /// None.
    #[default]
    None,
    /// Canonical equivalence: a letter with its accent, as one character or two.
    Canonical,
    /// Compatibility equivalence in addition: ligatures, wide and narrow letters.
    Compatible,
}

/// The rules of name folding; see the head of this file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folding {
    /// Upper and lower case are equal.
    pub insensitive: bool,
    /// Normalization.
    pub normal: Normal,
}

const INSENSITIVE: u8 = 1;
const CANONICAL: u8 = 2;
const COMPATIBLE: u8 = 4;

impl Folding {
    /// No folding: names are equal only byte by byte.
    pub const EXACT: Self = Self { insensitive: false, normal: Normal::None };

    /// Returns the folding for canonical values of the two properties.
    #[must_use]
    pub fn of_properties(casesensitivity: &str, normalization: &str) -> Self {
        let normal = match normalization {
            "formC" | "formD" => Normal::Canonical,
            "formKC" | "formKD" => Normal::Compatible,
            _ => Normal::None,
        };
        Self { insensitive: casesensitivity == "insensitive", normal }
    }

    /// Whether names are equal only byte by byte.
    #[must_use]
    pub fn is_exact(self) -> bool {
        self == Self::EXACT
    }

    /// Encodes it for the dataset header.
    pub(super) fn byte(self) -> u8 {
        let normal = match self.normal {
            Normal::None => 0,
            Normal::Canonical => CANONICAL,
            Normal::Compatible => COMPATIBLE,
        };
        normal | if self.insensitive { INSENSITIVE } else { 0 }
    }

    /// Decodes it from a dataset header; `None` for an invalid value.
    pub(super) fn of_byte(byte: u8) -> Option<Self> {
        let normal = match byte & !INSENSITIVE {
            0 => Normal::None,
            CANONICAL => Normal::Canonical,
            COMPATIBLE => Normal::Compatible,
            _ => return None,
        };
        Some(Self { insensitive: byte & INSENSITIVE != 0, normal })
    }

    /// Returns the representative of a name and of all names that are equal to it.
    #[must_use]
    pub fn fold(self, name: &[u8]) -> Cow<'_, [u8]> {
        if self.is_exact() {
            return Cow::Borrowed(name);
        }
        if name.is_ascii() {
            let same = !self.insensitive || !name.iter().any(u8::is_ascii_uppercase);
            return if same { Cow::Borrowed(name) } else { Cow::Owned(name.to_ascii_lowercase()) };
        }
        let Ok(text) = std::str::from_utf8(name) else { return Cow::Borrowed(name) };
        let cased = |of: char| if self.insensitive { case::fold(of) } else { of };
        // As the standard defines caseless matching (section 3.13, D145 and D146), with simple case
        // folding.
        let folded: String = match self.normal {
            Normal::None => text.chars().map(cased).collect(),
            Normal::Canonical => text.nfd().map(cased).nfd().collect(),
            Normal::Compatible => text.nfd().map(cased).nfkd().map(cased).nfkd().collect(),
        };
        Cow::Owned(folded.into_bytes())
    }

    /// Whether two names are equal.
    #[must_use]
    pub fn same(self, one: &[u8], other: &[u8]) -> bool {
        one == other || !self.is_exact() && self.fold(one) == self.fold(other)
    }
}
