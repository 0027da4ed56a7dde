//! Membership in a `mirror` list: users, and members of groups.
//!
//! No users are enumerated. A caller belongs to `@group` if its file-system group or a
//! supplementary group of its process is that group, or if the databases of users and groups list
//! its user id there (a directory service is asked about this one user, once). Results for user ids
//! are cached until the rules are replaced; results for processes for a second, since processes
//! change their groups. Both tables are bounded. A query that fails counts as "no" for this request
//! only.

use crate::{
    accounts::{self, Accounts, Processes},
    clock::Clock,
    context::{Context, Waiting, wait_for},
};
use hashbrown::{HashMap, HashSet};
use nacre_vfs::Caller;
use parking_lot::Mutex;
use std::{fmt, io, sync::Arc, time::Duration};

/// Maximum number of entries per table; a full one is emptied.
const CACHE_LIMIT: usize = 4096;
/// How long the groups of a process are cached.
const PROCESS_TTL: Duration = Duration::from_secs(1);

/// A list with names resolved to numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberList {
    users: HashSet<u32>,
    groups: HashSet<u32>,
}

impl MemberList {
    /// Parses `user:@group,...`; empty items are skipped.
    ///
    /// # Errors
    /// Text for the user: an unknown user or group.
    pub fn parse(text: &str, accounts: &dyn Accounts) -> Result<MemberList, String> {
        let mut list = MemberList::default();
        for item in text.split([',', ':']).filter(|item| !item.is_empty()) {
            match item.strip_prefix('@') {
                // An "@" alone is accepted and ignored by bindfs; here it is an error.
                Some(group) => list.groups.insert(accounts::group_id(accounts, group)?),
                None => list.users.insert(accounts::user_id(accounts, item)?),
            };
        }
        Ok(list)
    }
}

/// A list with caches of membership.
pub struct Members {
    list: MemberList,
    accounts: Arc<dyn Accounts>,
    processes: Arc<dyn Processes>,
    clock: Arc<dyn Clock>,
    waiting: Waiting,
    by_user: Mutex<HashMap<u32, bool>>,
    by_process: Mutex<HashMap<(u32, u32), (Duration, bool)>>,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Members").field(&self.list).finish()
    }
}

impl Members {
    /// Makes a list ready for queries.
    pub fn new(list: MemberList, context: &Context) -> Members {
        Members {
            list,
            accounts: Arc::clone(&context.accounts),
            processes: Arc::clone(&context.processes),
            clock: Arc::clone(&context.clock),
            waiting: Arc::clone(&context.waiting),
            by_user: Mutex::default(),
            by_process: Mutex::default(),
        }
    }

    /// Whether the caller is on the list.
    pub fn contain(&self, caller: &Caller) -> bool {
        if self.list.users.contains(&caller.uid) || self.list.groups.contains(&caller.gid) {
            return true;
        }
        !self.list.groups.is_empty() && (self.account_belongs(caller.uid) || self.process_belongs(caller))
    }

    fn any(&self, groups: &[u32]) -> bool {
        groups.iter().any(|group| self.list.groups.contains(group))
    }

    fn account_belongs(&self, uid: u32) -> bool {
        if let Some(&known) = self.by_user.lock().get(&uid) {
            return known;
        }
        // Asked without the lock: a directory service may take long, and other callers must not
        // wait for it.
        let answer = wait_for(&self.waiting, || self.accounts.groups_of(uid));
        match answer.unwrap_or_else(|errno| Err(io::Error::from_raw_os_error(errno.raw()))) {
            Ok(groups) => {
                let belongs = self.any(&groups);
                let mut table = self.by_user.lock();
                if table.len() >= CACHE_LIMIT {
                    table.clear();
                }
                table.insert(uid, belongs);
                belongs
            }
            Err(error) => {
                tracing::warn!(uid, %error, "the groups of a user cannot be looked up; the user is taken for no member now");
                false
            }
        }
    }

    fn process_belongs(&self, caller: &Caller) -> bool {
        if caller.pid == 0 {
            return false;
        }
        let (key, now) = ((caller.pid, caller.uid), self.clock.now());
        if let Some(&(since, known)) = self.by_process.lock().get(&key)
            && now.saturating_sub(since) < PROCESS_TTL
        {
            return known;
        }
        match self.processes.supplementary_groups(caller.pid) {
            Ok(groups) => {
                let belongs = self.any(&groups);
                let mut table = self.by_process.lock();
                if table.len() >= CACHE_LIMIT {
                    table.clear();
                }
                table.insert(key, (now, belongs));
                belongs
            }
            Err(error) => {
                tracing::warn!(pid = caller.pid, %error, "the groups of a process cannot be read; it is taken for no member now");
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::{FakeAccounts, FakeClock, FakeProcesses};

    fn caller(uid: u32, gid: u32, pid: u32) -> Caller {
        Caller { uid, gid, pid, umask: 0 }
    }

    fn members(
        text: &str,
        accounts: &Arc<FakeAccounts>,
        processes: &Arc<FakeProcesses>,
        clock: &Arc<FakeClock>,
    ) -> Members {
        let list = MemberList::parse(text, &**accounts).unwrap();
        let context = Context {
            accounts: Arc::clone(accounts) as _,
            processes: Arc::clone(processes) as _,
            clock: Arc::clone(clock) as _,
            ..crate::fakes::context(0)
        };
        Members::new(list, &context)
    }

    #[test]
    fn users_and_groups_belong() {
        let (accounts, processes, clock) = Default::default();
        let members = members("alice:@staff,77", &accounts, &processes, &clock);
        assert!(members.contain(&caller(1000, 9, 0)), "listed by name");
        assert!(members.contain(&caller(77, 9, 0)), "listed by number without an account");
        assert!(members.contain(&caller(1001, 9, 0)), "bob is in staff by the database");
        assert!(members.contain(&caller(5, 50, 0)), "runs with the group staff");
        assert!(!members.contain(&caller(1002, 9, 0)));
        processes.groups.lock().insert(400, vec![8, 50]);
        assert!(members.contain(&caller(1002, 9, 400)), "supplementary group of the process");
    }

    #[test]
    fn an_account_is_asked_once_and_a_process_once_a_second() {
        let (accounts, processes, clock) = <(Arc<FakeAccounts>, Arc<FakeProcesses>, Arc<FakeClock>)>::default();
        let members = members("@staff", &accounts, &processes, &clock);
        processes.groups.lock().insert(7, vec![1]);
        for _ in 0..3 {
            assert!(!members.contain(&caller(1002, 9, 7)));
        }
        assert_eq!((accounts.asked(), processes.asked()), (1, 1));
        processes.groups.lock().insert(7, vec![50]);
        clock.advance(Duration::from_millis(1001));
        assert!(members.contain(&caller(1002, 9, 7)));
        assert_eq!((accounts.asked(), processes.asked()), (1, 2));
    }

    #[test]
    fn a_failing_database_means_no_and_is_asked_again() {
        let (accounts, processes, clock) = <(Arc<FakeAccounts>, Arc<FakeProcesses>, Arc<FakeClock>)>::default();
        let members = members("@staff", &accounts, &processes, &clock);
        accounts.fail(true);
        assert!(!members.contain(&caller(1001, 9, 0)));
        accounts.fail(false);
        assert!(members.contain(&caller(1001, 9, 0)));
    }

    #[test]
    fn tables_stay_bounded() {
        let (accounts, processes, clock) = <(Arc<FakeAccounts>, Arc<FakeProcesses>, Arc<FakeClock>)>::default();
        let members = members("@staff", &accounts, &processes, &clock);
        for id in 10_000..20_000 {
            assert!(!members.contain(&caller(id, 9, id)));
        }
        assert!(members.by_user.lock().len() <= CACHE_LIMIT && members.by_process.lock().len() <= CACHE_LIMIT);
    }

    #[test]
    fn unknown_names_are_errors() {
        let accounts = FakeAccounts::default();
        for text in ["nobody-here", "@nobody-here", "alice:@", "4294967295"] {
            assert!(MemberList::parse(text, &accounts).is_err(), "{text}");
        }
        for text in ["", ":", "alice:"] {
            assert!(MemberList::parse(text, &accounts).is_ok(), "{text}");
        }
    }
}
