//! Where a pool lies that lies on no devices: `s3://BUCKET/PREFIX`, or `file:///DIRECTORY`.
//!
//! An address is all that is kept of such a place: commands hand it to the process that owns the
//! pool, and what is remembered for the next import is the same text. Whatever leads to the place
//! is part of it (endpoint, region, the profile or file that credentials are in), behind `?` as in
//! a URL. Invariant: credentials are no part of it.

use std::fmt;
use std::path::{Path, PathBuf};

/// What an address begins with.
const S3: &str = "s3://";
const DIRECTORY: &str = "file://";
/// What begins an address of other stores, which are not served.
const OTHERS: [&str; 7] = ["gs://", "gcs://", "az://", "azure://", "abfs://", "http://", "https://"];

/// Where credentials, endpoint and region are in the environment.
const ENDPOINTS: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];
const PROFILE: &str = "AWS_PROFILE";
const CREDENTIALS_FILE: &str = "AWS_SHARED_CREDENTIALS_FILE";

/// An address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A bucket of a store that speaks S3.
    S3(S3Address),
    /// A directory: for tests, and for what is mounted from elsewhere.
    Directory(PathBuf),
}

/// A place in a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct S3Address {
    /// The bucket.
    pub bucket: String,
    /// What all names of objects begin with, without a slash at its end; may be empty.
    pub prefix: String,
    /// What leads there, and what is kept of it here.
    pub settings: Settings,
}

/// What leads to a place in a bucket: behind the `?` of its address, or options of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The server; without, Amazon's of the region.
    pub endpoint: Option<String>,
    /// The region.
    pub region: Option<String>,
    /// The profile that credentials are in.
    pub profile: Option<String>,
    /// The file that profiles are in.
    pub credentials_file: Option<PathBuf>,
    /// The directory on this machine in which parts of it are kept.
    pub cache_dir: Option<PathBuf>,
    /// How much of it is kept at most, bytes; 0: nothing.
    pub cache_size: Option<u64>,
    /// The directory on this machine in which what was synced lies, with `log=local`.
    pub log_dir: Option<PathBuf>,
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressError(String);

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AddressError {}

fn refused<T>(why: impl Into<String>) -> Result<T, AddressError> {
    Err(AddressError(why.into()))
}

/// Whether somebody who has written this means an address, right or wrong, and not a device.
#[must_use]
pub fn is_address(word: &Path) -> bool {
    let is = |start: &str| word.to_str().is_some_and(|text| text.starts_with(start));
    [S3, DIRECTORY].into_iter().chain(OTHERS).any(is)
}

fn is_plain(text: &str, also: &str) -> bool {
    text.chars().all(|one| one.is_ascii_alphanumeric() || also.contains(one))
}

impl Address {
    /// Takes an address apart.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix(DIRECTORY) {
            let path = PathBuf::from(path);
            return match path.is_absolute() && path != Path::new("/") {
                true => Ok(Self::Directory(path)),
                false => refused(format!("'{text}': a directory is named by its whole path: file:///DIRECTORY")),
            };
        }
        let Some(rest) = text.strip_prefix(S3) else {
            return refused(format!("'{text}': pools lie on devices, in s3://BUCKET/PREFIX, or in file:///DIRECTORY"));
        };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_end_matches('/');
        if bucket.is_empty() || !is_plain(bucket, "-._") {
            return refused(format!("'{text}': a bucket's name has letters, digits, '-', '.' and '_'"));
        }
        let strange = |part: &str| matches!(part, "" | "." | "..") || !is_plain(part, "-._");
        if !prefix.is_empty() && prefix.split('/').any(strange) {
            return refused(format!(
                "'{text}': a prefix has letters, digits, '-', '.', '_', and '/' between its parts"
            ));
        }
        let mut settings = Settings::default();
        for setting in query.split('&').filter(|setting| !setting.is_empty()) {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let value = value.to_owned();
            match name {
                "endpoint" => settings.endpoint = Some(value),
                "region" => settings.region = Some(value),
                "profile" => settings.profile = Some(value),
                "credentials-file" => settings.credentials_file = Some(value.into()),
                "cache-dir" => settings.cache_dir = Some(value.into()),
                "log-dir" => settings.log_dir = Some(value.into()),
                "cache-size" => match value.parse() {
                    Ok(size) => settings.cache_size = Some(size),
                    Err(_) => return refused(format!("'{text}': '{value}' is no size in bytes")),
                },
                _ => return refused(format!("'{text}': there is no setting '{name}'")),
            }
        }
        settings.check()?;
        Ok(Self::S3(S3Address { bucket: bucket.to_owned(), prefix: prefix.to_owned(), settings }))
    }

    /// The same address with what a command line says besides, and with what the environment says
    /// of where things are: a process without that environment finds them as well.
    ///
    /// # Errors
    /// What is wrong with a setting.
    pub fn with(self, settings: Settings, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AddressError> {
        let of = |names: &[&str]| names.iter().find_map(|name| environment(name)).filter(|value| !value.is_empty());
        match self {
            Self::S3(place) => {
                let Settings { endpoint, region, profile, credentials_file, cache_dir, cache_size, log_dir } =
                    place.settings;
                let file = settings.credentials_file.or(credentials_file);
                let settings = Settings {
                    endpoint: settings.endpoint.or(endpoint).or_else(|| of(&ENDPOINTS)),
                    region: settings.region.or(region).or_else(|| of(&REGIONS)),
                    profile: settings.profile.or(profile).or_else(|| of(&[PROFILE])),
                    credentials_file: file.or_else(|| of(&[CREDENTIALS_FILE]).map(PathBuf::from)),
                    cache_dir: settings.cache_dir.or(cache_dir),
                    cache_size: settings.cache_size.or(cache_size),
                    log_dir: settings.log_dir.or(log_dir),
                };
                settings.check()?;
                Ok(Self::S3(S3Address { settings, ..place }))
            }
            Self::Directory(_) if settings != Settings::default() => refused(
                "a directory has no endpoint, region, profile or credentials, and no part of it is kept elsewhere",
            ),
            directory => Ok(directory),
        }
    }

    /// The server that it names: the same bucket of another one is another place.
    #[must_use]
    pub fn endpoint(&self) -> Option<&str> {
        match self {
            Self::S3(place) => place.settings.endpoint.as_deref().map(|endpoint| endpoint.trim_end_matches('/')),
            Self::Directory(_) => None,
        }
    }

    /// What people call it: without what leads there.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::S3(S3Address { bucket, prefix, .. }) if prefix.is_empty() => format!("{S3}{bucket}"),
            Self::S3(S3Address { bucket, prefix, .. }) => format!("{S3}{bucket}/{prefix}"),
            Self::Directory(path) => format!("{DIRECTORY}{}", path.display()),
        }
    }
}

impl Settings {
    fn check(&self) -> Result<(), AddressError> {
        let bad = |value: &str| value.is_empty() || value.chars().any(|one| one == '&' || one.is_control());
        for (name, value) in self.named() {
            if bad(&value) {
                return refused(format!("'{value}' is no {name}"));
            }
        }
        if let Some(endpoint) = &self.endpoint {
            let rest = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
            let Some(rest) = rest.filter(|rest| !rest.is_empty() && !rest.contains(['?', '#', ' '])) else {
                return refused(format!("'{endpoint}' is no endpoint: it is like https://HOST:PORT"));
            };
            if rest.contains('@') {
                return refused("an endpoint contains no user and no password: credentials are named by --profile");
            }
        }
        if let Some(file) = self.credentials_file.as_ref().filter(|file| !file.is_absolute()) {
            return refused(format!("'{}': the file with credentials is named by its whole path", file.display()));
        }
        if let Some(directory) = self.cache_dir.as_ref().filter(|directory| !directory.is_absolute()) {
            return refused(format!("'{}': the cache's directory is named by its whole path", directory.display()));
        }
        if let Some(directory) = self.log_dir.as_ref().filter(|directory| !directory.is_absolute()) {
            return refused(format!("'{}': the log's directory is named by its whole path", directory.display()));
        }
        Ok(())
    }

    fn named(&self) -> Vec<(&'static str, String)> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let all = [
            ("endpoint", self.endpoint.clone()),
            ("region", self.region.clone()),
            ("profile", self.profile.clone()),
            ("credentials-file", path(&self.credentials_file)),
            ("cache-dir", path(&self.cache_dir)),
            ("cache-size", self.cache_size.map(|size| size.to_string())),
            ("log-dir", path(&self.log_dir)),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        let Self::S3(found) = self else { return Ok(()) };
        for (at, (name, value)) in found.settings.named().into_iter().enumerate() {
            write!(f, "{}{name}={value}", if at == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in [
            "s3://bucket",
            "s3://bucket/a/b-c_d.e",
            "s3://b.c/p?endpoint=http://127.0.0.1:5000&region=eu-1&profile=backup&credentials-file=/etc/keys",
            "s3://bucket?cache-dir=/var/cache/x&cache-size=1048576&log-dir=/var/log/x",
            "file:///srv/pool",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Address::parse("s3://bucket/a/").unwrap().name(), "s3://bucket/a");
        let endpoint = |text: &str| Address::parse(text).unwrap().endpoint().map(ToOwned::to_owned);
        assert_eq!(endpoint("s3://bucket?endpoint=http://a/"), endpoint("s3://bucket?endpoint=http://a"));
        assert_eq!((endpoint("s3://bucket"), endpoint("file:///d")), (None, None));
        for wrong in [
            "s3://",
            "s3:///a",
            "s3://b/..",
            "s3://b/a//c",
            "s3://b/a b",
            "s3://b?password=x",
            "s3://b?endpoint=ftp://x",
            "s3://b?endpoint=http://user:secret@x",
            "s3://b?credentials-file=keys",
            "s3://b?region=",
            "s3://b?cache-dir=here",
            "s3://b?cache-size=1G",
            "s3://b?log-dir=here",
            "gs://b",
            "file://a",
            "file:///",
        ] {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
            assert!(is_address(Path::new(wrong)), "{wrong}");
        }
        assert!(!is_address(Path::new("/dev/sda")) && !is_address(Path::new("s3")));
    }

    #[test]
    fn settings_come_from_the_command_line_then_the_address_then_the_environment() {
        let there = |name: &str| match name {
            "AWS_REGION" => Some("there".to_owned()),
            "AWS_ENDPOINT_URL" => Some("http://there".to_owned()),
            "AWS_SECRET_ACCESS_KEY" => Some("secret".to_owned()),
            _ => None,
        };
        let settings = Settings { endpoint: Some("https://here".to_owned()), ..Settings::default() };
        let address = Address::parse("s3://b/p?endpoint=http://x").unwrap().with(settings, there).unwrap();
        assert_eq!(address.to_string(), "s3://b/p?endpoint=https://here&region=there");
        let settings = Settings { credentials_file: Some("keys".into()), ..Settings::default() };
        assert!(Address::parse("s3://b").unwrap().with(settings.clone(), none).is_err());
        assert!(Address::parse("file:///d").unwrap().with(settings, none).is_err());
    }
}
