//! The file-system identity of the calling thread: owner and group of files that it creates, its
//! umask, and the relevant capabilities.
//!
//! Called by the host leaf around every creation. All of this is per thread in Linux, and switching
//! has a cost, so a thread that calls [`prepare_thread`] keeps the last identity and switches only
//! when the next one differs; any other thread switches back each time.
//!
//! A prepared thread has:
//! * a working directory and umask of its own (`unshare(CLONE_FS)`);
//! * `SECBIT_NO_SETUID_FIXUP`, so that the capabilities survive a file-system id other than 0
//!   (access was checked before the request arrived; only the ownership of new files shall be the
//!   caller's);
//! * no `CAP_SYS_RESOURCE`, so that quotas and reserved blocks apply to the users it works for;
//! * no effective `CAP_FSETID`, so that writing to a file clears its set-id bits like a write by
//!   these users ([`with_set_id_kept`] lifts this).

use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, UnshareFlags, capabilities, capabilities_secure_bits,
    set_capabilities, set_capabilities_secure_bits, set_thread_groups,
};
use std::{cell::Cell, io};

/// Owner, group and umask for new files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Permission bits that a creation clears if the directory has no default ACL.
    pub umask: u32,
}

/// Cached state of the calling thread.
#[derive(Clone, Copy)]
struct Thread {
    /// Identity in force and kept between calls; meaningful on prepared threads only.
    current: Identity,
    /// Stays in the last identity and keeps its capabilities there.
    prepared: bool,
    /// Has `CAP_SETUID` and `CAP_SETGID`.
    may_switch: bool,
    /// Has a umask of its own.
    own_umask: bool,
    /// Owns the permitted, but not effective, `CAP_FSETID`.
    lacks_set_id: bool,
}

thread_local! {
    static THREAD: Cell<Option<Thread>> = const { Cell::new(None) };
}

fn set_fs_uid(uid: u32) -> u32 {
    // SAFETY: takes a number, returns the previous one; concerns the calling thread only.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

fn set_fs_gid(gid: u32) -> u32 {
    // SAFETY: takes a number, returns the previous one; concerns the calling thread only.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

fn set_umask(umask: u32) -> u32 {
    // SAFETY: takes a number, returns the previous one.
    unsafe { libc::umask(umask & 0o777) }
}

/// Gives the calling thread a working directory and umask of its own.
fn unshare_umask() -> io::Result<()> {
    // SAFETY: CLONE_FS concerns the working directory, root and umask of this thread only; no
    // descriptor changes its meaning.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?)
}

fn examine() -> io::Result<Thread> {
    let sets = capabilities(None)?;
    // An invalid id queries without a change (setfsuid(2)).
    let current = Identity { uid: set_fs_uid(u32::MAX), gid: set_fs_gid(u32::MAX), umask: 0 };
    Ok(Thread {
        current,
        prepared: false,
        may_switch: sets.effective.contains(CapabilitySet::SETUID | CapabilitySet::SETGID),
        own_umask: false,
        lacks_set_id: !sets.effective.contains(CapabilitySet::FSETID) && sets.permitted.contains(CapabilitySet::FSETID),
    })
}

fn this_thread() -> io::Result<Thread> {
    if let Some(thread) = THREAD.get() {
        return Ok(thread);
    }
    let thread = examine()?;
    THREAD.set(Some(thread));
    Ok(thread)
}

/// Makes the calling thread a worker for other users (see the file's head). Without privileges it
/// only gets a umask of its own. Repeated calls are harmless.
///
/// # Errors
/// ENOMEM, or EPERM where a security policy forbids it: the thread then still works, switching back
/// each time.
pub fn prepare_thread() -> io::Result<()> {
    let mut thread = this_thread()?;
    if thread.prepared {
        return Ok(());
    }
    unshare_umask()?;
    thread.current.umask = 0;
    set_umask(0);
    thread.own_umask = true;
    THREAD.set(Some(thread));
    if thread.may_switch {
        let bits = capabilities_secure_bits()?;
        if !bits.contains(CapabilitiesSecureBits::NO_SETUID_FIXUP) {
            set_capabilities_secure_bits(bits | CapabilitiesSecureBits::NO_SETUID_FIXUP)?;
        }
        let mut sets = capabilities(None)?;
        sets.effective.remove(CapabilitySet::SYS_RESOURCE | CapabilitySet::FSETID);
        sets.permitted.remove(CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets)?;
        thread.lacks_set_id = sets.permitted.contains(CapabilitySet::FSETID);
    }
    thread.prepared = true;
    THREAD.set(Some(thread));
    Ok(())
}

/// Whether files can be created for other users from this thread.
pub fn may_switch() -> bool {
    this_thread().is_ok_and(|thread| thread.may_switch)
}

/// Switches the file-system ids.
fn switch(from: &Identity, to: &Identity) -> io::Result<()> {
    // The group first: without kept capabilities, the right to set it is lost with the user id.
    if from.gid != to.gid {
        set_fs_gid(to.gid);
        if set_fs_gid(u32::MAX) != to.gid {
            return Err(io::Error::from_raw_os_error(libc::EOVERFLOW));
        }
    }
    if from.uid != to.uid {
        set_fs_uid(to.uid);
        if set_fs_uid(u32::MAX) != to.uid {
            set_fs_gid(from.gid);
            // The id is not mapped in our user namespace.
            return Err(io::Error::from_raw_os_error(libc::EOVERFLOW));
        }
    }
    Ok(())
}

/// Runs `create` so that files created by it belong to `identity` and their modes are subject to
/// its umask. A thread without the privilege to switch creates under its own ids, with that umask.
///
/// # Errors
/// EOVERFLOW if the ids are not mapped in our user namespace; EPERM or ENOMEM if the thread cannot
/// have a umask of its own.
pub fn with_identity<T>(identity: Identity, create: impl FnOnce() -> T) -> io::Result<T> {
    let mut thread = this_thread()?;
    if thread.prepared {
        if thread.may_switch && (identity.uid, identity.gid) != (thread.current.uid, thread.current.gid) {
            let switched = switch(&thread.current, &identity);
            thread.current.uid = set_fs_uid(u32::MAX);
            thread.current.gid = set_fs_gid(u32::MAX);
            THREAD.set(Some(thread));
            switched?;
        }
        if identity.umask != thread.current.umask {
            set_umask(identity.umask);
            thread.current.umask = identity.umask;
            THREAD.set(Some(thread));
        }
        return Ok(create());
    }
    if !thread.own_umask {
        unshare_umask()?;
        thread.own_umask = true;
        THREAD.set(Some(thread));
    }
    let _umask = Umask(set_umask(identity.umask));
    if !thread.may_switch || (identity.uid, identity.gid) == (thread.current.uid, thread.current.gid) {
        return Ok(create());
    }
    let _kept = KeptCapabilities::new()?;
    switch(&thread.current, &identity)?;
    let _ids = Ids(thread.current);
    Ok(create())
}

/// Runs `work` under the ids of the process itself, after an earlier creation left others in force
/// (see [`prepare_thread`]): for storage that checks the ids of every call, like network file
/// systems.
///
/// # Errors
/// As [`with_identity`].
pub fn with_own_identity<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    let thread = this_thread()?;
    if !thread.prepared {
        return Ok(work());
    }
    let own = Identity {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        umask: thread.current.umask,
    };
    with_identity(own, work)
}

/// Runs `work` as an ordinary user without any capability, in a thread of its own that ends with
/// it: for queries whose result depends on that user's rights.
///
/// # Errors
/// EPERM without the right to switch ids, EOVERFLOW if the ids are not mapped in our user
/// namespace, EAGAIN if no thread can be started.
pub fn as_ordinary_user<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    if uid == 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    let inside = move || {
        set_thread_groups(&groups)?;
        let current = Identity { uid: set_fs_uid(u32::MAX), gid: set_fs_gid(u32::MAX), umask: 0 };
        switch(&current, &Identity { uid, gid, umask: 0 })?;
        // For this thread only, and last: the switch needed the capabilities.
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
        Ok(work())
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("nacre-as-user".to_owned()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `work` with the capability to keep or set the set-id bits of files (`CAP_FSETID`), if the
/// process has it.
///
/// # Errors
/// As `capset(2)`.
pub fn with_set_id_kept<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    if !this_thread()?.lacks_set_id {
        return Ok(work());
    }
    let lowered = capabilities(None)?;
    let mut raised = lowered;
    raised.effective.insert(CapabilitySet::FSETID);
    set_capabilities(None, raised)?;
    let kept = SetIdKept(lowered);
    let result = work();
    // Lowered here, so that a refusal is reported; by the drop of `kept` if `work` panics.
    std::mem::forget(kept);
    set_capabilities(None, lowered)?;
    Ok(result)
}

/// Lowers `CAP_FSETID` again if the closure that ran with it panics.
struct SetIdKept(CapabilitySets);

impl Drop for SetIdKept {
    fn drop(&mut self) {
        // Cannot fail: a thread may always lower its own effective capabilities.
        let _lowered = set_capabilities(None, self.0);
    }
}

/// Restores the umask.
struct Umask(u32);

impl Drop for Umask {
    fn drop(&mut self) {
        set_umask(self.0);
    }
}

/// Restores the ids.
struct Ids(Identity);

impl Drop for Ids {
    fn drop(&mut self) {
        set_fs_uid(self.0.uid);
        set_fs_gid(self.0.gid);
    }
}

/// Keeps capabilities during a switch of ids on a thread that was not prepared.
struct KeptCapabilities(Option<CapabilitiesSecureBits>);

impl KeptCapabilities {
    fn new() -> io::Result<KeptCapabilities> {
        let bits = capabilities_secure_bits()?;
        if bits.contains(CapabilitiesSecureBits::NO_SETUID_FIXUP) {
            return Ok(KeptCapabilities(None));
        }
        // Without CAP_SETPCAP the capabilities are lost and restored with the ids, and the creation
        // is checked by the caller's own rights.
        let set = set_capabilities_secure_bits(bits | CapabilitiesSecureBits::NO_SETUID_FIXUP);
        Ok(KeptCapabilities(set.is_ok().then_some(bits)))
    }
}

impl Drop for KeptCapabilities {
    fn drop(&mut self) {
        if let Some(bits) = self.0 {
            // Cannot fail: the same thread set these bits a moment ago.
            let _restored = set_capabilities_secure_bits(bits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::MetadataExt, path::PathBuf, thread};

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("nacre-sys-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    fn owner_of_new(path: &std::path::Path, identity: Identity) -> (u32, u32, u32) {
        with_identity(identity, || {
            use std::os::unix::fs::OpenOptionsExt;
            fs::OpenOptions::new().write(true).create_new(true).mode(0o666).open(path)
        })
        .unwrap()
        .unwrap();
        let meta = fs::metadata(path).unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o777)
    }

    #[test]
    fn both_kinds_of_thread_create_as_the_caller() {
        if !is_root() {
            return;
        }
        for prepared in [false, true] {
            let directory = scratch(if prepared { "prepared" } else { "plain" });
            let inside = directory.clone();
            thread::spawn(move || {
                if prepared {
                    prepare_thread().unwrap();
                    prepare_thread().unwrap();
                }
                let user = Identity { uid: 1234, gid: 4321, umask: 0o027 };
                // The directory belongs to root, mode 755: only kept capabilities let user 1234
                // create there.
                assert_eq!(owner_of_new(&inside.join("a"), user), (1234, 4321, 0o640));
                assert_eq!(owner_of_new(&inside.join("b"), Identity { uid: 0, gid: 0, umask: 0 }), (0, 0, 0o666));
                assert_eq!(owner_of_new(&inside.join("c"), user), (1234, 4321, 0o640));
                let after = with_own_identity(|| fs::write(inside.join("d"), b"")).unwrap();
                after.unwrap();
                assert_eq!(fs::metadata(inside.join("d")).unwrap().uid(), 0);
            })
            .join()
            .unwrap();
            fs::remove_dir_all(directory).unwrap();
        }
    }

    #[test]
    fn an_ordinary_user_has_only_its_own_rights() {
        if !is_root() {
            return;
        }
        let directory = scratch("ordinary");
        let path = directory.join("file");
        fs::write(&path, b"").unwrap();
        let opens = |mode: u32, gid: u32, groups: &[u32]| {
            use std::os::unix::fs::{PermissionsExt, chown};
            chown(&path, Some(0), Some(4321)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            as_ordinary_user(1234, gid, groups, || fs::File::open(&path).is_ok()).unwrap()
        };
        assert!(!opens(0o600, 1, &[]));
        assert!(!opens(0o640, 1, &[]));
        assert!(opens(0o640, 4321, &[]));
        assert!(opens(0o640, 1, &[7, 4321]));
        assert!(opens(0o604, 1, &[]));
        assert!(as_ordinary_user(0, 0, &[], || ()).is_err());
        assert!(fs::File::open(&path).is_ok(), "the calling thread is what it was");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_plain_thread_is_left_as_it_was() {
        let before = (set_fs_uid(u32::MAX), capabilities(None).unwrap());
        let umask = set_umask(0o022);
        with_identity(Identity { uid: 77, gid: 77, umask: 0o777 }, || ()).unwrap();
        assert_eq!(set_umask(umask), 0o022);
        let after = (set_fs_uid(u32::MAX), capabilities(None).unwrap());
        assert_eq!(before, after);
    }

    #[test]
    fn a_panic_does_not_leave_the_right_to_keep_set_id_bits() {
        if !is_root() {
            return;
        }
        thread::spawn(|| {
            prepare_thread().unwrap();
            let has = || capabilities(None).unwrap().effective.contains(CapabilitySet::FSETID);
            assert!(!has());
            let raised = std::cell::Cell::new(false);
            let work = std::panic::AssertUnwindSafe(|| {
                with_set_id_kept(|| {
                    raised.set(has());
                    panic!("in the middle of the work");
                })
            });
            assert!(std::panic::catch_unwind(work).is_err());
            assert!(raised.get() && !has());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn set_id_bits_fall_on_write_unless_kept() {
        use std::{io::Write, os::unix::fs::PermissionsExt};
        if !is_root() {
            return;
        }
        let directory = scratch("set-id");
        let path = directory.join("file");
        thread::spawn(move || {
            prepare_thread().unwrap();
            for (keep, expected) in [(false, 0o755), (true, 0o4755)] {
                fs::write(&path, b"").unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
                let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                if keep { with_set_id_kept(|| file.write_all(b"x")).unwrap() } else { file.write_all(b"x") }.unwrap();
                assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, expected);
            }
        })
        .join()
        .unwrap();
        fs::remove_dir_all(directory).unwrap();
    }
}
