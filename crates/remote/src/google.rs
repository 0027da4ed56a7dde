//! Buckets of Google's Cloud Storage. Sources of credentials, in this order:
//!
//! 1. the file in the address or in `GOOGLE_APPLICATION_CREDENTIALS`: the key of a service account, or the output
//!    of `gcloud auth application-default login`;
//! 2. `~/.config/gcloud/application_default_credentials.json`;
//! 3. the machine itself, where the store is Google's.
//!
//! Files are read once, and their tokens are renewed by `object_store`. Invariants: credentials are neither shown
//! nor stored; no error contains any part of a file.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use object_store::ObjectStore;
use object_store::gcp::GoogleCloudStorageBuilder;
use serde::Deserialize;

use crate::address::BucketAddress;
use crate::transport::Client;
use crate::{Environment, of_environment};

/// The field that states the kind of the file.
#[derive(Deserialize)]
struct KindOfFile {
    #[serde(rename = "type", default)]
    kind: String,
}

fn refused(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why.into())
}

/// Opens the bucket.
///
/// # Errors
/// There are no credentials; the file cannot be read, or has none.
pub(crate) fn open(
    place: &BucketAddress,
    client: Client,
    environment: Environment<'_>,
) -> io::Result<Box<dyn ObjectStore>> {
    let builder = GoogleCloudStorageBuilder::new()
        .with_bucket_name(&place.bucket)
        .with_client_options(client.options)
        .with_http_connector(client.connector)
        .with_retry(client.retry);
    let settings = &place.settings;
    let builder = match &settings.endpoint {
        Some(endpoint) => builder.with_base_url(endpoint.trim_end_matches('/')),
        None => builder,
    };
    let usual = || {
        let home = PathBuf::from(of_environment(environment, "HOME")?);
        Some(home.join(".config/gcloud/application_default_credentials.json")).filter(|file| file.exists())
    };
    let builder = match settings.credentials_file.clone().or_else(usual) {
        Some(file) => by_file(builder, &file)?,
        // The machine is asked for credentials with the first request.
        None if settings.endpoint.is_none() => builder,
        None => {
            return Err(refused(
                "there are no credentials: neither --credentials-file, nor GOOGLE_APPLICATION_CREDENTIALS, nor ~/.config/gcloud/application_default_credentials.json",
            ));
        }
    };
    // An error message of object_store could contain a part of a file.
    let built = builder.build();
    built.map(|store| Box::new(store) as Box<dyn ObjectStore>).map_err(|_| refused("the credentials cannot be used"))
}

fn by_file(builder: GoogleCloudStorageBuilder, file: &Path) -> io::Result<GoogleCloudStorageBuilder> {
    let failed = |kind, why: String| io::Error::new(kind, format!("credentials in '{}': {why}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| failed(error.kind(), error.to_string()))?;
    let none = || failed(ErrorKind::PermissionDenied, "it is no key of a service account".to_owned());
    let KindOfFile { kind } = serde_json::from_str(&text).map_err(|_| none())?;
    match kind.as_str() {
        "service_account" => Ok(builder.with_service_account_key(text)),
        "authorized_user" => Ok(builder.with_application_credentials(file.display().to_string())),
        _ => Err(failed(
            ErrorKind::PermissionDenied,
            "of the types of such files, 'service_account' and 'authorized_user' can be used".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_none_are_refused_and_not_shown() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("key.json");
        let said = |text: &str| {
            std::fs::write(&file, text).unwrap();
            by_file(GoogleCloudStorageBuilder::new(), &file).map(drop).map_err(|error| error.to_string())
        };
        assert!(said(r#"{"type": "service_account"}"#).is_ok());
        assert!(said(r#"{"type": "authorized_user"}"#).is_ok());
        for (wrong, why) in
            [("hidden", "no key of"), (r#"{"type": "hidden"}"#, "can be used"), (r#"{"type": 7}"#, "no key of")]
        {
            let said = said(wrong).unwrap_err();
            assert!(said.contains(why) && !said.contains("hidden"), "{said}");
        }
    }
}
