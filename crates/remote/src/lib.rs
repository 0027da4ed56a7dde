//! Buckets of object stores, for the engine of pools ([`Bucket`]): stores that speak S3, Azure's, Google's, and
//! directories.
//!
//! Callers: the crate that opens pools. This is the only crate that uses a network, and the only one with an
//! asynchronous runtime: a few threads of its own, started with the first bucket, behind blocking calls
//! ([why](../../../docs/decisions/object-store-client.md)).
//!
//! Invariants:
//! - A request is retried until its deadline if the reply permits it, or if there is no reply; the final reply then
//!   describes the state of the object, not the effect of the first attempt.
//! - Credentials are only in memory and in the headers of requests. No error, log line or address contains them.
//! - No request is made without a call: an idle bucket makes none.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod address;
mod azure;
mod bucket;
mod clock;
mod credential_file;
mod credential_process;
mod directory;
mod google;
mod retry;
mod s3;
mod transport;

use std::io;
use std::sync::Arc;

use nacre_pool::backend::Bucket;

pub use address::{Address, AddressError, BucketAddress, Settings, Store, is_address};

/// Function that reads an environment variable.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns the value of an environment variable; `None` if it is empty or missing.
fn of_environment(environment: Environment<'_>, name: &str) -> Option<String> {
    environment(name).filter(|value| !value.is_empty())
}

/// Opens the bucket at an address; no request is made yet.
///
/// # Errors
/// There are no credentials for it, or a resource of the system is missing.
pub fn open(address: &Address) -> io::Result<Arc<dyn Bucket>> {
    Ok(match address {
        Address::Bucket(place) => Arc::new(bucket::StoreBucket::open(place, address.name())?),
        Address::Directory(path) => Arc::new(directory::Directory::new(path.clone(), address.name())),
    })
}

/// Whether credentials for this address come from the environment of this process alone, so that a later process
/// needs the same environment.
#[must_use]
pub fn needs_environment(address: &Address) -> bool {
    let Address::Bucket(place) = address else { return false };
    if place.settings.credentials_file.is_some() || place.settings.profile.is_some() {
        return false;
    }
    let environment = |name: &str| std::env::var(name).ok();
    match place.store {
        Store::S3 => s3::is_of_environment(&environment),
        Store::Azure => azure::is_of_environment(&environment),
        // Its environment variables name files, which are stored in the address.
        Store::Google => false,
    }
}
