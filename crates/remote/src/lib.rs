//! Buckets of object stores, as the engine of pools needs them ([`Bucket`]): of stores that speak S3, of
//! Azure's and of Google's, and directories.
//!
//! Callers: the crate that opens pools. This is the one crate that speaks to a network, and the one
//! with an asynchronous runtime in it: a few threads of its own, begun with the first bucket, behind
//! calls that wait ([why](../../../docs/decisions/object-store-client.md)).
//!
//! Invariants:
//! - A request is made again until its deadline where the reply says that it may be, or where there
//!   is none; what comes back then says what is there, not what the first request did.
//! - Credentials are in memory and in the headers of requests alone. No error, log line or address
//!   contains them.
//! - Nothing is asked of a store that nobody here was asked for: an idle bucket makes no request.

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

/// Asks the environment.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What the environment says of a name, if anything.
fn of_environment(environment: Environment<'_>, name: &str) -> Option<String> {
    environment(name).filter(|value| !value.is_empty())
}

/// The bucket at an address; nothing is asked of it yet.
///
/// # Errors
/// There are no credentials for it, or what it needs of the system is not there.
pub fn open(address: &Address) -> io::Result<Arc<dyn Bucket>> {
    Ok(match address {
        Address::Bucket(place) => Arc::new(bucket::StoreBucket::open(place, address.name())?),
        Address::Directory(path) => Arc::new(directory::Directory::new(path.clone(), address.name())),
    })
}

/// Whether credentials for this address come from the environment of this process alone, so that
/// whoever opens it later has to bring them again.
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
        // Its variables name files, which are remembered.
        Store::Google => false,
    }
}
