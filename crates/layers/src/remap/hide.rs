//! Hidden names, as globs over single names. Pure.
//!
//! `*` matches any characters, `?` one, `[a-z]` and `[!a-z]` one of a set, `{a,b}` alternatives; a
//! backslash takes the next character literally. Matching works on bytes. A `!` at the start of a
//! pattern is refused, since it would hide everything else.

use nacre_vfs::Name;

/// A set of patterns of hidden names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hidden(Vec<String>);

impl Hidden {
    /// Checks and compiles the patterns.
    ///
    /// # Errors
    /// Text for the user: an empty pattern, one with a slash, or one that is no glob.
    pub fn new(patterns: &[String]) -> Result<Hidden, String> {
        for pattern in patterns {
            let bad = |why: &str| format!("invalid pattern \"{}\" to hide: {why}", pattern.escape_debug());
            if pattern.is_empty() {
                return Err(bad("it is empty"));
            }
            if pattern.contains('/') {
                return Err(bad("patterns are for single names, so there can be no slash; hide the last component"));
            }
            if pattern.starts_with('!') {
                return Err(bad("it would hide everything but what it names; write \\! for a name that begins so"));
            }
            fast_glob::validate(pattern).map_err(|error| bad(&error.to_string()))?;
        }
        Ok(Hidden(patterns.to_vec()))
    }

    /// Whether a name is hidden.
    pub fn hides(&self, name: Name<'_>) -> bool {
        self.0.iter().any(|pattern| fast_glob::glob_match(pattern.as_bytes(), name.bytes()))
    }

    /// Whether nothing is hidden.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hides(pattern: &str, name: &[u8]) -> bool {
        Hidden::new(&[pattern.to_owned()]).unwrap().hides(Name::new(name).unwrap())
    }

    #[test]
    fn globs_match_whole_names() {
        for (pattern, name, hidden) in [
            ("*.tmp", &b"a.tmp"[..], true),
            ("*.tmp", b".tmp", true),
            ("*.tmp", b"a.tmp2", false),
            (".git", b".git", true),
            (".git", b".gitignore", false),
            ("?", b"x", true),
            ("[a-c]*", b"beta", true),
            ("[!a-c]*", b"beta", false),
            ("*.{o,a}", b"lib.a", true),
            ("\\*", b"*", true),
            ("\\*", b"x", false),
            ("\\!x", b"!x", true),
            ("*", b".hidden", true),
            ("*\u{e9}*", "caf\u{e9}".as_bytes(), true),
            ("a*", b"a\xff\xfe", true),
            ("a**b", b"a--b", true),
        ] {
            assert_eq!(hides(pattern, name), hidden, "{pattern} {}", name.escape_ascii());
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for pattern in ["", "a/b", "!a", "[a", "{a,b", "a\\"] {
            assert!(Hidden::new(&[pattern.to_owned()]).is_err(), "{pattern:?}");
        }
    }
}
