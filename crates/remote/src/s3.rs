//! Buckets of stores that speak S3. Sources of credentials, in this order:
//!
//! 1. the profile or the file in the address;
//! 2. `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`;
//! 3. a role by `AWS_WEB_IDENTITY_TOKEN_FILE`, or a container's `AWS_CONTAINER_CREDENTIALS_*`;
//! 4. the profile `default` of `~/.aws/credentials`, or of `~/.aws/config`;
//! 5. the machine itself, where the store is Amazon's.
//!
//! A profile has keys, or a program that prints some (`credential_process`). Files are read again when they have
//! changed, so that others can renew expiring credentials; those of 3 and 5 are renewed by `object_store` before
//! they expire. Invariant: credentials are neither shown nor stored.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, S3ConditionalPut};
use object_store::{CredentialProvider, ObjectStore};

use crate::address::BucketAddress;
use crate::credential_file::{CredentialFile, told};
use crate::credential_process::Printing;
use crate::transport::Client;
use crate::{Environment, of_environment as there};

/// Default region, as in other tools.
const REGION: &str = "us-east-1";
const KEY: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";
const DEFAULT: &str = "default";

/// Environment variables of roles, and the settings of `object_store` for them.
const ROLES: [(&str, AmazonS3ConfigKey); 7] = [
    ("AWS_WEB_IDENTITY_TOKEN_FILE", AmazonS3ConfigKey::WebIdentityTokenFile),
    ("AWS_ROLE_ARN", AmazonS3ConfigKey::RoleArn),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_ENDPOINT_URL_STS", AmazonS3ConfigKey::StsEndpoint),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
];

fn has_role(environment: Environment<'_>) -> bool {
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]
        .iter()
        .any(|name| there(environment, name).is_some())
}

/// Whether credentials come from the environment of this process alone, where neither a profile nor a file is
/// named.
pub(crate) fn is_of_environment(environment: Environment<'_>) -> bool {
    there(environment, KEY).is_some() || has_role(environment)
}

/// Two clients of one bucket.
pub(crate) struct Stores {
    /// Removes one object by each request.
    pub(crate) single: Box<dyn ObjectStore>,
    /// Removes many objects by one request.
    pub(crate) bulk: Box<dyn ObjectStore>,
}

/// Opens the bucket.
///
/// # Errors
/// There are no credentials; the file cannot be read, or has none.
pub(crate) fn open(place: &BucketAddress, client: Client, environment: Environment<'_>) -> io::Result<Stores> {
    let builder = builder(place, client.clone()).with_disable_bulk_delete(true);
    let single = give(builder, place, environment)?.build().map_err(io::Error::other)?;
    let bulk = self::builder(place, client).with_credentials(Arc::clone(single.credentials()));
    Ok(Stores { single: Box::new(single), bulk: Box::new(bulk.build().map_err(io::Error::other)?) })
}

fn builder(place: &BucketAddress, client: Client) -> AmazonS3Builder {
    let builder = AmazonS3Builder::new()
        .with_bucket_name(&place.bucket)
        .with_region(place.settings.region.as_deref().unwrap_or(REGION))
        .with_client_options(client.options)
        .with_http_connector(client.connector)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(client.retry);
    match &place.settings.endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint),
        None => builder.with_virtual_hosted_style_request(true),
    }
}

/// Returns the usual files with profiles, if they exist.
fn usual_files(environment: Environment<'_>) -> Vec<PathBuf> {
    let below = |name: &str| Some(PathBuf::from(there(environment, "HOME")?).join(".aws").join(name));
    let config = there(environment, "AWS_CONFIG_FILE").map(PathBuf::from).or_else(|| below("config"));
    below("credentials").into_iter().chain(config).filter(|file| file.exists()).collect()
}

/// Sets the source of credentials.
///
/// # Errors
/// There are no credentials; the file cannot be read, or has none.
pub(crate) fn give(
    builder: AmazonS3Builder,
    place: &BucketAddress,
    environment: Environment<'_>,
) -> io::Result<AmazonS3Builder> {
    let of_file = |path: &PathBuf, profile: &str| Profile::open(path, profile).map(Arc::new);
    // The error of the last file is returned.
    let of_files = |files: &[PathBuf], profile: &str| {
        let mut found = files.iter().map(|file| of_file(file, profile));
        let first = found.next().unwrap_or_else(|| {
            Err(io::Error::new(ErrorKind::NotFound, "there is neither '~/.aws/credentials' nor '~/.aws/config'"))
        });
        found.fold(first, Result::or)
    };
    if place.settings.profile.is_some() || place.settings.credentials_file.is_some() {
        let profile = place.settings.profile.as_deref().unwrap_or(DEFAULT);
        return Ok(match &place.settings.credentials_file {
            Some(file) => builder.with_credentials(of_file(file, profile)?),
            None => builder.with_credentials(of_files(&usual_files(environment), profile)?),
        });
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
    let files = usual_files(environment);
    if !files.is_empty() {
        return Ok(builder.with_credentials(of_files(&files, DEFAULT)?));
    }
    if place.settings.endpoint.is_none() {
        // The machine is asked for credentials with the first request.
        return Ok(builder);
    }
    let why = "there are no credentials: neither --profile or --credentials-file, nor AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor ~/.aws/credentials";
    Err(io::Error::new(ErrorKind::PermissionDenied, why))
}

/// Content of a profile.
#[derive(Debug)]
enum Found {
    Keys(Arc<AwsCredential>),
    /// A command that prints keys.
    Command(String),
}

/// A profile in a file, in the format of Amazon's tools.
#[derive(Debug)]
struct Profile {
    file: CredentialFile<Found>,
    printed: Arc<Printing>,
}

impl Profile {
    /// Opens it; errors in it are reported now.
    fn open(path: &Path, name: &str) -> io::Result<Self> {
        let (name, of) = (name.to_owned(), path.to_owned());
        let file = CredentialFile::open(path.to_owned(), move |text| {
            let found = profile(text, &name)?;
            if matches!(found, Found::Command(_)) {
                only_ours(&of)?;
            }
            Ok(found)
        })?;
        let found = Self { file, printed: Arc::default() };
        if let Found::Command(command) = &*found.file.newest()? {
            found.printed.of(command)?;
        }
        Ok(found)
    }
}

/// Refuses a file with a command that others can change: they would have it run with our rights.
fn only_ours(path: &Path) -> io::Result<()> {
    let file = std::fs::metadata(path)?;
    let is_trusted = [0, rustix::process::geteuid().as_raw()].contains(&file.uid()) && file.mode() & 0o022 == 0;
    if is_trusted {
        return Ok(());
    }
    let why = "others can write to it, and it names a program to be run (credential_process)";
    Err(io::Error::new(ErrorKind::PermissionDenied, why))
}

#[async_trait::async_trait]
impl CredentialProvider for Profile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let found = self.file.newest().map_err(told)?;
        let printed = Arc::clone(&self.printed);
        match &*found {
            Found::Keys(keys) => Ok(Arc::clone(keys)),
            Found::Command(command) => {
                let command = command.clone();
                let run = tokio::task::spawn_blocking(move || printed.of(&command)).await;
                run.map_err(io::Error::other).and_then(|printed| printed).map_err(told)
            }
        }
    }
}

/// Parses a profile. No error contains any part of the text.
fn profile(text: &str, name: &str) -> io::Result<Found> {
    let (mut inside, mut found, mut refers) = (false, false, false);
    let [mut key, mut secret, mut token, mut command] = [None, None, None, None];
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
            "credential_process" => command = value,
            "sso_session" | "sso_start_url" | "source_profile" | "credential_source" | "login_session" => refers = true,
            _ => {}
        }
    }
    let refused = |why: &str| io::Error::new(ErrorKind::PermissionDenied, format!("profile '{name}' {why}"));
    if !found {
        return Err(refused("is not there"));
    }
    match (key.zip(secret), command) {
        (Some((key_id, secret_key)), _) => Ok(Found::Keys(Arc::new(AwsCredential { key_id, secret_key, token }))),
        (None, Some(command)) => Ok(Found::Command(command)),
        (None, None) if refers => Err(refused(
            "is one of single sign-on or of another profile: a profile with 'credential_process = aws configure export-credentials --format process --profile NAME' takes its credentials",
        )),
        (None, None) => {
            Err(refused("has neither aws_access_key_id with aws_secret_access_key, nor credential_process"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Settings;
    use std::fs;

    const FILE: &str = "# keys\n[default]\naws_access_key_id = A\naws_secret_access_key=B\n\n[profile  b]\nAWS_ACCESS_KEY_ID=C\naws_secret_access_key = D=E\naws_session_token = T\n[half]\naws_access_key_id = hidden\n[by]\ncredential_process = /opt/keys --for a=b\n[sso]\nsso_session = x\n";

    fn read(name: &str) -> io::Result<(String, String, Option<String>)> {
        profile(FILE, name).map(|found| match found {
            Found::Keys(keys) => (keys.key_id.clone(), keys.secret_key.clone(), keys.token.clone()),
            Found::Command(command) => (command, String::new(), None),
        })
    }

    #[test]
    fn profiles_are_read() {
        assert_eq!(read("default").unwrap(), ("A".into(), "B".into(), None));
        assert_eq!(read("b").unwrap(), ("C".into(), "D=E".into(), Some("T".into())));
        assert_eq!(read("by").unwrap().0, "/opt/keys --for a=b");
        assert_eq!(read("c").unwrap_err().to_string(), "profile 'c' is not there");
        assert!(read("sso").unwrap_err().to_string().contains("export-credentials"));
        assert!(!read("half").unwrap_err().to_string().contains("hidden"));
    }

    #[test]
    fn a_program_is_run_for_a_file_that_is_ours_alone() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config");
        fs::write(&path, "[default]\ncredential_process = echo hidden\n").unwrap();
        let said = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Profile::open(&path, DEFAULT).unwrap_err().to_string()
        };
        assert_eq!(said(0o600), "credential_process prints no credentials");
        assert!(said(0o620).contains("others can write to it"), "{}", said(0o620));
    }

    #[test]
    fn what_is_named_comes_before_the_environment() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("keys");
        fs::write(&path, FILE).unwrap();
        let with_keys = |name: &str| [KEY, SECRET].contains(&name).then(|| "x".to_owned());
        let half = |name: &str| (name == KEY).then(|| "x".to_owned());
        let settings = Settings { endpoint: Some("http://x".into()), ..Settings::default() };
        let here = BucketAddress { settings: settings.clone(), ..BucketAddress::default() };
        let settings = Settings { credentials_file: Some(path), profile: Some("c".into()), ..settings };
        let named = BucketAddress { settings, ..BucketAddress::default() };
        let builder = AmazonS3Builder::new;
        assert!(give(builder(), &named, &with_keys).unwrap_err().to_string().contains("profile 'c' is not there"));
        assert!(give(builder(), &here, &with_keys).is_ok());
        assert!(give(builder(), &here, &half).unwrap_err().to_string().contains("one alone"));
        assert!(give(builder(), &here, &|_| None).unwrap_err().to_string().contains("there are no credentials"));
        assert!(is_of_environment(&with_keys) && !is_of_environment(&|_| None));
        // The usual files, one after the other.
        let home = scratch.path().display().to_string();
        let at_home = |name: &str| (name == "HOME").then(|| home.clone());
        fs::create_dir(scratch.path().join(".aws")).unwrap();
        let settings = Settings { profile: Some("b".into()), ..Settings::default() };
        let b = BucketAddress { settings, ..BucketAddress::default() };
        assert!(give(builder(), &b, &at_home).unwrap_err().to_string().contains("there is neither"));
        fs::write(scratch.path().join(".aws/credentials"), "[default]\n").unwrap();
        assert!(give(builder(), &b, &at_home).unwrap_err().to_string().contains("profile 'b' is not there"));
        fs::write(scratch.path().join(".aws/config"), FILE).unwrap();
        assert!(give(builder(), &b, &at_home).is_ok());
    }
}
