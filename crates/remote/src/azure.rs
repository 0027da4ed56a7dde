//! Containers of Azure's Blob Storage. Sources of credentials, in this order:
//!
//! 1. the file in the address: a connection string, as Azure's tools print it;
//! 2. `AZURE_STORAGE_CONNECTION_STRING`; `AZURE_STORAGE_KEY`; `AZURE_STORAGE_SAS_TOKEN`;
//! 3. a role by `AZURE_FEDERATED_TOKEN_FILE`, or `AZURE_CLIENT_SECRET`, with `AZURE_CLIENT_ID` and
//!    `AZURE_TENANT_ID`;
//! 4. the machine itself (its managed identity), where the store is Azure's.
//!
//! The file is read again when it has changed; credentials of 3 and 4 are renewed by `object_store`. Invariants:
//! credentials are neither shown nor stored; no error contains any part of a connection string.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::azure::{AzureAccessKey, AzureConfigKey, AzureCredential, MicrosoftAzureBuilder};

use crate::address::BucketAddress;
use crate::credential_file::CredentialFile;
use crate::transport::Client;
use crate::{Environment, of_environment};

/// Environment variable with a whole connection string.
pub(crate) const CONNECTION: &str = "AZURE_STORAGE_CONNECTION_STRING";
const KEYS: [&str; 2] = ["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"];
const SIGNATURE: &str = "AZURE_STORAGE_SAS_TOKEN";
const ROLES: [&str; 2] = ["AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_SECRET"];

/// Environment variables with roles and the machine's identities, and the settings of `object_store` for them.
const TOLD: [(&str, AzureConfigKey); 6] = [
    ("AZURE_FEDERATED_TOKEN_FILE", AzureConfigKey::FederatedTokenFile),
    ("AZURE_CLIENT_SECRET", AzureConfigKey::ClientSecret),
    ("AZURE_CLIENT_ID", AzureConfigKey::ClientId),
    ("AZURE_TENANT_ID", AzureConfigKey::AuthorityId),
    ("AZURE_AUTHORITY_HOST", AzureConfigKey::AuthorityHost),
    ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
];

/// Returns the server of an account.
pub(crate) fn endpoint(account: &str) -> String {
    format!("https://{account}.blob.core.windows.net")
}

/// A connection string, parsed.
#[derive(Default)]
pub(crate) struct Connection {
    pub account: Option<String>,
    pub endpoint: Option<String>,
    key: Option<String>,
    signature: Option<String>,
}

impl Connection {
    /// Parses a connection string; missing values are `None`.
    pub(crate) fn read(text: &str) -> Self {
        let mut found = Self::default();
        let (mut protocol, mut suffix) = ("https", None);
        for (name, value) in text.trim().split(';').filter_map(|part| part.split_once('=')) {
            let whole = || Some(value.to_owned());
            match name.trim().to_ascii_lowercase().as_str() {
                "accountname" => found.account = whole(),
                "accountkey" => found.key = whole(),
                "sharedaccesssignature" => found.signature = whole(),
                "blobendpoint" => found.endpoint = whole(),
                "endpointsuffix" => suffix = Some(value),
                "defaultendpointsprotocol" => protocol = value,
                _ => {}
            }
        }
        // The usual endpoint follows from the account's name.
        if let (None, Some(account), Some(suffix)) = (&found.endpoint, &found.account, suffix) {
            let named = format!("{protocol}://{account}.blob.{suffix}");
            found.endpoint = Some(named).filter(|named| *named != endpoint(account));
        }
        found
    }

    fn credential(&self) -> io::Result<AzureCredential> {
        match (&self.key, &self.signature) {
            (Some(key), _) => by_key(key),
            (None, Some(signature)) => by_signature(signature),
            (None, None) => Err(refused("a connection string without AccountKey and SharedAccessSignature")),
        }
    }
}

fn refused(why: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why)
}

fn by_key(key: &str) -> io::Result<AzureCredential> {
    // An error message could reveal a part of the key.
    let key = AzureAccessKey::try_new(key).map_err(|_| refused("the account's key is no key: it is not in base64"))?;
    Ok(AzureCredential::AccessKey(key))
}

fn by_signature(signature: &str) -> io::Result<AzureCredential> {
    let pairs = object_store::azure::split_sas(signature);
    pairs.map(AzureCredential::SASToken).map_err(|_| refused("the shared access signature is none"))
}

/// Whether credentials come from the environment of this process alone, where no file is named.
pub(crate) fn is_of_environment(environment: Environment<'_>) -> bool {
    let there = |name: &&str| of_environment(environment, name).is_some();
    [CONNECTION, SIGNATURE].iter().chain(&KEYS).chain(&ROLES).any(there)
}

/// Opens the container.
///
/// # Errors
/// There are no credentials; the file cannot be read, or has none; no account is named.
pub(crate) fn open(
    place: &BucketAddress,
    client: Client,
    environment: Environment<'_>,
) -> io::Result<Box<dyn ObjectStore>> {
    let builder = MicrosoftAzureBuilder::new()
        .with_container_name(&place.bucket)
        .with_http_connector(client.connector)
        .with_retry(client.retry);
    let there = |name: &str| of_environment(environment, name);
    let settings = &place.settings;
    let (mut account, mut server) = (settings.account.clone(), settings.endpoint.clone());
    let of_string = |found: &Connection, account: &mut Option<String>, server: &mut Option<String>| {
        *account = account.take().or_else(|| found.account.clone());
        *server = server.take().or_else(|| found.endpoint.clone());
    };
    let builder = if let Some(file) = &settings.credentials_file {
        let text = std::fs::read_to_string(file)
            .map_err(|error| io::Error::new(error.kind(), format!("credentials in '{}': {error}", file.display())))?;
        of_string(&Connection::read(&text), &mut account, &mut server);
        let found = CredentialFile::open(file.clone(), |text| Connection::read(text).credential())?;
        builder.with_credentials(Arc::new(found))
    } else if let Some(text) = there(CONNECTION) {
        let found = Connection::read(&text);
        of_string(&found, &mut account, &mut server);
        fixed(builder, found.credential()?)
    } else if let Some(key) = KEYS.iter().find_map(|name| there(name)) {
        fixed(builder, by_key(&key)?)
    } else if let Some(signature) = there(SIGNATURE) {
        fixed(builder, by_signature(&signature)?)
    } else if settings.endpoint.is_none() || ROLES.iter().any(|name| there(name).is_some()) {
        // The machine is asked for credentials with the first request.
        let told = TOLD.iter().filter_map(|(name, key)| Some((key, there(name)?)));
        told.fold(builder, |builder, (key, value)| builder.with_config(*key, value))
    } else {
        return Err(refused(
            "there are no credentials: neither --credentials-file, nor AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
        ));
    };
    let account = account.ok_or_else(|| {
        io::Error::new(ErrorKind::NotFound, "no account is named: neither by --account, nor by AZURE_STORAGE_ACCOUNT")
    })?;
    let server = server.unwrap_or_else(|| endpoint(&account));
    // The server may come from the file.
    let options = client.options.with_allow_http(server.starts_with("http://"));
    let built = builder.with_account(account).with_endpoint(server).with_client_options(options).build();
    // An error message of object_store could contain a part of its settings.
    built.map(|store| Box::new(store) as Box<dyn ObjectStore>).map_err(|_| refused("the credentials cannot be used"))
}

fn fixed(builder: MicrosoftAzureBuilder, credential: AzureCredential) -> MicrosoftAzureBuilder {
    builder.with_credentials(Arc::new(object_store::StaticCredentialProvider::new(credential)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_strings_are_read() {
        let read = |text: &str| {
            let found = Connection::read(text);
            (found.account.clone(), found.endpoint.clone(), found.credential().map_err(|error| error.to_string()))
        };
        let key = || Ok(AzureCredential::AccessKey(AzureAccessKey::try_new("c2VjcmV0").unwrap()));
        let usual =
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=c2VjcmV0;EndpointSuffix=core.windows.net\n";
        assert_eq!(read(usual), (Some("me".into()), None, key()));
        let other = "AccountName=me;AccountKey=c2VjcmV0;BlobEndpoint=http://127.0.0.1:1/me;QueueEndpoint=x";
        assert_eq!(read(other).1.unwrap(), "http://127.0.0.1:1/me");
        assert_eq!(read("AccountName=me;EndpointSuffix=elsewhere").1.unwrap(), "https://me.blob.elsewhere");
        let signed = read("BlobEndpoint=https://me.x;SharedAccessSignature=sv=2&sig=a%3D").2.unwrap();
        let pairs = vec![("sv".to_owned(), "2".to_owned()), ("sig".to_owned(), "a=".to_owned())];
        assert_eq!(signed, AzureCredential::SASToken(pairs));
        for wrong in ["", "hidden", "AccountName=me;AccountKey=hidden-", "SharedAccessSignature=hidden"] {
            let said = read(wrong).2.unwrap_err();
            assert!(!said.contains("hidden"), "{said}");
        }
    }
}
