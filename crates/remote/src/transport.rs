//! HTTP transport of requests to the store: counts requests, and keeps the status and `Retry-After` of replies,
//! which `object_store` does not return.
//!
//! Used by [`crate::bucket`]. The kept values belong to the task that makes the request ([`NOTED`]).

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_pool::backend::Requests;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, RetryConfig};

/// Values of a reply.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Noted {
    /// HTTP status; 0 where there was no reply.
    pub status: u16,
    /// Wait that the store requests before a retry.
    pub come_back: Option<Duration>,
}

tokio::task_local! {
    /// The reply to the last request of this task.
    pub(crate) static NOTED: Cell<Noted>;
}

/// Counters of requests. Requests for credentials do not go to the bucket, and are not counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    puts: AtomicU64,
    gets: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    again: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    pub(crate) fn once_more(&self) {
        self.again.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn so_far(&self) -> Requests {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests {
            puts: of(&self.puts),
            gets: of(&self.gets),
            lists: of(&self.lists),
            deletes: of(&self.deletes),
            again: of(&self.again),
            sent: of(&self.sent),
            received: of(&self.received),
        }
    }
}

/// Settings that all clients share: connections, and no retries.
#[derive(Clone)]
pub(crate) struct Client {
    pub options: ClientOptions,
    pub connector: Connector,
    pub retry: RetryConfig,
}

/// Makes clients that count requests to a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub counters: Arc<Counters>,
    pub bucket: String,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let below = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Counting { below, counters: Arc::clone(&self.counters), bucket: self.bucket.clone() }))
    }
}

#[derive(Debug)]
struct Counting {
    below: HttpClient,
    counters: Arc<Counters>,
    bucket: String,
}

impl Counting {
    /// Whether a request goes to the bucket: URLs of requests for credentials do not name one.
    fn is_of_bucket(&self, request: &HttpRequest) -> bool {
        let is_in_host = |host: &str| host.strip_prefix(&self.bucket).is_some_and(|rest| rest.starts_with('.'));
        request.uri().path().split('/').any(|part| part == self.bucket) || request.uri().host().is_some_and(is_in_host)
    }
}

#[async_trait::async_trait]
impl HttpService for Counting {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_list = ["list-type=", "comp=list"]
            .iter()
            .any(|word| request.uri().query().is_some_and(|query| query.contains(word)));
        let counter = match request.method().as_str() {
            _ if !self.is_of_bucket(&request) => None,
            "PUT" => Some(&self.counters.puts),
            "GET" if is_list => Some(&self.counters.lists),
            "GET" => Some(&self.counters.gets),
            // Azure's objects are removed by a batch of one.
            "DELETE" | "POST" => Some(&self.counters.deletes),
            _ => None,
        };
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
            self.counters.sent.fetch_add(request.body().content_length() as u64, Ordering::Relaxed);
        }
        let _ = NOTED.try_with(|noted| noted.set(Noted::default()));
        let reply = self.below.execute(request).await?;
        let status = reply.status().as_u16();
        let asked = reply.headers().get("retry-after").and_then(|value| value.to_str().ok());
        let come_back = asked.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let _ = NOTED.try_with(|noted| noted.set(Noted { status, come_back }));
        Ok(reply)
    }
}
