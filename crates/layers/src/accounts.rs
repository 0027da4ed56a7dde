//! What the layers ask the system about users, groups and processes, as traits: the real answers
//! come from `nacre_sys`, tests give their own.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};

/// A user as the system's databases know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
}

/// The databases of users and groups. Every question may wait for a directory service.
pub trait Accounts: Send + Sync {
    /// The user of this name; `None` where there is none.
    ///
    /// # Errors
    /// Where the database cannot answer.
    fn user(&self, name: &str) -> io::Result<Option<User>>;

    /// The group of this name.
    ///
    /// # Errors
    /// Where the database cannot answer.
    fn group(&self, name: &str) -> io::Result<Option<u32>>;

    /// All groups of the user with this id: primary and supplementary; empty for an id without an
    /// account. Asks for this one user only, never enumerates.
    ///
    /// # Errors
    /// Where the database cannot answer.
    fn groups_of(&self, uid: u32) -> io::Result<Vec<u32>>;
}

/// A machine on which everybody exists, each with a number of their own: for looking at how rules
/// are written before anybody is looked up.
#[derive(Debug, Default)]
pub struct Everybody(AtomicU32);

impl Everybody {
    /// From the upper end, where no ids are in use.
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

/// By which ids a thread uses files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// File-system user id; 0 for root's threads that have the rights of root.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// What is known of running processes.
pub trait Processes: Send + Sync {
    /// The ids of a process or thread; `None` where it is gone, or works for others (a kernel thread,
    /// as of the NFS server).
    ///
    /// # Errors
    /// Where the system cannot answer.
    fn credentials(&self, pid: u32) -> io::Result<Option<Credentials>>;

    /// The supplementary groups of a process or thread; empty where it is gone.
    ///
    /// # Errors
    /// Where the system cannot answer.
    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>>;
}

/// A user or group id from its name or number: a numeric text is an id as it stands, whether it
/// exists or not.
///
/// # Errors
/// Text for the user, which names `text` and `kind` ("user", "group").
fn resolve(kind: &str, text: &str, find: impl FnOnce(&str) -> io::Result<Option<u32>>) -> Result<u32, String> {
    if text.is_empty() {
        return Err(format!("an empty name where a {kind} is expected"));
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        // (uid_t)-1 means "leave it alone" to chown(2) and can belong to nobody.
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

/// The id of a user given by name or number.
///
/// # Errors
/// Text for the user: no such user, a number that is too large, or a database that does not answer.
pub fn user_id(accounts: &dyn Accounts, text: &str) -> Result<u32, String> {
    resolve("user", text, |name| Ok(accounts.user(name)?.map(|user| user.uid)))
}

/// The id of a group given by name or number.
///
/// # Errors
/// As for [`user_id`].
pub fn group_id(accounts: &dyn Accounts, text: &str) -> Result<u32, String> {
    resolve("group", text, |name| accounts.group(name))
}
