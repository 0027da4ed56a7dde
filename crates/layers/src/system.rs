//! The real environment: databases of users and groups, `/proc`, `/sys`, and the ids of this
//! process.
//!
//! Called once, where the program builds a stack. Invariant: no query enumerates users.

use crate::{
    accounts::{Accounts, Credentials, Processes, User},
    clock::SystemClock,
    context::{Context, Devices, Mounter, simply_waiting, tell_nobody},
};
use nacre_sys::accounts;
use std::{io, sync::Arc};

/// Accounts by the system's databases (NSS).
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemAccounts;

impl Accounts for SystemAccounts {
    fn user(&self, name: &str) -> io::Result<Option<User>> {
        Ok(accounts::user_by_name(name.as_bytes())?.map(|user| User { uid: user.uid, gid: user.gid }))
    }

    fn group(&self, name: &str) -> io::Result<Option<u32>> {
        Ok(accounts::group_by_name(name.as_bytes())?.map(|group| group.gid))
    }

    fn groups_of(&self, uid: u32) -> io::Result<Vec<u32>> {
        match accounts::user_by_id(uid)? {
            Some(user) => accounts::groups_of(&user.name, user.gid),
            None => Ok(Vec::new()),
        }
    }
}

/// Processes by `/proc`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemProcesses;

impl Processes for SystemProcesses {
    fn credentials(&self, pid: u32) -> io::Result<Option<Credentials>> {
        Ok(status(pid)?.and_then(|status| credentials_lines(&status)))
    }

    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>> {
        Ok(status(pid)?.map(|status| groups_line(&status)).unwrap_or_default())
    }
}

/// Reads proc_pid_status(5); `None` if the process has ended.
fn status(pid: u32) -> io::Result<Option<String>> {
    match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(3) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The capability to change files of all owners (capabilities(7)). A thread of root that takes a
/// user's ids by setfsuid(2) loses it, unless it only creates files for that user, like our
/// threads.
const CAP_FOWNER: u64 = 1 << 3;

fn credentials_lines(status: &str) -> Option<Credentials> {
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
    Some(Credentials { uid, gid: id("Gid:", 3)?, groups: groups_line(status) })
}

/// The numbers after `Groups:` in proc_pid_status(5).
fn groups_line(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// Block devices by `/sys`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDevices;

impl Devices for SystemDevices {
    fn size(&self, major: u32, minor: u32) -> Option<u64> {
        let sectors = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size")).ok()?;
        // In units of 512 bytes, whatever the device's sectors are (sysfs-block).
        sectors.trim().parse::<u64>().ok()?.checked_mul(512)
    }
}

impl Context {
    /// The environment of this process. A front end with few threads replaces [`Context::waiting`].
    ///
    /// # Errors
    /// The process' own groups cannot be read.
    pub fn system() -> io::Result<Context> {
        let groups = rustix::process::getgroups()?.into_iter().map(rustix::process::Gid::as_raw).collect();
        Ok(Context {
            mounter: Mounter {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                groups,
            },
            accounts: Arc::new(SystemAccounts),
            processes: Arc::new(SystemProcesses),
            devices: Arc::new(SystemDevices),
            clock: Arc::new(SystemClock::default()),
            waiting: simply_waiting(),
            watch_group: None,
            reached: Default::default(),
            left_numbers: None,
            tell: tell_nobody(),
        })
    }
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
        let known = Some(Credentials { uid: 4, gid: 8, groups: vec![9] });
        assert_eq!(credentials_lines(&format!("{status}VmSize:\t1 kB\n")), known);
        assert_eq!(credentials_lines(&format!("{status}Kthread:\t0\n")), known);
        assert_eq!(credentials_lines(&format!("{status}Kthread:\t1\n")), None);
        assert_eq!(credentials_lines(status), None);
        let root = status.replace("Uid:\t1\t2", "Uid:\t0\t0") + "Kthread:\t0\n";
        assert_eq!(credentials_lines(&root), known, "as a user");
        let keeps_rights = credentials_lines(&format!("{root}CapEff:\t000001ffffffffef\n"));
        assert_eq!(keeps_rights.map(|known| known.uid), Some(0), "for a user");
        assert_eq!(credentials_lines("Uid:\t1\t2\nKthread:\t0\n"), None);
    }

    #[test]
    fn this_system_answers() {
        assert_eq!(SystemAccounts.user("root").unwrap(), Some(User { uid: 0, gid: 0 }));
        assert!(SystemAccounts.groups_of(0).unwrap().contains(&0));
        assert_eq!(SystemAccounts.groups_of(4_123_456_789).unwrap(), [0u32; 0]);
        let own = rustix::process::getgroups().unwrap();
        assert_eq!(SystemProcesses.supplementary_groups(std::process::id()).unwrap().len(), own.len());
        assert_eq!(SystemProcesses.supplementary_groups(u32::MAX).unwrap(), [0u32; 0]);
        let myself = SystemProcesses.credentials(std::process::id()).unwrap().unwrap();
        assert_eq!(myself.uid, rustix::process::geteuid().as_raw());
        assert_eq!(SystemProcesses.credentials(u32::MAX).unwrap(), None);
        assert_eq!(SystemDevices.size(0, 0), None);
    }
}
