//! Files that are written as a whole or not at all: whoever reads one, also after the power was
//! cut, sees the old or the new content.
//!
//! Called by what keeps records: of cages (`cage/record.rs`), of pools
//! (`pool/{known,expected,cachefile}.rs`).

use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Puts a file with this content in the place of `path`. It is made as `unready`, beside it, opened
/// with `options`, and locked as long as it is written, so that nobody takes it for something that
/// was left.
///
/// # Errors
/// What the system says; then what was at `path` is there still, and nothing at `unready`.
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
