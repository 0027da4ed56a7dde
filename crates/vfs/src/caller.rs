//! The caller of an operation.

/// The process behind a request, in the ids of the daemon's own user namespace.
///
/// Has no supplementary groups: the kernel has checked permissions already; the few layers that need groups
/// (per-caller views) look them up by `pid` or `uid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Thread id of the caller; 0 where unknown (the kernel itself, or another pid namespace).
    pub pid: u32,
    /// The umask that applies to a creation; 0 for every other request, and where the front end has applied it
    /// already.
    pub umask: u32,
}

impl Caller {
    /// The superuser on its own behalf: for a daemon's internal work.
    pub const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0 };
}
