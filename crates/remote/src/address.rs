//! Addresses of pools that lie on no devices: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` (Azure),
//! `gs://BUCKET/PREFIX` (Google), or `file:///DIRECTORY`.
//!
//! The address is all that is stored about the location: commands pass it to the process that owns the pool, and
//! the record for the next import has the same text. Everything needed to reach the bucket is part of it (endpoint,
//! region, the profile or file with the credentials), after `?` as in a URL. Invariant: credentials are no part of
//! it.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::azure;

/// Prefix of the address of a directory.
const DIRECTORY: &str = "file://";
/// Prefixes of addresses of other stores, which are not supported.
const OTHERS: [&str; 6] = ["gcs://", "azure://", "abfs://", "abfss://", "http://", "https://"];

/// A kind of store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Store {
    /// A store that speaks S3.
    #[default]
    S3,
    /// Azure Blob Storage.
    Azure,
    /// Google Cloud Storage.
    Google,
}

impl Store {
    const ALL: [Self; 3] = [Self::S3, Self::Azure, Self::Google];

    /// Returns the prefix of an address.
    const fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3://",
            Self::Azure => "az://",
            Self::Google => "gs://",
        }
    }

    /// Reads settings from the environment, by the names that the store's own tools use.
    fn settings(self, environment: impl Fn(&str) -> Option<String>) -> Settings {
        let of = |names: &[&str]| names.iter().find_map(|name| environment(name)).filter(|value| !value.is_empty());
        match self {
            Self::S3 => Settings {
                endpoint: of(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]),
                region: of(&["AWS_REGION", "AWS_DEFAULT_REGION"]),
                profile: of(&["AWS_PROFILE"]),
                credentials_file: of(&["AWS_SHARED_CREDENTIALS_FILE"]).map(PathBuf::from),
                ..Settings::default()
            },
            Self::Azure => {
                let connection = of(&[azure::CONNECTION]).map(|text| azure::Connection::read(&text));
                let (account, endpoint) = connection.map_or((None, None), |found| (found.account, found.endpoint));
                Settings {
                    endpoint,
                    account: of(&["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"]).or(account),
                    ..Settings::default()
                }
            }
            Self::Google => Settings {
                credentials_file: of(&["GOOGLE_APPLICATION_CREDENTIALS"]).map(PathBuf::from),
                ..Settings::default()
            },
        }
    }
}

/// Address of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A bucket of an object store.
    Bucket(Box<BucketAddress>),
    /// A directory: for tests, and for a remote file system mounted there.
    Directory(PathBuf),
}

/// Location in a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketAddress {
    /// Kind of store.
    pub store: Store,
    /// The bucket; Azure's are called containers.
    pub bucket: String,
    /// Prefix of all object names, without a trailing slash; may be empty.
    pub prefix: String,
    /// How to reach the bucket, and local copies of parts of it.
    pub settings: Settings,
}

/// Settings of a bucket: after the `?` of its address, or options of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The server; if missing, Amazon's of the region, Azure's of the account, or Google's.
    pub endpoint: Option<String>,
    /// Azure's storage account that the container is in.
    pub account: Option<String>,
    /// The store's region.
    pub region: Option<String>,
    /// The profile with the credentials.
    pub profile: Option<String>,
    /// The file with the credentials: profiles, a connection string of Azure, or a key of Google.
    pub credentials_file: Option<PathBuf>,
    /// Local directory of the cache.
    pub cache_dir: Option<PathBuf>,
    /// Maximum size of the cache in bytes; 0: no cache.
    pub cache_size: Option<u64>,
    /// Local directory of the intent log, with `log=local`.
    pub log_dir: Option<PathBuf>,
}

/// The reason why a text is no address.
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

/// Whether a word is meant as an address, valid or not, and not as a device.
#[must_use]
pub fn is_address(word: &Path) -> bool {
    let is = |start: &str| word.to_str().is_some_and(|text| text.starts_with(start));
    Store::ALL.map(Store::scheme).into_iter().chain([DIRECTORY]).chain(OTHERS).any(is)
}

fn is_plain(text: &str, also: &str) -> bool {
    text.chars().all(|one| one.is_ascii_alphanumeric() || also.contains(one))
}

impl Address {
    /// Parses an address.
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
        if has_credentials(text) {
            return refused(
                "credentials are no part of an address: --help of `nacre pool create` says where they come from",
            );
        }
        let with_rest = |store: Store| Some((store, text.strip_prefix(store.scheme())?));
        let Some((store, rest)) = Store::ALL.into_iter().find_map(with_rest) else {
            return refused(format!(
                "'{text}': pools lie on devices, in s3://BUCKET/PREFIX, az://CONTAINER/PREFIX, gs://BUCKET/PREFIX, or in file:///DIRECTORY"
            ));
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
                "account" => settings.account = Some(value),
                "region" => settings.region = Some(value),
                "profile" => settings.profile = Some(value),
                "credentials-file" => settings.credentials_file = Some(value.into()),
                "cache-dir" => settings.cache_dir = Some(value.into()),
                "log-dir" => settings.log_dir = Some(value.into()),
                "cache-size" => match value.parse() {
                    Ok(size) => settings.cache_size = Some(size),
                    Err(_) => return refused(format!("'{text}': '{value}' is no size in bytes")),
                },
                _ => return refused(format!("'{}{place}': there is no setting '{name}'", store.scheme())),
            }
        }
        settings.check(store)?;
        let (bucket, prefix) = (bucket.to_owned(), prefix.to_owned());
        Ok(Self::Bucket(Box::new(BucketAddress { store, bucket, prefix, settings })))
    }

    /// Merges the settings of a command line and of the environment into the address, so that a process without
    /// that environment finds the bucket as well.
    ///
    /// # Errors
    /// A setting is invalid.
    pub fn with(self, settings: Settings, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AddressError> {
        match self {
            Self::Bucket(place) => {
                let there = place.store.settings(environment);
                let settings = settings.or(place.settings).or(there);
                settings.check(place.store)?;
                Ok(Self::Bucket(Box::new(BucketAddress { settings, ..*place })))
            }
            Self::Directory(_) if settings != Settings::default() => refused(
                "a directory has no endpoint, account, region, profile or credentials, and no part of it is kept elsewhere",
            ),
            directory => Ok(directory),
        }
    }

    /// Returns the server that it or its file of credentials names: a bucket of the same name at another server is another bucket.
    #[must_use]
    pub fn endpoint(&self) -> Option<String> {
        let Self::Bucket(place) = self else { return None };
        let Settings { endpoint, account, credentials_file, .. } = &place.settings;
        if let Some(endpoint) = endpoint {
            return Some(endpoint.trim_end_matches('/').to_owned());
        }
        // A connection string names the server as well.
        let of_file = match credentials_file {
            Some(file) if place.store == Store::Azure => std::fs::read_to_string(file).ok(),
            _ => None,
        };
        let connection = of_file.map(|text| azure::Connection::read(&text)).unwrap_or_default();
        if let Some(endpoint) = connection.endpoint {
            return Some(endpoint.trim_end_matches('/').to_owned());
        }
        let account = account.clone().or(connection.account)?;
        Some(azure::endpoint(&account))
    }

    /// Returns the address without settings, for users.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Bucket(place) => {
                let BucketAddress { store, bucket, prefix, .. } = &**place;
                let slash = if prefix.is_empty() { "" } else { "/" };
                format!("{}{bucket}{slash}{prefix}", store.scheme())
            }
            Self::Directory(path) => format!("{DIRECTORY}{}", path.display()),
        }
    }
}

impl Settings {
    /// Merges settings: those of `others` where these have none.
    fn or(self, others: Self) -> Self {
        Self {
            endpoint: self.endpoint.or(others.endpoint),
            account: self.account.or(others.account),
            region: self.region.or(others.region),
            profile: self.profile.or(others.profile),
            credentials_file: self.credentials_file.or(others.credentials_file),
            cache_dir: self.cache_dir.or(others.cache_dir),
            cache_size: self.cache_size.or(others.cache_size),
            log_dir: self.log_dir.or(others.log_dir),
        }
    }

    fn check(&self, store: Store) -> Result<(), AddressError> {
        let strange = [
            ("region", self.region.is_some() && store != Store::S3),
            ("profile", self.profile.is_some() && store != Store::S3),
            ("account", self.account.is_some() && store != Store::Azure),
        ];
        if let Some((name, _)) = strange.into_iter().find(|(_, is_given)| *is_given) {
            return refused(format!("an address that begins with {} has no {name}", store.scheme()));
        }
        if let Some(account) = self.account.as_ref().filter(|account| !is_plain(account, "-")) {
            return refused(format!("'{account}' is no account"));
        }
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
                return refused(
                    "an endpoint contains no user and no password: credentials are named by --profile or --credentials-file",
                );
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
            ("account", self.account.clone()),
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
        let Self::Bucket(found) = self else { return Ok(()) };
        for (at, (name, value)) in found.settings.named().into_iter().enumerate() {
            write!(f, "{}{name}={value}", if at == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

/// Whether an address has a user name or keys before the name of the bucket, as other programs write them. A secret
/// may contain slashes.
fn has_credentials(address: &str) -> bool {
    let place = address.split('?').next().unwrap_or_default();
    let Some((_, rest)) = place.split_once("://") else { return false };
    let bucket = rest.split('/').next().unwrap_or_default();
    rest.contains('@') || (bucket.contains(':') && !place.starts_with("http"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn keys_are_refused_and_not_shown() {
        for text in [
            "s3://KEY:HIDDEN@bucket/p",
            "s3://KEY:HID/DEN@bucket/p",
            "s3://KEY:HIDDEN",
            "az://account:HIDDEN@box",
            "https://KEY:HIDDEN@server/bucket",
            "s3://bucket?endpoint=http://KEY:HIDDEN@server",
            "s3://bucket?secret=HIDDEN",
        ] {
            let why = Address::parse(text).unwrap_err().to_string();
            assert!(!why.contains("HID") && !why.contains("DEN"), "{why}");
        }
        let settings = Settings { endpoint: Some("http://KEY:HIDDEN@server".to_owned()), ..Settings::default() };
        let why = Address::parse("s3://b").unwrap().with(settings, |_| None).unwrap_err().to_string();
        assert!(why.contains("credentials") && !why.contains("HIDDEN"), "{why}");
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in [
            "s3://bucket",
            "s3://bucket/a/b-c_d.e",
            "s3://b.c/p?endpoint=http://127.0.0.1:5000&region=eu-1&profile=backup&credentials-file=/etc/keys",
            "s3://bucket?cache-dir=/var/cache/x&cache-size=1048576&log-dir=/var/log/x",
            "az://box/p?account=someone&credentials-file=/etc/connection",
            "gs://bucket/p?credentials-file=/etc/key.json",
            "file:///srv/pool",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Address::parse("s3://bucket/a/").unwrap().name(), "s3://bucket/a");
        let endpoint = |text: &str| Address::parse(text).unwrap().endpoint();
        assert_eq!(endpoint("s3://bucket?endpoint=http://a/"), endpoint("s3://bucket?endpoint=http://a"));
        assert_eq!((endpoint("s3://bucket"), endpoint("gs://bucket"), endpoint("file:///d")), (None, None, None));
        assert_eq!(endpoint("az://b?account=a").unwrap(), "https://a.blob.core.windows.net");
        let file = tempfile::NamedTempFile::new().unwrap();
        let of_file = |text: &str, settings: &str| {
            std::fs::write(file.path(), text).unwrap();
            endpoint(&format!("az://b?{settings}credentials-file={}", file.path().display()))
        };
        assert_eq!(of_file("AccountName=a;AccountKey=x", "").unwrap(), "https://a.blob.core.windows.net");
        assert_eq!(of_file("AccountName=a;AccountKey=x", "account=b&").unwrap(), "https://b.blob.core.windows.net");
        assert_eq!(of_file("AccountName=a;BlobEndpoint=http://s/a/", "account=b&").unwrap(), "http://s/a");
        assert_eq!(of_file("AccountName=a;BlobEndpoint=http://s/a", "endpoint=http://t/&").unwrap(), "http://t");
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
            "s3://b?account=a",
            "az://b?region=here",
            "az://b?account=a/b",
            "gs://b?profile=x",
            "gcs://b",
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
        let there = |name: &str| match name {
            "AZURE_STORAGE_CONNECTION_STRING" => {
                Some("AccountName=me;AccountKey=c2VjcmV0;BlobEndpoint=http://there/me".to_owned())
            }
            "GOOGLE_APPLICATION_CREDENTIALS" => Some("/key.json".to_owned()),
            _ => None,
        };
        let whole = |text: &str| Address::parse(text).unwrap().with(Settings::default(), there).unwrap().to_string();
        assert_eq!(whole("az://b/p"), "az://b/p?endpoint=http://there/me&account=me");
        assert_eq!(whole("gs://b/p"), "gs://b/p?credentials-file=/key.json");
    }
}
