//! Mounting by `fusermount3`, which is set-user-id root and checks what an ordinary user may do.
//!
//! It opens the device, mounts, and sends the descriptor back over a socket whose number is in `_FUSE_COMMFD`. The
//! socket is its standard input, so that no descriptor has to survive an exec by accident. Its output on standard
//! error is included in the error.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Output, Stdio};

use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType};

use super::{MountOptions, os_string, words};

/// Names of mount flags in an option string.
const FLAG_WORDS: [(u64, &str); 7] = [
    (libc::MS_RDONLY, "ro"),
    (libc::MS_NOSUID, "nosuid"),
    (libc::MS_NODEV, "nodev"),
    (libc::MS_NOEXEC, "noexec"),
    (libc::MS_SYNCHRONOUS, "sync"),
    (libc::MS_DIRSYNC, "dirsync"),
    (libc::MS_NOATIME, "noatime"),
];

/// Flags for which `fusermount3` has no name and that change no answer of a file system: how access times are
/// updated, which FUSE leaves to the daemon.
const WITHOUT_WORD: u64 =
    libc::MS_NODIRATIME | libc::MS_RELATIME | libc::MS_STRICTATIME | libc::MS_LAZYTIME | libc::MS_SILENT;

/// Mounts and returns the open device.
pub(super) fn mount(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let known = FLAG_WORDS.iter().fold(WITHOUT_WORD, |known, (flag, _)| known | flag);
    if options.flags & !known != 0 {
        let text = format!(
            "cannot mount {}: fusermount3 knows no word for mount flags {:#x}",
            path.display(),
            options.flags & !known
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    if options
        .extra
        .iter()
        .any(|words| words.as_bytes().split(|byte| *byte == b',').any(|word| word == b"auto_unmount"))
    {
        // It would keep running as long as the mount, and we would wait for its end.
        return Err(super::invalid("fusermount3's auto_unmount is not supported"));
    }
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut command = program(options.fusermount.as_deref());
    command.arg("-o").arg(option_string(options)).arg("--").arg(path);
    command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(theirs));
    let output = run(command)?;
    if !output.status.success() {
        return Err(failure("cannot mount", path, &output));
    }
    receive(&ours)
        .map_err(|error| crate::sys::with_context(format!("no device from fusermount3 for {}", path.display()), error))
}

/// Unmounts.
pub(super) fn unmount(path: &Path, fusermount: Option<&Path>, lazy: bool) -> io::Result<()> {
    let mut command = program(fusermount);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    command.arg("--").arg(path).stdin(Stdio::null());
    let output = run(command)?;
    if output.status.success() { Ok(()) } else { Err(failure("cannot unmount", path, &output)) }
}

fn program(fusermount: Option<&Path>) -> Command {
    let mut command = Command::new(fusermount.unwrap_or(Path::new("fusermount3")));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn run(mut command: Command) -> io::Result<Output> {
    // `command` is dropped at the end, and with it our copy of the other end of the socket.
    let mut child = command.spawn().map_err(|error| {
        crate::sys::with_context(
            format!("cannot run {} (package fuse3)", command.get_program().to_string_lossy()),
            error,
        )
    })?;
    let mut said = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_end(&mut said)?;
    }
    let status = match child.wait() {
        // Our parent ignores SIGCHLD, and we inherit that: the exit status is lost. fusermount3 is silent on success.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
            ExitStatus::from_raw(if said.is_empty() { 0 } else { 1 << 8 })
        }
        status => status?,
    };
    Ok(Output { status, stdout: Vec::new(), stderr: said })
}

/// Why `fusermount3` refused, where its message is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusermountRefusal {
    /// `/etc/fuse.conf` does not allow ordinary users to share a mount with others.
    OthersNotAllowed,
    /// The user cannot reach the mount point; it may be in a mount of another user.
    Unreachable,
}

impl FusermountRefusal {
    /// Returns the reason, for an error from `fusermount3`.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<FusermountRefusal> {
        error.get_ref()?.downcast_ref::<Refused>()?.why
    }
}

/// The message of `fusermount3`, and its meaning.
#[derive(Debug)]
struct Refused {
    text: String,
    why: Option<FusermountRefusal>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Refused {}

/// Makes an error of its output. Its exit code has no meaning: only its messages show the reason.
fn failure(what: &str, path: &Path, output: &Output) -> io::Error {
    let said = String::from_utf8_lossy(&output.stderr);
    let why = match () {
        () if said.contains("user_allow_other") => Some(FusermountRefusal::OthersNotAllowed),
        () if said.contains("failed to access mountpoint") => Some(FusermountRefusal::Unreachable),
        () => None,
    };
    let kind = match () {
        () if said.contains("busy") => io::ErrorKind::ResourceBusy,
        () if ["no write access", "Permission denied", "not permitted", "user_allow_other"]
            .iter()
            .any(|why| said.contains(why)) =>
        {
            io::ErrorKind::PermissionDenied
        }
        () => io::ErrorKind::Other,
    };
    io::Error::new(kind, Refused { text: format!("{what} {}: {}", path.display(), said.trim()), why })
}

/// The argument of `-o`.
fn option_string(options: &MountOptions) -> OsString {
    let mut all: Vec<OsString> =
        FLAG_WORDS.iter().filter(|(flag, _)| options.flags & flag != 0).map(|(_, word)| OsString::from(word)).collect();
    all.extend(words(options));
    all.push(escaped("fsname=", &options.fsname));
    if !options.subtype.is_empty() {
        all.push(escaped("subtype=", OsStr::new(&options.subtype)));
    }
    all.join(OsStr::new(","))
}

/// Escapes commas and backslashes in a value, for the option parser of `fusermount3`.
fn escaped(key: &str, value: &OsStr) -> OsString {
    let mut bytes = key.as_bytes().to_vec();
    for byte in value.as_bytes() {
        if matches!(byte, b',' | b'\\') {
            bytes.push(b'\\');
        }
        bytes.push(*byte);
    }
    os_string(bytes)
}

/// Receives the descriptor from the socket.
fn receive(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0_u8; 1];
    loop {
        match rustix::net::recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message
            && let Some(fd) = fds.next()
        {
            return Ok(fd);
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the socket without sending one"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_words_become_reasons() {
        let refused = |said: &str| {
            let output = Output { status: ExitStatus::from_raw(256), stdout: Vec::new(), stderr: said.into() };
            let error = failure("cannot mount", Path::new("/m"), &output);
            assert_eq!(error.to_string(), format!("cannot mount /m: {said}"));
            (error.kind(), FusermountRefusal::of(&error))
        };
        let others = "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf";
        assert_eq!(refused(others), (io::ErrorKind::PermissionDenied, Some(FusermountRefusal::OthersNotAllowed)));
        let hidden = "fusermount3: failed to access mountpoint /m: Permission denied";
        assert_eq!(refused(hidden), (io::ErrorKind::PermissionDenied, Some(FusermountRefusal::Unreachable)));
        let busy = "fusermount3: failed to unmount /m: Device or resource busy";
        assert_eq!(refused(busy), (io::ErrorKind::ResourceBusy, None));
        assert_eq!(FusermountRefusal::of(&io::ErrorKind::NotFound.into()), None);
    }

    #[test]
    fn commas_and_backslashes_are_escaped() {
        let options = MountOptions {
            fsname: OsString::from("/srv/a,b\\c"),
            subtype: "x".to_owned(),
            flags: libc::MS_RDONLY | libc::MS_NOATIME,
            allow_other: true,
            ..MountOptions::default()
        };
        assert_eq!(option_string(&options), "ro,noatime,allow_other,fsname=/srv/a\\,b\\\\c,subtype=x");
    }
}
