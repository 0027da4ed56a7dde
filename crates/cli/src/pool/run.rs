//! Carries out the commands of pools.

use super::{
    args,
    called::{Called, named_device, same},
    chosen::{Chosen, each, figures, note, once, some},
    command, destroyed, find,
    form::PoolForm,
    histograms, importing,
    iostat::{self, IostatColumns},
    json, list, probe,
    scripts::{self, Columns},
    shapes,
    starting::{cache, check_properties, failed, start},
    status, tree, unserved, upgrade, vdevs,
    verb::{self, Again, PoolVerb, Target, ToCreate},
    version::version,
    zfs_usage,
};
use crate::{clock, output::print};
use nacre_admin::{
    pool::{
        DeviceFigures, Figures, Intended, Line, Phase, PoolAnswer, PoolRequest, Reshaping, ScrubOrder, Status, devices,
        shape::Shape, signatures::Accepted,
    },
    watch::Event,
};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::{
        cachefile,
        client::{self, Owned},
        dates,
        expected::{self, Expected},
        start::{How, Start, ZPOOL, program},
    },
    report::{printable, tell},
    runtime::{self, Whose},
};
use nacre_pool::{
    device::FileDevice,
    label, names,
    properties::{DATASET_PROPERTIES, PropertyError, dataset_property},
    store::{Access, MINIMUM_DEVICE},
};
use nacre_remote::{Address, is_address, needs_environment};
use std::{
    ffi::OsString,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

/// Runs the program as `zpool`: with the command lines of `nacre pool`.
pub fn as_zpool(arguments: Vec<OsString>) -> ExitCode {
    let table = command::command().name(ZPOOL).bin_name(ZPOOL).version(env!("CARGO_PKG_VERSION"));
    let arguments = zfs_usage::with_help(arguments);
    let matches = match table
        .clone()
        .try_get_matches_from(std::iter::once(OsString::from(ZPOOL)).chain(arguments.iter().cloned()))
    {
        Ok(matches) => matches,
        Err(error) => return zfs_usage::report(&error, &table, &arguments),
    };
    let done = verb::parse(&matches).and_then(|verb| run(as_zfs_has_it(verb)?, &typed(ZPOOL)));
    done.unwrap_or_else(|failure| zfs_usage::refuse(&failure, ZPOOL, &table, &arguments))
}

/// Refuses options that `zpool` does not have.
fn as_zfs_has_it(verb: PoolVerb) -> Result<PoolVerb, Failure> {
    let ours = match &verb {
        PoolVerb::Create(what) if what.survive => Some("--survive"),
        PoolVerb::Import(what) if what.survive => Some("--survive"),
        PoolVerb::Import(what) if what.foreground => Some("--foreground"),
        _ => None,
    };
    match ours {
        Some(option) => Err(Failure::usage(format!("invalid option '{option}': `nacre pool` has it"))),
        None => Ok(verb),
    }
}

/// Carries out a verb.
///
/// # Errors
/// The failure of a request, or output that cannot be written.
pub fn run(verb: PoolVerb, command: &str) -> Result<ExitCode, Failure> {
    match verb {
        PoolVerb::Create(what) => return create(what, command),
        PoolVerb::Destroy { name, force } => {
            if !destroyed::remove_rest(&name)? {
                leave(&client::owned(&name)?, command, PoolRequest::Destroy { force })?;
            }
        }
        PoolVerb::List { form, columns, verbose, names, everybody, again } => repeat(again, |_| {
            let (mut pools, missing) = figures(&names, everybody);
            pools.iter_mut().for_each(|pool| form.called.name(pool));
            match pools.is_empty() && !form.json {
                true if missing.is_some() || form.scripted => {}
                true => print("no pools available\n")?,
                false => print(&list::table(&pools, columns.as_deref(), verbose, form)?)?,
            }
            seen(missing, pools.is_empty())
        })?,
        PoolVerb::Status { shown, names, everybody, again } => {
            repeat(again, |_| show_status(&names, everybody, &shown))?
        }
        PoolVerb::Add { name, devices, groups, size, force, only_say: true, called } => {
            would_add(&name, (&devices, &groups), size, force, called)?
        }
        PoolVerb::Add { name, devices, groups, size, force, .. } => {
            let owned = client::owned(&name)?;
            if size.is_none() {
                not_in_use(&devices)?;
            }
            done(&owned, command, PoolRequest::Add { devices, groups, size, force, only_say: false })?;
        }
        PoolVerb::Import(what) => return importing::import(what, command),
        PoolVerb::Export { names, all, force } => {
            let lost = expected::lost(&names);
            let there = names.into_iter().filter(|name| !lost.iter().any(|lost| lost.name == *name)).collect();
            let let_go = |owned: &Owned| leave(owned, command, PoolRequest::Export { force });
            let mut last = if all { of_all(let_go).err() } else { None };
            each(&mut last, once(there), |name| let_go(&client::owned(&name)?));
            each(&mut last, lost, |lost| match force {
                // No process is running that could export it. With -f it is no longer expected to
                // be imported.
                true => lost.give_up(&runtime::own()?),
                false => Err(lost.failure()),
            });
            last.map_or(Ok(()), Err)?;
        }
        PoolVerb::Get { form, fields, properties, names } => {
            if let Some(said) = vdevs::asked(&names, &properties, fields.as_deref(), form)? {
                print(&said)?;
                return Ok(ExitCode::SUCCESS);
            }
            let (pools, missing) = figures(&names, false);
            if missing.is_none() || !pools.is_empty() {
                print(&list::properties_table(&pools, &properties, fields.as_deref(), form)?)?;
            }
            missing.map_or(Ok(()), Err)?;
        }
        PoolVerb::Expand { name, devices } => {
            let owned = client::owned(&name)?;
            let devices = known(&owned, "online", devices)?;
            if !devices.is_empty() {
                done(&owned, "", PoolRequest::Online { devices: devices.clone() })?;
            }
            done(&owned, command, PoolRequest::Expand { devices })?;
        }
        PoolVerb::Online { name, devices } => {
            let owned = client::owned(&name)?;
            let devices = known(&owned, "online", devices)?;
            done(&owned, command, PoolRequest::Online { devices })?;
        }
        PoolVerb::Offline { name, devices } => {
            let owned = client::owned(&name)?;
            let devices = known(&owned, "offline", devices)?;
            done(&owned, command, PoolRequest::Offline { devices })?;
        }
        PoolVerb::Replace { name, old, new, size, force, wait } => {
            let owned = client::owned(&name)?;
            let doing = format!("cannot replace {} with {}", old.display(), new.display());
            let old = known_as(&owned, &doing, vec![old])?.pop().unwrap_or_default();
            // A new device in the slot of the old one has the same path.
            if size.is_none() && new != old {
                not_in_use(std::slice::from_ref(&new))?;
            }
            done(&owned, command, PoolRequest::Replace { old, new, size, force })?;
            if wait {
                done(&owned, "", PoolRequest::AwaitResilver)?;
            }
        }
        PoolVerb::Attach { name, beside: group, new, only_say: true, .. } => {
            let owned = client::owned(&name)?;
            let group = shapes::parts(&owned, "attach", vec![group])?.pop().unwrap_or_default();
            shapes::plan(&owned, Intended::Attach { group, new }, false)?;
        }
        PoolVerb::Attach { name, beside, new, size, force, wait, .. } => {
            let owned = client::owned(&name)?;
            let doing = format!("cannot attach {} to {}", new.display(), beside.display());
            let is_group = shapes::is_group(&owned, &beside)?;
            let beside = match is_group {
                true => beside,
                false => known_as(&owned, &doing, vec![beside])?.pop().unwrap_or_default(),
            };
            if size.is_none() {
                not_in_use(std::slice::from_ref(&new))?;
            }
            let request = match is_group {
                true => PoolRequest::Widen { group: beside, new, size, force },
                false => PoolRequest::Attach { beside, new, size, force },
            };
            owned.pool(command, request, &mut say)?;
            if wait {
                let end = if is_group { PoolRequest::AwaitReshape(None) } else { PoolRequest::AwaitResilver };
                done(&owned, "", end)?;
            }
        }
        PoolVerb::Detach { name, device } => {
            let owned = client::owned(&name)?;
            let device = known(&owned, "detach", vec![device])?.pop().unwrap_or_default();
            done(&owned, command, PoolRequest::Detach { device })?;
        }
        PoolVerb::Changing(what) => shapes::run(what, command)?,
        PoolVerb::Set { name, value, pool } => {
            let file = cachefile::of(&[(name.clone(), value.clone())]);
            done(&client::owned(&pool)?, command, PoolRequest::Set { name, value })?;
            file.map_or(Ok(()), |path| cachefile::keep(&path, &pool))?;
        }
        PoolVerb::History { names, internal, long } => history(&names, internal, long)?,
        PoolVerb::Events { name, follow, verbose, scripted, clear } => events(name, follow, verbose, scripted, clear)?,
        PoolVerb::Iostat { form, verbose, shown, names, again } => show_iostat(&names, verbose, shown, form, again)?,
        PoolVerb::Scrub { names, all, order, rate, wait } => {
            let (mut last, mut begun) = (None, Vec::new());
            let named = || once(names).iter().map(|name| client::owned(name)).collect::<Vec<_>>();
            let found = if all { client::ours().into_iter().map(Ok).collect() } else { named() };
            each(&mut last, found, |owned| {
                let owned = owned?;
                if let Some(rate) = rate {
                    done(&owned, command, PoolRequest::Scrub(ScrubOrder::Rate(rate)))?;
                }
                // A running scrub continues at the new rate.
                if rate.is_none() || !is_scrubbing(&owned)? {
                    done(&owned, command, PoolRequest::Scrub(order))?;
                }
                begun.push(owned);
                Ok(())
            });
            let checks = wait && matches!(order, ScrubOrder::Start | ScrubOrder::StartOf(_)) && !is_zpool(command);
            each(&mut last, begun.iter().filter(|_| wait), |owned| {
                done(owned, "", PoolRequest::AwaitScrub)?;
                if checks { scrub_is_good(owned) } else { Ok(()) }
            });
            last.map_or(Ok(()), Err)?;
        }
        PoolVerb::Trim { pool, devices, order, wait } => {
            let owned = client::owned(&pool)?;
            let devices = of_pool(&owned, devices)?;
            done(&owned, command, PoolRequest::Trim { devices, order })?;
            if wait {
                done(&owned, "", PoolRequest::AwaitTrim)?;
            }
        }
        PoolVerb::Wait { name, activities } => {
            let owned = client::owned(&name)?;
            let asked = |activity: &str| activities.is_empty() || activities.iter().any(|asked| asked == activity);
            for (activity, request) in [
                ("resilver", PoolRequest::AwaitResilver),
                ("replace", PoolRequest::AwaitResilver),
                ("remove", PoolRequest::AwaitReshape(Some(Reshaping::Removal))),
                ("raidz_expand", PoolRequest::AwaitReshape(Some(Reshaping::Expansion))),
                ("convert", PoolRequest::AwaitReshape(Some(Reshaping::Conversion))),
                ("rebalance", PoolRequest::AwaitReshape(Some(Reshaping::Rebalance))),
                ("scrub", PoolRequest::AwaitScrub),
                ("trim", PoolRequest::AwaitTrim),
                ("free", PoolRequest::AwaitFree),
            ] {
                if asked(activity) {
                    done(&owned, "", request)?;
                }
            }
        }
        PoolVerb::Sync { names } => {
            if names.is_empty() {
                of_all(|owned| done(owned, "", PoolRequest::Sync))?;
            }
            of_each(names, |owned| done(owned, "", PoolRequest::Sync))?;
        }
        PoolVerb::Clear { name, device } => {
            let owned = client::owned(&name)?;
            let device = of_pool(&owned, device.into_iter().collect())?.pop();
            done(&owned, command, PoolRequest::Clear { device })?;
        }
        PoolVerb::LabelClear { device, force } => label_clear(&device, force, is_zpool(command))?,
        PoolVerb::Probe { device } => print(&probe::probe(&device)?)?,
        PoolVerb::Inspect { target, wanted } => drop(offline(target, PoolRequest::Inspect(wanted))?),
        PoolVerb::Check { target } => return check(target),
        PoolVerb::Upgrade { list: true, .. } => print(&upgrade::known())?,
        PoolVerb::Upgrade { all: false, names, .. } if names.is_empty() => {
            print(&upgrade::lacking(&figures(&[], false).0))?
        }
        PoolVerb::Upgrade { all, names, .. } => {
            if all {
                of_all(|owned| owned.pool(command, PoolRequest::Upgrade, &mut say).map(drop))?;
            }
            of_each(names, |owned| owned.pool(command, PoolRequest::Upgrade, &mut say).map(drop))?;
        }
        PoolVerb::Version { json } => print(&version(ZPOOL, command, json))?,
        PoolVerb::Unserved(asked) => return Err(unserved::refusal(&asked, list_of)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the command line as it was typed, for the pool's history. Words with blanks are quoted.
pub fn typed(program: &str) -> String {
    let quoted = |word: OsString| {
        let word = word.to_string_lossy().into_owned();
        if word.is_empty() || word.contains(char::is_whitespace) { format!("'{word}'") } else { word }
    };
    std::iter::once(program.to_owned()).chain(std::env::args_os().skip(1).map(quoted)).collect::<Vec<_>>().join(" ")
}

/// Prints a note of a pool's process as output.
pub(super) fn say(line: &str) {
    if !line.is_empty() {
        // The reader may have closed its end of the pipe.
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

/// Sends a request to each of the named pools.
fn of_each(names: Vec<String>, ask: impl Fn(&Owned) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut last = None;
    each(&mut last, once(names), |name| ask(&client::owned(&name)?));
    last.map_or(Ok(()), Err)
}

pub(super) fn done(owned: &Owned, command: &str, request: PoolRequest) -> Result<(), Failure> {
    owned.pool(command, request, &mut tell).map(drop)
}

/// Sends a request to all pools of this user. A failure is ignored for a pool that is exported
/// meanwhile.
fn of_all(ask: impl Fn(&Owned) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut last = None;
    each(&mut last, client::ours(), |owned| {
        ask(&owned).or_else(|failure| if owned.gone() { Ok(()) } else { Err(failure) })
    });
    last.map_or(Ok(()), Err)
}

/// Ends the process that owns a pool, and waits until it has ended.
fn leave(owned: &Owned, command: &str, request: PoolRequest) -> Result<(), Failure> {
    let process = owned.process();
    let answer = owned.pool(command, request, &mut tell)?;
    if let Ok(process) = process {
        client::wait_for_end(&process);
    }
    match answer {
        PoolAnswer::NotDestroyed => {
            let what = "the pool is suspended: it was let go as it was at its last commit, and is not destroyed";
            Err(Failure::new(what).next("import it when its devices answer again, then destroy it"))
        }
        _ => Ok(()),
    }
}

/// Returns the failure for the missing pools of a list: as an error where `nothing` was shown, else
/// to be reported at the end.
fn seen(missing: Option<Failure>, nothing: bool) -> Result<Option<Failure>, Failure> {
    match missing {
        Some(failure) if nothing => Err(failure),
        missing => Ok(missing),
    }
}

/// Shows something once or repeatedly; returns the failure of the last time. `show` gets the time
/// since the previous call.
fn repeat(
    again: Again,
    mut show: impl FnMut(Option<Duration>) -> Result<Option<Failure>, Failure>,
) -> Result<(), Failure> {
    let (mut left, mut last) = (again.count, None::<Instant>);
    loop {
        match again.time {
            Some('u') => print(&format!("{}\n", nacre_admin::clock::now()))?,
            Some(_) => print(&format!("{}\n", dates::long(nacre_admin::clock::now())))?,
            None => {}
        }
        let now = clock::now();
        let missing = show(last.map(|last| now - last))?;
        last = Some(now);
        if let Some(left) = &mut left {
            *left -= 1;
        }
        let (Some(interval), true) = (again.interval, left != Some(0)) else { return missing.map_or(Ok(()), Err) };
        missing.iter().for_each(|failure| tell(&failure.what));
        clock::pause(Duration::from_secs_f64(interval));
    }
}

fn show_status(names: &[String], everybody: bool, shown: &status::StatusView) -> Result<Option<Failure>, Failure> {
    let programs = shown.scripts.as_deref().map_or(Ok(Vec::new()), scripts::find)?;
    let mut all: Vec<Status> = Vec::new();
    let Chosen { owned, lost, mut missing } = some(names, everybody);
    let wanted = shown.verbose || shown.form.json;
    let (answers, failures) =
        client::ask_each(owned, move |owned| owned.pool("", PoolRequest::Status { names: wanted }, &mut |_| {}));
    for answer in answers {
        if let PoolAnswer::Status(status) = answer {
            all.push(*status);
        }
    }
    failures.into_iter().for_each(|failure| note(&mut missing, failure));
    all.extend(lost.iter().map(Expected::status));
    all.sort_by(|a, b| a.figures.name.cmp(&b.figures.name));
    all.iter_mut().for_each(|pool| shown.form.called.name(&mut pool.figures));
    if let Some(failure) = missing.take_if(|_| all.is_empty()) {
        return Err(failure);
    }
    let none = all.is_empty();
    let well: Vec<String> =
        all.iter().filter(|pool| !status::is_ill(pool)).map(|pool| pool.figures.name.clone()).collect();
    all.retain(|pool| !shown.only_ill || status::is_ill(pool));
    if shown.form.json {
        print(&json::status(&all, shown))?;
        return Ok(missing);
    }
    let more = |pool: &Status| Columns::told(&programs, pool.figures.devices.iter().map(|device| device.path.as_str()));
    let texts: Vec<String> = all.iter().map(|pool| status::text(pool, shown, &more(pool))).collect();
    match (none, texts.is_empty(), names) {
        (true, ..) => print("no pools available\n"),
        // The health of the missing pool is unknown.
        (false, true, []) if missing.is_some() => Ok(()),
        (false, true, []) => print("all pools are healthy\n"),
        (false, true, _) => print(&well.iter().map(|name| format!("pool '{name}' is healthy\n")).collect::<String>()),
        _ => print(&texts.join("\n")),
    }?;
    Ok(missing)
}

fn show_iostat(
    names: &[String],
    verbose: bool,
    shown: IostatColumns,
    form: PoolForm,
    again: Again,
) -> Result<(), Failure> {
    let mut before = Vec::new();
    if again.not_since_import {
        before = figures(names, false).0;
        clock::pause(Duration::from_secs_f64(again.interval.unwrap_or(0.0)));
    }
    repeat(again, |since| {
        let (mut now, missing) = figures(names, false);
        if missing.is_some() && now.is_empty() {
            return seen(missing, true);
        }
        now.iter_mut().for_each(|pool| form.called.name(pool));
        if now.is_empty() && !form.scripted && !form.json {
            return print("no pools available\n").map(|()| None);
        }
        let text = match shown.histograms {
            Some(of) => histograms::text(of, &now, &before, verbose, form),
            None => iostat::table(&now, &before, since.map(|since| since.as_secs_f64()), verbose, shown, form),
        };
        let headed = shown.histograms.is_none() && !form.scripted && !form.json;
        let headings = if again.headings_once && headed && since.is_some() { iostat::HEADINGS } else { 0 };
        print(&text.split_inclusive('\n').skip(headings).collect::<String>())?;
        before = now;
        Ok(missing)
    })
}

fn create(what: ToCreate, command: &str) -> Result<ExitCode, Failure> {
    let name = what.name;
    let doing = format!("cannot create '{}'", printable(name.as_bytes()));
    names::check_new_pool(&name).map_err(|error| {
        let next = if name.contains('/') {
            "use 'nacre fs create' to create a dataset"
        } else {
            "pool name may have been omitted"
        };
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
        let refused =
            |error: PropertyError| Failure::new(format!("{doing}: {error}")).next(error.next(DATASET_PROPERTIES));
        dataset_property(property).and_then(|property| property.parse(value, true)).map_err(refused)?;
    }
    if let Some(size) = what.size.filter(|size| *size < MINIMUM_DEVICE) {
        return Err(Failure::usage(format!(
            "{doing}: {} are too little: a device of a pool has at least 64M",
            list::bytes(size, false)
        )));
    }
    if what.size.is_none() {
        not_in_use(&what.devices)?;
    }
    if what.only_say {
        let groups: Vec<_> = Shape::read(&what.groups).map_err(failed)?.all().copied().collect();
        let bounds = ("cannot create", MINIMUM_DEVICE);
        if !what.devices.iter().any(|place| is_address(place)) {
            let accepted = Accepted::at_creation(what.force, is_zpool(command));
            devices::foresee(&what.devices, &groups, what.size, accepted, bounds).map_err(failed)?;
        }
        let mut layout = Layout::default();
        layout.add(Called::default(), &what.devices, &what.groups);
        print(&format!("would create '{name}' with the following layout:\n\n\t{name}\n{}", layout.text()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let [place] = what.devices.as_slice()
        && let Ok(address) = Address::parse(&place.to_string_lossy())
        && needs_environment(&address)
    {
        tell(&format!(
            "the credentials for '{}' are those of this environment: an import after a restart needs them again; --profile or --credentials-file names some that it finds by itself",
            address.name()
        ));
    }
    let how = How::Create { size: what.size, force: what.force, properties: what.root_properties, groups: what.groups };
    let (altroot, cache, survive) = (what.altroot, cache(what.cache)?, what.survive);
    start(Start {
        name,
        devices: what.devices,
        how,
        properties,
        altroot,
        mount: true,
        cache,
        command: command.to_owned(),
        survive,
        foreground: false,
    })
}

/// The layout that `-n` shows: lines for data, metadata, log and spares.
#[derive(Default)]
struct Layout([String; 4]);

impl Layout {
    /// Returns the layout of an existing pool. Groups are shown by their kind only.
    fn of(figures: &Figures) -> Self {
        let line = |(depth, vdev): (usize, tree::Vdev<'_>)| {
            let name = vdev.name();
            let is_device = matches!(vdev, tree::Vdev::Leaf(_));
            let name = if is_device { &*name } else { name.split('-').next().unwrap_or(&name) };
            format!("\t{}{name}\n", "  ".repeat(depth))
        };
        let part = |class| tree::rows(figures, class).into_iter().map(line).collect::<String>();
        let [data, special, log] = tree::PARTS.map(|(class, _)| part(class));
        let spares = tree::spares(figures).map(|spare| format!("\t  {}\n", spare.name())).collect();
        Self([data, special, log, spares])
    }

    /// Adds further groups.
    fn add(&mut self, called: Called, devices: &[PathBuf], groups: &[(String, usize)]) {
        let mut rest = devices.iter();
        let line = |part: &mut String, indent: &str, device: &Path| {
            part.push_str(&format!("\t{indent}{}\n", called.path(&device.display().to_string())));
        };
        let Self([data, special, log, spares]) = self;
        for (word, count) in groups {
            let (class, kind) = word.split_once(' ').unwrap_or((word, ""));
            let (part, kind) = match class {
                "special" => (&mut *special, kind),
                "log" => (&mut *log, kind),
                args::SPARE => (&mut *spares, ""),
                args::PLAIN => (&mut *data, ""),
                kind => (&mut *data, kind),
            };
            if !kind.is_empty() {
                part.push_str(&format!("\t  {kind}\n"));
            }
            let indent = if kind.is_empty() { "  " } else { "    " };
            rest.by_ref().take(*count).for_each(|device| line(part, indent, device));
        }
        rest.for_each(|device| line(data, "  ", device));
    }

    fn text(&self) -> String {
        let headings = tree::PARTS.map(|(_, heading)| heading).into_iter().chain([Some("spares")]);
        let parts = self.0.iter().zip(headings).filter(|(part, _)| !part.is_empty());
        parts.map(|(part, heading)| heading.map_or(String::new(), |heading| format!("\t{heading}\n")) + part).collect()
    }
}

/// Refuses devices of an imported pool with the pool's name; -f does not override this.
pub(super) fn not_in_use(devices: &[PathBuf]) -> Result<(), Failure> {
    for pool in figures(&[], false).0 {
        // Removed devices are free.
        let own = || pool.devices.iter().filter(|there| there.role != "removed");
        let leads = |there: &DeviceFigures, device: &Path| match Address::parse(&device.to_string_lossy()) {
            Ok(address) => there.path == address.name() && there.endpoint == address.endpoint(),
            Err(_) => same(Path::new(&there.path), device),
        };
        let taken = devices.iter().find(|device| own().any(|there| leads(there, device)));
        if let Some(device) = taken {
            let idle = |there: &&DeviceFigures| there.role == args::SPARE && there.beside.is_none();
            let is_spare = own().filter(idle).any(|there| leads(there, device));
            let device = find::shown(device);
            let what = match is_spare {
                true => format!("{device} is reserved as a hot spare for pool {}", pool.name),
                false => format!("{device} is part of active pool '{}'", pool.name),
            };
            let failure = Failure::new("invalid vdev specification").exit(Exit::Busy);
            return Err(failure.next(format!("the following errors must be manually repaired:\n{what}")));
        }
    }
    Ok(())
}

/// Returns whether a command line in the history of a pool is one of `zpool`, which has its own
/// exit codes.
fn is_zpool(command: &str) -> bool {
    program(command) == ZPOOL
}

/// Checks that a scrub has finished without finding errors.
///
/// # Errors
/// The scrub has found errors, or has not finished.
fn scrub_is_good(owned: &Owned) -> Result<(), Failure> {
    let PoolAnswer::Status(status) = owned.pool("", PoolRequest::Status { names: false }, &mut tell)? else {
        return Ok(());
    };
    let (name, scrub) = (printable(status.figures.name.as_bytes()), &status.scrub);
    match scrub.phase {
        Phase::Finished if scrub.errors == 0 => Ok(()),
        Phase::Finished => Err(Failure::new(format!("the scrub of '{name}' has found {} errors", scrub.errors))
            .next(format!("`nacre pool status -v {name}` names what is damaged"))),
        Phase::Paused => Err(Failure::new(format!("the scrub of '{name}' was paused"))
            .next(format!("`nacre pool scrub -w {name}` goes on with it"))),
        Phase::Never | Phase::Running | Phase::Canceled => {
            Err(Failure::new(format!("the scrub of '{name}' did not come to its end: {} errors so far", scrub.errors))
                .next(format!("`nacre pool events {name}` says why, where it was not stopped")))
        }
    }
}

fn is_scrubbing(owned: &Owned) -> Result<bool, Failure> {
    match owned.pool("", PoolRequest::Status { names: false }, &mut tell)? {
        PoolAnswer::Status(status) => Ok(status.scrub.phase == Phase::Running),
        _ => Ok(false),
    }
}

fn would_add(
    name: &str,
    (devices, groups): (&[PathBuf], &[(String, usize)]),
    size: Option<u64>,
    force: bool,
    called: Called,
) -> Result<(), Failure> {
    let owned = client::owned(name)?;
    if size.is_none() {
        not_in_use(devices)?;
    }
    let request = PoolRequest::Add { devices: devices.to_vec(), groups: groups.to_vec(), size, force, only_say: true };
    done(&owned, "", request)?;
    let mut figures = list_of(&owned)?;
    called.name(&mut figures);
    let mut layout = Layout::of(&figures);
    layout.add(called, devices, groups);
    print(&format!("would update '{name}' to the following configuration:\n\n\t{name}\n{}", layout.text()))
}

pub(super) fn list_of(owned: &Owned) -> Result<Figures, Failure> {
    match owned.pool("", PoolRequest::List, &mut tell)? {
        PoolAnswer::Listed(figures) => Ok(*figures),
        _ => Ok(Figures::default()),
    }
}

/// Returns the paths under which the pool knows these devices; `verb` is named in errors.
fn known(owned: &Owned, verb: &str, words: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    let each = |word| {
        let doing = format!("cannot {verb} {}", Path::display(word));
        known_as(owned, &doing, vec![word.to_owned()])
    };
    Ok(words.iter().map(|word| each(word)).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Returns the paths under which the pool knows these devices; `doing` begins the error message.
fn known_as(owned: &Owned, doing: &str, words: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    let figures = list_of(owned)?;
    if words.iter().any(|word| named_device(&figures, word).is_none()) {
        return Err(Failure::new(format!("{doing}: no such device in pool")).exit(Exit::NotFound));
    }
    of_pool(owned, words)
}

/// Returns the paths under which the pool knows these devices; unknown words are unchanged, so that
/// the pool's own error names them.
fn of_pool(owned: &Owned, words: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    if words.is_empty() {
        return Ok(words);
    }
    let figures = list_of(owned)?;
    Ok(words
        .into_iter()
        .map(|word| named_device(&figures, &word).map_or(word, |device| PathBuf::from(&device.path)))
        .collect())
}

fn history(names: &[String], internal: bool, long: bool) -> Result<(), Failure> {
    let mut text = String::new();
    let Chosen { owned, lost, mut missing } = some(names, false);
    lost.iter().for_each(|lost| note(&mut missing, lost.failure()));
    each(&mut missing, owned, |owned| {
        let figures = list_of(&owned)?;
        let PoolAnswer::History(lines) = owned.pool("", PoolRequest::History, &mut tell)? else { return Ok(()) };
        text.push_str(&format!("History for '{}':\n", figures.name));
        let shown = lines.iter().filter(|line| internal || !line.internal);
        shown.for_each(|line| text.push_str(&history_line(line, long)));
        text.push('\n');
        Ok(())
    });
    match missing {
        Some(failure) => print(&text).and(Err(failure)),
        None => print(if text.is_empty() { "no pools available\n" } else { &text }),
    }
}

fn history_line(line: &Line, long: bool) -> String {
    let at = dates::dotted(u64::try_from(line.at).unwrap_or(0));
    let text = printable(line.text.as_bytes());
    let text = if line.internal { format!("[internal in txg {}] {text}", line.txg) } else { text };
    let user =
        nacre_sys::accounts::user_by_id(line.uid).ok().flatten().map(|user| format!("({}) ", printable(&user.name)));
    let user = user.unwrap_or_default();
    let who =
        if long { format!(" [user {} {user}on {}]", line.uid, printable(line.host.as_bytes())) } else { String::new() };
    format!("{at} {text}{who}\n")
}

fn event_text(event: &Event, verbose: bool, scripted: bool) -> String {
    let between = if scripted { "\t" } else { "  " };
    let mut text = format!("{}{between}{}", dates::event(event.at), event.class);
    if verbose {
        event.details.iter().for_each(|(name, value)| {
            text.push_str(&format!("\n        {name} = \"{}\"", printable(value.as_bytes())))
        });
        text.push('\n');
    }
    text
}

fn events(name: Option<String>, follow: bool, verbose: bool, scripted: bool, clear: bool) -> Result<(), Failure> {
    let mut pools: Vec<Owned> = match &name {
        Some(name) => vec![client::owned(name)?],
        None => client::all(&Whose::Ours),
    };
    if clear {
        return pools.iter().try_for_each(|owned| done(owned, "", PoolRequest::ClearEvents));
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
        return owned.pool("", PoolRequest::Events { follow: true }, &mut show).map(drop);
    }
    let mut all = Vec::new();
    for owned in &pools {
        if let PoolAnswer::Events(events) = owned.pool("", PoolRequest::Events { follow: false }, &mut tell)? {
            all.extend(events);
        }
    }
    all.sort_by_key(|event| event.at);
    print(&all.iter().map(|event| event_text(event, verbose, scripted) + "\n").collect::<String>())
}

fn label_clear(path: &Path, force: bool, is_zpool: bool) -> Result<(), Failure> {
    let shown = path.display().to_string();
    let device = FileDevice::open(path, true).map_err(|error| {
        let pool = (error.kind() == ErrorKind::ResourceBusy).then(|| pool_with(path)).flatten();
        match pool {
            Some(pool) => {
                Failure::new(format!("{shown} is a member (ACTIVE) of pool \"{}\"", printable(pool.as_bytes())))
                    .exit(Exit::Busy)
                    .next("`nacre pool remove`, `detach` or `export` frees it")
            }
            None => Failure::io("failed to open", &shown, &error),
        }
    })?;
    let found = match label::probe(&device) {
        Ok(None) => return Err(Failure::new(format!("failed to read label from {shown}: it has no label of a pool"))),
        Ok(Some(identity)) => Some(identity),
        // With -f, labels that cannot be read as a pool's may be cleared.
        Err(error) if !force => return Err(Failure::new(format!("{shown}: {error}")).next("-f clears it all the same")),
        Err(_) => None,
    };
    if let Some(identity) = found.filter(|identity| !force && identity.state != label::PoolState::Destroyed) {
        let state = if identity.state == label::PoolState::Exported { "exported" } else { "potentially active" };
        let member = format!("{shown} is a member of {state} pool \"{}\"", printable(identity.name.as_bytes()));
        return Err(if is_zpool {
            Failure::new("use '-f' to override the following error:").next(member)
        } else {
            Failure::new(member).next("-f clears the label all the same: the pool can no longer be imported from it")
        });
    }
    label::clear(&device).map_err(|error| Failure::new(format!("failed to clear label for {shown}: {error}")))
}

/// Returns the name of the imported pool that the device's label names and whose device this is: a
/// path alone may be another disk's now.
fn pool_with(path: &Path) -> Option<String> {
    let identity = label::probe(&FileDevice::open_unlocked(path).ok()?).ok().flatten()?;
    let is_it = |device: &DeviceFigures| device.role != "removed" && same(Path::new(&device.path), path);
    let mut pools = figures(&[], false).0.into_iter();
    pools.find(|pool| pool.name == identity.name && pool.devices.iter().any(is_it)).map(|pool| pool.name)
}

/// Sends a request to the process that owns a pool, or, where devices are named, opens the pool in
/// this process, read-only. Notes are printed as output.
fn offline(target: Target, request: PoolRequest) -> Result<PoolAnswer, Failure> {
    if target.places.is_empty() {
        return client::owned(&target.name.unwrap_or_default())?.pool("", request, &mut say);
    }
    // Damage must not prevent the inspection of intact parts.
    let access = if matches!(request, PoolRequest::Inspect(_)) { Access::Salvage } else { Access::ReadOnly };
    let imported = importing::read_only(&target, access)?;
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
    let PoolAnswer::Checked(found) = offline(target, PoolRequest::Check)? else { return Ok(ExitCode::SUCCESS) };
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
