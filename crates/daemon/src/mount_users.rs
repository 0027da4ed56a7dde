//! Users of a mount, in all mount namespaces: processes with their working directory in it, or with files of it
//! open or mapped, and mount namespaces that keep it mounted.
//!
//! Called when an unmount is refused. Invariants: no request reaches the mount (`STATX_DONT_SYNC`);
//! a process whose `/proc` entries hang is waited for no longer than [`LIMIT`].

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use fusewire::Identity;
use nacre_sys::proc_looks::ProcLooks;
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::report::{path_text, printable};

/// Deadline for reading `/proc`.
const LIMIT: Duration = Duration::from_secs(3);
/// Number of processes that are named one by one.
const NAMED: usize = 5;

/// A process that uses a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    pid: u32,
    program: String,
    how: String,
}

/// Describes the users of a mount; empty where none can be seen (another user's process, the kernel itself).
pub(crate) fn named(mount: Identity) -> String {
    let looked = ProcLooks::default().within(LIMIT, move || words(&users(mount)));
    looked.ok().flatten().unwrap_or_default()
}

/// Whether all users of a mount are file servers, which release a share some time after its end: NFS-Ganesha and Samba.
pub(crate) fn are_file_servers(mount: Identity) -> bool {
    let is_server = |user: &User| matches!(user.program.as_str(), "ganesha.nfsd" | "smbd" | "smbd-cleanupd");
    let looked = ProcLooks::default().within(LIMIT, move || {
        let users = users(mount);
        !users.is_empty() && users.iter().all(is_server)
    });
    looked.ok().flatten().unwrap_or(false)
}

fn words(users: &[User]) -> String {
    let one = |user: &User| format!("{} (process {}) {}", user.program, user.pid, user.how);
    let mut named: Vec<String> = users.iter().take(NAMED).map(one).collect();
    if users.len() > NAMED {
        named.push(format!("{} more processes use it", users.len() - NAMED));
    }
    named.join("; ")
}

fn users(mount: Identity) -> Vec<User> {
    let keepers = fusewire::kept_by(mount);
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if pid == std::process::id() {
            continue;
        }
        let used = use_of(&entry.path(), mount.device);
        let keeps = || keepers.contains(&pid).then(|| "is in a mount namespace that has it mounted".to_owned());
        if let Some(how) = used.or_else(keeps) {
            let program = fs::read(entry.path().join("comm")).unwrap_or_default();
            found.push(User { pid, program: printable(program.trim_ascii_end()), how });
        }
    }
    found
}

/// Counts the processes that use each of these file systems; `None` where `/proc` does not answer in time.
pub(crate) fn count(devices: Vec<(u32, u32)>) -> Option<HashMap<(u32, u32), usize>> {
    if devices.is_empty() {
        return Some(HashMap::new());
    }
    let devices: HashSet<(u32, u32)> = devices.into_iter().collect();
    let looked = ProcLooks::default().within(LIMIT, move || {
        let mut counts = HashMap::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().and_then(|name| name.parse::<u32>().ok()).is_none_or(|pid| pid == std::process::id()) {
                continue;
            }
            for device in used(&entry.path()).into_iter().filter(|device| devices.contains(device)) {
                *counts.entry(device).or_insert(0) += 1;
            }
        }
        counts
    });
    looked.ok().flatten()
}

/// The device numbers of the file systems that a process uses.
fn used(process: &Path) -> HashSet<(u32, u32)> {
    let mut devices = HashSet::new();
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    for link in ["cwd", "root"].into_iter().map(|link| process.join(link)).chain(descriptors) {
        if let Ok(stat) = rustix::fs::statx(CWD, &link, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()) {
            devices.insert((stat.stx_dev_major, stat.stx_dev_minor));
        }
    }
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    for line in maps.split(|byte| *byte == b'\n') {
        let device = line.split(|byte| *byte == b' ').nth(3).and_then(|text| std::str::from_utf8(text).ok());
        let Some((major, minor)) = device.and_then(|device| device.split_once(':')) else { continue };
        if let (Ok(major), Ok(minor)) = (u32::from_str_radix(major, 16), u32::from_str_radix(minor, 16)) {
            devices.insert((major, minor));
        }
    }
    devices
}

/// Returns how a process uses the file system with this device number, if it does.
fn use_of(process: &Path, device: (u32, u32)) -> Option<String> {
    for link in ["cwd", "root"] {
        if let Some(place) = leads_into(&process.join(link), device) {
            return Some(format!("works in {}", path_text(&place)));
        }
    }
    for descriptor in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        if let Some(file) = leads_into(&descriptor.path(), device) {
            return Some(format!("has {} open", path_text(&file)));
        }
    }
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    mapped(&maps, device).map(|file| format!("has {} mapped", printable(file)))
}

/// Returns the target of a link of `/proc`, if it is on this device.
fn leads_into(link: &Path, device: (u32, u32)) -> Option<PathBuf> {
    let stat = rustix::fs::statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    if (stat.stx_dev_major, stat.stx_dev_minor) != device {
        return None;
    }
    fs::read_link(link).ok()
}

/// Returns the first file of this device in a table of mappings (proc(5)): range, permissions, offset, device in
/// hexadecimal digits, inode, path.
fn mapped(maps: &[u8], device: (u32, u32)) -> Option<&[u8]> {
    let wanted = format!("{:02x}:{:02x}", device.0, device.1);
    maps.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        if fields.nth(3)? != wanted.as_bytes() {
            return None;
        }
        Some(fields.nth(1)?.trim_ascii_start())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_a_file_system_are_found() {
        let scratch = tempfile::tempdir().unwrap();
        let stat = rustix::fs::statx(CWD, scratch.path(), AtFlags::empty(), StatxFlags::empty()).unwrap();
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let file = fs::File::create(scratch.path().join("log")).unwrap();
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        assert_eq!(leads_into(Path::new(&link), device), Some(scratch.path().join("log")));
        assert_eq!(leads_into(Path::new(&link), (device.0, device.1 + 1)), None);
        let maps = b"7f00-7f01 r--p 00000000 00:2a 77    /m/with space\n7f02-7f03 rw-p 0 00:00 0\n";
        assert_eq!(mapped(maps, (0, 42)), Some(&b"/m/with space"[..]));
        assert_eq!(mapped(maps, (0, 43)), None);
    }

    #[test]
    fn many_are_counted() {
        let one = User { pid: 7, program: "sh".to_owned(), how: "works in /m".to_owned() };
        assert_eq!(words(&[one.clone(), one.clone()]), "sh (process 7) works in /m; sh (process 7) works in /m");
        assert!(words(&vec![one; 8]).ends_with("; 3 more processes use it"));
        assert_eq!(words(&[]), "");
    }
}
