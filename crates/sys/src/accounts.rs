//! The user and group databases (NSS), by the reentrant calls.
//!
//! Called by the parsers of owner rules and by the mirror lists. Invariant: look-ups by name or
//! number never enumerate, because an enumeration of accounts in a directory service may take
//! minutes or return nothing. Names are bytes.

use std::{
    ffi::{CStr, CString, c_char},
    io,
    mem::MaybeUninit,
    ptr,
    sync::{Mutex, PoisonError},
};

/// A user of the passwd database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: Vec<u8>,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
}

/// A group of the group database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Name.
    pub name: Vec<u8>,
    /// Group id.
    pub gid: u32,
    /// Names of the members that the group itself lists; users who have it as primary group need
    /// not be among them.
    pub members: Vec<Vec<u8>>,
}

/// Maximum size of the buffer for one record: a group of some ten thousand members fits.
const RECORD_MAX: usize = 16 << 20;

/// Serializes the enumeration calls, which share one cursor per process.
static CURSOR: Mutex<()> = Mutex::new(());

fn c_name(name: &[u8]) -> Option<CString> {
    // A name with a NUL inside cannot exist.
    CString::new(name).ok()
}

/// Copies a C string that a record points to.
///
/// # Safety
/// `text` is null or points to a NUL-terminated string that lives during the call.
unsafe fn bytes(text: *const c_char) -> Vec<u8> {
    if text.is_null() {
        return Vec::new();
    }
    // SAFETY: not null; the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()
}

/// # Safety
/// `record` was filled in by one of the `getpw*_r` calls, whose buffer still lives.
unsafe fn user(record: &libc::passwd) -> User {
    // SAFETY: as the caller vouches.
    User { name: unsafe { bytes(record.pw_name) }, uid: record.pw_uid, gid: record.pw_gid }
}

/// # Safety
/// `record` was filled in by one of the `getgr*_r` calls, whose buffer still lives.
unsafe fn group(record: &libc::group) -> Group {
    let mut members = Vec::new();
    let mut next = record.gr_mem;
    // SAFETY: `gr_mem` is null or an array of strings ended by a null pointer (POSIX grp.h), alive
    // as the caller vouches.
    unsafe {
        while !next.is_null() && !(*next).is_null() {
            members.push(bytes(*next));
            next = next.add(1);
        }
        Group { name: bytes(record.gr_name), gid: record.gr_gid, members }
    }
}

/// Runs one reentrant look-up, and repeats it with a larger buffer while the result is ERANGE.
/// `call` gets the record, the buffer and the pointer to the result, and returns the error number
/// (POSIX: these calls return it and do not set errno).
fn fetch<R, T>(
    mut call: impl FnMut(*mut R, &mut [u8], *mut *mut R) -> libc::c_int,
    convert: impl Fn(&R) -> T,
) -> io::Result<Option<T>> {
    let mut buffer = vec![0_u8; 4096];
    loop {
        let mut record = MaybeUninit::<R>::uninit();
        let mut result: *mut R = ptr::null_mut();
        match call(record.as_mut_ptr(), &mut buffer, &raw mut result) {
            0 if result.is_null() => return Ok(None),
            // SAFETY: on success the result is null or points to the record, now filled in; it
            // lives here, as does the buffer.
            0 => return Ok(Some(convert(unsafe { &*result }))),
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < RECORD_MAX => buffer.resize(buffer.len() * 4, 0),
            // Errors that some implementations return for "not found" (getpwnam(3), "NOTES").
            libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Finds a user by name.
///
/// # Errors
/// As the database (EIO, EMFILE ...); an unknown name is `None`.
pub fn user_by_name(name: &[u8]) -> io::Result<Option<User>> {
    let Some(name) = c_name(name) else { return Ok(None) };
    fetch(
        // SAFETY: all pointers live during the call and the length is the buffer's.
        |record, buffer, result| unsafe {
            libc::getpwnam_r(name.as_ptr(), record, buffer.as_mut_ptr().cast(), buffer.len(), result)
        },
        // SAFETY: `fetch` converts while the buffer lives.
        |record| unsafe { user(record) },
    )
}

/// Finds a user by number.
///
/// # Errors
/// As [`user_by_name`].
pub fn user_by_id(uid: u32) -> io::Result<Option<User>> {
    fetch(
        // SAFETY: all pointers live during the call and the length is the buffer's.
        |record, buffer, result| unsafe {
            libc::getpwuid_r(uid, record, buffer.as_mut_ptr().cast(), buffer.len(), result)
        },
        // SAFETY: `fetch` converts while the buffer lives.
        |record| unsafe { user(record) },
    )
}

/// Finds a group by name.
///
/// # Errors
/// As [`user_by_name`].
pub fn group_by_name(name: &[u8]) -> io::Result<Option<Group>> {
    let Some(name) = c_name(name) else { return Ok(None) };
    fetch(
        // SAFETY: all pointers live during the call and the length is the buffer's.
        |record, buffer, result| unsafe {
            libc::getgrnam_r(name.as_ptr(), record, buffer.as_mut_ptr().cast(), buffer.len(), result)
        },
        // SAFETY: `fetch` converts while the buffer lives.
        |record| unsafe { group(record) },
    )
}

/// Finds a group by number.
///
/// # Errors
/// As [`user_by_name`].
pub fn group_by_id(gid: u32) -> io::Result<Option<Group>> {
    fetch(
        // SAFETY: all pointers live during the call and the length is the buffer's.
        |record, buffer, result| unsafe {
            libc::getgrgid_r(gid, record, buffer.as_mut_ptr().cast(), buffer.len(), result)
        },
        // SAFETY: `fetch` converts while the buffer lives.
        |record| unsafe { group(record) },
    )
}

/// All groups of a user: `primary` and the groups that list the name. Works where users cannot be
/// enumerated.
///
/// # Errors
/// EINVAL for a name with a NUL; ERANGE past 2^20 groups.
pub fn groups_of(name: &[u8], primary: u32) -> io::Result<Vec<u32>> {
    let name = c_name(name).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    let mut room: libc::c_int = 64;
    while room <= 1 << 20 {
        let mut groups = vec![0_u32; usize::try_from(room).unwrap_or_default()];
        let mut count = room;
        // SAFETY: the vector holds `count` ids; the call writes at most that many and corrects the
        // count.
        let result = unsafe { libc::getgrouplist(name.as_ptr(), primary, groups.as_mut_ptr(), &raw mut count) };
        if result >= 0 {
            groups.truncate(usize::try_from(count).unwrap_or_default());
            return Ok(groups);
        }
        room = count.max(room.saturating_mul(2));
    }
    Err(io::Error::from_raw_os_error(libc::ERANGE))
}

/// All users that the databases enumerate: possibly incomplete, possibly slow (see the file's
/// head).
///
/// # Errors
/// As the database.
pub fn all_users() -> io::Result<Vec<User>> {
    let _cursor = CURSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = Vec::new();
    // SAFETY: no arguments; the lock keeps other users of the shared cursor out.
    unsafe { libc::setpwent() };
    let end = loop {
        let next = fetch(
            // SAFETY: all pointers live during the call and the length is the buffer's.
            |record, buffer, result| unsafe {
                libc::getpwent_r(record, buffer.as_mut_ptr().cast(), buffer.len(), result)
            },
            // SAFETY: `fetch` converts while the buffer lives.
            |record| unsafe { user(record) },
        );
        match next {
            Ok(Some(user)) => all.push(user),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // SAFETY: no arguments; still under the lock.
    unsafe { libc::endpwent() };
    end.map(|()| all)
}

/// All groups that the databases enumerate.
///
/// # Errors
/// As the database.
pub fn all_groups() -> io::Result<Vec<Group>> {
    let _cursor = CURSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = Vec::new();
    // SAFETY: no arguments; the lock keeps other users of the shared cursor out.
    unsafe { libc::setgrent() };
    let end = loop {
        let next = fetch(
            // SAFETY: all pointers live during the call and the length is the buffer's.
            |record, buffer, result| unsafe {
                libc::getgrent_r(record, buffer.as_mut_ptr().cast(), buffer.len(), result)
            },
            // SAFETY: `fetch` converts while the buffer lives.
            |record| unsafe { group(record) },
        );
        match next {
            Ok(Some(group)) => all.push(group),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // SAFETY: no arguments; still under the lock.
    unsafe { libc::endgrent() };
    end.map(|()| all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_known_by_name_and_number() {
        let root = user_by_name(b"root").unwrap().unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert_eq!(user_by_id(0).unwrap().unwrap(), root);
        assert_eq!(group_by_id(0).unwrap().unwrap().name, b"root");
        assert_eq!(group_by_name(b"root").unwrap().unwrap().gid, 0);
        assert!(groups_of(b"root", 0).unwrap().contains(&0));
    }

    #[test]
    fn unknown_accounts_are_none() {
        assert_eq!(user_by_name(b"no such user").unwrap(), None);
        assert_eq!(user_by_name(b"nul\0inside").unwrap(), None);
        assert_eq!(group_by_name(b"no such group").unwrap(), None);
        assert_eq!(user_by_id(4_123_456_789).unwrap(), None);
        assert_eq!(group_by_id(4_123_456_789).unwrap(), None);
    }

    #[test]
    fn enumeration_finds_root() {
        assert!(all_users().unwrap().iter().any(|user| user.name == b"root" && user.uid == 0));
        assert!(all_groups().unwrap().iter().any(|group| group.name == b"root" && group.gid == 0));
    }
}
