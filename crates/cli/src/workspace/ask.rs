//! The questions of `nacre workspace commit -i`, asked at a terminal: which changes, and how conflicts are resolved.
//!
//! Untrusted programs choose names and contents: control characters never reach the terminal.

use super::changes::{failed, line};
use nacre_daemon::{failure::Failure, report::printable};
use nacre_sys::signals::Signals;
use nacre_workspace::{Base, Change, Conflict, Resolution, Upper};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use std::{
    ffi::OsStr,
    io::{self, IsTerminal, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Size from which on the difference of a file is not shown, bytes.
const TOO_LARGE: u64 = 4 << 20;
/// What can be answered for a change.
const HELP: &str = "y: commit this change\nn: leave it in the workspace\na: commit this one and all further ones of its directory, with those below\ns: leave this one and all further ones of its directory, with those below\nd: show the difference\nq: quit, nothing is committed\n";

fn not_asked(error: io::Error) -> Failure {
    Failure::io("cannot ask", "at the terminal", &error)
}

fn say(text: &str) -> Result<(), Failure> {
    io::stderr().write_all(text.as_bytes()).map_err(not_asked)
}

/// The terminal at which questions are asked. SIGINT, SIGTERM and SIGHUP answer a question with `q`: a command that they ended
/// would leave the view unmounted.
pub struct Terminal {
    signals: Signals,
}

impl Terminal {
    /// Blocks the signals, and refuses to ask where nobody can answer.
    ///
    /// # Errors
    /// Standard input or standard error is no terminal.
    pub fn open() -> Result<Terminal, Failure> {
        if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
            let failure = Failure::usage("-i asks at a terminal, and there is none");
            return Err(failure.next("name the paths to commit instead"));
        }
        Ok(Terminal { signals: Signals::block().map_err(not_asked)? })
    }

    /// Asks a question; returns the answer's first character, `None` at the end of the input and after a signal.
    fn answer(&self, question: &str) -> Result<Option<char>, Failure> {
        say(question)?;
        let input = io::stdin();
        let mut ready = [PollFd::new(&input, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) if !ready[1].revents().is_empty() => return Ok(None),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(not_asked(error.into())),
        }
        let mut answer = String::new();
        // A terminal returns one line at a time: nothing of the next answer waits in the buffer.
        match input.read_line(&mut answer) {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(answer.trim().chars().next().unwrap_or(' ').to_ascii_lowercase())),
            // Not UTF-8: asked again.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(Some(' ')),
            Err(error) => Err(not_asked(error)),
        }
    }

    /// Asks which changes are committed; `None`: none at all, the user has quit.
    ///
    /// # Errors
    /// The terminal cannot be read, or a difference not be shown.
    pub fn choose(&self, base: &Base, upper: &Upper, changes: Vec<Change>) -> Result<Option<Vec<Change>>, Failure> {
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
                match self.answer(&question)? {
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

    /// Asks whether paths may be committed that the chosen changes cannot do without.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub fn confirm(&self, added: &[PathBuf]) -> Result<bool, Failure> {
        let names: String = added.iter().map(|path| format!("{}\n", printable(path.as_os_str().as_bytes()))).collect();
        say(&format!("The chosen changes cannot be made without {} more paths:\n{names}", added.len()))?;
        loop {
            match self.answer("Commit these as well, or [q]uit [y,q]? ")? {
                Some('y') => return Ok(true),
                Some('q' | 'n') | None => return Ok(false),
                Some(_) => {}
            }
        }
    }

    /// Asks for the resolution of a conflict; `None`: the user has quit.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub fn resolve(&self, conflict: &Conflict) -> Result<Option<Resolution>, Failure> {
        let question = format!(
            "{}: {} here, {} in the base. Take [o]urs, [t]heirs, or [q]uit? ",
            printable(&conflict.path),
            conflict.ours,
            conflict.theirs
        );
        loop {
            match self.answer(&question)? {
                Some('o') => return Ok(Some(Resolution::Ours)),
                Some('t') => return Ok(Some(Resolution::Theirs)),
                Some('q') | None => return Ok(None),
                Some(_) => {}
            }
        }
    }
}

fn path_of(change: &Change) -> PathBuf {
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

/// A line of a patch without control characters except tabs, and without characters that reorder or hide others.
fn shown_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.strip_suffix(b"\n").unwrap_or(bytes));
    let mut shown = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        let is_invisible = matches!(character, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
        if is_invisible || character.is_control() && character != '\t' {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown.push('\n');
    shown
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
