//! Signals as values: blocked once at the start, then read from a descriptor by one ordinary
//! thread.
//!
//! Called by the daemon before it makes any thread (a thread inherits the mask of the one that made
//! it), so that no handler ever runs in the middle of other code. Invariant: the signals named here
//! are never handled asynchronously by this process.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

/// The signals that a daemon acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// `SIGHUP`.
    Hangup,
    /// `SIGINT`.
    Interrupt,
    /// `SIGTERM`.
    Terminate,
    /// `SIGUSR1`.
    User1,
}

const KNOWN: [(libc::c_int, Signal); 4] = [
    (libc::SIGHUP, Signal::Hangup),
    (libc::SIGINT, Signal::Interrupt),
    (libc::SIGTERM, Signal::Terminate),
    (libc::SIGUSR1, Signal::User1),
];

/// The signals of [`Signal`], blocked in this thread and its later children, readable one by one.
#[derive(Debug)]
pub struct Signals(File);

/// The descriptor is readable when a signal has arrived.
impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The code of a signal that the kernel sent by itself (sigaction(2)).
const SI_KERNEL: i32 = 0x80;

impl Signals {
    /// Blocks the signals in the calling thread and opens the descriptor that they arrive on.
    ///
    /// # Errors
    /// As `pthread_sigmask(3)` and `signalfd(2)`.
    pub fn block() -> io::Result<Signals> {
        Signals::block_set(&set(&[]))
    }

    /// As [`Signals::block`], with `SIGQUIT`, for a process that stands in for a command: only
    /// [`Signals::next_number`] returns that signal.
    ///
    /// # Errors
    /// As [`Signals::block`].
    pub fn block_with_quit() -> io::Result<Signals> {
        Signals::block_set(&set(&[libc::SIGQUIT]))
    }

    fn block_set(set: &libc::sigset_t) -> io::Result<Signals> {
        // SAFETY: `set` is initialised; the old mask is not asked for.
        let status = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::from_ref(set), std::ptr::null_mut()) };
        if status != 0 {
            return Err(io::Error::from_raw_os_error(status));
        }
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, std::ptr::from_ref(set), libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor, and it has no other owner.
        Ok(Signals(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Waits for the next signal.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn next(&self) -> io::Result<Signal> {
        self.next_and_sender().map(|(signal, _)| signal)
    }

    /// Waits for the next signal; also returns the process that sent it (0: the kernel).
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn next_and_sender(&self) -> io::Result<(Signal, u32)> {
        self.next_and_origin().map(|(signal, sender, _)| (signal, sender))
    }

    /// Waits for the next signal; also returns the process that sent it, and whether the kernel did so by itself, as for
    /// the keys of a terminal. A sender in another process namespace is 0 as well.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn next_and_origin(&self) -> io::Result<(Signal, u32, bool)> {
        loop {
            let (number, sender, of_kernel) = self.next_number()?;
            if let Some((_, signal)) = KNOWN.iter().find(|(known, _)| *known == number) {
                return Ok((*signal, sender, of_kernel));
            }
        }
    }

    /// As [`Signals::next_and_origin`], with the number of the signal.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn next_number(&self) -> io::Result<(i32, u32, bool)> {
        let mut record = [0_u8; size_of::<libc::signalfd_siginfo>()];
        (&self.0).read_exact(&mut record)?;
        // The number is the first field of `struct signalfd_siginfo`, the third one its code, the fourth one its sender.
        let number = record.first_chunk::<4>().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
        let code = record.get(8..).and_then(<[u8]>::first_chunk::<4>).map_or(0, |code| i32::from_ne_bytes(*code));
        let sender = record.get(12..).and_then(<[u8]>::first_chunk::<4>).map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        Ok((number, sender, code == SI_KERNEL))
    }
}

/// Restores the default action of `SIGCHLD`. A process that was started with it ignored (by
/// `env --ignore-signal`, or by a shell after `trap '' CHLD`) cannot wait for its children: the
/// kernel discards their exit status, and waiting fails with ECHILD (waitpid(2)). To be called before
/// any child is started.
///
/// # Errors
/// As `signal(2)`.
pub fn keep_ended_children() -> io::Result<()> {
    // SAFETY: the default action is a valid one for every signal, and runs no code of this process.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes a program start with the signals of [`Signal`] and `SIGQUIT` unblocked, which it would
/// otherwise inherit blocked.
pub fn unblocked_in(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec, `unblock` fills a set on the stack and calls pthread_sigmask:
    // all of it is async-signal-safe (signal-safety(7)), and nothing is allocated.
    unsafe { command.pre_exec(unblock) }
}

fn unblock() -> io::Result<()> {
    let set = set(&[libc::SIGQUIT]);
    // SAFETY: `set` is initialised; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) } {
        0 => Ok(()),
        status => Err(io::Error::from_raw_os_error(status)),
    }
}

/// The signals of [`Signal`], and more.
fn set(more: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: a zeroed `sigset_t` is a valid value to initialise; `sigemptyset` and `sigaddset`
    // cannot fail for it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for number in KNOWN.iter().map(|(number, _)| number).chain(more) {
            libc::sigaddset(&raw mut set, *number);
        }
        set
    }
}
