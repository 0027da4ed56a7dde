//! Set-id bits of files that are shown with another owner than they have in the layer below.
//!
//! Called by the filters that show other owners, with each mode that is about to be set. The kernel
//! lets the shown owner set any mode; but where root's file is shown as a user's, set-user-id would
//! make a program of the user run as root on the storage. So a caller gives a regular file
//! set-user-id only where the file is the caller's in the layer below, and set-group-id only where
//! its group there is one of the caller's. Root may set both.

use crate::accounts::{Credentials, Processes};
use nacre_vfs::{Before, Caller, Errno, Kind, Result, SetAttr};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;

/// Owners of a file in the layer below.
#[derive(Clone, Copy)]
struct Owners {
    user: u32,
    group: u32,
}

/// Removes the set-id bits from a change that its caller must not give to the file, whose
/// attributes are `before`. Directories are exempt: set-group-id makes new files inherit the group.
///
/// # Errors
/// EIO if the caller's identity cannot be determined; the errors of `before`.
pub(crate) fn limit(
    processes: &dyn Processes,
    caller: &Caller,
    change: &mut SetAttr,
    before: Before<'_>,
) -> Result<()> {
    let Some(mode) = change.mode.filter(|mode| mode & (SET_USER_ID | SET_GROUP_ID) != 0) else { return Ok(()) };
    let below = before()?;
    if below.kind != Kind::Directory {
        let owners = Owners { user: change.uid.unwrap_or(below.uid), group: change.gid.unwrap_or(below.gid) };
        change.mode = Some(allowed(processes, caller, mode, owners)?);
    }
    Ok(())
}

/// Returns `mode` without the set-id bits that this caller must not give to a file of these owners.
fn allowed(processes: &dyn Processes, caller: &Caller, mode: u32, owners: Owners) -> Result<u32> {
    let known = credentials(processes, caller)?;
    let mut refused = SET_USER_ID | SET_GROUP_ID;
    if let Some(known) = known {
        if known.uid == 0 {
            return Ok(mode);
        }
        if known.uid == owners.user {
            refused &= !SET_USER_ID;
        }
        if known.gid == owners.group || known.groups.contains(&owners.group) {
            refused &= !SET_GROUP_ID;
        }
    }
    Ok(mode & !refused)
}

/// Whether the caller of a creation is root. Also judged by its process: filters above, and mirrors
/// of mirrors, create under other ids on behalf of root.
pub(crate) fn is_root(processes: &dyn Processes, caller: &Caller) -> bool {
    let by_process = || processes.credentials(caller.pid).is_ok_and(|known| known.is_some_and(|known| known.uid == 0));
    caller.uid == 0 || caller.pid != 0 && by_process()
}

/// Ids of a caller; `None` if they cannot be determined.
fn credentials(processes: &dyn Processes, caller: &Caller) -> Result<Option<Credentials>> {
    let named = Credentials { uid: caller.uid, gid: caller.gid, groups: Vec::new() };
    if caller.pid == 0 {
        return Ok(Some(named));
    }
    let process = processes.credentials(caller.pid).map_err(|_| Errno::EIO)?;
    // On mounts that can be idmapped, requests have no ids, which looks like root.
    if caller.uid == 0 {
        return Ok(process);
    }
    Ok(Some(Credentials { groups: process.map_or(Vec::new(), |process| process.groups), ..named }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::FakeProcesses;

    #[test]
    fn only_who_is_the_owner_below_gives_set_id_bits() {
        let processes = FakeProcesses::default();
        processes.groups.lock().insert(7, vec![50]);
        processes.users.lock().insert(7, (1000, 100));
        let caller = |uid, pid| Caller { uid, gid: if uid == 0 { 0 } else { 100 }, pid, umask: 0 };
        let allowed =
            |uid, pid, (user, group)| allowed(&processes, &caller(uid, pid), 0o6755, Owners { user, group }).unwrap();
        // Ids from the request, or from the process.
        for uid in [1000, 0] {
            assert_eq!(allowed(uid, 7, (0, 0)), 0o755);
            assert_eq!(allowed(uid, 7, (1000, 0)), 0o4755);
            assert_eq!(allowed(uid, 7, (0, 100)), 0o2755);
            assert_eq!(allowed(uid, 7, (1000, 50)), 0o6755);
        }
        assert_eq!(allowed(0, 0, (5, 5)), 0o6755, "this program itself");
        processes.users.lock().insert(8, (0, 0));
        assert_eq!(allowed(0, 8, (5, 5)), 0o6755, "root");
        assert_eq!(allowed(0, 9, (0, 0)), 0o755, "a process that is gone");
        assert_eq!(allowed(1000, 9, (1000, 100)), 0o6755);
        let is_root = |uid, pid| is_root(&processes, &caller(uid, pid));
        assert!(is_root(0, 0) && is_root(1000, 8) && !is_root(1000, 7) && !is_root(1000, 9) && !is_root(1000, 0));
    }
}
