//! Log lines on standard error, which systemd puts into the journal.

use std::io::Write;

/// Maximum length of a line, bytes.
const LINE_MAX: usize = 2000;

/// Writes one line. Control characters are escaped, so that no name begins another line. A log that
/// cannot be written stops no call.
pub fn line(text: &str) {
    let mut line = String::from("nacre-volumes: ");
    for letter in text.chars() {
        if line.len() > LINE_MAX {
            line.push_str("...");
            break;
        }
        if letter.is_control() {
            line.extend(letter.escape_default());
        } else {
            line.push(letter);
        }
    }
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}
