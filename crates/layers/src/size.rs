//! Sizes and limits as text: `10G`, `1.5T`, `80%`, `user:www-data=2G`. Pure.
//!
//! Suffixes are powers of 1024, as in the commands that people size volumes with: `10G` is 10 GiB,
//! and so are `10GB` and `10GiB`.

use nacre_size::Written;
use std::{fmt, str::FromStr};

/// Granularity of limits: sizes of accounted space are multiples of this block size, bytes.
pub const BLOCK: u64 = 4096;

/// The suffixes, from the largest down.
const SUFFIXES: [(char, u64); 6] =
    [('E', 1 << 60), ('P', 1 << 50), ('T', 1 << 40), ('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

/// Error of a malformed size or limit: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeError(String);

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SizeError {}

impl Size {
    /// A size of this many bytes.
    pub const fn new(bytes: u64) -> Size {
        Size(bytes)
    }

    /// Bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The size as a limit of stored files, in whole blocks (rounded down).
    ///
    /// # Errors
    /// Less than one block, in which no file would fit.
    pub fn limit(self) -> Result<u64, SizeError> {
        if self.0 < BLOCK {
            return Err(SizeError(format!("{self} is less than one block ({BLOCK} bytes): nothing would fit")));
        }
        Ok(self.0 / BLOCK * BLOCK)
    }

    /// The size for people: four characters at most, and the unit.
    pub fn short(self) -> String {
        let Some((suffix, factor)) = SUFFIXES.into_iter().find(|(_, factor)| self.0 >= *factor) else {
            return self.0.to_string();
        };
        let (whole, rest) = (self.0 / factor, self.0 % factor);
        // Truncated, never rounded up: space that is shown as free exists.
        let hundredths = u64::try_from(u128::from(rest) * 100 / u128::from(factor)).unwrap_or_default();
        match (whole, hundredths) {
            (_, 0) | (100.., _) => format!("{whole}{suffix}"),
            (10.., _) => format!("{whole}.{}{suffix}", hundredths / 10),
            _ => format!("{whole}.{hundredths:02}{suffix}"),
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    /// Parses like `nacre_size`; a decimal point requires a unit that it can divide.
    fn from_str(text: &str) -> Result<Size, SizeError> {
        let bad = || {
            SizeError(format!(
                "\"{}\" is no size; write bytes or a number with one of K, M, G, T, P, E (of 1024), as in 10G or 1.5T",
                text.escape_debug()
            ))
        };
        let written = Written::new(text);
        let shift = nacre_size::shift(written.unit).ok_or_else(bad)?;
        if written.is_empty() || (written.decimals.is_some() && shift == 0) {
            return Err(bad());
        }
        let large = || SizeError(format!("\"{text}\" is more than any file system holds"));
        let bytes = written.bytes(shift).ok_or_else(large)?;
        // Sizes of files are signed for the kernel.
        if i64::try_from(bytes).is_err() { Err(large()) } else { Ok(Size(bytes)) }
    }
}

/// Exact: with a suffix only where the text stays exact, so that it can be parsed again.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SUFFIXES.iter().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor)) {
            Some((suffix, factor)) => write!(f, "{}{suffix}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A part of a limit: `80%`, or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Hundredths of a percent, from 1 to 10000.
    Percent(u32),
    /// A fixed size.
    Size(Size),
}

impl Share {
    /// The bytes of this share where the whole is `limit`.
    pub fn of(self, limit: u64) -> u64 {
        match self {
            Share::Percent(hundredths) => {
                u64::try_from(u128::from(limit) * u128::from(hundredths) / 10_000).unwrap_or(limit)
            }
            Share::Size(size) => size.bytes(),
        }
    }
}

impl FromStr for Share {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Share, SizeError> {
        let Some(number) = text.strip_suffix('%') else {
            return text.parse().map(Share::Size).map_err(|_| {
                SizeError(format!("\"{}\" is neither a percentage nor a size; write 80% or 8G", text.escape_debug()))
            });
        };
        let bad = || SizeError(format!("\"{}\" is no percentage from 0.01% to 100%", text.escape_debug()));
        let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty()
            || whole.len() > 3
            || decimals.len() > 2
            || !plain(whole)
            || !plain(decimals)
            || number.ends_with('.')
        {
            return Err(bad());
        }
        let hundredths = format!("{whole}{decimals:0<2}").parse().map_err(|_| bad())?;
        if (1..=10_000).contains(&hundredths) { Ok(Share::Percent(hundredths)) } else { Err(bad()) }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Share::Percent(hundredths) if hundredths.is_multiple_of(100) => write!(f, "{}%", hundredths / 100),
            Share::Percent(hundredths) => write!(f, "{}.{:02}%", hundredths / 100, hundredths % 100),
            Share::Size(size) => size.fmt(f),
        }
    }
}

/// A limit of a user or directory within the cage's limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitRule {
    /// For all files of one user: a name or a number.
    User(String, Size),
    /// For everything below one directory, relative to the root.
    Directory(String, Size),
}

impl FromStr for LimitRule {
    type Err = SizeError;

    /// `user:NAME=SIZE` or `dir:PATH=SIZE`; the last equals sign ends the name.
    fn from_str(text: &str) -> Result<LimitRule, SizeError> {
        let bad =
            |why: &str| SizeError(format!("\"{}\": {why}; write user:NAME=SIZE or dir:PATH=SIZE", text.escape_debug()));
        let (subject, size) = text.rsplit_once('=').ok_or_else(|| bad("the size is missing"))?;
        let size: Size = size.parse()?;
        size.limit()?;
        match subject.split_once(':') {
            Some(("user" | "dir", "")) => Err(bad("the name is missing")),
            Some(("user", name)) => Ok(LimitRule::User(name.to_owned(), size)),
            Some(("dir", path)) => match below(path) {
                Some(path) => Ok(LimitRule::Directory(path, size)),
                None => Err(bad("the path must be relative to the caged directory, and lie in it")),
            },
            _ => Err(bad("there are limits for a user and for a dir")),
        }
    }
}

/// Normalizes a relative path without empty parts and `.`; none if it is empty or leaves the root.
fn below(path: &str) -> Option<String> {
    if path.starts_with('/') || path.contains('\0') {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.is_empty() || parts.contains(&"..") { None } else { Some(parts.join("/")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("1k", 1024),
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("10GB", 10 << 30),
            ("10GiB", 10 << 30),
            ("1.5T", 3 << 39),
            (".5M", 1 << 19),
            ("1.M", 1 << 20),
            ("0.1K", 102),
            ("7.99999999999999999999E", (8 << 60) - 10),
            ("4P", 4 << 50),
        ] {
            match text.parse::<Size>() {
                Ok(size) if text.starts_with("7.9") => assert!(size.bytes() > 7 << 60, "{text}"),
                size => assert_eq!(size, Ok(Size(bytes)), "{text}"),
            }
        }
        for text in [
            "",
            "10X",
            "X",
            "G",
            ".",
            ".G",
            "-1G",
            "+1G",
            "1e9",
            "1.5",
            "1,5G",
            "1.5.5G",
            "10GG",
            "10Gb/s",
            " 10G",
            "10 G",
            "10KiBi",
            "inf",
            "8E",
            "99999999999999999999",
            "0x10",
            "\u{661}G",
            "10G%",
            "1Ki",
            "10i",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        let said = "10X".parse::<Size>().unwrap_err().to_string();
        assert!(said.contains("\"10X\" is no size") && said.contains("10G"), "{said}");
    }

    #[test]
    fn sizes_are_written_exactly() {
        for text in ["0", "1", "4095", "1K", "1000", "1023K", "10G", "1536G", "3T", "7E"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.50K"),
            (999 << 10, "999K"),
            (1000 << 10, "1000K"),
            (10 << 30, "10G"),
            ((10 << 30) + (512 << 20), "10.5G"),
            ((1 << 30) - 1, "1023M"),
            ((123 << 30) + (512 << 20), "123G"),
            ((1 << 30) + 1, "1G"),
            (u64::MAX, "15.9E"),
        ] {
            assert_eq!(Size(bytes).short(), text, "{bytes}");
        }
    }

    #[test]
    fn a_limit_has_whole_blocks() {
        assert_eq!(Size(10_000).limit(), Ok(8192));
        assert_eq!(Size(4096).limit(), Ok(4096));
        assert!(Size(4095).limit().unwrap_err().to_string().contains("less than one block"));
        assert!(Size(0).limit().is_err());
    }

    #[test]
    fn a_share_is_a_percentage_or_a_size() {
        for (text, of) in
            [("80%", 80_000), ("100%", 100_000), ("0.01%", 10), ("12.5%", 12_500), ("50K", 51_200), ("1", 1)]
        {
            let share: Share = text.parse().unwrap();
            assert_eq!(share.of(100_000), of, "{text}");
            assert_eq!(share.to_string().parse::<Share>().unwrap(), share);
        }
        assert_eq!(Share::Percent(10_000).of(u64::MAX), u64::MAX);
        for text in ["", "%", "0%", "100.01%", "101%", "-1%", "80 %", "8.%", "1.234%", "80%%", "ten", "1000%", "8X"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }

    #[test]
    fn limits_name_a_user_or_a_directory() {
        let user = |name: &str, bytes| Ok(LimitRule::User(name.to_owned(), Size(bytes)));
        let dir = |path: &str, bytes| Ok(LimitRule::Directory(path.to_owned(), Size(bytes)));
        assert_eq!("user:www-data=2G".parse(), user("www-data", 2 << 30));
        assert_eq!("user:33=1M".parse(), user("33", 1 << 20));
        assert_eq!("dir:nginx=1G".parse(), dir("nginx", 1 << 30));
        assert_eq!("dir:./a//b=c/=1G".parse(), dir("a/b=c", 1 << 30));
        for text in [
            "",
            "user:x",
            "user:=1G",
            "dir:=1G",
            "dir:/abs=1G",
            "dir:..=1G",
            "dir:a/../b=1G",
            "dir:.=1G",
            "group:x=1G",
            "x=1G",
            "user:x=10X",
            "user:x=1",
        ] {
            assert!(text.parse::<LimitRule>().is_err(), "{text}");
        }
    }
}
