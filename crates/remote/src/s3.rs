//! A bucket of a store that speaks S3, by the crate `object_store`.
//!
//! Invariants:
//! - Of the conditions that stores offer, `If-None-Match: *` of a PUT is the only one that is used.
//!   A reply that another one is there, or is being made, is told as it is: whoever asked looks what
//!   is there.
//! - Requests that may be made again are made again here alone: `object_store` itself does not.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::TryStreamExt;
use nacre_pool::backend::{Bucket, Put, Requests};
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
};
use tokio::runtime::Runtime;

use crate::address::S3Address;
use crate::credentials;
use crate::retry::{Attempts, DEADLINE};
use crate::transport::{Connector, Counters, NOTED, Noted};

/// How long it may take to reach the server.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a reply may take that brings and takes little.
const REPLY: Duration = Duration::from_secs(10);
/// What is sent or received at least in a second, bytes: a slower way counts as broken.
const SLOWEST: u64 = 64 << 10;
/// Requests that are made at the same time.
const PARALLEL: usize = 8;
/// The region where none is named, as everybody has it.
const REGION: &str = "us-east-1";

/// The threads that speak to servers: they begin with the first bucket, and stay.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

fn runtime() -> io::Result<&'static Runtime> {
    if let Some(there) = RUNTIME.get() {
        return Ok(there);
    }
    // The one cipher library that is linked: rustls asks for it by name.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let made = builder.worker_threads(2).thread_name("nacre-remote").enable_io().enable_time().build()?;
    // Another thread may have been faster.
    Ok(RUNTIME.get_or_init(|| made))
}

pub(crate) struct S3Bucket {
    store: AmazonS3,
    place: S3Address,
    name: String,
    counters: Arc<Counters>,
    runtime: &'static Runtime,
}

/// How an attempt ended.
enum Failed {
    /// Made once more, it may be carried out.
    Passes(io::Error),
    /// It will be refused again.
    Stays(io::Error),
}

impl S3Bucket {
    pub(crate) fn open(place: &S3Address, name: String) -> io::Result<Self> {
        let runtime = runtime()?;
        let counters = Arc::<Counters>::default();
        let options = ClientOptions::new()
            .with_allow_http(place.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://")))
            .with_connect_timeout(CONNECT)
            // Each request has a limit of its own, by its length.
            .with_timeout_disabled()
            .with_http1_only();
        let once = RetryConfig { max_retries: 0, retry_timeout: DEADLINE, backoff: BackoffConfig::default() };
        let builder = AmazonS3Builder::new()
            .with_bucket_name(&place.bucket)
            .with_region(place.region.as_deref().unwrap_or(REGION))
            .with_client_options(options)
            .with_http_connector(Connector(Arc::clone(&counters)))
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            // One request each, so that what was asked can be counted.
            .with_disable_bulk_delete(true)
            .with_retry(once);
        let builder = match &place.endpoint {
            Some(endpoint) => builder.with_endpoint(endpoint),
            None => builder.with_virtual_hosted_style_request(true),
        };
        let builder = credentials::give(builder, place, &|name| std::env::var(name).ok())?;
        let store = builder.build().map_err(|error| io::Error::other(format!("{name}: {error}")))?;
        Ok(Self { store, place: place.clone(), name, counters, runtime })
    }

    /// The whole name of an object.
    fn path(&self, key: &str) -> Path {
        let prefix = &self.place.prefix;
        if prefix.is_empty() { Path::from(key) } else { Path::from(format!("{prefix}/{key}")) }
    }

    /// Makes a request until it is answered in a way that stays, or the time is over.
    fn request<T, F>(&self, length: u64, make: impl Fn() -> F) -> io::Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let limit = REPLY + Duration::from_secs(length / SLOWEST);
        let attempt = async {
            let mut attempts = Attempts::new();
            loop {
                if attempts.again() {
                    self.counters.once_more();
                }
                let noting = NOTED.scope(Cell::default(), async {
                    let done = tokio::time::timeout(limit, make()).await;
                    (done, NOTED.with(Cell::get))
                });
                let (done, noted) = noting.await;
                let error = match done {
                    Ok(Ok(reply)) => return Ok(reply),
                    Ok(Err(error)) => match self.judge(&error, noted) {
                        Failed::Passes(error) => error,
                        Failed::Stays(error) => return Err(error),
                    },
                    Err(_) => io::Error::new(ErrorKind::TimedOut, "the server does not answer in time"),
                };
                let Some(wait) = attempts.wait(noted.come_back) else { return Err(error) };
                tracing::debug!(bucket = self.name, %error, "a request is made again");
                tokio::time::sleep(wait).await;
            }
        };
        self.runtime.block_on(attempt)
    }

    fn judge(&self, error: &object_store::Error, Noted { status, .. }: Noted) -> Failed {
        let text = error.to_string();
        let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
        let told = |kind, what: String| io::Error::new(kind, what);
        let words = |what: &str| match code {
            Some(code) => format!("{what} ({status} {code})"),
            None => format!("{what} ({status})"),
        };
        match (status, code) {
            // No reply: the innermost cause says why.
            (0, _) => {
                let mut cause: &dyn std::error::Error = error;
                while let Some(next) = cause.source() {
                    cause = next;
                }
                Failed::Passes(told(ErrorKind::NotConnected, cause.to_string()))
            }
            (_, Some("NoSuchBucket")) => {
                Failed::Stays(told(ErrorKind::NotFound, format!("there is no bucket '{}'", self.place.bucket)))
            }
            // Somebody renews what has expired, perhaps now.
            (400 | 401 | 403, Some("ExpiredToken" | "TokenRefreshRequired")) => {
                Failed::Passes(told(ErrorKind::PermissionDenied, words("the credentials have expired")))
            }
            (401 | 403, _) => {
                Failed::Stays(told(ErrorKind::PermissionDenied, words("the server refuses these credentials")))
            }
            (404, _) => Failed::Stays(told(ErrorKind::NotFound, words("it is not there"))),
            (409 | 412 | 304, _) => Failed::Stays(told(ErrorKind::AlreadyExists, words("it is there already"))),
            (300..=399, _) => Failed::Stays(told(
                ErrorKind::InvalidInput,
                words("the bucket is in another region: --region names it"),
            )),
            (408 | 429 | 500..=599, _) => Failed::Passes(told(ErrorKind::TimedOut, words("the server is busy or ill"))),
            (200..=299, _) => Failed::Passes(told(ErrorKind::UnexpectedEof, words("the reply was cut short"))),
            _ => Failed::Stays(told(ErrorKind::Other, words("the server refuses the request"))),
        }
    }

    fn put_by(&self, key: &str, body: &[u8], mode: &PutMode) -> io::Result<()> {
        let (path, payload) = (self.path(key), PutPayload::from(body.to_vec()));
        self.request(body.len() as u64, || {
            let options = PutOptions::from(mode.clone());
            async { self.store.put_opts(&path, payload.clone(), options).await.map(drop) }
        })
    }
}

impl Bucket for S3Bucket {
    fn name(&self) -> &str {
        &self.name
    }

    fn attempts(&self) -> usize {
        // Made again here; once more where a conflict was seen and nothing is there.
        2
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    fn requests(&self) -> Requests {
        self.counters.so_far()
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.put_by(key, body, &PutMode::Overwrite)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        match self.put_by(key, body, &PutMode::Create) {
            Ok(()) => Ok(Put::Made),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Put::Exists),
            Err(error) => Err(error),
        }
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        if range.as_ref().is_some_and(Range::is_empty) {
            return Ok(Some(Vec::new()));
        }
        let path = self.path(key);
        let length = range.as_ref().map_or(8 << 20, |range| range.end - range.start);
        let got = self.request(length, || {
            let options = GetOptions::new().with_range(range.clone());
            async { self.store.get_opts(&path, options).await?.bytes().await }
        });
        match got {
            Ok(bytes) => {
                self.counters.received(bytes.len());
                Ok(Some(bytes.into()))
            }
            // The bucket may be what is not there.
            Err(error) if error.kind() == ErrorKind::NotFound && !error.to_string().starts_with("there is no") => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let below = self.path(prefix.trim_end_matches('/'));
        let below = Some(below).filter(|below| !below.as_ref().is_empty());
        let whole = self.path("").as_ref().len();
        let own = if whole == 0 { 0 } else { whole + 1 };
        let found = self.request(0, || async {
            let found = match after {
                "" => self.store.list(below.as_ref()),
                after => self.store.list_with_offset(below.as_ref(), &self.path(after)),
            };
            found.try_collect::<Vec<_>>().await
        })?;
        let key = |path: &Path| path.as_ref().get(own..).map(ToOwned::to_owned);
        let mut keys: Vec<String> = found.iter().filter_map(|object| key(&object.location)).collect();
        keys.sort();
        Ok(keys)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let path = self.path(key);
        match self.request(0, || async { self.store.delete(&path).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound && !error.to_string().starts_with("there is no") => {
                Ok(())
            }
            deleted => deleted,
        }
    }
}
