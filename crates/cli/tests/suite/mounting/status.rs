//! The report of a mount as scripts read it: `nacre status --json`.

use super::{eventually, nacre, run, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

/// The report of one mount.
#[derive(Clone, Debug)]
pub struct Status(Value);

impl Status {
    /// Requests the report of a mount.
    pub fn of(mountpoint: &Path) -> Status {
        let ask = || run(nacre(), [OsStr::new("status"), OsStr::new("--json"), mountpoint.as_os_str()]);
        let mut output = ask();
        // A daemon in the foreground serves the mount a moment before it answers questions.
        eventually("the daemon answers", || {
            if !output.status.success() {
                output = ask();
            }
            output.status.success()
        });
        assert!(output.status.success(), "nacre status: {}", text(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let mounts =
            value.as_array().or_else(|| value.get("mounts").and_then(Value::as_array)).expect("a list of mounts");
        assert_eq!(mounts.len(), 1, "{value}");
        Status(mounts[0].clone())
    }

    /// Returns whether this process answers for the mount.
    pub fn is_told_by(mountpoint: &Path, pid: u32) -> bool {
        let output = run(nacre(), [OsStr::new("status"), OsStr::new("--json"), mountpoint.as_os_str()]);
        let told: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        told.is_some_and(|told| told[0]["pid"].as_u64() == Some(u64::from(pid)))
    }

    /// Returns a field as text.
    pub fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_else(|| panic!("{field} in {}", self.0))
    }

    /// Returns a field as a number.
    pub fn number(&self, field: &str) -> u64 {
        self.0[field].as_u64().unwrap_or_else(|| panic!("{field} in {}", self.0))
    }

    /// Returns whether passthrough is on.
    pub fn passthrough(&self) -> bool {
        self.0["passthrough"]["on"].as_bool().expect("passthrough.on")
    }

    /// Returns how the mount survives its process.
    pub fn survives(&self) -> &Value {
        &self.0["survives"]
    }

    /// Returns why opening a file is a request, where it is one.
    pub fn asks_at_open(&self) -> Option<&str> {
        self.0["asks_at_open"].as_str()
    }

    /// Returns the requests by kind.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        let operations = self.0["operations"].as_array().expect("operations");
        operations
            .iter()
            .map(|row| (row["name"].as_str().unwrap().to_lowercase(), row["requests"].as_u64().unwrap()))
            .collect()
    }
}

/// Waits until the kernel has no request for a mount any more, neither one that is not yet read nor
/// one without an answer: RELEASE is sent without any caller waiting for it. Does nothing without
/// root, since only root may read this.
pub fn settle(mountpoint: &Path) {
    use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
    let Some(connections) = connections() else { return };
    // The device number is the number of the connection; this statx does not cause a request.
    let found = rustix::fs::statx(CWD, mountpoint, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).expect("statx");
    let counter = format!("{}/waiting", rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor));
    super::eventually("all requests are answered", || {
        let mut text = [0; 32];
        let file = rustix::fs::openat(connections, &counter, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .expect("a connection");
        let length = rustix::io::read(&file, &mut text).expect("a number");
        text[..length].trim_ascii() == b"0"
    });
}

/// Returns the kernel's directory of connections, which is not mounted everywhere: mounted for this
/// process, detached. None for root of a container.
fn connections() -> Option<&'static OwnedFd> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
    static CONNECTIONS: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let mounted = || {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    };
    CONNECTIONS.get_or_init(|| mounted().ok()).as_ref()
}

/// Returns the requests that an action causes, by kind. Kinds without any are omitted, and so are
/// the requests by which the kernel forgets inodes: no caller waits for them, and their time
/// depends on the machine.
pub fn requests_of(mountpoint: &Path, what: impl FnOnce()) -> BTreeMap<String, u64> {
    settle(mountpoint);
    let before = Status::of(mountpoint).requests();
    what();
    settle(mountpoint);
    let after = Status::of(mountpoint).requests();
    after
        .into_iter()
        .map(|(name, count)| {
            let earlier = before.get(&name).copied().unwrap_or(0);
            (name, count - earlier)
        })
        .filter(|(name, count)| *count > 0 && !name.contains("forget"))
        .collect()
}

/// Returns the requests of an action that is expected to cause none: the least of three attempts,
/// because the kernel may drop its caches at any time (other tests make it do so).
pub fn least_requests_of(mountpoint: &Path, what: impl Fn()) -> BTreeMap<String, u64> {
    let attempts = (0..3).map(|_| requests_of(mountpoint, &what));
    attempts.min_by_key(|requests| requests.values().sum::<u64>()).unwrap_or_default()
}
