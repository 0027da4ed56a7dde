//! Carries out what a command line asked of pools.

use super::{
    client::{self, Owned},
    command, dates, histograms, importing, iostat, list, manners,
    order::{self as orders, Again, Form, PoolOrder, Shown, Target, ToCreate},
    start::{How, Start},
    status, upgrade,
};
use crate::{
    commands::Order,
    failure::{Exit, Failure},
    report::printable,
    run::print,
};
use nacre_admin::{
    Refusal,
    pool::{Answer, Figures, Line, Request, ScrubOrder, Status, devices, properties},
    watch::Event,
};
use nacre_pool::{device::FileDevice, label, names, store::MINIMUM_DEVICE};
use std::{
    ffi::OsString,
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

/// The limit of the cache where none is named, bytes.
pub const CACHE: u64 = 256 << 20;
/// The least that can be worked with.
const CACHE_LEAST: u64 = 8 << 20;

/// What the program says when it was called as `zpool`.
pub const ZPOOL: &str = "zpool";

/// Called as `zpool`: the same command lines.
pub fn as_zpool(arguments: Vec<OsString>) -> ExitCode {
    let table = command::command().name(ZPOOL).bin_name(ZPOOL).version(env!("CARGO_PKG_VERSION"));
    // What ZFS takes for help.
    let arguments = arguments.into_iter().map(|word| if word == "-?" { OsString::from("--help") } else { word });
    let arguments: Vec<OsString> = arguments.collect();
    let matches = match table.clone().try_get_matches_from(std::iter::once(OsString::from(ZPOOL)).chain(arguments.iter().cloned())) {
        Ok(matches) => matches,
        Err(error) => return manners::report(&error, &table, &arguments),
    };
    let done = match orders::order(&matches) {
        Ok(Order::Pool(order)) => self::order(order, &typed(ZPOOL)),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(failure) => Err(failure),
    };
    done.unwrap_or_else(|failure| manners::refuse(&failure, ZPOOL, &table, &arguments))
}

/// Does it.
///
/// # Errors
/// Why not.
pub fn order(order: PoolOrder, command: &str) -> Result<ExitCode, Failure> {
    match order {
        PoolOrder::Create(what) => return create(what, command),
        PoolOrder::Destroy { name, force } => leave(&client::owned(&name)?, command, Request::Destroy { force })?,
        PoolOrder::List { form, columns, verbose, names, again } => repeat(again, |_| {
            let (pools, missing) = figures(&names)?;
            match pools.is_empty() && !form.json {
                true if missing.is_some() || form.scripted => {}
                true => print("no pools available\n")?,
                false => print(&list::table(&pools, columns.as_deref(), verbose, form)?)?,
            }
            missing.map_or(Ok(()), Err)
        })?,
        PoolOrder::Status { json, verbose, trim, only_ill, names, again } => {
            repeat(again, |_| show_status(&names, json, (verbose, trim), only_ill))?;
        }
        PoolOrder::Add { name, devices, size, force, only_say } => add(&name, devices, size, force, only_say, command)?,
        PoolOrder::Import(what) => return importing::import(what, command),
        PoolOrder::Export { names, all, force } => {
            for owned in if all { client::ours() } else { named(&names)? } {
                leave(&owned, command, Request::Export { force })?;
            }
        }
        PoolOrder::Get { form, fields, properties, names } => {
            let (pools, missing) = figures(&names)?;
            if missing.is_none() || !pools.is_empty() {
                print(&list::properties_table(&pools, &properties, fields.as_deref(), form)?)?;
            }
            missing.map_or(Ok(()), Err)?;
        }
        PoolOrder::Expand { name, devices } => done(&client::owned(&name)?, command, Request::Expand { devices })?,
        PoolOrder::Online { name, devices } => {
            let Answer::Listed(figures) = client::owned(&name)?.pool("", Request::List, &mut tell)? else { return Ok(ExitCode::SUCCESS) };
            let strange = devices.iter().find(|device| !figures.devices.iter().any(|there| same(Path::new(&there.path), device)));
            if let Some(device) = strange {
                let why = format!("cannot online {}: no such device in pool", device.display());
                return Err(Failure::new(why).exit(Exit::NotFound));
            }
        }
        PoolOrder::Set { name, value, pool } => done(&client::owned(&pool)?, command, Request::Set { name, value })?,
        PoolOrder::History { names, internal, long } => history(&names, internal, long)?,
        PoolOrder::Events { name, follow, verbose, scripted, clear } => events(name, follow, verbose, scripted, clear)?,
        PoolOrder::Iostat { form, verbose, shown, names, again } => show_iostat(&names, verbose, shown, form, again)?,
        PoolOrder::Scrub { names, order, wait } => {
            let pools = named(&names)?;
            for owned in &pools {
                done(owned, command, Request::Scrub(order))?;
            }
            for owned in pools.iter().filter(|_| wait && order == ScrubOrder::Start) {
                done(owned, "", Request::AwaitScrub)?;
            }
        }
        PoolOrder::Trim { pool, devices, order, wait } => {
            let owned = client::owned(&pool)?;
            done(&owned, command, Request::Trim { devices, order })?;
            if wait {
                done(&owned, "", Request::AwaitTrim)?;
            }
        }
        PoolOrder::Wait { name, activities } => {
            let owned = client::owned(&name)?;
            let asked = |activity: &str| activities.is_empty() || activities.iter().any(|asked| asked == activity);
            for (activity, request) in [("scrub", Request::AwaitScrub), ("trim", Request::AwaitTrim), ("free", Request::AwaitFree)] {
                if asked(activity) {
                    done(&owned, "", request)?;
                }
            }
        }
        PoolOrder::Sync { names } => {
            for owned in if names.is_empty() { client::ours() } else { named(&names)? } {
                done(&owned, "", Request::Sync)?;
            }
        }
        PoolOrder::Clear { name, device } => done(&client::owned(&name)?, command, Request::Clear { device })?,
        PoolOrder::LabelClear { device, force } => label_clear(&device, force)?,
        PoolOrder::Inspect { target, wanted } => drop(offline(target, Request::Inspect(wanted))?),
        PoolOrder::Check { target } => return check(target),
        PoolOrder::Upgrade { list: true, .. } => print(&upgrade::known())?,
        PoolOrder::Upgrade { all: false, names, .. } if names.is_empty() => print(&upgrade::lacking(&figures(&[])?.0))?,
        PoolOrder::Upgrade { all, names, .. } => {
            for owned in if all { client::ours() } else { named(&names)? } {
                owned.pool(command, Request::Upgrade, &mut say)?;
            }
        }
        PoolOrder::Version => print(&format!("nacre {}\n", env!("CARGO_PKG_VERSION")))?,
        PoolOrder::Unserved { verb, why } => return Err(Failure::new(format!("cannot {verb}: {why}"))),
    }
    Ok(ExitCode::SUCCESS)
}

/// The command line as it was typed, for the pool's history. Words with blanks are quoted.
pub fn typed(program: &str) -> String {
    let quoted = |word: OsString| {
        let word = word.to_string_lossy().into_owned();
        if word.is_empty() || word.contains(char::is_whitespace) { format!("'{word}'") } else { word }
    };
    std::iter::once(program.to_owned()).chain(std::env::args_os().skip(1).map(quoted)).collect::<Vec<_>>().join(" ")
}

/// A note for whoever waits.
pub fn tell(line: &str) {
    if !line.is_empty() {
        // A word that nobody can read is not worth failing for.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

/// A note that is the answer.
fn say(line: &str) {
    if !line.is_empty() {
        // Whoever has seen enough closes the output.
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

pub(super) fn failed(refusal: Refusal) -> Failure {
    client::failure(&refusal)
}

fn named(names: &[String]) -> Result<Vec<Owned>, Failure> {
    names.iter().map(|name| client::owned(name)).collect()
}

/// The pools of these names, all where none is named; and why others could not be had. Those that are there are shown all the same.
fn some(names: &[String]) -> (Vec<Owned>, Option<Failure>) {
    if names.is_empty() {
        return (client::all(), None);
    }
    let (mut found, mut missing) = (Vec::new(), None);
    for name in names {
        match client::owned(name) {
            Ok(owned) => found.push(owned),
            Err(failure) => note(&mut missing, failure),
        }
    }
    (found, missing)
}

/// Of several failures, the last one is for the end; those before it are told.
fn note(last: &mut Option<Failure>, failure: Failure) {
    if let Some(before) = last.replace(failure) {
        tell(&before.what);
    }
}

fn done(owned: &Owned, command: &str, request: Request) -> Result<(), Failure> {
    owned.pool(command, request, &mut tell).map(drop)
}

/// Ends the process that owns a pool, and waits for its end.
fn leave(owned: &Owned, command: &str, request: Request) -> Result<(), Failure> {
    let process = owned.process();
    done(owned, command, request)?;
    if let Ok(process) = process {
        client::wait_for_end(&process);
    }
    Ok(())
}

fn figures(names: &[String]) -> Result<(Vec<Figures>, Option<Failure>), Failure> {
    let mut all = Vec::new();
    let (pools, mut missing) = some(names);
    for owned in pools {
        match owned.pool("", Request::List, &mut tell) {
            Ok(Answer::Listed(figures)) => all.push(*figures),
            Ok(_) => {}
            // Nobody has named it: it may just have been exported.
            Err(_) if names.is_empty() => {}
            Err(failure) => note(&mut missing, failure),
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok((all, missing))
}

/// Shows something once, or again and again. What is shown hears how long ago it was shown last.
fn repeat(again: Again, mut show: impl FnMut(Option<Duration>) -> Result<(), Failure>) -> Result<(), Failure> {
    let (mut left, mut last) = (again.count, None::<Instant>);
    loop {
        match again.time {
            Some('u') => print(&format!("{}\n", nacre_admin::imported::now()))?,
            Some(_) => print(&format!("{}\n", dates::long(nacre_admin::imported::now())))?,
            None => {}
        }
        let now = Instant::now();
        show(last.map(|last| now - last))?;
        last = Some(now);
        if let Some(left) = &mut left {
            *left -= 1;
        }
        let (Some(interval), true) = (again.interval, left != Some(0)) else { return Ok(()) };
        std::thread::sleep(Duration::from_secs_f64(interval));
    }
}

fn show_status(names: &[String], json: bool, (verbose, trim): (bool, bool), only_ill: bool) -> Result<(), Failure> {
    let mut all: Vec<Status> = Vec::new();
    let (pools, mut missing) = some(names);
    for owned in pools {
        match owned.pool("", Request::Status { names: verbose || json }, &mut tell) {
            Ok(Answer::Status(status)) => all.push(*status),
            Ok(_) => {}
            Err(_) if names.is_empty() => {}
            Err(failure) => note(&mut missing, failure),
        }
    }
    all.sort_by(|a, b| a.figures.name.cmp(&b.figures.name));
    if let Some(failure) = missing.take_if(|_| all.is_empty()) {
        return Err(failure);
    }
    let none = all.is_empty();
    let well: Vec<String> = all.iter().filter(|pool| !status::is_ill(pool)).map(|pool| pool.figures.name.clone()).collect();
    all.retain(|pool| !only_ill || status::is_ill(pool));
    if json {
        print(&status::json(&all))?;
        return missing.map_or(Ok(()), Err);
    }
    let texts: Vec<String> = all.iter().map(|pool| status::text(pool, verbose, trim)).collect();
    match (none, texts.is_empty(), names) {
        (true, ..) => print("no pools available\n"),
        (false, true, []) => print("all pools are healthy\n"),
        (false, true, _) => print(&well.iter().map(|name| format!("pool '{name}' is healthy\n")).collect::<String>()),
        _ => print(&texts.join("\n")),
    }?;
    missing.map_or(Ok(()), Err)
}

fn show_iostat(names: &[String], verbose: bool, shown: Shown, form: Form, again: Again) -> Result<(), Failure> {
    let mut before = Vec::new();
    if again.not_since_import {
        before = figures(names)?.0;
        std::thread::sleep(Duration::from_secs_f64(again.interval.unwrap_or(0.0)));
    }
    repeat(again, |since| {
        let (now, missing) = figures(names)?;
        if let Some(failure) = missing {
            return Err(failure);
        }
        if now.is_empty() && !form.scripted && !form.json {
            return print("no pools available\n");
        }
        print(&match shown.histograms {
            Some(of) => histograms::text(of, &now, &before, verbose, form),
            None => iostat::table(&now, &before, since.map(|since| since.as_secs_f64()), verbose, shown, form),
        })?;
        before = now;
        Ok(())
    })
}

/// What can be seen wrong with the properties of a pool that is to be made or imported, before anything is done.
pub(super) fn check_properties(doing: &str, given: &[(String, String)]) -> Result<Vec<(String, String)>, Failure> {
    let parse =
        |(name, value): &(String, String)| properties::parse(name, value, true).map_err(|error| Failure::new(format!("{doing}: {error}")));
    given.iter().map(parse).collect()
}

/// The limit of the cache, bytes.
pub(super) fn cache(wanted: Option<u64>) -> Result<u64, Failure> {
    match wanted {
        None => Ok(CACHE),
        Some(bytes) if bytes >= CACHE_LEAST => Ok(bytes),
        Some(bytes) => Err(Failure::usage(format!("cache: {bytes} bytes are too few; {CACHE_LEAST} are the least"))),
    }
}

fn create(what: ToCreate, command: &str) -> Result<ExitCode, Failure> {
    let name = what.name;
    let doing = format!("cannot create '{}'", printable(name.as_bytes()));
    names::check_new_pool(&name).map_err(|error| {
        let next = if name.contains('/') { "use 'nacre fs create' to create a dataset" } else { "pool name may have been omitted" };
        Failure::new(format!("{doing}: {error}")).next(next)
    })?;
    if client::lives(&name) {
        return Err(Failure::new(format!("{doing}: pool already exists")));
    }
    let properties = check_properties(&doing, &what.properties)?;
    if properties.iter().any(|(name, _)| name == "readonly") {
        return Err(Failure::new(format!("{doing}: property 'readonly' can only be set at import time")));
    }
    for (property, value) in &what.root_properties {
        let property = nacre_pool::properties::dataset_property(property).map_err(|error| Failure::new(format!("{doing}: {error}")))?;
        property.parse(value, true).map_err(|error| Failure::new(format!("{doing}: {error}")))?;
    }
    if let Some(size) = what.size.filter(|size| *size < MINIMUM_DEVICE) {
        return Err(Failure::new(format!("{doing}: {} are too little: a device of a pool has at least 64M", list::bytes(size, false))));
    }
    if what.size.is_none() {
        not_in_use(&what.devices)?;
    }
    if what.only_say {
        devices::foresee(&what.devices, what.size, what.force, MINIMUM_DEVICE).map_err(failed)?;
        let layout: String = what.devices.iter().map(|device| format!("\t  {}\n", device.display())).collect();
        print(&format!("would create '{name}' with the following layout:\n\n\t{name}\n{layout}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let how = How::Create { size: what.size, force: what.force, properties: what.root_properties };
    let (altroot, cache) = (what.altroot, cache(what.cache)?);
    Start { name, devices: what.devices, how, properties, altroot, mount: true, cache, command: command.to_owned() }.start()
}

/// Whether two paths lead to one file or device.
fn same(a: &Path, b: &Path) -> bool {
    let itself = |path: &Path| {
        let there = std::fs::metadata(path).ok()?;
        let block = there.file_type().is_block_device();
        Some(if block { (None, there.rdev()) } else { (Some(there.dev()), there.ino()) })
    };
    a == b || itself(a).is_some_and(|a| Some(a) == itself(b))
}

/// Refuses what belongs to a pool that is imported, by the name of that pool: no force helps.
fn not_in_use(devices: &[PathBuf]) -> Result<(), Failure> {
    for pool in figures(&[])?.0 {
        let taken = devices.iter().find(|device| pool.devices.iter().any(|there| same(Path::new(&there.path), device)));
        if let Some(device) = taken {
            let what = format!("{} is part of active pool '{}'", device.display(), pool.name);
            let failure = Failure::new("invalid vdev specification").exit(Exit::Busy);
            return Err(failure.next(format!("the following errors must be manually repaired:\n{what}")));
        }
    }
    Ok(())
}

fn add(name: &str, devices: Vec<PathBuf>, size: Option<u64>, force: bool, only_say: bool, command: &str) -> Result<(), Failure> {
    let owned = client::owned(name)?;
    if size.is_none() {
        not_in_use(&devices)?;
    }
    if !only_say {
        return done(&owned, command, Request::Add { devices, size, force });
    }
    devices::foresee(&devices, size, force, MINIMUM_DEVICE).map_err(failed)?;
    let Answer::Listed(figures) = owned.pool("", Request::List, &mut tell)? else { return Ok(()) };
    let there = figures.devices.iter().map(|device| device.path.clone());
    let all: String =
        there.chain(devices.iter().map(|device| device.display().to_string())).map(|device| format!("\t  {device}\n")).collect();
    print(&format!("would update '{name}' to the following configuration:\n\n\t{name}\n{all}"))
}

fn history(names: &[String], internal: bool, long: bool) -> Result<(), Failure> {
    let mut text = String::new();
    let (pools, missing) = some(names);
    for owned in pools {
        let Answer::Listed(figures) = owned.pool("", Request::List, &mut tell)? else { continue };
        let Answer::History(lines) = owned.pool("", Request::History, &mut tell)? else { continue };
        text.push_str(&format!("History for '{}':\n", figures.name));
        let shown = lines.iter().filter(|line| internal || !line.internal);
        shown.for_each(|line| text.push_str(&history_line(line, long)));
        text.push('\n');
    }
    match missing {
        Some(failure) => print(&text).and(Err(failure)),
        None => print(if text.is_empty() { "no pools available\n" } else { &text }),
    }
}

fn history_line(line: &Line, long: bool) -> String {
    let at = dates::dotted(u64::try_from(line.at).unwrap_or(0));
    let text = printable(line.text.as_bytes());
    let text = if line.internal { format!("[internal in txg {}] {text}", line.txg) } else { text };
    let user = nacre_sys::accounts::user_by_id(line.uid).ok().flatten().map(|user| format!("({}) ", printable(&user.name)));
    let user = user.unwrap_or_default();
    let who = if long { format!(" [user {} {user}on {}]", line.uid, printable(line.host.as_bytes())) } else { String::new() };
    format!("{at} {text}{who}\n")
}

fn event_text(event: &Event, verbose: bool, scripted: bool) -> String {
    let between = if scripted { "\t" } else { "  " };
    let mut text = format!("{}{between}{}", dates::event(event.at), event.class);
    if verbose {
        event.details.iter().for_each(|(name, value)| text.push_str(&format!("\n        {name} = \"{}\"", printable(value.as_bytes()))));
        text.push('\n');
    }
    text
}

fn events(name: Option<String>, follow: bool, verbose: bool, scripted: bool, clear: bool) -> Result<(), Failure> {
    let mut pools: Vec<Owned> = match &name {
        Some(name) => vec![client::owned(name)?],
        None => client::all(),
    };
    if clear {
        return pools.iter().try_for_each(|owned| done(owned, "", Request::ClearEvents));
    }
    if !scripted {
        print(&format!("{:<20}  CLASS\n", "TIME"))?;
    }
    if follow {
        let Some(owned) = pools.pop().filter(|_| pools.is_empty()) else {
            return Err(Failure::usage("of which pool? -f follows the events of one"));
        };
        let mut show = |line: &str| {
            if let Ok(event) = serde_json::from_str::<Event>(line) {
                say(&event_text(&event, verbose, scripted));
            }
        };
        return owned.pool("", Request::Events { follow: true }, &mut show).map(drop);
    }
    let mut all = Vec::new();
    for owned in &pools {
        if let Answer::Events(events) = owned.pool("", Request::Events { follow: false }, &mut tell)? {
            all.extend(events);
        }
    }
    all.sort_by_key(|event| event.at);
    print(&all.iter().map(|event| event_text(event, verbose, scripted) + "\n").collect::<String>())
}

fn label_clear(path: &Path, force: bool) -> Result<(), Failure> {
    let shown = path.display().to_string();
    let device = FileDevice::open(path, true).map_err(|error| Failure::io("failed to open", &shown, &error))?;
    let found = match label::probe(&device) {
        Ok(None) => return Err(Failure::new(format!("failed to check state for {shown}: it has no label of a pool"))),
        Ok(Some(identity)) => Some(identity),
        // One that cannot be read as one of ours may be cleared on demand.
        Err(error) if !force => return Err(Failure::new(format!("{shown}: {error}")).next("-f clears it all the same")),
        Err(_) => None,
    };
    if let Some(identity) = found.filter(|identity| !force && identity.state != label::PoolState::Destroyed) {
        let state = if identity.state == label::PoolState::Exported { "an exported" } else { "a potentially active" };
        let pool = printable(identity.name.as_bytes());
        return Err(
            Failure::new(format!("{shown} is a member of {state} pool \"{pool}\"")).next("use '-f' to override the following error")
        );
    }
    label::clear(&device).map_err(|error| Failure::new(format!("failed to clear label for {shown}: {error}")))
}

/// Asks the process that owns a pool; or, where devices are named, a pool that is opened here for reading alone. Notes are the answer.
fn offline(target: Target, request: Request) -> Result<Answer, Failure> {
    if target.places.is_empty() {
        return client::owned(&target.name.unwrap_or_default())?.pool("", request, &mut say);
    }
    let imported = importing::read_only(&target)?;
    let mut said = Said;
    nacre_admin::pool::run(&imported, &nacre_admin::NoMounts, request, &mut said).map_err(failed)
}

struct Said;

impl nacre_admin::Progress for Said {
    fn note(&mut self, line: &str) -> bool {
        say(&printable(line.as_bytes()));
        true
    }
}

fn check(target: Target) -> Result<ExitCode, Failure> {
    let Answer::Checked(found) = offline(target, Request::Check)? else { return Ok(ExitCode::SUCCESS) };
    let counts = format!(
        "{} file systems, {} snapshots, {} inodes, {} frames, {} verified",
        found.datasets,
        found.snapshots,
        found.inodes,
        found.frames,
        list::bytes(found.bytes, false)
    );
    if found.problems == 0 {
        print(&format!("no problems: {counts}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::new(format!("{} problems: {counts}", found.problems))
        .exit(Exit::Failure)
        .next("`nacre pool status -v` names files that a scrub finds damaged"))
}
