//! A bucket of an object store, through the crate `object_store`: everything that all stores have in common. The
//! modules `s3`, `azure` and `google` have the specific parts.
//!
//! Invariants:
//! - A PUT has one of two conditions, or none: that the object does not exist (`If-None-Match: *`; Google's
//!   `x-goog-if-generation-match: 0`), which all consistency relies on; or, to repair an object, that it is
//!   unchanged since it was read (`If-Match`). If the object exists, that is returned as such, and the caller reads
//!   the object. If another request for the object is in progress and the object does not exist yet, the request is
//!   retried.
//! - A list of any length has no deadline as long as its pages arrive; each page has one.
//! - Requests are retried here alone: `object_store` itself does not retry.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use nacre_pool::backend::{Bucket, ObjectTag, Put, Requests, Silence, longest_object};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, RetryConfig, UpdateVersion,
};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::address::{BucketAddress, Store};
use crate::retry::{Attempts, DEADLINE, OF_LISTS};
use crate::transport::{Client, Connector, Counters, NOTED, Noted};
use crate::{Environment, azure, clock, google, s3};

/// Deadline of connecting to the server.
const CONNECT: Duration = Duration::from_secs(5);
/// Deadline of a reply, in addition to the time for its body.
const REPLY: Duration = Duration::from_secs(10);
/// Lowest accepted rate of a transfer in bytes per second: a slower connection counts as broken.
const SLOWEST: u64 = 64 << 10;
/// Deadline of a request in a hurry, with all its attempts, in addition to the time for its body.
const HURRY: Duration = if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(4) };
/// Lowest accepted rate of a transfer in a hurry, in bytes per second.
const HURRIED: u64 = 2 << 20;
/// Number of concurrent requests.
const PARALLEL: usize = 8;
/// Number of objects that are removed by one request, the maximum of S3.
const DELETED_AT_ONCE: usize = 1000;

/// Threads of the asynchronous runtime: started with the first bucket, and never ended.
static RUNTIME: OnceLock<Runtime> = OnceLock::new();

fn runtime() -> io::Result<&'static Runtime> {
    if let Some(there) = RUNTIME.get() {
        return Ok(there);
    }
    // The only cryptography provider that is linked: rustls asks for it by name.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).thread_name("nacre-remote").enable_io().enable_time();
    let made = started(&mut builder)?;
    // Another thread may have been faster.
    Ok(RUNTIME.get_or_init(|| made))
}

/// Starts a runtime.
///
/// # Errors
/// Its threads cannot be started: tokio panics then.
fn started(builder: &mut tokio::runtime::Builder) -> io::Result<Runtime> {
    let built = catch_unwind(AssertUnwindSafe(|| builder.build()));
    built.unwrap_or_else(|_| Err(io::Error::new(ErrorKind::WouldBlock, "no thread can be started for requests")))
}

pub(crate) struct StoreBucket {
    store: Box<dyn ObjectStore>,
    /// Client for removing many objects by one request, where the store has such a request.
    bulk: Option<Box<dyn ObjectStore>>,
    /// The server does not support that request.
    refuses_bulk: AtomicBool,
    place: BucketAddress,
    name: String,
    counters: Arc<Counters>,
    runtime: &'static Runtime,
    /// Whether a caller waits for the pool to be exported.
    hurry: watch::Sender<bool>,
    unanswered: Mutex<Unanswered>,
}

/// Requests that are being retried.
#[derive(Default)]
struct Unanswered {
    count: usize,
    /// When the first request that is being retried began.
    since: Option<Instant>,
    /// Error of the last attempt.
    why: String,
}

/// Guard of one of these requests, once an attempt of it has failed.
struct MadeAgain<'a> {
    all: &'a Mutex<Unanswered>,
    began: Instant,
    is_counted: bool,
}

impl MadeAgain<'_> {
    fn failed(&mut self, error: &io::Error) {
        let mut all = self.all.lock();
        all.count += usize::from(!self.is_counted);
        self.is_counted = true;
        all.since.get_or_insert(self.began);
        all.why = error.to_string();
    }
}

impl Drop for MadeAgain<'_> {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        all.count -= usize::from(self.is_counted);
        if all.count == 0 {
            all.since = None;
        }
    }
}

/// Error of an attempt.
enum Failed {
    /// A retry may succeed.
    Passes(io::Error),
    /// A retry would be refused again.
    Stays(io::Error),
}

impl StoreBucket {
    pub(crate) fn open(place: &BucketAddress, name: String) -> io::Result<Self> {
        Self::with(runtime()?, place, name, &|name| std::env::var(name).ok())
    }

    fn with(
        runtime: &'static Runtime,
        place: &BucketAddress,
        name: String,
        environment: Environment<'_>,
    ) -> io::Result<Self> {
        let counters = Arc::<Counters>::default();
        let options = ClientOptions::new()
            .with_allow_http(place.settings.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://")))
            .with_connect_timeout(CONNECT)
            // Each request has a deadline of its own, by its length.
            .with_timeout_disabled()
            .with_http1_only();
        let client = Client {
            options,
            connector: Connector { counters: Arc::clone(&counters), bucket: place.bucket.clone() },
            retry: RetryConfig { max_retries: 0, retry_timeout: DEADLINE, backoff: BackoffConfig::default() },
        };
        let (store, bulk) = match place.store {
            Store::S3 => {
                let s3::Stores { single, bulk } = s3::open(place, client, environment)?;
                (single, Some(bulk))
            }
            Store::Azure => (azure::open(place, client, environment)?, None),
            Store::Google => (google::open(place, client, environment)?, None),
        };
        Ok(Self {
            store,
            bulk,
            refuses_bulk: AtomicBool::new(false),
            place: place.clone(),
            name,
            counters,
            runtime,
            hurry: watch::Sender::new(false),
            unanswered: Mutex::default(),
        })
    }

    /// Returns the full name of an object.
    fn path(&self, key: &str) -> Path {
        let prefix = &self.place.prefix;
        if prefix.is_empty() { Path::from(key) } else { Path::from(format!("{prefix}/{key}")) }
    }

    /// Makes a request and retries it until it is answered with a final result, or until the deadline. `length` is
    /// the size of its body or reply in bytes.
    fn request<T, F>(&self, length: u64, deadline: Duration, make: impl Fn() -> F) -> io::Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let limit = REPLY + Duration::from_secs(length / SLOWEST);
        let attempt = async {
            let mut attempts = Attempts::new(deadline);
            let mut again = MadeAgain { all: &self.unanswered, began: clock::now(), is_counted: false };
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
                again.failed(&error);
                let Some(wait) = attempts.wait(noted.come_back) else { return Err(error) };
                tracing::debug!(bucket = self.name, %error, "a request is made again");
                tokio::time::sleep(wait).await;
            }
        };
        let mut hurry = self.hurry.subscribe();
        let end = async move {
            // An error is impossible: the bucket, with the sender, lives as long as its requests.
            let _ = hurry.wait_for(|hurry| *hurry).await;
            tokio::time::sleep(HURRY + Duration::from_secs(length / HURRIED)).await;
        };
        self.runtime.block_on(async {
            match select(pin!(attempt), pin!(end)).await {
                Either::Left((done, _)) => done,
                Either::Right(_) => Err(io::Error::new(
                    ErrorKind::NotConnected,
                    "the pool is being let go, and the store does not answer",
                )),
            }
        })
    }

    fn judge(&self, error: &object_store::Error, Noted { status, .. }: Noted) -> Failed {
        let text = error.to_string();
        // An error of one request in a batch that itself succeeded.
        let status = match error {
            object_store::Error::NotFound { .. } if (200..300).contains(&status) => 404,
            _ => status,
        };
        let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
        let told = |kind, what: String| io::Error::new(kind, what);
        let words = |what: &str| match code {
            Some(code) => format!("{what} ({status} {code})"),
            None => format!("{what} ({status})"),
        };
        match (status, code) {
            // There was no reply: the innermost cause is the reason.
            (0, _) => {
                let mut cause: &dyn std::error::Error = error;
                while let Some(next) = cause.source() {
                    cause = next;
                }
                Failed::Passes(told(ErrorKind::NotConnected, cause.to_string()))
            }
            (_, Some("NoSuchBucket" | "ContainerNotFound")) => {
                Failed::Stays(told(ErrorKind::NotFound, format!("there is no bucket '{}'", self.place.bucket)))
            }
            (_, Some("RequestTimeTooSkewed")) => Failed::Stays(told(
                ErrorKind::PermissionDenied,
                words("the clocks of this machine and of the server are too far apart"),
            )),
            (507, _) => Failed::Stays(told(ErrorKind::StorageFull, words("the store has no room left"))),
            // 429 is not among these: after too many requests in a short time a retry may succeed.
            (400..=409, Some(code)) if code.contains("Quota") || code.contains("StorageFull") => {
                Failed::Stays(told(ErrorKind::StorageFull, words("the bucket may not take any more")))
            }
            // Expired credentials are renewed by others, perhaps just now.
            (400 | 401 | 403, Some("ExpiredToken" | "TokenRefreshRequired")) => {
                Failed::Passes(told(ErrorKind::PermissionDenied, words("the credentials have expired")))
            }
            (401 | 403, _) => {
                Failed::Stays(told(ErrorKind::PermissionDenied, words("the server refuses these credentials")))
            }
            (404, _) => Failed::Stays(told(ErrorKind::NotFound, words("it is not there"))),
            // Two concurrent requests to make one object may both be refused, and then it does not exist.
            (409, Some("ConditionalRequestConflict" | "OperationAborted")) => {
                Failed::Passes(told(ErrorKind::TimedOut, words("another request for the same object is under way")))
            }
            (409, Some("BlobAlreadyExists")) | (412 | 304, _) => {
                Failed::Stays(told(ErrorKind::AlreadyExists, words("it is there already")))
            }
            (409, _) => Failed::Stays(told(ErrorKind::ResourceBusy, words("it is there already, or being made"))),
            (300..=399, _) => Failed::Stays(told(
                ErrorKind::InvalidInput,
                words("the bucket is in another region: --region names it"),
            )),
            (501, _) => Failed::Stays(told(ErrorKind::Unsupported, words("the server does not know this request"))),
            (408 | 429 | 500..=599, _) => Failed::Passes(told(ErrorKind::TimedOut, words("the server is busy or ill"))),
            (200..=299, _) => Failed::Passes(told(ErrorKind::UnexpectedEof, words("the reply was cut short"))),
            _ => Failed::Stays(told(ErrorKind::Other, words("the server refuses the request"))),
        }
    }

    fn delete_by(&self, store: &dyn ObjectStore, keys: &[String]) -> io::Result<()> {
        let paths: Vec<Path> = keys.iter().map(|key| self.path(key)).collect();
        // Allows as much time as for a slow transfer of this size: some stores need one request for each object.
        self.request(keys.len() as u64 * SLOWEST / 10, DEADLINE, || async {
            let paths = futures_util::stream::iter(paths.clone().into_iter().map(Ok)).boxed();
            let mut removed = store.delete_stream(paths);
            while let Some(one) = removed.next().await {
                match one {
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }

    fn put_by(&self, key: &str, body: &[u8], mode: &PutMode) -> io::Result<()> {
        let (path, payload) = (self.path(key), PutPayload::from(body.to_vec()));
        self.request(body.len() as u64, DEADLINE, || {
            let options = PutOptions::from(mode.clone());
            async { self.store.put_opts(&path, payload.clone(), options).await.map(drop) }
        })
    }
}

/// A list that arrives page by page.
#[derive(Default)]
struct Listing<'a> {
    /// Names of the page that is being received.
    page: Vec<String>,
    /// Last name so far.
    last: String,
    /// The store does not sort names by their bytes, so the list cannot be resumed after a name.
    is_unordered: bool,
    /// Stream of the following pages.
    rest: Option<BoxStream<'a, object_store::Result<ObjectMeta>>>,
}

impl Listing<'_> {
    fn add(&mut self, key: &str) {
        self.is_unordered |= self.last.as_str() > key;
        key.clone_into(&mut self.last);
        self.page.push(key.to_owned());
    }

    /// Returns the name after which an interrupted list is resumed; `after` is where the list began.
    fn resume_after(&self, after: &str) -> String {
        if !self.is_unordered && self.last.as_str() > after { self.last.clone() } else { after.to_owned() }
    }
}

/// Reads the beginning of a reply's body, at most `most` bytes; the remainder is not waited for.
async fn read_up_to(reply: GetResult, most: u64) -> object_store::Result<Vec<u8>> {
    let expected = reply.range.end.saturating_sub(reply.range.start).min(most);
    let mut body = Vec::with_capacity(expected as usize);
    let mut pieces = reply.into_stream();
    while let Some(piece) = pieces.try_next().await? {
        let room = (most as usize).saturating_sub(body.len());
        body.extend_from_slice(piece.get(..room).unwrap_or(&piece));
        if piece.len() >= room {
            break;
        }
    }
    Ok(body)
}

/// Returns `None` if the object does not exist. A missing bucket is an error.
fn there<T>(got: io::Result<T>) -> io::Result<Option<T>> {
    match got {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound && !error.to_string().starts_with("there is no") => Ok(None),
        Err(error) => Err(error),
    }
}

impl Bucket for StoreBucket {
    fn name(&self) -> &str {
        &self.name
    }

    fn attempts(&self) -> usize {
        1
    }

    fn hurry(&self) {
        self.hurry.send_replace(true);
    }

    fn take_time(&self) {
        self.hurry.send_replace(false);
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    fn requests(&self) -> Requests {
        self.counters.so_far()
    }

    fn silence(&self) -> Option<Silence> {
        let all = self.unanswered.lock();
        let lasts = clock::now().saturating_duration_since(all.since?);
        Some(Silence { lasts, why: all.why.clone() })
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.put_by(key, body, &PutMode::Overwrite)
    }

    fn get_tagged(&self, key: &str) -> io::Result<Option<(Vec<u8>, ObjectTag)>> {
        let path = self.path(key);
        let got = self.request(8 << 20, DEADLINE, || async {
            let got = self.store.get_opts(&path, GetOptions::new()).await?;
            let tag = ObjectTag { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
            Ok((read_up_to(got, longest_object(key)).await?, tag))
        });
        let there = there(got)?;
        Ok(there.inspect(|(body, _)| self.counters.received(body.len())))
    }

    fn put_if(&self, key: &str, body: &[u8], tag: &ObjectTag) -> io::Result<bool> {
        if tag.e_tag.is_none() && tag.version.is_none() {
            return Err(ErrorKind::Unsupported.into());
        }
        let seen = UpdateVersion { e_tag: tag.e_tag.clone(), version: tag.version.clone() };
        match self.put_by(key, body, &PutMode::Update(seen)) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::ResourceBusy) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let mut attempts = Attempts::new(DEADLINE);
        loop {
            match self.put_by(key, body, &PutMode::Create) {
                Ok(()) => return Ok(Put::Made),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(Put::Exists),
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    if self.get(key, Some(0..1))?.is_some() {
                        return Ok(Put::Exists);
                    }
                    let wait = attempts.wait(None).filter(|_| !*self.hurry.borrow());
                    let wait = wait.ok_or_else(|| io::Error::new(ErrorKind::TimedOut, error.to_string()))?;
                    self.runtime.block_on(async { tokio::time::sleep(wait).await });
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        if range.as_ref().is_some_and(Range::is_empty) {
            return Ok(Some(Vec::new()));
        }
        let path = self.path(key);
        let asked = range.as_ref().map(|range| range.end.saturating_sub(range.start));
        let got = self.request(asked.unwrap_or(8 << 20), DEADLINE, || {
            let options = GetOptions::new().with_range(range.clone());
            async { read_up_to(self.store.get_opts(&path, options).await?, asked.unwrap_or(longest_object(key))).await }
        });
        let there = there(got)?;
        Ok(there.inspect(|body| self.counters.received(body.len())))
    }

    fn get_by_pieces(&self, key: &str, range: Range<u64>, piece: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let (path, piece) = (self.path(key), RefCell::new(piece));
        let got = self.request(range.end.saturating_sub(range.start), DEADLINE, || {
            let options = GetOptions::new().with_range(Some(range.clone()));
            let (mut offset, path, piece) = (range.start, &path, &piece);
            async move {
                let mut pieces = self.store.get_opts(path, options).await?.into_stream();
                while let Some(bytes) = pieces.try_next().await? {
                    self.counters.received(bytes.len());
                    (piece.borrow_mut())(offset, &bytes);
                    offset += bytes.len() as u64;
                }
                Ok(())
            }
        });
        Ok(there(got)?.is_some())
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let mut keys = Vec::new();
        self.list_pages(prefix, after, &mut |page| {
            keys.extend(page);
            Ok(())
        })?;
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }

    fn list_pages(
        &self,
        prefix: &str,
        after: &str,
        page: &mut dyn FnMut(Vec<String>) -> io::Result<()>,
    ) -> io::Result<()> {
        let below = self.path(prefix.trim_end_matches('/'));
        let below = Some(below).filter(|below| !below.as_ref().is_empty());
        let whole = self.path("").as_ref().len();
        let own = if whole == 0 { 0 } else { whole + 1 };
        let listing = RefCell::new(Listing::default());
        loop {
            let is_last = self.request(0, OF_LISTS, || async {
                // After an interruption, the list is resumed after its last name.
                let left = listing.borrow_mut().rest.take();
                let mut rest = match left {
                    Some(rest) => rest,
                    None => match listing.borrow().resume_after(after).as_str() {
                        "" => self.store.list(below.as_ref()),
                        last => self.store.list_with_offset(below.as_ref(), &self.path(last)),
                    },
                };
                // One page: everything that can be read without waiting after the first name.
                let mut next = rest.try_next().await?;
                while let Some(found) = next {
                    if let Some(key) = found.location.as_ref().get(own..) {
                        listing.borrow_mut().add(key);
                    }
                    match rest.try_next().now_or_never() {
                        Some(more) => next = more?,
                        None => {
                            listing.borrow_mut().rest = Some(rest);
                            return Ok(false);
                        }
                    }
                }
                Ok(true)
            })?;
            let mut keys = std::mem::take(&mut listing.borrow_mut().page);
            // Some servers do not support the start of a list, and answer with all of it.
            keys.retain(|key| key.as_str() > after);
            if !keys.is_empty() {
                page(keys)?;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    fn delete_all(&self, keys: &[String]) -> io::Result<()> {
        for some in keys.chunks(DELETED_AT_ONCE) {
            let bulk = self.bulk.as_ref().filter(|_| some.len() > 1 && !self.refuses_bulk.load(Ordering::Relaxed));
            let removed = bulk.map(|bulk| self.delete_by(&**bulk, some));
            match removed.transpose() {
                Ok(Some(())) => continue,
                Ok(None) => {}
                Err(error) => match error.kind() {
                    ErrorKind::NotConnected | ErrorKind::TimedOut | ErrorKind::PermissionDenied => return Err(error),
                    ErrorKind::Unsupported | ErrorKind::Other => self.refuses_bulk.store(true, Ordering::Relaxed),
                    // The server reports an error for each object that it did not remove.
                    _ => {}
                },
            }
            self.delete_by(&*self.store, some)?;
        }
        Ok(())
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let path = self.path(key);
        there(self.request(0, DEADLINE, || async { self.store.delete(&path).await })).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Settings;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    #[test]
    fn threads_that_cannot_be_started_are_an_error() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        // No address space has room for this stack.
        let refused = started(builder.worker_threads(1).thread_stack_size(1 << 60)).map(drop);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(started(tokio::runtime::Builder::new_multi_thread().worker_threads(1)).is_ok());
    }

    /// A server that sends these replies, one for each request, and no others; returns the first lines of the
    /// requests. An empty string is no reply.
    fn server(replies: &'static [&'static str]) -> (StoreBucket, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let serve = std::thread::spawn(move || {
            let mut heads = Vec::new();
            for reply in replies {
                let (mut client, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(client.try_clone().unwrap());
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    reader.read_line(&mut line).unwrap();
                    let name = line.to_ascii_lowercase();
                    length = name.strip_prefix("content-length:").map_or(length, |value| value.trim().parse().unwrap());
                    if line.trim().is_empty() {
                        break;
                    }
                    if heads.len() < replies.len()
                        && (head.is_empty() || name.starts_with("if-") || name.starts_with("range"))
                    {
                        head.push_str(&line);
                    }
                }
                reader.read_exact(&mut vec![0; length]).unwrap();
                heads.push(head);
                if let Some((status, body)) = reply.split_once('|') {
                    let length = body.len();
                    write!(client, "HTTP/1.1 {status}\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"e\"\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").unwrap();
                }
            }
            heads
        });
        let runtime = runtime().unwrap();
        let settings = Settings { endpoint, ..Settings::default() };
        let place =
            BucketAddress { bucket: "b".to_owned(), prefix: "p/q".to_owned(), settings, ..BucketAddress::default() };
        let environment = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned());
        (StoreBucket::with(runtime, &place, "s3://b/p/q".to_owned(), &environment).unwrap(), serve)
    }

    #[test]
    fn one_that_is_there_or_being_made_exists() {
        let replies = &[
            "200 OK|",
            "412 No|<Code>PreconditionFailed</Code>",
            "409 No|<Code>BlobAlreadyExists</Code>",
            "",
            "412 No|",
        ];
        let (bucket, serve) = server(replies);
        let made: Vec<Put> = (0..4).map(|_| bucket.put_new("roots/1", b"body").unwrap()).collect();
        // The last request had no reply at first: afterwards it is only known that the object exists.
        assert_eq!(made, [Put::Made, Put::Exists, Put::Exists, Put::Exists]);
        let heads = serve.join().unwrap();
        for head in heads {
            assert_eq!(head.to_ascii_lowercase(), "put /b/p/q/roots/1 http/1.1\r\nif-none-match: *\r\n");
        }
        assert_eq!((bucket.requests().puts, bucket.requests().again, bucket.requests().sent), (5, 1, 20));
    }

    /// S3 answers 409 to a request that conflicts with another one, which means: retry. The object may not exist
    /// then.
    #[test]
    fn one_that_meets_another_request_is_made_again_until_it_is_there() {
        const CONFLICT: &str = "409 No|<Code>ConditionalRequestConflict</Code>";
        let (bucket, serve) = server(&[CONFLICT, CONFLICT, CONFLICT, CONFLICT, CONFLICT, CONFLICT, "200 OK|"]);
        let began = clock_now();
        assert_eq!(bucket.put_new("roots/1", b"body").unwrap(), Put::Made);
        assert!(clock_now() - began >= Duration::from_millis(1500), "waits grow");
        assert!(serve.join().unwrap().iter().all(|head| head.starts_with("PUT ")));
        assert_eq!(bucket.requests().again, 6);
        // After a refusal without a reason, it is checked whether the object exists.
        let replies =
            &["409 No|", "404 No|<Code>NoSuchKey</Code>", "409 No|", "206 OK\r\nContent-Range: bytes 0-0/9|a"];
        let (bucket, serve) = server(replies);
        assert_eq!(bucket.put_new("roots/1", b"body").unwrap(), Put::Exists);
        assert_eq!(serve.join().unwrap().len(), 4);
    }

    /// Pages that have arrived are not requested again, so that a long list ends however slow a store is.
    #[test]
    fn a_list_goes_on_where_a_page_did_not_come() {
        let (bucket, serve) = server(&[
            "200 OK|<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>two</NextContinuationToken>\
             <Contents><Key>p/q/seg/1</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>\
             <Contents><Key>p/q/seg/2</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>\
             </ListBucketResult>",
            "500 Ill|",
            "200 OK|<ListBucketResult><IsTruncated>false</IsTruncated>\
             <Contents><Key>p/q/seg/3</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>\
             </ListBucketResult>",
        ]);
        assert_eq!(bucket.list("seg/", "").unwrap(), ["seg/1", "seg/2", "seg/3"]);
        let heads = serve.join().unwrap();
        assert!(heads[0].contains("list-type=2") && !heads[0].contains("start-after"), "{}", heads[0]);
        assert!(heads[1].contains("continuation-token=two"), "{}", heads[1]);
        assert!(heads[2].contains("start-after=p%2Fq%2Fseg%2F2"), "{}", heads[2]);
    }

    #[test]
    fn many_objects_are_removed_by_one_request() {
        let (bucket, serve) = server(&[
            "503 Slow|",
            "200 OK|<DeleteResult><Deleted><Key>p/q/seg/1</Key></Deleted><Deleted><Key>p/q/seg/2</Key></Deleted></DeleteResult>",
        ]);
        let two = ["seg/1".to_owned(), "seg/2".to_owned()];
        bucket.delete_all(&two).unwrap();
        assert!(serve.join().unwrap().iter().all(|head| head.starts_with("POST /b?delete")));
        // A server without that request gets one request for each object, and no further attempt.
        let (bucket, serve) =
            server(&["501 Not|<Code>NotImplemented</Code>", "204 Gone|", "204 Gone|", "204 Gone|", "204 Gone|"]);
        bucket.delete_all(&two).unwrap();
        bucket.delete_all(&two).unwrap();
        let heads = serve.join().unwrap();
        assert_eq!(heads.iter().filter(|head| head.starts_with("DELETE ")).count(), 4, "{heads:?}");
    }

    #[test]
    fn what_passes_is_asked_for_again_and_what_stays_is_not() {
        let (bucket, serve) = server(&[
            "503 Slow|<Code>SlowDown</Code>",
            "500 Ill|",
            "429 Busy\r\nRetry-After: 1|",
            "206 OK\r\nContent-Range: bytes 1-3/9|abc",
        ]);
        let began = clock_now();
        assert_eq!(bucket.get("seg/1", Some(1..4)).unwrap().unwrap(), b"abc");
        assert!(clock_now() - began >= Duration::from_secs(1), "it asked for that");
        assert!(serve.join().unwrap().iter().all(|head| head.to_ascii_lowercase().contains("range: bytes=1-3")));
        assert_eq!((bucket.requests().gets, bucket.requests().again, bucket.requests().received), (4, 3, 3));
        assert_eq!(bucket.silence(), None);
        let (bucket, serve) = server(&[
            "507 Full|",
            "403 No|<Code>QuotaExceeded</Code>",
            "403 No|<Code>RequestTimeTooSkewed</Code>",
            "403 No|<Code>AccessDenied</Code>",
            "404 No|<Code>NoSuchKey</Code>",
            "404 No|<Code>NoSuchBucket</Code>",
            "301 Moved|",
            "204 Gone|",
        ]);
        for (kind, why) in [
            (ErrorKind::StorageFull, "the store has no room left (507)"),
            (ErrorKind::StorageFull, "the bucket may not take any more (403 QuotaExceeded)"),
            (
                ErrorKind::PermissionDenied,
                "the clocks of this machine and of the server are too far apart (403 RequestTimeTooSkewed)",
            ),
        ] {
            let refused = bucket.put("k", b"").unwrap_err();
            assert_eq!((refused.kind(), refused.to_string().as_str()), (kind, why));
        }
        let refused = bucket.put("k", b"").unwrap_err();
        assert_eq!(
            (refused.kind(), refused.to_string()),
            (ErrorKind::PermissionDenied, "the server refuses these credentials (403 AccessDenied)".to_owned())
        );
        assert_eq!(bucket.get("k", None).unwrap(), None);
        let refused = bucket.get("k", None).unwrap_err();
        assert_eq!((refused.kind(), refused.to_string()), (ErrorKind::NotFound, "there is no bucket 'b'".to_owned()));
        assert!(bucket.put("k", b"").unwrap_err().to_string().contains("--region"));
        bucket.delete("k").unwrap();
        serve.join().unwrap();
        assert_eq!(bucket.requests().again, 0);
    }

    /// The object exists already: the reply may be of any length, and never end.
    #[test]
    fn no_more_of_an_object_is_read_than_it_may_have() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let serve = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            let length = 6_u64 << 30;
            write!(client, "HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: \"e\"\r\nContent-Length: {length}\r\n\r\n").unwrap();
            let (mut sent, piece) = (0, vec![7; 1 << 16]);
            while client.write_all(&piece).is_ok() {
                sent += piece.len() as u64;
            }
            sent
        });
        let settings = Settings { endpoint, ..Settings::default() };
        let place = BucketAddress { bucket: "b".to_owned(), settings, ..BucketAddress::default() };
        let environment = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned());
        let bucket = StoreBucket::with(runtime().unwrap(), &place, "s3://b".to_owned(), &environment).unwrap();
        assert_eq!(bucket.get("roots/1", None).unwrap().unwrap().len() as u64, longest_object("roots/1"));
        assert!(serve.join().unwrap() < 1 << 30, "the rest was read as well");
    }

    #[test]
    fn in_a_hurry_nobody_waits_for_a_silent_server() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let settings = Settings { endpoint, ..Settings::default() };
        let place = BucketAddress { bucket: "b".to_owned(), settings, ..BucketAddress::default() };
        let environment = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned());
        let bucket = StoreBucket::with(runtime().unwrap(), &place, "s3://b".to_owned(), &environment).unwrap();
        std::thread::scope(|scope| {
            let before = scope.spawn(|| bucket.get("k", None).unwrap_err().kind());
            // The request arrives, and gets no answer.
            let silent = listener.accept().unwrap();
            bucket.hurry();
            assert_eq!(before.join().unwrap(), ErrorKind::NotConnected);
            assert_eq!(bucket.silence(), None, "nobody waits for an answer");
            assert_eq!(bucket.put("k", b"").unwrap_err().kind(), ErrorKind::NotConnected);
            drop(silent);
        });
    }

    /// The removal of objects after the end of a pool is not cut short.
    #[test]
    fn after_a_hurry_a_slow_server_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let settings = Settings { endpoint, ..Settings::default() };
        let place = BucketAddress { bucket: "b".to_owned(), settings, ..BucketAddress::default() };
        let environment = |name: &str| name.starts_with("AWS_").then(|| "x".to_owned());
        let bucket = StoreBucket::with(runtime().unwrap(), &place, "s3://b".to_owned(), &environment).unwrap();
        bucket.hurry();
        bucket.take_time();
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| bucket.delete("k"));
            let (mut client, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            runtime().unwrap().block_on(async { tokio::time::sleep(HURRY * 2).await });
            write!(client, "HTTP/1.1 204 Gone\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
            removed.join().unwrap().unwrap();
        });
    }

    #[expect(clippy::disallowed_methods, reason = "how long a wait was that the server asks for")]
    fn clock_now() -> std::time::Instant {
        std::time::Instant::now()
    }

    #[test]
    fn names_come_in_pages() {
        const FIRST: &str = "200 OK|<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken><Contents><Key>p/q/roots/1</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>";
        const LAST: &str = "200 OK|<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p/q/roots/2</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>";
        let (bucket, serve) = server(&[FIRST, LAST, LAST, LAST]);
        assert_eq!(bucket.list("roots/", "").unwrap(), ["roots/1", "roots/2"]);
        assert_eq!(bucket.list("roots/", "roots/1").unwrap(), ["roots/2"]);
        assert_eq!(bucket.list("roots/", "roots/2").unwrap(), Vec::<String>::new());
        let heads = serve.join().unwrap();
        assert!(heads[0].contains("prefix=p%2Fq%2Froots%2F") && heads[1].contains("continuation-token=t"), "{heads:?}");
        assert!(heads[2].contains("start-after=p%2Fq%2Froots%2F1"), "{heads:?}");
        assert_eq!(bucket.requests().lists, 4);
    }
}
