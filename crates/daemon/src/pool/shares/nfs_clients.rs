//! Clients of the kernel's NFS server that hold files of a mount, and the release of the states that the server
//! keeps for them.
//!
//! Called by [`super::Shares`] around the unmount of a shared dataset. Once an export is gone, clients can neither
//! close files nor return delegations (ESTALE), and the server would keep the mount busy forever. Hence the
//! invariants:
//! * opens and locks of clients are looked up while the export exists, and prevent an unmount, as open files of
//!   local processes do;
//! * delegations (NFSv4: files that a client may cache, also after it has closed them) do not prevent it where the
//!   kernel revokes them: from Linux 6.9. Before, a delegation counts as an open file;
//! * states of a client whose lease has expired do not prevent it either: the server keeps them until another
//!   client conflicts (a courtesy client).

use crate::{report::printable, runtime::children};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use std::{fmt::Write as _, fs, io, os::unix::ffi::OsStrExt, path::Path};

const CLIENTS: &str = "/proc/fs/nfsd/clients";
const LOCKS: &str = "/proc/locks";
/// Releases locks of NFSv3 and, from Linux 6.9, all states of NFSv4 of the file system whose path is written to it.
const UNLOCK: &str = "/proc/fs/nfsd/unlock_filesystem";

/// File with the lease time of NFSv4 clients in seconds.
const LEASE: &str = "/proc/fs/nfsd/nfsv4leasetime";

/// An NFSv4 client, by its files `info` and `states`.
struct Client {
    info: String,
    states: String,
}

impl Client {
    /// Reads a client; `None` where it is gone meanwhile.
    fn read(directory: &Path) -> Option<Client> {
        let info = fs::read_to_string(directory.join("info")).ok()?;
        let states = fs::read(directory.join("states")).ok()?;
        Some(Client { info, states: String::from_utf8_lossy(&states).into_owned() })
    }

    /// Returns the value of a line of `info`.
    fn value(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// Whether its lease has expired.
    fn has_lapsed(&self, lease: u64) -> bool {
        self.value("seconds from last renew")
            .and_then(|seconds| seconds.parse().ok())
            .is_some_and(|seconds: u64| seconds > lease)
    }

    /// Returns its states of a file system.
    fn states_of(&self, device: (u32, u32)) -> Vec<&str> {
        let superblock = format!("superblock: \"{:02x}:{:02x}:", device.0, device.1);
        self.states.lines().filter(|line| head(line).is_some_and(|head| head.contains(&superblock))).collect()
    }

    /// Whether all of its states are of a file system.
    fn has_only(&self, device: (u32, u32)) -> bool {
        self.states_of(device).len() == self.states.lines().filter(|line| !line.trim().is_empty()).count()
    }

    /// Describes the files that it holds of a file system.
    fn holds(&self, device: (u32, u32)) -> Option<String> {
        let mut states = self.states_of(device);
        if self.value("admin-revoked states").is_some() {
            states.retain(|line| !head(line).is_some_and(|head| head.contains("{ type: deleg,")));
        }
        let name =
            states.first()?.split("filename: \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        let others = match states.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        let address = self.value("address").unwrap_or("an unknown address").trim_matches('"');
        let (address, name) = (printable(address.as_bytes()), printable(name.as_bytes()));
        Some(format!("the NFS client {address} has '{name}'{others} open or delegated"))
    }
}

/// Returns the part of a line of `states` before the file name, which the kernel does not escape: it may contain
/// anything.
fn head(line: &str) -> Option<&str> {
    line.split(", filename: \"").next().filter(|head| head.starts_with("- 0x"))
}

fn lease() -> u64 {
    fs::read_to_string(LEASE).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX)
}

/// Describes the clients that hold files of the file system with this device number; empty where there are none.
pub(super) fn holders(device: (u32, u32)) -> String {
    let mut found: Vec<String> = Vec::new();
    let lease = lease();
    for client in children(Path::new(CLIENTS)).iter().filter_map(|directory| Client::read(directory)) {
        if !client.has_lapsed(lease) {
            found.extend(client.holds(device));
        }
    }
    // NFSv3 has no opens, and its locks are no states of a client.
    if found.is_empty() && has_locks(&fs::read_to_string(LOCKS).unwrap_or_default(), device) {
        found.push("a program or a client of the NFS server has a file locked".to_owned());
    }
    found.join("; ")
}

/// Whether a table like `/proc/locks` has a lock on this device. Leases and delegations do not count.
fn has_locks(table: &str, device: (u32, u32)) -> bool {
    let prefix = format!("{:02x}:{:02x}:", device.0, device.1);
    let is_lock = |line: &str| !line.contains(" DELEG ") && !line.contains(" LEASE ");
    table.lines().any(|line| is_lock(line) && line.split_whitespace().any(|word| word.starts_with(&prefix)))
}

/// Has the server release its states of a mount that is no longer exported.
pub(super) fn release(at: &Path, device: (u32, u32)) {
    if !Path::new(UNLOCK).exists() || !is_seen(at, device) {
        return;
    }
    let mut path = "\\x".to_owned();
    for byte in at.as_os_str().as_bytes() {
        // Writing to a string never fails.
        let _ = write!(path, "{byte:02x}");
    }
    path.push('\n');
    if let Err(error) = fs::write(UNLOCK, path) {
        tracing::warn!(%error, at = %crate::report::path_text(at), "the NFS server did not release a mount");
    }
    let lease = lease();
    for directory in children(Path::new(CLIENTS)) {
        let Some(client) = Client::read(&directory) else { continue };
        // A client with states of other exports stays: those would be released, too.
        if client.has_lapsed(lease)
            && !client.states_of(device).is_empty()
            && client.has_only(device)
            && let Err(error) = fs::write(directory.join("ctl"), "expire\n")
        {
            tracing::warn!(%error, client = client.value("address"), "a lapsed NFS client was not expired");
        }
    }
}

/// Whether the path leads to the mount itself, and not to another one mounted over it.
fn is_seen(at: &Path, device: (u32, u32)) -> bool {
    let seen: io::Result<_> =
        rustix::fs::statx(CWD, at, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).map_err(Into::into);
    seen.is_ok_and(|seen| (seen.stx_dev_major, seen.stx_dev_minor) == device)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str =
        "clientid: 0x918d37bd6b0cd3a4\naddress: \"10.0.0.5:690\"\nstatus: confirmed\nseconds from last renew: 7\n";
    const REVOCABLE: &str = "address: \"10.0.0.5:690\"\nseconds from last renew: 91\nadmin-revoked states: 0\n";
    const DELEGATION: &str = "- 0x01: { type: deleg, access: r, superblock: \"00:22:10\", filename: \"docs/fs.md\" }\n";
    const OPEN: &str = "- 0x02: { type: open, access: -w, deny: --, superblock: \"00:22:115\", filename: \"root/appended\", owner: \"open id:\\x00\" }\n";

    fn client(info: &str, states: &str) -> Client {
        Client { info: info.to_owned(), states: states.to_owned() }
    }

    #[test]
    fn opens_hold_a_mount_and_delegations_only_where_the_kernel_cannot_revoke_them() {
        let both = format!("{DELEGATION}{OPEN}");
        assert_eq!(client(REVOCABLE, DELEGATION).holds((0, 0x22)), None);
        let one = "the NFS client 10.0.0.5:690 has 'root/appended' open or delegated";
        assert_eq!(client(REVOCABLE, &both).holds((0, 0x22)).as_deref(), Some(one));
        let two = "the NFS client 10.0.0.5:690 has 'docs/fs.md' and 1 more open or delegated";
        assert_eq!(client(INFO, &both).holds((0, 0x22)).as_deref(), Some(two));
        assert_eq!(client(INFO, &both).holds((0, 0x23)), None);
        assert_eq!(client(INFO, &both).holds((0, 0x2)), None);
        // Names of files that look like states.
        let open = OPEN.replace("root/appended", "x{ type: deleg, superblock: \"00:23:1");
        assert!(client(REVOCABLE, &open).holds((0, 0x22)).is_some());
        assert_eq!(client(INFO, &open).holds((0, 0x23)), None);
        assert!(client(INFO, &both).has_only((0, 0x22)) && !client(INFO, &both).has_only((0, 0x23)));
    }

    #[test]
    fn a_client_lapses_with_its_lease() {
        assert!(client(REVOCABLE, OPEN).has_lapsed(90) && !client(REVOCABLE, OPEN).has_lapsed(91));
        assert!(!client(INFO, OPEN).has_lapsed(90) && !client("", OPEN).has_lapsed(0));
    }

    #[test]
    fn locks_are_told_from_delegations() {
        let delegation = "1: DELEG  ACTIVE    READ 892 00:22:112 0 EOF\n";
        let lock = "2: POSIX  ADVISORY  WRITE -1 00:22:18 0 EOF\n";
        assert!(!has_locks(delegation, (0, 0x22)));
        assert!(has_locks(&format!("{delegation}{lock}"), (0, 0x22)));
        assert!(!has_locks(lock, (0, 0x18)));
    }
}
