//! Set-id bits for files that are shown as somebody else's than they are below.
//!
//! Called by the filters that show other owners, with each mode that is about to be set. Whom the
//! kernel takes for the owner may set any mode; but where root's file is shown as a user's,
//! set-user-id would make a program of the user's run as root on the storage. So a caller gives a
//! regular file set-user-id only where the file is the caller's below, and set-group-id only where
//! its group there is one of the caller's. Root may do both.

use crate::accounts::{Credentials, Processes};
use nacre_vfs::{Before, Caller, Errno, Kind, Result, SetAttr};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;

/// The owners of a file below.
#[derive(Clone, Copy)]
struct Owners {
    user: u32,
    group: u32,
}

/// Takes the set-id bits out of a change that its caller must not give to the file, which is `before` the change.
/// Directories only pass their groups on.
///
/// # Errors
/// EIO where it cannot be found out who the caller is; the errors of `before`.
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

/// `mode` without the set-id bits that this caller must not give to a file of these owners.
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

/// Whether a caller who creates something is root. By its process as well: filters above, and mirrors
/// of mirrors, have other ids create on behalf of root.
pub(crate) fn is_root(processes: &dyn Processes, caller: &Caller) -> bool {
    let by_process = || processes.credentials(caller.pid).is_ok_and(|known| known.is_some_and(|known| known.uid == 0));
    caller.uid == 0 || caller.pid != 0 && by_process()
}

/// Who a caller is; `None` where nobody can say.
fn credentials(processes: &dyn Processes, caller: &Caller) -> Result<Option<Credentials>> {
    let named = Credentials { uid: caller.uid, gid: caller.gid, groups: Vec::new() };
    if caller.pid == 0 {
        return Ok(Some(named));
    }
    let process = processes.credentials(caller.pid).map_err(|_| Errno::EIO)?;
    // On mounts that can be idmapped requests bear no ids, which looks like root.
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
        // Named in the request, or found by the process.
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
