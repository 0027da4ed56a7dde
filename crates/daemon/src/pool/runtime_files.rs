//! Names of a pool's files in the directory of sockets.

/// Ending of the sockets' names.
pub const SOCKET: &str = "pool";

/// Longer names are cut, and distinguished by a hash: addresses of sockets have room for 107 bytes.
const NAME_MOST: usize = 48;

/// Returns the name of the socket of a pool. Pure.
pub fn file(name: &str) -> String {
    // Names of pools are ASCII, so they may be cut anywhere.
    match name.get(..NAME_MOST) {
        Some(start) if name.len() > NAME_MOST => {
            let [a, b, c, d, ..] = nacre_pool::checksum::structure(name.as_bytes());
            format!("{start}-{:08x}.{SOCKET}", u32::from_le_bytes([a, b, c, d]))
        }
        _ => format!("{name}.{SOCKET}"),
    }
}

/// Ending of the names of records of expected pools.
pub const EXPECTED: &str = "imported";

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn sockets_have_names_that_fit() {
        assert_eq!(file("tank"), "tank.pool");
        let (long, other) = ("a".repeat(255), format!("{}b", "a".repeat(254)));
        assert_ne!(file(&long), file(&other));
        for name in [long, other, "x".repeat(NAME_MOST)] {
            assert!(Path::new("/run/user/4294967294/nacre").join(file(&name)).as_os_str().len() < 108, "{name}");
        }
    }
}
