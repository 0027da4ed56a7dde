//! Traits by which the layers query users, groups and processes: the real implementations come from
//! `nacre_sys`, tests have their own.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};

/// A user as listed in the system's databases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
}

/// The databases of users and groups. Every query may wait for a directory service.
pub trait Accounts: Send + Sync {
    /// The user of this name; `None` where there is none.
    ///
    /// # Errors
    /// The database cannot answer.
    fn user(&self, name: &str) -> io::Result<Option<User>>;

    /// The group of this name.
    ///
    /// # Errors
    /// The database cannot answer.
    fn group(&self, name: &str) -> io::Result<Option<u32>>;

    /// All groups of the user with this id: primary and supplementary; empty for an id without an
    /// account. Queries this one user only, never enumerates.
    ///
    /// # Errors
    /// The database cannot answer.
    fn groups_of(&self, uid: u32) -> io::Result<Vec<u32>>;
}

/// Accounts for syntax checks: every name exists, each with an id of its own.
#[derive(Debug, Default)]
pub struct Everybody(AtomicU32);

impl Everybody {
    /// Returns the next id, from the upper end, where no ids are in use.
    fn another(&self) -> u32 {
        u32::MAX - 1 - self.0.fetch_add(1, Ordering::Relaxed)
    }
}

impl Accounts for Everybody {
    fn user(&self, _name: &str) -> io::Result<Option<User>> {
        let id = self.another();
        Ok(Some(User { uid: id, gid: id }))
    }

    fn group(&self, _name: &str) -> io::Result<Option<u32>> {
        Ok(Some(self.another()))
    }

    fn groups_of(&self, _uid: u32) -> io::Result<Vec<u32>> {
        Ok(Vec::new())
    }
}

/// Ids that a thread accesses files with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// File-system user id; 0 for threads of root with the capabilities of root.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Queries about running processes.
pub trait Processes: Send + Sync {
    /// The ids of a process or thread; `None` where it has ended, or acts for others (a kernel
    /// thread, like those of the NFS server).
    ///
    /// # Errors
    /// The system cannot answer.
    fn credentials(&self, pid: u32) -> io::Result<Option<Credentials>>;

    /// The supplementary groups of a process or thread; empty where it has ended.
    ///
    /// # Errors
    /// The system cannot answer.
    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>>;
}

/// Resolves a user or group given by name or number: a numeric text is the id itself, whether it
/// exists or not.
///
/// # Errors
/// Text for the user, which names `text` and `kind` ("user", "group").
fn resolve(kind: &str, text: &str, find: impl FnOnce(&str) -> io::Result<Option<u32>>) -> Result<u32, String> {
    if text.is_empty() {
        return Err(format!("an empty name where a {kind} is expected"));
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        // (uid_t)-1 means "no change" to chown(2) and is no valid id.
        return text
            .parse()
            .ok()
            .filter(|&id| id != u32::MAX)
            .ok_or_else(|| format!("{kind} id {text} is too large; ids go from 0 to {}", u32::MAX - 1));
    }
    match find(text) {
        Ok(Some(id)) => Ok(id),
        Ok(None) => {
            Err(format!("there is no {kind} \"{}\"; check the spelling or give the number", text.escape_debug()))
        }
        Err(error) => {
            Err(format!("cannot look up {kind} \"{}\": {error}; try again or give the number", text.escape_debug()))
        }
    }
}

/// Resolves a user given by name or number to its id.
///
/// # Errors
/// Text for the user: no such user, a number that is too large, or a database that does not answer.
pub fn user_id(accounts: &dyn Accounts, text: &str) -> Result<u32, String> {
    resolve("user", text, |name| Ok(accounts.user(name)?.map(|user| user.uid)))
}

/// Resolves a group given by name or number to its id.
///
/// # Errors
/// As for [`user_id`].
pub fn group_id(accounts: &dyn Accounts, text: &str) -> Result<u32, String> {
    resolve("group", text, |name| accounts.group(name))
}
