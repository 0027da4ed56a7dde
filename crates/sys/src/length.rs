//! The length of a file by its path.

use std::{ffi::CString, io, os::unix::ffi::OsStrExt, path::Path};

/// Sets the length of the file at `path`, following links; unlike ftruncate(2), this causes no open
/// and no close.
///
/// # Errors
/// As `truncate(2)`.
pub fn truncate(path: &Path, length: u64) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let length = libc::off64_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: the path ends with NUL and lives during the call.
    if unsafe { libc::truncate64(path.as_ptr(), length) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
