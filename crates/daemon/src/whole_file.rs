//! Atomic replacement of files: a reader, also after a power cut, sees the old or the new content.
//!
//! Called by the writers of records: of cages (`cage/record.rs`), of pools (`pool/{known,expected,cachefile}.rs`).

use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Replaces the file at `path` by one with this content. It is made as `unready`, next to it, opened with
/// `options`, and locked as long as it is written, so that nobody takes it for an abandoned one.
///
/// # Errors
/// Errors of the system; then the file at `path` is unchanged, and there is none at `unready`.
pub fn replace(path: &Path, unready: &Path, options: &OpenOptions, content: &[u8]) -> io::Result<()> {
    let mut file = options.open(unready)?;
    let written = flock(&file, FlockOperation::LockExclusive).map_err(io::Error::from);
    let written = written
        .and_then(|()| file.write_all(content))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(unready, path));
    written.inspect_err(|_| {
        // Nobody reads it under that name.
        let _ = fs::remove_file(unready);
    })?;
    path.parent().map_or(Ok(()), |parent| {
        File::open(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?.sync_all()
    })
}
