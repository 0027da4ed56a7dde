//! What making and importing a pool have in common.

use nacre_admin::{Refusal, pool::properties};
use nacre_daemon::{
    failure::Failure,
    pool::{cachefile, client, start::Start},
};
use nacre_pool::properties::{POOL_PROPERTIES, PropertyError};
use std::process::ExitCode;

/// The limit of the cache where none is named, bytes.
pub const CACHE: u64 = 256 << 20;

/// The least that can be worked with.
const CACHE_LEAST: u64 = 8 << 20;

/// The limit of the cache where none is named, in so much memory: an eighth, since what waits to be
/// written and what the process itself needs come on top, and the kernel counts its own cache of
/// what is read and written to the same control group. Pure.
fn usual_cache(memory: Option<u64>) -> u64 {
    memory.map_or(CACHE, |memory| (memory / 8).clamp(CACHE_LEAST, CACHE))
}

/// The limit of the cache, bytes.
pub(super) fn cache(wanted: Option<u64>) -> Result<u64, Failure> {
    match wanted {
        None => Ok(usual_cache(nacre_sys::memory_limit::limit())),
        Some(bytes) if bytes >= CACHE_LEAST => Ok(bytes),
        Some(bytes) => Err(Failure::usage(format!("cache: {bytes} bytes are too few; {CACHE_LEAST} are the least"))),
    }
}

/// What can be seen wrong with the properties of a pool that is to be made or imported, before
/// anything is done.
pub(super) fn check_properties(doing: &str, given: &[(String, String)]) -> Result<Vec<(String, String)>, Failure> {
    let refused = |error: PropertyError| Failure::new(format!("{doing}: {error}")).next(error.next(POOL_PROPERTIES));
    let parse = |(name, value): &(String, String)| properties::parse(name, value, true).map_err(refused);
    let mut properties: Vec<(String, String)> = given.iter().map(parse).collect::<Result<_, _>>()?;
    // Features are those of the format: what is asked for is so already.
    properties.retain(|(name, _)| !name.starts_with("feature@"));
    Ok(properties)
}

/// Has a process own a pool; where a file is named for that, it is written down there where the
/// pool lies.
pub(super) fn start(start: Start) -> Result<ExitCode, Failure> {
    let code = start.start()?;
    match cachefile::of(&start.properties) {
        Some(path) if code == ExitCode::SUCCESS => cachefile::keep(&path, &start.name).map(|()| code),
        _ => Ok(code),
    }
}

pub(super) fn failed(refusal: Refusal) -> Failure {
    client::failure(&refusal)
}
