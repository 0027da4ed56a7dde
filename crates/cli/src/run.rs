//! Carries out plans and commands.

use crate::{
    bench, cage,
    commands::{self, Invocation},
    completion, copy, doctor, documents, fs, mergerfs, metrics,
    options::{Spelling, TABLE},
    output::print,
    overlay,
    personality::{self, Personality},
    plan::Plan,
    pool, remount, status, top, umount, union, workspace,
};
use nacre_daemon::{
    asked,
    background::{self, in_background},
    control::{self, Request},
    failure::{Exit, Failure},
    guardian, handover, opening,
    plan::{FUSE_OVERLAYFS, MERGERFS, MountPlan},
    serve::{self, Served},
    service, shared, upgrade,
};
use nacre_layers::remap::Rules;
use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

/// The main function of the program.
pub fn main() -> ExitCode {
    // The parent may have set SIGCHLD to be ignored; this program waits for its children. No child,
    // no thread yet.
    if let Err(error) = nacre_sys::signals::keep_ended_children() {
        return Failure::io("cannot set", "what SIGCHLD does", &error).report("nacre");
    }
    // A process that has replaced itself (exec) finds its own handoff state, a service that of the
    // process before it.
    if let Some(left) = handover::left().or_else(service::left::find) {
        return finish("nacre", left.and_then(guardian::go_on).map(|()| ExitCode::SUCCESS));
    }
    if let Some(start) = nacre_daemon::pool::serves() {
        // The process that serves a pool reports errors by the name of its caller (`zpool`).
        let program = start.as_ref().map_or("nacre", |start| start.program());
        return finish(
            program,
            start.as_ref().map_err(Clone::clone).and_then(nacre_daemon::pool::serve).map(|()| ExitCode::SUCCESS),
        );
    }
    if asked::is_asked() {
        return finish("nacre", asked::answer().map(|()| ExitCode::SUCCESS));
    }
    if let Some(name) = shared::process::name() {
        return finish("nacre", shared::process::run(&name).map(|()| ExitCode::SUCCESS));
    }
    let mut arguments = std::env::args_os();
    let argv0 = arguments.next().unwrap_or_else(|| OsString::from("nacre"));
    let arguments: Vec<OsString> = arguments.collect();
    let program = personality::program(&argv0);
    match personality::of(&program, arguments.first().map(OsString::as_os_str)) {
        Personality::Bindfs => {
            finish(&program, personality::bindfs(&program, arguments).and_then(|plan| carry_out(&program, plan)))
        }
        Personality::MountProgram => {
            let arguments = personality::with_table_words(arguments);
            let may_be_missing = personality::may_be_missing(&arguments) && !background::is_background();
            let done = personality::mount_program(&program, arguments).and_then(|plan| {
                if may_be_missing {
                    find_source(&plan)?;
                }
                carry_out(&program, plan)
            });
            match done {
                Err(failure) if may_be_missing && failure.exit == Exit::NotFound => {
                    // A notice that cannot be written is no failure.
                    let _ = writeln!(io::stderr(), "{program}: {failure}; left out (nofail)");
                    ExitCode::SUCCESS
                }
                done => finish(&program, done),
            }
        }
        Personality::Overlay => as_overlay(arguments),
        Personality::Mergerfs => as_mergerfs(arguments),
        Personality::Nacre if arguments.first().is_some_and(|verb| verb == MERGERFS) => {
            as_mergerfs(arguments.into_iter().skip(1).collect())
        }
        // `nacre fuse-overlayfs ...` and `nacre bindfs ...` behave as the programs of these names.
        Personality::Nacre if arguments.first().is_some_and(|verb| verb == FUSE_OVERLAYFS) => {
            as_overlay(arguments.into_iter().skip(1).collect())
        }
        Personality::Nacre if arguments.first().is_some_and(|verb| verb == "bindfs") => {
            let plan = personality::bindfs("bindfs", arguments.into_iter().skip(1));
            finish("bindfs", plan.and_then(|plan| carry_out("bindfs", plan)))
        }
        Personality::Fs => fs::run::as_zfs(arguments),
        Personality::Pool => pool::run::as_zpool(arguments),
        Personality::Nacre => ours(argv0, arguments),
    }
}

fn as_overlay(arguments: Vec<OsString>) -> ExitCode {
    let root = rustix::process::geteuid().is_root();
    let plan = overlay::overlay(arguments, root, std::env::var_os(overlay::WHITEOUT_FILES).is_some());
    finish(FUSE_OVERLAYFS, plan.and_then(|plan| carry_out(FUSE_OVERLAYFS, plan)))
}

fn as_mergerfs(arguments: Vec<OsString>) -> ExitCode {
    finish(MERGERFS, mergerfs::mergerfs(arguments).and_then(|plan| carry_out(MERGERFS, plan)))
}

fn ours(argv0: OsString, arguments: Vec<OsString>) -> ExitCode {
    let table = commands::table();
    let matches = match table.clone().try_get_matches_from(std::iter::once(argv0).chain(arguments.iter().cloned())) {
        Ok(matches) => matches,
        Err(error) => {
            if let Some(failure) = commands::foreign(&error, &table, &arguments) {
                return failure.report("nacre");
            }
            if let Some(failure) = pool::zfs_usage::wrong(&error, &table, &arguments) {
                return failure.report("nacre");
            }
            // Help and the version come here, too; an error of the closed output cannot be
            // reported.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let done = commands::parse(&matches).and_then(invoke);
    finish("nacre", done.map_err(|failure| pool::zfs_usage::explained(failure, &table, &arguments)))
}

fn finish(program: &str, outcome: Result<ExitCode, Failure>) -> ExitCode {
    outcome.unwrap_or_else(|failure| failure.report(program))
}

fn invoke(invocation: Invocation) -> Result<ExitCode, Failure> {
    match invocation {
        Invocation::Mount(plan) => return carry_out("nacre", plan),
        Invocation::Umount { lazy, mountpoints } => return Ok(umount::run(lazy, &mountpoints)),
        Invocation::Status { view, mountpoints } => {
            print(&status::run(&view, &mountpoints)?)?;
            status::hint_at_other_users(&view, &mountpoints);
        }
        Invocation::Upgrade { program, mountpoints } => {
            // A notice that cannot be written is no failure.
            let tell = |line: &String| drop(writeln!(io::stderr(), "nacre: {line}"));
            upgrade::run(&mountpoints, program.as_deref())?.iter().for_each(tell);
        }
        Invocation::Top(asked) => top::run(asked)?,
        Invocation::Reload { mountpoint, mut rules } => {
            if let Some(rules) = &mut rules {
                Rules::check(rules).map_err(|error| Failure::usage(error.to_string()))?;
                opening::absolute_files(rules)?;
            }
            for peer in control::at(&[mountpoint])? {
                peer.ask(&Request::Reload { rules: rules.clone() })?;
            }
        }
        Invocation::Cage(verb) => cage::run::run(&verb)?,
        Invocation::Union(verb) => union::run::run(&verb)?,
        Invocation::Workspace(verb) => return workspace::run::run(verb),
        Invocation::Pool(verb) => return pool::run::run(verb, &pool::run::typed("nacre")),
        Invocation::Fs(verb) => return fs::run::run(verb, &pool::run::typed("nacre")),
        Invocation::Metrics { mountpoints, everybody, listen: None } => {
            print(&metrics::gathered::text(&mountpoints, everybody, true)?)?;
        }
        Invocation::Metrics { mountpoints, everybody, listen: Some(address) } => {
            let text = move || metrics::gathered::text(&mountpoints, everybody, false);
            metrics::listen::serve(address, Box::new(text))?;
        }
        Invocation::Copy(command) => return copy::run(&command),
        Invocation::Bench(matches) => bench::run(&matches)?,
        Invocation::Completions { shell, name } => print(&completion::script(shell, &name)?)?,
        Invocation::Complete(words) => completion::answer(&words)?,
        Invocation::Doctor { json } => return doctor::run(json),
        Invocation::Man(directory) => print(&(documents::man(&directory)?.join("\n") + "\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn carry_out(program: &str, plan: Plan) -> Result<ExitCode, Failure> {
    match plan {
        Plan::Mount(mut plan) => {
            serve::own_where_others_are_forbidden(&mut plan);
            return mount(&plan);
        }
        Plan::Cage(mut plan) => {
            serve::own_where_others_are_forbidden(&mut plan.mount);
            return cage::run::make(&plan);
        }
        Plan::Remount(plan) => remount::run(&plan)?,
        Plan::Help if program == FUSE_OVERLAYFS => print(overlay::help())?,
        Plan::Help if program == MERGERFS => print(mergerfs::help())?,
        Plan::Help => print(&help(program))?,
        Plan::Version => print(&format!("{program} (nacre) {}\n", env!("CARGO_PKG_VERSION")))?,
        Plan::FuseVersion => print(&format!(
            "FUSE kernel interface {}.{}, without libfuse\n",
            fusewire::abi::KERNEL_VERSION,
            fusewire::abi::KERNEL_MINOR_VERSION
        ))?,
        Plan::Dataset(what) => return fs::run::mount(*what),
        Plan::Nothing => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks for the source of a mount before a process is started for it.
fn find_source(plan: &Plan) -> Result<(), Failure> {
    match plan {
        Plan::Mount(plan) => serve::find_source(plan),
        Plan::Cage(plan) => serve::find_source(&plan.mount),
        _ => Ok(()),
    }
}

fn mount(plan: &MountPlan) -> Result<ExitCode, Failure> {
    // A notice that cannot be written is no failure.
    let tell = |line: &String| drop(writeln!(io::stderr(), "{}: {line}", plan.program));
    let background = background::is_background();
    if !background {
        plan.warnings.iter().for_each(tell);
    }
    if plan.explain {
        print(&serve::explain(plan)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if background {
        return serve::run(plan, background::reason(), true).map(|()| ExitCode::SUCCESS);
    }
    if serve::is_there(plan)? {
        return Ok(ExitCode::SUCCESS);
    }
    // Printed once the mount that they describe exists.
    let notices = serve::notices(plan);
    let reason = match serve::without_daemon(plan)? {
        Served::Done => {
            notices.iter().for_each(tell);
            return Ok(ExitCode::SUCCESS);
        }
        Served::ByDaemon(reason) => reason,
    };
    if plan.foreground && plan.daemon.is_none() {
        notices.iter().for_each(tell);
        return serve::run(plan, reason, false).map(|()| ExitCode::SUCCESS);
    }
    let code = match &plan.daemon {
        Some(name) => shared::client::mount(plan, name, &reason)?,
        None => in_background(&reason)?,
    };
    if code == ExitCode::SUCCESS {
        notices.iter().for_each(tell);
    }
    Ok(code)
}

/// Returns bindfs' help: the options under their headings.
fn help(program: &str) -> String {
    let mut text = format!(
        "Usage: {program} [options] SOURCE MOUNTPOINT\n\nShows a directory at a second place, with other owners, modes and rules.\n"
    );
    let mut heading = "";
    for row in TABLE.iter().filter(|row| !matches!(row.spelling, Spelling::Word | Spelling::Cage)) {
        if row.heading != heading {
            heading = row.heading;
            text.push_str(&format!("\n{heading}:\n"));
        }
        let short = row.short.map_or_else(|| "    ".to_owned(), |letter| format!("-{letter}, "));
        let short = if row.name.is_empty() { short.replace(',', " ") } else { short };
        let long = match (row.name, row.value) {
            ("", value) => value.unwrap_or_default().to_owned(),
            (name, None) => format!("--{name}"),
            (name, Some(value)) => format!("--{name}={value}"),
        };
        text.push_str(&format!("  {short}{long}\n          {}\n", row.help));
    }
    text.push_str("\nEach long option is also a word of -o, without its dashes.\n");
    text
}
