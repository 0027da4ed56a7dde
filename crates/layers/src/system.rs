//! The real environment: databases of users and groups, `/proc`, `/sys`, and the ids of this
//! process.
//!
//! Called once, where the program builds a stack. Invariant: no query enumerates users.

use crate::{
    accounts::{Accounts, Credentials, Processes, User},
    clock::SystemClock,
    context::{Context, Devices, Mounter, simply_waiting, tell_nobody},
};
use nacre_sys::{accounts, processes};
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
        let ids = processes::ids(pid)?;
        Ok(ids.map(|ids| Credentials { uid: ids.uid, gid: ids.gid, groups: ids.groups }))
    }

    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>> {
        processes::supplementary_groups(pid)
    }
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
            lock_directory: Default::default(),
            tell: tell_nobody(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
