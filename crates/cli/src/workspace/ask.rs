//! The questions of `nacre workspace commit -i`, asked at a terminal: which changes, and how conflicts are resolved.
//!
//! Names and contents are those of programs that nobody trusts: control characters never reach the terminal.

use super::changes::{failed, line};
use nacre_daemon::{failure::Failure, report::printable};
use nacre_workspace::{Base, Change, Conflict, Resolution, Upper};
use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

/// Size from which on the difference of a file is not shown, bytes.
const TOO_LARGE: u64 = 4 << 20;
/// What can be answered for a change.
const HELP: &str = "y: commit this change\nn: leave it in the workspace\na: commit this one and all further ones of its directory, with those below\ns: leave this one and all further ones of its directory, with those below\nd: show the difference\nq: quit, nothing is committed\n";

/// Refuses to ask where nobody can answer.
///
/// # Errors
/// Standard input or standard error is no terminal.
pub fn check_terminal() -> Result<(), Failure> {
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        return Ok(());
    }
    Err(Failure::usage("-i asks at a terminal, and there is none").next("name the paths to commit instead"))
}

fn unasked(error: io::Error) -> Failure {
    Failure::io("cannot ask", "at the terminal", &error)
}

fn say(text: &str) -> Result<(), Failure> {
    io::stderr().write_all(text.as_bytes()).map_err(unasked)
}

/// Asks a question; returns the answer's first character, `None` at the end of the input.
fn answer(question: &str) -> Result<Option<char>, Failure> {
    say(question)?;
    let mut answer = String::new();
    match io::stdin().read_line(&mut answer) {
        Ok(0) => Ok(None),
        Ok(_) => Ok(Some(answer.trim().chars().next().unwrap_or(' ').to_ascii_lowercase())),
        // Not UTF-8: asked again.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(Some(' ')),
        Err(error) => Err(unasked(error)),
    }
}

/// Asks which changes are committed; `None`: none at all, the user has quit.
///
/// # Errors
/// The terminal cannot be read, or a difference not be shown.
pub fn choose(base: &Base, upper: &Upper, changes: Vec<Change>) -> Result<Option<Vec<Change>>, Failure> {
    let total = changes.len();
    // A directory whose further changes are all committed, or all left.
    let mut decided: Option<(PathBuf, bool)> = None;
    let mut chosen = Vec::new();
    for (number, change) in changes.into_iter().enumerate() {
        let path = path_of(&change);
        if let Some((_, is_taken)) = decided.as_ref().filter(|(directory, _)| path.starts_with(directory)) {
            if *is_taken {
                chosen.push(change);
            }
            continue;
        }
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        let is_taken = loop {
            let question = format!("({}/{total}) {}Commit it [y,n,a,s,d,q,?]? ", number + 1, line(&change, false));
            match answer(&question)? {
                Some('y') => break true,
                Some('n') => break false,
                Some(letter @ ('a' | 's')) => {
                    decided = Some((directory, letter == 'a'));
                    break letter == 'a';
                }
                Some('d') => show(base, upper, &change)?,
                Some('q') | None => return Ok(None),
                Some(_) => say(HELP)?,
            }
        };
        if is_taken {
            chosen.push(change);
        }
    }
    Ok(Some(chosen))
}

fn path_of(change: &Change) -> PathBuf {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    PathBuf::from(OsStr::from_bytes(&change.path))
}

/// Shows the difference of one change.
fn show(base: &Base, upper: &Upper, change: &Change) -> Result<(), Failure> {
    let [old, new] = [&change.old, &change.new].map(|entry| entry.as_ref().map_or(0, |entry| entry.size));
    if old.max(new) > TOO_LARGE {
        return say(&format!("{old} and {new} bytes: too large to be shown\n"));
    }
    let mut patch = Vec::new();
    nacre_workspace::patch(base, upper, std::slice::from_ref(change), &mut patch).map_err(failed)?;
    let lines: String = patch.split_inclusive(|byte| *byte == b'\n').map(shown_line).collect();
    say(&lines)
}

/// A line of a patch without control characters except tabs.
fn shown_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.strip_suffix(b"\n").unwrap_or(bytes));
    let mut shown = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        if character.is_control() && character != '\t' {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown.push('\n');
    shown
}

/// Asks for the resolution of a conflict; `None`: the user has quit.
///
/// # Errors
/// The terminal cannot be read.
pub fn resolve(conflict: &Conflict) -> Result<Option<Resolution>, Failure> {
    let question = format!(
        "{}: {} here, {} in the base. Take [o]urs, [t]heirs, or [q]uit? ",
        printable(&conflict.path),
        conflict.ours,
        conflict.theirs
    );
    loop {
        match answer(&question)? {
            Some('o') => return Ok(Some(Resolution::Ours)),
            Some('t') => return Ok(Some(Resolution::Theirs)),
            Some('q') | None => return Ok(None),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_of_a_file_reaches_the_terminal() {
        assert_eq!(shown_line(b"+a\tb\x1b]0;title\x07\r\n"), "+a\tb\\u{1b}]0;title\\u{7}\\r\n");
        assert_eq!(shown_line("-\u{9b}1m\u{e9}".as_bytes()), "-\\u{9b}1m\u{e9}\n");
    }
}
