//! A worker process that shares this process' descriptor table: files that it opens stay open when
//! it dies.
//!
//! Called by the supervisor of a mount, which has one thread, does nothing else, and starts the
//! next worker when one has died. Table and memory: `clone(2)` with `CLONE_FILES` and without
//! `CLONE_VM` gives the worker a copy of the memory (except shared mappings) and the same
//! descriptor table, which is freed with the last of its processes.
//!
//! The C library does not know this kind of fork: in the worker's first thread it assumes the
//! supervisor's thread id. So that thread starts another one, which is sound in every respect, and
//! waits for it.
//!
//! A thread that waits in the kernel for an answer of the mount which its own process served does
//! not die before the next worker has answered, and a process is not dead before its threads are.
//! So a worker reports by a descriptor that its main thread is dead ([`death_of_this_thread`]), and
//! the supervisor then checks by the names of the remaining threads whether all of them are waiting
//! like this ([`Guard::outlasted`]): these are in the kernel, and hold nothing that the next worker
//! needs. Invariant: while a worker runs, the supervisor opens no descriptors: a new worker closes
//! all that it does not know, whichever process opened them.

use crate::{check, descriptors::is_open};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::{
    cell::Cell,
    ffi::{CString, OsString},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

/// How a worker process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

/// Event that a supervisor has waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Its worker has ended.
    Ended(Ended),
    /// The worker's main thread is dead.
    Dying,
    /// The worker requested attention ([`call`]): it has recorded something for the supervisor.
    Called,
}

/// The signal of a worker's call.
const CALLS: Signal = Signal::USR2;

/// The signals that a supervisor forwards to its worker.
const PASSED_ON: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1];

/// `PIDFD_THREAD` (linux/pidfd.h).
const OF_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;

/// Pause between two checks of dying threads, at first and at most.
const LOOK: [Duration; 2] = [Duration::from_micros(250), Duration::from_millis(50)];

/// Time after which remaining threads of a killed worker are reported.
const LATE: Duration = Duration::from_secs(10);

/// Supervisor's receiver of signals; they are blocked in this thread from then on.
#[derive(Debug)]
pub struct Guard {
    signals: OwnedFd,
    /// Number of dead workers with remaining threads that have not been waited for.
    left: Cell<u32>,
}

impl Guard {
    /// Blocks the signals. In workers, the forwarded signals are blocked in all threads.
    ///
    /// # Errors
    /// As `pthread_sigmask(3)` and `signalfd(2)`.
    pub fn new() -> io::Result<Guard> {
        let set = set_of(PASSED_ON.into_iter().chain([libc::SIGCHLD, CALLS.as_raw()]));
        mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let made = check(libc::c_long::from(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) }))?;
        // SAFETY: the kernel just made it, and it has no other owner.
        Ok(Guard { signals: unsafe { crate::owned(made) }?, left: Cell::new(0) })
    }

    /// Number of the signal descriptor, which a worker must not close.
    pub fn descriptor(&self) -> i32 {
        self.signals.as_raw_fd()
    }

    /// Starts a worker that runs `body` and exits with its code; returns its process id.
    ///
    /// # Errors
    /// EBUSY if this process has more than one thread: locks held by the others would stay locked
    /// in the worker. As `clone(2)`.
    pub fn start(&self, body: impl FnOnce() -> u8 + Send + 'static) -> io::Result<i32> {
        wait_for_others()?;
        let flags = libc::CLONE_FILES | libc::SIGCHLD;
        // SAFETY: without CLONE_VM and with no stack given, the child continues here like after fork(2).
        // There is no other thread whose locks the child could inherit.
        match check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })? {
            0 => work(body),
            worker => i32::try_from(worker).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW)),
        }
    }

    /// Waits for the end of a worker, or for a call, and forwards signals to it meanwhile; `main`
    /// is the number of the worker's descriptor from [`death_of_this_thread`], whose event is
    /// waited for as well.
    ///
    /// # Errors
    /// As `poll(2)`, `read(2)` and `waitpid(2)`.
    pub fn wait(&self, worker: i32, main: Option<i32>) -> io::Result<Heard> {
        let main = main.filter(|main| is_open(*main));
        // SAFETY: it is open, and a worker leaves it so until the next one begins, which this process
        // makes.
        let main = main.map(|main| unsafe { BorrowedFd::borrow_raw(main) });
        loop {
            if let Some(main) = main {
                let mut watched = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&main, PollFlags::IN)];
                match poll(&mut watched, None) {
                    Ok(_) => {}
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                }
                let [signals, main] = watched.map(|one| !one.revents().is_empty());
                if main && !signals {
                    return Ok(Heard::Dying);
                }
            }
            match self.signal()? {
                libc::SIGCHLD => {
                    if let Some(ended) = self.has_ended(worker)? {
                        return Ok(Heard::Ended(ended));
                    }
                }
                signal if signal == CALLS.as_raw() => return Ok(Heard::Called),
                // SAFETY: no memory is passed. The worker has not been waited for, so its id has
                // not been reused.
                signal => unsafe {
                    libc::kill(worker, signal);
                },
            }
        }
    }

    /// For a killed worker whose main thread is dead: waits until it has ended (and returns how),
    /// or until only threads with these names remain: none of these executes another instruction of
    /// the worker's code, and their system calls may end at any time. They are reaped later by
    /// [`Self::wait`]. If other threads remain for [`LATE`], `late` is called once with their
    /// names: each of them is in a system call that cannot be interrupted, and its request cannot
    /// be carried out by the next worker before that has ended.
    ///
    /// # Errors
    /// As `waitpid(2)`.
    #[expect(clippy::disallowed_methods, reason = "for how long threads remain")]
    pub fn outlasted(&self, worker: i32, names: &[&str], late: &mut dyn FnMut(&[String])) -> io::Result<Option<Ended>> {
        let [mut pause, longest] = LOOK;
        let begun = Instant::now();
        let mut is_reported = false;
        loop {
            if let Some(ended) = self.has_ended(worker)? {
                return Ok(Some(ended));
            }
            // If the threads cannot be examined, wait for the end of the process.
            if let Ok(mut left) = are_left(worker) {
                left.retain(|name| !names.contains(&name.as_str()));
                if left.is_empty() {
                    self.left.set(self.left.get() + 1);
                    return Ok(None);
                }
                if !is_reported && begun.elapsed() >= LATE {
                    late(&left);
                    is_reported = true;
                }
            }
            pause_for(pause);
            pause = (pause * 2).min(longest);
        }
    }

    /// Whether dead workers may have remaining threads.
    pub fn has_threads_left(&self) -> bool {
        self.left.get() > 0
    }

    /// Returns how a worker has ended, if it has. Earlier workers with remaining threads are reaped
    /// on the way.
    fn has_ended(&self, worker: i32) -> io::Result<Option<Ended>> {
        loop {
            let mut status = 0;
            // SAFETY: the status is written to, and lives for the call.
            let waited = check(libc::c_long::from(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) }))?;
            match i32::try_from(waited) {
                Ok(0) => return Ok(None),
                Ok(ended) if ended == worker => {
                    return Ok(Some(match libc::WIFSIGNALED(status) {
                        true => Ended::Signal(libc::WTERMSIG(status)),
                        false => Ended::Code(libc::WEXITSTATUS(status)),
                    }));
                }
                _ => self.left.set(self.left.get().saturating_sub(1)),
            }
        }
    }

    fn signal(&self) -> io::Result<libc::c_int> {
        let mut record = [0_u8; size_of::<libc::signalfd_siginfo>()];
        loop {
            match rustix::io::read(self.signals.as_fd(), &mut record) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The number is the first field of `struct signalfd_siginfo`.
        Ok(record.first_chunk::<4>().map_or(0, |bytes| i32::from_ne_bytes(*bytes)))
    }
}

/// A process, identified by its id and start time, as ids are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub number: u32,
    /// Start time, in ticks since the machine's (proc_pid_stat(5)).
    pub began: u64,
}

impl Process {
    /// Returns this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn this() -> io::Result<Process> {
        Process::with(process::id())
    }

    /// Returns the process that has this id now.
    ///
    /// # Errors
    /// ENOENT or ESRCH if there is none.
    pub fn with(number: u32) -> io::Result<Process> {
        let stat = fs::read_to_string(format!("/proc/{number}/stat"))?;
        // The 22nd field; the second one, the name, may contain anything.
        let began = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)?.parse().ok());
        Ok(Process { number, began: began.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))? })
    }

    /// Whether it runs: whether any thread of it remains except those with these names, which wait
    /// in the kernel since it was killed.
    ///
    /// # Errors
    /// It cannot be examined.
    pub fn runs(self, names: &[&str]) -> io::Result<bool> {
        let left = Process::with(self.number).and_then(|now| match now == self {
            true => are_left(self.number.cast_signed()),
            false => Ok(Vec::new()),
        });
        match left {
            Ok(left) => Ok(!left.iter().all(|name| names.contains(&name.as_str()))),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether a `/proc` error means that there is no such process or thread.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Names of a killed process' threads that are not dead yet.
fn are_left(process: i32) -> io::Result<Vec<String>> {
    let threads = fs::read_dir(format!("/proc/{process}/task"))?;
    let threads = threads.map(|thread| thread.map(|thread| thread.path())).collect::<io::Result<Vec<_>>>()?;
    let name = |thread: PathBuf| {
        let stat = match fs::read_to_string(thread.join("stat")) {
            Err(error) if is_gone(&error) => return Ok(None),
            stat => stat?,
        };
        // The name may contain anything.
        let parts = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") "));
        let (name, rest) = parts.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok((!rest.starts_with(['Z', 'X'])).then(|| name.to_owned()))
    };
    threads.into_iter().filter_map(|thread| name(thread).transpose()).collect()
}

/// Name of a thread during a call that may wait for the mount which its own process serves.
pub const WAITS: &str = "nacre-waits";

/// Runs `act` in a thread with the name [`WAITS`]. If the process is killed meanwhile, the call may
/// end at any time, also while the next worker runs: it must change nothing but kernel state, and
/// neither open nor close a descriptor.
pub fn waiting<T>(act: impl FnOnce() -> T) -> T {
    struct Named(Option<CString>);
    impl Drop for Named {
        fn drop(&mut self) {
            if let Some(name) = &self.0 {
                // It cannot fail for a name that the thread had.
                let _ = rustix::thread::set_name(name);
            }
        }
    }
    let before = Named(rustix::thread::name().ok());
    // Without the name, the supervisor waits for the thread.
    let _ = rustix::thread::set_name(c"nacre-waits");
    let done = act();
    drop(before);
    done
}

#[expect(clippy::disallowed_methods, reason = "a thread that dies tells nobody")]
fn pause_for(time: Duration) {
    thread::sleep(time);
}

/// Returns a descriptor that becomes readable when the calling thread is dead. The thread must not
/// be the first of its process: the kernel reports that one's death only after all others.
///
/// # Errors
/// EINVAL before Linux 6.9.
pub fn death_of_this_thread() -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    let made = check(unsafe { libc::syscall(libc::SYS_pidfd_open, rustix::thread::gettid().as_raw_pid(), OF_THREAD) })?;
    // SAFETY: the kernel just made it, and it has no other owner.
    unsafe { crate::owned(made) }
}

/// Notifies this process' supervisor that a record is waiting for it.
///
/// # Errors
/// ESRCH if it has ended, EPERM if it belongs to another user.
pub fn call(guardian: u32) -> io::Result<()> {
    let number = i32::try_from(guardian).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: no memory is passed.
    check(libc::c_long::from(unsafe { libc::kill(number, CALLS.as_raw()) })).map(drop)
}

/// Notifies the supervisor of a user's mount. The id was reported by the process that serves the
/// mount, and may be false: a process that does not belong to this user alone is not signalled,
/// even if the caller is root.
///
/// # Errors
/// ESRCH if it has ended, EPERM if it belongs to another user.
pub fn call_of_user(guardian: u32, user: u32) -> io::Result<()> {
    let number = i32::try_from(guardian).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    // From here on, a reuse of the id would be noticed.
    let process = pidfd_open(number, PidfdFlags::empty())?;
    let status = fs::read_to_string(format!("/proc/{guardian}/status"))?;
    if !belongs_to(&status, user) {
        return Err(Errno::PERM.into());
    }
    Ok(pidfd_send_signal(process, CALLS)?)
}

/// Whether all user ids of a process (real, effective, saved, file system) are this user's, by its
/// status file.
fn belongs_to(status: &str, user: u32) -> bool {
    let Some(numbers) = status.lines().find_map(|line| line.strip_prefix("Uid:")) else { return false };
    let mut numbers = numbers.split_ascii_whitespace().peekable();
    numbers.peek().is_some() && numbers.all(|number| number.parse() == Ok(user))
}

/// Kills a worker that has not been waited for.
///
/// # Errors
/// As `kill(2)`.
pub fn kill(worker: i32) -> io::Result<()> {
    // SAFETY: no memory is passed. The worker has not been waited for, so its id has not been reused.
    check(libc::c_long::from(unsafe { libc::kill(worker, libc::SIGKILL) })).map(drop)
}

/// Executes another program, with these descriptors and this process's blocked signals. Returns
/// only on failure, with the error; then nothing has changed.
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

/// Maximum number of checks until this process has one thread.
const LOOKS: u32 = 100_000;

/// Returns when this process has one thread: a joined thread still exists for a moment.
fn wait_for_others() -> io::Result<()> {
    for _ in 0..LOOKS {
        if std::fs::read_dir("/proc/self/task")?.count() == 1 {
            return Ok(());
        }
        thread::yield_now();
    }
    Err(io::Error::from(io::ErrorKind::ResourceBusy))
}

fn work(body: impl FnOnce() -> u8 + Send + 'static) -> ! {
    // A terminal's signals are for the supervisor, which forwards them.
    let _ = rustix::process::setpgid(None, None);
    let running = mask(libc::SIG_UNBLOCK, &set_of([libc::SIGCHLD]))
        .and_then(|()| die_without_core())
        .and_then(|()| thread::Builder::new().name("nacre-main".to_owned()).spawn(body));
    let Ok(running) = running else { process::exit(1) };
    match running.join() {
        Ok(code) => process::exit(i32::from(code)),
        // It panicked.
        Err(_) => process::abort(),
    }
}

/// Signals caused by faults of the process itself.
const FAULTS: [libc::c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];

/// Makes this process die of such a signal without a core dump. Before a core dump, the kernel
/// would wait for all of its threads, including those that wait for the next worker, which is
/// started when this one is dead.
fn die_without_core() -> io::Result<()> {
    extern "C" fn dies(signal: libc::c_int) {
        // SAFETY: both may be called at any point. The signal is blocked here, and has its default action again:
        // it ends this process when the handler returns.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            libc::raise(signal);
        }
    }
    FAULTS.into_iter().try_for_each(|signal| {
        // SAFETY: a zeroed `sigaction` is a valid value to fill in, with an empty set of signals; the function lives
        // as long as the program.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = dies as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut())
        };
        check(libc::c_long::from(done)).map(drop)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_another_user_is_not_called() {
        let own = rustix::process::getuid().as_raw();
        let mut other = process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert_eq!(call_of_user(other.id(), own + 1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(other.try_wait().unwrap().is_none());
        call_of_user(other.id(), own).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&other.wait().unwrap()), Some(CALLS.as_raw()));
        assert!(call_of_user(other.id(), own).is_err());
        assert!(belongs_to("Name:\tx\nUid:\t7\t7\t7\t7\n", 7));
        for status in ["Uid:\t7\t0\t7\t7\n", "Uid:\t7\t7\t0\t7\n", "Uid:\n", "Gid:\t7\t7\t7\t7\n", ""] {
            assert!(!belongs_to(status, 7), "{status}");
        }
    }

    #[test]
    fn a_thread_has_another_name_while_it_waits() {
        let name = || rustix::thread::name().unwrap().into_string().unwrap();
        let before = name();
        assert_eq!(waiting(name), WAITS);
        assert_eq!(name(), before);
        assert!(std::panic::catch_unwind(|| waiting(|| std::panic::resume_unwind(Box::new(())))).is_err());
        assert_eq!(name(), before);
        assert!(are_left(process::id().cast_signed()).unwrap().contains(&before));
    }
}
