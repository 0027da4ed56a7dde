//! Identity of the machine that imports a pool: a number (the host id) and a name, which go to the
//! labels so that another machine asks before it imports the pool.

/// Returns this machine's number (a hash of `/etc/machine-id`, or else of its name) and its name.
#[must_use]
pub fn this() -> (u64, String) {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let identity = std::fs::read("/etc/machine-id").ok().filter(|identity| !identity.is_empty());
    let [a, b, c, d, e, f, g, h, ..] = nacre_pool::checksum::structure(identity.as_deref().unwrap_or(name.as_bytes()));
    (u64::from_le_bytes([a, b, c, d, e, f, g, h]), name)
}
