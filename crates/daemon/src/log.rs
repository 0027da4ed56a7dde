//! The log: one for a process that serves one mount or owns a pool, or one for each mount of a process that serves
//! several.
//!
//! Called by [`crate::serve`], [`crate::shared`] and [`crate::pool`]. In a shared process, a thread that works for
//! one mount alone writes to the log of that mount ([`Log::enter`]); lines of other threads (those that watch
//! directories, for example) are written to all logs.
//!
//! ```text
//!  target    where it goes                     line    an event as one printable line
//!  datagram  the journal, syslog               rate    how many lines at most
//!  rotating  the file next to a pool's socket
//! ```
//!
//! A background process logs events of its mount ([`Verbosity::Info`]) to the journal or syslog. Standard error
//! until the mount answers is for the user who requested it: warnings, unless he asked for more.

mod datagram;
mod line;
mod rate;
mod rotating;
pub mod target;

use crate::{
    clock,
    failure::Failure,
    plan::{MountPlan, Verbosity},
    report::path_text,
};
use datagram::{Datagrams, Reader, Subject};
use line::Line;
use parking_lot::{Mutex, RwLock};
use rate::Rate;
use rotating::RotatingFile;
use std::{
    cell::RefCell,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::Arc,
};
use target::LogTarget;
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    dispatcher::{self, DefaultGuard},
    level_filters::LevelFilter,
    span,
    subscriber::Interest,
};

fn level(verbosity: Verbosity) -> LevelFilter {
    match verbosity {
        Verbosity::Error => LevelFilter::ERROR,
        Verbosity::Warn => LevelFilter::WARN,
        Verbosity::Info => LevelFilter::INFO,
        Verbosity::Debug => LevelFilter::DEBUG,
        Verbosity::Trace => LevelFilter::TRACE,
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.map_err(|error| {
        Failure::io("cannot open the log", path_text(path), &error)
            .next("name a file in a directory that is there and that you may write to")
    })
}

/// Destination of log lines.
enum Sink {
    Stderr,
    File(File),
    /// Buffer for the process that requested the mount, as long as it waits.
    Said(Arc<Mutex<Option<Vec<u8>>>>),
    Datagrams(Datagrams),
    Rotating(Mutex<RotatingFile>),
}

impl Sink {
    fn put(&self, line: &Line) {
        let shown = || line.shown() + "\n";
        // A line that cannot be written has nowhere else to go.
        let _ = match self {
            // In one write: other processes write there, too.
            Sink::Stderr => io::stderr().write_all(shown().as_bytes()),
            Sink::File(file) => (&*file).write_all(format!("{} {}", clock::stamp(), shown()).as_bytes()),
            Sink::Said(said) => {
                if let Some(said) = said.lock().as_mut() {
                    said.extend_from_slice(shown().as_bytes());
                }
                Ok(())
            }
            Sink::Datagrams(datagrams) => {
                datagrams.send(line, clock::date());
                Ok(())
            }
            Sink::Rotating(file) => file.lock().put(format!("{} {}", clock::stamp(), shown()).as_bytes()),
        };
    }
}

/// A destination with its level and rate limit.
struct Outlet {
    level: LevelFilter,
    sink: Sink,
    rate: Option<Mutex<Rate>>,
}

impl Outlet {
    fn new(level: LevelFilter, sink: Sink) -> Outlet {
        let most = match &sink {
            Sink::Stderr | Sink::Said(_) => None,
            // A user who asks for every request in a file gets every one.
            Sink::File(_) if level > LevelFilter::INFO => None,
            _ if level > LevelFilter::INFO => Some(rate::REQUESTS_MOST),
            _ => Some(rate::LINES_MOST),
        };
        Outlet { level, sink, rate: most.map(|most| Mutex::new(Rate::new(most, clock::now()))) }
    }

    fn put(&self, event: &Event<'_>, line: &Line) {
        if event.metadata().level() > &self.level {
            return;
        }
        if let Some(rate) = &self.rate {
            let Some(left_out) = rate.lock().admit(event.metadata().callsite(), clock::now()) else { return };
            if left_out > 0 {
                let message = format!("{left_out} lines were left out: there were too many at once");
                self.sink.put(&Line { level: tracing::Level::WARN, message, fields: Vec::new() });
            }
        }
        self.sink.put(line);
    }
}

/// All destinations of one log.
struct Outlets(Vec<Outlet>);

impl Outlets {
    fn level(&self) -> LevelFilter {
        self.0.iter().map(|outlet| outlet.level).max().unwrap_or(LevelFilter::OFF)
    }
}

impl Subscriber for Outlets {
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level())
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &self.level()
    }

    fn event(&self, event: &Event<'_>) {
        let line = Line::of(event);
        self.0.iter().for_each(|outlet| outlet.put(event, &line));
    }

    // There are no spans in this program.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Returns the outlet of a target; `None` for `none`, and where no log service listens.
fn outlet(
    target: Option<&LogTarget>,
    background: bool,
    wanted: Option<Verbosity>,
    subject: Subject,
) -> Result<Option<Outlet>, Failure> {
    let target = target.cloned().or_else(LogTarget::of_environment).unwrap_or_default();
    let datagrams = |reader, path| {
        let opened = Datagrams::new(reader, path, Some(subject));
        opened.map(Sink::Datagrams).map_err(|error| Failure::io("cannot start", "the log", &error))
    };
    let kept = level(wanted.unwrap_or(Verbosity::Info));
    Ok(Some(match target.settled(background) {
        LogTarget::Journal => Outlet::new(kept, datagrams(Reader::Journal, target::journal())?),
        LogTarget::Syslog => Outlet::new(kept, datagrams(Reader::Syslog, target::syslog())?),
        LogTarget::File(path) => Outlet::new(kept, Sink::File(open(Path::new(&path))?)),
        LogTarget::Stderr => Outlet::new(level(wanted.unwrap_or_default()), Sink::Stderr),
        LogTarget::Auto | LogTarget::None => return Ok(None),
    }))
}

fn begin(subscriber: impl Subscriber + Send + Sync + 'static) -> Result<(), Failure> {
    dispatcher::set_global_default(Dispatch::new(subscriber))
        .map_err(|error| Failure::new(format!("cannot start the log: {error}")))
}

fn of_mount(plan: &MountPlan) -> Subject {
    // A mount point that cannot be resolved is never mounted.
    let place = std::path::absolute(&plan.mountpoint).unwrap_or_else(|_| plan.mountpoint.clone());
    Subject { kind: "mountpoint", name: path_text(&place) }
}

/// Level of the lines for the process that waits for the mount: no requests.
fn told(plan: &MountPlan) -> LevelFilter {
    level(plan.verbosity.unwrap_or_default()).min(LevelFilter::INFO)
}

/// Starts the log of a process that serves one mount.
///
/// # Errors
/// A file that cannot be opened.
pub fn start(plan: &MountPlan, background: bool) -> Result<(), Failure> {
    begin(mount_outlets(plan, background)?)
}

/// Sends the lines of `call` to the log of a mount, in a process that keeps no log.
///
/// # Errors
/// A file that cannot be opened.
pub fn within_mount(plan: &MountPlan, background: bool, call: impl FnOnce()) -> Result<(), Failure> {
    dispatcher::with_default(&Dispatch::new(mount_outlets(plan, background)?), call);
    Ok(())
}

fn mount_outlets(plan: &MountPlan, background: bool) -> Result<Outlets, Failure> {
    let outlet = outlet(plan.log_target.as_ref(), background, plan.verbosity, of_mount(plan))?;
    let mut outlets = Vec::from_iter(outlet);
    // The process that waits for the mount reads it.
    if background && !outlets.iter().any(|outlet| matches!(outlet.sink, Sink::Stderr)) {
        outlets.push(Outlet::new(told(plan), Sink::Stderr));
    }
    Ok(Outlets(outlets))
}

/// Starts the log of a process that owns a pool: to the target of the environment, and warnings and errors to a
/// file next to its socket, too.
///
/// # Errors
/// A file that cannot be opened.
pub fn start_pool(name: &str, path: &Path, goes_on: bool) -> Result<(), Failure> {
    begin(pool_outlets(name, path, goes_on)?)
}

/// Sends the lines of `call` to the log of a pool, in a process that keeps no log.
///
/// # Errors
/// A file that cannot be opened.
pub fn within_pool(name: &str, path: &Path, call: impl FnOnce()) -> Result<(), Failure> {
    dispatcher::with_default(&Dispatch::new(pool_outlets(name, path, true)?), call);
    Ok(())
}

fn pool_outlets(name: &str, path: &Path, goes_on: bool) -> Result<Outlets, Failure> {
    let file = if goes_on { RotatingFile::go_on(path) } else { RotatingFile::start(path) };
    let file = file.map_err(|error| Failure::io("cannot open the log", path.display(), &error))?;
    let mut outlets = vec![Outlet::new(LevelFilter::WARN, Sink::Rotating(Mutex::new(file)))];
    outlets.extend(outlet(None, true, None, Subject { kind: "pool", name: name.to_owned() })?);
    Ok(Outlets(outlets))
}

/// Starts the logs of a process that serves several mounts.
///
/// # Errors
/// There is a log already.
pub fn start_shared() -> Result<(), Failure> {
    begin(All)
}

/// The log of one mount among several.
#[derive(Debug)]
pub struct Log {
    dispatch: Dispatch,
    number: u64,
    /// Lines logged while the mount was made; `None` from then on.
    said: Arc<Mutex<Option<Vec<u8>>>>,
}

/// All logs of this process.
static LOGS: RwLock<(u64, Vec<Entry>)> = RwLock::new((0, Vec::new()));

/// A log: its number, its level, and its dispatcher.
type Entry = (u64, LevelFilter, Dispatch);

thread_local! {
    /// Selects the log of the mount that the thread works for.
    static ENTERED: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
}

impl Log {
    /// Opens the log of a mount.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(plan: &MountPlan) -> Result<Log, Failure> {
        let said = Arc::new(Mutex::new(Some(Vec::new())));
        let mut outlets = vec![Outlet::new(told(plan), Sink::Said(Arc::clone(&said)))];
        let outlet = outlet(plan.log_target.as_ref(), true, plan.verbosity, of_mount(plan))?;
        outlets.extend(outlet.filter(|outlet| !matches!(outlet.sink, Sink::Stderr)));
        let outlets = Outlets(outlets);
        let (level, dispatch) = (outlets.level(), Dispatch::new(outlets));
        let mut logs = LOGS.write();
        logs.0 += 1;
        let number = logs.0;
        logs.1.push((number, level, dispatch.clone()));
        drop(logs);
        tracing::callsite::rebuild_interest_cache();
        Ok(Log { dispatch, number, said })
    }

    /// Sends the lines of the calling thread to this log from now on.
    pub fn enter(&self) {
        // The old guard has to be dropped first: a guard restores the dispatcher that it found.
        ENTERED.with_borrow_mut(|entered| drop(entered.take()));
        let guard = dispatcher::set_default(&self.dispatch);
        ENTERED.with_borrow_mut(|entered| *entered = Some(guard));
    }

    /// Sends the lines of the calling thread to this log during `call`.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> T {
        dispatcher::with_default(&self.dispatch, call)
    }

    /// Takes the lines logged so far, for the process that requested the mount. Later lines do not go there.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&self.said.lock().take().unwrap_or_default()).into_owned()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // The last owner of a log is dropped outside of the lock: it closes a file.
        let gone: Vec<Entry> = {
            let mut logs = LOGS.write();
            logs.1.extract_if(.., |(number, _, _)| *number == self.number).collect()
        };
        drop(gone);
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Forwards the lines of threads that work for no mount in particular to all logs.
struct All;

impl Subscriber for All {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Logs are opened and closed at any time.
        Interest::sometimes()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LOGS.read().1.iter().map(|(_, level, _)| *level).max().unwrap_or(LevelFilter::OFF))
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        LOGS.read().1.iter().any(|(_, level, _)| metadata.level() <= level)
    }

    fn event(&self, event: &Event<'_>) {
        let logs: Vec<Dispatch> = {
            let logs = LOGS.read();
            logs.1
                .iter()
                .filter(|(_, level, _)| event.metadata().level() <= level)
                .map(|(_, _, dispatch)| dispatch.clone())
                .collect()
        };
        logs.iter().for_each(|log| log.event(event));
    }

    // There are no spans in this program.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
