//! The mount table, as in `/proc/self/mountinfo` (proc(5)).
//!
//! Parsing is pure; only [`read`] accesses the system. The table shows whether a path is a mount point without an
//! access to it: a request to a mount whose daemon hangs would hang, too.

use crate::failure::Failure;
use std::{ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount id.
    pub id: u64,
    /// Device of the file system, major and minor.
    pub device: (u32, u32),
    /// Mount point.
    pub mountpoint: PathBuf,
    /// Options of the mount (`ro`, `nosuid`).
    pub options: Vec<String>,
    /// Type (`ext4`, `fuse.nacre`).
    pub kind: String,
    /// Source, first column of the mount table.
    pub source: PathBuf,
    /// Options of the file system (`rw,user_id=0`).
    pub data: String,
}

impl MountEntry {
    /// Returns the identity of the mount, which does not depend on its path.
    #[must_use]
    pub fn identity(&self) -> fusewire::Identity {
        fusewire::Identity { id: self.id, device: self.device }
    }

    /// Whether a process of ours serves it, judged by its type.
    pub fn is_served(&self) -> bool {
        ["fuse.nacre", "fuse.bindfs", "fuse.fuse-overlayfs", "fuse.mergerfs"].contains(&self.kind.as_str())
    }

    /// Returns the user who mounted it, for FUSE mounts.
    pub fn user(&self) -> Option<u32> {
        self.data.split(',').find_map(|word| word.strip_prefix("user_id=")?.parse().ok())
    }
}

/// A type of file system whose files are the kernel's own or made on this machine: no user can have brought a set-user-id
/// program or a device into one.
#[derive(Clone, Copy, Debug)]
pub struct KernelKind {
    /// Type, as in [`MountEntry::kind`].
    pub name: &'static str,
    /// Programs store files in it; otherwise it is virtual, and they need it unchanged.
    pub stores_files: bool,
}

const KERNEL_KINDS: [KernelKind; 25] = [
    KernelKind { name: "autofs", stores_files: false },
    KernelKind { name: "binfmt_misc", stores_files: false },
    KernelKind { name: "bpf", stores_files: false },
    KernelKind { name: "cgroup", stores_files: false },
    KernelKind { name: "cgroup2", stores_files: false },
    KernelKind { name: "configfs", stores_files: false },
    KernelKind { name: "debugfs", stores_files: false },
    KernelKind { name: "devpts", stores_files: false },
    KernelKind { name: "devtmpfs", stores_files: false },
    KernelKind { name: "efivarfs", stores_files: false },
    KernelKind { name: "fusectl", stores_files: false },
    KernelKind { name: "hugetlbfs", stores_files: true },
    KernelKind { name: "mqueue", stores_files: false },
    KernelKind { name: "nfsd", stores_files: false },
    KernelKind { name: "nsfs", stores_files: false },
    KernelKind { name: "proc", stores_files: false },
    KernelKind { name: "pstore", stores_files: false },
    KernelKind { name: "resctrl", stores_files: false },
    KernelKind { name: "rpc_pipefs", stores_files: false },
    KernelKind { name: "securityfs", stores_files: false },
    KernelKind { name: "selinuxfs", stores_files: false },
    KernelKind { name: "smackfs", stores_files: false },
    KernelKind { name: "sysfs", stores_files: false },
    KernelKind { name: "tmpfs", stores_files: true },
    KernelKind { name: "tracefs", stores_files: false },
];

/// Returns the kernel's type of file system with this name.
pub fn kernel_kind(name: &str) -> Option<KernelKind> {
    KERNEL_KINDS.iter().find(|kind| kind.name == name).copied()
}

/// Formats a device number as in the table.
pub fn device_text(major: u32, minor: u32) -> String {
    format!("{major}:{minor}")
}

/// Reads the table of this process's mount namespace.
///
/// # Errors
/// `/proc` is not mounted.
pub fn read() -> Result<Vec<MountEntry>, Failure> {
    const TABLE: &str = "/proc/self/mountinfo";
    let table = std::fs::read(TABLE);
    table
        .map(|table| parse(&table))
        .map_err(|error| Failure::io("cannot read", TABLE, &error).next("mount the proc file system at /proc"))
}

/// Whether the file system with this device number (as in stat(2)) is in a process's mount table, and other users
/// than its owner may access it.
#[must_use]
pub fn shows_to_others(pid: rustix::process::Pid, device: u64) -> bool {
    let Ok(table) = std::fs::read(format!("/proc/{}/mountinfo", pid.as_raw_nonzero())) else { return false };
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    let lets_in = |entry: &MountEntry| entry.data.split(',').any(|word| word == "allow_other");
    parse(&table).iter().any(|entry| entry.device == device && lets_in(entry))
}

/// Parses the table; lines that are not understood are left out.
pub fn parse(table: &[u8]) -> Vec<MountEntry> {
    table.split(|&byte| byte == b'\n').filter_map(entry).collect()
}

fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = number(fields.next()?)?;
    let _parent = fields.next()?;
    let device = fields.next()?;
    let colon = device.iter().position(|&byte| byte == b':')?;
    let device =
        (u32::try_from(number(device.get(..colon)?)?).ok()?, u32::try_from(number(device.get(colon + 1..)?)?).ok()?);
    let _root = fields.next()?;
    let mountpoint = path(fields.next()?);
    let options = String::from_utf8_lossy(fields.next()?).split(',').map(str::to_owned).collect();
    // Optional fields end with a single hyphen.
    fields.by_ref().find(|field| *field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = path(fields.next()?);
    let data = String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned();
    Some(MountEntry { id, device, mountpoint, options, kind, source, data })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Decodes a path: blank, tab, newline and backslash are written as a backslash and three octal digits.
fn path(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        match (byte, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            (byte, _) => bytes.push(*byte),
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn types_of_the_kernel_are_listed_once() {
        assert!(KERNEL_KINDS.windows(2).all(|pair| pair[0].name < pair[1].name));
        assert!(KERNEL_KINDS.iter().all(|kind| kernel_kind(kind.name).unwrap().stores_files == kind.stores_files));
        let stores = |name| kernel_kind(name).map(|kind| kind.stores_files);
        assert_eq!(
            ["tmpfs", "proc", "nfsd", "autofs", "ext4"].map(stores),
            [Some(true), Some(false), Some(false), Some(false), None]
        );
    }

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let table =
            b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue\n\
            99 35 0:43 / /a\\040b\\134 ro - fuse.nacre /srv/x\\011y rw,user_id=0\nnonsense\n\n5 6 7\n";
        let entries = parse(table);
        assert_eq!(entries.len(), 2);
        let [first, second] = &entries[..] else { panic!() };
        assert_eq!((first.id, first.device, first.kind.as_str()), (36, (98, 0), "ext3"));
        assert_eq!(first.options, ["rw", "noatime"]);
        assert_eq!(second.mountpoint, Path::new("/a b\\"));
        assert_eq!((second.kind.as_str(), second.source.as_path()), ("fuse.nacre", Path::new("/srv/x\ty")));
        assert_eq!((first.data.as_str(), second.data.as_str()), ("rw,errors=continue", "rw,user_id=0"));
    }
}
