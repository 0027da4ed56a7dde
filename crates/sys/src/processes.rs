//! Identity of other processes by `/proc` (proc_pid_status(5)).
//!
//! Called by the layers' account look-ups and by the FUSE front end, which drops set-group-id bits.
//! Invariant: a process that has ended is no error.

use std::io;

/// Ids of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIds {
    /// User; 0 for a thread of root that acts for a user and keeps root's rights.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Content of a process' or thread's `status` file; `None` if it has ended.
fn status(pid: u32) -> io::Result<Option<String>> {
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Supplementary groups of a process or thread; empty if it has ended.
///
/// # Errors
/// The status file cannot be read.
pub fn supplementary_groups(pid: u32) -> io::Result<Vec<u32>> {
    Ok(status(pid)?.map(|status| groups_line(&status)).unwrap_or_default())
}

/// Ids with which a process or thread accesses files; `None` for an ended process, and for a kernel thread, which acts for
/// others (a thread of the NFS server).
///
/// # Errors
/// The status file cannot be read.
pub fn ids(pid: u32) -> io::Result<Option<ProcessIds>> {
    Ok(status(pid)?.and_then(|status| ids_of(&status)))
}

/// The capability to change files of all owners (capabilities(7)). A thread of root that takes a
/// user's ids by setfsuid(2) loses it, unless it only creates files for that user, like our
/// threads.
const CAP_FOWNER: u64 = 1 << 3;

fn ids_of(status: &str) -> Option<ProcessIds> {
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    // `Kthread:` exists since Linux 6.8; before, a kernel thread is recognized by having no memory.
    if line("Kthread:").map_or(line("VmSize:").is_none(), |value| value.trim() == "1") {
        return None;
    }
    // Order of the fields: real, effective, saved, file-system id.
    let id = |name: &str, which| line(name)?.split_ascii_whitespace().nth(which)?.parse::<u32>().ok();
    let capabilities = line("CapEff:").and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or_default();
    let is_root = id("Uid:", 1)? == 0 && capabilities & CAP_FOWNER != 0;
    let uid = if is_root { 0 } else { id("Uid:", 3)? };
    Some(ProcessIds { uid, gid: id("Gid:", 3)?, groups: groups_line(status) })
}

/// Numbers after `Groups:` in a status file.
fn groups_line(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_status_file() {
        assert_eq!(groups_line("Name:\tx\nGroups:\t4 24 4294967294 \nNStgid:\t1"), [4, 24, 4_294_967_294]);
        assert_eq!(groups_line("Name:\tx\nGroups:\t \n"), [0u32; 0]);
    }

    #[test]
    fn ids_of_a_status_file() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 \n";
        let known = Some(ProcessIds { uid: 4, gid: 8, groups: vec![9] });
        assert_eq!(ids_of(&format!("{status}VmSize:\t1 kB\n")), known);
        assert_eq!(ids_of(&format!("{status}Kthread:\t0\n")), known);
        assert_eq!(ids_of(&format!("{status}Kthread:\t1\n")), None);
        assert_eq!(ids_of(status), None);
        let root = status.replace("Uid:\t1\t2", "Uid:\t0\t0") + "Kthread:\t0\n";
        assert_eq!(ids_of(&root), known, "as a user");
        let keeps_rights = ids_of(&format!("{root}CapEff:\t000001ffffffffef\n"));
        assert_eq!(keeps_rights.map(|known| known.uid), Some(0), "for a user");
        assert_eq!(ids_of("Uid:\t1\t2\nKthread:\t0\n"), None);
    }

    #[test]
    fn an_ended_process_has_no_status() {
        assert_eq!(status(u32::MAX).unwrap(), None);
        assert!(status(std::process::id()).unwrap().is_some());
    }
}
