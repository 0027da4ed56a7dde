//! `replicate`: keeps a copy of a file system in a second place. It runs only nacre's own commands,
//! here or over ssh: a snapshot, the snapshots of both sides, a stream, the retention rule.
//!
//! Invariants: nothing at the source is pruned before the target has the new snapshot, so that both
//! sides always have a common one; only `receive` and the retention rule change the target.

use super::keep::{keep, keep_of};
use crate::{clap_args::flag, output::print};
use clap::{Arg, ArgMatches, Command as Line};
use nacre_admin::fs::Period;
use nacre_daemon::{
    failure::{Exit, Failure},
    hooks,
    report::{printable, tell},
};
use std::{
    collections::HashSet,
    process::{Command, ExitCode, ExitStatus, Stdio},
};

/// Maximum number of attempts to send a stream of one file system, resumed ones included, in one run.
const TRIES: usize = 3;
/// The `receive` command for a target that does not exist yet.
const NEW: [&str; 4] = ["receive", "-s", "-o", "readonly=on"];
/// The event of a failed run, for the programs in `events.d`.
const FAILED: &str = "replication-failed";

/// A replication to run.
#[derive(Debug)]
pub struct ToReplicate {
    /// The file system to copy.
    source: Place,
    /// The file system that is the copy.
    target: Place,
    recursive: bool,
    verbose: bool,
    label: String,
    /// The retention options, as words of `snapshot`.
    keep: Vec<String>,
}

/// A file system on this machine or on another one.
#[derive(Clone, Debug)]
struct Place {
    host: Option<String>,
    name: String,
}

impl Place {
    /// Parses `POOL/NAME` or `HOST:POOL/NAME`.
    fn of(text: &str) -> Place {
        let (host, name) = match text.split_once(':') {
            Some((host, name)) if !host.contains('/') && !host.is_empty() => (Some(host.to_owned()), name),
            _ => (None, text),
        };
        Place { host, name: name.to_owned() }
    }

    fn below(&self, part: &str) -> Place {
        Place { host: self.host.clone(), name: format!("{}{part}", self.name) }
    }

    /// Builds the command `nacre fs` with these words, over ssh for another host.
    fn command(&self, words: &[&str]) -> Result<Command, Failure> {
        let Some(host) = &self.host else {
            let program =
                std::env::current_exe().map_err(|error| Failure::io("cannot find", "this program", &error))?;
            let mut command = Command::new(program);
            command.arg("fs").args(words);
            return Ok(command);
        };
        let mut command = Command::new("ssh");
        let quoted = words.iter().map(|word| format!(" '{}'", word.replace('\'', r"'\''")));
        let options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=30"];
        command.args(options).args(["--", host]).arg(format!("nacre fs{}", quoted.collect::<String>()));
        Ok(command)
    }

    /// Runs a command and returns its output; `None` where the object does not exist.
    fn ask(&self, words: &[&str]) -> Result<Option<String>, Failure> {
        let output = self.command(words)?.stdin(Stdio::null()).stderr(Stdio::piped()).output();
        let output = output.map_err(|error| self.not_started(&error))?;
        if output.status.success() {
            return Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()));
        }
        match self.refused(output.status, words) {
            Failure { exit: Exit::NotFound, .. } => Ok(None),
            failure => {
                output.stderr.split(|byte| *byte == b'\n').for_each(|line| tell(&printable(line)));
                Err(failure)
            }
        }
    }

    /// Runs a command that has to succeed; its messages are shown.
    fn run(&self, words: &[&str]) -> Result<(), Failure> {
        let status = self.command(words)?.stdin(Stdio::null()).status();
        let status = status.map_err(|error| self.not_started(&error))?;
        if status.success() { Ok(()) } else { Err(self.refused(status, words)) }
    }

    fn not_started(&self, error: &std::io::Error) -> Failure {
        Failure::io("cannot run", if self.host.is_some() { "ssh" } else { "nacre fs" }, error).exit(Exit::Failure)
    }

    /// Returns the failure for an exit status: of ssh, or of the command itself.
    fn refused(&self, status: ExitStatus, words: &[&str]) -> Failure {
        let said = |place: &str| Failure::new(format!("'nacre fs {}' failed{place}", words.join(" ")));
        let failure = match &self.host {
            None => said(""),
            // The shell there finds no such program, or may not run it.
            Some(host) if matches!(status.code(), Some(126 | 127)) => {
                return Failure::new(format!("'{host}' has no nacre that can be run"))
                    .next("install it there, where commands that ssh runs find it");
            }
            Some(host) if status.code() == Some(255) => {
                return Failure::new(format!("'{host}' cannot be reached by ssh"))
                    .next(format!("this has to work without a question: ssh -o BatchMode=yes {host} nacre fs list"));
            }
            Some(host) => said(&format!(" on '{host}'")),
        };
        failure.exit(match status.code() {
            Some(3) => Exit::NotFound,
            Some(4) => Exit::Denied,
            Some(5) => Exit::Busy,
            _ => Exit::Failure,
        })
    }

    /// Returns the snapshots with their GUIDs, in the order of creation; `None`: the file system
    /// does not exist.
    fn snapshots(&self) -> Result<Option<Vec<(String, String)>>, Failure> {
        let words = ["list", "-H", "-p", "-d", "1", "-t", "snapshot", "-s", "createtxg", "-o", "name,guid", &self.name];
        let Some(text) = self.ask(&words)? else { return Ok(None) };
        let line = |line: &str| {
            let (name, guid) = line.split_once('\t')?;
            Some((name.rsplit('@').next()?.to_owned(), guid.to_owned()))
        };
        Ok(Some(text.lines().filter_map(line).collect()))
    }
}

/// Returns the command line of `replicate`.
pub fn command() -> Line {
    Line::new("replicate")
        .about("Keep a file system in a second place: snapshot, send what is new, prune")
        .after_help("Examples:\n  nacre fs replicate tank/home backup/home\n  nacre fs replicate -r tank/home host:backup/home\n  nacre fs replicate --keep-hourly 24 --keep-daily 30 --keep-monthly 12 tank/home backup/home\n\nHOST: is reached by ssh, without questions; nacre has to be installed there. A stream that was cut goes on where it was, in this run or the next. With --keep-..., both sides keep what the rule says of the snapshots that replicate has taken.")
        .arg(flag('r', "recursive", "With everything below"))
        .arg(flag('v', "verbose", "Say what is done"))
        .args(Period::ALL.map(keep))
        .arg(
            Arg::new("label")
                .long("label")
                .value_name("LABEL")
                .default_value("replicate")
                .help("What the names of the snapshots begin with"),
        )
        .arg(Arg::new("SOURCE").required(true).value_name("[HOST:]FILESYSTEM").help("What"))
        .arg(Arg::new("TARGET").required(true).value_name("[HOST:]FILESYSTEM").help("Where to"))
}

/// Parses the matched arguments of `replicate`.
pub fn parse(matches: &ArgMatches) -> ToReplicate {
    let text = |name: &str| matches.get_one::<String>(name).cloned().unwrap_or_default();
    let rule = keep_of(matches).into_iter();
    ToReplicate {
        source: Place::of(&text("SOURCE")),
        target: Place::of(&text("TARGET")),
        recursive: matches.get_flag("recursive"),
        verbose: matches.get_flag("verbose"),
        label: text("label"),
        keep: rule.flat_map(|(period, count)| [format!("--keep-{}", period.word()), count.to_string()]).collect(),
    }
}

/// Replicates; programs in `events.d` are notified of a failure.
///
/// # Errors
/// The reason why the target does not have the newest snapshot.
pub fn run(what: &ToReplicate) -> Result<ExitCode, Failure> {
    let done = replicate(what);
    if let Err(failure) = &done {
        let details = [("SOURCE", &what.source.name), ("TARGET", &what.target.name), ("REASON", &failure.what)];
        hooks::tell_and_wait(FAILED, details.map(|(name, value)| (name.to_owned(), value.clone())).to_vec());
    }
    done.map(|()| ExitCode::SUCCESS)
}

fn replicate(what: &ToReplicate) -> Result<(), Failure> {
    let ToReplicate { source, target, recursive, label, keep, .. } = what;
    let mut words = vec!["snapshot", "--take-only", "--keep-yearly", "1", "--label", label];
    if *recursive {
        words.push("-r");
    }
    words.push(&source.name);
    source.run(&words)?;
    let parts = if *recursive {
        let listed = source.ask(&["list", "-H", "-r", "-t", "filesystem", "-o", "name", &source.name])?;
        let listed = listed.ok_or_else(|| Failure::new(format!("cannot list '{}'", source.name)))?;
        listed.lines().filter_map(|line| line.strip_prefix(&source.name).map(str::to_owned)).collect()
    } else {
        vec![String::new()]
    };
    for part in &parts {
        one(what, &source.below(part), &target.below(part))?;
    }
    if keep.is_empty() {
        return Ok(());
    }
    let mut words = vec!["snapshot", "--prune-only", "--label", label];
    words.extend(keep.iter().map(String::as_str));
    if *recursive {
        words.push("-r");
    }
    for place in [source, target] {
        place.run(&[&words[..], &[&place.name]].concat())?;
    }
    Ok(())
}

/// Brings one file system of the target to the newest snapshot of the source.
fn one(what: &ToReplicate, source: &Place, target: &Place) -> Result<(), Failure> {
    let mut last = None;
    for _ in 0..TRIES {
        match step(what, source, target) {
            Ok(true) => return Ok(()),
            Ok(false) => last = None,
            Err(failure) => {
                // Retry only where the target has received a part of the stream, which can be
                // resumed.
                if token(target)?.is_none() {
                    return Err(failure);
                }
                last = Some(failure);
            }
        }
    }
    last.map_or(Ok(()), Err)
}

fn token(target: &Place) -> Result<Option<String>, Failure> {
    let said = target.ask(&["get", "-H", "-o", "value", "receive_resume_token", &target.name])?;
    Ok(said.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty() && text != "-"))
}

/// Sends one stream; returns whether the target is up to date.
fn step(what: &ToReplicate, source: &Place, target: &Place) -> Result<bool, Failure> {
    let told = |text: &str| if what.verbose { print(text) } else { Ok(()) };
    if let Some(token) = token(target)? {
        if source.ask(&["send", "-n", "-t", &token])?.is_some() {
            told(&format!("resume {}\n", target.name))?;
            let is_new = target.snapshots()?.is_none_or(|all| all.is_empty());
            let receive: &[&str] = if is_new { &NEW } else { &["receive", "-s"] };
            pass(source, &["send", "-t", &token], target, &[receive, &[&target.name]].concat())?;
            return Ok(false);
        }
        // The snapshots that the token refers to are gone at the source.
        target.run(&["receive", "-A", &target.name])?;
    }
    let ours = source.snapshots()?.unwrap_or_default();
    let theirs = target.snapshots()?;
    let Some((newest, guid)) = ours.last() else {
        return Err(Failure::new(format!("'{}' has no snapshots", source.name)));
    };
    let there: HashSet<&str> = theirs.iter().flatten().map(|(_, guid)| guid.as_str()).collect();
    if there.contains(guid.as_str()) {
        return Ok(true);
    }
    let newest = format!("{}@{newest}", source.name);
    let common = ours.iter().rev().find(|(_, guid)| there.contains(guid.as_str()));
    let send = ["send", "-c", "--snapshot-properties"];
    match (common, &theirs) {
        (Some((common, _)), _) => {
            told(&format!("send @{common} to {newest}\n"))?;
            let from = format!("@{common}");
            pass(source, &[&send[..], &["-I", &from, &newest]].concat(), target, &["receive", "-s", &target.name])?;
        }
        (None, None) => {
            told(&format!("send {newest}\n"))?;
            pass(source, &[&send[..], &[newest.as_str()]].concat(), target, &[&NEW[..], &[&target.name]].concat())?;
        }
        (None, Some(_)) => {
            let why = format!("'{}' is there, and has no snapshot in common with '{}'", target.name, source.name);
            return Err(Failure::new(why).next("destroy or rename it: then all is sent"));
        }
    }
    Ok(false)
}

/// Pipes the source's stream into `receive` at the target.
fn pass(source: &Place, send: &[&str], target: &Place, receive: &[&str]) -> Result<(), Failure> {
    let sender = source.command(send)?.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut sender = sender.map_err(|error| source.not_started(&error))?;
    let stream = sender.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let received = target.command(receive)?.stdin(stream).stdout(Stdio::null()).status();
    // Without a receiver, the sender ends by itself.
    let sent = sender.wait().map_err(|error| source.not_started(&error))?;
    let received = received.map_err(|error| target.not_started(&error))?;
    if sent.success() && received.success() {
        return Ok(());
    }
    // A failing sender cuts the stream, and a failing receiver closes the pipe of the sender.
    let refused = if received.success() || sent.code() == Some(255) {
        source.refused(sent, send)
    } else {
        target.refused(received, receive)
    };
    let side =
        if received.success() { format!("sending '{}'", source.name) } else { format!("receiving '{}'", target.name) };
    tell(&format!("{side} failed"));
    Err(Failure {
        what: format!("cannot replicate '{}' to '{}': {}", source.name, target.name, refused.what),
        ..refused
    })
}
