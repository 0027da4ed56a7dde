//! Values of the table's properties: parsing of users' text into canonical text, and formatting of
//! canonical text for display.

use super::{Definition, Kind, PropertyError, Settable, sharing, size};

/// Levels of zstd that a pool supports: 1 to 19, and 1 to 7 of the fast ones.
const ZSTD_MOST: u8 = 19;
const ZSTD_FAST_MOST: u8 = 7;

/// Compression algorithms of ZFS that are not supported.
const FOREIGN_COMPRESSION: &[&str] = &["gzip", "zle", "lzjb"];

impl Definition {
    /// Parses a user's value into the canonical one. `creating`: the dataset or pool is being
    /// created.
    ///
    /// # Errors
    /// The reason why it is refused.
    pub fn parse(&self, text: &str, creating: bool) -> Result<String, PropertyError> {
        match self.settable {
            Settable::Never => return Err(PropertyError::ReadOnly(self.name)),
            Settable::AtCreation if !creating => return Err(PropertyError::OnlyAtCreation(self.name)),
            _ => {}
        }
        let value = self.canonical(text)?;
        // A user who asks for a quota of 0 bytes does not want it removed.
        let zero = matches!(self.kind, Kind::Limit | Kind::Count) && value == "0" && text != "none";
        if zero && self.name.ends_with("quota") { Err(PropertyError::ZeroLimit("quota/refquota")) } else { Ok(value) }
    }

    /// As [`Self::parse`], without checking when the property can be set.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn canonical(&self, text: &str) -> Result<String, PropertyError> {
        match self.kind {
            Kind::Bytes | Kind::Figure => Err(PropertyError::ReadOnly(self.name)),
            Kind::Limit => match text {
                "none" => Ok("0".to_owned()),
                _ => size::parse(text).map(|bytes| bytes.to_string()),
            },
            Kind::Count => match text {
                "none" => Ok("none".to_owned()),
                _ => size::parse(text).map(|count| count.to_string()),
            },
            Kind::RecordSize => {
                let bytes = size::parse(text)?;
                let fits = bytes.is_power_of_two() && (512..=16 << 20).contains(&bytes);
                if fits { Ok(bytes.to_string()) } else { Err(PropertyError::NotRecordSize(self.name)) }
            }
            Kind::Choice(words) => {
                let word = words.iter().find(|word| **word == text);
                word.map(|word| (*word).to_owned()).ok_or(PropertyError::NotOneOf(self.name, self.values))
            }
            Kind::Compression => self.compression(text),
            Kind::Mountpoint => match text {
                "none" | "legacy" => Ok(text.to_owned()),
                _ => absolute(text).ok_or(PropertyError::NotMountpoint(self.name)),
            },
            Kind::Path => match text {
                "none" => Ok("none".to_owned()),
                "" => Ok(self.default.to_owned()),
                _ => absolute(text).ok_or(PropertyError::NotPath(self.name)),
            },
            Kind::Text(most) => {
                let printable = text.chars().all(|c| !c.is_control()) && text.len() <= most;
                if printable { Ok(text.to_owned()) } else { Err(PropertyError::BadText(self.name, most)) }
            }
            Kind::Number(from, to) => {
                let number = size::parse(text)?;
                let fits = (from..=to).contains(&number);
                if fits { Ok(number.to_string()) } else { Err(PropertyError::OutOfRange(self.name, from, to)) }
            }
            Kind::Words(most) => {
                let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
                let words =
                    text.is_empty() || text.split(',').all(|word| !word.is_empty() && word.chars().all(allowed));
                match (words && text.len() <= most, text) {
                    (false, _) => Err(PropertyError::BadText(self.name, most)),
                    (true, "") => Ok(self.default.to_owned()),
                    (true, text) => Ok(text.to_owned()),
                }
            }
            Kind::ShareNfs | Kind::ShareSmb => {
                let known =
                    if self.kind == Kind::ShareNfs { sharing::nfs(text).is_ok() } else { sharing::smb(text).is_ok() };
                if known { Ok(text.to_owned()) } else { Err(PropertyError::NotOneOf(self.name, self.values)) }
            }
            Kind::Unserved(why, harmless) => {
                let harmless = harmless.contains(&text);
                if harmless { Ok(text.to_owned()) } else { Err(PropertyError::Unserved(self.name, why)) }
            }
        }
    }

    fn compression(&self, text: &str) -> Result<String, PropertyError> {
        let not = PropertyError::NotOneOf(self.name, self.values);
        let base = text.split('-').next().unwrap_or(text);
        if FOREIGN_COMPRESSION.contains(&base) {
            return Err(PropertyError::Unserved(self.name, "this pool compresses with lz4 and zstd"));
        }
        let level = |digits: &str, most: u8| {
            digits.parse::<u8>().is_ok_and(|level| (1..=most).contains(&level) && level.to_string() == digits)
        };
        let known = match text {
            "on" | "off" | "lz4" | "zstd" | "zstd-fast" => true,
            _ => match (text.strip_prefix("zstd-fast-"), text.strip_prefix("zstd-")) {
                (Some(digits), _) => level(digits, ZSTD_FAST_MOST),
                (None, Some(digits)) => level(digits, ZSTD_MOST),
                (None, None) => false,
            },
        };
        if known { Ok(text.to_owned()) } else { Err(not) }
    }

    /// Formats a canonical value for display.
    #[must_use]
    pub fn human(&self, value: &str) -> String {
        match self.kind {
            Kind::Limit if value == "0" => "none".to_owned(),
            Kind::Bytes | Kind::Limit => size::human_bytes_of(value),
            Kind::RecordSize => value.parse().map_or_else(|_| value.to_owned(), size::human),
            Kind::Text(_) if value.is_empty() => "-".to_owned(),
            _ => value.to_owned(),
        }
    }
}

/// Normalizes an absolute path: no doubled or trailing slashes, no "." and "..", no control
/// characters, which could break lines of output.
fn absolute(path: &str) -> Option<String> {
    if !path.starts_with('/') || path.chars().any(char::is_control) || path.len() > 4095 {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    (!parts.contains(&"..")).then(|| format!("/{}", parts.join("/")))
}
