//! Shares by Samba, through `net usershare`. Other settings of such a share (previous versions) are in its template
//! in smb.conf (docs/exports.md).

use crate::cage::programs::{Program, run};
use nacre_pool::properties::sharing::SmbShare;
use std::path::{Path, PathBuf};

const NET: Program = Program { name: "net", package: "samba-common-bin" };

/// Whether Samba is installed.
pub(super) fn is_there() -> bool {
    Path::new("/usr/bin/net").exists()
}

/// Shares a mount.
pub(super) fn share(path: &str, name: &str, source: &str, wanted: &SmbShare) -> Result<(), String> {
    // Everyone, by SID: resolving the name needs a running server.
    let rights = if wanted.read_only { "S-1-1-0:R" } else { "S-1-1-0:F" };
    let guests = if wanted.guests { "guest_ok=y" } else { "guest_ok=n" };
    // Names of datasets need no quoting.
    run(NET, &["usershare", "add", name, path, source, rights, guests], 0).map(drop).map_err(|failure| failure.what)
}

/// Returns the path of the share of this name.
pub(super) fn path_of(name: &str) -> Option<PathBuf> {
    let info = run(NET, &["usershare", "info", name], 0).ok()?;
    let text = String::from_utf8_lossy(&info.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("path=")).map(PathBuf::from)
}

/// Removes the share; it may be gone already, or be another one by now.
pub(super) fn take_back(name: &str, at: &Path) -> Result<(), String> {
    if !is_there() || path_of(name).as_deref() != Some(at) {
        return Ok(());
    }
    run(NET, &["usershare", "delete", name], 0).map(drop).map_err(|failure| failure.what)
}
