//! Where the credentials for a bucket come from, in this order:
//!
//! 1. the profile or the file that the address names;
//! 2. `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`;
//! 3. a role by `AWS_WEB_IDENTITY_TOKEN_FILE`, or a container's `AWS_CONTAINER_CREDENTIALS_*`;
//! 4. the profile `default` of `~/.aws/credentials`;
//! 5. the machine itself, where the store is Amazon's.
//!
//! Files are read again when they have changed, so that somebody can renew what expires; what 3 and
//! 5 give is renewed by `object_store` before it does. Invariant: nothing here is shown or kept.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use object_store::CredentialProvider;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use parking_lot::Mutex;

use crate::address::S3Address;

/// Asks the environment.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

const KEY: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";
const DEFAULT: &str = "default";

/// What `object_store` is told of roles, as the environment says it.
const ROLES: [(&str, AmazonS3ConfigKey); 7] = [
    ("AWS_WEB_IDENTITY_TOKEN_FILE", AmazonS3ConfigKey::WebIdentityTokenFile),
    ("AWS_ROLE_ARN", AmazonS3ConfigKey::RoleArn),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_ENDPOINT_URL_STS", AmazonS3ConfigKey::StsEndpoint),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
];

fn there(environment: Environment<'_>, name: &str) -> Option<String> {
    environment(name).filter(|value| !value.is_empty())
}

fn has_role(environment: Environment<'_>) -> bool {
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]
        .iter()
        .any(|name| there(environment, name).is_some())
}

/// Whether they come from the environment of this process alone.
pub(crate) fn are_of_environment(place: &S3Address, environment: Environment<'_>) -> bool {
    place.settings.profile.is_none()
        && place.settings.credentials_file.is_none()
        && (there(environment, KEY).is_some() || has_role(environment))
}

/// The usual file.
fn usual_file(environment: Environment<'_>) -> Option<PathBuf> {
    there(environment, "HOME").map(|home| PathBuf::from(home).join(".aws/credentials"))
}

/// Tells the builder where credentials come from.
///
/// # Errors
/// There are none; a file that cannot be read, or has none.
pub(crate) fn give(
    builder: AmazonS3Builder,
    place: &S3Address,
    environment: Environment<'_>,
) -> io::Result<AmazonS3Builder> {
    let of_file = |path: PathBuf, profile: &str| {
        let found = FileCredentials { path, profile: profile.to_owned(), read: Mutex::default() };
        // What is wrong with it is told now.
        found.newest()?;
        io::Result::Ok(Arc::new(found))
    };
    if place.settings.profile.is_some() || place.settings.credentials_file.is_some() {
        let profile = place.settings.profile.as_deref().unwrap_or(DEFAULT);
        let file = place.settings.credentials_file.clone().or_else(|| usual_file(environment));
        let file = file.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "there is no home directory for '.aws'"))?;
        return Ok(builder.with_credentials(of_file(file, profile)?));
    }
    match (there(environment, KEY), there(environment, SECRET)) {
        (Some(key), Some(secret)) => {
            let builder = builder.with_access_key_id(key).with_secret_access_key(secret);
            return Ok(match there(environment, TOKEN) {
                Some(token) => builder.with_token(token),
                None => builder,
            });
        }
        (None, None) => {}
        _ => {
            let why = format!("of {KEY} and {SECRET}, the environment has one alone");
            return Err(io::Error::new(ErrorKind::PermissionDenied, why));
        }
    }
    if has_role(environment) {
        let given = ROLES.iter().filter_map(|(name, key)| Some((key, there(environment, name)?)));
        return Ok(given.fold(builder, |builder, (key, value)| builder.with_config(*key, value)));
    }
    if let Some(file) = usual_file(environment).filter(|file| file.exists()) {
        return Ok(builder.with_credentials(of_file(file, DEFAULT)?));
    }
    if place.settings.endpoint.is_none() {
        // Asks the machine with the first request.
        return Ok(builder);
    }
    let why = "there are no credentials: neither --profile or --credentials-file, nor AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor ~/.aws/credentials";
    Err(io::Error::new(ErrorKind::PermissionDenied, why))
}

/// Credentials in a file, in the form that Amazon's tools have.
struct FileCredentials {
    path: PathBuf,
    profile: String,
    /// What was read last, and when that was written.
    read: Mutex<Option<(SystemTime, Arc<AwsCredential>)>>,
}

impl fmt::Debug for FileCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileCredentials").field("path", &self.path).field("profile", &self.profile).finish()
    }
}

impl FileCredentials {
    fn newest(&self) -> io::Result<Arc<AwsCredential>> {
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("credentials in '{}': {error}", self.path.display()))
        };
        let written = fs::metadata(&self.path).and_then(|file| file.modified()).map_err(failed)?;
        let mut read = self.read.lock();
        if let Some((_, known)) = read.as_ref().filter(|(at, _)| *at == written) {
            return Ok(Arc::clone(known));
        }
        let text = fs::read_to_string(&self.path).map_err(failed)?;
        let found = Arc::new(profile(&text, &self.profile, &self.path)?);
        *read = Some((written, Arc::clone(&found)));
        Ok(found)
    }
}

#[async_trait::async_trait]
impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        // A small file: no thread waits for long.
        self.newest().map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
    }
}

/// The credentials of a profile. No error contains anything of the text.
fn profile(text: &str, name: &str, path: &Path) -> io::Result<AwsCredential> {
    let (mut inside, mut found) = (false, false);
    let [mut key, mut secret, mut token] = [None, None, None];
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let section = section.trim();
            inside = section.strip_prefix("profile ").map_or(section, str::trim) == name;
            found |= inside;
            continue;
        }
        let Some((word, value)) = line.split_once('=').filter(|_| inside) else { continue };
        let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match word.trim().to_ascii_lowercase().as_str() {
            "aws_access_key_id" => key = value,
            "aws_secret_access_key" => secret = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    let refused = |why: &str| {
        let why = format!("credentials in '{}': profile '{name}' {why}", path.display());
        io::Error::new(ErrorKind::PermissionDenied, why)
    };
    if !found {
        return Err(refused("is not there"));
    }
    let both = key.zip(secret).ok_or_else(|| refused("has no aws_access_key_id with aws_secret_access_key"))?;
    Ok(AwsCredential { key_id: both.0, secret_key: both.1, token })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Settings;

    const FILE: &str = "# keys\n[default]\naws_access_key_id = A\naws_secret_access_key=B\n\n[profile  b]\nAWS_ACCESS_KEY_ID=C\naws_secret_access_key = D=E\naws_session_token = T\n[half]\naws_access_key_id = hidden\n";

    fn read(name: &str) -> io::Result<(String, String, Option<String>)> {
        profile(FILE, name, Path::new("/keys")).map(|found| (found.key_id, found.secret_key, found.token))
    }

    #[test]
    fn profiles_are_read() {
        assert_eq!(read("default").unwrap(), ("A".into(), "B".into(), None));
        assert_eq!(read("b").unwrap(), ("C".into(), "D=E".into(), Some("T".into())));
        assert_eq!(read("c").unwrap_err().to_string(), "credentials in '/keys': profile 'c' is not there");
        assert!(!read("half").unwrap_err().to_string().contains("hidden"));
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("keys");
        fs::write(&path, FILE).unwrap();
        let found = FileCredentials { path: path.clone(), profile: DEFAULT.to_owned(), read: Mutex::default() };
        assert_eq!(found.newest().unwrap().secret_key, "B");
        fs::write(&path, FILE.replace("=B", "=renewed")).unwrap();
        let file = fs::File::open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(found.newest().unwrap().secret_key, "renewed");
        assert!(!format!("{found:?}").contains("renewed"));
    }

    #[test]
    fn what_is_named_comes_before_the_environment() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("keys");
        fs::write(&path, FILE).unwrap();
        let with_keys = |name: &str| [KEY, SECRET].contains(&name).then(|| "x".to_owned());
        let half = |name: &str| (name == KEY).then(|| "x".to_owned());
        let settings = Settings { endpoint: Some("http://x".into()), ..Settings::default() };
        let here = S3Address { settings: settings.clone(), ..S3Address::default() };
        let settings = Settings { credentials_file: Some(path), profile: Some("c".into()), ..settings };
        let named = S3Address { settings, ..S3Address::default() };
        let builder = AmazonS3Builder::new;
        assert!(give(builder(), &named, &with_keys).unwrap_err().to_string().contains("profile 'c' is not there"));
        assert!(give(builder(), &here, &with_keys).is_ok());
        assert!(give(builder(), &here, &half).unwrap_err().to_string().contains("one alone"));
        assert!(give(builder(), &here, &|_| None).unwrap_err().to_string().contains("there are no credentials"));
        assert!(are_of_environment(&here, &with_keys) && !are_of_environment(&named, &with_keys));
        assert!(!are_of_environment(&here, &|_| None));
    }
}
