//! Common parts of creating and importing a pool.

use nacre_admin::{Refusal, pool::properties};
use nacre_daemon::{
    failure::Failure,
    pool::{cachefile, client, start::Start},
};
use nacre_pool::properties::{POOL_PROPERTIES, PropertyError};
use std::process::ExitCode;

/// Default limit of the cache, bytes.
pub const CACHE: u64 = 256 << 20;

/// Minimum limit of the cache, bytes.
const CACHE_LEAST: u64 = 8 << 20;

/// Default limit of the cache in a memory of this size: an eighth, since dirty data and the process
/// itself need memory in addition, and the kernel charges its page cache of the devices to the same
/// control group. Pure.
fn usual_cache(memory: Option<u64>) -> u64 {
    memory.map_or(CACHE, |memory| (memory / 8).clamp(CACHE_LEAST, CACHE))
}

/// Returns the limit of the cache, bytes.
pub(super) fn cache(wanted: Option<u64>) -> Result<u64, Failure> {
    match wanted {
        None => Ok(usual_cache(nacre_sys::memory_limit::limit())),
        Some(bytes) if bytes >= CACHE_LEAST => Ok(bytes),
        Some(bytes) => Err(Failure::usage(format!("cache: {bytes} bytes are too few; {CACHE_LEAST} are the least"))),
    }
}

/// Checks the properties of a pool that is to be created or imported, before anything is done.
pub(super) fn check_properties(doing: &str, given: &[(String, String)]) -> Result<Vec<(String, String)>, Failure> {
    let refused = |error: PropertyError| Failure::new(format!("{doing}: {error}")).next(error.next(POOL_PROPERTIES));
    let parse = |(name, value): &(String, String)| properties::parse(name, value, true).map_err(refused);
    let mut properties: Vec<(String, String)> = given.iter().map(parse).collect::<Result<_, _>>()?;
    // Features are fixed by the format: the requested ones are enabled anyway.
    properties.retain(|(name, _)| !name.starts_with("feature@"));
    Ok(properties)
}

/// Starts the process that owns a pool; where a cache file is named, the pool's devices are
/// recorded there.
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
