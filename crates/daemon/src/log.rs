//! Where the log goes: one for a process that serves one mount, one for each mount of a process
//! that serves several.
//!
//! Called by [`crate::serve`] and [`crate::shared`]. In a shared process, a thread that works for
//! one mount alone writes to the log of that mount ([`Log::enter`]); what other threads say (those
//! that watch directories, for example) is written to the logs of all.

use crate::{
    failure::Failure,
    plan::{MountPlan, Verbosity},
    report::path_text,
};
use parking_lot::{Mutex, RwLock};
use std::{
    cell::RefCell,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::Arc,
};
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    dispatcher::{self, DefaultGuard},
    span,
    subscriber::Interest,
};
use tracing_subscriber::filter::LevelFilter;

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

/// Starts the log of a process that serves one mount: to a file, or to standard error, which leads
/// nowhere once a background mount answers.
///
/// # Errors
/// A file that cannot be opened.
pub fn start(plan: &MountPlan) -> Result<(), Failure> {
    let builder = tracing_subscriber::fmt().with_max_level(level(plan.verbosity)).with_target(false);
    let started = match &plan.log_file {
        Some(path) => builder.with_ansi(false).with_writer(std::sync::Mutex::new(open(path)?)).try_init(),
        None => {
            let terminal = io::IsTerminal::is_terminal(&io::stderr());
            // Whoever reads standard error (a journal) knows the time.
            builder.with_ansi(terminal).without_time().with_writer(io::stderr).try_init()
        }
    };
    started.map_err(|error| Failure::new(format!("cannot start the log: {error}")))
}

/// Starts the logs of a process that serves several mounts.
///
/// # Errors
/// There is a log already.
pub fn start_shared() -> Result<(), Failure> {
    dispatcher::set_global_default(Dispatch::new(All))
        .map_err(|error| Failure::new(format!("cannot start the log: {error}")))
}

/// The log of one mount among several.
#[derive(Debug)]
pub struct Log {
    dispatch: Dispatch,
    number: u64,
    /// What was said while the mount was made, where no file was named; `None` from then on.
    said: Arc<Mutex<Option<Vec<u8>>>>,
}

/// All logs of this process.
static LOGS: RwLock<(u64, Vec<Entry>)> = RwLock::new((0, Vec::new()));

/// A log: its number, how much goes there, and where it is.
type Entry = (u64, LevelFilter, Dispatch);

thread_local! {
    /// Keeps the log of the mount that the thread works for.
    static ENTERED: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
}

impl Log {
    /// Opens it.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(verbosity: Verbosity, file: Option<&Path>) -> Result<Log, Failure> {
        let (level, said) = (level(verbosity), Arc::new(Mutex::new(Some(Vec::new()))));
        let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(false);
        let dispatch = match file {
            Some(path) => Dispatch::new(builder.with_writer(std::sync::Mutex::new(open(path)?)).finish()),
            None => {
                let said = Arc::clone(&said);
                Dispatch::new(builder.without_time().with_writer(move || Said(Arc::clone(&said))).finish())
            }
        };
        let mut logs = LOGS.write();
        logs.0 += 1;
        let number = logs.0;
        logs.1.push((number, level, dispatch.clone()));
        drop(logs);
        tracing::callsite::rebuild_interest_cache();
        Ok(Log { dispatch, number, said })
    }

    /// What the calling thread says goes here from now on.
    pub fn enter(&self) {
        // The old one has to go first: a guard puts back what it found.
        ENTERED.with_borrow_mut(|entered| drop(entered.take()));
        let guard = dispatcher::set_default(&self.dispatch);
        ENTERED.with_borrow_mut(|entered| *entered = Some(guard));
    }

    /// What the calling thread says meanwhile goes here.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> T {
        dispatcher::with_default(&self.dispatch, call)
    }

    /// What was said so far, for whoever asked for the mount. From then on nobody reads what goes
    /// to no file.
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

/// Writes to whoever made the mount, as long as that is waited for.
struct Said(Arc<Mutex<Option<Vec<u8>>>>);

impl Write for Said {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(said) = self.0.lock().as_mut() {
            said.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hands on what is said by threads that work for no mount in particular.
struct All;

impl Subscriber for All {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Logs come and go.
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
