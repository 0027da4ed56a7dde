//! Credentials printed by a program: `credential_process` of a profile of Amazon's tools.
//!
//! Used by [`crate::s3`]. The command of the profile is run by the shell, and again some minutes before its
//! credentials expire; credentials without an expiration date are kept. Invariants: its output is never shown, also
//! not its error messages; a program that does not end is killed.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::aws::AwsCredential;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal};
use serde::Deserialize;

use crate::clock;

/// Deadline of the program: shorter than an attempt of a request.
const LONGEST: Duration = Duration::from_secs(8);
/// How long before the expiration of its credentials the program is run again.
const BEFORE: Duration = Duration::from_secs(5 * 60);
/// Largest output in bytes.
const MOST: u64 = 64 << 10;

/// Format of the output.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<chrono::DateTime<chrono::Utc>>,
}

struct Known {
    command: String,
    credential: Arc<AwsCredential>,
    until: Option<SystemTime>,
}

/// Cache of the last output.
#[derive(Default)]
pub(crate) struct Printing {
    /// Locked while the program runs: waiting threads get its output.
    known: Mutex<Option<Known>>,
}

impl fmt::Debug for Printing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Printing")
    }
}

impl Printing {
    /// Returns the credentials of a command; waits while it runs.
    pub(crate) fn of(&self, command: &str) -> io::Result<Arc<AwsCredential>> {
        let mut known = self.known.lock();
        let is_good = |known: &&Known| {
            known.command == command && known.until.is_none_or(|until| clock::today() + BEFORE < until)
        };
        if let Some(known) = known.as_ref().filter(is_good) {
            return Ok(Arc::clone(&known.credential));
        }
        let printed = read(&run(command)?)?;
        let (key_id, secret_key) = (printed.access_key_id, printed.secret_access_key);
        let credential = Arc::new(AwsCredential { key_id, secret_key, token: printed.session_token });
        let until = printed.expiration.map(SystemTime::from);
        *known = Some(Known { command: command.to_owned(), credential: Arc::clone(&credential), until });
        Ok(credential)
    }
}

fn failed(why: impl fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("credential_process {why}"))
}

fn run(command: &str) -> io::Result<String> {
    // Memory instead of a pipe: a descendant that keeps it open does not delay the reader.
    let mut printed = File::from(rustix::fs::memfd_create("printed", rustix::fs::MemfdFlags::CLOEXEC)?);
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(printed.try_clone()?).stderr(Stdio::null());
    // Its descendants are killed with it.
    shell.process_group(0);
    let mut process = shell.spawn().map_err(failed)?;
    let until = clock::now() + LONGEST;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if clock::now() >= until {
            rustix::process::kill_process_group(Pid::from_child(&process), Signal::KILL)?;
            process.wait()?;
            return Err(failed("does not end"));
        }
        clock::pause();
    };
    if !status.success() {
        return Err(failed(format!("fails: {status}")));
    }
    printed.rewind()?;
    let mut text = String::new();
    printed.take(MOST).read_to_string(&mut text).map_err(|_| failed("prints no text"))?;
    Ok(text)
}

fn read(text: &str) -> io::Result<Printed> {
    // An error message could reveal a part of the credentials.
    let printed: Printed = serde_json::from_str(text).map_err(|_| failed("prints no credentials"))?;
    match printed.version {
        1 => Ok(printed),
        version => Err(failed(format!("prints version {version}, and 1 is what there is"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_kept_as_long_as_it_is_good() {
        let scratch = tempfile::tempdir().unwrap();
        let runs = scratch.path().join("runs");
        let command = |expiration: &str| {
            format!(
                r#"echo >> {}; echo '{{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "S", "SessionToken": "T"{expiration}}}'"#,
                runs.display()
            )
        };
        let count = || std::fs::read(&runs).unwrap().len();
        let printing = Printing::default();
        let got = printing.of(&command("")).unwrap();
        assert_eq!((got.key_id.as_str(), got.secret_key.as_str(), got.token.as_deref()), ("A", "S", Some("T")));
        printing.of(&command("")).unwrap();
        assert_eq!(count(), 1);
        for (expiration, times) in [("2000-01-01T00:00:00Z", 2), ("2999-01-01T00:00:00+01:00", 1)] {
            let command = command(&format!(r#", "Expiration": "{expiration}""#));
            let before = count();
            printing.of(&command).unwrap();
            printing.of(&command).unwrap();
            assert_eq!(count() - before, times, "{expiration}");
        }
    }

    #[test]
    fn what_is_wrong_shows_nothing_of_it() {
        let said = |command: &str| Printing::default().of(command).unwrap_err().to_string();
        assert_eq!(said("echo secret; exit 3"), "credential_process fails: exit status: 3");
        assert_eq!(said("echo secret"), "credential_process prints no credentials");
        assert_eq!(
            said(r#"echo '{"Version": 2, "AccessKeyId": "A", "SecretAccessKey": "secret"}'"#),
            "credential_process prints version 2, and 1 is what there is"
        );
        assert_eq!(said("echo '{\"Version\": 1}'; sleep 60 & exit 0"), "credential_process prints no credentials");
    }
}
