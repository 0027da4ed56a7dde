//! Asking the process that owns a pool about its file systems.

use nacre_admin::fs::{FsAnswer, FsRequest};
use nacre_daemon::{failure::Failure, pool::client, report::tell};

/// Asks the process that owns a pool.
pub fn ask(pool: &str, command: &str, request: FsRequest) -> Result<FsAnswer, Failure> {
    if pool.is_empty() {
        return Err(Failure::new("a name begins with that of a pool: POOL/NAME, without a slash before it"));
    }
    client::owned(pool)?.fs(command, request, &mut tell)
}
