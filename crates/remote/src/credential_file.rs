//! Credentials in a file that others may renew: it is read again when it has changed.
//!
//! Used for stores whose credentials we parse ourselves ([`crate::s3`], [`crate::azure`]). Invariant: no error
//! contains any part of the file's text.

use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use object_store::CredentialProvider;
use parking_lot::Mutex;

/// Parser of a file's text; its errors state what is wrong with it.
type Read<T> = Box<dyn Fn(&str) -> io::Result<T> + Send + Sync>;

pub(crate) struct CredentialFile<T> {
    path: PathBuf,
    read: Read<T>,
    /// Modification time and credentials of the last reading.
    known: Mutex<Option<(SystemTime, Arc<T>)>>,
}

impl<T> fmt::Debug for CredentialFile<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl<T> CredentialFile<T> {
    /// Opens a file, which has to contain credentials.
    ///
    /// # Errors
    /// The file cannot be read, or `read` fails.
    pub(crate) fn open(
        path: PathBuf,
        read: impl Fn(&str) -> io::Result<T> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let found = Self { path, read: Box::new(read), known: Mutex::default() };
        found.newest()?;
        Ok(found)
    }

    pub(crate) fn newest(&self) -> io::Result<Arc<T>> {
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("credentials in '{}': {error}", self.path.display()))
        };
        let written = fs::metadata(&self.path).and_then(|file| file.modified()).map_err(failed)?;
        let mut known = self.known.lock();
        if let Some((_, known)) = known.as_ref().filter(|(at, _)| *at == written) {
            return Ok(Arc::clone(known));
        }
        let text = fs::read_to_string(&self.path).map_err(failed)?;
        let found = Arc::new((self.read)(&text).map_err(failed)?);
        *known = Some((written, Arc::clone(&found)));
        Ok(found)
    }
}

#[async_trait::async_trait]
impl<T: Send + Sync> CredentialProvider for CredentialFile<T> {
    type Credential = T;

    async fn get_credential(&self) -> object_store::Result<Arc<T>> {
        // The file is small: no thread blocks for long.
        self.newest().map_err(told)
    }
}

/// Converts an error for `object_store`.
pub(crate) fn told(error: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "credentials", source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("keys");
        fs::write(&path, "first").unwrap();
        let read = |text: &str| match text {
            "bad" => Err(io::Error::other("no credentials")),
            text => Ok(text.to_owned()),
        };
        let found = CredentialFile::open(path.clone(), read).unwrap();
        assert_eq!(*found.newest().unwrap(), "first");
        let renew = |text: &str, seconds: u64| {
            fs::write(&path, text).unwrap();
            let at = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            fs::File::open(&path).unwrap().set_modified(at).unwrap();
        };
        renew("renewed", 1);
        assert_eq!(*found.newest().unwrap(), "renewed");
        assert!(!format!("{found:?}").contains("renewed"));
        renew("bad", 2);
        let said = found.newest().unwrap_err().to_string();
        assert_eq!(said, format!("credentials in '{}': no credentials", path.display()));
        renew("again", 3);
        assert_eq!(*found.newest().unwrap(), "again");
        fs::remove_file(&path).unwrap();
        assert_eq!(found.newest().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
