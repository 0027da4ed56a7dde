//! A process that works with this one's table of descriptors: what it opens stays open when it dies.
//!
//! Called by the guardian of a mount, which has one thread, does nothing else, and makes the next
//! worker when one has died. Table and memory: `clone(2)` with `CLONE_FILES` and without `CLONE_VM`
//! gives the worker a copy of the memory (but for what is mapped shared) and the same table, which
//! goes with the last of its processes.
//!
//! The C library does not know of this way to make a process: in the worker's first thread it
//! believes to be the guardian's (a thread keeps its number). So that thread makes another one, which
//! is sound in every respect, and waits for it.
//!
//! A worker has ended when none of its threads will do anything any more. A killed thread that tells
//! the kernel something of the mount may have to wait for a directory's lock, and whoever has that for
//! an answer of the worker: nothing tells of the end of such a worker, and only the next one can
//! answer. So a guardian looks from time to time; such threads return from their call, and die.

use crate::check;
use std::{
    cell::RefCell,
    ffi::{CString, OsString},
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    process, thread,
};

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// What a guardian has waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Its worker has ended.
    Ended(Ended),
    /// Something was noted for it ([`call`]).
    Called,
}

/// The signal that tells a guardian of it.
const CALLS: libc::c_int = libc::SIGUSR2;

/// The signals that a guardian waits for: those that it passes on to its worker, and the one that
/// tells of the worker's end.
const PASSED_ON: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1];

/// How often a worker is looked at that has not told of its end.
const LOOK: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 300_000_000 };

/// Takes signals one by one; blocked in this thread from then on.
#[derive(Debug)]
pub struct Guard {
    signals: libc::sigset_t,
    /// Workers with threads that are in the kernel still.
    leaving: RefCell<Vec<i32>>,
}

impl Guard {
    /// Blocks the signals. Workers have those blocked that are passed on, in all of their threads.
    ///
    /// # Errors
    /// As `pthread_sigmask(3)`.
    pub fn new() -> io::Result<Guard> {
        let set = set_of(PASSED_ON.into_iter().chain([libc::SIGCHLD, CALLS]));
        mask(libc::SIG_BLOCK, &set)?;
        Ok(Guard { signals: set, leaving: RefCell::default() })
    }

    /// Makes a worker that carries out `body` and ends with its code; answers its process number.
    ///
    /// # Errors
    /// EBUSY where this process has more than one thread: what the others hold would stay locked in
    /// the worker. As `clone(2)`.
    pub fn start(&self, body: impl FnOnce() -> u8 + Send + 'static) -> io::Result<i32> {
        wait_for_others()?;
        let flags = libc::CLONE_FILES | libc::SIGCHLD;
        // SAFETY: without CLONE_VM and with no stack given, the child goes on here as after fork(2).
        // There is no other thread whose locks the child could inherit.
        match check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })? {
            0 => work(body),
            worker => i32::try_from(worker).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW)),
        }
    }

    /// Waits for the end of a worker, or for a call, and passes signals on to it meanwhile.
    ///
    /// # Errors
    /// As `sigtimedwait(2)` and `waitpid(2)`.
    pub fn wait(&self, worker: i32) -> io::Result<Heard> {
        let look = LOOK;
        loop {
            // SAFETY: the set and the time are initialised, and nothing else is asked for.
            let signal = unsafe { libc::sigtimedwait(&raw const self.signals, std::ptr::null_mut(), &raw const look) };
            match signal {
                -1 => match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(libc::EINTR) => {}
                    error if error.raw_os_error() == Some(libc::EAGAIN) => {
                        if let Some(signal) = killed(worker) {
                            self.leaving.borrow_mut().push(worker);
                            return Ok(Heard::Ended(Ended::Signal(signal)));
                        }
                    }
                    error => return Err(error),
                },
                libc::SIGCHLD => {
                    self.leaving.borrow_mut().retain(|before| matches!(has_ended(*before), Ok(None)));
                    if let Some(ended) = has_ended(worker)? {
                        return Ok(Heard::Ended(ended));
                    }
                }
                CALLS => return Ok(Heard::Called),
                // SAFETY: no memory is passed. The worker has not been waited for, so its number is
                // nobody else's.
                signal => unsafe {
                    libc::kill(worker, signal);
                },
            }
        }
    }
}

/// Tells a guardian that something was noted for it.
///
/// # Errors
/// ESRCH where it is gone, EPERM where it is another user's.
pub fn call(guardian: u32) -> io::Result<()> {
    let number = i32::try_from(guardian).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: no memory is passed.
    check(libc::c_long::from(unsafe { libc::kill(number, CALLS) })).map(drop)
}

/// Kills a worker that has not been waited for.
///
/// # Errors
/// As `kill(2)`.
pub fn kill(worker: i32) -> io::Result<()> {
    // SAFETY: no memory is passed. The worker has not been waited for, so its number is nobody else's.
    check(libc::c_long::from(unsafe { libc::kill(worker, libc::SIGKILL) })).map(drop)
}

/// Becomes another program, which has these descriptors, and this process's blocked signals. Answers
/// why not; then all is as before.
pub fn become_program(program: &Path, arguments: Vec<OsString>, settings: Vec<OsString>, kept: &[i32]) -> io::Error {
    let texts =
        |all: Vec<OsString>| all.into_iter().map(|text| CString::new(text.into_vec())).collect::<Result<Vec<_>, _>>();
    let (Ok(program), Ok(arguments), Ok(settings)) =
        (CString::new(program.as_os_str().as_bytes()), texts(arguments), texts(settings))
    else {
        return io::Error::from(io::ErrorKind::InvalidInput);
    };
    let pointers = |all: &[CString]| -> Vec<*const libc::c_char> {
        all.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments_at, settings_at) = (pointers(&arguments), pointers(&settings));
    let set_all = |flags: libc::c_int| {
        for number in kept {
            // SAFETY: only the flag of a descriptor changes; one that is not open is none.
            unsafe { libc::fcntl(*number, libc::F_SETFD, flags) };
        }
    };
    set_all(0);
    // SAFETY: the text and both lists live for the call, and each list ends with a null pointer.
    unsafe { libc::execve(program.as_ptr(), arguments_at.as_ptr(), settings_at.as_ptr()) };
    let error = io::Error::last_os_error();
    set_all(libc::FD_CLOEXEC);
    error
}

/// How often this process is looked at until it has one thread.
const LOOKS: u32 = 100_000;

/// Returns when this process has one thread: one that has been waited for is there for a moment still.
fn wait_for_others() -> io::Result<()> {
    for _ in 0..LOOKS {
        if fs::read_dir("/proc/self/task")?.count() == 1 {
            return Ok(());
        }
        thread::yield_now();
    }
    Err(io::Error::from(io::ErrorKind::ResourceBusy))
}

fn work(body: impl FnOnce() -> u8 + Send + 'static) -> ! {
    // A terminal's signals are for the guardian, which passes them on.
    let _ = rustix::process::setpgid(None, None);
    let code = mask(libc::SIG_UNBLOCK, &set_of([libc::SIGCHLD]))
        .and_then(|()| thread::Builder::new().name("nacre-main".to_owned()).spawn(body))
        .map_or(1, |running| running.join().unwrap_or(101));
    process::exit(i32::from(code))
}

fn has_ended(worker: i32) -> io::Result<Option<Ended>> {
    let mut status = 0;
    // SAFETY: the status is written to, and lives for the call.
    let waited = check(libc::c_long::from(unsafe { libc::waitpid(worker, &raw mut status, libc::WNOHANG) }))?;
    Ok((waited != 0).then(|| match libc::WIFSIGNALED(status) {
        true => Ended::Signal(libc::WTERMSIG(status)),
        false => Ended::Code(libc::WEXITSTATUS(status)),
    }))
}

/// The signal that killed a worker of which only threads are left that write to the fuse device.
fn killed(worker: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{worker}/stat")).ok()?;
    if state(&stat) != Some("Z") {
        return None;
    }
    let status: libc::c_int = fields(&stat)?.next_back()?.parse().ok()?;
    let tasks: Vec<_> = fs::read_dir(format!("/proc/{worker}/task")).ok()?.collect::<Result<_, _>>().ok()?;
    let leaves = tasks.iter().all(|task| {
        let read = |file: &str| fs::read_to_string(task.path().join(file));
        // One whose record is gone has ended meanwhile.
        let Ok(stat) = read("stat") else { return true };
        matches!(state(&stat), Some("Z" | "X")) || read("syscall").is_ok_and(|call| writes_to_fuse(&call))
    });
    (leaves && libc::WIFSIGNALED(status)).then(|| libc::WTERMSIG(status))
}

/// What follows the name in a line of `/proc/PID/stat`.
fn fields(stat: &str) -> Option<impl DoubleEndedIterator<Item = &str>> {
    stat.rsplit_once(')').map(|(_, fields)| fields.split_whitespace())
}

fn state(stat: &str) -> Option<&str> {
    fields(stat)?.next()
}

/// Whether a thread whose `/proc/PID/syscall` this is waits in a write to the fuse device. The table of
/// descriptors is ours, too.
fn writes_to_fuse(call: &str) -> bool {
    let mut words = call.split_whitespace();
    let number = words.next().and_then(|number| number.parse().ok());
    let descriptor = words.next().and_then(|word| u32::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    [libc::SYS_write, libc::SYS_writev].map(Some).contains(&number)
        && descriptor.is_some_and(|number| {
            fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|path| path == Path::new("/dev/fuse"))
        })
}

fn set_of(signals: impl IntoIterator<Item = libc::c_int>) -> libc::sigset_t {
    // SAFETY: a zeroed `sigset_t` is a valid value to initialise; `sigemptyset` and `sigaddset` cannot
    // fail for it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for number in signals {
            libc::sigaddset(&raw mut set, number);
        }
        set
    }
}

fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, std::ptr::from_ref(set), std::ptr::null_mut()) } {
        0 => Ok(()),
        status => Err(io::Error::from_raw_os_error(status)),
    }
}
