//! Requests to the process that owns a pool, about its file systems.

use nacre_admin::fs::{FsAnswer, FsRequest, MountedAt};
use nacre_daemon::{failure::Failure, pool::client, report::tell, runtime::Whose};

/// Sends a request to the process that owns a pool.
pub fn ask(pool: &str, command: &str, request: FsRequest) -> Result<FsAnswer, Failure> {
    if pool.is_empty() {
        return Err(Failure::new("a name begins with that of a pool: POOL/NAME, without a slash before it"));
    }
    client::owned(pool)?.fs(command, request, &mut tell)
}

/// Returns the mounts of all pools of this user, and the first failure of a pool's process.
pub fn all_mounted() -> (Vec<MountedAt>, Option<Failure>) {
    let mut all = Vec::new();
    let (answers, failures) =
        client::ask_each(client::all(&Whose::Ours), |owned| owned.fs("", FsRequest::Mounted, &mut |_| {}));
    for answer in answers {
        if let FsAnswer::Mounted(mounted) = answer {
            all.extend(mounted);
        }
    }
    (all, failures.into_iter().next())
}
