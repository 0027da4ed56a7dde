//! Lines for the journal and for syslog: one datagram each.
//!
//! Used by [`super`]. Invariants: the sender never waits for the log service; lines that could not be sent are
//! counted, and the next line that can be sent reports their number. The socket is looked up by its path each time,
//! so that a restarted journal is found.

use super::line::{Line, cut};
use nacre_sys::local_time::local_time;
use std::{
    fmt::Write,
    io,
    os::unix::net::UnixDatagram,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};
use tracing::Level;

/// Identifier of the lines.
const NAME: &str = "nacre";
/// Syslog's facility of daemons.
const DAEMONS: u8 = 3;
/// Longest message that syslog takes for sure, in bytes (RFC 3164: 1024; all programs take more).
const SYSLOG_MOST: usize = 2048;

/// Service that reads the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Journal,
    Syslog,
}

/// Subject of all lines of a log.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Kind of the subject, the name of a field.
    pub kind: &'static str,
    /// Name of the subject, printable.
    pub name: String,
}

/// Sender of log lines to a log service.
#[derive(Debug)]
pub(super) struct Datagrams {
    reader: Reader,
    socket: UnixDatagram,
    path: PathBuf,
    subject: Option<Subject>,
    lost: AtomicU64,
}

impl Datagrams {
    pub fn new(reader: Reader, path: PathBuf, subject: Option<Subject>) -> io::Result<Datagrams> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Datagrams { reader, socket, path, subject, lost: AtomicU64::new(0) })
    }

    /// Sends a line; counts it as lost if that fails.
    pub fn send(&self, line: &Line, date: u64) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        let mut text = line.text();
        if let Some(Subject { kind, name }) = self.subject.as_ref().filter(|about| !line.has(about.kind)) {
            // Writing to a string cannot fail.
            let _ = write!(text, " {kind}={name}");
        }
        if lost > 0 {
            let _ = write!(text, " (after {lost} lines that nobody could take)");
        }
        let message = match self.reader {
            Reader::Journal => self.entry(line, &text),
            Reader::Syslog => message(line.level, &text, date),
        };
        if self.socket.send_to(message.as_bytes(), &self.path).is_err() {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }

    /// Formats an entry by systemd.journal-fields(7) and the journal's native protocol. No value has a line break.
    fn entry(&self, line: &Line, text: &str) -> String {
        let mut entry = format!(
            "MESSAGE={text}\nPRIORITY={}\nSYSLOG_FACILITY={DAEMONS}\nSYSLOG_IDENTIFIER={NAME}\nSYSLOG_PID={}\n",
            priority(line.level),
            std::process::id()
        );
        let subject = self.subject.iter().map(|about| (about.kind, &about.name)).filter(|(kind, _)| !line.has(kind));
        for (name, value) in line.fields.iter().map(|(name, value)| (*name, value)).chain(subject) {
            let name: String =
                name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
            let _ = writeln!(entry, "NACRE_{}={value}", name.to_ascii_uppercase());
        }
        entry
    }
}

impl Line {
    fn has(&self, field: &str) -> bool {
        self.fields.iter().any(|(name, _)| *name == field)
    }
}

fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Formats a message as syslog(3) does.
fn message(level: Level, text: &str, date: u64) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let time = local_time(i64::try_from(date).unwrap_or_default()).ok();
    let date = time.and_then(|time| {
        let month = MONTHS.get(usize::try_from(time.month).ok()?.checked_sub(1)?)?;
        Some(format!("{month} {:2} {:02}:{:02}:{:02} ", time.day, time.hour, time.minute, time.second))
    });
    let mut message = format!(
        "<{}>{}{NAME}[{}]: {text}",
        DAEMONS * 8 + priority(level),
        date.unwrap_or_default(),
        std::process::id()
    );
    cut(&mut message, SYSLOG_MOST);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn received(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 8192];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    #[test]
    fn each_reader_gets_its_form_and_hears_of_what_was_lost() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("socket");
        let subject = Subject { kind: "mountpoint", name: "/m".to_owned() };
        let fields = vec![("cage", "/c".to_owned())];
        let line = Line { level: Level::WARN, message: "full".to_owned(), fields };
        let journal = Datagrams::new(Reader::Journal, path.clone(), Some(subject)).unwrap();
        // There is no listener yet.
        journal.send(&line, 0);
        journal.send(&line, 0);
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        journal.send(&line, 0);
        let entry = received(&socket);
        assert!(
            entry
                .starts_with("MESSAGE=full cage=/c mountpoint=/m (after 2 lines that nobody could take)\nPRIORITY=4\n"),
            "{entry}"
        );
        for field in ["SYSLOG_IDENTIFIER=nacre", "NACRE_CAGE=/c", "NACRE_MOUNTPOINT=/m"] {
            assert!(entry.lines().any(|line| line == field), "{field} in {entry}");
        }
        // The listener is restarted.
        drop(socket);
        std::fs::remove_file(&path).unwrap();
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        Datagrams::new(Reader::Syslog, path, None).unwrap().send(&line, 1_700_049_600);
        let message = received(&socket);
        assert!(
            message.starts_with("<28>Nov 1")
                && message.ends_with(&format!(" nacre[{}]: full cage=/c", std::process::id())),
            "{message}"
        );
        assert!(super::message(Level::INFO, &"\u{fc}".repeat(4000), 0).len() <= SYSLOG_MOST);
        // The socket's buffer is full: the sender does not wait.
        for _ in 0..100_000 {
            journal.send(&line, 0);
        }
        assert!(journal.lost.load(Ordering::Relaxed) > 0);
    }
}
