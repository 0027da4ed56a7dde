//! `nacre copy`: the command line of `nacre_copy`, its progress and its summary.

use crate::{clap_args, clock, output::print};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use indicatif::{ProgressBar, ProgressStyle};
use nacre_copy::{CopyEvent, Figures, Lack, Options, Outcome, Reflink, Refusal, RefusalKind, Snapshot, Verify};
use nacre_daemon::{
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_sys::signals::Signals;
use rustix::process::{Resource, Rlimit};
use serde_json::{Value, json};
use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Options of a copy, and the form of its output.
#[derive(Clone, Debug)]
pub struct CopyCommand {
    options: Options,
    /// Everything as JSON, one object per line, on standard output.
    json: bool,
    /// No summary.
    quiet: bool,
    /// Lines about the progress even where standard error is not a terminal.
    progress: bool,
}

/// Intervals between updates of the progress: of the bar, and of lines.
const DRAWN_EVERY: Duration = Duration::from_millis(200);
const TOLD_EVERY: Duration = Duration::from_secs(5);
const JSON_EVERY: Duration = Duration::from_secs(1);

/// The command line of `nacre copy`.
pub fn command() -> Command {
    Command::new("copy")
        .about("Copy a tree of millions of files: in parallel, with all metadata, to be continued after an interruption")
        .after_help(
            "Examples:\n  nacre copy /srv/photos /tank/photos\n  nacre copy --verify /srv/mail /mnt/new-disk/mail\n  nacre copy --update /srv/photos /tank/photos\n  nacre copy --verify-only /srv/photos /tank/photos\n  nacre copy --json /srv/photos /tank/photos | tee copy.log\n\nThe content of SOURCE becomes the content of DEST. A copy that was interrupted goes on when the same command is given again.",
        )
        .arg(clap_args::path("SOURCE", "The directory to copy"))
        .arg(clap_args::path("DEST", "The directory that becomes like it; made if missing, else it has to be empty"))
        .arg(
            Arg::new("jobs")
                .short('j')
                .long("jobs")
                .value_name("N")
                .value_parser(value_parser!(u64).range(1..=256))
                .help("How many files at a time [default: two per processor, 4 to 32]"),
        )
        .arg(flag("update", "DEST may hold something: what has the same size and time stays, what differs is replaced, the rest is left alone").short('u'))
        .arg(flag("verify", "Read DEST back and compare every byte and all metadata with SOURCE"))
        .arg(flag("verify-only", "Copy nothing, only compare").conflicts_with_all(["verify", "update"]))
        .arg(
            Arg::new("reflink")
                .long("reflink")
                .value_name("WHEN")
                .value_parser(["auto", "always", "never"])
                .default_value("auto")
                .help("Share the blocks of files with SOURCE where the file system can"),
        )
        .arg(flag("one-file-system", "Leave the mount points in SOURCE empty").short('x'))
        .arg(flag("strict", "What DEST cannot hold (owners, attributes, hard links) is a failure, not a notice"))
        .arg(flag("no-sync", "Do not wait until everything is on the device"))
        .arg(flag("progress", "Tell the progress every 5 seconds where standard error is no terminal"))
        .arg(flag("quiet", "No progress and no last words").short('q').conflicts_with("progress"))
        .arg(flag("json", "Progress, failures and the result as JSON, one object per line").conflicts_with_all(["progress", "quiet"]))
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

/// Parses the matched arguments of `nacre copy`.
pub fn parse(matches: &ArgMatches) -> CopyCommand {
    let processors = thread::available_parallelism().map_or(2, usize::from);
    let jobs = matches.get_one::<u64>("jobs").and_then(|jobs| usize::try_from(*jobs).ok());
    let (json, quiet, progress) = (matches.get_flag("json"), matches.get_flag("quiet"), matches.get_flag("progress"));
    let verify = match (matches.get_flag("verify"), matches.get_flag("verify-only")) {
        (_, true) => Verify::Only,
        (true, false) => Verify::After,
        (false, false) => Verify::No,
    };
    let reflink = match matches.get_one::<String>("reflink").map(String::as_str) {
        Some("always") => Reflink::Always,
        Some("never") => Reflink::Never,
        _ => Reflink::Auto,
    };
    let options = Options {
        source: PathBuf::from(clap_args::one(matches, "SOURCE")),
        destination: PathBuf::from(clap_args::one(matches, "DEST")),
        jobs: jobs.unwrap_or((processors * 2).clamp(4, 32)),
        update: matches.get_flag("update"),
        verify,
        reflink,
        one_file_system: matches.get_flag("one-file-system"),
        strict: matches.get_flag("strict"),
        sync: !matches.get_flag("no-sync"),
        estimate: json || progress || (!quiet && io::stderr().is_terminal()),
    };
    CopyCommand { options, json, quiet, progress }
}

/// Runs the copy.
///
/// # Errors
/// The copy could not begin, or it did not become complete.
pub fn run(order: &CopyCommand) -> Result<ExitCode, Failure> {
    // Modes are created as SOURCE has them.
    rustix::process::umask(rustix::fs::Mode::empty());
    // A deep tree needs many open directories, and nothing else does; where the limit cannot be
    // raised, reaching it is reported.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop)?;
    let figures = Figures::default();
    let voice = Voice::new(order);
    let begun = clock::now();
    let outcome = {
        let over = (Mutex::new(false), Condvar::new());
        thread::scope(|scope| {
            let shows = || voice.follow(&figures, begun, &over);
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, shows) {
                let why = Failure::io("cannot start", "a thread", &error).what;
                voice.tell(&CopyEvent::Notice(format!("no progress is shown: {why}")));
            }
            let outcome = nacre_copy::run(&order.options, &figures, &stop, &|told| voice.tell(&told));
            *over.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
            over.1.notify_all();
            outcome
        })
    };
    voice.bar.finish_and_clear();
    let outcome = outcome.map_err(refused)?;
    last_words(order, &outcome, &figures.snapshot(), begun.elapsed().as_secs_f64())
}

/// The first signal asks the copy to stop; the second one ends the program at once.
fn stop_on_signals(stop: &Arc<AtomicBool>) -> Result<(), Failure> {
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    let stop = Arc::clone(stop);
    let watch = move || {
        while let Ok(signal) = signals.next() {
            if signal != nacre_sys::signals::Signal::User1 && stop.swap(true, Ordering::Relaxed) {
                std::process::exit(1);
            }
        }
    };
    // Never joined: it waits for signals until the program ends.
    thread::Builder::new().spawn(watch).map(drop).map_err(|error| Failure::io("cannot start", "a thread", &error))
}

fn refused(refusal: Refusal) -> Failure {
    let exit = match refusal.kind {
        RefusalKind::NotFound => Exit::NotFound,
        RefusalKind::Denied => Exit::Denied,
        RefusalKind::Busy => Exit::Busy,
        RefusalKind::Refused => Exit::Failure,
    };
    Failure::new(refusal.what).next(refusal.next).exit(exit)
}

/// Output of the running copy: progress and events.
struct Voice {
    bar: ProgressBar,
    json: bool,
    /// Print the progress as lines from time to time.
    lines: bool,
}

impl Voice {
    fn new(order: &CopyCommand) -> Voice {
        // Hidden by itself when standard error is not a terminal.
        let bar = if order.json || order.quiet || !order.options.estimate {
            ProgressBar::hidden()
        } else {
            ProgressBar::new(1000)
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {msg}") {
            bar.set_style(style);
        }
        Voice { lines: order.progress && bar.is_hidden(), bar, json: order.json }
    }

    fn tell(&self, told: &CopyEvent) {
        let (event, text) = match told {
            CopyEvent::Failed(text) => ("failed", text),
            CopyEvent::Notice(text) => ("notice", text),
        };
        if self.json {
            line(&json!({ "event": event, "text": text }));
        } else {
            self.bar.suspend(|| {
                // Standard error may be closed: nothing can be reported then.
                let _ = writeln!(io::stderr().lock(), "nacre: {text}");
            });
        }
    }

    /// Shows the progress until the copy is over.
    fn follow(&self, figures: &Figures, begun: Instant, over: &(Mutex<bool>, Condvar)) {
        let every = match (self.json, self.lines) {
            (true, _) => JSON_EVERY,
            (_, true) => TOLD_EVERY,
            _ => DRAWN_EVERY,
        };
        let mut part = Part::default();
        let mut ended = over.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = over.1.wait_timeout(ended, every).unwrap_or_else(PoisonError::into_inner).0;
            if *ended {
                break;
            }
            let now = figures.snapshot();
            let left = part.seconds_left(&now, begun.elapsed().as_secs_f64());
            self.show(&now, left, begun.elapsed().as_secs_f64());
        }
    }

    fn show(&self, now: &Snapshot, left: Option<f64>, elapsed: f64) {
        if self.json {
            let mut object = figures_json("progress", now, elapsed);
            add(&mut object, "seconds_left", json!(left.map(f64::round)));
            line(&object);
            return;
        }
        let text = progress_text(now, left, elapsed);
        if self.lines {
            let _ = writeln!(io::stderr().lock(), "nacre: {text}");
            return;
        }
        let share = now.share_done().unwrap_or_default();
        self.bar.set_position((share * 1000.0) as u64);
        self.bar.set_message(text);
    }
}

/// Start of the comparison: copying and comparing run at different speeds, and so have separate
/// estimates.
#[derive(Default)]
struct Part {
    verifying_since: Option<f64>,
}

impl Part {
    fn seconds_left(&mut self, now: &Snapshot, elapsed: f64) -> Option<f64> {
        if now.verifying {
            let since = *self.verifying_since.get_or_insert(elapsed);
            return now.seconds_left(elapsed - since);
        }
        now.seconds_left(elapsed)
    }
}

/// Formats one line of progress.
fn progress_text(now: &Snapshot, left: Option<f64>, elapsed: f64) -> String {
    let (entries, bytes, doing) = match now.verifying {
        true => (now.verified, now.verified_bytes, "compared"),
        false => (now.entries + now.directories, now.bytes + now.present_bytes, "copied"),
    };
    let of = if now.counted { "" } else { "at least " };
    let left = match left {
        Some(seconds) => format!("about {} left", clock(seconds)),
        None if now.counted => "no time known yet".to_owned(),
        None => "still counting".to_owned(),
    };
    let rate = if elapsed > 0.0 { (now.entries - now.present.min(now.entries)) as f64 / elapsed } else { 0.0 };
    let per_second = if now.verifying { String::new() } else { format!(", {} files/s", grouped(rate as u64)) };
    format!(
        "{} of {of}{} entries {doing}, {} of {of}{}{per_second}, {left}",
        grouped(entries),
        grouped(now.expected_entries.max(entries)),
        size(bytes),
        size(now.expected_bytes.max(bytes)),
    )
}

/// Prints the summary; returns the exit code.
fn last_words(order: &CopyCommand, outcome: &Outcome, now: &Snapshot, elapsed: f64) -> Result<ExitCode, Failure> {
    if order.json {
        let mut object = figures_json("end", now, elapsed);
        add(&mut object, "complete", json!(outcome.complete()));
        add(&mut object, "resumed", json!(outcome.resumed));
        add(&mut object, "interrupted", json!(outcome.interrupted));
        add(&mut object, "reason", json!(outcome.fatal.as_ref().map(|fatal| &fatal.what)));
        line(&object);
    } else if !order.quiet {
        print(&summary(now, elapsed, outcome.resumed))?;
    }
    let only = order.options.verify == Verify::Only;
    let again = if only { "" } else { "the same command again goes on where this one ended" };
    match outcome {
        _ if outcome.complete() => Ok(ExitCode::SUCCESS),
        Outcome { fatal: Some(fatal), .. } => Err(Failure::new(fatal.what.clone()).next(after(fatal.lack, again))),
        Outcome { interrupted: true, .. } => Err(Failure::new("interrupted").next(again)),
        _ => {
            let what =
                if only { "differ or could not be compared" } else { "could not be copied, or are not the same" };
            let source = path_text(&order.options.source);
            Err(Failure::new(format!("{} entries of {source} {what}; each is named above", grouped(outcome.failures)))
                .next(again))
        }
    }
}

/// Copies a tree without a word, except for what is in the way; it is complete or an error.
///
/// # Errors
/// Something cannot be copied.
pub fn quietly(options: &Options) -> Result<(), Failure> {
    // Modes are created as the source has them.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    let figures = Figures::default();
    let problems = Mutex::new(Vec::new());
    let outcome = nacre_copy::run(options, &figures, &AtomicBool::new(false), &|event| {
        if let CopyEvent::Failed(what) = event {
            problems.lock().unwrap_or_else(PoisonError::into_inner).push(what);
        }
    });
    rustix::process::umask(umask);
    let outcome = outcome.map_err(refused)?;
    if outcome.complete() {
        return Ok(());
    }
    let problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    let what = outcome.fatal.map(|fatal| fatal.what).or_else(|| problems.into_iter().next());
    Err(Failure::new(what.unwrap_or_else(|| format!("{} is not copied", path_text(&options.source)))))
}

/// Returns the hint for an error that ended the whole copy.
fn after(lack: Option<Lack>, again: &str) -> String {
    let first = match lack {
        Some(Lack::Room) => "make room in DEST; ",
        Some(Lack::Quota) => "raise the quota of DEST; ",
        Some(Lack::OpenFiles) => "raise the limit (`ulimit -n`); ",
        None => "",
    };
    format!("{first}{again}")
}

fn summary(now: &Snapshot, elapsed: f64, resumed: bool) -> String {
    let mut text = String::new();
    if now.entries + now.directories > 0 {
        let copied = now.entries - now.present.min(now.entries);
        let rate = if elapsed > 0.0 && now.verified == 0 {
            format!(" ({} files/s)", grouped((copied as f64 / elapsed) as u64))
        } else {
            String::new()
        };
        text.push_str(&format!(
            "copied {} files and {} directories, {}, in {}{rate}, {} of memory at most\n",
            grouped(copied),
            grouped(now.directories - now.present_directories.min(now.directories)),
            size(now.bytes),
            clock(elapsed),
            memory().map_or_else(|| "?".to_owned(), size),
        ));
    }
    if resumed {
        text.push_str("went on with a copy that was interrupted\n");
    }
    for (count, what) in [
        (now.replaced, "of these took the place of something else"),
        (now.present - now.renewed.min(now.present), "were there already and are the same"),
        (now.renewed, "were there already and got other metadata"),
        (now.vanished, "went away before they were copied"),
        (now.not_entered, "are mount points, left empty"),
        (now.lost_owners, "could not be given their owner, which only root may do"),
        (
            now.lost_attributes,
            "attributes, access control lists or flags could not be kept: DEST has no such, or this user may not set them",
        ),
        (
            now.lost_lists,
            "access control lists could not be kept: DEST has none (groups got what their own entries allow). \
             A file system of a pool has them after `nacre fs set acltype=posix DATASET` and a new mount; then copy again",
        ),
        (now.lost_links, "further names are files of their own: DEST has no hard links"),
    ] {
        if count > 0 {
            text.push_str(&format!("{} {what}\n", grouped(count)));
        }
    }
    if now.shared_bytes > 0 {
        text.push_str(&format!("{} are shared with SOURCE\n", size(now.shared_bytes)));
    }
    if now.verified > 0 {
        text.push_str(&format!(
            "compared {} entries, {}: ",
            grouped(now.verified + now.failures),
            size(now.verified_bytes)
        ));
        text.push_str(if now.failures == 0 { "all the same\n" } else { "not all the same\n" });
    }
    text
}

/// Returns the figures as a JSON object.
fn figures_json(event: &str, now: &Snapshot, elapsed: f64) -> Value {
    let mut object = serde_json::to_value(now).unwrap_or_else(|_| json!({}));
    add(&mut object, "event", json!(event));
    add(&mut object, "seconds", json!((elapsed * 1000.0).round() / 1000.0));
    add(&mut object, "memory", json!(memory()));
    object
}

fn add(object: &mut Value, name: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(name.to_owned(), value);
    }
}

/// Writes one line of JSON.
fn line(object: &Value) {
    // The reader may have closed its end of the pipe; the copy continues.
    let _ = writeln!(io::stdout().lock(), "{object}");
}

/// Peak memory use of this process, in bytes.
fn memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Formats a number with separated thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats bytes in the largest unit that gives a number of at least 1.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "bytes" { format!("{bytes} bytes") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Formats seconds as hours, minutes and seconds.
fn clock(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    let (hours, minutes, rest) = (whole / 3600, whole / 60 % 60, whole % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds:.1} s"),
        (0, _) => format!("{minutes}:{rest:02}"),
        _ => format!("{hours}:{minutes:02}:{rest:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_for_people() {
        assert_eq!([0, 999, 1000, 1_644_553].map(grouped), ["0", "999", "1,000", "1,644,553"]);
        assert_eq!(
            [0, 1023, 1536, 3 << 30, 5 << 40].map(size),
            ["0 bytes", "1023 bytes", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
        );
        assert_eq!([0.25, 59.0, 61.0, 3723.0].map(clock), ["0.2 s", "59.0 s", "1:01", "1:02:03"]);
    }

    #[test]
    fn progress_says_what_is_known() {
        let mut now = Snapshot {
            entries: 10,
            directories: 2,
            expected_entries: 20,
            bytes: 2048,
            expected_bytes: 4096,
            ..Snapshot::default()
        };
        assert_eq!(
            progress_text(&now, None, 2.0),
            "12 of at least 20 entries copied, 2.0 KiB of at least 4.0 KiB, 5 files/s, still counting"
        );
        now.counted = true;
        assert_eq!(
            progress_text(&now, Some(90.0), 2.0),
            "12 of 20 entries copied, 2.0 KiB of 4.0 KiB, 5 files/s, about 1:30 left"
        );
    }

    #[test]
    fn a_full_destination_is_told_with_what_to_do() {
        assert_eq!(after(Some(Lack::Room), "again"), "make room in DEST; again");
    }
}
