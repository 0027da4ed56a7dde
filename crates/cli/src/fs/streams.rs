//! `send`, `receive` and `stream`: command lines and output. The bytes pass through this process:
//! from the pool's process to standard output, from standard input to the pool's process.

use super::{args, ask::ask};
use crate::{
    clap_args::{flag, texts},
    output::print,
};
use clap::{Arg, ArgAction, ArgMatches, Command};
use nacre_admin::fs::{FsAnswer, FsRequest, ReceivedStream, Resumed, SentStream, ToReceive, ToSendStream};
use nacre_daemon::{failure::Failure, pool::client, report::tell};
use nacre_pool::{
    properties::size::human_bytes,
    send_stream::{Record, ResumeToken, RowOp, StreamReader, record},
};
use std::{
    fs::File,
    io::{self, BufReader, IsTerminal, Read},
    os::fd::AsFd,
    process::ExitCode,
};

/// A verb on streams.
#[derive(Debug)]
pub enum StreamVerb {
    /// Send snapshots.
    Send {
        /// The pool.
        pool: String,
        /// The request.
        what: ToSendStream,
        /// Output during the transfer.
        told: Told,
    },
    /// Receive snapshots.
    Receive {
        /// The request.
        what: ToReceive,
        /// Print what is received.
        verbose: bool,
    },
    /// Abort a partially received stream of this file system.
    Abort(String),
    /// Show the content of a stream.
    Dump {
        /// Each record as well.
        verbose: bool,
    },
    /// Show the content of a resume token.
    Token(String),
}

/// Output while a stream is sent.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// The snapshots, and the progress.
    verbose: bool,
    /// In a form for scripts.
    parsable: bool,
    /// The progress, as the name of the process.
    named: bool,
}

fn switch(letter: char, name: &'static str, long: &'static str, help: &'static str) -> Arg {
    flag(letter, name, help).long(long)
}

fn help() -> Arg {
    Arg::new("help").long("help").action(ArgAction::Help).help("Print help")
}

/// Returns the command lines of `send`, `receive` and `stream`.
pub fn commands() -> [Command; 3] {
    [
        Command::new("send")
            .about("Write snapshots to standard output, for another pool to receive")
            .after_help("Examples:\n  nacre fs send tank/home@today | nacre fs receive backup/home\n  nacre fs send -i @yesterday tank/home@today | ssh host nacre fs receive backup/home\n  nacre fs send -R tank@today | nacre fs receive -d backup\n  nacre fs send -nv -i @yesterday tank/home@today\n  nacre fs send -t TOKEN | nacre fs receive -s backup/home\n  nacre fs send -S backup/home | nacre fs receive -s third/home\n\nTOKEN is the property receive_resume_token of the file system that was being received.")
            .disable_help_flag(true)
            .arg(help())
            .arg(value('i', "from", "SNAPSHOT|BOOKMARK", "Only what differs from this one: @NAME, #NAME, or the snapshot that a clone was made of"))
            .arg(value('I', "between", "SNAPSHOT", "The same with all snapshots between").conflicts_with("from"))
            .arg(switch('R', "package", "replicate", "With everything below, all earlier snapshots, and properties"))
            .arg(switch('p', "properties", "props", "With properties"))
            .arg(switch('b', "backup", "backup", "With properties that were received, where others are set here"))
            .arg(switch('h', "holds", "holds", "With holds"))
            .arg(switch('c', "compressed", "compressed", "Content as it is stored"))
            .arg(switch('w', "raw", "raw", "The same"))
            .arg(switch('n', "dry", "dryrun", "Send nothing; with -v, say what would be sent"))
            .arg(switch('v', "verbose", "verbose", "Say what is sent, and each second how far it is"))
            .arg(switch('P', "parsable", "parsable", "Say it for scripts"))
            .arg(value('t', "token", "receive_resume_token", "Go on where a receiver has come to").conflicts_with_all(["from", "between", "package"]))
            .arg(switch('e', "embed", "embed", "Taken for ZFS' sake: short content is in its row anyway"))
            .arg(switch('L', "large-block", "large-block", "Taken for ZFS' sake: records stay as long as they are"))
            .arg(switch('s', "skip-missing", "skip-missing", "With -R: pass over file systems without the snapshot, with everything below them"))
            .arg(switch('V', "proctitle", "proctitle", "Show how far it is as the name of the process (ps -o comm, top)"))
            .arg(Arg::new("of-snapshots").long("snapshot-properties").action(ArgAction::SetTrue).help("With properties of snapshots alone"))
            .arg(switch('D', "dedup", "dedup", "").hide(true))
            .arg(switch('S', "saved", "saved", "What a file system has half received (receive -s), to be received with -s in turn"))
            .arg(Arg::new("SNAPSHOT").required_unless_present("token").help("Which; with -S, a file system")),
        Command::new("receive")
            .visible_alias("recv")
            .about("Make of a stream on standard input the snapshots that were sent")
            .after_help("Examples:\n  nacre fs send tank/home@today | nacre fs receive backup/home\n  nacre fs receive -s -u backup/home < home.stream\n  nacre fs receive -d -x mountpoint backup < tank.stream\n  nacre fs receive -A backup/home\n\nA file system that exists has to be as its newest snapshot is; -F gives up what it has besides. What was received when a stream is cut stays with -s: its property receive_resume_token is for send -t.")
            .disable_help_flag(true)
            .arg(help())
            .arg(flag('F', "force", "Give up what the file system has besides the base of the stream; of -R streams also snapshots and file systems that the sender has no more"))
            .arg(flag('s', "resumable", "Keep what has come if the stream is cut"))
            .arg(flag('A', "abort", "Give up what was kept").conflicts_with_all(["force", "resumable", "but-pool", "last-part", "dry"]))
            .arg(flag('u', "unmounted", "Mount nothing"))
            .arg(flag('v', "verbose", "Say what is received"))
            .arg(flag('n', "dry", "Receive nothing; with -v, say what would be received"))
            .arg(flag('d', "but-pool", "Names below FILESYSTEM are those of the sender without the pool").conflicts_with("last-part"))
            .arg(flag('e', "last-part", "The name below FILESYSTEM is the last part of that of the sender"))
            .arg(value('o', "properties", "PROPERTY=VALUE", "A property that is set here, whatever the stream says; origin=SNAPSHOT: it is a clone of this one"))
            .arg(value('x', "except", "PROPERTY", "A property of the stream that does not count here"))
            .arg(flag('M', "unmount", "Unmount for the moment even what is in use"))
            .arg(flag('h', "no-holds", "Receive no holds"))
            .arg(Arg::new("INTO").required(true).value_name("FILESYSTEM[@SNAPSHOT]").help("Where to")),
        Command::new("stream")
            .about("Show what a stream or a token says")
            .after_help("Examples:\n  nacre fs send tank/home@today | nacre fs stream dump\n  nacre fs stream token TOKEN")
            .subcommand_required(true)
            .arg_required_else_help(true)
            .disable_help_subcommand(true)
            .subcommand(
                Command::new("dump")
                    .about("Show the records of a stream on standard input")
                    .arg(flag('v', "verbose", "Each row as well")),
            )
            .subcommand(
                Command::new("token")
                    .about("Show what a token says")
                    .arg(Arg::new("TOKEN").required(true).help("The property receive_resume_token")),
            ),
    ]
}

fn value(letter: char, name: &'static str, shown: &'static str, help: &'static str) -> Arg {
    Arg::new(name).short(letter).value_name(shown).action(ArgAction::Append).allow_hyphen_values(false).help(help)
}

/// Parses the matched arguments of `send`.
///
/// # Errors
/// Options that exclude each other.
pub fn send(matches: &ArgMatches) -> Result<StreamVerb, Failure> {
    let has = |name: &str| matches.get_flag(name);
    if has("skip-missing") && !has("package") {
        return Err(Failure::usage("-s is for streams of everything below: it needs -R"));
    }
    let last = |name: &str| texts(matches, name).pop();
    let snapshot = matches.get_one::<String>("SNAPSHOT").cloned().unwrap_or_default();
    let token = last("token");
    let from = last("from").or_else(|| last("between"));
    let mut pool = args::pool(&snapshot).to_owned();
    if has("saved") {
        let others =
            ["package", "properties", "backup", "holds", "of-snapshots", "compressed", "raw", "embed", "large-block"];
        if from.is_some() || others.into_iter().any(has) {
            return Err(Failure::usage("incompatible flags combined with saved send flag"));
        }
        if snapshot.contains('@') || snapshot.is_empty() {
            return Err(Failure::usage("saved send must specify the dataset with partially-received state"));
        }
    } else if let Some(token) = &token {
        if !snapshot.is_empty() {
            return Err(Failure::usage("-t says itself what is sent: no snapshot goes with it"));
        }
        let known = ResumeToken::parse(token).map_err(|error| Failure::new(format!("cannot resume send: {error}")))?;
        pool = args::pool(&known.name).to_owned();
    }
    let what = ToSendStream {
        snapshot,
        from,
        between: last("between").is_some(),
        package: has("package"),
        properties: has("properties"),
        received: has("backup"),
        skip_missing: has("skip-missing"),
        holds: has("holds"),
        of_snapshots: has("of-snapshots"),
        stored: has("compressed") || has("raw"),
        dry: has("dry"),
        progress: has("verbose") || has("proctitle"),
        token,
        saved: has("saved"),
    };
    let told = Told { verbose: has("verbose"), parsable: has("parsable"), named: has("proctitle") };
    Ok(StreamVerb::Send { pool, what, told })
}

/// Properties that `receive -x` refuses, as in zfs-receive(8): they are set at creation and never
/// change. The properties of encryption are not among them: streams without encryption lack them
/// anyway.
const SET_ONCE: [&str; 5] = ["casesensitivity", "normalization", "utf8only", "volblocksize", "volsize"];

/// Parses the matched arguments of `receive`.
///
/// # Errors
/// A property that does not exist.
pub fn receive(matches: &ArgMatches) -> Result<StreamVerb, Failure> {
    let has = |name: &str| matches.get_flag(name);
    let into = matches.get_one::<String>("INTO").cloned().unwrap_or_default();
    if has("abort") {
        return Ok(StreamVerb::Abort(into));
    }
    let mut properties = args::assignments(&texts(matches, "properties"), &format!("cannot receive into '{into}'"))?;
    // Other tools repeat all properties of the source; this one is computed at the target.
    properties.retain(|(name, _)| name != "snapshots_changed");
    let except: Vec<String> = texts(matches, "except").iter().map(|name| args::long_name(name)).collect();
    if let Some(name) = except.iter().find(|name| SET_ONCE.contains(&name.as_str())) {
        let why = format!("cannot receive into '{into}': '{name}' cannot be left out of a stream");
        return Err(Failure::new(why).next("it is set once, when the file system is made"));
    }
    let what = ToReceive {
        into,
        but_pool: has("but-pool"),
        last_part: has("last-part"),
        force: has("force"),
        unmount: has("unmount"),
        unmounted: has("unmounted"),
        resumable: has("resumable"),
        dry: has("dry"),
        properties,
        except,
        no_holds: has("no-holds"),
    };
    Ok(StreamVerb::Receive { what, verbose: has("verbose") })
}

/// Parses the matched arguments of `stream`.
///
/// # Errors
/// No such command.
pub fn stream(matches: &ArgMatches) -> Result<StreamVerb, Failure> {
    match matches.subcommand() {
        Some(("token", matches)) => {
            Ok(StreamVerb::Token(matches.get_one::<String>("TOKEN").cloned().unwrap_or_default()))
        }
        Some((_, matches)) => Ok(StreamVerb::Dump { verbose: matches.get_flag("verbose") }),
        None => Err(Failure::usage("a command is needed").next("nacre fs stream --help lists them")),
    }
}

/// Carries out a verb.
///
/// # Errors
/// The failure of a request, a bad token or stream, or output that cannot be written.
pub fn run(verb: StreamVerb, command: &str) -> Result<ExitCode, Failure> {
    match verb {
        StreamVerb::Send { pool, what, told } => run_send(&pool, what, told, command)?,
        StreamVerb::Receive { what, verbose } => return run_receive(what, verbose, command),
        StreamVerb::Abort(name) => drop(ask(args::pool(&name), command, FsRequest::AbortReceive(name.clone()))?),
        StreamVerb::Dump { verbose } => dump(verbose)?,
        StreamVerb::Token(text) => {
            let token = ResumeToken::parse(&text).map_err(|error| Failure::new(error.to_string()))?;
            print(&contents(&Resumed::of(&token)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats the content of a resume token as ZFS does.
fn contents(resumed: &Resumed) -> String {
    let Resumed { name, guid, from, object, offset, bytes } = resumed;
    let mut text = format!(
        "resume token contents:\nnvlist version: 0\n\tobject = {object:#x}\n\toffset = {offset:#x}\n\tbytes = {bytes:#x}\n"
    );
    if *from != 0 {
        text.push_str(&format!("\tfromguid = {from:#x}\n"));
    }
    text.push_str(&format!("\ttoguid = {guid:#x}\n\ttoname = {name}\n"));
    text
}

/// Formats the planned stream: its snapshots with their estimated sizes.
fn planned(sent: &SentStream, parsable: bool) -> String {
    let mut text = String::new();
    let mut total = 0_u64;
    for (from, name, size) in &sent.snapshots {
        total = total.saturating_add(*size);
        let part = |name: &str| name.find(['@', '#']).and_then(|at| name.get(at..)).unwrap_or_default().to_owned();
        let line = match (from, parsable) {
            (None, true) => format!("full\t{name}\t{size}\n"),
            (Some(from), true) => {
                format!("incremental\t{}\t{name}\t{size}\n", part(from).trim_start_matches(['@', '#']))
            }
            (None, false) => format!("full send of {name} estimated size is {}\n", human_bytes(*size)),
            (Some(from), false) => {
                format!("send from {} to {name} estimated size is {}\n", part(from), human_bytes(*size))
            }
        };
        text.push_str(&line);
    }
    text.push_str(&if parsable {
        format!("size\t{total}\n")
    } else {
        format!("total estimated size is {}\n", human_bytes(total))
    });
    text
}

fn run_send(pool: &str, what: ToSendStream, told: Told, command: &str) -> Result<(), Failure> {
    let Told { verbose, parsable, named } = told;
    let stdout = io::stdout();
    if !what.dry && stdout.is_terminal() {
        return Err(
            Failure::new("Error: Stream can not be written to a terminal.").next("You must redirect standard output.")
        );
    }
    if let Some(token) = what.token.as_ref().filter(|_| !what.saved && (verbose || what.dry && parsable)) {
        // Also for snapshots of other pools: programs use this to decode a token.
        let token = ResumeToken::parse(token).map_err(|error| Failure::new(error.to_string()))?;
        let text = contents(&Resumed::of(&token));
        if what.dry { print(&text)? } else { text.lines().for_each(tell_plainly) }
    }
    let owned = client::owned(pool)?;
    if what.dry || verbose {
        let dry = ToSendStream { dry: true, ..what.clone() };
        let FsAnswer::Sent(sent) = owned.fs(command, FsRequest::Send(dry), &mut tell)? else { return Ok(()) };
        let text = if verbose || parsable { planned(&sent, parsable) } else { String::new() };
        if what.dry {
            tell_skipped(&sent);
            return print(&text);
        }
        text.lines().for_each(tell_plainly);
    }
    let sink =
        stdout.as_fd().try_clone_to_owned().map_err(|error| Failure::io("cannot write", "the stream", &error))?;
    let mut note = |line: &str| match line.strip_prefix("sent ") {
        Some(progress) => {
            let (bytes, name) = progress.split_once(' ').unwrap_or((progress, ""));
            if named {
                name_process(&format!("send {}", human_bytes(bytes.parse().unwrap_or(0))));
            }
            if !verbose {
                return;
            }
            if parsable {
                return tell_plainly(&format!("{bytes}\t{name}"));
            }
            tell_plainly(&format!("{:>8}   {name}", human_bytes(bytes.parse().unwrap_or(0))));
        }
        None => tell(line),
    };
    if let FsAnswer::Sent(sent) = owned.send(command, FsRequest::Send(what), &mut note, &mut File::from(sink))? {
        tell_skipped(&sent);
    }
    Ok(())
}

fn tell_skipped(sent: &SentStream) {
    sent.skipped.iter().for_each(|name| tell(&format!("'{name}' does not have the snapshot, and is passed over")));
}

/// Sets the name that `ps` and `top` show, which is cut to its beginning where it is longer.
fn name_process(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // A failure changes only the shown name.
        let _ = rustix::thread::set_name(&name);
    }
}

/// Writes a line to standard error, without the name of the program: scripts parse it.
fn tell_plainly(line: &str) {
    use std::io::Write;
    // Standard error may be closed: nothing can be reported then.
    let _ = writeln!(io::stderr(), "{line}");
}

fn standard_input() -> Result<File, Failure> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::new("Error: Backup stream can not be read from a terminal.")
            .next("You must redirect standard input."));
    }
    let input = stdin.as_fd().try_clone_to_owned();
    input.map(File::from).map_err(|error| Failure::io("cannot read", "the stream", &error))
}

fn run_receive(what: ToReceive, verbose: bool, command: &str) -> Result<ExitCode, Failure> {
    let from = standard_input()?;
    let dry = what.dry;
    let owned = client::owned(args::pool(&what.into))?;
    let answer = owned.receive(command, FsRequest::Receive(what), &mut tell, from)?;
    let FsAnswer::Received(ReceivedStream { snapshots, sentences }) = answer else { return Ok(ExitCode::SUCCESS) };
    if verbose {
        let verb = if dry { "would receive" } else { "received" };
        for (from, to, full, bytes) in snapshots {
            let kind = if full { "full" } else { "incremental" };
            print(&format!("{verb} {kind} stream of {from} into {to} ({})\n", human_bytes(bytes)))?;
        }
    }
    sentences.iter().for_each(|sentence| tell(sentence));
    Ok(ExitCode::SUCCESS)
}

fn dump(verbose: bool) -> Result<(), Failure> {
    let input: Box<dyn Read> = Box::new(BufReader::new(standard_input()?));
    let told = |error| Failure::new(format!("cannot read the stream: {error}"));
    let mut reader = StreamReader::begin(input).map_err(told)?;
    let mut rows = (0_u64, 0_u64);
    loop {
        let received = reader.next().map_err(told)?;
        match received.record {
            Record::Stream(head) => print(&format!(
                "stream of {}, pool {:016x}{}\n",
                head.root,
                head.pool,
                if head.package { ", with everything below" } else { "" }
            ))?,
            Record::Snapshot(head) => {
                let from = if head.from == 0 { "full".to_owned() } else { format!("from {:016x}", head.from) };
                let stored = if head.stored { ", as stored" } else { "" };
                print(&format!("snapshot {} {:016x}, {from}{stored}\n", head.name, head.guid))?;
                for property in head.spelling.iter().chain(&head.properties).chain(&head.of_snapshot) {
                    print(&format!("  {}={}\n", property.name, property.value))?;
                }
                for tag in &head.holds {
                    print(&format!("  held by {tag}\n"))?;
                }
            }
            Record::Rows(payload) => {
                let ops = record::rows(&payload).map_err(told)?;
                rows = (rows.0 + ops.len() as u64, rows.1 + payload.len() as u64);
                if verbose {
                    ops.iter().try_for_each(|op| print(&row(op)))?;
                }
            }
            Record::SnapshotEnd(guid) => {
                print(&format!("end of {guid:016x}: {} rows, {} bytes\n", rows.0, rows.1))?;
                rows = (0, 0);
            }
            Record::End => return print(&format!("end of the stream: {} bytes\n", received.end)),
        }
    }
}

fn row(op: &RowOp<'_>) -> String {
    let key = nacre_pool::rows::Key::decode(op.key())
        .map_or_else(|_| op.key().escape_ascii().to_string(), |key| format!("{key:?}"));
    match op {
        RowOp::Put { value, .. } => format!("  {key}: {} bytes\n", value.len()),
        RowOp::Gone { .. } => format!("  {key}: gone\n"),
        RowOp::Nothing { until, .. } => format!("  {key}: nothing up to {}\n", until.escape_ascii()),
        RowOp::Framed { frame, .. } => format!("  {key}: {} of {} bytes\n", frame.bytes.len(), frame.logical),
    }
}
