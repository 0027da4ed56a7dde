//! Asks a program whether it can take over a mount: starts it and reads its answer, before anything is changed.
//!
//! [`crate::upgrade`] asks for all mounts, and the process of each mount asks once more
//! ([`crate::handover::note`]): in its namespaces and with its limits the program may fail to start. The program
//! answers as its first action. It reads the handoff state of the mount from standard input; the answer is a line
//! that no other program prints.

use crate::{
    clock,
    failure::{Failure, reason},
    handed_over::HandedOver,
    handover,
    hooks::{self, Ended},
    report::{path_text, printable},
};
use nacre_sys::signals;
use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// Environment variable that is set for the program that is asked.
const NAME: &str = "NACRE_COULD_GO_ON";
const YES: &str = "nacre can go on";
const NO: &str = "nacre cannot go on: ";
/// How long the program may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer that is read.
const LONGEST: u64 = 4096;

/// Starts a program and asks whether it can take over a mount.
///
/// # Errors
/// The reason why it cannot.
pub fn ask(program: &Path, handed: &HandedOver) -> Result<(), Failure> {
    let name = path_text(program);
    let failed = |error: &io::Error| Failure::new(format!("{name} cannot be started: {}", reason(error)));
    let text = serde_json::to_vec(handed)
        .map_err(|error| Failure::new(format!("what {name} would have to know cannot be written down: {error}")))?;
    if is_foreign(program).map_err(|error| failed(&error))? {
        return Err(Failure::new(format!("{name} is a program for machines of another kind")));
    }
    let (ended, answer) = started(program, &text).map_err(|error| failed(&error))?;
    let answer = printable(String::from_utf8_lossy(&answer).trim_end().as_bytes());
    match ended {
        Ended::By(status) if status.success() && answer == YES => Ok(()),
        Ended::By(_) if answer.starts_with(NO) => Err(Failure::new(answer.trim_start_matches(NO))),
        Ended::By(status) => Err(Failure::new(format!("{name} does not say that it can ({status})"))),
        Ended::Late => Err(Failure::new(format!("{name} says nothing for {} s", PATIENCE.as_secs()))),
    }
}

/// Whether an executable is for another kind of machine. A file that cannot be executed would be run by a shell
/// otherwise.
fn is_foreign(program: &Path) -> io::Result<bool> {
    let head = |path: &Path| {
        let mut head = Vec::new();
        File::open(path)?.take(20).read_to_end(&mut head).map(|_| head)
    };
    let (its, ours) = (head(program)?, head(Path::new("/proc/self/exe"))?);
    // Width, order of bytes, processor.
    let kind = |head: &[u8]| (head.get(4..6).map(<[u8]>::to_vec), head.get(18..20).map(<[u8]>::to_vec));
    Ok(!its.starts_with(b"#!") && (its.get(..4) != ours.get(..4) || kind(&its) != kind(&ours)))
}

/// Runs a program with this input; returns how it ended and its output.
fn started(program: &Path, input: &[u8]) -> io::Result<(Ended, Vec<u8>)> {
    let file = |name| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from);
    let (mut given, mut said) = (file(c"nacre-given")?, file(c"nacre-said")?);
    given.write_all(input)?;
    given.rewind()?;
    let mut command = Command::new(program);
    command.env(NAME, "1").current_dir("/").stdin(given).stdout(said.try_clone()?).stderr(Stdio::null());
    signals::unblocked_in(command.process_group(0));
    let ended = hooks::ended(command.spawn()?, clock::now() + PATIENCE)?;
    let mut answer = Vec::new();
    said.rewind()?;
    said.take(LONGEST).read_to_end(&mut answer)?;
    Ok((ended, answer))
}

/// Whether this process was started by [`ask`].
pub fn is_asked() -> bool {
    std::env::var_os(NAME).is_some()
}

/// Answers [`ask`] on standard output, in the program that was asked.
///
/// # Errors
/// Standard input cannot be read, or standard output cannot be written.
pub fn answer() -> Result<(), Failure> {
    let mut given = Vec::new();
    let read = io::stdin().lock().read_to_end(&mut given);
    let read = read.map_err(|error| Failure::io("cannot read", "what was given", &error))?;
    let checked = serde_json::from_slice::<HandedOver>(given.get(..read).unwrap_or_default())
        .map_err(|error| Failure::new(format!("what was given is not understood: {error}")))
        .and_then(|handed| handover::check(&handed));
    let said = match checked {
        Ok(()) => YES.to_owned(),
        Err(failure) => format!("{NO}{}", failure.what),
    };
    writeln!(io::stdout().lock(), "{said}").map_err(|error| Failure::io("cannot write", "the answer", &error))
}
