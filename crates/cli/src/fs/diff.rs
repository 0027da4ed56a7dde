//! `diff`: prints a line for each changed path as soon as it is found.

use super::command::DiffForm;
use crate::output::print;
use nacre_admin::fs::{Difference, FileKind, FsRequest, How};
use nacre_daemon::{failure::Failure, pool::client};

/// Requests the differences and prints them.
///
/// # Errors
/// No such snapshot or pool, or output that cannot be written.
pub fn run(pool: &str, from: String, to: Option<String>, form: DiffForm) -> Result<(), Failure> {
    let mut failed = Ok(());
    let mut tell = |note: &str| {
        if failed.is_ok() {
            failed = match serde_json::from_str::<Difference>(note) {
                Ok(difference) => print(&line(&difference, form)),
                Err(error) => Err(Failure::new(format!(
                    "the process that owns the pool answers something else than was asked: {error}"
                ))),
            };
        }
    };
    let asked = client::owned(pool)?.fs("", FsRequest::Diff { from, to }, &mut tell);
    asked.map(drop).and(failed)
}

/// Returns the letter that `ls -F` uses for a file type, or ZFS for a type without one.
fn letter(kind: FileKind) -> char {
    match kind {
        FileKind::File => 'F',
        FileKind::Directory => '/',
        FileKind::Symlink => '@',
        FileKind::Block => 'B',
        FileKind::Character => 'C',
        FileKind::Fifo => '|',
        FileKind::Socket => '=',
    }
}

/// Formats a path as ZFS does: unprintable bytes, blanks and backslashes as octal numbers.
fn path(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'\\' | 0..=b' ' | 0x7f.. => text.push_str(&format!("\\{byte:04o}")),
            printable => text.push(char::from(*printable)),
        }
    }
    text
}

/// Formats a difference as a line.
pub fn line(difference: &Difference, form: DiffForm) -> String {
    let mut text = String::new();
    if form.times {
        text.push_str(&format!("{}.{:09}\t", difference.changed.0, difference.changed.1));
    }
    let (sign, tail) = match &difference.how {
        How::Modified(0) => ('M', String::new()),
        How::Modified(links) => ('M', format!("\t({links:+})")),
        How::Added => ('+', String::new()),
        How::Removed => ('-', String::new()),
        How::Renamed(_) => ('R', String::new()),
    };
    text.push(sign);
    text.push('\t');
    if form.types {
        text.push(letter(difference.kind));
        text.push('\t');
    }
    match &difference.how {
        How::Renamed(from) => {
            let between = if form.scripted { "\t" } else { " -> " };
            text.push_str(&format!("{}{between}{}", path(from), path(&difference.path)));
        }
        _ => text.push_str(&path(&difference.path)),
    }
    text + &tail + "\n"
}
